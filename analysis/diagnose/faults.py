"""Signs of the usual faults, each with the numbers it rests on.

Whatever drew the tokens, with rho = pi / mu at every token and mu what is recorded:

    E[rho] = 1        where mu is what drew, and draws all that pi can
    E[rho] < 1        where mu is what drew, and never draws some of it: the mean is the kept mass
    E[rho] > 1        where mu is not what drew; E[1 / rho] = 1 says that pi did
    E[rho (pi(y) - sum pi^2)] = 0     where mu is what drew, even if pi and mu agree

So raw log-probabilities are told from processed ones, and a cut from a lag.  A sign is raised only
where it is both large and many standard errors away from what an honest run shows; a difference
that is merely honest (lag, low precision) raises none.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, final

import numpy as np

from windage.analysis.diagnose.evidence import LAGS, PLACES, Evidence
from windage.analysis.diagnose.sums import BUCKETS, Figure, Named, figure, figures

State = Literal["raised", "clear", "cannot tell"]
CLEAR = 4.5
TOKENS = 500
SLOPE, EXPLAINED = 0.03, 0.4
CUT, UNDRAWN, UNCALIBRATED = 0.005, 0.01, 0.005
CLOSER = 0.1
FEW, MOST_SPREAD, HALF = 1e-4, 0.7, 0.5
OUTLIERS = 8
AFTER, GROWTH, JUMP, LATER = 2.0, 3.0, 4.0, 2.0
CELL = 200
EQUAL = 0.999


@final
@dataclass(frozen=True, kw_only=True)
class Sign:
    """A sign of a fault.

    Args:
        name: of the fault.
        state: raised, clear, or why it could not be judged.
        says: a sentence for who ran it.
        evidence: the numbers, by name.
    """

    name: str
    state: State
    says: str
    evidence: Mapping[str, float | None] = field(default_factory=dict)

    @property
    def raised(self) -> bool:
        return self.state == "raised"


def _sign(name: str, raised: bool, yes: str, no: str, **evidence: float | None) -> Sign:
    return Sign(
        name=name,
        state="raised" if raised else "clear",
        says=yes if raised else no,
        evidence=evidence,
    )


def _unknown(name: str, why: str, **evidence: float | None) -> Sign:
    return Sign(name=name, state="cannot tell", says=why, evidence=evidence)


def shift(evidence: Evidence) -> Sign:
    """The sampler's numbers stand a place too early or too late."""

    def correlation(s: Named) -> np.ndarray:
        a, b = s["a"] / s["n"], s["b"] / s["n"]
        own, theirs = s["aa"] / s["n"] - a * a, s["bb"] / s["n"] - b * b
        return (s["ab"] / s["n"] - a * b) / np.sqrt(own * theirs)

    tables = {d: sums.over() for d, sums in evidence.pairs.items()}
    if tables[0]["n"].sum() < TOKENS:
        return _unknown("shift", f"fewer than {TOKENS} tokens with neighbors")
    at = {d: figure(table, correlation) for d, table in tables.items()}
    if any(each.value is None for each in at.values()):
        return _unknown("shift", "log-probabilities that do not vary")
    both = {f"{d}/{k}": v for d, table in tables.items() for k, v in table.items()}
    best = max((-1, 1), key=lambda d: at[d].value or 0.0)
    more = figure(
        both,
        lambda s: (
            correlation({k: s[f"{best}/{k}"] for k in tables[0]})
            - correlation({k: s[f"0/{k}"] for k in tables[0]})
        ),
    )
    raised = (more.value or 0.0) > CLOSER and more.beyond(0) > CLEAR
    way = "late" if best == 1 else "early"
    return _sign(
        "shift",
        raised,
        f"The sampler's log-probabilities come one token too {way}: they agree with the trainer's "
        f"of the neighbor (correlation {at[best].value:.2f}), not with the token's own "
        f"({at[0].value:.2f}).",
        f"Log-probabilities of both sides belong to the same token (correlation "
        f"{at[0].value:.2f}, with a neighbor {at[best].value:.2f}).",
        correlation=at[0].value,
        before=at[-1].value,
        after=at[1].value,
        standard_errors=more.beyond(0),
    )


