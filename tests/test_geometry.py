"""The measures of geometry against numpy's, the verb on models of two kinds, and what it refuses."""

import json

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel

from laplacian_heads import recipes
from laplacian_heads.eval import geometry
from laplacian_heads.eval.geometry import GeometryRecipe, components, measure, sequences, within_sequence_share

TEXT = "The quick brown fox jumps over the lazy dog. A head that subtracts smooths less than one that adds. "


def hidden_states(*shape, seed=0):
    """Correlated, far from the origin, and with sequences of means of their own."""
    generator = torch.Generator().manual_seed(seed)
    count, tokens, width = shape
    mixing = torch.randn(width, width, generator=generator) * torch.logspace(0, -3, width)
    means = torch.randn(count, 1, width, generator=generator)
    return torch.randn(shape, generator=generator) @ mixing + means + 5


def count_components(matrix, share=0.99):
    """Principal components by numpy's singular values of the centred (tokens, width)."""
    variances = np.linalg.svd(matrix - matrix.mean(0), compute_uv=False) ** 2
    held = np.cumsum(variances) / variances.sum()
    return int(np.argmax(held >= share)) + 1


@pytest.mark.parametrize("shape", [(5, 7, 3), (3, 40, 24), (4, 10, 24), (1, 30, 8), (6, 1, 4)])
def test_measures_are_numpys(shape):
    hidden = hidden_states(*shape)
    array = hidden.double().numpy()
    total = array.reshape(-1, shape[-1]).var(0).sum()
    assert within_sequence_share(hidden) == pytest.approx(array.var(1).sum(-1).mean() / total, abs=1e-12)
    assert 1 - within_sequence_share(hidden) == pytest.approx(array.mean(1).var(0).sum() / total, abs=1e-12)
    flat = hidden.flatten(0, 1)
    assert components(flat).item() == count_components(flat.double().numpy())
    if shape[1] > 1:
        assert components(hidden).tolist() == [count_components(sequence) for sequence in array]


def test_components_of_known_variances():
    """Four orthogonal directions that hold 90, 9, 0.9 and 0.1 % of the variance."""
    directions = torch.linalg.qr(hidden_states(1, 8, 8)[0].double())[0][:4]
    hidden = torch.cat([directions, -directions]) * torch.tensor([90, 9, 0.9, 0.1] * 2).sqrt()[:, None]
    assert [components(hidden, share).item() for share in (0.5, 0.95, 0.995, 0.9995)] == [1, 2, 3, 4]


@pytest.mark.parametrize("value", [0.0, 0.1, 1e6])
def test_nothing_varies(value):
    hidden = torch.full((3, 11, 5), value)
    assert within_sequence_share(hidden) == 0
    assert components(hidden).tolist() == [0, 0, 0]
    assert components(hidden.flatten(0, 1)).item() == 0


def test_only_sequences_differ():
    hidden = torch.randn(4, 1, 5).expand(4, 9, 5)
    assert within_sequence_share(hidden) == pytest.approx(0, abs=1e-12)
    assert components(hidden).tolist() == [0] * 4


def test_one_sequence_has_all_its_variance_within():
    assert within_sequence_share(hidden_states(1, 20, 6)) == pytest.approx(1, abs=1e-12)


def gpt2(**fields):
    torch.manual_seed(0)
    small = {"vocab_size": 300, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64}
    return GPT2LMHeadModel(GPT2Config(**{**small, **fields})).eval()


@pytest.mark.parametrize("family", ["laplace_gpt", "gpt2"])
def test_model_is_measured_at_every_layer(family, tiny, input_ids):
    """The same figures from hidden states caught by hand: what each block reads, and what the final norm gives."""
    model = tiny() if family == "laplace_gpt" else gpt2()
    base = model.base_model
    blocks, norm = (base.layers, base.norm) if family == "laplace_gpt" else (base.h, base.ln_f)
    caught = []
    hooks = [block.register_forward_pre_hook(lambda _, args: caught.append(args[0])) for block in blocks]
    hooks.append(norm.register_forward_hook(lambda *args: caught.append(args[-1])))
    with torch.no_grad():
        model(input_ids)
    for hook in hooks:
        hook.remove()
    caught = caught[-len(hooks) :]  # LaplaceGPT norms the embedding with the same module

    measured = measure(model, input_ids, batch_size=1)
    assert [layer["layer"] for layer in measured] == [0, 1, 2]
    for layer, hidden in zip(measured, caught, strict=True):
        array = hidden.double().numpy()
        flat = array.reshape(-1, array.shape[-1])
        share = ((array - array.mean(1, keepdims=True)) ** 2).sum() / ((flat - flat.mean(0)) ** 2).sum()
        assert layer["within_sequence_share"] == pytest.approx(share, rel=1e-5)
        assert layer["components_99"] == np.mean([count_components(sequence) for sequence in array])
        assert layer["components_99_pooled"] == count_components(flat)


