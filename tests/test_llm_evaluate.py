"""Evaluation: figures against enumeration, intervals by counting, documents that are read again."""

from __future__ import annotations

import itertools
import json
import math
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
import torch
from checks import assert_close, refused
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import binom, binomtest, multinomial

from windage.llm import evaluate
from windage.llm.config import Config, EvaluateSection
from windage.llm.draw import Desk, Drawn
from windage.llm.evaluate import Side, asked, compared, document, examples, figures, read, tally
from windage.llm.models import Loaded, Policy
from windage.llm.samplers.protocol import Response, Sampling
from windage.llm.scores import average, difference, majority_at, pass_at, share, sign_test
from windage.llm.tasks.arithmetic import arithmetic
from windage.llm.tasks.index import get
from windage.llm.tasks.protocol import Question
from windage.llm.verify import Pool, Scale
from windage.toy.votes import majority

# Figures over subsets.

counts = st.lists(st.integers(0, 4), min_size=2, max_size=5).filter(lambda c: sum(c) > 0)


@given(counts, st.data())
def test_figures_are_means_over_all_subsets(votes, data):
    right, silent, *wrong = votes
    samples = sum(votes)
    k = data.draw(st.integers(1, min(samples, 6)))
    labels = ["right"] * right + [None] * silent
    labels += [n for n, count in enumerate(wrong) for _ in range(count)]
    subsets = list(itertools.combinations(labels, k))
    some = sum("right" in subset for subset in subsets) / len(subsets)
    won = 0.0
    for subset in subsets:
        said = Counter(label for label in subset if label is not None)
        best = [label for label, count in said.items() if count == max(said.values())]
        won += "right" in best and 1 / len(best)
    assert_close(pass_at(right, samples, k), some)
    assert_close(majority_at(right, tuple(wrong), samples, k), won / len(subsets))


@pytest.mark.parametrize("k", [1, 2, 3, 5])
def test_figures_are_unbiased_for_fresh_samples(k):
    chances, samples = np.array([0.4, 0.3, 0.2, 0.1]), 6
    hits = wins = 0.0
    for votes in itertools.product(range(samples + 1), repeat=4):
        if sum(votes) != samples:
            continue
        weight = multinomial.pmf(votes, samples, chances)
        hits += weight * pass_at(votes[0], samples, k)
        wins += weight * majority_at(votes[0], votes[1:3], samples, k)
    wrong = torch.tensor(chances[1:3])
    right = torch.tensor(chances[0])
    assert hits == pytest.approx(1 - 0.6**k, rel=1e-12)
    assert wins == pytest.approx(float(majority(right, wrong, k)), rel=1e-12)


def test_votes_of_many_samples_are_quick_and_exact():
    assert majority_at(40, (1,) * 80, 128, 64) > 0.999
    assert majority_at(64, (64,), 128, 128) == 0.5
    assert majority_at(0, (3,), 128, 8) == 0.0
    assert majority_at(500, (499,), 1000, 1) == 0.5


@pytest.mark.parametrize("figure", [lambda k: pass_at(1, 4, k), lambda k: majority_at(1, (), 4, k)])
@pytest.mark.parametrize("k", [0, 5])
def test_k_is_from_1_to_the_samples(figure, k):
    with refused(f"k is {k}", "from 1 to 4"):
        figure(k)


# Intervals.


def test_intervals_of_shares_stay_in_bounds_and_narrow_with_questions():
    nothing, all_right = share([0.0] * 50, 8), share([1.0] * 50, 8)
    assert nothing.low == 0 and 0.05 < nothing.high < 0.1
    assert_close([all_right.low, all_right.high], [1 - nothing.high, 1.0])
    few, many = (share([0.0, 0.5, 1.0, 0.5] * n, 2) for n in (3, 300))
    assert 0 < few.low < many.low < 0.5 < many.high < few.high < 1
    spread, equal = share([0.0, 1.0] * 20, 16), share([0.5] * 40, 16)
    assert equal.high - equal.low < spread.high - spread.low
    assert share([0.3], 8) == average([0.3]) == (0.3, None, None)
    assert difference([0.5], [1.0]) == (0.5, None, None)
    for function in (lambda: share([], 8), lambda: average([]), lambda: difference([], [])):
        with refused("no question"):
            function()


