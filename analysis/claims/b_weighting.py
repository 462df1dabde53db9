"""Document 002, section on weighting the update."""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from torch import Tensor

from windage.analysis.claims.claim import Outcome, claim, equal, exact, series, zero
from windage.analysis.claims.measures import (
    cosine,
    figures,
    moments,
    path,
    response_update,
)
from windage.analysis.claims.problems import (
    arms,
    binary,
    count,
    fresh_tree,
    length,
    pair,
    response_mass,
    rewarded,
    tree,
)
from windage.estimators.advantage import constant, group_std
from windage.estimators.aggregation import constant_length, sequence_mean
from windage.estimators.batch import Batch
from windage.estimators.catalogue import get
from windage.estimators.estimator import Estimator, coefficients
from windage.estimators.member import use
from windage.toy.exact.tuples import Responses, every_tuple
from windage.toy.objective import objective
from windage.toy.problems import Problem

SECTION = "Weighting the update"
SIZES = (2, 3, 4)


def _over_slope(estimator: Estimator, p: float, group_size: int) -> float:
    """Factor of the gradient of p in the mean update of a prompt with success p."""
    mean = moments(estimator, pair(p), group_size).mean
    return float(mean[0, 0, 0]) / (p * (1 - p))


@claim(
    "B-13",
    section=SECTION,
    statement="Dividing by the standard deviation of the group gives prompts another weight.",
    note="With rewards that are not binary the direction changes even inside one prompt.",
    problem="PAIR, G = 8, population std; TREE with binary and real rewards, ddof 1; three arms "
    "p = (.6 .3 .1) with rewards 0, .4, 1.",
    formula="c(p, G) = Σ_k Bin(k; G, p) √(k/G (1 − k/G)) / (p(1 − p)), limit 1/√(p(1 − p))",
)
def b_13() -> Outcome:
    population = get("grpo", ddof=0, eps=0.0)
    success = (0.05, 0.1, 0.5)
    factor = [_over_slope(population, p, 8) for p in success]
    limit = [1 / math.sqrt(p * (1 - p)) for p in success]
    reached = _over_slope(population, 0.05, 512) / limit[0]
    summed = replace(get("rloo"), name="group_std", advantage=use(group_std))
    two_valued = [figures(summed, binary(fresh_tree()), g) for g in SIZES]
    real = [figures(summed, fresh_tree(), g)["cosine"] for g in SIZES]
    three = [figures(get("grpo"), arms((0.6, 0.3, 0.1), (0, 0.4, 1)), g)["cosine"] for g in (4, 8)]
    parallel = max(abs(1 - f["cosine"]) for f in two_valued)
    return Outcome(
        figures=[
            *series("c at p = {}, G = 8", success, factor, "2.4731, 2.3277, 1.8557"),
            exact("c at .05 over c at .5, G = 8", factor[0] / factor[2], "1.3327"),
            exact("the same in the limit", limit[0] / limit[2], "2.2942"),
            exact("share of the limit at G = 512, p = .05", reached, "0.9948"),
            zero("1 − cosine, TREE binary", parallel),
            *series(
                "scale, TREE binary, G = {}",
                SIZES,
                [f["scale"] for f in two_valued],
                "0.7071, 1.1547, 1.4003",
            ),
            *series("cosine, TREE real, G = {}", SIZES, real, "0.99554, 0.99710, 0.99642"),
            *series("cosine, three arms, G = {}", (4, 8), three, "0.9730, 0.9874"),
        ],
        stands=factor[0] > factor[1] > factor[2] and max(real) < 1 - 1e-6,
    )


def _token_coefficient(estimator: Estimator, tokens: int) -> float:
    """Coefficient of each token of one response of advantage 1."""
    column = torch.zeros(1, 1, tokens, dtype=torch.float64)
    batch = Batch(
        rewards=torch.ones(1, 1, dtype=torch.float64),
        mask=torch.ones_like(column, dtype=torch.bool),
        logp=column,
        behavior_logp=column,
    )
    return float(coefficients(replace(estimator, advantage=use(constant)), batch).own[0, 0, 0])


