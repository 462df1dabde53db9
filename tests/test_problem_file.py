"""Problem files: strict reading, complete checks that name the place, refusal before memory."""

import copy
import hashlib
import json
import subprocess
import sys
import time

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from problem_files import key, pair, prefixes, responses, tree, write

from windage.estimators.errors import BadInput
from windage.toy.problem_file import MOST_NUMBERS, Shape, read, refuse_size, to_problem
from windage.toy.problems import Tree

SHAPES = [(1, None, 3), (1, 0, 3), (2, 1, 4), (3, 1, 3), (3, None, 2), (4, 0, 1), (12, 3, 2)]


def refusal(folder, data):
    path = data if isinstance(data, str) and "\n" not in data and "{" not in data else None
    path = path or write(folder, data)
    start = time.perf_counter()
    with pytest.raises(BadInput) as caught:
        read(path)
    assert time.perf_counter() - start < 1
    message = str(caught.value)
    assert message.startswith(f"{path}: ") and "allowed: " in message
    return message.removeprefix(f"{path}: ")


def changed(*place, to=None, drop=False, add=None):
    """The tree with one entry replaced, dropped, or another added beside it."""
    data = tree(stale=True)
    *above, last = place
    inner = data
    for step in above:
        inner = inner[step]
    if drop:
        del inner[last]
    elif add is not None:
        inner[last][add] = to
    else:
        inner[last] = to
    return data


@pytest.mark.parametrize("shape", SHAPES)
def test_keys_are_those_of_an_enumeration_in_its_order(shape):
    found = Shape(*shape)
    vocab, stop, horizon = shape
    before, after = prefixes(*shape), responses(*shape)
    if stop == 0 and vocab == 1:
        before, after = [()], [(0,)]
    assert list(found.prefixes()) == [key(h) for h in before]
    assert list(found.responses()) == [key(y) for y in after]
    assert found.count() == (len(before), len(after))
    assert found.numbers(3) == 3 * (len(before) * vocab + len(after))
    for ids in [*before, *after, (*before[-1], vocab), (0,) * (horizon + 1)]:
        assert found.is_prefix(key(ids)) == (ids in before)
        assert found.is_response(key(ids)) == (ids in after)


def test_ids_sort_as_integers():
    keys = list(Shape(12, 3, 2).prefixes())
    assert keys.index("2") < keys.index("10") and "3" not in keys


@given(st.text("0123 -+x²١", max_size=6))
def test_only_canonical_keys_are_valid(text):
    shape = Shape(4, 2, 3)
    assert shape.is_prefix(text) == (text in set(shape.prefixes()))
    assert shape.is_response(text) == (text in set(shape.responses()))


def test_a_file_becomes_the_problem_it_says(tmp_path):
    data = pair()
    path = write(tmp_path, data)
    document = read(path)
    assert document.name == "problem.json"
    assert document.sha256 == hashlib.sha256((tmp_path / "problem.json").read_bytes()).hexdigest()
    problem = to_problem(document)
    assert problem.tree == Tree(3, 1, 2) and problem.sha256 == document.sha256
    for p, prompt in enumerate(data["prompts"]):
        for n, h in enumerate(prefixes(3, 1, 2)):
            assert problem.logits[p, n].tolist() == prompt["policy"][key(h)]
            sampler = torch.tensor(prompt["behavior"][key(h)], dtype=torch.float64)
            assert torch.equal(problem.behavior_logp[p, n], sampler.log_softmax(-1))
        for k, y in enumerate(responses(3, 1, 2)):
            assert problem.rewards[p, k] == prompt["rewards"][key(y)]
            assert problem.lengths[p, k] == len(y)


def test_the_order_in_a_file_does_not_matter(tmp_path):
    data = pair()
    turned = copy.deepcopy(data)
    for prompt in turned["prompts"]:
        for name, table in prompt.items():
            prompt[name] = dict(reversed(table.items()))
    one, other = (
        to_problem(read(write(tmp_path, d, f"{i}.json"))) for i, d in enumerate((data, turned))
    )
    assert torch.equal(one.logits, other.logits) and torch.equal(one.rewards, other.rewards)


def test_without_a_behavior_the_policy_samples(tmp_path):
    problem = to_problem(read(write(tmp_path, tree())))
    assert torch.equal(problem.behavior_logp, problem.logp)


def test_a_prompt_without_behavior_beside_one_that_has_it(tmp_path):
    data = pair()
    del data["prompts"][1]["behavior"]
    problem = to_problem(read(write(tmp_path, data)))
    assert torch.equal(problem.behavior_logp[1], problem.logp[1])
    assert not torch.allclose(problem.behavior_logp[0], problem.logp[0])


def test_the_largest_finite_logits_leave_finite_log_probabilities(tmp_path):
    data = changed("prompts", 0, "policy", "", to=[1.7e308, -1.7e308, 0])
    problem = to_problem(read(write(tmp_path, data)))
    assert torch.isfinite(problem.logp).all()
    assert problem.logp[0, 0].exp().tolist() == [1.0, 0.0, 0.0]


