"""What claims measure: a study's figures, on estimators of the catalogue or changed from it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from windage.analysis.studies.figures import from_moments
from windage.estimators.advantage import constant, gae
from windage.estimators.batch import Batch
from windage.estimators.catalogue import get
from windage.estimators.correction import Correction
from windage.estimators.estimator import Coefficients, Estimator, batch_terms, token_coefficients
from windage.estimators.member import use
from windage.toy.exact.moments import Moments
from windage.toy.exact.plan import exact
from windage.toy.exact.tuples import Draw, Edit, Responses, every_tuple, listed
from windage.toy.exact.walk import Walk, conditional, pull_back
from windage.toy.objective import Objective, objective
from windage.toy.problems import Problem


def moments(estimator: Estimator, problem: Problem, group_size: int = 1) -> Moments:
    """Mean and variance of one batch, by the cheapest exact engine."""
    return exact(estimator, problem, group_size)


def judge(found: Moments, problem: Problem, against: Objective | None = None) -> dict[str, float]:
    """A study's figures of some moments; NaN where a quotient has no meaning."""
    figures = from_moments(found, against or objective(problem), problem.rewards)
    return {name: float("nan") if v is None else v for name, v in figures.items()}


def figures(estimator: Estimator, problem: Problem, group_size: int = 1) -> dict[str, float]:
    """A study's figures of an estimator on a problem."""
    return judge(moments(estimator, problem, group_size), problem)


def bias(estimator: Estimator, problem: Problem, group_size: int = 1) -> float:
    """Relative bias of an estimator on a problem."""
    return figures(estimator, problem, group_size)["relative_bias"]


def merit(found: Moments, problem: Problem, responses: int) -> float:
    """Share of the best possible gain of one step that a mean over independent responses makes.

        <grad J, E g>^2 / ((|E g|^2 + var / N) |grad J|^2)

    Args:
        found: moments of the estimate from one response.
        problem: gives J.
        responses: N.
    """
    gradient = objective(problem).gradient
    along = (gradient * found.mean).sum().square()
    length = found.mean.square().sum() + found.variance / responses
    return float(along / (length * gradient.square().sum()))


def largest_weight(estimator: Estimator, problem: Problem) -> float:
    """Largest weight of a token under a correction with token reach, whatever the advantage."""
    ratios = Walk(problem).log_ratio
    map_ = estimator.corrections[0].map
    return max(float(map_(ratios, torch.full((), sign)).max()) for sign in (1.0, -1.0))


def alone(name: str, baseline: float = 0.0, **settings: Any) -> Estimator:
    """A catalogue entry for one response: a constant in place of its group's baseline."""
    return replace(get(name, **settings), advantage=use(constant, baseline=float(baseline)))


def corrected(
    name: str, reach: Any, map_: Any, baseline: float = 0.0, **settings: Any
) -> Estimator:
    """`reinforce` with a correction made of a reach and a map."""
    correction = Correction(reach=use(reach), map=use(map_, **settings))
    return replace(alone("reinforce", baseline), name=name, corrections=(correction,))


def critic(name: str = "reinforce", *, lam: float = 1.0) -> Estimator:
    """A catalogue entry with GAE as its advantage, gamma 1."""
    return replace(get(name), advantage=use(gae, gamma=1.0, lam=lam))


def relative(difference: Tensor, reference: Tensor) -> float:
    """Length of a difference relative to that of a reference."""
    return float(difference.norm() / reference.norm())


def cosine(a: Tensor, b: Tensor) -> float:
    """Cosine of two vectors of any shape."""
    return float((a * b).sum() / (a.norm() * b.norm()))


def edited(
    estimator: Estimator,
    problem: Problem,
    edit: Edit,
    group_size: int = 1,
    draws: Iterable[Draw] | None = None,
) -> Moments:
    """Moments where each batch is changed before the estimator sees it."""
    every = every_tuple(problem, group_size) if draws is None else draws
    return listed(estimator, problem, every, edit=edit)


def shaped(term: Tensor) -> Edit:
    """Add a number to the reward of each response, `[P M]`."""

    def edit(batch: Batch, index: Tensor) -> Batch:
        prompt = torch.arange(index.shape[1])[:, None]
        return replace(batch, rewards=batch.rewards + term[prompt, index])

    return edit


def valued(problem: Problem, values: Tensor) -> Edit:
    """Give each token the critic's value of the prefix before it, `[N]`."""
    before = problem.tree.paths[0]

    def edit(batch: Batch, index: Tensor) -> Batch:
        return replace(batch, values=torch.where(batch.mask, values[before.clamp(min=0)][index], 0))

    return edit


def recorded(problem: Problem, logp: Tensor, field: str = "behavior_logp") -> Edit:
    """Write other log-probabilities, `[N V]` or `[P N V]`, into a field of each batch."""
    table = Responses(replace(problem, behavior_logp=logp.expand_as(problem.logits)))

    def edit(batch: Batch, index: Tensor) -> Batch:
        prompt = torch.arange(index.shape[1])[:, None]
        return replace(batch, **{field: table.behavior_logp[prompt, index]})  # type: ignore[arg-type]

    return edit


def prefix_values(problem: Problem) -> Tensor:
    """Expected reward after each prefix under the policy, `[N]`, of a problem of one prompt."""
    return conditional(Walk(problem.on_policy()), problem.rewards.unsqueeze(0))[1][0, 0]


def scores(problem: Problem) -> Tensor:
    """Summed score of each response, `[M P N V]`: the update that a reward of 1 makes."""
    table = Responses(replace(problem, rewards=torch.ones_like(problem.rewards)))
    index = torch.arange(problem.tree.leaves).view(-1, 1, 1)
    return table.gradients(index, get("reinforce"), table.batch(index, head=False))


