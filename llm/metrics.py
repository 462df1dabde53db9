"""What a step of training logs: the table of `estimators.metrics`, shadows, and measured times.

    parts of a step (one an optimizer update) -> moments -> merged -> one record a step

`python -m windage.llm.metrics` prints docs/metrics.md.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from windage.estimators.batch import Batch
from windage.estimators.diagnostics import effective_log_ratio
from windage.estimators.estimator import Coefficients, Estimator, coefficients
from windage.estimators.metrics import METRICS, NAMES, finish, given, moments
from windage.estimators.moments import Moments, merge
from windage.llm.shadow import FIGURES, shadows

Row = Mapping[str, Any]
TITLE = """# Metrics

What a run writes to `metrics.jsonl`, one record a step, and what `windage diagnose` tells of a
dump; docs/diagnose.md has what it tells beside.  Written by `python -m windage.llm.metrics`; a test
keeps it true.

- N trainable tokens, R responses, T tokens of a response.
- pi is the policy before the update, mu the distribution that drew the token (temperature, top-k
  and top-p applied); x = log pi - log mu of a token, s its sum over a response.
- w is the weight after clip, cap or mask, A the advantage, c the coefficient of the aggregation,
  C = A w c the coefficient of a token's score.
- Better: the direction that is good news; none: it depends.
- Ratios: taken before or after they were clipped, capped or masked.
- `high` and `low` are 2 and 0.5.
- A figure without meaning (nothing to average over, no direction) is left out of the record.
- Sums over micro-batches, processes and chunks add up.  Where a name of verl stands, the formula
  is verl's up to the differences that `estimators/metrics.py` lists.
"""
LAST = """
Of shadows, d is the real update by the logits and d' the shadow's; `shadow/real/...` is the real
recipe.  Logits of different tokens are told apart, and `signal_to_noise` adds up tokens of one id
over the groups of even and of odd number.
"""


def said(rows: Sequence[Row], batch: Batch, word: str) -> Bool[Tensor, "P G"] | None:
    """Where the verdict on a response is this word; None where no row has a verdict."""
    if batch.row_index is None or not any("verdict" in row for row in rows):
        return None
    hits = torch.tensor([row.get("verdict") == word for row in rows] or [False])
    return hits[batch.row_index.clamp(min=0)] & (batch.row_index >= 0)


def token_ids(rows: Sequence[Row], batch: Batch) -> Int[Tensor, "P G T"]:
    """The sampled tokens where the record has tokens, -1 after the end."""
    assert batch.row_index is not None
    found = np.full(batch.mask.shape, -1, dtype=np.int64)
    for place, number in np.ndenumerate(batch.row_index.numpy()):
        if number >= 0:
            ids = np.asarray(rows[number]["response_ids"], dtype=np.int64)
            found[place][: len(ids)] = ids
    return torch.from_numpy(found)


def made_of(estimator: Estimator, batch: Batch) -> Coefficients:
    """The coefficients of an update once more, from the log-probabilities that it saw.

    A head that the batch has no log-probabilities of is left out.
    """
    if batch.head_logp is None:
        estimator = replace(estimator, centering=None)
    return coefficients(estimator, batch)


def of_update(
    estimator: Estimator,
    batch: Batch,
    *,
    rows: Sequence[Row] = (),
    entropy: Float[Tensor, "P G T"] | None = None,
    **measured: float,
) -> Moments:
    """Sums of one optimizer update.

    Args:
        estimator: that made it.
        batch: whole, with what the forward pass told; without `logp` only rewards and lengths.
        rows: that the batch was made of, for verdicts.
        entropy: of the policy before each token.
        measured: figures of this update by name with `__` for `/`, such as
            update__gradient_norm.

    Example:
        >>> from windage.estimators.catalogue import get
        >>> batch = Batch.from_rows([1.0, 0.0], "aa", mask=[[1], [1]])
        >>> found = of_update(get("rloo"), batch, update__gradient_norm=0.25)
        >>> finish(found)["update/gradient_norm"]
        0.25
    """
    made, effective = None, None
    if batch.logp is not None:
        made = made_of(estimator, batch)
        effective = effective_log_ratio(estimator, batch, made.terms.advantages)
    found = moments(
        batch,
        coefficients=made,
        effective=effective,
        entropy=entropy if batch.logp is not None else None,
        invalid=said(rows, batch, "invalid"),
        format=said(rows, batch, "format"),
    )
    return merge(found, given(**measured)) if measured else found


def of_shadows(
    asked: Mapping[str, Estimator], estimator: Estimator, batch: Batch, rows: Sequence[Row]
) -> dict[str, float]:
    """What other recipes would have done in this update.

    Args:
        asked: as `shadow.carried` gives them.
        estimator: that made the update.
        batch: whole, with what the forward pass told.
        rows: that the batch was made of.
    """
    if not asked or batch.logp is None:
        return {}
    ids = token_ids(rows, batch)
    return shadows(asked, batch, made_of(estimator, batch), ids=ids)


def record(
    step: int,
    parts: Iterable[Mapping[str, Tensor]],
    *,
    shadow: Mapping[str, float] | None = None,
    **measured: float,
) -> dict[str, Any]:
    """The record of a step: its number, then figures by name.

    Args:
        step: of the run.
        parts: sums of its updates.
        shadow: figures of other recipes.
        measured: as of `of_update`, of the whole step.

    Example:
        >>> record(3, [], time__step=1.5)
        {'step': 3, 'time/step': 1.5}
    """
    sums = merge(*parts, given(**measured)) if measured else merge(*parts)
    return {"step": step, **dict(sorted({**finish(sums), **(shadow or {})}.items()))}


def by_verl(figures: Mapping[str, Any]) -> dict[str, Any]:
    """The same figures under verl's names; those that verl has none for stand under `windage/`.

    Example:
        >>> by_verl({"mismatch/k3": 0.1, "shadow/gspo/cosine": 0.9})
        {'rollout_corr/k3_kl': 0.1, 'windage/shadow/gspo/cosine': 0.9}
    """
    names = {name: metric.verl for name, metric in NAMES.items()}
    return {names.get(name) or f"windage/{name}": value for name, value in figures.items()}


def document() -> str:
    """The table of all metrics, as docs/metrics.md holds it."""
    lines = [TITLE]
    lines.append("| metric | formula | unit | better | ratios | verl |")
    lines.append("|---|---|---|---|---|---|")

    def line(*cells: str) -> str:
        return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"

    for m in METRICS:
        verl = "" if m.verl is None else f"`{m.verl}`"
        lines.append(line(f"`{m.name}`", m.formula, m.unit, m.better, m.stage, verl))
    reason = "responses turned away for this reason / present"
    lines.append(line("`admission/rejected/REASON`", reason, "share", "down", "-", ""))
    for name, formula, unit, better, stage in FIGURES:
        lines.append(line(f"`shadow/ENTRY/{name}`", formula, unit, better, stage, ""))
    return "\n".join(lines) + "\n" + LAST


if __name__ == "__main__":
    print(document(), end="")
