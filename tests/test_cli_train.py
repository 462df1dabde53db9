"""`windage train` and `windage sample` as a user meets them: bad input, Ctrl-C, going on.

Whatever is refused ends in one line on standard error, exit status 2, nothing on standard output,
and a folder that is as free, or a run that is as whole, as it was before.
"""

from __future__ import annotations

import json
import resource
import shutil
import signal
import subprocess
import sys
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_language_model import make
from training_harness import Parity

from windage.cli import train as verb
from windage.cli.main import main
from windage.llm import console, models, run, trackers, verify
from windage.llm.checkpoint import claim
from windage.llm.folder import FREE, begun
from windage.llm.samplers.transformers import TransformersSampler

TINY = {
    "--model.device": "cpu",
    "--task.settings": "digits=1",
    "--sampling.max_tokens": 4,
    "--train.prompts": 2,
    "--train.group_size": 2,
    "--train.steps": 2,
    "--train.learning_rate": 0.02,
    "--recipe.name": "reinforce",
    "--run.card": "false",
    "--run.report": "false",
}


def words(told: dict) -> list[str]:
    return [str(word) for pair in told.items() for word in pair]


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return make(tmp_path_factory.mktemp("models") / "tiny", width=16, layers=1)


@pytest.fixture(scope="module")
def store(model, tmp_path_factory) -> Path:
    """Two steps of responses."""
    folder = tmp_path_factory.mktemp("stores") / "store"
    assert main(["sample", *words({**TINY, "--model.path": model, "--store": folder})]) == 0
    return folder


@pytest.fixture
def parity(monkeypatch):
    """A task in which a random model earns something, so that its weights move."""
    monkeypatch.setattr(run, "task_of", lambda name, settings: Parity(lucky=False))


@pytest.fixture
def refuse(model, tmp_path, capsys):
    """Run `windage train` into a new folder, or another verb; gives the line of the refusal."""
    count = 0

    def call(changes: dict, name: str = "train") -> str:
        nonlocal count
        count += 1
        folder = tmp_path / f"run-{count}"
        where = {"--store" if name == "sample" else "--run.folder": folder}
        told = {**TINY, "--model.path": model, **where, **changes}
        capsys.readouterr()
        assert main([name, *words({k: v for k, v in told.items() if v is not None})]) == 2, changes
        out, err = capsys.readouterr()
        assert out == "" and err.count("\n") == 1 and err.startswith(f"windage {name}: "), err
        assert not begun(folder), changes
        return err

    return call


def go(folder: Path, model: Path, **changes: object) -> int:
    return main(["train", *words({**TINY, "--model.path": model, "--run.folder": folder}),
                 *words({f"--{k.replace('__', '.')}": v for k, v in changes.items()})])  # fmt: skip


def told(folder: Path) -> dict[str, object]:
    """What a run left, but for its clock, its place, and generators that the suite draws from."""
    found: dict[str, object] = {}
    for path in sorted(p for p in folder.rglob("*") if p.is_file() and p.name != "run.lock"):
        name = path.relative_to(folder).as_posix()
        if path.suffix == ".parquet":
            found[name] = repr(pq.read_table(path).drop_columns(["elapsed"]).to_pydict())
        elif path.name == "metrics.jsonl":
            records = [json.loads(line) for line in path.read_text().splitlines()]
            found[name] = [{k: v for k, v in r.items() if "time/" not in k} for r in records]
        elif path.name == "state.json":
            found[name] = {k: v for k, v in json.loads(path.read_text()).items() if k != "random"}
        elif not path.name.startswith(("config", "manifest")):
            found[name] = path.read_bytes()
    return found


def changed(model: Path, folder: Path, name: str, change) -> Path:
    """A copy of a model's folder of which one file is another."""
    shutil.copytree(model, folder)
    change(folder / name)
    return folder


