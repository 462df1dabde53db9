"""Small faithful dumps of every format that `windage diagnose` reads, written from rows."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch

from windage.analysis.diagnose.rows import Row
from windage.llm import rollouts

Rows = Sequence[Row]


def response(number: int, *, group: int = 4, seed: int = 0, longest: int = 9) -> Row:
    """A response with every field that some format keeps; numbers are those that float32 holds."""
    rng = np.random.default_rng([seed, number])
    prompt = np.random.default_rng([seed, number // group]).integers(5, 90, 4)
    t = int(rng.integers(2, longest + 1))
    mask = rng.random(t) < 0.8
    mask[[0, -1]] = True
    behavior = np.where(mask, -rng.exponential(1.0, t), 0.0).astype(np.float32).astype(float)
    noise = rng.normal(0, 0.05, (3, t)).astype(np.float32).astype(float)
    logp, anchor, reference = np.where(mask, np.minimum(behavior + noise, 0.0), 0.0)
    reward = float(rng.integers(0, 2))
    return Row(
        where="made",
        mask=mask,
        behavior_logp=behavior,
        logp=logp.astype(np.float32).astype(float),
        proximal_logp=anchor.astype(np.float32).astype(float),
        reference_logp=reference.astype(np.float32).astype(float),
        response_ids=rng.integers(5, 90, t),
        prompt_ids=prompt,
        versions=np.full(t, 2 + number % 3),
        current_version=4,
        group_id=f"{number // group}",
        sample_id=f"{number}",
        step=5,
        reward=reward,
        outcome=reward,
        advantages=np.where(mask, reward - 0.5, 0.0),
        finish_reason=("stop", "length")[number % 4 == 3],
        temperature=0.75,
        top_p=1.0,
        raw=False,
        elapsed=t / 8,
    )


def responses(count: int = 8, **settings: Any) -> list[Row]:
    """Responses in groups; see `response`."""
    return [response(number, **settings) for number in range(count)]


def lines(path: Path, records: Iterable[Any]) -> Path:
    """A JSONL file and the folders above it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def listed(values: Any) -> list[Any]:
    return np.asarray(values).tolist()


def whole(row: Row, values: Any, filler: Any = 0.0, pad: int = 0) -> list[Any]:
    """Values of a response behind a filler for its prompt, and before one for padding."""
    return [filler] * len(row.prompt_ids) + listed(values) + [filler] * pad


def export(row: Row, number: int) -> dict[str, Any]:
    """A sequence as prime-rl's trainer exports it."""
    tokens = listed(row.prompt_ids) + listed(row.response_ids)
    return {
        "schema_version": 1,
        "step": row.step,
        "rank": 0,
        "micro_step": number,
        "micro_sequence_idx": 0,
        "export_sequence_idx": number,
        "env_name": "sums",
        "token_ids": tokens,
        "position_ids": list(range(len(tokens))),
        "loss_mask": whole(row, row.mask, False),
        "advantages": whole(row, row.advantages),
        "inference_logprobs": whole(row, row.behavior_logp),
        "trainer_logprobs": whole(row, row.logp, -3.0),
        "entropy": whole(row, np.ones(len(row.mask)), 1.0),
        "mismatch_kl": whole(row, np.zeros(len(row.mask))),
        "is_masked": whole(row, np.zeros(len(row.mask), bool), False),
    }


