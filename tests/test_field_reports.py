"""The field's 72 fault reports, each through the library's public functions.

`data/field_reports.json` holds inputs, right results and what the reported fault gives.  A runner
feeds the inputs to the library and returns results by the name that the report gives them; every
result must equal the right one, and differ from the faulty one of the same name.  Where a report
leaves the choice free, a runner returns our named choice (`POLICY`).  What waits for a part that
does not exist yet is skipped with its reason, whole or in part, and listed by `pytest -rs`.
"""

import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from checks import refused

from windage.estimators.admission import (
    difficulty_band,
    lag,
    overlong,
    staleness_cap,
    time_out,
    zero_variance,
)
from windage.estimators.advantage import (
    constant,
    gae,
    group_mean,
    group_std,
    leave_one_out,
    returns_to_go,
    whiten,
)
from windage.estimators.aggregation import constant_length, sequence_mean, token_mean, token_sum
from windage.estimators.batch import Batch, log_ratio
from windage.estimators.catalogue import get
from windage.estimators.correction import (
    Correction,
    band,
    clip,
    dual_clip,
    geometric,
    keep,
    ratio,
    taper,
    token,
    trajectory,
    truncate,
)
from windage.estimators.diagnostics import (
    aggregate,
    changed_share,
    clip_objective,
    dual_clip_objective,
    masked_mean,
)
from windage.estimators.estimator import batch_terms, surrogate, token_coefficients
from windage.estimators.member import use
from windage.estimators.penalty import (
    entropy,
    k1,
    k3,
    loss_k1,
    loss_k2,
    loss_k3,
    reward_k1,
    timeout_failure,
)
from windage.toy.behavior import with_behavior
from windage.toy.exact.plan import exact
from windage.toy.exact.walk import pull_back
from windage.toy.objective import objective
from windage.toy.problems import Tree, make

CASES = {
    case["id"]: case
    for case in json.loads((Path(__file__).parent / "data/field_reports.json").read_text())["cases"]
}
PENDING = {
    "adm-truncation-by-eos-id": "finish reasons are read by the samplers of llm/",
    "lp-off-by-one": "the shift from logits to tokens is in llm/'s log-probs",
    "lp-left-pad-positions": "positions are made by llm/'s log-probs",
    "lp-wrong-dict-entry": "an engine's answer is read by the samplers of llm/",
    "lp-forced-eos": "tokens that were not sampled are marked by the samplers of llm/",
    "tok-retokenised": "ids are kept by the rollout store of llm/",
    "cache-stale-prefix": "caches belong to the samplers of llm/",
    "seed-collisions": "seeds are dealt by the samplers of llm/",
}
PARTLY_PENDING = {
    "agg-shared-prefix-double-count": "the masks of branches are made by llm/'s rollout store",
    "lp-temperature": "the trainer's temperature is set in llm/'s log-probs; the toy's is checked",
    "lp-top-p-renormalised": "a model's support is kept by llm/'s samplers; the toy's is checked",
    "ref-adapter-disabled": "the reference model is made by llm/'s reference",
}
POLICY = {
    "adv-singleton-group": "refuse",
    "adv-nan-poisons-group": "refuse",
    "adm-partial-group": "partial groups allowed",
    "agg-all-masked-batch": "contribute nothing",
    "kl-k3-overflow": "cap the log ratio",
    "lp-none-or-nan": "refuse",
}
# Another reading than ours (one discount a trainable token), and a part that waits.
NOT_OURS = {
    "kl-tool-tokens-in-return": {"return_token_0_time_discount"},
    "agg-shared-prefix-double-count": {"masks"},
}
RUNNERS: dict[str, Callable[[dict[str, Any]], dict[str, Any]]] = {}


def runs(name: str):
    """Register the runner of a case; it takes the case's inputs and returns named results."""

    def register(function):
        assert name in CASES and name not in RUNNERS
        RUNNERS[name] = function
        return function

    return register


def number(value: Any) -> Any:
    """Numbers of the file: the strings nan, inf and -inf stand for the floats."""
    if isinstance(value, list):
        return [number(v) for v in value]
    return float(value) if value in ("nan", "inf", "-inf") else value


def real(value: Any) -> torch.Tensor:
    return torch.tensor(number(value), dtype=torch.float64)


def flag(value: Any) -> torch.Tensor:
    return torch.tensor(value).bool()


def plain(value: Any) -> Any:
    """Tensors as nested lists."""
    if isinstance(value, torch.Tensor):
        return value.tolist()
    if isinstance(value, dict):
        return {key: plain(v) for key, v in value.items()}
    return [plain(v) for v in value] if isinstance(value, (list, tuple)) else value


def same(found: Any, right: Any) -> bool:
    """Equal, numbers to 1e-9 relative, as the file asks."""
    if isinstance(right, dict):
        return isinstance(found, dict) and all(
            k in found and same(found[k], right[k]) for k in right
        )
    if isinstance(right, list):
        return (
            isinstance(found, list)
            and len(found) == len(right)
            and all(same(f, r) for f, r in zip(found, right, strict=True))
        )
    if isinstance(right, bool) or right is None or isinstance(found, bool):
        return found == right
    right = number(right)
    if isinstance(right, str):
        return found == right
    if math.isnan(right):
        return math.isnan(found)
    return math.isclose(found, right, rel_tol=1e-9, abs_tol=1e-12)


def right_results(case: dict[str, Any]) -> dict[str, Any]:
    """The right values: the only ones, or those of our named choice."""
    if "expected" in case:
        return case["expected"]
    if "expected_any_of" not in case:
        return {}
    chosen = next(o for o in case["expected_any_of"] if o["policy"] == POLICY[case["id"]])
    return {key: value for key, value in chosen.items() if key not in ("policy", "error")}


