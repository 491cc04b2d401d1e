"""The model comes back exactly as it was, after success and after every kind of failure."""

import contextlib
import gc
import os
import resource
import subprocess
import sys
import tempfile
import weakref
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier, Event

import pytest
import torch
from families import HYBRIDS, NO_STREAM, TRANSFORMERS_4, build
from folders import ROOT
from methods import METHODS, each_method
from models import S6_FAMILIES, Classifier, embed, ids, tiny
from torch import nn
from torch.nn import functional as F
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from unchanged import assert_unchanged, fingerprint, tensors_alive

import captum_ssm
from captum_ssm import LaTIM, hidden_attention
from captum_ssm.capture import Request, freeze
from captum_ssm.mixers import registry
from captum_ssm.mixers.families import attention


@pytest.fixture
def only_new_objects() -> None:
    """The garbage collector sees only what the test makes: a test run's own objects are many."""
    gc.freeze()


@each_method
@pytest.mark.parametrize("family", S6_FAMILIES)
@pytest.mark.parametrize("training", [False, True])
def test_after_success(method, family, training):
    model, tokens = tiny(family).train(training), ids(2, 7)
    mask = torch.ones_like(tokens)
    mask[0, :3] = 0
    before = fingerprint(model)
    method(model).attribute(tokens, target=4)
    method(model).attribute(
        embed(model, tokens), target=4, additional_forward_args={"attention_mask": mask}
    )
    method(lambda t: model(t).logits, model).attribute(tokens, target=4, position=3)
    hidden_attention(model, tokens)
    assert_unchanged(model, before)


@each_method
@pytest.mark.usefixtures("only_new_objects")
@pytest.mark.parametrize("family", HYBRIDS)
def test_after_explaining_a_hybrid(method, family):
    model, tokens = build(family), ids(2, 7)

    def run():
        if method is LaTIM and family in NO_STREAM:
            with pytest.raises(ValueError, match="residual stream"):
                method(model).attribute(tokens, target=4)
        else:
            method(model).attribute(tokens, target=4)

    run()  # What is registered or cached once, at the first use.
    before, table, tensors = fingerprint(model), dict(ALL_ATTENTION_FUNCTIONS), tensors_alive()
    run()
    assert_unchanged(model, before)
    assert dict(ALL_ATTENTION_FUNCTIONS) == table
    assert tensors_alive() == tensors


@each_method
@pytest.mark.parametrize("pool", ["mean", "middle"])
def test_after_finding_a_readout(method, pool):
    model, tokens = Classifier(pool), ids(2, 7)
    before = fingerprint(model)
    method(model).attribute(tokens, target=4)
    assert_unchanged(model, before)


@each_method
def test_the_model_still_computes_and_learns(method):
    model, tokens = tiny(), ids(2, 7)
    with torch.no_grad():
        expected = model(tokens).logits
    model(tokens).logits.sum().backward()
    gradients = [p.grad.clone() for p in model.parameters()]
    method(model).attribute(tokens, target=4)
    for p, gradient in zip(model.parameters(), gradients, strict=True):
        assert torch.equal(p.grad, gradient)  # neither cleared nor added to
    model.zero_grad()
    with torch.no_grad():
        assert torch.equal(model(tokens).logits, expected)
    model(tokens).logits.sum().backward()
    for p, gradient in zip(model.parameters(), gradients, strict=True):
        torch.testing.assert_close(p.grad, gradient)


@each_method
def test_a_users_own_hooks_and_forward_stay(method):
    model, tokens = tiny(), ids(2, 7)
    truth = method(model).attribute(tokens, target=4)
    seen = []
    mixer = model.backbone.layers[0].mixer
    mixer.register_forward_hook(lambda m, args, out: seen.append("hook"))
    own = mixer.forward

    def forward(*args, **kwargs):
        seen.append("forward")
        return own(*args, **kwargs)

    mixer.forward = forward
    before = fingerprint(model)
    torch.testing.assert_close(method(model).attribute(tokens, target=4), truth)
    assert_unchanged(model, before)
    assert mixer.__dict__["forward"] is forward
    assert {"forward", "hook"} <= set(seen)
    seen.clear()
    model(tokens)
    assert seen == ["forward", "hook"]


