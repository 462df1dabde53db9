"""Every planted fault is found by the audit, and every check of the audit finds one."""

from pathlib import Path

import pytest

from windage.analysis.audit.entry import ALL_PROPERTIES
from windage.analysis.audit.faulty_losses import LOSSES
from windage.analysis.audit.logged import Subject
from windage.analysis.audit.planted import (
    PLACES,
    document,
    faults,
    held_by_the_right_loss,
    markdown,
)
from windage.analysis.audit.words import LOSS_CLAIMS
from windage.estimators.catalogue import CATALOGUE

FAULTS = {fault.name: fault for fault in faults()}
TABLE = Path(__file__).parents[1] / "docs" / "mutants.md"


def committed() -> dict[str, tuple[str, ...]]:
    """The checks that find each fault, as docs/mutants.md says."""
    rows = [line.strip("| ").split(" | ") for line in TABLE.read_text("utf-8").splitlines()]
    return {r[0]: tuple(r[3].strip("`").split("`, `")) for r in rows if len(r) == 4}


def test_there_are_many_faults_of_every_stage():
    planted = sum(len(builders) for _, builders in PLACES)
    assert len(FAULTS) == planted + sum(map(len, LOSSES.values()))
    assert len(FAULTS) >= 60


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_found_by_every_check_that_the_table_names(name):
    expected = committed()[name]
    found = FAULTS[name].find(0, expected)
    assert found, f"{name} survives: {FAULTS[name].words}"
    assert found == expected


SLOW = ("dapo", "cispo", "token_tis", "gspo")


@pytest.mark.parametrize(
    "entry", [pytest.param(n, marks=[pytest.mark.long] * (n in SLOW)) for n in LOSSES]
)
def test_checks_that_find_a_faulty_loss_pass_the_right_one(entry):
    table = committed()
    used = {check for function in LOSSES[entry] for check in table[function.__name__]}
    assert used <= set(held_by_the_right_loss(entry, 0))


@pytest.mark.long
def test_the_table_is_what_the_command_prints():
    assert markdown(document()["rows"]) == TABLE.read_text(encoding="utf-8")


def test_the_table_has_no_other_lines():
    assert list(committed())[1:] == list(FAULTS)


def test_every_check_finds_a_fault():
    """By the table, whose every line the test above decides."""
    text = TABLE.read_text(encoding="utf-8")
    assert [name for name in (*ALL_PROPERTIES, *LOSS_CLAIMS) if f"`{name}`" not in text] == []


def test_faults_replace_what_the_unmutated_entry_has():
    """`test_audit` shows that every entry passes; the fault alone must make the difference."""
    for _, builders in PLACES:
        for build in builders:
            subject = build()
            name = subject.estimator.name
            assert name in CATALOGUE and subject != Subject(estimator=CATALOGUE[name])
            assert subject.estimator.claims == CATALOGUE[name].claims