def score_norms(problem: Problem) -> Tensor:
    """Squared length of each response's summed score, `[M]`."""
    return scores(problem).square().sum((1, 2, 3))


def divergence(problem: Problem, of: Tensor | None = None, to: Tensor | None = None) -> float:
    """KL(of, to) of whole responses, from log-probabilities at prefixes.

    Args:
        problem: of one prompt.
        of: default: the sampler's.
        to: default: the policy's.
    """
    pair = (problem.behavior_logp if of is None else of, problem.logp if to is None else to)
    tables = (replace(problem, behavior_logp=logp.expand_as(problem.logits)) for logp in pair)
    p, q = (Walk(table).leaf_flow for table in tables)
    return float((torch.xlogy(p, p) - torch.xlogy(p, q)).sum())


def entropy(logits: Tensor) -> float:
    """Entropy of one distribution in nats."""
    return float(torch.special.entr(logits.softmax(-1)).sum())


def mean_reward(problem: Problem) -> float:
    """Expected reward under the sampler, averaged over prompts."""
    return float((Walk(problem).leaf_flow * problem.rewards).sum(-1).mean())


def central_differences(
    value: Callable[[Tensor], Tensor], at: Tensor, step: float = 1e-5
) -> Tensor:
    """Gradient of a scalar function by central differences."""
    unit = torch.eye(at.numel(), dtype=at.dtype).view(-1, *at.shape) * step
    slopes = [float(value(at + u) - value(at - u)) / (2 * step) for u in unit]
    return torch.tensor(slopes, dtype=at.dtype).view_as(at)


Update = Callable[[Tensor, Tensor], Tensor]


def own_logp(table: Responses) -> Callable[[Tensor], Tensor]:
    """Log-probability of each token of each response, `[M P 1 T]`, under any table of them."""
    real, place = table.real, table.parameter

    def rows(logp: Tensor) -> Tensor:
        return torch.where(real, logp.flatten(1)[:, place], 0.0).transpose(0, 1).unsqueeze(2)

    return rows


def over_mean(make: Callable[[float], Estimator], problem: Problem) -> Update:
    """Mean update with the batch's mean reward as baseline.

        E[(R - b) x] = E[R x] - b E[x],   b = E R

    Args:
        make: the estimator of one response with a constant baseline.
        problem: its policies are the arguments of the update.
    """
    flat = replace(problem, rewards=torch.ones_like(problem.rewards))
    by_reward, by_one = (response_update(make(0.0), p) for p in (problem, flat))
    rows, paid = own_logp(Responses(problem)), problem.rewards.transpose(0, 1)

    def update(logits: Tensor, behavior_logp: Tensor) -> Tensor:
        mass = rows(behavior_logp).sum(-1).exp().squeeze(-1)
        mean = (mass * paid).sum(0).mean()
        return by_reward(logits, behavior_logp) - mean * by_one(logits, behavior_logp)

    return update


def response_update(estimator: Estimator, problem: Problem) -> Update:
    """Mean update of one response as a function of logits and the sampler's log-probabilities.

    The responses are listed once, and what does not depend on the two policies is computed once:
    for ascents of thousands of steps.  Log-probabilities must be finite.
    """
    table = Responses(problem)
    everyone = torch.arange(problem.tree.leaves).view(-1, 1, 1).expand(-1, problem.prompts, 1)
    first = table.batch(everyone, head=estimator.centering is not None)
    terms = batch_terms(estimator, first)
    place, before, real = table.parameter, table.prefix.clamp(min=0), table.real
    rows = own_logp(table)
    still = estimator.centering is None and all(c.idle for c in estimator.corrections)
    constant_ = token_coefficients(estimator, terms, first) if still else None

    def found(logp: Tensor, drawn: Tensor, behavior_logp: Tensor) -> Coefficients:
        batch = replace(first, logp=rows(logp), behavior_logp=drawn)
        if estimator.centering is not None:
            p, q = (t[:, before].transpose(0, 1).unsqueeze(2) for t in (logp, behavior_logp))
            batch = replace(batch, head_logp=p, head_behavior_logp=q)
        return token_coefficients(estimator, terms, batch)

    def update(logits: Tensor, behavior_logp: Tensor) -> Tensor:
        logp, drawn = logits.log_softmax(-1), rows(behavior_logp)
        terms_ = constant_ or found(logp, drawn, behavior_logp)
        mass = drawn.sum(-1, keepdim=True).exp() * real[:, None, None]
        own = (mass * terms_.own).transpose(0, 1).flatten(1)
        visits = torch.zeros_like(logits).flatten(1).index_add(1, place.flatten(), own)
        visits = visits.view_as(logits)
        if terms_.head is not None:
            heads = (mass.unsqueeze(-1) * terms_.head).transpose(0, 1).flatten(1, 3)
            visits = visits.index_add(1, before.flatten(), heads)
        return pull_back(visits, logp.exp())

    return update


def path(
    update: Update,
    logits: Tensor,
    sampler: Callable[[Tensor], Tensor],
    *,
    at: Iterable[int],
    rate: float = 1.0,
) -> list[Tensor]:
    """Logits after so many steps of an expected update.

    Args:
        update: of logits and the sampler's log-probabilities.
        logits: at the start.
        sampler: its log-probabilities, from the logits of each step.
        at: numbers of steps, in ascending order.
        rate: step size.
    """
    wanted = list(at)
    found: list[Tensor] = []
    for step in range(wanted[-1] + 1):
        if step == wanted[len(found)]:
            found.append(logits)
        if step < wanted[-1]:
            logits = logits + rate * update(logits, sampler(logits))
    return found
