"""What an engine computed for a problem, kept with it for the next estimator or group size.

A study asks many estimators and group sizes about one problem; what does not depend on them (the
sampler's measure, a response's moments under the same weights) is computed once.  It goes when the
problem goes, and problems so large that keeping would fill the memory are not served.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any, TypeVar

from windage.estimators.estimator import Estimator
from windage.toy.chains import Chain
from windage.toy.problems import Problem

T = TypeVar("T")
LARGE = 20_000


def kept(owner: Problem | Chain, key: Hashable, make: Callable[..., T], *arguments: Any) -> T:
    """The value of make(*arguments), computed once for an owner and a key.

    Args:
        owner: a problem or a chain; a copy of it starts without what was kept.
        key: whatever the value depends on besides the owner.
        make: called where the key is new.

    Example:
        >>> from windage.toy.problems import bandit
        >>> owner, calls = bandit(), []
        >>> _ = [kept(owner, "key", calls.append, 1) for _ in range(3)]
        >>> calls
        [1]
    """
    if owner.logits.numel() > LARGE:
        return make(*arguments)
    store: dict[Hashable, Any] = vars(owner).setdefault("_kept", {})
    if key not in store:
        store[key] = make(*arguments)
    found: T = store[key]
    return found


def weighing(estimator: Estimator) -> Hashable:
    """What one response's moments depend on besides the problem, a feature and a denominator.

    Example:
        >>> from windage.estimators.catalogue import get
        >>> weighing(get("rloo")) == weighing(get("group_mean")) != weighing(get("token_is"))
        True
    """
    penalties = estimator.active_penalties
    earns = estimator.advantage if penalties else None
    return estimator.corrections, estimator.centering, penalties, earns
