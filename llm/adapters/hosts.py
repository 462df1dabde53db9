"""The engines side by side: how many entries of the catalogue each can carry, and what they need.

The table of docs/adapters.md is `table()`.  Its last column is not computed here: tests hold the
gradients of every carried entry against our own, and fail beyond `BOUND`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

from windage.estimators.aggregation import constant_length
from windage.estimators.catalogue import CATALOGUE, get
from windage.estimators.estimator import Estimator
from windage.llm.adapters import prime_rl, tinker
from windage.llm.adapters.carry import Host, refusal
from windage.llm.adapters.verl import BYPASS, DECOUPLED

# Largest difference of a gradient from our own, relative to its largest entry.
BOUND = 1e-6
TRL = Host(
    name="TRL",
    early=frozenset({"rewards", "outcomes", "components"}),
    late=frozenset({"logp", "behavior_logp", "proximal_logp", "reference_logp"}),
)
TINKER = tinker.host_of([*tinker.INPUTS.values(), "mask"])
SAMPLED = tinker.host_of([tinker.INPUTS["behavior_logp"], "mask"])
# Orchestrator and trainer of prime-rl have no place for what these advantages read.
OWN = {"values", "components", "probability_square", "logp"}


def whole(estimator: Estimator) -> Estimator:
    """An entry with the one setting that a task decides, where it lacks it."""
    open_ = estimator.aggregation.function is constant_length
    if open_ and dict(estimator.aggregation.settings).get("length", 0) is None:
        return get(estimator.name, length=1)
    return estimator


def carried(*hosts: Host) -> set[str]:
    """Entries that one of an engine's modes carries once a task's length is said."""
    return {
        name
        for name, entry in CATALOGUE.items()
        if any(refusal(whole(entry), host) is None for host in hosts)
    }


def carried_by_prime_rl(*, weighted: bool) -> set[str]:
    """The same for prime-rl, if its orchestrator computes the entry's advantages."""
    return {
        name
        for name, entry in CATALOGUE.items()
        if not OWN & {*entry.advantage.traits.needs}
        and refusal(
            whole(entry), prime_rl.host_of(advantage=entry.advantage.name, weighted=weighted)
        )
        is None
    }


def table() -> str:
    """The engines, how many entries each carries, and what some of them need, in Markdown."""
    verl, trl, all_ = carried(BYPASS, DECOUPLED), carried(TRL), carried(TINKER)
    own, weighted = carried_by_prime_rl(weighted=False), carried_by_prime_rl(weighted=True)
    reference = [n for n in trl if "reference_logp" in CATALOGUE[n].needs]
    lengths = {n for n, entry in CATALOGUE.items() if whole(entry) is not entry}
    of_length = [_count(lengths & found, "a length") for found in (verl, trl, all_)]
    rows = [
        (
            "verl 0.9.1",
            f"{len(verl)}",
            f"{of_length[0]}; {_count(verl - carried(BYPASS), 'the mode without bypass')}",
            len(verl),
        ),
        (
            "TRL 1.16.0",
            f"{len(trl)}",
            f"{of_length[1]}; {_count(reference, 'a reference (`beta`)')}",
            len(trl),
        ),
        (
            "tinker 0.38.0",
            f"{len(all_)}",
            f"{of_length[2]}; "
            + _count(all_ - carried(SAMPLED), "log-probs of an old or a reference policy"),
            len(all_),
        ),
        (
            "prime-rl (stand-in)",
            f"{len(own)} with a token mean, {len(weighted)} with `token_weights`",
            "its own advantages",
            len(weighted),
        ),
    ]
    head = (
        f"| engine | entries of {len(CATALOGUE)} | of which need | refused | gradient within |\n"
        "|---|---|---|---|---|"
    )
    within = f"1e{math.log10(BOUND):.0f} of ours"
    lines = [
        f"| {name} | {count} | {needs} | {len(CATALOGUE) - found} | {within} |"
        for name, count, needs, found in rows
    ]
    return "\n".join([head, *lines])


def _count(names: Iterable[str], what: str) -> str:
    return f"{len([*names])} {what}"
