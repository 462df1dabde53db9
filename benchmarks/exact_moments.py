"""Exact moments against what a user would do instead, and how long each engine takes.

    python benchmarks/exact_moments.py [--quick]

Prints two tables and writes them to benchmarks/results/exact_moments.json and .md.

1. Time of a call of the engines, mean, variance and drift together, from the logits: each call
   gets a fresh copy of the problem, so nothing that depends on it is kept between calls.  What
   depends on group size and reward values alone (advantages by counts of classes) is kept.
2. The norm of an estimator's bias to 1 % relative standard error, K = 64 responses, G = 16: the
   engine against a Python loop with `loss.backward()` for each group and against `torch.func.vmap`
   of the gradient over groups.  Groups needed: (deviation of the estimate along the bias / 1 % of
   the bias)^2, the fewest that an average of independent groups can do with; the bias is exact, the
   deviation comes from the groups that vmap draws.  Drawing groups is left out of the baselines'
   time, which favors them.  A large bias needs few groups and a small one many: the targets, 10,000
   against the loop and 100 against vmap, are meant for the row marked with a star.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from windage.estimators.catalogue import get
from windage.estimators.estimator import Estimator
from windage.toy.behavior import with_behavior
from windage.toy.exact.plan import exact, plan
from windage.toy.objective import objective
from windage.toy.problems import Problem, Tree, make

RESULTS = Path(__file__).parent / "results"
PRECISION = 0.01
CASES = (
    ("bandit, K = 1,024", "grpo", 64, 1.0),
    ("bandit, K = 1,024", "rloo", 64, 1.0),
    ("bandit, K = 1,024", "dapo", 64, None),
    ("bandit, K = 100,000", "grpo", 64, 10.0),
    ("bandit, K = 100,000", "rloo", 64, 10.0),
    ("bandit, K = 100,000", "centered_tis", 64, None),
    ("tree, 4^10 leaves", "rloo", 16, 300.0),
    ("tree, 4^10 leaves", "grpo", 16, 300.0),
    ("tree, 4^10 leaves", "token_tis", 16, None),
    ("tree, 4^10 leaves", "trajectory_is", 16, None),
    ("tree, 4^10 leaves", "suffix_is", 16, None),
    ("tree, 4^10 leaves", "centered_tis", 16, None),
)


def drawn(tree: Tree, sigma: float, seed: int = 0) -> Problem:
    """Normal logits, binary rewards (one in three), and a sampler with noise on the logits."""
    generator = torch.Generator().manual_seed(seed)
    shape = (1, tree.prefixes, tree.vocab)
    logits = torch.randn(shape, generator=generator, dtype=torch.float64)
    rewards = (torch.rand((1, tree.leaves), generator=generator) < 1 / 3).double()
    return with_behavior(make("drawn", tree, logits, rewards), "noise", sigma=sigma, seed=seed)


def seconds(call: Callable[[], Any], *, budget: float) -> tuple[float, float]:
    """Least and median time of a call in a steady state."""
    call()
    times: list[float] = []
    start = time.perf_counter()
    while len(times) < 5 or time.perf_counter() - start < budget:
        before = time.perf_counter()
        call()
        times.append(time.perf_counter() - before)
    times.sort()
    return times[0], times[len(times) // 2]


def engine_rows(budget: float) -> list[dict[str, Any]]:
    """Times of the planner's choice on every case, with one thread and with two."""
    problems = {
        "bandit, K = 1,024": drawn(Tree(1024, None, 1), 0.3),
        "bandit, K = 100,000": drawn(Tree(100_000, None, 1), 0.3),
        "tree, 4^10 leaves": drawn(Tree(4, None, 10), 0.3),
    }
    rows = []
    for where, name, group_size, target in CASES:
        problem, estimator = problems[where], get(name)
        engine = plan(estimator, problem, group_size).engine
        row: dict[str, Any] = {
            "problem": where,
            "estimator": name,
            "group_size": group_size,
            "engine": engine,
            "target_ms": target,
        }
        for threads in (1, 2):
            torch.set_num_threads(threads)
            least, median = seconds(
                lambda p=problem, e=estimator, g=group_size, n=engine: exact(e, replace(p), g, n),
                budget=budget,
            )
            row |= {f"least_ms_{threads}": 1e3 * least, f"median_ms_{threads}": 1e3 * median}
        rows.append(row)
    return rows


