"""The paper's tasks: scores item by item against loops without lm-eval, and of models whose answers are known."""

import inspect
import itertools
import json
import random

import datasets
import lm_eval
import numpy
import pytest
import torch
from conftest import ROOT
from lm_eval.api.instance import Instance
from lm_eval.tasks import TaskManager
from scripted import chat_tokenizer, save_scripted
from transformers import AutoModelForCausalLM

from laplacian_heads import recipes
from laplacian_heads.__main__ import main
from laplacian_heads.eval import evaluate as evaluation
from laplacian_heads.eval import sandbox
from laplacian_heads.eval.calculator import calculate
from laplacian_heads.eval.evaluate import TASKS, EvalRecipe, evaluate
from laplacian_heads.eval.harness import Draw, LaplacianHeadsLM

REAL = ROOT.parent / "shared" / "hub" / "datasets"
LETTER_TASKS = ["chatcore_arc_easy", "chatcore_arc_challenge", "chatcore_mmlu"]


def arc(question, text, labels, right):
    return {"question": question, "choices": {"text": text.split(), "label": list(labels)}, "answerKey": right}


ARC = [
    arc("Which is a metal?", "iron wood wool", "ABC", "A"),
    arc("What do bees make?", "milk honey salt silk", "1234", "2"),
    arc("Which planet is red?", "Venus Earth Saturn Neptune Mars", "ABCDE", "E"),
    arc("What freezes at 0 °C?", "oil air water sand", "ABCD", "C"),
]
MMLU = [
    {"question": "What is 2 + 2?", "subject": "sums", "choices": ["3", "4", "5", "6"], "answer": 1},
    {"question": "Who wrote Faust?", "subject": "letters", "choices": ["Goethe", "Kant", "Mann", "Böll"], "answer": 0},
    {"question": "Which one is last? " * 9, "subject": "order", "choices": ["a", "b", "c", "d"], "answer": 3},
]
GSM8K = [
    {"question": "Tom has 48 nuts and half as many figs. How many are these?", "answer": "<<48/2=24>>24\n#### 24"},
    {"question": "A ticket costs 1,250 cents. What do two cost?", "answer": "#### 2,500"},
    {"question": "It was 3 degrees and fell by 10. What is it?", "answer": "3-10=<<3-10=-7>>-7\n#### -7"},
    {"question": "How many?", "answer": "#### 5"},
]
HUMANEVAL = [
    {
        "task_id": f"HumanEval/{i}",
        "prompt": f"from typing import List\n\n\ndef add{i}(numbers: List[int]):\n    'Their sum and {i}.'\n",
        "canonical_solution": f"    return sum(numbers) + {i}\n",
        "test": f"def check(candidate):\n    assert candidate([1, 2]) == {3 + i}\n    assert candidate([]) == {i}\n",
        "entry_point": f"add{i}",
    }
    for i in range(3)
]


@pytest.fixture
def rows(tmp_path, monkeypatch):
    """The working folder has the datasets under their names, so that load_dataset finds them without a Hub."""
    for name, content in {
        "allenai/ai2_arc/ARC-Easy": ARC,
        "allenai/ai2_arc/ARC-Challenge": ARC[::-1],
        "cais/mmlu/all": MMLU,
        "openai/gsm8k/main": GSM8K,
        "openai/openai_humaneval/openai_humaneval": HUMANEVAL,
    }.items():
        folder = tmp_path / "rows" / name
        folder.mkdir(parents=True)
        datasets.Dataset.from_list(content).to_parquet(folder / "test-00000-of-00001.parquet")
    for folder in (tmp_path / "rows").glob("*/*"):
        configs = "".join(
            f"- config_name: {config.name}\n  data_files:\n  - split: test\n    path: {config.name}/test-*\n"
            for config in folder.iterdir()
        )
        (folder / "README.md").write_text(f"---\nconfigs:\n{configs}---\n")
    monkeypatch.chdir(tmp_path / "rows")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    return tmp_path / "rows"


@pytest.fixture(scope="module")
def chat():
    return chat_tokenizer()


def save_random(folder, tiny, chat, seed=0, **fields):
    special = {f"{name}_token_id": getattr(chat, f"{name}_token_id") for name in ("bos", "eos", "pad")}
    tiny(seed=seed, vocab_size=len(chat), max_position_embeddings=2048, **special, **fields).save_pretrained(folder)
    chat.save_pretrained(folder)
    return folder


