"""The problems on which claims are measured; angles are radians.

A problem whose parameters are shared between prefixes or prompts is a tabular problem with a
Jacobian: gradients by its logits are projected by `project`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import final

import torch
from torch import Tensor

from windage.toy.exact.walk import Walk
from windage.toy.problems import Problem, Tree, make

NEVER = -1000.0  # a logit whose probability is 0 in float64


def count(n: int) -> Tensor:
    """0, 1, ..., n - 1 in float64."""
    return torch.arange(n, dtype=torch.float64)


def _wave(tree: Tree, amplitude: float) -> Tensor:
    angle = 1 + 2 * count(tree.vocab) + 3 * count(tree.prefixes).unsqueeze(1)
    return amplitude * torch.sin(angle)


def _stale(tree: Tree, amplitude: float) -> Tensor:
    angle = 2 + 3 * count(tree.vocab) + 5 * count(tree.prefixes).unsqueeze(1)
    return amplitude * torch.cos(angle)


def ramp(responses: int, factor: int, offset: int) -> Tensor:
    """Rewards ((factor k + offset) mod responses) / (responses - 1) of response k."""
    return (factor * count(responses) + offset) % responses / (responses - 1)


def one_prompt(
    name: str, tree: Tree, logits: Tensor, rewards: Tensor, behavior: Tensor | None = None
) -> Problem:
    """A problem of one prompt, from tables without the axis of prompts."""
    sampler = None if behavior is None else behavior.unsqueeze(0)
    return make(name, tree, logits.unsqueeze(0), rewards.unsqueeze(0), behavior=sampler)


def tree(drift: float = 0.6) -> Problem:
    """TREE: three tokens, the last stops, horizon 3; the sampler is stale by `drift`."""
    shape = Tree(3, 2, 3)
    z = _wave(shape, 0.8)
    return one_prompt("TREE", shape, z, ramp(15, 7, 3), z + _stale(shape, drift))


def fresh_tree() -> Problem:
    """TREE sampled from its own policy."""
    return tree().on_policy()


def binary(problem: Problem, least: float = 0.6) -> Problem:
    """The same problem with reward 1 where it was at least `least`, else 0."""
    return replace(problem, rewards=(problem.rewards >= least).double())


def rewarded(problem: Problem, rewards: Tensor) -> Problem:
    """The same problem with other rewards of its responses, `[M]` or `[P M]`."""
    return replace(problem, rewards=rewards.double().expand_as(problem.rewards))


def sampled_by(problem: Problem, logits: Tensor) -> Problem:
    """The same problem with the sampler that has these logits, `[N V]` or `[P N V]`."""
    return replace(problem, behavior_logp=logits.log_softmax(-1).expand_as(problem.logits))


def octet(drift: float) -> Problem:
    """OCTET(a): eight binary tokens, right with at least five ones; stale by a."""
    shape = Tree(2, None, 8)
    z = _wave(shape, 0.5)
    ones = (shape.paths[1] == 1).sum(1)
    return one_prompt("OCTET", shape, z, (ones >= 5).double(), z + _stale(shape, drift))


def fix3() -> Problem:
    """FIX3: three binary tokens, no stop."""
    shape = Tree(2, None, 3)
    return one_prompt("FIX3", shape, _wave(shape, 0.8), ramp(8, 5, 2))


def pair(*success: float) -> Problem:
    """PAIR: a prompt for each success probability, one step, reward 1 or 0.

    Arm 0 succeeds.  The gradient by the one logit of a prompt is that by arm 0's logit.
    """
    p = torch.tensor(success, dtype=torch.float64)
    logits = torch.stack([p.log(), (1 - p).log()], -1).unsqueeze(1)
    return make("PAIR", Tree(2, None, 1), logits, torch.tensor([[1.0, 0.0]]).expand(len(p), 2))


def arms(
    probability: Sequence[float], rewards: Sequence[float], sampler: Sequence[float] | None = None
) -> Problem:
    """One step over arms with these probabilities, under policy and sampler."""
    behavior = None if sampler is None else torch.tensor(sampler, dtype=torch.float64).log()
    logits = torch.tensor(probability, dtype=torch.float64).log().unsqueeze(0)
    paid = torch.tensor(rewards, dtype=torch.float64)
    sampled = None if behavior is None else behavior.unsqueeze(0)
    return one_prompt("ARMS", Tree(len(logits[0]), None, 1), logits, paid, sampled)


def length(advantage: float) -> Problem:
    """LENGTH: whether to stop at each of 40 positions, correct responses first, then failing ones.

    Token 1 stops, with probability 0.2 at positions 1 to 39 and surely at 40.  The "prompts" are
    correct and failing, each half of the responses and outside the parameters; the reward of a
    response is its mean advantage given which it is.
    """
    shape = Tree(2, 1, 40)
    z = torch.zeros(2, shape.prefixes, 2, dtype=torch.float64)
    z[..., 1] = math.log(0.2 / 0.8)
    z[:, -1] = torch.tensor([NEVER, 0.0])
    return make("LENGTH", shape, z, torch.tensor([[advantage], [-advantage]]).expand(2, 41))


def placebo(scale: float = 1.0) -> Problem:
    """PLACEBO: 20 equal arms that all pay 1; the sampler's logits are off by a wave."""
    v = count(20)
    wave = 0.5 * torch.sin(1.7 * v + 0.4)
    delta = scale * (wave - wave.mean())
    z = torch.zeros(1, 20, dtype=torch.float64)
    return one_prompt("PLACEBO", Tree(20, None, 1), z, torch.ones(20), z + delta)


