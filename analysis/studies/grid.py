"""The grid of a study: which problem, sampler, group size and estimator each row is of."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import product
from typing import Any, final

from windage.estimators.catalogue import CATALOGUE, FIRST
from windage.estimators.errors import BadInput
from windage.toy.behavior import KINDS, with_behavior
from windage.toy.chains import CHAINS
from windage.toy.exact.plan import Site
from windage.toy.problem_file import Document, to_problem
from windage.toy.problems import BUILT_IN

Number = int | float
Values = Mapping[str, Number]
Given = tuple[tuple[str, Number], ...]

PROBLEMS: Mapping[str, Callable[..., Site]] = {**BUILT_IN, **CHAINS}


@final
@dataclass(frozen=True, kw_only=True)
class Settings:
    """What a study is of.

    Args:
        problem: a checked file, or a built-in name with its arguments.
        estimators: names of the catalogue, each with settings.
        group_size: responses of a prompt.
        behavior: a kind and its settings; None: the file's sampler, or the policy itself.
        sweep: values of keys, all combinations; a key goes to whatever has it (the group size, the
            behavior policy, a built-in problem, the estimators) in place of what was set there.
        engine: "auto", "sampling" or one of the exact engines.
        seed: of whatever is drawn.
        samples: most batches of a sampled row; None: about ten seconds' worth.
        error: root mean squared error, in units of the gradient, that rows are to reach.
        covariance: add the covariance blocks of every row to the document.
        frontier: compare rows with the best own-token weights, errors at so many batches; None: do
            not.
    """

    problem: Document | tuple[str, Values] = ("token_tree", {})
    estimators: tuple[tuple[str, Values], ...] = tuple((entry.name, {}) for entry in FIRST)
    group_size: int = 4
    behavior: tuple[str, Values] | None = None
    sweep: Mapping[str, tuple[Number, ...]] = field(default_factory=dict)
    engine: str = "auto"
    seed: int = 0
    samples: int | None = None
    error: float = 0.1
    frontier: float | None = None
    covariance: bool = False


@final
@dataclass(frozen=True, kw_only=True, eq=False)
class Cell:
    """One row's place.

    Args:
        number: of the row in the document.
        point: the swept values.
        problem: arguments of the built-in problem.
        behavior: settings of the behavior policy.
        estimator: name and settings, those swept included.
        group_size: responses of a prompt.
    """

    number: int
    point: Values
    problem: Given
    behavior: Given
    estimator: tuple[str, Given]
    group_size: int


def cells(settings: Settings) -> list[Cell]:
    """Every cell, in the order of the document: point by point, estimators in the order given.

    Example:
        >>> settings = Settings(estimators=(("token_tis", {}),), sweep={"cap": (1.0, 2.0)})
        >>> [cell.estimator for cell in cells(settings)]
        [('token_tis', (('cap', 1.0),)), ('token_tis', (('cap', 2.0),))]
    """
    found: list[Cell] = []
    for values in product(*settings.sweep.values()):
        point = dict(zip(settings.sweep, values, strict=True))
        problem: Given = ()
        if not isinstance(settings.problem, Document):
            problem = _taken(PROBLEMS, settings.problem, point)
        behavior: Given = ()
        if settings.behavior is not None:
            behavior = _taken(KINDS, settings.behavior, point)
        for name, given in settings.estimators:
            own = {k: v for k, v in point.items() if k in CATALOGUE[name].settings}
            found.append(
                Cell(
                    number=len(found),
                    point=point,
                    problem=problem,
                    behavior=behavior,
                    estimator=(name, tuple({**given, **own}.items())),
                    group_size=int(point.get("group_size", settings.group_size)),
                )
            )
    return found


def _taken(
    table: Mapping[str, Callable[..., Any]], chosen: tuple[str, Values], point: Values
) -> Given:
    """Arguments of a problem or a behavior policy: those given, and the swept ones that it has."""
    name, given = chosen
    own = {key: point[key] for key in inspect.signature(table[name]).parameters if key in point}
    return tuple({**given, **own}.items())


def by_site(wanted: Iterable[Cell]) -> list[list[Cell]]:
    """Cells with the same problem and sampler; those of one problem follow one another.

    Tables that depend on lengths and rewards alone then serve one sampler after the other.
    """
    places: dict[Given, dict[Given, list[Cell]]] = {}
    for cell in wanted:
        places.setdefault(cell.problem, {}).setdefault(cell.behavior, []).append(cell)
    return [here for samplers in places.values() for here in samplers.values()]


def sites(settings: Settings, wanted: Iterable[Cell]) -> Iterator[tuple[Site, list[Cell]]]:
    """Each problem with its sampler, and the cells there."""
    for here in by_site(wanted):
        yield site_of(settings, here[0]), here


def site_of(settings: Settings, cell: Cell) -> Site:
    """A cell's problem with its sampler."""
    return _sampled(settings, bare_site(settings, cell.problem), dict(cell.behavior))


def bare_site(settings: Settings, arguments: Given) -> Site:
    """A problem without the study's sampler."""
    if isinstance(settings.problem, Document):
        return to_problem(settings.problem)
    return PROBLEMS[settings.problem[0]](**dict(arguments))


def _sampled(settings: Settings, problem: Site, given: Values) -> Site:
    """The problem with the study's sampler.

    Raises:
        BadInput: the sampler is not one in float64.
    """
    if settings.behavior is None:
        return problem
    kind = settings.behavior[0]
    extra = {"seed": settings.seed} if kind == "noise" else {}
    problem = with_behavior(problem, kind, **given, **extra)
    if bool(problem.behavior_logp.isnan().any()):
        words = ",".join(f"{k}={v}" for k, v in given.items())
        raise BadInput(
            f"behavior {kind}:{words} overflows float64; allowed: what leaves probabilities"
        )
    return problem


def request(settings: Settings) -> dict[str, Any]:
    """What was asked for, as JSON holds it: equal where two studies have the same rows.

    Example:
        >>> request(Settings(problem=("bandit", {"arms": 3})))["problem"]
        {'name': 'bandit', 'arms': 3}
    """
    problem: dict[str, Any]
    if isinstance(settings.problem, Document):
        problem = {"name": settings.problem.name, "sha256": settings.problem.sha256}
    else:
        problem = {"name": settings.problem[0], **settings.problem[1]}
    behavior = settings.behavior
    return {
        "problem": problem,
        "estimators": [{"name": name, **given} for name, given in settings.estimators],
        "group_size": settings.group_size,
        "behavior": None if behavior is None else {"kind": behavior[0], **behavior[1]},
        "sweep": {key: list(values) for key, values in settings.sweep.items()},
        "engine": settings.engine,
        "seed": settings.seed,
        "samples": settings.samples,
    }
