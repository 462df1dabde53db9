"""Training a small network on sums with the estimators of the catalogue.

One step is: log-probabilities of a batch, an estimator's coefficients, the scores they multiply, an
optimizer's step along the clipped gradient.  `offline` walks through recorded responses in epochs;
`online` draws each batch from a sampler that may lag, be refreshed now and then, frozen, noisy,
rounded, truncated or mixed, and may pass over it several times.  Every random number comes from the
generators given, one a seed, so a run is a function of its arguments.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, final

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from windage.estimators.batch import Batch
from windage.estimators.errors import BadInput
from windage.estimators.estimator import Coefficients, Estimator, coefficients
from windage.toy.ascent import Ascent, Climber, Others, Reference, Sampler, Versions, rounds
from windage.toy.learning import State
from windage.toy.network import Network, batch_of, slope
from windage.toy.sums import Generators

Rule = Estimator | Callable[[Batch], Coefficients]
MATRICES = ("A", "U", "W", "O")
FITTING = Ascent(rate=5e-3, last_rate=1e-5)


@final
@dataclass(frozen=True, kw_only=True, eq=False)
class Record:
    """Responses with what was recorded when they were drawn, those of a prompt side by side.

    Args:
        prompts: of each response.
        tokens: sampled.
        behavior_logp: of each token under whoever drew it.
        rewards: of each response.
        group_size: responses of a prompt.
        head_behavior_logp: of the sampler over the vocabulary.
        present: False where a response is left out; None: all are there.
    """

    prompts: Int[Tensor, "S N K"]
    tokens: Int[Tensor, "S N T"]
    behavior_logp: Float[Tensor, "S N T"]
    rewards: Float[Tensor, "S N"]
    group_size: int = 1
    head_behavior_logp: Float[Tensor, "S N T V"] | None = None
    present: Bool[Tensor, "S N"] | None = None

    def __len__(self) -> int:
        return self.tokens.shape[1] // self.group_size

    def take(self, groups: Int[Tensor, "S P"]) -> Record:
        """The groups by number, a choice a seed."""
        rows = groups.unsqueeze(-1) * self.group_size + torch.arange(self.group_size)
        rows = rows.flatten(1)

        def pick(values: Tensor | None) -> Any:
            if values is None:
                return None
            shape = (*rows.shape, *[1] * (values.dim() - 2))
            return values.gather(1, rows.view(shape).expand(*rows.shape, *values.shape[2:]))

        return replace(
            self,
            prompts=pick(self.prompts),
            tokens=pick(self.tokens),
            behavior_logp=pick(self.behavior_logp),
            rewards=pick(self.rewards),
            head_behavior_logp=pick(self.head_behavior_logp),
            present=pick(self.present),
        )


def gradient(
    network: Network,
    parameters: Float[Tensor, "S D"],
    record: Record,
    rule: Rule,
    *,
    others: Others | None = None,
) -> Float[Tensor, "S D"]:
    """The update that a rule makes of a record: coefficients times scores, by the parameters."""

    def of(weights: Tensor | None) -> Tensor | None:
        if weights is None:
            return None
        return network.forward(weights, record.prompts, record.tokens).of(record.tokens)

    tape = network.forward(parameters, record.prompts, record.tokens)
    anchored = others is not None and isinstance(rule, Estimator) and "proximal_logp" in rule.needs
    batch = batch_of(
        tape,
        record.tokens,
        record.behavior_logp,
        record.rewards,
        len(record),
        network.task,
        present=record.present,
        head_behavior_logp=record.head_behavior_logp,
        reference_logp=of(others and others.reference),
        proximal_logp=of(others.proximal) if others and anchored else None,
    )
    found = coefficients(rule, batch) if isinstance(rule, Estimator) else rule(batch)
    own = found.own.flatten(1, 2)
    head = None if found.head is None else found.head.flatten(1, 2)
    return network.backward(parameters, tape, slope(own, head, record.tokens, tape.logp))


def offline(
    network: Network,
    start: Float[Tensor, "S D"],
    record: Record,
    rule: Rule,
    ascent: Ascent,
    among: Generators,
    *,
    epochs: int,
    batch: int,
) -> Iterator[State]:
    """Epochs over a record in minibatches of groups, shuffled anew each time; a state an epoch.

    What does not fill a minibatch at the end of an epoch is left out.

    Raises:
        BadInput: a minibatch larger than the record.
    """
    number = len(record) // batch
    if number < 1:
        raise BadInput(f"batch is {batch}; allowed: at most the record's {len(record)} groups")
    climber = Climber(network.unpack, start, ascent)
    yield climber.start()
    for epoch in range(epochs):
        order = torch.stack([torch.randperm(len(record), generator=g) for g in among])
        for i, rows in enumerate(order[:, : number * batch].split(batch, 1)):
            found = gradient(network, climber.parameters, record.take(rows), rule)
            rate = ascent.rate_at(epoch * number + i, epochs * number)
            norm = climber.step(found, rate)
        yield climber.state((epoch + 1) * number, norm)


def rounded(network: Network, parameters: Float[Tensor, "S D"], b: int) -> Float[Tensor, "S D"]:
    """Matrices rounded to b bits, symmetric about 0, one scale a column of outputs."""
    out = parameters.clone()
    for name, value in network.unpack(out).items():
        if name in MATRICES:
            dims = tuple(range(1, value.dim() - 1))
            unit = value.abs().amax(dims, keepdim=True) / (2 ** (b - 1) - 1)
            unit = torch.where(unit > 0, unit, 1.0)
            value.copy_((value / unit).round() * unit)
    return out


@final
class Source:
    """The sampler of a run: past weights, rounded, and responses drawn from them."""

    def __init__(
        self, network: Network, start: Float[Tensor, "S D"], sampler: Sampler, among: Generators
    ) -> None:
        self.network, self.sampler, self.among = network, sampler, among
        self.versions = Versions(network.unpack, start, sampler, among)

    def weights(self, version: int = 0) -> Float[Tensor, "S D"]:
        """What draws: the weights that are due, with noise, rounded."""
        found = self.versions.due(version)
        return rounded(self.network, found, self.sampler.bits) if self.sampler.bits else found

    def draw(
        self,
        prompts: Int[Tensor, "S P K"],
        group_size: int,
        grade: Callable[[Tensor, Tensor], Tensor],
        *,
        head: bool = False,
    ) -> Record:
        """Responses to prompts, graded.

        Args:
            prompts: with as many per version as `mixed` splits them into.
            group_size: responses of a prompt.
            grade: rewards of responses, from their prompts and tokens.
            head: record the sampler's log-probabilities over the vocabulary.
        """
        parts = []
        for version, some in enumerate(prompts.tensor_split(self.sampler.mixed, 1)):
            repeated = some.repeat_interleave(group_size, 1)
            weights = self.weights(version)
            top_p = self.sampler.top_p
            tokens, laws = self.network.sample(weights, repeated, self.among, top_p=top_p)
            logp = laws.gather(-1, tokens.unsqueeze(-1)).squeeze(-1)
            parts.append(
                Record(
                    prompts=repeated,
                    tokens=tokens,
                    behavior_logp=logp.where(self.network.task.mask(tokens), 0.0),
                    rewards=grade(repeated, tokens),
                    group_size=group_size,
                    head_behavior_logp=laws if head else None,
                )
            )
        return joined(parts)


def joined(parts: list[Record]) -> Record:
    """Records one after the other."""
    if len(parts) == 1:
        return parts[0]

    def cat(name: str) -> Any:
        values = [getattr(part, name) for part in parts]
        return None if values[0] is None else torch.cat(values, 1)

    names = ("prompts", "tokens", "behavior_logp", "rewards", "head_behavior_logp", "present")
    return replace(parts[0], **{name: cat(name) for name in names})


def online(
    network: Network,
    start: Float[Tensor, "S D"],
    prompts: Int[Tensor, "S N K"],
    rule: Rule,
    ascent: Ascent,
    sampler: Sampler,
    grade: Callable[[Tensor, Tensor], Tensor],
    among: Generators,
    *,
    steps: int,
    batch: int = 32,
    group_size: int = 8,
    passes: int = 1,
    reference: Reference | None = None,
    admit: Callable[[Record], Record] = lambda record: record,
) -> Iterator[State]:
    """Draw a batch, update, tell the sampler; a state a batch.

    Args:
        prompts: to draw from, with replacement.
        rule: an estimator, or a function of a batch.
        ascent: how parameters move.
        sampler: who draws.
        grade: rewards of responses.
        among: a generator a seed.
        steps: batches.
        batch: prompts of a batch.
        group_size: responses of a prompt.
        passes: updates made with each batch.
        reference: of a penalty; None: the rule has none.
        admit: what of a batch is trained on.
    """
    source = Source(network, start, sampler, among)
    head = isinstance(rule, Estimator) and rule.centering is not None

    def draw() -> Record:
        who = torch.stack([torch.randint(prompts.shape[1], (batch,), generator=g) for g in among])
        chosen = prompts.gather(1, who.unsqueeze(-1).expand(-1, -1, prompts.shape[-1]))
        return admit(source.draw(chosen, group_size, grade, head=head))

    def update(parameters: Tensor, record: Record, others: Others) -> Tensor:
        return gradient(network, parameters, record, rule, others=others)

    return rounds(
        Climber(network.unpack, start, ascent),
        draw,
        update,
        source.versions.learn,
        steps=steps,
        passes=passes,
        reference=reference,
    )


def fit(
    network: Network,
    among: Generators,
    draw: Callable[[int], tuple[Int[Tensor, "S B K"], Int[Tensor, "S B T"]]],
    *,
    steps: int = 800,
    batch: int = 256,
    ascent: Ascent = FITTING,
) -> Float[Tensor, "S D"]:
    """A base policy: maximum likelihood on fresh demonstrations.

    Args:
        draw: prompts and responses of so many demonstrations.
    """
    start = network.initial(among)
    climber = Climber(network.unpack, start, ascent)
    for step in range(steps):
        prompts, tokens = draw(batch)
        tape = network.forward(climber.parameters, prompts, tokens)
        own = network.task.mask(tokens) / batch
        found = network.backward(climber.parameters, tape, slope(own, None, tokens, tape.logp))
        climber.step(found, ascent.rate_at(step, steps))
    return climber.parameters
