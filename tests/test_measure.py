"""The verb geometry on models of transformers and on ours: what it reads, what it writes, and what it refuses."""

import json
import shutil
import subprocess
import sys

import datasets
import numpy as np
import pytest
import torch
import transformers
from conftest import ROOT
from PIL import Image
from safetensors.torch import load_file, save_file
from test_processes import launched

from laplacian_heads import images, laplacianize, recipes
from laplacian_heads.eval import geometry_inputs, geometry_survey, measure
from laplacian_heads.eval.geometry import Groups, NearestMean, collapse
from laplacian_heads.eval.geometry_survey import Survey, look
from laplacian_heads.eval.measure import GeometryRecipe
from laplacian_heads.files import weights_hash

TEXT = "The quick brown fox jumps over the lazy dog. A head that subtracts smooths less than one that adds. "
ALL = list(geometry_survey.METRICS)
COLOURS = {"blue": (30, 60, 220), "green": (20, 200, 60), "red": (220, 40, 30)}
SMALL = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48}
SIDE = {"image_size": 32, "patch_size": 8}


def llama():
    torch.manual_seed(0)
    config = transformers.LlamaConfig(vocab_size=300, num_key_value_heads=2, max_position_embeddings=64, **SMALL)
    return transformers.LlamaForCausalLM(config).eval()


def gpt2():
    torch.manual_seed(0)
    shape = {"vocab_size": 300, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64}
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(**shape)).eval()


def vit(labels=3):
    torch.manual_seed(0)
    names = dict(enumerate(COLOURS)) if labels == 3 else dict(enumerate(map(str, range(labels))))
    config = transformers.ViTConfig(**SMALL, **SIDE, id2label=names, label2id={v: k for k, v in names.items()})
    return transformers.ViTForImageClassification(config).eval()


def dinov2(head=True):
    torch.manual_seed(0)
    config = transformers.Dinov2Config(**{**SMALL, "intermediate_size": None}, **SIDE, num_labels=3)
    return (transformers.Dinov2ForImageClassification if head else transformers.Dinov2Model)(config).eval()


def convnext():
    torch.manual_seed(0)
    config = transformers.ConvNextConfig(hidden_sizes=[8, 16, 24, 32], depths=[1, 1, 1, 1], num_labels=3)
    return transformers.ConvNextForImageClassification(config).eval()


@pytest.fixture(scope="module")
def folder(tmp_path_factory, tiny, tokenizer):
    """Models with what reads their inputs, five texts, and pictures of three colours in folders of these names."""
    folder = tmp_path_factory.mktemp("geometry")
    halved = laplacianize(llama(), laplacian_heads=2)
    for name, model in {"laplace": tiny(), "llama": llama(), "gpt2": gpt2(), "laplacian-llama": halved}.items():
        model.save_pretrained(folder / name)
        tokenizer.save_pretrained(folder / name)
    processor = transformers.ViTImageProcessorPil(size={"height": 32, "width": 32})
    for name, model in {"vit": vit(), "dinov2": dinov2(), "backbone": dinov2(False), "convnext": convnext()}.items():
        model.save_pretrained(folder / name)
        processor.save_pretrained(folder / name)
    (folder / "text").mkdir()
    for i in range(5):
        (folder / "text" / f"{i}.txt").write_text(TEXT[i:] * 4)
    generator = np.random.default_rng(0)
    for name, colour in COLOURS.items():
        (folder / "pictures" / name).mkdir(parents=True)
        for i in range(12 + len(name) % 3):
            noisy = np.clip(np.array(colour) + generator.normal(0, 60, (40, 36, 3)), 0, 255).astype(np.uint8)
            Image.fromarray(noisy).save(folder / "pictures" / name / f"{i}.png")
    return folder


def recipe(folder, *models, **values):
    data = {"data": str(folder / "text"), "tokens": 24, "batch_size": 2, "min_count": 2}
    return recipes.load(
        GeometryRecipe, "geometry", {**data, "models": [str(folder / name) for name in models], **values}
    )


LANGUAGE = ("laplace", "llama", "gpt2", "laplacian-llama")
VISION = ("vit", "dinov2", "backbone", "convnext")


