"""The chunked pass against log_softmax, and score centering through its head."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from checks import assert_apart, assert_close, refused
from hypothesis import given
from hypothesis import strategies as st
from problem_strategies import typical
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from windage.estimators.catalogue import get
from windage.estimators.centering import top_k
from windage.estimators.estimator import coefficients, surrogate
from windage.estimators.member import use
from windage.llm.logprobs import LogProbs, log_probs
from windage.toy.exact.plan import exact
from windage.toy.exact.tuples import Responses, every_tuple

FORMS = (
    {},
    {"temperature": 0.7},
    {"scale": 0.5, "softcap": 3.0},
    {"temperature": 1.3, "scale": 2.0, "softcap": 5.0},
)


def drawn(n: int, d: int, v: int, k: int, dtype: torch.dtype, seed: int = 0) -> dict[str, Tensor]:
    """Hidden states, an output layer, targets, and heads of which some are short."""
    g = torch.Generator().manual_seed(seed)
    ids = torch.stack([torch.randperm(v, generator=g)[:k] for _ in range(n)])
    ids[::3, -1] = -1
    return {
        "hidden": torch.randn(n, d, generator=g).to(dtype).requires_grad_(),
        "weight": torch.randn(v, d, generator=g).to(dtype).requires_grad_(),
        "targets": torch.randint(v, (n,), generator=g),
        "head_ids": ids,
        "bias": torch.randn(v, generator=g).to(dtype).requires_grad_(),
    }


def plain(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    head_ids: Tensor,
    bias: Tensor,
    temperature: float = 1.0,
    scale: float = 1.0,
    softcap: float | None = None,
) -> LogProbs:
    """The same by log_softmax."""
    z = scale * (hidden @ weight.T + bias)
    z = z if softcap is None else softcap * torch.tanh(z / softcap)
    logp = (z / temperature).log_softmax(-1)
    head = logp.gather(1, head_ids.clamp(min=0))
    return LogProbs(
        logp=logp.gather(1, targets.unsqueeze(1)).squeeze(1),
        entropy=-(logp.exp() * logp).sum(-1),
        probability_square=(2 * logp).exp().sum(-1),
        head_logp=torch.where(head_ids < 0, -torch.inf, head),
    )


def outputs(found: LogProbs) -> list[Tensor]:
    return [found.logp, found.entropy, found.probability_square, found.head_logp]


def gradients(found: LogProbs, given: dict[str, Tensor], which: tuple[int, ...]) -> list[Tensor]:
    """Of a random mixture of some outputs, by states, matrix and bias."""
    g = torch.Generator().manual_seed(1)
    loss = torch.zeros(())
    for number, value in enumerate(outputs(found)):
        factor = torch.randn(value.shape, generator=g).to(value.dtype)
        if number in which:
            loss = loss + torch.where(value.isfinite(), factor * value, 0.0).sum()
    return list(torch.autograd.grad(loss, [given[n] for n in ("hidden", "weight", "bias")]))


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(("dtype", "relative"), [(torch.float64, 1e-10), (torch.float32, 1e-6)])
def test_values_and_gradients_are_those_of_log_softmax(form, dtype, relative):
    given = drawn(37, 8, 101, 5, dtype)
    ours = log_probs(**given, **form, tokens=10, vocabulary=30)
    exact_ = {k: v.detach().double() if v.is_floating_point() else v for k, v in given.items()}
    exact_ = {k: v.requires_grad_() if v.is_floating_point() else v for k, v in exact_.items()}
    theirs = plain(**exact_, **form)
    for a, b in zip(outputs(ours), outputs(theirs), strict=True):
        assert a.dtype == dtype
        assert torch.equal(a == -torch.inf, b == -torch.inf)
        assert_close(a.detach().nan_to_num(neginf=0), b.nan_to_num(neginf=0), relative=relative)
    for which in ((0,), (1,), (2,), (3,), (0, 1, 2, 3)):
        found = gradients(ours_again(given, form), given, which)
        expected = gradients(plain(**exact_, **form), exact_, which)
        slack = 3 if which == (2,) else 1  # where p is near 1, p - sum of p^2 cancels
        for a, b in zip(found, expected, strict=True):
            assert_close(a, b, relative=slack * relative)


def ours_again(given: dict[str, Tensor], form: dict[str, float]) -> LogProbs:
    return log_probs(**given, **form, tokens=10, vocabulary=30)


@pytest.mark.parametrize("form", FORMS[1::2])
def test_gradcheck(form):
    given = drawn(4, 2, 5, 3, torch.float64)
    names = ("hidden", "weight", "bias")

    def call(*values: Tensor) -> list[Tensor]:
        changed = {**given, **dict(zip(names, values, strict=True))}
        found = outputs(log_probs(**changed, **form, tokens=3, vocabulary=2))
        return [torch.where(value.isfinite(), value, 0.0) for value in found]

    assert torch.autograd.gradcheck(call, [given[n] for n in names])


@given(st.integers(1, 12), st.integers(1, 12), st.integers(0, 9), st.integers(1, 9))
def test_the_size_of_the_pieces_does_not_matter(tokens, vocabulary, n, v):
    given = drawn(n, 2, v, 1, torch.float64) if n else empty(v)
    whole = log_probs(**given, tokens=100, vocabulary=100)
    pieces = log_probs(**given, tokens=tokens, vocabulary=vocabulary)
    for a, b in zip(outputs(pieces), outputs(whole), strict=True):
        assert a.shape == b.shape
        assert_close(a.detach().nan_to_num(neginf=0), b.detach().nan_to_num(neginf=0))


def empty(v: int) -> dict[str, Tensor]:
    none = drawn(1, 2, v, 1, torch.float64)
    return {k: x if k in ("weight", "bias") else x[:0] for k, x in none.items()}


def test_half_precision_is_summed_in_single():
    given = drawn(64, 32, 3000, 4, torch.bfloat16)
    wide = {
        k: v.detach().double().requires_grad_() if v.is_floating_point() else v
        for k, v in given.items()
    }
    ours, theirs = log_probs(**given), plain(**wide)
    for a, b in zip(outputs(ours), outputs(theirs), strict=True):
        assert a.dtype == torch.float32
        assert_close(a.detach().nan_to_num(neginf=0), b.nan_to_num(neginf=0), relative=2e-6)
    found = gradients(ours, given, (0, 1, 2, 3))
    expected = gradients(plain(**wide), wide, (0, 1, 2, 3))
    for a, b in zip(found, expected, strict=True):
        assert a.dtype == torch.bfloat16
        assert_close(a, b, relative=2**-8)
    naive = plain(**{k: v.detach() for k, v in given.items()})
    assert_apart(naive.logp.double(), theirs.logp.detach(), at_least=1e-3)


def test_autocast_does_not_lower_the_precision():
    given = drawn(16, 8, 50, 2, torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        inside = log_probs(**given)
        (by_inside,) = torch.autograd.grad(inside.logp.sum(), given["hidden"])
    (by_outside,) = torch.autograd.grad(log_probs(**given).logp.sum(), given["hidden"])
    assert torch.equal(inside.logp, log_probs(**given).logp)
    assert torch.equal(by_inside, by_outside)


def test_a_tied_matrix_gets_the_gradient_of_both_its_uses():
    g = torch.Generator().manual_seed(0)
    table = torch.randn(9, 4, generator=g, dtype=torch.float64).requires_grad_()
    inputs, targets = torch.randint(9, (2, 6), generator=g)
    ours = log_probs(table[inputs].tanh(), table, targets, vocabulary=4, tokens=2).logp.sum()
    theirs = (table[inputs].tanh() @ table.T).log_softmax(-1)[torch.arange(6), targets].sum()
    (found,), (expected,) = (torch.autograd.grad(x, table) for x in (ours, theirs))
    assert_close(found, expected)


def test_a_frozen_matrix_needs_no_gradient():
    given = drawn(5, 3, 8, 2, torch.float64)
    frozen = given | {"weight": given["weight"].detach(), "bias": None}
    log_probs(**frozen).logp.sum().backward()
    assert given["hidden"].grad is not None and frozen["weight"].grad is None


@pytest.mark.parametrize("size", [1e4, -1e4])
def test_extreme_logits_stay_finite(size):
    hidden = torch.tensor([[size]], requires_grad=True)
    weight = torch.tensor([[1.0], [0.5], [-1.0]], requires_grad=True)
    found = log_probs(hidden, weight, torch.tensor([1]), torch.tensor([[0, 2]]), vocabulary=1)
    (found.logp + found.entropy + found.probability_square).sum().backward()
    for value in (*outputs(found), hidden.grad, weight.grad):
        assert value.isfinite().all()
    assert found.entropy.item() == 0 and found.probability_square.item() == 1


def test_an_id_outside_the_vocabulary_is_not_a_number():
    found = log_probs(torch.zeros(2, 1), torch.zeros(3, 1), torch.tensor([3, 0]))
    assert found.logp.isnan().tolist() == [True, False]
    ids = torch.tensor([[3], [-1]])
    head = log_probs(torch.zeros(2, 1), torch.zeros(3, 1), torch.tensor([0, 0]), ids).head_logp
    assert head[0].isnan() and head[1] == -torch.inf


@pytest.mark.parametrize("setting", ["temperature", "scale", "softcap", "tokens", "vocabulary"])
def test_settings_are_above_0(setting):
    with refused(f"{setting} is 0", "above 0"):
        log_probs(torch.zeros(1, 1), torch.zeros(2, 1), torch.tensor([0]), **{setting: 0})


def peak(call) -> int:
    """Most bytes of tensors that were alive at once, as torch's allocator counts them."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
        call()
    found = [e for e in seen.profiler.kineto_results.events() if e.name() == "[memory]"]
    live = most = 0
    for event in sorted(found, key=lambda event: event.start_ns()):
        live += event.nbytes()
        most = max(most, live)
    return most


