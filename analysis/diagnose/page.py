"""How a diagnosis looks: signs of faults, figures with intervals, which estimator is supported."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from windage.analysis.diagnose import figures
from windage.analysis.report import Page, Section
from windage.analysis.tables import Column, Table, text
from windage.analysis.terminal import Rendered

Document = Mapping[str, Any]
TITLES = {
    "copied": "one copied from the other",
    "shift": "shifted by a token",
    "temperature": "temperature not applied",
    "support": "top-k or top-p not applied",
    "raw": "raw log-probabilities",
    "stale_cache": "stale cache",
    "wrong_version": "wrong version",
    "retokenized": "text tokenized anew",
}
# What a terminal shows of the metrics; the page and the files have all of them.
KEY = (
    "mismatch/k1",
    "mismatch/k3",
    "mismatch/chi2",
    "mismatch/chi2_response",
    "mismatch/abs_log_ratio_max",
    "ratio/ess",
    "ratio/ess_response",
    "limits/ess_truncated_2_response",
    "tail/token",
    "tail/response",
    "limits/above_2",
    "limits/above_2_response",
    "drift/distance",
    "drift/centered",
    "drift/centered_tis",
    "lag/mean",
    "group/constant",
    "length/truncated",
    "length/reward_correlation",
    "truncation/effect",
    "selection/reward",
)
SIGNS = (
    Column(key="sign", label="sign", keep=9),
    Column(key="state", label="", keep=8),
    Column(key="alarms", label="false alarms\non planted dumps", keep=2),
    Column(key="hits", label="found when\nplanted", keep=2),
    Column(key="says", label="evidence", keep=1),
)
METRICS = (
    Column(key="name", label="figure", keep=9),
    Column(key="value", label="value", keep=8),
    Column(key="half_width", label="±", keep=7),
    Column(key="unit", label="unit", keep=5),
    Column(key="better", label="better", keep=2),
    Column(key="verl", label="verl", keep=1),
    Column(key="formula", label="formula", keep=0),
)
COMPARED = (
    Column(key="name", label="figure", keep=9),
    Column(key="value", label="first", keep=7),
    Column(key="other", label="second", keep=7),
    Column(key="difference", label="difference", keep=8),
    Column(key="difference_half_width", label="±", keep=8),
    Column(key="differs", label="differs", keep=6),
    Column(key="unit", label="unit", keep=4),
)
ENTRIES = (
    Column(key="rank", label="", keep=9),
    Column(key="estimator", label="estimator", keep=9),
    Column(key="bias", label="bias\nproxy", keep=7),
    Column(key="bias_half_width", label="±", keep=6),
    Column(key="noise", label="noise", keep=7),
    Column(key="noise_half_width", label="±", keep=6),
    Column(key="effective_share", label="effective\nshare", percent=True, keep=5),
    Column(key="largest_share", label="largest\nshare", percent=True, keep=3),
    Column(key="clip_share", label="clipped", percent=True, keep=4),
    Column(key="clip_mass_positive", label="clipped\nmass, A > 0", percent=True, keep=2),
    Column(key="clip_mass_negative", label="clipped\nmass, A < 0", percent=True, keep=2),
    Column(key="weight_ess", label="weights'\neffective share", percent=True, keep=2),
    Column(key="signal_to_noise", label="signal\nto noise", keep=2),
    Column(key="tail", label="tail k", keep=1),
    Column(key="why", label="why", keep=1),
)
PARTS = (
    Column(key="cause", label="cause", keep=9),
    Column(key="measure", label="measure", keep=8),
    Column(key="low", label="at least", keep=7),
    Column(key="high", label="at most", keep=7),
    Column(key="error", label="standard\nerror", keep=4),
    Column(key="tokens", label="tokens", keep=3),
    Column(key="how", label="how", keep=1),
)
SHARES = (
    Column(key="cause", label="cause", keep=9),
    Column(key="measure", label="measure", keep=8),
    Column(key="share", label="share", percent=True, keep=7),
    Column(key="share_error", label="standard\nerror", percent=True, keep=6),
    Column(key="value", label="part", keep=5),
    Column(key="error", label="standard\nerror", keep=4),
    Column(key="least", label="least of\nall orders", keep=4),
    Column(key="most", label="most of\nall orders", keep=4),
    Column(key="unit", label="a", keep=2),
)
ASIDE = (
    Column(key="reason", label="reason", keep=9),
    Column(key="rows", label="rows", keep=9),
    Column(key="first", label="the first", keep=1),
)


def verdict(document: Document) -> str:
    """What is wrong, in a sentence."""
    found = [TITLES[sign["name"]] for sign in document["signs"] if sign["state"] == "raised"]
    if found:
        return f"Raised: {', '.join(found)}."
    unknown = [TITLES[s["name"]] for s in document["signs"] if s["state"] == "cannot tell"]
    clear = "No sign of a fault."
    return f"{clear} Not told by this dump: {', '.join(unknown)}." if unknown else clear


def raised(document: Document) -> list[str]:
    """A sentence for each sign that is raised."""
    return [sign["says"] for sign in document["signs"] if sign["state"] == "raised"]


def counts(document: Document) -> str:
    """How much there was, and what was set aside."""
    dump = document["dump"]
    aside = sum(dump["set_aside"].values())
    words = (
        f"{dump['path']}: {dump['format']}, {dump['rows_in']:,} rows, {dump['tokens']:,} tokens, "
        f"{dump['groups']:,} groups"
    )
    if aside:
        why = ", ".join(f"{reason} {rows:,}" for reason, rows in dump["set_aside"].items())
        words += f"; {aside:,} rows set aside ({why})"
    if dump["measured_rows"] < dump["rows_kept"]:
        words += f"; {dump['measured_rows']:,} rows have log-probabilities of both sides"
    return f"{words}."


def signs(document: Document) -> Table:
    """Each sign, raised ones first."""
    order = {"raised": 0, "clear": 1, "cannot tell": 2}
    rows = [
        {
            "sign": TITLES[sign["name"]],
            "state": sign["state"],
            "alarms": _of(sign["false_alarms"]),
            "hits": _of(sign["found"]),
            "says": sign["says"],
        }
        for sign in sorted(document["signs"], key=lambda sign: order[sign["state"]])
    ]
    strong = frozenset((i, "state") for i, row in enumerate(rows) if row["state"] == "raised")
    return Table(columns=SIGNS, rows=rows, strong=strong)


def _of(pair: list[int] | None) -> str | None:
    return None if pair is None else f"{pair[0]} of {pair[1]:,}"


def metrics(document: Document, names: tuple[str, ...] | None = None) -> Table:
    """Figures with their intervals; beside another dump also the difference."""
    rows = document["rows"]
    if names is not None:
        by = {row["name"]: row for row in rows}
        rows = [by[name] for name in names if name in by]
    columns = METRICS if document["other"] is None else COMPARED
    return Table(
        columns=columns,
        rows=rows,
        caption="± is half of a 95 % interval, with groups independent.",
    )


def entries(document: Document) -> Table:
    """Every entry in order, then those that are left out and why."""
    rows = document["support"]["rows"]
    notes: dict[str, list[str]] = {}
    for row in rows:
        if row["reason"]:
            notes.setdefault(row["reason"], []).append(row["estimator"])
    return Table(
        columns=ENTRIES,
        rows=[row for row in rows if row["rank"] is not None],
        caption="Entries with one number are undecided between.",
        notes=tuple(f"Left out: {', '.join(names)}: {why}." for why, names in notes.items()),
    )


def parts(document: Document) -> Table:
    """What of the mismatch is due to what."""
    return Table(columns=PARTS, rows=document["attribution"])


def shares(document: Document) -> Table:
    """What of a rescored sample's mismatch is due to what."""
    return Table(
        columns=SHARES,
        rows=document["rescored"]["rows"],
        caption="Responses are independent. A part below 0 undoes another cause.",
    )


