"""Metrics: plain numpy gives the same figures, parts add up, and nothing overflows."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from checks import assert_apart, assert_close, refused
from hypothesis import given, settings
from hypothesis import strategies as st
from strategies import batches

from windage.estimators import moments as sums
from windage.estimators.batch import Batch
from windage.estimators.catalogue import get
from windage.estimators.diagnostics import changed_share, effective_log_ratio
from windage.estimators.estimator import coefficients
from windage.estimators.metrics import METRICS, NAMES, finish, measure, moments
from windage.estimators.metrics import given as passed
from windage.llm.update import _by_response

ENTRIES = ("grpo", "cispo", "topr", "gspo", "icepop", "trajectory_is", "reinforce", "dapo")
LOW, HIGH = 0.5, 2.0
GIVEN = {m.name for m in METRICS if m.keys[0] == "sum/given"}


def told(batch: Batch, entry: str = "grpo") -> dict:
    """What a trainer knows of a batch beside its fields."""
    made = coefficients(get(entry), batch)
    square = torch.as_tensor(batch.rewards)
    return {
        "coefficients": made,
        "effective": effective_log_ratio(get(entry), batch, made.terms.advantages),
        "entropy": torch.where(batch.mask, batch.logp.square(), 0.0),
        "invalid": square > 0.5,
        "format": square < -0.5,
    }


def ess(w: np.ndarray) -> float:
    return w.sum() ** 2 / (len(w) * (w**2).sum()) if (w > 0).any() else 0.0


def mismatch(end: str, v: np.ndarray) -> dict[str, float]:
    """Of log-ratios of tokens or responses."""
    if not len(v):
        return {}
    r = np.exp(v)
    return {
        f"mismatch/k1{end}": -v.mean(),
        f"mismatch/k2{end}": (v**2).mean() / 2,
        f"mismatch/k3{end}": (r - 1 - v).mean(),
        f"mismatch/chi2{end}": (r**2).mean() - 1,
        f"mismatch/abs_log_ratio{end}": abs(v).mean(),
        f"mismatch/abs_log_ratio_max{end}": abs(v).max(),
        f"ratio/mean{end}": r.mean(),
        f"ratio/std{end}": r.std(),
        f"ratio/max{end}": r.max(),
        f"ratio/min{end}": r.min(),
        f"ratio/ess{end}": ess(r),
        f"ratio/above{end}": (r > HIGH * (1 + 1e-9)).mean(),
        f"ratio/below{end}": (r < LOW * (1 - 1e-9)).mean(),
    }


def perplexities(lp: list[np.ndarray], lq: list[np.ndarray]) -> dict[str, float]:
    """Of log-probabilities of each response under policy and sampler."""
    mine, theirs = (np.array([i.mean() for i in v]) for v in (lp, lq))
    p, q = np.exp(np.concatenate(lp)), np.exp(np.concatenate(lq))
    d, flat = theirs - mine, [p.std() <= 1e-7, q.std() <= 1e-7]
    return {
        "perplexity/policy": np.exp(-mine).mean(),
        "perplexity/sampler": np.exp(-theirs).mean(),
        "perplexity/log_policy": -mine.mean(),
        "perplexity/log_sampler": -theirs.mean(),
        "perplexity/log_difference": d.mean(),
        "perplexity/log_difference_abs": abs(d).mean(),
        "perplexity/log_difference_max": d.max(),
        "perplexity/log_difference_min": d.min(),
        "perplexity/ratio": np.exp(d).mean(),
        "probability/difference_mean": abs(p - q).mean(),
        "probability/difference_std": abs(p - q).std(),
        "probability/difference_max": abs(p - q).max(),
        "probability/correlation": float(all(flat)) if any(flat) else np.corrcoef(p, q)[0, 1],
    }


def ages(versions: list[np.ndarray], now: int) -> dict[str, float]:
    """Of the versions of each response's tokens."""
    old = np.array([now - i.min() for i in versions])
    new = np.array([now - i.max() for i in versions])
    quantiles = {
        f"lag/p{n}": np.quantile(old, n / 100, method="inverted_cdf") for n in (50, 90, 99)
    }
    return quantiles | {
        "lag/token": now - np.concatenate(versions).mean(),
        "lag/mean": old.mean(),
        "lag/max": old.max(),
        "lag/in_queue": new.mean(),
        "lag/in_flight": (old - new).mean(),
    }


