"""Laws of summed and averaged log-ratios: within their bounds of a list of all responses."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from windage.analysis.studies.bounds import figure_bounds
from windage.analysis.studies.figures import from_moments
from windage.estimators.advantage import constant
from windage.estimators.catalogue import get
from windage.estimators.correction import band, clip, dual_clip, keep, ratio, taper, truncate
from windage.estimators.maps import mask_negative
from windage.estimators.member import Member, use
from windage.toy.chains import Chain, reasoning
from windage.toy.exact.automata import Laws, sweep
from windage.toy.exact.averaged import Band, MeanLaw
from windage.toy.exact.ends import Response, batch
from windage.toy.exact.kernels import scores
from windage.toy.exact.moments import Bounds, Moments
from windage.toy.exact.pieces import Pieces, Window, pieces
from windage.toy.exact.summed import Law
from windage.toy.objective import objective

MAPS = {
    "truncate": use(truncate, cap=1.5),
    "taper": use(taper),
    "clip": use(clip, clip_low=3e-4, clip_high=4e-4),
    "dual_clip": use(dual_clip),
    "band": use(band, low=0.5, high=2.0),
    "keep": use(keep, low=0.9, high=1.1),
    "mask_negative": use(mask_negative, delta=0.1),
    "ratio": use(ratio),
}


def stale(chain: Chain, sigma: float) -> Chain:
    noise = torch.randn(chain.logits.shape, generator=torch.Generator().manual_seed(3))
    return replace(chain, behavior_logp=(chain.logits + sigma * noise).log_softmax(-1))


@dataclass
class Every:
    """Every response of a chain: length, end, and for each prompt mass, log-ratio and score."""

    length: Tensor
    end: Tensor
    mass: Tensor
    x: Tensor
    score: Tensor


def every(chain: Chain) -> Every:
    """Responses token by token, with a record for each that has ended."""
    pi, mu = chain.logp.exp(), chain.behavior_logp.exp()
    x, states = chain.logp - chain.behavior_logp, len(chain.successor)
    own = torch.eye(pi.shape[-1], dtype=pi.dtype) - pi.unsqueeze(-2)
    state = torch.tensor([chain.start])
    here = (
        torch.ones(chain.prompts, 1, dtype=pi.dtype),
        torch.zeros(chain.prompts, 1, dtype=pi.dtype),
        torch.zeros(chain.prompts, 1, *pi.shape[1:], dtype=pi.dtype),
    )
    out: list[tuple] = []
    for t in range(1, chain.horizon + 1):
        n, vocab = len(state), pi.shape[-1]
        mass = (here[0].unsqueeze(-1) * mu[:, state]).flatten(1)
        summed = (here[1].unsqueeze(-1) + x[:, state]).flatten(1)
        score = here[2].unsqueeze(2).repeat(1, 1, vocab, 1, 1)
        score[:, torch.arange(n), :, state] += own[:, state].transpose(0, 1)
        following, was = chain.successor[state].flatten(), state.repeat_interleave(vocab)
        over = (following < 0) | (t == chain.horizon)
        end = torch.where(following < 0, was, states + following)
        score = score.flatten(1, 2)
        out.append((torch.full((n * vocab,), t)[over], end[over], mass[:, over], summed[:, over]))
        out[-1] += (score[:, over],)
        state, here = following[~over], (mass[:, ~over], summed[:, ~over], score[:, ~over])
    parts = [torch.cat([o[i] for o in out], 0 if i < 2 else 1) for i in range(5)]
    return Every(*parts)


def truth(
    chain: Chain, map_: Member, sign: float, power: int, *, mean: bool
) -> tuple[Tensor, Tensor]:
    """Mean by end and norm by end of a mapped response, from the list of all."""
    listed = every(chain)
    t = listed.length.to(listed.x)
    weight = map_(listed.x / t if mean else listed.x, t.new_tensor(sign)) * t**-power
    blocks = listed.mass.new_zeros(
        (chain.prompts, 2 * len(chain.successor), *chain.logits.shape[1:])
    )
    means = blocks.index_add(1, listed.end, (listed.mass * weight)[..., None, None] * listed.score)
    norm = listed.mass * weight.square() * listed.score.square().sum((-1, -2))
    return means, blocks[..., 0, 0].index_add(1, listed.end, norm)


def law(chain: Chain, *, mean: bool, power: int, frequencies: int) -> Any:
    plain = torch.ones_like(chain.logits)
    score = scores(get("rloo"), chain, 1.0, plain)
    kind = MeanLaw if mean else Law
    return kind(chain, score, chain.logp - chain.behavior_logp, power, frequencies)


CASES = [(name, False) for name in MAPS] + [(name, True) for name in ("truncate", "clip", "keep")]


@pytest.mark.parametrize(("name", "mean"), CASES)
def test_errors_lie_within_bounds_that_shrink_as_the_grid_is_refined(name: str, mean: bool) -> None:
    """By end, for both signs, with and without one over the length."""
    chain = stale(reasoning(6, (0.3, 0.6)), 0.3)
    for sign in (1.0, -1.0):
        function = pieces(MAPS[name], sign)
        assert function is not None
        for power in (0, 1):
            wanted, square = truth(chain, MAPS[name], sign, power, mean=mean)
            bounds = []
            for frequencies in (48, 256):
                known = law(chain, mean=mean, power=power, frequencies=frequencies)
                part = known.mapped(function)
                away = (part.mean - wanted).flatten(2).norm(dim=-1)
                assert bool((away <= part.mean_error + 1e-12).all()), (sign, power, frequencies)
                off = (part.norm - square).abs()
                assert bool((off <= part.norm_error + 1e-12).all()), (sign, power, frequencies)
                bounds.append((float(part.mean_error.sum()), float(part.norm_error.sum())))
            for coarse, fine in zip(*bounds, strict=True):
                assert fine <= 0.4 * coarse or coarse < 1e-7, (sign, power)


def test_ten_tokens_against_the_list() -> None:
    chain = stale(reasoning(10, (0.4,)), 0.2)
    function = pieces(MAPS["truncate"], 1.0)
    assert function is not None
    wanted, square = truth(chain, MAPS["truncate"], 1.0, 0, mean=False)
    part = law(chain, mean=False, power=0, frequencies=1024).mapped(function)
    error = float((part.mean - wanted).norm())
    assert 1e-9 < error < float(part.mean_error.sum()) < 1e-3 * float(wanted.norm())
    assert bool(((part.norm - square).abs() < part.norm_error).all())


@pytest.mark.parametrize("sign", [1.0, -1.0])
@pytest.mark.parametrize("name", MAPS)
def test_pieces_are_the_map(name: str, sign: float) -> None:
    found = pieces(MAPS[name], sign)
    assert found is not None
    x = torch.cat([torch.linspace(-9, 9, 2001), torch.linspace(-1e-3, 1e-3, 2001)]).double()
    x = x[(x.unsqueeze(1) - found.limits).abs().amin(1) > 1e-9] if len(found.limits) else x
    wanted = MAPS[name](x, x.new_tensor(sign))
    assert torch.allclose(found.at(x), wanted, rtol=1e-11, atol=1e-12)
    assert torch.allclose(found.squared().at(x), wanted.square(), rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("frequencies", [32, 256])
@pytest.mark.parametrize("length", [1.0, 20.0])
@pytest.mark.parametrize("name", sorted(set(MAPS) - {"ratio"}))
def test_bells_lie_above_the_error_of_the_series(
    name: str, length: float, frequencies: int
) -> None:
    """At every point of the window, for the map of a sum and for that of a mean."""
    least = (-4.0 / length, 3.0 / length) if length > 1 else (-float("inf"), float("inf"))
    window = Window(low=-4.0, high=3.0, frequencies=frequencies, least=least[0], most=least[1])
    x = torch.linspace(-4.0, 3.0, 4001, dtype=torch.float64)
    waves = torch.exp(1j * x.unsqueeze(1) * window.omega)
    for sign in (1.0, -1.0):
        whole = pieces(MAPS[name], sign)
        assert whole is not None
        for function in (whole, whole.squared()):
            t = torch.tensor([length], dtype=torch.float64)
            series, bells = (
                (waves @ find(function, window.omega, t)[:, 0]).real
                for find in (window.series, window.bells)
            )
            wanted = function.at(x / length)
            slack = 1e-9 * float(wanted.abs().max())
            assert bool(((series - wanted).abs() <= bells + slack).all())
            assert float(series.abs().max()) <= window.greatest(function)


def test_a_sum_that_is_always_zero_needs_no_window() -> None:
    chain = reasoning(300)
    on = sweep([(get("sequence_tis"), chain), (get("gspo"), chain)], (4,))
    plain = sweep([(get("rloo"), chain), (get("grpo"), chain)], (4,))
    for (ours,), (theirs,) in zip(on, plain, strict=True):
        assert ours.bounds is None
        assert torch.allclose(ours.mean, theirs.mean, rtol=0, atol=1e-14)
        assert float(ours.variance) == pytest.approx(float(theirs.variance), rel=1e-12)


def test_powers_of_the_length_by_an_integral_and_by_a_factor(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    chain = stale(reasoning(50, (0.3, 0.6)), 0.1)
    known = law(chain, mean=False, power=1, frequencies=64)
    direct = known.ended(torch.tensor([0.0, 0.3j]), (1, 2))
    monkeypatch.setattr("windage.toy.exact.summed.SHORT", 0)
    mixed = known.ended(torch.tensor([0.0, 0.3j]), (1, 2))
    for power in (1, 2):
        for name in ("mass", "mean", "norm"):
            a, b = (getattr(found[power], name) for found in (direct, mixed))
            assert torch.allclose(a, b, rtol=0, atol=1e-9 * float(a.abs().max()))


def test_bands_of_lengths_add_up() -> None:
    """Laws by band of lengths: 1 to 15, 16 to 40; together the law of all."""
    chain = stale(reasoning(300, (0.3,)), 0.05)
    known = law(chain, mean=True, power=1, frequencies=16)
    assert [int(b.law.counted.nonzero()[0]) + 1 for b in known.bands] == [1, 16]
    rate = torch.tensor([0.2j])
    total = sum(b.law.ended(rate, (1,))[1].mean for b in known.bands)
    whole = Law(chain, known.bands[0].law.score, known.bands[0].law.x, 1, 16).ended(rate, (1,))[1]
    assert torch.allclose(total, whole.mean, rtol=0, atol=1e-13)
    assert isinstance(known.bands[0], Band)


def drawn(chain: Chain, n: int, seed: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Log-ratio, length, summed score and reward of sampled responses of one prompt."""
    generator = torch.Generator().manual_seed(seed)
    logp, mu = chain.logp[0], chain.behavior_logp[0]
    cumulative, x = mu.exp().cumsum(-1), logp - mu
    own = torch.eye(4, dtype=torch.float64) - logp.exp().unsqueeze(1)
    live, state = torch.arange(n), torch.full((n,), chain.start)
    total, length, reward = torch.zeros(3, n, dtype=torch.float64)
    score = torch.zeros(n, 4, 4, dtype=torch.float64)
    for t in range(chain.horizon):
        u = torch.rand(len(live), 1, generator=generator, dtype=torch.float64)
        token = (u > cumulative[state]).sum(1).clamp(max=3)
        score[live, state] += own[state, token]
        total[live] += x[state, token]
        length[live] += 1
        following = chain.successor[state, token]
        over = (following < 0) | (t == chain.horizon - 1)
        how = torch.where(following < 0, state, 4 + following)
        reward[live[over]] = chain.rewards[0][how[over]]
        live, state = live[~over], following[~over]
    return total, length, score, reward


