"""Long texts in segments: the same relevance as that of the whole."""

from __future__ import annotations

import pytest
import torch
from families import TRANSFORMERS_4, build
from models import ids, tiny
from torch import Tensor

from captum_ssm import MemoryLimitError, ReconstructionError, UnsupportedModelError
from captum_ssm.attr import MambaLRP, SpanTarget
from captum_ssm.attr.segments import SegmentedRun
from captum_ssm.capture.target import Against
from captum_ssm.errors import InputError

RECURRENT = ["mamba", "falcon_mamba", "mamba2"]
if not TRANSFORMERS_4:
    RECURRENT += ["xlstm"]


def close(found: Tensor, expected: Tensor) -> None:
    assert (found - expected).norm() <= 1e-5 * expected.norm()


@pytest.mark.parametrize("family", RECURRENT)
@pytest.mark.parametrize("segment", [5, 12])
def test_segments_equal_the_whole(family, segment):
    method, text = MambaLRP(build(family)), ids(2, 29)
    whole, left = method.attribute(text, target=[3, 5], return_convergence_delta=True)
    parts, delta = method.attribute(
        text, target=[3, 5], segment=segment, return_convergence_delta=True
    )
    close(parts, whole)
    torch.testing.assert_close(delta, left, rtol=0, atol=1e-5)


def test_segments_of_one_token():
    method, text = MambaLRP(build("mamba")), ids(1, 7)
    close(method.attribute(text, target=3, segment=1), method.attribute(text, target=3))


def test_a_segment_longer_than_the_text_is_the_whole():
    method, text = MambaLRP(build("mamba")), ids(1, 7)
    parts = method.attribute(text, target=3, segment=7)
    assert torch.equal(parts, method.attribute(text, target=3))


def test_embeddings_and_a_tuple():
    model = build("mamba2")
    method, x = MambaLRP(model), model.get_input_embeddings()(ids(2, 11)).detach()
    (parts,) = method.attribute((x,), target=3, segment=4)
    assert parts.shape == x.shape
    close(parts, method.attribute(x, target=3))


@pytest.mark.parametrize(
    ("target", "position"),
    [
        ((9, 4), None),
        (4, 9),
        (4, -2),
        ([(9, 4), (10, 2)], None),
        (SpanTarget([8, -1], [4, 2], [0.5, 2.0], "contrast"), None),
        (Against((9, 4), (10, 2)), None),
    ],
)
def test_positions_count_from_the_beginning(target, position):
    method, text = MambaLRP(build("mamba")), ids(2, 11)
    parts = method.attribute(text, target=target, position=position, segment=4)
    close(parts, method.attribute(text, target=target, position=position))


def test_memory_is_that_of_one_segment():
    model, text = tiny("mamba", hidden_size=64), ids(1, 512)
    method = MambaLRP(model, memory_limit=2 << 20)
    with pytest.raises(MemoryLimitError):
        method.attribute(text, target=3)
    assert method.attribute(text, target=3, segment=64).shape == text.shape


@pytest.mark.parametrize("tokens", [40, 120])
def test_what_is_kept_between_segments_does_not_grow(monkeypatch, tokens):
    kept, handed_on = [], []
    forward, propagated = SegmentedRun.forward, SegmentedRun._propagated

    def watched(run):
        forward(run)
        kept.append([[x for past in bound for x in past.tensors] for bound in run.bounds[1:]])

    def handing_on(run, *arguments):
        found = propagated(run, *arguments)
        handed_on.extend(x for x in found[-1] if x is not None)
        return found

    monkeypatch.setattr(SegmentedRun, "forward", watched)
    monkeypatch.setattr(SegmentedRun, "_propagated", handing_on)
    MambaLRP(build("mamba")).attribute(ids(1, tokens), target=3, segment=8)
    tensors = [x for one in kept[-1] for x in one]
    storages = {x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in tensors}
    # Nothing but the numbers of states and tails is held, at each boundary as many.
    assert sum(storages.values()) == sum(x.nbytes for x in tensors)
    assert {sum(x.nbytes for x in one) for one in kept[-1]} == {
        sum(storages.values()) * 8 // (tokens - 8)
    }
    # One block per state or tail, whatever the number of boundaries.
    assert len(storages) == len(kept[-1][0])
    assert handed_on
    assert all(x.untyped_storage().nbytes() == x.nbytes for x in handed_on)


def test_hybrids_are_refused():
    method = MambaLRP(build("jamba"))
    with pytest.raises(UnsupportedModelError, match=r"self_attn .*cannot go on from a state"):
        method.attribute(ids(1, 20), target=3, segment=8)


def test_what_segments_would_change_is_refused():
    model = build("mamba")
    method = MambaLRP(lambda x: model(x).logits.mean(1), model=model)
    with pytest.raises(ReconstructionError, match="two segments"):
        method.attribute(ids(1, 20), target=3, segment=8)


def test_errors():
    method, text = MambaLRP(build("mamba")), ids(2, 12)
    with pytest.raises(InputError, match="positive number of tokens"):
        method.attribute(text, target=3, segment=0)
    with pytest.raises(InputError, match="not in the last segment"):
        method.attribute(text, target=3, position=2, segment=4)
    mask = torch.ones_like(text)
    mask[0, :3] = 0
    with pytest.raises(InputError, match="marks padding"):
        method.attribute(text, 3, {"attention_mask": mask}, segment=4)
