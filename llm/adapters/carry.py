"""Which estimators the hooks of a foreign engine can carry, and in which two halves.

An engine calls an advantage hook once a batch and a loss once a micro-batch.  What couples
responses (advantages, admission, shares within a group) must be known in the first; ratios of a
token or of a response are made in the second, from the log-probabilities that are about to be
differentiated.  What fits neither is refused with a reason, never approximated.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import final

from windage.estimators.aggregation import constant_length, token_sum
from windage.estimators.catalogue import CATALOGUE, get
from windage.estimators.correction import Correction, token
from windage.estimators.errors import BadInput
from windage.estimators.estimator import Estimator
from windage.estimators.member import Member, use
from windage.llm.update import looks_ahead

ALWAYS = {"mask", "lengths", "present", "advantages"}
DERIVED = {
    "reference_ratio": ("logp", "reference_logp"),
    "log_ratio": ("logp", "behavior_logp"),
    "token_rewards": ("rewards",),
}


@final
@dataclass(frozen=True, kw_only=True)
class Host:
    """What a foreign engine tells its hooks.

    Args:
        name: for messages.
        early: fields of `Batch` that the advantage hook knows, mask and lengths apart.
        late: fields that the loss knows, mask and advantages apart.
        whole: the loss sees the whole optimizer batch, and is the only hook.
        given: ratios (numerator, denominator) of which the engine hands the weights to the loss.
        advantages: what the engine itself computes where it has no advantage hook, by the name of
            the member; None: it has one.
        averages: aggregations that its own normalizer leaves to the loss, by name; None: all.
    """

    name: str
    early: frozenset[str]
    late: frozenset[str]
    whole: bool = False
    given: frozenset[tuple[str, str]] = frozenset()
    advantages: frozenset[str] | None = None
    averages: frozenset[str] | None = None


def named(text: str) -> Estimator:
    """An entry of the catalogue from words, `NAME` or `NAME:key=value,...`.

    Raises:
        BadInput: an unknown name or setting, or a value that is not a number.

    Example:
        >>> named("cispo:cap=3.5").settings["cap"]
        3.5
    """
    name, _, rest = text.partition(":")
    settings: dict[str, float] = {}
    for part in rest.split(",") if rest else ():
        key, _, value = (word.strip() for word in part.partition("="))
        try:
            settings[key] = int(value) if value.lstrip("+-").isdigit() else float(value)
        except ValueError:
            raise BadInput(f"{text!r}: {key} is {value!r}; allowed: a number") from None
    try:
        return get(name.strip(), **settings)
    except TypeError as problem:
        raise BadInput(f"{text!r}: {problem}") from None


def refusal(estimator: Estimator, host: Host) -> str | None:
    """Why a host cannot carry an estimator, in one line; None where it can.

    Example:
        >>> refusal(get("rloo"), Host(name="X", early=frozenset(), late=frozenset({"logp"})))
        'rloo needs rewards, which X does not tell its advantage hook'
    """
    return next(_faults(estimator, host), None)


def refuse(estimator: Estimator, host: Host) -> Estimator:
    """The estimator, if the host can carry it.

    Raises:
        BadInput: it cannot; the message says why and names those that it can.
    """
    if (reason := refusal(estimator, host)) is not None:
        raise BadInput(f"{reason}; allowed: {', '.join(carried(host))}")
    return estimator


def carried(host: Host) -> list[str]:
    """Names of the catalogue's entries that a host can carry, with the settings they come with."""
    return [name for name, entry in CATALOGUE.items() if refusal(entry, host) is None]