@pytest.mark.parametrize("name", ["sequence_tis", "tis_both_signs", "gspo"])
def test_long_responses_against_sampling(name: str) -> None:
    """Mean and variance of one response of up to 2,000 tokens: z-scores below 4.5 of 17 figures.

    A false alarm has probability 17 * 7e-6 = 1e-4 a case.
    """
    chain = stale(reasoning(2000, (0.4,)), 0.02)
    estimator = replace(get(name), advantage=use(constant))
    found = sweep([(estimator, chain)], (1,), 192)[0][0]
    assert found.bounds is not None
    x, length, score, reward = drawn(chain, 6000, 1)
    (correction,) = estimator.corrections
    mean = name == "gspo"
    weight = correction.map(x / length if mean else x, torch.tensor(1.0, dtype=torch.float64))
    g = (reward * weight * (1 / length if mean else 1.0))[:, None, None] * score
    error = g.std(0) / len(g) ** 0.5
    assert bool(((g.mean(0) - found.mean[0]).abs() < 4.5 * error + found.bounds.mean).all())
    spread = (g - g.mean(0)).square().sum((1, 2))
    noise = float(spread.std()) / len(g) ** 0.5
    away = abs(float(spread.mean() - found.variance))
    assert away < 4.5 * noise + found.bounds.variance
    assert found.bounds.mean < (10 if mean else 2) * float(error.norm())


