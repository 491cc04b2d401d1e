"""The copying task: a string of symbols, a separator, and the same string again.

``b x q a <SEP> b x q a`` is one example of length four.  A causal model that reads it can only
predict the part after ``<SEP>`` by recalling the part before, one source token per prediction, so
the token that every prediction rests on is known exactly.  That makes the task a yardstick for
attribution: an explanation of a model that copies well should point along a diagonal.

Layout of an example of length ``n`` (``2 * n + 1`` tokens)::

    position   0 .. n-1    n      n+1 .. 2n
    token      source      <SEP>  copy

Position ``i`` predicts token ``i + 1``.  The predictions that copy are those made at positions
``n .. 2n - 1``; the one made at ``i`` has its answer at the source position ``i - n``.

The vocabulary needs no tokenizer: token ids 0 to 25 are the letters ``a`` to ``z`` and id 26 is
``<SEP>``.  Symbols are drawn independently and uniformly, so they repeat within a string and a
model cannot rely on the preceding symbol alone to find its position.

Training and held-out strings are told apart by the string itself (:func:`is_held_out`), not by the
seed: one string in sixteen, chosen by a fixed hash, is reserved.  :func:`make_batch` never returns
a reserved string and :func:`held_out_batch` returns nothing else, so no choice of seeds can leak a
held-out string into training.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = [
    "LENGTHS",
    "SEPARATOR_ID",
    "SYMBOLS",
    "VOCABULARY",
    "CopyBatch",
    "alignment",
    "decode",
    "encode",
    "held_out_batch",
    "is_held_out",
    "make_batch",
    "predicting_positions",
    "source_positions",
]

SYMBOLS: tuple[str, ...] = tuple("abcdefghijklmnopqrstuvwxyz")
SEPARATOR = "<SEP>"
VOCABULARY: tuple[str, ...] = (*SYMBOLS, SEPARATOR)
SEPARATOR_ID = len(SYMBOLS)
VOCABULARY_SIZE = len(VOCABULARY)

MIN_LENGTH = 16
MAX_LENGTH = 24
LENGTHS: tuple[int, ...] = tuple(range(MIN_LENGTH, MAX_LENGTH + 1))

# The hash must be the same on every machine and in every release, hence plain integer arithmetic
# on small numbers instead of Python's hash() or a random table.
_HASH_BASE = 131
_HASH_MODULUS = 1_000_003
_HELD_OUT_ONE_IN = 16

_IDS = {symbol: index for index, symbol in enumerate(VOCABULARY)}


@dataclass(frozen=True)
class CopyBatch:
    """Examples of one length.

    Args:
        tokens (Tensor): Token ids, shape ``(examples, 2 * length + 1)``, dtype ``int64``.
        length (int): The number of symbols in each source string.

    Examples::

        >>> batch = copying.CopyBatch(copying.encode(["a", "b", "<SEP>", "a", "b"])[None], 2)
        >>> copying.decode(batch.prompt[0]), copying.decode(batch.targets[0])
        (['a', 'b', '<SEP>'], ['a', 'b'])
    """

    tokens: Tensor
    length: int

    @property
    def inputs(self) -> Tensor:
        """What a model reads: all tokens but the last, after which nothing is predicted."""
        return self.tokens[:, :-1]

    @property
    def source(self) -> Tensor:
        """The source strings, shape ``(examples, length)``."""
        return self.tokens[:, : self.length]

    @property
    def prompt(self) -> Tensor:
        """The source strings with the separator: where generation of the copy starts."""
        return self.tokens[:, : self.length + 1]

    @property
    def targets(self) -> Tensor:
        """The tokens to predict at :func:`predicting_positions`, shape ``(examples, length)``."""
        return self.tokens[:, self.length + 1 :]


def encode(symbols: Iterable[str]) -> Tensor:
    """Token ids of vocabulary entries.

    Args:
        symbols (iterable of str): The entries; a plain string of letters will do.

    Returns:
        The ids, int64.

    Examples::

        >>> copying.encode("abz")
        tensor([ 0,  1, 25])
    """
    return torch.tensor([_IDS[symbol] for symbol in symbols], dtype=torch.int64)


def decode(tokens: Tensor | Sequence[int]) -> list[str]:
    """Vocabulary entries of token ids.

    Args:
        tokens (Tensor or sequence of int): The ids, ``(L,)``.

    Returns:
        The entries, a list.

    Examples::

        >>> copying.decode([0, 26])
        ['a', '<SEP>']
    """
    return [VOCABULARY[int(token)] for token in tokens]


def predicting_positions(length: int) -> Tensor:
    """Input positions whose prediction is a copied token, in order: ``length .. 2 * length - 1``.

    The first of them holds the separator; each of the others holds the token just copied.

    Args:
        length (int): The number of symbols in the source string.

    Returns:
        The positions, ``(length,)``.

    Examples::

        >>> copying.predicting_positions(3)
        tensor([3, 4, 5])
    """
    return torch.arange(length, 2 * length)


def source_positions(length: int) -> Tensor:
    """For each of :func:`predicting_positions`, where in the source its answer stands.

    Args:
        length (int): The number of symbols in the source string.

    Returns:
        The positions, ``(length,)``.

    Examples::

        >>> copying.source_positions(3)
        tensor([0, 1, 2])
    """
    return predicting_positions(length) - length


def alignment(length: int, offsets: Sequence[int] = (0,)) -> Tensor:
    """Ground truth as a mask over (predicting position, input position).

    Args:
        length (int): The number of symbols in the source string.
        offsets (sequence of int, optional): Diagonals to mark, counted from the answer's own
            position.  ``(0,)`` marks the answer alone.  A model that finds its position by the
            symbols before the answer draws on those as well; ``(-1, 0, 1)`` accepts the direct
            neighbors.  Default: (0,)

    Returns:
        A boolean tensor of shape ``(length, 2 * length)``: row ``k`` is the prediction made at
        ``predicting_positions(length)[k]``, columns are the positions of :attr:`CopyBatch.inputs`.
        Neighbors outside the source string are dropped.

    Examples::

        >>> copying.alignment(2).int()
        tensor([[1, 0, 0, 0],
                [0, 1, 0, 0]], dtype=torch.int32)
    """
    mask = torch.zeros(length, 2 * length, dtype=torch.bool)
    rows = torch.arange(length)
    for offset in offsets:
        columns = source_positions(length) + offset
        inside = (columns >= 0) & (columns < length)
        mask[rows[inside], columns[inside]] = True
    return mask


def is_held_out(source: Tensor) -> Tensor:
    """Whether each source string, a row of token ids, is reserved for evaluation.

    A polynomial hash over all symbols decides, so changing any one symbol redraws the lot and the
    reserved strings look like the others.

    Args:
        source (Tensor): Token ids, one string per row, ``(B, length)``.

    Returns:
        Booleans, ``(B,)``.

    Examples::

        >>> batch = copying.held_out_batch(4, torch.Generator().manual_seed(0))
        >>> copying.is_held_out(batch.source)
        tensor([True, True, True, True])
    """
    digest = torch.zeros(source.shape[0], dtype=torch.int64, device=source.device)
    for column in source.unbind(dim=1):
        digest = (digest * _HASH_BASE + column + 1) % _HASH_MODULUS
    return digest % _HELD_OUT_ONE_IN == 0


def _draw(count: int, length: int, generator: torch.Generator, held_out: bool) -> Tensor:
    """``count`` distinct strings from one side of the split, by rejection."""
    kept = torch.empty(0, length, dtype=torch.int64)
    # A round that adds nothing can happen by chance; the bound only turns a request that cannot
    # be met (more strings than there are) into an error.
    for _ in range(1000):
        wanted = (count - len(kept)) * (_HELD_OUT_ONE_IN if held_out else 1) + 8
        drawn = torch.randint(len(SYMBOLS), (wanted, length), generator=generator)
        kept = torch.cat([kept, drawn[is_held_out(drawn) == held_out]])
        kept = _without_repeats(kept)[:count]
        if len(kept) == count:
            return kept
    raise ValueError(
        f"could not draw {count} distinct strings of length {length}; ask for fewer, or for longer "
        "ones."
    )


def _without_repeats(rows: Tensor) -> Tensor:
    """The rows without repetitions, in order of first appearance.

    ``torch.unique`` sorts, and cutting a sorted list short would favor the strings that start
    with early letters.
    """
    _, group = torch.unique(rows, dim=0, return_inverse=True)
    first = torch.full((int(group.max()) + 1 if len(group) else 0,), len(rows))
    first.scatter_reduce_(0, group, torch.arange(len(rows)), reduce="amin")
    return rows[first.sort().values]


def _assemble(source: Tensor) -> CopyBatch:
    separator = torch.full((source.shape[0], 1), SEPARATOR_ID, dtype=torch.int64)
    return CopyBatch(torch.cat([source, separator, source], dim=1), source.shape[1])


def _length(length: int | None, generator: torch.Generator) -> int:
    if length is not None:
        return length
    return int(torch.randint(MIN_LENGTH, MAX_LENGTH + 1, (), generator=generator))


def make_batch(n: int, generator: torch.Generator, length: int | None = None) -> CopyBatch:
    """A batch of ``n`` distinct training examples.

    Args:
        n (int): The number of examples.
        generator (torch.Generator): The source of all randomness; the same state gives the same
            batch.
        length (int, optional): The number of symbols in a source string.  None draws one of
            :data:`LENGTHS` for the whole batch, which spares the model padding.  Default: None

    Returns:
        The batch.

    Examples::

        >>> copying.make_batch(8, torch.Generator().manual_seed(0), length=16).inputs.shape
        torch.Size([8, 32])
    """
    return _assemble(_draw(n, _length(length, generator), generator, held_out=False))


def held_out_batch(n: int, generator: torch.Generator, length: int | None = None) -> CopyBatch:
    """A batch of ``n`` distinct examples that :func:`make_batch` can never return.

    The arguments are those of :func:`make_batch`.

    Returns:
        The batch.

    Examples::

        >>> copying.held_out_batch(8, torch.Generator().manual_seed(0), 20).targets.shape
        torch.Size([8, 20])
    """
    return _assemble(_draw(n, _length(length, generator), generator, held_out=True))
