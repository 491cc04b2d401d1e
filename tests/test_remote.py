"""Models that run on an nnsight server: only a recording comes back."""

import inspect
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from methods import MAPS, assert_close, each
from models import ids, tiny
from nnsight_server import receive, send

from captum_ssm import (
    LaTIM,
    MambaAttribution,
    MambaLRP,
    MambaRollout,
    RawAttention,
    ReconstructionError,
    SSMLLMAttribution,
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
    command = [sys.executable, Path(__file__).with_name("nnsight_server.py")]
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
    named = {"attention_mask": mask}
    elsewhere = wrapped(folder)

    found = MambaRollout(elsewhere, remote=True).attribute(tokens, additional_forward_args=named)
    assert len(server) == 1
    truth = MambaRollout(model).attribute(tokens, additional_forward_args=named)
    assert_close(found, truth)

    found = MambaAttribution(elsewhere, remote=True).attribute(tokens, target=[4, 9])
    assert len(server) == 3  # a recording, and the gradients
    assert_close(found, MambaAttribution(model).attribute(tokens, target=[4, 9]))

    assert not elsewhere.dispatched  # nothing was loaded here
    assert all(p.is_meta for p in elsewhere._module.parameters())


@each([*MAPS, LaTIM])
@pytest.mark.parametrize("dispatch", [False, True], ids=["absent", "loaded"])
def test_every_method(method, dispatch, checkpoint, server):
    family, folder = checkpoint
    tokens, elsewhere = ids(2, 7), wrapped(folder, dispatch=dispatch)
    found = method(elsewhere, remote=True).attribute(tokens, target=4)
    assert_close(found, method(tiny(family)).attribute(tokens, target=4))


def test_forms_of_arguments_and_results(checkpoint, server):
    family, folder = checkpoint
    tokens, mask = ids(2, 7), torch.tensor([[0, 0, 1, 1, 1, 1, 1], [1] * 7])
    elsewhere, here = wrapped(folder), tiny(family)
    names = list(inspect.signature(type(here).forward).parameters)[1:]
    extra = (*[None] * (names.index("attention_mask") - 1), mask)
    for arguments in (extra, {"return_dict": False, "attention_mask": mask}):
        found, truth = (
            MambaAttribution(model, **where).attribute(
                tokens, target=4, additional_forward_args=arguments
            )
            for model, where in ((elsewhere, {"remote": True}), (here, {}))
        )
        assert_close(found, truth)


def test_weights_travel_only_where_they_are_wanted(checkpoint, server):
    _, folder = checkpoint
    for dispatch in (False, True):
        RawAttention(wrapped(folder, dispatch=dispatch), remote=True).attribute(ids(1, 3))
    (_, with_weights), (_, without) = server
    mixers = [mixer for _, mixer in find_mixers(tiny(checkpoint[0]))]
    size = sum(p.numel() * p.element_size() for mixer in mixers for p in mixer.parameters())
    assert 0.8 * size < with_weights - without < 3 * size  # names and headers travel too


def test_matrices_and_embeddings(checkpoint, server):
    family, folder = checkpoint
    tokens, elsewhere = ids(1, 6), wrapped(folder)
    maps = hidden_attention(elsewhere, tokens, reduction="mean", remote=True)
    for path, matrix in hidden_attention(tiny(family), tokens, reduction="mean").items():
        assert_close(maps.pop(path), matrix)
    assert not maps
    embeddings = tiny(family).get_input_embeddings()(tokens).detach()
    found = MambaAttribution(elsewhere, remote=True).attribute(embeddings, target=4)
    assert_close(found, MambaAttribution(tiny(family)).attribute(embeddings, target=4))


def test_it_is_checked(checkpoint, server):
    _, folder = checkpoint
    here = wrapped(folder, dispatch=True)
    path, mixer = next(find_mixers(here._module))
    with torch.no_grad():
        next(mixer.parameters()).mul_(1.5)  # other weights than the server's
    with pytest.raises(ReconstructionError, match=path.replace(".", r"\.")):
        MambaRollout(here, remote=True).attribute(ids(1, 7))


def test_a_row_of_one_run(checkpoint, server):
    family, folder = checkpoint
    tokens = ids(1, 7)
    frozen = MambaRollout(wrapped(folder), remote=True).freeze_once(tokens)
    here = MambaRollout(tiny(family))
    for position in (3, 6):
        assert_close(
            frozen.attribute(tokens, position=position), here.attribute(tokens, position=position)
        )
    assert len(server) == 1


def test_refusals(checkpoint):
    _, folder = checkpoint
    model, elsewhere, tokens = tiny(), wrapped(folder), ids(1, 5)
    there = MambaRollout(elsewhere, remote=True)
    for error, says, call in (
        (TypeError, "LanguageModel", lambda: MambaRollout(model, remote=True)),
        (TypeError, "LanguageModel", lambda: MambaRollout(lambda t: t, elsewhere, remote=True)),
        (TypeError, "LanguageModel", lambda: hidden_attention(model, tokens, remote=True)),
        (TypeError, "remote is 3", lambda: MambaRollout(elsewhere, remote=3)),
        (TypeError, "remote is ''", lambda: MambaRollout(elsewhere, remote="")),
        (TypeError, "by name", lambda: there.attribute(tokens, None, (None,) * 40)),
        (ValueError, "needs a run here", lambda: SSMLLMAttribution(there, elsewhere.tokenizer)),
        (ValueError, "rehearsal", lambda: MambaRollout(elsewhere, remote="local")),
    ):
        with pytest.raises(error, match=says):
            call()
    with pytest.raises(ValueError, match="MambaLRP changes what the model does"):
        MambaLRP(elsewhere, remote=True)
    with pytest.raises(ValueError, match="Choose another aggregation"):
        LaTIM(elsewhere, remote=True).interactions(tokens, aggregation="alti_logit")
    assert not elsewhere.dispatched
