"""What is installed: every package is listed, the layers hold, the wheel lives beside `llm`."""

import os
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from zipfile import ZipFile

import pytest

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
HOUSES = ("estimators", "toy", "llm", "analysis", "cli")
MODULES = [path.relative_to(ROOT) for house in HOUSES for path in (ROOT / house).rglob("*.py")]

OTHER_LLM = """
[build-system]
requires = ["setuptools"]
build-backend = "setuptools.build_meta"
[project]
name = "llm"
version = "0.1"
[tool.setuptools]
packages = ["llm"]
"""


def run(*words: object, **settings: object) -> str:
    answer = subprocess.run(
        [str(word) for word in words], capture_output=True, text=True, **settings
    )
    assert answer.returncode == 0, answer.stdout + answer.stderr
    return answer.stdout


def test_every_package_is_listed():
    folders = sorted({module.parent for module in MODULES})
    assert [folder for folder in folders if not (ROOT / folder / "__init__.py").exists()] == []
    expected = {".".join(("windage", *folder.parts)): folder.as_posix() for folder in folders}
    listed = PROJECT["tool"]["setuptools"]
    assert sorted(listed["packages"]) == sorted(expected)
    assert listed["package-dir"] == expected


def test_the_layers_hold():
    run(Path(sys.executable).with_name("lint-imports"), "--no-cache", cwd=ROOT)


def test_a_forbidden_import_breaks_a_contract(tmp_path):
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    for house in HOUSES:
        shutil.copytree(ROOT / house, tmp_path / "windage" / house)
    (tmp_path / "windage/estimators/intruder.py").write_text("import windage.toy\n")
    answer = subprocess.run(
        [Path(sys.executable).with_name("lint-imports"), "--no-cache"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
    )
    assert answer.returncode == 1
    assert "windage.estimators.intruder -> windage.toy" in answer.stdout


@pytest.fixture
def site(tmp_path: Path) -> Path:
    """Build the wheel from a clean copy and install it next to another package named `llm`."""
    source, other, site = tmp_path / "source", tmp_path / "other", tmp_path / "site"
    for house in HOUSES:
        shutil.copytree(ROOT / house, source / house, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "LICENSE", "README.md"):
        if (ROOT / name).exists():
            shutil.copy(ROOT / name, source)
    (other / "llm").mkdir(parents=True)
    (other / "llm/__init__.py").write_text("origin = 'elsewhere'\n")
    (other / "pyproject.toml").write_text(OTHER_LLM)
    pip = (sys.executable, "-m", "pip", "--disable-pip-version-check")
    offline = ("--no-deps", "--no-index", "--no-build-isolation")
    run(*pip, "wheel", *offline, "--wheel-dir", tmp_path, source)
    (wheel,) = tmp_path.glob("windage-*.whl")
    run(*pip, "install", *offline, "--target", site, wheel, other)
    with ZipFile(wheel) as archive:
        inside = {name for name in archive.namelist() if name.endswith(".py")}
        assert "windage/analysis/page.html" in archive.namelist()
    assert inside == {f"windage/{module.as_posix()}" for module in MODULES}
    return site


def test_the_wheel_installs_and_runs_beside_llm(site, tmp_path):
    alone = {"cwd": tmp_path, "env": {**os.environ, "PYTHONPATH": str(site)}}
    origins = run(
        sys.executable,
        "-S",
        "-c",
        "import llm, windage.llm; print(llm.origin, windage.llm.__file__)",
        **alone,
    )
    assert origins.split() == ["elsewhere", str(site / "windage/llm/__init__.py")]
    assert "study" in run(sys.executable, "-S", site / "bin/windage", "--help", **alone)
    version = run(sys.executable, "-S", site / "bin/windage", "--version", **alone)
    assert version == f"windage {PROJECT['project']['version']}\n"
