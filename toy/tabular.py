"""Training where the logits are the parameters: along exact means, and along sampled updates.

Bandits, trajectory logits and token trees are `Problem`s; a table holds one a seed, so that many
seeds, or many problems, are trained in one walk.  The exact walk follows the mean that an engine of
`toy.exact` computes: what remains of a recipe when noise is gone is its bias.  The sampled walk
draws groups from the very same law.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from typing import Any, final

import torch
from jaxtyping import Float, Int
from torch import Tensor

from windage.estimators.batch import Batch
from windage.estimators.errors import BadInput
from windage.estimators.estimator import Estimator, coefficients
from windage.toy.ascent import Ascent, Climber, Others, Reference, Sampler, Versions, rounds
from windage.toy.behavior import KINDS
from windage.toy.exact.plan import exact, plan
from windage.toy.exact.tuples import Responses
from windage.toy.exact.walk import Walk
from windage.toy.learning import State
from windage.toy.problems import Problem, normalize
from windage.toy.sampling import chosen
from windage.toy.sums import Generators, uniform


@final
@dataclass(frozen=True, kw_only=True, eq=False)
class Table:
    """Problems on one tree, as many prompts a seed.

    Args:
        problem: the prompts of the first seed, then those of the second, and so on.
        seeds: how many.

    Example:
        >>> from windage.toy.problems import difficulties
        >>> table = Table.repeated(difficulties(), 3)
        >>> table.start.shape
        torch.Size([3, 45])
    """

    problem: Problem
    seeds: int

    @staticmethod
    def joined(problems: list[Problem]) -> Table:
        """A problem a seed; all on one tree, with as many prompts each."""

        def cat(name: str) -> Tensor:
            return torch.cat([getattr(problem, name) for problem in problems])

        names = ("logits", "behavior_logp", "rewards", "lengths")
        rows: dict[str, Any] = {name: cat(name) for name in names}
        return Table(problem=replace(problems[0], **rows), seeds=len(problems))

    @staticmethod
    def repeated(problem: Problem, seeds: int) -> Table:
        """The same problem for every seed."""
        return Table.joined([problem] * seeds)

    @property
    def start(self) -> Float[Tensor, "S D"]:
        """The problems' own logits, a row a seed."""
        return self.problem.logits.reshape(self.seeds, -1)

    def unpack(self, parameters: Float[Tensor, "S D"]) -> dict[str, Tensor]:
        """One matrix a seed: its prefixes by the vocabulary."""
        return {"logits": parameters.unflatten(1, (-1, self.problem.tree.vocab))}

    def at(
        self,
        parameters: Float[Tensor, "S D"],
        law: Float[Tensor, "R N V"] | None = None,
        others: Others | None = None,
    ) -> Problem:
        """The problems with these logits, sampled from a law: by default from the policy."""

        def logp(weights: Tensor | None) -> Tensor | None:
            return None if weights is None else normalize(weights.view_as(self.problem.logits))

        logits = parameters.view_as(self.problem.logits)
        return replace(
            self.problem,
            logits=logits,
            behavior_logp=normalize(logits) if law is None else law,
            reference_logp=logp(others and others.reference),
            proximal_logp=logp(others and others.proximal),
        )

    def law(self, weights: Float[Tensor, "S D"], sampler: Sampler) -> Float[Tensor, "R N V"]:
        """What a sampler draws from that holds these weights: rounded, then cut to its nucleus."""
        found = self.at(weights)
        if sampler.bits:
            found = replace(found, logits=KINDS["bits"](found, b=sampler.bits))
        return KINDS["top_p"](found, p=sampler.top_p) if sampler.top_p < 1 else found.logp

    def engine(self, estimator: Estimator, group_size: int) -> str:
        """The engine that the planner picks for means on these problems, whatever the logits."""
        one = self._seed(self.problem, 0) if estimator.scope == "batch" else self.problem
        return plan(estimator, one, group_size).engine

    def mean(
        self, estimator: Estimator, problem: Problem, group_size: int, engine: str
    ) -> Float[Tensor, "S D"]:
        """The mean update of each seed.

        Unless the estimator looks at a whole batch, all seeds are prompts of one batch, of which
        the mean over prompts is undone.
        """
        if estimator.scope != "batch":
            found = exact(estimator, problem, group_size, engine).mean * self.seeds
            return found.reshape(self.seeds, -1)
        parts = [self._seed(problem, s) for s in range(self.seeds)]
        means = [exact(estimator, part, group_size, engine).mean for part in parts]
        return torch.stack([mean.flatten() for mean in means])

    def _seed(self, problem: Problem, s: int) -> Problem:
        """The prompts of one seed."""
        prompts = problem.prompts // self.seeds
        rows = slice(s * prompts, (s + 1) * prompts)
        names = ("logits", "behavior_logp", "rewards", "lengths", "reference_logp", "proximal_logp")
        given = {name: getattr(problem, name) for name in names}
        mine: dict[str, Any] = {k: None if v is None else v[rows] for k, v in given.items()}
        return replace(problem, **mine)

    def figures(self, parameters: Float[Tensor, "S D"]) -> dict[str, Float[Tensor, " S"]]:
        """Expected reward, entropy and divergence from the start in nats, exactly, a seed."""
        problem = self.at(parameters)
        walk = Walk(problem)

        def seeds(values: Tensor) -> Tensor:
            return values.flatten(1).sum(1).view(self.seeds, -1).mean(1)

        return {
            "value": seeds(walk.leaf_flow * problem.rewards),
            "entropy": -seeds(walk.flow * problem.logp),
            "kl_start": seeds(walk.flow * (problem.logp - self.problem.logp)),
        }


