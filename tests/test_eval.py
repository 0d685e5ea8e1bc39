"""The calculator, the two tasks, and scores: of a model whose answers are known, and computed without lm-eval."""

import json
import random
import socket

import lm_eval
import pytest
import torch
from lm_eval.api.instance import Instance
from lm_eval.tasks import TaskManager
from scripted import chat_tokenizer, save_scripted
from transformers import AutoModelForCausalLM, LogitsProcessorList

from laplacian_heads import recipes
from laplacian_heads.eval.calculator import MAX_RESULT, TOOL_TOKENS, Calculator, calculate
from laplacian_heads.eval.evaluate import TASKS, EvalRecipe, evaluate
from laplacian_heads.eval.harness import LaplacianHeadsLM
from laplacian_heads.problems import LETTERS, problems

ITEMS = 20


@pytest.fixture(autouse=True)
def no_network(monkeypatch):
    asked = []

    def refuse(_, address):
        asked.append(address)
        raise OSError

    monkeypatch.setattr(socket.socket, "connect", refuse)
    yield
    assert not asked


def random_expression(generator, depth=3):
    if depth == 0 or generator.random() < 0.2:
        return generator.choice([str(generator.randrange(1000)), f"{generator.random():.2f}", "1,234", "0"])
    left, right = random_expression(generator, depth - 1), random_expression(generator, depth - 1)
    operator = generator.choice(["+", "-", "*", "/", "//", "%", " + ", " * "])
    return generator.choice([f"{left}{operator}{right}", f"({left}{operator}{right})", f"-({left}){operator}{right}"])


def test_arithmetic_is_pythons():
    generator = random.Random(0)
    results = set()
    for expression in (random_expression(generator) for _ in range(500)):
        try:
            expected = str(eval(expression.replace(",", "")))
        except ZeroDivisionError:
            expected = None
        result = calculate(expression)
        assert result == (expected if len(expression) <= 200 else None), expression
        results.add(result)
    assert None in results
    assert len(results) > 100


@pytest.mark.parametrize(
    ("expression", "result"),
    [
        ("47+85", "132"),
        (" 3 - 10 ", "-7"),
        ("1,000*3", "3000"),
        ("7/2", "3.5"),
        ("--4", "4"),
        ("+.5", "0.5"),
        ("'strawberry'.count('r')", "3"),
        ('"straße".count("ß")', "1"),
        ("'a,b'.count(',')", "1"),
        ("'x'.count('__class__')", "0"),
        ("9" * MAX_RESULT, "9" * MAX_RESULT),
    ],
)
def test_results(expression, result):
    assert calculate(expression) == result


@pytest.mark.parametrize(
    "expression",
    [
        *(
            "",
            " ",
            "+",
            "4+",
            "(4",
            "4)",
            "2**3",
            "2 ** 3",
            "007",
            "1e9",
            "0x10",
            "1_0",
            "1j",
            "1 2",
            "1\n+1",
            "()",
            "1.2.3",
        ),
        *("1/0", "1//0", "1%0", "0/0.0", "1<<9", "1 if 1 else 2", "True", "x", "[1]", "(1)(2)", "1 .real", "٣+1"),
        *("'a'", "'a'+'b'", "'a'*3", "'%d'%3", "'a'.count", "'a'.count()", "'a'.count('a', 0)", "'a'.count(1)"),
        *("'a'.upper()", "b'a'.count(b'a')", "f'a'.count('a')", "'a'.count(x)", "'\\n'.count('n')", "'a\0'.count('a')"),
        *("'a'.count(sub='a')", "'a'.count(*'a')", "__import__('os').system('true')", "'a'.__class__.count('a')"),
        *("9" * (MAX_RESULT + 1), "9" * 150 + "*" + "9" * 40, "1+" * 100 + "1", "-" * 300 + "1"),
        *("(" * 101, "9." * 3, "'" + "a" * 200 + "'.count('a')", "," * 10),
    ],
)
def test_refused(expression):
    assert calculate(expression) is None


