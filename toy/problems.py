"""Tabular problems: softmax policies over the tokens that may follow each prefix.

A tree is given by its vocabulary, stop token and horizon; it holds every prefix.  A bandit is a
tree of horizon one; a trajectory-logit problem is a bandit whose arms are followed by forced tokens
(probability one, score zero), so that responses have lengths.

Prefixes are ordered by length and then by token ids; so are responses.  The prefixes of one length
are a contiguous run, and the children of a run fill the next run in order: every recursion is a
reshape.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import final

import torch
from jaxtyping import Float, Int
from torch import Tensor

FEW = 16


@final
@dataclass(frozen=True)
class Tree:
    """All prefixes and responses of a vocabulary, a stop token (or None) and a horizon.

    Example:
        >>> tree = Tree(3, 2, 3)
        >>> tree.prefixes, tree.leaves
        (7, 15)
    """

    vocab: int
    stop: int | None
    horizon: int

    @property
    def going(self) -> int:
        """Tokens after which a response goes on."""
        return self.vocab - (self.stop is not None)

    @cached_property
    def bounds(self) -> tuple[int, ...]:
        """Prefixes of length t are numbered from bounds[t] to bounds[t + 1]."""
        counts = [0]
        for t in range(self.horizon):
            counts.append(counts[-1] + self.going**t)
        return tuple(counts)

    @cached_property
    def leaf_bounds(self) -> tuple[int, ...]:
        """Responses of t + 1 tokens are numbered from leaf_bounds[t] to leaf_bounds[t + 1]."""
        counts = [0]
        for t in range(self.horizon):
            ends = self.vocab if t == self.horizon - 1 else self.vocab - self.going
            counts.append(counts[-1] + self.going**t * ends)
        return tuple(counts)

    @property
    def prefixes(self) -> int:
        return self.bounds[-1]

    @property
    def leaves(self) -> int:
        return self.leaf_bounds[-1]

    def level(self, t: int) -> slice:
        """The prefixes of length t."""
        return slice(self.bounds[t], self.bounds[t + 1])

    def leaf_level(self, t: int) -> slice:
        """The responses of t + 1 tokens."""
        return slice(self.leaf_bounds[t], self.leaf_bounds[t + 1])

    def split(self, tokens: Tensor) -> tuple[Tensor, Tensor | None]:
        """Columns `[... V]` that go on and the column that stops, if any."""
        if self.stop is None:
            return tokens, None
        if self.stop == self.vocab - 1:
            return tokens[..., :-1], tokens[..., -1]
        going = torch.cat([tokens[..., : self.stop], tokens[..., self.stop + 1 :]], -1)
        return going, tokens[..., self.stop]

    def join(self, going: Tensor, stopping: Tensor | None) -> Tensor:
        """The inverse of `split`."""
        if self.stop is None or stopping is None:
            return going
        column = stopping.unsqueeze(-1)
        return torch.cat([going[..., : self.stop], column, going[..., self.stop :]], -1)

    def descend(self, tokens: Tensor) -> Tensor:
        """Values `[... n V]` at the tokens of a level as values `[... n']` at the next prefixes."""
        return self.split(tokens)[0].flatten(-2)

    @cached_property
    def paths(self) -> tuple[Int[Tensor, "K T"], Int[Tensor, "K T"]]:
        """For each response the prefix before and the token at each step; -1 after the end."""
        prefixes = torch.full((self.leaves, self.horizon), -1)
        tokens = torch.full((self.leaves, self.horizon), -1)
        seen = torch.zeros((1, 0), dtype=torch.long)
        ids = torch.zeros((1, 0), dtype=torch.long)
        for t in range(self.horizon):
            here = torch.arange(self.bounds[t], self.bounds[t + 1])
            seen = torch.cat([seen, here.unsqueeze(1)], 1)
            ends = torch.ones(self.vocab, dtype=torch.bool)
            if t < self.horizon - 1:
                ends = torch.arange(self.vocab) == (-1 if self.stop is None else self.stop)
            choices = torch.arange(self.vocab)
            for which, last in ((ends, True), (~ends, False)):
                picked = choices[which]
                rows = seen.repeat_interleave(len(picked), 0)
                taken = torch.cat(
                    [
                        ids.repeat_interleave(len(picked), 0),
                        picked.repeat(len(ids)).unsqueeze(1),
                    ],
                    1,
                )
                if last and len(picked):
                    prefixes[self.leaf_level(t), : t + 1] = rows
                    tokens[self.leaf_level(t), : t + 1] = taken
                elif not last:
                    following = (rows, taken)
            seen, ids = following
        return prefixes, tokens


@final
@dataclass(frozen=True, kw_only=True, eq=False)
class Problem:
    """Prompts that share a tree: policy, behavior policy and rewards of each.

    Args:
        name: for tables.
        tree: prefixes and responses.
        logits: the parameters, one row a prefix.
        behavior_logp: log-probabilities of the sampler at each prefix; -inf: never drawn.
        rewards: of each response.
        lengths: tokens of each response, forced ones included.
        sha256: of the file it came from.
        proximal_logp: log-probabilities of the policy before the first pass over a batch; None: the
            policy itself.
        reference_logp: log-probabilities of the policy that penalties look back at; None: absent.
    """

    name: str
    tree: Tree
    logits: Float[Tensor, "P N V"]
    behavior_logp: Float[Tensor, "P N V"]
    rewards: Float[Tensor, "P M"]
    lengths: Int[Tensor, "P M"]
    sha256: str | None = None
    proximal_logp: Float[Tensor, "P N V"] | None = None
    reference_logp: Float[Tensor, "P N V"] | None = None

    @property
    def prompts(self) -> int:
        return self.logits.shape[0]

    @property
    def responses(self) -> int:
        """Responses of all prompts."""
        return self.prompts * self.tree.leaves

    @property
    def longest(self) -> int:
        """Tokens of the longest response that the problem allows."""
        return max(self.tree.horizon, int(self.lengths.max()))

    @cached_property
    def logp(self) -> Float[Tensor, "P N V"]:
        """Log-probabilities of the policy at each prefix."""
        return normalize(self.logits)

    @cached_property
    def kinds(self) -> tuple[Float[Tensor, "R 2"], ...]:
        """For each prompt the pairs of reward and length that occur."""
        found = []
        for rewards, lengths in zip(self.rewards, self.lengths, strict=True):
            pairs = []
            for size in self.sizes:
                here = rewards if len(self.sizes) == 1 else rewards[lengths == size]
                if len(here):
                    values = distinct(here)
                    pairs.append(torch.stack([values, size.double().expand_as(values)], 1))
            found.append(torch.cat(pairs))
        return tuple(found)

    @cached_property
    def sizes(self) -> Int[Tensor, " S"]:
        """The lengths that occur, in ascending order."""
        least, most = self.lengths.aminmax()
        if least == most:
            return least.unsqueeze(0)
        return torch.bincount(self.lengths.flatten()).nonzero().squeeze(1)

    def select(self, prompt: int) -> Problem:
        """The problem of one prompt."""
        if self.prompts == 1:
            return self
        one = slice(prompt, prompt + 1)
        return replace(
            self,
            logits=self.logits[one],
            behavior_logp=self.behavior_logp[one],
            rewards=self.rewards[one],
            lengths=self.lengths[one],
            proximal_logp=None if self.proximal_logp is None else self.proximal_logp[one],
            reference_logp=None if self.reference_logp is None else self.reference_logp[one],
        )

    def on_policy(self) -> Problem:
        """The same problem sampled from the policy itself."""
        return replace(self, behavior_logp=self.logp)


def distinct(values: Float[Tensor, " M"]) -> Float[Tensor, " R"]:
    """The distinct values, in ascending order, without a sort where they are few.

    Example:
        >>> distinct(torch.tensor([1.0, 0.0, 1.0]))
        tensor([0., 1.])
    """
    found = [values.min()]
    for _ in range(FEW):
        above = torch.where(values > found[-1], values, torch.inf).min()
        if above == torch.inf:
            return torch.stack(found)
        found.append(above)
    return values.unique()


def normalize(logits: Float[Tensor, "*shape V"]) -> Float[Tensor, "*shape V"]:
    """Log-probabilities from logits; torch's own is slow where the last axis is short.

    Example:
        >>> normalize(torch.tensor([0.0, 0.0, -torch.inf])).exp()
        tensor([0.5000, 0.5000, 0.0000])
    """
    shifted = logits - logits.amax(-1, keepdim=True)
    return shifted.sub_(shifted.exp().sum(-1, keepdim=True).log())


def make(
    name: str,
    tree: Tree,
    logits: Tensor,
    rewards: Tensor,
    *,
    behavior: Tensor | None = None,
    lengths: Tensor | None = None,
    sha256: str | None = None,
) -> Problem:
    """A problem from logits; `behavior` are the sampler's logits, default the policy's.

    Example:
        >>> make("coin", Tree(2, None, 1), torch.zeros(1, 1, 2), torch.tensor([[0.0, 1.0]])).prompts
        1
    """
    logits = logits.double()
    if lengths is None:
        counts = torch.tensor(tree.leaf_bounds).diff()
        lengths = torch.arange(1, tree.horizon + 1).repeat_interleave(counts)
    return Problem(
        name=name,
        tree=tree,
        logits=logits,
        behavior_logp=normalize(logits if behavior is None else behavior.double()),
        rewards=rewards.double(),
        lengths=lengths.expand(len(logits), tree.leaves),
        sha256=sha256,
    )


def _waves(tree: Tree, prompts: int, amplitude: float, phase: float) -> Tensor:
    p, n, v = (torch.arange(k).double() for k in (prompts, tree.prefixes, tree.vocab))
    angle = phase + 2 * v + 3 * n.unsqueeze(-1) + 0.7 * p[:, None, None]
    return amplitude * torch.sin(angle)


def bandit(arms: int = 8) -> Problem:
    """One step over `arms` tokens; every third arm is right."""
    tree = Tree(arms, None, 1)
    rewards = (torch.arange(arms) % 3 == 1).double()
    return make("bandit", tree, _waves(tree, 1, 0.8, 1.0), rewards.unsqueeze(0))


def trajectories() -> Problem:
    """Logits over whole trajectories of given lengths: TOPR's appendix B, a few of each kind.

    Two sampled and one unsampled trajectory of either sign; the sampler never draws the unsampled.
    """
    chance = torch.tensor([0.30, 0.20, 0.15, 0.15, 0.12, 0.08], dtype=torch.float64)
    logits = chance.log().unsqueeze(0)
    behavior = logits.clone()
    behavior[..., 4:] = -torch.inf
    rewards = torch.tensor([1.0, -1.0, 1.0, -1.0, 1.0, -1.0])
    lengths = torch.tensor([4, 9, 6, 12, 5, 15])
    return make(
        "trajectories",
        Tree(6, None, 1),
        logits.unsqueeze(1),
        rewards.unsqueeze(0),
        behavior=behavior.unsqueeze(1),
        lengths=lengths,
    )


def token_tree(horizon: int = 4, vocab: int = 3) -> Problem:
    """Responses of up to `horizon` tokens, the last id stops; right if id 1 outnumbers id 0."""
    tree = Tree(vocab, vocab - 1, horizon)
    _, tokens = tree.paths
    right = ((tokens == 1).sum(-1) > (tokens == 0).sum(-1)).double()
    return make("token_tree", tree, _waves(tree, 1, 0.8, 1.0), right.unsqueeze(0))


def difficulties(success: Sequence[float] = (0.1, 0.3, 0.5, 0.7, 0.9)) -> Problem:
    """Prompts of different difficulty: responses of up to two tokens, right if they start with 1.

    Args:
        success: chance of a right response, a prompt, among those that do not stop at once (0.9).
    """
    tree = Tree(3, 2, 2)
    logits = torch.zeros((len(success), tree.prefixes, 3), dtype=torch.float64)
    for p, s in enumerate(success):
        chance = torch.tensor([0.9 * (1 - s), 0.9 * s, 0.1], dtype=torch.float64)
        logits[p, 0] = chance.log()
    _, tokens = tree.paths
    right = (tokens[:, 0] == 1).double()
    return make("difficulties", tree, logits, right.expand(len(success), -1))


BUILT_IN: dict[str, Callable[[], Problem]] = {
    "bandit": bandit,
    "trajectories": trajectories,
    "token_tree": token_tree,
    "difficulties": difficulties,
}
