"""Tiny random models for the tests: every path a few thousand parameters, none of them trivial."""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Callable
from functools import cache, partial, wraps
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from folders import TESTS
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import Tensor, nn
from transformers import (
    FalconMambaConfig,
    FalconMambaForCausalLM,
    JambaConfig,
    JambaForCausalLM,
    JambaForSequenceClassification,
    MambaConfig,
    MambaForCausalLM,
    MambaModel,
    PreTrainedTokenizerFast,
    ZambaConfig,
    ZambaForCausalLM,
)

from captum_ssm.models import BidirectionalMamba

VOCABULARY = 37
SHARED = dict(vocab_size=VOCABULARY, hidden_size=16, pad_token_id=0, bos_token_id=1, eos_token_id=2)
S6_FAMILIES = ("mamba", "falcon_mamba", "jamba", "zamba")


def randomize(model: nn.Module, seed: int = 0) -> nn.Module:
    """Give a model weights under which no two channels agree and no entry of a map is near zero.

    The default initialisation makes maps that hide mistakes: equal rates in every channel, D of
    one, tiny steps. Here rates span two decades, steps are of order one half, D and the
    convolution's bias are random.
    """
    generator = torch.Generator().manual_seed(seed)

    def normal(p: Tensor, std: float = 1.0) -> Tensor:
        return torch.randn(p.shape, generator=generator, dtype=torch.float64) * std

    with torch.no_grad():
        for name, p in model.named_parameters():
            leaf = name.rpartition(".")[2]
            if leaf == "A_log":
                value = normal(p, 0.7) - 0.5
            elif leaf == "D":
                value = normal(p)
            elif "dt_proj" in name and "bias" in name:
                value = normal(p, 0.7) - 1
            elif "norm" in name:
                value = 1 + normal(p, 0.2)
            elif "embed" in name or p.dim() < 2:
                value = normal(p, 0.5)
            else:
                value = normal(p, 1 / math.sqrt(p.shape[-1] if p.dim() < 4 else 4))
            p.copy_(value.to(p.dtype))
    return model


def made(model: nn.Module | Callable[[], nn.Module]) -> nn.Module:
    """A model, or what a class or function makes, with random weights in float64, in eval mode."""
    module = model if isinstance(model, nn.Module) else model()
    return randomize(module).double().eval()


def without_biases(model: nn.Module, *also: str) -> nn.Module:
    """The model with what nobody's relevance holds set to zero: its bias terms.

    The bias of a step (``dt_proj.bias``) is inside of a frozen coefficient, and stays.

    Args:
        also (str): the ends of the names of more parameters to set to zero.
    """
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(("bias", *also)) and "dt_" not in name:
                parameter.zero_()
    return model


def built_once(build: Callable[..., nn.Module]) -> Callable[..., nn.Module]:
    """Models of the same arguments are copies of one, which take half the time.

    The random state stays as it is, so that no test depends on which ones have run before.
    """
    models: dict[str, nn.Module] = {}

    @wraps(build)
    def copied(*args: object, **options: object) -> nn.Module:
        name = repr((args, options))
        if name not in models:
            with torch.inference_mode(False), torch.random.fork_rng(devices=[]):
                models[name] = build(*args, **options)
        return copy.deepcopy(models[name])

    return copied


MAMBAS = {
    "mamba": (MambaConfig, MambaForCausalLM),
    "falcon_mamba": (FalconMambaConfig, FalconMambaForCausalLM),
}


@built_once
def tiny(
    family: str = "mamba", *, layers: int | None = None, seed: int = 0, **changes: object
) -> nn.Module:
    """A random model of an S6 family, in eval mode and float32; hybrids have attention too."""
    layers = layers or (2 if "mamba" in family else 4)
    shared = SHARED | {"num_hidden_layers": layers}
    attention = {"intermediate_size": 24, "num_attention_heads": 2, "num_key_value_heads": 2}
    # transformers 4 refuses to run these hybrids without kernels unless it is told so.
    s6 = {"mamba_d_state": 4, "mamba_dt_rank": 3, "use_mamba_kernels": False}
    if family in MAMBAS:
        config, kind = MAMBAS[family]
        model = kind(config(**(shared | {"state_size": 4, "time_step_rank": 3} | changes)))
    elif family in ("jamba", "jamba_classifier"):
        shared |= attention | s6 | {"attn_layer_period": 3, "attn_layer_offset": 1}
        shared |= {"num_experts": 2, "num_experts_per_tok": 1, "num_labels": 5} | changes
        kind = JambaForCausalLM if family == "jamba" else JambaForSequenceClassification
        model = kind(JambaConfig(**shared))
    elif family == "zamba":
        # The hybrid blocks share one transformer block; transformers wants none or several.
        blocks = ["hybrid" if i % 2 else "mamba" for i in range(layers)]
        shared |= attention | s6 | {"n_mamba_heads": 4, "layers_block_type": blocks} | changes
        model = ZambaForCausalLM(ZambaConfig(**shared))
    else:
        raise ValueError(f"family is {family!r}; expected one of {S6_FAMILIES}")
    return randomize(model, seed).eval()


@cache
def golden(name: str) -> tuple[dict[str, Tensor], dict[str, Tensor], dict[str, object]]:
    """Published outputs of ``golden/``: the tensors, the model's weights and configuration."""
    with np.load(TESTS / "golden" / f"{name}.npz") as z:
        config = json.loads(str(z["config_json"]))
        found = {key: torch.from_numpy(z[key]) for key in z.files if key != "config_json"}
    weights = {key[3:]: found.pop(key) for key in list(found) if key.startswith("sd/")}
    return found, weights, config


