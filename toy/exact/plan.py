"""Pick the cheapest engine that is valid for an estimator on a problem, and say why."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, final

import torch

from windage.estimators.correction import geometric, prefix, suffix, token, trajectory
from windage.estimators.estimator import Estimator
from windage.toy.chains import Chain
from windage.toy.exact import penalties
from windage.toy.exact.affine import affine, by_response
from windage.toy.exact.automata import automaton, cost, refusal, sweep
from windage.toy.exact.classes import classes, count_classes, counts_tokens
from windage.toy.exact.coupled import engine as couplings
from windage.toy.exact.kept import kept
from windage.toy.exact.moments import Moments, Undefined
from windage.toy.exact.tuples import count_multisets, count_tuples, multisets, tuples
from windage.toy.problems import Problem

Site = Problem | Chain

# Numbers an engine may touch, and how many times more if it is asked for by name.
BUDGET = 3e8
PATIENCE = 10.0
# Numbers so few that the calls themselves take longer: no other engine is asked.
FEW = 2e4
ENGINES = ("tuples", "compositions", "classes", "coupled", "prefix_tree", "transfer", "sampling")


@final
@dataclass(frozen=True, kw_only=True)
class Option:
    """One engine's answer: why it cannot, or how many numbers it would touch."""

    engine: str
    refusal: str | None
    cost: float


@final
@dataclass(frozen=True, kw_only=True)
class Plan:
    """The engine chosen and the reason in words."""

    engine: str
    reason: str


LACKS = {
    "values": "values",
    "reference_logp": "a reference policy",
    "components": "parts of the reward",
    "elapsed": "times",
}
FIRST_PASS = "the proximal policy is the policy itself, as in the first pass over a batch"
INERT = {"versions", "truncated", "elapsed"}


def undefined(estimator: Estimator, problem: Site, group_size: int) -> str | None:
    """Why an estimator has no meaning on a problem at all, or None."""
    needs = estimator.needs_beside_admission
    for field, words in LACKS.items():
        if field in needs and getattr(problem, field, None) is None:
            return f"needs {words}, which a problem does not have"
    if estimator.compares and group_size < 2:
        return f"group 0 has size {group_size}; {estimator.name} needs groups of at least 2"
    subset = dict(estimator.advantage.settings).get("k", 0)
    if subset > group_size:
        return f"k is {subset:g}; a group of {group_size} has no subset of that size"
    if estimator.advantage.traits.rewards == "nonnegative" and bool((problem.rewards < 0).any()):
        return f"{estimator.name} needs rewards of at least 0, and the problem has others"
    return None


def assumed(estimator: Estimator, problem: Site) -> str:
    """What a row takes for granted where the problem does not say it, after a semicolon.

    Example:
        >>> from windage.estimators.catalogue import get
        >>> from windage.toy.problems import bandit
        >>> assumed(get("rloo"), bandit())
        ''
    """
    given = getattr(problem, "proximal_logp", None) is not None
    return f"; {FIRST_PASS}" if "proximal_logp" in estimator.needs and not given else ""


def _recursion(estimator: Estimator) -> str | None:
    known = (token, prefix, suffix, trajectory, geometric)
    for correction in estimator.corrections:
        if not correction.idle and correction.reach.function not in known:
            return f"no recursion for the reach {correction.reach.name}"
        if correction.scope == "batch":
            return f"{correction.map.name} looks at every token of the batch"
        if correction.reads == "value":
            return f"{correction.map.name} reads the advantage's value"
        if correction.map.traits.needs and correction.reach.function not in (token, prefix):
            return f"{correction.map.name} looks at the token under a ratio of the response"
    if sum(c.reach.function is suffix and not c.idle for c in estimator.corrections) > 1:
        return "two suffix ratios"
    for admission in estimator.admission:
        if not admission.traits.refill and INERT.isdisjoint(admission.traits.needs):
            return f"{admission.name} looks at the tokens of each response"
    if not {"rewards", "outcomes", "present"}.issuperset(estimator.advantage.traits.needs):
        return f"{estimator.advantage.name} looks at more than rewards"
    return None


