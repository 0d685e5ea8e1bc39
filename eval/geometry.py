"""Measures of how tokens lie in a model's hidden states, as sums over batches: nothing here needs all tokens at once.

Each accumulator takes batches by `update` and the sums of another process by `merge`; `result` is what has been
measured so far. All sums are in float64, and their size follows from the width and the number of classes, never from
the number of tokens. The measures are those by which arXiv 2602.09297 describes Laplacian heads, each after the paper
that is named with it.
"""

import math
from collections.abc import Callable, Iterator

import torch

# A variance this small beside the mean square is rounding.
ROUNDING = torch.finfo(torch.float64).eps
SHARES = (90, 95, 99)
# Elements of a block of pairs of classes.
BLOCK = 2**22
# Squared distances below so much of the squared lengths have lost too many digits when they come from products.
NEAR = 1e-4


class NotFiniteError(ValueError):
    """What was to be measured has NaN or infinity in it."""


class Accumulator:
    """Sums over batches. A subclass keeps tensors, numbers and other accumulators as attributes."""

    def merge(self, other: "Accumulator") -> None:
        """Take in what another accumulator of the same kind has summed, as if its batches had come here."""
        for name, value in vars(other).items():
            own = getattr(self, name)
            if isinstance(own, Accumulator):
                own.merge(value)
            elif value is not None:
                setattr(self, name, value if own is None else own + value)

    def cpu(self) -> "Accumulator":
        """The same, with its tensors in main memory, where every process can read them."""
        for name, value in vars(self).items():
            if isinstance(value, torch.Tensor | Accumulator):
                setattr(self, name, value.cpu())
        return self


class Groups(Accumulator):
    """Count, mean and squared deviations of the vectors of each class.

    A batch is merged as another process's sums are, by the differences of means (Chan, Golub & LeVeque, 1983), so that
    nothing cancels where the vectors lie far from the origin or close to their class's mean.

    Attributes (None before the first vector):
        labels: (classes,) int64, in ascending order.
        counts: (classes,), vectors or the sum of their weights.
        means: (classes, width).
        squares: (classes,), the sum of |x - mean of its class|^2.
        within: (width, width), the sum of (x - mean of its class)(x - mean of its class)^T over all classes.

    Args:
        scatter: whether `within` is kept.
    """

    def __init__(self, scatter: bool = False):
        self.scatter = scatter
        self.labels = self.counts = self.means = self.squares = self.within = None

    def update(self, vectors: torch.Tensor, labels: torch.Tensor | None = None, weights: torch.Tensor | None = None):
        """Take in vectors.

        Args:
            vectors: (vectors, width), any floating dtype.
            labels: (vectors,), the class of each, those below 0 are left out; None is one class for all.
            weights: (vectors,), how often each counts; None is once.

        Raises:
            NotFiniteError: there is NaN or infinity in them.
        """
        vectors = float64(vectors)
        if labels is None:
            labels = torch.zeros(len(vectors), dtype=torch.int64)
        labels = labels.to(vectors.device)
        if (labels < 0).any():
            kept = labels >= 0
            vectors, labels, weights = vectors[kept], labels[kept], None if weights is None else weights[kept]
        if not len(vectors):
            return
        weights = vectors.new_ones(len(vectors)) if weights is None else weights.double()
        batch = Groups(self.scatter)
        batch.labels, which = labels.unique(return_inverse=True)
        classes = len(batch.labels)
        batch.counts = vectors.new_zeros(classes).index_add(0, which, weights)
        sums = vectors.new_zeros(classes, vectors.shape[1]).index_add(0, which, weights[:, None] * vectors)
        batch.means = sums / batch.counts[:, None]
        deviations = vectors - batch.means[which]
        batch.squares = vectors.new_zeros(classes).index_add(0, which, weights * deviations.square().sum(1))
        _check(batch.squares)
        if self.scatter:
            batch.within = (weights[:, None] * deviations).mT @ deviations
        self.merge(batch)

    def merge(self, other: "Groups") -> None:
        if other.labels is None:
            return
        if self.labels is None:
            self.labels, self.counts, self.means = other.labels[:0], other.counts[:0], other.means[:0]
            self.squares, self.within = other.squares[:0], None if other.within is None else 0 * other.within
        union = torch.cat([self.labels, other.labels]).unique()
        if len(union) > len(self.labels):
            there = torch.searchsorted(union, self.labels)
            for name in ("counts", "means", "squares"):
                value = getattr(self, name)
                setattr(self, name, value.new_zeros(len(union), *value.shape[1:]).index_copy(0, there, value))
            self.labels = union
        rows = torch.searchsorted(self.labels, other.labels)
        before, counts = self.counts[rows], self.counts[rows] + other.counts
        apart = other.means - self.means[rows]
        weights = before * other.counts / counts
        self.squares[rows] += other.squares + weights * apart.square().sum(1)
        self.means[rows] += (other.counts / counts)[:, None] * apart
        self.counts[rows] = counts
        if self.scatter:
            self.within = self.within + other.within + (weights[:, None] * apart).mT @ apart

    def variance(self) -> tuple[float, float]:
        """Mean squared distance of vectors from the mean of their class, and of these from the mean of all vectors.

        Their sum is the variance of the vectors: a one-way analysis of variance.
        """
        total = self.counts.sum()
        shares = self.counts / total
        mean = shares @ self.means
        return (self.squares.sum() / total).item(), (shares @ (self.means - mean).square().sum(1)).item()


