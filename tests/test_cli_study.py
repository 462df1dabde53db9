"""`windage study`: flags refused in one line before torch is imported, and what it prints."""

import inspect
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from problem_files import pair, tree, write

from windage.analysis.studies.grid import PROBLEMS
from windage.cli import main as frame
from windage.cli import specs
from windage.cli import study as verb
from windage.cli.output import progress
from windage.estimators.catalogue import CATALOGUE
from windage.estimators.errors import BadInput
from windage.estimators.index import FIRST, SETTINGS
from windage.toy.behavior import KINDS
from windage.toy.exact.plan import ENGINES


def windage(*words, **options):
    program = "import sys; from windage.cli.main import main; sys.exit(main())"
    return subprocess.run(
        [sys.executable, "-c", program, "study", *words],
        capture_output=True,
        text=True,
        timeout=120,
        **options,
    )


def refusal(capsys, *words):
    assert frame.main(["study", *words]) == 2
    output = capsys.readouterr()
    assert output.out == ""
    assert output.err.startswith("windage study: ") and output.err.endswith("\n")
    assert output.err.count("\n") == 1
    return output.err


def printed(capsys, *words):
    def constant(text):
        raise AssertionError(text)

    assert frame.main(["study", "--json", *words]) == 0
    return json.loads(capsys.readouterr().out, parse_constant=constant)


# Tables that stand in for torch.


def test_tables_are_true():
    def arguments(function):
        return {k: p.default for k, p in inspect.signature(function).parameters.items()}

    for name, problem in PROBLEMS.items():
        assert specs.PROBLEMS[name] == {
            k: v for k, v in arguments(problem).items() if isinstance(v, int)
        }
    assert set(specs.PROBLEMS) == set(PROBLEMS)
    for kind, function in KINDS.items():
        hidden = {"problem", "seed"}
        assert specs.BEHAVIORS[kind] == tuple(k for k in arguments(function) if k not in hidden)
    assert set(specs.BEHAVIORS) == set(KINDS)
    assert ("auto", *ENGINES) == verb.ENGINES
    single = [n for n, e in CATALOGUE.items() if not e.compares]
    assert sorted(specs.SINGLE) == sorted(single)
    limited = {low for low, _ in specs.ORDERED} | {high for _, high in specs.ORDERED}
    for name, entry in CATALOGUE.items():
        own = {k: v for k, v in entry.settings.items() if k in limited}
        assert specs.LIMITS.get(name, {}) == own
    keys = {k for own in (*SETTINGS.values(), *specs.PROBLEMS.values()) for k in own}
    keys |= {k for own in specs.BEHAVIORS.values() for k in own}
    assert keys | {"group_size", "samples", "error", "frontier"} == set(specs.RULES)


def test_every_default_is_a_value_that_its_rule_allows():
    for entry in CATALOGUE.values():
        for key, value in entry.settings.items():
            if value is not None:
                assert specs.value(key, repr(value)) == value


# Refusals.

