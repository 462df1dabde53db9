"""Formula, unit, direction and verl's name of the figures that `estimators.metrics` does not have.

`python -m windage.analysis.diagnose.words` writes docs/diagnose.md.

N counts tokens, R responses; r is the outcome before shaping, T the trainable tokens, s the log-
ratio of a response, x of a token.
"""

from __future__ import annotations

from typing import NamedTuple

from windage.estimators.metrics import NAMES


class Words(NamedTuple):
    """What a figure is."""

    formula: str
    unit: str
    better: str
    verl: str | None = None
    stage: str = "-"


HEADER = """# What `windage diagnose` tells

Of a dump: the figures of `docs/metrics.md` that its columns allow, and those below.  Written by
`python -m windage.analysis.diagnose.words`; a test keeps it true.  Every figure comes with the
half width of a 95 % interval, groups independent; extremes and shapes of tails have none.

- N tokens that the policy chose, R responses, T such tokens of a response.
- pi is the trainer as late as the dump has it, mu what the dump says that drew.
- x = log pi - log mu of a token, s its sum over a response, r the outcome before shaping.
- CAP is each value of `--cap`, 2 and 5 without it; ENTRY a recipe of the catalogue that centers.
- Ratios: taken before or after they were capped.

| figure | formula | unit | better | ratios | verl |
|---|---|---|---|---|---|
"""
ENTRIES = """
Of each entry of the catalogue, from a sample of whole groups; d is its update by the logits of each
token, d0 that of `rloo` without correction, dR that of the reference, the ratio of whole responses
where its tail can bear it, else of tokens:

| column | formula | better |
|---|---|---|
"""
_COLUMNS = {
    "scale": ("<d, d0> / <d0, d0>: progress a step along the plain update", "none"),
    "noise": (
        "<d, d> / (scale^2 <d0, d0>): power at equal progress, 1 at least; fair where `alike`",
        "down",
    ),
    "bias": ("norm of (d / scale - dR / scale of the reference) / norm of d0", "down"),
    "effective_share": ("sum(C)^2 / (N sum(C^2)), C the sizes of its coefficients", "up"),
    "largest_share": ("largest C / sum(C)", "down"),
    "alike": ("cosine of its update without correction and centering with d0", "none"),
    "cosine_plain": ("of d with d0", "none"),
    "cosine_reference": ("of d with dR", "none"),
    "signal_to_noise": ("as `shadow/ENTRY/signal_to_noise` of docs/metrics.md", "up"),
    "tail": ("shape k of a Pareto law fitted to its largest weights", "down"),
    "clip_*, weight_*, admission_*": ("as of docs/metrics.md", "none"),
}

_OTHERS = {
    "proximal/k1": Words("-sum(log proximal - log mu) / N", "nats", "down", None, "before"),
    "proximal/k3": Words(
        "sum(exp(y) - 1 - y) / N, y = log proximal - log mu", "nats", "down", None, "before"
    ),
    "reference/k1": Words("-sum(log reference - log mu) / N", "nats", "none", None, "before"),
    "reference/k3": Words(
        "sum(exp(y) - 1 - y) / N, y = log reference - log mu", "nats", "none", None, "before"
    ),
    "tail/token": Words("shape k of a Pareto law fitted to the largest exp(x)", "-", "down"),
    "tail/response": Words("shape k of a Pareto law fitted to the largest exp(s)", "-", "down"),
    "tail/token_limit": Words("min(1 - 1 / log10(N), 0.7): up to which k is fine", "-", "none"),
    "tail/response_limit": Words("min(1 - 1 / log10(R), 0.7): up to which k is fine", "-", "none"),
    "drift/distance": Words(
        "sum(|exp(x) - 1|) / N: distance |mu - pi| before a token, the most that a constant reward "
        "drifts by",
        "probability",
        "down",
        None,
        "before",
    ),
    "head/mass": Words("sum of the sampler's head probabilities / N", "probability", "up"),
    "head/covered": Words("sampled tokens that lie in the head / N", "share", "up"),
    "group/constant": Words(
        "groups of at least two whose outcomes are equal / groups", "share", "down"
    ),
    "group/constant_low": Words(
        "groups of at least two, all at the least outcome of the dump / groups", "share", "none"
    ),
    "group/constant_high": Words(
        "groups of at least two, all at its greatest outcome / groups", "share", "none"
    ),
    "length/reward_correlation": Words("cov(r, T) / (std(r) std(T))", "-", "none"),
    "length/reward_slope": Words("1000 cov(r, T) / var(T)", "reward / 1000 tokens", "none"),
    "truncation/share": Words(
        "responses that a limit ended / R", "share", "down", "response_length/clip_ratio"
    ),
    "truncation/reward": Words("mean outcome of responses that a limit ended", "reward", "none"),
    "truncation/reward_of_others": Words(
        "mean outcome of responses that no limit ended", "reward", "none"
    ),
    "truncation/effect": Words(
        "mean outcome of all less that of responses that no limit ended", "reward", "none"
    ),
    "selection/admitted": Words("responses that were trained on / R", "share", "up"),
    "selection/reward": Words("mean outcome of the admitted less that of all", "reward", "none"),
    "selection/length": Words("mean length of the admitted less that of all", "tokens", "none"),
    "selection/truncated": Words(
        "share ended by a limit, of the admitted less of all", "share", "none"
    ),
}


