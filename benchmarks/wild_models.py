"""Public models that the library was not written for: what does it make of them as they are?

Each package is installed, without its dependencies, into a temporary folder (or into `--folder`,
which is kept), and a tiny model is built as its README says, with moved weights, so that no special
value fits by accident. A model is "explained" if

- `MambaRollout` and `MambaLRP` run, and their relevance has the shape of the input;
- the rollout's row is zero where the gradient of the output is zero, and both rows are nonzero on
  each side of the token where the gradient is.

Anything else is "refused", with the error, or "WRONG". What `MambaLRP` adds up to, with bias terms
at zero, is printed and not judged: activations like softplus, which are not zero at zero, are not
conserved.

    python benchmarks/wild_models.py
    python benchmarks/wild_models.py minGRU --support
"""

from __future__ import annotations

import argparse
import contextlib
import io
import subprocess
import sys
import tempfile
import types
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers.utils  # noqa: F401  before anything stands for a package that it may look for
from torch import Tensor, nn

Built = tuple[nn.Module, Tensor]

# Versions are those of the table in README.md.
PACKAGES = {
    "einops": "0.8.2",
    "gateloop-transformer": "0.2.5",
    "laminarnet": "0.7.11",
    "mambax": "0.4.1",
    "mingru-pytorch": "0.2.1",
    "opengdn": "0.1.0",
    "rotary-embedding-torch": "0.9.1",
    "rwkv7-hf": "0.9.0",
    "s5-pytorch": "0.2.1",
    "samovar-var": "0.1.0",
    "sykra": "0.3.6",
    "trim-transformer": "0.1.3",
    "vision-mamba": "0.1.0",
    "xlstm": "2.0.6",
    "yet-another-retnet": "0.5.1",
    "zetascale": "2.8.8",
}


class Residual(nn.Module):
    """Mixers that are published alone, each after a norm and with a residual."""

    def __init__(self, width: int, build: Callable[[], nn.Module], layers: int = 2) -> None:
        super().__init__()
        self.mixers = nn.ModuleList(build() for _ in range(layers))
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(layers))

    def forward(self, x: Tensor) -> Tensor:
        for norm, mixer in zip(self.norms, self.mixers, strict=True):
            y = mixer(norm(x))
            x = x + (y[0] if isinstance(y, tuple) else y)
        return x


class BothWays(nn.Module):
    """Two directions next to each other."""

    def __init__(self, forward: nn.Module, backward: nn.Module) -> None:
        super().__init__()
        self.ahead, self.back = forward, backward

    def forward(self, x: Tensor) -> Tensor:
        return self.ahead(x) + self.back(x)


def hollow(folder: Path, *names: str) -> None:
    """Packages without what their own ``__init__`` imports."""
    for name in names:
        sys.modules[name] = types.ModuleType(name)
        sys.modules[name].__path__ = [str(folder.joinpath(*name.split(".")))]


def mambax(folder: Path) -> Built:
    """Language: Mamba with the step's projection as a bare product."""
    from mambax.mamba import Mamba

    def build() -> nn.Module:
        mixer = Mamba(16, 32, d_state=4, dt_rank=4)
        mixer.use_cuda = mixer.use_fast_path = False  # read, but set on a GPU only
        return mixer

    return Residual(16, build), torch.randn(1, 12, 16)


def vision_mamba(folder: Path) -> Built:
    """Vision: Vim of 4 by 4 patches, with zetascale's S6."""
    hollow(folder, "zeta", "zeta.nn", "zeta.nn.modules")
    from zeta.nn.modules.ssm import SSM

    sys.modules["zeta.nn"].SSM = SSM
    from vision_mamba.model import Vim

    model = Vim(
        dim=16, dt_rank=4, dim_inner=16, d_state=4, num_classes=5, image_size=16, patch_size=4,
        depth=2,
    )  # fmt: skip
    return model, torch.randn(1, 3, 16, 16)


def min_gru(folder: Path) -> Built:
    """Language: minGRU in log space."""
    from minGRU_pytorch.minLM import minLM

    return minLM(num_tokens=30, dim=16, depth=2), torch.randint(30, (1, 12))


def min_lstm(folder: Path) -> Built:
    """Language: minLSTM after depthwise convolutions."""
    from minGRU_pytorch.minLM import minLM

    model = minLM(num_tokens=30, dim=16, depth=2, use_lstm=True, enable_conv=True)
    return model, torch.randint(30, (1, 12))


def gate_loop(folder: Path) -> Built:
    """Bidirectional: two simple gate loops, one of them reversed."""
    from gateloop_transformer.simplified_gate_loop import SimpleGateLoopLayer

    def build() -> nn.Module:
        return BothWays(SimpleGateLoopLayer(16), SimpleGateLoopLayer(16, reverse=True))

    return Residual(16, build), torch.randn(1, 12, 16)


def gate_looped_attention(folder: Path) -> Built:
    """Language: linear attention with a complex decay."""
    from gateloop_transformer import Transformer

    model = Transformer(num_tokens=30, dim=16, depth=2, checkpoint_gate_looped_attn=False)
    return model, torch.randint(30, (1, 12))


