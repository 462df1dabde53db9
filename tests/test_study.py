"""The study's document: digits against an enumeration of their own, and the ten fixed readings."""

import json
import math
import random

import numpy as np
import pytest
from problem_files import (
    ESTIMATORS,
    Enumeration,
    behind,
    binary,
    current,
    document,
    pair,
    prefixes,
    real,
    scattered,
    tree,
    write,
)

from windage.analysis.studies.grid import Settings
from windage.analysis.studies.study import run
from windage.estimators.errors import BadInput
from windage.toy.exact.tuples import count_multisets, count_tuples
from windage.toy.problem_file import read
from windage.toy.problems import bandit, token_tree

QUOTIENTS = ("scale", "cosine", "relative_bias", "relative_bias_rescaled", "variance_rescaled")
FIGURES = (*QUOTIENTS, "variance", "drift")


def study(folder, data, *names, **settings):
    """A study of a problem file; names may carry settings as (name, settings)."""
    chosen = tuple(n if isinstance(n, tuple) else (n, {}) for n in names)
    if chosen:
        settings["estimators"] = chosen
    return run(Settings(problem=read(write(folder, data)), **settings))


def rows(folder, data, *names, **settings):
    return study(folder, data, *names, **settings)["rows"]


def named(found):
    return {row["estimator"]: row for row in found}


def close(found, expected, tolerance=1e-10):
    scale = max(1.0, float(np.abs(expected).max()))
    return np.abs(np.asarray(found) - expected).max() <= tolerance * scale


def uncovered():
    """A sampler that never draws token 2 after the empty prefix, nor token 0 after it."""
    data = tree(stale=True)
    data["prompts"][0]["behavior"][""][2] = -1000.0
    data["prompts"][0]["behavior"]["0"][0] = -1e5
    return data


def even():
    """No stop token: every length is the horizon."""
    return document(2, None, 3, [(current, behind, lambda k: ((5 * k + 2) % 8) / 7)])


PROBLEMS = {
    "pair": (pair, 2),
    "tree": (lambda: tree(stale=True), 2),
    "even": (even, 3),
    "uncovered": (uncovered, 2),
}


@pytest.fixture(scope="module", params=PROBLEMS)
def both(request, tmp_path_factory):
    """A study of the whole catalogue, and the enumeration of the same file."""
    make, group_size = PROBLEMS[request.param]
    folder = tmp_path_factory.mktemp(request.param)
    return study(folder, make(), group_size=group_size), Enumeration(make(), group_size)


def test_the_objective_is_that_of_the_enumeration(both):
    found, listed = both
    value, gradient = listed.objective()
    assert found["objective"]["value"] == pytest.approx(value, rel=1e-12)
    assert close(found["objective"]["gradient"], gradient, 1e-13)
    norm = np.linalg.norm(gradient)
    assert found["objective"]["gradient_norm"] == pytest.approx(norm, rel=1e-12)


def quotients(mean, variance, gradient, tiny):
    """Figures that divide, None where the eighth reading says that they have no meaning."""
    norm, length = np.linalg.norm(gradient), np.linalg.norm(mean)
    out = dict.fromkeys(QUOTIENTS)
    if norm > tiny:
        scale = out["scale"] = mean @ gradient / norm**2
        out["relative_bias"] = np.linalg.norm(mean - gradient) / norm
        if length > tiny:
            out["cosine"] = mean @ gradient / (length * norm)
        if abs(scale) * norm > tiny:
            out["relative_bias_rescaled"] = np.linalg.norm(mean / scale - gradient) / norm
            out["variance_rescaled"] = variance / scale**2
    return out


def assert_enumerated(row, listed):
    """Every figure of a row is that of the enumeration."""
    entry = ESTIMATORS[row["estimator"]]
    mean, variance = listed.moments(entry)
    drift, _ = listed.moments(entry, drift=True)
    _, gradient = listed.objective()
    largest = max(np.abs(prompt["rewards"]).max() for prompt in listed.prompts)
    assert close(row["mean"], mean)
    expected = {
        **quotients(mean, variance, gradient, 1e-12 * largest),
        "variance": variance,
        "drift": np.linalg.norm(drift),
    }
    for figure, value in expected.items():
        if value is None:
            assert row[figure] is None, figure
        else:
            assert row[figure] == pytest.approx(value, rel=1e-9, abs=1e-10), figure
    assert row["standard_error"] is None and row["engine"] != "sampling"


