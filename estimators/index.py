"""Names and settings of the catalogue without importing torch, so that a refusal answers at once.

A test keeps this table equal to the catalogue.
"""

from __future__ import annotations

_CLIP = ("clip_low", "clip_high")
_TAPER = ("baseline", "a_pos", "b_pos", "a_neg", "b_neg")
SETTINGS: dict[str, tuple[str, ...]] = {
    "reinforce": ("baseline",),
    "rloo": (),
    "group_mean": (),
    "grpo": ("ddof", "eps", *_CLIP, "coefficient"),
    "dr_grpo": (*_CLIP, "length"),
    "dapo": ("ddof", "eps", *_CLIP, "length", "margin"),
    "ppo": ("gamma", "lam", *_CLIP),
    "trajectory_is": (),
    "token_is": (),
    "prefix_is": (),
    "suffix_is": (),
    "token_tis": ("cap",),
    "sequence_tis": ("cap",),
    "cispo": ("ddof", "eps", "cap"),
    "icepop": ("low", "high"),
    "gspo": ("ddof", "eps", *_CLIP),
    "topr": _TAPER,
    "positives_only": _TAPER,
    "naive": _TAPER,
    "tis_both_signs": _TAPER,
    "centered": (),
    "centered_tis": ("cap",),
    "centered_mask": ("low", "high"),
    "starting_point": ("cap", "length", "max_lag"),
}
FIRST = tuple(SETTINGS)
_GROUP = ("ddof", "eps", *_CLIP)
SETTINGS |= {
    "batch_std": _GROUP,
    "reinforce_plus_plus": ("gamma", "eps", *_CLIP, "coefficient"),
    "reinforce_plus_plus_baseline": ("eps", *_CLIP),
    "gdpo": ("component_weights", *_GROUP),
    "maxrl": (),
    "success_average": (),
    "pass_at_k": ("k",),
    "pkpo": ("k",),
    "max_minus_second": (),
    "prompt_mean": ("cap",),
    "opo": (),
    "opo_leave_one_out": (),
    "score_weighted": (),
    "score_weighted_leave_one_out": (),
    "optimal_token_baseline": (),
    "optimal_token_baseline_leave_one_out": (),
    "off_policy_reinforce": ("baseline",),
    "ppo_length_adaptive": ("gamma", "alpha", *_CLIP, "coefficient"),
    "luspo": _GROUP,
    "rloo_k1_reward": ("coefficient",),
    "grpo_k2": (*_GROUP, "coefficient"),
    "grpo_k3": (*_GROUP, "coefficient"),
    "grpo_k3_weighted": (*_GROUP, "coefficient"),
    "grpo_entropy": (*_GROUP, "coefficient"),
}
_STD = ("ddof", "eps")
SETTINGS |= {
    "dual_clip": (*_GROUP, "cap"),
    "bypass_ppo": _GROUP,
    "decoupled_ppo": _GROUP,
    "decoupled_tis": (*_STD, "cap", *_CLIP),
    "gspo_token": _GROUP,
    "gmpo": (*_STD, "log_low", "log_high"),
    "clip_cov": (*_GROUP, "share", "low", "high"),
    "kl_cov": (*_STD, "share", "coefficient"),
    "geometric_mask": (*_STD, "low", "high"),
    "seq_mask_tis": (*_STD, "low", "high"),
    "opsm": (*_STD, "delta", *_CLIP),
    "dppo_tv": (*_STD, "limit", "cap"),
    "dppo_kl": (*_STD, "limit", "cap"),
    "sequence_mis": (*_STD, "low", "high"),
    "worst_token_mask": (*_STD, "low", "high"),
    "m2po": (*_STD, "tau"),
    "sapo": (*_STD, "tau_pos", "tau_neg"),
    "vespo": (*_STD, "k_pos", "lambda_pos", "k_neg", "lambda_neg"),
    "aspo": (*_GROUP, "cap"),
    "self_normalized": ("cap",),
    "self_normalized_batch": ("cap",),
    "normalized_tis": ("cap",),
    "kimi": ("coefficient",),
    "prime_rl": ("limit", "cap", "coefficient"),
}
