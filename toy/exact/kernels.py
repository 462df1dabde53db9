"""Estimators on chains: which recursions each one needs, and the batch that they make.

A weight of the token itself multiplies its score.  Ratios of the whole response, of the prefix or
of the suffix change the kernel.  A map of the summed or averaged log-ratio needs its law
(`summed`).  A denominator that counts tokens is a mixture of exponentials (`denominators`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import final

import torch
from jaxtyping import Float
from torch import Tensor

from windage.estimators.correction import (
    Correction,
    geometric,
    prefix,
    ratio,
    suffix,
    token_fields,
    trajectory,
)
from windage.estimators.estimator import Estimator, center
from windage.estimators.member import Member
from windage.toy.chains import Chain
from windage.toy.exact.transfer import Ended, Passage, Steps, cells, transfer

FAR = 40.0
CELLS = 4e6


@final
@dataclass(frozen=True, kw_only=True, eq=False)
class Tables:
    """An estimator's weights on a chain, for one sign of the advantage.

    Args:
        weight: of the token itself.
        before: log of the kernel's factor at tokens before the one whose score is counted.
        own: at the token itself.
        after: at tokens behind it.
        summed: corrections whose map looks at the sum or mean of these log-ratios.
    """

    weight: Float[Tensor, "P S V"]
    before: Float[Tensor, "P S V"]
    own: Float[Tensor, "P S V"]
    after: Float[Tensor, "P S V"]
    summed: tuple[tuple[Correction, Float[Tensor, "P S V"]], ...]

    @property
    def changes(self) -> bool:
        """Whether the kernel changes at the token whose score is counted."""
        return bool(((self.before != self.own) | (self.own != self.after)).any())


def constant(map_: Member) -> bool:
    """Whether a map gives one weight for all ratios at each sign of the advantage."""
    if map_.traits.needs:
        return False
    far = torch.linspace(-FAR, FAR, 9, dtype=torch.float64)
    weights = torch.stack([map_(far, far.new_tensor(sign)) for sign in (1.0, -1.0)])
    return bool((weights == weights[:, :1]).all())


def kernel_ratio(correction: Correction) -> bool:
    """Whether a correction is a product of ratios, which changes the kernel."""
    reach = correction.reach.function
    return reach in (trajectory, prefix, suffix) and correction.map.function is ratio


def needs_law(correction: Correction) -> bool:
    """Whether a correction's map looks at the summed or averaged log-ratio of a response."""
    reach = correction.reach.function
    looks = reach in (trajectory, geometric) and not constant(correction.map)
    return not correction.idle and looks and not kernel_ratio(correction)


def tables(estimator: Estimator, chain: Chain, sign: float) -> Tables:
    """Call an estimator's maps on the log-ratios of every state's tokens.

    Args:
        estimator: read for its corrections.
        chain: sampler and policy, which is its own proximal policy.
        sign: of the advantage.
    """
    seen = chain.behavior_logp > -torch.inf
    now = chain.logp
    policies = {"logp": now, "proximal_logp": now, "behavior_logp": chain.behavior_logp}
    known = token_fields(*(torch.where(seen, x, 0.0) for x in (now, chain.behavior_logp)))
    advantage = now.new_tensor(sign)
    weight = torch.ones_like(now)
    before, own, after = (torch.zeros_like(now) for _ in range(3))
    summed = []
    for correction in estimator.corrections:
        if correction.idle:
            continue
        ratios = policies[correction.numerator] - policies[correction.denominator]
        x = torch.where(seen, ratios, 0.0)
        x = x if correction.before is None else correction.before(x, advantage)
        reach = correction.reach.function
        if kernel_ratio(correction):
            own = own + x
            before = before if reach is suffix else before + x
            after = after if reach is prefix else after + x
        elif needs_law(correction):
            summed.append((correction, x))
        else:
            weight = weight * correction.weigh(x, advantage, known.__getitem__)
    return Tables(weight=weight, before=before, own=own, after=after, summed=tuple(summed))


