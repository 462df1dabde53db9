"""The table of exact properties P-01 to P-48 of the specification, by enumeration.

An identity holds to 1e-10 on every drawn problem, by the logits of each prefix and, being linear,
by any parameters that the logits share; what is said to differ shows it on a named witness.  Rows
about members that the library does not have are listed in `ABSENT` and skipped with the reason.
"""

import itertools
import math
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from checks import (
    Brute,
    assert_apart,
    assert_close,
    assert_parallel,
    assert_skew,
    assert_unbiased,
    assert_zero,
    enumerated_mean,
    mixture,
    moments,
    pull,
    token_scores,
    with_values,
)
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from strategies import batches, features, numbers, problems

from windage.estimators.admission import difficulty_band, overlong, zero_variance
from windage.estimators.advantage import (
    batch_std,
    constant,
    gae,
    group_mean,
    group_std,
    leave_one_out,
)
from windage.estimators.aggregation import (
    constant_length,
    prompt_mean,
    sequence_mean,
    token_mean,
    token_sum,
)
from windage.estimators.batch import Batch
from windage.estimators.catalogue import get
from windage.estimators.centering import exact, top_k
from windage.estimators.correction import (
    Correction,
    band,
    clip,
    dual_clip,
    geometric,
    none,
    prefix,
    ratio,
    suffix,
    taper,
    tapered,
    token,
    trajectory,
    truncate,
)
from windage.estimators.diagnostics import effective_sample_size
from windage.estimators.estimator import batch_terms, token_coefficients
from windage.estimators.maps import (
    gamma_weight,
    inverse_positive,
    kl_mask,
    mask_negative,
    soft_gate,
    tv_mask,
)
from windage.estimators.member import use
from windage.estimators.penalty import (
    entropy,
    k1,
    k2,
    k3,
    loss_k1,
    loss_k2,
    loss_k3,
    loss_k3_weighted,
    reward_k1,
    reward_k3,
    timeout_failure,
)
from windage.toy.behavior import with_behavior
from windage.toy.exact.moments import Undefined
from windage.toy.exact.optimum import optimal_baseline
from windage.toy.exact.plan import exact as engine
from windage.toy.exact.tuples import compositions, every_multiset, listed, multinomial, spread
from windage.toy.objective import objective
from windage.toy.problems import Tree, bandit, difficulties, make, token_tree

ABSENT = {
    "P-22": "per-decision importance sampling is not in the catalogue: rewards here are terminal",
}
PARTLY_ABSENT = {
    "P-10": "Delta-L is not in the catalogue",
    "P-13": "shrinkage, running and greedy baselines are not in the catalogue; a constant is",
    "P-27": "GEPO is not in the catalogue",
    "P-43": "CPPO, Delta-L and GEPO are not in the catalogue; the batch's std is",
    "P-44": "k2 of a whole response and the straight-through forms are not in the catalogue",
    "P-45": "rounds of refresh belong to llm/'s reference",
    "P-46": "OAPL is not in the catalogue",
}
one = (1,)
few = settings(max_examples=12)
off = problems(prompts=one, on_policy=False, leaves=9)
on = problems(prompts=one, on_policy=True, leaves=9)
WITNESS = with_behavior(token_tree(3), "noise", sigma=0.5)
RATIOS = (token, prefix, suffix, trajectory)


def plain(
    *corrections, advantage=constant, aggregation=token_sum, centering=None, penalties=(), **own
):
    """An estimator of members, with the corrections given as pairs of a reach and a map."""
    return replace(
        get("reinforce"),
        advantage=use(advantage, **own),
        corrections=tuple(Correction(reach=use(r), map=m) for r, m in corrections)
        or get("reinforce").corrections,
        aggregation=use(aggregation),
        centering=None if centering is None else use(centering),
        penalties=penalties,
    )


def mean(estimator, problem, group_size=1):
    return moments(estimator, problem, group_size).mean


def laws(problem):
    return Brute(problem, problem.logp), Brute(problem, problem.behavior_logp)


def responses(problem):
    """Probability under the sampler, rewards, log-ratio of each token, mask, token scores."""
    prefixes, tokens = problem.tree.paths
    mask = prefixes >= 0
    x = (problem.logp - problem.behavior_logp)[0][prefixes.clamp(min=0), tokens.clamp(min=0)]
    mu = Brute(problem, problem.behavior_logp).response
    return mu, problem.rewards[0], torch.where(mask, x, 0.0), mask, token_scores(problem)


def by_hand(problem, weight, paid=None):
    """E_mu of paid times the sum of weight `[M T]` times score."""
    mu, rewards, _, _, scores = responses(problem)
    paid = rewards if paid is None else paid
    return torch.einsum("m,mt,mtnv->nv", mu * paid, weight, scores).unsqueeze(0)


# The table itself


def test_every_row_is_tested_or_says_why_not():
    rows = {f"P-{n:02d}" for n in range(1, 49)}
    tested = set()
    for name in re.findall(r"^def test_((?:p\d\d_)+)", Path(__file__).read_text(), re.M):
        tested |= {f"P-{n}" for n in re.findall(r"\d\d", name)}
    assert tested | set(ABSENT) == rows, sorted(rows - tested - set(ABSENT))
    assert not tested & set(ABSENT)
    assert set(PARTLY_ABSENT) <= tested


@pytest.mark.parametrize("row", [*ABSENT, *PARTLY_ABSENT])
def test_rows_about_absent_members(row):
    pytest.skip((ABSENT | PARTLY_ABSENT)[row])


# P-01 to P-17: baselines, advantages, aggregation


@few
@given(on, st.data())
def test_p01_baselines_that_look_at_the_prefix_keep_the_gradient(problem, data):
    assert_unbiased(get("reinforce", baseline=0.75), problem, 1)
    values = data.draw(numbers(problem.tree.prefixes))
    critic = plain(advantage=get("ppo").advantage.function, lam=1.0)
    found = enumerated_mean(critic, problem, 1, with_values(problem, values))
    gradient = objective(problem).gradient
    assert_close(found, gradient)
    phi = data.draw(features(problem))
    assert_close(torch.einsum("pnv,nvd->d", found, phi), torch.einsum("pnv,nvd->d", gradient, phi))


def test_p02_a_baseline_that_looks_at_the_outcome_breaks_it():
    problem = token_tree(3)

    def peeking(of):
        return lambda batch, index: replace(
            batch, values=of(batch).unsqueeze(-1).expand(batch.mask.shape).double()
        )

    critic = plain(advantage=get("ppo").advantage.function, lam=1.0)
    for of in (lambda b: b.lengths, lambda b: b.rewards / 2):
        found = enumerated_mean(critic, problem, 1, peeking(of))
        assert_apart(found, objective(problem).gradient, at_least=1e-3)