def iid(horizon: int) -> Problem:
    """IID(T): independent binary tokens; a one has probability 0.6, under the sampler 0.5."""
    shape = Tree(2, None, horizon)
    z = torch.tensor([0.4, 0.6], dtype=torch.float64).log().expand(shape.prefixes, 2)
    ones = (shape.paths[1] == 1).sum(1).double()
    return one_prompt("IID", shape, z, ones / horizon, torch.zeros_like(z))


def six(shift: float = 0.0) -> Problem:
    """SIX: one step over six trajectories; logits ln mu + shift cos(1 + 2 i), sampler mu."""
    mu = torch.tensor([0.30, 0.20, 0.15, 0.15, 0.12, 0.08], dtype=torch.float64).log()
    z = (mu + shift * torch.cos(1 + 2 * count(6))).unsqueeze(0)
    signs = torch.tensor([1.0, -1.0, 1.0, -1.0, -1.0, 1.0])
    return one_prompt("SIX", Tree(6, None, 1), z, signs, mu.unsqueeze(0))


def deck() -> Problem:
    """DECK: ten questions with accuracies 0.05, 0.15, ..., 0.95."""
    return pair(*((2 * q + 1) / 20 for q in range(10)))


def zipf(shift: float) -> Problem:
    """ZIPF(a): 1,024 tokens, p falls as (v + 1)^-1.2, the sampler tilts it by a wave."""
    v = count(1024)
    z = -1.2 * (v + 1).log()
    wave = shift * torch.sin(0.7 * v + 0.3)
    return one_prompt(
        "ZIPF", Tree(1024, None, 1), z.unsqueeze(0), torch.ones(1024), (z + wave).unsqueeze(0)
    )


@final
@dataclass(frozen=True, kw_only=True, eq=False)
class Shared:
    """A tabular problem whose logits are a function of fewer parameters.

    Args:
        problem: at the current parameters.
        jacobian: of its logits `[P N V]` by the D parameters, `[P N V D]`.
    """

    problem: Problem
    jacobian: Tensor

    def project(self, gradient: Tensor) -> Tensor:
        """A gradient by the logits, as one by the parameters."""
        return torch.einsum("...pnv,pnvd->...d", gradient, self.jacobian)

    def spread(self, gradient: Tensor) -> Tensor:
        """How the logits move when the parameters follow a gradient by the logits."""
        return self.jacobian @ self.project(gradient)


def two_step(logits: Tensor, rewards: Tensor, added: Tensor, *, name: str) -> Problem:
    """Two tokens of V arms each, no stop.

    Args:
        logits: of the first token, then of the second after each first, `[1 + V, V]`.
        rewards: of each pair, `[V V]`.
        added: to every second token's logits by the sampler, `[V]`.
        name: for tables.
    """
    behavior = torch.cat([logits[:1], logits[1:] + added])
    return one_prompt(name, Tree(len(added), None, 2), logits, rewards.flatten(), behavior)


