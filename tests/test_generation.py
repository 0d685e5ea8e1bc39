"""Generation equals a loop that recomputes everything for every token, whatever keeps the keys and values."""

import copy

import pytest
import torch
from reference import naive_heads, plain_nanochat, tiny_gpt
from transformers import ContinuousBatchingConfig, DynamicCache, GenerationConfig, StaticCache

from laplacian_heads.modeling_laplace_gpt import CACHE

LAYOUT = [[0, 2], [1, 2, 3]]
NEW = 8


def prompt(*shape, seed=0):
    return torch.randint(0, 97, shape, generator=torch.Generator().manual_seed(seed))


@pytest.fixture(params=[2, 4], ids=["grouped queries", "all heads"])
def model(request):
    return tiny_gpt(laplacian_heads=LAYOUT, num_key_value_heads=request.param)


@torch.no_grad()
def argmax_loop(model, ids, new=NEW):
    for _ in range(new):
        logits = model(ids, use_cache=False).logits[:, -1]
        ids = torch.cat([ids, logits.argmax(-1, keepdim=True)], dim=1)
    return ids


def generate(model, ids, **options):
    return model.generate(ids, **{"max_new_tokens": NEW, "do_sample": False, **options})


def record_lengths(model):
    """The lengths of the inputs that the embedding sees from now on."""
    lengths = []
    model.get_input_embeddings().register_forward_pre_hook(lambda module, args: lengths.append(args[0].shape[1]))
    return lengths


@pytest.mark.parametrize("attn", ["eager", "sdpa"])
@pytest.mark.parametrize("length", [1, 7])
@pytest.mark.parametrize(
    "options",
    [{}, {"use_cache": True}, {"use_cache": False}, {"cache_implementation": "static"}],
    ids=["default", "cache", "no cache", "static"],
)
def test_greedy_generation_equals_the_argmax_loop(model, options, length, attn):
    model.set_attn_implementation(attn)
    ids = prompt(3, length)
    expected = argmax_loop(model, ids)
    lengths = record_lengths(model)
    assert torch.equal(generate(model, ids, **options), expected)
    cached = options.get("use_cache", True)
    assert lengths == [length] + [1 if cached else length + n for n in range(1, NEW)]


@pytest.mark.parametrize("make", [DynamicCache, lambda config: StaticCache(config, max_cache_len=20)])
def test_a_cache_that_is_handed_over_is_used_and_continued(model, make):
    cache = make(config=model.config)
    ids = prompt(2, 5)
    first = generate(model, ids, **{CACHE: cache}, max_new_tokens=4)
    lengths = record_lengths(model)
    second = generate(model, first, **{CACHE: cache}, max_new_tokens=4)
    assert lengths == [1, 1, 1, 1]
    assert torch.equal(second, argmax_loop(model, ids))


@pytest.mark.parametrize("name", [CACHE, "past_key_values"])
@pytest.mark.parametrize("attn", ["eager", "sdpa"])
def test_prefill_in_chunks_equals_one_pass(model, attn, name):
    model.set_attn_implementation(attn)
    ids = prompt(2, 9)
    cache = DynamicCache(config=model.config)
    with torch.no_grad():
        chunks = [model(part, **{name: cache}, use_cache=True).logits for part in ids.split([4, 3, 2], dim=1)]
        torch.testing.assert_close(torch.cat(chunks, 1), model(ids, use_cache=False).logits, atol=1e-5, rtol=0)
    assert cache.get_seq_length() == 9


@pytest.mark.parametrize("attn", ["eager", "sdpa"])
@pytest.mark.parametrize("cache", [None, "static"])
def test_a_left_padded_batch_equals_single_prompts(model, cache, attn):
    model.set_attn_implementation(attn)
    prompts = [prompt(1, length, seed=length) for length in (1, 4, 7)]
    padding = [torch.zeros(1, 7 - p.shape[1], dtype=torch.long) for p in prompts]
    ids = torch.cat([torch.cat([pad, p], 1) for pad, p in zip(padding, prompts, strict=True)])
    mask = torch.cat([torch.cat([pad, torch.ones_like(p)], 1) for pad, p in zip(padding, prompts, strict=True)])
    batch = generate(model, ids, attention_mask=mask, cache_implementation=cache, pad_token_id=0)[:, 7:]
    singles = torch.cat([argmax_loop(model, p)[:, -NEW:] for p in prompts])
    assert torch.equal(batch, singles)