@few
@given(problems(prompts=(1, 2), on_policy=True, leaves=7), st.sampled_from([2, 3, 5]))
def test_p03_p04_leave_one_out_is_unbiased_and_the_mean_a_share(problem, group_size):
    assert_unbiased(get("rloo"), problem, group_size)
    gradient, share = objective(problem).gradient, (group_size - 1) / group_size
    assert_close(mean(get("group_mean"), problem, group_size), share * gradient)
    dr = replace(plain(advantage=group_mean), aggregation=use(constant_length, length=7.0))
    assert_close(mean(dr, problem, group_size), share / 7 * gradient)
    rewards = problem.rewards[:, :group_size]
    if rewards.shape[1] > 1:
        size = rewards.shape[1]
        assert_close(group_mean(rewards), (size - 1) / size * leave_one_out(rewards))


@given(st.lists(st.booleans(), min_size=2, max_size=8), st.data())
def test_p05_groups_of_binary_rewards_by_their_difference(hits, data):
    assume(0 < sum(hits) < len(hits))
    rewards = torch.tensor([hits]).double()
    scores = data.draw(numbers(len(hits), 3))
    found = torch.tensor(hits)
    difference = scores[found].mean(0) - scores[~found].mean(0)
    rate = rewards.mean()
    spread_ = (rate * (1 - rate)).sqrt()
    assert_close(group_mean(rewards)[0] @ scores / len(hits), spread_**2 * difference)
    assert_close(group_std(rewards, ddof=0, eps=0.0)[0] @ scores / len(hits), spread_ * difference)


def factor(p, group_size):
    """E[sqrt(K/G (1 - K/G))] / (p (1 - p)) of a binomial K."""
    total = 0.0
    for k in range(group_size + 1):
        chance = math.comb(group_size, k) * p**k * (1 - p) ** (group_size - k)
        total += chance * math.sqrt(k / group_size * (1 - k / group_size))
    return total / (p * (1 - p))


@few
@given(problems(prompts=one, rewards=("binary",), on_policy=True), st.sampled_from([2, 3, 6]))
def test_p06_the_mean_of_grpo_on_a_binary_reward(problem, group_size):
    p = float(objective(problem).value)
    assume(0.01 < p < 0.99)
    gradient = objective(problem).gradient
    assume(float(gradient.norm()) > 1e-6)
    for ddof in (0, 1):
        found = mean(plain(advantage=group_std, ddof=ddof, eps=0.0), problem, group_size)
        bessel = math.sqrt((group_size - ddof) / group_size)
        assert_close(found, bessel * factor(p, group_size) * gradient)


def test_p07_large_groups_weigh_by_one_over_sigma():
    problem = bandit(3)
    p = float(objective(problem).value)
    limit = objective(problem).gradient / math.sqrt(p * (1 - p))
    gaps = [
        relative_gap(mean(plain(advantage=group_std, eps=0.0), problem, size), limit)
        for size in (16, 64, 256)
    ]
    assert gaps[0] > gaps[1] > gaps[2] and gaps[2] < 0.01
    assert 3 < gaps[0] / gaps[1] < 5 and 3 < gaps[1] / gaps[2] < 5


def relative_gap(a, b):
    return float((a - b).norm() / b.norm())


def test_p08_the_std_turns_the_direction_of_a_real_reward():
    problem = token_tree(2)
    rewards = torch.tensor([[0.0, 0.1, 0.9, 0.3, 1.0, 0.2, 0.0]], dtype=torch.float64)
    problem = replace(problem, rewards=rewards)
    found = mean(plain(advantage=group_std), problem, 3)
    assert_skew(found, objective(problem).gradient, at_least=1e-2)


@given(st.integers(2, 9), st.integers(1, 19))
def test_p09_the_mean_of_groups_that_vary(group_size, twentieths):
    p = twentieths / 20
    counts = compositions(2, group_size)
    chance = multinomial(counts, torch.tensor([1 - p, p], dtype=torch.float64))
    rewards = spread(counts, group_size).double().unsqueeze(1)
    kept = zero_variance(rewards, rewards == rewards)[:, 0, 0]
    law = chance * kept / (chance * kept).sum()
    found = float((law * rewards.mean((-2, -1))).sum())
    expected = (p - p**group_size) / (1 - p**group_size - (1 - p) ** group_size)
    assert_close(found, expected)
    if group_size > 2 and p != 0.5:
        assert (found > p) == (p < 0.5)


@few
@given(problems(prompts=one, on_policy=True, fixed=True, leaves=9))
def test_p10_equal_lengths_make_aggregations_parallel(problem):
    gradient = objective(problem).gradient
    assume(float(gradient.norm()) > 1e-6)
    for member in (token_sum, sequence_mean, token_mean, prompt_mean):
        assert_parallel(
            mean(plain(advantage=leave_one_out, aggregation=member), problem, 2), gradient
        )


@pytest.mark.parametrize("member", [sequence_mean, token_mean, prompt_mean])
def test_p10_lengths_that_vary_do_not(member):
    problem = token_tree(3)
    found = mean(plain(advantage=leave_one_out, aggregation=member), problem, 2)
    assert_skew(found, objective(problem).gradient, at_least=1e-3)


@few
@given(off)
def test_p11_the_best_constant_baseline(problem):
    mu, rewards, x, _, scores = responses(problem)
    size = scores.sum(1).flatten(1).square().sum(-1)
    for weight, corrections in (
        (torch.ones_like(mu), ()),
        (x.sum(-1).exp(), ((trajectory, use(ratio)),)),
    ):
        second = mu * weight.square() * size
        if not corrections:
            second = Brute(problem, problem.logp).response * size
        best = float((second * rewards).sum() / second.sum())
        where = problem if corrections else problem.on_policy()

        def variance(b, corrections=corrections, where=where):
            return float(moments(plain(*corrections, baseline=b), where, 1).variance)

        assert_close(optimal_baseline(where, plain(*corrections)), best, relative=1e-8)
        low, least, high = (variance(best + d) for d in (-1.0, 0.0, 1.0))
        assert_close(low - least, high - least, relative=1e-8)
        assert_close(low - least, float(second.sum()), relative=1e-8)


@few
@given(problems(prompts=(1, 2), on_policy=True, leaves=7), st.sampled_from([2, 3]))
def test_p12_the_weighted_mean_of_the_others_is_unbiased(problem, group_size):
    assert_unbiased(get("opo_leave_one_out"), problem, group_size)


def test_p12_the_weighted_mean_with_the_own_part_is_not():
    problem = token_tree(3)
    for group_size in (2, 3):
        found = mean(get("opo"), problem, group_size)
        assert_skew(found, objective(problem).gradient, at_least=1e-3)


