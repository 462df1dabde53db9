"""Claims about coefficients: weight, zero-gradient region, share, bound, siblings, penalties.

What is declared in words is computed here in plain Python, token by token, and compared with what
the stages give; a coefficient is A * weight * share.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, final

import torch
from torch import Tensor

from windage.analysis.audit import declared
from windage.analysis.audit.declared import GRID_LOGP, ZERO, Spot, edges
from windage.analysis.audit.logged import (
    LENGTH,
    Logged,
    Subject,
    at_shares,
    gap,
    random_rows,
    run,
    scored,
)
from windage.analysis.audit.moments import factor, sized
from windage.analysis.audit.rows import Finding, worst
from windage.estimators.batch import Batch
from windage.estimators.catalogue import get
from windage.estimators.claims import Claim
from windage.estimators.estimator import Coefficients

BESIDE = 1e-9
LARGE, LARGER = 30.0, 600.0
SPREADS = (1e-3, 0.02, 0.2, 1.0, 3.0)
REWARDS = torch.linspace(-1, 1, 5, dtype=torch.float64)


@final
@dataclass(frozen=True, kw_only=True)
class Counted:
    """What a share may look at: responses and prompts of the batch, tokens of each kind."""

    responses: int
    prompts: int
    own: int
    group: int
    batch: int
    length: float


SHARES: Mapping[str, Callable[[Counted], float]] = {
    "1 / N": lambda of: 1 / of.responses,
    "1 / (N T)": lambda of: 1 / (of.responses * of.own),
    "1 / (N L)": lambda of: 1 / (of.responses * of.length),
    "1 / tokens of the batch": lambda of: 1 / of.batch,
    "1 / (P tokens of the group)": lambda of: 1 / (of.prompts * of.group),
}


def _ragged(subject: Subject, rows: Logged) -> tuple[Coefficients, list[dict[str, Any]]]:
    """Each row's coefficients, log-ratios and advantages at its trainable tokens."""
    batch = rows.batch(subject)
    found = subject.whole(subject.ready, batch)
    fields = {
        "own": found.own,
        "advantage": found.terms.advantages.expand_as(found.own),
        **{name: batch.get(name) for name in ("logp", "behavior_logp", "proximal_logp")},
        "share": found.terms.scale.unsqueeze(-1).expand_as(found.own),
        "weight": found.weights,
    }
    mask = batch.to_rows(batch.mask)
    columns = {name: batch.to_rows(value) for name, value in fields.items()}
    return found, [
        {name: column[i][mask[i]].tolist() for name, column in columns.items()}
        for i in range(len(mask))
    ]


def weight(subject: Subject, claim: Claim, seed: int) -> Finding:
    """Coefficient over advantage and share against the declared rule of the declared ratio.

    Where tokens are picked by a share of the batch, several shares are tried.
    """
    assert claim.value is not None
    worst_gap, place = 0.0, ""
    for one in (subject, *at_shares(subject)[5::10]):
        for spread in SPREADS:
            logged = _spread(random_rows(seed), spread)
            _, rows = _ragged(one, logged)
            for i, row in enumerate(rows):
                for t, own in enumerate(row["own"]):
                    step = row["advantage"][t] * row["share"][t]
                    if step == 0 and own == 0:
                        continue
                    at = Spot(
                        rows=rows,
                        groups=logged.groups,
                        row=i,
                        token=t,
                        sign=step,
                        settings=one.estimator.settings,
                    )
                    want = declared.weight(claim.value, at)
                    got = own / step if step != 0 else math.inf
                    size = abs(got - want) / max(1.0, want)
                    if not size <= worst_gap:
                        worst_gap = size
                        place = f", row {i}, token {t}: {got:.6g} instead of {want:.6g}"
    return Finding(size=worst_gap, witness=f"random rows (seed {seed}){place}")


def _spread(rows: Logged, times: float) -> Logged:
    """The same rows with log-ratios made larger or smaller."""
    columns = dict(rows.columns)
    columns["behavior_logp"] = [
        [p - times * (p - q) for p, q in zip(a, b, strict=True)]
        for a, b in zip(columns["logp"], columns["behavior_logp"], strict=True)
    ]
    return replace(rows, columns=columns)


