"""The guard against numbers that are not finite: what is found, what then happens, what is kept.

A fault is a NaN or an infinity in a reward or a recorded log-probability (rows of a rollout), in a
log-probability of the policy (responses of a batch), or in the loss or the norm of the gradient
(the whole update).  As configured

    skip         the update is not made
    set aside    the responses at fault are left out, and the update is made of the others; a fault
                 that no response can be named for skips the update
    stop         the run ends

Each is counted, and the responses are written out.  A skipped update leaves weights, optimizer and
schedule as they were.  `limit` updates with a fault one after the other end the run, whatever is
configured: that is no accident.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, final

import torch
from torch import Tensor

from windage.estimators.errors import BadInput

OnNonfinite = Literal["skip", "set aside", "stop"]
Verdict = Literal["go on", "set aside", "skip"]
# Of a rollout row; a head's log-probability may be -inf where it is short.
RECORDED = ("reward", "outcome", "behavior_logp", "proximal_logp", "reference_logp")


@final
@dataclass(frozen=True, kw_only=True)
class Fault:
    """A number that is not finite.

    Args:
        what: reward, logp, loss, gradient_norm, ...
        value: NaN, or an infinity.
        response: its number among those that were looked at; None: of the whole update.
    """

    what: str
    value: float
    response: int | None = None


@final
@dataclass(frozen=True, kw_only=True)
class Guard:
    """What happens on a fault.

    Args:
        on_nonfinite: see above.
        limit: updates with a fault, one after the other, that end the run.
    """

    on_nonfinite: OnNonfinite = "skip"
    limit: int = 5


@final
@dataclass(frozen=True, kw_only=True)
class Count:
    """What happened so far; a checkpoint keeps it.

    Args:
        skipped: updates that were not made.
        set_aside: responses left out.
        in_a_row: updates with a fault since the last one without.
    """

    skipped: int = 0
    set_aside: int = 0
    in_a_row: int = 0


def in_rows(rows: Sequence[Mapping[str, Any]]) -> list[Fault]:
    """Faults in what was recorded, the first of each row; a reward of None is absent, not a fault.

    Example:
        >>> in_rows([{"reward": 1.0}, {"reward": float("nan")}])
        [Fault(what='reward', value=nan, response=1)]
    """
    found = []
    for number, row in enumerate(rows):
        for name in RECORDED:
            if row.get(name) is None:
                continue
            values = torch.as_tensor(row[name], dtype=torch.float64).reshape(1, -1)
            if faults := in_responses(name, values):
                found.append(replace(faults[0], response=number))
                break
    return found


def in_responses(what: str, values: Tensor, mask: Tensor | None = None) -> list[Fault]:
    """The first fault of each response.

    Args:
        what: the values' name.
        values: a row a response.
        mask: of the same shape, what counts; None: all of it.

    Example:
        >>> in_responses("logp", torch.tensor([[0.0, -0.5], [float("-inf"), 0.0]]))
        [Fault(what='logp', value=-inf, response=1)]
    """
    wrong = ~torch.isfinite(values)
    if mask is not None:
        wrong &= mask
    wrong, values = wrong.reshape(len(values), -1), values.detach().reshape(len(values), -1)
    found = []
    for response in wrong.any(-1).nonzero().flatten().tolist():
        first = int(wrong[response].nonzero()[0])
        found.append(Fault(what=what, value=float(values[response, first]), response=response))
    return found


def in_update(what: str, value: Tensor | float) -> list[Fault]:
    """The fault of one number of the whole update, such as the norm of its gradient.

    Example:
        >>> in_update("loss", float("inf"))
        [Fault(what='loss', value=inf, response=None)]
    """
    number = float(torch.as_tensor(value).detach())
    return [] if math.isfinite(number) else [Fault(what=what, value=number)]


def judge(guard: Guard, found: Sequence[Fault]) -> Verdict:
    """What becomes of an update in which faults were found.

    Example:
        >>> judge(Guard(on_nonfinite="set aside"), [Fault(what="loss", value=float("nan"))])
        'skip'
    """
    if not found:
        return "go on"
    named = all(fault.response is not None for fault in found)
    return "set aside" if guard.on_nonfinite == "set aside" and named else "skip"


def aside(found: Sequence[Fault]) -> list[int]:
    """The responses at fault, each once, in ascending order."""
    return sorted({fault.response for fault in found if fault.response is not None})


def after(guard: Guard, count: Count, found: Sequence[Fault], *, made: bool) -> Count:
    """The count after an update, or after one that was not made.

    Args:
        found: all faults of it.
        made: whether the weights moved; if so the responses at fault were set aside.
    """
    if not found:
        return replace(count, in_a_row=0)
    return Count(
        skipped=count.skipped + (not made),
        set_aside=count.set_aside + (len(aside(found)) if made else 0),
        in_a_row=count.in_a_row + 1,
    )


def stop(guard: Guard, count: Count, found: Sequence[Fault], step: int) -> None:
    """End the run where it must end.

    Args:
        count: after the update.
        found: its faults.

    Raises:
        BadInput: one line: the step, the fault, and which setting ends the run.
    """
    if not found or (guard.on_nonfinite != "stop" and count.in_a_row < guard.limit):
        return
    first = found[0]
    place = "" if first.response is None else f" of response {first.response}"
    why = (
        "on_nonfinite is stop"
        if guard.on_nonfinite == "stop"
        else f"{count.in_a_row} updates in a row; allowed: {guard.limit - 1}"
    )
    raise BadInput(f"step {step}: {first.what}{place} is {first.value}: {why}")


def records(
    step: int, found: Sequence[Fault], rows: Sequence[Mapping[str, Any]]
) -> Iterator[dict[str, Any]]:
    """What is written out: each fault with its response, or with every one where none is named.

    Args:
        rows: what is known of each response, by its number: text, tokens, reward, ...
    """
    for fault in found:
        told = {"step": step, "what": fault.what, "value": fault.value}
        numbers = range(len(rows)) if fault.response is None else [fault.response]
        for number in numbers:
            row = {name: _listed(value) for name, value in rows[number].items()}
            yield told | {"response": number} | row
        if not numbers:
            yield told


def _listed(value: Any) -> Any:
    return value.tolist() if hasattr(value, "tolist") else value
