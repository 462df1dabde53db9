"""A program that does one thing several times and prints what its tables hash to, a line a time.

python tests/repeated_runs.py FOLDER study|learn|train COUNT
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path

WORDS = {
    "study": ("study", "--json", "--seed", "5"),
    "learn": ("learn", "placebo", "--quick", "--seeds", "1", "--json", "--seed", "5"),
}


def document(words: tuple[str, ...]) -> str:
    """What a verb prints, but for its seconds."""
    from windage.cli.main import main

    out = StringIO()
    with redirect_stdout(out):
        assert main(words) == 0
    found = json.loads(out.getvalue())
    found.pop("seconds", None)
    return json.dumps(found)


def run(base: Path, number: int) -> str:
    """Every file of a training run."""
    from run_faults import command
    from training_harness import configuration, prepared, state

    from windage.llm import config as configs

    prepared(base, "synchronous")
    folder = base / f"run-{number}"
    folder.mkdir()
    os.chdir(folder)
    Path("run.toml").write_text(configs.toml(configuration("synchronous", Path("../model"))))
    with redirect_stdout(StringIO()):
        assert command("run.toml") == 0
    return json.dumps(state(folder), sort_keys=True)


def main() -> None:
    """Do it, and tell."""
    base, what, count = Path(sys.argv[1]).resolve(), sys.argv[2], int(sys.argv[3])
    for number in range(count):
        told = document(WORDS[what]) if what in WORDS else run(base, number)
        digest = hashlib.sha256(told.encode()).hexdigest()[:16]
        print(json.dumps({"digest": digest}), flush=True)


if __name__ == "__main__":
    main()
