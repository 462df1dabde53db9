"""Document 001, on the reference policy of a KL penalty: what refreshing it does."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from windage.analysis.claims.claim import Outcome, claim, exact, series, zero
from windage.analysis.claims.measures import alone, corrected, divergence, edited
from windage.analysis.claims.problems import arms, fresh_tree, rewarded
from windage.estimators.batch import Batch
from windage.estimators.correction import clip, token
from windage.estimators.estimator import Estimator
from windage.estimators.member import use
from windage.estimators.penalty import loss_k1, loss_k2, loss_k3, reward_k1
from windage.toy.exact.tuples import Edit
from windage.toy.objective import objective
from windage.toy.problems import Problem

SECTION = "Refreshing the reference"
STEPS = 40
Schedule = Callable[[int], int]


def never(step: int) -> int:
    """The policy of the start, whatever the step."""
    return 0


def current(step: int) -> int:
    """The policy of the step itself."""
    return step


def every(steps: int) -> Schedule:
    """The policy of the last multiple of `steps`."""
    return lambda step: step - step % steps


def behind(step: int) -> int:
    """The policy of the step before."""
    return max(0, step - 1)


def referenced(problem: Problem, reference: Tensor) -> Edit:
    """Give each token its log-probability under a reference, `[P N V]`."""
    prefixes, tokens = (path.clamp(min=0) for path in problem.tree.paths)
    table = reference[:, prefixes, tokens]

    def edit(batch: Batch, index: Tensor) -> Batch:
        prompt = torch.arange(index.shape[1])[:, None]
        return replace(batch, reference_logp=torch.where(batch.mask, table[prompt, index], 0.0))

    return edit


def walk(
    problem: Problem,
    estimator: Estimator,
    *,
    reference: Schedule = never,
    sampler: Schedule = current,
    steps: int = STEPS,
    rate: float = 0.5,
    momentum: float = 0.0,
) -> list[Problem]:
    """Ascent along the exact mean update; the problem before each step, and after the last.

    Args:
        problem: at the start.
        estimator: of one response, its penalties included.
        reference, sampler: the step whose policy is the reference, or draws the responses.
        steps, rate: updates and their size.
        momentum: share of the last direction that is kept.
    """
    policies, path = [problem.logp], []
    direction = torch.zeros_like(problem.logits)
    for n in range(steps + 1):
        problem = replace(problem, behavior_logp=policies[sampler(n)])
        path.append(problem)
        if n < steps:
            edit = referenced(problem, policies[reference(n)])
            direction = momentum * direction + edited(estimator, problem, edit).mean
            problem = replace(problem, logits=problem.logits + rate * direction)
            policies.append(problem.logp)
    return path


def reward(problem: Problem) -> float:
    """Expected reward under the policy."""
    return float(objective(problem).value)


def penalized(penalty: Any, beta: float, estimator: Estimator | None = None) -> Estimator:
    """An estimator (default: `reinforce`) with a penalty of strength beta."""
    return replace(estimator or alone("reinforce"), penalties=(use(penalty, coefficient=beta),))


def _apart(a: Problem, b: Problem) -> float:
    return float((a.logits - b.logits).abs().max())


@claim(
    "G-01",
    section=SECTION,
    statement="The reference of the KL penalty may stay fixed, be refreshed every few steps or "
    "once an epoch; refreshing lets the policy move on.",
    note="for a verifiable reward; see G-05 for a proxy",
    problem="TREE sampled from its own policy, k3 in the loss, β = 0.1 and 1, 40 exact steps of "
    "0.5, reference refreshed every 20, 10, 4, 2, 1 steps or never.",
    formula="J and KL(π‖start) after the last step",
)
def g_01() -> Outcome:
    start = fresh_tree()
    periods = {"never": never, **{f"every {n}": every(n) for n in (20, 10, 4, 2, 1)}}

    def ends(beta: float) -> list[Problem]:
        estimator = penalized(loss_k3, beta)
        return [walk(start, estimator, reference=s)[-1] for s in periods.values()]

    weak, strong = ([reward(end) for end in ends(beta)] for beta in (0.1, 1.0))
    moved = [divergence(end, of=end.logp, to=start.logp) for end in ends(1.0)]
    j_weak = ".6104, .6207, .6255, .6282, .6291, .6295"
    j_strong = ".5482, .5704, .5935, .6161, .6250, .6295"
    away = ".0165, .0444, .1000, .1913, .2381, .2639"
    return Outcome(
        figures=[
            *series("J, β = 0.1, refresh {}", periods, weak, j_weak),
            *series("J, β = 1, refresh {}", periods, strong, j_strong),
            *series("KL from the start, β = 1, refresh {}", periods, moved, away),
        ],
        stands=all(found == sorted(found) for found in (weak, strong, moved)),
    )


def _pull(penalty: Any) -> tuple[float, float]:
    """Length of a penalty's mean update where reference and policy agree, and its mean square."""
    problem = fresh_tree()
    unpaid = rewarded(problem, torch.zeros(problem.tree.leaves))
    found = edited(penalized(penalty, 1.0), unpaid, referenced(unpaid, unpaid.logp))
    return float(found.mean.norm()), float(found.variance + found.mean.square().sum())


