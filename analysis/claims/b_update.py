"""Document 002, section on the bias and variance of the update."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from windage.analysis.claims.claim import Outcome, claim, equal, exact, series, zero
from windage.analysis.claims.measures import (
    alone,
    bias,
    central_differences,
    cosine,
    critic,
    edited,
    figures,
    judge,
    mean_reward,
    moments,
    recorded,
    relative,
    score_norms,
    scores,
    shaped,
    valued,
)
from windage.analysis.claims.problems import (
    arms,
    count,
    fresh_tree,
    response_mass,
    rewarded,
    tree,
)
from windage.estimators.admission import overlong
from windage.estimators.aggregation import sequence_mean
from windage.estimators.batch import Batch
from windage.estimators.catalogue import get
from windage.estimators.estimator import Estimator
from windage.estimators.member import use
from windage.estimators.penalty import k1, k2, k3, reward_k1
from windage.toy.exact.tuples import Edit, Responses
from windage.toy.objective import objective
from windage.toy.problems import Problem

SECTION = "Bias and variance of the update"
REINFORCE = get("reinforce")


def _value(problem: Problem, logits: Tensor) -> Tensor:
    return objective(replace(problem, logits=logits)).value


@claim(
    "B-02",
    section=SECTION,
    statement="Weighting the score of every token by the return of its response, stop decision "
    "included, gives the policy gradient on average.",
    problem="TREE sampled from its own policy.",
    formula="E[R Σ s_t] = ∇J, against central differences of J",
)
def b_02() -> Outcome:
    problem = fresh_tree()
    numeric = central_differences(lambda z: _value(problem, z), problem.logits)
    whole = relative(moments(REINFORCE, problem).mean - numeric, numeric)
    stops = problem.tree.paths[1].eq(2)

    def without_stop(batch: Batch, index: Tensor) -> Batch:
        return replace(batch, mask=batch.mask & ~stops[index])

    cut = judge(edited(REINFORCE, problem, without_stop), problem)
    return Outcome(
        figures=[
            zero("bias against central differences", whole, tolerance=1e-7),
            exact("bias without the stop token's score", cut["relative_bias"], "1.3222"),
            exact("cosine without it", cut["cosine"], "0.3934"),
        ],
        stands=whole < 1e-7 and cut["relative_bias"] > 0.1,
    )


def _reference_ratio(problem: Problem, reference: Tensor) -> Tensor:
    """Log pi - log ref of each whole response, `[P M]`."""
    table = Responses(replace(problem, behavior_logp=reference))
    return (table.logp - table.behavior_logp).sum(-1)


@claim(
    "B-03",
    section=SECTION,
    statement="The same sum is the whole gradient only for data of the current policy, a reward "
    "that does not contain the parameters, and no KL term.",
    verdict="holds only if",
    condition="what depends on the parameters has a gradient whose mean is not zero; that of the "
    "log-ratio (k1 in the reward) is, and no term is missing",
    problem="TREE sampled from its own policy; the reward loses 0.5 f(log π/ref) of the response, "
    "ref the stale sampler.",
    formula="E[(R − 0.5 f) Σ s_t] against ∇ E[R − 0.5 f], f = k1, k2, k3",
)
def b_03() -> Outcome:
    problem, reference = fresh_tree(), tree().behavior_logp
    found = {}
    for term in (k1, k2, k3):

        def value(logits: Tensor, term: object = term) -> Tensor:
            now = replace(problem, logits=logits)
            paid = now.rewards - 0.5 * term(_reference_ratio(now, reference))  # type: ignore[operator]
            return (response_mass(now)[0] * paid).sum()

        full = central_differences(value, problem.logits)
        detached = shaped(-0.5 * term(_reference_ratio(problem, reference)))
        found[term.__name__] = relative(edited(REINFORCE, problem, detached).mean - full, full)
    return Outcome(
        figures=[
            zero("bias, k1", found["k1"], tolerance=1e-7),
            exact("bias, k2", found["k2"], "0.5442"),
            exact("bias, k3", found["k3"], "0.6108"),
        ],
        stands=min(found["k2"], found["k3"]) > 1e-3,
        limited=found["k1"] < 1e-7,
    )


@claim(
    "B-04",
    section=SECTION,
    statement="Subtracting a reference that never looks at the response itself does not move the "
    "mean of the update.",
    problem="TREE sampled from its own policy.",
    formula="E[(R − b) S] = ∇J for b a constant or a function of the prefix; not for b(response)",
)
def b_04() -> Outcome:
    problem = fresh_tree()
    blind = [bias(alone("reinforce", b), problem) for b in (0.5, -3.0)]
    wave = torch.sin(1 + 2 * count(problem.tree.prefixes))
    found = judge(edited(critic(), problem, valued(problem, wave)), problem)
    blind.append(found["relative_bias"])
    mass, lengths = response_mass(problem)[0], problem.lengths.double()
    same = (lengths.unsqueeze(-1) == lengths.unsqueeze(-2)).double() * mass.unsqueeze(1)
    by_length = (same * problem.rewards.unsqueeze(1)).sum(-1) / same.sum(-1)
    looking = [
        judge(edited(REINFORCE, problem, shaped(-b)), problem)
        for b in (lengths / 10, problem.rewards / 2, by_length)
    ]
    seeing = [f["relative_bias"] for f in looking]
    names = ("b = 0.5", "b = −3", "b = sin(1 + 2n) of the prefix")
    return Outcome(
        figures=[
            *(zero(f"bias, {n}", b) for n, b in zip(names, blind, strict=True)),
            *series("bias, b = {}", ("T/10", "R/2", "E[R | T]"), seeing, "0.3163, 0.5000, 0.7103"),
            zero("bias after rescaling, b = R/2", looking[1]["relative_bias_rescaled"]),
        ],
        stands=max(blind) < 1e-10 and min(seeing) > 1e-3,
    )


def _least_variance(problem: Problem) -> float:
    """The constant baseline of least variance, E[|S|^2 R] / E|S|^2."""
    mass, norm = response_mass(problem)[0], score_norms(problem)
    return float((mass * norm * problem.rewards).sum() / (mass * norm).sum())


@claim(
    "B-05",
    section=SECTION,
    statement="A reference chosen well makes the update less noisy at no cost in bias.",
    verdict="holds only if",
    condition="the baseline is well chosen: a constant far off, or a group mean where the mean "
    "reward is near the best constant already, raises the variance",
    problem="TREE sampled from its own policy, one response and groups of 2, 3, 4.",
    formula="var((R − b) S), b* = E[‖S‖² R]/E‖S‖²; rloo against no baseline",
)
def b_05() -> Outcome:
    problem = fresh_tree()
    best, mean = _least_variance(problem), mean_reward(problem)
    constants = [
        figures(alone("reinforce", b), problem)["variance"] for b in (0.0, mean, best, 2.0)
    ]
    at_best = rewarded(problem, problem.rewards - best)
    shifted = [figures(alone("reinforce", b), at_best)["variance"] for b in (0.0, mean - best)]
    centered = rewarded(problem, problem.rewards - mean)
    sizes = (2, 3, 4)
    grouped = [figures(get("rloo"), problem, g)["variance"] for g in sizes]
    bare = [figures(REINFORCE, centered, g)["variance"] for g in sizes]
    original = figures(REINFORCE, problem, 2)["variance"]
    worst = max(bias(alone("reinforce", b), problem) for b in (mean, best, 2.0))
    return Outcome(
        figures=[
            exact("b*", best, "0.46523"),
            *series(
                "var, b = {}",
                ("0", "E R", "b*", "2"),
                constants,
                "0.38707, 0.09870, 0.09669, 3.2569",
            ),
            *series("var, rewards less b*, {}", ("none", "mean"), shifted, "0.09669, 0.09870"),
            *series("var, rloo, G = {}", sizes, grouped, "0.09891, 0.04942, 0.03294"),
            *series("var, none at E R = 0, G = {}", sizes, bare, "0.04935, 0.03290, 0.02468"),
            exact("var, none with the original rewards, G = 2", original, "0.19354"),
            zero("bias, whatever the constant", worst),
        ],
        stands=constants[2] < constants[0] and grouped[0] < original and worst < 1e-10,
        limited=constants[3] > constants[0]
        and all(a > b for a, b in zip(grouped, bare, strict=True)),
    )


@claim(
    "B-06",
    section=SECTION,
    statement="A response that did better than the reference is made likelier, one that did worse "
    "less likely.",
    verdict="holds only if",
    condition="it stands alone; among the members of a batch even one above the mean may become "
    "less likely",
    problem="TREE, each response alone, b = E R; three arms p = (.5 .25 .25), a group holding each "
    "once with rewards 1, .6, 0.",
    formula="⟨∇log π(y), ĝ⟩ = (R − b)‖S‖² alone; d log π of each member along the group's update",
)
def b_06() -> Outcome:
    problem = fresh_tree()
    b = mean_reward(problem)
    table = Responses(problem)
    index = torch.arange(problem.tree.leaves).view(-1, 1, 1)
    score = scores(problem)
    update = table.gradients(index, alone("reinforce", b), table.batch(index, head=False))
    along = (score * update).sum((1, 2, 3))
    expected = (problem.rewards[0] - b) * score_norms(problem)
    agree = int((along.sign() == (problem.rewards[0] - b).sign()).sum())

    three = arms((0.5, 0.25, 0.25), (1.0, 0.6, 0.0))
    group = torch.arange(3).view(1, 1, 3)
    batch = Responses(three).batch(group, head=False)
    entry = get("group_mean")
    advantages = entry(batch).terms.advantages[0, 0, :, 0]
    mean_update = Responses(three).gradients(group, entry, batch)[0]
    change = 3 * (scores(three) * mean_update).sum((1, 2, 3))
    labels = ("1", "2", "3")
    return Outcome(
        figures=[
            equal("responses of 15 whose sign agrees", agree, 15),
            zero("distance from (R − b)‖S‖²", (along - expected).abs().max()),
            *series("advantage, member {}", labels, advantages, "0.4667, 0.0667, -0.5333"),
            *series("d log π, member {}", labels, change, "0.35, -0.05, -0.65"),
        ],
        stands=agree == problem.tree.leaves,
        limited=bool(((advantages > 0) & (change < 0)).any()),
    )


def _penalized(problem: Problem, reference: Tensor, coefficient: float) -> Tensor:
    """Mean update with k1 in the reward against a reference."""
    estimator = replace(REINFORCE, penalties=(use(reward_k1, coefficient=coefficient),))
    return edited(estimator, problem, recorded(problem, reference, "reference_logp")).mean


def _dropping(length: int) -> tuple[Estimator, Edit]:
    """REINFORCE on responses that stay below a length, and the edit that marks the others."""

    def marked(batch: Batch, index: Tensor) -> Batch:
        return replace(batch, truncated=batch.lengths >= length)

    return replace(REINFORCE, admission=(use(overlong),)), marked


@claim(
    "B-07",
    section=SECTION,
    statement="Four things can bend the mean update and must be told apart: the estimator, the "
    "objective, the selection of responses, and the reward.",
    problem="TREE: a response-level ratio capped at 1 on stale data; response-length mean, and a "
    "KL penalty of 0.5; responses of length 3 dropped; 0.5 more for a first token 0.",
    formula="bias or cosine of E ĝ and ∇J beside a control of bias 0",
)
def b_07() -> Outcome:
    stale, problem = tree(), fresh_tree()
    gradient = objective(problem).gradient
    b = mean_reward(stale)
    capped = bias(alone("sequence_tis", b, cap=1.0), stale)
    uncapped = bias(alone("trajectory_is", b), stale)
    by_mean = replace(alone("reinforce", mean_reward(problem)), aggregation=use(sequence_mean))
    shrunk = figures(by_mean, problem)["cosine"]
    penalized = cosine(_penalized(problem, stale.behavior_logp, 0.5), gradient)
    no_penalty = relative(_penalized(problem, stale.behavior_logp, 0.0) - gradient, gradient)
    estimator, marked = _dropping(3)
    dropped = judge(edited(estimator, problem, marked), problem)["cosine"]
    bonus = 0.5 * (problem.tree.paths[1][:, 0] == 0).double()
    other = rewarded(problem, problem.rewards + bonus)
    apart = cosine(objective(other).gradient, gradient)
    own = bias(REINFORCE, other)
    return Outcome(
        figures=[
            exact("bias, response ratio capped at 1", capped, "0.2813"),
            zero("bias, the same ratio uncapped", uncapped),
            exact("cosine, response-length mean", shrunk, "0.9391"),
            exact("cosine, KL penalty 0.5", penalized, "0.6570"),
            zero("bias, no penalty", no_penalty),
            exact("cosine, length 3 dropped", dropped, "0.7735"),
            exact("cosine, other reward", apart, "0.8579"),
            zero("bias to the other reward's own gradient", own),
        ],
        stands=capped > 0.01
        and max(shrunk, penalized, dropped, apart) < 0.99
        and max(uncapped, own) < 1e-10,
    )
