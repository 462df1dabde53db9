"""A run's configuration: what goes in comes out, and what does not fit is refused by name."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path

import pytest
from checks import refused
from hypothesis import given
from hypothesis import strategies as st

from windage.cli.main import main
from windage.llm import config
from windage.llm.config import Config, build, entries, parse, plain, read, toml
from windage.llm.recipe import resolve

NAMES = [name for name, _, _ in entries()]
EXAMPLES = sorted((Path(__file__).parents[1] / "docs" / "examples").glob("*.toml"))


def test_every_key_is_explained():
    assert list(config.meanings()) == NAMES
    for name, meaning in config.meanings().items():
        assert len(meaning) > 8 and meaning.endswith("."), name


def test_help_shows_what_each_flag_means(capsys):
    for verb in ("train", "sample"):
        with pytest.raises(SystemExit):
            main([verb, "--help"])
        shown = " ".join(capsys.readouterr().out.split())
        for name, meaning in config.meanings().items():
            assert f"--{name} " in shown and " ".join(meaning.rstrip(".").split()) in shown, name


TEXT = st.text(st.characters(exclude_characters="\0", codec="utf-8"), max_size=8)


@given(TEXT, st.integers(1, 9), st.floats(0, 1), st.lists(TEXT))
def test_what_goes_in_comes_out(path, steps, rate, names):
    told = {
        "model": {"path": path},
        "train": {"steps": steps, "learning_rate": rate},
        "recipe": {"shadow": names, "settings": {"cap": rate, "a b": True, "c": path}},
    }
    made = build(told)
    assert build(tomllib.loads(toml(made))) == made
    assert build(plain(made)) == made
    assert json.loads(json.dumps(plain(made))) == plain(made)


def test_a_file_is_read_and_its_faults_name_it(tmp_path):
    file = tmp_path / "run.toml"
    file.write_text("[train]\nsteps = 3\n")
    assert read(file).train.steps == 3
    for text, words in (
        ("[train]\nstep = 3", "nearest valid name: train.steps"),
        ("[trian]", "nearest valid name: train;"),
        ("train = 3", "allowed: a table"),
        ("[train]\nsteps = 2.5", "allowed: a whole number"),
        ("[train]\nsteps = true", "allowed: a whole number"),
        ("[train]\nsteps = -1", "allowed: from 0 to"),
        ("[train]\nmode = 'async'", "nearest valid name: asynchronous"),
        ("[run]\ntrackers = 'wandb'", "allowed: a list of words"),
        ("[task]\nsettings = 1", "allowed: a table of settings"),
        ("[train", "is no TOML"),
        ("[train]\nsteps = 1\nsteps = 2", "is no TOML"),
    ):
        file.write_text(text)
        with refused(words, str(file)):
            read(file)
    with refused("No such file"):
        read(tmp_path / "none.toml")


@pytest.mark.parametrize("name", NAMES)
def test_every_key_is_a_flag(name):
    kind, default = next((k, d) for n, k, d in entries() if n == name)
    words = {dict: "a=1,b=x", tuple: "x,y", bool: "false"}
    text = words.get(type(default), str(default))
    found = parse(name, kind, text)
    wanted = {dict: {"a": 1, "b": "x"}, tuple: ("x", "y"), bool: False}
    assert found == wanted.get(type(default), default)


def of(**sections: dict) -> Config:
    return build(sections)


def test_a_recipe_that_the_run_cannot_serve_is_refused():
    head = {"head": 8}
    assert resolve(of(sampling=head)).aggregation.settings == (("length", 64.0),)
    for words, told in (
        ("sampling.head is 0", of()),
        ("needs a critic", of(recipe={"name": "ppo"})),
        ("train.group_size is 1", of(recipe={"name": "rloo"}, train={"group_size": 1})),
        ("nearest valid name: rloo", of(recipe={"name": "rlo"})),
        ("has no setting 'caps'", of(recipe={"name": "cispo", "settings": {"caps": 1}})),
        ("nearest valid name: gspo", of(sampling=head, recipe={"shadow": ["gsp"]})),
    ):
        with refused(words):
            resolve(told)


@pytest.mark.parametrize(
    ("words", "flags"),
    [
        ("model.path is missing", []),
        ("train.steps is 0", ["--model.path", "x"]),
        ("train.store is missing", ["--model.path", "x", "--train.mode", "offline"]),
        ("unknown flag '--train.step'; nearest valid name: --train.steps", ["--train.step", "1"]),
        ("allowed: a whole number", ["--train.steps", "some"]),
        ("run.folder is missing", ["--model.path", "x", "--train.steps", "1"]),
        ("holds no run", ["--resume", "/nowhere"]),
        ("allowed: at most train.prompts", ["--model.path", "x", "--train.steps", "1",
                                            "--train.minibatches", "17"]),
    ],
)  # fmt: skip
def test_bad_flags_are_one_line(words, flags, capsys):
    assert main(["train", *flags]) == 2
    out, err = capsys.readouterr()
    assert out == "" and words in err and err.count("\n") == 1


@pytest.mark.parametrize("file", EXAMPLES, ids=lambda file: file.stem)
def test_the_examples_are_whole(file):
    found = read(file)
    assert found.model.path and resolve(found).name == found.recipe.name
