"""Document 002, sections on learning from another policy and on correcting the mismatch."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import pairwise

import numpy as np
import torch
from scipy.stats import binom
from torch import Tensor

from windage.analysis.claims.claim import Outcome, band, claim, counted, equal, exact, series, zero
from windage.analysis.claims.measures import (
    alone,
    bias,
    divergence,
    edited,
    figures,
    judge,
    mean_reward,
    moments,
    recorded,
    relative,
    shaped,
)
from windage.analysis.claims.problems import (
    cache,
    count,
    fresh_tree,
    iid,
    octet,
    response_mass,
    rewarded,
    sampled_by,
    tree,
)
from windage.estimators.advantage import group_mean, group_std
from windage.estimators.catalogue import get
from windage.estimators.member import use
from windage.toy.behavior import with_behavior
from windage.toy.exact.walk import Walk, conditional, pull_back
from windage.toy.objective import objective
from windage.toy.problems import Problem

LEARNING = "Learning from another policy"
CORRECTING = "Correcting the mismatch"
DRIFTS = (0.3, 0.6, 1.0)


def _iterates(rate: float, steps: int) -> list[Problem]:
    """TREE and its exact ascent steps, each sampled from itself."""
    history = [fresh_tree()]
    for _ in range(steps):
        now = history[-1]
        logits = now.logits + rate * objective(now).gradient
        history.append(replace(now, logits=logits).on_policy())
    return history


@claim(
    "B-18",
    section=LEARNING,
    statement="Training on responses of older weights biases the update in proportion to the lag "
    "times the step size.",
    problem="TREE after 16 exact ascent steps; the sampler is `lag` steps behind; no correction, "
    "baseline E_μR.",
    formula="‖E ĝ − ∇J‖ / (η lag)",
)
def b_18() -> Outcome:
    ratios = {}
    for rate in (0.05, 0.1, 0.2):
        history = _iterates(rate, 16)
        for lag in (1, 2, 4, 8, 16):
            problem = replace(history[16], behavior_logp=history[16 - lag].logp)
            found = moments(alone("reinforce", mean_reward(problem)), problem)
            away = float((found.mean - objective(problem).gradient).norm())
            ratios[f"η = {rate}, lag {lag}"] = away / (rate * lag)
    low, high = min(ratios.values()), max(ratios.values())
    return Outcome(
        figures=[
            band(f"bias/(η lag), {name}", r, 0.00205, 0.00235, kind="exact")
            for name, r in ratios.items()
        ],
        stands=low > 0 and high < 1.2 * low,
    )


def _mismatches(problem: Problem) -> dict[str, Problem]:
    """Samplers that differ by precision, rounding, temperature and truncation."""
    z = problem.logits[0]
    kinds = {"bfloat16": sampled_by(problem, z.bfloat16().double())}
    for step in (0.25, 0.5, 1.0):
        kinds[f"rounded to {step}"] = sampled_by(problem, (z / step).round() * step)
    for t in (0.6, 0.8, 1.2):
        kinds[f"temperature {t}"] = with_behavior(problem, "temperature", t=t)
    return kinds


@claim(
    "B-19",
    section=LEARNING,
    statement="With equal weights, number formats, kernels and sampling settings already make the "
    "sampler another policy.",
    problem="TREE; sampler with logits in bfloat16, rounded to .25, .5, 1, at temperature .6, .8, "
    "1.2, or cut to its top 2; no correction, baseline E_μR.",
    formula="KL(μ‖π) and bias; mass of π outside the support",
)
def b_19() -> Outcome:
    problem = fresh_tree()
    kinds = _mismatches(problem)
    apart = {name: divergence(p) for name, p in kinds.items()}
    bent = {name: bias(alone("reinforce", mean_reward(p)), p) for name, p in kinds.items()}
    half = kinds["bfloat16"]
    largest = (half.logp - half.behavior_logp).exp().sub(1).abs().max()
    hidden = float(objective(with_behavior(problem, "top_k", k=2)).unsupported_mass)
    return Outcome(
        figures=[
            exact("largest |ρ − 1|, bfloat16", largest, "0.00207"),
            *series(
                "KL(μ‖π), {}",
                apart,
                apart.values(),
                "8.32e-7, 0.0052, 0.0098, 0.0736, 0.1053, 0.0174, 0.0088",
            ),
            *series(
                "bias, {}",
                bent,
                bent.values(),
                "0.0012, 0.0693, 0.1506, 0.2613, 0.3517, 0.1583, 0.1204",
            ),
            exact("mass of π hidden by top-2", hidden, "0.3144"),
        ],
        stands=min(apart.values()) > 0 and min(bent.values()) > 1e-4 and hidden > 0.01,
    )


def recomputed_tokens(length: int, every: int) -> int:
    """Prefix tokens computed anew when the weights change every so many tokens of a response."""
    return sum(range(every, length, every))


@claim(
    "B-20",
    section=LEARNING,
    statement="A response continued under new weights with the old cache comes from neither "
    "version; keeping the cache saves computing the prefix again.",
    problem="CACHE; a response of 8,000 tokens with an update every 500.",
    formula="KL(true sampler ‖ model of one version); prefix tokens recomputed at each update",
)
def b_20() -> Outcome:
    found = cache()
    problem = found.shared.problem
    apart = [divergence(problem, to=logp) for logp in (found.new, found.old, found.recomputed)]
    tokens = recomputed_tokens(8000, 500)
    names = ("new model", "old model", "per-version recomputation")
    return Outcome(
        figures=[
            *series("KL from the {}", names, apart, "0.09686, 0.13648, 0.06587"),
            counted("prefix tokens recomputed", tokens, 60_000),
            counted("of them a response token", tokens / 8000, 7.5),
        ],
        stands=min(apart) > 1e-3 and tokens > 8000,
    )


def _bias_when_recorded(problem: Problem, logp: Tensor) -> float:
    """Bias of the response ratio when the samples' probabilities are taken from elsewhere."""
    return judge(edited(alone("trajectory_is"), problem, recorded(problem, logp)), problem)[
        "relative_bias"
    ]


