"""What a dump tells: sums against batches, intervals, tails, groups, support and its ranking."""

from __future__ import annotations

import json
import math
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from windage.analysis.diagnose import demo, document, groups, ranking, tails, words, written
from windage.analysis.diagnose.blocks import gathered
from windage.analysis.diagnose.document import Diagnosis, collect, metrics
from windage.analysis.diagnose.groups import Sample
from windage.analysis.diagnose.mismatch import binned
from windage.analysis.diagnose.planted import Run, rows
from windage.analysis.diagnose.rows import Row
from windage.analysis.diagnose.sums import BUCKETS, Sums, bucket, difference, figure, jackknife
from windage.analysis.diagnose.support import (
    WHOLE,
    batch_of,
    cosines,
    geometry,
    norms_of,
    support,
    uncorrected,
)
from windage.estimators.agreement import direction, gram, inner, score_bounds, space
from windage.estimators.batch import Batch
from windage.estimators.catalogue import get
from windage.estimators.metrics import measure
from windage.estimators.moments import score_norms

RUN = Run(groups=40, group_size=4, lag=2, drift=0.04)
FEW = ("group_mean", "grpo", "token_tis", "sequence_tis", "prefix_is", "ppo", "centered", "grpo_k3",
       "positives_only")  # fmt: skip


@pytest.fixture(scope="module")
def held() -> list[Row]:
    return list(rows(RUN, 5))


@pytest.fixture(scope="module")
def found(held: list[Row]) -> Diagnosis:
    return collect(held)


@pytest.fixture(scope="module")
def batch(held: list[Row]) -> Batch:
    groups: dict[str | None, list[Row]] = {}
    for row in held:
        groups.setdefault(row.group_id, []).append(row)
    return batch_of(list(groups.values()), recorded=False)


@pytest.fixture(scope="module")
def made(held: list[Row]):
    sample = Sample()
    sample.add(held)
    return support(sample, FEW)


def test_every_metric_is_that_of_one_batch(found: Diagnosis, batch: Batch) -> None:
    expected = measure(batch)
    figures = found.figures()
    told = [name for name in expected if name in figures]
    assert len(told) > 45
    for name in told:
        assert figures[name].value == pytest.approx(expected[name], rel=1e-9, abs=1e-12), name


def test_blocks_of_any_size_give_the_same_figures(held: list[Row], found: Diagnosis) -> None:
    small = Diagnosis()
    for part in gathered(held, 700):
        small.add(part)
    mine, whole = small.figures(), found.figures()
    assert mine.keys() == whole.keys()
    for name in whole:
        for what in ("value", "half_width"):
            one, other = getattr(mine[name], what), getattr(whole[name], what)
            assert (one or 0.0) == pytest.approx(other or 0.0, rel=1e-7, abs=1e-11), name


def test_bins_add_up_to_the_whole(found: Diagnosis) -> None:
    whole = found.figures()["mismatch/k3"].value
    for sums in found.mismatch.by.values():
        count = sums.table["count"].sum(0)
        values = [each.value or 0.0 for each in binned(sums, "mismatch/k3")]
        assert float(np.dot(count, values) / count.sum()) == pytest.approx(whole, rel=1e-9)


def test_limits_against_a_count(held: list[Row], found: Diagnosis) -> None:
    x = np.concatenate([row.logp - row.behavior_logp for row in held])
    s = np.array([(row.logp - row.behavior_logp).sum() for row in held])
    figures = found.figures()
    assert figures["limits/above_2_response"].value == pytest.approx(np.mean(np.exp(s) > 2))
    assert figures["limits/below_2_response"].value == pytest.approx(np.mean(np.exp(s) < 0.5))
    w = np.minimum(np.exp(s), 2)
    assert figures["limits/ess_truncated_2_response"].value == pytest.approx(
        w.sum() ** 2 / (len(w) * (w**2).sum())
    )
    assert figures["drift/distance"].value == pytest.approx(np.mean(np.abs(np.expm1(x))))


