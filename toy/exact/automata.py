"""Moments of a batch on a chain, for one estimator or for many at once (E5).

Which recursions an estimator needs, `kernels` says; a map of the summed log-ratio needs its law
(`summed`), and a denominator that counts tokens an integral (`denominators`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from windage.estimators.correction import prefix, suffix
from windage.estimators.estimator import Estimator
from windage.toy.chains import Chain
from windage.toy.exact.classes import signs
from windage.toy.exact.denominators import COUNTS, Nodes, runs, shared
from windage.toy.exact.ends import Response, batch
from windage.toy.exact.kernels import constant, kernel_ratio, many, needs_law, sampled, scale, steps
from windage.toy.exact.moments import Moments
from windage.toy.exact.transfer import Ended, Steps

Pairs = Sequence[tuple[Estimator, Chain]]


def refusal(estimator: Estimator) -> str | None:
    """Why the recursion does not serve an estimator, or None."""
    aggregation = estimator.aggregation
    counts = aggregation.traits.scope != "response"
    if counts and aggregation.function not in COUNTS:
        return f"{aggregation.name} couples the lengths of responses"
    if estimator.advantage.traits.scope == "batch":
        return f"{estimator.advantage.name} couples prompts"
    for correction in estimator.corrections:
        if correction.scope in ("group", "batch"):
            return f"{correction.describe()} looks at more than one response"
        idle = correction.idle or kernel_ratio(correction) or constant(correction.map)
        if not idle and correction.reach.function in (prefix, suffix):
            return f"{correction.describe()} needs the law of the log-ratio at every token"
    law = [c for c in estimator.corrections if needs_law(c)]
    return f"{law[0].describe()} needs the law of the summed log-ratio" if law else None


def automaton(estimator: Estimator, chain: Chain, group_size: int) -> Moments:
    """Mean and variance of a batch on a chain, whatever the horizon.

    Raises:
        NotImplementedError: `refusal` says why.
    """
    return automata([(estimator, chain)], group_size)[0]


def automata(pairs: Pairs, group_size: int) -> list[Moments]:
    """Moments of many estimators on chains of one automaton and horizon, in one recursion.

    Raises:
        NotImplementedError: `refusal` says why.
    """
    return [found[0] for found in sweep(pairs, (group_size,))]


def sweep(pairs: Pairs, group_sizes: Sequence[int]) -> list[list[Moments]]:
    """Moments of every pair for every group size, from recursions that all sizes share.

    Raises:
        NotImplementedError: `refusal` says why.
    """
    for estimator, _ in pairs:
        if why := refusal(estimator):
            raise NotImplementedError(why)
    chains = list(dict.fromkeys(chain for _, chain in pairs))
    laws = dict(zip(chains, many([sampled(c) for c in chains], chains[0]), strict=True))
    counting = [pair for pair in pairs if pair[0].aggregation.function in COUNTS]
    nodes = {c: Nodes(c, group_sizes) for c in dict.fromkeys(chain for _, chain in counting)}
    run = [
        runs(e, c, nodes[c]) if e.aggregation.function in COUNTS else _plain_runs(e, c)
        for e, c in pairs
    ]
    ended = iter(many([one for each in run for one in each], chains[0]))
    out = []
    for (estimator, chain), each in zip(pairs, run, strict=True):
        mine = [next(ended) for _ in each]
        mass = laws[chain].mass
        if estimator.aggregation.function in COUNTS:
            found = [shared(estimator, chain, g, nodes[chain], mass, mine) for g in group_sizes]
        else:
            response = _response(mine)
            found = [
                batch(estimator, chain, g, mass, response.scaled(_size(estimator, chain, g)))
                for g in group_sizes
            ]
        out.append(found)
    return out


def _plain_runs(estimator: Estimator, chain: Chain) -> list[Steps]:
    """Mean and norm of each sign of the advantage, of a group of one."""
    factor = scale(estimator, chain, 1)
    return [steps(estimator, chain, s, k, factor) for s in signs(estimator) for k in (1, 2)]


def _response(ended: Sequence[Ended]) -> Response:
    """What `_plain_runs` found."""
    mean = torch.stack([e.mean for e in ended[::2]])
    return Response(mean=mean, norm=torch.stack([e.norm for e in ended[1::2]]))


def _size(estimator: Estimator, chain: Chain, group_size: int) -> float:
    """A coefficient of a group's response as a multiple of that in a group of one."""
    one = replace(chain, horizon=1)
    return float(scale(estimator, one, group_size)[0] / scale(estimator, one, 1)[0])
