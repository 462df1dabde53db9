"""The sampler's measure on a problem's tree: flow, log-ratios along paths, sums over responses."""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from typing import final

import torch
from jaxtyping import Float
from torch import Tensor

from windage.estimators.correction import token_fields
from windage.toy.problems import Problem, Tree


def pull_back(
    visits: Float[Tensor, "*batch N V"],
    probability: Float[Tensor, "*#batch N V"],
    *,
    out: Tensor | None = None,
) -> Float[Tensor, "*batch N V"]:
    """Sum of coefficient times score by the logits of each prefix: c - pi * sum(c).

    Example:
        >>> pull_back(torch.tensor([[1.0, 0.0]]), torch.tensor([[0.25, 0.75]]))
        tensor([[ 0.7500, -0.7500]])
    """
    return torch.addcmul(visits, probability, visits.sum(-1, keepdim=True), value=-1.0, out=out)


def dot(a: Float[Tensor, "P ..."], b: Float[Tensor, "P ..."]) -> Float[Tensor, " P"]:
    """Inner product, prompt by prompt."""
    return torch.bmm(a.flatten(1).unsqueeze(1), b.flatten(1).unsqueeze(2)).view(-1)


@final
class Walk:
    """The sampler's measure on a problem's tree and the log-ratios along it, each made when asked.

    A token, prefix or response counts as never drawn where its behavior probability is 0 in
    float64; its log-ratio is set to 0 there, so that nothing non-finite meets a zero.
    """

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.tree: Tree = problem.tree
        self._ratios: dict[tuple[str, str], Tensor] = {}
        self._paths: dict[tuple[str, str], Tensor] = {}
        self._visits: dict[int, tuple[Tensor, Tensor]] = {}

    @cached_property
    def probability(self) -> Float[Tensor, "P N V"]:
        """Probability of each token under the policy."""
        return self.problem.logp.exp()

    @cached_property
    def behavior(self) -> Float[Tensor, "P N V"]:
        """Probability of each token under the sampler."""
        if self.problem.behavior_logp is self.problem.logp:
            return self.probability
        return self.problem.behavior_logp.exp()

    @cached_property
    def log_ratio(self) -> Float[Tensor, "P N V"]:
        """Log-ratio of policy to sampler at each token, 0 where it is never drawn."""
        return zero_unless(self.behavior, self.problem.logp - self.problem.behavior_logp)

    def log_ratio_of(self, numerator: str, denominator: str) -> Float[Tensor, "P N V"]:
        """Log-ratio of two of the problem's policies, by their fields, 0 where never drawn.

        Without a proximal policy the policy itself stands in: the first pass over a batch.
        """
        pair = numerator, denominator
        if pair == ("logp", "behavior_logp"):
            return self.log_ratio
        if pair not in self._ratios:
            first, second = (getattr(self.problem, name) for name in pair)
            first, second = (self.problem.logp if x is None else x for x in (first, second))
            self._ratios[pair] = zero_unless(self.behavior, first - second)
        return self._ratios[pair]

    def _descend(self, root: Tensor, step: Tensor, combine: Callable[..., Tensor]) -> Tensor:
        """Sums or products along paths, at each token: `[P N V]`."""
        if self.tree.horizon == 1:
            return step
        out = torch.empty_like(step)
        for t in range(self.tree.horizon):
            level = self.tree.level(t)
            value = combine(root.unsqueeze(-1), step[:, level], out=out[:, level])
            if t + 1 < self.tree.horizon:
                root = self.tree.descend(value)
        return out

    @cached_property
    def flow(self) -> Float[Tensor, "P N V"]:
        """Probability under the sampler to reach each token."""
        one = self.behavior.new_ones((self.problem.prompts, 1))
        return self._descend(one, self.behavior, torch.mul)

    @property
    def path_ratio(self) -> Float[Tensor, "P N V"]:
        """Log-ratio of policy to sampler, summed up to and including each token."""
        return self.path_ratio_of("logp", "behavior_logp")

    def path_ratio_of(self, numerator: str, denominator: str) -> Float[Tensor, "P N V"]:
        """Log-ratio summed up to and including each token; 0 where the path is never drawn."""
        pair = numerator, denominator
        if pair not in self._paths:
            self._paths[pair] = self.summed(self.log_ratio_of(*pair))
        return self._paths[pair]

    def summed(self, steps: Float[Tensor, "P N V"]) -> Float[Tensor, "P N V"]:
        """Numbers of tokens summed up to and including each; 0 where the path is never drawn."""
        zero = self.behavior.new_zeros((self.problem.prompts, 1))
        return zero_unless(self.flow, self._descend(zero, steps, torch.add))

    @cached_property
    def fields(self) -> dict[str, Tensor]:
        """What maps may ask for by name, 0 where a token is never drawn."""
        both = (self.problem.logp, self.problem.behavior_logp)
        return token_fields(*(zero_unless(self.behavior, x) for x in both))

    @cached_property
    def leaf_flow(self) -> Float[Tensor, "P M"]:
        """Probability of each response under the sampler."""
        return self.at_leaves(self.flow)

    @cached_property
    def leaf_probability(self) -> Float[Tensor, "P M"]:
        """Probability of each response under the policy."""
        one = self.probability.new_ones((self.problem.prompts, 1))
        return self.at_leaves(self._descend(one, self.probability, torch.mul))

    @cached_property
    def score_norm(self) -> Float[Tensor, "P N V"]:
        """Squared norm of each token's score: 1 - 2 pi + sum of pi^2."""
        z = self.probability.square()
        rest = 1 + z.sum(-1, keepdim=True)
        return torch.mul(self.probability, -2, out=z).add_(rest)

    def at_leaves(self, tokens: Float[Tensor, "P N V"]) -> Float[Tensor, "P M"]:
        """Values at the last token of each response."""
        tree = self.tree
        last = tokens[:, tree.level(tree.horizon - 1)].flatten(1)
        if tree.stop is None or tree.horizon == 1:
            return last
        early = [tokens[:, tree.level(t), tree.stop] for t in range(tree.horizon - 1)]
        return torch.cat([*early, last], 1)

    def leaf_level(self, leaves: Tensor, t: int) -> Tensor:
        """Responses that end at level t, `[... n V]` at the horizon, else `[... n]`."""
        here = leaves[..., self.tree.leaf_level(t)]
        if t < self.tree.horizon - 1:
            return here
        return here.reshape(*here.shape[:-1], self.tree.going**t, self.tree.vocab)

    def ascend(
        self, leaves: Tensor, at_level: Callable[[Tensor, slice, Tensor], Tensor]
    ) -> Float[Tensor, "*rows N V"]:
        """For each token the sum over the responses that pass it, changed at each level.

        Args:
            leaves: of responses, `[... M]`.
            at_level: given sums at the tokens of a level, that level and where to put them, what
                goes on to the next.
        """
        tree = self.tree
        out = leaves.new_empty((*leaves.shape[:-1], tree.prefixes, tree.vocab))
        going: Tensor | None = None
        for t in reversed(range(tree.horizon)):
            level = tree.level(t)
            here = self.leaf_level(leaves, t) if going is None or tree.stop is not None else None
            if going is not None:
                here = tree.join(going, here)
            assert here is not None
            here = at_level(here, level, out[..., level, :])
            if t > 0:
                shape = (*leaves.shape[:-1], tree.going ** (t - 1), tree.going)
                going = here.sum(-1).reshape(shape)
        return out

    def gather(
        self, leaves: Float[Tensor, "F M"], kernel: Float[Tensor, "P N V"] | None = None
    ) -> Float[Tensor, "F N V"]:
        """For each token the sum over the responses that pass it.

        Args:
            leaves: of responses; rows are prompts, or many of one prompt.
            kernel: a factor of each token, from the one asked about to the end of the response.
        """
        if kernel is None:
            if self.tree.horizon == 1:
                return self.leaf_level(leaves, 0)
            return self.ascend(leaves, lambda here, level, out: out.copy_(here))
        return self.ascend(
            leaves, lambda here, level, out: torch.mul(here, kernel[:, level], out=out)
        )

    def ending(
        self, tokens: Float[Tensor, "P N V"], kernel: Float[Tensor, "P N V"] | None = None
    ) -> Float[Tensor, "P M"]:
        """Sums over the tokens of each response, the transpose of `gather`.

        Args:
            tokens: what is summed.
            kernel: a factor of each token, applied from the one that is summed to the end.
        """
        tree = self.tree
        before = tokens.new_zeros((self.problem.prompts, 1))
        early = []
        for t in range(tree.horizon):
            level = tree.level(t)
            here = tokens[:, level] + before.unsqueeze(-1)
            here = here if kernel is None else here.mul_(kernel[:, level])
            if t < tree.horizon - 1:
                going, stopping = tree.split(here)
                before = going.flatten(-2)
                if stopping is not None:
                    early.append(stopping)
        return torch.cat([*early, here.flatten(1)], 1) if early else here.flatten(1)

    def collect(
        self,
        leaves: Float[Tensor, "F M"],
        earned: Float[Tensor, "P N V"],
        after: Float[Tensor, "P M"] | float,
        order: int,
        kernel: Float[Tensor, "P N V"] | None = None,
    ) -> Float[Tensor, "K F N V"]:
        """`gather` of leaves times the power 0, 1, .. `order` of what tokens earn from there on.

        Args:
            leaves: of responses.
            earned: by each token, summed from the token asked about to the end of the response.
            after: earned by what follows a response's last choice.
            order: 1 or 2.
            kernel: as in `gather`.
        """

        def at_level(here: Tensor, level: slice, out: Tensor) -> Tensor:
            e = earned[:, level]
            first = here[1] + e * here[0]
            found = [here[0], first]
            if order > 1:
                found.append(here[2] + e * (here[1] + first))
            torch.stack(found, out=out)
            return out if kernel is None else out.mul_(kernel[:, level])

        start = [leaves]
        for _ in range(order):
            start.append(start[-1] * after)
        return self.ascend(torch.stack(start), at_level)

    def visits(self, feature: Float[Tensor, "P M"] | None) -> Float[Tensor, "P N V"]:
        """Flow times E[f | token] for a function of the response, kept; None stands for 1."""
        if feature is None:
            return self.flow
        if id(feature) not in self._visits:
            self._visits[id(feature)] = feature, self.gather(self.leaf_flow * feature)
        return self._visits[id(feature)][1]


def zero_unless(probability: Tensor, value: Tensor) -> Tensor:
    """The value, 0 where the probability is 0."""
    if probability.numel() == 0 or probability.amin() > 0:
        return value
    return value.masked_fill(probability <= 0, 0.0)


def conditional(walk: Walk, features: Tensor) -> tuple[Tensor, Tensor]:
    """E[f | token] and E[f | prefix] under the sampler, by recursion from the responses."""
    tree = walk.tree
    tokens: list[Tensor] = []
    prefixes: list[Tensor] = []
    for t in reversed(range(tree.horizon)):
        here = (
            walk.leaf_level(features, t) if t == tree.horizon - 1 or tree.stop is not None else None
        )
        if t < tree.horizon - 1:
            shape = (*features.shape[:-1], tree.going**t, tree.going)
            here = tree.join(prefixes[-1].reshape(shape), here)
        assert here is not None
        tokens.append(here)
        prefixes.append((here * walk.behavior[:, tree.level(t)]).sum(-1))
    if len(tokens) == 1:
        return tokens[0], prefixes[0]
    return torch.cat(tokens[::-1], -2), torch.cat(prefixes[::-1], -1)
