"""verl: an advantage estimator and a policy loss for each entry of the catalogue.

Both are called `windage_NAME`.  What verl's hooks cannot carry is registered as well, and refuses
with its reason when it is called; `check` says so before anything is launched.

Two modes.  With `rollout_correction.bypass_mode` verl hands the sampler's log-probabilities to the
loss in the place of the old ones, and ratios are current / sampler.  Without it verl recomputes the
old ones: only entries without a ratio, and the decoupled ones, whose ratio old / sampler comes as
`rollout_is_weights`, have a meaning.

Trainers: those of verl's v1 (`trainer.use_v1`), whose three modes (sync, colocate_async,
separate_async) keep batches in TransferQueue and call the same two hooks.

Differences from verl:
    1. The entry aggregates, and `loss_agg_mode`, `clip_ratio*` and `loss_scale_factor` are not
       read; denominators are those of the mini-batch, from before any rejection.
    2. An estimator never multiplies weights that it did not ask for.
    3. Rows that verl adds to fill up a batch count nowhere, in a batch's mean and spread either.
    4. verl's GRPO looks at the last output of an agent loop that gives several; a hook is told no
       sessions, so each output is a response.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable, Iterable, Mapping
from importlib import import_module
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from windage.estimators.batch import log_ratio
from windage.estimators.catalogue import CATALOGUE
from windage.estimators.diagnostics import masked_mean
from windage.estimators.errors import BadInput, unknown
from windage.estimators.estimator import Estimator, surrogate
from windage.llm.adapters.carry import Host, batch_wide, folds, is_given, named, refusal
from windage.llm.adapters.terms import advantages_of, batch_of, groups_of, loss_coefficients

PREFIX = "windage_"
SETTINGS = "WINDAGE_VERL"
SHADOWS = "WINDAGE_SHADOWS"
# The uid of the rows with which verl's v1 fills up a batch.
PADDING = re.compile(r"pad[0-9a-f]{32}")
# exp of the log-ratio at which verl itself clamps.
UNBOUNDED = math.exp(20)
EARLY = frozenset({"rewards", "outcomes"})
BYPASS = Host(name="verl with bypass_mode", early=EARLY, late=frozenset({"logp", "behavior_logp"}))
DECOUPLED = Host(
    name="verl without bypass_mode",
    early=EARLY,
    late=frozenset({"logp", "proximal_logp"}),
    given=frozenset({("proximal_logp", "behavior_logp")}),
)


def host_of(estimator: Estimator, *, bypass: bool) -> Host:
    """The mode in which a run is, if it can carry the estimator.

    Raises:
        BadInput: it cannot; says whether the other mode could.

    Example:
        >>> from windage.estimators.catalogue import get
        >>> host_of(get("cispo"), bypass=True).name
        'verl with bypass_mode'
    """
    here, other = (BYPASS, DECOUPLED) if bypass else (DECOUPLED, BYPASS)
    reason = refusal(estimator, here)
    if reason is None:
        return here
    elsewhere = refusal(estimator, other) is None
    words = f"bypass_mode={not bypass}".lower() if elsewhere else "an entry that verl can carry"
    raise BadInput(f"{reason}; allowed: {words}")


def estimators() -> dict[str, Estimator]:
    """Entries by their name in verl, with the settings of the environment variable WINDAGE_VERL.

    The variable holds words such as `cispo:cap=3 dr_grpo:length=4096`; it must reach every worker.

    Raises:
        BadInput: an unknown name or setting.
    """
    changed = [named(text) for text in os.environ.get(SETTINGS, "").split()]
    found = {**CATALOGUE, **{estimator.name: estimator for estimator in changed}}
    return {PREFIX + name: estimator for name, estimator in found.items()}


def register() -> None:
    """Put every entry into verl's two registries; importing `verl_plugin` does it."""
    core = import_module("verl.trainer.ppo.core_algos")
    for name, estimator in estimators().items():
        core.ADV_ESTIMATOR_REGISTRY[name] = advantage_hook(estimator)
        core.POLICY_LOSS_REGISTRY[name] = loss_hook(estimator)


def advantage_hook(estimator: Estimator) -> Callable[..., tuple[Tensor, Tensor]]:
    """An entry as verl's advantage estimator: `(advantages, returns)`, of a token each."""

    def advantages(
        token_level_rewards: Tensor,
        response_mask: Tensor,
        index: Iterable[Any] | None = None,
        config: Any = None,
        **others: Any,
    ) -> tuple[Tensor, Tensor]:
        rules = _part(config, "rollout_correction")
        host = host_of(estimator, bypass=bool(_part(rules, "bypass_mode")))
        _check_weights(estimator, host, rules)
        if index is None and estimator.compares:
            raise BadInput(f"{estimator.name} compares siblings, and the batch has no uid")
        names = list(index) if index is not None else list(range(len(response_mask)))
        groups, mask = groups_of(names), response_mask.bool()
        filler = [PADDING.fullmatch(str(name)) is not None for name in names]
        real = mask.any(1) | ~torch.tensor(filler, device=mask.device)
        rewards = token_level_rewards.double().sum(-1)
        batch = batch_of(rewards, mask, groups, present=real)
        found = groups.down(advantages_of(estimator, batch)).to(token_level_rewards.dtype)
        wide = torch.where(mask, found, 0.0)
        return wide, wide

    return advantages