def packed(records: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Several exported sequences in one line; position ids start anew."""
    return {
        key: [entry for record in records for entry in record[key]]
        if isinstance(value, list)
        else value
        for key, value in records[0].items()
    }


def trace(row: Row) -> dict[str, Any]:
    """A response as the orchestrator of prime-rl records it: a graph of messages."""
    chosen = row.mask.tolist()
    return {
        "id": row.sample_id,
        "nodes": [
            {
                "parent": None,
                "token_ids": listed(row.prompt_ids),
                "mask": [False] * len(row.prompt_ids),
                "sampled": False,
                "message": {"role": "user", "content": "?"},
            },
            {
                "parent": 0,
                "token_ids": listed(row.response_ids),
                "mask": chosen,
                "sampled": True,
                "logprobs": listed(row.behavior_logp[row.mask]),
                "message": {"role": "assistant", "content": "!"},
            },
        ],
        "calls": [
            {
                "node": 1,
                "finish_reason": row.finish_reason,
                "time": {"start": 100.0, "end": 100.0 + row.elapsed},
                "sampling": {"temperature": row.temperature, "top_p": row.top_p},
            }
        ],
        "rewards": {"exact": {"score": row.reward, "weight": 1.0}},
        "info": {"group_id": row.group_id},
        "run": {"metadata": {"policy": {"start": int(row.versions[0]), "end": 4}}},
    }


def prime_rl(folder: Path, rows: Rows, *, pack: int = 1, traces: bool = False) -> Path:
    """Token exports, a folder a step, two ranks; with traces of the same responses if asked."""
    for step in dict.fromkeys(row.step for row in rows):
        own = [row for row in rows if row.step == step]
        records = [export(row, number) for number, row in enumerate(own)]
        joined = [packed(records[i : i + pack]) for i in range(0, len(records), pack)]
        place = folder / "token_exports" / f"step_{step}"
        for rank in range(2):
            part = [{**record, "rank": rank} for record in joined[rank::2]]
            lines(place / f"rank_{rank}.jsonl", part)
        (place / "STABLE").touch()
        if traces:
            where = folder / "rollouts" / f"step_{step}" / "train" / "all" / "traces.jsonl"
            lines(where, [trace(row) for row in own])
    return folder


def nemo_rl(folder: Path, rows: Rows, *, wrapped: bool = True) -> Path:
    """`train_data_step5.jsonl`: padded to one width, each field a list of one as logged."""
    for step in dict.fromkeys(row.step for row in rows):
        own = [row for row in rows if row.step == step]
        width = max(len(row.prompt_ids) + len(row.mask) for row in own) + 2
        records = []
        for number, row in enumerate(own):
            pad = width - len(row.prompt_ids) - len(row.mask)
            record = {
                "content": "text",
                "rewards": row.reward,
                "input_lengths": width - pad,
                "token_ids": whole(row, row.response_ids, 0, pad),
                "token_loss_mask": whole(row, row.mask.astype(int), 0, pad),
                "sample_loss_mask": float(row.rejected is None),
                "advantages": whole(row, row.advantages, 0.0, pad),
                "generation_logprobs": whole(row, row.behavior_logp, 0.0, pad),
                "prev_logprobs": whole(row, row.logp, 0.0, pad),
            }
            record["token_ids"][: len(row.prompt_ids)] = listed(row.prompt_ids)
            one = {key: [value] for key, value in record.items()} if wrapped else record
            records.append({**one, "idx": number})
        lines(folder / f"train_data_step{step}.jsonl", records)
    return folder


STATUS = {"stop": "completed", "length": "truncated"}


def sample(row: Row) -> dict[str, Any]:
    """A response as slime's rollout side saves it."""
    return {
        "group_index": int(row.group_id),
        "index": int(row.sample_id),
        "prompt": "?",
        "tokens": listed(row.prompt_ids) + listed(row.response_ids),
        "response": "!",
        "response_length": len(row.mask),
        "label": None,
        "reward": row.reward,
        "loss_mask": listed(row.mask.astype(int)),
        "weight_versions": [str(row.versions[0])],
        "rollout_log_probs": listed(row.behavior_logp),
        "remove_sample": False,
        "status": STATUS[row.finish_reason],
        "metadata": {"turns": 1},
    }


def slime(folder: Path, rows: Rows, *, train: bool = True) -> Path:
    """Dump details: rollout data and, if asked, what the trainer made of it."""
    for step in dict.fromkeys(row.step for row in rows):
        own = [row for row in rows if row.step == step]
        for name in ("rollout_data", "train_data"):
            (folder / name).mkdir(parents=True, exist_ok=True)
        saved = {"rollout_id": step, "samples": [sample(row) for row in own]}
        torch.save(saved, folder / "rollout_data" / f"{step}.pt")
        columns = {
            "tokens": [torch.tensor(sample(row)["tokens"]) for row in own],
            "response_lengths": [len(row.mask) for row in own],
            "sample_indices": [int(row.sample_id) for row in own],
            "rewards": [row.reward for row in own],
            "loss_masks": [torch.tensor(row.mask.astype(np.int32)) for row in own],
            "rollout_log_probs": [torch.tensor(row.behavior_logp).float() for row in own],
            "log_probs": [torch.tensor(row.logp).float() for row in own],
            "ref_log_probs": [torch.tensor(row.reference_logp).float() for row in own],
            "advantages": [torch.tensor(row.advantages).float() for row in own],
        }
        if train:
            made = {"format_version": 2, "rollout_id": step, "rank": 0, "rollout_data": columns}
            torch.save({**made, "dp_shards": [[0, len(own)]]}, folder / "train_data" / f"{step}.pt")
    return folder


def open_instruct(folder: Path, rows: Rows, *, shard: int = 5, group: int = 4) -> Path:
    """Sharded JSONL and its metadata; every token is the policy's own."""
    lines(
        folder / "run_metadata.jsonl", [{"run_name": "run", "git_commit": "0", "model_name": "m"}]
    )
    records = [
        {
            "step": row.step,
            "sample_idx": number,
            "prompt_idx": number // group,
            "prompt_tokens": listed(row.prompt_ids),
            "response_tokens": listed(row.response_ids),
            "reward": row.reward,
            "advantage": float(row.advantages[0]),
            "finish_reason": row.finish_reason,
            "dataset": "sums",
            "ground_truth": [1, 2],
            "request_info": {"num_calls": 0},
            "logprobs": listed(row.behavior_logp),
        }
        for number, row in enumerate(rows)
    ]
    for start in range(0, len(records), shard):
        name = f"run_rollouts_{start // shard:06d}.jsonl"
        lines(folder / name, records[start : start + shard])
    return folder


def text(row: Row) -> dict[str, Any]:
    """A training text of PipelineRL."""
    return {
        "text": "?!",
        "n_predicted": 1,
        "reward": row.reward,
        "logprobs": listed(row.behavior_logp[row.mask]),
        "ref_logprobs": listed(row.reference_logp[row.mask]),
        "input_ids": listed(row.prompt_ids) + listed(row.response_ids),
        "labels": whole(row, np.where(row.mask, row.response_ids, -100), -100),
        "group_id": row.group_id,
        "finished": row.finish_reason == "stop",
        "prompt_tokens": len(row.prompt_ids),
        "output_tokens": len(row.mask),
        "metadata": {
            "model_version": int(row.versions[0]),
            "rollout_index": int(row.sample_id),
            "step_index": 0,
        },
    }


def pipeline_rl(folder: Path, rows: Rows, *, group: int = 4) -> Path:
    """The actor's stream, a list of a group's texts a line."""
    records = [text(row) for row in rows]
    groups = [records[i : i + group] for i in range(0, len(records), group)]
    lines(folder / "streams" / "actor" / "0" / "0" / "0.jsonl", groups)
    lines(folder / "streams" / "stats" / "0" / "0" / "0.jsonl", [{"reward_mean": 0.5}])
    return folder


def store(folder: Path, rows: Rows) -> Path:
    """Our own store."""
    for step in dict.fromkeys(row.step for row in rows):
        own = [row for row in rows if row.step == step]
        rollouts.write(folder, step, map(stored, own), tokenizer="0", precision="float32")
    return folder


def stored(row: Row) -> dict[str, Any]:
    """The columns that every store has, and two that some have."""
    return {
        "group_id": row.group_id,
        "sample_id": row.sample_id,
        "prompt_ids": row.prompt_ids,
        "response_ids": row.response_ids,
        "mask": row.mask,
        "behavior_logp": row.behavior_logp,
        "versions": row.versions,
        "reward": row.reward,
        "outcome": row.outcome,
        "finish_reason": row.finish_reason,
        "temperature": row.temperature,
        "top_p": row.top_p,
        "top_k": row.top_k,
        "seed": 1,
        "elapsed": row.elapsed,
        "rejected": row.rejected,
        "proximal_logp": row.proximal_logp,
        "reference_logp": row.reference_logp,
    }


def column(row: Row) -> dict[str, Any]:
    """The fields of a row under their own names."""
    names = [
        name
        for name in Row.__dataclass_fields__
        if name not in ("where", "others") and getattr(row, name) is not None
    ]
    values = {name: getattr(row, name) for name in names}
    return {n: v.tolist() if isinstance(v, np.ndarray) else v for n, v in values.items()}


def plain_jsonl(folder: Path, rows: Rows) -> Path:
    """One JSONL file in our own names."""
    return lines(folder / "rows.jsonl", map(column, rows))


def plain_parquet(folder: Path, rows: Rows) -> Path:
    """One parquet file in our own names."""
    folder.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.Table.from_pylist([column(row) for row in rows]), folder / "rows.parquet")
    return folder / "rows.parquet"


