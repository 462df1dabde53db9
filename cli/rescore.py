"""`windage diagnose --rescore`: a sample under the policies between sampler and trainer."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from windage.cli.common import whole
from windage.cli.output import progress
from windage.estimators.errors import BadInput

FORMATS = ("float32", "bfloat16", "float64")
SETTINGS = ("temperature", "top_p", "top_k")
# Flags that mean nothing without --rescore, and what they are without being given.
DEFAULTS: Mapping[str, Any] = {
    "sampler_model": None,
    "sample": 64,
    "policy_format": ("float32", None),
    "sampler_format": ("float32", None),
    "policy_temperature": 1.0,
    "drawn": None,
    "kept_cache": False,
    "write": None,
    "device": "auto",
}


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the models and how they were run."""
    flags = parser.add_argument_group("rescoring: each cause's share of the mismatch")
    flags.add_argument("--rescore", metavar="MODEL", help="folder of the model that was trained")
    flags.add_argument(
        "--sampler-model",
        type=versions,
        metavar="FOLDER | VERSION=FOLDER,...",
        help="the weights that drew; default: the model's, so that lag counts as the engine's",
    )
    flags.add_argument("--sample", type=whole(2), metavar="N", help="responses; default: 64")
    for side in ("policy", "sampler"):
        flags.add_argument(
            f"--{side}-format",
            type=numbers,
            metavar="WEIGHTS[/PRODUCTS]",
            help=f"numbers of the {side}: {', '.join(FORMATS)}; default: float32",
        )
    flags.add_argument(
        "--policy-temperature",
        type=float,
        metavar="X",
        help="that the trainer's log-probabilities hold; default: 1",
    )
    flags.add_argument(
        "--drawn",
        type=settings,
        metavar="KEY=X,...",
        help="temperature, top_p and top_k of responses that do not tell them",
    )
    flags.add_argument(
        "--kept-cache",
        action="store_true",
        default=None,
        help="the sampler went on with keys and values of weights that were replaced",
    )
    flags.add_argument(
        "--write",
        metavar="FILE",
        help="parquet file for whole groups of N responses or a few more, with the model's "
        "log-probabilities, those of a recorded head as well; a dump to diagnose in turn",
    )
    flags.add_argument("--device", metavar="NAME", help="cpu, cuda, ...; default: auto")


def versions(text: str) -> dict[int | None, str]:
    """Read a folder, or folders by version."""
    if Path(text).exists() or "=" not in text:
        return {None: text}
    found: dict[int | None, str] = {}
    for pair in text.split(","):
        version, equals, folder = (part.strip() for part in pair.partition("="))
        if not (version.isascii() and version.isdigit() and equals and folder):
            raise argparse.ArgumentTypeError(
                f"{pair!r}; allowed: a folder, or VERSION=FOLDER pairs joined by commas"
            )
        if int(version) in found:
            raise argparse.ArgumentTypeError(f"version {version} twice; allowed: once each")
        found[int(version)] = folder
    return found


def numbers(text: str) -> tuple[str, str | None]:
    """Read the format of weights, and of products where it differs."""
    weights, slash, products = text.partition("/")
    if weights not in FORMATS or (slash and products not in FORMATS):
        raise argparse.ArgumentTypeError(
            f"{text!r}; allowed: one of {', '.join(FORMATS)}, or two of them joined by /"
        )
    return weights, products or None


def settings(text: str) -> dict[str, float]:
    """Read how responses were drawn."""
    found: dict[str, float] = {}
    for pair in text.split(","):
        key, _, value = (part.strip() for part in pair.partition("="))
        try:
            found[key] = int(value) if key == "top_k" else float(value)
        except ValueError:
            key = ""
        if key not in SETTINGS:
            raise argparse.ArgumentTypeError(
                f"{pair!r}; allowed: {', '.join(f'{name}=NUMBER' for name in SETTINGS)}"
            )
    return found


