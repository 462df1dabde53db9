"""Training a small network on sums with the estimators of the catalogue.

One step is: log-probabilities of a batch, an estimator's coefficients, the scores they multiply, an
optimizer's step along the clipped gradient.  `offline` walks through recorded responses in epochs;
`online` draws each batch from a sampler that may lag, be refreshed now and then, frozen, noisy,
rounded, truncated or mixed, and may pass over it several times.  Every random number comes from the
generators given, one a seed, so a run is a function of its arguments.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, final

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from windage.estimators.batch import Batch
from windage.estimators.errors import BadInput, unknown
from windage.estimators.estimator import Coefficients, Estimator, coefficients
from windage.estimators.penalty import ema
from windage.toy.learning import State, clip_norm
from windage.toy.network import Network, batch_of, slope
from windage.toy.sums import Generators

Rule = Estimator | Callable[[Batch], Coefficients]
OPTIMIZERS: Mapping[str, Callable[..., torch.optim.Optimizer]] = {
    "sgd": torch.optim.SGD,
    "adam": torch.optim.Adam,
    "adafactor": torch.optim.Adafactor,
}


@final
@dataclass(frozen=True, kw_only=True)
class Ascent:
    """An optimizer, its rate and the clip of the gradient's norm.

    Args:
        optimizer: sgd, adam or adafactor, as torch has them.
        rate: at the first step.
        last_rate: at the last step, linear in between; None: the same throughout.
        limit: greatest norm of a gradient, a seed; inf: no clip.
        settings: of the optimizer.
    """

    optimizer: str = "adam"
    rate: float = 1e-3
    last_rate: float | None = None
    limit: float = 1.0
    settings: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.optimizer not in OPTIMIZERS:
            raise unknown("optimizer", self.optimizer, OPTIMIZERS)

    def rate_at(self, step: int, steps: int) -> float:
        """Step size of one step of so many."""
        if self.last_rate is None or steps < 2:
            return self.rate
        return self.rate + (self.last_rate - self.rate) * step / (steps - 1)


@final
class Climber:
    """Parameters and the state of their optimizer; `step` moves both.

    Adafactor looks at whole matrices, so each seed's matrices are parameters of their own; the
    others work number by number on all seeds at once.
    """

    def __init__(self, network: Network, start: Float[Tensor, "S D"], ascent: Ascent) -> None:
        self.ascent = ascent
        self.parameters = start.clone()
        self._gradient = torch.zeros_like(start)
        if ascent.optimizer == "adafactor":
            pairs = [
                (view[s], slope_[s])
                for view, slope_ in zip(
                    network.unpack(self.parameters).values(),
                    network.unpack(self._gradient).values(),
                    strict=True,
                )
                for s in range(len(start))
            ]
        else:
            pairs = [(self.parameters, self._gradient)]
        for parameter, gradient in pairs:
            parameter.grad = gradient
        self._optimizer = OPTIMIZERS[ascent.optimizer](
            [parameter for parameter, _ in pairs], lr=ascent.rate, maximize=True, **ascent.settings
        )

    def step(self, gradient: Float[Tensor, "S D"], rate: float) -> Float[Tensor, " S"]:
        """Move along the gradient; its norm before clipping, a seed."""
        clipped, norm = clip_norm(gradient, self.ascent.limit)
        self._gradient.copy_(clipped)
        for group in self._optimizer.param_groups:
            group["lr"] = rate
        self._optimizer.step()
        return norm


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
    reference: Float[Tensor, "S D"] | None = None,
    proximal: Float[Tensor, "S B T"] | None = None,
) -> Float[Tensor, "S D"]:
    """The update that a rule makes of a record: coefficients times scores, by the parameters."""
    tape = network.forward(parameters, record.prompts, record.tokens)
    before = None
    if reference is not None:
        before = network.forward(reference, record.prompts, record.tokens).of(record.tokens)
    batch = batch_of(
        tape,
        record.tokens,
        record.behavior_logp,
        record.rewards,
        len(record),
        network.task,
        present=record.present,
        head_behavior_logp=record.head_behavior_logp,
        reference_logp=before,
        proximal_logp=proximal,
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
    climber = Climber(network, start, ascent)
    norm = start.new_zeros(len(start))
    yield State(step=0, parameters=climber.parameters.clone(), norm=norm)
    for epoch in range(epochs):
        order = torch.stack([torch.randperm(len(record), generator=g) for g in among])
        for i, rows in enumerate(order[:, : number * batch].split(batch, 1)):
            found = gradient(network, climber.parameters, record.take(rows), rule)
            rate = ascent.rate_at(epoch * number + i, epochs * number)
            norm = climber.step(found, rate)
        done = (epoch + 1) * number
        yield State(step=done, parameters=climber.parameters.clone(), norm=norm)


@final
@dataclass(frozen=True, kw_only=True)
class Sampler:
    """Which weights draw the responses, and how far they are from those they stand for.

    Args:
        lag: updates between the weights that draw and the newest.
        every: updates from one refresh of the sampler to the next.
        frozen: the sampler keeps the weights of the start.
        mixed: a batch is drawn by so many versions, the newest first, each `lag` updates older
            than the one before; 1: by the one that lags.
        sigma: size of a fixed Gaussian direction added to the weights, in units of the starting
            root mean square of each matrix; 0: none.
        bits: weights of the matrices are rounded to so many bits a column; 0: not rounded.
        top_p: mass of the nucleus that tokens are drawn from.
    """

    lag: int = 0
    every: int = 1
    frozen: bool = False
    mixed: int = 1
    sigma: float = 0.0
    bits: int = 0
    top_p: float = 1.0

    def __post_init__(self) -> None:
        for name, least in (("lag", 0), ("every", 1), ("mixed", 1), ("sigma", 0), ("bits", 0)):
            if not getattr(self, name) >= least:
                raise BadInput(f"{name} is {getattr(self, name)}; allowed: {least} or more")
        if self.bits == 1 or not 0 < self.top_p <= 1:
            raise BadInput(
                f"bits is {self.bits}, top_p is {self.top_p}; allowed: 0 or at least 2 bits, and a "
                "mass above 0 and at most 1"
            )


MATRICES = ("A", "U", "W", "O")


def direction(
    network: Network, start: Float[Tensor, "S D"], among: Generators
) -> Float[Tensor, "S D"]:
    """A Gaussian direction, each parameter's share scaled by its root mean square at the start."""
    draws = torch.stack([torch.randn(start.shape[1], generator=g) for g in among]).to(start.dtype)
    for value, share in zip(
        network.unpack(start).values(), network.unpack(draws).values(), strict=True
    ):
        dims = tuple(range(1, value.dim()))
        share.mul_(value.square().mean(dims, keepdim=True).sqrt())
    return draws


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
    """The sampler of a run: it keeps as many past weights as it needs, and draws from them."""

    def __init__(
        self, network: Network, start: Float[Tensor, "S D"], sampler: Sampler, among: Generators
    ) -> None:
        self.network, self.sampler, self.among = network, sampler, among
        deepest = sampler.lag * sampler.mixed + sampler.every
        self._past: deque[Tensor] = deque([start.clone()], maxlen=deepest)
        self._offset = sampler.sigma * direction(network, start, among) if sampler.sigma else None
        self._step = 0

    def learn(self, parameters: Float[Tensor, "S D"]) -> None:
        """Take note of new weights; they are used when the sampler's rule lets them in."""
        if not self.sampler.frozen:
            self._step += 1
            self._past.append(parameters.clone())

    def weights(self, version: int = 0) -> Float[Tensor, "S D"]:
        """What draws: the weights that are due, with noise, rounded."""
        back = self.sampler.lag * (version + (self.sampler.mixed == 1))
        back += self._step % self.sampler.every
        found = self._past[max(0, len(self._past) - 1 - back)]
        if self._offset is not None:
            found = found + self._offset
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


