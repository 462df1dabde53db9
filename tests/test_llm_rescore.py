"""Tokens under the policies between sampler and trainer, and what each cause is found to add.

Everything is planted: windage's own sampler draws from an older model, in bfloat16, at a
temperature and with a limit.  The yardstick is written anew on plain logits of transformers.
"""

from __future__ import annotations

import json
from functools import partial
from itertools import permutations, product

import numpy as np
import pytest
import tiny_language_model
import torch
from checks import assert_close, refused
from transformers import AutoModelForCausalLM

from windage.analysis.diagnose import document
from windage.analysis.diagnose.rescored import FIRST, parts, sample
from windage.analysis.diagnose.support import support
from windage.cli.main import main
from windage.estimators.attribution import MEASURES
from windage.llm import rollouts
from windage.llm.rescore import CAUSES, Format, rescore, unlimited
from windage.llm.samplers.protocol import Request, Sampling
from windage.llm.samplers.transformers import TransformersSampler

HALF = Format(dtype="bfloat16")
SETTING = Sampling(max_tokens=24, temperature=0.7, top_p=0.9)
PLAIN = Sampling(max_tokens=24)
PROMPTS = ((2, 6, 7, 15), (5,), (2, 8, 8, 9, 10, 11, 12, 3))


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """The policy and two older ones, each some steps of noise away from the one before."""
    root = tmp_path_factory.mktemp("models")
    tiny_language_model.make(root / "policy")
    model = AutoModelForCausalLM.from_pretrained(root / "policy")
    generator = torch.Generator().manual_seed(0)
    for name in ("old", "older"):
        with torch.no_grad():
            for parameter in model.parameters():
                parameter += 0.02 * torch.randn(parameter.shape, generator=generator)
        model.save_pretrained(root / name)
        tiny_language_model.tokenizer().save_pretrained(root / name)
    return {name: str(root / name) for name in ("policy", "old", "older")}


def read(folder, dtype=torch.float32):
    return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)


def drawn(folder, *, sampling, half=False, count=4, swap=None):
    """A store of windage's own sampler; `swap`: a folder whose weights come amid, cache kept."""
    sampler = TransformersSampler(
        read(folder), stop_ids=(1,), autocast=torch.bfloat16 if half else None
    )
    calls = 0

    def between():
        nonlocal calls
        calls += 1
        if swap and calls == 5:
            sampler.load(read(swap).named_parameters(), 1, keep_cache=True)

    requests = [Request(prompt_ids=p, count=count, seed=1000 * i) for i, p in enumerate(PROMPTS)]
    found = sampler.sample(requests, sampling, between)
    return [
        {
            "prompt_ids": request.prompt_ids,
            "response_ids": response.ids.numpy(),
            "mask": np.ones(len(response.ids), bool),
            "behavior_logp": response.behavior_logp.numpy(),
            "versions": response.versions.numpy(),
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": sampling.top_k,
        }
        for request, several in zip(requests, found, strict=True)
        for response in several
    ]


def law(z, temperature, top_p):
    """Log-probabilities of one position, a nucleus written as a loop."""
    p = torch.softmax(z.double() / temperature, -1)
    if top_p < 1:
        kept, mass = torch.zeros(len(p), dtype=torch.bool), 0.0
        for token in p.argsort(descending=True, stable=True).tolist():
            if mass >= top_p:
                break
            kept[token], mass = True, mass + float(p[token])
        p = torch.where(kept, p, 0.0) / p[kept].sum()
    return p.log()


def independent(model, row, temperature, top_p):
    """Log-probabilities of a row's tokens by one plain pass over it."""
    ids = torch.tensor([[*row["prompt_ids"], *row["response_ids"].tolist()]])
    with torch.no_grad():
        logits = model(input_ids=ids).logits[0, len(row["prompt_ids"]) - 1 : -1].float()
    at = [
        float(law(z, temperature, top_p)[y])
        for z, y in zip(logits, row["response_ids"], strict=True)
    ]
    return torch.tensor(at, dtype=torch.float64)


def own(tensor, n, row):
    return tensor[..., n, : len(row["response_ids"])]


def by_hand(recorded, chain_start, policies, measure, causes):
    """Parts of one response: engine and limits first, the others averaged over all orders."""
    ones = torch.ones(recorded.shape, dtype=torch.bool)
    value = lambda q: float(MEASURES[measure](q - recorded, ones))  # noqa: E731
    found = [value(chain_start), value(policies[0]) - value(chain_start)]
    for cause in range(causes):
        orders = []
        for order in permutations(range(causes)):
            before = sum(1 << c for c in order[: order.index(cause)])
            orders.append(value(policies[before | 1 << cause]) - value(policies[before]))
        found.append(sum(orders) / len(orders))
    return found