def test_selection_against_a_direct_count(held: list[Row]) -> None:
    some = [replace(row, rejected="stale" if i % 5 == 0 else None) for i, row in enumerate(held)]
    figures = collect(some).figures()
    r = np.array([row.reward for row in some])
    t = np.array([len(row.mask) for row in some], float)
    cut = np.array([row.finish_reason == "length" for row in some])
    kept = np.array([row.rejected is None for row in some])
    assert figures["length/reward_correlation"].value == pytest.approx(np.corrcoef(r, t)[0, 1])
    assert figures["truncation/effect"].value == pytest.approx(r.mean() - r[~cut].mean())
    assert figures["selection/admitted"].value == pytest.approx(kept.mean())
    assert figures["selection/reward"].value == pytest.approx(r[kept].mean() - r.mean(), abs=1e-12)
    assert figures["selection/length"].value == pytest.approx(t[kept].mean() - t.mean(), abs=1e-9)
    groups = r.reshape(-1, RUN.group_size)
    assert figures["group/constant"].value == pytest.approx(np.mean(np.ptp(groups, axis=1) == 0))


def test_groups_are_counted_however_often_they_are_joined(monkeypatch: pytest.MonkeyPatch) -> None:
    """Against a table of names, with joins after every block and with none."""
    rng = np.random.default_rng(0)
    names = [f"{n}" for n in rng.integers(0, 300, 2_000)]
    values = rng.integers(0, 3, 2_000).astype(float)
    wanted: dict[str, tuple[int, float, float]] = {}
    for name, value in zip(names, values.tolist(), strict=True):
        size, low, high = wanted.get(name, (0, value, value))
        wanted[name] = size + 1, min(low, value), max(high, value)
    for fewest in (0, groups.FEWEST):
        monkeypatch.setattr(groups, "FEWEST", fewest)
        ends = groups.Ends()
        for start in range(0, 2_000, 37):
            ends.add(names[start : start + 37], values[start : start + 37])
        table = ends.table
        found = {
            int(key): (int(size), low, high)
            for key, size, low, high in zip(*table.values(), strict=True)
        }
        assert found == {groups.key_of(name): each for name, each in wanted.items()}
        assert all(key % BUCKETS == bucket(name) for name, key in
                   ((name, groups.key_of(name)) for name in wanted))  # fmt: skip
        assert len(ends) == len(wanted)


def test_the_jackknife_of_a_mean_is_its_standard_error() -> None:
    values = np.random.default_rng(0).normal(size=BUCKETS)
    sums = Sums("n", "x")
    sums.add(np.arange(BUCKETS), 0, n=np.ones(BUCKETS), x=values)
    made = figure(sums.over(), lambda s: s["x"] / s["n"])
    assert made.error == pytest.approx(values.std(ddof=1) / math.sqrt(BUCKETS), rel=1e-9)


@pytest.mark.long
def test_intervals_cover_the_truth() -> None:
    """Mean length of clustered lengths: 95 % intervals of 400 dumps cover about 95 %."""
    rng = np.random.default_rng(1)
    hits = 0
    for _ in range(400):
        group = rng.normal(size=200)
        x = (group[:, None] + rng.normal(size=(200, 4))).ravel()
        sums = Sums("n", "x")
        at = np.repeat(rng.integers(BUCKETS, size=200), 4)
        sums.add(at, 0, n=np.ones(800), x=x)
        made = figure(sums.over(), lambda s: s["x"] / s["n"])
        hits += abs(made.value) <= made.half_width
    assert 0.92 <= hits / 400 <= 0.98


def test_a_dump_does_not_differ_from_itself_and_the_pair_is_sharper(held: list[Row]) -> None:
    other = [replace(row, reward=1 - row.reward) for row in held]
    mine, theirs = collect(held).figures(), collect(other).figures()
    same = metrics(mine, mine)
    assert all(row["difference"] in (0.0, None) for row in same)
    assert not any(row["differs"] for row in same)
    by = {row["name"]: row for row in metrics(mine, theirs)}
    assert by["mismatch/k3"]["difference"] == 0.0
    assert by["reward/mean"]["difference"] == pytest.approx(
        2 * mine["reward/mean"].value - 1, abs=1e-9
    )
    apart = difference(jackknife(1.0, {0: 0.5, 1: 1.5, 2: 1.0, 3: 1.0}),
                       jackknife(0.0, {4: 0.5, 5: -0.5, 6: 0.0, 7: 0.0}))  # fmt: skip
    assert apart.error is not None and apart.error > 0.7


