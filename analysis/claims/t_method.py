"""Document 000, section 3: the method."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from windage.analysis.claims.claim import Outcome, band, claim, equal, exact, series, zero
from windage.analysis.claims.learned import banded, baseline_for, course, numbers, often
from windage.analysis.claims.measures import central_differences, moments, relative
from windage.analysis.claims.one_step import (
    BEST,
    FLOOR,
    GOOD,
    IS,
    NAIVE,
    POSITIVES,
    SIX,
    TIS,
    TOPR,
    UNBOUNDED,
    Z6,
    entropy,
    lowered,
)
from windage.analysis.claims.problems import arms, six
from windage.analysis.claims.t_naive import NEGATIVE, START, steps, until_half
from windage.estimators.batch import Batch
from windage.estimators.catalogue import get
from windage.estimators.correction import tapered
from windage.estimators.estimator import Estimator, coefficients, surrogate
from windage.toy.learning import marks, path
from windage.toy.problems import Problem

SECTION = "Section 3: the method"


@claim(
    "T-08",
    section=SECTION,
    statement="A lower limit above zero for the ratios of positives keeps a least speed of "
    "learning; truncated ratios without it crawl.",
    verdict="holds only if",
    condition="μ₊ is well above π: at μ₊ = π₀ = .001 topr is slower than importance sampling",
    problem="as T-07 with μ₊ = .1 and π₀ = 1e-2, 1e-3, 1e-4, 1e-5.",
    formula="steps of z ← z + E_μ[w R ∇log π] until π₊ > ½",
)
def t_08() -> Outcome:
    start = torch.tensor([1e-2, 1e-3, 1e-4, 1e-5], dtype=torch.float64)
    good = torch.full_like(start, 0.1)
    expected = {
        "IS": (IS, (29, 256, 2_509, 25_011)),
        "TIS": (TIS, (31, 270, 2_640, 26_327)),
        "positives only": (POSITIVES, (28, 40, 51, 63)),
        "topr": (TOPR, (15, 26, 37, 49)),
    }
    taken = {n: until_half(e, good, start, 30_000) for n, (e, _) in expected.items()}
    one = torch.tensor([1e-3], dtype=torch.float64)
    (topr_low,), (is_low,) = (until_half(e, one, one, 1_000) for e in (TOPR, IS))
    return Outcome(
        figures=[
            *(
                steps(f"{name}, π₀ = {pi:g}", n, want)
                for name, (_, wants) in expected.items()
                for pi, n, want in zip(start.tolist(), taken[name], wants, strict=True)
            ),
            steps("topr, μ₊ = π₀ = .001", topr_low, 355),
            steps("IS, μ₊ = π₀ = .001", is_low, 256),
        ],
        stands=taken["topr"][-1] < 100 and min(taken["IS"][-1], taken["TIS"][-1]) > 10_000,
        limited=topr_low > is_low,
    )


FAMILY: tuple[tuple[str, Estimator], ...] = (
    ("naive", NAIVE),
    ("positives only", POSITIVES),
    ("importance sampling", UNBOUNDED),
    ("TIS", TIS),
    ("topr", TOPR),
    ("a = (.5, .2), b = (1.5, 1.2)", get("topr", a_pos=0.5, b_pos=1.5, a_neg=0.2, b_neg=1.2)),
)


def _touch() -> tuple[float, float, float]:
    """Of rho minus ratio on a grid: the largest, its size between the limits, the least outside."""
    ratio = torch.linspace(0.001, 3.0, 2_001, dtype=torch.float64)
    low, high = 0.5, 1.5
    gap = tapered(ratio.log(), ratio.new_ones(1), a_pos=low, b_pos=high) - ratio
    inside = (ratio >= low) & (ratio <= high)
    return float(gap.max()), float(gap[inside].abs().max()), float(-gap[~inside].max())


def _split() -> float:
    """Update of topr minus fine-tuning on positives plus truncated sampling on negatives."""
    whole = SIX.gradient(TOPR, Z6)
    tuned = SIX.rewarded(SIX.rewards * GOOD).gradient(NAIVE, Z6)
    truncated = SIX.rewarded(SIX.rewards * ~GOOD).gradient(TIS, Z6)
    return relative(whole - tuned - truncated, whole)


def _coefficients() -> tuple[float, float]:
    """Coefficient on A times the score of one negative, with and without the stop-gradient."""
    problem = arms(
        [float(p) for p in torch.tensor([0.2, -0.1, 0.4]).double().softmax(-1)],
        (0.0, -1.0, 0.0),
        (0.5, 0.3, 0.2),
    )
    logp = problem.logp[0, 0, 1].view(1, 1, 1).clone().requires_grad_()
    batch = Batch(
        rewards=torch.tensor([[-1.0]], dtype=torch.float64),
        mask=torch.ones((1, 1, 1), dtype=torch.bool),
        logp=logp,
        behavior_logp=problem.behavior_logp[0, 0, 1].view(1, 1, 1),
    )
    (held,) = torch.autograd.grad(surrogate(coefficients(TOPR, batch).own, logp), logp)
    ratio = (logp - batch.get("behavior_logp")).exp().clamp(max=1.0)
    (free,) = torch.autograd.grad(-(batch.rewards * ratio * logp).sum(), logp)
    return float(held), float(free)


@claim(
    "T-09",
    section=SECTION,
    statement="The taper with two limits defines a family; between its limits it is the ratio, "
    "outside it stays below; the canonical update fine-tunes on positives and truncates the "
    "ratios of negatives.",
    problem="SIX at z₆; three arms z = (.2 −.1 .4), μ = (.5 .3 .2), the second drawn.",
    formula="∇ Σ μ R ρ(r, a, b) = Σ μ [r]ₐᵇ R ∇log π; ρ ≤ r",
)
def t_09() -> Outcome:
    differences = []
    for _, estimator in FAMILY:

        def value(z: Tensor, estimator: Estimator = estimator) -> Tensor:
            return SIX.value(estimator, z)

        numeric = central_differences(value, Z6)
        differences.append(float((numeric - SIX.gradient(estimator, Z6)).abs().max()))
    above, inside, outside = _touch()
    held, free = _coefficients()
    split = _split()
    return Outcome(
        figures=[
            *(
                band(f"finite differences, {name}", found, 0, 1e-8, kind="exact")
                for (name, _), found in zip(FAMILY, differences, strict=True)
            ),
            band("largest ρ − r on 2,001 ratios", above, None, 0.0, kind="exact"),
            zero("largest |ρ − r| between the limits", inside),
            band("least r − ρ outside them", outside, 1e-9, None, kind="exact"),
            zero("topr minus its two halves", split),
            exact("coefficient with the stop-gradient", held, "0.8336"),
            exact("coefficient without it", free, "-0.3217"),
        ],
        stands=max(differences) < 1e-8 and above <= 0 < outside and split < 1e-12,
    )


@claim(
    "T-10",
    section=SECTION,
    statement="With a lower limit of zero a negative's pull fades; any limit above zero can "
    "degenerate, unless no reward is negative.",
    kind="simulated",
    problem="SIX with one negative's logit lowered; PROBE(.02), a⁻ = .1, 1,000 passes.",
    formula="Σ μ R ρ(r, a, b) and its derivative by the negative's logit",
)
def t_10(*, seed: int) -> Outcome:
    logits = (math.log(0.01), math.log(1e-8))
    push = [float(SIX.gradient(TOPR, lowered(START, NEGATIVE, z))[NEGATIVE]) for z in logits]
    places = [lowered(START, NEGATIVE, z) for z in (-10.0, -100.0, -1000.0)]
    values = [float(SIX.value(FLOOR, z)) for z in places]
    rise = (values[2] - values[1]) / 900
    paid = SIX.rewarded(SIX.rewards.clamp(min=0))
    kept = float(paid.value(FLOOR, places[-1]))
    floor, topr = course("topr with a- = 0.1", seed=seed), course("topr", seed=seed)
    fell = floor.train() < floor.train(200)
    ratio = float(floor.invalid().mean() / topr.invalid().mean())
    return Outcome(
        figures=[
            exact("push at logit ln .01, a⁻ = 0", push[0], "-0.0154"),
            band("push at logit ln 1e-8, a⁻ = 0", push[1], -1.58e-8, -1.56e-8, kind="exact"),
            *series(
                "objective at {}, a⁻ = .1", (-10, -100, -1000), values, "0.4153, 2.2153, 20.215"
            ),
            exact("the same at -1000 with no negative reward", kept, "0.6483"),
            often("replicates that fall after 200 passes, a⁻ = .1", fell, 6),
            banded("training right after 200 passes", floor.train(200), 0.80, 0.90, 0.85),
            banded("its fall by 1,000 passes", floor.train(200) - floor.train(), 0.03, 0.10, 0.06),
            banded("test invalid after 1,000 passes, a⁻ = .1", floor.invalid(), 0.07, 0.25, 0.14),
            banded("the same, topr", topr.invalid(), 0.02, 0.07, 0.04),
            band("ratio of the two", ratio, 2.0, None),
        ],
        stands=abs(push[1]) < 1e-6 and rise > 1e-3 and kept < 1 and int(fell.sum()) >= 6,
        seeds=numbers(seed),
    )


def _at(logits: Tensor) -> Problem:
    """SIX at other logits."""
    return replace(six(), logits=logits.view(1, 1, -1))


def _second_moment(logits: Tensor) -> float:
    """E of the squared length of importance sampling's terms from negatives."""
    probability = logits.softmax(-1)
    ratio = probability / SIX.mass
    score = 1 - 2 * probability + probability.square().sum()
    return float((SIX.mass * ratio.square() * score)[~GOOD].sum())


