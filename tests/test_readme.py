"""The README is true: its commands run, its output is what they print, its tree is the tree."""

import contextlib
import csv
import io
import json
import os
import re
import shlex
import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from windage.analysis.studies import length
from windage.cli.main import VERBS

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
BLOCKS = re.findall(r"^```(\w+)\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)
COMMANDS = [line for kind, text in BLOCKS if kind == "bash" for line in text.splitlines()]
DESIGNED = {"study", "audit", "claims", "learn", "pipeline", "choose"} | {
    "sample",
    "train",
    "evaluate",
    "diagnose",
}
STUDY = "windage study --json"
PROGRAM = """
import contextlib, io, json, shlex, sys
from windage.cli.main import main

found = {}
for command in json.load(sys.stdin):
    program, *words = shlex.split(command)
    assert program == "windage", command
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        try:
            status = main(words)
        except SystemExit as end:
            status = end.code
    found[command] = (status, printed.getvalue())
print(json.dumps(found))
"""
HOUSES = ("estimators", "toy", "llm", "analysis", "cli")


def between(start: str, end: str) -> str:
    return README.split(f"<!-- {start} -->")[1].split(f"<!-- {end} -->")[0]


@pytest.fixture(scope="module")
def outputs():
    """What each command prints, all in one process, 80 columns wide."""
    answer = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        input=json.dumps([*COMMANDS, STUDY]),
        cwd=ROOT,
        env={**os.environ, "COLUMNS": "80"},
        capture_output=True,
        text=True,
    )
    assert answer.returncode == 0, answer.stderr
    found = json.loads(answer.stdout)
    assert {status for status, _ in found.values()} == {0}, found
    return {command: printed for command, (_, printed) in found.items()}


@pytest.fixture(scope="module")
def document(outputs):
    return json.loads(outputs[STUDY])


@pytest.mark.parametrize("command", COMMANDS)
def test_commands_run(command, outputs):
    assert outputs[command].strip()


def test_output_is_what_the_code_before_it_prints(outputs):
    shown = [
        (kind, code, text)
        for (kind, code), (after, text) in pairwise(BLOCKS)
        if after == "text" and kind in ("bash", "python")
    ]
    assert {kind for kind, _, _ in shown} == {"bash", "python"}
    for kind, code, text in shown:
        if kind == "bash":
            found = "".join(outputs[line] for line in code.splitlines())
        else:
            printed = io.StringIO()
            with contextlib.redirect_stdout(printed):
                exec(compile(code, "README.md", "exec"), {})
            found = printed.getvalue()
        assert [line.rstrip() for line in found.rstrip().splitlines()] == [
            line.rstrip() for line in text.rstrip().splitlines()
        ]


def test_reading_is_what_the_study_says(document):
    assert (
        re.findall(r"^- (.*)$", between("reading", "end of reading"), re.MULTILINE)
        == (document["reading"])
    )


def test_numbers_behind_the_figure_are_what_the_study_computes(document):
    with (ROOT / "docs/figures/staleness.csv").open(newline="") as file:
        kept = list(csv.DictReader(file))
    assert len(kept) == len(document["rows"])
    for before, row in zip(kept, document["rows"], strict=True):
        for key, text in before.items():
            value = row[key]
            if isinstance(value, float):
                assert float(text) == pytest.approx(value, rel=1e-7, abs=1e-9), (key, before)
            else:
                assert text == ("" if value is None else str(value)), (key, before)


def of_length() -> list[dict[str, Any]]:
    """The numbers behind the figure of the study of length."""
    with (ROOT / "docs/figures/length.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    return [
        {
            key: text if key in ("estimator", "engine") else json.loads(text or "null")
            for key, text in row.items()
        }
        for row in rows
    ]


def test_reading_of_length_is_what_its_numbers_say():
    rows = of_length()
    places = {(row["horizon"], row["steps"]): row for row in rows}
    sweep = {key: sorted({row[key] for row in rows}) for key in ("horizon", "steps")}
    document = {
        "problem": {"prompts": 3},
        "responses": {"shown": list(length.BATCHES)},
        "sweep": sweep,
        "sites": list(places.values()),
        "rows": rows,
    }
    assert sweep == {"horizon": list(length.LENGTHS), "steps": list(length.LAGS)}
    assert re.findall(
        r"^- (.*)$", between("reading of length", "end of reading of length"), re.MULTILINE
    ) == length.reading(document)


@pytest.mark.parametrize("horizon", [16, 32768])
def test_numbers_behind_the_figure_of_length_are_computed_at_both_ends(horizon):
    kept = {(row["horizon"], row["steps"], row["estimator"]): row for row in of_length()}
    sites, rows = length.at_length(horizon, lags=(0, 8), group_sizes=(length.GROUP_SIZE,))
    mismatches = {site["steps"]: site for site in sites}
    for row in rows:
        found = {**mismatches[row["steps"]], **row}
        for key, value in kept[horizon, row["steps"], row["estimator"]].items():
            if isinstance(value, float):
                assert found[key] == pytest.approx(value, rel=1e-6, abs=1e-9), (key, row)
            else:
                assert found[key] == value, (key, row)


@pytest.mark.parametrize("name", ["staleness", "length"])
def test_figure_is_there(name):
    assert f"(docs/figures/{name}.png)" in README
    assert (ROOT / f"docs/figures/{name}.png").read_bytes().startswith(b"\x89PNG")


def test_links_lead_somewhere():
    for target in re.findall(r"\]\(([^)#:]+)\)", README):
        assert (ROOT / target).exists(), target


def test_every_verb_is_either_shown_or_said_to_be_missing():
    missing = re.search(r"^- Not there yet: (.*?)^- ", README, re.MULTILINE | re.DOTALL)
    absent = set(re.findall(r"`(\w+)`", missing[1])) if missing else set()
    shown = {shlex.split(command)[1] for command in COMMANDS}
    assert shown == set(VERBS)
    assert absent == DESIGNED - set(VERBS)


def tree() -> set[str]:
    """Paths that the README's tree names; folders end in a slash."""
    paths, stack = set(), []
    for line in between("tree", "end of tree").strip().splitlines()[1:-1]:
        depth = (len(line) - len(line.lstrip())) // 2
        name = line.split()[0]
        stack = [*stack[:depth], name]
        paths.add("".join(stack))
    return paths


def tracked() -> list[str]:
    """Files of the repository; outside git, files that are neither hidden nor generated."""
    words = ["git", "ls-files"]
    answer = subprocess.run(words, cwd=ROOT, capture_output=True, text=True)
    if answer.returncode == 0 and answer.stdout:
        return [path for path in answer.stdout.splitlines() if (ROOT / path).exists()]
    found = []
    for folder, names, files in os.walk(ROOT):
        names[:] = [n for n in names if n[0] != "." and not n.endswith(("__", ".egg-info"))]
        found += [os.path.relpath(Path(folder, file), ROOT) for file in files]
    return found


def test_every_path_in_the_tree_exists():
    for path in tree():
        assert (ROOT / path).exists(), path
        assert (ROOT / path).is_dir() == path.endswith("/"), path


def test_the_tree_leaves_out_nothing():
    wanted = set()
    for path in tracked():
        parts = path.split("/")
        wanted.add(parts[0] + "/" * (len(parts) > 1))
        if parts[0] in HOUSES and parts[1] != "__init__.py":
            wanted.add("/".join(parts[:2]) + "/" * (len(parts) > 2))
    assert sorted(wanted - tree()) == []
