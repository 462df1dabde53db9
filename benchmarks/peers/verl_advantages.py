"""verl's advantage estimators against formulas, and their exact mean on a tree of responses.

Every estimator is called by name with the arguments of `verl.trainer.ppo.ray_trainer`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, final

import numpy as np
import torch
from peer import Finding
from torch import Tensor
from verl.trainer.config import AlgoConfig
from verl.trainer.ppo.core_algos import get_adv_estimator_fn

from windage.analysis.claims.measures import edited, judge
from windage.analysis.claims.problems import fresh_tree
from windage.estimators.advantage import (
    gae,
    group_mean,
    group_std,
    leave_one_out,
    returns_to_go,
    terminal_rewards,
    whiten,
)
from windage.estimators.batch import Batch
from windage.estimators.catalogue import get
from windage.estimators.member import declare, use
from windage.toy.exact.tuples import every_multiset
from windage.toy.problems import Problem

GROUP = 3


@final
@dataclass(frozen=True, kw_only=True, eq=False)
class Rows:
    """What an estimator is given: P groups of G responses of T tokens.

    Args:
        rewards: `[P G]`, placed on the last token.
        mask: `[P G T]`.
        logp: `[P G T]`, log-probability of each token.
        squares: `[P G T]`, sum over the vocabulary of the squared probabilities.
        values: `[P G T]`, of a critic.
        greedy: `[P]`, reward of the greedy response.
    """

    rewards: Tensor
    mask: Tensor
    logp: Tensor
    squares: Tensor
    values: Tensor
    greedy: Tensor


def called(name: str, rows: Rows, **settings: Any) -> Tensor:
    """Advantages `[P G T]` of a registered estimator in float32, 0 where the mask is False."""
    p, g, t = rows.mask.shape
    names = ("mask", "logp", "squares", "values")
    flat = {k: getattr(rows, k).reshape(p * g, t).float() for k in names}
    mask = flat["mask"]
    paid = terminal_rewards(rows.rewards, rows.mask).reshape(p * g, t).float()
    arguments = {
        "token_level_rewards": paid,
        "response_mask": mask,
        "config": AlgoConfig(gamma=1.0, lam=1.0),
    }
    if name == "gae":
        del arguments["config"]
        arguments.update(values=flat["values"], gamma=1.0, lam=0.95)
    elif name == "remax":
        arguments["reward_baselines"] = rows.greedy.float().repeat_interleave(g)
    elif name != "reinforce_plus_plus":
        arguments["index"] = np.repeat(np.arange(p), g)
    if "optimal_token_baseline" in name:
        arguments.update(old_log_probs=flat["logp"], sum_pi_squared=flat["squares"])
    found, _ = get_adv_estimator_fn(name)(**arguments, **settings)
    return (found * mask).reshape(p, g, t).double()


def over_tokens(advantages: Tensor, rows: Rows) -> Tensor:
    """One number a response, on each of its tokens."""
    return torch.where(rows.mask, advantages.unsqueeze(-1), 0.0)


def whitened(advantages: Tensor, rows: Rows) -> Tensor:
    """Mean 0 and standard deviation 1 over all tokens of the batch."""
    p, g, t = advantages.shape
    flat, mask = advantages.reshape(p * g, t), rows.mask.reshape(p * g, t)
    return whiten(flat, mask, ddof=1, eps=0.0).reshape(p, g, t)


def _best_of_group(rows: Rows) -> Tensor:
    top = rows.rewards.topk(2, dim=-1)
    gap = top.values[..., 0] - top.values[..., 1]
    winner = torch.zeros_like(rows.rewards).scatter(-1, top.indices[..., :1], 1.0)
    return winner * (gap / (rows.rewards.std(-1) + 1e-6)).unsqueeze(-1)


def _by_length(rows: Rows) -> Tensor:
    lengths = rows.mask.sum(-1)
    return rows.rewards - ((lengths * rows.rewards).sum(-1) / lengths.sum(-1)).unsqueeze(-1)


def _by_varying_groups(rows: Rows) -> Tensor:
    varies = rows.rewards.amax(-1) > rows.rewards.amin(-1)
    return group_mean(rows.rewards) * len(varies) / varies.sum().clamp(min=1)


def _by_score_norm(rows: Rows) -> Tensor:
    """Return minus the group's mean of it, weighted by the squared scores summed so far."""
    norms = torch.where(rows.mask, 1 - 2 * rows.logp.exp() + rows.squares, 0.0).cumsum(-1)
    weight = torch.where(rows.mask, norms, 0.0)
    paid = over_tokens(rows.rewards, rows)
    share = (weight * paid).sum(1) / weight.sum(1).clamp(min=1e-12)
    alone = rows.mask.sum(1, keepdim=True) == 1
    share = torch.where(alone, 0.0, share.unsqueeze(1))
    return torch.where(rows.mask, paid - share, 0.0)


