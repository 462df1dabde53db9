"""Responses drawn by a model of transformers, token by token.

    wave: rows that were started together, left-padded, with their keys and values
    step: one forward pass a wave, one token a row; finished rows leave the wave

Rows that wait start as a new wave when a quarter of the places are free, and join the others after
their first token, so a few long responses neither keep others waiting nor cost more than
themselves.  A prompt asked several times is read once.
"""

from __future__ import annotations

import copy
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any, final

import torch
from torch import Tensor

from windage.estimators.batch import promote
from windage.estimators.errors import BadInput, within
from windage.llm.samplers.distribution import behavior, draw, head
from windage.llm.samplers.protocol import (
    Between,
    Request,
    Response,
    SamplerFault,
    Sampling,
    Weights,
    checked,
    not_finite,
)


@final
class _Row:
    """A response that is being written."""

    def __init__(self, place: tuple[int, int], prompt: tuple[int, ...], seed: int) -> None:
        self.place, self.prompt, self.seed = place, prompt, seed
        self.generator = torch.Generator().manual_seed(seed)
        self.ids: list[int] = []
        self.logp: list[Tensor] = []
        self.versions: list[int] = []
        self.heads: list[tuple[Tensor, Tensor]] = []
        self.reason = ""

    def response(self, elapsed: float) -> Response:
        """What was written."""
        head_ids, head_logp = (
            (torch.stack(part) for part in zip(*self.heads, strict=True))
            if (self.heads)
            else (None, None)
        )
        return Response(
            ids=torch.tensor(self.ids),
            behavior_logp=torch.stack(self.logp),
            versions=torch.tensor(self.versions),
            finish_reason=self.reason,
            seed=self.seed,
            elapsed=elapsed,
            head_ids=head_ids,
            head_behavior_logp=head_logp,
        )


@final
class _Wave:
    """Rows that go on together."""

    def __init__(self, rows: list[_Row]) -> None:
        self.rows = rows
        self.cache: Any = None
        self.attention = torch.empty(0)

    def forget(self) -> None:
        """Drop keys and values; the next step reads the tokens again."""
        self.cache = None

    def logits(self, model: Any, device: torch.device) -> Tensor:
        """Logits of the next token of each row."""
        if self.cache is None:
            return self._read(model, device)
        ids = torch.tensor([[row.ids[-1]] for row in self.rows], device=device)
        self.attention = torch.cat([self.attention, torch.ones_like(ids)], 1)
        return self._pass(model, ids).logits[:, -1]

    def _read(self, model: Any, device: torch.device) -> Tensor:
        """From the tokens alone, each different sequence once."""
        written = [(*row.prompt, *row.ids) for row in self.rows]
        different = {ids: n for n, ids in enumerate(dict.fromkeys(written))}
        ids, self.attention = left_padded(list(different), device)
        out = self._pass(model, ids)
        which = torch.tensor([different[sequence] for sequence in written], device=device)
        self._select(which)
        return out.logits[which, -1]

    def _pass(self, model: Any, ids: Tensor) -> Any:
        positions = (self.attention.cumsum(-1) - 1).clamp(min=0)[:, -ids.shape[1] :]
        out = model(
            input_ids=ids,
            attention_mask=self.attention,
            position_ids=positions,
            past_key_values=self.cache,
            use_cache=True,
            logits_to_keep=1,
        )
        self.cache = out.past_key_values
        return out

    def _select(self, which: Tensor) -> None:
        self.attention = self.attention[which]
        self.cache.batch_select_indices(which)

    def join(self, late: _Wave) -> bool:
        """Take in the rows of a later wave; False: a layer forgets, its columns cannot be moved."""
        layers = [*self.cache.layers, *late.cache.layers]
        if not all(type(layer).__name__ == "DynamicLayer" for layer in layers):
            return False
        width = max(self.attention.shape[1], late.attention.shape[1])
        attention = torch.cat([_widened(part.attention, width, 1) for part in (self, late)])
        unused = int(attention.any(0).int().argmax())
        for ours, theirs in zip(self.cache.layers, late.cache.layers, strict=True):
            for name in ("keys", "values"):
                parts = [_widened(getattr(layer, name), width, 2) for layer in (ours, theirs)]
                setattr(ours, name, torch.cat(parts)[:, :, unused:])
        self.attention = attention[:, unused:]
        self.rows += late.rows
        return True

    def leave(self) -> list[_Row]:
        """Take out the rows that have ended."""
        done = [row for row in self.rows if row.reason]
        stay = [n for n, row in enumerate(self.rows) if not row.reason]
        if done and stay and self.cache is not None:
            self._select(torch.tensor(stay, device=self.attention.device))
        self.rows = [self.rows[n] for n in stay]
        return done