@pytest.mark.parametrize("name", LANGUAGE)
def test_language_models_are_read_where_they_should_be(folder, name, input_ids):
    """The same hidden states and head inputs as caught by hand on the blocks, the final norm and the head."""
    model = transformers.AutoModelForCausalLM.from_pretrained(folder / name, trust_remote_code=True)
    base = model.base_model
    blocks, norm = (base.h, base.ln_f) if name == "gpt2" else (base.layers, base.norm)
    caught = []
    hooks = [block.register_forward_pre_hook(lambda _, args: caught.append(args[0])) for block in blocks]
    hooks.append(norm.register_forward_hook(lambda *called: caught.append(called[-1])))
    heads = [model.get_output_embeddings().register_forward_pre_hook(lambda _, args: caught.append(args[0]))]
    with torch.no_grad():
        model(input_ids)
    for hook in hooks + heads:
        hook.remove()
    *caught, head_input = caught[-len(hooks) - 1 :]  # LaplaceGPT norms the embedding with the same module
    seen = look(model, geometry_inputs.Batch({"input_ids": input_ids}))
    assert len(seen.hidden) == len(caught) == 3
    for one, other in zip(seen.hidden, caught, strict=True):
        assert torch.equal(one, other)
    assert torch.equal(seen.hidden[-1], head_input)
    assert geometry_survey.classifier(model) is model.get_output_embeddings()


