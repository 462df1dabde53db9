"""Document 002, section on which trajectories enter training."""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from torch import Tensor

from windage.analysis.claims.claim import Outcome, claim, counted, exact, series, zero
from windage.analysis.claims.measures import (
    alone,
    bias,
    cosine,
    edited,
    judge,
    moments,
    recorded,
    relative,
)
from windage.analysis.claims.problems import fresh_tree, pair, response_mass, rewarded
from windage.estimators.admission import overlong, zero_variance
from windage.estimators.advantage import group_std
from windage.estimators.aggregation import token_mean
from windage.estimators.batch import Batch
from windage.estimators.catalogue import get
from windage.estimators.estimator import Estimator
from windage.estimators.member import use
from windage.estimators.penalty import loss_k2
from windage.toy.exact.tuples import Edit, Responses, accepted, every_multiset
from windage.toy.objective import objective
from windage.toy.problems import Problem

SECTION = "Which trajectories enter training"
PLAIN = get("group_mean")
REFILL = replace(PLAIN, admission=(use(zero_variance),))


def acceptance(p: float, group_size: int = 8) -> float:
    """Chance that a group of PAIR(p) has rewards that differ, by the admission itself."""
    problem = pair(p)
    table, kept = Responses(problem), 0.0
    for index, chance in every_multiset(problem, group_size):
        keep = accepted(REFILL, table.batch(index, head=False))
        assert keep is not None
        kept += float((chance * keep).sum())
    return kept


def progress(useful: float, noise: float, cost: float) -> float:
    """Progress a unit of time: n useful groups make n / (n + N0) of a step."""
    return useful / (useful + noise) / cost


def refill_gain(z: float, batch: int, noise: float, generation: float, learning: float) -> float:
    """Progress per time with refilled groups over that without, at acceptance z."""
    with_refill = progress(batch, noise, batch * (generation / z + learning))
    return with_refill / progress(z * batch, noise, batch * (generation + learning))


def differing_stages(a: Estimator, b: Estimator) -> int:
    """Stages after the advantage in which two entries differ; an idle penalty is none."""
    stages = ("corrections", "aggregation", "admission", "active_penalties", "centering")
    return sum(getattr(a, name) != getattr(b, name) for name in stages)


@claim(
    "B-42",
    section=SECTION,
    statement="Groups of equal rewards teach nothing; drawing others in their place costs "
    "generation and pays where learning is what takes the time.",
    verdict="holds only if",
    condition="judged by time, with batches large against the noise scale; by accepted groups "
    "refilling is never dearer (g/Z + l ≤ (g + l)/Z)",
    problem="PAIR, G = 8; p = .05, 64 groups a batch; generation g and learning l a group.",
    formula="P(all equal) = p^G + (1 − p)^G; progress n/(n + N₀) a step of n useful groups",
)
def b_42() -> Outcome:
    success = (0.05, 0.1, 0.5)
    kept = [acceptance(p) for p in success]
    z = kept[0]
    settings = ((8, 1.0, 0.0), (64, 0.5, 0.5), (640, 0.1, 0.9), (640, 1.0, 0.0))
    gains = [refill_gain(z, 64, n, g, learn) for n, g, learn in settings]
    step = 0.9 / z + 0.1
    dearer = max(g / z + (1 - g) - 1 / z for g in (0.1, 0.5, 0.9, 1.0))
    degenerate = PLAIN(_group([1.0] * 8)).own.abs().max()
    stages = differing_stages(get("dapo", length=20_480.0), get("grpo"))
    return Outcome(
        figures=[
            zero("coefficient in a group of equal rewards", degenerate),
            *series(
                "P(all equal), p = {}", success, [1 - k for k in kept], "0.6634, 0.4305, 0.0078"
            ),
            *series(
                "groups per accepted one, p = {}",
                success,
                [1 / k for k in kept],
                "2.9711, 1.7558, 1.0079",
            ),
            *series(
                "progress ratio, (N₀, g, l) = {}", settings, gains, "0.410, 1.000, 2.332, 0.940"
            ),
            exact("step time at g = .9, ratio", step, "2.774"),
            counted("stages in which dapo differs from grpo", stages, 4),
        ],
        stands=float(degenerate) == 0 and max(gains) > 1 and dearer <= 0,
        limited=min(gains) < 1,
    )


def _group(rewards: list[float]) -> Batch:
    return Batch.from_rows(
        rewards, "a" * len(rewards), mask=[[1]] * len(rewards), logp=[[-0.7]] * len(rewards)
    )


def _slope(estimator: Estimator, p: float) -> float:
    return float(moments(estimator, pair(p), 8).mean[0, 0, 0])