@few
@given(on, st.sampled_from([-2.0, 0.25, 1.5]))
def test_p13_a_baseline_from_elsewhere_is_unbiased(problem, baseline):
    # Whatever number other data gave: the sample of this step had no part in it.
    assert_unbiased(get("reinforce", baseline=baseline), problem, 1)


def test_p14_leave_one_out_need_not_lower_the_variance():
    problem = token_tree(2)
    centered = replace(problem, rewards=problem.rewards - objective(problem).value)
    group, alone = (float(moments(get(n), centered, 2).variance) for n in ("rloo", "reinforce"))
    assert group > 1.1 * alone
    raised = replace(problem, rewards=problem.rewards + 3)
    group, alone = (float(moments(get(n), raised, 2).variance) for n in ("rloo", "reinforce"))
    assert group < 0.5 * alone


def last_scores(problem):
    """Score of the last token of each response."""
    _, _, _, mask, scores = responses(problem)
    last = mask & (mask.flip(-1).cumsum(-1).flip(-1) == 1)
    return torch.einsum("mt,mtnv->mnv", last.double(), scores)


@few
@given(on, st.sampled_from([-1.0, 0.5]))
def test_p15_critics_of_gae(problem, offset):
    pi, _ = laws(problem)
    critic = get("ppo").advantage.function
    gradient = objective(problem).gradient
    for lam in (0.0, 0.5, 1.0):
        found = enumerated_mean(
            plain(advantage=critic, lam=lam), problem, 1, with_values(problem, pi.value)
        )
        assert_close(found, gradient)
    wrong = with_values(problem, pi.value + offset)
    found = enumerated_mean(plain(advantage=critic, lam=0.0), problem, 1, wrong)
    ends = torch.einsum("m,mnv->nv", pi.response, last_scores(problem)).unsqueeze(0)
    # Only the last token misses its bootstrap; its score averages to zero where every prefix of
    # its length ends, so the bias is seen where lengths vary.
    assert_close(found - gradient, -offset * ends)


def by_differences(value, logits, step=1e-5):
    """Gradient of a function of the logits by central differences."""
    out = torch.zeros_like(logits)
    for place in itertools.product(*map(range, logits.shape)):
        shift = torch.zeros_like(logits)
        shift[place] = step
        out[place] = (value(logits + shift) - value(logits - shift)) / (2 * step)
    return out


def rewards_law(problem, logits):
    """Rewards of one prompt's responses and their probabilities under other logits."""
    moved = replace(problem, logits=logits)
    return problem.rewards[0], Brute(moved, moved.logp).response


def expected_largest(problem, logits, k):
    """E[max of k draws], summed over every tuple."""
    rewards, chance = rewards_law(problem, logits)
    total = 0.0
    for draw in itertools.product(range(len(rewards)), repeat=k):
        index = torch.tensor(draw)
        total += float(chance[index].prod() * rewards[index].max())
    return total


@settings(max_examples=4)
@given(problems(prompts=one, on_policy=True, leaves=4, horizon=2), st.sampled_from([1, 2, 3]))
def test_p16_the_largest_of_k(problem, k):
    slope = by_differences(lambda x: expected_largest(problem, x, k), problem.logits)
    found = [mean(get("pass_at_k", k=k), problem, 3)]
    found += [mean(get("pkpo", k=k), problem, 3)] if k > 1 else []
    found += [mean(get("max_minus_second"), problem, k)] if k > 1 else []
    flat = float(slope.norm()) < 1e-9  # equal rewards leave differences their rounding
    for estimate in found:
        assert_close(estimate, torch.zeros_like(slope) if flat else slope, relative=1e-6)


@few
@given(problems(prompts=one, rewards=("binary",), on_policy=True), st.sampled_from([2, 3, 5]))
def test_p17_the_series_of_the_logarithm(problem, group_size):
    p, gradient = float(objective(problem).value), objective(problem).gradient
    for name, order in (("success_average", group_size), ("maxrl", group_size - 1)):
        slope = sum((1 - p) ** (j - 1) for j in range(1, order + 1))
        assert_close(mean(get(name), problem, group_size), slope * gradient)


def test_p17_one_order_apart():
    orders = [mean(get(n), token_tree(3), 3) for n in ("maxrl", "success_average")]
    assert_apart(*orders, at_least=1e-2)
    assert_close(orders[0], mean(get("success_average"), token_tree(3), 2))


# P-18 to P-30: off-policy corrections and centering


@few
@given(off)
def test_p18_token_ratios_follow_the_surrogate_of_the_old_policy(problem):
    pi, mu = laws(problem)
    logits = problem.logits.clone().requires_grad_()
    moved = logits.log_softmax(-1)[0].exp()
    advantage = mu.action_value - mu.value.unsqueeze(-1)
    ((mu.reach.unsqueeze(-1) * moved * advantage).sum()).backward()
    assert_close(mean(get("token_is"), problem, 2), logits.grad)
    gain = (pi.reach.unsqueeze(-1) * pi.token * advantage).sum()
    value = (mu.response * problem.rewards[0]).sum()
    assert_close(value + gain, objective(problem).value)


@settings(max_examples=20)
@given(
    batches(prompts=(2, 4)),
    st.sampled_from(
        ["grpo", "dapo", "gspo", "rloo", "reinforce_plus_plus", "gdpo", "optimal_token_baseline"]
    ),
)
def test_p19_partitions_do_not_matter(batch, name):
    estimator = get(name)
    whole, terms = estimator(batch).own, batch_terms(estimator, batch)
    parts = [
        token_coefficients(estimator, terms.select([i]), batch.select([i])).own
        for i in range(len(whole))
    ]
    assert_close(torch.cat(parts), whole)


@few
@given(off, st.data())
def test_p20_the_five_rows(problem, data):
    pi, mu = laws(problem)
    rows = {
        None: mixture(problem, mu, mu, mu),
        token: mixture(problem, mu, pi, mu),
        prefix: mixture(problem, pi, pi, mu),
        suffix: mixture(problem, mu, pi, pi),
        trajectory: mixture(problem, pi, pi, pi),
    }
    phi = data.draw(features(problem))
    for reach, expected in rows.items():
        pairs = () if reach is None else ((reach, use(ratio)),)
        found = mean(plain(*pairs), problem)
        assert_close(found, expected)
        assert_close(
            torch.einsum("pnv,nvd->d", found, phi), torch.einsum("pnv,nvd->d", expected, phi)
        )
    assert_close(rows[trajectory], objective(problem).gradient)


def test_p20_the_rows_differ():
    found = [mean(plain(*(((r, use(ratio)),) if r else ())), WITNESS) for r in (None, *RATIOS)]
    for i, a in enumerate(found):
        for b in found[:i]:
            assert_apart(a, b, at_least=1e-3)


