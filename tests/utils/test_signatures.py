"""Signatures that are worked out once."""

import functools
import gc
import inspect
import weakref

from captum_ssm.utils.signatures import signature


def test_a_signature_is_worked_out_once_and_keeps_no_function(monkeypatch):
    def wrapped(a, *, b=1): ...

    @functools.wraps(wrapped)
    def function(*args, **kwargs): ...

    assert signature(function) == inspect.signature(function) == inspect.signature(wrapped)
    partial = functools.partial(function, 1)
    assert signature(partial) == inspect.signature(partial)
    monkeypatch.setattr(inspect, "signature", None)
    assert list(signature(function).parameters) == ["a", "b"]

    gone = weakref.ref(function)
    del function, partial
    gc.collect()
    assert gone() is None
