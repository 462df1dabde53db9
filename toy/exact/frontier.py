"""The least bias at each variance over all weights that look at their own token only.

The class: a weight w(h, v) >= 0, free for each prefix h (or state of an automaton) and token v,

    g = mean over prompts and responses of A_i sum over tokens of w(h_t, y_t) score_t

with A affine in the rewards of the group.  It holds every weight that is a function of the token's
or of its prefix's ratio, bounded or not; it holds none that looks at later tokens, at the sign of
the advantage or at the response's length.  With n(h, v) the count of a token in a response,

    E g            at (h, v) the pull-back of m(h, v) w(h, v)     m from E[f n(h, v)]
    trace Cov g =  sum over h of w(h)' Q(h) w(h)                  Q from E[f n(h, v) n(h, u)]

for the features f = 1, r - c, (r - c)^2.  Blocks of different prefixes are orthogonal, so that

    least over w of  |E g - grad J|^2 + price * trace Cov g

is one nonnegative least squares problem of V unknowns a prefix.  The price 1 / n gives the least
mean squared error that n batches can have; all prices together give the whole frontier.  The class
is closed under multiplication, so that the same weights, divided by their scale, are the frontier
after rescaling.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, singledispatch
from typing import final

import torch
from jaxtyping import Float
from torch import Tensor

from windage.estimators.member import Member
from windage.toy.chains import Chain
from windage.toy.exact.affine import group_law
from windage.toy.exact.transfer import Steps, cells, transfer
from windage.toy.exact.walk import Walk, dot, pull_back
from windage.toy.objective import objective
from windage.toy.problems import Problem

RIDGE = 1e-12
ROUNDING = 1e-12
SIGN = 1e-11
SOLVED = 1e-8
PATIENCE = 3
LEAST, MOST = 1e-8, 1e8
HALVINGS = 28
CELLS = 4e6


@final
@dataclass(frozen=True, kw_only=True, eq=False)
class Counts:
    """How often a response takes each token, with the features 1, r - c and (r - c)^2.

    Args:
        law: the number c, and the first two moments of r - c under the sampler.
        once: E[f n(h, v)].
        twice: E[f n(h, v) n(h, u)].
    """

    law: tuple[float, Float[Tensor, " P"], Float[Tensor, " P"]]
    once: Float[Tensor, "3 P N V"]
    twice: Float[Tensor, "3 P N V V"]


@singledispatch
def counts(site: Problem | Chain) -> Counts:
    """Counts on a tree, where a response meets a prefix at most once; chains are registered below.

    Example:
        >>> from windage.toy.problems import Tree, make
        >>> coin = make("coin", Tree(2, None, 1), torch.zeros(1, 1, 2), torch.tensor([[0.0, 1.0]]))
        >>> counts(coin).once[1].tolist()
        [[[-0.25, 0.25]]]
    """
    assert isinstance(site, Problem)
    walk = Walk(site)
    center = dot(walk.leaf_flow, site.rewards).mean()
    r = site.rewards - center
    once = torch.stack([walk.visits(f) for f in (None, r, r.square())])
    law = (float(center), dot(walk.leaf_flow, r), dot(walk.leaf_flow, r.square()))
    return Counts(law=law, once=once, twice=torch.diag_embed(once))


@counts.register
def chain_counts(chain: Chain) -> Counts:
    """Counts on a chain, which meets a state many times: products by 2 n m = (n + m)^2 - n^2 - m^2.

    One recursion a pair of tokens of a state, whose contribution is the number of both.
    """
    mu = chain.behavior_logp.exp()
    prompts, states, vocab = mu.shape
    v, u = torch.triu_indices(vocab, vocab)
    s = torch.arange(states).repeat_interleave(len(v))
    v, u = v.repeat(states), u.repeat(states)
    number = torch.arange(len(s))
    score = mu.new_zeros((len(s), 1, states, vocab, vocab))
    score[number, 0, s, v, 0] = score[number, 0, s, u, 0] = 1.0
    factor = mu.new_ones((1, 1, chain.horizon))
    most = max(1, int(CELLS / cells(chain)))
    found = []
    for part in score.split(most):
        shape = (len(part), prompts, states, vocab)
        steps = Steps(kernel=mu.expand(shape), score=part.expand(*shape, vocab), factor=factor)
        found.append(transfer(steps, chain.successor, chain.start))
    mass = found[0].mass[0]
    center = float((mass * chain.rewards).sum(-1).mean())
    r = chain.rewards - center
    powers = torch.stack([torch.ones_like(r), r, r.square()])
    single = torch.cat([part.mean[..., 0].sum(-1) for part in found])
    square = torch.cat([part.norm for part in found])
    once = mu.new_zeros((3, prompts, states, vocab))
    twice = mu.new_zeros((3, prompts, states, vocab, vocab))
    same = v == u
    once[..., s[same], v[same]] = torch.einsum("fpc,kpc->fpk", powers, single[same])
    both = torch.einsum("fpc,kpc->fpk", powers, square)
    twice[..., s, v, u] = twice[..., s, u, v] = both
    own = twice.diagonal(dim1=-2, dim2=-1).clone()
    twice = (twice - own.unsqueeze(-1) - own.unsqueeze(-2)) / 2
    twice.diagonal(dim1=-2, dim2=-1).copy_(own)
    law = (center, (mass * r).sum(-1), (mass * r.square()).sum(-1))
    return Counts(law=law, once=once, twice=twice)


@final
@dataclass(frozen=True, kw_only=True, eq=False)
class Curve:
    """The frontier at some prices; `_rescaled` are after dividing the estimate by its scale.

    Args:
        price: of variance, in units of squared bias; 1 / n for n batches.
        bias: |E g - grad J|^2.
        variance: trace of Cov g.
        scale: <E g, grad J> / <grad J, grad J>.
        residual: the largest violation of the optimality conditions, as a share of the largest
            slope at weight 0 in the same block.
    """

    price: Float[Tensor, " K"]
    bias: Float[Tensor, " K"]
    variance: Float[Tensor, " K"]
    scale: Float[Tensor, " K"]
    bias_rescaled: Float[Tensor, " K"]
    variance_rescaled: Float[Tensor, " K"]
    residual: Float[Tensor, " K"]


@final
@dataclass(frozen=True, kw_only=True, eq=False)
class Forms:
    """Bias and variance of one batch as quadratic forms of the weights.

    Args:
        visits: m(h, v), what E g has of w(h, v) before the pull-back.
        probability: of each token under the policy.
        spread: Q(h), of the trace of Cov g.
        gradient: grad J.
        rounding: below it the gradient by the logits of a prefix is rounding.
    """

    visits: Float[Tensor, "P N V"]
    probability: Float[Tensor, "P N V"]
    spread: Float[Tensor, "P N V V"]
    gradient: Float[Tensor, "P N V"]
    rounding: Float[Tensor, "P N 1"]

    def mean(self, weights: Float[Tensor, "*batch P N V"]) -> Float[Tensor, "*batch P N V"]:
        """E g."""
        return pull_back(self.visits * weights, self.probability)

    def bias(self, weights: Float[Tensor, "*batch P N V"]) -> Float[Tensor, "*batch"]:
        """|E g - grad J|^2."""
        return (self.mean(weights) - self.gradient).square().sum((-3, -2, -1))

    def variance(self, weights: Float[Tensor, "*batch P N V"]) -> Float[Tensor, "*batch"]:
        """Trace of Cov g."""
        return torch.einsum("...pnv,pnvu,...pnu->...", weights, self.spread, weights)

    @cached_property
    def square(self) -> Float[Tensor, "P N V V"]:
        """The form of |E g|^2."""
        return _gram(self.probability) * self.visits.unsqueeze(-1) * self.visits.unsqueeze(-2)

    @cached_property
    def slope(self) -> Float[Tensor, "P N V"]:
        """<E g, grad J> by weight; 0 where the gradient is rounding."""
        p, g = self.probability, self.gradient
        centered = g - (p * g).sum(-1, keepdim=True)
        return self.visits * centered.masked_fill(centered.abs() <= self.rounding, 0.0)

    def best(
        self, price: Float[Tensor, " K"]
    ) -> tuple[Float[Tensor, "K P N V"], Float[Tensor, " K"]]:
        """The best weights at each price, 0 where the sampler never goes, and their residual.

        Raises:
            ArithmeticError: weights for which the optimality conditions do not hold.
        """
        form = self.square + price[:, None, None, None, None] * self.spread
        slope = self.slope.expand(len(price), -1, -1, -1)
        weights, residual = nonnegative(form.flatten(0, 2), slope.flatten(0, 2))
        worst = residual.view(len(price), -1).amax(-1)
        if not bool((worst < SOLVED).all()):
            raise ArithmeticError(f"the optimality conditions are missed by {float(worst.max())}")
        return weights.view_as(slope), worst

    def curve(self, price: Float[Tensor, " K"]) -> Curve:
        """The frontier at each price, as many at once as fit into memory."""
        most = max(1, int(CELLS / self.spread.numel()))
        parts = [self._curve(part) for part in price.split(most)]
        return Curve(**{k: torch.cat([part[k] for part in parts]) for k in parts[0]})

    def _curve(self, price: Tensor) -> dict[str, Tensor]:
        weights, residual = self.best(price)
        variance = self.variance(weights)
        along = (self.slope * weights).sum((-3, -2, -1))
        scale = along / self.gradient.square().sum()
        return {
            "price": price,
            "bias": self.bias(weights),
            "variance": variance,
            "scale": scale,
            "bias_rescaled": self.bias(weights / scale[:, None, None, None]),
            "variance_rescaled": variance / scale.square(),
            "residual": residual,
        }


def forms(advantage: Member, site: Problem | Chain, group_size: int) -> Forms:
    """Bias and variance as quadratic forms of the weights.

    Args:
        advantage: affine in the rewards of the group.
        site: gives policy, sampler and rewards.
        group_size: responses of a prompt.

    Raises:
        ValueError: a group too small for the advantage.
    """
    found = counts(site)
    group = group_law(advantage, group_size, found.law)
    g, prompts = float(group_size), site.prompts
    mean = torch.einsum("fp,fpnv->pnv", group.mean, found.once[:2])
    own = torch.einsum("fp,fpnvu->pnvu", group.own, found.twice)
    x0, x1, x2 = found.once
    a, b, c, d = (p[:, None, None] for p in group.pair)

    def cross(left: Tensor, right: Tensor) -> Tensor:
        return left.unsqueeze(-1) * right.unsqueeze(-2)

    one_sided = cross(x0, b * x2 + c * x1)
    pairs = cross(x1, a * x1) + cross(x0, d * x0) + (one_sided + one_sided.mT) / 2
    probability = site.logp.exp()
    spread = g * own + g * (g - 1) * pairs - g * g * cross(mean, mean)
    return Forms(
        visits=mean / prompts,
        probability=probability,
        spread=_gram(probability) * spread / (g * prompts) ** 2,
        gradient=objective(site).gradient,
        rounding=ROUNDING * x0.sum(-1, keepdim=True) * site.rewards.abs().max() / prompts,
    )


def _gram(probability: Float[Tensor, "P N V"]) -> Float[Tensor, "P N V V"]:
    """Inner products of the scores of two tokens."""
    p = probability
    rest = p.square().sum(-1)[..., None, None] - p.unsqueeze(-1) - p.unsqueeze(-2)
    return rest + torch.eye(p.shape[-1], dtype=p.dtype)


def nonnegative(
    form: Float[Tensor, "B V V"], slope: Float[Tensor, "B V"]
) -> tuple[Float[Tensor, "B V"], Float[Tensor, " B"]]:
    """Minimize w' H w - 2 b' w over w >= 0, and by how much the optimality conditions are missed.

    Block principal pivoting (Kim and Park, 2011): unknowns that are infeasible change sides all
    together; where that does not help, the last one alone, which ends after finitely many steps.

    Args:
        form: H, positive semidefinite; an unknown whose row is 0 stays 0.
        slope: b.

    Example:
        >>> form, slope = torch.eye(2).double(), torch.tensor([3.0, -1.0]).double()
        >>> found, _ = nonnegative(form[None], slope[None])
        >>> found.round(decimals=6).tolist()
        [[3.0, 0.0]]
    """
    diagonal = form.diagonal(dim1=-2, dim2=-1)
    usable = diagonal > 0
    unit = torch.where(usable, diagonal, 1.0).rsqrt() * usable
    h = form * unit.unsqueeze(-1) * unit.unsqueeze(-2)
    b = slope * unit
    size = b.abs().amax(-1, keepdim=True)
    b = b / torch.where(size > 0, size, 1.0)
    identity = torch.eye(b.shape[-1], dtype=b.dtype)
    free = usable & (b > 0)
    w, y = torch.zeros_like(b), -b
    least = torch.full((len(b),), b.shape[-1] + 1)
    left = torch.full((len(b),), PATIENCE)
    busy = torch.arange(len(b))
    for _ in range(100 + 10 * b.shape[-1]):
        mine = free[busy]
        both = mine.unsqueeze(-1) & mine.unsqueeze(-2)
        system = torch.where(both, h[busy], 0.0) + torch.diag_embed(1.0 - mine.double())
        system = system + RIDGE * identity
        found = torch.linalg.solve(system, torch.where(mine, b[busy], 0.0))
        found = torch.where(mine, found, 0.0)
        dual = (h[busy] @ found.unsqueeze(-1)).squeeze(-1) - b[busy]
        w[busy], y[busy] = found, dual
        scale = found.abs().amax(-1, keepdim=True)
        wrong = usable[busy] & torch.where(mine, found < -SIGN * scale, dual < -SIGN)
        several = wrong.sum(-1)
        less = several < least[busy]
        least[busy] = torch.where(less, several, least[busy])
        left[busy] = torch.where(less, PATIENCE, left[busy] - 1)
        last = wrong & (wrong.flip(-1).cumsum(-1).flip(-1) == 1)
        change = torch.where((left[busy] >= 0).unsqueeze(-1), wrong, last)
        free[busy] = mine ^ change
        busy = busy[several > 0]
        if not len(busy):
            break
    w = w.clamp(min=0)
    y = (h @ w.unsqueeze(-1)).squeeze(-1) - b
    residual = torch.where(w > 0, y.abs(), (-y).clamp(min=0)) * usable
    return w * unit * size, residual.amax(-1)


@final
@dataclass(frozen=True, kw_only=True, eq=False)
class Best:
    """What the class attains beside given estimators; nan where no weight of it goes so far.

    Args:
        bias: least |E g - grad J|^2 with no more than the given variance.
        variance: least variance with no more than the given squared bias.
    """

    bias: Float[Tensor, " K"]
    variance: Float[Tensor, " K"]


def attainable(
    forms: Forms, bias: Float[Tensor, " K"], variance: Float[Tensor, " K"], *, rescaled: bool
) -> Best:
    """The frontier's point of the same variance, and that of the same bias.

    By duality: phi(price), the least of bias + price * variance, is concave, and

        least bias at variance v  =  greatest over prices of  phi(price) - price * v
        least variance at bias b  =  greatest over prices of (phi(price) - b) / price

    where the price at which the best weights have the given variance, or bias, attains it; an error
    in the price counts by its square.  Where no price is too low, the least bias is the limit for
    price 0, where bias is flat: (4 bias(price) - bias(2 price)) / 3 of the least price.

    Args:
        forms: of the class.
        bias: squared lengths, of each estimator.
        variance: likewise.
        rescaled: compare with the best weights after dividing by their scale, as the given ones
            are.
    """
    ends = torch.tensor([LEAST, MOST], dtype=torch.float64).log()

    def figures(price: Tensor) -> tuple[Tensor, Tensor]:
        found = forms.curve(price)
        if rescaled:
            return found.bias_rescaled, found.variance_rescaled
        return found.bias, found.variance

    def cross(above: Callable[[Tensor, Tensor], Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        """Price, bias and variance where the price stops to be too low."""
        low, high = (end.expand_as(bias) for end in ends)
        for _ in range(HALVINGS):
            middle = (low + high) / 2
            raise_it = above(*figures(middle.exp()))
            low, high = torch.where(raise_it, middle, low), torch.where(raise_it, high, middle)
        price = low.exp()
        return price, *figures(price)

    price, b, v = cross(lambda _, v: v > variance)
    low, double = figures(torch.tensor([LEAST, 2 * LEAST], dtype=torch.float64))[0]
    floor = (4 * low - double) / 3
    floor = torch.where(floor < 0.01 * low, 0.0, floor)
    least_bias = torch.where(price < 1.01 * LEAST, floor, b + price * (v - variance))
    least_bias = torch.where(price > 0.99 * MOST, torch.nan, least_bias)
    price, b, v = cross(lambda b, _: b < bias)
    least_variance = v + (b - bias) / price
    least_variance = torch.where(
        (price < 1.01 * LEAST) & (b - bias > 0.01 * price * v), torch.nan, least_variance
    )
    return Best(bias=least_bias.clamp(min=0), variance=least_variance.clamp(min=0))