@claim(
    "G-02",
    section=SECTION,
    statement="A reference refreshed at every step is no reference at all.",
    verdict="holds only if",
    condition="each refresh is followed by one update, whose loss is taken while the two agree; "
    "refreshing often is less than that, and k1 in the loss keeps adding noise of mean zero",
    problem="TREE sampled from its own policy, β = 1, 40 exact steps of 0.5; also 10 refreshes "
    "with four passes of `clip` over each batch.",
    formula="largest difference of a logit from the run with β = 0",
)
def g_02() -> Outcome:
    start, none, strong = fresh_tree(), penalized(loss_k3, 0.0), penalized(loss_k3, 1.0)
    free = walk(start, none)[-1]
    always, late, second = (
        walk(start, strong, reference=s)[-1] for s in (every(1), behind, every(2))
    )
    (k1, noise), (k2, _), (k3, _) = (_pull(k) for k in (loss_k1, loss_k2, loss_k3))
    clipped = corrected("passes", token, clip)
    passes = [
        walk(start, penalized(loss_k3, beta, clipped), reference=s, sampler=every(4))[-1]
        for beta, s in ((1.0, every(4)), (0.0, never), (1.0, never))
    ]
    lagging, inner = _apart(late, free), _apart(passes[0], passes[1])
    names = ("refreshed each batch", "without penalty", "never refreshed")
    return Outcome(
        figures=[
            zero("logit difference, refreshed every step", _apart(always, free)),
            zero("‖gradient‖ of k2 in the loss, ref = π", k2),
            zero("‖gradient‖ of k3 in the loss, ref = π", k3),
            zero("‖mean gradient‖ of k1 in the loss, ref = π", k1),
            exact("E‖gradient of k1‖², one response", noise, "1.3416"),
            exact("logit difference, reference one step behind", lagging, ".0999"),
            exact("J, reference one step behind", reward(late), ".6215"),
            *series("J, four passes, {}", names, map(reward, passes), ".6155, .6292, .5482"),
            exact("logit difference, four passes", inner, ".1709"),
            exact("J, refreshed every 2", reward(second), ".6250"),
        ],
        stands=max(_apart(always, free), k1, k2, k3) < 1e-12,
        limited=min(lagging, inner) > 0.01 and noise > 0.1,
    )


BASE = torch.tensor([0.5, 0.3, 0.15, 0.05], dtype=torch.float64)
PAID = (0.0, 0.5, 0.8, 1.0)
TRUE = (0.1, 0.4, 0.6, 0.2)
PROXY = (0.0, 0.4, 0.7, 1.0)


def solved(problem: Problem, beta: float) -> Problem:
    """The optimum of E R − β KL(π‖the problem's policy): logits of the policy plus R/β."""
    tilt = (problem.rewards / beta).unsqueeze(1)
    return replace(problem, logits=(problem.logp + tilt).log_softmax(-1)).on_policy()


def rounds(problem: Problem, beta: float, count: int) -> list[Problem]:
    """Solve, take the optimum as reference, solve again; the optimum of each round."""
    path = [problem]
    for _ in range(count):
        path.append(solved(path[-1], beta))
    return path[1:]