def score(folder, *tasks, **values):
    """The entries of eval.json, and the rows of each task's samples."""
    given = {"model": str(folder), "tasks": list(tasks), "device": "cpu", "confirm_run_unsafe_code": True, **values}
    evaluate(recipes.load(EvalRecipe, "eval", given))
    entries = json.loads((folder / "eval.json").read_text())["tasks"]
    samples = {
        task: [json.loads(line) for line in (folder / entry["samples"]).read_text().splitlines()]
        for task, entry in entries.items()
        if entry["samples"]
    }
    return entries, samples


def rendered(chat, question):
    text = chat.apply_chat_template([{"role": "user", "content": question}], add_generation_prompt=True, tokenize=False)
    return chat.encode(text, add_special_tokens=False)


def letter_prompt(question, choices, letters):
    choices = "".join(f"- {choice}={letter}\n" for choice, letter in zip(choices, letters, strict=True))
    return f"Multiple Choice question: {question}\n{choices}\nRespond only with the letter of the correct answer."


def letter_items(task, docs):
    """Question, letters and the place of the right one."""
    for doc in docs:
        if task == "chatcore_mmlu":
            yield letter_prompt(doc["question"], doc["choices"], "ABCD"), list("ABCD"), doc["answer"]
        else:
            text, labels = doc["choices"]["text"], doc["choices"]["label"]
            yield letter_prompt(doc["question"], text, labels), labels, labels.index(doc["answerKey"])


def assert_letters_are_the_likeliest(model, chat, task, docs, entry, samples):
    correct = []
    with torch.no_grad():
        for question, letters, right in letter_items(task, docs):
            logits = model(torch.tensor([rendered(chat, question)])).logits[0, -1]
            chosen = logits[chat.convert_tokens_to_ids(letters)].argmax()
            correct.append(float(chosen == right))
    samples.sort(key=lambda row: row["doc_id"])
    assert [row["acc"] for row in samples] == correct
    assert entry["value"] == pytest.approx(sum(correct) / len(correct))
    centred = {other["metric"]: other["value"] for other in entry["others"]}["acc_centred"]
    assert centred == pytest.approx((entry["value"] - 0.25) / 0.75)


def test_letters_item_by_item(rows, tmp_path, tiny, chat):
    folder = save_random(tmp_path / "model", tiny, chat)
    model = AutoModelForCausalLM.from_pretrained(folder)
    entries, samples = score(folder, *LETTER_TASKS, batch_size=2)
    for task, docs in zip(LETTER_TASKS, (ARC, ARC[::-1], MMLU), strict=True):
        assert_letters_are_the_likeliest(model, chat, task, docs, entries[task], samples[task])
    assert {row["acc"] for task in samples.values() for row in task} == {0.0, 1.0}


@pytest.mark.skipif(not REAL.is_dir(), reason="real rows, shared/hub beside the repository, are not here")
def test_letters_item_by_item_on_real_rows(tmp_path, tiny, chat, monkeypatch):
    monkeypatch.chdir(REAL)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    folder = save_random(tmp_path / "model", tiny, chat)
    model = AutoModelForCausalLM.from_pretrained(folder)
    entries, samples = score(folder, *LETTER_TASKS, limit=40, batch_size=16)
    for task, name in zip(LETTER_TASKS, ("ai2_arc/ARC-Easy", "ai2_arc/ARC-Challenge", "mmlu/all"), strict=True):
        (path,) = REAL.glob(f"*/{name}/test-*.parquet")
        docs = datasets.Dataset.from_parquet(str(path), cache_dir=str(tmp_path)).select(range(40))
        assert_letters_are_the_likeliest(model, chat, task, docs, entries[task], samples[task])


