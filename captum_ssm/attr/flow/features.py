"""Relevance that begins at features of the residual stream: which latent, at which token."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from captum_ssm.attr.flow.activations import ActivationStandIns, PropagatedRun
from captum_ssm.capture import Readout
from captum_ssm.errors import UnsupportedModelError
from captum_ssm.utils.integers import as_index


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
    """The relevance of what features write to the residual stream.

    Args:
        relevance (Tensor): ``(B, L, F)``, of each feature at each token.
        rest (Tensor): ``(B, L)``, of what the features leave of the stream: the reconstruction
            error of an SAE, and its bias term. With the features it adds up to the stream's.
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
        """The relevance ``(B, L)`` of the stream's tokens, features and rest together."""
        return self.relevance.sum(-1) + self.rest

    def top(self, k: int) -> list[Feature]:
        """The k features at single tokens with the largest relevance, of all examples.

        Raises:
            ValueError: for a k below 1.
        """
        count = as_index(k)
        if count is None or count < 1:
            raise ValueError(f"k is {k!r}; expected an integer of at least 1.")
        flat = self.relevance.flatten()
        largest = flat.abs().topk(min(count, flat.numel())).indices
        return [self._at(int(place)) for place in largest]

    def _at(self, place: int) -> Feature:
        _, L, F = self.relevance.shape
        example, token, feature = place // (L * F), place // F % L, place % F
        value, relevance = (
            float(x[example, token, feature]) for x in (self.values, self.relevance)
        )
        return Feature(example, token, feature, self.names[feature], value, relevance)


def check_decoder(readout: Readout) -> Tensor:
    """The decoder ``(F, E)`` of a readout.

    Raises:
        TypeError: for what is not a readout.
        ValueError: for a readout without a decoder.
    """
    if not isinstance(readout, Readout):
        raise TypeError(f"readout is a {type(readout).__name__}; expected a captum_ssm.Readout.")
    if readout.decoder is None:
        raise ValueError(
            "the readout has no decoder, which says what each feature writes to the stream; "
            "expected Readout(..., decoder=), of shape (F, E)."
        )
    return readout.decoder


def features_of(
    run: PropagatedRun, stand_ins: ActivationStandIns, readout: Readout, score: Tensor
) -> FeatureRelevance:
    """The relevance of a readout's features, from the coefficients of a run.

    Raises:
        UnsupportedModelError: for a layer that the score does not read, or with other tokens.
    """
    decoder = check_decoder(readout)
    written, read = _streams(stand_ins, readout)
    coefficient = run.coefficient_at(written)
    if coefficient is None:
        raise UnsupportedModelError(
            f"the score does not depend on what {readout.layer} returns; expected a layer before "
            "the one that is explained."
        )
    g, stream = coefficient.detach().float(), written.detach().float()
    with torch.no_grad():
        values = readout.encode(read.detach()).float()
    relevance = values * (g @ decoder.to(g).T)
    rest = (g * stream).sum(-1) - relevance.sum(-1)
    names = readout.names or [str(k) for k in range(values.shape[-1])]
    return FeatureRelevance(relevance, rest, values, names, score.detach())


def _streams(stand_ins: ActivationStandIns, readout: Readout) -> tuple[Tensor, Tensor]:
    # What the layer returned, in the graph, and what the features are read from.
    found: Sequence[Tensor] = ()
    for stream in stand_ins.streams:
        read = stream.after if readout.side == "output" else stream.before
        found = [*stream.after[:1], *read[:1]]
        if len(found) == 2:
            return found[0], found[1]
    raise UnsupportedModelError(
        f"{readout.layer} is not run before the score is read, or takes or returns no vectors of "
        "tokens (B, L, E); expected an earlier block, or a module such as an MLP."
    )


def blocks_read_by(readout: Readout) -> Callable[..., ActivationStandIns]:
    """A maker of stand-ins, for a request, that keep what the readout's layer returns."""
    return lambda request: ActivationStandIns(request, {readout.module})
