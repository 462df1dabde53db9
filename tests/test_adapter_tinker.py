"""tinker's own client code, without its service: data, and the linearization of a custom loss.

Run by `make check-tinker`; skipped where tinker is not installed.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from adapter_cases import (
    GROUPS,
    NAMES,
    PROMPT,
    case,
    entry,
    gradient_of,
    largest,
    ours,
)
from checks import refused

from windage.estimators.catalogue import get
from windage.llm.adapters import tinker as adapter
from windage.llm.adapters.carry import refusal
from windage.llm.adapters.hosts import BOUND, TINKER, carried

pytest.importorskip("tinker")
pytestmark = pytest.mark.filterwarnings("default")

from tinker import types  # noqa: E402
from tinker.lib.public_interfaces.training_client import TrainingClient  # noqa: E402

TRIED = [n for n in NAMES if refusal(entry(n), TINKER) is None]


def data_of(c: Any) -> tuple[list[types.Datum], list[int]]:
    theirs = {
        "mask": c.mask.double(),
        "logprobs": c.behavior_logp,
        "proximal_logprobs": c.proximal_logp,
        "reference_logprobs": c.reference_logp,
    }
    lengths = (c.real.sum(1) + PROMPT - 1).tolist()
    found = []
    for row, n in enumerate(lengths):
        inputs = {
            name: torch.cat([torch.zeros(PROMPT - 1), value[row][: n - PROMPT + 1]]).float()
            for name, value in theirs.items()
        }
        tokens = c.ids[row].tolist()
        found.append(
            types.Datum(
                model_input=types.ModelInput.from_ints(tokens[:n]),
                loss_fn_inputs={"target_tokens": torch.tensor(tokens[1 : n + 1]), **inputs},
            )
        )
    return found, lengths


def linearized(c: Any, loss: Any) -> tuple[torch.Tensor, dict[str, float]]:
    """The gradient of the cross-entropy whose weights the client sends to the service."""
    data, lengths = data_of(c)
    logp = torch.nn.functional.pad(c.logp(torch.arange(len(GROUPS))), (PROMPT - 1, 0))
    told = [
        {"logprobs": types.TensorData.from_torch(row[:n].detach().float())}
        for row, n in zip(logp, lengths, strict=True)
    ]
    result = TrainingClient._compute_custom_loss(data, loss, SimpleNamespace(loss_fn_outputs=told))
    sent = [datum.loss_fn_inputs["weights"].to_torch() for datum in result.data]
    parts = [-(w * row[:n]).sum() for w, row, n in zip(sent, logp, lengths, strict=True)]
    torch.stack(parts).sum().backward()
    return gradient_of(c.model), result.metrics


def test_every_entry_that_the_hook_can_carry_is_tried():
    assert {*TRIED} == carried(TINKER)


@pytest.mark.parametrize("name", TRIED)
def test_the_gradient_that_tinker_would_take_is_ours(name):
    c, estimator = case(), entry(name)
    found, metrics = linearized(c, adapter.custom_loss(estimator, c.rewards.tolist(), GROUPS))
    apart = largest(found, ours(estimator, c))
    print(f"{name} {apart:.2e}")
    assert apart < BOUND
    assert set(metrics) == {"windage/silenced"}


def test_what_the_data_lack_is_refused():
    c = case()
    with refused("centered", "head tokens", "allowed"):
        linearized(c, adapter.custom_loss(get("centered"), c.rewards.tolist(), GROUPS))