def _cache_bias(logp: Tensor, shift: float) -> float:
    """Bias by the shared parameters of CACHE, rewards less `shift`."""
    shared = cache().shared
    problem = rewarded(shared.problem, shared.problem.rewards - shift)
    gradient = shared.project(objective(problem).gradient)
    found = edited(alone("trajectory_is"), problem, recorded(problem, logp))
    return relative(shared.project(found.mean) - gradient, gradient)


@claim(
    "B-21",
    section=LEARNING,
    statement="The probability of a token must be stored when it is drawn; computing it later "
    "gives another number.",
    problem="TREE, sampler = logits of older weights z + 0.3 cos(2 + 3v + 5n) rounded to .5; CACHE "
    "with rewards R and R − 0.5.",
    formula="bias of trajectory_is with recorded, recomputed and current probabilities",
)
def b_21() -> Outcome:
    problem = fresh_tree()
    wave = 0.3 * torch.cos(2 + 3 * count(3) + 5 * count(7).unsqueeze(1))
    older = problem.logits[0] + wave
    problem = sampled_by(problem, (older / 0.5).round() * 0.5)
    right = bias(alone("trajectory_is"), problem)
    later = _bias_when_recorded(problem, older.log_softmax(-1))
    current = _bias_when_recorded(problem, problem.logp)
    without = bias(alone("reinforce"), problem)
    made = cache()
    kept = _cache_bias(made.shared.problem.behavior_logp, 0.0)
    again = [_cache_bias(made.recomputed, shift) for shift in (0.0, 0.5)]
    return Outcome(
        figures=[
            zero("bias, recorded", right),
            exact("bias, recomputed at full precision", later, "0.3574"),
            exact("bias, computed by the current trainer", current, "0.5073"),
            zero("that, less the bias without correction", current - without),
            zero("bias, CACHE recorded", kept),
            *series("bias, CACHE recomputed, {}", ("R", "R − 0.5"), again, "1.3135, 0.2242"),
        ],
        stands=max(right, kept) < 1e-10 and min(later, current, *again) > 0.01,
    )


@claim(
    "B-22",
    section=CORRECTING,
    statement="Weighting each response by the ratio of its probabilities gives the gradient of the "
    "current policy.",
    problem="TREE sampled by the stale policy; rewards R and R − 7; leave-one-out, G = 2, 3.",
    formula="E_μ[w A S] = ∇J, w = Π ρ_t",
)
def b_22() -> Outcome:
    problem = tree()
    found = {
        "rewards R": bias(alone("trajectory_is"), problem),
        "rewards R − 7": bias(alone("trajectory_is", 7.0), problem),
        "leave-one-out, G = 2": bias(get("trajectory_is"), problem, 2),
        "leave-one-out, G = 3": bias(get("trajectory_is"), problem, 3),
    }
    return Outcome(
        figures=[zero(f"bias, {name}", value) for name, value in found.items()],
        stands=max(found.values()) < 1e-10,
    )