class Variance(Accumulator):
    """Analysis of the variance of tokens: within sequences, within classes of sequences, between classes.

    Over all tokens x: E|x - mean of its sequence|^2, E|mean of its sequence - mean of its class|^2 and E|mean of its
    class - mean of all|^2, which sum to E|x - mean of all|^2. Without classes the last two are one, between sequences.
    """

    def __init__(self):
        self.within_sequence = 0.0
        self.tokens = 0
        self.square = 0.0
        self.sequences = Groups()
        self.classes = False

    def update(self, hidden: torch.Tensor, mask: torch.Tensor | None = None, labels: torch.Tensor | None = None):
        """Take in whole sequences.

        Args:
            hidden: (sequences, tokens, width).
            mask: (sequences, tokens), True for the tokens that count; None is all.
            labels: (sequences,), the class of each, those below 0 are left out; None if there are no classes.

        Raises:
            NotFiniteError: there is NaN or infinity in a token that counts.
        """
        if labels is not None and (labels < 0).any():
            hidden, mask, labels = hidden[labels >= 0], None if mask is None else mask[labels >= 0], labels[labels >= 0]
        hidden, mask, counts = _masked(hidden, mask)
        means, deviations = _centred(hidden, mask, counts)
        within = _square(deviations)
        _check(within)
        self.sequences.update(means[counts > 0], None if labels is None else labels[counts > 0], counts[counts > 0])
        self.within_sequence += within.item()
        self.square += (within + counts.double() @ means.square().sum(1)).item()  # whose rounding is not variance
        self.tokens += int(counts.sum())
        self.classes = self.classes or labels is not None

    def result(self) -> dict:
        """total, within_sequence and between_sequence, with classes also within_class and between_class; and shares."""
        within = self.within_sequence / self.tokens
        within_class, between_class = self.sequences.variance()
        between = within_class + between_class
        result = {"total": within + between, "within_sequence": within, "between_sequence": between}
        if self.classes:
            result |= {"within_class": within_class, "between_class": between_class}
        if result["total"] <= ROUNDING * self.square / self.tokens:
            result = dict.fromkeys(result, 0.0)
        return with_shares(result)


def with_shares(variance: dict[str, float]) -> dict:
    """An analysis of variance with its shares, each part divided by the total, or 0 where nothing varies.

    Where there is a part between classes also snr, the signal-to-noise ratio between_class / (total - between_class).
    """
    total = variance["total"]
    shares = {name: value / (total or 1.0) for name, value in variance.items() if name != "total"}
    between = variance.get("between_class")
    snr = {} if between is None else {"snr": ratio(between, total - between)}
    return {**variance, **snr, "shares": shares}


