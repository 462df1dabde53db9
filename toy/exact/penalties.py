"""Penalties on a tree: what they add to rewards of responses, to rewards of tokens and to the loss.

With penalties a response contributes A x + y: x is what multiplies the advantage, y collects the
penalties.  Those in the reward of a response change A; those in the reward of a token are earned
from each token on; those in the loss are a coefficient of each token's score.
"""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from windage.estimators.estimator import Estimator
from windage.estimators.member import Member
from windage.toy.exact.walk import Walk
from windage.toy.problems import Problem

BY_RESPONSE = {"rewards", "outcomes", "lengths", "present"}
BY_TOKEN = {"reference_ratio", "log_ratio", "logp", "behavior_logp", "mask"}


def in_rewards(estimator: Estimator) -> list[Member]:
    """Penalties that change rewards; without a length, shaping by length is inert."""
    placed = [m for m in estimator.active_penalties if m.traits.place == "reward"]
    return [m for m in placed if dict(m.settings).get("length", 0) is not None]


def active(estimator: Estimator) -> bool:
    """Whether some penalty changes rewards or coefficients."""
    others = any(m.traits.place != "reward" for m in estimator.active_penalties)
    return others or bool(in_rewards(estimator))


def refusal(estimator: Estimator) -> str | None:
    """Why recursions over a tree do not hold an estimator's penalties, or None."""
    sorts = set()
    for penalty in estimator.active_penalties:
        needs, place = set(penalty.traits.needs), penalty.traits.place
        by_response = needs <= BY_RESPONSE
        if place == "reward" and not by_response:
            return f"{penalty.name} looks at more than rewards and lengths"
        if place == "token_reward" and any(c.reads != "nothing" for c in estimator.corrections):
            return f"with {penalty.name} the sign of the advantage differs by token"
        if place == "token_reward" and not needs <= BY_TOKEN:
            return f"{penalty.name} looks at more than its own token"
        if place == "loss" and not (by_response or needs <= BY_TOKEN):
            return f"{penalty.name} looks at more than its own token or response"
        if penalty.traits.scope not in ("token", "response"):
            return f"{penalty.name} looks beyond its own response"
        if not by_response and penalty.traits.scope != "token":
            return f"{penalty.name} looks at other tokens of its response"
        if place == "loss":
            sorts.add(by_response)
    return "penalties in the loss by token and by response" if len(sorts) > 1 else None


def shaped(
    estimator: Estimator, rewards: Float[Tensor, "P M"], lengths: Int[Tensor, "P M"]
) -> Float[Tensor, "P M"]:
    """Rewards of responses with what penalties add to them."""
    found = rewards
    for penalty in in_rewards(estimator):
        found = found + _by_response(penalty, rewards, lengths)
    return found


def _by_response(penalty: Member, rewards: Tensor, lengths: Tensor) -> Tensor:
    fields = {
        "rewards": rewards,
        "outcomes": rewards,
        "lengths": lengths,
        "present": torch.ones_like(rewards, dtype=torch.bool),
    }
    found: Tensor = penalty(*(fields[name] for name in penalty.traits.needs))
    return found.to(rewards.dtype)


def token_terms(
    estimator: Estimator, walk: Walk, share: Float[Tensor, "P M"] | None
) -> dict[str, Any]:
    """The fields of `Weights` that penalties fill.

    Args:
        estimator: read for its penalties.
        walk: the sampler's measure.
        share: of each response by the aggregation; None is 1.
    """
    added = earned = whole = None
    after: Tensor | float = 0.0
    for penalty in estimator.active_penalties:
        if penalty.traits.place == "reward":
            continue
        if set(penalty.traits.needs) <= BY_RESPONSE:
            problem = walk.problem
            value = _by_response(penalty, problem.rewards, problem.lengths).squeeze(-1)
            whole = value if whole is None else whole + value
            continue
        value = penalty(*(_by_token(walk, name) for name in penalty.traits.needs))
        if penalty.traits.place == "loss":
            added = value if added is None else added + value
        else:
            earned = value if earned is None else earned + value
            after = after + _forced(penalty, walk.problem)
    if whole is not None:
        added, share = torch.ones_like(walk.behavior), whole if share is None else share * whole
    return {"added": added, "earned": earned, "after": after, "share": share}


def _by_token(walk: Walk, name: str) -> Tensor:
    if name == "reference_ratio":
        return walk.log_ratio_of("logp", "reference_logp")
    return walk.log_ratio if name == "log_ratio" else walk.fields[name]


def _forced(penalty: Member, problem: Problem) -> Tensor | float:
    """What a token reward gives to forced tokens, of which every probability is 1."""
    if problem.longest <= problem.tree.horizon:
        return 0.0
    zero = torch.zeros((), dtype=torch.float64)
    known = {"mask": torch.ones((), dtype=torch.bool)}
    each = penalty(*(known.get(name, zero) for name in penalty.traits.needs))
    counts = torch.tensor(problem.tree.leaf_bounds).diff()
    chosen = torch.arange(1, problem.tree.horizon + 1).repeat_interleave(counts)
    forced: Tensor = (problem.lengths - chosen).double() * each
    return forced