def loss_hook(estimator: Estimator) -> Callable[..., tuple[Tensor, dict[str, Any]]]:
    """An entry as verl's policy loss: `(scalar, metrics)` of a micro-batch.

        loss = -sum(stop_gradient(C) * log_prob) * dp_size

    since verl averages over ranks.
    """

    def loss(
        old_log_prob: Float[Tensor, "B T"],
        log_prob: Float[Tensor, "B T"],
        advantages: Float[Tensor, "B T"],
        response_mask: Tensor,
        loss_agg_mode: str = "token-mean",
        config: Any = None,
        rollout_is_weights: Float[Tensor, "B T"] | None = None,
    ) -> tuple[Tensor, dict[str, Any]]:
        rules = _part(_part(config, "policy_loss"), "rollout_correction")
        host = host_of(estimator, bypass=bool(_part(rules, "bypass_mode")))
        ranks = _totals(config)[2]
        mask = response_mask.bool()
        own = coefficients(
            estimator,
            host,
            log_prob,
            old_log_prob,
            advantages,
            mask,
            config,
            weights=rollout_is_weights,
        )
        drift = log_ratio(log_prob.detach(), old_log_prob, mask)
        idle = ((own == 0) & (advantages != 0)).to(drift.dtype)
        metrics = {
            "actor/ppo_kl": masked_mean(-drift, mask).item(),
            "windage/silenced": masked_mean(idle, mask).item(),
        }
        for name, other in (shadows_of(estimator) if host is BYPASS else {}).items():
            made = coefficients(other, host, log_prob, old_log_prob, advantages, mask, config)
            metrics |= {f"windage/shadow/{name}/{k}": v for k, v in _compared(own, made).items()}
        return surrogate(own, log_prob) * ranks, metrics

    return loss


def coefficients(
    estimator: Estimator,
    host: Host,
    log_prob: Float[Tensor, "B T"],
    old_log_prob: Float[Tensor, "B T"],
    advantages: Float[Tensor, "B T"],
    mask: Bool[Tensor, "B T"],
    config: Any,
    *,
    weights: Float[Tensor, "B T"] | None = None,
) -> Float[Tensor, "B T"]:
    """Coefficients of a micro-batch, from what verl hands to a loss."""
    tokens, responses, _ = _totals(config)
    old = "behavior_logp" if host is BYPASS else "proximal_logp"
    return loss_coefficients(
        estimator,
        host,
        {"logp": log_prob, old: old_log_prob},
        advantages,
        mask,
        tokens=tokens,
        responses=responses,
        weights=weights,
    )


def shadows_of(estimator: Estimator) -> dict[str, Estimator]:
    """Entries of the environment variable WINDAGE_SHADOWS, logged beside the one that trains.

    A loss sees the advantages of the entry that trains, so a shadow must compute the same ones.

    Raises:
        BadInput: a shadow that has other advantages, or that verl cannot carry with bypass_mode.
    """
    found = {}
    for text in os.environ.get(SHADOWS, "").split():
        other = named(text)
        host_of(other, bypass=True)
        if folds(other) or folds(estimator) or _early(other) != _early(estimator):
            raise BadInput(
                f"shadow {text!r} has other advantages than {estimator.name}; allowed: entries "
                f"with {estimator.advantage.describe()} and the same admission"
            )
        found[other.name] = other
    return found


def _early(estimator: Estimator) -> tuple[Any, ...]:
    shaping = [m for m in estimator.active_penalties if m.traits.place != "loss"]
    return (estimator.advantage, estimator.admission, *shaping)


def _compared(own: Tensor, other: Tensor) -> dict[str, float]:
    """A shadow's coefficients of the micro-batch's tokens beside those that train."""
    lengths = own.norm(), other.norm()
    floor = torch.finfo(own.dtype).tiny
    return {
        "token_cosine": ((own * other).sum() / (lengths[0] * lengths[1]).clamp(min=floor)).item(),
        "token_norm_ratio": (lengths[1] / lengths[0].clamp(min=floor)).item(),
    }


def _totals(config: Any) -> tuple[float, float, int]:
    info: Mapping[str, Any] = getattr(config, "global_batch_info", None) or {}
    found = []
    for name in ("batch_num_tokens", "global_batch_size", "dp_size"):
        if info.get(name) is None:
            raise BadInput(
                f"verl told the loss no {name}; allowed: a trainer that sets global_batch_info"
            )
        found.append(info[name])
    return found[0], found[1], found[2]


