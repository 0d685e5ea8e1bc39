"""The measures of geometry against the formulas written out in numpy, on random and on constructed data."""

import io
import math

import numpy as np
import pytest
import torch

from laplacian_heads.eval import geometry
from laplacian_heads.eval.geometry import (
    AttentionEntropy,
    Groups,
    NearestMean,
    NotFiniteError,
    Similarity,
    Spectrum,
    Variance,
    collapse,
)

CLOSE = {"rel": 1e-9, "abs": 1e-12}


def hidden_states(*shape, seed=0, far=5.0):
    """Correlated, far from the origin, and with sequences of means of their own: (sequences, tokens, width)."""
    generator = torch.Generator().manual_seed(seed)
    count, tokens, width = shape
    mixing = torch.randn(width, width, generator=generator) * torch.logspace(0, -3, width)
    means = torch.randn(count, 1, width, generator=generator)
    return torch.randn(shape, generator=generator) @ mixing + means + far


def masks(count, tokens, kind, seed=1):
    """All tokens, left padding, right padding, or holes; one sequence has no token at all where there is padding."""
    if kind == "none":
        return None
    lengths = torch.randint(0, tokens + 1, (count, 1), generator=torch.Generator().manual_seed(seed))
    lengths[-1], lengths[0] = 0, tokens
    places = torch.arange(tokens)
    if kind == "left":
        return places >= tokens - lengths
    if kind == "right":
        return places < lengths
    return (torch.rand(count, tokens, generator=torch.Generator().manual_seed(seed)) < 0.6) | (lengths == tokens)


def ragged(hidden, mask):
    """The sequences as numpy arrays of their own lengths, without those of no token."""
    mask = torch.ones(hidden.shape[:2], dtype=torch.bool) if mask is None else mask
    return [each[some].double().numpy() for each, some in zip(hidden, mask, strict=True) if some.any()]


def feed(accumulator, hidden, mask, size, **more):
    """Batches of `size` sequences; padding is full of NaN."""
    if mask is not None:
        hidden = torch.where(mask[..., None], hidden, math.nan)
    for at in range(0, len(hidden), size):
        some = slice(at, at + size)
        more_here = {name: value[some] for name, value in more.items()}
        accumulator.update(hidden[some], None if mask is None else mask[some], **more_here)
    return accumulator


@pytest.mark.parametrize("shape", [(6, 7, 3), (5, 40, 24), (7, 10, 24), (1, 30, 8), (6, 1, 4), (1, 1, 5)])
@pytest.mark.parametrize("padding", ["none", "left", "right", "holes"])
@pytest.mark.parametrize("size", [1, 3, 100])
def test_variance_is_the_direct_formula(shape, padding, size):
    hidden, mask = hidden_states(*shape), masks(*shape[:2], padding)
    labels = torch.arange(shape[0]) % 3 * 7
    found = feed(Variance(), hidden, mask, size, labels=labels).result()
    sequences = ragged(hidden, mask)
    kept = labels if mask is None else labels[mask.any(1)]
    tokens = np.concatenate(sequences)
    of_sequence = np.concatenate([np.full(len(each), i) for i, each in enumerate(sequences)])
    of_class = np.concatenate([np.full(len(each), label) for each, label in zip(sequences, kept.tolist(), strict=True)])
    mu_sequence = np.stack([tokens[of_sequence == i].mean(0) for i in of_sequence])
    mu_class = np.stack([tokens[of_class == i].mean(0) for i in of_class])
    mu = tokens.mean(0)
    direct = {
        "total": ((tokens - mu) ** 2).sum(1).mean(),
        "within_sequence": ((tokens - mu_sequence) ** 2).sum(1).mean(),
        "between_sequence": ((mu_sequence - mu) ** 2).sum(1).mean(),
        "within_class": ((mu_sequence - mu_class) ** 2).sum(1).mean(),
        "between_class": ((mu_class - mu) ** 2).sum(1).mean(),
    }
    assert {name: found[name] for name in direct} == pytest.approx(direct, **CLOSE)
    shares = found["shares"]
    if direct["total"] > 1e-12:
        assert shares == pytest.approx({k: v / direct["total"] for k, v in direct.items() if k != "total"}, **CLOSE)
        assert shares["within_sequence"] + shares["within_class"] + shares["between_class"] == pytest.approx(1, **CLOSE)
        assert shares["within_sequence"] + shares["between_sequence"] == pytest.approx(1, **CLOSE)
    noise = direct["total"] - direct["between_class"]
    if noise > 1e-12:
        assert found["snr"] == pytest.approx(direct["between_class"] / noise, **CLOSE)


