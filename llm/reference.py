"""The reference of a penalty: when it moves towards the policy, and how far.

    never      it stays the model that training started from
    steps      it becomes the policy every N updates (slime `--ref-update-interval`)
    epoch      it becomes the policy whenever a pass over the data ends (ms-swift and the rounds of
               iterative GRPO: `update_ref_every_epoch`)
    ema        ref <- alpha policy + (1 - alpha) ref every N updates (TRL `sync_ref_model` with
               `ref_model_sync_steps` N and `ref_model_mixup_alpha` alpha; open-instruct
               `ref_policy_update_freq` and `alpha`)

A refresh changes the objective: with a penalty of weight b, k rounds solved exactly, each from a
refreshed reference, end where one round with b / k would.  Refreshed at each update, before it, the
reference is the policy, and every penalty's pull is 0.

With adapters (LoRA) the reference is the model with its adapters off: no second copy of the weights
is held, and it can never move; other schedules are refused there.

Differences:
    1. TRL's defaults are alpha 0.6 and N 512, off; ours are alpha 0.6 and N 64, off.
    2. A hard copy is bit for bit the policy: not `lerp` at 1, which turns -0 into 0.
    3. Numbers of the reference's own kind are mixed: in bfloat16 a small alpha moves nothing that
       is nearer than half a unit in the last place.  TR-DPO mixes whole models alike.
    4. A skipped update (not finite) is no update: N counts those that moved the weights.
    5. Whole-number buffers are copied, not mixed.

References:
    Gorbatovski et al., 2024, arXiv:2404.09656.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor, nn

from windage.estimators.errors import BadInput, unknown, within
from windage.estimators.penalty import ema

NAMES = ("never", "steps", "epoch", "ema")


@final
@dataclass(frozen=True, kw_only=True)
class Schedule:
    """When a reference is refreshed.

    Args:
        every: updates between two refreshes; None: not by updates.
        epochs: whether the end of a pass over the data refreshes it.
        alpha: share of the policy in the new reference; 1: a copy.
    """

    every: int | None = None
    epochs: bool = False
    alpha: float = 1.0


NEVER = Schedule()


def schedule(
    refresh: str, *, every: int = 64, alpha: float = 0.6, adapters: bool = False
) -> Schedule:
    """A schedule by its name.

    Args:
        refresh: one of `NAMES`.
        every: updates, for `steps` and `ema`.
        alpha: for `ema`.
        adapters: the policy is a model with adapters, its reference the same without.

    Raises:
        BadInput: an unknown name, a value out of range, or a refresh that adapters rule out.

    Example:
        >>> schedule("ema", every=512, alpha=0.6)
        Schedule(every=512, epochs=False, alpha=0.6)
    """
    if refresh not in NAMES:
        raise unknown("refresh of the reference", refresh, NAMES)
    if adapters and refresh != "never":
        raise BadInput(
            f"reference.refresh is {refresh!r} with adapters, whose reference is the model without "
            "them; allowed: never"
        )
    within(1, 10**7, every=every)
    within(0, 1, alpha=alpha)
    return {
        "never": NEVER,
        "steps": Schedule(every=every),
        "epoch": Schedule(epochs=True),
        "ema": Schedule(every=every, alpha=alpha),
    }[refresh]


def due(schedule: Schedule, *, step: int, epoch: int, before: int) -> bool:
    """Whether the reference is refreshed now.

    Args:
        step: updates made so far, this one included; 0 before the first.
        epoch: whole passes over the data made so far.
        before: the same, before this update.

    Example:
        >>> [step for step in range(7) if due(Schedule(every=3), step=step, epoch=0, before=0)]
        [3, 6]
    """
    by_steps = schedule.every is not None and step > 0 and step % schedule.every == 0
    return by_steps or (schedule.epochs and epoch > before)


def mixed(reference: Tensor, policy: Tensor, alpha: float) -> Tensor:
    """One parameter of the reference after a refresh.

        alpha policy + (1 - alpha) reference;  a copy of the policy where alpha is 1

    Args:
        policy: of any device and kind of number; the result is of the reference's.

    Example:
        >>> mixed(torch.tensor([0.0]), torch.tensor([1.0]), 0.25)
        tensor([0.2500])
    """
    policy = policy.detach().to(reference)
    if alpha == 1 or not reference.is_floating_point():
        return policy.clone()
    return ema(reference, policy, coefficient=alpha)


@torch.no_grad()
def refresh(reference: nn.Module, policy: nn.Module, alpha: float) -> None:
    """Move a reference, in place, one tensor at a time, one that has two names (tied) once.

    Args:
        reference: the tensors of its `state_dict` are what a checkpoint keeps.
        policy: the same names.

    Raises:
        ValueError: names that only one of them has.
    """
    own, theirs = (one.state_dict(keep_vars=True) for one in (reference, policy))
    if odd := own.keys() ^ theirs.keys():
        raise ValueError(f"{sorted(odd)[0]!r} is in the policy or the reference alone")
    once = {id(tensor): name for name, tensor in own.items()}
    for name in once.values():
        own[name].copy_(mixed(own[name], theirs[name], alpha))