class Spectrum(Accumulator):
    """Eigenvalues of the covariance of tokens: of all pooled, and of each sequence by itself, as the mean of those.

    Of each: eigenvalues, in descending order; components_90, _95 and _99, how many of them hold so many percent of the
    variance; effective_rank, the exponential of the entropy of their shares (Roy & Vetterli, 2007). 0 where nothing
    varies.
    """

    def __init__(self):
        self.pooled = Groups(scatter=True)
        self.square = 0.0
        self.sequences = 0
        self.sums = None  # (width + number of SHARES + 1,), eigenvalues, components and effective rank

    def update(self, hidden: torch.Tensor, mask: torch.Tensor | None = None) -> None:
        """Take in whole sequences, as `Variance.update` does."""
        hidden, mask, counts = _masked(hidden, mask)
        if not counts.all():
            hidden, mask, counts = hidden[counts > 0], mask[counts > 0], counts[counts > 0]
        if not len(counts):
            return
        self.pooled.update(hidden.flatten(0, 1) if mask is None else hidden[mask])
        squares = hidden.square().sum((1, 2))
        self.square += squares.sum().item()
        _, centred = _centred(hidden, mask, counts)
        tokens, width = centred.shape[1:]
        # The smaller of the two products has the eigenvalues that are not zero.
        product = centred.mT @ centred if width < tokens else centred @ centred.mT
        eigenvalues = torch.linalg.eigvalsh(product).flip(-1).clamp(min=0) / counts[:, None]
        figures = [_spectrum_figures(*each) for each in zip(eigenvalues, squares / counts, strict=True)]
        padded = torch.nn.functional.pad(eigenvalues, (0, width - eigenvalues.shape[1])).sum(0)
        sums = torch.cat([padded, torch.tensor(figures, dtype=torch.float64, device=padded.device).sum(0)])
        self.sums = sums if self.sums is None else self.sums + sums
        self.sequences += len(counts)

    def result(self) -> dict:
        """pooled and per_sequence."""
        eigenvalues, _ = self.principal()
        figures = _spectrum_figures(eigenvalues, self.square / self.pooled.counts.sum())
        means = self.sums / self.sequences
        width = len(eigenvalues)
        return {
            "pooled": _named_spectrum(eigenvalues, figures),
            "per_sequence": _named_spectrum(means[:width], means[width:].tolist()),
        }

    def principal(self) -> tuple[torch.Tensor, torch.Tensor]:
        """(width,) eigenvalues of the pooled covariance in descending order, and (width, width) components as rows.

        Each component has the sign that makes its largest entry positive.
        """
        eigenvalues, vectors = torch.linalg.eigh(self.pooled.within / self.pooled.counts.sum())
        components = vectors.mT.flip(0)
        largest = components.gather(1, components.abs().argmax(1, keepdim=True))
        return eigenvalues.flip(0).clamp(min=0), components * largest.sign()


def _spectrum_figures(eigenvalues: torch.Tensor, mean_square: torch.Tensor) -> list[float]:
    """Components for each of SHARES, and the effective rank."""
    held = eigenvalues.cumsum(0)
    if held[-1] <= ROUNDING * mean_square:
        return [0.0] * (len(SHARES) + 1)
    components = [float((held < share / 100 * held[-1]).sum() + 1) for share in SHARES]
    shares = eigenvalues / held[-1]
    return [*components, (-torch.xlogy(shares, shares).sum()).exp().item()]


def _named_spectrum(eigenvalues: torch.Tensor, figures: list[float]) -> dict:
    names = [*(f"components_{share}" for share in SHARES), "effective_rank"]
    return {"eigenvalues": eigenvalues.tolist(), **dict(zip(names, figures, strict=True))}


class Similarity(Accumulator):
    """Mean cosine between two different tokens: of the same sequence, as the mean of the sequences' means, and of all.

    A vector of zeros has a cosine of 0 to every other. None where there are no two tokens.
    """

    def __init__(self):
        self.sequences = 0
        self.within_sequence = 0.0
        self.tokens = 0
        self.units = None  # (width,), the sum of the unit vectors
        self.lengths = 0.0  # of their squared lengths, which are 1 but for vectors of zeros

    def update(self, hidden: torch.Tensor, mask: torch.Tensor | None = None) -> None:
        """Take in whole sequences, as `Variance.update` does."""
        hidden, mask, counts = _masked(hidden, mask)
        units = torch.nn.functional.normalize(hidden, dim=-1, eps=torch.finfo(torch.float64).tiny)
        sums, lengths = units.sum(1), units.square().sum((1, 2))
        _check(sums)
        several = counts > 1
        cosines = (sums.square().sum(1) - lengths)[several] / (counts * (counts - 1))[several]
        self.within_sequence += cosines.sum().item()
        self.sequences += int(several.sum())
        self.tokens += int(counts.sum())
        self.lengths += lengths.sum().item()
        self.units = sums.sum(0) if self.units is None else self.units + sums.sum(0)

    def result(self) -> dict:
        """within_sequence and pooled, from -1 to 1."""
        pairs = self.tokens * (self.tokens - 1)
        return {
            "within_sequence": ratio(self.within_sequence, self.sequences),
            "pooled": ratio(self.units.square().sum().item() - self.lengths, pairs),
        }


