"""A save outlives a cut of the power: content is on the disk before its name, and both in time.

A kill leaves the operating system's memory alone, so it cannot show a missing wait.  Here every
wait is watched instead.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from disk_faults import seen_by
from tiny_language_model import make
from training_harness import configuration, go

from windage.llm import checkpoint, durable, journal
from windage.llm import folder as folders
from windage.llm.journal import Journal
from windage.llm.rollouts import write

PUBLISHES = ("rename", "replace")


class Disk:
    """Files and folders that were not changed since they were waited for, by their numbers.

    Args:
        root: nothing outside it is looked at; it is on the disk.
    """

    def __init__(self, root: Path) -> None:
        self.root, self.clean, self.early = root.resolve(), {root.stat().st_ino}, list[str]()

    def __call__(self, name, real, *arguments, **settings):
        """A call of `os` on its way."""
        first = arguments[0]
        if name == "native":
            return real(*arguments, **settings)
        if name in PUBLISHES and ".unfinished" in str(first):
            self.early += self.lacking(Path(first))
        fresh = name == "open" and arguments[1] & os.O_CREAT and not os.path.lexists(first)
        if name in ("unlink", "rmdir"):
            about = os.stat(first, dir_fd=settings.get("dir_fd"), follow_symlinks=False)
            self.clean.discard(about.st_ino)
        found = real(*arguments, **settings)
        if name == "fsync":
            self.clean.add(os.fstat(first).st_ino)
        elif name in ("write", "pwrite", "ftruncate"):
            self.clean.discard(os.fstat(first).st_ino)
        elif name in PUBLISHES or name == "mkdir" or fresh:
            self.clean.discard(os.stat(Path(arguments[name in PUBLISHES]).parent).st_ino)
        return found

    def lacking(self, top: Path) -> list[str]:
        """What under a path would not be there, or not be what it is, after the power was cut."""
        paths = [top, *top.rglob("*")]
        return [str(path) for path in paths if path.stat().st_ino not in self.clean]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make(tmp_path_factory.mktemp("model") / "model", width=16, layers=1)


def cut(model, tmp_path, monkeypatch) -> tuple[list[str], list[str]]:
    """What two steps of a run gave its name too early, and what was lacking after a save."""
    monkeypatch.chdir(tmp_path)
    config = configuration("synchronous", model, train={"steps": 2, "prompts": 2, "passes": 1})
    disk, lacking, save = Disk(tmp_path), list[str](), checkpoint.save

    def saved(*arguments, **settings):
        save(*arguments, **settings)
        lacking.extend(path for path in disk.lacking(tmp_path) if not path.endswith("run.lock"))

    with monkeypatch.context() as patch, seen_by(disk):
        patch.setattr(checkpoint, "save", saved)
        go(config, lucky=False)
    assert (tmp_path / "run" / "checkpoints").is_dir()
    return disk.early, lacking


def test_a_save_outlives_the_power_and_nothing_is_named_before_it_is_on_the_disk(
    model, tmp_path, monkeypatch
):
    assert cut(model, tmp_path, monkeypatch) == ([], [])


def nothing(*arguments):
    """No wait."""


def without_the_folder(beside, path):
    """Give a name, and do not wait for the folder around it."""
    with durable.locked(path.parent):
        os.rename(beside, path)


PLANTED = {
    "a file's content": (durable.Sink, "sync", lambda sink: sink._pour(), ("early", "step-")),
    "a folder's names": (durable, "_name", without_the_folder, ("lacking", "checkpoints")),
    "a folder's content": (durable, "sync", nothing, ("early", "model.safetensors")),
    "records": (Journal, "sync", nothing, ("lacking", "metrics.jsonl")),
}


@pytest.mark.long
@pytest.mark.parametrize("name", PLANTED)
def test_a_wait_that_is_left_out_is_noticed(name, model, tmp_path, monkeypatch):
    place, what, instead, (which, where) = PLANTED[name]
    monkeypatch.setattr(place, what, instead)
    early, lacking = cut(model, tmp_path, monkeypatch)
    assert any(where in path for path in {"early": early, "lacking": lacking}[which])


ALONE = {
    "store": lambda folder: write(folder / "deep" / "store", 1, [], tokenizer="t"),
    "text": lambda folder: folders.whole(folder / "config.toml", "seed = 1"),
    "records": lambda folder: Journal(folder / "metrics.jsonl").sync(),
}


@pytest.mark.parametrize("name", ALONE)
def test_what_is_written_alone_is_on_the_disk_and_a_wait_left_out_is_noticed(
    name, tmp_path, monkeypatch
):
    for waits in (True, False):
        folder = tmp_path / str(waits)
        folder.mkdir()
        disk = Disk(folder)
        with monkeypatch.context() as patch, seen_by(disk):
            if not waits:
                for module in (durable, folders, journal):
                    patch.setattr(module, "sync", nothing)
            ALONE[name](folder)
        assert disk.early == [] and (disk.lacking(folder) == []) is waits
