"""Several processes make the update of one: each with the model, or each with a share of it.

What the processes do is in `ranks_child.py`; here their figures are compared.  Float64, so that the
order of sums is all that may differ.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

import pytest
import torch
from checks import assert_close
from safetensors.torch import load_file
from training_harness import content, different

from windage.llm import processes
from windage.llm.ranks import ALONE, Ranks

SECONDS = 1200
CLOSE = 1e-6


def environment() -> dict[str, str]:
    """Of a child that finds the package and takes one thread."""
    return os.environ | {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"}


def worked(folder: Path, *words: str) -> Path:
    """The folder in which children did what the words say."""
    child = Path(__file__).with_name("ranks_child.py")
    done = subprocess.run(
        [sys.executable, str(child), str(folder), *words],
        capture_output=True,
        text=True,
        timeout=SECONDS,
        env=environment(),
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


@pytest.fixture(scope="module")
def short(tmp_path_factory) -> Path:
    return worked(
        tmp_path_factory.mktemp("short"),
        "one:record,entries,critics,faults,whole",
        "two:entries,critics,faults,refusals",
        "sharded:entries,critics,whole",
    )


@pytest.fixture(scope="module")
def everything(tmp_path_factory) -> Path:
    cases = "entries,adapters,critics,catalogue,faults,refusals,whole"
    return worked(
        tmp_path_factory.mktemp("everything"),
        f"one:record,{cases}",
        *(f"{world}:{cases}" for world in ("two", "sharded", "three")),
        *(f"{world}:resumed,modes" for world in ("one", "two", "sharded")),
    )


def said(folder: Path, world: str, case: str) -> list[dict]:
    """What each process of a world said of a case."""
    files = sorted(folder.glob(f"{world}-{case}-?.json"))
    return [json.loads(file.read_text()) for file in files]


def assert_same_said(folder: Path, case: str, world: str) -> None:
    """All processes of a world say what one process says, figures up to rounding."""
    (alone,), others = said(folder, "one", case), said(folder, world, case)
    assert len(others) == (3 if world == "three" else 2)
    for other in others:
        assert_alike(other, alone, case)


def assert_alike(found, wanted, where: str) -> None:
    """The same, numbers to 1e-6 relative; those that are rounding errors throughout, near 0."""
    if isinstance(wanted, dict):
        assert found.keys() == wanted.keys(), where
        for key in wanted:
            assert_alike(found[key], wanted[key], f"{where} {key}")
    elif isinstance(wanted, list):
        assert len(found) == len(wanted), where
        for n, value in enumerate(wanted):
            assert_alike(found[n], value, f"{where} {n}")
    elif isinstance(wanted, float):
        assert found == pytest.approx(wanted, rel=CLOSE, abs=1e-12), where
    else:
        assert found == wanted, where


def updates(folder: Path, world: str, case: str) -> dict[str, torch.Tensor]:
    """How far all weights went, a row a name."""
    parts: dict[str, list] = defaultdict(list)
    for key, value in sorted(load_file(folder / f"{world}-{case}.safetensors").items()):
        parts[key.rpartition(" ")[0]].append(value.flatten())
    return {name: torch.cat(values) for name, values in parts.items()}


def assert_same_update(folder: Path, case: str, world: str, still: tuple[str, ...] = ()) -> int:
    """Every update is one process's to 1e-6 of its largest entry; how many there were."""
    alone, others = updates(folder, "one", case), updates(folder, world, case)
    assert alone.keys() == others.keys()
    for name, wanted in alone.items():
        largest = float(wanted.abs().max())
        assert (largest == 0) == name.startswith(still), name
        assert float((others[name] - wanted).abs().max()) <= CLOSE * largest, name
    return len(alone)


def weights(run: Path, step: int = 2) -> torch.Tensor:
    named = load_file(run / "checkpoints" / f"checkpoint-{step:08d}" / "model.safetensors")
    return torch.cat([named[name].flatten() for name in sorted(named)])


