"""Planted faults in whole losses, each held to the entry that it gets wrong.

A loss takes logp, behavior_logp, advantages [N] and mask, as the plain signature does.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from windage.analysis.audit.likeness import given
from windage.analysis.audit.samples import Sample
from windage.estimators.catalogue import get
from windage.estimators.estimator import Estimator, surrogate

PlainLoss = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


def right(estimator: Estimator) -> PlainLoss:
    """The library's own surrogate of an entry, as a plain loss."""

    def loss(logp: Tensor, behavior_logp: Tensor, advantages: Tensor, mask: Tensor) -> Tensor:
        sample = Sample(
            name="given",
            logp=logp.detach(),
            behavior_logp=behavior_logp,
            advantages=advantages,
            mask=mask,
        )
        return surrogate(given(estimator, [sample])[0], torch.where(mask, logp, 0.0))

    return loss


def _ratio(logp: Tensor, behavior_logp: Tensor, mask: Tensor) -> Tensor:
    return torch.where(mask, logp - behavior_logp, 0.0).exp()


def _clipped(ratio: Tensor, advantages: Tensor, low: float = 0.2, high: float = 0.2) -> Tensor:
    """PPO's objective of each token."""
    a = advantages.unsqueeze(-1)
    return torch.minimum(ratio * a, ratio.clamp(1 - low, 1 + high) * a)


def _by_sequence(terms: Tensor, mask: Tensor) -> Tensor:
    total = torch.where(mask, terms, 0.0).sum(-1)
    return -(total / mask.sum(-1).clamp(min=1)).mean()


def _by_token(terms: Tensor, mask: Tensor) -> Tensor:
    return -torch.where(mask, terms, 0.0).sum() / mask.sum().clamp(min=1)


def _by_response(terms: Tensor, mask: Tensor) -> Tensor:
    return -torch.where(mask, terms, 0.0).sum(-1).mean()


def weight_not_detached(
    logp: Tensor, behavior_logp: Tensor, advantages: Tensor, mask: Tensor
) -> Tensor:
    """The gradient runs through the weight as well."""
    weight = _ratio(logp, behavior_logp, mask).clamp(max=2.0)
    return _by_response(weight * advantages.unsqueeze(-1) * logp, mask)


def min_before_multiply(
    logp: Tensor, behavior_logp: Tensor, advantages: Tensor, mask: Tensor
) -> Tensor:
    """The minimum is taken before the product with the advantage."""
    ratio = _ratio(logp, behavior_logp, mask)
    least = torch.minimum(ratio, ratio.clamp(0.8, 1.2))
    return _by_sequence(least * advantages.unsqueeze(-1), mask)


def mask_by_product(
    logp: Tensor, behavior_logp: Tensor, advantages: Tensor, mask: Tensor
) -> Tensor:
    """The mask multiplies what has overflowed in the padding."""
    terms = _clipped((logp - behavior_logp).exp(), advantages) * mask
    return -(terms.sum(-1) / mask.sum(-1).clamp(min=1)).mean()


def cap_of_the_inverse(
    logp: Tensor, behavior_logp: Tensor, advantages: Tensor, mask: Tensor
) -> Tensor:
    """The cap is applied to behavior over current."""
    inverse = _ratio(behavior_logp, logp, mask).clamp(max=5.0)
    return _by_token((1 / inverse).detach() * advantages.unsqueeze(-1) * logp, mask)


def clamp_without_detach(
    logp: Tensor, behavior_logp: Tensor, advantages: Tensor, mask: Tensor
) -> Tensor:
    """A clamped ratio carries the gradient, which is 0 above the cap."""
    weight = _ratio(logp, behavior_logp, mask).clamp(max=5.0)
    return _by_token(weight * advantages.unsqueeze(-1), mask)


def padding_in_denominator(
    logp: Tensor, behavior_logp: Tensor, advantages: Tensor, mask: Tensor
) -> Tensor:
    """The token mean divides by padding too."""
    ratio = _ratio(logp, behavior_logp, mask)
    return -torch.where(mask, _clipped(ratio, advantages, 0.2, 0.28), 0.0).mean()


