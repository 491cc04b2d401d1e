"""S4, S4D, Hyena: convolutions as long as the input, found among the transforms of a run."""

import math

import pytest
import torch
import wild
from frozen import measured
from long_convolutions import S4D, D, L, TokensLast, response
from methods import MAPS, OF_A_TARGET, each, each_method
from models import without_biases
from proofs import proven
from torch import Tensor, nn
from torch.nn import functional as F

from captum_ssm import LaTIM, MambaLRP, UnsupportedModelError, hidden_attention, supported
from captum_ssm.discovery.measure import freeze_measured
from captum_ssm.mixers import MixerCall
from captum_ssm.operators import ToeplitzOperator
from captum_ssm.operators.part import part_of


@pytest.mark.parametrize("causal", [True, False])
def test_a_toeplitz_operator_is_its_matrix(causal):
    kernel = torch.randn(D, 2 * L)
    kernel[:, L:] *= not causal
    operator = ToeplitzOperator(kernel, examples=2)
    matrix = operator.matrix()
    lags = torch.arange(L)[:, None] - torch.arange(L)
    assert torch.equal(matrix, kernel[:, lags].expand(2, -1, -1, -1))
    assert operator.is_causal == causal
    v, w = torch.randn(2, 2, L, D)
    expected = torch.einsum("bdij,bjd->bid", matrix, v)
    torch.testing.assert_close(operator.matvec(v), expected, rtol=1e-4, atol=1e-5)
    expected = torch.einsum("bdij,bid->bjd", matrix, w)
    torch.testing.assert_close(operator.rmatvec(w), expected, rtol=1e-4, atol=1e-5)
    row = torch.einsum("bdij,bi->bj", matrix, w[..., 0]) / D
    torch.testing.assert_close(operator.rmatvec(w[..., 0], "mean"), row, rtol=1e-4, atol=1e-5)
    mean = operator.matrix("mean")
    torch.testing.assert_close(mean, matrix.mean(1))
    index = torch.tensor([[2, 8], [0, 5]])
    rows = torch.stack([one[:, at] for one, at in zip(matrix, index, strict=True)])
    assert torch.equal(operator.rows(index), rows)
    some = part_of(operator, torch.tensor([1]), 1, 3)
    assert torch.equal(some.matrix(), matrix[1:, 1:3])


def fftconv(u, k, D):
    """As Hyena's code writes it: (B, D, L) and (D, L)."""
    n = 2 * u.shape[-1]
    y = torch.fft.irfft(torch.fft.rfft(u, n=n) * torch.fft.rfft(k, n=n) / n, n=n, norm="forward")
    return y[..., : u.shape[-1]] + u * D[:, None]


def test_a_function_that_convolves_is_proven():
    u, k, skip = torch.randn(2, D, L), response(), torch.randn(D)
    scan = proven(fftconv, u=u, k=k, D=skip)
    assert scan.error < 1e-5
    assert scan.skip is not None
    lags = torch.arange(L)[:, None] - torch.arange(L)
    expected = torch.where(lags >= 0, k[:, lags.clamp(min=0)], 0)
    torch.testing.assert_close(scan.operator.matrix()[0], expected)
    assert proven(lambda u, k, D: fftconv(u, k, D).tanh(), u=u, k=k, D=skip) is None
    assert proven(lambda u, k, D: fftconv(u, k.flip(-1), D), u=u, k=k, D=skip) is None


class Einsum(S4D):
    """As S4's: several kernels in general, here one."""

    def convolved(self, u: Tensor) -> Tensor:
        length, n = u.shape[-1], 2 * u.shape[-1]
        k, x = torch.fft.rfft(self.kernel[None], n=n), torch.fft.rfft(u, n=n)
        product = torch.einsum("bhl,chl->bchl", x, k)
        return torch.fft.irfft(product, n=n)[..., :length].flatten(1, 2)


