"""What the figures of a run say, in sentences with their numbers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from statistics import median

from windage.analysis.runs.reading import Run

# Shares beyond which a reader should know.
LOW_ESS, HIGH_INVALID, STEEP = 0.5, 0.2, 10.0


def ends(values: Sequence[float]) -> tuple[float, float]:
    """Means of the first and of the last tenth of some values.

    Example:
        >>> ends([0.0, 1.0, 4.0])
        (0.0, 4.0)
    """
    size = max(1, len(values) // 10)
    return sum(values[:size]) / size, sum(values[-size:]) / size


def sentences(run: Run) -> list[str]:
    """Held-out answers first, then what may go wrong; only what the run recorded."""
    return [*_learning(run), *_mismatch(run), *_update(run), *_responses(run), *_shadows(run)]


def _learning(run: Run) -> Iterator[str]:
    held = [e for e in run.evaluations if "pass_at_1" in e]
    if len(held) > 1:
        first, last = held[0], held[-1]
        words = []
        for e in (first, last):
            known = {"pass_at_1_low", "pass_at_1_high"} <= set(e)
            low, high = (100 * e.get(f"pass_at_1_{side}", 0) for side in ("low", "high"))
            limits = f" ({low:.1f} to {high:.1f})" if known else ""
            words.append(f"{100 * e['pass_at_1']:.1f} %{limits}")
        text = (
            f"Held-out pass@1 went from {words[0]} at step {first['step']:g} to {words[1]} at step "
            f"{last['step']:g}"
        )
        if {"pass_at_1_low", "pass_at_1_high"} <= set(first) & set(last):
            apart = (
                last["pass_at_1_low"] > first["pass_at_1_high"]
                or last["pass_at_1_high"] < first["pass_at_1_low"]
            )
            text += ": the intervals do not meet" if apart else ": the intervals meet"
        yield f"{text}."
    _, rewards = run.series("reward/mean")
    if rewards:
        first_, last_ = ends(rewards)
        yield (
            f"The mean reward of a step went from {first_:.3f} to {last_:.3f} (first and last "
            f"tenth of {len(rewards)} steps)."
        )


def _mismatch(run: Run) -> Iterator[str]:
    _, k3 = run.series("mismatch/k3")
    steps, ess = run.series("ratio/ess")
    if k3:
        before, after = ends(k3)
        yield (
            f"Mismatch between trainer and sampler (k3) went from {before:.1e} to {after:.1e} "
            "nats a token."
        )
    if ess:
        low = min(ess)
        at = steps[ess.index(low)]
        word = "only " if low < LOW_ESS else ""
        yield f"The effective sample size of the ratios was at least {word}{low:.2f} (step {at})."
    _, lags = run.series("lag/max")
    if lags and max(lags) > 0:
        _, mean = run.series("lag/mean")
        yield f"Responses were {ends(mean)[1]:.1f} updates old at the end, {max(lags):.0f} at most."


def _update(run: Run) -> Iterator[str]:
    steps, norms = run.series("update/gradient_norm")
    if norms:
        high, middle = max(norms), median(norms)
        if middle > 0 and high > STEEP * middle:
            yield (
                f"The gradient norm was {high / middle:.0f} times its median at step "
                f"{steps[norms.index(high)]}."
            )
    _, skipped = run.series("update/skipped")
    if skipped and skipped[-1]:
        count = f"{skipped[-1]:.0f} update{'s were' if skipped[-1] != 1 else ' was'}"
        yield f"{count} skipped, since a number was not finite."


def _responses(run: Run) -> Iterator[str]:
    _, invalid = run.series("reward/invalid")
    if invalid and ends(invalid)[1] > HIGH_INVALID:
        yield f"{100 * ends(invalid)[1]:.0f} % of the answers at the end could not be checked."
    _, cut = run.series("length/truncated")
    if cut and ends(cut)[1] > HIGH_INVALID:
        yield f"{100 * ends(cut)[1]:.0f} % of the responses at the end were cut at the limit."
    _, lengths = run.series("length/mean")
    if lengths:
        before, after = ends(lengths)
        yield f"Responses had {before:.0f} tokens at first and {after:.0f} at the end."


def _shadows(run: Run) -> Iterator[str]:
    found = {}
    for name in shadowed(run):
        _, cosines = run.series(f"shadow/{name}/cosine")
        if cosines:
            found[name] = sum(cosines) / len(cosines)
    if found:
        low, high = min(found, key=found.__getitem__), max(found, key=found.__getitem__)
        yield (
            f"Of the shadow recipes {high} would have made the updates most like the real ones "
            f"(mean cosine {found[high]:.2f}), {low} the least ({found[low]:.2f})."
            if len(found) > 1
            else f"The shadow recipe {high} would have made updates of mean cosine "
            f"{found[high]:.2f} to the real ones."
        )


def shadowed(run: Run) -> list[str]:
    """Names of the shadow recipes, the real one left out."""
    found: dict[str, None] = {}
    for record in run.steps:
        for key in record:
            if key.startswith("shadow/"):
                found.setdefault(key.split("/", 1)[1].rsplit("/", 1)[0])
    return [name for name in found if name != "real"]
