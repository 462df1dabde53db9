"""Processes that train together, as `accelerate launch` starts them."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

from windage.llm.models import Policy
from windage.llm.ranks import ALONE, Ranks

Wrap = Callable[[Policy], Any]


def join(device: str) -> tuple[Ranks, Wrap, str]:
    """This process among those that were started, what shards a policy over them, and its device.

    Without `accelerate launch` there is one process, and accelerate is not imported.  With several,
    every one holds the model and gradients are summed; under FSDP its parameters are sharded.

    Args:
        device: the configuration's; several processes take the one that accelerate gives each.
    """
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        return ALONE, lambda policy: policy, device
    from accelerate import Accelerator
    from accelerate.utils import DistributedType

    accelerator = Accelerator(cpu=device == "cpu")
    sharded = accelerator.distributed_type == DistributedType.FSDP
    ranks = Ranks(
        index=accelerator.process_index,
        count=accelerator.num_processes,
        averaged=sharded,
        device=str(accelerator.device),
    )
    return ranks, accelerator.prepare if sharded else lambda policy: policy, ranks.device