@few
@given(off)
def test_p21_prefix_ratios_with_the_exact_advantage(problem):
    pi, mu = laws(problem)
    critic = plain((prefix, use(ratio)), advantage=get("ppo").advantage.function, lam=0.0)
    found = enumerated_mean(critic, problem, 1, with_values(problem, pi.value))
    assert_close(found, objective(problem).gradient)
    assert_close(mean(plain((prefix, use(ratio))), problem), mixture(problem, pi, pi, mu))


@few
@given(problems(prompts=(1, 2), on_policy=False, leaves=7), st.sampled_from([0.0, -1.5]))
def test_p23_trajectory_ratios_are_unbiased_with_any_baseline(problem, baseline):
    assert_unbiased(plain((trajectory, use(ratio)), baseline=baseline), problem, 1)
    assert_unbiased(get("trajectory_is"), problem, 3)


@few
@given(problems(prompts=one, on_policy=False, leaves=16))
def test_p24_second_moments_of_ratios(problem):
    mu, _, x, mask, _ = responses(problem)

    def weights(reach):
        return Correction(reach=use(reach), map=use(ratio)).weights(x, mask, torch.ones(1, 1))

    last = mask & (mask.flip(-1).cumsum(-1).flip(-1) == 1)
    second = (mu * (weights(trajectory) * last).sum(-1).square()).sum()
    tree = problem.tree
    pi_, mu_ = problem.logp[0].exp(), problem.behavior_logp[0].exp()
    below = torch.zeros(0)
    for t in reversed(range(tree.horizon)):
        level = tree.level(t)
        step = pi_[level].square() / mu_[level]
        if t < tree.horizon - 1:
            going, stopping = tree.split(step)
            total = (going * below.view(going.shape)).sum(-1)
            below = total if stopping is None else total + stopping
        else:
            below = step.sum(-1)
    assert_close(second, below[0])
    so_far = x.cumsum(-1)
    growth = [float((mu * (2 * so_far[:, t]).exp()).sum()) for t in range(x.shape[1])]
    assert all(b >= a - 1e-12 for a, b in zip([1.0, *growth], growth, strict=False))


def test_p24_independent_tokens_multiply():
    logits = torch.tensor([0.3, -0.5, 0.1], dtype=torch.float64)
    tree = Tree(3, None, 3)
    shift = torch.tensor([0.2, 0.4, -0.6], dtype=torch.float64)
    problem = make(
        "iid",
        tree,
        logits.expand(1, tree.prefixes, 3),
        torch.zeros(1, 27),
        behavior=(logits + shift).expand(1, tree.prefixes, 3),
    )
    mu, _, x, _, _ = responses(problem)
    one_step = (logits.softmax(-1).square() / (logits + shift).softmax(-1)).sum()
    assert_close((mu * (2 * x.sum(-1)).exp()).sum(), one_step**3)


@few
@given(off, st.sampled_from([0.75, 1.0, 1.5]))
def test_p25_the_bias_of_a_truncation_and_of_a_mask(problem, cap):
    _, rewards, x, _, _ = responses(problem)
    for reach, e in ((token, x), (trajectory, x.sum(-1, keepdim=True).expand_as(x))):
        full = mean(plain((reach, use(ratio))), problem)
        cut = mean(plain((reach, use(truncate, cap=cap))), problem)
        excess = (e.exp() - cap).clamp(min=0)
        assert_close(cut - full, -by_hand(problem, excess))
        kept = mean(plain((reach, use(band, low=0.5, high=cap))), problem)
        outside = (e.exp() > cap * (1 + 1e-9)) | (e.exp() < 0.5 * (1 - 1e-9))
        assert_close(kept - full, -by_hand(problem, e.exp() * outside))
    mu, _, _, _, scores = responses(problem)
    norm = scores.sum(1).flatten(1).norm(dim=-1)
    w = x.sum(-1).exp()
    bias = mean(plain((trajectory, use(truncate, cap=cap))), problem) - mean(
        plain((trajectory, use(ratio))), problem
    )
    bound = (mu * (w - cap).clamp(min=0) * rewards.abs() * norm).sum()
    assert bias.norm() <= bound + 1e-12


def test_p25_bounds_shrink_and_second_moments_grow_with_the_cap():
    found = [
        moments(plain((trajectory, use(truncate, cap=c))), WITNESS, 1) for c in (0.5, 1.0, 2.0, 4.0)
    ]
    mu, rewards, x, _, _ = responses(WITNESS)
    w = x.sum(-1).exp()
    bounds = [(mu * (w - c).clamp(min=0) * rewards).sum() for c in (0.5, 1.0, 2.0, 4.0)]
    second = [m.variance + m.mean.square().sum() for m in found]
    assert bounds[0] > bounds[1] > bounds[2] >= bounds[3]
    assert second[0] < second[1] < second[2] <= second[3] + 1e-12


@few
@given(off, st.sampled_from([0.75, 1.0, 1.5]))
def test_p26_truncation_ascends_a_lower_bound(problem, cap):
    mu, rewards, x, mask, _ = responses(problem)
    kinks = (x.sum(-1).exp() - cap).abs() > 1e-6
    assume(bool(kinks.all()))
    logits = problem.logits.clone().requires_grad_()
    prefixes, tokens = problem.tree.paths
    moved = logits.log_softmax(-1)[0][prefixes.clamp(min=0), tokens.clamp(min=0)]
    was = problem.behavior_logp[0][prefixes.clamp(min=0), tokens.clamp(min=0)]
    e = torch.where(mask, moved - was, 0.0).sum(-1)
    value = tapered(e, torch.ones_like(e), a_pos=0.0, b_pos=cap, a_neg=0.0, b_neg=cap)
    (mu * rewards * value).sum().backward()
    assert_close(mean(plain((trajectory, use(truncate, cap=cap))), problem), logits.grad)
    assert (value <= e.exp() + 1e-12).all()


@few
@given(off)
def test_p27_whole_ratios_do_not_drift(problem):
    for reach in RATIOS:
        assert_zero(moments(plain((reach, use(ratio))), problem, 1).drift, beside=10.0)


@pytest.mark.parametrize(
    "name", ["reinforce", "token_tis", "sequence_tis", "icepop", "cispo", "gspo", "topr", "grpo"]
)
def test_p27_all_others_drift(name):
    entry = get(name)
    for key, value in (("cap", 1.1), ("low", 0.9), ("high", 1.1)):
        entry = entry.change(**{key: value}) if key in entry.settings else entry
    assert moments(entry, WITNESS, 2).drift.norm() > 1e-3