class AttentionEntropy(Accumulator):
    """Mean entropy of the attention P of each head over its queries, in nats and as a share of the largest possible.

    For a query that sees n keys, those to which some head gives any weight, the largest is log n; queries that see one
    key have no share.
    """

    def __init__(self):
        self.nats = self.shares = None  # (heads,), sums over queries
        self.queries = self.with_shares = 0

    def update(self, attention: torch.Tensor, mask: torch.Tensor | None = None) -> None:
        """Take in whole sequences.

        Args:
            attention: (sequences, heads, queries, keys), the softmax probabilities.
            mask: (sequences, queries), True for those that count; None is all.

        Raises:
            NotFiniteError: there is NaN or infinity in a row that counts.
        """
        attention = float64(attention)
        sequences, _, queries, _ = attention.shape
        if mask is None:
            mask = torch.ones(sequences, queries, dtype=torch.bool, device=attention.device)
        rows = attention.transpose(1, 2)[mask]  # (queries that count, heads, keys)
        entropy = -torch.xlogy(rows, rows).sum(-1)
        _check(rows)
        seen = (rows > 0).any(1).sum(1)
        shares = entropy[seen > 1] / seen[seen > 1, None].double().log()
        self.nats = entropy.sum(0) if self.nats is None else self.nats + entropy.sum(0)
        self.shares = shares.sum(0) if self.shares is None else self.shares + shares.sum(0)
        self.queries += len(seen)
        self.with_shares += int((seen > 1).sum())

    def result(self) -> dict:
        """nats and share_of_most, each a list with a figure for each head."""
        return {
            "nats": (self.nats / max(self.queries, 1)).tolist(),
            "share_of_most": (self.shares / max(self.with_shares, 1)).tolist(),
        }


class NearestMean(Accumulator):
    """What takes a second pass, when the means of the classes are known: NC4, and NC1 by cosines.

    nc4: the share of vectors whose nearest class mean is not the class that the network decides for (Papyan, Han &
    Donoho, 2020). nc1_cosine: 1 - E cos(x - mean of the class means, mean of its class - mean of the class means).

    Args:
        groups: of the first pass, over the same vectors.
    """

    def __init__(self, groups: Groups):
        self.labels, self.means = groups.labels, groups.means
        self.differ = self.decided = self.vectors = 0
        self.cosines = 0.0

    def update(self, vectors: torch.Tensor, labels: torch.Tensor, decisions: torch.Tensor | None = None) -> None:
        """Take in vectors.

        Args:
            vectors: (vectors, width).
            labels: (vectors,), the class of each; those below 0 are left out.
            decisions: (vectors,), the class that the network decides for; None where it decides nothing.
        """
        kept = labels >= 0
        vectors, rows = float64(vectors[kept]), torch.searchsorted(self.labels, labels[kept])
        centre = self.means.mean(0)
        vectors, means = vectors - centre, self.means - centre
        self.cosines += torch.cosine_similarity(vectors, means[rows], dim=1, eps=0).nan_to_num().sum().item()
        self.vectors += len(vectors)
        if decisions is not None:
            # Of |x - mean|^2 the part that differs between the means.
            nearest = (means.square().sum(1) - 2 * vectors @ means.mT).argmin(1)
            self.differ += int((self.labels[nearest] != decisions[kept]).sum())
            self.decided += len(vectors)

    def merge(self, other: "NearestMean") -> None:
        for name in ("differ", "decided", "vectors", "cosines"):
            setattr(self, name, getattr(self, name) + getattr(other, name))

    def result(self) -> dict:
        """nc1_cosine, and nc4 where the network decides; None where there is one class."""
        several = len(self.labels) > 1
        result = {"nc1_cosine": 1 - self.cosines / self.vectors if several else None}
        if self.decided:
            result["nc4"] = self.differ / self.decided if several else None
        return result