def answer_by_hand(model, chat, question, new_tokens, calculator, choose):
    """nanochat's generation, a token at a time and without a cache. choose(logits, step) is the next token."""
    python_start, python_end, start, end, bos = chat.convert_tokens_to_ids(
        ["<|python_start|>", "<|python_end|>", "<|output_start|>", "<|output_end|>", "<|bos|>"]
    )
    ids = rendered(chat, question)
    prompt, forced = len(ids), []
    while len(ids) - prompt < new_tokens:
        token = forced.pop(0) if forced else choose(model(torch.tensor([ids])).logits[0, -1], len(ids) - prompt)
        if token in (bos, chat.eos_token_id):
            break
        ids.append(token)
        if calculator and token == python_end and python_start in ids[prompt:-1]:
            expression = ids[len(ids) - ids[::-1].index(python_start) : -1]
            result = calculate(chat.decode(expression))
            if result is not None:
                forced = [start, *chat.encode(result, add_special_tokens=False), end]
    tools = {python_start, python_end, start, end}
    return chat.decode([token for token in ids[prompt:] if token in tools or token not in chat.all_special_ids])


def drawn(seed, prompt, sample):
    generator = random.Random(f"{seed} {sample} {prompt}")
    numbers = [generator.random() for _ in range(2048)]

    def choose(logits, step):
        values, tokens = (logits / 0.8).topk(20)
        share = torch.zeros_like(logits).scatter(0, tokens, values.softmax(-1))
        return int((share.cumsum(-1) <= numbers[step] * share.sum()).sum())

    return choose


@pytest.mark.parametrize("calculator", [True, False])
@torch.no_grad()
def test_generated_answers_item_by_item(rows, tmp_path, tiny, chat, calculator):
    """Greedy and sampled, of a model that says anything, tool tokens among it."""
    folder = save_random(tmp_path / "model", tiny, chat, seed=3)
    model = AutoModelForCausalLM.from_pretrained(folder)
    settings = {"calculator": calculator, "batch_size": 3}
    _, greedy = score(folder, "chatcore_gsm8k", gen_kwargs={"max_gen_toks": 24}, **settings)
    for row, doc in zip(greedy["chatcore_gsm8k"], GSM8K, strict=True):
        expected = answer_by_hand(model, chat, doc["question"], 24, calculator, lambda logits, _: int(logits.argmax()))
        assert row["resps"] == [[expected]]

    sampling = {"do_sample": True, "max_gen_toks": 10, "temperature": 0.8, "top_k": 20}
    _, sampled = score(folder, "chatcore_gsm8k_pass10", gen_kwargs=sampling, seed=7, **settings)
    for row, doc in zip(sampled["chatcore_gsm8k_pass10"], GSM8K, strict=True):
        prompt = chat.decode(rendered(chat, doc["question"]))
        for i, answer in enumerate(row["resps"][0]):
            assert answer == answer_by_hand(model, chat, doc["question"], 10, calculator, drawn(7, prompt, i))
        assert len(set(row["resps"][0])) > 5


def call(expression):
    return f"<|python_start|>{expression}<|python_end|>"


# For each question answers that differ in their first token, whether each is right with the calculator, and without.
SAID = [
    [
        ("A: #### 24", True, True),
        ("B: #### 25", False, False),
        (f"C: {call('25-1')}<|output_start|>5<|output_end|>", True, False),
        (f"D: {call('25-2')}<|output_start|>24<|output_end|>", False, True),
    ],
    [("A: #### 2500", True, True), ("B: #### 2,500", True, True), ("C: 2500", False, False)],
    [("A: #### 7", False, False), ("B: no", False, False)],
    [("A: #### 5", True, True)],
]


@pytest.fixture
def scripted(tmp_path):
    script = {doc["question"]: [text for text, *_ in said] for doc, said in zip(GSM8K, SAID, strict=True)}
    save_scripted(tmp_path / "scripted", script, context=1024, before="#### ")
    return tmp_path / "scripted"