def test_with_one_sample_the_interval_is_wilsons():
    values = [1.0] * 30 + [0.0] * 70
    found = share(values, 1)
    from scipy.stats import norm, t

    trials = 0.3 * 0.7 * 100 / np.var(values, ddof=1)
    assert trials == pytest.approx(99)
    level = 2 * norm.cdf(t.ppf(0.975, 99)) - 1
    wilson = binomtest(30, 100).proportion_ci(level, "wilson")
    assert found.low == pytest.approx(wilson.low, abs=2e-3)
    assert found.high == pytest.approx(wilson.high, abs=2e-3)


def test_a_difference_of_none_is_not_taken_for_certain():
    same = [0.5] * 100
    found = difference(same, same)
    assert found.mean == 0 and found.low == -found.high and 0.015 < found.high < 0.03
    one = difference(same, [1.0, *same[1:]])
    assert one.mean == 0.005 and one.low < 0 < one.high < 0.03
    sure = difference([0.0] * 100, [1.0] * 90 + [0.0] * 10)
    assert 0.75 < sure.low < sure.mean == 0.9 < sure.high <= 1


@pytest.mark.parametrize(("better", "worse"), [(0, 0), (5, 0), (0, 5), (3, 3), (12, 4), (40, 60)])
def test_the_sign_test_is_scipys(better, worse):
    wanted = binomtest(better, better + worse).pvalue if better + worse else 1.0
    assert sign_test(better, worse) == pytest.approx(wanted, rel=1e-12)


# A planted fault: responses taken for independent trials, as many as there are.
def independent(values, samples):
    return share([float(n < sum(values) * samples) for n in range(len(values) * samples)], 1)


PLACES = ((0.02, 0.5), (0.02, 5.0), (0.1, 1.0), (0.5, 0.5), (0.5, 20.0), (0.9, 2.0))
SIZES = ((20, 1), (20, 8), (100, 1), (100, 8), (400, 4))


def coverage(interval, mean, spread, questions, samples, times, seed=0):
    """How often an interval holds the mean of shares that a beta distribution gives."""
    generator = np.random.default_rng(seed)
    hits = 0
    for _ in range(times):
        chances = generator.beta(mean * spread, (1 - mean) * spread, questions)
        values = generator.binomial(samples, chances) / samples
        found = interval(values.tolist(), samples)
        hits += found.low <= mean <= found.high
    return hits


def gains(mean, spread, questions, samples, times, seed=0):
    """How often the interval of a difference holds it: every third question gains a little."""
    generator = np.random.default_rng(seed)
    hits = 0
    for _ in range(times):
        before = generator.beta(mean * spread, (1 - mean) * spread, questions)
        after = before + 0.05 * (generator.random(questions) < 0.3) * (1 - before)
        first, second = (generator.binomial(samples, p) / samples for p in (before, after))
        found = difference(first.tolist(), second.tolist())
        hits += found.low <= 0.05 * 0.3 * (1 - mean) <= found.high
    return hits


# Coverage below this in any of so many places is found with a chance of a millionth to be wrong.
def least(times, coverage):
    return binom.ppf(1e-6, times, coverage)


@pytest.mark.parametrize(("mean", "spread"), [(0.02, 5.0), (0.5, 0.5)])
def test_intervals_cover(mean, spread):
    assert coverage(share, mean, spread, 100, 8, 400) >= least(400, 0.92)
    assert gains(mean, spread, 100, 8, 200) >= least(200, 0.94)


def test_faulty_intervals_do_not():
    plain = coverage(lambda values, samples: average(values), 0.02, 0.5, 20, 8, 400)
    assert plain < least(400, 0.92)
    assert coverage(independent, 0.5, 0.5, 100, 8, 100) < least(100, 0.92)


