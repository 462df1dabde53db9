"""R12: nothing in the source runs what it reads, or asks a library to."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
HOUSES = ("estimators", "toy", "llm", "analysis", "cli")
MODULES = {"pickle", "cPickle", "marshal", "shelve", "dill", "cloudpickle", "joblib", "yaml"}
BUILTINS = {"eval", "exec", "compile", "__import__"}
# A module's functions that run text or unpack any object.
FUNCTIONS = {
    **{"torch": {"load"}, "os": {"system", "popen"}, "subprocess": {"getoutput"}},
    **{"pd": {"read_pickle", "eval"}, "runpy": {"run_path", "run_module"}},
}
WORDS = {"shell", "trust_remote_code", "allow_pickle"}


def unsafe(source: str) -> list[str]:
    """Lines of a file that could run what they are given."""
    found = []
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Import(names=names):
                bad = [one.name for one in names if one.name.split(".")[0] in MODULES]
            case ast.ImportFrom(module=str(module)):
                bad = [module] if module.split(".")[0] in MODULES else []
                taken = FUNCTIONS.get(module, set()) & {one.name for one in node.names}
                bad += sorted(taken)
            case ast.Call(func=ast.Name(id=name)):
                bad = [name] if name in BUILTINS else []
            case ast.Attribute(value=ast.Name(id=owner), attr=name):
                bad = [name] if name in FUNCTIONS.get(owner, set()) else []
            case ast.keyword(arg=str(name), value=value) if name in WORDS:
                bad = [] if isinstance(value, ast.Constant) and value.value is False else [name]
            case ast.Dict(keys=keys, values=values):
                pairs = zip(keys, values, strict=True)
                bad = [
                    str(key.value)
                    for key, value in pairs
                    if isinstance(key, ast.Constant) and key.value in WORDS
                    if not (isinstance(value, ast.Constant) and value.value is False)
                ]
            case _:
                bad = []
        found += [f"{name}, line {node.lineno}" for name in bad]
    return found


def test_no_source_runs_what_it_reads():
    files = sorted(path for house in HOUSES for path in (ROOT / house).rglob("*.py"))
    assert len(files) > 100
    assert {str(p): found for p in files if (found := unsafe(p.read_text()))} == {}


@pytest.mark.parametrize(
    "line",
    [
        "import pickle",
        "import yaml.loader",
        "from joblib import load",
        "from torch import load",
        "torch.load(path, weights_only=True)",
        "eval(text)",
        "exec(text)",
        "__import__(name)",
        "os.system(text)",
        "subprocess.run(words, shell=True)",
        "AutoModel.from_pretrained(path, trust_remote_code=told)",
        "settings = {'trust_remote_code': True}",
        "np.load(path, allow_pickle=True)",
        "reader = pd.read_pickle",
    ],
)
def test_each_way_to_run_what_is_read_is_found(line):
    assert unsafe(f"def read(path):\n    {line}\n")


@pytest.mark.parametrize(
    "line", ["model.eval()", "re.compile(text)", "settings = {'trust_remote_code': False}"]
)
def test_what_only_looks_like_it_is_not(line):
    assert not unsafe(line)