@pytest.mark.parametrize("name", ESTIMATORS)
def test_rows_are_those_of_the_enumeration(name, both):
    found, listed = both
    assert_enumerated(named(found["rows"])[name], listed)


def assert_random_file(folder, seed):
    """The whole catalogue on a random file is that of the enumeration."""
    data = scattered(random.Random(seed))
    group_size = 3 if data["horizon"] == 1 and len(data["prompts"]) == 1 else 2
    listed = Enumeration(data, group_size)
    for row in study(folder, data, *ESTIMATORS, group_size=group_size)["rows"]:
        assert_enumerated(row, listed)


@pytest.mark.parametrize("seed", range(4))
def test_random_files_are_those_of_the_enumeration(seed, tmp_path):
    assert_random_file(tmp_path, seed)


@pytest.mark.long
@pytest.mark.parametrize("seed", range(4, 104))
def test_more_random_files_are_those_of_the_enumeration(seed, tmp_path):
    assert_random_file(tmp_path, seed)


def test_every_entry_but_ppo_has_figures_and_ppo_a_reason(both):
    found, _ = both
    table = named(found["rows"])
    assert set(table) == {*ESTIMATORS, "ppo"}
    ppo = table["ppo"]
    assert (
        all(ppo[key] is None for key in (*FIGURES, "mean", "engine")) and "values" in ppo["reason"]
    )
    assert all("reason" not in table[name] for name in ESTIMATORS)


def test_the_document_is_the_contract(tmp_path):
    data = pair()
    found = study(tmp_path, data, "rloo", "ppo")
    assert found["schema"] == "windage/study/1" and found["seconds"] > 0
    assert {"name", "sha256"} <= set(found["problem"])
    assert found["problem"]["prompts"] == 2
    assert found["problem"]["responses"] == 2 * 7  # totals over prompts
    assert found["problem"]["parameters"] == 2 * 3 * 3
    assert len(found["objective"]["gradient"]) == 18
    keys = {"estimator", "settings", "group_size", "engine", "mean", *FIGURES}
    for row in found["rows"]:
        assert keys | {"unsupported_mass", "standard_error"} <= set(row)
        assert row["group_size"] == 4
    assert json.loads(json.dumps(found, allow_nan=False)) == found


def test_names_are_kept_as_given_and_in_the_order_given(tmp_path):
    chosen = (("token_tis", {"cap": 1.5}), ("rloo", {}), ("token_tis", {"cap": 4.0}))
    found = rows(tmp_path, tree(stale=True), *chosen)
    assert [row["estimator"] for row in found] == ["token_tis", "rloo", "token_tis"]
    assert [row["settings"] for row in found] == [{"cap": 1.5}, {}, {"cap": 4.0}]
    assert found[0]["variance"] < found[2]["variance"]


# Figures of the specification's claims on TREE, to the last digit printed there.


def test_claims_of_the_token_prefix_suffix_and_trajectory_ratio(tmp_path):
    names = ("reinforce", "token_is", "prefix_is", "suffix_is", "trajectory_is")
    found = rows(tmp_path, tree(stale=True), *names, group_size=2)
    bias = [row["relative_bias"] for row in found]
    assert bias == pytest.approx([0.8702, 0.3490, 0.2007, 0.2320, 0], abs=5e-5)
    drift = [row["drift"] for row in found]
    assert drift == pytest.approx([0.1844, 0, 0, 0, 0], abs=5e-5)


def test_claims_of_the_problem_itself(tmp_path):
    found = study(tmp_path, tree(), "rloo")["objective"]
    assert (found["value"], found["gradient_norm"]) == pytest.approx((0.503958, 0.092734), abs=5e-7)
    found = study(tmp_path, tree(reward=binary), "rloo")["objective"]
    assert (found["value"], found["gradient_norm"]) == pytest.approx((0.456529, 0.212074), abs=5e-7)