def with_traces(folder: Path, rows: Rows) -> Path:
    """Token exports of prime-rl beside the traces of the same responses."""
    return prime_rl(folder, rows, traces=True)


WRITERS: Mapping[str, Callable[..., Path]] = {
    "prime-rl": prime_rl,
    "prime-rl with traces": with_traces,
    "nemo-rl": nemo_rl,
    "slime": slime,
    "open-instruct": open_instruct,
    "pipeline-rl": pipeline_rl,
    "store": store,
    "plain jsonl": plain_jsonl,
    "plain parquet": plain_parquet,
}

# What a reader finds again of a row, by writer; where the format keeps no mask every token counts.
HOLDS: Mapping[str, frozenset[str]] = {
    name: frozenset(words.split())
    for name, words in {
        "prime-rl": "mask behavior_logp logp response_ids prompt_ids advantages step "
        "current_version",
        "prime-rl with traces": "mask behavior_logp logp response_ids prompt_ids advantages step "
        "current_version versions group_id reward finish_reason temperature top_p elapsed",
        "nemo-rl": "mask behavior_logp logp response_ids prompt_ids advantages step reward",
        "slime": "mask behavior_logp logp reference_logp response_ids prompt_ids advantages step "
        "reward versions group_id sample_id finish_reason",
        "open-instruct": "behavior_logp response_ids prompt_ids step reward finish_reason",
        "pipeline-rl": "mask behavior_logp reference_logp response_ids prompt_ids reward versions "
        "group_id finish_reason",
        "store": "mask behavior_logp proximal_logp reference_logp response_ids prompt_ids versions "
        "group_id sample_id step reward outcome finish_reason temperature top_p raw elapsed",
        "plain jsonl": "mask behavior_logp logp proximal_logp reference_logp response_ids "
        "prompt_ids versions current_version group_id sample_id step reward outcome advantages "
        "finish_reason temperature top_p raw elapsed",
        "plain parquet": "mask behavior_logp logp proximal_logp reference_logp response_ids "
        "prompt_ids versions current_version group_id sample_id step reward outcome advantages "
        "finish_reason temperature top_p raw elapsed",
    }.items()
}


def unmasked(rows: Rows) -> list[Row]:
    """The same responses without a tool's tokens, for formats that do not tell them apart."""
    return [replace(row, mask=np.ones(len(row.mask), bool)) for row in rows]
