"""nanochat's ChatCORE tasks: questions, answers and scores (karpathy/nanochat at 01f5f10, `tasks` and `chat_eval`)."""

import concurrent.futures
import math
import os
import re

from tqdm import tqdm

from laplacian_heads.eval import sandbox
from laplacian_heads.problems import letter_question

LETTERS = "ABCD"
GUESSING = 0.25  # the accuracy of guessing letters
FINAL_NUMBER = re.compile(r"#### (-?[0-9.,]+)")
CODE_BLOCK = re.compile(r"```(?:python)?\s*\n(.*?)\n```", re.DOTALL)


def arc_question(doc: dict) -> str:
    return letter_question(doc["question"], doc["choices"]["text"], doc["choices"]["label"])


def mmlu_question(doc: dict) -> str:
    return letter_question(doc["question"], doc["choices"], LETTERS)


def arc_scores(doc: dict, results: list[tuple[float, bool]]) -> dict[str, float]:
    return _letter_scores(results, doc["choices"]["label"].index(doc["answerKey"]))


def mmlu_scores(doc: dict, results: list[tuple[float, bool]]) -> dict[str, float]:
    return _letter_scores(results, doc["answer"])


def _letter_scores(results, right: int) -> dict[str, float]:
    """Whether the likeliest letter is the right one, from the log-likelihood of each."""
    likelihoods = [likelihood for likelihood, _ in results]
    correct = float(likelihoods.index(max(likelihoods)) == right)
    return {"acc": correct, "acc_centred": (correct - GUESSING) / (1 - GUESSING)}


def final_numbers(answers: list[list[str]], docs: list[dict]) -> list[list[str | None]]:
    """What stands behind #### in each answer of each document, without commas."""
    return [[final_number(answer) for answer in samples] for samples in answers]


def final_number(answer: str) -> str | None:
    found = FINAL_NUMBER.search(answer)
    return found[1].replace(",", "") if found else None


def gsm8k_scores(doc: dict, results: list[list[str | None]]) -> dict[str, float]:
    """Scores of a greedy answer."""
    return _greedy([number == final_number(doc["answer"]) for number in results[0]])


def gsm8k_pass10(doc: dict, results: list[list[str | None]]) -> dict[str, float]:
    """Scores of 10 samples or more."""
    return _pass10([number == final_number(doc["answer"]) for number in results[0]])


def program(prompt: str, answer: str) -> str:
    """The program of an answer: its first block of code or else all of it, behind the imports that open the prompt."""
    block = CODE_BLOCK.search(answer)
    imports = []
    for line in map(str.strip, prompt.splitlines()):
        if line.startswith(("import ", "from ")):
            imports.append(line)
        elif line and not line.startswith("#"):
            break
    return "\n".join([*imports, "", block[1] if block else answer.strip(), ""])


def executed(answers: list[list[str]], docs: list[dict]) -> list[list[str]]:
    """What became of the program of each answer of each document: "passed", or why not.

    Raises:
        ValueError: this machine does not permit the sandbox, and nobody said to do without.
    """
    sandbox.isolated()
    jobs = [
        (doc["prompt"], program(doc["prompt"], answer), doc["test"], doc["entry_point"])
        for doc, samples in zip(docs, answers, strict=True)
        for answer in samples
    ]
    with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
        done = pool.map(lambda job: sandbox.run(*job), jobs)
        outcomes = iter(list(tqdm(done, total=len(jobs), desc="Running programs")))
    return [[next(outcomes) for _ in samples] for samples in answers]


def humaneval_scores(doc: dict, results: list[list[str]]) -> dict[str, float]:
    """Scores of a greedy answer."""
    return {**_greedy([outcome == "passed" for outcome in results[0]]), "sandboxed": float(sandbox.isolated())}


def humaneval_pass10(doc: dict, results: list[list[str]]) -> dict[str, float]:
    """Scores of 10 samples or more."""
    return {**_pass10([outcome == "passed" for outcome in results[0]]), "sandboxed": float(sandbox.isolated())}


def _greedy(correct: list[bool]) -> dict[str, float]:
    return {"acc": float(correct[0]), "acc_centred": float(correct[0])}


def _pass10(correct: list[bool]) -> dict[str, float]:
    """acc is pass@10, which the paper takes for the accuracy; guessing scores 0."""
    one, ten = (pass_at(k, len(correct), sum(correct)) for k in (1, 10))
    return {"pass@10": ten, "pass@1": one, "acc": ten, "acc_centred": ten}


def pass_at(k: int, samples: int, correct: int) -> float:
    """Share of the choices of k samples in which one is correct, the unbiased estimate of pass@k (arXiv 2107.03374).

    Raises:
        ValueError: there are fewer than k samples.
    """
    if samples < k:
        raise ValueError(f"repeats is {samples}, allowed for pass@{k} is at least {k}.")
    return 1 - math.comb(samples - correct, k) / math.comb(samples, k)