def test_sequences_start_with_bos_and_skip_short_documents(tokenizer):
    ids = sequences(tokenizer, [TEXT, "short", TEXT[4:], TEXT[10:]], tokens=12, count=2)
    assert ids.shape == (2, 12)
    assert ids[:, 0].tolist() == [tokenizer.bos_token_id] * 2
    assert TEXT.startswith(tokenizer.decode(ids[0, 1:]))
    assert TEXT[4:].startswith(tokenizer.decode(ids[1, 1:]))
    with pytest.raises(ValueError, match=r"tokens is 99, but the longest document has \d+ tokens"):
        sequences(tokenizer, ["short", "shorter"], tokens=99, count=2)


@pytest.fixture(scope="module")
def run(tmp_path_factory, tiny, tokenizer):
    folder = tmp_path_factory.mktemp("geometry")
    for name, model in (("laplacian", tiny()), ("gpt2", gpt2())):
        model.save_pretrained(folder / name)
        tokenizer.save_pretrained(folder / name)
    for i in range(5):
        (folder / f"{i}.txt").write_text(TEXT[i:] * 4)
    return folder


def recipe(folder, *models, **values):
    defaults = {"data": str(folder), "tokens": 24, "batch_size": 2, "models": [str(folder / name) for name in models]}
    return recipes.load(GeometryRecipe, "geometry", {**defaults, **values})


def test_verb_writes_what_it_measures_into_each_folder(run, tokenizer, capsys):
    names = ("laplacian", "gpt2")
    geometry.geometry(recipe(run, *names, documents=4, sequences=3), dry_run=True)
    assert not (run / "gpt2" / "geometry.json").exists()
    geometry.geometry(recipe(run, *names, documents=4, sequences=3))
    printed = capsys.readouterr().out
    texts = [(run / f"{i}.txt").read_text() for i in range(3)]
    for name in names:
        written = json.loads((run / name / "geometry.json").read_text())
        model = AutoModelForCausalLM.from_pretrained(run / name)
        assert written["layers"] == measure(model, sequences(tokenizer, texts, 24, 3), 2)
        assert (written["data"], written["sequences"], written["tokens"]) == (str(run), 3, 24)
        assert (run / name / "geometry.png").read_bytes().startswith(b"\x89PNG")
        for layer in written["layers"]:
            assert f"{layer['within_sequence_share']:.3f}" in printed
    assert not list(run.glob("*/*.part"))


def test_output_takes_the_results_of_a_model(run, tmp_path):
    geometry.geometry(recipe(run, "gpt2", output=str(tmp_path / "out")))
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["geometry.json", "geometry.png"]


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"tokens": 65}, "tokens is 65, allowed for .*gpt2 is at most its context, 64"),
        ({"tokens": 1}, "tokens is 1, allowed is at least 2"),
        ({"documents": 0}, "documents is 0"),
        ({"sequences": 0}, "sequences is 0"),
        ({"batch_size": 0}, "batch_size is 0"),
        ({"models": None}, "models is None, allowed is a list"),
        ({"output": ""}, "output is ''"),
        ({"data": ""}, "data is ''"),
        ({"models": ["no/such/folder"]}, "There is no folder no/such/folder"),
        ({"models": ["a", "b"], "output": "c"}, "output is 'c' for 2 models"),
    ],
)
def test_refusals(run, values, message):
    with pytest.raises(ValueError, match=message):
        geometry.geometry(recipe(run, "gpt2", **values))


def test_damaged_model_is_refused(tiny, input_ids):
    model = tiny()
    model.model.layers[1].mlp.fc2.weight.data[0] = torch.nan
    with pytest.raises(ValueError, match="layer 2 are not finite"):
        measure(model, input_ids, 2)
