"""Maps of a response's summed log-ratio X on chains, from its characteristic function.

Under the kernel mu e^{i w x} the recursion over states gives E[e^{i w X} 1{end} (1, score, norm)]
at any frequency w, so that with the series of `pieces`

    E[phi(X) score 1{end}]  ~  Re sum over k of c[k] E[e^{i omega[k] X} score 1{end}]

and likewise phi^2 with the squared norm.  Parts of phi that are powers of the ratio everywhere are
kernels mu rho and mu rho^2, without error.  The rest is bounded by three things:

1. In the window, where steps are smooth: with bells b of at least |phi - series|, computed like
   phi, E[|phi - series| |score|]^2 <= E[b] E[b |score|^2].
2. Beyond the window, by exponential kernels: E[f 1{X > h}] <= e^{-theta h} E[f e^{theta X}].
3. Nothing else: frequencies beyond those taken have coefficients below rounding.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import final

import torch
from jaxtyping import Float
from torch import Tensor

from windage.toy.chains import Chain
from windage.toy.exact.coupled.quadrature import laplace, raised
from windage.toy.exact.pieces import BAND, DEGREES, REACH, Pieces, Window
from windage.toy.exact.transfer import SAFE, Ended, Steps, transfer

# Frequencies: as many as touch so many numbers, between two limits.
WORK, FEWEST, MOST = 2**24, 256, 1024
# More of them, up to a number, where a smooth step would be wider: a ratio doubles in 0.7.
WIDEST, AT_MOST = 0.3, 4096
OUTSIDE = 1e-9
STILL = 1e-12
CELLS = 2e5
# Step of the integral for powers of the length: a relative error of 1e-10.
STEP = 0.3
# Longest responses whose powers of the length are factors of every length, not such an integral.
SHORT = 4096
EXPONENTS = torch.cat([sign * 2.0 ** torch.arange(-10, 3, 0.5) for sign in (-1.0, 1.0)])


def square_cells(chain: Chain) -> int:
    """Numbers of one stretch of tokens between all states, for one kernel."""
    states, vocab = chain.successor.shape
    return chain.prompts * states**2 * (2 + states * vocab)


def frequencies_of(chain: Chain) -> int:
    """As many frequencies as the size of the chain affords."""
    return max(FEWEST, min(MOST, WORK // square_cells(chain)))


@final
@dataclass(frozen=True, kw_only=True, eq=False)
class Part:
    """What a map of X makes of a response by how it ended, and bounds on the errors.

    Args:
        mean: E[phi(X) x 1{end}].
        norm: E[phi(X)^2 |x|^2 1{end}].
        mean_error: on the length of the error of `mean`.
        norm_error: on the error of `norm`.
    """

    mean: Float[Tensor, "P C S V"]
    norm: Float[Tensor, "P C"]
    mean_error: Float[Tensor, "P C"]
    norm_error: Float[Tensor, "P C"]


@final
class Law:
    """The law of X jointly with a response's end, its score and the score's squared norm.

    Args:
        chain: the sampler.
        score: of each token, weighted.
        x: summand of each token at each state.
        power: f(t) = t^-power times the score of a response of t tokens.
        frequencies: how many, beyond 0; None: as many as the size of the chain affords.
        lengths: of the responses that count: at least the first, below the second; None: all.
    """

    def __init__(
        self,
        chain: Chain,
        score: Float[Tensor, "P S V V"],
        x: Float[Tensor, "P S V"],
        power: int = 0,
        frequencies: int | None = None,
        lengths: tuple[int, int] | None = None,
    ) -> None:
        self.chain, self.score, self.x = chain, score, x
        self.mu = chain.behavior_logp.exp()
        self.power = power
        first, end = lengths or (1, chain.horizon + 1)
        self.horizon = min(end, chain.horizon)
        number = torch.arange(1, self.horizon + 1, dtype=score.dtype)
        self.counted = (number >= first) & (number < end)
        self.frequencies = frequencies or frequencies_of(chain)
        self.largest = float(torch.where(self.mu > 0, x.abs(), 0.0).max())

    @property
    def still(self) -> bool:
        """Whether X is 0 but for rounding."""
        return self.largest * self.horizon < STILL

    @cached_property
    def exponents(self) -> Float[Tensor, " N"]:
        """Exponents theta of the kernels that bound what is outside the window, within float64."""
        found = EXPONENTS.to(self.x) / self.largest
        tilted = self.mu * torch.exp(found[:, None, None, None] * self.x)
        return found[self.horizon * tilted.sum(-1).amax((1, 2)).log() < SAFE]

    @cached_property
    def growth(self) -> tuple[Float[Tensor, "N P"], Float[Tensor, "N P"]]:
        """Logarithms of E[e^{theta X}] and of E[|score|^2 e^{theta X}], infinite beyond float64."""
        found = self.ended(self.exponents, (0,))[0]
        totals = (v.sum(-1).nan_to_num(math.inf, math.inf) for v in (found.mass, found.norm))
        mass, norm = (total.log() for total in totals)
        return mass, norm

    def ended(self, rates: Tensor, powers: Sequence[int]) -> dict[int, Ended]:
        """Sums under the kernels mu e^{rate x}, with the factors t^-power.

        Of long responses such a factor is a mixture of factors e^{-s} a token, as denominators are.
        """
        parts: dict[int, list[Ended]] = {power: [] for power in powers}
        short = self.horizon <= SHORT
        mixed = [power for power in powers if power > 0 and not short]
        nodes, weights = laplace(1.0, float(self.chain.horizon), step=STEP)
        each = square_cells(self.chain) * (len(nodes) if mixed else 1)
        for some in rates.split(max(1, int(CELLS / each))):
            kernel = self.mu * torch.exp(some[:, None, None, None] * self.x)
            for power in powers:
                if power not in mixed:
                    parts[power].append(self._run(kernel, power))
            if mixed:
                found = self._run(torch.exp(-nodes)[:, None, None, None, None] * kernel)
                for power in mixed:
                    parts[power].append(_mixed(found, raised(nodes, weights, power)))
        return {power: _joined(found) for power, found in parts.items()}

    def _run(self, kernel: Tensor, power: int = 0) -> Ended:
        score = self.score.expand(*kernel.shape, kernel.shape[-1])
        lengths = torch.arange(1, self.horizon + 1, dtype=self.score.dtype)
        factor = torch.where(self.counted, lengths.pow(-power), 0.0)
        factor = factor.view(*(1,) * (kernel.dim() - 2), -1)
        steps = Steps(kernel=kernel, score=score, factor=factor)
        return transfer(steps, self.chain.successor, self.chain.start)

    def outside(self, level: float, degree: int, side: int, *, squared: bool) -> Tensor:
        """Bound on E[e^{degree X} |score|^k] beyond a level on a side, k = 1, or 2 if squared."""
        mass, norm = self.growth
        log = norm if squared else (mass + norm) / 2
        beyond = side * (self.exponents - degree)
        bound = log - ((self.exponents - degree) * level).unsqueeze(1)
        return torch.where((beyond >= 0).unsqueeze(1), bound, math.inf).amin(0).exp()

    @cached_property
    def window(self) -> Window:
        """Where X lies but for a part of OUTSIDE of the score's norm, with steps narrow enough."""
        plain = self.ended(self.x.new_zeros(1), (0,))[0]
        mass, norm = (v.sum(-1).log() for v in (plain.mass, plain.norm))
        levels = []
        for side in (-1, 1):
            mine = side * self.exponents > 0
            rates = self.exponents[mine].abs().unsqueeze(1)
            over = [g[mine] - log for g, log in zip(self.growth, (mass, norm), strict=True)]
            need = torch.stack([(o - math.log(OUTSIDE)) / rates for o in over]).amax(0)
            levels.append(side * float(need.amin(0).max()))
        low, high = levels
        enough = math.ceil(BAND / (2 * math.pi) * ((high - low) / WIDEST + 2 * REACH))
        frequencies = max(self.frequencies, min(enough, AT_MOST))
        return Window(low=low, high=high, frequencies=frequencies)

    @property
    def _needed(self) -> tuple[int, ...]:
        """Powers of the factors of mean and norm."""
        return tuple(sorted({self.power, 2 * self.power}))

    @cached_property
    def spectrum(self) -> dict[int, Ended]:
        """Sums under the kernels mu e^{i omega x}."""
        return self.ended(1j * self.window.omega, self._needed)

    @cached_property
    def ratios(self) -> dict[int, Ended]:
        """Sums under the kernels mu, mu rho and mu rho^2."""
        return self.ended(torch.arange(DEGREES, dtype=self.x.dtype), self._needed)

    def mapped(self, function: Pieces) -> Part:
        """E of a function of X times the score, and of its square times the squared norm."""
        mean, mean_error = self._expected(function, squared=False)
        norm, norm_error = self._expected(function.squared(), squared=True)
        return Part(mean=mean, norm=norm, mean_error=mean_error, norm_error=norm_error)

    def _expected(self, function: Pieces, *, squared: bool) -> tuple[Tensor, Tensor]:
        """E[function(X) times score or norm 1{end}], and a bound on the error."""
        power = 2 * self.power if squared else self.power

        def wanted(ended: dict[int, Ended]) -> Tensor:
            return ended[power].norm if squared else ended[power].mean

        if self.still:
            plain = self.ratios
            value = function.at(self.x.new_zeros(())) * wanted(plain)[0]
            return value, torch.zeros_like(plain[power].norm[0])
        window = self.window
        at = torch.tensor([window.low, window.high], dtype=self.x.dtype)
        first, last = torch.bucketize(at, function.limits).tolist()
        base = function.terms[last]
        rest = function.less(base)
        used = base.nonzero().squeeze(1)
        value = torch.einsum("d,d...->...", base[used], wanted(self.ratios)[used])
        error = torch.zeros_like(self.ratios[power].norm[0])
        most = 0.0
        if first < last:
            spectrum, omega = self.spectrum, window.omega
            series, bells = (find(rest, omega)[:, 0] for find in (window.series, window.bells))
            value = value + _real(series, wanted(spectrum))
            error = error + _real(bells, spectrum[power].norm).clamp(min=0)
            if not squared:
                error = (error * _real(bells, spectrum[power].mass).clamp(min=0)).sqrt()
            most = window.greatest(rest)
        beyond = rest.terms[: first + 1], rest.terms[last:]
        return value, error + self._tails(beyond, most, squared=squared).unsqueeze(-1)

    def _tails(
        self, beyond: tuple[Tensor, Tensor], most: float, *, squared: bool
    ) -> Float[Tensor, " P"]:
        """Bound on what lies outside the window: of pieces there, and of a series up to `most`."""
        total = self.x.new_zeros(self.chain.prompts)
        sides = ((-1, self.window.low), (1, self.window.high))
        for (side, level), terms in zip(sides, beyond, strict=True):
            for degree, size in enumerate(terms.abs().amax(0).tolist()):
                size += most if degree == 0 else 0.0
                if size > 0:
                    total = total + size * self.outside(level, degree, side, squared=squared)
        return total


def _real(series: Tensor, values: Tensor) -> Tensor:
    """Re sum over k of series[k] values[k]."""
    flat = values.flatten(1)
    return (series.real @ flat.real - series.imag @ flat.imag).view(values.shape[1:])


def _mixed(ended: Ended, weights: Float[Tensor, " Q"]) -> Ended:
    """Weighted sum over the first axis."""
    mass, mean, norm = (
        torch.einsum("q,q...->...", weights.to(v), v) for v in (ended.mass, ended.mean, ended.norm)
    )
    return Ended(mass=mass, mean=mean, norm=norm)


def _joined(parts: Sequence[Ended]) -> Ended:
    return Ended(
        mass=torch.cat([e.mass for e in parts]),
        mean=torch.cat([e.mean for e in parts]),
        norm=torch.cat([e.norm for e in parts]),
    )