def test_variance_without_classes_has_two_parts():
    found = feed(Variance(), hidden_states(4, 6, 5), None, 2).result()
    assert found.keys() == {"total", "within_sequence", "between_sequence", "shares"}
    assert sum(found["shares"].values()) == pytest.approx(1, **CLOSE)


@pytest.mark.parametrize("value", [0.0, 0.1, 1e6])
def test_nothing_varies(value):
    hidden = torch.full((3, 11, 5), value)
    variance, spectrum = Variance(), Spectrum()
    variance.update(hidden, labels=torch.tensor([0, 1, 1]))
    spectrum.update(hidden)
    assert set(variance.result()["shares"].values()) == {0.0}
    for kind in spectrum.result().values():
        assert [kind[name] for name in ("components_90", "components_99", "effective_rank")] == [0, 0, 0]


def test_unlabelled_sequences_are_left_out():
    hidden, labels = hidden_states(5, 6, 4), torch.tensor([0, -1, 1, 0, -1])
    some, kept = Variance(), Variance()
    some.update(hidden, labels=labels)
    kept.update(hidden[labels >= 0], labels=labels[labels >= 0])
    assert some.result() == kept.result()
    groups, those = Groups(scatter=True), Groups(scatter=True)
    groups.update(hidden[:, 0], labels)
    those.update(hidden[labels >= 0, 0], labels[labels >= 0])
    assert collapse(groups) == collapse(those)


def spectrum_by_hand(matrix):
    """Of (tokens, width): eigenvalues of the covariance, by singular values, and what is said of them."""
    values = np.linalg.svd(matrix - matrix.mean(0), compute_uv=False) ** 2 / len(matrix)
    values = np.pad(values, (0, matrix.shape[1] - len(values)))
    if values.sum() < 1e-12:
        return values, [0, 0, 0, 0]
    held, shares = np.cumsum(values) / values.sum(), values[values > 0] / values.sum()
    counted = [int(np.argmax(held >= share)) + 1 for share in (0.9, 0.95, 0.99)]
    return values, [*counted, np.exp(-(shares * np.log(shares)).sum())]


@pytest.mark.parametrize("shape", [(6, 7, 3), (5, 40, 24), (7, 10, 24), (1, 30, 8), (6, 1, 4)])
@pytest.mark.parametrize("padding", ["none", "left", "holes"])
def test_spectrum_is_the_direct_formula(shape, padding):
    hidden, mask = hidden_states(*shape), masks(*shape[:2], padding)
    found = feed(Spectrum(), hidden, mask, 2).result()
    sequences = ragged(hidden, mask)
    each = [spectrum_by_hand(sequence) for sequence in sequences]
    direct = {
        "pooled": spectrum_by_hand(np.concatenate(sequences)),
        "per_sequence": (np.mean([values for values, _ in each], 0), np.mean([figures for _, figures in each], 0)),
    }
    for kind, (values, figures) in direct.items():
        assert found[kind]["eigenvalues"] == pytest.approx(values, rel=1e-9, abs=1e-9 * values[0] + 1e-15)
        names = ("components_90", "components_95", "components_99", "effective_rank")
        assert [found[kind][name] for name in names] == pytest.approx(figures, **CLOSE)


