"""`windage pipeline`: keys, refusals, documents, figures, and published step times beside ours."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from windage.analysis import report
from windage.analysis.pipeline import document, figures, published, summary
from windage.cli import main as frame
from windage.cli import pipeline as verb
from windage.toy.pipeline.laws import Observed
from windage.toy.pipeline.run import simulate
from windage.toy.pipeline.settings import MODES, Pipeline

SMALL = ("--slots", "16", "--batch", "32", "--group-size", "4", "--steps", "30")


def printed(capsys: pytest.CaptureFixture[str], *words: str) -> Any:
    assert frame.main(["pipeline", *words, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def refusal(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert frame.main(["pipeline", *words]) == 2
    output = capsys.readouterr()
    assert output.out == "" and output.err.count("\n") == 1
    return output.err


def test_keys_are_the_settings() -> None:
    laws = {f"{law}_{part}" for law in document.OF_LAWS for part in ("law", "mean", "sigma")}
    names = {field.name for field in fields(Pipeline)} - {*document.OF_LAWS, "observed"}
    assert set(verb.KEYS) == names | laws
    assert tuple(MODES) == verb.MODES
    assert tuple(document.LAWS) == verb.LAWS
    assert set(document.DEFAULTS) <= set(verb.KEYS)


def test_without_a_mode_all_are_compared(capsys: pytest.CaptureFixture[str]) -> None:
    found = printed(capsys, *SMALL)
    assert found["schema"] == "windage/pipeline/1"
    assert [row["mode"] for row in found["rows"]] == list(MODES)
    assert found["occupancy_residual"] == 0
    assert all(row["occupancy_residual"] == 0 for row in found["rows"])
    speed = {row["mode"]: row["speedup"] for row in found["rows"]}
    assert speed["synchronous"] == 1 < speed["overlap"] < speed["asynchronous"]
    assert found["rows"][0]["lag_max"] == 0
    assert len(found["reading"]) == 3
    for picture in found["pictures"]:
        assert sum(picture["histogram"]["responses"]) == pytest.approx(1)
        assert sum(picture["histogram"]["tokens"]) == pytest.approx(1)
        for column in ("generated", "admitted"):
            assert sum(c[column] for c in picture["selection"]) == pytest.approx(1)


def test_a_row_is_the_run_of_its_settings(capsys: pytest.CaptureFixture[str]) -> None:
    words = ("--mode", "in_flight", "--max-lag", "2", "--refill", "--seed", "5")
    row = printed(capsys, *SMALL, *words)["rows"][0]
    keys = {"mode": "in_flight", "max_lag": 2, "refill": True}
    sizes = {"slots": 16, "batch": 32, "group_size": 4}
    run = simulate(document.pipeline({**keys, **sizes}), 30, np.random.default_rng(5))
    assert row["throughput"] == run.throughput and row["lag_mean"] == run.lag.mean()
    ages, tokens = run.token_lag
    assert row["token_lag_mean"] == pytest.approx(np.average(ages, weights=tokens))
    assert row["lag_p95"] == np.quantile(run.lag, 0.95, method="inverted_cdf")
    assert row["dropped_zero_variance"] == (run.fate == -4).mean() > 0
    assert row["settings"]["max_lag"] == 2 and row["settings"]["drop_after"] is None


def test_toml_and_flags_and_sweeps(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file = tmp_path / "p.toml"
    file.write_text(
        'mode = "asynchronous"\nslots = 16\nbatch = 32\ngroup_size = 4\nsteps = 20\n'
        "[sweep]\nmax_lag = [1, 2]\n"
    )
    given = ("--config", str(file), "--slots", "8", "--sweep", "update-mean=10,500,900")
    found = printed(capsys, *given)
    assert [(r["max_lag"], r["update_mean"]) for r in found["rows"]] == [
        (lag, mean) for lag in (1, 2) for mean in (10, 500, 900)
    ]
    assert {row["settings"]["slots"] for row in found["rows"]} == {8}
    slow = [row["throughput"] for row in found["rows"][:3]]
    assert slow == sorted(slow, reverse=True)


@pytest.mark.parametrize("ending", [".csv", ".jsonl", ".parquet"])
def test_observed_lengths(capsys: pytest.CaptureFixture[str], tmp_path: Path, ending: str) -> None:
    file, values = tmp_path / f"dump{ending}", [100, 300, 800]
    table = pd.DataFrame({"other": ["a", "b", "c"], "n": values})
    if ending == ".csv":
        table.to_csv(file, index=False)
    elif ending == ".jsonl":
        file.write_text("".join(json.dumps({"n": v}) + "\n" for v in values))
    else:
        table.to_parquet(file)
    given = ("--lengths", str(file), "--lengths-column", "n", "--stretch", "1")
    row = printed(capsys, *SMALL, "--mode", "asynchronous", *given)["rows"][0]
    assert row["settings"]["tokens"].startswith("empirical(dump")
    assert row["length_generated"] == pytest.approx(400, rel=0.1)
    assert "nearest valid name: n;" in refusal(capsys, *given[:3], "nn")


def seen_rows(tmp_path: Path, **changes: list[Any]) -> str:
    """A dump of responses of 100 or 300 tokens; the long ones wrote faster."""
    file = tmp_path / "dump.jsonl"
    lengths = [100, 300] * 10
    rows = [{"behavior_logp": [-1.0] * n, "elapsed": 9.0 if n == 100 else 13.0} for n in lengths]
    for name, values in changes.items():
        for row, value in zip(rows, values, strict=False):
            row[name] = value
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(file)


def test_lengths_and_seconds_of_a_dump(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    words = ("--mode", "synchronous", "--prompt-tokens", "0", "--sync-seconds", "0")
    words = (*words, "--scoring-seconds", "0", "--update-mean", "1")
    found = printed(capsys, *SMALL, *words, "--from", seen_rows(tmp_path))
    row, told = found["rows"][0], found["observed"]
    assert told == {
        "rows": 20, "used": 20, "set_aside": {}, "source": str(tmp_path / "dump.jsonl"),
        "seconds": "request to verdict, all of it in the slot",
    }  # fmt: skip
    # 32 responses in 16 slots: the slowest slot wrote two long ones.
    assert row["step_seconds"] == pytest.approx(27, abs=0.2)
    assert row["length_generated"] == pytest.approx(200, rel=0.1)
    assert row["settings"]["tokens"] == "observed(dump.jsonl, 200)"
    verdicts = seen_rows(tmp_path, verifier_seconds=[8.0, 1.0] * 10)
    found = printed(capsys, *SMALL, *words, "--from", verdicts)
    assert found["observed"]["seconds"] == "generation and verdict"
    columns = np.array([[100.0, 1, 8], [300, 12, 1]] * 10).T
    keys = {k[2:].replace("-", "_"): v for k, v in zip(words[::2], words[1::2], strict=True)}
    keys = {k: float(v) if k != "mode" else v for k, v in keys.items()} | {"stretch": 1.0}
    same = document.pipeline(
        keys | {"slots": 16, "batch": 32, "group_size": 4}, Observed(*columns, "dump")
    )
    again = simulate(same, 30, np.random.default_rng(0))
    assert found["rows"][0]["step_seconds"] == again.step_time < 27
    assert set(again.responses["scored"] - again.responses["ended"]) <= {8.0, 1.0}
    assert frame.main(["pipeline", *SMALL, *words, "--from", verdicts]) == 0
    assert "Lengths of 20 of 20 responses" in capsys.readouterr().out


def test_responses_without_seconds_are_counted(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    some = seen_rows(tmp_path, elapsed=[None, None, None])
    told = printed(capsys, *SMALL, "--from", some)["observed"]
    assert told["used"] == 17 and told["set_aside"] == {"no seconds": 3}
    never = seen_rows(tmp_path, elapsed=[None] * 20)
    found = printed(capsys, *SMALL, "--from", never, "--token-seconds", "0.1")
    assert found["observed"]["seconds"].startswith("none")
    assert found["rows"][0]["settings"]["tokens"].startswith("empirical")
    assert found["rows"][0]["settings"]["token_seconds"] == 0.1
    some = seen_rows(tmp_path)
    assert "token_seconds is set as well" in refusal(capsys, "--from", some, "--token-seconds", "1")
    assert "verifier_mean is set" in refusal(capsys, "--from", some, "--sweep", "verifier-mean=1,2")
    assert "tokens_mean is set" in refusal(capsys, "--from", some, "--tokens-mean", "5")
    assert "both hold lengths" in refusal(capsys, "--from", some, "--lengths", some)
    with open(some, "a") as file:
        file.write('{"behavior_logp": [NaN], "elapsed": 1.0}\n')
    told = printed(capsys, *SMALL, "--from", some)["observed"]
    assert told["rows"] == 21 and sum(told["set_aside"].values()) == 1


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--slot", "4"), "nearest valid name: --slots"),
        (("--mode", "async"), "nearest valid name: asynchronous"),
        (("--sweep", "maxlag=1"), "nearest valid name: max_lag"),
        (("--sweep", "max-lag=1,x"), "allowed: a whole number"),
        (("--sweep", "max-lag=1,1"), "comes twice"),
        (("--sweep", "max-lag"), "no values"),
        (("--slots", "0"), "allowed: a whole number from 1 on"),
        (("--update-mean", "nan"), "allowed: a finite number"),
        (("--update-mean", "-1"), "at least 0"),
        (("--batch", "10"), "multiple of group_size"),
        (("--mode", "overlap", "--capacity", "1"), "capacity in mode overlap"),
        (("--slots", "4", "--sweep", "slots=4,8"), "set as well"),
        (("--lengths", "nowhere.csv"), "No such file"),
        (("--config", "nowhere.toml"), "No such file"),
        (("--curve", "x.csv", "--slots", "4"), "--slots with --curve"),
        (("--base", "0.1"), "allowed: with --curve"),
    ],
)
def test_bad_input_is_one_line(
    capsys: pytest.CaptureFixture[str], words: tuple[str, ...], said: str
) -> None:
    assert said in refusal(capsys, *words)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("slotz = 4", "nearest valid name: slots"),
        ("slots = 1.5", "slots: 1.5; allowed: a whole number"),
        ("slots = true", "slots: True; allowed"),
        ("slots = 4\nslots = 5", "allowed: a TOML file"),
        ("sweep = 3", "a table of lists"),
        ("[sweep]\nslots = 3", "a list of values"),
        ("refill = 1", "allowed: true or false"),
    ],
)
def test_bad_files_are_one_line(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, text: str, said: str
) -> None:
    file = tmp_path / "p.toml"
    file.write_text(text)
    assert said in refusal(capsys, "--config", str(file))


def test_modes_that_do_not_go_with_a_setting_say_why(
    capsys: pytest.CaptureFixture[str],
) -> None:
    rows = printed(capsys, *SMALL, "--capacity", "1")["rows"]
    assert [row["throughput"] is None for row in rows] == [True, True, False, False, False]
    assert "capacity in mode synchronous" in rows[0]["reason"]


def test_every_form_is_written(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    words = ("--mode", "asynchronous", "--refill", "--sweep", "max-lag=1,4", "--out", str(tmp_path))
    assert frame.main(["pipeline", *SMALL, *words]) == 0
    names = {path.name for path in tmp_path.iterdir()}
    stems = ("timeline", "lag", "selection", "sweep")
    pictures = {f"pipeline-{s}.{kind}" for s in stems for kind in ("png", "svg")}
    assert names == pictures | {f"pipeline.{k}" for k in ("json", "csv", "parquet", "html")}
    table = pd.read_csv(tmp_path / "pipeline.csv")
    assert table["max_lag"].tolist() == [1, 4] and (table["lag_max"] <= table["max_lag"]).all()


def test_lanes_never_hold_two_responses_at_once() -> None:
    run = simulate(Pipeline(slots=7, batch=8), 40, np.random.default_rng(0))
    lane = summary.lanes(run.responses["born"], run.responses["ended"], 7)
    for k in range(7):
        mine = run.responses[lane == k]
        assert (mine["born"][1:] >= mine["ended"][:-1]).all()
    with pytest.raises(AssertionError, match="more responses"):
        summary.lanes(run.responses["born"], run.responses["ended"], 6)


def test_selection_is_told_by_fifths() -> None:
    settings: dict[str, Any] = {"group_size": 4, "refill": True}
    cells = summary.selection(simulate(Pipeline(**settings), 300, np.random.default_rng(0)))
    _, by_difficulty = figures.ratios(cells, "difficulty")
    # A group of 4 teaches with probability 1 - d^4 - (1-d)^4.
    edges = np.linspace(0, 1, 6)
    whole = edges + (1 - edges) ** 5 / 5 - edges**5 / 5
    expected = np.diff(whole) * 5 / (whole[-1] - whole[0])
    assert by_difficulty == pytest.approx(expected.tolist(), abs=0.06)


def test_published_step_times_are_predicted_within_ten_percent() -> None:
    found = published.run()
    roles = [row["role"] for row in found["rows"] if row["table"] == "fully asynchronous"]
    assert roles == ["calibrated", "predicted", "predicted", "predicted"]
    for row in found["rows"]:
        if row["role"] == "calibrated":
            assert abs(row["gap"]) < 1e-3 and row["holds"] is None
        else:
            assert row["holds"] and abs(row["ours"] / row["published"] - 1) <= 0.1, row
    good = [row["sigma"] for row in found["spreads"] if row["gap"] <= 0.1]
    assert good == [0.4, 0.5, 0.6]


def test_published_times_do_not_fit_any_model() -> None:
    # Another spread, or samples that are fetched in no time, fit threshold 0 as well.
    assert published.worst(published.steps_at(0.8)[1]) > published.WITHIN
    assert published.worst(published.steps_at(published.SIGMA, 0.0)[1]) > published.WITHIN


def test_the_page_says_what_misses(monkeypatch: pytest.MonkeyPatch) -> None:
    keys = {"slots": 16, "batch": 32, "group_size": 4}
    found = document.run(keys, {}, steps=20, seed=0, with_published=True)
    html = report.html(report.page(found))
    assert "Every prediction lies within 10 %" in html and "miss by up to 15 % for 0.3" in html
    runs = {**published.ONE_STEP_OFF, "Megatron": (566.0, 59.0, 401.0, 120.0, 247.0)}
    monkeypatch.setattr(published, "ONE_STEP_OFF", runs)
    found["published"] = published.run()
    assert "Misses: one step off, Megatron, longer of two" in report.html(report.page(found))


def test_nothing_heavy_before_a_refusal() -> None:
    program = (
        "import sys\nfrom windage.cli.main import main\nmain(['pipeline', '--slot', '3'])\n"
        "print({'numba', 'numpy', 'scipy', 'torch', 'matplotlib'} & set(sys.modules))"
    )
    answer = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert answer.stdout == "set()\n", answer.stdout + answer.stderr


def test_quantiles_weigh() -> None:
    values = np.array([0, 1, 2, 3])
    assert summary.weighted_quantiles(values, np.array([97.0, 1, 1, 1]), (0.5, 0.99)) == [0, 2]
