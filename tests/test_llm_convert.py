"""Converting a GGUF file: what is refused; `make model` runs it for real."""

from __future__ import annotations

import pytest
from checks import refused
from test_llm_vllm import SMOL

from windage.llm import models
from windage.llm.convert import convert, main


def test_what_cannot_be_converted_is_refused(tmp_path, capsys):
    with refused("no file", "GGUF"):
        convert(tmp_path / "absent.gguf", tmp_path / "model")
    (tmp_path / "there.gguf").write_bytes(b"")
    with refused("is there already"):
        convert(tmp_path / "there.gguf", tmp_path)
    assert main([str(tmp_path / "absent.gguf"), str(tmp_path / "model")]) == 2
    said = capsys.readouterr()
    assert said.out == "" and said.err.count("\n") == 1
    assert not (tmp_path / "model").exists()


@pytest.mark.long
@pytest.mark.skipif(not SMOL.exists(), reason="no SmolLM2 here: run `make model`")
def test_the_converted_model_knows_the_capital_of_france():
    """Weights, tokenizer and chat template all came over, and nothing of the quantization."""
    import torch

    loaded = models.load(SMOL)
    assert not hasattr(loaded.policy.model.config, "quantization_config")
    ids = torch.tensor([models.encode(loaded, "What is the capital of France?")])
    with torch.no_grad():
        out = loaded.policy.model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=10, do_sample=False
        )
    said = models.decode(loaded, out[0, ids.shape[1] :])
    assert said == "The capital of France is Paris."
