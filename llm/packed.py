"""What an optimizer and random generators hold, as named tensors and plain values: no pickle."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.optim import Optimizer

from windage.estimators.errors import BadInput

Packed = tuple[dict[str, Tensor], dict[str, Any]]


def pack_optimizer(optimizer: Any) -> Packed:
    """The state of any optimizer that keeps tensors and numbers for each parameter.

    The tensors are those of the optimizer, not copies; parameters are numbered in its order.

    Args:
        optimizer: of torch, or accelerate's around one.
    """
    found = optimizer.state_dict()
    tensors: dict[str, Tensor] = {}
    groups = [_split(one, f"group.{n}", tensors) for n, one in enumerate(found["param_groups"])]
    state = {str(n): _split(one, f"state.{n}", tensors) for n, one in found["state"].items()}
    return tensors, {"groups": groups, "state": state}


def _split(entries: Mapping[str, Any], place: str, tensors: dict[str, Tensor]) -> dict[str, Any]:
    """What is no tensor; the tensors go under the place's name."""
    rest = {}
    for name, value in entries.items():
        if isinstance(value, Tensor):
            tensors[f"{place}.{name}"] = value.detach()
        else:
            rest[name] = value
    return rest


def owner(optimizer: Any, name: str) -> Tensor | None:
    """The parameter that a packed tensor belongs to; None: one of a whole group's.

    Example:
        >>> one = torch.zeros(2, requires_grad=True)
        >>> owner(torch.optim.SGD([one], lr=0.1), "state.0.momentum_buffer") is one
        True
    """
    kind, number, _ = name.split(".", 2)
    parameters = [one for group in optimizer.param_groups for one in group["params"]]
    return parameters[int(number)] if kind == "state" else None


def unpack_optimizer(optimizer: Any, tensors: Mapping[str, Tensor], packed: dict[str, Any]) -> None:
    """Put a packed state into an optimizer of the same parameters, in the kinds it was kept in.

    Args:
        optimizer: made as the packed one was.
        tensors: belong to the optimizer from now on.
        packed: what `pack_optimizer` gave beside the tensors.

    Raises:
        BadInput: the optimizer has other groups of parameters.
    """
    state = {int(n): dict(entries) for n, entries in packed["state"].items()}
    groups = [dict(entries) for entries in packed["groups"]]
    for name, tensor in tensors.items():
        kind, number, entry = name.split(".", 2)
        (state if kind == "state" else groups)[int(number)][entry] = tensor
    for group, own in zip(groups, optimizer.param_groups, strict=False):
        for name, value in group.items():
            if isinstance(own.get(name), tuple):
                group[name] = tuple(value)
    try:
        optimizer.load_state_dict({"state": state, "param_groups": groups})
    except ValueError as problem:
        raise BadInput(
            f"the optimizer does not fit: {problem}; allowed: the parameters it was saved with"
        ) from None
    _keep_kinds(optimizer, state)


def _keep_kinds(optimizer: Optimizer, state: Mapping[int, Mapping[str, Any]]) -> None:
    """Torch casts what it loads to the parameter's kind of number; take what was saved instead."""
    parameters = [one for group in optimizer.param_groups for one in group["params"]]
    for number, entries in state.items():
        own = optimizer.state[parameters[number]]
        for name, value in entries.items():
            if isinstance(value, Tensor):
                own[name] = value.to(own[name].device)


def seed_random(seed: int) -> None:
    """Begin the random generators of `random`, numpy, torch and CUDA at a seed."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)


def pack_random(generators: Mapping[str, torch.Generator] | None = None) -> Packed:
    """Where the random generators stand: of `random`, numpy, torch and each CUDA device in use.

    Args:
        generators: others, by name.
    """
    tensors = {"torch": torch.get_rng_state()}
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        tensors |= {f"cuda.{n}": one for n, one in enumerate(torch.cuda.get_rng_state_all())}
    for name, generator in (generators or {}).items():
        tensors[f"generator.{name}"] = generator.get_state()
    of_numpy: Any = np.random.get_state()
    words = [word.tolist() if isinstance(word, np.ndarray) else word for word in of_numpy]
    return tensors, {"random": random.getstate(), "numpy": words}


def unpack_random(
    tensors: Mapping[str, Tensor],
    packed: dict[str, Any],
    generators: Mapping[str, torch.Generator] | None = None,
) -> None:
    """Put the random generators where they stood.

    A CUDA device that this machine lacks is left out.

    Args:
        generators: the others, by the names they were packed with.

    Raises:
        BadInput: names a generator that was not packed.
    """
    version, words, gauss = packed["random"]
    random.setstate((version, tuple(words), gauss))
    kind, key, place, has_gauss, gauss = packed["numpy"]
    np.random.set_state((kind, np.array(key, dtype=np.uint32), place, has_gauss, gauss))
    torch.set_rng_state(tensors["torch"])
    devices = torch.cuda.device_count() if torch.cuda.is_available() else 0
    for n in range(devices):
        if f"cuda.{n}" in tensors:
            torch.cuda.set_rng_state(tensors[f"cuda.{n}"], n)
    for name, generator in (generators or {}).items():
        if f"generator.{name}" not in tensors:
            known = [n.removeprefix("generator.") for n in tensors if n.startswith("generator.")]
            raise BadInput(f"generator {name!r} was not saved; allowed: {', '.join(known)}")
        generator.set_state(tensors[f"generator.{name}"])
