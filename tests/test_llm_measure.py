"""Studies of a model: estimates are the trainer's, and intervals cover what listing says."""

from __future__ import annotations

import itertools
import json
import math
import shutil
import sys
from dataclasses import replace
from pathlib import Path

import enumerated_study as listing
import pytest
import tiny_language_model
import torch
from checks import assert_close, refused
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import binom
from tiny_model import forward_of, gradient_of, tiny

from windage.analysis import report
from windage.analysis.measured import toy
from windage.cli.main import main
from windage.estimators.catalogue import get
from windage.estimators.errors import BadInput
from windage.llm import models, rollouts
from windage.llm.draw import draw
from windage.llm.measure import behavior, moments, sketch
from windage.llm.measure import study as measured_study
from windage.llm.measure.directions import directions
from windage.llm.measure.estimates import Passed, Probe
from windage.llm.measure.moments import Averages, Jackknife
from windage.llm.measure.plan import Request
from windage.llm.rollouts import to_batch
from windage.llm.samplers import vllm
from windage.llm.update import accumulate, micro_batches

FEW = {n: listing.ENTRIES[n] for n in ("trajectory_is", "rloo", "grpo", "dapo", "centered_tis")}
FALSE_FAIL = 1e-3


@pytest.fixture(scope="module")
def world():
    """A few entries under a sampler near the policy."""
    return listing.listed(FEW, 0.03)


def agree(world: listing.Listed, names, pairs) -> None:
    """Groups are estimated as the trainer's own pass accumulates them."""
    for prompt, rows in enumerate(world.rows):
        for number in pairs:
            group = [{**row, "group_id": "0"} for row in rows[2 * number : 2 * number + 2]]
            batch = to_batch(group, current_version=0)
            forward = forward_of(world.model, batch, group)
            for name in names:
                accumulate(listing.ENTRIES[name], batch, forward, micro_batches(batch, 2))
                update = -gradient_of(world.model)
                if world.kept[name][prompt, number]:
                    found = world.groups[name][prompt, number] @ world.basis
                    assert_close(found, update, relative=1e-5)


def test_a_group_is_estimated_as_the_trainer_accumulates_it(world):
    agree(world, FEW, [9])


def test_listing_knows_what_is_claimed(world):
    found = {name: listing.exact(world, name) for name in FEW}
    assert found["trajectory_is"]["relative_bias_square"] < 1e-9
    assert found["trajectory_is"]["drift_square"] < 1e-9
    assert found["rloo"]["relative_bias_square"] > 1e-4
    assert found["dapo"]["scale"] > found["grpo"]["scale"]


def unlikely(total: dict[tuple[str, str], torch.Tensor]) -> dict[tuple[str, str], float]:
    """Cases covered so seldom that intervals of the stated level would be so in 1 of 1,000 suites.

    A run whose figure has no meaning says nothing, and does not count; most must say something.
    """
    least = FALSE_FAIL / len(total)
    assert all(said > 0 for _, said, _ in total.values())
    return {
        case: float(hits / said)
        for case, (hits, said, _) in total.items()
        if binom.cdf(int(hits), int(said), moments.LEVEL) < least
    }


@pytest.mark.parametrize("prompts", [24, 128])
def test_intervals_cover_in_a_small_number_of_runs(world, prompts):
    assert unlikely(listing.coverage(world, FEW, runs=50, prompts=prompts)) == {}


def one_block_too_many(found: Averages) -> Averages:
    """Clustering forgotten: each prompt counts four times, as if its groups were prompts."""
    return Averages(
        vectors=found.vectors.repeat_interleave(4, -3),
        square=found.square.repeat_interleave(4, -1),
        pair=found.pair.repeat_interleave(4, -1),
        kept=found.kept.repeat_interleave(4, -1),
    )


def test_without_clusters_they_do_not(world):
    found = listing.coverage(world, FEW, runs=50, prompts=32, change=one_block_too_many)
    assert len(unlikely(found)) > len(found) / 3


def squares(world) -> dict[tuple[str, str], float]:
    """By how many standard errors the average of squared lengths over runs is off."""
    generator = torch.Generator().manual_seed(5)
    drawn = listing.draws(world, 300, prompts=12, own=4, groups=2, generator=generator)
    out = {}
    for name in FEW:
        truth = listing.exact(world, name)
        found = moments.figures(listing.averages(world, name, drawn, controlled=False)).whole
        for figure in ("gradient_square", "drift_square"):
            gap = found[figure] - truth[figure]
            out[name, figure] = float(gap.mean() / gap.std() * math.sqrt(len(gap)))
    return out


