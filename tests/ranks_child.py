"""Training by one process and by several, as a program whose children train.

    python tests/ranks_child.py FOLDER [one|two|sharded|three]:CASE[,CASE...] ...

A word names processes and what they do, one case after the other: alone, two that each hold the
model, two or three that each hold a share of it.  What a case told lies in
FOLDER/WORLD-CASE-RANK.json, tensors of the first process in FOLDER/WORLD-CASE.safetensors.

Children are forked from a process that has imported everything and computed nothing.
"""

from __future__ import annotations

import faulthandler
import json
import os
import shutil
import socket
import sys
import traceback
from contextlib import contextmanager
from pathlib import Path

WORLDS = {"one": 1, "two": 2, "sharded": 2, "three": 3}
ENTRIES = (
    "token_tis",
    "topr",
    "self_normalized",
    "self_normalized_batch",
    "batch_std",
    "starting_point",
    "grpo_k3",
    "decoupled_ppo",
    "optimal_token_baseline",
)
COMMON: dict[str, dict] = {
    "model": {"dtype": "float64", "device": "cpu"},
    "task": {"low": -1.0},
    "sampling": {"max_tokens": 5, "head": 4},
    "train": {
        "prompts": 3,
        "group_size": 3,
        "micro_batch": 2,
        "steps": 1,
        "optimizer": "sgd",
        "learning_rate": 0.5,
    },
    "run": {"card": False, "save_every": 0},
}


class Place:
    """Where a process stands: its folder, its companions, and what shards a policy."""

    def __init__(self, base: Path, world: str, ranks, wrap) -> None:
        self.base, self.world, self.ranks, self.wrap = base, world, ranks, wrap

    def configuration(self, name: str, **sections):
        """Of a run in FOLDER/WORLD-NAME."""
        from windage.llm.config import build

        told = build({"model": {"path": str(self.base / "model")}}, build(COMMON))
        told = build({"run": {"folder": str(self.base / f"{self.world}-{name}")}}, told)
        return build(sections, told)

    def start(self, config, **settings):
        """A run of these processes."""
        from windage.llm import run

        return run.start(config, ranks=self.ranks, wrap=self.wrap, **settings)

    def offline(self, name: str, **sections):
        """A run on the recorded store, and its rows."""
        told = {"mode": "offline", "store": str(self.base / "one-record" / "rollouts")}
        sections["train"] = {**told, **sections.get("train", {})}
        ready = self.start(self.configuration(name, **sections))
        return ready, self.ranks.same(ready.source.rows(0) if self.ranks.first else None)

    def keep(self, name: str, tensors) -> None:
        """Write tensors of the first process."""
        from safetensors.torch import save_file

        if self.ranks.first:
            named = {n: v.detach().contiguous().clone() for n, v in tensors.items()}
            save_file(named, self.base / f"{self.world}-{name}.safetensors")


def told(outcome) -> dict:
    """What every process must say alike of an update."""
    seen = {n: getattr(outcome.batch, n) for n in ("logp", "probability_square", "head_logp")}
    return {
        "made": outcome.made,
        "norm": outcome.gradient_norm,
        "faults": [[fault.what, fault.response] for fault in outcome.faults],
        "rejected": outcome.rejected,
        "entropy": float(outcome.entropy.sum()),
        **{n: None if v is None else float(v.double().exp().sum()) for n, v in seen.items()},
    }


def record(place: Place) -> None:
    """A store with heads."""
    from windage.llm.train import train

    train(place.start(place.configuration("record", recipe={"name": "reinforce"})))


def moved(place: Place, ready, before) -> dict:
    """How far each weight went."""
    from windage.llm import models

    after = place.ranks.gathered(models.weights(ready.loaded.policy))
    return {name: after[name] - before[name] for name in after}


