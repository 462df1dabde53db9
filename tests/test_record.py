"""The recorder: rows of another engine's step in our store, written beside the training."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from adapter_cases import GROUPS, PROMPT, case
from checks import refused

from windage.llm.record import record_verl
from windage.llm.record import trl as record_trl
from windage.llm.record import verl as record
from windage.llm.record.writer import Recorder, Rectangle, here, turns, vocabulary
from windage.llm.rollouts import read, steps, write


class Words:
    """A tokenizer's vocabulary."""

    def __len__(self) -> int:
        return 2

    def convert_ids_to_tokens(self, ids: Any) -> list[str]:
        return ["ab"[n] for n in ids]


TOKENIZER = vocabulary(Words())


def rectangle(step: int = 0, rows: int = 3, width: int = 4) -> Rectangle:
    numbers = torch.arange(rows * width).view(rows, width)
    return Rectangle(
        prompts=[[1, 2]] * rows,
        lengths=[b % width + 1 for b in range(rows)],
        tokens={
            "response_ids": numbers,
            "mask": numbers % 3 > 0,
            "behavior_logp": -numbers / 100,
            "versions": torch.full_like(numbers, step),
        },
        responses={
            "group_id": ["g"] * rows,
            "sample_id": [f"{step}/{b}" for b in range(rows)],
            "reward": [0.5] * rows,
            "outcome": [1.0] * rows,
            "finish_reason": ["stop"] * rows,
        },
    )


def test_rows_are_written_without_their_padding(tmp_path):
    recorder = Recorder(tmp_path, tokenizer=TOKENIZER)
    assert [recorder.put(partial(rectangle, n)) for n in range(3)] == [0, 1, 2]
    recorder.close()
    found = list(read(tmp_path, tokenizer=TOKENIZER))
    assert [len(row["response_ids"]) for row in found] == [1, 2, 3] * 3
    assert found[2]["response_ids"].tolist() == [8, 9, 10]
    again = Recorder(tmp_path, tokenizer=TOKENIZER)
    assert again.put(partial(rectangle, 7)) == 3
    again.close()
    assert steps(tmp_path) == [0, 1, 2, 3]


def test_what_could_not_be_written_is_raised_at_the_next_step(tmp_path):
    recorder = Recorder(tmp_path, tokenizer=TOKENIZER)
    recorder.put(rectangle)
    recorder.put(rectangle)
    recorder.put(lambda: replace(rectangle(), constants={"unheard": 1}))
    with refused("the recorder", "unheard"):
        recorder.close()


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("raw_logp", 0.5, "allowed: finite numbers from -inf to 0"),
        ("logp", float("nan"), "allowed: finite numbers"),
        ("probability_square", 1.5, "from 0 to 1"),
        ("turns", -1, "from 0"),
    ],
)
def test_what_a_new_column_may_not_hold_is_refused(name, value, said, tmp_path):
    (row,) = rectangle(rows=1).rows()
    with refused(name, said.removeprefix("allowed: finite numbers from -inf ")):
        write(tmp_path, 0, [{**row, name: [value]}], tokenizer=TOKENIZER)


def test_only_a_rejected_response_may_lack_what_the_trainer_says(tmp_path):
    (row,) = rectangle(rows=1).rows()
    whole = {**row, "sample_id": "whole", "logp": [-1.0]}
    out = {**row, "sample_id": "out", "logp": None, "rejected": "no token export"}
    write(tmp_path, 0, [whole, out], tokenizer=TOKENIZER)
    assert [len(row["logp"]) for row in read(tmp_path, tokenizer=TOKENIZER)] == [1, 0]
    with refused("row 1", "logp is null"):
        write(tmp_path, 1, [whole, {**out, "rejected": None}], tokenizer=TOKENIZER)
    with refused("row 1", "versions is null"):
        write(tmp_path, 1, [whole, {**out, "versions": None}], tokenizer=TOKENIZER)


def test_training_waits_for_nothing_but_the_copy(tmp_path):
    """The step of a run of 64 responses of 512 tokens: what the training thread spends on it."""
    recorder = Recorder(tmp_path, tokenizer=TOKENIZER)
    one = rectangle(rows=64, width=512)
    start = time.perf_counter()
    kept = {name: here(value) for name, value in one.tokens.items()}
    recorder.put(lambda: replace(one, tokens=kept))
    spent = time.perf_counter() - start
    recorder.close()
    assert len(list(read(tmp_path, tokenizer=TOKENIZER))) == 64
    assert spent < 0.5


