"""A transformer so small that every response can be listed, and the tree of its responses.

It shares no code with the toy engines but their description of the problem.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from windage.estimators.batch import Batch
from windage.llm.logprobs import log_probs
from windage.llm.update import Forward
from windage.toy.problems import Problem, Tree, make

PROMPT = (1, 0)


class Tiny(nn.Module):
    """One head of causal attention, one hidden layer, and the embedding as output matrix."""

    def __init__(self, vocab: int, longest: int, width: int = 6, *, seed: int) -> None:
        super().__init__()
        g = torch.Generator().manual_seed(seed)

        def drawn(*shape: int) -> nn.Parameter:
            return nn.Parameter(torch.randn(*shape, generator=g, dtype=torch.float64) / 1.5)

        self.embedding, self.places = drawn(vocab, width), drawn(longest, width)
        self.attend, self.up, self.down = drawn(3, width, width), drawn(width, 9), drawn(9, width)

    def forward(self, tokens: Tensor) -> Tensor:
        """Hidden states `[R L D]` of sequences `[R L]`."""
        x = self.embedding[tokens] + self.places[: tokens.shape[1]]
        q, k, v = (x @ w for w in self.attend)
        later = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(1)
        scores = (q @ k.mT / math.sqrt(x.shape[-1])).masked_fill(later, -math.inf)
        x = x + scores.softmax(-1) @ v
        return x + (x @ self.up).tanh() @ self.down


def prefixes(tree: Tree) -> list[list[int]]:
    """Token ids of each prefix of a tree."""
    found: dict[int, list[int]] = {}
    numbers, tokens = tree.paths
    for before, ids in zip(numbers.tolist(), tokens.tolist(), strict=True):
        for t, n in enumerate(before):
            if n >= 0:
                found[n] = ids[:t]
    return [found[n] for n in range(tree.prefixes)]


def logits_of(model: Tiny, tree: Tree) -> Tensor:
    """Logits `[N V]` after the prompt and each prefix, differentiable."""
    rows = [model(torch.tensor([[*PROMPT, *ids]]))[0, -1] for ids in prefixes(tree)]
    return torch.stack(rows) @ model.embedding.T


def problem_of(model: Tiny, tree: Tree, rewards: Tensor, sampler: Tiny, others: Any) -> Problem:
    """The tabular problem whose logits are the model's.

    Args:
        others: models of the proximal and of the reference policy.
    """
    with torch.no_grad():
        logits, behavior, proximal, reference = (
            logits_of(m, tree).unsqueeze(0) for m in (model, sampler, *others)
        )
    made = make("tiny", tree, logits, rewards.unsqueeze(0), behavior=behavior)
    return replace(
        made,
        proximal_logp=proximal.log_softmax(-1),
        reference_logp=reference.log_softmax(-1),
    )


def row_of(problem: Problem, leaf: int, name: str, group: str) -> dict[str, Any]:
    """What a sampler would record of a response, its head the whole vocabulary."""
    numbers, ids = (table[leaf] for table in problem.tree.paths)
    real = numbers >= 0
    numbers, ids = numbers[real], ids[real]
    behavior = problem.behavior_logp[0][numbers]
    order = behavior.argsort(-1, descending=True)
    reward = float(problem.rewards[0, leaf])
    return {
        "group_id": group,
        "sample_id": name,
        "prompt_ids": list(PROMPT),
        "response_ids": ids.numpy(),
        "mask": [True] * len(ids),
        "behavior_logp": behavior.gather(1, ids.unsqueeze(1)).squeeze(1).numpy(),
        "versions": [0] * len(ids),
        "reward": reward,
        "outcome": reward,
        "finish_reason": "stop" if ids[-1] == problem.tree.stop else "length",
        "temperature": 1.0,
        "top_p": 1.0,
        "top_k": None,
        "seed": None,
        "elapsed": 0.0,
        "rejected": None,
        "head_ids": order.numpy(),
        "head_behavior_logp": behavior.gather(1, order).numpy(),
        "proximal_logp": problem.proximal_logp[0][numbers]
        .gather(1, ids.unsqueeze(1))[:, 0]
        .numpy(),
        "reference_logp": problem.reference_logp[0][numbers]
        .gather(1, ids.unsqueeze(1))[:, 0]
        .numpy(),
    }


def forward_of(model: Tiny, batch: Batch, rows: list[dict[str, Any]]):
    """The pass of a trainer: pad, run the model, and read the tokens through the chunked pass."""

    def forward(which: Tensor) -> Forward:
        picked = [rows[n] for n in batch.row_index.flatten()[which].tolist()]
        sequences = [[*row["prompt_ids"], *row["response_ids"]] for row in picked]
        width = batch.mask.shape[-1]
        tokens = torch.zeros((len(picked), len(PROMPT) + width), dtype=torch.long)
        real = torch.zeros((len(picked), width), dtype=torch.bool)
        for r, ids in enumerate(sequences):
            tokens[r, : len(ids)] = torch.tensor(ids)
            real[r, : len(ids) - len(PROMPT)] = True
        hidden = model(tokens[:, :-1])[:, len(PROMPT) - 1 :][real]
        head = batch.head_ids.flatten(0, 1)[which][real]
        targets = tokens[:, len(PROMPT) :][real]
        found = log_probs(hidden, model.embedding, targets, head, tokens=3, vocabulary=2)
        k = head.shape[-1]
        logp = hidden.new_zeros(real.shape).masked_scatter(real, found.logp)
        square = hidden.new_zeros(real.shape).masked_scatter(real, found.probability_square)
        wide = real.unsqueeze(-1).expand(*real.shape, k)
        heads = hidden.new_zeros((*real.shape, k)).masked_scatter(wide, found.head_logp)
        return Forward(logp=logp, head_logp=heads, probability_square=square)

    return forward


def gradient_of(model: nn.Module) -> Tensor:
    """The gradient of all parameters as one vector; takes it away from them."""
    parts = [
        p.grad.flatten() if p.grad is not None else p.new_zeros(p.numel())
        for p in model.parameters()
    ]
    model.zero_grad()
    return torch.cat([part.clone() for part in parts])
