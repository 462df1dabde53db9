"""prime-rl: an estimator as the custom loss of its trainer.

    [trainer.loss]
    type = "custom"
    import_path = "windage.llm.adapters.prime_rl.loss"
    kwargs = { estimator = "icepop:high=4" }

The loss sees one sequence, its tokens in one row, and returns a sum, which the trainer divides by
the number of trained tokens of the step on all ranks.  So a mean over tokens is carried as it is.
Any other mean needs a factor of each sequence that the whole batch decides: the orchestrator puts
`token_weights` into the weights of the tokens, and `weighted` is the loss.  Advantages are the
orchestrator's; where it computes others than a group's rewards minus their mean, say which.

Differences:
    1. The count of trained tokens is prime-rl's: it leaves out sequences that it filtered.
"""

from __future__ import annotations

from dataclasses import replace
from importlib import import_module
from types import SimpleNamespace
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from windage.estimators.aggregation import token_mean
from windage.estimators.batch import Batch
from windage.estimators.errors import BadInput
from windage.estimators.estimator import Estimator, surrogate
from windage.estimators.member import use
from windage.llm.adapters.carry import Host, named, refuse
from windage.llm.adapters.terms import loss_coefficients

MEAN = "group_mean"


def host_of(*, advantage: str = MEAN, weighted: bool = False) -> Host:
    """prime-rl with the advantages that its orchestrator is told to compute.

    Args:
        advantage: the member of `advantage` that does the same.
        weighted: the tokens carry weights.

    Example:
        >>> from windage.llm.adapters.carry import refusal
        >>> refusal(named("icepop"), host_of()) is None
        True
    """
    return Host(
        name="prime-rl",
        early=frozenset(),
        late=frozenset({"logp", "behavior_logp"}),
        advantages=frozenset({advantage}),
        averages=None if weighted else frozenset({token_mean.__name__}),
    )


def loss(inputs: Any, *, estimator: str, advantage: str = MEAN) -> Any:
    """A sequence's sum of -stop_gradient(C) log pi, for an entry that averages over tokens.

    Args:
        inputs: prime-rl's `LossInputs`.
        estimator: `NAME:key=value,...`.
        advantage: what the orchestrator computes, as a member of `windage.estimators.advantage`.

    Returns:
        prime-rl's `LossOutputs`; where prime-rl is not installed, a record with the same names.

    Raises:
        BadInput: an entry that a loss of one sequence cannot carry.
    """
    return _sum(inputs, named(estimator), host_of(advantage=advantage), None)


def weighted(inputs: Any, *, estimator: str, advantage: str = MEAN) -> Any:
    """The same for any entry; the tokens carry `token_weights`.

    Raises:
        BadInput: the tokens carry no weights.
    """
    weights = getattr(inputs, "loss_weights", None)
    if weights is None:
        raise BadInput("the sequence has no loss_weights; allowed: those of token_weights")
    return _sum(inputs, named(estimator), host_of(advantage=advantage, weighted=True), weights)


def token_weights(estimator: Estimator, batch: Batch) -> Float[Tensor, "P G"]:
    """What a token of each response must weigh for prime-rl's normalizer to give the entry's mean.

        weight[p, g] = scale[p, g] * trained tokens of the batch

    Args:
        estimator: read for its aggregation.
        batch: the step's responses on all ranks; rewards and mask suffice.

    Example:
        >>> batch = Batch.from_rows([1.0, 0.0], "aa", mask=[[1], [1, 1, 1]])
        >>> token_weights(named("rloo"), batch).tolist()
        [[2.0, 2.0]]
    """
    scale = estimator.aggregation(batch.lengths, batch.get("present"))
    return scale * batch.lengths.sum()


def _sum(inputs: Any, estimator: Estimator, host: Host, weights: Tensor | None) -> Any:
    refuse(estimator, host)
    logp = inputs.trainer_logprobs.unsqueeze(0)
    mask = inputs.loss_mask.unsqueeze(0)
    own = loss_coefficients(
        replace(estimator, aggregation=use(token_mean)),
        host,
        {"logp": logp, "behavior_logp": inputs.inference_logprobs.unsqueeze(0)},
        inputs.advantages.unsqueeze(0),
        mask,
        tokens=1,
        responses=1,
    )
    if weights is not None:
        own = torch.where(mask, own * weights, 0.0)
    silent = ((own == 0) & mask).sum() / mask.sum().clamp(min=1)
    return _outputs(surrogate(own, logp), {"windage_silenced": silent})


def _outputs(total: Tensor, metrics: dict[str, Tensor]) -> Any:
    """prime-rl's own record where it is installed, since its trainer may check the type."""
    try:
        record = import_module("prime_rl.trainer.rl.loss").LossOutputs
    except ImportError:
        record = SimpleNamespace
    return record(loss=total, metrics=metrics)
