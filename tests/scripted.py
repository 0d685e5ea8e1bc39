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
    """Answers each question with a text of `config.script`, a JSON list of questions and their answers in token ids.

    A question with several answers has each with the same probability; they differ in their first token. Once there is
    a calculator output, its own or one that was forced, it says `config.before`, repeats the output and ends.
    """

    config_class = ScriptedConfig

    def __init__(self, config):
        super().__init__(config)
        self.script = {tuple(question): answers for question, answers in json.loads(config.script)}
        self.one = torch.nn.Parameter(torch.ones(()))
        self.post_init()

    def _init_weights(self, module):
        if module is self:
            torch.nn.init.ones_(self.one)

    def prepare_inputs_for_generation(self, input_ids, attention_mask=None, **kwargs):
        return {"input_ids": input_ids, "logits_to_keep": 1}

    def forward(self, input_ids, attention_mask=None, logits_to_keep=0, **_):
        kept = range(input_ids.shape[1])
        kept = kept[-logits_to_keep:] if isinstance(logits_to_keep, int) else logits_to_keep.tolist()
        logits = torch.zeros(len(input_ids), len(kept), self.config.vocab_size)
        for i, row in enumerate(input_ids.tolist()):
            for j, place in enumerate(kept):
                logits[i, j, self.next(row[: place + 1])] = 50
        return CausalLMOutput(logits=self.one * logits)

    def next(self, ids):
        """The tokens that may come next."""
        user, asked, assistant, end, output, done = (self.config.tokens[name] for name in NAMES)
        if assistant not in ids or last(ids, assistant) < last(ids, user):
            return [end]  # within a question
        question = tuple(ids[last(ids, user) + 1 : last(ids, asked)])
        said = ids[last(ids, assistant) + 1 :]
        answers = [[*answer, end] for answer in self.script[question]]
        if done in said:
            answers = [[*self.config.before, *said[last(said, output) + 1 : last(said, done)], end]]
            said = said[last(said, done) + 1 :]
        going_on = [answer for answer in answers if answer[: len(said)] == said] or answers[:1]
        return sorted({answer[len(said)] if len(said) < len(answer) else end for answer in going_on})


NAMES = ["user_start", "user_end", "assistant_start", "assistant_end", "output_start", "output_end"]
AutoConfig.register("scripted", ScriptedConfig)
AutoModelForCausalLM.register(ScriptedConfig, Scripted)


def last(ids, token):
    return len(ids) - 1 - ids[::-1].index(token)


def chat_tokenizer():
    texts = [turn["content"] for kind in KINDS for turns in problems(kind, "train", 50) for turn in turns]
    return train_tokenizer(texts, 400, 256)


def save_scripted(folder, script, context=256, before=""):
    """Save a model that answers as the dict `script` says, each question with one text or any of a list.

    before: what it says before it repeats a calculator output.
    """
    tokenizer = chat_tokenizer()

    def encode(text):
        return tokenizer.encode(text, add_special_tokens=False)

    lists = {question: [said] if isinstance(said, str) else said for question, said in script.items()}
    encoded = [[encode(question), list(map(encode, answers))] for question, answers in lists.items()]
    config = ScriptedConfig(
        script=json.dumps(encoded),
        before=encode(before),
        tokens={name: tokenizer.convert_tokens_to_ids(f"<|{name}|>") for name in NAMES},
        vocab_size=len(tokenizer),
        max_position_embeddings=context,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    Scripted(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return tokenizer