@pytest.mark.parametrize("name", VISION)
def test_models_of_images_are_read_where_they_should_be(folder, name):
    kind = transformers.AutoModel if name == "backbone" else transformers.AutoModelForImageClassification
    model = kind.from_pretrained(folder / name)
    pixels = torch.randn(3, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    seen = look(model, geometry_inputs.Batch({"pixel_values": pixels}))
    with torch.no_grad():
        outputs = model(pixels, output_hidden_states=True)
        last = model.base_model(pixels).last_hidden_state
        states = [*outputs.hidden_states[:-1], last]
        states = [state.flatten(2).transpose(1, 2) if state.dim() == 4 else state for state in states]
        assert len(seen.hidden) == len(states)
        for one, other in zip(seen.hidden, states, strict=True):
            assert torch.equal(one, other)
        if name == "backbone":
            assert seen.classifier_input is None
        else:
            assert torch.equal(model.classifier(seen.classifier_input), outputs.logits)


@pytest.mark.parametrize("name", ["laplace", "gpt2"])
def test_layers_of_a_language_model_have_the_direct_figures(folder, name):
    """From the sequences to geometry.json, with the first token of each left out."""
    model = transformers.AutoModelForCausalLM.from_pretrained(folder / name, attn_implementation="eager")
    ids = torch.randint(3, 40, (5, 17), generator=torch.Generator().manual_seed(0))
    batches = list(geometry_inputs.text_batches(ids, 2, skip=1, min_count=3))
    measured = Survey(model, ALL, [0, -1], skip=1)
    for batch in batches:
        measured.update(batch)
    measured.gather()
    for batch in batches:
        measured.update_nearest(batch)
    layers = measured.layers()
    assert (measured.sequences, measured.tokens) == (5, 75)

    with torch.no_grad():
        outputs = model.base_model(ids[:, :-1], output_hidden_states=True, output_attentions=True, use_cache=False)
        states = [*outputs.hidden_states[:-1], outputs.last_hidden_state]
        scores = model(ids[:, :-1]).logits[:, 1:]
    following = ids[:, 2:]
    counted = torch.bincount(following.flatten(), minlength=40)[following] >= 3
    for layer, hidden in enumerate(states):
        array = hidden[:, 1:].double().numpy()
        flat = array.reshape(-1, array.shape[-1])
        within = ((array - array.mean(1, keepdims=True)) ** 2).sum(-1).mean()
        total = ((flat - flat.mean(0)) ** 2).sum(1).mean()
        found = layers[layer]
        assert found["variance"]["within_sequence"] == pytest.approx(within, rel=1e-9)
        assert found["variance"]["shares"]["within_sequence"] == pytest.approx(within / total, rel=1e-9)
        assert ("collapse" in found, "spectrum" in found) == (layer != 1, layer != 1)
        if layer > 0:
            p = outputs.attentions[layer - 1].double()
            nats = -torch.xlogy(p, p).sum(-1).mean((0, 2))
            assert found["attention_entropy"]["nats"] == pytest.approx(nats.tolist(), rel=1e-9)
        if layer == 1:
            continue
        groups = Groups(scatter=True)
        vectors, labels = hidden[:, 1:][counted], following[counted]
        groups.update(vectors, labels)
        nearest = NearestMean(groups)
        # Of the classes that are counted the likeliest.
        decided = groups.labels[scores[counted][:, groups.labels].argmax(-1)]
        nearest.update(vectors, labels, decided)
        direct = collapse(groups, model.get_output_embeddings().weight.detach()) | nearest.result()
        assert found["collapse"]["tokens"] == pytest.approx(direct, rel=1e-6, abs=1e-9)
        assert found["collapse"].keys() == {"tokens"}
        one, other = (found["variance"][part] for part in ("within_class", "between_class"))
        assert one + other == pytest.approx(((vectors.double() - vectors.double().mean(0)) ** 2).sum(1).mean().item())
        shares = found["variance"]["shares"]
        assert shares["within_class"] + shares["between_class"] == pytest.approx(1, rel=1e-9)
        assert found["variance"]["snr"] == pytest.approx(other / one)


@pytest.mark.parametrize("name", VISION)
def test_layers_of_a_model_of_images_have_the_direct_figures(folder, name):
    asked = recipe(folder, name, data=str(folder / "pictures"), metrics=ALL[:5] + ["nearest_mean"], layers=[1, -1])
    found, points = measure._measured(str(folder / name), measure._config(str(folder / name), asked), asked)
    layers = found["layers"]
    count = sum(len(list((folder / "pictures" / colour).iterdir())) for colour in COLOURS)
    assert (found["sequences"], found["classes_are"]) == (count, "labels")

    kind = transformers.AutoModel if name == "backbone" else transformers.AutoModelForImageClassification
    model = kind.from_pretrained(folder / name)
    processor = transformers.AutoImageProcessor.from_pretrained(folder / name)
    files = [(path, label) for label, colour in enumerate(COLOURS) for path in (folder / "pictures" / colour).iterdir()]
    pixels = processor([Image.open(path) for path, _ in files], return_tensors="pt")["pixel_values"]
    labels = torch.tensor([label for _, label in files])
    seen = look(model, geometry_inputs.Batch({"pixel_values": pixels}))
    array = seen.hidden[-1].double().numpy()
    flat, means = array.reshape(-1, array.shape[-1]), array.mean(1)
    of_class = np.stack([means[labels == label].mean(0) for label in labels])
    parts = {
        "within_sequence": ((array - means[:, None]) ** 2).sum(-1).mean(),
        "within_class": ((means - of_class) ** 2).sum(-1).mean(),
        "between_class": ((of_class - flat.mean(0)) ** 2).sum(-1).mean(),
    }
    # Convolutions round otherwise in a batch of another size.
    close = {"rel": 1e-4, "abs": 1e-6}
    assert {part: layers[-1]["variance"][part] for part in parts} == pytest.approx(parts, **close)
    assert sum(layers[-1]["variance"]["shares"][part] for part in parts) == pytest.approx(1, rel=1e-9)

    kinds = {"tokens": (seen.hidden[-1].flatten(0, 1), labels.repeat_interleave(array.shape[1]))}
    kinds["sequence_means"] = torch.from_numpy(means), labels
    if name != "backbone":
        kinds["classifier_input"] = seen.classifier_input, labels
    assert layers[-1]["collapse"].keys() == kinds.keys()
    assert layers[1]["collapse"].keys() == {"tokens", "sequence_means"}
    for which, (vectors, classes) in kinds.items():
        groups = Groups(scatter=True)
        groups.update(vectors, classes)
        fits = name != "backbone" and model.classifier.in_features == vectors.shape[1]
        direct = collapse(groups, model.classifier.weight.detach() if fits else None)
        measured = layers[-1]["collapse"][which]
        for figure, value in direct.items():
            assert measured[figure] == (None if value is None else pytest.approx(value, rel=1e-3, abs=1e-4)), figure
        if name != "backbone":
            decided = model.classifier(seen.classifier_input).argmax(-1)
            nearest = NearestMean(groups)
            nearest.update(vectors, classes, decided.repeat_interleave(len(vectors) // len(decided)))
            assert measured["nc4"] == pytest.approx(nearest.result()["nc4"], abs=1.5 / len(vectors))
    assert set(points.classes) == set(COLOURS)
    assert len(points.pictures) == (0 if name == "convnext" else geometry_survey.PICTURES)
    for image, patches in points.pictures:
        assert image.shape == (32, 32, 3)
        assert patches.shape == (4, 4, 3)
        assert 0 <= patches.min() <= patches.max() <= 1
        # The processor's normalisation is undone: the picture has its colour.
        assert tuple(np.argsort(image.mean((0, 1)))) in {tuple(np.argsort(colour)) for colour in COLOURS.values()}


def test_verb_writes_figures_plots_and_report(folder, capsys):
    names = ("laplace", "llama")
    pages = folder / "compared"
    given = {"metrics": ALL, "output": str(pages)}
    measure.geometry(recipe(folder, *names, **given), dry_run=True)
    assert not pages.exists()
    measure.geometry(recipe(folder, *names, **given))
    printed = capsys.readouterr().out
    html, markdown = ((pages / name).read_text() for name in ("report.html", "report.md"))
    for name in names:
        written = json.loads((folder / name / "geometry.json").read_text())
        assert (written["sequences"], written["tokens"], written["data"]) == (35, 35 * 24, str(folder / "text"))
        share = f"{written['layers'][-1]['variance']['shares']['within_sequence']:.3f}"
        assert share in printed
        assert share in markdown
        assert f"<strong>{name}</strong>" in html
        assert str(folder) not in html + markdown  # reports are published
    stems = {"variance", "similarity", "attention_entropy", "spectrum", "collapse_tokens", "pca"}
    assert {path.stem for path in pages.glob("*.svg")} == {path.stem for path in pages.glob("*.png")} == stems
    assert all(f"{stem}.png" in markdown for stem in stems)
    assert not list(folder.rglob("*.part"))


def test_models_are_called_by_what_tells_them_apart(tmp_path):
    for name in ("k0/pretrain", "k5/pretrain", "k5/sft"):
        (tmp_path / name).mkdir(parents=True)
    one, other, third = (str(tmp_path / name) for name in ("k0/pretrain", "k5/pretrain", "k5/sft"))
    assert measure.short([one, third, "owner/name"]) == {one: "pretrain", third: "sft", "owner/name": "owner/name"}
    assert measure.short([one, other]) == {one: one, other: other}


def test_one_model_has_its_report_in_its_folder(folder, tmp_path):
    measure.geometry(recipe(folder, "gpt2"))
    assert {"geometry.json", "geometry"} <= {path.name for path in (folder / "gpt2").iterdir()}
    assert (folder / "gpt2/geometry/report.html").exists()
    known = json.loads((folder / "gpt2/geometry.json").read_text())["weights"]
    assert known == weights_hash(folder / "gpt2") != weights_hash(folder / "llama")
    assert weights_hash(folder / "text") is None
    measure.geometry(recipe(folder, "gpt2", output=str(tmp_path / "out")))
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["geometry", "geometry.json"]
    again = json.loads((tmp_path / "out/geometry.json").read_text())
    assert again == json.loads((folder / "gpt2/geometry.json").read_text())


def test_run_in_training_is_measured_at_its_newest_checkpoint(folder, tmp_path):
    run = tmp_path / "run"
    for step in (8, 16):
        shutil.copytree(folder / "laplace", run / f"checkpoint-{step}", ignore=shutil.ignore_patterns("geometry*"))
        log = [{"step": each, "geometry/effective_rank/layer_02": 3.0 + each} for each in range(4, step + 1, 4)]
        (run / f"checkpoint-{step}" / "trainer_state.json").write_text(json.dumps({"log_history": log}))
    (run / ".unfinished" / "checkpoint-24").mkdir(parents=True)
    before = sorted(path.name for path in (run / "checkpoint-16").iterdir())
    measure.geometry(recipe(tmp_path, "run", data=str(folder / "text"), output=None))
    # The checkpoint is deleted when the next one is complete, and what was measured of it stays.
    assert sorted(path.name for path in (run / "checkpoint-16").iterdir()) == before
    assert (run / "geometry/checkpoint-16/geometry.json").exists()
    assert (run / "geometry/checkpoint-16/geometry/training.png").exists()
    shutil.rmtree(run / "checkpoint-16")
    shutil.rmtree(run / "checkpoint-8")
    with pytest.raises(ValueError, match=r"There is no model in .*run, nor a checkpoint"):
        measure.geometry(recipe(tmp_path, "run", data=str(folder / "text")))


def test_sequences_take_the_first_piece_of_every_document_first(tokenizer):
    ids = geometry_inputs.sequences(tokenizer, [TEXT, "short", TEXT[4:] * 2], tokens=12, count=100)
    assert ids.shape[1] == 13
    assert set(ids[:, 0].tolist()) == {tokenizer.bos_token_id}
    pieces = [tokenizer.decode(row[1:]) for row in ids]
    assert TEXT.startswith(pieces[0])
    assert TEXT[4:].startswith(pieces[1])
    assert TEXT.startswith(pieces[0] + pieces[2])
    assert (TEXT[4:] * 2).startswith("".join(pieces[1:4:2]))
    assert torch.equal(geometry_inputs.sequences(tokenizer, [TEXT, TEXT[4:] * 2], tokens=12, count=2), ids[:2])
    with pytest.raises(ValueError, match=r"tokens is 99, but the longest document has \d+ tokens"):
        geometry_inputs.sequences(tokenizer, ["short", "shorter"], tokens=99, count=2)


def test_classes_of_text_are_the_next_tokens_seen_often_enough():
    ids = torch.tensor([[9, 5, 5, 6, 7], [9, 6, 5, 8, 6]])
    for skip in (0, 1):  # BOS is alike in all, so that nothing can be known from it
        (batch,) = geometry_inputs.text_batches(ids, 2, skip, min_count=2)
        assert batch.inputs["input_ids"].tolist() == ids[:, :-1].tolist()
        assert batch.token_labels.tolist() == [[-1, 5, 6, -1], [-1, 5, -1, 6]]
    (batch,) = geometry_inputs.text_batches(ids, 2, skip=2, min_count=1)
    assert batch.token_labels.tolist() == [[-1, -1, 6, 7], [-1, -1, 8, 6]]


def test_hidden_states_that_are_not_finite_are_named(folder, tokenizer, tmp_path):
    model = llama()
    model.model.layers[1].mlp.down_proj.weight.data[3, 4] = float("nan")
    model.save_pretrained(tmp_path / "broken")
    tokenizer.save_pretrained(tmp_path / "broken")
    with pytest.raises(ValueError, match=r"Layer 2 of .*broken has NaN or infinity"):
        measure.geometry(recipe(folder, models=[str(tmp_path / "broken")]))
    assert not (tmp_path / "broken/geometry.json").exists()


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"metrics": ["variance", "entropy"]}, "metrics has 'entropy', allowed are variance, spectra"),
        ({"metrics": []}, r"metrics is \[\]"),
        ({"metrics": ["nearest_mean"]}, "allowed is nearest_mean only beside collapse"),
        ({"layers": [5]}, "layers has 5, allowed are -3 to 2"),
        ({"layers": []}, r"layers is \[\]"),
        ({"layers": ["last"]}, r"layers is \['last'\]"),
        ({"tokens": 100}, "tokens is 100, allowed for .* is at most its context, 64"),
        ({"tokens": 1}, "tokens is 1, allowed is at least 2"),
        ({"skip": 24}, "skip is 24, allowed is less than tokens, 24"),
        ({"batch_size": 0}, "batch_size is 0"),
        ({"min_count": 0}, "min_count is 0"),
        ({"sequences": 0}, "sequences is 0"),
        ({"documents": 0}, "documents is 0"),
        ({"data": ""}, "data is ''"),
        ({"models": []}, r"models is \[\]"),
        ({"models": ["a", "./a/"]}, "allowed is each model once"),
        ({"metrics": "entropy"}, "metrics has 'entropy'"),
        ({"layers": 7}, "layers has 7, allowed are -3 to 2"),
        ({"models": ["/no/such/folder"]}, "There is no folder /no/such/folder"),
    ],
)
def test_wrong_values_get_one_sentence(folder, values, said):
    with pytest.raises(ValueError, match=said):
        measure.geometry(recipe(folder, "llama", **values))


