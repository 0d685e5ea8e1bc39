"""Which heads are Laplacian: every accepted form, every refused value, and the configuration that carries them."""

import json

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoConfig

from laplacian_heads import LaplaceGPTConfig, LaplaceGPTForCausalLM
from laplacian_heads.laplacian import check_share, heads_by_layer

FORMS = [
    (0, [[], [], []]),
    (1, [[3], [3], [3]]),
    (4, [[0, 1, 2, 3]] * 3),
    ([0, 2, 4], [[], [2, 3], [0, 1, 2, 3]]),
    ((0, 2, 4), [[], [2, 3], [0, 1, 2, 3]]),
    ([[], [0], [3, 1]], [[], [0], [1, 3]]),
    (((), (0,), [3, 1]), [[], [0], [1, 3]]),
    ({"start_layer": 0, "increment": 1, "max_count": 4}, [[3], [2, 3], [1, 2, 3]]),
    ({"start_layer": 1, "increment": 2, "max_count": 3}, [[], [2, 3], [1, 2, 3]]),
    ({"start_layer": 7, "increment": 2, "max_count": 3}, [[], [], []]),
    ({"start_layer": 0, "increment": 0, "max_count": 4}, [[], [], []]),
    ({"start_layer": 0, "increment": 9, "max_count": 0}, [[], [], []]),
]


def schedule(start_layer=0, increment=1, max_count=2, **others):
    return {"start_layer": start_layer, "increment": increment, "max_count": max_count, **others}


# value, and what the message must name: the wrong part, its layer if it has one, and what is allowed
WRONG = {
    "bool": (True, ["True", "integer"]),
    "false": (False, ["False", "integer"]),
    "None": (None, ["None", "integer"]),
    "float": (1.0, ["1.0", "integer"]),
    "string": ("2", ["'2'", "integer"]),
    "set": ({1, 2}, ["{1, 2}", "integer"]),
    "tensor": (torch.tensor(1), ["tensor(1)", "integer"]),
    "negative": (-1, ["-1", "at least 0"]),
    "more than the heads": (5, ["5", "layer 0", "from 0 to", "4"]),
    "bool for a layer": ([1, True, 1], ["True", "layer 1", "from 0 to"]),
    "negative for a layer": ([1, 1, -2], ["-2", "layer 2", "from 0 to"]),
    "more than the heads of a layer": ([1, 5, 1], ["5", "layer 1", "4"]),
    "float for a layer": ([1, 2.0, 1], ["2.0", "layer 1", "integer"]),
    "None for a layer": ([1, None, 1], ["None", "layer 1", "integer"]),
    "string for a layer": (["1", 1, 1], ["'1'", "layer 0", "integer"]),
    "too few entries": ([1, 1], ["[1, 1]", "2 entries", "3 layers"]),
    "too many entries": ([[0], [0], [0], [0]], ["4 entries", "3 layers"]),
    "no entries": ([], ["0 entries", "3 layers"]),
    "index out of range": ([[0], [4], [0]], ["4", "layer 1", "from 0 to 3"]),
    "negative index": ([[0], [0], [-1]], ["-1", "layer 2", "from 0 to 3"]),
    "repeated index": ([[2, 1, 2], [0], [0]], ["[2, 1, 2]", "layer 0", "distinct"]),
    "bool index": ([[False], [0], [0]], ["False", "layer 0", "from 0 to 3"]),
    "float index": ([[0], [1.0], [0]], ["1.0", "layer 1", "from 0 to 3"]),
    "nested index": ([[0], [[1]], [0]], ["[1]", "layer 1", "from 0 to 3"]),
    "mixed entries": ([[0], 1, [0]], ["1", "layer 1", "lists"]),
    "mixed entries, list last": ([0, 1, [0]], ["0", "layer 0", "lists"]),
    "unknown key": (schedule(end_layer=3), ["end_layer", "start_layer", "increment", "max_count"]),
    "missing key": ({"start_layer": 0, "increment": 1}, ["start_layer, increment, max_count"]),
    "no key": ({}, ["{}", "start_layer, increment, max_count"]),
    "bool start_layer": (schedule(start_layer=True), ["start_layer", "True", "at least 0"]),
    "negative start_layer": (schedule(start_layer=-1), ["start_layer", "-1", "at least 0"]),
    "float increment": (schedule(increment=0.5), ["increment", "0.5", "at least 0"]),
    "negative increment": (schedule(increment=-1), ["increment", "-1", "at least 0"]),
    "None increment": (schedule(increment=None), ["increment", "None", "at least 0"]),
    "bool max_count": (schedule(max_count=True), ["max_count", "True", "layer 0", "from 0 to"]),
    "negative max_count": (schedule(max_count=-1), ["max_count", "-1", "layer 0", "from 0 to"]),
    "max_count above the heads": (schedule(max_count=5), ["max_count", "5", "layer 0", "4"]),
    "max_count above the heads, never reached": (schedule(start_layer=9, max_count=5), ["max_count", "5", "4"]),
}