@claim(
    "B-43",
    section=SECTION,
    statement="With groups drawn independently, equal weights and rejected groups that would have "
    "added nothing, filtering changes the length of the update only.",
    problem="PAIR(.05 .3 .6 .9), prompts drawn uniformly, G = 8.",
    formula="E[ĝ | accepted]/E[ĝ] of each prompt = 1/P(accept)",
)
def b_43() -> Outcome:
    success = (0.05, 0.3, 0.6, 0.9)
    kept = [acceptance(p) for p in success]
    mean = sum(kept) / len(kept)
    factors = {}
    for name, advantage in (("mean", PLAIN.advantage), ("std", use(group_std))):
        refilled = replace(REFILL, advantage=advantage)
        plain = replace(PLAIN, advantage=advantage)
        for p, z in zip(success, kept, strict=True):
            factors[f"group {name}, p = {p}"] = _slope(refilled, p) * z / mean / _slope(plain, p)
    spread = max(factors.values()) - min(factors.values())
    return Outcome(
        figures=[
            *(exact(f"factor, {name}", f, "1.412955") for name, f in factors.items()),
            zero(
                "distance of the factors from 1/P(accept)",
                factors["group mean, p = 0.05"] * mean - 1,
            ),
        ],
        stands=spread < 1e-10,
    )


def _by_tokens(estimator: Estimator, share: float) -> float:
    """Hard over easy part of a token-mean update of four groups, a share of them hard.

    Lengths in hundreds of tokens: the unit leaves the ratio as it is.
    """
    entry = replace(estimator, aggregation=use(token_mean))
    hard = easy = 0.0
    for n in range(5):
        problem = pair(*[0.05] * n, *[0.5] * (4 - n))
        lengths = torch.tensor([10] * n + [1] * (4 - n)).unsqueeze(1).expand(4, 2)
        mean = moments(entry, replace(problem, lengths=lengths), 8).mean[:, 0, 0]
        chance = math.comb(4, n) * share**n * (1 - share) ** (4 - n)
        hard += chance * float(mean[:n].sum())
        easy += chance * float(mean[n:].sum())
    return hard / easy


def _penalized(p: float, reference: float, admission: Estimator) -> float:
    """Mean update of a prompt with half of KL(π‖ref) in the loss, on responses that are kept."""
    problem = pair(p)
    other = torch.tensor([reference, 1 - reference], dtype=torch.float64).log()
    entry = replace(admission, penalties=(use(loss_k2, coefficient=0.5),))
    edit: Edit = recorded(problem, other, "reference_logp")
    return float(edited(entry, problem, edit, 8, every_multiset(problem, 8)).mean[0, 0, 0])


def only_accepted(batch: Batch, index: Tensor) -> Batch:
    """Degenerate groups are absent, so that denominators count the accepted ones."""
    return replace(batch, present=zero_variance(batch.rewards, batch.get("present")))


@claim(
    "B-44",
    section=SECTION,
    statement="With a count of tokens below the line, or another term in the loss, that need not "
    "be so any more.",
    note="Each prompt exactly once, averaged over those admitted, breaks it as well: "
    "draw prompts independently, or keep the denominator. The KL factors take the KL of the "
    "whole distribution at each admitted prompt; a penalty on the admitted responses themselves "
    "gives the second pair.",
    problem="PAIR(.05 .5), G = 8. Token mean over 4 groups of lengths 1,000 (hard) and 100; "
    "KL(π‖ref) with β = .5, ref (.025 .35), on admitted groups; every prompt exactly once a batch, "
    "mean over the admitted.",
    formula="hard/easy of the two prompts' updates and the factor of each, before → after "
    "filtering",
)
def b_44() -> Outcome:
    success, reference = (0.05, 0.5), (0.025, 0.35)
    kept = [acceptance(p) for p in success]
    share = kept[0] / sum(kept)
    before, after = _by_tokens(PLAIN, 0.5), _by_tokens(REFILL, share)
    slopes = [p * (1 - p) for p in success]

    lift = [2 * z / sum(kept) for z in kept]
    plain = [_slope(PLAIN, p) for p in success]
    whole = [_penalized(p, r, PLAIN) for p, r in zip(success, reference, strict=True)]
    pull = [w - g for w, g in zip(whole, plain, strict=True)]
    refilled = [_slope(REFILL, p) for p in success]
    filtered = [f * (g + k) for f, g, k in zip(lift, refilled, pull, strict=True)]
    sampled = [
        f * _penalized(p, r, REFILL) for f, p, r in zip(lift, success, reference, strict=True)
    ]
    factors = [b / a for a, b in zip(whole, filtered, strict=True)]
    drawn = [b / a for a, b in zip(whole, sampled, strict=True)]
    turned = cosine(torch.tensor(whole), torch.tensor(filtered))

    both = pair(*success)
    once = edited(PLAIN, both, only_accepted, 8, every_multiset(both, 8)).mean[:, 0, 0]
    each = moments(PLAIN, both, 8).mean[:, 0, 0]
    bent = cosine(each, once)
    return Outcome(
        figures=[
            exact("hard/easy, true gradient", slopes[0] / slopes[1], "0.1900"),
            *series(
                "hard/easy, token mean, {}", ("before", "after"), (before, after), "0.0980, 0.0745"
            ),
            *series("factor with KL, p = {}", success, factors, "2.2017, 1.5116"),
            exact("cosine with KL", turned, "0.99714"),
            *series("factor, KL on the responses, p = {}", success, drawn, "1.5316, 1.5116"),
            *series("factor, once each, p = {}", success, once / each, "1.0078, 1.6634"),
            exact("cosine, once each", bent, "0.99733"),
        ],
        stands=abs(after / before - 1) > 0.01 and max(turned, bent) < 1 - 1e-4,
    )