def _estimated(rows: Rows) -> Tensor:
    paid = terminal_rewards(rows.rewards, rows.mask)
    return whitened(gae(paid, rows.values, rows.mask, gamma=1.0, lam=0.95), rows)


def _discounted(rows: Rows) -> Tensor:
    return whitened(returns_to_go(terminal_rewards(rows.rewards, rows.mask), rows.mask), rows)


CLAIMS: Mapping[str, tuple[str, str, dict[str, Any], Callable[[Rows], Tensor]]] = {
    "gae": (
        "gae",
        "GAE (lambda 0.95), then mean 0 and deviation 1 over the tokens of the batch",
        {},
        _estimated,
    ),
    "grpo": (
        "grpo",
        "(reward - group mean) / (group std + 1e-6)",
        {},
        lambda r: over_tokens(group_std(r.rewards), r),
    ),
    "grpo, norm_adv_by_std_in_grpo=False": (
        "grpo",
        "reward - group mean",
        {"norm_adv_by_std_in_grpo": False},
        lambda r: over_tokens(group_mean(r.rewards), r),
    ),
    "grpo_vectorized": (
        "grpo_vectorized",
        "as grpo",
        {},
        lambda r: over_tokens(group_std(r.rewards), r),
    ),
    "gdpo": (
        "gdpo",
        "as grpo for each reward, summed, then whitened over the tokens of the batch",
        {},
        lambda r: whitened(over_tokens(group_std(r.rewards), r), r),
    ),
    "grpo_passk": (
        "grpo_passk",
        "best of the group: (best - second) / (group std + 1e-6); others 0",
        {},
        lambda r: over_tokens(_best_of_group(r), r),
    ),
    "rloo": (
        "rloo",
        "reward - mean of the others",
        {},
        lambda r: over_tokens(leave_one_out(r.rewards), r),
    ),
    "rloo_vectorized": (
        "rloo_vectorized",
        "reward - mean of the others",
        {},
        lambda r: over_tokens(leave_one_out(r.rewards), r),
    ),
    "reinforce_plus_plus_baseline": (
        "reinforce_plus_plus_baseline",
        "reward - group mean, whitened over the tokens of the batch",
        {},
        lambda r: whitened(over_tokens(group_mean(r.rewards), r), r),
    ),
    "reinforce_plus_plus": (
        "reinforce_plus_plus",
        "return, whitened over the tokens of the batch",
        {},
        _discounted,
    ),
    "remax": (
        "remax",
        "reward - reward of the greedy response",
        {},
        lambda r: over_tokens(r.rewards - r.greedy.unsqueeze(-1), r),
    ),
    "opo": (
        "opo",
        "reward - group mean weighted by length",
        {},
        lambda r: over_tokens(_by_length(r), r),
    ),
    "gpg": (
        "gpg",
        "(reward - group mean) times groups / groups whose rewards vary",
        {},
        lambda r: over_tokens(_by_varying_groups(r), r),
    ),
    "optimal_token_baseline": (
        "optimal_token_baseline",
        "return - group mean of it, weighted by the squared scores so far",
        {},
        _by_score_norm,
    ),
    "tir_optimal_token_baseline": (
        "tir_optimal_token_baseline",
        "return - group mean of it, weighted by the squared scores so far",
        {},
        _by_score_norm,
    ),
}


def random_rows(seed: int, *, binary: bool) -> Rows:
    """Four groups of three responses of one to five tokens; one group of equal rewards."""
    generator = torch.Generator().manual_seed(seed)
    shape = (4, GROUP, 5)

    def normal(*size: int) -> Tensor:
        return torch.randn(size, generator=generator, dtype=torch.float64)

    lengths = torch.randint(1, 6, shape[:2], generator=generator)
    rewards = (normal(*shape[:2]) > 0).double() if binary else normal(*shape[:2])
    rewards[3] = 0.7
    p = torch.rand(shape, generator=generator, dtype=torch.float64) * 0.8 + 0.1
    return Rows(
        rewards=rewards,
        mask=torch.arange(5) < lengths.unsqueeze(-1),
        logp=p.log(),
        squares=p.square() + (1 - p).square() / 2,
        values=0.3 * normal(*shape),
        greedy=normal(4),
    )