def copied(evidence: Evidence) -> Sign:
    """Trainer and sampler say the same to the last digit, of tokens that are not certain.

    At lag 0 one program may have computed both; after an update it cannot.
    """
    same = figure(evidence.same.over(), lambda s: s["same"] / s["n"])
    if same.value is None or evidence.same.over()["n"].sum() < CELL:
        return _unknown("copied", f"fewer than {CELL} tokens whose probability is below 1")
    equal = same.value > EQUAL
    if equal and not evidence.same.over(0)["n"].any():
        return _unknown(
            "copied",
            "Trainer and sampler agree to the last digit, and every token is of lag 0: either one "
            "program computed both with the same weights, or one was copied from the other.",
            share=same.value,
        )
    return _sign(
        "copied",
        equal,
        "Trainer and sampler agree to the last digit, also at tokens that are not known to come "
        "from the weights that were trained: one was copied from the other, and the mismatch was "
        "not measured.",
        f"Trainer and sampler computed their numbers apart (equal at {same.value:.2%} of tokens).",
        share=same.value,
    )


def retokenized(evidence: Evidence) -> Sign:
    """A few tokens that the trainer finds impossible."""
    far, near = evidence.far.over(), evidence.near.over()
    share = figure(far, lambda s: s["below"] / s["n"])
    mass = figure(far, lambda s: s["far"] / s["all"])
    spread = figure(near, lambda s: np.sqrt(s["xx"] / s["n"]))
    count = float(far["below"].sum())
    above = float(far["above"].sum())
    raised = (
        count >= OUTLIERS
        and (share.value or 0.0) > FEW
        and count > 4 * above
        and (mass.value or 0.0) > HALF
        and (spread.value if spread.value is not None else math.inf) < MOST_SPREAD
    )
    return _sign(
        "retokenized",
        raised,
        f"{share.value or 0:.2%} of the tokens are all but impossible to the trainer (log-ratio "
        f"below -5) and make {mass.value or 0:.0%} of the mismatch, while the rest agree within "
        f"{spread.value or 0:.2g} nats: the trainer reads another text, as after decoding and "
        "tokenizing anew.",
        "No few tokens that the trainer finds impossible while it agrees on the rest.",
        share=share.value,
        mismatch_share=mass.value,
        spread_of_the_rest=spread.value,
    )


def _closest(evidence: Evidence) -> dict[str, np.ndarray]:
    """Sums of the smallest lag that has enough tokens; of all where lags are unknown."""
    for lag in range(LAGS - 1):
        found = evidence.near.over(slice(lag, lag + 1))
        if found["n"].sum() >= TOKENS:
            return found
    return evidence.near.over()


def _fit(s: Named) -> tuple[np.ndarray, np.ndarray]:
    """Slope of log mu on log pi, and the share of the log-ratio's variance that it explains."""
    n = s["n"]
    own = s["ll"] / n - (s["l"] / n) ** 2
    with_x = s["xl"] / n - s["x"] * s["l"] / n**2
    spread = s["xx"] / n - (s["x"] / n) ** 2
    return 1 - with_x / own, with_x**2 / (own * spread)


@final
@dataclass(frozen=True, kw_only=True)
class Ratios:
    """What the three identities and the straight line say.

    Args:
        mean: of rho, less 1.
        inverse: of 1 / rho, less 1.
        calibration: of rho (pi(y) - sum pi^2).
        slope: of log mu on log pi at the least lag.
        explained: share of the variance of the log-ratio that it explains.
    """

    mean: Figure
    inverse: Figure
    calibration: Figure
    slope: Figure
    explained: Figure

    @property
    def sloped(self) -> bool:
        """The log-ratio is a multiple of the log-probability."""
        return (
            abs((self.slope.value or 1.0) - 1) > SLOPE
            and abs(self.slope.beyond(1)) > CLEAR
            and (self.explained.value or 0.0) > EXPLAINED
        )

    @property
    def undrawn(self) -> bool:
        """What is recorded is not what drew, since the mean ratio exceeds 1."""
        return (self.mean.value or 0.0) > UNDRAWN and self.mean.beyond(0) > CLEAR

    @property
    def cut(self) -> bool:
        """The sampler never draws some of what the policy can."""
        return (self.mean.value or 0.0) < -CUT and self.mean.beyond(0) < -CLEAR

    @property
    def uncalibrated(self) -> bool:
        """What was drawn is likelier, or less likely, than what is recorded would make it."""
        size = abs(self.calibration.value or 0.0)
        return size > UNCALIBRATED and abs(self.calibration.beyond(0)) > CLEAR


