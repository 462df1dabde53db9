"""The recursion over automaton states, against listing the groups of the same policy as a tree."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from windage.analysis.studies.grid import Settings
from windage.analysis.studies.study import bind, run
from windage.estimators.aggregation import prompt_mean
from windage.estimators.catalogue import ENTRIES, FIRST, get
from windage.estimators.correction import (
    Correction,
    prefix,
    ratio,
    suffix,
    trajectory,
    truncate,
)
from windage.estimators.errors import BadInput
from windage.estimators.estimator import Estimator
from windage.estimators.member import declare, use
from windage.toy.behavior import with_behavior
from windage.toy.chains import Chain, reasoning
from windage.toy.exact.automata import automaton, refusal, sweep
from windage.toy.exact.plan import consider, undefined
from windage.toy.exact.transfer import Steps, chain_objective, mismatch, transfer
from windage.toy.exact.tuples import Responses, accepted, every_multiset
from windage.toy.objective import objective
from windage.toy.problems import Problem, Tree, make

HORIZON = 3
CHAIN = reasoning(HORIZON)


def served(estimator: Estimator) -> bool:
    """Whether the planner finds the recursion valid."""
    defined = undefined(estimator, CHAIN, 2) is None
    return defined and consider("transfer", estimator, CHAIN, 2).refusal is None


SERVED = [e.name for e in ENTRIES if served(e)]


def stale(chain: Chain, sigma: float = 0.5) -> Chain:
    noise = torch.randn(chain.logits.shape, generator=torch.Generator().manual_seed(3))
    return replace(chain, behavior_logp=(chain.logits + sigma * noise).log_softmax(-1))


def unrolled(chain: Chain) -> tuple[Problem, Tensor]:
    """The chain as a tree of all responses, and the state behind each prefix."""
    states, vocab = chain.successor.shape
    tree = Tree(vocab, vocab - 1, chain.horizon)
    here = [torch.tensor([chain.start])]
    for _ in range(chain.horizon - 1):
        here.append(chain.successor[here[-1]][:, : vocab - 1].flatten())
    state = torch.cat(here)
    prefixes, tokens = tree.paths
    last = (tokens >= 0).sum(1, keepdim=True) - 1
    before, chosen = (x.gather(1, last).squeeze(1) for x in (prefixes, tokens))
    following = chain.successor[state[before], chosen]
    end = torch.where(following < 0, state[before], states + following)
    return make(
        "unrolled",
        tree,
        chain.logits[:, state],
        chain.rewards[:, end],
        behavior=chain.behavior_logp[:, state],
    ), state


def fold(blocks: Tensor, state: Tensor, states: int = 4) -> Tensor:
    """Blocks by prefix added up by state."""
    out = blocks.new_zeros((*blocks.shape[:-2], states, blocks.shape[-1]))
    return out.index_add(-2, state, blocks)


def listed(
    estimator: Estimator, problem: Problem, state: Tensor, group_size: int
) -> tuple[Tensor, Tensor]:
    """Mean and variance by the parameters of the states, from every multiset of one prompt."""
    table = Responses(problem)
    total = mean = square = torch.zeros((), dtype=torch.float64)
    for index, chance in every_multiset(problem, group_size):
        batch = table.batch(index, head=estimator.centering is not None)
        keep = accepted(estimator, batch)
        weight = chance if keep is None else chance * keep
        g = fold(table.gradients(index, estimator, batch), state)
        total = total + weight.sum()
        mean = mean + torch.einsum("m,mpsv->psv", weight, g)
        square = square + (weight * g.square().sum((1, 2, 3))).sum()
    mean = mean / total
    return mean, square / total - mean.square().sum()


def bound(name: str, horizon: int) -> Estimator:
    return bind(get(name), reasoning(horizon))


@pytest.mark.parametrize("name", SERVED)
def test_equals_listing_at_a_short_length(name: str) -> None:
    """Prompt by prompt; all prompts together where a denominator couples them."""
    joint = get(name).scope == "batch"
    horizon = 2 if joint else HORIZON
    chain = stale(reasoning(horizon, (0.3, 0.6)))
    problem, state = unrolled(chain)
    estimator = bound(name, horizon)
    found = sweep([(estimator, chain)], (2,), frequencies=256)[0][0]
    if joint:
        mean, variance = listed(estimator, problem, state, 2)
    else:
        parts = [listed(estimator, problem.select(p), state, 2) for p in range(2)]
        mean = torch.cat([m for m, _ in parts]) / 2
        variance = sum(v for _, v in parts) / 4
    known = found.bounds
    if known is None:
        assert torch.allclose(found.mean, mean, rtol=0, atol=1e-11 * float(mean.abs().max()))
        assert abs(float(found.variance / variance) - 1) < 1e-10
    else:
        assert float((found.mean - mean).norm()) < known.mean < 0.2 * float(mean.norm())
        assert abs(float(found.variance - variance)) < known.variance < 0.2 * float(variance)


def test_what_is_served_and_what_is_refused_in_a_sentence() -> None:
    assert {e.name for e in FIRST} - set(SERVED) == {"ppo"}
    truncated = use(truncate, cap=2.0)
    cases = {
        "at every token": Correction(reach=use(prefix), map=truncated),
        "is not made of pieces": Correction(reach=use(trajectory), map=use(bumpy)),
    }
    for words, correction in cases.items():
        estimator = replace(get("rloo"), corrections=(correction,))
        assert words in str(refusal(estimator))
        with pytest.raises(NotImplementedError, match=words):
            automaton(estimator, reasoning(HORIZON), 2)
    cut = Correction(reach=use(trajectory), map=truncated)
    whole = Correction(reach=use(trajectory), map=use(ratio))
    assert "two sums" in str(refusal(replace(get("rloo"), corrections=(cut, whole))))
    assert "sum and length" in str(refusal(replace(get("cispo"), corrections=(cut,))))
    assert refusal(get("gspo"), reasoning(4096)) is None
    assert "up to 4,096 tokens" in str(refusal(get("gspo"), reasoning(4097)))


@declare("token")
def bumpy(effective: Tensor, advantages: Tensor) -> Tensor:
    """A weight that is no piece of a + b exp(e)."""
    return torch.sigmoid(effective)


def test_a_study_of_a_chain_has_rows_and_says_what_no_engine_serves() -> None:
    stale_by = ("stale", {"steps": 2, "rate": 1.0})
    names = (("rloo", {}), ("trajectory_is", {}), ("sequence_tis", {}), ("ppo", {}))
    document = run(
        Settings(problem=("reasoning", {"horizon": 64}), estimators=names, behavior=stale_by)
    )
    biased, unbiased, bounded, unserved = document["rows"]
    assert biased["engine"] == unbiased["engine"] == bounded["engine"] == "transfer"
    assert biased["relative_bias"] > 0.01 > 1e-9 > unbiased["relative_bias"]
    assert biased["error_bound"] is unbiased["error_bound"] is None
    assert 0 < bounded["error_bound"]["variance"] < 1e-3 * bounded["variance"]
    assert "within error_bound" in bounded["why"] and "error_bound" not in biased["why"]
    assert unserved["variance"] is None and "needs values" in unserved["reason"]
    assert document["problem"]["responses"] is None
    with pytest.raises(BadInput, match="mixed needs a tree"):
        with_behavior(reasoning(8), "mixed")


@pytest.mark.parametrize("reaches", [(prefix, suffix), (prefix, trajectory), (suffix, suffix)])
def test_products_of_ratios_of_parts_equal_listing(reaches: tuple) -> None:
    """Two ratios at once: the kernels before, at and behind a token have powers 0 to 4."""
    chain = stale(reasoning(HORIZON, (0.3, 0.6)))
    problem, state = unrolled(chain)
    factors = tuple(Correction(reach=use(reach), map=use(ratio)) for reach in reaches)
    estimator = replace(get("rloo"), corrections=factors)
    found = automaton(estimator, chain, 2)
    parts = [listed(estimator, problem.select(p), state, 2) for p in range(2)]
    mean = torch.cat([m for m, _ in parts]) / 2
    assert torch.allclose(found.mean, mean, rtol=0, atol=1e-12)
    assert float(found.variance) == pytest.approx(float(sum(v for _, v in parts)) / 4, rel=1e-10)


@pytest.mark.parametrize("name", ["cispo", "dapo"])
def test_a_denominator_of_the_group_or_of_the_batch_by_one_token(name: str) -> None:
    """Where every response has one token the denominator is the number of responses."""
    chain = stale(reasoning(1, (0.3, 0.6)))
    rewards = torch.tensor([[0.0, 1.0, 0.0, 0.0, 0.0, 0.5, 1.0, 0.0]], dtype=torch.float64)
    chain = replace(chain, rewards=rewards.expand(2, -1))
    plain = replace(get(name), aggregation=get("rloo").aggregation)
    grouped = replace(get(name), aggregation=use(prompt_mean))
    for group_size in (2, 5):
        found = [automaton(e, chain, group_size) for e in (get(name), grouped)]
        wanted = automaton(replace(plain, admission=()), chain, group_size)
        for ours in found if name == "cispo" else ():
            assert torch.allclose(ours.mean, wanted.mean, rtol=0, atol=1e-13)
            assert float(ours.variance) == pytest.approx(float(wanted.variance), rel=1e-11)
        assert torch.allclose(found[0].drift, found[1].drift, rtol=0, atol=1e-13)
        assert float(found[0].variance) == pytest.approx(float(found[1].variance), rel=1e-11)


def test_objective_is_that_of_the_unrolled_tree() -> None:
    chain = stale(reasoning(4, (0.3, 0.6)))
    problem, state = unrolled(chain)
    ours, theirs = chain_objective(chain), objective(problem)
    assert torch.allclose(ours.value, theirs.value, rtol=0, atol=1e-15)
    assert torch.allclose(ours.gradient, fold(theirs.gradient, state), rtol=0, atol=1e-15)


def test_mismatch_is_that_of_the_unrolled_tree() -> None:
    chain = stale(reasoning(4, (0.3, 0.6)))
    problem, _ = unrolled(chain)
    prefixes, tokens = problem.tree.paths
    on = tokens >= 0
    rho = (problem.logp - problem.behavior_logp)[:, prefixes.clamp(min=0), tokens.clamp(min=0)]
    logp, log_mu = (
        torch.where(on, x[:, prefixes.clamp(min=0), tokens.clamp(min=0)], 0.0).sum(-1)
        for x in (problem.logp, problem.behavior_logp)
    )
    pi, mu, lengths = logp.exp(), log_mu.exp(), on.sum(-1).double()
    squares = torch.where(on, (2 * rho).exp(), 0.0).sum(-1)
    wanted = {
        "tokens": (pi @ lengths).mean(),
        "kl": ((pi * (logp - log_mu)).sum(-1) / (pi @ lengths)).mean(),
        "chi_squared": ((mu * squares).sum(-1) / (mu @ lengths)).mean() - 1,
        "effective_share": (1 / (mu * (2 * (logp - log_mu)).exp()).sum(-1)).mean(),
    }
    assert mismatch(chain) == pytest.approx({k: float(v) for k, v in wanted.items()}, rel=1e-12)


def test_a_state_that_no_response_reaches_changes_nothing() -> None:
    """Even where the kernel's mass would grow beyond float64 there."""
    horizon = 1000
    kernel = torch.tensor([[0.9, 0.1], [5.0, 0.1]], dtype=torch.float64)
    successor = torch.tensor([[0, -1], [1, -1]])
    score = torch.randn(2, 2, 2, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    factor = torch.ones(horizon, dtype=torch.float64)
    found = transfer(Steps(kernel=kernel, score=score, factor=factor), successor, 0)
    alone = transfer(Steps(kernel=kernel[:1], score=score[:1], factor=factor), successor[:1], 0)
    assert float(alone.mass[0]) == pytest.approx(1.0, rel=1e-12)
    assert torch.allclose(found.mass[[0, 2]], alone.mass, rtol=1e-12, atol=0)
    assert torch.allclose(found.norm[[0, 2]], alone.norm, rtol=1e-12, atol=0)
    assert torch.allclose(found.mean[[0, 2], 0], alone.mean[:, 0], rtol=1e-12, atol=0)


def test_policy_mass_that_is_never_drawn() -> None:
    chain = reasoning(4, (0.3,))
    cut = chain.behavior_logp.clone()
    cut[..., 2] = -torch.inf
    partial = replace(chain, behavior_logp=cut.log_softmax(-1))
    problem, _ = unrolled(partial)
    found = chain_objective(partial).unsupported_mass
    assert found > 0.1
    assert torch.allclose(found, objective(problem).unsupported_mass, rtol=0, atol=1e-14)


def test_whole_product_is_unbiased_and_rescaling_keeps_it_in_range() -> None:
    chain = stale(reasoning(2048), 0.02)
    goal = chain_objective(chain).gradient
    found = automaton(get("trajectory_is"), chain, 4)
    assert torch.allclose(found.mean, goal, rtol=0, atol=1e-9 * float(goal.norm()))
    assert float(found.drift.norm()) < 1e-9
    assert float(found.variance) > 0


def test_many_at_once_equal_one_by_one() -> None:
    chains = [stale(reasoning(37, (0.3, 0.6)), sigma) for sigma in (0.0, 0.1, 0.3)]
    names = [e.name for e in FIRST if e.name in SERVED]
    pairs = [(bound(name, 37), chain) for chain in chains for name in names]
    for (estimator, chain), (_, found) in zip(pairs, sweep(pairs, (2, 3), 16), strict=True):
        alone = sweep([(estimator, chain)], (3,), 16)[0][0]
        assert torch.allclose(found.mean, alone.mean, rtol=0, atol=1e-14)
        assert torch.allclose(found.drift, alone.drift, rtol=0, atol=1e-14)
        assert abs(float(found.variance / alone.variance) - 1) < 1e-12


@pytest.mark.parametrize("horizon", [1, 2, 3, 7, 8, 9, 64, 100])
def test_squaring_equals_one_token_after_another(horizon: int) -> None:
    """Masses, means and squared norms with a factor of every length, for a kernel of any growth."""
    generator = torch.Generator().manual_seed(horizon)
    successor = torch.tensor([[0, 1, 2, -1], [2, 0, 0, -1], [1, 1, 2, -1]])
    kernel, factor = (
        torch.rand(shape, generator=generator, dtype=torch.float64)
        for shape in ((3, 4), (horizon,))
    )
    score = torch.randn((3, 4, 4), generator=generator, dtype=torch.float64)
    found = transfer(Steps(kernel=kernel, score=score, factor=factor), successor, 0)
    here = {0: (1.0, torch.zeros(3, 4, dtype=torch.float64), 0.0)}
    mass, norm = torch.zeros(2, 6, dtype=torch.float64)
    mean = torch.zeros(6, 3, 4, dtype=torch.float64)
    for t in range(horizon):
        after: dict[int, tuple] = {}
        for state, (m, u, q) in here.items():
            for v, following in enumerate(successor[state].tolist()):
                nu, z = kernel[state, v], torch.zeros_like(u)
                z[state] = score[state, v]
                new = (nu * m, nu * (u + m * z), nu * (q + 2 * (u * z).sum() + m * (z * z).sum()))
                ends = state if following < 0 else 3 + following if t == horizon - 1 else None
                if ends is None:
                    old = after.get(following, (0, 0, 0))
                    after[following] = tuple(a + b for a, b in zip(old, new, strict=True))
                else:
                    mass[ends] += factor[t] * new[0]
                    mean[ends] += factor[t] * new[1]
                    norm[ends] += factor[t] * new[2]
        here = after
    for ours, theirs in ((found.mass, mass), (found.mean, mean), (found.norm, norm)):
        assert torch.allclose(ours, theirs, rtol=1e-11, atol=1e-14 * float(theirs.abs().max()))


@pytest.mark.parametrize("size", [1e-3, 40.0])
def test_kernels_that_shrink_or_grow_beyond_float64_keep_what_is_within(size: float) -> None:
    """One state, stop weight 1 at every length: sums of a geometric series, whatever its ratio."""
    horizon = 190 if size > 1 else 3000
    kernel = torch.tensor([[size, 1.0]], dtype=torch.float64)
    steps = Steps(
        kernel=kernel,
        score=torch.zeros(1, 2, 2, dtype=torch.float64),
        factor=torch.ones(horizon, dtype=torch.float64),
    )
    found = transfer(steps, torch.tensor([[0, -1]]), 0).mass
    series = (size**horizon - 1) / (size - 1)
    assert float(found[0]) == pytest.approx(series, rel=1e-12)
    assert float(found[1]) == pytest.approx(size**horizon, rel=1e-12)


def test_long_responses_against_sampling() -> None:
    """Mean of one uncorrected response of 300 tokens within five standard errors of its sample."""
    chain = stale(reasoning(300, (0.4,)), 0.2)
    found = automaton(get("reinforce"), chain, 1)
    generator = torch.Generator().manual_seed(5)
    n = 4000
    cumulative = chain.behavior_logp[0].exp().cumsum(-1)
    score = torch.eye(4, dtype=torch.float64) - chain.logp[0].exp().unsqueeze(1)
    state = torch.full((n,), chain.start)
    live = torch.ones(n, dtype=torch.bool)
    total = torch.zeros(n, 4, 4, dtype=torch.float64)
    reward = torch.zeros(n, dtype=torch.float64)
    for _ in range(chain.horizon):
        u = torch.rand(n, 1, generator=generator, dtype=torch.float64)
        drawn = (u > cumulative[state]).sum(1).clamp(max=3)
        total[torch.arange(n), state] += torch.where(live[:, None], score[state, drawn], 0.0)
        following = chain.successor[state, drawn]
        stopped = live & (following < 0)
        reward = torch.where(stopped, chain.rewards[0][state], reward)
        live = live & (following >= 0)
        state = torch.where(live, following, state)
    g = total * reward[:, None, None]
    error = g.std(0) / n**0.5
    assert bool(((g.mean(0) - found.mean[0]).abs() < 5 * error + 1e-12).all())
    spread = (g - g.mean(0)).square().sum((1, 2))
    assert abs(float(spread.mean() - found.variance)) < 5 * float(spread.std()) / n**0.5
