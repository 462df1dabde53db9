"""The study of length: its rows are those of a plain study, its sentences those of its rows."""

from __future__ import annotations

import copy
import json
import math
import os

import pytest

from windage.analysis.studies import length, length_page, study
from windage.analysis.studies.reading import Study
from windage.analysis.tables import text
from windage.cli import main as frame
from windage.cli.study import STUDIES
from windage.estimators.catalogue import CATALOGUE, FIRST
from windage.toy.behavior import with_behavior
from windage.toy.chains import reasoning
from windage.toy.exact.transfer import mismatch
from windage.toy.objective import objective


@pytest.fixture(scope="module")
def document():
    with pytest.MonkeyPatch.context() as change:
        change.setattr(length, "LENGTHS", (16, 256, 4096))
        change.setattr(length, "GROUP_SIZES", (8, 32))
        yield length.run()


def reworded(document, change):
    """The reading of the same document with other rows."""
    other = copy.deepcopy(document)
    for row in other["rows"]:
        change(row)
    return length.reading(other)


def test_rows_are_those_of_a_plain_study():
    sites, rows = length.at_length(64, lags=(3, 9), group_sizes=(2, 5))
    step = length.rate(reasoning(64))
    assert len(rows) == 2 * 2 * len(length.served())
    assert {site["rate"] for site in sites} == {step}
    for row in rows:
        chain = with_behavior(reasoning(64), "stale", steps=row["steps"], rate=step)
        entry = study.bind(CATALOGUE[row["estimator"]], chain)
        alone = study.row(entry, chain, objective(chain), row["group_size"])
        bounds = [r["error_bound"] for r in (row, alone)]
        for key, value in alone.items():
            if isinstance(value, float) and bounds[1] and key in bounds[1]:
                slack = sum(math.inf if b[key] is None else b[key] for b in bounds)
                assert abs(row[key] - value) <= slack + 1e-11, (key, row)
            elif isinstance(value, float):
                assert row[key] == pytest.approx(value, rel=1e-9, abs=1e-11), (key, row)
            elif key not in ("mean", "why", "error_bound"):
                assert row[key] == value, (key, row)


def test_noise_is_the_spread_of_the_rescaled_estimate(document):
    for row in document["rows"][::17]:
        noise = row["variance_rescaled"] ** 0.5 / row["gradient_norm"]
        assert row["noise"] == pytest.approx(noise)


@pytest.mark.parametrize("horizon", [16, 1024, 32768])
def test_one_step_of_lag_has_the_stated_divergence_a_token(horizon):
    chain = reasoning(horizon)
    behind = with_behavior(chain, "stale", steps=1, rate=length.rate(chain))
    assert mismatch(behind)["kl"] == pytest.approx(length.DIVERGENCE, rel=1e-6)


def test_prompts_are_as_the_docstring_says():
    def solved(chain):
        return [float(objective(chain.select(p)).value) for p in range(chain.prompts)]

    assert max(solved(reasoning(16))) < 0.4
    for horizon in (256, 32768):
        chain = reasoning(horizon)
        assert solved(chain) == pytest.approx([0.20, 0.48, 0.73], abs=0.005)
        assert mismatch(chain)["tokens"] == pytest.approx(horizon / 4, rel=0.03)


def test_every_entry_of_the_first_tier_is_in_the_rows_or_said_to_be_left_out(document):
    ran = {row["estimator"] for row in document["rows"]}
    assert ran | set(document["left_out"]) == {entry.name for entry in FIRST}
    assert not ran & set(document["left_out"])
    assert set(document["left_out"]) == {"ppo", "gspo"}
    assert "needs values" in document["left_out"]["ppo"]
    assert "served up to 4,096 tokens" in document["left_out"]["gspo"]
    bounded = {row["estimator"] for row in document["rows"] if row["error_bound"]}
    assert bounded == {"sequence_tis", "tis_both_signs"}
    assert all(row["standard_error"] is None for row in document["rows"])


def test_bias_of_no_correction_outgrows_that_of_the_token_ratio(document):
    """The reversal that the README opens with, in the rows themselves."""
    own = Study(length.of_size(document))

    def bias(n, name):
        return own.at(n, 64)[name]["relative_bias_rescaled"]

    assert bias(16, "rloo") < bias(16, "token_is")
    assert bias(4096, "rloo") > 5 * bias(4096, "token_is")
    assert own.leader(256, 64, 24576) == "trajectory_is"
    assert own.at(4096, 64)["trajectory_is"]["noise"] > 1e6


