"""Names of the learning studies without importing torch, so that a refusal answers at once."""

from __future__ import annotations

STUDIES: dict[str, str] = {
    "placebo": "constant reward: what moves although nothing is to be learned",
    "constant": "a constant added to the reward: who is moved by it",
    "quantised": "rounded and noisy samplers: who survives",
    "staleness": "samplers that lag: what cures it and what does not",
    "composition": "the baseline as the share of positives in the data",
    "clip": "a loose clip of the gradient where right responses are scarce",
    "level": "which ratio tapers a negative: product, geometric mean or token",
    "taper": "the four limits of the taper: what each does",
    "iterated": "sample, curate, train, again",
    "passes": "several passes over one batch, with and without a clip",
    "reference": "when the reference policy is refreshed",
    "admission": "dynamic sampling, dropping what is slow, time-outs: easy and hard prompts",
    "starting_point": "the recommended recipe against each of its parts removed",
    "tabular": "exact means on token trees: drift and staleness without any noise",
    "offline": "recorded responses: who rises, stalls, drifts or collapses",
}
