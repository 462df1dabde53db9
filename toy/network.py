"""A small autoregressive policy with parameters shared over prompts, prefixes and times.

    pre[t]    = b[t] + sum over k of A[k, x[k], t] + sum over s < t of U[s, y[s]]
    logits[t] = relu(relu(pre[t]) W + c) O + o

Prefix sums make all positions one matrix product.  There is no autograd: what `backward` takes is
the gradient by the logits, that is the coefficients of an estimator times the scores onehot - pi,
so the update of a network is the update of `windage.estimators`.

Parameters are one flat row a seed, `[S D]`; a leading axis S runs through every tensor.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import final

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn.functional import embedding, one_hot

from windage.estimators.batch import Batch
from windage.toy.exact.walk import pull_back
from windage.toy.problems import normalize
from windage.toy.sums import Generators, Sums, uniform


@final
@dataclass(frozen=True, kw_only=True)
class Network:
    """Sizes of a policy for a task.

    Example:
        >>> Network(task=Sums()).width_of_parameters
        27274
    """

    task: Sums
    hidden: int = 64

    @cached_property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shape of each parameter, in the order in which a row holds them."""
        task, h = self.task, self.hidden
        return {
            "A": (task.terms, task.modulus, task.horizon, h),
            "U": (task.horizon, task.vocab, h),
            "b": (task.horizon, h),
            "W": (h, h),
            "c": (1, h),
            "O": (h, task.vocab),
            "o": (1, task.vocab),
        }

    @property
    def width_of_parameters(self) -> int:
        return sum(math.prod(shape) for shape in self.shapes.values())

    def unpack(self, parameters: Float[Tensor, "S D"]) -> dict[str, Tensor]:
        """Views of the parameters by name, each with the axis of seeds in front."""
        sizes = [math.prod(shape) for shape in self.shapes.values()]
        parts = parameters.split(sizes, 1)
        named = zip(self.shapes.items(), parts, strict=True)
        return {name: part.unflatten(1, shape) for (name, shape), part in named}

    def initial(self, among: Generators) -> Float[Tensor, "S D"]:
        """Normal weights of variance 1/K, 1/4, 0.09, 2/H and 1/H; the last biases are 0."""
        h = self.hidden
        scale = {"A": self.task.terms**-0.5, "U": 0.5, "b": 0.3, "W": (2 / h) ** 0.5, "O": h**-0.5}
        return torch.stack(
            [
                torch.cat(
                    [
                        scale.get(name, 0.0) * torch.randn(math.prod(shape), generator=g)
                        for name, shape in self.shapes.items()
                    ]
                )
                for g in among
            ]
        )

    def forward(
        self,
        parameters: Float[Tensor, "S D"],
        prompts: Int[Tensor, "S B K"],
        tokens: Int[Tensor, "S B T"],
    ) -> Pass:
        """Log-probabilities of every token at every position, with what `backward` needs."""
        w = self.unpack(parameters)
        digits = one_hot(prompts, self.task.modulus).to(parameters.dtype).flatten(2)
        rows = self._rows(tokens)
        said = embedding(rows, w["U"].reshape(-1, self.hidden))
        pre = self._prompted(w, digits) + earlier(said, range(self.task.horizon))
        first = pre.relu_().flatten(1, 2)
        second = torch.baddbmm(w["c"], first, w["W"]).relu_()
        logits = torch.baddbmm(w["o"], second, w["O"].mT.contiguous().mT)
        logp = normalize(logits).unflatten(1, tokens.shape[1:])
        return Pass(digits=digits, rows=rows, first=first, second=second, logp=logp)

    def _prompted(self, w: dict[str, Tensor], digits: Tensor) -> Float[Tensor, "S B T H"]:
        """What bias and prompt put into each position."""
        table = w["A"].flatten(3).flatten(1, 2)
        shape = (self.task.horizon, self.hidden)
        return torch.baddbmm(w["b"].flatten(1).unsqueeze(1), digits, table).unflatten(-1, shape)

    def _rows(self, tokens: Int[Tensor, "S B T"]) -> Int[Tensor, "S B T"]:
        """Rows of the flattened U that belong to tokens at their positions."""
        s, _, t = tokens.shape
        place = torch.arange(s * t).view(s, 1, t) * self.task.vocab
        return place + tokens

    def backward(
        self,
        parameters: Float[Tensor, "S D"],
        tape: Pass,
        slope: Float[Tensor, "S B T V"],
    ) -> Float[Tensor, "S D"]:
        """Gradient by the parameters from the gradient by the logits."""
        w = self.unpack(parameters)
        found = torch.zeros_like(parameters)
        out = self.unpack(found)
        last = slope.to(parameters.dtype).flatten(1, 2)
        out["O"].copy_(torch.bmm(last.mT, tape.second).mT)
        torch.sum(last, 1, keepdim=True, out=out["o"])
        middle = torch.bmm(last, w["O"].mT).mul_(tape.second.sign())
        torch.bmm(tape.first.mT, middle, out=out["W"])
        torch.sum(middle, 1, keepdim=True, out=out["c"])
        pre = torch.bmm(middle, w["W"].mT).mul_(tape.first.sign())
        pre = pre.unflatten(1, tape.logp.shape[1:3])
        torch.sum(pre, 1, out=out["b"])
        out["A"].copy_((tape.digits.mT @ pre.flatten(2)).view_as(out["A"]))
        later = earlier(pre, range(self.task.horizon)[::-1])
        table = later.new_zeros(
            (len(parameters) * self.task.horizon * self.task.vocab, self.hidden)
        )
        table.index_add_(0, tape.rows.flatten(), later.flatten(0, 2))
        out["U"].copy_(table.view_as(out["U"]))
        return found

    def sample(
        self,
        parameters: Float[Tensor, "S D"],
        prompts: Int[Tensor, "S B K"],
        among: Generators,
        *,
        top_p: float = 1.0,
    ) -> tuple[Int[Tensor, "S B T"], Float[Tensor, "S B T V"]]:
        """Draw one response a prompt: its tokens, and the law that each was drawn from.

        Tokens after the stop are stop tokens.  The law is log-probabilities over the vocabulary.

        Args:
            parameters: of the sampler.
            prompts: repeat a prompt to draw several responses.
            among: a generator a seed; one number a token is drawn.
            top_p: mass of the nucleus that tokens are drawn from.
        """
        w = self.unpack(parameters)
        digits = one_hot(prompts, self.task.modulus).to(parameters.dtype).flatten(2)
        pre = self._prompted(w, digits)
        draws = uniform(among, *prompts.shape[1:2], self.task.horizon)
        said = torch.zeros_like(pre[:, :, 0])
        going = torch.ones_like(prompts[..., 0], dtype=torch.bool)
        tokens, laws = [], []
        for t in range(self.task.horizon):
            first = (pre[:, :, t] + said).relu_()
            second = torch.baddbmm(w["c"], first, w["W"]).relu_()
            logp = nucleus(normalize(torch.baddbmm(w["o"], second, w["O"])), top_p)
            ladder = logp.exp().cumsum(-1)
            mark = draws[..., t].unsqueeze(-1) * ladder[..., -1:]
            token = torch.searchsorted(ladder, mark, right=True).clamp(max=self.task.vocab - 1)
            token = torch.where(going.unsqueeze(-1), token, self.task.stop)
            laws.append(logp)
            tokens.append(token.squeeze(-1))
            going = going & (tokens[-1] != self.task.stop)
            rows = self._rows(token.expand(-1, -1, self.task.horizon))[..., t]
            said = said + embedding(rows, w["U"].reshape(-1, self.hidden))
        return torch.stack(tokens, -1), torch.stack(laws, 2)