@each_method
def test_a_model_that_nnsight_wrapped_stays_wrapped(method):
    from nnsight import NNsight

    model, tokens = tiny(), ids(2, 7)
    wrapped = NNsight(model)
    before = fingerprint(model)
    for forward_func in (wrapped, model):
        method(forward_func).attribute(tokens, target=4)
        assert_unchanged(model, before)
        with wrapped.trace(tokens):
            inner = wrapped.backbone.layers[1].mixer.output.save()
        assert inner.shape == (2, 7, 16)


def test_two_threads_explain_two_hybrids():
    tokens = ids(2, 7)
    models = [build(family) for family in ("jamba", HYBRIDS[-1])]
    truths = [hidden_attention(model, tokens) for model in models]
    # Without the check, which would hide a wrong map with an error. Runs take turns; what is read
    # off them afterwards does not, and is read anew each time.
    frozen = [freeze(Request.of(model, None, tokens), query=False, check=False) for model in models]
    both = Barrier(2, timeout=60)

    def explain(at):
        both.wait()
        return [{x.name: x.mixer.operator().matrix() for x in frozen[at].layers} for _ in range(20)]

    with ThreadPoolExecutor(2) as pool:
        for found, truth in zip(pool.map(explain, range(2)), truths, strict=True):
            for maps in found:
                assert list(maps) == list(truth)
                for path, expected in truth.items():
                    assert torch.equal(maps[path], expected)


def test_recordings_of_attention_are_each_threads_own():
    # Both are under way at once: one by transformers' interface, one by PyTorch's kernel.
    both = Barrier(2, timeout=60)
    tokens = {name: torch.full((1, 2, 5, 4), float(name)) for name in range(3)}

    def record(name):
        token = attention._RECORDING.set({})
        try:
            with attention._KeepDirect():
                both.wait()
                x = tokens[name]
                if name == 0:
                    out = ALL_ATTENTION_FUNCTIONS[attention._INTERFACE](None, x, x, x, None)[0]
                else:
                    out = F.scaled_dot_product_attention(x, x, x)
                both.wait()
            seen = attention._RECORDING.get()
            return bool((out == 1).all()) and all(seen[n] is x for n in ("query", "key", "value"))
        finally:
            attention._RECORDING.reset(token)

    hidden_attention(build("jamba"), ids(1, 3))  # registers the interface
    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(record, range(2))) == [True, True]

    def attend():
        both.wait()
        out = F.scaled_dot_product_attention(*[tokens[2]] * 3)
        both.wait()
        return out

    with ThreadPoolExecutor(2) as pool:
        recorded, attended = pool.submit(record, 1), pool.submit(attend)
        assert recorded.result()
        assert torch.equal(attended.result(), tokens[2])  # an average of equal values


@pytest.mark.skipif(TRANSFORMERS_4, reason="its Jamba calls no attention interface")
def test_the_recording_interface_is_no_attention_of_its_own():
    model = build("jamba")
    hidden_attention(model, ids(1, 3))
    model.set_attn_implementation(attention._INTERFACE)
    with pytest.raises(RuntimeError, match="computes nothing"):
        model(ids(1, 3))


@each_method
def test_inference_in_another_thread_waits(method):
    model, tokens = tiny(), ids(2, 7)
    truth, expected = method(model).attribute(tokens, target=4), model(tokens).logits
    done = Event()

    def infer():
        found = []
        while not done.is_set() or len(found) < 3:
            with torch.no_grad():
                found.append(model(tokens).logits)
        return found

    with ThreadPoolExecutor(1) as pool:
        other = pool.submit(infer)
        try:
            for _ in range(5):
                assert torch.equal(method(model).attribute(tokens, target=4), truth)
        finally:
            done.set()
        assert all(torch.equal(logits, expected) for logits in other.result(60))


