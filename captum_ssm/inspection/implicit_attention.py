"""Direct access to the implicit attention matrices of every mixer."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from torch import Tensor

from captum_ssm.capture import (
    FrozenModel,
    Request,
    check_model,
    check_remote,
    exact_arithmetic,
    freeze,
)
from captum_ssm.errors import brief
from captum_ssm.mixers import check_components
from captum_ssm.models.token_grid import TokenGrid
from captum_ssm.operators import REDUCTIONS, TokenOperator
from captum_ssm.utils.allocator import workspace
from captum_ssm.utils.memory import memory_limit as limit_memory
from captum_ssm.utils.memory import require
from captum_ssm.utils.progress import progress


@workspace()
def hidden_attention(
    model: Any,
    inputs: Any,
    *,
    layers: int | str | Sequence[int | str] | None = None,
    formulation: str = "hidden",
    components: Iterable[str] | None = None,
    reduction: str | None = None,
    rows: int | Sequence[int] | Tensor | None = None,
    additional_forward_args: Any = None,
    check: bool = True,
    memory_limit: int | None = None,
    remote: bool | str = False,
) -> dict[str, Tensor]:
    r"""The implicit attention matrices of a model's mixers at one input.

    Args:
        model (nn.Module or nnsight model): holds the mixers.
        inputs, additional_forward_args (Tensor, Any): as for ``attribute`` of a method.
        layers (int, str or sequence, optional): mixers by index (negative from the end) or
            module path; None for all. Default: None
        formulation (str, optional): ``"hidden"``, the recurrence alone (Ali et al., eq. 13;
            acts on the activated convolution), or ``"unified"``, the whole mixer up to its
            output projection (Zimerman et al., eq. 9; acts on the input of the convolution).
            Default: ``"hidden"``
        components (iterable of str, optional): what ``"unified"`` folds in, any of ``"conv"``,
            ``"activation"``, ``"gate"``, ``"norm"``, ``"skip"``; None for those of the paper's
            equation of the family: all except the skip (and RWKV-4's token shift, its ``"conv"``).
            Default: None
        reduction (str, optional): ``"mean"``, ``"max"``, ``"min"`` or ``"prod"`` over the
            maps; None keeps them. Default: None
        rows (int, sequence or Tensor, optional): the query tokens wanted, an int, ``(R,)`` or
            ``(B, R)`` (negative from the end); None for all. Default: None
        check, remote (optional): as for :class:`~captum_ssm.attr.TokenAttribution`.
        memory_limit (int, optional): bytes for the result and the work on it; a request that
            needs more raises, and says what would fit. Default: None

    Returns:
        dict of str to Tensor: by module path, in forward order, ``(B, M, R, L)`` with one map
        per channel or head, or ``(B, R, L)`` with a reduction. Entry ``[..., i, j]`` is the
        weight of token j in the output at token i; zero on padding. A module's later visits, in
        models that share one between layers, carry ``":1"``, ``":2"``, ...

    Raises:
        ValueError: for an unsupported model (:class:`~captum_ssm.UnsupportedModelError`), a
            mixer that is not reproduced (:class:`~captum_ssm.ReconstructionError`), or
            arguments that do not fit.
        TypeError: for inputs of a wrong type or dtype.

    Examples::

        >>> maps = hidden_attention(model, input_ids, layers=-1, reduction="mean")
        >>> {path: m.shape for path, m in maps.items()}
        {'backbone.layers.1.mixer': torch.Size([1, 7, 7])}
    """
    folded = check_components(formulation, components)
    if reduction is not None and reduction not in REDUCTIONS:
        raise ValueError(f"reduction is {brief(reduction)}; expected one of {REDUCTIONS}, or None.")
    check_remote(remote, check_model(model), None)
    request = Request.of(model, None, inputs, additional_forward_args, remote)
    frozen = freeze(request, query=False, check=check)
    visited = frozen.select(layers)
    maps = {}
    with limit_memory(memory_limit), exact_arithmetic():
        operators: Iterable[TokenOperator] = (
            layer.mixer.operator(formulation, folded) for layer in visited
        )
        if memory_limit is not None:
            if reduction is None:  # its operators, far smaller than its maps, are made first
                operators = list(operators)
            counts = [op.maps for op in operators] if reduction is None else [1] * len(visited)
            _require_memory(frozen, counts, rows)
        for layer, operator in zip(progress(visited, "layers"), operators, strict=True):
            if rows is None:
                maps[layer.name] = frozen.mask_matrix(operator.matrix(reduction))
            else:
                index = frozen.row_index(rows, layer.shape)
                map_rows = operator.rows(index, reduction)
                maps[layer.name] = _mask_rows(map_rows, index, frozen)
    return maps


def token_grids(
    model: Any, inputs: Any, *, additional_forward_args: Any = None, check: bool = True
) -> dict[str, TokenGrid | None]:
    """Which token of each mixer is which patch of the input: the grids of its maps.

    A token lies where the places lie that it is made of, as measured on the model's own graph, or
    as its ``token_grid`` tells. Tokens that are made of no place (CLS, registers) are in no grid.

    Args:
        model, inputs, additional_forward_args, check: as for :func:`hidden_attention`.

    Returns:
        dict of str to TokenGrid: by module path, in forward order, as :func:`hidden_attention`
        names its maps; None where the tokens form no grid, and for texts.

    Raises:
        ValueError, TypeError: as for :func:`hidden_attention`.

    Examples::

        >>> vim = VisionMamba(image_size=32, patch_size=8, classes=5, width=16, depth=2).eval()
        >>> grids = captum_ssm.token_grids(vim, torch.rand(1, 3, 32, 32))
        >>> grids["layers.0.mixer"].shape
        (4, 4)
    """
    request = Request.of(check_model(model), None, inputs, additional_forward_args)
    frozen = freeze(request, query=False, check=check)
    return {layer.name: frozen.grids[layer.step] for layer in frozen.layers}


def _require_memory(
    frozen: FrozenModel, maps: list[int], rows: int | Sequence[int] | Tensor | None
) -> None:
    (B, L), size = frozen.shape, frozen.layers[0].call.dtype.itemsize
    R = L if rows is None else frozen.row_index(rows).shape[1]

    def needs(maps: int, rows: int) -> int:
        return B * maps * rows * L * size

    require(
        needs(sum(maps), R),
        f"hidden_attention of {len(maps)} layers, {sum(maps)} maps and {R} rows",
        [
            ("reduction='mean'", needs(len(maps), R)),
            ("one layer", needs(max(maps), R)),
            ("rows=-1, one row", needs(sum(maps), 1)),
            ("reduction='mean', rows=-1", needs(len(maps), 1)),
        ],
    )


def _mask_rows(map_rows: Tensor, index: Tensor, frozen: FrozenModel) -> Tensor:
    if frozen.mask is None or frozen.mask.shape[1] != map_rows.shape[-1]:
        return map_rows
    masks = frozen.mask.gather(1, index)[..., None] * frozen.mask[:, None, :]  # (B, R, L)
    return map_rows * (masks if map_rows.dim() == 3 else masks[:, None])
