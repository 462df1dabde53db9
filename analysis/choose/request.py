"""What the user of `windage choose` states about a run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import isfinite
from typing import final

from windage.estimators.errors import BadInput, unknown

# Divergence of a sampler from the trainer in nats a token, by the arithmetic that it samples in.
# Half the mean squared gap of log-probabilities as measured between vLLM and transformers (float32,
# bfloat16); the two coarse ones are of the order that reports name, and are to be measured.
PRECISIONS: Mapping[str, float] = {"float32": 1e-10, "bf16": 1e-4, "fp8": 1e-3, "int4": 1e-2}


@final
@dataclass(frozen=True, kw_only=True)
class Request:
    """A run as its user sees it.

    Args:
        response_tokens: mean length of a response.
        spread: standard deviation of the logarithm of the length.
        prompt_tokens: mean length of a prompt.
        group_size: responses of a prompt.
        prompts: of a batch.
        mismatch: KL(policy | sampler) a token, in nats, of weights that are the same.
        drift: KL a token between policies one update apart.
        generation_gpus, training_gpus: of each kind.
        slots: responses that a generation GPU writes at the same time.
        token_seconds: of a token in a slot.
        update_seconds: of an update, on the training GPUs.
        sync_seconds: until new weights are in the sampler.
        verifier_seconds: from a response's end to its reward.
        pass_rate: mean share of right answers.
        budget: GPU-hours.
        gain: what the run is hoped to add to the score, for planning an experiment.
        critic: whether there is one.
        logprobs: whether the sampler's log-probabilities are recorded.
        head: whether the likeliest tokens' are recorded too.
        covered: whether the sampler can draw whatever the policy can.
        seed: of the sampler's error and of the pipeline.
    """

    response_tokens: float = 2048
    spread: float = 0.8
    prompt_tokens: float = 256
    group_size: int = 8
    prompts: int = 64
    mismatch: float = PRECISIONS["bf16"]
    drift: float = 1e-6
    generation_gpus: int = 8
    training_gpus: int = 8
    slots: int = 32
    token_seconds: float = 0.02
    update_seconds: float = 60.0
    sync_seconds: float = 5.0
    verifier_seconds: float = 1.0
    pass_rate: float = 0.5
    budget: float = 1000.0
    gain: float = 0.1
    critic: bool = False
    logprobs: bool = True
    head: bool = True
    covered: bool = True
    seed: int = 0

    def __post_init__(self) -> None:
        for name, least, most in LIMITS:
            value = getattr(self, name)
            if not (isfinite(value) and least <= value <= most):
                raise BadInput(f"{name} is {value:g}; allowed: {least:g} to {most:g}")

    @property
    def gpus(self) -> int:
        return self.generation_gpus + self.training_gpus


LIMITS = (
    ("response_tokens", 4, 65_536),
    ("spread", 0, 2),
    ("prompt_tokens", 0, 1e6),
    ("group_size", 2, 1024),
    ("prompts", 1, 65_536),
    ("mismatch", 0, 1),
    ("drift", 0, 0.1),
    ("generation_gpus", 1, 1e6),
    ("training_gpus", 1, 1e6),
    ("slots", 1, 1e5),
    ("token_seconds", 1e-9, 1e4),
    ("update_seconds", 0, 1e7),
    ("sync_seconds", 0, 1e7),
    ("verifier_seconds", 0, 1e7),
    ("pass_rate", 0.01, 0.99),
    ("budget", 1e-6, 1e12),
    ("gain", 1e-4, 1),
)


def precision(name: str) -> float:
    """The divergence that goes with an arithmetic.

    Raises:
        BadInput: no such name.
    """
    if name not in PRECISIONS:
        raise unknown("precision", name, PRECISIONS)
    return PRECISIONS[name]
