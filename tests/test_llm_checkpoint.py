"""Checkpoints bit for bit, whole at every call or not there, refused when damaged; one run each."""

from __future__ import annotations

import errno
import json
import math
import os
import random
import resource
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from checks import refused
from disk_faults import failing, forked, killed, short, tampered
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file

from windage.estimators.errors import BadInput
from windage.llm import durable
from windage.llm.checkpoint import (
    LOCK,
    MANIFEST,
    STATE,
    claim,
    latest,
    load,
    path_of,
    prune,
    rewind,
    save,
    steps,
)
from windage.llm.durable import SUFFIX
from windage.llm.packed import pack_optimizer, pack_random, unpack_optimizer, unpack_random
from windage.llm.plain import document, plain
from windage.llm.tensors import KINDS

FORKS = pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
STATE_OF = {"position": 3, "rate": 0.1, "queue": ["a", None, True], "best": -math.inf}


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    """Waits for no disk: neither an error nor a kill of the process shows whether it did."""
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)


def bits(tensor):
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    return tensor.dtype, tuple(tensor.shape), flat.view(torch.uint8).numpy().tobytes()


def assert_same_bits(found, wanted):
    assert found.keys() == wanted.keys()
    for name in wanted:
        assert bits(found[name]) == bits(wanted[name]), name


def tensors_of(step: int) -> dict:
    generator = torch.Generator().manual_seed(step)
    return {
        "trainer": {
            "state.0.exp_avg": torch.randn(40, 30, generator=generator),
            "half": torch.randn(5, generator=generator).bfloat16(),
        },
        "reference": {"weight": torch.randn(3, generator=generator).double()},
    }


def beside(folder: Path) -> None:
    """What a callback writes, in a folder of its own too."""
    (folder / "config.json").write_text("{}")
    (folder / "parts").mkdir()
    (folder / "parts" / "more.txt").write_text("more")


def saved(folder: Path, step: int, keep: int = 2) -> Path:
    state = STATE_OF | {"step": step}
    return save(folder, step, tensors=tensors_of(step), state=state, keep=keep, also=beside)


def assert_whole(folder: Path, allowed) -> list[int]:
    """Every checkpoint there is whole, and nothing else lies in the folder."""
    found = steps(folder)
    assert found in allowed
    assert {path.name for path in folder.iterdir()} == {path_of(folder, n).name for n in found}
    for step in found:
        one = load(path_of(folder, step))
        assert one.step == step and one.state == STATE_OF | {"step": step}
        for group, wanted in tensors_of(step).items():
            assert_same_bits(one.tensors[group], wanted)
        assert (one.path / "parts" / "more.txt").read_text() == "more"
    return found


def test_a_checkpoint_holds_what_was_given_and_older_ones_go(tmp_path):
    for step in (1, 2, 3):
        path = saved(tmp_path, step)
        assert path == path_of(tmp_path, step) == latest(tmp_path)
    assert_whole(tmp_path, [[2, 3]])
    with refused("checkpoint-00000003", os.strerror(errno.EEXIST), error=BadInput):
        saved(tmp_path, 3)
    assert_whole(tmp_path, [[2, 3]])
    with refused("checkpoint-00000001", "before step 3", error=BadInput):
        saved(tmp_path, 1)
    prune(tmp_path, 1)
    assert_whole(tmp_path, [[3]])
    prune(tmp_path, 1), saved(tmp_path, 4), rewind(tmp_path, 3)
    assert_whole(tmp_path, [[3]])
    assert latest(tmp_path / "nowhere") is None


@pytest.mark.parametrize("dtype", KINDS)
def test_every_kind_of_number_and_shape_round_trips_bit_for_bit(dtype, tmp_path):
    words = torch.arange(256 * 8, dtype=torch.int64).to(torch.uint8)
    if dtype == torch.bool:
        words = words % 2
    named = {
        "vector": words.view(dtype),
        "scalar": words[:8].view(dtype)[0].clone(),
        "empty": torch.zeros(0, 3, dtype=dtype),
        "sliced": words.view(dtype)[: 16 * 2].view(4, -1).T[1:],
        "odd": torch.zeros(3, dtype=torch.uint8),
    }
    path = save(tmp_path, 1, tensors={"group": named}, state={}, keep=1)
    assert_same_bits(load(path).tensors["group"], named)
    assert_same_bits(load_file(path / "group.safetensors"), named)


