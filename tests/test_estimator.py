"""The composition: slices equal the whole, constants stay constant, bad input is named."""

from dataclasses import replace

import pytest
import torch
from checks import assert_close, assert_invariant, refused
from hypothesis import given, settings
from hypothesis import strategies as st
from strategies import batches
from torch.utils._python_dispatch import TorchDispatchMode

from windage.estimators import admission, penalty
from windage.estimators.admission import overlong, staleness_cap
from windage.estimators.advantage import batch_std, group_mean, leave_one_out
from windage.estimators.aggregation import prompt_mean, token_mean, token_sum
from windage.estimators.batch import TOKEN_FIELDS, Batch
from windage.estimators.catalogue import CATALOGUE, get
from windage.estimators.centering import top_k
from windage.estimators.correction import Correction, clip, none, ratio, token, truncate
from windage.estimators.estimator import (
    Estimator,
    batch_terms,
    coefficients,
    surrogate,
    token_coefficients,
)
from windage.estimators.member import use
from windage.estimators.penalty import entropy, loss_k3, loss_k3_weighted, reward_k1

STAGE = {
    stage: tuple(
        use(member)
        for member in vars(stage).values()
        if hasattr(member, "traits") and member.__module__ == stage.__name__
    )
    for stage in (admission, penalty)
}
NAN, INF = float("nan"), float("inf")
PENALIZED = replace(
    get("dapo", length=4, margin=2),
    name="penalized",
    penalties=(
        *get("dapo", length=4, margin=2).penalties,
        use(reward_k1, coefficient=0.1),
        use(loss_k3_weighted, coefficient=0.1),
        use(entropy, coefficient=0.1),
    ),
)
ALL = [
    *(
        entry.change(length=4) if "length" in entry.settings else entry
        for entry in CATALOGUE.values()
    ),
    replace(get("centered_tis"), name="centered_top_k", centering=use(top_k)),
    replace(get("cispo"), name="batch_std", advantage=use(batch_std)),
    replace(get("dr_grpo", length=4), name="prompt_mean", aggregation=use(prompt_mean)),
    PENALIZED,
]
entries = pytest.mark.parametrize("estimator", ALL, ids=lambda e: e.name)


def suited(estimator, batch):
    """The batch, with rewards that the estimator takes."""
    signed = estimator.advantage.traits.rewards == "any"
    return batch if signed else replace(batch, rewards=batch.rewards.abs())


def decoupled(cap=2.0):
    """TIS of proximal/behavior times PPO's clip of current/proximal."""
    return (
        Correction(
            reach=use(token),
            map=use(truncate, cap=cap),
            numerator="proximal_logp",
            denominator="behavior_logp",
        ),
        Correction(
            reach=use(token),
            map=use(clip),
            numerator="logp",
            denominator="proximal_logp",
        ),
    )


# Slices and the whole


@entries
@settings(max_examples=8)
@given(batches(heads=3, prompts=(2, 3, 5)), st.data())
def test_any_partition_into_micro_batches_equals_the_whole(estimator, batch, data):
    batch = suited(estimator, batch)
    whole = estimator(batch)
    terms = batch_terms(estimator, batch)
    order = data.draw(st.permutations(range(batch.rewards.shape[0])))
    cut = data.draw(st.integers(1, len(order)))
    loss = torch.zeros(()).double()
    for rows in (order[:cut], order[cut:]):
        if rows:
            part = token_coefficients(estimator, terms.select(rows), batch.select(rows))
            assert_close(part.own, whole.own[list(rows)])
            loss = loss + surrogate(part.own, batch.logp[list(rows)])
            if whole.head is not None:
                assert_close(part.head, whole.head[list(rows)])
    assert_close(loss, surrogate(whole.own, batch.logp))