def _outside(problem: Problem) -> Tensor:
    """E_π[1{never drawn} R S]."""
    never = (response_mass(problem)[1] <= 0).double()
    return objective(rewarded(problem, problem.rewards * never)).gradient


@claim(
    "B-23",
    section=CORRECTING,
    statement="Three things must be right for that: the baseline, the recorded probabilities, and "
    "the support of the sampler.",
    note="The full mean costs only its factor; 0.0783 needs groups of equal rewards to get exactly "
    "0: dividing their rounding residue by its own size gives 0.0782.",
    problem="TREE. Baselines: full-group mean, group std, T/10, G = 3. Probabilities: data at "
    "temperature .8 treated as untempered. Support: top-2, top-p .7, .9.",
    formula="bias of trajectory_is; outside the support −E_π[1{never drawn} R S]",
)
def b_23() -> Outcome:
    problem, entry = tree(), get("trajectory_is")
    mean = figures(replace(entry, advantage=use(group_mean)), problem, 3)
    std = figures(replace(entry, advantage=use(group_std)), problem, 3)["relative_bias_rescaled"]
    by_length = edited(alone("trajectory_is"), problem, shaped(-problem.lengths / 10))
    looking = judge(by_length, problem)["relative_bias"]
    tempered = with_behavior(problem, "temperature", t=0.8)
    wrong = _bias_when_recorded(tempered, problem.logp)
    right = bias(alone("trajectory_is"), tempered)
    gradient = objective(problem).gradient
    cut = {
        "top-2": with_behavior(problem, "top_k", k=2),
        "top-p .7": with_behavior(problem, "top_p", p=0.7),
        "top-p .9": with_behavior(problem, "top_p", p=0.9),
    }
    missing = {n: moments(alone("trajectory_is"), p).mean - gradient for n, p in cut.items()}
    lost = {n: relative(m, gradient) for n, m in missing.items()}
    identity = max(float((missing[n] + _outside(p)).norm()) for n, p in cut.items())
    return Outcome(
        figures=[
            equal("scale, full-group mean", mean["scale"], 2 / 3),
            zero("bias after rescaling, full-group mean", mean["relative_bias_rescaled"]),
            exact("bias after rescaling, group std", std, "0.0783"),
            exact("bias, baseline T/10", looking, "0.3163"),
            exact("bias, wrong temperature", wrong, "0.5104"),
            zero("bias, right temperature", right),
            *series("bias, {}", ("top-2", "top-p .7"), list(lost.values())[:2], "0.6699, 0.6699"),
            zero("bias, top-p .9 (nothing cut)", lost["top-p .9"]),
            zero("distance from −E_π[1{outside} R S]", identity),
        ],
        stands=min(looking, wrong, lost["top-2"]) > 0.01 and max(right, lost["top-p .9"]) < 1e-10,
    )


