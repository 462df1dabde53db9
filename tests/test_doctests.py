"""Every example in a docstring runs, under the name by which the module is installed."""

import doctest
import re
from importlib import import_module
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
MODULES = sorted(
    ".".join(("windage", *path.relative_to(ROOT).with_suffix("").parts)).removesuffix(".__init__")
    for house in ("estimators", "toy", "llm", "analysis", "cli")
    for path in (ROOT / house).rglob("*.py")
    if re.search(r"^\s*>>> ", path.read_text(), re.MULTILINE)
)


class Finder(doctest.DocTestFinder):
    """Finds examples behind decorators too: the shape checks wrap each function."""

    def _from_module(self, module, member):
        return getattr(member, "__module__", None) == module.__name__


@pytest.mark.parametrize("name", MODULES)
def test_examples(name):
    module = import_module(name)
    runner = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE)
    report: list[str] = []
    for examples in Finder().find(module, name):
        runner.run(examples, out=report.append)
    assert runner.failures == 0, "".join(report)
    written = len(re.findall(r"^\s*>>> ", Path(module.__file__).read_text(), re.MULTILINE))
    assert runner.tries == written, f"{name}: ran {runner.tries} of {written} examples"