def ratios(evidence: Evidence) -> Ratios:
    """The identities, measured."""
    near, least = evidence.near.over(), _closest(evidence)
    return Ratios(
        mean=figure(near, lambda s: s["ratio"] / s["n"]),
        inverse=figure(near, lambda s: s["inverse"] / s["n"]),
        calibration=figure(near, lambda s: s["calibration"] / s["known"]),
        slope=figure(least, lambda s: _fit(s)[0]),
        explained=figure(least, lambda s: _fit(s)[1]),
    )


def temperature(found: Ratios) -> Sign:
    """The sampler's temperature is not the trainer's."""
    slope = found.slope.value
    if slope is None:
        return _unknown("temperature", "log-probabilities that do not vary")
    raised = found.sloped and not found.undrawn
    return _sign(
        "temperature",
        raised,
        f"The sampler's log-probabilities are {slope:.2f} times the trainer's, which explains "
        f"{found.explained.value or 0:.0%} of the log-ratio's variance: the sampler drew at about "
        f"temperature {1 / slope if slope else math.inf:.2f} of the trainer's.",
        f"The sampler's log-probabilities rise with the trainer's one for one (slope {slope:.3f}).",
        slope=slope,
        slope_error=found.slope.error,
        explained=found.explained.value,
        implied_temperature=1 / slope if slope else None,
    )


def support(found: Ratios) -> Sign:
    """Top-k or top-p drew, and the trainer does not know."""
    if found.sloped:
        return _unknown("support", "a temperature that differs hides what top-p or top-k would do")
    mean = found.mean.value or 0.0
    return _sign(
        "support",
        found.cut,
        f"Ratios average {1 + mean:.3f}, not 1: the sampler never draws about {-mean:.1%} of what "
        "the policy can, as with top-p, top-k or min-p that the trainer does not apply.",
        f"Ratios average {1 + mean:.4f}: the sampler draws all that the policy can.",
        mean_ratio=1 + mean,
        mean_ratio_error=found.mean.error,
        kept_mass=1 + mean if found.cut else None,
    )


def raw(found: Ratios, settings: Mapping[str, bool]) -> Sign:
    """The recorded log-probabilities are not of the distribution that drew.

    Args:
        found: the identities.
        settings: `processed`: some response was drawn with a temperature, top-p or top-k.
    """
    mean, gap = found.mean.value or 0.0, found.calibration.value
    numbers = {
        "mean_ratio": 1 + mean,
        "mean_inverse_ratio": 1 + (found.inverse.value or 0.0),
        "calibration": gap,
        "calibration_error": found.calibration.error,
    }
    if found.undrawn:
        yes = (
            f"Ratios average {1 + mean:.3f}, more than 1, and their inverses "
            f"{numbers['mean_inverse_ratio']:.3f}: the tokens were not drawn from what the sampler "
            "recorded. It recorded log-probabilities before temperature, top-k or top-p."
        )
        return Sign(name="raw", state="raised", says=yes, evidence=numbers)
    if gap is None:
        if settings.get("processed") and not (found.sloped or found.cut):
            return _unknown(
                "raw",
                "Sampler and trainer agree although a temperature, top-p or top-k is set: either "
                "both apply it or neither records it; sum pi^2 in the dump would tell.",
                **numbers,
            )
        return _unknown(
            "raw", "without sum pi^2 raw and processed look alike where they agree", **numbers
        )
    likelier = "likelier" if gap > 0 else "less likely"
    return _sign(
        "raw",
        found.uncalibrated and not found.cut,
        f"The drawn tokens are {likelier} than the recorded log-probabilities would make them "
        f"(by {abs(gap):.3f} in probability, {abs(found.calibration.beyond(0)):.0f} standard "
        "errors): recorded were the model's log-probabilities before temperature, top-k or top-p.",
        "The drawn tokens are as likely as the recorded log-probabilities would make them.",
        **numbers,
    )


