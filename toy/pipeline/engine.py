"""The event loop: compiled, one small function an event, all state in arrays.

Events are ordered by time.  At the same time a commit comes first, then the arrival of weights,
then ends of responses and verdicts in the order of starts; so a slot that becomes free then already
starts under the new version.

    a response   waits for a slot, is written, is judged, waits for its group, then in the queue
    a step       takes batch / group_size groups, in order; commits after scoring and update
    the weights  of a commit arrive `sync` later
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from windage.toy.pipeline.compiled import compiled, heapify, pop, push

Array = NDArray[Any]
INF = np.inf

# How a response left; 0 or more: the step that consumed it.
INSIDE, SLOW, INCOMPLETE, EVEN, STALE = -1, -2, -3, -4, -5
FATES = {SLOW: "slow", INCOMPLETE: "incomplete", EVEN: "zero_variance", STALE: "stale"}

FREE, SYNCHRONOUS, OVERLAP = range(3)


class Rules(NamedTuple):
    """The settings as the loop reads them; lags and capacities without limit are infinite."""

    steps: int
    slots: int
    groups: int
    group_size: int
    barrier: int
    read: float
    prompt: float
    scoring: float
    sync: float
    pause: float
    in_flight: bool
    reread: bool
    publish_every: int
    max_lag: float
    capacity: float
    limit: float
    cut_fails: bool
    refill: bool


class Draws(NamedTuple):
    """Everything random: a row a response in the order of starts, and the updates, a row a step.

    `pace` holds seconds a token.
    """

    tokens: Array
    pace: Array
    verifier: Array
    reward: Array
    update: Array


def record(**names: str) -> np.dtype:
    """A record of fields, whose names are given for each of numpy's types."""
    return np.dtype([(name, kind) for kind, several in names.items() for name in several.split()])


# Scalars: time and time of the next commit; versions committed, arrived and in force; responses
# started, gone, in slots and in dropped groups; ends of the queue; verdicts to come; pieces.
TALLY = record(
    f8="now commit",
    i8="version arrived weights started gone running dropped head tail verdicts pieces",
)

# Times of the start, of the end in the slot and of the verdict; tokens written so far; time from
# which writing goes on under the present weights, and at which it ends if nobody cuts it; version
# of the trainer at the start; of the weights at the start and now; of the trainer when it left.
RESPONSE = record(
    f8="born ended scored tokens since finish", i4="version weights under left fate reward"
)

# Responses without a verdict, with one, their rewards, the oldest weights of a response.
GROUP = record(i4="pending alive total oldest")

# When a step took its batch and committed; responses inside and in the queue at that time.
STEP = record(f8="taken commit", i8="occupancy queued")

# Tokens of a response under weights that have changed since.
PIECE = record(f8="tokens", i8="response weights")


class State(NamedTuple):
    """All that changes, in records as described above.

    Args:
        tally: one record.
        responses, groups, steps, pieces: a record each.
        queue: groups in the order in which they became complete.
        end_when, end_what: heap of the ends of responses in slots.
        verdict_when, verdict_what: heap of the verdicts to come.
    """

    tally: Array
    responses: Array
    groups: Array
    steps: Array
    pieces: Array
    queue: Array
    end_when: Array
    end_what: Array
    verdict_when: Array
    verdict_what: Array