def _faults(estimator: Estimator, host: Host) -> Iterator[str]:
    name = estimator.name
    if estimator.centering is not None and "head_logp" not in host.late:
        yield f"{name} needs log-probabilities of head tokens, which {host.name} gives to no loss"
    if dict(estimator.aggregation.settings).get("length", 0) is None and (
        estimator.aggregation.function is constant_length
    ):
        yield f"{name} has no length; allowed: {name}:length=TOKENS, the task's longest response"
    if host.whole:
        yield from _missing(name, estimator.needs, host.early | host.late, host.name, "its loss")
        return
    if looks_ahead(estimator):
        yield (
            f"{name} couples responses through the policy being trained, and {host.name} shows its "
            "loss one micro-batch at a time"
        )
    if host.advantages is None:
        wanted = [n for m in _early_members(estimator) for n in m.traits.needs]
        yield from _missing(name, wanted, host.early, host.name, "its advantage hook")
    elif estimator.advantage.name not in host.advantages:
        yield (
            f"{name} has the advantage {estimator.advantage.name}, and {host.name} computes "
            f"{', '.join(sorted(host.advantages))} itself"
        )
    elif len(_early_members(estimator)) > 2:
        yield f"{name} admits or shapes rewards, for which {host.name} has no hook"
    yield from _missing(name, _late_needs(estimator, host), host.late, host.name, "its loss")
    yield from _aggregated(estimator, host)


def _missing(
    name: str, wanted: Sequence[str], known: frozenset[str], host: str, who: str
) -> Iterator[str]:
    fields = [field for n in wanted for field in DERIVED.get(n, (n,))]
    absent = [f for f in dict.fromkeys(fields) if f not in known | ALWAYS]
    if absent:
        yield f"{name} needs {', '.join(absent)}, which {host} does not tell {who}"


def _early_members(estimator: Estimator) -> list[Member]:
    shaping = [m for m in estimator.active_penalties if m.traits.place != "loss"]
    return [estimator.advantage, estimator.aggregation, *estimator.admission, *shaping]


def _late_needs(estimator: Estimator, host: Host) -> list[str]:
    wanted = ["logp"]
    for correction in estimator.corrections:
        if not correction.idle and not is_given(correction, host):
            wanted += [correction.numerator, correction.denominator, *correction.map.traits.needs]
    for penalty in estimator.active_penalties:
        wanted += penalty.traits.needs if penalty.traits.place == "loss" else ()
    return wanted


def is_given(correction: Correction, host: Host) -> bool:
    """Whether the engine hands a correction's weights, of a token each, to the loss."""
    ratio = (correction.numerator, correction.denominator)
    return ratio in host.given and correction.reach.function is token


def folds(estimator: Estimator) -> bool:
    """Whether the aggregation looks at a whole group, so that its share rides on the advantage."""
    return estimator.aggregation.traits.scope == "group"


def _aggregated(estimator: Estimator, host: Host) -> Iterator[str]:
    name, average = estimator.name, estimator.aggregation.name
    if host.averages is not None and average not in host.averages:
        yield (
            f"{name} aggregates by {average}, and {host.name} divides by a number that its loss "
            f"does not know ({', '.join(sorted(host.averages))})"
        )
    fines = [m for m in estimator.active_penalties if m.traits.place == "loss"]
    reads = any(c.map.traits.reads == "value" for c in estimator.corrections)
    if (folds(estimator) or estimator.admission) and fines:
        yield f"{name} has a penalty in the loss beside a share or an admission of whole groups"
    if folds(estimator) and reads:
        yield f"{name} has a correction that reads the advantage, which carries the group's share"


def early_half(estimator: Estimator) -> Estimator:
    """What the advantage hook computes: advantages, admission and penalties in the reward."""
    shaping = tuple(m for m in estimator.penalties if m.traits.place != "loss")
    return replace(estimator, corrections=(Correction(),), centering=None, penalties=shaping)


def late_half(estimator: Estimator, host: Host) -> Estimator:
    """What the loss computes: corrections, aggregation and penalties in the loss."""
    own = tuple(c for c in estimator.corrections if not is_given(c, host))
    fines = tuple(m for m in estimator.penalties if m.traits.place == "loss")
    return replace(
        estimator,
        corrections=own or (Correction(),),
        aggregation=use(token_sum) if folds(estimator) else estimator.aggregation,
        admission=(),
        penalties=fines,
    )


def batch_wide(estimator: Estimator) -> bool:
    """Whether the advantage itself depends on which groups share the optimizer batch.

    Example:
        >>> batch_wide(get("batch_std")), batch_wide(get("cispo"))
        (True, False)
    """
    return estimator.advantage.traits.scope == "batch"