@claim(
    "G-03",
    section=SECTION,
    statement="Refreshing and going on loosens the penalty.",
    problem="REF with rewards (0, 0.5, 0.8, 1), β = 0.5, rounds solved exactly.",
    formula="π_k ∝ π_{k−1} exp(R/β); k rounds are one round with β/k",
)
def g_03() -> Outcome:
    start = arms(BASE.tolist(), PAID)
    path, counts = rounds(start, 0.5, 4), range(1, 5)
    estimator = penalized(reward_k1, 0.5)
    slopes = [
        float(edited(estimator, end, referenced(end, begin.logp)).mean.norm())
        for begin, end in zip([start, *path], path, strict=False)
    ]
    at_once = [solved(start, 0.5 / k) for k in counts]
    gap = max(float((a.logp - b.logp).abs().max()) for a, b in zip(path, at_once, strict=True))
    paid = [reward(end) for end in path]
    moved = [divergence(end, of=end.logp, to=start.logp) for end in path]
    return Outcome(
        figures=[
            zero("k rounds against one with β/k, log-probabilities", gap),
            zero("‖mean update‖ at the optimum of a round", max(slopes)),
            *series("reward after round {}", counts, paid, ".5649, .7431, .8407, .8956"),
            *series("KL after round {}", counts, moved, ".2428, .7613, 1.2390, 1.6189"),
        ],
        stands=gap < 1e-12 and moved == sorted(moved) and paid == sorted(paid),
    )


@claim(
    "G-04",
    section=SECTION,
    statement="A new job that starts from the last checkpoint is a refresh of the reference.",
    verdict="holds only if",
    condition="the optimizer's state is carried over or there is none",
    problem="REF with rewards (0, 0.5, 0.8, 1), k1 in the reward, β = 0.5, 40 steps of 0.1; one "
    "job that refreshes at step 20 against two jobs of 20.",
    formula="J after the last step; direction = momentum · last direction + mean update",
)
def g_04() -> Outcome:
    start, estimator = arms(BASE.tolist(), PAID), penalized(reward_k1, 0.5)

    def ends(momentum: float) -> tuple[float, float]:
        one = walk(start, estimator, reference=every(20), rate=0.1, momentum=momentum)[-1]
        two = start
        for _ in range(2):
            two = walk(two, estimator, steps=20, rate=0.1, momentum=momentum)[-1]
        return reward(one), reward(two)

    plain, heavy = ends(0.0), ends(0.9)
    names = ("one job", "two jobs")
    return Outcome(
        figures=[
            *series("J, plain ascent, {}", names, plain, ".4333, .4333"),
            *series("J, momentum 0.9, {}", names, heavy, ".6898, .6741"),
        ],
        stands=abs(plain[0] - plain[1]) < 1e-12,
        limited=abs(heavy[0] - heavy[1]) > 1e-3,
    )


def _judged(problem: Problem, by: tuple[float, ...]) -> float:
    """Expected value of other rewards under a problem's policy."""
    return reward(rewarded(problem, torch.tensor(by)))


@claim(
    "G-05",
    section=SECTION,
    statement="Far from the base a learned reward is over-optimized, so β has to be tuned; a "
    "reward by rules bears more rounds.",
    problem="REF with true rewards (0.1, 0.4, 0.6, 0.2) and proxy (0, 0.4, 0.7, 1).",
    formula="π ∝ ref exp(proxy/β); proxy and true reward under π",
)
def g_05() -> Outcome:
    betas, exact_betas = (float("inf"), 1.0, 0.5, 0.3, 0.2, 0.1, 0.02), (1.0, 0.5, 0.2, 0.1, 0.02)
    proxied, honest = arms(BASE.tolist(), PROXY), arms(BASE.tolist(), TRUE)
    optima = [solved(proxied, beta) for beta in betas]
    proxy, true = [reward(p) for p in optima], [_judged(p, TRUE) for p in optima]
    direct = [reward(solved(honest, beta)) for beta in exact_betas]
    later, counts = [_judged(p, TRUE) for p in rounds(proxied, 0.5, 4)], range(1, 5)
    proxies = ".2750, .3799, .4952, .6409, .7802, .9535, 1.0000"
    trues = ".2700, .3157, .3523, .3736, .3576, .2538, .2000"
    peak = true.index(max(true))
    return Outcome(
        figures=[
            *series("proxy reward, β = {:g}", betas, proxy, proxies),
            *series("true reward, β = {:g}", betas, true, trues),
            *series(
                "true reward optimized itself, β = {:g}",
                exact_betas,
                direct,
                ".3076, .3468, .4530, .5478, .6000",
            ),
            *series("true reward after round {}", counts, later, ".3523, .3718, .3357, .2894"),
        ],
        stands=proxy == sorted(proxy)
        and direct == sorted(direct)
        and 0 < peak < len(true) - 1
        and later[-1] < max(later),
    )
