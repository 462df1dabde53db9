"""Evaluation: held-out questions, several responses each, and figures with intervals by question.

A question's tally is all that the figures need; two tallies of one question are compared in pairs.
The document `windage/evaluate/1` holds the tallies, so that it can be read again, at other k or
beside another evaluation:

    models      what was asked of each: task, settings, split, sampling, seed, questions, samples
    rows        a figure each, of a model, or of the pair (`against`: second minus first)
    questions   a tally each
    histogram   questions by right answers
    examples    some responses as they were
    figures     what each figure means
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any, final

from windage.estimators.errors import BadInput, within
from windage.llm.config import Config
from windage.llm.draw import Desk, Drawn, draw
from windage.llm.scores import average, difference, majority_at, pass_at, share, sign_test
from windage.llm.tasks.protocol import Split, Task

SCHEMA = "windage/evaluate/1"
FILE = "evaluate.json"
# Responses asked for at a time.
PIECE = 512
FIGURES = {
    "pass_at_k": "mean over questions of 1 - C(n - c, k) / C(n, k): k samples hold a right one",
    "maj_at_k": "mean over questions of the share of k samples whose vote the right answer wins; "
    "equal answers vote together however they are spelled, ties in part, no answer no vote",
    "right": "share of responses with the right answer that end there",
    "format": "share with the right answer after which words go on, or that a limit cut",
    "wrong": "share with another answer",
    "invalid": "share without an answer, or with one that could not be checked",
    "unchecked": "share whose check came to no end within its limits (they are invalid too)",
    "cut": "share of responses that the limit on tokens cut",
    "tokens": "tokens of a response, the stop token included",
    "finished_tokens": "tokens of a question's responses that ended by themselves",
}
WORDS = ("right", "format", "wrong", "invalid")
# Of a side, and lists of their own in a document.
PARTS = ("tallies", "examples")


@final
@dataclass(frozen=True, kw_only=True)
class Tally:
    """What the responses to one question came to.

    Args:
        question: its id.
        text, answer: of the question.
        samples: responses.
        right, format, wrong, invalid: how many had which verdict.
        unchecked: of the invalid ones, how many checks came to no end.
        cut: how many the limit on tokens cut.
        tokens, finished_tokens: of all responses together, and of those that were not cut.
        votes: responses with each wrong answer, however it is spelled, most first.
    """

    question: str
    text: str
    answer: str
    samples: int
    right: int
    format: int
    wrong: int
    invalid: int
    unchecked: int
    cut: int
    tokens: int
    finished_tokens: int
    votes: tuple[int, ...]

    @property
    def correct(self) -> int:
        """Responses with the right answer, in whatever format."""
        return self.right + self.format

    def check(self) -> Tally:
        """Refuse counts that do not add up.

        Raises:
            BadInput: names the question and the counts.
        """
        parts = sum(getattr(self, word) for word in WORDS)
        whole = parts == self.samples > 0 and sum(self.votes) == self.wrong
        if not whole or max(self.cut, self.unchecked - self.invalid + self.samples) > self.samples:
            raise BadInput(f"question {self.question!r}: its counts do not add up")
        return self


@final
@dataclass(frozen=True, kw_only=True)
class Example:
    """A response as a person reads it, and what it came to."""

    question: str
    answer: str
    response: str
    verdict: str


@final
@dataclass(frozen=True, kw_only=True)
class Side:
    """One model's evaluation.

    Args:
        model: its name in tables.
        task, settings, split, seed: which questions were asked.
        sampling: how responses were drawn.
        seconds: it took.
        tallies: by question.
        examples: the first response to some questions.
        versions: of packages.
        inputs: SHA-256 of the files that were read.
    """

    model: str
    task: str
    settings: Mapping[str, Any]
    split: str
    seed: int
    sampling: Mapping[str, Any]
    seconds: float
    tallies: tuple[Tally, ...]
    examples: tuple[Example, ...] = ()
    versions: Mapping[str, str] = field(default_factory=dict)
    inputs: Mapping[str, str] = field(default_factory=dict)

    @property
    def samples(self) -> int:
        """Responses to each question; the fewest that one has."""
        return min(tally.samples for tally in self.tallies)


def votes(answers: Sequence[str | None], alike: Callable[[Sequence[str]], list[int]]) -> list[int]:
    """How many gave each answer, most first; nobody else gave one that was not read.

    Args:
        alike: of answers that are spelled differently, the place of the first that is the same.

    Example:
        >>> votes(["1/2", "3", None, "0.5", "3", "1/2"], lambda answers: [0, 1, 0])
        [3, 2, 1]
    """
    spelled = Counter(answer for answer in answers if answer is not None)
    found: Counter[int] = Counter()
    for count, place in zip(spelled.values(), alike(list(spelled)), strict=True):
        found[place] += count
    return sorted([*found.values(), *[1] * answers.count(None)], reverse=True)


def tally(drawn: Sequence[Drawn], task: Task) -> Tally:
    """The tally of the responses to one question of a task."""
    question = drawn[0].question
    words = Counter(one.verdict.word for one in drawn)
    wrong = [one.verdict.answer for one in drawn if one.verdict.word == "wrong"]
    lengths = [
        (len(one.row["response_ids"]), one.row["finish_reason"] == "length") for one in drawn
    ]
    return Tally(
        question=question.id,
        text=question.text,
        answer=question.answer,
        samples=len(drawn),
        **{word: words[word] for word in WORDS},
        unchecked=sum(one.verdict.stopped is not None for one in drawn),
        cut=sum(cut for _, cut in lengths),
        tokens=sum(n for n, _ in lengths),
        finished_tokens=sum(n for n, cut in lengths if not cut),
        votes=tuple(votes(wrong, task.alike)),
    ).check()


def examples(drawn: Sequence[Drawn], samples: int, most: int = 6) -> tuple[Example, ...]:
    """The first response to each of the first questions."""
    return tuple(
        Example(
            question=one.question.text,
            answer=one.question.answer,
            response=one.text,
            verdict=one.verdict.word,
        )
        for one in drawn[: most * samples : samples]
    )


def asked(
    desk: Desk,
    questions: int,
    samples: int,
    *,
    seed: int,
    split: Split = "held out",
    keep: Callable[[int, Sequence[Drawn]], None] = lambda piece, drawn: None,
    advance: Callable[[int, int], None] = lambda done, total: None,
) -> tuple[Tally, ...]:
    """Ask questions and tally the responses, some hundreds at a time.

    Args:
        desk: task, sampler and sampling.
        questions: at most; a split with fewer is asked once through.
        samples: responses to each.
        seed: of the questions' order and of the draws; two models that are asked with the same seed
            are asked the same questions and draw from the same random streams.
        split: whose questions.
        keep: told the number of each piece and its responses.
        advance: told the responses drawn and their total.
    """
    within(1, 1 << 24, questions=questions, samples=samples)
    found = list({q.id: q for q in desk.task.questions(split, seed, 0, questions)}.values())
    step, tallies = max(1, PIECE // samples), []
    for piece, start in enumerate(range(0, len(found), step)):
        part = found[start : start + step]
        drawn = draw(desk, part, samples, seed=seed, start=start)
        keep(piece, drawn)
        groups = (drawn[n : n + samples] for n in range(0, len(drawn), samples))
        tallies += [tally(group, desk.task) for group in groups]
        advance(start + len(part), len(found))
    return tuple(tallies)


def evaluate(desk: Desk, config: Config, step: int) -> dict[str, Any]:
    """The figures of a run's policy at one of its steps, as the run's configuration says.

    Every step is asked the same questions with the same random streams.
    """
    told = config.evaluate
    at = replace(desk, sampling=replace(desk.sampling, temperature=told.temperature, head=0))
    tallies = asked(at, told.questions, told.samples, seed=config.run.seed)
    ks = sorted({1, told.samples})
    found: dict[str, Any] = {"questions": len(tallies), "samples": told.samples}
    for row in figures(tallies, ks):
        name = row["figure"]
        found |= {name: row["value"], f"{name}_low": row["low"], f"{name}_high": row["high"]}
    return found


def shares(tallies: Sequence[Tally], ks: Sequence[int]) -> dict[str, list[float]]:
    """A share of each question, by figure."""
    found = {}
    for k in ks:
        found[f"pass_at_{k}"] = [pass_at(t.correct, t.samples, k) for t in tallies]
    for k in ks:
        if k > 1:
            found[f"maj_at_{k}"] = [majority_at(t.correct, t.votes, t.samples, k) for t in tallies]
    for name in (*WORDS, "unchecked", "cut"):
        found[name] = [getattr(t, name) / t.samples for t in tallies]
    return found


def lengths(tallies: Sequence[Tally]) -> dict[str, list[float]]:
    """A mean length of each question, by figure; none where every response was cut."""
    return {
        "tokens": [t.tokens / t.samples for t in tallies],
        "finished_tokens": [
            t.finished_tokens / (t.samples - t.cut) for t in tallies if t.cut < t.samples
        ],
    }


def figures(tallies: Sequence[Tally], ks: Sequence[int]) -> Iterator[dict[str, Any]]:
    """Each figure with the limits of its interval.

    Raises:
        BadInput: a k that is more than the samples.
    """
    samples = min(t.samples for t in tallies)
    for name, values in shares(tallies, ks).items():
        mean, low, high = share(values, samples)
        yield {"figure": name, "value": mean, "low": low, "high": high}
    for name, values in lengths(tallies).items():
        if values:
            mean, low, high = average(values)
            yield {"figure": name, "value": mean, "low": low, "high": high}


def compared(first: Side, second: Side, ks: Sequence[int]) -> Iterator[dict[str, Any]]:
    """Second minus first on the questions that both were asked, in pairs.

    Raises:
        BadInput: they were asked different questions.
    """
    if (first.task, first.split) != (second.task, second.split):
        raise BadInput(
            f"{first.model} was asked {first.split} questions of {first.task}, {second.model} "
            f"{second.split} ones of {second.task}; allowed: the same task and split"
        )
    theirs = {tally.question: tally for tally in second.tallies}
    pairs = [(t, theirs[t.question]) for t in first.tallies if t.question in theirs]
    if not pairs:
        raise BadInput(
            f"{first.model} and {second.model} were asked no question in common; allowed: the same "
            "task, settings and seed"
        )
    before, after = (shares([pair[n] for pair in pairs], ks) for n in (0, 1))
    for name in before:
        mean, low, high = difference(before[name], after[name])
        gaps = [b - a for a, b in zip(before[name], after[name], strict=True)]
        more, less = sum(g > 0 for g in gaps), sum(g < 0 for g in gaps)
        yield {
            "figure": name,
            "value": mean,
            "low": low,
            "high": high,
            "questions": len(pairs),
            "more": more / len(pairs),
            "less": less / len(pairs),
            "p_value": sign_test(more, less),
        }


def document(sides: Sequence[Side], ks: Sequence[int]) -> dict[str, Any]:
    """The document of one evaluation, or of two that are compared.

    Args:
        sides: one or two, of different names.
        ks: of pass@k and maj@k; 1 is always there.

    Raises:
        BadInput: a k that is more than the samples, or sides that cannot be compared.
    """
    ks = sorted({1, *ks})
    for side in sides:
        if ks[-1] > side.samples:
            raise BadInput(
                f"k is {ks[-1]}, {side.model} has {side.samples} samples a question; allowed: k up "
                "to the samples"
            )
    rows = [
        {"model": side.model, "against": None, **row}
        for side in sides
        for row in figures(side.tallies, ks)
    ]
    if len(sides) == 2:
        first, second = sides
        rows += [
            {"model": second.model, "against": first.model, **row}
            for row in compared(first, second, ks)
        ]
    return {
        "schema": SCHEMA,
        "k": ks,
        "models": [
            {name: value for name, value in asdict(side).items() if name not in PARTS}
            | {"questions": len(side.tallies), "samples": side.samples}
            for side in sides
        ],
        "figures": FIGURES,
        "rows": rows,
        "histogram": [row for side in sides for row in _histogram(side)],
        "questions": [{"model": s.model, **asdict(t)} for s in sides for t in s.tallies],
        "examples": [{"model": s.model, **asdict(e)} for s in sides for e in s.examples],
    }


def _histogram(side: Side) -> Iterator[dict[str, Any]]:
    """Questions by right answers."""
    counts = Counter(t.correct for t in side.tallies)
    for correct in range(side.samples + 1):
        yield {"model": side.model, "correct": correct, "questions": counts[correct]}


def read(folder: Path) -> list[Side]:
    """The evaluations in a folder that `windage evaluate --out` wrote.

    Raises:
        BadInput: no such file, another schema, or damaged: names what.
    """
    path = folder / FILE
    allowed = f"a document of {SCHEMA}"
    try:
        told = json.loads(path.read_bytes())
    except OSError as problem:
        raise BadInput(f"{str(path)!r}: {problem.strerror}; allowed: {allowed}") from None
    except (ValueError, RecursionError) as problem:
        why = (str(problem).splitlines() or ["too deep"])[0]
        raise BadInput(f"{str(path)!r} is damaged: {why}; allowed: {allowed}") from None
    schema = told.get("schema") if isinstance(told, dict) else None
    if schema != SCHEMA:
        raise BadInput(f"{str(path)!r} has the schema {schema!r}; allowed: {SCHEMA}")
    try:
        return [_side(model, told) for model in told["models"]]
    except (KeyError, TypeError, AttributeError) as problem:
        why = str(problem).partition("\n")[0]
        raise BadInput(f"{str(path)!r} is damaged: {why}; allowed: {allowed}") from None
    except BadInput as problem:
        raise BadInput(f"{str(path)!r} is damaged: {problem}") from None


def _side(model: Mapping[str, Any], told: Mapping[str, Any]) -> Side:
    """One model of a document, with its tallies."""
    name = model["model"]
    tallies = tuple(_tally(row) for row in told["questions"] if row["model"] == name)
    shown = [_kept(Example, row) for row in told["examples"] if row["model"] == name]
    if not tallies:
        raise BadInput(f"model {name!r} has no question")
    if len({t.samples for t in tallies}) > 1 or len({t.question for t in tallies}) < len(tallies):
        raise BadInput(f"model {name!r}: its questions have different samples or repeat")
    for example in shown:
        if not all(isinstance(value, str) for value in example.values()):
            raise BadInput("an example holds something else than text")
    examples = tuple(Example(**example) for example in shown)
    model = {"versions": {}, "inputs": {}, **model}
    return Side(**_kept(Side, model, *PARTS), tallies=tallies, examples=examples)


def _tally(row: Mapping[str, Any]) -> Tally:
    found = _kept(Tally, row, "votes")
    votes = row["votes"]
    for name, value in [*found.items(), *(("votes", vote) for vote in votes)]:
        words = name in ("question", "text", "answer")
        if not (isinstance(value, str) if words else type(value) is int and value >= 0):
            raise BadInput(f"{name} is {value!r}; allowed: {'text' if words else 'a count'}")
    return Tally(**found, votes=tuple(votes)).check()


def _kept(kind: type, row: Mapping[str, Any], *rest: str) -> dict[str, Any]:
    """The fields of a record but some."""
    return {field.name: row[field.name] for field in fields(kind) if field.name not in rest}
