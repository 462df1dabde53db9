"""The pass over pieces of the logits against a whole log_softmax: memory and time of both ways.

    python benchmarks/logprobs.py

Prints a table and writes it to benchmarks/results/logprobs.json and .md.  The output layer is that
of SmolLM2-135M (vocabulary 49,152, width 576) in float32.  Every way runs in a process of its own:
memory is the growth of its largest resident size over that with inputs and their gradients in
place, time the least of three calls, forward and backward.  Target: a quarter of log_softmax's
memory at 32 x 64 tokens.
"""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from exact import machine
from torch import Tensor

from windage.llm.logprobs import log_probs

RESULTS = Path(__file__).parent / "results"
VOCABULARY, WIDTH, HEAD = 49_152, 576, 128
TOKENS = (512, 2048, 4096)
TARGET, AT = 0.25, 2048


def whole(hidden: Tensor, weight: Tensor, targets: Tensor, head: Tensor | None) -> Tensor:
    """Through a table of all log-probabilities."""
    logp = (hidden @ weight.T).log_softmax(-1)
    total = logp.gather(1, targets.unsqueeze(1)).sum()
    return total if head is None else total + logp.gather(1, head).sum()


def pieces(hidden: Tensor, weight: Tensor, targets: Tensor, head: Tensor | None) -> Tensor:
    """Through pieces of the logits."""
    found = log_probs(hidden, weight, targets, head)
    return found.logp.sum() if found.head_logp is None else found.logp.sum() + found.head_logp.sum()


WAYS: dict[str, Callable[..., Tensor]] = {"whole": whole, "pieces": pieces}


def measure(way: str, tokens: int, width: int) -> dict[str, float]:
    """Memory in bytes and time in seconds of one way, in this process."""
    torch.set_num_threads(1)
    g = torch.Generator().manual_seed(0)
    hidden = torch.randn(tokens, WIDTH, generator=g).requires_grad_()
    weight = (torch.randn(VOCABULARY, WIDTH, generator=g) / WIDTH**0.5).requires_grad_()
    targets = torch.randint(VOCABULARY, (tokens,), generator=g)
    head = torch.randint(VOCABULARY, (tokens, width), generator=g) if width else None
    hidden.grad, weight.grad = torch.ones_like(hidden), torch.ones_like(weight)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    took = []
    for _ in range(3):
        start = time.perf_counter()
        WAYS[way](hidden, weight, targets, head).backward()
        took.append(time.perf_counter() - start)
    after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return {"bytes": 1024 * (after - before), "seconds": min(took)}


def apart(way: str, tokens: int, width: int) -> dict[str, Any]:
    """The same in a process of its own."""
    words = [sys.executable, __file__, way, str(tokens), str(width)]
    answer = subprocess.run(words, check=True, capture_output=True, text=True)
    found: dict[str, Any] = json.loads(answer.stdout)
    return found


def page(document: dict[str, Any]) -> str:
    """The results as Markdown."""
    found = document["machine"]
    lines = [
        "# Log-probabilities without the vocabulary-sized table",
        "",
        f"`python benchmarks/logprobs.py` on {found['cpu']}, Python {found['python']}, torch "
        f"{found['torch']}, one thread; load while it ran: {document['load']:.1f}.",
        "",
        f"Forward and backward, vocabulary {VOCABULARY:,}, width {WIDTH}, float32; memory beyond "
        "inputs and gradients. A matrix's gradient, which both ways make anew before it is added, "
        f"is {4 * VOCABULARY * WIDTH / 2**20:.0f} MiB of it. Target at {AT:,} tokens: a share of "
        f"{TARGET}.",
        "",
        "| tokens | head | log_softmax, MiB | pieces, MiB | share | log_softmax, s | pieces, s |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in document["rows"]:
        ours, theirs = row["pieces"], row["whole"]
        lines.append(
            f"| {row['tokens']:,} | {row['head']} | {theirs['bytes'] / 2**20:.0f} "
            f"| {ours['bytes'] / 2**20:.0f} | {ours['bytes'] / theirs['bytes']:.2f} "
            f"| {theirs['seconds']:.2f} | {ours['seconds']:.2f} |"
        )
    return "\n".join(lines) + "\n"


def main() -> None:
    """Measure, print, write."""
    rows = [
        {"tokens": n, "head": k, **{way: apart(way, n, k) for way in WAYS}}
        for n in TOKENS
        for k in (0, HEAD)
    ]
    met = all(
        row["pieces"]["bytes"] < TARGET * row["whole"]["bytes"]
        for row in rows
        if row["tokens"] == AT
    )
    document = {
        "machine": machine(),
        "load": os.getloadavg()[0],
        "target": TARGET,
        "met": met,
        "rows": rows,
    }
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / "logprobs.json").write_text(json.dumps(document, indent=1) + "\n")
    (RESULTS / "logprobs.md").write_text(page(document))
    print(page(document))


if __name__ == "__main__":
    if len(sys.argv) > 1:
        print(json.dumps(measure(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))))
    else:
        main()