def share(subject: Subject, claim: Claim, seed: int) -> Finding:
    """Coefficient over advantage and weight against the declared share, with an empty row.

    Log-ratios are near 0, so that narrow bands keep what a share can be read from.
    """
    assert claim.value is not None
    rows = _spread(random_rows(seed), SPREADS[0])
    rows = replace(rows, mask=[[0] * len(m) if i == 1 else m for i, m in enumerate(rows.mask)])
    gone = next(i for i, g in enumerate(rows.groups) if g == 0 and i != 1)
    rows = replace(rows, rewards=[None if i == gone else r for i, r in enumerate(rows.rewards)])
    _, found = _ragged(subject, rows)
    present = [i for i, r in enumerate(rows.rewards) if r is not None]
    tokens = {i: sum(rows.mask[i]) for i in present}
    size, read = 0.0, 0
    for i in present:
        counted = Counted(
            responses=len(present),
            prompts=len({rows.groups[j] for j in present}),
            own=tokens[i],
            group=sum(tokens[j] for j in present if rows.groups[j] == rows.groups[i]),
            batch=sum(tokens.values()),
            length=float(subject.ready.settings.get("length") or LENGTH),
        )
        for t, own in enumerate(found[i]["own"]):
            step = found[i]["advantage"][t] * found[i]["weight"][t]
            if step == 0 and own == 0:
                continue
            read += 1
            want = SHARES[claim.value](counted)
            size = max(size, abs(own / step - want) / want if step != 0 else math.inf)
    witness = f"random rows (seed {seed}), one empty and one absent"
    return Finding(size=size if read else math.inf, witness=witness)


def _grid(subject: Subject, log_ratios: Tensor) -> list[tuple[float, Tensor]]:
    """Coefficients `[m T]` of m responses by the sign of the reward; advantages of 0 are left out.

    The proximal policy is the sampler: a pass over data that were fresh when it began.
    """
    m, t = log_ratios.shape
    shape = (m, 1, 2, t)
    logp = torch.full(shape, GRID_LOGP, dtype=torch.float64)
    sampler = logp - log_ratios.view(m, 1, 1, t)
    zeros = torch.zeros_like(logp)
    least = -1.0 if subject.estimator.advantage.traits.rewards == "any" else 0.0
    rewards = torch.tensor([[1.0, least]], dtype=torch.float64).expand(m, 1, 2)
    batch = Batch(
        rewards=rewards,
        mask=torch.ones(shape, dtype=torch.bool),
        logp=logp,
        behavior_logp=sampler,
        proximal_logp=sampler,
        values=zeros,
        probability_square=zeros + 1,
        versions=torch.zeros(shape, dtype=torch.long),
        current_version=0,
        head_logp=zeros.unsqueeze(-1),
        head_behavior_logp=zeros.unsqueeze(-1),
    )
    found = subject.whole(subject.ready, scored(batch, rewards))
    advantages = found.terms.advantages.expand_as(found.own)[0, 0, :, 0].tolist()
    rows = zip((1.0, -1.0), advantages, found.own[:, 0].unbind(1), strict=True)
    return [(sign, own) for sign, a, own in rows if a != 0]


def zero_region(subject: Subject, claim: Claim, seed: int) -> Finding:
    """Scan ratios of both signs, and both sides of every bound: zero exactly where declared."""
    assert claim.value is not None
    settings = subject.estimator.settings
    beside = [math.log(e) + d for e in edges(settings) for d in (-BESIDE, BESIDE)]
    grid = torch.cat([torch.linspace(-5, 5, 401), torch.tensor(beside)]).double().sort().values
    wrong, seen = [], []
    for sign, own in _grid(subject, grid.unsqueeze(1)):
        zero = (own[:, 0] == 0).tolist()
        ratios = grid.exp().tolist()
        want = [ZERO[claim.value](r, sign, settings) for r in ratios]
        wrong += [(sign, r) for r, a, b in zip(ratios, zero, want, strict=True) if a != b]
        seen.append(f"A {'>' if sign > 0 else '<'} 0: {_intervals(ratios, zero)}")
    witness = f"one token, {len(grid)} ratios of each sign"
    if wrong:
        sign, ratio = wrong[0]
        witness = f"one token, A {'>' if sign > 0 else '<'} 0, ratio {ratio:.9g}"
    return Finding(size=float(len(wrong)), witness=witness, found="zero where " + "; ".join(seen))


