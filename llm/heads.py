"""What a trained model says of recorded tokens, and of the tokens that the sampler found likeliest.

One pass, as of `passes`, over responses that are rows of a dump: log-probability of each token that
the policy chose, sum of squared probabilities before it, and log-probabilities of the head that the
sampler recorded there, over the whole vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from jaxtyping import Bool
from torch import Tensor

from windage.estimators.errors import BadInput, positive
from windage.llm import models
from windage.llm.passes import pack
from windage.llm.rescore import TOKENS

Row = Mapping[str, Any]


@torch.no_grad()
def told(
    rows: Sequence[Row],
    *,
    policy: str,
    dtype: str = "float32",
    autocast: str | None = None,
    temperature: float = 1.0,
    device: str = "auto",
    advance: Callable[[int], None] = lambda done: None,
) -> list[dict[str, Any]]:
    """The model's columns of each row, by the names of the rollout store.

    Args:
        rows: `prompt_ids`, `response_ids`, `mask`, and `head_ids` where they were recorded.
        policy: folder of the model that was trained.
        dtype, autocast: of its weights and products; its output layer is in float32 or wider.
        temperature: that the trainer's log-probabilities hold.
        device: of the model.
        advance: told how many tokens were passed.

    Returns:
        A row each: `logp`, `probability_square` and, beside `head_ids`, `head_logp`; 0 and -inf
        where the policy did not choose the token, -inf where a head is shorter.

    Raises:
        BadInput: a row of another model.
    """
    positive(temperature=temperature)
    loaded = models.load(policy, dtype=dtype, autocast=autocast, device=device)
    _own(rows, policy, int(loaded.policy.model.config.get_text_config().vocab_size))
    found: list[dict[str, Any]] = [{} for _ in rows]
    done = 0
    for part in _parts(rows):
        some = [rows[n] for n in part]
        asked = _padded([row["mask"] for row in some])
        packed = pack(_ids(some, "prompt_ids"), _ids(some, "response_ids"), asked)
        given = (packed.ids, packed.attention, packed.places, packed.targets, _heads(some))
        there = (None if one is None else one.to(loaded.device) for one in given)
        made, _ = loaded.policy(*there, temperature)
        ends = np.cumsum([int(np.sum(row["mask"])) for row in some])
        for n, row, end in zip(part, some, ends.tolist(), strict=True):
            own = slice(end - int(np.sum(row["mask"])), end)
            found[n] = _columns(row, made, own)
        done += packed.ids.numel()
        advance(done)
    return found


def _own(rows: Sequence[Row], path: str, size: int) -> None:
    """Refuse tokens that the model has not."""
    for row in rows:
        for name in ("prompt_ids", "response_ids", "head_ids"):
            largest = int(np.max(row[name], initial=-1)) if row.get(name) is not None else -1
            if largest >= size:
                raise BadInput(
                    f"model {path!r} has {size:,} tokens, and {name} of a response holds "
                    f"{largest:,}; allowed: the model that drew the responses"
                )


def _parts(rows: Sequence[Row]) -> Iterator[list[int]]:
    """Rows of like length and of one width of head, as many as a pass takes."""
    size = [len(row["prompt_ids"]) + len(row["response_ids"]) for row in rows]
    width = [-1 if (h := row.get("head_ids")) is None else np.shape(h)[1] for row in rows]
    part: list[int] = []
    for n in sorted(range(len(rows)), key=lambda n: (width[n], -size[n])):
        full = part and size[part[0]] * (len(part) + 1) > TOKENS
        if full or (part and width[n] != width[part[0]]):
            yield part
            part = []
        part.append(n)
    if part:
        yield part


def _ids(rows: Sequence[Row], name: str) -> list[Tensor]:
    return [torch.from_numpy(np.array(row[name], dtype=np.int64)) for row in rows]


def _padded(masks: Sequence[np.ndarray]) -> Bool[Tensor, "R T"]:
    return torch.nn.utils.rnn.pad_sequence(
        [torch.from_numpy(np.array(mask, dtype=bool)) for mask in masks], batch_first=True
    )


def _heads(rows: Sequence[Row]) -> Tensor | None:
    """Head tokens before every token asked about, one row of them each."""
    if rows[0].get("head_ids") is None:
        return None
    own = [np.asarray(row["head_ids"])[np.asarray(row["mask"], dtype=bool)] for row in rows]
    return torch.from_numpy(np.concatenate(own).astype(np.int64))


def _columns(row: Row, made: Any, own: slice) -> dict[str, Any]:
    """Values of the tokens asked about, laid out as the row's tokens are."""
    mask = np.asarray(row["mask"], dtype=bool)

    def laid(values: Tensor, nothing: float) -> np.ndarray:
        part = values[own].double().cpu().numpy()
        out = np.full((len(mask), *part.shape[1:]), nothing)
        out[mask] = part
        return out

    found = {"logp": laid(made.logp, 0.0)}
    found["probability_square"] = laid(made.probability_square, 0.0)
    if made.head_logp is not None:
        found["head_logp"] = laid(made.head_logp, -math.inf)
    return found
