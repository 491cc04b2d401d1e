"""A warning of MambaLRP is about the call that it is given in."""

import warnings

import pytest
import torch
from families import build
from inputs import Series, noise
from models import ids, made

from captum_ssm import MambaLRP

SAID = {"recurrence": "its coefficients are not held constant", "batch": "others of the batch"}


class Switched(Series):
    """Does something between its mixers while it is asked to."""

    kind = ""

    def forward(self, x):
        first, second = zip(self.body.norms, self.body.mixers, strict=True)
        h = self.inp(x)
        h = h + first[1](first[0](h))
        if self.kind == "recurrence":
            h = h + h * h.cumsum(1)
        if self.kind == "batch":
            h = h - h.mean(0, keepdim=True)
        return self.head(self.norm(h + second[1](second[0](h))).mean(1))


@pytest.mark.parametrize("kind", SAID)
def test_a_warning_comes_and_goes_with_what_it_is_about(kind):
    model = made(Switched)
    for here in (kind, kind, "", "", kind, "", kind):
        model.kind = here
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            MambaLRP(model).attribute(noise(2, 8, 3), target=1)
        said = [str(w.message) for w in caught if SAID[kind] in str(w.message)]
        assert len(said) == (here == kind)


def test_experts_without_a_kernel_of_torch_for_them(monkeypatch):
    """transformers has a function of its own on old GPUs, and with torch before 2.9."""
    moe = pytest.importorskip("transformers.integrations.moe")
    model, tokens, asked = build("jamba"), ids(1, 6), []
    expected = MambaLRP(model).attribute(tokens, target=3)
    monkeypatch.setattr(moe, "_can_use_grouped_mm", lambda *call: asked.append(call))
    torch.testing.assert_close(MambaLRP(model).attribute(tokens, target=3), expected)
    assert asked