def _intervals(ratios: list[float], zero: list[bool]) -> str:
    """Runs of zeros, as intervals of the ratio."""
    runs: list[list[float]] = []
    for k, here in enumerate(zero):
        if here and k and zero[k - 1]:
            runs[-1][1] = ratios[k]
        elif here:
            runs.append([ratios[k], ratios[k]])
    if not runs:
        return "never"
    words = []
    for low, high in runs:
        left = "" if low == ratios[0] else f"from {low:.4g}"
        right = "" if high == ratios[-1] else f"to {high:.4g}"
        words.append(" ".join(w for w in (left, right) if w) or "always")
    return ", ".join(words)


def bounded(subject: Subject, claim: Claim, seed: int) -> Finding:
    """Growth of the largest coefficient from ratios of e^30 to e^600: one token, and two opposite.

    Two opposite ratios cancel in a mean over the response, but not for each token.
    """
    sides = torch.tensor([-LARGER, -LARGE, LARGE, LARGER], dtype=torch.float64).unsqueeze(1)
    found = _grid(subject, sides) + _grid(subject, torch.cat([sides, -sides], 1))
    sizes = [own.abs().amax(1) for _, own in found]
    growth = max(float(s.max() / s[1:3].max().clamp(min=1e-300)) for s in sizes)
    size = math.inf if math.isnan(growth) else max(0.0, growth - 1)
    return Finding(size=size, witness="ratios e^±30 and e^±600, in one token and opposite in two")


def zero_when_equal(subject: Subject, claim: Claim, seed: int) -> Finding:
    """Groups whose rewards are all 0.7, all 0.1, all 1/3: every coefficient exactly 0."""
    rows = random_rows(seed)
    rewards: list[float | None] = [(0.7, 0.1, 1 / 3)[g] for g in rows.groups]
    found = run(subject, replace(rows, rewards=rewards)).abs().max()
    size = float(found)
    if claim.holds and size > 0:
        size = math.inf  # a residue of any size is noise that a small eps makes large
    return Finding(size=size, witness="rewards all 0.7, all 0.1 and all 1/3 in groups of 4, 3, 4")


def unit_variance(subject: Subject, claim: Claim, seed: int) -> Finding:
    """Mean and standard deviation (ddof of the settings) of each group's advantages."""
    rows = random_rows(seed)
    batch = rows.batch(subject)
    found = subject.whole(subject.ready, batch).terms.advantages[..., 0]
    present = batch.get("present")
    count = present.sum(-1)
    ddof = int(subject.estimator.settings.get("ddof", 1))
    mean = torch.where(present, found, 0.0).sum(-1) / count
    square = torch.where(present, (found - mean.unsqueeze(-1)).square(), 0.0).sum(-1)
    std = (square / (count - ddof)).sqrt()
    eps = float(subject.estimator.settings.get("eps", 0.0))
    raw = batch.rewards
    center = torch.where(present, raw, 0.0).sum(-1, keepdim=True) / count.unsqueeze(-1)
    spread = (torch.where(present, raw - center, 0.0).square().sum(-1) / (count - ddof)).sqrt()
    size = max(float(mean.abs().max()), float((std * (1 + eps / spread) - 1).abs().max()))
    return Finding(size=size, witness=f"random rows (seed {seed}), corrected for eps")


def _sibling(subject: Subject, claim: Claim, rows: Logged, words: str) -> Finding:
    """Own coefficients of an estimator and of the declared multiple of a sibling."""
    assert claim.of is not None and claim.value is not None
    sibling = replace(subject, estimator=sized(get(claim.of), LENGTH))
    length = float(dict(subject.ready.aggregation.settings).get("length") or LENGTH)
    sizes = []
    for size in sorted(set(rows.groups)):
        group = rows.pick([i for i, g in enumerate(rows.groups) if g == size])
        times = factor(claim.value, len(group.groups), length)
        other = times * run(sibling, group)
        sizes.append(gap(run(subject, group), other))
    return Finding(size=max(sizes), witness=words)


def proportional_to(subject: Subject, claim: Claim, seed: int) -> Finding:
    """Sample by sample a multiple of a sibling, whatever the ratio."""
    rows = replace(random_rows(seed), group_size=None)
    return _sibling(subject, claim, rows, f"random rows (seed {seed}), group by group")


def on_policy_as(subject: Subject, claim: Claim, seed: int) -> Finding:
    """Sample by sample a multiple of a sibling where sampler and policy agree."""
    rows = replace(random_rows(seed), group_size=None)
    same = dict.fromkeys(("behavior_logp", "proximal_logp"), rows.columns["logp"])
    rows = replace(rows, columns={**rows.columns, **same})
    return _sibling(subject, claim, rows, f"random on-policy rows (seed {seed}), group by group")


