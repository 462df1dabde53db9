"""`windage study`: exact bias and variance of estimators on a problem."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from windage.cli import specs, study_model
from windage.cli.output import one_thread, progress, show, write
from windage.cli.specs import Number
from windage.estimators.errors import BadInput, unknown
from windage.estimators.index import FIRST, SETTINGS
from windage.toy.problem_file import Document, Shape, read, refuse_size

if TYPE_CHECKING:
    from windage.analysis.studies.grid import Settings
    from windage.analysis.studies.store import Rows

ENGINES = (
    "auto",
    "tuples",
    "compositions",
    "classes",
    "coupled",
    "prefix_tree",
    "transfer",
    "sampling",
)
STUDIES = ("staleness", "length")
PROBLEM = "token_tree"
GROUP_SIZE = 4
ERROR = 0.1
DEFAULTS = {
    "problem": None,
    "estimators": None,
    "group_size": None,
    "behavior": None,
    "sweep": None,
    "engine": "auto",
    "samples": None,
    "error": None,
    "frontier": None,
    "covariance": False,
}
MOST_ROWS = 1_000_000

COLUMNS = """\
columns of --json and --out that decide between estimators:
  groups_needed            fewest groups at which the error falls to --error, responses_needed in
                           responses; empty with a groups_needed_reason where bias alone is more
  relative_error_by_groups root mean squared error over the gradient's length, by number of groups
  crossover_groups         fewest groups at which crossover_against, the quietest unbiased entry of
                           the same point, has the smaller error; crossover_responses in responses
  ..._rescaled             the same after dividing the estimate by its scale
  signal_to_noise          squared length of the mean over the variance of one batch
  effective_share_token    E[w]^2 / E[w^2] of a token's ratio of policy to sampler, and
                           effective_share_response of a whole response's
  chi_squared_token        E[w^2] / E[w]^2 - 1; chi_squared_response, and chi_squared_by_length of
                           the first tokens
  excess_bias              with --frontier: beyond the least of equal variance; excess_variance,
                           excess_error: the share above the least of equal bias, equal batches"""

Named = tuple[str, dict[str, Number]]


class Request(NamedTuple):
    """A study that was checked by name and value."""

    problem: Document | Named
    estimators: tuple[Named, ...]
    group_size: int
    behavior: Named | None
    sweep: dict[str, tuple[Number, ...]]
    engine: str
    seed: int
    samples: int | None
    error: float
    frontier: int | None
    covariance: bool


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the flags of a study."""
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = _epilog()
    parser.add_argument(
        "--study",
        type=_study,
        metavar="|".join(STUDIES),
        help=f"a built-in study, alone; without flags: {STUDIES[0]}",
    )
    parser.add_argument(
        "--problem", metavar="NAME|FILE", help=f"built-in, or a JSON file; default: {PROBLEM}"
    )
    parser.add_argument(
        "--estimators",
        nargs="+",
        action="extend",
        metavar="NAME[:key=value,...]",
        help="default: the first tier",
    )
    parser.add_argument(
        "--group-size",
        type=_flag("group_size"),
        metavar="G",
        help=f"responses of a prompt; default: {GROUP_SIZE}",
    )
    parser.add_argument(
        "--behavior",
        metavar="KIND:key=value,...",
        help="who samples, in place of the file's sampler",
    )
    parser.add_argument(
        "--sweep",
        nargs="+",
        action="extend",
        metavar="KEY=v1,v2,...",
        help="a setting of estimators, behavior or built-in problem, or group_size; several make a "
        "grid; swept values take the place of given ones",
    )
    parser.add_argument(
        "--engine", type=_engine, default="auto", metavar="|".join(ENGINES), help="default: auto"
    )
    parser.add_argument(
        "--samples",
        type=_flag("samples"),
        metavar="N",
        help="most batches of a row that no engine computes; default: about ten seconds' worth",
    )
    _add_comparisons(parser)
    study_model.add_flags(parser)


