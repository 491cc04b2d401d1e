"""Models that run on an nnsight server: only a recording comes back."""

import inspect
import subprocess
import sys

import pytest
import torch
from folders import TESTS
from methods import assert_close, each_method
from models import ids, tiny
from nnsight_server import receive, send

from captum_ssm import (
    LaTIM,
    MambaRollout,
    ReconstructionError,
    UnsupportedModelError,
    hidden_attention,
)
from captum_ssm.mixers import find_mixers

FAMILIES = ("mamba", "jamba", "zamba")  # one mixer, beside attention, one that layers share


@pytest.fixture(scope="module", params=FAMILIES)
def checkpoint(request, tokenizer, tmp_path_factory):
    """A family and the folder of its checkpoint."""
    folder = tmp_path_factory.mktemp(request.param)
    tiny(request.param).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return request.param, str(folder)


@pytest.fixture(scope="module")
def process():
    """A process that holds the models and lacks this package."""
    command = [sys.executable, TESTS / "capture" / "nnsight_server.py"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as running:
        yield running
        running.stdin.close()


@pytest.fixture
def server(monkeypatch, checkpoint, process):
    """Sends requests to the process instead of the network; a list of what they took, in bytes."""
    from nnsight import TransformersModel
    from nnsight.intervention.backends.remote import RemoteBackend

    sent = []

    def answer(self, request, tracer):
        self.compress = False
        blob = self._serialize(tracer)
        send(process.stdin, checkpoint[1].encode(), blob)
        result = receive(process.stdout)
        assert result, "the server ended"
        sent.append((len(blob), len(result)))
        assert not result.startswith(b"error"), result.decode()
        return self.finalize(result)

    monkeypatch.setattr(RemoteBackend, "request", answer)
    # Its name on a hub, which can't be asked here.
    monkeypatch.setattr(TransformersModel, "to_model_key", lambda self: "the one it holds")
    return sent


def wrapped(folder, *, dispatch=False):
    """A model that nnsight has loaded, or not."""
    from nnsight import TransformersModel
    from transformers import PreTrainedTokenizerFast

    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
    task = "text-generation"
    model = TransformersModel(folder, tokenizer=tokenizer, task=task, dispatch=dispatch)
    assert model.dispatched == dispatch
    return model


def test_on_a_server(checkpoint, server):
    family, folder = checkpoint
    model, tokens = tiny(family), ids(2, 7)
    mask = torch.tensor([[0, 0, 1, 1, 1, 1, 1], [1] * 7])
    elsewhere = wrapped(folder)
    names = list(inspect.signature(type(model).forward).parameters)[1:]
    by_position = (*[None] * (names.index("attention_mask") - 1), mask)
    named = {"return_dict": False, "attention_mask": mask}
    for extra in (None, {"attention_mask": mask}, by_position, named):
        options = {"reduction": "mean", "additional_forward_args": extra}
        maps = hidden_attention(elsewhere, tokens, remote=True, **options)
        for path, matrix in hidden_attention(model, tokens, **options).items():
            assert_close(maps.pop(path), matrix)
        assert not maps
    assert len(server) == 4
    embeddings = tiny(family).get_input_embeddings()(tokens).detach()
    maps = hidden_attention(elsewhere, embeddings, rows=-1, remote=True)
    for path, matrix in hidden_attention(model, embeddings, rows=-1).items():
        assert_close(maps[path], matrix)

    assert not elsewhere.dispatched  # nothing was loaded here
    assert all(p.is_meta for p in elsewhere._module.parameters())


@pytest.mark.parametrize("dispatch", [False, True], ids=["absent", "loaded"])
def test_single_layers_of_latim(dispatch, checkpoint, server):
    family, folder = checkpoint
    tokens, elsewhere = ids(2, 7), wrapped(folder, dispatch=dispatch)
    there, here = LaTIM(elsewhere, remote=True), LaTIM(tiny(family))
    assert_close(there.interactions(tokens, 0), here.interactions(tokens, 0))
    assert_close(there.contributions(tokens, -1, 3), here.contributions(tokens, -1, 3))
    for found, truth in zip(there.layer_errors(tokens), here.layer_errors(tokens), strict=True):
        torch.testing.assert_close(found, truth, rtol=1e-3, atol=1e-6)


def test_weights_travel_only_where_they_are_wanted(checkpoint, server):
    _, folder = checkpoint
    for dispatch in (False, True):
        hidden_attention(wrapped(folder, dispatch=dispatch), ids(1, 3), remote=True)
    (_, with_weights), (_, without) = server
    mixers = [mixer for _, mixer in find_mixers(tiny(checkpoint[0]))]
    size = sum(p.numel() * p.element_size() for mixer in mixers for p in mixer.parameters())
    assert 0.8 * size < with_weights - without < 3 * size  # names and headers travel too


def test_it_is_checked(checkpoint, server):
    _, folder = checkpoint
    here = wrapped(folder, dispatch=True)
    path, mixer = next(find_mixers(here._module))
    with torch.no_grad():
        next(mixer.parameters()).mul_(1.5)  # other weights than the server's
    with pytest.raises(ReconstructionError, match=path.replace(".", r"\.")):
        hidden_attention(here, ids(1, 7), remote=True)


def test_refusals(checkpoint):
    _, folder = checkpoint
    model, elsewhere, tokens = tiny(), wrapped(folder), ids(1, 5)
    for error, says, call in (
        (TypeError, "LanguageModel", lambda: MambaRollout(model, remote=True)),
        (TypeError, "LanguageModel", lambda: MambaRollout(lambda t: t, elsewhere, remote=True)),
        (TypeError, "LanguageModel", lambda: hidden_attention(model, tokens, remote=True)),
        (TypeError, "remote is 3", lambda: MambaRollout(elsewhere, remote=3)),
        (TypeError, "remote is ''", lambda: MambaRollout(elsewhere, remote="")),
        (
            TypeError,
            "by name",
            lambda: LaTIM(elsewhere, remote=True).layer_errors(
                tokens, additional_forward_args=(None,) * 40
            ),
        ),
        (ValueError, "rehearsal", lambda: MambaRollout(elsewhere, remote="local")),
    ):
        with pytest.raises(error, match=says):
            call()
    assert not elsewhere.dispatched


@each_method
def test_what_goes_through_layers_is_refused(method, checkpoint, server):
    _, folder = checkpoint
    there, tokens = method(wrapped(folder), remote=True), ids(1, 5)
    with pytest.raises(UnsupportedModelError, match=r"runs on a server.*leave remote at False"):
        there.attribute(tokens, target=4)
    assert not server  # nothing was sent


def test_products_and_scores_are_refused(checkpoint, server):
    _, folder = checkpoint
    model, tokens = wrapped(folder), ids(1, 5)
    latim = LaTIM(model, remote=True)
    for call in (
        lambda: MambaRollout(model, remote=True).rollout(tokens),
        lambda: latim.interactions(tokens, aggregation="alti_logit"),
    ):
        with pytest.raises(UnsupportedModelError, match="leave remote at False"):
            call()
