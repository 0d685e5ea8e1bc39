"""The loss from blocks of the vocabulary: transformers' loss and gradients, without the logits."""

import copy
import importlib
import logging
import sys
from types import ModuleType

import pytest
import torch
from reference import plain_nanochat, tiny_gpt
from transformers import Trainer, TrainerCallback, TrainingArguments
from transformers.trainer_pt_utils import LabelSmoother

from laplacian_heads import modeling_laplace_gpt as modeling

VOCABULARY = 97


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    """Four blocks, the last with one entry."""
    monkeypatch.setattr(modeling, "VOCABULARY_BLOCK", 32)


def tokens(*shape, seed=0, vocabulary=VOCABULARY):
    return torch.randint(0, vocabulary, shape, generator=torch.Generator().manual_seed(seed))


def some_ignored(labels, ignore_index=-100):
    return labels.masked_fill(torch.rand(labels.shape, generator=torch.Generator().manual_seed(1)) < 0.4, ignore_index)


def step(model, **inputs):
    """The loss, and the gradient of every parameter that has one."""
    model.zero_grad()
    outputs = model(**inputs)
    outputs.loss.backward()
    grads = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    return outputs.loss.detach(), grads, outputs.logits


def assert_same_step(model, reference, tolerance=1e-6, **inputs):
    """Loss relative to its size, gradients to the largest entry of each."""
    loss, grads, logits = step(model, **inputs)
    assert logits is None
    expected_loss, expected, _ = step(reference, **inputs)
    torch.testing.assert_close(loss.float(), expected_loss.float(), rtol=tolerance, atol=0, equal_nan=True)
    assert grads.keys() == expected.keys()
    for name, gradient in expected.items():
        difference = (grads[name] - gradient).abs().max()
        assert difference <= 2 * tolerance * max(1.0, gradient.abs().max()), f"{name} differs by {difference:.2e}"


INPUTS = {
    "plain": {},
    "some ignored": {"labels": some_ignored(tokens(3, 9))},
    "number of items": {"num_items_in_batch": 40},
    "number of items as a tensor": {"num_items_in_batch": torch.tensor(40)},
    "shifted labels": {"shift_labels": some_ignored(tokens(3, 9, seed=2))},
    "other ignore index": {"labels": some_ignored(tokens(3, 9), 7), "ignore_index": 7},
    "ignore index -1": {"labels": some_ignored(tokens(3, 9), -1), "ignore_index": -1},
    "right padding": {"attention_mask": torch.tensor([[1] * 9, [1] * 6 + [0] * 3, [1] * 4 + [0] * 5])},
}


@pytest.mark.parametrize("inputs", INPUTS.values(), ids=INPUTS)
@pytest.mark.parametrize("fields", [{}, {"tie_word_embeddings": True}, {"final_logit_softcapping": 3.0}], ids=str)
@pytest.mark.parametrize("vocabulary", [20, 96, VOCABULARY])
def test_loss_and_gradients_are_those_of_transformers(inputs, fields, vocabulary):
    model = tiny_gpt(vocab_size=vocabulary, **fields)
    ids = tokens(3, 9, vocabulary=20)
    inputs = {"labels": ids, **inputs}
    for name in ("labels", "shift_labels"):
        if name in inputs:
            inputs[name] = inputs[name].where(inputs[name] < 0, inputs[name] % 20)
    assert_same_step(model, plain_nanochat(model), input_ids=ids, **inputs)


def test_all_labels_ignored_is_nan_as_in_transformers_and_zero_with_a_number_of_items():
    model = tiny_gpt()
    ignored = torch.full((2, 5), -100)
    assert model(tokens(2, 5), labels=ignored).loss.isnan()
    assert plain_nanochat(model)(tokens(2, 5), labels=ignored).loss.isnan()
    loss, grads, _ = step(model, input_ids=tokens(2, 5), labels=ignored, num_items_in_batch=8)
    assert loss == 0
    assert not any(gradient.any() for gradient in grads.values())


@pytest.mark.parametrize("label", [VOCABULARY, -1])
def test_a_label_outside_of_the_vocabulary_is_not_passed_over(label):
    assert tiny_gpt()(tokens(2, 5), labels=torch.full((2, 5), label)).loss.isnan()


@pytest.mark.parametrize("scale", [50, 500])
def test_saturated_logits(scale):
    """At the bound of the soft-cap exponentials are largest and gradients vanish."""
    model = tiny_gpt(laplacian_heads=2)
    with torch.no_grad():
        model.lm_head.weight.mul_(scale)
    whole = copy.deepcopy(model)
    whole.config.return_logits = True
    assert whole(tokens(2, 9)).logits.abs().max() > 14.99
    assert_same_step(model, whole, 1e-5, input_ids=tokens(2, 9), labels=tokens(2, 9))


