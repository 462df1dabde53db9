"""A language model and its tokenizer, and the one forward pass that training needs of it."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, final

import torch
from jaxtyping import Int
from torch import Tensor, nn

from windage.estimators.errors import BadInput, positive, unknown
from windage.llm.kernels import fuse
from windage.llm.logprobs import LogProbs, log_probs
from windage.llm.ranks import whole
from windage.llm.rollouts import fingerprint

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float64": torch.float64}
# Weights of heads that give a class or a reward, in place of tokens.
CLASSIFIERS = ("score.", "classifier.")
# A name on the hub: owner and model, or the model alone.
HUB = re.compile(r"[\w-][\w.-]*(/[\w-][\w.-]*)?", re.ASCII)
# Greatest difference of the chunked pass from the model's own logits, at load.
TOLERANCE = 1e-3


@final
@dataclass(frozen=True, kw_only=True)
class Lora:
    """Low-rank adapters on the linear layers, all but the output's.

    Args:
        rank: of each adapter.
        alpha: the adapter's output is multiplied by alpha / rank.
        targets: names of layers; empty: all linear layers.

    References:
        Hu et al., 2021, arXiv:2106.09685.
    """

    rank: int = 16
    alpha: float = 32.0
    targets: tuple[str, ...] = ()


class Shape(NamedTuple):
    """How a model makes logits of hidden states, beside its output matrix."""

    scale: float = 1.0
    softcap: float | None = None


class Policy(nn.Module):
    """A causal language model whose forward pass gives log-probabilities, never logits.

    Args:
        model: of transformers, with or without adapters.
        autocast: number format of its matrix products; None: that of its weights.
    """

    def __init__(self, model: Any, autocast: torch.dtype | None = None) -> None:
        super().__init__()
        self.model, self.autocast = model, autocast
        settings = model.config.get_text_config()
        scale = getattr(settings, "logit_scale", None) or 1.0
        divisor = getattr(settings, "logits_scaling", None) or 1.0
        cap = getattr(settings, "final_logit_softcapping", None)
        self.shape = Shape(scale=scale / divisor, softcap=cap)

    @property
    def base(self) -> Any:
        """The model without the wrapper of its adapters."""
        return self.model.get_base_model() if hasattr(self.model, "peft_config") else self.model

    def forward(
        self,
        ids: Int[Tensor, "R L"],
        attention: Int[Tensor, "R L"],
        places: Int[Tensor, " N"],
        targets: Int[Tensor, " N"],
        head_ids: Int[Tensor, "N K"] | None = None,
        temperature: float = 1.0,
    ) -> tuple[LogProbs, Tensor]:
        """Log-probabilities of some tokens, and the hidden states before them.

        Args:
            ids: sequences, padded on either side.
            attention: 1 on tokens, 0 on padding.
            places: of the hidden states in the flattened sequences: one before each target.
            targets: tokens asked about.
            head_ids: others asked about at the same places.
            temperature: of the sampler.
        """
        hidden = self._states(ids, attention, places)
        head = self.base.get_output_embeddings()
        found = log_probs(
            hidden,
            head.weight,
            targets,
            head_ids,
            bias=getattr(head, "bias", None),
            temperature=temperature,
            **self.shape._asdict(),
        )
        return found, hidden

    def states(
        self, ids: Int[Tensor, "R L"], attention: Int[Tensor, "R L"], places: Int[Tensor, " N"]
    ) -> Tensor:
        """The hidden states at some places, as of `forward`, without log-probabilities."""
        return self._states(ids, attention, places)

    def _states(self, ids: Tensor, attention: Tensor, places: Tensor) -> Tensor:
        cast = (
            nullcontext()
            if self.autocast is None
            else torch.autocast(ids.device.type, dtype=self.autocast)
        )
        positions = (attention.cumsum(-1) - 1).clamp(min=0)
        with cast:
            out = self.base.get_decoder()(
                input_ids=ids, attention_mask=attention, position_ids=positions, use_cache=False
            )
        hidden: Tensor = out.last_hidden_state.flatten(0, 1)[places]
        return hidden


@final
@dataclass(frozen=True, kw_only=True, eq=False)
class Loaded:
    """A model that is ready, with what belongs to it.

    Args:
        policy: the model.
        tokenizer: of transformers.
        fingerprint: of the tokenizer's vocabulary.
        stop_ids: tokens that end a response.
        path: where it came from.
    """

    policy: Policy
    tokenizer: Any
    fingerprint: str
    stop_ids: tuple[int, ...]
    path: str = field(default="")

    @property
    def device(self) -> torch.device:
        """Where the weights lie."""
        return next(self.policy.parameters()).device


def load(
    path: str | Path,
    *,
    dtype: str = "float32",
    autocast: str | None = None,
    device: str = "auto",
    lora: Lora | None = None,
    checkpointing: bool = False,
    liger: str = "off",
) -> Loaded:
    """A causal language model from a folder, or by its name from the hub.

    Args:
        path: folder with weights, configuration and tokenizer; nothing in it is executed.
        dtype: number format of the weights.
        autocast: of matrix products; None: that of the weights.
        device: `cpu`, `cuda`, ...; `auto`: an accelerator where there is one.
        lora: adapters to train in place of the weights.
        checkpointing: compute activations again in the backward pass rather than keep them.
        liger: fused kernels for its layers, as `kernels.fuse` has it.

    Raises:
        BadInput: no such model, one that cannot be read, or one whose logits are not those of its
            hidden states times its output matrix.
    """
    for name in (dtype, autocast):
        if name is not None and name not in DTYPES:
            raise unknown("dtype", name, DTYPES)
    model, tokenizer = _read(str(path), DTYPES[dtype])
    vocabulary = tokenizer.convert_ids_to_tokens(range(len(tokenizer)))
    if lora is not None:
        model = _adapted(model, lora)
    if checkpointing:
        _checkpointed(model, str(path))
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0  # a pass that is differentiated must be the pass that was measured
    policy = Policy(model, DTYPES[autocast] if autocast else None).to(chosen(device))
    _check(policy, str(path))
    fuse(policy, liger, str(path))
    return Loaded(
        policy=policy,
        tokenizer=tokenizer,
        fingerprint=fingerprint(vocabulary),
        stop_ids=_stop_ids(model, tokenizer),
        path=str(path),
    )


def _checkpointed(model: Any, path: str) -> None:
    """Compute what the layers keep for the backward pass again there.

    They do it in training mode alone, which nothing else of the model is in: none drops anything.

    Raises:
        BadInput: a model whose layers cannot.
    """
    from transformers.modeling_layers import GradientCheckpointingLayer

    layers = [one for one in model.modules() if isinstance(one, GradientCheckpointingLayer)]
    if not layers:
        raise BadInput(f"model {path!r} keeps its activations; allowed: no gradient_checkpointing")
    model.gradient_checkpointing_enable()
    if hasattr(model, "peft_config"):
        model.enable_input_require_grads()
    for layer in layers:
        layer.training = True
        for name, value in vars(layer).items():
            if "dropout" in name and isinstance(value, float):
                setattr(layer, name, 0.0)


def chosen(device: str) -> torch.device:
    """The device of a name; `auto`: an accelerator where there is one.

    Raises:
        BadInput: a device that there is not.
    """
    if device == "auto":
        found = torch.accelerator.current_accelerator()
        usable = found is not None and torch.accelerator.is_available()
        return found if usable and found is not None else torch.device("cpu")
    try:
        torch.zeros(0, device=device)
        return torch.device(device)
    except (RuntimeError, AssertionError):
        raise BadInput(
            f"device is {device!r}; allowed here: auto, cpu or what torch sees"
        ) from None


def _read(path: str, dtype: torch.dtype) -> tuple[Any, Any]:
    from huggingface_hub.utils import logging as hub_logging
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    hub_logging.set_verbosity_error()
    allowed = "a folder with config.json, safetensors and a tokenizer, or a name on the hub"
    if Path(path).exists() and not (Path(path) / "config.json").is_file():
        raise BadInput(f"model {path!r} has no config.json; allowed: {allowed}")
    if not Path(path).exists() and not HUB.fullmatch(path):
        raise BadInput(f"model {path!r} is no folder; allowed: {allowed}")
    # Unset, transformers asks on the terminal whether to run a folder's own code.
    plain: dict[str, Any] = {"trust_remote_code": False}
    try:
        told = AutoConfig.from_pretrained(path, **plain)  # first: a name that is none ends here
        tokenizer: Any = AutoTokenizer.from_pretrained(path, **plain)
        plain |= {"config": told, "dtype": dtype, "use_safetensors": True}
        loaded: Any = AutoModelForCausalLM.from_pretrained(path, output_loading_info=True, **plain)
        model, found = loaded
    except Exception as problem:
        why = (str(problem).splitlines() or [type(problem).__name__])[0]
        raise BadInput(f"model {path!r} cannot be loaded: {why}; allowed: {allowed}") from None
    _whole(path, model, found, len(tokenizer))
    return model, tokenizer


def _whole(path: str, model: Any, found: Any, words: int) -> None:
    """Refuse weights that are missing, of another shape or not finite, and too few of them."""
    lacks = sorted({*found["missing_keys"], *(name for name, *_ in found["mismatched_keys"])})
    infinite = [name for name, value in model.named_parameters() if not value.isfinite().all()]
    rows = model.get_input_embeddings().num_embeddings
    other = [name for name in found["unexpected_keys"] if name.startswith(CLASSIFIERS)]
    why = ""
    if lacks:
        why = f"its weights lack {lacks[0]}{f' and {len(lacks) - 1} more' * (len(lacks) > 1)}"
    elif infinite:
        why = f"{infinite[0]} holds numbers that are not finite"
    elif words > rows:
        why = f"its tokenizer has {words} tokens, its embedding {rows}"
    elif other:
        why = f"{other[0]} is of a classifier, which draws no tokens"
    if why:
        raise BadInput(f"model {path!r}: {why}; allowed: a whole model with its own tokenizer")


def _adapted(model: Any, lora: Lora) -> Any:
    from peft import LoraConfig, get_peft_model

    positive(rank=lora.rank, alpha=lora.alpha)
    settings = LoraConfig(
        r=lora.rank,
        lora_alpha=lora.alpha,  # type: ignore[arg-type]
        target_modules=list(lora.targets) or "all-linear",
        lora_dropout=0.0,
        task_type="CAUSAL_LM",
    )
    try:
        return get_peft_model(model, settings)
    except ValueError as problem:
        raise BadInput(
            f"lora targets {list(lora.targets)}: {str(problem).splitlines()[0]}; "
            "allowed: names of linear layers, or none for all"
        ) from None


@torch.no_grad()
def _check(policy: Policy, path: str) -> None:
    """Refuse a model whose logits are not made as the chunked pass makes them."""
    device = next(policy.parameters()).device
    ids = torch.arange(4, device=device).unsqueeze(0)
    ones = torch.ones_like(ids)
    found, _ = policy(ids, ones, torch.arange(3, device=device), ids[0, 1:])
    with torch.autocast(
        device.type, dtype=policy.autocast or torch.bfloat16, enabled=policy.autocast is not None
    ):
        logits = policy.model(input_ids=ids, attention_mask=ones, use_cache=False).logits[0, :3]
    logp = logits.to(found.logp.dtype).log_softmax(-1)
    wanted = logp.gather(-1, ids[0, 1:].unsqueeze(-1)).squeeze(-1)
    narrow = policy.autocast is not None or logits.dtype == torch.bfloat16
    gap = float((found.logp - wanted).abs().max())
    if not gap <= (1.0 if narrow else TOLERANCE):
        raise BadInput(
            f"model {path!r}: its log-probabilities differ by {gap:.2g} from those of its hidden "
            "states times its output matrix; allowed: models without further layers in between"
        )


def _stop_ids(model: Any, tokenizer: Any) -> tuple[int, ...]:
    """The tokens that end a response, of tokenizer and generation settings."""
    told = getattr(model.generation_config, "eos_token_id", None)
    several = list(told) if isinstance(told, list | tuple) else [told]
    found = [tokenizer.eos_token_id, *several]
    return tuple(dict.fromkeys(int(i) for i in found if i is not None))


def encode(loaded: Loaded, text: str) -> tuple[int, ...]:
    """Tokens of a question, with the chat template around it where the tokenizer has one.

    Raises:
        BadInput: nothing is left of the text, or the template cannot be used.
    """
    tokenizer = loaded.tokenizer
    if tokenizer.chat_template:
        message = [{"role": "user", "content": text}]
        try:
            text = tokenizer.apply_chat_template(
                message, tokenize=False, add_generation_prompt=True
            )
        except Exception as problem:
            why = f"{type(problem).__name__}: {problem}".splitlines()[0]
            raise BadInput(
                f"model {loaded.path!r}: its chat template fails on a question: {why}; allowed: a "
                "template that takes a message of a user, or none"
            ) from None
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    else:
        ids = tokenizer(text)["input_ids"]
    if not ids:
        raise BadInput(f"the prompt {text[:40]!r} has no tokens; allowed: text")
    return tuple(int(i) for i in ids)


def decode(loaded: Loaded, ids: Sequence[int] | Tensor) -> str:
    """Text of a response, its stop token left out.

    Special tokens in between stay: what a model wrote is judged as it wrote it.
    """
    plain = [int(i) for i in ids]
    while plain and plain[-1] in loaded.stop_ids:
        plain.pop()
    return str(loaded.tokenizer.decode(plain, skip_special_tokens=False))


def weights(policy: Policy) -> Iterator[tuple[str, Tensor]]:
    """Every weight by its name in the plain model, adapters merged into what they adapt.

    A sampler takes these; a tied output matrix goes by the embedding's name alone.  Processes that
    each hold a share of the weights go through them in step, and each gets them whole.
    """
    return ((name, whole(value)) for name, value in _weights(policy))


def _weights(policy: Policy) -> Iterator[tuple[str, Tensor]]:
    if not hasattr(policy.model, "peft_config"):
        yield from ((n, p.detach()) for n, p in policy.model.named_parameters())
        return
    from peft.tuners.tuners_utils import BaseTunerLayer

    base = policy.base
    adapted = {n: m for n, m in base.named_modules() if isinstance(m, BaseTunerLayer)}
    for name, parameter in base.named_parameters():
        layer, _, rest = name.partition(".base_layer.")
        if layer not in adapted:
            if ".lora_" not in name:
                yield name, parameter.detach()
            continue
        value = parameter.detach()
        if rest == "weight":
            tuner: Any = adapted[layer]
            (adapter,) = tuner.active_adapters
            value = value + tuner.get_delta_weight(adapter).detach().to(value.dtype)
        yield f"{layer}.{rest}", value


def reference_pass(policy: Policy) -> Any:
    """A context in which the model is the one that it was before its adapters were trained."""
    return policy.model.disable_adapter() if hasattr(policy.model, "peft_config") else nullcontext()