@pytest.mark.parametrize(("count", "sigma"), [(100, 0.3), (2_000, 1.0), (60_000, 2.5)])
def test_shapes_of_tails_are_those_of_arviz(count: int, sigma: float) -> None:
    base = pytest.importorskip("arviz_stats.base")
    logs = np.random.default_rng(count).normal(size=count) * sigma
    tail = tails.Tail()
    for part in np.array_split(logs, 9):
        tail.add(part)
    _, expected = base.array_stats.psislw(-logs)
    assert tail.shape() == pytest.approx(float(expected), rel=1e-9)


def test_the_shape_of_a_pareto_law_is_found() -> None:
    rng = np.random.default_rng(0)
    for k in (0.2, 0.8):
        excess = np.sort((rng.random(20_000) ** -k - 1) / k)
        assert tails.shape(excess) == pytest.approx(k, abs=0.05)


def test_a_tail_of_few_or_equal_weights_has_no_shape() -> None:
    few, equal = tails.Tail(), tails.Tail()
    few.add(np.arange(5.0))
    equal.add(np.zeros(1000))
    assert few.shape() is None and equal.shape() is None


def test_a_thinned_sample_holds_whole_groups_of_every_bucket() -> None:
    some = list(rows(Run(groups=200, group_size=2), 0))
    sample = Sample(tokens=4_000)
    sample.add(some)
    assert 0 < sample.share < 1 and sample.tokens <= 8_000
    assert all(len(group) == 2 for group in sample.groups.values())
    again = Sample(tokens=4_000)
    again.add(reversed(some))
    assert again.groups.keys() == sample.groups.keys()


def test_inner_products_are_those_of_the_shadow_recipes(batch: Batch, made) -> None:
    ids = torch.zeros(batch.mask.shape, dtype=torch.long)
    at = space(batch, ids)
    pair = [get(name)(batch) for name in ("rloo", "token_is")]
    whole = gram(torch.stack([p.own[batch.mask] for p in pair]), score_norms(batch)[batch.mask])
    parts = [direction(p, batch, at) for p in pair]
    for i in range(2):
        for j in range(2):
            scaled = float(inner(parts[i], parts[j], at)) * parts[i].scale * parts[j].scale
            assert float(whole[i, j]) == pytest.approx(scaled, rel=1e-9)


def test_norms_of_scores_lie_between_their_bounds(batch: Batch) -> None:
    low, high = score_bounds(batch.logp[batch.mask])
    norms = score_norms(batch)[batch.mask]
    assert bool((low <= norms + 1e-12).all()) and bool((norms <= high + 1e-12).all())
    without = replace(batch, probability_square=None)
    assert torch.equal(norms_of(without), low)


def test_noise_and_bias_are_what_their_formulas_say(made) -> None:
    found = geometry(made)
    at = made.row_of
    whole = {key: values[0] for key, values in found.items()}
    assert whole["noise"][at["rloo"]] == pytest.approx(1.0)
    assert whole["scale"][at["group_mean"]] == pytest.approx(0.75)
    assert np.nanmin(whole["noise"]) >= 1 - 1e-12
    assert made.reference == WHOLE and whole["bias_square"][at[WHOLE]] == 0.0
    g = made.gram.sum(0)
    scale = [g[at[n], at["rloo"]] / g[at["rloo"], at["rloo"]] for n in ("token_is", WHOLE)]
    a, b = at["token_is"], at[WHOLE]
    gap = g[a, a] / scale[0] ** 2 + g[b, b] / scale[1] ** 2 - 2 * g[a, b] / (scale[0] * scale[1])
    assert whole["bias_square"][a] == pytest.approx(gap / g[at["rloo"], at["rloo"]], rel=1e-9)
    alike = cosines(made)
    assert alike[at["rloo"], at["group_mean"]] == pytest.approx(1.0)
    assert np.nanmax(np.abs(np.diag(alike)[np.isfinite(np.diag(alike))] - 1)) < 1e-12


