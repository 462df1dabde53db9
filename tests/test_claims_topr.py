"""Rows of document 000: the quick ones hold, and a planted fault in what they use is seen.

The rows that train on PROBE and WINDOW take a minute in all and run with `windage claims`.
"""

import numpy as np
import pytest
import torch

from windage.analysis.claims import learned, one_step, t_appendix, t_compared, t_method, t_naive
from windage.analysis.claims.claim import REGISTRY
from windage.analysis.claims.running import run
from windage.estimators.catalogue import get
from windage.toy import learning
from windage.toy.learning import marks, path
from windage.toy.questions import recorded_update
from windage.toy.votes import majority

ROWS = {i: c for i, c in REGISTRY.items() if i.startswith("T-")}
LONG = {"T-07", "T-08"}
QUICK = sorted({i for i, c in ROWS.items() if c.kind == "exact"} - LONG | {"T-12", "T-29"})


def fails(claim_id):
    return run(ROWS[claim_id]).failures


def test_every_row_of_the_document_is_there():
    assert sorted(ROWS) == [f"T-{n:02d}" for n in range(1, 31)]


@pytest.mark.parametrize("claim_id", QUICK)
def test_quick_rows_hold(claim_id):
    assert fails(claim_id) == []


def with_entry(name, entry):
    """Put an entry in the place of another in every table of entries that rows loop over."""
    return [
        (t_naive, name, entry),
        (t_method, name, entry),
        (t_appendix, name, entry),
        (t_appendix, "THREE", (("positives only", t_naive.POSITIVES), ("topr", entry))),
    ]


def ratio_alone(effective, advantages, **limits):
    return effective.exp()


def ties_lost(right, wrong, votes):
    return majority(right, wrong + 1e-3, votes)


FAULTS = {
    "mean update not normalized": (
        [(learning, "pull_back", lambda visits, probability: visits)],
        ("T-01", "T-04", "T-25"),
    ),
    "a lower limit for negatives": (
        with_entry("TOPR", get("topr", a_neg=0.1)),
        ("T-01",),
    ),
    "negatives truncated at 2": (with_entry("TOPR", get("topr", b_neg=2.0)), ("T-06", "T-28")),
    "positives truncated": (with_entry("TOPR", get("topr", a_pos=0.0)), ("T-26", "T-28")),
    "negatives kept by positives only": (
        [(t_naive, "POSITIVES", get("topr"))],
        ("T-01", "T-04"),
    ),
    "importance sampling truncated": ([(t_naive, "IS", get("topr"))], ("T-06",)),
    "objective without the tangents": (
        [(one_step, "tapered", ratio_alone), (t_method, "tapered", ratio_alone)],
        ("T-01", "T-09", "T-12"),
    ),
    "baseline of the wrong sign": (
        [(t_method, "baseline_for", lambda p, s: -learned.baseline_for(p, s))],
        ("T-13",),
    ),
    "mixed data keep their own shares": (
        [(t_compared, "_mixed", lambda p, c, *, own: torch.ones(6).double() * (1 + p))],
        ("T-19",),
    ),
}


@pytest.mark.parametrize(
    ("fault", "claim_id"), [(f, i) for f, (_, ids) in FAULTS.items() for i in ids]
)
def test_a_planted_fault_fails_its_rows(fault, claim_id, monkeypatch):
    for place, name, value in FAULTS[fault][0]:
        monkeypatch.setattr(place, name, value)
    assert fails(claim_id) != []


def test_the_vote_of_a_judge_is_as_stated(monkeypatch):
    assert t_compared._judged(0.709) == pytest.approx(0.8025, abs=1e-4)
    monkeypatch.setattr(t_compared, "majority", ties_lost)
    assert t_compared._judged(0.709) != pytest.approx(0.8025, abs=1e-4)


def test_probe_starts_as_stated():
    for invalid, train, test in ((0.02, 0.31, 0.32), (0.2, 0.26, 0.26)):
        found = learned.study(invalid, 0)
        for part, mass in ((found.train, train), (found.test, test)):
            assert part.mass(part.start, part.right).mean().item() == pytest.approx(mass, abs=0.01)


def test_ten_passes_part_the_learners():
    found = learned.study(0.02, 0)
    right = {}
    for name in ("positives only", "topr", "PPO"):
        update = recorded_update(found.train, found.answers, learned.ENTRIES[name])
        w = marks(path(found.train.start, update, steps=10, rate=2.0), [10])[10]
        right[name] = found.train.mass(w, found.train.right)
    assert (right["topr"] > right["positives only"]).all()
    assert (right["positives only"] > right["PPO"]).all()


def test_seeds_of_replicates_do_not_overlap():
    assert learned.numbers(0) == tuple(range(8))
    assert not set(learned.numbers(0, 24)) & set(learned.numbers(1, 24))
    first, second = learned.generators(1)[0], np.random.default_rng(8)
    assert first.random() == second.random()
