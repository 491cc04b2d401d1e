"""Wrappers that compute what a known mixer computes, on its parts: they are the mixers."""

import pytest
import torch
from families import build
from methods import METHODS
from models import ids
from torch import nn
from torch.nn import functional as F
from transformers.models.qwen3_next.modeling_qwen3_next import torch_chunk_gated_delta_rule

from captum_ssm import MambaRollout, UnsupportedModelError
from captum_ssm.mixers.registry import how_known


class OnItsParts(nn.Module):
    """Computes what a gated delta rule computes from its parts, and never calls it as a whole.

    Wrappers with a hook at each step do so, such as TransformerLens's.
    """

    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, hidden_states, **_):
        inner, (B, L, _) = self.inner, hidden_states.shape
        q, k, v, z, b, a = inner.fix_query_key_value_ordering(
            inner.in_proj_qkvz(hidden_states), inner.in_proj_ba(hidden_states)
        )
        sizes = [inner.key_dim, inner.key_dim, inner.value_dim]
        joined = torch.cat([x.reshape(B, L, -1) for x in (q, k, v)], -1).transpose(1, 2)
        joined = F.silu(inner.conv1d(joined)[..., :L]).transpose(1, 2)
        q, k, v = joined.split(sizes, -1)
        q, k = (x.reshape(B, L, -1, inner.head_k_dim) for x in (q, k))
        v = v.reshape(B, L, -1, inner.head_v_dim)
        repeat = inner.num_v_heads // inner.num_k_heads
        mixed, _ = torch_chunk_gated_delta_rule(
            q.repeat_interleave(repeat, 2),
            k.repeat_interleave(repeat, 2),
            v,
            g=-inner.A_log.exp() * F.softplus(a + inner.dt_bias),
            beta=b.sigmoid(),
            use_qk_l2norm_in_kernel=True,
        )
        normed = inner.norm(mixed.flatten(0, 2), z.flatten(0, 2))
        return inner.out_proj(normed.view(B, L, -1))


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("attention", [True, False])
def test_a_wrapper_that_computes_on_a_mixers_parts_is_the_mixer(attention, method):
    kinds = ["linear_attention", "full_attention" if attention else "linear_attention"]
    model = build("qwen3_next", num_hidden_layers=2, layer_types=kinds)
    tokens = ids(2, 9)
    truth = method(model).attribute(tokens, target=4)
    wrapped = [layer for layer in model.model.layers if hasattr(layer, "linear_attn")]
    assert len(wrapped) == 2 - attention
    for layer in wrapped:
        layer.linear_attn = OnItsParts(layer.linear_attn)
    found = method(model).attribute(tokens, target=4)
    torch.testing.assert_close(found, truth, atol=1e-5, rtol=1e-4)
    assert {how_known(layer.linear_attn) for layer in wrapped} == {"measured"}
    # The mixer inside is one again when it is called.
    for layer in wrapped:
        layer.linear_attn = layer.linear_attn.inner
    again = method(model).attribute(tokens, target=4)
    torch.testing.assert_close(again, truth, atol=1e-5, rtol=1e-4)


RUNS = []


class Bent(nn.Module):
    """A recurrence that is linear, and a scan, where it is told."""

    def __init__(self):
        super().__init__()
        self.write, self.keep, self.is_linear = nn.Linear(4, 4), nn.Linear(4, 4), False

    def forward(self, x):
        RUNS.append(len(x))
        h, out = torch.zeros_like(x[:, 0]), []
        for u, kept in zip(self.write(x).unbind(1), self.keep(x).sigmoid().unbind(1), strict=True):
            h = kept * h + u if self.is_linear else torch.tanh(kept * h + u)
            out.append(h)
        return torch.stack(out, 1)


def test_what_was_searched_in_vain_is_searched_again_only_if_it_changed():
    model, x = nn.Sequential(nn.Linear(4, 4), Bent(), nn.Linear(4, 5)).eval(), torch.randn(1, 6, 4)
    counts, words = [], []
    for _ in range(2):
        RUNS.clear()
        with pytest.raises(UnsupportedModelError) as refused:
            MambaRollout(model).attribute(x.clone())
        counts.append(len(RUNS))
        words.append(str(refused.value))
    assert counts[1] <= 1 < counts[0]
    assert words[0] == words[1]
    model[1].is_linear = True
    assert MambaRollout(model).attribute(x).shape == x.shape
