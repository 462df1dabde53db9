"""A model that comes as one GGUF file, as a folder that every engine reads.

    python -m windage.llm.convert MODEL.gguf FOLDER

The weights are what the file's quantization stands for, in float32; tokenizer and chat template
come from the file as well.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

from windage.estimators.errors import BadInput


def convert(source: Path, folder: Path) -> Path:
    """Write safetensors, configuration, tokenizer and chat template of a GGUF file.

    Args:
        source: the file.
        folder: appears whole or not at all.

    Returns:
        The folder.

    Raises:
        BadInput: no such file, or the folder is there already.
    """
    if not source.is_file():
        raise BadInput(f"no file {str(source)!r}; allowed: a GGUF file")
    if folder.exists():
        raise BadInput(f"{str(folder)!r} is there already; allowed: a new folder")
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    place, name = str(source.parent), source.name
    read = AutoModelForCausalLM.from_pretrained(place, gguf_file=name, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(place, gguf_file=name)
    # A model read from GGUF refuses to be saved: its weights go into one that does not know.
    settings = read.config.to_dict()
    settings.pop("quantization_config", None)
    plain = type(read)(type(read.config).from_dict(settings))
    plain.load_state_dict(read.state_dict())
    plain.generation_config.eos_token_id = tokenizer.eos_token_id
    plain.generation_config.pad_token_id = tokenizer.pad_token_id
    folder.parent.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(dir=folder.parent, prefix=f".{folder.name}-") as temporary:
        unfinished = Path(temporary) / folder.name
        plain.save_pretrained(unfinished)
        tokenizer.save_pretrained(unfinished)
        os.replace(unfinished, folder)
    return folder


def main(arguments: list[str]) -> int:
    """Convert the file that the arguments name; 2 where they are wrong."""
    parser = argparse.ArgumentParser(prog="convert", description="GGUF to a folder of safetensors")
    parser.add_argument("source", type=Path)
    parser.add_argument("folder", type=Path)
    given = parser.parse_args(arguments)
    try:
        print(convert(given.source, given.folder))
    except BadInput as bad:
        print(f"convert: {bad}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
