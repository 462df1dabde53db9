"""How documents of `windage pipeline` look: a table a comparison, figures, published step times."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from windage.analysis.pipeline import curve_page, figures
from windage.analysis.report import Page, Section
from windage.analysis.tables import Column, Table, reasons
from windage.analysis.terminal import Rendered

Document = Mapping[str, Any]
Row = Mapping[str, Any]
MODEL = (
    "Slots write responses under the newest weights that have arrived. A response waits for its "
    "verdict and for the slowest of its group; the group then queues. A step takes the oldest "
    "groups, updates and commits; its weights reach the slots after the sync time. The lag of a "
    "response counts versions from the oldest weights in it to the step that consumes it."
)
COLUMNS = (
    Column(key="throughput", label="responses\na second", keep=9),
    Column(key="speedup", label="speed-up", keep=8),
    Column(key="step_seconds", label="step\ns", keep=4),
    Column(key="utilization", label="slots\nbusy", percent=True, keep=6),
    Column(key="trainer_utilization", label="trainer\nbusy", percent=True, keep=5),
    Column(key="lag_mean", label="lag\nmean", keep=8),
    Column(key="lag_p95", label="lag\n95 %", keep=3),
    Column(key="lag_max", label="lag\nmost", keep=5),
    Column(key="token_lag_mean", label="token\nlag", keep=7),
    Column(key="queue_mean", label="queue", keep=1),
    Column(key="dropped", label="dropped", percent=True, keep=4),
    Column(key="length_admitted", label="tokens\nadmitted", keep=0),
    Column(key="reward_admitted", label="reward\nadmitted", percent=True, keep=0),
    Column(key="occupancy_lag", label="inside\n/ batch", keep=2),
)
PUBLISHED = (
    Column(key="table", label="published", keep=4),
    Column(key="row", label="row", keep=9),
    Column(key="figure", label="figure", keep=3),
    Column(key="ours", label="ours", keep=8),
    Column(key="published", label="theirs", keep=8),
    Column(key="percent", label="gap", keep=7),
    Column(key="role", label="ours is", keep=6),
    Column(key="verdict", label="within\n10 %", keep=5),
)


def table(document: Document) -> Table:
    """Every row under what tells rows apart."""
    swept = list(document["sweep"])
    named = [key for key in ("mode", *(k for k in swept if k != "mode"))]
    keys = [Column(key=key, label=key.replace("_", "\n"), keep=20) for key in named]
    rows = document["rows"]
    live = [c for c in COLUMNS if any(row.get(c.key) is not None for row in rows)]
    residual = document["occupancy_residual"]
    return Table(
        columns=[*keys, *live],
        rows=rows,
        caption="Lags in versions; inside / batch is the lag that Little's law foretells where "
        "nothing is dropped.",
        notes=(
            f"The ledger of responses balances in every run: largest residual {residual:g}.",
            *reasons(rows, "mode"),
        ),
    )


def published_table(published: Document) -> Table:
    """Ours beside theirs."""
    words = {None: "–", True: "yes", False: "NO"}
    rows = [
        {**row, "percent": f"{100 * row['gap']:+.1f} %", "verdict": words[row["holds"]]}
        for row in published["rows"]
    ]
    return Table(columns=PUBLISHED, rows=rows, caption="Published step times and ours.")


def published_prose(published: Document) -> Iterator[str]:
    """What was calibrated, and where a row misses, said by the figures."""
    good = [row["sigma"] for row in published["spreads"] if row["gap"] <= published["within"]]
    bad = [row for row in published["spreads"] if row["gap"] > published["within"]]
    yield (
        "Fully asynchronous, as their page describes the run: 256 prompts of 16 responses at a "
        "time, 128 prompts an update, weights published after four. The step at threshold 0 sets "
        f"the mean time of a response, {published['mean_seconds']:.1f} s; the other thresholds are "
        "predicted, the duration of each update being the published one. Fetching samples takes "
        f"{published['fetch_seconds']:g} s a step (all the waiting of the same page's run on 32 "
        f"GPUs); without it the largest gap is {100 * published['gap_without_fetch']:.0f} %."
    )
    yield (
        f"A row states one waiting time and calibrates one constant: the spread of a response, "
        f"{published['sigma']:g}, is the default of this command. Predictions lie within 10 % for "
        f"spreads of {', '.join(f'{sigma:g}' for sigma in good)}; they miss by up to "
        + ", ".join(f"{100 * row['gap']:.0f} % for {row['sigma']:g}" for row in bad)
        + "."
    )
    yield (
        "Colocated: a step is the sum of its published parts, which tests the formula and "
        "calibrates nothing. One step off, likewise; and as the longer of writing and training, "
        "where the first run's step sets what writing takes besides generation and the second is "
        "predicted. Generation on one H100: seconds a token from the run of 8k tokens, the other "
        "lengths predicted."
    )
    missed = [row for row in published["rows"] if row["holds"] is False]
    for row in missed:
        yield (
            f"Misses: {row['table']}, {row['row']}: {row['ours']:.0f} against "
            f"{row['published']:.0f} ({100 * row['gap']:+.1f} %)."
        )
    if not missed:
        yield "Every prediction lies within 10 %."


def seen(document: Document) -> Iterator[str]:
    """Where lengths and times come from, if they were seen."""
    told = document["observed"]
    if told is None:
        return
    aside = "".join(f", {n} set aside ({why})" for why, n in told["set_aside"].items())
    yield (
        f"Lengths of {told['used']:,} of {told['rows']:,} responses of {told['source']}{aside}; "
        f"seconds: {told['seconds']}. Responses are drawn one by one: what a prompt's responses "
        "have in common is `stretch`, 1 unless set."
    )


def sections(document: Document) -> Iterator[Section]:
    """Table, figures, published figures."""
    prose = (*seen(document), *document["reading"])
    yield Section(title="The figures", prose=prose, table=table(document))
    along = figures.sweep(document)
    if along is not None:
        yield Section(title="Along the sweep", figure=along)
    if document["pictures"]:
        yield Section(title="Who waits when", figure=figures.timelines(document))
        yield Section(title="How old", figure=figures.lags(document))
        if any((row.get("dropped") or 0) > 0 for row in document["rows"]):
            yield Section(title="Who is selected", figure=figures.selection(document))
    if document["published"] is not None:
        yield Section(
            title="Published step times",
            prose=tuple(published_prose(document["published"])),
            table=published_table(document["published"]),
        )


def heading(document: Document) -> str:
    """What was done."""
    swept = [k for k in document["sweep"] if k != "mode"]
    if swept:
        return f"Pipelines by {', '.join(k.replace('_', ' ') for k in swept)}"
    return "Pipelines: who waits, and how old what is consumed is"


def page(document: Document) -> Page:
    """One page."""
    if "curve" in document:
        return curve_page.page(document)
    return Page(
        title=heading(document),
        intro=(MODEL,),
        sections=list(sections(document)),
        footer=f"Seed {document['seed']}, {document['steps']} steps a row; "
        f"{document['seconds']:.1f} seconds.",
    )


def summary(document: Document) -> Rendered:
    """The table and what it says."""
    if "curve" in document:
        return curve_page.summary(document)
    lines: Sequence[str] = [*seen(document), *document["reading"]]
    if document["published"] is not None:
        rows = [row for row in document["published"]["rows"] if row["role"] == "predicted"]
        good = sum(row["holds"] for row in rows)
        gap = max(abs(row["gap"]) for row in rows if row["holds"])
        lines = [
            *lines,
            f"Published step times: {good} of {len(rows)} predictions within 10 % (largest gap "
            f"among them {100 * gap:.1f} %); --out shows ours beside theirs.",
        ]
    return Rendered(title=heading(document), table=table(document), lines=("\n".join(lines),))