def test_nesting_does_not_matter_below_the_limit():
    assert calculate("(" * 99 + "1" + ")" * 99) == "1"
    assert calculate("-" * 190 + "1") == "1"
    assert calculate("1" + "+1" * 99) == "100"


@pytest.fixture(scope="module")
def chat():
    return chat_tokenizer()


def encode(tokenizer, text):
    return tokenizer.encode(text, add_special_tokens=False)


def call(expression):
    return f"<|python_start|>{expression}<|python_end|>"


def output(result):
    return f"<|output_start|>{result}<|output_end|>"


def test_next_tokens_follow_from_the_text(chat):
    """Every cut of a text with two calls, and one that calculates to nothing."""
    calculator = Calculator(chat)
    start, end = chat.convert_tokens_to_ids(["<|output_start|>", "<|output_end|>"])
    text = f"<|bos|>So {call('47+85')}{output(132)} and {call('1/0')} or {call('2*-3')}{output(-6)}-6<|assistant_end|>"
    ids = encode(chat, text)
    inside, forced = False, 0
    for i in range(1, len(ids)):
        inside = inside or ids[i] == start
        scores = torch.randn(1, len(chat), generator=torch.Generator().manual_seed(i))
        got = calculator(torch.tensor([ids[:i]]), scores)
        if inside:
            assert got.isfinite().nonzero().tolist() == [[0, ids[i]]]
            forced += 1
        else:
            assert torch.equal(got, scores)
        inside = inside and ids[i] != end
    assert forced == len(encode(chat, output(132) + output(-6)))


@pytest.mark.parametrize(
    "text",
    [
        f"{call('1+1')}<|output_start|>3",  # not what the calculator says
        f"{call('1+1')} ",
        f"{call('1+1')}<|assistant_end|><|pad|><|pad|>",
        "1+1<|python_end|>",
        "<|python_end|>",
        call(""),
        call("1" + "0" * MAX_RESULT),
    ],
)
def test_nothing_is_forced(chat, text):
    scores = torch.randn(1, len(chat))
    assert torch.equal(Calculator(chat)(torch.tensor([encode(chat, text)]), scores), scores)


def test_the_longest_result_is_forced_to_its_end(chat):
    number = "".join(random.Random(0).choices("123456789", k=MAX_RESULT))
    ids, forced = encode(chat, call(number)), encode(chat, output(number))
    for i in range(len(forced)):
        assert Calculator(chat)(torch.tensor([ids + forced[:i]]), torch.zeros(1, len(chat))).argmax() == forced[i]


@pytest.mark.parametrize(
    "sampling",
    [{}, {"do_sample": True, "top_k": 5, "temperature": 0.7}, {"do_sample": True, "top_p": 0.5}, {"num_beams": 3}],
)
def test_results_in_a_padded_batch(tiny, chat, sampling):
    model = tiny(
        vocab_size=len(chat), bos_token_id=chat.bos_token_id, eos_token_id=None, pad_token_id=chat.pad_token_id
    )
    texts = {call("12345*1001"): "12357345", f"Hello there, {call('1-2')}": "-1", call("1/0"): None, "Hello": None}
    rows = [encode(chat, text) for text in texts]
    longest = max(map(len, rows))
    ids = torch.tensor([[chat.pad_token_id] * (longest - len(row)) + row for row in rows])
    mask = torch.tensor([[0] * (longest - len(row)) + [1] * len(row) for row in rows])
    sampling = {"do_sample": False, "max_new_tokens": 16, **sampling}
    calculator = LogitsProcessorList([Calculator(chat)])
    torch.manual_seed(0)
    outputs = model.generate(ids, attention_mask=mask, logits_processor=calculator, **sampling)[:, longest:].tolist()
    for row, result, got in zip(rows, texts.values(), outputs, strict=True):
        forced = [] if result is None else encode(chat, output(result))
        assert got[: len(forced)] == forced
        if not sampling["do_sample"] and "num_beams" not in sampling:  # the rest is what the model says alone
            alone = model.generate(torch.tensor([row + forced]), do_sample=False, max_new_tokens=16 - len(forced))
            assert got[len(forced) :] == alone[0, len(row) + len(forced) :].tolist()