BAD_FLAGS = [
    (["--estimators", "grop"], "unknown estimator 'grop'; nearest valid name: grpo"),
    (["--estimators", "GRPO"], "nearest valid name: grpo"),
    (["--estimators", "rloo", "token-is"], "nearest valid name: token_is"),
    (["--estimators"], "--estimators"),
    (["--estimators", "token_tis:cpa=2"], "setting of token_tis 'cpa'; nearest valid name: cap"),
    (["--estimators", "rloo:cap=2"], "unknown setting of rloo 'cap'; none is allowed"),
    (["--estimators", "token_tis:"], "unknown setting of token_tis ''"),
    (["--estimators", "token_tis:cap"], "cap has no value; allowed: cap=NUMBER"),
    (["--estimators", "token_tis:cap=1,cap=2"], "cap is there twice"),
    (["--estimators", "token_tis:cap=nan"], "cap is 'nan'; allowed: a number above 0"),
    (["--estimators", "token_tis:cap=0"], "cap is '0'"),
    (["--estimators", "token_tis:cap=-1"], "cap is '-1'"),
    (["--estimators", "token_tis:cap=1_0"], "cap is '1_0'"),
    (["--estimators", "token_tis:cap="], "cap is ''"),
    (["--estimators", "topr:baseline=inf"], "baseline is 'inf'; allowed: a finite number"),
    (["--estimators", "topr:baseline=1e999"], "baseline is '1e999'"),
    (["--estimators", "topr:a_pos=2"], "topr: a_pos is 2, b_pos 1; allowed: a_pos at most b_pos"),
    (["--estimators", "topr:b_neg=-1"], "b_neg is '-1'"),
    (["--estimators", "icepop:low=6"], "icepop: low is 6, high 5"),
    (["--estimators", "centered_mask:high=0.1"], "centered_mask: low is 0.5, high 0.1"),
    (["--estimators", "grpo:ddof=2"], "ddof is '2'; allowed: a whole number from 0 to 1"),
    (["--estimators", "grpo:ddof=0.5"], "ddof is '0.5'"),
    (["--estimators", "grpo:eps=-1"], "eps is '-1'"),
    (["--estimators", "grpo:clip_low=-0.1"], "clip_low is '-0.1'"),
    (["--estimators", "ppo:gamma=1.5"], "gamma is '1.5'; allowed: a number from 0 to 1"),
    (["--estimators", "ppo:lam=-0.5"], "lam is '-0.5'"),
    (["--estimators", "dr_grpo:length=0"], "length is '0'"),
    (["--estimators", "starting_point:max_lag=1.5"], "max_lag is '1.5'"),
    (["--group-size", "0"], "--group-size: group_size is '0'; allowed: a whole number from 1"),
    (["--group-size", "-3"], "--group-size"),
    (["--group-size", "2.0"], "group_size is '2.0'"),
    (["--group-size", "many"], "group_size is 'many'"),
    (["--group-size", "9" * 5000], "a whole number"),
    (["--group-size", "1", "--estimators", "rloo"], "group 0 has size 1; allowed with rloo"),
    (["--group-size", "1", "--estimators", "topr", "grpo"], "size 1; allowed with grpo"),
    (["--sweep", "group_size=1,2", "--estimators", "rloo"], "size 1; allowed with rloo"),
    (["--behavior", "stael"], "unknown behavior 'stael'; nearest valid name: stale"),
    (["--behavior", "stale:stpes=1"], "nearest valid name: steps; allowed: steps, rate"),
    (["--behavior", "stale:steps=1.5"], "steps is '1.5'"),
    (["--behavior", "stale:steps=-1"], "steps is '-1'"),
    (["--behavior", "stale:rate=-1"], "rate is '-1'"),
    (["--behavior", "stale:steps=1,,rate=1"], "unknown setting of stale ''"),
    (["--behavior", "noise:sigma=-1"], "sigma is '-1'"),
    (["--behavior", "noise:sigma=Infinity"], "sigma is 'Infinity'"),
    (["--behavior", "bits:b=0"], "b is '0'; allowed: a whole number from 1 to 52"),
    (["--behavior", "temperature:t=0"], "t is '0'; allowed: a finite number above 0"),
    (["--behavior", "top_k:k=0"], "k is '0'"),
    (["--behavior", "top_p:p=0"], "p is '0'; allowed: a number above 0, at most 1"),
    (["--behavior", "top_p:p=1.01"], "p is '1.01'"),
    (["--behavior", "noise:seed=1"], "nearest valid name: sigma"),
    (["--sweep", "cpa=1,2"], "unknown key 'cpa'; nearest valid name: cap"),
    (["--sweep", "cap=1,2", "--estimators", "rloo"], "unknown key 'cap'"),
    (["--sweep", "cap"], "cap has no value; allowed: cap=v1,v2,..."),
    (["--sweep", "cap="], "cap has no value"),
    (["--sweep", "cap=1,"], "cap is ''"),
    (["--sweep", "cap=1,x"], "cap is 'x'"),
    (["--sweep", "cap=1,1.0"], "a value is there twice"),
    (["--sweep", "cap=1", "--sweep", "cap=2"], "cap is swept twice"),
    (["--sweep", "steps=1,2"], "no such --behavior; allowed: stale or mixed"),
    (["--sweep", "sigma=1,2", "--behavior", "stale"], "unknown key 'sigma'"),
    (["--sweep", "low=0.1,9", "--estimators", "icepop"], "icepop: low is 9, high 5"),
    (["--sweep", "horizon=2,3", "--problem", "bandit"], "unknown key 'horizon'"),
    (["--engine", "tuple"], "unknown engine 'tuple'; nearest valid name: tuples"),
    (["--samples", "1"], "samples is '1'"),
    (["--problem", "bandti"], "unknown problem 'bandti'; nearest valid name: bandit"),
    (["--problem", ""], "unknown problem ''"),
    (["--problem", "none.json"], "none.json: cannot be read: No such file"),
    (["--problem", "bandit:arm=3"], "nearest valid name: arms"),
    (["--problem", "bandit:arms=1"], "arms is '1'"),
    (["--problem", "token_tree:horizon=99"], "GiB; allowed: at most 20,000,000"),
    (["--problem", "token_tree", "--sweep", "horizon=2,99"], "GiB; allowed: at most 20,000,000"),
    (["--problem", "token_tree:vocab=90000,horizon=3"], "GiB; allowed: at most"),
    (["--problem", "/"], "/: is a directory"),
    (["--problm", "bandit"], "nearest valid name: --problem"),
]