def test_squared_lengths_hold_no_noise(world):
    assert max(map(abs, squares(world).values())) < 4


def test_without_halves_they_do(world, monkeypatch):
    def noisy(vectors):
        inner, spread = given_products(vectors)
        count = vectors.shape[-3]
        sizes = torch.tensor([count] + [count - 1] * count)
        return inner + spread / sizes.view(-1, 1, 1), spread

    given_products = moments.products
    monkeypatch.setattr(moments, "products", noisy)
    assert min(squares(world).values()) > 4


@pytest.fixture(scope="module", params=[0.0, 0.03])
def worlds(request):
    """All entries, the policy sampling and another near it."""
    found = listing.listed(listing.ENTRIES, request.param)
    if request.param:
        agree(found, listing.ENTRIES, range(0, len(listing.PAIRS), 3))
    return found


@pytest.mark.long
@pytest.mark.parametrize("prompts", [16, 24, 32, 64, 128])
def test_intervals_cover_at_their_level_for_every_entry(worlds, prompts):
    found = listing.coverage(worlds, listing.ENTRIES, runs=2000, prompts=prompts)
    assert unlikely(found) == {}


def test_the_page_says_no_more_than_was_counted():
    path = Path(__file__).parents[1] / "benchmarks" / "results" / "coverage.json"
    counted = json.loads(path.read_text())
    assert counted["about"]["runs"] == 2000
    assert {row["estimator"] for row in counted["rows"]} == set(listing.ENTRIES)
    assert min(min(row["covered"].values()) for row in counted["rows"]) >= 0.93


def test_products_are_averages_over_pairs_of_prompts():
    vectors = torch.randn(5, 3, 4, generator=torch.Generator().manual_seed(0)).double()
    inner, _ = moments.products(vectors)
    for left in range(6):
        kept = [n for n in range(5) if n != left - 1]
        pairs = list(itertools.permutations(kept, 2))
        wanted = sum(vectors[a] @ vectors[b].T for a, b in pairs) / len(pairs)
        assert_close(inner[left], wanted)


@given(st.integers(0, 5), st.floats(0.1, 3.0))
def test_controls_leave_means_of_what_has_no_noise(seed, size):
    generator = torch.Generator().manual_seed(seed)
    fixed = torch.randn(1, 3, 4, generator=generator).double().expand(6, 3, 4)
    control = size * torch.randn(6, 1, 4, generator=generator).double()
    with_one = moments.quieted(*moments.products(torch.cat([fixed, control], 1)))
    assert_close(with_one, fixed[:1] @ fixed[:1].mT + 0 * with_one, relative=1e-8)


def test_a_control_takes_its_noise_out():
    generator = torch.Generator().manual_seed(1)
    control = torch.randn(40, 1, 4, generator=generator).double()
    vectors = torch.cat([torch.ones(40, 3, 4).double() + control, control], 1)
    inner = moments.quieted(*moments.products(vectors))
    assert_close(inner[0, 0, 0], torch.tensor(4.0))


def test_rows_are_mixtures_of_few():
    generator = torch.Generator().manual_seed(0)
    table = (
        torch.randn(9, 3, generator=generator).double()
        @ torch.randn(3, 20, generator=generator).double()
    )
    found = directions(table)
    assert found.rows.shape[0] == 3
    assert_close(found.mixture @ found.rows, table)


def test_entries_that_weigh_responses_share_one_pass():
    table = torch.tensor([2.0, -1.0, 0.0, 5.0]).double().unsqueeze(1) * torch.ones(1, 7).double()
    assert len(directions(table).rows) == 1


@pytest.mark.parametrize("size", [64, 1024])
def test_sketches_keep_inner_products_within_what_is_stated(size):
    generator = torch.Generator().manual_seed(0)
    a, b = torch.randn(2, 5000, generator=generator).double()
    b = a + b
    gaps = []
    for seed in range(200):
        made = sketch.make(5000, size, seed=seed)
        gaps.append(float(made([a]) @ made([b]) - a @ b) / float(a.norm() * b.norm()))
    spread = torch.tensor(gaps).square().mean().sqrt()
    assert 0.6 * made.error < spread < 1.1 * made.error
    assert abs(sum(gaps)) / 200 < 4 * made.error / math.sqrt(200)
    assert_close(made([a[:70], a[70:]]) - 2 * made([b]), made([a - 2 * b]))


