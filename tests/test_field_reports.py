"""What users of custom models of transformers report as broken, each as a test that it is right here."""

import inspect
import os
import re
import subprocess
import sys
import sysconfig
from pathlib import Path
from textwrap import dedent

import pytest
import torch
from datasets import Dataset
from transformers import (
    AutoModelForCausalLM,
    DataCollatorForLanguageModeling,
    DataCollatorWithFlattening,
    Trainer,
    TrainingArguments,
)
from transformers.dynamic_module_utils import get_imports, get_relative_imports

from laplacian_heads import LaplaceGPTForCausalLM, LaplaceGPTForSequenceClassification, LaplaceGPTModel

ROOT = Path(__file__).resolve().parents[1]


def left_pad(rows, pad=0):
    """input_ids and attention_mask of rows of different lengths."""
    width = max(map(len, rows))
    ids = [[pad] * (width - len(row)) + row for row in rows]
    mask = [[0] * (width - len(row)) + [1] * len(row) for row in rows]
    return {"input_ids": torch.tensor(ids), "attention_mask": torch.tensor(mask)}


def train(model, rows, folder, collator, **arguments):
    """Two steps of Trainer with SGD; returns the losses and gradient norms it logged."""
    arguments = {"per_device_train_batch_size": 4, "max_steps": 2, "learning_rate": 0.05, **arguments}
    arguments = TrainingArguments(
        folder, optim="sgd", logging_steps=1, logging_nan_inf_filter=False, save_strategy="no", report_to="none",
        use_cpu=True, seed=0, **arguments,
    )  # fmt: skip
    trainer = Trainer(model, arguments, collator, Dataset.from_list(rows))
    trainer.train()
    return [(entry["loss"], entry["grad_norm"]) for entry in trainer.state.log_history if "loss" in entry]


@pytest.mark.parametrize("tied", [False, True])
def test_reloaded_model_has_its_tables_and_its_tie(tied, tiny, input_ids, tmp_path):
    """Buffers that are not saved are filled again, nothing stays on the meta device, and a tie is declared."""
    model = tiny(tie_word_embeddings=tied)
    model.save_pretrained(tmp_path)
    reloaded = AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    with torch.no_grad():
        assert torch.equal(reloaded(input_ids).logits, model(input_ids).logits)
    buffers = dict(reloaded.named_buffers())
    assert buffers
    assert all(torch.equal(buffer, buffers[name]) for name, buffer in model.named_buffers())
    for module in reloaded.modules():
        assert not any(torch.is_tensor(value) and value.is_meta for value in vars(module).values())
    assert (reloaded.lm_head.weight is reloaded.model.embed_tokens.weight) == tied


@pytest.mark.parametrize("file", ["configuration.py", "laplacian.py", "modeling_laplace_gpt.py"])
def test_hub_files_import_only_one_another_and_what_transformers_needs(file):
    assert set(get_relative_imports(ROOT / file)) <= {"laplacian", "configuration"}
    packages = set(get_imports(ROOT / file)) - sys.stdlib_module_names
    assert packages <= {"torch", "transformers", "huggingface_hub"}


def test_documentation_loads_tokenizers_with_trust_remote_code():
    """Without a word on it `AutoTokenizer` asks on the terminal and waits, because it reads the custom config.

    Our own code, which registers the config, says no or what the recipe says.
    """
    documentation = [ROOT / "README.md", *ROOT.glob("docs/**/*.md")]
    code = [*ROOT.glob("*.py"), *ROOT.glob("train/*.py"), *ROOT.glob("eval/*.py")]
    for files, said in ((documentation, "trust_remote_code=True"), (code, "trust_remote_code=")):
        calls = re.findall(r"AutoTokenizer\.from_pretrained\([^)]*\)", "".join(file.read_text() for file in files))
        assert calls
        assert all(said in call for call in calls)


def test_tokenizer_loads_without_a_question(tiny, tokenizer, tmp_path, fresh_process):
    tiny().save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    code = """
    import sys
    from transformers import AutoTokenizer
    print(AutoTokenizer.from_pretrained(sys.argv[1], trust_remote_code=True).decode([5, 6, 7]))
    """
    assert fresh_process(code, tmp_path / "model") == tokenizer.decode([5, 6, 7]) + "\n"


def test_gradient_accumulation_leaves_loss_and_gradients_alone(tiny, tokenizer, tmp_path):
    """Rows of different lengths: a mean of means would weigh their tokens differently."""
    generator = torch.Generator().manual_seed(0)
    rows = [{"input_ids": torch.randint(3, 300, (length,), generator=generator).tolist()} for length in range(4, 20, 2)]
    collator = DataCollatorForLanguageModeling(tokenizer, mlm=False)
    at_once = train(tiny(), rows, tmp_path, collator)
    in_four = train(tiny(), rows, tmp_path, collator, per_device_train_batch_size=1, gradient_accumulation_steps=4)
    torch.testing.assert_close(torch.tensor(in_four), torch.tensor(at_once), rtol=1e-4, atol=1e-4)


