"""Batches of a chain: responses drawn token by token, all at once, until each has ended.

A response has as many uniform numbers as the horizon has tokens, whether it uses them or not, so
that a batch has the same numbers whatever is drawn beside it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, final

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from windage.estimators.batch import Batch
from windage.estimators.estimator import Estimator, coefficients
from windage.toy.chains import Chain
from windage.toy.exact.walk import pull_back


@final
@dataclass(frozen=True, kw_only=True, eq=False)
class Drawn:
    """Responses of batches, 0 after the end.

    Args:
        parameter: number of each token's logit within its prompt: state times vocabulary + token.
        lengths: in tokens.
        end: column of the rewards.
    """

    parameter: Int[Tensor, "M P G T"]
    lengths: Int[Tensor, "M P G"]
    end: Int[Tensor, "M P G"]

    @property
    def mask(self) -> Bool[Tensor, "M P G T"]:
        """Whether a place holds a token."""
        return torch.arange(self.parameter.shape[-1]) < self.lengths.unsqueeze(-1)


@final
class Paths:
    """How batches of a chain are drawn, and an estimate is made of them."""

    at_once = 4_000_000

    def __init__(self, chain: Chain) -> None:
        self.chain = chain
        logp, behavior_logp = chain.logp, chain.behavior_logp
        self.probability = logp.exp()
        # the last token takes the rest, so that rounding draws nothing of probability 0
        cumulative = behavior_logp.exp().cumsum(-1)
        self.cumulative = cumulative / cumulative[..., -1:]
        drawn = behavior_logp > -torch.inf
        self.logp = torch.where(drawn, logp, 0.0)
        self.behavior_logp = torch.where(drawn, behavior_logp, 0.0)

    def draw(self, batches: int, group_size: int, generator: torch.Generator) -> Drawn:
        """Walk from the first state until every response has stopped or is cut."""
        chain = self.chain
        states, vocab = chain.successor.shape
        shape = (batches, chain.prompts, group_size, chain.horizon)
        u = torch.rand(shape, dtype=torch.float64, generator=generator)
        prompt = torch.arange(chain.prompts).view(1, -1, 1).expand(shape[:-1]).flatten()
        u = u.view(-1, chain.horizon)
        parameter = torch.zeros(u.shape, dtype=torch.long)
        lengths = torch.full((len(u),), chain.horizon)
        end = torch.zeros_like(lengths)
        alive = torch.arange(len(u))
        state = torch.full_like(alive, chain.start)
        for t in range(chain.horizon):
            limits = self.cumulative[prompt[alive], state]
            token = (u[alive, t].unsqueeze(-1) >= limits).sum(-1)
            parameter[alive, t] = state * vocab + token
            following = chain.successor[state, token]
            stops = following < 0
            ended = alive[stops]
            lengths[ended], end[ended] = t + 1, state[stops]
            alive, state = alive[~stops], following[~stops]
            if len(alive) == 0:
                break
        end[alive] = states + state
        width = int(lengths.max())
        return Drawn(
            parameter=parameter[:, :width].reshape(*shape[:-1], width),
            lengths=lengths.view(shape[:-1]),
            end=end.view(shape[:-1]),
        )

    def join(self, drawn: Sequence[Drawn]) -> Drawn:
        """One after another, as wide as the longest response."""
        width = max(each.parameter.shape[-1] for each in drawn)

        def wide(parameter: Tensor) -> Tensor:
            return torch.nn.functional.pad(parameter, (0, width - parameter.shape[-1]))

        return Drawn(
            parameter=torch.cat([wide(each.parameter) for each in drawn]),
            lengths=torch.cat([each.lengths for each in drawn]),
            end=torch.cat([each.end for each in drawn]),
        )

    def batch(self, drawn: Drawn, *, head: bool) -> Batch:
        """Rewards and log-probabilities; the proximal policy is the policy itself."""
        mask, prompt = drawn.mask, torch.arange(self.chain.prompts).view(1, -1, 1)
        place = prompt.unsqueeze(-1), drawn.parameter

        def at(table: Float[Tensor, "P S V"]) -> Float[Tensor, "M P G T"]:
            return torch.where(mask, table.flatten(1)[place], 0.0)

        heads: dict[str, Any] = {}
        state = prompt.unsqueeze(-1), drawn.parameter // self.chain.logits.shape[-1]
        if head:
            heads = {
                "head_logp": self.chain.logp[state],
                "head_behavior_logp": self.chain.behavior_logp[state],
            }
        logp = at(self.logp)
        squares = self.probability.square().sum(-1)[state]
        return Batch(
            rewards=self.chain.rewards[prompt, drawn.end],
            mask=mask,
            logp=logp,
            behavior_logp=at(self.behavior_logp),
            proximal_logp=logp,
            probability_square=torch.where(mask, squares, 1.0),
            **heads,
        )

    def gradients(
        self, drawn: Drawn, estimator: Estimator, batch: Batch
    ) -> Float[Tensor, "M P S V"]:
        """The estimate of each batch: coefficients summed by parameter and pulled back."""
        found, mask = coefficients(estimator, batch), drawn.mask
        shape = drawn.parameter.shape[:2]
        states, vocab = self.chain.successor.shape
        own = torch.where(mask, found.own, 0.0).view(*shape, -1)
        visits = own.new_zeros((*shape, states * vocab))
        visits.scatter_add_(2, drawn.parameter.view(*shape, -1), own)
        if found.head is not None:
            head = torch.where(mask.unsqueeze(-1), found.head, 0.0).view(*shape, -1)
            first = drawn.parameter // vocab * vocab
            place = first.unsqueeze(-1) + torch.arange(vocab)
            visits.scatter_add_(2, place.view(*shape, -1), head)
        return pull_back(visits.view(*shape, states, vocab), self.probability)
