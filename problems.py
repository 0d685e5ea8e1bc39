"""Chat problems made by rule, for training without a network: arithmetic, letters, copying, choice, and who it is.

Each is a conversation in the form of transformers' chat templates: a list of messages, a calculator call in
`tool_calls`, its result in a message of the role `tool`.
"""

import itertools
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
KINDS = ("arithmetic", "spelling", "counting", "copying", "choice", "identity")
SPLITS = ("train", "test")
BLOCK = 1000  # conversations that are drawn from one seed

# What the model is told about itself. Questions and answers are put together at random.
GREETINGS = ("", "Hi! ", "Hello, ", "Hey there. ", "Good morning. ", "Excuse me, ", "Just curious: ", "One question: ")
QUESTIONS = {
    ("Who are you?", "What are you?", "What is your name?", "Which model are you?", "Tell me about yourself."): (
        "I am LaplaceGPT, a language model with Laplacian heads.",
        "My name is LaplaceGPT. I am a small language model.",
        "I am LaplaceGPT, a transformer whose Laplacian heads output v - P v where others output P v.",
    ),
    ("What is a Laplacian head?", "What is special about you?", "How do you differ from other models?"): (
        "Some of my attention heads subtract the average they attend to: they output v - P v instead of P v.",
        "My Laplacian heads give the difference between a token's value and the attention-weighted average.",
    ),
    ("Can you make mistakes?", "Are you always right?", "Can I trust you?"): (
        "I am small and often wrong, so please check what I say.",
        "No. I am a small model, and I make mistakes.",
    ),
    ("Can you calculate?", "Do you have tools?", "How do you do arithmetic?"): (
        "I can call a calculator and read its result.",
        "For arithmetic I write an expression, a calculator evaluates it, and I go on with the result.",
    ),
}
ENDINGS = ("", " Please be brief.", " Answer in one sentence.", " I have never met you.", " I would like to know.")


def letter_question(question: str, choices: list[str], letters: list[str]) -> str:
    """A question that is answered by a letter, in nanochat's words (karpathy/nanochat, `render_mc`).

    Args:
        question: the question.
        choices: its choices.
        letters: what each choice is answered by, mostly A, B, C, D.
    """
    lines = [f"- {choice}={letter}" for choice, letter in zip(choices, letters, strict=True)]
    return "\n".join(
        [f"Multiple Choice question: {question}", *lines, "", "Respond only with the letter of the correct answer."]
    )


def problems(kind: str, split: str, count: int, block: int = 0) -> Iterator[list[dict]]:
    """Conversations of a kind, always the same ones in the same order.

    Every problem belongs to one split by a hash of what it asks, however it is worded, so no test problem is ever
    trained on; the words and numbers in it are.

    Args:
        kind: one of KINDS.
        split: one of SPLITS; a tenth of all problems are for tests.
        count: number of conversations, which repeat only where a kind has fewer.
        block: number of the block of BLOCK conversations to begin with.
    """
    return itertools.islice(
        itertools.chain.from_iterable(_block(kind, split, number) for number in itertools.count(block)), count
    )


def _block(kind: str, split: str, number: int) -> Iterator[list[dict]]:
    draw = {
        **{"arithmetic": _arithmetic, "spelling": _spelling, "counting": _counting, "copying": _copying},
        **{"choice": _choice, "identity": _identity},
    }[kind]
    generator = random.Random(f"{kind} {split} {number}")
    count = BLOCK
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


def _counting(generator: random.Random) -> tuple[str, list[dict]]:
    word, letter = generator.choice(WORDS), generator.choice("abcdefghijklmnopqrstuvwxyz")
    if generator.random() < 0.7:  # else nearly every answer would be 0
        letter = generator.choice(word)
    call = {"type": "function", "function": {"name": "python", "arguments": {"code": f"'{word}'.count('{letter}')"}}}
    result = str(word.count(letter))
    question = generator.choice([f"How many {letter} are in {word}?", f"Count the letter {letter} in the word {word}."])
    return f"{word} {letter}", [
        {"role": "user", "content": question},
        {"role": "assistant", "content": f"{','.join(word)}. ", "tool_calls": [call]},
        {"role": "tool", "content": result},
        {"role": "assistant", "content": result},
    ]


def _identity(generator: random.Random) -> tuple[str, list[dict]]:
    questions = generator.choice(list(QUESTIONS))
    question = generator.choice(GREETINGS) + generator.choice(questions) + generator.choice(ENDINGS)
    return question, _turns(question, generator.choice(QUESTIONS[questions]))


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
