"""The recursion over automaton states: its time, and its agreement with listing and with sampling.

    python benchmarks/transfer.py

Prints four tables and writes them to benchmarks/results/transfer.json and .md.

1. Time of a call, mean, variance and drift together, by length T, states S and tokens V: chains of
   random successors, a stop token, logits from a normal law, and noise of 0.05 on the sampler's.
   Target: 5 s at T = 32,768, S = 16, V = 8.
2. Against every response listed, at lengths where they can be: relative difference of the mean and
   of the variance of one response with the token ratio, and the times.
3. Maps of the summed and of the mean log-ratio, which are approximate: time and proven bounds by
   the number of frequencies, on the chain of the study of lengths with noise on its sampler.
4. Against responses drawn, at lengths where they cannot: differences in standard errors, the
   greatest of all coordinates for the mean, and the times.
"""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from exact import machine
from torch import Tensor

from windage.estimators.catalogue import get
from windage.estimators.estimator import Estimator
from windage.toy.behavior import with_behavior
from windage.toy.chains import Chain, reasoning
from windage.toy.exact.automata import automaton, sweep

RESULTS = Path(__file__).parent / "results"
SIZES = ((256, 4, 4), (4096, 4, 4), (32768, 4, 4), (256, 16, 8), (4096, 16, 8), (32768, 16, 8))
NAMES = ("token_is", "centered", "grpo", "trajectory_is", "prefix_is", "cispo", "sequence_tis")
BOUNDED = (
    ("sequence_tis", 32768, (128, 256, 512, 1024, 2048)),
    ("gspo", 256, (64, 128, 256, 512)),
    ("gspo", 4096, (64, 128, 256)),
)
PATIENCE = 5.0
LISTED, SAMPLED = (4, 8, 12, 16), (256, 4096, 32768)
DRAWS = 16000
NOISE = 0.05
TARGET = 5.0


def one_response() -> Estimator:
    """The token ratio with advantage r: an estimate from one response alone."""
    return replace(get("token_is"), name="token ratio", advantage=get("reinforce").advantage)


def drawn(horizon: int, states: int, vocab: int) -> Chain:
    """A chain with random successors that stops after a quarter of the horizon on average."""
    generator = torch.Generator().manual_seed(0)
    successor = torch.randint(states, (states, vocab), generator=generator)
    successor[:, -1] = -1
    shape = (1, states, vocab)
    logits, noise = torch.randn((2, *shape), generator=generator, dtype=torch.float64)
    stop = min(0.25, 4 / horizon)
    others = logits[..., :-1].log_softmax(-1) + math.log(1 - stop)
    logits = torch.cat([others, torch.full((1, states, 1), math.log(stop))], -1)
    rewards = torch.randint(2, (1, 2 * states), generator=generator).double()
    return Chain(
        name="drawn",
        successor=successor,
        start=0,
        horizon=horizon,
        logits=logits,
        behavior_logp=(logits + NOISE * noise).log_softmax(-1),
        rewards=rewards,
    )


def seconds(call: Callable[[], Any], times: int = 3) -> float:
    """Least time of some calls, of one if that takes long."""
    found: list[float] = []
    while len(found) < times and sum(found) < PATIENCE:
        start = time.perf_counter()
        call()
        found.append(time.perf_counter() - start)
    return min(found)


def speed_row(name: str, horizon: int, states: int, vocab: int) -> dict[str, Any]:
    """Time of one estimator at one size."""
    chain = drawn(horizon, states, vocab)
    took = seconds(lambda: automaton(get(name), chain, 8))
    return {"estimator": name, "T": horizon, "S": states, "V": vocab, "seconds": took}


def bounded_row(name: str, horizon: int, frequencies: int) -> dict[str, Any]:
    """Time and relative bounds of an estimator that needs a law, groups of 8."""
    chain = with_behavior(reasoning(horizon), "noise", sigma=NOISE / 5, seed=0)
    pairs = [(get(name), chain)]
    found = sweep(pairs, (8,), frequencies)[0][0]
    assert found.bounds is not None
    return {
        "estimator": name,
        "T": horizon,
        "frequencies": frequencies,
        "seconds": seconds(lambda: sweep(pairs, (8,), frequencies)),
        "mean": found.bounds.mean / float(found.mean.norm()),
        "variance": found.bounds.variance / float(found.variance),
    }


