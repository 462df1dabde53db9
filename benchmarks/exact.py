"""The exact engines against the loop, against vmap(grad) and against memory speed.

    python benchmarks/exact.py [--quick]

Writes benchmarks/results/exact.json and exact.md, and docs/figures/exact.png and .svg.

1. The norm of an entry's bias to 1 % relative standard error, K = 64 responses, G = 16, for every
   entry of the first tier whose weight is elementwise.  Groups needed: (deviation of the estimate
   along the bias / 1 % of the bias)^2, the fewest that an average of independent groups can do
   with; the bias is exact, the deviation comes from groups that vmap draws.  Drawing is left out
   of the baselines' time.  Claimed: the loop takes 10,000 times as long, vmap 100 times.
2. The same for one entry as K, G, T and V grow, and the time of four entries' engines, each with
   the floor: one pass over the K d numbers of all score vectors at the speed of memory.
3. Calls of the engines on large problems, by threads.

Each call of an engine gets a fresh copy of the problem, so that nothing that depends on it is kept
between calls; what depends on group size and reward values alone is kept.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from _baselines import by_loop, by_vmap, seconds, spread

from windage.analysis import plots
from windage.estimators.catalogue import CATALOGUE, get
from windage.estimators.estimator import Estimator
from windage.toy.behavior import with_behavior
from windage.toy.exact.plan import exact, plan
from windage.toy.objective import objective
from windage.toy.problems import Problem, Tree, make

ROOT = Path(__file__).parents[1]
RESULTS, FIGURES = ROOT / "benchmarks" / "results", ROOT / "docs" / "figures"
PRECISION = 0.01
CLAIMS = {"loop": 1e4, "vmap": 100.0}
SIGMAS = (0.1, 0.3)
ENTRIES = (
    *("rloo", "group_mean", "grpo", "dr_grpo", "dapo", "token_is", "token_tis", "cispo", "icepop"),
    *("gspo", "topr", "positives_only", "tis_both_signs"),
)
LINES = ("rloo", "grpo", "trajectory_is", "centered_tis")
AXES: dict[str, tuple[str, list[tuple[Tree, int]]]] = {
    "K": ("responses K, one token", [(Tree(4**k, None, 1), 16) for k in range(1, 10)]),
    "G": ("group size G, K = 64", [(Tree(64, None, 1), 2**k) for k in range(1, 11)]),
    "T": ("tokens T, V = 2", [(Tree(2, None, t), 16) for t in range(1, 19)]),
    "V": ("vocabulary V, T = 3", [(Tree(2**k, None, 3), 16) for k in range(1, 7)]),
}
SAMPLED = 20_000
LARGE = (
    ("bandit, K = 1,024", Tree(1024, None, 1), 64, ("grpo", "rloo", "dapo")),
    ("bandit, K = 100,000", Tree(100_000, None, 1), 64, ("grpo", "rloo", "centered_tis")),
    ("tree, 4^10 leaves", Tree(4, None, 10), 16, ("rloo", "grpo", "trajectory_is", "suffix_is")),
)
TARGETS = {
    ("bandit, K = 1,024", "grpo"): 1.0,
    ("bandit, K = 1,024", "rloo"): 1.0,
    ("bandit, K = 100,000", "grpo"): 10.0,
    ("bandit, K = 100,000", "rloo"): 10.0,
    ("tree, 4^10 leaves", "rloo"): 300.0,
    ("tree, 4^10 leaves", "grpo"): 300.0,
}


def drawn(tree: Tree, sigma: float, seed: int = 0) -> Problem:
    """Normal logits, binary rewards (one in three), and a sampler with noise on the logits."""
    generator = torch.Generator().manual_seed(seed)
    shape = (1, tree.prefixes, tree.vocab)
    logits = torch.randn(shape, generator=generator, dtype=torch.float64)
    rewards = (torch.rand((1, tree.leaves), generator=generator) < 1 / 3).double()
    rewards[0, :2] = torch.tensor([0.0, 1.0])
    return with_behavior(make("drawn", tree, logits, rewards), "noise", sigma=sigma, seed=seed)


def bandwidth() -> float:
    """Numbers a second of one pass over 32 million of them."""
    numbers = torch.ones(2**25, dtype=torch.float64)
    return len(numbers) / seconds(numbers.sum, budget=0.5)[0]


def time_of(estimator: Estimator, problem: Problem, group_size: int, budget: float) -> float:
    """Seconds of one call, mean, variance and drift together, from the logits."""
    engine = plan(estimator, problem, group_size).engine
    return seconds(lambda: exact(estimator, replace(problem), group_size, engine), budget=budget)[0]


def bias_row(estimator: Estimator, problem: Problem, size: int, budget: float) -> dict[str, Any]:
    """What 1 % of the bias norm costs, by engine, loop and vmap."""
    engine = plan(estimator, problem, size).engine

    def bias() -> torch.Tensor:
        fresh = replace(problem)
        return exact(estimator, fresh, size, engine).mean - objective(fresh).gradient

    took = seconds(bias, budget=budget)[0]
    exact_bias, goal = bias(), float(objective(problem).gradient.norm())
    norm = float(exact_bias.norm())
    row = {"estimator": estimator.name, "engine": engine, "group_size": size}
    row |= {"relative_bias": norm / goal, "exact_seconds": took}
    if norm < 1e-10 * goal:
        return {**row, "groups_needed": None}
    mean = exact(estimator, problem, size, engine).mean
    variance = spread(estimator, problem, size, mean, exact_bias / norm)
    needed = max(1.0, variance / (PRECISION * norm) ** 2)
    row["groups_needed"] = needed
    vmap, row["vmap_chunk"] = by_vmap(estimator, problem, size, budget)
    for name, rate in (("loop", by_loop(estimator, problem, size, budget)), ("vmap", vmap)):
        row[f"{name}_groups_a_second"] = rate
        row[f"{name}_seconds"] = needed / rate
        row[f"{name}_ratio"] = needed / rate / took
        row[f"{name}_holds"] = needed / rate / took >= CLAIMS[name]
    return row


def claims(budget: float) -> list[dict[str, Any]]:
    """Every entry with an elementwise weight, where its bias is not 0."""
    found = []
    for sigma in SIGMAS:
        problem = drawn(Tree(64, None, 1), sigma)
        for name in ENTRIES:
            estimator = CATALOGUE[name]
            if dict(estimator.aggregation.settings).get("length", 0) is None:
                estimator = get(name, length=1.0)
            found.append({"sigma": sigma, **bias_row(estimator, problem, 16, budget)})
            print(found[-1], file=sys.stderr)
    return found


def sizes(budget: float, speed: float) -> list[dict[str, Any]]:
    """Engines of four entries along each axis; the baselines for rloo while they are affordable."""
    found = []
    for axis, (_, places) in AXES.items():
        for tree, group_size in places:
            problem = drawn(tree, 0.3)
            numbers = tree.leaves * problem.logits.numel()
            row: dict[str, Any] = {"axis": axis, "responses": tree.leaves, "group_size": group_size}
            row |= {"horizon": tree.horizon, "vocab": tree.vocab, "floor": numbers / speed}
            for name in LINES:
                row[name] = time_of(CATALOGUE[name], problem, group_size, budget)
            if problem.logits.numel() * group_size <= SAMPLED:
                bias = bias_row(CATALOGUE["rloo"], problem, group_size, budget)
                row |= {k: bias[f"{k}_seconds"] for k in CLAIMS if f"{k}_seconds" in bias}
            found.append(row)
            print(row, file=sys.stderr)
    return found


def large(budget: float) -> list[dict[str, Any]]:
    """Times of the planner's choice on large problems, with one thread and with two."""
    found = []
    for where, tree, group_size, names in LARGE:
        problem = drawn(tree, 0.3)
        for name in names:
            row: dict[str, Any] = {
                "problem": where,
                "estimator": name,
                "group_size": group_size,
                "engine": plan(CATALOGUE[name], problem, group_size).engine,
                "target_ms": TARGETS.get((where, name)),
            }
            for threads in (1, 2):
                torch.set_num_threads(threads)
                row[f"ms_{threads}"] = 1e3 * time_of(CATALOGUE[name], problem, group_size, budget)
            torch.set_num_threads(1)
            found.append(row)
    return found


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


