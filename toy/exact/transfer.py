"""Moments at real lengths, by forward recursion over the states of an automaton (E5).

The same logits serve at every time, so contributions of different times add up in one block a
state.  For a kernel nu(s, v) (the sampler, or the sampler times a power of the ratio) and weighted
scores z(s, v) the recursion carries, for each state, the mass m, the mean u of the summed scores
and the mean q of its squared norm:

    m'(s') = sum of nu m                                    over s, v with next(s, v) = s'
    u'(s') = sum of nu (u + m z)
    q'(s') = sum of nu (q + 2 z . u + m |z|^2)

Responses that end at time t leave the recursion with a factor f(t).  The product of ratios over a
response is a kernel: nu = mu rho for the mean, mu rho^2 for the norm.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

import torch
from jaxtyping import Float, Int
from torch import Tensor

from windage.estimators.correction import ratio, token, trajectory
from windage.estimators.estimator import Estimator
from windage.estimators.member import Member
from windage.toy.chains import Chain
from windage.toy.exact.classes import Contributions, Groups, combine, signs
from windage.toy.exact.moments import Moments
from windage.toy.exact.prefix_tree import affine_moments, reads_sign
from windage.toy.objective import Objective, objective

RESCALE = 64
FAR = 40.0


@final
@dataclass(frozen=True, kw_only=True, eq=False)
class Steps:
    """What a token at each state does to the recursion.

    Args:
        kernel: measure of each token at each state.
        score: weighted, maybe centered, score of the token by the logits of its own state.
        factor: f(t) of a response of t + 1 tokens.
    """

    kernel: Float[Tensor, "*batch S V"]
    score: Float[Tensor, "*batch S V V"]
    factor: Float[Tensor, "*#batch T"]


@final
@dataclass(frozen=True, kw_only=True, eq=False)
class Ended:
    """Sums over responses by how they ended: stopped at each state, then cut at each state.

    Args:
        mass: kernel measure, times f.
        mean: of the contribution, times f; blocks by state.
        norm: of its squared norm, times f.
    """

    mass: Float[Tensor, "*batch C"]
    mean: Float[Tensor, "*batch C S V"]
    norm: Float[Tensor, "*batch C"]


def transfer(steps: Steps, successor: Int[Tensor, "S V"], start: int) -> Ended:
    """Run the recursion from `start` to the horizon, the length of the factor.

    All three sums are rescaled on the way, so that neither a kernel's mass that shrinks nor one
    that grows leaves float64 before the end.
    """
    *batch, states, vocab = steps.kernel.shape
    onto = torch.nn.functional.one_hot(successor + 1, states + 1).double()
    square = steps.score.square().sum(-1)
    step_mass = torch.einsum("...sv,svn->...ns", steps.kernel, onto)
    step_mean = torch.einsum("...sv,...svk,svn->...nsk", steps.kernel, steps.score, onto)
    step_norm = torch.einsum("...sv,...sv,svn->...ns", steps.kernel, square, onto)
    stop_mass, go_mass = step_mass[..., 0, :], step_mass[..., 1:, :]
    stop_mean, go_mean = step_mean[..., 0, :, :], step_mean[..., 1:, :, :]
    stop_norm, go_norm = step_norm[..., 0, :], step_norm[..., 1:, :]

    mass = steps.kernel.new_zeros((*batch, states))
    mass[..., start] = 1.0
    mean = steps.kernel.new_zeros((*batch, states, states, vocab))
    norm = torch.zeros_like(mass)
    ended = [torch.zeros_like(mass), torch.zeros_like(mean), torch.zeros_like(norm)]
    log_scale = steps.kernel.new_zeros(batch)
    index = torch.arange(states)
    horizon = steps.factor.shape[-1]
    for t in range(horizon):
        f = steps.factor[..., t]
        own = mean[..., index, index, :]
        out = stop_mass[..., None, None] * mean
        out[..., index, index, :] += mass.unsqueeze(-1) * stop_mean
        stopped = (
            stop_mass * mass,
            out,
            stop_mass * norm + 2 * (stop_mean * own).sum(-1) + stop_norm * mass,
        )
        ended = [total + _times(f, part, total) for total, part in zip(ended, stopped, strict=True)]
        norm = (
            (go_mass * norm.unsqueeze(-2)).sum(-1)
            + 2 * torch.einsum("...nsk,...sk->...n", go_mean, own)
            + (go_norm * mass.unsqueeze(-2)).sum(-1)
        )
        mean = (go_mass @ mean.flatten(-2)).unflatten(-1, (states, vocab))
        mean = mean + go_mean * mass[..., None, :, None]
        mass = (go_mass @ mass.unsqueeze(-1)).squeeze(-1)
        if t % RESCALE == RESCALE - 1:
            size = torch.maximum(mass.sum(-1), ended[0].sum(-1))
            shift = torch.where(size > 0, size, 1.0).log()
            log_scale = log_scale + shift
            down = (-shift).exp()
            mass, mean, norm = (_times(down, part, part) for part in (mass, mean, norm))
            ended = [_times(down, part, part) for part in ended]
    cut = [_times(steps.factor[..., horizon - 1], part, part) for part in (mass, mean, norm)]
    up = log_scale.exp()
    both = [torch.cat([a, b], len(batch)) for a, b in zip(ended, cut, strict=True)]
    return Ended(
        mass=_times(up, both[0], both[0]),
        mean=_times(up, both[1], both[1]),
        norm=_times(up, both[2], both[2]),
    )


def _times(factor: Tensor, part: Tensor, like: Tensor) -> Tensor:
    """A factor by batch times a tensor with more axes."""
    return factor.reshape(factor.shape + (1,) * (like.dim() - factor.dim())) * part


def refusal(estimator: Estimator) -> str | None:
    """Why the recursion does not serve an estimator, or None."""
    if estimator.aggregation.traits.scope != "response":
        return f"{estimator.aggregation.name} couples the lengths of responses"
    if estimator.advantage.traits.scope == "batch":
        return f"{estimator.advantage.name} couples prompts"
    for correction in estimator.corrections:
        reach, map_ = correction.reach.function, correction.map
        whole = reach is trajectory and map_.function is ratio
        if not (correction.idle or reach is token or whole or _constant(map_)):
            return f"{correction.describe()} needs the law of the summed log-ratio"
    return None


def _constant(map_: Member) -> bool:
    """Whether a map gives one weight for all ratios at each sign of the advantage."""
    far = torch.linspace(-FAR, FAR, 9, dtype=torch.float64)
    weights = torch.stack([map_(far, far.new_tensor(sign)) for sign in (1.0, -1.0)])
    return bool((weights == weights[:, :1]).all())


def steps(
    estimator: Estimator, chain: Chain, sign: float, power: int, factor: Float[Tensor, " T"]
) -> Steps:
    """An estimator's recursion for one sign of the advantage.

    Args:
        estimator: its corrections' maps are called on the log-ratios of every state's tokens.
        chain: sampler and policy.
        sign: of the advantage.
        power: 1 for the mean, 2 for the squared norm: of whole-response ratios in the kernel.
        factor: of a response of each length, for the mean.
    """
    mu = chain.behavior_logp.exp()
    seen = mu > 0
    x = torch.where(seen, chain.logp - chain.behavior_logp, 0.0)
    advantage = x.new_tensor(sign)
    kernel, weight = mu, torch.ones_like(mu)
    for correction in estimator.corrections:
        if correction.idle:
            continue
        if correction.reach.function is trajectory and correction.map.function is ratio:
            kernel = kernel * correction.map(x, advantage).pow(power)
        else:
            weight = weight * correction.map(x, advantage)
    identity = torch.eye(mu.shape[-1], dtype=mu.dtype)
    plain = identity - chain.logp.exp().unsqueeze(-2)
    score = weight.unsqueeze(-1) * plain
    if estimator.centering is not None:

        def weigh(ratios: Tensor) -> Tensor:
            out = torch.ones_like(ratios)
            for correction in estimator.corrections:
                out = out * correction.map(ratios, advantage)
            return out

        head = estimator.centering(chain.logp, chain.behavior_logp, weigh)
        score = score - torch.einsum("psv,psvk->psk", head, plain).unsqueeze(-2)
    return Steps(kernel=kernel, score=score, factor=factor**power)


def _scale(estimator: Estimator, chain: Chain, group_size: int) -> Float[Tensor, " T"]:
    """The aggregation's coefficient of a response of each length."""
    shape = (chain.horizon, chain.prompts, group_size)
    lengths = torch.arange(1, chain.horizon + 1)[:, None, None].expand(shape)
    return estimator.aggregation(lengths, torch.ones(shape, dtype=torch.bool))[:, 0, 0]


