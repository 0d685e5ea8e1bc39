"""What is saved loads for someone who has transformers and not this package, from a folder and from the Hub.

A process that imports torch takes seconds to start, so one does the work of many tests and prints what they look at.
"""

import json
import shutil
from pathlib import Path
from textwrap import dedent

import pytest
import torch
from datasets import Dataset
from reference import tiny_vit
from safetensors.torch import save_file
from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    BitImageProcessor,
    DataCollatorForLanguageModeling,
    Trainer,
    TrainingArguments,
)

from laplacian_heads import (
    LaplaceGPTConfig,
    LaplaceGPTForCausalLM,
    LaplaceGPTForSequenceClassification,
    LaplaceGPTModel,
    LaplaceViTConfig,
    LaplaceViTForMaskedImageModeling,
    LaplaceViTModel,
)

ROOT = Path(__file__).resolve().parents[1]
CLASSES = ["tabby cat", "dog", "red fox", "owl", "great white shark"]
TRAINING_STATE = {"optimizer.pt", "scheduler.pt", "rng_state.pth", "training_args.bin"}  # Trainer's, not the model's

# Folders, each written in another way, and the Auto class that gives the model back.
SAVED = {
    "causal": "AutoModelForCausalLM",
    "base": "AutoModel",
    "inner": "AutoModel",  # the model inside a LaplaceGPTForCausalLM
    "classifier": "AutoModelForSequenceClassification",
    "tied": "AutoModelForCausalLM",
    "bfloat16": "AutoModelForCausalLM",
    "float16": "AutoModelForCausalLM",
    "sharded": "AutoModelForCausalLM",
    "newer": "AutoModelForCausalLM",  # its config has a field of a later version
    "trained": "AutoModelForCausalLM",  # Trainer.save_model
    "trained/checkpoint-1": "AutoModelForCausalLM",
    "vit": "AutoModelForImageClassification",
    "vit-base": "AutoModel",
    "vit-inner": "AutoModel",  # the model inside a LaplaceViTForImageClassification
    "vit-masked": "AutoModelForMaskedImageModeling",
    "vit-bfloat16": "AutoModelForImageClassification",
    "vit-sharded": "AutoModelForImageClassification",
}

PRELUDE = """
import json, sys
from pathlib import Path
import torch, transformers
from safetensors.torch import load_file

root = Path(sys.argv[1])
inputs = load_file(root / "inputs.safetensors")
ids = inputs["input_ids"]

def load(auto_class, path, **kwargs):
    return getattr(transformers, auto_class).from_pretrained(path, trust_remote_code=True, **kwargs)

@torch.no_grad()
def output(model):
    return model.eval()(inputs[model.main_input_name])[0]

def equal(model, name):
    return torch.equal(output(model), load_file(root / "outputs" / f"{name}.safetensors")["output"])
"""


def config_class(folder):
    return LaplaceViTConfig if folder.startswith("vit") else LaplaceGPTConfig


def code_files(folder):
    return ["configuration.py", "laplacian.py", f"modeling_{config_class(folder).model_type}.py"]


@torch.no_grad()
def write_output(root, name, model, inputs):
    output = model.eval()(inputs[model.main_input_name])[0]
    file = root / "outputs" / f"{name}.safetensors"
    file.parent.mkdir(parents=True, exist_ok=True)
    save_file({"output": output.contiguous()}, file)