@pytest.mark.parametrize("name", CASES)
def test_field_report(name):
    if name in PENDING:
        pytest.skip(PENDING[name])
    case = CASES[name]
    found = plain(RUNNERS[name](case["inputs"]))
    right = {k: v for k, v in right_results(case).items() if k not in NOT_OURS.get(name, ())}
    assert set(right) <= set(found), f"no result for {sorted(set(right) - set(found))}"
    for key, value in right.items():
        assert same(found[key], value), f"{key}: {found[key]}, expected {value}"
    for key, value in case.get("faulty", {}).items():
        if key in right:
            assert not same(found[key], value), f"{key} is what the fault gives"


@pytest.mark.parametrize("name", PARTLY_PENDING)
def test_part_of_a_field_report(name):
    pytest.skip(PARTLY_PENDING[name])


def test_every_report_is_run_or_waits():
    assert len(CASES) == 72
    assert set(RUNNERS) | set(PENDING) == set(CASES)
    assert not set(RUNNERS) & set(PENDING)
    assert set(PARTLY_PENDING) <= set(RUNNERS)
    free = {name for name, case in CASES.items() if "expected_any_of" in case}
    assert set(POLICY) == free


def test_the_comparison_can_fail():
    assert same([1.0, "x", None, True, {"a": 1}], [1.0 + 1e-11, "x", None, True, {"a": 1}])
    for found, right in [
        (1.0, 1.0 + 1e-8),
        ([1.0], [1.0, 1.0]),
        (float("nan"), 0.0),
        (0.0, "nan"),
        ({}, {"a": 1}),
        (True, False),
        (0.0, None),
    ]:
        assert not same(found, right)


# Helpers that put a report's inputs into a batch


def grouped(inputs: dict[str, Any], **changes: Any) -> Batch:
    """One token a row; rewards and groups as the report gives them."""
    rows = {"rewards": inputs.get("rewards"), "group_ids": inputs.get("group_ids")} | changes
    rewards, group_ids = number(rows.pop("rewards")), rows.pop("group_ids")
    rows.setdefault("mask", [[1]] * len(rewards))
    rows.setdefault("logp", [[-1.0] * len(row) for row in rows["mask"]])
    return Batch.from_rows(rewards, group_ids, **rows)


def by_row(member, batch: Batch, **settings) -> torch.Tensor:
    return batch.to_rows(member(batch.rewards, batch.present, **settings))


def one_row(mask) -> torch.Tensor:
    """A mask `[1 1 T]` of a single response."""
    return flag(mask).view(1, 1, -1)


def losses(values, masks, member, **settings) -> tuple[torch.Tensor, torch.Tensor]:
    """Aggregated loss of padded rows of one prompt, and its derivative by each value."""
    values, masks = real(values).unsqueeze(0), flag(masks).unsqueeze(0)
    scale = member(masks.sum(-1), torch.ones(masks.shape[:-1]).bool(), **settings)
    values.requires_grad_()
    loss = aggregate(values, masks, scale)
    (slope,) = torch.autograd.grad(loss, values)
    return loss.detach(), slope[0]


def ragged(rows) -> tuple[list, list]:
    """Rows of values padded to one width, and the mask of what is real."""
    width = max(map(len, rows))
    return (
        [[*row, *[0.0] * (width - len(row))] for row in rows],
        [[1] * len(row) + [0] * (width - len(row)) for row in rows],
    )


# Advantages


@runs("adv-zero-variance-group")
def _(inputs):
    batch = grouped(inputs)
    found = by_row(group_std, batch, eps=0.0)
    return {"advantages": found, "all_finite": bool(found.isfinite().all())}


@runs("adv-singleton-group")
def _(inputs):
    for name in ("rloo", "grpo"):
        with refused("group 1", "size 1"):
            get(name).check(grouped(inputs, behavior_logp=[[-1.0]] * 3))
    return {}


@runs("adv-normalised-over-batch")
def _(inputs):
    batch = grouped(inputs)
    return {
        "centred": by_row(group_mean, batch),
        "normalised_ddof0": by_row(group_std, batch, ddof=0, eps=0.0),
    }


@runs("adv-key-per-trajectory")
def _(inputs):
    batch = grouped(inputs, group_ids=inputs["task_ids"])
    with refused("group u0", "size 1"):
        get("rloo")(grouped(inputs, group_ids=inputs["trajectory_ids"]))
    return {"centred": by_row(group_mean, batch), "n_groups": len(batch.group_ids)}


@runs("adv-contiguous-reshape")
def _(inputs):
    batch = grouped(inputs, group_size=inputs["n_per_group"])
    return {"centred": by_row(group_mean, batch)}


@runs("adv-unscorable-loo")
def _(inputs):
    batch = grouped(inputs)
    found = get("rloo")(batch)
    assert not batch.to_rows(found.own)[2].any()
    return {
        "advantages": by_row(leave_one_out, batch),
        "excluded_rows": torch.nonzero(~batch.to_rows(batch.present)).view(-1),
    }


@runs("adv-nan-poisons-group")
def _(inputs):
    with refused("row 1", "nan"):
        grouped(inputs)
    return {}


@runs("adv-ddof-and-eps")
def _(inputs):
    batch = grouped(inputs)
    return {
        f"ddof{ddof}_eps{label}": by_row(group_std, batch, ddof=ddof, eps=eps)
        for ddof in (0, 1)
        for label, eps in (("0", 0.0), ("1e-4", 1e-4))
    }


@runs("adv-inclusive-vs-loo-scale")
def _(inputs):
    p = float(inputs["policy"].rpartition("=")[2].strip("()"))
    coin = make("coin", Tree(2, None, 1), real([[[1 - p, p]]]).log(), real([[0.0, 1.0]]))

    def slope(advantage, **settings):
        estimator = replace(get("rloo"), advantage=use(advantage, **settings))
        return exact(estimator, coin, inputs["group_size"], "tuples").mean[0, 0, 1]

    return {
        "true_gradient": objective(coin).gradient[0, 0, 1],
        "leave_one_out": slope(leave_one_out),
        "inclusive_mean": slope(group_mean),
        "inclusive_mean_over_std_ddof0": slope(group_std, ddof=0, eps=0.0),
    }


