"""Series: from tables and tensors to an explanation, for forecasters and classifiers."""

import numpy as np
import pandas
import pytest
import torch
from torch import nn
from transformers import MambaConfig, MambaModel

from captum_ssm import Explanation, MambaLRP, examples, explain
from captum_ssm.errors import TargetError

METHODS = ("mamba-lrp", "latim", "saliency")
NAMES = ("wind", "load", "price")


class Reader(nn.Module):
    """A Mamba over a series ``(B, T, 3)``: a forecast ``(B, 2, 3)``, or scores ``(B, 4)``."""

    def __init__(self, shape: tuple[int, ...]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.shape = shape
        self.embed = nn.Linear(3, 16)
        self.body = MambaModel(
            MambaConfig(vocab_size=4, hidden_size=16, state_size=4, num_hidden_layers=1)
        )
        self.head = nn.Linear(16, int(np.prod(shape)))

    def forward(self, series: torch.Tensor) -> torch.Tensor:
        if series.dim() != 3:
            raise ValueError("expected (B, T, F)")
        states = self.body(inputs_embeds=self.embed(series)).last_hidden_state
        return self.head(states[:, -1]).unflatten(1, self.shape)


@pytest.fixture(scope="module")
def forecaster() -> Reader:
    return Reader((2, 3)).eval()


@pytest.fixture(scope="module")
def series() -> torch.Tensor:
    return torch.randn(12, 3, generator=torch.Generator().manual_seed(1))


def test_a_forecast_of_a_table_is_that_of_the_method(forecaster, series, tmp_path):
    table = pandas.DataFrame(series.numpy(), columns=list(NAMES))
    found = explain(forecaster, table, target="load, 2 ahead", alternatives=0, methods=METHODS)
    (example,) = found.examples
    answer = example.outputs[0].answers[example.outputs[0].chosen]
    with torch.no_grad():
        assert answer.logit == pytest.approx(float(forecaster(series[None])[0, 1, 1]))
    assert answer.probability is None
    assert example.features == NAMES
    np.testing.assert_array_equal(example.series, series.numpy())
    expected, delta = MambaLRP(forecaster).attribute(
        series[None], target=(1, 1), return_convergence_delta=True
    )
    np.testing.assert_array_equal(found.relevance(), expected[0].detach().numpy())
    np.testing.assert_array_equal(example.deltas["mamba-lrp"], delta.detach().numpy())

    found.save(tmp_path / "why.json")
    again = Explanation.load(tmp_path / "why.json")
    np.testing.assert_array_equal(again.relevance("latim"), found.relevance("latim"))
    np.testing.assert_array_equal(again.examples[0].series, example.series)
    assert again.to_html() == found.to_html()
    assert abs(found.difference(again).relevance()).max() == 0
    assert "a series of 12 x 3" in repr(found)


def test_a_trained_forecaster_shows_the_step_that_its_forecast_copies():
    model, _ = examples.load("series-forecaster")
    series = examples.sample("series-forecaster")
    methods = ["mamba-lrp", "latim", "integrated-gradients"]
    # The pulse of a mark says which step is copied, of the first to the next six steps.
    for step, mark in ((0, 3), (2, 3), (7, 4), (11, 4)):
        pulse = int(series[0, :, mark].argmax())
        found = explain(model, series, target=(step, 1), methods=methods)
        for name in methods:
            by_step = np.abs(found.relevance(name)).sum(1)
            assert pulse <= by_step.argmax() <= pulse + 3, (step, name)


def test_a_trained_classifier_shows_the_burst_that_is_a_pattern():
    model, _ = examples.load("series-classifier")
    series = examples.sample("series-classifier")
    found = explain(model, series, labels=["rise", "fall", "hill", "valley"])
    by_feature = np.abs(found.relevance()).sum(0)
    # The other bursts change sign at every step; the pattern does not.
    changes = (series[0].diff(dim=1).sign().diff(dim=1) != 0).float() * series[0, :, 1:-1].abs()
    sizes, wiggles = series[0].abs().amax(1), changes.sum(1)
    smooth = int((wiggles / sizes).argmin())
    assert by_feature.argmax() == smooth


def test_tensors_and_arrays_are_one_series_or_several(forecaster, series):
    one = explain(forecaster, series, target=(1, 1)).relevance()
    for same in (series.numpy(), series[None]):
        np.testing.assert_array_equal(explain(forecaster, same, target=(1, 1)).relevance(), one)
    several = explain(forecaster, torch.stack([series, series.flip(0)]), target=(0, 2))
    assert [example.name for example in several.examples] == ["series 1", "series 2"]
    assert several.examples[0].outputs[0].answers[2].text == "feature 2, 1 ahead"


def test_classes_have_names_probabilities_and_contrasts(series):
    classifier = Reader((4,)).eval()
    labels = ["calm", "storm", "gust", "lull"]
    found = explain(classifier, series, target="gust", against="calm", labels=labels)
    (output,) = found.examples[0].outputs
    assert output.answers[output.chosen].text == "gust"
    assert output.among == 4
    assert sum(answer.probability for answer in output.answers) == pytest.approx(1)
    assert found.relevance(against="calm").shape == (12, 3)
    with pytest.raises(TargetError, match="calm, storm, gust, lull"):
        explain(classifier, series, target="hail", labels=labels)


def test_a_target_that_is_not_a_number_of_the_forecast_is_refused(forecaster, series):
    with pytest.raises(TargetError, match=r"a number of the forecast \(0, 0\) .. \(1, 2\), or"):
        explain(forecaster, series, target=(2, 0))
    with pytest.raises(ValueError, match="is a series"):
        explain(forecaster, series).mean()