@few
@given(off, st.sampled_from([-2.0, 0.5]))
def test_p28_a_baseline_shifts_the_mean_by_the_drift(problem, b):
    for pairs in (
        (),
        ((token, use(truncate, cap=1.25)),),
        ((prefix, use(band)),),
        ((geometric, use(ratio)),),
    ):
        with_b, without = (moments(plain(*pairs, baseline=x), problem, 1) for x in (b, 0.0))
        assert_close(with_b.mean, without.mean - b * without.drift)


@few
@given(off, st.data())
def test_p29_score_centering(problem, data):
    _, mu = laws(problem)
    covariance = mu.reach.unsqueeze(-1) * mu.token * (mu.action_value - mu.value.unsqueeze(-1))
    ratio_ = (problem.logp - problem.behavior_logp)[0].exp()
    for map_, weight in (
        (use(none), torch.ones_like(ratio_)),
        (use(truncate, cap=1.25), ratio_.clamp(max=1.25)),
        (use(band, low=0.5, high=1.6), ratio_ * ((ratio_ >= 0.5) & (ratio_ <= 1.6))),
    ):
        estimator = plain((token, map_), centering=exact)
        found = moments(estimator, problem, 1)
        assert_zero(found.drift, beside=10.0)
        assert_close(found.mean, pull(problem, covariance * weight))
        shifted = replace(problem, rewards=problem.rewards + 2)
        assert_close(mean(estimator, shifted), found.mean)
        same = problem.on_policy()
        assert_close(mean(estimator, same), objective(same).gradient)
        phi = data.draw(features(problem))
        drift = torch.einsum("pnv,nvd->d", found.drift, phi)
        assert_zero(drift, beside=100.0)
    full = plain((token, use(ratio)), centering=exact)
    assert_close(mean(full, problem), mean(plain((token, use(ratio))), problem))


@settings(max_examples=8)
@given(problems(prompts=one, on_policy=False, leaves=7))
def test_p30_top_k_is_exact_but_for_one_token(problem):
    whole = mean(plain((token, use(truncate, cap=1.25)), centering=exact), problem)

    def head(k):
        return lambda batch, index: replace(
            batch,
            **{
                name: torch.where(
                    torch.arange(problem.tree.vocab) < k, getattr(batch, name), -math.inf
                )
                for name in ("head_logp", "head_behavior_logp")
            },
        )

    short = plain((token, use(truncate, cap=1.25)), centering=top_k)
    for k in (problem.tree.vocab, problem.tree.vocab - 1):
        assert_close(enumerated_mean(short, problem, 1, head(k)), whole, relative=1e-8)


def test_p30_top_k_misses_a_tail_that_is_not_proportional():
    problem = with_behavior(token_tree(2), "noise", sigma=0.7)

    def head(batch, index):
        return replace(
            batch,
            head_logp=torch.where(torch.arange(3) < 1, batch.head_logp, -math.inf),
            head_behavior_logp=torch.where(
                torch.arange(3) < 1, batch.head_behavior_logp, -math.inf
            ),
        )

    found = enumerated_mean(plain((token, use(none)), centering=top_k), problem, 1, head)
    assert_apart(found, mean(plain((token, use(none)), centering=exact), problem), at_least=1e-3)


# P-31 to P-43: policies that agree, regions, bounds, admission


@few
@given(on)
def test_p31_p33_on_policy_everything_collapses(problem):
    gradient = objective(problem).gradient
    weights = (ratio, truncate, band, clip, dual_clip, taper, none)
    for map_ in (*weights, soft_gate, gamma_weight, inverse_positive, tv_mask, kl_mask):
        assert_close(mean(plain((token, use(map_))), problem), gradient)
    pi = Brute(problem, problem.logp).response
    _, rewards, _, mask, scores = responses(problem)
    shares = mask.double() / mask.sum(-1, keepdim=True)
    expected = torch.einsum("m,mt,mtnv->nv", pi * rewards, shares, scores).unsqueeze(0)
    gmpo = replace(plain(aggregation=sequence_mean), corrections=get("gmpo").corrections)
    clips = [plain((reach, use(clip)), aggregation=sequence_mean) for reach in (geometric, token)]
    for estimator in (*clips, gmpo):
        found = moments(estimator, problem, 1)
        assert_close(found.mean, expected)
        drift = torch.einsum("m,mt,mtnv->nv", pi, shares, scores).unsqueeze(0)
        assert_close(found.drift, drift)


def test_p33_a_sequence_mean_drifts_where_lengths_vary_and_only_there():
    estimator = plain((geometric, use(clip)), aggregation=sequence_mean)
    assert moments(estimator, token_tree(3), 1).drift.norm() > 1e-2
    tree = Tree(2, None, 3)
    fixed = make("fixed", tree, torch.linspace(-1, 1, 14).view(1, 7, 2), torch.zeros(1, 8))
    assert_zero(moments(estimator, fixed, 1).drift)


@settings(max_examples=20)
@given(batches(spread=0.25))
def test_p32_gspo_weighs_each_token_by_the_sequence_over_its_length(batch):
    found = get("gspo", clip_low=1.0, clip_high=99.0)(batch)
    x = torch.where(batch.mask, batch.logp - batch.behavior_logp, 0.0)
    length = batch.lengths.clamp(min=1).unsqueeze(-1)
    s = (x.sum(-1, keepdim=True) / length).exp()
    a = group_std(batch.rewards, batch.present).unsqueeze(-1)
    n = batch.present.sum().clamp(min=1)
    alive = (batch.present.sum(-1, keepdim=True) > 1).unsqueeze(-1) & batch.mask
    assert_close(found.own, torch.where(alive, s * a / length / n, 0.0))


@settings(max_examples=20)
@given(batches(spread=0.25), batches(spread=0.25))
def test_p32_gspo_by_token_is_gspo_where_the_advantage_is_flat(batch, other):
    assert_close(get("gspo_token")(batch).own, get("gspo")(batch).own)
    by_token = {e: replace(get(e), advantage=use(gae)) for e in ("gspo", "gspo_token")}
    assert_close(by_token["gspo_token"](other).own, by_token["gspo"](other).own)


@given(numbers(8, low=-2.0, high=2.0), numbers(8), st.floats(0.25, 4.0))
def test_p34_soft_weights_are_slopes_and_1_at_ratio_1(e, a, tau):
    live = e.clone().requires_grad_()
    gate = 4 / tau * torch.sigmoid(tau * (live.exp() - 1))
    gate.sum().backward()
    found = soft_gate(e, a, tau_pos=tau, tau_neg=tau)
    assert_close(found, live.grad)
    assert_close(found, e.exp() / torch.cosh(tau * (e.exp() - 1) / 2).square())
    for map_ in (soft_gate, gamma_weight, inverse_positive):
        assert_close(map_(torch.zeros_like(a), a), torch.ones_like(a))
    k, rate = torch.where(a >= 0, 2.0, 3.0).double(), torch.where(a >= 0, 3.0, 2.0).double()
    assert_close(gamma_weight(e, a), e.exp() ** k * (rate * (1 - e.exp())).exp())


