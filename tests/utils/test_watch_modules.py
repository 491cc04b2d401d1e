"""Functions that are called before and after calls of some modules."""

import threading

import pytest
import torch
from torch import nn

from captum_ssm.utils.watch_modules import watch_modules


def test_calls_of_this_thread_are_seen_and_changed():
    layer, x, seen = nn.Linear(2, 2), torch.randn(1, 2), []

    def before(module, args, kwargs):
        seen.append(threading.get_ident())
        return (2 * args[0],), kwargs

    expected = layer(2 * x) + 1
    with watch_modules([layer], before=before, after=lambda m, args, kwargs, y: y + 1):
        torch.testing.assert_close(layer(x), expected)
        other = threading.Thread(target=layer, args=(x,))
        other.start()
        other.join()
    assert seen == [threading.get_ident()]


def test_hooks_are_removed_after_an_error():
    layer = nn.Linear(2, 2)
    with pytest.raises(KeyError), watch_modules([layer], before=lambda *call: None):
        raise KeyError
    assert not layer._forward_pre_hooks
    assert not layer._forward_hooks