def _plain_copy(model: Any, dtype: torch.dtype | None) -> Any:
    """A model without gradients and without adapters, whose merged weights `load` brings."""
    made = copy.deepcopy(model).eval().requires_grad_(False)
    for name, module in list(made.named_modules()):
        if hasattr(module, "base_layer"):
            made.set_submodule(name, module.base_layer)
    if dtype is not None:
        for parameter in made.parameters():
            parameter.data = parameter.data.to(dtype)  # buffers hold the frequencies of positions
    return made


def _widened(x: Tensor, width: int, dim: int) -> Tensor:
    """With zeros before it along a dimension."""
    shape = list(x.shape)
    shape[dim] = width - x.shape[dim]
    return torch.cat([x.new_zeros(shape), x], dim)


def left_padded(
    sequences: Sequence[Sequence[int]], device: torch.device | str
) -> tuple[Tensor, Tensor]:
    """Token ids `[R L]` that end together, and 1 where they are tokens."""
    width = max(len(ids) for ids in sequences)
    ids = torch.zeros((len(sequences), width), dtype=torch.long)
    attention = torch.zeros_like(ids)
    for row, sequence in enumerate(sequences):
        ids[row, width - len(sequence) :] = torch.tensor(sequence)
        attention[row, width - len(sequence) :] = 1
    return ids.to(device), attention.to(device)