def config(**fields):
    return LaplaceGPTConfig(
        **{"num_hidden_layers": 3, "num_attention_heads": 4, "hidden_size": 32, "vocab_size": 64, **fields}
    )


@pytest.mark.parametrize(("value", "expected"), FORMS)
def test_every_form(value, expected):
    assert heads_by_layer(value, [4, 4, 4]) == expected


@st.composite
def layouts(draw):
    """A value in one of the forms, the heads of each layer, and the layout written out one head at a time."""
    heads = draw(st.lists(st.integers(1, 6), min_size=1, max_size=5))
    layers = range(len(heads))
    form = draw(st.sampled_from(["count", "counts", "indices", "schedule"]))
    if form == "count":
        value = draw(st.integers(0, min(heads)))
        return value, heads, [[h for h in range(heads[n]) if heads[n] - h <= value] for n in layers]
    if form == "counts":
        value = [draw(st.integers(0, n)) for n in heads]
        return value, heads, [[h for h in range(heads[n]) if heads[n] - h <= value[n]] for n in layers]
    if form == "indices":
        value = [draw(st.permutations(range(n)))[: draw(st.integers(0, n))] for n in heads]
        return value, heads, [[h for h in range(heads[n]) if h in value[n]] for n in layers]
    value = schedule(draw(st.integers(0, 6)), draw(st.integers(0, 4)), draw(st.integers(0, min(heads))))
    expected, count = [], 0
    for n in layers:
        if n >= value["start_layer"]:
            count += value["increment"]
        expected.append([h for h in range(heads[n]) if heads[n] - h <= min(count, value["max_count"])])
    return value, heads, expected


@given(layouts())
def test_random_layouts_equal_the_written_out_ones_before_and_after_json(layout):
    value, heads, expected = layout
    assert heads_by_layer(value, heads) == expected
    assert heads_by_layer(json.loads(json.dumps(value)), heads) == expected


@pytest.mark.parametrize("build", [lambda value: heads_by_layer(value, [4, 4, 4]), lambda v: config(laplacian_heads=v)])
@pytest.mark.parametrize("wrong", WRONG)
def test_wrong_value_names_field_value_layer_and_what_is_allowed(wrong, build):
    value, words = WRONG[wrong]
    with pytest.raises(ValueError, match="laplacian_heads") as error:
        build(value)
    assert all(word in str(error.value) for word in words), str(error.value)


def test_layers_with_unequal_heads_are_checked_one_by_one():
    assert heads_by_layer(2, [2, 4]) == [[0, 1], [2, 3]]
    with pytest.raises(ValueError, match="layer 1.*, 2"):
        heads_by_layer(3, [4, 2])


@pytest.mark.parametrize("share", [0, 0.0, 0.5, 1, 1.0, 2.5])
def test_share_is_kept_as_a_float(share):
    assert check_share(share) == share
    stored = config(laplacian_share=share).laplacian_share
    assert stored == share
    assert isinstance(stored, float)


@pytest.mark.parametrize("share", [True, False, -0.1, float("nan"), float("inf"), "1", None, [1.0], torch.tensor(1.0)])
@pytest.mark.parametrize("build", [check_share, lambda share: config(laplacian_share=share)])
def test_wrong_share_names_field_value_and_what_is_allowed(share, build):
    with pytest.raises(ValueError, match="laplacian_share") as error:
        build(share)
    assert repr(share) in str(error.value)
    assert "at least 0" in str(error.value)


@pytest.mark.parametrize(("value", "expected"), FORMS)
@pytest.mark.parametrize("trip", ["json", "dict", "folder", "auto"])
def test_config_round_trip_leaves_the_meaning_unchanged(value, expected, trip, tmp_path):
    saved = config(laplacian_heads=value, laplacian_share=0.25)
    if trip == "json":
        loaded = LaplaceGPTConfig(**json.loads(saved.to_json_string(use_diff=False)))
    elif trip == "dict":
        loaded = LaplaceGPTConfig.from_dict(saved.to_diff_dict())
    else:
        saved.save_pretrained(tmp_path)
        loaded = (LaplaceGPTConfig if trip == "folder" else AutoConfig).from_pretrained(tmp_path)
    assert type(loaded) is LaplaceGPTConfig
    assert loaded.laplacian_heads == saved.laplacian_heads
    assert {**loaded.to_dict(), "_name_or_path": ""} == saved.to_dict()
    assert heads_by_layer(loaded.laplacian_heads, [4, 4, 4]) == expected
    assert loaded.laplacian_share == 0.25