@entries
@settings(max_examples=5)
@given(batches(heads=3), st.data())
def test_order_of_groups_and_of_members_does_not_matter(estimator, batch, data):
    batch = suited(estimator, batch)
    p, g = batch.rewards.shape
    rows = data.draw(st.permutations(range(p)))
    members = data.draw(st.permutations(range(g)))

    def shuffled(index):
        return replace(
            batch,
            **{
                name: value[:, list(index)]
                for name, value in vars(batch).items()
                if isinstance(value, torch.Tensor)
            },
        )

    whole = estimator(batch).own
    assert_close(estimator(batch.select(list(rows))).own, whole[list(rows)])
    assert_close(estimator(shuffled(members)).own, whole[:, list(members)])


@entries
@settings(max_examples=5)
@given(batches(heads=3), st.sampled_from([NAN, INF, -INF, -3.5]))
def test_what_is_masked_reaches_neither_coefficient_nor_gradient(estimator, batch, held):
    def dirty(value, mask):
        return torch.where(mask, value, held)

    # A validated batch refuses garbage in trainable places only.
    batch = suited(estimator, batch)
    mask, present = batch.mask, batch.present
    spoiled = replace(
        batch,
        rewards=dirty(batch.rewards, present),
        elapsed=dirty(batch.elapsed, present),
        components=dirty(batch.components, present.unsqueeze(-1)),
        **{name: dirty(getattr(batch, name), mask) for name in TOKEN_FIELDS if name != "versions"},
        **{
            name: dirty(getattr(batch, name), mask.unsqueeze(-1))
            for name in ("head_logp", "head_behavior_logp")
        },
    )
    clean, found = estimator(batch), estimator(spoiled)
    assert_close(found.own, clean.own)
    assert_close(found.weights, clean.weights)
    assert not found.own[~mask].any()
    logp = spoiled.logp.clone().requires_grad_()
    loss = surrogate(found.own, logp)
    if found.head is not None:
        assert_close(found.head, clean.head)
        head = spoiled.head_logp.clone().requires_grad_()
        loss = loss + surrogate(found.head, head)
        loss.backward()
        assert_close(head.grad, -found.head)
    else:
        loss.backward()
    assert_close(logp.grad, -found.own)
    assert loss.isfinite()


@entries
@settings(max_examples=3)
@given(batches(heads=3, absent=False))
def test_coefficients_are_constants(estimator, batch):
    batch = suited(estimator, batch)
    names = ("logp", "behavior_logp", "reference_logp", "values", "head_logp", "rewards")
    live = replace(batch, **{n: getattr(batch, n).clone().requires_grad_() for n in names})
    found = estimator(live)
    for value in (found.own, found.head, found.weights, found.terms.advantages):
        assert value is None or not value.requires_grad


@entries
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_types(estimator, dtype):
    generator = torch.Generator().manual_seed(3)
    token_fields = {
        name: -torch.rand(2, 3, 2, generator=generator).to(dtype)
        for name in ("logp", "behavior_logp", "proximal_logp", "reference_logp", "values")
    }
    heads = torch.randn(2, 2, 3, 2, 4, generator=generator).log_softmax(-1).to(dtype)
    batch = Batch(
        rewards=torch.rand(2, 3, generator=generator).to(dtype),
        mask=torch.ones(2, 3, 2).bool(),
        versions=torch.ones(2, 3, 2).long(),
        current_version=2,
        head_logp=heads[0],
        head_behavior_logp=heads[1],
        components=torch.rand(2, 3, 2, generator=generator).to(dtype),
        probability_square=torch.rand(2, 3, 2, generator=generator).to(dtype),
        **token_fields,
    )
    found = estimator(batch)
    want = torch.float64 if dtype == torch.float64 else torch.float32
    assert found.own.dtype == found.weights.dtype == want
    assert found.head is None or found.head.dtype == want
    if dtype in (torch.bfloat16, torch.float16):
        wide = {
            name: value.float()
            for name, value in vars(batch).items()
            if isinstance(value, torch.Tensor) and value.is_floating_point()
        }
        assert_close(found.own, estimator(replace(batch, **wide)).own, relative=1e-6)