DECIDED: Mapping[str, Callable[[Subject, Claim, int], Finding]] = {
    function.__name__: function
    for function in (
        weight,
        zero_region,
        share,
        bounded,
        zero_when_equal,
        unit_variance,
        proportional_to,
        on_policy_as,
    )
}


def _divergence(p: Tensor, q: Tensor) -> Tensor:
    """Gradient of KL(p, q) by the logits of p."""
    x = (p / q).log()
    return p * (x - (p * x).sum())


def _apart(p: Tensor, q: Tensor) -> Tensor:
    """Gradient of the sum of |p - q| by the logits of p."""
    side = (p - q).sign()
    return p * (side - (p * side).sum())


def _success(p: Tensor) -> Tensor:
    """Gradient of the probability of the arms that `_pull_gap` rewards, by the logits of p."""
    right = (REWARDS > 0).double()
    return p * (right - (p * right).sum())


PULLS: Mapping[str, tuple[str, Callable[[Tensor, Tensor], Tensor]]] = {
    "loss_k1": ("0", lambda pi, ref: torch.zeros_like(pi)),
    "loss_k2": ("-grad KL(pi, ref)", lambda pi, ref: -_divergence(pi, ref)),
    "loss_k3": ("-grad KL(ref, pi)", lambda pi, ref: ref - pi),
    "loss_k3_weighted": ("-grad KL(pi, ref)", lambda pi, ref: -_divergence(pi, ref)),
    "reward_k1": ("-grad KL(pi, ref)", lambda pi, ref: -_divergence(pi, ref)),
    "reward_k3": (
        "grad KL(ref, pi) - grad KL(pi, ref)",
        lambda pi, ref: (pi - ref) - _divergence(pi, ref),
    ),
    "loss_square": ("-grad KL(pi, mu)", lambda pi, mu: -_divergence(pi, mu)),
    "loss_square_response": ("-grad KL(pi, mu)", lambda pi, mu: -_divergence(pi, mu)),
    "loss_kl_cov": ("-grad sum |pi - mu|", lambda pi, mu: -_apart(pi, mu)),
    "positive_nll": ("grad P(R > 0)", lambda pi, ref: _success(pi)),
    "entropy": ("grad H(pi)", lambda pi, ref: -_divergence(pi, torch.ones_like(pi))),
}


def penalty(subject: Subject, seed: int) -> Finding | None:
    """Mean over one on-policy step of what each penalty adds, against the gradient of its name.

    One that looks back at the sampler finds there another policy than the one that weighs the step.
    What is normalized together with the rewards of the batch is not what was added: left out.
    """
    found = []
    mixed = "token_rewards" in subject.estimator.advantage.traits.needs
    mixed = mixed and subject.estimator.advantage.traits.scope == "batch"
    for member in subject.estimator.penalties:
        if member.name in PULLS and not (mixed and member.traits.place == "token_reward"):
            full = {k: 1.0 for k in ("coefficient", "share") if k in dict(member.settings)}
            alone = replace(subject.ready, penalties=(member.change(**full),), admission=())
            words, pull = PULLS[member.name]
            size = _pull_gap(replace(subject, estimator=alone), pull, seed)
            found.append(Finding(size=size, witness="one step, five arms", found=words))
    return worst(found) if found else None


def _pull_gap(subject: Subject, pull: Callable[[Tensor, Tensor], Tensor], seed: int) -> float:
    generator = torch.Generator().manual_seed(seed)
    table = torch.randn((2, 5), generator=generator, dtype=torch.float64).log_softmax(-1)
    logp, reference = table[0].view(1, 5, 1), table[1].view(1, 5, 1)
    (needs,) = (set(m.traits.needs) for m in subject.estimator.penalties)
    back = "log_ratio" in needs and "reference_ratio" not in needs
    batch = Batch(
        rewards=REWARDS.view(1, 5),
        mask=torch.ones(1, 5, 1, dtype=torch.bool),
        logp=logp,
        behavior_logp=reference if back else logp,
        reference_logp=reference,
        values=torch.zeros_like(logp),
    )
    bare = replace(subject.ready, penalties=())
    scale = subject.whole(bare, batch).terms.scale[0]
    both = subject.whole(subject.ready, batch).own - subject.whole(bare, batch).own
    added = both[0, :, 0] / scale
    pi, ref = table[0].exp(), table[1].exp()
    mean = pi * added - pi * (pi * added).sum()
    return float((mean - pull(pi, ref)).abs().max())