def words(name: str) -> Words:
    """What a figure is, by its name.

    Example:
        >>> words("mismatch/k3").verl, words("limits/above_2").unit
        ('rollout_corr/k3_kl', 'share')
    """
    if name in _OTHERS:
        return _OTHERS[name]
    if name.startswith("drift/"):
        weight = "1" if name == "drift/centered" else f"the weight of `{name[6:]}` at advantage 1"
        return Words(
            f"sum over v of |mean over mu of w(y) (1[v = y] - pi(v))| / N, w {weight}: what a "
            "constant reward of 1 moves the logits by, tail rescaled; centering takes it away",
            "probability",
            "down",
        )
    if name in NAMES:
        metric = NAMES[name]
        return Words(metric.formula, metric.unit, metric.better, metric.verl, metric.stage)
    stem, _, rest = name.partition("_")
    over = "R" if rest.endswith("_response") else "N"
    cap = rest.removesuffix("_response").removeprefix("truncated_")
    letter = "s" if over == "R" else "x"
    if stem == "limits/above":
        verl = "rollout_corr/rollout_is_ratio_fraction_high" if over == "N" else None
        return Words(f"count(exp({letter}) > {cap}) / {over}", "share", "down", verl, "before")
    if stem == "limits/below":
        verl = "rollout_corr/rollout_is_ratio_fraction_low" if over == "N" else None
        return Words(f"count(exp({letter}) < 1 / {cap}) / {over}", "share", "down", verl, "before")
    verl = "rollout_corr/rollout_is_eff_sample_size" if over == "N" else None
    formula = f"sum(w)^2 / ({over} sum(w^2)), w = min(exp({letter}), {cap})"
    return Words(formula, "share", "up", verl, "after")


def document() -> str:
    """The page that lists every figure."""

    def cell(text: str | None) -> str:
        return (text or "").replace("|", "\\|")

    names = [*_OTHERS, "drift/ENTRY"]
    for stem in ("above_CAP", "below_CAP", "ess_truncated_CAP"):
        names += [f"limits/{stem}", f"limits/{stem}_response"]
    lines = []
    for name in sorted(names):
        about = words(name)
        verl = f"`{about.verl}`" if about.verl else ""
        cells = (f"`{name}`", cell(about.formula), about.unit, about.better, about.stage, verl)
        lines.append(f"| {' | '.join(cells)} |")
    columns = [
        f"| `{name}` | {cell(formula)} | {better} |" for name, (formula, better) in _COLUMNS.items()
    ]
    return HEADER + "\n".join(lines) + "\n" + ENTRIES + "\n".join(columns) + "\n"


if __name__ == "__main__":
    from pathlib import Path

    Path("docs/diagnose.md").write_text(document(), encoding="utf-8")
