"""How well the proxies of `windage diagnose` order estimators whose bias and variance are exact.

    python benchmarks/support.py

Draws 400 batches of an automaton with shared parameters, computes the proxies of noise and bias
from log-probabilities alone, and sets them beside the exact moments.  Writes
benchmarks/results/support.json with rank correlations (Spearman) over the entries.

    noise, bias    over all entries
    noise_alike    over those whose update without correction is rloo's, whose noise is compared
    noise_told     over all, with progress measured between batches by pi of every token, which no
                   dump holds: what it is that the proxy lacks
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from scipy.stats import spearmanr

from windage.analysis.diagnose.ranking import ALIKE
from windage.analysis.diagnose.support import cosine, uncorrected
from windage.estimators.agreement import gram
from windage.estimators.catalogue import get
from windage.estimators.moments import score_norms
from windage.toy.behavior import with_behavior
from windage.toy.chains import Chain, reasoning
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
PLAIN, WHOLE = NAMES.index("rloo"), NAMES.index("trajectory_is")


def proxies(chain: Chain) -> dict[str, np.ndarray]:
    """Noise and bias from log-probabilities, what is alike, and noise by progress that is known."""
    paths = Paths(chain)
    drawn = paths.draw(BATCHES, GROUP, torch.Generator().manual_seed(0))
    batch = replace(paths.batch(drawn, head=False), proximal_logp=None)
    made = [get(name)(batch) for name in NAMES]
    norms = score_norms(batch)[batch.mask]

    def products(several: Sequence[Any]) -> np.ndarray:
        own = torch.stack([one.own[batch.mask] for one in several])
        return gram(own, norms).numpy()

    table = products(made)
    scale = table[:, PLAIN] / table[PLAIN, PLAIN]
    noise = np.diag(table) / (scale**2 * table[PLAIN, PLAIN])
    cross = table[:, WHOLE] / (scale * scale[WHOLE] * table[PLAIN, PLAIN])
    bias = np.sqrt(np.maximum(noise + noise[WHOLE] - 2 * cross, 0.0))
    bare = cosine(products([uncorrected(one, batch) for one in made]))
    each = torch.stack([paths.gradients(drawn, get(name), batch).flatten(1) for name in NAMES])
    whole = each.sum(1) @ each[PLAIN].sum(0)
    between = (whole - (each * each[PLAIN]).sum((1, 2))).numpy()
    told = np.diag(table) / (between / between[PLAIN]) ** 2 / table[PLAIN, PLAIN]
    return {"noise": noise, "bias": bias, "alike": bare[PLAIN] > ALIKE, "told": told}


def order(one: np.ndarray, other: np.ndarray) -> float:
    """Rank correlation."""
    return round(float(spearmanr(one, other).statistic), 3)


def moments(chain: Chain) -> tuple[np.ndarray, np.ndarray]:
    """Exact variance at equal progress, and bias over the gradient's norm."""
    gradient = objective(chain).gradient
    variance, bias = [], []
    for name in NAMES:
        found = exact(get(name), chain, GROUP)
        progress = float((found.mean * gradient).sum() / gradient.square().sum())
        gap = (found.mean / progress - gradient).norm() / gradient.norm()
        variance.append(float(found.variance) / progress**2)
        bias.append(float(gap))
    return np.array(variance), np.array(bias)


def measured(kind: str, settings: dict[str, Any]) -> dict[str, Any]:
    """Proxies and exact figures of one sampler."""
    chain = with_behavior(reasoning(LENGTH), kind, **settings)
    found, (variance, gap) = proxies(chain), moments(chain)
    alike = found["alike"]
    columns = {
        "noise_proxy": found["noise"],
        "noise_told": found["told"],
        "exact_variance": variance,
        "bias_proxy": found["bias"],
        "exact_bias": gap,
    }
    return {
        "sampler": kind,
        **settings,
        "noise": order(found["noise"], variance),
        "noise_alike": order(found["noise"][alike], variance[alike]),
        "noise_told": order(found["told"], variance),
        "bias": order(found["bias"], gap),
        "rows": [
            {
                "estimator": name,
                "alike": bool(alike[i]),
                **{key: round(float(column[i]), 4) for key, column in columns.items()},
            }
            for i, name in enumerate(NAMES)
        ],
    }


def main() -> None:
    """Measure, print, write."""
    found = [measured(kind, settings) for kind, settings in SAMPLERS]
    for each in found:
        print({key: value for key, value in each.items() if key != "rows"})
    RESULT.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
