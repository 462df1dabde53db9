"""Names of the learning studies without importing torch, so that a refusal answers at once."""

from __future__ import annotations

STUDIES: dict[str, str] = {
    "placebo": "constant reward: what moves although nothing is to be learned",
    "offline": "recorded responses: who rises, stalls, drifts or collapses",
}