@pytest.mark.parametrize("calculator", [True, False])
@pytest.mark.parametrize("batch_size", [1, 3, "auto"])
def test_pass_at_k_of_a_model_whose_answers_are_known(rows, scripted, chat, batch_size, calculator):
    entries, samples = score(
        scripted, "chatcore_gsm8k", "chatcore_gsm8k_pass10", batch_size=batch_size, calculator=calculator, seed=5
    )
    expected = []
    for doc, said in zip(GSM8K, SAID, strict=True):
        prompt = chat.decode(rendered(chat, doc["question"]))
        order = sorted(range(len(said)), key=lambda i, said=said: chat.encode(said[i][0], add_special_tokens=False)[0])
        draws = [random.Random(f"5 {sample} {prompt}").random() for sample in range(10)]
        correct = sum(said[order[int(number * len(said))]][1 if calculator else 2] for number in draws)
        expected.append((correct / 10, float(correct > 0)))
    one, ten = (sum(column) / 4 for column in zip(*expected, strict=True))
    entry = entries["chatcore_gsm8k_pass10"]
    others = {other["metric"]: other["value"] for other in entry["others"]}
    assert (entry["metric"], entry["value"]) == ("pass@10", pytest.approx(ten))
    assert others == {"pass@1": pytest.approx(one), "acc": pytest.approx(ten), "acc_centred": pytest.approx(ten)}
    assert 0 < one < ten < 1
    assert entries["chatcore_gsm8k"]["value"] == 3 / 4  # greedy takes the first of equally likely tokens, A
    assert entries["chatcore_gsm8k"]["calculator"] is calculator
    assert len(samples["chatcore_gsm8k_pass10"]) == 4


@pytest.mark.parametrize("shared", [True, False])
def test_scores_depend_on_no_batch_padding_or_order(tmp_path, tiny, chat, monkeypatch, shared):
    folder = save_random(tmp_path, tiny, chat)
    if not shared:  # what a model with another kind of cache gets
        monkeypatch.setattr(LaplacianHeadsLM, "_prefilled", lambda *_: None)
    texts = [f"<|bos|><|user_start|>{'la ' * (i * i)}<|user_end|><|assistant_start|>" for i in range(7)]
    sampling = {"until": ["<|bos|>"], "max_gen_toks": 12, "do_sample": True, "temperature": 1.0, "top_k": 50}
    greedy = {"until": [], "max_gen_toks": 12, "do_sample": False}
    found = []
    for batch_size, order in ((1, range(7)), (3, [6, 2, 4, 0, 1, 3, 5]), ("auto", range(6, -1, -1))):
        model = LaplacianHeadsLM(str(folder), device="cpu", batch_size=batch_size)
        model.tokenizer.padding_side = "right" if batch_size == 3 else "left"
        requests = [
            Instance("generate_until", {}, (texts[i], settings), 0)
            for i in order
            for settings in (greedy, *[sampling] * 5)
        ]
        answers = model.generate_until(requests, disable_tqdm=True)
        likelihoods = model.loglikelihood([Instance("loglikelihood", {}, (texts[i], "A"), 0) for i in order], True)
        found.append({i: (answers[6 * place : 6 * place + 6], likelihoods[place]) for place, i in enumerate(order)})
    for i in range(7):
        assert found[0][i][0] == found[1][i][0] == found[2][i][0]
        for other in found[1:]:
            assert other[i][1][0] == pytest.approx(found[0][i][1][0], abs=1e-5)
            assert other[i][1][1] == found[0][i][1][1]


def test_a_prompt_is_prefilled_once_for_all_its_samples(tmp_path, tiny, chat, monkeypatch):
    folder = save_random(tmp_path, tiny, chat)
    model = LaplacianHeadsLM(str(folder), device="cpu", batch_size=4)
    rows = []
    embed = model.model.model.embed_tokens
    embed.register_forward_hook(lambda _, inputs, __: rows.append(tuple(inputs[0].shape)))
    text = "<|bos|><|user_start|>la la la<|user_end|><|assistant_start|>"
    length = len(chat.encode(text, add_special_tokens=False))
    settings = {"until": [], "max_gen_toks": 3, "do_sample": True}
    model.generate_until([Instance("generate_until", {}, (text, settings), 0)] * 10, disable_tqdm=True)
    assert rows[0] == (1, length - 1)
    assert [shape for shape in rows if shape[1] > 1] == [rows[0]]
    assert sum(shape[0] for shape in rows[1:]) <= 30


def test_draws_follow_the_probabilities():
    """As many of evenly spread numbers lead to a token as its probability says."""
    logits = torch.randn(30, generator=torch.Generator().manual_seed(0)) * 2
    logits[[3, 29]] = -torch.inf
    numbers = (torch.arange(10_000) + 0.5) / 10_000
    chosen = Draw(numbers[:, None], start=4)(torch.zeros(10_000, 4, dtype=torch.long), logits.expand(10_000, -1))
    assert (chosen.max(-1).values == 0).all()
    counts = torch.bincount(chosen.argmax(-1), minlength=30)
    assert (counts - 10_000 * logits.softmax(-1)).abs().max() < 1.01
    assert counts[3] == counts[29] == 0


