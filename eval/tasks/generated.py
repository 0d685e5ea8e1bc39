"""The documents of the tasks: test problems that the project generates, never trained on."""

from datasets import Dataset

from laplacian_heads.problems import problems

ITEMS = 500


def choice(**_) -> dict[str, Dataset]:
    """Letter-choice questions, each answered by one letter."""
    return _documents("choice")


def arithmetic(**_) -> dict[str, Dataset]:
    """Arithmetic questions, each answered by a number."""
    return _documents("arithmetic")


def behind_the_last_output(answers: list[list[str]], docs: list[dict]) -> list[str]:
    """What each document's first answer says behind its last calculator output, or all it says."""
    return [samples[0].rpartition("<|output_end|>")[2].strip() for samples in answers]


def _documents(kind: str) -> dict[str, Dataset]:
    rows = [
        {"question": turns[0]["content"], "answer": turns[-1]["content"]} for turns in problems(kind, "test", ITEMS)
    ]
    return {"test": Dataset.from_list(rows)}
