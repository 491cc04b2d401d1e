"""The memory a process really takes for each request: what `test_memory.py` runs in one of its own.

Prints a JSON object: by request, the growth of the resident set at its highest, in bytes.
"""

import ctypes
import json
import sys
from pathlib import Path

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

RUNS = {
    "row": lambda model, ids: MambaRollout(model).attribute(ids),
    "streamed": lambda model, ids: RawAttention(model).attribute(ids, sign="clamp"),
    "rollout": lambda model, ids: MambaRollout(model).rollout(ids),
    "hidden_attention": lambda model, ids: hidden_attention(model, ids),
    # Last: the small objects of a graph leave holes behind, which the next would fill first.
    "attribution": lambda model, ids: MambaAttribution(model).attribute(ids, target=3),
    "unified": lambda model, ids: Unified(model).attribute(ids, target=3),
    "latim": lambda model, ids: LaTIM(model).attribute(ids, target=3),
    "lrp": lambda model, ids: MambaLRP(model).attribute(ids, target=3),
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
    for name, run in RUNS.items():
        run(model, ids[:, :16])  # loads what is loaded once
        libc.malloc_trim(0)
        before = resident("VmRSS")
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")  # the highest, from now on
        run(model, ids)
        found[name] = resident("VmHWM") - before
    print(json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
