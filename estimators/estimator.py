"""An estimator: one member a stage, and the coefficients it gives to a batch.

Two steps, so that a trainer can stay fast.  `batch_terms` computes once over the whole optimizer
batch whatever couples responses (advantages, admission, denominators); `token_coefficients`
computes weights and head coefficients from the log-probabilities of the forward pass that is about
to be differentiated, and may be given a slice of the prompts.  Neither carries a gradient.

Differences:
    1. A penalty in the token reward is collected by the return-to-go, undiscounted but for `gae`,
       and added after any normalization of the advantage, so its strength does not depend on the
       spread of the rewards.
    2. A rejected response contributes nothing, its penalties in the loss included; denominators
       still count it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any, final

import torch
from jaxtyping import Float, Int
from torch import Tensor

from windage.estimators.advantage import returns_to_go, terminal_rewards
from windage.estimators.batch import Batch, log_ratio, promote
from windage.estimators.claims import Claim
from windage.estimators.correction import Correction, token_fields
from windage.estimators.member import SCOPES, Member, Scope

ABSENT, SURVIVOR = "absent", "single survivor of its group"


@final
@dataclass(frozen=True, kw_only=True)
class Estimator:
    """One member a stage; a published algorithm is such a value.

    Args:
        name: as in the catalogue.
        advantage: rewards to advantages.
        corrections: factors of the weight; one but for decoupled forms.
        aggregation: lengths to coefficients.
        admission: which responses are kept; all must agree.
        centering: score centering, or None.
        penalties: terms in the reward or the loss.
        paper: where it was published.
        differences: numbered, from the paper and from popular frameworks.
        claims: what the toy side decides.
        tier: 1 for the recipes that a study compares unless told otherwise, 2 for the rest.
    """

    name: str
    advantage: Member
    corrections: tuple[Correction, ...] = (Correction(),)
    aggregation: Member
    admission: tuple[Member, ...] = ()
    centering: Member | None = None
    penalties: tuple[Member, ...] = ()
    paper: str = ""
    differences: tuple[str, ...] = ()
    claims: tuple[Claim, ...] = ()
    tier: int = 1

    def __post_init__(self) -> None:
        for correction in self.corrections if self.centering is not None else ():
            if (
                not correction.idle
                and correction.describe() != f"token {correction.map.describe()}"
            ):
                raise ValueError(
                    f"{self.name}: centering is exact only with token reach and the ratio "
                    f"logp/behavior_logp, got {correction.describe()}"
                )

    @cached_property
    def members(self) -> tuple[tuple[str, Member], ...]:
        """Every member with settings, with the stage it serves."""
        return (
            ("advantage", self.advantage),
            *(("correction", m) for c in self.corrections for m in c.members),
            ("aggregation", self.aggregation),
            *(("admission", m) for m in self.admission),
            *((("centering", self.centering),) if self.centering is not None else ()),
            *(("penalty", m) for m in self.penalties),
        )

    @cached_property
    def active_penalties(self) -> tuple[Member, ...]:
        """Penalties whose coefficient is not 0."""
        return tuple(m for m in self.penalties if dict(m.settings).get("coefficient") != 0)

    @cached_property
    def scope(self) -> Scope:
        """The widest scope of any member: how far a coefficient reaches for information."""
        reaches = [c.scope for c in self.corrections if not c.idle]
        scopes = [member.traits.scope for _, member in self.members] + reaches
        return max(scopes, key=SCOPES.index)

    @property
    def compares(self) -> bool:
        """Whether the advantage compares responses of a group, so that one alone means nothing."""
        traits = self.advantage.traits
        return traits.scope in ("group", "batch") and not traits.lone

    @property
    def settings(self) -> dict[str, Any]:
        """Settings by name; a name that several stages have is set in all of them."""
        return {key: value for _, m in self.members for key, value in m.settings}

    def change(self, **settings: Any) -> Estimator:
        """The same estimator with some settings replaced, wherever a member has them.

        Raises:
            TypeError: a setting that no member has, by name.
        """
        for key in settings:
            if key not in self.settings:
                allowed = ", ".join(self.settings) or "none"
                raise TypeError(f"{self.name} has no setting {key!r}; it has: {allowed}")

        def changed(member: Member) -> Member:
            own = {k: v for k, v in settings.items() if k in dict(member.settings)}
            return member.change(**own) if own else member

        return replace(
            self,
            advantage=changed(self.advantage),
            corrections=tuple(c.change(changed) for c in self.corrections),
            aggregation=changed(self.aggregation),
            admission=tuple(changed(m) for m in self.admission),
            centering=None if self.centering is None else changed(self.centering),
            penalties=tuple(changed(m) for m in self.penalties),
        )

    def describe(self) -> str:
        """The composition in one line."""
        parts = [self.advantage.describe(), *(c.describe() for c in self.corrections)]
        parts += [m.describe() for s, m in self.members if s not in ("advantage", "correction")]
        return " · ".join(parts)

    def check(self, batch: Batch) -> Batch:
        """Validate the batch for this estimator; `logp` may still be absent.

        Raises:
            ValueError: a value that is not finite, a field that is missing, or a group of which one
                response was requested (named), where the advantage compares within groups.
        """
        batch = batch.validate()
        if self.compares:
            shape = batch.rewards.shape
            asked = batch.requested
            sizes = [shape[-1]] * shape[-2] if asked is None else asked.tolist()
            for p, size in enumerate(sizes):
                if size < 2:
                    group = p if batch.group_ids is None else batch.group_ids[p]
                    raise ValueError(
                        f"group {group} has size {size}; {self.name} needs groups of at least 2"
                    )
        if self.advantage.traits.rewards == "nonnegative":
            bad = torch.nonzero(batch.get("present") & (batch.rewards < 0))
            if len(bad):
                place = tuple(bad[0].tolist())
                raise ValueError(
                    f"rewards is {float(batch.rewards[place]):g} at {batch.row_name(place)}; "
                    f"allowed by {self.name}: rewards of at least 0"
                )
        for name in self.needs:
            if name != "logp":
                batch.get(name)
        return batch

    @cached_property
    def needs(self) -> tuple[str, ...]:
        """Fields of the batch that some member reads."""
        return self._fields(self.admission)

    @cached_property
    def needs_beside_admission(self) -> tuple[str, ...]:
        """Fields of the batch that some member reads, admission apart."""
        return self._fields(())

    def _fields(self, admission: tuple[Member, ...]) -> tuple[str, ...]:
        others = [m for s, m in self.members if s not in ("admission", "penalty")]
        used = [*admission, *others, *self.active_penalties]
        names = [name for member in used for name in member.traits.needs]
        derived = {
            "reference_ratio": ("logp", "reference_logp"),
            "log_ratio": ("logp", "behavior_logp"),
            "token_rewards": ("rewards",),
            "advantages": (),
        }
        names = [field for name in names for field in derived.get(name, (name,))]
        for correction in self.corrections:
            names += [] if correction.idle else [correction.numerator, correction.denominator]
        return tuple(dict.fromkeys(names))

    def __call__(self, batch: Batch) -> Coefficients:
        """Check the batch and give its coefficients, all finite.

        Raises:
            ValueError: what `check` and `Coefficients.validate` refuse.
        """
        batch = self.check(batch)
        return coefficients(self, batch).validate(batch)


@final
@dataclass(frozen=True, kw_only=True, eq=False)
class Terms:
    """What couples responses, computed once over the whole batch.

    Args:
        advantages: `[P G 1]`, or `[P G T]` where they differ by token.
        scale: aggregation's coefficient of each response.
        reason: 0 where a response is admitted, else its place in `reasons` plus 1.
        reasons: names of what was not admitted and why.
        weights: product of the corrections of scope batch; None: there are none, or not yet.
        added: sum of the loss penalties of scope batch, likewise.
    """

    advantages: Float[Tensor, "*batch P G T_or_1"]
    scale: Float[Tensor, "*batch P G"]
    reason: Int[Tensor, "*batch P G"]
    reasons: tuple[str, ...]
    weights: Float[Tensor, "*batch P G T"] | None = None
    added: Float[Tensor, "*batch P G T"] | None = None

    def select(self, prompts: Any) -> Terms:
        """The terms of some prompts only."""
        return replace(
            self,
            weights=None if self.weights is None else self.weights[..., prompts, :, :],
            added=None if self.added is None else self.added[..., prompts, :, :],
            advantages=self.advantages[..., prompts, :, :],
            scale=self.scale[..., prompts, :],
            reason=self.reason[..., prompts, :],
        )

    @property
    def counts(self) -> dict[str, Int[Tensor, "*batch"]]:
        """How many responses were turned away, by reason."""
        numbered = enumerate(self.reasons, start=1)
        return {name: (self.reason == number).sum((-2, -1)) for number, name in numbered}


@final
@dataclass(frozen=True, kw_only=True, eq=False)
class Coefficients:
    """Constants under differentiation: the update is the sum of own * grad logp (+ head's).

    Args:
        own: of the sampled tokens.
        head: of the head tokens, or None without centering.
        terms: what they were made of.
        weights: the correction alone.
    """

    own: Float[Tensor, "*batch P G T"]
    head: Float[Tensor, "*batch P G T K"] | None
    terms: Terms
    weights: Float[Tensor, "*batch P G T"]

    def validate(self, batch: Batch) -> Coefficients:
        """Refuse a coefficient that is not finite, such as a ratio without a bound that overflows.

        Raises:
            ValueError: names the coefficient, the row and the value.
        """
        for name, value in (("own", self.own), ("head", self.head)):
            if value is None:
                continue
            bad = torch.nonzero(~torch.isfinite(value))
            if len(bad):
                place = tuple(bad[0].tolist())
                raise ValueError(
                    f"the {name} coefficient is {float(value[place])} at {batch.row_name(place)}; "
                    "allowed: finite numbers, so bound the ratio (cap, band or taper)"
                )
        return self


def _derive(batch: Batch, name: str) -> Any:
    """A field of the batch, or one of the quantities that members may ask for by name."""
    if name == "log_ratio":
        return log_ratio(batch.get("logp"), batch.get("behavior_logp"), batch.mask)
    if name == "reference_ratio":
        return log_ratio(batch.get("logp"), batch.get("reference_logp"), batch.mask)
    if name in ("logp", "behavior_logp"):
        return log_ratio(batch.get(name), torch.zeros_like(batch.get(name)), batch.mask)
    return batch.get(name)


def _call(member: Member, find: Callable[[str], Any]) -> Any:
    return member(*(find(name) for name in member.traits.needs))


@torch.no_grad()
def batch_terms(estimator: Estimator, batch: Batch) -> Terms:
    """Advantages, denominators and admission of a whole optimizer batch.

    Args:
        estimator: read for advantage, aggregation, admission and penalties in the reward.
        batch: validated.

    Example:
        >>> from windage.estimators.catalogue import get
        >>> batch = Batch.from_rows([1.0, 0.0], "aa", mask=[[1], [1, 1]])
        >>> batch_terms(get("dapo"), batch).scale
        tensor([[0.3333, 0.3333]], dtype=torch.float64)
    """
    present = batch.get("present")
    rewards = promote(batch.rewards)
    token_rewards: Tensor | None = None
    for penalty in estimator.active_penalties:
        if penalty.traits.place == "reward":
            rewards = rewards + _call(penalty, lambda n: _derive(batch, n)).to(rewards.dtype)
        elif penalty.traits.place == "token_reward":
            term = torch.where(batch.mask, _call(penalty, lambda n: _derive(batch, n)), 0.0)
            token_rewards = term if token_rewards is None else token_rewards + term

    def find(name: str) -> Any:
        if name == "rewards":
            return rewards
        if name == "token_rewards":
            terminal = terminal_rewards(rewards, batch.mask)
            return terminal if token_rewards is None else terminal + token_rewards
        return _derive(batch, name)

    advantages = _call(estimator.advantage, find)
    if advantages.dim() == rewards.dim():
        advantages = advantages.unsqueeze(-1)
        if token_rewards is not None:
            advantages = advantages + returns_to_go(token_rewards, batch.mask)
    scale = _call(estimator.aggregation, find)

    reasons, reason = [ABSENT], (~present).long()
    if estimator.compares:
        reasons.append(SURVIVOR)
        lonely = present & (present.sum(-1, keepdim=True) < 2)
        reason = torch.where(lonely, len(reasons), reason)
    for member in estimator.admission:
        reasons.append(member.name)
        if any(n in ("versions", "truncated", "elapsed") for n in member.traits.needs) and any(
            getattr(batch, n) is None for n in member.traits.needs
        ):
            continue
        refused = ~_call(member, find) & (reason == 0)
        reason = torch.where(refused, len(reasons), reason)
    terms = Terms(advantages=advantages, scale=scale, reason=reason, reasons=tuple(reasons))
    wide = tuple(c for c in estimator.corrections if c.scope == "batch")
    fines = tuple(m for m in _fines(estimator) if m.traits.scope == "batch")
    return replace(
        terms,
        weights=_weights(wide, batch, advantages) if wide else None,
        added=_added(fines, batch, advantages) if fines else None,
    )


def _fines(estimator: Estimator) -> tuple[Member, ...]:
    """Penalties in the loss."""
    return tuple(m for m in estimator.active_penalties if m.traits.place == "loss")


def _weights(corrections: Iterable[Correction], batch: Batch, advantages: Tensor) -> Tensor:
    """Product of the weights of some corrections."""
    like = batch.rewards if batch.logp is None else batch.logp
    weights = batch.mask.to(promote(like).dtype)
    for correction in corrections:
        if not correction.idle:
            policies = batch.get(correction.numerator), batch.get(correction.denominator)
            ratio = log_ratio(*policies, batch.mask)
            find = partial(_derive, batch)
            weights = weights * correction.weights(ratio, batch.mask, advantages, find)
    return weights


def _added(penalties: Iterable[Member], batch: Batch, advantages: Tensor) -> Tensor:
    """Sum of what some penalties in the loss add to a token, before the aggregation."""
    total = torch.zeros_like(batch.mask, dtype=promote(batch.rewards).dtype)
    for penalty in penalties:
        term = _call(penalty, lambda n: advantages if n == "advantages" else _derive(batch, n))
        total = total + torch.where(batch.mask, term, 0.0)
    return total


@torch.no_grad()
def token_coefficients(estimator: Estimator, terms: Terms, batch: Batch) -> Coefficients:
    """Coefficients of own and head tokens, from this batch's (or slice's) log-probabilities.

        own[p, g, t] = A * w * scale * admitted + penalty * scale
        head[p, g, t, v] = -A * scale * admitted * centering(v)

    Args:
        estimator: read for corrections, centering and penalties in the loss.
        terms: of the whole optimizer batch, selected to the same prompts.
        batch: whole responses; a micro-batch never splits one.

    Claims:
        Coefficients of slices are slices of the coefficients of the whole.

    Example:
        >>> from windage.estimators.catalogue import get
        >>> batch = Batch.from_rows([1.0, 0.0, 1.0, 0.0], "aabb", mask=[[1], [1], [1], [1]])
        >>> terms = batch_terms(get("rloo"), batch)
        >>> token_coefficients(get("rloo"), terms.select([1]), batch.select([1])).own
        tensor([[[ 0.2500],
                 [-0.2500]]], dtype=torch.float64)
    """
    coupled = terms.weights is not None
    own_scope = [c for c in estimator.corrections if not (coupled and c.scope == "batch")]
    weights = _weights(own_scope, batch, terms.advantages)
    weights = weights if terms.weights is None else weights * terms.weights
    admitted = ((terms.reason == 0) & (terms.scale > 0)).unsqueeze(-1)
    scale = torch.where(admitted, terms.scale.unsqueeze(-1), 0.0).to(weights.dtype)
    factor = torch.where(admitted, terms.advantages * scale, 0.0).to(weights.dtype)
    inert = (factor == 0) | (weights == 0)
    own = torch.where(inert, torch.zeros_like(weights), factor * weights)
    fines = _fines(estimator)
    if fines:
        known = terms.added is not None
        near = [m for m in fines if not (known and m.traits.scope == "batch")]
        added = _added(near, batch, terms.advantages)
        added = added if terms.added is None else added + terms.added
        own = own + torch.where(admitted, added * scale, 0.0).to(own.dtype)
    head = None
    if estimator.centering is not None:
        sign = -factor.unsqueeze(-1)
        scores = center(
            estimator,
            promote(batch.get("head_logp")),
            promote(batch.get("head_behavior_logp")),
            terms.advantages.unsqueeze(-1),
        )
        centered = torch.where(batch.mask.unsqueeze(-1), scores, 0.0)
        head = torch.where(sign == 0, torch.zeros_like(centered), sign * centered)
    return Coefficients(own=own, head=head, terms=terms, weights=weights)


def center(
    estimator: Estimator,
    head_logp: Float[Tensor, "*batch K"],
    head_behavior_logp: Float[Tensor, "*batch K"],
    advantages: Float[Tensor, "*#batch K_or_1"],
) -> Float[Tensor, "*batch K"]:
    """What an estimator's centering subtracts from the scores of head tokens, before the advantage.

    Args:
        estimator: has a centering; its maps weigh the head tokens.
        head_logp: trainer's log-probabilities of the head.
        head_behavior_logp: sampler's, of the same tokens.
        advantages: for maps that read their sign.

    Example:
        >>> from windage.estimators.catalogue import get
        >>> p, q = torch.tensor([0.5, 0.5]).log(), torch.tensor([0.1, 0.9]).log()
        >>> center(get("centered_tis"), p, q, torch.tensor([1.0]))
        tensor([0.2000, 0.5000])
    """

    fields = token_fields(head_logp, head_behavior_logp)

    def weigh(ratio: Tensor) -> Tensor:
        weight = torch.ones_like(ratio)
        for correction in estimator.corrections:
            weight = weight * correction.weigh(ratio, advantages, fields.__getitem__)
        return weight

    assert estimator.centering is not None
    found: Tensor = estimator.centering(head_logp, head_behavior_logp, weigh)
    return found


def coefficients(estimator: Estimator, batch: Batch) -> Coefficients:
    """Coefficients of a whole validated batch: `batch_terms`, then `token_coefficients`.

    Example:
        >>> from windage.estimators.catalogue import get
        >>> batch = Batch.from_rows([1.0, 0.0], "aa", mask=[[1], [1, 1]])
        >>> coefficients(get("rloo"), batch).own
        tensor([[[ 0.5000,  0.0000],
                 [-0.5000, -0.5000]]], dtype=torch.float64)
    """
    return token_coefficients(estimator, batch_terms(estimator, batch), batch)


def surrogate(
    coefficients: Float[Tensor, "*shape"], logp: Float[Tensor, "*shape"]
) -> Float[Tensor, ""]:
    """The loss whose gradient is minus the estimate, whatever the recipe.

        loss = -sum(stop_gradient(C) * logp)

    Claims:
        Additive over slices: micro-batches and ranks add up to the whole.

    Example:
        >>> logp = torch.tensor([-0.5], requires_grad=True)
        >>> surrogate(torch.tensor([2.0]), logp).backward()
        >>> logp.grad
        tensor([-2.])
    """
    constant = coefficients.detach()
    return -torch.where(constant != 0, constant * promote(logp), 0.0).sum()