def _part(config: Any, name: str) -> Any:
    """A value of a mapping, of OmegaConf or of a dataclass; None where there is none."""
    if config is None:
        return None
    if hasattr(config, "get"):
        return config.get(name, None)
    return getattr(config, name, None)


def _at(config: Any, path: str) -> Any:
    for name in path.split("."):
        config = _part(config, name)
    return config


def _check_weights(estimator: Estimator, host: Host, rules: Any) -> None:
    """The weights that verl is going to compute are those of the estimator's correction."""
    given = [c for c in estimator.corrections if not c.idle and is_given(c, host)]
    cap = min((dict(c.map.settings).get("cap", math.inf) for c in given), default=math.inf)
    level, limit = _part(rules, "rollout_is"), _part(rules, "rollout_is_threshold")
    where = f"{PREFIX}{estimator.name}: algorithm.rollout_correction"
    if host is DECOUPLED and not given and level is not None:
        raise BadInput(f"{where}.rollout_is is {level!r}; allowed: null, it corrects by itself")
    if given:
        if level != "token":
            raise BadInput(f"{where}.rollout_is is {level!r}; allowed: 'token'")
        fits = float(limit) == cap if cap < math.inf else float(limit) >= UNBOUNDED
        if not fits:
            words = f"{cap:g}" if cap < math.inf else f"at least {UNBOUNDED:.3g}"
            raise BadInput(f"{where}.rollout_is_threshold is {limit}; allowed: {words}")
        if _part(rules, "rollout_is_batch_normalize"):
            raise BadInput(f"{where}.rollout_is_batch_normalize is true; allowed: false")
    if (rejects := _part(rules, "rollout_rs")) is not None:
        raise BadInput(
            f"{where}.rollout_rs is {rejects!r}; allowed: null, the entry rejects itself"
        )


def check(config: Any = None) -> list[str]:
    """Fail loudly where the entries are not registered or a run's configuration cannot carry one.

    Args:
        config: verl's whole configuration; None: only the registration is checked.

    Returns:
        The names that are registered and that verl can carry in one of its modes.

    Raises:
        BadInput: one line: what, where, what is allowed.
    """
    core = import_module("verl.trainer.ppo.core_algos")
    wanted = estimators()
    for what, registry in (
        ("policy losses", core.POLICY_LOSS_REGISTRY),
        ("advantage estimators", core.ADV_ESTIMATOR_REGISTRY),
    ):
        if absent := [name for name in wanted if name not in registry]:
            raise BadInput(
                f"verl's {what} lack {absent[0]}; allowed: windage installed beside verl on every "
                "node, VERL_USE_EXTERNAL_PLUGINS unset or naming windage, or "
                "VERL_USE_EXTERNAL_MODULES=windage.llm.adapters.verl_plugin, which shows its errors"
            )
    if config is not None:
        _check_run(config, wanted)
    return [n for n, e in wanted.items() if None in (refusal(e, BYPASS), refusal(e, DECOUPLED))]


def _check_run(config: Any, wanted: Mapping[str, Estimator]) -> None:
    adv = str(_at(config, "algorithm.adv_estimator"))
    actor = _at(config, "actor_rollout_ref.actor")
    if adv not in wanted:
        raise BadInput(f"algorithm.adv_estimator: {unknown('estimator', adv, wanted)}")
    estimator, rules = wanted[adv], _at(config, "algorithm.rollout_correction")
    bypass = bool(_part(rules, "bypass_mode"))
    _check_weights(estimator, host_of(estimator, bypass=bypass), rules)
    if bypass:
        shadows_of(estimator)
    mode = _at(config, "trainer.v1.trainer_mode")
    parts = _at(config, f"trainer.v1.{mode}.parameter_sync_step") or 1
    prompts = _at(config, "data.train_batch_size") // parts
    expected = {
        "actor_rollout_ref.actor.policy_loss.loss_mode": adv,
        "actor_rollout_ref.actor.policy_loss.rollout_correction.bypass_mode": bypass,
        "algorithm.use_kl_in_reward": False,
        "trainer.use_v1": True,
    }
    if bypass or _part(rules, "rollout_is") is not None:
        expected["actor_rollout_ref.rollout.calculate_log_probs"] = True
    if batch_wide(estimator) and prompts != _part(actor, "ppo_mini_batch_size"):
        expected["actor_rollout_ref.actor.ppo_mini_batch_size"] = prompts
    for path, value in expected.items():
        found = _at(config, path)
        if (bool(found) if isinstance(value, bool) else found) != value:
            said = str(found).lower() if isinstance(found, bool) else found
            allowed = str(value).lower() if isinstance(value, bool) else value
            raise BadInput(f"{path} is {said}; allowed with {adv}: {allowed}")
