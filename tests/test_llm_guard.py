"""Faults of numbers: named, skipped or set aside, counted, kept; weights stay bit for bit."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from checks import refused
from hypothesis import given
from hypothesis import strategies as st

from windage.estimators.errors import BadInput
from windage.llm import guard as guards
from windage.llm import journal
from windage.llm.checkpoint import load, save
from windage.llm.guard import Count, Fault, Guard, after, aside, in_responses, in_rows, in_update
from windage.llm.journal import Journal

BAD = (math.nan, math.inf, -math.inf)


def rows(count: int = 4) -> list[dict]:
    return [
        {
            "sample_id": f"s{n}",
            "text": f"answer {n}",
            "reward": float(n % 2),
            "outcome": None if n == 0 else 1.0,
            "behavior_logp": np.array([-0.5, -0.25]),
            "head_behavior_logp": [[0.0, -math.inf]],
        }
        for n in range(count)
    ]


def test_rows_that_are_finite_have_no_faults_and_absent_rewards_are_none():
    clean = rows()
    clean[0]["reward"] = None
    assert in_rows(clean) == [] and in_rows([]) == []


@pytest.mark.parametrize("value", BAD)
@pytest.mark.parametrize("name", guards.RECORDED)
def test_a_fault_of_a_row_is_named_once(name, value):
    told = rows()
    told[2][name] = [-0.5, value, value] if name.endswith("logp") else value
    (fault,) = in_rows(told)
    assert (fault.what, fault.response) == (name, 2)
    assert str(fault.value) == str(value)


@given(places=st.sets(st.tuples(st.integers(0, 4), st.integers(0, 2)), max_size=6))
def test_faults_of_responses_are_the_first_of_each_and_padding_has_none(places):
    values, mask = torch.zeros(5, 3), torch.ones(5, 3, dtype=torch.bool)
    mask[3:, 1:] = False
    for n, place in enumerate(sorted(places)):
        values[place] = BAD[n % 3]
    wanted = sorted({row for row, column in places if mask[row, column]})
    assert [fault.response for fault in in_responses("logp", values, mask)] == wanted
    assert aside(in_responses("logp", values)) == sorted({row for row, _ in places})
    for fault in in_responses("logp", values):
        first = min(column for row, column in places if row == fault.response)
        assert str(fault.value) == str(float(values[fault.response, first]))


def test_loss_and_gradient_belong_to_no_response():
    for value in BAD:
        (fault,) = in_update("gradient_norm", torch.tensor(value))
        assert fault.response is None and str(fault.value) == str(value)
    assert in_update("loss", 1e30) == []


RESPONSE, WHOLE = (
    Fault(what="reward", value=math.nan, response=1),
    Fault(what="loss", value=math.inf),
)


@pytest.mark.parametrize(
    ("policy", "found", "wanted"),
    [
        ("skip", [], "go on"),
        ("stop", [], "go on"),
        ("set aside", [], "go on"),
        ("skip", [RESPONSE], "skip"),
        ("stop", [RESPONSE], "skip"),
        ("set aside", [RESPONSE], "set aside"),
        ("set aside", [RESPONSE, WHOLE], "skip"),
        ("set aside", [WHOLE], "skip"),
    ],
)
def test_what_becomes_of_an_update(policy, found, wanted):
    assert guards.judge(Guard(on_nonfinite=policy), found) == wanted


def test_what_happened_is_counted_and_only_a_clean_update_starts_the_row_anew():
    guard, count = Guard(), Count()
    twice = [RESPONSE, replace(RESPONSE, what="logp"), replace(RESPONSE, response=3)]
    count = after(guard, count, twice, made=True)
    assert count == Count(set_aside=2, in_a_row=1)
    count = after(guard, count, twice, made=False)
    assert count == Count(skipped=1, set_aside=2, in_a_row=2)
    assert after(guard, count, [], made=True) == replace(count, in_a_row=0)


def test_as_many_in_a_row_as_the_limit_end_the_run_in_one_line():
    guard, count = Guard(limit=3), Count()
    for step in (7, 8):
        count = after(guard, count, [RESPONSE], made=False)
        guards.stop(guard, count, [RESPONSE], step)
    count = after(guard, count, [RESPONSE], made=False)
    with refused("step 9", "reward of response 1 is nan", "3 updates in a row", error=BadInput):
        guards.stop(guard, count, [RESPONSE], 9)
    guards.stop(guard, count, [], 9)
    strict = Guard(on_nonfinite="stop", limit=3)
    with refused("step 2", "loss is inf", "stop", error=BadInput):
        guards.stop(strict, after(strict, Count(), [WHOLE], made=False), [WHOLE], 2)


def test_what_is_written_out_names_the_response_or_has_all_of_them(tmp_path):
    file = Journal(tmp_path / "nonfinite.jsonl")
    for record in guards.records(3, [RESPONSE, WHOLE], rows(2)):
        file.write(record)
    found = journal.read(file.path)
    assert [(one["what"], one["value"], one["response"]) for one in found] == [
        ("reward", "nan", 1),
        ("loss", "inf", 0),
        ("loss", "inf", 1),
    ]
    assert found[0] == {
        "step": 3,
        "what": "reward",
        "value": "nan",
        "response": 1,
        "sample_id": "s1",
        "text": "answer 1",
        "reward": 1.0,
        "outcome": 1.0,
        "behavior_logp": [-0.5, -0.25],
        "head_behavior_logp": [[0.0, "-inf"]],
    }
    assert list(guards.records(3, [WHOLE], [])) == [{"step": 3, "what": "loss", "value": math.inf}]


class Regression:
    """A small model with the guard in its loop: rewards weigh how far outputs are moved.

    Args:
        fault: where, in which update, of which response; the value is put there.
    """

    def __init__(self, guard: Guard) -> None:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            self.model = torch.nn.Linear(3, 1)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.1)
        self.schedule = torch.optim.lr_scheduler.ExponentialLR(self.optimizer, 0.9)
        self.guard, self.count, self.kept = guard, Count(), []

    def update(self, step: int, where: str = "", value: float = 0.0, response: int = 1) -> None:
        generator = torch.Generator().manual_seed(step)
        inputs = torch.randn(4, 3, generator=generator)
        told = [row | {"reward": float(n)} for n, row in enumerate(rows())]
        if where == "reward":
            told[response]["reward"] = value
        faults, left = in_rows(told), [True] * 4
        if guards.judge(self.guard, faults) == "set aside":
            left = [n not in aside(faults) for n in range(4)]
        verdict = guards.judge(self.guard, faults)
        if verdict != "skip":
            verdict = self.gradient(inputs, told, left, faults, (where, value, response))
        made = verdict != "skip"
        if made:
            self.optimizer.step()
            self.schedule.step()
        self.optimizer.zero_grad()
        self.kept += guards.records(step, faults, told)
        self.count = after(self.guard, self.count, faults, made=made)
        guards.stop(self.guard, self.count, faults, step)

    def gradient(self, inputs, told, left, faults, planted):
        where, value, response = planted
        logp = torch.nn.functional.logsigmoid(self.model(inputs))
        if where == "logp":
            logp = logp + torch.zeros(4, 1).index_fill_(0, torch.tensor([response]), value)
        found = in_responses("logp", logp, torch.tensor(left)[:, None])
        faults += found
        if (verdict := guards.judge(self.guard, found)) == "skip":
            return verdict
        left = [keep and n not in aside(found) for n, keep in enumerate(left)]
        rewards = torch.tensor([row["reward"] for row in told])[left]
        loss = -(rewards * logp[left].squeeze(1)).sum()
        loss = loss * value if where == "loss" else loss
        faults += in_update("loss", loss)
        loss.backward()
        if where == "gradient":
            self.model.weight.grad[0, 0] = value
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        faults += in_update("gradient_norm", norm)
        return guards.judge(self.guard, faults)

    def state(self):
        weights = {n: t.clone() for n, t in self.model.state_dict().items()}
        return weights, repr(self.optimizer.state_dict()), self.schedule.get_last_lr()


WHERE = ("reward", "logp", "loss", "gradient")


@pytest.mark.parametrize("policy", ["skip", "set aside"])
def test_a_hundred_faults_leave_the_weights_bit_for_bit_or_those_without_the_sample(policy):
    """R15.  Set aside, an update is the one that never had the response."""
    faults = [(where, value, n % 4) for n in range(9) for where in WHERE for value in BAD]
    assert len(faults) >= 100
    run = Regression(Guard(on_nonfinite=policy, limit=len(faults) + 1))
    for step, (where, value, response) in enumerate(faults):
        (weights, *rest), count = run.state(), run.count
        run.update(step, where, value, response)
        (after_weights, *after_rest) = run.state()
        assert all(torch.isfinite(one).all() for one in after_weights.values())
        same = (
            all(torch.equal(weights[n], after_weights[n]) for n in weights) and rest == after_rest
        )
        named = where in ("reward", "logp")
        assert same == (not (policy == "set aside" and named))
        assert run.count.in_a_row == step + 1
        assert run.count.skipped - count.skipped == int(same)
        assert run.count.set_aside - count.set_aside == int(not same)
        if named:
            last = run.kept[-1]
            assert (last["step"], last["what"], last["response"]) == (step, where, response)
            assert last["sample_id"] == f"s{response}"
    run.update(10**6)
    assert run.count.in_a_row == 0


def test_an_update_without_the_sample_is_the_one_that_never_had_it():
    one, other = (Regression(Guard(on_nonfinite="set aside")) for _ in range(2))
    one.update(0, "logp", math.nan, 2)
    other.update(0, "reward", math.nan, 2)
    never = Regression(Guard())
    never.gradient(
        torch.randn(4, 3, generator=torch.Generator().manual_seed(0)),
        [row | {"reward": float(n)} for n, row in enumerate(rows())],
        [True, True, False, True],
        [],
        ("", 0.0, 0),
    )
    never.optimizer.step()
    for name, wanted in never.model.state_dict().items():
        assert torch.equal(one.model.state_dict()[name], wanted)
        assert torch.equal(other.model.state_dict()[name], wanted)


def test_without_the_guard_one_fault_spoils_the_weights(monkeypatch):
    """What the guard is for; and the mutant that the tests above would catch."""
    monkeypatch.setattr(guards, "judge", lambda guard, found: "go on")
    run = Regression(Guard(limit=9))
    run.update(0, "gradient", math.nan)
    assert not torch.isfinite(run.model.weight).all()


def test_a_checkpoint_keeps_the_count(tmp_path):
    count = Count(skipped=1, set_aside=2, in_a_row=3)
    found = load(save(tmp_path, 1, tensors={}, state={"guard": vars(count)}, keep=1))
    assert Count(**found.state["guard"]) == count