def _largest(logits: Tensor, who: Tensor) -> float:
    return float((logits.softmax(-1) / SIX.mass)[who].max())


@claim(
    "T-11",
    section=SECTION,
    statement="Upper limits keep variance down: early against large ratios of negatives, late "
    "against large ratios of positives.",
    verdict="holds only if",
    condition="training starts away from μ (the half about negatives); the half about positives "
    "holds",
    problem="SIX: importance sampling by exact steps from π = μ, and from a start with the logit "
    "of one negative raised by 1.5; late: the logits of positives raised by 3.",
    formula="largest π/μ of each class; trace Cov of one response with b⁻, b⁺ = 1 and ∞",
)
def t_11() -> Outcome:
    update = SIX.update(IS)
    near = marks(path(START, update, steps=1_000), (0, 10, 1_000))
    stale = lowered(START, NEGATIVE, float(START[NEGATIVE]) + 1.5)
    away = marks(path(stale, update, steps=10), (0, 10))
    late = torch.where(GOOD, START + 3, START)
    # The other limits are open, so that one limit alone differs.
    unlimited = {"a_pos": 0.0, "b_pos": math.inf, "a_neg": 0.0, "b_neg": math.inf}
    early_capped = get("topr", **{**unlimited, "b_neg": 1.0})
    late_capped = get("topr", **{**unlimited, "b_pos": 1.0})
    variance = [float(moments(e, _at(stale)).variance) for e in (early_capped, UNBOUNDED)]
    variance += [float(moments(e, _at(late)).variance) for e in (late_capped, UNBOUNDED)]
    first = [_largest(near[n], ~GOOD) for n in (0, 10)]
    return Outcome(
        figures=[
            exact("largest ratio of a negative from π = μ", max(first), "1.000"),
            *series(
                "second moment of the negatives' terms after {} steps",
                (0, 10),
                [_second_moment(near[n]) for n in (0, 10)],
                "0.4082, 0.0136",
            ),
            exact("largest ratio of a positive, 1,000 steps", _largest(near[1_000], GOOD), "3.319"),
            *series(
                "largest ratio of a negative from the stale start after {} steps",
                (0, 10),
                [_largest(away[n], ~GOOD) for n in (0, 10)],
                "2.642, 0.156",
            ),
            *series("variance early, b⁻ = {}", (1, "∞"), variance[:2], "0.2745, 0.5008"),
            *series("variance late, b⁺ = {}", (1, "∞"), variance[2:], "0.3085, 1.0006"),
        ],
        stands=variance[0] < variance[1] and variance[2] < variance[3],
        limited=max(first) < 1 + 1e-9,
    )


