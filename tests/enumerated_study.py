"""A tiny transformer whose groups are all listed: what a study of it would find, and exactly.

The population is four prompts, each as likely as the others.  Every group of two responses is
estimated once by the study's own code; a run of the study then only draws numbers of groups.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import pytest
import tiny_model
import torch
from tiny_model import problem_of, row_of, tiny
from torch import Tensor

from windage.estimators.catalogue import FIRST
from windage.estimators.estimator import Estimator
from windage.llm.measure import limits, moments, sketch
from windage.llm.measure.estimates import Probe, estimates, reference
from windage.llm.measure.moments import Averages, Jackknife
from windage.llm.measure.study import passed
from windage.llm.models import Policy
from windage.toy.problems import Tree

PROMPTS = ((1, 0), (0, 1), (2, 2), (0, 0))
TREE = Tree(3, 2, 2)
PAIRS = list(itertools.combinations_with_replacement(range(TREE.leaves), 2))
FIGURES = (
    "gradient_square",
    "scale",
    "cosine",
    "relative_bias_square",
    "relative_bias_rescaled_square",
    "variance",
    "variance_within",
    "variance_rescaled",
    "drift_square",
    "signal_to_noise",
    "merit",
)
# The first tier, each made ready for responses of two tokens.
ENTRIES = {
    e.name: e.change(length=2.0) if e.settings.get("length", 0) is None and e.name != "dapo" else e
    for e in FIRST
    if "values" not in e.needs
}


@dataclass
class Listed:
    """The population.

    Args:
        policy, behavior: probability of each response `[N L]`.
        rewards: `[N L]`.
        scores: gradient of each response's log-probability `[N L k]`, in a basis of k directions.
        groups, drifts: estimate of each pair of responses, by entry `[N pairs k]`.
        kept: whether the pair is not to be drawn again.
        rows: of the store, by prompt and pair, for whoever checks.
        model: the policy.
        basis: directions `[k D]`.
    """

    policy: Tensor
    behavior: Tensor
    rewards: Tensor
    scores: Tensor
    groups: dict[str, Tensor]
    drifts: dict[str, Tensor]
    kept: dict[str, Tensor]
    rows: list[list[dict]]
    model: Policy
    basis: Tensor

    @property
    def place(self) -> Tensor:
        """Number of the pair of two responses, in any order."""
        found = torch.zeros(TREE.leaves, TREE.leaves, dtype=torch.long)
        for n, (a, b) in enumerate(PAIRS):
            found[a, b] = found[b, a] = n
        return found


def near(model: Policy, share: float) -> Policy:
    """The model with noise on its weights."""
    made = tiny(3, 4, seed=1)
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for to, own in zip(made.parameters(), model.parameters(), strict=True):
            size = own.std() if own.numel() > 1 else own.abs()
            noise = torch.randn(own.shape, generator=generator, dtype=own.dtype)
            to.copy_(own + share * size.clamp(min=0.1) * noise)
    return made


def probe_of(model: Policy) -> Probe:
    parameters = list(model.parameters())
    count = sum(p.numel() for p in parameters)
    return Probe(
        policy=model,
        parameters=parameters,
        sketch=sketch.make(count, 0, seed=0),
        through=False,
    )


def listed(entries: Mapping[str, Estimator], share: float) -> Listed:
    """List everything.

    Args:
        share: of the weights' spread, noise on those of the sampler; 0: the policy samples.
    """
    model = tiny(3, 4, seed=0)
    sampler = near(model, share) if share else model
    found: dict[str, list] = {name: [] for name in ("pi", "mu", "r", "s", "est", "rows")}
    probe = probe_of(model)
    with pytest.MonkeyPatch.context() as patch:
        for number, prompt in enumerate(PROMPTS):
            patch.setattr(tiny_model, "PROMPT", prompt)
            rewards = ((torch.arange(TREE.leaves) + (number == 2)) % 3 != 1).double()
            problem = problem_of(model, TREE, rewards, sampler, (model, model))
            leaves = [row_of(problem, leaf, f"{leaf}", "0") for leaf in range(TREE.leaves)]
            rows = [row_of(problem, leaf, f"{n}", "0") for n, leaf in enumerate(sum(PAIRS, ()))]
            batch, passes = passed(probe, rows, told=True)
            found["est"].append(estimates(entries, batch, [2], passes, probe))
            found["rows"].append(rows)
            found["s"].append(_scores(probe, leaves))
            found["r"].append(rewards)
            found["pi"].append(_chances(problem.logp))
            found["mu"].append(_chances(problem.behavior_logp))
    each = found["est"]
    vectors = [torch.stack(found["s"])]
    vectors += [torch.stack([e[2, n].groups for e in each]) for n in entries]
    vectors += [torch.stack([e[2, n].drift for e in each]) for n in entries]
    basis = _basis(torch.cat([v.flatten(0, -2) for v in vectors]))
    inside = [v @ basis.T for v in vectors]
    names = list(entries)
    return Listed(
        policy=torch.stack(found["pi"]),
        behavior=torch.stack(found["mu"]),
        rewards=torch.stack(found["r"]),
        scores=inside[0],
        groups=dict(zip(names, inside[1 : 1 + len(names)], strict=True)),
        drifts=dict(zip(names, inside[1 + len(names) :], strict=True)),
        kept={n: torch.stack([e[2, n].kept for e in each]) for n in names},
        rows=found["rows"],
        model=model,
        basis=basis,
    )


def _scores(probe: Probe, leaves: Sequence[dict]) -> Tensor:
    """The score of each response: what a reward of its own adds to the mean score."""
    out = []
    for leaf in leaves:
        batch, passes = passed(probe, [leaf, {**leaf, "sample_id": "again"}], told=True)
        out.append(reference(batch, passes, probe)[1])
    return torch.stack(out)


def _chances(logp: Tensor) -> Tensor:
    numbers, ids = TREE.paths
    here = logp[0][numbers.clamp(min=0), ids.clamp(min=0)]
    return torch.where(numbers >= 0, here, 0.0).sum(-1).exp()


def _basis(vectors: Tensor) -> Tensor:
    """An orthonormal basis of what some vectors span: lengths and angles stay."""
    _, values, axes = torch.linalg.svd(vectors, full_matrices=False)
    return axes[values > 1e-9 * values[0]]


def weights(world: Listed) -> Tensor:
    """Probability of each unordered pair `[N pairs]`."""
    twice = torch.tensor([1.0 + (a != b) for a, b in PAIRS]).double()
    first, second = (torch.tensor(side) for side in zip(*PAIRS, strict=True))
    return twice * world.behavior[:, first] * world.behavior[:, second]


def exact(world: Listed, name: str) -> dict[str, float]:
    """Figures by listing, by their definitions."""
    chance, groups = weights(world), world.groups[name]
    gradient = ((world.policy * world.rewards).unsqueeze(-1) * world.scores).sum(1).mean(0)
    by_prompt = (chance.unsqueeze(-1) * groups).sum(1)
    squares = (chance * groups.square().sum(-1)).sum(1).mean()
    kept = (chance * world.kept[name]).sum(1).mean()
    mean, square = by_prompt.mean(0) / kept, squares / kept
    drift = (chance.unsqueeze(-1) * world.drifts[name]).sum(1).mean(0)
    length, along = gradient.norm(), mean @ gradient
    scale, cosine = along / length**2, along / (mean.norm() * length)
    variance = square - mean @ mean
    within = squares - by_prompt.square().sum(-1).mean()
    return {
        "gradient_square": float(length**2),
        "scale": float(scale),
        "cosine": float(cosine),
        "relative_bias_square": float((mean - gradient).norm() ** 2 / length**2),
        "relative_bias_rescaled_square": float((mean / scale - gradient).norm() ** 2 / length**2),
        "variance": float(variance),
        "variance_within": float(within) if kept > 1 - 1e-12 else math.nan,
        "variance_rescaled": float(variance / scale**2),
        "drift_square": float(drift.norm() ** 2),
        "signal_to_noise": float(mean.norm() ** 2 / variance),
        "merit": float(along**2 / (length**2 * square)),
    }


@dataclass
class Draws:
    """Numbers that runs of a study draw: prompts `[n P]`, responses `[n P R]`, pairs `[n P M]`."""

    prompts: Tensor
    own: Tensor
    pairs: Tensor


def draws(
    world: Listed, runs: int, *, prompts: int, own: int, groups: int, generator: torch.Generator
) -> Draws:
    where = torch.randint(len(PROMPTS), (runs, prompts), generator=generator)

    def leaves(chance: Tensor, count: int) -> Tensor:
        found = torch.multinomial(chance[where.flatten()], count, True, generator=generator)
        return found.view(runs, prompts, count)

    pairs = world.place[leaves(world.behavior, groups), leaves(world.behavior, groups)]
    return Draws(where, leaves(world.policy, own), pairs)


def bags(table: Tensor, where: Tensor, numbers: Tensor, weights: Tensor | None = None) -> Tensor:
    """Averages `[n P k]` of a table's rows `[N m k]` by prompts `[n P]` and numbers `[n P M]`."""
    at = (where.unsqueeze(-1) * table.shape[1] + numbers).flatten(0, 1)
    found = torch.nn.functional.embedding_bag(
        at,
        table.flatten(0, 1),
        mode="sum",
        per_sample_weights=None if weights is None else weights.flatten(0, 1),
    )
    return found.unflatten(0, where.shape) / numbers.shape[-1]


