"""Entries of the second tier that differ in advantage, aggregation or penalty, and their claims.

Where a paper was not read in full the entry says what was read, and its name says what it does.
"""

from __future__ import annotations

from dataclasses import replace

from windage.estimators.advantage import (
    batch_std,
    constant,
    gae_by_length,
    group_mean,
    group_std,
    leave_one_out,
)
from windage.estimators.aggregation import prompt_mean, sequence_mean, token_mean, token_sum
from windage.estimators.baselines import (
    length_weighted,
    length_weighted_apart,
    score_weighted,
    score_weighted_apart,
    token_weighted,
    token_weighted_apart,
)
from windage.estimators.claims import CLIPPED, Claim, claims, how
from windage.estimators.correction import Correction, clip, geometric, ratio, trajectory, truncate
from windage.estimators.estimator import Estimator
from windage.estimators.member import Member, use
from windage.estimators.objectives import (
    best_over_second,
    relative_mean,
    subset_gain,
    subset_max,
    success_average,
)
from windage.estimators.penalty import (
    entropy,
    loss_k2,
    loss_k3,
    loss_k3_weighted,
    positive_nll,
    reward_k1,
)
from windage.estimators.whitening import decoupled_std, whitened_group_mean, whitened_returns

PLUS_PLUS = "Hu et al., 2025, arXiv:2501.03262"
MAXRL_PAPER = "Tajwar et al., 2026, arXiv:2602.02710"
PKPO_PAPER = "Walder and Karkhanis, 2025, arXiv:2505.15201"
SCORE_BASELINE = "Greensmith et al., 2004, with the proxy of arXiv:2602.07078"
TOKEN_BASELINE = "optimal token baseline, 2026, arXiv:2602.07078"
CLIP = (Correction(map=use(clip)),)
SUBSETS = (
    "1. Advantages are G times the paper's, which adds up a group; here responses are averaged.",
    "2. The paper's abstract and a public re-implementation of its equations were read.",
)


def _plain(
    name: str, advantage: Member, paper: str, differences: tuple[str, ...] = ()
) -> Estimator:
    """No correction, sum / N: what the advantage alone does."""
    return Estimator(
        name=name,
        advantage=advantage,
        aggregation=use(token_sum),
        paper=paper,
        differences=differences,
    )


def _grpo(name: str, penalty: Member, paper: str, differences: tuple[str, ...]) -> Estimator:
    """The entry `grpo` with one penalty switched on."""
    return Estimator(
        name=name,
        advantage=use(group_std),
        corrections=CLIP,
        aggregation=use(sequence_mean),
        penalties=(penalty,),
        paper=paper,
        differences=differences,
    )


