"""Document 002, sections on the group baseline and the learned critic."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import replace

import torch
from scipy.integrate import quad
from scipy.special import ndtr
from torch import Tensor

from windage.analysis.claims.claim import Outcome, claim, equal, exact, series, zero
from windage.analysis.claims.measures import (
    critic,
    edited,
    figures,
    judge,
    moments,
    prefix_values,
    relative,
    valued,
)
from windage.analysis.claims.problems import count, fix3, fresh_tree, one_offset, response_mass
from windage.estimators.batch import Batch
from windage.estimators.catalogue import get
from windage.toy.exact.moments import Moments
from windage.toy.exact.tuples import Draw, Edit, Responses, listed
from windage.toy.objective import objective
from windage.toy.problems import Problem

GROUP = "Estimating the advantage: group baseline"
CRITIC = "Estimating the advantage: learned critic"
Times = Callable[[float], float]


def distinct(problem: Problem, group_size: int) -> Iterator[Draw]:
    """Groups of different responses of one prompt, drawn without replacement."""
    mass = response_mass(problem)[1][0]
    everyone = torch.arange(len(mass))
    groups = torch.cartesian_prod(*[everyone] * group_size)
    ordered = groups.sort(1).values
    groups = groups[(ordered[:, 1:] != ordered[:, :-1]).all(1)]
    taken = mass[groups]
    left = 1 - taken.cumsum(1) + taken
    yield groups.unsqueeze(1), (taken / left).prod(1)


def sharing_first(problem: Problem) -> Iterator[Draw]:
    """Pairs of responses of one prompt that continue the same first token."""
    mass = response_mass(problem)[1][0]
    first = problem.tree.paths[1][:, 0]
    everyone = torch.arange(len(mass))
    pairs = torch.cartesian_prod(everyone, everyone)
    pairs = pairs[first[pairs[:, 0]] == first[pairs[:, 1]]]
    together = mass.new_zeros(problem.tree.vocab).scatter_add(0, first, mass)
    chance = mass[pairs].prod(1) / together[first[pairs[:, 0]]]
    yield pairs.unsqueeze(1), chance


@claim(
    "B-08",
    section=GROUP,
    statement="A baseline made of the other responses of the group leaves the gradient as it is; "
    "the mean of the whole group, one's own reward included, changes it slightly.",
    note="Independent draws are needed; the full mean costs only the factor (G − 1)/G.",
    problem="TREE sampled from its own policy, G = 2, 3, 4; groups drawn without replacement; "
    "pairs that share their first token.",
    formula="E ĝ = ∇J for rloo, (G − 1)/G ∇J for group_mean",
)
def b_08() -> Outcome:
    problem, sizes = fresh_tree(), (2, 3, 4)
    rloo = [figures(get("rloo"), problem, g) for g in sizes]
    mean = [figures(get("group_mean"), problem, g) for g in sizes]
    scales = [m["scale"] for m in mean]
    ratios = [m["variance"] / r["variance"] for m, r in zip(mean, rloo, strict=True)]
    shares = [(g - 1) / g for g in sizes]
    without = [
        judge(listed(get("rloo"), problem, distinct(problem, g)), problem)["relative_bias"]
        for g in (2, 3)
    ]
    shared = judge(listed(get("rloo"), problem, sharing_first(problem)), problem)["relative_bias"]
    worst = max(r["relative_bias"] for r in rloo)
    rescaled = max(m["relative_bias_rescaled"] for m in mean)
    return Outcome(
        figures=[
            zero("bias of rloo", worst),
            *(
                equal(f"scale of group_mean, G = {g}", s, share)
                for g, s, share in zip(sizes, scales, shares, strict=True)
            ),
            zero("bias of group_mean after rescaling", rescaled),
            *(
                equal(f"variance to rloo's, G = {g}", r, share**2)
                for g, r, share in zip(sizes, ratios, shares, strict=True)
            ),
            *series("bias of rloo, distinct, G = {}", (2, 3), without, "0.2785, 0.1432"),
            exact("bias of rloo, shared first token", shared, "0.7359"),
        ],
        stands=worst < 1e-10
        and rescaled < 1e-10
        and all(abs(s - share) < 1e-10 for s, share in zip(scales, shares, strict=True))
        and min(*without, shared) > 0.01,
    )


def _budgeted_variance(group_size: int, responses: int = 48) -> float:
    """Variance of rloo's update when the responses go to prompts drawn uniformly.

    The two logits of a pair move oppositely, so the shared offset carries half of the trace.
    """
    shared = one_offset(0.1, 0.3, 0.5, 0.7, 0.9)
    means, variances = [], []
    for p in range(shared.problem.prompts):
        one = shared.problem.select(p)
        found = moments(get("rloo"), one, group_size)
        means.append(torch.einsum("pnv,pnvd->d", found.mean, shared.jacobian[:1]))
        variances.append(found.variance / 2)
    mean = torch.cat(means)
    total = torch.stack(variances).mean() + mean.var(correction=0)
    return float(total / (responses / group_size))


def _longest(share_below: Times, size: int) -> float:
    """Expected longest of `size` independent times, from their distribution function."""
    return quad(lambda x: 1 - share_below(x) ** size, 0, math.inf, limit=200)[0]


def exponential(x: float) -> float:
    """Distribution function of exponential times of mean 1."""
    return -math.expm1(-x)


def lognormal(x: float) -> float:
    """Distribution function of lognormal times of mean 1, sigma 1 in logs."""
    return float(ndtr(math.log(x) + 0.5)) if x > 0 else 0.0


@claim(
    "B-09",
    section=GROUP,
    statement="More responses a prompt pin down its mean reward better, but they are taken from "
    "other prompts, and the group waits for its slowest member.",
    problem="TREE rewards; PAIR(.1 .3 .5 .7 .9) with one shared logit offset, 48 responses; "
    "exponential and lognormal (σ = 1) times.",
    formula="Var R / G; trace Cov of rloo with 48/G prompts; E[max of G]/E[time]",
)
def b_09() -> Outcome:
    problem, sizes = fresh_tree(), (2, 4, 8, 16)
    mass = response_mass(problem)[0]
    center = (mass * problem.rewards).sum()
    spread = float((mass * (problem.rewards - center).square()).sum())
    groups = (2, 3, 4, 6, 8, 12, 16, 24, 48)
    total = [1e3 * _budgeted_variance(g) for g in groups]
    best = groups[total.index(min(total))]
    waits = [_longest(exponential, g) for g in sizes]
    harmonic = [sum(1 / i for i in range(1, g + 1)) for g in sizes]
    heavy = [_longest(lognormal, g) for g in sizes]
    return Outcome(
        figures=[
            *series(
                "variance of the group mean, G = {}",
                sizes,
                [spread / g for g in sizes],
                "0.033737, 0.016869, 0.008434, 0.004217",
            ),
            *series(
                "variance of the update ×10³, G = {}",
                groups,
                total,
                "2.3375, 1.7354, 1.5969, 1.5982, 1.7054, 2.0064, 2.3461, 3.0605, 5.2696",
            ),
            equal("group size of least variance", best, 4),
            *series("E max, exponential, G = {}", sizes, waits, "1.5000, 2.0833, 2.7179, 3.3807"),
            *(
                equal(f"wait of a member, exponential, G = {g}", w - 1, h - 1, tolerance=1e-7)
                for g, w, h in zip(sizes, waits, harmonic, strict=True)
            ),
            *series("E max, lognormal, G = {}", sizes, heavy, "1.5205, 2.2081, 3.0838, 4.1697"),
        ],
        stands=2 < best < 48 and heavy == sorted(heavy) and waits == sorted(waits),
    )


def critics(problem: Problem) -> dict[str, Tensor]:
    """Critics' values of each prefix: right, and wrong in several ways."""
    right = prefix_values(problem)
    wave = 0.3 * torch.cos(1 + 3 * count(len(right)))
    return {
        "exact": right,
        "constant J": right[:1].expand_as(right),
        "wavy": right + wave,
        "+0.3": right + 0.3,
        "5 × wavy": right + 5 * wave,
        "0": torch.zeros_like(right),
        "−1": torch.full_like(right, -1.0),
    }


