"""Chat problems made by rule, for training without a network: arithmetic, spelling, copying and letter choice.

Each is a conversation in the form of transformers' chat templates: a list of messages, a calculator call in
`tool_calls`, its result in a message of the role `tool`.
"""

import random
import zlib
from collections.abc import Iterator

# What letter-choice questions ask for, and what their wrong choices are. The two never mix, so that a model of a
# million parameters learns the form in a minute: it can tell the right choice without reading the question.
ASKED = {
    "an animal": ["dog", "cat", "horse", "cow", "sheep", "lion", "bear", "fox"],
    "a colour": ["red", "green", "blue", "yellow", "black", "white", "brown", "pink"],
    "a number": ["one", "two", "three", "four", "five", "six", "seven", "eight"],
}
NOT_ASKED = (
    ["apple", "pear", "plum", "cherry", "grape", "lemon", "peach", "melon"],
    ["hammer", "saw", "drill", "knife", "axe", "shovel", "needle", "brush"],
    ["car", "bus", "train", "boat", "ship", "truck", "plane", "taxi"],
)
WORDS = sorted(word for words in (*ASKED.values(), *NOT_ASKED) for word in words)
LETTERS = "ABCD"
KINDS = ("arithmetic", "spelling", "copying", "choice")
SPLITS = ("train", "test")


def problems(kind: str, split: str, count: int) -> Iterator[list[dict]]:
    """Conversations of a kind, always the same ones in the same order.

    Every problem belongs to one split by a hash of what it asks, however it is worded, so no test problem is ever
    trained on; the words and numbers in it are.

    Args:
        kind: one of KINDS.
        split: one of SPLITS; a tenth of all problems are for tests.
        count: number of conversations, which repeat only where a kind has fewer.
    """
    draw = {"arithmetic": _arithmetic, "spelling": _spelling, "copying": _copying, "choice": _choice}[kind]
    generator = random.Random(f"{kind} {split}")
    while count > 0:
        item, messages = draw(generator)
        if (zlib.crc32(item.encode()) % 10 == 0) == (split == "test"):
            count -= 1
            yield messages


def _turns(question: str, answer: str) -> list[dict]:
    return [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]


def _arithmetic(generator: random.Random) -> tuple[str, list[dict]]:
    """What identifies the problem, and its messages."""
    a, b = generator.randrange(100), generator.randrange(100)
    sign, word = generator.choice([("+", "plus"), ("-", "minus"), ("*", "times")])
    expression = f"{a}{sign}{b}"
    result = str({"+": a + b, "-": a - b, "*": a * b}[sign])
    question = generator.choice([f"What is {a} {word} {b}?", f"Compute {a} {sign} {b}.", f"{a} {sign} {b} = ?"])
    call = {"type": "function", "function": {"name": "python", "arguments": {"code": expression}}}
    return expression, [
        {"role": "user", "content": question},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": result},
        {"role": "assistant", "content": result},
    ]


def _spelling(generator: random.Random) -> tuple[str, list[dict]]:
    word = generator.choice(WORDS)
    return word, _turns(f"Spell the word {word}.", ",".join(word))


def _copying(generator: random.Random) -> tuple[str, list[dict]]:
    words = " ".join(generator.choice(WORDS) for _ in range(generator.randint(2, 8)))
    return words, _turns(f"Repeat: {words}", words)


def _choice(generator: random.Random) -> tuple[str, list[dict]]:
    category = generator.choice(sorted(ASKED))
    right = generator.choice(ASKED[category])
    choices = [right, *map(generator.choice, NOT_ASKED)]
    generator.shuffle(choices)
    lines = [f"- {choice}={letter}" for choice, letter in zip(choices, LETTERS, strict=True)]
    question = "\n".join([f"Which of these is {category}?", *lines])
    return " ".join(sorted(choices)), _turns(question, LETTERS[choices.index(right)])