def along_means(
    table: Table,
    estimator: Estimator,
    ascent: Ascent,
    sampler: Sampler,
    among: Generators,
    *,
    steps: int,
    group_size: int = 8,
    passes: int = 1,
    reference: Reference | None = None,
) -> Iterator[State]:
    """Ascent along the estimator's exact mean under the sampler; a state a batch.

    Args:
        table: where.
        estimator: whose mean an engine knows.
        ascent: how parameters move.
        sampler: whose law the mean is taken over.
        among: a generator a seed, for the direction of the sampler's noise.
        steps: batches.
        group_size: responses of a prompt.
        passes: updates under one law.
        reference: of a penalty; None: the estimator has none.

    Raises:
        BadInput: several versions draw one group: its members have different laws.
        Undefined: no engine knows the mean; raised at the first update.
    """
    if sampler.mixed > 1:
        raise BadInput(f"mixed is {sampler.mixed}; allowed: 1, as a mean has one law")
    versions = Versions(table.unpack, table.start, sampler, among)
    engine = table.engine(estimator, group_size)

    def update(parameters: Tensor, law: Tensor, others: Others) -> Tensor:
        return table.mean(estimator, table.at(parameters, law, others), group_size, engine)

    return rounds(
        Climber(table.unpack, table.start, ascent),
        lambda: table.law(versions.due(), sampler),
        update,
        versions.learn,
        steps=steps,
        passes=passes,
        reference=reference,
    )


@final
@dataclass(frozen=True, kw_only=True, eq=False)
class Group:
    """Responses as they were drawn, by number, with the sampler's log-probabilities."""

    index: Int[Tensor, "R G"]
    behavior_logp: Float[Tensor, "R G T"]
    head_behavior_logp: Float[Tensor, "R G T V"] | None


def along_samples(
    table: Table,
    estimator: Estimator,
    ascent: Ascent,
    sampler: Sampler,
    among: Generators,
    *,
    steps: int,
    group_size: int = 8,
    passes: int = 1,
    reference: Reference | None = None,
) -> Iterator[State]:
    """Ascent along updates of groups that the sampler draws; a state a batch.

    Args:
        table: where; every prompt is in every batch.
        estimator: called on each seed's batch.
        ascent: how parameters move.
        sampler: who draws; several versions share the members of a group.
        among: a generator a seed.
        steps: batches.
        group_size: responses of a prompt.
        passes: updates with each batch.
        reference: of a penalty; None: the estimator has none.
    """
    versions = Versions(table.unpack, table.start, sampler, among)
    head = estimator.centering is not None

    def draw() -> Group:
        u = uniform(among, table.problem.prompts // table.seeds, group_size).flatten(0, 1).double()
        parts = [
            drawn(table.problem, table.law(versions.due(version), sampler), share, head=head)
            for version, share in enumerate(u.tensor_split(sampler.mixed, 1))
        ]
        heads = [part.head_behavior_logp for part in parts if part.head_behavior_logp is not None]
        return Group(
            index=torch.cat([part.index for part in parts], 1),
            behavior_logp=torch.cat([part.behavior_logp for part in parts], 1),
            head_behavior_logp=torch.cat(heads, 1) if heads else None,
        )

    def update(parameters: Tensor, group: Group, others: Others) -> Tensor:
        return sampled_update(table, estimator, parameters, group, others)

    return rounds(
        Climber(table.unpack, table.start, ascent),
        draw,
        update,
        versions.learn,
        steps=steps,
        passes=passes,
        reference=reference,
    )


def drawn(
    problem: Problem, law: Float[Tensor, "R N V"], u: Float[Tensor, "R G"], *, head: bool
) -> Group:
    """The responses that numbers from 0 to 1 fall on under a law."""
    responses = Responses(replace(problem, logits=law, behavior_logp=law))
    index = chosen(responses.walk.leaf_flow, u)
    batch = responses.batch(index.unsqueeze(0), head=head)
    heads = None if batch.head_behavior_logp is None else batch.head_behavior_logp[0]
    return Group(index=index, behavior_logp=batch.get("behavior_logp")[0], head_behavior_logp=heads)


def sampled_update(
    table: Table,
    estimator: Estimator,
    parameters: Float[Tensor, "S D"],
    group: Group,
    others: Others | None = None,
) -> Float[Tensor, "S D"]:
    """The update of one group a prompt: coefficients of each seed's batch, times scores."""
    responses = Responses(table.at(parameters, None, others))
    index = group.index.unsqueeze(0)
    batch = responses.batch(index, head=group.head_behavior_logp is not None)
    heads = group.head_behavior_logp
    flat = replace(
        batch,
        behavior_logp=group.behavior_logp.unsqueeze(0),
        head_behavior_logp=None if heads is None else heads.unsqueeze(0),
    )
    found = coefficients(estimator, _by_seed(flat, table.seeds))
    own = found.own.flatten(0, 1).unsqueeze(0)
    pull = None if found.head is None else found.head.flatten(0, 1).unsqueeze(0)
    return responses.pulled_back(index, own, pull).view_as(parameters)


def _by_seed(batch: Batch, seeds: int) -> Batch:
    """A batch `[1 S*P G ...]` as one of each seed, `[S P G ...]`."""
    values = {field.name: getattr(batch, field.name) for field in fields(batch)}
    tensors = {k: v for k, v in values.items() if isinstance(v, Tensor)}
    return replace(batch, **{k: v[0].unflatten(0, (seeds, -1)) for k, v in tensors.items()})
