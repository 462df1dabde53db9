"""Document 002, section on limiting unstable updates."""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from torch import Tensor

from windage.analysis.claims.claim import Outcome, claim, equal, exact, series, zero
from windage.analysis.claims.measures import (
    alone,
    corrected,
    figures,
    largest_weight,
    mean_reward,
    moments,
    path,
    response_update,
)
from windage.analysis.claims.problems import (
    arms,
    fresh_tree,
    octet,
    response_mass,
    rewarded,
    tree,
)
from windage.estimators.aggregation import sequence_mean, token_sum
from windage.estimators.batch import Batch, log_ratio
from windage.estimators.catalogue import get
from windage.estimators.correction import geometric, ratio, taper, token, trajectory
from windage.estimators.estimator import Estimator, coefficients, surrogate
from windage.estimators.member import Member, use
from windage.toy.exact.walk import Walk, conditional, pull_back
from windage.toy.objective import objective
from windage.toy.problems import Problem

SECTION = "Limiting unstable updates"
DRIFTS = (0.3, 0.6, 1.0)


def _lost_to_cap(problem: Problem, baseline: float, cap: float) -> Tensor:
    """E_μ[(w − C)+ A S]."""
    policy, sampler = response_mass(problem)
    above = (policy / sampler - cap).clamp(min=0)
    lost = rewarded(problem, above * (problem.rewards - baseline))
    return moments(get("reinforce"), lost).mean


@claim(
    "B-26",
    section=SECTION,
    statement="A cap on the weight buys less variance with bias.",
    problem="TREE, one response, baseline E_μR; OCTET(.3, .6, 1) capped at 2.",
    formula="E ĝ − ∇J = −E_μ[(w − C)₊ A S]",
)
def b_26() -> Outcome:
    problem, caps = tree(), (1.0, 1.5, 2.0, 4.0, 8.0)
    b, gradient = mean_reward(problem), objective(problem).gradient
    capped = {c: figures(alone("sequence_tis", b, cap=c), problem) for c in caps}
    identity = max(
        float(
            (
                moments(alone("sequence_tis", b, cap=c), problem).mean
                - gradient
                + _lost_to_cap(problem, b, c)
            ).norm()
        )
        for c in caps
    )
    bias = [f["relative_bias"] for f in capped.values()]
    noise = [f["variance"] for f in capped.values()]
    tokens = [figures(alone("token_tis", b, cap=c), problem)["relative_bias"] for c in (1.0, 2.0)]
    octets = [octet(a) for a in DRIFTS]
    bases = [mean_reward(p) for p in octets]
    short = [
        figures(alone("sequence_tis", m, cap=2.0), p) for p, m in zip(octets, bases, strict=True)
    ]
    free = [
        figures(alone("trajectory_is", m), p)["variance"]
        for p, m in zip(octets, bases, strict=True)
    ]
    spread = [f["variance"] for f in short]
    return Outcome(
        figures=[
            zero("largest distance from −E_μ[(w − C)₊ A S]", identity),
            *series("bias, C = {}", caps[:4], bias[:4], "0.2813, 0.2466, 0.2141, 0.1080"),
            zero("bias, C = 8", bias[4]),
            *series("var, C = {}", caps, noise, "0.0557, 0.0661, 0.0799, 0.1583, 0.2700"),
            *series("bias, token cap {}", (1, 2), tokens, "0.3478, 0.3572"),
            *series(
                "bias, OCTET({})",
                DRIFTS,
                [f["relative_bias"] for f in short],
                "0.1145, 0.3972, 0.6690",
            ),
            *series("var, OCTET({})", DRIFTS, spread, "0.962, 0.810, 0.531"),
            *series("var uncapped, OCTET({})", DRIFTS, free, "1.163, 3.104, 29.713"),
        ],
        stands=bias == sorted(bias, reverse=True)
        and noise == sorted(noise)
        and all(s < f for s, f in zip(spread, free, strict=True)),
    )


LOGITS = torch.tensor([0.3, -0.2, 0.1], dtype=torch.float64)


def _drawn(logp: Tensor, r: float, advantage: float) -> Batch:
    """One response of one token, drawn by a sampler at ratio r."""
    return Batch(
        rewards=torch.tensor([[advantage]], dtype=torch.float64),
        mask=torch.ones(1, 1, 1, dtype=torch.bool),
        logp=logp,
        behavior_logp=logp.detach() - math.log(r),
    )