def averages(world: Listed, name: str, drawn: Draws, *, controlled: bool) -> Averages:
    """What the study keeps of one entry, run by run."""
    where, count, size = drawn.prompts, drawn.pairs.shape[-1], drawn.own.shape[-1]
    rewards = world.rewards[where.unsqueeze(-1), drawn.own]
    advantages = (rewards - rewards.mean(-1, keepdim=True)) * size / (size - 1)
    mean = bags(world.groups[name], where, drawn.pairs)
    vectors = [
        mean,
        bags(world.scores, where, drawn.own, advantages),
        bags(world.drifts[name], where, drawn.pairs),
        bags(world.scores, where, drawn.own),
    ]
    if controlled:
        vectors.append(bags(world.drifts["trajectory_is"], where, drawn.pairs))
    square = world.groups[name].square().sum(-1)[where.unsqueeze(-1), drawn.pairs].mean(-1)
    pair = (count * mean.square().sum(-1) - square) / (count - 1)
    return Averages(
        vectors=torch.stack(vectors, -2),
        square=square,
        pair=pair,
        kept=world.kept[name][where.unsqueeze(-1), drawn.pairs].mean(-1),
    )


def covered(found: Jackknife, truth: Mapping[str, float]) -> dict[str, Tensor]:
    """How many runs' intervals hold the exact figure, say anything, and are without a bound."""
    out = {}
    for name in FIGURES:
        if not math.isfinite(truth[name]):
            continue
        low, high = limits.interval(found, name)
        room = 1e-6 * max(abs(truth[name]), 1e-9)  # of rotary embedding in single precision
        said = ~(low.isnan() | high.isnan())
        hit = said & (low <= truth[name] + room) & (truth[name] - room <= high)
        wide = said & (low.isinf() | high.isinf())
        out[name] = torch.stack([hit.sum(), said.sum(), wide.sum()])
    return out


def coverage(
    world: Listed,
    names: Iterable[str],
    *,
    runs: int,
    prompts: int,
    piece: int = 50,
    change: Callable[[Averages], Averages] = lambda found: found,
) -> dict[tuple[str, str], Tensor]:
    """Counts of `covered` by entry and figure."""
    generator = torch.Generator().manual_seed(11)
    truth = {name: exact(world, name) for name in names}
    total: dict[tuple[str, str], Tensor] = {}
    for _ in range(runs // piece):
        drawn = draws(world, piece, prompts=prompts, own=16, groups=4, generator=generator)
        for name in truth:
            found = moments.figures(change(averages(world, name, drawn, controlled=True)))
            for figure, counts in covered(found, truth[name]).items():
                total[name, figure] = total.get((name, figure), 0) + counts
    return total
