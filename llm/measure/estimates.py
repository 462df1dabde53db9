"""Estimates of a gradient by every entry, from the responses to one prompt.

One forward pass a response; one backward pass a direction that the entries' coefficients span on
its tokens.  A response is weighed in groups of several sizes at no further cost:

    estimate of a group = sum over its responses, directions of mixture . sketch of the direction
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, NamedTuple, final

import torch
from jaxtyping import Float
from torch import Tensor, nn

from windage.estimators.advantage import constant
from windage.estimators.batch import Batch
from windage.estimators.errors import BadInput
from windage.estimators.estimator import Coefficients, Estimator
from windage.estimators.member import use
from windage.llm.logprobs import LogProbs
from windage.llm.measure.directions import directions
from windage.llm.measure.sketch import Sketch
from windage.llm.passes import Responses
from windage.llm.rollouts import to_batch

Row = dict[str, Any]


class Passed(NamedTuple):
    """One response's forward pass, to be differentiated several times, and what was asked."""

    found: LogProbs
    hidden: Tensor
    targets: Tensor
    head_ids: Tensor | None


@final
@dataclass(frozen=True, kw_only=True, eq=False)
class Probe:
    """A model and the parameters by which its gradients are taken.

    Args:
        policy: called as `models.Policy`.
        parameters: that carry a gradient.
        sketch: of gradients by them.
        through: whether every gradient goes through the hidden states alone: the output matrix is
            not among the parameters.
        temperature: of the policy whose gradient is estimated.
    """

    policy: Any
    parameters: Sequence[nn.Parameter]
    sketch: Sketch
    through: bool
    temperature: float = 1.0

    def passes(self, rows: Sequence[Row], batch: Batch) -> list[Passed]:
        """A forward pass of each response."""
        device = self.parameters[0].device
        responses = Responses(rows, batch, temperature=self.temperature, device=device)
        out = []
        for number in range(len(rows)):
            packed = responses.packed(torch.tensor([number]))
            heads = None if batch.head_ids is None else batch.head_ids[0, number]
            own = None if heads is None else heads[packed.asked[0]].to(device)
            targets = packed.targets.to(device)
            found, hidden = self.policy(
                packed.ids.to(device),
                packed.attention.to(device),
                packed.places.to(device),
                targets,
                own,
                self.temperature,
            )
            out.append(Passed(found, hidden, targets, own))
        return out

    def pull(self, passed: Passed, rows: Float[Tensor, "r W"]) -> Float[Tensor, "r k"]:
        """Sketches of sum over t of C[t] grad log pi(t), and of head tokens, for rows C."""
        found, hidden, *_ = passed
        tokens = len(found.logp)
        by_hidden = None
        out = rows.new_zeros((len(rows), self.sketch.size))
        for n, row in enumerate(rows):
            own = row[:tokens].to(found.logp)
            head = None if found.head_logp is None else row[tokens:].view(found.head_logp.shape)
            if head is not None and not bool(head.any()):
                head = None
            if self.through:
                if by_hidden is None:
                    ones = torch.ones_like(own)
                    (by_hidden,) = torch.autograd.grad(found.logp, hidden, ones, retain_graph=True)
                pulled = by_hidden * own.unsqueeze(-1).to(by_hidden)
                if head is not None:
                    pulled = pulled + self._by_head(passed, head, by_hidden)
                parts = _by(hidden, self.parameters, pulled)
            else:
                parts = _by(found.logp, self.parameters, own)
                if head is not None:
                    more = _by(found.head_logp, self.parameters, head)
                    parts = [a + b for a, b in zip(parts, more, strict=True)]
            out[n] = self.sketch(parts).to(out)
        return out

    def _by_head(self, passed: Passed, weights: Tensor, by_hidden: Tensor) -> Tensor:
        """The gradient, by hidden states h, of a weighted sum over head tokens v.

            d log pi(v) / dh = s W[v] - m,    m = s W[y] - d log pi(y) / dh

        with W the output matrix and y the sampled token, whose gradient is known: no second pass
        over the vocabulary, but where logits are bounded smoothly.
        """
        found, hidden, targets, head_ids = passed
        scale, softcap = self.policy.shape
        if softcap is not None or head_ids is None:
            return _by(found.head_logp, [hidden], weights)[0]
        matrix = self.policy.base.get_output_embeddings().weight.detach()
        s = scale / self.temperature
        there = torch.where(head_ids >= 0, weights, 0.0).to(by_hidden)
        mean = s * matrix[targets].to(by_hidden) - by_hidden
        rows = matrix[head_ids.clamp(min=0)].to(by_hidden)
        return s * (there.unsqueeze(-1) * rows).sum(-2) - there.sum(-1, keepdim=True) * mean