COMPOSED = (
    Estimator(
        name="batch_std",
        advantage=use(batch_std),
        corrections=CLIP,
        aggregation=use(token_mean),
        paper="Liu et al., 2025, arXiv:2508.08221",
        differences=(
            "1. Lite PPO's advantage and aggregation; AReaL's default, TRL's scale_rewards=batch.",
            "2. The spread is that of the centered rewards; TRL takes that of the rewards.",
        ),
    ),
    Estimator(
        name="reinforce_plus_plus",
        advantage=use(whitened_returns),
        corrections=CLIP,
        aggregation=use(token_mean),
        penalties=(use(reward_k1, coefficient=0.0),),
        paper=PLUS_PLUS,
        differences=(
            "1. The penalty is off (coefficient 0); once on it is whitened with the reward, so its "
            "strength depends on the spread of the returns.",
            "2. std + eps with ddof 1; verl divides by sqrt(var + eps).",
        ),
    ),
    Estimator(
        name="reinforce_plus_plus_baseline",
        advantage=use(whitened_group_mean),
        corrections=CLIP,
        aggregation=use(token_mean),
        paper=PLUS_PLUS,
        differences=(
            "1. Whitened over tokens as in verl; a mean and spread over responses is another rule.",
        ),
    ),
    Estimator(
        name="gdpo",
        advantage=use(decoupled_std),
        corrections=CLIP,
        aggregation=use(sequence_mean),
        paper="Liu et al., 2026, arXiv:2601.05242",
        differences=(
            "1. Every component has weight 1 until `component_weights` is given.",
            "2. The ratio is to the sampler.",
        ),
    ),
    _plain(
        "maxrl",
        use(relative_mean),
        MAXRL_PAPER,
        (
            "1. Centered form: on-policy the series of log p up to order G - 1, whereas "
            "documentation says the group's size (prime-rl, SkyRL).",
            "2. No clip; frameworks clip a ratio.",
        ),
    ),
    _plain(
        "success_average",
        use(success_average),
        MAXRL_PAPER,
        ("1. No baseline: on-policy the series of log p up to order G.",),
    ),
    _plain("pass_at_k", use(subset_max), PKPO_PAPER, SUBSETS),
    _plain(
        "pkpo",
        use(subset_gain),
        PKPO_PAPER,
        (*SUBSETS, "3. The baseline over the k - 1 others (the paper's loo-1); k does not anneal."),
    ),
    _plain(
        "max_minus_second",
        use(best_over_second),
        "Tang et al., 2025, arXiv:2503.19595",
        (
            "1. G times the lead, since responses are averaged.",
            "2. verl's `grpo_passk` divides by the group's standard deviation: biased.",
        ),
    ),
    Estimator(
        name="prompt_mean",
        advantage=use(group_mean),
        corrections=(Correction(map=use(truncate, cap=4.0)),),
        aggregation=use(prompt_mean),
        paper="Khatri et al., 2025, arXiv:2510.13786",
        differences=(
            "1. Of the paper the abstract and SkyRL's `prompt_mean` were read: aggregation and "
            "truncation are ScaleRL's, its spread over the batch and its filters are left out.",
        ),
    ),
    _plain(
        "opo",
        use(length_weighted),
        "Hao et al., 2025, arXiv:2505.23585",
        ("1. The baseline holds the response itself, as in the paper and verl: biased.",),
    ),
    _plain(
        "opo_leave_one_out",
        use(length_weighted_apart),
        "Hao et al., 2025, arXiv:2505.23585",
        ("1. The response's own reward is left out of its baseline: unbiased.",),
    ),
    _plain(
        "score_weighted",
        use(score_weighted),
        SCORE_BASELINE,
        (
            "1. The response's own reward is in its baseline: biased.",
            "2. |S|^2 is the sum over tokens of 1 - 2 pi + sum of pi^2: exact where each prefix "
            "has logits of its own, a proxy for a network.",
        ),
    ),
    _plain(
        "score_weighted_leave_one_out",
        use(score_weighted_apart),
        SCORE_BASELINE,
        ("1. The response's own reward is left out of its baseline: unbiased.",),
    ),
    _plain(
        "optimal_token_baseline",
        use(token_weighted),
        TOKEN_BASELINE,
        (
            "1. As verl's `optimal_token_baseline`; positions are counted in trainable tokens.",
            "2. No weight of a ratio in the baseline.",
        ),
    ),
    _plain(
        "optimal_token_baseline_leave_one_out",
        use(token_weighted_apart),
        TOKEN_BASELINE,
        ("1. The response's own return is left out of its baseline: unbiased.",),
    ),
    Estimator(
        name="off_policy_reinforce",
        advantage=use(constant),
        corrections=(Correction(reach=use(trajectory), map=use(ratio)),),
        aggregation=use(token_sum),
        paper="VCPO, 2026, arXiv:2602.17616",
        differences=(
            "1. The baseline is a setting; its optimum on a problem is that of "
            "`toy.exact.optimum.optimal_baseline`, which needs no gradient norm of a trajectory.",
            "2. VCPO's rule for the step size is an optimizer's.",
        ),
    ),
    Estimator(
        name="ppo_length_adaptive",
        advantage=use(gae_by_length),
        corrections=(Correction(map=use(clip, clip_high=0.28)),),
        aggregation=use(token_mean),
        penalties=(use(positive_nll, coefficient=0.0),),
        paper="pieces of Yue et al., 2025, arXiv:2504.05118",
        differences=(
            "1. Of VAPO the abstract and NeMo-RL's settings were read: no name of its own.",
            "2. The likelihood of correct responses is off (coefficient 0).",
            "3. The critic's own lambda is `value_targets`'; it enters no coefficient.",
        ),
    ),
    Estimator(
        name="luspo",
        advantage=use(group_std),
        corrections=(
            Correction(reach=use(geometric), map=use(clip, clip_low=2e-3, clip_high=2.5e-3)),
        ),
        aggregation=use(token_sum),
        paper="TRL's loss_type=luspo, 2026",
        differences=("1. TRL's code was read, not the paper: GSPO's loss times the length.",),
    ),
    replace(
        _plain("rloo_k1_reward", use(leave_one_out), "Ahmadian et al., 2024, arXiv:2402.14740"),
        penalties=(use(reward_k1),),
        differences=(
            "1. The penalty is collected by the return-to-go, token by token, and stays out of "
            "the baseline; TRL and verl subtract its sum from the reward before the baseline.",
        ),
    ),
    _grpo(
        "grpo_k2",
        use(loss_k2),
        "arXiv:2506.09477",
        ("1. GRPO with k2 in the loss in the place of k3: the reverse KL at each prefix.",),
    ),
    _grpo(
        "grpo_k3",
        use(loss_k3),
        "Shao et al., 2024, arXiv:2402.03300",
        ("1. Coefficient 0.001 (verl); the paper has 0.04.", "2. No clamp on k3."),
    ),
    _grpo(
        "grpo_k3_weighted",
        use(loss_k3_weighted),
        "DeepSeek-AI, 2025, arXiv:2512.02556",
        ("1. DeepSeek-V3.2's penalty on GRPO; TRL's `use_bias_correction_kl`.",),
    ),
    _grpo(
        "grpo_entropy",
        use(entropy),
        "Mnih et al., 2016, arXiv:1602.01783",
        (
            "1. From the sampled token; frameworks differentiate the entropy over the vocabulary, "
            "which has the same mean and less noise.",
            "2. `penalty.adapted` gives the next coefficient where it is to follow a target.",
        ),
    ),
)