class Itself(nn.Module):
    """A mixer of queries, keys and values, all of the same tokens."""

    def __init__(self, mixer: nn.Module) -> None:
        super().__init__()
        self.mixer = mixer

    def forward(self, x: Tensor) -> Any:
        return self.mixer(x, x, x)


def retnet(folder: Path) -> Built:
    """Language: retention, with its decay built inside."""
    from yet_another_retnet.retention import MultiScaleRetention

    model = Residual(16, lambda: Itself(MultiScaleRetention(16, 2)))
    return model, torch.randn(1, 12, 16)


def gated_delta(folder: Path) -> Built:
    """Mixer: the gated delta rule, token by token."""
    from opengdn.mixer import GatedDeltaMixer

    return Residual(16, lambda: GatedDeltaMixer(16, 2, backend="reference")), torch.randn(1, 12, 16)


def gated_delta_chunks(folder: Path) -> Built:
    """Mixer: the same in chunks."""
    from opengdn.mixer import GatedDeltaMixer

    def build() -> nn.Module:
        return GatedDeltaMixer(16, 2, backend="chunkwise", chunk_size=4)

    return Residual(16, build), torch.randn(1, 12, 16)


def rwkv7(folder: Path) -> Built:
    """Language: RWKV-7."""
    from rwkv7_hf import RWKV7Config, RWKV7ForCausalLM

    config = RWKV7Config(
        vocab_size=30, hidden_size=32, num_hidden_layers=2, head_dim=16, intermediate_size=32,
        num_heads=2, decay_low_rank_dim=4, a_low_rank_dim=4, v_low_rank_dim=4, gate_low_rank_dim=4,
        use_cache=False,
    )  # fmt: skip
    return RWKV7ForCausalLM(config), torch.randint(30, (1, 12))


def xlstm(folder: Path) -> Built:
    """Language: blocks of mLSTM."""
    import xlstm as package

    layer = package.mLSTMLayerConfig(conv1d_kernel_size=4, num_heads=2)
    config = package.xLSTMLMModelConfig(
        vocab_size=30, embedding_dim=16, num_blocks=2, context_length=12,
        mlstm_block=package.mLSTMBlockConfig(mlstm=layer),
    )  # fmt: skip
    return package.xLSTMLMModel(config), torch.randint(30, (1, 12))


def samovar(folder: Path) -> Built:
    """Time series: vector autoregression by linear attention, written into the module."""
    hollow(folder, "samovar")
    from samovar.layers import LinearVARAttention

    return Residual(16, lambda: LinearVARAttention(16, 2)), torch.randn(1, 12, 16)


def laminarnet(folder: Path) -> Built:
    """Language: hierarchical, two resolutions, gated linear RNNs by running sums."""
    from laminarnet import LaminarNet, LaminarNetConfig

    config = LaminarNetConfig(
        vocab_size=30, d_model=16, n_heads=2, n_layers=2, d_ff=32, seq_len=16, dropout=0
    )
    return LaminarNet(config), torch.randint(30, (1, 12))


def s5(folder: Path) -> Built:
    """Any: a complex diagonal state space of many inputs and many outputs."""
    from s5 import S5Block

    model = nn.Sequential(*[S5Block(16, 8, bidir=False) for _ in range(2)])
    return model, torch.randn(1, 12, 16)


def trim(folder: Path) -> Built:
    """Any: linear attention that looks at all tokens."""
    from trim_transformer.transformer_layers import TrimTransformerEncoderLayer

    def build() -> nn.Module:
        return TrimTransformerEncoderLayer(16, 2, 32, dropout=0, batch_first=True)

    return nn.Sequential(build(), build()), torch.randn(1, 12, 16)


def sykra(folder: Path) -> Built:
    """Language: three gated delta layers for one of attention."""
    hollow(folder, "sykra")
    from sykra.configuration_sykra import SykraConfig
    from sykra.modeling_sykra import SykraForCausalLM

    config = SykraConfig(
        vocab_size=30, hidden_size=32, intermediate_size=32, num_hidden_layers=4, head_dim=16,
        num_attention_heads=2, num_key_value_heads=1, chunk_size=4, use_cache=False,
    )  # fmt: skip
    return SykraForCausalLM(config), torch.randint(30, (1, 12))


CASES: dict[str, Callable[[Path], Built]] = {
    "mambax": mambax,
    "vision-mamba": vision_mamba,
    "minGRU": min_gru,
    "minLSTM": min_lstm,
    "gateloop simple": gate_loop,
    "gateloop attention": gate_looped_attention,
    "yet-another-retnet": retnet,
    "opengdn": gated_delta,
    "opengdn chunkwise": gated_delta_chunks,
    "rwkv7-hf": rwkv7,
    "xlstm": xlstm,
    "samovar": samovar,
    "laminarnet": laminarnet,
    "s5-pytorch": s5,
    "trim-transformer": trim,
    "sykra": sykra,
}


