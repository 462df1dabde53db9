"""Responses that `windage sample` wrote: what they earned, a row a file of the store."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from windage.analysis.report import Page, Section
from windage.analysis.tables import Column, Table
from windage.analysis.terminal import Rendered

Document = Mapping[str, Any]
COLUMNS = (
    Column(key="step", label="step", keep=9),
    Column(key="responses", label="responses", keep=6),
    Column(key="reward", label="mean\nreward", keep=8),
    Column(key="correct", label="right", percent=True, keep=7),
    Column(key="format", label="right, but\nwords follow", percent=True, keep=2),
    Column(key="invalid", label="no answer\nfound", percent=True, keep=5),
    Column(key="truncated", label="cut at\nthe limit", percent=True, keep=4),
    Column(key="length", label="mean\ntokens", keep=3),
    Column(key="tokens_per_second", label="tokens\na second", keep=1),
)


def table(document: Document) -> Table:
    """A row a step; every step of the store is a file."""
    return Table(
        columns=COLUMNS,
        rows=document["rows"],
        caption="Shares are of the responses; those right with words after them count as right.",
    )


def told(document: Document) -> str:
    """Which model, task and seed the responses are of, and where they are."""
    config = document["config"]
    sampling, seed = config["sampling"], config["run"]["seed"]
    settings = ",".join(f"{k}={v}" for k, v in config["task"]["settings"].items())
    task = f"{config['task']['name']}{':' * bool(settings)}{settings}"
    return (
        f"{config['model']['path']} on {task}, "
        f"groups of {config['train']['group_size']}, temperature {sampling['temperature']:g}, at "
        f"most {sampling['max_tokens']} tokens, seed {seed}; the store is {document['store']}."
    )


def page(document: Document) -> Page:
    """One page with the table."""
    return Page(
        title="Responses, judged and recorded",
        intro=[told(document)],
        sections=[Section(title="What they came to", table=table(document))],
        footer=", ".join(f"{name} {version}" for name, version in document["versions"].items()),
    )


def summary(document: Document) -> Rendered:
    """The table on a terminal."""
    title = "Responses, judged and recorded"
    return Rendered(title=title, table=table(document), lines=(told(document),))
