"""What decides between estimators: against rows' own mean and variance, and by plain counting."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import numpy as np
import pytest
from checks import assert_close
from hypothesis import given
from hypothesis import strategies as st
from problem_files import Enumeration, pair, tree, write
from problem_strategies import drawn
from test_transfer import stale, unrolled

from windage.analysis.studies import decision
from windage.analysis.studies.best import NAMES as EXCESS
from windage.analysis.studies.decision import (
    BATCHES,
    UNBIASED,
    Error,
    batches_needed,
    crossover,
    decided,
)
from windage.analysis.studies.study import Settings, run
from windage.cli.main import main
from windage.toy.chains import reasoning
from windage.toy.exact.mismatch import marks, mismatch
from windage.toy.exact.walk import Walk
from windage.toy.problem_file import read

ENTRIES = ("rloo", "group_mean", "token_is", "prefix_is", "trajectory_is", "grpo", "reinforce")
FORMS = ("", "_rescaled")
SIZES = st.floats(min_value=0, max_value=4)
SPREADS = st.floats(min_value=1e-3, max_value=300)


def study(folder, data, *names, **settings):
    chosen = tuple((name, {}) for name in names or ENTRIES)
    return run(Settings(problem=read(write(folder, data)), estimators=chosen, **settings))


@pytest.fixture(scope="module", params=["tree", "pair"])
def found(request, tmp_path_factory):
    """A study of one prompt or two, its frontier included."""
    data = {"tree": lambda: tree(stale=True), "pair": pair}[request.param]()
    folder = tmp_path_factory.mktemp(request.param)
    return study(folder, data, frontier=4, error=0.3, group_size=3)


def errors(row, gradient, form):
    """Squared bias and variance in units of the gradient, from the row's mean and variance."""
    mean, norm = np.array(row["mean"]), np.linalg.norm(gradient)
    scale = mean @ gradient / norm**2 if form else 1.0
    bias = np.linalg.norm(mean / scale - gradient) / norm
    return bias**2, row["variance"] / scale**2 / norm**2


# Columns, from the rows' own mean and variance.


@pytest.mark.parametrize("form", FORMS)
def test_errors_by_groups(found, form):
    gradient, prompts = np.array(found["objective"]["gradient"]), found["problem"]["prompts"]
    for row in found["rows"]:
        if form and row["scale"] <= 0:
            assert row[f"relative_error_by_groups{form}"] is None
            continue
        bias, variance = errors(row, gradient, form)
        by_groups = row[f"relative_error_by_groups{form}"]
        assert list(by_groups) == [str(prompts * n) for n in BATCHES]
        expected = [math.sqrt(bias + variance / n) for n in BATCHES]
        assert_close(list(by_groups.values()), expected, relative=1e-9)


def count(holds, most=20000):
    """The first whole number at which a condition holds, by counting."""
    return next((n for n in range(1, most) if holds(n)), None)


@pytest.mark.parametrize("form", FORMS)
def test_groups_needed(found, form):
    gradient, prompts = np.array(found["objective"]["gradient"]), found["problem"]["prompts"]
    some = 0
    for row in found["rows"]:
        needed = row[f"groups_needed{form}"]
        if form and row["scale"] <= 0:
            assert needed is None and row[f"groups_needed_reason{form}"]
            continue
        bias, variance = errors(row, gradient, form)
        batches = count(lambda n, b=bias, v=variance: b + v / n <= found["error"] ** 2)
        if batches is None:
            assert needed is None and row[f"responses_needed{form}"] is None
            assert f"{math.sqrt(bias):.3g}" in row[f"groups_needed_reason{form}"]
        else:
            assert needed == batches * prompts and row[f"groups_needed_reason{form}"] is None
            assert row[f"responses_needed{form}"] == needed * row["group_size"]
            some += 1
    assert some


