"""The record: shapes and values checked once, rows in any order, absent rows, half precision."""

from dataclasses import replace

import pytest
import torch
from checks import assert_close, assert_invariant, refused
from hypothesis import given, settings
from hypothesis import strategies as st
from strategies import batches

from windage.estimators.batch import Batch, log_ratio, promote
from windage.estimators.catalogue import get

NAN, INF = float("nan"), float("inf")


def rows(**changes):
    fields = {
        "rewards": [1.0, 0.0, None, 0.5],
        "group_ids": ["q", "p", "q", "p"],
        "mask": [[1, 1], [1], [1, 0, 1], []],
        "logp": [[-0.1, -0.2], [-0.3], [-0.4, -0.5, -0.6], []],
        "behavior_logp": [[-0.2, -0.2], [-0.1], [-0.4, -0.5, -0.6], []],
        "versions": [[1, 2], [2], [1, 1, 1], []],
    }
    fields |= changes
    rewards, group_ids = fields.pop("rewards"), fields.pop("group_ids")
    return Batch.from_rows(rewards, group_ids, **fields)


def test_from_rows_places_pads_and_marks():
    batch = rows(group_size=3, current_version=2)
    assert batch.group_ids == ("q", "p")
    assert batch.rewards.tolist() == [[1.0, 0.0, 0.0], [0.0, 0.5, 0.0]]
    assert batch.present.tolist() == [[True, False, False], [True, True, False]]
    assert batch.row_index.tolist() == [[0, 2, -1], [1, 3, -1]]
    assert batch.lengths.tolist() == [[2, 0, 0], [1, 0, 0]]
    assert batch.logp[0, 0].tolist() == [-0.1, -0.2, 0.0]
    assert batch.versions.dtype == torch.int64
    assert batch.rewards.dtype == torch.float64
    assert batch.requested.tolist() == [3, 3]
    assert batch.missing.tolist() == [2, 1]
    assert batch.current_version == 2


def test_a_group_larger_than_asked_keeps_its_rows():
    assert rows(group_size=1).requested.tolist() == [2, 2]


@given(st.permutations(range(4)))
def test_any_order_of_rows_gives_the_same_advantages(order):
    plain = rows()
    columns = {
        name: [column[i] for i in order]
        for name, column in {
            "rewards": [1.0, 0.0, None, 0.5],
            "group_ids": ["q", "p", "q", "p"],
            "mask": [[1, 1], [1], [1, 0, 1], []],
            "logp": [[-0.1, -0.2], [-0.3], [-0.4, -0.5, -0.6], []],
            "behavior_logp": [[-0.2, -0.2], [-0.1], [-0.4, -0.5, -0.6], []],
            "versions": [[1, 2], [2], [1, 1, 1], []],
        }.items()
    }
    moved = rows(**columns)
    estimator = get("token_is")
    expected = plain.to_rows(estimator(plain).own)
    found = moved.to_rows(estimator(moved).own)
    assert_close(found, expected[list(order)])


def test_to_rows_of_a_selection_keeps_the_original_order():
    batch = rows()
    numbers = torch.arange(4).view(2, 2)
    assert batch.to_rows(numbers).tolist() == [0, 2, 1, 3]
    part = batch.select([1])
    assert part.to_rows(numbers[[1]]).tolist() == [2, 3]
    with refused("from_rows"):
        replace(batch, row_index=None).to_rows(numbers)


@settings(max_examples=25)
@given(batches(heads=2, lead=(2,)), st.data())
def test_select_cuts_every_field(batch, data):
    count = batch.rewards.shape[-2]
    batch = replace(batch, requested=torch.arange(count) + 5, group_ids=tuple("abc"[:count]))
    chosen = data.draw(st.lists(st.integers(0, count - 1), min_size=1, max_size=3))
    part = batch.select(chosen)
    assert part.group_ids == tuple("abc"[i] for i in chosen)
    assert part.requested.tolist() == [5 + i for i in chosen]
    for name in ("rewards", "present", "elapsed", "mask", "logp", "values", "versions"):
        depth = 2 if name in ("rewards", "present", "elapsed") else 3
        whole = getattr(batch, name)
        expected = torch.stack([whole.select(-depth, i) for i in chosen], -depth)
        assert torch.equal(getattr(part, name), expected)
    assert part.head_logp.shape[-4] == len(chosen)
    part.validate()
    assert batch.select(slice(0, 1)).rewards.shape[-2] == 1


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"rewards": [1.0, NAN, 0.0, 0.5]}, ("rewards", "row 1", "nan")),
        ({"rewards": [1.0, -INF, 0.0, 0.5]}, ("rewards", "row 1", "-inf")),
        ({"logp": [[-0.1, NAN], [-0.3], [-0.4] * 3, []]}, ("logp", "row 0", "group q", "token 1")),
        ({"logp": [[-0.1, -INF], [-0.3], [-0.4] * 3, []]}, ("logp", "row 0", "-inf", "finite")),
        ({"behavior_logp": [[-0.1], [-0.3], [-0.4] * 3, []]}, ("row 0", "length 1", "mask 2")),
        ({"logp": [[-0.1, None], [-0.3], [-0.4] * 3, []]}, ("row 0", "None", "position 1")),
        ({"outcomes": [1.0, None, 0.0, 0.0]}, ("row 1", "outcomes", "None")),
        ({"group_ids": ["q", "p"]}, ("group_ids", "2 rows", "4")),
        ({"reward": [1.0] * 4}, ("'reward'", "outcomes")),
        ({"present": [True] * 4}, ("'present'",)),
    ],
)
def test_from_rows_refuses(changes, words):
    with refused(*words):
        rows(**changes)


