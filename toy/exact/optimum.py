"""The constant baseline of least variance on a problem, from exact moments."""

from __future__ import annotations

from windage.estimators.advantage import constant
from windage.estimators.estimator import Estimator
from windage.toy.exact.moments import Undefined
from windage.toy.exact.plan import Site, exact


def optimal_baseline(problem: Site, estimator: Estimator) -> float:
    """The baseline at which an estimator with a constant baseline has its least variance.

        b* = E[w^2 |S|^2 r] / E[w^2 |S|^2]   where the mean does not depend on b

    with S the score of a response and w its weight; over several prompts one b for all.  The
    variance is a parabola in b, so three exact moments give its vertex, and where the mean does
    depend on b (a truncated ratio) it is still the least variance, not the least second moment.

    Args:
        problem: gives policy, sampler and rewards.
        estimator: `reinforce` (on-policy), `off_policy_reinforce` or another whose advantage is
            reward minus constant.

    Raises:
        Undefined: another advantage, a weight that reads the sign of the advantage, or a variance
            that does not depend on the baseline.

    Example:
        >>> from windage.estimators.catalogue import get
        >>> from windage.toy.problems import bandit
        >>> round(optimal_baseline(bandit(), get("reinforce")), 6)
        0.417606

    References:
        Greensmith et al., 2004; arXiv:2602.17616 for the off-policy form.
    """
    if estimator.advantage.function is not constant:
        raise Undefined(f"{estimator.name} has no constant baseline")
    if any(correction.reads != "nothing" for correction in estimator.corrections):
        raise Undefined(f"{estimator.name}'s weight reads the sign of the advantage")
    middle = float(problem.rewards.mean())
    step = max(1.0, float((problem.rewards - middle).abs().max()))

    def variance(baseline: float) -> float:
        return float(exact(estimator.change(baseline=baseline), problem, 1).variance)

    low, here, high = (variance(middle + shift) for shift in (-step, 0.0, step))
    bend = low + high - 2 * here
    if bend <= 1e-12 * max(low, here, high):
        raise Undefined(f"the variance of {estimator.name} does not depend on the baseline")
    return middle + step * (low - high) / (2 * bend)