@pytest.mark.parametrize("frozen", ["lm_head", "model", "neither"])
@pytest.mark.parametrize("tied", [False, True])
def test_frozen_parts_get_no_gradient_and_change_no_other(frozen, tied):
    model = tiny_gpt(laplacian_heads=2, tie_word_embeddings=tied)
    if frozen != "neither":
        getattr(model, frozen).requires_grad_(False)
    if tied:
        model.lm_head.weight.requires_grad_(True)
    whole = copy.deepcopy(model)
    whole.config.return_logits = True
    assert_same_step(model, whole, input_ids=tokens(2, 9), labels=tokens(2, 9))


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("layout", [0, 2])
def test_bf16(autocast, layout):
    model = tiny_gpt(laplacian_heads=layout)
    model = model if autocast else model.to(torch.bfloat16)
    whole = copy.deepcopy(model)
    whole.config.return_logits = True
    ids = tokens(16, 32)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        loss, grads, _ = step(model, input_ids=ids, labels=ids)
        expected_loss, expected, _ = step(whole, input_ids=ids, labels=ids)
        if layout == 0:
            torch.testing.assert_close(loss, plain_nanochat(model)(ids, labels=ids).loss.float(), rtol=1e-3, atol=0)
    assert loss.dtype == torch.float32
    torch.testing.assert_close(loss, expected_loss, rtol=1e-3, atol=0)
    for name, gradient in expected.items():
        assert grads[name].dtype == gradient.dtype
        distance = (grads[name].float() - gradient.float()).norm() / gradient.float().norm()
        assert distance <= 0.02, f"{name} differs by {distance:.2e}"


def test_float64_weights_lose_the_precision_of_float32_and_no_more():
    model = tiny_gpt().double()
    loss, grads, _ = step(model, input_ids=tokens(2, 9), labels=tokens(2, 9))
    expected_loss, expected, _ = step(plain_nanochat(model), input_ids=tokens(2, 9), labels=tokens(2, 9))
    torch.testing.assert_close(loss.double(), expected_loss.double(), rtol=1e-6, atol=0)
    for name, gradient in expected.items():
        assert grads[name].dtype == torch.float64
        torch.testing.assert_close(grads[name], gradient, rtol=0, atol=1e-6)


@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode])
def test_loss_without_gradients(context):
    model = tiny_gpt(laplacian_heads=2)
    with context():
        outputs = model(tokens(2, 9), labels=tokens(2, 9))
        whole = model(tokens(2, 9), labels=tokens(2, 9), return_logits=True)
    assert outputs.logits is None
    assert not outputs.loss.requires_grad
    torch.testing.assert_close(outputs.loss, whole.loss, rtol=1e-6, atol=0)


def test_retained_graph_and_scaled_loss():
    model = tiny_gpt(laplacian_heads=2)
    _, once, _ = step(model, input_ids=tokens(2, 9), labels=tokens(2, 9))
    model.zero_grad()
    loss = model(tokens(2, 9), labels=tokens(2, 9)).loss
    (loss * 3).backward(retain_graph=True)
    loss.backward()
    for name, p in model.named_parameters():
        torch.testing.assert_close(p.grad, 4 * once[name], rtol=0, atol=1e-6)


@pytest.mark.parametrize("reentrant", [True, False])
def test_gradient_checkpointing(reentrant):
    model = tiny_gpt(laplacian_heads=2).train()
    whole = copy.deepcopy(model)
    whole.config.return_logits = True
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    assert_same_step(model, whole, input_ids=tokens(2, 9), labels=tokens(2, 9))


# When the logits are there


@pytest.mark.parametrize("softcap", [None, 100.0, 40.0])
def test_unbounded_logits_take_the_loss_of_transformers(softcap):
    model = tiny_gpt(final_logit_softcapping=softcap)
    outputs = model(tokens(2, 9), labels=tokens(2, 9))
    assert (outputs.logits is None) == (softcap == 40.0)
    expected = plain_nanochat(model)(tokens(2, 9), labels=tokens(2, 9)).loss
    torch.testing.assert_close(outputs.loss, expected, rtol=1e-6, atol=0)


def test_a_loss_function_of_the_users_own_is_called():
    model = tiny_gpt()
    model.loss_function = lambda logits, labels, vocab_size, **kwargs: logits.sum() * 0 + vocab_size
    assert model(tokens(2, 9), labels=tokens(2, 9)).loss == VOCABULARY