def updates(place: Place, ready, rows, names, keep: str) -> dict:
    """One update by each entry, all from the same weights, which are not the reference's."""
    import torch

    from windage.llm import models, recipe

    learner, found, kept = ready.learner, {}, {}

    def update(name):
        learner.estimator = recipe.ready(name, {}, ready.config)
        own = [dict(row) for row in rows]
        learner.prepare(own)
        return learner.update(own)

    update("token_tis")
    begin = [p.detach().clone() for p in ready.loaded.policy.parameters()]
    before = place.ranks.gathered(models.weights(ready.loaded.policy))
    before = {name: value.clone() for name, value in before.items()}
    for name in names:
        with torch.no_grad():
            for parameter, value in zip(ready.loaded.policy.parameters(), begin, strict=True):
                parameter.copy_(value)
        found[name] = told(update(name))
        steps = moved(place, ready, before)
        kept |= {f"{name} {weight}": value for weight, value in steps.items()}
    place.keep(keep, kept)
    return found


def entries(place: Place, names=ENTRIES) -> dict:
    """Of several scopes; several processes compute activations again."""
    alone = place.world == "one"
    ready, rows = place.offline(
        "entries",
        recipe={"name": "grpo_k3", "shadow": ["starting_point"]},
        train={"micro_batch": 4 if alone else 2},
        model={"gradient_checkpointing": not alone},
    )
    return updates(place, ready, rows, names, "entries")


def catalogue(place: Place) -> dict:
    """Every entry that these rows can train."""
    from windage.estimators.catalogue import CATALOGUE

    names = [n for n, e in CATALOGUE.items() if not {"values", "components"} & set(e.needs)]
    ready, rows = place.offline("catalogue", recipe={"name": "grpo_k3"})
    rows = [row | {"reward": max(row["reward"], 0.0)} for row in rows]
    return updates(place, ready, rows, names, "catalogue")


def adapters(place: Place) -> dict:
    """Low-rank adapters, whose reference is the model without them."""
    ready, rows = place.offline(
        "adapters", recipe={"name": "grpo_k3"}, model={"lora_rank": 2}, train={"optimizer": "adamw"}
    )
    return updates(place, ready, rows, ["grpo_k3"], "adapters")


CRITICS: dict[str, dict] = {
    "head": {"trunk": 0.5, "passes": 2, "minibatches": 2, "complete": True, "lam_value": 0.9},
    "model": {"learning_rate": 0.1, "passes": 2, "clip_value": 0.5},
}


def critics(place: Place) -> dict:
    """A learned critic's values, its fit, and the policy's update by them."""
    from windage.llm import models

    found, kept = {}, {}
    for kind, settings in CRITICS.items():
        ready, rows = place.offline(
            f"critic-{kind}",
            recipe={"name": "ppo"},
            critic={"kind": kind, **settings},
            train={"micro_batch": 4 if place.world == "one" else 2},
        )
        learner, own = ready.learner, [dict(row) for row in rows]
        module = learner.critic.module.state_dict()
        before = place.ranks.gathered(models.weights(ready.loaded.policy))
        before = {name: value.clone() for name, value in before.items()}
        begin = {name: value.clone() for name, value in module.items()}
        figures = learner.appraise(own, 0)
        values = [[float(x) for x in row[n]] for row in own for n in ("values", "returns")]
        again = learner.critic.appraise([dict(row) for row in own], *learner._responses(own), 1)
        found[kind] = told(learner.update(own)) | {
            "figures": [{k: v for k, v in f.items() if "time" not in k} for f in (figures, again)],
            "values": values,
        }
        steps = moved(place, ready, before)
        kept |= {f"{kind} policy {name}": value for name, value in steps.items()}
        kept |= {f"{kind} critic {name}": module[name] - begin[name] for name in begin}
    place.keep("critics", kept)
    return found


