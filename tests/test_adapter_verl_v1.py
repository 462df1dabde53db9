"""verl 0.9.1's v1 trainers: their own methods on batches that TransferQueue would hold.

Run by `make check-verl`; skipped where verl or TransferQueue is not installed.
"""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import torch
from adapter_cases import GROUPS, PROMPT, case, entry
from checks import assert_close, refused
from test_adapter_verl import python

pytest.importorskip("verl")
pytest.importorskip("transfer_queue")
pytestmark = pytest.mark.filterwarnings("default")

from hydra import compose, initialize_config_module  # noqa: E402
from omegaconf import OmegaConf  # noqa: E402
from transfer_queue import KVBatchMeta  # noqa: E402
from verl.trainer.ppo.v1 import trainer_base  # noqa: E402
from verl.trainer.ppo.v1.trainer_separate_async import PPOTrainerSeparateAsync  # noqa: E402
from verl.trainer.ppo.v1.trainer_sync import PPOTrainerSync  # noqa: E402
from verl.utils.tensordict_utils import list_of_dict_to_tensordict  # noqa: E402

from windage.llm.adapters import verl as adapter  # noqa: E402
from windage.llm.adapters.terms import advantages_of, batch_of, groups_of  # noqa: E402
from windage.llm.record import record_verl  # noqa: E402
from windage.llm.record.verl import ASKED  # noqa: E402
from windage.llm.rollouts import read  # noqa: E402

PADS = 2
STEP = 7
SQUARE = 0.3


class Words:
    """A tokenizer of two tokens."""

    eos_token_id = 1

    def __len__(self) -> int:
        return 2

    def convert_ids_to_tokens(self, ids: Any) -> list[str]:
        return ["ab"[n] for n in ids]


class Queue:
    """TransferQueue's two calls on a table in this process."""

    def __init__(self) -> None:
        self.rows: dict[str, dict[str, Any]] = {}
        self.tags: dict[str, dict[str, Any]] = {}

    def kv_batch_get(self, keys: list[str], partition_id: str, select_fields: Any = None) -> Any:
        rows = [self.rows[key] for key in keys]
        fields = [n for n in (select_fields or rows[0]) if all(n in row for row in rows)]
        return list_of_dict_to_tensordict([{n: row[n] for n in fields} for row in rows])

    def kv_batch_put(
        self, keys: list[str], partition_id: str, fields: Any, tags: Any = None
    ) -> Any:
        for name, value in fields.items():
            for key, one in zip(keys, value.unbind(), strict=True):
                self.rows.setdefault(key, {})[name] = one
        return KVBatchMeta(
            partition_id=partition_id, keys=keys, tags=[self.tags[key] for key in keys]
        )


def filled(queue: Queue) -> KVBatchMeta:
    """The twelve responses and rows that fill the batch up, as verl makes them."""
    c = case()
    keys = []
    for n, uid in enumerate(GROUPS):
        length = int(c.real[n].sum())
        scores = torch.zeros(length)
        scores[-1] = c.rewards[n]
        keys.append(f"{uid}_{n}_0")
        queue.rows[keys[-1]] = {
            "uid": uid,
            "prompts": c.ids[n, :PROMPT],
            "responses": c.ids[n, PROMPT : PROMPT + length],
            "response_mask": c.mask[n, :length].long(),
            "rm_scores": scores,
            "rollout_log_probs": c.behavior_logp[n, :length].clamp(max=0).float(),
        }
        queue.tags[keys[-1]] = {"min_global_steps": n % 3, "max_global_steps": 3, "seq_len": 1}
    for n in range(PADS):
        keys.append(f"pad{7:032x}_{n}_0")
        one = {name: torch.zeros(1) for name in ("rm_scores", "rollout_log_probs")}
        ids = {"prompts": torch.ones(PROMPT).long(), "responses": torch.ones(1).long()}
        mask = {"response_mask": torch.zeros(1).long()}
        queue.rows[keys[-1]] = {"uid": f"pad{7:032x}", **ids, **one, **mask}
        queue.tags[keys[-1]] = {"is_padding": True, "min_global_steps": 0, "seq_len": 1}
    order = torch.randperm(len(keys), generator=torch.Generator().manual_seed(2)).tolist()
    keys = [keys[n] for n in order]
    return KVBatchMeta(partition_id="train", keys=keys, tags=[queue.tags[key] for key in keys])


