"""Signs of faults: identities exactly; planted dumps raise their sign, honest ones none."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch

from windage.analysis.diagnose import faults
from windage.analysis.diagnose.blocks import block, gathered
from windage.analysis.diagnose.document import collect_evidence, rates
from windage.analysis.diagnose.evidence import Evidence
from windage.analysis.diagnose.planted import CASES, Run, dump, rows
from windage.analysis.diagnose.rows import Row
from windage.toy.behavior import with_behavior
from windage.toy.problems import Problem, Tree, make

HONEST = [name for name, (sign, _) in CASES.items() if sign is None]
FAULTY = [name for name, (sign, _) in CASES.items() if sign is not None]
EIGHTHS = (8.0, 4.0, 2.0, 2.0)


def raised(some: Sequence[Row]) -> set[str]:
    return {sign.name for sign in faults.judge(*collect_evidence(some)) if sign.raised}


def bandit() -> Problem:
    """One choice of four, with probabilities 1/2, 1/4, 1/8, 1/8."""
    logits = torch.tensor(EIGHTHS, dtype=torch.float64).log().view(1, 1, 4)
    return make("bandit", Tree(4, None, 1), logits, torch.zeros(1, 4))


def enumerated(
    problem: Problem, recorded: torch.Tensor, trained: torch.Tensor, of: int
) -> Evidence:
    """Every token as often as the sampler draws it in so many, as one-token responses."""
    probability = problem.behavior_logp[0, 0].exp()
    square = float(trained.exp().square().sum())
    some = []
    for token, p in enumerate(probability.tolist()):
        times = p * of
        assert abs(times - round(times)) < 1e-9, "the sampler's law in whole numbers"
        for n in range(round(times)):
            some.append(
                Row(
                    where=f"{token}/{n}",
                    mask=np.ones(1, bool),
                    behavior_logp=recorded[token : token + 1].numpy(),
                    logp=trained[token : token + 1].numpy(),
                    probability_square=np.array([square]),
                )
            )
    found = Evidence()
    found.add(block(some))
    return found


def means(found: Evidence) -> dict[str, float]:
    table = found.near.over()
    return {
        "ratio": float(table["ratio"].sum() / table["n"].sum()),
        "inverse": float(table["inverse"].sum() / table["n"].sum()),
        "calibration": float(table["calibration"].sum() / table["known"].sum()),
    }


def test_ratios_average_the_kept_mass_where_top_p_is_not_applied() -> None:
    policy = bandit()
    sampler = with_behavior(policy, "top_p", p=0.75)
    found = means(enumerated(sampler, sampler.behavior_logp[0, 0], policy.logp[0, 0], 3))
    assert found["ratio"] == pytest.approx(0.75 - 1, abs=1e-12)


@pytest.mark.parametrize(("t", "of"), [(0.5, 22), (1.0, 8)])
def test_honest_records_have_ratio_1_and_calibration_0(t: float, of: int) -> None:
    policy = bandit()
    sampler = with_behavior(policy, "temperature", t=t)
    found = means(enumerated(sampler, sampler.behavior_logp[0, 0], policy.logp[0, 0], of))
    assert found["ratio"] == pytest.approx(0.0, abs=1e-12)
    assert found["calibration"] == pytest.approx(0.0, abs=1e-12)
    chi_square = float((policy.logp - sampler.behavior_logp).exp().square().mul(
        sampler.behavior_logp.exp()).sum()) - 1  # fmt: skip
    assert (found["inverse"] > 1e-3) == (t != 1.0) == (chi_square > 1e-3)


def test_raw_records_have_inverse_1_where_the_trainer_applies_the_temperature() -> None:
    policy = bandit()
    sampler = with_behavior(policy, "temperature", t=0.5)
    drew = sampler.behavior_logp[0, 0]
    found = means(enumerated(sampler, policy.logp[0, 0], drew, 22))
    assert found["inverse"] == pytest.approx(0.0, abs=1e-12)
    assert found["ratio"] > 0.1


def test_raw_records_that_agree_are_uncalibrated_by_what_enumeration_says() -> None:
    policy = bandit()
    sampler = with_behavior(policy, "temperature", t=0.5)
    pi, mu = policy.logp[0, 0].exp(), sampler.behavior_logp[0, 0].exp()
    found = means(enumerated(sampler, policy.logp[0, 0], policy.logp[0, 0], 22))
    assert found["calibration"] == pytest.approx(float(((mu - pi) * pi).sum()), abs=1e-12)
    assert found["ratio"] == pytest.approx(0.0, abs=1e-12)


@pytest.mark.parametrize("name", FAULTY)
def test_a_planted_fault_raises_its_sign(name: str) -> None:
    assert CASES[name][0] in raised(list(dump(name, 0)))


@pytest.mark.parametrize("name", HONEST)
def test_an_honest_run_raises_no_sign(name: str) -> None:
    assert raised(list(dump(name, 0))) == set()


@pytest.mark.long
@pytest.mark.parametrize("name", CASES)
def test_rates_on_many_planted_dumps(name: str) -> None:
    sign, tries = CASES[name][0], 20
    found = [raised(list(dump(name, 5000 + seed))) for seed in range(tries)]
    if sign is None:
        assert sum(bool(each) for each in found) <= 1
    else:
        assert sum(sign in each for each in found) >= math.ceil(0.95 * tries)


def test_measured_rates_keep_the_promise() -> None:
    """At least 95 % found, at most 1 % false alarms, of each sign that is planted."""
    table = rates()["signs"]
    assert {CASES[name][0] for name in FAULTY} == set(table)
    for sign, counts in table.items():
        hits, of = counts["found"]
        alarms, honest = counts["false_alarms"]
        assert hits >= 0.95 * of > 0, sign
        assert alarms <= 0.01 * honest and honest >= 300, sign


def test_a_fault_that_hides_others_says_so() -> None:
    judged = {s.name: s for s in faults.judge(*collect_evidence(dump("late by one", 1)))}
    assert judged["shift"].raised and "late" in judged["shift"].says
    assert judged["temperature"].state == "cannot tell" and "shift" in judged["temperature"].says
    early = {s.name: s for s in faults.judge(*collect_evidence(dump("early by one", 1)))}
    assert "early" in early["shift"].says


def test_the_temperature_is_recovered() -> None:
    judged = {s.name: s for s in faults.judge(*collect_evidence(dump("temperature", 2)))}
    implied = judged["temperature"].evidence["implied_temperature"]
    assert implied == pytest.approx(0.7, abs=0.08)


def test_too_few_tokens_tell_nothing() -> None:
    few = [next(iter(dump("temperature", 0)))]
    assert {sign.state for sign in faults.judge(*collect_evidence(few))} == {"cannot tell"}


def test_a_copied_column_is_said_to_be_one() -> None:
    """At lag 0 one program may have computed both, which the dump cannot tell from a copy."""
    for name in ("asynchronous", "asynchronous, versions not recorded"):
        some = [replace(row, behavior_logp=row.logp) for row in dump(name, 0)]
        assert raised(some) == {"copied"}
    young = [replace(row, behavior_logp=row.logp) for row in dump("synchronous", 0)]
    judged = {s.name: s for s in faults.judge(*collect_evidence(young))}
    assert judged["copied"].state == "cannot tell" and "lag 0" in judged["copied"].says
    assert judged["shift"].state == "clear"


def test_tokens_that_are_certain_are_not_called_copied() -> None:
    """A sharp policy says 0 on both sides of most tokens; the few others tell."""
    some = []
    for row in dump("asynchronous", 0):
        sure = np.arange(len(row.mask)) % 2_000 != 0
        logp, behavior = (np.where(sure, 0.0, x) for x in (row.logp, row.behavior_logp))
        some.append(replace(row, logp=logp, behavior_logp=behavior))
    assert sum(len(row.mask) for row in some) > 40 * len(some) / 2
    assert "copied" not in raised(some)
    none = [replace(row, logp=0 * row.mask, behavior_logp=0 * row.mask) for row in some]
    judged = {s.name: s for s in faults.judge(*collect_evidence(none))}
    assert judged["copied"].state == "cannot tell"


def test_raw_and_processed_look_alike_without_the_sum_of_squares() -> None:
    """Drawn at a temperature, recorded and trained without: only the sum of squares tells."""
    run = Run(temperature=0.7, raw=True, recorded=("versions",))
    judged = {s.name: s for s in faults.judge(*collect_evidence(rows(run, 0)))}
    assert judged["raw"].state == "cannot tell" and "either" in judged["raw"].says


def test_signs_do_not_depend_on_the_size_of_blocks() -> None:
    some = list(dump("asynchronous", 3))
    found = []
    for size in (500, 10**9):
        evidence = Evidence()
        for part in gathered(some, size):
            evidence.add(block(part))
        found.append([(s.name, s.state, *s.evidence.values()) for s in
                      faults.judge(evidence, {"processed": False})])  # fmt: skip
    for one, other in zip(*found, strict=True):
        assert one[:2] == other[:2]
        assert [v or 0 for v in one[2:]] == pytest.approx([v or 0 for v in other[2:]], rel=1e-6)


def test_without_its_test_a_fault_goes_unseen(monkeypatch: pytest.MonkeyPatch) -> None:
    """The thresholds carry the verdicts: put out of reach, each fault passes as clear."""
    monkeypatch.setattr(faults, "CLEAR", math.inf)
    for name in ("temperature", "top-p", "late by one", "raw, top-p"):
        assert CASES[name][0] not in raised(list(dump(name, 0)))
