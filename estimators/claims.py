"""What an entry of the catalogue claims about itself; `windage audit` decides each claim exactly.

A property either holds or does not, and both are claims: what is claimed must hold to 1e-10 on
generated problems, and what is claimed not to hold must show it on a named witness.  A valued
property says how: which weight, which share, which multiple of which sibling.  What every entry
must do (invariances, extremes) is not declared; `ALWAYS` lists it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

from windage.estimators.errors import unknown

PROPERTIES = {
    "unbiased_on_policy": "the mean is the gradient when sampler and policy agree",
    "parallel_on_policy": "on one prompt the mean is a multiple above 0 of the gradient, on-policy",
    "unbiased_off_policy": "the mean is the gradient when the sampler covers the policy",
    "zero_drift_on_policy": "advantage 1 moves nothing on average, on-policy",
    "zero_drift": "advantage 1 moves nothing on average, off-policy",
    "shift_invariant": "a constant added to all rewards leaves the mean unchanged, off-policy",
    "zero_when_equal": "a group of equal rewards gives no update at all",
    "unit_variance": "advantages of a group that varies have mean 0 and standard deviation 1",
    "bounded": "no coefficient exceeds a number fixed in advance, whatever the ratio",
}

CLIPPED = "A > 0 and ratio > 1 + clip_high, or A < 0 and ratio < 1 - clip_low"
DUAL = f"{CLIPPED} or ratio > cap"
MOVED = "A > 0 and p - q > limit, or A < 0 and q - p > limit"
DIVERGED = "binary KL > limit, and A > 0 and p > q or A < 0 and p < q"
LOG_CLIPPED = "A > 0 and log ratio > log_high, or A < 0 and log ratio < -log_low"
BEHIND = f"{CLIPPED} or log ratio < -delta"
FAR = "squared log ratio >= tau"
REACHES = (
    "own token",
    "tokens up to it",
    "tokens from it",
    "response",
    "response, geometric",
    "response, geometric of one-sided",
    "response, farthest token",
    "response, over the mean of the group",
    "response, over the mean of the batch",
    "own token, over the mean of the batch",
)
RULES = (
    "1",
    "ratio",
    "ratio, at most cap",
    "ratio inside [low, high], else 0",
    "1 inside [low, high], else 0",
    "ratio, 0 beyond the clip",
    "ratio, 0 beyond the dual clip",
    "ratio between a and b of the sign of A",
    "1, 0 where A < 0 and log ratio < -delta",
    "1, 0 beyond the log clip",
    "ratio sech^2(tau (ratio - 1) / 2)",
    "ratio^k exp(lambda (1 - ratio))",
    "1 / ratio if A > 0, else ratio, 0 beyond the dual clip",
    "ratio, at most cap, 0 where p - q exceeds limit along A",
    "ratio, at most cap, 0 where binary KL exceeds limit along A",
    "ratio, 0 from where the mean square reaches tau",
    "1, 0 on the largest covariances",
)
POLICIES = ("policy / sampler", "proximal / sampler", "policy / proximal")
VALUES: dict[str, tuple[str, ...]] = {
    "scale_on_policy": ("1", "(G - 1) / G", "1 / L", "(G - 1) / (G L)"),
    "mean": (
        "prefix mu, token mu, rest mu",
        "prefix mu, token pi, rest mu",
        "prefix pi, token pi, rest mu",
        "prefix mu, token pi, rest pi",
        "prefix pi, token pi, rest pi",
    ),
    "weight": tuple(
        rule if rule == "1" else f"{rule}; {reach}" for rule in RULES for reach in REACHES
    ),
    "zero_region": (
        "nowhere",
        CLIPPED,
        "ratio < low or ratio > high",
        "A < 0",
        DUAL,
        MOVED,
        DIVERGED,
        LOG_CLIPPED,
        BEHIND,
        FAR,
    ),
    "share": (
        "1 / N",
        "1 / (N T)",
        "1 / (N L)",
        "1 / tokens of the batch",
        "1 / (P tokens of the group)",
    ),
    "objective": (
        "largest of k rewards",
        "largest of G rewards",
        "log p, series to order G",
        "log p, series to order G - 1",
    ),
    "on_policy_as": ("1", "(G - 1) / G", "1 / L"),
    "proportional_to": ("1", "(G - 1) / G"),
}
VALUED = {
    "scale_on_policy": "the multiple of the gradient that the mean is, on one prompt, on-policy",
    "mean": "whose prefixes, token and continuation the mean is an average over, off-policy",
    "weight": "the factor that the correction puts on a token",
    "zero_region": "where the advantage is not 0 and the coefficient is",
    "share": "the factor that the aggregation puts on a token",
    "objective": "another objective, whose gradient the mean is, on-policy",
    "on_policy_as": "sample by sample a multiple of a sibling, on-policy",
    "proportional_to": "sample by sample a multiple of a sibling, off-policy too",
}
ALWAYS = {
    "row_order": "the order in which rows arrive does not matter, nor that of their groups",
    "padding": "what stands under a False mask, NaN included, and how wide it is, do not matter",
    "masked_tokens": "tokens that the policy did not choose change nothing, wherever they stand",
    "absent_rows": "a response that never arrived counts nowhere",
    "partition": "micro-batches and ranks add up to the whole batch",
    "other_groups": "rewards of other prompts touch a response if and only if its scope is batch",
    "rejected_rows": "a rejected response leaves every other coefficient as it was",
    "rises_with_reward": "a higher reward never lowers a response's own advantage",
    "empty_rows": "a response without trainable tokens counts as a response and adds nothing",
    "lone_rows": "a group of one is refused by group estimators; a lone survivor adds nothing",
    "extremes": "ratios of e^+-10000 and log-probabilities of -inf: finite, or one clear error",
    "penalty": "each penalty's mean is the gradient that its name says",
}


@final
@dataclass(frozen=True, kw_only=True)
class Claim:
    """One property of one entry: claimed to hold, claimed not to, or how it holds.

    Args:
        property: one of `PROPERTIES` or `VALUED`.
        holds: False where the property is claimed not to hold.
        value: how a valued property holds, one of `VALUES`; of a weight a product of such.
        of: the sibling that a relation names.
    """

    property: str
    holds: bool = True
    value: str | None = None
    of: str | None = None

    def __post_init__(self) -> None:
        if self.property not in PROPERTIES and self.property not in VALUED:
            raise unknown("claim", self.property, [*PROPERTIES, *VALUED])
        allowed = VALUES.get(self.property, (None,))
        if self.property == "weight":
            for factor in str(self.value).split(" × "):
                _check_factor(factor)
        elif self.value not in allowed:
            raise unknown(f"value of {self.property}", str(self.value), map(str, allowed))

    def describe(self) -> str:
        """What is claimed, as tables print it."""
        if self.value is None:
            return "holds" if self.holds else "does not hold"
        return self.value if self.of is None else f"{self.of} × {self.value}"


def _check_factor(words: str) -> None:
    """Refuse a factor of a weight that is not `rule; reach` or `rule; reach; policies`."""
    known = {"weight rule": RULES, "reach": REACHES, "pair of policies": POLICIES}
    for word, (kind, allowed) in zip(words.split("; "), known.items(), strict=False):
        if word not in allowed:
            raise unknown(kind, word, allowed)


def claims(*held: str) -> tuple[Claim, ...]:
    """Claims on every property of `PROPERTIES`: those named hold, the others do not.

    Example:
        >>> [c.property for c in claims("zero_drift") if c.holds]
        ['zero_drift']
    """
    for name in held:
        Claim(property=name)
    return tuple(Claim(property=name, holds=name in held) for name in PROPERTIES)


def how(
    *,
    on_policy_as: tuple[str, str] | None = None,
    proportional_to: tuple[str, str] | None = None,
    **values: str,
) -> tuple[Claim, ...]:
    """Claims on valued properties: relations are pairs of a sibling and its multiple.

    Example:
        >>> [c.describe() for c in how(share="1 / N", on_policy_as=("rloo", "1"))]
        ['1 / N', 'rloo × 1']
    """
    relations = {"on_policy_as": on_policy_as, "proportional_to": proportional_to}
    return (
        *(Claim(property=name, value=value) for name, value in values.items()),
        *(
            Claim(property=name, of=pair[0], value=pair[1])
            for name, pair in relations.items()
            if pair is not None
        ),
    )


_ON = ("unbiased_on_policy", "parallel_on_policy", "zero_drift_on_policy")
_PARALLEL = ("parallel_on_policy", "zero_drift_on_policy")
_NEUTRAL = ("zero_drift", "shift_invariant")
_GROUP = ("shift_invariant", "zero_when_equal")
_CENTERED = (*_PARALLEL, *_NEUTRAL, "zero_when_equal", "bounded")
_CLIP = "ratio, 0 beyond the clip; own token"
_CAPPED = "ratio, at most cap; own token"
_BAND = "ratio inside [low, high], else 0; own token"
_OUTSIDE = "ratio < low or ratio > high"
_TAPER = "ratio between a and b of the sign of A; response"


def _ratio(
    name: str, *held: str, weight: str, mean: str | None = None
) -> dict[str, tuple[Claim, ...]]:
    """A leave-one-out baseline with a ratio: on-policy it is rloo, sample by sample."""
    return {
        name: (
            *claims(*_ON, "shift_invariant", "zero_when_equal", *held),
            *how(
                scale_on_policy="1",
                weight=weight,
                zero_region="nowhere",
                share="1 / N",
                on_policy_as=("rloo", "1"),
            ),
            *(() if mean is None else how(mean=mean)),
        )
    }


def _tapered(name: str, *held: str, zero: str = "nowhere") -> dict[str, tuple[Claim, ...]]:
    """The sign of reward minus baseline decides between two pairs of limits."""
    return {
        name: (
            *claims("zero_drift_on_policy", "bounded", *held),
            *how(weight=_TAPER, zero_region=zero, share="1 / N"),
            *(
                how(scale_on_policy="1", on_policy_as=("reinforce", "1"))
                if "unbiased_on_policy" in held
                else ()
            ),
        )
    }


DECLARED: dict[str, tuple[Claim, ...]] = {
    "reinforce": (
        *claims(*_ON, "bounded"),
        *how(
            scale_on_policy="1",
            mean="prefix mu, token mu, rest mu",
            weight="1",
            zero_region="nowhere",
            share="1 / N",
        ),
    ),
    "rloo": (
        *claims(*_ON, *_GROUP, "bounded"),
        *how(
            scale_on_policy="1",
            mean="prefix mu, token mu, rest mu",
            weight="1",
            zero_region="nowhere",
            share="1 / N",
        ),
    ),
    "group_mean": (
        *claims(*_PARALLEL, *_GROUP, "bounded"),
        *how(
            scale_on_policy="(G - 1) / G",
            mean="prefix mu, token mu, rest mu",
            weight="1",
            zero_region="nowhere",
            share="1 / N",
            proportional_to=("rloo", "(G - 1) / G"),
        ),
    ),
    "grpo": (
        *claims(*_GROUP, "unit_variance"),
        *how(weight=_CLIP, zero_region=CLIPPED, share="1 / (N T)"),
    ),
    "dr_grpo": (
        *claims(*_PARALLEL, *_GROUP),
        *how(
            scale_on_policy="(G - 1) / (G L)",
            weight=_CLIP,
            zero_region=CLIPPED,
            share="1 / (N L)",
            on_policy_as=("group_mean", "1 / L"),
        ),
    ),
    "dapo": (
        *claims(*_GROUP, "unit_variance"),
        *how(weight=_CLIP, zero_region=CLIPPED, share="1 / tokens of the batch"),
    ),
    "ppo": (
        *claims(),
        *how(weight=_CLIP, zero_region=CLIPPED, share="1 / tokens of the batch"),
    ),
    **_ratio(
        "trajectory_is",
        "unbiased_off_policy",
        "zero_drift",
        weight="ratio; response",
        mean="prefix pi, token pi, rest pi",
    ),
    **_ratio(
        "token_is",
        "zero_drift",
        weight="ratio; own token",
        mean="prefix mu, token pi, rest mu",
    ),
    **_ratio(
        "prefix_is",
        "zero_drift",
        weight="ratio; tokens up to it",
        mean="prefix pi, token pi, rest mu",
    ),
    **_ratio(
        "suffix_is",
        "zero_drift",
        weight="ratio; tokens from it",
        mean="prefix mu, token pi, rest pi",
    ),
    **_ratio("token_tis", "bounded", weight=_CAPPED),
    **_ratio("sequence_tis", "bounded", weight="ratio, at most cap; response"),
    "cispo": (
        *claims(*_GROUP, "unit_variance", "bounded"),
        *how(
            weight=_CAPPED,
            zero_region="nowhere",
            share="1 / tokens of the batch",
            on_policy_as=("dapo", "1"),
        ),
    ),
    "icepop": (
        *claims(*_GROUP, "bounded"),
        *how(weight=_BAND, zero_region=_OUTSIDE, share="1 / tokens of the batch"),
    ),
    "gspo": (
        *claims(*_GROUP, "unit_variance"),
        *how(
            weight="ratio, 0 beyond the clip; response, geometric",
            zero_region=CLIPPED,
            share="1 / (N T)",
            on_policy_as=("grpo", "1"),
        ),
    ),
    **_tapered("topr", "unbiased_on_policy", "parallel_on_policy"),
    **_tapered("positives_only", zero="A < 0"),
    **_tapered("naive", "unbiased_on_policy", "parallel_on_policy"),
    **_tapered("tis_both_signs", "unbiased_on_policy", "parallel_on_policy"),
    "centered": (
        *claims(*_CENTERED),
        *how(scale_on_policy="(G - 1) / G", weight="1", zero_region="nowhere", share="1 / N"),
    ),
    "centered_tis": (
        *claims(*_CENTERED),
        *how(
            scale_on_policy="(G - 1) / G",
            weight=_CAPPED,
            zero_region="nowhere",
            share="1 / N",
        ),
    ),
    "centered_mask": (
        *claims(*_CENTERED),
        *how(scale_on_policy="(G - 1) / G", weight=_BAND, zero_region=_OUTSIDE, share="1 / N"),
    ),
    "starting_point": (
        *claims(*_CENTERED),
        *how(
            scale_on_policy="(G - 1) / (G L)",
            weight=_CAPPED,
            zero_region="nowhere",
            share="1 / (N L)",
        ),
    ),
}