def _by(output: Any, inputs: Sequence[Tensor], weights: Tensor) -> list[Tensor]:
    """The gradient of a weighted sum, whose graph stays."""
    found = torch.autograd.grad(
        output, inputs, weights.to(output), retain_graph=True, materialize_grads=True
    )
    return list(found)


def drift_of(estimator: Estimator) -> Estimator:
    """The same weights with the reward itself as advantage and no admission."""
    return replace(estimator, advantage=use(constant), admission=(), penalties=())


@final
@dataclass(frozen=True, kw_only=True, eq=False)
class Estimates:
    """Estimates of one entry from the groups of one prompt.

    Args:
        groups: each group's; 0 where it is to be drawn again.
        drift: each group's with every reward 1, no baseline and no admission.
        kept: whether the group is not to be drawn again.
    """

    groups: Float[Tensor, "M k"]
    drift: Float[Tensor, "M k"]
    kept: Float[Tensor, " M"]


def known(rows: Sequence[Row], passes: Sequence[Passed], *, told: bool) -> Batch:
    """The record of one prompt's responses, with what their passes say.

    Args:
        rows: of one group.
        told: whether the trainer knows how they were drawn; otherwise it takes them for its own.
    """
    batch = to_batch([{**row, "group_id": "0"} for row in rows], current_version=0)
    found: dict[str, Any] = {}
    for name in ("logp", "probability_square", "head_logp"):
        parts = [getattr(p.found, name) for p in passes]
        if parts[0] is None:
            continue
        whole = batch.rewards.new_zeros((*batch.mask.shape, *parts[0].shape[1:]))
        if name == "head_logp":
            whole = whole - torch.inf
        whole[batch.mask] = torch.cat([p.detach().cpu().to(whole) for p in parts])
        found[name] = whole
    if not told:
        found["behavior_logp"] = found["logp"]
        if "head_logp" in found:
            found["head_behavior_logp"] = found["head_logp"]
    return replace(batch, **found, requested=None, group_ids=None, row_index=None).validate()


def in_groups(batch: Batch, size: int) -> Batch:
    """Responses of one prompt as groups of a size, each a batch of its own."""
    changes: dict[str, Any] = {}
    for field in fields(batch):
        value = getattr(batch, field.name)
        if isinstance(value, Tensor) and field.name not in ("requested", "row_index"):
            changes[field.name] = value.reshape(-1, 1, size, *value.shape[2:])
    return replace(batch, **changes)