def _add_comparisons(parser: argparse.ArgumentParser) -> None:
    """Add the flags of what rows are held against."""
    parser.add_argument(
        "--error",
        type=_flag("error"),
        metavar="SHARE",
        help="root mean squared error, as a share of the gradient's length, whose number of groups "
        f"is told; default: {ERROR}",
    )
    parser.add_argument(
        "--frontier",
        nargs="?",
        const=1,
        type=_flag("frontier"),
        metavar="BATCHES",
        help="add the least bias at each variance over all weights of a token's own, and the rows' "
        "distance from it; errors are compared at so many batches, 1 without a number",
    )
    parser.add_argument(
        "--covariance",
        action="store_true",
        help="add to --json each row's covariance, a block of vocabulary x vocabulary a prefix, "
        "where it holds at most 1e5 numbers",
    )


def _epilog() -> str:
    def listed(title: str, keys: Mapping[str, Iterable[str]]) -> str:
        width = max(map(len, keys))
        lines = [f"  {name:{width}}  {', '.join(own)}".rstrip() for name, own in keys.items()]
        return "\n".join([title, *lines])

    tables: dict[str, Mapping[str, Iterable[str]]] = {
        "problems and their settings (NAME:key=value,...):": specs.PROBLEMS,
        "behavior policies and their settings:": specs.BEHAVIORS,
        "estimators of the first tier and their settings:": {n: SETTINGS[n] for n in FIRST},
        "estimators of the second tier, by name only:": {
            name: own for name, own in SETTINGS.items() if name not in FIRST
        },
    }
    first = (
        "Without flags: the first tier, by lag and by length.  --study length: responses of "
        "16 to 32,768 tokens.\n\n"
    )
    last = "\n\n" + COLUMNS
    return first + "\n\n".join(listed(title, keys) for title, keys in tables.items()) + last


def _flag(key: str) -> Callable[[str], Number]:
    """A `type=` that says what is allowed."""

    def parse(text: str) -> Number:
        try:
            return specs.value(key, text)
        except BadInput as problem:
            raise argparse.ArgumentTypeError(str(problem)) from None

    return parse


def _engine(text: str) -> str:
    if text not in ENGINES:
        raise argparse.ArgumentTypeError(str(unknown("engine", text, ENGINES)))
    return text


def _study(text: str) -> str:
    if text not in STUDIES:
        raise argparse.ArgumentTypeError(str(unknown("study", text, STUDIES)))
    return text


def run(arguments: argparse.Namespace) -> int:
    """Check every flag and the file, compute, print."""
    if arguments.model is not None:
        return study_model.run(arguments)
    study_model.refuse(arguments)
    request = check(arguments)
    one_thread()
    document = _built_in(arguments) if request is None else _grid(request, arguments.out)
    if arguments.json:
        print(json.dumps(document, allow_nan=False))
    else:
        show(document)
    return 0


def _built_in(arguments: argparse.Namespace) -> dict[str, Any]:
    """One of the built-in studies."""
    from windage.analysis.studies import length, staleness

    modules = {"staleness": staleness, "length": length}
    with progress("rows") as advance:
        document: dict[str, Any] = modules[arguments.study or STUDIES[0]].run(advance)
    if arguments.out is not None:
        write(document, arguments.out)
    return document


def _grid(request: Request, folder: Path | None) -> dict[str, Any]:
    """A study of what was asked for; rows are kept in the folder until its files are written."""
    from windage.analysis.studies import study
    from windage.analysis.studies.grid import Settings
    from windage.analysis.workers import processors

    settings = Settings(**request._asdict())
    if folder is None:
        with progress("rows") as advance:
            return study.run(settings, advance, processes=processors())
    with _kept(settings, folder) as rows:
        with progress("rows") as advance:
            document = study.run(settings, advance, rows, processors())
        write(document, folder)
    return document


@contextmanager
def _kept(settings: Settings, folder: Path) -> Iterator[Rows]:
    """Rows that outlive an interruption; it says how to go on."""
    from windage.analysis.studies import grid, store

    rows = store.Rows(folder, grid.request(settings), len(grid.cells(settings)))
    try:
        yield rows
    except BaseException as problem:
        rows.flush()
        if isinstance(problem, KeyboardInterrupt):
            print(
                f"windage study: interrupted; {folder} keeps {rows.done:,} of {rows.count:,} rows, "
                "and the same command goes on from there",
                file=sys.stderr,
            )
        raise
    rows.remove()