def coefficient(estimator: Estimator, r: float, advantage: float, arm: int = 0) -> float:
    """What autograd puts on A times the score at ratio r, through the estimator's surrogate."""
    logits = LOGITS.clone().requires_grad_()
    logp = logits.log_softmax(-1)[arm].view(1, 1, 1)
    loss = surrogate(coefficients(estimator, _drawn(logp, r, advantage)).own, logp)
    (gradient,) = torch.autograd.grad(loss, logits)
    return _along(-gradient, advantage, arm)


def _along(ascent: Tensor, advantage: float, arm: int) -> float:
    score = torch.nn.functional.one_hot(torch.tensor(arm), 3) - LOGITS.softmax(-1)
    return float((ascent @ score) / (advantage * score @ score))


def attached(estimator: Estimator, r: float, advantage: float, arm: int = 0) -> float:
    """The same where the weight keeps its gradient, which the surrogate never lets it."""
    logits = LOGITS.clone().requires_grad_()
    logp = logits.log_softmax(-1)[arm].view(1, 1, 1)
    batch = _drawn(logp, r, advantage)
    live = log_ratio(logp, batch.get("behavior_logp"), batch.mask)
    weight = estimator.corrections[0].weights(live, batch.mask, batch.rewards.unsqueeze(-1))
    (gradient,) = torch.autograd.grad((weight * advantage * logp).sum(), logits)
    return _along(gradient, advantage, arm)


@claim(
    "B-27",
    section=SECTION,
    statement="CISPO caps a weight that carries no gradient: a token at the cap still counts, and "
    "small ratios meet no floor.",
    problem="Three arms, z = (.3 −.2 .1), A = ±1, the first arm at ratio r.",
    formula="coefficient of A s: min(r, 2)",
)
def b_27() -> Outcome:
    entry = alone("cispo", cap=2.0)
    ppo = alone("grpo")
    floored = corrected("floored", token, taper, a_pos=0.8, b_pos=2.0, a_neg=0.8, b_neg=2.0)
    ratios, signs = (0.1, 0.79, 1.0, 1.9, 2.5, 6.0), (1.0, -1.0)
    found = {(r, a): coefficient(entry, r, a) for r in ratios for a in signs}
    worst = max(abs(c - min(r, 2.0)) for (r, _), c in found.items())
    loose = attached(entry, 1.0, 1.0)
    above, below = coefficient(ppo, 6.0, 1.0), coefficient(ppo, 0.1, -1.0)
    return Outcome(
        figures=[
            zero("largest distance from min(r, 2)", worst),
            equal("r = 6, A > 0", found[6.0, 1.0], 2.0),
            zero("r = 6, A > 0 under PPO's clip", above),
            equal("r = .1, A < 0", found[0.1, -1.0], 0.1),
            zero("r = .1, A < 0 under PPO's clip", below),
            equal("r = .1, A < 0 with a floor of .8", coefficient(floored, 0.1, -1.0), 0.8),
            equal("r = 1", found[1.0, 1.0], 1.0),
            exact("r = 1, weight not detached", loose, "0.1141"),
        ],
        stands=worst < 1e-10 and above == below == 0 and abs(loose - found[1.0, 1.0]) > 0.1,
    )


@claim(
    "B-28",
    section=SECTION,
    statement="PPO's clip at 20 % removes the gradient of a good token above ratio 1.2 and of a "
    "bad one below 0.8, and no other; inside, GRPO's loss carries the ratio of the token.",
    problem="Three arms as in B-27, ε = .2.",
    formula="coefficient of A s: r, or 0 where A > 0 and r > 1.2 or A < 0 and r < 0.8",
)
def b_28() -> Outcome:
    entry = alone("grpo", clip_low=0.2, clip_high=0.2)
    ratios = (0.1, 0.79, 0.81, 1.0, 1.19, 1.21, 1.9, 6.0)
    good = {r: coefficient(entry, r, 1.0) for r in ratios}
    bad = {r: coefficient(entry, r, -1.0) for r in ratios}
    kept = [(r, good[r]) for r in ratios if r < 1.2] + [(r, bad[r]) for r in ratios if r > 0.8]
    cut = [good[r] for r in ratios if r > 1.2] + [bad[r] for r in ratios if r < 0.8]
    worst = max(abs(r - c) for r, c in kept)
    return Outcome(
        figures=[
            zero("largest distance from r where the gradient stays", worst),
            zero("largest coefficient where it goes", max(map(abs, cut))),
            equal("A < 0, r = 6", bad[6.0], 6.0),
        ],
        stands=worst < 1e-10 and not any(cut),
    )