class Growing(nn.Module):
    """Registers a buffer, counts and remembers in its first run; normalizes by a running mean."""

    def __init__(self) -> None:
        super().__init__()
        self.model = tiny()
        self.norm = nn.BatchNorm1d(16)
        self.count, self.seen = 0, []

    def forward(self, tokens):
        embeddings = self.model.get_input_embeddings()(tokens)
        if self.count == 0:
            self.register_buffer("cache", embeddings.detach(), persistent=False)
        self.count += 1
        self.seen.append(tokens.shape)
        embeddings = self.norm(embeddings.mT).mT
        return self.model(inputs_embeds=embeddings + 0 * self.cache).logits


@each_method
@pytest.mark.filterwarnings("ignore:the score of one example depends on others")
@pytest.mark.filterwarnings("ignore:examples of the batch act on one another")
def test_buffers_and_containers_are_put_back(method):
    model, tokens = Growing().train(), ids(2, 7)
    before = fingerprint(model)
    for _ in range(2):  # the second would miss the buffer if the count alone had stayed
        method(model).attribute(tokens, target=4)
        assert_unchanged(model, before)
        assert (model.count, model.seen) == (0, [])
        assert "cache" not in model._buffers


class Streaming(nn.Module):
    """Carries a state on from run to run, in eval mode: a buffer, a view of it, and containers."""

    def __init__(self) -> None:
        super().__init__()
        self.model = tiny()
        self.register_buffer("state", torch.zeros(16))
        self.view, self.kept = self.state[:8], {"runs": [torch.zeros(())], "sizes": []}

    def forward(self, tokens):
        embeddings = self.model.get_input_embeddings()(tokens)
        logits = self.model(inputs_embeds=embeddings + self.state).logits
        with torch.no_grad():  # for the next run: in this one it would be a way that hides
            self.state.lerp_(embeddings.mean((0, 1)), 0.5)
            self.kept["runs"][0] += 1
            self.kept["sizes"].append(tokens.shape)
        assert torch.equal(self.view, self.state[:8])
        return logits

    def found(self):
        return self.state.tolist(), self.view.tolist(), self.kept["runs"], self.kept["sizes"]


@each_method
def test_what_a_run_writes_is_put_back(method):
    model, tokens = Streaming().eval(), ids(2, 7)
    before = fingerprint(model)
    method(model).attribute(tokens, target=4)
    captum_ssm.supported(model, tokens)
    assert_unchanged(model, before)
    assert model.found() == ([0.0] * 16, [0.0] * 8, [0.0], [])
    assert model.view.data_ptr() == model.state.data_ptr()


def test_nnsight_brings_its_save_to_those_who_import_it():
    code = """
from concurrent.futures import ThreadPoolExecutor
import captum_ssm
import torch
model = captum_ssm.models.VisionMamba((8, 8), 4, classes=5, width=8, depth=2, state=4).eval()
images = torch.randn(2, 3, 8, 8)
explain = lambda _: captum_ssm.MambaLRP(model).attribute(images, target=4)
list(ThreadPoolExecutor(4).map(explain, range(4)))  # all of them import nnsight
assert not hasattr(object, "save") and not hasattr(3, "save")
import anyio
import nnsight
wrapped = nnsight.NNsight(model)
with wrapped.trace(images):
    inner = wrapped.output.save()
assert inner.shape == (2, 5)
captum_ssm.MambaLRP(wrapped).attribute(images, target=4)
assert hasattr(object, "save")  # it is the user's now
"""
    with tempfile.NamedTemporaryFile("w", suffix=".py") as file:  # nnsight reads its source
        file.write(code)
        file.flush()
        environment = {**os.environ, "PYTHONPATH": str(ROOT)}
        command = [sys.executable, "-W", "ignore", file.name]
        subprocess.run(command, check=True, timeout=300, env=environment)


class Broken(Exception):
    pass


def raising(*args, **kwargs):
    raise Broken("on purpose")


