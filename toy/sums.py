"""Sums worked out step by step, then answered: the task of the learning studies.

A prompt is K digits below M.  The intended response writes the partial sums modulo M, the marker,
the last sum again and the stop token:  s2 s3 ... sK # sK $,  s1 = x1, s[k] = s[k-1] + x[k] mod M.
Only the answer counts, so a prompt has many right responses.  A demonstrator errs at steps, more
often at hard digits, and now and then writes a response without a valid form.

A leading axis S holds seeds, each with a generator of its own, so that a seed's numbers do not
change with the number of seeds.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from windage.estimators.errors import BadInput

Generators = Sequence[torch.Generator]
KINDS_OF_FAULT = 3


def generators(seeds: Sequence[int]) -> list[torch.Generator]:
    """A generator a seed."""
    return [torch.Generator().manual_seed(seed) for seed in seeds]


def uniform(among: Generators, *shape: int) -> Float[Tensor, "S ..."]:
    """Numbers in [0, 1), a row a generator."""
    return torch.stack([torch.rand(shape, generator=g) for g in among])


def whole(among: Generators, below: int, *shape: int) -> Int[Tensor, "S ..."]:
    """Integers below a bound, a row a generator."""
    return torch.stack([torch.randint(below, shape, generator=g) for g in among])


@final
@dataclass(frozen=True, kw_only=True)
class Sums:
    """The task: digits, vocabulary, horizon, and what makes an answer right.

    Args:
        modulus: M; digits are the tokens 0 to M - 1.
        terms: K, digits of a prompt.
        hard: digits from here on are hard to add.

    Example:
        >>> task = Sums()
        >>> task.vocab, task.horizon, task.number
        (10, 9, 2401)
    """

    modulus: int = 7
    terms: int = 4
    hard: int = 4

    def __post_init__(self) -> None:
        if self.modulus < 2 or self.terms < 2:
            raise BadInput(
                f"modulus is {self.modulus}, terms is {self.terms}; allowed: 2 or more of each"
            )

    @property
    def marker(self) -> int:
        return self.modulus

    @property
    def stop(self) -> int:
        return self.modulus + 1

    @property
    def filler(self) -> int:
        return self.modulus + 2

    @property
    def vocab(self) -> int:
        return self.modulus + 3

    @property
    def horizon(self) -> int:
        return self.terms + 5

    @property
    def number(self) -> int:
        """How many prompts there are."""
        return int(self.modulus**self.terms)

    def prompts(self, index: Int[Tensor, "*batch"]) -> Int[Tensor, "*batch K"]:
        """The digits of prompts by number."""
        place = self.modulus ** torch.arange(self.terms)
        return index.unsqueeze(-1) // place % self.modulus

    def steps_that_are_hard(self, prompts: Int[Tensor, "*batch K"]) -> Int[Tensor, "*batch"]:
        """How many of the digits to be added are hard."""
        return (prompts[..., 1:] >= self.hard).sum(-1)

    def split(self, sizes: Sequence[int], among: Generators) -> tuple[Int[Tensor, "S n K"], ...]:
        """Disjoint sets of prompts, drawn without replacement.

        Raises:
            BadInput: more prompts than there are.
        """
        if sum(sizes) > self.number:
            raise BadInput(f"{sum(sizes)} prompts; allowed: at most {self.number}")
        order = torch.stack([torch.randperm(self.number, generator=g) for g in among])
        chosen = order[:, : sum(sizes)].split(list(sizes), 1)
        return tuple(self.prompts(part) for part in chosen)

    def mask(self, tokens: Int[Tensor, "*batch T"]) -> Bool[Tensor, "*batch T"]:
        """True up to the first stop token, itself included."""
        stopped = (tokens == self.stop).cumsum(-1)
        return stopped - (tokens == self.stop).long() == 0

    def grade(self, prompts: Int[Tensor, "*batch K"], tokens: Int[Tensor, "*batch T"]) -> Graded:
        """Which responses have a valid form, what they answer, and whether that is right.

        Valid: it stops, it holds one marker, and its last tokens are marker, digit, stop.
        """
        mask = self.mask(tokens)
        length = mask.sum(-1)
        ends = (tokens == self.stop).any(-1) & (length >= 3)
        markers = ((tokens == self.marker) & mask).sum(-1)

        def last(back: int) -> Tensor:
            place = (length - back).clamp(min=0).unsqueeze(-1)
            return tokens.gather(-1, place).squeeze(-1)

        answer = last(2)
        valid = ends & (markers == 1) & (last(3) == self.marker) & (answer < self.modulus)
        right = prompts.sum(-1) % self.modulus
        answer = torch.where(valid, answer, -1)
        return Graded(mask=mask, valid=valid, answer=answer, correct=answer == right)


@final
@dataclass(frozen=True, kw_only=True, eq=False)
class Graded:
    """What a verifier says of responses.

    Args:
        mask: tokens up to the stop, or to the horizon.
        valid: the form is right.
        answer: the digit answered, -1 where the form is wrong.
        correct: valid, and the digit is the sum.
    """

    mask: Bool[Tensor, "*batch T"]
    valid: Bool[Tensor, "*batch"]
    answer: Int[Tensor, "*batch"]
    correct: Bool[Tensor, "*batch"]


@final
@dataclass(frozen=True, kw_only=True)
class Demonstrator:
    """Who writes the responses that a base policy is fitted to.

    Args:
        easy: chance of an error at a step that adds an easy digit.
        hard: the same at a hard digit.
        malformed: chance of a response without a valid form.
        slip: share of errors that are off by -1; the others are off by any other amount.
    """

    easy: float
    hard: float
    malformed: float
    slip: float = 0.5

    def write(
        self, task: Sums, prompts: Int[Tensor, "S n K"], among: Generators
    ) -> Int[Tensor, "S n T"]:
        """One response a prompt."""
        n, m = prompts.shape[1], task.modulus
        steps = task.terms - 1
        rate = torch.where(prompts[..., 1:] >= task.hard, self.hard, self.easy)
        wrong = uniform(among, n, steps) < rate
        slips = uniform(among, n, steps) < self.slip
        off = torch.where(slips, m - 1, 1 + whole(among, m - 1, n, steps))
        added = prompts[..., 1:] + torch.where(wrong, off, 0)
        sums = (prompts[..., :1] + added.cumsum(-1)) % m
        tokens = torch.full((len(prompts), n, task.horizon), task.filler)
        tokens[..., :steps] = sums
        tokens[..., steps] = task.marker
        tokens[..., steps + 1] = sums[..., -1]
        tokens[..., steps + 2] = task.stop
        return self._spoil(task, tokens, sums[..., -1], among)

    def _spoil(
        self, task: Sums, tokens: Tensor, last: Tensor, among: Generators
    ) -> Int[Tensor, "S n T"]:
        """Leave out the marker, break off into filler, or put a second marker and go on."""
        n, steps = tokens.shape[1], task.terms - 1
        spoiled = uniform(among, n) < self.malformed
        kind = torch.where(spoiled, whole(among, KINDS_OF_FAULT, n), -1).unsqueeze(-1)
        place = whole(among, task.terms + 1, n).unsqueeze(-1)
        digits = whole(among, task.modulus, n, task.horizon)
        at = torch.arange(task.horizon)
        unmarked = tokens.clone()
        unmarked[..., steps] = last
        unmarked[..., steps + 1] = task.stop
        running = torch.where(at > steps + 2, digits, tokens)
        running[..., steps + 2] = task.marker
        tokens = torch.where(kind == 0, unmarked, tokens)
        tokens = torch.where((kind == 1) & (at >= place), task.filler, tokens)
        return torch.where(kind == 2, running, tokens)