@entries
def test_leading_axes_are_replicates(estimator):
    generator = torch.Generator().manual_seed(5)

    def draw(*shape):
        return -torch.rand(2, 3, *shape, generator=generator).double()

    batch = Batch(
        rewards=draw(2, 3),
        mask=torch.rand(2, 3, 2, 3, 4, generator=generator) > 0.3,
        logp=draw(2, 3, 4),
        behavior_logp=draw(2, 3, 4),
        proximal_logp=draw(2, 3, 4),
        reference_logp=draw(2, 3, 4),
        values=draw(2, 3, 4),
        probability_square=1 + draw(2, 3, 4),
        components=draw(2, 3, 2),
        versions=torch.ones(2, 3, 2, 3, 4).long(),
        current_version=2,
        head_logp=2 * draw(2, 3, 4, 5) - 2,
        head_behavior_logp=2 * draw(2, 3, 4, 5) - 2,
    )
    batch = suited(estimator, batch)
    whole = estimator(batch)
    for i in range(2):
        for j in range(3):
            one = replace(
                batch,
                **{n: v[i, j] for n, v in vars(batch).items() if isinstance(v, torch.Tensor)},
            )
            assert_close(whole.own[i, j], estimator(one).own)


def test_nothing_is_made_on_another_device_or_in_a_wider_type():
    """On torch's `meta` device a tensor from elsewhere is an error.

    Float64 may be one number a response: aggregations and lags, made of integers, know no type.
    """

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, operation, types, inputs=(), options=None):
            found = operation(*inputs, **(options or {}))
            if isinstance(found, torch.Tensor) and found.dtype == torch.float64:
                assert found.numel() <= 6, operation
            return found

    def empty(*shape, dtype=torch.float32):
        return torch.empty(2, 3, *shape, dtype=dtype, device="meta")

    batch = Batch(
        rewards=empty(),
        outcomes=empty(),
        elapsed=empty(),
        components=empty(2),
        present=empty(dtype=torch.bool),
        truncated=empty(dtype=torch.bool),
        requested=torch.empty(2, dtype=torch.long, device="meta"),
        mask=empty(4, dtype=torch.bool),
        versions=empty(4, dtype=torch.long),
        current_version=2,
        head_logp=empty(4, 5),
        head_behavior_logp=empty(4, 5),
        **{name: empty(4) for name in TOKEN_FIELDS if name != "versions"},
    )
    full = replace(PENALIZED, name="full", admission=STAGE[admission], penalties=STAGE[penalty])
    for estimator in (*ALL, get("dapo"), full, full.change(length=None)):
        with Watch():
            found = coefficients(estimator, batch)
        for value in (found.own, found.weights, found.terms.advantages, found.head):
            assert value is None or (value.device.type, value.dtype) == ("meta", torch.float32)
        assert {n.device.type for n in (batch.missing, *found.terms.counts.values())} == {"meta"}


# The formula


@settings(max_examples=25)
@given(batches())
def test_a_coefficient_is_the_product_of_its_stages(batch):
    estimator = replace(get("token_tis"), admission=(use(overlong),))
    found = estimator(batch)
    advantage = leave_one_out(batch.rewards, batch.present)
    scale = token_sum(batch.lengths, batch.present)
    weight = (batch.logp - batch.behavior_logp).exp().clamp(max=2.0)
    expected = (advantage * scale * ~batch.truncated).unsqueeze(-1) * weight
    assert_close(found.own, torch.where(batch.mask, expected, 0.0))


@settings(max_examples=25)
@given(batches(spread=0.5))
def test_a_decoupled_form_is_the_product_of_two_corrections(batch):
    found = replace(get("dr_grpo", length=4), corrections=decoupled(cap=1.2))(batch)
    tis = (batch.proximal_logp - batch.behavior_logp).exp().clamp(max=1.2)
    moved = (batch.logp - batch.proximal_logp).exp()
    a = group_mean(batch.rewards, batch.present).unsqueeze(-1)
    inside = ~(((a > 0) & (moved > 1.2)) | ((a < 0) & (moved < 0.8)))
    assert_close(found.weights, torch.where(batch.mask, tis * moved * inside, 0.0))


@settings(max_examples=25)
@given(batches())
def test_unclipped_the_anchor_cancels(batch):
    two = (
        Correction(reach=use(token), map=use(ratio), numerator="proximal_logp"),
        Correction(reach=use(token), map=use(ratio), denominator="proximal_logp"),
    )
    found = replace(get("token_is"), corrections=two)(batch)
    assert_close(found.own, get("token_is")(batch).own)