def test_classes_that_are_never_seen_leave_the_rest(folder):
    asked = recipe(folder, "llama", min_count=10_000)
    found, points = measure._measured(str(folder / "llama"), measure._config(str(folder / "llama"), asked), asked)
    assert "collapse" not in found["layers"][-1]
    assert found["layers"][-1]["spectrum"]["pooled"]["effective_rank"] > 1
    assert set(points.classes) == {None}


def test_wrong_data_for_images(folder, tmp_path):
    def refused(said, **values):
        with pytest.raises(ValueError, match=said):
            measure.geometry(recipe(folder, "vit", **values))

    refused("which reads images, is a folder with a folder for each class", data="python_prose")
    refused("cannot be read as images", data=str(folder / "no/such"))
    refused("images", data=str(folder / "text"))
    shutil.copytree(folder / "vit", tmp_path / "bare", ignore=shutil.ignore_patterns("preprocessor_config.json"))
    (tmp_path / "bare" / "processor_config.json").unlink(missing_ok=True)
    refused("no image processor", models=[str(tmp_path / "bare")], data=str(folder / "pictures"))


def of_verb(folder, name, **values):
    asked = recipe(folder, name, **values)
    model = asked.models[0]
    return measure._measured(model, measure._config(model, asked), asked)


def test_classes_are_those_of_the_classifier_by_name(folder, tmp_path, capsys):
    """The same network with its classes in another order, one that knows more of them, and one that knows others."""
    whole, _ = of_verb(folder, "vit", data=str(folder / "pictures"), metrics=ALL)
    for case, names in {"turned": ["red", "blue", "green"], "more": ["grey", "red", "blue", "green"]}.items():
        model = vit(labels=len(names))
        model.load_state_dict({k: v for k, v in vit().state_dict().items() if "classifier" not in k}, strict=False)
        order = [sorted(COLOURS).index(name) for name in names if name in COLOURS]
        skip = len(names) - len(order)
        model.classifier.weight.data[skip:] = vit().classifier.weight.data[order]
        model.classifier.bias.data[skip:] = vit().classifier.bias.data[order]
        model.config.id2label = dict(enumerate(names))
        model.config.label2id = {name: number for number, name in enumerate(names)}
        model.save_pretrained(tmp_path / case)
        shutil.copyfile(folder / "vit/preprocessor_config.json", tmp_path / case / "preprocessor_config.json")
        found, points = of_verb(tmp_path, case, data=str(folder / "pictures"), metrics=ALL)
        assert set(points.classes) == set(COLOURS)
        for kind, figures in whole["layers"][-1]["collapse"].items():
            assert found["layers"][-1]["collapse"][kind] == pytest.approx(figures, rel=1e-6, abs=1e-9)
    assert "nothing is compared" not in capsys.readouterr().out

    strange = vit(labels=7)
    strange.save_pretrained(tmp_path / "strange")
    shutil.copyfile(folder / "vit/preprocessor_config.json", tmp_path / "strange/preprocessor_config.json")
    found, _ = of_verb(tmp_path, "strange", data=str(folder / "pictures"), metrics=ALL)
    assert "classifies other classes than" in capsys.readouterr().out
    assert not found["layers"][-1]["collapse"]["classifier_input"].keys() & {"nc3", "nc4", "unc3_mean"}


