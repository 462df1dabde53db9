"""Corrections that look further: other fields, a map before the reach, other responses."""

from dataclasses import replace

import pytest
import torch
from checks import assert_close
from hypothesis import given, settings
from strategies import batches

from windage.estimators.advantage import constant, group_mean
from windage.estimators.aggregation import sequence_mean, token_mean, token_sum
from windage.estimators.batch import Batch
from windage.estimators.catalogue import get
from windage.estimators.correction import (
    Correction,
    geometric,
    ratio,
    suffix,
    token,
    trajectory,
    truncate,
)
from windage.estimators.estimator import (
    Estimator,
    batch_terms,
    center,
    token_coefficients,
)
from windage.estimators.member import declare, use
from windage.toy.behavior import with_behavior
from windage.toy.exact.plan import exact, plan
from windage.toy.exact.prefix_tree import tree_weights
from windage.toy.exact.walk import Walk
from windage.toy.problems import token_tree, trajectories

NAN = float("nan")


@declare("token", "logp", "behavior_logp", "mask", reads="sign")
def gap(effective, advantages, logp, behavior_logp, mask, *, limit=0.5):
    """1 where the two probabilities are near, and the advantage is above 0."""
    near = (logp.exp() - behavior_logp.exp()).abs() <= limit
    return (near & mask & (advantages > 0)).to(effective.dtype)


@declare("token", reads="sign")
def halved(log_ratio, advantages, *, share=0.5):
    """Half of the log-ratio where the advantage is above 0."""
    return torch.where(advantages > 0, share * log_ratio, log_ratio)


@declare("batch")
def over_all(log_ratio, mask, *, floor=0.0):
    """The mean log-ratio over the tokens of the whole batch."""
    total = log_ratio.sum((-3, -2, -1), keepdim=True)
    return (total / mask.sum((-3, -2, -1), keepdim=True).clamp(min=1)).expand_as(log_ratio) + floor


@declare("batch", "advantages", "logp")
def least_likely(advantages, logp, *, coefficient=1.0):
    """The advantage, on the token of the batch with the least log-probability."""
    least = logp.amin((-3, -2, -1), keepdim=True)
    return torch.where(logp == least, coefficient * advantages, 0.0)


def estimator(*corrections, **others):
    return Estimator(
        name="local",
        advantage=use(group_mean),
        corrections=corrections,
        aggregation=use(token_mean),
        **others,
    )


FIELDS = estimator(Correction(reach=use(token), map=use(gap)))
BEFORE = estimator(Correction(before=use(halved), reach=use(trajectory), map=use(ratio)))
WIDE = estimator(Correction(reach=use(over_all), map=use(ratio)))
FINED = estimator(Correction(), penalties=(use(least_likely),))


def test_what_an_estimator_says_of_such_a_correction():
    assert FIELDS.needs == ("rewards", "present", "logp", "behavior_logp", "mask", "lengths")
    assert (FIELDS.scope, BEFORE.scope, WIDE.scope, FINED.scope) == ("batch",) * 4
    assert [c.scope for e in (FIELDS, BEFORE, WIDE) for c in e.corrections] == [
        "token",
        "response",
        "batch",
    ]
    assert [c.reads for e in (FIELDS, BEFORE, WIDE) for c in e.corrections] == [
        "sign",
        "sign",
        "nothing",
    ]
    assert BEFORE.corrections[0].describe() == "halved(share=0.5) trajectory ratio"
    assert WIDE.corrections[0].describe() == "over_all(floor=0) ratio"
    assert [m.name for s, m in BEFORE.members if s == "correction"] == ["ratio", "halved"]
    assert [m.name for s, m in WIDE.members if s == "correction"] == ["ratio", "over_all"]
    assert BEFORE.change(share=0.25).corrections[0].before.settings == (("share", 0.25),)
    assert WIDE.change(floor=1.0).corrections[0].reach.settings == (("floor", 1.0),)
    with pytest.raises(TypeError, match="no setting 'shore'; it has: share"):
        BEFORE.change(shore=1.0)


@settings(max_examples=25)
@given(batches())
def test_a_map_gets_the_fields_it_names(batch):
    found = FIELDS(batch)
    p, q = batch.logp.exp(), batch.behavior_logp.exp()
    kept = ((p - q).abs() <= 0.5) & (found.terms.advantages > 0) & batch.mask
    assert_close(found.weights, kept.double())
    dirty = replace(
        batch,
        logp=torch.where(batch.mask, batch.logp, NAN),
        behavior_logp=torch.where(batch.mask, batch.behavior_logp, NAN),
    )
    assert_close(FIELDS(dirty).own, found.own)


@settings(max_examples=25)
@given(batches())
def test_a_map_before_the_reach_changes_each_token_first(batch):
    found = BEFORE(batch)
    x = torch.where(batch.mask, batch.logp - batch.behavior_logp, 0.0).sum(-1, keepdim=True)
    share = torch.where(found.terms.advantages > 0, 0.5, 1.0)
    assert_close(found.weights, torch.where(batch.mask, (share * x).exp(), 0.0))