def test_what_absent_rows_hold_does_not_matter():
    batch = rows(
        outcomes=[1.0, 0.0, None, 1.0],
        logp=[[-0.1, -0.2], [-0.3], [NAN, -INF, INF], []],
        elapsed=[1.0, 2.0, None, 3.0],
    )
    assert batch.outcomes.tolist() == [[1.0, 0.0], [0.0, 1.0]]
    found = get("token_is")(batch)
    assert found.own.isfinite().all() and found.weights.isfinite().all()
    assert found.own[0, 1].tolist() == [0.0, 0.0, 0.0]


def test_head_rows():
    heads = [[[-0.1, -INF], [-0.5, -1.0]], [[-0.2, -2.0]], [[-1.0, -1.0]] * 3, []]
    batch = rows(
        head_logp=heads,
        head_behavior_logp=heads,
        head_ids=[[[1, 2]] * 2, [[3, 4]], [[5, 6]] * 3, []],
    )
    assert batch.head_logp.shape == (2, 2, 3, 2)
    assert batch.head_ids[1, 0, 0].tolist() == [3, 4]
    assert batch.head_logp[0, 0, 0, 1] == -INF
    with refused("head_logp", "nan", "-inf"):
        rows(head_logp=[[[-0.1, NAN], [-0.5, -1.0]], *heads[1:]])


def test_no_rows_and_no_tokens():
    empty = Batch.from_rows([], [], mask=[], logp=[])
    assert empty.rewards.shape == (0, 1)
    hollow = Batch.from_rows([1.0, 0.0], "aa", mask=[[], []], logp=[[], []], behavior_logp=[[], []])
    for name in ("rloo", "grpo", "dapo", "gspo", "trajectory_is", "topr"):
        assert get(name)(hollow).own.shape == (1, 2, 0)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"behavior_logp": torch.zeros(2, 2, 2)}, ("behavior_logp", "(2, 2, 2)")),
        ({"logp": torch.zeros(2, 2, 3, 1)}, ("logp", "(2, 2, 3, 1)")),
        ({"rewards": torch.zeros(2, 3)}, ("rewards", "(2, 3)")),
        ({"present": torch.ones(2).bool()}, ("present",)),
        ({"truncated": torch.ones(2).bool()}, ("truncated",)),
        ({"versions": torch.ones(2, 2).long()}, ("versions",)),
        (
            {"head_logp": torch.zeros(2, 2, 3, 2), "head_ids": torch.zeros(2, 2, 3, 1).long()},
            ("head", "[1, 2]"),
        ),
        ({"requested": torch.tensor([2])}, ("requested", "1", "2")),
        ({"group_ids": ("a",)}, ("group_ids", "1", "2")),
        ({"values": torch.full((2, 2, 3), NAN)}, ("values", "nan", "group 0")),
        ({"elapsed": torch.tensor([[1.0, 1.0], [INF, 1.0]])}, ("elapsed", "inf", "group 1")),
    ],
)
def test_validate_refuses(changes, words):
    # Built past the shape checks of the test run, which users do not have.
    whole = Batch(
        rewards=torch.zeros(2, 2), mask=torch.ones(2, 2, 3).bool(), logp=torch.zeros(2, 2, 3)
    )
    broken = object.__new__(Batch)
    broken.__dict__.update({**whole.__dict__, **changes})
    with refused(*words):
        Batch.validate(broken)


