"""Learners: ascent along an estimator's mean update, or along its update of recorded responses.

A learner is a start, an update (parameters and step number to a direction) and a step size; `path`
walks it.  Every tensor may carry leading axes of replicates (seeds, settings), which are walked
together.  Updates of recorded responses live with the policies that produced them (`questions`,
`bits`); all of them call `estimators.estimator.coefficients`, the function that trains.

Randomness is drawn beforehand from one generator a seed, so a walk is a function of its arguments.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import final

import numpy as np
import torch
from jaxtyping import Bool, Float
from scipy.integrate import solve_ivp
from torch import Tensor

from windage.estimators.estimator import Estimator
from windage.toy.exact.walk import pull_back

Update = Callable[[Tensor, int], Tensor]


@final
@dataclass(frozen=True, kw_only=True, eq=False)
class State:
    """A place on a path.

    Args:
        step: updates made so far.
        parameters: after them, a row a replicate.
        norm: length of the last update before clipping, a replicate; 0 at the start.
    """

    step: int
    parameters: Float[Tensor, "*batch D"]
    norm: Float[Tensor, "*batch"]


def clip_norm(
    gradient: Float[Tensor, "*batch D"], limit: float | Float[Tensor, "*#batch"]
) -> tuple[Float[Tensor, "*batch D"], Float[Tensor, "*batch"]]:
    """Scale each replicate's gradient down to a norm; also its norm before.

        g * min(1, limit / |g|)

    Example:
        >>> clip_norm(torch.tensor([[3.0, 4.0], [0.3, 0.4]]), 1.0)[0]
        tensor([[0.6000, 0.8000],
                [0.3000, 0.4000]])
    """
    norm = gradient.norm(dim=-1)
    factor = (limit / norm.clamp(min=torch.finfo(norm.dtype).tiny)).clamp(max=1.0)
    return gradient * factor.unsqueeze(-1), norm


def path(
    start: Float[Tensor, "*batch D"],
    update: Update,
    *,
    steps: int,
    rate: float | Float[Tensor, "*batch 1"] = 1.0,
    limit: float | Float[Tensor, "*#batch"] = math.inf,
) -> Iterator[State]:
    """Plain ascent, one state a step, the start included.

        z[n + 1] = z[n] + rate * clip(update(z[n], n), limit)

    Args:
        start: parameters, a row a replicate.
        update: direction at given parameters and step number.
        steps: updates to make.
        rate: step size; one number, or one a replicate.
        limit: greatest norm of an update; one number, or one a replicate.

    Example:
        >>> walk = path(torch.tensor([1.0]), lambda z, n: -z, steps=2, rate=0.5)
        >>> [state.parameters.item() for state in walk]
        [1.0, 0.5, 0.25]
    """
    here = start
    yield State(step=0, parameters=here, norm=start.new_zeros(start.shape[:-1]))
    for step in range(steps):
        gradient = update(here, step)
        clipped, norm = clip_norm(gradient, limit)
        here = here + rate * clipped
        yield State(step=step + 1, parameters=here, norm=norm)


def marks(states: Iterable[State], steps: Iterable[int]) -> dict[int, Tensor]:
    """Parameters after the given numbers of updates, in one walk.

    Example:
        >>> walk = path(torch.tensor([1.0]), lambda z, n: z, steps=4)
        >>> {n: z.item() for n, z in marks(walk, [1, 3]).items()}
        {1: 2.0, 3: 8.0}
    """
    wanted = set(steps)
    found = {}
    for state in states:
        if state.step in wanted:
            found[state.step] = state.parameters
            if len(found) == len(wanted):
                break
    return found


def first_step(
    states: Iterable[State], reached: Callable[[Tensor], Bool[Tensor, "*batch"]]
) -> tuple[float, ...]:
    """The number of updates after which each replicate first meets a condition; inf: never.

    Example:
        >>> walk = path(torch.tensor([[1.0], [0.0]]), lambda z, n: z, steps=4)
        >>> first_step(walk, lambda z: z[:, 0] > 3)
        (2.0, inf)
    """
    found: Tensor | None = None
    for state in states:
        met = reached(state.parameters)
        if found is None:
            found = torch.full(met.shape, math.inf)
        found = torch.where(met & (found == math.inf), float(state.step), found)
        if bool((found < math.inf).all()):
            break
    return () if found is None else tuple(found.flatten().tolist())


def expected_update(
    estimator: Estimator,
    behavior_logp: Float[Tensor, "*#batch A"],
    rewards: Float[Tensor, "*#batch A"],
) -> Update:
    """Mean update of an estimator on one-step problems, by the logits of their arms.

        g[v] = mu[v] w[v] A[v],   update[v] = g[v] - pi[v] sum(g)

    With one step every reach is the arm's own ratio, so the weight is the product of the maps.  An
    arm may stand for a whole trajectory.

    Claims:
        Equals the mean of `exact.prefix_tree.by_response` with one response, row by row.

    Args:
        estimator: its advantage must look at its own response only; no centering, no penalty.
        behavior_logp: of the sampler, a row a replicate.
        rewards: of each arm.

    Raises:
        ValueError: an advantage that couples responses, centering, admission or an active penalty.

    Example:
        >>> from windage.estimators.catalogue import get
        >>> half = torch.tensor([0.5, 0.5]).log()
        >>> expected_update(get("naive"), half, torch.tensor([1.0, 0.0]))(half, 0)
        tensor([ 0.2500, -0.2500])
    """
    couples = estimator.advantage.traits.scope != "response"
    if couples or estimator.centering or estimator.admission or estimator.active_penalties:
        raise ValueError(
            f"{estimator.name}: the mean of one response needs an advantage of its own and neither "
            "centering, admission nor penalty"
        )
    arms = rewards.unsqueeze(-2)
    sampler = behavior_logp.unsqueeze(-2)
    advantages = estimator.advantage(arms, torch.ones_like(arms, dtype=torch.bool))
    mass = sampler.exp() * advantages
    maps = [c.map for c in estimator.corrections if not c.idle]

    def update(logits: Tensor, step: int) -> Tensor:
        logp = logits.log_softmax(-1).unsqueeze(-2)
        visits = mass
        for map_ in maps:
            visits = visits * map_(logp - sampler, advantages)
        return pull_back(visits, logp.exp()).squeeze(-2)

    return update


def flow(
    start: Float[Tensor, " D"], update: Update, times: Iterable[float]
) -> Float[Tensor, "N D"]:
    """The limit of small steps: parameters at given times along dz/dt = update(z).

    Ascent with step 1 goes the same way where the update changes slowly, at far greater cost.

    Args:
        start: parameters of one learner.
        update: direction; called with step 0.
        times: ascending, in steps of size 1.

    Example:
        >>> flow(torch.tensor([1.0]), lambda z, n: -z, [0.0, 1.0])[1].item() # doctest: +ELLIPSIS
        0.36787...
    """
    points = list(times)

    def slope(_: float, z: np.ndarray) -> np.ndarray:
        return update(torch.from_numpy(z), 0).numpy()

    found = solve_ivp(
        slope,
        (0.0, points[-1]),
        start.double().numpy(),
        method="LSODA",
        rtol=1e-9,
        atol=1e-9,
        t_eval=points,
    )
    if not found.success:
        raise ValueError(f"the flow stopped at time {found.t[-1]:g}: {found.message}")
    return torch.from_numpy(found.y.T.copy())
