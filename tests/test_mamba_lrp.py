"""MambaLRP: conservation, and an independent gradient times input through a hand-frozen Mamba."""

from __future__ import annotations

import pytest
import torch
from families import build
from torch.nn import functional as F

from captum_ssm import LaTIM, MambaLRP, MambaRollout

# Families whose every nonlinear part is frozen; in the others (mixtures of experts, ...) the
# delta says what is not conserved.
CONSERVING = (
    "mamba",
    "falcon_mamba",
    "mamba2",
    "bamba",
    "falcon_h1",
    "nemotron_h",
    "olmo_hybrid",
    "zamba",
)


def ids_for(count: int = 2, length: int = 9) -> torch.Tensor:
    return torch.randint(1, 30, (count, length), generator=torch.Generator().manual_seed(0))


def without_biases(model: torch.nn.Module) -> torch.nn.Module:
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            # The step's bias sits inside the frozen coefficients and stays.
            if name.endswith("bias") and "dt" not in name:
                parameter.zero_()
    return model


@pytest.mark.parametrize("family", CONSERVING)
def test_relevance_sums_to_the_logit(family: str) -> None:
    model, ids = without_biases(build(family)), ids_for()
    relevance, delta = MambaLRP(model).attribute(ids, target=3, return_convergence_delta=True)
    with torch.no_grad():
        logit = model(ids).logits[:, -1, 3]
    assert relevance.shape == ids.shape
    torch.testing.assert_close(relevance.sum(1), logit, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(delta, logit - relevance.sum(1), rtol=1e-4, atol=1e-5)


def test_biases_are_what_the_delta_is() -> None:
    # With a convolution bias the relevance misses its share, which the delta reports.
    model, ids = build("mamba"), ids_for()
    _, delta = MambaLRP(model).attribute(ids, target=3, return_convergence_delta=True)
    _, none = MambaLRP(without_biases(model)).attribute(
        ids, target=3, return_convergence_delta=True
    )
    assert float(delta.abs().max()) > 1e-3
    assert float(none.abs().max()) < 1e-5


def test_embeddings_and_ids_agree() -> None:
    model, ids = build("mamba2"), ids_for()
    embeddings = model.get_input_embeddings()(ids).detach()
    by_ids = MambaLRP(model).attribute(ids, target=3)
    by_embeddings = MambaLRP(model).attribute(embeddings, target=3)
    assert by_embeddings.shape == embeddings.shape
    torch.testing.assert_close(by_embeddings.sum(-1), by_ids, rtol=1e-4, atol=1e-6)


def test_equals_a_hand_frozen_mamba() -> None:
    model, ids, target = build("mamba").double(), ids_for(), 4
    x = model.backbone.embeddings(ids).detach().requires_grad_(True)
    hidden = x
    for layer in model.backbone.layers:
        mixed = _frozen_mixer(layer.mixer, _frozen_rms(layer.norm, hidden))
        hidden = hidden + mixed
    hidden = _frozen_rms(model.backbone.norm_f, hidden)
    score = (hidden[:, -1] @ model.lm_head.weight[target]).sum()
    (gradient,) = torch.autograd.grad(score, x)
    expected = (x * gradient).sum(-1).detach()
    torch.testing.assert_close(
        MambaLRP(model).attribute(ids, target=target), expected, rtol=1e-5, atol=1e-7
    )


def _frozen_rms(norm: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
    scale = torch.rsqrt(x.detach().square().mean(-1, keepdim=True) + norm.variance_epsilon)
    return x * scale * norm.weight


def _frozen_mixer(mixer: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
    """A Mamba mixer token by token, with constants where MambaLRP has them."""
    L = x.shape[1]
    u, z = mixer.in_proj(x).chunk(2, -1)
    K = mixer.conv1d.kernel_size[0]
    padded = F.pad(u, (0, 0, K - 1, 0))
    psi = mixer.conv1d.bias + sum(
        padded[:, k : k + L] * mixer.conv1d.weight[:, 0, k] for k in range(K)
    )
    v = psi * torch.sigmoid(psi).detach()
    rank, N = mixer.time_step_rank, mixer.ssm_state_size
    step, B, C = mixer.x_proj(v.detach()).split([rank, N, N], -1)
    dt = F.softplus(mixer.dt_proj(step)).detach()
    A = -torch.exp(mixer.A_log.float()).double()
    state = torch.zeros(x.shape[0], v.shape[-1], N, dtype=x.dtype)
    rows = []
    for t in range(L):
        decay = torch.exp(dt[:, t, :, None] * A).detach()
        write = (dt[:, t, :, None] * B[:, t, None]).detach()
        state = decay * state + write * v[:, t, :, None]
        rows.append((state * C[:, t, None].detach()).sum(-1))
    y = torch.stack(rows, 1) + mixer.D * v
    gate = z * torch.sigmoid(z).detach()
    half = 0.5 * (y * gate.detach() + y.detach() * gate)
    return mixer.out_proj(half)


def test_the_model_is_left_as_it_was() -> None:
    model, ids = build("mamba"), ids_for()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    MambaLRP(model).attribute(ids, target=3)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(p.grad is None for p in model.parameters())
    assert not any("__nnsight__" in m.__dict__ or "forward" in m.__dict__ for m in model.modules())


def test_names() -> None:
    method = MambaLRP(build("mamba"))
    assert method.get_name() == "MambaLRP"
    assert method.has_convergence_delta()


@pytest.mark.parametrize("method", [MambaLRP, LaTIM])
def test_the_delta_can_be_computed_from_attributions(method: type) -> None:
    model, ids = without_biases(build("mamba")), ids_for()
    explained = method(model)
    relevance, delta = explained.attribute(ids, target=3, return_convergence_delta=True)
    found = explained.compute_convergence_delta(relevance, ids, target=3)
    torch.testing.assert_close(found, delta, rtol=1e-4, atol=1e-5)
    with pytest.raises(ValueError, match="convergence delta"):
        MambaRollout(model).compute_convergence_delta(relevance, ids)


def test_position_embeddings_are_not_the_start() -> None:
    class WithPositions(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.places = torch.nn.Embedding(32, 16)
            self.model = without_biases(build("mamba"))

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            places = self.places(torch.arange(ids.shape[1]).expand_as(ids))
            tokens = self.model.get_input_embeddings()(ids)
            return self.model(inputs_embeds=tokens + 0.0 * places).logits

    model, ids = WithPositions(), ids_for()
    expected = MambaLRP(model.model).attribute(ids, target=3)
    torch.testing.assert_close(MambaLRP(model).attribute(ids, target=3), expected)
