"""`windage evaluate`: held-out questions asked of a model, or of two that are compared."""

from __future__ import annotations

import argparse
import math
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from windage.cli.common import whole
from windage.cli.output import deliver, progress
from windage.estimators.errors import BadInput

if TYPE_CHECKING:
    from windage.llm.draw import Desk, Drawn
    from windage.llm.evaluate import Example, Side
    from windage.llm.tasks.protocol import Task

FILE, RESPONSES, SAVED = "evaluate.json", "responses", "checkpoints"
SAMPLERS = ("transformers", "vllm")
SPLITS: dict[str, Literal["train", "held out"]] = {"held-out": "held out", "train": "train"}
DTYPES = ("float32", "bfloat16", "float64")
# Flags that say how a model is asked; what was written before was asked already.
ASKING = {
    "task": "arithmetic",
    "split": "held-out",
    "questions": 100,
    "samples": 8,
    "sampler": "transformers",
    "temperature": 1.0,
    "top_k": 0,
    "top_p": 1.0,
    "max_tokens": 64,
    "batch": 64,
    "dtype": "float32",
    "device": "auto",
}


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the models, the task, and how responses are drawn."""
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = (
        "tasks: arithmetic, gsm8k, math, jsonl, reasoning_gym, verifier;\n"
        "their settings follow the name:\n"
        "  --task arithmetic:digits=2,operators=+-\n"
        "  --task gsm8k:held_out=test.jsonl"
    )
    one = "model folder, a run's folder (its last checkpoint), or a folder that --out wrote before"
    parser.add_argument("model", type=Path, metavar="MODEL", help=one)
    parser.add_argument(
        "--against", type=Path, metavar="MODEL", help=f"compare with another: {one}"
    )
    parser.add_argument(
        "--k", type=ks, metavar="K,...", help="of pass@k and maj@k; default: 1 to all, doubling"
    )
    helps: dict[str, tuple[Any, str]] = {
        "task": (str, "NAME[:key=value,...]"),
        "split": (choice(SPLITS), "|".join(SPLITS)),
        "questions": (whole(1), "N"),
        "samples": (whole(1), "N"),
        "sampler": (choice(SAMPLERS), "|".join(SAMPLERS)),
        "temperature": (number, "X"),
        "top_k": (whole(0), "K"),
        "top_p": (number, "X"),
        "max_tokens": (whole(1), "N"),
        "batch": (whole(1), "N"),
        "dtype": (choice(DTYPES), "|".join(DTYPES)),
        "device": (str, "NAME"),
    }
    for name, (kind, shown) in helps.items():
        words = f"default: {ASKING[name]}".replace("%", "%%")
        parser.add_argument(f"--{name.replace('_', '-')}", type=kind, metavar=shown, help=words)


def ks(text: str) -> tuple[int, ...]:
    """Numbers of samples, separated by commas."""
    if not re.fullmatch(r"[1-9]\d{0,5}(,[1-9]\d{0,5})*", text, re.ASCII):
        raise argparse.ArgumentTypeError(f"{text!r}; allowed: whole numbers from 1 on, as in 1,4")
    return tuple(sorted({int(part) for part in text.split(",")}))


def choice(allowed: Any) -> Any:
    """A `type=` that accepts some words."""

    def parse(text: str) -> str:
        if text not in allowed:
            raise argparse.ArgumentTypeError(f"{text!r}; allowed: {', '.join(allowed)}")
        return text

    return parse


def number(text: str) -> float:
    """A finite number."""
    try:
        if math.isfinite(found := float(text)):
            return found
    except ValueError:
        pass
    raise argparse.ArgumentTypeError(f"{text!r}; allowed: a number")


def written(path: Path) -> bool:
    """Whether a folder holds an evaluation rather than a model.

    Raises:
        BadInput: it holds neither.
    """
    if (path / FILE).is_file():
        return True
    if (path / "config.json").is_file() or (path / SAVED).is_dir():
        return False
    what = "holds neither" if path.is_dir() else "is no folder"
    raise BadInput(
        f"{str(path)!r} {what}; allowed: a model folder with config.json, a run's folder with "
        f"{SAVED}, or a folder with {FILE}"
    )


def model_of(place: Path) -> Path:
    """The folder itself, or the newest whole checkpoint of a run.

    Raises:
        BadInput: the run has none.
    """
    if (place / "config.json").is_file():
        return place
    from windage.llm import checkpoint

    found = checkpoint.latest(place / SAVED)
    if found is None:
        raise BadInput(f"{str(place)!r} has no checkpoint yet; allowed: a run that saved one")
    return found


def run(arguments: argparse.Namespace) -> int:
    """Ask the models, or read what they were asked; print the figures."""
    places = [arguments.model, *([arguments.against] if arguments.against else [])]
    kept = {place: written(place) for place in places}
    check(arguments, kept)
    task = None if all(kept.values()) else made(arguments)
    try:
        from windage.llm import evaluate

        sides: list[Side] = []
        for place, name in zip(places, names(places), strict=True):
            if task is None or kept[place]:
                sides += evaluate.read(place)
            else:
                sides.append(ask(place, name, arguments, task))
        if len(sides) > 2:
            raise BadInput(f"{len(sides)} models in all; allowed: one, or two to compare")
        found = evaluate.document(distinct(sides), arguments.k or doubling(sides))
    finally:
        if task is not None:
            task.close()
    deliver(found, arguments)
    return 0


def check(arguments: argparse.Namespace, kept: Mapping[Path, bool]) -> None:
    """Refuse what does not go together, and fill in what was not given.

    Raises:
        BadInput: names the flag.
    """
    given = [name for name in ASKING if getattr(arguments, name) is not None]
    if all(kept.values()) and given:
        flag = f"--{given[0].replace('_', '-')}"
        raise BadInput(f"{flag}: everything was asked before; allowed: with a model folder")
    for name, value in ASKING.items():
        if name not in given:
            setattr(arguments, name, value)
    if not all(kept.values()) and arguments.k and arguments.k[-1] > arguments.samples:
        raise BadInput(
            f"--k: {arguments.k[-1]} is more than the {arguments.samples} samples; allowed: up to "
            "--samples"
        )
    if arguments.out is not None and (arguments.out / RESPONSES).exists():
        raise BadInput(
            f"--out {str(arguments.out)!r} holds responses of an evaluation; allowed: a new folder"
        )


def names(places: Sequence[Path]) -> list[str]:
    """What the models are called: the folders' own names where they differ."""
    short = [place.resolve().name for place in places]
    return short if len(set(short)) == len(short) else [str(place) for place in places]


