"""A trained model that no adapter knows: the bidirectional Mamba of the package typeseg."""

import pytest
import torch

from captum_ssm import (
    LaTIM,
    MambaAttribution,
    MambaLRP,
    MambaRollout,
    RawAttention,
    UnifiedImplicitAttention,
    hidden_attention,
)
from captum_ssm.examples import typeseg as typeseg_model

typeseg = pytest.importorskip("typeseg", reason="pip install --no-deps typeseg==0.2.7")

TEXT = "<p>Hi</p>\n<script>alert('x');</script>\n"
METHODS = (
    RawAttention, MambaRollout, MambaAttribution, UnifiedImplicitAttention, LaTIM, MambaLRP,
)  # fmt: skip


@pytest.fixture(scope="module")
def model():
    return typeseg_model.TypeSeg().eval()


def test_the_model_is_that_of_the_package(model):
    with torch.no_grad():
        ours = model(typeseg_model.ids_of(TEXT))[0].softmax(-1)
    theirs = torch.from_numpy(typeseg.precise(TEXT).char_probs)
    assert ours.shape == (len(TEXT), len(model.labels))
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-5)


@torch.no_grad()
def test_hidden_attention_is_what_impulses_through_both_directions_say(model):
    ids, path = typeseg_model.ids_of(TEXT), "mixers.3"
    mixer, seen = model.get_submodule(path), {}

    def scan(x, *coefficients):
        seen.setdefault("calls", []).append((x, coefficients))
        return typeseg_model.selective_scan(x, *coefficients)

    found = hidden_attention(model, ids)[path][0]  # (D, L, L)
    mixer.scan = scan
    model(ids)
    mixer.scan = typeseg_model.selective_scan
    L, expected = len(TEXT), 0
    for flipped, (x, (dt, A, B, C, D)) in enumerate(seen["calls"]):
        impulses = torch.eye(L)[:, :, None].expand(L, L, x.shape[-1])
        dt, B, C = (t.expand(L, -1, -1) for t in (dt, B, C))
        out = typeseg_model.selective_scan(impulses, dt, A, B, C, 0 * D)  # (L of j, L of i, D)
        expected = expected + (out.flip(0, 1) if flipped else out).permute(2, 1, 0)
    assert len(seen["calls"]) == 2
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5 * float(expected.abs().max()))


@pytest.mark.parametrize("method", METHODS, ids=lambda method: method.name)
def test_every_method_explains_it(model, method):
    ids, position = typeseg_model.ids_of(TEXT), TEXT.index("alert")
    row = method(model).attribute(ids, target=(position, 2))[0]
    assert row.shape == (len(TEXT),)
    assert bool(torch.isfinite(row).all())
    # Both directions are read.
    assert float(row[:position].abs().max()) > 0
    assert float(row[position + 1 :].abs().max()) > 0
