"""The catalogue against its table, and the light index against the catalogue."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from checks import refused

from windage.estimators.batch import Batch
from windage.estimators.catalogue import CATALOGUE, ENTRIES, FIRST, get
from windage.estimators.claims import PROPERTIES
from windage.estimators.index import FIRST as INDEX
from windage.estimators.index import SETTINGS

TABLE = {
    "reinforce": "constant(baseline=0) · none · token_sum",
    "rloo": "leave_one_out · none · token_sum",
    "group_mean": "group_mean · none · token_sum",
    "grpo": (
        "group_std(ddof=1, eps=1e-06) · token clip(clip_low=0.2, clip_high=0.2) · sequence_mean"
        " · loss_k3(coefficient=0)"
    ),
    "dr_grpo": (
        "group_mean · token clip(clip_low=0.2, clip_high=0.2) · constant_length(length=None)"
    ),
    "dapo": (
        "group_std(ddof=1, eps=1e-06) · token clip(clip_low=0.2, clip_high=0.28) · token_mean"
        " · zero_variance · overlong_shaping(length=None, margin=4096)"
    ),
    "ppo": "gae(gamma=1, lam=0.95) · token clip(clip_low=0.2, clip_high=0.2) · token_mean",
    "trajectory_is": "leave_one_out · trajectory ratio · token_sum",
    "token_is": "leave_one_out · token ratio · token_sum",
    "prefix_is": "leave_one_out · prefix ratio · token_sum",
    "suffix_is": "leave_one_out · suffix ratio · token_sum",
    "token_tis": "leave_one_out · token truncate(cap=2) · token_sum",
    "sequence_tis": "leave_one_out · trajectory truncate(cap=2) · token_sum",
    "cispo": "group_std(ddof=1, eps=1e-06) · token truncate(cap=5) · token_mean",
    "icepop": "group_mean · token band(low=0.5, high=5) · token_mean",
    "gspo": (
        "group_std(ddof=1, eps=1e-06) · geometric clip(clip_low=0.0003, clip_high=0.0004)"
        " · sequence_mean"
    ),
    "topr": (
        "constant(baseline=0) · trajectory taper(a_pos=1, b_pos=1, a_neg=0, b_neg=1) · token_sum"
    ),
    "positives_only": (
        "constant(baseline=0) · trajectory taper(a_pos=1, b_pos=1, a_neg=0, b_neg=0) · token_sum"
    ),
    "naive": (
        "constant(baseline=0) · trajectory taper(a_pos=1, b_pos=1, a_neg=1, b_neg=1) · token_sum"
    ),
    "tis_both_signs": (
        "constant(baseline=0) · trajectory taper(a_pos=0, b_pos=1, a_neg=0, b_neg=1) · token_sum"
    ),
    "centered": "group_mean · none · token_sum · exact",
    "centered_tis": "group_mean · token truncate(cap=2) · token_sum · exact",
    "centered_mask": "group_mean · token band(low=0.5, high=5) · token_sum · exact",
    "starting_point": (
        "group_mean · token truncate(cap=5) · constant_length(length=None)"
        " · staleness_cap(max_lag=8) · exact"
    ),
}


def test_the_table_of_the_design():
    assert {entry.name: entry.describe() for entry in FIRST} == TABLE
    assert {entry.tier for entry in FIRST} == {1}
    assert [*CATALOGUE][: len(FIRST)] == [*INDEX] == [entry.name for entry in FIRST]
    assert {entry.tier for entry in ENTRIES[len(FIRST) :]} == {2}


def test_the_index_holds_every_name_and_setting():
    assert {name: tuple(entry.settings) for name, entry in CATALOGUE.items()} == SETTINGS
    assert [*CATALOGUE] == [*SETTINGS]
    assert len(CATALOGUE) == len(ENTRIES)


def test_the_index_does_not_import_torch():
    script = "import sys, windage.estimators.index; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", script], check=True)


@pytest.mark.parametrize("entry", ENTRIES, ids=lambda e: e.name)
def test_an_entry_says_where_it_is_from_how_it_differs_and_what_it_claims(entry):
    assert re.search(r"\d{4}", entry.paper)
    numbers = [int(text.split(".")[0]) for text in entry.differences]
    assert numbers == list(range(1, len(numbers) + 1))
    declared = [claim.property for claim in entry.claims]
    assert set(PROPERTIES) <= set(declared) and len(declared) == len(set(declared))
    for stage, member in entry.members:
        assert member.function.__doc__, (stage, member.name)
        assert member.traits.scope in ("token", "response", "group", "batch")


def test_in_the_first_tier_only_clips_and_tapers_need_the_advantage():
    reading = {
        entry.name for entry in FIRST if any(c.reads != "nothing" for c in entry.corrections)
    }
    assert reading == {
        "grpo",
        "dr_grpo",
        "dapo",
        "ppo",
        "gspo",
        "topr",
        "positives_only",
        "naive",
        "tis_both_signs",
    }


def test_an_unknown_name_gives_the_nearest():
    with refused("'grop'", "grpo"):
        get("grop")


def test_every_entry_takes_a_whole_batch():
    generator = torch.Generator().manual_seed(1)

    def draw(*shape):
        return -torch.rand(2, 4, 3, *shape, generator=generator).double()

    batch = Batch(
        rewards=torch.tensor([[1.0, 0.0, 0.0, 0.5], [0.0, 1.0, 0.5, 0.25]]).double(),
        mask=torch.ones(2, 4, 3).bool(),
        logp=draw(),
        behavior_logp=draw(),
        proximal_logp=draw(),
        reference_logp=draw(),
        probability_square=-draw(),
        components=-draw()[..., :2],
        values=draw(),
        versions=torch.full((2, 4, 3), 3),
        current_version=4,
        head_logp=draw(2) - 1,
        head_behavior_logp=draw(2) - 1,
    )
    for entry in ENTRIES:
        entry = entry.change(length=3) if "length" in entry.settings else entry
        found = entry(batch)
        assert found.own.shape == (2, 4, 3) and found.own.any()
        assert (found.head is None) == (entry.centering is None)


def test_the_readme_counts_the_entries():
    text = " ".join((Path(__file__).parents[1] / "README.md").read_text().split())
    assert f"`windage.estimators.catalogue` lists {len(ENTRIES)} published recipes" in text
    assert f"the {len(FIRST)} of the first tier" in text
