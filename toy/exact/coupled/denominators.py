"""What the coupled engine says of denominators, baselines by length and statistics of the batch."""

from __future__ import annotations

import math
from dataclasses import replace

from windage.estimators.advantage import group_mean
from windage.estimators.estimator import Estimator
from windage.estimators.member import use
from windage.estimators.whitening import whitened_returns
from windage.toy.exact.classes import counts_tokens, signs
from windage.toy.exact.coupled.apart import apart, leaves_itself_out
from windage.toy.exact.coupled.baseline import over_lengths
from windage.toy.exact.coupled.batch import KEYS, batch, by_length
from windage.toy.exact.coupled.ratios import is_sums, ratios
from windage.toy.exact.coupled.tokens import POWERS, tokens
from windage.toy.exact.coupled.weights import normalized, own_weight, refusal, weights
from windage.toy.exact.moments import Moments
from windage.toy.exact.prefix_tree import reads_sign
from windage.toy.exact.tuples import ways
from windage.toy.problems import Problem

# Nodes of a quotient whose values differ by a factor of ten, times numbers touched at each.
NODES = 50.0


def serves(estimator: Estimator) -> bool:
    """Whether a denominator or a statistic of the batch couples the responses."""
    return (
        normalized(estimator) is not None
        or counts_tokens(estimator)
        or over_lengths(estimator)
        or leaves_itself_out(estimator)
        or estimator.advantage.function in KEYS
    )


def plain(estimator: Estimator) -> Estimator:
    """The estimator with what this engine treats itself put by what looks at a response alone."""
    if found := normalized(estimator):
        rest = tuple(c for c in estimator.corrections if c is not found)
        estimator = replace(estimator, corrections=(*rest, own_weight(found)))
    itself = over_lengths(estimator) or leaves_itself_out(estimator)
    if itself or estimator.advantage.function in KEYS:
        estimator = replace(estimator, advantage=use(group_mean))
    return estimator


def why_not(estimator: Estimator, problem: Problem) -> str | None:
    """Why the engine is not valid, of an estimator that it serves and that is otherwise plain."""
    advantage, aggregation = estimator.advantage, estimator.aggregation
    if why := refusal(estimator, problem):
        return why
    if counts_tokens(estimator) and aggregation.function not in POWERS:
        return f"{aggregation.name} is not a quotient by a sum over responses"
    if advantage.traits.scope == "batch" and advantage.function not in KEYS:
        return f"{advantage.name} couples prompts by more than a sum"
    if advantage.function is whitened_returns and dict(advantage.settings)["gamma"] != 1:
        return f"{advantage.name} differs by token where gamma is not 1"
    if over_lengths(estimator) or leaves_itself_out(estimator):
        if reads_sign(estimator):
            return f"a map looks at the sign of an advantage of {advantage.name}"
        if normalized(estimator) is not None:
            return f"{advantage.name} has another denominator than the weights"
        if any(m.traits.refill for m in estimator.admission):
            return f"admission is by group under {advantage.name}"
    if leaves_itself_out(estimator) and counts_tokens(estimator):
        return f"{advantage.name} has another denominator than {aggregation.name}"
    return None


def cost(estimator: Estimator, problem: Problem, group_size: int) -> float:
    """About how many numbers the engine touches."""
    leaves, size = float(problem.tree.leaves), float(problem.logits[0].numel())
    nodes = NODES * (2.0 if normalized(estimator) else 1.0)
    number, kinds = len(signs(estimator)), _kinds(estimator, problem)
    several = problem.prompts > 1
    tilts = nodes
    if leaves_itself_out(estimator) or (
        over_lengths(estimator) and several and counts_tokens(estimator)
    ):
        tilts = nodes**2
    if not (normalized(estimator) or counts_tokens(estimator) or over_lengths(estimator)):
        nodes = tilts = nodes if leaves_itself_out(estimator) else 1.0
    values = leaves if normalized(estimator) else float(len(problem.sizes))
    features, rows = 6.0, 0.0
    if not (is_sums(estimator) or leaves_itself_out(estimator)):
        features, rows = float(number * kinds), ways(kinds, group_size)
        rows *= _values(estimator, problem, group_size)
    vectors = features * min(values, nodes)
    mass = tilts * values * (2.0 if several else 1.0) + 10.0 * leaves
    pairs = vectors * (10.0 * size + 4.0 * leaves) + vectors * features * size
    return problem.prompts * (mass + pairs + rows * tilts * features**2 + 4e4)


def _kinds(estimator: Estimator, problem: Problem) -> int:
    """Most classes of a prompt that groups are counted by."""
    apart_ = estimator.advantage.function in KEYS and by_length(estimator.advantage)
    return max(len(k) if apart_ else len(k[:, 0].unique()) for k in problem.kinds)


def _values(estimator: Estimator, problem: Problem, group_size: int) -> float:
    """Most values of a statistic over the other prompts."""
    if estimator.advantage.function not in KEYS:
        return 1.0
    one = ways(_kinds(estimator, problem), group_size)
    exponent = problem.prompts - 1
    most = one * exponent * group_size if one <= group_size + 1 else math.inf
    return min(most if exponent else 1.0, one**exponent if exponent < 20 else math.inf)


def run(estimator: Estimator, problem: Problem, group_size: int) -> Moments:
    """Mean, variance and drift."""
    if leaves_itself_out(estimator):
        return apart(estimator, problem, group_size)
    make = weights if normalized(estimator) else tokens
    shared = make(estimator, problem, group_size)
    chosen = batch if estimator.advantage.function in KEYS else ratios
    return chosen(shared, problem, group_size)
