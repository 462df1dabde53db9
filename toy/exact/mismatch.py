"""How far a sampler is from the policy, in what importance weights become of it.

    effective share = E[w]^2 / E[w^2] under the sampler      chi-squared = E[w^2] / E[w]^2 - 1

of the ratio w of policy to sampler: of a token (over the tokens that the sampler writes), of a
whole response, and of the first t tokens of a response.  Where the sampler covers the policy E[w]
is 1, so that the share is 1 / E[w^2] and chi-squared is the divergence of that name; elsewhere both
are of the weights that are drawn.  Prompts are averaged.
"""

from __future__ import annotations

import math
from functools import singledispatch

import torch
from jaxtyping import Float
from torch import Tensor

from windage.toy.chains import Chain
from windage.toy.exact.transfer import Steps, transfer
from windage.toy.exact.walk import Walk, dot
from windage.toy.problems import Problem

Figures = dict[str, float | dict[str, float | None] | None]


def marks(longest: int) -> list[int]:
    """Numbers of tokens at which divergences are told: 1, 2, 4, ... and the longest.

    Example:
        >>> marks(6)
        [1, 2, 4, 6]
    """
    return sorted({*(2**k for k in range(longest.bit_length())), longest})


@singledispatch
def mismatch(site: Problem | Chain) -> Figures:
    """Effective shares and chi-squared divergences; None beyond float64.

    effective_share_token, effective_share_response: of 1.
    chi_squared_token, chi_squared_response: from 0.
    chi_squared_by_length: of the first t tokens, for each t of `marks`.

    Example:
        >>> from windage.toy.problems import bandit
        >>> mismatch(bandit())["effective_share_response"]
        1.0
    """
    assert isinstance(site, Problem)
    walk, tree = Walk(site), site.tree
    seen = walk.flow.sum((-2, -1))
    one, square = (dot(walk.flow, (k * walk.log_ratio).exp()) / seen for k in (1, 2))
    by_length = {}
    first, second = (walk.flow * (k * walk.path_ratio).exp() for k in (1, 2))
    for t in marks(tree.horizon):
        ended = [tree.level(u) for u in range(t - 1) if tree.stop is not None]
        sums = []
        for weight in (first, second):
            here = weight[:, tree.level(t - 1)].sum((-2, -1))
            sums.append(here + sum(weight[:, level, tree.stop].sum(-1) for level in ended))
        by_length[t] = sums[0], sums[1]
    return _figures(one, square, by_length)


@mismatch.register
def chain_mismatch(chain: Chain) -> Figures:
    """The same by the recursion over states, once for each length."""
    mu = chain.behavior_logp.exp()
    ratio = torch.where(mu > 0, (chain.logp - chain.behavior_logp).exp(), 0.0)
    vocab = mu.shape[-1]
    kernels = torch.stack([mu, mu * ratio, mu * ratio.square()])
    counting = torch.eye(vocab, dtype=mu.dtype).expand(*kernels.shape, vocab)
    by_length = {}
    for t in marks(chain.horizon):
        steps = Steps(kernel=kernels, score=counting, factor=mu.new_ones(t))
        found = transfer(steps, chain.successor, chain.start)
        by_length[t] = found.mass[1].sum(-1), found.mass[2].sum(-1)
    seen = found.mean[0].sum(1)
    one, square = (dot(seen, ratio.pow(k)) / seen.sum((-2, -1)) for k in (1, 2))
    return _figures(one, square, by_length)


def _figures(
    one: Float[Tensor, " P"],
    square: Float[Tensor, " P"],
    by_length: dict[int, tuple[Tensor, Tensor]],
) -> Figures:
    whole = list(by_length.values())[-1]
    return {
        "effective_share_token": _finite((one.square() / square).mean()),
        "effective_share_response": _finite((whole[0].square() / whole[1]).mean()),
        "chi_squared_token": _divergence(one, square),
        "chi_squared_response": _divergence(*whole),
        "chi_squared_by_length": {str(t): _divergence(*pair) for t, pair in by_length.items()},
    }


def _divergence(first: Tensor, second: Tensor) -> float | None:
    """E[w^2] / E[w]^2 - 1, which rounding cannot take below 0."""
    return _finite((second / first.square() - 1).clamp(min=0).mean())


def _finite(value: Tensor) -> float | None:
    return float(value) if math.isfinite(float(value)) else None
