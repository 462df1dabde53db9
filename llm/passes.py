"""Forward passes over recorded responses: tokens in, log-probabilities where the record has tokens.

A sequence is a prompt and its response, tokens as they were recorded and never made from text; what
is asked of the model are the log-probabilities of the response's trainable tokens.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, final

import numpy as np
import torch
from jaxtyping import Bool, Int
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from windage.estimators.batch import Batch
from windage.llm.logprobs import LogProbs
from windage.llm.models import Policy
from windage.llm.update import Forward

Row = Mapping[str, Any]
Numbers = Int[Tensor, " _"]
Beside = Callable[[Tensor, Numbers], Tensor]


class Packed(NamedTuple):
    """Some sequences as the model takes them.

    Args:
        ids, attention: padded on the right.
        places: of the hidden state before each token asked about, in the flattened sequences.
        targets: those tokens.
        asked: where they stand in the responses.
    """

    ids: Int[Tensor, "R L"]
    attention: Int[Tensor, "R L"]
    places: Int[Tensor, " N"]
    targets: Int[Tensor, " N"]
    asked: Bool[Tensor, "R T"]


def pack(
    prompts: Sequence[Int[Tensor, " _"]],
    responses: Sequence[Int[Tensor, " _"]],
    asked: Bool[Tensor, "R T"],
) -> Packed:
    """Sequences side by side, and where their tokens are.

    Args:
        prompts: at least one token each.
        responses: of at most T tokens.
        asked: tokens whose log-probabilities are wanted.

    Example:
        >>> one = pack([torch.tensor([7, 8])], [torch.tensor([9, 5])], torch.tensor([[True, True]]))
        >>> one.ids, one.places, one.targets
        (tensor([[7, 8, 9, 5]]), tensor([1, 2]), tensor([9, 5]))
    """
    whole = [torch.cat([p, r]) for p, r in zip(prompts, responses, strict=True)]
    ids = pad_sequence(whole, batch_first=True)
    attention = pad_sequence([torch.ones_like(s) for s in whole], batch_first=True)
    row, place = asked.nonzero(as_tuple=True)
    before = torch.tensor([len(p) for p in prompts])[row] - 1 + place
    places = row * ids.shape[1] + before
    return Packed(
        ids=ids,
        attention=attention,
        places=places,
        targets=ids.flatten()[places + 1] if len(places) else places,
        asked=asked,
    )


@final
@dataclass(eq=False)
class Seen:
    """What passes saw beside the log-probabilities, for reports; 0 where nothing was asked.

    Args:
        entropy, probability_square: `[R T]`.
        head_logp: `[R T K]`, -inf where nothing was asked; None: not kept.
    """

    entropy: Tensor
    probability_square: Tensor
    head_logp: Tensor | None = None


@final
class Responses:
    """Responses of one optimizer batch, ready to be passed through a model.

    Args:
        rows: of the rollout store, where `Batch.row_index` points.
        batch: made of them by `rollouts.to_batch`.
        temperature: of the sampler.
        device: of the model.
        keep_head: whether the passes' log-probabilities of head tokens are kept for reports.
    """

    def __init__(
        self,
        rows: Sequence[Row],
        batch: Batch,
        *,
        temperature: float,
        device: torch.device,
        keep_head: bool = False,
    ) -> None:
        assert batch.row_index is not None
        self.mask = batch.mask.flatten(0, 1)
        self.temperature, self.device = temperature, device
        self._rows, self._index = rows, batch.row_index.flatten().tolist()
        self._heads = None if batch.head_ids is None else batch.head_ids.flatten(0, 1)
        self.seen = Seen(*(torch.zeros(self.mask.shape) for _ in range(2)))
        if keep_head and self._heads is not None:
            self.seen.head_logp = torch.full(self._heads.shape, -math.inf)

    @property
    def lengths(self) -> Int[Tensor, " R"]:
        """Tokens of each sequence, its prompt included."""
        found = [
            len(self._rows[n]["prompt_ids"]) + len(self._rows[n]["response_ids"]) if n >= 0 else 0
            for n in self._index
        ]
        return torch.tensor(found)

    def parts(self, size: int) -> list[Numbers]:
        """Responses with tokens to train on, `size` at a time, those of like length together."""
        lengths = self.lengths
        wanted = self.mask.any(-1).nonzero().squeeze(1)
        if not len(wanted):
            return []
        order = torch.argsort(lengths[wanted], descending=True, stable=True)
        return list(wanted[order].split(size))

    def packed(self, numbers: Numbers) -> Packed:
        """Some responses as the model takes them."""
        rows = [self._rows[self._index[n]] for n in numbers.tolist()]
        prompts, responses = (
            [torch.from_numpy(np.array(row[name], dtype=np.int64)) for row in rows]
            for name in ("prompt_ids", "response_ids")
        )
        return pack(prompts, responses, self.mask[numbers])

    def through(
        self, policy: Policy | Callable[..., Any], beside: Beside | None = None
    ) -> Callable[[Numbers], Forward]:
        """A pass of this model over responses by their numbers p G + g, for `update.accumulate`.

        Args:
            beside: makes another loss of the hidden states before the tokens asked about.
        """

        def forward(numbers: Numbers) -> Forward:
            packed = self.packed(numbers)
            heads = None if self._heads is None else self._heads[numbers][packed.asked]
            found, hidden = policy(
                packed.ids.to(self.device),
                packed.attention.to(self.device),
                packed.places.to(self.device),
                packed.targets.to(self.device),
                None if heads is None else heads.to(self.device),
                self.temperature,
            )
            told = self._spread(found, packed.asked, numbers)
            if beside is None or not torch.is_grad_enabled():
                return told
            return replace(told, beside=beside(hidden, numbers))

        return forward

    def _spread(self, found: LogProbs, asked: Tensor, numbers: Numbers) -> Forward:
        """Values a token asked about, laid out as the record lays out its tokens."""
        where = asked.to(self.device)

        def laid(values: Tensor, nothing: float = 0.0) -> Tensor:
            out = values.new_full((*where.shape, *values.shape[1:]), nothing)
            return out.masked_scatter(where.view(*where.shape, *(1,) * (values.dim() - 1)), values)

        for name in ("entropy", "probability_square"):
            kept = getattr(self.seen, name)
            kept[numbers] = laid(getattr(found, name).detach()).to(kept)
        head = None if found.head_logp is None else laid(found.head_logp, -math.inf)
        if head is not None and self.seen.head_logp is not None:
            self.seen.head_logp[numbers] = head.detach().to(self.seen.head_logp)
        return Forward(
            logp=laid(found.logp),
            head_logp=head,
            probability_square=laid(found.probability_square.detach()),
        )
