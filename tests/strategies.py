"""Hypothesis strategies: problems that are enumerated in milliseconds, and batches of any shape."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor

from windage.estimators.batch import Batch
from windage.toy.problems import Problem, Tree, make

REWARDS = {
    "binary": st.sampled_from([0.0, 1.0]),
    "signs": st.sampled_from([-1.0, 1.0]),
    "real": st.integers(-8, 8).map(lambda n: n / 4),
}


def numbers(*shape: int, low: float = -2.0, high: float = 2.0) -> st.SearchStrategy[Tensor]:
    """Tensors of quarters between two bounds."""
    quarters = st.integers(math.ceil(4 * low), math.floor(4 * high))
    count = math.prod(shape)
    flat = st.lists(quarters, min_size=count, max_size=count)
    return flat.map(lambda ns: torch.tensor(ns, dtype=torch.float64).view(shape) / 4)


def booleans(*shape: int) -> st.SearchStrategy[Tensor]:
    """Boolean tensors."""
    count = math.prod(shape)
    flat = st.lists(st.booleans(), min_size=count, max_size=count)
    return flat.map(lambda bs: torch.tensor(bs, dtype=torch.bool).view(shape))


@st.composite
def trees(draw: st.DrawFn, *, leaves: int = 15, horizon: int = 3, fixed: bool = False) -> Tree:
    """Trees of at most so many responses; `fixed`: all responses have one length."""
    choices = [
        tree
        for vocab in (2, 3, 4)
        for stop in ((None,) if fixed else (None, vocab - 1, 0))
        for t in range(1, horizon + 1)
        if (tree := Tree(vocab, stop, t)).leaves <= leaves
    ]
    return draw(st.sampled_from(choices))


@st.composite
def problems(
    draw: st.DrawFn,
    *,
    prompts: Sequence[int] = (1, 2),
    rewards: Sequence[str] = tuple(REWARDS),
    on_policy: bool | None = None,
    leaves: int = 15,
    horizon: int = 3,
    fixed: bool = False,
) -> Problem:
    """Random policies, rewards and samplers that cover every token.

    Args:
        on_policy: the sampler is the policy; None: either.
        leaves, horizon, fixed: of `trees`.
    """
    tree = draw(trees(leaves=leaves, horizon=horizon, fixed=fixed))
    count = draw(st.sampled_from(list(prompts)))
    reward = REWARDS[draw(st.sampled_from(list(rewards)))]
    flat = draw(st.lists(reward, min_size=count * tree.leaves, max_size=count * tree.leaves))
    shape = (count, tree.prefixes, tree.vocab)
    logits = draw(numbers(*shape))
    same = draw(st.booleans()) if on_policy is None else on_policy
    shift = torch.zeros(shape) if same else draw(numbers(*shape, low=-1.0, high=1.0))
    return make(
        "drawn",
        tree,
        logits,
        torch.tensor(flat, dtype=torch.float64).view(count, tree.leaves),
        behavior=logits + shift,
    )


def features(problem: Problem, parameters: int = 5) -> st.SearchStrategy[Tensor]:
    """Features `[N V d]` by which the logits of all prefixes share their parameters."""
    return numbers(*problem.logits.shape[1:], parameters)


@st.composite
def batches(
    draw: st.DrawFn,
    *,
    prompts: Sequence[int] = (1, 2, 3),
    sizes: Sequence[int] = (2, 3),
    tokens: Sequence[int] = (1, 2, 4),
    absent: bool = True,
    lead: Sequence[int] = (),
    heads: int = 0,
    spread: float = 2.0,
    **fields: Any,
) -> Batch:
    """Batches with holes in their masks, empty and absent responses, and padding of zeros.

    Args:
        absent: some responses may be absent.
        lead: leading axes.
        heads: tokens of the head at each position; 0: no head.
        spread: largest log-ratio between any two policies of the batch.
        fields: passed on.
    """
    p, g, t = (draw(st.sampled_from(list(axis))) for axis in (prompts, sizes, tokens))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**32 - 1)))

    def quarters(*shape: int, low: float = -2.0, high: float = 2.0) -> Tensor:
        steps = torch.randint(round(4 * low), round(4 * high) + 1, shape, generator=generator)
        return steps.double() / 4

    def coins(*shape: int) -> Tensor:
        return torch.randint(0, 4, shape, generator=generator) > 0

    shape = (*lead, p, g, t)
    present = coins(*shape[:-1]) if absent else torch.ones(shape[:-1]).bool()
    mask = coins(*shape) & present.unsqueeze(-1)
    logp = torch.where(mask, quarters(*shape, low=-9.0, high=-4.0), 0.0)

    def policy() -> Tensor:
        return torch.where(mask, logp + quarters(*shape, low=-spread, high=spread), 0.0)

    if heads:
        raw = quarters(*shape, heads + 1)
        moved = raw + quarters(*shape, heads + 1, low=-1.0, high=1.0)
        fields |= {
            "head_logp": raw.log_softmax(-1)[..., :heads],
            "head_behavior_logp": moved.log_softmax(-1)[..., :heads],
        }
    return Batch(
        rewards=quarters(*lead, p, g),
        mask=mask,
        present=present,
        logp=logp,
        behavior_logp=policy(),
        proximal_logp=policy(),
        reference_logp=policy(),
        probability_square=torch.where(mask, (2 * logp).exp() + 0.25, 0.0),
        components=quarters(*lead, p, g, 2),
        values=torch.where(mask, quarters(*shape), 0.0),
        versions=torch.where(mask, torch.randint(0, 5, shape, generator=generator), 0),
        current_version=4,
        truncated=~coins(*lead, p, g),
        elapsed=100 * quarters(*lead, p, g, low=0.0, high=8.0),
        **fields,
    )
