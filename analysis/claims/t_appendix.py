"""Document 000, section 5 and appendices."""

from __future__ import annotations

import math

import numpy as np
import torch
from scipy.stats import norm, spearmanr
from torch import Tensor

from windage.analysis.claims.claim import Outcome, band, claim, equal, exact, series, zero
from windage.analysis.claims.learned import (
    PASSES,
    SHARES,
    averaged,
    baseline_for,
    composed,
    numbers,
    study,
)
from windage.analysis.claims.measures import alone
from windage.analysis.claims.one_step import (
    FLOOR,
    GOOD,
    IS,
    NAIVE,
    POSITIVES,
    SIX,
    TIS,
    TOPR,
    UNBOUNDED,
    Z6,
    Arms,
    entropy,
    kl,
    sampled_update,
)
from windage.analysis.claims.problems import deck
from windage.analysis.claims.t_naive import START
from windage.estimators.batch import Batch
from windage.estimators.estimator import Estimator, coefficients
from windage.toy.exact.walk import pull_back
from windage.toy.learning import flow, marks, path

FIVE = "Section 5"
A, B, C, D = (f"Appendix {letter}" for letter in "ABCD")


@claim(
    "T-23",
    section=FIVE,
    statement="Data from a policy other than the start of training bring numerical trouble.",
    note="Beyond about a thousand tokens nearly every negative has weight zero, and the update is "
    "that of positives only.  Rounding lets float32 hold its least positive number down to half "
    "of it, so that exp itself gives 0 some 0.7 nats later.",
    problem="a log-ratio that grows by a number of nats a token.",
    formula="ln(least positive float32) / nats; P(Σ < ln 1e-3), Σ normal, variance twice the mean",
)
def t_23() -> Outcome:
    nats = (0.01, 0.05, 0.2)
    least = math.log(2.0**-149)
    tokens = [-least / n for n in nats]
    length = torch.arange(1, 12_000, dtype=torch.float64)
    gone = [int(length[(-n * length).float().exp() == 0][0]) for n in nats]
    late = [g / t for g, t in zip(gone, tokens, strict=True)]
    lengths = (100, 1_000)
    small = [norm.cdf((math.log(1e-3) + 0.05 * t) / math.sqrt(2 * 0.05 * t)) for t in lengths]
    return Outcome(
        figures=[
            *series("tokens to the least float32 at {} nats", nats, tokens, "10,328, 2,066, 516"),
            *(
                band(f"exp gives 0 at {n} nats, over the same", x, 1.0, 1.01, kind="exact")
                for n, x in zip(nats, late, strict=True)
            ),
            *series("P(r < 1e-3) at 0.05 nats, T = {}", lengths, small, "0.2732, 0.99999"),
        ],
        stands=small[1] > 0.99 and max(gone) < 12_000,
    )


def _policies(count: int, seed: int, spread: float = 1.5) -> Tensor:
    """Random policies on SIX: logits ln mu + spread N(0, 1)."""
    rng = np.random.default_rng(seed)
    return START + spread * torch.from_numpy(rng.standard_normal((count, 6)))


@claim(
    "T-24",
    section=A,
    statement="The naive objective, taken apart by the sign of the reward, is a constant plus "
    "divergences from the data.",
    note="Our form of the proposition.",
    problem="SIX, 100 random policies, c = 0, −.5, .4.",
    formula="E_μ[(R − c) log π] = −Z₊KL(μ₊‖π) + Z₋KL(μ₋‖π) + c KL(μ‖π) + C, "
    "C = −Z₊H(μ₊) + Z₋H(μ₋) + cH(μ)",
)
def t_24() -> Outcome:
    places = _policies(100, 0)
    logp = places.log_softmax(-1)
    halves = [
        (sign, (SIX.mass * who).sum(), SIX.among(who)) for sign, who in ((1, GOOD), (-1, ~GOOD))
    ]
    worst = []
    for c in (0.0, -0.5, 0.4):
        left = (SIX.mass * (SIX.rewards - c) * logp).sum(-1)
        right = c * (kl(SIX.mass, logp.exp()) + entropy(SIX.mass))
        for sign, z, part in halves:
            right = right - sign * z * (kl(part, logp.exp()) + entropy(part))
        worst.append(float((left - right).abs().max()))
    return Outcome(
        figures=[
            zero(f"largest difference, c = {c:g}", w)
            for c, w in zip((0.0, -0.5, 0.4), worst, strict=True)
        ],
        stands=max(worst) < 1e-12,
        seeds=(0,),
    )


