"""The configuration of a run from a TOML file and flags: `--train.steps 20`."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

from windage.estimators.errors import BadInput
from windage.llm import config as configs
from windage.llm.config import Config, SamplingSection

# A number that nobody said, and the likeliest tokens recorded for a recipe that centers, if so.
UNSAID, HEAD = -1, 64


def add(parser: argparse.ArgumentParser) -> None:
    """A file and a flag for every key."""
    parser.set_defaults(seed=UNSAID)
    parser.add_argument("file", nargs="?", type=Path, metavar="CONFIG.toml", help="of the run")
    parser.usage = f"{parser.prog} [CONFIG.toml] [--SECTION.KEY VALUE ...] [FLAG ...]"
    meanings, groups = configs.meanings(), dict[str, Any]()
    for section, kind in configs.SECTIONS.items():
        about = (kind.__doc__ or "").partition("\n")[0]
        groups[section] = parser.add_argument_group(f"[{section}]", about)
    for name, kind, default in configs.entries():
        words = f"{meanings[name].rstrip('.')} (default: {_shown(default)})".replace("%", "%%")
        groups[name.partition(".")[0]].add_argument(f"--{name}", metavar=_form(kind), help=words)


def _shown(value: Any) -> str:
    """A default as a flag would say it."""
    if isinstance(value, bool):
        return str(value).lower()
    return "none" if value in ("", (), {}) else str(value)


def _form(kind: Any) -> str:
    """What a flag's value looks like."""
    if get_origin(kind) is Literal:
        return "|".join(word for word in get_args(kind) if word)
    forms = {bool: "true|false", int: "N", float: "X", str: "TEXT"}
    return forms.get(kind) or ("KEY=VALUE,..." if get_origin(kind) is dict else "NAME,...")


def resolve(arguments: argparse.Namespace) -> Config:
    """The file's configuration with the flags put in place.

    Raises:
        BadInput: whatever the file or a flag has wrong.
    """
    base = Config(sampling=SamplingSection(head=UNSAID))
    config = base if arguments.file is None else configs.read(arguments.file, base)
    given = vars(arguments)
    if arguments.seed != UNSAID:
        if given["run.seed"] is not None:
            raise BadInput("--seed beside --run.seed; allowed: one of them, which mean the same")
        given["run.seed"] = str(arguments.seed)
    told: dict[str, dict[str, Any]] = {}
    for name, kind, _ in configs.entries():
        if (text := given.get(name)) is not None:
            section, _, key = name.partition(".")
            told.setdefault(section, {})[key] = configs.parse(name, kind, text)
    return configs.build(told, config)


def check(config: Config) -> Config:
    """Refuse what no run can be made of, before anything heavy is imported.

    Raises:
        BadInput: names the key and what is allowed.
    """
    train = config.train
    if not config.model.path:
        raise BadInput("model.path is missing; allowed: a model's folder, or its name on the hub")
    if train.mode == "offline" and not train.store:
        raise BadInput("train.store is missing; allowed with offline: a folder of rollouts")
    if train.mode != "offline" and train.steps < 1:
        raise BadInput(f"train.steps is {train.steps}; allowed: at least 1")
    if train.minibatches > train.prompts:
        raise BadInput(
            f"train.minibatches is {train.minibatches}; allowed: at most train.prompts, "
            f"{train.prompts}, since a group is not divided"
        )
    if train.refill and train.mode not in ("synchronous", "iterated"):
        raise BadInput("train.refill is set; allowed with synchronous and iterated")
    if train.positive_share and train.mode not in ("offline", "iterated"):
        raise BadInput("train.positive_share is set; allowed with offline and iterated")
    if config.sampling.head == UNSAID:
        return configs.build({"sampling": {"head": _head(config)}}, config)
    return config


def _head(config: Config) -> int:
    """As many likeliest tokens as the recipe or a shadow of it centers over."""
    from windage.estimators import catalogue

    entries = [catalogue.get(name) for name in (config.recipe.name, *config.recipe.shadow)]
    return HEAD * any(entry.centering is not None for entry in entries)