@settings(max_examples=25)
@given(batches(prompts=(2, 3)))
def test_what_looks_at_the_batch_is_computed_before_it_is_cut(batch):
    x = torch.where(batch.mask, batch.logp - batch.behavior_logp, 0.0)
    mean = x.sum() / batch.mask.sum().clamp(min=1)
    assert_close(WIDE(batch).weights, torch.where(batch.mask, mean.exp(), 0.0))
    for one in (WIDE, FINED):
        whole, terms = one(batch), batch_terms(one, batch)
        for p in range(batch.rewards.shape[0]):
            part = token_coefficients(one, terms.select([p]), batch.select([p]))
            assert_close(part.own, whole.own[p : p + 1])
            assert_close(part.weights, whole.weights[p : p + 1])


def test_a_penalty_of_the_batch_may_ask_for_advantages():
    columns = {"logp": [[-1.0], [-2.0]], "behavior_logp": [[-1.0], [-2.0]]}
    batch = Batch.from_rows([1.0, 0.0], "aa", mask=[[1], [1]], **columns)
    plain = estimator(Correction())(batch).own
    assert (FINED(batch).own - plain).flatten().tolist() == [0.0, -0.25]


def test_head_tokens_give_a_map_their_own_probabilities():
    p = torch.tensor([0.9, 0.1], dtype=torch.float64)
    q = torch.tensor([0.2, 0.8], dtype=torch.float64)
    centered = replace(get("centered"), corrections=FIELDS.corrections)
    assert not center(centered, p.log(), q.log(), torch.ones(1).double()).any()
    wide = centered.change(limit=1.0)
    assert_close(center(wide, p.log(), q.log(), torch.ones(1).double()), q)


def test_geometric_mean_of_changed_ratios_is_not_the_changed_geometric_mean():
    x = torch.tensor([[-2.0, 0.5]], dtype=torch.float64)
    mask, a = torch.ones_like(x).bool(), torch.ones(1, 1).double()

    @declare("token")
    def capped(log_ratio, advantages):
        return log_ratio.clamp(max=0.0)

    plain = Correction(reach=use(geometric), map=use(ratio))
    found = replace(plain, before=use(capped)).weights(x, mask, a)
    assert_close(found, torch.full_like(x, -1.0).exp())


# Engines

NEAR = FIELDS.change(limit=0.05)


def off_policy(problem):
    return with_behavior(problem, "noise", sigma=0.5, seed=3)


@pytest.mark.parametrize(
    ("one", "engine"),
    [
        (NEAR, "classes"),
        (BEFORE, "classes"),
        (
            replace(NEAR, advantage=use(constant, baseline=0.3), aggregation=use(token_sum)),
            "prefix_tree",
        ),
        (
            replace(BEFORE, advantage=use(constant, baseline=0.3), aggregation=use(sequence_mean)),
            "prefix_tree",
        ),
    ],
    ids=["fields", "before", "fields, tree", "before, tree"],
)
def test_a_recursion_equals_the_list_of_groups(one, engine):
    problem = off_policy(token_tree(3))
    found = exact(one, problem, 2, engine)
    listed = exact(one, problem, 2, "tuples")
    assert_close(found.mean, listed.mean)
    assert_close(found.variance, listed.variance)
    assert_close(found.drift, listed.drift)
    assert float((found.mean - exact(replace(one, corrections=()), problem, 2).mean).norm()) > 1e-3


def test_a_token_that_is_never_drawn_asks_for_no_probability():
    one = replace(NEAR, advantage=use(constant, baseline=0.3), aggregation=use(token_sum))
    found = exact(one, trajectories(), 2, "prefix_tree")
    assert_close(found.mean, exact(one, trajectories(), 2, "tuples").mean)


def test_recursions_refuse_what_they_cannot_hold():
    wide = plan(WIDE, off_policy(token_tree(2)), 2)
    assert wide.engine in ("tuples", "compositions")
    leaf = replace(FIELDS, corrections=(Correction(reach=use(trajectory), map=use(gap)),))
    assert plan(leaf, token_tree(2), 2).engine in ("tuples", "compositions")
    with pytest.raises(NotImplementedError, match="no recursion for"):
        tree_weights(leaf, Walk(token_tree(2)), 1.0, None)


@pytest.mark.parametrize("map_", [ratio, truncate])
def test_a_suffix_of_changed_ratios_has_a_recursion(map_):
    one = replace(
        get("reinforce"),
        corrections=(Correction(before=use(halved), reach=use(suffix), map=use(map_)),),
    )
    problem = off_policy(token_tree(3))
    found = exact(one, problem, 2, "prefix_tree")
    listed = exact(one, problem, 2, "tuples")
    assert_close(found.mean, listed.mean)
    assert_close(found.variance, listed.variance)
