"""Gradients as few numbers: by named parameters exactly, or as a random projection.

    z[b] = sum over parameters i with bucket(i) = b of sign(i) g[i]        b = 1 ... k

is linear in g; <z, z'> has the mean <g, g'> over buckets and signs, and a standard deviation of at
most sqrt(2 / k) |g| |g'|.  Every gradient of a study goes through the same buckets and signs.

References:
    Charikar, Chen and Farach-Colton, 2002, Finding frequent items in data streams.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

import torch
from torch import Tensor, nn

from windage.estimators.errors import BadInput, unknown
from windage.llm.models import Loaded

PARAMETERS = ("last", "head", "lora", "all")
# Places that are hashed at a time.
PIECE = 1 << 24


@final
@dataclass(frozen=True, kw_only=True, eq=False)
class Sketch:
    """A linear map of gradients to `size` numbers.

    Args:
        size: numbers kept.
        codes: of each parameter, its bucket, plus `size` where its sign is minus; None: gradients
            are kept as they are.
    """

    size: int
    codes: Tensor | None

    @property
    def error(self) -> float:
        """Bound on the standard deviation of <z, z'>, in units of |g| |g'|; 0: exact."""
        return 0.0 if self.codes is None else math.sqrt(2 / self.size)

    def __call__(self, gradients: Sequence[Tensor]) -> Tensor:
        """The sketch `[size]` of a gradient that is given parameter by parameter."""
        if self.codes is None:
            return torch.cat([g.flatten() for g in gradients]).cpu()
        sums, start = gradients[0].new_zeros(2 * self.size), 0
        for gradient in gradients:
            part = self.codes[start : start + gradient.numel()]
            sums.index_add_(0, part, gradient.reshape(-1))
            start += gradient.numel()
        return (sums[: self.size] - sums[self.size :]).cpu()


def make(count: int, size: int, *, seed: int, device: torch.device | str = "cpu") -> Sketch:
    """A sketch of gradients by `count` parameters.

    Args:
        size: numbers kept; 0, or as many as there are parameters: all of them, exactly.
        seed: of buckets and signs.

    Example:
        >>> make(3, 0, seed=0)([torch.tensor([1.0, 2.0]), torch.tensor([3.0])])
        tensor([1., 2., 3.])
    """
    if size == 0 or size >= count:
        return Sketch(size=count, codes=None)
    generator = torch.Generator().manual_seed(seed)
    codes = torch.empty(count, dtype=torch.int32)
    for start in range(0, count, PIECE):
        part = codes[start : start + PIECE]
        part.copy_(torch.randint(2 * size, part.shape, generator=generator, dtype=torch.int32))
    return Sketch(size=size, codes=codes.to(device))


def select(loaded: Loaded, which: str) -> dict[str, nn.Parameter]:
    """The parameters by which gradients are taken; no others carry a gradient from here on.

    `head` is the output matrix as a parameter of its own, also where a model ties it to its
    embedding; `last` is the last block; `lora` are the adapters.

    Raises:
        BadInput: an unknown word, or the model has no such parameters.
    """
    if which not in PARAMETERS:
        raise unknown("parameters", which, PARAMETERS)
    policy = loaded.policy
    head = policy.base.get_output_embeddings()
    if head is None or getattr(head, "weight", None) is None:
        raise BadInput(
            f"model {loaded.path!r} has no output matrix; allowed: causal language models"
        )
    if which == "lora" and not hasattr(policy.model, "peft_config"):
        raise BadInput("parameters is 'lora', and the model has no adapters; allowed: a lora rank")
    if which == "head":
        head.weight = nn.Parameter(head.weight.detach())
    blocks: Any = getattr(policy.base.get_decoder(), "layers", None)
    if which == "last" and not blocks:
        raise BadInput(
            f"model {loaded.path!r} has no list of blocks; allowed for it: parameters head or all"
        )
    own: dict[str, Any] = {
        "last": lambda: set(map(id, blocks[-1].parameters())),
        "head": lambda: {id(head.weight)},
        "lora": lambda: {id(p) for n, p in policy.named_parameters() if ".lora_" in n},
        "all": lambda: set(map(id, policy.parameters())),
    }
    wanted = own[which]()
    found = {n: p for n, p in policy.named_parameters() if id(p) in wanted}
    for parameter in policy.parameters():
        parameter.requires_grad_(id(parameter) in wanted)
    return found


def needed(sizes: Mapping[str, int], *, prompts: int, vectors: int, rows: int) -> int:
    """Bytes of a study's sketches in memory.

    Args:
        sizes: `parameters`, and `sketch` numbers of each gradient.
        prompts: of the study.
        vectors: kept a prompt and setting, 4 bytes a number.
        rows: sketches of the responses of one prompt and setting, 8 bytes a number.
    """
    parameters, k = sizes["parameters"], sizes["sketch"]
    codes = 4 * parameters if k < parameters else 0
    return codes + 8 * parameters + k * (8 * rows + 12 * prompts * vectors)


def free() -> int | None:
    """Bytes of memory that a process can still have; None: the system does not say."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return None
    told = dict(line.split(":", 1) for line in lines if ":" in line)
    try:
        return int(told["MemAvailable"].split()[0]) * 1024
    except (KeyError, ValueError, IndexError):
        return None


def check_room(
    sizes: Mapping[str, int], room: int | None, *, prompts: int, vectors: int, rows: int
) -> int:
    """The bytes needed, refused where there are fewer.

    Raises:
        BadInput: says what is needed, what is free, and which size fits.
    """
    counts = {"prompts": prompts, "vectors": vectors, "rows": rows}
    wanted = needed(sizes, **counts)
    if room is None or wanted <= room:
        return wanted
    fixed = needed({**sizes, "sketch": 0}, **counts)
    per_number = 8 * rows + 12 * prompts * vectors
    most = max(0, (room - fixed) // per_number)
    fits = (
        f"--sketch up to {most:,}" if most else "fewer parameters, such as last, or fewer prompts"
    )
    raise BadInput(
        f"a sketch of {sizes['sketch']:,} numbers needs {wanted / 2**30:.1f} GiB, and "
        f"{room / 2**30:.1f} GiB are free; allowed here: {fits}"
    )
