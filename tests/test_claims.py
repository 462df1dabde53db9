"""Claims: every row measures what the specification expects, and the frame fails where it must."""

import json
from collections import Counter
from dataclasses import replace

import jaxtyping
import pandas as pd
import pytest
import torch

from windage.analysis.claims import b_advantage, problems
from windage.analysis.claims import claim as frame
from windage.analysis.claims.claim import Outcome, around, band, counted, equal, exact, zero
from windage.analysis.claims.document import document, figure_rows
from windage.analysis.claims.index import COUNTS, IDS, SOURCES, chosen, source
from windage.analysis.claims.measures import (
    alone,
    central_differences,
    moments,
    path,
    prefix_values,
    recorded,
    response_update,
    scores,
)
from windage.analysis.claims.page import as_expected, text
from windage.analysis.claims.pictures import PICTURES, picture, points
from windage.analysis.claims.reported import REPORTED
from windage.analysis.claims.running import Row, registry, run
from windage.cli.main import main
from windage.estimators.aggregation import sequence_mean
from windage.estimators.catalogue import get
from windage.estimators.errors import BadInput
from windage.estimators.member import use
from windage.toy.objective import objective

CLAIMS = registry()
CONDITIONAL = {
    "B": (3, 5, 6, 11, 15, 16, 33, 35, 36, 40, 41, 42),
    "T": (2, 3, 5, 8, 11, 13, 16, 17, 18, 19, 27),
    "G": (2, 4, 7, 9),
}
LONG = ("B-15", "B-29", "B-38", "B-41", "T-01", "T-03", "T-07", "T-08")
REFUTED = ["T-07", "T-26"]


def test_every_claim_of_the_three_documents_has_a_row():
    assert list(CLAIMS) == list(IDS)
    assert len(IDS) == 90 and COUNTS == {"B": 50, "T": 30, "G": 10}
    assert all(claim.id == name for name, claim in CLAIMS.items())


def test_the_expected_verdicts_are_those_of_the_summary():
    by_verdict = {name: claim.verdict for name, claim in CLAIMS.items()}
    assert [n for n, v in by_verdict.items() if v == "holds only if"] == [
        f"{letter}-{n:02d}" for letter, numbers in CONDITIONAL.items() for n in numbers
    ]
    assert [n for n, v in by_verdict.items() if v == "does not hold as stated"] == REFUTED
    assert Counter(by_verdict.values())["holds"] == 61


@pytest.fixture
def without_shapes():
    """Shape checks cost more than the work where thousands of small steps are taken."""
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", False)


@pytest.mark.parametrize("name", IDS)
def test_claim(name, request):
    if name in LONG or CLAIMS[name].kind == "simulated":
        request.getfixturevalue("without_shapes")
    row = run(CLAIMS[name])
    assert row.failures == []
    assert row.claim.kind in {figure.kind for figure in row.outcome.figures}
    assert row.outcome.seeds or row.claim.kind != "simulated"
    names = [figure.name for figure in row.outcome.figures]
    assert len(set(names)) == len(names)
    shown = row.document()
    assert json.loads(json.dumps(shown, allow_nan=False)) == shown
    if name in PICTURES:
        assert all(len(points(shown, n)) >= 2 for n in PICTURES[name].curves.values())


