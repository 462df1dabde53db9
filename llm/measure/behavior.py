"""Who samples: the policy itself, or something near it that the trainer takes for it or corrects.

    policy                     the weights and the distribution whose gradient is wanted
    checkpoint:path=FOLDER     other weights, such as those of some steps ago, with the same tokens
    rounded:bits=B             each row of each linear layer but the output's to B bits, to nearest
    bfloat16                   weights and arithmetic of the sampler in that format
    temperature:t=T            draws at T that the trainer does not know of: ratios are left at 1
    top_p:p=P, top_k:k=K       the same for likeliest tokens
    vllm                       a second engine; dtype=bfloat16 for other than its weights' format

`temperature`, `top_p` and `top_k` take `known=1`: the sampler's own log-probabilities are recorded.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, final

from windage.estimators.errors import BadInput, unknown

if TYPE_CHECKING:
    from torch import Tensor

    from windage.llm.models import Loaded
    from windage.llm.samplers.protocol import Sampler, Sampling

KINDS: dict[str, dict[str, str]] = {
    "policy": {},
    "checkpoint": {"path": "a model folder", "steps": "a whole number, for the page"},
    "rounded": {"bits": "a whole number from 2 to 8"},
    "bfloat16": {},
    "temperature": {"t": "a number above 0, up to 10", "known": "0 or 1"},
    "top_p": {"p": "a number above 0, below 1", "known": "0 or 1"},
    "top_k": {"k": "a whole number from 1", "known": "0 or 1"},
    "vllm": {"dtype": "float32 or bfloat16"},
}
NEEDED = {"checkpoint": "path", "rounded": "bits", "temperature": "t", "top_p": "p", "top_k": "k"}


@final
@dataclass(frozen=True, kw_only=True)
class Behavior:
    """A kind of sampler and its settings.

    Args:
        name: as it was written.
        kind: of `KINDS`.
        settings: words and numbers.
    """

    name: str
    kind: str
    settings: dict[str, Any]

    @property
    def told(self) -> bool:
        """Whether recorded log-probabilities are those of the distribution that drew."""
        narrowed = self.kind in ("temperature", "top_p", "top_k")
        return not narrowed or bool(self.settings.get("known", 0))

    @property
    def covers(self) -> bool:
        """Whether it draws whatever the policy can, and says how likely."""
        return self.told and self.kind not in ("top_p", "top_k")


def parse(text: str) -> Behavior:
    """A behavior from KIND:key=value,...

    Raises:
        BadInput: an unknown kind or setting, a value out of range, or one that is missing.

    Example:
        >>> parse("temperature:t=0.7").settings, parse("temperature:t=0.7").told
        ({'t': 0.7}, False)
    """
    kind, colon, rest = text.partition(":")
    if kind not in KINDS:
        raise unknown("sampler", kind, KINDS)
    settings: dict[str, Any] = {}
    for part in rest.split(",") if colon else ():
        key, equals, value = part.partition("=")
        if key not in KINDS[kind]:
            raise BadInput(f"{text!r}: {unknown(f'setting of {kind}', key, KINDS[kind])}")
        if not equals or key in settings:
            raise BadInput(f"{text!r}: {key} is given once, as {key}=VALUE")
        settings[key] = _value(text, kind, key, value)
    needed = NEEDED.get(kind)
    if needed and needed not in settings:
        raise BadInput(f"{text!r}: {needed} is missing; allowed: {KINDS[kind][needed]}")
    return Behavior(name=text, kind=kind, settings=settings)


def _value(text: str, kind: str, key: str, value: str) -> Any:
    """A setting's value, in its range."""
    refused = BadInput(f"{text!r}: {key} is {value!r}; allowed: {KINDS[kind][key]}")
    if key in ("path", "dtype"):
        if not value or (key == "dtype" and value not in ("float32", "bfloat16")):
            raise refused
        return value
    try:
        number = float(value)
    except ValueError:
        raise refused from None
    limits = {
        "steps": (0, 1 << 30), "bits": (2, 8), "known": (0, 1), "k": (1, 1 << 20),
        "t": (1e-3, 10), "p": (1e-6, 1 - 1e-9),
    }  # fmt: skip
    low, high = limits[key]
    whole = key not in ("t", "p")
    if not (math.isfinite(number) and low <= number <= high) or (whole and number % 1):
        raise refused
    return int(number) if whole else number


def sampling_of(behavior: Behavior, base: Sampling) -> Sampling:
    """How tokens are drawn."""
    from dataclasses import replace

    told = {"temperature": ("temperature", "t"), "top_p": ("top_p", "p"), "top_k": ("top_k", "k")}
    if behavior.kind not in told:
        return base
    field, key = told[behavior.kind]
    return replace(base, **{field: behavior.settings[key]}).check()


def rounded(weights: Iterator[tuple[str, Tensor]], bits: int) -> Iterator[tuple[str, Tensor]]:
    """Weights whose matrices, embedding and output apart, have 2^bits - 1 levels a row.

    w -> s round(w / s)        s = max |w| of the row / (2^(bits - 1) - 1)
    """
    levels = 2 ** (bits - 1) - 1
    for name, value in weights:
        if value.dim() == 2 and "embed" not in name and "lm_head" not in name:
            step = value.abs().amax(1, keepdim=True).clamp(min=1e-30) / levels
            value = (value / step).round() * step
        yield name, value


def available(behavior: Behavior, loaded: Loaded) -> None:
    """Refuse, before anything is spent, weights or an engine that cannot be had.

    Raises:
        BadInput: as of `sampler_of`.
    """
    if behavior.kind == "checkpoint":
        lagging(behavior, loaded)
    if behavior.kind == "vllm":
        from windage.llm.samplers.vllm import imported

        imported()


def lagging(behavior: Behavior, loaded: Loaded) -> Loaded:
    """The model of a checkpoint.

    Raises:
        BadInput: there is none, or its tokens are others.
    """
    from windage.llm import models

    path = Path(behavior.settings["path"])
    if not (path / "config.json").is_file():
        raise BadInput(f"{behavior.name!r}: path has no config.json; allowed: a model folder")
    try:
        found = models.load(path, device=str(loaded.device))
    except BadInput as problem:
        raise BadInput(f"{behavior.name!r}: {problem}") from None
    if found.fingerprint != loaded.fingerprint:
        raise BadInput(
            f"{behavior.name!r}: its tokenizer is not that of {loaded.path!r}; allowed: models "
            "with the same tokens"
        )
    return found


def sampler_of(behavior: Behavior, loaded: Loaded, *, batch: int, longest: int) -> Sampler:
    """An engine with the behavior's weights.

    Raises:
        BadInput: a checkpoint of another model, or an engine that is not there.
    """
    import torch

    from windage.llm import models
    from windage.llm.samplers.transformers import TransformersSampler

    told = behavior.settings
    if behavior.kind == "vllm":
        from windage.llm.samplers.vllm import VllmSampler

        dtype = str(told.get("dtype", "float32"))
        return VllmSampler(
            loaded.path, stop_ids=loaded.stop_ids, dtype=dtype, batch=batch, longest=longest
        )
    source = lagging(behavior, loaded) if behavior.kind == "checkpoint" else loaded
    made = TransformersSampler(
        source.policy.base,
        stop_ids=loaded.stop_ids,
        batch=batch,
        autocast=torch.bfloat16 if behavior.kind == "bfloat16" else None,
    )
    weights = models.weights(source.policy)
    made.load(rounded(weights, int(told["bits"])) if behavior.kind == "rounded" else weights, 0)
    return made
