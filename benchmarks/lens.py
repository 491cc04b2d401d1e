"""Maps of one layer compared with TransformerLens's ``compute_effective_attention``.

Both read the same random-weight model of mamba-130m's or mamba2-130m's layer shape, and both start
from token ids: each side's time holds its own forward pass and the recording of what it needs, and
ours the check of the maps against the layer's output. `lens_maps` is TransformerLens's time without
its forward pass. It builds every map; `hidden_attention` is asked for the same maps (every channel
or head) and for their mean, which is what rollouts and heat maps use. Both sides are compared
first. Memory is the peak of a process that does nothing else, less that of one that only runs the
model.

Needs an environment of its own (its requirements are not ours):

    python -m venv .venv-lens && .venv-lens/bin/pip install torch==2.13.0
    .venv-lens/bin/pip install transformer-lens
    .venv-lens/bin/pip install --no-build-isolation .
    .venv-lens/bin/python benchmarks/lens.py
"""

from __future__ import annotations

import json
from collections.abc import Callable
from importlib.metadata import version
from typing import Any

import torch
import transformers
from _memory import peak_mib
from _timing import keep, options, parsed, seconds

# (longest for TransformerLens, lengths): beyond, it would need more than about 16 GiB.
KINDS = {"mamba": (128, (64, 128, 512, 1024)), "mamba2": (2048, (256, 1024, 2048, 4096))}
SIDES = ("forward", "lens", "lens_maps", "maps", "mean")


def model_of(kind: str) -> Any:
    """One layer of the 130m shape with random weights."""
    torch.manual_seed(0)
    common = {"vocab_size": 1000, "hidden_size": 768, "num_hidden_layers": 1, "use_cache": False}
    if kind == "mamba":
        return transformers.MambaForCausalLM(transformers.MambaConfig(**common)).eval()
    config = transformers.Mamba2Config(**common, num_heads=24, head_dim=64, n_groups=1)
    return transformers.Mamba2ForCausalLM(config).eval()


def tokens(length: int) -> torch.Tensor:
    return torch.randint(1000, (1, length), generator=torch.Generator().manual_seed(0))


def our_sides(kind: str, length: int) -> dict[str, Callable[[], torch.Tensor]]:
    """The model's forward pass, every map, and their mean."""
    from captum_ssm import hidden_attention

    model, ids = model_of(kind), tokens(length)

    def forward() -> torch.Tensor:
        with torch.no_grad():
            return model(ids).logits

    def ours(reduction: str | None) -> torch.Tensor:
        [found] = hidden_attention(model, ids, reduction=reduction).values()
        return found

    return {"forward": forward, "maps": lambda: ours(None), "mean": lambda: ours("mean")}


def lens_sides(kind: str, length: int) -> dict[str, Callable[[], torch.Tensor]]:
    """TransformerLens's maps, with and without the forward pass."""
    from transformer_lens.model_bridge import TransformerBridge

    ids = tokens(length)
    bridge = TransformerBridge.boot_transformers(
        kind, hf_model=model_of(kind), tokenizer=_tokenizer()
    )
    # Under transformers 5 the modules' own path does not call every projection that has to be
    # recorded; TransformerLens's own scan, token by token, does.
    bridge.blocks[0].mixer.eager_scan = True

    def run() -> Any:
        with torch.no_grad():
            return bridge.run_with_cache(ids)[1]

    def maps(cache: Any) -> torch.Tensor:
        with torch.no_grad():
            return cache.compute_ssm_effective_attention(layer=0, include_dt_scaling=True)

    cache: list[Any] = []

    def maps_only() -> torch.Tensor:
        if not cache:
            cache.append(run())
        return maps(cache[0])

    return {"lens": lambda: maps(run()), "lens_maps": maps_only}


def _tokenizer() -> Any:
    # The bridge needs one, though tokens are given as ids.
    from tokenizers import Tokenizer, models

    words = {str(k): k for k in range(1000)}
    inner = Tokenizer(models.WordLevel(words, unk_token="0"))
    tokens = dict.fromkeys(("eos_token", "pad_token", "unk_token"), "0")
    return transformers.PreTrainedTokenizerFast(tokenizer_object=inner, **tokens)


def main() -> None:
    from captum_ssm import hidden_attention

    args = parsed(options(__doc__, "transformer_lens", repeats=3))
    rows = []
    for kind, (longest, lengths) in KINDS.items():
        for length in lengths:
            sides = our_sides(kind, length)
            if length <= longest:
                sides |= lens_sides(kind, length)
            row: dict[str, Any] = {"model": kind, "length": length}
            if "lens" in sides:
                theirs, ours = sides["lens"](), sides["maps"]()
                [exact] = hidden_attention(model_of(kind).double(), tokens(length)).values()
                for name, found in (("lens", theirs), ("maps", ours)):
                    error = float((found - exact).abs().max() / exact.abs().max())
                    row[f"{name}_error"] = error  # against ours in float64
                    if not error < 1e-3:
                        raise SystemExit(f"{kind}, {length}: {name} is off by {error:.1e}")
                mean = float((exact.mean(1) - sides["mean"]()).abs().max() / exact.abs().max())
                if not mean < 1e-5:
                    raise SystemExit(f"{kind}, {length}: the mean is off by {mean:.1e}")
                del theirs, ours, exact
            best = dict(zip(sides, seconds(*sides.values(), repeats=args.repeats), strict=True))
            row |= {f"{name}_s": best[name] for name in SIDES if name in best}
            idle = peak_mib(__file__, "our_sides", "forward", kind, length)
            for name in ("lens", "maps", "mean"):
                if name in best:
                    of = "lens_sides" if name == "lens" else "our_sides"
                    row[f"{name}_MiB"] = peak_mib(__file__, of, name, kind, length) - idle
            rows.append(row)
            print(json.dumps(row), flush=True)
    versions = {name: version(name) for name in ("transformer-lens", "transformers")}
    keep(args, rows, **versions)


if __name__ == "__main__":
    main()
