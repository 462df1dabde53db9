"""Which format a dump has, by its content, and its rows."""

from __future__ import annotations

import re
import zipfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

from windage.analysis.diagnose.readers import (
    jsonl,
    nemo_rl,
    open_instruct,
    pipeline_rl,
    plain,
    prime_rl,
    slime,
    store,
    tables,
    tensors,
)
from windage.analysis.diagnose.readers.fields import Fault, Refuse, shown
from windage.analysis.diagnose.readers.files import Dump, container, regular
from windage.analysis.diagnose.readers.traces import fits as is_trace
from windage.analysis.diagnose.rows import Rejected, Row
from windage.estimators.errors import BadInput

READERS: Mapping[str, Callable[[Dump, Refuse], Iterator[Row]]] = {
    module.NAME: module.rows
    for module in (prime_rl, nemo_rl, slime, open_instruct, pipeline_rl, store, plain)
}
FITS: Mapping[str, Callable[[Mapping[str, Any]], bool]] = {
    module.NAME: module.fits for module in (prime_rl, nemo_rl, open_instruct, pipeline_rl, plain)
}
TRACES = "traces"
UNREADABLE = "unreadable"
OTHER = "other"
# Formats without a token or without the sampler's log-probabilities, by the keys that they have.
BARE = {
    "verl": ({"input", "output", "score"}, "text and scores"),
    "TRL": ({"prompt", "completion", "advantage"}, "text and rewards"),
    "AReaL": ({"head_version", "tail_version", "prompt_len"}, "text and versions"),
    "tinker-cookbook": ({"sampling_client_step"}, "lengths and rewards"),
}
CLOSED = {
    "pickle": "a pickle, which is never read",
    "gzip": "compressed; allowed: the file unpacked",
    "zstd": "compressed; allowed: the file unpacked",
}
LOOKED = 64


def silent(_: Rejected) -> None:
    """For a look at a file whose rows are not read yet."""


def strict(rejected: Rejected) -> None:
    """Refuse the first row that is set aside.

    Raises:
        BadInput: names it; a file without rows in a folder is none.
    """
    if rejected.rows:
        raise BadInput(str(rejected))


def detect(path: Path) -> str:
    """The name of the format.

    Raises:
        BadInput: none, several, or one that holds no tokens.
    """
    return _survey(path, None, silent)[0]


def read(
    path: Path,
    *,
    columns: Mapping[str, str] | None = None,
    traces: Path | None = None,
    refuse: Refuse = strict,
) -> Iterator[Row]:
    """The rows of a dump, one at a time.

    Args:
        path: a file, or a folder of files.
        columns: for files of no known format: the column that holds a field of `Row`.
        traces: of prime-rl, a file or folder, where they do not lie beside its token exports.
        refuse: told of each row that is set aside, such as the `append` of a list; rows that come
            and rows set aside are together the rows of the dump.

    Raises:
        BadInput: no dump, before the first row; a map that does not fit; traces of another format.
    """
    name, dump = _survey(path, columns, refuse)
    if traces is not None:
        dump = _beside(name, dump, traces, refuse)
    if columns:
        return plain.rows(dump, refuse, columns=columns)
    return READERS[name](dump, refuse)


def _beside(name: str, dump: Dump, place: Path, refuse: Refuse) -> Dump:
    """The dump with the traces of a place instead of those that it has."""
    files = [file for file in regular(place, refuse) if _kind(file) == TRACES]
    if name != prime_rl.NAME:
        raise BadInput(f"{shown(dump.root)} is a dump of {name}; allowed with traces: prime-rl")
    if not files:
        raise BadInput(f"{shown(place)} holds no traces; allowed: traces.jsonl of prime-rl")
    return replace(dump, beside=files)


