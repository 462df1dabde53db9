"""R12: a hundred hostile configurations of a run: no code runs, nothing is written elsewhere."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

import pytest
from test_cli_train import TINY, told, words
from tiny_language_model import make

from windage.cli.main import main

MARK = "marked"
PAYLOADS = [
    f"__import__('os').system('touch {MARK}')",
    f"$(touch {MARK})",
    f"`touch {MARK}`",
    f"; touch {MARK}",
    f"| touch {MARK} #",
    "os:system",
    "windage.cli.main:main",
    "subprocess.Popen",
    f"!!python/object/apply:os.system ['touch {MARK}']",
    "{{ cycler.__init__.__globals__.os.system('id') }}",
    "../../../../etc/passwd",
    "/etc/passwd",
    "/proc/self/mem",
    "~/../elsewhere",
    "file:///etc/passwd",
    "%s%n%x",
    "\u202e\u2066",
    "a\nb\r\x1b[2J",
    "x" * 5000,
    "-rf",
]
# Where each payload is put; a setting's name is put into a table of its own.
PLACES = ["model.path", "task.name", "task.settings.ask", "task.settings.", "recipe.name"]
# A text that is asked with is no fault: the run is made, and in its folder alone.
ASKED = "task.settings.ask"
DOCUMENTS = [
    '[run]\n"__class__" = 1',
    '["__init__"]\nsteps = 1',
    '[run."../../x"]\na = 1',
    '[model]\npath = { _target_ = "os.system" }',
    '[recipe.settings]\n"__globals__" = 1',
    '[recipe]\nsettings = { cap = "os.system" }',
    '[train]\nstore = ["/etc"]',
    "[a" + ".a" * 3000 + "]\nb = 1",
    "x = " + "[" * 3000,
    '[run]\ntrackers = ["../../os"]',
    '[sampling]\nengine = "os"',
    '[run]\nfolder = "/dev/full"',
    "[task.settings" + ".a" * 3000 + "]\nb = 1",
    "[recipe.settings]\ncap = " + "[" * 50 + "]" * 50,
    '[evaluate]\n"os.system" = 1',
]
# Names that a run gives its own files.
OWN = ["metrics.jsonl", "samples.jsonl", "config.toml", "versions.json", "run.lock", "rollouts",
       "checkpoints", "card.json"]  # fmt: skip


class Watch:
    """What Python was asked to do while it is on: programs started, files opened to be written."""

    def __init__(self) -> None:
        self.on, self.seen = False, list[tuple[str, str]]()
        sys.addaudithook(self.hook)

    def hook(self, event: str, arguments: tuple) -> None:
        if not self.on:
            return
        if event in ("os.system", "os.exec", "os.posix_spawn", "os.startfile", "subprocess.Popen"):
            if "verify_worker" not in repr(arguments):
                self.seen.append((event, repr(arguments)))
        elif event == "open" and isinstance(arguments[0], str | bytes | os.PathLike):
            path, mode, flags = arguments
            written = flags & (os.O_WRONLY | os.O_RDWR) if mode is None else set(mode) & set("wax+")
            if written:
                self.seen.append((event, os.path.realpath(os.fsdecode(path))))
        elif event in ("os.mkdir", "os.rename", "os.symlink", "os.remove"):
            self.seen.append((event, os.path.realpath(os.fsdecode(arguments[0]))))


@pytest.fixture(scope="module")
def watch():
    found = Watch()
    yield found
    found.on = False


def astray(watch: Watch, inside: Path) -> list[tuple[str, str]]:
    """What was not a file inside a folder, nor a device or the interpreter's own cache."""
    fine = (os.path.realpath(inside), "/dev/", "/proc/self/fd")
    return [
        (event, what)
        for event, what in watch.seen
        if not (event not in ("subprocess.Popen", "os.system") and what.startswith(fine))
        and "__pycache__" not in what
    ]


def configuration(place: str, payload: str) -> dict[str, str]:
    if place == "task.settings.":
        return {"--task.settings": f"{payload.replace(',', ' ').replace('=', ' ')}=1"}
    if place == ASKED:
        return {"--task.settings": f"digits=1,ask={payload.replace(',', ' ')}"}
    return {f"--{place}": payload}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make(tmp_path_factory.mktemp("models") / "tiny", width=16, layers=1, longest=9000)


@pytest.mark.parametrize("place", PLACES)
def test_hostile_values(place, model, tmp_path, watch, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    payloads = [p for p in PAYLOADS if place != ASKED or p in (PAYLOADS[0], PAYLOADS[-3])]
    for number, payload in enumerate(payloads):
        folder = tmp_path / "runs" / f"{number}"
        flags = {**TINY, "--model.path": model, "--run.folder": folder, "--train.steps": 1}
        capsys.readouterr()
        watch.seen, watch.on = [], True
        status = main(["train", *words({**flags, **configuration(place, payload)})])
        watch.on = False
        out, err = capsys.readouterr()
        assert astray(watch, tmp_path / "runs") == [], payload
        if place == ASKED:
            assert status == 0, err
        else:
            assert (status, out, err.count("\n")) == (2, "", 1), (payload, err)
        assert not list(tmp_path.rglob(MARK)), payload


@pytest.mark.parametrize("document", DOCUMENTS, ids=range(len(DOCUMENTS)))
def test_hostile_documents(document, model, tmp_path, watch, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run.toml").write_text(document)
    flags = {**TINY, "--model.path": model, "--run.folder": tmp_path / "runs"}
    flags = {k: v for k, v in flags.items() if k.removeprefix("--run.") not in document}
    if "path" in document:
        del flags["--model.path"]
    watch.seen, watch.on = [], True
    status = main(["train", "run.toml", *words(flags)])
    watch.on = False
    out, err = capsys.readouterr()
    assert (status, out, err.count("\n")) == (2, "", 1), err
    assert astray(watch, tmp_path / "runs") == []


@pytest.mark.parametrize("dangling", [True, False])
@pytest.mark.parametrize("name", OWN)
def test_links_in_the_folder_lead_nowhere(name, dangling, model, tmp_path, capsys):
    outside, folder = tmp_path / "outside", tmp_path / "run"
    folder.mkdir()
    if not dangling:
        outside.mkdir() if name in ("rollouts", "checkpoints") else outside.write_text("mine\n")
    (folder / name).symlink_to(outside)
    before = outside.read_text() if outside.is_file() else None
    status = main(["train", *words({**TINY, "--model.path": model, "--run.folder": folder})])
    out, err = capsys.readouterr()
    assert (status, out, err.count("\n")) == (2, "", 1), err
    assert outside.exists() is not dangling
    assert (outside.read_text() if outside.is_file() else None) == before
    assert not outside.is_dir() or not list(outside.iterdir())


def test_dots_in_the_folder_mean_what_they_mean(model, tmp_path, watch):
    (tmp_path / "a").mkdir()
    folder = tmp_path / "a" / ".." / "b"
    watch.seen, watch.on = [], True
    assert main(["train", *words({**TINY, "--model.path": model, "--run.folder": folder})]) == 0
    watch.on = False
    assert astray(watch, tmp_path / "b") == []
    assert "metrics.jsonl" in told(tmp_path / "b") and list((tmp_path / "a").iterdir()) == []
    shutil.rmtree(tmp_path / "b")


def test_there_are_a_hundred():
    values = sum(len(PAYLOADS) if place != ASKED else 2 for place in PLACES)
    assert values + len(DOCUMENTS) + 2 * len(OWN) + 1 >= 100