class Workers:
    """What the workers' pass for the old log-probabilities leaves in the queue."""

    def __init__(self, queue: Queue) -> None:
        self.queue = queue

    def compute_log_prob(self, batch: KVBatchMeta) -> KVBatchMeta:
        told = ["log_probs", "entropy"]
        if batch.extra_info.get("calculate_sum_pi_squared", False):
            told.append("sum_pi_squared")
        for key in batch.keys:
            row = self.queue.rows[key]
            width = PROMPT + len(row["responses"])
            row |= {name: torch.full((width,), -SQUARE) for name in told}
            if "sum_pi_squared" in row:
                row["sum_pi_squared"] = torch.full((width,), SQUARE)
        return batch


@pytest.fixture
def trainer(monkeypatch):
    """The class of verl, whose methods are restored, on a queue of one process."""
    queue = Queue()
    monkeypatch.setattr(trainer_base, "tq", queue)
    for name in ("_compute_advantage", "_compute_old_log_prob", "fit"):
        monkeypatch.setattr(trainer_base.PPOTrainer, name, getattr(trainer_base.PPOTrainer, name))
    return queue


def self_of(queue: Queue, name: str, *, bypass: bool = True, cls: Any = PPOTrainerSync) -> Any:
    rules = {"bypass_mode": bypass, "rollout_is": None, "rollout_rs": None}
    config = OmegaConf.create(
        {
            "algorithm": {
                "adv_estimator": name,
                "use_kl_in_reward": False,
                "gamma": 1.0,
                "lam": 1.0,
                "rollout_correction": rules if bypass else None,
            },
            "actor_rollout_ref": {
                "model": {"use_fused_kernels": False},
                "actor": {"loss_agg_mode": "token-mean", "loss_scale_factor": None},
                "rollout": {
                    "n": 4,
                    "temperature": 0.7,
                    "top_p": 0.9,
                    "top_k": -1,
                    "response_length": 6,
                    "calculate_log_probs": True,
                },
            },
        }
    )
    made = object.__new__(cls)
    made.config, made.global_steps, made.tokenizer = config, STEP, Words()
    made.actor_rollout_wg = Workers(queue)
    return made


def passed(self: Any, batch: KVBatchMeta) -> KVBatchMeta:
    """The two stages of a step of verl's that matter here."""
    batch = self._compute_old_log_prob(batch, metrics={})
    return self._compute_advantage(batch, metrics={})


@pytest.mark.parametrize("name", ["cispo", "batch_std", "prompt_mean", "reinforce_plus_plus"])
def test_rows_that_fill_up_the_batch_change_no_advantage(name, trainer):
    adapter.register()
    batch = filled(trainer)
    passed(self_of(trainer, adapter.PREFIX + name), batch)
    c, groups = case(), groups_of(GROUPS)
    expected = groups.down(advantages_of(entry(name), batch_of(c.rewards, c.mask, groups)))
    for n, uid in enumerate(GROUPS):
        length = int(c.real[n].sum())
        found = trainer.rows[f"{uid}_{n}_0"]["advantages"].double()
        wide = expected[n].expand(c.mask.shape[1])[:length]
        assert_close(found, torch.where(c.mask[n, :length], wide, 0.0), relative=1e-6)


def recorded(trainer: Queue, folder: Any, self: Any, **asked: Any) -> list[Any]:
    found: list[Any] = []

    def fit(self: Any) -> None:
        found.append(passed(self, filled(trainer)))

    trainer_base.PPOTrainer.fit = fit
    record_verl(folder, trainer=trainer_base.PPOTrainer, **asked)
    self.fit()
    from windage.llm.record.writer import vocabulary

    return list(read(folder, tokenizer=vocabulary(Words())))


