"""What recorders need of each engine, looked for in the engine that is installed.

Nothing of an engine is imported: its files are read as text, so that an answer takes no time and
needs no accelerator.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from importlib.metadata import PackageNotFoundError, entry_points, version
from importlib.util import find_spec
from pathlib import Path
from typing import final

PLUGINS = "verl.plugins"


@final
@dataclass(frozen=True, kw_only=True)
class Engine:
    """An engine whose runs can be recorded.

    Args:
        name: of its distribution, as people write it.
        package: as it is imported.
        switch: what turns recording on, in one line.
        needs: names that must be there, by file inside the package; `Class.member(first, ...)` with
            the first parameters of a method.
        known: the version that this was written for.
    """

    name: str
    package: str
    switch: str
    needs: Mapping[str, tuple[str, ...]]
    known: str


ENGINES = {
    "verl": Engine(
        name="verl",
        package="verl",
        switch="WINDAGE_RECORD=$PWD/rollouts python3 -m verl.trainer.main_ppo ...",
        needs={
            "trainer/ppo/v1/trainer_base.py": (
                "PPOTrainer._compute_advantage(self, batch, metrics)",
                "PPOTrainer._compute_old_log_prob(self, batch, metrics)",
                "PPOTrainer.fit(self)",
            ),
            "trainer/ppo/ray_trainer.py": ("compute_advantage(data)",),
        },
        known="0.9.1",
    ),
    "trl": Engine(
        name="trl",
        package="trl",
        switch='from windage.llm.record import record_trl; record_trl(trainer, "rollouts")',
        needs={
            "trainer/grpo_trainer.py": (
                "GRPOTrainer._calculate_rewards(self)",
                "GRPOTrainer._generate_and_score_completions(self, inputs)",
                "GRPOTrainer._get_per_token_logps_and_entropies(self, model)",
                "GRPOTrainer._compute_loss(self, model, inputs)",
            ),
            "trainer/utils.py": (
                "add_fused_lm_head(model, temperature, cast_lm_head_to_fp32, outputs)",
            ),
        },
        known="1.16.0",
    ),
    "prime-rl": Engine(
        name="prime-rl",
        package="prime_rl",
        switch="--trainer.enable-token-export, then windage record prime-rl RUN --store STORE",
        needs={"configs/trainer.py": ("TrainerConfig.enable_token_export",)},
        known="0.8.0",
    ),
}


def installed(engine: Engine) -> str | None:
    """The version; None: not installed; "?": there without telling one."""
    if not folders(engine):
        return None
    try:
        return version(engine.name)
    except PackageNotFoundError:
        return "?"


def folders(engine: Engine) -> list[Path]:
    """Where the package lies, in parts if it comes from several distributions."""
    try:
        spec = find_spec(engine.package)
    except (ImportError, ValueError):
        return []
    return [Path(place) for place in (spec and spec.submodule_search_locations) or ()]


def missing(engine: Engine) -> list[str]:
    """What recording needs of an engine and is not there.

    For verl that is also this package among its plugins, without which the switch does nothing.
    """
    found = [
        f"{engine.package}/{file}: {name}"
        for file, names in engine.needs.items()
        for name in names
        if not any(_has(place / file, name) for place in folders(engine))
    ]
    if engine.package == "verl" and not any(
        point.name == "windage" for point in entry_points(group=PLUGINS)
    ):
        found.append(f"windage among the plugins {PLUGINS!r}: pip install windage beside verl")
    return found


def _has(file: Path, name: str) -> bool:
    """Whether a file defines a name with these first parameters."""
    path, _, words = name.partition("(")
    wanted = [word.strip() for word in words.rstrip(")").split(",") if word]
    return any(found[: len(wanted)] == wanted for found in _defined(file).get(path, ()))


@cache
def _defined(file: Path) -> dict[str, list[list[str]]]:
    """Parameters of each function, method and annotated field of a file, by its dotted name."""
    try:
        tree = ast.parse(file.read_text(encoding="utf-8"))
    except (OSError, SyntaxError, ValueError):
        return {}
    found: dict[str, list[list[str]]] = {}
    for name, parameters in _names(tree.body, ""):
        found.setdefault(name, []).append(parameters)
    return found


def _names(body: list[ast.stmt], above: str) -> Iterator[tuple[str, list[str]]]:
    for node in body:
        if isinstance(node, ast.ClassDef):
            yield from _names(node.body, f"{above}{node.name}.")
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            given = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
            yield f"{above}{node.name}", [argument.arg for argument in given]
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            yield f"{above}{node.target.id}", []