def collapse(groups: Groups, classifier: torch.Tensor | None = None) -> dict:
    """How far classes have collapsed to their means, and the means to a simplex.

    With m_c the class means less their mean, C classes, and Sigma_W = E(x - mean of its class)(...)^T:

    - nc1: tr(Sigma_W pinv(Sigma_B)) / C, Sigma_B = mean of m_c m_c^T; where the groups keep their scatter
    - nc2_equinorm: standard deviation (of a sample) of |m_c| divided by their mean; nc2_equiangular: standard deviation
      of the cosines between two of them; nc2_maximal_angle: mean of |cosine + 1/(C - 1)|. Of the means, and of the
      classifier's rows, which are not centred
    - nc3: |W/|W| - M/|M||, Frobenius norms of the (C, width) matrices of rows and of means; nc3_squared
    - cdnv: mean over pairs of classes of (v_a + v_b) / (2 |m_a - m_b|^2), v the variance of a class (Galanti, Gyorgy &
      Hutter, 2022); cdnv_within: mean variance of a class; cdnv_between: mean of |m_a - m_b|^2 over pairs;
      separability: cdnv_between / cdnv_within
    - where classes exceed the width: gnc2, mean and standard deviation over pairs of log(1/|m_a/|m_a| - m_b/|m_b||);
      unc3, mean and variance of cos(w_c, m_c) (Wu & Papyan, arXiv 2405.17767)

    NC1 to NC3 are those of Papyan, Han & Donoho (2020). Means of classes count alike, however many vectors they have.

    Args:
        groups: of the vectors by class.
        classifier: (classes of the model, width), its weight; rows are found by label. None where there is none.

    Returns:
        classes, samples and the above. None where a figure is not defined: with one class, or where means coincide.
    """
    means, variances = groups.means, groups.squares / groups.counts
    classes = len(means)
    centred = means - means.mean(0)
    units = torch.nn.functional.normalize(centred, dim=1, eps=0)

    # Below this, two means are apart by rounding alone.
    rounding = 16 * ROUNDING * means.norm(dim=1).max()

    def distances(some):
        return _squared_distances(centred[some], centred, rounding)

    def cdnv(some):
        return (variances[some, None] + variances) / 2 / distances(some)

    def gaps(some):
        return -_squared_distances(units[some], units, rounding / centred.norm(dim=1).min()).log() / 2

    result = {"classes": classes, "samples": int(groups.counts.sum())}
    if groups.scatter:
        result["nc1"] = _trace_ratio(groups.within / groups.counts.sum(), centred)
    result |= {f"{name}_means": value for name, value in _simplex(centred).items()}
    result["cdnv"] = _mean_over_pairs(cdnv, classes)
    result["cdnv_within"] = number(variances.mean())
    result["cdnv_between"] = _mean_over_pairs(distances, classes)
    result["separability"] = ratio(result["cdnv_between"], result["cdnv_within"])
    result["gnc2_mean"] = _mean_over_pairs(gaps, classes)
    result["gnc2_std"] = _deviation_over_pairs(gaps, classes)
    if classifier is not None:
        rows = classifier[groups.labels].double()
        result |= {f"{name}_classifier": value for name, value in _simplex(rows).items()}
        apart = (rows / rows.norm() - centred / centred.norm()).norm()
        result["nc3"], result["nc3_squared"] = number(apart), number(apart.square())
        cosines = (torch.nn.functional.normalize(rows, dim=1, eps=0) * units).sum(1)
        result["unc3_mean"], result["unc3_variance"] = number(cosines.mean()), number(cosines.var(correction=0))
    return result


def _simplex(vectors: torch.Tensor) -> dict:
    """The three figures of NC2 for (classes, width)."""
    classes = len(vectors)
    if classes < 2:
        return dict.fromkeys(("nc2_equinorm", "nc2_equiangular", "nc2_maximal_angle"))
    lengths, units = vectors.norm(dim=1), torch.nn.functional.normalize(vectors, dim=1, eps=0)
    ideal = 1 / (classes - 1)
    return {
        "nc2_equinorm": number(lengths.std() / lengths.mean()),
        "nc2_equiangular": _deviation_over_pairs(lambda some: units[some] @ units.mT, classes),
        "nc2_maximal_angle": _mean_over_pairs(lambda some: (units[some] @ units.mT + ideal).abs(), classes),
    }


