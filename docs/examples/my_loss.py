"""A loss as many write it, for `windage audit docs.examples.my_loss:loss`."""

import torch


def loss(logp, behavior_logp, advantages, mask):
    """PPO's clip, averaged over the tokens of whatever micro-batch comes in."""
    ratio = (logp - behavior_logp).exp()
    advantages = advantages.unsqueeze(-1)
    clipped = ratio.clamp(0.8, 1.2)
    token = -torch.minimum(ratio * advantages, clipped * advantages)
    return (token * mask).sum() / mask.sum()