@claim(
    "B-14",
    section=SECTION,
    statement="With the mean over each response's own tokens, a token of a 100-token response "
    "counts ten times as much as one of a 1,000-token response.",
    note="Per token; per response the sequence mean weighs both alike.",
    problem="Coefficients of one response of advantage 1 with 100 and with 1,000 tokens.",
    formula="grpo: C_t = A/T; dr_grpo: C_t = A/L, L = 1,000",
)
def b_14() -> Outcome:
    lengths = (100, 1000)
    mean = [_token_coefficient(get("grpo"), t) for t in lengths]
    fixed = [_token_coefficient(get("dr_grpo", length=1000.0), t) for t in lengths]
    return Outcome(
        figures=[
            equal("grpo, T = 100", mean[0], 0.01),
            equal("grpo, T = 1,000", mean[1], 0.001),
            equal("their ratio", mean[0] / mean[1], 10.0),
            *(
                equal(f"grpo, sum over T = {t}", c * t, 1.0)
                for c, t in zip(mean, lengths, strict=True)
            ),
            *(equal(f"dr_grpo, T = {t}", c, 0.001) for c, t in zip(fixed, lengths, strict=True)),
            equal("dr_grpo, sum over T = 100", 100 * fixed[0], 0.1),
            equal("dr_grpo, sum over T = 1000", 1000 * fixed[1], 1.0),
        ],
        stands=abs(mean[0] / mean[1] - 10) < 1e-9 and abs(fixed[0] - fixed[1]) < 1e-12,
    )


def _expected_lengths(problem: Problem) -> Tensor:
    return (response_mass(problem)[0] * problem.lengths).sum(1)


def _lengths_along(estimator: Estimator, problem: Problem, updates: tuple[int, ...]) -> Tensor:
    """Expected lengths of correct and failing responses after so many updates of 0.5, `[U 2]`.

    A position has one logit, that of stopping.
    """
    update = response_update(estimator, problem)
    stop = torch.tensor([0.0, 1.0], dtype=torch.float64)
    found = path(
        lambda z, q: update(z, q) * stop,
        problem.logits,
        lambda z: z.log_softmax(-1),
        at=updates,
        rate=0.5,
    )
    return torch.stack([_expected_lengths(replace(problem, logits=z)) for z in found])


@claim(
    "B-15",
    section=SECTION,
    statement="A long failing response is pushed down less per token than a short one, so failures "
    "can grow longer.",
    verdict="holds only if",
    condition="stopping can depend on whether the response is about to fail; where it cannot, the "
    "two effects cancel exactly",
    note="The stated lengths belong to the 100th, 500th and 2,000th policy, the start counted "
    "first: 99, 499 and 1,999 updates.",
    problem="LENGTH: half of the responses are correct; separate stop logits for correct and "
    "failing ones; G = 8, population std.",
    formula="dE[T | class]/dη along E[ĝ] = ½ E[A | class] E[Σ s_t / T | class]",
)
def b_15() -> Outcome:
    advantage = _over_slope(get("grpo", ddof=0, eps=0.0), 0.5, 8) / 2
    problem = length(advantage)
    timed = rewarded(problem, problem.lengths.double())
    slope = 2 * objective(timed).gradient[..., 1]
    by_mean = replace(get("reinforce"), aggregation=use(sequence_mean))
    by_constant = replace(get("reinforce"), aggregation=use(constant_length, length=40.0))
    mean = moments(by_mean, problem).mean[..., 1]
    fixed = moments(by_constant, problem).mean[..., 1]
    right, wrong = (slope * mean).sum(1).tolist()
    still = float((slope * fixed).sum(1).abs().max())
    shared = float(mean.sum(0).norm())
    policies = (100, 500, 2000)
    earlier = tuple(n - 1 for n in policies)
    along = _lengths_along(by_mean, problem, tuple(sorted((*earlier, *policies))))
    later, after = along[::2], along[1::2]
    return Outcome(
        figures=[
            exact("mean advantage of a correct response", advantage, "0.92783"),
            exact("dE[T | fail]/dη, sequence mean", wrong, "0.06394"),
            exact("dE[T | success]/dη, sequence mean", right, "-0.06394"),
            zero("either, constant length", still),
            exact("E T at the start", _expected_lengths(problem)[0], "4.99934"),
            *series("E[T | fail], policy {}", policies, later[:, 1], "6.776, 9.469, 13.705"),
            *series("E[T | fail], {} updates", policies, after[:, 1], "6.788, 9.474, 13.707"),
            *series("E[T | success], policy {}", policies, later[:, 0], "1.567, 1.058, 1.012"),
            zero("net update of shared stop logits", shared),
        ],
        stands=wrong > 1e-3 and right < -1e-3 and still < 1e-12,
        limited=shared < 1e-12,
    )