def test_absent_rows_leave_the_mask():
    batch = Batch(
        rewards=torch.tensor([[NAN, 1.0, 0.0]]),
        mask=torch.ones(1, 3, 2).bool(),
        logp=torch.tensor([[[NAN, INF], [-1.0, -1.0], [-1.0, -2.0]]]),
        present=torch.tensor([[False, True, True]]),
    )
    assert batch.validate().lengths.tolist() == [[0, 2, 2]]
    for name in ("rloo", "dapo"):
        found = get(name)(replace(batch, behavior_logp=batch.logp))
        assert found.own.isfinite().all()
        assert found.own[0, 0].tolist() == [0.0, 0.0]
        assert found.terms.reasons[found.terms.reason[0, 0] - 1] == "absent"


def test_get_stands_in_and_refuses():
    batch = Batch(rewards=torch.zeros(1, 2), mask=torch.ones(1, 2, 1).bool())
    assert batch.get("present").all()
    assert batch.get("outcomes") is batch.rewards
    with refused("logp"):
        batch.get("logp")
    with refused("behavior_logp"):
        get("token_is")(batch)


def test_row_name_counts_from_the_last_axes():
    batch = Batch(rewards=torch.zeros(3, 1, 2), mask=torch.ones(3, 1, 2, 4).bool())
    assert batch.row_name((2, 0, 1)) == "group 0, response 1"
    assert batch.row_name((2, 0, 1, 3)) == "group 0, response 1, token 3"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_promoted_before_the_subtraction(dtype):
    low = torch.tensor([-8.0, -1.0], dtype=dtype)
    high = torch.tensor([-8.0 + 1 / 16, -1.0 - 1 / 128], dtype=dtype)
    found = log_ratio(low, high, torch.tensor([True, True]))
    assert found.dtype == torch.float32
    assert torch.equal(found, low.float() - high.float())


def test_wider_types_stay():
    for dtype in (torch.float32, torch.float64):
        assert promote(torch.zeros(1, dtype=dtype)).dtype == dtype
    assert (
        log_ratio(torch.zeros(1).double(), torch.zeros(1).bfloat16(), torch.tensor([True])).dtype
        == torch.float64
    )


@given(st.sampled_from([NAN, INF, -INF, 1e308]), st.sampled_from([NAN, INF, -INF, -1e308]))
def test_what_is_masked_reaches_neither_value_nor_gradient(left, right):
    numerator = torch.tensor([-1.0, left], dtype=torch.float64, requires_grad=True)
    found = log_ratio(numerator, torch.tensor([-2.0, right]).double(), torch.tensor([True, False]))
    found.sum().backward()
    assert found.tolist() == [1.0, 0.0]
    assert numerator.grad.tolist() == [1.0, 0.0]


@settings(max_examples=25)
@given(batches(lead=(2,)))
def test_leading_axes_are_replicates(batch):
    estimator = get("grpo")
    each = [
        replace(
            batch,
            **{
                name: value[i]
                for name, value in vars(batch).items()
                if isinstance(value, torch.Tensor)
            },
        )
        for i in range(2)
    ]
    assert_close(estimator(batch).own, torch.stack([estimator(one).own for one in each]))


def test_the_width_of_the_padding_does_not_matter():
    def widen(by):
        batch = rows(group_size=2)
        pad = {
            name: torch.nn.functional.pad(getattr(batch, name), (0, by))
            for name in ("mask", "logp", "behavior_logp", "versions")
        }
        return replace(batch, **pad)

    for name in ("grpo", "gspo", "dapo", "prefix_is", "suffix_is"):
        assert_invariant(lambda by, n=name: get(n)(widen(by)).own[..., :3], 0, 1, 5)


# Components of a reward


def test_components_are_placed_like_rewards_and_may_miss_where_a_reward_does():
    parts = [[1.0, 0.5], [0.0, 0.25], None, [0.5, 0.75]]
    batch = rows(group_size=3, components=parts)
    assert batch.components.shape == (2, 3, 2)
    assert batch.components[:, :2].tolist() == [[parts[0], [0.0, 0.0]], [parts[1], parts[3]]]
    assert not batch.components[:, 2].any()
    assert batch.select([1]).components.tolist() == batch.components[[1]].tolist()


@pytest.mark.parametrize(
    ("parts", "words"),
    [
        ([[1.0], [0.0, 0.2], None, [0.5, 0.1]], ("row 0", "of length 1", "2 numbers")),
        ([[1.0, 0.0], None, None, [0.5, 0.1]], ("row 1", "components is None")),
        ([[1.0, 0.0], [0.0, None], None, [0.5, 0.1]], ("row 1", "components is None")),
        (
            [[1.0, 0.0], [0.0, NAN], None, [0.5, 0.1]],
            ("components is nan", "row 1", "group p", "component 1"),
        ),
    ],
)
def test_components_that_are_not_numbers_are_named(parts, words):
    with refused(*words):
        rows(components=parts)
