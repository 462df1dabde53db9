"""The loop closes: a listed transformer's updates, through the store, are what the engines say."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace

import pytest
import torch
from checks import assert_apart, assert_close, refused
from problem_strategies import entry, typical
from tiny_model import forward_of, gradient_of, logits_of, problem_of, row_of, tiny
from torch import Tensor

from windage.estimators.catalogue import CATALOGUE, get
from windage.estimators.centering import top_k
from windage.estimators.estimator import Estimator, coefficients
from windage.estimators.member import use
from windage.llm.models import Policy
from windage.llm.rollouts import read, to_batch, write
from windage.llm.update import Forward, accumulate, looks_ahead, micro_batches
from windage.toy.exact.plan import exact, undefined
from windage.toy.exact.tuples import accepted
from windage.toy.problems import Problem, Tree

# Normalization and rotary embedding of transformers are in single precision whatever the weights.
RELATIVE = 1e-10
NAMES = [name for name, e in CATALOGUE.items() if not undefined(e, typical(), 2)]


def claimed(name: str, what: str) -> bool:
    return any(c.property == what and c.holds for c in CATALOGUE[name].claims)


@dataclass
class Loop:
    """A model, its sampler, and every group of two responses as the store gives it back."""

    model: Policy
    problem: Problem
    rows: list[dict]
    chances: list[float]

    def mean(self, estimator: Estimator) -> Tensor:
        """Mean of minus the gradient that training accumulates, over all groups."""
        if estimator.scope == "batch":
            return self.one_by_one(estimator)
        batch = to_batch(self.rows, group_size=2, current_version=0)
        count = len(self.chances)
        forward = forward_of(self.model, batch, self.rows)
        chances = torch.tensor(self.chances, dtype=torch.float64)
        weight = count * chances.repeat_interleave(2).unsqueeze(1)

        def weighted(which: Tensor) -> Forward:
            """The pass, whose gradient counts a group as often as the sampler draws it."""
            found = forward(which)
            if found.logp.requires_grad:
                found.logp.register_hook(lambda g: g * weight[which])
                found.head_logp.register_hook(lambda g: g * weight[which].unsqueeze(-1))
            return found

        accumulate(estimator, batch, weighted, micro_batches(batch, 9))
        return -gradient_of(self.model)

    def one_by_one(self, estimator: Estimator) -> Tensor:
        """The same where a group is a batch of its own, drawn again if it is not used."""
        total, used = torch.zeros(()), 0.0
        for m, chance in enumerate(self.chances):
            rows = self.rows[2 * m : 2 * m + 2]
            batch = to_batch(rows, group_size=2, current_version=0)
            keep = accepted(estimator, batch)
            if keep is None or keep:
                forward = forward_of(self.model, batch, rows)
                accumulate(estimator, batch, forward, micro_batches(batch, 1 + m % 2))
                total = total - chance * gradient_of(self.model)
                used += chance
        return total / used

    def by_parameters(self, by_logits: Tensor) -> Tensor:
        """A gradient by the logits of all prefixes, by the model's parameters."""
        (logits_of(self.model, self.problem.tree) * by_logits).sum().backward()
        return gradient_of(self.model)

    def objective(self) -> Tensor:
        """The gradient of the expected reward, by differentiating the sum over all responses."""
        numbers, ids = self.problem.tree.paths
        logp = logits_of(self.model, self.problem.tree).log_softmax(-1)
        here = logp[numbers.clamp(min=0), ids.clamp(min=0)]
        chance = torch.where(numbers >= 0, here, 0.0).sum(-1).exp()
        (chance @ self.problem.rewards[0]).backward()
        return gradient_of(self.model)


def loop(folder, *, vocab: int = 3, horizon: int = 2, on_policy: bool = False) -> Loop:
    tree = Tree(vocab, vocab - 1, horizon)
    model, sampler, *others = (tiny(vocab, 2 + horizon, seed=n) for n in range(4))
    rewards = (torch.arange(tree.leaves) % 3 != 1).double()
    problem = problem_of(model, tree, rewards, model if on_policy else sampler, others)
    numbers, ids = tree.paths
    here = problem.behavior_logp[0][numbers.clamp(min=0), ids.clamp(min=0)]
    chance = torch.where(numbers >= 0, here, 0.0).sum(-1).exp()
    pairs = list(itertools.combinations_with_replacement(range(tree.leaves), 2))
    given = [
        row_of(problem, leaf, f"{m} {place}", f"group {m}")
        for m, pair in enumerate(pairs)
        for place, leaf in enumerate(pair)
    ]
    write(folder, 0, given, tokenizer="tiny", precision="float64")
    kept = list(read(folder, tokenizer="tiny"))
    chances = [(1 + (a != b)) * float(chance[a] * chance[b]) for a, b in pairs]
    assert sum(chances) == pytest.approx(1)
    return Loop(model, problem, kept, chances)


