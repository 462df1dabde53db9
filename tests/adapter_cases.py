"""One batch for every foreign engine, and the gradient that our own path gives it.

The reference pads and groups by `Batch.from_rows`, which the adapters do not use.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from windage.estimators.batch import Batch
from windage.estimators.catalogue import CATALOGUE, get
from windage.estimators.estimator import Estimator
from windage.llm.update import Forward, accumulate, micro_batches

VOCAB, PROMPT, LONGEST = 7, 2, 6
GROUPS = ("b", "a", "b", "c", "a", "a", "c", "b", "c", "a", "c", "b")
SETTINGS = {"dr_grpo": {"length": 6}, "dapo": {"length": 5, "margin": 2}}


class Tiny(nn.Module):
    """One head of causal attention, one hidden layer, and the embedding as output matrix."""

    def __init__(self, *, seed: int, width: int = 6) -> None:
        super().__init__()
        g = torch.Generator().manual_seed(seed)

        def drawn(*shape: int) -> nn.Parameter:
            return nn.Parameter(torch.randn(*shape, generator=g, dtype=torch.float64) / 1.5)

        self.embedding, self.places = drawn(VOCAB, width), drawn(PROMPT + LONGEST, width)
        self.attend, self.up, self.down = drawn(3, width, width), drawn(width, 9), drawn(9, width)

    def forward(self, tokens: Tensor) -> Tensor:
        """Hidden states `[R L D]` of sequences `[R L]`."""
        x = self.embedding[tokens] + self.places[: tokens.shape[1]]
        q, k, v = (x @ w for w in self.attend)
        later = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(1)
        scores = (q @ k.mT / math.sqrt(x.shape[-1])).masked_fill(later, -math.inf)
        x = x + scores.softmax(-1) @ v
        return x + (x @ self.up).tanh() @ self.down


def gradient_of(model: nn.Module) -> Tensor:
    """The gradient of all parameters as one vector; takes it away from them."""
    found = torch.cat([p.grad.flatten() for p in model.parameters()])
    model.zero_grad()
    return found


@dataclass(frozen=True, kw_only=True, eq=False)
class Case:
    """Rows in no order, their log-probabilities under other policies, and the model in training.

    `mask` has holes, as tools leave them; `real` tells padding.
    """

    model: nn.Module
    ids: Tensor
    real: Tensor
    mask: Tensor
    rewards: Tensor
    behavior_logp: Tensor
    proximal_logp: Tensor
    reference_logp: Tensor

    def logp(self, rows: Tensor) -> Tensor:
        """Log-probabilities of the responses' tokens, differentiable."""
        return logp_of(self.model, self.ids[rows])


def logp_of(model: nn.Module, ids: Tensor) -> Tensor:
    hidden = model(ids[:, :-1])[:, PROMPT - 1 :]
    found = (hidden @ model.embedding.T).log_softmax(-1)
    return found.gather(-1, ids[:, PROMPT:].unsqueeze(-1)).squeeze(-1)


def case(seed: int = 0, dtype: torch.dtype = torch.float64) -> Case:
    """Twelve responses of three prompts: short and long, near the sampler and far from it."""
    g = torch.Generator().manual_seed(seed)
    count = len(GROUPS)
    model = Tiny(seed=seed).to(dtype)
    ids = torch.randint(0, VOCAB, (count, PROMPT + LONGEST), generator=g)
    lengths = torch.randint(1, LONGEST + 1, (count,), generator=g)
    lengths[3] = LONGEST
    real = torch.arange(LONGEST) < lengths.unsqueeze(1)
    mask = real.clone()
    mask[3, 2] = False
    near = torch.where(torch.arange(count) % 3 == 0, 0.004, 0.4).unsqueeze(1)

    def moved(logp: Tensor) -> Tensor:
        noise = torch.randn(logp.shape, generator=g, dtype=torch.float64)
        return torch.where(real, logp + near * noise, 0.0).to(dtype)

    with torch.no_grad():
        now = logp_of(model, ids)
    rewards = torch.randn(count, generator=g).abs().round(decimals=1) * (
        torch.arange(count) % 5 > 0
    )
    return Case(
        model=model,
        ids=ids,
        real=real,
        mask=mask,
        rewards=rewards.to(dtype),
        behavior_logp=moved(now),
        proximal_logp=moved(now),
        reference_logp=moved(now),
    )


def entry(name: str) -> Estimator:
    """An entry with the settings without which it has no meaning."""
    return get(name, **SETTINGS.get(name, {}))


def words(name: str) -> str:
    """The same as `NAME:key=value,...`."""
    settings = ",".join(f"{k}={v}" for k, v in SETTINGS.get(name, {}).items())
    return f"{name}:{settings}" if settings else name


def ours(estimator: Estimator, c: Case, size: int = 5, groups: tuple = GROUPS) -> Tensor:
    """The gradient that `accumulate` gives the model's parameters."""
    lengths = c.real.sum(1).tolist()

    def ragged(value: Tensor) -> list[list[float]]:
        return [row[:n] for row, n in zip(value.tolist(), lengths, strict=True)]

    batch = Batch.from_rows(
        c.rewards.tolist(),
        groups,
        mask=ragged(c.mask),
        components=[[r, float(n % 2)] for n, r in enumerate(c.rewards.tolist())],
        **{
            name: ragged(getattr(c, name))
            for name in ("behavior_logp", "proximal_logp", "reference_logp")
        },
    )
    width = batch.mask.shape[-1]
    order = batch.row_index.flatten()

    def forward(which: Tensor) -> Forward:
        return Forward(logp=c.logp(order[which])[:, :width])

    accumulate(estimator, batch, forward, micro_batches(batch, size))
    return gradient_of(c.model)


def largest(found: Tensor, expected: Tensor) -> float:
    """The largest difference, relative to the largest entry."""
    assert expected.abs().max() > 0
    return float((found - expected).abs().max() / expected.abs().max())


def pieces(count: int, size: int, seed: int = 1) -> list[Tensor]:
    """Rows in another order, `size` at a time."""
    order = torch.randperm(count, generator=torch.Generator().manual_seed(seed))
    return list(order.split(size))


NAMES = tuple(CATALOGUE)
