"""Bias, variance and what follows from them, of per-prompt averages, with intervals by prompt.

Prompts are the independent draws.  With x[p], y[p] averages of two vectors at prompt p,

    <E x, E y>  is estimated by  sum over p != q of <x[p], y[q]> / (P (P - 1))

which is the mean of <average of one half, average of the other> over all halves of the prompts, so
no noise enters squared lengths.  Vectors c whose mean is known to be 0 take noise out of others,

    x[p] - sum over c of b[c] c[p]        b = argmin of the spread of the left side

Everything is a function of P small tables of inner products, so that one prompt can be left out at
a time (b fitted anew), for standard errors and the intervals of `limits`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import final

import torch
from jaxtyping import Float
from torch import Tensor

LEVEL = 0.95
# Standard errors within which nothing is said.
SIGMAS = 3.0
MEAN, GRADIENT, DRIFT, CONTROLS = 0, 1, 2, 3
SINGULAR = 1e-10

Values = dict[str, Tensor]


@final
@dataclass(frozen=True, kw_only=True, eq=False)
class Averages:
    """What was measured of one entry, prompt by prompt; leading axes are replicates of a study.

    Args:
        vectors: averages of the estimate, of an estimate of the gradient of J, of the estimate with
            every reward 1, and of vectors whose mean is 0.
        square: average squared length of the estimate.
        pair: average inner product of the estimates of two groups; NaN: there was one group only.
        kept: share of the groups that were not to be drawn again.
    """

    vectors: Float[Tensor, "*run P Q k"]
    square: Float[Tensor, "*run P"]
    pair: Float[Tensor, "*run P"]
    kept: Float[Tensor, "*run P"]


@final
@dataclass(frozen=True, kw_only=True, eq=False)
class Jackknife:
    """Figures of all prompts, and with each left out.

    Args:
        whole: `[*run]` each.
        left: `[*run P]` each.
        noise: of the squared drift, as of `lengths`.
    """

    whole: Values
    left: Values
    noise: Values = field(default_factory=dict)

    def value(self, name: str) -> Tensor:
        """A figure less its bias of order 1 / P, which quotients have."""
        left = self.left[name]
        count = left.shape[-1]
        return count * self.whole[name] - (count - 1) * left.mean(-1)

    def error(self, name: str) -> Tensor:
        """Standard error of a figure."""
        left = self.left[name]
        count = left.shape[-1]
        spread = (left - left.mean(-1, keepdim=True)).square().sum(-1)
        return (spread * (count - 1) / count).sqrt()

    def minus(self, other: Jackknife) -> Jackknife:
        """Differences of the figures on the same prompts; what their noise has in common cancels.

        Example:
            >>> x, y = torch.tensor([2.0, 4.0]), torch.tensor([0.0, 2.0])
            >>> one = Jackknife(whole={"x": x.mean()}, left={"x": x})
            >>> two = Jackknife(whole={"x": y.mean()}, left={"x": y})
            >>> one.minus(two).whole["x"], one.minus(two).error("x")
            (tensor(2.), tensor(0.))
        """
        return Jackknife(
            whole={name: v - other.whole[name] for name, v in self.whole.items()},
            left={name: v - other.left[name] for name, v in self.left.items()},
        )


def products(
    vectors: Float[Tensor, "*run P Q k"],
) -> tuple[Float[Tensor, "*run L Q Q"], Float[Tensor, "*run L Q Q"]]:
    """Inner products of means and spread over prompts, of all prompts and with each left out.

    Returns:
        Estimates of <E x, E y> without noise, and covariances of x[p], y[p] summed over k; first
        of all prompts, then P times of all but one.
    """
    count = vectors.shape[-3]
    total = vectors.sum(-3)
    own = vectors @ vectors.mT
    beside = vectors @ total.unsqueeze(-3).mT
    whole = (total @ total.mT).unsqueeze(-3)
    sums = torch.cat([whole, whole - beside - beside.mT + own], -3)
    owns = own.sum(-3, keepdim=True)
    diagonal = torch.cat([owns, owns - own], -3)
    n = _sizes(count).to(vectors.dtype).view(-1, 1, 1)
    return (sums - diagonal) / (n * (n - 1)), diagonal / n - sums / n**2


def _sizes(count: int) -> Tensor:
    """Prompts in each of the P + 1 sets."""
    return torch.tensor([count] + [count - 1] * count)


def quieted(
    inner: Float[Tensor, "*run L Q Q"], spread: Float[Tensor, "*run L Q Q"]
) -> Float[Tensor, "*run L 3 3"]:
    """Inner products of mean, gradient and drift, less the noise shared with the controls."""
    known = spread[..., CONTROLS:, CONTROLS:]
    if not known.shape[-1]:
        return inner
    size = known.diagonal(dim1=-2, dim2=-1).clamp(min=1e-300).sqrt()
    scaled = known / size.unsqueeze(-1) / size.unsqueeze(-2)
    along = spread[..., CONTROLS:, :CONTROLS] / size.unsqueeze(-1)
    ridge = SINGULAR * torch.eye(known.shape[-1], dtype=known.dtype)
    fitted = torch.linalg.solve(scaled + ridge, along) / size.unsqueeze(-1)
    fitted[..., DRIFT] = 0  # a weight that seldom matters is not told from one that never does
    one = torch.eye(CONTROLS, dtype=inner.dtype).expand(*inner.shape[:-2], -1, -1)
    mix = torch.cat([one, -fitted.mT], -1)
    return mix @ inner @ mix.mT


def left_out(parts: Float[Tensor, "*run P"]) -> Float[Tensor, "*run L"]:
    """Averages over all prompts and over all but one."""
    total = parts.sum(-1, keepdim=True)
    sums = torch.cat([total, total - parts], -1)
    return sums / _sizes(parts.shape[-1]).to(parts.dtype)


def figures(found: Averages) -> Jackknife:
    """Figures of an entry.

        m = E g / kept        s = E |g|^2 / kept        one group of a prompt drawn at random

        scale = <m, grad J> / |grad J|^2        relative_bias_square = |m - grad J|^2 / |grad J|^2
        cosine = <m, grad J> / (|m| |grad J|)   relative_bias_rescaled_square = 1 / cosine^2 - 1
        variance = s - |m|^2                    variance_rescaled = variance / scale^2
        variance_within = the part within prompts (NaN where groups are drawn again)
        drift_square = |E g|^2 with every reward 1 and no baseline
        signal_to_noise = |m|^2 / variance      merit = <m, grad J>^2 / (|grad J|^2 s)

    and along = <m, grad J>, mean_square = |m|^2, of which the quotients are made.  A quotient
    without meaning is NaN; squares may be below 0 by noise.
    """
    inner = quieted(*products(found.vectors))
    kept = left_out(found.kept)
    m2 = inner[..., MEAN, MEAN] / kept**2
    along = inner[..., MEAN, GRADIENT] / kept
    g2 = inner[..., GRADIENT, GRADIENT]
    square = left_out(found.square) / kept
    variance = square - m2
    scale = along / g2
    within = left_out(found.square) - left_out(found.pair)
    again = (found.kept < 1).any(-1, keepdim=True)
    values = {
        "gradient_square": g2,
        "scale": scale,
        "cosine": along / (m2.clamp(min=0) * g2).sqrt(),
        "relative_bias_square": (m2 - 2 * along + g2) / g2,
        "relative_bias_rescaled_square": m2 * g2 / along**2 - 1,
        "variance": variance,
        "variance_within": torch.where(again, torch.nan, within),
        "variance_rescaled": variance / scale**2,
        "drift_square": inner[..., DRIFT, DRIFT],
        "signal_to_noise": m2 / variance,
        "merit": along**2 / (g2 * square),
    }
    fine = {k: torch.where(v.isfinite() & (g2 > 0), v, torch.nan) for k, v in values.items()}
    fine |= {k: values[k] for k in ("gradient_square", "variance", "drift_square")}
    fine |= {"along": along, "mean_square": m2}
    return Jackknife(
        whole={k: v[..., 0] for k, v in fine.items()},
        left={k: v[..., 1:] for k, v in fine.items()},
        noise=lengths(found.vectors[..., DRIFT, :]),
    )


def lengths(vectors: Float[Tensor, "*run P k"]) -> Values:
    """What limits of the squared length of a mean need: A, B and degrees of freedom."""
    count, mean = vectors.shape[-2], vectors.mean(-2, keepdim=True)
    away = vectors - mean
    own = away.square().sum(-1).square().sum(-1)
    inner = away @ away.mT if count <= away.shape[-1] else away.mT @ away
    pairs = inner.square().sum((-1, -2)) - own
    along = (away @ mean.mT).squeeze(-1) / mean.norm(dim=-1).clamp(min=1e-150)
    return {
        "apart": 2 * pairs.clamp(min=0) / (count - 1) ** 2 / (count * (count - 1)),
        "slope": 4 * along.square().sum(-1) / (count - 1) / count,
        "freedom": freedom(along),
    }


def freedom(away: Float[Tensor, "*run P"]) -> Float[Tensor, "*run"]:
    """Degrees of freedom of a variance from P numbers of the kurtosis k that is seen.

        2 P / (k - 1), P - 1 at most: few prompts that matter count as few

    Args:
        away: the numbers less their mean.
    """
    count, second = away.shape[-1], away.square().mean(-1)
    kurtosis = (away**4).mean(-1) / second.square().clamp(min=1e-300)
    return (2 * count / (kurtosis - 1).clamp(min=1e-3)).clamp(min=2.0, max=count - 1.0)
