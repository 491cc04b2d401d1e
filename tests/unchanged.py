"""Whether a model is what it was before a call: everything that a caller could find changed."""

import gc

import torch
from torch import nn

HOOKS = [
    name
    for name in vars(nn.Module())
    if "hooks" in name and isinstance(getattr(nn.Module(), name), dict)
]


def fingerprint(model: nn.Module) -> dict[str, object]:
    """Everything about a model that a caller could find changed."""
    modules = dict(model.named_modules())
    return {
        "modules": {name: id(m) for name, m in modules.items()},
        "classes": {name: type(m) for name, m in modules.items()},
        "attributes": {name: list(m.__dict__) for name, m in modules.items()},
        "hooks": {name: [len(getattr(m, h)) for h in HOOKS] for name, m in modules.items()},
        "training": {name: m.training for name, m in modules.items()},
        "forward": {
            name: m.__dict__[key]
            for name, m in modules.items()
            for key in ("forward", "__nnsight__")
            if key in m.__dict__
        },
        "identities": {n: (id(p), p.data_ptr()) for n, p in model.named_parameters()},
        "values": {n: raw(p) for n, p in model.state_dict().items()},
        "requires_grad": {n: p.requires_grad for n, p in model.named_parameters()},
        "grad": {n: p.grad for n, p in model.named_parameters()},
        "config": getattr(getattr(model, "config", None), "to_dict", dict)(),
        "grad mode": torch.is_grad_enabled(),
        "random state": raw(torch.get_rng_state()),
    }


def raw(tensor: torch.Tensor) -> bytes:
    return tensor.detach().flatten().view(torch.uint8).numpy().tobytes()


def tensors_alive() -> int:
    gc.collect()
    return sum(issubclass(type(o), torch.Tensor) for o in gc.get_objects())


def assert_unchanged(model: nn.Module, before: dict[str, object]) -> None:
    after = fingerprint(model)
    for aspect, value in before.items():
        assert after[aspect] == value, aspect
