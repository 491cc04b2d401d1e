"""A model runs on copies of its modules: what a run writes, and where it ends, harms nothing."""

import collections
import copy
import itertools
import os
import pickle
import random
import threading
import types
import warnings
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from contextvars import copy_context

import interrupts
import numpy as np
import pytest
import torch
from methods import METHODS, each_method
from models import ids, tiny
from torch import nn
from torch.nn import functional as F
from transformers.utils import logging
from unchanged import fingerprint

from captum_ssm import InputError, MambaLRP, MambaRollout, RawAttention, UnsupportedModelError
from captum_ssm.capture.operations import Operations
from captum_ssm.models import BidirectionalMamba
from captum_ssm.utils.copies import Copies, copied, original, running
from captum_ssm.utils.transformers_advice import without_advice
from captum_ssm.utils.uncompiled import without_compiler
from captum_ssm.utils.watch_modules import watch_modules


class State:
    """What a model may keep of its own: a number and a tensor."""

    def __init__(self) -> None:
        self.count, self.values = 0, torch.zeros(2)


class Watched(nn.Linear):
    """A linear layer that keeps the largest entry it was given, as observers of quantization do."""

    def __init__(self) -> None:
        super().__init__(16, 16)
        self.register_buffer("largest", torch.zeros(()))

    def forward(self, x):
        self.largest.copy_(torch.maximum(self.largest, x.detach().abs().max()))
        return super().forward(x)


