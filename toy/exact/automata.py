"""Moments of a batch on a chain, for one estimator or for many at once (E5).

Which recursions an estimator needs, `kernels` says; a map of the summed log-ratio needs its law
(`summed`), and a denominator that counts tokens an integral (`denominators`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import final

import torch
from jaxtyping import Float
from torch import Tensor

from windage.estimators.correction import geometric, prefix, suffix
from windage.estimators.estimator import Estimator
from windage.toy.chains import Chain
from windage.toy.exact.averaged import LONGEST, MeanLaw, mean_frequencies
from windage.toy.exact.classes import signs
from windage.toy.exact.coupled.quadrature import laplace
from windage.toy.exact.denominators import COUNTS, Nodes, runs, shared
from windage.toy.exact.ends import Response, batch
from windage.toy.exact.kernels import (
    constant,
    kernel_ratio,
    many,
    needs_law,
    sampled,
    scale,
    scores,
    steps,
    tables,
)
from windage.toy.exact.moments import Moments
from windage.toy.exact.pieces import pieces
from windage.toy.exact.summed import Law, frequencies_of, square_cells
from windage.toy.exact.transfer import Ended, Steps, cells

Pairs = Sequence[tuple[Estimator, Chain]]


def refusal(estimator: Estimator, chain: Chain | None = None) -> str | None:
    """Why the recursion does not serve an estimator (on a chain, if one is given), or None."""
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
    return _law_refusal(estimator, 0 if chain is None else chain.horizon)


def _law_refusal(estimator: Estimator, horizon: int) -> str | None:
    """Why the law of the summed log-ratio does not serve an estimator, or None."""
    laws = [c for c in estimator.corrections if needs_law(c)]
    if not laws:
        return None
    words, map_ = laws[0].describe(), laws[0].map
    if len(laws) > 1 or any(kernel_ratio(c) for c in estimator.corrections):
        return f"{words} beside another ratio of the response needs a law of two sums"
    if estimator.aggregation.function in COUNTS:
        return f"{words} under {estimator.aggregation.name} needs the law of sum and length"
    if any(pieces(map_, sign) is None for sign in (1.0, -1.0)):
        return f"{words} is not made of pieces a + b ratio, which the summed log-ratio needs"
    if laws[0].reach.function is geometric and horizon > LONGEST:
        return f"{words} needs the law of sum and length, served up to {LONGEST:,} tokens"
    return None


def cost(estimator: Estimator, chain: Chain) -> float:
    """Numbers that the recursions of an estimator touch."""
    squarings = square_cells(chain) * chain.horizon.bit_length()
    laws = [c for c in estimator.corrections if needs_law(c)]
    if laws and laws[0].reach.function is geometric:
        return mean_frequencies(chain) * cells(chain)
    if laws:
        return float(frequencies_of(chain) * squarings)
    if estimator.aggregation.function in COUNTS:
        low, high = 1.0, float(chain.horizon * chain.prompts)
        return float(len(laplace(low, high)[0]) * squarings)
    return 5 * cells(chain)


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


def sweep(
    pairs: Pairs, group_sizes: Sequence[int], frequencies: int | None = None
) -> list[list[Moments]]:
    """Moments of every pair for every group size, from recursions that all sizes share.

    Args:
        pairs: chains of one automaton and horizon.
        group_sizes: responses of a group.
        frequencies: at which the law of a summed log-ratio is known; None: as many as afforded.

    Raises:
        NotImplementedError: `refusal` says why.
    """
    for estimator, chain in pairs:
        if why := refusal(estimator, chain):
            raise NotImplementedError(why)
    chains = list(dict.fromkeys(chain for _, chain in pairs))
    masses = many([sampled(chain) for chain in chains], chains[0])
    mass = {chain: ended.mass for chain, ended in zip(chains, masses, strict=True)}
    counting = dict.fromkeys(c for e, c in pairs if e.aggregation.function in COUNTS)
    nodes = {chain: Nodes(chain, group_sizes) for chain in counting}
    laws = Laws(frequencies)
    run: list[list[Steps]] = []
    for estimator, chain in pairs:
        if estimator.aggregation.function in COUNTS:
            run.append(runs(estimator, chain, nodes[chain]))
        else:
            run.append([] if laws.serve(estimator) else _plain_runs(estimator, chain))
    ended = iter(many([one for each in run for one in each], chains[0]))
    out = []
    for (estimator, chain), each in zip(pairs, run, strict=True):
        mine = [next(ended) for _ in each]
        if estimator.aggregation.function in COUNTS:
            known = nodes[chain], mass[chain], mine
            out.append([shared(estimator, chain, size, *known) for size in group_sizes])
            continue
        response = _response(mine) if mine else laws.response(estimator, chain)
        sizes = ((size, _size(estimator, chain, size)) for size in group_sizes)
        out.append(
            [batch(estimator, chain, size, mass[chain], response.scaled(by)) for size, by in sizes]
        )
    return out


@final
class Laws:
    """Laws of summed log-ratios, one for all estimators that need the same.

    Args:
        frequencies: at which each is known; None: as many as afforded.
    """

    def __init__(self, frequencies: int | None) -> None:
        self.frequencies = frequencies
        self.known: dict[tuple[Chain, int, bool, bytes], Law | MeanLaw] = {}

    @staticmethod
    def serve(estimator: Estimator) -> bool:
        """Whether an estimator needs one."""
        return any(needs_law(c) for c in estimator.corrections)

    def response(self, estimator: Estimator, chain: Chain) -> Response:
        """What a response contributes in a group of one."""
        coefficient, power = _power(scale(estimator, chain, 1))
        parts = []
        for sign in signs(estimator):
            own = tables(estimator, chain, sign)
            score = scores(estimator, chain, sign, own.weight)
            ((correction, x),) = own.summed
            function = pieces(correction.map, sign)
            assert function is not None
            mean = correction.reach.function is geometric
            parts.append(self._law(chain, score, x, power, mean=mean).mapped(function))
        return Response(
            mean=torch.stack([part.mean for part in parts]),
            norm=torch.stack([part.norm for part in parts]),
            mean_error=torch.stack([part.mean_error for part in parts]),
            norm_error=torch.stack([part.norm_error for part in parts]),
        ).scaled(coefficient)

    def _law(
        self, chain: Chain, score: Tensor, x: Tensor, power: int, *, mean: bool
    ) -> Law | MeanLaw:
        """The law of the sum or of the mean, made once."""
        key = chain, power, mean, torch.cat([score.flatten(), x.flatten()]).numpy().tobytes()
        if key not in self.known:
            law = MeanLaw if mean else Law
            self.known[key] = law(chain, score, x, power, self.frequencies)
        return self.known[key]


def _power(factor: Float[Tensor, " T"]) -> tuple[float, int]:
    """Coefficient and power of an aggregation that is a constant, or one over the length."""
    lengths = torch.arange(1, len(factor) + 1)
    for power in (0, 1):
        constant = factor * lengths**power
        if torch.allclose(constant, constant[:1], rtol=1e-12, atol=0):
            return float(constant[0]), power
    raise NotImplementedError("the aggregation is neither constant nor one over the length")


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
