"""What of the mismatch between policy and sampler is due to what: lag, engine, cache, sampling.

The log-ratio of policy to sampler telescopes through policies in between,

    log(pi / mu) = sum over causes of log(q[i] / q[i - 1]),   q[0] = mu, q[n] = pi

each q[i] with one cause undone that q[i - 1] has.  All are evaluated on the sampler's tokens, so
that means over responses estimate expectations under the sampler.  With x[i] = log(q[i] / mu) and a
measure m of a log-ratio, the share of a cause is m(x[i]) - m(x[i - 1]): shares add up to the whole,
and depend on the order in which causes are undone.  Log-probabilities under every subset of the
causes give the shares in every order: their mean is Shapley's, their extremes say how far the order
matters.

A share can be below 0: a cause may undo another.  Where the sampler leaves out tokens (top-p,
top-k), E[exp(x)] is below 1 and `k1` alone is the divergence.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import permutations
from math import comb

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from windage.estimators.batch import promote

Measure = Callable[[Tensor, Tensor], Tensor]


def k1(x: Float[Tensor, "*lead T"], mask: Bool[Tensor, "*#lead T"]) -> Float[Tensor, "*lead"]:
    """k1: minus the log-ratio, summed over the tokens of a response.

        sum over t of -x[t]

    Claims:
        Its mean under mu is KL(mu | pi) of a response, whatever mu leaves out.

    Example:
        >>> k1(torch.tensor([0.5, -1.0, 9.0]), torch.tensor([True, True, False]))
        tensor(0.5000)
    """
    return torch.where(mask, -promote(x), 0.0).sum(-1)


def k3(x: Float[Tensor, "*lead T"], mask: Bool[Tensor, "*#lead T"]) -> Float[Tensor, "*lead"]:
    """k3: the log-ratio made up to a number that is never below 0.

        sum over t of exp(x[t]) - 1 - x[t]

    Claims:
        Its mean under mu is KL(mu | pi) of a response where mu covers pi.

    Example:
        >>> k3(torch.log(torch.tensor([1.0, 2.0])), torch.tensor([True, True]))
        tensor(0.3069)
    """
    x = promote(x)
    return torch.where(mask, torch.expm1(x) - x, 0.0).sum(-1)


def chi_square(
    x: Float[Tensor, "*lead T"], mask: Bool[Tensor, "*#lead T"]
) -> Float[Tensor, "*lead"]:
    """Squared distance of each token's ratio from 1, summed over the tokens of a response.

        sum over t of (exp(x[t]) - 1)^2

    Claims:
        Its mean under mu is the sum of the tokens' chi-square divergences where mu covers pi.

    Example:
        >>> chi_square(torch.log(torch.tensor([1.0, 3.0])), torch.tensor([True, True]))
        tensor(4.)
    """
    return torch.where(mask, torch.expm1(promote(x)).square(), 0.0).sum(-1)


def chi_square_response(
    x: Float[Tensor, "*lead T"], mask: Bool[Tensor, "*#lead T"]
) -> Float[Tensor, "*lead"]:
    """Squared distance of a response's ratio from 1.

        (exp(sum over t of x[t]) - 1)^2

    Claims:
        Its mean under mu is the chi-square divergence of responses where mu covers pi.

    Example:
        >>> chi_square_response(torch.log(torch.tensor([1.5, 2.0])), torch.tensor([True, True]))
        tensor(4.)
    """
    return torch.expm1(-k1(x, mask)).square()


MEASURES: dict[str, Measure] = {
    measure.__name__: measure for measure in (k1, k3, chi_square, chi_square_response)
}


def shares(
    chain: Float[Tensor, "L *batch T"], mask: Bool[Tensor, "*batch T"], measure: Measure
) -> Float[Tensor, " C *batch"]:
    """Each cause's part of a measure, a response each, in the order of the chain.

        m(log q[i] - log q[0]) - m(log q[i - 1] - log q[0])

    Claims:
        Parts add up to m of the whole log-ratio, response by response.

    Args:
        chain: log-probabilities of the same tokens under q[0] = mu, ..., q[n] = pi.
        mask: tokens that the policy chose.
        measure: one of `MEASURES`.

    Raises:
        ValueError: fewer than two policies, or a log-probability of a masked-in token that is not
            finite.

    Example:
        >>> chain = torch.tensor([[[-2.0]], [[-1.0]], [[-1.5]]])
        >>> shares(chain, torch.tensor([[True]]), k1).tolist()
        [[-1.0], [0.5]]
    """
    if len(chain) < 2:
        raise ValueError(f"{len(chain)} policies; allowed: the sampler, the policy, some between")
    return _measured(chain, mask, measure).diff(dim=0)


def every_order(
    policies: Float[Tensor, "L *batch T"],
    mask: Bool[Tensor, "*batch T"],
    measure: Measure,
    *,
    since: Float[Tensor, "*batch T"] | None = None,
) -> Float[Tensor, " C *batch"]:
    """Each cause's part, a response each, averaged over all orders of the causes (Shapley's value).

        sum over sets S without i of |S|! (n - 1 - |S|)! / n! * (m(S + i) - m(S))

    Claims:
        Parts add up to m of the whole log-ratio, response by response.
        One cause, or measures that add up over causes: the parts of any order.

    Args:
        policies: log-probabilities with every subset of n causes undone: cause i is undone in
            policy number b where b's bit i is set; 0 is the sampler, 2^n - 1 the policy.
        mask: tokens that the policy chose.
        measure: one of `MEASURES`.
        since: log-probabilities under mu where other causes are undone before these, in any order
            of these; None: policy 0 is mu.

    Raises:
        ValueError: a number of policies that is no power of two, or a log-probability of a
            masked-in token that is not finite.

    Example:
        >>> policies = torch.tensor([[[-2.0]], [[-1.0]], [[-1.75]], [[-1.5]]])
        >>> every_order(policies, torch.tensor([[True]]), k1).tolist()
        [[-0.625], [0.125]]
    """
    values = _measured(policies, mask, measure, since)
    causes = _causes(len(values))
    found = []
    for cause in range(causes):
        part = torch.zeros_like(values[0])
        for held in range(len(values)):
            if not held >> cause & 1:
                weight = 1 / (causes * comb(causes - 1, held.bit_count()))
                part = part + weight * (values[held | 1 << cause] - values[held])
        found.append(part)
    return torch.stack(found)


def extremes(
    policies: Float[Tensor, "L *batch T"],
    mask: Bool[Tensor, "*batch T"],
    measure: Measure,
    *,
    since: Float[Tensor, "*batch T"] | None = None,
) -> tuple[Float[Tensor, " C"], Float[Tensor, " C"]]:
    """The least and the largest mean part of each cause among all orders.

    Args:
        policies, since: as of `every_order`.
        mask: tokens that the policy chose.
        measure: one of `MEASURES`.

    Example:
        >>> policies = torch.tensor([[[-2.0]], [[-1.0]], [[-1.75]], [[-1.5]]])
        >>> low, high = extremes(policies, torch.tensor([[True]]), k1)
        >>> low.tolist(), high.tolist()
        ([-1.0, -0.25], [-0.25, 0.5])
    """
    values = _measured(policies, mask, measure, since).flatten(1).mean(1)
    causes = _causes(len(values))
    parts = []
    for order in permutations(range(causes)):
        held, part = 0, values.new_zeros(causes)
        for cause in order:
            part[cause] = values[held | 1 << cause] - values[held]
            held |= 1 << cause
        parts.append(part)
    table = torch.stack(parts)
    return table.amin(0), table.amax(0)


def averaged(
    parts: Float[Tensor, " C *batch"], tokens: Float[Tensor, "*batch"]
) -> tuple[Float[Tensor, " C"], Float[Tensor, " C"]]:
    """Parts a token, and their standard errors: responses are independent, their tokens are not.

        value = sum of parts / sum of tokens,   error^2 = n / (n - 1) * sum of rest^2 / tokens^2
        rest of a response = its part - value * its tokens

    Args:
        parts: of `shares` or `every_order`.
        tokens: of each response; ones give parts a response.

    Raises:
        ValueError: fewer than two responses.

    Example:
        >>> averaged(torch.tensor([[1.0, 3.0]]), torch.tensor([1.0, 1.0]))
        (tensor([2.]), tensor([1.]))
    """
    parts, tokens = parts.flatten(1), tokens.flatten()
    if len(tokens) < 2:
        raise ValueError(f"{len(tokens)} responses; allowed: two or more")
    total = tokens.sum()
    value = parts.sum(1) / total
    rest = parts - value.unsqueeze(1) * tokens
    count = len(tokens)
    return value, (rest.square().sum(1) * (count / (count - 1))).sqrt() / total


def _causes(policies: int) -> int:
    causes = policies.bit_length() - 1
    if policies < 2 or policies != 1 << causes:
        raise ValueError(f"{policies} policies; allowed: one for every subset, 2, 4, 8, ...")
    return causes


def _measured(
    policies: Tensor, mask: Tensor, measure: Measure, since: Tensor | None = None
) -> Tensor:
    """The measure of each policy's log-ratio to the sampler, who is the first unless told apart."""
    safe = torch.where(mask, promote(policies), 0.0)
    if not safe.isfinite().all():
        number = int((~safe.isfinite()).flatten(1).any(1).nonzero()[0])
        raise ValueError(f"policy {number} gives a sampled token no finite log-probability")
    start = safe[0] if since is None else torch.where(mask, promote(since), 0.0)
    return measure(safe - start, mask)