@final
@dataclass(frozen=True, kw_only=True, eq=False)
class Pass:
    """What a forward pass keeps.

    Args:
        digits: of the prompts, one-hot.
        rows: of U that the tokens use.
        first, second: activations.
        logp: log-probabilities over the vocabulary.
    """

    digits: Float[Tensor, "S B KM"]
    rows: Int[Tensor, "S B T"]
    first: Float[Tensor, "S BT H"]
    second: Float[Tensor, "S BT H"]
    logp: Float[Tensor, "S B T V"]

    def of(self, tokens: Int[Tensor, "S B T"]) -> Float[Tensor, "S B T"]:
        """Log-probability of each token."""
        return self.logp.gather(-1, tokens.unsqueeze(-1)).squeeze(-1)


def earlier(values: Float[Tensor, "S B T H"], order: Sequence[int]) -> Float[Tensor, "S B T H"]:
    """At each position the sum over the positions that come earlier in an order of them.

    Example:
        >>> earlier(torch.tensor([1.0, 2.0, 4.0]).view(1, 1, 3, 1), range(3)).flatten()
        tensor([0., 1., 3.])
    """
    found = torch.zeros_like(values)
    for last, here in pairwise(order):
        torch.add(found[:, :, last], values[:, :, last], out=found[:, :, here])
    return found