def listed(chain: Chain) -> tuple[Tensor, Tensor]:
    """Mean and variance of one response's estimate, from every response."""
    score, weight = _token(chain)
    chance = torch.ones(1, dtype=torch.float64)
    state = torch.tensor([chain.start])
    total = torch.zeros((1, *chain.logits.shape[1:]), dtype=torch.float64)
    mean, square = torch.zeros_like(total[0]), 0.0
    for t in range(chain.horizon):
        n, vocab = len(state), score.shape[1]
        who, token = torch.arange(n).repeat_interleave(vocab), torch.arange(vocab).repeat(n)
        at = state[who]
        chance = chance[who] * chain.behavior_logp[0].exp()[at, token]
        total = total[who]
        total[torch.arange(n * vocab), at] += weight[at, token, None] * score[at, token]
        following = chain.successor[at, token]
        ends = (following < 0) | (t == chain.horizon - 1)
        how = torch.where(following < 0, at, len(score) + following)
        g = total[ends] * chain.rewards[0][how[ends], None, None]
        mean = mean + torch.einsum("n,nsv->sv", chance[ends], g)
        square = square + chance[ends] @ g.square().sum((1, 2))
        chance, state, total = chance[~ends], following[~ends], total[~ends]
    return mean, square - mean.square().sum()


def sampled(chain: Chain, draws: int) -> Tensor:
    """Estimates of single responses."""
    score, weight = _token(chain)
    generator = torch.Generator().manual_seed(0)
    cumulative = chain.behavior_logp[0].exp().cumsum(-1)
    out = torch.zeros((draws, *chain.logits.shape[1:]), dtype=torch.float64)
    reward = torch.zeros(draws, dtype=torch.float64)
    live, state = torch.arange(draws), torch.full((draws,), chain.start)
    for t in range(chain.horizon):
        u = torch.rand((len(live), 1), generator=generator, dtype=torch.float64)
        token = (u > cumulative[state]).sum(1).clamp(max=score.shape[1] - 1)
        out[live, state] += weight[state, token, None] * score[state, token]
        following = chain.successor[state, token]
        ends = (following < 0) | (t == chain.horizon - 1)
        how = torch.where(following < 0, state, len(score) + following)
        reward[live[ends]] = chain.rewards[0][how[ends]]
        live, state = live[~ends], following[~ends]
        if not len(live):
            break
    return out * reward[:, None, None]


def _token(chain: Chain) -> tuple[Tensor, Tensor]:
    """Score and ratio of each token at each state."""
    logp = chain.logp[0]
    score = torch.eye(logp.shape[-1], dtype=logp.dtype) - logp.exp().unsqueeze(1)
    return score, (logp - chain.behavior_logp[0]).exp()


def listed_row(horizon: int) -> dict[str, Any]:
    """The recursion against every response."""
    chain = drawn(horizon, 4, 3)
    found = automaton(one_response(), chain, 1)
    mean, variance = listed(chain)
    return {
        "T": horizon,
        "mean": float((found.mean[0] - mean).norm() / mean.norm()),
        "variance": abs(float(found.variance / variance) - 1),
        "seconds": seconds(lambda: automaton(one_response(), chain, 1)),
        "seconds_listed": seconds(lambda: listed(chain), 1),
    }


def sampled_row(horizon: int) -> dict[str, Any]:
    """The recursion against responses drawn."""
    chain = drawn(horizon, 4, 3)
    found = automaton(one_response(), chain, 1)
    start = time.perf_counter()
    g = sampled(chain, DRAWS)
    took = time.perf_counter() - start
    away = (g.mean(0) - found.mean[0]).abs() / (g.std(0) / DRAWS**0.5).clamp(min=1e-300)
    spread = (g - found.mean[0]).square().sum((1, 2))
    error = float(spread.std()) / DRAWS**0.5
    return {
        "T": horizon,
        "coordinates": away.numel(),
        "mean": float(away.max()),
        "variance": abs(float(spread.mean() - found.variance)) / error,
        "relative_error": error / float(found.variance),
        "seconds": seconds(lambda: automaton(one_response(), chain, 1)),
        "seconds_sampled": took,
    }


