"""A model that says what it is told to, so that its scores are known before."""

import json

import torch
from transformers import AutoConfig, AutoModelForCausalLM, GenerationMixin, PreTrainedConfig, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutput

from laplacian_heads.problems import KINDS, problems
from laplacian_heads.train.tokenizer import train_tokenizer


class ScriptedConfig(PreTrainedConfig):
    model_type = "scripted"
    num_hidden_layers = 1


class Scripted(PreTrainedModel, GenerationMixin):
    """Answers each question with the text of `config.script`, a JSON object of token ids.

    Once there is a calculator output, its own or one that was forced, it repeats what stands there and ends.
    """

    config_class = ScriptedConfig

    def __init__(self, config):
        super().__init__(config)
        self.script = {tuple(question): answer for question, answer in json.loads(config.script)}
        self.one = torch.nn.Parameter(torch.ones(()))
        self.post_init()

    def _init_weights(self, module):
        if module is self:
            torch.nn.init.ones_(self.one)

    def prepare_inputs_for_generation(self, input_ids, attention_mask=None, **kwargs):
        return {"input_ids": input_ids}

    def forward(self, input_ids, attention_mask=None, **_):
        rows = [[self.next(row[: i + 1]) for i in range(len(row))] for row in input_ids.tolist()]
        logits = torch.nn.functional.one_hot(torch.tensor(rows), self.config.vocab_size).float()
        return CausalLMOutput(logits=5 * self.one * logits)

    def next(self, ids):
        user, asked, assistant, end, output, done = (self.config.tokens[name] for name in NAMES)
        if assistant not in ids or last(ids, assistant) < last(ids, user):
            return end  # within a question
        question = tuple(ids[last(ids, user) + 1 : last(ids, asked)])
        said = ids[last(ids, assistant) + 1 :]
        if done in said:
            repeated = [*said[last(said, output) + 1 : last(said, done)], end]
            said = said[last(said, done) + 1 :]
        else:
            repeated = [*self.script[question], end]
        return repeated[len(said)] if len(said) < len(repeated) else end


NAMES = ["user_start", "user_end", "assistant_start", "assistant_end", "output_start", "output_end"]
AutoConfig.register("scripted", ScriptedConfig)
AutoModelForCausalLM.register(ScriptedConfig, Scripted)


def last(ids, token):
    return len(ids) - 1 - ids[::-1].index(token)


def chat_tokenizer():
    texts = [turn["content"] for kind in KINDS for turns in problems(kind, "train", 50) for turn in turns]
    return train_tokenizer(texts, 400, 256)


def save_scripted(folder, script, context=256):
    """Save a model that answers as the dict `script` says, and its tokenizer."""
    tokenizer = chat_tokenizer()
    encode = [[tokenizer.encode(text, add_special_tokens=False) for text in pair] for pair in script.items()]
    config = ScriptedConfig(
        script=json.dumps(encode),
        tokens={name: tokenizer.convert_tokens_to_ids(f"<|{name}|>") for name in NAMES},
        vocab_size=len(tokenizer),
        max_position_embeddings=context,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    Scripted(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return tokenizer
