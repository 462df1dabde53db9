"""Any loss, called with the arguments of its signature, and the coefficients in its gradient.

    C[n, t] = -d loss / d logp[n, t]

Signatures:
    plain: (logp, behavior_logp, advantages, mask) -> loss, with shapes [N T], [N T], [N], [N T].
        Where a loss does not take advantages [N] it gets [N T]; where it does not take a boolean
        mask it gets one of 0.0 and 1.0.  Parameters of these names are passed by name, others in
        this order.
    verl: old_log_prob, log_prob, advantages, response_mask [N T], loss_agg_mode, config,
        rollout_is_weights, by name -> (loss, metrics).
    trl: a dictionary `inputs` with per_token_logps, old_per_token_logps, advantages [N],
        completion_mask, num_items_in_batch; or parameters of these names.
    tinker: (data, logprobs) -> (loss, metrics), lists with one entry a response, not padded.
"""

from __future__ import annotations

import inspect
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass
from importlib import import_module
from types import SimpleNamespace
from typing import Any, final

import torch
from torch import Tensor

from windage.analysis.audit.samples import Sample, probe
from windage.analysis.audit.words import SIGNATURES
from windage.estimators.errors import BadInput, unknown

PLAIN = ("logp", "behavior_logp", "advantages", "mask")
TRL = ("per_token_logps", "old_per_token_logps", "completion_mask", "inputs")
TINKER = ("data", "logprobs")


@final
@dataclass(frozen=True)
class Layout:
    """How a plain loss wants its advantages and its mask."""

    per_token: bool = False
    number_mask: bool = False

    @property
    def words(self) -> str:
        """For messages."""
        advantages = "[N T]" if self.per_token else "[N]"
        return f"advantages {advantages}, mask {'0.0 or 1.0' if self.number_mask else 'boolean'}"


def _wide(advantages: Tensor, mask: Tensor) -> Tensor:
    return advantages.unsqueeze(-1).expand(mask.shape).clone()


def call_plain(loss: Loss, s: Sample) -> Any:
    """Call a loss with logp, behavior_logp, advantages and mask."""
    values = {
        "logp": s.logp,
        "behavior_logp": s.behavior_logp,
        "advantages": _wide(s.advantages, s.mask) if loss.layout.per_token else s.advantages,
        "mask": s.mask.to(s.logp.dtype) if loss.layout.number_mask else s.mask,
    }
    if set(PLAIN) <= set(loss.parameters):
        return loss.function(**values)
    return loss.function(*values.values())


class Settings(SimpleNamespace):
    """Stand-in for verl's actor settings: attributes, and `get` with a default."""

    def get(self, name: str, default: Any = None) -> Any:
        """An attribute, or the default."""
        return getattr(self, name, default)


def _named(loss: Loss, values: Mapping[str, Any]) -> Any:
    """Call with those of the values that the function has parameters for."""
    own = loss.parameters
    every = any(p.kind is p.VAR_KEYWORD for p in own.values())
    return loss.function(**{k: v for k, v in values.items() if every or k in own})


def call_verl(loss: Loss, s: Sample) -> Any:
    """Call a loss as verl's actor does; its defaults are verl's."""
    config = Settings(
        clip_ratio=0.2,
        clip_ratio_low=0.2,
        clip_ratio_high=0.2,
        clip_ratio_c=3.0,
        loss_agg_mode="token-mean",
        loss_scale_factor=None,
        policy_loss=Settings(),
        global_batch_info={},
    )
    values = {
        "old_log_prob": s.behavior_logp,
        "log_prob": s.logp,
        "advantages": _wide(s.advantages, s.mask),
        "response_mask": s.mask.to(s.logp.dtype) if loss.layout.number_mask else s.mask,
        "loss_agg_mode": "token-mean",
        "config": config,
        "rollout_is_weights": None,
    }
    return _named(loss, values)


