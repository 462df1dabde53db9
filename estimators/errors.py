"""Bad input, and the one line that says what is allowed."""

from collections.abc import Iterable
from difflib import get_close_matches
from math import inf


class BadInput(ValueError):
    """Bad input from a user's file or flag; the message is one line: what, where, what is allowed.

    The command line prints it after the verb's name and exits with status 2.
    """


def within(low: float, high: float, /, **settings: float) -> None:
    """Refuse a setting outside a closed interval.

    Raises:
        BadInput: names the setting, its value and what is allowed.

    Example:
        >>> within(0, 1, lam=1.5)
        Traceback (most recent call last):
        windage.estimators.errors.BadInput: lam is 1.5; allowed: from 0 to 1
    """
    for name, value in settings.items():
        if not low <= value <= high:
            allowed = f"from {low:g} to {high:g}" if high < inf else f"at least {low:g}"
            raise BadInput(f"{name} is {value:g}; allowed: {allowed}")


def positive(**settings: float) -> None:
    """Refuse a setting that is not above 0.

    Raises:
        BadInput: names the setting and its value.

    Example:
        >>> positive(cap=0.0)
        Traceback (most recent call last):
        windage.estimators.errors.BadInput: cap is 0; allowed: a number above 0
    """
    for name, value in settings.items():
        if not value > 0:
            raise BadInput(f"{name} is {value:g}; allowed: a number above 0")


def ordered(**settings: float) -> None:
    """Refuse limits that are below 0, not a number, or not in ascending order.

    Raises:
        BadInput: names the settings and their values.

    Example:
        >>> ordered(low=2.0, high=1.0)
        Traceback (most recent call last):
        windage.estimators.errors.BadInput: low is 2, high is 1; allowed: 0 <= low <= high
    """
    values = list(settings.values())
    if not all(a <= b for a, b in zip([0.0, *values[:-1]], values, strict=True)):
        given = ", ".join(f"{name} is {value:g}" for name, value in settings.items())
        raise BadInput(f"{given}; allowed: 0 <= {' <= '.join(settings)}")


def unknown(kind: str, name: str, allowed: Iterable[str]) -> BadInput:
    """Say that a name is unknown, which valid name is nearest, and which are valid.

    Args:
        kind: what the name stands for, such as "estimator" or "flag".
        name: the name as given.
        allowed: the valid names, in the order in which to list them.

    Returns:
        The error, to be raised.

    Example:
        >>> unknown("estimator", "grop", ["rloo", "grpo"])
        BadInput("unknown estimator 'grop'; nearest valid name: grpo; allowed: rloo, grpo")
    """
    names = list(allowed)
    if not names:
        return BadInput(f"unknown {kind} {name!r}; none is allowed here")
    folded = {valid.casefold(): valid for valid in names}
    nearest = folded[get_close_matches(name.casefold(), folded, n=1, cutoff=0.0)[0]]
    return BadInput(
        f"unknown {kind} {name!r}; nearest valid name: {nearest}; allowed: {', '.join(names)}"
    )