def _gap(arms: Arms, estimator: Estimator, logits: Tensor) -> Tensor:
    """Gradient on the logits of positives minus that on negatives, in class totals."""
    gradient = arms.gradient(estimator, logits)
    good = arms.rewards > 0
    return (gradient * good).sum(-1) - (gradient * ~good).sum(-1)


def _formula(arms: Arms, estimator: Estimator, logits: Tensor) -> Tensor:
    """The same from the class totals of probability and of coefficients."""
    good = arms.rewards > 0
    p = logits.softmax(-1)
    logp = logits.log_softmax(-1)
    ratio = (logp - arms.sampler).unsqueeze(-2)
    (correction,) = estimator.corrections
    weight = correction.map(ratio, arms.rewards.unsqueeze(-2)).squeeze(-2)
    g = arms.mass * weight * arms.rewards
    up, down = (g * good).sum(-1), (g * ~good).sum(-1)
    right, wrong = (p * good).sum(-1), (p * ~good).sum(-1)
    return up * (1 - right + wrong) - down * (1 + right - wrong)


THREE = (("positives only", POSITIVES), ("topr", TOPR), ("naive", NAIVE))


@claim(
    "T-25",
    section=B,
    statement="The gradients on the two logits are known exactly; since a common shift changes "
    "nothing, their difference decides.",
    problem="two trajectories, μ = (.4 .6), R = ±1, z = (.3 −.2); SIX at z₆ in class totals.",
    formula="∂z₊ − ∂z₋ = g₊(1 − π₊ + π₋) − g₋(1 + π₊ − π₋)",
)
def t_25() -> Outcome:
    two = Arms(
        sampler=torch.tensor([0.4, 0.6], dtype=torch.float64).log(),
        rewards=torch.tensor([1.0, -1.0], dtype=torch.float64),
    )
    z = torch.tensor([0.3, -0.2], dtype=torch.float64)
    found = [float(_gap(two, e, z)) for _, e in THREE]
    errors = [
        float(_gap(a, e, at) - _formula(a, e, at))
        for _, e in THREE
        for a, at in ((two, z), (SIX, Z6))
    ]
    shifted = max(
        float((two.gradient(e, z + 3) - two.gradient(e, z)).abs().max()) for _, e in THREE
    )
    worst = max(abs(e) for e in errors)
    return Outcome(
        figures=[
            *series("difference, {}", [n for n, _ in THREE], found, "0.3020, 0.7720, 1.0490"),
            zero("largest error of the formula", worst),
            zero("change under a common shift", shifted),
        ],
        stands=worst < 1e-12 and shifted < 1e-12,
    )


@claim(
    "T-26",
    section=B,
    statement="Fine-tuning on positives, both limits of negatives zero, makes the difference of "
    "the logits' gradients larger; the product of a⁻ and a negative's reward is positive.",
    verdict="does not hold as stated",
    condition="fine-tuning's difference is the smaller one, so it learns less (a conclusion the "
    "document draws elsewhere), and the product is negative; one pair among many may be reversed",
    problem="SIX at z₆; 5,000 policies ln μ + 1.5 N(0, 1); a⁻ = .1.",
    formula="Σ₊ ∂z − Σ₋ ∂z; ∂z_i − ∂z_j over pairs",
)
def t_26() -> Outcome:
    here = {n: float(_gap(SIX, e, Z6)) for n, e in THREE[:2]}
    places = _policies(5_000, 0)
    tuned, topr = (SIX.gradient(e, places) for _, e in THREE[:2])
    change = tuned - topr
    classes = int(((change * GOOD - change * ~GOOD).sum(-1) > 1e-15).sum())
    pairs = change[:, GOOD].unsqueeze(2) > change[:, ~GOOD].unsqueeze(1)
    some = int(pairs.flatten(1).any(1).sum())
    limits = dict(FLOOR.corrections[0].map.settings)
    product = float(limits["a_neg"] * SIX.rewards.min())
    return Outcome(
        figures=[
            exact("class totals, positives only", here["positives only"], "0.4283"),
            exact("class totals, topr", here["topr"], "0.8566"),
            equal("policies in 5,000 with a larger class total", classes, 0),
            band(
                "policies in 5,000 with a larger pair", some, 700, 1_200, expected=949, kind="exact"
            ),
            exact("a⁻ R⁻", product, "-0.10"),
        ],
        stands=here["positives only"] > here["topr"] and product > 0,
        seeds=(0,),
    )