@pytest.mark.parametrize("options", [{}, {"use_cache": False}, {"cache_implementation": "static"}])
def test_beam_search_equals_that_of_the_naive_reference(model, options):
    layout = {f"model.layers.{layer}.self_attn": heads for layer, heads in enumerate(LAYOUT)}
    reference = naive_heads(plain_nanochat(model), layout)
    expected = generate(reference, prompt(2, 5), num_beams=3, use_cache=False)
    assert torch.equal(generate(model, prompt(2, 5), num_beams=3, **options), expected)
    assert not torch.equal(generate(model, prompt(2, 5)), expected)


@pytest.mark.parametrize("assistant", ["another model", "the model itself", "prompt lookup"])
def test_assisted_decoding_equals_the_argmax_loop(model, assistant):
    ids = prompt(1, 5).repeat(1, 2)
    helper = {
        "another model": {"assistant_model": tiny_gpt(laplacian_heads=1, num_hidden_layers=1)},
        "the model itself": {"assistant_model": copy.deepcopy(model)},
        "prompt lookup": {"prompt_lookup_num_tokens": 2},
    }[assistant]
    expected = argmax_loop(model, ids)
    lengths = record_lengths(model)
    assert torch.equal(generate(model, ids, **helper), expected)
    assert lengths[0] > ids.shape[1]  # the prompt and the tokens proposed for it
    if assistant == "the model itself":
        assert len(lengths) < NEW


def test_sampling_draws_the_same_with_and_without_a_cache(model):
    draws = []
    for use_cache in (True, False):
        torch.manual_seed(0)
        draws.append(generate(model, prompt(2, 5), do_sample=True, top_k=20, use_cache=use_cache))
    assert torch.equal(*draws)
    assert not torch.equal(draws[0], generate(model, prompt(2, 5)))


def test_generation_from_embeddings_equals_generation_from_ids(model):
    embeds = model.get_input_embeddings()(prompt(2, 5))
    new = generate(model, None, inputs_embeds=embeds)
    assert torch.equal(new, argmax_loop(model, prompt(2, 5))[:, 5:])


def test_generation_stops_at_the_end_of_text_token():
    """Rows that have ended are filled with the padding token."""
    expected = argmax_loop(tiny_gpt(laplacian_heads=LAYOUT), prompt(2, 5))
    end = expected[0, 7].item()
    model = tiny_gpt(laplacian_heads=LAYOUT, eos_token_id=end, pad_token_id=0)
    row = generate(model, prompt(2, 5))[0, 5:]
    stop = expected[0, 5:].tolist().index(end) + 1
    assert torch.equal(row[:stop], expected[0, 5 : 5 + stop])
    assert not row[stop:].any()


@pytest.mark.parametrize("attn", ["sdpa", "eager", "paged|sdpa", "paged|eager"])
def test_continuous_batching_equals_the_argmax_loop(attn):
    """Prompts of different lengths in one ragged batch over a paged cache."""
    model = tiny_gpt(laplacian_heads=LAYOUT, num_key_value_heads=2)
    prompts = [prompt(1, length, seed=length) for length in (1, 3, 7)]
    expected = [argmax_loop(model, ids)[0, -NEW:].tolist() for ids in prompts]
    model.set_attn_implementation(attn)
    small = ContinuousBatchingConfig(page_size=16, num_blocks=32, max_batch_tokens=32)
    greedy = GenerationConfig(max_new_tokens=NEW, do_sample=False, eos_token_id=-1, pad_token_id=0)
    outputs = model.generate_batch(
        [ids[0].tolist() for ids in prompts], generation_config=greedy, continuous_batching_config=small
    )
    assert [output.generated_tokens for output in outputs.values()] == expected
