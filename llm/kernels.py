"""Liger's fused kernels in the layers of a model, where they can run.

Norms, rotary embeddings and gated layers become one kernel each, which keeps less for the backward
pass.  The output layer stays that of `logprobs`: Liger's fused losses give a token's cross entropy
alone, neither entropy nor sum of squares nor the log-probabilities of head tokens.
"""

from __future__ import annotations

import os
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from windage.estimators.errors import BadInput, unknown

CHOICES = ("auto", "on", "off")
# Greatest difference of a log-probability that the kernels may make: float32, and narrower.
PARITY = (1e-3, 1.0)
PROBE = 16


def fuse(policy: Any, choice: str, path: str) -> bool:
    """Put Liger's kernels into a model's layers, if that was asked for and can be.

    Transformers does it, by `apply_liger_kernel`; the rotary embedding is then Liger's for every
    model of this architecture in the process.

    Args:
        policy: `models.Policy` on its device.
        choice: `auto`: where the package is present, the device is CUDA, the weights are not
            float64 and Liger knows the architecture; `on`: or else refuse; `off`: never.
        path: of the model, for messages.

    Returns:
        Whether the layers are Liger's now.

    Claims:
        Log-probabilities of the same tokens with and without agree, or else this refuses.

    Raises:
        BadInput: `on` where they cannot run, or kernels that change the log-probabilities.

    References:
        Hsu et al., 2024, arXiv:2410.10989.
    """
    if choice not in CHOICES:
        raise unknown("liger", choice, CHOICES)
    if choice == "off":
        return False
    why = _hindrance(policy)
    if why and choice == "on":
        raise BadInput(f"model {path!r}: liger is 'on', but {why}; allowed: 'auto' or 'off'")
    if why:
        return False
    from transformers.integrations.liger import apply_liger_kernel

    plain = _logp(policy)
    apply_liger_kernel(policy.model, {"cross_entropy": False, "fused_linear_cross_entropy": False})
    gap = float((_logp(policy) - plain).abs().max())
    narrow = policy.autocast is not None or _dtype(policy) == torch.bfloat16
    if not gap <= PARITY[narrow]:
        raise BadInput(
            f"model {path!r}: Liger's kernels change its log-probabilities by {gap:.2g}; "
            "allowed: liger = 'off'"
        )
    return True


def _hindrance(policy: Any) -> str:
    """Why the kernels cannot run; empty: they can."""
    device = next(policy.parameters()).device.type
    interpreted = os.environ.get("TRITON_INTERPRET") == "1"
    if find_spec("liger_kernel") is None:
        return "liger-kernel is not installed (pip install 'windage[liger]')"
    if device != "cuda" and not interpreted:
        return f"its kernels do not run on {device}"
    if _dtype(policy) == torch.float64:
        return "its kernels compute in float32"
    from liger_kernel.transformers.monkey_patch import MODEL_TYPE_TO_APPLY_LIGER_FN as KNOWN

    kind = policy.base.config.model_type
    return "" if kind in KNOWN else f"it has none for the architecture {kind!r}"


def _dtype(policy: Any) -> torch.dtype:
    return next(policy.parameters()).dtype


@torch.no_grad()
def _logp(policy: Any) -> Tensor:
    """Log-probabilities of some tokens of the vocabulary, one after the other."""
    device = next(policy.parameters()).device
    ids = torch.arange(PROBE, device=device) % policy.base.get_input_embeddings().num_embeddings
    ids = ids.unsqueeze(0)
    before = torch.arange(PROBE - 1, device=device)
    found, _ = policy(ids, torch.ones_like(ids), before, ids[0, 1:])
    return found.logp