@pytest.mark.parametrize(("size", "bias"), [(2, 0.7268), (3, 0.6518), (4, 0.6273)])
def test_claims_of_dr_grpo_on_stale_data(size, bias, tmp_path):
    (row,) = rows(tmp_path, tree(stale=True), "dr_grpo", group_size=size)
    assert row["relative_bias_rescaled"] == pytest.approx(bias, abs=5e-5)
    assert row["settings"]["length"] == 3


@pytest.mark.parametrize(
    ("reward", "plain", "divided"),
    [
        (real, 0.03294, 0.02083),
        (binary, 0.09996, 0.07773),
        (lambda k: k / 14, 0.04879, 0.07527),
        (lambda k: float(k >= 3), 0.10541, 0.11579),
    ],
)
def test_claims_of_rescaled_variance_on_policy(reward, plain, divided, tmp_path):
    one, other = rows(tmp_path, tree(reward=reward), "dr_grpo", "grpo")
    assert one["relative_bias_rescaled"] < 1e-12
    assert one["variance_rescaled"] == pytest.approx(plain, abs=5e-6)
    assert other["variance_rescaled"] == pytest.approx(divided, abs=5e-6)


def test_claims_of_drift(tmp_path):
    names = ("token_tis", "sequence_tis", "centered", "centered_tis", "starting_point")
    found = rows(tmp_path, tree(stale=True), *names)
    expected = [0.0174, 0.0557, 0, 0, 0]
    assert [row["drift"] for row in found] == pytest.approx(expected, abs=5e-5)
    assert all(row["drift"] < 1e-12 for row in found[2:])


@pytest.mark.parametrize("size", [2, 3, 4])
def test_claims_of_the_full_group_mean(size, tmp_path):
    one, other = rows(tmp_path, tree(), "rloo", "group_mean", group_size=size)
    assert one["relative_bias"] < 1e-12
    assert other["scale"] == pytest.approx((size - 1) / size, rel=1e-12)
    assert other["relative_bias_rescaled"] < 1e-12
    ratio = other["variance"] / one["variance"]
    assert ratio == pytest.approx(((size - 1) / size) ** 2, rel=1e-10)


@pytest.mark.parametrize(("size", "cosine"), [(4, 0.9730), (8, 0.9874)])
def test_claims_of_the_group_std_inside_one_prompt(size, cosine, tmp_path):
    chances, rewards = (0.6, 0.3, 0.1), (0.0, 0.4, 1.0)
    prompt = (lambda n, v: math.log(chances[v]), None, lambda k: rewards[k])
    (row,) = rows(tmp_path, document(3, None, 1, [prompt]), "grpo", group_size=size)
    assert row["cosine"] == pytest.approx(cosine, abs=5e-5)


# The fixed readings.


def test_constant_length_divides_by_the_horizon_and_dapo_shapes_nothing(tmp_path):
    found = named(rows(tmp_path, tree(), "rloo", "dr_grpo", "starting_point", "dapo", group_size=2))
    for name in ("dr_grpo", "starting_point"):
        assert found[name]["settings"]["length"] == 3
        assert found[name]["scale"] == pytest.approx(found["rloo"]["scale"] / 2 / 3, rel=1e-12)
    assert found["dapo"]["settings"]["length"] is None
    longer = rows(tmp_path, tree(), ("dr_grpo", {"length": 6.0}), group_size=2)[0]
    assert longer["scale"] == pytest.approx(found["dr_grpo"]["scale"] / 2, rel=1e-12)


def test_constant_length_of_forced_tokens_is_the_longest_response():
    found = run(Settings(problem=("trajectories", {}), estimators=(("dr_grpo", {}),)))
    assert found["rows"][0]["settings"]["length"] == 15


def test_token_mean_counts_the_tokens_of_all_prompts(tmp_path):
    data = pair()
    (row,) = rows(tmp_path, data, "icepop", group_size=2)
    alone = {**data, "prompts": data["prompts"][:1]}
    (first,) = rows(tmp_path, alone, "icepop", group_size=2)
    half = np.array(first["mean"]) / 2
    assert not np.allclose(row["mean"][: len(half)], half, rtol=1e-3)