@pytest.mark.parametrize(
    ("words", "message"), BAD_FLAGS, ids=[" ".join(words)[:50] for words, _ in BAD_FLAGS]
)
def test_bad_flags_are_refused_in_one_line(words, message, capsys):
    assert message in refusal(capsys, *words)


@pytest.mark.parametrize("sweep", [[f"{k}={','.join(map(str, range(1, 99)))}" for k in "abcd"]])
def test_a_grid_beyond_reason_is_refused(sweep, capsys):
    keys = ("baseline", "eps", "cap", "length")
    words = [f"{key}={text.partition('=')[2]}" for key, text in zip(keys, sweep, strict=True)]
    assert "92,236,816 points" in refusal(capsys, "--sweep", *words)


BAD_FILES = {
    "missing.json": (lambda d: d["prompts"][0]["policy"].pop("0"), "prompts[0].policy: key '0'"),
    "unknown.json": (lambda d: d.update(name="x"), "unknown key 'name'"),
    "impossible.json": (
        lambda d: d["prompts"][0]["rewards"].update({"2 2": 1}),
        "prompts[0].rewards: unknown key '2 2'; nearest valid key: '2'",
    ),
    "nan.json": (lambda d: d["prompts"][0]["rewards"].update({"2": float("nan")}), "NaN"),
    "length.json": (lambda d: d["prompts"][0]["policy"].update({"0": [1]}), "has length 1"),
    "zero.json": (lambda d: d.update(vocab=0), "vocab is 0"),
    "absurd.json": (lambda d: d.update(horizon=10**9), "GiB"),
}


@pytest.mark.parametrize("name", BAD_FILES)
def test_bad_files_are_refused_in_one_line_that_names_them(name, tmp_path, capsys):
    change, message = BAD_FILES[name]
    data = tree()
    change(data)
    path = write(tmp_path, data, name)
    line = refusal(capsys, "--problem", path)
    assert path in line and message in line and "allowed: " in line
    assert refusal(capsys, "--json", "--problem", path) == line


def test_a_file_name_with_a_new_line_is_still_one_line(tmp_path, capsys):
    path = tmp_path / "two\nlines.json"
    path.write_text("{")
    assert "two lines.json" in refusal(capsys, "--problem", str(path))


@pytest.mark.parametrize(
    "words", [["--problem", "FILE"], ["--estimators", "grop"], ["--behavior", "stale:steps=x"]]
)
def test_a_refusal_answers_in_a_second_without_torch(words, tmp_path):
    data = tree()
    data["prompts"][0]["rewards"]["2"] = None
    words = [write(tmp_path, data) if word == "FILE" else word for word in words]
    program = (
        "import sys; from windage.cli.main import main\n"
        "status = main(sys.argv[1:]); assert 'torch' not in sys.modules\n"
        "assert 'numpy' not in sys.modules; sys.exit(status)"
    )
    start = time.perf_counter()
    answer = subprocess.run(
        [sys.executable, "-c", program, "study", *words], capture_output=True, text=True
    )
    assert time.perf_counter() - start < 1
    assert (answer.returncode, answer.stdout, answer.stderr.count("\n")) == (2, "", 1)


def test_what_only_torch_can_tell_is_refused_in_one_line_too(capsys):
    assert "overflows float64" in refusal(
        capsys, "--problem", "bandit", "--behavior", "temperature:t=1e-310"
    )


# Answers.


def test_one_document_on_standard_output(tmp_path):
    path = write(tmp_path, pair())
    answer = windage("--problem", path, "--json", "--group-size", "2")
    assert answer.returncode == 0 and answer.stderr == ""
    found = json.loads(answer.stdout)
    assert answer.stdout.count("\n") == 1
    assert [row["estimator"] for row in found["rows"]] == list(FIRST)
    assert found["problem"]["name"] == "problem.json" and found["rows"][0]["group_size"] == 2


def test_flags_reach_the_study(tmp_path, capsys):
    path = write(tmp_path, tree(stale=True))
    words = ["--problem", path, "--estimators", "token_tis:cap=1.5", "rloo"]
    found = printed(capsys, *words, "--estimators", "token_tis", "--group-size", "3")
    names = [(row["estimator"], row["settings"]) for row in found["rows"]]
    assert names == [("token_tis", {"cap": 1.5}), ("rloo", {}), ("token_tis", {"cap": 2.0})]
    assert {row["group_size"] for row in found["rows"]} == {3}
    words = ["--problem", "bandit:arms=3", "--estimators", "rloo", "--behavior", "noise:sigma=0.5"]
    found = printed(capsys, *words, "--sweep", "sigma=0,1", "group_size=2,5", "--seed", "4")
    places = [(row["sigma"], row["group_size"]) for row in found["rows"]]
    assert places == [(0.0, 2), (0.0, 5), (1.0, 2), (1.0, 5)]
    assert found["problem"]["parameters"] == 3 and found["seed"] == 4
    sampled = ["--engine", "sampling", "--samples", "64"]
    (row,) = printed(capsys, *words, *sampled)["rows"]
    assert row["engine"] == "sampling" and row["standard_error"]["scale"] > 0
    (row,) = printed(capsys, *words, "--engine", "coupled")["rows"]
    assert row["mean"] is None and "coupled" in row["reason"]


