"""Stock tasks and ours on real rows of a Hub on this machine, by each command line, and again without the Hub."""

import json
import subprocess
import sys

import pytest
from scripted import chat_tokenizer

from laplacian_heads.eval.evaluate import TASKS

STOCK = ["arc_easy", "arc_challenge", "mmlu", "gsm8k"]  # humaneval reads its metric from the Hub when it is imported
OURS = ["chatcore_paper", "chatcore_gsm8k", "chatcore_humaneval"]
SHORT = "max_gen_toks=16"

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def model(tiny, tmp_path_factory):
    """It says anything, and its context holds GSM8K's five examples."""
    folder = tmp_path_factory.mktemp("model")
    tokenizer = chat_tokenizer()
    special = {f"{name}_token_id": getattr(tokenizer, f"{name}_token_id") for name in ("bos", "eos", "pad")}
    tiny(vocab_size=len(tokenizer), max_position_embeddings=8192, **special).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def run(env, folder, *command):
    done = subprocess.run(
        [sys.executable, "-m", *map(str, command)], cwd=folder, env=env, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def scores(results):
    return {
        (task, key): value
        for task, figures in results.items()
        for key, value in figures.items()
        if "," in key and "stderr" not in key
    }


def test_every_task_by_every_command_line(seeded_hub, model, tmp_path):
    settings = [f"tasks=[{', '.join(STOCK + OURS)}]", "limit=2", "batch_size=4", "gen_kwargs={max_gen_toks: 16}"]
    settings += ["confirm_run_unsafe_code=true", "device=cpu"]
    found = {}
    for name, offline in (("online", "0"), ("offline", "1")):
        env = {**seeded_hub, "HF_HUB_OFFLINE": offline, "HF_DATASETS_OFFLINE": offline}
        if name == "offline":
            env["HF_ENDPOINT"] = "http://127.0.0.1:9"  # where nothing answers
        output = run(env, tmp_path, "laplacian_heads", "eval", model, *settings, f"output={tmp_path / name}")
        found[name] = json.loads((tmp_path / name / "eval.json").read_text())["tasks"]
        assert "2 of 2,376" in output
        assert "114 of 14,042" in output  # 57 subjects
    assert found["online"].keys() == found["offline"].keys()
    for task, entry in found["online"].items():
        assert entry["value"] == found["offline"][task]["value"]
    assert found["online"]["chatcore_paper"]["of"] == 2376 + 1172 + 14042 + 1319 + 164
    assert {"mmlu", "mmlu_anatomy", "gsm8k", "chatcore_mmlu"} <= found["online"].keys()

    common = ["--limit", "2", "--batch_size", "4", "--device", "cpu", "--log_samples"]
    common += ["--apply_chat_template", "--gen_kwargs", SHORT, "--confirm_run_unsafe_code"]
    tasks = ["chatcore_arc_easy", "chatcore_gsm8k", "chatcore_humaneval"]
    results = {}
    for kind, program in (("hf", "lm_eval"), ("laplacian-heads", "laplacian_heads.eval")):
        include = ["--include_path", TASKS] if kind == "hf" else []
        arguments = ["--model", kind, "--model_args", f"pretrained={model},trust_remote_code=True"]
        arguments += ["--tasks", ",".join(tasks), "--output_path", tmp_path / kind / "results.json"]
        run(seeded_hub, tmp_path, program, *arguments, *common, *include)
        (path,) = (tmp_path / kind).glob("results_*.json")
        results[kind] = json.loads(path.read_text())
        assert results[kind]["config"]["model"] == kind
        assert len(list((tmp_path / kind).glob("samples_*.jsonl"))) == len(tasks)
    ours = scores(results["laplacian-heads"]["results"])
    for task in tasks:
        assert ours[task, "acc,none"] == found["online"][task]["value"]
    assert ours[tasks[0], "acc,none"] == scores(results["hf"]["results"])[tasks[0], "acc,none"]
    assert results["laplacian-heads"]["config"]["calculator"] is True
    assert "calculator" not in results["hf"]["config"]