@claim(
    "T-12",
    section=SECTION,
    statement="With a⁺ = b⁺ = 1 and no negative reward the objective lies below the expected "
    "reward everywhere.",
    note="With negative rewards it is not a bound.",
    kind="simulated",
    problem="SIX with rewards (1 0 .5 .2 0 1), then its own; 2,000 policies ln μ + 1.5 N(0, 1).",
    formula="J − Σ μ R ρ(r, a, b)",
)
def t_12(*, seed: int) -> Outcome:
    rng = np.random.default_rng(seed)
    places = START + 1.5 * torch.from_numpy(rng.standard_normal((2_000, 6)))
    paid = SIX.rewarded(torch.tensor([1.0, 0.0, 0.5, 0.2, 0.0, 1.0], dtype=torch.float64))
    gap = paid.reward(places) - paid.value(TOPR, places)
    touch = float(paid.reward(START) - paid.value(TOPR, START))
    signed = SIX.reward(places) - SIX.value(TOPR, places)
    witness = lowered(START, NEGATIVE, float(START[NEGATIVE]) + 2)
    here, true = float(SIX.value(TOPR, witness)), float(SIX.reward(witness))
    return Outcome(
        figures=[
            band("least gap, rewards not negative", gap.min(), 0, None),
            zero("gap at π = μ", touch),
            band("policies in 2,000 above J, rewards of both signs", (signed < 0).sum(), 150, 320),
            band("largest excess there", -signed.min(), 0.2, None),
            exact("objective at the witness", here, "-0.4602"),
            exact("J at the witness", true, "-0.5346"),
        ],
        stands=float(gap.min()) >= 0,
        seeds=(seed,),
    )


