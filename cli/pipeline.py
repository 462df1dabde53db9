"""`windage pipeline`: throughput, lag and selection of an asynchronous pipeline."""

from __future__ import annotations

import argparse
import csv
import json
import math
import tomllib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from windage.cli.output import deliver, progress
from windage.estimators.errors import BadInput, unknown

if TYPE_CHECKING:
    import numpy as np

    from windage.toy.pipeline.laws import Empirical, Observed

MODES = ("synchronous", "overlap", "asynchronous", "in_flight", "in_flight_recompute")
LAWS = ("exponential", "lognormal", "equal")
COUNT, WHOLE, NUMBER, SWITCH = "a whole number from 1 on", "a whole number", "a number", "switch"
STEPS, MOST_POINTS = 400, 100_000

# Kind of each key and what it means; a flag is the key with dashes.
KEYS: dict[str, tuple[Any, str]] = {
    "mode": (MODES, "all of them where none is named"),
    "slots": (COUNT, "responses that can be written at the same time"),
    "batch": (COUNT, "responses a step consumes, a multiple of the group size"),
    "group_size": (COUNT, "responses of a prompt; they wait for the slowest"),
    "tokens_law": (LAWS, "law of lengths"),
    "tokens_mean": (NUMBER, "mean length in tokens"),
    "tokens_sigma": (NUMBER, "spread of the logarithm, lognormal"),
    "token_seconds": (NUMBER, "seconds a token in a slot"),
    "prompt_tokens": (NUMBER, "tokens of a prompt"),
    "read_seconds": (NUMBER, "seconds to read a token that is there: prompt, or again in flight"),
    "verifier_law": (LAWS, "law of the verifier's time"),
    "verifier_mean": (NUMBER, "its mean, seconds"),
    "verifier_sigma": (NUMBER, "its spread, lognormal"),
    "scoring_seconds": (NUMBER, "trainer's work before an update, such as log-probabilities"),
    "update_law": (LAWS, "law of the update's time"),
    "update_mean": (NUMBER, "its mean, seconds"),
    "update_sigma": (NUMBER, "its spread, lognormal"),
    "sync_seconds": (NUMBER, "from a commit to the arrival of its weights"),
    "pause_seconds": (NUMBER, "pause of running responses when weights arrive in flight"),
    "publish_every": (COUNT, "commits from one publication of weights to the next"),
    "max_lag": (WHOLE, "drop groups whose oldest weights are further behind"),
    "capacity": (
        NUMBER,
        "start only while started - dropped < (capacity + published + 1) * publish_every * batch",
    ),
    "drop_after": (NUMBER, "seconds in a slot after which a response is dropped"),
    "fail_after": (NUMBER, "seconds in a slot after which a response is cut and fails"),
    "refill": (SWITCH, "drop groups whose rewards are all equal, and start others"),
    "pass_rate": (NUMBER, "mean probability of a right answer"),
    "stretch": (NUMBER, "mean length of the hardest prompt over that of the easiest"),
}
OTHERS = {"steps": (COUNT, f"commits of a run; default: {STEPS}")}
COLUMNS = ("length", "tokens", "response_length", "response_tokens", "completion_tokens")


def configure(parser: argparse.ArgumentParser) -> None:
    """Add a flag a key, and what is read or swept."""
    parser.add_argument("--config", metavar="FILE.toml", help="the keys below; flags come first")
    for key, (kind, meaning) in {**KEYS, **OTHERS}.items():
        flag = f"--{key.replace('_', '-')}"
        if kind == SWITCH:
            parser.add_argument(flag, action="store_true", default=None, help=meaning)
        else:
            parser.add_argument(flag, type=_typed(key), metavar=_metavar(kind), help=meaning)
    parser.add_argument(
        "--sweep",
        nargs="+",
        action="extend",
        metavar="KEY=v1,v2,...",
        help="a key above, with - or _; several make a grid",
    )
    parser.add_argument(
        "--lengths", metavar="FILE", help="observed lengths: .csv, .jsonl or .parquet"
    )
    parser.add_argument(
        "--lengths-column",
        metavar="NAME",
        help=f"its column; default: the first of {', '.join(COLUMNS)}",
    )
    parser.add_argument(
        "--from",
        dest="source",
        metavar="DUMP",
        help="observed lengths and seconds of the responses of a dump (as windage diagnose reads)",
    )
    parser.add_argument(
        "--curve",
        metavar="FILE.csv",
        help="alone: fit score by compute (columns compute, score), with intervals",
    )
    parser.add_argument(
        "--base", type=_typed("base"), metavar="R0", help="with --curve: score without compute"
    )