BREAKAGES = {
    "before the mixers": "backbone.embeddings",
    "between the mixers": "backbone.layers.1.norm",
    "after the mixers": "lm_head",
    "inside a mixer": "backbone.layers.1.mixer.out_proj",
    "in an adapter": None,
}


@each_method
@pytest.mark.parametrize("breakage", BREAKAGES)
@pytest.mark.parametrize("wrapped", [False, True], ids=["module", "nnsight"])
def test_after_an_exception(method, breakage, wrapped, monkeypatch):
    from nnsight import NNsight

    model, tokens = tiny(), ids(2, 7)
    truth = method(model).attribute(tokens, target=4)
    explain = method(NNsight(model) if wrapped else model)
    clean, path = fingerprint(model), BREAKAGES[breakage]
    with monkeypatch.context() as patch, contextlib.ExitStack() as hooks:
        if path is None:
            patch.setitem(registry._REGISTRY, "MambaMixer", raising)
        else:
            broken = model.get_submodule(path)
            hooks.enter_context(broken.register_forward_pre_hook(raising))
        before = fingerprint(model)
        for _ in range(2):
            with pytest.raises(Broken, match="on purpose"):
                explain.attribute(tokens, target=4)
            assert_unchanged(model, before)
    assert_unchanged(model, clean)
    assert torch.equal(explain.attribute(tokens, target=4), truth)


@each_method
def test_after_an_interrupt(method, monkeypatch):
    model, tokens = tiny(), ids(2, 7)

    def interrupted(*args, **kwargs):
        raise KeyboardInterrupt

    before = fingerprint(model)
    with monkeypatch.context() as patch:
        patch.setattr(type(model.backbone.norm_f), "forward", interrupted)
        with pytest.raises(KeyboardInterrupt):
            method(model).attribute(tokens, target=4)
        assert_unchanged(model, before)
    method(model).attribute(tokens, target=4)


@each_method
@pytest.mark.usefixtures("only_new_objects")
def test_nothing_keeps_the_model_or_the_inputs_alive(method):
    model, tokens = tiny(), ids(2, 7)
    x = embed(model, tokens)
    explain = method(model)
    found = explain.attribute(x, target=4)
    alive = [weakref.ref(model), weakref.ref(x), weakref.ref(model.backbone.layers[0].mixer)]
    del model, x, explain
    gc.collect()
    assert [ref() for ref in alive] == [None, None, None]
    assert found.shape == (2, 7, 16)


@each_method
@pytest.mark.usefixtures("only_new_objects")
def test_nothing_keeps_the_model_alive_after_an_exception(method):
    model, tokens = tiny(), ids(2, 7)
    model.lm_head.register_forward_pre_hook(raising)
    with contextlib.suppress(Broken):
        method(model).attribute(tokens, target=4)
    alive = weakref.ref(model)
    del model
    gc.collect()
    assert alive() is None


@pytest.mark.slow
def test_memory_does_not_grow_over_a_thousand_calls():
    model, tokens = tiny(layers=1), ids(1, 3)
    bad = torch.full_like(tokens, 10**6)
    explainers = [method(model) for method in METHODS]

    def calls(count):
        for i in range(count):
            explainers[i % len(explainers)].attribute(tokens, target=4)
            if i % 10 == 0:
                with pytest.raises(captum_ssm.InputError):
                    explainers[0].attribute(bad)
                with pytest.raises(captum_ssm.TargetError):
                    explainers[2].attribute(tokens, target=10**6)
        gc.collect()
        objects = gc.get_objects()
        tensors = [o for o in objects if issubclass(type(o), torch.Tensor)]
        return len(objects), len(tensors), sum(t.numel() for t in tensors)

    before, peak = calls(60), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    after, later = calls(1000), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    assert later - peak < 16 * 1024  # KiB
    # Not one tensor, and fewer objects than calls by far: caches that fill once, no more.
    assert after[1:] == before[1:]
    assert after[0] - before[0] < 100
