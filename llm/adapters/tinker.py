"""tinker: an estimator as the custom loss of `forward_backward_custom`.

    loss = custom_loss(named("gspo"), rewards, group_ids)
    training_client.forward_backward_custom(data, loss)

A call holds a whole optimizer batch, so what couples responses needs no second hook.  The client
turns the loss into weights of a cross-entropy, whose gradient is the same.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any

import torch
from torch import Tensor

from windage.estimators.errors import BadInput
from windage.estimators.estimator import Estimator, surrogate
from windage.llm.adapters.carry import Host, refuse
from windage.llm.adapters.terms import batch_of, groups_of, whole_coefficients

# Inputs of a datum by the field of `Batch`; the names are the cookbook's.
INPUTS = {
    "behavior_logp": "logprobs",
    "proximal_logp": "proximal_logprobs",
    "reference_logp": "reference_logprobs",
}
Loss = Callable[[Sequence[Any], Sequence[Tensor]], tuple[Tensor, dict[str, float]]]


def host_of(inputs: Sequence[str]) -> Host:
    """What data with these `loss_fn_inputs` tell the loss.

    Example:
        >>> sorted(host_of(["target_tokens", "logprobs", "mask"]).late)
        ['behavior_logp', 'logp']
    """
    known = {name for name, theirs in INPUTS.items() if theirs in inputs}
    return Host(
        name="a tinker datum with " + ", ".join(sorted(inputs)),
        early=frozenset({"rewards", "outcomes"}),
        late=frozenset({"logp", *known}),
        whole=True,
    )


def custom_loss(
    estimator: Estimator, rewards: Sequence[float], group_ids: Sequence[Hashable]
) -> Loss:
    """A loss over the data of one optimizer batch.

    Args:
        estimator: of the catalogue, or composed.
        rewards: one a datum, in the order of the data.
        group_ids: the prompt of each datum.

    Returns:
        A function of data and their log-probabilities; a datum's `loss_fn_inputs` need `mask` (1 on
        the tokens that the policy chose) and `logprobs` of the sampler, one a target token.

    Raises:
        BadInput: when called, if the data lack what the estimator needs; names it.
    """

    def loss(data: Sequence[Any], logprobs: Sequence[Tensor]) -> tuple[Tensor, dict[str, float]]:
        if not len(data) == len(logprobs) == len(rewards) == len(group_ids):
            raise BadInput(
                f"{len(data)} data, {len(rewards)} rewards and {len(group_ids)} group ids; "
                "allowed: one each a datum"
            )
        inputs = [datum.loss_fn_inputs for datum in data]
        host = host_of([n for n in inputs[0] if all(n in one for one in inputs)])
        refuse(estimator, host)
        policies = {"logp": padded([one.detach() for one in logprobs])}
        for name, theirs in INPUTS.items():
            if name in host.late:
                policies[name] = padded([_tensor(one[theirs]) for one in inputs])
        mask = padded([_tensor(_masked(one)) for one in inputs]) > 0
        groups = groups_of(list(group_ids))
        batch = batch_of(torch.tensor(rewards, dtype=torch.float64), mask, groups, **policies)
        own = whole_coefficients(estimator, batch, groups)
        parts = [surrogate(c[: len(one)], one) for c, one in zip(own, logprobs, strict=True)]
        silent = float(((own == 0) & mask).sum() / mask.sum().clamp(min=1))
        return torch.stack(parts).sum(), {"windage/silenced": silent}

    return loss


def _masked(inputs: Any) -> Any:
    if "mask" not in inputs:
        raise BadInput(f"a datum has the inputs {', '.join(inputs)}; allowed: with a mask as well")
    return inputs["mask"]


def _tensor(value: Any) -> Tensor:
    """A tensor, or tinker's TensorData."""
    return value if isinstance(value, Tensor) else torch.as_tensor(value.data)


def padded(rows: Sequence[Tensor]) -> Tensor:
    """Rows of different lengths as one rectangle, zeros at the end."""
    return torch.nn.utils.rnn.pad_sequence([row.double() for row in rows], batch_first=True)
