"""The policy in training: one optimizer update of recorded responses, and what it told.

rows -> record -> coefficients and gradient (`update.accumulate`) -> clip -> optimizer
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, final

import torch
from torch import Tensor

from windage.estimators.batch import Batch
from windage.estimators.errors import BadInput
from windage.estimators.estimator import Estimator
from windage.llm import guard as guards
from windage.llm.critic import Critic
from windage.llm.guard import Count, Fault, Guard
from windage.llm.models import Loaded, Policy, reference_pass
from windage.llm.passes import Responses
from windage.llm.ranks import Ranks
from windage.llm.rollouts import to_batch
from windage.llm.update import Forward, Pass, Update, accumulate, ahead

Row = dict[str, Any]


@final
@dataclass(frozen=True, kw_only=True)
class Settings:
    """How updates are made; the names are those of the configuration."""

    group_size: int
    micro_batch: int
    temperature: float
    max_grad_norm: float
    guard: Guard
    keep_head: bool = False


@final
@dataclass(frozen=True, kw_only=True, eq=False)
class Outcome:
    """What an update told.

    Args:
        made: whether the weights moved.
        batch: the record, with log-probabilities from before the update.
        update: coefficients and what was turned away; None where nothing could be accumulated.
        entropy: of the policy before each token, in nats.
        gradient_norm: before clipping.
        faults: numbers that were not finite.
        count: what the guard counted, this update included.
        rejected: why admission turned a row away, by the row's place; None: it did not.
    """

    made: bool
    batch: Batch
    update: Update | None
    entropy: Tensor
    gradient_norm: float
    faults: list[Fault]
    rejected: list[str | None]
    count: Count = field(default_factory=Count)


@final
class Learner:
    """Model, optimizer, schedule and reference.

    Args:
        loaded: the model; its weights are trained in place.
        policy: what is called, such as a sharded form of `loaded.policy`.
        estimator: the recipe.
        optimizer: of torch, over the parameters that train.
        schedule: of the learning rate, stepped after each update.
        reference: a frozen copy for penalties, or None: none is needed, or adapters are off for it.
        ranks: processes that train together.
        critic: gives values and learns them; None: the recipe needs none.
    """

    def __init__(
        self,
        loaded: Loaded,
        estimator: Estimator,
        *,
        policy: Any,
        optimizer: Any,
        schedule: Any,
        reference: Policy | None,
        settings: Settings,
        ranks: Ranks,
        critic: Critic | None = None,
    ) -> None:
        self.loaded, self.policy, self.estimator = loaded, policy, estimator
        self.optimizer, self.schedule, self.reference = optimizer, schedule, reference
        self.settings, self.ranks, self.critic = settings, ranks, critic
        self.updates, self.count = 0, Count()

    @property
    def trained(self) -> list[Any]:
        """Parameters that an update moves."""
        return [p for p in self.policy.parameters() if p.requires_grad]

    def _responses(self, rows: Sequence[Row]) -> tuple[Batch, Responses]:
        batch = to_batch(rows, group_size=self.settings.group_size, current_version=self.updates)
        return batch, Responses(
            rows,
            batch,
            temperature=self.settings.temperature,
            device=self.loaded.device,
            keep_head=self.settings.keep_head,
        )

    def prepare(self, rows: Sequence[Row]) -> None:
        """Write into the rows what the recipe needs of other policies: proximal and reference.

        The proximal policy is the one that the rollout batch finds; both are computed once, before
        the first of its updates.
        """
        needs = self.estimator.needs
        wanted = [n for n in ("proximal_logp", "reference_logp") if n in needs]
        wanted = [n for n in wanted if any(n not in row for row in rows)]
        if not wanted:
            return
        batch, responses = self._responses([{**row, "rejected": None} for row in rows])
        parts = responses.parts(self.settings.micro_batch)
        for name in wanted:
            with self._seen_as(name) as policy:
                told = ahead(batch, responses.through(policy), parts, self.ranks)["logp"]
            assert batch.row_index is not None
            for place, number in enumerate(batch.row_index.flatten().tolist()):
                if number >= 0:
                    size = len(rows[number]["response_ids"])
                    rows[number][name] = told.flatten(0, 1)[place, :size].double().numpy()
        for row in rows:
            for name in wanted:
                row.setdefault(name, [0.0] * len(row["response_ids"]))

    def appraise(self, rows: Sequence[Row], step: int) -> dict[str, float]:
        """Put the critic's values into the rows, fit it to them, and give its figures.

        Args:
            rows: of the whole rollout batch.
            step: of the run, from 0.
        """
        if self.critic is None:
            return {}
        clock = time.perf_counter()
        found = self.critic.appraise(rows, *self._responses(rows), step)
        return found | {"time__critic": time.perf_counter() - clock}

    def watch(self, rows: Sequence[Row], known: Sequence[Fault] = ()) -> Outcome:
        """What a step tells in which the policy does not move.

        Args:
            rows, known: as of `update`.
        """
        batch, responses = self._responses(rows)
        self.count = guards.after(self.settings.guard, self.count, known, made=True)
        return Outcome(
            made=False,
            batch=batch,
            update=None,
            entropy=self._whole(responses.seen.entropy, batch, ()),
            gradient_norm=0.0,
            faults=list(known),
            rejected=[row["rejected"] for row in rows],
            count=self.count,
        )

    @contextmanager
    def _seen_as(self, name: str) -> Iterator[Any]:
        """The policy that a column is of."""
        if name == "proximal_logp":
            yield self.policy
        elif self.reference is not None:
            yield self.reference
        else:
            with reference_pass(self.loaded.policy):
                yield self.policy

    def update(self, rows: Sequence[Row], known: Sequence[Fault] = ()) -> Outcome:
        """Make one optimizer update of some rows, or leave everything as it was.

        Args:
            rows: whole groups.
            known: faults of what was recorded, whose rows are set aside already.

        Raises:
            BadInput: the guard ends the run.
            ValueError: the rows lack what the recipe needs.
        """
        faults = list(known)
        rows = list(rows)
        while True:
            batch, responses = self._responses(rows)
            found = self._gradient(rows, batch, responses)
            faults += found.faults
            decision = guards.judge(self.settings.guard, found.faults)
            if decision != "set aside":
                break
            for number in guards.aside(found.faults):
                rows[number] = rows[number] | {"reward": None, "rejected": "not finite"}
        made = decision == "go on" and guards.judge(self.settings.guard, known) != "skip"
        if made:
            self.optimizer.step()
            self.schedule.step()
            self.updates += 1
        self.optimizer.zero_grad(set_to_none=True)
        self.count = guards.after(self.settings.guard, self.count, faults, made=made)
        rejected = _rejected(rows, found, batch)
        return replace(found, made=made, faults=faults, rejected=rejected, count=self.count)

    def _gradient(self, rows: Sequence[Row], batch: Batch, responses: Responses) -> Outcome:
        """Accumulate and clip; what is not finite is told."""
        self.optimizer.zero_grad(set_to_none=True)
        faults, norm, update = list[Fault](), 0.0, None
        beside = None if self.critic is None else self.critic.pull(rows, batch)
        passed = _guarded(responses.through(self.policy, beside), batch, faults)
        parts = responses.parts(self.settings.micro_batch)

        def settle() -> None:
            if found := self.ranks.everyone(faults):
                raise _NotFinite(found)

        try:
            update = accumulate(self.estimator, batch, passed, parts, self.ranks, settle)
        except _NotFinite as problem:
            faults = _each_once(problem.faults)
        except ValueError as problem:
            raise BadInput(str(problem)) from problem
        if update is not None:
            self.ranks.reduce(self.trained)
            found = torch.nn.utils.clip_grad_norm_(
                self.trained, self.settings.max_grad_norm or float("inf")
            )
            found = found.full_tensor() if hasattr(found, "full_tensor") else found
            norm = float(found)
            faults = guards.in_update("gradient_norm", norm)
            batch = self._told(batch, update, responses, parts)
        return Outcome(
            made=False,
            batch=batch,
            update=update,
            entropy=self._whole(responses.seen.entropy, batch, parts),
            gradient_norm=norm,
            faults=faults,
            rejected=[],
        )

    def _told(
        self, batch: Batch, update: Update, responses: Responses, parts: Sequence[Tensor]
    ) -> Batch:
        """The record with what the passes told."""
        seen = responses.seen
        head = None if seen.head_logp is None else self._whole(seen.head_logp, batch, parts)
        return replace(
            batch,
            logp=update.logp.to(batch.rewards.dtype),
            probability_square=self._whole(seen.probability_square, batch, parts),
            head_logp=head,
        )

    def _whole(self, values: Tensor, batch: Batch, parts: Sequence[Tensor]) -> Tensor:
        """What the processes saw of the batch's tokens, each of its own responses."""
        mine = self.ranks.own(parts, len(values)).view(-1, *(1,) * (values.dim() - 1))
        found = self.ranks.sum(torch.where(mine, values, 0.0))
        return found.view(*batch.mask.shape, *values.shape[2:]).to(batch.rewards.dtype)


