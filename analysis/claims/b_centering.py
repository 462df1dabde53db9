"""Document 002, section on score centering."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from windage.analysis.claims.claim import Outcome, band, claim, counted, exact, series, zero
from windage.analysis.claims.measures import (
    alone,
    bias,
    corrected,
    divergence,
    entropy,
    figures,
    mean_reward,
    moments,
    over_mean,
    path,
    relative,
    response_update,
)
from windage.analysis.claims.problems import (
    arms,
    bonus,
    fresh_tree,
    octet,
    placebo,
    rewarded,
    tree,
    twostep,
    zipf,
)
from windage.estimators.aggregation import sequence_mean
from windage.estimators.centering import exact as over_all
from windage.estimators.centering import top_k
from windage.estimators.correction import band as within
from windage.estimators.correction import geometric, none, ratio, token, truncate
from windage.estimators.estimator import Estimator
from windage.estimators.member import Member, use
from windage.toy.exact.walk import Walk, pull_back
from windage.toy.objective import objective
from windage.toy.problems import Problem

SECTION = "Score centering"


def centered(estimator: Estimator) -> Estimator:
    """The same estimator with the mean score subtracted at each prefix."""
    return replace(estimator, centering=use(over_all))


def _mask(baseline: float = 0.0) -> Estimator:
    """Token ratios inside [0.8, 1.25], sum over tokens."""
    return corrected("mask", token, within, baseline, low=0.8, high=1.25)


def _mean_scores(problem: Problem) -> Tensor:
    """‖Σ_v μ_v s_v‖ at each prefix."""
    walk = Walk(problem)
    return pull_back(walk.behavior, walk.probability).norm(dim=-1)


@claim(
    "B-34",
    section=SECTION,
    statement="When sampler and trainer differ, the trainer's score does not average to zero under "
    "the sampler, so even equal rewards move the policy.",
    note="A group baseline leaves equal rewards without an advantage; what drifts then is carried "
    "by rewards that differ elsewhere (B-38).",
    problem="TREE, stale and sampled from itself, advantage 1.",
    formula="‖Σ_v μ_v s_v‖ at each prefix; drift = ‖E ĝ‖ with advantage 1",
)
def b_34() -> Outcome:
    problem = tree()
    scores, matched = _mean_scores(problem), _mean_scores(fresh_tree())
    geometric_mean = replace(corrected("gspo", geometric, ratio), aggregation=use(sequence_mean))
    bounded = {
        "none": alone("reinforce"),
        "token cap 2": alone("token_tis", cap=2.0),
        "mask [.8, 1.25]": _mask(),
        "geometric mean": geometric_mean,
        "sequence cap 2": alone("sequence_tis", cap=2.0),
    }
    drift = {name: figures(entry, problem)["drift"] for name, entry in bounded.items()}
    free = max(
        figures(alone(name), problem)["drift"]
        for name in ("token_is", "prefix_is", "suffix_is", "trajectory_is")
    )
    return Outcome(
        figures=[
            exact("least mean score of a prefix", scores.min(), "0.0397"),
            exact("largest", scores.max(), "0.3490"),
            zero("largest, matched", matched.max()),
            *series("drift, {}", drift, drift.values(), "0.1844, 0.0174, 0.3054, 0.1009, 0.0557"),
            zero("drift, the four uncapped ratios", free),
        ],
        stands=float(scores.min()) > 1e-3
        and float(matched.max()) < 1e-12
        and min(drift.values()) > 1e-3,
    )


def _frozen(problem: Problem, advantage: float) -> tuple[float, float]:
    """Slope of KL(q‖p) along the expected update, and KL after 100 unit steps."""
    paid = rewarded(problem, torch.full_like(problem.rewards, advantage))
    update = response_update(alone("reinforce"), paid)
    step = 1e-4 * update(paid.logits, paid.behavior_logp)
    (end,) = path(update, paid.logits, lambda z: paid.behavior_logp, at=(100,))
    places = (paid.logits + step, paid.logits - step, end)
    ahead, behind, last = (divergence(paid, to=z.log_softmax(-1)) for z in places)
    return (ahead - behind) / 2e-4, last


@claim(
    "B-35",
    section=SECTION,
    statement="The drift draws the trainer towards the distribution of the sampler.",
    verdict="holds only if",
    condition="advantages at the prefix average above zero; where they average below, it repels, "
    "and without limit",
    problem="PLACEBO, frozen sampler, advantage 1 or −1 for every arm.",
    formula="dKL(q‖p)/dη = −A ‖q − p‖²",
)
def b_35() -> Outcome:
    problem = placebo()
    apart = (problem.behavior_logp.exp() - problem.logp.exp()).square().sum()
    slope, near = _frozen(problem, 1.0)
    against, far = _frozen(problem, -1.0)
    return Outcome(
        figures=[
            exact("dKL(q‖p)/dη, A = 1", slope, "-0.005773"),
            zero("that plus ‖q − p‖², relative", (slope + apart) / apart, tolerance=1e-7),
            exact("KL at the start", divergence(problem), "0.0584"),
            band("KL after 100 steps, A = 1", near, 0.0, 2e-5, kind="exact"),
            exact("KL after 100 steps, A = −1", far, "59"),
        ],
        stands=slope < 0 and near < 1e-3,
        limited=against > 0 and far > 1,
    )


def _compounding(
    problem: Problem, steps: tuple[int, ...], sampler: Callable[[Tensor], Tensor]
) -> list[float]:
    """Entropy after so many unit steps with the sampler's logits renewed before each."""
    update = response_update(alone("reinforce"), problem)
    found = path(update, problem.logits, lambda z: sampler(z).log_softmax(-1), at=steps)
    return [entropy(z) for z in found]