@claim(
    "T-27",
    section=B,
    statement="In a batch the terms of unsampled trajectories oppose each other, so negatives "
    "keep the update on what was sampled.",
    verdict="holds only if",
    condition="|h₋| < 2h₊ for the norm; the unsampled share lies below that of positives only in "
    "all four cases",
    problem="SIX at z₆; one batch with trajectories 1 and 2, coefficients h₊ = 1 and h₋.",
    formula="h₊ ∇log π(1) + h₋ ∇log π(2)",
)
def t_27() -> Outcome:
    sizes = (0.0, -0.5, -1.0, -2.0, -2.5)
    found = [
        2 * sampled_update(NAIVE, Z6, START, torch.tensor([0, 1]), torch.tensor([1.0, h]).double())
        for h in sizes
    ]
    rest = [float(g[2:].norm()) for g in found]
    share = [float(g[2:].abs().sum() / g.abs().sum()) for g in found]
    return Outcome(
        figures=[
            *series(
                "sampled positive, h₋ = {}",
                sizes,
                [g[0] for g in found],
                "0.6424, 0.8212, 1.0000, 1.3576, 1.5364",
            ),
            *series(
                "sampled negative, h₋ = {}",
                sizes,
                [g[1] for g in found],
                "-0.1293, -0.5646, -1.0000, -1.8707, -2.3061",
            ),
            *series(
                "norm of the unsampled, h₋ = {}",
                sizes,
                rest,
                "0.2762, 0.1381, 0.0000, 0.2762, 0.4143",
            ),
            *series("their share, h₋ = {}", sizes, share, "0.3994, 0.1562, 0.0000, 0.1371, 0.1669"),
        ],
        stands=max(rest[1:3]) < rest[0] and max(share[1:]) < share[0],
        limited=rest[4] > rest[0],
    )


@claim(
    "T-28",
    section=C,
    statement="On data of another policy a baseline changes the mean update, and only through "
    "clipping.",
    note="Limits [1, 1] count as clipping.",
    problem="SIX at z₆, c = .5: topr, TIS on both signs, naive, importance sampling.",
    formula="J_c = J₀ − c + c Σ μ (r − ρ(r))",
)
def t_28() -> Outcome:
    c = 0.5
    entries = (("topr", TOPR), ("TIS", TIS), ("naive", NAIVE), ("IS", IS))
    change = {
        n: float((SIX.gradient(e.change(baseline=c), Z6) - SIX.gradient(e, Z6)).norm())
        for n, e in entries
    }
    errors = []
    for entry in (TOPR, TIS, NAIVE, UNBOUNDED):
        ones = Arms(sampler=START, rewards=torch.where(GOOD, 1.0, -1.0).double())
        # sum of mu rho of each class, from the entry's own objective with rewards of one sign
        rho = SIX.value(entry, Z6) - 2 * ones.rewarded(ones.rewards.clamp(max=0)).value(entry, Z6)
        left = SIX.value(entry.change(baseline=c), Z6)
        right = SIX.value(entry, Z6) - c + c * (1 - rho)
        errors.append(float(left - right))
    return Outcome(
        figures=[
            *series(
                "change of the gradient, {}",
                list(change)[:3],
                list(change.values())[:3],
                "0.0182, 0.0175, 0.0549",
            ),
            zero("change of the gradient, IS", change["IS"]),
            *(
                zero(f"error of the identity, {n}", e)
                for (n, _), e in zip(entries, errors, strict=True)
            ),
        ],
        stands=min(change[n] for n in ("topr", "TIS", "naive")) > 1e-3 and change["IS"] < 1e-12,
    )