def bonus(shift: float) -> Problem:
    """BONUS(a): good or bad first, then six arms; 1 for good, 0.1 for arm 0.

    The sampler adds -a to arm 0 and +a to arm 3 of the second token.
    """
    logits = torch.zeros(7, 6, dtype=torch.float64)
    logits[0, 2:] = NEVER
    added = torch.zeros(6, dtype=torch.float64)
    added[0], added[3] = -shift, shift
    rewards = torch.zeros(6, 6, dtype=torch.float64)
    rewards[0] += 1
    rewards[:, 0] += 0.1
    return two_step(logits, rewards, added, name="BONUS")


def twostep() -> Shared:
    """TWOSTEP: arms 0 to 2 of the first token pay 1; the second token pays nothing.

    The second token has one logit vector after a first that pays and one after a first that does
    not: with the first token's, 18 parameters.
    """
    wave = 0.5 * torch.cos(1 + 2.3 * count(6))
    paid = (count(6) < 3).double().unsqueeze(1).expand(6, 6)
    rows = torch.tensor([0, 1, 1, 1, 2, 2, 2])
    jacobian = torch.eye(18, dtype=torch.float64).view(3, 6, 18)[rows].unsqueeze(0)
    logits = torch.zeros(7, 6, dtype=torch.float64)
    problem = two_step(logits, paid, wave - wave.mean(), name="TWOSTEP")
    return Shared(problem=problem, jacobian=jacobian)


def one_offset(*success: float) -> Shared:
    """PAIR with one offset added to the logit of success of every prompt."""
    problem = pair(*success)
    jacobian = torch.zeros((*problem.logits.shape, 1), dtype=torch.float64)
    jacobian[:, :, 0] = 1
    return Shared(problem=problem, jacobian=jacobian)


@final
@dataclass(frozen=True, kw_only=True, eq=False)
class Cache:
    """CACHE: weights that change after the second token of a response.

    Args:
        shared: the new model, sampled with the old cache kept; 15 shared parameters.
        old, new: log-probabilities of the two versions at each prefix.
        recomputed: old for tokens 1 and 2, then new with its own cache.
    """

    shared: Shared
    old: Tensor
    new: Tensor
    recomputed: Tensor


def _recurrent(model: Sequence[Tensor], remembered: Sequence[Tensor]) -> list[Tensor]:
    """Logits U h + c of the prefixes of each length, h the sum of what was remembered."""
    _, output, bias = model
    state, levels = torch.zeros(1, 2, dtype=torch.float64), []
    for embedding in remembered:
        levels.append(state @ output.T + bias)
        state = (state.unsqueeze(1) + embedding).flatten(0, 1)
    return levels


def cache() -> Cache:
    """CACHE with its three imagined samplers beside the true one."""
    i, j = count(3).unsqueeze(1), count(2)
    old = (torch.sin(1 + 2 * i + 5 * j), torch.cos(2 + 3 * i + j), 0.3 * torch.sin(count(3)))
    new = (
        old[0] + 0.5 * torch.cos(3 + i + 2 * j),
        old[1] + 0.3 * torch.sin(1 + 2 * i + j),
        old[2] + 0.1,
    )
    before, after = _recurrent(old, [old[0]] * 4), _recurrent(new, [new[0]] * 4)
    kept = _recurrent(new, [old[0], old[0], new[0], new[0]])

    def logits(flat: Tensor) -> Tensor:
        embedding, output, bias = flat[:6].view(3, 2), flat[6:12].view(3, 2), flat[12:]
        return torch.cat(_recurrent((embedding, output, bias), [embedding] * 4))

    parameters = torch.cat([part.flatten() for part in new])
    jacobian = torch.autograd.functional.jacobian(logits, parameters)
    problem = one_prompt(
        "CACHE",
        Tree(3, None, 4),
        torch.cat(after),
        ramp(81, 5, 2),
        torch.cat(before[:2] + kept[2:]),
    )
    return Cache(
        shared=Shared(problem=problem, jacobian=jacobian.unsqueeze(0)),
        old=torch.cat(before).log_softmax(-1),
        new=torch.cat(after).log_softmax(-1),
        recomputed=torch.cat(before[:2] + after[2:]).log_softmax(-1),
    )


def response_mass(problem: Problem) -> tuple[Tensor, Tensor]:
    """Probability of each response under policy and sampler, `[P M]` each."""
    walk = Walk(problem)
    return walk.leaf_probability, walk.leaf_flow