def test_gradients_through_hidden_states_are_those_of_the_loss():
    model = tiny(3, 4, seed=0)
    ids = torch.tensor([[1, 0, 2, 1]])
    block = list(model.model.model.layers[-1].parameters())
    heads = torch.tensor([[0, 1], [2, 0]])
    found, hidden = model(ids, torch.ones_like(ids), torch.tensor([1, 2]), ids[0, 2:], heads)
    exactly = sketch.make(sum(p.numel() for p in block), 0, seed=0)
    rows = torch.randn(3, 6, generator=torch.Generator().manual_seed(0)).double()
    both = [
        Probe(policy=model, parameters=block, sketch=exactly, through=through).pull(
            Passed(found, hidden, ids[0, 2:], heads), rows
        )
        for through in (True, False)
    ]
    assert_close(both[0], both[1], relative=1e-6)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("rounding:bits=4", ("sampler", "rounded")),
        ("rounded:bits=1", ("bits", "2 to 8")),
        ("rounded", ("bits is missing",)),
        ("temperature:t=nan", ("t is", "above 0")),
        ("top_p:p=0.9,p=0.8", ("p is given once",)),
        ("checkpoint:path=", ("path", "folder")),
        ("policy:x=1", ("x",)),
    ],
)
def test_samplers_are_refused_in_a_line(text, words):
    with refused(*words, error=BadInput):
        behavior.parse(text)


def test_what_a_sampler_tells():
    assert behavior.parse("policy").covers
    assert not behavior.parse("temperature:t=0.7").told
    assert behavior.parse("temperature:t=0.7,known=1").covers
    assert not behavior.parse("top_p:p=0.9,known=1").covers


def test_rounded_rows_have_few_levels():
    weight = torch.randn(3, 50, generator=torch.Generator().manual_seed(0))
    named = [("layer.weight", weight), ("embed.weight", weight), ("norm.weight", weight[0])]
    made = dict(behavior.rounded(iter(named), 4))
    assert all(len(row.unique()) <= 15 for row in made["layer.weight"])
    assert (made["layer.weight"] - weight).abs().max() <= weight.abs().max() / 14
    assert torch.equal(made["embed.weight"], weight)
    assert torch.equal(made["norm.weight"], weight[0])


def test_too_little_memory_is_said_with_the_size_that_fits():
    sizes = {"parameters": 1000, "sketch": 500}
    counts = {"prompts": 10, "vectors": 5, "rows": 20}
    whole = sketch.needed(sizes, **counts)
    assert sketch.check_room(sizes, whole, **counts) == whole
    with refused("needs", "free", "--sketch up to", error=BadInput):
        sketch.check_room(sizes, whole // 2, **counts)
    with refused("fewer prompts", error=BadInput):
        sketch.check_room(sizes, 10, **counts)
    most = max(
        k for k in range(500) if sketch.needed({**sizes, "sketch": k}, **counts) <= whole // 2
    )
    with refused(f"up to {most}", error=BadInput):
        sketch.check_room(sizes, whole // 2, **counts)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"group_sizes": (4, 6)}, ("4", "does not divide 6")),
        ({"group_sizes": (1,)}, ("from 2",)),
        ({"responses": 6, "group_sizes": (4,)}, ("multiple of the largest group",)),
        ({"samplers": ()}, ("samplers",)),
        ({"prompts": 2}, ("prompts",)),
    ],
)
def test_requests_are_refused_in_a_line(changes, words):
    fine = Request(model="m", samplers=(behavior.parse("policy"),))
    fine.check()
    with refused(*words, error=BadInput):
        replace(fine, **changes).check()


def test_differences_are_paired():
    left = torch.tensor([1.0, 2.0, 4.0])
    one = Jackknife(whole={"x": torch.tensor(5.0)}, left={"x": left})
    two = Jackknife(whole={"x": torch.tensor(3.0)}, left={"x": left - 2})
    assert float(one.error("x")) > 1
    assert float(one.minus(two).error("x")) < 1e-6


TINY = "--task arithmetic:digits=1,ask=. --prompts 3 --references 2 --responses 4 --max-tokens 3"
SMALL = f"{TINY} --head 4 --sketch 256 --estimators rloo grpo --group-size 2".split()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny_language_model.make(tmp_path_factory.mktemp("model") / "tiny", spread=0.1)


