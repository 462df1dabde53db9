"""Document 002, section on the whole recipe: the parts that need no queue."""

from __future__ import annotations

from windage.analysis.claims.claim import Outcome, band, claim, exact, series, zero
from windage.analysis.claims.measures import (
    alone,
    figures,
    largest_weight,
    mean_reward,
    merit,
    moments,
)
from windage.analysis.claims.problems import fresh_tree, octet, tree
from windage.estimators.catalogue import get

SECTION = "Choosing the whole recipe"


@claim(
    "B-47",
    section=SECTION,
    statement="Group mean, a constant length, a capped weight without gradient, score centering "
    "and a bounded lag make a sound start.",
    note="Sound in what it takes away; other choices have less bias here.",
    problem="TREE, stale, G = 4; starting_point with cap 2.",
    formula="drift, largest weight, bias after rescaling, variance/scale²; identity with dr_grpo "
    "at μ = π",
)
def b_47() -> Outcome:
    problem, fresh = tree(), fresh_tree()
    start = get("starting_point", cap=2.0, length=3.0)
    found = figures(start, problem, 4)
    weight = largest_weight(start, problem)
    others = [
        figures(entry, problem, 4)
        for entry in (get("group_mean"), get("sequence_tis", cap=2.0), get("trajectory_is"))
    ]
    ours = moments(start, fresh, 4).mean
    same = float((ours - moments(get("dr_grpo", length=3.0), fresh, 4).mean).norm() / ours.norm())
    biased = [f["relative_bias_rescaled"] for f in others]
    return Outcome(
        figures=[
            zero("drift", found["drift"]),
            band("largest weight", weight, None, 2.0, kind="exact"),
            exact("bias after rescaling", found["relative_bias_rescaled"], "0.3785"),
            exact("rescaled var", found["variance_rescaled"], "0.03386"),
            exact("bias after rescaling, none", biased[0], "0.3567"),
            exact("bias after rescaling, sequence cap 2", biased[1], "0.2167"),
            zero("bias after rescaling, trajectory", biased[2]),
            exact("rescaled var, trajectory", others[2]["variance_rescaled"], "0.07935"),
            zero("distance from dr_grpo when μ = π", same),
        ],
        stands=found["drift"] < 1e-12
        and weight <= 2
        and same < 1e-12
        and found["variance_rescaled"] < others[2]["variance_rescaled"],
    )


@claim(
    "B-48",
    section=SECTION,
    statement="The estimator with less bias is not always the one that learns most from given "
    "compute.",
    problem="OCTET(1), baseline E_μR, N responses.",
    formula="merit(N) = ⟨∇J, Eĝ⟩² / ((‖Eĝ‖² + var/N) ‖∇J‖²)",
)
def b_48() -> Outcome:
    problem = octet(1.0)
    b = mean_reward(problem)
    names = ("trajectory_is", "token_is", "sequence_tis")
    once = {name: moments(alone(name, b), problem) for name in names}
    few, more, many = (
        [merit(found, problem, n) for found in once.values()] for n in (64, 1024, 16_384)
    )
    return Outcome(
        figures=[
            *series("merit(64), {}", names, few, "0.0415, 0.0963, 0.2320"),
            *series("merit(1,024), {}", names, more, "0.4090, 0.1698, 0.6210"),
            exact("merit(16,384), trajectory_is", many[0], "0.9172"),
            exact("merit(16,384), sequence_tis", many[2], "0.6937"),
        ],
        stands=few[2] > few[0] and more[2] > more[0] and many[0] > many[2],
    )
