"""What the model type laplacian-heads of lm-eval costs against its stock type hf, on the same requests."""

import contextlib
import io
import logging
import random

from lm_eval.api.instance import Instance
from lm_eval.models.huggingface import HFLM

from benchmarks.stages import in_turns, row
from benchmarks.worker import memory_gb, reset_peak
from laplacian_heads import LaplaceGPTConfig, LaplaceGPTForCausalLM
from laplacian_heads.eval.harness import LaplacianHeadsLM
from laplacian_heads.problems import KINDS, problems
from laplacian_heads.train.tokenizer import train_tokenizer

PROMPTS, SAMPLES, ROWS = 8, 10, 40
NEW_TOKENS = 64
LETTER_PROMPTS, LETTER_ROWS = 16, 8


def lines(repeats: int) -> list[str]:
    """The measurements as Markdown."""
    logging.getLogger("lm_eval").setLevel(logging.ERROR)
    turns = [turn["content"] for kind in KINDS for turns in problems(kind, "train", 200) for turn in turns]
    with contextlib.redirect_stdout(io.StringIO()):
        text = train_tokenizer(turns, 1024, 2048)
    words = " ".join(turns).split()
    generator = random.Random(0)

    def prompt(count: int) -> str:
        question = " ".join(generator.choices(words, k=count))
        chat = [{"role": "user", "content": question}]
        return text.apply_chat_template(chat, add_generation_prompt=True, tokenize=False)

    ours, stock = _models(text, 2048, ROWS)
    settings = {"until": [], "max_gen_toks": NEW_TOKENS, "do_sample": True, "temperature": 1.0, "top_k": 50}
    prompts = [prompt(generator.randrange(40, 120)) for _ in range(PROMPTS)]
    requests = [Instance("generate_until", {}, (each, settings), 0) for each in prompts for _ in range(SAMPLES)]
    seconds = in_turns([lambda lm=lm: lm.generate_until(requests, disable_tqdm=True) for lm in (ours, stock)], repeats)

    # nanochat's vocabulary; prompts as long as MMLU's long ones
    ours, stock = _models(text, 65536, LETTER_ROWS)
    prompts = [prompt(generator.randrange(300, 500)) for _ in range(LETTER_PROMPTS)]
    requests = [Instance("loglikelihood", {}, (each, letter), 0) for each in prompts for letter in "ABCD"]
    jobs = [lambda lm=lm: lm.loglikelihood(requests, disable_tqdm=True) for lm in (ours, stock)]
    letter_seconds = in_turns(jobs, repeats)
    peaks = []
    for job in jobs:
        before = memory_gb("VmRSS")
        reset_peak()
        job()
        peaks.append(memory_gb("VmHWM") - before)
    return [
        "## Scoring, against lm-eval's stock model type",
        "",
        f"4 layers, width 256. pass@10: {PROMPTS} prompts of 40 to 120 words as in GSM8K, {SAMPLES} samples of "
        f"{NEW_TOKENS} tokens, {ROWS} rows at a time, with the calculator and draws of their own here and neither in "
        f"`hf`. Letters: {LETTER_PROMPTS} prompts of 300 to 500 words, {LETTER_ROWS} rows at a time, a vocabulary of "
        "65,536.",
        "",
        "| | | against | ratio |",
        "|---|---|---|---|",
        row("pass@10, `laplacian-heads`", seconds[0], "`hf`, repeats: 10", seconds[1]),
        row("letters, `laplacian-heads`", letter_seconds[0], "`hf`", letter_seconds[1]),
        row("letters, transient memory", peaks[0], "`hf`", peaks[1], "GB"),
        "",
    ]


def _models(text, vocab_size: int, rows: int) -> tuple[LaplacianHeadsLM, HFLM]:
    config = LaplaceGPTConfig(
        **{"vocab_size": vocab_size, "num_hidden_layers": 4, "hidden_size": 256, "intermediate_size": 1024},
        **{"num_attention_heads": 4, "num_key_value_heads": 4, "laplacian_heads": 2, "max_position_embeddings": 2048},
        **{"bos_token_id": text.bos_token_id, "eos_token_id": None, "pad_token_id": text.pad_token_id},
    )
    model = LaplaceGPTForCausalLM(config).eval()
    model.lm_head.weight.data.normal_(std=0.02)
    return tuple(kind(model, tokenizer=text, device="cpu", batch_size=rows) for kind in (LaplacianHeadsLM, HFLM))