@pytest.mark.parametrize("form", FORMS)
def test_crossovers(found, form):
    gradient, prompts = np.array(found["objective"]["gradient"]), found["problem"]["prompts"]
    rows = [row for row in found["rows"] if not form or row["scale"] > 0]
    free = [row for row in rows if errors(row, gradient, form)[0] < 1e-20]
    best = min(free, key=lambda row: errors(row, gradient, form)[1])
    assert best["estimator"] == "trajectory_is"
    for row in rows:
        if row in free:
            assert row[f"crossover_groups{form}"] is None
            continue
        (b, v), (c, w) = errors(row, gradient, form), errors(best, gradient, form)
        expected = count(lambda n, b=b, v=v, c=c, w=w: b + v / n > c + w / n)
        assert row[f"crossover_groups{form}"] == expected * prompts
        assert row[f"crossover_responses{form}"] == expected * prompts * row["group_size"]
        assert row[f"crossover_against{form}"] == "trajectory_is"


def test_signal_to_noise(found):
    for row in found["rows"]:
        expected = np.dot(row["mean"], row["mean"]) / row["variance"]
        assert_close(row["signal_to_noise"], expected)


def test_without_bias_and_variance_nothing_is_decided(tmp_path):
    (row,) = study(tmp_path, tree(), "ppo", frontier=1)["rows"]
    names = [name for name in (*decision.NAMES, *EXCESS) if "reason" not in name]
    assert all(row[name] is None for name in names)
    assert row["groups_needed_reason"] == "no bias and variance"


def test_rows_are_compared_inside_a_point(tmp_path):
    """Each group size has a quietest unbiased entry of its own."""
    rows = study(tmp_path, tree(stale=True), "rloo", "trajectory_is", sweep={"group_size": (2, 8)})[
        "rows"
    ]
    alone = study(tmp_path, tree(stale=True), "rloo", "trajectory_is", group_size=8)["rows"]
    by_size = {(r["estimator"], r["group_size"]): r["crossover_groups"] for r in rows}
    assert by_size["rloo", 8] == alone[0]["crossover_groups"] != by_size["rloo", 2]
    (single,) = study(tmp_path, tree(stale=True), "rloo")["rows"]
    assert single["crossover_groups"] is None and single["crossover_against"] is None


def test_sampled_rows_are_not_held_to_be_without_bias(tmp_path):
    names = ("rloo", "trajectory_is")
    found = study(tmp_path, tree(stale=True), *names, engine="sampling", samples=64)
    assert all(row["crossover_groups"] is None for row in found["rows"])


# The rules themselves, by counting.


@given(SIZES, SPREADS, st.floats(min_value=0.05, max_value=3))
def test_batches_needed_by_counting(bias, variance, wanted):
    expected = count(lambda n: bias + variance / n <= wanted**2, 3000)
    found = batches_needed(Error(bias, variance), wanted)
    assert found == expected or (expected is None and (found is None or found >= 3000))


@given(st.floats(min_value=1e-3, max_value=4), SPREADS, SIZES, SPREADS)
def test_crossover_by_counting(bias, variance, less, more):
    bias, less = bias + less, less
    expected = count(lambda n: bias + variance / n > less + more / n, 3000)
    found = crossover(Error(bias, variance), Error(less, more))
    assert found == expected or (expected is None and (found is None or found >= 3000))


def test_edges():
    assert batches_needed(Error(0.0, 0.0), 0.1) == 1
    assert batches_needed(Error(0.25, 0.0), 0.5) == 1
    assert batches_needed(Error(0.25, 1.0), 0.5) is None
    assert batches_needed(Error(0.0, 1e300), 0.1) == pytest.approx(1e302)
    assert batches_needed(Error(0.0, 1e308), 1e-3) is None
    assert crossover(Error(1.0, 9.0), Error(0.0, 1.0)) == 1
    assert crossover(Error(0.0, 1.0), Error(0.0, 2.0)) is None


def made(name, bias, variance):
    """A row of a gradient of length 2 with a scale of 1."""
    figures = {"relative_bias": bias, "variance": variance, "scale": 1.0, "gradient_norm": 2.0}
    rescaled = {"relative_bias_rescaled": bias, "variance_rescaled": variance}
    return {"estimator": name, "group_size": 5, "standard_error": None, **figures, **rescaled}


