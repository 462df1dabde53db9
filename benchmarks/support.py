"""How well the proxies of `windage diagnose` order estimators whose bias and variance are exact.

    python benchmarks/support.py

Draws 400 batches of an automaton with shared parameters, computes the proxies of noise and bias
from log-probabilities alone, and sets them beside the exact moments.  Writes
benchmarks/results/support.json with rank correlations (Spearman) over the entries.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from scipy.stats import spearmanr

from windage.estimators.agreement import gram
from windage.estimators.catalogue import get
from windage.estimators.moments import score_norms
from windage.toy.behavior import with_behavior
from windage.toy.chains import reasoning
from windage.toy.exact.plan import exact
from windage.toy.objective import objective
from windage.toy.paths import Paths

RESULT = Path(__file__).parent / "results" / "support.json"
LENGTH, GROUP, BATCHES = 32, 4, 400
SAMPLERS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("noise", {"sigma": 0.1}),
    ("noise", {"sigma": 0.3}),
    ("stale", {"steps": 4, "rate": 1.0}),
)
NAMES = ("rloo", "token_is", "token_tis", "trajectory_is", "sequence_tis", "prefix_is", "suffix_is",
         "cispo", "icepop", "grpo", "gspo", "topr")  # fmt: skip


def measured(kind: str, settings: dict[str, Any]) -> dict[str, Any]:
    """Proxies and exact figures of one sampler."""
    chain = with_behavior(reasoning(LENGTH), kind, **settings)
    paths = Paths(chain)
    drawn = paths.draw(BATCHES, GROUP, torch.Generator().manual_seed(0))
    batch = paths.batch(drawn, head=False)
    fields = ("rewards", "mask", "logp", "behavior_logp", "probability_square")
    flat = replace(
        batch, proximal_logp=None, **{name: getattr(batch, name).flatten(0, 1) for name in fields}
    )
    norms = score_norms(flat)[flat.mask]
    table = gram(torch.stack([get(n)(flat).own[flat.mask] for n in NAMES]), norms).numpy()
    plain, whole = NAMES.index("rloo"), NAMES.index("trajectory_is")
    scale = table[:, plain] / table[plain, plain]
    noise = np.diag(table) / (scale**2 * table[plain, plain])
    cross = table[:, whole] / (scale * scale[whole] * table[plain, plain])
    bias = np.sqrt(np.maximum(noise + noise[whole] - 2 * cross, 0.0))
    gradient = objective(chain).gradient
    rows = []
    for i, name in enumerate(NAMES):
        moments = exact(get(name), chain, GROUP)
        progress = float((moments.mean * gradient).sum() / gradient.square().sum())
        gap = (moments.mean / progress - gradient).norm() / gradient.norm()
        rows.append(
            {
                "estimator": name,
                "noise_proxy": round(float(noise[i]), 4),
                "exact_variance": round(float(moments.variance) / progress**2, 4),
                "bias_proxy": round(float(bias[i]), 4),
                "exact_bias": round(float(gap), 4),
            }
        )

    def order(one: str, other: str) -> float:
        found = spearmanr([r[one] for r in rows], [r[other] for r in rows])
        return round(float(found.statistic), 3)

    return {
        "sampler": kind,
        **settings,
        "noise": order("noise_proxy", "exact_variance"),
        "bias": order("bias_proxy", "exact_bias"),
        "rows": rows,
    }


def main() -> None:
    """Measure, print, write."""
    found = [measured(kind, settings) for kind, settings in SAMPLERS]
    for each in found:
        print({key: value for key, value in each.items() if key != "rows"})
    RESULT.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
