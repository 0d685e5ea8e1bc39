"""The model type `laplacian-heads` of lm-eval: its `hf`, with what the paper's protocol needs."""

import copy
import dataclasses
import functools
import hashlib
import inspect
import itertools
import json
import os
import random
from collections.abc import Callable

import torch
from accelerate.utils.memory import should_reduce_batch_size
from lm_eval.api.registry import register_model
from lm_eval.models.huggingface import HFLM
from lm_eval.models.utils import normalize_gen_kwargs, postprocess_generated_text
from lm_eval.models.utils_hf import clear_torch_cache
from tqdm import tqdm
from transformers import (
    DynamicCache,
    LogitsProcessor,
    LogitsProcessorList,
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from laplacian_heads.eval.calculator import TOOL_TOKENS, Calculator
from laplacian_heads.modeling_laplace_gpt import CACHE

# What sampling may be told, in the order in which transformers applies it.
WARPERS = {
    "temperature": TemperatureLogitsWarper,
    "top_k": TopKLogitsWarper,
    "top_p": TopPLogitsWarper,
    "min_p": MinPLogitsWarper,
}
# Where a cache of answers says whose they are.
OWNER = "checkpoint of laplacian-heads"


class Draw(LogitsProcessor):
    """Leaves of each row the token in whose share of the probability the row's next number falls.

    A row's tokens so depend on its own numbers alone, and not on which rows stand beside it.

    Args:
        numbers: (rows, new tokens), each from [0, 1).
        start: length of the prompts, padding included.
    """

    def __init__(self, numbers: torch.Tensor, start: int):
        self.numbers, self.start = numbers, start

    def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor) -> torch.FloatTensor:
        cumulative = scores.float().softmax(-1).cumsum(-1)
        number = self.numbers[:, input_ids.shape[1] - self.start, None] * cumulative[:, -1:]
        token = torch.searchsorted(cumulative, number, right=True).clamp_(max=scores.shape[1] - 1)
        return torch.full_like(scores, -torch.inf).scatter_(1, token, 0)


@dataclasses.dataclass
class Prompt:
    """A prompt of one or more `generate_until` requests with the same settings."""

    text: str
    ids: list[int]
    places: list[int]  # of its requests in the list of all
    samples: int  # answers to generate: one for each request if they are sampled, else a single one