def test_problems_have_their_check_values():
    tree = problems.tree()
    policy, sampler = problems.response_mass(tree)
    weight = policy / sampler
    ratios = (tree.logp - tree.behavior_logp).exp()
    goal, two_valued = objective(tree), objective(problems.binary(tree))
    eight = [problems.octet(a) for a in (0.3, 0.6, 1.0)]
    squares = [float((p.square() / q).sum()) for p, q in map(problems.response_mass, eight)]
    placebo = problems.placebo()
    q, p = placebo.behavior_logp, placebo.logp
    timed = problems.rewarded(problems.length(1.0), problems.length(1.0).lengths)
    table = [
        ("J", goal.value, "0.503958"),
        ("gradient", goal.gradient.norm(), "0.092734"),
        ("J, binary", two_valued.value, "0.456529"),
        ("gradient, binary", two_valued.gradient.norm(), "0.212074"),
        ("E_mu R", (sampler * tree.rewards).sum(), "0.515241"),
        ("E_mu w^2", (sampler * weight.square()).sum(), "1.429525"),
        ("least ratio", ratios.min(), "0.6122"),
        ("largest ratio", ratios.max(), "2.3963"),
        ("largest w", weight.max(), "5.9653"),
        ("E_pi T", (policy * tree.lengths).sum(), "2.354179"),
        ("J, OCTET", objective(eight[0]).value, "0.355513"),
        ("gradient, OCTET", objective(eight[0]).gradient.norm(), "0.141694"),
        *(("w^2", s, t) for s, t in zip(squares, ("1.392", "3.909", "43.14"), strict=True)),
        ("E T", objective(timed).value, "4.99934"),
        ("KL", (q.exp() * (q - p)).sum(), "0.05842"),
        ("distance", (q.exp() - p.exp()).norm(), "0.07598"),
        ("positives of SIX", (problems.six().rewards > 0).double() @ _mu(), "0.53"),
        ("maximal entropy", torch.log(torch.tensor(6.0)), "1.7918"),
    ]
    assert [name for name, value, printed in table if not exact(name, value, printed).ok] == []
    assert (tree.tree.prefixes, tree.tree.leaves) == (7, 15)
    assert (eight[0].tree.prefixes, eight[0].tree.leaves) == (255, 256)
    assert (problems.fix3().tree.prefixes, problems.fix3().tree.leaves) == (7, 8)
    assert problems.cache().shared.problem.tree.leaves == 81
    one = problems.pair(0.3)
    assert objective(one).gradient[0, 0, 0].item() == pytest.approx(0.3 * 0.7)
    assert objective(problems.deck()).value.item() == pytest.approx(0.5)


def _mu():
    return problems.response_mass(problems.six())[1][0]


@pytest.mark.parametrize("name", ["reinforce", "token_tis", "centered_tis", "grpo", "centered"])
def test_the_update_for_long_ascents_is_the_engines_mean(name):
    for problem in (problems.tree(), problems.bonus(1.0), problems.pair(0.2, 0.7)):
        estimator = replace(alone(name, 0.2), aggregation=use(sequence_mean))
        update = response_update(estimator, problem)
        logits = problem.logits + 0.1 * torch.sin(
            torch.arange(problem.logits.numel()).double()
        ).view_as(problem.logits)
        elsewhere = replace(problem, logits=logits)
        found = update(elsewhere.logits, elsewhere.behavior_logp)
        assert torch.allclose(found, moments(estimator, elsewhere).mean, rtol=0, atol=1e-14)


def test_a_path_hands_out_the_logits_after_the_steps_asked_for():
    start = torch.zeros(1, 1, 2, dtype=torch.float64)
    ends = path(lambda z, q: torch.ones_like(z), start, lambda z: z, at=(0, 1, 3), rate=0.5)
    assert [end[0, 0, 0].item() for end in ends] == [0.0, 0.5, 1.5]


def test_helpers_agree_with_definitions():
    problem = problems.fresh_tree()
    assert prefix_values(problem)[0].item() == pytest.approx(objective(problem).value.item())
    mass = problems.response_mass(problem)[0][0]
    assert torch.einsum("m,mpnv->pnv", mass, scores(problem)).abs().max() < 1e-15
    slope = central_differences(lambda z: (z**2).sum(), torch.tensor([1.0, -2.0]).double())
    assert torch.allclose(slope, torch.tensor([2.0, -4.0]).double())
    index = torch.tensor([[[0]]])
    batch = recorded(problem, problems.tree().behavior_logp)(_one(problem, index), index)
    assert batch.behavior_logp is not None
    assert batch.behavior_logp[0, 0, 0, 0].item() == problems.tree().behavior_logp[0, 0, 2].item()


def _one(problem, index):
    from windage.toy.exact.tuples import Responses

    return Responses(problem).batch(index, head=False)


def test_a_printed_number_is_met_to_one_unit_in_its_last_digit():
    assert exact("x", 0.3491, "0.3490").ok and not exact("x", 0.34911, "0.3490").ok
    assert exact("x", -2.0410, "−2.0411").ok and exact("x", 2550.78, "2,550.7").ok
    assert exact("x", 6.507e6, "6.506e6").ok and not exact("x", 6.508e6, "6.506e6").ok
    assert exact("x", 59.9, "59").ok and not exact("x", 60.1, "59").ok
    assert not exact("x", float("nan"), "0.1").ok


