"""Memory that is used again within a call: the same results, and nothing left behind."""

import os
import sys
import warnings
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from models import tiny

from captum_ssm import MambaLRP, MambaRollout
from captum_ssm.interventions import knockout
from captum_ssm.kernels import extension_loaded
from captum_ssm.utils import allocator as _workspace
from captum_ssm.utils.allocator import workspace

if sys.platform != "linux" or not extension_loaded():
    pytest.skip("the allocator is not built here", allow_module_level=True)
allocator = _workspace._allocator()

MIB = 1 << 20


@pytest.fixture(autouse=True)
def nothing_is_left():
    yield
    assert allocator is not None
    assert not allocator.in_use()
    assert allocator.kept() == 0


def block(mib: float) -> torch.Tensor:
    return torch.empty(round(mib * MIB), dtype=torch.uint8)


def holds(x: torch.Tensor, value: int) -> bool:
    """Whether all entries are so; pytest would print those of a tensor."""
    return bool((x == value).all())


def resident() -> int:
    """Memory in use, without files: a kernel's first run also reads its code."""
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    sizes = {name: value for name, _, value in (line.partition(":") for line in lines)}
    return sum(int(sizes[name].split()[0]) for name in ("RssAnon", "RssShmem")) << 10


def test_freed_memory_is_handed_out_again() -> None:
    with workspace():
        first = block(32).fill_(1)
        address = first.data_ptr()
        del first
        assert allocator.kept() == 32 * MIB
        second = block(15.5)  # in chunks of 2 MiB
        assert second.data_ptr() == address
        assert allocator.kept() == 16 * MIB
        small = block(4)  # malloc's
        del small
        assert allocator.kept() == 16 * MIB


def test_smaller_tensors_are_left_to_malloc() -> None:
    with workspace(32 * MIB):
        block(31)
        assert allocator.kept() == 0
        with workspace():
            block(31)
            assert allocator.kept() == 32 * MIB
        block(8)
        assert allocator.kept() == 32 * MIB
    with workspace(32 * MIB):
        block(31)
        assert allocator.kept() == 0
        block(32)
        assert allocator.kept() == 32 * MIB


def test_a_large_tensor_is_gathered_from_smaller_ones() -> None:
    with workspace():
        parts = [block(size).fill_(size) for size in (8, 12, 10, 9)]
        held = resident()
        while parts:
            parts.pop(0)
        assert allocator.kept() == 40 * MIB
        whole = block(38).add_(1)
        assert resident() < held + 2 * MIB
        assert allocator.kept() == 2 * MIB
        # The pages of the parts, the oldest first, with what these held.
        assert holds(whole[: 8 * MIB], 9)
        assert holds(whole[8 * MIB : 20 * MIB], 13)
        del whole
        again = block(80)  # some of them new
        assert allocator.kept() == 0
        assert holds(again.fill_(5), 5)


@pytest.mark.parametrize("method", [MambaRollout, MambaLRP])
def test_results_are_the_same_bit_for_bit(method: type, monkeypatch: pytest.MonkeyPatch) -> None:
    model, ids = tiny().eval(), torch.randint(1, 30, (64, 256))
    with workspace():
        with torch.no_grad():
            model(ids)
        assert allocator.kept() > 0  # large enough to be of use
        # What is handed out again holds no zeros.
        held = [torch.full((size * MIB // 4,), torch.nan) for size in (8, 16, 32)]
        del held
        found = method(model).attribute(ids, target=3)
    monkeypatch.setattr(_workspace, "_allocator", lambda: None)
    assert torch.equal(found, method(model).attribute(ids, target=3))


def test_the_allocator_is_put_back_after_an_exception() -> None:
    @workspace()
    def fails() -> None:
        with workspace():
            assert allocator.in_use()
            block(8)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fails()
    assert not allocator.in_use()


def test_a_workspace_within_another_keeps_until_the_outer_one_ends() -> None:
    @workspace()
    def call() -> None:
        block(8)

    with workspace():
        call()
        assert allocator.in_use()
        assert allocator.kept() == 8 * MIB
    call()


def test_an_intervention_is_a_call() -> None:
    model, ids = tiny().eval(), torch.randint(1, 30, (1, 8))
    with torch.no_grad(), knockout(model, sources=[2]):
        model(ids)
        assert allocator.in_use()


def test_tensors_outlive_it() -> None:
    with workspace():
        block(8).fill_(1)
        kept = block(8).fill_(7)
        shared = kept[MIB:].view(-1)
    block(8).fill_(2)
    assert holds(kept, 7)
    with workspace():
        del kept, shared
        assert allocator.kept() == 8 * MIB  # of use in the next call


def test_tensors_that_outlive_it_grow_and_shrink() -> None:
    with workspace():
        found = block(8).fill_(7)
    found.resize_(16 * MIB)[8 * MIB :] = 7
    assert holds(found, 7)
    with workspace():
        found.resize_(32 * MIB)
        assert holds(found[: 16 * MIB], 7)


def test_memory_is_given_back_at_the_end() -> None:
    with workspace():
        block(256).fill_(1)
        held = resident()
        assert allocator.kept() == 256 * MIB
    assert resident() < held - 200 * MIB


def test_the_peak_does_not_grow() -> None:
    generator = torch.Generator().manual_seed(0)
    with workspace():
        alive, used, most = [], 0, 0
        for size, index in torch.randint(4, 40, (500, 2), generator=generator).tolist():
            alive.append(block(2 * size))  # never written: no pages
            used += alive[-1].numel()
            most = max(most, used)
            if len(alive) > 20:
                used -= alive.pop(index % len(alive)).numel()
            assert used + allocator.kept() == most
        alive.clear()


def test_two_threads() -> None:
    def sound(value: int) -> bool:
        generator = torch.Generator().manual_seed(value)
        found = True
        for size in torch.randint(8, 20, (12,), generator=generator).tolist():
            with workspace():
                first = block(size).fill_(value)
                block(size).fill_(value + 10)
                second = first + 1
                x = torch.ones(2 * MIB, requires_grad=True)
                # Not Tensor.backward, which nnsight replaces by one that parses its caller's file:
                # CPython 3.11 cannot parse in two threads at once (python/cpython#106905).
                torch.autograd.backward((x * value).sum())
                found &= holds(first, value) and holds(second, value + 1) and holds(x.grad, value)
        return found

    with ThreadPoolExecutor(2) as threads:
        assert all(threads.map(sound, (1, 2)))


def test_a_child_process_has_none() -> None:
    with workspace():
        block(8)
        alive = block(8).fill_(3)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # of forks with threads
            child = os.fork()
        if child == 0:
            sound = not allocator.in_use() and allocator.kept() == 0 and holds(alive, 3)
            with workspace():
                block(8)
                sound = sound and allocator.kept() == 8 * MIB
            allocator.leave()  # of the workspace that the parent has opened
            os._exit(0 if sound else 1)
        assert os.waitpid(child, 0)[1] == 0
        assert allocator.in_use()
        assert allocator.kept() == 0


def test_another_release_of_torch_goes_without(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "__version__", "2.99.0+cpu")
    assert _workspace._allocator.__wrapped__() is None
