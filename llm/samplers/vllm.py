"""Responses drawn by vLLM, whose engine runs in this process and is driven step by step.

Differences from the embedded sampler:
1. Tokens as likely as the k-th stay in top-k; what is recorded says so.
2. Keys and values that are kept over new weights are kept as long as memory lasts: a response that
   the engine sets aside for want of it is read again by the weights of then.
3. Rounding: in float32 log-probabilities differ by about 1e-5.
"""

from __future__ import annotations

import gc
import math
import os
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any, final

import torch
from torch import Tensor

from windage.estimators.errors import BadInput, within
from windage.llm.samplers.protocol import (
    Between,
    EngineDied,
    Request,
    Response,
    SamplerFault,
    Sampling,
    Weights,
    checked,
    not_finite,
)

# Read by vLLM when it is imported. A shell sets these two besides, for libgomp reads them before:
# OMP_NUM_THREADS (cores to use), OMP_WAIT_POLICY=PASSIVE (cores are shared with the trainer).
ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
}
ENVIRONMENT_CPU = {
    "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB; else a share of all memory
    "TORCHDYNAMO_DISABLE": "1",  # else a helper is compiled at the first token
}
PREFILL = 8192


def imported() -> Any:
    """The package, imported under the environment that it needs.

    Raises:
        BadInput: it is not installed.
    """
    cpu = {} if torch.cuda.is_available() else ENVIRONMENT_CPU
    for name, value in (ENVIRONMENT | cpu).items():
        os.environ.setdefault(name, value)
    try:
        import vllm
        import vllm.sampling_params
        import vllm.v1.engine.llm_engine
    except ImportError as problem:
        if problem.name != "vllm":
            raise BadInput(f"the package vllm cannot be imported: {_line(problem)}") from None
        raise BadInput(
            "the package vllm is not installed; allowed: `make vllm` and its environment, or "
            'engine = "transformers"'
        ) from None
    return vllm


@final
class _Row:
    """A response that is being written."""

    def __init__(self, place: tuple[int, int], prompt: tuple[int, ...], seed: int) -> None:
        self.place, self.prompt, self.seed = place, prompt, seed
        self.ids: list[int] = []
        self.logp: list[float] = []
        self.versions: list[int] = []
        self.head_ids: list[list[int]] = []
        self.head_logp: list[list[float]] = []

    def take(self, output: Any, version: int, sampling: Sampling) -> None:
        """Append the tokens of a step, with what the engine says of each."""
        told = output.logprobs
        for n, token in enumerate(output.token_ids):
            where = slice(told.start_indices[n], told.end_indices[n])
            ids, logp = list(told.token_ids[where]), list(told.logprobs[where])
            if sampling.temperature == 0:
                # The engine tells of the logits; but nothing else can occur.
                logp = [0.0 if math.isfinite(logp[0]) else math.nan, 0.0] + [-math.inf] * len(ids)
                ids = [token, token] + [-1] * len(ids)
            if ids[0] != token or not math.isfinite(logp[0]):
                raise not_finite(self.place, len(self.ids), version)
            self.ids.append(token)
            self.logp.append(logp[0])
            self.versions.append(version)
            if sampling.head:
                self._keep(ids[1:], logp[1:], sampling.head)

    def _keep(self, ids: list[int], logp: list[float], count: int) -> None:
        pairs = [(i, p) for i, p in zip(ids, logp, strict=True) if p > -math.inf][:count]
        pairs += [(-1, -math.inf)] * (count - len(pairs))
        self.head_ids.append([i for i, _ in pairs])
        self.head_logp.append([p for _, p in pairs])

    def response(self, reason: str, elapsed: float) -> Response:
        """What was written."""
        return Response(
            ids=torch.tensor(self.ids),
            behavior_logp=torch.tensor(self.logp),
            versions=torch.tensor(self.versions),
            finish_reason=reason,
            seed=self.seed,
            elapsed=elapsed,
            head_ids=torch.tensor(self.head_ids) if self.head_ids else None,
            head_behavior_logp=torch.tensor(self.head_logp) if self.head_ids else None,
        )