def test_who_leads_from_which_length_to_which(document):
    own = Study(length.of_size(document))
    assert length.succession(own, 0, 24576) == [("rloo", 16, 4096)]
    assert [name for name, _, _ in length.succession(own, 64, 24576)] == [
        "rloo",
        "trajectory_is",
        "centered",
    ]


def test_a_batch_holds_a_group_of_every_prompt(document):
    for size in (8, 32):
        part = length.of_size(document, size)
        assert part["responses"]["batch"] == 3 * size
        assert {row["group_size"] for row in part["rows"]} == {size}


def test_reading_follows_the_numbers(document):
    growth, reversal, border = document["reading"]
    rows = {
        (row["horizon"], row["estimator"]): row
        for row in document["rows"]
        if row["steps"] == length.LAG and row["group_size"] == length.GROUP_SIZE
    }
    for name in ("rloo", "token_is"):
        ends = [text(rows[n, name]["relative_bias_rescaled"]) for n in (16, 4096)]
        assert " to ".join(ends) in growth
    assert "trajectory_is beats centered with 256 tokens" in reversal
    assert "loses to it with 4096" in reversal
    led = Study(length.of_size(document)).leader
    far = length.nats(document)
    plain = [v for (n, lag), v in far.items() if led(n, lag, 24576) == "rloo"]
    near = [v for v in far.values() if v <= max(plain)]
    assert f"rloo leads nowhere beyond {text(max(plain))} nats" in border
    assert f"in {len(plain)} of {len(near)} places" in border


def test_reading_changes_with_the_numbers(document):
    def same(row):
        row.update(relative_bias_rescaled=0.0, noise=0.1, scale=1.0)

    assert reworded(document, same)[1].startswith("Length does not reverse")

    def turned(row):
        if row["estimator"] == "rloo":
            row["relative_bias_rescaled"] = 0.5 if row["horizon"] < 1000 else 0.0
        else:
            row["relative_bias_rescaled"] = 0.0 if row["horizon"] < 1000 else 0.5
        row.update(noise=0.1, scale=1.0)

    found = reworded(document, turned)[1]
    assert "token_is up to 256 tokens, rloo from 4096 on; token_is beats rloo with 256" in found


def test_mismatch_grows_with_lag_and_with_length(document):
    far = length.nats(document)
    for n in document["sweep"]["horizon"]:
        values = [far[n, lag] for lag in document["sweep"]["steps"]]
        assert values == sorted(values) and values[0] < 1e-12
    assert far[4096, 8] > 10 * far[256, 8] > 100 * far[16, 8]


def test_figure_names_followed_estimators_and_states_the_mismatch(document):
    page = length_page.page(document)
    assert [figure.name for figure in page.figures] == ["length", "length_map"]
    assert length_page.mismatches(document, "kl")[1] == "1e-6"
    assert length_page.mismatches(document, "kl")[0] == "0"
    again = length_page.overview(document)
    assert again == page.figures[0]
    table = length_page.group_table(document, 24576, [256])
    own = Study(length.of_size(document, 32))
    assert table.rows[0]["256 32"] == own.progress("rloo", 256, length.LAG, 24576)


def test_command_writes_everything(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(length, "LENGTHS", (16, 64))
    monkeypatch.setattr(length, "GROUP_SIZES", (8,))
    folder = tmp_path / "out"
    assert frame.main(["study", "--study", "length", "--json", "--out", str(folder)]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["schema"] == "windage/study/1" and found["study"] == "length"
    assert {"horizon", "steps", "group_size"} <= set(found["rows"][0])
    assert {"study.csv", "study.html", "length.png", "length.svg"} <= set(os.listdir(folder))
    assert frame.main(["study", "--study", "length"]) == 0
    assert found["reading"][0][:40] in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--study", "lenght"], "'lenght'"),
        (["--study", "length", "--group-size", "4"], "allowed: no --group-size"),
    ],
)
def test_what_is_refused(words, said, capsys):
    assert frame.main(["study", *words]) == 2
    output = capsys.readouterr()
    assert output.out == "" and output.err.count("\n") == 1 and said in output.err
    assert all(name in output.err for name in STUDIES) or "--group-size" in output.err


def test_progress_is_told(monkeypatch):
    monkeypatch.setattr(length, "LENGTHS", (2, 4))
    monkeypatch.setattr(length, "GROUP_SIZES", (8,))
    told = []
    length.run(lambda done, total: told.append((done, total)))
    assert len(told) == 2 and told[-1][0] == told[-1][1] == 2 * told[0][0]