@compiled
def loop(rules: Rules, draws: Draws, s: State) -> int:
    """Run to the last commit; gives 0 then, 1 for want of draws, 2 of pieces, 3 of any event."""
    c = s.tally[0]
    while c.version < rules.steps:
        take(rules, draws, s)
        if c.commit == c.now:
            commit(rules, draws, s)
            continue
        while c.running < rules.slots and room(rules, s):
            if c.started == len(draws.tokens):
                return 1
            start(rules, draws, s)
        if rules.in_flight and c.pieces + c.running > len(s.pieces):
            return 2
        event = s.end_when[0] if c.running else INF
        verdict = s.verdict_when[0] if c.verdicts else INF
        judged = verdict < event or (verdict == event and earlier(s))
        event = min(event, verdict)
        arrival = s.steps[c.arrived].commit + rules.sync if c.arrived < c.version else INF
        if c.commit == INF and arrival == INF and event == INF:
            return 3
        if c.commit <= event and c.commit <= arrival:
            commit(rules, draws, s)
        elif arrival <= event:
            c.now = arrival
            arrive(rules, draws, s)
        else:
            c.now = event
            if judged:
                i = s.verdict_what[0]
                pop(s.verdict_when, s.verdict_what, c.verdicts)
                c.verdicts -= 1
                judge(rules, draws, s, i)
            else:
                i = s.end_what[0]
                pop(s.end_when, s.end_what, c.running)
                c.running -= 1
                end(rules, draws, s, i)
    return 0


@compiled
def earlier(s: State) -> bool:
    """Whether the next verdict is of an earlier response than the next end."""
    c = s.tally[0]
    return c.verdicts > 0 and (c.running == 0 or s.verdict_what[0] < s.end_what[0])


@compiled
def room(rules: Rules, s: State) -> bool:
    """Whether another response may start."""
    c = s.tally[0]
    batch = rules.groups * rules.group_size
    if rules.barrier == SYNCHRONOUS:
        batches = float(c.arrived + 1)
    elif rules.barrier == OVERLAP:
        taken = c.version + (c.commit < INF)
        batches = float(min(taken, c.arrived + 1) + 1)
    else:
        published = c.version // rules.publish_every
        batches = (rules.capacity + published + 1) * rules.publish_every
    return c.started - c.dropped < batches * batch


@compiled
def start(rules: Rules, draws: Draws, s: State) -> None:
    """The next response takes a slot."""
    c = s.tally[0]
    now = c.now
    i = c.started
    group = i // rules.group_size
    r = s.responses[i]
    if i == group * rules.group_size:
        g = s.groups[group]
        g.pending = rules.group_size
        g.alive = g.total = 0
    r.born = now
    r.version = c.version
    r.weights = r.under = c.weights
    r.fate = INSIDE
    r.reward = 0
    r.ended = r.scored = INF
    r.tokens = 0.0
    r.since = now + rules.read * rules.prompt
    r.finish = r.since + draws.pace[i] * draws.tokens[i]
    push(s.end_when, s.end_what, c.running, min(r.finish, now + rules.limit), i)
    c.started += 1
    c.running += 1


