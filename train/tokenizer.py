"""Byte-level BPE with nanochat's special tokens."""

from collections.abc import Iterable

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

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
# transformers: a system message goes in front of the first question, and an assistant's turn stays open from a tool call
# to the end of the message after the tool's result. What the assistant says, calls and ends with lies between the
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


def train_tokenizer(documents: Iterable[str], vocab_size: int, context: int) -> PreTrainedTokenizerFast:
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
    trainer = trainers.BpeTrainer(vocab_size=ordinary, initial_alphabet=alphabet, show_progress=False)
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