def responses(batch: Batch, reason: np.ndarray, there: list) -> dict[str, float]:
    """Of rewards, verdicts and lengths."""
    reward, outcome, cut = (
        np.array([value.numpy()[i] for i in there])
        for value in (batch.rewards, batch.get("outcomes"), batch.truncated)
    )
    length = np.array([batch.mask.numpy()[i].sum() for i in there])
    return {
        "reward/mean": reward.mean(),
        "reward/std": reward.std(),
        "reward/outcome": outcome.mean(),
        "reward/invalid": (reward > 0.5).mean(),
        "reward/format": (reward < -0.5).mean(),
        "length/mean": length.mean(),
        "length/std": length.std(),
        "length/max": length.max(),
        "length/truncated": cut.mean(),
        "admission/admitted": np.mean([reason[i] == 0 for i in there]),
    }


def plain(batch: Batch, others: dict) -> dict[str, float]:
    """Every figure once more, from numpy, response by response."""
    mask, made = batch.mask.numpy(), others["coefficients"]
    there = [tuple(i) for i in np.argwhere(batch.present.numpy())]
    real = [i for i in there if mask[i].any()]

    def each(value: torch.Tensor) -> list[np.ndarray]:
        return [value.numpy()[i][mask[i]] for i in real]

    out = groups(batch)
    if there:
        out |= responses(batch, made.terms.reason.numpy(), there)
    if not real:
        return out
    lp, lq, w = each(batch.logp), each(batch.behavior_logp), each(made.weights)
    s = np.array([(i - j).sum() for i, j in zip(lp, lq, strict=True)])
    v, all_w = np.array([i.mean() for i in w]), np.concatenate(w)
    c, square = (np.concatenate(each(x)) for x in (made.own, batch.probability_square))
    out |= mismatch("", np.concatenate(lp) - np.concatenate(lq)) | mismatch("_response", s)
    out |= perplexities(lp, lq) | ages(each(batch.versions), batch.current_version)
    return (
        out
        | clips(batch, others, real)
        | {
            "weight/mean": all_w.mean(),
            "weight/std": all_w.std(),
            "weight/max": all_w.max(),
            "weight/min": all_w.min(),
            "weight/ess": ess(all_w),
            "weight/ess_response": ess(v),
            "weight/mean_response": v.mean(),
            "weight/max_response": v.max(),
            "update/coefficients": abs(c).mean(),
            "update/power": (
                c**2 * np.maximum(1 - 2 * np.exp(np.concatenate(lp)) + square, 0)
            ).sum(),
            "policy/entropy": np.concatenate(each(others["entropy"])).mean(),
            "policy/probability_square": square.mean(),
        }
    )


def clips(batch: Batch, others: dict, real: list) -> dict[str, float]:
    """Shares of what was clipped, in a loop."""
    made, hits, masses = others["coefficients"], 0, {1: 0.0, -1: 0.0}
    total, count = 0.0, 0
    for p, g in real:
        kept = made.terms.reason[p, g] == 0
        a = float(made.terms.advantages[p, g, 0]) * float(made.terms.scale[p, g])
        for t in range(batch.mask.shape[-1]):
            if not batch.mask[p, g, t]:
                continue
            count += 1
            low = float(made.weights[p, g, t]) < math.exp(others["effective"][p, g, t]) * (1 - 1e-9)
            hits += bool(low and kept)
            total += abs(a) * bool(kept)
            if low and kept and a:
                masses[1 if a > 0 else -1] += abs(a)
    out = {"clip/share": hits / count} if count else {}
    if total:
        out |= {"clip/mass_positive": masses[1] / total, "clip/mass_negative": masses[-1] / total}
    return out


def groups(batch: Batch) -> dict[str, float]:
    """Shares of groups and of responses asked for."""
    out, found, flat, missing = {}, 0, 0, 0
    for p in range(batch.rewards.shape[0]):
        here = batch.get("outcomes")[p][batch.present[p]].tolist()
        missing += batch.rewards.shape[1] - len(here)
        if len(here) > 1:
            found, flat = found + 1, flat + (len(set(here)) == 1)
    if found:
        out["group/constant"] = flat / found
    out["group/missing"] = missing / batch.present.numel()
    return out


def same(name: str, found: float, wanted: float, relative: float = 1e-11) -> None:
    """Equal; spreads and correlations, differences of sums of squares, to 1e-6 of their scale."""
    if name.endswith(("std", "std_response", "correlation")):
        assert abs(found - wanted) <= 1e-6 * (1 + abs(wanted)), (name, found, wanted)
    else:
        assert_close(found, wanted, relative=relative)