def _alone(estimator: Estimator, baseline: float) -> Tensor:
    """Where the baseline term alone leads in a time of 20,000 from z6."""
    still = SIX.rewarded(torch.zeros_like(SIX.rewards))
    return flow(Z6, still.update(estimator.change(baseline=baseline)), [20_000.0])[0].log_softmax(
        -1
    )


def _normalized(baseline: float) -> float:
    """Entropy after 300 topr steps from mu, divided by the total weight of the baseline."""
    p = float(SIX.mass[GOOD].sum())
    step = 1 / (1 + (1 - 2 * p) * baseline)
    walk = path(START, SIX.update(TOPR.change(baseline=baseline)), steps=300, rate=step)
    return float(entropy(marks(walk, [300])[300].softmax(-1)))


def _on_policy(baseline: float, seed: int) -> Tensor:
    """Entropies of 1,000 runs of 100 single-sample REINFORCE steps of .5 with reward 0."""
    runs, estimator = 1_000, alone("reinforce", baseline)
    rng = np.random.default_rng(seed)
    z = START.expand(runs, -1)
    for _ in range(100):
        logp = z.log_softmax(-1)
        u = torch.from_numpy(rng.random((runs, 1)))
        drawn = (logp.exp().cumsum(-1) < u).sum(-1, keepdim=True).clamp(max=5)
        one = logp.gather(-1, drawn)[..., None, None]
        batch = Batch(
            rewards=torch.zeros((runs, 1, 1), dtype=torch.float64),
            mask=torch.ones((runs, 1, 1, 1), dtype=torch.bool),
            logp=one,
            behavior_logp=one,
        )
        own = coefficients(estimator, batch).own.view(runs, 1)
        z = z + 0.5 * pull_back(torch.zeros_like(z).scatter(-1, drawn, own), logp.exp())
    return entropy(z.softmax(-1))


@claim(
    "T-29",
    section=C,
    statement="Under a negative baseline the policy stays near the data, under a positive one it "
    "turns deterministic; on-policy, randomness moves in the opposite direction.",
    note="The on-policy effect is small and fades: it lies within the noise after 1,000 steps.",
    kind="simulated",
    problem="SIX: the baseline term alone from z₆ (a time of 20,000); topr from μ, 300 steps; "
    "on-policy REINFORCE with R = 0 from μ, 100 steps of .5, 1,000 runs.",
    formula="KL(μ‖π) and entropy",
)
def t_29(*, seed: int) -> Outcome:
    held, sharp = _alone(TIS, -0.5), _alone(TIS, 0.5)
    loose = _alone(UNBOUNDED, 0.5)
    c = (-0.9, 0.0, 0.9)
    trained = [_normalized(b) for b in c]
    online = {b: _on_policy(b, seed) for b in (-1.0, 1.0)}
    near = float(kl(SIX.mass, held.exp()))
    return Outcome(
        figures=[
            band("KL(μ‖π), c = −.5", near, None, 1e-6, kind="exact"),
            band("entropy, c = .5", entropy(sharp.exp()), None, 0.01, kind="exact"),
            zero("change without limits", float((loose - Z6.log_softmax(-1)).abs().max())),
            *series("entropy after 300 topr steps, c = {}", c, trained, "0.9946, 0.9851, 0.8750"),
            averaged("on-policy entropy, b = −1", online[-1.0], 0.715, 0.03),
            averaged("on-policy entropy, b = +1", online[1.0], 0.803, 0.03),
        ],
        stands=near < 1e-6
        and float(entropy(sharp.exp())) < 0.01
        and trained[0] > trained[1] > trained[2]
        and float(online[-1.0].mean()) < float(online[1.0].mean()),
        seeds=(seed,),
    )