def checked(arguments: argparse.Namespace) -> dict[str, Any] | None:
    """What was asked, with what was not said filled in; None: no rescoring.

    Raises:
        BadInput: a flag without the model that it needs, or a folder that is not there.
    """
    told = {name: getattr(arguments, name) for name in DEFAULTS}
    if arguments.rescore is None:
        for name, value in told.items():
            if value is not None:
                flag = f"--{name.replace('_', '-')}"
                raise BadInput(f"{flag} needs --rescore MODEL; allowed: both or neither")
        return None
    if arguments.dump is None:
        raise BadInput("--rescore needs a dump; allowed: a file or folder before it")
    asked = {name: DEFAULTS[name] if value is None else value for name, value in told.items()}
    for folder in (arguments.rescore, *(asked["sampler_model"] or {}).values()):
        if not (Path(folder) / "config.json").is_file():
            raise BadInput(f"{folder!r} holds no model; allowed: a folder with config.json")
    if asked["write"] is not None:
        _writable(Path(asked["write"]))
    return asked | {"rescore": arguments.rescore}


def _writable(path: Path) -> None:
    """Refuse a place for a new file before the models are loaded.

    Raises:
        BadInput: something is there, or no folder for it is.
    """
    if path.exists() or not path.parent.is_dir():
        what = "is there already" if path.exists() else "lies in no folder"
        raise BadInput(f"--write {str(path)!r} {what}; allowed: a new file in a folder")


def written(path: Path, columns: Mapping[str, str] | None, asked: Mapping[str, Any]) -> int:
    """Write whole groups of a dump with the model's log-probabilities; how many responses.

    Args:
        path: the dump.
        columns: of files of no known format.
        asked: of `checked`.
    """
    from windage.analysis.diagnose import rescored as shares
    from windage.analysis.diagnose.written import write
    from windage.llm.heads import told

    rows = shares.groups(path, count=asked["sample"], columns=columns, settings=asked["drawn"])
    dtype, products = asked["policy_format"]
    with progress("tokens") as advance:
        found = told(
            [vars(row) for row in rows],
            policy=asked["rescore"],
            dtype=dtype,
            autocast=products,
            temperature=asked["policy_temperature"],
            device=asked["device"],
            advance=lambda done: advance(done, done),
        )
    write(Path(asked["write"]), [replace(r, **one) for r, one in zip(rows, found, strict=True)])
    return len(rows)


def rescored(
    path: Path, columns: Mapping[str, str] | None, asked: Mapping[str, Any], seed: int
) -> dict[str, Any]:
    """Shares of a sample of a dump.

    Args:
        path: the dump.
        columns: of files of no known format.
        asked: of `checked`.
        seed: of the sample.
    """
    from windage.analysis.diagnose import rescored as shares
    from windage.llm.rescore import CAUSES, Format, rescore

    rows = shares.sample(
        path, count=asked["sample"], seed=seed, columns=columns, settings=asked["drawn"]
    )
    weights = asked["sampler_model"] or {}
    formats = {side: asked[f"{side}_format"] for side in ("policy", "sampler")}
    with progress("tokens") as advance:
        found = rescore(
            rows,
            policy=asked["rescore"],
            versions=weights,
            temperature=asked["policy_temperature"],
            kept_cache=asked["kept_cache"],
            device=asked["device"],
            advance=lambda done: advance(done, done),
            **{
                f"{side}_format": Format(dtype=dtype, autocast=products)
                for side, (dtype, products) in formats.items()
            },
        )
    about = {
        "policy": asked["rescore"],
        "sampler": {"all" if k is None else str(k): folder for k, folder in weights.items()},
        **{f"{side}_format": "/".join(filter(None, pair)) for side, pair in formats.items()},
        "policy_temperature": asked["policy_temperature"],
        "kept_cache": asked["kept_cache"],
        "widened": found.widened,
        "written": None,
    }
    if asked["write"] is not None:
        count = written(path, columns, asked)
        about["written"] = {"path": asked["write"], "responses": count}
    return shares.block(
        rows,
        recorded=found.recorded,
        repeated=found.repeated,
        policies=found.policies,
        mask=found.mask,
        causes=CAUSES,
        about=about,
    )