def _moved(evidence: Evidence) -> tuple[Figure, dict[str, np.ndarray]]:
    """Mismatch after new weights arrived over that before, at the same lag and position."""
    shape = (BUCKETS, 2, LAGS, PLACES)
    sums = {k: v.reshape(shape) for k, v in evidence.moved.table.items()}

    def over(s: Named) -> np.ndarray:
        n = s["n"][..., :-1, :]
        shared = n.min(-3)
        level = s["k3"][..., :-1, :] / np.maximum(s["weight"][..., :-1, :], 1e-300)
        use = (shared > 0) & (s["weight"][..., :-1, :].min(-3) > 0)
        late, early = (np.where(use, shared * level[..., i, :, :], 0).sum((-1, -2)) for i in (1, 0))
        return np.log(late / early)

    return figure(sums, over), sums


def _growth(sums: Mapping[str, np.ndarray]) -> tuple[Figure, float]:
    """Log of the mismatch at late positions over that at early ones, and whether it climbs."""
    flat = {k: v.sum((1, 2)) for k, v in sums.items()}
    count = flat["n"].sum(0)
    bins = np.flatnonzero(count >= max(CELL, 0.01 * count.sum()))
    if len(bins) < 3:
        return Figure(value=None), 0.0
    level, _ = figures({k: v[:, bins] for k, v in flat.items()}, lambda s: s["k3"] / s["weight"])
    climbs = float(np.mean(np.diff(level) > 0))
    ends = {f"{k}/{i}": v[:, b] for k, v in flat.items() for i, b in ((0, bins[0]), (1, bins[-1]))}
    rise = figure(ends, lambda s: np.log(s["k3/1"] / s["weight/1"] / (s["k3/0"] / s["weight/0"])))
    return rise, climbs


def stale_cache(evidence: Evidence) -> Sign:
    """What the engine computed with old weights acts on after new ones arrived."""
    after, sums = _moved(evidence)
    changed = float(sums["n"][:, 1].sum())
    if changed >= CELL:
        if after.value is None:
            return _unknown("stale_cache", "no tokens at the same lag and place to compare with")
        times = math.exp(min(after.value, 50.0))
        return _sign(
            "stale_cache",
            after.value > math.log(AFTER) and after.beyond(0) > CLEAR,
            f"Once new weights arrive in a response, the mismatch is {times:.1f} times that of "
            "responses drawn by the same weights from their start, at the same lag and position: "
            "keys and values of the old weights are kept.",
            f"The mismatch after new weights arrive is {times:.2f} times that of the same lag "
            "without.",
            times=times,
            standard_errors=after.beyond(0),
        )
    rise, climbs = _growth(sums)
    if rise.value is None:
        return _unknown("stale_cache", "too few tokens by position")
    times = math.exp(min(rise.value, 50.0))
    return _sign(
        "stale_cache",
        rise.value > math.log(GROWTH) and rise.beyond(0) > CLEAR and climbs >= 0.6,
        f"The mismatch grows with the position in the response, to {times:.1f} times what it is at "
        "the start: errors of a cache add up.",
        f"The mismatch late in responses is {times:.2f} times that at their start.",
        times=times,
        standard_errors=rise.beyond(0),
    )


def _levels(evidence: Evidence) -> dict[int, dict[int, np.ndarray]]:
    """Sums (count, k3, weight by bucket) of versions by lag, where there are enough tokens."""
    found: dict[int, dict[int, np.ndarray]] = {}
    for (version, lag), part in evidence.by_version.items():
        if part[0].sum() >= CELL and part[2].sum() > 0:
            found.setdefault(lag, {})[version] = part
    return found


