"""A model's log-probabilities of recorded heads, and the drift that a dump with them shows.

The yardstick is written anew: plain logits of transformers, and automatic differentiation.
"""

from __future__ import annotations

import json
from dataclasses import replace
from functools import cache, partial

import numpy as np
import pyarrow.parquet as pq
import pytest
import tiny_language_model
import torch
from checks import refused
from transformers import AutoModelForCausalLM

from windage.analysis.diagnose import document, written
from windage.analysis.diagnose.document import collect
from windage.analysis.diagnose.readers.index import read as rows_of
from windage.analysis.diagnose.rows import Row
from windage.analysis.diagnose.support import support
from windage.cli.main import main
from windage.llm.heads import told
from windage.llm.samplers.protocol import Request, Sampling
from windage.llm.samplers.transformers import TransformersSampler

PROMPTS = ((2, 6, 7, 15), (5,), (2, 8, 8, 9, 10, 11, 12, 3))
WEIGHTS = {
    "centered": lambda r: torch.ones_like(r),
    "centered_tis": lambda r: r.clamp(max=2.0),
    "centered_mask": lambda r: torch.where((r >= 0.5) & (r <= 5.0), r, 0.0),
    "starting_point": lambda r: r.clamp(max=5.0),
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """The policy, and an older one that is some noise away."""
    root = tmp_path_factory.mktemp("models")
    tiny_language_model.make(root / "policy")
    model = AutoModelForCausalLM.from_pretrained(root / "policy")
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.04 * torch.randn(parameter.shape, generator=generator)
    model.save_pretrained(root / "old")
    tiny_language_model.tokenizer().save_pretrained(root / "old")
    return {name: str(root / name) for name in ("policy", "old")}


@cache
def plain(folder):
    return AutoModelForCausalLM.from_pretrained(folder)


def drawn(folder, head, temperature=1.0):
    """Responses of windage's own sampler with a head, as rows of a dump."""
    sampler = TransformersSampler(plain(folder), stop_ids=(1,))
    requests = [Request(prompt_ids=p, count=3, seed=1000 * i) for i, p in enumerate(PROMPTS)]
    setting = Sampling(max_tokens=10, temperature=temperature, head=head)
    found = sampler.sample(requests, setting, lambda: None)
    return [
        Row(
            where="made",
            mask=np.arange(len(one.ids)) % 5 != 3,
            behavior_logp=one.behavior_logp.double().numpy(),
            response_ids=one.ids.numpy(),
            prompt_ids=np.array(request.prompt_ids),
            head_ids=one.head_ids.numpy(),
            head_behavior_logp=one.head_behavior_logp.double().numpy(),
            group_id=str(number),
            reward=float(i % 2),
            raw=False,
        )
        for number, (request, several) in enumerate(zip(requests, found, strict=True))
        for i, one in enumerate(several)
    ]


def logits_of(folder, row):
    """Logits before each token of a response, by one plain pass."""
    model = plain(folder)
    ids = torch.tensor([[*row.prompt_ids.tolist(), *row.response_ids.tolist()]])
    with torch.no_grad():
        return model(input_ids=ids).logits[0, len(row.prompt_ids) - 1 : -1].double()


def with_policy(rows, folders, **settings):
    return [
        replace(row, **columns)
        for row, columns in zip(
            rows, told([vars(r) for r in rows], policy=folders["policy"], **settings), strict=True
        )
    ]


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_columns_are_those_of_plain_logits(folders, temperature):
    rows = drawn(folders["old"], 4)
    rows[0] = replace(rows[0], head_ids=np.where(np.arange(4) < 3, rows[0].head_ids, -1))
    found = told([vars(r) for r in rows], policy=folders["policy"], temperature=temperature)
    for row, columns in zip(rows, found, strict=True):
        law = (logits_of(folders["policy"], row) / temperature).log_softmax(-1)
        own = law.gather(1, torch.from_numpy(row.response_ids)[:, None])[:, 0].numpy()
        head = law.gather(1, torch.from_numpy(row.head_ids).clamp(min=0)).numpy()
        head = np.where(row.head_ids >= 0, head, -np.inf)
        square = law.exp().square().sum(1).numpy()
        mask = row.mask
        assert np.abs(columns["logp"] - own)[mask].max() < 1e-5
        assert np.abs(columns["probability_square"] - square)[mask].max() < 1e-5
        assert np.allclose(columns["head_logp"][mask], head[mask], atol=1e-5)
        assert not columns["logp"][~mask].any() and np.isinf(columns["head_logp"][~mask]).all()
    without = told([vars(replace(r, head_ids=None)) for r in rows], policy=folders["policy"])
    assert set(without[0]) == {"logp", "probability_square"}


def wanted_drift(q, z, ids, weigh):
    """What a constant reward moves the logits by, by automatic differentiation over all tokens.

    The sampler's tail, where the head is not everything, is the trainer's, rescaled.
    """
    z = z.clone().requires_grad_(True)
    logp = z.log_softmax(-1)
    p = logp.detach().exp()
    inside = torch.zeros_like(p, dtype=torch.bool).scatter(1, ids, True)
    head = torch.zeros_like(p).scatter(1, ids, q)
    rest = [(1 - torch.where(inside, law, 0.0).sum(1)).clamp(min=1e-6) for law in (head, p)]
    law = torch.where(inside, head, p * (rest[0] / rest[1])[:, None])
    ratio = torch.where(law > 0, p / law, 0.0)
    (law * weigh(ratio) * logp).sum().backward()
    return z.grad.abs().sum(1)


@pytest.mark.parametrize("head", [27 + 5, 6])
def test_drift_is_the_gradient_of_a_constant_reward(folders, head):
    """With the whole vocabulary all is enumerated; else the tail is the trainer's, rescaled."""
    size = plain(folders["policy"]).config.vocab_size
    rows = drawn(folders["old"], min(head, size))
    figures = collect(with_policy(rows, folders)).figures()
    for name, weigh in WEIGHTS.items():
        sizes = []
        for row in rows:
            z = logits_of(folders["policy"], row)[row.mask]
            q = torch.from_numpy(row.head_behavior_logp[row.mask]).exp()
            if head >= size:  # what the sampler recorded is what the older model says
                old = logits_of(folders["old"], row)[row.mask].softmax(-1)
                ids = torch.from_numpy(row.head_ids[row.mask])
                assert (old.gather(1, ids) - q).abs().max() < 1e-5
            sizes.append(wanted_drift(q, z, torch.from_numpy(row.head_ids[row.mask]), weigh))
        wanted = float(torch.cat(sizes).mean())
        assert wanted > 0.005 or name == "starting_point"  # a cap that no ratio reaches
        assert figures[f"drift/{name}"].value == pytest.approx(wanted, rel=2e-4, abs=1e-6), name
    honest = [replace(row, head_behavior_logp=row.head_logp) for row in with_policy(rows, folders)]
    still = collect(honest).figures()
    assert all(still[f"drift/{name}"].value < 1e-6 for name in WEIGHTS)


def test_raw_heads_tell_no_drift(folders):
    rows = [replace(row, raw=True) for row in with_policy(drawn(folders["old"], 4), folders)]
    assert not any(name.startswith("drift/centered") for name in collect(rows).figures())


def test_tokens_of_another_model_are_refused(folders):
    row = vars(drawn(folders["old"], 4)[0])
    with refused("head_ids of a response holds 99", "the model that drew"):
        told([row | {"head_ids": np.full_like(row["head_ids"], 99)}], policy=folders["policy"])


def test_the_verb_writes_a_dump_that_serves_centered_entries(
    folders, tmp_path, capsys, monkeypatch
):
    names = ("group_mean", *WEIGHTS)
    monkeypatch.setattr(document, "support", partial(support, names=names))
    written.write(tmp_path / "dump.parquet", drawn(folders["old"], 6))
    out = tmp_path / "with.parquet"
    words = ["diagnose", str(tmp_path / "dump.parquet"), "--rescore", folders["policy"]]
    words += ["--sample", "6", "--write", str(out)]
    assert main([*words, "--json"]) == 0
    first = json.loads(capsys.readouterr().out)
    assert first["rescored"]["written"] == {"path": str(out), "responses": 6}
    assert first["support"]["rows"] == []
    kept = list(rows_of(out))
    assert len({row.group_id for row in kept}) == 2 and len(kept) == 6
    every = with_policy([r for r in drawn(folders["old"], 6) if r.group_id in {k.group_id for k in
                        kept}], folders)  # fmt: skip
    for ours, theirs in zip(sorted(kept, key=key), sorted(every, key=key), strict=True):
        for name in ("logp", "head_logp", "probability_square", "head_ids"):
            assert np.allclose(getattr(ours, name), getattr(theirs, name), atol=1e-6), name
    assert main(["diagnose", str(out), "--json"]) == 0
    told_now = json.loads(capsys.readouterr().out)
    by = {row["estimator"]: row for row in told_now["support"]["rows"]}
    assert all(by[name]["reason"] is None for name in ("centered", "centered_tis"))
    figures = {row["name"]: row for row in told_now["rows"]}
    assert figures["drift/centered"]["value"] > 0.02 and figures["drift/centered"]["formula"]
    assert main(words) == 2
    assert "is there already" in capsys.readouterr().err


def key(row):
    return row.group_id, tuple(row.response_ids)


def test_a_file_that_cannot_be_written_leaves_nothing(folders, tmp_path, monkeypatch):
    import pyarrow as pa

    rows = drawn(folders["old"], 2)
    path = tmp_path / "a.parquet"
    written.write(path, rows)
    before = path.read_bytes()

    def full(table, part, **settings):
        part.write_bytes(b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(pa.parquet, "write_table", full)
    with refused("a.parquet", "No space left"):
        written.write(path, rows[:2])
    assert path.read_bytes() == before and [p.name for p in tmp_path.iterdir()] == ["a.parquet"]
    monkeypatch.undo()
    assert pq.read_table(path).num_rows == len(rows)