def _fresh_noise(problem: Problem, spread: float, seeds: tuple[int, ...]) -> Tensor:
    """Entropy after 1,000 unit steps whose sampler has new noise each step, a seed.

    The seeds are prompts of one problem, so a step on their mean is taken times their number.
    """
    n = len(seeds)
    many = replace(
        problem,
        logits=problem.logits.expand(n, -1, -1),
        behavior_logp=problem.behavior_logp.expand(n, -1, -1),
        rewards=problem.rewards.expand(n, -1),
        lengths=problem.lengths.expand(n, -1),
    )
    generators = [torch.Generator().manual_seed(seed) for seed in seeds]

    def sampler(z: Tensor) -> Tensor:
        drawn = [torch.randn(z.shape[1:], generator=g, dtype=z.dtype) for g in generators]
        return (z + spread * torch.stack(drawn)).log_softmax(-1)

    update = response_update(alone("reinforce"), many)
    (end,) = path(update, many.logits, sampler, at=(1000,), rate=float(n))
    return torch.tensor([entropy(z) for z in end])


@claim(
    "B-36",
    section=SECTION,
    statement="With the trainer's weights copied back to the sampler the drift accumulates.",
    verdict="holds only if",
    condition="the mismatch keeps its direction from step to step",
    kind="simulated",
    problem="PLACEBO, unit steps, sampler = softmax(z + δ) renewed each step; fresh Gaussian noise "
    "of the same standard deviation each step.",
    formula="entropy of the trainer after n steps",
)
def b_36(*, seed: int = 0) -> Outcome:
    problem = placebo()
    delta = problem.behavior_logp - problem.logits
    delta = delta - delta.mean()
    steps = (10, 100, 300, 1000)
    synced = _compounding(problem, steps, lambda z: z + delta)
    against = rewarded(problem, -torch.ones(20))
    negative = _compounding(against, (300,), lambda z: z + delta)[0]
    frozen = _compounding(problem, (1000,), lambda z: problem.behavior_logp)[0]
    seeds = tuple(range(16 * seed, 16 * seed + 16))
    fresh = _fresh_noise(problem, float(delta.std(correction=0)), seeds)
    return Outcome(
        figures=[
            exact("entropy at the start", entropy(problem.logits), "2.9957"),
            *series("entropy, n = {}", steps, synced, "2.9816, 1.9034, 0.3188, 0.0784"),
            exact("entropy, A = −1, n = 300", negative, "0.1585"),
            exact("entropy, frozen sampler, n = 1,000", frozen, "2.9373"),
            band(
                "entropy, fresh noise, n = 1,000",
                fresh.mean(),
                2.8,
                None,
                standard_error=float(fresh.std()) / math.sqrt(len(seeds)),
            ),
        ],
        stands=synced[-1] < 0.1 * synced[0],
        limited=frozen > 2.8 and float(fresh.mean()) > 2.5,
        seeds=seeds,
    )