def test_a_tokenizer_without_tool_tokens(tokenizer):
    with pytest.raises(ValueError, match=r"has no <\|python_start\|>, which the calculator needs"):
        Calculator(tokenizer)


def arithmetic_script():
    """Answers to the arithmetic questions, and whether they are right with the calculator and without."""
    script, right = {}, {True: 0, False: 0}
    for i, turns in enumerate(problems("arithmetic", "test", ITEMS)):
        question, answer = turns[0]["content"], turns[-1]["content"]
        expression = turns[1]["tool_calls"][0]["function"]["arguments"]["code"]
        said, with_calculator, without = [
            (f"{call(expression)}{output('none')}", True, False),
            (answer, True, True),
            (f"{answer}1", False, False),
            (f"{call(expression + '+1')}{output(answer)}", False, True),
            (f"{call(expression + '+')}{output(answer)}", True, True),  # not calculated
        ][i % 5]
        script[question] = said
        right[True] += with_calculator
        right[False] += without
    assert len(script) == ITEMS  # each question once
    return script, right


@pytest.fixture(scope="module")
def scripted(tmp_path_factory):
    """A folder, and what its model scores with the calculator and without."""
    folder = tmp_path_factory.mktemp("scripted")
    script, right = arithmetic_script()
    for i, (question, answer) in enumerate(problems("choice", "test", ITEMS)):
        letter = answer["content"] if i % 4 else LETTERS[LETTERS.index(answer["content"]) - 1]
        script[question["content"]] = letter
    save_scripted(folder, script)
    return folder, {calculator: (15 / 20, count / ITEMS) for calculator, count in right.items()}


def recipe(model, **values):
    return recipes.load(EvalRecipe, "eval", {"model": str(model), "limit": ITEMS, "device": "cpu", **values})


@pytest.mark.parametrize("calculator", [True, False])
def test_scores_of_a_model_whose_answers_are_known(scripted, tmp_path, capfd, calculator):
    folder, expected = scripted
    evaluate(recipe(folder, calculator=calculator, batch_size=7, output=str(tmp_path / "new" / "folder")))
    written = sorted(path.name for path in (tmp_path / "new" / "folder").iterdir())
    assert written == ["eval", "eval.json"]
    results = json.loads((tmp_path / "new" / "folder" / "eval.json").read_text())
    for task, metric, chance, value in zip(
        ("generated_choice", "generated_arithmetic"),
        ("acc", "exact_match"),
        (0.25, 0.0),
        expected[calculator],
        strict=True,
    ):
        scores = results["tasks"][task]
        assert scores["metric"] == metric
        assert scores["value"] == value
        assert scores["stderr"] == pytest.approx((value * (1 - value) / (ITEMS - 1)) ** 0.5)
        assert (scores["items"], scores["of"]) == (ITEMS, 500)
        assert scores["chance"] == chance
        assert scores["calculator"] is calculator
        assert scores["lm_eval_version"] == lm_eval.__version__

    out, err = capfd.readouterr()
    table = [line.split() for line in out.splitlines()]
    assert ["generated_choice", "acc", "0.7500", "0.0993", "20", "of", "500"] in table
    assert f"{'with' if calculator else 'without'} calculator, the first {ITEMS} items" in out.splitlines()
    assert all("requests:" in line for line in err.splitlines() if line)  # progress bars and nothing else


def test_stock_model_type_runs_the_tasks_without_calculator(scripted):
    folder, expected = scripted
    tokens = json.loads((folder / "config.json").read_text())["tokens"]
    results = lm_eval.simple_evaluate(
        "hf",
        model_args={"pretrained": str(folder), "think_end_token": str(tokens["output_end"])},
        tasks=["generated_choice", "generated_arithmetic"],
        task_manager=TaskManager(include_path=TASKS, include_defaults=False),
        limit=ITEMS,
        batch_size=16,
        device="cpu",
        apply_chat_template=True,
    )["results"]
    assert (results["generated_choice"]["acc,none"], results["generated_arithmetic"]["exact_match,none"]) == expected[
        False
    ]


