"""The WKV average of RWKV-4 and Vision-RWKV as a form."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

from torch import Tensor

from captum_ssm.operators import wkv_operator
from captum_ssm.scans._arguments import working_dtype
from captum_ssm.scans._candidate import Candidate
from captum_ssm.scans._form import register_scan


@register_scan(
    names={
        "k": ("key",),
        "v": ("value",),
        "decay": ("w", "time_decay"),
        "bonus": ("u", "time_first"),
    }
)
def wkv(k: Tensor, v: Tensor, decay: Tensor, bonus: Tensor) -> Iterator[Candidate]:
    """k and v ``(B, L, D)``, decay and bonus one per channel; of the past or of all tokens.

    The decay is given as it is, as its logarithm, or with its sign turned.
    """
    D = v.shape[-1]
    if v.dim() != 3 or k.shape != v.shape or decay.numel() != D or bonus.numel() != D:
        return
    dtype = working_dtype(k, v)
    key, w, u = k.to(dtype), decay.to(dtype).reshape(-1), bonus.to(dtype).reshape(-1)
    for two_way, rate in product((False, True), (w.exp(), w, -w)):
        yield Candidate(
            operator=wkv_operator(key, rate, u, two_way=two_way), values=v, layouts=("BLD",)
        )
