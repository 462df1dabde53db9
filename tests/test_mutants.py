"""Every planted fault is found by the audit, and every check of the audit finds one."""

from functools import cache
from pathlib import Path

import pytest

from windage.analysis.audit.entry import ALL_PROPERTIES
from windage.analysis.audit.faults import STAGES
from windage.analysis.audit.faulty_losses import LOSSES
from windage.analysis.audit.logged import Subject
from windage.analysis.audit.planted import faults, markdown, row
from windage.analysis.audit.words import LOSS_CLAIMS
from windage.estimators.catalogue import CATALOGUE

FAULTS = {fault.name: fault for fault in faults()}
TABLE = Path(__file__).parents[1] / "docs" / "mutants.md"


@cache
def killers(name: str) -> tuple[str, ...]:
    return FAULTS[name].find(0)


def committed() -> dict[str, str]:
    """The line of each fault in docs/mutants.md."""
    lines = TABLE.read_text(encoding="utf-8").splitlines()
    return {line.split(" | ")[0].removeprefix("| "): line for line in lines if line[:2] == "| "}


def test_there_are_many_faults_of_every_stage():
    assert len(FAULTS) == sum(map(len, STAGES.values())) + sum(map(len, LOSSES.values()))
    assert len(FAULTS) >= 60


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_found_and_the_table_says_by_what(name):
    found = killers(name)
    assert found, f"{name} survives: {FAULTS[name].words}"
    line = markdown([row(FAULTS[name], found).document()]).splitlines()[-1]
    assert committed()[name] == line, "python -m windage.analysis.audit.planted > docs/mutants.md"


def test_the_table_has_no_other_lines():
    assert list(committed())[1:] == list(FAULTS)


def test_every_check_finds_a_fault():
    """By the table, whose every line the test above decides."""
    text = TABLE.read_text(encoding="utf-8")
    assert [name for name in (*ALL_PROPERTIES, *LOSS_CLAIMS) if f"`{name}`" not in text] == []


def test_faults_replace_what_the_unmutated_entry_has():
    """`test_audit` shows that every entry passes; the fault alone must make the difference."""
    for builders in STAGES.values():
        for build in builders:
            subject = build()
            name = subject.estimator.name
            assert name in CATALOGUE and subject != Subject(estimator=CATALOGUE[name])
            assert subject.estimator.claims == CATALOGUE[name].claims
