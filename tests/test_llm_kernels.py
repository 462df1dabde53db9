"""Liger's kernels in a model's layers: where they run, they agree; where they do not, one line.

`make check-liger` runs the kernels themselves on the CPU, by Triton's interpreter.
"""

from __future__ import annotations

import os
from importlib.util import find_spec

import numpy as np
import pytest
import tiny_language_model
import torch

from windage.estimators.errors import BadInput
from windage.llm import kernels, models

PRESENT = find_spec("liger_kernel") is not None and os.environ.get("TRITON_INTERPRET") == "1"
interpreted = pytest.mark.skipif(not PRESENT, reason="no liger-kernel by itself: make check-liger")
IDS = torch.arange(24).reshape(2, 12) % 20
PLACES = torch.tensor([0, 3, 7, 12, 20])
TARGETS = torch.tensor([4, 8, 1, 9, 2])
HEADS = torch.arange(10).reshape(5, 2)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny_language_model.make(tmp_path_factory.mktemp("kernels") / "m")


def gradients(policy):
    """Log-probabilities and head log-probabilities, and the gradient of a mixture of all."""
    policy.zero_grad()
    found, _ = policy(IDS, torch.ones_like(IDS), PLACES, TARGETS, HEADS, 0.7)
    mixed = (
        torch.linspace(-1, 2, 5) @ found.logp + found.entropy.sum() - 0.1 * found.head_logp.sum()
    )
    mixed.backward()
    grads = {n: p.grad.clone() for n, p in policy.named_parameters() if p.grad is not None}
    return found.logp.detach(), found.head_logp.detach(), grads


@interpreted
@pytest.mark.parametrize("lora", [None, models.Lora(rank=2)], ids=["whole", "lora"])
@pytest.mark.parametrize("checkpointing", [False, True], ids=["kept", "again"])
def test_the_kernels_give_the_numbers_and_gradients_of_the_plain_layers(
    folder, lora, checkpointing, liger_alone
):
    def loaded(liger):
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(3)
            one = models.load(folder, lora=lora, checkpointing=checkpointing, liger=liger)
        with torch.random.fork_rng(devices=[]), torch.no_grad():
            torch.manual_seed(4)
            for name, weight in one.policy.named_parameters():
                if "lora_B" in name:
                    weight.normal_(0, 0.1)
        return one.policy

    plain = gradients(loaded("off"))
    policy = loaded("on")
    layer = policy.base.get_decoder().layers[0]
    assert "Liger" in layer.mlp.forward.__qualname__
    logp, head, grads = gradients(policy)
    torch.testing.assert_close(logp, plain[0], atol=1e-5, rtol=0)
    torch.testing.assert_close(head, plain[1], atol=1e-5, rtol=0)
    assert grads.keys() == plain[2].keys()
    greatest = max(float(g.abs().max()) for g in plain[2].values())
    for name, gradient in grads.items():
        gap = float((gradient - plain[2][name]).abs().max())
        assert gap <= 1e-5 * greatest, (name, gap, greatest)


@interpreted
def test_kernels_that_change_the_numbers_are_refused(folder, liger_alone, monkeypatch):
    from liger_kernel.transformers import swiglu

    monkeypatch.setattr(
        swiglu.LigerSwiGLUMLP, "forward", lambda self, x: 1.5 * self.down_proj(self.up_proj(x))
    )
    with pytest.raises(BadInput, match="Liger's kernels change its log-probabilities by"):
        models.load(folder, liger="on")


@pytest.fixture
def liger_alone(monkeypatch):
    """Triton's interpreter made fit for Liger; transformers' own classes again after the test.

    The interpreter hands plain floats on as they are, where a compiled kernel gets a number of
    Triton's, and it has no rsqrt of CUDA's library.  Liger replaces classes for a whole process.
    """
    from liger_kernel.ops import rms_norm
    from transformers.models.llama import modeling_llama
    from triton import language
    from triton.runtime import interpreter

    convert = interpreter._implicit_cvt

    def number(given):
        if type(given) is not float:
            return convert(given)
        handle = interpreter.TensorHandle(np.array([given], np.float32), language.float32)
        return language.tensor(handle, language.float32)

    monkeypatch.setattr(interpreter, "_implicit_cvt", number)
    monkeypatch.setattr(rms_norm, "rsqrt", lambda x: 1 / language.sqrt(x))
    kept = dict(vars(modeling_llama))
    yield
    vars(modeling_llama).update(kept)


def test_auto_leaves_the_layers_alone_on_a_cpu(folder, monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    policy = models.load(folder).policy
    assert kernels.fuse(policy, "auto", "m") is False
    assert "Liger" not in policy.base.get_decoder().layers[0].mlp.forward.__qualname__


@pytest.mark.parametrize(
    ("present", "dtype", "interpret", "words"),
    [
        (
            False,
            "float32",
            "1",
            r"liger-kernel is not installed \(pip install 'windage.*'\)",
        ),
        (True, "float32", "0", "its kernels do not run on cpu"),
        (True, "float64", "1", "its kernels compute in float32"),
    ],
)
def test_on_is_refused_with_the_reason(folder, monkeypatch, present, dtype, interpret, words):
    monkeypatch.setattr(kernels, "find_spec", lambda name: present or None)
    monkeypatch.setenv("TRITON_INTERPRET", interpret)
    with pytest.raises(BadInput, match=f"liger is 'on', but {words}; allowed: 'auto' or 'off'"):
        models.load(folder, dtype=dtype, liger="on")


def test_a_choice_that_is_none_is_refused(folder):
    with pytest.raises(BadInput, match="liger"):
        models.load(folder, liger="yes")