class TransformersSampler:
    """A sampler in the process of its caller.

    Args:
        model: causal language model of transformers.
        stop_ids: tokens that end a response.
        batch: responses written at a time.
        share: sample from this very model, which the trainer changes, rather than from a copy.
        autocast: number format of matrix products; None: that of the weights. A copy is kept in
            it altogether, which spares a conversion of all weights at every token.
        version: number of the weights that the model has.
    """

    def __init__(
        self,
        model: Any,
        *,
        stop_ids: Sequence[int],
        batch: int = 64,
        share: bool = False,
        autocast: torch.dtype | None = None,
        version: int = 0,
    ) -> None:
        within(1, 1 << 16, batch=batch)
        self.model = model if share else _plain_copy(model, autocast)
        self.version, self.batch, self.share = version, batch, share
        self.stop_ids, self.autocast = frozenset(stop_ids), autocast if share else None
        self._waves: list[_Wave] = []

    @property
    def device(self) -> torch.device:
        """Where the weights lie."""
        return next(self.model.parameters()).device

    @property
    def longest(self) -> int:
        """Tokens of prompt and response together that the model takes."""
        settings = self.model.config.get_text_config()
        return int(getattr(settings, "max_position_embeddings", 1 << 20))

    @property
    def vocabulary(self) -> int:
        """Tokens that the model knows."""
        return int(self.model.config.get_text_config().vocab_size)

    def sample(
        self, requests: Sequence[Request], sampling: Sampling, between: Between | None = None
    ) -> list[list[Response]]:
        """Draw responses; those of a request stand together, in the order of their seeds.

        Raises:
            BadInput: a setting or a request that cannot be served.
            SamplerFault: a log-probability that is not finite; names the response.
        """
        checked(requests, sampling, longest=self.longest, vocabulary=self.vocabulary)
        start = time.perf_counter()
        queue = deque(
            _Row((r, i), request.prompt_ids, request.seed + i)
            for r, request in enumerate(requests)
            for i in range(request.count)
        )
        stops = self.stop_ids | frozenset(sampling.stop_ids)
        found: dict[tuple[int, int], Response] = {}
        self._waves = []
        try:
            while queue or self._waves:
                self._start(queue)
                for wave in self._waves:
                    with self._ready():
                        logits = wave.logits(self.model, self.device)
                    self._write(wave.rows, logits, sampling, stops)
                    elapsed = time.perf_counter() - start
                    found |= {row.place: row.response(elapsed) for row in wave.leave()}
                self._waves = _joined([wave for wave in self._waves if wave.rows])
                if between is not None and (queue or self._waves):
                    between()
        finally:
            self._waves = []
        return [[found[r, i] for i in range(request.count)] for r, request in enumerate(requests)]

    def _start(self, queue: deque[_Row]) -> None:
        """Begin a wave of rows that wait, where a quarter of the places are free."""
        free = self.batch - sum(len(wave.rows) for wave in self._waves)
        if queue and 4 * free >= self.batch:
            self._waves.append(_Wave([queue.popleft() for _ in range(min(free, len(queue)))]))

    def _write(
        self, rows: list[_Row], logits: Tensor, sampling: Sampling, stops: frozenset[int]
    ) -> None:
        """Draw the next token of each row."""
        logp = behavior(logits, sampling)
        uniform = torch.cat(
            [torch.rand(1, generator=row.generator, dtype=torch.float64) for row in rows]
        )
        drawn = draw(logp, uniform.to(logp.device))
        chosen = logp.gather(1, drawn.clamp(min=0).unsqueeze(1)).squeeze(1).cpu()
        kept = [part.cpu() for part in head(logp, sampling.head)] if sampling.head else []
        for n, (row, token) in enumerate(zip(rows, drawn.tolist(), strict=True)):
            if token < 0:
                raise not_finite(row.place, len(row.ids), self.version)
            row.ids.append(token)
            row.logp.append(chosen[n])
            row.versions.append(self.version)
            if kept:
                row.heads.append((kept[0][n], kept[1][n]))
            if token in stops:
                row.reason = "stop"
            elif len(row.ids) == sampling.max_tokens:
                row.reason = "length"

    @contextmanager
    def _ready(self) -> Iterator[None]:
        """Evaluation mode, no gradient, and the number format; a shared model gets back its own."""
        training = [module for module in self.model.modules() if module.training]
        cast = (
            nullcontext()
            if self.autocast is None
            else torch.autocast(self.device.type, dtype=self.autocast)
        )
        self.model.eval()
        try:
            with torch.no_grad(), cast:
                yield
        finally:
            for module in training:
                module.training = True

    def load(self, weights: Weights, version: int, *, keep_cache: bool = False) -> None:
        """Take new weights in place; a shared model has them already.

        Raises:
            SamplerFault: a name that the model has not, one that is missing, or another shape.
        """
        if not self.share:
            own = dict(self.model.named_parameters(remove_duplicate=False))
            missing = {n for n, _ in self.model.named_parameters()}
            with torch.no_grad():
                for name, value in weights:
                    if name not in own or own[name].shape != value.shape:
                        raise SamplerFault(
                            f"weights {name!r} of shape {tuple(value.shape)} do not fit the "
                            "sampler's model; allowed: the names and shapes of its parameters"
                        )
                    own[name].copy_(value)
                    missing.discard(name)
            if missing:
                raise SamplerFault(
                    f"weights lack {min(missing)!r} and {len(missing) - 1} more; allowed: all "
                    "parameters of the sampler's model"
                )
        self.version = version
        if not keep_cache:
            for wave in self._waves:
                wave.forget()

    def score(self, sequences: Sequence[tuple[Sequence[int], Sequence[int]]]) -> list[Tensor]:
        """Log-probabilities at temperature 1 of given responses after given prompts."""
        found = []
        for prompt, response in sequences:
            if not prompt or not response:
                raise BadInput("a sequence to score is empty; allowed: a prompt and a response")
            ids = torch.tensor([[*prompt, *response]], device=self.device)
            with self._ready():
                out = self.model(input_ids=ids, use_cache=False, logits_to_keep=len(response) + 1)
            logp = promote(out.logits[0, :-1]).log_softmax(-1)
            found.append(logp.gather(1, ids[0, len(prompt) :].unsqueeze(1)).squeeze(1).cpu())
        return found

    def close(self) -> None:
        """Let go of the model."""
        self.model = None


def _joined(waves: list[_Wave]) -> list[_Wave]:
    """As few waves as there can be."""
    kept: list[_Wave] = []
    for wave in waves:
        if not (kept and kept[0].join(wave)):
            kept.append(wave)
    return kept