def assert_same_run(folder: Path, found: str, wanted: str = "one-whole") -> None:
    """The weights of two runs, to 1e-6 of how far they went in the second step."""
    end = weights(folder / wanted)
    largest = float((end - weights(folder / wanted, 1)).abs().max())
    assert largest > 0
    assert float((weights(folder / found) - end).abs().max()) <= CLOSE * largest


@pytest.mark.parametrize("world", ["two", "sharded"])
def test_an_update_of_two_processes_is_that_of_one_in_every_scope(short, world):
    """Token, response, group and batch; centering; a reference; with a pass ahead."""
    assert assert_same_update(short, "entries", world) == 9
    assert_same_said(short, "entries", world)


@pytest.mark.parametrize("world", ["two", "sharded"])
def test_a_critic_of_two_processes_says_learns_and_pulls_as_that_of_one(short, world):
    """A head on the policy's trunk and a model of its own: values, two fits, the update by them."""
    assert assert_same_update(short, "critics", world) == 4
    assert_same_said(short, "critics", world)
    for told in said(short, world, "critics"):
        for one in told.values():
            assert max(abs(value) for row in one["values"] for value in row) > 0.1
        assert told["head"]["figures"][0]["critic__completed"] > 0


def test_a_fault_that_one_process_sees_is_every_process_s(short):
    """Skipped or set aside as by one process, whether or not there is a pass ahead."""
    assert_same_update(short, "faults", "two", still=("skip",))
    assert_same_said(short, "faults", "two")
    for one in said(short, "two", "faults"):
        assert {key: told["made"] for key, told in one.items()} == {
            key: key.startswith("set aside") for key in one
        }


def test_what_one_process_refuses_ends_all_with_the_same_line(short):
    """The first one: drawing, the folder, the disk; the last one: a coefficient."""
    first, last = said(short, "two", "refusals")
    assert first == last
    words = {"drawn": "no rows", "coefficient": "inf", "disk": "No space", "folder": "holds a run"}
    assert first.keys() == words.keys()
    for name, word in words.items():
        assert word in first[name] and "allowed" in first[name]


def test_a_sharded_run_draws_trains_measures_evaluates_and_saves_as_one_process(short):
    assert_same_run(short, "sharded-whole")
    first, last = said(short, "sharded", "whole")
    assert_alike(first["metrics"], said(short, "one", "whole")[0]["metrics"], "metrics")
    assert last["metrics"] == []


@pytest.mark.long
@pytest.mark.parametrize("world", ["two", "sharded", "three"])
def test_every_entry_of_the_catalogue_and_adapters_and_three_processes(everything, world):
    assert assert_same_update(everything, "catalogue", world, still=STILL) > 60
    assert_same_update(everything, "adapters", world)
    assert_same_update(everything, "faults", world, still=("skip",))
    assert_same_run(everything, f"{world}-whole")
    assert_same_update(everything, "critics", world)
    for case in ("catalogue", "adapters", "critics", "faults"):
        assert_same_said(everything, case, world)
    lines = said(everything, world, "refusals")
    assert all(one == lines[0] for one in lines)


# Entries whose bounds let nothing of this batch through, or that have no gradient at it.
STILL = ("geometric_mask", "gspo", "luspo", "seq_mask_tis", "starting_point", "worst_token_mask")


@pytest.mark.long
@pytest.mark.parametrize("world", ["one", "two", "sharded"])
def test_a_resumed_run_is_bitwise_the_run_and_opens_with_other_processes(everything, world):
    def files(name: str) -> dict[str, object]:
        run = everything / name
        found = [path for path in run.rglob("*") if path.is_file() and path.name != "run.lock"]
        return {
            path.relative_to(run).as_posix(): content(path, run)
            for path in found
            if not path.name.startswith("config")  # names the folder
        }

    assert_same_run(everything, f"{world}-critic", "one-critic")
    for run, again in (
        ("whole", f"after-{world}"),
        ("lora", "lora-again"),
        ("critic", "critic-again"),
    ):
        assert different(files(f"{world}-{again}"), files(f"{world}-{run}")) == []
    for other in ("one", "two", "sharded", "three"):
        assert_same_run(everything, f"{world}-after-{other}")
    for told in said(everything, world, "modes"):
        assert told == {"one step off": 2, "asynchronous": 2, "iterated": 2}