@pytest.mark.long
@pytest.mark.parametrize(("mean", "spread"), PLACES)
@pytest.mark.parametrize(("questions", "samples"), SIZES)
def test_intervals_cover_everywhere(mean, spread, questions, samples):
    times = 2_000
    assert coverage(share, mean, spread, questions, samples, times, 1) >= least(times, 0.91)
    assert gains(mean, spread, questions, samples, times, 1) >= least(times, 0.945)


# Asking.


class Characters:
    """A tokenizer whose tokens are characters; 0 ends a response."""

    chat_template = None

    def __call__(self, text):
        return {"input_ids": [ord(c) for c in text]}

    def decode(self, ids, skip_special_tokens):
        return "".join(map(chr, ids))


class Scripted:
    """A sampler that says what a script makes of a question and the number of the response."""

    version = 0

    def __init__(self, script):
        self.script, self.seeds, self.sizes, self.sampling = script, [], [], None

    def sample(self, requests, sampling, between=None):
        self.sampling = sampling
        self.sizes.append(len(requests))
        self.seeds += [r.seed for r in requests]
        groups = []
        for request in requests:
            text = "".join(map(chr, request.prompt_ids))
            said = [self.script(text, n) for n in range(request.count)]
            groups.append([self.response(words, request.seed) for words in said])
        return groups

    def response(self, words, seed):
        cut = len(words) > 20
        ids = torch.tensor([ord(c) for c in words[:20]] + [0] * (not cut))
        zeros = torch.zeros(len(ids))
        return Response(
            ids=ids, behavior_logp=zeros, versions=zeros.long(), seed=seed, elapsed=0.0,
            finish_reason="length" if cut else "stop",
        )  # fmt: skip

    def load(self, weights, version, *, keep_cache=False): ...
    def score(self, sequences):
        return []

    def close(self): ...


def said(text, n):
    """Right; right and on; another; none; right, but the limit cuts; right."""
    a, b = (int(word) for word in text.removesuffix("? Answer with a number.").split()[2::2])
    right = str(a + b)
    return [right, f"{right} and more", str(a + b + 1), "none", f"{right:>18}{'':30}", right][n]


@pytest.fixture(scope="module")
def task():
    made = arithmetic(digits=1, held_out=0.5)
    yield made
    made.close()


def desk(task, script=said):
    loaded = Loaded(
        policy=Policy.__new__(Policy), tokenizer=Characters(), fingerprint="x" * 64, stop_ids=(0,)
    )
    return Desk(
        task=task, sampler=Scripted(script), sampling=Sampling(), loaded=loaded, scale=Scale()
    )


def test_responses_are_tallied_by_question(task):
    at, kept, steps = desk(task), [], []
    tallies = asked(
        at, 7, 6, seed=3,
        keep=lambda piece, drawn: kept.append((piece, len(drawn), examples(drawn, 6))),
        advance=lambda *done: steps.append(done),
    )  # fmt: skip
    assert len({t.question for t in tallies}) == 7 and len(set(at.sampler.seeds)) == 7
    for t in tallies:
        assert (t.samples, t.right, t.format, t.wrong, t.invalid) == (6, 2, 2, 1, 1)
        assert (t.cut, t.unchecked, t.votes, t.correct) == (1, 0, (1,), 4)
        assert t.tokens == t.finished_tokens + 20
    assert [k[:2] for k in kept] == [(0, 42)] and steps == [(7, 7)]
    first = kept[0][2][0]
    assert (first.response, first.verdict) == (tallies[0].answer, "right")
    assert [t.question for t in asked(desk(task), 3, 1, seed=3)] == [
        t.question for t in tallies[:3]
    ]


WAYS = ("1/2", "0.5", r"\frac{1}{2}", "7", "7.0", "8", "2x+2", "2(x+1)", "2x + 2", "x" * 300)