def test_tensors_of_other_kinds_are_refused_by_name(tmp_path):
    for odd in (torch.zeros(2, dtype=torch.complex64), torch.eye(2).to_sparse()):
        with refused("'odd'", "float32", error=BadInput):
            save(tmp_path, 1, tensors={"group": {"odd": odd}}, state={}, keep=1)
    with refused("'../up'", error=BadInput):
        save(tmp_path, 1, tensors={"../up": {}}, state={}, keep=1)
    assert list(tmp_path.iterdir()) == []


PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


@given(state=st.dictionaries(st.text(), PLAIN, max_size=3))
def test_plain_values_round_trip_through_strict_json(state, tmp_path_factory):
    path = save(tmp_path_factory.mktemp("state"), 1, tensors={}, state=state, keep=1)
    json.loads((path / STATE).read_text(), parse_constant=lambda word: pytest.fail(word))
    # repr tells 0.0 from -0.0, 1 from 1.0 and True, and NaN from NaN.
    assert repr(load(path).state) == repr(state)


def test_values_that_json_does_not_hold_are_refused_by_place(tmp_path):
    odds = {"a": {1: 2}}, {"a": [torch.ones(1)]}
    for odd, place in zip(odds, ("state.a has the key 1", "state.a[0] is a Tensor"), strict=True):
        with refused(place, error=BadInput):
            save(tmp_path, 1, tensors={}, state=odd, keep=1)
    assert list(tmp_path.iterdir()) == []
    assert document(plain((0.1, math.nan))) == '[0.1, "nan"]'


@pytest.fixture
def calls(tmp_path_factory, monkeypatch):
    """Names of all calls of a save that writes checkpoint 3 and removes checkpoint 1."""
    monkeypatch.setattr(durable, "BUFFER", 2000)
    folder = tmp_path_factory.mktemp("calls")
    saved(folder, 1), saved(folder, 2)
    with tampered() as seen:
        saved(folder, 3)
    assert {"open", "mkdir", "write", "fsync", "rename", "unlink", "rmdir"} <= set(seen.names)
    return seen.names


@FORKS
def test_a_kill_at_any_call_of_a_save_leaves_the_old_or_the_new_state(calls, tmp_path):
    kept = []
    for at, name in enumerate(calls):
        folder = tmp_path / str(at)
        saved(folder, 1), saved(folder, 2)

        def work(at=at, folder=folder):
            with tampered(at, killed):
                saved(folder, 3)
            return 0

        assert forked(work) < 0, name
        kept.append(assert_whole(folder, [[1, 2], [1, 2, 3], [2, 3]]))
        if 3 not in kept[-1]:
            saved(folder, 3)
        assert 3 in assert_whole(folder, [[1, 2, 3], [2, 3]])
    assert [1, 2, 3] in kept and kept == sorted(kept, key=[[1, 2], [1, 2, 3], [2, 3]].index)


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO, errno.EACCES])
def test_an_error_at_any_call_of_a_save_names_the_path(number, calls, tmp_path):
    count = 0
    for at in range(len(calls)):
        folder = tmp_path / str(at)
        saved(folder, 1), saved(folder, 2)
        told = ""
        with tampered(at, failing(number)):
            try:
                saved(folder, 3)
            except BadInput as problem:
                told = str(problem)
        found = assert_whole(folder, [[1, 2], [1, 2, 3], [2, 3]])
        if told:
            assert str(folder) in told and os.strerror(number) in told and "\n" not in told
            count += 1
        else:  # tidying a folder that has nothing to tidy
            assert found == [2, 3]
    assert count >= len(calls) - 3


def test_short_writes_are_continued(calls, tmp_path):
    for at, name in enumerate(calls):
        if name == "write":
            with tampered(at, short):
                saved(tmp_path / str(at), 1)
            assert_whole(tmp_path / str(at), [[1]])


@FORKS
def test_a_full_disk_while_a_callback_writes_is_one_line(tmp_path):
    """The callback's writers are the libraries': python's files, two in Rust with own errors."""
    from safetensors.torch import save_file
    from tokenizers import Tokenizer, models

    saved(tmp_path / "run", 1)
    told = tmp_path / "told"

    def by_python(folder):
        (folder / "model.bin").write_bytes(b"x" * 50_000)

    def by_rust(folder):
        save_file({"x": torch.zeros(50_000)}, folder / "model.safetensors")

    def by_rust_without_a_kind(folder):
        Tokenizer(models.WordLevel({str(n): n for n in range(5000)}, "0")).save(
            str(folder / "tokenizer.json")
        )

    for also in (by_python, by_rust, by_rust_without_a_kind):

        def work(also=also):
            resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))
            try:
                save(tmp_path / "run", 2, tensors={}, state={}, keep=2, also=also)
            except BadInput as problem:
                told.write_text(str(problem))
                return 2
            return 0

        assert forked(work) == 2
        assert str(path_of(tmp_path / "run", 2)) in told.read_text()
        assert os.strerror(errno.EFBIG) in told.read_text()
        assert_whole(tmp_path / "run", [[1]])