def _metavar(kind: Any) -> str:
    return "|".join(kind) if isinstance(kind, tuple) else ("X" if kind == NUMBER else "N")


def _typed(key: str) -> Callable[[str], Any]:
    """A `type=` that says what is allowed."""

    def parse(text: str) -> Any:
        try:
            return value(key, text)
        except BadInput as problem:
            raise argparse.ArgumentTypeError(str(problem)) from None

    return parse


def value(key: str, given: Any) -> Any:
    """A value of a key, from words or from a TOML file.

    Raises:
        BadInput: names the value and what is allowed.
    """
    kind = {**KEYS, **OTHERS}.get(key, (NUMBER, ""))[0]
    if kind == SWITCH:
        if str(given).lower() in ("true", "false"):
            return str(given).lower() == "true"
        raise BadInput(f"{given!r}; allowed: true or false")
    if isinstance(kind, tuple):
        if given not in kind:
            raise unknown(key, str(given), kind)
        return given
    try:
        number = math.nan if isinstance(given, bool) else float(given)
    except (TypeError, ValueError):
        number = math.nan
    if kind == NUMBER and math.isfinite(number):
        return number
    least = 1 if kind == COUNT else 0
    if kind != NUMBER and number >= least and number == int(min(number, 1e15)):
        return int(number)
    raise BadInput(f"{given!r}; allowed: {kind if kind != NUMBER else 'a finite number'}")


def run(arguments: argparse.Namespace) -> int:
    """Check, simulate or fit, print."""
    document = _curve(arguments) if arguments.curve is not None else _simulated(arguments)
    deliver(document, arguments)
    return 0


def _simulated(arguments: argparse.Namespace) -> dict[str, Any]:
    if arguments.base is not None:
        raise BadInput("--base: a score without compute; allowed: with --curve")
    keys, sweep = from_file(arguments.config)
    files = ("lengths", "lengths_column", "source")
    given = {k: getattr(arguments, k) for k in (*KEYS, *OTHERS, *files)}
    asked = {key: v for key, v in given.items() if v is not None}
    keys |= asked
    sweep |= swept(arguments.sweep or ())
    for key in sweep:
        if key in keys and key in asked:
            raise BadInput(f"--sweep {key}: it is set as well; allowed: one of both")
        keys.pop(key, None)
    path, column = keys.pop("lengths", None), keys.pop("lengths_column", None)
    steps = keys.pop("steps", STEPS)
    dump = keys.pop("source", None)
    if path is None and column is not None:
        raise BadInput("--lengths-column: no file; allowed: with --lengths")
    if path is not None and dump is not None:
        raise BadInput("--lengths and --from: both hold lengths; allowed: one of both")
    seen, told = (None, None) if dump is None else from_dump(Path(dump), keys, sweep)
    if path is not None:
        seen = observed_lengths(Path(path), column, keys, sweep)
    from windage.analysis.pipeline import document

    with progress("pipelines") as advance:
        return document.run(
            keys,
            sweep,
            steps=steps,
            seed=arguments.seed,
            seen=seen,
            told=told,
            with_published=not keys and not sweep and seen is None,
            advance=advance,
        )


def observed_lengths(
    path: Path, column: str | None, keys: Mapping[str, Any], sweep: Mapping[str, Any]
) -> Empirical:
    """Lengths of a file, as a law."""
    found = lengths(path, column)
    _refuse_twice("--lengths", ("tokens_",), keys, sweep)
    from windage.toy.pipeline.laws import Empirical

    return Empirical(found, str(path))


