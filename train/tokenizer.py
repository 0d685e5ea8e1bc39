"""Byte-level BPE with nanochat's special tokens: the verb `tokenizer`."""

import dataclasses
import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from tqdm.auto import tqdm
from transformers import PreTrainedTokenizerFast

from laplacian_heads import recipes, sources

# Groups that BPE does not merge across: GPT-4's, with digits in groups of one or two as in nanochat.
PATTERN = (
    r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}{1,2}| ?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+"
)
# In the order of their ids, which are the last ones of the vocabulary.
SPECIAL_TOKENS = [
    "<|pad|>",
    "<|bos|>",
    "<|user_start|>",
    "<|user_end|>",
    "<|assistant_start|>",
    "<|assistant_end|>",
    "<|python_start|>",
    "<|python_end|>",
    "<|output_start|>",
    "<|output_end|>",
]

# Messages as nanochat renders them (karpathy/nanochat at 01f5f10, `Tokenizer.render_conversation`), in the form of
# transformers: a system message goes in front of the first question, and an assistant's turn stays open from a tool
# call to the end of the message after the tool's result. What the assistant says, calls and ends with lies between the
# generation markers. "<|" in a text is split, so that no text can pass for a special token.
CHAT_TEMPLATE = """\
{%- macro text(content) -%}
    {%- if content is string -%}
        {{- content | replace('<|', '< |') -}}
    {%- elif content is not none -%}
        {%- for part in content -%}
            {%- if part.type != 'text' -%}{{- raise_exception('This model reads text only.') -}}{%- endif -%}
            {{- part.text | replace('<|', '< |') -}}
        {%- endfor -%}
    {%- endif -%}
{%- endmacro -%}
{{- bos_token -}}
{%- set turn = namespace(system=none, open=false) -%}
{%- for message in messages -%}
    {%- if message.role == 'system' and loop.first -%}
        {%- set turn.system = text(message.content) -%}
    {%- elif message.role == 'user' -%}
        {{- '<|user_start|>' -}}
        {%- if turn.system is not none -%}{{- turn.system + '\\n\\n' -}}{%- set turn.system = none -%}{%- endif -%}
        {{- text(message.content) + '<|user_end|>' -}}
        {%- set turn.open = false -%}
    {%- elif message.role == 'assistant' -%}
        {%- if not turn.open -%}{{- '<|assistant_start|>' -}}{%- endif -%}
        {%- set turn.open = message.tool_calls is defined and message.tool_calls -%}
        {%- generation -%}
        {{- text(message.content) -}}
        {%- if turn.open -%}
            {%- for call in message.tool_calls -%}
                {%- if call.function.arguments.code is not defined -%}
                    {{- raise_exception('A tool call needs arguments with code.') -}}
                {%- endif -%}
                {{- '<|python_start|>' + text(call.function.arguments.code) + '<|python_end|>' -}}
            {%- endfor -%}
        {%- else -%}
            {{- '<|assistant_end|>' -}}
        {%- endif -%}
        {%- endgeneration -%}
    {%- elif message.role == 'tool' -%}
        {{- '<|output_start|>' + text(message.content) + '<|output_end|>' -}}
    {%- else -%}
        {{- raise_exception('The role ' + message.role + ' has no place here.') -}}
    {%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt and not turn.open -%}{{- '<|assistant_start|>' -}}{%- endif -%}
"""