def test_a_mistake_of_the_callback_is_no_error_of_the_disk(tmp_path):
    with pytest.raises(ZeroDivisionError):
        save(tmp_path, 1, tensors={}, state={}, keep=1, also=lambda folder: 1 / 0)
    assert list(tmp_path.iterdir()) == []


def test_an_interrupted_callback_leaves_nothing(tmp_path):
    def also(folder):
        beside(folder)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        save(tmp_path, 1, tensors={}, state={}, keep=1, also=also)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["unlink", "rmdir"])
def test_an_interrupted_removal_is_finished(name, calls, tmp_path):
    def interrupt(*arguments, **settings):
        raise KeyboardInterrupt

    saved(tmp_path, 1), saved(tmp_path, 2)
    with tampered(calls.index(name), interrupt), pytest.raises(KeyboardInterrupt):
        saved(tmp_path, 3)
    assert {path.name for path in tmp_path.iterdir()} == {
        path_of(tmp_path, step).name for step in (2, 3)
    }


def test_orphans_go_when_the_folder_is_opened_and_what_is_being_written_stays(tmp_path):
    dead = tmp_path / f"checkpoint-00000009.1{SUFFIX}"

    def also(folder):
        (dead / "deep").mkdir(parents=True)
        (dead / "deep" / "half").write_text("half")
        (tmp_path / f"link{SUFFIX}").symlink_to(tmp_path.parent)
        assert steps(tmp_path) == []
        assert not dead.exists() and folder.exists() and tmp_path.exists()

    save(tmp_path, 1, tensors={}, state={}, keep=1, also=also)
    dead.mkdir()
    with claim(tmp_path):
        assert {path.name for path in tmp_path.iterdir()} >= {LOCK, "checkpoint-00000001"}
        assert not dead.exists()