@pytest.fixture(scope="module")
def loops(tmp_path_factory):
    """Loops by vocabulary and by whether the sampler is the model, made when first asked for."""
    found = {}

    def get(vocab, same):
        if (vocab, same) not in found:
            folder = tmp_path_factory.mktemp("store")
            found[vocab, same] = loop(folder, vocab=vocab, on_policy=same)
        return found[vocab, same]

    return get


def check(name: str, found: Loop) -> None:
    """The mean through the real path is the engine's, and the gradient of J where it is claimed."""
    estimator = entry(name, found.problem)
    mean = found.mean(estimator)
    by_logits = exact(estimator, found.problem, 2).mean[0]
    assert_close(mean, found.by_parameters(by_logits), relative=RELATIVE)
    same = torch.equal(found.problem.behavior_logp, found.problem.logp)
    if claimed(name, "unbiased_off_policy") or (same and claimed(name, "unbiased_on_policy")):
        assert_close(mean, found.objective(), relative=RELATIVE)


def size(name: str) -> int:
    """Fewer tokens where every group is a batch of its own."""
    return 2 if CATALOGUE[name].scope == "batch" else 3


@pytest.mark.parametrize("name", NAMES)
def test_the_loop_closes_with_another_sampler(name, loops):
    check(name, loops(size(name), False))


ON_POLICY = [name for name in NAMES if claimed(name, "unbiased_on_policy")]
FEW = [name for name in ON_POLICY if CATALOGUE[name].tier == 1]
REST = [pytest.param(name, marks=pytest.mark.long) for name in ON_POLICY if name not in FEW]


@pytest.mark.parametrize("name", [*FEW, *REST])
def test_the_loop_closes_on_policy(name, loops):
    check(name, loops(size(name), True))


LONG = {(3, 4): NAMES, (5, 2): ["rloo", "token_is", "trajectory_is", "gspo", "centered_tis"]}


@pytest.mark.long
@pytest.mark.parametrize(("vocab", "horizon"), LONG)
@pytest.mark.parametrize("same", [False, True])
def test_the_loop_closes_on_larger_trees(vocab, horizon, same, tmp_path):
    found = loop(tmp_path, vocab=vocab, horizon=horizon, on_policy=same)
    for name in LONG[vocab, horizon]:
        if CATALOGUE[name].scope != "batch":
            check(name, found)


@pytest.mark.long
@pytest.mark.parametrize("name", [name for name in NAMES if size(name) == 2])
def test_the_loop_closes_batch_by_batch(name, loops):
    check(name, loops(3, False))


def test_all_groups_in_one_batch_have_the_mean_of_each_alone(loops):
    found = loops(3, False)
    estimator = entry("starting_point", found.problem)
    assert_close(found.mean(estimator), found.one_by_one(estimator), relative=RELATIVE)


def test_a_head_of_few_tokens_has_the_mean_of_its_engine(loops):
    found = loops(3, False)
    short = [
        row | {n: row[n][:, :1] for n in ("head_ids", "head_behavior_logp")} for row in found.rows
    ]
    estimator = replace(get("centered_tis"), centering=use(top_k))
    expected = replace(get("centered_tis"), centering=use(top_k, k=1))
    mean = replace_rows(found, short).mean(estimator)
    assert_close(mean, found.mean(expected))
    assert_apart(mean, found.mean(get("centered_tis")))


def replace_rows(found: Loop, rows: list[dict]) -> Loop:
    return Loop(found.model, found.problem, rows, found.chances)


# Micro-batches.

DIVIDED = ("rloo", "dapo", "gspo", "centered_tis", "self_normalized_batch", "clip_cov", "ppo")


def some(found: Loop, count: int, size_: int) -> list[dict]:
    """Rows of several lengths in groups of one size."""
    picked = found.rows[3 : 3 + count]
    return [row | {"group_id": f"{n // size_}"} for n, row in enumerate(picked)]


def gradient(name: str, rows: list[dict], parts, model: Policy, dtype: torch.dtype) -> Tensor:
    """What a division of a batch accumulates."""
    batch = to_batch(rows, group_size=4, dtype=dtype)
    values = torch.where(batch.mask, 0.25, 0.0).to(dtype) if name == "ppo" else None
    batch = replace(batch, values=values)
    accumulate(get(name), batch, forward_of(model, batch, rows), parts(batch))
    return gradient_of(model)


@pytest.mark.parametrize(
    ("name", "dtype", "relative"),
    [
        *((name, torch.float64, 1e-12) for name in DIVIDED),
        *((name, torch.float32, 1e-6) for name in ("dapo", "centered_tis")),
    ],
)
def test_the_size_of_micro_batches_does_not_matter(name, dtype, relative, loops):
    rows = some(loops(3, False), 16, 4)
    model = tiny(3, 4, seed=0).to(dtype)
    whole = gradient(name, rows, lambda b: micro_batches(b, 99), model, dtype)
    assert whole.abs().max() > 0
    for size_ in (1, 7):
        found = gradient(name, rows, lambda b, n=size_: micro_batches(b, n), model, dtype)
        assert_close(found, whole, relative=relative)
    shuffled = torch.randperm(16, generator=torch.Generator().manual_seed(0)).split(5)
    assert_close(gradient(name, rows, lambda b: shuffled, model, dtype), whole, relative=relative)


