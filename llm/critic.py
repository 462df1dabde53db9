"""A learned critic: what a rollout batch will earn, before each token of its responses.

    values     of the whole batch by the critic that has not seen it: into the rows, for GAE
    complete   a response that a limit cut earns what the critic still expects after its last token
    returns    V + A by `value_targets`, with a lambda of its own; 1 while the critic warms up
    fit        passes x minibatches over the batch, by an optimizer of its own

A critic of kind `head` is a linear layer on the hidden states of the policy's trunk; one of kind
`model` has a trunk of its own.  gamma is the recipe's: it says what a value is the value of.

Differences from verl and NeMo-RL:
    1. The critic is fitted before the policy moves, so a head sees hidden states that the pass for
       the values has made already: its fit costs no further pass of the trunk.
    2. What a head's loss pulls the trunk by (`trunk` times its gradient, the head held constant)
       goes into the policy's own updates; 0 stops it.
    3. The layer begins at 0, so the first values are 0 and not noise; its bias is the mean of the
       first returns before the first fit, which weights would otherwise learn along all prefixes.
    4. The loss is the mean over all tokens of a minibatch, whatever the micro-batches.

References:
    Yuan et al., 2025, arXiv:2503.01491 (a lambda for the value apart, warm-up on returns).
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, final

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from windage.estimators.advantage import terminal_rewards, value_targets
from windage.estimators.batch import Batch
from windage.estimators.errors import BadInput
from windage.llm.config import Config
from windage.llm.models import Loaded, load
from windage.llm.packed import pack_optimizer, unpack_optimizer
from windage.llm.passes import Beside, Packed, Responses
from windage.llm.ranks import Ranks

Row = dict[str, Any]
Numbers = Int[Tensor, " _"]
Parts = list[Numbers]
# Hidden states of a batch are kept between values and fit up to so many numbers.
KEPT = 1 << 28
GROUPS = ("critic", "critic_optimizer")
RATES = {"head": 1e-3, "model": 1e-5}


@final
@dataclass(frozen=True, kw_only=True)
class Fitting:
    """How a critic is fitted and used; the names are those of the configuration.

    Args:
        gamma: of the recipe.
        seed: of the run, for the order of the responses.
    """

    gamma: float
    lam_value: float = 1.0
    passes: int = 1
    minibatches: int = 1
    micro_batch: int = 16
    warmup: int = 0
    complete: bool = False
    clip_value: float = 0.0
    trunk: float = 0.0
    max_grad_norm: float = 1.0
    seed: int = 0


@final
class Critic:
    """Values of prefixes, and how they are learned.

    Args:
        states: hidden states at places of sequences, as of `Policy.states`.
        width: of a hidden state.
        own: the trunk that is the critic's, trained with its head; None: another's, left alone.
        optimizer: makes one of torch from the parameters.
        fitting: how.
        ranks: processes that share a batch.
        device: of the hidden states.
        dtype: of the head.
    """

    def __init__(
        self,
        states: Callable[[Tensor, Tensor, Tensor], Tensor],
        width: int,
        *,
        own: nn.Module | None,
        optimizer: Callable[[list[Any]], Any],
        fitting: Fitting,
        ranks: Ranks,
        device: torch.device,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        self.states, self.fitting, self.ranks = states, fitting, ranks
        self.head = nn.utils.skip_init(nn.Linear, width, 1, device=device, dtype=dtype)
        nn.init.zeros_(self.head.weight)
        nn.init.zeros_(self.head.bias)
        self.trunk = own
        parts = {"head": self.head} if own is None else {"head": self.head, "trunk": own}
        self.module = nn.ModuleDict(parts)
        self.optimizer = optimizer(list(self.module.parameters()))

    def ready(self, step: int) -> bool:
        """Whether the policy may move at a step, counted from 0."""
        return step >= self.fitting.warmup

    def of(self, hidden: Float[Tensor, "N W"]) -> Float[Tensor, " N"]:
        """Values of hidden states."""
        found: Tensor = self.head(hidden.to(self.head.weight.dtype)).squeeze(-1)
        return found

    def appraise(
        self, rows: Sequence[Row], batch: Batch, responses: Responses, step: int
    ) -> dict[str, float]:
        """Write values and returns into the rows, complete those that were cut, and fit.

        Args:
            rows: of the whole rollout batch; `values`, `returns` and, where completed, `reward` are
                put into them.
            batch, responses: made of the rows.
            step: of the run, from 0.

        Returns:
            Figures by name, with `__` for `/`, of the values from before the fit.

        Raises:
            BadInput: a value or a gradient is not finite.
        """
        sets = self._divided(responses, step)
        values, after, kept = self._values(responses, sets)
        self._finite(values, "a value", step)
        self._finite(after, "a value", step)
        told = {}
        if self.fitting.complete and (count := int(batch.get("present").sum())):
            batch, completed = _completed(rows, batch, after, self.fitting)
            told["critic__completed"] = completed / count
        values = values.view(batch.mask.shape)
        returns = value_targets(
            terminal_rewards(batch.rewards.double(), batch.mask),
            values,
            batch.mask,
            gamma=self.fitting.gamma,
            lam=self.fitting.lam_value if self.ready(step) else 1.0,
        )
        self._begin(returns[batch.mask])
        norm = self._fit(responses, sets, kept, values.flatten(0, 1), returns.flatten(0, 1), step)
        _put(rows, batch, values=values, returns=returns)
        return told | {"critic__gradient_norm": norm} | figures(values, returns, batch.mask)

    @torch.no_grad()
    def _begin(self, returns: Float[Tensor, " N"]) -> None:
        """Before the first fit: the mean return for every prefix, so that only the rest is left."""
        if len(returns) and not bool(self.head.weight.any()):
            self.head.bias.fill_(float(returns.mean()))

    def _divided(self, responses: Responses, step: int) -> list[Parts]:
        """Micro-batches of each minibatch: responses at random, those of like length together."""
        order = responses.mask.any(-1).nonzero().squeeze(1).tolist()
        random.Random(f"{self.fitting.seed} {step} critic").shuffle(order)
        lengths, count = responses.lengths, min(self.fitting.minibatches, len(order))
        found = []
        for which in range(count):
            some = torch.tensor(order[which::count])
            some = some[torch.argsort(lengths[some], descending=True, stable=True)]
            found.append(list(some.split(self.fitting.micro_batch)))
        return found

    def _hidden(self, packed: Packed, *, after: bool) -> Tensor:
        """Hidden states before each token asked about and, if wanted, after each last one."""
        places, device = packed.places, self.head.weight.device
        if after:
            rows, width = packed.ids.shape
            ends = torch.arange(rows) * width + packed.attention.sum(-1) - 1
            places = torch.cat([places, ends])
        return self.states(packed.ids.to(device), packed.attention.to(device), places.to(device))

    @torch.no_grad()
    def _values(
        self, responses: Responses, sets: Sequence[Parts]
    ) -> tuple[Tensor, Tensor, list[list[Tensor]] | None]:
        """Values before each token and after the last, and the hidden states where they are kept.

        A trunk that the fit moves has other hidden states the next time: none are kept.
        """
        values = torch.zeros(responses.mask.shape, dtype=torch.float64)
        after = torch.zeros(len(values), dtype=torch.float64)
        small = responses.mask.sum() * self.head.in_features <= KEPT
        kept: list[list[Tensor]] = [[] for _ in sets]
        for which, parts in enumerate(sets):
            for numbers, counts in self.ranks.share(parts):
                packed = responses.packed(numbers)
                hidden = self._hidden(packed, after=True)
                told = self.of(hidden).double().cpu()
                if counts:
                    here = len(packed.places)
                    values[numbers] = _laid(told[:here], packed.asked)
                    after[numbers] = told[here:]
                if small and self.trunk is None:
                    kept[which].append(hidden[: len(packed.places)].clone())
        found = kept if small and self.trunk is None else None
        return self.ranks.sum(values), self.ranks.sum(after), found

    def _fit(
        self,
        responses: Responses,
        sets: Sequence[Parts],
        kept: list[list[Tensor]] | None,
        values: Tensor,
        returns: Tensor,
        step: int,
    ) -> float:
        """Go through the batch `passes` times; the largest norm of a gradient."""
        largest, trained = 0.0, list(self.module.parameters())
        for which, parts in [pair for _ in range(self.fitting.passes) for pair in enumerate(sets)]:
            total = int(responses.mask[torch.cat(parts)].sum())
            self.optimizer.zero_grad(set_to_none=True)
            for place, (numbers, counts) in enumerate(self.ranks.share(parts)):
                asked = responses.mask[numbers]
                with torch.set_grad_enabled(self.trunk is not None):
                    hidden = (
                        self._hidden(responses.packed(numbers), after=False)
                        if kept is None
                        else kept[which][place]
                    )
                told = self.of(hidden)
                old, wanted = (known[numbers][asked].to(told) for known in (values, returns))
                loss = value_loss(told, old, wanted, self.fitting.clip_value or math.inf).sum()
                (loss / total * float(counts)).backward()
            for parameter in trained:
                if parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)
                parameter.grad = self.ranks.sum(parameter.grad)
            norm = nn.utils.clip_grad_norm_(trained, self.fitting.max_grad_norm or math.inf)
            self._finite(norm, "the gradient", step)
            self.optimizer.step()
            largest = max(largest, float(norm))
        self.optimizer.zero_grad(set_to_none=True)
        return largest

    def pull(self, rows: Sequence[Row], batch: Batch) -> Beside | None:
        """The loss by which the values of a batch pull the policy's trunk; None: it is stopped.

        Args:
            rows: that were appraised.
            batch: an optimizer batch made of them.
        """
        if self.fitting.trunk == 0:
            return None
        returns = _gathered(rows, batch, "returns").flatten(0, 1)
        mask = batch.mask.flatten(0, 1)
        scale = self.fitting.trunk / max(int(mask.sum()), 1)
        weight, bias = (p.detach() for p in (self.head.weight, self.head.bias))

        def beside(hidden: Tensor, numbers: Numbers) -> Tensor:
            told = nn.functional.linear(hidden.to(weight.dtype), weight, bias).squeeze(-1)
            wanted = returns[numbers][mask[numbers]].to(told)
            return scale * value_loss(told, told.detach(), wanted, math.inf).sum()

        return beside

    def _finite(self, value: Tensor, what: str, step: int) -> None:
        if not bool(torch.isfinite(value).all()):
            raise BadInput(
                f"step {step + 1}: {what} of the critic is not finite; allowed: finite numbers, "
                "such as with a lower critic.learning_rate"
            )

    def packed(self) -> tuple[dict[str, dict[str, Tensor]], dict[str, Any]]:
        """Groups of tensors and plain values, for a checkpoint."""
        tensors, settings = pack_optimizer(self.optimizer)
        own = {name: value.detach() for name, value in self.module.state_dict().items()}
        return dict(zip(GROUPS, (own, tensors), strict=True)), settings

    def unpack(self, tensors: Mapping[str, Any], settings: Any) -> None:
        """Be the critic of a checkpoint.

        Raises:
            BadInput: the checkpoint has none, or one of another kind or size.
        """
        own, optimizer = (tensors[name] for name in GROUPS)
        try:
            self.module.load_state_dict(own)
        except RuntimeError:
            raise BadInput(
                "the checkpoint has another critic, or none; allowed: the [critic] of the run"
            ) from None
        unpack_optimizer(self.optimizer, optimizer, settings)


def build(
    config: Config,
    loaded: Loaded,
    policy: Any,
    *,
    gamma: float,
    optimizer: Callable[[list[Any], float], Any],
    ranks: Ranks,
) -> Critic:
    """The critic of a configuration that has one.

    Args:
        loaded: the policy's model.
        policy: what is called, such as a sharded form of `loaded.policy`.
        gamma: of the recipe.
        optimizer: makes one from parameters and a learning rate.
        ranks: processes that train together.

    Raises:
        BadInput: its model cannot be had, or has another tokenizer.
    """
    told, own, at = config.critic, None, loaded
    if told.kind == "model":
        at = load(
            told.path or config.model.path,
            dtype=config.model.dtype,
            autocast=config.model.autocast or None,
            device=config.model.device,
            checkpointing=config.model.gradient_checkpointing,
        )
        if at.fingerprint != loaded.fingerprint:
            raise BadInput(
                f"critic.path {told.path!r} has another tokenizer; allowed: the policy's"
            )
        own, policy = at.policy.base.get_decoder(), at.policy
    elif ranks.sharded:
        torch.distributed.fsdp.register_fsdp_forward_method(policy, "states")
    rate = told.learning_rate or RATES[told.kind]
    return Critic(
        policy.states,
        at.policy.base.config.get_text_config().hidden_size,
        own=own,
        optimizer=lambda parameters: optimizer(parameters, rate),
        fitting=Fitting(
            gamma=gamma,
            lam_value=told.lam_value,
            passes=told.passes,
            minibatches=told.minibatches,
            micro_batch=config.train.micro_batch,
            warmup=told.warmup,
            complete=told.complete,
            clip_value=told.clip_value,
            trunk=told.trunk,
            max_grad_norm=config.train.max_grad_norm,
            seed=config.run.seed,
        ),
        ranks=ranks,
        device=loaded.device,
        dtype=torch.float64 if config.model.dtype == "float64" else torch.float32,
    )


def value_loss(
    values: Float[Tensor, " N"],
    old: Float[Tensor, " N"],
    returns: Float[Tensor, " N"],
    clip_value: float,
) -> Float[Tensor, " N"]:
    """Half the squared error, without credit for moving farther than a limit from the old value.

        max((v - R)^2, (old + clamp(v - old, -clip_value, clip_value) - R)^2) / 2

    Args:
        values: of the critic being fitted.
        old: those that the advantages were made of.
        returns: what it is fitted to.
        clip_value: in units of reward; infinite: no limit.

    Example:
        >>> one, nothing = torch.tensor([1.0]), torch.tensor([0.0])
        >>> value_loss(one, nothing, one, 0.5), value_loss(one, nothing, one, math.inf)
        (tensor([0.1250]), tensor([0.]))
    """
    near = old + (values - old).clamp(-clip_value, clip_value)
    return 0.5 * torch.maximum((values - returns).square(), (near - returns).square())


def figures(
    values: Float[Tensor, "P G T"], returns: Float[Tensor, "P G T"], mask: Bool[Tensor, "P G T"]
) -> dict[str, float]:
    """What values say of returns, by the names of metrics; one without meaning is left out.

    Example:
        >>> returns, mask = torch.tensor([[[0.0, 2.0]]]), torch.tensor([[[True, True]]])
        >>> figures(returns / 2, returns, mask)["critic__explained_variance"]
        0.75
    """
    v, r = values[mask].double(), returns[mask].double()
    if not len(r):
        return {}
    found = {
        "critic__loss": float((v - r).square().mean()) / 2,
        "critic__value": float(v.mean()),
        "critic__return": float(r.mean()),
    }
    whole, rest = (float(x.var(correction=0)) for x in (r, r - v))
    return found | ({"critic__explained_variance": 1 - rest / whole} if whole > 0 else {})


def _laid(values: Tensor, asked: Tensor) -> Tensor:
    """Values of tokens asked about, where they stand in the responses; 0 elsewhere."""
    return torch.zeros(asked.shape, dtype=values.dtype).masked_scatter(asked, values)


def _completed(
    rows: Sequence[Row], batch: Batch, after: Tensor, fitting: Fitting
) -> tuple[Batch, int]:
    """Record and rows with cut responses earning what is expected after them; how many are cut."""
    assert batch.truncated is not None and batch.row_index is not None
    cut = batch.truncated & batch.mask.any(-1)
    expected = fitting.gamma * after.view(cut.shape)
    for p, g in cut.nonzero().tolist():
        rows[int(batch.row_index[p, g])]["reward"] = float(expected[p, g])
    rewards = torch.where(cut, expected.to(batch.rewards), batch.rewards)
    return replace(batch, rewards=rewards), int(cut.sum())


def _put(rows: Sequence[Row], batch: Batch, **columns: Tensor) -> None:
    """Write values of tokens into the rows; 0 for those that the batch leaves out."""
    assert batch.row_index is not None
    for name, value in columns.items():
        for row in rows:
            row[name] = torch.zeros(len(row["response_ids"]), dtype=value.dtype).numpy()
        for place, number in enumerate(batch.row_index.flatten().tolist()):
            if number >= 0:
                told = value.flatten(0, 1)[place, : len(rows[number][name])]
                rows[number][name] = told.clone().numpy()


def _gathered(rows: Sequence[Row], batch: Batch, name: str) -> Float[Tensor, "P G T"]:
    """A column of the rows where the record has its tokens."""
    assert batch.row_index is not None
    found = torch.zeros(batch.mask.shape, dtype=torch.float64)
    for place, number in enumerate(batch.row_index.flatten().tolist()):
        if number >= 0:
            told = torch.as_tensor(rows[number][name], dtype=torch.float64)
            found.view(-1, found.shape[-1])[place, : len(told)] = told
    return found