@given(numbers(8, low=-2.0, high=2.0), numbers(8))
def test_p34_regions_without_a_gradient(e, a):
    r = e.exp()
    ppo = ((a > 0) & (r > 1.2)) | ((a < 0) & (r < 0.8))
    assert torch.equal(clip(e, a) == 0, ppo)
    assert torch.equal(dual_clip(e, a, cap=3.0) == 0, ppo | ((a < 0) & (r > 3.0)))


@settings(max_examples=20)
@given(batches(spread=0.5))
def test_p35_unclipped_the_anchor_cancels(batch):
    two = (
        Correction(reach=use(token), map=use(ratio), numerator="proximal_logp"),
        Correction(
            reach=use(token),
            map=use(clip, clip_low=1.0, clip_high=99.0),
            denominator="proximal_logp",
        ),
    )
    assert_close(replace(get("token_is"), corrections=two)(batch).own, get("token_is")(batch).own)


@few
@given(problems(prompts=one, rewards=("binary",), on_policy=False, leaves=9))
def test_p36_p37_gaps_are_bounded_by_the_mismatch(problem):
    pi, mu = laws(problem)
    steps = problem.tree.horizon
    delta = float((pi.token - mu.token).abs().sum(-1).max() / 2)
    advantage = mu.action_value - mu.value.unsqueeze(-1)
    surrogate_ = (mu.response * problem.rewards[0]).sum() + (
        mu.reach.unsqueeze(-1) * pi.token * advantage
    ).sum()
    gap = float((objective(problem).value - surrogate_).abs())
    assert gap <= steps * (steps - 1) * delta**2 + 1e-12
    score = torch.eye(problem.tree.vocab).double() - pi.token.unsqueeze(-2)
    size = float((pi.token * score.norm(dim=-1)).sum(-1).max())
    bias = float((mean(plain((token, use(ratio))), problem) - objective(problem).gradient).norm())
    assert bias <= 1.5 * steps * (steps - 1) * size * delta + 1e-12


def test_p37_the_bias_of_token_ratios_is_of_first_order():
    direction = with_behavior(token_tree(3), "noise", sigma=1.0).behavior_logp - token_tree(3).logp
    gaps = []
    for step in (1e-2, 1e-3):
        behavior = (token_tree(3).logp + step * direction).log_softmax(-1)
        problem = replace(token_tree(3), behavior_logp=behavior)
        found = mean(plain((token, use(ratio))), problem)
        gaps.append(float((found - objective(problem).gradient).norm()))
    assert abs(math.log10(gaps[0] / gaps[1]) - 1) < 0.02


@given(numbers(6))
def test_p38_the_effective_sample_size_is_one_over_one_plus_chi_square(logits):
    pi = logits.softmax(-1)
    w = pi * len(pi)  # the sampler is uniform
    chi = ((pi - 1 / len(pi)).square() * len(pi)).sum()
    found = effective_sample_size(w, w > 0) / len(pi)
    assert_close(found, 1 / (1 + chi))


@few
@given(off)
def test_p38_one_response_normalized_by_itself_is_not_corrected(problem):
    alone = replace(plain(), corrections=get("self_normalized").corrections)
    assert_close(mean(alone, problem), mean(plain(), problem))


def test_p38_self_normalized_bias_times_n_tends_to_minus_a_covariance():
    problem = with_behavior(bandit(3), "noise", sigma=0.5)
    mu, rewards, x, _, scores = responses(problem)
    w = x[:, 0].exp()
    f = (rewards[:, None] * scores[:, 0].flatten(1)).view(len(w), -1)
    gradient = objective(problem).gradient.flatten()
    pull = (mu * w) @ (w.unsqueeze(1) * (f - gradient))  # E[w] = 1, E[w (f - gradient)] = 0
    alone = replace(plain(), corrections=get("self_normalized").corrections)
    bias = {n: n * (mean(alone, problem, n).flatten() - gradient) for n in (48, 96)}
    limit = 2 * bias[96] - bias[48]
    assert pull.norm() > 1e-2
    assert (limit + pull).norm() < 0.004 * pull.norm()


@few
@given(off)
def test_p39_a_trust_region_by_probability_subtracts_what_it_drops(problem):
    prefixes, tokens = problem.tree.paths
    _, rewards, x, mask, _ = responses(problem)
    at = prefixes.clamp(min=0), tokens.clamp(min=0)
    p, q = (torch.where(mask, t[0].exp()[at], 0.0) for t in (problem.logp, problem.behavior_logp))
    moved = torch.where(rewards.unsqueeze(-1) > 0, p - q, q - p)
    dropped = (rewards != 0).unsqueeze(-1) & (moved > 0.05)
    assume(bool(((moved - 0.05).abs() > 1e-9).all()))
    whole = plain((token, use(tv_mask, limit=0.05, cap=math.inf)))
    full = mean(plain((token, use(ratio))), problem)
    assert_close(mean(whole, problem), full - by_hand(problem, x.exp() * dropped))


@few
@given(off)
def test_p39_the_mask_of_far_failures_subtracts_what_it_drops(problem):
    _, rewards, x, mask, _ = responses(problem)
    far = x.sum(-1) / mask.sum(-1) < -0.1
    assume(bool(((x.sum(-1) / mask.sum(-1) + 0.1).abs() > 1e-9).all()))
    masked = plain((geometric, use(mask_negative, delta=0.1)), (token, use(ratio)))
    full = mean(plain((token, use(ratio))), problem)
    dropped = (far & (rewards < 0)).unsqueeze(-1)
    assert_close(mean(masked, problem), full - by_hand(problem, x.exp() * dropped))


@few
@given(off)
def test_p39_a_mask_by_sign_subtracts_what_it_drops(problem):
    _, rewards, x, _, _ = responses(problem)
    r, a = x.exp(), rewards.unsqueeze(-1)
    assume(bool(((r - 1.2).abs().min() > 1e-9) & ((r - 0.8).abs().min() > 1e-9)))
    dropped = ((a > 0) & (r > 1.2)) | ((a < 0) & (r < 0.8))
    full = mean(plain((token, use(ratio))), problem)
    assert_close(mean(plain((token, use(clip))), problem), full - by_hand(problem, r * dropped))