CS = (-1.0, -0.5, 0.0, 0.5, 0.8, 1.0)


def _weights(success: Tensor, baseline: Tensor) -> Tensor:
    """Share of each question in the total weight 1 + (1 - 2p) c."""
    weight = 1 + (1 - 2 * success) * baseline
    return weight / weight.sum(-1, keepdim=True)


def _spread(estimator: Estimator, completions: Tensor) -> tuple[float, float]:
    """Gap easiest minus hardest and mean accuracy on DECK after 50 steps of .1."""
    problem = deck()
    arms = Arms(sampler=problem.behavior_logp[:, 0], rewards=2 * problem.rewards - 1)
    share = (completions / completions.mean()).unsqueeze(-1)
    update = arms.update(estimator)
    places = marks(path(arms.sampler, lambda z, n: share * update(z, n), steps=50, rate=0.1), [50])
    right = places[50].softmax(-1)[:, 0]
    return float(right[-1] - right[0]), float(right.mean())


@claim(
    "T-30",
    section=D,
    statement="The objective is a supervised sum over questions of expected rewards; "
    "raising the baseline shifts weight to the hard ones, while most positives come from easy "
    "ones, all the more if these get more completions.",
    kind="simulated",
    problem="DECK, completions equal, ∝ p and ∝ 1/p, 50 steps of .1; PROBE(.02), the p̃ of T-18, "
    "1,000 passes.",
    formula="W_q = 1 + (1 − 2p_q) c, normalized",
)
def t_30(*, seed: int) -> Outcome:
    p = deck().logp[:, 0, 0].exp()
    weights = [_weights(p, torch.tensor(c, dtype=torch.float64)) for c in CS]
    hardest, half = [w[0] for w in weights], [w[:5].sum() for w in weights]
    spent = (("equal", torch.ones_like(p)), ("∝ p", p), ("∝ 1/p", 1 / p))
    tuned = [_spread(POSITIVES, n)[0] for _, n in spent]
    gaps, means = zip(*(_spread(TOPR, n) for _, n in spent), strict=True)
    correlation = _correlation(seed)
    names = [n for n, _ in spent]
    return Outcome(
        figures=[
            *series(
                "share of the hardest, c = {}", CS, hardest, ".010, .055, .100, .145, .172, .190"
            ),
            *series(
                "share of the hard half, c = {}", CS, half, ".250, .375, .500, .625, .700, .750"
            ),
            *series(
                "positives of 128, {}",
                ("hardest", "easiest"),
                (128 * p[0], 128 * p[-1]),
                "6.4, 121.6",
            ),
            *series("gap, positives only, completions {}", names, tuned, ".8881, .9210, .6730"),
            *series("gap, topr, completions {}", names, gaps, ".8193, .9273, -.0030"),
            *series("mean accuracy, topr, completions {}", names, means, ".8337, .7573, .8807"),
            band("rank correlation of hard half and test accuracy", correlation, 0.6, None),
        ],
        stands=bool(torch.stack(half).diff().min() > 0)
        and gaps[1] > gaps[0] > gaps[2]
        and tuned[1] > tuned[0] > tuned[2]
        and correlation >= 0.6,
        seeds=numbers(seed),
    )


def _correlation(seed: int) -> float:
    """Rank correlation over p̃ of the hard half's weight and mean test accuracy on PROBE."""
    found = study(0.02, seed)
    success = (found.train.logp(found.train.start).exp() * found.train.right).sum(-1)
    p = (found.answers.rewards > 0).double().mean((-2, -1))
    c = baseline_for(p, SHARES.unsqueeze(-1))
    order = success.argsort(-1)
    hard = order[:, : order.shape[-1] // 2]
    weight = _weights(success, c.unsqueeze(-1)).gather(-1, hard.expand(len(SHARES), -1, -1))
    accuracy = composed(seed)[PASSES]
    return float(spearmanr(weight.sum(-1).mean(-1), accuracy.mean(-1)).statistic)
