"""The audit of entries and of losses, from Python and from the command line."""

import csv
import json
import sys
from dataclasses import replace

import pytest
import torch

from windage.analysis.audit import samples
from windage.analysis.audit.coefficients import PULLS
from windage.analysis.audit.entry import ALL_PROPERTIES, audit, failures
from windage.analysis.audit.faulty_losses import min_before_multiply, right
from windage.analysis.audit.foreign import audit_loss, judge
from windage.analysis.audit.likeness import closeness, comparable, departure, given
from windage.analysis.audit.loss import CALLS, load, tried
from windage.analysis.audit.loss_claims import CLAIMS
from windage.analysis.audit.moments import generated, identity
from windage.analysis.audit.rows import decide
from windage.analysis.audit.words import LOSS_CLAIMS, SIGNATURES
from windage.cli import main as frame
from windage.estimators.catalogue import CATALOGUE, get
from windage.estimators.claims import ALWAYS, PROPERTIES, VALUED, VALUES, Claim, claims, how
from windage.estimators.errors import BadInput
from windage.toy.objective import objective

LOSSES = """
import torch


def ratio(logp, behavior_logp, mask):
    return torch.where(mask, logp - behavior_logp, 0.0).exp()


def grpo(logp, behavior_logp, advantages, mask):
    r, a = ratio(logp, behavior_logp, mask), advantages.unsqueeze(-1)
    terms = torch.where(mask, torch.minimum(r * a, r.clamp(0.8, 1.2) * a), 0.0)
    return -(terms.sum(-1) / mask.sum(-1)).mean()


def grpo_by_token(logp, behavior_logp, advantages, mask):
    r = (torch.where(mask.bool(), logp - behavior_logp, 0.0)).exp()
    terms = torch.minimum(r * advantages, r.clamp(0.8, 1.2) * advantages) * (1 - (1 - mask))
    return -(terms.sum(-1) / mask.sum(-1)).mean()


def single(logp, behavior_logp, advantages, mask):
    r = (logp - behavior_logp).float().masked_fill(~mask, 0.0).exp()
    return -(r * advantages.float()[:, None])[mask].sum() / len(mask)


def in_place(logp, behavior_logp, advantages, mask):
    logp -= behavior_logp
    logp[~mask] = 0.0
    return -(logp.exp() * advantages[:, None])[mask].sum() / len(mask)


def dr_grpo(logp, behavior_logp, advantages, mask, length=None):
    r, a = ratio(logp, behavior_logp, mask), advantages.unsqueeze(-1)
    terms = torch.where(mask, torch.minimum(r * a, r.clamp(0.8, 1.2) * a), 0.0)
    return -terms.sum() / (len(mask) * (length or mask.shape[1]))


def dr_grpo_1024(logp, behavior_logp, advantages, mask):
    return dr_grpo(logp, behavior_logp, advantages, mask, 1024)


def verl(old_log_prob, log_prob, advantages, response_mask, loss_agg_mode, config=None, **rest):
    assert loss_agg_mode == "token-mean" and config.get("clip_ratio_c", 0) == 3.0
    r = torch.clamp(log_prob - old_log_prob, -20, 20).exp()
    clipped = r.clamp(1 - config.clip_ratio_low, 1 + config.clip_ratio_high)
    terms = torch.where(response_mask, torch.maximum(-advantages * r, -advantages * clipped), 0.0)
    return terms.sum() / response_mask.sum(), {"clip": 0.0}


def trl(model, inputs):
    x = inputs["per_token_logps"] - inputs["old_per_token_logps"]
    mask = inputs["completion_mask"]
    r = torch.where(mask.bool(), x, 0.0).exp()
    a = inputs["advantages"].unsqueeze(1)
    terms = -torch.min(r * a, r.clamp(0.8, 1.2) * a) * mask
    return (terms.sum(-1) / mask.sum(-1)).mean()


def tinker(data, logprobs):
    total = 0.0
    for datum, logp in zip(data, logprobs):
        fields = datum.loss_fn_inputs
        old, a = fields["logprobs"].to_torch(), fields["advantages"].to_torch()
        mask = fields["mask"].to_torch().bool()
        total = total - (torch.where(mask, logp - old, 0.0).exp() * a).sum()
    return total / len(data), {}


def noisy(logp, behavior_logp, advantages, mask):
    print("a line of the user's own")
    return -(torch.where(mask, logp, 0.0) * advantages[:, None]).sum() / len(mask)


def raises(logp, behavior_logp, advantages, mask):
    raise RuntimeError("no\\nway")


def exits(logp, behavior_logp, advantages, mask):
    raise SystemExit(3)


def rows(logp, behavior_logp, advantages, mask):
    return (logp * mask).sum(-1)


def nan(logp, behavior_logp, advantages, mask):
    return (logp * float("nan")).sum()


def constant(logp, behavior_logp, advantages, mask):
    return torch.tensor(1.0)


def other_leaf(logp, behavior_logp, advantages, mask):
    return torch.ones((), requires_grad=True) * 2


def number(logp, behavior_logp, advantages, mask):
    return 1.0


def three(logp, behavior_logp, advantages):
    return logp.sum()


def broken_backward(logp, behavior_logp, advantages, mask):
    doubled = logp * 2
    square = doubled.square()
    doubled += 1
    return square.sum()


value = 3
"""


