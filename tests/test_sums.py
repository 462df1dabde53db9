"""The task of the learning studies: its verifier against a plain reading, and its demonstrator."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from windage.estimators.errors import BadInput
from windage.toy.sums import Demonstrator, Sums, generators, whole

TASK = Sums()
WIDE = Sums(modulus=3, terms=6, hard=2)


def graded_by_hand(task: Sums, prompt: list[int], tokens: list[int]) -> tuple[int, bool, int]:
    """Length, validity and answer of one response, read from left to right."""
    said = tokens[: tokens.index(task.stop) + 1] if task.stop in tokens else tokens
    form = said[-3:]
    valid = (
        said[-1] == task.stop
        and said.count(task.marker) == 1
        and len(said) >= 3
        and form[0] == task.marker
        and form[1] < task.modulus
    )
    return len(said), valid, form[1] if valid else -1


@given(st.sampled_from([TASK, WIDE]), st.data())
def test_grade_reads_a_response_as_a_person_would(task: Sums, data: st.DataObject) -> None:
    digit = st.integers(0, task.modulus - 1)
    prompt = data.draw(st.lists(digit, min_size=task.terms, max_size=task.terms))
    token = st.one_of(st.just(task.stop), st.just(task.marker), digit, st.just(task.filler))
    tokens = data.draw(st.lists(token, min_size=task.horizon, max_size=task.horizon))
    found = task.grade(torch.tensor(prompt), torch.tensor(tokens))
    length, valid, answer = graded_by_hand(task, prompt, tokens)
    assert int(found.mask.sum()) == length
    assert bool(found.valid) == valid
    assert int(found.answer) == answer
    assert bool(found.correct) == (valid and answer == sum(prompt) % task.modulus)


def test_a_demonstrator_without_errors_is_always_right() -> None:
    among = generators([0, 1])
    prompts = TASK.prompts(whole(among, TASK.number, 200))
    tokens = Demonstrator(easy=0, hard=0, malformed=0).write(TASK, prompts, among)
    assert bool(TASK.grade(prompts, tokens).correct.all())
    assert bool((tokens[..., 6:] == TASK.filler).all())


def test_errors_happen_where_digits_are_hard_and_slips_can_cancel() -> None:
    among = generators([3])
    prompts = torch.tensor([[[0, 5, 0, 0], [0, 1, 0, 0]]]).repeat(1, 500, 1)
    tokens = Demonstrator(easy=0, hard=1, malformed=0, slip=1).write(TASK, prompts, among)
    correct = TASK.grade(prompts, tokens).correct.view(500, 2)
    assert not bool(correct[:, 0].any()) and bool(correct[:, 1].all())
    assert bool((tokens.view(500, 2, -1)[:, 0, 0] == 4).all())


def test_each_kind_of_malformed_response_is_invalid_in_its_own_way() -> None:
    among = generators([5])
    prompts = TASK.prompts(whole(among, TASK.number, 3000))
    tokens = Demonstrator(easy=0, hard=0, malformed=1).write(TASK, prompts, among)
    found = TASK.grade(prompts, tokens)
    assert not bool(found.valid.any())
    markers = ((tokens == TASK.marker) & found.mask).sum(-1)
    stops = (tokens == TASK.stop).any(-1)
    unmarked, broken, running = (markers == 0) & stops, ~stops & (markers < 2), markers == 2
    shares = torch.stack([k.double().mean() for k in (unmarked, broken, running)])
    assert float(shares.sum()) == 1
    assert bool(((shares - 1 / 3).abs() < 0.05).all())


def test_split_gives_disjoint_prompts_and_refuses_more_than_there_are() -> None:
    train, held = TASK.split([500, 100], generators([0, 1]))
    for seed in range(2):
        mine = {tuple(row) for row in train[seed].tolist()}
        others = {tuple(row) for row in held[seed].tolist()}
        assert len(mine) == 500 and len(others) == 100 and not mine & others
    with pytest.raises(BadInput, match="2402 prompts; allowed: at most 2401"):
        TASK.split([2402], generators([0]))


def test_a_seed_draws_the_same_beside_other_seeds() -> None:
    alone = TASK.split([10], generators([4]))[0]
    beside = TASK.split([10], generators([3, 4]))[0]
    assert torch.equal(alone[0], beside[1])
