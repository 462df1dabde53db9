"""Dumps with a known fault, or with none: responses of an automaton whose law is known.

Weights of a run are a walk of logits, one set a version; a response is drawn at a lag, by an engine
with an error of its own, and recorded as a framework would, or as one with a fault does.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, final

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from windage.analysis.diagnose.rows import Row
from windage.toy.behavior import KINDS
from windage.toy.chains import Chain

STATES, VOCAB, PROMPTS, LIMIT = 48, 24, 4, 96
MERGE_LOW, MERGE_HIGH = 6.0, 16.0


@final
@dataclass(frozen=True, kw_only=True)
class Run:
    """How a dump came about; the defaults are an honest asynchronous run.

    Args:
        groups, group_size: of responses.
        versions: sets of weights in the dump.
        drift: what an update adds to a logit, standard deviation.
        sharpening: what an update multiplies the logits by, less 1.
        lag: updates between sampler and trainer, at most; drawn evenly for each group.
        in_flight: share of the responses that new weights reach while they are written.
        noise: error of the engine on a logit, drawn anew for every token.
        growth: what that error grows to along a response, in times of the first.
        bits: of the engine's logits; None: exact.
        temperature, top_p, top_k: of the sampler.
        applied: the trainer takes them into account.
        raw: the engine records probabilities from before them.
        shift: places by which the recorded log-probabilities are late.
        cache: share of the old weights that acts on through a cache kept over an update.
        behind: updates by which the engine is further behind than it says, in half the versions.
        off: updates by which the trainer's weights are older than the dump says.
        ahead: what is added to the number of the version that drew.
        copied: the trainer's column holds the sampler's numbers.
        digits: of the recorded log-probabilities, behind the point; None: all.
        merges: share of tokens that the trainer reads as another text.
        recorded: what the dump holds beside log-probabilities: `versions`, `squares`.
    """

    groups: int = 64
    group_size: int = 4
    versions: int = 8
    drift: float = 0.03
    sharpening: float = 0.0
    lag: int = 2
    in_flight: float = 0.0
    noise: float = 0.02
    growth: float = 1.0
    bits: int | None = None
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int | None = None
    applied: bool = False
    raw: bool = False
    shift: int = 0
    cache: float = 0.0
    behind: int = 0
    off: int = 0
    ahead: int = 0
    copied: bool = False
    digits: int | None = None
    merges: float = 0.0
    recorded: tuple[str, ...] = ("versions", "squares")


# What is planted, and the sign that must be raised; None: nothing is wrong.
CASES: Mapping[str, tuple[str | None, Run]] = {
    "synchronous": (None, Run(lag=0)),
    "asynchronous": (None, Run(lag=4)),
    "asynchronous, versions not recorded": (None, Run(lag=4, recorded=())),
    "in flight": (None, Run(lag=2, in_flight=0.6)),
    "engine of few bits": (None, Run(lag=0, bits=6)),
    "engine with a large error": (None, Run(lag=1, noise=0.15)),
    "a policy that sharpens": (None, Run(lag=2, sharpening=0.01)),
    "temperature on both sides": (None, Run(temperature=0.7, applied=True)),
    "top-p on both sides": (None, Run(top_p=0.9, applied=True)),
    "large updates": (None, Run(lag=2, drift=0.08)),
    "one program for both": (None, Run(lag=0, noise=0.0)),
    "two digits": (None, Run(digits=2)),
    "temperature": ("temperature", Run(temperature=0.7)),
    "temperature near 1": ("temperature", Run(temperature=0.9, lag=1)),
    "high temperature": ("temperature", Run(temperature=1.3, recorded=())),
    "top-p": ("support", Run(top_p=0.9)),
    "top-p near 1": ("support", Run(top_p=0.97)),
    "top-k": ("support", Run(top_k=4, recorded=())),
    "raw, trainer at the temperature": (
        "raw", Run(temperature=0.7, applied=True, raw=True, recorded=())
    ),
    "raw, trainer without": ("raw", Run(temperature=0.7, raw=True)),
    "raw, top-p": ("raw", Run(top_p=0.9, raw=True)),
    "copied": ("copied", Run(copied=True)),
    "copied, versions not recorded": ("copied", Run(copied=True, lag=0, recorded=())),
    "late by one": ("shift", Run(shift=1)),
    "early by one": ("shift", Run(shift=-1, recorded=())),
    "cache kept over updates": ("stale_cache", Run(in_flight=0.6, cache=1.0, drift=0.08, lag=3)),
    "errors that add up": ("stale_cache", Run(growth=6.0, noise=0.05, recorded=())),
    "weights that did not arrive": ("wrong_version", Run(behind=4, drift=0.08, lag=1)),
    "trainer one update behind": ("wrong_version", Run(off=1, drift=0.08, lag=3)),
    "versions from the future": ("wrong_version", Run(ahead=1, lag=1)),
    "text read anew": ("retokenized", Run(merges=0.01)),
}  # fmt: skip


@final
@dataclass(frozen=True, kw_only=True, eq=False)
class World:
    """An automaton, its weights by version, and what a response earns.

    Args:
        successor: next state of a token at a state, -1 for the end.
        logits: by version, prompt and state.
        merit: log-odds of a right answer by prompt.
    """

    successor: Int[Tensor, "S V"]
    logits: Float[Tensor, "L P S V"]
    merit: Float[Tensor, " P"]


def world(run: Run, generator: torch.Generator) -> World:
    """Weights that walk from version to version."""
    shape = (PROMPTS, STATES, VOCAB)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, dtype=torch.float64, generator=generator)

    logits = 2.2 * normal(*shape)
    logits[..., 0] = logits[..., 1:].logsumexp(-1) - np.log(40.0)
    history = [logits]
    for _ in range(run.versions - 1):
        stretched = history[-1] * (1 + run.sharpening)
        history.append(stretched + run.drift * normal(*shape))
    successor = torch.randint(STATES, (STATES, VOCAB), generator=generator)
    successor[:, 0] = -1
    return World(successor=successor, logits=torch.stack(history), merit=normal(PROMPTS))


def choices(logits: Float[Tensor, "n V"]) -> Chain:
    """Choices of a token, a prompt each, so that the toy's samplers apply to them."""
    count, vocab = logits.shape
    return Chain(
        name="choices",
        successor=torch.full((1, vocab), -1),
        start=0,
        horizon=1,
        logits=logits.unsqueeze(1),
        behavior_logp=logits.log_softmax(-1).unsqueeze(1),
        rewards=torch.zeros(count, 2, dtype=torch.float64),
    )


