"""Shares of the possible variance reduction, against a tiny transformer whose groups are listed."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace
from typing import Any

import enumerated_study as listing
import pytest
import tiny_model
import torch
from checks import assert_close
from enumerated_study import PROMPTS, TREE
from tiny_model import problem_of, row_of, tiny
from torch import Tensor

from windage.estimators.batch import Batch
from windage.llm.measure import baselines
from windage.llm.measure.baselines import BEST, NONE, TURNED, UNBIASED, least, measured
from windage.llm.measure.study import passed

NAMES = (NONE, BEST, *UNBIASED, *TURNED)


@dataclass
class Prompt:
    """Every response to one prompt.

    Args:
        chance: of each, by the policy.
        batch: all of them in a row.
        scores: gradients of their log-probabilities.
    """

    chance: Tensor
    batch: Batch
    scores: Tensor

    @property
    def rewards(self) -> Tensor:
        return self.batch.rewards[0].double()


@pytest.fixture(scope="module")
def prompts() -> list[Prompt]:
    model, found = tiny(3, 4, seed=0), []
    probe = listing.probe_of(model)
    with pytest.MonkeyPatch.context() as patch:
        for number, prompt in enumerate(PROMPTS):
            patch.setattr(tiny_model, "PROMPT", prompt)
            rewards = ((5 * torch.arange(TREE.leaves) + 3 * number) % 7).double() / 6
            problem = problem_of(model, TREE, rewards, model, (model, model))
            leaves = [row_of(problem, leaf, f"{leaf}", "0") for leaf in range(TREE.leaves)]
            batch, _ = passed(probe, leaves, told=True)
            scores = listing._scores(probe, leaves)
            found.append(Prompt(listing._chances(problem.logp), batch, scores))
    return found


def drawn(prompt: Prompt, numbers: Tensor) -> tuple[Batch, Tensor]:
    """A record of some responses, and their scores."""
    groups = baselines.taken(prompt.batch, numbers.unsqueeze(0))
    inner = {n: v.squeeze(0) for n, v in vars(groups).items() if isinstance(v, Tensor)}
    return replace(groups, **inner), prompt.scores[numbers]


def by_hand(name: str, prompt: Prompt, groups: Tensor) -> Tensor:
    """Estimates `[M k]` of groups of responses `[M G]`, each baseline written out."""
    r, s = prompt.rewards[groups], prompt.scores[groups]
    size = r.shape[1]
    p = prompt.batch.logp[0].double().exp()
    norm = 1 - 2 * p + prompt.batch.probability_square[0].double()
    weights = {
        "opo": prompt.batch.lengths[0].double(),
        "score_weighted": torch.where(prompt.batch.mask[0], norm, 0.0).sum(-1),
    }
    weight = weights.get(name.removesuffix("_leave_one_out"), torch.ones(len(p)).double())[groups]
    apart = name == "rloo" or name.endswith("_leave_one_out")
    baseline = torch.zeros_like(r)
    for g in range(size):
        others = [h for h in range(size) if h != g or not apart]
        baseline[:, g] = (weight * r)[:, others].sum(1) / weight[:, others].sum(1)
    if name == NONE:
        baseline = torch.zeros_like(r)
    if name == BEST:
        lengths = prompt.scores.square().sum(-1)
        mean = lambda x: (prompt.chance * x).sum()  # noqa: E731
        baseline = torch.full_like(r, float(mean(prompt.rewards * lengths) / mean(lengths)))
    return ((r - baseline).unsqueeze(-1) * s).mean(1)


def expected(prompts: list[Prompt], name: str, size: int) -> dict[str, Tensor]:
    """Mean and mean square of an estimate, prompt by prompt, over all groups that there are."""
    groups = torch.tensor(list(itertools.product(range(TREE.leaves), repeat=size)))
    means, squares = [], []
    for prompt in prompts:
        chance, found = prompt.chance[groups].prod(1), by_hand(name, prompt, groups)
        means.append(chance @ found)
        squares.append(chance @ found.square().sum(-1))
    return {"mean": torch.stack(means), "square": torch.stack(squares)}


def exact(prompts: list[Prompt], size: int) -> dict[str, tuple[float, float, float]]:
    """Share, scale and relative bias after rescaling of each baseline, by listing."""
    gradient = expected(prompts, NONE, size)["mean"].mean(0)
    variances, out = {}, {}
    for name in NAMES:
        found = expected(prompts, name, size)
        mean = found["mean"].mean(0)
        scale = float(mean @ gradient / gradient.square().sum())
        within = (found["square"] - found["mean"].square().sum(-1)).mean()
        variances[name] = float(within) / scale**2
        out[name] = scale, float((mean / scale - gradient).norm() / gradient.norm())
    gain = variances[NONE] - variances[BEST]
    return {n: ((variances[NONE] - variances[n]) / gain, *out[n]) for n in NAMES}


def test_listing_agrees_with_what_is_known(prompts):
    for size in (2, 3):
        found = exact(prompts, size)
        assert found[NONE][0] == 0 and found[BEST][0] == pytest.approx(1)
        assert found["group_mean"][0] == pytest.approx(found["rloo"][0])
        for name, scale in UNBIASED.items():
            assert found[name][1:] == (pytest.approx(scale(size)), pytest.approx(0, abs=1e-6))
        assert min(found[name][2] for name in TURNED) > 1e-3
        # Of two responses the other one is the whole baseline, however it is weighted.
        apart = {round(found[name][0], 4) for name in NAMES}
        assert len(apart) == len(NAMES) - (3 if size == 2 else 1)


def test_what_is_kept_of_a_prompt_has_no_bias(prompts):
    """Two responses drawn in every way: averages of what is kept are the exact ones."""
    prompt = prompts[1]
    truth = {name: expected([prompt], name, 2) for name in NAMES}
    total: dict[str, Tensor] = {}
    for a, b in itertools.product(range(TREE.leaves), repeat=2):
        numbers = torch.tensor([a, b])
        chance = prompt.chance[a] * prompt.chance[b]
        for row in measured(*drawn(prompt, numbers), [2, 4]):
            assert row["group_size"] == 2
            kept = torch.tensor([row["square"], row["pair"] or 0.0]).double()
            total[row["entry"]] = total.get(row["entry"], 0) + chance * kept
    for name in (NONE, *UNBIASED, *TURNED):
        assert_close(total[name][0], truth[name]["square"][0], relative=1e-5)
    assert_close(total[NONE][1], truth[NONE]["mean"][0].square().sum(), relative=1e-5)


def test_products_of_two_groups_are_of_groups_without_a_response_in_common(prompts):
    prompt = prompts[0]
    numbers = torch.tensor([0, 3, 5, 6, 1, 2])
    rows = {r["entry"]: r for r in measured(*drawn(prompt, numbers), [2])}
    orders = baselines.regrouped(6, 2)
    assert orders.shape == (baselines.AGAIN, 3, 2)
    for name in TURNED:
        each = [by_hand(name, prompt, numbers[order]) for order in orders]
        pairs = [e.sum(0).square().sum() - e.square().sum() for e in each]
        assert rows[name]["pair"] == pytest.approx(float(sum(pairs)) / 6 / len(pairs))
        assert_close(torch.as_tensor(rows[name]["mean"]), torch.cat(each).mean(0), relative=1e-5)


def test_the_best_constant_is_measured_nearly_without_bias(prompts):
    """A constant fitted and tried on the same twelve responses overstates the gain by 9 %."""
    generator = torch.Generator().manual_seed(0)
    off, plain, gain = 0.0, 0.0, 0.0
    for prompt in prompts:
        lengths = prompt.scores.square().sum(-1)
        none, truth = (float(expected([prompt], n, 1)["square"][0]) for n in (NONE, BEST))
        some = torch.multinomial(prompt.chance, 1000 * 12, True, generator=generator).view(-1, 12)
        r, n = prompt.rewards[some], lengths[some]
        fitted = (r * n).sum(1, keepdim=True) / n.sum(1, keepdim=True)
        off += sum(float(least(*pair)) for pair in zip(r, n, strict=True)) / 1000 - truth
        plain += float(((r - fitted).square() * n).mean()) - truth
        gain += none - truth
    assert abs(off) < 0.03 * gain and plain < -0.06 * gain, (off, plain, gain)


def places(prompts: list[Prompt], *, count: int, own: int, sizes: list[int], seed: int) -> Any:
    """What a study would keep of prompts drawn at random, by group size."""
    generator = torch.Generator().manual_seed(seed)
    out: dict[int, list[dict[str, Any]]] = {size: [] for size in sizes}
    for number in torch.randint(len(prompts), (count,), generator=generator).tolist():
        prompt = prompts[number]
        numbers = torch.multinomial(prompt.chance, own, True, generator=generator)
        batch, scores = drawn(prompt, numbers)
        r = batch.rewards[0].double()
        about = {"mean": (r - r.mean()) @ scores / (own - 1), "drift": scores.mean(0)}
        for size in sizes:
            kept = {row["entry"]: row for row in measured(batch, scores, [size])}
            out[size].append({**kept, "reference": about})
    return out


def test_shares_are_those_of_listing(prompts):
    for size, place in places(prompts, count=40, own=16, sizes=[2, 4], seed=1).items():
        found = {r["baseline"]: r for r in baselines.rows(place, size, resolved=True)}
        assert set(found) == set(NAMES)
        for name, (share, scale, bias) in exact(prompts, size).items():
            row = found[name]
            assert abs(row["share"] - share) <= 4 * row["standard_error"] + 1e-9, (name, size)
            assert row["standard_error"] < 0.25
            if name in TURNED:
                assert row["scale"] == pytest.approx(scale, rel=0.1)
                assert row["relative_bias"] == pytest.approx(bias, abs=0.2)


def test_what_is_not_told_has_a_reason(prompts):
    place = places(prompts, count=5, own=4, sizes=[4], seed=0)[4]
    found = {r["baseline"]: r for r in baselines.rows(place, 4, resolved=True)}
    assert {found[name]["reason"] for name in TURNED} == {
        "there are fewer than two groups of a prompt"
    }
    found = {r["baseline"]: r for r in baselines.rows(place, 4, resolved=False)}
    assert "not told from 0" in found["opo"]["reason"] and found["opo"]["share"] is None
    still = [{n: {**r, "square": 1.0, "pair": 0.0} for n, r in one.items()} for one in place]
    assert "no baseline is told" in baselines.rows(still, 4, resolved=False)[2]["reason"]