def test_entropy_knows_what_a_query_sees(folder, tokenizer, tmp_path):
    """Both sides, and a window: the largest possible entropy is that of the keys that are seen."""
    torch.manual_seed(0)
    shape = {"vocab_size": 300, "max_position_embeddings": 64, **SMALL}
    bert = transformers.BertForMaskedLM(transformers.BertConfig(**shape))
    windowed = {"sliding_window": 4, "head_dim": 8, "num_key_value_heads": 4, "bos_token_id": 1, "eos_token_id": 2}
    mistral = transformers.MistralForCausalLM(transformers.MistralConfig(**shape, **windowed))
    for name, model in (("bert", bert), ("mistral", mistral)):
        model.save_pretrained(tmp_path / name)
        tokenizer.save_pretrained(tmp_path / name)
        metrics = ["variance", "collapse", "attention_entropy"]
        found, _ = of_verb(tmp_path, name, data=str(folder / "text"), metrics=metrics)
        for layer in found["layers"][1:]:
            # Of random weights attention is nearly uniform.
            assert layer["attention_entropy"]["share_of_most"] == pytest.approx([1] * 4, abs=0.01)
        assert ("collapse" in found["layers"][-1], found["classes_are"]) == (
            (False, None) if name == "bert" else (True, "next tokens")
        )


