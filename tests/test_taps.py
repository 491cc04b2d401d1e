"""tap_rows against its definition, in every form and instruction set."""

from __future__ import annotations

import pytest
import torch
from test_ops import DEVICES, at, run_again
from torch import Tensor

from captum_ssm import ops

# batch, maps, channels a map, rows, length, columns, taps
SHAPES = [
    (1, 1, 1, 1, 1, 1, 1),
    (2, 3, 1, 2, 5, 5, 8),
    (1, 2, 4, 3, 33, 17, 4),
    (2, 5, 2, 3, 100, 100, 4),
    (1, 4, 1, 2, 130, 64, 3),
    (1, 1, 3, 1, 65, 65, 1),
]


def definition(rows: Tensor, values: Tensor, left: Tensor | None, columns: int) -> Tensor:
    taps, _, channels, length = values.shape
    rows = rows.double().repeat_interleave(channels // rows.shape[1], 1)
    out = torch.zeros(*rows.shape[:3], columns, dtype=torch.float64)
    for k in range(taps):
        for j in range(min(columns, length - k)):
            out[..., j] += rows[..., j + k] * values[k, ..., j + k].double()[..., None]
    return out if left is None else out * left.double()[..., None]


@pytest.mark.parametrize("form", [ops.tap_rows, ops.tap_rows_torch], ids=["kernel", "torch"])
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["f32", "f64"])
@pytest.mark.parametrize("with_left", [False, True])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_matches_the_definition(shape, with_left, dtype, device, form):
    B, M, P, R, L, C, K = shape
    g = torch.Generator().manual_seed(0)
    rows = torch.randn(B, M, R, L, generator=g).to(dtype)
    values = torch.randn(K, B, M * P, L, generator=g).to(dtype)
    left = torch.randn(B, M * P, R, generator=g).to(dtype) if with_left else None
    # Part of a larger tensor, as LaTIM fills it; what stands beside it stays.
    whole = torch.full((B, M * P + 2, R, C), float("nan"), dtype=dtype, device=device)
    form(*at(device, (rows, values, left)), whole[:, 1:-1])
    whole = whole.cpu()
    expected = definition(rows, values, left, C)
    tolerance = 1e-6 if dtype == torch.float32 else 1e-14
    error = (whole[:, 1:-1].double() - expected).abs().max() / expected.abs().max()
    assert error < tolerance
    assert whole[:, 0].isnan().all()
    assert whole[:, -1].isnan().all()


def test_any_layout():
    g = torch.Generator().manual_seed(0)
    rows = torch.randn(2, 3, 7, 4, generator=g).transpose(2, 3)
    values = torch.randn(2, 2, 7, 3, generator=g).transpose(2, 3)
    out = torch.empty(2, 3, 4, 7)
    ops.tap_rows(rows, values, None, out)
    torch.testing.assert_close(out.double(), definition(rows, values, None, 7), atol=1e-6, rtol=0)


@pytest.mark.parametrize("device", DEVICES)
def test_opcheck(device):
    args = (torch.randn(1, 2, 3, 9), torch.randn(2, 1, 4, 9), torch.randn(1, 4, 3))
    args = at(device, (*args, torch.empty(1, 4, 3, 6)))
    torch.library.opcheck(torch.ops.captum_ssm.tap_rows, args)


@pytest.mark.parametrize(
    ("shapes", "message"),
    [
        (((1, 3, 3, 9), (2, 1, 4, 9), (1, 4, 3)), "rows has shape"),
        (((1, 2, 3, 9), (2, 1, 3, 9), (1, 4, 3)), "values has shape"),
        (((1, 2, 3, 9), (2, 1, 4, 9), (1, 3, 4)), "left has shape"),
        (((1, 2, 3, 5), (2, 1, 4, 5), (1, 4, 3)), "rows has shape"),  # fewer tokens than columns
    ],
)
def test_shapes_are_checked(shapes, message):
    with pytest.raises(ValueError, match=message):
        ops.tap_rows(*(torch.zeros(s) for s in shapes), torch.empty(1, 4, 3, 6))


def test_dtypes_and_dimensions_are_checked():
    rows, values, out = torch.zeros(1, 2, 3, 9), torch.zeros(2, 1, 4, 9), torch.empty(1, 4, 3, 6)
    with pytest.raises(TypeError, match="one dtype"):
        ops.tap_rows(rows, values.double(), None, out)
    with pytest.raises(ValueError, match="rows has shape"):
        ops.tap_rows(rows[0, 0, 0], values, None, out)


@pytest.mark.skipif(not ops.extension_loaded(), reason="no kernels")
def test_the_kernel_guards_memory_itself():
    rows, values = torch.zeros(1, 2, 3, 9), torch.zeros(2, 1, 4, 9)
    with pytest.raises(RuntimeError, match="contiguous"):
        torch.ops.captum_ssm.tap_rows(rows, values, None, torch.empty(1, 4, 9, 3).mT)
    with pytest.raises(RuntimeError, match="do not agree"):
        torch.ops.captum_ssm.tap_rows(rows, values[..., :8], None, torch.empty(1, 4, 3, 9))
    with pytest.raises(RuntimeError, match="one dtype"):
        torch.ops.captum_ssm.tap_rows(rows, values.double(), None, torch.empty(1, 4, 3, 9))


@pytest.mark.skipif(not ops.extension_loaded(), reason="no kernels")
@pytest.mark.parametrize("isa", ["avx2", "portable"])
def test_other_instruction_sets(isa):
    run_again("definition and kernel", __file__, CAPTUM_SSM_ISA=isa)
