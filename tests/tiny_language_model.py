"""A random language model of a few thousand parameters, with its tokenizer, as a folder on disk.

`make(tmp_path / "model")` writes what `save_pretrained` writes: config.json, model.safetensors,
tokenizer.json, tokenizer_config.json with a chat template.  Nothing is fetched.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import torch

SPECIAL = ("<pad>", "<end>", "<|user|>", "<|assistant|>", "<|system|>")
WORDS = (*"0123456789+-*=?. ", "What", "is", "the", "answer", "Answer", "with", "yes", "no")
TEMPLATE = (
    "{% for message in messages %}<|{{ message['role'] }}|>{{ message['content'] }}<end>"
    "{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def make(
    folder: Path,
    kind: Literal["llama", "qwen2"] = "llama",
    tied: bool = True,
    vocab: Sequence[str] = WORDS,
    *,
    width: int = 32,
    layers: int = 2,
    longest: int = 512,
    spread: float = 0.2,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
) -> Path:
    """Write a model and its tokenizer into a folder, which is made; the same seed, the same model.

    Args:
        tied: whether the embedding is the output matrix as well.
        vocab: words and characters beside `SPECIAL`, which have the first ids: `<pad>` 0, `<end>`
            1, with which a response ends. A text loses everything else.
        width: of the hidden states, in two heads; vLLM on a CPU wants 64 or more.
        spread: standard deviation of the weights; 0.2 gives distributions far from uniform.

    Returns:
        The folder.
    """
    from transformers import LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM

    configuration, model_class = {
        "llama": (LlamaConfig, LlamaForCausalLM),
        "qwen2": (Qwen2Config, Qwen2ForCausalLM),
    }[kind]
    settings = configuration(
        vocab_size=len(SPECIAL) + len(vocab) + (kind == "qwen2"),  # its class adds <|endoftext|>
        hidden_size=width,
        intermediate_size=2 * width,
        num_hidden_layers=layers,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=longest,
        tie_word_embeddings=tied,
        initializer_range=spread,
        pad_token_id=0,
        bos_token_id=None,
        eos_token_id=1,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = model_class(settings).to(dtype)
    model.generation_config.eos_token_id = 1
    model.generation_config.pad_token_id = 0
    model.save_pretrained(folder)
    tokenizer(vocab).save_pretrained(folder)
    return folder


def tokenizer(vocab: Sequence[str] = WORDS):
    """Words and single characters as tokens, without a merge; it loses what it does not know.

    Words are added tokens of a byte-level model: folders of any kind of model load them alike.
    """
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    ids = {word.replace(" ", "Ġ"): n for n, word in enumerate((*SPECIAL, *vocab))}
    made = Tokenizer(models.BPE(ids, merges=[]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens([AddedToken(word, special=True) for word in SPECIAL])
    made.add_tokens([AddedToken(word, normalized=False) for word in vocab if len(word) > 1])
    fast = PreTrainedTokenizerFast(tokenizer_object=made, pad_token="<pad>", eos_token="<end>")
    fast.chat_template = TEMPLATE
    return fast