def rescored(document: Document) -> list[str]:
    """What was rescored, and in which order causes were undone."""
    found = document["rescored"]
    lines = [
        f"{found['responses']:,} responses, {found['tokens']:,} tokens, rescored. Our pass differs "
        f"from what the sampler recorded by {text(found['sampler_gap'])} nats a token, the engine's"
        " part; "
        + (
            "the trainer's log-probabilities are not recorded."
            if found["trainer_gap"] is None
            else f"from what the trainer recorded by {text(found['trainer_gap'])}, left out here."
        ),
        "The engine is undone first, then top-k and top-p (support): under other weights they would"
        " leave out tokens that were drawn. Temperature, precision, cache and lag are undone in "
        "every order: a part is the mean over the orders, and the least and the most say how far "
        "the order matters.",
    ]
    if not found["sampler"]:
        lines.append("The sampler's weights were not given: what lag adds counts as the engine's.")
    if found["written"]:
        lines.append(
            f"{found['written']['responses']:,} responses of whole groups with the model's "
            f"log-probabilities are in {found['written']['path']}, a dump to diagnose in turn."
        )
    if found["widened"]:
        lines.append(
            f"{found['widened']:,} tokens count as the last that top-k or top-p keeps, as our pass "
            "would have left them out."
        )
    return lines