def _survey(path: Path, columns: Mapping[str, str] | None, refuse: Refuse) -> tuple[str, Dump]:
    """The format, and the files that hold it.

    Raises:
        BadInput: none, or several.
    """
    plain.named(columns)
    files = regular(path, refuse)
    kinds = {file: plain.NAME if columns else _kind(file) for file in files}
    found = [name for name in READERS if name in kinds.values()]
    if store.NAME in found and plain.NAME in found:
        found.remove(plain.NAME)
    if not found and TRACES in kinds.values():
        found = [prime_rl.NAME]
    if len(found) > 1:
        raise BadInput(f"{shown(path)} holds dumps of {' and '.join(found)}; allowed: one of them")
    if not found:
        raise _nothing(path, kinds)
    name = found[0]
    fitting = [file for file in files if kinds[file] == name]
    patterns = {_pattern(file) for file in fitting}
    endings = {file.suffix for file in fitting}
    own = [
        file
        for file in files
        if kinds[file] == name
        or (kinds[file] == UNREADABLE and file.suffix in endings)
        or (kinds[file] == OTHER and _pattern(file) in patterns)
    ]
    beside = [file for file in files if kinds[file] == TRACES and name == prime_rl.NAME]
    for file in sorted({*files} - {*own, *beside}):
        what = f"holds no rows of {name}; not read"
        refuse(Rejected(where=shown(file), reason="no dump file", what=what, rows=0))
    return name, Dump(root=path, files=own, beside=beside)


def _pattern(path: Path) -> str:
    """A path without numbers: the same for the parts of one dump."""
    return re.sub(r"\d+", "", str(path))


def _kind(path: Path) -> str:
    """The format of a file, or what else it is."""
    kind = container(path)
    if kind == "parquet":
        return _of_parquet(path)
    if kind == "zip":
        return _of_zip(path)
    return kind if kind in CLOSED else _of_lines(path)


def _of_zip(path: Path) -> str:
    try:
        with zipfile.ZipFile(path) as archive:
            main = [name for name in archive.namelist() if name.endswith("/data.pkl")]
            return slime.NAME if len(main) == 1 and slime.fits(archive.read(main[0])) else OTHER
    except tensors.BROKEN:
        return UNREADABLE


def _of_parquet(path: Path) -> str:
    try:
        file = tables.opened(path)
    except Fault:
        return UNREADABLE
    with file:
        names = dict.fromkeys(file.schema_arrow.names)
        if tables.metadata(file).get("schema", "").startswith(store.SCHEMA):
            return store.NAME
        return plain.NAME if plain.fits(names) else _bare(names)


def _of_lines(path: Path) -> str:
    """The first format that one of the first lines fits."""
    first: Mapping[str, Any] | None = None
    for _, record in islice(jsonl.records(path, silent, many=True), LOOKED):
        for name, fits in FITS.items():
            if fits(record):
                return name
        if is_trace(record):
            return TRACES
        first = record if first is None else first
    return UNREADABLE if first is None else _bare(first)


def _bare(names: Mapping[str, Any]) -> str:
    return next((name for name, (keys, _) in BARE.items() if keys <= {*names}), OTHER)


def _nothing(path: Path, kinds: Mapping[Path, str]) -> BadInput:
    """Why there is nothing to read."""
    for file, kind in kinds.items():
        if kind in CLOSED:
            return BadInput(f"{shown(file)} is {CLOSED[kind]}")
        if kind in BARE:
            what = f"a dump of {kind}, which holds {BARE[kind][1]} but no log-probabilities"
            return BadInput(f"{shown(file)} is {what}; allowed: {', '.join(READERS)}")
        fault = _first_fault(file)
        if fault is not None:
            return BadInput(str(fault))
    what = "is of no known format" if kinds else "holds no dump"
    return BadInput(f"{shown(path)} {what}; allowed: {', '.join(READERS)}, or a map of columns")


def _first_fault(path: Path) -> Rejected | None:
    """What is wrong with the first line of a file, or with its archive."""
    kind = container(path)
    try:
        if kind == "parquet":
            tables.opened(path)
        elif kind == "zip":
            tensors.load(path)
    except Fault as fault:
        return Rejected(where=shown(path), reason=fault.reason, what=fault.what)
    found: list[Rejected] = []
    if kind == "lines":
        next(jsonl.records(path, found.append), None)
    return found[0] if found else None