@compiled
def end(rules: Rules, draws: Draws, s: State, i: int) -> None:
    """A response is complete, or its time is up; its slot is free."""
    c, r = s.tally[0], s.responses[i]
    now = c.now
    r.ended = now
    cut = r.finish > now
    if cut:
        r.tokens += max(0.0, now - r.since) / draws.pace[i] if draws.pace[i] else 0.0
    else:
        r.tokens = draws.tokens[i]
    if cut and not rules.cut_fails:
        leave(s, i, SLOW)
        close(rules, s, i // rules.group_size)
    elif draws.verifier[i] > 0:
        push(s.verdict_when, s.verdict_what, c.verdicts, now + draws.verifier[i], i)
        c.verdicts += 1
    else:
        judge(rules, draws, s, i)


@compiled
def judge(rules: Rules, draws: Draws, s: State, i: int) -> None:
    """A response has its reward."""
    group = i // rules.group_size
    r, g = s.responses[i], s.groups[group]
    r.scored = s.tally[0].now
    r.reward = draws.reward[i] if r.finish <= r.ended else 0
    if g.alive == 0 or r.weights < g.oldest:
        g.oldest = r.weights
    g.alive += 1
    g.total += r.reward
    close(rules, s, group)


@compiled
def close(rules: Rules, s: State, group: int) -> None:
    """One response of a group fewer is missing; a complete group joins the queue or is dropped."""
    c, g = s.tally[0], s.groups[group]
    g.pending -= 1
    if g.pending > 0:
        return
    alive, total = g.alive, g.total
    if alive < min(2, rules.group_size):
        drop(rules, s, group, INCOMPLETE)
    elif rules.refill and (total == 0 or total == alive):
        drop(rules, s, group, EVEN)
    elif c.version - g.oldest > rules.max_lag:
        drop(rules, s, group, STALE)
    else:
        s.queue[c.tail] = group
        c.tail += 1


@compiled
def leave(s: State, i: int, fate: int) -> None:
    """A response leaves the pipeline."""
    c, r = s.tally[0], s.responses[i]
    r.fate = fate
    r.left = c.version
    c.gone += 1


@compiled
def leave_all(rules: Rules, s: State, group: int, fate: int) -> None:
    """What is left of a group leaves the pipeline."""
    for i in range(group * rules.group_size, (group + 1) * rules.group_size):
        if s.responses[i].fate == INSIDE:
            leave(s, i, fate)


@compiled
def drop(rules: Rules, s: State, group: int, fate: int) -> None:
    """A group is dropped; another may start in its place."""
    leave_all(rules, s, group, fate)
    c = s.tally[0]
    c.dropped += rules.group_size


@compiled
def take(rules: Rules, draws: Draws, s: State) -> None:
    """An idle trainer takes a batch where there is one."""
    c = s.tally[0]
    if c.commit < INF or c.tail - c.head < rules.groups:
        return
    for place in range(c.head, c.head + rules.groups):
        leave_all(rules, s, s.queue[place], c.version)
    c.head += rules.groups
    s.steps[c.version].taken = c.now
    c.commit = c.now + (rules.scoring + draws.update[c.version])


@compiled
def commit(rules: Rules, draws: Draws, s: State) -> None:
    """A step ends; groups that are now too old leave the queue."""
    c = s.tally[0]
    step = s.steps[c.version]
    c.now = step.commit = c.commit
    c.commit = INF
    step.occupancy = c.started - c.gone
    step.queued = (c.tail - c.head) * rules.group_size
    c.version += 1
    if rules.max_lag < INF:
        keep = c.head
        for place in range(c.head, c.tail):
            group = s.queue[place]
            if c.version - s.groups[group].oldest > rules.max_lag:
                drop(rules, s, group, STALE)
            else:
                s.queue[keep] = group
                keep += 1
        c.tail = keep
    if rules.sync == 0:
        arrive(rules, draws, s)


@compiled
def arrive(rules: Rules, draws: Draws, s: State) -> None:
    """Weights reach the slots; in flight, running responses go on under them."""
    c = s.tally[0]
    c.arrived += 1
    before = c.weights
    c.weights = c.arrived - c.arrived % rules.publish_every
    if not rules.in_flight or c.weights == before:
        return
    for place in range(c.running):
        s.end_when[place] = switch(rules, draws, s, s.end_what[place], before)
    heapify(s.end_when, s.end_what, c.running)


@compiled
def switch(rules: Rules, draws: Draws, s: State, i: int, before: int) -> float:
    """A running response goes on under new weights; gives the time of its end."""
    c, r = s.tally[0], s.responses[i]
    now = c.now
    written = 0.0
    if draws.pace[i] > 0:
        written = max(0.0, now - r.since) / draws.pace[i]
    remaining = r.finish - max(now, r.since)
    if written > 0:
        piece = s.pieces[c.pieces]
        piece.response, piece.weights, piece.tokens = i, before, written
        c.pieces += 1
        r.tokens += written
    r.under = c.weights
    if rules.reread:
        r.since = now + rules.pause + rules.read * (rules.prompt + r.tokens)
    else:
        r.since = max(now, r.since) + rules.pause
    r.finish = r.since + remaining
    return min(r.finish, r.born + rules.limit)