def test_answers_vote_together_when_they_are_equal_under_the_verifier(monkeypatch):
    """However they are spelled; only spellings that may be equal are compared."""
    pytest.importorskip("math_verify")
    told = get("jsonl", {"check": "mathematics", "held_out": "unread"})
    question = Question(id="a", text="?", answer="1")
    asked, real = [], Pool.check_all
    monkeypatch.setattr(Pool, "check_all", lambda *a: asked.append(len(a[1])) or real(*a))
    try:
        said = [rf"So \boxed{{{way}}}" for way in WAYS]
        verdicts = told.judge([(question, text) for text in said], [False] * len(said))
        drawn = [
            Drawn(
                question=question, text=text, verdict=verdict,
                row={"response_ids": [1], "finish_reason": "stop"},
            )
            for text, verdict in zip(said, verdicts, strict=True)
        ]  # fmt: skip
        assert {v.word for v in verdicts} == {"wrong"}
        assert tally(drawn, told).votes == (3, 3, 2, 1, 1)
        assert told.alike(["12", "13", "14", "12"]) == [0, 1, 2, 0]
        count = len(asked)
        assert told.alike([]) == [] and told.alike(["12", "13"]) == [0, 1] and len(asked) == count
        assert told.alike(["1/3", "13", r"\frac26"]) == [0, 1, 0]
    finally:
        told.close()
    plain = get("jsonl", {"check": "text", "held_out": "unread"})
    assert plain.alike(["1/2", "0.5", "1/2"]) == [0, 1, 0]


def test_a_small_split_is_asked_once_and_pieces_do_not_matter(task, monkeypatch):
    whole = asked(desk(task), 10_000, 2, seed=0)
    assert 30 < len(whole) < 70 and len({t.question for t in whole}) == len(whole)
    monkeypatch.setattr(evaluate, "PIECE", 7)
    at = desk(task)
    assert asked(at, 10_000, 2, seed=0) == whole and set(at.sampler.sizes[:-1]) == {3}
    assert len(set(at.sampler.seeds)) == len(whole)
    train = asked(desk(task), 10_000, 2, seed=0, split="train")
    assert not {t.question for t in train} & {t.question for t in whole}


def test_a_run_evaluates_its_policy_on_the_same_questions_each_time(task):
    at = desk(task)
    config = Config(evaluate=EvaluateSection(every=1, questions=5, samples=6, temperature=0.5))
    first, again = (evaluate.evaluate(at, config, step) for step in (0, 100))
    assert first == again and at.sampler.seeds[:5] == at.sampler.seeds[5:]
    assert at.sampler.sampling.temperature == 0.5 and at.sampling.temperature == 1.0
    assert_close([first[f] for f in ("pass_at_1", "pass_at_6", "maj_at_6")], [2 / 3, 1, 1])
    assert first["pass_at_1_low"] < 2 / 3 < first["pass_at_1_high"]
    assert json.dumps(first, allow_nan=False)


# Documents.


def side(task, name, script=said, samples=6, **changes):
    tallies = asked(desk(task, script), 12, samples, seed=0)
    made = Side(
        model=name, task="arithmetic", settings={"digits": "1"}, split="held out", seed=0,
        sampling={"temperature": 1.0}, seconds=1.5, tallies=tallies,
        examples=(evaluate.Example(question="q", answer="a", response="r", verdict="wrong"),),
    )  # fmt: skip
    return replace(made, **changes)


def better(text, n):
    return said(text, 0 if n == 2 and text.split()[2] != "0" else n)


def test_a_document_holds_every_figure_and_is_read_again(task, tmp_path):
    sides = [side(task, "before"), side(task, "after", better)]
    found = document(sides, [2, 6])
    assert found["schema"] == "windage/evaluate/1" and found["k"] == [1, 2, 6]
    rows = {(row["model"], row["against"], row["figure"]): row for row in found["rows"]}
    values = [rows["before", None, name]["value"] for name in ("pass_at_1", "pass_at_2", "format")]
    assert_close(values, [4 / 6, 1 - 1 / 15, 2 / 6])
    assert_close(rows["before", None, "cut"]["value"], 1 / 6)
    pair = rows["after", "before", "pass_at_1"]
    moved = sum(t.text.split()[2] != "0" for t in sides[0].tallies) / 12
    assert pair["more"] == moved and pair["less"] == 0 and pair["questions"] == 12
    assert_close(pair["value"], moved / 6)
    assert pair["low"] < pair["value"] < pair["high"]
    named = {row["figure"] for row in found["rows"]}
    assert {name for name in named if "_at_" not in name} <= set(found["figures"])
    histogram = [row["questions"] for row in found["histogram"] if row["model"] == "before"]
    assert histogram == [0, 0, 0, 0, 12, 0, 0]
    (tmp_path / "evaluate.json").write_text(json.dumps(found, allow_nan=False))
    assert read(tmp_path) == sides
    assert document(read(tmp_path), [2, 6]) == found