def figure(document: dict[str, Any]) -> plots.Figure:
    """Cost against size: engines, baselines to 1 % of rloo's bias, floor."""
    keys = {"K": "responses", "G": "group_size", "T": "horizon", "V": "vocab"}
    styles: dict[str, dict[str, Any]] = {
        "floor": {"color": "0.6", "linestyle": ":"},
        "loop": {"color": "#b2182b", "linestyle": "--"},
        "vmap": {"color": "#ef8a62", "linestyle": "--"},
    }

    def paint(canvas: Any) -> list[plots.Later]:
        for axes, (axis, (label, _)) in zip(canvas.subplots(1, 4), AXES.items(), strict=True):
            rows = [r for r in document["sizes"] if r["axis"] == axis]
            for name in (*LINES, "floor", *CLAIMS):
                points = [(r[keys[axis]], 1e3 * r[name]) for r in rows if name in r]
                if points:
                    axes.plot(*zip(*points, strict=True), label=name, **styles.get(name, {}))
            axes.set(yscale="log", xlabel=label)
            axes.set_xscale("log", base=2)
        canvas.axes[0].set_ylabel("milliseconds")
        canvas.axes[0].legend(fontsize="small")
        return []

    return plots.draw(
        "exact",
        paint,
        size=(13, 3.8),
        caption="Milliseconds of one exact call; loop and vmap: 1 % of the norm of rloo's bias.",
        alt="Cost against the number of responses, group size, tokens and vocabulary.",
    )