def _ratios(horizon: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """IID(T): log-ratio of a response with k ones, and its mass under policy and sampler."""
    k = np.arange(horizon + 1)
    log_ratio = k * math.log(1.2) + (horizon - k) * math.log(0.8)
    return log_ratio, binom.pmf(k, horizon, 0.6), binom.pmf(k, horizon, 0.5)


def heaviest(horizon: int, share: float) -> float:
    """Part of the total weight that lies on the heaviest `share` of the sampler's responses."""
    _, policy, sampler = _ratios(horizon)
    above = np.concatenate([[0.0], sampler[::-1].cumsum()])
    weight = np.concatenate([[0.0], policy[::-1].cumsum()])
    return float(np.interp(share, above, weight))


def _mean_square(horizon: int) -> float:
    log_ratio, policy, _ = _ratios(horizon)
    return float((policy * np.exp(log_ratio)).sum())


def _median(horizon: int) -> float:
    log_ratio, _, sampler = _ratios(horizon)
    return float(log_ratio[np.searchsorted(sampler.cumsum(), 0.5)])


@claim(
    "B-24",
    section=CORRECTING,
    statement="The product of ratios has a variance that grows with length without limit, and few "
    "responses carry the estimate.",
    problem="IID(T), 0.04 of χ² a token; OCTET(.3, .6, 1), one response, baseline E_μR.",
    formula="E w² = 1.04^T; ESS/N = 1/E w²; weight on the heaviest 1 % of responses",
)
def b_24() -> Outcome:
    lengths = (10, 100, 200, 400)
    square = [_mean_square(t) for t in lengths]
    share = [heaviest(t, 0.01) for t in lengths]
    policy, sampler = response_mass(iid(10))
    listed = float((policy.square() / sampler).sum())
    problems = [octet(a) for a in DRIFTS]
    noise = [figures(alone("trajectory_is", mean_reward(p)), p)["variance"] for p in problems]
    return Outcome(
        figures=[
            *series("E w², T = {}", lengths, square, "1.4802, 50.505, 2,550.7, 6.506e6"),
            *(
                equal(f"E w² over 1.04^T, T = {t}", s / 1.04**t, 1.0, tolerance=1e-10)
                for t, s in zip(lengths, square, strict=True)
            ),
            equal("E w² by listing, T = 10", listed, 1.04**10),
            *series("weight on 1 %, T = {}", lengths, share, "0.0433, 0.3739, 0.6978, 0.9555"),
            exact("median ln w, T = 100", _median(100), "-2.0411"),
            exact("ESS/N, T = 100", 1 / square[1], "0.0198"),
            *series("var, OCTET({})", DRIFTS, noise, "1.163, 3.104, 29.713"),
        ],
        stands=all(b > 10 * a for a, b in pairwise(square))
        and share[-1] > 0.9
        and noise == sorted(noise),
    )


def _factored(problem: Problem, reach: str, action: str, rest: str) -> Tensor:
    """Σ d(h) a(v|h) Q(h, v) s with each factor under sampler ("μ") or policy ("π")."""
    walks = {"μ": Walk(problem), "π": Walk(problem.on_policy())}
    value = conditional(walks[rest], problem.rewards.unsqueeze(0))[0][0]
    visits = walks[reach].flow.sum(-1, keepdim=True) * walks[action].behavior * value
    return pull_back(visits, walks["π"].behavior)


RATIOS = {
    "reinforce": ("μ", "μ", "μ"),
    "token_is": ("μ", "π", "μ"),
    "prefix_is": ("π", "π", "μ"),
    "suffix_is": ("μ", "π", "π"),
    "trajectory_is": ("π", "π", "π"),
}


def _token_square(horizon: int) -> Tensor:
    """E ρ² of each token of IID(T)."""
    walk = Walk(iid(horizon))
    squared = walk.flow * (2 * walk.log_ratio).exp()
    return torch.stack([squared[:, walk.tree.level(t)].sum() for t in range(horizon)])


@claim(
    "B-25",
    section=CORRECTING,
    statement="A ratio for each token has no product to explode, but it corrects only the choice "
    "at the recorded prefix: neither how that was reached nor what came after.",
    note="Here, beside a baseline, the token ratio has no less bias than none at all.",
    problem="TREE with R, stale by a fraction e of the usual gap; IID(T).",
    formula="E ĝ = Σ d(h) a(v|h) Q(h, v) s; none (μ, μ, μ), token (μ, π, μ), prefix (π, π, μ), "
    "suffix (μ, π, π), trajectory (π, π, π)",
)
def b_25() -> Outcome:
    problem = tree()
    b = mean_reward(problem)
    square = torch.cat([_token_square(t) for t in (1, 4, 8)])
    apart = max(
        float((moments(alone(name), problem).mean - _factored(problem, *where)).norm())
        for name, where in RATIOS.items()
    )
    bent = {name: bias(alone(name), problem) for name in RATIOS}
    based = [bias(alone(name, b), problem) for name in ("token_is", "reinforce")]
    gaps = (0.1, 0.2, 0.4, 0.8)
    first = [bias(alone("token_is"), tree(0.6 * e)) for e in gaps]
    return Outcome(
        figures=[
            zero("largest |E ρ² − 1.04| of a token", (square - 1.04).abs().max()),
            zero("largest distance from the five identities", apart),
            *series(
                "bias, {}",
                list(bent)[:4],
                list(bent.values())[:4],
                "0.8702, 0.3490, 0.2007, 0.2320",
            ),
            zero("bias, trajectory_is", bent["trajectory_is"]),
            *series("bias with E_μR, {}", ("token", "none"), based, "0.3490, 0.3465"),
            *series("bias, token, e = {}", gaps, first, "0.0383, 0.0759, 0.1486, 0.2851"),
        ],
        stands=apart < 1e-12
        and bent["token_is"] > 0.01
        and max(bent["prefix_is"], bent["suffix_is"]) < bent["token_is"]
        and bent["trajectory_is"] < 1e-10,
    )