@claim(
    "B-37",
    section=SECTION,
    statement="Taking the mean score off at each prefix leaves no drift.",
    problem="TREE, stale; weights none, capped at 2, capped at 1, masked, uncapped.",
    formula="w_y s_y − Σ_v μ_v w_v s_v",
)
def b_37() -> Outcome:
    problem = tree()
    entries = {
        "none": alone("reinforce"),
        "cap 2": alone("token_tis", cap=2.0),
        "cap 1": alone("token_tis", cap=1.0),
        "mask": _mask(),
        "uncapped": alone("token_is"),
    }
    higher = rewarded(problem, problem.rewards + 3.0)
    drift, shift = [], []
    for entry in map(centered, entries.values()):
        drift.append(figures(entry, problem)["drift"])
        apart = moments(entry, higher).mean - moments(entry, problem).mean
        shift.append(float(apart.norm()))
    idle = [
        float((moments(centered(e), p).mean - moments(e, p).mean).norm())
        for e, p in ((entries["uncapped"], problem), (entries["none"], fresh_tree()))
    ]
    return Outcome(
        figures=[
            *(zero(f"drift, {n}", d) for n, d in zip(entries, drift, strict=True)),
            zero("change of the mean when 3 is added to all rewards", max(shift)),
            zero("what centering adds to the uncapped ratio's mean", idle[0]),
            zero("what it adds when μ = π", idle[1]),
        ],
        stands=max(drift) < 1e-12 and max(shift) < 1e-12,
    )


def _offset(problem: Problem) -> Callable[[Tensor], Tensor]:
    """The sampler of synced weights: the policy's logits plus what the problem's sampler adds."""
    added = problem.behavior_logp - problem.logp
    return lambda logits: (logits + added).log_softmax(-1)


def _idle_entropy(name: str, *, based: bool) -> float:
    """Entropy of TWOSTEP's idle token, after a first that pays, after 2,000 synced steps."""
    shared = twostep()
    problem = shared.problem

    def make(baseline: float) -> Estimator:
        return alone(name, baseline)

    whole = over_mean(make, problem) if based else response_update(make(0.0), problem)
    (end,) = path(
        lambda z, q: shared.spread(whole(z, q)),
        problem.logits,
        _offset(problem),
        at=(2000,),
    )
    return entropy(end[0, 1])


@claim(
    "B-38",
    section=SECTION,
    statement="Subtracting a mean from the rewards of the responses does not take it away.",
    note="Beyond one token; in a one-step problem reward centering already does it.",
    problem="TREE with R = 1[first token 0], baseline E_μR; TWOSTEP, whose second token has one "
    "logit vector after a first that pays and one after a first that does not; one step "
    "p = (.5 .3 .2), q = (.4 .4 .2), r = (1 0 .5).",
    formula="E ĝ at prefixes after the first token; entropy of the idle token",
)
def b_38() -> Outcome:
    problem = tree()
    first = rewarded(problem, problem.tree.paths[1][:, 0] == 0)
    b = mean_reward(first)
    beyond = {
        name: float(moments(alone(name, b), first).mean[:, 1:].norm())
        for name in ("reinforce", "centered")
    }
    true = float(objective(first).gradient[:, 1:].norm())
    with_mean = _idle_entropy("reinforce", based=True)
    without = _idle_entropy("reinforce", based=False)
    with_scores = _idle_entropy("centered", based=False)
    one = arms((0.5, 0.3, 0.2), (1.0, 0.0, 0.5), (0.4, 0.4, 0.2))
    rewards_centered = moments(alone("reinforce", mean_reward(one)), one).mean
    scores_centered = moments(alone("centered"), one).mean
    same = float((rewards_centered - scores_centered).norm())
    return Outcome(
        figures=[
            exact("update beyond the first token, rewards centered", beyond["reinforce"], "0.0671"),
            zero("the same, scores centered", beyond["centered"]),
            zero("the same, true gradient", true),
            exact("idle entropy, rewards centered", with_mean, "1.6389"),
            exact("idle entropy, no baseline", without, "0.0152"),
            exact("idle entropy, scores centered", with_scores, "1.7918"),
            zero("difference of the two in one step", same),
        ],
        stands=beyond["reinforce"] > 0.01 and with_mean < with_scores - 0.1 and true < 1e-12,
    )