def _largest_difference(a: Estimator, b: Estimator, problem: Problem, group_size: int) -> float:
    """Largest difference of a coefficient of `a` from the one of `b` over all tuples."""
    table = Responses(problem)
    worst = 0.0
    for index, _ in every_tuple(problem, group_size):
        batch = table.batch(index, head=False)
        apart = coefficients(a, batch).own - coefficients(b, batch).own
        worst = max(worst, float(apart.abs().max()))
    return worst


@claim(
    "B-16",
    section=SECTION,
    statement="At one group size Dr.GRPO's update is a constant times RLOO's.",
    verdict="holds only if",
    condition="the group size is fixed; the identity survives clipping, unbiasedness does not",
    problem="TREE, G = 3, L = 3, every tuple, on fresh data and with PPO's clip on stale data; "
    "PAIR(.3 .6) with groups of 2 and 8.",
    formula="A_dr/L = (G − 1)/(G L) A_rloo",
)
def b_16() -> Outcome:
    g, horizon = 3, 3.0
    dr = get("dr_grpo", length=horizon)
    scaled = replace(
        get("rloo"),
        corrections=dr.corrections,
        aggregation=use(constant_length, length=horizon * g / (g - 1)),
    )
    fresh = _largest_difference(dr, scaled, fresh_tree(), g)
    stale = _largest_difference(dr, scaled, tree(), g)
    two, groups = pair(0.3, 0.6), (2, 8)
    means = {
        entry: torch.cat(
            [moments(get(entry), two.select(p), size).mean for p, size in enumerate(groups)]
        )
        for entry in ("group_mean", "rloo")
    }
    apart = cosine(means["group_mean"], means["rloo"])
    return Outcome(
        figures=[
            zero("largest difference, fresh", fresh),
            zero("largest difference, stale and clipped", stale),
            exact("cosine, groups of 2 and 8", apart, "0.9676"),
        ],
        stands=max(fresh, stale) < 1e-12,
        limited=apart < 1 - 1e-6,
    )


@claim(
    "B-17",
    section=SECTION,
    statement="Dr.GRPO can be noisier than GRPO, and a clip or old data put the bias back.",
    note="The first two rewards are the witnesses, the last two go the other way.",
    problem="TREE, G = 4, fresh: rewards real, binary, k/14, 1[length 3]; stale data with clip "
    "0.2, G = 2, 3, 4.",
    formula="variance / scale²; bias after rescaling",
)
def b_17() -> Outcome:
    problem = fresh_tree()
    rewards = {
        "real": problem.rewards[0],
        "binary": binary(problem).rewards[0],
        "k/14": count(15) / 14,
        "length 3": (problem.lengths[0] == 3).double(),
    }
    dr, grpo = get("dr_grpo", length=3.0), get("grpo")
    paid = {name: rewarded(problem, r) for name, r in rewards.items()}
    noise = {
        entry.name: [figures(entry, p, 4)["variance_rescaled"] for p in paid.values()]
        for entry in (dr, grpo)
    }
    fresh = max(figures(dr, problem, g)["relative_bias_rescaled"] for g in SIZES)
    stale = [figures(dr, tree(), g)["relative_bias_rescaled"] for g in SIZES]
    return Outcome(
        figures=[
            *series(
                "rescaled var, dr_grpo, {}",
                rewards,
                noise["dr_grpo"],
                "0.03294, 0.09996, 0.04879, 0.10541",
            ),
            *series(
                "rescaled var, grpo, {}",
                rewards,
                noise["grpo"],
                "0.02083, 0.07773, 0.07527, 0.11579",
            ),
            zero("bias after rescaling, fresh", fresh),
            *series("bias after rescaling, stale, G = {}", SIZES, stale, "0.7268, 0.6518, 0.6273"),
        ],
        stands=any(d > g for d, g in zip(noise["dr_grpo"], noise["grpo"], strict=True))
        and fresh < 1e-10
        and min(stale) > 0.01,
    )