def test_equal_rewards_move_no_group_estimator_and_quotients_are_null(tmp_path):
    data = tree(stale=True, reward=lambda k: 0.3)
    found = study(tmp_path, data)
    assert found["objective"]["value"] == pytest.approx(0.3)
    for name, row in named(found["rows"]).items():
        assert all(row[key] is None for key in QUOTIENTS), name
        if name in ("dapo", "ppo"):
            assert row["reason"] and row["variance"] is row["mean"] is None
            continue
        assert "reason" not in row and row["drift"] is not None
        if name not in ("reinforce", "topr", "positives_only", "naive", "tis_both_signs"):
            assert not any(row["mean"]) and row["variance"] == pytest.approx(0, abs=1e-15)
    assert "every group is degenerate" in named(found["rows"])["dapo"]["reason"]


def test_zero_rewards_and_one_response_leave_nulls(tmp_path):
    single = document(1, 0, 5, [(current, behind, lambda k: 1.0)])
    for data in (tree(reward=lambda k: 0.0), single):
        found = study(tmp_path, data)
        assert found["objective"]["gradient_norm"] == 0
        for row in found["rows"]:
            assert all(row[key] is None for key in QUOTIENTS)
        json.dumps(found, allow_nan=False)


def test_a_quotient_is_null_where_the_estimate_vanishes(tmp_path):
    (row,) = rows(tmp_path, tree(stale=True), ("centered_mask", {"low": 9.0, "high": 9.0}))
    assert row["scale"] == 0 and row["relative_bias"] == 1
    assert row["cosine"] is row["relative_bias_rescaled"] is row["variance_rescaled"] is None
    assert row["variance"] == 0


def test_clips_are_strict_and_bands_inclusive(tmp_path):
    chosen = (
        ("grpo", {"clip_low": 0.0, "clip_high": 0.0}),
        ("grpo", {}),
        ("icepop", {"low": 1.0, "high": 1.0}),
        ("icepop", {}),
    )
    found = rows(tmp_path, tree(), *chosen, group_size=2)
    assert found[0]["mean"] == found[1]["mean"] and any(found[0]["mean"])
    assert found[2]["mean"] == found[3]["mean"] and any(found[2]["mean"])


def test_caps_of_cispo_and_the_starting_point_are_an_absolute_five(tmp_path):
    found = named(rows(tmp_path, tree(stale=True), "cispo", "starting_point"))
    assert found["cispo"]["settings"]["cap"] == found["starting_point"]["settings"]["cap"] == 5


def test_naive_equals_reinforce_and_rewards_of_either_sign_count(tmp_path):
    found = named(rows(tmp_path, pair(), "naive", "reinforce", "topr", "positives_only"))
    naive = found["naive"]
    assert close(naive["mean"], found["reinforce"]["mean"], 1e-14)
    assert naive["variance"] == pytest.approx(found["reinforce"]["variance"], rel=1e-12)
    for other in ("topr", "positives_only"):
        assert not close(naive["mean"], found[other]["mean"], 1e-3)


def test_unsupported_mass_is_the_policys_mass_never_drawn(tmp_path):
    listed = Enumeration(uncovered(), 2)
    (prompt,) = listed.prompts
    missing = prompt["pi_y"][prompt["mu_y"] == 0].sum()
    for row in rows(tmp_path, uncovered(), "trajectory_is", "rloo", "ppo"):
        assert row["unsupported_mass"] == pytest.approx(missing, rel=1e-12) and missing > 0.1
    (row,) = rows(tmp_path, tree(stale=True), "rloo")
    assert row["unsupported_mass"] == 0


def test_ids_sort_as_integers_in_gradient_and_mean(tmp_path):
    data = document(11, None, 2, [(current, None, lambda k: float(k % 5 == 0))])
    found = study(tmp_path, data, "rloo", group_size=2)
    _, gradient = Enumeration(data, 1).objective()
    assert close(found["objective"]["gradient"], gradient, 1e-13)
    assert close(found["rows"][0]["mean"], gradient, 1e-12)
    assert prefixes(11, None, 2)[3] == (2,) and prefixes(11, None, 2)[-1] == (10,)


# Group sizes, engines, behaviors, sweeps.