# Errors


def simple(**changes):
    fields = {
        "rewards": torch.tensor([[1.0, 0.0]], dtype=torch.float64),
        "mask": torch.ones(1, 2, 2).bool(),
        "logp": torch.full((1, 2, 2), -1.0).double(),
        "behavior_logp": torch.full((1, 2, 2), -1.0).double(),
        "group_ids": ("question 7",),
    }
    return Batch(**(fields | changes))


def test_a_group_of_one_is_refused_with_its_name_and_size():
    batch = Batch.from_rows([1.0, 0.0, 0.7], [0, 0, "x"], mask=[[1]] * 3, logp=[[-1.0]] * 3)
    for name in ("rloo", "group_mean", "grpo"):
        with refused("group x", "size 1", name, "at least 2"):
            get(name)(batch)
    assert get("reinforce")(batch).own.any()
    with refused("question 7", "size 1"):
        get("rloo")(simple(requested=torch.tensor([1])))


@pytest.mark.parametrize(
    ("name", "missing"),
    [
        ("token_is", "behavior_logp"),
        ("ppo", "values"),
        ("centered", "head_logp"),
        ("starting_point", "versions"),
    ],
)
def test_a_field_that_is_missing_is_named(name, missing):
    estimator = get(name)
    changes = {missing: None}
    with refused(missing):
        estimator.check(simple(**changes))


def test_log_probs_may_come_later_but_not_never():
    batch = simple(logp=None)
    estimator = get("token_is")
    terms = batch_terms(estimator, estimator.check(batch))
    with refused("logp"):
        token_coefficients(estimator, terms, batch)
    found = token_coefficients(estimator, terms, replace(batch, logp=simple().logp))
    assert_close(found.own, estimator(simple()).own)
    assert_close(get("rloo")(batch).own, get("rloo")(simple()).own)


@pytest.mark.parametrize("name", ["token_is", "prefix_is", "suffix_is", "trajectory_is", "grpo"])
def test_a_ratio_that_overflows_is_an_error_that_names_the_row(name):
    apart = simple().behavior_logp.clone()
    apart[0, 1, 0] = -1e4
    with refused("own coefficient", "-inf", "group question 7, response 1, token", "bound"):
        get(name)(simple(behavior_logp=apart))
    near = get("sequence_tis")(simple(behavior_logp=apart))
    assert near.weights.max() == 2.0


@pytest.mark.parametrize("extreme", [1e4, -1e4])
def test_extreme_ratios_stay_finite_in_bounded_entries(extreme):
    batch = simple(
        behavior_logp=simple().logp - extreme * torch.tensor([[[1.0, 0.0], [0.5, 1.0]]]).double(),
        head_logp=torch.tensor([-0.5, -1.0]).double().expand(1, 2, 2, 2),
        head_behavior_logp=torch.tensor([-0.5, -INF]).double().expand(1, 2, 2, 2),
        reference_logp=simple().logp,
        proximal_logp=simple().logp,
        probability_square=simple().logp + 1.5,
        components=torch.rand(1, 2, 2).double(),
    )
    for entry in CATALOGUE.values():
        if {c.property: c.holds for c in entry.claims}["bounded"]:
            entry = entry.change(length=4) if "length" in entry.settings else entry
            entry = replace(entry, admission=(), penalties=())  # claims are without penalties
            found = coefficients(entry, entry.check(batch))
            assert found.validate(batch).own.abs().max() <= 5.0


def test_an_inert_row_may_overflow():
    apart = torch.full((1, 2, 2), -1e4).double()
    equal = torch.ones(1, 2).double()
    assert not get("token_is")(simple(behavior_logp=apart, rewards=equal)).own.any()
    gone = replace(get("token_is"), admission=(use(overlong),))
    assert not gone(simple(behavior_logp=apart, truncated=torch.ones(1, 2).bool())).own.any()