def test_pass_at_k_is_the_share_of_choices_with_a_right_one():
    from_file = chatcore("pass_at")
    for samples, k in itertools.product(range(1, 8), range(1, 8)):
        for correct in range(samples + 1):
            if samples < k:
                with pytest.raises(ValueError, match=f"repeats is {samples}, allowed for pass@{k} is at least {k}"):
                    from_file(k, samples, correct)
                continue
            choices = list(itertools.combinations([True] * correct + [False] * (samples - correct), k))
            assert from_file(k, samples, correct) == pytest.approx(sum(map(any, choices)) / len(choices))


def chatcore(name):
    """A function of tasks/chatcore.py, as lm-eval loads it."""
    namespace = {}
    exec(compile((TASKS / "chatcore.py").read_text(), "chatcore.py", "exec"), namespace)
    return namespace[name]


@pytest.mark.parametrize(
    ("answer", "number"),
    [
        ("so #### 12", "12"),
        ("#### -1,234.50 m", "-1234.50"),
        ("#### 5\n#### 6", "5"),
        ("####5", None),
        ("5", None),
        ("#### $5", None),
        ("#### 24.", "24."),
    ],
)
def test_the_number_of_an_answer(answer, number):
    assert chatcore("final_number")(answer) == number


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        ("Here:\n```python\ndef f():\n    pass\n```\nor\n```\nx\n```", "def f():\n    pass"),
        ("```\ndef f(): pass\n```", "def f(): pass"),
        ("  def f(): pass\n", "def f(): pass"),
        ("```python def f(): pass```", "```python def f(): pass```"),
    ],
)
def test_the_program_of_an_answer(answer, expected):
    prompt = "# a comment\n\nimport math\nfrom typing import List\n\ndef f():\n    import os\n"
    assert chatcore("program")(prompt, answer) == f"import math\nfrom typing import List\n\n{expected}\n"


needs_sandbox = pytest.mark.skipif(sandbox.why_not_isolated() is not None, reason=str(sandbox.why_not_isolated()))


@needs_sandbox
def test_programs_are_run_and_counted(rows, tmp_path, capfd):
    """A right program, one in text around it, a wrong one and one that gives up, in equal shares."""
    script = {}
    for doc in HUMANEVAL:
        code = f"{doc['prompt']}{doc['canonical_solution']}"
        script[doc["prompt"]] = [
            f"Yes:\n```python\n{code}```",
            f"{code}",
            f"No:\n```python\n{code.replace('sum(', 'max(')}```",
            "raise SystemExit(0)",
        ]
    script[HUMANEVAL[1]["prompt"]] = ["import os", "No"]
    save_scripted(tmp_path / "model", script, context=2048)
    entries, samples = score(tmp_path / "model", "chatcore_humaneval", "chatcore_humaneval_pass10", batch_size=8)
    for task, rows_of in samples.items():
        for row in rows_of:
            for text, outcome in zip(row["resps"][0], row["filtered_resps"][0], strict=True):
                right = "sum(" in text and row["doc"]["entry_point"] != "add1"
                assert (outcome == "passed") == right, (task, text, outcome)
    entry = entries["chatcore_humaneval_pass10"]
    assert (entry["metric"], entry["value"]) == ("pass@10", pytest.approx(2 / 3))
    shares = [sum("sum(" in text for text in row["resps"][0]) / 10 for row in samples["chatcore_humaneval_pass10"]]
    others = {other["metric"]: other["value"] for other in entry["others"]}
    assert others["pass@1"] == pytest.approx(sum(shares) / 3)
    assert others["sandboxed"] == 1.0
    assert "Running programs" in capfd.readouterr().err