@runs("adv-rows-vs-trajectories")
def _(inputs):
    # A trajectory is one response; its training rows are spans of its tokens.
    names = list(dict.fromkeys(row["trajectory"] for row in inputs["rows"]))
    spans = {n: [r for r in inputs["rows"] if r["trajectory"] == n] for n in names}
    batch = Batch.from_rows(
        [spans[n][0]["reward"] for n in names],
        ["one prompt"] * len(names),
        mask=[[1] * len(spans[n]) for n in names],
    )
    centered = by_row(group_mean, batch).tolist()
    share = sequence_mean(batch.lengths, batch.present) * len(names)
    return {
        "centred_by_trajectory": dict(zip(names, centered, strict=True)),
        "advantage_per_row": [a for n, a in zip(names, centered, strict=True) for _ in spans[n]],
        "weight_per_row_if_trajectories_count_equally": [
            w for n, w in zip(names, batch.to_rows(share).tolist(), strict=True) for _ in spans[n]
        ],
    }


@runs("adv-order-mismatch")
def _(inputs):
    logp, advantages = real(inputs["logprobs"]), real(inputs["advantages"])
    order = inputs["row_permutation_applied_to_the_batch"]
    loss = surrogate(advantages, logp)
    assert same(float(surrogate(advantages[order], logp[order])), float(loss))

    def rows(index):
        batch = Batch.from_rows(
            advantages[index].tolist(),
            [0] * len(index),
            mask=[[1]] * len(index),
            logp=[[x] for x in logp[index].tolist()],
        )
        own = get("reinforce")(batch).own
        return batch.to_rows(own)[:, 0]

    straight = list(range(len(order)))
    assert torch.equal(rows(straight)[order], rows(order))
    return {"loss": loss}


@runs("adv-whiten-masked")
def _(inputs):
    advantages, mask = real(inputs["advantages"]), flag(inputs["mask"])
    expected = CASES["adv-whiten-masked"]["expected"]
    found = [
        whiten(torch.where(mask, advantages, float(held)), mask, eps=0.0)
        for held in inputs["also_with_masked_value"]
    ]
    small = {
        name: {**case, "whitened": whiten(real(case["advantages"]), flag(case["mask"]), eps=0.0)}
        for name, case in expected.items()
        if isinstance(case, dict)
    }
    return {
        "whitened": found[0],
        "same_for_any_masked_value": all(torch.equal(f, found[0]) for f in found),
        **small,
    }


@runs("adv-gae-observation-gap")
def _(inputs):
    mask = flag(inputs["mask"])
    expected = CASES["adv-gae-observation-gap"]["expected"]["same_if_masked_value_is"]

    def run(values):
        return gae(
            real(inputs["rewards"]), values, mask, gamma=inputs["gamma"], lam=inputs["lambda"]
        )

    found = run(real(inputs["values"]))
    for held in expected:
        assert torch.equal(run(torch.where(mask, real(inputs["values"]), held)), found)
    return {"advantages": found, "same_if_masked_value_is": expected}


# Admission


@runs("adm-shaped-metric")
def _(inputs):
    batch = grouped(
        inputs,
        rewards=inputs["shaped_reward"],
        outcomes=inputs["raw_outcome"],
        behavior_logp=[[-1.0]] * 4,
    )
    found = get("dapo")(batch)
    assert not found.own.any()
    kept = zero_variance(
        batch.get(inputs["filter_on"].replace("raw_outcome", "outcomes")), batch.present
    )
    return {"keep_group": bool(kept.any())}


@runs("adm-mean-range-zero-var")
def _(inputs):
    low, high = inputs["range"]
    rewards = real(list(inputs["groups"].values()))
    kept = difficulty_band(rewards, rewards == rewards, low=low, high=high).all(-1)
    return {"keep": dict(zip(inputs["groups"], kept.tolist(), strict=True))}


@runs("adm-partial-group")
def _(inputs):
    batch = grouped(
        inputs, rewards=inputs["rewards_received"], group_size=inputs["group_size_asked"]
    )
    get("rloo")(batch)
    flagged = [g for g, short in zip(batch.group_ids, batch.missing.tolist(), strict=True) if short]
    return {
        "centred": by_row(group_mean, batch),
        "leave_one_out": by_row(leave_one_out, batch),
        "flagged_groups": flagged,
    }


@runs("adm-failed-rollout-pad-row")
def _(inputs):
    rewards = [
        None if bad else r for r, bad in zip(inputs["rewards"], inputs["failed"], strict=True)
    ]
    masks = [[] if bad else [1] for bad in inputs["failed"]]
    batch = grouped(inputs, rewards=rewards, mask=masks)
    admitted = batch.to_rows(get("group_mean")(batch).terms.reason) == 0
    return {
        "centred_of_real_rows": by_row(group_mean, batch)[admitted],
        "admitted_rows": torch.nonzero(admitted).view(-1),
    }


@runs("adm-slow-rollouts-dropped")
def _(inputs):
    slow, drop = float(inputs["policy"].rpartition("=")[2]), inputs["P(drop|slow)"]
    rewards = real([[inputs["reward"]["fast"], inputs["reward"]["slow"]]])
    logits = real([[[1 - slow, slow]]]).log()
    admitted = real([[[1 - slow, slow * (1 - drop)]]]).log()
    everyone = make("slow", Tree(2, None, 1), logits, rewards)
    selected = make("slow", Tree(2, None, 1), logits, rewards, behavior=admitted)

    def slope(problem):
        return exact(get("reinforce"), problem, 1, "prefix_tree").mean[0, 0, 1]

    def mean_reward(problem):
        return (problem.behavior_logp.exp()[:, 0] * rewards).sum()

    # Denominators keep what was rejected: the update is the conditional mean times P(admitted),
    # as it is where a time-out counts as a failure with reward 0.
    law = real([1 - slow, slow * (1 - drop), slow * drop])
    batch = Batch(
        rewards=rewards[0, [0, 1, 1]].view(3, 1, 1, 1).squeeze(-1),
        mask=torch.ones(3, 1, 1, 1).bool(),
        elapsed=real([1.0, 1.0, 900.0]).view(3, 1, 1),
    )
    dropped = replace(get("reinforce"), admission=(use(time_out),))(batch).own.view(-1)
    failed = replace(get("reinforce"), penalties=(use(timeout_failure),))(batch).own.view(-1)
    score = real([-slow, 1 - slow, 1 - slow])
    for own in (dropped, failed):
        kept = 1 - slow * drop
        assert same(float((law * own * score).sum()), float(slope(selected)) * kept)
    return {
        "no_drop": slope(everyone),
        "with_drop": slope(selected),
        "mean_reward_no_drop": mean_reward(everyone),
        "mean_reward_with_drop": mean_reward(selected),
    }