def bounded_lines(rows: list[dict[str, Any]]) -> list[str]:
    """The table of laws."""
    lines = [
        "",
        f"Laws of the log-ratio on `reasoning` with noise {NOISE / 5:g}, three prompts, groups of "
        "8: seconds, bounds on the errors relative to the mean and to the variance. The number of "
        "frequencies is raised where a step would be wider than the ratio allows.",
        "",
        "| estimator | T | frequencies | seconds | mean | variance |",
        "|---|---|---|---|---|---|",
    ]
    return lines + [
        f"| {r['estimator']} | {r['T']:,} | {r['frequencies']} | {r['seconds']:.2f} | "
        f"{r['mean']:.1e} | {r['variance']:.1e} |"
        for r in rows
    ]


def markdown(document: dict[str, Any]) -> str:
    """The tables."""
    about = document["machine"]
    lines = [
        "# The recursion over automaton states",
        "",
        f"`python benchmarks/transfer.py` on {about['cpu']}, Python {about['python']}, torch "
        f"{about['torch']}, one thread; load while it ran: {document['load']:.1f}.",
        "",
        "Mean, variance and drift of one estimator, one prompt, groups of 8: seconds. Target at "
        f"T = 32,768, S = 16, V = 8: {TARGET:g}.",
        "",
        "| T | S | V | " + " | ".join(NAMES) + " |",
        "|---" * (3 + len(NAMES)) + "|",
    ]
    for size in SIZES:
        own = [r for r in document["speed"] if (r["T"], r["S"], r["V"]) == size]
        cells = [f"{r['seconds']:.3f}" for r in own]
        lines.append(f"| {size[0]:,} | {size[1]} | {size[2]} | " + " | ".join(cells) + " |")
    lines += [
        "",
        "Against every response listed, S = 4, V = 3: relative differences, seconds.",
        "",
        "| T | mean | variance | recursion | listing |",
        "|---|---|---|---|---|",
    ]
    lines += [
        f"| {r['T']} | {r['mean']:.0e} | {r['variance']:.0e} | {r['seconds']:.4f} | "
        f"{r['seconds_listed']:.4f} |"
        for r in document["listed"]
    ]
    lines += bounded_lines(document["bounded"])
    lines += [
        "",
        f"Against {DRAWS:,} responses drawn, S = 4, V = 3: differences in standard errors (mean: "
        f"the greatest of {document['sampled'][0]['coordinates']} coordinates), the relative "
        "standard error of the sampled variance, seconds.",
        "",
        "| T | mean | variance | error | recursion | sampling |",
        "|---|---|---|---|---|---|",
    ]
    lines += [
        f"| {r['T']:,} | {r['mean']:.1f} | {r['variance']:.1f} | {r['relative_error']:.1%} | "
        f"{r['seconds']:.4f} | {r['seconds_sampled']:.1f} |"
        for r in document["sampled"]
    ]
    return "\n".join(lines) + "\n"


def main() -> None:
    """Measure, print and write."""
    torch.set_num_threads(1)
    document = {
        "machine": machine(),
        "load": os.getloadavg()[0],
        "speed": [speed_row(name, *size) for size in SIZES for name in NAMES],
        "bounded": [bounded_row(name, t, n) for name, t, many in BOUNDED for n in many],
        "listed": [listed_row(horizon) for horizon in LISTED],
        "sampled": [sampled_row(horizon) for horizon in SAMPLED],
    }
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / "transfer.json").write_text(json.dumps(document, indent=1) + "\n")
    (RESULTS / "transfer.md").write_text(markdown(document))
    print(markdown(document))


if __name__ == "__main__":
    main()