def advantage(name: str, rewards: Tensor) -> Tensor:
    """Advantages of groups, as a user writes them for an estimator of the comparison."""
    centered = rewards - rewards.mean(-1, keepdim=True)
    if name == "grpo":
        return centered / (rewards.std(-1, keepdim=True) + 1e-6)
    return centered * (rewards.shape[-1] / (rewards.shape[-1] - 1))


def loss(name: str, logits: Tensor, behavior: Tensor, advantages: Tensor, chosen: Tensor) -> Tensor:
    """The published loss of one group: PPO's clip, a truncated ratio, or none."""
    logp = logits.log_softmax(-1)[chosen]
    if name == "rloo":
        return -(advantages * logp).mean()
    ratio = (logp - behavior[chosen]).exp()
    if name == "token_tis":
        return -(ratio.detach().clamp(max=2.0) * advantages * logp).mean()
    clipped = ratio.clamp(0.8, 1.2)
    return -torch.minimum(ratio * advantages, clipped * advantages).mean()


def groups(problem: Problem, count: int, group_size: int, seed: int) -> tuple[Tensor, Tensor]:
    """Responses and rewards of groups drawn from the sampler."""
    generator = torch.Generator().manual_seed(seed)
    chance = problem.behavior_logp[0, 0].exp()
    chosen = torch.multinomial(chance, count * group_size, replacement=True, generator=generator)
    chosen = chosen.view(count, group_size)
    return chosen, problem.rewards[0][chosen]


def by_loop(name: str, problem: Problem, group_size: int, budget: float) -> float:
    """Groups a second of a loop with `backward()`."""
    logits = problem.logits[0, 0].clone().requires_grad_()
    behavior = problem.behavior_logp[0, 0]
    chosen, rewards = groups(problem, 2000, group_size, seed=1)
    advantages = advantage(name, rewards)

    def call() -> None:
        for c, a in zip(chosen, advantages, strict=True):
            loss(name, logits, behavior, a, c).backward()
        logits.grad = None

    return len(chosen) / seconds(call, budget=budget)[0]


def by_vmap(
    name: str, problem: Problem, group_size: int, budget: float
) -> tuple[float, Tensor, int]:
    """Groups a second of `vmap(grad)` at its best chunk, that chunk, and estimates it draws."""
    logits, behavior = problem.logits[0, 0], problem.behavior_logp[0, 0]

    def gradients(advantages: Tensor, chosen: Tensor) -> Tensor:
        one = torch.func.grad(lambda z, a, c: loss(name, z, behavior, a, c))
        return -torch.func.vmap(one, in_dims=(None, 0, 0))(logits, advantages, chosen)

    best, chunk = 0.0, 0
    for size in (256, 1024, 4096, 16384):
        chosen, rewards = groups(problem, size, group_size, seed=2)
        advantages = advantage(name, rewards)
        least, _ = seconds(lambda a=advantages, c=chosen: gradients(a, c).sum(0), budget=budget / 4)
        if size / least > best:
            best, chunk = size / least, size
    chosen, rewards = groups(problem, 40_000, group_size, seed=3)
    return best, gradients(advantage(name, rewards), chosen), chunk


def bias_row(name: str, problem: Problem, group_size: int, budget: float) -> dict[str, Any]:
    """What 1 % of the bias norm costs, by engine, loop and vmap."""
    estimator: Estimator = get(name)
    engine = plan(estimator, problem, group_size).engine

    def bias() -> Tensor:
        fresh = replace(problem)
        return exact(estimator, fresh, group_size, engine).mean - objective(fresh).gradient

    took, _ = seconds(bias, budget=budget)
    exact_bias = bias().flatten()
    size = float(exact_bias.norm())
    vmap_rate, estimates, chunk = by_vmap(name, problem, group_size, budget)
    along = estimates @ (exact_bias / size)
    mean = exact(estimator, problem, group_size, engine).mean.flatten()
    error = (estimates.mean(0) - mean).norm() / estimates.std(0).norm() * math.sqrt(len(estimates))
    assert error < 5, f"{name}: the published loss and the catalogue differ by {error:.1f} errors"
    needed = float(along.var()) / (PRECISION * size) ** 2
    loop_rate = by_loop(name, problem, group_size, budget)
    return {
        "estimator": name,
        "engine": engine,
        "relative_bias": size / float(objective(problem).gradient.norm()),
        "groups_needed": needed,
        "exact_seconds": took,
        "loop_groups_a_second": loop_rate,
        "vmap_groups_a_second": vmap_rate,
        "vmap_chunk": chunk,
        "loop_seconds": needed / loop_rate,
        "vmap_seconds": needed / vmap_rate,
        "loop_ratio": needed / loop_rate / took,
        "vmap_ratio": needed / vmap_rate / took,
    }