def call_trl(loss: Loss, s: Sample) -> Any:
    """Call a loss with the inputs of TRL's GRPO trainer."""
    inputs = {
        "per_token_logps": s.logp,
        "old_per_token_logps": s.behavior_logp,
        "sampling_per_token_logps": s.behavior_logp,
        "advantages": _wide(s.advantages, s.mask) if loss.layout.per_token else s.advantages,
        "completion_mask": s.mask.to(s.logp.dtype) if loss.layout.number_mask else s.mask.long(),
        "num_items_in_batch": s.mask.sum(),
    }
    model = SimpleNamespace(training=True)
    return _named(loss, {**inputs, "inputs": inputs, "model": model})


@final
@dataclass(frozen=True)
class Numbers:
    """Stand-in for tinker's TensorData."""

    tensor: Tensor

    @property
    def data(self) -> list[float]:
        """As a list."""
        return self.tolist()

    def to_torch(self) -> Tensor:
        """As a tensor."""
        return self.tensor

    def tolist(self) -> list[float]:
        """As a list."""
        values: list[float] = self.tensor.tolist()
        return values


def call_tinker(loss: Loss, s: Sample) -> Any:
    """Call a loss with one datum and one vector of log-probabilities a response."""
    data, logprobs = [], []
    for row in range(len(s.mask)):
        real = torch.nonzero(s.mask[row]).flatten()
        end = int(real[-1]) + 1 if len(real) else 0
        mask = s.mask[row, :end].to(s.logp.dtype)
        fields = {
            "logprobs": s.behavior_logp[row, :end],
            "advantages": s.advantages[row] * mask,
            "mask": mask,
            "weights": mask,
            "target_tokens": torch.zeros(end, dtype=torch.long),
        }
        inputs = {name: Numbers(value) for name, value in fields.items()}
        data.append(SimpleNamespace(loss_fn_inputs=inputs))
        logprobs.append(s.logp[row, :end])
    return loss.function(data, logprobs)


CALLS: Mapping[str, Callable[[Loss, Sample], Any]] = {
    "plain": call_plain,
    "verl": call_verl,
    "trl": call_trl,
    "tinker": call_tinker,
}


def parameters(function: Callable[..., Any]) -> Mapping[str, inspect.Parameter]:
    """Parameters by name; none where they cannot be read."""
    try:
        return inspect.signature(function).parameters
    except (TypeError, ValueError):
        return {}


def detect(function: Callable[..., Any]) -> str:
    """The signature that a function's parameter names say.

    Example:
        >>> detect(lambda old_log_prob, log_prob, advantages, response_mask: None)
        'verl'
        >>> detect(lambda a, b, c, d: None)
        'plain'
    """
    names = list(parameters(function))
    if {"old_log_prob", "log_prob"} <= set(names):
        return "verl"
    if set(TRL) & set(names):
        return "trl"
    return "tinker" if names[:2] == list(TINKER) else "plain"


@final
@dataclass(frozen=True, kw_only=True, eq=False)
class Loss:
    """A loss that was tried: its name, how it is called, and its gradient."""

    name: str
    function: Callable[..., Any]
    signature: str
    layout: Layout
    parameters: Mapping[str, inspect.Parameter]

    def coefficients(self, s: Sample) -> Tensor:
        """Minus the gradient by logp, NaN where it is not a number.

        Raises:
            BadInput: the loss raises, or returns anything but a scalar with a gradient.
        """
        leaf = s.logp.detach().clone().requires_grad_()
        given = Sample(
            name=s.name,
            logp=leaf.clone(),
            behavior_logp=s.behavior_logp.clone(),
            advantages=s.advantages.clone(),
            mask=s.mask.clone(),
        )
        with redirect_stdout(sys.stderr):
            loss = self._loss(given)
        if not loss.requires_grad:
            raise BadInput(f"{self.name}: no gradient reaches logp on {s.name}")
        try:
            (gradient,) = torch.autograd.grad(loss, leaf, allow_unused=True)
        except RuntimeError as problem:
            raise BadInput(
                f"{self.name}: {_said(problem)} in its gradient on {s.name}"
            ) from problem
        if gradient is None:
            raise BadInput(f"{self.name}: no gradient reaches logp on {s.name}")
        found: Tensor = -gradient
        return found if bool(torch.isfinite(loss)) else torch.full_like(found, torch.nan)

    def _loss(self, s: Sample) -> Tensor:
        try:
            result = CALLS[self.signature](self, s)
        except (Exception, SystemExit) as problem:
            called = f"called as {self.signature}: {SIGNATURES[self.signature]}"
            raise BadInput(f"{self.name}: {_said(problem)} on {s.name}, {called}") from problem
        loss = result[0] if isinstance(result, tuple | list) and result else result
        if isinstance(loss, Mapping) and "loss" in loss:
            loss = loss["loss"]
        if not isinstance(loss, Tensor):
            kind = type(loss).__name__
            raise BadInput(f"{self.name}: returned {kind} on {s.name}; allowed: a scalar tensor")
        if loss.dim() != 0:
            shape = tuple(loss.shape)
            raise BadInput(
                f"{self.name}: returned shape {shape} on {s.name}; allowed: a scalar tensor"
            )
        return loss