def _weigh(map_: Member) -> Callable[[Tensor], Tensor]:
    return lambda log_ratios: map_(log_ratios, torch.ones((), dtype=log_ratios.dtype))


def _likeliest(problem: Problem, k: int) -> Tensor:
    """The sampler's k likeliest tokens, ties to the lower id."""
    return problem.behavior_logp[0, 0].argsort(descending=True, stable=True)[:k]


def _subtracted(problem: Problem, ids: Tensor, map_: Member) -> Tensor:
    """What centering takes off with these tokens recorded."""
    p, q = problem.logp[0, 0], problem.behavior_logp[0, 0]
    member = over_all if len(ids) == len(p) else top_k
    head = member(p[ids], q[ids], _weigh(map_))
    visits = torch.zeros_like(p).index_add(0, ids, head)
    return pull_back(visits.unsqueeze(0), p.exp().unsqueeze(0))


def _residual(problem: Problem, ids: Tensor, map_: Member) -> float:
    whole = _subtracted(problem, _likeliest(problem, problem.tree.vocab), map_)
    return relative(_subtracted(problem, ids, map_) - whole, whole)


def _modeled(problem: Problem, ids: Tensor) -> Problem:
    """The sampler that top-k assumes: its own head, the trainer's tail rescaled."""
    p, q = problem.logp, problem.behavior_logp
    tail = torch.ones_like(q, dtype=torch.bool)
    tail[..., ids] = False
    log_rho = (q.exp() * tail).sum().log() - (p.exp() * tail).sum().log()
    return replace(problem, behavior_logp=torch.where(tail, p + log_rho, q))


@claim(
    "B-39",
    section=SECTION,
    statement="The sampler's likeliest k tokens and the trainer's tail, rescaled, are enough; the "
    "sum then runs over k tokens.",
    note="Nothing is removed by a tiny head, nor by a small one once weights are capped.",
    problem="ZIPF(.4) unweighted, ZIPF(1.2) capped at 2.",
    formula="Σ_head (μ_v w_v − α π_v) s_v, α = ρ w(1/ρ), ρ = (1 − Q)/(1 − P)",
)
def b_39() -> Outcome:
    plain, capped = use(none), use(truncate, cap=2.0)
    problem, tilted = zipf(0.4), zipf(1.2)
    heads, few = (1, 8, 32, 128, 512), (8, 32, 128)
    tops = [_likeliest(problem, k) for k in heads]
    residual = [_residual(problem, ids, plain) for ids in tops]
    mass = [float(problem.behavior_logp[0, 0, ids].exp().sum()) for ids in tops]
    whole = _subtracted(problem, _likeliest(problem, 1024), plain)
    apart = [float((_subtracted(problem, ids, plain) - whole).abs().sum()) for ids in tops]
    met = sum(a <= 2 * (1 - q) for a, q in zip(apart, mass, strict=True))
    short = [_residual(tilted, _likeliest(tilted, k), capped) for k in few]
    almost = _residual(problem, _likeliest(problem, 1023), plain)
    top = _likeliest(tilted, 32)
    same = max(_residual(_modeled(tilted, top), top, m) for m in (plain, capped))
    bytes_a_token = 128 * (torch.int32.itemsize + torch.float32.itemsize)
    return Outcome(
        figures=[
            *series("residual, k = {}", heads, residual, "1.0036, 0.3163, 0.1204, 0.0434, 0.0125"),
            *series("head mass, k = {}", heads, mass, "0.2317, 0.5711, 0.7373, 0.8649, 0.9622"),
            counted("heads that meet the ℓ1 bound 2(1 − Q)", met, len(heads)),
            *series("residual, capped, k = {}", few, short, "1.0000, 0.6344, 0.3767"),
            zero("residual, k = V − 1", almost, tolerance=1e-10),
            zero("residual where the tail is proportional to p", same, tolerance=1e-10),
            counted("bytes a token at k = 128, ids and log-probabilities", bytes_a_token, 1024),
        ],
        stands=residual[3] < 0.05 and almost < 1e-10 and same < 1e-10,
    )


