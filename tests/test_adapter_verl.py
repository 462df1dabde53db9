"""verl 0.9.1 itself: its plugin loading, its advantage computation, its loss function.

Run by `make check-verl`; skipped where verl is not installed.
"""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

import pytest
import torch
from adapter_cases import (
    GROUPS,
    NAMES,
    PROMPT,
    case,
    entry,
    gradient_of,
    largest,
    ours,
    pieces,
    words,
)
from checks import refused
from torch import Tensor

from windage.llm.adapters import verl as adapter
from windage.llm.adapters.carry import refusal
from windage.llm.adapters.hosts import BOUND, carried

pytest.importorskip("verl")
pytestmark = pytest.mark.filterwarnings("default")

import numpy as np  # noqa: E402
from omegaconf import OmegaConf  # noqa: E402
from tensordict import TensorDict  # noqa: E402
from verl import DataProto  # noqa: E402
from verl.trainer.config import AlgoConfig, RolloutCorrectionConfig  # noqa: E402
from verl.trainer.ppo.ray_trainer import compute_advantage  # noqa: E402
from verl.trainer.ppo.rollout_corr_helper import (  # noqa: E402
    compute_rollout_correction_and_add_to_batch,
)
from verl.utils import tensordict_utils as tu  # noqa: E402
from verl.workers.config import ActorConfig, PolicyLossConfig  # noqa: E402
from verl.workers.utils.losses import ppo_loss  # noqa: E402

HOSTS = {True: adapter.BYPASS, False: adapter.DECOUPLED}
CARRIED = [(n, b) for b, h in HOSTS.items() for n in NAMES if refusal(entry(n), h) is None]
DATA = "windage-0.1.0.dist-info"
ENTRY = "[verl.plugins]\nwindage = windage.llm.adapters.verl_plugin\n"


@pytest.fixture(autouse=True)
def registered(monkeypatch):
    monkeypatch.setenv(adapter.SETTINGS, " ".join(words(n) for n in ("dr_grpo", "dapo")))
    adapter.register()


def told(name: str, *, bypass: bool) -> RolloutCorrectionConfig:
    first = entry(name).corrections[0]
    given = not bypass and not first.idle
    return RolloutCorrectionConfig(
        bypass_mode=bypass,
        rollout_is="token" if given else None,
        rollout_is_threshold=dict(first.map.settings).get("cap", 1e9) if given else 2.0,
    )


def nested(rows: list[Tensor]) -> Tensor:
    return torch.nested.as_nested_tensor(rows, layout=torch.jagged)


