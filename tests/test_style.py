"""docs/violations.md names every function longer than a screen and every long file, no other."""

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
SCREEN, LONG = 50, 600
PLACES = ("estimators", "toy", "llm", "analysis", "cli", "tests", "benchmarks")


def length(function: ast.FunctionDef) -> int:
    """Lines without the docstring, which is the specification."""
    docstring = ast.get_docstring(function, clean=False) or ""
    return function.end_lineno - function.lineno + 1 - len(docstring.splitlines())


def test_the_list_of_violations_is_true():
    listed = (ROOT / "docs/violations.md").read_text()
    files = sorted(path for place in PLACES for path in (ROOT / place).rglob("*.py"))
    found = set()
    for path in files:
        text, name = path.read_text(), path.relative_to(ROOT).as_posix()
        if text.count("\n") > LONG:
            found.add(name)
        found |= {
            f"{name}:{node.name}"
            for node in ast.walk(ast.parse(text))
            if isinstance(node, ast.FunctionDef) and length(node) > SCREEN
        }
    assert set(re.findall(r"^\| `([^`]+)`", listed, re.MULTILINE)) == found
