"""Images and sound among the tokens of a text: which tokens they are, and where these lie."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

TEXT = "text"  # the name of what is no picture


@dataclass(frozen=True, eq=False)
class Picture:
    """An image, a frame of a video or a sound that a model reads as tokens of a text.

    Args:
        name (str): such as ``"image 1"``.
        tokens (tuple of int): which tokens of the text it is, row by row of its grid.
        grid (tuple of int, optional): rows and columns of the places that the tokens stand for;
            None for a sound, and for an image of which the places are not known. Default: None
        image (numpy.ndarray, optional): ``(H, W, 3)`` bytes: the picture as it was given, or as the
            model takes it. Default: None
        note (str, optional): how the places were found, or why they were not. Default: ``""``

    Examples::

        >>> picture = Picture("image 1", (3, 4, 5, 6), grid=(2, 2))
        >>> picture.cells.tolist()
        [[3, 4], [5, 6]]
    """

    name: str
    tokens: tuple[int, ...]
    grid: tuple[int, int] | None = None
    image: np.ndarray | None = None
    note: str = ""

    @property
    def cells(self) -> np.ndarray:
        """The tokens by their places, ``(rows, columns)``; in one row where these are not known."""
        return np.array(self.tokens).reshape(self.grid or (1, -1))

    def place(self, index: int) -> str:
        """What its token of an index is called, such as ``"image 1, row 2, column 3"``."""
        if self.grid is None:
            return f"{self.name}, token {index + 1}"
        row, column = divmod(index, self.grid[1])
        return f"{self.name}, row {row + 1}, column {column + 1}"


def picture_names(pictures: Sequence[Picture], texts: Sequence[str]) -> list[str]:
    """Texts of tokens, with places in the images in place of placeholders."""
    names = list(texts)
    for picture in pictures:
        for index, token in enumerate(picture.tokens):
            if token < len(names):
                names[token] = picture.place(index)
    return names


def owners(pictures: Sequence[Picture], L: int) -> list[int | None]:
    """Which picture each of L tokens is of; None for those of the text."""
    by_token: list[int | None] = [None] * L
    for k, picture in enumerate(pictures):
        for token in picture.tokens:
            by_token[token] = k
    return by_token
