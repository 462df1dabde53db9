"""One optimizer batch: coefficients, the surrogate, and its gradient in micro-batches.

    loss = -sum(stop_gradient(C) * log pi)

What couples responses is computed once over the whole batch; a micro-batch takes whole responses,
and its coefficients come from the log-probabilities of the very pass that is differentiated.  Only
an estimator whose ratios (or advantages, or admission) couple responses through the policy being
trained costs one pass beforehand.  So the size of the micro-batches cannot change the gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, final

import torch
from jaxtyping import Float, Int
from torch import Tensor

from windage.estimators.batch import Batch
from windage.estimators.estimator import (
    Coefficients,
    Estimator,
    Terms,
    batch_terms,
    coefficients,
    surrogate,
    token_coefficients,
)
from windage.estimators.member import Member
from windage.llm.ranks import ALONE, Ranks

# What only a forward pass of the policy being trained can tell, or what is made of it.
OF_THE_POLICY = {"logp", "head_logp", "probability_square", "log_ratio", "reference_ratio"}
WIDE = ("group", "batch")


@final
@dataclass(frozen=True, kw_only=True, eq=False)
class Forward:
    """What a forward pass says of the tokens of some responses.

    Args:
        logp: of the sampled tokens; anything finite after the end.
        head_logp: of the head tokens, -inf where there is none; None: no head.
        probability_square: sum of squared probabilities; None: not asked for.
        beside: another loss of these responses, differentiable, which adds up over the parts, such
            as a critic's on the policy's trunk; None: there is none.
    """

    logp: Float[Tensor, "R T"]
    head_logp: Float[Tensor, "R T K"] | None = None
    probability_square: Float[Tensor, "R T"] | None = None
    beside: Float[Tensor, ""] | None = None

    def into(self, batch: Batch) -> Batch:
        """The record of these responses with what the pass says, as constants.

        Raises:
            ValueError: the pass says something that is not finite; names the response.
        """
        given = _given(self, batch.rewards.device)
        found: dict[str, Any] = {name: value.unsqueeze(1) for name, value in given.items()}
        return replace(batch, **found).validate()


def _given(found: Forward, device: torch.device) -> dict[str, Tensor]:
    """What a pass said, as constants beside the batch."""
    values = {f.name: getattr(found, f.name) for f in fields(found) if f.name != "beside"}
    return {name: v.detach().to(device) for name, v in values.items() if v is not None}


@final
@dataclass(frozen=True, kw_only=True, eq=False)
class Update:
    """What was accumulated, for whoever reports on it.

    Args:
        own: coefficients of the sampled tokens.
        logp: their log-probabilities before the update.
        terms: what coupled the responses.
    """

    own: Float[Tensor, "P G T"]
    logp: Float[Tensor, "P G T"]
    terms: Terms


Pass = Callable[[Int[Tensor, " _"]], Forward]


def looks_ahead(estimator: Estimator) -> bool:
    """Whether an estimator needs the log-probabilities of the whole batch before the first part.

    Example:
        >>> from windage.estimators.catalogue import get
        >>> looks_ahead(get("gspo")), looks_ahead(get("self_normalized"))
        (False, True)
    """
    early: list[Member] = [estimator.advantage, estimator.aggregation, *estimator.admission]
    fines = [m for m in estimator.active_penalties if m.traits.place == "loss"]
    early += [m for m in estimator.active_penalties if m.traits.place != "loss"]
    return (
        any(OF_THE_POLICY & set(member.traits.needs) for member in early)
        or any(member.traits.scope in WIDE for member in fines)
        or any(c.scope in WIDE for c in estimator.corrections if not c.idle)
    )


def micro_batches(batch: Batch, size: int) -> list[Int[Tensor, " _"]]:
    """Responses that have trainable tokens, `size` at a time, as numbers p G + g.

    Example:
        >>> batch = Batch.from_rows([1.0, 0.0, 1.0], "aab", mask=[[1], [], [1]])
        >>> [rows.tolist() for rows in micro_batches(batch, 2)]
        [[0, 2]]
    """
    rows = batch.mask.any(-1).flatten().nonzero().squeeze(1)
    return list(rows.split(size)) if len(rows) else []


def accumulate(
    estimator: Estimator,
    batch: Batch,
    forward: Pass,
    parts: Sequence[Int[Tensor, " _"]],
    ranks: Ranks = ALONE,
    settle: Callable[[], None] = lambda: None,
) -> Update:
    """Add the gradient of the surrogate to that of the policy's parameters.

    Claims:
        The same for every division into parts and processes, up to rounding.
        One forward pass a response, two where `looks_ahead` says so.

    Args:
        estimator: of the catalogue, or composed.
        batch: without what a pass of the policy being trained tells.
        forward: differentiable, of responses by their numbers p G + g; called in the order of
            `parts`.
        parts: numbers of responses; together all that have trainable tokens, each once.
        ranks: processes that share the parts; each knows the whole batch.  What each added is
            still to be summed by `Ranks.reduce`.
        settle: called by every process when its passes are done, before anything is made of them
            all; may refuse, on every process alike.

    Returns:
        What was accumulated, in constants.

    Raises:
        ValueError: what `Estimator.check` and `Coefficients.validate` refuse, or parts that leave
            out a response or repeat it.
    """
    batch = _checked(estimator, batch)
    _covers(batch, parts)
    flat = _by_response(batch)
    own, logp = (torch.zeros_like(batch.mask, dtype=torch.float64).flatten(0, 1) for _ in range(2))
    whole = None
    if looks_ahead(estimator):
        told = ahead(batch, forward, parts, ranks)
        settle()
        whole = _whole(estimator, batch, told)
    terms = batch_terms(estimator, batch) if whole is None else whole.terms
    apart = _terms_by_response(terms)

    def of_part(rows: Tensor, found: Forward) -> tuple[Tensor, Tensor | None]:
        if whole is not None:
            head = None if whole.head is None else whole.head.flatten(0, 1)[rows]
            return whole.own.flatten(0, 1)[rows], head
        part = found.into(flat.select(rows))
        made = token_coefficients(estimator, apart.select(rows), part).validate(part)
        return made.own.squeeze(1), None if made.head is None else made.head.squeeze(1)

    problem: ValueError | None = None
    for rows, counts in ranks.share(parts):
        found = forward(rows)
        try:
            c, head = of_part(rows, found)
        except ValueError as refusal:  # the other processes still need this one in their passes
            problem, c, head = problem or refusal, torch.zeros_like(found.logp), None
        (_loss(c, head, found) * float(counts)).backward()
        if counts:
            own[rows], logp[rows] = c.to(own), found.logp.detach().to(logp)
    settle()
    ranks.agree(problem)
    shape = batch.mask.shape
    own, logp = ranks.sum(own).view(shape), ranks.sum(logp).view(shape)
    return Update(own=own, logp=logp, terms=terms)


def _checked(estimator: Estimator, batch: Batch) -> Batch:
    """The batch, validated; what the pass will tell is taken to be there."""
    tokens = torch.zeros_like(batch.mask, dtype=batch.rewards.dtype)
    known: dict[str, Any] = {"logp": tokens, "probability_square": tokens}
    estimator.check(replace(batch, **known, head_logp=batch.head_behavior_logp))
    return batch.validate()


def _covers(batch: Batch, parts: Sequence[Tensor]) -> None:
    count = torch.zeros(batch.mask.shape[:-1].numel(), dtype=torch.long)
    for rows in parts:
        count += torch.bincount(rows.cpu(), minlength=len(count))
    wanted = batch.mask.any(-1).flatten().cpu()
    wrong = torch.nonzero((count != 1) & wanted | (count > 1))
    if len(wrong):
        row = int(wrong[0])
        raise ValueError(
            f"response {row} is in {int(count[row])} parts; allowed: 1, each with whole responses"
        )


def _whole(estimator: Estimator, batch: Batch, told: Mapping[str, Tensor]) -> Coefficients:
    """Coefficients of the whole batch from a pass of its own."""
    found: dict[str, Any] = dict(told)
    filled = replace(batch, **found).validate()
    return coefficients(estimator, filled).validate(filled)


def _loss(c: Tensor, head: Tensor | None, found: Forward) -> Tensor:
    """The surrogate of some responses, and what stands beside it."""
    loss = surrogate(c.to(found.logp.device), found.logp)
    if head is not None:
        assert found.head_logp is not None
        loss = loss + surrogate(head.to(found.logp.device), found.head_logp)
    return loss if found.beside is None else loss + found.beside


def ahead(
    batch: Batch, forward: Pass, parts: Sequence[Tensor], ranks: Ranks = ALONE
) -> dict[str, Tensor]:
    """What a pass says of the whole batch, by the record's names, as constants.

    Args:
        batch: says where its tokens are.
        forward, parts, ranks: as of `accumulate`.
    """
    shape, size = batch.mask.shape, batch.mask.shape[:-1].numel()
    told: dict[str, Tensor] = {}
    for rows, counts in ranks.share(parts):
        with torch.no_grad():
            found = forward(rows)
        for name, value in _given(found, batch.rewards.device).items():
            whole = told.setdefault(name, value.new_zeros((size, *value.shape[1:])))
            if counts:
                whole[rows] = value
    for name, value in list(told.items()):
        told[name] = ranks.sum(value).view(*shape[:-1], *value.shape[1:])
    return told or {"logp": torch.zeros_like(batch.mask, dtype=batch.rewards.dtype)}


def _by_response(batch: Batch) -> Batch:
    """The same record with every response as a prompt of its own, numbered p G + g."""
    changes: dict[str, Any] = {
        f.name: value.flatten(0, 1).unsqueeze(1)
        for f in fields(batch)
        if isinstance(value := getattr(batch, f.name), Tensor) and f.name != "requested"
    }
    if batch.group_ids is not None:
        size = batch.rewards.shape[1]
        changes["group_ids"] = tuple(name for name in batch.group_ids for _ in range(size))
    return replace(batch, requested=None, **changes)


def _terms_by_response(terms: Terms) -> Terms:
    changes: dict[str, Any] = {
        f.name: value.flatten(0, 1).unsqueeze(1)
        for f in fields(terms)
        if isinstance(value := getattr(terms, f.name), Tensor)
    }
    return replace(terms, **changes)