def test_the_document_says_what_was_measured_and_that_is_below_the_floor():
    root = Path(__file__).parents[1]
    found = json.loads((root / "benchmarks/results/record.json").read_text())
    assert found["share_of_step"] <= found["share_with_writing"] < found["floor"] == 0.01
    text = " ".join((root / "docs/adapters.md").read_text().split())
    token = found["copied_seconds_a_token"] + found["written_seconds_a_token"]
    for words in (
        f"{found['tokens_a_step']:,} tokens, {found['step_seconds']:.1f} s)",
        f"spends {1e3 * found['training_thread_seconds']:.1f} ms",
        f"another thread {1e3 * found['writing_thread_seconds']:.1f} ms",
        f"{100 * found['share_of_step']:.3f} % and",
        f"below {0.01 / token:,.0f} trained tokens a second",
        f"by {100 * found['squares_over_plain']:.1f} %",
    ):
        assert words in text, words


def test_copies_cannot_be_changed_by_training():
    value = torch.ones(2, dtype=torch.bfloat16)
    kept = here(value)
    value.zero_()
    assert kept.tolist() == [1, 1] and kept.dtype == torch.float32


# verl, by stand-ins of what its trainers hold.


def columns(c: Any) -> dict[str, torch.Tensor]:
    scores = torch.zeros_like(c.behavior_logp)
    scores[torch.arange(len(GROUPS)), c.real.sum(1) - 1] = c.rewards
    return {
        "prompts": c.ids[:, :PROMPT],
        "responses": c.ids[:, PROMPT:],
        "attention_mask": torch.cat([torch.ones(len(GROUPS), PROMPT).long(), c.real.long()], 1),
        "response_mask": c.mask.long(),
        "rollout_log_probs": c.behavior_logp.clamp(max=0),
        "old_log_probs": c.proximal_logp.clamp(max=0),
        "token_level_scores": scores,
        "token_level_rewards": scores / 2,
    }


def assert_recorded(folder: Any, c: Any) -> None:
    found = list(read(folder, tokenizer=TOKENIZER))
    lengths = c.real.sum(1).tolist()
    assert [row["group_id"] for row in found] == list(GROUPS)
    for b, (row, n) in enumerate(zip(found, lengths, strict=True)):
        assert row["response_ids"].tolist() == c.ids[b, PROMPT : PROMPT + n].tolist()
        assert row["prompt_ids"].tolist() == c.ids[b, :PROMPT].tolist()
        assert row["mask"].tolist() == c.mask[b, :n].tolist()
        assert row["outcome"] == pytest.approx(float(c.rewards[b]))
        own = torch.tensor(row["behavior_logp"])
        assert torch.equal(own, c.behavior_logp[b, :n].clamp(max=0).float())
        assert torch.tensor(row["advantages"]).eq(0.25).all()
    assert found[3]["turns"].tolist() == [0, 0, 0, 1, 1, 1]


def test_verl_batches_are_recorded_once_their_advantages_are_known(tmp_path, monkeypatch):
    c = case()

    def compute_advantage(data: Any, adv_estimator: str) -> Any:
        data.batch["advantages"] = torch.full_like(c.behavior_logp, 0.25)
        return data

    module = SimpleNamespace(compute_advantage=compute_advantage)
    monkeypatch.setattr(record, "import_module", lambda name: module)
    recorder = record_verl(tmp_path, tokenizer=Words())
    data = SimpleNamespace(batch=columns(c), non_tensor_batch={"uid": list(GROUPS)})
    assert module.compute_advantage(data, "grpo") is data
    recorder.close()
    assert_recorded(tmp_path, c)


