"""Rows that are sampled: how much is drawn, what the standard errors are, and what they resolve.

Batches are drawn until the standard error of the variance is at most 1 % of it and that of the
relative bias at most 1 % of it, or of 0.1 where it is less; or until the most that is allowed.
Where the first batches are not enough, control variates whose moments are exact are tried on them
and kept if they spare more batches than they cost.

Intervals by Student's t of 31 degrees cover 95 % of the time from 2,048 batches on; with a quarter
of them 92 % was seen for a variance that rare responses make.  Lengths near 0 are covered more
often than that: their error is at least the length of the noise.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, final

from torch import Tensor

from windage.analysis.studies.decision import error_of
from windage.analysis.studies.figures import from_sample
from windage.analysis.studies.grid import Cell
from windage.analysis.tables import text
from windage.estimators.estimator import Estimator
from windage.toy.chains import Chain
from windage.toy.controls import Control, controlled, known, siblings
from windage.toy.exact.moments import Moments, Undefined
from windage.toy.exact.plan import Site, seeded
from windage.toy.objective import Objective
from windage.toy.sampling import BLOCKS, Draws, Figures, Jackknife, Sample, cells, jackknife

PRECISION = 0.01
RESOLVED = 0.1
# Standard errors within which a bias is not told from 0.
SIGMAS = 3.0
LENGTHS = {"relative_bias": "bias_resolved", "relative_bias_rescaled": "bias_resolved_rescaled"}
FIRST_BATCHES = 64 * BLOCKS
LEAST_BATCHES = 4 * BLOCKS
SAMPLED_CELLS = 2e7
BEYOND = "beyond the range of float64: the squared length of a gradient"

Row = dict[str, Any]


@final
@dataclass(frozen=True, kw_only=True, eq=False)
class Found:
    """What was sampled.

    Args:
        mean: of the estimate.
        figures: with each block left out as well.
        errors: standard errors.
        lack: how many times those of bias and variance exceed what is wanted.
    """

    mean: Tensor
    figures: Jackknife
    errors: Mapping[str, float]
    lack: float


@final
class Sampling:
    """One estimator on one problem, and the controls that are drawn beside it.

    Args:
        estimator: with its constant length bound.
        problem: with its sampler.
        goal: the problem's objective.
        group_size: responses of a prompt.
        seed: equal ones draw equal batches, whatever the estimator.
    """

    def __init__(
        self, estimator: Estimator, problem: Site, goal: Objective, group_size: int, seed: int
    ) -> None:
        self.estimator, self.problem, self.goal = estimator, problem, goal
        self.group_size, self.seed = group_size, seed
        self.draws = self._draws([estimator])
        self.moments: list[Moments] = []
        self.batches = 0

    def _draws(self, estimators: Sequence[Estimator]) -> Draws:
        return Draws(self.problem, self.group_size, seeded(self.seed), estimators)

    def upto(self, batches: int) -> Found:
        """Figures once so many batches have been drawn in all.

        Raises:
            Undefined: not one batch of a block was accepted.
        """
        self.batches = batches
        drawn, *beside = self.draws.upto(batches)
        return self._found(drawn, self._controls(beside, self.moments))

    def quiet(self) -> Sample:
        """What was drawn so far, less the noise that it shares with the controls."""
        drawn, *beside = self.draws.upto(self.batches)
        return controlled(drawn, self._controls(beside, self.moments))

    @staticmethod
    def _controls(samples: Sequence[Sample], moments: Sequence[Moments]) -> list[Control]:
        pairs = zip(samples, moments, strict=True)
        return [Control(sample=sample, moments=exactly) for sample, exactly in pairs]

    def _found(self, drawn: Sample, controls: Sequence[Control]) -> Found:
        check_range(drawn.mean, self.goal)
        rewards = self.problem.rewards

        def figures(blocks: Tensor) -> Figures:
            part = controlled(drawn.select(blocks), [c.select(blocks) for c in controls])
            return from_sample(part, self.goal, rewards)

        try:
            found = jackknife(BLOCKS, figures)
        except OverflowError:
            raise Undefined(BEYOND) from None
        quiet = controlled(drawn, controls)
        errors = honest(found, quiet, float(self.goal.gradient.norm()))
        lack = imprecision(found.whole, errors)
        return Found(mean=quiet.mean.mean(0), figures=found, errors=errors, lack=lack)

    def control(self, plain: Found, *, more: bool) -> Found:
        """Draw controls beside the estimator from here on, if the batches they spare are worth it.

        Each is kept that makes the variance left times the estimates that a batch takes less.

        Args:
            plain: what was found without them.
            more: whether more batches may be drawn, so that a trial must be worth its own.
        """
        some = [(e, known(e, self.problem, self.group_size)) for e in self._siblings()]
        served = [(e, exactly) for e, exactly in some if exactly is not None]
        if not served or (more and plain.lack**2 < 1 + len(served)):
            return plain
        trial = self._draws([e for e, _ in served])
        drawn = self.draws.upto(self.batches)[0]
        controls = self._controls(trial.upto(self.batches), [m for _, m in served])
        best, chosen = plain, list[int]()
        for i in range(len(controls)):
            found = self._found(drawn, [controls[j] for j in (*chosen, i)])
            if found.lack**2 * (2 + len(chosen)) < best.lack**2 * (1 + len(chosen)):
                best, chosen = found, [*chosen, i]
        self.moments = [controls[i].moments for i in chosen]
        self.draws.beside([trial.sums[i] for i in chosen])
        return best

    def _siblings(self) -> list[Estimator]:
        return [e for e in siblings(self.estimator, self.group_size) if e != self.estimator]

    @property
    def words(self) -> str:
        """How much was drawn, and with which controls."""
        beside = f", {len(self.moments)} control variate" if self.moments else ""
        return f"{self.batches:,} batches{beside}{'s' if len(self.moments) > 1 else ''}"


def sampled(
    estimator: Estimator,
    problem: Site,
    goal: Objective,
    group_size: int,
    seed: int,
    samples: int | None,
) -> tuple[Found, str]:
    """Draw more batches until the figures are precise, and say in words what was reached.

    Args:
        estimator, problem, goal, group_size, seed: of `Sampling`.
        samples: most batches; None: about ten seconds' worth.

    Raises:
        Undefined: the estimator's mean exceeds float64, or no batch was accepted.
    """
    head = estimator.centering is not None
    most = samples or affordable(problem, group_size, head=head)
    mine = Sampling(estimator, problem, goal, group_size, seed)
    found = _first(mine, most)
    if found.lack > 1 and (samples or mine.batches < most):
        found = mine.control(found, more=mine.batches < most)
        if samples is None:
            most = max(mine.batches, most // (1 + len(mine.moments)))
    while found.lack > 1 and mine.batches < most:
        times = min(16, max(2, math.ceil(1.2 * found.lack**2)))
        found = mine.upto(min(most, mine.batches * times))
    if found.lack <= 1:
        reached = f"standard errors within {100 * PRECISION:g} % of variance and of bias"
        return found, f"; {mine.words}: {reached}, or of {RESOLVED:g} where it is less"
    return found, f"; {mine.words}, the most: standard errors {found.lack:.2g} times those wanted"


def _first(mine: Sampling, most: int) -> Found:
    """The first batches, more where an admission refused whole blocks."""
    few = max(LEAST_BATCHES, most // 8)
    batches = min(most, FIRST_BATCHES if most >= 4 * FIRST_BATCHES else few)
    while True:
        try:
            return mine.upto(batches)
        except Undefined:
            if batches >= most:
                raise
            batches = min(most, 16 * batches)


def affordable(problem: Site, group_size: int, *, head: bool) -> int:
    """Batches of about ten seconds, by the numbers that one batch touches: the same everywhere."""
    least = LEAST_BATCHES if isinstance(problem, Chain) else FIRST_BATCHES
    return max(least, int(SAMPLED_CELLS / cells(problem, group_size, head=head)))


def too_long(problem: Site, group_size: int) -> str | None:
    """Why a chain is not sampled: few batches touch more numbers than many of another problem."""
    if not isinstance(problem, Chain):
        return None
    work = LEAST_BATCHES * cells(problem, group_size, head=False)
    if work <= 2 * SAMPLED_CELLS:
        return None
    return (
        f"{LEAST_BATCHES} sampled batches would touch {work:.1e} numbers, more than "
        f"{2 * SAMPLED_CELLS:.0e}; --samples asks for so many all the same"
    )


def honest(found: Jackknife, drawn: Sample, gradient_norm: float) -> dict[str, float]:
    """Standard errors, where a length within the noise has the length of the noise.

    An estimated length is cut off at 0, so that the jackknife sees too little of its spread there.
    """
    blocks, figures = len(drawn.mean), found.whole

    def noise(parts: Tensor) -> float:
        spread = (parts - parts.mean(0)).square().sum()
        return math.sqrt(float(spread) / (blocks * (blocks - 1)))

    lengths = {"drift": noise(drawn.drift)}
    if (scale := figures["scale"]) is not None:
        lengths["relative_bias"] = noise(drawn.mean) / gradient_norm
        if scale != 0:
            lengths["relative_bias_rescaled"] = lengths["relative_bias"] / abs(scale)
    out = found.errors
    for name, length in lengths.items():
        figure = figures[name]
        if figure is not None and figure < 2 * length:
            out[name] = max(length, out.get(name, 0.0))
    return out


def imprecision(figures: Figures, errors: Mapping[str, float]) -> float:
    """How many times the standard errors of bias and variance exceed what is wanted."""
    lack = 0.0
    for name, least in (("relative_bias", RESOLVED), ("variance", 0.0)):
        figure, error = figures[name], errors.get(name, 0.0)
        if figure is not None and error > 0:
            lack = max(lack, error / (PRECISION * max(abs(figure), least, 1e-300)))
    return lack


def check_range(mean: Tensor, goal: Objective) -> None:
    """Refuse a mean or a gradient whose squared length is not finite.

    Raises:
        Undefined: it is not.
    """
    for tensor in (mean, goal.gradient):
        if not math.isfinite(float(tensor.square().sum())):
            raise Undefined(BEYOND)


def resolved(figure: float | None, error: float | None) -> bool | None:
    """Whether a length is told from 0: beyond three standard errors; None where it is exact.

    Example:
        >>> resolved(0.1, 0.04), resolved(0.1, 0.03), resolved(0.1, None)
        (False, True, None)
    """
    return None if figure is None or error is None else figure > SIGMAS * error


def shown(figure: float, error: float) -> str:
    """A length within three standard errors, as a table has it.

    Example:
        >>> shown(0.02, 0.01)
        '< 0.05'
    """
    return f"< {text(figure + SIGMAS * error)}"


def resolution(figures: Mapping[str, Any], errors: Mapping[str, float] | None) -> dict[str, Any]:
    """The flags of a row: whether each bias is told from 0."""
    return {
        flag: resolved(figures[name], (errors or {}).get(name)) for name, flag in LENGTHS.items()
    }


def paired(rows: Sequence[Mapping[str, Any]], places: Sequence[Cell]) -> list[Row]:
    """Sampled rows beside the one of least error among those with the same draws.

    `paired` holds that row's number, and the difference of each figure from its own with the
    standard error of the difference, from draws that both share.  `error` is the mean squared error
    of one batch, bias^2 + variance, in units of |grad J|^2.  Which row has the least error is
    sampled too: of rows whose errors do not differ by much, it may be any.

    Args:
        rows: with `left_out`, figures with each block left out, where they are sampled.
        places: of the rows.
    """
    shared: dict[Any, dict[int, Jackknife]] = {}
    for number, (row, cell) in enumerate(zip(rows, places, strict=True)):
        if row.get("left_out"):
            known = {name: row[name] for name in row["left_out"][0]}
            left = [_with_errors(part, row) for part in row["left_out"]]
            figures = Jackknife(whole=_with_errors(known, row), left=left)
            site = cell.problem, cell.behavior, cell.group_size
            shared.setdefault(site, {})[number] = figures
    out: list[Row] = [{k: v for k, v in row.items() if k != "left_out"} for row in rows]
    if shared:
        out = [{**row, "paired": None} for row in out]
    for here in shared.values():
        best = min(here, key=lambda n: _order(here[n].whole["error_rescaled"]))
        for number in here:
            if number != best:
                out[number]["paired"] = {
                    "row": best,
                    "estimator": rows[best]["estimator"],
                    **_apart(here[number], here[best], rows[number], rows[best]),
                }
    return out


def _order(error: float | None) -> float:
    return math.inf if error is None else error


def _with_errors(figures: Mapping[str, Any], row: Mapping[str, Any]) -> Figures:
    """The figures with their mean squared errors."""
    out = dict(figures)
    for form in ("", "_rescaled"):
        error = error_of({**figures, "gradient_norm": row["gradient_norm"]}, form)
        if form and (figures["scale"] or 0.0) <= 0:
            error = None
        out[f"error{form}"] = None if error is None else error.bias + error.variance
    return out


def _apart(
    mine: Jackknife, best: Jackknife, row: Mapping[str, Any], other: Mapping[str, Any]
) -> Row:
    """Differences and their errors; that of a length within its noise is as if it were unpaired."""
    difference = mine.minus(best)
    errors = difference.errors
    for name in ("relative_bias", "relative_bias_rescaled", "drift"):
        own = [r["standard_error"].get(name) for r in (row, other)]
        told = [resolved(r[name], e) for r, e in zip((row, other), own, strict=True)]
        if name in errors and not all(told):
            errors[name] = max(errors[name], math.hypot(*(e or 0.0 for e in own)))
    return {"difference": difference.whole, "standard_error": errors}
