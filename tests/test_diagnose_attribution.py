"""Parts of the mismatch from a dump alone: true where they are told, bounds that hold elsewhere."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from test_attribution import applied, by_nodes, on_responses

from windage.analysis.diagnose.attribution import attribution, edge, measured, sampling
from windage.analysis.diagnose.rows import Row
from windage.toy import behavior
from windage.toy.problems import Problem, token_tree

PROBLEM = token_tree(3)
SAMPLERS = {0: ("precision",), 2: ("lag", "precision")}


def part(found: list[dict[str, Any]], cause: str, measure: str) -> dict[str, Any]:
    (one,) = (p for p in found if (p["cause"], p["measure"]) == (cause, measure))
    return one


def causes(found: list[dict[str, Any]]) -> list[str]:
    return list(dict.fromkeys(p["cause"] for p in found))


def drawn(lag: int, count: int, rng: np.random.Generator) -> list[Row]:
    """Responses of the tree from the rounded policy `lag` updates behind."""
    tables = torch.stack([applied(PROBLEM, SAMPLERS[lag]), PROBLEM.logp])
    lines, mask, chance = on_responses(PROBLEM, tables)
    rows = []
    for k in rng.choice(len(chance), count, p=(chance / chance.sum()).numpy()):
        n = int(mask[k].sum())
        rows.append(
            Row(
                where=f"{lag}/{len(rows)}",
                mask=np.ones(n, bool),
                behavior_logp=lines[0, k, :n].numpy(),
                logp=lines[1, k, :n].numpy(),
                versions=np.full(n, 7 - lag),
                current_version=7,
            )
        )
    return rows


def exact(lag: int, measure: str) -> tuple[float, float]:
    """Divergence and tokens of a response, by enumeration."""
    sampler = applied(PROBLEM, SAMPLERS[lag])
    _, mask, chance = on_responses(PROBLEM, torch.stack([sampler, PROBLEM.logp]))
    name = "chi_square" if measure == "chi_square" else "k3"
    whole = by_nodes(PROBLEM, sampler, PROBLEM.logp, name)
    return float(whole), float((mask.sum(-1) * chance).sum())


@pytest.mark.parametrize("measure", ["k3", "chi_square"])
def test_engine_and_lag_are_those_of_the_tree(measure: str) -> None:
    rng = np.random.default_rng(0)
    fresh, stale = drawn(0, 4000, rng), drawn(2, 4000, rng)
    found = attribution([*fresh, *stale])
    assert part(found, "engine", measure)["tokens"] == sum(len(row.mask) for row in fresh)
    assert part(found, "lag", measure)["tokens"] == sum(len(r.mask) for r in [*fresh, *stale])
    assert causes(found) == ["all", "engine", "lag"]
    (young, n0), (old, n2) = exact(0, measure), exact(2, measure)
    whole = (young + old) / (n0 + n2)
    truths = {"engine": young / n0, "all": whole, "lag": whole - young / n0}
    for cause, truth in truths.items():
        told = part(found, cause, measure)
        # Four standard errors: a false alarm in 16,000; an error this small tells the causes apart.
        assert told["low"] == told["high"] and told["error"] < 0.2 * abs(truth)
        assert abs(told["low"] - truth) < 4 * told["error"], (cause, told, truth)
    parts = [part(found, cause, measure)["low"] for cause in ("engine", "lag")]
    assert sum(parts) == pytest.approx(part(found, "all", measure)["low"])


def test_without_young_tokens_engine_and_lag_are_bounded() -> None:
    rng = np.random.default_rng(1)
    found = attribution(drawn(2, 300, rng))
    engine, lag = part(found, "engine", "k3"), part(found, "lag", "k3")
    whole = part(found, "all", "k3")["low"]
    assert engine["low"] == 0 and engine["high"] == pytest.approx(whole)
    assert lag["low"] == pytest.approx(0, abs=1e-12) and lag["high"] == pytest.approx(whole)
    assert "lag 2" in lag["how"] and lag["error"] is None
    unknown = [replace(row, versions=None) for row in drawn(0, 30, rng)]
    assert causes(attribution(unknown)) == ["all"]
    assert attribution([]) == []


def settings(problem: Problem, temperature: float, top_p: float, top_k: int | None) -> Any:
    """Raw policy, sampler and the row of every response that the sampler can draw."""
    sampler = problem
    if temperature != 1:
        sampler = replace(sampler, logits=behavior.temperature(sampler, t=temperature))
    if top_p < 1:
        sampler = replace(sampler, logits=behavior.top_p(sampler, p=top_p))
    if top_k:
        sampler = replace(sampler, logits=behavior.top_k(sampler, k=top_k))
    lines, mask, chance = on_responses(problem, torch.stack([sampler.logp, problem.logp]))
    prefixes = problem.tree.paths[0].clamp(min=0)
    square = problem.logp.exp().square().sum(-1)[0, prefixes].numpy()
    head = problem.logp[0, prefixes].numpy()
    for k in torch.nonzero(chance > 0).squeeze(1).tolist():
        n = int(mask[k].sum())
        row = Row(
            where=str(k),
            mask=np.ones(n, bool),
            behavior_logp=lines[1, k, :n].numpy(),
            logp=lines[1, k, :n].numpy(),
            probability_square=square[k, :n],
            head_behavior_logp=head[k, :n],
            temperature=temperature,
            top_p=top_p,
            top_k=top_k,
            raw=True,
        )
        yield row, (lines[0, k, :n] - lines[1, k, :n]).numpy()


@pytest.mark.parametrize("temperature", [0.3, 0.5, 0.8, 1.0])
@pytest.mark.parametrize(("top_p", "top_k"), [(1.0, None), (0.7, None), (1.0, 2), (0.7, 2)])
def test_sampling_settings_lie_within_their_bounds(
    temperature: float, top_p: float, top_k: int | None
) -> None:
    rows = list(settings(token_tree(3, vocab=5), temperature, top_p, top_k))
    for row, truth in rows:
        for known in (row, replace(row, head_behavior_logp=None)):
            low, high = sampling(known)
            assert (low <= truth + 1e-12).all() and (truth <= high + 1e-12).all()
            assert np.isfinite(high).all()
        if temperature == 0.5 and (top_p, top_k) == (1.0, None):
            assert np.allclose(low, truth, atol=1e-12) and np.allclose(high, truth, atol=1e-12)
        if temperature == 1 and (top_p, top_k) != (0.7, 2):
            low, high = sampling(row)
            assert np.allclose(low, truth, atol=1e-12) and np.allclose(high, truth, atol=1e-12)
        blind = replace(row, probability_square=None, head_behavior_logp=None)
        low, high = sampling(blind)
        assert (low <= truth + 1e-12).all() and (truth <= high + 1e-12).all()
    found = attribution([row for row, _ in rows])
    if (temperature, top_p, top_k) == (1.0, 1.0, None):
        assert causes(found) == ["all"]
        return
    told = part(found, "sampling", "k1")
    mean = np.concatenate([truth for _, truth in rows]).mean()
    assert told["low"] - 1e-12 <= max(mean, 0.0) and mean <= told["high"] + 1e-12
    assert "beyond `all`" in told["how"] and part(found, "all", "k3")["low"] == 0


def test_hot_samplers_are_bounded_on_one_side() -> None:
    for row, truth in settings(token_tree(3, vocab=5), 1.5, 1.0, None):
        low, high = sampling(row)
        assert (truth <= high + 1e-12).all() and np.isinf(low).all()
        told = part(attribution([row]), "sampling", "k1")
        assert told["low"] == 0 and told["high"] == pytest.approx(high.mean())
        blind = replace(row, probability_square=None)
        assert part(attribution([blind]), "sampling", "k1")["high"] > told["high"]


def test_greedy_choices_and_limits_that_are_none() -> None:
    row, _ = next(settings(token_tree(3, vocab=5), 1.0, 1.0, None))
    greedy = replace(row, temperature=0.0)
    low, high = sampling(greedy)
    assert np.array_equal(low, -row.behavior_logp) and np.array_equal(low, high)
    for none in (0, -1, None):
        assert causes(attribution([replace(row, top_k=none)])) == ["all"]


def test_passes_are_undone_last() -> None:
    rng = np.random.default_rng(2)
    rows = [
        replace(row, proximal_logp=row.logp - rng.exponential(0.1, len(row.mask)))
        for row in drawn(0, 50, rng)
    ]
    found = attribution(rows)
    x = np.concatenate([r.logp - r.behavior_logp for r in rows])
    early = np.concatenate([r.proximal_logp - r.behavior_logp for r in rows])
    for name in ("k1", "k3", "chi_square"):
        expected = measured(x)[name].mean() - measured(early)[name].mean()
        assert part(found, "passes", name)["low"] == pytest.approx(expected)


def response(gap: np.ndarray, **fields: Any) -> Row:
    behavior_logp = np.full(len(gap), -2.0)
    mask = fields.pop("mask", np.ones(len(gap), bool))
    logp = np.where(mask, behavior_logp + gap, 0.0)
    return Row(
        where=fields["group_id"], mask=mask, behavior_logp=behavior_logp, logp=logp, **fields
    )


def test_a_kept_cache_shows_beside_tokens_of_the_same_lag() -> None:
    rng = np.random.default_rng(3)
    rows = []
    for n in range(400):
        gap = rng.normal(0, 0.1, 20)
        young = np.full(20, 9)
        if n % 2:
            young[:10] = 8
            gap[10:] *= 3
        rows.append(response(gap, group_id=str(n), versions=young, current_version=9))
    told = part(attribution(rows), "cache", "k3")
    # A quarter of the tokens, each with half of 0.3^2 - 0.1^2 more.
    assert abs(told["low"] - 0.25 * 0.04) < 4 * told["error"] < 0.004
    assert told["tokens"] == 2_000
    steady = [replace(row, versions=np.full(20, 9)) for row in rows]
    assert "cache" not in causes(attribution(steady))


def test_text_that_was_merged_shows_at_the_edges_of_turns() -> None:
    rng = np.random.default_rng(4)
    mask = np.ones(12, bool)
    mask[5:7] = False
    rows = []
    for n in range(400):
        gap = rng.normal(0, 0.1, 12)
        gap[[4, 7]] *= 5
        rows.append(response(gap, group_id=str(n), mask=mask))
    found = attribution(rows)
    told = part(found, "turn edges", "chi_square")
    assert (
        told["low"] > 5 * told["error"] and "800 that no policy chose, in 800 turns" in told["how"]
    )
    share = told["low"] / part(found, "all", "chi_square")["low"]
    assert share > 0.7
    calm = [response(rng.normal(0, 0.1, 12), group_id=str(n), mask=mask) for n in range(400)]
    told = part(attribution(calm), "turn edges", "chi_square")
    assert abs(told["low"]) < 4 * told["error"]
    assert edge(np.array([False, True, True])).tolist() == [1, 0]