def test_verl_v1_trainers_are_asked_for_the_tokens(tmp_path, monkeypatch):
    c = case()
    told = columns(c)
    lengths = c.real.sum(1).tolist()

    def nested(value: torch.Tensor) -> torch.Tensor:
        rows = [row[:n] for row, n in zip(value, lengths, strict=True)]
        return torch.nested.as_nested_tensor(rows, layout=torch.jagged)

    class Names(list):
        def tolist(self) -> list[str]:
            return list(self)

    def kv_batch_get(keys: Any, partition_id: str, select_fields: list[str]) -> dict[str, Any]:
        found: dict[str, Any] = {name: nested(told[name]) for name in select_fields if name in told}
        found["rm_scores"] = nested(told["token_level_scores"])
        found["advantages"] = nested(torch.full_like(c.behavior_logp, 0.25))
        whole = list(told["prompts"])
        found["prompts"] = torch.nested.as_nested_tensor(whole, layout=torch.jagged)
        found["uid"] = Names(GROUPS)
        return found

    class Trainer:
        def _compute_advantage(self, batch: Any, metrics: Any) -> Any:
            return batch

    module = SimpleNamespace(tq=SimpleNamespace(kv_batch_get=kv_batch_get))
    monkeypatch.setattr(record, "import_module", lambda name: module)
    recorder = record_verl(tmp_path, tokenizer=Words(), trainer=Trainer)
    batch = SimpleNamespace(keys=[], partition_id="train")
    assert Trainer()._compute_advantage(batch, {}) is batch
    recorder.close()
    assert_recorded(tmp_path, c)


class Rollout(SimpleNamespace):
    """The configuration of verl's engine."""

    def get(self, name: str, otherwise: Any = None) -> Any:
        return getattr(self, name, otherwise)


ENGINE = {"temperature": 0.7, "top_p": 0.9, "top_k": -1, "response_length": 6}


def test_verl_settings_ends_and_masked_responses_are_recorded(tmp_path, monkeypatch):
    c = case()
    module = SimpleNamespace(compute_advantage=lambda data: data)
    monkeypatch.setattr(record, "import_module", lambda name: module)
    tokenizer = Words()
    told = columns(c) | {"advantages": torch.zeros_like(c.behavior_logp)}
    lengths = c.real.sum(1).tolist()
    last = [int(told["responses"][b, n - 1]) for b, n in enumerate(lengths)]
    tokenizer.eos_token_id = last[0]
    told["response_mask"][1] = 0
    recorder = record_verl(tmp_path, tokenizer=tokenizer, rollout=Rollout(**ENGINE))
    module.compute_advantage(SimpleNamespace(batch=told, non_tensor_batch={"uid": list(GROUPS)}))
    recorder.close()
    found = list(read(tmp_path, tokenizer=TOKENIZER))
    drew = {(round(r["temperature"], 6), round(r["top_p"], 6), r["top_k"]) for r in found}
    assert drew == {(0.7, 0.9, None)}
    assert [row["rejected"] for row in found] == [
        "masked" if b == 1 else None for b in range(len(GROUPS))
    ]
    for b, row in enumerate(found):
        ended = last[b] == last[0] or lengths[b] < 6
        assert row["finish_reason"] == ("stop" if ended else "length")
    assert {row["finish_reason"] for row in found} == {"stop", "length"}


def test_log_probabilities_that_drew_nothing_are_refused():
    raw = {"logprobs_mode": "raw_logprobs"}
    with refused("logprobs_mode", "processed_logprobs"):
        record.drawn(Rollout(**ENGINE, **raw), Words())
    same = Rollout(temperature=1.0, top_p=1, top_k=-1, **raw)
    assert record.drawn(same, Words()).constants == {"temperature": 1, "top_p": 1, "top_k": None}
    assert record.drawn(None, Words()).reason([3, 4], None) == record.UNTOLD


def test_a_response_that_trl_leaves_out_keeps_its_tokens():
    held = {
        "completion_ids": torch.tensor([[5, 6, 0, 0], [5, 0, 7, 8], [5, 6, 1, 0]]),
        "completion_mask": torch.tensor([[1, 1, 0, 0], [0, 0, 0, 0], [1, 1, 1, 0]]),
    }
    assert record_trl._lengths(held, pad=0) == [2, 4, 3]


def test_turns_count_the_times_the_policy_goes_on():
    mask = torch.tensor([[True, True, False, True, False, False, True]])
    assert turns(mask).tolist() == [[0, 0, 0, 1, 1, 1, 2]]