@pytest.fixture(scope="module")
def study(folder, tmp_path_factory):
    out = tmp_path_factory.mktemp("study")
    words = ["--samplers", "policy", "rounded:bits=3", "top_p:p=0.8"]
    assert main(["study", "--model", str(folder), *SMALL, *words, "--out", str(out)]) == 0
    return out, words, json.loads((out / "measure.json").read_text())


def test_a_study_has_a_row_an_entry_and_sampler(study):
    found = study[2]
    assert found["schema"] == "windage/measure/1"
    assert len(found["rows"]) == 6
    assert {r["estimator"] for r in found["rows"]} == {"rloo", "grpo"}
    policy, coarse, narrow = found["samplers"]
    assert abs(policy["divergence"]) < 1e-4 < coarse["divergence"]
    assert not narrow["told"]
    assert narrow["effective_share"] == pytest.approx(1)
    assert all(row["interval"]["drift"][1] > 0 for row in found["rows"])
    assert (study[0] / "measure.parquet").exists()
    shares = {row["baseline"]: row for row in found["baselines"]}
    assert {"none", "best constant", "rloo", "opo", "score_weighted"} <= set(shares)
    assert {row["reason"] is None for row in shares.values()} == {False}  # no reward was earned
    assert "possible variance reduction" in (study[0] / "measure.html").read_text()


def test_a_study_goes_on_and_finds_the_same(study, folder, monkeypatch):
    monkeypatch.setattr(toy, "compared", lambda document: {})
    out, words, before = study
    kept = out / "measured" / "prompt-000001.parquet"
    content = kept.read_bytes()
    (out / "measured" / "prompt-000002.parquet").unlink()
    assert main(["study", "--model", str(folder), *SMALL, *words, "--out", str(out)]) == 0
    after = json.loads((out / "measure.json").read_text())
    assert kept.read_bytes() == content
    assert after["rows"] == before["rows"]


def test_a_study_that_is_cut_off_among_its_draws_is_the_same_bit_by_bit(
    study, folder, tmp_path, monkeypatch
):
    """One prompt of a batch is kept, the others are drawn again in the batch that they were in."""
    monkeypatch.setattr(toy, "compared", lambda document: {})
    given = rollouts.write

    def cut(where, step, *rest, **more):
        if where.name == "02-top_p" and step == 1:
            raise KeyboardInterrupt
        given(where, step, *rest, **more)

    whole, words, before = study
    again = ["study", "--model", str(folder), *SMALL, *words, "--out", str(tmp_path)]
    monkeypatch.setattr(rollouts, "write", cut)
    assert main(again) == 130
    monkeypatch.setattr(rollouts, "write", given)
    together = []

    def counted(desk, questions, *rest, **more):
        together.append(len(questions))
        return draw(desk, questions, *rest, **more)

    monkeypatch.setattr(measured_study, "draw", counted)
    assert main(again) == 0
    assert set(together[1:]) == {3}, "after the trial of one group"
    for path in sorted((whole / "measured").iterdir()):
        assert (tmp_path / "measured" / path.name).read_bytes() == path.read_bytes()
    assert json.loads((tmp_path / "measure.json").read_text())["rows"] == before["rows"]