def test_memory_is_a_fraction_of_log_softmax_and_does_not_grow_with_the_product():
    def bytes_of(n: int, v: int, **pieces: int) -> int:
        given = drawn(n, 4, v, 1, torch.float32)
        return peak(lambda: log_probs(**given, **pieces).logp.sum().backward())

    n, v = 384, 49_152
    given = drawn(n, 4, v, 1, torch.float32)

    def whole() -> None:
        logp = (given["hidden"] @ given["weight"].T).log_softmax(-1)
        logp.gather(1, given["targets"].unsqueeze(1)).sum().backward()

    theirs, ours = peak(whole), bytes_of(n, v)
    assert theirs > 2.9 * 4 * n * v and ours < theirs / 4
    small = [bytes_of(n, v, tokens=32, vocabulary=64) for n, v in ((64, 256), (256, 1024))]
    assert small[1] - small[0] < 4 * 256 * 1024 / 4


# Centering through the head of the pass: with the identity as output matrix the hidden state of a
# prefix is its logits, so a gradient by hidden states is the tabular one.


def through_the_pass(name: str, k: int | None, group: int) -> tuple[Tensor, Tensor]:
    """Minus the gradient of the surrogate by hidden states, and the tabular estimate."""
    problem = typical()
    vocab = problem.tree.vocab
    estimator = get(name)
    if k is not None:
        estimator = replace(estimator, centering=use(top_k))
    table = Responses(problem)
    ((index, _),) = every_tuple(problem, 2)
    index = index[group : group + 1]
    real = table.real[index][0, 0]
    hidden = problem.logits[0].clone().requires_grad_()
    at, targets = table.prefix[index][0, 0][real], table.parameter[index][0, 0][real] % vocab
    order = problem.behavior_logp[0].argsort(-1, descending=True)[at][:, :k]
    ids = order if k is None or k == vocab else torch.nn.functional.pad(order, (0, 1), value=-1)
    found = log_probs(hidden[at], torch.eye(vocab, dtype=torch.float64), targets, ids, vocabulary=2)

    def placed(value: Tensor, nothing: float = 0.0) -> Tensor:
        shape = (1, 1, *real.shape, *value.shape[1:])
        out = torch.full(shape, nothing, dtype=torch.float64)
        out[0, 0][real] = value
        return out

    sampler = problem.behavior_logp[0][at].gather(1, ids.clamp(min=0))
    batch = table.batch(index, head=False)
    batch = replace(
        batch,
        logp=placed(found.logp.detach()),
        head_ids=placed(ids.double()).long(),
        head_logp=placed(found.head_logp.detach()),
        head_behavior_logp=placed(torch.where(ids < 0, -torch.inf, sampler)),
    )
    batch = replace(
        batch, **{n: getattr(batch, n)[0] for n in FIELDS if getattr(batch, n) is not None}
    )
    c = coefficients(estimator, batch.validate())
    own, head = c.own[0][real], c.head[0][real]
    loss = surrogate(own, found.logp) + surrogate(head, found.head_logp)
    (by_hidden,) = torch.autograd.grad(loss, hidden)
    weight = torch.zeros((1, 1, *hidden.shape), dtype=torch.float64)
    weight[0, 0].index_put_((at, targets), own, accumulate=True)
    full = torch.zeros((len(at), vocab), dtype=torch.float64)
    full.scatter_add_(1, ids.clamp(min=0), torch.where(ids < 0, 0.0, head))
    weight[0, 0].index_add_(0, at, full)
    pi = problem.logp[0].exp()
    tabular = weight[0, 0] - weight[0, 0].sum(-1, keepdim=True) * pi
    return -by_hidden, tabular