def automaton(estimator: Estimator, chain: Chain, group_size: int) -> Moments:
    """Mean and variance of a batch on a chain, whatever the horizon.

    Ends are combined as responses of a tree are: by their rewards' powers where the advantage is
    affine and no map reads its sign, by counts of classes of equal reward elsewhere.

    Raises:
        NotImplementedError: `refusal` says why.
    """
    if why := refusal(estimator):
        raise NotImplementedError(why)
    factor = _scale(estimator, chain, group_size)
    run = [steps(estimator, chain, s, k, factor) for s in signs(estimator) for k in (1, 2)]
    sampled = Steps(
        kernel=chain.behavior_logp.exp(),
        score=torch.zeros_like(run[0].score),
        factor=torch.ones_like(factor),
    )
    run.append(sampled)
    stacked = Steps(
        kernel=torch.stack([r.kernel for r in run]),
        score=torch.stack([r.score for r in run]),
        factor=torch.stack([r.factor for r in run]).unsqueeze(1),
    )
    found = transfer(stacked, chain.successor, chain.start)
    mass, mean, norm = found.mass[-1], found.mean[:-1:2], found.norm[1:-1:2]
    if estimator.advantage.traits.linear and not reads_sign(estimator):
        center = (mass * chain.rewards).sum(-1).mean()
        r = chain.rewards - center
        powers = torch.stack([torch.ones_like(r), r, r.square()])
        x = torch.einsum("fpc,pcsv->fpsv", powers, mean[0])
        q = torch.einsum("fpc,pc->fp", powers, norm[0])
        law = (float(center), (mass * r).sum(-1), (mass * r.square()).sum(-1))
        return affine_moments(estimator.advantage, group_size, 1.0, law, x, q)
    parts = []
    for p in range(chain.prompts):
        rewards = chain.rewards[p][mass[p] > 0].unique()
        members = (chain.rewards[p] == rewards.unsqueeze(1)).double()
        values = torch.stack([rewards, torch.zeros_like(rewards)], 1)
        group = Groups(estimator, values, members @ mass[p], group_size)
        x = torch.einsum("rc,kcsv->krsv", members, mean[:, p]).flatten(2).flatten(0, 1)
        q = (norm[:, p] @ members.T).flatten()
        parts.append(Contributions(group, x, q))
    return combine(estimator, parts, 1.0).shaped(chain.logits.shape)


@objective.register
def chain_objective(chain: Chain) -> Objective:
    """J, its gradient, and the policy's mass on responses with a token that is never drawn."""
    pi = chain.logp.exp()
    ones = pi.new_ones(chain.horizon)
    score = torch.eye(pi.shape[-1], dtype=pi.dtype) - pi.unsqueeze(-2)
    drawn = pi * (chain.behavior_logp.exp() > 0)
    both = Steps(kernel=torch.stack([pi, drawn]), score=torch.stack([score, score]), factor=ones)
    found = transfer(both, chain.successor, chain.start)
    value = (found.mass[0] * chain.rewards).sum(-1)
    centered = chain.rewards - value.unsqueeze(-1)
    return Objective(
        value=value.mean(),
        gradient=torch.einsum("pc,pcsv->psv", centered, found.mean[0]) / chain.prompts,
        unsupported_mass=(1 - found.mass[1].sum(-1)).clamp(min=0).mean(),
    )
