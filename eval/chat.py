"""A conversation with a model in the terminal."""

import dataclasses
import math
import re
import sys

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LogitsProcessorList, TextStreamer, set_seed

from laplacian_heads.eval.calculator import Calculator
from laplacian_heads.files import check_model

CALL = re.compile(r"<\|python_start\|>(.*?)<\|python_end\|>(?:<\|output_start\|>(.*?)<\|output_end\|>)?", re.DOTALL)
SPECIAL = re.compile(r"<\|\w+\|>")
# How a calculator call is shown: [47+85] = 132
SHOWN = {"<|python_start|>": "[", "<|python_end|>": "]", "<|output_start|>": " = ", "<|output_end|>": "\n"}


@dataclasses.dataclass
class ChatRecipe:
    """Keys of `recipes/chat.yaml`, which says what they mean."""

    model: str | None
    temperature: float
    top_k: int
    max_new_tokens: int
    seed: int
    calculator: bool
    trust_remote_code: bool

    def __post_init__(self):
        if not self.model:
            raise ValueError(f"model is {self.model!r}, allowed is a model's folder or its id on the Hub.")
        if not 0 <= self.temperature < math.inf:
            raise ValueError(f"temperature is {self.temperature}, allowed is a finite number of at least 0.")
        for name, least in (("top_k", 0), ("max_new_tokens", 1), ("seed", 0)):
            if getattr(self, name) < least:
                raise ValueError(f"{name} is {getattr(self, name)}, allowed is at least {least}.")


class Answer(TextStreamer):
    """Prints an answer while it is generated, a calculator call as ``[47+85] = 132``."""

    def on_finalized_text(self, text: str, stream_end: bool = False):
        text = SPECIAL.sub(lambda token: SHOWN.get(token[0], ""), text)
        super().on_finalized_text(text, stream_end)


def chat(recipe: ChatRecipe, dry_run: bool = False) -> None:
    """Answer what is typed, or piped in line by line, until an empty line, "exit" or the end of the input.

    The oldest questions are forgotten when the conversation fills the model's context.

    Raises:
        ValueError: the model has no chat template, or a context that the longest answer fills.
        OSError: the model cannot be read.
    """
    check_model(recipe.model)
    tokenizer = AutoTokenizer.from_pretrained(recipe.model, trust_remote_code=recipe.trust_remote_code)
    if tokenizer.chat_template is None:
        raise ValueError(
            f"{recipe.model} has no chat template, which a conversation needs; choose one trained on chats."
        )
    processors = LogitsProcessorList([Calculator(tokenizer)] if recipe.calculator else [])
    if dry_run:
        print(f"A conversation with {recipe.model}, answers of up to {recipe.max_new_tokens} tokens.")
        return

    model = AutoModelForCausalLM.from_pretrained(recipe.model, trust_remote_code=recipe.trust_remote_code).eval()
    model.to(torch.accelerator.current_accelerator(check_available=True))
    room = getattr(model.config, "max_position_embeddings", tokenizer.model_max_length) - recipe.max_new_tokens
    if room < 1:
        raise ValueError(
            f"max_new_tokens is {recipe.max_new_tokens}, allowed is less than {room + recipe.max_new_tokens}, the "
            "model's context."
        )
    sampling = {"do_sample": False}
    if recipe.temperature > 0:
        sampling = {"do_sample": True, "temperature": recipe.temperature, "top_k": recipe.top_k}
    if model.generation_config.eos_token_id is None:
        sampling["eos_token_id"] = tokenizer.eos_token_id
    set_seed(recipe.seed)

    messages = []
    if hasattr(sys.stdin, "reconfigure"):
        sys.stdin.reconfigure(errors="replace")  # bytes that are no text
    prompt = "> " if sys.stdin.isatty() else ""
    if prompt:
        print("An empty line or exit ends the conversation.")
    while True:
        try:
            question = input(prompt).strip()
        except (EOFError, KeyboardInterrupt):
            break
        if question in ("", "exit"):
            break
        messages.append({"role": "user", "content": question})
        inputs = _prompt(tokenizer, messages, room)
        if inputs is None:
            print(f"This is too long: a question and its answer have {room + recipe.max_new_tokens} tokens in all.")
            messages.clear()
            continue
        try:
            output = model.generate(
                **inputs.to(model.device),
                **sampling,
                max_new_tokens=recipe.max_new_tokens,
                pad_token_id=tokenizer.pad_token_id,
                use_cache=True,
                logits_processor=processors,
                streamer=Answer(tokenizer, skip_prompt=True),
            )
        except KeyboardInterrupt:
            break
        messages += _messages(tokenizer.decode(output[0, inputs["input_ids"].shape[1] :]))


def _prompt(tokenizer, messages: list[dict], room: int):
    """Tokens of the conversation, without its oldest questions and answers if they exceed `room`; drops these.

    Returns None if the last question alone is too long.
    """
    while True:
        inputs = tokenizer.apply_chat_template(
            messages,
            add_generation_prompt=True,
            return_dict=True,
            return_tensors="pt",
            tokenizer_kwargs={"verbose": False},  # of a length that is seen to here
        )
        if inputs["input_ids"].shape[1] <= room:
            return inputs
        questions = [i for i, message in enumerate(messages) if message["role"] == "user"]
        if len(questions) == 1:
            return None
        del messages[: questions[1]]


def _messages(answer: str) -> list[dict]:
    """The messages of an answer in the form of chat templates: its text, its calculator calls and their results."""
    messages = []
    *pieces, last = CALL.split(answer)
    for text, code, result in zip(pieces[::3], pieces[1::3], pieces[2::3], strict=True):
        call = {"type": "function", "function": {"name": "python", "arguments": {"code": code}}}
        messages.append({"role": "assistant", "content": SPECIAL.sub("", text), "tool_calls": [call]})
        if result is not None:
            messages.append({"role": "tool", "content": result})
    return [*messages, {"role": "assistant", "content": SPECIAL.sub("", last)}]
