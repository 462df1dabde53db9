"""Named tensors in safetensors files: written piece by piece, so that no second copy is held.

The library's own writer takes all tensors as bytes first.  Reading is the library's.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from windage.estimators.errors import BadInput
from windage.llm.durable import Sink

KINDS = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}


def write(sink: Sink, tensors: Mapping[str, Tensor]) -> None:
    """Write tensors of any shape and device, each by itself: shared memory is written twice.

    Raises:
        BadInput: names a tensor whose kind of number is not in `KINDS`, or that is sharded.
    """
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    order = sorted(tensors, key=lambda name: (-tensors[name].element_size(), name))
    end = 0
    for name in order:
        tensor = tensors[name]
        if tensor.dtype not in KINDS or tensor.layout != torch.strided:
            raise BadInput(
                f"tensor {name!r} is {tensor.dtype}, {tensor.layout}; allowed: dense, "
                f"{', '.join(str(kind).removeprefix('torch.') for kind in KINDS)}"
            )
        begin, end = end, end + tensor.numel() * tensor.element_size()
        header[name] = {
            "dtype": KINDS[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [begin, end],
        }
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    sink.write(len(text).to_bytes(8, "little") + text)
    for name in order:
        flat = tensors[name].detach().cpu().contiguous().reshape(-1)
        sink.write(flat.view(torch.uint8).numpy())


def read(path: Path) -> dict[str, Tensor]:
    """All tensors of a file, on the CPU.

    Raises:
        BadInput: names a file that is not there or damaged.
    """
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        return load_file(path)
    except (OSError, SafetensorError, ValueError, KeyError) as problem:
        raise BadInput(f"{str(path)!r} is damaged: {problem}; allowed: whole safetensors") from None
