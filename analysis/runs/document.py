"""The document of one run or of several side by side.

runs         name, folder, configuration, versions, hashes of its inputs, card, samples, hashes of
             the files, notes, what its figures say in sentences
rows         a run's step each: `run`, `step`, and every figure of `docs/metrics.md` it has
evaluations  a run's evaluation each
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from windage.analysis.runs.reading import Run, names, read
from windage.analysis.runs.sentences import sentences

SCHEMA = "windage/train/1"


def run(folders: Sequence[Path]) -> dict[str, Any]:
    """Read the folders of runs into one document.

    Args:
        folders: of runs, finished or not, in the order in which to show them.

    Raises:
        BadInput: a folder holds no run.
    """
    runs = [read(Path(f), n) for f, n in zip(folders, names([*map(Path, folders)]), strict=True)]
    return {
        "schema": SCHEMA,
        "runs": [_told(found) for found in runs],
        "rows": [{"run": found.name, **record} for found in runs for record in found.steps],
        "evaluations": [
            {"run": found.name, **record} for found in runs for record in found.evaluations
        ],
    }


def _told(found: Run) -> Mapping[str, Any]:
    return {
        "name": found.name,
        "folder": str(found.folder),
        "steps": len(found.steps),
        "reading": sentences(found),
        "config": found.config,
        "versions": found.versions,
        "inputs": found.inputs,
        "card": found.card,
        "samples": found.samples,
        "hashes": found.hashes,
        "notes": found.notes,
    }
