"""Knockout of edges: what some tokens write is removed from what others read."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor

from captum_ssm.interventions.edges import ProductEdges
from captum_ssm.interventions.editing import edited
from captum_ssm.interventions.left import with_edges
from captum_ssm.interventions.open_mixer import OpenMixer
from captum_ssm.interventions.selection import Layers, Tokens, mask_of
from captum_ssm.mixers.components import check_formulation
from captum_ssm.utils.blocks import contextmanager


@contextmanager
def knockout(
    model: Any,
    *,
    sources: Tokens = None,
    targets: Tokens = None,
    layers: Layers = None,
    heads: Tokens = None,
    formulation: str = "hidden",
    keep: bool = False,
    renormalize: bool = False,
    check: bool = True,
) -> Iterator[None]:
    r"""Run the model, inside the block, without what ``targets`` read from ``sources``.

    In each chosen layer the output of the recurrence at every token i of ``targets`` loses

    .. math::
        \sum_{j \in \mathrm{sources}} \alpha_{ij} v_j,

    by one masked scan. Gate, norm and output projection follow as the model computes them, a
    norm's scale anew, and all later layers run on the result (Endy et al., `Mamba Knockout
    <https://arxiv.org/abs/2505.24244>`_, 2025; for attention Geva et al., 2023). The model is
    called as usual, by its own forward or by Captum's methods. Gradients with respect to inputs
    and activations include the removed part and its coefficients; the parameters of the edited
    mixers count as constants in it. Each mixer is frozen at the input that the layer has in this
    run, and compared with what the module returned.

    Positions count the tokens of a layer's input. The skip connection of a mixer and the residual
    stream are not cut: each token keeps its own information. The short convolution before a scan is
    part of a token's values.

    Args:
        model (nn.Module or nnsight model): the model that the block runs.
        sources (int, slice, sequence or Tensor, optional): tokens that are no longer read:
            positions, negative from the end, or a bool mask; ``(L,)``, or one row per example.
            None for all. Default: None
        targets (int, slice, sequence or Tensor, optional): tokens that no longer read them, given
            alike; a token's own edge is among them where it is a source too. Default: None
        layers (int, str, slice or sequence, optional): mixers by index or module path; None for
            all. Default: None
        heads (int, slice, sequence or Tensor, optional): maps of the mixer, heads or channels;
            None for all. Default: None
        formulation (str, optional): ``"hidden"``: the edges of the recurrence, after which the norm
            is computed anew. ``"unified"``: those of the whole mixer up to its output projection
            (Zimerman et al., 2025, with the paper's components), so that a source is the mixer's
            input at a token: the convolution is part of the edge, and the norm stays as it is.
            Default: ``"hidden"``
        keep (bool, optional): keep only these edges, and remove all others of the layers.
            Default: False
        renormalize (bool, optional): in layers of softmax attention, normalize the probabilities
            that are left, as a mask before the softmax does; takes memory quadratic in the
            tokens there. Default: False
        check (bool, optional): compare each frozen mixer with its module. Default: True

    Raises:
        ValueError: for an unknown formulation, a layer that is not there or is in two knockouts at
            once, or ``renormalize`` with ``"unified"``.
        UnsupportedModelError: on leaving, where the block did not reach a layer; for a mixer whose
            norm cannot be computed anew.
        InputError: from the run, for tokens outside the sequence.
        ReconstructionError: from the run, for a mixer that computes something else.

    Examples::

        >>> with captum_ssm.interventions.knockout(model, sources=2, targets=-1, layers=[0]):
        ...     logits = model(input_ids).logits
        >>> torch.equal(logits[:, :-1], model(input_ids).logits[:, :-1])  # earlier tokens' rows
        True
    """
    check_formulation(formulation)
    if renormalize and formulation != "hidden":
        raise ValueError(
            "renormalize=True was given with formulation='unified', whose edges are those of the "
            "frozen mixer; expected formulation='hidden'."
        )

    def edit(opened: OpenMixer) -> Tensor:
        operator = opened.mixer.operator(formulation)
        B, L, _, M = operator.sizes
        edges = ProductEdges(
            targets=mask_of("targets", targets, (B, L), operator.device),
            sources=mask_of("sources", sources, (B, L), operator.device),
            heads=mask_of("heads", heads, (1, M), operator.device, "heads or channels")[0],
            keep=keep,
            renormalize=renormalize,
        )
        return with_edges(opened, edges, None if formulation == "hidden" else operator)

    with edited(model, slice(None) if layers is None else layers, edit, check=check):
        yield