def by_verl(
    name: str, *, bypass: bool, ranks: int, size: int, metrics: list[Any] | None = None, **lies: int
) -> Tensor:
    """A step of verl's: rollout correction, advantages, then its loss over micro-batches."""
    c, rules = case(), told(name, bypass=bypass)
    totals = {"batch_num_tokens": int(c.mask.sum()), "global_batch_size": len(GROUPS)}
    lengths = c.real.sum(1)
    scores = torch.zeros_like(c.behavior_logp)
    scores[torch.arange(len(GROUPS)), lengths - 1] = c.rewards
    tensors = {
        "token_level_rewards": scores.float(),
        "response_mask": c.mask.long(),
        "rollout_log_probs": c.behavior_logp,
        "old_log_probs": c.behavior_logp if bypass else c.proximal_logp,
    }
    data = DataProto.from_dict(tensors=tensors, non_tensors={"uid": np.array(GROUPS, dtype=object)})
    if not bypass:
        data, _ = compute_rollout_correction_and_add_to_batch(data, rules)
    algorithm = AlgoConfig(adv_estimator=adapter.PREFIX + name, rollout_correction=rules)
    data = compute_advantage(data, adapter.PREFIX + name, config=algorithm)
    actor = ActorConfig(
        strategy="fsdp",
        rollout_n=4,
        ppo_micro_batch_size_per_gpu=size,
        policy_loss=PolicyLossConfig(loss_mode=adapter.PREFIX + name, rollout_correction=rules),
    )
    fields = ["response_mask", "old_log_probs", "advantages"]
    fields += ["rollout_is_weights"] if "rollout_is_weights" in data.batch else []
    for rank in pieces(len(GROUPS), len(GROUPS) // ranks):
        for rows in rank.split(size):
            logp, n = c.logp(rows), lengths[rows].tolist()
            parts = {
                field: nested([data.batch[field][r][:k] for r, k in zip(rows, n, strict=True)])
                for field in fields
            }
            parts["prompts"] = nested([c.ids[r][:PROMPT] for r in rows])
            own = zip(rows, n, strict=True)
            parts["responses"] = nested([c.ids[r][PROMPT : PROMPT + k] for r, k in own])
            batch = TensorDict(parts, batch_size=len(rows))
            tu.assign_non_tensor(batch, **{"dp_size": ranks, **totals, **lies})
            # verl's engine hands over one number a token of prompt and response, shifted by one.
            flat = [
                torch.cat([logp.new_zeros(PROMPT - 1), row[:k], logp.new_zeros(1)])
                for row, k in zip(logp, n, strict=True)
            ]
            loss, said = ppo_loss(actor, {"log_probs": nested(flat)}, batch)
            loss.backward()
            if metrics is not None:
                metrics.append(said)
    return gradient_of(c.model) / ranks


@pytest.mark.parametrize(("name", "bypass"), CARRIED)
def test_the_gradient_of_a_step_is_ours(name, bypass):
    expected = ours(entry(name), case())
    apart = [
        largest(by_verl(name, bypass=bypass, ranks=ranks, size=size), expected)
        for ranks, size in ((1, 12), (2, 4), (3, 1))
    ]
    print(f"{name} {max(apart):.2e}")
    assert max(apart) < BOUND


def test_every_entry_that_a_hook_can_carry_is_tried():
    assert {name for name, _ in CARRIED} == carried(*HOSTS.values())
    assert set(adapter.check()) == {adapter.PREFIX + n for n, _ in CARRIED}


@pytest.mark.parametrize(
    ("name", "ranks", "lies"),
    [
        ("dapo", 1, {"batch_num_tokens": 12}),
        ("gspo", 1, {"global_batch_size": 6}),
        ("rloo", 2, {"dp_size": 1}),
    ],
)
def test_counts_that_are_not_of_all_ranks_are_noticed(name, ranks, lies):
    """The loss divides by what verl counts over all ranks, and undoes verl's mean over them."""
    found = by_verl(name, bypass=True, ranks=ranks, size=3, **lies)
    assert largest(found, ours(entry(name), case())) > 1e-2


def test_shadows_are_in_the_metrics_that_verl_logs(monkeypatch):
    monkeypatch.setenv(adapter.SHADOWS, "cispo dual_clip gspo")
    metrics: list[Any] = []
    found = by_verl("cispo", bypass=True, ranks=2, size=3, metrics=metrics)
    assert largest(found, ours(entry("cispo"), case())) < BOUND

    def logged(name: str, what: str) -> list[float]:
        return [said[f"windage/shadow/{name}/{what}"].aggregate() for said in metrics]

    assert len(metrics) == 4
    for what in ("token_cosine", "token_norm_ratio"):
        assert logged("cispo", what) == pytest.approx([1] * 4)
        assert min(logged("gspo", what)) < 0.999 and min(logged("dual_clip", what)) > 0


# Registration.


def python(program: str, folder: Any, **environment: str) -> subprocess.CompletedProcess:
    """A program in a process whose path holds windage as an installed distribution."""
    (folder / DATA).mkdir()
    (folder / DATA / "METADATA").write_text("Metadata-Version: 2.1\nName: windage\nVersion: 0.1.0")
    (folder / DATA / "entry_points.txt").write_text(ENTRY)
    path = os.pathsep.join([str(folder), os.environ.get("PYTHONPATH", "")])
    given = {**os.environ, "PYTHONPATH": path, **environment}
    return subprocess.run(
        [sys.executable, "-c", program], env=given, capture_output=True, text=True, timeout=100
    )


CHECK = "import verl\nfrom windage.llm.adapters.verl import check\nprint(len(check()))"


def test_the_entry_point_registers_on_import(tmp_path):
    done = python(CHECK, tmp_path)
    assert done.stdout.split()[-1] == str(len(carried(*HOSTS.values()))), done.stderr


def test_an_entry_point_that_was_not_loaded_is_reported_loudly(tmp_path):
    done = python(CHECK, tmp_path, VERL_USE_EXTERNAL_PLUGINS="none")
    assert done.returncode != 0
    assert "verl's policy losses lack windage_" in done.stderr
    assert "VERL_USE_EXTERNAL_MODULES" in done.stderr


def test_the_entry_point_is_declared():
    import tomllib
    from pathlib import Path

    project = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text())
    declared = project["project"]["entry-points"]["verl.plugins"]
    assert "[verl.plugins]\n" + "".join(f"{k} = {v}\n" for k, v in declared.items()) == ENTRY