@runs("adm-rejected-sibling-in-baseline")
def _(inputs):
    rejected = inputs["rejected_rows"]
    everyone = grouped(inputs, truncated=[i in rejected for i in range(len(inputs["rewards"]))])
    some = [None if i in rejected else r for i, r in enumerate(inputs["rewards"])]

    def shown(batch):
        found = batch.to_rows(
            replace(get("rloo"), admission=(use(overlong),))(batch).terms.advantages
        )
        return [None if i in rejected else float(a) for i, a in enumerate(found[:, 0])]

    gone = replace(get("rloo"), admission=(use(overlong),))(everyone)
    assert not everyone.to_rows(gone.own)[rejected].any()
    return {
        "baseline_over_all": shown(everyone),
        "baseline_over_admitted": shown(
            grouped(inputs, rewards=some, truncated=[False] * len(some))
        ),
    }


@runs("stale-in-queue")
def _(inputs):
    versions = torch.tensor(
        [[[inputs["policy_version_at_first_token"], inputs["policy_version_at_last_token"]]]]
    )
    now, mask = inputs["policy_version_when_consumed"], torch.ones(1, 1, 2).bool()
    found = lag(versions, mask, now)
    return {
        "lag": int(found.oldest),
        "in_flight": int(found.in_flight),
        "in_queue": int(found.in_queue),
        "admit": bool(staleness_cap(versions, mask, now, max_lag=inputs["max_lag"])),
    }


@runs("stale-off-by-one")
def _(inputs):
    mask = torch.ones(1, 1, 2).bool()
    written = [torch.tensor([[[c["first"], c["last"]]]]) for c in inputs["cases"]]
    now = [c["consumed"] for c in inputs["cases"]]
    both = list(zip(written, now, strict=True))
    return {
        "lag": [int(lag(v, mask, n).oldest) for v, n in both],
        **{
            f"admit_if_max_{m}": [bool(staleness_cap(v, mask, n, max_lag=m)) for v, n in both]
            for m in (0, 1)
        },
    }


@runs("stale-mixed-versions")
def _(inputs):
    versions = torch.tensor([[inputs["token_policy_versions"]]])
    mask, now = one_row(inputs["mask"]), inputs["trainer_version"]
    found = lag(versions, mask, now)
    return {
        "max_lag_of_tokens": int(found.oldest),
        "token_weighted_mean_lag": float(found.mean),
        "n_versions": len(versions[mask].unique()),
        "admit": bool(staleness_cap(versions, mask, now, max_lag=inputs["max_lag"])),
    }


@runs("partial-rollout-mask-length")
def _(inputs):
    old, new = inputs["old_tokens"], inputs["new_tokens"]
    tokens = old + new
    faulty = CASES["partial-rollout-mask-length"]["faulty"]["mask"]
    logp = [[-1.0] * len(tokens)]
    with refused(f"length {len(tokens)}", f"mask {len(faulty)}"):
        Batch.from_rows([1.0], "a", mask=[faulty], logp=logp)
    mask = [int(not inputs["exclude_old"])] * len(old) + [1] * len(new)
    own = get("reinforce")(Batch.from_rows([1.0], "a", mask=[mask], logp=logp)).own
    return {"response_tokens": tokens, "mask": (own[0, 0] != 0).int()}


# Aggregation


@runs("agg-mean-of-means-accum")
def _(inputs):
    parts = inputs["micro_batches"]
    values, masks = ragged([part["loss"] for part in parts])
    loss, slope = losses(values, masks, token_mean)
    # Split and in any order: each micro-batch brings its slice of the whole batch's scale.
    batch = Batch(
        rewards=torch.ones(len(parts), 1).double(),
        mask=flag(masks).unsqueeze(1),
        logp=-real(values).unsqueeze(1),
    )
    estimator = replace(get("reinforce"), aggregation=use(token_mean))
    terms = batch_terms(estimator, batch)
    for order in ([0, 1], [1, 0]):
        total = sum(
            float(
                surrogate(
                    token_coefficients(estimator, terms.select([i]), batch.select([i])).own,
                    batch.logp[[i]],
                )
            )
            for i in order
        )
        assert same(total, float(loss))
    return {"loss": loss, "weight_per_token": slope[flag(masks)]}


@runs("agg-double-division")
def _(inputs):
    count = inputs["tokens_in_window"] // inputs["micro_batches"]
    mask = torch.ones(inputs["micro_batches"], 1, count).bool()
    values = real(inputs["micro_batch_token_loss_sums"])[:, None, None] / count
    scale = token_mean(mask.sum(-1), mask.any(-1))
    parts = [
        aggregate(values[[i]].expand(1, 1, count), mask[[i]], scale[[i]]) for i in range(len(mask))
    ]
    return {"total_loss": sum(float(part) for part in parts)}


@runs("agg-truncated-in-denominator")
def _(inputs):
    # Left out of the mask, a truncated response counts in neither numerator nor denominator.
    mask = flag(inputs["length_mask"]) & ~flag(inputs["truncated"]).unsqueeze(-1)
    loss, slope = losses(inputs["token_loss"], mask.tolist(), token_mean)
    return {"loss": loss, "tokens": round(1 / float(slope.max()))}


@runs("agg-all-masked-batch")
def _(inputs):
    second = inputs["then_second_micro_batch"]
    loss, slope = losses(inputs["token_loss"], inputs["mask"], token_mean)
    both, _ = losses(
        inputs["token_loss"] + second["token_loss"], inputs["mask"] + second["mask"], token_mean
    )
    return {"loss": loss, "gradient": slope, "loss_with_second": both}