def test_a_group_of_one_leaves_group_estimators_undefined(tmp_path):
    found = named(rows(tmp_path, tree(), group_size=1))
    assert found["reinforce"]["relative_bias"] < 1e-12 and found["topr"]["scale"] is not None
    for name in ("rloo", "grpo", "centered", "starting_point"):
        assert found[name]["mean"] is None
        assert found[name]["reason"] == f"group 0 has size 1; {name} needs groups of at least 2"


def test_a_penalty_has_no_reference_here(tmp_path):
    (row,) = rows(tmp_path, tree(), ("grpo", {"coefficient": 0.1}))
    assert row["mean"] is None and "reference policy" in row["reason"]


def test_engines_agree_and_say_why_not(tmp_path):
    data = tree(stale=True, reward=binary)
    found = {
        engine: rows(tmp_path, data, "grpo", "rloo", group_size=2, engine=engine)
        for engine in ("tuples", "compositions", "classes", "prefix_tree", "coupled")
    }
    for engine in ("compositions", "classes"):
        for row, other in zip(found[engine], found["tuples"], strict=True):
            assert (row["engine"], row["why"]) == (engine, "asked for")
            assert close(row["mean"], other["mean"])
            assert row["variance"] == pytest.approx(other["variance"], rel=1e-10)
    assert found["prefix_tree"][1]["mean"] is not None
    assert close(found["coupled"][0]["mean"], found["tuples"][0]["mean"])
    refused = [found["prefix_tree"][0], found["coupled"][1]]
    for row, word in zip(refused, ("not affine", "no ratio couples"), strict=True):
        assert row["mean"] is None and word in row["reason"]
        assert row["engine"] in ("prefix_tree", "coupled")
    (row,) = rows(tmp_path, data, "grpo", group_size=9, engine="tuples")
    assert row["mean"] is None and "would touch" in row["reason"]


def test_groups_too_many_to_count_are_no_error():
    assert math.isinf(count_tuples(token_tree(8), 256, joint=False))
    assert math.isinf(count_multisets(bandit(1000), 1000, joint=True))
    settings = Settings(
        problem=("token_tree", {"horizon": 8}),
        estimators=(("rloo", {}), ("worst_token_mask", {})),
        group_size=1000,
        samples=32,
    )
    exact, sampled = run(settings)["rows"]
    assert exact["scale"] == pytest.approx(1) and exact["standard_error"] is None
    assert sampled["engine"] == "sampling" and "no exact engine" in sampled["why"]


def test_sampled_rows_cover_the_exact_ones_with_common_draws(tmp_path):
    names = ("grpo", "rloo", "trajectory_is", "dapo", "centered")
    data = pair()
    true = rows(tmp_path, data, *names, group_size=2)
    draws = {"group_size": 2, "engine": "sampling", "samples": 2**13}
    drawn = rows(tmp_path, data, *names, **draws, seed=3)
    for exact, row in zip(true, drawn, strict=True):
        assert row["engine"] == "sampling"
        assert set(row["standard_error"]) == {*FIGURES, "signal_to_noise"}
        for name, error in row["standard_error"].items():
            assert abs(row[name] - exact[name]) <= 5 * error + 1e-9, (row["estimator"], name)
        assert row["standard_error"]["variance"] < 0.1 * row["variance"]
    fair = named(drawn)["trajectory_is"]
    assert fair["standard_error"]["relative_bias"] > 0
    again = rows(tmp_path, data, "grpo", **draws, seed=3)[0]
    other = rows(tmp_path, data, "grpo", **draws, seed=4)[0]
    assert again["mean"] == drawn[0]["mean"] != other["mean"]


def test_a_behavior_takes_the_place_of_the_files(tmp_path):
    (row,) = rows(tmp_path, tree(stale=True), "reinforce", behavior=("stale", {"steps": 0}))
    assert row["relative_bias"] < 1e-12
    (row,) = rows(tmp_path, tree(), "reinforce", behavior=("top_k", {"k": 1}))
    assert row["unsupported_mass"] > 0.5
    found = study(tmp_path, tree(), "rloo", behavior=("noise", {"sigma": 1.0}), seed=1)
    other = study(tmp_path, tree(), "rloo", behavior=("noise", {"sigma": 1.0}), seed=2)
    assert found["rows"][0]["mean"] != other["rows"][0]["mean"]
    assert found["behavior"] == {"kind": "noise", "sigma": 1.0}
    assert study(tmp_path, tree(stale=True), "rloo")["behavior"] == {"kind": "file"}
    assert study(tmp_path, tree(), "rloo")["behavior"] == {"kind": "policy"}


