"""Bad input, and the one line that says what is allowed."""

from collections.abc import Iterable
from difflib import get_close_matches


class BadInput(ValueError):
    """Bad input from a user's file or flag; the message is one line: what, where, what is allowed.

    The command line prints it after the verb's name and exits with status 2.
    """


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