_UNMOVED = ("shift_invariant", "zero_when_equal")
_ALONE = ("zero_drift_on_policy", "bounded")
_UNBIASED = ("unbiased_on_policy", "parallel_on_policy", "zero_drift_on_policy")
_TOKENS = "1 / tokens of the batch"


def _clipped(*held: str, share: str) -> tuple[Claim, ...]:
    weight = "ratio, 0 beyond the clip; own token"
    return (*claims(*held), *how(weight=weight, zero_region=CLIPPED, share=share))


def _unweighted(*held: str, objective: str | None = None) -> tuple[Claim, ...]:
    other = how() if objective is None else how(objective=objective)
    return (*claims(*held), *how(weight="1", zero_region="nowhere", share="1 / N"), *other)


def _unbiased(*held: str) -> tuple[Claim, ...]:
    return (*_unweighted(*_UNBIASED, "bounded", *held), *how(scale_on_policy="1"))


_GRPO = (
    *_clipped(*_UNMOVED, "unit_variance", share="1 / (N T)"),
    *how(proportional_to=("grpo", "1")),
)
DECLARED: dict[str, tuple[Claim, ...]] = {
    "batch_std": _clipped(*_UNMOVED, share=_TOKENS),
    "reinforce_plus_plus": _clipped("shift_invariant", share=_TOKENS),
    "reinforce_plus_plus_baseline": _clipped(*_UNMOVED, share=_TOKENS),
    "gdpo": _clipped(*_UNMOVED, share="1 / (N T)"),
    "maxrl": _unweighted(*_ALONE, "zero_when_equal", objective="log p, series to order G - 1"),
    "success_average": _unweighted(*_ALONE, objective="log p, series to order G"),
    "pass_at_k": _unweighted(*_ALONE, objective="largest of k rewards"),
    "pkpo": _unweighted(*_ALONE, *_UNMOVED, objective="largest of k rewards"),
    "max_minus_second": _unweighted(*_ALONE, *_UNMOVED, objective="largest of G rewards"),
    "prompt_mean": (
        *claims(*_UNMOVED, "bounded"),
        *how(
            weight="ratio, at most cap; own token",
            zero_region="nowhere",
            share="1 / (P tokens of the group)",
        ),
    ),
    "opo": _unweighted(*_ALONE, *_UNMOVED),
    "opo_leave_one_out": _unbiased(*_UNMOVED),
    "score_weighted": _unweighted(*_ALONE, *_UNMOVED),
    "score_weighted_leave_one_out": _unbiased(*_UNMOVED),
    "optimal_token_baseline": _unweighted(*_ALONE, *_UNMOVED),
    "optimal_token_baseline_leave_one_out": _unbiased(),
    "off_policy_reinforce": (
        *claims(*_UNBIASED, "unbiased_off_policy", "zero_drift", "shift_invariant"),
        *how(
            scale_on_policy="1",
            mean="prefix pi, token pi, rest pi",
            weight="ratio; response",
            zero_region="nowhere",
            share="1 / N",
            on_policy_as=("reinforce", "1"),
        ),
    ),
    "ppo_length_adaptive": _clipped(share=_TOKENS),
    "luspo": (
        *claims(*_UNMOVED, "unit_variance", "zero_drift_on_policy"),
        *how(
            weight="ratio, 0 beyond the clip; response, geometric",
            zero_region=CLIPPED,
            share="1 / N",
        ),
    ),
    "rloo_k1_reward": (*_unbiased(*_UNMOVED), *how(proportional_to=("rloo", "1"))),
    "grpo_k2": _GRPO,
    "grpo_k3": _GRPO,
    "grpo_k3_weighted": _GRPO,
    "grpo_entropy": _GRPO,
}