@claim(
    "B-40",
    section=SECTION,
    statement="Centering can be put on top of truncation or masking and then helps on stale data.",
    verdict="holds only if",
    condition="it was measured: after composing the drift is always 0, the distance from ∇J may "
    "rise or fall",
    problem="TREE without weights and capped at 2; OCTET(.6) without, OCTET(.3) masked to "
    "[.8, 1.25], OCTET(1) capped at 2; one response, baseline E_μR.",
    formula="bias without → with centering",
)
def b_40() -> Outcome:
    cases: dict[str, tuple[Problem, Callable[[float], Estimator]]] = {
        "TREE, none": (tree(), lambda b: alone("reinforce", b)),
        "TREE, cap 2": (tree(), lambda b: alone("token_tis", b, cap=2.0)),
        "OCTET(.6), none": (octet(0.6), lambda b: alone("reinforce", b)),
        "OCTET(.3), mask": (octet(0.3), _mask),
        "OCTET(1), cap 2": (octet(1.0), lambda b: alone("token_tis", b, cap=2.0)),
    }
    before, after, drift = [], [], []
    for problem, make in cases.values():
        entry = make(mean_reward(problem))
        before.append(bias(entry, problem))
        found = figures(centered(entry), problem)
        after.append(found["relative_bias"])
        drift.append(found["drift"])
    change = [a - b for a, b in zip(after, before, strict=True)]
    shown = ((slice(0, 2), 4), (slice(2, 5), 3))
    printed = (("0.3465, 0.3572", "0.743, 0.730, 1.126"), ("0.4028, 0.3689", "0.675, 0.668, 1.109"))
    names = list(cases)
    return Outcome(
        figures=[
            *(
                figure
                for word, values, texts in zip(
                    ("without", "with"), (before, after), printed, strict=True
                )
                for (part, _), text in zip(shown, texts, strict=True)
                for figure in series("bias " + word + ", {}", names[part], values[part], text)
            ),
            zero("largest drift with centering", max(drift)),
        ],
        stands=min(change) < -1e-3 and max(drift) < 1e-12,
        limited=max(change) > 1e-3,
    )


def _bonus_path(shift: float, make: Callable[[float], Estimator], *, based: bool) -> list[float]:
    """Probability of arm 0 after a good first token, after 100 and 1,000 synced unit steps."""
    problem = bonus(shift)
    update = over_mean(make, problem) if based else response_update(make(0.0), problem)
    ends = path(update, problem.logits, _offset(problem), at=(100, 1000))
    return [float(z[0, 1].softmax(-1)[0]) for z in ends]


@claim(
    "B-41",
    section=SECTION,
    statement="With a noisy sampler, centering learns where capped ratios do not.",
    verdict="holds only if",
    condition="no baseline centers the rewards; where one does, the gain here comes early and does "
    "not last",
    problem="BONUS(1) without a baseline; BONUS(.5) with the batch mean as baseline.",
    formula="π(arm 0 | good) after 100 and 1,000 exact expected steps",
)
def b_41() -> Outcome:
    makers: dict[str, Callable[[float], Estimator]] = {
        "none": lambda b: alone("reinforce", b),
        "cap 2": lambda b: alone("token_tis", b, cap=2.0),
        "centered": lambda b: alone("centered", b),
        "centered cap 2": lambda b: alone("centered_tis", b, cap=2.0),
    }
    steps = (100, 1000)
    bare = {name: _bonus_path(1.0, make, based=False) for name, make in makers.items()}
    based = {
        name: _bonus_path(0.5, makers[name], based=True) for name in ("none", "cap 2", "centered")
    }
    printed = ("0.0022, 0.0002", "0.0222, 0.0021", "0.3072, 0.9965", "0.5312, 0.9900")
    printed_based = ("0.387, 0.994", "0.699, 0.990", "0.528, 0.994")
    return Outcome(
        figures=[
            *(
                figure
                for name, text in zip(bare, printed, strict=True)
                for figure in series(name + ", {} steps", steps, bare[name], text)
            ),
            *(
                figure
                for name, text in zip(based, printed_based, strict=True)
                for figure in series(name + ", baseline, {} steps", steps, based[name], text)
            ),
        ],
        stands=bare["centered"][1] > 0.9 and bare["cap 2"][1] < 0.1,
        limited=based["cap 2"][1] > 0.9,
    )
