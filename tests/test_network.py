"""The shared-parameter policy: against loops and autograd, and its sampler against its law."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from windage.estimators.catalogue import get
from windage.estimators.estimator import coefficients
from windage.toy.network import Network, batch_of, nucleus, slope
from windage.toy.sums import Sums, generators, whole

TASK = Sums()
NETWORK = Network(task=TASK, hidden=16)


def start(seeds: int = 2) -> Tensor:
    return NETWORK.initial(generators(range(seeds))).double()


def plain_logits(parameters: Tensor, prompt: list[int], tokens: list[int]) -> Tensor:
    """Logits of one response of one seed, written as the formula is."""
    w = {name: value[0] for name, value in NETWORK.unpack(parameters.unsqueeze(0)).items()}
    rows = []
    for t in range(TASK.horizon):
        pre = w["b"][t] + sum(w["A"][k, x, t] for k, x in enumerate(prompt))
        pre = pre + sum((w["U"][s, tokens[s]] for s in range(t)), torch.zeros(()))
        hidden = torch.relu(torch.relu(pre) @ w["W"] + w["c"][0])
        rows.append(hidden @ w["O"] + w["o"][0])
    return torch.stack(rows)


def drawn(parameters: Tensor, number: int = 4) -> tuple[Tensor, Tensor, Tensor]:
    among = generators([9, 10])
    prompts = TASK.prompts(whole(among, TASK.number, number))
    return prompts, *NETWORK.sample(parameters, prompts, among)


def of_tokens(laws: Tensor, tokens: Tensor) -> Tensor:
    """Log-probabilities of the tokens that were drawn, 0 after the stop."""
    chosen = laws.gather(-1, tokens.unsqueeze(-1)).squeeze(-1)
    return torch.where(TASK.mask(tokens), chosen, 0.0)


def test_forward_and_backward_equal_a_loop_and_autograd() -> None:
    parameters = start()
    prompts, tokens, _ = drawn(parameters)
    tape = NETWORK.forward(parameters, prompts, tokens)
    pull = torch.randn(tape.logp.shape, dtype=torch.float64, generator=generators([1])[0])
    leaf = parameters.clone().requires_grad_()
    logits = torch.stack(
        [
            torch.stack(
                [
                    plain_logits(leaf[s], prompts[s, b].tolist(), tokens[s, b].tolist())
                    for b in range(4)
                ]
            )
            for s in range(2)
        ]
    )
    torch.testing.assert_close(tape.logp, logits.log_softmax(-1).detach(), rtol=0, atol=1e-12)
    (logits * pull).sum().backward()
    torch.testing.assert_close(
        NETWORK.backward(parameters, tape, pull), leaf.grad, rtol=1e-12, atol=1e-12
    )


@pytest.mark.parametrize("name", ["rloo", "token_tis", "topr", "centered_tis", "grpo"])
def test_an_update_is_the_gradient_of_the_surrogate(name: str) -> None:
    parameters, sampler = start(), start() * 1.1
    among = generators([9, 10])
    prompts = TASK.prompts(whole(among, TASK.number, 3)).repeat_interleave(2, 1)
    tokens, head = NETWORK.sample(sampler, prompts, among)
    rewards = torch.tensor([1.0, -1, 1, 1, -1, 1]).double().expand(2, -1)
    tape = NETWORK.forward(parameters, prompts, tokens)
    recorded = of_tokens(head, tokens)
    batch = batch_of(tape, tokens, recorded, rewards, 3, TASK, head_behavior_logp=head)
    found = coefficients(get(name), batch.validate())
    leaf = tape.logp.clone().requires_grad_()
    logp = leaf.log_softmax(-1)
    own = found.own.flatten(1, 2)
    surrogate = (own * logp.gather(-1, tokens.unsqueeze(-1)).squeeze(-1)).sum()
    heads = None if found.head is None else found.head.flatten(1, 2)
    if heads is not None:
        surrogate = surrogate + (heads * logp).sum()
    (expected,) = torch.autograd.grad(surrogate, leaf)
    torch.testing.assert_close(
        slope(own, heads, tokens, tape.logp), expected, rtol=1e-12, atol=1e-14
    )


def test_the_laws_of_a_draw_are_those_of_the_sampler() -> None:
    parameters = start()
    prompts, tokens, laws = drawn(parameters, 50)
    expected = NETWORK.forward(parameters, prompts, tokens).logp
    torch.testing.assert_close(laws, expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("top_p", [1.0, 0.6])
def test_first_tokens_are_drawn_by_their_law(top_p: float) -> None:
    """Pearson's statistic with 9 degrees of freedom stays under its 1 - 1e-6 quantile, 45.1."""
    parameters, number = start(1), 20_000
    prompts = torch.tensor([1, 2, 3, 4]).expand(1, number, 4)
    tokens, laws = NETWORK.sample(parameters, prompts, generators([2]), top_p=top_p)
    law = nucleus(NETWORK.forward(parameters, prompts[:, :1], tokens[:, :1]).logp[0, 0, 0], top_p)
    counts = torch.bincount(tokens[0, :, 0], minlength=TASK.vocab)
    expected = number * law.exp()
    inside = expected > 0
    assert int(counts[~inside].sum()) == 0
    statistic = ((counts - expected).square() / expected)[inside].sum()
    assert float(statistic) < 45.1
    torch.testing.assert_close(laws[0, 0, 0], law)


def test_nucleus_keeps_the_fewest_tokens_that_reach_the_mass() -> None:
    logp = torch.tensor([0.5, 0.3, 0.15, 0.05]).log()
    kept = nucleus(logp, 0.8).exp()
    torch.testing.assert_close(kept, torch.tensor([0.625, 0.375, 0.0, 0.0]))
