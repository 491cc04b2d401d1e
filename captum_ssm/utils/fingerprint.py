"""Whether a module still holds what it held when it was looked at."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from captum_ssm.utils.clones import is_plain, version_of

# So many entries of each tensor are compared, at even distances.
_ENTRIES = 64
_NUMBERS = frozenset((bool, complex, float, int, str))


def fingerprint(module: nn.Module) -> int:
    """A number that changes where a module's weights, buffers or attributes do.

    Of each tensor it holds how often it was written to, which does not count what is written into
    ``data``, and 64 of its entries, which do. Of attributes it holds numbers and texts, also those
    in a dict. Weights that lie elsewhere, as offloaded ones do between runs, are left out.

    Examples::

        >>> model = nn.Linear(2, 2)
        >>> before = fingerprint(model)
        >>> model.weight.data.mul_(2)
        >>> fingerprint(model) == before
        False
    """
    entries = defaultdict[torch.device, list[Tensor]](list)
    written = 0
    with torch.no_grad(), torch._C.DisableTorchFunctionSubclass():
        for x in (*module.parameters(), *module.buffers()):
            written += version_of(x)
            if is_plain(x) and not x.is_meta:
                entries[x.device].append(_some(x.detach()))
        held = [torch.cat(some).cpu().numpy().tobytes() for some in entries.values()]
    return hash((written, *held, *_numbers(module)))


def _some(x: Tensor) -> Tensor:
    # The bytes of some entries.
    each = max(1, int(_ENTRIES ** (1 / max(1, x.dim()))))
    chosen = x[tuple(slice(None, None, max(1, -(-n // each))) for n in x.shape)]
    return chosen.resolve_conj().resolve_neg().reshape(-1).contiguous().view(torch.uint8)


def _numbers(module: nn.Module) -> Iterator[Any]:
    for part in module.modules():
        for value in vars(part).values():
            values = value.values() if type(value) is dict else (value,)
            yield from (number for number in values if type(number) in _NUMBERS)