def test_components_of_known_variances():
    """Four orthogonal directions that hold 90, 9, 0.9 and 0.1 % of the variance."""
    directions = torch.linalg.qr(hidden_states(1, 8, 8)[0].double())[0][:4]
    hidden = torch.cat([directions, -directions]) * torch.tensor([88, 9, 2.5, 0.5] * 2).sqrt()[:, None]
    spectrum = Spectrum()
    spectrum.update(hidden[None] + 3)
    found = spectrum.result()["pooled"]
    assert [found[f"components_{share}"] for share in (90, 95, 99)] == [2, 2, 3]
    shares = np.array([0.88, 0.09, 0.025, 0.005])
    assert found["effective_rank"] == pytest.approx(np.exp(-(shares * np.log(shares)).sum()), rel=1e-6)
    eigenvalues, components = spectrum.principal()
    assert (components[:4] @ directions.mT).abs() == pytest.approx(torch.eye(4, dtype=torch.float64), abs=1e-6)
    assert (components.gather(1, components.abs().argmax(1, keepdim=True)) > 0).all()
    assert eigenvalues.tolist() == found["eigenvalues"]


def cosine(a, b):
    lengths = np.linalg.norm(a) * np.linalg.norm(b)
    return a @ b / lengths if lengths else 0.0


def mean_cosine(matrix):
    pairs = [cosine(a, b) for i, a in enumerate(matrix) for j, b in enumerate(matrix) if i != j]
    return np.mean(pairs) if pairs else None


@pytest.mark.parametrize("padding", ["none", "left", "holes"])
@pytest.mark.parametrize("shape", [(5, 7, 4), (1, 9, 3), (4, 1, 3), (1, 1, 3)])
def test_similarity_is_the_direct_formula(shape, padding):
    hidden, mask = hidden_states(*shape, far=0.5), masks(*shape[:2], padding)
    hidden[0, 0] = 0  # which has no direction
    found = feed(Similarity(), hidden, mask, 2).result()
    sequences = ragged(hidden, mask)
    each = [value for value in map(mean_cosine, sequences) if value is not None]
    assert found["within_sequence"] == (pytest.approx(np.mean(each), **CLOSE) if each else None)
    pooled = mean_cosine(np.concatenate(sequences))
    assert found["pooled"] == (None if pooled is None else pytest.approx(pooled, **CLOSE))


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("padding", ["none", "left", "right"])
def test_attention_entropy_is_the_direct_formula(causal, padding):
    sequences, heads, tokens = 4, 3, 6
    mask = masks(sequences, tokens, padding)
    scores = torch.randn(sequences, heads, tokens, tokens, generator=torch.Generator().manual_seed(2))
    seen = torch.ones(sequences, 1, tokens, tokens, dtype=torch.bool)
    seen = seen.tril() if causal else seen
    if mask is not None:
        seen = seen & mask[:, None, None]
    attention = scores.masked_fill(~seen, -math.inf).softmax(-1)  # NaN where a query sees nothing
    measured = AttentionEntropy()
    for at in range(0, sequences, 2):
        measured.update(attention[at : at + 2], None if mask is None else mask[at : at + 2])
    nats, shares = [[] for _ in range(heads)], [[] for _ in range(heads)]
    for row in range(sequences):
        for query in range(tokens):
            if mask is None or mask[row, query]:
                keys = int(seen[row, 0, query].sum())
                for head in range(heads):
                    p = attention[row, head, query].double().numpy()
                    entropy = -sum(x * math.log(x) for x in p if x > 0)
                    nats[head].append(entropy)
                    if keys > 1:
                        shares[head].append(entropy / math.log(keys))
    found = measured.result()
    assert found["nats"] == pytest.approx(np.mean(nats, 1), **CLOSE)
    assert found["share_of_most"] == pytest.approx(np.mean(shares, 1), **CLOSE)
    assert max(found["share_of_most"]) <= 1


def test_attention_that_is_uniform_has_all_the_entropy():
    measured = AttentionEntropy()
    uniform = torch.ones(2, 3, 5, 5).tril()
    measured.update(uniform / uniform.sum(-1, keepdim=True))
    window = uniform.triu(-2)  # a query sees three keys at most
    measured.update(window / window.sum(-1, keepdim=True))
    assert measured.result()["share_of_most"] == pytest.approx([1, 1, 1], rel=1e-7)


