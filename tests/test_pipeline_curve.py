"""The sigmoid of score by compute: recovered, covered, and open where the data leave it so."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from checks import refused
from scipy.optimize import curve_fit

from windage.analysis.pipeline import curve_document
from windage.analysis.pipeline.coverage import BASE, COMPUTE, TRUTH, covered, noisy
from windage.analysis.pipeline.curve import Data, Fit, fit, interval, profile, sigmoid
from windage.cli import main as frame
from windage.estimators.errors import BadInput


@pytest.mark.parametrize("base", [None, BASE])
def test_a_curve_without_noise_is_recovered(base: float | None) -> None:
    clean = sigmoid(COMPUTE, TRUTH["A"], TRUTH["B"], TRUTH["C_mid"], BASE)
    found = fit(Data(compute=COMPUTE, score=clean, base=base))
    for name, truth in {**TRUTH, "R0": BASE}.items():
        assert found.values[name] == pytest.approx(truth, rel=1e-6)


@pytest.mark.parametrize("seed", range(3))
def test_the_fit_is_scipys(seed: int) -> None:
    data = noisy(seed)
    found = fit(data)
    start = (*TRUTH.values(), BASE)
    theirs = curve_fit(sigmoid, data.compute, data.score, start, xtol=1e-12, ftol=1e-12)[0]
    ours = [found.values[name] for name in ("A", "B", "C_mid", "R0")]
    assert np.allclose(ours, theirs, rtol=1e-5)


def test_the_ends_of_an_interval_lie_at_the_limit() -> None:
    found = fit(noisy(1))
    for name in TRUTH:
        low, high = interval(found, name)
        assert low < found.values[name] < high
        for end in (low, high):
            assert profile(found, name, end)[0] == pytest.approx(found.limit, rel=1e-3)


def test_intervals_cover_in_a_few_curves() -> None:
    # 24 curves: 95 % gives fewer than 19 once in 2,000; 68 % gives 19 or more once in 8.
    assert all(hits >= 19 for hits in covered(range(24), None).values())


def test_intervals_that_are_too_short_are_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Fit, "quantile", property(lambda self: 0.7))
    assert min(covered(range(24), None).values()) < 19


@pytest.mark.long
@pytest.mark.parametrize("base", [None, BASE])
def test_intervals_cover_95_percent_of_a_thousand_curves(base: float | None) -> None:
    hits = covered(range(1000), base)
    assert all(930 <= count <= 970 for count in hits.values()), hits


def test_a_curve_that_has_not_bent_is_said_to_be_open() -> None:
    found = curve_document.run(
        *(noisy(0, COMPUTE[COMPUTE < 2]).__getattribute__(k) for k in ("compute", "score")),
        None, "early.csv", 0,
    )  # fmt: skip
    ceiling = found["rows"][0]
    assert ceiling["parameter"] == "A" and ceiling["high"] is None
    warnings = " ".join(found["curve"]["warnings"])
    assert "A is not identified" in warnings and "A has no upper bound" in warnings
    assert json.dumps(found, allow_nan=False)
    late = curve_document.run(COMPUTE, noisy(0).score, None, "late.csv", 0)
    assert late["curve"]["warnings"] == []


def test_the_profile_of_the_ceiling_is_its_interval() -> None:
    found = curve_document.run(COMPUTE, noisy(2).score, None, "c.csv", 0)
    row, t = found["rows"][0], found["curve"]["t"]
    places = np.array(found["curve"]["profile"])
    inside = places[places[:, 1] <= t, 0]
    step = places[1, 0] - places[0, 0]
    assert inside.min() == pytest.approx(row["low"], abs=step)
    assert inside.max() == pytest.approx(row["high"], abs=step)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: Data(compute=np.arange(3.0), score=np.arange(3.0)), "row 0: compute 0"),
        (lambda: Data(compute=np.arange(1.0, 4), score=np.arange(3.0)), "allowed: 6 or more"),
        (lambda: Data(compute=np.arange(1.0, 9), score=np.ones(8)), "all scores are equal"),
        (lambda: Data(compute=np.arange(1.0, 9), score=np.full(8, math.inf)), "both finite"),
    ],
)
def test_bad_data_are_refused(make: Callable[[], Data], words: str) -> None:
    with refused(words, error=BadInput):
        make()


def test_the_verb_fits_a_file(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file, data = tmp_path / "c.csv", noisy(3)
    lines = (f"{s},{c}" for c, s in zip(data.compute, data.score, strict=True))
    file.write_text("score,compute\n" + "\n".join(lines))
    assert frame.main(["pipeline", "--curve", str(file), "--base", "0.1", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["schema"] == "windage/pipeline/1" and found["curve"]["base_known"]
    for row in found["rows"]:
        assert row["low"] < row["estimate"] < row["high"]
    out = tmp_path / "out"
    assert frame.main(["pipeline", "--curve", str(file), "--out", str(out)]) == 0
    assert "ceiling" in capsys.readouterr().out
    assert (out / "pipeline-curve.png").read_bytes().startswith(b"\x89PNG")
    file.write_text("compute,points\n1,2\n")
    assert frame.main(["pipeline", "--curve", str(file)]) == 2
    assert "unknown column" in capsys.readouterr().err
