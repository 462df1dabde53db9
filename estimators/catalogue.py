"""The published estimators, each a composition of members.

`sum / N` below is `token_sum`: the mean over all responses of the sum over their tokens.  For every
own-token correction the ratio is current / behavior.
"""

from __future__ import annotations

from dataclasses import replace
from types import MappingProxyType
from typing import Any

from windage.estimators import more_advantages, more_corrections
from windage.estimators.admission import staleness_cap, zero_variance
from windage.estimators.advantage import constant, gae, group_mean, group_std, leave_one_out
from windage.estimators.aggregation import constant_length, sequence_mean, token_mean, token_sum
from windage.estimators.centering import exact
from windage.estimators.claims import DECLARED, Claim
from windage.estimators.correction import (
    Correction,
    band,
    clip,
    geometric,
    none,
    prefix,
    ratio,
    suffix,
    taper,
    token,
    trajectory,
    truncate,
)
from windage.estimators.errors import unknown
from windage.estimators.estimator import Estimator
from windage.estimators.member import use
from windage.estimators.penalty import loss_k3, overlong_shaping

TOPR_PAPER = "Le Roux et al., 2025, arXiv:2503.14286"
CENTERING_PAPER = "Marek and Ryabinin, 2026, arXiv:2609.20807"


def _with(reach: Any, map: Any, **settings: Any) -> tuple[Correction, ...]:
    return (Correction(reach=use(reach), map=use(map, **settings)),)


def _tapered(name: str, *, differences: tuple[str, ...] = (), **limits: float) -> Estimator:
    return Estimator(
        name=name,
        advantage=use(constant),
        corrections=_with(trajectory, taper, **limits),
        aggregation=use(token_sum),
        paper=TOPR_PAPER,
        differences=differences,
    )


def _ratio(name: str, reach: Any, paper: str, *, cap: float | None = None) -> Estimator:
    map_ = _with(reach, ratio) if cap is None else _with(reach, truncate, cap=cap)
    return Estimator(
        name=name,
        advantage=use(leave_one_out),
        corrections=map_,
        aggregation=use(token_sum),
        paper=paper,
    )