def test_config_does_not_share_the_callers_lists():
    mine = [[0], [1], [2]]
    kept = config(laplacian_heads=mine)
    mine[0].append(3)
    mine[1] = [0]
    assert kept.laplacian_heads == [[0], [1], [2]]


@pytest.mark.parametrize(
    ("fields", "name"),
    [
        ({"num_attention_heads": 5}, "num_attention_heads is 5"),
        ({"num_key_value_heads": 3}, "num_key_value_heads is 3"),
    ],
)
def test_heads_that_do_not_divide_are_refused(fields, name):
    with pytest.raises(ValueError, match=f"{name}, allowed"):
        config(**fields)


# depth: width, heads; nanochat's base_train.py, with odd depths rounded up to whole heads of 128
@pytest.mark.parametrize(
    ("depth", "width", "heads"),
    [
        (1, 128, 1),
        (2, 128, 1),
        (3, 256, 2),
        (4, 256, 2),
        (12, 768, 6),
        (13, 896, 7),
        (20, 1280, 10),
        (26, 1664, 13),
        (32, 2048, 16),
    ],
)
def test_from_depth_follows_nanochat(depth, width, heads):
    derived = LaplaceGPTConfig.from_depth(depth)
    assert (derived.num_hidden_layers, derived.hidden_size, derived.intermediate_size) == (depth, width, 4 * width)
    assert (derived.num_attention_heads, derived.num_key_value_heads, derived.head_dim) == (heads, heads, 128)
    with torch.device("meta"):
        model = LaplaceGPTForCausalLM(derived)
    assert model.num_parameters() == 2 * 65536 * width + 12 * depth * width**2


def test_from_depth_takes_overrides():
    derived = LaplaceGPTConfig.from_depth(4, vocab_size=100, head_dim=32, laplacian_heads=1, num_hidden_layers=2)
    assert (derived.hidden_size, derived.vocab_size, derived.head_dim, derived.num_hidden_layers) == (256, 100, 32, 2)
    assert derived.laplacian_heads == 1


@pytest.mark.parametrize("depth", [0, -1, 2.0, True, None, "4"])
def test_wrong_depth_is_refused(depth):
    with pytest.raises(ValueError, match="depth is .* allowed is an integer of at least 1"):
        LaplaceGPTConfig.from_depth(depth)


@pytest.mark.parametrize("heads", [0, 5, 10, list(range(1, 11)) * 2, [[0, 9]] * 20, schedule(0, 1, 10)])
def test_default_has_560988160_parameters_for_every_layout(heads):
    with torch.device("meta"):
        model = LaplaceGPTForCausalLM(LaplaceGPTConfig(laplacian_heads=heads))
    assert model.num_parameters() == 560_988_160


def test_default_is_depth_20():
    default = LaplaceGPTConfig().to_dict()
    assert default == LaplaceGPTConfig.from_depth(20).to_dict()
    assert default["max_position_embeddings"] == 2048
    assert default["final_logit_softcapping"] == 15.0
    assert default["rope_parameters"] == {"rope_theta": 10000.0, "rope_type": "default"}
    assert not default["tie_word_embeddings"]
    assert not default["attention_bias"]


def test_special_tokens_belong_to_the_default_vocabulary():
    ids = [(c.pad_token_id, c.bos_token_id, c.eos_token_id) for c in (LaplaceGPTConfig(), config())]
    assert ids == [(65526, 65527, 65531), (None, None, None)]
    given_ids = config(pad_token_id=1, bos_token_id=2, eos_token_id=[3, 4])
    assert (given_ids.pad_token_id, given_ids.bos_token_id, given_ids.eos_token_id) == (1, 2, [3, 4])


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"num_attention_heads": 0}, "num_attention_heads is 0, allowed is an integer of at least 1"),
        ({"num_hidden_layers": -1}, "num_hidden_layers is -1, allowed is an integer of at least 1"),
        ({"vocab_size": 0}, "vocab_size is 0, allowed is an integer of at least 1"),
        ({"num_key_value_heads": 0}, "num_key_value_heads is 0, allowed is an integer of at least 1"),
        ({"num_key_value_heads": 3}, "num_key_value_heads is 3, allowed are divisors of num_attention_heads 10"),
        ({"num_attention_heads": 7}, "num_attention_heads is 7, allowed are divisors of hidden_size 1280"),
        ({"head_dim": 3}, "head_dim is 3, allowed are even numbers"),
        ({"laplacian_head": 2}, "There is no field laplacian_head, allowed are laplacian_heads and laplacian_share"),
    ],
)
def test_a_size_or_field_that_no_model_could_have_is_refused(fields, said):
    with pytest.raises(ValueError, match=said):
        LaplaceGPTConfig(**fields)