def halved(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def without_a_matrix(path: Path) -> None:
    named = load_file(path)
    del named[next(name for name in named if "q_proj" in name)]
    save_file(named, path, metadata={"format": "pt"})


def with_nan(path: Path) -> None:
    named = load_file(path)
    named[next(name for name in named if "q_proj" in name)][0, 0] = float("nan")
    save_file(named, path, metadata={"format": "pt"})


def with_code(path: Path) -> None:
    """A model that asks for its own code to be run."""
    config = json.loads(path.read_text())
    classes = {"AutoConfig": "evil.Config", "AutoModelForCausalLM": "evil.Model"}
    path.write_text(json.dumps(config | {"model_type": "evil", "auto_map": classes}))
    (path.parent / "evil.py").write_text("open('ran', 'w').close()\n")


MODELS = {
    "half of its weights": ("model.safetensors", halved, "cannot be loaded"),
    "no weights": ("model.safetensors", Path.unlink, "no file named model.safetensors"),
    "a matrix is missing": ("model.safetensors", without_a_matrix, "its weights lack model.layers"),
    "not finite": ("model.safetensors", with_nan, "holds numbers that are not finite"),
    "half of its configuration": ("config.json", halved, "not a valid JSON file"),
    "no configuration": ("config.json", Path.unlink, "has no config.json"),
    "half of its tokenizer": ("tokenizer.json", halved, "cannot be loaded"),
    "no tokenizer": ("tokenizer.json", Path.unlink, "cannot be loaded"),
    "a broken template": (
        "chat_template.jinja",
        lambda path: path.write_text("{% for x in %}"),
        "its chat template fails on a question",
    ),
    "a hostile template": (
        "chat_template.jinja",
        lambda path: path.write_text("{{ ''.__class__.__mro__[1].__subclasses__() }}"),
        "SecurityError",
    ),
    "its own code": ("config.json", with_code, "cannot be loaded"),
}


def test_a_model_that_is_none_or_damaged(model, refuse, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for number, (what, (name, change, line)) in enumerate(MODELS.items()):
        folder = changed(model, tmp_path / f"model-{number}", name, change)
        assert line in refuse({"--model.path": folder}), what
    assert not (tmp_path / "ran").exists()
    (tmp_path / "file").write_text("x")
    assert "has no config.json" in refuse({"--model.path": tmp_path / "file"})
    assert "is no folder" in refuse({"--model.path": tmp_path / "nowhere"})
    assert "model.path is missing" in refuse({"--model.path": None})
    line = refuse({"--model.lora_rank": 2, "--model.lora_targets": "none_such"})
    assert "not found in the base model" in line and "allowed" in line


def test_a_model_without_a_chat_template_is_asked_plainly(model, tmp_path):
    folder = changed(model, tmp_path / "plain", "chat_template.jinja", Path.unlink)
    out = tmp_path / "out"
    assert main(["sample", *words({**TINY, "--model.path": folder, "--store": out})]) == 0
    prompt = pq.read_table(out / "step-00000001.parquet")["prompt_ids"][0].as_py()
    assert models.load(folder).tokenizer.decode(prompt).startswith("What is")


REFUSED = [
    ({"--task.name": "aritmetic"}, "nearest valid name: arithmetic"),
    ({"--task.settings": "digit=1"}, "nearest valid name: digits"),
    ({"--task.settings": "digits=x"}, "a whole number"),
    ({"--task.name": "jsonl", "--task.settings": "train=/no/such.jsonl"}, "No such file"),
    ({"--task.name": "gsm8k", "--task.settings": "train=,held_out="}, "datasets"),
    ({"--recipe.name": "grop"}, "nearest valid name: grpo"),
    ({"--recipe.settings": "capp=1"}, "no setting 'capp'"),
    ({"--recipe.shadow": "gspoo"}, "nearest valid name: gspo"),
    ({"--recipe.name": "rloo", "--train.group_size": 1}, "allowed: at least 2"),
    ({"--recipe.name": "centered", "--sampling.head": 0}, "sampling.head is 0"),
    ({"--sampling.top_p": 0}, "top_p is 0"),
    ({"--sampling.temperature": 0}, "sampling.temperature is 0"),
    ({"--sampling.max_tokens": 4000}, "512 together"),
    ({"--sampling.engine": "sglang"}, "nearest valid name"),
    ({"--model.device": "quantum"}, "device is 'quantum'"),
    ({"--model.dtype": "float8"}, "nearest valid name"),
    ({"--train.minibatches": 3}, "a group is not divided"),
    ({"--train.steps": 0}, "allowed: at least 1"),
    ({"--train.step": 3}, "nearest valid name: --train.steps"),
    ({"--train.mode": "offline", "--train.steps": 0}, "train.store is missing"),
    ({"--run.trackers": "tensorbord"}, "nearest valid name: tensorboard"),
    ({"--seed": 1, "--run.seed": 1}, "one of them"),
    ({"--seed": -1}, "a whole number from 0"),
    ({"--run.folder": ""}, "run.folder is missing"),
    ({"--run.folder": "/dev/null/x"}, "Not a directory"),
    ({"--out": "/dev/null"}, "is a file; allowed: a directory"),
]


def test_settings_that_do_not_fit(refuse):
    for changes, line in REFUSED:
        assert line in refuse(changes), changes


def test_what_is_not_installed(refuse, monkeypatch):
    monkeypatch.setattr(trackers, "find_spec", lambda name: None)
    assert "pip install 'windage[wandb]'" in refuse({"--run.trackers": "wandb"})
    monkeypatch.setattr(verify, "find_spec", lambda name: None)
    told = {"--task.name": "math", "--task.settings": "train=/x.jsonl"}
    assert "math-verify, which is not installed" in refuse(told)


def test_a_file_with_faults(model, refuse, tmp_path, capsys):
    file = tmp_path / "run.toml"
    for text, line in (
        ("[train", "is no TOML"),
        ("[trian]\nsteps = 1", "nearest valid name: train"),
        ('[run]\nfolder = "a\\u0000b"', "allowed: text without a zero byte"),
        ('[task.settings]\ntrain = "\\u0000"', "allowed: text without a zero byte"),
    ):
        file.write_text(text)
        assert main(["train", str(file)]) == 2
        out, err = capsys.readouterr()
        assert out == "" and err.count("\n") == 1 and line in err and str(file) in err


def damaged_store(store: Path, folder: Path, change) -> Path:
    shutil.copytree(store, folder)
    change(folder / "step-00000002.parquet")
    return folder


def without(column: str):
    def change(path: Path) -> None:
        table = pq.read_table(path)
        pq.write_table(table.drop_columns([column]), path)

    return change


def rejected(path: Path) -> None:
    for file in path.parent.iterdir():
        table = pq.read_table(file)
        place = table.schema.get_field_index("rejected")
        field = table.schema.field(place)
        told = pa.array(["overlong"] * len(table), field.type)
        pq.write_table(table.set_column(place, field, told), file)


def flipped(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[20:60] = bytes(b ^ 0xFF for b in content[20:60])
    path.write_bytes(content)


STORES = [
    (without("behavior_logp"), "has no column behavior_logp"),
    (halved, "is damaged"),
    (flipped, "step-00000002.parquet"),
    (lambda path: path.write_bytes(b""), "Parquet file size is 0 bytes"),
    (rejected, "holds no response that was admitted"),
]


def test_a_store_that_cannot_be_trained_on(model, store, refuse, tmp_path):
    offline = {"--train.mode": "offline", "--train.steps": 0}
    for number, (change, line) in enumerate(STORES):
        folder = damaged_store(store, tmp_path / f"store-{number}", change)
        assert line in refuse({**offline, "--train.store": folder}), line
    (tmp_path / "empty").mkdir()
    assert "holds no response" in refuse({**offline, "--train.store": tmp_path / "empty"})
    assert "is no folder" in refuse({**offline, "--train.store": tmp_path / "nowhere"})
    line = refuse({**offline, "--train.store": store, "--recipe.name": "centered"})
    assert "without head_ids" in line
    other = make(tmp_path / "other", width=16, layers=1, vocab=("a", "b"))
    theirs = {**offline, "--train.store": store, "--model.path": other}
    assert "another tokenizer" in refuse(theirs)
    before = sorted(path.name for path in store.iterdir())
    line = refuse({"--store": store, "--model.path": other}, name="sample")
    assert "another tokenizer" in line
    assert sorted(path.name for path in store.iterdir()) == before
    assert "--store is missing" in refuse({"--store": None}, name="sample")
    assert "--store '/dev/null" in refuse({"--store": "/dev/null/x"}, name="sample")


def test_json_is_one_document_that_says_what_it_was_made_of(model, parity, tmp_path, capsys):
    made = ["train", *words({**TINY, "--model.path": model, "--run.folder": tmp_path / "run"})]
    assert main([*made, "--json", "--seed", "3"]) == 0
    out, err = capsys.readouterr()
    document = json.loads(out)
    assert out.count("\n") == 1 and document["schema"] == "windage/train/1"
    assert [line[:8] for line in err.splitlines()] == ["step 1/2", "step 2/2"]
    (one,) = document["runs"]
    assert one["config"]["run"]["seed"] == 3
    assert one["versions"]["torch"] == torch.__version__.partition("+")[0] or one["versions"]
    assert len(one["inputs"][str(model / "model.safetensors")]) == 64
    assert {"config.toml", "metrics.jsonl", "inputs.json"} <= set(one["hashes"])
    store = tmp_path / "store"
    assert (
        main(["sample", *words({**TINY, "--model.path": model, "--store": store}), "--json"]) == 0
    )
    found = json.loads(capsys.readouterr().out)
    assert found["inputs"][str(model / "config.json")] == one["inputs"][str(model / "config.json")]
    assert found["versions"] == one["versions"]
    assert found["config"]["train"]["steps"] == len(found["rows"]) == 2


@pytest.mark.parametrize(
    ("threads", "count"),
    [(1, 2), *(pytest.param(n, 20, marks=pytest.mark.long) for n in (1, 2))],
)
def test_the_same_seed_gives_the_same_run(threads, count, model, parity, tmp_path):
    """With as many threads: sums in another order are other in their last digits."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        runs = []
        for number in range(count):
            assert go(tmp_path / f"{number}", model) == 0
            runs.append(told(tmp_path / f"{number}"))
    finally:
        torch.set_num_threads(before)
    assert all(one == runs[0] for one in runs)
    assert json.loads(runs[0]["versions.json"])["threads"] == str(threads)
    assert any(record["update/gradient_norm"] > 0 for record in runs[0]["metrics.jsonl"])


def test_a_run_goes_on_as_itself_alone(model, parity, tmp_path, capsys):
    folder, whole = tmp_path / "run", tmp_path / "whole"
    assert go(folder, model) == 0
    before = told(folder)
    again = ["train", "--resume", str(folder)]
    capsys.readouterr()
    for flag, value in {
        "--train.group_size": 3,
        "--train.optimizer": "sgd",
        "--train.mode": "asynchronous",
        "--recipe.name": "grpo",
        "--model.dtype": "bfloat16",
        "--task.settings": "digits=2",
        "--seed": 5,
        "--run.folder": tmp_path / "elsewhere",
        "--train.steps": 1,
    }.items():
        assert main([*again, flag, str(value)]) == 2, flag
        out, err = capsys.readouterr()
        assert out == "" and err.count("\n") == 1 and "allowed" in err, err
        assert told(folder) == before
    assert go(folder, model) == 2
    assert "holds a run; allowed: another folder, or --resume" in capsys.readouterr().err
    with claim(folder):
        assert main(again) == 2
    assert "belongs to a run that goes on" in capsys.readouterr().err
    with claim(tmp_path / "new"):
        assert go(tmp_path / "new", model) == 2
        out, err = capsys.readouterr()
        assert "belongs to a run that goes on" in err and err.count("\n") == 1 and out == ""
        assert not begun(tmp_path / "new")
    assert main(again) == 0
    assert "all 2 steps are done" in capsys.readouterr().err
    assert told(folder) == before
    assert main([*again, "--train.steps", "3"]) == 0
    assert "steps = 3" in (folder / "config.toml").read_text()
    assert "steps = 2" in (folder / "config-until-00000002.toml").read_text()
    assert go(whole, model, train__steps=3, run__save_every=2) == 0
    assert told(folder) == told(whole)
    assert all("." in name for name in FREE)


def test_a_run_that_ended_before_its_card_gets_it_when_it_goes_on(
    model, parity, tmp_path, capsys, monkeypatch
):
    folder, made = tmp_path / "run", []
    monkeypatch.setattr("windage.analysis.card.lines", lambda card: [])
    monkeypatch.setattr(verb, "_card", lambda config: made.append(config) or {"made": len(made)})
    with largest_file(0):
        assert go(folder, model, run__card="true") == 2
    assert not (folder / "card.json").exists()
    (folder / "card.json").mkdir()
    assert go(folder, model, run__card="true") == 2
    err = capsys.readouterr().err
    assert str(folder / "card.json") in err.splitlines()[-1] and "Traceback" not in err
    (folder / "card.json").rmdir()
    for _ in range(2):
        assert main(["train", "--resume", str(folder)]) == 0
        assert json.loads((folder / "card.json").read_text()) == {"made": 2}


def test_a_damaged_checkpoint_is_passed_over(model, parity, tmp_path, capsys):
    folder = tmp_path / "run"
    assert go(folder, model, run__save_every=1) == 0
    before = told(folder)
    halved(folder / "checkpoints" / "checkpoint-00000002" / "model.safetensors")
    capsys.readouterr()
    assert main(["train", "--resume", str(folder)]) == 0
    err = capsys.readouterr().err
    assert "checkpoint-00000001 is taken instead" in err and "step 2/2" in err
    assert told(folder) == before
    for step in (1, 2):
        halved(folder / "checkpoints" / f"checkpoint-{step:08d}" / "state.json")
    assert main(["train", "--resume", str(folder)]) == 2
    err = capsys.readouterr().err
    assert "is damaged" in err and err.count("\n") == 1


def test_ctrl_c_ends_after_the_step_and_loses_nothing(model, parity, tmp_path, capfd, monkeypatch):
    whole, folder = tmp_path / "whole", tmp_path / "run"
    assert go(whole, model, train__steps=4, run__save_every=2) == 0
    real = console.watcher

    def interrupting(steps):
        show = real(steps)

        def watch(record):
            show(record)
            if record["step"] == 2:
                signal.raise_signal(signal.SIGINT)

        return watch

    monkeypatch.setattr(console, "watcher", interrupting)
    handler = signal.getsignal(signal.SIGINT)
    capfd.readouterr()
    assert go(folder, model, train__steps=4) == 130
    out, err = capfd.readouterr()
    assert out == "" and verb.STOPPING in err and err.splitlines()[-1].endswith("goes on")
    assert signal.getsignal(signal.SIGINT) is handler
    monkeypatch.undo()
    monkeypatch.setattr(run, "task_of", lambda name, settings: Parity(lucky=False))
    assert main(["train", "--resume", str(folder)]) == 0
    assert told(folder) == told(whole)


def test_a_second_ctrl_c_ends_at_once_and_the_run_goes_on(model, parity, tmp_path, monkeypatch):
    folder, whole = tmp_path / "run", tmp_path / "whole"
    assert go(whole, model, run__save_every=1) == 0
    real = TransformersSampler.sample
    calls = 0

    def interrupted(self, *arguments, **settings):
        nonlocal calls
        calls += 1
        if calls == 2:
            signal.raise_signal(signal.SIGINT)
            signal.raise_signal(signal.SIGINT)
        return real(self, *arguments, **settings)

    monkeypatch.setattr(TransformersSampler, "sample", interrupted)
    assert go(folder, model, run__save_every=1) == 130
    assert main(["train", "--resume", str(folder)]) == 0
    assert told(folder) == told(whole)


@contextmanager
def largest_file(size: int):
    """What a full disk does to who writes: no file beyond a size."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.parametrize(
    "sizes",
    [(600, 9000), pytest.param((0, 100, 300, *range(1000, 11000, 500)), marks=pytest.mark.long)],
    ids=["two", "many"],
)
def test_a_full_disk_ends_in_a_line_and_the_run_goes_on(sizes, model, parity, tmp_path, capsys):
    whole = tmp_path / "whole"
    assert go(whole, model, run__save_every=1) == 0
    for size in sizes:
        folder = tmp_path / f"{size}"
        capsys.readouterr()
        with largest_file(size):
            status = go(folder, model, run__save_every=1)
        out, err = capsys.readouterr()
        last = err.splitlines()[-1]
        assert (status, out) == (2, "") and last.startswith("windage train: "), (size, err)
        assert str(folder) in last and "Traceback" not in err
        assert not [path for path in folder.rglob("*unfinished*")], size
        resumed = main(["train", "--resume", str(folder)]) if begun(folder) else 2
        if resumed:
            assert go(folder, model, run__save_every=1) == 0, size
        assert told(folder) == told(whole), size


def test_a_run_ends_with_its_figures_and_a_page_in_its_folder(model, parity, tmp_path, capsys):
    folder = tmp_path / "run"
    assert go(folder, model, train__steps=1) == 0
    assert not (folder / "report").exists()
    (folder / "report").write_text("in the way")
    again = ["train", "--resume", str(folder), "--train.steps", "2", "--run.report", "true"]
    capsys.readouterr()
    assert main(again) == 2
    out, err = capsys.readouterr()
    line = err.splitlines()[-1]
    assert out == "" and str(folder / "report") in line and "is not written" in line, err
    (folder / "report").unlink()
    assert main(again) == 0
    names = {path.suffix for path in (folder / "report").iterdir()}
    assert names == {".json", ".csv", ".parquet", ".html", ".png", ".svg"}
    (page,) = (folder / "report").glob("*.html")
    text = page.read_text()
    assert "reward" in text and "data:image/svg+xml" in text and "<script" not in text
    told = json.loads((folder / "report" / "train.json").read_text())
    assert len(told["rows"]) == 2 and capsys.readouterr().err.count("all 2 steps are done") == 1


@pytest.mark.parametrize("how", ["stop", "skip"])
def test_a_sampler_that_returns_nan_ends_the_run_or_is_set_aside(
    how, model, parity, tmp_path, monkeypatch, capsys
):
    real = TransformersSampler.sample

    def poisoned(self, requests, sampling, between=None):
        groups = [list(group) for group in real(self, requests, sampling, between)]
        spoiled = torch.full_like(groups[0][0].behavior_logp, torch.nan)
        groups[0][0] = replace(groups[0][0], behavior_logp=spoiled)
        return groups

    monkeypatch.setattr(TransformersSampler, "sample", poisoned)
    capsys.readouterr()
    status = go(tmp_path / "run", model, train__on_nonfinite=how)
    out, err = capsys.readouterr()
    if how == "stop":
        assert (status, out, err.count("\n")) == (2, "", 1)
        assert "behavior_logp of the response" in err and "is nan" in err
        return
    assert status == 0
    reasons = pq.read_table(tmp_path / "run" / "rollouts")["rejected"].to_pylist()
    assert reasons.count("not finite") == 2 and reasons.count(None) == 6
    faults = (tmp_path / "run" / "nonfinite.jsonl").read_text()
    assert faults.count("\n") == 2 and "behavior_logp" in faults


def test_help_and_refusals_load_nothing_heavy():
    program = (
        "import sys; from windage.cli.main import main\n"
        "try: status = main(sys.argv[1:])\n"
        "except SystemExit as end: status = end.code\n"
        "heavy = {'torch', 'transformers', 'matplotlib'} & set(sys.modules)\n"
        "sys.exit(99 if heavy else status)"
    )
    for given, status in (
        (["train", "--help"], 0),
        (["sample", "--help"], 0),
        (["train", "--train.step", "3"], 2),
        (["train", "--train.steps", "0", "--model.path", "x"], 2),
    ):
        done = subprocess.run([sys.executable, "-c", program, *given], capture_output=True)
        assert done.returncode == status, (given, done.stderr)
