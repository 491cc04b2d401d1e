"""One edge of a token mixer."""

from __future__ import annotations

from dataclasses import dataclass
from math import nan


@dataclass(frozen=True)
class Edge:
    """An edge of a token mixer: what one token reads from another one in a layer.

    Args:
        layer (str): the mixer's path in the model.
        target (int): the token that reads.
        source (int): the token that is read.
        relevance (float, optional): what the edge carries of the score. Default: nan
        head (int, optional): the map of the mixer, a head or a channel; None for all of them.
            Default: None
        example (int, optional): the example of the batch; None for every example. Default: None

    Examples::

        >>> Edge("backbone.layers.0.mixer", target=6, source=2).head is None
        True
    """

    layer: str
    target: int
    source: int
    relevance: float = nan
    head: int | None = None
    example: int | None = None
