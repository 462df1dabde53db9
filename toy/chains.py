"""Policies with automaton states: problems of real length.

The logits over the vocabulary depend on the state alone and serve at every time, so a response of
thirty thousand tokens has as many parameters as one of sixteen.  A response ends when a token has
no successor, or is cut at the horizon; its reward depends on the state in which that happened.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import final

import torch
from jaxtyping import Float, Int
from torch import Tensor

from windage.estimators.errors import BadInput


@final
@dataclass(frozen=True, kw_only=True, eq=False)
class Chain:
    """Prompts that share an automaton: policy, sampler and rewards of each.

    Args:
        name: for tables.
        successor: next state of a token at a state, -1 for the end.
        start: first state.
        horizon: length at which a response is cut.
        logits: the parameters, one row a state.
        behavior_logp: log-probabilities of the sampler at each state.
        rewards: of a response that stopped at each state, then of one cut at each state.
    """

    name: str
    successor: Int[Tensor, "S V"]
    start: int
    horizon: int
    logits: Float[Tensor, "P S V"]
    behavior_logp: Float[Tensor, "P S V"]
    rewards: Float[Tensor, "P C"]
    sha256: str | None = None

    @property
    def prompts(self) -> int:
        return self.logits.shape[0]

    @property
    def responses(self) -> None:
        """Too many to count."""
        return None

    @property
    def longest(self) -> int:
        """Tokens of the longest response that the problem allows."""
        return self.horizon

    @property
    def logp(self) -> Float[Tensor, "P S V"]:
        """Log-probabilities of the policy at each state."""
        return self.logits.log_softmax(-1)

    def on_policy(self) -> Chain:
        """The same problem sampled from the policy itself."""
        return replace(self, behavior_logp=self.logp)

    def select(self, prompt: int) -> Chain:
        """The problem of one prompt."""
        one = slice(prompt, prompt + 1)
        return replace(
            self,
            logits=self.logits[one],
            behavior_logp=self.behavior_logp[one],
            rewards=self.rewards[one],
        )


def reasoning(
    horizon: int = 256,
    success: Sequence[float] = (0.2, 0.5, 0.8),
    *,
    mean_length: float | None = None,
) -> Chain:
    """A response that thinks, on track or off it, until it stops; right if it stopped on track.

    Tokens: 0 go on, 1 change track, 2 look again (the way back is easier from there), 3 stop.
    States: on track, off track, and the same two while looking again.

    Args:
        horizon: length at which a response is cut and counts as wrong.
        success: long-run share of time on track, a prompt.
        mean_length: tokens until a stop, on average; default a quarter of the horizon, at least 4.

    Raises:
        BadInput: a horizon below 1.

    Example:
        >>> reasoning(4096).logits.shape
        torch.Size([3, 4, 4])
    """
    on, off, on_again, off_again = range(4)
    if not horizon >= 1:
        raise BadInput(f"horizon is {horizon}; allowed: a whole number from 1")
    successor = torch.tensor(
        [
            [on, off, on_again, -1],
            [off, on, off_again, -1],
            [on, off, on_again, -1],
            [off, on, off_again, -1],
        ]
    )
    stop = 1.0 / (mean_length or max(4.0, horizon / 4))
    look, leave = 0.2, min(0.2, 8 * stop)
    rows = []
    for share in success:
        away, back = leave * (1 - share), leave * share
        change = [away, back, 0.5 * away, min(0.4, 1.5 * back)]
        rows.append([[1 - c - look - stop, c, look, stop] for c in change])
    rewards = torch.zeros(len(rows), 8, dtype=torch.float64)
    rewards[:, on] = rewards[:, on_again] = 1.0
    logits = torch.tensor(rows, dtype=torch.float64).log()
    return Chain(
        name="reasoning",
        successor=successor,
        start=off,
        horizon=horizon,
        logits=logits,
        behavior_logp=logits.log_softmax(-1),
        rewards=rewards,
    )


CHAINS: dict[str, Callable[..., Chain]] = {"reasoning": reasoning}