@pytest.fixture(scope="module")
def random_model(tiny, chat, tmp_path_factory):
    folder = tmp_path_factory.mktemp("random")
    special = {f"{name}_token_id": getattr(chat, f"{name}_token_id") for name in ("bos", "eos", "pad")}
    tiny(vocab_size=len(chat), max_position_embeddings=256, **special).save_pretrained(folder)
    chat.save_pretrained(folder)
    return folder


def test_choice_is_the_likeliest_letter_whatever_the_batch(random_model, chat):
    model = AutoModelForCausalLM.from_pretrained(random_model)
    letters = chat.convert_tokens_to_ids(list(LETTERS))
    right = 0
    for question, answer in problems("choice", "test", 40):
        ids = chat.apply_chat_template([question], add_generation_prompt=True, return_tensors="pt", return_dict=False)
        right += LETTERS[model(ids).logits[0, -1, letters].argmax()] == answer["content"]
    for batch_size in (1, 7, 32):
        evaluate(recipe(random_model, tasks=["generated_choice"], limit=40, batch_size=batch_size))
        results = json.loads((random_model / "eval.json").read_text())
        assert results["tasks"]["generated_choice"]["value"] == right / 40


def test_generation_does_not_depend_on_the_batch(random_model):
    texts = [f"<|bos|><|user_start|>{'la ' * i}<|user_end|><|assistant_start|>{call(f'{i}+1')}" for i in range(9)]
    texts[4] = texts[4].replace("+", "+ +*")  # not calculated
    answers = []
    for batch_size in (1, 4, 9):
        model = LaplacianHeadsLM(str(random_model), device="cpu", batch_size=batch_size)
        arguments = {"until": [], "max_gen_toks": 12}
        answers.append(model.generate_until([Instance("generate_until", {}, (text, arguments), 0) for text in texts]))
    assert answers[0] == answers[1] == answers[2]
    assert len(set(answers[0])) > 4


def test_all_items_are_generated_and_different():
    tasks = TaskManager(include_path=TASKS, include_defaults=False).load(["generated_choice", "generated_arithmetic"])
    for task in tasks["tasks"].values():
        assert len(task.eval_docs) == 500
        assert len(set(task.eval_docs["question"])) > 450


def refused(**values):
    with pytest.raises(ValueError, match="allowed|needs|nearest") as error:
        evaluate(recipe(**values))
    message = str(error.value)
    assert "\n" not in message
    return message


def test_refusals(scripted, random_model, tokenizer, tmp_path, capfd):
    folder, _ = scripted
    assert "'generated_choice'" in refused(model=folder, tasks=["generated_choise"])
    tokenizer.save_pretrained(tmp_path)
    assert "no chat template" in refused(model=tmp_path)
    assert TOOL_TOKENS[0] in refused(model=tmp_path, apply_chat_template=False)
    for values in ({"limit": 1}, {"batch_size": 0}, {"tasks": []}, {"output": ""}, {"model": ""}, {"device": "gpu0"}):
        assert next(iter(values)) in refused(**{"model": folder, **values})
    with pytest.raises(ValueError, match="model is None"):
        recipes.load(EvalRecipe, "eval")


@pytest.mark.parametrize("task", ["generated_choice", "generated_arithmetic"])
def test_a_prompt_is_not_cut(scripted, tmp_path, task):
    save_scripted(tmp_path, {turns[0]["content"]: "A" for turns in problems("arithmetic", "test", ITEMS)}, context=30)
    assert "allowed are 30" in refused(model=tmp_path, tasks=[task])
    assert not (tmp_path / "eval.json").exists()


def test_dry_run(scripted, tmp_path, capsys):
    folder, _ = scripted
    evaluate(recipe(folder, output=str(tmp_path / "new")), dry_run=True)
    assert "20 items of generated_choice, generated_arithmetic, with calculator" in capsys.readouterr().out
    assert not (tmp_path / "new").exists()


def test_folder_of_a_hub_model():
    assert recipe("owner/name").folder.as_posix() == "runs/eval/owner--name"
