"""Examples of a batch that act on one another."""

import warnings

import torch
from inputs import noise
from models import randomize
from torch import nn

from captum_ssm import MambaLRP, MambaRollout
from captum_ssm.models import BidirectionalMamba

E = 8


class Classifier(nn.Module):
    """A mixer, the mean over tokens, and a head."""

    def __init__(self, compared: bool) -> None:
        super().__init__()
        self.mixer = BidirectionalMamba(E, state=4, bimamba_type="none")
        self.head, self.norm = nn.Linear(E, 3), nn.BatchNorm1d(E)
        self.compared = compared
        randomize(self)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        pooled = self.norm((x + self.mixer(x)).mean(1))
        return self.head(pooled - pooled.mean(0) if self.compared else pooled)


def said(model: nn.Module, method: type, batch: int) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        method(model).attribute(noise(batch, 6, E, seed=1), target=1)
    return [str(one.message) for one in caught if "act on one another" in str(one.message)]


def test_a_head_that_compares_examples_is_said_each_time():
    model = Classifier(compared=True).double().eval()
    for _ in range(2):
        (message,) = said(model, MambaLRP, 3)
        assert "train mode" not in message


def test_statistics_of_a_batch_are_said_in_train_mode_only():
    model = Classifier(compared=False).double()
    for method in (MambaLRP, MambaRollout):
        assert said(model.eval(), method, 3) == []
    (message,) = said(model.train(), MambaLRP, 3)
    assert "call model.eval()" in message


def test_one_example_is_not_compared():
    assert said(Classifier(compared=True).double().eval(), MambaLRP, 1) == []
