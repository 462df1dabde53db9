"""Documents as folders: CSV, parquet, PNG, SVG, JSON and one HTML page that opens offline.

A verb's look is a module that `PAGES` names, with

    page(document) -> Page            the HTML page and its figures
    summary(document) -> Rendered     what a terminal shows

A verb without one gets a plain table of its rows.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from importlib.resources import files
from pathlib import Path
from typing import Any, final

from windage.analysis.plots import Figure
from windage.analysis.tables import Table, frame, from_rows
from windage.analysis.terminal import Rendered

PAGES = {
    "audit": "windage.analysis.audit.page",
    "choose": "windage.analysis.choose.page",
    "claims": "windage.analysis.claims.page",
    "diagnose": "windage.analysis.diagnose.page",
    "evaluate": "windage.analysis.evaluation",
    "learn": "windage.analysis.learning.page",
    "measure": "windage.analysis.measured.page",
    "pipeline": "windage.analysis.pipeline.page",
    "sample": "windage.analysis.sampled",
    "study": "windage.analysis.studies.study_page",
    "train": "windage.analysis.runs.page",
}

# Rows beyond which nobody reads a document by eye.
MANY = 2_000


@final
@dataclass(frozen=True, kw_only=True)
class Section:
    """One part of a page, shown in this order: prose, formula, figure, table.

    Args:
        title: a heading.
        prose: paragraphs.
        formula: plain text in the width that it has.
        figure: with its caption.
        table: with its caption and notes.
    """

    title: str
    prose: Sequence[str] = ()
    formula: str = ""
    figure: Figure | None = None
    table: Table | None = None


@final
@dataclass(frozen=True, kw_only=True)
class Page:
    """One HTML page.

    Args:
        title: what was done.
        intro: paragraphs that say what the page answers.
        sections: in order.
        footer: how it was computed, in a line.
    """

    title: str
    intro: Sequence[str]
    sections: Sequence[Section]
    footer: str = ""

    @property
    def figures(self) -> list[Figure]:
        """Every figure of the page."""
        return [s.figure for s in self.sections if s.figure is not None]


def html(page: Page) -> str:
    """The page as one file: styles inside, figures as data, no script, no address elsewhere."""
    from jinja2 import Environment, StrictUndefined

    environment = Environment(
        autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters["base64"] = lambda data: base64.b64encode(data).decode()
    template = files("windage.analysis").joinpath("page.html").read_text(encoding="utf-8")
    return environment.from_string(template).render(page=page)


def verb(document: Mapping[str, Any]) -> str:
    """The verb that made a document, from its schema.

    Example:
        >>> verb({"schema": "windage/study/1"})
        'study'
    """
    return str(document["schema"]).split("/")[1]


def page(document: Mapping[str, Any]) -> Page:
    """The page of any verb's document."""
    name = verb(document)
    if name in PAGES:
        return import_module(PAGES[name]).page(document)
    table = from_rows(document["rows"])
    return Page(title=f"windage {name}", intro=(), sections=[Section(title="Rows", table=table)])


def table(document: Mapping[str, Any]) -> Rendered:
    """What a terminal shows of any verb's document; print it with a rich console."""
    name = verb(document)
    if name in PAGES:
        return import_module(PAGES[name]).summary(document)
    return Rendered(title=f"windage {name}", table=from_rows(document["rows"]))


def _json(document: Mapping[str, Any]) -> bytes:
    """A document as a file, indented where a person might read it."""
    indent = 1 if len(document["rows"]) <= MANY else None
    return (json.dumps(document, indent=indent, allow_nan=False) + "\n").encode()


def write(document: Mapping[str, Any], folder: Path) -> list[Path]:
    """Write a document in every form.

    Args:
        document: of any verb, with `schema` and `rows`.
        folder: made where it is missing; files of the same names are replaced.

    Returns:
        The files written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    name = verb(document)
    made = page(document)
    rows = frame(document["rows"])
    contents: dict[str, bytes] = {
        f"{name}.json": _json(document),
        f"{name}.csv": rows.to_csv(index=False, lineterminator="\n").encode(),
        f"{name}.parquet": rows.to_parquet(index=False),
        f"{name}.html": html(made).encode(),
    }
    for figure in made.figures:
        contents[f"{figure.name}.png"] = figure.png
        contents[f"{figure.name}.svg"] = figure.svg
    for file, content in contents.items():
        (folder / file).write_bytes(content)
    return [folder / file for file in contents]
