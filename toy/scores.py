"""How good a policy is on held-out prompts, with the figures that the field reports.

The same random stream at every evaluation, so that two policies are compared on common draws.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from windage.toy.network import Network, grouped
from windage.toy.sums import generators


class Figure(NamedTuple):
    """What a column of an evaluation means."""

    formula: str
    unit: str


FIGURES: Mapping[str, Figure] = {
    "pass_at_1": Figure("mean over prompts of c / n, c right answers of n samples", "share"),
    "pass_at_k": Figure("mean over prompts of 1 - C(n - c, k) / C(n, k), k = n / 2", "share"),
    "easy": Figure("pass_at_1 of prompts with at most one hard digit to add", "share"),
    "hard": Figure("pass_at_1 of prompts with two hard digits to add, or more", "share"),
    "maj_at_k": Figure(
        "share of prompts whose most frequent valid answer is right, ties in part", "share"
    ),
    "invalid": Figure("share of responses without a valid form", "share"),
    "never": Figure("share of prompts with no right answer among the samples", "share"),
    "confident": Figure("share of prompts with at least 90 % right answers", "share"),
    "entropy": Figure("mean over responses of the sum over tokens of the entropy", "nats"),
    "kl_start": Figure(
        "mean over responses of the sum over tokens of KL(policy | start); the start drew the data "
        "that were recorded once",
        "nats",
    ),
    "value": Figure("expected reward of a tabular policy, summed over all responses", "reward"),
}
MOST = 0.9


def pass_at(correct: Int[Tensor, "*batch"], samples: int, k: int) -> Float[Tensor, "*batch"]:
    """Chance that k of the samples, drawn without replacement, hold a right one.

        1 - C(n - c, k) / C(n, k)

    References:
        Chen et al., 2021, arXiv:2107.03374.

    Example:
        >>> pass_at(torch.tensor([0, 1, 4]), 4, 2)
        tensor([0.0000, 0.5000, 1.0000])
    """
    left = (samples - correct).unsqueeze(-1) - torch.arange(k)
    return 1 - (left.clamp(min=0) / (samples - torch.arange(k))).prod(-1)


def majority_share(
    answers: Int[Tensor, "*batch n"], right: Int[Tensor, "*batch"], choices: int
) -> Float[Tensor, "*batch"]:
    """1 where the right answer has the most votes, a part of it in a tie, 0 without a valid vote.

    Args:
        answers: -1 does not vote.
        right: the right one.
        choices: answers there are.

    Example:
        >>> majority_share(torch.tensor([[1, 1, 2, 2, -1]]), torch.tensor([2]), 3)
        tensor([0.5000])
    """
    votes = (answers.unsqueeze(-1) == torch.arange(choices)).sum(-2)
    most = votes.amax(-1, keepdim=True)
    tied = (votes == most) & (most > 0)
    mine = tied.gather(-1, right.unsqueeze(-1)).squeeze(-1)
    return mine / tied.sum(-1).clamp(min=1)


def mean_where(chosen: Bool[Tensor, "S P"], values: Float[Tensor, "S P"]) -> Float[Tensor, " S"]:
    """Mean over the chosen prompts of each seed; 0 where none is."""
    return (values * chosen).sum(-1) / chosen.sum(-1).clamp(min=1)


def evaluate(
    network: Network,
    parameters: Float[Tensor, "S D"],
    start: Float[Tensor, "S D"],
    prompts: Int[Tensor, "S P K"],
    seeds: Sequence[int],
    *,
    samples: int = 16,
) -> dict[str, Float[Tensor, " S"]]:
    """The figures of samples, a number a seed, and the histogram of right answers a prompt.

    Args:
        parameters: of the policy.
        start: of the policy that its divergence is taken from.
        prompts: held out.
        seeds: of the streams; the same seeds give the same draws.
        samples: of each prompt.
    """
    task = network.task
    repeated = prompts.repeat_interleave(samples, 1)
    tokens, _ = network.sample(parameters, repeated, generators(seeds))
    graded = task.grade(repeated, tokens)
    logp = network.forward(parameters, repeated, tokens).logp
    before = network.forward(start, repeated, tokens).logp
    mask = graded.mask.unsqueeze(-1)
    count = grouped(graded.correct.long(), prompts.shape[1]).sum(-1)
    answers = grouped(graded.answer, prompts.shape[1])
    majority = majority_share(answers, prompts.sum(-1) % task.modulus, task.modulus)
    share = count / samples
    hard = task.steps_that_are_hard(prompts) > 1
    responses = tokens.shape[1]
    return {
        "pass_at_1": share.mean(-1),
        "pass_at_k": pass_at(count, samples, max(1, samples // 2)).mean(-1),
        "easy": mean_where(~hard, share),
        "hard": mean_where(hard, share),
        "maj_at_k": majority.mean(-1),
        "invalid": 1 - graded.valid.float().mean(-1),
        "never": (count == 0).float().mean(-1),
        "confident": (share >= MOST).float().mean(-1),
        "entropy": -(logp.exp() * logp * mask).sum((1, 2, 3)) / responses,
        "kl_start": (logp.exp() * (logp - before) * mask).sum((1, 2, 3)) / responses,
        "histogram": (count.unsqueeze(-1) == torch.arange(samples + 1)).float().mean(1),
    }
