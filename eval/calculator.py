"""nanochat's calculator: a model writes an expression, and its result is put into the text it goes on from."""

import ast
import math
import operator
import re

import torch
from transformers import LogitsProcessor, PreTrainedTokenizerBase

TOOL_TOKENS = ("<|python_start|>", "<|python_end|>", "<|output_start|>", "<|output_end|>")
MAX_EXPRESSION = 200  # characters
MAX_RESULT = 50  # characters

OPERATORS = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.UAdd: operator.pos,
    ast.USub: operator.neg,
}


def calculate(expression: str) -> str | None:
    """What nanochat's tool yields (karpathy/nanochat at 01f5f10, `use_calculator`), without evaluating any code.

    Args:
        expression: numbers, + - * / // %, parentheses and commas, which are dropped; or ``'text'.count('x')`` with text
            in quotes, single or double, and no backslash.

    Returns:
        The result as Python prints it; None if the expression is anything else, divides by zero, or is longer than
        MAX_EXPRESSION, or its result than MAX_RESULT.
    """
    expression = expression.strip()
    if len(expression) > MAX_EXPRESSION:
        return None
    try:
        if re.fullmatch(r"[\d.,+\-*/%() ]+", expression, re.ASCII):
            result = _number(ast.parse(expression.replace(",", ""), mode="eval").body)
        elif "\\" not in expression:
            result = _count(ast.parse(expression, mode="eval").body)
        else:
            return None
    except (ValueError, SyntaxError, ArithmeticError, RecursionError):
        return None
    result = str(result)
    return result if len(result) <= MAX_RESULT else None


def _number(node: ast.expr) -> int | float:
    match node:
        case ast.Constant(value=int() | float() as value):
            return value
        case ast.UnaryOp(op=op, operand=operand) if type(op) in OPERATORS:
            return OPERATORS[type(op)](_number(operand))
        case ast.BinOp(left=left, op=op, right=right) if type(op) in OPERATORS:
            return OPERATORS[type(op)](_number(left), _number(right))
        case _:
            raise ValueError("no arithmetic")


def _count(node: ast.expr) -> int:
    match node:
        case ast.Call(
            func=ast.Attribute(value=ast.Constant(value=str() as text), attr="count"),
            args=[ast.Constant(value=str() as part)],
            keywords=[],
        ):
            return text.count(part)
        case _:
            raise ValueError("no count")


class Calculator(LogitsProcessor):
    """Forces the result behind every expression that a model closes: ``<|output_start|>result<|output_end|>``.

    What is forced follows from the tokens alone, so rows of a batch, samples and beams may come in any order and with
    any padding. An expression that `calculate` refuses forces nothing.

    Args:
        tokenizer: has nanochat's tool tokens.

    Raises:
        ValueError: the tokenizer lacks a tool token; the message names it.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase):
        vocabulary = tokenizer.get_vocab()
        for token in TOOL_TOKENS:
            if token not in vocabulary:
                raise ValueError(f"The tokenizer has no {token}, which the calculator needs; set calculator=false.")
        self.tokenizer = tokenizer
        self.python_start, self.python_end, self.output_start, self.output_end = map(vocabulary.get, TOOL_TOKENS)

    def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor) -> torch.FloatTensor:
        """Scores (rows, vocabulary) of the next token after input_ids (rows, tokens), -inf but for a forced one."""
        recent = input_ids[:, -(MAX_RESULT + 2) :]  # a result that is not all there yet began no longer ago
        rows = (recent == self.python_end).any(1) & (recent[:, -1] != self.output_end)
        scores = scores.clone()
        for row in rows.nonzero().flatten().tolist():
            token = self.forced(input_ids[row].tolist())
            if token is not None:
                scores[row] = -math.inf
                scores[row, token] = 0
        return scores

    def forced(self, ids: list[int]) -> int | None:
        """The token that must follow a row of token ids, None where the model is free."""
        end = len(ids) - 1 - ids[::-1].index(self.python_end)
        after = ids[end + 1 :]
        if self.output_end in after or self.python_start not in ids[:end]:
            return None
        start = end - 1 - ids[:end][::-1].index(self.python_start)
        result = calculate(self.tokenizer.decode(ids[start + 1 : end], clean_up_tokenization_spaces=False))
        if result is None:
            return None
        output = [self.output_start, *self.tokenizer.encode(result, add_special_tokens=False), self.output_end]
        written = len(after)
        return output[written] if written < len(output) and output[:written] == after else None
