"""A batch on a chain, from what its responses contribute by how they ended.

Ends are combined as responses of a tree are: by their rewards' powers where the advantage is affine
and no map reads its sign, by counts of classes of equal reward elsewhere.  Where contributions are
known up to an error, so is the batch: mean and drift are linear in a response's mean, the variance
is linear in its squared norm and quadratic in its mean.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import final

import torch
from jaxtyping import Float
from torch import Tensor

from windage.estimators.estimator import Estimator
from windage.toy.chains import Chain
from windage.toy.exact.affine import affine_moments, group_law
from windage.toy.exact.classes import Contributions, Groups, combine
from windage.toy.exact.moments import Bounds, Moments
from windage.toy.exact.prefix_tree import reads_sign


@final
@dataclass(frozen=True, kw_only=True, eq=False)
class Response:
    """What one response contributes by how it ended, for each sign of the advantage.

    Args:
        mean: E[x 1{end}].
        norm: E[|x|^2 1{end}].
        mean_error: bound on the length of the error of `mean`; None: exact.
        norm_error: bound on the error of `norm`.
    """

    mean: Float[Tensor, "K P C S V"]
    norm: Float[Tensor, "K P C"]
    mean_error: Float[Tensor, "K P C"] | None = None
    norm_error: Float[Tensor, "K P C"] | None = None

    def scaled(self, by: float) -> Response:
        """The same response with every coefficient times a number."""
        return Response(
            mean=by * self.mean,
            norm=by**2 * self.norm,
            mean_error=None if self.mean_error is None else by * self.mean_error,
            norm_error=None if self.norm_error is None else by**2 * self.norm_error,
        )


def batch(
    estimator: Estimator,
    chain: Chain,
    group_size: int,
    mass: Float[Tensor, "P C"],
    response: Response,
) -> Moments:
    """Moments of a batch, with bounds where the response's are known up to an error.

    Args:
        estimator: its advantage is called.
        chain: the rewards.
        group_size: responses of a group.
        mass: of the sampler, by how a response ended.
        response: what each contributes.
    """
    if estimator.advantage.traits.linear and not reads_sign(estimator):
        return _affine(estimator, chain, group_size, mass, response)
    parts, errors = [], []
    for p in range(chain.prompts):
        rewards = chain.rewards[p][mass[p] > 0].unique()
        members = (chain.rewards[p] == rewards.unsqueeze(1)).to(mass)
        values = torch.stack([rewards, torch.zeros_like(rewards)], 1)
        group = Groups(estimator, values, members @ mass[p], group_size)

        def by_class(x: Tensor, members: Tensor = members) -> Tensor:
            return torch.einsum("rc,kc...->kr...", members, x).flatten(0, 1)

        part = Contributions(
            group, by_class(response.mean[:, p]).flatten(1), by_class(response.norm[:, p])
        )
        parts.append(part)
        if response.mean_error is not None and response.norm_error is not None:
            each = (by_class(e[:, p]) for e in (response.mean_error, response.norm_error))
            errors.append(_class_errors(part, *each))
    found = combine(estimator, parts, 1.0).shaped(chain.logits.shape)
    return _bounded(found, torch.stack(errors)) if errors else found


def _class_errors(part: Contributions, mean: Tensor, norm: Tensor) -> Tensor:
    """Errors of a prompt's mean, mean square and drift, from those of its classes."""
    group = part.group
    share, advantages = group.share, group.advantages
    if part.signs > 1:
        share = torch.cat([share, share], 1)
        advantages = torch.cat([advantages.clamp(min=0), advantages.clamp(max=0)], 1)
    total = share * advantages
    own = group.probability @ (total * advantages)
    pairs = torch.einsum("c,cr,cs->rs", group.probability, total, total)
    pairs = pairs - torch.diag(own / torch.cat([group.mass] * part.signs))
    free = (group.chance @ group.share) @ mean[: len(group.mass)]
    once = (group.probability @ total).abs() @ mean
    square = own @ norm + (pairs.abs() * _products(part.gram, mean)).sum()
    return torch.stack([once, square, free])


def _products(gram: Tensor, error: Tensor) -> Tensor:
    """Errors of all products of vectors, from their lengths and errors."""
    length = gram.diagonal().clamp(min=0).sqrt()
    return torch.outer(length, error) + torch.outer(error, length) + torch.outer(error, error)


def _affine(
    estimator: Estimator, chain: Chain, group_size: int, mass: Tensor, response: Response
) -> Moments:
    """Through the features 1, r - c and (r - c)^2 of a response."""
    center = (mass * chain.rewards).sum(-1).mean()
    r = chain.rewards - center
    powers = torch.stack([torch.ones_like(r), r, r.square()])
    x = torch.einsum("fpc,pcsv->fpsv", powers, response.mean[0])
    q = torch.einsum("fpc,pc->fp", powers, response.norm[0])
    law = (float(center), (mass * r).sum(-1), (mass * r.square()).sum(-1))
    found = affine_moments(estimator.advantage, group_size, 1.0, law, x, q)
    if response.mean_error is None or response.norm_error is None:
        return found
    group, g = group_law(estimator.advantage, group_size, law), float(group_size)
    mean, norm = (
        torch.einsum("fpc,pc->fp", powers.abs(), e[0])
        for e in (response.mean_error, response.norm_error)
    )
    once = g * (group.mean[0].abs() * mean[0] + group.mean[1].abs() * mean[1])
    flat = x.flatten(2)
    grams = torch.einsum("fpd,gpd->pfg", flat, flat)
    each = [_products(gram, mean[:, p]) for p, gram in enumerate(grams)]
    dots = torch.stack([torch.stack([e[1, 1], e[2, 0], e[1, 0], e[0, 0]]) for e in each], 1)
    square = g * (group.own.abs() * norm).sum(0) + g * (g - 1) * (group.pair.abs() * dots).sum(0)
    return _bounded(found, torch.stack([once, square, g * mean[0]], 1))


def _bounded(found: Moments, errors: Float[Tensor, "P 3"]) -> Moments:
    """Moments with bounds, from the errors of each prompt's mean, mean square and drift.

    Without errors they are exact: a limit of the map that no response meets makes none.
    """
    if not bool(errors.any()):
        return found
    mean, square, drift = errors.unbind(1)
    length = found.mean.flatten(1).norm(dim=1)
    variance = (square + (2 * length + mean) * mean).sum()
    bounds = Bounds(mean=float(mean.norm()), variance=float(variance), drift=float(drift.norm()))
    return replace(found, bounds=bounds)
