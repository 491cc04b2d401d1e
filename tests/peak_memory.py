"""The memory a process really takes for each request: what `test_memory.py` runs in one of its own.

Prints a JSON object: by request, the growth of the resident set at its highest, in bytes.
"""

import ctypes
import json
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from captum_ssm import (
    LaTIM,
    MambaAttribution,
    MambaLRP,
    MambaRollout,
    RawAttention,
    hidden_attention,
)
from captum_ssm import UnifiedImplicitAttention as Unified


def calls(model: Any) -> dict[str, tuple[Callable[..., Any], dict[str, Any]]]:
    """By request: what is called with the ids, and its options."""
    return {
        "row": (MambaRollout(model).attribute, {}),
        "streamed": (RawAttention(model).attribute, {"sign": "clamp"}),
        "rollout": (MambaRollout(model).rollout, {}),
        "hidden_attention": (partial(hidden_attention, model), {}),
        "lrp": (MambaLRP(model).attribute, {"target": 3}),
        "latim": (LaTIM(model).attribute, {"target": 3}),
        # Last: the small objects of a graph through a loop over tokens leave holes all over the
        # heap, and the next would touch as many pages for less.
        "attribution": (MambaAttribution(model).attribute, {"target": 3}),
        "unified": (Unified(model).attribute, {"target": 3}),
    }


def resident(name: str) -> int:
    status = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) << 10 for line in status if line.startswith(f"{name}:"))


def main(folder: str, length: int) -> None:
    torch.set_num_threads(1)
    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    size = model.get_input_embeddings().num_embeddings
    ids = torch.randint(size, (1, length), generator=torch.Generator().manual_seed(0))
    libc, found = ctypes.CDLL("libc.so.6"), {}
    for name, (call, options) in calls(model).items():
        call(inputs=ids[:, :16], **options)  # loads what is loaded once
        libc.malloc_trim(0)
        before = resident("VmRSS")
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")  # the highest, from now on
        call(inputs=ids, **options)
        found[name] = resident("VmHWM") - before
    print(json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
