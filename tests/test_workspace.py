"""Memory that is used again within a call: the same results, and nothing left behind."""

import os
import sys
import threading
import warnings
from pathlib import Path

import pytest
import torch
from models import tiny

from captum_ssm import MambaLRP, MambaRollout, _workspace
from captum_ssm._workspace import workspace
from captum_ssm.kernels import extension_loaded

if sys.platform != "linux" or not extension_loaded():
    pytest.skip("the allocator is not built here", allow_module_level=True)
allocator = _workspace._allocator()

MIB = 1 << 20
WORST = 1.05  # what is used and kept, of the most that was used


@pytest.fixture(autouse=True)
def nothing_is_left():
    yield
    assert allocator is not None
    assert not allocator.in_use()
    assert allocator.kept() == 0


def block(mib: float) -> torch.Tensor:
    return torch.empty(round(mib * MIB), dtype=torch.uint8)


def resident() -> int:
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def test_freed_memory_is_handed_out_again() -> None:
    with workspace():
        first = block(8)
        address = first.data_ptr()
        del first
        assert allocator.kept() == 8 * MIB
        second = block(7.5)  # fits
        assert second.data_ptr() == address
        assert allocator.kept() == 0
        small = block(0.5)
        del small
        assert allocator.kept() == 0


@pytest.mark.parametrize("method", [MambaRollout, MambaLRP])
def test_results_are_the_same_bit_for_bit(method: type, monkeypatch: pytest.MonkeyPatch) -> None:
    model, ids = tiny().eval(), torch.randint(1, 30, (8, 256))
    with workspace():
        with torch.no_grad():
            model(ids)
        assert allocator.kept() > MIB  # large enough to be of use
        # What is handed out again holds no zeros.
        held = [torch.full((size * MIB // 4,), torch.nan) for size in (1, 2, 4, 8)]
        del held
        found = method(model).attribute(ids, target=3)
    monkeypatch.setattr(_workspace, "_allocator", lambda: None)
    assert torch.equal(found, method(model).attribute(ids, target=3))


def test_the_allocator_is_put_back_after_an_exception() -> None:
    @workspace()
    def fails() -> None:
        with workspace():
            assert allocator.in_use()
            block(4)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fails()
    assert not allocator.in_use()


def test_a_workspace_within_another_keeps_until_the_outer_one_ends() -> None:
    @workspace()
    def call() -> None:
        block(4)

    with workspace():
        call()
        assert allocator.in_use()
        assert allocator.kept() == 4 * MIB
    call()


def test_tensors_outlive_it() -> None:
    with workspace():
        block(8).fill_(1)
        kept = block(8).fill_(7)
        shared = kept[MIB:].view(-1)
    block(8).fill_(2)
    assert bool((kept == 7).all())
    with workspace():
        del kept, shared
        assert allocator.kept() == 8 * MIB  # of use in the next call


def test_tensors_that_outlive_it_grow_and_shrink() -> None:
    with workspace():
        found = block(8).fill_(7)
    found.resize_(16 * MIB)[8 * MIB :] = 7
    assert bool((found == 7).all())
    with workspace():
        found.resize_(32 * MIB)
        assert bool((found[: 16 * MIB] == 7).all())


def test_memory_is_given_back_at_the_end() -> None:
    with workspace():
        block(256).fill_(1)
        held = resident()
        assert allocator.kept() == 256 * MIB
    assert resident() < held - 200 * MIB


def test_the_peak_grows_by_a_twentieth_at_most() -> None:
    generator = torch.Generator().manual_seed(0)
    with workspace():
        alive, used, most = [], 0, 0
        for size, index in torch.randint(1, 40, (500, 2), generator=generator).tolist():
            alive.append(block(size))  # never written: no pages
            used += size * MIB
            most = max(most, used)
            if len(alive) > 20:
                used -= alive.pop(index % len(alive)).numel()
            # A block serves tensors that leave up to an eighth of a tensor's size unused.
            assert used + allocator.kept() <= WORST * most * 9 / 8
        alive.clear()


def test_two_threads() -> None:
    failed = []

    def work(value: int) -> None:
        generator = torch.Generator().manual_seed(value)
        for size in torch.randint(1, 5, (40,), generator=generator).tolist():
            with workspace():
                first = block(size).fill_(value)
                block(size).fill_(value + 10)
                second = first + 1
                x = torch.ones(MIB // 2, requires_grad=True)
                (x * value).exp().sum().backward()
                if not (bool((first == value).all()) and bool((second == value + 1).all())):
                    failed.append(value)

    threads = [threading.Thread(target=work, args=(value,)) for value in (1, 2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failed


def test_a_child_process_has_none() -> None:
    with workspace():
        block(4)
        alive = block(4).fill_(3)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # of forks with threads
            child = os.fork()
        if child == 0:
            sound = not allocator.in_use() and allocator.kept() == 0 and bool((alive == 3).all())
            with workspace():
                block(4)
                sound = sound and allocator.kept() == 4 * MIB
            allocator.leave()  # of the workspace that the parent has opened
            os._exit(0 if sound else 1)
        assert os.waitpid(child, 0)[1] == 0
        assert allocator.in_use()
        assert allocator.kept() == 0


def test_another_release_of_torch_goes_without(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "__version__", "2.99.0+cpu")
    assert _workspace._allocator.__wrapped__() is None
