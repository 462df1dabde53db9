"""A transformer so small that every response can be listed, and the tree of its responses.

It shares no code with the toy engines but their description of the problem.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from windage.estimators.batch import Batch
from windage.llm.models import Policy
from windage.llm.passes import Responses
from windage.llm.update import Pass
from windage.toy.problems import Problem, Tree, make

PROMPT = (1, 0)


def tiny(vocab: int, longest: int, *, seed: int) -> Policy:
    """One layer of two heads in double precision, the embedding as output matrix."""
    settings = LlamaConfig(
        vocab_size=vocab,
        hidden_size=8,
        intermediate_size=8,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=longest,
        tie_word_embeddings=True,
        initializer_range=0.7,
        pad_token_id=None,
        bos_token_id=None,
        eos_token_id=None,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return Policy(in_double(LlamaForCausalLM(settings).double()))


def in_double(model: torch.nn.Module) -> torch.nn.Module:
    """Norms that keep double precision: those of transformers pass through float32."""
    norms = [(parent, name, one) for parent in model.modules()
             for name, one in parent.named_children() if isinstance(one, LlamaRMSNorm)]  # fmt: skip
    for parent, name, one in norms:
        made = torch.nn.RMSNorm(one.weight.shape, eps=one.variance_epsilon, dtype=torch.float64)
        made.weight = one.weight
        setattr(parent, name, made)
    return model


def prefixes(tree: Tree) -> list[list[int]]:
    """Token ids of each prefix of a tree."""
    found: dict[int, list[int]] = {}
    numbers, tokens = tree.paths
    for before, ids in zip(numbers.tolist(), tokens.tolist(), strict=True):
        for t, n in enumerate(before):
            if n >= 0:
                found[n] = ids[:t]
    return [found[n] for n in range(tree.prefixes)]


def logits_of(model: Policy, tree: Tree) -> Tensor:
    """Logits `[N V]` after the prompt and each prefix, differentiable."""
    rows = [torch.tensor([[*PROMPT, *ids]]) for ids in prefixes(tree)]
    return torch.stack([model.model(ids, use_cache=False).logits[0, -1] for ids in rows])


def problem_of(model: Policy, tree: Tree, rewards: Tensor, sampler: Policy, others: Any) -> Problem:
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


def forward_of(model: Policy, batch: Batch, rows: list[dict[str, Any]]) -> Pass:
    """The trainer's pass over rows of the store."""
    responses = Responses(rows, batch, temperature=1.0, device=torch.device("cpu"))
    return responses.through(model)


def gradient_of(model: Policy) -> Tensor:
    """The gradient of all parameters as one vector; takes it away from them."""
    parts = [
        p.grad.flatten() if p.grad is not None else p.new_zeros(p.numel())
        for p in model.parameters()
    ]
    model.zero_grad()
    return torch.cat([part.clone() for part in parts])