def with_critic(problem: Problem, values: Tensor, lam: float) -> Moments:
    """Moments of one response with GAE from a critic."""
    return edited(critic(lam=lam), problem, valued(problem, values))


@claim(
    "B-10",
    section=CRITIC,
    statement="A critic that sees the prefix only cannot bias the return's gradient, however "
    "wrong; a poor one reduces noise less than a group or adds to it, a good one keeps up with "
    "a group.",
    note="Exact values do not minimize variance: on TREE they are a little noisier than the "
    "constant J.",
    problem="TREE sampled from its own policy, one response; seven critics.",
    formula="A_t = R − V(prefix)",
)
def b_10() -> Outcome:
    problem = fresh_tree()
    found = {
        name: judge(with_critic(problem, v, 1.0), problem) for name, v in critics(problem).items()
    }
    variance = {name: f["variance"] for name, f in found.items()}
    worst = max(f["relative_bias"] for f in found.values())
    group = figures(get("rloo"), problem, 4)["variance"]
    quarter = {n: variance[n] / 4 for n in ("exact", "wavy", "5 × wavy", "0")}
    return Outcome(
        figures=[
            zero("largest bias of the seven", worst),
            *series(
                "var, V {}",
                variance,
                variance.values(),
                "0.10041, 0.09870, 0.15752, 0.25706, 1.54701, 0.38707, 2.97702",
            ),
            *series(
                "var/4, V {}",
                quarter,
                quarter.values(),
                "0.02510, 0.03938, 0.38675, 0.09677",
            ),
            exact("var, rloo, G = 4", group, "0.03294"),
        ],
        stands=worst < 1e-10
        and quarter["exact"] < group < quarter["wavy"] < quarter["0"] < quarter["5 × wavy"],
    )