class AlongTokens(S4D):
    """As gated state spaces: channels last, and transforms along an axis that is named."""

    def convolved(self, u: Tensor) -> Tensor:
        length, n = u.shape[-1], 2 * u.shape[-1]
        k, x = torch.fft.rfft(self.kernel.mT, n=n, dim=-2), torch.fft.rfft(u.mT, n=n, dim=1)
        return torch.fft.irfft(x * k, n, 1)[:, :length].mT


class InBlocks(S4D):
    """As Hyena: one head and one block of tokens have axes of their own."""

    def convolved(self, u: Tensor) -> Tensor:
        n, u = 2 * u.shape[-1], u[:, None, :, None]
        k, x = torch.fft.rfft(self.kernel, n=n)[:, None], torch.fft.rfft(u, n=n)
        return torch.fft.irfft(x * k, n=n)[:, 0, :, 0, : u.shape[-1]]


class OfHeads(S4D):
    """Heads of three channels, with one kernel for each."""

    def convolved(self, u: Tensor) -> Tensor:
        n, heads = 2 * u.shape[-1], u.unflatten(1, (2, 3))
        k = torch.fft.rfft(self.kernel[:2, None], n=n)
        y = torch.fft.irfft(torch.fft.rfft(heads, n=n) * k, n=n)
        return y.flatten(1, 2)[..., : u.shape[-1]]


class ValuesFirst(S4D):
    """A kernel with an axis of one, as the values of one example have, that is transformed last."""

    def convolved(self, u: Tensor) -> Tensor:
        length, n = u.shape[-1], 2 * u.shape[-1]
        product = torch.fft.rfft(u, n=n) * torch.fft.rfft(self.kernel[None], n=n)
        return torch.fft.irfft(product, n=n)[..., :length]


class Normalized(S4D):
    """Transforms with norms."""

    def convolved(self, u: Tensor) -> Tensor:
        length, n = u.shape[-1], 2 * u.shape[-1]
        k = torch.fft.rfft(self.kernel, n=n, norm="forward")
        product = torch.fft.rfft(u, n=n, norm="ortho") * k * n
        return torch.fft.irfft(product, n=n, norm="ortho")[..., :length]


KINDS = [S4D, Einsum, AlongTokens, InBlocks, OfHeads, ValuesFirst, Normalized]


def tokens(B=1, width=6):
    return torch.randn(B, L, width)


@pytest.mark.parametrize("glu", [True, False], ids=["glu", "plain"])
@pytest.mark.parametrize("way", ["past", "both"])
@pytest.mark.parametrize("examples", [1, 2])
@pytest.mark.parametrize("kind", KINDS)
def test_a_convolution_that_is_written_out_is_measured(kind, examples, way, glu):
    module, x = kind(glu, way).eval(), tokens(examples).mT
    with torch.no_grad():
        call = MixerCall.of("mixer", module, (x,), {}, module(x), channels=1)
    mixer = freeze_measured(call)
    torch.testing.assert_close(mixer.output(), module(x).mT, rtol=1e-4, atol=1e-5)
    maps = mixer.operator("hidden").matrix()
    with torch.no_grad():
        impulses = torch.eye(L)[:, None].expand(L, 6, L)
        expected = module.convolved(impulses)  # (L of the impulse, D, L)
    torch.testing.assert_close(maps[0], expected.permute(1, 2, 0), rtol=1e-4, atol=1e-5)
    assert mixer.recurrence.is_causal == (way == "past")
    assert (mixer.out_gate is None) != glu


