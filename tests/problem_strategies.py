"""Problems by number: trees, policies, samplers and rewards of every kind that engines meet.

A number gives one problem, so a failure names what to look at: `drawn(417)`.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch

from windage.estimators.catalogue import CATALOGUE
from windage.estimators.estimator import Estimator
from windage.toy.behavior import with_behavior
from windage.toy.problems import Problem, Tree, make, normalize

REWARDS = ("signs", "binary", "few", "real", "distinct", "equal")
SAMPLERS = ("same", "noise", "top_k", "top_p", "temperature", "stale", "extreme", "wide")


def trees(leaves: int) -> list[Tree]:
    """Vocabularies 1..4, any stop token or none, horizons 1..4, at most so many responses."""
    return [
        tree
        for vocab in (1, 2, 3, 4)
        for stop in (None, *range(vocab))
        for horizon in (1, 2, 3, 4)
        if (tree := Tree(vocab, stop, horizon)).leaves <= leaves
    ]


def reward_table(kind: str, rng: np.random.Generator, shape: tuple[int, int]) -> torch.Tensor:
    """Rewards of one kind."""
    table = {
        "signs": lambda: rng.choice([-1.0, 1.0], shape),
        "binary": lambda: rng.choice([0.0, 1.0], shape),
        "few": lambda: rng.choice([-0.5, 0.1, 2.0], shape),
        "real": lambda: rng.normal(size=shape),
        "distinct": lambda: rng.permuted(np.tile(np.arange(shape[1]) / 4.0, (shape[0], 1)), axis=1),
        "equal": lambda: np.full(shape, 0.7),
    }
    return torch.from_numpy(table[kind]())


def sampled(problem: Problem, kind: str, rng: np.random.Generator) -> Problem:
    """The problem with a sampler of one kind."""
    shape, vocab = problem.logits.shape, problem.tree.vocab
    if kind == "same":
        return problem
    if kind in ("extreme", "wide"):
        spread = 800.0 if kind == "extreme" else 30.0
        away = spread * torch.from_numpy(rng.choice([-1.0, 0.0, 0.0, 1.0], shape))
        both = rng.random() < 0.5
        logits = problem.logits + away if both else problem.logits
        moved = problem.logits - (0 if both else 1) * away
        return replace(problem, logits=logits, behavior_logp=normalize(moved))
    settings = {
        "noise": {"sigma": float(rng.choice([0.1, 1.0])), "seed": int(rng.integers(1000))},
        "top_k": {"k": int(rng.integers(1, vocab + 1))},
        "top_p": {"p": float(rng.choice([0.5, 0.9, 1.0]))},
        "temperature": {"t": float(rng.choice([0.5, 2.0]))},
        "stale": {"steps": int(rng.integers(4)), "rate": 0.5},
    }
    return with_behavior(problem, kind, **settings[kind])


def drawn(number: int, *, leaves: int = 30, prompts: tuple[int, ...] = (1, 1, 2, 3)) -> Problem:
    """One of the problems."""
    rng = np.random.default_rng(number)
    choices = trees(leaves)
    tree = choices[rng.integers(len(choices))]
    count = int(rng.choice(prompts))
    rewards = reward_table(str(rng.choice(REWARDS)), rng, (count, tree.leaves))
    logits = torch.from_numpy(rng.normal(size=(count, tree.prefixes, tree.vocab)))
    return sampled(make(f"{number}", tree, logits, rewards), str(rng.choice(SAMPLERS)), rng)


def entry(name: str, problem: Problem) -> Estimator:
    """A catalogue entry with the settings that a problem supplies."""
    estimator = CATALOGUE[name]
    if any(m.name == "constant_length" for _, m in estimator.members):
        return estimator.change(length=float(problem.tree.horizon))
    return estimator


def typical(prompts: int = 1, horizon: int = 3, *, seed: int = 0) -> Problem:
    """Three tokens of which the middle one stops, binary rewards, noise on the sampler's logits."""
    rng = np.random.default_rng(seed)
    tree = Tree(3, 1, horizon)
    logits = torch.from_numpy(rng.normal(size=(prompts, tree.prefixes, 3)))
    rewards = reward_table("binary", rng, (prompts, tree.leaves))
    rewards[:, :2] = torch.tensor([1.0, 0.0])
    return with_behavior(make("typical", tree, logits, rewards), "noise", sigma=0.5)