FIELDS = (
    "rewards",
    "mask",
    "logp",
    "behavior_logp",
    "head_ids",
    "head_logp",
    "head_behavior_logp",
    "proximal_logp",
    "probability_square",
)


@pytest.mark.parametrize("name", ["centered", "centered_tis", "centered_mask"])
@pytest.mark.parametrize("k", [None, 1, 2])
def test_own_and_head_tokens_give_the_tabular_gradient(name, k):
    for group in range(0, 225, 16):
        found, expected = through_the_pass(name, k, group)
        assert_close(found, expected)


@pytest.mark.parametrize("name", ["centered", "centered_tis", "starting_point"])
def test_the_mean_over_all_groups_is_that_of_the_exact_engine(name):
    problem = typical(horizon=2)
    estimator = get(name, **({"length": 2.0} if name == "starting_point" else {}))
    table, vocab = Responses(problem), problem.tree.vocab
    ((index, chance),) = every_tuple(problem, 2)
    hidden = problem.logits[0].clone().requires_grad_()
    c = coefficients(estimator, table.batch(index, head=True))
    real = table.real[index]
    at, targets = table.prefix[index][real], table.parameter[index][real] % vocab
    every = torch.arange(vocab).expand(len(at), vocab)
    found = log_probs(hidden[at], torch.eye(vocab, dtype=torch.float64), targets, every)
    weight = chance.view(-1, 1, 1, 1).expand(real.shape)[real]
    loss = surrogate(weight * c.own[real], found.logp)
    loss = loss + surrogate(weight.unsqueeze(1) * c.head[real], found.head_logp)
    (by_hidden,) = torch.autograd.grad(loss, hidden)
    assert_close(-by_hidden.unsqueeze(0), exact(estimator, problem, 2).mean)