def test_groups_average_five_tasks(rows, tmp_path, monkeypatch):
    script = {}
    for doc, said in zip(GSM8K, SAID, strict=True):
        script[doc["question"]] = [text for text, *_ in said]
    for task, docs in zip(LETTER_TASKS, (ARC, ARC, MMLU), strict=True):
        for i, (question, letters, right) in enumerate(letter_items(task, docs)):
            script[question] = letters[right] if i else letters[right - 1]
    script.update({doc["prompt"]: "no" for doc in HUMANEVAL})
    save_scripted(tmp_path / "model", script, context=2048)
    monkeypatch.setattr(sandbox, "isolated", lambda: True)
    monkeypatch.setattr(sandbox, "run", lambda prompt, *_: "passed" if "add0" in prompt else "no")
    score(tmp_path / "model", "chatcore")
    entries, _ = score(tmp_path / "model", "chatcore_paper")
    letters = [3 / 4, 3 / 4, 2 / 3]
    assert [entries[task]["value"] for task in LETTER_TASKS] == pytest.approx(letters)
    for group, gsm8k in (("chatcore", "chatcore_gsm8k"), ("chatcore_paper", "chatcore_gsm8k_pass10")):
        humaneval = gsm8k.replace("gsm8k", "humaneval")
        five = [*letters, entries[gsm8k]["value"], 1 / 3]
        assert entries[humaneval]["value"] == pytest.approx(1 / 3)
        entry = entries[group]
        assert entry["metric"] == "acc"
        assert entry["value"] == pytest.approx(sum(five) / 5)
        errors = [entries[task]["stderr"] for task in (*LETTER_TASKS, gsm8k, humaneval)]
        assert entry["stderr"] == pytest.approx(sum(error**2 for error in errors) ** 0.5 / 5)
        (centred,) = entry["others"]
        assert centred["metric"] == "acc_centred"
        expected = [(value - 0.25) / 0.75 for value in letters] + five[3:]
        assert centred["value"] == pytest.approx(sum(expected) / 5)
        assert entry["of"] == 4 + 4 + 3 + 4 + 3


def test_stock_model_type_runs_the_tasks_and_says_so(rows, scripted):
    tasks = ["chatcore_gsm8k", "chatcore_gsm8k_pass10"]
    found = lm_eval.simple_evaluate(
        "hf",
        model_args={"pretrained": str(scripted)},
        tasks=tasks,
        task_manager=TaskManager(include_path=TASKS, include_defaults=False),
        device="cpu",
        batch_size=4,
        apply_chat_template=True,
    )
    assert found["config"]["model"] == "hf"
    assert "calculator" not in found["config"]
    entries, _ = score(scripted, *tasks)
    assert found["results"]["chatcore_gsm8k"]["acc,none"] == entries["chatcore_gsm8k"]["value"]
    (ours,) = (scripted / "eval").glob("results_*.json")
    config = json.loads(ours.read_text())["config"]
    assert (config["model"], config["calculator"], config["seed"]) == ("laplacian-heads", True, 42)


def test_logits_exist_only_where_a_letter_is_scored(rows, tmp_path, tiny, chat, monkeypatch):
    folder = save_random(tmp_path / "model", tiny, chat)
    sizes, kind = [], type(AutoModelForCausalLM.from_pretrained(folder))
    forward = kind.forward

    def watched(self, *arguments, **kwargs):
        output = forward(self, *arguments, **kwargs)
        sizes.append(tuple(output.logits.shape))
        return output

    monkeypatch.setattr(kind, "forward", watched)
    watched.__signature__ = inspect.signature(forward)
    score(folder, "chatcore_mmlu", batch_size=3)
    assert sizes
    assert all(positions <= rows for rows, positions, _ in sizes)  # a position for each length, not for each token


@torch.no_grad()
def test_bits_per_byte_of_any_text(tmp_path, tiny, chat):
    texts = ["The quick brown fox.", "Größe: 5 m²", "la " * 50]
    (tmp_path / "text.jsonl").write_text("\n".join(json.dumps({"text": text}) for text in texts))
    folder = save_random(tmp_path / "model", tiny, chat)
    entries, _ = score(folder, "bits_per_byte", data=str(tmp_path / "text.jsonl"), calculator=False)
    model = AutoModelForCausalLM.from_pretrained(folder)
    nats = 0.0
    for text in texts:
        ids = torch.tensor([[chat.bos_token_id, *chat.encode(text, add_special_tokens=False)]])
        scores = model(ids).logits[0, :-1].log_softmax(-1)
        nats -= float(scores.gather(1, ids[0, 1:, None]).sum())
    size = sum(len(text.encode()) for text in texts)
    assert entries["bits_per_byte"]["value"] == pytest.approx(nats / size / numpy.log(2), rel=1e-5)