def by_class(vectors, labels, classifier=None):
    """The measures of `collapse` and `NearestMean`, pair by pair and vector by vector."""
    x, y = vectors.double().numpy(), labels.numpy()
    classes = sorted({int(label) for label in y})
    count = len(classes)
    mu = np.stack([x[y == c].mean(0) for c in classes])
    variances = np.array([((x[y == c] - mu[i]) ** 2).sum(1).mean() for i, c in enumerate(classes)])
    m = mu - mu.mean(0)
    own = np.array([classes.index(label) for label in y])
    sigma_w = sum(np.outer(d, d) for d in x - mu[own]) / len(x)
    sigma_b = sum(np.outer(d, d) for d in m) / count
    pairs = [(a, b) for a in range(count) for b in range(count) if a < b]
    apart = np.array([((mu[a] - mu[b]) ** 2).sum() for a, b in pairs])
    u = m / np.linalg.norm(m, axis=1, keepdims=True)
    gaps = np.array([-math.log(np.linalg.norm(u[a] - u[b])) for a, b in pairs])
    values, vectors_b = np.linalg.eigh(sigma_b)
    kept = values > values.max() * 1e-12
    inverse = vectors_b[:, kept] @ np.diag(1 / values[kept]) @ vectors_b[:, kept].T

    def nc2(rows, which):
        lengths = np.linalg.norm(rows, axis=1)
        cosines = np.array([cosine(rows[a], rows[b]) for a, b in pairs])
        return {
            f"nc2_equinorm_{which}": lengths.std(ddof=1) / lengths.mean(),
            f"nc2_equiangular_{which}": cosines.std(),
            f"nc2_maximal_angle_{which}": np.abs(cosines + 1 / (count - 1)).mean(),
        }

    found = {
        "classes": count,
        "samples": len(x),
        "nc1": np.trace(sigma_w @ inverse) / count,
        **nc2(m, "means"),
        "cdnv": np.mean([(variances[a] + variances[b]) / 2 / d for (a, b), d in zip(pairs, apart, strict=True)]),
        "cdnv_within": variances.mean(),
        "cdnv_between": apart.mean(),
        "separability": apart.mean() / variances.mean(),
        "gnc2_mean": gaps.mean(),
        "gnc2_std": gaps.std(),
        "nc1_cosine": 1 - np.mean([cosine(v - mu.mean(0), m[c]) for v, c in zip(x, own, strict=True)]),
    }
    if classifier is not None:
        w = classifier.double().numpy()[classes]
        apart = np.linalg.norm(w / np.linalg.norm(w) - m / np.linalg.norm(m))
        duality = np.array([cosine(a, b) for a, b in zip(w, m, strict=True)])
        nearest = [min(range(count), key=lambda c: ((v - mu[c]) ** 2).sum()) for v in x]
        decided = (x @ w.T).argmax(1)
        found |= {
            **nc2(w, "classifier"),
            "nc3": apart,
            "nc3_squared": apart**2,
            "unc3_mean": duality.mean(),
            "unc3_variance": duality.var(),
            "nc4": np.mean(np.array(nearest) != decided),
        }
    return found


def measured(vectors, labels, classifier=None, size=7):
    groups = Groups(scatter=True)
    for at in range(0, len(vectors), size):
        groups.update(vectors[at : at + size], labels[at : at + size])
    nearest = NearestMean(groups)
    for at in range(0, len(vectors), size):
        some = slice(at, at + size)
        decisions = None
        if classifier is not None:
            decisions = groups.labels[(vectors[some].double() @ classifier[groups.labels].double().mT).argmax(1)]
        nearest.update(vectors[some], labels[some], decisions)
    return collapse(groups, classifier) | nearest.result()