def check(arguments: argparse.Namespace) -> Request | None:
    """Turn flags into a request, None for a built-in study; reads the problem file.

    Raises:
        BadInput: names the flag or the place in the file, and what is allowed.
    """
    asked = [flag for flag, default in DEFAULTS.items() if getattr(arguments, flag) != default]
    if not asked:
        return None
    if arguments.study is not None:
        flag = f"--{asked[0].replace('_', '-')}"
        raise BadInput(f"--study {arguments.study}: {flag} is set by the study; allowed: no {flag}")
    behavior = None if arguments.behavior is None else specs.behavior(arguments.behavior)
    estimators = tuple(map(specs.estimator, arguments.estimators or FIRST))
    named = specs.built_in(PROBLEM if arguments.problem is None else arguments.problem)
    sweep = _sweep(arguments.sweep or (), estimators, behavior, named)
    group_size = arguments.group_size or GROUP_SIZE
    for name, settings in estimators:
        _check_settings(name, settings, sweep)
        if arguments.estimators and name not in specs.SINGLE:
            _check_size(name, sweep.get("group_size", (group_size,)))
    return Request(
        problem=_problem(arguments.problem, named, sweep),
        estimators=estimators,
        group_size=group_size,
        behavior=behavior,
        sweep=sweep,
        engine=arguments.engine,
        seed=arguments.seed,
        samples=arguments.samples,
        error=ERROR if arguments.error is None else arguments.error,
        frontier=arguments.frontier,
        covariance=arguments.covariance,
    )


def _sweep(
    texts: Iterable[str],
    estimators: Iterable[Named],
    behavior: Named | None,
    problem: Named | None,
) -> dict[str, tuple[Number, ...]]:
    """Swept keys and their values; something of the study must have each key."""
    keys = ["group_size"]
    keys += [key for name, _ in estimators for key in SETTINGS[name]]
    keys += specs.BEHAVIORS[behavior[0]] if behavior is not None else ()
    keys += specs.PROBLEMS[problem[0]] if problem is not None else ()
    found: dict[str, tuple[Number, ...]] = {}
    rows = 1
    for text in texts:
        owners = [kind for kind, own in specs.BEHAVIORS.items() if text.partition("=")[0] in own]
        if owners and behavior is None:
            raise BadInput(f"--sweep {text!r}: no such --behavior; allowed: {' or '.join(owners)}")
        key, values = specs.sweep(text, dict.fromkeys(keys))
        if key in found:
            raise BadInput(f"--sweep {text!r}: {key} is swept twice; allowed: each key once")
        found[key] = values
        rows *= len(values)
    if rows > MOST_ROWS:
        raise BadInput(f"--sweep makes {rows:,} points; allowed: at most {MOST_ROWS:,}")
    return found


def _check_settings(name: str, settings: Mapping[str, Number], sweep: Mapping[str, Any]) -> None:
    own = {key: values for key, values in sweep.items() if key in SETTINGS[name]}
    for point in product(*own.values()):
        specs.check_order(name, {**settings, **dict(zip(own, point, strict=True))})


def _check_size(name: str, sizes: Iterable[Number]) -> None:
    if min(sizes) < 2:
        raise BadInput(
            f"--group-size: group 0 has size 1; allowed with {name}: groups of at least 2"
        )


def _problem(
    text: str | None, named: Named | None, sweep: Mapping[str, tuple[Number, ...]]
) -> Document | Named:
    """The file, read and checked, or the built-in problem, checked for its size."""
    if named is None:
        assert text is not None
        path = Path(text)
        if not (text and (path.exists() or path.suffix or len(path.parts) > 1)):
            message = unknown("problem", text, specs.PROBLEMS)
            raise BadInput(f"{message}, or a JSON file")
        return read(text)
    name, settings = named
    own = {key: values for key, values in sweep.items() if key in specs.PROBLEMS[name]}
    for point in product(*own.values()):
        sizes = {**specs.PROBLEMS[name], **settings, **dict(zip(own, point, strict=True))}
        if "arms" in sizes:
            refuse_size(Shape(int(sizes["arms"]), None, 1))
        if "vocab" in sizes:
            refuse_size(Shape(int(sizes["vocab"]), int(sizes["vocab"]) - 1, int(sizes["horizon"])))
    return named
