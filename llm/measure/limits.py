"""Limits between which a figure's true value lies 95 times in 100.

A quotient N / M of averages over few prompts is far from normal, and N - x M at the true x is not:
the limits are all x at which it is not told from 0 (Fieller),

    (N - x M)^2 = t^2 (var N - 2 x cov(N, M) + x^2 var M)

unbounded where M is not told from 0.  t is Student's, with the degrees of freedom of `freedom`.
The noise of a squared length grows with it, so that an estimate that is too low looks too sure:

    (U - x)^2 = t^2 (A + B x)        A = 2 tr S^2 / (P (P - 1)),  B = 4 u'S u / P

with S the spread over prompts and u the direction of the mean (`moments.lengths`); where only
figures with each prompt left out are known, A and B are those that give the error seen at the
estimate.  Positive figures whose noise is in proportion to them are taken as logarithms, with the
upper end moved out where those are skewed.

In 2,000 studies each of 16, 24, 32, 64 and 128 prompts of an enumerated transformer they held the
exact figure in 93 % to 100 %, entry by entry (benchmarks/results/coverage.json); nearer to 100
where the truth is at an end of what can be, such as a cosine of 1.

References:
    Fieller, 1954, Some problems in interval estimation.
    Hall, 1992, On the removal of skewness by transformation.
"""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

from windage.llm.measure.moments import LEVEL, Jackknife, freedom

LOGARITHMS = ("variance", "variance_within", "variance_rescaled")
SQUARES = ("gradient_square", "merit")
ENDS = tuple[Tensor, Tensor]
LONGER = 1.2


def interval(found: Jackknife, name: str) -> ENDS:
    """Limits of a figure; infinite where nothing bounds it.

    Args:
        found: of `moments.figures`, or with figures of the caller's own, which are taken for
            normal.
    """
    if name in LIMITS:
        return LIMITS[name](found)
    if name in LOGARITHMS:
        return _logarithm(found, name)
    if name in SQUARES:
        return _square(found, name)
    middle, half = found.value(name), reach(found.left[name])
    return middle - half, middle + half


def reach(left: Float[Tensor, "*run P"]) -> Float[Tensor, "*run"]:
    """Half of an interval, by Student's t, of a figure with each prompt left out."""
    away, count = left - left.mean(-1, keepdim=True), left.shape[-1]
    error = (away.square().sum(-1) * (count - 1) / count).sqrt()
    return quantile(freedom(away)) * error


def quantile(freedom: Tensor) -> Tensor:
    """Student's, of the level's upper end.

    Example:
        >>> [round(float(q), 2) for q in quantile(torch.tensor([4.0, 1000.0]))]
        [2.78, 1.96]
    """
    from scipy.stats import t

    return torch.as_tensor(t.ppf((1 + LEVEL) / 2, freedom.double().numpy()), dtype=torch.float64)


def _logarithm(found: Jackknife, name: str) -> ENDS:
    """Above, farther where a few prompts make the figure, of which others may have none."""
    left, middle = found.left[name].clamp(min=1e-300).log(), found.value(name)
    half = reach(left)
    return middle / half.exp(), middle * (half * _skewed(left)).exp()


def _skewed(left: Float[Tensor, "*run P"]) -> Float[Tensor, "*run"]:
    """By how much Hall's cubic for a skew of g sqrt(P) lengthens the upper half, a fifth at most.

    3 / g (1 - (1 - g (t + g / 6))^(1/3)) / t
    """
    away, count = left - left.mean(-1, keepdim=True), left.shape[-1]
    second = away.square().mean(-1).clamp(min=1e-200)
    g = (-(away**3).mean(-1) / second**1.5 / count**0.5).clamp(min=1e-3)
    plain = quantile(torch.full_like(g, count - 1.0))
    cubic = 1 - g * (plain + g / 6)
    long = 3 / g * (1 - cubic.sign() * cubic.abs() ** (1 / 3))
    return (long / quantile(freedom(away))).clamp(min=1.0, max=LONGER)


def _square(found: Jackknife, name: str) -> ENDS:
    """With B x the whole of the error seen at the estimate, where that is beyond the noise."""
    square, half = found.value(name), reach(found.left[name])
    slope = half**2 / torch.maximum(square, half).clamp(min=1e-300)
    rest = half**2 - slope * square.clamp(min=0)
    above = slope / 2 + (slope**2 / 4 + slope * square.clamp(min=0) + rest).sqrt()
    return square - half, square + above


def _whole(found: Jackknife, *names: str) -> list[Tensor]:
    """Figures of all prompts, then with each left out: `[*run L]`."""
    return [torch.cat([found.whole[n].unsqueeze(-1), found.left[n]], -1) for n in names]