def process(run: Run, logits: Float[Tensor, "n V"]) -> Float[Tensor, "n V"]:
    """Log-probabilities after temperature, then top-k, then top-p."""
    site = choices(logits)
    steps: list[tuple[str, dict[str, Any]]] = [
        ("bits", {"b": run.bits}),
        ("temperature", {"t": run.temperature}),
        ("top_k", {"k": run.top_k}),
        ("top_p", {"p": run.top_p}),
    ]
    for kind, settings in steps:
        if next(iter(settings.values())) not in (None, 1.0):
            site = replace(site, logits=KINDS[kind](site, **settings))
    return site.logp.squeeze(1)


def trained(
    run: Run, logits: Float[Tensor, "n V"], drawn: Float[Tensor, "n V"]
) -> Float[Tensor, "n V"]:
    """The trainer's log-probabilities; those of tokens that the sampler cut are cut as well."""
    if not run.applied:
        return logits.log_softmax(-1)
    kept = (logits / run.temperature).masked_fill(drawn == -torch.inf, -torch.inf)
    return kept.log_softmax(-1)


@final
@dataclass(frozen=True, kw_only=True, eq=False)
class Drawn:
    """Every response, padded; each array `[responses, tokens]` but for the last three.

    Args:
        length: tokens of a response.
        current: version that is trained.
        ended: whether it stopped by itself.
    """

    token: Tensor
    behavior: Tensor
    logp: Tensor
    square: Tensor
    version: Tensor
    length: Tensor
    current: Tensor
    ended: Tensor