@pytest.mark.parametrize("classes", [2, 5, 12])  # fewer than the width, and more
@pytest.mark.parametrize("with_classifier", [True, False])
@pytest.mark.parametrize("far", [0.0, 100.0])
def test_collapse_is_the_direct_formula(classes, with_classifier, far):
    generator = torch.Generator().manual_seed(3)
    labels = torch.cat([torch.arange(classes), torch.randint(classes - 1, (60,), generator=generator)]) * 3 + 1
    centres = torch.randn(3 * classes + 1, 8, generator=generator, dtype=torch.float64)
    vectors = centres[labels] + 0.7 * torch.randn(len(labels), 8, generator=generator, dtype=torch.float64) + far
    classifier = torch.randn(3 * classes + 1, 8, generator=generator) if with_classifier else None
    found, direct = measured(vectors, labels, classifier), by_class(vectors, labels, classifier)
    assert found == pytest.approx(direct, rel=1e-9, abs=1e-9)
    counts = torch.bincount(labels)
    assert (counts == 1).any()  # a class that is seen once


def simplex(classes, width):
    corners = torch.eye(classes, dtype=torch.float64) - 1 / classes
    turn = torch.linalg.qr(torch.randn(width, width, generator=torch.Generator().manual_seed(0)).double())[0]
    return torch.nn.functional.pad(corners, (0, width - classes)) @ turn


def test_perfect_collapse_to_a_simplex():
    classes = 6
    means = simplex(classes, 10)
    labels = torch.arange(classes).repeat(5)
    aside = torch.linalg.svd(means)[2][-1]  # of which the classifier sees nothing
    found = measured(means[labels] + 50 * aside, labels, 3 * means)
    zero = [
        *(f"nc2_{what}_{of}" for what in ("equinorm", "equiangular", "maximal_angle") for of in ("means", "classifier"))
    ]
    zero += ["nc1", "nc1_cosine", "nc3", "nc3_squared", "cdnv", "cdnv_within", "nc4", "gnc2_std", "unc3_variance"]
    assert [found[name] for name in zero] == pytest.approx([0] * len(zero), abs=1e-9)
    assert found["unc3_mean"] == pytest.approx(1, abs=1e-9)
    assert found["gnc2_mean"] == pytest.approx(-math.log(math.sqrt(2 * classes / (classes - 1))), abs=1e-9)
    assert found["separability"] is None or found["separability"] > 1e12


def test_no_collapse():
    """Classes that are drawn from the same distribution: their means are only noise apart."""
    generator = torch.Generator().manual_seed(0)
    vectors, labels = torch.randn(20000, 6, generator=generator), torch.arange(20000) % 4
    found = measured(vectors, labels)
    assert found["nc1"] > 100
    assert found["cdnv"] > 100
    assert found["separability"] < 0.01
    assert found["nc1_cosine"] == pytest.approx(1, abs=0.05)


def test_one_class_leaves_what_compares_classes_undefined():
    vectors = hidden_states(1, 9, 4)[0]
    found = measured(vectors, torch.full((9,), 2), torch.randn(3, 4))
    assert (found["classes"], found["samples"]) == (1, 9)
    assert found["cdnv_within"] == pytest.approx(vectors.double().numpy().var(0).sum(), **CLOSE)
    for name in ("nc1", "nc1_cosine", "nc2_equinorm_means", "nc2_equiangular_classifier", "cdnv", "gnc2_mean", "nc4"):
        assert found[name] is None, name


def test_one_vector():
    found = measured(torch.randn(1, 4), torch.tensor([5]))
    assert (found["classes"], found["samples"], found["cdnv_within"], found["nc1"]) == (1, 1, 0, None)