def estimates(
    estimators: Mapping[str, Estimator],
    batch: Batch,
    sizes: Sequence[int],
    passes: Sequence[Passed],
    probe: Probe,
) -> dict[tuple[int, str], Estimates]:
    """Estimates by group size and entry.

    Args:
        estimators: by name.
        batch: of one prompt, as `known` gives it.
        sizes: of groups; each divides the number of responses.
        passes: of the responses, in order.
        probe: whose passes they are.
    """
    places: list[tuple[int, str, bool]] = []
    tables: list[Tensor] = []
    kept: dict[tuple[int, str], Tensor] = {}
    for size in sizes:
        groups = in_groups(batch, size)
        ones = replace(groups, rewards=torch.ones_like(groups.rewards))
        for name, estimator in estimators.items():
            made = _weighed(estimator, groups)
            kept[size, name] = _kept(estimator, made)
            for drift, weighed in ((False, made), (True, _weighed(drift_of(estimator), ones))):
                places.append((size, name, drift))
                tables.append(_table(weighed, batch))
    sums = [tables[0].new_zeros((len(passes) // s, probe.sketch.size)) for s, _, _ in places]
    for number, passed in enumerate(passes):
        found = directions(_of_response(torch.stack([t[number] for t in tables]), batch, number))
        parts = found.mixture @ probe.pull(passed, found.rows)
        for (size, _, _), total, part in zip(places, sums, parts, strict=True):
            total[number // size] += part
    by_place = dict(zip(places, sums, strict=True))
    return {
        (size, name): Estimates(
            groups=by_place[size, name, False] * used.unsqueeze(-1),
            drift=by_place[size, name, True],
            kept=used,
        )
        for (size, name), used in kept.items()
    }


def _weighed(estimator: Estimator, groups: Batch) -> Coefficients:
    """An entry's coefficients.

    Raises:
        BadInput: it cannot weigh these responses; names it.
    """
    try:
        return estimator(groups)
    except ValueError as problem:
        raise BadInput(f"{estimator.name}: {problem}") from None


def _of_response(rows: Float[Tensor, "N W"], batch: Batch, number: int) -> Float[Tensor, "N w"]:
    """Coefficients of one response without its padding."""
    real = batch.mask[0, number]
    own, rest = rows[:, : len(real)], rows[:, len(real) :]
    if not rest.shape[1]:
        return own[:, real]
    return torch.cat([own[:, real], rest.unflatten(1, (len(real), -1))[:, real].flatten(1)], 1)


def _table(made: Coefficients, batch: Batch) -> Float[Tensor, "G W"]:
    """Coefficients of own and head tokens, a row a response, in the order of the responses."""
    count = batch.mask.shape[1]
    own = made.own.reshape(count, -1)
    heads = 0 if batch.head_logp is None else batch.head_logp[0, 0].numel()
    head = own.new_zeros((count, heads)) if made.head is None else made.head.reshape(count, -1)
    return torch.cat([own, head], -1).double()


def _kept(estimator: Estimator, made: Coefficients) -> Float[Tensor, " M"]:
    """1 for each group that is not to be drawn again."""
    reasons = made.terms.reasons
    again = [reasons.index(m.name) + 1 for m in estimator.admission if m.traits.refill]
    refused = torch.zeros_like(made.terms.reason, dtype=torch.bool)
    for number in again:
        refused = refused | (made.terms.reason == number)
    return (~refused.all(-1).squeeze(-1)).double()


def reference(
    batch: Batch, passes: Sequence[Passed], probe: Probe
) -> tuple[Float[Tensor, " k"], Float[Tensor, " k"], Float[Tensor, "R k"]]:
    """An estimate of the gradient of J from the policy's own responses, their mean score, and each.

        1/R sum over i of (r[i] - mean of the others' r) grad log pi(y[i])

    Claims:
        Unbiased; the mean score has the mean 0.
    """
    scores = torch.cat(list(_scores(batch, passes, probe)))
    rewards = batch.rewards[0].double()
    count = len(rewards)
    advantages = (rewards - rewards.mean()) * count / (count - 1)
    return advantages @ scores / count, scores.mean(0), scores


def _scores(batch: Batch, passes: Sequence[Passed], probe: Probe) -> Iterator[Float[Tensor, "1 k"]]:
    """The gradient of each response's log-probability."""
    for passed in passes:
        tokens = len(passed.found.logp)
        heads = 0 if passed.found.head_logp is None else passed.found.head_logp.numel()
        row = torch.cat([torch.ones(tokens), torch.zeros(heads)]).double()
        yield probe.pull(passed, row.unsqueeze(0))