def test_estimators_share_a_law() -> None:
    laws = Laws(16)
    chain = stale(reasoning(20), 0.1)
    for name in ("sequence_tis", "tis_both_signs", "topr"):
        laws.response(get(name), chain)
    assert len(laws.known) == 1
    laws.response(replace(get("topr"), aggregation=get("grpo").aggregation), chain)
    assert len(laws.known) == 2


def test_bounds_of_figures_hold_for_any_moments_within_theirs() -> None:
    chain = stale(reasoning(16), 0.3)
    goal = objective(chain)
    generator = torch.Generator().manual_seed(0)

    def noise(size: float) -> Tensor:
        found = torch.randn(chain.logits.shape, generator=generator, dtype=torch.float64)
        return size * found / found.norm()

    for size in (1e-3, 0.05, 0.3):
        true = Moments(
            mean=goal.gradient + noise(0.5 * float(goal.gradient.norm())),
            variance=torch.tensor(2.0, dtype=torch.float64),
            drift=noise(0.3),
        )
        near = size * float(goal.gradient.norm())
        for direction in (noise(near), near * goal.gradient / goal.gradient.norm()):
            for variance in (-size, size):
                found = replace(
                    true,
                    mean=true.mean + direction,
                    variance=true.variance + variance,
                    drift=true.drift + noise(near),
                    bounds=Bounds(mean=near, variance=size, drift=near),
                )
                ours, theirs = (from_moments(m, goal, chain.rewards) for m in (found, true))
                bounds = figure_bounds(found, goal, ours)
                assert bounds is not None and set(bounds) == set(ours)
                for key, bound in bounds.items():
                    value, wanted = ours[key], theirs[key]
                    assert bound is not None and value is not None and wanted is not None
                    assert abs(value - wanted) <= bound + 1e-12, key
        assert figure_bounds(true, goal, theirs) is None