def _trace_ratio(within: torch.Tensor, centred: torch.Tensor) -> float | None:
    """tr(Sigma_W pinv(Sigma_B)) / C, by the singular vectors of the (C, width) centred means that are not rounding."""
    classes, width = centred.shape
    _, lengths, directions = torch.linalg.svd(centred, full_matrices=False)
    kept = lengths[: classes - 1] > lengths[0] * max(classes, width) * ROUNDING
    lengths, directions = lengths[: classes - 1][kept], directions[: classes - 1][kept]
    if not len(lengths):
        return None
    # Sigma_B = V^T diag(lengths^2 / C) V, so the C of its inverse cancels that of the definition.
    return number(((directions @ within * directions).sum(1) / lengths.square()).sum())


def _squared_distances(some: torch.Tensor, vectors: torch.Tensor, rounding: torch.Tensor) -> torch.Tensor:
    """Squared distances of all pairs: by products, and by differences where products would leave rounding.

    Args:
        some: (some, width); vectors: (vectors, width).
        rounding: distances up to this are 0.
    """
    lengths = some.square().sum(1)[:, None] + vectors.square().sum(1)
    squares = lengths - 2 * some @ vectors.mT
    near = (squares < NEAR * lengths).nonzero()
    for pairs in near.split(max(1, BLOCK // some.shape[1])):
        one, other = pairs.unbind(1)
        squares[one, other] = (some[one] - vectors[other]).square().sum(1)
    return squares * (squares > rounding**2)


def _mean_over_pairs(values: Callable[[slice], torch.Tensor], classes: int) -> float | None:
    """The mean of a value over all pairs of two classes; None where it is not defined.

    Args:
        values: for a slice of the classes, (slice, classes) values, so that all pairs never exist at once.
    """
    pairs = classes * (classes - 1) / 2
    return number(sum(block.sum() for block in _pairs(values, classes)) / pairs) if pairs else None


def _deviation_over_pairs(values: Callable[[slice], torch.Tensor], classes: int) -> float | None:
    """The standard deviation of a value over all pairs; they are computed twice, so that nothing cancels."""
    mean = _mean_over_pairs(values, classes)
    if mean is None:
        return None
    variance = _mean_over_pairs(lambda some: (values(some) - mean).square(), classes)
    return None if variance is None else math.sqrt(variance)


def _pairs(values: Callable[[slice], torch.Tensor], classes: int) -> Iterator[torch.Tensor]:
    """The values of pairs a < b, block by block."""
    size = max(1, BLOCK // classes)
    for start in range(0, classes, size):
        block = values(slice(start, start + size))
        yield block[torch.ones_like(block, dtype=torch.bool).triu(start + 1)]


def _check(values: torch.Tensor) -> None:
    if not values.sum().isfinite():
        raise NotFiniteError("There is NaN or infinity in what was to be measured.")


def number(value: torch.Tensor | float) -> float | None:
    """A float, or None if it is not finite."""
    value = float(value)
    return value if math.isfinite(value) else None


def ratio(part: float | None, whole: float | None) -> float | None:
    """part / whole; None where it is not defined."""
    return None if part is None or not whole else part / whole


def float64(values: torch.Tensor) -> torch.Tensor:
    """Values in double precision, in main memory where their device has none."""
    return (values.cpu() if values.device.type == "mps" else values).double()


def _masked(hidden: torch.Tensor, mask: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor]:
    """Hidden states in float64 with 0 where the mask is False, the mask, and the tokens of each sequence."""
    hidden = float64(hidden)
    if mask is None:
        return hidden, None, torch.full(hidden.shape[:1], hidden.shape[1], device=hidden.device)
    mask = mask.to(hidden.device).bool()
    return torch.where(mask[..., None], hidden, 0), mask, mask.sum(1)


def _centred(
    hidden: torch.Tensor, mask: torch.Tensor | None, counts: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """The mean of each sequence, and the deviations of its tokens, 0 where the mask is False."""
    means = hidden.sum(1) / counts[:, None].clamp(min=1)
    deviations = hidden - means[:, None]
    return means, deviations if mask is None else deviations.mul_(mask[..., None])


def _square(vectors: torch.Tensor) -> torch.Tensor:
    """The sum of all squares, without a tensor of them."""
    return torch.linalg.vector_norm(vectors).square()