def test_what_a_model_cannot_read_is_said(folder, tokenizer, tmp_path):
    def refused(said, model, **values):
        model.save_pretrained(tmp_path / "model")
        tokenizer.save_pretrained(tmp_path / "model")
        with pytest.raises(ValueError, match=said):
            measure.geometry(recipe(folder, models=[str(tmp_path / "model")], **values))
        shutil.rmtree(tmp_path / "model")

    t5 = {"vocab_size": 300, "d_model": 32, "d_kv": 8, "d_ff": 32, "num_layers": 1, "num_heads": 4}
    refused("does not take the data", transformers.T5ForConditionalGeneration(transformers.T5Config(**t5)))
    small = transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=20, **SMALL))
    refused(r"The tokenizer in .*model gives the token \d+, the model has 20", small)
    image = vit()
    image.save_pretrained(tmp_path / "vit")
    shutil.copyfile(folder / "vit/preprocessor_config.json", tmp_path / "vit/preprocessor_config.json")
    pictures = {"models": [str(tmp_path / "vit")], "data": str(folder / "pictures")}
    with pytest.raises(ValueError, match="skip is 17, allowed is less than the 17 tokens"):
        measure.geometry(recipe(folder, **pictures, skip=17))
    shutil.copytree(folder / "pictures", tmp_path / "cut")
    cut = next((tmp_path / "cut/red").iterdir())
    cut.write_bytes(cut.read_bytes()[:600])
    with pytest.raises(ValueError, match=rf"the image .*{cut.name} cannot be read"):
        measure.geometry(recipe(folder, **{**pictures, "data": str(tmp_path / "cut")}))