def test_the_quietest_unbiased_entry_is_the_rival():
    rows = [made("loud", 0.0, 40.0), made("biased", 0.5, 4.0), made("quiet", 1e-12, 20.0)]
    found = decided(rows, prompts=3)
    assert [row["crossover_against"] for row in found] == [None, "quiet", None]
    assert found[1]["crossover_groups"] == 3 * 17 and found[1]["crossover_responses"] == 15 * 17
    wrong = {**made("wrong", 0.0, 1.0), "scale": -1.0}
    assert decided([*rows, wrong], prompts=3)[1]["crossover_against"] == "quiet"


def test_figures_beyond_float64_leave_no_infinity():
    row = {"estimator": "x", "group_size": 2, "standard_error": None, "scale": 1.0}
    row |= {"relative_bias": 1e200, "variance": 1e300, "gradient_norm": 1e-100}
    row |= {"relative_bias_rescaled": None, "variance_rescaled": None}
    (found,) = decided([row], prompts=1)
    json.dumps(found, allow_nan=False)
    assert found["relative_error_by_groups"] is None


# The frontier, beside the rows.


def test_excess_is_what_the_curve_leaves(found):
    """Straight lines between the curve's points are attained: they bound what a row could have."""
    for row in found["rows"]:
        curve = [p for p in found["frontier"] if p["advantage"] == row["frontier_advantage"]]
        norm = found["objective"]["gradient_norm"]
        bias = np.array([p["relative_bias"] ** 2 for p in curve])
        variance = np.array([p["variance"] for p in curve])
        order = np.argsort(variance)
        least = np.interp(row["variance"], variance[order], bias[order])
        attained = row["relative_bias"] - row["excess_bias"]
        assert attained**2 <= least * (1 + 1e-9) + 1e-12
        assert attained**2 >= 0.7 * least - 1e-9
        order = np.argsort(bias)
        least = np.interp(row["relative_bias"] ** 2, bias[order], variance[order])
        quietest = row["variance"] / (1 + row["excess_variance"])
        inside = row["relative_bias"] ** 2 >= bias.min()
        assert 0.7 * least <= quietest <= least * (1 + (1e-9 if inside else 1e-2))
        mse = bias * norm**2 + variance / 4
        mine = row["relative_bias"] ** 2 * norm**2 + row["variance"] / 4
        assert mine / mse.min() / (1 + row["excess_error"]) * 1.05 >= 1 and row["excess_error"] > -1
        assert mine / (1 + row["excess_error"]) <= mse.min() * (1 + 1e-9)


def test_entries_of_the_class_have_no_negative_excess(found):
    for row in found["rows"]:
        if row["estimator"] in ("rloo", "group_mean", "token_is", "prefix_is", "reinforce"):
            for name in EXCESS:
                assert row[name] is None or row[name] > -1e-6, (row["estimator"], name)


def test_points_of_the_frontier_say_what_they_are(found):
    prompts = found["problem"]["prompts"]
    assert {p["advantage"] for p in found["frontier"]} == {
        "leave_one_out",
        "constant(baseline=0)",
    }
    for p in found["frontier"]:
        assert p["residual"] < 1e-8 and p["group_size"] == 3
        assert p["groups"] == pytest.approx(prompts * p["batches"])
        norm = found["objective"]["gradient_norm"]
        error = math.sqrt(p["relative_bias"] ** 2 + p["variance"] / p["batches"] / norm**2)
        assert p["relative_error"] == pytest.approx(error, rel=1e-9)
        assert p["variance_rescaled"] == pytest.approx(p["variance"] / p["scale"] ** 2)


def test_the_flags(capsys):
    words = ["study", "--behavior", "stale:steps=4", "--estimators", "rloo", "token_is"]
    assert (
        main([*words, "--sweep", "steps=1,4", "--frontier", "16", "--error", "0.5", "--json"]) == 0
    )
    found = json.loads(capsys.readouterr().out)
    assert found["error"] == 0.5 and found["frontier_batches"] == 16
    assert {p["steps"] for p in found["frontier"]} == {1, 4}
    assert all(row["excess_error"] is not None for row in found["rows"])
    assert main([*words, "--json"]) == 0
    plain = json.loads(capsys.readouterr().out)
    assert "frontier" not in plain and "excess_error" not in plain["rows"][0]
    assert plain["error"] == 0.1
    assert main([*words, "--frontier", "none"]) == 2
    assert main([*words, "--error", "-1"]) == 2