def test_other_figures_are_met_inside_their_limits_only():
    assert zero("x", 1e-12).ok and not zero("x", 2e-12).ok and not zero("x", float("nan")).ok
    assert equal("x", 2e6 + 1e-6, 2e6).ok and not equal("x", 2e6 + 1e-5, 2e6).ok
    assert counted("x", 3, 3).ok and not counted("x", 3.0000001, 3).ok
    assert band("x", 1, 1, 2).ok and not band("x", 2.1, 1, 2).ok and not band("x", 0.9, 1, None).ok
    assert not band("x", float("nan"), None, None).ok and not band("x", float("nan"), 0, 1).ok
    assert around("x", 64.0 * 1.03, 64.0, 0.03 * 64.0).ok
    assert not around("x", 64.0 * 1.031, 64.0, 0.03 * 64.0).ok


@pytest.mark.parametrize(
    ("stands", "limited", "verdict"),
    [
        (True, False, "holds"),
        (True, True, "holds only if"),
        (False, False, "does not hold as stated"),
        (False, True, "does not hold as stated"),
    ],
)
def test_the_verdict_follows_from_what_was_measured(stands, limited, verdict):
    assert Outcome(figures=[], stands=stands, limited=limited).verdict == verdict


def test_a_claim_needs_a_free_id_and_a_condition_where_it_is_limited():
    words = {"section": "s", "statement": "s", "problem": "p", "formula": "f"}
    with pytest.raises(ValueError, match="B-02 is taken"):
        frame.claim("B-02", **words)
    with pytest.raises(ValueError, match="B-51 is unknown"):
        frame.claim("B-51", **words)


def test_a_limit_needs_its_condition(monkeypatch):
    monkeypatch.delitem(frame.REGISTRY, "B-02")
    words = {"section": "s", "statement": "s", "problem": "p", "formula": "f"}
    with pytest.raises(ValueError, match="condition"):
        frame.claim("B-02", **words, verdict="holds only if")
    with pytest.raises(ValueError, match="condition"):
        frame.claim("B-02", **words, condition="c")


def test_a_wrong_estimator_changes_figures_and_verdict(monkeypatch):
    swapped = {"rloo": "group_mean"}
    monkeypatch.setattr(b_advantage, "get", lambda name: get(swapped.get(name, name)))
    row = run(CLAIMS["B-08"])
    assert row.outcome.verdict == "does not hold as stated"
    assert any(words.startswith("bias of rloo is 0.5") for words in row.failures)
    assert "verdict 'does not hold as stated', expected 'holds'" in row.failures


def test_ids_are_chosen_by_name_and_document():
    assert chosen(["T-12", "B-07"], None) == ("B-07", "T-12")
    assert chosen(None, SOURCES["G"]) == tuple(f"G-{n:02d}" for n in range(1, 11))
    assert chosen(["T-12", "B-07"], "000") == ("T-12",)
    assert source("T-12") == SOURCES["T"]
    for only, document_, nearest in (
        (["b-07"], None, "B-07"),
        (["B-07", "X-30"], None, "T-30"),
        (None, "002_8464fbe0d99a5ade.tx_", SOURCES["B"]),
        (None, "", ""),
    ):
        with pytest.raises(BadInput, match=f"nearest valid name: {nearest}"):
            chosen(only, document_)


def test_statements_that_are_only_reported_name_rows_that_stand_in():
    assert len(REPORTED) == 8
    assert all(i in IDS for r in REPORTED for i in r.stands_in)
    assert "0.0355, 0.1111, 0.2381" in " ".join(r.statement for r in REPORTED)


def false_claim(monkeypatch, **changes):
    """B-22 with a figure that is wrong."""
    wrong = replace(CLAIMS["B-22"], **changes)
    monkeypatch.setitem(frame.REGISTRY, "B-22", wrong)


def test_a_wrong_figure_exits_with_1_and_names_the_id(monkeypatch, capsys):
    outcome = Outcome(figures=[exact("bias", 0.35, "0.20")], stands=True)
    false_claim(monkeypatch, measure=lambda: outcome)
    assert main(["claims", "--only", "B-22,B-04"]) == 1
    output = capsys.readouterr()
    assert "bias  0.35  0.20 ± 0.01  FAILED" in output.out
    assert output.err.splitlines() == [
        "windage claims: B-22: bias is 0.35, expected 0.20 ± 0.01",
        "windage claims: failed: B-22",
    ]


def test_a_wrong_verdict_exits_with_1(monkeypatch, capsys):
    outcome = Outcome(figures=[exact("bias", 0.2, "0.2")], stands=False)
    false_claim(monkeypatch, measure=lambda: outcome)
    assert main(["claims", "--only", "B-22"]) == 1
    output = capsys.readouterr()
    assert output.err.splitlines()[-1] == "windage claims: failed: B-22"
    assert "expected: holds" in output.out