@pytest.mark.parametrize("damage", ["a tensor", "half of the file"])
def test_weights_that_are_not_there_are_named(folder, tmp_path, damage):
    shutil.copytree(folder / "llama", tmp_path / "llama")
    path = tmp_path / "llama/model.safetensors"
    if damage == "a tensor":
        weights = load_file(path)
        del weights["model.layers.1.mlp.up_proj.weight"]
        save_file(weights, path, {"format": "pt"})
    else:
        path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    said = "model.layers.1.mlp.up_proj.weight of .* is missing" if damage == "a tensor" else "llama cannot be read"
    with pytest.raises(ValueError, match=said):
        measure.geometry(recipe(folder, models=[str(tmp_path / "llama")]))


@pytest.mark.parametrize("content", ["", "[]", '{"log_history": null}', '{"log_history": [3]}'])
def test_a_damaged_log_costs_its_plot_alone(folder, tmp_path, content):
    shutil.copytree(folder / "llama", tmp_path / "run")
    (tmp_path / "run/trainer_state.json").write_text(content)
    measure.geometry(recipe(folder, models=[str(tmp_path / "run")], metrics=["variance"]))
    assert (tmp_path / "run/geometry/report.html").exists()


def test_output_is_tried_before_anything_is_measured(folder, tmp_path, monkeypatch):
    monkeypatch.setattr(measure, "_measured", None)
    (tmp_path / "file").write_text("precious")
    for output in (tmp_path / "file", tmp_path / "file/below"):
        with pytest.raises(ValueError, match="output: .*cannot be made"):
            measure.geometry(recipe(folder, "llama", output=str(output)))
    assert (tmp_path / "file").read_text() == "precious"


@pytest.mark.parametrize("kind", ["named", "numbered"])
def test_saved_datasets_are_read(folder, tmp_path, kind):
    rows = [
        {"picture": str(path), "label": number}
        for number, colour in enumerate(COLOURS)
        for path in (folder / "pictures" / colour).iterdir()
    ]
    label = datasets.ClassLabel(names=list(COLOURS)) if kind == "named" else datasets.Value("int64")
    features = datasets.Features({"picture": datasets.Image(), "label": label})
    datasets.Dataset.from_list(rows, features=features).save_to_disk(tmp_path / "saved")
    found, points = of_verb(folder, "vit", data=str(tmp_path / "saved"))
    assert found["classes_are"] == "labels"
    assert set(points.classes) == (set(COLOURS) if kind == "named" else {"0", "1", "2"})
    assert ("nc3" in found["layers"][-1]["collapse"]["classifier_input"]) == (kind == "named")


