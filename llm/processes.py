"""Processes that train together, as `accelerate launch` or torchrun starts them.

    accelerate launch --multi_gpu ...                   every process holds the model
    accelerate launch --use_fsdp --fsdp_version 2 ...   every process holds a share of it

accelerate starts the process group and gives each process its device.  Sharding is torch's
`fully_shard` with accelerate's settings, rather than `Accelerator.prepare`, which knows FSDP on
accelerators alone and takes a model only together with its optimizer.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any

import torch

from windage.estimators.errors import BadInput
from windage.llm.models import Policy, chosen
from windage.llm.ranks import ALONE, Ranks

Wrap = Callable[[Policy], Any]
# A process that waits for the first one's responses waits no longer than this.
PATIENCE = timedelta(days=2)
FAREWELL = timedelta(seconds=30)


def join(device: str) -> tuple[Ranks, Wrap, str]:
    """This process among those that were started, what shards a policy over them, and its device.

    Without a launcher there is one process, and accelerate is not imported.

    Args:
        device: the configuration's; several processes take the one that accelerate gives each.

    Raises:
        BadInput: a way of sharding that is not FSDP2 without offloading.
    """
    started = int(os.environ.get("WORLD_SIZE", "1"))
    if started == 1:
        return ALONE, lambda policy: policy, device
    settings = _sharding()
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=chosen(device).type == "cpu")
    if accelerator.num_processes != started:
        raise BadInput(
            f"{started} processes were started, and accelerate sees {accelerator.num_processes}; "
            "allowed: accelerate launch, or torchrun"
        )
    ranks = Ranks(
        index=accelerator.process_index,
        count=accelerator.num_processes,
        sharded=settings is not None,
        device=str(accelerator.device),
        group=torch.distributed.new_group(backend="gloo", timeout=PATIENCE),
    )
    wrap = (lambda policy: policy) if settings is None else _sharder(settings, accelerator.device)
    return ranks, wrap, ranks.device


def _sharding() -> Any:
    """FSDP as accelerate was told of it; None: every process holds the model."""
    if os.environ.get("ACCELERATE_USE_DEEPSPEED", "").lower() == "true":
        raise BadInput("DeepSpeed was asked for; allowed: FSDP2, or no sharding")
    if os.environ.get("ACCELERATE_USE_FSDP", "").lower() != "true":
        return None
    # Each process reads the model and keeps its share; transformers reads the same variable.
    os.environ["FSDP_CPU_RAM_EFFICIENT_LOADING"] = "false"
    from accelerate.utils import FullyShardedDataParallelPlugin
    from torch.distributed.fsdp import CPUOffloadPolicy

    settings = FullyShardedDataParallelPlugin()
    if settings.fsdp_version != 2:
        raise BadInput(f"FSDP version {settings.fsdp_version}; allowed: --fsdp_version 2")
    if isinstance(settings.cpu_offload, CPUOffloadPolicy):
        raise BadInput("FSDP with parameters offloaded; allowed: --fsdp_offload_params false")
    return settings


def _sharder(settings: Any, device: torch.device) -> Wrap:
    """Shards each layer of a policy, and what is left together, in place; gradients are sums."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import FSDPModule, fully_shard

    mesh = init_device_mesh(device.type, (torch.distributed.get_world_size(),))

    def wrap(policy: Policy) -> Any:
        layers = set(policy.base._no_split_modules or ())
        for module in policy.modules():
            if type(module).__name__ in layers:
                fully_shard(module, mesh=mesh, reshard_after_forward=settings.reshard_after_forward)
        found = fully_shard(policy, mesh=mesh)
        for module in policy.modules():
            if isinstance(module, FSDPModule):
                module.set_force_sum_reduction_for_comms(True)
                module.set_gradient_divide_factor(1.0)
        return found

    return wrap


@contextmanager
def leaving(ranks: Ranks) -> Iterator[None]:
    """End the process group when all are done, or all refused; one that dies waits for nobody."""
    try:
        yield
    except BadInput:
        _leave(ranks)
        raise
    _leave(ranks)


def _leave(ranks: Ranks) -> None:
    if ranks.count > 1:
        with suppress(RuntimeError):  # gone already
            torch.distributed.monitored_barrier(ranks.group, timeout=FAREWELL)
        torch.distributed.destroy_process_group()