PROMPT = ("prompts", 0)
BAD = {
    "missing prefix": (
        changed(*PROMPT, "policy", "0 1", drop=True),
        ["prompts[0].policy", "'0 1' is missing", "stop token 2"],
    ),
    "missing prefix of the behavior": (
        changed(*PROMPT, "behavior", "", drop=True),
        ["prompts[0].behavior", "'' is missing"],
    ),
    "missing response": (
        changed(*PROMPT, "rewards", "0 2", drop=True),
        ["prompts[0].rewards", "'0 2' is missing"],
    ),
    "prefix after the stop token": (
        changed(*PROMPT, "policy", add="2 0", to=[0, 0, 0]),
        ["prompts[0].policy", "unknown key '2 0'", "nearest valid key"],
    ),
    "prefix at the horizon": (
        changed(*PROMPT, "policy", add="0 1 1", to=[0, 0, 0]),
        ["unknown key '0 1 1'", "nearest valid key: '0 1'"],
    ),
    "prefix beyond the vocabulary": (
        changed(*PROMPT, "policy", add="0 3", to=[0, 0, 0]),
        ["unknown key '0 3'", "nearest valid key: '0'", "ids from 0 to 2"],
    ),
    "impossible response": (
        changed(*PROMPT, "rewards", add="0 1", to=1.0),
        ["prompts[0].rewards", "unknown key '0 1'"],
    ),
    "response past its end": (
        changed(*PROMPT, "rewards", add="2 0 1", to=1.0),
        ["unknown key '2 0 1'", "nearest valid key: '2'"],
    ),
    "leading zero": (
        changed(*PROMPT, "policy", add="00", to=[0, 0, 0]),
        ["unknown key '00'", "nearest valid key: '0'"],
    ),
    "sign": (changed(*PROMPT, "policy", add="+1", to=[0, 0, 0]), ["unknown key '+1'"]),
    "two spaces": (
        changed(*PROMPT, "policy", add="0  1", to=[0, 0, 0]),
        ["unknown key '0  1'", "nearest valid key: '0 1'"],
    ),
    "foreign digits": (changed(*PROMPT, "policy", add="١", to=[0, 0, 0]), ["unknown key '١'"]),
    "superscript": (changed(*PROMPT, "policy", add="²", to=[0, 0, 0]), ["unknown key '²'"]),
    "short logits": (
        changed(*PROMPT, "policy", "0", to=[0.0, 1.0]),
        ["prompts[0].policy['0'] has length 2", "3 logits"],
    ),
    "logits that are no list": (
        changed(*PROMPT, "policy", "0", to=0.0),
        ["prompts[0].policy['0'] is 0.0"],
    ),
    "boolean logit": (
        changed(*PROMPT, "policy", "1", to=[0.0, True, 1.0]),
        ["prompts[0].policy['1'][1] is true", "finite number"],
    ),
    "text reward": (changed(*PROMPT, "rewards", "2", to="1"), ["rewards['2'] is '1'"]),
    "null reward": (changed(*PROMPT, "rewards", "2", to=None), ["rewards['2'] is null"]),
    "boolean reward": (changed(*PROMPT, "rewards", "2", to=False), ["rewards['2'] is false"]),
    "integer beyond float64": (changed(*PROMPT, "rewards", "2", to=10**400), ["rewards['2']"]),
    "vocab of zero": (changed("vocab", to=0), ["vocab is 0", "from 1"]),
    "boolean vocab": (changed("vocab", to=True), ["vocab is true"]),
    "fractional vocab": (changed("vocab", to=3.0), ["vocab is 3.0"]),
    "horizon of zero": (changed("horizon", to=0), ["horizon is 0", "from 1"]),
    "negative horizon": (changed("horizon", to=-1), ["horizon is -1"]),
    "text horizon": (changed("horizon", to="3"), ["horizon is '3'"]),
    "stop at vocab": (changed("stop", to=3), ["stop is 3", "below vocab 3"]),
    "negative stop": (changed("stop", to=-1), ["stop is -1"]),
    "boolean stop": (changed("stop", to=True), ["stop is true", "null"]),
    "missing stop": (changed("stop", drop=True), ["'stop' is missing"]),
    "missing prompts": (changed("prompts", drop=True), ["'prompts' is missing"]),
    "no prompts": (changed("prompts", to=[]), ["prompts is a list", "at least one"]),
    "prompts as an object": (changed("prompts", to={}), ["prompts is an object"]),
    "prompt as a list": (changed(*PROMPT, to=[]), ["prompts[0] is a list"]),
    "policy as a list": (changed(*PROMPT, "policy", to=[]), ["prompts[0].policy is a list"]),
    "null behavior": (changed(*PROMPT, "behavior", to=None), ["prompts[0].behavior is null"]),
    "no policy": (changed(*PROMPT, "policy", drop=True), ["prompts[0]", "'policy' is missing"]),
    "no rewards": (changed(*PROMPT, "rewards", drop=True), ["prompts[0]", "'rewards' is missing"]),
    "unknown key of the file": (
        {**tree(), "horizn": 3},
        ["unknown key 'horizn'", "nearest valid name: horizon"],
    ),
    "unknown key of a prompt": (
        changed("prompts", 0, add="behaviour", to={}),
        ["prompts[0]", "unknown key 'behaviour'", "nearest valid name: behavior"],
    ),
    "second prompt": (
        {**tree(), "prompts": [tree()["prompts"][0], {"policy": {}, "rewards": {}}]},
        ["prompts[1].policy", "'' is missing"],
    ),
    "a list": ("[1,\n2]", ["the file is a list"]),
    "empty": ("\n", ["line 2 column 1"]),
    "truncated": (json.dumps(tree(), indent=1)[:-40], ["line", "column"]),
    "two documents": ("{}\n{}", ["line 2 column 1"]),
    "nested": ("\n" + "[" * 100_000, ["too deeply"]),
    "NaN": (json.dumps(changed(*PROMPT, "rewards", "2", to=float("nan"))), ["NaN"]),
    "Infinity": (json.dumps(changed(*PROMPT, "rewards", "2", to=float("inf"))), ["Infinity"]),
    "overflow": (
        json.dumps(tree()).replace('"2": 0.2', '"2": 1e999, "": 0.2', 1),
        ["unknown key ''"],
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_files_are_refused_by_name(name, tmp_path):
    data, words = BAD[name]
    message = refusal(tmp_path, data)
    for word in words:
        assert word in message, message


def test_an_overflowing_literal_is_not_finite(tmp_path):
    text = json.dumps(changed(*PROMPT, "rewards", "2", to=12345.5)).replace("12345.5", "1e999")
    assert "rewards['2'] is inf; allowed: a finite number" in refusal(tmp_path, text)


@pytest.mark.parametrize(
    ("once", "twice", "words"),
    [
        ('"vocab": 3', '"vocab": 3, "vocab": 3', "the file: key 'vocab'"),
        ('"policy": {', '"policy": {"": [9, 9, 9], ', "prompts[0].policy: key ''"),
        ('"rewards": {', '"rewards": {"0 2": 1, ', "prompts[0].rewards: key '0 2'"),
        ('"rewards"', '"rewards": {}, "rewards"', "prompts[0]: key 'rewards'"),
    ],
)
def test_duplicate_keys_are_named(once, twice, words, tmp_path):
    message = refusal(tmp_path, json.dumps(tree()).replace(once, twice, 1))
    assert words in message and "twice" in message


def test_what_is_no_file_of_text_is_refused(tmp_path):
    assert "directory" in refusal(tmp_path, str(tmp_path))
    assert "No such file" in refusal(tmp_path, str(tmp_path / "none.json"))
    assert "device" in refusal(tmp_path, "/dev/zero")
    assert "null byte" in refusal(tmp_path, "a\0b")
    binary = tmp_path / "binary.json"
    binary.write_bytes(b'{"vocab": "\xff"}')
    assert "byte 11 is not UTF-8" in refusal(tmp_path, str(binary))
    huge = tmp_path / "huge.json"
    with open(huge, "wb") as file:
        file.truncate(2**33)
    assert "8192 MiB" in refusal(tmp_path, str(huge))


@pytest.mark.parametrize(
    ("vocab", "stop", "horizon", "words"),
    [
        (3, 2, 40, "need 5.5e+12 logits and rewards, 4.1e+04 GiB"),
        (50_000, 2, 30, "need 1.86e+141"),
        (10**9, None, 10**9, "vocab 1000000000 and horizon 1000000000 need more than 1e+300"),
        (10**250, 0, 10**250, "vocab 1e+250 and horizon 1e+250 need more than 1e+300"),
        (2, 1, 10**12, "need 3e+12"),
        (1, None, 10**30, "need 1e+30"),
        (10**30, None, 1, "need 2e+30"),
    ],
)
def test_absurd_sizes_are_refused_with_the_size(vocab, stop, horizon, words, tmp_path):
    message = refusal(tmp_path, {**tree(), "vocab": vocab, "stop": stop, "horizon": horizon})
    assert words in message and f"allowed: at most {MOST_NUMBERS:,}" in message
    assert "GiB" in message and len(message) < 300


def test_the_limit_of_size_counts_logits_and_rewards_of_every_prompt():
    shape = Shape(10, None, 6)
    each = 111_111 * 10 + 10**6
    assert shape.numbers(1) == each
    refuse_size(shape, MOST_NUMBERS // each)
    with pytest.raises(BadInput, match=r"2\.11e\+07 logits and rewards, 0\.157 GiB"):
        refuse_size(shape, MOST_NUMBERS // each + 1)


def test_checking_imports_neither_torch_nor_numpy(tmp_path):
    program = (
        "import sys\nfrom windage.toy.problem_file import read\n"
        "read(sys.argv[1])\nprint('torch' in sys.modules, 'numpy' in sys.modules)"
    )
    answer = subprocess.run(
        [sys.executable, "-c", program, write(tmp_path, tree())], capture_output=True, text=True
    )
    assert answer.stdout == "False False\n", answer.stderr
