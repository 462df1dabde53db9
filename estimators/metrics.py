"""What to watch while a policy trains: one table of formulas over sums that add up.

    metrics of a batch = finish(moments of its parts, merged)

So micro-batches, ranks and chunks of a dump of any size give the figures of the whole.  x is a
token's log pi - log mu, s its sum over a response, w the weight after clip, cap or mask, C the
coefficient, A the advantage, c the aggregation's coefficient.  Names of verl are those of its
`rollout_corr`, `actor` and `critic` metrics.

Differences from verl:
    1. Ratios under `ratio/` are before truncation; verl's `rollout_is_*` take the truncated ones.
    2. verl's effective sample size also lifts weights below 1 / cap up to it.
    3. verl bounds log-ratios by 20 before a chi-square; here a ratio counts up to exp(300).
    4. Spreads are of the population (ddof 0); verl's per sequence have ddof 1.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, final

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from windage.estimators.batch import Batch
from windage.estimators.estimator import Coefficients
from windage.estimators.moments import (
    Moments,
    merge,
    of_groups,
    of_lags,
    of_policy,
    of_ratios,
    of_responses,
    of_weights,
)

Better = Literal["up", "down", "none"]
Stage = Literal["before", "after", "-"]
MOST = 700.0


@final
@dataclass(frozen=True, kw_only=True)
class Metric:
    """A figure, and how it comes of the sums.

    Args:
        name: as it is logged.
        formula: plain text.
        unit: of the figure.
        better: the direction that is good news, or none.
        stage: whether ratios were truncated, clipped or masked before; "-": no ratio enters.
        verl: the name that verl gives it, or None.
        keys: sums that it needs; the first counts what is averaged over, and is not 0.
        function: of those sums, in order.
    """

    name: str
    formula: str
    unit: str
    better: Better
    stage: Stage
    verl: str | None
    keys: tuple[str, ...]
    function: Callable[..., float]

    def of(self, sums: Mapping[str, Any]) -> float | None:
        """The figure, or None where a sum is missing or there is nothing to average over."""
        if not all(key in sums for key in self.keys) or sums[self.keys[0]] == 0:
            return None
        return float(self.function(*(sums[key] for key in self.keys)))


def exp(x: float) -> float:
    """The exponential, of at most 700.

    Example:
        >>> exp(0.0), exp(1e9) < math.inf
        (1.0, True)
    """
    return math.exp(min(x, MOST))


def mean(count: float, total: float) -> float:
    """An average."""
    return total / count


def minus_mean(count: float, total: float) -> float:
    """An average with the other sign."""
    return -total / count


def spread(count: float, total: float, square: float) -> float:
    """A standard deviation, ddof 0.

    Example:
        >>> spread(2, 4.0, 10.0)
        1.0
    """
    return math.sqrt(max(square / count - (total / count) ** 2, 0.0))


def last(count: float, value: float) -> float:
    """A maximum, or a sum as it is."""
    return value


def least(count: float, value: float) -> float:
    """A minimum, kept as the maximum of its opposite."""
    return -value


def ratio_mean(count: float, excess: float) -> float:
    """Mean of ratios from their excess over 1."""
    return 1 + excess / count


def greatest(count: float, value: float) -> float:
    """The largest ratio from its log."""
    return exp(value)


def smallest(count: float, value: float) -> float:
    """The smallest ratio from the opposite of its log."""
    return exp(-value)


def farthest(count: float, high: float, low: float) -> float:
    """The larger of a maximum and the opposite of a minimum."""
    return max(high, low)


def chi_square(count: float, excess: float, square: float) -> float:
    """Mean of squared ratios less 1, from excesses over 1.

    Example:
        >>> chi_square(2, 1.0, 1.0)
        1.5
    """
    return (square + 2 * excess) / count


def effective(count: float, log_sum: float, log_square: float) -> float:
    """Effective sample size as a share, from sums in log space; 0 where every weight is 0.

    Example:
        >>> effective(2, 0.0, 0.0)
        0.5
    """
    if log_sum == -math.inf:
        return 0.0
    return min(math.exp(2 * log_sum - log_square - math.log(count)), 1.0)


def correlation(count: float, p: float, q: float, pp: float, qq: float, pq: float) -> float:
    """Pearson's correlation; 1 where both are constant, and 0 where one is.

    Example:
        >>> correlation(2, 1.0, 1.0, 1.0, 1.0, 1.0)
        1.0
    """
    own, theirs = (max(s / count - (m / count) ** 2, 0.0) for s, m in ((pp, p), (qq, q)))
    if own <= 1e-15 or theirs <= 1e-15:
        return float(own <= 1e-15 and theirs <= 1e-15)
    return max(-1.0, min((pq / count - p * q / count**2) / math.sqrt(own * theirs), 1.0))


def quantile(share: float) -> Callable[[float, Sequence[float]], float]:
    """The smallest number that at least this share of a histogram does not exceed.

    Example:
        >>> quantile(0.5)(4.0, [1.0, 1.0, 2.0])
        1.0
    """

    def found(count: float, histogram: Sequence[float]) -> float:
        seen = 0.0
        for number, here in enumerate(histogram):
            seen += here
            if seen >= share * count * (1 - 1e-12):
                return float(number)
        return float(len(histogram) - 1)

    return found


def _m(
    name: str,
    verl: str | None,
    unit: str,
    better: Better,
    stage: Stage,
    function: Callable[..., float],
    keys: str,
    formula: str,
) -> Metric:
    return Metric(
        name=name,
        formula=formula,
        unit=unit,
        better=better,
        stage=stage,
        verl=verl,
        keys=tuple(keys.split()),
        function=function,
    )


def _over(over: str, letter: str, count: str, verl: Mapping[str, str]) -> Iterator[Metric]:
    """Mismatch and ratios of each token or each response, before truncation."""
    end = "" if over == "token" else "_response"
    n = f"sum/{over}.count"

    def row(stem: str, unit: str, better: Better, f: Callable, keys: str, formula: str) -> Metric:
        name = f"{stem}{end}"
        words = formula.replace("$", letter).replace("#", count)
        places = " ".join(k.replace("@", over) for k in keys.split())
        return _m(name, verl.get(stem), unit, better, "before", f, f"{n} {places}", words)

    yield row("mismatch/k1", "nats", "down", minus_mean, "sum/@.log", "-sum($) / #")
    yield row("mismatch/k2", "nats", "down", _half_mean, "sum/@.log_square", "sum($^2) / (2 #)")
    yield row("mismatch/k3", "nats", "down", mean, "sum/@.k3", "sum(exp($) - 1 - $) / #")
    yield row(
        "mismatch/chi2",
        "-",
        "down",
        chi_square,
        "sum/@.excess sum/@.excess_square",
        "sum(exp(2 $)) / # - 1",
    )
    yield row("mismatch/abs_log_ratio", "nats", "down", mean, "sum/@.abs_log", "sum(|$|) / #")
    yield row("mismatch/abs_log_ratio_max", "nats", "down", farthest, "max/@ max/-@", "max(|$|)")
    yield row("ratio/mean", "ratio", "none", ratio_mean, "sum/@.excess", "sum(exp($)) / #")
    yield row(
        "ratio/std",
        "ratio",
        "down",
        spread,
        "sum/@.excess sum/@.excess_square",
        "sqrt(sum(exp(2 $)) / # - mean^2)",
    )
    yield row("ratio/max", "ratio", "down", greatest, "max/@", "max(exp($))")
    yield row("ratio/min", "ratio", "up", smallest, "max/-@", "min(exp($))")
    yield row(
        "ratio/ess",
        "share",
        "up",
        effective,
        "log/@ log/@.square",
        "sum(r)^2 / (# sum(r^2)), r = exp($)",
    )
    yield row("ratio/above", "share", "down", mean, "sum/@.above", "count(exp($) > high) / #")
    yield row("ratio/below", "share", "down", mean, "sum/@.below", "count(exp($) < low) / #")


def _half_mean(count: float, total: float) -> float:
    return total / (2 * count)


_TOKEN = {
    "mismatch/k1": "rollout_corr/kl",
    "mismatch/k3": "rollout_corr/k3_kl",
    "mismatch/chi2": "rollout_corr/chi2_token",
}
_RESPONSE = {"mismatch/chi2": "rollout_corr/chi2_seq"}
_R, _W, _S, _G = "sum/response.count", "sum/weight.count", "sum/weight.response.count", "sum/groups"
_P, _L = "sum/probability.difference.count", "sum/lag.count"
_Q = (
    "sum/probability sum/probability.sampler sum/probability.square "
    "sum/probability.sampler_square sum/probability.product"
)
_D = "log_perplexity.difference"

_PERPLEXITY = (
    _m("perplexity/policy", "rollout_corr/training_ppl", "-", "none", "-", mean,
       f"{_R} sum/perplexity", "sum(exp(-mean over a response of log pi)) / R"),
    _m("perplexity/sampler", "rollout_corr/rollout_ppl", "-", "none", "-", mean,
       f"{_R} sum/perplexity.sampler", "sum(exp(-mean over a response of log mu)) / R"),
    _m("perplexity/log_policy", "rollout_corr/training_log_ppl", "nats", "none", "-", mean,
       f"{_R} sum/log_perplexity", "-sum(mean over a response of log pi) / R"),
    _m("perplexity/log_sampler", "rollout_corr/rollout_log_ppl", "nats", "none", "-", mean,
       f"{_R} sum/log_perplexity.sampler", "-sum(mean over a response of log mu) / R"),
    _m("perplexity/log_difference", "rollout_corr/log_ppl_diff", "nats", "none", "before", mean,
       f"{_R} sum/{_D}", "-sum(s / T) / R"),
    _m("perplexity/log_difference_abs", "rollout_corr/log_ppl_abs_diff", "nats", "down", "before",
       mean, f"{_R} sum/log_perplexity.distance", "sum(|s / T|) / R"),
    _m("perplexity/log_difference_max", "rollout_corr/log_ppl_diff_max", "nats", "down", "before",
       last, f"{_R} max/{_D}", "max(-s / T)"),
    _m("perplexity/log_difference_min", "rollout_corr/log_ppl_diff_min", "nats", "none", "before",
       least, f"{_R} max/-{_D}", "min(-s / T)"),
    _m("perplexity/ratio", "rollout_corr/ppl_ratio", "ratio", "none", "before", mean,
       f"{_R} sum/perplexity.ratio", "sum(exp(-s / T)) / R"),
)  # fmt: skip
_PROBABILITY = (
    _m("probability/difference_mean", "training/rollout_probs_diff_mean", "probability", "down",
       "before", mean, f"{_P} sum/probability.difference", "sum(|pi - mu|) / N"),
    _m("probability/difference_std", "training/rollout_probs_diff_std", "probability", "down",
       "before", spread, f"{_P} sum/probability.difference sum/probability.difference.square",
       "sqrt(sum((pi - mu)^2) / N - mean^2)"),
    _m("probability/difference_max", "training/rollout_probs_diff_max", "probability", "down",
       "before", last, f"{_P} max/probability.difference", "max(|pi - mu|)"),
    _m("probability/correlation", "training/rollout_actor_probs_pearson_corr", "-", "up", "before",
       correlation, f"{_P} {_Q}", "cov(pi, mu) / (std(pi) std(mu)) over tokens"),
)  # fmt: skip
_WEIGHT = (
    _m("weight/mean", "rollout_corr/rollout_is_mean", "ratio", "none", "after", ratio_mean,
       f"{_W} sum/weight.excess", "sum(w) / N"),
    _m("weight/std", "rollout_corr/rollout_is_std", "ratio", "down", "after", spread,
       f"{_W} sum/weight.excess sum/weight.excess_square", "sqrt(sum(w^2) / N - mean^2)"),
    _m("weight/max", "rollout_corr/rollout_is_max", "ratio", "down", "after", greatest,
       f"{_W} max/weight", "max(w)"),
    _m("weight/min", "rollout_corr/rollout_is_min", "ratio", "none", "after", smallest,
       f"{_W} max/-weight", "min(w)"),
    _m("weight/ess", "rollout_corr/rollout_is_eff_sample_size", "share", "up", "after", effective,
       f"{_W} log/weight log/weight.square", "sum(w)^2 / (N sum(w^2)), over tokens"),
    _m("weight/ess_response", None, "share", "up", "after", effective,
       f"{_S} log/weight.response log/weight.response.square",
       "sum(v)^2 / (R sum(v^2)), v the mean weight of a response's tokens"),
    _m("weight/mean_response", "rollout_corr/rollout_is_seq_mean", "ratio", "none", "after",
       ratio_mean, f"{_S} sum/weight.response.excess", "sum(v) / R"),
    _m("weight/max_response", "rollout_corr/rollout_is_seq_max", "ratio", "down", "after", greatest,
       f"{_S} max/weight.response", "max(v)"),
    _m("clip/share", "actor/pg_clipfrac", "share", "down", "after", mean,
       "sum/clipped.count sum/clipped", "count(w < the ratio of its reach) / N"),
    _m("clip/mass_positive", None, "share", "down", "after", mean,
       "sum/mass sum/mass.clipped_positive",
       "sum(|A| c where w is below its ratio and A > 0) / sum(|A| c)"),
    _m("clip/mass_negative", None, "share", "down", "after", mean,
       "sum/mass sum/mass.clipped_negative",
       "sum(|A| c where w is below its ratio and A < 0) / sum(|A| c)"),
    _m("update/coefficients", None, "reward", "none", "after", mean,
       f"{_W} sum/coefficient", "sum(|C|) / N"),
    _m("update/power", None, "reward^2", "down", "after", last,
       f"{_W} sum/power", "sum(C^2 (1 - 2 pi + sum(pi^2))): squared norm by the logits"),
    _m("admission/admitted", None, "share", "up", "-", mean,
       "sum/admission.present sum/admission.admitted", "responses that reach the update / present"),
)  # fmt: skip
_POLICY = (
    _m("policy/entropy", "actor/entropy", "nats", "none", "-", mean,
       "sum/entropy.count sum/entropy", "-sum(sum(pi log pi)) / N"),
    _m("policy/probability_square", None, "probability", "none", "-", mean,
       "sum/probability_square.count sum/probability_square", "sum(sum(pi^2)) / N"),
)  # fmt: skip
_REWARDS = (
    _m("reward/mean", "critic/rewards/mean", "reward", "up", "-", mean,
       "sum/reward.count sum/reward", "sum(reward) / R"),
    _m("reward/std", None, "reward", "none", "-", spread,
       "sum/reward.count sum/reward sum/reward.square", "sqrt(sum(reward^2) / R - mean^2)"),
    _m("reward/outcome", "critic/score/mean", "reward", "up", "-", mean,
       "sum/outcome.count sum/outcome", "sum(reward before shaping) / R"),
    _m("reward/invalid", None, "share", "down", "-", mean,
       "sum/invalid.count sum/invalid", "answers that could not be checked / R"),
    _m("reward/format", None, "share", "down", "-", mean,
       "sum/format.count sum/format", "right answers in another format / R"),
    _m("length/mean", "response_length/mean", "tokens", "none", "-", mean,
       "sum/length.count sum/length", "sum(T) / R"),
    _m("length/std", None, "tokens", "none", "-", spread,
       "sum/length.count sum/length sum/length.square", "sqrt(sum(T^2) / R - mean^2)"),
    _m("length/max", "response_length/max", "tokens", "none", "-", last,
       "sum/length.count max/length", "max(T)"),
    _m("length/truncated", "response_length/clip_ratio", "share", "down", "-", mean,
       "sum/truncated.count sum/truncated", "responses cut at a limit / R"),
    _m("group/constant", None, "share", "down", "-", mean,
       f"{_G} sum/groups.constant", "groups of at least two whose outcomes are equal / groups"),
    _m("group/missing", None, "share", "down", "-", mean,
       "sum/asked sum/missing", "responses without a reward / asked for"),
)  # fmt: skip
_LAGS = (
    _m("lag/mean", "training/off_policy/trajectory_staleness", "updates", "down", "-", mean,
       f"{_L} sum/lag", "sum(version trained - oldest version of a response) / R"),
    _m("lag/max", "training/off_policy/trajectory_staleness_worst", "updates", "down", "-", last,
       f"{_L} max/lag", "max(version trained - oldest version of a response)"),
    *(_m(f"lag/p{share:.0f}", None, "updates", "down", "-", quantile(share / 100),
         f"{_L} sum/lag.histogram", f"{share} % of the responses are at most so old; up to 255")
      for share in (50, 90, 99)),
    _m("lag/token", None, "updates", "down", "-", mean,
       "sum/lag.token.count sum/lag.token", "sum(version trained - version of a token) / N"),
    _m("lag/in_flight", None, "updates", "down", "-", mean,
       f"{_L} sum/lag.in_flight", "sum(newest - oldest version of a response) / R"),
    _m("lag/in_queue", None, "updates", "down", "-", mean,
       f"{_L} sum/lag.in_queue", "sum(version trained - newest version of a response) / R"),
)  # fmt: skip
_MEASURED: tuple[tuple[str, str | None, str, Better, str], ...] = (
    ("update/gradient_norm", "actor/grad_norm", "reward", "none",
     "norm of the gradient by all parameters, before it is clipped"),
    ("update/learning_rate", "actor/lr", "-", "none", "that of this step"),
    ("update/skipped", None, "steps", "down", "steps left out so far, not finite"),
    ("critic/explained_variance", "critic/vf_explained_var", "-", "up",
     "1 - var(G - V) / var(G) over tokens; V from before the fit, G what it is fitted to"),
    ("critic/loss", "critic/vf_loss", "reward^2", "down", "sum((V - G)^2) / (2 N)"),
    ("critic/value", "critic/values/mean", "reward", "none", "sum(V) / N"),
    ("critic/return", "critic/returns/mean", "reward", "up", "sum(G) / N"),
    ("critic/gradient_norm", "critic/grad_norm", "reward^2", "none",
     "largest norm of a gradient of the critic, before it is clipped"),
    ("critic/completed", None, "share", "down",
     "responses cut at a limit, whose reward is the value after the last token / R"),
    ("time/step", "perf/time_per_step", "seconds", "down", "from one step to the next"),
    ("time/sample", "timing_s/gen", "seconds", "down", "the sampler drew"),
    ("time/verify", "timing_s/reward", "seconds", "down", "answers were checked"),
    ("time/train", "timing_s/update_actor", "seconds", "down", "forward, backward and step"),
    ("time/critic", "timing_s/update_critic", "seconds", "down", "values, and the critic's fit"),
    ("time/sync", "timing_s/update_weights", "seconds", "down", "weights went to the sampler"),
    ("time/metrics", None, "seconds", "down", "these figures took"),
    ("time/tokens_per_second", "perf/throughput", "tokens / s", "up",
     "trained tokens / time/step; verl's is a device"),
    ("memory/peak", "perf/max_memory_allocated_gb", "GiB", "down", "most memory so far"),
)  # fmt: skip
_GIVEN = tuple(
    _m(name, verl, unit, better, "-", last, f"sum/given max/{name}", formula)
    for name, verl, unit, better, formula in _MEASURED
)

METRICS: tuple[Metric, ...] = (
    *_over("token", "x", "N", _TOKEN),
    *_over("response", "s", "R", _RESPONSE),
    *_PERPLEXITY,
    *_PROBABILITY,
    *_WEIGHT,
    *_POLICY,
    *_REWARDS,
    *_LAGS,
    *_GIVEN,
)
NAMES = {metric.name: metric for metric in METRICS}
REJECTED = "admission/rejected/"


def given(**values: float) -> Moments:
    """Figures that are measured elsewhere, by name with `__` for `/`; the larger of two counts.

    Raises:
        ValueError: a name that the table does not have under those, or a value that is not finite.

    Example:
        >>> finish(given(update__gradient_norm=0.5))
        {'update/gradient_norm': 0.5}
    """
    known = {metric.name for metric in _GIVEN}
    found: Moments = {"sum/given": torch.ones((), dtype=torch.float64)}
    for key, value in values.items():
        name = key.replace("__", "/")
        if name not in known:
            raise ValueError(
                f"no figure {name!r} is measured elsewhere; {', '.join(sorted(known))}"
            )
        if not math.isfinite(value):
            raise ValueError(f"{name} is {value}; allowed: finite numbers")
        found[f"max/{name}"] = torch.tensor(float(value), dtype=torch.float64)
    return found


@torch.no_grad()
def moments(
    batch: Batch,
    *,
    coefficients: Coefficients | None = None,
    effective: Float[Tensor, "*batch P G T"] | None = None,
    entropy: Float[Tensor, "*batch P G T"] | None = None,
    invalid: Bool[Tensor, "*batch P G"] | None = None,
    format: Bool[Tensor, "*batch P G"] | None = None,
    low: float = 0.5,
    high: float = 2.0,
) -> Moments:
    """Sums of a part of a batch; what is not given is left out.

    Claims:
        Merged over any division by groups they are those of the whole; those of tokens and
        responses over any division by responses.

    Args:
        batch: with what a forward pass told of it, as far as there was one.
        coefficients: of this part.
        effective: log-ratio that each weight stands for (`diagnostics.effective_log_ratio`).
        entropy: of the policy before each token, in nats.
        invalid: there was no answer, or none that could be checked.
        format: right, in a format that was not asked for.
        low, high: ratios beyond which `ratio/below` and `ratio/above` count.

    Raises:
        ValueError: a value that is not finite, by row.
    """
    batch = batch.validate()
    return {
        **of_ratios(batch, low=low, high=high),
        **({} if coefficients is None else of_weights(batch, coefficients, effective)),
        **of_policy(batch, entropy),
        **of_responses(batch, invalid=invalid, format=format),
        **of_groups(batch),
        **of_lags(batch),
    }


def finish(*parts: Mapping[str, Tensor]) -> dict[str, float]:
    """Every metric that the merged sums can tell, by name, each a finite number.

    Example:
        >>> batch = Batch.from_rows([1.0, 0.0], "aa", mask=[[1], [1, 1]])
        >>> {name: finish(moments(batch))[name] for name in ("reward/mean", "length/max")}
        {'reward/mean': 0.5, 'length/max': 2.0}
    """
    sums: dict[str, Any] = {key: value.tolist() for key, value in merge(*parts).items()}
    found = {metric.name: metric.of(sums) for metric in METRICS}
    present = sums.get("sum/admission.present", 0)
    start = "sum/admission.rejected."
    if present:
        found |= {
            REJECTED + key.removeprefix(start).replace(" ", "_"): value / present
            for key, value in sums.items()
            if key.startswith(start)
        }
    return {name: value for name, value in found.items() if value is not None}


def measure(batch: Batch, **others: Any) -> dict[str, float]:
    """Every metric of a whole batch: `moments`, then `finish`."""
    return finish(moments(batch, **others))
