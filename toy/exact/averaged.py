"""Maps of a response's mean log-ratio X / t on chains, t the number of its tokens.

For every length the map is another function of X, so that its series has coefficients for every
length, while the kernels mu e^{i w x} are the same:

    E[phi(X / t) x 1{end}]  ~  Re sum over k, t of c[k, t] E[e^{i omega[k] X} x 1{end, t}]

which the recursion sums with a factor of every length.  The bound is that of `summed`, its bells
at t times the limits.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from typing import final

import torch
from jaxtyping import Float
from torch import Tensor

from windage.toy.chains import Chain
from windage.toy.exact.pieces import Pieces, Window
from windage.toy.exact.summed import Law, Part, square_cells
from windage.toy.exact.transfer import Ended, Steps, cells, transfer

# Lengths whose laws are alike enough for one window: up to so many times the shortest.
BAND = 16
# Frequencies: as many as touch so many numbers in all, between two limits.
WORK, FEWEST, MOST = 1.5e8, 64, 512
CELLS = 1e6
LONGEST = 4096


def mean_frequencies(chain: Chain) -> int:
    """As many frequencies as the size of the chain affords."""
    return int(max(FEWEST, min(MOST, WORK / cells(chain))))


@final
class MeanLaw:
    """The law of X and t jointly with a response's end, its score and the score's squared norm.

    Args:
        chain: the sampler.
        score: of each token, weighted.
        x: summand of each token at each state.
        power: f(t) = t^-power times the score of a response of t tokens.
        frequencies: how many, beyond 0; None: as many as the horizon affords.
    """

    def __init__(
        self,
        chain: Chain,
        score: Float[Tensor, "P S V V"],
        x: Float[Tensor, "P S V"],
        power: int = 0,
        frequencies: int | None = None,
    ) -> None:
        count = frequencies or mean_frequencies(chain)
        ends = [BAND**i for i in range(1, 9) if BAND ** (i + 1) <= chain.horizon]
        bands = pairwise([1, *ends, chain.horizon + 1])
        self.bands = [Band(Law(chain, score, x, power, count, band)) for band in bands]

    def mapped(self, function: Pieces) -> Part:
        """E of a function of X / t times the score, and of its square times the squared norm."""
        parts = [band.mapped(function) for band in self.bands]
        return Part(
            mean=torch.stack([part.mean for part in parts]).sum(0),
            norm=torch.stack([part.norm for part in parts]).sum(0),
            mean_error=torch.stack([part.mean_error for part in parts]).sum(0),
            norm_error=torch.stack([part.norm_error for part in parts]).sum(0),
        )


@final
class Band:
    """Responses of some lengths.

    Args:
        law: of X for these.
    """

    def __init__(self, law: Law) -> None:
        self.law, self.chain, self.power = law, law.chain, law.power
        self.lengths = torch.arange(1, law.horizon + 1, dtype=law.x.dtype)
        drawn = law.mu > 0
        self.span = float(law.x[drawn].min().clamp(max=0)), float(law.x[drawn].max().clamp(min=0))

    def mapped(self, function: Pieces) -> Part:
        """E of a function of X / t times the score, and of its square times the squared norm."""
        if self.law.still:
            return self.law.mapped(function)
        last = function.terms[-1].clone()
        base = last if bool((last[1:] == 0).all()) else torch.zeros_like(last)
        rests = function.less(base), function.squared().less(base * base)
        plain = self.law.ended(self.law.x.new_zeros(1), (self.power, 2 * self.power))
        once, twice = plain[self.power], plain[2 * self.power]
        mean, norm = base[0] * once.mean[0], base[0] ** 2 * twice.norm[0]
        none = torch.zeros_like(norm)
        bell_mass, bell_norm, norm_error = none, none, none
        if bool(rests[0].terms.any()):
            for first, second, bell, bells in self._runs(rests):
                mean, norm = mean + first.mean, norm + second.norm
                bell_mass, bell_norm = bell_mass + bell.mass, bell_norm + bell.norm
                norm_error = norm_error + bells.norm
        mean_error = (bell_mass.clamp(min=0) * bell_norm.clamp(min=0)).sqrt()
        tails = [self._tail(rest, squared=i == 1) for i, rest in enumerate(rests)]
        return Part(
            mean=mean,
            norm=norm,
            mean_error=mean_error + tails[0].unsqueeze(-1),
            norm_error=norm_error.clamp(min=0) + tails[1].unsqueeze(-1),
        )

    def _tail(self, rest: Pieces, *, squared: bool) -> Float[Tensor, " P"]:
        """Bound on what lies outside the window, where a mean is still between all summands."""
        if not bool(rest.terms.any()):
            return self.law.x.new_zeros(self.chain.prompts)
        powers = torch.exp(torch.arange(3) * self.span[1])
        most = float((rest.terms.abs() * powers).sum()) + self.window.greatest(rest)
        sides = ((-1, self.window.low), (1, self.window.high))
        each = [self.law.outside(level, 0, side, squared=squared) for side, level in sides]
        return most * torch.stack(each).sum(0)

    @property
    def window(self) -> Window:
        """Where X lies, and t summands between t times the least and the greatest."""
        return replace(self.law.window, least=self.span[0], most=self.span[1])

    def _runs(self, rests: tuple[Pieces, Pieces]) -> Iterator[tuple[Ended, Ended, Ended, Ended]]:
        """Sums over some frequencies at a time: of the two functions, and of their bells."""
        window, law = self.window, self.law
        each = square_cells(law.chain) * self.lengths.numel() ** 0.5
        for omega in window.omega.split(max(1, int(CELLS / each))):
            rows = [window.series(rest, omega, self.lengths) for rest in rests]
            rows += [window.bells(rest, omega, self.lengths) for rest in rests]
            fall = torch.where(law.counted, self.lengths.pow(-self.power), 0.0)
            factor = torch.stack([rows[0], rows[1] * fall, rows[2], rows[3] * fall]) * fall
            kernel = law.mu * torch.exp(1j * omega[:, None, None, None] * law.x)
            score = law.score.expand(*kernel.shape, kernel.shape[-1])
            steps = Steps(kernel=kernel, score=score, factor=factor.unsqueeze(2))
            found = transfer(steps, self.chain.successor, self.chain.start)
            total = [v.real.sum(1) for v in (found.mass, found.mean, found.norm)]
            a, b, c, d = (Ended(mass=m, mean=u, norm=q) for m, u, q in zip(*total, strict=True))
            yield a, b, c, d
