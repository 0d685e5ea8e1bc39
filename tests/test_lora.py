"""LoRA through the recipes, and what a user does with the folder of a run: Trainer, PEFT and TRL on their own."""

import json

import pytest
import torch
from datasets import Dataset
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer, Trainer, TrainerCallback, TrainingArguments
from trl import SFTConfig, SFTTrainer

from laplacian_heads.__main__ import main
from laplacian_heads.problems import problems
from laplacian_heads.train import stage

LORA = "lora={r: 4, alpha: 8, targets: all-linear, lr: 0.01}"
SMALL = ["vocab_size=300", "hidden_size=32", "num_hidden_layers=2", "num_attention_heads=2", "laplacian_heads=1"]
COMMON = ["context=96", "streams=4", "rows_per_step=4", "batch_size=2", "logging_steps=1", "save_steps=2"]
MIXTURE = '[{data: "generated:arithmetic", rows: 16}, {data: "generated:choice", rows: 8}]'


@pytest.fixture(scope="module")
def pretrained(tmp_path_factory):
    root = tmp_path_factory.mktemp("runs")
    tokenizer = ["tokenizer", "data=[generated:choice, generated:arithmetic]", "vocab_size=300", "context=96"]
    assert main([*tokenizer, "max_characters=20000", f"output={root / 'tokenizer'}"]) == 0
    given = ["data=generated:copying", "held_out=40", "eval_rows=3", f"tokenizer={root / 'tokenizer'}", "tokens=1536"]
    assert main(["pretrain", *COMMON, *SMALL, *given, f"output={root / 'pretrain'}"]) == 0
    return root / "pretrain"


def command(verb, pretrained, output, *overrides):
    tokens = ["tokens=2304", "eval_rows=3"] if verb == "midtrain" else []
    given = [f"data={MIXTURE}", f"held_out={MIXTURE}", f"model={pretrained}", LORA, f"output={output}"]
    return [verb, *COMMON, *tokens, *given, *overrides]


@pytest.mark.parametrize("verb", ["midtrain", "sft"])
def test_merged_model_says_what_the_adapter_says(pretrained, tmp_path, verb):
    output = tmp_path / "run"
    assert main(command(verb, pretrained, output)) == 0
    base = AutoModelForCausalLM.from_pretrained(pretrained)
    merged = AutoModelForCausalLM.from_pretrained(output).eval()
    assert type(merged) is type(base)
    adapted = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(pretrained), output / "adapter").eval()
    tokenizer = AutoTokenizer.from_pretrained(output)
    messages = next(problems("arithmetic", "test", 1))[:1]
    inputs = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    with torch.no_grad():
        expected, found, before = (model(**inputs).logits for model in (adapted, merged, base.eval()))
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    assert (found - before).abs().max() > 1e-2
    assert torch.equal(*(model.generate(**inputs, max_new_tokens=8, do_sample=False) for model in (adapted, merged)))
    # what LoRA does not touch is as it was
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        assert torch.equal(merged.state_dict()[name], base.state_dict()[name])


class Kill(TrainerCallback):
    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == 3:
            raise KeyboardInterrupt


def test_interrupted_lora_ends_in_the_same_weights(pretrained, tmp_path, monkeypatch):
    assert main(command("sft", pretrained, tmp_path / "whole")) == 0
    trainer = stage.StageTrainer
    with monkeypatch.context() as patched:
        patched.setattr(stage, "StageTrainer", lambda **given: trainer(**{**given, "callbacks": [Kill()]}))
        assert main(command("sft", pretrained, tmp_path / "run")) == 130
    assert main(command("sft", pretrained, tmp_path / "run")) == 0
    for name in ("model.safetensors", "adapter/adapter_model.safetensors"):
        one, other = (load_file(tmp_path / run / name) for run in ("run", "whole"))
        assert all(torch.equal(one[key], other[key]) for key in other)
    assert json.loads((tmp_path / "run/results.json").read_text())["parameters"] == sum(
        tensor.numel() for tensor in load_file(tmp_path / "run/model.safetensors").values()
    )


@pytest.mark.parametrize(
    ("lora", "said"),
    [
        ("{r: 4}", "lora.alpha is None"),
        ("{r: 0, alpha: 8, targets: all-linear, lr: 0.1}", "lora.r is 0"),
        ("{r: 4, alpha: 8, targets: all-linear, lr: 0.1, dropout: 0.1}", "lora.dropout is 0.1"),
        ("{r: 4, alpha: 8, targets: [nothing], lr: 0.1}", "nothing"),
        ("4", "lora is 4, allowed is dict or null"),
    ],
)
def test_wrong_lora_is_refused(pretrained, tmp_path, capsys, lora, said):
    assert main(command("sft", pretrained, tmp_path / "run", f"lora={lora}")) == 1
    assert said in capsys.readouterr().err


def conversations(count=24):
    return [messages for kind in ("choice", "copying") for messages in problems(kind, "train", count // 2)]


def test_plain_trainer_trains_the_saved_model_on(pretrained, tmp_path):
    model = AutoModelForCausalLM.from_pretrained(pretrained)
    tokenizer = AutoTokenizer.from_pretrained(pretrained)
    rows = [tokenizer.apply_chat_template(messages, return_dict=True) for messages in conversations()]
    rows = [{"input_ids": row["input_ids"][:32], "labels": row["input_ids"][:32]} for row in rows]
    rows = [row for row in rows if len(row["input_ids"]) == 32]
    arguments = TrainingArguments(str(tmp_path), max_steps=12, report_to="none", use_cpu=True, logging_steps=1)
    trainer = Trainer(model, arguments, train_dataset=rows)
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert losses[-1] < losses[0]


def test_trl_trains_the_saved_model_on_what_the_assistant_says(pretrained, tmp_path):
    model = AutoModelForCausalLM.from_pretrained(pretrained)
    tokenizer = AutoTokenizer.from_pretrained(pretrained)
    arguments = SFTConfig(
        str(tmp_path),
        assistant_only_loss=True,
        max_steps=12,
        learning_rate=1e-3,
        logging_steps=1,
        report_to="none",
        use_cpu=True,
        bf16=False,
        max_length=96,
    )
    data = Dataset.from_list([{"messages": messages} for messages in conversations()])
    trainer = SFTTrainer(model, arguments, train_dataset=data, processing_class=tokenizer)
    batch = next(iter(trainer.get_train_dataloader()))
    learnt = tokenizer.decode(batch["labels"][batch["labels"] != -100])
    assert "<|assistant_end|>" in learnt
    assert "<|user_start|>" not in learnt
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert losses[-1] < losses[0]
    trainer.save_model(str(tmp_path / "tuned"))
    assert torch.equal(
        AutoModelForCausalLM.from_pretrained(tmp_path / "tuned").lm_head.weight, model.lm_head.weight.detach()
    )