class VllmSampler:
    """A sampler around vLLM's engine.

    Args:
        path: of the model folder; its own generation settings are not used.
        stop_ids: tokens that end a response.
        dtype: number format of the weights.
        batch: responses written at a time.
        longest: tokens of prompt and response together.
        head: greatest head that will be asked for.
        version: number of the weights in the folder.
        engine: further settings of vLLM's engine, which go before those chosen here.

    Raises:
        BadInput: vLLM is not installed, or cannot take the model.
    """

    def __init__(
        self,
        path: str,
        *,
        stop_ids: Sequence[int],
        dtype: str = "bfloat16",
        batch: int = 64,
        longest: int = 2048,
        head: int = 128,
        version: int = 0,
        engine: dict[str, Any] | None = None,
    ) -> None:
        within(1, 1 << 16, batch=batch)
        self.version, self.batch, self.longest = version, batch, longest
        self.stop_ids = frozenset(stop_ids)
        self._vllm, self._count = imported(), 0
        settings: dict[str, Any] = {
            "model": str(path),
            "dtype": dtype,
            "max_model_len": longest,
            "max_num_seqs": batch,
            # A prompt read in parts draws a token too early, and vLLM turns its generator back by
            # an offset, which that of a CPU has not: prompts are read whole.
            "enable_chunked_prefill": False,
            "max_num_batched_tokens": max(longest, PREFILL),
            "async_scheduling": False,
            "enforce_eager": not torch.cuda.is_available(),
            "skip_tokenizer_init": True,
            "generation_config": "vllm",
            "logprobs_mode": "processed_logprobs",
            "max_logprobs": max(head, 1),
            "disable_log_stats": True,
            "seed": 0,
        }
        try:
            made = self._vllm.EngineArgs(**(settings | (engine or {})))
            self._engine = self._vllm.v1.engine.llm_engine.LLMEngine.from_engine_args(made)
        except Exception as problem:
            raise BadInput(f"vLLM cannot take the model {str(path)!r}: {_line(problem)}") from None
        self._vocabulary = int(self._engine.model_config.get_vocab_size())

    def sample(
        self, requests: Sequence[Request], sampling: Sampling, between: Between | None = None
    ) -> list[list[Response]]:
        """Draw responses; those of a request stand together, in the order of their seeds.

        Raises:
            BadInput: a setting or a request that cannot be served.
            SamplerFault: a log-probability that is not finite.
            EngineDied: the engine ended.
        """
        checked(requests, sampling, longest=self.longest, vocabulary=self._vocabulary)
        start = time.perf_counter()
        queue = deque(
            _Row((r, i), request.prompt_ids, request.seed + i)
            for r, request in enumerate(requests)
            for i in range(request.count)
        )
        active: dict[str, _Row] = {}
        found: dict[tuple[int, int], Response] = {}
        with self._answering(active):
            while queue or active:
                while queue and len(active) < self.batch:
                    row = queue.popleft()
                    active[self._ask(row.prompt, self._params(sampling, row.seed))] = row
                for told in self._step():
                    row, output = active[told.request_id], told.outputs[0]
                    row.take(output, self.version, sampling)
                    if told.finished:
                        elapsed = time.perf_counter() - start
                        found[row.place] = row.response(str(output.finish_reason), elapsed)
                        del active[told.request_id]
                if between is not None and (queue or active):
                    between()
        return [[found[r, i] for i in range(request.count)] for r, request in enumerate(requests)]

    def _params(self, sampling: Sampling, seed: int) -> Any:
        kinds = self._vllm.sampling_params
        return kinds.SamplingParams(
            max_tokens=sampling.max_tokens,
            temperature=sampling.temperature,
            top_k=sampling.top_k or 0,
            top_p=sampling.top_p,
            seed=seed,
            ignore_eos=True,
            stop_token_ids=sorted(self.stop_ids | set(sampling.stop_ids)),
            logprobs=sampling.head,
            flat_logprobs=True,
            detokenize=False,
            output_kind=kinds.RequestOutputKind.DELTA,
        )

    def _ask(self, prompt: Sequence[int], params: Any) -> str:
        """Put a request to the engine; gives its name.

        What is kept of prompts is kept by version: no request meets what older weights computed.
        """
        self._count += 1
        name = str(self._count)
        asked = {"prompt_token_ids": list(prompt), "cache_salt": str(self.version)}
        self._engine.add_request(name, asked, params)
        return name

    def _step(self) -> list[Any]:
        """One step of the engine; what ends it is one line."""
        try:
            return self._engine.step()
        except Exception as problem:
            raise EngineDied(
                f"the engine vLLM failed at version {self.version}: {_line(problem)}"
            ) from problem

    @contextmanager
    def _answering(self, active: dict[str, Any]) -> Iterator[None]:
        """Whatever ends a sampling leaves neither a request behind nor what is not finite."""
        try:
            yield
        except BaseException as problem:
            with suppress(Exception):  # of an engine that has ended
                self._engine.abort_request(list(active))
                if isinstance(problem, SamplerFault):
                    self._engine.collective_rpc(emptied)
            raise

    def load(self, weights: Weights, version: int, *, keep_cache: bool = False) -> None:
        """Take new weights in place.

        On a CPU the output matrix is packed when it is loaded, and a tied one is never loaded: it
        is packed again. Responses in the making are read again unless their cache is kept.

        Raises:
            EngineDied: the engine did not take them.
            SamplerFault: it kept what older weights had computed.
        """
        try:
            items = ((name, value.detach()) for name, value in weights)
            self._engine.collective_rpc("reload_weights", kwargs={"weights_iterator": items})
            self._engine.apply_model(packed_again)
            self.version = version
            done = keep_cache or self._engine.reset_prefix_cache(reset_running_requests=True)
        except Exception as problem:
            raise EngineDied(
                f"the engine vLLM did not take the weights of version {version}: {_line(problem)}"
            ) from problem
        if not done:
            raise SamplerFault(
                f"the engine vLLM kept what weights before version {version} computed of prompts"
            )

    def score(self, sequences: Sequence[tuple[Sequence[int], Sequence[int]]]) -> list[Tensor]:
        """Log-probabilities at temperature 1 of given responses after given prompts.

        All but the last token come from one reading of the sequence; the last one as when sampling,
        from what is kept of prompts, where that is anything.
        """
        waiting: dict[str, tuple[int, bool]] = {}
        found = [torch.zeros(len(response)) for _, response in sequences]
        for n, (prompt, response) in enumerate(sequences):
            if not prompt or not response:
                raise BadInput("a sequence to score is empty; allowed: a prompt and a response")
            ids = [*prompt, *response]
            last = self._probe(logprob_token_ids=[ids[-1]])
            waiting[self._ask(ids[:-1], last)] = n, True
            if len(response) > 1:
                waiting[self._ask(ids[:-1], self._probe(prompt_logprobs=0))] = n, False
        with self._answering(waiting):
            while waiting:
                for told in self._step():
                    n, is_last = waiting.pop(told.request_id)
                    prompt, response = sequences[n]
                    if is_last:
                        at = told.outputs[0].logprobs[0]
                        found[n][-1] = at[response[-1]].logprob
                    else:
                        places = told.prompt_logprobs[
                            len(told.prompt_token_ids) - len(response) + 1 :
                        ]
                        for t, place in enumerate(places):
                            found[n][t] = place[response[t]].logprob
            if not all(bool(value.isfinite().all()) for value in found):
                raise SamplerFault(
                    "the sampler returned a log-probability of a given response that is not "
                    f"finite, weights of version {self.version}; allowed: finite logits"
                )
        return found

    def _probe(self, **asked: Any) -> Any:
        return self._vllm.SamplingParams(
            max_tokens=1, temperature=1.0, seed=0, ignore_eos=True, detokenize=False, **asked
        )

    def close(self) -> None:
        """End the engine."""
        if hasattr(self, "_engine"):
            self._engine.engine_core.shutdown()
            del self._engine
            gc.collect()


def emptied(worker: Any) -> None:
    """Clear the memory of keys and values: what is not finite there spoils whoever gets it next."""
    for part in worker.model_runner.kv_caches:
        part.zero_()


def packed_again(model: Any) -> None:
    """Pack the output matrix of vLLM's model from its present weights."""
    layer = getattr(model, "lm_head", None)
    method = getattr(layer, "quant_method", None)
    if method is not None:
        method.process_weights_after_loading(layer)


def _line(problem: BaseException) -> str:
    """Kind and first line of an error."""
    return f"{type(problem).__name__}: {(str(problem).splitlines() or [''])[0]}"
