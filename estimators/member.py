"""What a stage's member declares about itself, and a member with its settings bound."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeVar, final

Scope = Literal["token", "response", "group", "batch"]
Reads = Literal["nothing", "sign", "value"]
SCOPES: tuple[Scope, ...] = ("token", "response", "group", "batch")
READS: tuple[Reads, ...] = ("nothing", "sign", "value")
F = TypeVar("F", bound=Callable[..., Any])


@final
@dataclass(frozen=True, kw_only=True)
class Traits:
    """What the planner and the trainer may rely on.

    scope: how far the value reaches for information.
    needs: names of the positional arguments, as fields of `Batch` or quantities derived from it;
        of a correction's map those that follow the effective log-ratio and the advantage.
    reads: what a correction's map uses of the advantage.
    linear: an advantage that is affine in the rewards of the group.
    rewards: those for which an advantage has a meaning.
    lone: an advantage that needs no siblings, though its scope is the batch.
    refill: an admission whose rejected groups are drawn anew.
    place: where a penalty enters.
    """

    scope: Scope
    needs: tuple[str, ...] = ()
    reads: Reads = "nothing"
    linear: bool = False
    rewards: Literal["any", "nonnegative"] = "any"
    lone: bool = False
    refill: bool = False
    place: Literal["reward", "token_reward", "loss"] = "loss"


def declare(scope: Scope, *needs: str, **others: Any) -> Callable[[F], F]:
    """Attach `Traits` to a stage's member; the function itself is returned unchanged."""
    traits = Traits(scope=scope, needs=needs, **others)

    def attach(function: F) -> F:
        function.traits = traits  # type: ignore[attr-defined]
        return function

    return attach


@final
@dataclass(frozen=True)
class Member:
    """A stage function with every setting written out; equal when function and settings are."""

    function: Callable[..., Any]
    settings: tuple[tuple[str, Any], ...] = ()

    def __call__(self, *arguments: Any, **extra: Any) -> Any:
        return self.function(*arguments, **dict(self.settings), **extra)

    @property
    def name(self) -> str:
        return self.function.__name__

    @property
    def traits(self) -> Traits:
        found: Traits = self.function.traits  # type: ignore[attr-defined]
        return found

    def change(self, **settings: Any) -> Member:
        """The same member with some of its settings replaced."""
        return replace(self, settings=tuple({**dict(self.settings), **settings}.items()))

    def describe(self) -> str:
        """`name(setting=value, ...)`, the form in which tables print a member."""
        inside = ", ".join(
            f"{key}={value:g}" if isinstance(value, float) else f"{key}={value}"
            for key, value in self.settings
        )
        return f"{self.name}({inside})" if inside else self.name


def use(function: Callable[..., Any], **settings: Any) -> Member:
    """Bind settings to a stage function, writing out the defaults of those not given.

    Raises:
        TypeError: a setting that the function does not have, by name.

    Example:
        >>> from windage.estimators.correction import clip
        >>> use(clip, clip_high=0.28).describe()
        'clip(clip_low=0.2, clip_high=0.28)'
    """
    accepted = {
        name: parameter.default
        for name, parameter in inspect.signature(function).parameters.items()
        if parameter.kind is inspect.Parameter.KEYWORD_ONLY
    }
    for name in settings:
        if name not in accepted:
            allowed = ", ".join(accepted) or "none"
            raise TypeError(f"{function.__name__} has no setting {name!r}; it has: {allowed}")
    return Member(function, tuple({**accepted, **settings}.items()))