def divergence(document: Document) -> str:
    """Shares of KL in a line."""
    rows = [row for row in document["rescored"]["rows"] if row["measure"] == "k1"]
    told = [
        f"{row['cause']} {text(row['share'], percent=True)} ± "
        f"{text(row['share_error'], percent=True)}"
        for row in rows
        if row["share"]
    ]
    return f"Shares of KL in {document['rescored']['responses']:,} responses: {', '.join(told)}."


def aside(document: Document) -> Table:
    """Rows that could not be used."""
    dump = document["dump"]
    first: dict[str, str] = {}
    for each in dump["first_set_aside"]:
        first.setdefault(each["reason"], each["says"])
    rows = [
        {"reason": reason, "rows": rows, "first": first.get(reason)}
        for reason, rows in dump["set_aside"].items()
    ]
    return Table(columns=ASIDE, rows=rows, notes=tuple(dump["files_without_rows"]))


def basis(document: Document) -> list[str]:
    """What the comparison of estimators rests on."""
    found = document["support"]
    if not found["rows"]:
        return []
    norms = "sum(pi^2)" if found["exact_norms"] else "(1 - pi)^2, as sum(pi^2) is not recorded"
    share = text(found["share_of_groups"], percent=True)
    return [
        f"{found['responses']:,} responses in {found['groups']:,} groups ({share} of all); "
        f"advantages {found['advantages']}; norms from {norms}; reference: {found['reference']}.",
        "Noise is the power of an update at equal progress, with rloo without correction as 1; "
        "the bias proxy is the distance to the reference's update and bounds the bias in the mean. "
        "Both are by the logits of each token, not by your model's parameters. Progress is "
        "agreement with rloo token by token, which is fair between entries that differ by their "
        "correction; noise of entries that weigh responses differently (by length, by the spread "
        "of a group) is not compared. `windage study --model` measures bias and variance by the "
        "parameters.",
    ]


def sections(document: Document) -> Iterator[Section]:
    """What the page shows, in order."""
    said = [verdict(document), *raised(document)]
    yield Section(title="Signs of faults", prose=said, table=signs(document))
    drawn = figures.mismatch(document)
    if drawn is not None:
        yield Section(title="Where sampler and trainer differ", figure=drawn)
    if document["attribution"]:
        yield Section(title="What the mismatch comes from", table=parts(document))
    if document["rescored"] is not None:
        yield Section(
            title="What a rescored sample's mismatch comes from",
            prose=rescored(document),
            table=shares(document),
        )
    yield Section(
        title="Which estimator this data supports",
        prose=(document["support"]["verdict"], *basis(document)),
        figure=figures.entries(document),
        table=entries(document) if document["support"]["rows"] else None,
    )
    alike = figures.agreement(document)
    if alike is not None:
        yield Section(title="How far the entries agree", figure=alike)
    compared = document["other"] is not None
    yield Section(
        title="Two dumps compared" if compared else "Every figure", table=metrics(document)
    )
    if document["dump"]["set_aside"] or document["dump"]["files_without_rows"]:
        yield Section(title="Rows that were set aside", table=aside(document))


def page(document: Document) -> Page:
    """The diagnosis as one page."""
    intro = [counts(document)]
    if document["other"] is not None:
        other = {**document, "dump": document["other"]["dump"], "signs": document["other"]["signs"]}
        intro += [f"Beside it: {counts(other)} {verdict(other)}"]
    return Page(
        title="What this dump tells",
        intro=intro,
        sections=list(sections(document)),
        footer=f"Ratios beyond {text(document['caps'])} counted; {document['seconds']:.0f} s.",
    )


def summary(document: Document) -> Rendered:
    """The main figures, what is wrong, and which estimator is supported."""
    lines = [
        counts(document),
        "\n".join([verdict(document), *raised(document)]),
        "\n".join([document["support"]["verdict"], *basis(document)[:1]]),
    ]
    if document["other"] is not None:
        other = {**document, "dump": document["other"]["dump"], "signs": document["other"]["signs"]}
        lines.insert(1, f"Beside it: {counts(other)} {verdict(other)}")
    if document["rescored"] is not None:
        lines += [divergence(document), *rescored(document)[2:]]
    return Rendered(title="What this dump tells", table=metrics(document, KEY), lines=tuple(lines))