def test_another_study_is_refused_there(study, folder, capsys):
    out, words, _ = study
    again = ["study", "--model", str(folder), *SMALL, *words, "--out", str(out)]
    assert main([*again, "--seed", "1"]) == 2
    said = capsys.readouterr().err
    assert "another seed" in said
    assert said.count("\n") == 1


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--model nowhere", "config.json"),
        ("--prompts 4", "with --model"),
        ("--model {} --parameters trunk", "parameters"),
        ("--model {} --problem bandit", "exact study"),
        ("--model {} --samplers policy policy", "repeated"),
        (f"--model {{}} {TINY} --samplers checkpoint:path=nowhere", "path has no config.json"),
        ("--model {} --prompts 900000 --sketch 0", "GiB are free"),
    ],
)
def test_flags_are_refused_in_a_line(words, said, folder, capsys):
    assert main(["study", *words.format(folder).split()]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert said in printed.err
    assert printed.err.count("\n") == 1


def test_an_engine_that_is_not_there_is_said_before_anything_is_drawn(
    folder, capsys, monkeypatch, tmp_path
):
    monkeypatch.setitem(sys.modules, "vllm", None)
    words = ["--samplers", "policy", "vllm", "--out", str(tmp_path / "out")]
    assert main(["study", "--model", str(folder), *SMALL, *words]) == 2
    printed = capsys.readouterr()
    assert "vllm is not installed" in printed.err
    assert (printed.out, printed.err.count("\n")) == ("", 1)
    assert not (tmp_path / "out").exists()


def test_a_second_engine_has_the_models_weights_in_the_format_asked_for(folder, monkeypatch):
    asked = []
    monkeypatch.setattr(vllm, "VllmSampler", lambda path, **told: asked.append((path, told)))
    loaded = models.load(folder)
    for name in ("vllm", "vllm:dtype=bfloat16"):
        behavior.sampler_of(behavior.parse(name), loaded, batch=4, longest=64)
    assert [(path, told["dtype"], told["longest"]) for path, told in asked] == [
        (str(folder), "float32", 64),
        (str(folder), "bfloat16", 64),
    ]


def test_prompts_that_lose_characters_are_refused(folder, capsys):
    words = ["--task", "arithmetic:digits=1,ask=é", "--prompts", "3"]
    assert main(["study", "--model", str(folder), *words]) == 2
    assert "cannot encode 'é'" in capsys.readouterr().err


def test_a_classifier_is_refused(folder, tmp_path, capsys):
    """Also where its embedding could pass for an output matrix."""
    from transformers import AutoConfig, AutoModelForSequenceClassification

    other = shutil.copytree(folder, tmp_path / "other")
    told = AutoConfig.from_pretrained(folder, num_labels=1)
    AutoModelForSequenceClassification.from_config(told).save_pretrained(other)
    assert main(["study", "--model", str(other), *SMALL]) == 2
    said = capsys.readouterr().err.splitlines()
    assert "score.weight is of a classifier" in said[-1]


def test_a_checkpoint_of_another_model_is_refused(folder, tmp_path):
    words = tuple("0123456789+-*=?. xyz")
    other = tiny_language_model.make(tmp_path / "other", vocab=words)
    loaded = models.load(folder)
    with refused("tokenizer", error=BadInput):
        behavior.sampler_of(behavior.parse(f"checkpoint:path={other}"), loaded, batch=4, longest=64)


@pytest.mark.parametrize("which", sketch.PARAMETERS)
def test_parameters_are_those_asked_for(which, folder):
    lora = models.Lora(rank=2) if which == "lora" else None
    loaded = models.load(folder, lora=lora)
    named = sketch.select(loaded, which)
    assert {n for n, p in loaded.policy.named_parameters() if p.requires_grad} == set(named)
    words = {"last": "layers.1.", "head": "lm_head", "lora": "lora_", "all": ""}
    assert named
    assert all(words[which] in name for name in named)


def test_adapters_are_asked_for_where_there_are_none(folder):
    with refused("lora", error=BadInput):
        sketch.select(models.load(folder), "lora")


def test_ranks_agree_and_disagree():
    assert toy.spearman([1, 2, 3, 4], [10, 20, 30, 40])[0] == pytest.approx(1)
    assert toy.spearman([1, 2, 3, 4], [4, 3, 2, 1])[0] == pytest.approx(-1)
    assert toy.spearman([1, 1, 1, 1], [4, 3, 2, 1])[0] is None


def test_without_known_ratios_entries_are_uncorrected():
    assert toy.uncorrected(get("token_tis")).describe() == toy.uncorrected(get("rloo")).describe()


def measured_row(name: str, merit: float, **changes) -> dict:
    return {
        "estimator": name, "sampler": "policy", "group_size": 4, "merit": merit,
        "relative_bias_rescaled": 0.1, "variance_rescaled": 2.0,
        "standard_error": {"merit": 0.001}, **changes,
    }  # fmt: skip


def test_the_toy_misleads_only_beyond_noise():
    toys = [measured_row("a", 0.2), measured_row("b", 0.1)]
    apart = [measured_row("a", 0.1), measured_row("b", 0.2)]
    (found,) = toy._misled(apart, toys, ("policy", 4))
    assert (found["toy_prefers"], found["measured_prefers"]) == ("a", "b")
    noisy = [r | {"standard_error": {"merit": 0.1}} for r in apart]
    assert toy._misled(noisy, toys, ("policy", 4)) == []


def test_the_page_opens_without_a_word_missing(study, tmp_path):
    found = study[2]
    files = report.write(found, tmp_path)
    assert Path(tmp_path / "measure.html") in files
    text = (tmp_path / "measure.html").read_text()
    assert "Who sampled" in text
    assert "Where the toy misleads" in text