def table(found):
    """Rows of parts by measure and cause."""
    rows = parts(
        recorded=found.recorded,
        repeated=found.repeated,
        policies=found.policies,
        mask=found.mask,
        causes=CAUSES,
    )
    return {(row["measure"], row["cause"]): row for row in rows}


def tables(folders, rows):
    """Policies with limits undone, a row each, by plain passes."""
    found = []
    for number in range(16):
        temperature, precision, _, lag = (number >> i & 1 for i in range(4))
        model = read(
            folders["policy" if lag else "older"], torch.float32 if precision else torch.bfloat16
        )
        found.append([independent(model, r, 1.0 if temperature else 0.7, 1.0) for r in rows])
    return found


def test_every_policy_and_every_part_is_what_its_causes_say(folders):
    rows = drawn(folders["older"], sampling=SETTING, half=True, count=2)
    found = rescore(
        rows, policy=folders["policy"], versions={None: folders["older"]}, sampler_format=HALF
    )
    wanted = tables(folders, rows)
    for number, n in product(range(16), range(len(rows))):
        exact = bool(number & 2)  # sums in another order round otherwise in bfloat16
        gap = (own(found.policies[number], n, rows[n]) - wanted[number][n]).abs()
        assert gap.max() < (1e-5 if exact else 0.05) and gap.mean() < (1e-5 if exact else 2e-3)
    half = read(folders["older"], torch.bfloat16)
    for n, row in enumerate(rows):
        gap = (own(found.repeated, n, row) - independent(half, row, 0.7, 0.9)).abs()
        assert gap.max() < 0.1
    assert (found.recorded - found.repeated).abs()[found.mask].mean() < 0.02
    assert found.widened == 0
    told, causes = table(found), (*FIRST, *CAUSES)
    for measure in MEASURES:
        parts_by_hand = torch.tensor(
            [
                by_hand(
                    own(found.recorded, n, row),
                    own(found.repeated, n, row),
                    [table[n] for table in wanted],
                    measure,
                    len(CAUSES),
                )
                for n, row in enumerate(rows)
            ]
        ).sum(0)
        size = len(rows) if measure == "chi_square_response" else int(found.mask.sum())
        values = torch.tensor(
            [told[measure, cause]["value"] for cause in causes], dtype=torch.float64
        )
        assert_close(values, parts_by_hand / size, relative=0.02)
        shares = [told[measure, cause]["share"] for cause in causes]
        assert sum(shares) == pytest.approx(1)
        assert_close(sum(values), told[measure, "all"]["value"])
        for cause in causes:
            row = told[measure, cause]
            assert row["least"] - 1e-9 <= row["value"] <= row["most"] + 1e-9
    big = {cause: told["k1", cause]["value"] for cause in ("support", "temperature", "lag")}
    assert min(big.values()) > 0.05, big
    assert abs(told["k1", "precision"]["value"]) < 0.01 and told["k1", "cache"]["value"] == 0


@pytest.mark.parametrize(
    ("sampling", "half", "lag", "absent"),
    [
        (SETTING, True, False, "lag"),
        (SETTING, False, True, "precision"),
        (Sampling(max_tokens=24, temperature=0.7), True, True, "support"),
        (Sampling(max_tokens=24, top_p=0.9), True, True, "temperature"),
    ],
)
def test_an_absent_cause_has_no_part_though_it_was_looked_for(folders, sampling, half, lag, absent):
    drew = folders["older" if lag else "policy"]
    rows = drawn(drew, sampling=sampling, half=half, count=6)
    told = table(
        rescore(
            rows,
            policy=folders["policy"],
            versions={None: drew},
            sampler_format=HALF if half else Format(),
        )
    )
    for measure in ("k1", "k3", "chi_square"):
        assert told[measure, absent]["value"] == 0 == told[measure, absent]["share"]
        engine = told[measure, "engine"]
        assert abs(engine["value"]) <= 4 * engine["error"] + 1e-3
    for cause in {"support", "lag"} - {absent}:
        assert told["k1", cause]["value"] > 4 * told["k1", cause]["error"] > 0
    if absent not in ("temperature", "lag"):
        assert told["k1", "temperature"]["least"] < told["k1", "temperature"]["most"]


