"""What a run on many accelerators needs, by arithmetic: memory, rollouts, syncs, queue.

The tables of docs/scaling.md are `tables()`; nothing here measures or allocates anything.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

from windage.estimators.errors import positive, within
from windage.llm.logprobs import TOKENS, VOCABULARY

GIB = 2**30
# Bytes a token as `rollouts.write` leaves them on the disk, at most: random ids and
# log-probabilities, of which a head token has one each.  tests/test_llm_scaling.py measures them.
FIXED, HEAD = 11.0, 8.0


@final
@dataclass(frozen=True, kw_only=True)
class Model:
    """A dense transformer.

    Args:
        name: as people call it.
        parameters: all of them.
        width: of a hidden state.
        layers: of the decoder.
        vocabulary: rows of the embedding, and of an output matrix of its own.
    """

    name: str
    parameters: float
    width: int
    layers: int
    vocabulary: int

    @property
    def ends(self) -> float:
        """Parameters of embedding and output matrix."""
        return 2.0 * self.vocabulary * self.width

    @property
    def layer(self) -> float:
        """Parameters of a layer."""
        return (self.parameters - self.ends) / self.layers


@final
@dataclass(frozen=True, kw_only=True)
class Plan:
    """A run.

    Args:
        accelerators: that train, each with a share of the model.
        prompts, group_size, length: of a step; tokens of a response.
        lag: steps that a response may be behind.
    """

    model: Model
    accelerators: int
    prompts: int
    group_size: int
    length: int
    lag: int

    @property
    def tokens(self) -> int:
        """Response tokens of a step."""
        return self.prompts * self.group_size * self.length


SEVEN = Model(name="7B", parameters=7.62e9, width=3584, layers=28, vocabulary=152_064)
THIRTY_TWO = Model(name="32B", parameters=32.8e9, width=5120, layers=64, vocabulary=152_064)
SEVENTY = Model(name="70B", parameters=70.6e9, width=8192, layers=80, vocabulary=128_256)
PLANS = tuple(
    Plan(model=m, accelerators=n, prompts=p, group_size=16, length=t, lag=lag)
    for m, n, p, t, lag in (
        (SEVEN, 8, 64, 2048, 1),
        (THIRTY_TWO, 64, 256, 8192, 2),
        (SEVENTY, 1024, 1024, 16_384, 4),
    )
)
# Bytes a second between two machines, or from an accelerator to its host: assumed, not measured.
BANDWIDTHS = {"100 Gbit/s network": 12.5e9, "host (PCIe 5)": 50e9, "8 x 400 Gbit/s": 400e9}


def memory(
    model: Model, accelerators: int, *, tokens: int, weight: int = 4, narrow: int = 2
) -> dict[str, float]:
    """GiB on one accelerator that trains, under FSDP2 with AdamW.

        shares      4 P b / N: weights, gradients, two moments
        gathered    2 E b + 3 Y b: embedding and output matrix for the whole pass, one layer in use
                    and the next, and gradients of each before they are summed
        kept        W L T b': one hidden state a token and layer, with gradient checkpointing
        logits      3 pieces of 256 tokens times 8192 words

    with P parameters, E of them in embedding and output matrix and Y in a layer, b bytes a weight,
    b' a number of the pass.

    Args:
        accelerators: N.
        tokens: T of one forward pass.
        weight, narrow: b and b'.

    Example:
        >>> found = memory(SEVEN, 8, tokens=8192)
        >>> round(found["shares"], 1), round(found["total"], 1)
        (14.2, 26.5)
    """
    within(1, 10**6, accelerators=accelerators)
    positive(tokens=tokens)
    found = {
        "shares": 4 * model.parameters * weight / accelerators,
        "gathered": (2 * model.ends + 3 * model.layer) * weight,
        "kept": model.width * model.layers * tokens * narrow,
        "logits": 3 * TOKENS * VOCABULARY * 4,
    }
    found = {name: float(value) / GIB for name, value in found.items()}
    return found | {"total": sum(found.values())}


def rollout_bytes(head: int) -> float:
    """Of one response token in our store.

    Example:
        >>> rollout_bytes(0), rollout_bytes(128)
        (11.0, 1035.0)
    """
    within(0, 10**6, head=head)
    return FIXED + HEAD * head


def sync_seconds(model: Model, bandwidth: float, *, narrow: int = 2) -> float:
    """To send every weight once, in the sampler's format; a pipelined broadcast to many is one.

    Args:
        bandwidth: bytes a second.

    Example:
        >>> round(sync_seconds(SEVENTY, 12.5e9), 1)
        11.3
    """
    positive(bandwidth=bandwidth)
    return model.parameters * narrow / bandwidth


def queue_groups(prompts: int, lag: int) -> int:
    """Groups that may be begun and not yet trained on, if no response may be older than `lag`.

        (lag + 1) prompts: those of the step that trains, and of `lag` steps ahead

    Example:
        >>> queue_groups(64, 2)
        192
    """
    within(1, 10**9, prompts=prompts)
    within(0, 10**6, lag=lag)
    return (lag + 1) * prompts


def lag_needed(sample: float, train: float) -> int:
    """Steps ahead that a sampler must be allowed so that it never waits for the trainer.

        ceil(sample / train)

    Args:
        sample: seconds from a question to the last token of its longest response.
        train: seconds of a step of the trainer.

    Example:
        >>> lag_needed(300, 120), lag_needed(60, 120)
        (3, 1)
    """
    positive(sample=sample, train=train)
    return int(-(-sample // train))


def tables() -> str:
    """The tables of docs/scaling.md, in Markdown."""
    return "\n\n".join((_memory_table(), _rollout_table(), _sync_table()))


def _memory_table() -> str:
    rows = []
    for plan in PLANS:
        for tokens in (8192, 32_768):
            found = memory(plan.model, plan.accelerators, tokens=tokens)
            cells = [f"{found[n]:.1f}" for n in ("shares", "gathered", "kept", "total")]
            rows.append([plan.model.name, f"{plan.accelerators:,}", f"{tokens:,}", *cells])
    heads = ["model", "GPUs that train", "tokens a pass", "shares", "gathered", "kept", "GiB a GPU"]
    return _markdown(heads, rows)


def _rollout_table() -> str:
    rows = []
    for plan in PLANS:
        sizes = [plan.tokens * rollout_bytes(head) / 1e9 for head in (0, 32, 128)]
        groups = queue_groups(plan.prompts, plan.lag)
        held = sizes[1] * (plan.lag + 1)
        step = f"{plan.prompts:,} x {plan.group_size} x {plan.length:,}"
        cells = [f"{size:.3g}" for size in sizes]
        queue = [str(plan.lag), f"{groups:,}", f"{held:.3g}"]
        rows.append([f"{plan.accelerators:,}", step, *cells, *queue])
    heads = ["GPUs", "prompts x group x tokens", "GB a step", "head 32", "head 128", "lag"]
    return _markdown([*heads, "groups in the queue", "GB in the queue (head 32)"], rows)


def _sync_table() -> str:
    rows = [
        [
            plan.model.name,
            f"{plan.model.parameters * 2 / 1e9:.1f}",
            *(f"{sync_seconds(plan.model, speed):.2g}" for speed in BANDWIDTHS.values()),
        ]
        for plan in PLANS
    ]
    heads = ["model", "GB in bfloat16", *(f"s at {name}" for name in BANDWIDTHS)]
    return _markdown(heads, rows)


def _markdown(heads: list[str], rows: list[list[str]]) -> str:
    lines = [heads, ["---"] * len(heads), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
