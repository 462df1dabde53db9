"""Names that `windage audit` accepts, without torch, so that a refusal answers at once."""

from __future__ import annotations

SIGNATURES = {
    "plain": "(logp [N T], behavior_logp [N T], advantages [N], mask [N T]) -> loss",
    "verl": "old_log_prob, log_prob, advantages, response_mask, ... -> (loss, metrics)",
    "trl": "the dictionary `inputs` of TRL's GRPO loss, or its entries by name -> loss",
    "tinker": "(data, logprobs), lists with one entry a response -> (loss, metrics)",
}
LOSS_CLAIMS = {
    "row_order": "the order of the rows does not matter",
    "padding": "finite garbage in the padding does not matter",
    "padding_nan": "NaN in the padding does not matter",
    "padding_width": "the width of the padding does not matter",
    "partition": "two micro-batches of as many responses average to the whole",
    "linear_in_advantage": "advantages times 2.5 give coefficients times 2.5",
    "zero_when_equal": "advantages of 0 give no gradient",
    "detached": "weights are constants: only the ratio matters, not the log-probability itself",
    "ascends": "no coefficient opposes its advantage",
    "zero_region": "zero exactly where the entry of --like (default grpo) is",
    "never_zero": "no trainable token with an advantage loses its gradient",
    "bounded": "no coefficient grows from a ratio of e^10 to one of e^20",
    "own_token": "a coefficient depends on no other token's ratio",
    "finite_at_extremes": "finite at ratios of e^±10000, in empty responses and alone",
}