class Filter(nn.Module):
    """As FMLP-Rec: frequencies times numbers that are learned, around a circle of all tokens."""

    def __init__(self, width: int = 6) -> None:
        super().__init__()
        self.filter = nn.Parameter(torch.randn(1, L // 2 + 1, width, 2))

    def forward(self, x: Tensor) -> Tensor:
        product = torch.fft.rfft(x, dim=1, norm="ortho") * torch.view_as_complex(self.filter)
        return torch.fft.irfft(product, n=x.shape[1], dim=1, norm="ortho")


@pytest.mark.parametrize("examples", [1, 2])
def test_a_filter_of_frequencies_is_a_convolution(examples):
    module, x = Filter().eval(), tokens(examples)
    maps = measured(module, x).operator("hidden").matrix()
    with torch.no_grad():
        expected = module(torch.eye(L)[..., None].expand(L, L, 6))  # (L of the impulse, L, D)
    torch.testing.assert_close(maps[0], expected.permute(2, 1, 0), rtol=1e-4, atol=1e-5)


class Wide(S4D):
    """As S4 with two kernels per channel, or two for all channels."""

    def __init__(self, kernels: str) -> None:
        super().__init__(glu=False)
        sizes = [{"c": 2, "h": 6}[axis] for axis in kernels]
        self.kernel = nn.Parameter(response(math.prod(sizes)).view(*sizes, L))
        self.output, self.kernels = nn.Conv1d(12, 6, 1), kernels

    def forward(self, u: Tensor) -> Tensor:
        n = 2 * u.shape[-1]
        k, x = torch.fft.rfft(self.kernel, n=n), torch.fft.rfft(u, n=n)
        both = "bhcl" if self.kernels == "hc" else "bchl"
        product = torch.einsum(f"bhl,{self.kernels}l->{both}", x, k)
        return self.output(torch.fft.irfft(product, n=n)[..., : u.shape[-1]].flatten(1, 2))


@pytest.mark.parametrize("kernels", ["ch", "hc", "c"])
def test_each_channel_may_have_several_kernels(kernels):
    model, x = without_biases(TokensLast(Wide(kernels), Wide(kernels)).eval()), tokens()
    relevance, delta = MambaLRP(model).attribute(x, target=(6, 3), return_convergence_delta=True)
    assert float(delta.abs().max()) < 1e-4
    size = relevance[0].abs().sum(-1)
    assert bool((size[:7] > 0).all())
    assert size[7:].max() < 1e-5 * size.max()


@each([*MAPS, MambaLRP])
def test_every_method_explains_an_s4d(method):
    model, x = TokensLast(S4D(), S4D()).eval(), tokens()
    where = {} if method not in OF_A_TARGET else {"target": (6, 3)}
    found = method(model).attribute(x, position=6, **where).abs().sum(-1)[0]
    assert found.isfinite().all()
    assert found[:7].sum() > 0
    # The model's own transforms round, and so do ours.
    assert found[7:].max() < 1e-5 * found.max()


@pytest.mark.parametrize("glu", [True, False], ids=["glu", "plain"])
def test_contributions_add_up(glu):
    model, x = without_biases(TokensLast(S4D(glu=glu), S4D(glu=glu)).eval()), tokens()
    _, delta = LaTIM(model).attribute(
        x, target=(6, 3), aggregation="alti_logit", return_convergence_delta=True
    )
    assert float(delta.abs().max()) < 1e-4


def test_the_gradient_through_a_gate_behind_the_projection_is_the_models():
    module, x = S4D().eval(), tokens().mT
    with torch.no_grad():
        call = MixerCall.of("mixer", module, (x,), {}, module(x), channels=1)
    mixer = freeze_measured(call)
    gated, direction = mixer.gated_output().requires_grad_(), torch.randn(1, L, 6)
    (expected,) = torch.autograd.grad((direction * mixer.projected(gated)).sum(), gated)
    found = mixer.mean_gated_gradient(direction)
    torch.testing.assert_close(found, expected.mean(-1))


class Hyena(nn.Module):
    """Values are the product of two convolved signals, the third is the gate; a skip of values."""

    def __init__(self, width: int = 6) -> None:
        super().__init__()
        self.into, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.short = nn.Conv1d(3 * width, 3 * width, 3, padding=2, groups=3 * width)
        self.kernel, self.D = nn.Parameter(response(width)), nn.Parameter(torch.randn(width))

    def parts(self, x: Tensor) -> tuple[Tensor, ...]:
        return self.short(self.into(x).mT)[..., : x.shape[1]].chunk(3, 1)

    def forward(self, x: Tensor) -> Tensor:
        x2, x1, v = self.parts(x)
        u, n = x1 * v, 2 * v.shape[-1]
        # As StripedHyena writes it: a complex transform, and scales on both sides.
        kernel = torch.fft.rfft(self.kernel, n=n) / n
        product = torch.fft.fft(u, n=n)[..., : n // 2 + 1] * kernel
        y = torch.fft.irfft(product, n=n, norm="forward")[..., : v.shape[-1]]
        return self.out(((y + u * self.D[:, None]) * x2).mT)


def test_the_map_of_a_hyena_acts_on_its_values():
    module, x = Hyena().eval(), tokens(2)
    mixer = measured(module, x)
    with torch.no_grad():
        x2, x1, v = module.parts(x)
    lags = torch.arange(L)[:, None] - torch.arange(L)
    toeplitz = torch.where(lags >= 0, module.kernel.detach()[:, lags.clamp(min=0)], 0)
    torch.testing.assert_close(mixer.operator("hidden").matrix()[1], toeplitz)
    # With the two gates: of v, before its convolution the last third of the channels.
    found = mixer.operator("unified", ("gate", "activation", "skip")).matrix()
    whole = toeplitz + torch.diag_embed(module.D.detach()[:, None].expand(-1, L))
    torch.testing.assert_close(found, x2[..., None] * whole * x1[..., None, :])
    y = torch.einsum("bdij,bdj->bid", found, v)
    torch.testing.assert_close(module.out(y), module(x), rtol=1e-4, atol=1e-5)


class OfAFunction(Hyena):
    """As HyenaDNA writes it, by a function that other modules call."""

    def forward(self, x: Tensor) -> Tensor:
        x2, x1, v = self.parts(x)
        return self.out((fftconv(x1 * v, self.kernel, self.D) * x2).mT)


def test_a_hyena_that_calls_a_function_is_one():
    module, x = OfAFunction().eval(), tokens(2)
    mixer = measured(module, x)
    torch.testing.assert_close(mixer.projected(mixer.gated_output()), module(x))
    v = module.parts(x)[2]
    found = mixer.operator("unified", ("gate", "activation", "skip")).matrix()
    y = torch.einsum("bdij,bdj->bid", found, v)
    torch.testing.assert_close(module.out(y), module(x), rtol=1e-4, atol=1e-5)


@each_method
@pytest.mark.parametrize("kind", [Hyena, OfAFunction])
def test_every_method_explains_a_hyena(method, kind):
    model, x = wild.Stack(kind(), kind()).eval(), tokens()
    where = {} if method not in OF_A_TARGET else {"target": (6, 3)}
    found = method(model).attribute(x, position=6, **where)
    assert found.isfinite().all()
    assert found.abs().sum() > 0


class Multiplied(S4D):
    """The product is not that of the two transforms."""

    def product(self, u: Tensor, k: Tensor) -> Tensor:
        return u * k * (1 + u.abs())


def test_another_product_is_no_convolution():
    model = TokensLast(Multiplied(), Multiplied()).eval()
    with pytest.raises(UnsupportedModelError):
        hidden_attention(model, tokens())


class ScanOnly(wild.Mixer):
    """No output projection: the gate's own is not taken for one."""

    def forward(self, x: Tensor) -> Tensor:
        u, z = self.in_proj(x).chunk(2, -1)
        return self.mixed(u) * F.silu(z)


def test_the_gates_own_projection_is_not_the_output_projection():
    assert measured(ScanOnly(inner=6), tokens(2)).out_gate is None


def test_supported_says_that_all_methods_work_with_a_glu():
    found = supported(TokensLast(S4D(), S4D()).eval(), tokens(), target=(6, 3))
    assert [name for name, why in found.methods.items() if why] == []
    assert all(mixer.known == "measured" for mixer in found.mixers)