LIMITS = (1.0, 2.0, 4.0)


def finished(limit: float) -> tuple[float, float]:
    """Share of responses within the limit: easy task of mean time 1, hard one of mean 3."""
    return -math.expm1(-limit), -math.expm1(-limit / 3)


def marked(batch: Batch, index: Tensor) -> Batch:
    """Responses of length 3 count as cut."""
    return replace(batch, truncated=batch.lengths == 3)


def _present(*pattern: bool) -> Edit:
    """Members of a group that arrived, whatever they hold."""

    def edit(batch: Batch, index: Tensor) -> Batch:
        return replace(batch, present=torch.tensor(pattern).expand_as(batch.rewards))

    return edit


def _kept_only(problem: Problem) -> tuple[Tensor, float, float]:
    """Mean update, drift and mass where length-3 responses are dropped, per kept response."""
    entry = replace(get("reinforce"), admission=(use(overlong),))
    kept = float((response_mass(problem)[0] * (problem.lengths < 3)).sum())
    flat = rewarded(problem, torch.ones_like(problem.rewards))
    update = edited(entry, problem, marked).mean / kept
    return update, float(edited(entry, flat, marked).mean.norm()) / kept, kept


@claim(
    "B-45",
    section=SECTION,
    statement="Dropping slow responses is a selection: easy tasks weigh more and useful gradient "
    "is thrown away.",
    note="None if the time depends on neither task nor response.",
    problem="Two tasks, success .8 and .3, exponential times of mean 1 and 3, limit τ = 1, 2, 4; "
    "TREE without its length-3 responses; TREE, G = 2, with members missing at random.",
    formula="share and reward among the kept; cosine and drift of E[ĝ | kept]",
)
def b_45() -> Outcome:
    shares, rewards = [], []
    for limit in LIMITS:
        easy, hard = finished(limit)
        shares.append(hard / (easy + hard))
        rewards.append((0.8 * easy + 0.3 * hard) / (easy + hard))
    problem = fresh_tree()
    update, drift, kept = _kept_only(problem)
    gradient = objective(problem).gradient
    aligned = cosine(update, gradient)
    patterns = ((True, True), (True, False), (False, True))
    random = max(
        judge(edited(alone("reinforce"), problem, _present(*p), 2), problem)["relative_bias"]
        for p in patterns
    )
    return Outcome(
        figures=[
            *series("hard among the kept, τ = {}", LIMITS, shares, "0.3096, 0.3601, 0.4286"),
            *series("reward of the kept, τ = {}", LIMITS, rewards, "0.6452, 0.6200, 0.5857"),
            exact("cosine, TREE without length 3", aligned, "0.7735"),
            exact("drift, TREE without length 3", drift, "0.4346"),
            exact("kept mass, TREE without length 3", kept, "0.5148"),
            zero("bias, random dropping", random),
        ],
        stands=max(shares) < 0.5 and min(rewards) > 0.55 and aligned < 0.99 and random < 1e-10,
    )


@claim(
    "B-46",
    section=SECTION,
    statement="Counting what timed out as failed biases the reward, unless the limit is part of "
    "the task.",
    problem="As B-45; TREE with reward 0 for length 3.",
    formula="mean reward counted; bias to ∇ of the limited objective, cosine to the original",
)
def b_46() -> Outcome:
    paid = [(0.8 * easy + 0.3 * hard) / 2 for easy, hard in map(finished, LIMITS)]
    problem = fresh_tree()
    limited = rewarded(problem, problem.rewards * (problem.lengths < 3))
    own = bias(get("reinforce"), limited)
    gradient = objective(problem).gradient
    aligned = cosine(objective(limited).gradient, gradient)
    away = relative(objective(limited).gradient - gradient, gradient)
    return Outcome(
        figures=[
            *series("mean reward, τ = {}", LIMITS, paid, "0.2954, 0.4189, 0.5031"),
            exact("mean reward without a limit", (0.8 + 0.3) / 2, "0.55"),
            zero("bias to the time-limited objective", own),
            exact("cosine to the original", aligned, "0.7735"),
        ],
        stands=max(paid) < 0.55 and own < 1e-10 and away > 0.01,
    )