def test_questions_are_paired_by_what_they_ask(task):
    first, second = side(task, "a"), side(task, "b", better)
    turned = replace(second, tallies=second.tallies[:0:-1])
    rows = {row["figure"]: row for row in compared(first, turned, [1])}
    assert rows["pass_at_1"]["questions"] == 11
    plain = {row["figure"]: row for row in compared(first, second, [1])}
    assert plain["pass_at_1"]["questions"] == 12
    assert all(row["value"] == 0 for row in compared(first, first, [1, 2]))


def test_sides_that_cannot_be_compared_are_refused(task):
    first, second = side(task, "a"), side(task, "b", samples=4)
    with refused("k is 6, b has 4 samples"):
        document([first, second], [1, 6])
    with refused("a was asked held out questions of arithmetic", "b train ones"):
        document([first, replace(second, split="train")], [1])
    with refused("no question in common"):
        document([replace(first, tallies=first.tallies[:6]),
                  replace(second, tallies=second.tallies[6:])], [1])  # fmt: skip


def test_responses_that_were_all_cut_have_no_length_that_ended(task):
    tallies = asked(desk(task, lambda text, n: "1" * 30), 3, 2, seed=0)
    found = {row["figure"]: row["value"] for row in figures(tallies, [1])}
    assert found["tokens"] == 20 and "finished_tokens" not in found and found["cut"] == 1


DAMAGES = [
    (lambda d: d.update(schema="windage/study/1"), "schema 'windage/study/1'"),
    (lambda d: d.pop("models"), "'models'"),
    (lambda d: d["questions"][0].pop("votes"), "'votes'"),
    (lambda d: d["questions"][0].update(right="2"), "right is '2'"),
    (lambda d: d["questions"][0].update(right=1), "do not add up"),
    (lambda d: d["questions"][0].update(votes=[2]), "do not add up"),
    (lambda d: d["questions"][0].update(cut=7), "do not add up"),
    (lambda d: d["questions"][0].update(unchecked=5), "do not add up"),
    (lambda d: d["questions"][0].update(text=None), "text is None"),
    (lambda d: d["questions"].append(d["questions"][0]), "repeat"),
    (lambda d: d.update(questions=[]), "has no question"),
    (lambda d: d.update(models=[1]), "damaged"),
    (lambda d: d["examples"][0].update(response=1), "an example"),
]


@pytest.mark.parametrize(("damage", "words"), DAMAGES)
def test_damaged_documents_are_refused(task, tmp_path, damage, words):
    found = document([side(task, "a")], [1])
    found = json.loads(json.dumps(found))
    damage(found)
    (tmp_path / "evaluate.json").write_text(json.dumps(found))
    with refused("evaluate.json", words):
        read(tmp_path)


@pytest.mark.parametrize("content", ["", "{", "[]", "[" * 100_000, "3"])
def test_what_is_no_document_is_refused(tmp_path, content):
    (tmp_path / "evaluate.json").write_text(content)
    with refused("evaluate.json", "allowed"):
        read(tmp_path)
    with refused("nowhere", "No such file"):
        read(tmp_path / "nowhere")


def test_numbers_are_finite(task):
    for row in document([side(task, "a"), side(task, "b")], [1])["rows"]:
        numbers = [value for value in row.values() if isinstance(value, float)]
        assert all(map(math.isfinite, numbers))