def _last_score(problem: Problem) -> Tensor:
    """Mean score of the last token, E[s_last]."""

    def only_last(batch: Batch, index: Tensor) -> Batch:
        last = torch.arange(batch.mask.shape[-1]) == batch.lengths.unsqueeze(-1) - 1
        return replace(batch, mask=last, rewards=torch.ones_like(batch.rewards))

    return edited(get("reinforce"), problem, only_last).mean


@claim(
    "B-11",
    section=CRITIC,
    statement="Replacing part of the return by what a critic predicts biases the update unless the "
    "critic is right; λ says how much is replaced.",
    verdict="holds only if",
    condition="prefixes have different errors, or lengths differ: where all lengths are one, the "
    "same error everywhere does no harm",
    problem="TREE and FIX3 sampled from their own policies, one response; critics exact, "
    "exact + 0.3 cos(1 + 3n), exact + 0.3.",
    formula="GAE, γ = 1: A_t = Σ λ^k δ_{t+k}",
)
def b_11() -> Outcome:
    problem, fixed = fresh_tree(), fix3()
    values, lams = critics(problem), (0.0, 0.5, 0.9, 0.95, 0.99)
    right = max(
        judge(with_critic(problem, values["exact"], lam), problem)["relative_bias"] for lam in lams
    )
    wavy = [judge(with_critic(problem, values["wavy"], lam), problem) for lam in lams]
    biases = [w["relative_bias"] for w in wavy]
    gradient = objective(problem).gradient
    shifted = with_critic(problem, values["+0.3"], 0.0).mean - gradient
    plus = relative(shifted, gradient)
    identity = float((shifted + 0.3 * _last_score(problem)).norm())
    still = {
        name: judge(with_critic(fixed, critics(fixed)[name], 0.0), fixed)["relative_bias"]
        for name in ("+0.3", "wavy")
    }
    return Outcome(
        figures=[
            zero("bias, exact critic, every λ", right),
            *series("bias, wavy, λ = {}", lams, biases, "1.5032, 0.7224, 0.1399, 0.0697, 0.0139"),
            *series(
                "var, wavy, λ = {}",
                lams,
                [w["variance"] for w in wavy],
                "0.12196, 0.11775, 0.14421, 0.15043, 0.15603",
            ),
            exact("bias, +0.3, λ = 0", plus, "0.7050"),
            zero("distance from −0.3 E[s_last]", identity),
            zero("bias, +0.3, fixed length", still["+0.3"]),
            exact("bias, wavy, fixed length", still["wavy"], "1.5061"),
        ],
        stands=right < 1e-10 and biases == sorted(biases, reverse=True) and biases[-1] > 1e-3,
        limited=still["+0.3"] < 1e-10,
    )


def _completed(problem: Problem, values: Tensor, tokens: int) -> Edit:
    """Cut every response after some tokens; what was cut is replaced by the critic's value."""
    before = problem.tree.paths[0][:, tokens]
    credited = torch.where(before >= 0, values[before.clamp(min=0)], problem.rewards[0])
    value = valued(problem, values)

    def edit(batch: Batch, index: Tensor) -> Batch:
        early = torch.arange(batch.mask.shape[-1]) < tokens
        whole = value(batch, index)
        return replace(whole, mask=whole.mask & early, rewards=credited[index])

    return edit


@claim(
    "B-12",
    section=CRITIC,
    statement="For finished responses, with γ = λ = 1, GAE is at each token the return less the "
    "value; the critic can stand in for the rest of an unfinished response.",
    note="On unfinished responses the update is only as good as the critic.",
    problem="TREE sampled from its own policy; episodes cut after token 2 and completed by V.",
    formula="A_t = R − V_t; cut: A_t = V_3 − V_t for t = 1, 2",
)
def b_12() -> Outcome:
    problem = fresh_tree()
    values = critics(problem)
    table = Responses(problem)
    index = torch.arange(problem.tree.leaves).view(-1, 1, 1)
    batch = valued(problem, values["wavy"])(table.batch(index, head=False), index)
    advantages = critic()(batch).terms.advantages
    assert batch.values is not None
    returned = torch.where(batch.mask, batch.rewards.unsqueeze(-1) - batch.values, 0.0)
    identity = float((advantages - returned).abs().max())

    def two_tokens(batch: Batch, index: Tensor) -> Batch:
        return replace(batch, mask=batch.mask & (torch.arange(batch.mask.shape[-1]) < 2))

    true = edited(get("reinforce"), problem, two_tokens).mean
    cut = {
        name: relative(
            edited(critic(), problem, _completed(problem, values[name], 2)).mean - true, true
        )
        for name in ("exact", "+0.3", "wavy")
    }
    return Outcome(
        figures=[
            zero("largest |A_t − (R − V_t)|", identity),
            zero("bias when cut, exact critic", cut["exact"]),
            exact("bias when cut, +0.3", cut["+0.3"], "0.7830"),
            exact("bias when cut, wavy", cut["wavy"], "0.8177"),
        ],
        stands=identity < 1e-10 and cut["exact"] < 1e-10 and cut["wavy"] > 0.01,
    )