def test_parts_are_those_of_all_responses_there_are(folders):
    """Two tokens at most, so every response can be listed: estimates lie about the exact parts."""
    prompt, model = PROMPTS[0], read(folders["older"])
    sampling = Sampling(max_tokens=2, temperature=0.7)

    def next_law(*written):
        with torch.no_grad():
            logits = model(input_ids=torch.tensor([[*prompt, *written]])).logits[0, -1]
        return law(logits, 0.7, 1.0)

    first = next_law()
    listed = []
    for a in range(len(first)):
        if a == 1:
            listed.append(((a,), first[[a]]))
            continue
        second = next_law(a)
        listed += [((a, b), torch.stack([first[a], second[b]])) for b in range(len(second))]
    every = [
        {"prompt_ids": prompt, "response_ids": np.array(ids), "mask": np.ones(len(ids), bool),
         "behavior_logp": logp.numpy(), "temperature": 0.7}
        for ids, logp in listed
    ]  # fmt: skip
    rows = drawn(folders["older"], sampling=sampling, count=150)[:150]
    with_all = rescore([*every, *rows], policy=folders["policy"], versions={None: folders["older"]})
    split = len(every)
    take = lambda part: {  # noqa: E731
        "recorded": with_all.recorded[part], "repeated": with_all.repeated[part],
        "policies": with_all.policies[:, part], "mask": with_all.mask[part], "causes": CAUSES,
    }  # fmt: skip
    chance = with_all.recorded[:split].sum(1).exp()
    assert float(chance.sum()) == pytest.approx(1, abs=1e-5)
    tokens = with_all.mask[:split].sum(1)
    ratio = with_all.policies[-1, :split] - with_all.recorded[:split]
    lag = with_all.policies[8, :split] - with_all.recorded[:split]
    heat = with_all.policies[1, :split] - with_all.recorded[:split]
    mean = lambda x: float((chance * x).sum() / (chance * tokens).sum())  # noqa: E731
    square = lambda x: x.expm1().square().sum(1)  # noqa: E731
    exact = mean((square(lag) + square(ratio) - square(heat)) / 2)
    told = {(r["measure"], r["cause"]): r for r in parts(**take(slice(split, None)))}
    found = told["chi_square", "lag"]
    assert abs(found["value"] - exact) < 4 * found["error"] < exact
    whole = told["k1", "all"]
    assert abs(whole["value"] - mean(-ratio.sum(1))) < 4 * whole["error"]


def test_a_kept_cache_is_told_from_one_that_was_computed_again(folders):
    old, new, policy = (folders[name] for name in ("older", "old", "policy"))
    rows = drawn(old, sampling=PLAIN, swap=new, count=6)
    assert any(len({*row["versions"].tolist()}) == 2 for row in rows)
    found = rescore(rows, policy=policy, versions={0: old, 1: new}, kept_cache=True)
    assert (found.recorded - found.repeated).abs().max() < 1e-5
    again = found.policies[4]  # cache undone: each token by its version after a full reading
    models = {0: read(old), 1: read(new)}
    for n, row in enumerate(rows):
        both = torch.stack([independent(models[v], row, 1.0, 1.0) for v in (0, 1)])
        wanted = both.gather(0, torch.from_numpy(row["versions"])[None])[0]
        assert (own(again, n, row) - wanted).abs().max() < 1e-5
        assert (
            own(found.policies[8], n, row) - independent(read(policy), row, 1.0, 1.0)
        ).abs().max() < 1e-5
    assert torch.equal(found.policies[8], found.policies[12])
    told = table(found)
    assert told["chi_square", "cache"]["value"] != 0
    dropped = table(rescore(rows, policy=policy, versions={0: old, 1: new}))
    assert dropped["k1", "cache"]["value"] == 0
    assert abs(dropped["chi_square", "engine"]["value"]) > 1e-3  # what is not told: the engine's
    assert abs(told["chi_square", "engine"]["value"]) < 1e-6


def test_what_is_not_told_counts_as_the_engines(folders):
    rows = drawn(folders["older"], sampling=PLAIN, count=6)
    told = table(rescore(rows, policy=folders["policy"], versions={}))
    assert told["k1", "lag"]["value"] == 0
    assert told["k1", "engine"]["share"] == pytest.approx(1)


def test_raw_log_probabilities_are_made_those_of_what_drew(folders):
    rows = drawn(folders["older"], sampling=SETTING, count=2)
    model = read(folders["older"])
    raw = [
        row | {"behavior_logp": independent(model, row, 1.0, 1.0).numpy(), "raw": True}
        for row in rows
    ]
    for temperature in (1.0, 0.7):
        one, other = (
            rescore(
                some,
                policy=folders["policy"],
                versions={None: folders["older"]},
                temperature=temperature,
            )
            for some in (rows, raw)
        )
        assert (one.recorded - other.recorded).abs().max() < 1e-5


def test_a_trainer_that_applies_the_temperature_leaves_it_no_part(folders):
    rows = drawn(folders["older"], sampling=Sampling(max_tokens=12, temperature=0.7), count=2)
    told = table(
        rescore(rows, policy=folders["policy"], versions={None: folders["older"]}, temperature=0.7)
    )
    assert told["k1", "temperature"]["value"] == 0 < told["k1", "lag"]["value"]