def test_an_estimate_made_part_by_part_would_be_noticed(loops):
    """A token mean over each part alone is another update."""
    rows = some(loops(3, False), 16, 4)
    model, dtype = tiny(3, 4, seed=0), torch.float64
    whole = gradient("dapo", rows, lambda b: micro_batches(b, 99), model, dtype)
    halves = [
        gradient("dapo", half, lambda b: micro_batches(b, 99), model, dtype) / 2
        for half in (rows[:8], rows[8:])
    ]
    assert_apart(sum(halves), whole)


@pytest.mark.parametrize("name", DIVIDED)
def test_one_pass_a_response_unless_ratios_are_coupled(name, loops):
    rows = some(loops(3, False), 8, 4)
    batch = to_batch(rows, group_size=4)
    batch = replace(batch, values=torch.zeros_like(batch.behavior_logp))
    model = tiny(3, 4, seed=0)
    seen: list[int] = []
    inner = forward_of(model, batch, rows)

    def counted(which: Tensor) -> Forward:
        seen.extend(which.tolist())
        return inner(which)

    update = accumulate(get(name), batch, counted, micro_batches(batch, 3))
    coupled = name in ("self_normalized_batch", "clip_cov")
    assert looks_ahead(get(name)) == coupled
    assert sorted(seen) == sorted([*range(8)] * (2 if coupled else 1))
    assert update.own.shape == update.logp.shape == batch.mask.shape


def test_coefficients_are_those_of_the_whole_batch_and_rejections_are_counted(loops):
    rows = [
        row | {"versions": row["versions"] + n % 2}
        for n, row in enumerate(some(loops(3, False), 16, 2))
    ]
    batch = to_batch(rows, group_size=2, current_version=9)
    model = tiny(3, 4, seed=0)
    forward = forward_of(model, batch, rows)
    estimator = get("starting_point", length=2.0)
    update = accumulate(estimator, batch, forward, micro_batches(batch, 5))
    with torch.no_grad():
        everything = forward(torch.arange(16))
    shape = batch.mask.shape
    filled = replace(
        batch,
        logp=everything.logp.view(shape),
        head_logp=everything.head_logp.view(*shape, 3),
    )
    expected = coefficients(estimator, filled)
    assert_close(update.own, expected.own)
    assert update.terms.counts["staleness_cap"] == 8
    assert {k: int(v) for k, v in update.terms.counts.items()} == {
        k: int(v) for k, v in expected.terms.counts.items()
    }


def test_parts_that_leave_out_or_repeat_a_response_are_refused(loops):
    rows = loops(3, False).rows[:4]
    batch = to_batch(rows, group_size=2)
    forward = forward_of(tiny(3, 4, seed=0), batch, rows)
    for parts in ([[0, 1], [3]], [[0, 1], [1, 2, 3]], []):
        with refused("parts; allowed: 1"):
            accumulate(get("rloo"), batch, forward, [torch.tensor(p) for p in parts])


def test_what_is_not_finite_is_named_before_anything_is_accumulated(loops):
    rows = loops(3, False).rows[:4]
    batch = to_batch(rows, group_size=2)
    model = tiny(3, 4, seed=0)
    inner = forward_of(model, batch, rows)

    def spoiled(which: Tensor) -> Forward:
        found = inner(which)
        return replace(found, logp=torch.where(which.unsqueeze(1) == 0, torch.nan, found.logp))

    with refused("logp is nan", "row 0", "token 0"):
        accumulate(get("rloo"), batch, spoiled, micro_batches(batch, 4))
    assert gradient_of(model).abs().max() == 0


def test_what_an_estimator_needs_is_asked_for_first(loops):
    rows = [
        {k: v for k, v in row.items() if not k.startswith("head")} for row in loops(3, False).rows
    ]
    batch = to_batch(rows[:4], group_size=2)
    with refused("head", "needs"):
        accumulate(get("centered"), batch, lambda which: None, micro_batches(batch, 4))
    with refused("values", "needs"):
        accumulate(get("ppo"), batch, lambda which: None, micro_batches(batch, 4))


def test_an_empty_batch_accumulates_nothing(loops):
    row = loops(3, False).rows[0]
    nothing = {n: row[n][:0] for n in row if hasattr(row[n], "shape") and n != "prompt_ids"}
    batch = to_batch([row | nothing, row | nothing], group_size=2)
    assert micro_batches(batch, 4) == []
    for name in ("rloo", "self_normalized"):
        assert accumulate(get(name), batch, lambda which: None, []).own.numel() == 0