@final
@dataclass(frozen=True, kw_only=True)
class Reference:
    """When the policy of a penalty is refreshed.

    Args:
        every: updates from one hard copy to the next; None: never.  An epoch of the prompts is a
            number of updates too.
        share: of the policy in each refresh; 1 is a hard copy, less a mix-up (EMA).
    """

    every: int | None = None
    share: float = 1.0


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
        passes: updates made with each batch; the first sees the weights that the sampler was
            compared with, and they anchor decoupled clips.
        reference: of a penalty; None: the rule has none.
        admit: what of a batch is trained on.
    """
    climber = Climber(network, start, ascent)
    source = Source(network, start, sampler, among)
    anchor = None if reference is None else start.clone()
    head = isinstance(rule, Estimator) and rule.centering is not None
    decoupled = isinstance(rule, Estimator) and "proximal_logp" in rule.needs
    norm = start.new_zeros(len(start))
    yield State(step=0, parameters=climber.parameters.clone(), norm=norm)
    for step in range(steps):
        who = torch.stack([torch.randint(prompts.shape[1], (batch,), generator=g) for g in among])
        chosen = prompts.gather(1, who.unsqueeze(-1).expand(-1, -1, prompts.shape[-1]))
        record = admit(source.draw(chosen, group_size, grade, head=head))
        proximal = None
        if decoupled:
            tape = network.forward(climber.parameters, record.prompts, record.tokens)
            proximal = tape.of(record.tokens)
        for _ in range(passes):
            found = gradient(
                network, climber.parameters, record, rule, reference=anchor, proximal=proximal
            )
            norm = climber.step(found, ascent.rate_at(step, steps))
            source.learn(climber.parameters)
        if anchor is not None and _due(reference, step + 1):
            anchor = ema(anchor, climber.parameters, coefficient=reference.share)  # type: ignore[union-attr]
        yield State(step=step + 1, parameters=climber.parameters.clone(), norm=norm)


def _due(reference: Reference | None, step: int) -> bool:
    return reference is not None and reference.every is not None and step % reference.every == 0


def fit(
    network: Network,
    among: Generators,
    draw: Callable[[int], tuple[Int[Tensor, "S B K"], Int[Tensor, "S B T"]]],
    *,
    steps: int = 800,
    batch: int = 256,
    ascent: Ascent = Ascent(rate=5e-3, last_rate=1e-5),
) -> Float[Tensor, "S D"]:
    """A base policy: maximum likelihood on fresh demonstrations.

    Args:
        draw: prompts and responses of so many demonstrations.
    """
    start = network.initial(among)
    climber = Climber(network, start, ascent)
    for step in range(steps):
        prompts, tokens = draw(batch)
        tape = network.forward(climber.parameters, prompts, tokens)
        own = network.task.mask(tokens) / batch
        found = network.backward(climber.parameters, tape, slope(own, None, tokens, tape.logp))
        climber.step(found, ascent.rate_at(step, steps))
    return climber.parameters