def test_without_mismatch_every_ratio_recipe_is_the_plain_one(held: list[Row]) -> None:
    sample = Sample()
    sample.add(replace(row, behavior_logp=row.logp) for row in held)
    made = support(sample, FEW)
    found = geometry(made)
    for name in ("token_is", "trajectory_is", "token_tis", "sequence_tis", "prefix_is"):
        assert found["bias_square"][0, made.row_of[name]] == pytest.approx(0.0, abs=1e-12)
        assert found["noise"][0, made.row_of[name]] == pytest.approx(1.0)


def test_more_lag_means_more_bias_and_noise() -> None:
    figures = []
    for drift in (0.02, 0.06):
        sample = Sample()
        sample.add(rows(replace(RUN, drift=drift, lag=4, groups=32), 3))
        made = support(sample, FEW)
        found = geometry(made)
        figures.append((found["bias_square"][0, made.row_of["rloo"]],
                        found["noise"][0, made.row_of[WHOLE]]))  # fmt: skip
    assert figures[0][0] < figures[1][0] and figures[0][1] < figures[1][1]


def test_what_the_dump_lacks_is_said(made) -> None:
    assert "values" in made.excluded["ppo"]
    assert "head" in made.excluded["centered"]
    assert "reference_logp" in made.excluded["grpo_k3"]
    table = ranking.rows(made)
    assert {row["estimator"] for row in table} == {*made.names, *made.excluded}
    assert all((row["rank"] is None) == (row["reason"] is not None) for row in table)


def test_nothing_is_ranked_inside_its_uncertainty(made) -> None:
    """Entries that are the same share a rank; what is ahead is surely better in one."""
    table = {row["estimator"]: row for row in ranking.rows(made)}
    assert table["rloo"]["rank"] == table["group_mean"]["rank"] == 1
    behind = [row for row in table.values() if row["rank"] and row["rank"] > 1]
    assert behind and all("is better" in row["why"] for row in behind)
    values = np.ones((17, 3)) + np.random.default_rng(0).normal(size=(17, 3)) * 0.01
    sure, _ = ranking.better(values, 0.0)
    assert not sure.any()