LAUNCHED = {
    "plain": ["--multi_gpu"],
    "sharded": ["--use_fsdp", "--fsdp_version", "2"],
}


@pytest.mark.long
@pytest.mark.parametrize("kind", LAUNCHED)
def test_the_documented_command_trains_and_refuses_in_one_line(kind, tmp_path, everything):
    scripts = Path(sys.executable).parent
    words = [scripts / "accelerate", "launch", *LAUNCHED[kind], "--num_processes", "2"]
    words += ["--num_machines", "1", "--mixed_precision", "no", "--dynamo_backend", "no"]
    words += ["--main_process_port", "0", "--no_python", scripts / "windage", "train"]
    words += ["--model.path", everything / "model", "--model.device", "cpu", "--quiet"]
    words += ["--recipe.name", "reinforce", "--sampling.max_tokens", "3", "--train.steps", "1"]
    words += ["--train.prompts", "2", "--train.group_size", "2", "--run.card", "false"]
    words += ["--run.folder", tmp_path / "run"]

    def launched() -> subprocess.CompletedProcess[str]:
        told = [str(word) for word in words]
        return subprocess.run(
            told, capture_output=True, text=True, timeout=SECONDS, env=environment()
        )

    done = launched()
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("Training: run") == 1
    again = launched()
    assert again.returncode != 0
    assert again.stderr.count("windage train: run.folder") == 1 and "Rank" not in again.stdout


def test_alone_nothing_is_sent_and_a_refusal_is_the_problem_itself():
    problem = ValueError("as it is")
    with pytest.raises(ValueError, match="as it is") as caught:
        ALONE.agree(problem)
    assert caught.value is problem
    values = torch.ones(2)
    assert ALONE.sum(values) is values and ALONE.everyone([1]) == [1] and ALONE.same("x") == "x"
    assert dict(ALONE.spread({"a": values})) == {"a": values}
    assert processes.join("cpu")[0] is ALONE


@pytest.mark.parametrize("count", [1, 2, 3, 5])
@pytest.mark.parametrize("size", [0, 1, 2, 3, 7])
def test_every_part_counts_once_and_all_processes_pass_equally_often(count, size):
    parts = [torch.tensor([2 * n, 2 * n + 1]) for n in range(size)]
    shares = [list(Ranks(index=n, count=count).share(parts)) for n in range(count)]
    assert len({len(share) for share in shares}) == 1
    counted = [int(part[0]) // 2 for share in shares for part, counts in share if counts]
    assert sorted(counted) == list(range(size))
    told = sum(Ranks(index=n, count=count).own(parts, 2 * size + 1).int() for n in range(count))
    assert_close(told, torch.ones(2 * size + 1, dtype=torch.int32))


def test_sharding_that_is_not_fsdp2_is_refused(monkeypatch):
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    monkeypatch.setenv("FSDP_CPU_RAM_EFFICIENT_LOADING", "false")
    monkeypatch.setenv("WORLD_SIZE", "2")
    for name, value, word in (
        ("FSDP_VERSION", "1", "version 1"),
        ("FSDP_OFFLOAD_PARAMS", "true", "offload"),
        ("ACCELERATE_USE_DEEPSPEED", "true", "DeepSpeed"),
    ):
        with monkeypatch.context() as patch:
            patch.setenv("FSDP_VERSION", "2")
            patch.setenv(name, value)
            with pytest.raises(ValueError, match=word):
                processes.join("cpu")
