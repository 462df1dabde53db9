"""A recipe's card before a run: claims as they are decided, exact figures, and how it is shown."""

from __future__ import annotations

import json
import time
import tomllib
from dataclasses import replace

import pytest
from checks import assert_close
from tiny_language_model import make

from windage.analysis.audit.entry import audit
from windage.analysis.card import SCHEMA, card, lines
from windage.cli.main import main
from windage.estimators.aggregation import sequence_mean
from windage.estimators.catalogue import CATALOGUE, get
from windage.estimators.member import use
from windage.llm.config import read

RUN = {"length": 16.0, "group_size": 4, "lag": 3, "mismatch": 0.0}
# Before a run nobody waits longer.
SECONDS = 5.0
NAMES = ("starting_point",)


def entry(name: str):
    found = get(name)
    return get(name, length=16.0) if "length" in found.settings else found


def made(name: str, **settings) -> dict:
    started = time.process_time()
    found = card(entry(name), **{**RUN, **settings})
    assert time.process_time() - started < SECONDS
    assert json.loads(json.dumps(found, allow_nan=False)) == found
    return found


@pytest.mark.parametrize(
    "name",
    [*NAMES, *(pytest.param(n, marks=pytest.mark.long) for n in CATALOGUE if n not in NAMES)],
)
def test_a_card_says_what_the_audit_decides_and_is_quick(name, monkeypatch):
    rows = []

    def decided(*arguments, **settings):
        rows.extend(audit(*arguments, **settings))
        return rows

    monkeypatch.setattr("windage.analysis.card.audit", decided)
    found = made(name)
    assert (found["schema"], found["recipe"], found["failed"]) == (SCHEMA, name, 0)
    told = [row.document() for row in rows]
    for key in ("property", "claimed", "verdict", "ok"):
        assert [one[key] for one in found["claims"]] == [row[key] for row in told] != []
    said = "\n".join(lines(found))
    assert "NOT AS CLAIMED" not in said and said.startswith(f"recipe {name}: ")
    assert [row["lag"] for row in found["lags"]] == [0, 3]


def test_a_recipe_that_is_not_what_it_claims_is_told():
    """REINFORCE that divides by lengths and still claims to be unbiased."""
    wrong = replace(get("reinforce"), aggregation=use(sequence_mean))
    found = card(wrong, **RUN)
    assert found["failed"] > 0
    assert any("NOT AS CLAIMED" in line for line in lines(found))


def test_figures_are_those_of_the_run_s_lag_length_and_groups(monkeypatch):
    """Without lag nothing is biased; with it, only what does not weight whole responses."""
    monkeypatch.setattr("windage.analysis.card.audit", lambda *a, **k: [])
    fresh, late = made("trajectory_is")["lags"]
    for row in (fresh, late):
        assert_close(row["relative_bias"], 0.0, relative=1e-9)
        assert_close(row["scale"], 1.0, relative=1e-9)
    fresh, late = made("reinforce", drift=1e-3)["lags"]
    assert fresh["relative_bias"] < 1e-9 and late["relative_bias"] > 1e-3
    wide = made("reinforce", drift=1e-3, group_size=8)["lags"]
    long = made("reinforce", drift=1e-3, length=64.0)["lags"]
    for row, other, longer in zip((fresh, late), wide, long, strict=True):
        assert_close(other["variance"], row["variance"] / 2, relative=1e-9)
        assert longer["variance"] > row["variance"]
    assert made("reinforce", mismatch=1e-3)["lags"][0]["relative_bias"] > 1e-3


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make(tmp_path_factory.mktemp("models") / "tiny", width=16, layers=1)


def test_a_dry_run_shows_configuration_memory_and_card_and_leaves_nothing(model, tmp_path, capsys):
    flags = ["--model.path", str(model), "--train.steps", "3", "--recipe.name", "topr"]
    flags += ["--train.mode", "asynchronous", "--train.max_lag", "2", "--sampling.max_tokens", "16"]
    words = ["train", *flags, "--run.folder", str(tmp_path / "run"), "--dry-run"]
    assert main(words) == 0
    out, err = capsys.readouterr()
    assert err == "" and not (tmp_path / "run").exists()
    (tmp_path / "shown.toml").write_text(out[: out.index("[memory, GiB]")])
    shown = read(tmp_path / "shown.toml")
    assert (shown.recipe.name, shown.train.max_lag, shown.train.beta1) == ("topr", 2, 0.9)
    assert "optimizer = 0.00" in out and "recipe topr: " in out
    assert "lag 0, 16 tokens, groups of 8: " in out and "lag 2, 16 tokens, groups of 8: " in out
    assert main([*words, "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert tomllib.loads(told["config"])["train"]["steps"] == 3
    assert told["memory"]["total"] > 0 and told["card"]["recipe"] == "topr"
    for row in told["card"]["lags"]:
        assert {"relative_bias", "variance", "scale"} <= set(row)


def test_a_run_prints_its_card_and_keeps_it(model, tmp_path, capsys):
    flags = ["--model.path", str(model), "--train.steps", "1", "--recipe.name", "reinforce"]
    flags += ["--train.prompts", "1", "--train.group_size", "2", "--sampling.max_tokens", "4"]
    flags += ["--model.device", "cpu", "--run.report", "false", "--quiet"]
    assert main(["train", *flags, "--run.folder", str(tmp_path / "run")]) == 0
    err = capsys.readouterr().err
    kept = json.loads((tmp_path / "run" / "card.json").read_text())
    assert "\n".join(lines(kept)) in err and kept["at"]["group_size"] == 2
    assert kept["claims"] and kept["failed"] == 0