@claim(
    "B-29",
    section=SECTION,
    statement="The clip does not bound how far the policy moves.",
    note="The ratio's limit is (1 − .8·.95)/.05 = 4.8 plus the overshoot of the last step.",
    problem="20 arms of 0.05, A = (1, −1/19, ...), clipped expected updates of 0.1; one step of 20 "
    "on p = (.2 .4 .4), A = (1 −1 0).",
    formula="π(arm 0)/μ(arm 0) under repeated clipped updates, ε = .2",
)
def b_29() -> Outcome:
    problem = arms([0.05] * 20, [1.0] + [-1 / 19] * 19)
    steps, early = (100, 1000, 10_000), range(1, 100)
    reached = path(
        response_update(alone("grpo"), problem),
        problem.logits,
        lambda z: problem.behavior_logp,
        at=(*early, *steps),
        rate=0.1,
    )
    ratios = [float(z.softmax(-1)[0, 0, 0] / 0.05) for z in reached]
    first = next(step for step, r in zip(early, ratios, strict=False) if r > 1.2)
    later = ratios[len(early) :]
    three = arms((0.2, 0.4, 0.4), (1.0, -1.0, 0.0))
    update = moments(alone("grpo"), three).mean
    leap = float((three.logits + 20 * update).softmax(-1)[0, 0, 0] / 0.2)
    return Outcome(
        figures=[
            equal("first step past 1.2", first, 34),
            *series("ratio after {} steps", steps, later, "1.2255, 1.6640, 4.8016"),
            exact("ratio after one step of 20", leap, "4.623"),
        ],
        stands=min(later[-1], leap) > 1.2 * 1.2,
    )


def _outside_band(problem: Problem, baseline: float, low: float, high: float) -> Tensor:
    """E_μ[ρ 1{ρ outside the band} A s]."""
    walk = Walk(problem)
    weight = walk.log_ratio.exp()
    dropped = weight * ((weight < low) | (weight > high))
    value = conditional(walk, (problem.rewards - baseline).unsqueeze(0))[0][0]
    return pull_back(walk.flow * dropped * value, walk.probability)


@claim(
    "B-30",
    section=SECTION,
    statement="IcePop lets go of tokens outside its band: no extreme weights, but what they said "
    "is lost too and the update is biased.",
    problem="TREE, one response, baseline E_μR, sum over tokens; bands [.5, 5], [.5, 2], [.8, "
    "1.25].",
    formula="E ĝ = token ratio's − E_μ[ρ 1{outside} A s]",
)
def b_30() -> Outcome:
    problem, bands = tree(), ((0.5, 5.0), (0.5, 2.0), (0.8, 1.25))
    b = mean_reward(problem)
    uncut = moments(alone("token_is", b), problem).mean
    found, apart, largest = [], [], []
    for low, high in bands:
        entry = replace(alone("icepop", b, low=low, high=high), aggregation=use(token_sum))
        mean = moments(entry, problem).mean
        apart.append(float((mean - uncut + _outside_band(problem, b, low, high)).norm()))
        found.append(figures(entry, problem))
        largest.append(largest_weight(entry, problem) / high)
    bias, noise = ([f[n] for f in found] for n in ("relative_bias", "variance"))
    return Outcome(
        figures=[
            zero("largest distance from the identity", max(apart)),
            *series("bias, band {}", bands, bias, "0.3490, 0.4364, 0.4552"),
            *series("var, band {}", bands, noise, "0.1007, 0.0757, 0.0387"),
            equal("bands that every coefficient stays in", sum(w <= 1 for w in largest), 3),
        ],
        stands=bias == sorted(bias) and noise == sorted(noise, reverse=True) and max(largest) <= 1,
    )


def _noise(reach: Member, horizon: int, sigma: float) -> float:
    """Standard deviation of the first token's log-weight when each log-ratio has its own noise."""
    everywhere = torch.ones(horizon, dtype=torch.bool)
    rows = reach(torch.eye(horizon, dtype=torch.float64), everywhere.expand(horizon, -1))
    return sigma * float(rows[:, 0].norm())