def markdown(document: dict[str, Any]) -> str:
    """The tables for a reader."""
    m, rows = document["machine"], document["claims"]
    biased = [r for r in rows if r["groups_needed"] is not None]
    held = {name: sum(r[f"{name}_holds"] for r in biased) for name in CLAIMS}
    lines = [
        "# Exact moments",
        "",
        f"`python benchmarks/exact.py` on {m['cpu']}, Python {m['python']}, torch {m['torch']}, "
        f"one thread; load while it ran: {document['load']:.1f}.",
        "",
        "The norm of the bias to 1 % relative standard error, K = 64, G = 16; noise on the "
        f"sampler's logits is sigma.  The loop takes 10,000 times as long in {held['loop']} of "
        f"{len(biased)} biased rows, vmap 100 times in {held['vmap']}: a large bias needs few "
        "groups.",
        "",
        "| entry | sigma | engine | relative bias | groups | exact, ms | loop / exact "
        "| vmap / exact |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for r in rows:
        ratios = [f"{r[f'{n}_ratio']:,.0f}" if f"{n}_ratio" in r else "unbiased" for n in CLAIMS]
        cells = [f"{r['groups_needed'] or math.inf:.1e}", f"{1e3 * r['exact_seconds']:.2f}"]
        lines.append(
            f"| {r['estimator']} | {r['sigma']:g} | {r['engine']} | {r['relative_bias']:.3f} "
            f"| {' | '.join(cells + ratios)} |"
        )
    lines += [
        "",
        "Large problems, milliseconds; targets where the specification has one.",
        "",
        "| problem | entry | G | engine | one thread | two threads | target |",
        "|---|---|---|---|---|---|---|",
    ]
    for r in document["large"]:
        target = "" if r["target_ms"] is None else f"{r['target_ms']:g}"
        lines.append(
            f"| {r['problem']} | {r['estimator']} | {r['group_size']} | {r['engine']} "
            f"| {r['ms_1']:.2f} | {r['ms_2']:.2f} | {target} |"
        )
    if document["load"] > m["cores"]:
        lines += ["", "Other work shared the cores: two threads often wait for one another."]
    lines += ["", "Cost against size: docs/figures/exact.png; its numbers: exact.json.", ""]
    return "\n".join(lines)


def main() -> None:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(description="Time the exact engines against sampling.")
    parser.add_argument("--quick", action="store_true", help="short measurements, nothing written")
    budget = 0.02 if (quick := parser.parse_args().quick) else 0.3
    torch.set_num_threads(1)
    speed = bandwidth()
    document = {
        "schema": "windage/benchmarks/exact/1",
        "machine": machine(),
        "load": os.getloadavg()[0],
        "numbers_a_second": speed,
        "claims": claims(budget),
        "sizes": sizes(budget, speed),
        "large": large(budget),
    }
    text = markdown(document)
    print(text)
    if not quick:
        for folder in (RESULTS, FIGURES):
            folder.mkdir(exist_ok=True)
        (RESULTS / "exact.json").write_text(json.dumps(document, indent=1) + "\n")
        (RESULTS / "exact.md").write_text(text)
        made = figure(document)
        (FIGURES / "exact.png").write_bytes(made.png)
        (FIGURES / "exact.svg").write_bytes(made.svg)


if __name__ == "__main__":
    main()