def word_tokenizer(words: dict[str, int], **special: str) -> PreTrainedTokenizerFast:
    """A tokenizer that splits at spaces; the first word stands for unknown ones."""
    backend = Tokenizer(models.WordLevel(words, unk_token=next(iter(words))))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=backend, **special)


class Slow:
    """A tokenizer without offsets: where its tokens are is found by decoding."""

    is_fast = False

    def __init__(self, inner: PreTrainedTokenizerFast) -> None:
        self.inner = inner

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def __len__(self) -> int:
        return len(self.inner)


def ids(batch: int = 2, length: int = 7, seed: int = 0) -> Tensor:
    """Random token ids that hold no special token."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, VOCABULARY, (batch, length), generator=generator)


def embed(model: nn.Module, tokens: Tensor) -> Tensor:
    """The embeddings of ``tokens``, detached."""
    return model.get_input_embeddings()(tokens).detach()


def without_cache(kwargs: dict[str, object]) -> dict[str, object]:
    """The arguments of a layer of transformers, which calls its cache ``cache`` since 5.24."""
    caches = {"cache", "past_key_values", "cache_params"}
    return {name: None if name in caches else value for name, value in kwargs.items()}


def recast(model: nn.Module, dtype: torch.dtype) -> nn.Module:
    """A copy of the model in another dtype."""
    return copy.deepcopy(model).to(dtype)


def s6_paths(model: nn.Module) -> list[str]:
    """Paths of the S6 mixers, in forward order."""
    return [n for n, m in model.named_modules() if type(m).__name__.endswith("MambaMixer")]


class Classifier(nn.Module):
    """A sequence classifier over a Mamba: ``pool`` says which tokens its head reads.

    Args:
        pool (str): ``"last"``, ``"mean"``, ``"middle"`` (a CLS token between two halves) or
            ``"masked mean"``.
    """

    def __init__(self, pool: str, classes: int = 5, seed: int = 0) -> None:
        super().__init__()
        self.backbone: MambaModel = tiny(seed=seed).backbone
        self.head = nn.Linear(16, classes)
        self.pool = pool
        randomize(self.head, seed + 1)
        self.eval()

    def get_input_embeddings(self) -> nn.Module:
        return self.backbone.get_input_embeddings()

    def forward(self, inputs: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        embeddings = inputs if inputs.is_floating_point() else self.get_input_embeddings()(inputs)
        hidden = self.backbone(
            inputs_embeds=embeddings, attention_mask=attention_mask
        ).last_hidden_state
        if self.pool == "last":
            pooled = hidden[:, -1]
        elif self.pool == "middle":
            pooled = hidden[:, hidden.shape[1] // 2]
        elif self.pool == "mean":
            pooled = hidden.mean(1)
        else:
            assert attention_mask is not None
            weights = attention_mask / attention_mask.sum(1, keepdim=True)
            pooled = (hidden * weights[..., None]).sum(1)
        return self.head(pooled)


class Residual(nn.Module):
    """``count`` mixers on a residual stream, read by a linear head and nothing else."""

    def __init__(self, count: int = 2) -> None:
        super().__init__()
        make = partial(BidirectionalMamba, 16, state=4, bimamba_type="none")
        self.embeddings = nn.Embedding(VOCABULARY, 16)
        self.mixers = nn.ModuleList(make() for _ in range(count))
        self.head = nn.Linear(16, VOCABULARY)

    def forward(self, inputs: Tensor) -> Tensor:
        x = inputs if inputs.is_floating_point() else self.embeddings(inputs)
        for mixer in self.mixers:
            x = x + mixer(x)
        return self.head(x)


class WithOutput(nn.Module):
    """A language model whose output comes back in another form, made by ``form``."""

    def __init__(self, model: nn.Module, form) -> None:
        super().__init__()
        self.model = model
        self.form = form

    def get_input_embeddings(self) -> nn.Module:
        return self.model.get_input_embeddings()

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> object:
        return self.form(self.model(input_ids, attention_mask=attention_mask).logits)


OUTPUT_FORMS = {
    "tensor": lambda logits: logits,
    "tuple": lambda logits: (logits, logits.mean()),
    "dict": lambda logits: {"hidden": 2 * logits, "logits": logits},
    "object": lambda logits: SimpleNamespace(loss=None, logits=logits),
}


class Words:
    """The smallest tokenizer Captum's interface takes: words ``w3 w4 ...``, by their number."""

    def encode(self, text, add_special_tokens=True, return_tensors=None):
        found = [int(word[1:]) for word in text.split()]
        return torch.tensor([found]) if return_tensors == "pt" else found

    def decode(self, token_ids):
        return " ".join(f"w{int(i)}" for i in token_ids)

    def convert_ids_to_tokens(self, token_ids):
        return [f"w{i}" for i in token_ids]

    def convert_tokens_to_ids(self, tokens):
        return [int(token[1:]) for token in tokens]


WORDS = Words()


def normal(*shape: int, seed: int = 0) -> Tensor:
    """Normal numbers in double, the same for a seed."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def last_logits(model: nn.Module, tokens: Tensor) -> Tensor:
    """A language model's logits at the last token, ``(B, V)``."""
    with torch.no_grad():
        return model(tokens).logits[:, -1]


class Gives(nn.Module):
    """A function in place of a module."""

    def __init__(self, function: Callable) -> None:
        super().__init__()
        self.forward = function
