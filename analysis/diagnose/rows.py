"""One response as a dump tells it, whoever wrote the dump, and what is said of one set aside."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import final

import numpy as np
from jaxtyping import Bool, Float, Int


@final
@dataclass(frozen=True, kw_only=True, eq=False)
class Row:
    """What is known of a response; None: the dump does not say.

    Arrays have one entry a token of the response (prompt and padding taken away), nats throughout.

    Args:
        where: file and line or row, for messages.
        mask: True on the tokens that the policy chose and that are trained on, one or more of them;
            numbers beside a False are 0 where the dump holds none.
        behavior_logp: by the sampler.
        logp: by the policy being trained, as late as the dump has it.
        proximal_logp: by the trainer before the update, where it is kept apart from `logp`.
        reference_logp: by the reference.
        response_ids, prompt_ids: tokens.
        versions: number of the weights that drew each token; where the dump has only the first and
            the last of a response, the first, and the last is `others["last_version"]`.
        current_version: number of the weights that were trained.
        probability_square: sum of squared probabilities before each token.
        head_ids, head_behavior_logp: the sampler's likeliest tokens.
        head_logp: of these tokens, by the policy being trained, over the whole vocabulary.
        group_id, sample_id, step: names; responses of one group share a prompt.  A dump without
            groups groups by step and tokens of the prompt.
        reward, outcome: after and before shaping.
        advantages: as the framework computed them, a token each.
        finish_reason: `stop`, `length`, or the framework's word.
        rejected: why it was not trained on; None: it was, or the dump does not tell.
        temperature, top_p, top_k: of the sampler.
        raw: True: the log-probabilities are of the model before temperature, top-k and top-p;
            False: of the distribution that drew.
        elapsed: seconds from request to verdict.
        verifier_seconds: what the verdict took of them.
        others: fields without a place here.
    """

    where: str
    mask: Bool[np.ndarray, " T"]
    behavior_logp: Float[np.ndarray, " T"] | None = None
    logp: Float[np.ndarray, " T"] | None = None
    proximal_logp: Float[np.ndarray, " T"] | None = None
    reference_logp: Float[np.ndarray, " T"] | None = None
    response_ids: Int[np.ndarray, " T"] | None = None
    prompt_ids: Int[np.ndarray, " S"] | None = None
    versions: Int[np.ndarray, " T"] | None = None
    current_version: int | None = None
    probability_square: Float[np.ndarray, " T"] | None = None
    head_ids: Int[np.ndarray, "T K"] | None = None
    head_behavior_logp: Float[np.ndarray, "T K"] | None = None
    head_logp: Float[np.ndarray, "T K"] | None = None
    group_id: str | None = None
    sample_id: str | None = None
    step: int | None = None
    reward: float | None = None
    outcome: float | None = None
    advantages: Float[np.ndarray, " T"] | None = None
    finish_reason: str | None = None
    rejected: str | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    raw: bool | None = None
    elapsed: float | None = None
    verifier_seconds: float | None = None
    others: dict[str, object] = field(default_factory=dict)

    @cached_property
    def count(self) -> int:
        """Tokens that the policy chose."""
        return int(np.count_nonzero(self.mask))

    @cached_property
    def whole(self) -> bool:
        """The policy chose every token."""
        return self.count == len(self.mask)


@final
@dataclass(frozen=True, kw_only=True)
class Rejected:
    """A row that was set aside, or a file in a folder that holds no rows; never silent.

    Args:
        where: file and line, row or sample.
        reason: a few words, the same for every row with this fault, to count by.
        what: the sentence's end after `where`: what was found and what is allowed.
        rows: how many rows it stands for; 0: a file that holds none.
    """

    where: str
    reason: str
    what: str
    rows: int = 1

    def __str__(self) -> str:
        return f"{self.where} {self.what}"