@pytest.mark.parametrize("cls", [PPOTrainerSync, PPOTrainerSeparateAsync])
def test_a_step_is_recorded_with_the_weights_that_drew_and_without_what_fills_it_up(
    cls, trainer, tmp_path
):
    adapter.register()
    self = self_of(trainer, "windage_cispo", cls=cls)
    rows = recorded(trainer, tmp_path, self)
    c = case()
    assert len(rows) == len(GROUPS)
    found = {(row["group_id"], tuple(row["response_ids"].tolist())): row for row in rows}
    for n, uid in enumerate(GROUPS):
        length = int(c.real[n].sum())
        row = found[uid, tuple(c.ids[n, PROMPT : PROMPT + length].tolist())]
        assert set(row["versions"].tolist()) == {n % 3}
        assert row["outcome"] == pytest.approx(float(c.rewards[n]))
        drawn = c.behavior_logp[n, :length].clamp(max=0).float()
        assert torch.equal(torch.tensor(row["behavior_logp"]), drawn)
        assert (row["temperature"], row["top_k"]) == (pytest.approx(0.7), None)
        assert row["finish_reason"] in ("stop", "length")
    from windage.analysis.diagnose.readers.index import read as dump

    assert {row.current_version for row in dump(tmp_path)} == {STEP - 1}


def test_sums_of_squares_come_from_the_pass_for_the_old_log_probabilities(trainer, tmp_path):
    self = self_of(trainer, "grpo", bypass=False)
    rows = recorded(trainer, tmp_path, self, square=True)
    assert len(rows) == len(GROUPS)
    for row in rows:
        assert row["probability_square"].tolist() == pytest.approx([SQUARE] * len(row["mask"]))
        assert row["proximal_logp"].tolist() == pytest.approx([-SQUARE] * len(row["mask"]))


def test_sums_of_squares_that_no_pass_makes_are_refused(trainer, tmp_path):
    adapter.register()
    with refused("bypass_mode", "no square"):
        recorded(trainer, tmp_path, self_of(trainer, "windage_cispo"), square=True)
    with refused("square is for trainers of v1"):
        record_verl(tmp_path, tokenizer=Words(), square=True)


WRAPPED = """
import verl
import verl.trainer.ppo.v1.trainer_base as base
print("wrapped", hasattr(base.PPOTrainer._compute_advantage, "__wrapped__"))
"""


def test_the_environment_switches_recording_on(tmp_path):
    done = python(WRAPPED, tmp_path, **{ASKED: str(tmp_path / "rollouts")})
    assert done.stdout.split()[-2:] == ["wrapped", "True"], done.stderr


def test_what_the_environment_asks_wrongly_stops_the_run(tmp_path):
    done = python(WRAPPED, tmp_path, **{ASKED: "rollouts"})
    assert done.returncode != 0
    assert "WINDAGE_RECORD is 'rollouts'; allowed: a path that starts with /" in done.stderr


def commands() -> list[list[str]]:
    """What the documents have verl run."""
    docs = Path(__file__).parents[1] / "docs"
    text = "".join((docs / name).read_text() for name in ("adapters.md", "scaling.md"))
    found = re.findall(r"^python3 -m verl\.trainer\.main_ppo((?:.*\\\n)*.*)$", text, re.MULTILINE)
    return [shlex.split(words.replace("\\\n", " ")) for words in found]


@pytest.mark.parametrize("words", commands(), ids=lambda words: f"{len(words)} settings")
def test_commands_of_the_documents_are_ones_that_verl_reads_and_that_can_be_carried(words):
    adapter.register()
    with initialize_config_module(config_module="verl.trainer.config", version_base=None):
        config = compose(config_name="ppo_trainer", overrides=words)
    assert config.algorithm.adv_estimator in adapter.check(config)
    broken = [w.replace("loss_mode=windage_cispo", "loss_mode=vanilla") for w in words]
    with initialize_config_module(config_module="verl.trainer.config", version_base=None):
        other = compose(config_name="ppo_trainer", overrides=broken)
    with refused("loss_mode is vanilla"):
        adapter.check(other)


def test_there_are_commands():
    assert len(commands()) == 3
