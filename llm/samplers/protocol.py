"""What every sampler takes and gives, whichever engine draws the tokens.

    mu(v) ∝ exp(z[v] / temperature) on the tokens that top-k, then top-p of the rest, keep

A recorded log-probability is that of `mu`, the distribution that the token was really drawn from.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from typing import Protocol, final, runtime_checkable

from jaxtyping import Float, Int
from torch import Tensor

from windage.estimators.errors import BadInput, within


class SamplerFault(BadInput):
    """What a sampler gave cannot be used; the message is one line: what, where, what to do."""


@final
class EngineDied(SamplerFault):
    """The engine ended by itself: another one may go on where it stood."""


def death(problem: BaseException) -> str:
    """What an engine died of, as a line; empty: it did not, the problem is a refusal.

    Example:
        >>> death(RuntimeError("out of memory")), death(BadInput("a prompt is empty"))
        ('RuntimeError: out of memory', '')
    """
    if isinstance(problem, BadInput) and not isinstance(problem, EngineDied):
        return ""
    cause = problem.__cause__ or problem
    return f"{type(cause).__name__}: {(str(cause).splitlines() or [''])[0]}"


@contextmanager
def alive() -> Iterator[None]:
    """Have an engine at work: whatever it raises that is no refusal is its death.

    Raises:
        EngineDied: one line, of what.
    """
    try:
        yield
    except BadInput:
        raise
    except Exception as problem:
        raise EngineDied(
            f"the sampler died: {death(problem)}; allowed: an engine that runs"
        ) from problem


# Called between two tokens; a sampler may be given new weights there.
Between = Callable[[], None]
Weights = Iterable[tuple[str, Tensor]]


@final
@dataclass(frozen=True, kw_only=True)
class Sampling:
    """How tokens are drawn.

    Args:
        max_tokens: of a response, the stop token included.
        temperature: divides the logits; 0: the likeliest token, whose log-probability is then 0.
        top_k: tokens that stay, the likeliest; None: all.
        top_p: the likeliest tokens that together reach this mass stay.
        head: likeliest tokens recorded at each position beside the sampled one; 0: none.
        stop_ids: tokens that end a response beside the model's own; they belong to it.
    """

    max_tokens: int = 64
    temperature: float = 1.0
    top_k: int | None = None
    top_p: float = 1.0
    head: int = 0
    stop_ids: tuple[int, ...] = ()

    def check(self) -> Sampling:
        """Refuse a setting out of range, by name.

        Raises:
            BadInput: which, its value and what is allowed.
        """
        within(1, 1 << 20, max_tokens=self.max_tokens)
        within(0, 100, temperature=self.temperature)
        within(0, 1024, head=self.head)
        if self.top_k is not None:
            within(1, 1 << 20, top_k=self.top_k)
        if not 0 < self.top_p <= 1:
            raise BadInput(f"top_p is {self.top_p:g}; allowed: above 0, up to 1")
        return self


@final
@dataclass(frozen=True, kw_only=True)
class Request:
    """Responses asked for one prompt.

    Args:
        prompt_ids: tokens; never made from text again.
        count: responses.
        seed: of the first; response i has seed + i and depends on nothing else of its batch but
            by rounding.
    """

    prompt_ids: tuple[int, ...]
    count: int
    seed: int


@final
@dataclass(frozen=True, kw_only=True, eq=False)
class Response:
    """One response as it was drawn.

    Args:
        ids: its tokens, the stop token included.
        behavior_logp: of each, in nats, under the distribution that drew it.
        versions: number of the weights that drew each.
        finish_reason: `stop`, or `length` where `max_tokens` cut it.
        seed: of the draw.
        elapsed: seconds from request to last token.
        head_ids, head_behavior_logp: the likeliest tokens at each position, -1 and -inf where
            fewer can occur; None: no head was asked for.
    """

    ids: Int[Tensor, " T"]
    behavior_logp: Float[Tensor, " T"]
    versions: Int[Tensor, " T"]
    finish_reason: str
    seed: int
    elapsed: float
    head_ids: Int[Tensor, "T K"] | None = None
    head_behavior_logp: Float[Tensor, "T K"] | None = None


def checked(
    requests: Sequence[Request], sampling: Sampling, *, longest: int, vocabulary: int
) -> None:
    """Refuse requests that cannot be served as they are meant.

    Args:
        longest: tokens of prompt and response together that the engine takes.
        vocabulary: tokens that it knows.

    Raises:
        BadInput: a prompt without tokens, too long or of unknown tokens, a count below 1, or seeds
            that two responses would share: their draws would not be independent.
    """
    sampling.check()
    seeds = sorted((r.seed, r.seed + r.count) for r in requests)
    for request in requests:
        within(1, 1 << 20, count=request.count)
        within(0, (1 << 63) - 1 - request.count, seed=request.seed)
        size = len(request.prompt_ids)
        if not 1 <= size <= longest - sampling.max_tokens:
            raise BadInput(
                f"a prompt has {size} tokens and its response up to {sampling.max_tokens}; "
                f"allowed: at least one, and {longest} together"
            )
        within(0, vocabulary - 1, **{"a token of a prompt": min(request.prompt_ids)})
        within(0, vocabulary - 1, **{"a token of a prompt": max(request.prompt_ids)})
    for (first, end), (second, _) in pairwise(seeds):
        if second < end:
            raise BadInput(
                f"requests with seeds {first} and {second} share seeds; allowed: seeds as far "
                "apart as a request has responses"
            )


def not_finite(place: tuple[int, int], position: int, version: int) -> SamplerFault:
    """Say which response met logits that are no distribution."""
    request, response = place
    return SamplerFault(
        f"the sampler returned a log-probability that is not finite: request {request}, response "
        f"{response}, token {position}, weights of version {version}; allowed: finite logits"
    )


@runtime_checkable
class Sampler(Protocol):
    """An engine that draws responses with weights that can be replaced."""

    version: int

    def sample(
        self, requests: Sequence[Request], sampling: Sampling, between: Between | None = None
    ) -> list[list[Response]]:
        """Draw responses; those of a request stand together, in the order of their seeds."""
        ...

    def load(self, weights: Weights, version: int, *, keep_cache: bool = False) -> None:
        """Take new weights in place, by the names of the trainer's model.

        Args:
            weights: names and tensors.
            version: their number, given to tokens drawn from now on.
            keep_cache: leave the keys and values of unfinished responses as they are, which the
                old weights computed; otherwise they are computed again.
        """
        ...

    def score(self, sequences: Sequence[tuple[Sequence[int], Sequence[int]]]) -> list[Tensor]:
        """Log-probabilities at temperature 1 of given responses after given prompts."""
        ...

    def close(self) -> None:
        """Free what the engine holds."""
        ...