def test_another_checkpoint_at_the_same_path_is_another(rows, tmp_path, tiny, chat, monkeypatch):
    """Neither the cache of answers nor eval.json mixes them, whichever part of a checkpoint differs."""
    folder, cache = tmp_path / "model", tmp_path / "answers"
    save_random(folder, tiny, chat)
    first, _ = score(folder, "chatcore_mmlu", use_cache=str(cache))
    assert len(list(cache.iterdir())) == 1

    # The same checkpoint is not asked again, and its scores stay in eval.json.
    with monkeypatch.context() as patch:
        patch.setattr(LaplacianHeadsLM, "_next_token_scores", None)
        again, _ = score(folder, "chatcore_mmlu", use_cache=str(cache))
    assert again["chatcore_mmlu"]["value"] == first["chatcore_mmlu"]["value"]
    both, _ = score(folder, "chatcore_arc_easy")
    assert set(both) == {"chatcore_mmlu", "chatcore_arc_easy"}

    for change in ({"seed": 1}, {"laplacian_heads": 1}):
        save_random(folder, tiny, chat, **change)
        entries, samples = score(folder, "chatcore_mmlu", use_cache=str(cache))
        assert set(entries) == {"chatcore_mmlu"}
        (folder / "eval.json").unlink()
        fresh, without = score(folder, "chatcore_mmlu")
        answers = [[row["resps"] for row in found["chatcore_mmlu"]] for found in (samples, without)]
        assert answers[0] == answers[1]
    assert len(list(cache.iterdir())) == 3

    model = LaplacianHeadsLM(str(folder), device="cpu")
    owner = [path for path in cache.iterdir() if path.name.startswith(model.checkpoint[:16])]
    (other, *_) = set(cache.iterdir()) - set(owner)
    with pytest.raises(ValueError, match="holds answers of another checkpoint; give another file"):
        lm_eval.api.model.CachingLM(model, str(other))


def refusal(folder, *tasks, error=ValueError, **values):
    with pytest.raises(error) as raised:
        score(folder, *tasks, **values)
    message = " ".join(str(raised.value).split())
    assert message
    return message


def test_what_cannot_be_scored_is_said_before_the_model_is_read(tmp_path, tiny, chat, monkeypatch):
    folder = save_random(tmp_path / "model", tiny, chat)
    monkeypatch.chdir(tmp_path)  # no rows here, and no network
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    monkeypatch.setattr(evaluation, "LaplacianHeadsLM", None)
    assert "'chatcore_mmlu'" in refusal(folder, "chatcore_mlmu")
    message = refusal(folder, "chatcore_mmlu", error=OSError)
    assert message.startswith("The data of chatcore_mmlu, or what it is measured with, cannot be read: ")
    assert "cais/mmlu" in message
    assert "bits_per_byte needs the text to score" in refusal(folder, "bits_per_byte")
    assert "include_path" in refusal(folder, "chatcore_mmlu", include_path=str(tmp_path / "nowhere"))
    assert "'float17'" in refusal(folder, "chatcore_mmlu", dtype="float17")
    assert "batch_size is many, allowed is auto" in refusal(folder, "chatcore_mmlu", batch_size="many")


def test_nothing_is_run_that_nobody_allowed(rows, tmp_path, tiny, chat, monkeypatch):
    folder = save_random(tmp_path / "model", tiny, chat)
    monkeypatch.setattr(evaluation, "LaplacianHeadsLM", None)
    message = refusal(folder, "chatcore_humaneval", confirm_run_unsafe_code=False)
    assert message == "chatcore_humaneval runs code that the model writes; --confirm_run_unsafe_code allows it."
    monkeypatch.delenv(sandbox.UNSANDBOXED, raising=False)
    monkeypatch.setattr(sandbox, "why_not_isolated", lambda: "unshare: Operation not permitted")
    assert "unshare: Operation not permitted" in refusal(folder, "chatcore_humaneval")


def test_what_was_run_without_a_sandbox_says_so(rows, tmp_path, monkeypatch):
    save_scripted(tmp_path / "model", {doc["prompt"]: "no" for doc in HUMANEVAL}, context=2048)
    monkeypatch.setenv(sandbox.UNSANDBOXED, "1")
    monkeypatch.setattr(sandbox, "why_not_isolated", lambda: "unshare: Operation not permitted")
    entries, _ = score(tmp_path / "model", "chatcore_humaneval")
    assert {other["metric"]: other["value"] for other in entries["chatcore_humaneval"]["others"]}["sandboxed"] == 0


