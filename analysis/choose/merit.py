"""The merit of recipes at a request's length, mismatch and lags, exactly.

    merit = <grad J, E g>^2 / (|grad J|^2 E|g|^2)

is the share of an exact gradient step's improvement that a step along the estimate attains, each
with its own best size, where J is quadratic with the same curvature in all directions.  It is 1
minus the least mean squared error over rescaled estimates, in units of |grad J|^2; an estimate that
points the wrong way on average has merit 0.

The chain of `toy.chains.reasoning` stands for the model: three prompts of different difficulty at
the request's mean length.  The sampler is the policy of some exact gradient steps ago, with a fixed
error on its logits.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import final

import torch
from jaxtyping import Float
from torch import Tensor

from windage.analysis.choose.request import Request
from windage.analysis.studies.length import rate, trail
from windage.analysis.studies.study import bind
from windage.estimators.catalogue import FIRST
from windage.estimators.estimator import Estimator
from windage.toy.behavior import with_behavior
from windage.toy.chains import Chain, reasoning
from windage.toy.exact.automata import refusal, sweep
from windage.toy.exact.plan import undefined
from windage.toy.exact.transfer import mismatch
from windage.toy.objective import objective

FREQUENCIES = 64
TIMES_LONGER = 4
APART = math.log(4)
LADDER = (0, 1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128)


@final
@dataclass(frozen=True, kw_only=True, eq=False)
class Measured:
    """Exact moments of a recipe with groups of one lag, at each lag of the ladder.

    Args:
        gradient: of J.
        prompts: in one estimate.
        means: of the estimate at each lag.
        variances: trace of its covariance.
    """

    gradient: Float[Tensor, " D"]
    prompts: int
    means: Float[Tensor, "L D"]
    variances: Float[Tensor, " L"]

    def parts(self, shares: Float[Tensor, " L"], prompts: int) -> tuple[float, float]:
        """Merit without noise, and the share of |g|^2 that is its mean; their product is the merit.

        Args:
            shares: of the lags of a batch's groups, in sum 1.
            prompts: of the batch.
        """
        mean = shares @ self.means
        square = mean.square().sum()
        second = shares @ (self.variances + self.means.square().sum(-1))
        noise = (second - square).clamp(min=0) * self.prompts / prompts
        along = self.gradient @ mean
        if not bool(torch.isfinite(noise)) or along <= 0:
            return 0.0, 0.0
        direction = along.square() / (self.gradient.square().sum() * square)
        return float(direction), float(square / (square + noise))


def spread_over(lags: Mapping[int, float], ladder: Sequence[int]) -> Float[Tensor, " L"]:
    """Shares of lags on the steps of a ladder, each split between its neighbors.

    Example:
        >>> spread_over({3: 1.0}, (0, 2, 6))
        tensor([0.0000, 0.7500, 0.2500], dtype=torch.float64)
    """
    out = torch.zeros(len(ladder), dtype=torch.float64)
    for lag, share in lags.items():
        above = next((i for i, step in enumerate(ladder) if step >= lag), len(ladder) - 1)
        below = max(0, above - 1)
        gap = ladder[above] - ladder[below]
        part = 1.0 if gap == 0 else min(1.0, (lag - ladder[below]) / gap)
        out[above] += share * part
        out[below] += share * (1 - part)
    return out


def model(request: Request) -> Chain:
    """The chain at the mean length: a prompt of the pass rate, an easier and a harder one."""
    mean = request.response_tokens
    middle = math.log(request.pass_rate / (1 - request.pass_rate))
    success = [1 / (1 + math.exp(-middle - step)) for step in (-APART, 0.0, APART)]
    return reasoning(max(4, round(TIMES_LONGER * mean)), success, mean_length=mean)


def error_of(chain: Chain, target: float, seed: int) -> float:
    """Standard deviation of the error on the sampler's logits that has a divergence a token."""
    if target == 0:
        return 0.0
    sigma = math.sqrt(2 * target)
    for _ in range(8):
        found = mismatch(with_behavior(chain, "noise", sigma=sigma, seed=seed))["kl"]
        sigma *= math.sqrt(target / found)
    return sigma


def samplers(request: Request, ladder: Sequence[int]) -> list[Chain]:
    """The chain under the sampler of each lag of the ladder."""
    fresh = model(request)
    step = rate(fresh, request.drift) if request.drift else 0.0
    sigma = error_of(fresh.on_policy(), request.mismatch, request.seed)
    out = []
    for late in trail(fresh, tuple(ladder), step):
        here = replace(late, logits=late.behavior_logp)
        wrong = with_behavior(here, "noise", sigma=sigma, seed=request.seed)
        out.append(replace(late, behavior_logp=wrong.behavior_logp))
    return out


def served(request: Request) -> list[Estimator]:
    """Entries of the first tier that the recursion over states serves at this length."""
    chain = model(request)
    fine = [
        e
        for e in FIRST
        if undefined(e, chain, request.group_size) is None and not refusal(e, chain)
    ]
    return [bind(e, chain) for e in fine]


def measure(
    request: Request, estimators: Iterable[Estimator], ladder: Sequence[int]
) -> dict[str, Measured]:
    """Exact moments of recipes at each lag of a ladder."""
    chains = samplers(request, ladder)
    entries = list(estimators)
    pairs = [(estimator, chain) for estimator in entries for chain in chains]
    found = sweep(pairs, [request.group_size], FREQUENCIES)
    goal = objective(chains[0])
    out = {}
    for i, estimator in enumerate(entries):
        mine = [moments[0] for moments in found[i * len(chains) : (i + 1) * len(chains)]]
        out[estimator.name] = Measured(
            gradient=goal.gradient.flatten(),
            prompts=chains[0].prompts,
            means=torch.stack([m.mean.flatten() for m in mine]),
            variances=torch.stack([m.variance for m in mine]),
        )
    return out