@claim(
    "B-31",
    section=SECTION,
    statement="The geometric mean of GSPO varies far less than the product of the ratios.",
    problem="IID(400), where a token's log-ratio has the standard deviation ln 1.5 / 2; "
    "independent noise of 0.5 on each log-ratio (a stand-in for routing flips), T = 256.",
    formula="std of Σ x_t is σ√T, of the mean σ/√T",
)
def b_31() -> Outcome:
    per_token = math.log(1.2 / 0.8) / 2
    product, mean = (_noise(use(reach), 400, per_token) for reach in (trajectory, geometric))
    flips = [_noise(use(reach), 256, 0.5) for reach in (token, trajectory, geometric)]
    return Outcome(
        figures=[
            exact("std of ln w", product, "4.0547"),
            exact("std of (1/T) ln w", mean, "0.010137"),
            *(
                equal(f"std under noise, {name}", value, expected)
                for name, value, expected in zip(
                    ("token", "product", "geometric"), flips, (0.5, 8.0, 0.03125), strict=True
                )
            ),
        ],
        stands=mean < product / 100 and flips[2] < flips[0] < flips[1],
    )


@claim(
    "B-32",
    section=SECTION,
    statement="GSPO does not correct the trajectory, and its factor 1/T stays even on-policy.",
    note="Harmless where all lengths are equal.",
    problem="TREE, one response, baseline E R; sampled from itself and stale (no clip); OCTET "
    "sampled from itself.",
    formula="on-policy E ĝ = E[A S / T]",
)
def b_32() -> Outcome:
    fresh, stale = fresh_tree(), tree()
    entry = alone("gspo", mean_reward(fresh))
    on = figures(entry, fresh)
    free = corrected("geometric", geometric, ratio, mean_reward(stale))
    off = figures(replace(free, aggregation=use(sequence_mean)), stale)["relative_bias_rescaled"]
    by_length = rewarded(fresh, (fresh.rewards - mean_reward(fresh)) / fresh.lengths)
    identity = moments(entry, fresh).mean - moments(get("reinforce"), by_length).mean
    fixed = octet(0.6).on_policy()
    gradient = objective(fixed).gradient
    equal_lengths = moments(alone("gspo"), fixed).mean - gradient / 8
    return Outcome(
        figures=[
            exact("cosine, on-policy", on["cosine"], "0.9391"),
            exact("bias after rescaling, on-policy", on["relative_bias_rescaled"], "0.3658"),
            exact("drift, on-policy", on["drift"], "0.0878"),
            zero("distance from E[A S / T]", identity.norm()),
            exact("bias after rescaling, stale", off, "0.4603"),
            zero("distance from ∇J/8 at fixed length", equal_lengths.norm() / gradient.norm()),
        ],
        stands=on["relative_bias_rescaled"] > 0.01 and off > 0.01,
    )


def averaged(tokens: int, log_ratio: float, length: int) -> Tensor:
    """Geometric log-weight of a response in which some tokens have one log-ratio, the rest none."""
    ratios = torch.zeros(length, dtype=torch.float64)
    ratios[:tokens] = log_ratio
    return geometric(ratios, torch.ones(length, dtype=torch.bool))[0]


def _longest_seen(entry: Estimator, start: int) -> int:
    """The longest response whose five bad tokens still trigger the entry's clip."""
    length = start
    while float(entry.corrections[0].map(averaged(5, 2.0, length + 1), torch.ones(()))) == 0:
        length += 1
    return length


@claim(
    "B-33",
    section=SECTION,
    statement="Averaged over a long response, a few tokens that disagree badly disappear in the "
    "geometric mean.",
    verdict="holds only if",
    condition="mδ/T is small against the range allowed: at the published, narrow one the stretch "
    "is still clipped at usual lengths",
    problem="m = 5 tokens of log-ratio δ = 2 in a response of T tokens.",
    formula="weight = exp(mδ/T); the clip sees it while mδ/T > ln(1 + clip_high)",
)
def b_33() -> Outcome:
    lengths = (10, 50, 1000, 25_000)
    weights = [float(averaged(5, 2.0, t).exp()) for t in lengths]
    wide = _longest_seen(get("gspo", clip_high=0.2), 50)
    narrow = _longest_seen(get("gspo"), 25_000)
    return Outcome(
        figures=[
            *series("weight, T = {}", lengths, weights, "2.7183, 1.2214, 1.0101, 1.0004"),
            equal("longest response seen by a bound of 1.2", wide, 54),
            equal("longest response seen by a bound of 1 + 4e-4", narrow, 25_004),
        ],
        stands=wide < 100,
        limited=narrow > 10_000,
    )