def test_tasks_of_ones_own(rows, scripted, tmp_path):
    """More samples than ten, and fewer."""
    for name, repeats in (("twelve", 12), ("four", 4)):
        text = f"include: {TASKS / 'chatcore_gsm8k_pass10.yaml'}\ntask: {name}\nrepeats: {repeats}\n"
        (tmp_path / f"{name}.yaml").write_text(text)
    _, samples = score(scripted, "twelve", include_path=str(tmp_path))
    assert all(len(row["resps"][0]) == 12 for row in samples["twelve"])
    message = refusal(scripted, "four", include_path=str(tmp_path))
    assert message == "repeats is 4, allowed for pass@10 is at least 10."
    message = refusal(scripted, "chatcore_gsm8k_pass10", gen_kwargs={"do_sample": True, "typical_p": 0.9})
    assert message == "typical_p is no setting of sampling, allowed are temperature, top_k, top_p, min_p."


def test_results_that_cannot_be_written_are_named(rows, scripted, monkeypatch):
    """lm-eval itself would only whisper; the scores of before stay."""
    score(scripted, "chatcore_gsm8k")
    before = (scripted / "eval.json").read_bytes()
    monkeypatch.setattr("lm_eval.loggers.EvaluationTracker.save_results_samples", lambda *_: None)
    assert "the results cannot be written" in refusal(scripted, "chatcore_gsm8k", error=OSError)
    assert (scripted / "eval.json").read_bytes() == before


def test_what_is_refused_before_hours_are_lost(rows, scripted, tmp_path, monkeypatch):
    monkeypatch.setattr(evaluation, "LaplacianHeadsLM", None)
    message = refusal(scripted, "chatcore_gsm8k", gen_kwargs={"max_gen_tok": 40})
    assert message == "gen_kwargs knows no 'max_gen_tok'; the nearest is 'max_gen_toks'."
    assert "score one after the other" in refusal(scripted, "chatcore", "chatcore_paper")
    (tmp_path / "afile").write_text("mine")
    assert "afile" in refusal(scripted, "chatcore_gsm8k", output=str(tmp_path / "afile"))
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "broken.yaml").write_text("task: foo\n  bad: [")
    assert "broken.yaml is no task" in refusal(scripted, "chatcore_gsm8k", include_path=str(tmp_path / "mine"))
    assert (tmp_path / "afile").read_text() == "mine"


def test_a_temperature_samples_from_a_greedy_task(rows, scripted):
    for temperature, sampled in ((1.0, True), (0, False)):
        entries, samples = score(scripted, "chatcore_gsm8k", gen_kwargs={"temperature": temperature}, seed=1)
        assert entries["chatcore_gsm8k"]["generation_kwargs"]["do_sample"] is sampled
        answers = [row["resps"][0][0] for row in samples["chatcore_gsm8k"]]
        assert all(answer.startswith("A") for answer in answers) is not sampled
        assert entries["chatcore_gsm8k"]["gen_kwargs"]["temperature"] == temperature


OTHERS = '{"checkpoint": "0123456789", "tasks": {"mine": {"value": 1}}}'


@pytest.mark.parametrize("before", ['{"checkpoint": "d9', "[]", OTHERS])
def test_scores_of_something_else_are_put_aside(rows, scripted, before, capsys):
    (scripted / "eval.json").write_text(before)
    entries, _ = score(scripted, "chatcore_gsm8k")
    assert set(entries) == {"chatcore_gsm8k"}
    aside = "eval-01234567.json" if before == OTHERS else "eval-damaged.json"
    assert (scripted / aside).read_text() == before
    assert aside in capsys.readouterr().out


def test_a_switch_of_the_command_line(scripted, capsys):
    assert main(["eval", str(scripted), "tasks=[chatcore_gsm8k]", "--confirm_run_unsafe_code", "--dry-run"]) == 0
    assert main(["eval", str(scripted), "--confirm_run_unsafe_cod"]) == 1
    assert "knows no key 'confirm_run_unsafe_cod'; the nearest is 'confirm_run_unsafe_code'" in capsys.readouterr().err