@settings(max_examples=25, deadline=None)
@given(batches(), st.sampled_from(ENTRIES))
def test_plain_numpy_gives_the_same_figures(batch, entry):
    batch = batch.validate()
    others = told(batch, entry)
    found, wanted = measure(batch, **others), plain(batch, others)
    extra = {n for n in found if n.startswith("admission/rejected/")}
    assert set(found) - extra == set(wanted)
    for name, value in wanted.items():
        same(name, found[name], value, 1e-9)
    assert (
        sum(found[n] for n in extra) == pytest.approx(1 - found["admission/admitted"])
        if ("admission/admitted" in found)
        else not extra
    )


def test_every_metric_of_the_table_is_among_them():
    generator = torch.Generator().manual_seed(1)
    logp = -torch.rand(3, 4, 5, generator=generator).double()
    batch = Batch(
        rewards=torch.randint(0, 2, (3, 4), generator=generator).double(),
        mask=torch.ones(3, 4, 5).bool(),
        present=torch.ones(3, 4).bool(),
        logp=logp,
        behavior_logp=logp - 0.1,
        versions=torch.ones(3, 4, 5).long(),
        probability_square=logp.exp(),
        truncated=torch.zeros(3, 4).bool(),
        current_version=4,
    )
    found = measure(batch, **told(batch))
    assert {n for n in NAMES} - GIVEN == {n for n in found if n in NAMES}
    assert len(NAMES) == len(METRICS)


def halves(value: dict, where: torch.Tensor) -> dict:
    """What a trainer knows of some groups of a batch."""
    made = value["coefficients"]
    part = replace(
        made, own=made.own[where], weights=made.weights[where], terms=made.terms.select(where)
    )
    return {**{k: v[where] for k, v in value.items() if k != "coefficients"}, "coefficients": part}


@settings(max_examples=25, deadline=None)
@given(batches(prompts=(2, 3)), st.sampled_from(ENTRIES), st.integers(0, 6))
def test_parts_add_up_to_the_whole(batch, entry, cut):
    batch = batch.validate()
    others = told(batch, entry)
    count = batch.rewards.shape[0]
    first = [p for p in range(count) if cut >> p & 1]
    rest = [p for p in range(count) if p not in first]
    parts = [
        moments(batch.select(torch.tensor(ps)), **halves(others, torch.tensor(ps)))
        for ps in (first, rest)
        if ps
    ]
    whole = measure(batch, **others)
    for found in (finish(*parts), finish(*parts[::-1]), finish(sums.merge(*parts))):
        assert set(found) == set(whole)
        for name, value in whole.items():
            same(name, found[name], value)


@settings(max_examples=10, deadline=None)
@given(batches(absent=False))
def test_tokens_and_responses_add_up_over_single_responses(batch):
    flat = _by_response(batch.validate())
    rows = range(flat.rewards.shape[0])
    found = finish(*(sums.of_ratios(flat.select([r])) for r in rows))
    whole = finish(sums.of_ratios(batch))
    assert found.keys() == whole.keys()
    for name, value in whole.items():
        same(name, found[name], value)


def test_a_merge_that_adds_logs_is_found(monkeypatch):
    batch = pair([0.5, -0.5, 1.0], [0.0, 0.0, 0.0])
    parts = [sums.of_ratios(_by_response(batch).select([r])) for r in (0, 1, 2)]
    whole = finish(sums.of_ratios(batch))["ratio/ess"]
    assert_close(finish(*parts)["ratio/ess"], whole)
    monkeypatch.setitem(sums.JOIN, "log", torch.add)
    assert_apart(finish(*parts)["ratio/ess"], whole)


def pair(logp: list[float], behavior: list[float]) -> Batch:
    """A group of responses of one token each."""
    return Batch.from_rows(
        [float(i % 2) for i in range(len(logp))],
        "a" * len(logp),
        mask=[[1]] * len(logp),
        logp=[[v] for v in logp],
        behavior_logp=[[v] for v in behavior],
    )


@pytest.mark.parametrize("shift", [1e4, -1e4])
@pytest.mark.parametrize("entry", ["topr", "trajectory_is", "cispo", "grpo", "gspo", "reinforce"])
def test_enormous_ratios_are_finite_or_refused(shift, entry):
    batch = pair([-2e4 + shift, -1.0, -1.0], [-2e4, -1.0, -1.0])
    found = measure(batch)
    assert all(math.isfinite(v) for v in found.values())
    assert_close(found["ratio/ess"], 1 / 3 if shift > 0 else 2 / 3)
    assert_close(found["mismatch/abs_log_ratio_max"], 1e4)
    assert_close(found["mismatch/k1"], -shift / 3)
    made = coefficients(get(entry), batch)
    try:
        more = measure(batch, coefficients=made)
    except ValueError as error:
        assert "group a, response 0" in str(error)
    else:
        assert all(math.isfinite(v) for v in more.values())


