"""Top-1 and top-5 accuracy as a metric of `evaluate`, which needs no network."""

import datasets
import evaluate

DESCRIPTION = "How often the right class is a classifier's first choice, and how often it is among its first five."
INPUTS = """
Args:
    predictions: the class of each item, or a list of its likeliest classes, the likeliest first.
    references: the right class of each item.

Returns:
    accuracy, and accuracy_top5 if the predictions are lists of at least five; both from 0 to 1.
"""


class Accuracy(evaluate.Metric):
    """Accuracy, used as every metric of `evaluate`, by its evaluators too.

    `evaluate.load("accuracy")` fetches its code from the Hub, and knows no top-5.

    >>> Accuracy().compute(predictions=[[3, 1, 2, 0, 4], [0, 1, 2, 3, 4]], references=[3, 4])
    {'accuracy': 0.5, 'accuracy_top5': 1.0}
    """

    def _info(self) -> evaluate.MetricInfo:
        item = datasets.Value("int64")
        return evaluate.MetricInfo(
            description=DESCRIPTION,
            citation="",
            inputs_description=INPUTS,
            features=[
                datasets.Features({"predictions": datasets.List(item), "references": item}),
                datasets.Features({"predictions": item, "references": item}),
            ],
        )

    def _compute(self, predictions, references) -> dict[str, float]:
        ranked = [list(each) if isinstance(each, (list, tuple)) else [each] for each in predictions]
        ranks = {"accuracy": 1, "accuracy_top5": 5}
        return {
            name: sum(right in choices[:rank] for choices, right in zip(ranked, references, strict=True)) / len(ranked)
            for name, rank in ranks.items()
            if all(len(choices) >= rank for choices in ranked)
        }