def draw(world: World, run: Run, generator: torch.Generator) -> Drawn:
    """Walk all responses at once, token by token."""
    count = run.groups * run.group_size
    group = torch.arange(count) // run.group_size
    prompt = group % PROMPTS
    current = run.lag + group % (run.versions - run.lag)
    older = torch.randint(run.lag + 1, (run.groups,), generator=generator)[group]
    change = torch.randint(4, LIMIT // 2, (count,), generator=generator)
    moved = torch.rand(count, generator=generator) < run.in_flight
    older = torch.where(moved, older.clamp(min=min(1, run.lag)), older)
    shape = (count, LIMIT)
    numbers = {n: torch.zeros(shape, dtype=torch.float64) for n in ("behavior", "logp", "square")}
    token, version = torch.zeros(shape, dtype=torch.long), torch.zeros(shape, dtype=torch.long)
    length, ended = torch.full((count,), LIMIT), torch.zeros(count, dtype=torch.bool)
    alive, state = torch.arange(count), torch.zeros(count, dtype=torch.long)
    wrong = (torch.arange(run.versions) >= run.versions // 2).long() * run.behind
    for t in range(LIMIT):
        here = alive
        now, start = current[here], (current - older)[here]
        after = moved[here] & (t >= change[here])
        said = torch.where(after, now, start)
        true = (said - wrong[said]).clamp(min=0)
        z = world.logits[true, prompt[here], state]
        if run.cache:
            kept = run.cache * (change[here] / max(t, 1)).clamp(max=1).unsqueeze(-1)
            old = world.logits[start, prompt[here], state]
            z = torch.where(after.unsqueeze(-1), z + kept * (old - z), z)
        error = run.noise * (1 + (run.growth - 1) * t / LIMIT)
        z = z + error * torch.randn(z.shape, dtype=torch.float64, generator=generator)
        sampled = process(run, z)
        chosen = torch.multinomial(sampled.exp(), 1, generator=generator)
        policy = trained(run, world.logits[now - run.off, prompt[here], state], sampled)
        recorded = z.log_softmax(-1) if run.raw else sampled
        numbers["behavior"][here, t] = recorded.gather(1, chosen).squeeze(1)
        numbers["logp"][here, t] = policy.gather(1, chosen).squeeze(1)
        numbers["square"][here, t] = policy.exp().square().sum(-1)
        token[here, t], version[here, t] = chosen.squeeze(1), said
        following = world.successor[state, chosen.squeeze(1)]
        over = following < 0
        length[here[over]], ended[here[over]] = t + 1, True
        alive, state = here[~over], following[~over]
        if not len(alive):
            break
    return Drawn(
        token=token, version=version, length=length, current=current, ended=ended, **numbers
    )


def rows(run: Run, seed: int) -> Iterator[Row]:
    """The dump of a run."""
    generator = torch.Generator().manual_seed(seed)
    rng = np.random.default_rng(seed)
    here = world(run, generator)
    drawn = draw(here, run, generator)
    chance = torch.sigmoid(here.merit)
    for i in range(len(drawn.length)):
        group = i // run.group_size
        yield _row(drawn, run, rng, i, float(chance[group % PROMPTS]))


def _row(drawn: Drawn, run: Run, rng: np.random.Generator, i: int, chance: float) -> Row:
    """One response as it stands in the dump."""
    n = int(drawn.length[i])
    behavior, logp = drawn.behavior[i, :n].numpy(), drawn.logp[i, :n].numpy().copy()
    if run.copied:
        logp = behavior.copy()
    if run.digits is not None:
        behavior, logp = behavior.round(run.digits), logp.round(run.digits)
    if run.shift:
        behavior = np.roll(behavior, run.shift)
    if run.merges:
        hit = rng.random(n) < run.merges
        logp[hit] = np.minimum(logp[hit], 0.0) - rng.uniform(MERGE_LOW, MERGE_HIGH, hit.sum())
    ended = bool(drawn.ended[i])
    right = float(ended and rng.random() < chance)
    return Row(
        where=f"row {i}",
        mask=np.ones(n, dtype=bool),
        behavior_logp=behavior,
        logp=logp,
        response_ids=drawn.token[i, :n].numpy(),
        versions=drawn.version[i, :n].numpy() + run.ahead if "versions" in run.recorded else None,
        current_version=int(drawn.current[i]) if "versions" in run.recorded else None,
        probability_square=drawn.square[i, :n].numpy() if "squares" in run.recorded else None,
        group_id=str(i // run.group_size),
        sample_id=str(i),
        reward=right,
        finish_reason="stop" if ended else "length",
        temperature=run.temperature,
        top_p=run.top_p,
        top_k=run.top_k,
    )


def varied(run: Run, seed: int) -> Run:
    """The same run with another size, pace of learning and error of the engine."""
    size, pace, error = np.random.default_rng(seed).uniform((-0.7, -1.0, -1.0), (1.0, 0.5, 1.0))
    return replace(
        run,
        groups=int(run.groups * 2**size),
        drift=run.drift * 2**pace,
        noise=run.noise * 2**error,
    )


def dump(name: str, seed: int) -> Iterable[Row]:
    """A planted dump of a name, no two seeds alike in size, pace and error."""
    return rows(varied(CASES[name][1], seed), seed)