def test_processes_decode_their_own_pictures(folder, monkeypatch):
    decoded = []
    decode = geometry_inputs.decode
    monkeypatch.setattr(geometry_inputs, "decode", lambda *given: (decoded.append(1), decode(*given))[1])
    found = images.sample(str(folder / "pictures"), 11)
    processor = transformers.AutoImageProcessor.from_pretrained(folder / "vit")
    whole = list(geometry_inputs.image_batches(found, [0, 1, 2], processor, 3, 2))
    assert [len(batch.labels) for batch in whole] == [2, 2, 2, 2, 2, 1]
    for process in range(3):
        decoded.clear()
        mine = list(geometry_inputs.image_batches(found, [0, 1, 2], processor, 3, 2, process, 3))
        assert len(decoded) == sum(len(batch.labels) for batch in mine) < 11
        for one, other in zip(mine, whole[process::3], strict=True):
            assert torch.equal(one.inputs["pixel_values"], other.inputs["pixel_values"])
            assert torch.equal(one.labels, other.labels)


def test_pictures_without_labels_have_no_classes(folder, tmp_path):
    (tmp_path / "flat").mkdir()
    for i, path in enumerate((folder / "pictures").rglob("*.png")):
        shutil.copyfile(path, tmp_path / "flat" / f"{i}.png")
    asked = recipe(folder, "vit", data=str(tmp_path / "flat"), sequences=7)
    found, points = measure._measured(str(folder / "vit"), measure._config(str(folder / "vit"), asked), asked)
    assert (found["sequences"], found["classes_are"]) == (7, None)
    assert "collapse" not in found["layers"][-1]
    assert found["layers"][-1]["variance"].keys() == {"total", "within_sequence", "between_sequence", "shares"}
    assert set(points.classes) == {None}


def test_model_of_the_hub_is_measured(folder, hub, fresh_process, tmp_path):
    code = """
        import sys
        from huggingface_hub import HfApi
        from laplacian_heads.__main__ import main

        HfApi().create_repo("someone/llama", exist_ok=True)
        HfApi().upload_folder(repo_id="someone/llama", folder_path=sys.argv[1])
        sys.exit(main(["geometry", "someone/llama", f"data={sys.argv[2]}", "tokens=24"]))
    """
    fresh_process(code, folder / "llama", folder / "text", can_import=True, env=hub.env)
    found = json.loads((tmp_path / "process/runs/eval/someone--llama/geometry.json").read_text())
    assert found["sequences"] == 35


@pytest.mark.slow
@pytest.mark.parametrize("batch_size", [2, 50])  # of which one leaves nothing to the second process
def test_two_processes_measure_what_one_does(folder, tmp_path, batch_size):
    values = [f"data={folder / 'text'}", "tokens=24", "min_count=2", f"metrics=[{', '.join(ALL)}]"]
    values.append(f"batch_size={batch_size}")
    found = []
    for count, name in ((1, "one"), (2, "two")):
        arguments = ["geometry", str(folder / "laplace"), *values, f"output={tmp_path / name}"]
        if count == 1:
            subprocess.run([sys.executable, "-m", "laplacian_heads", *arguments], check=True, cwd=ROOT)
        else:
            process = launched("ddp", arguments)
            assert process.wait(timeout=300) == 0
        found.append(json.loads((tmp_path / name / "geometry.json").read_text()))
    one, two = found
    assert (one["sequences"], one["tokens"]) == (two["sequences"], two["tokens"]) == (35, 840)
    for layer, other in zip(one["layers"], two["layers"], strict=True):
        first, second = _flat(layer), _flat(other)
        assert first.keys() == second.keys()
        for name, value in first.items():
            assert second[name] == (None if value is None else pytest.approx(value, rel=1e-6, abs=1e-9)), name


def _flat(content, prefix=""):
    if isinstance(content, dict):
        return {key: value for name, part in content.items() for key, value in _flat(part, f"{prefix}/{name}").items()}
    if isinstance(content, list):
        return {key: value for i, part in enumerate(content) for key, value in _flat(part, f"{prefix}/{i}").items()}
    return {prefix: content}