class Remembering(nn.Module):
    """A language model that writes to things of its own in each run, by the names of ``kinds``."""

    seen = 0

    def __init__(self, *kinds: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.kinds = kinds
        self.embedding = nn.Embedding(37, 16, max_norm=1.0 if "max_norm" in kinds else None)
        self.mixer, self.layer, self.head = (
            BidirectionalMamba(16, state=4),
            Watched(),
            nn.Linear(16, 37),
        )
        self.last, self.space = collections.deque([0], maxlen=5), types.SimpleNamespace(n=0)
        self.array, self.state, self.pair = np.zeros(3), State(), (torch.zeros(2), [torch.zeros(2)])
        self.nested = {"a": {"b": torch.zeros(2)}}
        self.bytes, self.iterator = bytearray(b"abc"), iter(range(1000))
        self.generator = torch.Generator().manual_seed(3)
        self.random, self.numpy = random.Random(1), np.random.default_rng(1)
        self.weight = nn.Parameter(torch.randn(16, 16))
        self.weights = nn.ParameterList([nn.Parameter(torch.zeros(2))])
        self.mapped, self.aside = torch.from_numpy(np.zeros(3)), nn.Linear(4, 4)

    def forward(self, tokens):
        x = self.embedding(tokens)
        x = self.layer(x + self.mixer(x))
        with torch.no_grad():
            for kind in self.kinds:
                WRITES.get(kind, lambda model: None)(self)
            noise = sum(DRAWS[kind](self) for kind in self.kinds if kind in DRAWS)
        return self.head(x + 1e-3 * noise)

    def held(self):
        """Everything that a run could have changed, comparable."""
        own = {k: v for k, v in vars(self).items() if k in HELD}
        parts = pickle.dumps((own, vars(self.state), Remembering.seen))
        tensors = [t.detach().clone().tolist() for t in self.state_dict().values()]
        tensors += [(p.requires_grad, str(vars(p))) for p in self.parameters()]
        drawn = (self.generator.get_state().tolist(), torch.get_rng_state().tolist())
        return parts, tensors, drawn, random.getstate(), str(np.random.get_state())  # noqa: NPY002


HELD = (
    "last",
    "space",
    "array",
    "pair",
    "nested",
    "bytes",
    "iterator",
    "random",
    "numpy",
    "mapped",
)
WRITES = {
    "deque": lambda m: m.last.append(1),
    "namespace": lambda m: setattr(m.space, "n", 1),
    "array": lambda m: m.array.fill(1),
    "object": lambda m: setattr(m.state, "count", 3),
    "tensor of an object": lambda m: m.state.values.add_(1),
    "tuple": lambda m: m.pair[0].add_(1),
    "list in a tuple": lambda m: m.pair[1][0].add_(1),
    "dict in a dict": lambda m: m.nested["a"].update(c=1),
    "bytes": lambda m: m.bytes.append(1),
    "iterator": lambda m: next(m.iterator),
    "weight": lambda m: m.weight.div_(m.weight.norm()),
    "list of weights": lambda m: m.weights[0].add_(1),
    "mapped memory": lambda m: m.mapped.add_(1),
    "another dtype": lambda m: m.aside.half(),
    "fewer weights": lambda m: setattr(m.aside.weight, "data", m.aside.weight.data[:2]),
    "no gradient": lambda m: m.aside.requires_grad_(False),
    "a weight's attribute": lambda m: setattr(m.weight, "tag", 1),
    "class": lambda m: setattr(type(m), "seen", type(m).seen + 1),
}
DRAWS = {
    "generator": lambda m: torch.rand(16, generator=m.generator),
    "random": lambda m: m.random.random(),
    "numpy": lambda m: float(m.numpy.random()),
    "global generators": lambda m: torch.rand(16) + random.random() + float(np.random.rand()),  # noqa: NPY002
}
KINDS = (*WRITES, *DRAWS, "max_norm", "observer")


@pytest.mark.filterwarnings("ignore:Remembering draws random numbers")
@each_method
def test_whatever_a_run_writes_is_not_the_users(method):
    model, tokens = Remembering(*KINDS).eval(), ids(2, 9)
    before = model.held()
    method(model).attribute(tokens, target=(3, 4))
    assert model.held() == before


@pytest.mark.parametrize("kind", KINDS)
def test_a_users_own_run_writes(kind):
    model, tokens = Remembering(kind).eval(), ids(2, 9)
    before = model.held()
    with torch.no_grad():
        model(tokens)
    assert model.held() != before
    Remembering.seen = 0


@each_method
def test_weights_stay_where_they_are(method):
    model, tokens = tiny(), ids(2, 7)
    places = [p.data_ptr() for p in model.parameters()]
    kept = method(model)
    kept.attribute(tokens, target=4)
    assert [p.data_ptr() for p in model.parameters()] == places


def test_copies_share_memory_as_their_modules_do():
    model = nn.Module()
    model.register_buffer("state", torch.zeros(16))
    model.view, model.tied = model.state[:8], nn.Linear(2, 2)
    model.weight = model.tied.weight
    with copied(model) as copies:
        made = copies.root
        assert made is not model
        assert original(made) is model
        assert running(model) is made
        made.state.add_(1)
        assert made.view.tolist() == [1.0] * 8
        assert model.view.tolist() == [0.0] * 8
        assert made.weight is made.tied.weight
        assert made.weight is model.weight  # shared, and put back where a run writes to it
    assert running(model) is model


def test_what_cannot_be_copied_is_shared():
    model = nn.Module()
    model.lock, model.numbers = threading.Lock(), itertools.count()
    model.generator, model.many = (i for i in range(3)), [[i] for i in range(30_000)]
    model.pool = ThreadPoolExecutor(1)
    with copied(model) as copies:
        for name in ("lock", "generator", "many", "pool"):
            assert getattr(copies.root, name) is getattr(model, name)


def test_writing_to_memory_that_cannot_be_cloned_is_said(monkeypatch):
    monkeypatch.setattr("captum_ssm.utils.clones._LARGE", 0)
    model = Remembering("mapped memory").eval()
    with pytest.raises(UnsupportedModelError, match="writes in place to 1 of its tensors"):
        RawAttention(model).attribute(ids(2, 9))


class Towers(nn.Module):
    """Two mixers that run in a thread pool."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = (BidirectionalMamba(16, state=4) for _ in range(2))
        self.pool, self.head = ThreadPoolExecutor(2), nn.Linear(16, 3)

    def forward(self, x):
        found = [self.pool.submit(tower, x) for tower in (self.first, self.second)]
        return self.head((x + found[0].result(20) + found[1].result(20)).mean(1))


@each_method
def test_a_forward_that_uses_threads_is_refused_in_words(method):
    with pytest.raises(UnsupportedModelError, match="called in another thread"):
        method(Towers().eval()).attribute(torch.randn(1, 9, 16), target=1)


@each_method
def test_a_model_that_is_explained_in_its_own_hook_is_refused_by_name(method):
    model, tokens = tiny(), ids(2, 7)

    def explain(module, args, output):
        method(model).attribute(tokens, target=4)

    with (
        model.backbone.layers[0].register_forward_hook(explain),
        pytest.raises(UnsupportedModelError, match="MambaForCausalLM is being explained"),
    ):
        model(tokens)
    method(model).attribute(tokens, target=4)


@pytest.mark.parametrize("name", ["trace", "interleaver", "_children", "_module", "output", "iter"])
def test_a_submodule_may_have_any_name(name):
    class Named(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.add_module(name, BidirectionalMamba(16, state=4))
            self.head = nn.Linear(16, 3)

        def forward(self, x):
            return self.head((x + self._modules[name](x)).mean(1))

    model, x = Named().eval(), torch.randn(2, 9, 16)
    relevance, delta = MambaLRP(model).attribute(x, target=1, return_convergence_delta=True)
    assert relevance.shape == x.shape
    assert torch.isfinite(delta).all()


def test_calls_from_closures_and_methods_find_the_copies():
    model, tokens = tiny(), ids(2, 7)
    truth = MambaRollout(model).attribute(tokens)
    for forward in (
        lambda t: model(t).logits,
        lambda t: model.lm_head(model.backbone(t).last_hidden_state),
        model.forward,
    ):
        torch.testing.assert_close(MambaRollout(forward, model).attribute(tokens), truth)


@pytest.mark.parametrize("method", [m for m in METHODS if not m.needs_target()])
def test_a_method_that_froze_once_is_pickled_and_copied(method):
    model, tokens = tiny(), ids(2, 7)
    frozen = method(model).freeze_once(tokens)
    truth = frozen.attribute(tokens, position=3)
    for other in (pickle.loads(pickle.dumps(frozen)), copy.deepcopy(frozen), copy.copy(frozen)):
        assert torch.equal(other.attribute(tokens, position=3), truth)


def test_inputs_on_a_meta_default_device_and_nested_ones_are_refused():
    model, nested = (
        tiny(),
        torch.nested.nested_tensor([torch.randn(3, 16), torch.randn(5, 16)], layout=torch.jagged),
    )
    with pytest.raises(TypeError, match="a nested tensor"):
        RawAttention(model).attribute(nested)
    torch.set_default_device("meta")
    try:
        with pytest.raises(InputError, match="default device is meta"):
            RawAttention(model).attribute(ids(1, 3))
    finally:
        torch.set_default_device(None)


def test_a_loss_that_comes_first_is_passed_over():
    model, tokens = tiny(), ids(2, 7)

    def with_loss(t):
        logits = model(t).logits
        return logits.sum(), logits

    truth = MambaLRP(model).attribute(tokens, target=4)
    torch.testing.assert_close(MambaLRP(with_loss, model).attribute(tokens, target=4), truth)
    with pytest.raises(TypeError, match="a tensor without axes"):
        MambaLRP(lambda t: model(t).logits.sum(), model).attribute(tokens, target=4)


def test_threads_leave_the_filters_of_warnings():
    before = list(warnings.filters)
    both = threading.Barrier(3)

    def explain(seed):
        torch.manual_seed(seed)
        model = Towers.__new__(Towers)
        nn.Module.__init__(model)
        model.mixer, model.head = BidirectionalMamba(16, state=4), nn.Linear(16, 3)
        model.forward = lambda x: model.head((x + model.mixer(x)).mean(1))
        both.wait(60)
        return RawAttention(model.eval()).attribute(torch.randn(1, 9, 16))

    with ThreadPoolExecutor(3) as pool:
        assert len(list(pool.map(explain, range(3)))) == 3
    assert warnings.filters == before


def test_threads_leave_the_compilers_stance():
    import torch._dynamo

    both, order = threading.Barrier(2), []

    def block(leaves_first):
        with without_compiler():
            both.wait(60)
            if not leaves_first:
                both.wait(60)
            order.append(leaves_first)
        if leaves_first:
            both.wait(60)

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(block, (True, False)))
    assert order == [True, False]
    graphs = []

    def backend(graph, example_inputs):
        graphs.append(graph)
        return graph.forward

    torch.compile(lambda x: x + 1, backend=backend)(torch.zeros(2))
    assert graphs


@pytest.mark.skipif(not hasattr(os, "fork"), reason="processes do not fork here")
def test_children_that_are_forked_while_a_thread_explains_go_on():
    model, tokens, done = tiny(), ids(1, 7), threading.Event()
    RawAttention(model).attribute(tokens)

    def explain():
        while not done.is_set():
            RawAttention(model).attribute(tokens)

    thread = threading.Thread(target=explain)
    thread.start()
    try:
        for _ in range(4):
            child = os.fork()
            if child == 0:
                status = 1
                with suppress(BaseException):
                    # OpenMP's threads are not forked: a child of a process in which a test has
                    # started them waits for them in any linear layer, also without this library.
                    torch.set_num_threads(1)
                    RawAttention(model).attribute(tokens)
                    status = 0
                os._exit(status)
            assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    finally:
        done.set()
        thread.join(60)


@pytest.mark.parametrize("name", interrupts.CALLS)
def test_a_signal_at_any_line_leaves_model_and_process_as_they_were(name):
    # One moment of 397, another one for each call; a step of 1 takes all of them.
    first = sorted(interrupts.CALLS).index(name)
    stopped, changed = interrupts.left_changed(name, first, 397)
    assert stopped
    assert not changed


def noted_functions():
    operations = Operations()
    with operations.noted(), operations.in_mixer(None):
        torch.ones(2)


def function_with_a_block_of_pytorchs():
    with Operations().noted():
        F.relu(torch.ones(2))


def noted_in_another_context():
    operations = Operations()

    def paused():
        with operations.paused():
            torch.ones(2)

    with operations.noted():  # as in nnsight's greenlets, which have context variables of their own
        copy_context().run(paused)


LAYER = nn.Linear(2, 2)
BLOCKS = [
    noted_functions,
    function_with_a_block_of_pytorchs,
    noted_in_another_context,
    without_advice()(lambda: None),
]


@watch_modules([LAYER], before=print, after=print, ended=print)
def watched_layer():
    pass


@pytest.mark.parametrize("block", [*BLOCKS, watched_layer])
def test_a_signal_at_any_line_of_a_block_leaves_the_process_as_it_was(block):
    def state():
        bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
        return interrupts.process(), fingerprint(LAYER), bars

    block()
    moments = interrupts.moments_of(block)
    assert len(moments) > 5
    for moment in moments:
        before = state()
        assert interrupts.interrupted_at(moment, block)
        assert state() == before, moment


def test_copies_of_a_large_object_are_given_up():
    model = nn.Module()
    model.trainer = types.SimpleNamespace(
        parts=[[State() for _ in range(15_000)] for _ in range(2)]
    )
    copies = Copies()
    copies.make(model)
    assert copies.root.trainer is model.trainer


def clipped(x):
    if x.requires_grad:
        x.register_hook(lambda gradient: gradient.clamp(-1e-3, 1e-3))
    return x


@each_method
def test_hooks_on_gradients_do_not_change_relevance_and_are_not_told(method):
    # They clip and scale gradients in training, or log them.
    model, tokens, told = tiny(), ids(2, 7), []
    truth = method(model).attribute(tokens, target=4)
    block, mixer = model.backbone.layers[1], model.backbone.layers[0].mixer
    mixer.register_full_backward_hook(lambda m, given, taken: told.append(m) or (given[0] / 2,))
    mixer.register_full_backward_pre_hook(lambda m, taken: (taken[0] / 2,))
    block.register_forward_hook(lambda m, args, output: clipped(output))
    torch.testing.assert_close(method(model).attribute(tokens, target=4), truth)
    assert not told
    model(tokens).logits.sum().backward()
    assert told == [mixer]  # the user's own still are
