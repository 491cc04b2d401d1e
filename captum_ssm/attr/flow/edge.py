"""One edge of a relevance flow."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class Edge:
    """A token that reads another one, in one token mixer.

    Args:
        layer (str): the mixer's path in the model.
        target (int): the token that reads.
        source (int): the token that is read.
        relevance (float, optional): what flows along the edge, in units of the explained score;
            NaN where that is not known. Default: NaN
        head (int, optional): the mixer's map, a head or a channel; None for all of them together.
            Default: None
        example (int, optional): the example of the batch; None for every one. Default: None

    Examples::

        >>> Edge("backbone.layers.1.mixer", target=6, source=2, relevance=0.5).source
        2
    """

    layer: str
    target: int
    source: int
    relevance: float = math.nan
    head: int | None = None
    example: int | None = None
