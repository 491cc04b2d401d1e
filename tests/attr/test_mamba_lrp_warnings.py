"""A warning of MambaLRP is about the call that it is given in."""

import warnings

import pytest
from inputs import E, Series, noise
from models import made
from torch import nn

from captum_ssm import MambaLRP

SAID = {"recurrence": "its coefficients are not held constant", "batch": "others of the batch"}


class Switched(Series):
    """Does something between its mixers while it is asked to."""

    kind = ""

    def __init__(self) -> None:
        super().__init__()
        self.rnn = nn.GRU(E, E, batch_first=True)

    def forward(self, x):
        first, second = zip(self.body.norms, self.body.mixers, strict=True)
        h = self.inp(x)
        h = h + first[1](first[0](h))
        if self.kind == "recurrence":
            h = h + self.rnn(h)[0]
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
