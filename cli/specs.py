"""Words of the command line: NAME:key=value,..., KIND:key=value,... and KEY=v1,v2,...

Names and values are checked here, without torch, so that a refusal answers at once.  Tests keep the
tables equal to what they stand for.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple

from windage.estimators.errors import BadInput, unknown
from windage.estimators.index import SETTINGS

Number = int | float

PROBLEMS: dict[str, dict[str, int]] = {
    "bandit": {"arms": 8},
    "trajectories": {},
    "token_tree": {"horizon": 4, "vocab": 3},
    "difficulties": {},
    "reasoning": {"horizon": 256},
}
BEHAVIORS: dict[str, tuple[str, ...]] = {
    "stale": ("steps", "rate"),
    "noise": ("sigma",),
    "bits": ("b",),
    "temperature": ("t",),
    "top_k": ("k",),
    "top_p": ("p",),
    "mixed": ("steps", "rate"),
}
SINGLE = (
    "reinforce",
    "ppo",
    "topr",
    "positives_only",
    "naive",
    "tis_both_signs",
    "reinforce_plus_plus",
    "off_policy_reinforce",
    "ppo_length_adaptive",
)
ORDERED = (("low", "high"), ("a_pos", "b_pos"), ("a_neg", "b_neg"))
_BAND = {"low": 0.5, "high": 5.0}
_NEAR_1 = {"low": 0.99, "high": 1.01}
LIMITS: dict[str, dict[str, float]] = {
    "icepop": _BAND,
    "centered_mask": _BAND,
    "topr": {"a_pos": 1.0, "b_pos": 1.0, "a_neg": 0.0, "b_neg": 1.0},
    "positives_only": {"a_pos": 1.0, "b_pos": 1.0, "a_neg": 0.0, "b_neg": 0.0},
    "naive": {"a_pos": 1.0, "b_pos": 1.0, "a_neg": 1.0, "b_neg": 1.0},
    "tis_both_signs": {"a_pos": 0.0, "b_pos": 1.0, "a_neg": 0.0, "b_neg": 1.0},
    "clip_cov": {"low": 1.0, "high": 5.0},
    "geometric_mask": _NEAR_1,
    "seq_mask_tis": _NEAR_1,
    "sequence_mis": {"low": 0.0, "high": 3.0},
    "worst_token_mask": {"low": 0.5, "high": 2.0},
}


class Rule(NamedTuple):
    """Which values a key takes: words for the message, whole numbers or not, and a test."""

    allowed: str
    whole: bool
    valid: Callable[[Number], bool]


def _whole(least: int, most: int) -> Rule:
    return Rule(f"a whole number from {least} to {most}", True, lambda x: least <= x <= most)


def _real(allowed: str, valid: Callable[[Number], bool], *, infinite: bool = False) -> Rule:
    words = f"{allowed}, or inf" if infinite else allowed
    return Rule(words, False, lambda x: (infinite or math.isfinite(x)) and valid(x))


_ANY = _real("a finite number", lambda x: True)
_POSITIVE = _real("a finite number above 0", lambda x: x > 0)
_FROM_0 = _real("a finite number from 0", lambda x: x >= 0)
_LIMIT = _real("a number from 0", lambda x: x >= 0, infinite=True)
_SHARE = _real("a number from 0 to 1", lambda x: 0 <= x <= 1)
_MANY = 100_000
RULES: dict[str, Rule] = {
    "baseline": _ANY,
    "ddof": _whole(0, 1),
    "eps": _FROM_0,
    "clip_low": _LIMIT,
    "clip_high": _LIMIT,
    "coefficient": _FROM_0,
    "length": _POSITIVE,
    "margin": _POSITIVE,
    "gamma": _SHARE,
    "lam": _SHARE,
    "alpha": _POSITIVE,
    "component_weights": Rule("a tuple in Python, nothing here", False, lambda x: False),
    "cap": _real("a number above 0", lambda x: x > 0, infinite=True),
    "low": _FROM_0,
    "high": _LIMIT,
    "a_pos": _FROM_0,
    "b_pos": _LIMIT,
    "a_neg": _FROM_0,
    "b_neg": _LIMIT,
    "delta": _FROM_0,
    "limit": _FROM_0,
    "log_low": _FROM_0,
    "log_high": _FROM_0,
    "share": _SHARE,
    "tau": _POSITIVE,
    "tau_pos": _POSITIVE,
    "tau_neg": _POSITIVE,
    "k_pos": _POSITIVE,
    "k_neg": _POSITIVE,
    "lambda_pos": _POSITIVE,
    "lambda_neg": _POSITIVE,
    "max_lag": _whole(0, _MANY),
    "steps": _whole(0, _MANY),
    "rate": _FROM_0,
    "sigma": _FROM_0,
    "b": _whole(1, 52),
    "t": _POSITIVE,
    "k": _whole(1, _MANY),
    "p": _real("a number above 0, at most 1", lambda x: 0 < x <= 1),
    "arms": _whole(2, 1_000_000),
    "horizon": _whole(1, _MANY),
    "vocab": _whole(2, _MANY),
    "group_size": _whole(1, _MANY),
    "samples": _whole(32, 10**12),
    "error": _POSITIVE,
    "frontier": _whole(1, 10**12),
}
_REAL = re.compile(r"[+-]?((\d+\.?\d*|\.\d+)(e[+-]?\d+)?|inf|infinity)", re.IGNORECASE | re.ASCII)
_WHOLE = re.compile(r"\d{1,18}", re.ASCII)


def value(key: str, text: str) -> Number:
    """The number that a key is given.

    Raises:
        BadInput: names the key, the value and what is allowed.

    Example:
        >>> value("cap", "4"), value("steps", "4")
        (4.0, 4)
    """
    rule = RULES[key]
    pattern = _WHOLE if rule.whole else _REAL
    if pattern.fullmatch(text):
        number = int(text) if rule.whole else float(text)
        if rule.valid(number):
            return number
    raise BadInput(f"{key} is {text!r}; allowed: {rule.allowed}")


def _named(
    kind: str, text: str, keys: Mapping[str, Iterable[str]]
) -> tuple[str, dict[str, Number]]:
    """A name that has keys, and the values given to some of them."""
    name, colon, rest = text.partition(":")
    if name not in keys:
        raise unknown(kind, name, keys)
    found: dict[str, Number] = {}
    for pair in rest.split(",") if colon else ():
        key, equals, number = pair.partition("=")
        if key not in keys[name]:
            raise BadInput(f"{text!r}: {unknown(f'setting of {name}', key, keys[name])}")
        if not equals:
            raise BadInput(f"{text!r}: {key} has no value; allowed: {key}=NUMBER")
        if key in found:
            raise BadInput(f"{text!r}: {key} is there twice; allowed: each setting once")
        try:
            found[key] = value(key, number)
        except BadInput as problem:
            raise BadInput(f"{text!r}: {problem}") from None
    return name, found


def estimator(text: str) -> tuple[str, dict[str, Number]]:
    """An entry of the catalogue and the settings given to it.

    Example:
        >>> estimator("token_tis:cap=4")
        ('token_tis', {'cap': 4.0})
    """
    return _named("estimator", text, SETTINGS)


def behavior(text: str) -> tuple[str, dict[str, Number]]:
    """A kind of behavior policy and its settings.

    Example:
        >>> behavior("stale:steps=4,rate=0.5")
        ('stale', {'steps': 4, 'rate': 0.5})
    """
    return _named("behavior", text, BEHAVIORS)


def built_in(text: str) -> tuple[str, dict[str, Number]] | None:
    """A built-in problem and its settings, or None where the name is not built in.

    Example:
        >>> built_in("token_tree:horizon=6"), built_in("problem.json")
        (('token_tree', {'horizon': 6}), None)
    """
    if text.partition(":")[0] not in PROBLEMS:
        return None
    return _named("problem", text, PROBLEMS)


def sweep(text: str, keys: Iterable[str]) -> tuple[str, tuple[Number, ...]]:
    """A key and the values that it takes in turn.

    Example:
        >>> sweep("cap=1,2", ["cap"])
        ('cap', (1.0, 2.0))
    """
    key, equals, rest = text.partition("=")
    if key not in (allowed := list(keys)):
        raise BadInput(f"--sweep {text!r}: {unknown('key', key, allowed)}")
    if not equals or not rest:
        raise BadInput(f"--sweep {text!r}: {key} has no value; allowed: {key}=v1,v2,...")
    try:
        numbers = tuple(value(key, number) for number in rest.split(","))
    except BadInput as problem:
        raise BadInput(f"--sweep {text!r}: {problem}") from None
    if len(set(numbers)) < len(numbers):
        raise BadInput(f"--sweep {text!r}: a value is there twice; allowed: each value once")
    return key, numbers


def check_order(name: str, settings: Mapping[str, Number]) -> None:
    """Refuse settings of an estimator whose lower limit is above the upper one.

    Raises:
        BadInput: names the estimator and both limits.
    """
    limits = LIMITS.get(name, {})
    for low, high in ORDERED:
        if low in limits:
            least, most = settings.get(low, limits[low]), settings.get(high, limits[high])
            if least > most:
                raise BadInput(
                    f"{name}: {low} is {least:g}, {high} {most:g}; allowed: {low} at most {high}"
                )