def machine() -> dict[str, Any]:
    """What the figures were measured on."""
    cpu = platform.processor() or platform.machine()
    info = Path("/proc/cpuinfo")
    if info.exists():
        names = [x.split(":")[1] for x in info.read_text().splitlines() if "model name" in x]
        cpu = f"{len(names)} x {names[0].strip()}" if names else cpu
    cores = os.cpu_count() or 1
    return {
        "cpu": cpu,
        "cores": cores,
        "python": platform.python_version(),
        "torch": torch.__version__,
    }


def markdown(document: dict[str, Any]) -> str:
    """The two tables for a reader."""
    m = document["machine"]
    lines = [
        "# Exact moments",
        "",
        f"`python benchmarks/exact_moments.py` on {m['cpu']}, Python {m['python']}, torch "
        f"{m['torch']}; load while it ran: {document['load']:.1f}.",
        "",
        "Mean, variance and drift of one estimator, from the logits: milliseconds, least / median.",
        "",
        "| problem | estimator | G | engine | one thread | two threads | target |",
        "|---|---|---|---|---|---|---|",
    ]
    for r in document["engines"]:
        times = [f"{r[f'least_ms_{n}']:.2f} / {r[f'median_ms_{n}']:.2f}" for n in (1, 2)]
        target = "" if r["target_ms"] is None else f"{r['target_ms']:g}"
        lines.append(
            f"| {r['problem']} | {r['estimator']} | {r['group_size']} | {r['engine']} | {times[0]} "
            f"| {times[1]} | {target} |"
        )
    lines += [
        "",
        "The norm of the bias to 1 % relative standard error, K = 64, G = 16, one thread; noise",
        "on the sampler's logits is sigma.  Targets, for the row with the star: 10,000 and 100.",
        "",
        "| estimator | sigma | relative bias | groups | loop, groups/s | vmap, groups/s "
        "| exact, ms | loop / exact | vmap / exact |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for n, r in enumerate(document["bias"]):
        lines.append(
            f"| {r['estimator']}{'' if n else ' *'} | {r['sigma']:g} | {r['relative_bias']:.3f} "
            f"| {r['groups_needed']:.1e} | {r['loop_groups_a_second']:,.0f} "
            f"| {r['vmap_groups_a_second']:,.0f} | {1e3 * r['exact_seconds']:.2f} "
            f"| {r['loop_ratio']:,.0f} | {r['vmap_ratio']:,.0f} |"
        )
    if document["load"] > m["cores"]:
        lines += ["", "Other work shared the cores: two threads often wait for one another."]
    return "\n".join([*lines, ""])


def main() -> None:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(description="Time the exact engines against sampling.")
    parser.add_argument("--quick", action="store_true", help="short measurements, nothing written")
    budget = 0.05 if (quick := parser.parse_args().quick) else 1.0
    torch.set_num_threads(1)
    bias = [
        {"sigma": sigma, **bias_row(name, drawn(Tree(64, None, 1), sigma), 16, budget)}
        for name, sigma in (("rloo", 0.1), ("rloo", 0.3), ("token_tis", 0.3), ("grpo", 0.1))
    ]
    document = {
        "schema": "windage/benchmarks/exact_moments/1",
        "machine": machine(),
        "load": os.getloadavg()[0],
        "engines": engine_rows(budget),
        "bias": bias,
    }
    text = markdown(document)
    print(text)
    if not quick:
        RESULTS.mkdir(exist_ok=True)
        (RESULTS / "exact_moments.json").write_text(json.dumps(document, indent=1) + "\n")
        (RESULTS / "exact_moments.md").write_text(text)


if __name__ == "__main__":
    main()