def _rejected(rows: Sequence[Row], found: Outcome, batch: Batch) -> list[str | None]:
    """Why each row was turned away, what was said before first."""
    reasons: list[str | None] = [row["rejected"] for row in rows]
    if found.update is None or batch.row_index is None:
        return reasons
    terms = found.update.terms
    for number, reason in zip(
        batch.row_index.flatten().tolist(), terms.reason.flatten().tolist(), strict=True
    ):
        if number >= 0 and reason and reasons[number] is None:
            reasons[number] = terms.reasons[reason - 1]
    return reasons


class _NotFinite(ValueError):
    """Log-probabilities of the policy that are not finite, by row."""

    def __init__(self, faults: list[Fault]) -> None:
        super().__init__("not finite")
        self.faults = faults


def _each_once(faults: Sequence[Fault]) -> list[Fault]:
    """One a row, in order: a row may have been passed by two processes."""
    found = {fault.response: fault for fault in faults}
    return [found[row] for row in sorted(found, key=lambda row: row or 0)]


def _guarded(forward: Pass, batch: Batch, faults: list[Fault]) -> Pass:
    """The same pass; what is not finite is noted, and goes on as 0 for as long as others pass."""
    assert batch.row_index is not None
    rows, mask = batch.row_index.flatten(), batch.mask.flatten(0, 1)

    def checked(numbers: Tensor) -> Forward:
        found = forward(numbers)
        own, where = rows[numbers].tolist(), mask[numbers].to(found.logp.device)
        wrong = guards.in_responses("logp", found.logp.detach(), where)
        if not wrong:
            return found
        faults.extend(replace(fault, response=own[fault.response or 0]) for fault in wrong)
        return Forward(
            logp=found.logp.nan_to_num(0.0, 0.0, 0.0),
            head_logp=None if found.head_logp is None else found.head_logp.nan_to_num(0.0, 0.0),
            probability_square=(
                None if found.probability_square is None else found.probability_square.nan_to_num()
            ),
        )

    return checked


def optimizer_of(name: str, parameters: list[Any], settings: Mapping[str, Any]) -> Any:
    """An optimizer by its name.

    Args:
        name: adamw, adafactor or sgd.
        parameters: to train.
        settings: learning_rate, weight_decay, beta1, beta2.

    Raises:
        BadInput: nothing trains.
    """
    if not parameters:
        raise BadInput("no parameter of the model trains; allowed: a model with some")
    rate, decay = settings["learning_rate"], settings["weight_decay"]
    if name == "adafactor":
        return torch.optim.Adafactor(parameters, lr=rate, weight_decay=decay)
    if name == "sgd":
        return torch.optim.SGD(parameters, lr=rate, weight_decay=decay)
    betas = (settings["beta1"], settings["beta2"])
    return torch.optim.AdamW(parameters, lr=rate, weight_decay=decay, betas=betas)


def schedule_of(name: str, optimizer: Any, *, warmup: int, total: int) -> Any:
    """A learning-rate schedule by its name, over `total` updates, rising over `warmup`."""
    from transformers import get_scheduler

    full = {"constant": "constant_with_warmup"}.get(name, name)
    return get_scheduler(full, optimizer, num_warmup_steps=warmup, num_training_steps=total)