def test_a_behavior_that_overflows_is_bad_input(tmp_path):
    with pytest.raises(BadInput, match=r"temperature:t=1e-310 overflows float64"):
        study(tmp_path, tree(), "rloo", behavior=("temperature", {"t": 1e-310}))


def test_sweeps_make_a_grid_and_every_row_says_where_it_is(tmp_path):
    told = []
    settings = Settings(
        problem=("token_tree", {"horizon": 2}),
        estimators=(("token_tis", {"cap": 9.0}), ("rloo", {})),
        behavior=("stale", {"steps": 1, "rate": 2.0}),
        sweep={"horizon": (2, 3), "steps": (0, 4), "cap": (1.0, 2.0), "group_size": (2, 8)},
    )
    found = run(settings, lambda done, total: told.append((done, total)))
    table = found["rows"]
    assert len(table) == 32 and told[-1] == (32, 32)
    places = [tuple(row[k] for k in ("horizon", "steps", "cap", "group_size")) for row in table]
    assert len(set(places)) == 16 and places[0] == (2, 0, 1.0, 2) and places[-1] == (3, 4, 2.0, 8)
    at = {(row["estimator"], *place): row for row, place in zip(table, places, strict=True)}
    assert at["token_tis", 3, 4, 1.0, 2]["settings"] == {"cap": 1.0}
    assert at["token_tis", 3, 4, 1.0, 2]["mean"] != at["token_tis", 3, 4, 2.0, 2]["mean"]
    assert at["rloo", 3, 4, 1.0, 2]["mean"] == at["rloo", 3, 4, 2.0, 2]["mean"]
    assert at["rloo", 3, 4, 1.0, 2]["variance"] > 3 * at["rloo", 3, 4, 1.0, 8]["variance"]
    assert at["rloo", 3, 0, 1.0, 2]["relative_bias"] < 1e-12
    assert at["rloo", 3, 4, 1.0, 2]["relative_bias"] > 0.01
    assert len(at["rloo", 2, 0, 1.0, 2]["mean"]) == 9 < len(at["rloo", 3, 0, 1.0, 2]["mean"])
    assert found["problem"]["horizon"] == 2 and len(found["objective"]["gradient"]) == 9
    first, last = table[0], table[-1]
    assert first["objective_value"] == found["objective"]["value"] != last["objective_value"]
    alone = run(
        Settings(
            problem=("token_tree", {"horizon": 3}),
            estimators=(("token_tis", {"cap": 2.0}),),
            behavior=("stale", {"steps": 4, "rate": 2.0}),
            group_size=8,
        )
    )
    assert alone["rows"][0]["mean"] == at["token_tis", 3, 4, 2.0, 8]["mean"]


def test_infinite_settings_are_words(tmp_path):
    (row,) = rows(tmp_path, tree(stale=True), ("topr", {"a_pos": 0.0, "b_pos": math.inf}))
    assert row["settings"]["b_pos"] == "inf" and row["settings"]["a_pos"] == 0
    assert row["relative_bias"] < 1e-10


@pytest.mark.parametrize("size", [1e150, 1e170, 1e308])
def test_figures_beyond_float64_are_null_with_a_reason(size, tmp_path):
    found = study(tmp_path, tree(stale=True, reward=lambda k: size * (k % 3 - 1)))
    json.dumps(found, allow_nan=False)
    for row in found["rows"]:
        if row["variance"] is None:
            assert row["reason"]


def test_ratios_near_the_end_of_float64(tmp_path):
    data = tree(stale=True)
    data["prompts"][0]["behavior"][""][2] = -700.0
    (row,) = rows(tmp_path, data, "trajectory_is")
    assert row["unsupported_mass"] == 0 and row["relative_bias"] < 1e-9
    assert row["variance"] > 1e100
    data["prompts"][0]["behavior"][""][2] = -744.0
    data["prompts"][0]["rewards"]["2"] = 1e20
    (row,) = rows(tmp_path, data, "trajectory_is")
    assert row["variance"] is None and "float64" in row["reason"]