@few
@given(problems(prompts=one, rewards=("binary",), leaves=7), st.sampled_from([2, 3]))
def test_p40_dropping_silent_groups_rescales(problem, group_size):
    plain_ = plain(advantage=group_mean)
    filtered = replace(plain_, admission=(use(zero_variance),))
    p = float((Brute(problem, problem.behavior_logp).response * problem.rewards[0]).sum())
    chance = 1 - p**group_size - (1 - p) ** group_size
    try:
        found = mean(filtered, problem, group_size)
    except Undefined:
        assert chance < 1e-9
        return
    assert_close(found * chance, mean(plain_, problem, group_size))


def acceptance(member, problem, group_size):
    """Probability that a group of the one prompt is kept."""
    return sum(
        float(chance @ member(problem.rewards[0][index], index >= 0)[:, 0].any(-1).double())
        for index, chance in every_multiset(problem, group_size)
    )


def two_groups(estimator, problem, group_size):
    """Mean of a batch of two groups, whose prompts are drawn alike and redrawn where refused."""
    members = estimator.admission
    chances = [
        acceptance(members[0], problem.select(p), group_size) if members else 1.0
        for p in range(problem.prompts)
    ]
    total, mass = torch.zeros_like(problem.logits), 0.0
    for pair in itertools.product(range(problem.prompts), repeat=2):
        part = replace(
            problem,
            **{
                name: getattr(problem, name)[list(pair)]
                for name in ("logits", "behavior_logp", "rewards", "lengths")
            },
        )
        chance = chances[pair[0]] * chances[pair[1]]
        found = listed(estimator, part, every_multiset(part, group_size)).mean
        for slot, prompt in enumerate(pair):
            total[prompt] += chance * found[slot]
        mass += chance
    return total / mass


MIXED = difficulties((0.15, 0.6))


def test_p40_across_prompts_too():
    plain_ = plain(advantage=group_mean)
    filtered = replace(plain_, admission=(use(zero_variance),))
    chance = sum(acceptance(use(zero_variance), MIXED.select(p), 2) for p in (0, 1)) / 2
    assert_close(two_groups(filtered, MIXED, 2) * chance, two_groups(plain_, MIXED, 2))


def test_p41_a_token_mean_breaks_it():
    long, short = token_tree(3), token_tree(3)
    shift = torch.tensor([0.0, 1.0, 1.5], dtype=torch.float64)
    both = replace(
        long,
        logits=torch.cat([long.logits, short.logits + shift]),
        behavior_logp=torch.cat([long.logits, short.logits + shift]).log_softmax(-1),
        rewards=long.rewards.expand(2, -1),
        lengths=long.lengths.expand(2, -1),
    )
    plain_ = plain(advantage=group_mean, aggregation=token_mean)
    filtered = replace(plain_, admission=(use(zero_variance),))
    assert_skew(two_groups(filtered, both, 2), two_groups(plain_, both, 2), at_least=1e-3)


def test_p41_a_difficulty_band_breaks_it():
    plain_ = plain(advantage=group_mean)
    filtered = replace(plain_, admission=(use(difficulty_band, low=0.5, high=0.9),))
    assert_skew(two_groups(filtered, MIXED, 3), two_groups(plain_, MIXED, 3), at_least=1e-3)


def test_p41_a_penalty_on_kept_groups_breaks_it():
    problem = token_tree(3)
    reference = with_behavior(problem, "noise", sigma=1.0).behavior_logp
    at = anchored(problem, reference)

    def edit(batch, index):
        return replace(at(batch, index), rewards=batch.rewards)

    pulled = plain(advantage=group_mean, penalties=(use(loss_k2, coefficient=0.5),))
    kept = replace(pulled, admission=(use(zero_variance),))
    a, b = (enumerated_mean(e, problem, 2, edit) for e in (kept, pulled))
    assert_skew(a, b, at_least=1e-3)


def test_p42_late_as_failure_is_exact_and_late_dropped_is_not():
    problem = token_tree(3)

    def clock(batch, index):
        lengths = batch.lengths
        return replace(batch, elapsed=lengths.double(), truncated=lengths > 2)

    limited = replace(problem, rewards=problem.rewards * (problem.lengths <= 2))
    failing = plain(penalties=(use(timeout_failure, limit=2.0),))
    assert_close(enumerated_mean(failing, problem, 1, clock), objective(limited).gradient)
    dropping = replace(plain(), admission=(use(overlong),))
    level = replace(problem, rewards=torch.ones_like(problem.rewards))
    assert enumerated_mean(dropping, level, 1, clock).norm() > 0.1
    raised = replace(problem, rewards=problem.rewards + 1)
    assert_apart(
        enumerated_mean(dropping, raised, 1, clock), objective(limited).gradient, at_least=1e-2
    )


def test_p43_the_std_of_the_batch_is_biased_in_a_finite_batch():
    problem = difficulties((0.2, 0.7))
    found = moments(plain(advantage=batch_std), problem, 2, engine="compositions").mean
    assert_skew(found, objective(problem).gradient, at_least=1e-3)


# P-44 to P-48: divergences, references, TOPR, entropy


def anchored(problem, reference):
    """Give each token the reference's log-probability of it."""
    prefixes, tokens = problem.tree.paths
    at = reference[0][prefixes.clamp(min=0), tokens.clamp(min=0)]
    return lambda batch, index: replace(batch, rewards=batch.rewards * 0, reference_logp=at[index])


def divergence(problem, logits, reference, direction):
    """KL at each prefix, of policy from reference ("reverse") or the other way round."""
    logp = logits.log_softmax(-1)[0]
    x = logp - reference[0]
    return (logp.exp() * x).sum(-1) if direction == "reverse" else -(reference[0].exp() * x).sum(-1)


def frozen_gradient(problem, reach, reference, direction):
    """Gradient of the mean divergence at prefixes whose law is held fixed."""
    logits = problem.logits.clone().requires_grad_()
    (reach * divergence(problem, logits, reference, direction)).sum().backward()
    return logits.grad


@few
@given(off, st.data())
def test_p44_gradients_of_penalties(problem, data):
    reference = data.draw(numbers(*problem.logits.shape)).log_softmax(-1)
    same = problem.on_policy()
    pi, mu = laws(problem)
    edit, edit_same = anchored(problem, reference), anchored(same, reference)

    def pulled(member, where, edit):
        found = plain(penalties=(use(member, coefficient=1.0),))
        return -enumerated_mean(found, where, 1, edit)

    logits = problem.logits.clone().requires_grad_()
    logp = logits.log_softmax(-1)
    prefixes, tokens = problem.tree.paths
    mask = prefixes >= 0
    at = (prefixes.clamp(min=0), tokens.clamp(min=0))
    whole = torch.where(mask, logp[0][at], 0.0).sum(-1)
    target = torch.where(mask, reference[0][at], 0.0).sum(-1)
    (whole.exp() * (whole - target)).sum().backward()
    assert_close(pulled(reward_k1, same, edit_same), logits.grad)
    assert_zero(pulled(loss_k1, same, edit_same), beside=10.0)
    local = frozen_gradient(problem, pi.reach, reference, "reverse")
    assert_close(pulled(loss_k2, same, edit_same), local)
    forward = frozen_gradient(problem, pi.reach, reference, "forward")
    assert_close(pulled(loss_k3, same, edit_same), forward)
    assert_close(pulled(loss_k3_weighted, same, edit_same), local)
    seen = frozen_gradient(problem, mu.reach, reference, "reverse")
    assert_close(pulled(loss_k3_weighted, problem, edit), seen)
    if problem.tree.horizon == 1:
        assert_close(pulled(reward_k3, same, edit_same), local - forward)