@register_model("laplacian-heads")
class LaplacianHeadsLM(HFLM):
    """lm-eval's `hf` model with the calculator, shared prefills, seeded samples and lean scoring of single tokens.

    - What the model puts between the tool tokens of nanochat is calculated, and the result forced into its row. The
      tool tokens stay in the text of an answer, where `hf` drops them.
    - The requests of a prompt that is sampled more than once share one prefill. Its i-th sample depends on the seed,
      the prompt and i: not on the batch it is in, nor on the order of the items.
    - Where every continuation is a single token, as with answers by letter, logits exist only where one is scored.
    - A prompt that does not fit into the model's context with its answer is refused, not cut.

    Args:
        pretrained: a folder, an id of the Hub, or a model.
        calculator: whether the results of calculator calls are put into what the model generates.
        seed: of what is sampled.
        arguments: those of `HFLM`. batch_size is of rows, which are prompts or samples; "auto" starts with
            max_batch_size and halves it when the memory of a device is full.

    Raises:
        ValueError: the tokenizer lacks the calculator's tokens; later, a prompt is longer than the model's context, a
            setting of sampling is unknown, or a cache of answers is another checkpoint's.
    """

    def __init__(self, pretrained, calculator: bool = True, seed: int = 42, **arguments):
        super().__init__(pretrained, **arguments)
        self.calculator = Calculator(self.tokenizer) if calculator else None
        self.seed = seed
        vocabulary = self.tokenizer.get_vocab()
        tools = {vocabulary.get(token) for token in TOOL_TOKENS}
        self.hidden_ids = set(self.tokenizer.all_special_ids) - tools
        self.special_ids = {token: vocabulary[token] for token in self.tokenizer.all_special_tokens}
        known = self.model.generation_config.eos_token_id
        self.end_ids = {self.tokenizer.eos_token_id, *(known if isinstance(known, list) else [known])} - {None}
        self.keeps_positions = "logits_to_keep" in inspect.signature(self.model.forward).parameters

    @functools.cached_property
    def checkpoint(self) -> str:
        """SHA-256 of the weights, the config and the tokenizer: whose answers these are."""
        digest = hashlib.sha256()
        for name, tensor in sorted(self.model.state_dict().items()):
            digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
            digest.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy())
        config = self.model.config.to_dict()
        for key in ("_name_or_path", "transformers_version"):
            config.pop(key, None)
        described = [config, self.tokenizer.get_vocab(), self.tokenizer.chat_template]
        digest.update(json.dumps(described, sort_keys=True, default=str).encode())
        return digest.hexdigest()

    def get_model_info(self) -> dict:
        # For the commit's hash lm-eval asks the Hub, even about a folder.
        on_disk = not isinstance(self.pretrained, str) or os.path.isdir(self.pretrained)
        known = {"model_num_parameters": self.model.num_parameters(), "model_dtype": self.model.dtype}
        ours = {"calculator": self.calculator is not None, "seed": self.seed, "checkpoint": self.checkpoint}
        return {**(known if on_disk else super().get_model_info()), **ours}

    def set_cache_hook(self, cache_hook) -> None:
        """Use a cache of answers, whose keys are questions alone: refuse it if it holds another checkpoint's."""
        cache = cache_hook.dbdict
        if cache is not None:
            owner = f"{self.checkpoint} {self.model.dtype} {'with' if self.calculator else 'without'} calculator"
            if len(cache) and cache.get(OWNER) != owner:
                raise ValueError(f"use_cache: {cache.filename} holds answers of another checkpoint; give another file.")
            cache[OWNER] = owner
        super().set_cache_hook(cache_hook)

    def tok_decode(self, tokens, skip_special_tokens=True):
        if skip_special_tokens:
            tokens = [token for token in tokens if token not in self.hidden_ids]
        return self.tokenizer.decode(tokens)

    def generate_until(self, requests, disable_tqdm=False):
        settings, groups = {}, {}
        for place, request in enumerate(requests):
            text, arguments = request.args
            key = json.dumps(arguments, sort_keys=True)
            settings[key] = arguments
            groups.setdefault(key, {}).setdefault(text, []).append(place)

        answers = [None] * len(requests)
        bar = tqdm(total=len(requests), disable=disable_tqdm or self.rank != 0, desc="Running generate_until requests")
        for key, group in groups.items():
            arguments = normalize_gen_kwargs(settings[key], self.max_gen_toks)
            prompts = [
                Prompt(text, self.tok_encode(text), places, len(places) if arguments["do_sample"] else 1)
                for text, places in group.items()
            ]
            for prompt in prompts:
                self._check_fits(len(prompt.ids), arguments["max_gen_toks"])
            prompts.sort(key=lambda prompt: (-len(prompt.ids), prompt.text))
            for batch, texts in self._batched(
                prompts, lambda prompt: prompt.samples, lambda batch, rows, a=arguments: self._answers(batch, a, rows)
            ):
                for prompt, samples in zip(batch, texts, strict=True):
                    for place, text in zip(prompt.places, itertools.cycle(samples), strict=False):
                        answers[place] = text
                        self.cache_hook.add_partial("generate_until", (prompt.text, settings[key]), text)
                    bar.update(len(prompt.places))
        bar.close()
        return answers

    def _answers(self, prompts: list[Prompt], arguments: dict, rows: int) -> list[list[str]]:
        """The answers to some prompts, as many as each has samples, at most so many rows at a time."""
        arguments = dict(arguments)
        new_tokens, sampled = arguments.pop("max_gen_toks"), arguments.pop("do_sample")
        until = arguments.pop("until", None) or []
        until = [until] if isinstance(until, str) else until
        warpers = LogitsProcessorList()
        if sampled:
            for name, warper in WARPERS.items():
                value = arguments.pop(name, None)
                if value is not None and (name, value) not in (("top_k", 0), ("temperature", 1.0)):
                    warpers.append(warper(value))
            if arguments:
                raise ValueError(
                    f"{next(iter(arguments))} is no setting of sampling, allowed are {', '.join(WARPERS)}."
                )
        arguments.pop("temperature", None)
        # The end of a text is mostly one token, for which no text need be looked through.
        ends = sorted(self.end_ids | {self.special_ids[text] for text in until if text in self.special_ids})
        stops = [text for text in until if text not in self.special_ids]

        length = max(len(prompt.ids) for prompt in prompts)
        pad = self.tokenizer.pad_token_id
        ids = torch.tensor([[pad] * (length - len(prompt.ids)) + prompt.ids for prompt in prompts], device=self.device)
        mask = torch.tensor([[0] * (length - len(p.ids)) + [1] * len(p.ids) for p in prompts], device=self.device)
        samples = [(i, sample) for i, prompt in enumerate(prompts) for sample in range(prompt.samples)]
        cache = self._prefilled(ids, mask) if len(samples) > len(prompts) else None

        texts = [[] for _ in prompts]
        for start in range(0, len(samples), rows):
            part = samples[start : start + rows]
            index = torch.tensor([i for i, _ in part], device=self.device)
            processors = LogitsProcessorList(warpers)
            if sampled:
                numbers = [self._numbers(prompts[i].text, sample, new_tokens) for i, sample in part]
                processors.append(Draw(torch.tensor(numbers, device=self.device), length))
            if self.calculator is not None:
                processors.append(self.calculator)
            shared = {}
            if cache is not None:
                shared[CACHE] = copy.deepcopy(cache)
                shared[CACHE].batch_select_indices(index)
            output = self._model_generate(
                ids[index],
                max_length=length + new_tokens,
                stop=stops,
                attention_mask=mask[index],
                do_sample=False,
                logits_processor=processors,
                eos_token_id=ends or None,
                **shared,
                **arguments,
            )
            for (i, _), tokens in zip(part, output[:, length:].tolist(), strict=True):
                texts[i].append(self._text(tokens, ends, stops))
        return texts

    def _numbers(self, prompt: str, sample: int, count: int) -> list[float]:
        """The numbers in [0, 1) that a sample's tokens are drawn with."""
        generator = random.Random(f"{self.seed} {sample} {prompt}")
        return [generator.random() for _ in range(count)]

    def _prefilled(self, ids: torch.Tensor, mask: torch.Tensor) -> DynamicCache | None:
        """The cache of all but the last token of each prompt; None for a model whose cache is of another kind.

        Args:
            ids, mask: (prompts, tokens), padded on the left.
        """
        if ids.shape[1] < 2 or not mask[:, :-1].any(1).all():
            return None
        # generate() knows how each model wants its positions; the token it adds is not in the cache.
        output = self._model_generate(
            ids[:, :-1],
            max_length=ids.shape[1],
            stop=[],
            attention_mask=mask[:, :-1],
            do_sample=False,
            return_dict_in_generate=True,
        )
        cache = getattr(output, CACHE, None)
        return cache if type(cache) is DynamicCache and cache.get_seq_length() == ids.shape[1] - 1 else None

    def _text(self, tokens: list[int], ends: list[int], stops: list[str]) -> str:
        tokens = list(itertools.takewhile(lambda token: token not in ends, tokens))
        if isinstance(self.think_end_token, int) and self.think_end_token in tokens:
            tokens = tokens[len(tokens) - tokens[::-1].index(self.think_end_token) :]
        think_end = self.think_end_token if isinstance(self.think_end_token, str) else None
        return postprocess_generated_text(self.tok_decode(tokens), stops, think_end)

    def loglikelihood_rolling(self, requests, disable_tqdm=False):
        # Every window begins with the prefix token; one that the tokenizer adds would be scored as if it were text.
        before, self.add_bos_token = self.add_bos_token, False
        try:
            return super().loglikelihood_rolling(requests, disable_tqdm)
        finally:
            self.add_bos_token = before

    def _loglikelihood_tokens(self, requests, disable_tqdm=False, override_bs=None):
        for _, prompt, continuation in requests:
            self._check_fits(len(prompt), len(continuation) - 1)  # the last token is scored, not read
        if not self.keeps_positions or any(len(continuation) > 1 for *_, continuation in requests):
            return super()._loglikelihood_tokens(requests, disable_tqdm, override_bs)

        prompts = {}
        for place, (_, prompt, _) in enumerate(requests):
            prompts.setdefault(tuple(prompt), []).append(place)
        answers = [None] * len(requests)
        bar = tqdm(total=len(requests), disable=disable_tqdm or self.rank != 0, desc="Running loglikelihood requests")
        ordered = sorted(prompts, key=lambda prompt: (-len(prompt), prompt))
        for batch, scores in self._batched(ordered, lambda _: 1, lambda batch, _: self._next_token_scores(batch)):
            for prompt, row in zip(batch, scores, strict=True):
                likeliest = row.argmax()
                for place in prompts[prompt]:
                    text, _, (token,) = requests[place]
                    answers[place] = (float(row[token]), bool(likeliest == token))
                    if text is not None:
                        self.cache_hook.add_partial("loglikelihood", text, answers[place])
                bar.update(len(prompts[prompt]))
        bar.close()
        return answers

    def _next_token_scores(self, prompts: list[tuple[int, ...]]) -> torch.Tensor:
        """Log-probabilities (prompts, vocabulary) of the token after each prompt."""
        lengths = [len(prompt) for prompt in prompts]
        ids = torch.tensor([[*prompt, *[0] * (max(lengths) - len(prompt))] for prompt in prompts], device=self.device)
        # Padding stands on the right, where causal models do not see it, so that positions need no mask.
        positions, place = torch.unique(torch.tensor(lengths, device=self.device) - 1, return_inverse=True)
        precision = self.mixed_precision_dtype
        with torch.no_grad(), torch.autocast(self.device.type, precision, enabled=precision is not None):
            logits = self.model(ids, logits_to_keep=positions).logits
        rows = logits[torch.arange(len(prompts), device=self.device), place]
        return rows.log_softmax(-1, dtype=self.softmax_dtype)

    def _batched(self, items: list, rows_of: Callable, work: Callable):
        """Yield (batch, work(batch, rows)) for batches of at most so many rows, or of a single item.

        With an automatic size a batch that does not fit into memory is tried again with half as many rows.
        """
        automatic = str(self.batch_size).startswith("auto")
        rows = self.max_batch_size if automatic else int(self.batch_size)
        start = 0
        while start < len(items):
            end, taken = start + 1, rows_of(items[start])
            while end < len(items) and taken + rows_of(items[end]) <= rows:
                taken += rows_of(items[end])
                end += 1
            try:
                done = work(items[start:end], rows)
            except Exception as error:
                if not automatic or rows == 1 or not should_reduce_batch_size(error):
                    raise
                rows //= 2
                clear_torch_cache()
                continue
            yield items[start:end], done
            start = end

    def _detect_batch_size(self, requests=None, pos=0):
        if self.device.type != "cpu":
            return super()._detect_batch_size(requests, pos)
        # A processor does not run out of memory, its machine does: logits and their logarithms within a gigabyte.
        length = len(requests[pos][1] + requests[pos][2]) if requests else self.max_length
        return max(1, min(self.max_batch_size, 2**30 // (8 * length * self.vocab_size)))

    def _check_fits(self, prompt: int, new: int):
        if prompt + new > self.max_length:
            raise ValueError(
                f"A prompt has {prompt} tokens and its answer up to {new}, allowed are {self.max_length} in all, the "
                "model's context."
            )