@runs("agg-empty-sequence")
def _(inputs):
    all_rows, _ = losses(inputs["token_loss"], inputs["mask"], sequence_mean)
    mask, values = flag(inputs["mask"]), real(inputs["token_loss"])
    scale = sequence_mean(mask.sum(-1).unsqueeze(0), mask.any(-1).unsqueeze(0))
    filled = aggregate(values.unsqueeze(0), mask.unsqueeze(0), scale)
    return {"count_only_nonempty": filled, "count_all_rows": all_rows}


@runs("agg-dp-rank-normaliser")
def _(inputs):
    values, masks = ragged([rank["token_loss"] for rank in inputs["ranks"]])
    loss, slope = losses(values, masks, token_mean)
    mask = flag(masks).unsqueeze(1)
    scale = token_mean(mask.sum(-1), mask.any(-1))
    ranks = len(values)
    parts = [
        float(aggregate(real(values)[[i]].unsqueeze(1), mask[[i]], scale[[i]])) * ranks
        for i in range(ranks)
    ]
    assert same(sum(parts) / ranks, float(loss))
    return {
        "loss": loss,
        "per_rank_loss_before_averaging": parts,
        "weight_per_token": slope[flag(masks)],
    }


@runs("agg-numerator-unmasked")
def _(inputs):
    loss, slope = losses(inputs["token_loss"], inputs["mask"], token_mean)
    return {"loss": loss, "d_loss_d_token_loss": slope}


@runs("agg-length-bias-definitions")
def _(inputs):
    advantages = real(inputs["advantages"])
    per_token = [[-a] * n for a, n in zip(advantages.tolist(), inputs["lengths"], strict=True)]
    values, masks = ragged(per_token)

    def row(member, **settings):
        loss, slope = losses(values, masks, member, **settings)
        return {"loss": loss, "token_weights": slope[:, 0]}

    return {
        "sequence_mean": row(sequence_mean),
        "token_mean": row(token_mean),
        "sum_over_constant": row(constant_length, length=inputs["L_max"]),
    }


@runs("agg-drgrpo-constant")
def _(inputs):
    found = []
    for width in inputs["also_padded_to"]:
        values, masks = (
            [row + [0] * (width - len(row)) for row in inputs[name]]
            for name in ("token_loss", "mask")
        )
        loss, _ = losses(values, masks, constant_length, length=inputs["L_max"])
        found.append(float(loss))
    return {"loss": found[0], "same_for_every_padding": len(set(found)) == 1}


@runs("agg-seq-loss-times-mask")
def _(inputs):
    per_token = [
        [-r * a] * n
        for r, a, n in zip(
            inputs["sequence_ratio"], inputs["advantages"], inputs["lengths"], strict=True
        )
    ]
    loss, _ = losses(*ragged(per_token), sequence_mean)
    return {"loss": loss}


@runs("agg-shared-prefix-double-count")
def _(inputs):
    prefix = inputs["shared_prefix_tokens"]
    case = CASES["agg-shared-prefix-double-count"]
    masks = case["expected"]["masks"]
    tokens = [prefix + branch for branch in inputs["branches"]]
    values = [[inputs["token_loss"][str(t)] for t in row] for row in tokens]
    loss, slope = losses(values, masks, token_mean)
    doubled, _ = losses(values, [[1] * len(row) for row in tokens], token_mean)
    assert same(float(doubled), case["faulty"]["loss"])
    return {"tokens": round(1 / float(slope.max())), "loss": loss}


# Correction


@runs("is-ratio-overflow")
def _(inputs):
    results = {}
    advantages = real(inputs["advantages"]).unsqueeze(0)
    correction = Correction(reach=use(token), map=use(truncate, cap=inputs["cap"]))
    for behaviour in ("behaviour_logp", "behaviour_logp_for_float64_code"):
        for masks in inputs["mask_variants"]:
            mask = flag(masks).unsqueeze(0)
            logp = real(inputs["logp"]).unsqueeze(0).requires_grad_()
            x = log_ratio(logp.detach(), real(inputs[behaviour]).unsqueeze(0), mask)
            weight = correction.weights(x, mask, advantages)
            loss = surrogate(weight * advantages, logp)
            loss.backward()
            label = "".join(map(str, masks[0]))
            results[f"loss_mask_{label}"] = loss.detach()
            results[f"d_loss_d_logp_mask_{label}"] = logp.grad[0]
            if label == "11":
                results["weight"] = weight[0]
            results["all_finite"] = bool(weight.isfinite().all() and logp.grad.isfinite().all())
            assert results["all_finite"]
    return results


@runs("is-masked-nonfinite")
def _(inputs):
    found = []
    mask = flag(inputs["mask"]).unsqueeze(0)
    advantages = real(inputs["advantages"]).unsqueeze(0)
    scale = token_mean(mask.sum(-1), mask.any(-1))
    for old in inputs["old_logp_variants"]:
        logp = real(inputs["logp"]).unsqueeze(0).requires_grad_()
        x = log_ratio(logp, real(old).unsqueeze(0), mask)
        loss = -aggregate(clip_objective(x, advantages), mask, scale)
        loss.backward()
        batch = Batch(
            rewards=torch.ones(1, 1).double(),
            mask=mask,
            logp=logp.detach(),
            behavior_logp=real(old).unsqueeze(0),
        ).validate()
        own = (
            Correction(reach=use(token), map=use(clip)).weights(
                log_ratio(batch.logp, batch.behavior_logp, mask), mask, advantages
            )
            * advantages
            * scale.unsqueeze(-1)
        )
        assert torch.equal(-own, logp.grad)
        with refused("behavior_logp", "token 1"):
            replace(batch, mask=torch.ones_like(mask)).validate()
        metric = masked_mean(k3(x.detach()), mask)
        found.append({"loss": loss.detach(), "kl_metric": metric, "d_loss_d_logp": logp.grad[0]})
    first, *others = map(plain, found)
    assert all(same(other, first) for other in others)
    return {**first, "loss": first["loss"]}


