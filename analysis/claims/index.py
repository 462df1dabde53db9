"""Ids of the claims and the documents they come from, without importing torch.

A test keeps this table equal to the registry.
"""

from __future__ import annotations

from collections.abc import Iterable

from windage.estimators.errors import BadInput, unknown

SOURCES = {
    "B": "002_8464fbe0d99a5ade.txt",
    "T": "000_1e03532da661b61f.txt",
    "G": "001_88646b8d01535be0.txt",
}
COUNTS = {"B": 50, "T": 30, "G": 10}
IDS = tuple(f"{letter}-{n:02d}" for letter, count in COUNTS.items() for n in range(1, count + 1))
KINDS = ("exact", "simulated", "counted")


def source(claim_id: str) -> str:
    """The document of a claim.

    Example:
        >>> source("G-07")
        '001_88646b8d01535be0.txt'
    """
    return SOURCES[claim_id[0]]


def chosen(only: Iterable[str] | None, document: str | None) -> tuple[str, ...]:
    """Ids picked by name and by document, in the order of the documents.

    Args:
        only: ids; None: all.
        document: name of a document's file, or the start of one; None: all.

    Raises:
        BadInput: an id or a document that does not exist (the message names the nearest), or
            ids that are all of other documents.

    Example:
        >>> chosen(["T-03", "B-17"], None)
        ('B-17', 'T-03')
    """
    wanted = IDS if only is None else tuple(only)
    for name in wanted:
        if name not in IDS:
            raise unknown("claim", name, IDS)
    if document is None:
        return tuple(i for i in IDS if i in wanted)
    if not any(name.startswith(document) for name in SOURCES.values()) or not document:
        raise unknown("source", document, SOURCES.values())
    found = tuple(i for i in IDS if i in wanted and source(i).startswith(document))
    if not found:
        first = source(wanted[0])
        raise BadInput(f"none of {', '.join(wanted)} is of {document}; {wanted[0]} is of {first}")
    return found