def shifted_by_one(logp: Tensor, behavior_logp: Tensor, advantages: Tensor, mask: Tensor) -> Tensor:
    """The sampler's log-probabilities are those of the token before."""
    ratio = _ratio(logp, behavior_logp.roll(1, -1), mask)
    return _by_response(ratio * advantages.unsqueeze(-1), mask)


def advantages_flattened(
    logp: Tensor, behavior_logp: Tensor, advantages: Tensor, mask: Tensor
) -> Tensor:
    """Advantages are repeated along the wrong axis."""
    tokens = advantages.repeat(mask.shape[1]).view(mask.shape)
    ratio = _ratio(logp, behavior_logp, mask)
    terms = torch.minimum(ratio * tokens, ratio.clamp(0.8, 1.2) * tokens)
    return _by_sequence(terms, mask)


def sum_over_responses(
    logp: Tensor, behavior_logp: Tensor, advantages: Tensor, mask: Tensor
) -> Tensor:
    """Responses are summed, not averaged."""
    return -torch.where(mask, advantages.unsqueeze(-1) * logp, 0.0).sum()


def whitened(logp: Tensor, behavior_logp: Tensor, advantages: Tensor, mask: Tensor) -> Tensor:
    """Given advantages are normalized once more."""
    spread = (advantages - advantages.mean()).square().mean().sqrt()
    again = (advantages - advantages.mean()) / (spread + 1e-8)
    return _by_response(again.unsqueeze(-1) * logp, mask)


def token_bonus(logp: Tensor, behavior_logp: Tensor, advantages: Tensor, mask: Tensor) -> Tensor:
    """An entropy bonus is added unasked."""
    return _by_response((advantages.unsqueeze(-1) - 0.01) * logp, mask)


def sign_of_loss(logp: Tensor, behavior_logp: Tensor, advantages: Tensor, mask: Tensor) -> Tensor:
    """The objective is minimized."""
    return -_by_response(advantages.unsqueeze(-1) * logp, mask)


def product_of_ratios(
    logp: Tensor, behavior_logp: Tensor, advantages: Tensor, mask: Tensor
) -> Tensor:
    """GSPO's ratio is the product over the response."""
    x = torch.where(mask, logp - behavior_logp, 0.0).sum(-1, keepdim=True)
    return -_clipped(x.exp(), advantages, 3e-4, 4e-4).mean()


def clips_swapped(logp: Tensor, behavior_logp: Tensor, advantages: Tensor, mask: Tensor) -> Tensor:
    """The lower and the upper clip are swapped."""
    return _by_token(_clipped(_ratio(logp, behavior_logp, mask), advantages, 0.28, 0.2), mask)


def token_mean_for_sequence_mean(
    logp: Tensor, behavior_logp: Tensor, advantages: Tensor, mask: Tensor
) -> Tensor:
    """Tokens are averaged over the batch instead of over their response."""
    return _by_token(_clipped(_ratio(logp, behavior_logp, mask), advantages), mask)


def self_normalized(
    logp: Tensor, behavior_logp: Tensor, advantages: Tensor, mask: Tensor
) -> Tensor:
    """Weights are divided by their mean."""
    weight = _ratio(logp, behavior_logp, mask).detach()
    mean = torch.where(mask, weight, 0.0).sum() / mask.sum().clamp(min=1)
    return _by_response(weight / mean * advantages.unsqueeze(-1) * logp, mask)


def probability_for_ratio(
    logp: Tensor, behavior_logp: Tensor, advantages: Tensor, mask: Tensor
) -> Tensor:
    """The weight is the probability, not the ratio."""
    weight = torch.where(mask, logp, 0.0).exp().detach()
    return _by_response(weight * advantages.unsqueeze(-1) * logp, mask)


LOSSES: dict[str, tuple[PlainLoss, ...]] = {
    "token_tis": (weight_not_detached,),
    "grpo": (
        min_before_multiply,
        mask_by_product,
        advantages_flattened,
        token_mean_for_sequence_mean,
    ),
    "cispo": (cap_of_the_inverse, clamp_without_detach),
    "dapo": (padding_in_denominator, clips_swapped),
    "token_is": (shifted_by_one, self_normalized, probability_for_ratio),
    "rloo": (sum_over_responses, sign_of_loss, whitened, token_bonus),
    "gspo": (product_of_ratios,),
}
RIGHT = {name: right(get(name)) for name in LOSSES}
