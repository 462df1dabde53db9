"""Adapters against stand-ins of the engines' contracts: the gradient is that of our own path."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from adapter_cases import (
    GROUPS,
    LONGEST,
    NAMES,
    PROMPT,
    case,
    entry,
    gradient_of,
    largest,
    ours,
    pieces,
    words,
)
from checks import assert_close, refused
from torch import Tensor

from windage.estimators.aggregation import token_mean
from windage.estimators.batch import Batch
from windage.estimators.catalogue import get
from windage.estimators.member import use
from windage.llm.adapters import hosts, prime_rl, tinker, verl
from windage.llm.adapters.carry import early_half, named, refusal
from windage.llm.adapters.hosts import BOUND, TINKER
from windage.llm.adapters.terms import advantages_of, batch_of, groups_of

BYPASSED = {"bypass_mode": True}


def config(*, bypass: bool, **info: Any) -> SimpleNamespace:
    """What of verl's ActorConfig the loss reads."""
    rules = {"bypass_mode": bypass}
    return SimpleNamespace(
        policy_loss={"rollout_correction": rules}, global_batch_info={"dp_size": 1, **info}
    )


def by_verl(name: str, host: Any, ranks: int, size: int, hooks: Any = None) -> Tensor:
    """The gradient after verl's way round: advantages once, then ranks and micro-batches."""
    c, estimator = case(), entry(name)
    bypass = host is verl.BYPASS
    cap = dict(estimator.corrections[0].map.settings).get("cap", 1e9)
    given = not bypass and not estimator.corrections[0].idle
    rules = {"bypass_mode": bypass}
    rules |= {"rollout_is": "token", "rollout_is_threshold": cap} if given else {}
    rewards = torch.zeros_like(c.behavior_logp).index_put(
        (torch.arange(len(GROUPS)), c.real.sum(1) - 1), c.rewards
    )
    advantages, losses = hooks or (verl.advantage_hook(estimator), verl.loss_hook(estimator))
    found, _ = advantages(
        token_level_rewards=rewards.float(),
        response_mask=c.mask.long(),
        index=list(GROUPS),
        config={"rollout_correction": rules},
        reward_baselines=None,
    )
    weights = (c.proximal_logp - c.behavior_logp).exp().clamp(max=cap)
    info = {"batch_num_tokens": int(c.mask.sum()), "global_batch_size": len(GROUPS)}
    told = config(bypass=bypass, **(info | {"dp_size": ranks}))
    total: Tensor = torch.zeros(())
    for rank in pieces(len(GROUPS), len(GROUPS) // ranks):
        for rows in rank.split(size):
            loss, metrics = losses(
                old_log_prob=(c.behavior_logp if bypass else c.proximal_logp)[rows],
                log_prob=c.logp(rows),
                advantages=found[rows],
                response_mask=c.mask[rows],
                loss_agg_mode="token-mean",
                config=told,
                rollout_is_weights=weights[rows] if given else None,
            )
            assert all(isinstance(v, float) for v in metrics.values())
            loss.backward()
    total = gradient_of(c.model)
    return total / ranks


VERL = [(n, h) for h in (verl.BYPASS, verl.DECOUPLED) for n in NAMES if not refusal(entry(n), h)]


@pytest.mark.parametrize(("name", "host"), VERL, ids=lambda v: getattr(v, "name", v))
def test_verl_hooks_give_our_gradient(name, host):
    assert largest(by_verl(name, host, 2, 4), ours(entry(name), case(), 12)) < BOUND


@pytest.mark.parametrize("name", sorted({n for n, _ in VERL}))
@pytest.mark.parametrize("extra", [1, 6])
def test_rows_that_fill_up_a_batch_of_verl_change_no_advantage(name, extra):
    """The v1 of verl adds rows of a group of their own, without a token and with reward 0."""
    c, estimator = case(), entry(name)
    hook = verl.advantage_hook(estimator)
    bypass = not refusal(estimator, verl.BYPASS)
    rules = {"bypass_mode": bypass}
    if not bypass and not estimator.corrections[0].idle:
        cap = dict(estimator.corrections[0].map.settings).get("cap", 1e9)
        rules |= {"rollout_is": "token", "rollout_is_threshold": cap}

    def found(count: int, names: list[str]) -> Tensor:
        rewards, mask = torch.zeros(2, 12 + count, LONGEST, dtype=torch.float64)
        rewards[:12, 0], mask[:12] = c.rewards, c.mask.double()
        return hook(rewards, mask, names, {"rollout_correction": rules})[0]

    pads = [f"pad{7:032x}"] * extra
    padded = found(extra, [*GROUPS, *pads])
    assert_close(padded[:12], found(0, list(GROUPS)))
    assert not padded[12:].any()


@pytest.mark.parametrize("name", ["dapo", "gspo", "prompt_mean", "decoupled_tis", "kimi"])
def test_neither_ranks_nor_micro_batches_matter_to_verl(name):
    host = verl.DECOUPLED if name == "decoupled_tis" else verl.BYPASS
    expected = ours(entry(name), case())
    for ranks, size in ((1, 12), (1, 5), (3, 1)):
        assert largest(by_verl(name, host, ranks, size), expected) < BOUND


def test_a_normalizer_of_the_micro_batch_would_be_noticed():
    """The loss told of its own tokens only, as if they were all."""
    estimator, c = entry("dapo"), case()
    hook = verl.loss_hook(estimator)

    def alone(**given: Any) -> Any:
        mask = given["response_mask"]
        told = config(bypass=True, batch_num_tokens=int(mask.sum()), global_batch_size=len(mask))
        return hook(**{**given, "config": told})

    found = by_verl("dapo", verl.BYPASS, 1, 3, (verl.advantage_hook(estimator), alone))
    assert largest(found / 4, ours(estimator, c)) > 1e-2


def test_the_document_says_what_each_hook_carries():
    text = (Path(__file__).parents[1] / "docs" / "adapters.md").read_text()
    assert hosts.table() in text
    tried = {n for n, _ in VERL}
    assert tried == hosts.carried(verl.BYPASS, verl.DECOUPLED)
    assert {n for n in NAMES if not refusal(entry(n), TINKER)} == hosts.carried(TINKER)
    for weighted in (False, True):
        assert {*prime_names(weighted=weighted)} == hosts.carried_by_prime_rl(weighted=weighted)
    assert {"centered", "ppo", "m2po", "grpo_k3"}.isdisjoint(tried)


@pytest.mark.parametrize(
    "name", ["centered", "starting_point", "m2po", "ppo", "grpo_k3", "dr_grpo"]
)
def test_what_verl_cannot_carry_refuses_when_it_is_called(name):
    c = case()
    with refused(name, "allowed"):
        verl.advantage_hook(get(name))(c.mask.float(), c.mask, list(GROUPS), {**BYPASSED})
    with refused(name, "allowed"):
        verl.loss_hook(get(name))(c.behavior_logp, c.behavior_logp, c.behavior_logp, c.mask)


def test_raw_sampler_log_probs_are_refused_without_bypass_mode():
    c = case()
    with refused("cispo needs behavior_logp", "bypass_mode=true"):
        verl.advantage_hook(get("cispo"))(c.mask.float(), c.mask, list(GROUPS), None)
    with refused("decoupled_tis needs proximal_logp", "bypass_mode=false"):
        verl.advantage_hook(get("decoupled_tis"))(
            c.mask.float(), c.mask, list(GROUPS), {"rollout_correction": BYPASSED}
        )


def loss_of(name: str, weights: Tensor | None, **info: Any) -> Any:
    c = case()
    told = config(bypass=name == "cispo", **info)
    return verl.loss_hook(get(name))(
        c.behavior_logp, c.behavior_logp, c.behavior_logp, c.mask, config=told,
        rollout_is_weights=weights,
    )  # fmt: skip


def test_weights_that_belong_to_no_correction_are_refused_and_missing_ones_too():
    known = {"batch_num_tokens": 9, "global_batch_size": 3}
    with refused("rloo was given weights", "corrects by itself"):
        loss_of("rloo", torch.ones(12, LONGEST), **known)
    with refused("decoupled_tis was given no weights"):
        loss_of("decoupled_tis", None, **known)
    for name in known:
        with refused(f"no {name}"):
            loss_of("cispo", None, **{k: v for k, v in known.items() if k != name})


@pytest.mark.parametrize(
    ("rules", "words_"),
    [
        ({"rollout_is": "sequence", "rollout_is_threshold": 2.0}, "'token'"),
        ({"rollout_is": "token", "rollout_is_threshold": 3.0}, "allowed: 2"),
        (
            {"rollout_is": "token", "rollout_is_threshold": 2, "rollout_is_batch_normalize": True},
            "allowed: false",
        ),
        (
            {"rollout_is": "token", "rollout_is_threshold": 2.0, "rollout_rs": "token_k1"},
            "allowed: null",
        ),
    ],
)
def test_weights_of_another_correction_are_refused_at_the_advantage_hook(rules, words_):
    c = case()
    with refused("windage_decoupled_tis", words_):
        verl.advantage_hook(get("decoupled_tis"))(
            c.mask.float(), c.mask, list(GROUPS), {"rollout_correction": rules}
        )


def test_settings_of_verl_entries_come_from_the_environment(monkeypatch):
    monkeypatch.setenv(verl.SETTINGS, "cispo:cap=3 dr_grpo:length=64")
    found = verl.estimators()
    assert found["windage_cispo"].settings["cap"] == 3
    assert refusal(found["windage_dr_grpo"], verl.BYPASS) is None
    monkeypatch.setenv(verl.SETTINGS, "cispo:cup=3")
    with refused("cup", "cap"):
        verl.estimators()


def test_shadows_are_logged_and_never_change_the_gradient(monkeypatch):
    expected = by_verl("cispo", verl.BYPASS, 1, 12)
    monkeypatch.setenv(verl.SHADOWS, "cispo dual_clip gspo")
    seen: list[dict[str, float]] = []
    hook = verl.loss_hook(get("cispo"))

    def spied(**given: Any) -> Any:
        loss, metrics = hook(**given)
        seen.append(metrics)
        return loss, metrics

    hooks = (verl.advantage_hook(get("cispo")), spied)
    assert_close(by_verl("cispo", verl.BYPASS, 1, 12, hooks), expected)
    (metrics,) = seen
    assert metrics["windage/shadow/cispo/token_cosine"] == pytest.approx(1)
    assert metrics["windage/shadow/cispo/token_norm_ratio"] == pytest.approx(1)
    assert -1 < metrics["windage/shadow/dual_clip/token_cosine"] < 0.999
    assert metrics["windage/shadow/gspo/token_norm_ratio"] > 0


def test_a_shadow_with_other_advantages_is_refused(monkeypatch):
    for text, said in (
        ("rloo", "other advantages"),
        ("dapo", "other"),
        ("m2po", "one micro-batch"),
    ):
        monkeypatch.setenv(verl.SHADOWS, text)
        with refused(said, "allowed"):
            verl.shadows_of(get("cispo"))


# tinker.


def data_of(c: Any, *, without: tuple[str, ...] = ()) -> tuple[list[Any], list[int]]:
    """Datums whose target tokens begin inside the prompt, as the cookbook's do."""
    lengths = (c.real.sum(1) + PROMPT - 1).tolist()
    theirs = {
        "mask": c.mask.double(),
        "logprobs": c.behavior_logp,
        "proximal_logprobs": c.proximal_logp,
        "reference_logprobs": c.reference_logp,
    }
    found = []
    for row, n in enumerate(lengths):
        inputs = {
            name: SimpleNamespace(data=[0.0] * (PROMPT - 1) + value[row].tolist()[: n - PROMPT + 1])
            for name, value in theirs.items()
            if name not in without
        }
        found.append(SimpleNamespace(loss_fn_inputs=inputs))
    return found, lengths


@pytest.mark.parametrize("name", [n for n in NAMES if not refusal(entry(n), TINKER)])
def test_tinker_custom_loss_gives_our_gradient(name):
    """The client differentiates by log-probabilities and sends weights of a cross-entropy."""
    c, estimator = case(), entry(name)
    data, lengths = data_of(c)
    logp = torch.nn.functional.pad(c.logp(torch.arange(12)), (PROMPT - 1, 0))
    leaves = [row[:n].detach().requires_grad_() for row, n in zip(logp, lengths, strict=True)]
    loss, metrics = tinker.custom_loss(estimator, c.rewards.tolist(), GROUPS)(data, leaves)
    loss.backward()
    assert 0 <= metrics["windage/silenced"] <= 1
    weights = [-leaf.grad for leaf in leaves]
    sent = [-(w * row[:n]).sum() for w, row, n in zip(weights, logp, lengths, strict=True)]
    torch.stack(sent).sum().backward()
    assert largest(gradient_of(c.model), ours(estimator, c)) < BOUND


def test_tinker_names_what_the_data_lack():
    c = case()
    leaves = [torch.zeros(n, dtype=torch.float64, requires_grad=True) for n in data_of(c)[1]]
    for name, without, said in (
        ("cispo", ("logprobs",), "behavior_logp"),
        ("grpo_k3", ("reference_logprobs",), "reference_logp"),
        ("centered", (), "head"),
        ("cispo", ("mask",), "mask"),
    ):
        data, _ = data_of(c, without=without)
        with refused(said, "allowed"):
            tinker.custom_loss(get(name), c.rewards.tolist(), GROUPS)(data, leaves)
    with refused("11 rewards"):
        tinker.custom_loss(get("cispo"), [0.0] * 11, GROUPS)(data_of(c)[0], leaves)


# prime-rl.


def whole(c: Any) -> Batch:
    return batch_of(c.rewards, c.mask, groups_of(GROUPS))


def by_prime_rl(name: str, loss: Any, **extra: Any) -> Tensor:
    """A sum a sequence, divided by the trained tokens of the step."""
    c, estimator = case(), entry(name)
    groups = groups_of(GROUPS)
    apart = replace(early_half(estimator), aggregation=use(token_mean))
    found = groups.down(advantages_of(apart, whole(c)))
    shares = groups.down(prime_rl.token_weights(estimator, whole(c)))
    logp = c.logp(torch.arange(12))
    total = torch.zeros(())
    for row in range(12):
        inputs = SimpleNamespace(
            trainer_logprobs=logp[row],
            inference_logprobs=c.behavior_logp[row],
            ref_logprobs=None,
            advantages=found[row].expand(LONGEST),
            loss_mask=c.mask[row],
            loss_weights=shares[row].expand(LONGEST) if loss is prime_rl.weighted else None,
        )
        said = loss(inputs, estimator=words(name), **extra)
        assert said.metrics["windage_silenced"].shape == ()
        total = total + said.loss
    (total / c.mask.sum()).backward()
    return gradient_of(c.model)


def prime_names(*, weighted: bool) -> list[str]:
    """Entries that the loss carries, and whose advantages this file's orchestrator can compute."""
    return [
        n
        for n in NAMES
        if not {"values", "components"} & set(entry(n).advantage.traits.needs)
        and not refusal(
            entry(n), prime_rl.host_of(advantage=entry(n).advantage.name, weighted=weighted)
        )
    ]


@pytest.mark.parametrize("name", prime_names(weighted=False))
def test_prime_rl_loss_gives_our_gradient_of_a_token_mean(name):
    kind = entry(name).advantage.name
    found = by_prime_rl(name, prime_rl.loss, advantage=kind)
    assert largest(found, ours(entry(name), case())) < BOUND


FEW = ("gspo", "topr", "kimi", "prompt_mean", "grpo_entropy", "luspo", "trajectory_is")


@pytest.mark.parametrize(
    "name",
    [
        n if n in FEW else pytest.param(n, marks=pytest.mark.long)
        for n in prime_names(weighted=True)
    ],
)
def test_prime_rl_weights_give_every_other_mean(name):
    kind = entry(name).advantage.name
    found = by_prime_rl(name, prime_rl.weighted, advantage=kind)
    assert largest(found, ours(entry(name), case())) < BOUND


def test_prime_rl_refuses_what_one_sequence_cannot_know():
    for name, said in (
        ("gspo", "aggregates by sequence_mean"),
        ("cispo", "group_std"),
        ("m2po", "one micro-batch"),
        ("dapo", "admits"),
        ("centered", "head"),
    ):
        kind = {} if name == "cispo" else {"advantage": entry(name).advantage.name}
        with refused(said):
            by_prime_rl(name, prime_rl.loss, **kind)
    with refused("no loss_weights"):
        prime_rl.weighted(SimpleNamespace(loss_weights=None), estimator="gspo")


# Words.


def test_words_of_an_estimator_are_checked():
    assert named("grpo:ddof=0,clip_high=0.28").settings["clip_high"] == 0.28
    for text, said in (("grop", "grpo"), ("cispo:cap=x", "a number"), ("rloo:cap=1", "no setting")):
        with refused(said):
            named(text)


def test_rows_of_incomplete_groups_count_as_in_our_own_path():
    """A survivor of a larger group has no advantage and still counts."""
    c, groups = case(), ("a",) * 4 + ("b",) + ("c",) * 7
    batch = batch_of(c.rewards, c.mask, groups_of(groups))
    found = groups_of(groups).down(advantages_of(get("rloo"), batch))
    assert found[4] == 0
    assert_close(batch.lengths.sum().double(), c.mask.sum().double())
    with refused("group x has size 1"):
        alone = batch_of(c.rewards[:1], c.mask[:1], groups_of(["x"]))
        advantages_of(get("rloo"), alone)