def fieller(
    over: Float[Tensor, "*run L"], under: Float[Tensor, "*run L"], *, square: bool = False
) -> ENDS:
    """Limits of a quotient.

    Args:
        over, under: of all prompts, then with each left out.
        square: whether `over` is a squared length, whose noise grows with it.

    Example:
        >>> over = torch.tensor([1.0, 1.1, 0.9, 1.0]).double()
        >>> low, high = fieller(over, 2 * torch.ones(4).double())
        >>> round(float(low + high), 6), bool(0.0 < low < 0.5)
        (1.0, True)
        >>> float(fieller(torch.ones(4).double(), over - 1)[1])
        inf
    """
    count = over.shape[-1] - 1
    n, m = (count * x[..., 0] - (count - 1) * x[..., 1:].mean(-1) for x in (over, under))
    dn, dm = (x[..., 1:] - x[..., 1:].mean(-1, keepdim=True) for x in (over, under))
    at = n / m
    t2 = quantile(freedom(dn - at.unsqueeze(-1) * dm)) ** 2 * (count - 1) / count
    nn, nm, mm = (t2 * (a * b).sum(-1) for a, b in ((dn, dn), (dn, dm), (dm, dm)))
    slope = torch.zeros_like(n)
    if square:
        half2 = (nn - 2 * at * nm + at**2 * mm).clamp(min=0)
        slope = half2 / torch.maximum(n, half2.sqrt()).clamp(min=1e-300)
    low = _root(n, m, (nn, nm, mm), slope=0 * slope, sign=-1)
    return low, _root(n, m, (nn, nm, mm), slope=slope, sign=1)


def _root(
    n: Tensor, m: Tensor, noise: tuple[Tensor, Tensor, Tensor], *, slope: Tensor, sign: int
) -> Tensor:
    """A solution of (n - x m)^2 = nn - 2 x nm + x^2 mm + slope (x m - n)."""
    nn, nm, mm = noise
    a, b, c = m**2 - mm, 2 * (nm - n * m) - slope * m, n**2 - nn + slope * n
    found = (-b + sign * (b**2 - 4 * a * c).clamp(min=0).sqrt()) / (2 * a)
    return torch.where(a > 0, found, sign * torch.inf)


def _scale(found: Jackknife) -> ENDS:
    return fieller(*_whole(found, "along", "gradient_square"))


def _bias(found: Jackknife) -> ENDS:
    square, along, gradient = _whole(found, "mean_square", "along", "gradient_square")
    return fieller(square - 2 * along + gradient, gradient, square=True)


def _cosine(found: Jackknife) -> ENDS:
    """By 1 - cosine, which is at least 0."""
    square, along, gradient = _whole(found, "mean_square", "along", "gradient_square")
    lengths = (square.clamp(min=0) * gradient.clamp(min=0)).sqrt()
    low, high = fieller(lengths - along, lengths, square=True)
    return (1 - high).clamp(min=-1.0), (1 - low).clamp(max=1.0)


def _turned(found: Jackknife) -> ENDS:
    """1 / cosine^2 - 1."""
    low, high = _sizes(*_cosine(found))
    return 1 / high**2 - 1, torch.where(low > 0, 1 / low.clamp(min=1e-150) ** 2 - 1, torch.inf)


def _rescaled(found: Jackknife) -> ENDS:
    """The square of standard deviation / scale; above, as far as its logarithm says, too."""
    variance, along, gradient = _whole(found, "variance", "along", "gradient_square")
    low, high = _sizes(*fieller(variance.clamp(min=0).sqrt() * gradient, along))
    return low**2, torch.maximum(high**2, _logarithm(found, "variance_rescaled")[1])


def _signal(found: Jackknife) -> ENDS:
    """|m|^2 / variance; above, as far as the quotient says, too."""
    low, high = _square(found, "signal_to_noise")
    square, variance = _whole(found, "mean_square", "variance")
    return low, torch.maximum(high, fieller(square, variance, square=True)[1])


def _sizes(low: Tensor, high: Tensor) -> ENDS:
    """Limits of a number's size.

    Example:
        >>> _sizes(torch.tensor([1.0, -2.0]), torch.tensor([3.0, 1.0]))
        (tensor([1., 0.]), tensor([3., 2.]))
    """
    both = torch.minimum(low.abs(), high.abs())
    return torch.where(low * high > 0, both, 0.0), torch.maximum(low.abs(), high.abs())


def _drift(found: Jackknife) -> ENDS:
    """Of a squared length whose noise is known."""
    u, known = found.value("drift_square"), found.noise
    t2 = quantile(known["freedom"]) ** 2
    b = u + t2 * known["slope"] / 2
    half = (b**2 - u**2 + t2 * known["apart"]).clamp(min=0).sqrt()
    return b - half, b + half


LIMITS = {
    "scale": _scale,
    "cosine": _cosine,
    "relative_bias_square": _bias,
    "relative_bias_rescaled_square": _turned,
    "variance_rescaled": _rescaled,
    "drift_square": _drift,
    "signal_to_noise": _signal,
}
