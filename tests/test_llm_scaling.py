"""The arithmetic of many accelerators, against what the store really takes and limits by hand."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from checks import refused

from windage.llm import rollouts, scaling

TOKENS, ROWS = 256, 16


def recorded(head: int) -> list[dict]:
    """Responses of which little compresses."""
    draw = np.random.default_rng(0)
    found = []
    for n in range(ROWS):
        row = {
            "group_id": f"{n // 4}:t{n // 4}",
            "sample_id": f"{n // 4}:{n % 4}",
            "prompt_ids": draw.integers(0, 150_000, 32).tolist(),
            "response_ids": draw.integers(0, 150_000, TOKENS),
            "mask": np.ones(TOKENS, dtype=bool),
            "behavior_logp": -draw.exponential(1, TOKENS).astype(np.float32),
            "versions": np.full(TOKENS, 3),
            "reward": 1.0,
            "outcome": 1.0,
            "finish_reason": "stop",
            "temperature": 1.0,
            "top_p": 1.0,
            "top_k": None,
            "seed": n,
            "elapsed": 1.0,
            "rejected": None,
        }
        if head:
            gaps = np.cumsum(draw.integers(1, 600, (TOKENS, head)), axis=1)
            row["head_ids"] = (draw.integers(0, 150_000, (TOKENS, 1)) + gaps) % 150_000
            row["head_behavior_logp"] = -draw.exponential(5, (TOKENS, head)).astype(np.float32)
        found.append(row)
    return found


@pytest.mark.parametrize("head", [0, 32, 128])
def test_the_store_takes_no_more_than_is_said_and_not_much_less(head, tmp_path):
    rollouts.write(tmp_path, 1, recorded(head), tokenizer="none")
    (file,) = tmp_path.glob("*.parquet")
    taken = file.stat().st_size / (ROWS * TOKENS)
    # Ids drawn at random need 17 bits of 32, so a third of a head token may go.
    assert 0.66 <= taken / scaling.rollout_bytes(head) <= 1.25


def test_shares_halve_with_twice_the_accelerators_and_the_rest_stays():
    one, two = (scaling.memory(scaling.SEVEN, n, tokens=4096) for n in (1, 2))
    assert two["shares"] == one["shares"] / 2
    assert one["shares"] == pytest.approx(16 * scaling.SEVEN.parameters / 2**30)
    for name in ("gathered", "kept", "logits"):
        assert one[name] == two[name]
    assert one["total"] == pytest.approx(sum(v for n, v in one.items() if n != "total"))


def test_layers_and_ends_are_the_model():
    for model in (scaling.SEVEN, scaling.THIRTY_TWO, scaling.SEVENTY):
        assert model.ends + model.layers * model.layer == pytest.approx(model.parameters)
        # Attention and a gated layer: 7 to 16 matrices of width times width.
        assert 7 <= model.layer / model.width**2 <= 20


def test_a_queue_is_what_is_begun_before_the_oldest_is_too_old():
    """Batch n is begun when batch n - lag is asked for, and is trained on at version n."""
    for lag in range(4):
        begun = {step: max(0, step - lag) for step in range(20)}
        open_ = [sum(begun[s] <= now <= s for s in begun) for now in range(10)]
        assert max(open_) * 8 == scaling.queue_groups(8, lag)
        assert max(step - at for step, at in begun.items()) == lag


@pytest.mark.parametrize(("sample", "train", "lag"), [(1, 2, 1), (2, 2, 1), (2.1, 2, 2), (9, 2, 5)])
def test_the_lag_that_hides_sampling(sample, train, lag):
    assert scaling.lag_needed(sample, train) == lag


def test_a_sync_sends_every_weight_once():
    assert scaling.sync_seconds(scaling.SEVENTY, 141.2e9) == pytest.approx(1.0)


def test_settings_out_of_range_are_refused():
    with refused("accelerators is 0"):
        scaling.memory(scaling.SEVEN, 0, tokens=1)
    with refused("bandwidth is 0"):
        scaling.sync_seconds(scaling.SEVEN, 0)
    with refused("lag is -1"):
        scaling.queue_groups(1, -1)
    with refused("head is -1"):
        scaling.rollout_bytes(-1)


def test_the_document_has_the_tables():
    text = (Path(__file__).parents[1] / "docs" / "scaling.md").read_text()
    for table in scaling.tables().split("\n\n"):
        assert table in text