def _penalized(estimator: Estimator) -> str | None:
    """What an engine that knows no penalties says."""
    if penalties.active(estimator):
        names = ", ".join(m.name for m in estimator.active_penalties)
        return f"{names} changes rewards or coefficients by token or length"
    return None


def _prefix_tree(
    estimator: Estimator, problem: Problem, group_size: int
) -> tuple[str | None, float]:
    traits = estimator.advantage.traits
    cost = 12.0 * problem.logits.numel()
    if why := _recursion(estimator) or penalties.refusal(estimator):
        return why, cost
    if estimator.aggregation.traits.scope != "response":
        return f"{estimator.aggregation.name} couples responses", cost
    if any(m.traits.refill for m in estimator.admission):
        return "admission is by group", cost
    if traits.scope == "response":
        return None, cost
    if not traits.linear:
        return f"{estimator.advantage.name} is not affine in the rewards", cost
    for correction in estimator.corrections:
        if correction.reads != "nothing":
            return f"{correction.map.name} looks at the sign of a group advantage", cost
    return None, cost


def _classes(estimator: Estimator, problem: Problem, group_size: int) -> tuple[str | None, float]:
    if why := _recursion(estimator) or penalties.refusal(estimator):
        return why, 0.0
    if estimator.advantage.traits.scope == "batch":
        return f"{estimator.advantage.name} couples prompts", 0.0
    terms = count_classes(estimator, problem, group_size)
    kinds = max(len(kinds) for kinds in problem.kinds)
    cost = 10.0 * terms * (group_size + kinds) + 12.0 * kinds * problem.logits.numel()
    if counts_tokens(estimator):  # a convolution over the other prompts' tokens
        pairs = problem.prompts * (problem.prompts - 1)
        cost += pairs * float(group_size * int(problem.lengths.max())) ** 2
    return None, cost


def _listing(count: Callable[..., float]) -> Callable[..., tuple[str | None, float]]:
    def option(estimator: Estimator, problem: Problem, group_size: int) -> tuple[str | None, float]:
        groups = count(problem, group_size, joint=estimator.scope == "batch")
        width = problem.tree.vocab if estimator.centering is not None else 1
        prompts = problem.prompts if estimator.scope == "batch" else 1
        tokens = prompts * group_size * int(problem.lengths.max()) * width * 20
        return None, groups * (tokens + prompts * problem.logits[0].numel() * 4)

    return option


def _transfer(estimator: Estimator, chain: Chain, group_size: int) -> tuple[str | None, float]:
    why = _recursion(estimator) or _penalized(estimator) or refusal(estimator, chain)
    return why, cost(estimator, chain)


def _coupled(estimator: Estimator, problem: Problem, group_size: int) -> tuple[str | None, float]:
    def unknown(rest: Estimator) -> str | None:
        return _recursion(rest) or _penalized(rest)

    return couplings.option(estimator, problem, group_size, unknown)


OPTIONS: dict[str, Callable[[Estimator, Any, int], tuple[str | None, float]]] = {
    "prefix_tree": _prefix_tree,
    "classes": _classes,
    "coupled": _coupled,
    "compositions": _listing(count_multisets),
    "tuples": _listing(count_tuples),
    "transfer": _transfer,
}


RUNS: dict[str, Callable[[Estimator, Any, int], Moments]] = {
    "by_response": by_response,
    "affine": affine,
    "classes": classes,
    "coupled": couplings.coupled,
    "compositions": multisets,
    "tuples": tuples,
    "transfer": automaton,
}


def _meets(engine: str, problem: Site) -> bool:
    """Whether an engine is for this kind of problem: one for chains, the others for trees."""
    return isinstance(problem, Chain) == (engine == "transfer")