def install(folder: Path) -> None:
    """The packages without their dependencies, once, last on the path."""
    folder.mkdir(parents=True, exist_ok=True)
    wanted = [f"{name}=={version}" for name, version in PACKAGES.items()]
    marker = folder / "installed.txt"
    if not marker.exists() or marker.read_text() != "\n".join(wanted):
        pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--upgrade"]
        subprocess.run([*pip, "--target", str(folder), *wanted], check=True)
        marker.write_text("\n".join(wanted))
    sys.path.append(str(folder))


def moved(model: nn.Module) -> nn.Module:
    """The model with weights away from special values (zeros, ones, equal rows)."""
    noise = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for p in model.parameters():
            size = p.abs().mean().clamp(min=0.1)
            p.add_(0.1 * size * torch.randn(p.shape, generator=noise).to(p.dtype))
    return model.eval()


def output_of(model: nn.Module, x: Tensor) -> Tensor:
    out = model(x)
    return out[0] if isinstance(out, (tuple, list)) else getattr(out, "logits", out)


def reads(model: nn.Module, x: Tensor, query: int) -> Tensor:
    """Which tokens the output at the query depends on, ``(B, L)`` bool."""
    leaf = x.clone()
    if x.is_floating_point():
        y = output_of(model, leaf.requires_grad_())
    else:
        table = next(m for m in model.modules() if isinstance(m, nn.Embedding))

        def replaced(module: nn.Module, given: Any, found: Tensor) -> Tensor:
            nonlocal leaf
            leaf = found.detach().requires_grad_()
            return leaf

        hook = table.register_forward_hook(replaced)
        y = output_of(model, x)
        hook.remove()
    (gradient,) = torch.autograd.grad(y[:, query].square().sum(), leaf)
    return gradient.abs().sum(-1) > 0


def explained(model: nn.Module, x: Tensor) -> str | None:
    """None, or what is wrong with the explanation.

    Raises:
        ValueError, TypeError, RuntimeError: the model is refused.
    """
    from captum_ssm import MambaLRP, MambaRollout

    if x.dim() == 4:
        shapes = (
            MambaRollout(model).attribute(x).shape,
            MambaLRP(model).attribute(x, target=1).shape,
        )
        return None if shapes == (x.shape, x.shape) else f"shapes {shapes}"
    query = x.shape[1] // 2
    read = reads(model, x, query)
    row = MambaRollout(model).attribute(x, position=query).abs()
    row = row.sum(-1) if row.dim() == 3 else row
    if bool((row[~read] > 1e-12 * row.max()).any()):
        return "relevance on tokens that the output does not read"
    for side in (slice(0, query), slice(query + 1, None)):
        if bool(read[:, side].any()) and not bool((row[:, side] > 0).any()):
            return "no relevance on a side that the output reads"
    found = MambaLRP(model).attribute(x, target=(query, 0)).abs()
    if found.shape != x.shape:
        return f"MambaLRP has the shape {tuple(found.shape)}"
    found = found.sum(-1) if found.dim() == 3 else found
    for side in (slice(0, query), slice(query + 1, None)):
        if bool(read[:, side].any()) and not bool((found[:, side] > 0).any()):
            return "no relevance of MambaLRP on a side that the output reads"
    return None


def conserved(model: nn.Module, x: Tensor) -> float:
    """The sum of MambaLRP's relevance over the score, with bias terms at zero."""
    from captum_ssm import MambaLRP

    for name, p in model.named_parameters():
        if "bias" in name:
            p.data.zero_()
    target = 1 if x.dim() == 4 else (x.shape[1] // 2, 0)
    score = output_of(model, x)[0]
    score = float(score[target] if x.dim() == 4 else score[target[0], target[1]])
    return float(MambaLRP(model).attribute(x, target=target).sum()) / score


def tried(name: str, folder: Path) -> tuple[str, str]:
    """What the library makes of one model, and why."""
    torch.manual_seed(0)
    try:
        model, x = CASES[name](folder)
        output_of(moved(model), x)
    except Exception as error:
        return "not built", f"{type(error).__name__}: {error}"
    try:
        wrong = explained(model, x)
    except (ValueError, TypeError, RuntimeError, NotImplementedError) as error:
        return "refused", f"{type(error).__name__}: {str(error).splitlines()[0]}"
    if wrong is not None:
        return "WRONG", wrong
    return "explained", f"MambaLRP sums to {conserved(model, x):.6f} of the score"


def support(name: str, folder: Path) -> str:
    """What ``supported`` prints of one model."""
    import captum_ssm

    torch.manual_seed(0)
    model, x = CASES[name](folder)
    try:
        return str(captum_ssm.supported(moved(model), x))
    except (ValueError, TypeError, RuntimeError) as error:
        return f"{type(error).__name__}: {error}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("models", nargs="*", help="some of them; all by default")
    parser.add_argument("--support", action="store_true", help="print what `supported` says")
    parser.add_argument("--folder", type=Path, help="where the packages are installed and kept")
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as temporary:
        folder = args.folder or Path(temporary)
        install(folder)
        for name in args.models or CASES:
            with contextlib.redirect_stdout(io.StringIO()):  # some of them print
                kind, why = tried(name, folder)
                said = support(name, folder) if args.support else ""
            print(f"{name:20} {kind:10} {why}\n{said}".rstrip(), flush=True)


if __name__ == "__main__":
    main()