def test_a_head_coefficient_that_overflows_is_named():
    estimator = replace(
        get("centered"), corrections=(Correction(reach=use(token), map=use(ratio)),)
    )
    head = torch.tensor([-600.0, -0.1]).double().expand(1, 2, 2, 2)
    lifted = torch.tensor([200.0, -0.1]).double().expand(1, 2, 2, 2)
    with refused("head coefficient", "response 0, token 0"):
        estimator(simple(head_logp=lifted, head_behavior_logp=head))


@entries
def test_a_batch_without_a_trainable_token_gives_nothing(estimator):
    blank = simple(
        mask=torch.zeros(1, 2, 2).bool(),
        logp=torch.full((1, 2, 2), NAN).double(),
        behavior_logp=torch.full((1, 2, 2), -INF).double(),
        reference_logp=torch.full((1, 2, 2), INF).double(),
        values=torch.full((1, 2, 2), NAN).double(),
        proximal_logp=torch.full((1, 2, 2), NAN).double(),
        probability_square=torch.full((1, 2, 2), NAN).double(),
        components=torch.ones(1, 2, 2).double(),
        versions=torch.zeros(1, 2, 2).long(),
        current_version=100,
        head_logp=torch.full((1, 2, 2, 3), NAN).double(),
        head_behavior_logp=torch.full((1, 2, 2, 3), NAN).double(),
    )
    found = estimator(blank)
    assert not found.own.any()
    assert found.head is None or not found.head.any()
    assert surrogate(found.own, blank.logp) == 0


# Settings


def test_change_sets_a_name_wherever_it_stands_and_refuses_others():
    changed = get("grpo", clip_high=0.28, eps=1e-4)
    assert changed.settings["clip_high"] == 0.28 and changed.settings["eps"] == 1e-4
    assert get("grpo").settings["clip_high"] == 0.2
    assert changed != get("grpo") and get("grpo", clip_high=0.2) == get("grpo")
    with refused("grpo", "clip_ratio_c", "clip_low", error=TypeError):
        get("grpo", clip_ratio_c=3.0)
    with refused("rloo", "none", error=TypeError):
        get("rloo", cap=2.0)


def test_scope_is_the_widest():
    assert get("reinforce").scope == "response"
    assert get("rloo").scope == "group"
    assert get("dapo").scope == "batch"
    wide = replace(get("reinforce"), advantage=use(batch_std))
    assert wide.scope == "batch"


def test_needs_are_fields():
    assert get("reinforce").needs == ("rewards", "present", "lengths")
    assert set(get("token_is").needs) >= {"logp", "behavior_logp"}
    assert "reference_logp" in replace(get("grpo"), penalties=(use(loss_k3),)).needs
    assert "reference_logp" not in get("grpo").needs
    decoupled_needs = replace(get("rloo"), corrections=decoupled()).needs
    assert "proximal_logp" in decoupled_needs


def test_an_idle_correction_reads_no_policy():
    plain = Estimator(name="x", advantage=use(leave_one_out), aggregation=use(token_mean))
    assert plain.corrections[0].map.function is none
    assert plain(simple(behavior_logp=None)).weights.unique().tolist() == [1.0]


def test_an_unversioned_batch_is_inert_in_a_study_and_refused_in_training():
    capped = replace(get("rloo"), admission=(use(staleness_cap),))
    assert_invariant(lambda e: coefficients(e, simple()).own, capped, get("rloo"))
    with refused("versions"):
        capped(simple())
    with refused("current_version"):
        capped(simple(versions=torch.ones(1, 2, 2).long()))
    old = simple(versions=torch.ones(1, 2, 2).long(), current_version=10)
    assert not capped(old).own.any()
    assert capped(replace(old, current_version=9)).own.any()


def test_surrogate_is_finite_beside_infinities_and_constant_in_its_coefficients():
    logp = torch.tensor([-1.0, -INF, NAN], requires_grad=True)
    constant = torch.tensor([2.0, 0.0, 0.0], requires_grad=True)
    loss = surrogate(constant, logp)
    loss.backward()
    assert loss.item() == 2.0
    assert logp.grad.tolist() == [-2.0, 0.0, 0.0]
    assert constant.grad is None