CHAT = dedent("""\
    {%- for message in messages -%}
    <|bos|>{{ message.role }}
    {% if message.role == "assistant" %}{% generation %}{{ message.content }}<|end|>{% endgeneration %}
    {%- else %}{{ message.content }}<|end|>{% endif -%}
    {%- endfor -%}""")


def test_assistant_mask_covers_the_assistants_text_and_its_end(tokenizer):
    turns = [("user", "The dog?"), ("assistant", "The fox jumps."), ("user", "Lazy?"), ("assistant", "No.")]
    chat = tokenizer.apply_chat_template(
        [{"role": role, "content": content} for role, content in turns],
        chat_template=CHAT,
        tokenize=True,
        return_dict=True,
        return_assistant_tokens_mask=True,
    )
    masked = [token for token, mask in zip(chat["input_ids"], chat["assistant_masks"], strict=True) if mask]
    assert tokenizer.decode(masked) == "The fox jumps.<|end|>No.<|end|>"


@pytest.mark.parametrize("use_cache", [None, True, False])
def test_generate_equals_a_loop_of_argmax_and_feeds_the_cache(use_cache, tiny, input_ids):
    model, steps = tiny(), 6
    expected = input_ids
    with torch.no_grad():
        for _ in range(steps):
            expected = torch.cat([expected, model(expected, use_cache=False).logits[:, -1:].argmax(-1)], dim=1)
    lengths = []
    model.model.embed_tokens.register_forward_hook(lambda module, args, output: lengths.append(args[0].shape[1]))
    choice = {} if use_cache is None else {"use_cache": use_cache}
    generated = model.generate(input_ids, max_new_tokens=steps, do_sample=False, eos_token_id=None, **choice)
    assert torch.equal(generated, expected)
    first = input_ids.shape[1]
    assert lengths == ([first + step for step in range(steps)] if use_cache is False else [first] + [1] * (steps - 1))


def test_left_padded_batch_continues_like_single_prompts(tiny, input_ids):
    model = tiny()
    rows = [input_ids[0].tolist(), input_ids[1, :5].tolist()]
    settings = {"max_new_tokens": 6, "do_sample": False, "eos_token_id": None}
    together = model.generate(**left_pad(rows), **settings)[:, -6:]
    for row, continued in zip(rows, together, strict=True):
        assert torch.equal(model.generate(torch.tensor([row]), **settings)[0, -6:], continued)


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("model_class", [LaplaceGPTForCausalLM, LaplaceGPTForSequenceClassification])
def test_gradient_checkpointing_changes_neither_loss_nor_gradients(model_class, reentrant, tiny, input_ids):
    def loss_and_gradients(checkpointing):
        model = tiny(model_class, attention_dropout=0.1).train()
        if checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": reentrant})
            model.enable_input_require_grads()
        torch.manual_seed(0)
        labels = input_ids if model_class is LaplaceGPTForCausalLM else input_ids[:, 0] % 2
        loss = model(input_ids, labels=labels).loss
        loss.backward()
        return [loss, *(parameter.grad for parameter in model.parameters())]

    torch.testing.assert_close(loss_and_gradients(True), loss_and_gradients(False))


@pytest.mark.parametrize("model_class", [LaplaceGPTForCausalLM, LaplaceGPTForSequenceClassification])
def test_trainer_finds_the_columns_it_needs(model_class, tiny, input_ids, tmp_path):
    """`forward` names its arguments, so Trainer keeps these columns and drops the text."""
    causal = model_class is LaplaceGPTForCausalLM
    rows = [{"text": "a", "input_ids": ids, "attention_mask": [1] * 12, "labels": ids if causal else i % 2}
            for i, ids in enumerate(input_ids.tolist())]  # fmt: skip
    assert len(train(tiny(model_class), rows, tmp_path, None)) == 2
    assert {"input_ids", "attention_mask", "labels"} <= set(inspect.signature(model_class.forward).parameters)


