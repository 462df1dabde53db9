"""What a run needs of memory, by arithmetic, before anything is loaded."""

from __future__ import annotations

from typing import Any

from windage.estimators.errors import BadInput
from windage.llm import recipe
from windage.llm.config import Config
from windage.llm.logprobs import TOKENS, VOCABULARY

BYTES = {"float32": 4, "bfloat16": 2, "float64": 8}
STATES = {"adamw": 2, "adafactor": 0, "sgd": 0}
AHEAD = ("one step off", "asynchronous")
# Numbers that a layer keeps of each token for its backward pass, in units of the hidden width, and
# those with checkpointing: its input alone.
KEPT, CHECKPOINTED = 34, 1


def estimate(config: Config) -> dict[str, float]:
    """GiB by purpose, of one process that shards nothing.

        weights P b, gradients P' b, optimizer 2 P' b (adamw), the sampler's copy P b', weights that
        wait for a sampler at work P b, a reference P b where there is no adapter, a critic's model
        4 Q b (adamw), activations R T (34 W + ...) L b, pieces of logits 3 * 256 * 8192 * 4

    with P parameters, P' of them trained, Q of the critic's, b bytes a number, b' of the sampler's,
    R responses of T tokens in a forward pass, width W and L layers.  Activations are a rule of
    thumb, good to a factor of two.

    Raises:
        BadInput: the model's configuration cannot be read.
    """
    settings, parameters, linear = _sizes(config.model.path)
    width, layers = settings.hidden_size, settings.num_hidden_layers
    b = BYTES[config.model.dtype]
    trained = linear * config.model.lora_rank if config.model.lora_rank else parameters
    tokens = config.train.micro_batch * (config.sampling.max_tokens + 64)
    kept = CHECKPOINTED if config.model.gradient_checkpointing else KEPT
    narrow = BYTES[config.model.autocast or config.model.dtype]
    sampled = BYTES[config.sampling.dtype or config.model.autocast or config.model.dtype]
    asks = config.train.mode != "offline" or config.evaluate.every > 0
    compares = "reference_logp" in recipe.resolve(config).needs and not config.model.lora_rank
    found = {
        "weights": parameters * b,
        "gradients": trained * b,
        "optimizer": STATES[config.train.optimizer] * trained * b,
        "sampler": parameters * sampled if asks else 0,
        "waiting": parameters * b if config.train.mode in AHEAD else 0,
        "reference": parameters * b if compares else 0,
        "critic": _critic(config),
        "activations": tokens * width * layers * kept * narrow,
        "logits": 3 * TOKENS * VOCABULARY * 4,
    }
    found = {k: v for k, v in found.items() if v or k not in ("waiting", "reference", "critic")}
    found["total"] = sum(found.values())
    return {"parameters": float(parameters)} | {k: v / 2**30 for k, v in found.items()}


def _critic(config: Config) -> float:
    """Bytes of a critic with a trunk of its own: weights, gradients, optimizer; of a head: none."""
    if config.critic.kind != "model":
        return 0.0
    _, parameters, _ = _sizes(config.critic.path or config.model.path)
    return parameters * BYTES[config.model.dtype] * (2 + STATES[config.train.optimizer])


def _sizes(path: str) -> tuple[Any, int, int]:
    """Configuration, parameters, and rows plus columns of all linear layers."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    try:
        settings = AutoConfig.from_pretrained(path)
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(settings)
    except Exception as problem:
        why = (str(problem).splitlines() or [type(problem).__name__])[0]
        raise BadInput(
            f"model {path!r} cannot be loaded: {why}; allowed: a folder with config.json, "
            "safetensors and a tokenizer, or a name on the hub"
        ) from None
    parameters = sum(p.numel() for p in model.parameters())
    head = model.get_output_embeddings()
    linear = sum(
        sum(m.weight.shape)
        for m in model.modules()
        if isinstance(m, torch.nn.Linear) and m is not head
    )
    return settings.get_text_config(), parameters, linear