def from_dump(
    path: Path, keys: dict[str, Any], sweep: Mapping[str, Any]
) -> tuple[Empirical | Observed, dict[str, Any]]:
    """Lengths and seconds of a dump, and what was told of them; `stretch` is 1 unless set.

    Raises:
        BadInput: no dump, no times, or a setting that the dump holds.
    """
    _refuse_twice("--from", ("tokens_",), keys, sweep)
    from windage.analysis.diagnose.readers import index
    from windage.analysis.diagnose.rows import Rejected
    from windage.analysis.pipeline.observed import observed
    from windage.toy.pipeline.laws import Observed

    refused: list[Rejected] = []
    seen, told = observed(index.read(path, refuse=refused.append), str(path))
    if isinstance(seen, Observed):
        _refuse_twice("--from", ("token_seconds", "verifier_"), keys, sweep)
    for one in refused:
        told["set_aside"][one.reason] = told["set_aside"].get(one.reason, 0) + one.rows
    told |= {"source": str(path), "rows": told["rows"] + sum(one.rows for one in refused)}
    if "stretch" not in sweep:
        keys.setdefault("stretch", 1.0)
    return seen, told


def _refuse_twice(
    flag: str, begins: tuple[str, ...], keys: Mapping[str, Any], sweep: Mapping[str, Any]
) -> None:
    """Refuse a setting that a file holds.

    Raises:
        BadInput: names it.
    """
    for key in (*keys, *sweep):
        if key.startswith(begins):
            raise BadInput(f"{flag}: {key} is set as well; allowed: one of both")


def from_file(path: str | None) -> tuple[dict[str, Any], dict[str, list[Any]]]:
    """Keys and sweep of a TOML file."""
    if path is None:
        return {}, {}
    try:
        read = tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as problem:
        raise BadInput(f"--config {path!r}: {problem.strerror}; allowed: a TOML file") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as problem:
        raise BadInput(f"--config {path!r}: {problem}; allowed: a TOML file") from None
    allowed = (*KEYS, *OTHERS, "lengths", "lengths_column", "from", "sweep")
    keys, sweep = {}, {}
    for key, given in read.items():
        if key not in allowed:
            raise unknown(f"key in {path}", key, allowed)
        if key == "sweep":
            if not isinstance(given, dict):
                raise BadInput(f"{path}: sweep is {given!r}; allowed: a table of lists")
            sweep = {k: _values(f"{path}: sweep", k, v) for k, v in given.items()}
        elif key.startswith(("lengths", "from")):
            keys["source" if key == "from" else key] = str(given)
        else:
            try:
                keys[key] = value(key, given)
            except BadInput as problem:
                raise BadInput(f"{path}: {key}: {problem}") from None
    return keys, sweep


def swept(texts: Sequence[str]) -> dict[str, list[Any]]:
    """Keys and values of `--sweep KEY=v1,v2,...`."""
    found: dict[str, list[Any]] = {}
    for text in texts:
        name, equals, values = text.partition("=")
        key = name.replace("-", "_")
        if not equals:
            raise BadInput(f"--sweep {text!r}: no values; allowed: KEY=v1,v2,...")
        if key in found:
            raise BadInput(f"--sweep {text!r}: {key} is swept twice; allowed: each key once")
        found[key] = _values("--sweep", key, values.split(","))
    if math.prod(map(len, found.values())) > MOST_POINTS:
        raise BadInput(f"--sweep: too many points; allowed: at most {MOST_POINTS:,}")
    return found


def _values(where: str, key: str, given: Any) -> list[Any]:
    if key not in KEYS:
        raise unknown(f"key of {where}", key, KEYS)
    if not isinstance(given, list) or not given:
        raise BadInput(f"{where} {key}: {given!r}; allowed: a list of values")
    try:
        values = [value(key, v) for v in given]
    except BadInput as problem:
        raise BadInput(f"{where} {key}: {problem}") from None
    if len(set(values)) < len(values):
        raise BadInput(f"{where} {key}: a value comes twice; allowed: different values")
    return values


