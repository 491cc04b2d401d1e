"""Hashes by which a run knows that model, tokenizer and data are those of an earlier run."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import is_dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from captum_ssm.explanation.make.dataset.own import OTHER, kind_of
from captum_ssm.explanation.make.inputs.pictures import is_array


def hash_of_model(model: nn.Module) -> str:
    """A hash of all parameters and buffers of a model, and of its configuration."""
    hasher = hashlib.sha256(_config(model))
    weights = [*model.named_parameters(), *model.named_buffers()]
    # Hashing leaves Python's lock, and a large model is hashed by several threads.
    with ThreadPoolExecutor(max(1, torch.get_num_threads())) as pool:
        digests = pool.map(_tensor, [x for _, x in weights])
        for (name, _), digest in zip(weights, digests, strict=True):
            hasher.update(name.encode() + digest)
    return hasher.hexdigest()


def hash_of_tokenizer(tokenizer: Any) -> str | None:
    """A hash of a tokenizer's vocabulary, rules and chat template, as far as it shows them.

    For a processor it is one of its settings.
    """
    if tokenizer is None:
        return None
    told = json.dumps(_settings(tokenizer), sort_keys=True, default=str)
    hasher = hashlib.sha256(f"{type(tokenizer).__name__} {told}".encode())
    rules: Any = getattr(tokenizer, "backend_tokenizer", None)
    if hasattr(rules, "to_str"):
        # Each call sets how it pads and cuts texts, so that an earlier one's settings say nothing.
        fixed = json.loads(rules.to_str()) | {"padding": None, "truncation": None}
        hasher.update(json.dumps(fixed).encode())
    elif callable(getattr(tokenizer, "get_vocab", None)):
        with suppress(NotImplementedError):  # a base class that declares it: no vocabulary is shown
            hasher.update(json.dumps(tokenizer.get_vocab(), sort_keys=True).encode())
    hasher.update(str(getattr(tokenizer, "chat_template", None)).encode())
    return hasher.hexdigest()


def hash_of_file(path: Path) -> str:
    """A hash of a file's bytes."""
    hasher = hashlib.sha256()
    with path.open("rb") as file:
        while part := file.read(1 << 22):
            hasher.update(part)
    return hasher.hexdigest()


def hash_of_rows(rows: Iterable[Any]) -> str:
    """A hash of what rows hold."""
    hasher = hashlib.sha256()
    for row in rows:
        _feed(hasher, row)
    return hasher.hexdigest()


def _config(model: nn.Module) -> bytes:
    # How it writes answers is in a second one; settings that are None are there by version.
    parts = [_settings(getattr(model, name, None)) for name in ("config", "generation_config")]
    return f"{type(model).__name__} {json.dumps(parts, sort_keys=True, default=str)}".encode()


def _settings(held: Any) -> dict[str, Any]:
    # Where something was loaded from, and by which version, changes nothing.
    values = held.to_dict() if callable(getattr(held, "to_dict", None)) else {}
    left_out = ("_name_or_path", "dtype", "transformers_version")
    return {k: x for k, x in values.items() if k not in left_out and x is not None}


def _tensor(tensor: Tensor) -> bytes:
    hasher = hashlib.sha256(f"{tuple(tensor.shape)} {tensor.dtype}".encode())
    if is_traceable_wrapper_subclass(tensor):  # such as a quantized tensor: of several plain ones
        for name in tensor.__tensor_flatten__()[0]:
            hasher.update(_tensor(getattr(tensor, name)))
    elif not tensor.is_meta:
        plain = tensor.detach().cpu().contiguous().reshape(-1)
        held: Any = plain.view(torch.uint8).numpy()
        hasher.update(held)
    return hasher.digest()


def _feed(hasher: Any, value: Any) -> None:
    # Each value with its type and its length, so that no two different rows feed the same bytes.
    if isinstance(value, (str, bytes)):
        data = value.encode("utf-8", "surrogatepass") if isinstance(value, str) else value
        hasher.update(f"{type(value).__name__} {len(data)} ".encode() + data)
    elif isinstance(value, Mapping):
        hasher.update(f"dict {len(value)} ".encode())
        for item in value.items():
            _feed(hasher, item)
    elif isinstance(value, (list, tuple)):
        hasher.update(f"list {len(value)} ".encode())
        for item in value:
            _feed(hasher, item)
    elif is_array(value):
        array = np.asarray(value.detach().cpu() if isinstance(value, Tensor) else value)
        content = array.tolist() if array.dtype == object else np.ascontiguousarray(array).tobytes()
        _feed(hasher, [str(array.dtype), list(array.shape), content])
    elif is_dataclass(value):
        _feed(hasher, vars(value))
    else:
        is_told = isinstance(value, (bool, int, float, Path)) or kind_of(value) != OTHER
        hasher.update(f"{type(value).__name__} {value if is_told else ''} ".encode())
