"""Laplacian heads in the models of transformers: numbers, generation, training, saving, and what is refused."""

import copy
import json
import re
from pathlib import Path

import pytest
import torch
import torch._dynamo.testing
import transformers
from reference import naive_heads, redraw
from safetensors import safe_open
from torch import nn
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    GenerationMixin,
    StaticCache,
    Trainer,
    TrainingArguments,
    dynamic_module_utils,
)
from transformers.integrations import flash_attention
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from laplacian_heads import LaplaceGPTConfig, LaplaceGPTForCausalLM, laplacian, laplacianize, set_laplacian_share
from laplacian_heads.modeling_laplace_gpt import CACHE
from laplacian_heads.train.callbacks import LaplacianShareCallback

VOCAB = 61
TEXT = {"vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4}
TEXT = {**TEXT, "num_hidden_layers": 2, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
GROUPED = {**TEXT, "num_key_value_heads": 2, "head_dim": 8}
IMAGE = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "image_size": 16, "patch_size": 8}
SPEECH = {"vocab_size": VOCAB, "d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "pad_token_id": 0}
SPEECH = {**SPEECH, "encoder_attention_heads": 4, "decoder_attention_heads": 4, "encoder_ffn_dim": 48}
SPEECH = {**SPEECH, "decoder_ffn_dim": 48, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 3}

# model class, fields of its config, pattern of its self-attention modules, kind of input
ARCHITECTURES = {
    "llama": ("LlamaForCausalLM", GROUPED, r"self_attn", "decoder"),
    "qwen3": ("Qwen3ForCausalLM", GROUPED, r"self_attn", "decoder"),
    "mistral": ("MistralForCausalLM", {**GROUPED, "sliding_window": 3}, r"self_attn", "decoder"),
    "gemma2": ("Gemma2ForCausalLM", {**GROUPED, "sliding_window": 3}, r"self_attn", "decoder"),
    "gemma3": ("Gemma3ForCausalLM", {**GROUPED, "sliding_window": 3}, r"self_attn", "decoder"),
    "gpt2": ("GPT2LMHeadModel", TEXT, r"attn", "decoder"),
    "nanochat": ("NanoChatForCausalLM", GROUPED, r"self_attn", "decoder"),
    "bert": ("BertForSequenceClassification", TEXT, r"attention\.self", "encoder"),
    "roberta": ("RobertaForMaskedLM", TEXT, r"attention\.self", "encoder"),
    "vit": ("ViTForImageClassification", {**IMAGE, "intermediate_size": 48}, r"attention", "image"),
    "dinov2": ("Dinov2Model", {**IMAGE, "mlp_ratio": 2, "layerscale_value": 0.5}, r"attention", "image"),
    "clip": (
        "CLIPModel",
        {"text_config": TEXT, "vision_config": {**IMAGE, "intermediate_size": 48}, "projection_dim": 16},
        r"self_attn",
        "image and text",
    ),
    "whisper": (
        "WhisperForConditionalGeneration",
        {**SPEECH, "num_mel_bins": 8, "max_source_positions": 10, "max_target_positions": 40},
        r"self_attn",
        "speech",
    ),
    "bart": ("BartForConditionalGeneration", {**SPEECH, "max_position_embeddings": 40}, r"self_attn", "seq2seq"),
    "t5": (
        "T5ForConditionalGeneration",
        {"vocab_size": VOCAB, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4},
        r"SelfAttention",
        "seq2seq",
    ),
}
DECODERS = [name for name, (*_, kind) in ARCHITECTURES.items() if kind == "decoder"]
BACKENDS = ["eager", "sdpa"]
LAYOUTS = {
    "count": (1, 1.0),
    "lists": ([[0, 2], [3]], 0.4),
    "schedule": ({"start_layer": 1, "increment": 2, "max_count": 3}, 1.0),
}


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    """Threads that wait for each other make matrices this small ten times slower on a busy machine."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(autouse=True)
def code_cache(tmp_path, monkeypatch):
    """Code that comes with a model is not left in the user's cache."""
    monkeypatch.setattr(dynamic_module_utils, "HF_MODULES_CACHE", str(tmp_path / "modules"))


def model_class(name):
    return getattr(transformers, ARCHITECTURES[name][0])


def build(name, backend="eager", **overrides):
    """A tiny model of an architecture with random parameters, in evaluation mode."""
    cls = model_class(name)
    if not cls._supports_sdpa and backend == "sdpa":
        pytest.skip(f"{cls.__name__} has no sdpa")
    fields = {**ARCHITECTURES[name][1], **overrides}
    if name == "t5":
        fields["decoder_start_token_id"] = 0
    return redraw(cls(cls.config_class(**fields, attn_implementation=backend)).eval())


def inputs_of(name, batch=2, tokens=7):
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(4, VOCAB, (batch, tokens), generator=generator)
    pixels = torch.randn(batch, 3, 16, 16, generator=generator)
    ids[:, -1] = 2  # CLIP pools at the end token
    return {
        "decoder": {"input_ids": ids},
        "encoder": {"input_ids": ids},
        "image": {"pixel_values": pixels},
        "image and text": {"input_ids": ids, "pixel_values": pixels},
        "speech": {
            "input_features": torch.randn(batch, 8, 20, generator=generator),
            "decoder_input_ids": ids,
        },
        "seq2seq": {"input_ids": ids, "decoder_input_ids": ids[:, :5]},
    }[ARCHITECTURES[name][3]]


def outputs_of(model, inputs):
    """The floating-point outputs of a model in one row; cache, loss and nested outputs left out."""
    outputs = model(**inputs)
    return torch.cat([v.float().flatten() for v in outputs.values() if torch.is_tensor(v)])


def attention_names(name, model):
    pattern = re.compile(rf"(^|.*\.){ARCHITECTURES[name][2]}")
    return [path for path, _ in model.named_modules() if pattern.fullmatch(path)]


def expand(layout, layers, heads=4):
    """The layout in the form of one list per layer, for the reference and for models of any number of layers."""
    if isinstance(layout, int):
        return [list(range(heads - layout, heads))] * layers
    if isinstance(layout, dict):
        counts = [
            min(layout["max_count"], max(0, layout["increment"] * (i - layout["start_layer"] + 1)))
            for i in range(layers)
        ]
        return [list(range(heads - count, heads)) for count in counts]
    return (layout * layers)[:layers]


def pair(name, backend, layout, share):
    """A laplacianized model and the naive reference with the same parameters."""
    plain = build(name, backend)
    paths = attention_names(name, plain)
    lists = expand(layout, len(paths))
    naive = naive_heads(copy.deepcopy(plain), dict(zip(paths, lists, strict=True)), share)
    return laplacianize(plain, lists if isinstance(layout, list) else layout, share), naive


def assert_close(found, expected, tolerance=1e-5):
    """Equal to the tolerance, relative to the largest value where that is above 1."""
    scale = max(1.0, expected.abs().max().item())
    assert (found - expected).abs().max().item() <= tolerance * scale


@pytest.mark.parametrize("backend", [*BACKENDS, "flex_attention"])
@pytest.mark.parametrize("name", ARCHITECTURES)
@torch.no_grad()
def test_no_laplacian_head_changes_nothing(name, backend):
    if backend == "flex_attention" and (name == "t5" or not model_class(name)._supports_flex_attn):
        pytest.skip(f"{name} has no flex attention that works on more than one row")
    plain = build(name, backend)
    inputs = inputs_of(name)
    with torch.compiler.set_stance("force_eager"):  # flex attention compiles itself, for minutes
        expected = outputs_of(plain, inputs)
        assert torch.equal(outputs_of(laplacianize(plain, 0), inputs), expected)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_outputs_and_gradients_equal_the_naive_reference(name, backend, layout):
    model, naive = pair(name, backend, *LAYOUTS[layout])
    inputs = inputs_of(name)
    found, expected = outputs_of(model, inputs), outputs_of(naive, inputs)
    assert not torch.allclose(expected, outputs_of(build(name, backend), inputs), atol=1e-3)
    assert_close(found, expected)

    weights = torch.randn(found.shape, generator=torch.Generator().manual_seed(2)) / len(found)
    (found * weights).sum().backward()
    (expected * weights).sum().backward()
    gradients = dict(naive.named_parameters())
    for path, parameter in model.named_parameters():
        if gradients[path].grad is not None:
            assert_close(parameter.grad, gradients[path].grad)


@torch.no_grad()
def test_an_attention_that_goes_round_the_interface_under_eager_keeps_its_heads():
    plain = build("gpt2", reorder_and_upcast_attn=True, scale_attn_by_inverse_layer_idx=True)
    layout = [[0, 2], [3]]
    naive = naive_heads(copy.deepcopy(plain), dict(zip(attention_names("gpt2", plain), layout, strict=True)))
    inputs = inputs_of("gpt2")
    assert_close(outputs_of(laplacianize(plain, layout), inputs), outputs_of(naive, inputs))


@pytest.mark.parametrize("name", ["llama", "mistral", "vit", "whisper"])
@torch.no_grad()
def test_flex_attention_equals_the_naive_reference(name):
    model, naive = pair(name, "flex_attention", *LAYOUTS["lists"])
    inputs = inputs_of(name)
    with torch.compiler.set_stance("force_eager"):
        assert_close(outputs_of(model, inputs), outputs_of(naive, inputs))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("name", ["llama", "mistral", "gpt2", "bert", "roberta", "bart", "t5"])
def test_padding_changes_no_head(name, side, backend):
    """Outputs equal the reference's at every position that is not padding."""
    model, naive = pair(name, backend, *LAYOUTS["lists"])
    inputs = inputs_of(name)
    mask = torch.ones_like(inputs["input_ids"])
    mask[0, slice(0, 3) if side == "left" else slice(-3, None)] = 0
    inputs["attention_mask"] = mask
    outputs, expected = model(**inputs), naive(**inputs)
    real = mask.bool() if outputs.logits.shape[:2] == mask.shape else ...
    assert_close(outputs.logits[real], expected.logits[real])


def greedy(model, inputs, ids, tokens):
    """The argmax loop without a cache; ids: (1, tokens so far)."""
    for _ in range(tokens):
        key = "decoder_input_ids" if inputs else "input_ids"
        logits = model(**inputs, **{key: ids}, use_cache=False).logits
        ids = torch.cat([ids, logits[:, -1:].argmax(-1)], dim=1)
    return ids


GENERATE = {"max_new_tokens": 6, "min_new_tokens": 6, "do_sample": False, "pad_token_id": 0}
GENERATE = {**GENERATE, "eos_token_id": None, "forced_eos_token_id": None}


@pytest.mark.parametrize("name", DECODERS)
@torch.no_grad()
def test_generation_equals_a_loop_without_cache(name):
    model = laplacianize(build(name), [[0, 2], [3]], 0.7)
    ids = inputs_of(name)["input_ids"][:1]
    expected = greedy(model, {}, ids, 6)
    short = greedy(model, {}, ids[:, 3:], 6)
    assert torch.equal(model.generate(ids, attention_mask=torch.ones_like(ids), **GENERATE), expected)

    padded = torch.cat([torch.cat([torch.zeros(1, 3, dtype=torch.long), ids[:, 3:]], dim=1), ids])
    mask = (padded != 0).long()
    found = model.generate(padded, attention_mask=mask, **GENERATE)
    assert torch.equal(found[:1, 3:], short)
    assert torch.equal(found[1:], expected)

    beams = [
        model.generate(padded, attention_mask=mask, num_beams=3, use_cache=cache, **GENERATE) for cache in (False, True)
    ]
    assert torch.equal(*beams)


@pytest.mark.parametrize("name", ["whisper", "bart", "t5"])
@torch.no_grad()
def test_generation_of_an_encoder_and_decoder_equals_a_loop_without_cache(name):
    model = laplacianize(build(name), 2, 0.7)
    inputs = {key: value[:1] for key, value in inputs_of(name).items() if key != "decoder_input_ids"}
    start = torch.full((1, 1), model.config.decoder_start_token_id)
    expected = greedy(model, inputs, start, 6)
    found = model.generate(**inputs, **GENERATE)
    assert torch.equal(found, expected[:, -found.shape[1] :])
    assert found.shape[1] >= 6
    beams = [model.generate(**inputs, num_beams=3, use_cache=cache, **GENERATE) for cache in (False, True)]
    assert torch.equal(*beams)


@torch.no_grad()
def test_a_prompt_of_whisper_stays_as_it_is():
    """transformers leaves it alone by the model's type; elsewhere it would prepend the start token."""
    model = laplacianize(build("whisper"), 2)
    features = inputs_of("whisper")["input_features"][:1]
    prompt = torch.tensor([[7, 3, 9]])
    found = GenerationMixin.generate(model, features, decoder_input_ids=prompt, **GENERATE)
    assert torch.equal(found, greedy(model, {"input_features": features}, prompt, 6))


@pytest.mark.parametrize("backend", BACKENDS)
def test_cross_attention_is_left_alone(backend):
    model = laplacianize(build("whisper", backend), 4)
    cross = [module for name, module in model.named_modules() if name.endswith("encoder_attn")]
    assert len(cross) == 2
    assert not any(hasattr(module, "laplacian_heads") for module in cross)


def test_a_cache_that_holds_the_newest_values_elsewhere_is_refused():
    model = laplacianize(build("llama"), 1)
    ids = inputs_of("llama")["input_ids"]
    paged = object.__new__(laplacian.PagedAttentionCache)
    layer = model.model.layers[0].self_attn
    with pytest.raises(ValueError, match="newest values last.*StaticCache"):
        model(ids, **{CACHE: StaticCache(config=model.config, max_cache_len=16)})
    with pytest.raises(ValueError, match="newest values last.*StaticCache"):
        model.generate(ids, cache_implementation="static", **GENERATE)
    with pytest.raises(ValueError, match="newest values last.*PagedAttentionCache"):
        layer(torch.zeros(1, 2, 32), **{CACHE: paged})


def test_cross_attention_under_another_name_is_refused():
    model = laplacianize(build("bart"), 1)
    layer = model.model.encoder.layers[0].self_attn
    states = torch.zeros(1, 3, 32)
    with pytest.raises(ValueError, match="cross-attention"):
        layer(states, key_value_states=torch.zeros(1, 3, 32))
    attention = ALL_ATTENTION_FUNCTIONS[layer.config._attn_implementation]
    query, key = torch.zeros(1, 4, 2, 8), torch.zeros(1, 4, 3, 8)
    with pytest.raises(ValueError, match="from 2 positions to 3, so it is not self-attention"):
        attention(layer, query, key, key, None)


def trainer(model, folder, data, *callbacks, **arguments):
    arguments = {"max_steps": 2, "save_strategy": "no", **arguments}
    arguments = TrainingArguments(
        output_dir=str(folder),
        per_device_train_batch_size=2,
        use_cpu=True,
        report_to="none",
        disable_tqdm=True,
        **arguments,
    )
    return Trainer(model=model, args=arguments, train_dataset=data, callbacks=list(callbacks))


def text_data(rows=16):
    ids = torch.randint(4, VOCAB, (rows, 7), generator=torch.Generator().manual_seed(3))
    return [{"input_ids": row, "labels": row} for row in ids]


def test_trainer_trains_saves_and_reloads(tmp_path):
    model = laplacianize(build("llama", "sdpa"), 2, 0.7)
    before = copy.deepcopy(model.state_dict())
    run = trainer(model, tmp_path / "run", text_data())
    run.train()
    assert any(not torch.equal(before[name], value) for name, value in model.state_dict().items())
    run.save_model(tmp_path / "saved")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "saved", trust_remote_code=True).eval()
    inputs = inputs_of("llama")
    model.eval()
    assert torch.equal(outputs_of(loaded, inputs), outputs_of(model, inputs))
    assert (loaded.config.laplacian_heads, loaded.config.laplacian_share) == (2, 0.7)


def test_label_smoothing_shifts_the_labels(tmp_path):
    """Trainer knows by the name of the class that labels are to be shifted."""
    plain = build("llama")
    model = laplacianize(copy.deepcopy(plain), 0)
    batch = {"input_ids": inputs_of("llama")["input_ids"]}
    losses = []
    for candidate in (model, plain):
        run = trainer(candidate, tmp_path, text_data(), label_smoothing_factor=0.1)
        losses.append(run.compute_loss(candidate, {**batch, "labels": batch["input_ids"]}))
    assert torch.equal(*losses)


# What a stranger runs: the package is not there, and the code comes from the folder.
LOADER = """
import sys, torch, transformers
torch.set_num_threads(1)
torch.set_grad_enabled(False)
for folder, auto_class, inputs, trusted in torch.load(sys.argv[1]):
    result = {}
    try:
        config = transformers.AutoConfig.from_pretrained(folder, trust_remote_code=trusted)
        model = getattr(transformers, auto_class).from_pretrained(folder, trust_remote_code=trusted).eval()
        result["heads"], result["backend"] = config.laplacian_heads, config._attn_implementation
        outputs = model(**inputs)
        result["outputs"] = torch.cat([v.float().flatten() for v in outputs.values() if torch.is_tensor(v)])
        model.save_pretrained(folder + "-again")
    except Exception as error:
        result["error"] = f"{type(error).__name__}: {error}"
    torch.save(result, folder + ".result")
"""

AUTO_CLASSES = {
    "llama": "AutoModelForCausalLM",
    "gpt2": "AutoModelForCausalLM",
    "bert": "AutoModelForSequenceClassification",
    "vit": "AutoModelForImageClassification",
    "clip": "AutoModel",
    "whisper": "AutoModelForSpeechSeq2Seq",
    "t5": "AutoModelForSeq2SeqLM",
}


@torch.no_grad()
def test_saved_models_load_where_the_package_is_not(tmp_path, fresh_process):
    """Equal outputs through the Auto classes; nothing without trust_remote_code; re-saved folders load again."""
    jobs, models = [], []
    for name, auto_class in AUTO_CLASSES.items():
        plain = build(name, "sdpa")
        models.append(laplacianize(plain, expand([[0, 2], [3]], len(attention_names(name, plain))), 0.7))
        jobs.append((str(tmp_path / name), auto_class, inputs_of(name), True))
    models.append(laplacianize(sequence_classifier(), 2))
    jobs.append((str(tmp_path / "classifier"), "AutoModelForSequenceClassification", inputs_of("llama"), True))
    for model, (folder, *_) in zip(models, jobs, strict=True):
        model.save_pretrained(folder)
    (tmp_path / "untrusted").symlink_to(tmp_path / "llama")
    untrusted = (str(tmp_path / "untrusted"), "AutoModelForCausalLM", inputs_of("llama"), False)

    torch.save([*jobs, untrusted], tmp_path / "jobs")
    fresh_process(LOADER, tmp_path / "jobs")
    assert "trust_remote_code" in torch.load(f"{untrusted[0]}.result")["error"]
    code = Path(laplacian.__file__).read_bytes()
    for (folder, auto_class, inputs, _), model in zip(jobs, models, strict=True):
        result = torch.load(f"{folder}.result")
        assert "error" not in result, (folder, result["error"])
        assert torch.equal(result["outputs"], outputs_of(model, inputs)), folder
        assert result["heads"] == model.config.laplacian_heads
        assert result["backend"] is None  # the mark is gone
        for saved in (Path(folder), Path(folder + "-again")):
            assert [path.name for path in saved.glob("*.py")] == ["laplacian.py"]
            assert (saved / "laplacian.py").read_bytes() == code
        again = getattr(transformers, auto_class).from_pretrained(folder + "-again", trust_remote_code=True).eval()
        assert torch.equal(outputs_of(again, inputs), result["outputs"]), folder


def sequence_classifier():
    """Builds its base model through AutoModel."""
    config = transformers.LlamaConfig(**GROUPED, num_labels=3)
    return redraw(transformers.LlamaForSequenceClassification(config)).eval()


@pytest.mark.parametrize("attention", [None, "eager", "sdpa"])
@pytest.mark.parametrize(
    ("name", "stock"),
    [
        ("llama", "LlamaForCausalLM"),
        ("llama", "LlamaModel"),
        ("clip", "CLIPModel"),
        ("clip", "CLIPVisionModel"),
        ("clip", "CLIPTextModel"),
        ("whisper", "WhisperForConditionalGeneration"),
        ("bert", "BertModel"),
    ],
)
def test_a_stock_class_refuses_the_folder(tmp_path, name, stock, attention):
    laplacianize(build(name), 1).save_pretrained(tmp_path)
    kwargs = {} if attention is None else {"attn_implementation": attention}
    with pytest.raises(ValueError, match="trust_remote_code=True"):
        getattr(transformers, stock).from_pretrained(tmp_path, **kwargs)


def weight_names(folder):
    with safe_open(folder / "model.safetensors", "pt") as weights:
        return set(weights.keys())


@pytest.mark.parametrize("name", ARCHITECTURES)
@torch.no_grad()
def test_weights_keep_the_names_of_the_plain_model(tmp_path, name):
    """Also where these differ from the names in memory, and for a model that was loaded before it was laplacianized."""
    plain = build(name)
    plain.save_pretrained(tmp_path / "plain")
    inputs = inputs_of(name)
    expected = outputs_of(laplacianize(plain, 1), inputs)
    plain.save_pretrained(tmp_path / "built")
    loaded = laplacianize(model_class(name).from_pretrained(tmp_path / "plain", attn_implementation="eager"), 1).eval()
    assert torch.equal(outputs_of(loaded, inputs), expected)
    loaded.save_pretrained(tmp_path / "loaded")

    if name == "vit":  # the point of this test
        assert weight_names(tmp_path / "plain") != set(plain.state_dict())
    for folder in (tmp_path / "built", tmp_path / "loaded"):
        assert weight_names(folder) == weight_names(tmp_path / "plain")
        again, info = type(loaded).from_pretrained(folder, attn_implementation="eager", output_loading_info=True)
        assert not info["missing_keys"]
        assert not info["unexpected_keys"]
        assert torch.equal(outputs_of(again.eval(), inputs), expected)


def test_a_base_model_is_saved_with_its_heads(tmp_path):
    model = laplacianize(build("llama", "sdpa"), 2)
    model.model.save_pretrained(tmp_path)
    loaded = AutoModel.from_pretrained(tmp_path, trust_remote_code=True).eval()
    inputs = inputs_of("llama")
    assert torch.equal(outputs_of(loaded, inputs), outputs_of(model.model, inputs))


def test_a_part_with_its_own_config_refuses_to_be_saved_alone(tmp_path):
    model = laplacianize(build("clip"), 1)
    with pytest.raises(ValueError, match="save the whole model"):
        model.vision_model.save_pretrained(tmp_path)
    assert not list(tmp_path.iterdir())


def test_a_config_survives_its_own_dict(tmp_path):
    model = laplacianize(build("clip"), (1, 0, 2, 1))
    config = type(model.config).from_dict(model.config.to_dict())
    assert config.to_dict() == model.config.to_dict()
    model.save_pretrained(tmp_path)
    saved = json.loads((tmp_path / "config.json").read_text())
    assert saved["model_type"] == "laplacian_clip"
    config = AutoConfig.from_pretrained(tmp_path, trust_remote_code=True)
    assert config.laplacian_heads == [1, 0, 2, 1]
    assert config._attn_implementation is None
    assert config.vision_config._attn_implementation is None


def test_a_model_of_the_same_config_stays_plain(tmp_path):
    config = transformers.LlamaConfig(**GROUPED)
    first, second = (transformers.LlamaForCausalLM(config) for _ in range(2))
    laplacianize(second, 1)
    first.save_pretrained(tmp_path)
    assert type(transformers.AutoModelForCausalLM.from_pretrained(tmp_path)) is transformers.LlamaForCausalLM
    assert not hasattr(first.config, "laplacian_heads")


def test_a_variant_is_initialised_as_the_plain_model():
    """NanoChat draws its output projections in a module without parameters of its own, skipped in foreign code."""
    torch.manual_seed(0)
    plain = transformers.NanoChatModel(transformers.NanoChatConfig(**GROUPED))
    config = laplacianize(copy.deepcopy(plain), 1).config
    torch.manual_seed(0)
    model = AutoModel.from_config(config)
    assert type(model).__name__ == "LaplacianNanoChatModel"
    assert all(map(torch.equal, model.state_dict().values(), plain.state_dict().values()))


@pytest.mark.parametrize("name", ARCHITECTURES)
@torch.no_grad()
def test_keep_outputs_keeps_them_at_share_0_and_gives_the_operator_at_1(name):
    plain = build(name)
    inputs = inputs_of(name)
    expected = outputs_of(plain, inputs)
    paths = attention_names(name, plain)
    lists = expand([[0, 2], [3]], len(paths))
    model = laplacianize(copy.deepcopy(plain), lists, laplacian_share=0, keep_outputs=True)
    assert_close(outputs_of(model, inputs), expected)

    set_laplacian_share(model, 1.0)
    naive = copy.deepcopy(plain)
    for path, heads in zip(paths, lists, strict=True):
        laplacian._negate_output(laplacian._output_projection(naive, path), heads, 4)
    naive_heads(naive, dict(zip(paths, lists, strict=True)))
    assert_close(outputs_of(model, inputs), outputs_of(naive, inputs))


def test_negation_touches_the_columns_of_the_heads_alone():
    """Independent of the code that finds them: GPT-2 holds (in, out), LLaMA (out, in)."""
    for name, path, axis in (
        ("gpt2", "transformer.h.0.attn.c_proj", 0),
        ("llama", "model.layers.0.self_attn.o_proj", 1),
    ):
        plain = build(name)
        before = plain.get_submodule(path).weight.detach().clone()
        after = laplacianize(plain, [[1], []], 0, keep_outputs=True).get_submodule(path).weight
        signs = torch.ones(32)
        signs[8:16] = -1
        assert torch.equal(after, before * (signs[:, None] if axis == 0 else signs))


def test_the_callback_raises_the_share_and_resumes(tmp_path):
    plain = build("llama", "sdpa")
    shares = []

    class Record(transformers.TrainerCallback):
        def on_step_begin(self, args, state, control, model=None, **kwargs):
            shares.append(model.model.layers[0].self_attn.laplacian_share)

    def run(model, steps, **arguments):
        callbacks = LaplacianShareCallback(4), Record()
        arguments = {"max_steps": steps, "save_strategy": "steps", "save_steps": 2, **arguments}
        return trainer(model, tmp_path, text_data(), *callbacks, **arguments)

    model = laplacianize(copy.deepcopy(plain), 2, laplacian_share=0.2, keep_outputs=True)
    run(model, 6).train()
    assert shares == pytest.approx([0.2, 0.4, 0.6, 0.8, 1, 1])
    assert model.config.laplacian_share == 1.0
    assert json.loads((tmp_path / "checkpoint-2/config.json").read_text())["laplacian_share"] == pytest.approx(0.6)
    assert json.loads((tmp_path / "checkpoint-4/config.json").read_text())["laplacian_share"] == 1.0

    checkpoint = str(tmp_path / "checkpoint-2")
    rebuilt = laplacianize(copy.deepcopy(plain), 2, laplacian_share=0.2, keep_outputs=True)
    loaded = AutoModelForCausalLM.from_pretrained(checkpoint, trust_remote_code=True)
    for resumed, restore in ((rebuilt, False), (loaded, True)):
        shares.clear()
        run(resumed, 6, restore_callback_states_from_checkpoint=restore).train(resume_from_checkpoint=checkpoint)
        assert shares == pytest.approx([0.6, 0.8, 1, 1])
        assert all(map(torch.equal, resumed.state_dict().values(), model.state_dict().values()))


def test_the_callback_refuses_what_it_cannot_do(tmp_path):
    """A model of 0 Laplacian heads is the baseline of a comparison and trains as any other."""
    with pytest.raises(ValueError, match="steps is 0"):
        LaplacianShareCallback(0)
    with pytest.raises(ValueError, match="no Laplacian heads"):
        trainer(build("llama"), tmp_path, text_data(), LaplacianShareCallback(2)).train()
    baseline = laplacianize(build("llama"), 0, laplacian_share=0)
    trainer(baseline, tmp_path, text_data(), LaplacianShareCallback(2)).train()
    assert baseline.config.laplacian_share == 1


@pytest.mark.parametrize("make", [lambda: build("llama"), lambda: nn.Linear(2, 2)])
def test_share_of_a_model_without_laplacian_heads_is_refused(make):
    with pytest.raises(ValueError, match="has no Laplacian heads whose share"):
        set_laplacian_share(make(), 0.5)


def test_saved_config_without_its_heads_is_refused(tmp_path):
    """It would load as a baseline."""
    laplacianize(build("llama"), 2).save_pretrained(tmp_path)
    entries = json.loads((tmp_path / "config.json").read_text())
    del entries["laplacian_heads"]
    (tmp_path / "config.json").write_text(json.dumps(entries))
    with pytest.raises(ValueError, match="lacks laplacian_heads"):
        transformers.AutoModelForCausalLM.from_pretrained(tmp_path, trust_remote_code=True)


def test_copies_of_the_code_do_not_multiply_the_backends(tmp_path):
    """Each folder loaded from the Hub brings a copy of the code, which registers backends around those it finds."""
    counts = []
    for number in range(4):
        laplacianize(build("llama"), 2).save_pretrained(tmp_path / str(number))
        transformers.AutoModelForCausalLM.from_pretrained(tmp_path / str(number), trust_remote_code=True)
        counts.append(len(ALL_ATTENTION_FUNCTIONS.valid_keys()))
    assert 0 < counts[3] - counts[2] == counts[2] - counts[1] <= 16


def peft_model():
    peft = pytest.importorskip("peft")
    return peft.get_peft_model(build("llama"), peft.LoraConfig(target_modules=["q_proj", "o_proj"]))


def with_adapter():
    peft = pytest.importorskip("peft")
    return peft.get_peft_model(build("llama"), peft.LoraConfig(target_modules=["o_proj"])).get_base_model()


def own_class():
    class MyLlama(transformers.LlamaForCausalLM):
        """A class that no installation of transformers could find again."""

    return MyLlama(transformers.LlamaConfig(**GROUPED))


def sparse():
    """Masks the keys itself under eager and sdpa only."""
    ranks = {"q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8}
    experts = {"n_routed_experts": 4, "n_group": 2, "topk_group": 1, "num_experts_per_tok": 2}
    config = transformers.DeepseekV32Config(**TEXT, **ranks, **experts, moe_intermediate_size=16)
    return transformers.DeepseekV32ForCausalLM(config)


@pytest.mark.parametrize(
    ("make", "kwargs", "message"),
    [
        (lambda: nn.Linear(2, 2), {}, "a class that transformers exports, not Linear"),
        (own_class, {}, "a class that transformers exports, not MyLlama"),
        (peft_model, {}, "a class that transformers exports, not Peft"),
        (lambda: transformers.BloomModel(transformers.BloomConfig(n_layer=1)), {}, "attention interface"),
        (sparse, {}, "each name of a backend"),
        (lambda: LaplaceGPTForCausalLM(LaplaceGPTConfig.from_depth(1, vocab_size=64)), {}, "already"),
        (lambda: laplacianize(build("llama"), 1), {}, "already"),
        (lambda: build("llama"), {"laplacian_heads": 5}, "layer 0.*to the number of heads there, 4"),
        (lambda: build("llama"), {"laplacian_heads": [1]}, "has 1 entries, the model has 2 layers"),
        (lambda: build("llama"), {"laplacian_heads": [[4], []]}, "head 4 in layer 0"),
        (lambda: build("llama"), {"laplacian_heads": True}, "laplacian_heads is True"),
        (lambda: build("llama"), {"laplacian_heads": {"start": 1}}, "start_layer, increment, max_count"),
        (lambda: build("llama"), {"laplacian_share": -1}, "laplacian_share is -1"),
        (with_adapter, {"laplacian_heads": 1, "keep_outputs": True}, "plain linear layer"),
    ],
)
def test_what_cannot_be_done_raises_and_leaves_the_model_alone(make, kwargs, message):
    model = make()
    before = copy.deepcopy(model.state_dict())
    cls, config = type(model), copy.deepcopy(getattr(model, "config", None))
    with pytest.raises(ValueError, match=message):
        laplacianize(model, **{"laplacian_heads": 1, **kwargs})
    assert type(model) is cls
    assert getattr(model, "config", None) == config
    assert all(map(torch.equal, model.state_dict().values(), before.values()))


def test_a_copy_is_independent():
    model = laplacianize(build("llama"), 2)
    inputs = inputs_of("llama")
    expected = outputs_of(model, inputs)
    other = copy.deepcopy(model)
    set_laplacian_share(other, 0.3)
    other.set_attn_implementation("sdpa")
    assert torch.equal(outputs_of(model, inputs), expected)
    assert not torch.allclose(outputs_of(other, inputs), expected, atol=1e-3)
    set_laplacian_share(other, 1)
    assert_close(outputs_of(other, inputs), expected)


@pytest.mark.parametrize("name", ["llama", *(pytest.param(n, marks=pytest.mark.slow) for n in ("gpt2", "bert", "vit"))])
@torch.no_grad()
def test_compiles_as_one_graph(name):
    model = laplacianize(build(name, "sdpa"), 2)
    inputs = inputs_of(name)
    torch.compiler.reset()
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    assert_close(outputs_of(compiled, inputs), outputs_of(model, inputs))


@pytest.mark.slow
@torch.no_grad()
def test_raising_the_share_does_not_compile_again_at_every_step():
    model = laplacianize(build("llama", "sdpa"), 2)
    counter = torch._dynamo.testing.CompileCounter()
    torch.compiler.reset()
    compiled = torch.compile(model, fullgraph=True, backend=counter)
    for share in torch.linspace(0, 1, 9).tolist():
        set_laplacian_share(model, share)
        compiled(**inputs_of("llama"), use_cache=False)
    assert counter.frame_count <= 4


@pytest.mark.parametrize("name", ["llama", "bert"])
def test_gradient_checkpointing_changes_no_gradient(name):
    model = laplacianize(build(name), 2).train()
    if name == "bert":
        model = model.eval()  # dropout
    gradients = []
    for checkpointing in (False, True):
        if checkpointing:
            model.train().gradient_checkpointing_enable()
            for module in model.modules():
                if isinstance(module, nn.Dropout):
                    module.p = 0.0
        model.zero_grad()
        outputs_of(model, inputs_of(name)).square().mean().backward()
        gradients.append([p.grad.clone() for p in model.parameters() if p.grad is not None])
    assert len(gradients[0]) == len(gradients[1])
    for found, expected in zip(*gradients, strict=True):
        assert_close(found, expected)


@pytest.mark.parametrize("name", ["llama", "whisper", "vit"])
@torch.no_grad()
def test_bfloat16_equals_float32_within_its_rounding(name):
    plain = redraw(build(name), std=0.05)
    model = laplacianize(plain, 2)
    inputs = inputs_of(name)
    expected = outputs_of(model, inputs)
    model = model.to(torch.bfloat16)
    inputs = {key: value.bfloat16() if value.is_floating_point() else value for key, value in inputs.items()}
    assert_close(outputs_of(model, inputs), expected, tolerance=0.03)


@torch.no_grad()
def test_recorded_attentions_are_those_of_the_softmax():
    """P, and not I - P; of a layer whose input no Laplacian head has changed it is the plain model's."""
    plain = build("llama")
    inputs = inputs_of("llama")
    expected = plain(**inputs, output_attentions=True).attentions
    found = laplacianize(plain, 2)(**inputs, output_attentions=True).attentions
    assert len(found) == 2
    assert torch.equal(found[0], expected[0])
    assert torch.allclose(found[1].sum(-1), torch.ones(()))


@pytest.mark.parametrize("inner", [False, True])
@torch.no_grad()
def test_setting_the_backend_keeps_the_heads(inner):
    model = laplacianize(build("llama", "eager"), 2)
    inputs = inputs_of("llama")
    expected = outputs_of(model, inputs)
    (model.model if inner else model).set_attn_implementation("sdpa")
    assert model.config._attn_implementation == "sdpa"
    assert_close(outputs_of(model, inputs), expected)


@pytest.mark.parametrize("backend", BACKENDS)
@torch.no_grad()
def test_laplace_gpt_equals_a_laplacianized_nanochat(backend):
    layout = [[0, 2], [3]]
    own = redraw(LaplaceGPTForCausalLM(LaplaceGPTConfig(**GROUPED, laplacian_heads=layout))).eval()
    own.set_attn_implementation(backend)
    nanochat = build("nanochat", backend, **{name: getattr(own.config, name) for name in ("rms_norm_eps",)})
    nanochat.load_state_dict(own.state_dict())
    model = laplacianize(nanochat, layout)
    inputs = inputs_of("nanochat")
    assert torch.equal(own(**inputs).logits, model(**inputs).logits.float())


def engine_attention(seen):
    """A serving engine's attention: its output is (tokens, heads * dim)."""
    sdpa = ALL_ATTENTION_FUNCTIONS["sdpa"]

    def attention(module, *args, **kwargs):
        seen.append(module.config._attn_implementation)
        output, weights = sdpa(module, *args, **kwargs)
        return output.reshape(-1, output.shape[2] * output.shape[3]), weights

    return attention


@pytest.mark.parametrize("make", ["laplacianize", "LaplaceGPT"])
@torch.no_grad()
def test_an_engine_that_returns_two_dimensions_gives_the_same(make):
    if make == "LaplaceGPT":
        model = redraw(LaplaceGPTForCausalLM(LaplaceGPTConfig(**GROUPED, laplacian_heads=2))).eval()
    else:
        model = laplacianize(build("llama", "sdpa"), 2)
    inputs = {"input_ids": inputs_of("llama")["input_ids"][:1]}
    expected = outputs_of(model, inputs)
    seen = []
    ALL_ATTENTION_FUNCTIONS.register("engine", engine_attention(seen))
    model.set_attn_implementation("engine")
    assert_close(outputs_of(model, inputs), expected)
    assert seen == ["engine", "engine"]


@torch.no_grad()
def test_flash_attention_sees_its_own_name(monkeypatch):
    """flash attention picks its kernel by the name in the module's config; the kernel is played by sdpa here."""
    seen = []

    def kernel(query, key, value, attention_mask, query_length, is_causal, softmax_scale=None, **kwargs):
        seen.append(kwargs["attn_implementation"])
        query, key, value = (tensor.transpose(1, 2) for tensor in (query, key, value))
        output = nn.functional.scaled_dot_product_attention(
            query, key, value, is_causal=is_causal, scale=softmax_scale, enable_gqa=True
        )
        return output.transpose(1, 2)

    monkeypatch.setattr(flash_attention, "_flash_attention_forward", kernel)
    for model in (laplacianize(build("llama"), 2), laplacianize(build("whisper"), 2)):
        inputs = inputs_of(model.config.model_type)
        expected = outputs_of(model, inputs)
        for module in model.modules():
            if isinstance(module, transformers.PreTrainedModel):
                module.config._attn_implementation_internal = "flash_attention_2"
        assert_close(outputs_of(model, inputs), expected)
    assert set(seen) == {"flash_attention_2"}


def test_a_whole_model_can_be_pickled_and_exported(tmp_path):
    model = laplacianize(build("llama", "sdpa"), [[0, 2], [3]])
    inputs = inputs_of("llama")
    with torch.no_grad():
        expected = outputs_of(model, inputs)
        torch.save(model, tmp_path / "model")
        assert torch.equal(outputs_of(torch.load(tmp_path / "model", weights_only=False), inputs), expected)
        exported = torch.export.export(model, (), {**inputs, "use_cache": False}).module()
        assert_close(exported(**inputs, use_cache=False).logits, model(**inputs).logits)