@given(numbers(4), numbers(4))
def test_p44_values_of_penalties(logits, reference):
    p, ref = logits.log_softmax(-1), reference.log_softmax(-1)
    x = p - ref
    kl = (p.exp() * x).sum()
    assert_close((p.exp() * k1(x)).sum(), kl)
    assert_close((p.exp() * k3(x)).sum(), kl)


def test_p44_what_is_biased():
    problem = token_tree(3)
    reference = with_behavior(problem, "noise", sigma=1.0).behavior_logp
    pi = Brute(problem, problem.logp)
    x = (problem.logp - reference)[0]
    true = (pi.flow * k1(x)).sum()
    assert_apart((pi.flow * k2(x)).sum(), true, at_least=1e-2)
    mu = Brute(problem, reference)
    assert_apart((mu.flow * k3(x)).sum(), true, at_least=1e-2)
    full = -enumerated_mean(
        plain(penalties=(use(reward_k1, coefficient=1.0),)),
        problem,
        1,
        anchored(problem, reference),
    )
    local = frozen_gradient(problem, pi.reach, reference, "reverse")
    assert_skew(local, full, at_least=1e-2)
    assert_skew(frozen_gradient(problem, pi.reach, reference, "forward"), local, at_least=1e-2)


@few
@given(on)
def test_p45_a_reference_that_equals_the_policy_pulls_nowhere(problem):
    edit = anchored(problem, problem.logp)
    for member in (loss_k2, loss_k3, loss_k3_weighted, reward_k1, reward_k3):
        found = enumerated_mean(plain(penalties=(use(member, coefficient=1.0),)), problem, 1, edit)
        assert not found.any()


@settings(max_examples=20)
@given(batches(spread=0.5))
def test_p46_kimi_descends_the_squared_residual(batch):
    tau = 0.25
    found = get("kimi", coefficient=tau)(batch)
    live = torch.where(batch.mask, batch.logp, 0.0).requires_grad_()
    x = (live - torch.where(batch.mask, batch.behavior_logp, 0.0)).sum(-1)
    residual = group_mean(batch.rewards, batch.present) - tau * x
    (found.terms.scale * residual.square() / (2 * tau)).sum().backward()
    alive = (batch.present.sum(-1, keepdim=True) > 1).unsqueeze(-1) & batch.mask
    assert_close(found.own, torch.where(alive, -live.grad, 0.0))


@few
@given(on)
def test_p46_on_policy_kimi_is_the_gradient_of_the_group_mean(problem):
    found = enumerated_mean(get("kimi"), problem, 2)
    assert_close(found, objective(problem).gradient / 2)


def test_p46_at_its_optimum_kimi_leaves_a_constant():
    tau, reward = 0.5, torch.tensor([1.0, 0.0, -0.5]).double()
    mu = torch.tensor([0.2, 0.5, 0.3]).double().log()
    best = (mu + reward / tau).log_softmax(-1)
    batch = Batch(
        rewards=reward.view(1, 3),
        mask=torch.ones(1, 3, 1).bool(),
        logp=best.view(1, 3, 1),
        behavior_logp=mu.view(1, 3, 1),
    )
    left = get("kimi", coefficient=tau)(batch).own.flatten() * 3
    residual = tau * torch.logsumexp(mu + reward / tau, 0) - reward.mean()
    assert residual.abs() > 0.1
    assert_close(left, residual.expand(3))


@few
@given(
    problems(prompts=one, rewards=("signs",), on_policy=True, leaves=9),
    st.sampled_from([-1.0, -0.5, 0.5]),
)
def test_p47_a_baseline_sets_the_share_of_positives(problem, b):
    pi = Brute(problem, problem.logp).response
    rewards = problem.rewards[0]
    p = float((pi * (rewards > 0)).sum())
    estimator = get("topr", baseline=b)
    advantage = estimator.advantage(problem.rewards, problem.rewards == problem.rewards)[0]
    masses = pi * advantage.abs()
    assume(float(masses.sum()) > 1e-9)
    share = float(masses[rewards > 0].sum() / masses.sum())
    assert_close(share, p * (1 - b) / (1 + (1 - 2 * p) * b), relative=1e-9)
    if b == -1.0:
        only = get("positives_only")
        assert_close(mean(estimator, problem), 2 * mean(only, problem))


@few
@given(problems(prompts=one, rewards=("binary",), on_policy=False, leaves=9))
def test_p47_topr_ascends_a_lower_bound_of_rewards_that_are_not_negative(problem):
    mu, rewards, x, _, _ = responses(problem)
    e = x.sum(-1)
    bound = (mu * rewards * tapered(e, rewards)).sum()
    assert bound <= objective(problem).value + 1e-12
    same = problem.on_policy()
    tight = (Brute(same, same.logp).response * rewards * tapered(e * 0, rewards)).sum()
    assert_close(tight, objective(same).value)


def test_p48_entropy_of_tokens_is_not_entropy_of_the_response():
    problem = token_tree(3)
    pi = Brute(problem, problem.logp)
    uniform = torch.zeros_like(problem.logp)
    bonus = plain(penalties=(use(entropy, coefficient=1.0),))
    frozen = enumerated_mean(
        replace(bonus, advantage=use(constant)), problem, 1, anchored(problem, uniform)
    )
    logits = problem.logits.clone().requires_grad_()
    logp = logits.log_softmax(-1)[0]
    (-(pi.reach * (logp.exp() * logp).sum(-1))).sum().backward()
    assert_close(frozen, logits.grad)
    # The entropy of the response is k1 to a reference of log-probability 0.
    full = enumerated_mean(
        plain(penalties=(use(reward_k1, coefficient=1.0),)), problem, 1, anchored(problem, uniform)
    )
    assert_skew(frozen, full, at_least=0.1)


def test_engines_serve_the_table():
    """The engine that lists tuples agrees with the planner's choice on the witness."""
    for name in ("rloo", "token_tis", "centered_tis", "dapo"):
        a = engine(get(name), token_tree(2), 2, "tuples").mean
        assert_close(mean(get(name), token_tree(2), 2), a)