def distinct(sides: Sequence[Side]) -> list[Side]:
    """Sides of different names."""
    if len({side.model for side in sides}) == len(sides):
        return list(sides)
    return [replace(side, model=f"{side.model} ({n})") for n, side in enumerate(sides, 1)]


def doubling(sides: Sequence[Side]) -> list[int]:
    """1, 2, 4, ... and all samples."""
    most = min(side.samples for side in sides)
    return sorted({2**n for n in range(most.bit_length())} | {most})


def made(arguments: argparse.Namespace) -> Task:
    """The task, its first question read, before anything heavy is loaded."""
    from windage.llm.tasks import index

    task = index.get(*index.parse(arguments.task))
    task.questions(SPLITS[arguments.split], arguments.seed, 0, 1)
    return task


def ask(place: Path, name: str, arguments: argparse.Namespace, task: Task) -> Side:
    """Put the questions to one model."""
    from windage.llm import evaluate, folder, rollouts
    from windage.llm.tasks import index

    place = model_of(place)
    desk = seated(place, arguments, task)
    shown: list[Example] = []

    def keep(piece: int, drawn: Sequence[Drawn]) -> None:
        if piece == 0:
            shown.extend(evaluate.examples(drawn, arguments.samples))
        if arguments.out is not None:
            store = arguments.out / RESPONSES / name.strip("/").replace("/", "_")
            rows = [one.row for one in drawn]
            rollouts.write(store, piece, rows, tokenizer=desk.loaded.fingerprint)

    told = {"sampler": arguments.sampler, "dtype": arguments.dtype, **asdict(desk.sampling)}
    del told["head"], told["stop_ids"]  # none was asked for
    start = time.perf_counter()
    try:
        with progress(f"questions, {name}") as advance:
            tallies = evaluate.asked(
                desk,
                arguments.questions,
                arguments.samples,
                seed=arguments.seed,
                split=SPLITS[arguments.split],
                keep=keep,
                advance=advance,
            )
    finally:
        desk.sampler.close()
    return evaluate.Side(
        model=name,
        task=task.name,
        settings=index.parse(arguments.task)[1],
        split=SPLITS[arguments.split],
        seed=arguments.seed,
        sampling=told,
        seconds=time.perf_counter() - start,
        tallies=tallies,
        examples=tuple(shown),
        versions=folder.versions(),
        inputs=_inputs(place, arguments.task),
    )


def _inputs(place: Path, task: str) -> dict[str, str]:
    """Hashes of the files of a model and of a task."""
    from windage.llm import folder
    from windage.llm.config import Config, ModelSection, TaskSection
    from windage.llm.tasks import index

    section = TaskSection(settings=dict(index.parse(task)[1]))
    return folder.inputs(Config(model=ModelSection(path=str(place)), task=section))


def seated(place: Path, arguments: argparse.Namespace, task: Task) -> Desk:
    """A model and its sampler before a task."""
    from windage.llm import models
    from windage.llm.config import Config, ModelSection, SamplingSection
    from windage.llm.draw import Desk
    from windage.llm.run import sampler_of
    from windage.llm.samplers.protocol import Sampling
    from windage.llm.verify import Scale

    sampling = Sampling(
        max_tokens=arguments.max_tokens,
        temperature=arguments.temperature,
        top_k=arguments.top_k or None,
        top_p=arguments.top_p,
    ).check()
    loaded = models.load(place, dtype=arguments.dtype, device=arguments.device)
    config = Config(
        model=ModelSection(path=str(place), dtype=arguments.dtype, device=arguments.device),
        sampling=SamplingSection(
            engine=arguments.sampler, batch=arguments.batch, max_tokens=sampling.max_tokens
        ),
    )
    sampler = sampler_of(config, loaded, str(place))
    return Desk(task=task, sampler=sampler, sampling=sampling, loaded=loaded, scale=Scale())