def changes(path: Path):
    """Ways to damage a checkpoint: every file torn, changed in one byte, or gone."""
    for one in sorted(p for p in path.rglob("*") if p.is_file()):
        content = one.read_bytes()
        yield one, lambda one=one, content=content: one.write_bytes(content[: len(content) // 2])
        middle = len(content) // 2
        flipped = content[:middle] + bytes([content[middle] ^ 1]) + content[middle + 1 :]
        yield one, lambda one=one, flipped=flipped: one.write_bytes(flipped)
        yield one, lambda one=one: one.unlink()


def test_a_damaged_file_is_named_and_the_checkpoint_before_is_taken(tmp_path):
    saved(tmp_path, 1)
    count = 0
    for number in range(3 * 6):
        path = saved(tmp_path, 2)
        file, damage = list(changes(path))[number]
        damage()
        with refused(str(file), "damaged", error=BadInput):
            load(path)
        said: list[str] = []
        assert latest(tmp_path, said.append) == path_of(tmp_path, 1)
        assert len(said) == 1 and str(file) in said[0] and "checkpoint-00000001" in said[0]
        rewind(tmp_path, 1)
        count += 1
    assert count == len(list(changes(saved(tmp_path, 2))))


def test_when_all_are_damaged_the_newest_is_named(tmp_path):
    for step in (1, 2):
        (saved(tmp_path, step) / STATE).write_bytes(b"")
    with refused("checkpoint-00000002", STATE, error=BadInput):
        latest(tmp_path)


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", "[" * 10**5, '{"schema": NaN}', '{"groups": 1, "files": {"a": 1}}']
)
def test_a_hostile_manifest_is_refused(text, tmp_path):
    path = saved(tmp_path, 1)
    (path / MANIFEST).write_text(text)
    with refused(MANIFEST, "damaged", error=BadInput):
        load(path)


def test_a_checkpoint_of_another_name_or_schema_is_refused(tmp_path):
    path = saved(tmp_path, 1)
    path.rename(path_of(tmp_path, 7))
    with refused(MANIFEST, "step 1", error=BadInput):
        load(path_of(tmp_path, 7))
    path = saved(tmp_path / "other", 1)
    about = json.loads((path / MANIFEST).read_text())
    (path / MANIFEST).write_text(json.dumps(about | {"schema": "else/1"}))
    with refused("else/1", error=BadInput):
        load(path)


def adafactor(parameters):
    from transformers.optimization import Adafactor

    return Adafactor(parameters, lr=1e-2, relative_step=False, scale_parameter=False)


OPTIMIZERS = {
    "AdamW": lambda p: torch.optim.AdamW(p, lr=1e-2, weight_decay=0.1, amsgrad=True),
    "Adafactor": lambda p: torch.optim.Adafactor(p, lr=1e-2),
    "Adafactor of transformers": adafactor,
    "SGD": lambda p: torch.optim.SGD(p, lr=1e-2, momentum=0.9, nesterov=True),
    "plain SGD": lambda p: torch.optim.SGD(p, lr=1e-2),
    "RAdam": lambda p: torch.optim.RAdam(p, lr=1e-2),
    "Adagrad": lambda p: torch.optim.Adagrad(p, lr=1e-2),
}
SCHEDULES = {
    "linear": lambda o: torch.optim.lr_scheduler.LinearLR(o, 0.1, total_iters=6),
    "cosine after warm-up": lambda o: torch.optim.lr_scheduler.SequentialLR(
        o,
        [
            torch.optim.lr_scheduler.LinearLR(o, 0.1, total_iters=2),
            torch.optim.lr_scheduler.CosineAnnealingLR(o, 5),
        ],
        milestones=[2],
    ),
    "by a function": lambda o: torch.optim.lr_scheduler.LambdaLR(o, lambda n: 0.9**n),
}


def trainer(optimizer, schedule, dtype=torch.float32):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = torch.nn.Sequential(
            torch.nn.Linear(4, 5), torch.nn.Dropout(), torch.nn.Linear(5, 2)
        )
        model = model.to(dtype)
    last, first = model[2].parameters(), model[0].parameters()
    made = optimizer([{"params": list(first)}, {"params": list(last), "weight_decay": 0.0}])
    return model, made, schedule(made)


def train(model, optimizer, schedule, generator, count):
    for _ in range(count):
        optimizer.zero_grad()
        dtype = next(model.parameters()).dtype
        model(torch.randn(8, 4, generator=generator).to(dtype)).square().sum().backward()
        optimizer.step()
        schedule.step()


PAIRS = [(name, "linear") for name in OPTIMIZERS] + [("AdamW", kind) for kind in SCHEDULES]


@pytest.mark.filterwarnings("ignore:The epoch parameter in:UserWarning")
@pytest.mark.parametrize(("name", "kind"), dict.fromkeys(PAIRS))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_training_goes_on_bit_for_bit(name, kind, dtype, tmp_path):
    whole = trainer(OPTIMIZERS[name], SCHEDULES[kind], dtype)
    generator = torch.Generator().manual_seed(1)
    torch.manual_seed(2)
    train(*whole, generator, 3)
    tensors, packed = pack_optimizer(whole[1])
    where, random_state = pack_random({"data": generator})
    path = save(
        tmp_path,
        3,
        tensors={"model": whole[0].state_dict(), "optimizer": tensors, "random": where},
        state={"optimizer": packed, "schedule": whole[2].state_dict(), "random": random_state},
        keep=1,
    )
    train(*whole, generator, 3)
    wanted = whole[0].state_dict(), pack_optimizer(whole[1]), pack_random({"data": generator})

    found = load(path)
    model, optimizer, schedule = trainer(OPTIMIZERS[name], SCHEDULES[kind], dtype)
    model.load_state_dict(found.tensors["model"])
    unpack_optimizer(optimizer, found.tensors["optimizer"], found.state["optimizer"])
    schedule.load_state_dict(found.state["schedule"])
    generator = torch.Generator()
    unpack_random(found.tensors["random"], found.state["random"], {"data": generator})
    train(model, optimizer, schedule, generator, 3)
    assert_same_bits(model.state_dict(), wanted[0])
    now, then = (pack_optimizer(optimizer), pack_random({"data": generator})), wanted[1:]
    assert_same_bits(now[0][0], then[0][0])
    assert_same_bits(now[1][0], then[1][0])
    assert now[0][1] == then[0][1] and now[1][1]["numpy"] == then[1][1]["numpy"]


class Wide(torch.optim.Optimizer):
    """Keeps float32 for parameters in bfloat16, as a plain load would not."""

    def __init__(self, parameters):
        super().__init__(parameters, {"lr": 0.1})

    @torch.no_grad()
    def step(self):
        for one in self.param_groups[0]["params"]:
            held = self.state[one].setdefault("master", one.float())
            held -= self.param_groups[0]["lr"] * one.grad.float()
            one.copy_(held)


def test_an_optimizer_that_keeps_finer_numbers_than_its_parameters_gets_them_back():
    weight = torch.nn.Parameter(torch.linspace(0, 1, 9).bfloat16())
    optimizer = Wide([weight])
    weight.grad = torch.full_like(weight, 0.01)
    optimizer.step()
    tensors, packed = pack_optimizer(optimizer)
    again = Wide([torch.nn.Parameter(weight.detach().clone())])
    unpack_optimizer(again, tensors, packed)
    assert_same_bits(pack_optimizer(again)[0], tensors)
    assert next(iter(tensors.values())).dtype == torch.float32


def test_an_optimizer_of_other_parameters_or_with_lists_is_refused(tmp_path):
    tensors, packed = pack_optimizer(OPTIMIZERS["SGD"]([torch.nn.Parameter(torch.ones(2))]))
    other = torch.optim.SGD([torch.nn.Parameter(torch.ones(2)) for _ in range(2)], lr=0.1)
    with refused("does not fit", error=BadInput):
        unpack_optimizer(other, tensors, packed)
    weight = torch.nn.Parameter(torch.ones(2))
    lists = torch.optim.LBFGS([weight])

    def loss():
        lists.zero_grad()
        value = (weight**4).sum()
        value.backward()
        return value

    lists.step(loss)
    tensors, packed = pack_optimizer(lists)
    with refused("state.state.0.", "[0] is a Tensor", error=BadInput):
        save(tmp_path, 1, tensors={"optimizer": tensors}, state=packed, keep=1)


def test_random_generators_go_on_where_they_stood(tmp_path):
    generator = torch.Generator().manual_seed(3)
    random.gauss(0, 1), np.random.standard_normal()  # leave half of a pair behind

    def draws():
        numbers = np.random.standard_normal(3).tolist(), torch.randn(3).tolist()
        return [*numbers, torch.randn(3, generator=generator).tolist()]

    tensors, packed = pack_random({"data": generator})
    path = save(tmp_path, 1, tensors={"random": tensors}, state=packed, keep=1)
    first = draws()
    assert draws() != first
    found = load(path)
    random.random()
    unpack_random(found.tensors["random"], found.state, {"data": generator})
    # The shape checks draw from `random` too: its state is compared, not what it gives next.
    assert random.getstate() == packed["random"] and packed["random"][2] is not None
    assert draws() == first
    with refused("'other'", "data", error=BadInput):
        unpack_random(found.tensors["random"], found.state, {"other": generator})


def test_a_learning_rate_that_is_a_tensor_comes_back():
    weight = torch.nn.Parameter(torch.ones(2))
    optimizer = torch.optim.AdamW([weight], lr=torch.tensor(0.25), foreach=False)
    tensors, packed = pack_optimizer(optimizer)
    other = torch.optim.AdamW([weight], lr=torch.tensor(0.5), foreach=False)
    unpack_optimizer(other, tensors, packed)
    assert other.param_groups[0]["lr"].tolist() == 0.25
    assert other.param_groups[0]["betas"] == (0.9, 0.999)


def test_of_two_runs_in_a_folder_one_is_refused_in_a_line(tmp_path):
    with claim(tmp_path):
        with refused(str(tmp_path), str(os.getpid()), error=BadInput), claim(tmp_path):
            pytest.fail("two runs")
        with claim(tmp_path / "other"):
            pass
    with claim(tmp_path):
        assert [path.name for path in tmp_path.iterdir() if path.is_file()] == [LOCK]
    (tmp_path / "file").write_text("")
    with refused(LOCK, error=BadInput), claim(tmp_path / "file"):
        pytest.fail("no folder")


def test_an_error_inside_a_run_is_not_taken_for_another_run(tmp_path):
    with pytest.raises(BlockingIOError), claim(tmp_path):
        raise BlockingIOError(errno.EAGAIN, "queue")


CLAIMS = """
import sys, time
from pathlib import Path
from windage.llm.checkpoint import claim
with claim(Path(sys.argv[1])):
    print("mine", flush=True)
    time.sleep(60)
"""


def test_a_killed_run_is_no_obstacle_and_its_children_are_none(tmp_path):
    command = [sys.executable, "-c", CLAIMS, str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as run:
        assert run.stdout.readline() == "mine\n"
        with refused(f"process {run.pid}", error=BadInput), claim(tmp_path):
            pytest.fail("two runs")
        run.kill()
    with claim(tmp_path):
        pass


@FORKS
def test_a_child_does_not_hold_the_claim_of_its_dead_parent(tmp_path):
    ready, end = os.pipe(), os.pipe()

    def parent():
        with claim(tmp_path):
            if os.fork() == 0:
                os.write(ready[1], b"x")
                os.close(end[1])
                os.read(end[0], 1)
                os._exit(0)
            os.read(ready[0], 1)
            os._exit(0)

    assert forked(parent) == 0
    with claim(tmp_path):
        pass
    for descriptor in (*ready, *end):
        os.close(descriptor)
