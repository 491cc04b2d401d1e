"""Relevance that begins at features of the stream or a state: which latent, at which token."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from captum_ssm.attr.flow.activations import Activations, ActivationStandIns, PropagatedRun
from captum_ssm.capture import FrozenCall, Readout
from captum_ssm.errors import UnsupportedModelError
from captum_ssm.mixers.memory import changes_of_state, check_directions, memory_of, state_of
from captum_ssm.utils.copies import original
from captum_ssm.utils.integers import count_of


class Feature(NamedTuple):
    """One feature at one token.

    Args:
        example (int): of the batch.
        token (int): the position.
        feature (int): the number of the feature.
        name (str): of the feature.
        value (float): how active it is there.
        relevance (float): its relevance there.

    Examples::

        >>> one = captum_ssm.attr.Feature(0, 3, 7, "feature 7", 1.5, 0.2)
        >>> one.name
        'feature 7'
    """

    example: int
    token: int
    feature: int
    name: str
    value: float
    relevance: float


@dataclass(frozen=True, eq=False)
class FeatureRelevance:
    """The relevance of what features write to the residual stream, or to a recurrent state.

    Args:
        relevance (Tensor): ``(B, L, F)``, of each feature at each token.
        rest (Tensor): ``(B, L)``, of what the features leave of the stream or state: the
            reconstruction error of an SAE, and its bias term.
        values (Tensor): ``(B, L, F)``, how active each feature is.
        names (list of str): of the features.
        score (Tensor): ``(B,)``, what is explained.

    Examples::

        >>> atoms = torch.eye(16)[:3]
        >>> readout = captum_ssm.Readout(model, "backbone.layers.0", atoms, decoder=atoms)
        >>> found = RelevanceFlow(model).features(input_ids, 5, readout=readout)
        >>> found.relevance.shape, found.rest.shape
        (torch.Size([1, 7, 3]), torch.Size([1, 7]))
        >>> len(found.top(4))
        4
    """

    relevance: Tensor
    rest: Tensor
    values: Tensor
    names: list[str]
    score: Tensor

    @property
    def total(self) -> Tensor:
        """The relevance ``(B, L)`` of the stream or state at each token: features and rest."""
        return self.relevance.sum(-1) + self.rest

    def top(self, k: int) -> list[Feature]:
        """The k features at single tokens with the largest relevance, of all examples.

        Raises:
            ValueError: for a k below 1.
        """
        flat = self.relevance.flatten()
        largest = flat.abs().topk(min(count_of("k", k, 1), flat.numel())).indices
        return [self._at(int(index)) for index in largest]

    def _at(self, index: int) -> Feature:
        _, L, F = self.relevance.shape
        example, token, feature = index // (L * F), index // F % L, index % F
        value, relevance = (
            float(x[example, token, feature]) for x in (self.values, self.relevance)
        )
        return Feature(example, token, feature, self.names[feature], value, relevance)


def check_decoder(readout: Readout) -> Tensor:
    """The decoder ``(F, E)`` of a readout, or that of a state.

    Raises:
        TypeError: for what is not a readout.
        ValueError: for a readout without a decoder.
    """
    if not isinstance(readout, Readout):
        raise TypeError(f"readout is a {type(readout).__name__}; expected a captum_ssm.Readout.")
    if readout.decoder is None:
        raise ValueError(
            "the readout has no decoder, which says what each feature writes to the stream or "
            "state; expected Readout(..., decoder=), of shape (F, E), or that of F states."
        )
    return readout.decoder


class _FeatureParts(NamedTuple):
    # Values of features and the coefficients at what they write, (B, L, F), and the relevance
    # (B, L) of all that they are features of.
    values: Tensor
    slopes: Tensor
    total: Tensor


def features_of(
    run: PropagatedRun,
    stand_ins: ActivationStandIns,
    readout: Readout,
    layers: Sequence[FrozenCall],
    score: Tensor,
) -> FeatureRelevance:
    """The relevance of a readout's features, from the coefficients of a run.

    Raises:
        UnsupportedModelError: for a layer that the score does not read, with other tokens, or
            without the state that is asked for.
        InputError: for directions without a state's shape.
    """
    with torch.no_grad():
        if readout.side == "state":
            parts = _of_state(run, readout, layers)
        else:
            parts = _of_stream(run, stand_ins, readout)
    relevance = parts.values * parts.slopes
    names = readout.names or [str(k) for k in range(relevance.shape[-1])]
    rest = parts.total - relevance.sum(-1)
    return FeatureRelevance(relevance, rest, parts.values, names, score.detach())


def _of_stream(
    run: PropagatedRun, stand_ins: ActivationStandIns, readout: Readout
) -> _FeatureParts:
    written, stream = _streams(stand_ins, readout)
    g = _coefficient(run, written, f"what {readout.layer} returns")
    total = (g * written.detach().to(g)).sum(-1)
    values = readout.encode(stream.detach()).to(g)
    return _FeatureParts(values, g @ check_decoder(readout).to(g).T, total)


def _of_state(run: PropagatedRun, readout: Readout, layers: Sequence[FrozenCall]) -> _FeatureParts:
    # The recurrence, run backwards, has the coefficient of each of its N states in turn.
    activations = _mixer_of(readout, layers, run)
    mixer, decoder = activations.mixer, check_decoder(readout)
    operator = memory_of(mixer)
    check_directions(operator, decoder)
    g = _coefficient(run, activations.mixed[0], f"what {readout.layer} reads of its state")
    state = state_of(mixer)
    values = readout.encode(state.flatten(2)).to(g)
    slopes, total = torch.zeros_like(values), torch.zeros_like(g[..., 0])
    parts = (operator.split_states(x.to(g)) for x in (state, decoder))
    for part, atoms, change in zip(*parts, changes_of_state(mixer), strict=True):
        slope = change.rmatvec(g)  # (B, L, D)
        slopes += slope @ atoms.T
        total += (slope * part).sum(-1)
    return _FeatureParts(values, slopes, total)


def _coefficient(run: PropagatedRun, x: Tensor, what: str) -> Tensor:
    coefficient = run.coefficient_at(x)
    if coefficient is None:
        raise UnsupportedModelError(
            f"the score does not depend on {what}; expected a layer before the one that is "
            "explained."
        )
    return coefficient.detach().to(torch.promote_types(coefficient.dtype, torch.float32))


def _mixer_of(readout: Readout, layers: Sequence[FrozenCall], run: PropagatedRun) -> Activations:
    # What the mixer that is read kept in its first call.
    for layer, activations in zip(layers, run.inside, strict=True):
        if original(layer.call.module) is readout.module:
            if layer.order is not None:
                memory_of(layer.mixer)  # raises
            return activations
    raise UnsupportedModelError(
        f"{readout.layer} is not a mixer that is run before the score is read; expected an earlier "
        "one."
    )


def _streams(stand_ins: ActivationStandIns, readout: Readout) -> tuple[Tensor, Tensor]:
    # What the layer returned, in the graph, and what the features are read from.
    for stream in stand_ins.streams:
        read = stream.after if readout.side == "output" else stream.before
        if stream.after and read:
            return stream.after[0], read[0]
    raise UnsupportedModelError(
        f"{readout.layer} is not run before the score is read, or takes or returns no vectors of "
        "tokens (B, L, E); expected an earlier block, or a module such as an MLP."
    )
