"""k-nearest-neighbour classification of features, weighted as in DINO."""

import torch

# Similarities that are in memory at a time are at most QUERIES x BANK.
QUERIES, BANK = 1024, 65536


def vote(
    features: torch.Tensor,
    bank: torch.Tensor,
    labels: torch.Tensor,
    neighbors: int,
    temperature: float,
    classes: int,
) -> torch.Tensor:
    """Scores of classes by the votes of the nearest of a bank.

    Args:
        features: (n, width) to classify.
        bank: (m, width) whose classes are known; on another device than features it is moved in parts.
        labels: (m,) classes of bank, in 0 to classes - 1.
        neighbors: how many vote, at most m.
        temperature: a neighbour's vote weighs exp(cosine similarity / temperature).
        classes: how many there are.

    Returns:
        (n, classes) float32 on the device of features, which are at least 0 and sum to 1 over classes.

    Raises:
        ValueError: neighbors is less than 1 or more than m, or temperature is not above 0.

    Source: facebookresearch/dino, `eval_knn.py` (arXiv 2104.14294).
    """
    similarities, indices = nearest(features, bank, neighbors)
    return tally(similarities, labels.to(indices.device)[indices], temperature, classes)


@torch.no_grad()
def nearest(features: torch.Tensor, bank: torch.Tensor, neighbors: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The nearest of a bank by cosine similarity.

    Args:
        features: (n, width).
        bank: (m, width).
        neighbors: how many, at most m.

    Returns:
        (n, neighbors) similarities, float32, the highest first; (n, neighbors) their rows in bank.

    Raises:
        ValueError: neighbors is less than 1 or more than m.
    """
    if not 1 <= neighbors <= len(bank):
        raise ValueError(f"neighbors is {neighbors}, allowed is 1 to {len(bank)}, the size of the bank.")
    found = [_nearest(queries, bank, neighbors) for queries in features.split(QUERIES)]
    similarities, indices = zip(*found, strict=True)
    return torch.cat(similarities), torch.cat(indices)


def tally(similarities: torch.Tensor, labels: torch.Tensor, temperature: float, classes: int) -> torch.Tensor:
    """Scores of classes, (n, classes), by neighbours' similarities and labels, both (n, neighbors); see `vote`."""
    if not temperature > 0:
        raise ValueError(f"temperature is {temperature}, allowed is above 0.")
    # The softmax is the weights over their sum, which changes no order of classes and cannot overflow.
    weights = torch.softmax(similarities / temperature, dim=1)
    return weights.new_zeros(len(weights), classes).scatter_add_(1, labels, weights)


def _nearest(queries: torch.Tensor, bank: torch.Tensor, neighbors: int) -> tuple[torch.Tensor, torch.Tensor]:
    queries = _unit(queries)
    similarities, indices = queries.new_empty(len(queries), 0), queries.new_empty(len(queries), 0, dtype=torch.long)
    for start in range(0, len(bank), BANK):
        rows = _unit(bank[start : start + BANK].to(queries.device))
        found, places = (queries @ rows.mT).topk(min(neighbors, len(rows)))
        similarities, indices = torch.cat([similarities, found], 1), torch.cat([indices, places + start], 1)
        similarities, order = similarities.topk(min(neighbors, similarities.shape[1]))
        indices = indices.gather(1, order)
    return similarities, indices


def _unit(vectors: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.normalize(vectors.float(), dim=1)