def test_noise_counts_only_between_entries_that_differ_by_their_correction(
    made, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By lengths and spreads of groups `grpo` may have less noise than a sum over tokens."""
    at = made.row_of
    bare = made.alike[at["rloo"]]
    for name in ("group_mean", "token_is", "token_tis", "sequence_tis", "prefix_is", WHOLE):
        assert bare[at[name]] == pytest.approx(1.0)
    assert 0.2 < bare[at["grpo"]] < 0.98 and bare[at["positives_only"]] < 0.98
    table = {row["estimator"]: row for row in ranking.rows(made)}
    assert table["grpo"]["rank"] > 1 and ranking.OTHERWISE in table["grpo"]["why"]
    assert "against" in table["grpo"]["why"] and "noise 2" not in table["grpo"]["why"]
    assert ranking.OTHERWISE not in table["prefix_is"]["why"]
    monkeypatch.setattr(ranking, "ALIKE", -2.0)
    before = {row["estimator"]: row for row in ranking.rows(made)}
    assert re.search(r"noise \d", before["grpo"]["why"])


def test_what_an_entry_is_without_its_correction(batch: Batch) -> None:
    entry = get("token_tis")
    bare = uncorrected(entry(batch), batch).own
    plain = get("rloo")(batch).own
    torch.testing.assert_close(bare, plain)
    assert not torch.allclose(entry(batch).own, plain)


def test_measured_orders_are_those_that_the_readme_tells() -> None:
    """Noise is compared where its proxy orders, and is not where it does not."""
    root = Path(__file__).parents[1]
    found = json.loads((root / "benchmarks/results/support.json").read_text())
    text = " ".join((root / "README.md").read_text().split())
    for key, stem in (("bias", "bias with rank correlations of"), ("noise_alike", "noise with")):
        values = [each[key] for each in found]
        assert f"{stem} {min(values):.2f} to {max(values):.2f}" in text
    assert all(each["noise"] < each["noise_alike"] for each in found)


def test_measured_sizes_stay_under_two_gibibytes() -> None:
    root = Path(__file__).parents[1]
    found = json.loads((root / "benchmarks/results/diagnose.json").read_text())
    assert found["speed"]["tokens"] > 990_000 and found["speed"]["processor_seconds"] < 20
    assert found["tokens"]["tokens"] >= 10**7 and found["rows"]["rows"] >= 10**7
    assert all(found[name]["mebibytes"] < 2_048 for name in ("speed", "tokens", "rows"))


def test_layers_peel_off_those_that_none_beats() -> None:
    beats = np.zeros((4, 4), bool)
    beats[0, 1] = beats[1, 2] = beats[0, 2] = True
    assert ranking.layers(beats) == [1, 2, 3, 1]
    beats[3, 0] = beats[0, 3] = True
    assert ranking.layers(beats) == [1, 1, 1, 1], "a ring is undecided"


def test_recorded_advantages_serve_where_there_are_no_rewards(held: list[Row]) -> None:
    sample = Sample()
    sample.add(
        replace(
            row, reward=None, group_id=None, advantages=np.full(len(row.mask), row.reward - 0.5)
        )
        for row in held
    )
    made = support(sample, FEW)
    assert made.advantages == "as recorded" and "token_tis" in made.names
    assert support(Sample(), FEW) == "no response has log-probabilities of both trainer and sampler"
    bare = Sample()
    bare.add(replace(row, reward=None, group_id=None) for row in held)
    assert isinstance(support(bare, FEW), str)


def test_a_lone_response_excludes_no_entry(held: list[Row]) -> None:
    sample = Sample()
    sample.add([*held, replace(held[0], group_id="alone")])
    made = support(sample, FEW)
    assert "rloo" in made.names and made.groups == RUN.groups


def test_a_dump_without_the_trainer_still_tells_of_rewards(held: list[Row]) -> None:
    figures = collect([replace(row, logp=None) for row in held]).figures()
    assert "reward/mean" in figures and "mismatch/k3" not in figures


def test_the_demo_is_what_its_script_makes(tmp_path: Path) -> None:
    shipped = document.demo()
    assert shipped.stat().st_size < 200_000
    written.write(tmp_path / "demo.parquet", rows(demo.RUN, demo.SEED))
    import pyarrow.parquet as parquet

    assert parquet.read_table(tmp_path / "demo.parquet").equals(parquet.read_table(shipped))


def test_the_page_of_figures_is_the_one_that_its_script_makes() -> None:
    page = Path(__file__).parents[1] / "docs/diagnose.md"
    assert page.read_text() == words.document()


def test_every_figure_is_on_a_page(found: Diagnosis) -> None:
    """Of a dump with everything: in docs/diagnose.md, or in docs/metrics.md."""
    docs = Path(__file__).parents[1] / "docs"
    listed = "".join((docs / name).read_text() for name in ("diagnose.md", "metrics.md"))
    for name in found.figures():
        stem = re.sub(r"_\d(\.\d)?(?=_response|$)", "_CAP", name) if "limits/" in name else name
        assert f"`{stem}`" in listed, name
    table = ranking.rows(support(found.sample, ("rloo",)))
    for column in table[0]:
        known = any(column.startswith(stem) for stem in ("clip_", "weight_", "admission_"))
        plain = column.removesuffix("_half_width") in (
            "rank", "estimator", "why", "reason", "composition"
        )  # fmt: skip
        assert known or plain or f"`{column.removesuffix('_half_width')}`" in listed, column


def test_every_figure_has_words(found: Diagnosis) -> None:
    for row in metrics(found.figures(), None):
        assert row["formula"] and row["unit"] and row["better"] in ("up", "down", "none")
    json.dumps(metrics(found.figures(), None), allow_nan=False)
