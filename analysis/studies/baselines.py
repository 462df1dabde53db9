"""How much of the possible variance reduction each baseline reaches, exactly, on toy problems.

    python -m windage.analysis.studies.baselines

prints the table in markdown (half a minute).  On-policy,

    share = (V_none - V) / (V_none - V_best)

with V the variance of the estimate, V_none that without a baseline and V_best that with the best
constant of each prompt, all of G responses of each prompt.  Entries whose mean is the gradient
times a scale, or near it, are compared after dividing by the scale; the bias in direction that is
left is told.  A share is below 0 where estimating the baseline costs more than it gains, and above
1 where a baseline that differs by position beats every constant.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

from windage.estimators.catalogue import get
from windage.estimators.estimator import Estimator
from windage.toy.exact.moments import Moments
from windage.toy.exact.optimum import optimal_baseline
from windage.toy.exact.plan import exact
from windage.toy.objective import objective
from windage.toy.problems import Problem, difficulties, token_tree, trajectories


def by_lengths() -> Problem:
    """`trajectories` of 4 to 15 tokens whose rewards are 0 and 1; at -1 and 1 no baseline helps."""
    there = trajectories()
    return replace(there, name="trajectories, 0 or 1", rewards=(there.rewards + 1) / 2)


PROBLEMS: tuple[Callable[[], Problem], ...] = (lambda: token_tree(3), difficulties, by_lengths)
GROUP_SIZES = (2, 4, 8)
NONE, EXPECTED, BEST = "none", "expected reward", "best constant"
ENTRIES = (
    "rloo",
    "opo_leave_one_out",
    "score_weighted_leave_one_out",
    "optimal_token_baseline_leave_one_out",
    "group_mean",
    "opo",
    "score_weighted",
    "optimal_token_baseline",
)
Row = dict[str, Any]


def shares(
    problem: Problem, group_sizes: Sequence[int] = GROUP_SIZES, entries: Iterable[str] = ENTRIES
) -> list[Row]:
    """Rows of one problem: bounds that know the policy, then catalogue entries.

    Args:
        problem: is sampled from its own policy.
        group_sizes: responses of a prompt.
        entries: of the catalogue.

    Returns:
        `problem`, `baseline`, `group_size`, `variance` and `share` after rescaling, `scale`,
        `relative_bias` after rescaling.
    """
    problem = problem.on_policy()
    rows = []
    for size in group_sizes:
        bounds = {
            NONE: known(problem, size, lambda one: 0.0),
            EXPECTED: known(problem, size, lambda one: float(objective(one).value)),
            BEST: known(problem, size, lambda one: optimal_baseline(one, get("reinforce"))),
        }
        gain = bounds[NONE] - bounds[BEST]
        for name, variance in bounds.items():
            share = (bounds[NONE] - variance) / gain
            rows.append(_row(problem, name, size, variance, share, 1.0, 0.0))
        for name in entries:
            variance, scale, bias = rescaled(get(name), problem, size)
            share = (bounds[NONE] - variance) / gain
            rows.append(_row(problem, name, size, variance, share, scale, bias))
    return rows


def known(problem: Problem, group_size: int, baseline: Callable[[Problem], float]) -> float:
    """Variance with a constant baseline of each prompt; prompts are independent."""
    parts = [problem.select(p) for p in range(problem.prompts)]
    found = [exact(get("reinforce", baseline=baseline(one)), one, group_size) for one in parts]
    return sum(float(m.variance) for m in found) / len(parts) ** 2


def rescaled(estimator: Estimator, problem: Problem, group_size: int) -> tuple[float, float, float]:
    """Variance after dividing by the scale, the scale, and the bias that is left, relative."""
    moments: Moments = exact(estimator, problem, group_size)
    gradient = objective(problem).gradient
    scale = float((moments.mean * gradient).sum() / gradient.square().sum())
    left = (moments.mean / scale - gradient).norm() / gradient.norm()
    return float(moments.variance) / scale**2, scale, float(left)


def _row(
    problem: Problem,
    name: str,
    size: int,
    variance: float,
    share: float,
    scale: float,
    bias: float,
) -> Row:
    return {
        "problem": problem.name,
        "baseline": name,
        "group_size": size,
        "variance": variance,
        "share": share,
        "scale": scale,
        "relative_bias": bias,
    }


def markdown(rows: Sequence[Row]) -> str:
    """A line a problem and baseline, a column a group size: the share, and the bias where there is.

    Example:
        >>> print(markdown([{"problem": "p", "baseline": "b", "group_size": 2, "share": 0.5,
        ...                  "relative_bias": 0.0}]))
        | problem | baseline | G = 2 |
        |---|---|---|
        | p | b | 50 % |
    """
    sizes = sorted({row["group_size"] for row in rows})
    cells: dict[tuple[str, str], dict[int, str]] = {}
    for row in rows:
        bias = row["relative_bias"]
        text = f"{100 * row['share']:.0f} %" + (f", bias {bias:.2f}" if bias > 1e-9 else "")
        cells.setdefault((row["problem"], row["baseline"]), {})[row["group_size"]] = text
    head = ["problem", "baseline", *(f"G = {size}" for size in sizes)]
    lines = [head, ["---"] * len(head)]
    lines += [[*key, *(mine.get(size, "") for size in sizes)] for key, mine in cells.items()]
    first, rule, *rest = lines
    return "\n".join(
        [
            "| " + " | ".join(first) + " |",
            "|" + "|".join(rule) + "|",
            *("| " + " | ".join(line) + " |" for line in rest),
        ]
    )


if __name__ == "__main__":
    found = [row for make in PROBLEMS for row in shares(make())]
    sys.stdout.write(markdown(found) + "\n")