@runs("is-gspo-mask-leak")
def _(inputs):
    mask, x = flag(inputs["mask"]).unsqueeze(0), real(inputs["log_ratio"]).unsqueeze(0)
    weight = Correction(reach=use(geometric), map=use(ratio)).weights(x, mask, torch.ones(1, 1, 1))
    advantages = real(inputs["advantages"]).unsqueeze(0)
    return {
        "sequence_ratio": weight[0, 0, 0],
        "sequence_advantage": masked_mean(advantages, mask),
        "gradient_at_masked": weight[~mask].abs().sum(),
    }


def single(inputs, *, estimator, **policies) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Loss, its derivative and the weight of one token with a given advantage."""
    batch = Batch(
        rewards=real([[inputs["advantage"]]]),
        mask=torch.ones(1, 1, 1).bool(),
        **{name: real([[[value]]]) for name, value in policies.items()},
    )
    found = estimator(batch)
    logp = batch.logp.clone().requires_grad_()
    loss = surrogate(found.own, logp)
    loss.backward()
    return loss.detach(), logp.grad.squeeze(), found.weights.squeeze()


def weighted(*corrections: Correction):
    return replace(get("reinforce"), corrections=corrections)


@runs("is-weight-not-detached")
def _(inputs):
    loss, slope, _ = single(
        inputs,
        estimator=weighted(Correction(reach=use(token), map=use(ratio))),
        logp=inputs["logp"],
        behavior_logp=inputs["behaviour_logp"],
    )
    return {"loss": loss, "d_loss_d_logp": slope}


@runs("is-wrong-policy-in-tis")
def _(inputs):
    cap, eps = inputs["weight_cap"], inputs["eps"]
    tis = Correction(reach=use(token), map=use(truncate, cap=cap), numerator="proximal_logp")
    moved = Correction(reach=use(token), map=use(ratio), denominator="proximal_logp")
    clipped = replace(moved, map=use(clip, clip_low=eps, clip_high=eps))
    policies = {
        "logp": inputs["current"],
        "proximal_logp": inputs["proximal"],
        "behavior_logp": inputs["behaviour"],
    }
    correction = single(inputs, estimator=weighted(tis), **policies)[2]
    policy_ratio = single(inputs, estimator=weighted(moved), **policies)[2]
    _, slope, both = single(inputs, estimator=weighted(tis, moved), **policies)
    assert same(float(both), float(correction * policy_ratio))
    assert single(inputs, estimator=weighted(tis, clipped), **policies)[1] == 0 != slope
    value = clip_objective(
        policy_ratio.log(), real(inputs["advantage"]), clip_low=eps, clip_high=eps
    )
    return {"correction": correction, "policy_ratio": policy_ratio, "loss": -correction * value}


@runs("is-rejected-in-denominator")
def _(inputs):
    low, high = inputs["keep_if_ratio_in"]
    x, mask = real(inputs["log_ratio"]), flag(inputs["mask"])
    terms = real(inputs["advantage_times_score"])
    kept = keep(x, terms, low=low, high=high)
    weight = band(x, terms, low=low, high=high)
    values = (weight * terms).view(1, 1, -1)

    def over(counted):
        lengths = counted.sum().view(1, 1)
        scale = token_mean(lengths, torch.ones(1, 1).bool())
        return aggregate(values, mask.view(1, 1, -1), scale)

    return {
        "kept": kept.int(),
        "numerator": values.sum(),
        "over_original_tokens": over(mask),
        "over_kept_tokens": over(mask & (kept > 0)),
    }


@runs("is-sequence-sum-vs-mean")
def _(inputs):
    x, mask = real(inputs["log_ratio"]), flag(inputs["mask"])

    def weight(reach):
        return Correction(reach=use(reach), map=use(ratio)).weights(x, mask, torch.ones(1))

    return {
        "trajectory": weight(trajectory)[0],
        "geometric_mean": weight(geometric)[0],
        "per_token": weight(token),
    }


@runs("is-token-vs-trajectory-exact")
def _(inputs):
    def logits(named):
        return real([[[0.0, named[key]] for key in ("t1", "t2|0", "t2|1")]])

    rewards = real([[inputs["reward"][key] for key in ("00", "01", "10", "11")]])
    problem = make(
        "two steps",
        Tree(inputs["vocab"], None, inputs["steps"]),
        logits(inputs["target_logits"]),
        rewards,
        behavior=logits(inputs["behaviour_logits"]),
    )

    def slope(reach, map_=ratio, aggregation=token_sum):
        estimator = replace(
            get("reinforce", baseline=float(inputs["baseline"])),
            corrections=(Correction(reach=use(reach), map=use(map_)),),
            aggregation=use(aggregation),
        )
        return exact(estimator, problem, 1).mean[0, :, 1]

    plain_ = exact(get("reinforce"), problem, 1, "tuples").mean[0, :, 1]
    return {
        "true_gradient": objective(problem).gradient[0, :, 1],
        "trajectory_is": slope(trajectory),
        "token_is": slope(token),
        "geometric_mean_is": slope(geometric, aggregation=sequence_mean),
        "no_correction": plain_,
    }


@runs("is-recomputed-denominator")
def _(inputs):
    eps = inputs["eps"]
    estimator = weighted(Correction(reach=use(token), map=use(clip, clip_low=eps, clip_high=eps)))
    with refused("behavior_logp"):
        single(inputs, estimator=estimator, logp=inputs["current_logp"])
    policies = {"logp": inputs["current_logp"], "behavior_logp": inputs["behaviour_logp"]}
    slope = single(inputs, estimator=estimator, **policies)[1]
    unclipped = weighted(Correction(reach=use(token), map=use(ratio)))
    found = single(inputs, estimator=unclipped, **policies)[2]
    value = clip_objective(found.log(), real(inputs["advantage"]), clip_low=eps, clip_high=eps)
    return {"ratio_to_behaviour": found, "objective": value, "d_objective_d_logp": -slope}


@runs("is-metric-after-truncation")
def _(inputs):
    x, mask = real(inputs["log_ratio"]), flag(inputs["mask"])
    weight = truncate(x, x, cap=inputs["cap"])
    second = real(inputs["second"]["ratio"])
    return {
        "mean_ratio_raw": masked_mean(x.exp(), mask),
        "mean_weight_used": masked_mean(weight, mask),
        "fraction_capped": changed_share(weight, x, mask),
        "second_mean_ratio": masked_mean(second, ~flag(inputs["second"]["rejected"])),
    }


@runs("clip-min-before-multiply")
def _(inputs):
    e, a = real(inputs["ratio"]).log(), real(inputs["advantages"])
    margins = {"clip_low": inputs["eps"], "clip_high": inputs["eps"]}
    return {
        "objective": clip_objective(e, a, **margins),
        "gradient_flows": clip(e, a, **margins) * a != 0,
    }


@runs("clip-dual-sign")
def _(inputs):
    e, a = real(inputs["ratio"]).log(), real(inputs["advantages"])
    settings = {"clip_low": inputs["eps"], "clip_high": inputs["eps"], "cap": inputs["c"]}
    return {
        "objective": dual_clip_objective(e, a, **settings),
        "gradient_flows": dual_clip(e, a, **settings) * a != 0,
    }


@runs("clip-unknown-parameter")
def _(inputs):
    unknown = next(name for name in inputs["call"] if name not in inputs["accepted_names"])
    with refused(unknown, error=TypeError):
        use(dual_clip, **{unknown: inputs["call"][unknown]})
    with refused(unknown, error=TypeError):
        get("grpo", **{unknown: inputs["call"][unknown]})
    return {}


@runs("clip-negative-unbounded")
def _(inputs):
    e, a = real([inputs["ratio"]]).log(), real([inputs["advantage"]])
    margins = {"clip_low": inputs["eps"], "clip_high": inputs["eps"]}
    bounded = {**margins, "cap": inputs["delta"]}
    return {
        "loss_standard": -clip_objective(e, a, **margins)[0],
        "d_loss_d_logp_standard": -(clip(e, a, **margins) * a)[0],
        "loss_two_sided": -dual_clip_objective(e, a, **bounded)[0],
        "d_loss_d_logp_two_sided": -(dual_clip(e, a, **bounded) * a)[0],
    }


@runs("clip-ratio-one-zero-loss")
def _(inputs):
    batch = Batch.from_rows(
        inputs["advantages"],
        [0] * len(inputs["advantages"]),
        mask=[[1] * n for n in inputs["lengths"]],
        logp=[[x] for x in inputs["logp"]],
        behavior_logp=[[x] for x in inputs["old_logp"]],
    )
    eps = inputs["eps"]
    estimator = weighted(Correction(reach=use(token), map=use(clip, clip_low=eps, clip_high=eps)))
    found = estimator(batch)
    logp = batch.logp.clone().requires_grad_()
    surrogate(found.own, logp).backward()
    x = log_ratio(batch.logp, batch.behavior_logp, batch.mask)
    value = clip_objective(x, found.terms.advantages, clip_low=eps, clip_high=eps)
    return {
        "loss": -aggregate(value, batch.mask, found.terms.scale),
        "clip_fraction": changed_share(found.weights, x, batch.mask),
        "d_loss_d_logp": batch.to_rows(logp.grad)[:, 0],
    }


@runs("cispo-gradient-beyond-cap")
def _(inputs):
    estimator = weighted(Correction(reach=use(token), map=use(truncate, cap=inputs["cap"])))
    policies = {"logp": inputs["logp"], "behavior_logp": inputs["old_logp"]}
    loss, slope, weight = single(inputs, estimator=estimator, **policies)
    unbounded = weighted(Correction(reach=use(token), map=use(ratio)))
    return {
        "ratio": single(inputs, estimator=unbounded, **policies)[2],
        "weight": weight,
        "loss": loss,
        "d_loss_d_logp": slope,
    }


@runs("topr-taper")
def _(inputs):
    rows = zip(inputs["sum_log_ratio"], inputs["lengths"], strict=True)
    x = real([[total / n] * n for total, n in rows])
    mask, a = torch.ones(x.shape).bool(), real(inputs["advantages"]).unsqueeze(-1)

    def weight(reach):
        return Correction(reach=use(reach), map=use(taper)).weights(x, mask, a)[:, 0]

    return {
        "weight_product": weight(trajectory),
        "weight_length_normalised": weight(geometric),
    }


# Divergences, references, entropy


@runs("kl-k1-k3-loss-gradient")
def _(inputs):
    p = real(inputs["policy"])
    x = p.log() - real(inputs["reference"]).log()

    def descent(coefficients):
        """Gradient of the penalty by the logits: minus the mean ascent direction."""
        return -pull_back((p * coefficients).unsqueeze(0), p.unsqueeze(0))[0]

    logits = p.log().requires_grad_()
    logp = logits.log_softmax(-1)
    values = (logp.exp() * k1(logp - real(inputs["reference"]).log())).sum()
    (full,) = torch.autograd.grad(values, logits)
    return {
        "KL_policy_reference": (p * k3(x)).sum(),
        "exact_gradient": full,
        "k1_as_loss": descent(loss_k1(x, coefficient=1.0)),
        "k2_as_loss": descent(loss_k2(x, coefficient=1.0)),
        "k3_as_loss": descent(loss_k3(x, coefficient=1.0)),
        "k1_as_reward": descent(reward_k1(x, coefficient=1.0)),
        "forward_KL_gradient": descent(real(inputs["reference"]) / p),
    }


@runs("kl-no-grad")
def _(inputs):
    batch = Batch(
        rewards=torch.zeros(1, 1).double(),
        mask=torch.ones(1, 1, 1).bool(),
        logp=real([[[inputs["logp"]]]]),
        reference_logp=real([[[inputs["ref_logp"]]]]),
    )
    penalty = {"k3": loss_k3}[inputs["estimator"]]
    found = replace(get("reinforce"), penalties=(use(penalty, coefficient=inputs["beta"]),))(batch)
    logp = batch.logp.clone().requires_grad_()
    surrogate(found.own, logp).backward()
    return {
        "kl": k3(batch.logp - batch.reference_logp).squeeze(),
        "d_loss_d_logp": logp.grad.squeeze(),
    }


@runs("kl-outside-mask")
def _(inputs):
    values = real(inputs["token_pg_loss"]) + inputs["beta"] * real(inputs["token_kl"])
    loss, _ = losses([values.tolist()], [inputs["mask"]], token_mean)
    return {"loss": loss}


@runs("kl-k3-overflow")
def _(inputs):
    for name in ("ref_minus_logp", "and_for_float64_code"):
        x = (-real(inputs[name])).requires_grad_()
        value = k3(x)
        value.sum().backward()
        finite = bool(x.grad.isfinite().all() and loss_k3(x.detach()).isfinite().all())
        assert value.isfinite().all() and finite
    return {"kl": value.detach(), "gradient_finite": finite}


@runs("kl-tool-tokens-in-return")
def _(inputs):
    mask = flag(inputs["mask"])
    rewards = reward_k1(real(inputs["kl"]), coefficient=inputs["beta"])
    rewards[-1] += inputs["terminal_reward"]
    found = returns_to_go(rewards, mask, gamma=inputs["gamma"])
    return {
        "return_token_0_one_discount_per_trainable_token": found[0],
        "return_token_3": found[3],
    }


@runs("ref-adapter-disabled")
def _(inputs):
    start, base = (
        real(inputs[name]).log_softmax(-1) for name in ("start_policy_logits", "base_logits")
    )

    def divergence(reference):
        return (start.exp() * k3(start - reference)).sum()

    wrong = CASES["ref-adapter-disabled"]["faulty"]["kl_at_step_0"]
    assert same(float(divergence(base)), wrong)
    return {"kl_at_step_0": divergence(start)}


@runs("ent-sign")
def _(inputs):
    logp, coefficient = real(inputs["probs"]).log(), inputs["coefficient"]
    bonus = (logp.exp() * entropy(logp, coefficient=coefficient)).sum()
    # A policy that leans to one side is pushed to the other.
    leaning = real([[0.8, 0.2]]).log()
    push = pull_back(leaning.exp() * entropy(leaning, coefficient=coefficient), leaning.exp())
    assert push[0, 0] < 0 < push[0, 1]
    return {
        "entropy": (logp.exp() * entropy(logp, coefficient=1.0)).sum(),
        "loss_contribution": -bonus,
        "estimate_from_sample": entropy(real(inputs["sampled_logp"]), coefficient=1.0)[0],
    }


# Backend, as far as the record and the toy reach


@runs("lp-temperature")
def _(inputs):
    t, sampled = inputs["temperature"], inputs["sampled_token"]
    tree, rewards = Tree(2, None, 1), torch.zeros(1, 2)
    model = make("model", tree, real([[inputs["logits"]]]), rewards)
    sampler = with_behavior(model, "temperature", t=t)
    trained = make("at T", tree, real([[inputs["logits"]]]) / t, rewards)
    x = log_ratio(trained.logp, sampler.behavior_logp, torch.ones(1, 1, 2).bool())
    return {
        "logp_at_T": sampler.behavior_logp[0, 0, sampled],
        "ratio": x.exp()[0, 0, sampled],
    }


@runs("lp-top-p-renormalised")
def _(inputs):
    sampled, probs = inputs["sampled_token"], real(inputs["probs"])
    tree, rewards = Tree(len(probs), None, 1), torch.ones(1, len(probs))
    model = make("model", tree, probs.log().view(1, 1, -1), rewards)
    sampler = with_behavior(model, "top_p", p=inputs["top_p"])
    logp = sampler.behavior_logp[0, 0]
    # The trainer's distribution on the same support, and the mass that a study reports as lost.
    support = model.logp[0, 0].masked_fill(~logp.isfinite(), -torch.inf).log_softmax(-1)
    lost = float(objective(sampler).unsupported_mass)
    assert same(float((model.logp[0, 0, sampled] - logp[sampled]).exp()), 1 - lost)
    return {
        "behaviour_logp": logp[sampled],
        "trainer_logp_same_support": support[sampled],
        "ratio": (support - logp)[sampled].exp(),
    }


@runs("lp-bf16")
def _(inputs):
    exact_ = real(inputs["logp_float64"])
    stored = exact_.to({"bf16": torch.bfloat16}[inputs["stored_as"]])
    mask = torch.ones(len(exact_)).bool()
    return {
        "ratio_if_both_fp32_or_better": log_ratio(exact_.float(), exact_.float(), mask).exp(),
        "bf16_value": stored.double(),
        "ratio_bf16": log_ratio(exact_, stored, mask).exp(),
    }


@runs("lp-length-mismatch")
def _(inputs):
    ids, logp = inputs["token_ids"], inputs["behaviour_logprobs"]
    with refused(str(len(ids)), str(len(logp)), "behavior_logp"):
        Batch.from_rows([1.0], "a", mask=[[1] * len(ids)], behavior_logp=[logp])
    return {}


@runs("lp-none-or-nan")
def _(inputs):
    for held in (None, float("nan")):
        row = [held if x is None else x for x in inputs["behaviour_logprobs"]]
        with refused("behavior_logp", "1"):
            Batch.from_rows(
                [1.0], "a", mask=[inputs["mask"]], logp=[inputs["logp"]], behavior_logp=[row]
            )
    return {}


@runs("mask-pad-equals-eos")
def _(inputs):
    # The record pads rows by their lengths and never looks at ids.
    lengths = inputs["completion_lengths"]
    batch = Batch.from_rows([1.0, 0.0], "aa", mask=[[1] * n for n in lengths])
    return {"mask": batch.to_rows(batch.mask).int()}


def test_what_a_constant_does_not_need():
    """A group of one is allowed where nothing is compared."""
    batch = Batch.from_rows([1.0], "a", mask=[[1]])
    assert constant(batch.rewards, batch.present).item() == 1.0
