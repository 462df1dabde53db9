"""Document 001, on passes over the same responses, the clip, and running one step behind."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from windage.analysis.claims.b_queue import QUEUE
from windage.analysis.claims.claim import (
    Figure,
    Outcome,
    around,
    band,
    claim,
    counted,
    exact,
    series,
    zero,
)
from windage.analysis.claims.g_reference import never, walk
from windage.analysis.claims.measures import bias, corrected, mean_reward
from windage.analysis.claims.problems import fresh_tree, sampled_by
from windage.estimators.advantage import group_mean
from windage.estimators.aggregation import token_mean
from windage.estimators.correction import clip, ratio, token
from windage.estimators.estimator import Estimator, coefficients
from windage.estimators.member import use
from windage.toy.exact.tuples import Responses
from windage.toy.exact.walk import Walk
from windage.toy.pipeline.laws import Equal
from windage.toy.pipeline.run import simulate
from windage.toy.pipeline.settings import Pipeline
from windage.toy.problems import Problem
from windage.toy.sampling import draw

SECTION = "Passes, the clip and the lag"
SEEDS, GROUP = 40, 32


def optimizer_steps(
    epochs: int, prompts: int, step: int, passes: int, minibatches: int
) -> Iterator[tuple[int, int, int, int]]:
    """Epoch over the data, training step, pass and mini-batch of every optimizer step."""
    for epoch in range(epochs):
        for training in range(prompts // step):
            for turn in range(passes):
                for part in range(minibatches):
                    yield epoch, training, turn, part


@claim(
    "G-06",
    section=SECTION,
    statement="Passes over the responses of a step are not epochs over the data.",
    note="accumulating gradients equals one batch only with denominators of the whole batch",
    kind="counted",
    problem="1,024 prompts, 64 a training step, 4 passes of 4 mini-batches; a token mean over "
    "responses of 2, 2, 6, 6 tokens, whole and in micro-batches of two.",
    formula="1/16 for every token of the whole batch; 1/2 · 1/4 and 1/2 · 1/12 by micro-batch",
)
def g_06() -> Outcome:
    epochs = 3
    steps = list(optimizer_steps(epochs, 1024, 64, 4, 4))
    kinds = ("epochs", "training steps", "passes")
    begun = [len({s[: depth + 1] for s in steps}) / epochs for depth in range(3)]
    fresh = sum(turn == part == 0 for *_, turn, part in steps)
    lengths = torch.tensor([[2, 2, 6, 6]])
    whole = token_mean(lengths, torch.ones_like(lengths, dtype=torch.bool))
    parts = [part / 2 for part in (token_mean(h, h > 0) for h in lengths.split(2, 1))]
    return Outcome(
        figures=[
            counted("optimizer steps an epoch", len(steps) / epochs, 256),
            *(
                counted(f"refreshes an epoch, tied to {kind}", found, stated)
                for kind, found, stated in zip(kinds, begun, (1, 16, 64), strict=True)
            ),
            counted("share of optimizer steps at the sampling policy", fresh / len(steps), 1 / 16),
            counted("token's coefficient, whole batch, least", float(whole.min()), 1 / 16),
            counted("token's coefficient, whole batch, largest", float(whole.max()), 1 / 16),
            counted("token's coefficient, micro-batch of short", float(parts[0].max()), 1 / 8),
            zero("token's coefficient, micro-batch of long, minus 1/24", parts[1].max() - 1 / 24),
        ],
        stands=begun == sorted(set(begun)) and float(whole.min()) == float(whole.max()),
    )


def weights(estimator: Estimator, problem: Problem) -> tuple[Tensor, Tensor]:
    """Weights of the tokens of each response alone, and which are tokens, `[M T]` each."""
    table = Responses(problem)
    batch = table.batch(torch.arange(problem.tree.leaves).view(-1, 1, 1), head=False)
    return coefficients(estimator, batch).weights[:, 0, 0], batch.mask[:, 0, 0]


def clipped_share(estimator: Estimator, problem: Problem) -> float:
    """Share of the sampled tokens whose weight is 0."""
    weight, mask = weights(estimator, problem)
    flow = Walk(problem).leaf_flow[0]
    return float(flow @ ((weight == 0) & mask).double().sum(1) / (flow @ mask.double().sum(1)))


@claim(
    "G-07",
    section=SECTION,
    statement="With one update for each batch of responses the clip never acts.",
    verdict="holds only if",
    condition="a batch serves a single optimizer step and old log-probabilities were computed with "
    "those very weights, in that arithmetic; with lag, mini-batches or another sampler it acts "
    "from the first step",
    problem="TREE, baseline E R: sampled from its own policy; sampled with logits rounded to 0.5.",
    formula="coefficient r or 0 of PPO's surrogate at r = π/μ, ε = 0.01, 0.2, 10",
)
def g_07() -> Outcome:
    problem = fresh_tree()
    baseline, widths = mean_reward(problem), (0.01, 0.2, 10.0)
    off = []
    for width in widths:
        entry = corrected("clip", token, clip, baseline, clip_low=width, clip_high=width)
        weight, mask = weights(entry, problem)
        off.append(float((weight - 1).abs()[mask].max()))
    rounded = sampled_by(problem, (problem.logits / 0.5).round() * 0.5)
    share = clipped_share(corrected("clip", token, clip, baseline), rounded)
    return Outcome(
        figures=[
            *(
                zero(f"largest |coefficient − 1|, ε = {w:g}", v)
                for w, v in zip(widths, off, strict=True)
            ),
            exact("share of tokens without gradient, rounded sampler", share, "0.0246"),
        ],
        stands=max(off) < 1e-12,
        limited=share > 1e-3,
    )


@claim(
    "G-08",
    section=SECTION,
    statement="After the first step the responses are off-policy; the clip keeps the policy near, "
    "it does not stop it.",
    note="see B-29",
    problem="TREE, exact mean updates of 1 over responses of the first policy, advantage R − E R, "
    "clip 0.2 and none.",
    formula="bias against ∇J of the current policy; share of tokens clipped; r = π/old",
)
def g_08() -> Outcome:
    start, passes = fresh_tree(), (1, 2, 4, 8, 16)
    baseline = mean_reward(start)
    bounded, free = (corrected("pass", token, map_, baseline) for map_ in (clip, ratio))
    near, far = (walk(start, entry, sampler=never, steps=64, rate=1.0) for entry in (bounded, free))
    at = [near[n - 1] for n in passes]
    biases = [bias(bounded, problem) for problem in at]
    shares = [clipped_share(bounded, problem) for problem in at]
    moved = [float((Walk(problem).log_ratio.exp() - 1).abs().max()) for problem in at]

    def away(problem: Problem) -> tuple[float, float]:
        measure = Walk(problem)
        kl = -(measure.leaf_flow * measure.at_leaves(measure.path_ratio)).sum()
        return float(kl), float(measure.log_ratio.exp().max())

    (kl_near, ratio_near), (kl_far, ratio_far) = away(near[-1]), away(far[-1])
    return Outcome(
        figures=[
            zero("bias at pass 1", biases[0]),
            *series("bias at pass {}", passes[1:], biases[1:], ".0197, .0566, .6995, 1.2367"),
            *(
                zero(f"share clipped at pass {n}", v)
                for n, v in zip(passes[:3], shares, strict=False)
            ),
            *series("share clipped at pass {}", passes[3:], shares[3:], ".2014, .4382"),
            zero("largest |r − 1| at pass 1", moved[0]),
            *series("largest |r − 1| at pass {}", passes[1:], moved[1:], ".057, .160, .243, .341"),
            *series("KL(old‖new), {}", ("clip", "no clip"), (kl_near, kl_far), ".0642, .9525"),
            *series("ratio, {}", ("clip", "no clip"), (ratio_near, ratio_far), "1.530, 3.136"),
        ],
        stands=biases == sorted(biases) and 0 < kl_near < kl_far / 2 and ratio_near > 1.2,
    )


def copies(problem: Problem, count: int) -> Problem:
    """Independent copies of a problem, side by side as its prompts."""
    return replace(
        problem,
        logits=problem.logits.repeat(count, 1, 1),
        behavior_logp=problem.behavior_logp.repeat(count, 1, 1),
        rewards=problem.rewards.repeat(count, 1),
        lengths=problem.lengths.repeat(count, 1),
    )


LEARNER = replace(corrected("group mean", token, clip), advantage=use(group_mean))


def learned(
    batches: int, passes: int, *, seed: int, lag: int = 0, rate: float = 0.2
) -> tuple[float, float]:
    """J after training on sampled groups, mean over copies of TREE and its standard error.

    Args:
        batches: of 32 responses, each drawn once.
        passes: updates on each batch.
        seed: of the generator.
        lag: batches between the policy that draws a batch and the one it updates.
        rate: step size.
    """
    problem, generator = copies(fresh_tree(), SEEDS), torch.Generator().manual_seed(seed)
    policies = [problem.logp]
    for batch in range(batches):
        sampler = policies[max(0, batch - lag)]
        index = draw(Responses(replace(problem, behavior_logp=sampler)), 1, GROUP, generator)
        for _ in range(passes):
            table = Responses(replace(problem, behavior_logp=sampler))
            update = table.gradients(index, LEARNER, table.batch(index, head=False))[0]
            problem = replace(problem, logits=problem.logits + rate * SEEDS * update)
        policies.append(problem.logp)
    paid = (Walk(problem.on_policy()).leaf_flow * problem.rewards).sum(1)
    return float(paid.mean()), float(paid.std() / math.sqrt(SEEDS))


def _within(name: str, found: tuple[float, float], printed: float, error: float) -> Figure:
    """A mean within four standard errors of a printed one, which has an error of its own."""
    margin = 4 * math.hypot(found[1], error)
    return around(name, found[0], printed, margin, standard_error=found[1])


def _drop(better: tuple[float, float], worse: tuple[float, float]) -> float:
    """Difference of two independent means in standard errors."""
    return (better[0] - worse[0]) / math.hypot(better[1], worse[1])


@claim(
    "G-09",
    section=SECTION,
    statement="The more offline the updates are, the lower the performance.",
    verdict="holds only if",
    condition="updates are what is held equal; for the same number of responses more passes win "
    "here, and the first four are free",
    kind="simulated",
    problem="TREE, group mean, G = 32, clip 0.2, step 0.2, 40 copies.",
    formula="J after batches × passes; old: every batch drawn from the first policy",
)
def g_09(*, seed: int = 0) -> Outcome:
    shapes = ((64, 1), (16, 4), (4, 16), (1, 64))
    split = [learned(*shape, seed=seed + k) for k, shape in enumerate(shapes)]
    turns = (1, 4, 16, 64)
    passes = [learned(16, n, seed=seed + 4 + k) for k, n in enumerate(turns)]
    old = learned(64, 1, lag=64, seed=seed + 8)
    figures = [
        *(
            _within(f"J, 64 updates as {b} × {p}", found, printed, 0.0015)
            for (b, p), found, printed in zip(
                shapes, split, (0.5950, 0.5948, 0.5914, 0.5577), strict=True
            )
        ),
        *(
            _within(f"J, 16 batches with {n} passes", found, printed, 0.0015)
            for n, found, printed in zip(
                turns, passes, (0.5301, 0.5948, 0.6780, 0.7053), strict=True
            )
        ),
        _within("J, 64 updates, responses of the first policy", old, 0.565, 0.0015),
        band("largest standard error", max(e for _, e in (*split, *passes, old)), 0, 0.004),
    ]
    worse = min(_drop(split[0], split[3]), _drop(split[0], old)) > 4
    alike = abs(split[0][0] - split[1][0]) < 0.003
    return Outcome(
        figures=figures,
        stands=worse and alike,
        limited=all(_drop(b, a) > 4 for a, b in pairwise(passes)),
        seeds=tuple(range(seed, seed + 9)),
    )


@claim(
    "G-10",
    section=SECTION,
    statement="Running one step behind does no harm and lets writing and training overlap.",
    note="many steps behind does harm",
    kind="simulated",
    problem=f"TREE as in G-09 with step 1; {QUEUE.replace('update 0.5', 'lognormal, update 4')}.",
    formula="J after 64 batches; step time: slowest + update against max(slowest, update)",
)
def g_10(*, seed: int = 0) -> Outcome:
    lags = (0, 1, 4, 16, 63)
    found = [learned(64, 1, lag=lag, rate=1.0, seed=seed + k) for k, lag in enumerate(lags)]
    durations, overlap = (
        np.diff(simulate(Pipeline(mode=mode, update=Equal(4.0)), 20_000, generator).steps["commit"])
        for mode, generator in (
            ("synchronous", np.random.default_rng(seed)),
            ("overlap", np.random.default_rng(seed + 1)),
        )
    )
    printed = (0.6879, 0.6878, 0.6871, 0.6593, 0.5814)
    return Outcome(
        figures=[
            *(
                _within(f"J, lag {lag}", f, p, 0.0003)
                for lag, f, p in zip(lags, found, printed, strict=True)
            ),
            *(
                around(name, times.mean(), stated, 0.03 * stated, standard_error=_error(times))
                for name, times, stated in (
                    ("step time, sequential", durations, 11.1),
                    ("step time, overlapped", overlap, 7.2),
                )
            ),
        ],
        stands=abs(found[0][0] - found[1][0]) < 0.002
        and float(overlap.mean()) < float(durations.mean())
        and _drop(found[0], found[4]) > 4,
        seeds=tuple(range(seed, seed + 5)),
    )


def _error(values: np.ndarray) -> float:
    """Standard error of a mean of independent values."""
    return float(values.std(ddof=1) / math.sqrt(len(values)))