# Configuration.


def run_config(**changes: Any) -> Any:
    config = OmegaConf.create(
        {
            "algorithm": {
                "adv_estimator": "windage_cispo",
                "use_kl_in_reward": False,
                "rollout_correction": {"bypass_mode": True, "rollout_is": None, "rollout_rs": None},
            },
            "data": {"train_batch_size": 64},
            "trainer": {"use_v1": True, "v1": {"trainer_mode": "sync"}},
            "actor_rollout_ref": {
                "rollout": {"calculate_log_probs": True},
                "actor": {
                    "ppo_mini_batch_size": 16,
                    "policy_loss": {
                        "loss_mode": "windage_cispo",
                        "rollout_correction": {"bypass_mode": True},
                    },
                },
            },
        }
    )
    for path, value in changes.items():
        OmegaConf.update(config, path.replace("__", "."), value)
    return config


LOSS = "actor_rollout_ref__actor__policy_loss__"


def both(name: str) -> dict[str, Any]:
    return {"algorithm__adv_estimator": name, f"{LOSS}loss_mode": name}


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({f"{LOSS}loss_mode": "vanilla"}, "loss_mode is vanilla; allowed with windage_cispo"),
        ({f"{LOSS}rollout_correction__bypass_mode": False}, "bypass_mode is false"),
        ({"algorithm__rollout_correction__bypass_mode": False}, "behavior_logp"),
        ({"algorithm__rollout_correction__rollout_rs": "token_k1"}, "rollout_rs"),
        ({"algorithm__use_kl_in_reward": True}, "use_kl_in_reward is true"),
        ({"trainer__use_v1": False}, "use_v1 is false"),
        ({"actor_rollout_ref__rollout__calculate_log_probs": False}, "calculate_log_probs"),
        (both("windage_batch_std"), "ppo_mini_batch_size is 16"),
        (both("windage_centered"), "head tokens"),
        (both("windage_cipso"), "nearest valid name: windage_cispo"),
    ],
)
def test_a_run_that_cannot_be_carried_is_refused(changes, said):
    with refused(said, "allowed"):
        adapter.check(run_config(**changes))


def test_a_run_that_can_be_carried_passes():
    assert "windage_cispo" in adapter.check(run_config())


def test_a_trainer_that_syncs_every_few_updates_shows_its_hook_one_mini_batch():
    """`separate_async` splits the prompts of a step among its updates; advantages are of each."""
    apart = {"trainer__v1__trainer_mode": "separate_async"}
    apart["trainer__v1__separate_async__parameter_sync_step"] = 4
    assert adapter.check(run_config(**both("windage_batch_std"), **apart))
    apart["trainer__v1__separate_async__parameter_sync_step"] = 2
    with refused("ppo_mini_batch_size is 16", "32"):
        adapter.check(run_config(**both("windage_batch_std"), **apart))
