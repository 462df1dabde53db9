"""Moments at real lengths, by recursion over the states of an automaton (E5).

The same logits serve at every time, so contributions of different times add up in one block a
state.  A stretch of tokens from state i to state j has, under a kernel nu(s, v) (the sampler, or
the sampler times a power of the ratio) with weighted scores z(s, v), a mass m, a mean u of the
summed scores, and a mean q of its squared norm.  One stretch after another is

    m(i, k) = sum over j of m1(i, j) m2(j, k)
    u(i, k) = sum over j of u1(i, j) m2(j, k) + m1(i, j) u2(j, k)
    q(i, k) = sum over j of q1(i, j) m2(j, k) + 2 u1(i, j) . u2(j, k) + m1(i, j) q2(j, k)

so that stretches of 2, 4, 8, ... tokens come by squaring, and T tokens in the logarithm of T steps.
Responses that end after t more tokens count with a factor f(t); with t = k B + b

    sum over t of f(t) P^t  =  sum over k of (sum over b of f(k B + b) P^b) P^(k B)

The product of ratios over a response is a kernel: nu = mu rho for the mean, mu rho^2 for the norm.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

import torch
from jaxtyping import Float, Int
from torch import Tensor

from windage.estimators.correction import ratio, token, token_fields, trajectory
from windage.estimators.estimator import Estimator, center
from windage.estimators.member import Member
from windage.toy.chains import Chain
from windage.toy.exact.affine import affine_moments
from windage.toy.exact.classes import Contributions, Groups, combine, signs
from windage.toy.exact.moments import Moments
from windage.toy.exact.prefix_tree import reads_sign
from windage.toy.objective import Objective, objective

FAR = 40.0
CELLS = 4e6


@final
@dataclass(frozen=True, kw_only=True, eq=False)
class Steps:
    """What a token at each state does to the recursion.

    Args:
        kernel: measure of each token at each state.
        score: weighted, maybe centered, score of the token by the logits of its own state.
        factor: f(t) of a response of t + 1 tokens.
    """

    kernel: Float[Tensor, "*batch S V"]
    score: Float[Tensor, "*batch S V V"]
    factor: Float[Tensor, "*#batch T"]


@final
@dataclass(frozen=True, kw_only=True, eq=False)
class Ended:
    """Sums over responses by how they ended: stopped at each state, then cut at each state.

    Args:
        mass: kernel measure, times f.
        mean: of the contribution, times f; blocks by state.
        norm: of its squared norm, times f.
    """

    mass: Float[Tensor, "*batch C"]
    mean: Float[Tensor, "*batch C S V"]
    norm: Float[Tensor, "*batch C"]


def transfer(steps: Steps, successor: Int[Tensor, "S V"], start: int) -> Ended:
    """Sums over all responses from `start` that end by the horizon, the length of the factor.

    The kernel is divided by its growth a token, so that neither a mass that shrinks nor one that
    grows leaves float64 before the end.
    """
    go, stop = _one_token(steps, successor)
    horizon = steps.factor.shape[-1]
    go = go * _reached(go[..., 0], start)[..., None, None]
    growth = _growth(go[..., 0])
    log_up = (growth * horizon).clamp(min=0)
    log_factor = growth.unsqueeze(-1) * torch.arange(horizon + 1) - log_up.unsqueeze(-1)
    factor = steps.factor * log_factor[..., :-1].exp()
    last = steps.factor[..., -1] * log_factor[..., -1].exp()
    doubled = [go * (-growth).exp()[..., None, None, None]]
    for _ in range(horizon.bit_length() - 1):
        doubled.append(_then(doubled[-1], doubled[-1]))
    here = torch.zeros_like(go[..., :1, :, :])
    here[..., 0, start, 0] = 1.0
    stopped = _then(_weighted(here, doubled, factor), stop)
    for i, stretch in enumerate(doubled):
        if horizon >> i & 1:
            here = _then(here, stretch)
    ended = torch.cat([stopped, here * last[..., None, None, None]], -2).squeeze(-3)
    ended = ended * log_up.exp()[..., None, None]
    blocks = ended[..., 2:].unflatten(-1, steps.kernel.shape[-2:])
    return Ended(mass=ended[..., 0], mean=blocks, norm=ended[..., 1])


def _then(
    first: Float[Tensor, "*batch I J D"], second: Float[Tensor, "*batch J K D"]
) -> Float[Tensor, "*batch I K D"]:
    """Stretches of tokens after stretches of tokens: mass, squared norm and mean on the last axis.

    Example:
        >>> one = torch.tensor([[[0.5, 2.0, 1.0]]])
        >>> _then(one, one)
        tensor([[[0.2500, 4.0000, 1.0000]]])
    """
    out = torch.einsum("...ij,...jkd->...ikd", first[..., 0], second)
    out[..., 1:] += torch.einsum("...ijd,...jk->...ikd", first[..., 1:], second[..., 0])
    out[..., 1] += 2 * torch.einsum("...ijd,...jkd->...ik", first[..., 2:], second[..., 2:])
    return out


def _one_token(steps: Steps, successor: Tensor) -> tuple[Tensor, Tensor]:
    """Stretches of one token: those that go on, and those that stop, by their own state."""
    states = len(successor)
    own = torch.eye(states, dtype=steps.kernel.dtype)
    onto = torch.nn.functional.one_hot(successor + 1, states + 1).to(own)
    square = steps.kernel * steps.score.square().sum(-1)
    norm, mass = (torch.einsum("...sv,svn->...sn", x, onto) for x in (square, steps.kernel))
    mean = torch.einsum("...sv,...svk,svn->...snk", steps.kernel, steps.score, onto)
    blocks = torch.einsum("...snk,sr->...snrk", mean, own).flatten(-2)
    paths = torch.cat([mass.unsqueeze(-1), norm.unsqueeze(-1), blocks], -1)
    return paths[..., 1:, :], torch.einsum("...sd,sr->...srd", paths[..., 0, :], own)


def _reached(mass: Float[Tensor, "*batch S S"], start: int) -> Float[Tensor, "*batch S"]:
    """1 for each state that some response visits: what happens elsewhere may exceed float64."""
    reached = torch.zeros_like(mass[..., :1, :])
    reached[..., start] = 1.0
    for _ in range(mass.shape[-1]):
        reached = ((reached + reached @ mass) > 0).to(mass)
    return reached.squeeze(-2)


def _growth(mass: Float[Tensor, "*batch S S"]) -> Float[Tensor, "*batch"]:
    """Logarithm of the factor by which a kernel's mass grows a token, in the long run."""
    size = torch.linalg.eigvals(mass).abs().amax(-1)
    return torch.where(size > 0, size, 1.0).log()