def faults(place: Place) -> dict:
    """A log-probability of the second process's is not a number."""
    from dataclasses import replace

    import torch

    from windage.llm import models
    from windage.llm.passes import Responses

    real, found, kept = Responses.through, {}, {}

    def spoiled(responses, *arguments):
        bad, forward = int(responses.parts(2)[1][0]), real(responses, *arguments)

        def passed(numbers):
            told = forward(numbers)
            spoil = torch.zeros_like(told.logp)
            if bad in numbers.tolist() and not spoiled.done:
                spoil[numbers.tolist().index(bad), 0] = float("nan")
                spoiled.done = True
            return replace(told, logp=told.logp + spoil)

        return passed

    for policy in ("skip", "set aside"):
        for name in ("token_tis", "self_normalized_batch"):
            ready, rows = place.offline(
                "faults", recipe={"name": name}, train={"on_nonfinite": policy}
            )
            before = place.ranks.gathered(models.weights(ready.loaded.policy))
            before = {n: value.clone() for n, value in before.items()}
            Responses.through, spoiled.done = spoiled, False
            try:
                found[f"{policy} {name}"] = told(ready.learner.update(rows))
            finally:
                Responses.through = real
            steps = moved(place, ready, before)
            kept |= {f"{policy}: {name} {weight}": value for weight, value in steps.items()}
            if place.ranks.first:
                shutil.rmtree(ready.folder)
            place.ranks.same(None)
    place.keep("faults", kept)
    return found


@contextmanager
def full_disk():
    """No room for checkpoints."""
    real = Path.mkdir

    def no_room(path, *arguments, **settings):
        if path.name == "checkpoints":
            raise OSError(28, "No space left on device")
        return real(path, *arguments, **settings)

    Path.mkdir = no_room
    try:
        yield
    finally:
        Path.mkdir = real


def refusals(place: Place) -> dict:
    """What one process refuses: its line, everywhere."""
    from windage.estimators.errors import BadInput
    from windage.llm import sources, train, update

    found, last = {}, place.ranks.index == place.ranks.count - 1

    def line(name, work) -> None:
        try:
            work()
            found[name] = "nothing"
        except BadInput as problem:
            found[name] = str(problem)

    config = place.configuration("refusals", recipe={"name": "token_tis"})

    class Broken:
        def rows(self, step):
            raise BadInput("no rows; allowed: some")

        def close(self):
            pass

    ready = place.start(config)
    ready.source = Broken() if place.ranks.first else sources.Elsewhere()
    line("drawn", lambda: train.train(ready))
    real = update.token_coefficients

    def overflow(*arguments):
        if last:
            raise ValueError("the own coefficient is inf; allowed: finite numbers")
        return real(*arguments)

    ready, rows = place.offline("refused", recipe={"name": "token_tis"})
    update.token_coefficients = overflow
    try:
        line("coefficient", lambda: ready.learner.update(rows))
    finally:
        update.token_coefficients = real
    ready = place.start(place.configuration("full", recipe={"name": "token_tis"}))
    with full_disk():
        line("disk", lambda: train.train(ready))
    line("folder", lambda: place.start(place.configuration("full")))
    return found


WHOLE: dict[str, dict] = {
    "recipe": {"name": "grpo_k3", "shadow": ["gspo", "starting_point"]},
    "reference": {"refresh": "ema", "every": 1, "alpha": 0.5},
    "evaluate": {"every": 2, "questions": 2, "samples": 1},
    "train": {
        "steps": 2,
        "optimizer": "adamw",
        "learning_rate": 0.01,
        "schedule": "cosine",
        "warmup": 1,
    },
    "run": {"save_every": 1, "keep": 3},
}


def whole(place: Place) -> dict:
    """Two steps of drawing, updating, publishing and saving."""
    from windage.llm.train import train

    records: list = []
    train(place.start(place.configuration("whole", **WHOLE)), records.append)
    return {"metrics": [{k: v for k, v in r.items() if "time/" not in k} for r in records]}