def test_json_is_one_document_with_the_fields_of_the_specification(capsys):
    assert main(["claims", "--only", "G-06,B-03,B-36", "--json"]) == 0
    output = capsys.readouterr()
    found = json.loads(output.out)
    assert found["schema"] == "windage/claims/1"
    assert [row["id"] for row in found["rows"]] == ["B-03", "B-36", "G-06"]
    fields = "id source section statement kind figures verdict expected_verdict condition seeds"
    assert all([*row] == [*fields.split(), "standard_error", "seconds"] for row in found["rows"])
    figures = [figure for row in found["rows"] for figure in row["figures"]]
    assert all([*f] == ["name", "value", "expected", "tolerance", "ok"] for f in figures)
    simulated = found["rows"][1]
    assert simulated["seeds"] == [*range(16)]
    assert list(simulated["standard_error"]) == ["entropy, fresh noise, n = 1,000"]
    assert found["rows"][0]["condition"] and found["rows"][2]["condition"] is None
    assert found["failed"] == [] and "B-36" in output.err


def test_text_is_grouped_by_document_and_section(capsys):
    assert main(["claims", "--only", "B-02,B-04,G-06"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line for line in lines if line in SOURCES.values()] == [SOURCES["B"], SOURCES["G"]]
    assert lines.count(CLAIMS["B-02"].section) == 1
    statement, note = (
        next(i for i, line in enumerate(lines) if w in line) for w in ("G-06", "Note")
    )
    assert statement < note
    assert any(line.strip().startswith("Verdict (") and "holds" in line for line in lines)
    assert lines[-1].startswith("3 claims in ") and lines[-1].endswith("Not as expected: none.")


def test_kinds_and_sources_select(capsys):
    assert main(["claims", "--source", SOURCES["G"], "--kind", "counted"]) == 0
    output = capsys.readouterr().out
    assert "G-06" in output and "G-05" not in output and "reported" not in output


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--only", "b-07"], "nearest valid name: B-07"),
        (["--only", "B-07,"], "unknown claim ''"),
        (["--source", "003.txt"], "nearest valid name: "),
        (["--kind", "exakt"], "nearest valid name: exact"),
        (["--only", "B-02", "--kind", "simulated"], "none of B-02"),
        (["--only", "B-02", "--source", "000_1e03532da661b61f.txt"], "none of B-02"),
    ],
)
def test_what_selects_nothing_is_bad_input(words, message, capsys):
    assert main(["claims", *words]) == 2
    output = capsys.readouterr()
    assert output.out == "" and output.err.count("\n") == 1
    assert output.err.startswith("windage claims: ") and message in output.err


def test_the_page_shows_each_claim_with_problem_formula_figures_and_picture(tmp_path, capsys):
    assert main(["claims", "--only", "B-09,B-24", "--out", str(tmp_path)]) == 0
    capsys.readouterr()
    page = (tmp_path / "claims.html").read_text()
    for claim in (CLAIMS["B-09"], CLAIMS["B-24"]):
        assert claim.problem.split(";")[0] in page.replace("&#39;", "'")
        assert claim.formula.split(";")[0] in page
        assert (tmp_path / f"{claim.id.lower()}.svg").exists()
    assert page.count("<figure>") == 2
    flat = pd.read_parquet(tmp_path / "claims_figures.parquet")
    assert set(flat["id"]) == {"B-09", "B-24"} and bool(flat["ok"].all())
    assert bool((flat["lowest"] <= flat["value"]).all())
    assert len(pd.read_csv(tmp_path / "claims_figures.csv")) == len(flat)


def test_flat_rows_keep_open_bands_and_failures():
    figures = [band("a", 1.0, 2.0, None), exact("b", 0.5, "0.5")]
    row = Row(claim=CLAIMS["B-22"], outcome=Outcome(figures=figures, stands=True), seconds=1.0)
    found = document([row], seconds=1.0, reported=True)
    first, second = figure_rows(found)
    assert (first["lowest"], first["highest"], first["ok"]) == (2.0, None, False)
    assert second["lowest"] == pytest.approx(0.4) and second["ok"]
    assert found["failed"] == ["B-22"] and len(found["reported"]) == 4
    shown = found["rows"][0]
    assert not as_expected(shown) and "FAILED" in text(shown, "", 80)
    assert picture(shown) is None