def test_two_enormous_ratios_are_told_apart():
    batch = pair([9e3, 1e4, 1e4], [0.0, 0.0, 0.0])
    assert_close(measure(batch)["ratio/ess"], 2 / 3)


def test_small_mismatch_keeps_its_digits():
    x = np.array([1e-5, -2e-5, 3e-5])
    batch = pair(list(x), [0.0] * 3)
    found = measure(batch)
    assert_close(found["mismatch/k3"], (x**2 / 2 + x**3 / 6).mean(), relative=1e-9)
    assert_close(found["mismatch/chi2"], np.expm1(2 * x).mean(), relative=1e-9)
    assert_close(found["ratio/std"], np.expm1(x).std(), relative=1e-9)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_is_refused_by_row(bad):
    batch = replace(pair([0.0, -1.0], [0.0, 0.0]))
    batch = replace(batch, logp=torch.tensor([[[-1.0], [bad]]], dtype=torch.float64))
    with refused("logp", "group a, response 1"):
        measure(batch)
    with refused("gradient_norm", "finite"):
        passed(update__gradient_norm=bad)


def test_unknown_figures_are_refused():
    with refused("update/gradient", "update/gradient_norm"):
        passed(update__gradient=1.0)


def test_figures_of_ranks_count_once():
    parts = [passed(update__gradient_norm=0.5, time__step=t) for t in (1.0, 2.0)]
    assert finish(*parts) == {"update/gradient_norm": 0.5, "time/step": 2.0}


def test_nothing_gives_nothing():
    empty = Batch.from_rows([1.0, 0.0], "aa", mask=[[], []], logp=[[], []], behavior_logp=[[], []])
    found = measure(empty)
    assert found["length/max"] == 0 and not [n for n in found if n.startswith(("ratio", "mism"))]
    assert finish() == {}


def test_verl_names_stand_for_verls_formulas():
    """Facts of section 4 of the notes on peers, written as verl documents them."""
    generator = torch.Generator().manual_seed(3)
    mask = torch.rand(2, 4, 6, generator=generator) > 0.3
    mask[..., 0] = True
    old = -torch.rand(2, 4, 6, generator=generator).double()
    rollout = old + 1.0 * torch.randn(2, 4, 6, generator=generator).double()
    batch = Batch(
        rewards=torch.randint(0, 2, (2, 4), generator=generator).double(),
        mask=mask,
        logp=old,
        behavior_logp=rollout,
    )
    made = coefficients(get("token_tis"), batch)
    found = measure(batch, coefficients=made)
    by_name = {m.verl: found[m.name] for m in METRICS if m.verl and m.name in found}
    ratio, n = old - rollout, mask.sum()
    weights = ratio.exp().clamp(max=2.0)
    means = {
        "old": (old * mask).sum(-1) / mask.sum(-1),
        "rollout": (rollout * mask).sum(-1) / mask.sum(-1),
    }
    normal = weights / ((weights * mask).sum() / n)
    wanted = {
        "kl": -(ratio * mask).sum() / n,
        "k3_kl": ((ratio.exp() - ratio - 1) * mask).sum() / n,
        "chi2_token": ((2 * ratio).exp() * mask).sum() / n - 1,
        "chi2_seq": (2 * (ratio * mask).sum(-1)).exp().mean() - 1,
        "training_ppl": (-means["old"]).exp().mean(),
        "rollout_ppl": (-means["rollout"]).exp().mean(),
        "log_ppl_diff": (means["rollout"] - means["old"]).mean(),
        "log_ppl_abs_diff": (means["rollout"] - means["old"]).abs().mean(),
        "ppl_ratio": (means["rollout"] - means["old"]).exp().mean(),
        "rollout_is_mean": (weights * mask).sum() / n,
        "rollout_is_max": weights[mask].max(),
        "rollout_is_seq_mean": ((weights * mask).sum(-1) / mask.sum(-1)).mean(),
        "rollout_is_eff_sample_size": 1 / ((normal.square() * mask).sum() / n),
    }
    for name, value in wanted.items():
        assert_close(by_name[f"rollout_corr/{name}"], value)
    after, before = found["weight/ess"], found["ratio/ess"]
    assert before < after <= 1
    share = changed_share(made.weights, ratio, mask)
    assert_close(
        measure(
            batch,
            coefficients=made,
            effective=effective_log_ratio(get("token_tis"), batch, made.terms.advantages),
        )["clip/share"],
        share,
    )