def consider(
    engine: str, estimator: Estimator, problem: Site, group_size: int, *, budget: float = BUDGET
) -> Option:
    """What one exact engine says about an estimator on a problem."""
    if not _meets(engine, problem):
        kind = "automaton states" if engine == "transfer" else "a tree of prefixes"
        return Option(engine=engine, refusal=f"it serves policies with {kind}", cost=0.0)
    why, cost = OPTIONS[engine](estimator, problem, group_size)
    if why is None and cost > budget:
        why = f"would touch {cost:.1e} numbers, more than {budget:.0e}"
    return Option(engine=engine, refusal=why, cost=cost)


def options(estimator: Estimator, problem: Site, group_size: int) -> list[Option]:
    """What each exact engine says about an estimator on a problem."""
    served = [engine for engine in OPTIONS if _meets(engine, problem)]
    return [consider(engine, estimator, problem, group_size) for engine in served]


def plan(estimator: Estimator, problem: Site, group_size: int) -> Plan:
    """The cheapest valid engine, or the first that costs next to nothing; sampling where none is.

    Example:
        >>> from windage.estimators.catalogue import get
        >>> from windage.toy.problems import bandit
        >>> plan(get("rloo"), bandit(), 4).engine
        'prefix_tree'
    """
    found: list[Option] = []
    for engine in OPTIONS:
        if _meets(engine, problem):
            found.append(consider(engine, estimator, problem, group_size))
            if found[-1].refusal is None and found[-1].cost < FEW:
                break
    valid = [o for o in found if o.refusal is None]
    if not valid:
        why = "; ".join(f"{o.engine}: {o.refusal}" for o in found)
        reason = f"no exact engine ({why})"
        return Plan(engine="sampling", reason=reason + assumed(estimator, problem))
    best = min(valid, key=lambda o: o.cost)
    words = "few enough" if best.cost < FEW else "the fewest"
    reason = f"touches about {best.cost:.1e} numbers, {words}"
    return Plan(engine=best.engine, reason=reason + assumed(estimator, problem))


def exact(
    estimator: Estimator, problem: Site, group_size: int, engine: str | None = None
) -> Moments:
    """Run one exact engine; without a name, the planner's choice.

    Raises:
        Undefined: the engine is not valid here or would touch too much, the estimator has no
            meaning here, or a ratio of policy to sampler is so large (its square beyond float64)
            that a moment overflows.
    """
    if why := undefined(estimator, problem, group_size):
        raise Undefined(why)
    engine = engine or plan(estimator, problem, group_size).engine
    if engine not in OPTIONS:
        raise Undefined(f"engine {engine} does not serve {estimator.name}")
    budget = PATIENCE * BUDGET
    if refusal := consider(engine, estimator, problem, group_size, budget=budget).refusal:
        raise Undefined(f"engine {engine} is not valid: {refusal}")
    return compute(estimator, problem, group_size, engine)


def compute(
    estimator: Estimator,
    problem: Site,
    group_size: int,
    engine: str,
    among: tuple[int, ...] = (),
) -> Moments:
    """Run an exact engine that `plan` or `consider` found valid.

    Args:
        estimator: has a meaning on the problem.
        problem: keeps what other group sizes share.
        group_size: responses of a prompt.
        engine: its name.
        among: group sizes that will be asked for: a recursion over states serves all at once.

    Raises:
        Undefined: the estimator has no meaning here, or a ratio of policy to sampler is so large
            that a moment overflows.
    """
    if engine == "prefix_tree":
        engine = "by_response" if estimator.advantage.traits.scope == "response" else "affine"
    if isinstance(problem, Chain) and group_size in among:
        sizes = tuple(g for g in among if undefined(estimator, problem, g) is None)
        key = "group sizes", estimator, sizes
        (every,) = kept(problem, key, sweep, [(estimator, problem)], sizes)
        found = every[sizes.index(group_size)]
    else:
        found = RUNS[engine](estimator, problem, group_size)
    if not bool(torch.isfinite(found.variance + found.drift.sum())):
        raise Undefined("a ratio of policy to sampler overflows float64")
    return replace(found, variance=found.variance.clamp(min=0.0))


def seeded(seed: int) -> torch.Generator:
    """A generator of its own for a seed."""
    return torch.Generator().manual_seed(seed)
