"""Blocks that a model's own forward checkpoints, and what a checkpoint of another library hides."""

from collections.abc import Callable

import pytest
import torch
from inputs import Series, noise
from methods import assert_close, each_method
from models import made
from torch import Tensor, nn
from torch.distributed._composable import checkpoint as with_hooks
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

from captum_ssm import LaTIM, MambaAttribution, RelevanceFlow, hidden_attention
from captum_ssm.interventions import TokenKnockout

X = noise(2, 8, 3)


class Block(nn.Module):
    def __init__(self, mixer: nn.Module, norm: nn.Module) -> None:
        super().__init__()
        self.mixer, self.norm = mixer, norm

    def forward(self, h: Tensor) -> Tensor:
        return h + self.mixer(self.norm(h))


class OnceMore(torch.autograd.Function):
    """A checkpoint of one's own: it keeps no graph, and runs once more in its backward pass."""

    @staticmethod
    def forward(ctx, block, h, *parameters):
        ctx.block = block
        ctx.save_for_backward(h)
        with torch.no_grad():
            return block(h)

    @staticmethod
    def backward(ctx, gradient):
        h = ctx.saved_tensors[0].detach().requires_grad_()
        with torch.enable_grad():
            ctx.block(h).backward(gradient)
        return None, h.grad, *(None for _ in ctx.block.parameters())


class Checkpointed(Series):
    """Runs each of its blocks in a checkpoint."""

    def __init__(self) -> None:
        super().__init__()
        pairs = zip(self.body.mixers, self.body.norms, strict=True)
        self.blocks = nn.ModuleList(Block(*pair) for pair in pairs)
        del self.body
        self.run: Callable[[nn.Module, Tensor], Tensor] = nn.Module.__call__

    def forward(self, x):
        h = self.inp(x)
        for block in self.blocks:
            h = self.run(block, h)
        return self.head(self.norm(h.mean(1)))


RUNS = {
    "reentrant": lambda block, h: checkpoint(block, h, use_reentrant=True),
    "not reentrant": lambda block, h: checkpoint(block, h, use_reentrant=False),
    "sequential": lambda block, h: checkpoint_sequential([block], 1, h, use_reentrant=False),
    "wrapper": lambda block, h: checkpoint_wrapper(block)(h),
    "hooks": nn.Module.__call__,
}


def series(run=nn.Module.__call__):
    model = made(Checkpointed)
    model.run = run
    return model


def checkpointed(kind):
    model = series(RUNS[kind])
    if kind == "hooks":
        for block in model.blocks:
            with_hooks(block)
    return model


@each_method
@pytest.mark.parametrize("kind", RUNS)
def test_checkpointed_blocks_are_explained_as_they_are(kind, method):
    found = method(checkpointed(kind)).attribute(X, target=1)
    assert_close(found, method(series()).attribute(X, target=1), 1e-12)


CALLS = {
    "hidden_attention": lambda model: torch.cat([*hidden_attention(model, X).values()]),
    "rollout": lambda model: MambaAttribution(model).rollout(X, 1),
    "contributions": lambda model: LaTIM(model).contributions(X, 0, rows=[3]),
    "RelevanceFlow": lambda model: RelevanceFlow(model).attribute(X, target=1),
    "TokenKnockout": lambda model: TokenKnockout(model).attribute(X, target=1),
}


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("kind", ["reentrant", "not reentrant", "hooks"])
def test_other_calls_see_through_checkpoints(kind, name):
    assert_close(CALLS[name](checkpointed(kind)), CALLS[name](series()), 1e-12)


@each_method
def test_a_checkpoint_of_ones_own_is_refused_in_words(method):
    model = series(lambda block, h: OnceMore.apply(block, h, *block.parameters()))
    with pytest.raises(ValueError, match=r"torch\.utils\.checkpoint is switched off during"):
        method(model).attribute(X, target=1)
