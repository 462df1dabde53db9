"""How a study of a language model looks: figures with their noise, and the toy beside them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from windage.analysis.measured.figures import against_toy, plane
from windage.analysis.report import Page, Section
from windage.analysis.tables import Column, Table, text
from windage.analysis.terminal import Rendered

Document = Mapping[str, Any]
COLUMNS = (
    Column(key="estimator", label="estimator", keep=9),
    Column(key="scale", label="scale", keep=3),
    Column(key="cosine", label="cosine", keep=5),
    Column(key="bias", label="relative\nbias", keep=7),
    Column(key="variance", label="variance of\none group", keep=4),
    Column(key="within", label="within\nprompts", keep=1),
    Column(key="drift", label="drift", keep=2),
    Column(key="merit", label="merit of\none group", keep=8),
    Column(key="apart", label="behind\nthe best", keep=6),
    Column(key="groups", label="groups\nneeded", keep=4),
)
SAMPLERS = (
    Column(key="sampler", label="sampler", keep=9),
    Column(key="told", label="ratios\nknown", keep=5),
    Column(key="divergence", label="divergence\na token", keep=7),
    Column(key="effective_share", label="effective\nshare", percent=True, keep=6),
    Column(key="tokens", label="tokens", keep=3),
    Column(key="reward", label="reward", keep=4),
)
AGREEMENT = (
    Column(key="sampler", label="sampler", keep=9),
    Column(key="group_size", label="G", keep=8),
    Column(key="merit", label="merit", keep=7),
    Column(key="relative_bias_rescaled", label="bias after\nrescaling", keep=4),
    Column(key="variance_rescaled", label="variance after\nrescaling", keep=4),
)
MISLED = (
    Column(key="sampler", label="sampler", keep=9),
    Column(key="group_size", label="G", keep=8),
    Column(key="toy_prefers", label="toy puts first", keep=7),
    Column(key="measured_prefers", label="measured first", keep=7),
    Column(key="toy_ratio", label="by the toy,\ntimes", keep=5),
    Column(key="measured_ratio", label="measured,\ntimes", keep=5),
)
BASELINES = (
    Column(key="baseline", label="baseline", keep=9),
    Column(key="group_size", label="G", keep=8),
    Column(key="share", label="share", percent=True, keep=7),
    Column(key="error", label="standard\nerror", percent=True, keep=6),
    Column(key="toy", label="share,\ntoy", percent=True, keep=6),
    Column(key="variance", label="variance", keep=4),
    Column(key="scale", label="scale", keep=3),
    Column(key="relative_bias", label="relative\nbias", keep=5),
    Column(key="reason", label="", keep=1),
)
FORMULA = """\
<E x, E y> = sum over prompts p != q of <x[p], y[q]> / (P (P - 1))      no noise in squared lengths
relative bias = |E g - grad J| / |grad J|     variance = E|g|^2 - |E g|^2, one group of any prompt
merit = <grad J, E g>^2 / (|grad J|^2 E|g|^2)     drift = |E g| with every reward 1"""


def shown(row: Mapping[str, Any], name: str, *, length: bool = False) -> str | None:
    """A figure with its standard error, or what it is below where it is not told from 0.

    Example:
        >>> row = {"x": 0.5, "x_resolved": False, "standard_error": {"x": 0.1},
        ...        "interval": {"x": [0.0, 0.75]}}
        >>> shown(row, "x"), shown(row, "x", length=True)
        ('0.5 ± 0.1', '< 0.75')
    """
    value, error = row[name], row["standard_error"][name]
    if value is None:
        return None
    if length and row[f"{name.replace('relative_', '')}_resolved"] is not True:
        above = row["interval"][name][1]
        return "no bound" if above is None else f"< {text(above)}"
    return text(value) if error is None else f"{text(value)} ± {text(error)}"


def entries(document: Document, sampler: str, size: int) -> Table:
    """Every entry with one sampler and group size, by merit."""
    rows = [
        row for row in document["rows"] if row["sampler"] == sampler and row["group_size"] == size
    ]
    rows.sort(key=lambda row: -(row["merit"] or 0.0))
    notes = sorted({f"{row['reason']}." for row in rows if row["reason"]})
    return Table(
        columns=COLUMNS,
        rows=[_entry(row) for row in rows],
        caption=f"{sampler}, groups of {size}: {rows[0]['groups']} groups in all.",
        notes=notes,
    )


def _entry(row: Mapping[str, Any]) -> dict[str, Any]:
    paired = row["paired"]
    best = None if row["merit"] is None else "best"
    apart = best if paired is None else "yes" if paired["told_apart"] else "not told"
    return {
        "estimator": row["estimator"],
        "scale": shown(row, "scale"),
        "cosine": shown(row, "cosine"),
        "bias": shown(row, "relative_bias", length=True),
        "variance": shown(row, "variance"),
        "within": row["variance_within"],
        "drift": shown(row, "drift", length=True),
        "merit": shown(row, "merit"),
        "apart": apart,
        "groups": row["groups_needed"],
    }


def agreement(document: Document) -> Table:
    """Rank correlations of the toy with the measurement."""
    rows: dict[tuple[str, int], dict[str, Any]] = {}
    for each in document["toy"]["agreement"]:
        at = each["sampler"], each["group_size"]
        row = rows.setdefault(at, {"sampler": at[0], "group_size": at[1]})
        if each["rank_correlation"] is not None:
            row[each["figure"]] = (
                f"{each['rank_correlation']:.2f} [{each['low']:.2f}, {each['high']:.2f}]"
            )
    return Table(
        columns=AGREEMENT,
        rows=list(rows.values()),
        caption="Spearman's rank correlation over the entries, and its interval at 95 %.",
    )


def misled(document: Document) -> Table:
    """Pairs of entries whose order the toy gets wrong."""
    return Table(
        columns=MISLED,
        rows=document["toy"]["misled"],
        caption="Up to three pairs a sampler and group size, told apart by three standard errors.",
    )


def verdict(document: Document) -> str:
    """What the toy is good for here, in a sentence."""
    found = [
        row["rank_correlation"]
        for row in document["toy"]["agreement"]
        if row["figure"] == "merit" and row["rank_correlation"] is not None
    ]
    wrong = len(document["toy"]["misled"])
    if not found:
        return "The gradient is not told from 0 here, so there is no order to compare."
    middle = sorted(found)[len(found) // 2]
    return (
        f"The toy's order by merit agrees with the measured one to a rank correlation of "
        f"{middle:.2f} (the median of {len(found)} places, {min(found):.2f} to {max(found):.2f}); "
        + (
            "no pair is measured the other way round beyond noise."
            if not wrong
            else f"{wrong} of the pairs listed are measured the other way round."
        )
    )


def baselines(document: Document) -> Table:
    """How much of the possible variance reduction each baseline reaches, here and on a toy."""
    there = document.get("toy", {}).get("baselines", ())
    toy = {(row["baseline"], row["group_size"]): row["share"] for row in there}
    return Table(
        columns=BASELINES,
        rows=[
            row
            | {"error": row["standard_error"], "toy": toy.get((row["baseline"], row["group_size"]))}
            for row in document["baselines"]
        ],
        caption="Of groups of one prompt, drawn by the policy itself: 0 % without a baseline, "
        "100 % with the best constant of each prompt. Variance and bias are after dividing by the "
        "scale."
        + (f" The toy: {there[0]['problem']}, exactly, up to groups of 16." if there else ""),
    )


def gradient(document: Document) -> str:
    """The gradient that everything is held against."""
    found = document["gradient"]
    low, high = found["interval"]
    words = f"|grad J| is {text(found['norm'])} [{text(low)}, {text(high)}]"
    return words + (
        "." if found["resolved"] else ", not told from 0: only lengths and variances are shown."
    )


def precision(document: Document) -> str:
    """How gradients were kept."""
    kept = document["sketch"]
    by = document["parameters"]
    words = f"Gradients are by {by['count']:,} parameters ({by['which']})"
    if not kept["error"]:
        return f"{words}, exactly."
    seen = "" if kept["error_seen"] is None else f", {100 * kept['error_seen']:.1f} % seen"
    return (
        f"{words}, as random projections to {kept['numbers']:,} numbers: inner products of lengths "
        f"1 have an error of at most {100 * kept['error']:.1f} %{seen}."
    )


def page(document: Document) -> Page:
    """The study as one page."""
    sizes: Sequence[int] = document["group_sizes"]
    middle = sizes[len(sizes) // 2]
    names = [about["sampler"] for about in document["samplers"]]
    sections = [
        Section(
            title="Who sampled",
            prose=(gradient(document), precision(document)),
            table=Table(columns=SAMPLERS, rows=document["samplers"]),
        ),
        Section(title="Bias and variance", formula=FORMULA, figure=plane(document, middle)),
    ]
    if document.get("toy"):
        sections += [
            Section(
                title="The toy beside the measurement",
                prose=(verdict(document),),
                figure=against_toy(document, middle),
                table=agreement(document),
            ),
            Section(title="Where the toy misleads", table=misled(document)),
        ]
    sections += [
        Section(title=f"Entries, {name}", table=entries(document, name, size))
        for name in names
        for size in sizes
    ]
    if document.get("baselines"):
        title = "Share of the possible variance reduction"
        sections.append(Section(title=title, table=baselines(document)))
    return Page(
        title=f"Estimators measured on {document['model']}",
        intro=(
            f"{document['prompts']} prompts of {document['task']}; {document['references']} "
            f"responses of the policy to each for the gradient, {document['responses']} of each "
            "sampler for the estimates.",
            "Standard errors and intervals are by prompt. A bias inside three standard errors is "
            "shown as a bound, and two entries are told apart beyond three only. In simulated "
            "studies of 16 to 128 prompts of a transformer that can be listed, intervals at 95 % "
            "held the exact figure in at least 93 % for every entry (benchmarks/coverage.py).",
        ),
        sections=sections,
        footer=f"{document['seconds']:.0f} seconds; seed {document['seed']}.",
    )


def summary(document: Document) -> Rendered:
    """The entries at the first sampler and group size of most interest, and the answer."""
    rows = document["rows"]
    if not rows:
        return Rendered(title="windage study", table=Table(columns=COLUMNS, rows=()))
    last = rows[-1]
    lines: Iterable[str] = (gradient(document), precision(document))
    if document.get("toy"):
        lines = (*lines, verdict(document))
    return Rendered(
        title=f"Estimators measured on {document['model']}",
        table=entries(document, last["sampler"], last["group_size"]),
        lines=tuple(lines),
    )
