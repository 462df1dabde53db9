"""The settings of a pipeline, and what they are allowed to be."""

from __future__ import annotations

from dataclasses import dataclass, field
from math import inf, isfinite
from typing import final

from windage.estimators.errors import BadInput, unknown, within
from windage.toy.pipeline.laws import Equal, Law, Lognormal, Observed

MODES = {
    "synchronous": "write a batch, wait for all of it, update, send the weights, begin again",
    "overlap": "train on one batch while the next is written; both wait for the slower",
    "asynchronous": "a free slot starts at once under the newest weights that have arrived",
    "in_flight": "as asynchronous; running responses go on under new weights, KV cache kept",
    "in_flight_recompute": "the same, and what was written is read again under the new weights",
}


@final
@dataclass(frozen=True, kw_only=True)
class Pipeline:
    """A pipeline of slots that write and a trainer that consumes.

    Args:
        mode: one of `MODES`.
        slots: responses that can be written at the same time.
        batch: responses that a step consumes, a multiple of the group size.
        group_size: responses of a prompt; they join the queue together, after the slowest.
        tokens: law of a response's length.
        token_seconds: time a slot takes for a token.
        prompt_tokens: read before the first token, and again by `in_flight_recompute`.
        read_seconds: time a slot takes to read a token that is already there.
        verifier: law of the seconds from the end of a response to its reward; holds no slot.
        scoring_seconds: what the trainer does before an update, such as log-probabilities.
        update: law of the seconds of an update; its end is the commit of the next version.
        sync_seconds: from a commit to the arrival of its weights at the slots.
        pause_seconds: every running response stands still so long when weights arrive in flight.
        publish_every: commits from one publication of weights to the next.
        max_lag: drop a group once the oldest weights of its responses are further behind.
        capacity: start only while started - dropped < (capacity + published + 1) * publish_every *
            batch, with the number of versions published so far.
        drop_after: seconds in a slot after which a response is dropped.
        fail_after: seconds in a slot after which a response is cut and earns no reward.
        refill: drop groups whose rewards are all equal.
        pass_rate: mean probability of a right answer over prompts.
        stretch: mean length of the hardest prompt over that of the easiest.
        observed: responses that were seen, in the place of `tokens`, `token_seconds`, `verifier`.
    """

    mode: str = "asynchronous"
    slots: int = 64
    batch: int = 64
    group_size: int = 1
    tokens: Law = field(default_factory=Lognormal)
    token_seconds: float = 1.0
    prompt_tokens: float = 0.0
    read_seconds: float = 0.0
    verifier: Law = field(default_factory=lambda: Equal(0.0))
    scoring_seconds: float = 0.0
    update: Law = field(default_factory=lambda: Equal(0.5))
    sync_seconds: float = 0.0
    pause_seconds: float = 0.0
    publish_every: int = 1
    max_lag: int | None = None
    capacity: float | None = None
    drop_after: float = inf
    fail_after: float = inf
    refill: bool = False
    pass_rate: float = 0.5
    stretch: float = 1.0
    observed: Observed | None = None

    def __post_init__(self) -> None:
        if self.mode not in MODES:
            raise unknown("mode", self.mode, MODES)
        for name in ("slots", "batch", "group_size", "publish_every"):
            if getattr(self, name) < 1:
                raise BadInput(f"{name} is {getattr(self, name)}; allowed: an integer above 0")
        for name in SECONDS:
            if not (isfinite(getattr(self, name)) and getattr(self, name) >= 0):
                raise BadInput(f"{name} is {getattr(self, name)}; allowed: finite, 0 or more")
        for name in ("drop_after", "fail_after"):
            if not getattr(self, name) > 0:
                raise BadInput(f"{name} is {getattr(self, name)}; allowed: a time above 0")
        within(0, inf, max_lag=self.max_lag or 0, capacity=self.capacity or 0)
        within(1e-3, 1 - 1e-3, pass_rate=self.pass_rate)
        within(1e-3, 1e3, stretch=self.stretch)
        self._refuse_pairs()

    def _refuse_pairs(self) -> None:
        """Refuse settings that do not go together."""
        if self.batch % self.group_size:
            raise BadInput(
                f"batch is {self.batch}; allowed: a multiple of group_size, {self.group_size}"
            )
        if self.refill and self.group_size < 2:
            raise BadInput("refill with group_size 1; allowed: groups of 2 or more")
        if self.barrier and (self.capacity is not None or self.publish_every > 1):
            name = "publish_every" if self.capacity is None else "capacity"
            raise BadInput(f"{name} in mode {self.mode}; allowed: asynchronous modes")
        if self.mode == "overlap" and self.max_lag == 0:
            raise BadInput("max_lag is 0 in mode overlap, where every lag is 1; allowed: 1 or more")
        if self.pause_seconds and self.mode[:9] != "in_flight":
            raise BadInput(f"pause_seconds in mode {self.mode}; allowed: modes in_flight...")
        if (
            self.observed is None
            and self.token_seconds * self.tokens.mean + self.prompt_tokens * self.read_seconds <= 0
        ):
            raise BadInput("responses take no time; allowed: a mean length and time above 0")

    @property
    def barrier(self) -> bool:
        """Whether slots wait for the trainer."""
        return self.mode in ("synchronous", "overlap")


SECONDS = (
    "token_seconds",
    "prompt_tokens",
    "read_seconds",
    "scoring_seconds",
    "sync_seconds",
    "pause_seconds",
)