@pytest.mark.parametrize("model_class", [LaplaceGPTModel, LaplaceGPTForCausalLM])
@pytest.mark.parametrize("backend", ["eager", "sdpa", "flex_attention"])
def test_every_backend_is_accepted_and_sdpa_is_the_default(backend, model_class, tiny, input_ids, tmp_path):
    default = tiny(model_class)
    assert default.config._attn_implementation == "sdpa"
    default.save_pretrained(tmp_path)
    model = model_class.from_pretrained(tmp_path, attn_implementation=backend).eval()
    assert model.config._attn_implementation == backend
    with torch.no_grad():
        torch.testing.assert_close(model(input_ids)[0], default(input_ids)[0], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("backend", ["eager", "sdpa", pytest.param("flex_attention", marks=pytest.mark.slow)])
def test_packed_documents_do_not_attend_to_each_other_under_a_loss(backend, tiny, input_ids):
    """Positions that start again are enough: a loss builds no cache, which would switch the separation off."""
    model = tiny()
    model.set_attn_implementation(backend)
    documents = [input_ids[:1], input_ids[1:, :7]]
    packed = {
        "input_ids": torch.cat(documents, dim=1),
        "position_ids": torch.cat([torch.arange(12), torch.arange(7)])[None],
        "labels": torch.cat([document.clone().index_fill_(1, torch.tensor(0), -100) for document in documents], dim=1),
    }
    with torch.no_grad():
        together = model(**packed, return_logits=True)
        apart = [model(document, labels=document, return_logits=True) for document in documents]
        loss_only = model(**packed).loss
    torch.testing.assert_close(together.logits, torch.cat([a.logits for a in apart], dim=1), atol=1e-5, rtol=1e-5)
    mean = (11 * apart[0].loss + 6 * apart[1].loss) / 17
    torch.testing.assert_close(together.loss, mean, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(loss_only, mean, atol=1e-5, rtol=1e-5)


def test_trainer_on_packed_rows_equals_trainer_on_padded_rows(tiny, tokenizer, tmp_path):
    generator = torch.Generator().manual_seed(0)
    rows = [{"input_ids": torch.randint(3, 300, (length,), generator=generator).tolist()} for length in range(4, 20, 2)]
    packed = train(tiny(), rows, tmp_path, DataCollatorWithFlattening())
    padded = train(tiny(), rows, tmp_path, DataCollatorForLanguageModeling(tokenizer, mlm=False))
    torch.testing.assert_close(torch.tensor(packed), torch.tensor(padded), rtol=1e-4, atol=1e-4)


def test_harness_scores_and_generates_right(tiny, input_ids):
    """lm-eval calls the model with right padding and no mask, and generates with `use_cache=True` and left padding."""
    model = tiny()
    rows = [input_ids[0].tolist(), input_ids[1, :5].tolist()]
    right_padded = torch.tensor([row + [0] * (12 - len(row)) for row in rows])
    with torch.no_grad():
        logits = model(right_padded).logits
        for row, scored in zip(rows, logits, strict=True):
            torch.testing.assert_close(scored[: len(row)], model(torch.tensor([row])).logits[0], atol=1e-5, rtol=1e-5)

    padded = left_pad(rows)
    generated = model.generate(
        input_ids=padded["input_ids"], max_length=18, pad_token_id=0, use_cache=True, do_sample=False,
        attention_mask=padded["attention_mask"],
    )  # fmt: skip
    for row, continued in zip(rows, generated, strict=True):
        single = model.generate(torch.tensor([row]), max_new_tokens=6, do_sample=False, use_cache=False)[0]
        assert torch.equal(continued[12 : 12 + len(single) - len(row)], single[len(row) :])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("backend", ["eager", "sdpa"])
def test_half_precision_runs_forward_backward_autocast_and_generate(dtype, backend, tiny, input_ids, tmp_path):
    tiny().to(dtype).save_pretrained(tmp_path)
    model = AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation=backend)
    assert model.dtype == dtype
    reference = tiny()
    expected = reference(input_ids, labels=input_ids).loss
    expected.backward()

    def compare(model):
        for return_logits in (False, True):
            model.zero_grad()
            loss = model(input_ids, labels=input_ids, return_logits=return_logits).loss
            loss.backward()
            torch.testing.assert_close(loss, expected, atol=0.05, rtol=0.02)
            gradient, exact = model.lm_head.weight.grad.float(), reference.lm_head.weight.grad
            assert torch.nn.functional.cosine_similarity(gradient.flatten(), exact.flatten(), dim=0) > 0.99
        assert model.generate(input_ids, max_new_tokens=3, do_sample=False, eos_token_id=None).shape == (2, 15)

    compare(model)
    with torch.autocast("cpu", dtype):
        compare(model)
        compare(tiny().train())


@pytest.mark.parametrize("missing", ["accelerate", "datasets"])
def test_missing_extra_is_named_with_the_command_that_installs_it(missing, tmp_path):
    """The environment is this one's packages, linked into a folder of their own, but for the missing one."""
    for entry in Path(sysconfig.get_path("purelib")).iterdir():
        if not entry.name.startswith((missing, "__editable__", "laplacian_heads")):
            (tmp_path / entry.name).symlink_to(entry)
    (tmp_path / "laplacian_heads").symlink_to(ROOT)
    result = subprocess.run(
        [sys.executable, "-S", "-m", "laplacian_heads", "demo", f"output={tmp_path / 'out'}"],
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert result.returncode == 1
    (message,) = result.stderr.splitlines()
    assert missing in message
    assert "pip install 'laplacian-heads[demo]'" in message