def scores(
    estimator: Estimator, chain: Chain, sign: float, weight: Float[Tensor, "P S V"]
) -> Float[Tensor, "P S V V"]:
    """Weighted, maybe centered, score of each token by the logits of its state."""
    identity = torch.eye(weight.shape[-1], dtype=weight.dtype)
    plain = identity - chain.logp.exp().unsqueeze(-2)
    score = weight.unsqueeze(-1) * plain
    if estimator.centering is not None:
        advantage = weight.new_tensor([sign])
        head = center(estimator, chain.logp, chain.behavior_logp, advantage)
        score = score - torch.einsum("psv,psvk->psk", head, plain).unsqueeze(-2)
    return score


def steps(
    estimator: Estimator, chain: Chain, sign: float, power: int, factor: Float[Tensor, " T"]
) -> Steps:
    """An estimator's recursion for one sign of the advantage, but for maps of summed log-ratios.

    Args:
        estimator: its corrections' maps are called.
        chain: sampler and policy.
        sign: of the advantage.
        power: 1 for the mean, 2 for the squared norm: of ratios in the kernel, and of the factor.
        factor: of a response of each length, for the mean.
    """
    own = tables(estimator, chain, sign)
    score = scores(estimator, chain, sign, own.weight)
    mu, factor = chain.behavior_logp.exp(), factor**power
    if not own.changes:
        return Steps(kernel=mu * (power * own.own).exp(), score=score, factor=factor)

    def at(log: Tensor) -> Tensor:
        return mu * log.exp()

    before, mark, after = own.before, own.own, own.after
    if power == 1:
        none = torch.zeros_like(mu)
        once = Passage(between=at(before), after=at(after), first=none, second=at(mark), both=none)
        return Steps(kernel=at(before), score=score, factor=factor, passage=once)
    twice = Passage(
        between=at(before + after),
        after=at(2 * after),
        first=at(mark + before),
        second=at(mark + after),
        both=at(2 * mark),
    )
    return Steps(kernel=at(2 * before), score=score, factor=factor, passage=twice)


def scale(estimator: Estimator, chain: Chain, group_size: int) -> Float[Tensor, " T"]:
    """The aggregation's coefficient of a response of each length."""
    shape = (chain.horizon, chain.prompts, group_size)
    lengths = torch.arange(1, chain.horizon + 1)[:, None, None].expand(shape)
    return estimator.aggregation(lengths, torch.ones(shape, dtype=torch.bool))[:, 0, 0].clone()


def sampled(chain: Chain) -> Steps:
    """How the sampler's responses end."""
    mu = chain.behavior_logp.exp()
    score = mu.new_zeros((*mu.shape, mu.shape[-1]))
    return Steps(kernel=mu, score=score, factor=mu.new_ones(()).expand(chain.horizon))


def many(run: Sequence[Steps], chain: Chain) -> list[Ended]:
    """Many recursions on one automaton, together where they are alike and fit into memory."""
    once = list({id(r): r for r in run}.values())
    alike: dict[tuple[bool, bool, torch.Size], list[Steps]] = {}
    for r in once:
        even = bool((r.factor == r.factor[..., :1]).all())
        alike.setdefault((r.passage is None, even, r.kernel.shape), []).append(r)
    found: dict[int, Ended] = {}
    for (plain, _, shape), members in alike.items():
        each = cells(chain) * shape[:-3].numel() * (1 if plain else 2)
        most = max(1, int(CELLS / each))
        for at in range(0, len(members), most):
            part = members[at : at + most]
            all_ = transfer(_stack(part), chain.successor, chain.start)
            for r, *one in zip(part, all_.mass, all_.mean, all_.norm, strict=True):
                found[id(r)] = Ended(mass=one[0], mean=one[1], norm=one[2])
    return [found[id(r)] for r in run]


def _stack(parts: Sequence[Steps]) -> Steps:
    """Steps of equal shapes as one, first axis their number."""
    kernel = torch.stack([r.kernel for r in parts])
    ones = (1,) * (kernel.dim() - 3)
    passage = None
    if (first := parts[0].passage) is not None:
        passages: list[Mapping[str, Tensor]] = [vars(r.passage) for r in parts]
        names = [f.name for f in fields(first)]
        passage = Passage(**{name: torch.stack([p[name] for p in passages]) for name in names})
    return Steps(
        kernel=kernel,
        score=torch.stack([r.score for r in parts]),
        factor=torch.stack([r.factor for r in parts]).view(len(parts), *ones, -1),
        passage=passage,
    )