def _weighted(here: Tensor, doubled: Sequence[Tensor], factor: Float[Tensor, "*batch T"]) -> Tensor:
    """Sum over t of f(t) times what follows `here` after t tokens.

    Args:
        here: paths so far, one row.
        doubled: stretches of 1, 2, 4, ... tokens.
        factor: f(t).
    """
    horizon = factor.shape[-1]
    half = (horizon - 1).bit_length() // 2
    block = 2**half
    for stretch in doubled[:half]:
        here = torch.cat([here, _then(here, stretch)], -3)
    blocks = 1 << (-(-horizon // block) - 1).bit_length()
    padded = torch.nn.functional.pad(factor, (0, blocks * block - horizon))
    parts = torch.einsum("...kb,...bsd->...ksd", padded.unflatten(-1, (blocks, block)), here)
    for stretch in doubled[half:]:
        if parts.shape[-3] == 1:
            break
        parts = parts[..., 0::2, :, :] + _then(parts[..., 1::2, :, :], stretch)
    return parts


def refusal(estimator: Estimator) -> str | None:
    """Why the recursion does not serve an estimator, or None."""
    if estimator.aggregation.traits.scope != "response":
        return f"{estimator.aggregation.name} couples the lengths of responses"
    if estimator.advantage.traits.scope == "batch":
        return f"{estimator.advantage.name} couples prompts"
    for correction in estimator.corrections:
        reach, map_ = correction.reach.function, correction.map
        whole = reach is trajectory and map_.function is ratio
        if not (correction.idle or reach is token or whole or _constant(map_)):
            return f"{correction.describe()} needs the law of the summed log-ratio"
    return None


def _constant(map_: Member) -> bool:
    """Whether a map gives one weight for all ratios at each sign of the advantage."""
    if map_.traits.needs:
        return False
    far = torch.linspace(-FAR, FAR, 9, dtype=torch.float64)
    weights = torch.stack([map_(far, far.new_tensor(sign)) for sign in (1.0, -1.0)])
    return bool((weights == weights[:, :1]).all())


def steps(
    estimator: Estimator, chain: Chain, sign: float, power: int, factor: Float[Tensor, " T"]
) -> Steps:
    """An estimator's recursion for one sign of the advantage.

    Args:
        estimator: its corrections' maps are called on the log-ratios of every state's tokens.
        chain: sampler and policy, which is its own proximal policy.
        sign: of the advantage.
        power: 1 for the mean, 2 for the squared norm: of whole-response ratios in the kernel.
        factor: of a response of each length, for the mean.
    """
    mu = chain.behavior_logp.exp()
    seen = mu > 0
    now = chain.logp
    policies = {"logp": now, "proximal_logp": now, "behavior_logp": chain.behavior_logp}
    fields = token_fields(*(torch.where(seen, x, 0.0) for x in (now, chain.behavior_logp)))
    advantage = mu.new_tensor(sign)
    kernel, weight = mu, torch.ones_like(mu)
    for correction in estimator.corrections:
        if correction.idle:
            continue
        ratios = policies[correction.numerator] - policies[correction.denominator]
        x = torch.where(seen, ratios, 0.0)
        x = x if correction.before is None else correction.before(x, advantage)
        factors = correction.weigh(x, advantage, fields.__getitem__)
        if correction.reach.function is trajectory and correction.map.function is ratio:
            kernel = kernel * factors.pow(power)
        else:
            weight = weight * factors
    identity = torch.eye(mu.shape[-1], dtype=mu.dtype)
    plain = identity - chain.logp.exp().unsqueeze(-2)
    score = weight.unsqueeze(-1) * plain
    if estimator.centering is not None:
        head = center(estimator, chain.logp, chain.behavior_logp, advantage.view(1))
        score = score - torch.einsum("psv,psvk->psk", head, plain).unsqueeze(-2)
    return Steps(kernel=kernel, score=score, factor=factor**power)


def _scale(estimator: Estimator, chain: Chain, group_size: int) -> Float[Tensor, " T"]:
    """The aggregation's coefficient of a response of each length."""
    shape = (chain.horizon, chain.prompts, group_size)
    lengths = torch.arange(1, chain.horizon + 1)[:, None, None].expand(shape)
    return estimator.aggregation(lengths, torch.ones(shape, dtype=torch.bool))[:, 0, 0].clone()


def automaton(estimator: Estimator, chain: Chain, group_size: int) -> Moments:
    """Mean and variance of a batch on a chain, whatever the horizon.

    Raises:
        NotImplementedError: `refusal` says why.
    """
    return automata([(estimator, chain)], group_size)[0]


def automata(pairs: Sequence[tuple[Estimator, Chain]], group_size: int) -> list[Moments]:
    """Moments of many estimators on chains of one automaton and horizon, in one recursion.

    Raises:
        NotImplementedError: `refusal` says why.
    """
    run: list[Steps] = []
    for estimator, chain in pairs:
        if why := refusal(estimator):
            raise NotImplementedError(why)
        factor = _scale(estimator, chain, group_size)
        run += [steps(estimator, chain, s, k, factor) for s in signs(estimator) for k in (1, 2)]
    chains = list(dict.fromkeys(chain for _, chain in pairs))
    run += [_sampled(chain) for chain in chains]
    found = _many(run, chains[0])
    laws = dict(zip(chains, found.mass[-len(chains) :], strict=True))
    out, at = [], 0
    for estimator, chain in pairs:
        mine = slice(at, at + 2 * len(signs(estimator)))
        mean, norm = found.mean[mine][::2], found.norm[mine][1::2]
        out.append(_batch(estimator, chain, group_size, laws[chain], mean, norm))
        at = mine.stop
    return out


def cells(chain: Chain) -> float:
    """Numbers that the recursion of one kernel touches: T, S^2 V sqrt T and S^3 V log T of them."""
    states, vocab = chain.successor.shape
    row = states * (2 + states * vocab)
    columns = 2 * chain.horizon**0.5 + states * chain.horizon.bit_length()
    return chain.prompts * (chain.horizon + row * columns)


def _sampled(chain: Chain) -> Steps:
    """How the sampler's responses end."""
    mu = chain.behavior_logp.exp()
    score = mu.new_zeros((*mu.shape, mu.shape[-1]))
    return Steps(kernel=mu, score=score, factor=mu.new_ones(chain.horizon))


def _many(run: Sequence[Steps], chain: Chain) -> Ended:
    """Many recursions at once, as many as fit into memory."""
    most = max(1, int(CELLS / cells(chain)))
    found = []
    for at in range(0, len(run), most):
        part = run[at : at + most]
        stacked = Steps(
            kernel=torch.stack([r.kernel for r in part]),
            score=torch.stack([r.score for r in part]),
            factor=torch.stack([r.factor for r in part]).unsqueeze(1),
        )
        found.append(transfer(stacked, chain.successor, chain.start))
    return Ended(
        mass=torch.cat([f.mass for f in found]),
        mean=torch.cat([f.mean for f in found]),
        norm=torch.cat([f.norm for f in found]),
    )


def _batch(
    estimator: Estimator, chain: Chain, group_size: int, mass: Tensor, mean: Tensor, norm: Tensor
) -> Moments:
    """Moments of a batch from what responses contribute by how they ended.

    Ends are combined as responses of a tree are: by their rewards' powers where the advantage is
    affine and no map reads its sign, by counts of classes of equal reward elsewhere.

    Args:
        estimator: its advantage is called.
        chain: the rewards.
        group_size: responses of a group.
        mass: of the sampler, by how a response ended.
        mean: of contributions, by sign of the advantage.
        norm: of their squares, likewise.
    """
    if estimator.advantage.traits.linear and not reads_sign(estimator):
        center = (mass * chain.rewards).sum(-1).mean()
        r = chain.rewards - center
        powers = torch.stack([torch.ones_like(r), r, r.square()])
        x = torch.einsum("fpc,pcsv->fpsv", powers, mean[0])
        q = torch.einsum("fpc,pc->fp", powers, norm[0])
        law = (float(center), (mass * r).sum(-1), (mass * r.square()).sum(-1))
        return affine_moments(estimator.advantage, group_size, 1.0, law, x, q)
    parts = []
    for p in range(chain.prompts):
        rewards = chain.rewards[p][mass[p] > 0].unique()
        members = (chain.rewards[p] == rewards.unsqueeze(1)).double()
        values = torch.stack([rewards, torch.zeros_like(rewards)], 1)
        group = Groups(estimator, values, members @ mass[p], group_size)
        x = torch.einsum("rc,kcsv->krsv", members, mean[:, p]).flatten(2).flatten(0, 1)
        q = (norm[:, p] @ members.T).flatten()
        parts.append(Contributions(group, x, q))
    return combine(estimator, parts, 1.0).shaped(chain.logits.shape)


def mismatch(chain: Chain) -> dict[str, float]:
    """How far the sampler is from the policy, averaged over prompts.

    tokens: length of the policy's responses.  kl: KL(policy | sampler) a token of theirs, in nats.
    chi_squared: E[rho^2] - 1 of the ratio rho of a token, over tokens of the sampler's responses.
    effective_share: 1 / E[w^2] of the ratio w of a response.

    Example:
        >>> from windage.toy.chains import reasoning
        >>> found = mismatch(reasoning(16))
        >>> found["kl"], round(found["effective_share"], 12)
        (0.0, 1.0)
    """
    pi, mu = chain.logp.exp(), chain.behavior_logp.exp()
    ratio = torch.where(mu > 0, (chain.logp - chain.behavior_logp).exp(), 0.0)
    kernel = torch.stack([pi, mu, mu * ratio.square()])
    vocab = mu.shape[-1]
    counting = torch.eye(vocab, dtype=mu.dtype).expand(*kernel.shape, vocab)
    each = Steps(kernel=kernel, score=counting, factor=mu.new_ones(chain.horizon))
    found = transfer(each, chain.successor, chain.start)
    drawn, sampled = found.mean[:2].sum(2)
    tokens, seen = drawn.sum((1, 2)), sampled.sum((1, 2))
    away = torch.where(drawn > 0, drawn * (chain.logp - chain.behavior_logp), 0.0).sum((1, 2))
    square = (sampled * ratio.square()).sum((1, 2))
    return {
        "tokens": float(tokens.mean()),
        "kl": max(0.0, float((away / tokens).mean())),
        "chi_squared": float((square / seen).mean()) - 1,
        "effective_share": float((1 / found.mass[2].sum(-1)).mean()),
    }


@objective.register
def chain_objective(chain: Chain) -> Objective:
    """J, its gradient, and the policy's mass on responses with a token that is never drawn."""
    pi = chain.logp.exp()
    ones = pi.new_ones(chain.horizon)
    score = torch.eye(pi.shape[-1], dtype=pi.dtype) - pi.unsqueeze(-2)
    drawn = pi * (chain.behavior_logp.exp() > 0)
    both = Steps(kernel=torch.stack([pi, drawn]), score=torch.stack([score, score]), factor=ones)
    found = transfer(both, chain.successor, chain.start)
    value = (found.mass[0] * chain.rewards).sum(-1)
    centered = chain.rewards - value.unsqueeze(-1)
    return Objective(
        value=value.mean(),
        gradient=torch.einsum("pc,pcsv->psv", centered, found.mean[0]) / chain.prompts,
        unsupported_mass=(1 - found.mass[1].sum(-1)).clamp(min=0).mean(),
    )
