"""Maps in TransformerLens's cache, against the recurrence that its own hooks recorded."""

import pytest
import torch
import transformers

import captum_ssm
from captum_ssm import hidden_attention

pytest.importorskip("transformer_lens")
bridges = pytest.importorskip("transformer_lens.model_bridge")
lens = pytest.importorskip("captum_ssm.integrations.transformer_lens")

TEXT = "The bird near the dogs sings . The dogs near the bird bark"


def wrapped(name="stories-qwen3next", model=None):
    own, tokenizer = captum_ssm.examples.load(name)
    bridge = bridges.TransformerBridge.boot_transformers(
        "local", hf_model=model or own, tokenizer=tokenizer
    )
    return bridge, tokenizer(TEXT, return_tensors="pt").input_ids


def recorded(bridge, ids):
    with torch.no_grad():
        return bridge.run_with_cache(ids, use_cache=False)


def test_maps_times_values_are_what_the_recurrence_returned():
    """The oracle is TransformerLens's run alone. Its own map fails it."""
    bridge, ids = wrapped()
    logits, cache = recorded(bridge, ids)
    heuristic = cache.compute_ssm_effective_attention()
    assert lens.exact_maps(bridge) is bridge
    same, cache = recorded(bridge, ids)
    torch.testing.assert_close(same, logits, rtol=0, atol=0)
    maps = cache.compute_ssm_effective_attention()
    assert list(maps) == [0, 1]
    for layer, one in maps.items():
        value, output = (
            cache[f"blocks.{layer}.linear_attn.hook_{name}"].float()
            for name in ("v", "recurrence_out")
        )
        error = lambda m: (torch.einsum("bhij,bjhd->bihd", m, value) - output).norm()  # noqa: B023, E731
        assert error(one) < 1e-5 * output.norm()
        assert error(heuristic[layer]) > 0.1 * output.norm()


def test_maps_are_those_of_the_model_without_the_bridge():
    bridge, ids = wrapped()
    _, cache = recorded(lens.exact_maps(bridge), ids)
    model, _ = captum_ssm.examples.load("stories-qwen3next")
    truth = [m for path, m in hidden_attention(model, ids).items() if "linear_attn" in path]
    for one, expected in zip(cache.compute_ssm_effective_attention().values(), truth, strict=True):
        torch.testing.assert_close(one, expected, rtol=1e-4, atol=1e-6)


def test_value_heads_share_the_keys_of_their_group():
    torch.manual_seed(0)
    config = transformers.Qwen3_5TextConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        layer_types=["linear_attention", "full_attention"],
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=16,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_key_head_dim=8,
        linear_value_head_dim=16,
    )
    model = transformers.Qwen3_5ForCausalLM(config).eval()
    bridge, ids = wrapped(model=model)
    _, cache = recorded(lens.exact_maps(bridge), ids % 64)
    one = cache.compute_ssm_effective_attention(layer=0)
    value, output = (
        cache[f"blocks.0.linear_attn.hook_{name}"].float() for name in ("v", "recurrence_out")
    )
    assert one.shape[1] == 4
    torch.testing.assert_close(
        torch.einsum("bhij,bjhd->bihd", one, value), output, rtol=1e-4, atol=1e-6
    )


def test_a_cache_without_the_hooks_is_refused():
    bridge, ids = wrapped()
    with torch.no_grad():
        _, cache = lens.exact_maps(bridge).run_with_cache(ids, names_filter="blocks.0.hook_in")
    with pytest.raises(RuntimeError, match=r"no blocks\.0\.linear_attn\.hook_q; expected"):
        cache.compute_ssm_effective_attention(layer=0)