def train_tokenizer(
    documents: Iterable[str], vocab_size: int, context: int, show_progress: bool = False
) -> PreTrainedTokenizerFast:
    """Train a byte-level BPE tokenizer.

    Args:
        documents: the text to learn merges from.
        vocab_size: entries, special tokens included; fewer result if the text has no more pairs to merge.
        context: the longest input of the model it is for, in tokens.

    Raises:
        ValueError: the vocabulary is too small for the 256 bytes and the special tokens.
    """
    ordinary = vocab_size - len(SPECIAL_TOKENS)
    if ordinary < 256:
        raise ValueError(f"vocab_size is {vocab_size}, allowed is at least {256 + len(SPECIAL_TOKENS)}.")
    tokenizer = Tokenizer(models.BPE(byte_fallback=False))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PATTERN), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=ordinary, initial_alphabet=alphabet, show_progress=show_progress)
    tokenizer.train_from_iterator(documents, trainer)
    tokenizer.add_special_tokens(SPECIAL_TOKENS)
    bos = tokenizer.token_to_id("<|bos|>")
    tokenizer.post_processor = processors.TemplateProcessing(single="<|bos|> $A", special_tokens=[("<|bos|>", bos)])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<|bos|>",
        eos_token="<|assistant_end|>",
        pad_token="<|pad|>",
        additional_special_tokens=SPECIAL_TOKENS,
        model_max_length=context,
        clean_up_tokenization_spaces=False,
        chat_template=CHAT_TEMPLATE,
    )


def token_bytes(tokenizer: PreTrainedTokenizerFast) -> list[int]:
    """Bytes of text each token stands for, by id; 0 for special tokens."""
    special = set(tokenizer.all_special_tokens)
    tokens = tokenizer.convert_ids_to_tokens(range(len(tokenizer)))
    # The byte-level alphabet has one character for each byte.
    return [0 if token in special else len(token) for token in tokens]


@dataclasses.dataclass(kw_only=True)
class TokenizerRecipe:
    """Keys of the recipes for tokenizers."""

    data: str | list
    output: str
    vocab_size: int
    context: int
    max_characters: int
    max_document: int

    def __post_init__(self):
        smallest = 256 + len(SPECIAL_TOKENS)
        if self.vocab_size < smallest:
            raise ValueError(f"vocab_size is {self.vocab_size}, allowed is at least {smallest}.")
        for name in ("context", "max_characters", "max_document"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}, allowed is at least 1.")
        for name in ("data", "output"):
            if not getattr(self, name):
                raise ValueError(f"{name} is {getattr(self, name)!r}, allowed is the name of one.")


def tokenizer(recipe: TokenizerRecipe, dry_run: bool = False) -> None:
    """Train a tokenizer and write it to the recipe's output folder, which appears when it is complete.

    Raises:
        ValueError: a value of the recipe or its data is not allowed, or the folder holds something else.
    """
    output = Path(recipe.output).expanduser()
    limit = f"{recipe.max_characters:,} characters of each of {recipe.data}"
    print(f"a tokenizer of {recipe.vocab_size:,} entries from at most {limit}, into {output}")
    if dry_run:
        return
    recipes.check_output(output, recipe)
    if (output / "tokenizer.json").exists():
        print(f"{output} is finished.")
        return
    if output.exists():
        raise ValueError(f"output: {output} is there already and no tokenizer; give another output=.")
    sample = [text for source in sources.listed(recipe.data) for text in _sample(source, recipe)]
    if not sample:
        raise ValueError(f"data: {recipe.data} has no text.")
    trained = train_tokenizer(sample, recipe.vocab_size, recipe.context, show_progress=True)
    part = output.with_name(output.name + ".part")
    shutil.rmtree(part, ignore_errors=True)
    trained.save_pretrained(part)
    recipes.write(part / "recipe.yaml", recipe)
    part.replace(output)
    characters = sum(map(len, sample))
    tokens = sum(map(len, trained(sample[:1000], add_special_tokens=False, verbose=False)["input_ids"]))
    bytes_per_token = sum(len(text.encode()) for text in sample[:1000]) / tokens
    print(f"{output}: {len(trained):,} entries from {characters:,} characters, {bytes_per_token:.2f} bytes a token")


def _sample(source: str, recipe: TokenizerRecipe) -> Iterator[str]:
    left = recipe.max_characters
    with tqdm(total=left, desc=source, unit="character", unit_scale=True) as progress:
        for text in sources.documents(source):
            text = text[: min(recipe.max_document, left)]
            yield text
            progress.update(len(text))
            left -= len(text)
            if left == 0:
                return
