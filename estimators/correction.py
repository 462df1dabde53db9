"""Corrections for data from another policy: a reach and a map.

The reach turns log-ratios of tokens into effective log-ratios; the map is elementwise in (effective
log-ratio, advantage) and gives the weight.  So one map serves a padded batch, a node of a prefix
tree (whose recursion supplies the reach), a state of an automaton and the head tokens of centering.
Weights are constants under differentiation: a ratio that carries its gradient has the same update
wherever it is not clipped.

Differences:
    1. The ratio is current/behavior unless a `Correction` names other policies; TIS in verl, slime
       and open-instruct truncates proximal/behavior, which is `Correction(..., numerator=
       "proximal_logp")`.
    2. `truncate` is absolute (TRL's CISPO cap, Tinker); verl, slime and NeMo write it as 1 + eps.
    3. `band` keeps the ratio inside the band (IcePop); a 0/1 mask over the band is `keep`.
    4. A sequence ratio is the product; the geometric mean is a reach of its own.
    5. `clip` is the coefficient of PPO's surrogate, with strict inequalities; verl's and TRL's
       surrogates have this very gradient.
    6. A ratio within rounding of a limit (`EDGE` units in the last place of its log) counts as at
       the limit, which is inside; frameworks let the last digit decide.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Protocol, final, runtime_checkable

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from windage.estimators.errors import ordered, positive, within
from windage.estimators.member import READS, SCOPES, Member, Reads, Scope, declare, use

EDGE = 64


@runtime_checkable
class Reach(Protocol):
    """Log-ratios of tokens to effective log-ratios; 0 where the mask is False on entry.

    One of scope group or batch is given `[*batch P G T]`.
    """

    def __call__(
        self, log_ratio: Float[Tensor, "*batch T"], mask: Bool[Tensor, "*batch T"]
    ) -> Float[Tensor, "*batch T"]: ...


@runtime_checkable
class Map(Protocol):
    """Effective log-ratio and advantage to weight, element by element.

    What its traits name under `needs` (log-probabilities of the token, the mask) follows, shaped
    like the first and 0 where the mask is False.  A map of scope batch looks at all tokens.
    """

    def __call__(
        self,
        effective: Float[Tensor, "*shape"],
        advantages: Float[Tensor, "*#shape"],
        *fields: Tensor,
    ) -> Float[Tensor, "*shape"]: ...


@declare("token")
def token(
    log_ratio: Float[Tensor, "*batch T"], mask: Bool[Tensor, "*batch T"]
) -> Float[Tensor, "*batch T"]:
    """The token's own log-ratio: corrects the action at the recorded prefix.

        e[t] = x[t]

    Example:
        >>> token(torch.tensor([0.5, -0.5]), torch.tensor([True, True]))
        tensor([ 0.5000, -0.5000])
    """
    return log_ratio


@declare("response")
def prefix(
    log_ratio: Float[Tensor, "*batch T"], mask: Bool[Tensor, "*batch T"]
) -> Float[Tensor, "*batch T"]:
    """Sum up to and including the token: corrects how the prefix was reached as well.

        e[t] = sum(x[u] for u <= t)

    Example:
        >>> prefix(torch.tensor([0.5, 0.25]), torch.tensor([True, True]))
        tensor([0.5000, 0.7500])
    """
    return log_ratio.cumsum(-1)


@declare("response")
def suffix(
    log_ratio: Float[Tensor, "*batch T"], mask: Bool[Tensor, "*batch T"]
) -> Float[Tensor, "*batch T"]:
    """Sum from the token on: corrects the continuation, leaves the prefix.

        e[t] = sum(x[u] for u >= t)

    Example:
        >>> suffix(torch.tensor([0.5, 0.25]), torch.tensor([True, True]))
        tensor([0.7500, 0.2500])
    """
    return log_ratio.flip(-1).cumsum(-1).flip(-1)


@declare("response")
def trajectory(
    log_ratio: Float[Tensor, "*batch T"], mask: Bool[Tensor, "*batch T"]
) -> Float[Tensor, "*batch T"]:
    """Sum over the whole response: importance sampling of trajectories.

        e[t] = sum(x[u] for all u)

    Example:
        >>> trajectory(torch.tensor([0.5, 0.25]), torch.tensor([True, True]))
        tensor([0.7500, 0.7500])
    """
    return log_ratio.sum(-1, keepdim=True).expand_as(log_ratio)


@declare("response")
def geometric(
    log_ratio: Float[Tensor, "*batch T"], mask: Bool[Tensor, "*batch T"]
) -> Float[Tensor, "*batch T"]:
    """Mean over the trainable tokens of the response: the log of the geometric mean ratio.

        e[t] = sum(x[u] for all u) / T

    Claims:
        Not an importance weight.

    Example:
        >>> geometric(torch.tensor([0.5, 0.25, 0.0]), torch.tensor([True, True, False]))
        tensor([0.3750, 0.3750, 0.3750])

    References:
        Zheng et al., 2025, arXiv:2507.18071.
    """
    return trajectory(log_ratio, mask) / mask.sum(-1, keepdim=True).clamp(min=1)


def above(effective: Float[Tensor, "*shape"], limit: float) -> Bool[Tensor, "*shape"]:
    """exp(e) > limit, by more than rounding.

    Example:
        >>> above(torch.log(torch.tensor([2.0, 2.1])), 2.0)
        tensor([False,  True])
    """
    edge = math.log(limit) if limit > 0 else -math.inf
    return effective > edge + EDGE * torch.finfo(effective.dtype).eps


def below(effective: Float[Tensor, "*shape"], limit: float) -> Bool[Tensor, "*shape"]:
    """exp(e) < limit, by more than rounding.

    Example:
        >>> below(torch.log(torch.tensor([0.5, 0.4])), 0.5)
        tensor([False,  True])
    """
    edge = math.log(limit) if limit > 0 else -math.inf
    return effective < edge - EDGE * torch.finfo(effective.dtype).eps


@declare("token")
def none(
    effective: Float[Tensor, "*shape"], advantages: Float[Tensor, "*#shape"]
) -> Float[Tensor, "*shape"]:
    """No correction.

        w = 1

    Example:
        >>> none(torch.tensor([0.7]), torch.tensor([1.0]))
        tensor([1.])
    """
    return torch.ones_like(effective)


@declare("token")
def ratio(
    effective: Float[Tensor, "*shape"], advantages: Float[Tensor, "*#shape"]
) -> Float[Tensor, "*shape"]:
    """The ratio itself, not bounded.

        w = exp(e)

    Claims:
        Zero drift with any reach.

    Example:
        >>> ratio(torch.tensor([0.0, 0.6931472]), torch.tensor([1.0, 1.0]))
        tensor([1., 2.])
    """
    return effective.exp()


@declare("token")
def truncate(
    effective: Float[Tensor, "*shape"], advantages: Float[Tensor, "*#shape"], *, cap: float = 2.0
) -> Float[Tensor, "*shape"]:
    """The ratio, at most the cap; no floor.

        w = min(exp(e), cap)

    Claims:
        Bias is exactly -E[(exp(e) - cap)+ A s].
        A token at the cap keeps its gradient.

    Args:
        cap: an absolute ratio.

    Raises:
        ValueError: the cap is not above 0.

    Example:
        >>> truncate(torch.tensor([0.0, 10000.0]), torch.tensor([1.0, 1.0]), cap=2.0)
        tensor([1., 2.])

    References:
        Munos et al., 2016, arXiv:1606.02647; MiniMax, 2025, arXiv:2506.13585.
    """
    positive(cap=cap)
    return effective.clamp(max=math.log(cap)).exp()


@declare("token")
def band(
    effective: Float[Tensor, "*shape"],
    advantages: Float[Tensor, "*#shape"],
    *,
    low: float = 0.5,
    high: float = 5.0,
) -> Float[Tensor, "*shape"]:
    """The ratio inside an inclusive band, 0 outside.

        w = exp(e) if low <= exp(e) <= high else 0

    Claims:
        Bias is exactly minus the dropped mass.

    Raises:
        ValueError: low above high.

    Example:
        >>> band(torch.tensor([0.0, -1.0, 2.0]), torch.tensor([1.0, 1.0, 1.0]))
        tensor([1., 0., 0.])

    References:
        Ling team, 2025, arXiv:2510.18855.
    """
    kept = keep(effective, advantages, low=low, high=high)
    return torch.where(kept > 0, effective.exp(), 0.0)


@declare("token")
def keep(
    effective: Float[Tensor, "*shape"],
    advantages: Float[Tensor, "*#shape"],
    *,
    low: float = 0.5,
    high: float = 2.0,
) -> Float[Tensor, "*shape"]:
    """1 inside an inclusive band of ratios, 0 outside: rejection without reweighting.

        w = 1 if low <= exp(e) <= high else 0

    Raises:
        ValueError: low above high.

    Example:
        >>> keep(torch.tensor([0.0, 2.0]), torch.tensor([1.0, 1.0]))
        tensor([1., 0.])
    """
    ordered(low=low, high=high)
    return (~below(effective, low) & ~above(effective, high)).to(effective.dtype)


@declare("token", reads="sign")
def clip(
    effective: Float[Tensor, "*shape"],
    advantages: Float[Tensor, "*#shape"],
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
) -> Float[Tensor, "*shape"]:
    """The coefficient of PPO's clipped surrogate.

        w = 0       if A > 0 and exp(e) > 1 + clip_high, or A < 0 and exp(e) < 1 - clip_low
            exp(e)  otherwise

    Claims:
        Zero-gradient region exactly the two stated; no bound for A < 0 and a large ratio.

    Raises:
        ValueError: a margin below 0.

    Example:
        >>> e = torch.log(torch.tensor([0.5, 1.5, 0.5, 1.5]))
        >>> clip(e, torch.tensor([1.0, 1.0, -1.0, -1.0]))
        tensor([0.5000, 0.0000, 0.0000, 1.5000])

    References:
        Schulman et al., 2017, arXiv:1707.06347; Yu et al., 2025, arXiv:2503.14476 (clip_high).
    """
    within(0, math.inf, clip_low=clip_low, clip_high=clip_high)
    over = (advantages > 0) & above(effective, 1 + clip_high)
    under = (advantages < 0) & below(effective, 1 - clip_low)
    return torch.where(over | under, 0.0, effective.exp())


@declare("token", reads="sign")
def dual_clip(
    effective: Float[Tensor, "*shape"],
    advantages: Float[Tensor, "*#shape"],
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    cap: float = 3.0,
) -> Float[Tensor, "*shape"]:
    """PPO's clip with a second bound for negative advantages.

        w = 0 if A < 0 and exp(e) > cap, else as `clip`

    Claims:
        Bounded by the larger of 1 + clip_high and cap.

    Raises:
        ValueError: the cap is not above 0.

    Example:
        >>> dual_clip(torch.log(torch.tensor([1.5, 10.0, 2.0])), torch.tensor([1.0, -1.0, -1.0]))
        tensor([0., 0., 2.])

    References:
        Ye et al., 2019, arXiv:1912.09729.
    """
    positive(cap=cap)
    weight = clip(effective, advantages, clip_low=clip_low, clip_high=clip_high)
    return torch.where((advantages < 0) & above(effective, cap), 0.0, weight)


@declare("token", reads="sign")
def taper(
    effective: Float[Tensor, "*shape"],
    advantages: Float[Tensor, "*#shape"],
    *,
    a_pos: float = 1.0,
    b_pos: float = 1.0,
    a_neg: float = 0.0,
    b_neg: float = 1.0,
) -> Float[Tensor, "*shape"]:
    """The ratio between two limits that depend on the sign of the advantage.

        w = min(max(exp(e), a_pos), b_pos) if A >= 0, with a_neg and b_neg otherwise

    Claims:
        Gradient of the sum of mu R rho(ratio, a, b), rho the concave function that equals the ratio
        on [a, b] and continues by its tangent in the log.
        (1, 1, 1, 1) is `none`; (0, inf, 0, inf) is `ratio`; (0, c, 0, c) is `truncate`.

    Args:
        a_pos, b_pos, a_neg, b_neg: absolute ratios.

    Raises:
        ValueError: a limit below 0, or a above b.

    Example:
        >>> taper(torch.tensor([-2.0, -2.0, 1.0, 1.0]), torch.tensor([1.0, -1.0, 1.0, -1.0]))
        tensor([1.0000, 0.1353, 1.0000, 1.0000])

    References:
        Le Roux et al., 2025, arXiv:2503.14286.
    """
    ordered(a_pos=a_pos, b_pos=b_pos)
    ordered(a_neg=a_neg, b_neg=b_neg)
    weight = effective.exp()
    return torch.where(
        advantages >= 0, weight.clamp(min=a_pos, max=b_pos), weight.clamp(min=a_neg, max=b_neg)
    )


def tapered(
    effective: Float[Tensor, "*shape"],
    advantages: Float[Tensor, "*#shape"],
    *,
    a_pos: float = 1.0,
    b_pos: float = 1.0,
    a_neg: float = 0.0,
    b_neg: float = 1.0,
) -> Float[Tensor, "*shape"]:
    """The function of the ratio of which `taper` is the derivative by its logarithm.

        rho = a (1 + e - log a)   where exp(e) < a
              exp(e)              where a <= exp(e) <= b
              b (1 + e - log b)   where exp(e) > b

    with a and b as in `taper`; 0 where a = b = 0.  TOPR's objective is the sum of mu A rho.

    Claims:
        Concave in the ratio, at most the ratio, and equal to it exactly on [a, b].

    Args:
        effective: log-ratio of the whole response.
        a_pos, b_pos, a_neg, b_neg: absolute ratios.

    Raises:
        ValueError: a limit below 0, or a above b.

    Example:
        >>> tapered(torch.tensor([-2.0, -2.0, 1.0]), torch.tensor([1.0, -1.0, -1.0]))
        tensor([-1.0000,  0.1353,  2.0000])

    References:
        Le Roux et al., 2025, arXiv:2503.14286.
    """
    weight = taper(effective, advantages, a_pos=a_pos, b_pos=b_pos, a_neg=a_neg, b_neg=b_neg)
    ratio_ = effective.exp()
    beyond = weight * (1 + effective - torch.where(weight > 0, weight, 1.0).log())
    return torch.where(weight == ratio_, ratio_, torch.where(weight > 0, beyond, 0.0))


def token_fields(
    logp: Float[Tensor, "*shape"], behavior_logp: Float[Tensor, "*shape"]
) -> dict[str, Tensor]:
    """What a map may ask for by name, of tokens that are all real.

    Example:
        >>> token_fields(torch.zeros(1), torch.zeros(1))["mask"]
        tensor([True])
    """
    mask = torch.ones_like(logp, dtype=torch.bool)
    return {"logp": logp, "behavior_logp": behavior_logp, "mask": mask}


@final
@dataclass(frozen=True, kw_only=True)
class Correction:
    """A reach and a map, and which two policies the ratio compares.

    w[p, g, t] = map(reach(before(numerator - denominator, A))[p, g, t], A[p, g], ...)

    Args:
        reach: log-ratios of tokens to effective log-ratios.
        map: effective log-ratio and advantage to weight; what its traits name besides follows.
        before: a map of log-ratio and advantage to log-ratio, applied to each token first; or None.
        numerator, denominator: fields of the batch.
    """

    reach: Member = field(default_factory=lambda: use(token))
    map: Member = field(default_factory=lambda: use(none))
    before: Member | None = None
    numerator: str = "logp"
    denominator: str = "behavior_logp"

    @property
    def members(self) -> tuple[Member, ...]:
        """The map, and the other two where they are there and read something or can be set."""
        reach = (self.reach,) if self.reach.settings and not self.idle else ()
        return (self.map, *reach, *(() if self.before is None else (self.before,)))

    @property
    def scope(self) -> Scope:
        """How far a weight reaches for information, over reach and map."""
        scopes = (m.traits.scope for m in (self.reach, *self.members))
        return max(scopes, key=SCOPES.index)

    @property
    def reads(self) -> Reads:
        """What the weight uses of the advantage, over map and `before`."""
        return max((m.traits.reads for m in self.members), key=READS.index)

    def change(self, changed: Callable[[Member], Member]) -> Correction:
        """The same correction with each of its members changed."""
        before = None if self.before is None else changed(self.before)
        return replace(self, reach=changed(self.reach), map=changed(self.map), before=before)

    def weigh(
        self,
        effective: Float[Tensor, "*shape"],
        advantages: Float[Tensor, "*#shape"],
        fields: Callable[[str], Tensor],
    ) -> Float[Tensor, "*shape"]:
        """The map of an effective log-ratio, given what else it asks for by name.

        Example:
            >>> Correction(map=use(ratio)).weigh(torch.zeros(1), torch.ones(1), {}.__getitem__)
            tensor([1.])
        """
        found: Tensor = self.map(effective, advantages, *(fields(n) for n in self.map.traits.needs))
        return found

    def weights(
        self,
        log_ratio: Float[Tensor, "*batch T"],
        mask: Bool[Tensor, "*batch T"],
        advantages: Float[Tensor, "*#batch T_or_1"],
        fields: Callable[[str], Tensor] | None = None,
    ) -> Float[Tensor, "*batch T"]:
        """Weights of all tokens, 0 where the mask is False; what stands there does not matter.

        Args:
            log_ratio: of numerator to denominator.
            mask: True on trainable tokens.
            advantages: of responses or tokens.
            fields: gives what the map asks for by name, shaped like the mask.
        """
        zero = torch.zeros_like(log_ratio)
        clean = torch.where(mask, log_ratio, zero)
        if self.before is not None:
            clean = torch.where(mask, self.before(clean, advantages), zero)

        def find(name: str) -> Tensor:
            if name == "mask":
                return mask
            assert fields is not None, f"{self.map.name} needs {name}"
            return torch.where(mask, fields(name), zero)

        weight = self.weigh(self.reach(clean, mask), advantages, find)
        return torch.where(mask, weight, zero)

    def describe(self) -> str:
        """`reach map(...)`, with the two policies where they are not current and behavior."""
        words = [] if self.before is None else [self.before.describe()]
        words += [] if self.idle else [self.reach.describe()]
        words.append(self.map.describe())
        if not self.idle and (self.numerator, self.denominator) != ("logp", "behavior_logp"):
            words.append(f"of {self.numerator}/{self.denominator}")
        return " ".join(words)

    @property
    def idle(self) -> bool:
        """True where no policy but the current one is looked at."""
        return self.map.function is none