def resumed(place: Place) -> dict:
    """The second step again, after the first one of each world's run that is there."""
    from windage.llm.train import train

    for world in WORLDS:
        source, name = place.base / f"{world}-whole", f"after-{world}"
        config = place.configuration(name, **WHOLE)
        there = place.ranks.same(source.exists())
        if not there:
            continue
        if place.ranks.first:
            shutil.copytree(source, config.run.folder)
            shutil.rmtree(Path(config.run.folder) / "checkpoints" / "checkpoint-00000002")
        train(place.start(config, resume=True))
    return {}


def modes(place: Place) -> dict:
    """The modes that draw beside the training; adapters, and a critic, saved and resumed."""
    from windage.llm.train import train

    found = {}
    for mode, more in (("one step off", {}), ("asynchronous", {"max_lag": 1}), ("iterated", {})):
        sections = {**WHOLE, "train": WHOLE["train"] | {"mode": mode, **more}}
        name = mode.replace(" ", "-")
        ready = place.start(place.configuration(name, **sections))
        train(ready)
        found[mode] = ready.learner.updates
    for name, sections in (
        ("lora", {**WHOLE, "model": {"lora_rank": 2}, "reference": {}}),
        ("critic", {**WHOLE, "recipe": {"name": "ppo"}, "critic": {"kind": "head", "trunk": 0.5}}),
    ):
        config = place.configuration(name, **sections)
        train(place.start(config))
        place.ranks.same(None)
        if place.ranks.first:
            shutil.copytree(config.run.folder, again := f"{config.run.folder}-again")
            shutil.rmtree(Path(again) / "checkpoints" / "checkpoint-00000002")
        place.ranks.same(None)
        train(place.start(place.configuration(f"{name}-again", **sections), resume=True))
    return found


CASES = {
    case.__name__: case
    for case in (
        *(record, entries, catalogue, adapters, critics),
        *(faults, refusals, whole, resumed, modes),
    )
}


def work(base: Path, world: str, names: list[str]) -> None:
    """All cases of one process."""
    import torch
    from training_harness import Parity

    from windage.llm import processes, run

    torch.set_num_threads(1)
    run.task_of = lambda name, settings: Parity()
    faulthandler.dump_traceback_later(600, exit=True)
    ranks, wrap, _ = processes.join("cpu")
    place = Place(base, world, ranks, wrap)
    with processes.leaving(ranks):
        for name in names:
            found = CASES[name](place)
            file = base / f"{world}-{name}-{ranks.index}.json"
            file.write_text(json.dumps(found))


def forked(base: Path, world: str, names: list[str]) -> list[int]:
    """The processes of a world; their exit statuses."""
    count, children = WORLDS[world], []
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    for index in range(count):
        child = os.fork()
        if child:
            children.append(child)
            continue
        status = 1
        try:
            if count > 1:
                os.environ |= {"WORLD_SIZE": str(count), "MASTER_ADDR": "127.0.0.1"}
                os.environ |= {"MASTER_PORT": str(port), "LOCAL_WORLD_SIZE": str(count)}
                os.environ |= {"RANK": str(index), "LOCAL_RANK": str(index)}
            if world in ("sharded", "three"):
                os.environ |= {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2"}
            work(base, world, names)
            status = 0
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush(), sys.stderr.flush()
            os._exit(status)
    return [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]


def main() -> None:
    """Make the model and run every world."""
    base = Path(sys.argv[1])
    import accelerate.utils  # noqa: F401  children find everything imported
    import torch.distributed.fsdp
    import torch.distributed.tensor
    import transformers.models.llama.modeling_llama  # noqa: F401
    from tiny_language_model import make

    import windage.llm.train  # noqa: F401

    if not (base / "model").exists():
        import torch

        make(base / "model", width=16, layers=2, dtype=torch.float64)
    for word in sys.argv[2:]:
        world, _, names = word.partition(":")
        statuses = forked(base, world, names.split(","))
        if any(statuses):
            sys.exit(f"{word}: exit statuses {statuses}")


if __name__ == "__main__":
    main()
