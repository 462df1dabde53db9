"""Engines against one another, and against an enumeration that shares no code with them."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import pytest
from checks import assert_close
from problem_strategies import drawn, entry, typical

from windage.estimators.catalogue import ENTRIES, FIRST
from windage.toy.exact.moments import Moments, Undefined
from windage.toy.exact.plan import OPTIONS, exact, options, undefined
from windage.toy.problems import Problem, Tree

NAMES = [entry_.name for entry_ in FIRST if entry_.name != "ppo"]
SECOND = [e.name for e in ENTRIES if e.tier == 2 and not undefined(e, typical(), 2)]
SWEEPS, EACH = 10, 100
AFFORDABLE = 1e5


def outcome(name: str, problem: Problem, group_size: int, engine: str) -> Moments | None:
    """What an engine says; None where every group is degenerate."""
    try:
        return exact(entry(name, problem), problem, group_size, engine)
    except Undefined:
        return None


def same(found: Moments | None, expected: Moments | None, *, relative: float = 1e-10) -> None:
    """Equal mean, variance and drift, measured by the size of the estimate itself."""
    assert (found is None) == (expected is None)
    if found is None or expected is None:
        return
    assert_close(found.variance, expected.variance, relative=relative)
    size = float((expected.variance + expected.mean.square().sum()).sqrt())
    for a, b in ((found.mean, expected.mean), (found.drift, expected.drift)):
        largest = max(float(b.abs().max()), size)
        assert a.shape == b.shape and float((a - b).abs().max()) <= relative * largest + 1e-14


def compared(number: int, name: str) -> list[str]:
    """Engines that serve an entry on a problem, after comparing them."""
    problem = drawn(number)
    group_size = int(np.random.default_rng(10_000 + number).choice([1, 2, 2, 3, 4]))
    estimator = entry(name, problem)
    if undefined(estimator, problem, group_size):
        return []
    engines = [
        o.engine
        for o in options(estimator, problem, group_size)
        if o.refusal is None and o.cost < AFFORDABLE
    ]
    found = [outcome(name, problem, group_size, engine) for engine in engines]
    for engine, moments in zip(engines[1:], found[1:], strict=True):
        try:
            same(moments, found[0])
        except AssertionError as why:
            where = f"drawn({number}), {name}, G={group_size}: {engine} and {engines[0]}"
            raise AssertionError(f"{where}: {why}") from None
    return engines


@pytest.mark.parametrize("sweep", range(SWEEPS))
def test_engines_agree_on_generated_problems(sweep: int) -> None:
    """1,000 problems in all, every entry and every engine among each hundred."""
    served = {
        (number, NAMES[number % len(NAMES)]): compared(number, NAMES[number % len(NAMES)])
        for number in range(sweep * EACH, (sweep + 1) * EACH)
    }
    assert {name for (_, name), engines in served.items() if engines} == set(NAMES)
    assert {e for engines in served.values() for e in engines} == set(OPTIONS) - {"transfer"}
    several = sum(len(engines) > 1 for engines in served.values())
    assert several >= EACH // 2, f"only {several} problems have two engines"


@pytest.mark.parametrize("name", SECOND)
def test_engines_agree_on_entries_of_the_second_tier(name: str) -> None:
    seen: list[list[str]] = []
    for number in itertools.count(20_000 + 101 * SECOND.index(name)):
        seen += [engines] if len(engines := compared(number, name)) > 1 else []
        if len(seen) == 6:
            return


# The second opinion: plain Python and numpy, nothing of windage but the problem's numbers.


@dataclass(frozen=True)
class Response:
    """Tokens as (row of the parameters, token), ratios, reward, length, and its probability."""

    steps: list[tuple[int, int]]
    ratio: np.ndarray
    reward: float
    length: int
    chance: float


def all_prefixes(tree: Tree) -> list[tuple[int, ...]]:
    going = [v for v in range(tree.vocab) if v != tree.stop]
    return [p for t in range(tree.horizon) for p in itertools.product(going, repeat=t)]


def all_responses(tree: Tree) -> list[tuple[int, ...]]:
    found = []
    for prefix in all_prefixes(tree):
        for token in range(tree.vocab):
            if token == tree.stop or len(prefix) == tree.horizon - 1:
                found.append((*prefix, token))
    return sorted(found, key=lambda tokens: (len(tokens), tokens))


def softmax(logits: np.ndarray) -> np.ndarray:
    odds = np.exp(logits - logits.max(-1, keepdims=True))
    return odds / odds.sum(-1, keepdims=True)


def written_out(problem: Problem, prompt: int) -> list[Response]:
    """Every response of a prompt."""
    place = {prefix: n for n, prefix in enumerate(all_prefixes(problem.tree))}
    policy = softmax(problem.logits[prompt].numpy())
    sampler = np.exp(problem.behavior_logp[prompt].numpy())
    found = []
    for k, tokens in enumerate(all_responses(problem.tree)):
        steps = [(place[tokens[:t]], token) for t, token in enumerate(tokens)]
        pi = np.array([policy[s] for s in steps])
        mu = np.array([sampler[s] for s in steps])
        found.append(
            Response(
                steps=steps,
                ratio=pi / mu,
                reward=float(problem.rewards[prompt, k]),
                length=len(tokens),
                chance=float(mu.prod()),
            )
        )
    return found


def by_hand_advantages(kind: str, r: np.ndarray) -> np.ndarray:
    if kind == "reward":
        return r
    if kind == "others":
        return np.array([x - np.delete(r, i).mean() for i, x in enumerate(r)])
    if np.ptp(r) == 0:
        return np.zeros_like(r)
    if kind == "mean":
        return r - r.mean()
    return (r - r.mean()) / (math.sqrt(((r - r.mean()) ** 2).sum() / (len(r) - 1)) + 1e-6)


def ppo(low: float, high: float) -> Callable[[np.ndarray, float], np.ndarray]:
    def weigh(ratio: np.ndarray, a: float) -> np.ndarray:
        dropped = ratio > 1 + high if a > 0 else ratio < 1 - low if a < 0 else ratio < 0
        return np.where(dropped, 0.0, ratio)

    return weigh


def whole(f: Callable[[float, float], float]) -> Callable[[np.ndarray, float], np.ndarray]:
    return lambda ratio, a: np.full(len(ratio), f(float(ratio.prod()), a))


def gspo(ratio: np.ndarray, a: float) -> np.ndarray:
    middle = np.full(len(ratio), ratio.prod() ** (1 / len(ratio)))
    return ppo(3e-4, 4e-4)(middle, a)


def inside(ratio: np.ndarray, a: float) -> np.ndarray:
    return np.where((ratio >= 0.5) & (ratio <= 5.0), ratio, 0.0)


def at_most(cap: float) -> Callable[[np.ndarray, float], np.ndarray]:
    return lambda ratio, a: np.minimum(ratio, cap)


def unweighted(ratio: np.ndarray, a: float) -> np.ndarray:
    return np.ones(len(ratio))


# advantage, weight, scale, score centering
BY_HAND = {
    "reinforce": ("reward", unweighted, "sum", False),
    "rloo": ("others", unweighted, "sum", False),
    "group_mean": ("mean", unweighted, "sum", False),
    "grpo": ("std", ppo(0.2, 0.2), "sequence", False),
    "dr_grpo": ("mean", ppo(0.2, 0.2), "horizon", False),
    "dapo": ("std", ppo(0.2, 0.28), "tokens", False),
    "trajectory_is": ("others", whole(lambda w, a: w), "sum", False),
    "token_is": ("others", lambda ratio, a: ratio, "sum", False),
    "prefix_is": ("others", lambda ratio, a: np.cumprod(ratio), "sum", False),
    "suffix_is": ("others", lambda ratio, a: np.cumprod(ratio[::-1])[::-1], "sum", False),
    "token_tis": ("others", at_most(2.0), "sum", False),
    "sequence_tis": ("others", whole(lambda w, a: min(w, 2.0)), "sum", False),
    "cispo": ("std", at_most(5.0), "tokens", False),
    "icepop": ("mean", inside, "tokens", False),
    "gspo": ("std", gspo, "sequence", False),
    "topr": ("reward", whole(lambda w, a: 1.0 if a >= 0 else min(w, 1.0)), "sum", False),
    "positives_only": ("reward", whole(lambda w, a: float(a >= 0)), "sum", False),
    "naive": ("reward", unweighted, "sum", False),
    "tis_both_signs": ("reward", whole(lambda w, a: min(w, 1.0)), "sum", False),
    "centered": ("mean", unweighted, "sum", True),
    "centered_tis": ("mean", at_most(2.0), "sum", True),
    "centered_mask": ("mean", inside, "sum", True),
    "starting_point": ("mean", at_most(5.0), "horizon", True),
}


def by_hand(name: str, problem: Problem, group_size: int) -> tuple[np.ndarray, float, float]:
    """Mean, variance and chance of a batch that is used, from every batch written out."""
    advantage, weigh, scale, centered = BY_HAND[name]
    prompts = [written_out(problem, p) for p in range(problem.prompts)]
    policy = softmax(problem.logits.numpy())
    sampler = np.exp(problem.behavior_logp.numpy())
    total = problem.prompts * group_size
    first, second, used = np.zeros(policy.shape), 0.0, 0.0
    groups = [itertools.product(prompt, repeat=group_size) for prompt in prompts]
    for batch in itertools.product(*groups):
        chance = math.prod(response.chance for group in batch for response in group)
        rewards = [np.array([response.reward for response in group]) for group in batch]
        if name == "dapo" and any(np.ptp(r) == 0 for r in rewards):
            continue
        tokens = sum(response.length for group in batch for response in group)
        estimate = np.zeros(policy.shape)
        for p, group in enumerate(batch):
            advantages = by_hand_advantages(advantage, rewards[p])
            for response, a in zip(group, advantages, strict=True):
                share = {
                    "sum": 1 / total,
                    "sequence": 1 / (total * response.length),
                    "horizon": 1 / (total * problem.tree.horizon),
                    "tokens": 1 / tokens,
                }[scale]
                weights = weigh(response.ratio, a)
                for (row, token), w in zip(response.steps, weights, strict=True):
                    score = -policy[p, row].copy()
                    score[token] += 1
                    estimate[p, row] += share * a * w * score
                    if not centered:
                        continue
                    for v in range(problem.tree.vocab):
                        q = sampler[p, row, v]
                        if q > 0:
                            score = -policy[p, row].copy()
                            score[v] += 1
                            ratio = np.array([policy[p, row, v] / q])
                            estimate[p, row] -= share * a * q * weigh(ratio, a)[0] * score
        first += chance * estimate
        second += chance * (estimate**2).sum()
        used += chance
    if used == 0:
        return first, 0.0, 0.0
    return first / used, second / used - ((first / used) ** 2).sum(), used


def covered(problem: Problem) -> bool:
    """Every response is drawn with a probability that numpy divides by without trouble."""
    return bool(problem.behavior_logp.isfinite().all() and problem.behavior_logp.min() > -40)


def small(number: int) -> tuple[Problem, int] | None:
    """A problem of which every batch can be written out, and a group size."""
    problem = drawn(number, leaves=7, prompts=(1, 1, 2))
    group_size = 2 + number % 2
    batches = problem.tree.leaves ** (problem.prompts * group_size)
    return (problem, group_size) if batches <= 400 and covered(problem) else None


@pytest.mark.parametrize("name", NAMES)
def test_every_engine_equals_what_is_written_out_by_hand(name: str) -> None:
    seen = 0
    for number in itertools.count(5_000 + 101 * NAMES.index(name)):
        if (found := small(number)) is None:
            continue
        problem, group_size = found
        mean, variance, used = by_hand(name, problem, group_size)
        for option in options(entry(name, problem), problem, group_size):
            if option.refusal is not None:
                continue
            moments = outcome(name, problem, group_size, option.engine)
            assert (moments is None) == (used == 0), f"drawn({number}) {option.engine}"
            if moments is not None:
                assert_close(moments.mean, mean)
                assert_close(moments.variance, max(variance, 0.0), relative=1e-10)
        seen += 1
        if seen == 6:
            return


def test_by_hand_covers_the_first_tier() -> None:
    assert set(BY_HAND) == set(NAMES)