def nucleus(logp: Float[Tensor, "*batch V"], top_p: float) -> Float[Tensor, "*batch V"]:
    """The likeliest tokens that reach a mass, renormalized; the rest -inf."""
    if top_p >= 1:
        return logp
    ranked, order = logp.sort(-1, descending=True)
    kept = ranked.exp().cumsum(-1) - ranked.exp() < top_p
    out = torch.full_like(logp, -torch.inf).scatter(-1, order, ranked.where(kept, -torch.inf))
    return out.log_softmax(-1)


def slope(
    own: Float[Tensor, "S B T"],
    head: Float[Tensor, "S B T V"] | None,
    tokens: Int[Tensor, "S B T"],
    logp: Float[Tensor, "S B T V"],
) -> Float[Tensor, "S B T V"]:
    """Gradient by the logits of an update: coefficients times scores.

        own (onehot - pi) + sum over v of head[v] (onehot[v] - pi)

    Args:
        own: coefficients of the sampled tokens.
        head: of every token of the vocabulary, for score centering; None: 0.
        tokens: sampled.
        logp: of the policy being trained.
    """
    visits = torch.zeros_like(logp)
    visits.scatter_(-1, tokens.unsqueeze(-1), own.to(logp.dtype).unsqueeze(-1))
    if head is not None:
        visits = visits + head.to(logp.dtype)
    return pull_back(visits, logp.exp())


def grouped(values: Tensor, prompts: int) -> Tensor:
    """Responses `[S B ...]` in groups `[S P G ...]`, those of a prompt side by side."""
    return values.unflatten(1, (prompts, -1))


def batch_of(
    tape: Pass,
    tokens: Int[Tensor, "S B T"],
    behavior_logp: Float[Tensor, "S B T"],
    rewards: Float[Tensor, "S B"],
    prompts: int,
    task: Sums,
    *,
    present: Bool[Tensor, "S B"] | None = None,
    head_behavior_logp: Float[Tensor, "S B T V"] | None = None,
    reference_logp: Float[Tensor, "S B T"] | None = None,
    proximal_logp: Float[Tensor, "S B T"] | None = None,
) -> Batch:
    """The record that estimators read.

    Args:
        tape: of the policy being trained.
        tokens, behavior_logp, rewards: as drawn.
        prompts: of which the responses are, as many of each, side by side.
        task: says where a response ends.
        present: False where a response is left out.
        head_behavior_logp: of the sampler over the vocabulary, for score centering.
        reference_logp, proximal_logp: of the tokens under other policies.
    """
    head = None if head_behavior_logp is None else tape.logp
    ids = None if head is None else torch.arange(task.vocab).expand_as(head)

    def group(values: Tensor | None) -> Tensor | None:
        return None if values is None else grouped(values, prompts)

    return Batch(
        rewards=grouped(rewards, prompts),
        mask=grouped(task.mask(tokens), prompts),
        present=group(present),
        logp=grouped(tape.of(tokens), prompts),
        behavior_logp=grouped(behavior_logp, prompts),
        reference_logp=group(reference_logp),
        proximal_logp=group(proximal_logp),
        head_ids=group(ids),
        head_logp=group(head),
        head_behavior_logp=group(head_behavior_logp),
    )