def test_a_built_in_name_goes_before_a_file_of_that_name(tmp_path, monkeypatch, capsys):
    write(tmp_path, tree(), "bandit")
    monkeypatch.chdir(tmp_path)
    words = ["--estimators", "rloo", "--problem"]
    assert printed(capsys, *words, "bandit")["problem"]["sha256"] is None
    assert printed(capsys, *words, "./bandit")["problem"]["sha256"] is not None
    Path("plain").write_text(Path("bandit").read_text())
    assert printed(capsys, *words, "plain")["problem"]["name"] == "plain"


def test_a_group_of_one_in_the_whole_catalogue_is_no_error(capsys):
    found = printed(capsys, "--problem", "bandit", "--group-size", "1")
    table = {row["estimator"]: row for row in found["rows"]}
    assert table["rloo"]["reason"] and table["reinforce"]["scale"] == pytest.approx(1)
    found = printed(capsys, "--problem", "bandit", "--group-size", "1", "--estimators", "topr")
    assert "reason" not in found["rows"][0]


def test_a_swept_value_takes_the_place_of_a_given_one(capsys):
    words = ["--problem", "bandit", "--behavior", "stale:steps=9,rate=1", "--sweep", "steps=0,1"]
    found = printed(capsys, *words, "--estimators", "rloo")
    assert found["rows"][0]["relative_bias"] < 1e-12 < found["rows"][1]["relative_bias"]


def test_a_sweep_may_pair_limits_that_agree(capsys):
    words = ["--problem", "bandit", "--estimators", "icepop:high=20"]
    assert len(printed(capsys, *words, "--sweep", "low=0.1,9")["rows"]) == 2


def test_the_terminal_shows_a_table_and_reasons(tmp_path, capsys):
    path = write(tmp_path, tree(stale=True))
    words = ["study", "--problem", path, "--estimators", "ppo", "rloo", "trajectory_is"]
    assert frame.main(words) == 0
    output = capsys.readouterr()
    assert output.err == ""
    for word in ("problem.json", "trajectory_is", "needs values", "0.347"):
        assert word in output.out


def test_out_writes_files_and_says_where(tmp_path, capsys):
    folder = tmp_path / "new" / "folder"
    words = ["study", "--problem", "bandit", "--estimators", "rloo", "topr", "--out", str(folder)]
    assert frame.main(words) == 0
    assert {"study.json", "study.csv", "study.parquet", "study.html"} <= set(os.listdir(folder))
    assert str(folder) in capsys.readouterr().err
    assert json.loads((folder / "study.json").read_text())["schema"] == "windage/study/1"


def test_no_flag_asks_for_the_staleness_study():
    parser = frame.Parser(prog="windage study")
    verb.configure(parser)
    frame.common(parser)
    for words in ([], ["--json"], ["--seed", "3"]):
        assert verb.check(parser.parse_args(words)) is None
    request = verb.check(parser.parse_args(["--group-size", "4"]))
    assert request.problem == ("token_tree", {}) and len(request.estimators) == len(FIRST)


def test_progress_goes_to_a_terminal_on_standard_error_only(monkeypatch):
    class Terminal:
        def __init__(self):
            self.text = ""

        def write(self, text):
            self.text += text

        def flush(self):
            pass

        def isatty(self):
            return True

    screen = Terminal()
    monkeypatch.setattr(sys, "stderr", screen)
    monkeypatch.setenv("TERM", "xterm")
    with progress("rows") as advance:
        advance(3, 7)
    assert "3/7" in screen.text


def test_help_names_every_setting(capsys):
    with pytest.raises(SystemExit) as caught:
        frame.main(["study", "--help"])
    assert caught.value.code == 0
    words = capsys.readouterr().out
    for name in (*SETTINGS, *specs.BEHAVIORS, *specs.PROBLEMS):
        assert f"  {name}" in words
    tiers = words.index("first tier and"), words.index("second tier, by name only")
    assert tiers[0] < words.index("  starting_point") < tiers[1] < words.index("  dual_clip")


def test_unknown_values_are_bad_input_for_callers_too():
    with pytest.raises(BadInput, match="steps is 'x'"):
        specs.value("steps", "x")