def test_logits_are_returned_when_asked_for():
    model = tiny_gpt(laplacian_heads=2)
    ids = tokens(2, 9)
    logits = model(ids).logits
    for asked, field, there in [(True, False, True), (None, True, True), (False, True, False), (None, False, False)]:
        model.config.return_logits = field
        outputs = model(ids, labels=ids, return_logits=asked)
        assert (outputs.logits is not None) == there
        assert not there or torch.equal(outputs.logits, logits)
    as_tuple = model(ids, labels=ids, return_dict=False)
    assert torch.equal(as_tuple[0], outputs.loss)


def largest_allocation(function):
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        function()
    return max(event.nbytes() for event in profile.profiler.kineto_results.events() if event.name() == "[memory]")


@pytest.mark.parametrize("training", [True, False])
def test_with_labels_the_logits_never_exist(training):
    model = tiny_gpt(laplacian_heads=2, vocab_size=2000)
    ids = tokens(4, 64, vocabulary=2000)
    logits = ids.numel() * 2000 * 2  # bytes they would take in half precision

    def run(**options):
        if training:
            model(ids, labels=ids, **options).loss.backward()
        else:
            with torch.no_grad():
                model(ids, labels=ids, **options)

    assert largest_allocation(run) < logits / 2
    assert largest_allocation(lambda: run(return_logits=True)) > logits


# The compiled passes


def large_step(model):
    """A step with more logits than the loss computes uncompiled."""
    ids = tokens(16, 64, vocabulary=4200)
    assert ids.numel() * 4200 > 2**22
    return step(model, input_ids=ids, labels=some_ignored(ids))


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_compiled_passes_equal_the_others(dtype, monkeypatch):
    model = tiny_gpt(vocab_size=4200, hidden_size=32).to(dtype)
    modeling._compiled_passes.cache_clear()
    loss, grads, _ = large_step(model)
    assert modeling._compiled_passes.cache_info().currsize == 1
    assert modeling._compiled_passes("cpu", dtype)[0] is not modeling._add_block
    monkeypatch.setattr(modeling, "_compiled_passes", lambda *args: (modeling._add_block, modeling._block_gradient))
    expected_loss, expected, _ = large_step(model)
    torch.testing.assert_close(loss, expected_loss, rtol=1e-6, atol=0)
    for name, gradient in expected.items():
        torch.testing.assert_close(grads[name], gradient, rtol=0, atol=1e-6 if dtype == torch.float32 else 1e-3)


@pytest.mark.parametrize("fails_at", ["torch.compile", "first call"])
def test_a_failing_compiler_is_only_slower(fails_at, monkeypatch, caplog):
    def broken(*args, **kwargs):
        raise RuntimeError("no compiler here")

    model = tiny_gpt(vocab_size=4200)
    expected_loss, expected, _ = large_step(plain_nanochat(model))
    modeling._compiled_passes.cache_clear()
    monkeypatch.setattr(torch, "compile", broken if fails_at == "torch.compile" else lambda *args, **kwargs: broken)
    monkeypatch.setattr(modeling.logger, "warning_once", modeling.logger.warning)  # once in a process is too few here
    with caplog.at_level(logging.WARNING, logger=modeling.logger.name):
        monkeypatch.setattr(logging.getLogger(modeling.logger.name.partition(".")[0]), "propagate", True)
        loss, grads, _ = large_step(model)
    assert "no compiler here" in caplog.text
    modeling._compiled_passes.cache_clear()
    torch.testing.assert_close(loss, expected_loss, rtol=1e-6, atol=0)
    for name, gradient in expected.items():
        torch.testing.assert_close(grads[name], gradient, rtol=0, atol=1e-6)


def test_two_copies_of_the_module_do_not_disturb_each_other(monkeypatch):
    """A model from the Hub brings its own copy of the code into a process that has the package."""
    package = ModuleType("second_copy")
    package.__path__ = sys.modules[modeling.__package__].__path__
    monkeypatch.setitem(sys.modules, "second_copy", package)
    copied = importlib.import_module("second_copy.modeling_laplace_gpt")
    model, twin = tiny_gpt(laplacian_heads=2), tiny_gpt(copied.LaplaceGPTForCausalLM, laplacian_heads=2)
    expected, _, _ = step(model, input_ids=tokens(2, 9), labels=tokens(2, 9))
    loss, _, logits = step(twin, input_ids=tokens(2, 9), labels=tokens(2, 9))
    assert logits is None
    torch.testing.assert_close(loss, expected, rtol=1e-6, atol=0)

    monkeypatch.setattr(copied, "_add_block", None)
    assert step(model, input_ids=tokens(2, 9), labels=tokens(2, 9))[0] == expected
    with pytest.raises(TypeError):
        twin(tokens(2, 9), labels=tokens(2, 9))


# Trainer and adapters