def test_tools_tokens_are_read_and_not_counted(folders):
    rows = drawn(folders["older"], sampling=PLAIN, count=2)
    masked = [row | {"mask": np.arange(len(row["mask"])) % 3 != 1} for row in rows]
    one, other = (
        rescore(some, policy=folders["policy"], versions={None: folders["older"]})
        for some in (rows, masked)
    )
    assert not other.policies[:, ~other.mask].any()
    inside = other.mask
    assert (one.policies[:, inside] - other.policies[:, inside]).abs().max() < 1e-5


def test_bad_input_is_refused_in_a_line(folders):
    rows = drawn(folders["older"], sampling=PLAIN, count=1)
    policy, older = folders["policy"], folders["older"]
    with refused("temperature 0"):
        rescore([row | {"temperature": 0.0} for row in rows], policy=policy, versions={})
    with refused("token is of version 0", "allowed: 3"):
        rescore(rows, policy=policy, versions={3: older})
    with refused("kept cache", "a folder for each"):
        rescore(rows, policy=policy, versions={None: older}, kept_cache=True)
    with refused("token 99", "the model that drew"):
        rescore([rows[0] | {"prompt_ids": [99]}], policy=policy, versions={})
    with refused("1 responses"):
        table(rescore(rows[:1], policy=policy, versions={}))
    assert unlimited(SETTING).top_p == 1


@pytest.fixture(scope="module")
def store(folders, tmp_path_factory):
    """A rollout store of an older model in bfloat16, as `windage sample` writes it."""
    policy = read(folders["policy"])
    rows = []
    for n, row in enumerate(drawn(folders["older"], sampling=SETTING, half=True)):
        said = {"group_id": str(n // 4), "sample_id": str(n), "reward": n % 2, "outcome": n % 2,
                "finish_reason": "stop", "seed": n, "elapsed": 1.0, "rejected": None}  # fmt: skip
        logp = independent(policy, row, 1.0, 1.0).numpy() - 0.25
        rows.append(row | {k: v for k, v in said.items()} | {"logp": logp})
    folder = tmp_path_factory.mktemp("store")
    rollouts.write(folder, 1, rows, tokenizer="x")
    return folder


def test_the_verb_tells_shares_in_document_and_page(folders, store, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(document, "support", partial(support, names=("group_mean",)))
    words = ["diagnose", str(store), "--json", "--out", str(tmp_path), "--sample", "10"]
    words += ["--rescore", folders["policy"], "--sampler-model", folders["older"]]
    assert main([*words, "--sampler-format", "bfloat16"]) == 0
    told = json.loads(capsys.readouterr().out)["rescored"]
    assert told["responses"] == 10 and told["sampler"] == {"all": folders["older"]}
    assert told["sampler_gap"] < 0.02 and told["trainer_gap"] == pytest.approx(0.25, abs=1e-4)
    shares = {row["cause"]: row["share"] for row in told["rows"] if row["measure"] == "k1"}
    assert min(shares["lag"], shares["support"]) > 0.1 and abs(shares["engine"]) < 0.05
    page = (tmp_path / "diagnose.html").read_text()
    assert "undone in every order" in page and "bfloat16" not in shares


def test_a_sample_is_some_of_the_rows_and_repeats_itself(store):
    some = [sample(store, count=5, seed=s) for s in (0, 0, 1)]
    names = [[tuple(row["response_ids"]) for row in rows] for rows in some]
    assert names[0] == names[1] != names[2] and len({*names[0]}) == 5
    assert len(sample(store, count=100, seed=0)) == 12
    told = sample(store, count=5, seed=0, settings={"temperature": 0.3, "top_k": 7})
    assert {(round(row["temperature"], 6), row["top_k"]) for row in told} == {(0.7, 7)}


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--sample", "8"], "--sample needs --rescore"),
        (["--kept-cache"], "--kept-cache needs --rescore"),
        (["--rescore", "/nowhere"], "holds no model"),
        (["--rescore", "M", "--sampler-model", "/nowhere"], "holds no model"),
        (["--rescore", "M", "--sampler-model", "x=/nowhere"], "VERSION=FOLDER"),
        (["--rescore", "M", "--sampler-format", "int8"], "float32, bfloat16"),
        (["--rescore", "M", "--drawn", "heat=1"], "temperature=NUMBER"),
        (["--rescore", "M", "--policy-temperature", "0"], "temperature is 0"),
        (["--rescore", "M", "--sampler-model", "7=M"], "of version 0"),
    ],
)
def test_flags_that_do_not_fit_are_refused(folders, store, capsys, monkeypatch, words, says):
    monkeypatch.setattr(document, "support", partial(support, names=("group_mean",)))
    words = [word.replace("M", folders["policy"]) if word in ("M", "7=M") else word
             for word in words]  # fmt: skip
    assert main(["diagnose", str(store), *words]) == 2
    out, err = capsys.readouterr()
    assert not out and says in err and len(err.splitlines()) == 1
