"""Score centering: no drift, no change where none is due, top-k exact where it says so."""

from dataclasses import replace

import pytest
import torch
from checks import (
    Brute,
    assert_apart,
    assert_close,
    assert_zero,
    enumerated_mean,
    moments,
    pull,
    refused,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from strategies import numbers, problems

from windage.estimators.advantage import constant, leave_one_out
from windage.estimators.aggregation import token_sum
from windage.estimators.batch import Batch
from windage.estimators.catalogue import get
from windage.estimators.centering import FLOOR, exact, head_ratio, top_k
from windage.estimators.correction import (
    Correction,
    band,
    clip,
    none,
    prefix,
    ratio,
    taper,
    token,
    truncate,
)
from windage.estimators.estimator import Estimator, surrogate
from windage.estimators.member import use
from windage.toy.behavior import with_behavior
from windage.toy.problems import token_tree

MAPS = (use(none), use(truncate, cap=1.25), use(band, low=0.7, high=1.5), use(taper))
INF = float("inf")
SERVE = {"prefix_tree", "classes"}
pair = st.integers(2, 5).flatmap(lambda v: st.tuples(numbers(3, v), numbers(3, v)))


def centered(map_, member=exact, advantage=constant):
    return Estimator(
        name="centered",
        advantage=use(advantage),
        corrections=(Correction(reach=use(token), map=map_),),
        aggregation=use(token_sum),
        centering=use(member),
    )


def weigh_by(map_):
    return lambda e: map_(e, torch.ones_like(e))


def scores(logp):
    """Score of every token by the logits: `[... V V]`."""
    return torch.eye(logp.shape[-1]).double() - logp.exp().unsqueeze(-2)


@settings(max_examples=20)
@given(problems(prompts=(1,), on_policy=False), st.sampled_from(MAPS))
def test_no_drift_whatever_the_weight_and_no_effect_of_an_offset(problem, map_):
    found = moments(centered(map_), problem, 1)
    assert_zero(found.drift, beside=10.0)
    if map_.function is not taper:
        shifted = replace(problem, rewards=problem.rewards + 3)
        assert_close(moments(centered(map_), shifted, 1).mean, found.mean)


@settings(max_examples=20)
@given(problems(prompts=(1,), on_policy=False))
def test_the_ratio_and_the_policy_itself_are_left_alone(problem):
    plain = replace(centered(use(ratio)), centering=None)
    assert_close(moments(centered(use(ratio)), problem, 1).mean, moments(plain, problem, 1).mean)
    same = problem.on_policy()
    for map_ in MAPS:
        assert_close(moments(centered(map_), same, 1).mean, moments(get("reinforce"), same, 1).mean)


@settings(max_examples=15)
@given(problems(prompts=(1,), on_policy=False, leaves=9))
def test_the_mean_is_a_covariance_under_the_sampler(problem):
    mu = Brute(problem, problem.behavior_logp)
    signal = mu.reach.unsqueeze(-1) * mu.token * (mu.action_value - mu.value.unsqueeze(-1))
    assert_close(moments(centered(use(none)), problem, 1).mean, pull(problem, signal))
    weight = (problem.logp - problem.behavior_logp)[0].exp().clamp(max=1.25)
    found = moments(centered(use(truncate, cap=1.25)), problem, 1).mean
    assert_close(found, pull(problem, signal * weight))


@given(pair, st.sampled_from(MAPS))
def test_top_k_over_all_tokens_or_all_but_one_is_exact(drawn, map_):
    p, q = (logits.log_softmax(-1) for logits in drawn)
    weigh = weigh_by(map_)
    whole = torch.einsum("rv,rvw->rw", exact(p, q, weigh), scores(p))
    for k in (p.shape[-1], p.shape[-1] - 1):
        head = top_k(p[:, :k], q[:, :k], weigh)
        assert_close(torch.einsum("rv,rvw->rw", head, scores(p)[:, :k]), whole, relative=1e-9)


@given(pair, st.sampled_from(MAPS), st.integers(1, 3))
def test_top_k_is_exact_where_the_tail_is_the_trainers_and_not_elsewhere(drawn, map_, k):
    p, q = (logits.log_softmax(-1) for logits in drawn)
    k = min(k, p.shape[-1] - 1)
    rest_p = p[:, k:].exp().sum(-1, keepdim=True)
    rest_q = q[:, k:].exp().sum(-1, keepdim=True)
    shaped = torch.cat([q[:, :k], p[:, k:] + (rest_q / rest_p).log()], -1)
    weigh = weigh_by(map_)
    head = top_k(p[:, :k], shaped[:, :k], weigh)
    found = torch.einsum("rv,rvw->rw", head, scores(p)[:, :k])
    assert_close(found, torch.einsum("rv,rvw->rw", exact(p, shaped, weigh), scores(p)))


def test_top_k_misses_a_tail_of_another_shape():
    p = torch.tensor([[0.4, 0.3, 0.2, 0.1]], dtype=torch.float64).log()
    q = torch.tensor([[0.4, 0.1, 0.2, 0.3]], dtype=torch.float64).log()
    head = top_k(p[:, :2], q[:, :2], torch.ones_like) @ scores(p)[0, :2]
    whole = exact(p, q, torch.ones_like) @ scores(p)[0]
    assert_apart(head, whole)
    assert (head - whole).abs().sum() <= 2 * float(q[:, 2:].exp().sum())


@given(pair)
def test_closed_forms_of_the_coefficients(drawn):
    p, q = (logits.log_softmax(-1) for logits in drawn)
    k = max(1, p.shape[-1] - 2)
    p, q = p[:, :k], q[:, :k]
    rho = (1 - q.exp().sum(-1, keepdim=True)) / (1 - p.exp().sum(-1, keepdim=True))
    assert_close(top_k(p, q, torch.ones_like), q.exp() - rho * p.exp())
    capped = torch.minimum(p.exp(), 2 * q.exp()) - (2 * rho).clamp(max=1) * p.exp()
    assert_close(top_k(p, q, weigh_by(use(truncate, cap=2.0))), capped)


def test_a_token_that_the_sampler_never_draws():
    p = torch.tensor([0.5, 0.3, 0.2]).double().log()
    q = torch.tensor([0.6, 0.4, 0.0]).double().log()
    assert head_ratio(p, q)[2] == 0
    for map_ in (*MAPS, use(ratio)):
        assert exact(p, q, weigh_by(map_))[2] == 0
    padded_p, padded_q = (torch.cat([x[:2], torch.tensor([-INF]).double()]) for x in (p, q))
    for map_ in (*MAPS, use(ratio)):
        found = top_k(padded_p, padded_q, weigh_by(map_))
        assert found[2] == 0
        assert_close(found[:2], top_k(p[:2], q[:2], weigh_by(map_)))


def test_a_head_of_all_the_mass_stays_finite_in_float32():
    q = torch.tensor([1.0 - 1e-9, 1e-9]).log()
    found = top_k(q, q, weigh_by(use(ratio)))
    assert found.isfinite().all() and found.dtype == torch.float32
    assert found.abs().max() < 2 * FLOOR + 1e-6


@settings(max_examples=10)
@given(problems(prompts=(1,), on_policy=False, leaves=7), st.sampled_from(MAPS))
def test_the_estimator_with_a_short_head_drifts_only_by_its_tail(problem, map_):
    vocab = problem.tree.vocab

    def cut(k):
        return lambda batch, index: replace(
            batch,
            rewards=torch.ones_like(batch.rewards),
            head_logp=batch.head_logp[..., :k],
            head_behavior_logp=batch.head_behavior_logp[..., :k],
        )

    for k in (vocab, vocab - 1):
        drift = enumerated_mean(short(map_), problem, 1, padded(cut(k), vocab))
        assert_zero(drift, beside=10.0)


def short(map_):
    return centered(map_, top_k)


def padded(edit, width):
    """Fill a cut head with tokens that neither policy has."""

    def pad(batch, index):
        batch = edit(batch, index)
        fill = (0, width - batch.head_logp.shape[-1])
        heads = (batch.head_logp, batch.head_behavior_logp)
        p, q = (torch.nn.functional.pad(x, fill, value=-INF) for x in heads)
        return replace(batch, head_logp=p, head_behavior_logp=q)

    return pad


@settings(max_examples=25)
@given(numbers(4), numbers(4), st.integers(0, 3), st.sampled_from(MAPS))
def test_the_surrogate_has_the_published_gradient(trainer, sampler, sampled, map_):
    """Own and head share advantage and denominator; the sampled token may lie outside the head."""
    q = sampler.log_softmax(-1)
    for k in (2, 4):
        logits = trainer.clone().requires_grad_()
        p = logits.log_softmax(-1)
        batch = Batch(
            rewards=torch.tensor([[2.0, 0.0]]).double(),
            mask=torch.tensor([[[True], [False]]]),
            logp=torch.stack([p[sampled], p[sampled] * 0]).view(1, 2, 1),
            behavior_logp=torch.stack([q[sampled], q[sampled] * 0]).view(1, 2, 1),
            head_logp=p[:k].expand(1, 2, 1, k),
            head_behavior_logp=q[:k].expand(1, 2, 1, k),
        )
        found = centered(map_, top_k)(batch)
        loss = surrogate(found.own, batch.logp) + surrogate(found.head, batch.head_logp)
        loss.backward()
        weight = map_((p - q)[sampled].detach(), torch.tensor(2.0).double())
        frozen = top_k(p[:k].detach(), q[:k], lambda e: map_(e, torch.tensor(2.0).double()))
        score = scores(p.detach())
        expected = 2.0 / 2 * (weight * score[sampled] - frozen @ score[:k])
        assert_close(-logits.grad, expected)


@settings(max_examples=25)
@given(numbers(4), numbers(4), st.sampled_from([2.0, -2.0]))
def test_head_weights_are_products_of_all_maps_and_read_the_sign(trainer, sampler, advantage):
    p, q = trainer.log_softmax(-1), sampler.log_softmax(-1)
    maps = (use(taper), use(truncate, cap=1.25))
    pair = tuple(Correction(reach=use(token), map=map_) for map_ in maps)
    batch = Batch(
        rewards=torch.tensor([[advantage]]).double(),
        mask=torch.ones(1, 1, 1).bool(),
        logp=p[:1].view(1, 1, 1),
        behavior_logp=q[:1].view(1, 1, 1),
        head_logp=p.view(1, 1, 1, 4),
        head_behavior_logp=q.view(1, 1, 1, 4),
    )
    found = replace(centered(maps[0]), corrections=pair)(batch)
    r = (p - q).exp()
    tapers = torch.ones_like(r) if advantage > 0 else r.clamp(max=1.0)
    weight = tapers * r.clamp(max=1.25)
    assert_close(found.own.view(-1), advantage * weight[:1])
    assert_close(found.head.view(-1), -advantage * q.exp() * weight)


@pytest.mark.parametrize(
    "correction",
    [
        Correction(reach=use(prefix), map=use(ratio)),
        Correction(reach=use(token), map=use(clip), denominator="proximal_logp"),
    ],
)
def test_weights_that_a_head_token_cannot_have_are_refused(correction):
    with refused("centering", "token reach", correction.describe()):
        replace(get("centered"), corrections=(correction,))
    idle = Correction(reach=use(prefix), map=use(none))
    assert replace(get("centered"), corrections=(idle,)).centering is not None


@given(st.sampled_from(["centered", "centered_tis", "centered_mask"]))
def test_a_head_with_garbage_under_the_mask(name):
    head = torch.full((1, 2, 2, 2), float("nan")).double()
    head[:, :, 0] = torch.tensor([-0.5, -1.0]).double()
    batch = Batch(
        rewards=torch.tensor([[1.0, 0.0]]).double(),
        mask=torch.tensor([[[True, False], [True, False]]]),
        logp=torch.full((1, 2, 2), -0.5).double(),
        behavior_logp=torch.full((1, 2, 2), -0.5).double(),
        head_logp=head,
        head_behavior_logp=head,
    )
    found = get(name)(batch)
    assert found.head.isfinite().all() and not found.head[:, :, 1].any()
    assert found.head[:, :, 0].any()


@pytest.mark.parametrize("map_", [use(none), use(truncate, cap=1.25), use(taper)])
@pytest.mark.parametrize("k", [1, 2, 3, 5])
def test_every_engine_takes_the_samplers_likeliest_tokens(map_, k):
    """The tree and classes build the head at each prefix; the list looks at recorded heads."""
    problem = with_behavior(token_tree(3, vocab=4), "noise", sigma=0.7)
    for advantage in (constant, leave_one_out):
        short = replace(centered(map_, advantage=advantage), centering=use(top_k, k=k))
        listed = moments(short, problem, 2, engine="compositions")
        gated = advantage is leave_one_out and map_.function is taper
        engines = {"classes"} if gated else SERVE
        for engine in engines:
            found = moments(short, problem, 2, engine=engine)
            assert_close(found.mean, listed.mean)
            assert_close(found.variance, listed.variance)
            assert_close(found.drift, listed.drift)
        whole = moments(centered(map_, advantage=advantage), problem, 2)
        if k >= 3:
            assert_close(listed.mean, whole.mean)
        elif map_.function is not none:
            assert_apart(listed.drift, whole.drift, at_least=1e-5)


def test_the_likeliest_tokens_are_the_same_wherever_they_stand_in_the_head():
    random = torch.Generator().manual_seed(1)
    p, q = (torch.randn(6, 5, generator=random).double().log_softmax(-1) for _ in range(2))
    weigh = weigh_by(use(truncate, cap=1.25))
    order = q.argsort(-1, descending=True)
    first = order[:, :2]
    expected = top_k(p.gather(-1, first), q.gather(-1, first), weigh)
    assert_close(top_k(p, q, weigh, k=2).gather(-1, first), expected)
    assert not top_k(p, q, weigh, k=2).gather(-1, order[:, 2:]).any()
    with refused("k is 0"):
        top_k(p, q, weigh, k=0)