def _said(problem: BaseException) -> str:
    """`raised ValueError: why (file.py:12)` with the innermost line of the user's code."""
    words = " ".join(str(problem).split()) or "without a message"
    trace = problem.__traceback__
    place = ""
    while trace is not None:
        file = trace.tb_frame.f_code.co_filename
        module = trace.tb_frame.f_globals.get("__name__", "")
        if not module.startswith("windage.") and "site-packages" not in file:
            place = f" ({file.rsplit('/', 1)[-1]}:{trace.tb_lineno})"
        trace = trace.tb_next
    return f"raised {type(problem).__name__}: {words[:300]}{place}"


def tried(name: str, function: Callable[..., Any], signature: str | None = None) -> Loss:
    """Find how a loss wants to be called, on a harmless input.

    Raises:
        BadInput: it raises, returns no scalar, NaN, or a loss without a gradient.
    """
    kind = detect(function) if signature is None else signature
    if kind not in CALLS:
        raise unknown("signature", kind, SIGNATURES)
    first: BadInput | None = None
    for layout in (Layout(), Layout(False, True), Layout(True, False), Layout(True, True)):
        loss = Loss(
            name=name,
            function=function,
            signature=kind,
            layout=layout,
            parameters=parameters(function),
        )
        try:
            found = loss.coefficients(probe())
        except BadInput as problem:
            first = first or problem
            continue
        if not bool(torch.isfinite(found).all()):
            first = first or BadInput(
                f"{name}: NaN or infinite on {probe().name}; allowed: a finite loss and gradient"
            )
            continue
        return loss
    assert first is not None
    raise first


def load(text: str) -> Callable[..., Any]:
    """Import the user's own `module:function`; the working directory comes last on the path.

    Raises:
        BadInput: no such form, no such module, no such function, or the import raises.
    """
    module, _, path = text.partition(":")
    words = [*module.split("."), *path.split(".")]
    if not path or not all(word.isidentifier() for word in words):
        raise BadInput(f"{text!r} is no loss; allowed: module:function, such as my_losses:ppo")
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())
    try:
        with redirect_stdout(sys.stderr):
            found: Any = import_module(module)
    except ModuleNotFoundError as problem:
        if problem.name is not None and f"{module}.".startswith(f"{problem.name}."):
            raise BadInput(
                f"{text!r}: no module {problem.name!r} on the import path or in the working "
                "directory; allowed: module:function"
            ) from None
        raise BadInput(f"{text!r}: importing {module}: {_said(problem)}") from problem
    except (Exception, SystemExit) as problem:
        raise BadInput(f"{text!r}: importing {module}: {_said(problem)}") from problem
    for word in path.split("."):
        if not hasattr(found, word):
            raise unknown(f"function of {module}", path, _functions(found))
        found = getattr(found, word)
    if not callable(found):
        raise BadInput(f"{text!r} is {type(found).__name__}; allowed: a function")
    return found


def _functions(place: Any) -> Sequence[str]:
    """Public callables of a module, the ones it defines first."""
    names = [n for n in dir(place) if not n.startswith("_") and callable(getattr(place, n))]
    own = [n for n in names if getattr(getattr(place, n), "__module__", "") == place.__name__]
    return own or names