def _over(top: np.ndarray, bottom: np.ndarray) -> Figure:
    """Log of the mismatch of one set of tokens over that of another."""
    sums = {"k": top[1], "w": top[2], "l": bottom[1], "v": bottom[2]}
    return figure(sums, lambda s: np.log(s["k"] / s["w"] / (s["l"] / s["v"])))


def wrong_version(evidence: Evidence) -> Sign:
    """Weights that drew are not those that are named."""
    count = sum(part[0].sum() for part in evidence.by_version.values())
    ahead = sum(p[0].sum() for (_, lag), p in evidence.by_version.items() if lag < 0)
    if count and ahead / count > FEW:
        return Sign(
            name="wrong_version",
            state="raised",
            says=f"{ahead / count:.1%} of the tokens are said to come from weights newer than "
            "those that were trained: the numbers of versions do not fit together.",
            evidence={"share_ahead": float(ahead / count)},
        )
    levels = _levels(evidence)
    jumps = []
    for lag, versions in levels.items():
        order = sorted(versions, key=lambda v: versions[v][1].sum() / versions[v][2].sum())
        if len(order) >= 3:
            few = max(1, len(order) // 4)
            low = np.sum([versions[v] for v in order[:few]], axis=0)
            jumps += [(_over(versions[v], low), v, lag) for v in order[few:]]
    if not jumps:
        return _unknown("wrong_version", "fewer than three versions at the same lag")
    sure = [each for each in jumps if each[0].beyond(0) > CLEAR]
    jump, version, lag = max(sure or jumps, key=lambda j: j[0].value or 0.0)
    times = math.exp(min(jump.value or 0.0, 50.0))
    whole = {lag: np.sum(list(parts.values()), axis=0) for lag, parts in levels.items()}
    best = min(whole, key=lambda at: whole[at][1].sum() / whole[at][2].sum())
    least = min(whole)
    back = _over(whole[least], whole[best]) if best != least else Figure(value=0.0, error=0.0)
    jumped = (jump.value or 0.0) > math.log(JUMP) and jump.beyond(0) > CLEAR
    late = (back.value or 0.0) > math.log(LATER) and back.beyond(0) > CLEAR
    jumping = (
        f"At lag {lag} version {version} has {times:.0f} times the mismatch of others: its tokens "
        "were drawn by other weights than named."
    )
    turned = (
        f"The mismatch is least at lag {best}, not at lag {least}: versions are numbered "
        f"{best - least} off."
    )
    return _sign(
        "wrong_version",
        jumped or late,
        jumping if jumped else turned,
        f"At equal lag no version has more than {times:.1f} times the mismatch of others.",
        times=times,
        version=float(version),
        lag=float(lag),
        standard_errors=jump.beyond(0),
        best_lag=float(best),
    )


def judge(evidence: Evidence, settings: Mapping[str, bool]) -> list[Sign]:
    """Every sign; what another fault hides is said to be so.

    Args:
        evidence: of the whole dump.
        settings: `processed`: some response was drawn with a temperature, top-p or top-k.
    """
    names = ("temperature", "support", "raw", "stale_cache", "wrong_version", "retokenized")
    if evidence.far.over()["n"].sum() < TOKENS:
        why = f"fewer than {TOKENS} tokens with log-probabilities of both trainer and sampler"
        return [_unknown(name, why) for name in ("copied", "shift", *names)]
    same = copied(evidence)
    moved = shift(evidence)
    if same.raised or moved.raised:
        first = same if same.raised else moved
        return [same, moved, *(_unknown(name, f"hidden by: {first.name}") for name in names)]
    found = ratios(evidence)
    signs = [same, moved, temperature(found), support(found), raw(found, settings)]
    loud = [sign.name for sign in signs if sign.raised and sign.name in ("temperature", "raw")]
    if loud:
        why = f"hidden by: {', '.join(loud)}"
        rest = [_unknown("stale_cache", why), _unknown("wrong_version", why)]
    else:
        rest = [stale_cache(evidence), wrong_version(evidence)]
    return [*signs, *rest, retokenized(evidence)]