def _curve(arguments: argparse.Namespace) -> dict[str, Any]:
    files = ("config", "sweep", "lengths", "lengths_column", "source")
    asked = [*KEYS, *OTHERS, *files]
    for key in asked:
        if getattr(arguments, key) is not None:
            flag = "--from" if key == "source" else f"--{key.replace('_', '-')}"
            raise BadInput(f"{flag} with --curve; allowed with it: --base")
    table = columns(Path(arguments.curve), ("compute", "score"))
    from windage.analysis.pipeline import curve_document

    return curve_document.run(
        table["compute"], table["score"], arguments.base, arguments.curve, arguments.seed
    )


def lengths(path: Path, column: str | None) -> np.ndarray:
    """Observed lengths of a file."""
    import numpy as np

    rows = records(path)
    present = list(dict.fromkeys(key for row in rows for key in row))
    if column is None:
        column = next((c for c in COLUMNS if c in present), None)
        if column is None:
            wanted = f"one of {', '.join(COLUMNS)}, or --lengths-column"
            raise BadInput(f"{path}: columns {', '.join(present) or 'none'}; allowed: {wanted}")
    found = np.array(_column(path, rows, column))
    if not found.mean() > 0:
        raise BadInput(f"{path}: every {column} is 0; allowed: a mean above 0")
    return found


def columns(path: Path, names: Sequence[str]) -> dict[str, np.ndarray]:
    """Columns of numbers of a file."""
    import numpy as np

    rows = records(path)
    return {name: np.array(_column(path, rows, name)) for name in names}


def _column(path: Path, rows: Sequence[Mapping[str, Any]], name: str) -> list[float]:
    present = list(dict.fromkeys(key for row in rows for key in row))
    if name not in present:
        raise unknown(f"column of {path}", name, present)
    found = []
    for number, row in enumerate(rows):
        try:
            entry = math.nan if isinstance(row.get(name), bool) else float(row[name])
        except (KeyError, TypeError, ValueError):
            entry = math.nan
        if (not 0 <= entry < math.inf and name != "score") or not math.isfinite(entry):
            raise BadInput(
                f"{path}: row {number}: {name} is {row.get(name)!r}; allowed: a finite number"
                + ("" if name == "score" else ", 0 or more")
            )
        found.append(entry)
    return found


def records(path: Path) -> list[dict[str, Any]]:
    """Rows of a CSV, JSON-lines or parquet file."""
    try:
        if path.suffix == ".parquet":
            return _parquet(path)
        text = path.read_text(encoding="utf-8")
    except OSError as problem:
        raise BadInput(f"{path}: {problem.strerror}; allowed: a file of rows") from None
    except UnicodeDecodeError:
        raise BadInput(f"{path}: not UTF-8; allowed: .csv, .jsonl or .parquet") from None
    if path.suffix in (".jsonl", ".ndjson"):
        rows = [_json_row(path, n, line) for n, line in enumerate(text.splitlines()) if line]
    else:
        rows = [dict(row) for row in csv.DictReader(text.splitlines(), skipinitialspace=True)]
    if not rows:
        raise BadInput(f"{path}: no rows; allowed: one row or more")
    return rows


def _json_row(path: Path, number: int, line: str) -> dict[str, Any]:
    try:
        row = json.loads(line)
    except ValueError:
        row = None
    if not isinstance(row, dict):
        raise BadInput(f"{path}: line {number + 1}: no JSON object; allowed: one object a line")
    return row


def _parquet(path: Path) -> list[dict[str, Any]]:
    import pyarrow
    from pyarrow import parquet

    try:
        rows: list[dict[str, Any]] = parquet.read_table(path).to_pylist()
    except pyarrow.ArrowInvalid:
        raise BadInput(f"{path}: not parquet; allowed: .csv, .jsonl or .parquet") from None
    return rows