_COMPOSED = (
    Estimator(
        name="reinforce",
        advantage=use(constant),
        aggregation=use(token_sum),
        paper="Williams, 1992",
    ),
    Estimator(
        name="rloo",
        advantage=use(leave_one_out),
        aggregation=use(token_sum),
        paper="Ahmadian et al., 2024, arXiv:2402.14740",
        differences=("1. No clip and no penalty; verl and TRL add both by default.",),
    ),
    Estimator(
        name="group_mean",
        advantage=use(group_mean),
        aggregation=use(token_sum),
        paper="Liu et al., 2025, arXiv:2503.20783",
        differences=("1. Its mean is (G - 1) / G of the gradient; rloo has the factor 1.",),
    ),
    Estimator(
        name="grpo",
        advantage=use(group_std),
        corrections=_with(token, clip),
        aggregation=use(sequence_mean),
        penalties=(use(loss_k3, coefficient=0.0),),
        paper="Shao et al., 2024, arXiv:2402.03300",
        differences=(
            "1. The penalty is off (coefficient 0); the paper uses 0.04, verl 0.001, TRL 0.",
            "2. The ratio is to the sampler; the paper's is to the policy before the first pass.",
            "3. AReaL calls batch statistics GRPO by default, NeMo a leave-one-out mean with std.",
        ),
    ),
    Estimator(
        name="dr_grpo",
        advantage=use(group_mean),
        corrections=_with(token, clip),
        aggregation=use(constant_length),
        paper="Liu et al., 2025, arXiv:2503.20783",
        differences=("1. Divides by the responses as well as by the length.",),
    ),
    Estimator(
        name="dapo",
        advantage=use(group_std),
        corrections=_with(token, clip, clip_high=0.28),
        aggregation=use(token_mean),
        admission=(use(zero_variance),),
        penalties=(use(overlong_shaping),),
        paper="Yu et al., 2025, arXiv:2503.14476",
        differences=(
            "1. Overlong shaping is off until `length` is given (paper: 20,480 with margin 4,096).",
            "2. Outcomes before shaping decide whether a group varies.",
        ),
    ),
    Estimator(
        name="ppo",
        advantage=use(gae),
        corrections=_with(token, clip),
        aggregation=use(token_mean),
        paper="Schulman et al., 2017, arXiv:1707.06347",
        differences=("1. Advantages are not whitened (verl whitens them).",),
    ),
    _ratio("trajectory_is", trajectory, "Precup et al., 2000"),
    _ratio("token_is", token, "Shao et al., 2024, arXiv:2402.03300"),
    _ratio("prefix_is", prefix, "Precup et al., 2000"),
    _ratio("suffix_is", suffix, "Degris et al., 2012, arXiv:1205.4839"),
    _ratio("token_tis", token, "Munos et al., 2016, arXiv:1606.02647", cap=2.0),
    _ratio("sequence_tis", trajectory, "Ionides, 2008", cap=2.0),
    Estimator(
        name="cispo",
        advantage=use(group_std),
        corrections=_with(token, truncate, cap=5.0),
        aggregation=use(token_mean),
        paper="MiniMax, 2025, arXiv:2506.13585",
        differences=(
            "1. The cap is an absolute ratio as in TRL and ScaleRL; verl, slime and NeMo cap at "
            "1 + eps.",
            "2. The ratio is to the sampler.",
        ),
    ),
    Estimator(
        name="icepop",
        advantage=use(group_mean),
        corrections=_with(token, band),
        aggregation=use(token_mean),
        paper="Ling team, 2025, arXiv:2510.18855",
        differences=(
            "1. The masked ratio is current / sampler; the paper masks the trainer's old policy "
            "against the sampler and multiplies a clipped ratio.",
        ),
    ),
    Estimator(
        name="gspo",
        advantage=use(group_std),
        corrections=_with(geometric, clip, clip_low=3e-4, clip_high=4e-4),
        aggregation=use(sequence_mean),
        paper="Zheng et al., 2025, arXiv:2507.18071",
        differences=("1. verl 0.9.1 aggregates as its config says; the paper's 1/T is kept here.",),
    ),
    _tapered(
        "topr",
        differences=(
            "1. sum / N; the paper divides the loss by the length (aggregation `sequence_mean`).",
            "2. The ratio is the product over the response; verl's PR and Trinity use others.",
            "3. The sign of reward minus baseline decides the class; ROLL uses the score alone.",
        ),
    ),
    _tapered("positives_only", b_neg=0.0),
    _tapered("naive", a_neg=1.0),
    _tapered("tis_both_signs", a_pos=0.0),
    Estimator(
        name="centered",
        advantage=use(group_mean),
        corrections=_with(token, none),
        aggregation=use(token_sum),
        centering=use(exact),
        paper=CENTERING_PAPER,
    ),
    Estimator(
        name="centered_tis",
        advantage=use(group_mean),
        corrections=_with(token, truncate, cap=2.0),
        aggregation=use(token_sum),
        centering=use(exact),
        paper=CENTERING_PAPER,
    ),
    Estimator(
        name="centered_mask",
        advantage=use(group_mean),
        corrections=_with(token, band),
        aggregation=use(token_sum),
        centering=use(exact),
        paper=CENTERING_PAPER,
    ),
    Estimator(
        name="starting_point",
        advantage=use(group_mean),
        corrections=_with(token, truncate, cap=5.0),
        aggregation=use(constant_length),
        admission=(use(staleness_cap),),
        centering=use(exact),
        paper="the recipe recommended in document 002; arXiv:2503.20783, 2506.13585, 2609.20807",
    ),
)

_SECOND: tuple[tuple[tuple[Estimator, ...], dict[str, tuple[Claim, ...]]], ...] = (
    (more_advantages.COMPOSED, more_advantages.DECLARED),
)
FIRST: tuple[Estimator, ...] = tuple(
    replace(entry, claims=DECLARED[entry.name]) for entry in _COMPOSED
)
ENTRIES: tuple[Estimator, ...] = (
    *FIRST,
    *(
        replace(entry, claims=declared[entry.name], tier=2)
        for composed, declared in _SECOND
        for entry in composed
    ),
    *more_corrections.CORRECTED,
)
CATALOGUE = MappingProxyType({entry.name: entry for entry in ENTRIES})


def get(name: str, **settings: Any) -> Estimator:
    """An entry by name, with settings replaced.

    Raises:
        BadInput: no such entry; the message names the nearest.
        TypeError: no such setting.

    Example:
        >>> get("token_tis", cap=4.0).corrections[0].describe()
        'token truncate(cap=4)'
    """
    if name not in CATALOGUE:
        raise unknown("estimator", name, CATALOGUE)
    return CATALOGUE[name].change(**settings) if settings else CATALOGUE[name]