BASELINES = (-1.0, -0.5, 0.0, 0.3, 0.6)


def positive_share(p: float, baseline: float) -> float:
    """Effective share of positives p (1 - c) / (1 + (1 - 2p) c)."""
    return p * (1 - baseline) / (1 + (1 - 2 * p) * baseline)


def _shares(estimator: Estimator, logits: Tensor) -> float:
    """Share of |coefficient| on positives at given logits, from one batch of every trajectory."""
    logp = logits.log_softmax(-1).view(1, -1, 1)
    batch = Batch(
        rewards=SIX.rewards.unsqueeze(0),
        mask=torch.ones_like(logp, dtype=torch.bool),
        logp=logp,
        behavior_logp=SIX.sampler.view(1, -1, 1),
    )
    size = SIX.mass * coefficients(estimator, batch).own.flatten().abs()
    return float(size[GOOD].sum() / size.sum())


@claim(
    "T-13",
    section=SECTION,
    statement="A baseline c sets the effective share of positives without throwing anything away; "
    "c = −1 is the same as discarding the negatives.",
    verdict="holds only if",
    condition="π = μ; once negatives are unlearned every c has an effective share near 1",
    note="c scales the step as well, by 1 + (1 − 2p) c.",
    problem="SIX, p = .53, at π = μ and along exact topr steps of 1.",
    formula="p̃ = p(1 − c)/(1 + (1 − 2p)c); c = (p − p̃)/(p + p̃ − 2pp̃)",
)
def t_13() -> Outcome:
    p = float(SIX.mass[GOOD].sum())
    shares = [_shares(TOPR.change(baseline=c), START) for c in BASELINES]
    formula = max(abs(s - positive_share(p, c)) for s, c in zip(shares, BASELINES, strict=True))
    wanted = ((0.5, 0.1), (0.5, 0.2), (0.1, 0.2), (0.1, 0.5))
    mean = [positive_share(q, 2 * q - 1) for q in (0.1, 0.53, 0.9)]
    doubled = SIX.gradient(TOPR.change(baseline=-1.0), Z6) - 2 * SIX.gradient(POSITIVES, Z6)
    later = (0, 10, 100, 1_000)
    places = marks(path(START, SIX.update(TOPR), steps=1_000), later)
    along = [_shares(TOPR, places[n]) for n in later]
    return Outcome(
        figures=[
            *series("share at c = {}", BASELINES, shares, "1.0000, 0.7718, 0.5300, 0.3778, 0.2199"),
            zero("largest distance from the formula", formula),
            *series(
                "c for p, p̃ = {}",
                wanted,
                [baseline_for(*torch.tensor(pair)) for pair in wanted],
                "0.8000, 0.6000, -0.3846, -0.8000",
            ),
            *(
                equal(f"share at c = 2p − 1, p = {q}", m, 0.5)
                for q, m in zip((0.1, 0.53, 0.9), mean, strict=True)
            ),
            zero("update at c = −1 minus twice positives only", float(doubled.norm())),
            *series("share after {} steps", later, along, "0.5300, 0.8437, 0.9804, 0.9981"),
        ],
        stands=formula < 1e-12 and float(doubled.norm()) < 1e-12,
        limited=along[-1] > 0.99,
    )


@claim(
    "T-14",
    section=SECTION,
    statement="It stays stable with no KL term at all.",
    kind="simulated",
    problem="SIX; PROBE(.02), 1,000 passes (growth of logits: T-01).",
    formula="sup Σ μ R ρ = Z₊(1 − H(μ₊)) − Σ₊ μ R ln μ, reached at μ₊",
)
def t_14(*, seed: int) -> Outcome:
    weight = SIX.mass[GOOD].sum()
    top = weight * (1 - entropy(BEST)) - (SIX.mass * START)[GOOD].sum()
    peak = torch.where(GOOD, BEST, 0.0).log().clamp(min=-700.0)
    run = course("topr", seed=seed)
    return Outcome(
        figures=[
            exact("upper bound of the objective", top, "0.866485"),
            exact("the objective at μ₊", SIX.value(TOPR, peak), "0.866485"),
            band("largest fall from the best pass, any replicate", run.fall.max(), None, 0.05),
        ],
        stands=float(run.fall.max()) <= 0.05,
        seeds=numbers(seed),
    )
