"""The engines against torch's own differentiation of losses written as their papers write them."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest
import torch
from checks import assert_close
from problem_strategies import drawn, entry, typical
from torch import Tensor

from windage.estimators.catalogue import CATALOGUE
from windage.estimators.estimator import coefficients, surrogate
from windage.toy.exact.plan import exact, options, undefined
from windage.toy.exact.tuples import Responses, accepted, every_tuple
from windage.toy.problems import Problem

RELATIVE = 1e-9
Advantage = Callable[[Tensor], Tensor]
Loss = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
NAMES = [name for name, e in CATALOGUE.items() if not undefined(e, typical(), 2)]


def smooth(number: int) -> Problem | None:
    """A problem of one prompt whose sampler covers every response, few enough to list."""
    problem = drawn(number, leaves=8, prompts=(1,))
    if problem.behavior_logp.min() < -40 or problem.tree.leaves < 2:
        return None
    return problem


def first_problems(start: int, count: int) -> list[Problem]:
    usable = (smooth(n) for n in itertools.count(start))
    return list(itertools.islice((p for p in usable if p is not None), count))


def gradients(loss: Callable[..., Tensor], logits: Tensor, *fields: Tensor) -> Tensor:
    """Minus the gradient of the loss of each batch."""
    one = torch.func.grad(loss)
    return -torch.func.vmap(one, in_dims=(None, *(0 for _ in fields)))(logits, *fields)


def moments_of(estimates: Tensor, chance: Tensor) -> tuple[Tensor, Tensor]:
    mean = torch.einsum("m,mpnv->pnv", chance, estimates)
    return mean, chance @ estimates.square().sum((1, 2, 3)) - mean.square().sum()


def of_the_surrogate(name: str, problem: Problem, group_size: int) -> tuple[Tensor, Tensor] | None:
    """Mean and variance of minus the gradient of the loss that trains, group by listed group."""
    estimator, table = entry(name, problem), Responses(problem)
    ((index, chance),) = every_tuple(problem, group_size)
    batch = table.batch(index, head=estimator.centering is not None)
    found = coefficients(estimator, batch)
    real = table.real[index]
    own = torch.where(real, found.own, 0.0)
    head = own.new_zeros((*own.shape, problem.tree.vocab)) if found.head is None else found.head
    head = torch.where(real.unsqueeze(-1), head, 0.0)

    def loss(logits: Tensor, own: Tensor, head: Tensor, at: Tensor) -> Tensor:
        logp = logits.log_softmax(-1)
        rows = logp[0, table.prefix.clamp(min=0)[at[0]]]
        return surrogate(own[0], logp.flatten()[table.parameter[at[0]]]) + surrogate(head[0], rows)

    keep = accepted(estimator, batch)
    chance = chance if keep is None else chance * keep
    if chance.sum() == 0:
        return None
    return moments_of(gradients(loss, problem.logits, own, head, index), chance / chance.sum())


@pytest.mark.parametrize("name", NAMES)
def test_every_engine_equals_autograd_of_the_surrogate(name: str) -> None:
    for problem in first_problems(7_000 + 50 * NAMES.index(name), 3):
        if undefined(entry(name, problem), problem, 2):
            continue
        if (expected := of_the_surrogate(name, problem, 2)) is not None:
            assert agreeing(name, problem, 2, *expected) >= 2


def agreeing(name: str, problem: Problem, group_size: int, mean: Tensor, variance: Tensor) -> int:
    """Check every engine that serves an entry on a problem; their number."""
    engines = [
        o.engine for o in options(entry(name, problem), problem, group_size) if not o.refusal
    ]
    for engine in engines:
        moments = exact(entry(name, problem), problem, group_size, engine)
        assert_close(moments.mean, mean, relative=RELATIVE)
        assert_close(moments.variance, variance, relative=RELATIVE)
    return len(engines)


# Losses of one group as published: r, mu log-probabilities [G T], mask [G T], advantages [G 1].


def clipped(low: float, high: float) -> Callable[[Tensor, Tensor], Tensor]:
    return lambda r, a: torch.minimum(r * a, r.clamp(1 - low, 1 + high) * a)


def grpo(logp: Tensor, mu: Tensor, mask: Tensor, a: Tensor) -> Tensor:
    terms = clipped(0.2, 0.2)((logp - mu).exp(), a) * mask
    return -(terms.sum(1) / mask.sum(1)).mean()


def dapo(logp: Tensor, mu: Tensor, mask: Tensor, a: Tensor) -> Tensor:
    return -(clipped(0.2, 0.28)((logp - mu).exp(), a) * mask).sum() / mask.sum()


def cispo(logp: Tensor, mu: Tensor, mask: Tensor, a: Tensor) -> Tensor:
    weight = (logp - mu).exp().clamp(max=5.0).detach()
    return -(weight * a * logp * mask).sum() / mask.sum()


def gspo(logp: Tensor, mu: Tensor, mask: Tensor, a: Tensor) -> Tensor:
    s = ((logp - mu) * mask).sum(1, keepdim=True).div(mask.sum(1, keepdim=True)).exp()
    return -clipped(3e-4, 4e-4)(s, a).mean()


def token_is(logp: Tensor, mu: Tensor, mask: Tensor, a: Tensor) -> Tensor:
    return -((logp - mu).exp() * a * mask).sum() / len(a)


def trajectory_is(logp: Tensor, mu: Tensor, mask: Tensor, a: Tensor) -> Tensor:
    return -(((logp - mu) * mask).sum(1, keepdim=True).exp() * a).mean()


def topr(logp: Tensor, mu: Tensor, mask: Tensor, a: Tensor) -> Tensor:
    total = (logp * mask).sum(1, keepdim=True)
    w = ((logp - mu) * mask).sum(1, keepdim=True).exp().detach()
    return -(torch.where(a >= 0, 1.0, w.clamp(0, 1)) * a * total).mean()


def rloo(logp: Tensor, mu: Tensor, mask: Tensor, a: Tensor) -> Tensor:
    return -(a * logp * mask).sum() / len(a)


def standardized(r: Tensor) -> Tensor:
    return (r - r.mean(-1, keepdim=True)) / (r.std(-1, keepdim=True) + 1e-6)


def left_out(r: Tensor) -> Tensor:
    return r - (r.sum(-1, keepdim=True) - r) / (r.shape[-1] - 1)


def itself(r: Tensor) -> Tensor:
    return r


PUBLISHED: dict[str, tuple[Advantage, Loss]] = {
    "grpo": (standardized, grpo),
    "dapo": (standardized, dapo),
    "cispo": (standardized, cispo),
    "gspo": (standardized, gspo),
    "token_is": (left_out, token_is),
    "trajectory_is": (left_out, trajectory_is),
    "topr": (itself, topr),
    "rloo": (left_out, rloo),
}


def of_the_paper(
    problem: Problem, group_size: int, advantage: Advantage, published: Loss, *, refill: bool
) -> tuple[Tensor, Tensor]:
    """The same for a published loss, its ratios differentiated where its paper lets them be."""
    table = Responses(problem)
    index = torch.tensor(list(itertools.product(range(problem.tree.leaves), repeat=group_size)))
    flow = problem.behavior_logp.flatten()[table.parameter].mul(table.real).sum(1).exp()
    rewards, chance = problem.rewards[0][index], flow[index].prod(1)
    # Papers divide rounding by eps where rewards are equal; here such a group has no advantage.
    equal = (rewards.amax(1) == rewards.amin(1)).unsqueeze(1)
    advantages = torch.where(equal & (advantage is not itself), 0.0, advantage(rewards))
    chance = torch.where(equal.squeeze(1) & refill, 0.0, chance)

    def loss(logits: Tensor, advantages: Tensor, at: Tensor) -> Tensor:
        place, mask = table.parameter[at], table.real[at].double()
        logp = logits.log_softmax(-1).flatten()[place] * mask
        mu = problem.behavior_logp.flatten()[place] * mask
        return published(logp, mu, mask, advantages.unsqueeze(1))

    estimates = gradients(loss, problem.logits, advantages, index)
    return moments_of(estimates, chance / chance.sum())


def suitable(count: int) -> list[Problem]:
    """Problems with varied rewards of which all groups of three are few."""
    several = first_problems(9_000, 4 * count)
    return [p for p in several if p.tree.leaves <= 8 and p.rewards.unique().numel() > 1][:count]


@pytest.mark.parametrize("name", PUBLISHED)
def test_engines_equal_autograd_of_the_published_loss(name: str) -> None:
    advantage, published = PUBLISHED[name]
    for problem in suitable(4):
        expected = of_the_paper(problem, 3, advantage, published, refill=name == "dapo")
        assert agreeing(name, problem, 3, *expected) >= 2


def test_another_clip_is_noticed() -> None:
    def wrong(logp: Tensor, mu: Tensor, mask: Tensor, a: Tensor) -> Tensor:
        return -((clipped(0.2, 0.3)((logp - mu).exp(), a) * mask).sum(1) / mask.sum(1)).mean()

    noticed = 0
    for problem in suitable(8):
        expected = of_the_paper(problem, 3, standardized, wrong, refill=False)
        try:
            agreeing("grpo", problem, 3, *expected)
        except AssertionError:
            noticed += 1
    assert noticed >= 1