# Effective sample size and divergence, by listing responses.


@pytest.mark.parametrize("data", [tree(stale=True), pair()], ids=["tree", "pair"])
def test_effective_shares_by_enumeration(data, tmp_path):
    listed = Enumeration(data, 2)
    (row,) = study(tmp_path, data, "rloo")["rows"]
    tokens, responses = [], []
    for prompt in listed.prompts:
        mu, w = prompt["mu_y"], prompt["pi_y"] / prompt["mu_y"]
        responses.append(1 / (mu @ w**2))
        counted = [
            (m, prompt["ratio"][s]) for m, p in zip(mu, prompt["steps"], strict=True) for s in p
        ]
        weight, ratio = np.array(counted).T
        tokens.append(weight.sum() / (weight @ ratio**2))
    assert_close(row["effective_share_token"], np.mean(tokens))
    assert_close(row["effective_share_response"], np.mean(responses))
    assert_close(row["chi_squared_token"], np.mean(1 / np.array(tokens) - 1))
    assert_close(row["chi_squared_response"], np.mean(1 / np.array(responses) - 1))
    assert row["chi_squared_response"] == row["chi_squared_by_length"][str(data["horizon"])]


def test_chi_squared_by_length_by_enumeration(tmp_path):
    data = tree(stale=True)
    (prompt,) = Enumeration(data, 2).prompts
    (row,) = study(tmp_path, data, "rloo")["rows"]
    for t, value in row["chi_squared_by_length"].items():
        first = [math.prod(prompt["ratio"][s] for s in path[: int(t)]) for path in prompt["steps"]]
        assert_close(value, prompt["mu_y"] @ np.square(first) - 1)


@pytest.mark.parametrize("dropped", [False, True])
def test_a_chain_has_the_shares_of_its_tree(dropped):
    chain = stale(reasoning(5, (0.3, 0.7)))
    if dropped:
        behavior = chain.behavior_logp.clone()
        behavior[:, 1, 2] = -math.inf
        chain = replace(chain, behavior_logp=behavior.log_softmax(-1))
    problem, _ = unrolled(chain)
    found, expected = mismatch(chain), mismatch(problem)
    for name in expected:
        if name != "chi_squared_by_length":
            assert_close(found[name], expected[name])
    assert_close(
        list(found["chi_squared_by_length"].values()),
        list(expected["chi_squared_by_length"].values()),
    )


def test_divergence_grows_with_length_and_may_leave_float64():
    found = mismatch(stale(reasoning(2**15), 1.0))
    by_length = found["chi_squared_by_length"]
    assert list(by_length) == [str(t) for t in marks(2**15)]
    values = [v for v in by_length.values() if v is not None]
    assert values == sorted(values) and values[5] > 10 * values[2]
    json.dumps(found, allow_nan=False)


def test_shares_are_of_the_weights_that_are_drawn():
    """Also where the sampler leaves responses out: then 1 / E[w^2] could exceed 1."""
    for number in range(40):
        problem = drawn(number)
        found, walk = mismatch(problem), Walk(problem)
        w = walk.at_leaves(walk.path_ratio).exp()
        first, second = ((walk.leaf_flow * w**k).sum(-1) for k in (1, 2))
        if bool(second.isfinite().all()):
            share = (first.square() / second).mean()
            assert_close(found["effective_share_response"], share)
            assert 0 < found["effective_share_response"] <= 1 + 1e-12
            token = walk.log_ratio.exp()
            first, second = ((walk.flow * token**k).sum((1, 2)) for k in (1, 2))
            share = (first.square() / second / walk.flow.sum((1, 2))).mean()
            assert_close(found["effective_share_token"], share)
            assert math.isfinite(found["chi_squared_response"])


def test_unbiased_means_to_rounding():
    assert UNBIASED == 1e-10