# Each with another number of labels that count.
ROWS = [
    {"input_ids": ids, "labels": torch.where(torch.arange(10) > count, ids, -100)}
    for count, ids in enumerate(tokens(8, 10))
]


class RecordGradients(TrainerCallback):
    def __init__(self):
        self.gradients = []

    def on_pre_optimizer_step(self, args, state, control, model, **kwargs):
        self.gradients.append({name: p.grad.clone() for name, p in model.named_parameters()})


def trainer(model, folder, rows=8, accumulation=1, metrics=None, **arguments):
    arguments = TrainingArguments(
        output_dir=folder,
        per_device_train_batch_size=rows,
        per_device_eval_batch_size=rows,
        gradient_accumulation_steps=accumulation,
        max_steps=1,
        max_grad_norm=0.0,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
        **arguments,
    )
    recorded = RecordGradients()
    built = Trainer(
        model, arguments, train_dataset=ROWS, eval_dataset=ROWS, callbacks=[recorded], compute_metrics=metrics
    )
    return built, recorded


@pytest.mark.parametrize("return_logits", [False, True])
def test_accumulation_changes_neither_loss_nor_gradients(return_logits, tmp_path):
    """All rows at once, or two at a time: `num_items_in_batch` counts over the whole step."""
    results = []
    for rows, accumulation in [(8, 1), (2, 4)]:
        model = tiny_gpt(laplacian_heads=2, return_logits=return_logits)
        built, recorded = trainer(model, tmp_path, rows, accumulation)
        results.append((built.train().training_loss, recorded.gradients[0]))
    (loss, grads), (split_loss, split_grads) = results
    labels = torch.stack([row["labels"] for row in ROWS])
    expected = tiny_gpt(laplacian_heads=2)(torch.stack([row["input_ids"] for row in ROWS]), labels=labels).loss
    assert loss == pytest.approx(split_loss, rel=1e-6)
    assert loss == pytest.approx(expected.item(), rel=1e-6)
    for name, gradient in grads.items():
        torch.testing.assert_close(split_grads[name], gradient, rtol=0, atol=1e-6)


@pytest.mark.parametrize("return_logits", [False, True])
def test_evaluation_gives_the_loss_and_metrics_get_logits_if_returned(return_logits, tmp_path):
    model = tiny_gpt(laplacian_heads=2, return_logits=return_logits)
    seen = []

    def metrics(prediction):
        seen.append(torch.from_numpy(prediction.predictions))
        return {"accuracy": 0.5}

    built, _ = trainer(model, tmp_path, metrics=metrics if return_logits else None)
    scores = built.evaluate()
    ids = torch.stack([row["input_ids"] for row in ROWS])
    with torch.no_grad():
        whole = model(ids, labels=torch.stack([row["labels"] for row in ROWS]), return_logits=True)
    assert scores["eval_loss"] == pytest.approx(whole.loss.item(), rel=1e-6)
    assert not return_logits or scores["eval_accuracy"] == 0.5
    assert not return_logits or torch.equal(seen[0], whole.logits)


def test_label_smoothing_of_trainer_shifts_the_labels(tmp_path):
    model = tiny_gpt(laplacian_heads=2)
    ids, labels = (torch.stack([row[name] for row in ROWS]) for name in ("input_ids", "labels"))
    with torch.no_grad():
        logits = model(ids).logits
        expected = LabelSmoother(epsilon=0.2)({"logits": logits}, labels, shift_labels=True)
    built, _ = trainer(model, tmp_path, label_smoothing_factor=0.2)
    assert built.train().training_loss == pytest.approx(expected.item(), rel=1e-5)


@pytest.mark.parametrize("adapter", [{"target_modules": ["q_proj", "lm_head"]}, {"modules_to_save": ["lm_head"]}, {}])
def test_adapters(adapter):
    """With a wrapped head the loss is that of its logits, else it comes from blocks; both train the adapter."""
    peft = pytest.importorskip("peft")
    model = tiny_gpt(laplacian_heads=2)
    expected = model(tokens(2, 9), labels=tokens(2, 9)).loss
    adapted = peft.get_peft_model(
        model, peft.LoraConfig(**{"r": 4, "target_modules": ["q_proj", "v_proj"], "task_type": "CAUSAL_LM", **adapter})
    )
    loss, grads, logits = step(adapted, input_ids=tokens(2, 9), labels=tokens(2, 9))
    assert (logits is None) == (adapter == {})
    torch.testing.assert_close(loss, expected, rtol=1e-6, atol=0)
    trained = [name for name, parameter in adapted.named_parameters() if parameter.requires_grad]
    assert sorted(grads) == sorted(trained)
    for name in trained:
        assert grads[name].any() or "lora_A" in name  # A waits for B, which starts at zero
    if adapter:
        assert any("lm_head" in name for name in trained)
