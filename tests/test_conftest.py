"""The suite's own equipment: shapes are checked in the process that runs the tests."""

from importlib import import_module

import pytest
import torch

import windage.estimators

PROBE = """
from jaxtyping import Float
from torch import Tensor

def total(rewards: Float[Tensor, "P G"], *, scale: float = 1.0) -> Float[Tensor, " P"]:
    return scale * rewards.sum(-1)
"""


def test_a_wrong_shape_is_refused(request, tmp_path, monkeypatch):
    if request.config.getoption("--no-shapes"):
        pytest.skip("--no-shapes")
    (tmp_path / "shape_probe.py").write_text(PROBE)
    monkeypatch.setattr(
        windage.estimators, "__path__", [*windage.estimators.__path__, str(tmp_path)]
    )
    total = import_module("windage.estimators.shape_probe").total
    assert total(torch.ones(2, 3), scale=2).tolist() == [6.0, 6.0]
    with pytest.raises(Exception, match="rewards"):
        total(torch.ones(3))


def test_one_thread_a_worker():
    assert torch.get_num_threads() == 1