@pytest.fixture(scope="module")
def saved(tmp_path_factory, tiny, tokenizer, input_ids):
    """A folder with the folders of SAVED, and in `outputs` what each model gives for `inputs.safetensors`."""
    root = tmp_path_factory.mktemp("saved")
    sizes = {"size": {"shortest_edge": 18}, "crop_size": {"height": 16, "width": 16}}
    processor = BitImageProcessor(**sizes, image_mean=[0.5] * 3, image_std=[0.25] * 3)
    picture = torch.randint(256, (3, 24, 32), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    inputs = {"input_ids": input_ids, "picture": picture, **processor(picture, return_tensors="pt")}
    save_file(inputs, root / "inputs.safetensors")
    causal = tiny()
    models = {
        "causal": causal,
        "base": tiny(LaplaceGPTModel),
        "inner": causal.model,
        "classifier": tiny(LaplaceGPTForSequenceClassification, num_labels=3),
        "tied": tiny(tie_word_embeddings=True, laplacian_heads=1),
        "sharded": causal,
        "newer": tiny(field_of_a_later_version={"a": [1]}),
    }
    fields = {"laplacian_heads": [[0, 2], [1, 2, 3]], "id2label": dict(enumerate(CLASSES))}
    models |= {
        "vit": tiny_vit(**fields),
        "vit-base": tiny_vit(LaplaceViTModel, **fields),
        "vit-masked": tiny_vit(LaplaceViTForMaskedImageModeling, **fields),
        "vit-bfloat16": tiny_vit(**fields).bfloat16(),
    }
    models |= {"vit-inner": models["vit"].vit, "vit-sharded": models["vit"]}
    for name, model in models.items():
        model.save_pretrained(root / name, max_shard_size="20KB" if name.endswith("sharded") else "5GB")
        (processor if name.startswith("vit") else tokenizer).save_pretrained(root / name)
    for dtype in ("bfloat16", "float16"):  # not model.half(), which rounds RoPE's frequencies too
        models[dtype] = LaplaceGPTForCausalLM.from_pretrained(root / "causal", dtype=dtype)
        models[dtype].save_pretrained(root / dtype)
        tokenizer.save_pretrained(root / dtype)

    trainer = Trainer(
        tiny(),
        TrainingArguments(root / "trained", max_steps=1, save_steps=1, report_to="none", use_cpu=True),
        DataCollatorForLanguageModeling(tokenizer, mlm=False),
        Dataset.from_dict({"input_ids": input_ids.tolist()}),
        processing_class=tokenizer,
    )
    trainer.train()
    trainer.save_model()
    models["trained"] = models["trained/checkpoint-1"] = trainer.model
    for name, model in models.items():
        write_output(root, name, model, inputs)
    return root


LOAD_AND_SAVE_AGAIN = """
source, target, results = root / sys.argv[2], root / sys.argv[3], {}
for folder, auto_class in json.loads(sys.argv[4]).items():
    model = load(auto_class, source / folder, dtype="auto")
    if folder.startswith("vit"):
        prepare = load("AutoImageProcessor", source / folder)
        pixels = prepare(inputs["picture"], return_tensors="pt")["pixel_values"]
        prepared = torch.equal(pixels, inputs["pixel_values"])
    else:
        prepare = load("AutoTokenizer", source / folder)
        prepared = prepare.decode(prepare("The quick brown fox")["input_ids"]) == "The quick brown fox"
    results[folder] = {
        "equal": equal(model, folder),
        "config": type(load("AutoConfig", source / folder)).__name__,
        "model": type(model).__name__,
        "dtype": str(model.dtype),
        "prepared": prepared,
        "unknown field": getattr(model.config, "field_of_a_later_version", None),
    }
    model.save_pretrained(target / folder)
    prepare.save_pretrained(target / folder)
print(json.dumps(results))
"""


@pytest.fixture(scope="module")
def loaded(saved, module_process):
    """What a process without the package finds in every folder; it saves each again under `again`."""
    return json.loads(module_process(PRELUDE + LOAD_AND_SAVE_AGAIN, saved, "", "again", json.dumps(SAVED)))


@pytest.fixture(scope="module")
def loaded_again(saved, loaded, module_process):
    """What another process finds in the folders that the first process saved."""
    return json.loads(module_process(PRELUDE + LOAD_AND_SAVE_AGAIN, saved, "again", "third", json.dumps(SAVED)))


@pytest.mark.parametrize("times_saved", ["once", "again by a process without the package"])
@pytest.mark.parametrize("folder", SAVED)
def test_folder_loads_without_the_package(folder, times_saved, request):
    found = request.getfixturevalue("loaded" if times_saved == "once" else "loaded_again")[folder]
    assert found["equal"]
    assert found["config"] == config_class(folder).__name__
    assert found["model"] == config_class(folder).auto_classes[SAVED[folder]].rpartition(".")[2]
    assert found["dtype"] == (f"torch.{folder.removeprefix('vit-')}" if "float" in folder else "torch.float32")
    assert found["prepared"]


@pytest.mark.parametrize("place", ["", "again"])
@pytest.mark.parametrize("folder", SAVED)
def test_folder_holds_the_code_of_the_repository_and_nothing_pickled(folder, place, saved, loaded):
    files = {file.name: file for file in (saved / place / folder).iterdir() if file.is_file()}
    assert sorted(name for name in files if name.endswith(".py")) == code_files(folder)
    for name in code_files(folder):
        assert files[name].read_bytes() == (ROOT / name).read_bytes()
    assert json.loads(files["config.json"].read_text())["auto_map"] == config_class(folder).auto_classes
    pickled = {name for name in files if name.endswith((".bin", ".pt", ".pth", ".pkl", ".ckpt"))}
    assert pickled <= (TRAINING_STATE if "trained" in folder else set())


@pytest.mark.parametrize("folder", ["sharded", "vit-sharded"])
def test_large_model_is_saved_in_shards(folder, saved):
    assert len(list((saved / folder).glob("model-*.safetensors"))) > 1


def test_unknown_field_of_a_newer_config_survives(loaded, loaded_again):
    assert loaded["newer"]["unknown field"] == loaded_again["newer"]["unknown field"] == {"a": [1]}


def test_every_head_loads_from_every_folder(saved, module_process):
    """The base model is the same under every Auto class, whichever of them wrote the folder."""
    code = """
    def sum_of_hidden(auto_class, folder):
        model = load(auto_class, root / folder).eval()
        base = model.base_model(inputs[model.main_input_name])
        return type(model).__name__, base.last_hidden_state.sum().item()

    found = {}
    for folder, names in json.loads(sys.argv[2]).items():
        found[folder] = [sum_of_hidden(name, folder) for name in names]
    print(json.dumps(found))
    """
    text = ["AutoModelForCausalLM", "AutoModel", "AutoModelForSequenceClassification"]
    images = ["AutoModelForImageClassification", "AutoModel", "AutoModelForMaskedImageModeling"]
    heads = {"causal": text, "classifier": text, "vit": images, "vit-masked": images}
    found = json.loads(module_process(PRELUDE + dedent(code), saved, json.dumps(heads)))
    for folder, of_folder in found.items():
        assert len({hidden for _, hidden in of_folder}) == 1
        for auto_class, (model_class, _) in zip(heads[folder], of_folder, strict=True):
            assert model_class == config_class(folder).auto_classes[auto_class].rpartition(".")[2]


def test_copies_of_the_code_live_in_one_process_with_the_package(saved, loaded, module_process):
    """Outputs, losses and gradients are equal for the code of a folder, loaded twice, and for the package."""
    code = """
    remote = [load("AutoModelForCausalLM", root / "causal") for _ in range(2)]
    (root / "causal" / "laplacian.py").open("a").write("# another copy")
    remote.append(load("AutoModelForCausalLM", root / "causal"))
    assert "laplacian_heads" not in sys.modules
    import laplacian_heads
    local = laplacian_heads.LaplaceGPTForCausalLM.from_pretrained(root / "again" / "causal")
    models = [*remote, local, load("AutoModelForCausalLM", root / "again" / "causal")]
    losses = [model.train()(ids, labels=ids).loss for model in models]
    for loss in losses:
        loss.backward()
    print(json.dumps({
        "modules": [type(model).__module__ for model in models],
        "equal": [equal(model, "causal") for model in models],
        "loss": [loss.item() for loss in losses],
        "gradient": [model.lm_head.weight.grad.norm().item() for model in models],
    }))
    """
    shutil.copytree(saved, saved / "copy", ignore=shutil.ignore_patterns("copy", "third", "trained"))
    found = json.loads(module_process(PRELUDE + dedent(code), saved / "copy", can_import=True))
    *remote, local, through_auto = found["modules"]
    assert [module.split(".")[0] for module in remote] == ["transformers_modules"] * 3
    assert len(set(remote)) == 2
    assert local == through_auto == "laplacian_heads.modeling_laplace_gpt"
    assert all(found["equal"])
    assert len(set(found["loss"])) == len(set(found["gradient"])) == 1


def test_adapter_is_trained_saved_loaded_and_merged_without_the_package(saved, loaded, module_process):
    code = """
    import peft, tempfile
    folder = Path(tempfile.mkdtemp())
    torch.manual_seed(0)
    config = peft.LoraConfig(
        task_type="CAUSAL_LM", r=4, target_modules=["q_proj", "v_proj", "o_proj"], init_lora_weights=False
    )
    model = peft.get_peft_model(load("AutoModelForCausalLM", root / "causal"), config)
    before = model(ids, labels=ids).loss
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    before.backward()
    optimizer.step()
    model.save_pretrained(folder / "adapter")
    expected = output(model)
    generated = model.generate(ids, max_new_tokens=4, do_sample=False)

    onto_base = peft.PeftModel.from_pretrained(load("AutoModelForCausalLM", root / "causal"), folder / "adapter")
    by_itself = peft.AutoPeftModelForCausalLM.from_pretrained(folder / "adapter", trust_remote_code=True)
    merged = by_itself.merge_and_unload()
    merged.save_pretrained(folder / "merged")
    print(json.dumps({
        "moved": model(ids, labels=ids).loss.item() != before.item(),
        "adapter files": sorted(file.name for file in (folder / "adapter").iterdir()),
        "onto base": torch.equal(output(onto_base), expected),
        "generates": torch.equal(onto_base.generate(ids, max_new_tokens=4, do_sample=False), generated),
        "merged": torch.allclose(output(merged), expected, atol=1e-5),
        "merged again": torch.equal(output(load("AutoModelForCausalLM", folder / "merged")), output(merged)),
        "changed": not torch.allclose(expected, output(load("AutoModelForCausalLM", root / "causal")), atol=1e-2),
    }))
    """
    found = json.loads(module_process(PRELUDE + dedent(code), saved).splitlines()[-1])
    assert found.pop("adapter files") == ["README.md", "adapter_config.json", "adapter_model.safetensors"]
    assert all(found.values()), found


@pytest.fixture(scope="module")
def pushed(hub, saved, tmp_path_factory, module_process):
    """Repositories on the Hub: `pushed` with two commits, `trained`, `vit`; returns the first commit's id."""
    code = """
    from datasets import Dataset
    from transformers import DataCollatorForLanguageModeling, Trainer, TrainingArguments
    from laplacian_heads import LaplaceGPTForCausalLM, LaplaceViTForImageClassification

    LaplaceViTForImageClassification.from_pretrained(root / "vit").push_to_hub("tester/vit")
    load("AutoImageProcessor", root / "vit").push_to_hub("tester/vit")

    tokenizer = load("AutoTokenizer", root / "causal")
    first = LaplaceGPTForCausalLM.from_pretrained(root / "causal").push_to_hub("tester/pushed").oid
    LaplaceGPTForCausalLM.from_pretrained(root / "tied").push_to_hub("tester/pushed")
    tokenizer.push_to_hub("tester/pushed")

    trainer = Trainer(
        LaplaceGPTForCausalLM.from_pretrained(root / "causal"),
        TrainingArguments(
            sys.argv[2], max_steps=1, learning_rate=0.0, report_to="none", use_cpu=True,
            push_to_hub=True, hub_model_id="tester/trained",
        ),
        DataCollatorForLanguageModeling(tokenizer, mlm=False),
        Dataset.from_dict({"input_ids": ids.tolist()}),
        processing_class=tokenizer,
    )
    trainer.train()
    trainer.push_to_hub()
    print(first)
    """
    folder = tmp_path_factory.mktemp("trained")
    return module_process(PRELUDE + dedent(code), saved, folder, can_import=True, env=hub.env).splitlines()[-1]


@pytest.fixture(scope="module")
def downloaded(hub, saved, pushed, module_process):
    """What a process without the package finds on the Hub; it pushes what it loaded to repositories of its own."""
    code = """
    results = {}
    repos = [("pushed", sys.argv[2], "causal"), ("pushed", "main", "tied"), ("trained", "main", "causal")]
    for repo, revision, name in repos:
        model = load("AutoModelForCausalLM", f"tester/{repo}", revision=revision)
        results[f"{repo} {name}"] = [equal(model, name), type(model).__module__]
    tokenizer = load("AutoTokenizer", "tester/pushed")
    results["text"] = tokenizer.decode(tokenizer("The quick brown fox")["input_ids"])
    model.push_to_hub("tester/copy")
    tokenizer.push_to_hub("tester/copy")
    model.save_pretrained(root / "downloaded")

    vit = load("AutoModelForImageClassification", "tester/vit")
    results["vit"] = [equal(vit, "vit"), type(vit).__module__]
    picture = transformers.image_transforms.to_pil_image(inputs["picture"])
    classify = transformers.pipeline("image-classification", model="tester/vit", trust_remote_code=True)
    results["classes"] = [answer["label"] for answer in classify(picture)]
    # AutoBackbone takes repositories of the Hub only, and no folders
    backbone = load("AutoBackbone", "tester/vit", out_features=["stage1", "stage2"])
    hidden = load("AutoModel", "tester/vit")(inputs["pixel_values"]).last_hidden_state
    maps = backbone(inputs["pixel_values"]).feature_maps
    results["backbone"] = [torch.equal(maps[-1].flatten(2), hidden[:, 1:].transpose(1, 2)), type(backbone).__module__]
    results["maps"] = [list(each.shape) for each in maps]
    print(json.dumps(results))
    """
    return json.loads(module_process(PRELUDE + dedent(code), saved, pushed, env=hub.env).splitlines()[-1])


def test_hub_gives_every_revision_back(downloaded, pushed):
    found = dict(downloaded)
    assert found.pop("text") == "The quick brown fox"
    assert sorted(found.pop("classes")) == sorted(CLASSES)
    assert found.pop("maps") == [[1, 32, 4, 4]] * 2
    assert all(equal for equal, _ in found.values()), found
    modules = {name: module.split(".") for name, (_, module) in found.items()}
    assert {module[0] for module in modules.values()} == {"transformers_modules"}
    assert pushed in modules["pushed causal"], "the code is that of the revision asked for"


def test_copy_of_a_repository_does_not_point_back_to_it(downloaded, hub, saved, module_process):
    for repo in ("pushed", "trained"):
        shutil.rmtree(hub.root / "models" / "tester" / repo)
    code = """
    print(equal(load("AutoModelForCausalLM", "tester/copy"), "causal"))
    print(equal(load("AutoModelForCausalLM", root / "downloaded"), "causal"))
    print(len(load("AutoTokenizer", "tester/copy")))
    """
    env = {**hub.env, "HF_HOME": str(saved / "another user")}
    assert module_process(PRELUDE + dedent(code), saved, env=env).split() == ["True", "True", "300"]
    for folder in (hub.files("tester/copy"), saved / "downloaded"):
        assert json.loads((folder / "config.json").read_text())["auto_map"] == LaplaceGPTConfig.auto_classes
        for name in code_files("causal"):
            assert (folder / name).read_bytes() == (ROOT / name).read_bytes()


def test_package_loads_what_was_saved_without_it(saved, loaded, tiny, input_ids):
    """With the package imported no code of a folder runs, so trust_remote_code is not asked for."""
    model = AutoModelForCausalLM.from_pretrained(saved / "again" / "causal").eval()
    assert type(model) is LaplaceGPTForCausalLM
    assert type(model.config) is LaplaceGPTConfig
    with torch.no_grad():
        assert torch.equal(model(input_ids).logits, tiny()(input_ids).logits)
    assert type(AutoModel.from_pretrained(saved / "causal")) is LaplaceGPTModel
