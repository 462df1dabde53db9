"""Recorded tokens under the policies between sampler and trainer, for shares of the mismatch.

    recorded    what the sampler said of its tokens
    repeated    the same by a pass of ours, with the sampler's weights, number format, kept keys and
                values, temperature, top-k and top-p: what differs is the engine's
    policies    top-k and top-p undone, then temperature, precision, cache and lag, every subset

Top-k and top-p are undone before these.  Under other weights they would leave out tokens that were
drawn: such a policy lies infinitely far away, and so would the shares.

`estimators.attribution` makes shares of these log-probabilities.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, final

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from windage.estimators.batch import promote
from windage.estimators.errors import BadInput, positive
from windage.llm import models
from windage.llm.logprobs import Logits
from windage.llm.models import Policy
from windage.llm.passes import pack
from windage.llm.samplers.distribution import behavior
from windage.llm.samplers.protocol import Sampling

CAUSES = ("temperature", "precision", "cache", "lag")
# Tokens of a pass, padding included, and of a piece of its logits.
TOKENS, PIECE = 4096, 64
# Of a token: all settings of the sampler, its temperature alone, the trainer's temperature, none.
DRAWN, TEMPERED, PLAIN, RAW = range(4)
Row = Mapping[str, Any]
# Logits of hidden states, before any temperature.
Output = Callable[[Policy, Tensor], Tensor]


@final
@dataclass(frozen=True, kw_only=True)
class Format:
    """In which numbers a model computes.

    Args:
        dtype: of its weights.
        autocast: of matrix products; None: that of the weights.
    """

    dtype: str = "float32"
    autocast: str | None = None


@final
@dataclass(frozen=True, kw_only=True, eq=False)
class Rescored:
    """The same tokens under all policies, nats; 0 where the policy did not choose the token.

    Args:
        recorded: by the sampler, under what really drew.
        repeated: by a pass of ours under the same settings.
        policies: top-k and top-p undone, and `CAUSES[i]` where bit i of the number is set.
        mask: tokens that the policy chose.
        widened: how many of them `repeated` has as the last token that top-k or top-p keeps, since
            our pass would have left them out.
    """

    recorded: Float[Tensor, "R T"]
    repeated: Float[Tensor, "R T"]
    policies: Float[Tensor, "L R T"]
    mask: Bool[Tensor, "R T"]
    widened: int


def rescore(
    rows: Sequence[Row],
    *,
    policy: str,
    versions: Mapping[int | None, str],
    policy_format: Format = Format(),
    sampler_format: Format = Format(),
    temperature: float = 1.0,
    kept_cache: bool = False,
    device: str = "auto",
    advance: Callable[[int], None] = lambda done: None,
) -> Rescored:
    """Pass responses through every model that lies between sampler and trainer.

    Args:
        rows: as of the rollout store: `prompt_ids`, `response_ids`, `mask`, `behavior_logp`, and as
            far as known `versions`, `temperature`, `top_p`, `top_k`; `raw` says that
            `behavior_logp` is of the model before these three.
        policy: folder of the model that was trained.
        versions: folders of the sampler's weights by version; None stands for every token.  Empty:
            the weights are the policy's, and what lag there was counts as the engine's.
        policy_format: of the trainer, whose output layer is in float32 or wider.
        sampler_format: of the sampler, whose output layer is in that format as well.
        temperature: that the trainer's log-probabilities hold.
        kept_cache: the sampler went on with keys and values of weights that were replaced.
        device: of the models, of which one at a time is loaded; with a kept cache all versions.
        advance: told how many tokens were passed.

    Raises:
        BadInput: a row of another model, of a version without weights, or drawn at temperature 0.
    """
    positive(temperature=temperature)
    table = _Table(rows)
    weights = dict(versions) or {None: policy}
    _covered(table, weights, kept_cache)
    passed = _Counter(advance)
    ways = [(sampler_format, _own)]
    if (sampler_format, policy_format) != (Format(), Format()):
        ways.append((policy_format, _exact))
    modes = []
    for numbers, output in ways:
        passes = _Passes(table, numbers, output, temperature, device, passed)
        modes.append(_modes(passes, policy, weights, kept_cache))
    return _assembled(table, modes[0], modes[-1])


def _modes(
    passes: _Passes, policy: str, weights: Mapping[int | None, str], kept_cache: bool
) -> list[tuple[Tensor, Tensor]]:
    """By the sampler's weights with its keys and values, with new ones, and by the policy's."""
    mask, drawn_by = passes.table.mask, passes.table.versions
    if {*weights.values()} == {policy}:
        return [passes.whole(policy, mask)] * 3
    new = passes.whole(policy, mask, [unlimited(one) for one in passes.table.settings])
    found = [
        passes.whole(path, mask if version is None else mask & (drawn_by == version))
        for version, path in weights.items()
    ]
    values, widened = (sum(parts[1:], parts[0]) for parts in zip(*found, strict=True))
    recomputed = values, widened
    return [passes.piecewise(weights, recomputed) if kept_cache else recomputed, recomputed, new]


def _assembled(
    table: _Table,
    sampler: Sequence[tuple[Tensor, Tensor]],
    trainer: Sequence[tuple[Tensor, Tensor]],
) -> Rescored:
    """The policy of every subset of causes."""
    policies = []
    for number in range(1 << len(CAUSES)):
        temperature, precision, cache, lag = (number >> i & 1 for i in range(len(CAUSES)))
        values, _ = (trainer if precision else sampler)[2 if lag else cache]
        policies.append(values[PLAIN if temperature else TEMPERED])
    values, widened = sampler[0]
    settings = values[DRAWN] - values[RAW]
    return Rescored(
        recorded=table.recorded + torch.where(table.raw.unsqueeze(1), settings, 0.0),
        repeated=values[DRAWN],
        policies=torch.stack(policies),
        mask=table.mask,
        widened=int(widened.sum()),
    )


@final
class _Table:
    """Responses side by side, and how they were drawn."""

    def __init__(self, rows: Sequence[Row]) -> None:
        def padded(name: str, nothing: float, dtype: torch.dtype) -> Tensor:
            found = [row.get(name) for row in rows]
            lines = [
                torch.full((len(row["response_ids"]),), nothing, dtype=dtype)
                if line is None
                else torch.from_numpy(np.array(line)).to(dtype)
                for line, row in zip(found, rows, strict=True)
            ]
            return pad_sequence(lines, batch_first=True, padding_value=nothing)

        self.prompts, self.responses = (
            [torch.from_numpy(np.array(row[name], dtype=np.int64)) for row in rows]
            for name in ("prompt_ids", "response_ids")
        )
        self.mask = padded("mask", 0, torch.bool)
        recorded = padded("behavior_logp", 0.0, torch.float64)
        self.recorded = torch.where(self.mask, recorded, 0.0)
        self.versions = padded("versions", -1, torch.long)
        self.raw = torch.tensor([bool(row.get("raw")) for row in rows])
        self.settings = [_settings(row) for row in rows]
        self.largest = max(int(ids.max()) for ids in (*self.prompts, *self.responses))
        self.longest = max(len(p) + len(r) for p, r in zip(*self.sequences, strict=True))

    @property
    def sequences(self) -> tuple[list[Tensor], list[Tensor]]:
        """Prompts and responses."""
        return self.prompts, self.responses

    def batches(self, asked: Bool[Tensor, "R T"]) -> Iterator[Int[Tensor, " _"]]:
        """Responses of one setting, as many as a pass takes, those of like length together."""
        rows = asked.any(1).nonzero().squeeze(1).tolist()
        size = {n: len(self.prompts[n]) + len(self.responses[n]) for n in rows}
        for setting in dict.fromkeys(self.settings):
            part: list[int] = []
            own = (n for n in rows if self.settings[n] == setting)
            for n in sorted(own, key=size.__getitem__, reverse=True):
                if part and size[part[0]] * (len(part) + 1) > TOKENS:
                    yield torch.tensor(part)
                    part = []
                part.append(n)
            if part:
                yield torch.tensor(part)

    def changed(self) -> list[int]:
        """Responses that more than one version wrote."""
        lengths = (len(r) for r in self.responses)
        return [n for n, k in enumerate(lengths) if len(self.versions[n, :k].unique()) > 1]


def _settings(row: Row) -> Sampling:
    """How a response was drawn; what a record does not tell had no effect."""
    temperature, top_p, top_k = (row.get(name) for name in ("temperature", "top_p", "top_k"))
    if temperature is not None and temperature <= 0:
        raise BadInput(
            "a response was drawn at temperature 0, where every other policy is infinitely far "
            "away; allowed: responses drawn at a temperature above 0"
        )
    return Sampling(
        temperature=1.0 if temperature is None else float(temperature),
        top_p=1.0 if top_p is None else float(top_p),
        top_k=None if top_k is None or top_k <= 0 else int(top_k),
    ).check()


def _covered(table: _Table, weights: Mapping[int | None, str], kept_cache: bool) -> None:
    """Refuse tokens whose weights are not given.

    Raises:
        BadInput: names the version, or says that versions are needed.
    """
    named = [version for version in weights if version is not None]
    if kept_cache and None in weights:
        raise BadInput("a kept cache is of several versions; allowed: a folder for each of them")
    if None in weights:
        return
    there = set(table.versions[table.mask].tolist())
    missing = sorted(there - {*named})
    if missing:
        what = "no version" if missing[0] < 0 else f"version {missing[0]}"
        given = ", ".join(map(str, sorted(named)))
        raise BadInput(f"a token is of {what}, whose weights are not given; allowed: {given}")


def _own(policy: Policy, hidden: Tensor) -> Tensor:
    """As an engine: the output layer in the numbers of the rest."""
    logits = promote(policy.base.get_output_embeddings()(hidden)) * policy.shape.scale
    cap = policy.shape.softcap
    return logits if cap is None else (logits / cap).tanh() * cap


def _exact(policy: Policy, hidden: Tensor) -> Tensor:
    """As our trainer: the output layer in float32 or wider."""
    head = policy.base.get_output_embeddings()
    bias = getattr(head, "bias", None)
    hidden = promote(hidden)
    made = Logits(**policy.shape._asdict())
    weight = head.weight.to(hidden.dtype)
    return made.piece(hidden, weight, None if bias is None else bias.to(hidden.dtype))


class _Counter:
    """Adds up the tokens that were passed."""

    def __init__(self, advance: Callable[[int], None]) -> None:
        self.done, self.advance = 0, advance

    def __call__(self, count: int) -> None:
        self.done += count
        self.advance(self.done)


@final
class _Passes:
    """Passes of models in one format over the tokens of a table."""

    def __init__(
        self,
        table: _Table,
        numbers: Format,
        output: Output,
        temperature: float,
        device: str,
        passed: Callable[[int], None],
    ) -> None:
        self.table, self.numbers, self.output = table, numbers, output
        self.temperature, self.device, self.passed = temperature, device, passed

    def load(self, path: str) -> Policy:
        """A model, if the tokens can be its own.

        Raises:
            BadInput: they are not.
        """
        made = models.load(
            path, dtype=self.numbers.dtype, autocast=self.numbers.autocast, device=self.device
        ).policy
        size = int(made.model.config.get_text_config().vocab_size)
        if self.table.largest >= size:
            raise BadInput(
                f"model {path!r} has {size:,} tokens, and a response holds token "
                f"{self.table.largest:,}; allowed: the model that drew the responses"
            )
        return made

    @torch.no_grad()
    def whole(
        self, path: str, asked: Bool[Tensor, "R T"], settings: Sequence[Sampling] | None = None
    ) -> tuple[Tensor, Tensor]:
        """Tokens asked about after everything before them, by the weights of one folder.

        Args:
            settings: of each response, in place of those that drew it.
        """
        out = self.nothing()
        if not asked.any():
            return out
        policy = self.load(path)
        device = next(policy.parameters()).device
        for numbers in self.table.batches(asked):
            prompts, responses = (
                [part[n] for n in numbers.tolist()] for part in self.table.sequences
            )
            packed = pack(prompts, responses, asked[numbers])
            hidden = policy.states(
                *(part.to(device) for part in (packed.ids, packed.attention, packed.places))
            )
            row, place = asked[numbers].nonzero(as_tuple=True)
            setting = (settings or self.table.settings)[int(numbers[0])]
            self.read(policy, hidden, packed.targets, (numbers[row], place), setting, out)
            self.passed(packed.ids.numel())
        return out

    @torch.no_grad()
    def piecewise(
        self, weights: Mapping[int | None, str], otherwise: tuple[Tensor, Tensor]
    ) -> tuple[Tensor, Tensor]:
        """Each piece of a response by its own weights, on keys and values of those before them.

        A token is read by the weights that draw the next one.
        """
        out = otherwise[0].clone(), otherwise[1].clone()
        rows = self.table.changed()
        needed = {int(v) for n in rows for v in self.table.versions[n].unique() if v >= 0}
        policies = {version: self.load(weights[version]) for version in sorted(needed)}
        for n in rows:
            whole = torch.cat([part[n] for part in self.table.sequences])
            before, count = len(self.table.prompts[n]), len(self.table.responses[n])
            drawn_by = self.table.versions[n, :count]
            starts = [0, *(drawn_by.diff().nonzero().squeeze(1) + 1).tolist(), count]
            cache: Any = None
            for start, end in pairwise(starts):
                policy = policies[int(drawn_by[start])]
                first = before + start - 1 if start else 0
                hidden, cache = _continued(policy, whole[first : before + end - 1], first, cache)
                place = start + self.table.mask[n, start:end].nonzero().squeeze(1)
                at = torch.full_like(place, n), place
                chosen = hidden[(before - 1 - first + place).to(hidden.device)]
                setting = self.table.settings[n]
                self.read(policy, chosen, whole[before + place], at, setting, out)
                self.passed(before + end - 1 - first)
        return out

    def nothing(self) -> tuple[Tensor, Tensor]:
        """Readings to fill, and where top-k and top-p were widened."""
        shape = self.table.mask.shape
        return torch.zeros((4, *shape), dtype=torch.float64), torch.zeros(shape, dtype=torch.long)

    def read(
        self,
        policy: Policy,
        hidden: Float[Tensor, "N D"],
        targets: Int[Tensor, " N"],
        at: tuple[Int[Tensor, " N"], Int[Tensor, " N"]],
        setting: Sampling,
        out: tuple[Tensor, Tensor],
    ) -> None:
        """Put down readings of tokens."""
        for start in range(0, len(targets), PIECE):
            part = slice(start, start + PIECE)
            with _cast(policy, hidden.device):
                logits = self.output(policy, hidden[part])
            values, widened = readings(
                logits, targets[part].to(hidden.device), setting, self.temperature
            )
            out[0][:, at[0][part], at[1][part]] = values.to(out[0])
            out[1][at[0][part], at[1][part]] = widened.to(out[1])


def _cast(policy: Policy, device: torch.device) -> Any:
    if policy.autocast is None:
        return nullcontext()
    return torch.autocast(device.type, dtype=policy.autocast)


def _continued(policy: Policy, ids: Tensor, first: int, cache: Any) -> tuple[Tensor, Any]:
    """Hidden states of the next tokens of one sequence, and its keys and values up to them."""
    device = next(policy.parameters()).device
    places = torch.arange(first, first + len(ids), device=device).unsqueeze(0)
    with _cast(policy, device):
        out = policy.base.get_decoder()(
            input_ids=ids.unsqueeze(0).to(device),
            position_ids=places,
            past_key_values=cache,
            use_cache=True,
        )
    return out.last_hidden_state[0], out.past_key_values


def readings(
    logits: Float[Tensor, "N V"],
    targets: Int[Tensor, " N"],
    setting: Sampling,
    temperature: float,
) -> tuple[Float[Tensor, "4 N"], Bool[Tensor, " N"]]:
    """Log-probabilities of tokens: drawn, tempered, plain, raw; and where limits left them out.

    A token that top-k and top-p leave out counts as the last that they keep.

    Args:
        logits: before any temperature.
        targets: the tokens.
        setting: of the sampler.
        temperature: of the trainer.

    Example:
        >>> z = torch.tensor([[0.5, 0.3, 0.2]]).log()
        >>> found, widened = readings(z, torch.tensor([1]), Sampling(top_k=1), 1.0)
        >>> found.exp().flatten(), widened
        (tensor([0.3750, 0.3000, 0.3000, 0.3000]), tensor([True]))
    """
    chosen = targets.unsqueeze(1)
    law = (logits / setting.temperature).log_softmax(-1)
    tempered = law.gather(1, chosen)
    plain, raw = (
        (logits / t).log_softmax(-1).gather(1, chosen) if t != setting.temperature else tempered
        for t in (temperature, 1.0)
    )
    drawn = behavior(logits, setting).gather(1, chosen)
    outside = drawn == -math.inf
    mass = law.masked_fill(law < tempered, -math.inf).logsumexp(-1, keepdim=True)
    drawn = torch.where(outside, tempered - mass, drawn)
    return torch.cat([drawn, tempered, plain, raw], 1).T, outside.squeeze(1)


def unlimited(setting: Sampling) -> Sampling:
    """The temperature alone, which spares sorting the vocabulary.

    Example:
        >>> unlimited(Sampling(temperature=0.5, top_p=0.9, top_k=20)) == Sampling(temperature=0.5)
        True
    """
    return Sampling(temperature=setting.temperature)