@pytest.fixture
def here(tmp_path, monkeypatch):
    """A working directory with the module of losses above."""
    (tmp_path / "my_losses.py").write_text(LOSSES)
    (tmp_path / "boom.py").write_text("raise ValueError('at import')\n")
    (tmp_path / "needy.py").write_text("import no_such_package_at_all\n")
    (tmp_path / "leaves.py").write_text("raise SystemExit(3)\n")
    (tmp_path / "colorsys.py").write_text("raise ValueError('prepended')\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [p for p in sys.path if p not in ("", str(tmp_path))])
    for name in ("my_losses", "boom", "needy", "leaves"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    yield tmp_path
    for name in ("my_losses", "boom", "needy", "leaves"):
        sys.modules.pop(name, None)


def answer(capsys, *words):
    """Exit status and the document of `windage audit ... --json`."""
    status = frame.main(["audit", *words, "--json"])
    return status, json.loads(capsys.readouterr().out)


@pytest.mark.parametrize("name", CATALOGUE)
def test_every_entry_is_as_claimed_and_every_claim_is_decided(name):
    entry = CATALOGUE[name]
    rows = audit(entry)
    assert failures(rows) == []
    decided = {row.property for row in rows if row.ok}
    assert {claim.property for claim in entry.claims} <= decided
    silent = set(ALWAYS) - decided
    allowed = {"rejected_rows"} if not entry.admission else set()
    pulled = any(member.name in PULLS for member in entry.penalties)
    allowed |= set() if pulled and name != "reinforce_plus_plus" else {"penalty"}
    allowed |= set() if entry.compares else {"lone_rows"}
    assert silent == allowed


def test_every_boolean_claim_is_declared_by_every_entry():
    for entry in CATALOGUE.values():
        assert set(PROPERTIES) <= {claim.property for claim in entry.claims}
        assert {"weight", "zero_region", "share"} <= {claim.property for claim in entry.claims}


@pytest.mark.parametrize(
    "name", ["rloo", "positives_only", "centered_tis", "pkpo", "maxrl", "reinforce_plus_plus"]
)
def test_the_opposite_of_a_boolean_claim_fails(name):
    entry = get(name)
    flipped = tuple(replace(c, holds=not c.holds) for c in entry.claims if c.value is None)
    rows = audit(replace(entry, claims=flipped), only=PROPERTIES)
    assert len(rows) == len(PROPERTIES) and all(row.ok is False for row in rows)


@pytest.mark.parametrize(
    "name",
    [
        "dr_grpo",
        "topr",
        "icepop",
        "maxrl",
        "prompt_mean",
        "gmpo",
        "decoupled_tis",
        pytest.param("clip_cov", marks=pytest.mark.long),
        "geometric_mask",
        "dppo_kl",
    ],
)
def test_any_other_value_of_a_valued_claim_fails(name):
    entry, tried_ = get(name), set()
    for claim in entry.claims:
        for value in VALUES.get(claim.property, ())[:: 4 if claim.property == "weight" else 1]:
            if value == claim.value or claim.of is not None:
                continue
            wrong = replace(entry, claims=(replace(claim, value=value),))
            try:
                rows = audit(wrong, only=[claim.property])
            except KeyError:  # a rule of settings that the entry does not have
                continue
            assert [row.ok for row in rows] == [False], (claim, value)
            tried_.add(claim.property)
    assert {"weight", "zero_region", "share"} <= tried_


def test_a_claim_has_a_known_property_and_value():
    with pytest.raises(BadInput, match="nearest valid name: bounded"):
        Claim(property="bound")
    for factor in ("ratios; own token", "ratio; own tokens", "ratio; own token; policy / teacher"):
        with pytest.raises(BadInput, match=r"unknown (weight rule|reach|pair of policies)"):
            Claim(property="weight", value=f"1 × {factor}")
    with pytest.raises(BadInput, match="1 / N"):
        Claim(property="share", value="1 / M")
    assert [c.holds for c in claims("bounded") if c.property == "bounded"] == [True]
    assert how(share="1 / N")[0].describe() == "1 / N"
    assert set(ALL_PROPERTIES) == {*PROPERTIES, *VALUED, *ALWAYS}


def test_a_cap_out_of_reach_is_reported_not_failed():
    rows = {row.property: row for row in audit(get("token_tis", cap=1e6))}
    assert rows["zero_drift"].verdict == "holds" and rows["zero_drift"].ok is None
    assert failures(rows.values()) == []


def test_what_lies_between_holds_and_shows_is_undecided():
    assert [decide(x) for x in (0.0, 1e-10, 1e-9, 1e-6, float("inf"))] == [
        "holds",
        "holds",
        "undecided",
        "does not hold",
        "does not hold",
    ]
    assert decide(float("nan")) == "does not hold"


def test_all_from_the_policy_is_the_gradient():
    for case in generated(3):
        problem = case.problem
        zero = torch.zeros(problem.prompts, dtype=torch.float64)
        mean = identity(problem, "prefix pi, token pi, rest pi", zero)
        assert torch.allclose(mean, objective(problem).gradient, atol=1e-14)


def test_two_seeds_give_two_sets_of_problems():
    a, b = generated(0)[0].problem, generated(1)[0].problem
    assert not torch.equal(a.logits, b.logits)
    assert torch.equal(a.logits, generated(0)[0].problem.logits)


@pytest.mark.parametrize("words", comparable())
def test_the_surrogate_of_an_entry_is_like_it_and_like_no_other(words):
    names = comparable()[words]
    loss = tried(names[0], right(get(names[0], length=8) if "length" in words else get(names[0])))
    inputs = samples.judged_samples(0, random=40)
    rows, examples, found = judge(loss, inputs, like=(names[0], get(names[0])), required=[])
    assert [row.ok for row in rows] == [True] and examples == []
    closest = [c for c in closeness(inputs, found) if c.equal]
    plain = {"naive", *comparable()["none · token_sum"]}  # weights of 1, in two spellings
    normalized = {"self_normalized", "self_normalized_batch"}  # rows without groups are one group
    assert names in [c.names for c in closest]
    assert len(closest) == 1 or {n for c in closest for n in c.names} in (plain, normalized)


def test_a_wrong_loss_is_shown_by_the_smallest_input():
    found = audit_loss(tried("wrong", min_before_multiply), like=("grpo", get("grpo")))
    (example,) = found.counter_examples
    assert example.sample.mask.shape == (1, 1)
    assert example.sample.advantages.tolist() == [-1.0]
    place: dict = {}
    exec(example.python(), place)
    loss = min_before_multiply(*(place[k] for k in ("logp", "behavior_logp", "advantages", "mask")))
    loss.backward()
    assert torch.allclose(-place["logp"].grad, example.found, atol=1e-10)
    assert departure(example.found, given(get("grpo"), [example.sample])[0]) > 1


def test_shrinking_keeps_the_failure_and_no_more():
    big = samples.judged_samples(0)[-1]
    small = samples.shrink(big, lambda s: bool((s.mask & (s.log_ratio.abs() > 0)).any()))
    assert small.mask.shape == (1, 1) and small.mask.all()


def test_judged_inputs_are_finite_and_near():
    every = samples.judged_samples(5)
    assert len(every) > 300
    for s in every:
        assert torch.isfinite(s.logp).all() and torch.isfinite(s.behavior_logp).all()
        assert s.log_ratio.abs().max() <= samples.LIMIT + 1e-9
        assert s.mask.any(-1).all()
        assert (s.logp[s.mask] <= 0).all() and (s.behavior_logp[s.mask] <= 0).all()
    assert any((s.logp.abs() > 1e20).any() for s in every)
    assert any((s.advantages == 0).any() for s in every)
    assert any(s.mask.shape[0] == s.mask.shape[1] > 1 for s in every)


@pytest.mark.parametrize(
    ("loss", "entry", "signature", "layout"),
    [
        ("grpo", "grpo", "plain", "advantages [N], mask boolean"),
        ("grpo_by_token", "grpo", "plain", "advantages [N T], mask 0.0 or 1.0"),
        ("single", "token_is", "plain", "advantages [N], mask boolean"),
        ("in_place", "token_is", "plain", "advantages [N], mask boolean"),
        ("dr_grpo_1024", "dr_grpo:length=1024", "plain", "advantages [N], mask boolean"),
        ("verl", "ppo", "verl", ""),
        ("trl", "grpo", "trl", "advantages [N], mask boolean"),
        ("tinker", "token_is", "tinker", ""),
    ],
)
def test_a_loss_of_any_signature_is_held_to_its_entry(here, capsys, loss, entry, signature, layout):
    status, document = answer(capsys, f"my_losses:{loss}", "--like", entry)
    assert (status, document["passed"], document["failed"]) == (0, True, 0)
    (called,) = document["losses"]
    assert (called["signature"], called["layout"]) == (signature, layout)
    assert document["ran_user_code"] == [f"my_losses:{loss}"]
    assert called["closest"][0]["entries"][0] == entry.partition(":")[0]


@pytest.mark.parametrize(
    ("loss", "entry"),
    [
        ("grpo", "ppo"),
        ("grpo", "grpo:clip_high=0.21"),
        ("dr_grpo_1024", "dr_grpo:length=1000"),
        ("verl", "grpo"),
        ("trl", "gspo"),
        ("tinker", "token_tis"),
    ],
)
def test_a_loss_unlike_an_entry_fails_with_an_example(here, capsys, loss, entry):
    status, document = answer(capsys, f"my_losses:{loss}", "--like", entry)
    assert (status, document["passed"], document["failed"]) == (1, False, 1)
    (example,) = document["counter_examples"]
    assert example["property"] == f"like {entry}"
    assert example["found"] != example["expected"]
    assert len(example["logp"]) <= 2 and len(example["logp"][0]) <= 2


def test_a_constant_length_that_is_not_given_is_read_off(here, capsys):
    status, document = answer(capsys, "my_losses:dr_grpo_1024", "--like", "dr_grpo")
    assert status == 0 and "constant 1024" in document["rows"][0]["found"]
    assert document["losses"][0]["closest"][0]["length"] == pytest.approx(1024)
    status, document = answer(capsys, "my_losses:dr_grpo", "--like", "dr_grpo")
    assert status == 0 and "padded width" in document["rows"][0]["found"]


def test_with_nothing_claimed_everything_is_reported(here, capsys):
    status, document = answer(capsys, "my_losses:grpo")
    assert status == 0 and document["counter_examples"] == []
    assert all(row["ok"] is None for row in document["rows"])
    verdicts = {row["property"]: row["verdict"] for row in document["rows"]}
    assert list(verdicts)[: len(LOSS_CLAIMS)] == list(LOSS_CLAIMS)
    assert verdicts["zero_region"] == verdicts["detached"] == "holds"
    assert verdicts["bounded"] == verdicts["never_zero"] == "does not hold"
    assert verdicts["at a group of one"] == "finite"
    assert verdicts["at an empty response"] == "not finite"


def test_a_loss_is_held_to_named_claims(here, capsys):
    status, document = answer(capsys, "my_losses:grpo", "--claims", "detached,partition,row_order")
    judged = [row["property"] for row in document["rows"] if row["ok"] is not None]
    assert (status, judged) == (0, ["detached", "partition", "row_order"])
    status, document = answer(capsys, "my_losses:grpo", "--claims", "bounded,detached")
    assert status == 1
    assert [e["property"] for e in document["counter_examples"]] == ["bounded"]


def test_what_user_code_prints_does_not_reach_standard_output(here, capsys):
    assert frame.main(["audit", "my_losses:noisy", "--like", "rloo", "--json"]) == 0
    output = capsys.readouterr()
    json.loads(output.out)
    assert "a line of the user's own" in output.err


def test_the_working_directory_is_last_on_the_path(here):
    assert callable(load("colorsys:hsv_to_rgb"))
    load("my_losses:grpo")
    assert sys.path[-1] == str(here) and sys.path.count(str(here)) == 1


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["my_losses:raises"], "raised RuntimeError: no way (my_losses.py:"),
        (["my_losses:exits"], "raised SystemExit: 3"),
        (["my_losses:rows"], "returned shape (3,)"),
        (["my_losses:nan"], "NaN or infinite"),
        (["my_losses:constant"], "no gradient reaches logp"),
        (["my_losses:other_leaf"], "no gradient reaches logp"),
        (["my_losses:number"], "returned float"),
        (["my_losses:three"], "takes 3 positional arguments but 4 were given"),
        (["my_losses:broken_backward"], "in its gradient"),
        (["my_losses:value"], "is int; allowed: a function"),
        (["my_losses:gprpo"], "nearest valid name: grpo"),
        (["no_such_module_here:f"], "no module 'no_such_module_here'"),
        (["boom:f"], "importing boom: raised ValueError: at import (boom.py:1)"),
        (["needy:f"], "No module named 'no_such_package_at_all'"),
        (["leaves:f"], "raised SystemExit: 3"),
        (["./my_losses.py:grpo"], "is no loss; allowed: module:function"),
        (["my_losses:"], "is no loss"),
        (["my_losses"], "unknown estimator 'my_losses'"),
        (["grop"], "nearest valid name: grpo"),
        (["grpo:clip=1"], "unknown setting of grpo 'clip'"),
        (["grpo", "--like", "rloo"], "--like is about a loss"),
        (["--signature", "verl"], "--signature is about a loss"),
        (["grpo", "--claims", "bound"], "nearest valid name: bounded"),
        (["my_losses:grpo", "--claims", "row_orders"], "nearest valid name: row_order"),
        (["my_losses:grpo", "--claims", ""], "unknown claim ''"),
        (["my_losses:grpo", "--like", "grop"], "unknown estimator 'grop'"),
        (["my_losses:grpo", "--like", "centered"], "score centering needs head"),
        (["my_losses:grpo", "--like", "decoupled_ppo"], "needs proximal log-probabilities"),
        (["my_losses:grpo", "--like", "grpo:coefficient=0.1"], "a penalty needs reference"),
        (["my_losses:grpo", "--signature", "tinkr"], "nearest valid name: tinker"),
        (["my_losses:grpo", "--signature", "verl"], "raised TypeError"),
        (["--planted", "grpo"], "--planted audits its own faults"),
    ],
)
def test_bad_input_is_one_line_and_two(here, capsys, words, said):
    assert frame.main(["audit", *words]) == 2
    output = capsys.readouterr()
    assert output.out == "" and output.err.count("\n") == 1
    assert said in output.err


