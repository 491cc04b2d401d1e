"""Where the published code of hidden attention departs from its equations (docs/differences.md).

Each departure is applied to the true operators here, and the published maps come out.
"""

from dataclasses import replace

import torch
from models import golden
from torch import Tensor

from captum_ssm.capture import Request, freeze
from captum_ssm.models import VisionMamba
from captum_ssm.operators import DiagonalOperator, PermutedOperator, TokenOperator

GOLDEN, WEIGHTS, _ = golden("vim_tiny")
LAYERS, CLS = range(4), 8


def recurrences() -> list[list[TokenOperator]]:
    """The two directions' operators of each layer."""
    model = VisionMamba.from_state_dict(WEIGHTS).eval()
    layers = freeze(Request.of(model, None, GOLDEN["image"])).layers
    return [layer.mixer.recurrence.parts for layer in layers]


def without_decay_at_cls(operator: TokenOperator) -> TokenOperator:
    if isinstance(operator, PermutedOperator):
        return replace(operator, inner=without_decay_at_cls(operator.inner))
    assert isinstance(operator, DiagonalOperator)
    dt = operator.dt.clone()
    dt[:, CLS] = 0  # in the middle of 17 tokens, whichever the direction
    return replace(operator, dt=dt)


def cls_row(parts: list[TokenOperator]) -> Tensor:
    """(D, L): the CLS token's row of both directions, its own entry left out."""
    row = torch.stack([part.matrix()[0, :, CLS] for part in parts]).sum(0)
    row[:, CLS] = 0
    return row


def published_rollout(rows: list[Tensor]) -> Tensor:
    """One row added to every row of the identity, and each row divided by its sum."""
    eye = torch.eye(rows[0].shape[0])
    matrices = [(row[None] + eye) / (row[None] + eye).sum(-1, keepdim=True) for row in rows]
    product = matrices[0]
    for matrix in matrices[1:]:
        product = matrix @ product
    return torch.cat([product[CLS, :CLS], product[CLS, CLS + 1 :]]).clamp(min=0)


def min_max(x: Tensor) -> Tensor:
    return (x - x.min()) / (x.max() - x.min())


def test_the_published_row_leaves_out_the_decay_and_the_diagonal_at_cls():
    cosines = []
    for n, parts in enumerate(recurrences()):
        published = GOLDEN[f"xai_b_L{n}"][0]
        shortcut = cls_row([without_decay_at_cls(part) for part in parts])
        torch.testing.assert_close(shortcut, published, atol=1e-4, rtol=1e-4)
        means = cls_row(parts).mean(0), published.mean(0)
        cosines.append(float(torch.cosine_similarity(*means, dim=0)))
    assert f"{min(cosines):.2f} {max(cosines):.2f}" == "-0.98 0.99"


def test_the_published_rollout_adds_one_row_to_all_and_divides_by_sums():
    rows = [GOLDEN[f"xai_b_L{n}"][0].mean(0) for n in LAYERS]
    assert min(float(row.min()) for row in rows) < 0
    torch.testing.assert_close(
        published_rollout(rows), GOLDEN["rollout_start0"].flatten(), atol=1e-6, rtol=1e-5
    )


def test_the_published_attribution_takes_positive_parts_and_the_residual_streams_gradient():
    rows = []
    for n in LAYERS:
        attention = min_max(GOLDEN[f"xai_b_L{n}"][0].clamp(min=0)).mean(0)
        gradient = min_max(GOLDEN[f"residual_grad_L{n}"].reshape(17, -1).clamp(min=0).amax(1))
        rows.append(attention * gradient)
    torch.testing.assert_close(
        published_rollout(rows), GOLDEN["mamba_attr_start0"].flatten(), atol=1e-6, rtol=1e-5
    )