def test_means_that_coincide_leave_their_distances_undefined():
    vectors = torch.tensor([[0.0, 1], [0, -1], [0, 2], [0, -2], [3, 0]])
    found = measured(vectors, torch.tensor([0, 0, 1, 1, 2]))
    assert found["cdnv"] is None
    assert found["gnc2_mean"] is None
    assert found["cdnv_between"] == pytest.approx(6)
    # Up to rounding, too.
    labels = torch.arange(300) % 3
    vectors = torch.randn(300, 5, dtype=torch.float64)[labels // 2] + 1000
    assert [measured(vectors, labels)[name] for name in ("cdnv", "gnc2_mean")] == [None, None]


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_what_is_not_finite_is_refused_by_name(value, dtype):
    hidden = hidden_states(3, 4, 5).to(dtype)
    hidden[1, 2, 3] = value
    attention = torch.full((3, 2, 4, 4), 0.25, dtype=dtype)
    attention[1, 0, 2, 1] = value
    for update in (
        lambda: Variance().update(hidden),
        lambda: Variance().update(hidden, labels=torch.tensor([0, 0, 1])),
        lambda: Spectrum().update(hidden),
        lambda: Similarity().update(hidden),
        lambda: Groups().update(hidden[1], torch.arange(4)),
        lambda: AttentionEntropy().update(attention),
    ):
        with pytest.raises(NotFiniteError, match="NaN or infinity"):
            update()


def through_a_pipe(accumulator):
    """As it comes out of another process."""
    file = io.BytesIO()
    torch.save(accumulator, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


@pytest.mark.parametrize("split", [0, 1, 5, 8])  # the first has nothing, or the other one
def test_two_processes_merged_are_one(split):
    hidden, mask = hidden_states(8, 6, 5), masks(8, 6, "left")
    labels = torch.tensor([4, 4, 0, 9, 0, 4, 2, 9])  # classes that one of them has never seen
    attention = torch.rand(8, 2, 6, 6).softmax(-1)

    def fed(rows):
        tokens, kept = hidden[rows].flatten(0, 1), mask[rows].flatten()
        made = [Variance(), Spectrum(), Similarity(), Groups(scatter=True), AttentionEntropy()]
        if len(tokens):
            made[0].update(hidden[rows], mask[rows], labels=labels[rows])
            made[1].update(hidden[rows], mask[rows])
            made[2].update(hidden[rows], mask[rows])
            made[3].update(tokens[kept], labels[rows].repeat_interleave(6)[kept])
            made[4].update(attention[rows], mask[rows])
        return made

    one, (first, second) = fed(slice(0, 8)), (fed(slice(0, split)), fed(slice(split, 8)))
    for whole, own, other in zip(one, first, second, strict=True):
        own.merge(through_a_pipe(other.cpu()))
        if isinstance(whole, Groups):
            assert collapse(own) == pytest.approx(collapse(whole), rel=1e-9, abs=1e-12)
        else:
            flat = [torch.tensor(list(_leaves(each.result()))) for each in (own, whole)]
            assert flat[0] == pytest.approx(flat[1], rel=1e-9, abs=1e-12)


def _leaves(result):
    for value in result.values() if isinstance(result, dict) else result:
        if isinstance(value, dict | list):
            yield from _leaves(value)
        else:
            yield float(value)


def test_merging_does_not_change_what_is_merged():
    first, second = Groups(scatter=True), Groups(scatter=True)
    first.update(torch.randn(5, 3), torch.arange(5))
    second.update(torch.randn(5, 3), torch.arange(5) + 3)
    before = collapse(second)
    empty = Groups(scatter=True)
    empty.merge(second)
    empty.update(torch.randn(5, 3), torch.arange(5) + 3)
    first.merge(second)
    assert collapse(second) == before


def test_pairs_are_all_met_once_whatever_the_size_of_a_block(monkeypatch):
    vectors, labels = torch.randn(60, 5).double(), torch.arange(60) % 15
    whole = measured(vectors, labels)
    monkeypatch.setattr(geometry, "BLOCK", 40)  # two classes at a time
    assert measured(vectors, labels) == pytest.approx(whole, rel=1e-12)


def test_sums_do_not_grow_with_the_number_of_tokens():
    def size(accumulator):
        file = io.BytesIO()
        torch.save(accumulator, file)
        return file.tell()

    made = [Variance(), Spectrum(), Similarity(), Groups(scatter=True)]
    sizes = []
    for batches in (2, 40):
        for _ in range(batches):
            hidden = torch.randn(4, 32, 8)
            for accumulator in made[:3]:
                accumulator.update(hidden)
            made[3].update(hidden.flatten(0, 1), torch.arange(128) % 10)
        sizes.append([size(accumulator) for accumulator in made])
    assert sizes[1] == pytest.approx(sizes[0], abs=64)  # digits of the counts