def test_a_document_of_entries(capsys, tmp_path):
    words = ("rloo", "token_tis:cap=4", "--out", str(tmp_path), "--seed", "2")
    status, document = answer(capsys, *words)
    assert status == 0 and document["schema"] == "windage/audit/1"
    assert document["targets"] == ["rloo", "token_tis:cap=4"] and document["seed"] == 2
    assert {row["target"] for row in document["rows"]} == set(document["targets"])
    names = {"audit.json", "audit.csv", "audit.parquet", "audit.html"}
    assert names <= {file.name for file in tmp_path.iterdir()}
    with (tmp_path / "audit.csv").open() as file:
        assert len(list(csv.DictReader(file))) == len(document["rows"])
    page = (tmp_path / "audit.html").read_text()
    assert "token_tis:cap=4" in page and "unbiased_on_policy" in page


def test_claims_of_an_entry_can_be_picked(capsys):
    status, document = answer(capsys, "grpo", "gspo", "--claims", "zero_region,partition")
    assert status == 0
    picked = [row["property"] for row in document["rows"]]
    assert picked == ["zero_region", "partition"] * 2


def test_a_claim_that_other_settings_break_fails(capsys):
    status, document = answer(capsys, "topr:b_neg=0", "--claims", "unbiased_on_policy,zero_region")
    assert status == 1 and document["failed"] == 2
    assert "A < 0: always" in document["rows"][1]["found"]


def test_the_terminal_shows_the_counter_example(here, capsys):
    assert frame.main(["audit", "my_losses:grpo", "--like", "rloo"]) == 1
    text = " ".join(capsys.readouterr().out.split())
    assert "your own code and was run" in text
    assert "equals the correction and aggregation of grpo" in text
    assert "logp = torch.tensor([[" in text and "1 of 1 claims do not hold" in text
    assert frame.main(["audit", "rloo", "reinforce"]) == 0
    assert "claims are as claimed" in capsys.readouterr().out


def test_names_without_torch_are_those_with_it():
    assert list(LOSS_CLAIMS) == list(CLAIMS)
    assert list(SIGNATURES) == list(CALLS)