def difference(name: str) -> float:
    """Largest difference between an estimator and its claim on random rows."""
    registered, _, settings, formula = CLAIMS[name]
    sizes = []
    for seed in range(20):
        rows = random_rows(seed, binary=seed % 2 == 0)
        found, wanted = called(registered, rows, **settings), formula(rows)
        sizes.append(float((found - wanted).abs().max() / wanted.abs().max()))
    return max(sizes)


def exact_figures(name: str) -> dict[str, float]:
    """A study's figures of an estimator with the sum over tokens, TREE on-policy, G = 3."""
    registered, _, settings, _ = CLAIMS[name]
    problem = fresh_tree()
    squares = problem.logp.exp().square().sum(-1)[0]
    greedy = _greedy_reward(problem)

    @declare("batch", "rewards", "mask", "logp", "values", "reference_logp")
    def advantage(
        rewards: Tensor, mask: Tensor, logp: Tensor, squares_: Tensor, critic: Tensor
    ) -> Tensor:
        return torch.stack(
            [
                called(
                    registered,
                    Rows(
                        rewards=rewards[m],
                        mask=mask[m],
                        logp=logp[m],
                        squares=squares_[m],
                        values=critic[m],
                        greedy=torch.full((len(rewards[m]),), greedy, dtype=rewards.dtype),
                    ),
                    **settings,
                )
                for m in range(len(rewards))
            ]
        )

    def edit(batch: Batch, index: Tensor) -> Batch:
        at = problem.tree.paths[0].clamp(min=0)
        critic = torch.cos(1 + 3 * torch.arange(problem.tree.prefixes, dtype=torch.float64))
        return replace(
            batch,
            values=torch.where(batch.mask, squares[at][index], 0.0),
            reference_logp=torch.where(batch.mask, 0.3 * critic[at][index], 0.0),
        )

    estimator = replace(get("reinforce"), name=name, advantage=use(advantage))
    found = edited(estimator, problem, edit, GROUP, every_multiset(problem, GROUP))
    return judge(found, problem)


def _greedy_reward(problem: Problem) -> float:
    likeliest = problem.logp[0].argmax(-1)
    prefixes, tokens = problem.tree.paths
    chosen = ((likeliest[prefixes.clamp(min=0)] == tokens) | (prefixes < 0)).all(-1)
    return float(problem.rewards[0, chosen.nonzero()[0, 0]])


def documents() -> list[dict[str, Any]]:
    """One row an estimator."""
    rows = []
    for name, (_, claims, _, _) in CLAIMS.items():
        figures = exact_figures(name)
        rows.append(
            {
                "name": name,
                "claims": claims,
                "difference": difference(name),
                "scale": figures["scale"],
                "bias": figures["relative_bias_rescaled"],
            }
        )
    return rows


def lonely(name: str) -> Finding:
    """What the survivor of a group gets, alone."""
    rows = random_rows(0, binary=False)
    one = replace(
        rows,
        **{k: getattr(rows, k)[:1, :1] for k in ("rewards", "mask", "logp", "squares", "values")},
    )
    one = replace(one, rewards=torch.full_like(one.rewards, 0.7))
    found = float(called(name, one)[0, 0, 0])
    return Finding(
        what=f"{name}, a group of one response with reward 0.7",
        claimed="0 (no comparison is possible)",
        measured=f"{found:.4g}",
        deviates=found != 0.0,
    )


def equal_rewards(name: str) -> Finding:
    """The residue of groups of equal rewards in float32."""
    worst, place = 0.0, ""
    rows = random_rows(0, binary=False)
    for size in range(2, 17):
        for reward in (0.1, 0.2, 0.3, 0.7, 1 / 3, 0.9):
            shape = (1, size, 1)
            same = Rows(
                rewards=torch.full(shape[:2], reward, dtype=torch.float64),
                mask=torch.ones(shape, dtype=torch.bool),
                **{k: torch.zeros(shape) for k in ("logp", "squares", "values")},
                greedy=rows.greedy[:1],
            )
            found = float(called(name, same).abs().max())
            if found > worst:
                worst, place = found, f" ({size} rewards of {reward:.3g})"
    return Finding(
        what=f"{name}, groups of 2 to 16 equal rewards: largest advantage",
        claimed="0",
        measured=f"{worst:.2g}{place}",
        deviates=worst > 1e-6,
    )


def findings() -> list[Finding]:
    """Groups of one and groups of equal rewards."""
    names = ("grpo", "grpo_vectorized", "rloo", "rloo_vectorized")
    return [*map(lonely, names), *map(equal_rewards, names)]
