"""The recipe of a run: a catalogue entry made ready for what the run records.

Differences from the entry:
    1. Centering is over the recorded head, with the trainer's tail rescaled, not over the whole
       vocabulary, where the head is smaller.
    2. A constant length that is not set is the longest response that the sampler draws.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields, replace

from windage.estimators import catalogue, centering
from windage.estimators.errors import BadInput
from windage.estimators.estimator import Estimator
from windage.estimators.member import use
from windage.llm.config import Config

# What a run cannot record, and what to say of it.
ABSENT = {
    "components": "rewards in parts",
}
KINDS = "head (on the policy's trunk) or model"


def resolve(config: Config) -> Estimator:
    """The estimator that a configuration names, refused where the run cannot give what it needs.

    Raises:
        BadInput: an unknown entry or setting, or one that needs what the run does not record.
    """
    section = config.recipe
    entry = ready(section.name, section.settings, config)
    shadows = [ready(name, {}, config) for name in section.shadow]
    _check_critic(config, [entry, *shadows])
    return entry


def _check_critic(config: Config, entries: Sequence[Estimator]) -> None:
    """Refuse a critic that nothing needs, or settings that another kind has."""
    told, steps = config.critic, config.train.steps
    if not told.kind:
        if set_ := [f.name for f in fields(told) if getattr(told, f.name) != f.default]:
            raise BadInput(f"critic.{set_[0]} is set, and critic.kind is empty; allowed: {KINDS}")
        return
    if not any("values" in entry.needs for entry in entries):
        raise BadInput(
            f"critic.kind is {told.kind!r}, and recipe {config.recipe.name!r} needs no values; "
            "allowed: a recipe or shadow that does, such as ppo, or an empty critic.kind"
        )
    for name, kind in (("path", "model"), ("trunk", "head")):
        if getattr(told, name) and told.kind != kind:
            raise BadInput(f"critic.{name} is set; allowed with critic.kind {kind}")
    if steps and told.warmup >= steps:
        raise BadInput(f"critic.warmup is {told.warmup}; allowed: below train.steps, {steps}")


def gamma(config: Config) -> float:
    """The discount of the recipe, or of the first shadow, that needs values."""
    section = config.recipe
    told = [(section.name, section.settings), *((name, {}) for name in section.shadow)]
    entries = (catalogue.get(name, **settings) for name, settings in told)
    return next(
        float(dict(entry.advantage.settings)["gamma"])
        for entry in entries
        if "values" in entry.needs
    )


def ready(name: str, settings: dict[str, object], config: Config) -> Estimator:
    """One entry made ready."""
    try:
        entry = catalogue.get(name, **settings)
    except TypeError as problem:
        raise BadInput(f"recipe.settings: {problem}") from None
    size, head = config.train.group_size, config.sampling.head
    if dict(entry.aggregation.settings).get("length", 0) is None:
        length = float(config.sampling.max_tokens)
        entry = replace(entry, aggregation=entry.aggregation.change(length=length))
    if "values" in entry.needs and not config.critic.kind:
        raise BadInput(
            f"recipe {name!r} needs a critic, and critic.kind is empty; allowed: {KINDS}"
        )
    for need, what in ABSENT.items():
        if need in entry.needs:
            raise BadInput(f"recipe {name!r} needs {what}, which this run does not record")
    if entry.compares and size < 2:
        raise BadInput(
            f"recipe {name!r} compares responses of a group, and train.group_size is {size}; "
            "allowed: at least 2"
        )
    if entry.centering is not None:
        if head < 1 and config.train.mode != "offline":
            raise BadInput(
                f"recipe {name!r} centers scores over the sampler's likeliest tokens, and "
                "sampling.head is 0; allowed: from 1, such as 32 to 128"
            )
        if entry.centering.function is centering.exact:
            entry = replace(entry, centering=use(centering.top_k))
    return entry
