"""What the staleness study says, in sentences that its figures choose.

    progress = 1 / (1 + bias^2 + noise^2)
    bias = |E g / scale - grad J| / |grad J|,   noise^2 = variance / (scale |grad J|)^2

is what one update of the best size gains, as a share of what the exact gradient would gain, where
the objective curves alike in every direction; 0 where the estimate points the wrong way or nowhere.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from windage.analysis.tables import text
from windage.estimators.catalogue import get

Row = Mapping[str, Any]
UNCORRECTED, UNBIASED = "rloo", "trajectory_is"
POINT = 0.01


def progress(row: Row, batches: float) -> float | None:
    """Share of the exact gradient's gain that an update makes.

    Args:
        row: with `noise` of one batch.
        batches: independent batches that the update averages.

    Example:
        >>> fair = {"scale": 1.0, "relative_bias_rescaled": 0.0, "noise": 2.0}
        >>> progress(fair, 1), progress(fair, 4), progress({**fair, "scale": -1.0}, 4)
        (0.2, 0.5, 0.0)
    """
    if row["scale"] is None:
        return None
    if row["scale"] <= 0 or row["noise"] is None:
        return 0.0
    error: float = row["relative_bias_rescaled"] ** 2 + row["noise"] ** 2 / batches
    return 1 / (1 + error)


def crossing(fair: Row, other: Row) -> float | None:
    """Batches to average from which the first makes more progress; None: at no number, or at all.

    Solves bias^2 + noise^2 / n equal on both sides for n.

    Example:
        >>> fair = {"relative_bias_rescaled": 0.0, "noise": 3.0}
        >>> crossing(fair, {"relative_bias_rescaled": 0.5, "noise": 1.0})
        32.0
    """
    bias: float = other["relative_bias_rescaled"] ** 2 - fair["relative_bias_rescaled"] ** 2
    noise: float = fair["noise"] ** 2 - other["noise"] ** 2
    return noise / bias if bias > 0 and noise > 0 else None


class Study:
    """The rows of a staleness document by length and lag, and who makes most progress where."""

    def __init__(self, document: Mapping[str, Any]) -> None:
        self.lengths: list[int] = document["sweep"]["horizon"]
        self.lags: list[int] = document["sweep"]["steps"]
        self.shown: list[int] = document["responses"]["shown"]
        self.batch: int = document["responses"]["batch"]
        self._rows: dict[tuple[int, int], dict[str, Row]] = {}
        for row in document["rows"]:
            self._rows.setdefault((row["horizon"], row["steps"]), {})[row["estimator"]] = row

    def at(self, length: int, lag: int) -> dict[str, Row]:
        """The rows of one place that have figures, by estimator."""
        here = self._rows[length, lag]
        return {name: row for name, row in here.items() if row["noise"] is not None}

    def progress(self, name: str, length: int, lag: int, responses: float) -> float | None:
        """Progress of an estimator with so many responses an update."""
        return progress(self._rows[length, lag][name], responses / self.batch)

    def leader(self, length: int, lag: int, responses: int) -> str:
        """Who makes most progress; no correction where it comes within a point of that.

        Of entries within a tenth of a point the catalogue's first.  Entries that draw more
        responses than they use are not ranked: the size of an update does not count those.
        """
        made = {
            name: self.progress(name, length, lag, responses) or 0.0
            for name in self.at(length, lag)
            if not any(member.traits.refill for member in get(name).admission)
        }
        most = max(made.values())
        if made[UNCORRECTED] >= most - POINT:
            return UNCORRECTED
        return next(name for name, value in made.items() if value >= most - POINT / 10)


def reading(document: Mapping[str, Any]) -> list[str]:
    """Three sentences: what lag costs, what length changes, what no bias costs."""
    study = Study(document)
    return [price_of_lag(study), reversal(study), price_of_no_bias(study)]


def _share(value: float | None) -> str:
    return text(value, percent=True)


def price_of_lag(study: Study) -> str:
    """What no correction costs, and whether bias or noise is the larger part of it."""
    short, length, responses = study.lengths[0], study.lengths[-1], study.shown[0]

    def made(lag: int, of: int = length) -> float:
        return study.progress(UNCORRECTED, of, lag, responses) or 0.0

    start = (
        f"Without correction ({UNCORRECTED}) an update of {responses} responses of {length} tokens "
        f"makes {_share(made(study.lags[0]))} of the exact gradient's progress at lag "
        f"{study.lags[0]} and "
    )
    half = next((lag for lag in study.lags if made(lag) <= made(study.lags[0]) / 2), None)
    if half is None:
        last = study.lags[-1]
        return f"{start}{_share(made(last))} at lag {last}: lag costs less than half of it."
    row = study.at(length, half)[UNCORRECTED]
    bias, noise = row["relative_bias_rescaled"], row["noise"] * math.sqrt(study.batch / responses)
    larger = "bias" if bias > noise else "noise"
    brief = _share(made(half, short))
    contrast = (
        f"with {short} tokens it still makes {brief} there"
        if made(half, short) > made(half)
        else f"with {short} tokens it makes {brief}, no more, there"
    )
    return (
        f"{start}{_share(made(half))} at lag {half}, where {larger} is the larger part of the "
        f"error (bias {text(bias)}, noise {text(noise)} times the gradient); {contrast}."
    )


def reversal(study: Study) -> str:
    """Where the best choice for short responses loses most to another on long ones."""
    short, long = study.lengths[0], study.lengths[-1]
    found = []
    for responses in study.shown:
        for lag in study.lags:
            a, b = study.leader(short, lag, responses), study.leader(long, lag, responses)
            shares = [
                study.progress(name, length, lag, responses) or 0.0
                for length in (short, long)
                for name in (a, b)
            ]
            gain, loss = shares[0] - shares[1], shares[3] - shares[2]
            found.append((min(gain, loss), a, b, responses, lag, shares))
    least, a, b, responses, lag, shares = max(found, key=lambda one: one[0])
    if least <= POINT:
        return (
            f"Length does not change the choice: at every lag one estimator is within a point of "
            f"the best both with {short} and with {long} tokens."
        )
    return (
        f"Length reverses the choice: at lag {lag} with {responses} responses an update {a} beats "
        f"{b} with {short} tokens ({_share(shares[0])} against {_share(shares[1])}) and loses to "
        f"it with {long} ({_share(shares[2])} against {_share(shares[3])})."
    )


def price_of_no_bias(study: Study) -> str:
    """How many responses it takes until no bias is worth its noise."""
    length, lag = study.lengths[-1], study.lags[min(len(study.lags) // 2 + 1, len(study.lags) - 1)]
    here = study.at(length, lag)
    rival = study.leader(length, lag, study.shown[0])
    where = f"at lag {lag} with {length} tokens"
    if rival == UNBIASED:
        return (
            f"{UNBIASED}, which has no bias, is the best {where} even with {study.shown[0]} "
            "responses an update."
        )
    fair, other = here[UNBIASED], here[rival]
    batches = crossing(fair, other)
    if batches is None:
        return f"{UNBIASED} has no advantage over {rival} {where}, however large the update."
    need = batches * study.batch
    rounded = round(need, 1 - math.floor(math.log10(need)))
    return (
        f"No bias has its price: {where} {UNBIASED} overtakes {rival} from about {rounded:.0f} "
        f"responses an update on; below that its noise ({text(fair['noise'] / other['noise'])} "
        f"times as large) costs more than {rival}'s bias "
        f"({text(other['relative_bias_rescaled'])} times the gradient)."
    )
