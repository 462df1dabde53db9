"""What other frameworks claim, as formulas: each is the gradient of a published objective."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest
import torch

from windage.analysis.audit.loss import tried
from windage.analysis.audit.samples import judged_samples
from windage.estimators.aggregation import sequence_mean, token_mean
from windage.estimators.correction import token, trajectory
from windage.estimators.maps import gamma_weight, soft_gate, tv_mask
from windage.estimators.penalty import loss_k3, loss_k3_weighted

PEERS = Path(__file__).parents[1] / "benchmarks" / "peers"


def load(name):
    spec = importlib.util.spec_from_file_location(f"peers_{name}", PEERS / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


claimed, table = load("claimed"), load("table")


def mean_over_tokens(values, mask):
    return torch.where(mask, values, 0.0).sum() / mask.sum()


def either(first, a, b):
    return torch.where(first, *torch.tensor([a, b], dtype=torch.float64))


def gate(logp, behavior_logp, advantages, mask):
    ratio = (logp - behavior_logp).exp()
    a = advantages.unsqueeze(1)
    tau = either(a > 0, 1.0, 1.05)
    value = torch.where(mask, 4 / tau * torch.sigmoid(tau * (ratio - 1)) * a, 0.0)
    return -(value.sum(1) / mask.sum(1)).mean()


def gamma(logp, behavior_logp, advantages, mask):
    total = torch.where(mask, logp - behavior_logp, 0.0).sum(1, keepdim=True).detach()
    a = advantages.unsqueeze(1)
    k, rate = either(a >= 0, 2.0, 3.0), either(a >= 0, 3.0, 2.0)
    weight = torch.exp(rate) * total.exp() ** k * torch.exp(-rate * total.exp())
    return -mean_over_tokens(weight * a * logp, mask)


def geometric(logp, behavior_logp, advantages, mask):
    x, a = torch.where(mask, logp - behavior_logp, 0.0), advantages.unsqueeze(1)
    held = x.clamp(-0.2, 0.2)
    least = torch.where(a > 0, torch.minimum(x, held), torch.maximum(x, held))
    ratio = (least.sum(1) / mask.sum(1)).exp()
    return -(advantages * ratio).mean()


def dro(logp, behavior_logp, advantages, mask):
    x = logp - behavior_logp
    return -mean_over_tokens(logp * advantages.unsqueeze(1) - 0.25 * x.square(), mask)


def total_variation(logp, behavior_logp, advantages, mask):
    p, q, a = logp.exp(), behavior_logp.exp(), advantages.unsqueeze(1)
    inside = torch.where(a > 0, p - q <= 0.2, q - p <= 0.2)
    weight = (logp - behavior_logp).exp().clamp(max=20.0)
    return -mean_over_tokens((weight * inside).detach() * a * logp, mask)


def ppo(logp, behavior_logp, advantages, mask):
    ratio, a = (logp - behavior_logp).exp(), advantages.unsqueeze(1)
    return -mean_over_tokens(torch.minimum(ratio * a, ratio.clamp(0.8, 1.2) * a), mask)


def with_k3(logp, behavior_logp, advantages, mask):
    x = logp - behavior_logp
    k3 = mean_over_tokens((-x).exp() - 1 + x, mask)
    return ppo(logp, behavior_logp, advantages, mask) + 0.1 * k3


def with_weighted_k3(logp, behavior_logp, advantages, mask):
    x = logp - behavior_logp
    k3 = mean_over_tokens(x.exp() * ((-x).exp() - 1 + x), mask)
    return ppo(logp, behavior_logp, advantages, mask) + 0.1 * k3


def without_far_rows(logp, behavior_logp, advantages, mask):
    x = torch.where(mask, logp - behavior_logp, 0.0).detach()
    keep = (advantages >= 0) | (-x.sum(1) / mask.sum(1) <= 0.1)
    ratio, a = (logp - behavior_logp).exp(), advantages.unsqueeze(1)
    surrogate = torch.minimum(ratio * a, ratio.clamp(0.8, 1.2) * a) * keep.unsqueeze(1)
    return -mean_over_tokens(surrogate, mask)


def largest_covariance(logp, behavior_logp, advantages, mask):
    x, a = logp - behavior_logp, advantages.unsqueeze(1).expand_as(logp)
    covariance = ((a - a[mask].mean()) * (logp - logp[mask].mean()))[mask]
    first = torch.zeros_like(covariance).index_fill(0, covariance.topk(1).indices, 1.0)
    top = torch.zeros_like(logp).masked_scatter(mask, first.detach())
    return -mean_over_tokens(a * x.exp() - 0.1 * top * x.abs(), mask)


PAIRS = {
    "SAPO": (gate, claimed.composed(token, soft_gate, sequence_mean)),
    "VESPO": (gamma, claimed.composed(trajectory, gamma_weight, token_mean)),
    "GMPO": (geometric, claimed.geometric_mean(clip_low=0.2, clip_high=0.2)),
    "DRO": (dro, claimed.quadratic(beta=0.5)),
    "DPPO": (
        total_variation,
        claimed.composed(token, tv_mask, limit=0.2, cap=20.0),
    ),
    "k3": (with_k3, claimed.pulled(loss_k3, 0.1, claimed.PPO)),
    "weighted k3": (with_weighted_k3, claimed.pulled(loss_k3_weighted, 0.1, claimed.PPO)),
    "off-policy rows": (without_far_rows, claimed.without_far_rows(0.1)),
    "KL-Cov": (largest_covariance, claimed.largest_covariances(share=0.0002, coefficient=0.1)),
}


@pytest.mark.parametrize("name", PAIRS)
def test_claims_are_gradients_of_their_objectives(name):
    objective, formula = PAIRS[name]
    loss = tried(name, objective, "plain")
    seen = 0
    for s in judged_samples(1)[::5]:
        s = s.filled(0.0)
        found, wanted = loss.coefficients(s), formula(s)
        on_mask = torch.where(s.mask, found, 0.0)
        assert torch.allclose(on_mask, wanted, rtol=1e-9, atol=1e-12), s.name
        seen += bool((wanted != 0).any())
    assert seen > 20


@pytest.mark.parametrize(
    ("pool", "kept"),
    [
        ("token", [[1, 0], [1, 1]]),
        ("sum", [[0, 0], [0, 0]]),
        ("mean", [[0, 0], [1, 1]]),
        ("max", [[0, 0], [1, 1]]),
    ],
)
def test_rejection_pools_over_the_response(pool, kept):
    from windage.analysis.audit.samples import sample

    s = sample("two", [[0.0, 1.0], [0.4, 0.4]], [4.0, 4.0])
    found = claimed.rejected(lambda x: x.square() / 2, 0.1, pool)(s)
    assert found.tolist() == kept


def test_the_page_is_what_the_measured_rows_say():
    page = PEERS.parents[1] / "docs" / "peers.md"
    assert page.read_text() == table.render()


def test_known_deviations_are_found():
    rows = {
        path.stem.removeprefix("peers-"): json.loads(path.read_text())
        for path in table.RESULTS.glob("peers-*.json")
    }
    assert set(rows) == {"trl", "verl"}
    by_name = {k: {r["name"]: r for r in v["losses"]} for k, v in rows.items()}
    assert not by_name["trl"]["cispo"]["holds"] and by_name["trl"]["cispo, epsilon_high=5"]["holds"]
    assert not by_name["verl"]["bypass_mode reinforce, token_k1 0.5_4.0"]["holds"]
    counted, uncounted = (
        by_name["verl"][f"bypass_mode reinforce, token_k1 0.25_4.0, {words}"]["holds"]
        for words in ("whole-batch counts", "no counts given")
    )
    assert counted and not uncounted


def test_a_deviation_names_every_fault():
    row = {
        "witness": "one token",
        "partition": 0.5,
        "padding": None,
        "repeatable": False,
        "raised": "3 of 4 inputs: ValueError",
    }
    words = table.deviation(row)
    for part in ("one token", "0.5", "NaN", "twice", "ValueError"):
        assert part in words
    clean = {**row, "witness": "", "partition": 0.0, "padding": 0.0, "repeatable": True}
    assert table.deviation({**clean, "raised": ""}) == "none"