def test_a_function_less_another_and_squared() -> None:
    one = Pieces(limits=torch.tensor([0.0]), terms=torch.tensor([[1.0, 2.0, 0.0], [3.0, 0.0, 0.0]]))
    assert one.squared().terms.tolist() == [[1.0, 4.0, 4.0], [9.0, 0.0, 0.0]]
    assert one.less(one.terms[1]).terms.tolist() == [[-2.0, 2.0, 0.0], [0.0, 0.0, 0.0]]
    assert one.change.tolist() == [[1.0, 2.0, 0.0], [2.0, -2.0, 0.0], [-3.0, 0.0, 0.0]]


@pytest.mark.parametrize("reads_sign", [False, True])
def test_bounds_of_a_batch_are_met_where_every_mean_is_longer_than_thought(
    reads_sign: bool,
) -> None:
    """One class, advantage 1: mean square and squared mean then change by what the bounds add."""
    chain = reasoning(1, (0.3, 0.6))
    chain = replace(chain, rewards=torch.ones_like(chain.rewards))
    corrections = get("dr_grpo" if reads_sign else "reinforce").corrections
    estimator = replace(get("reinforce"), corrections=corrections)
    mass = torch.zeros_like(chain.rewards)
    mass[:, 0] = 1.0
    signs = 2 if reads_sign else 1
    mean = torch.zeros(signs, *mass.shape, *chain.logits.shape[1:], dtype=torch.float64)
    mean[0, :, 0, 0, 1] = 1.0
    norm = torch.zeros(signs, *mass.shape, dtype=torch.float64)
    norm[0, :, 0] = 3.0
    error = 0.1 * mean.flatten(3).norm(dim=-1)
    thought = Response(mean=mean, norm=norm, mean_error=error, norm_error=0.2 * norm)
    found = batch(estimator, chain, 3, mass, thought)
    truth = batch(estimator, chain, 3, mass, Response(mean=1.1 * mean, norm=1.2 * norm))
    known = found.bounds
    assert known is not None
    assert float((truth.mean - found.mean).norm()) == pytest.approx(known.mean)
    assert float((truth.drift - found.drift).norm()) == pytest.approx(known.drift)
    longer = float(truth.mean.square().sum() - found.mean.square().sum())
    square = float(truth.variance - found.variance) + longer
    assert known.variance == pytest.approx(square + longer)


@pytest.mark.parametrize("side", [-1, 1])
@pytest.mark.parametrize("degree", [0, 1, 2])
def test_exponential_kernels_bound_what_is_outside(degree: int, side: int) -> None:
    """Against the list; not vacuous: within a factor of 30 at one standard deviation."""
    chain = stale(reasoning(6, (0.3, 0.6)), 0.3)
    known, listed = law(chain, mean=False, power=0, frequencies=16), every(chain)
    spread = float((listed.mass * listed.x.square()).sum(1).max().sqrt())
    size = listed.score.square().sum((-1, -2)).sqrt()
    for level in (1.0, 2.0, 3.0):
        beyond = side * listed.x > level * spread
        weight = torch.where(beyond, listed.mass * (degree * listed.x).exp(), 0.0)
        for squared in (False, True):
            wanted = (weight * size ** (2 if squared else 1)).sum(1)
            bound = known.outside(side * level * spread, degree, side, squared=squared)
            assert bool((wanted <= bound).all())
            assert level > 1.0 or bool((bound < 30 * wanted).all())
