"""A critic on a transformer whose responses are listed: its biases, exactly; then runs with one."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from checks import assert_apart, assert_close, refused
from tiny_language_model import make
from tiny_model import (
    PROMPT,
    forward_of,
    gradient_of,
    logits_of,
    prefixes,
    problem_of,
    row_of,
    tiny,
)
from torch import Tensor

from windage.estimators.aggregation import token_sum
from windage.estimators.catalogue import get
from windage.estimators.member import use
from windage.llm import checkpoint, config, recipe, rollouts, run
from windage.llm.critic import Critic, Fitting, value_loss
from windage.llm.models import load
from windage.llm.passes import Responses
from windage.llm.ranks import ALONE
from windage.llm.rollouts import to_batch
from windage.llm.tasks.protocol import Question
from windage.llm.train import train
from windage.llm.update import Forward, accumulate, micro_batches
from windage.llm.verify import Verdict
from windage.toy.problems import Tree

# Normalization of transformers is in single precision whatever the weights.
RELATIVE = 1e-6
VOCAB, STOP, LONG, CUT = 3, 2, 4, 2
WHOLE, SHORT = Tree(VOCAB, STOP, LONG), Tree(VOCAB, STOP, CUT)


def critic_of(states, width: int, **settings) -> Critic:
    """A head on hidden states, in double precision."""
    return Critic(
        states,
        width,
        own=None,
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=0.05, weight_decay=0.0),
        fitting=Fitting(**{"gamma": 1.0, "micro_batch": 4, "max_grad_norm": 0.0} | settings),
        ranks=ALONE,
        device=torch.device("cpu"),
        dtype=torch.float64,
    )


class Listed:
    """A model, everything it may say in four tokens, and what it says when cut after two."""

    def __init__(self) -> None:
        self.model = tiny(VOCAB, len(PROMPT) + LONG, seed=1)
        rewards = ((torch.arange(WHOLE.leaves) * 5) % 7).double() / 3 - 1
        self.whole = problem_of(self.model, WHOLE, rewards, self.model, [self.model] * 2)
        short = self.short_rewards(torch.zeros(WHOLE.prefixes, dtype=torch.float64))
        self.short = problem_of(self.model, SHORT, short, self.model, [self.model] * 2)
        self.exact = self.values(WHOLE, rewards)

    def short_rewards(self, expected: Tensor) -> Tensor:
        """Rewards of the cut responses: their own where they stopped, else what is expected."""
        at = {tuple(ids): n for n, ids in enumerate(prefixes(WHOLE))}
        full = {ids: n for n, ids in enumerate(said(WHOLE))}
        problem = self.whole
        return torch.stack(
            [
                problem.rewards[0, full[ids]] if ids[-1] == STOP else expected[at[ids]]
                for ids in said(SHORT)
            ]
        )

    def values(self, tree: Tree, rewards: Tensor) -> Tensor:
        """Expected reward after each prefix, by listing what may follow."""
        numbers, _ = tree.paths
        chance = self.chances(tree)
        found = []
        for n in range(tree.prefixes):
            through = (numbers == n).any(-1)
            found.append((chance * rewards)[through].sum() / chance[through].sum())
        return torch.stack(found)

    def chances(self, tree: Tree) -> Tensor:
        """Probability of each response."""
        numbers, ids = tree.paths
        with torch.no_grad():
            logp = logits_of(self.model, tree).log_softmax(-1)
        here = logp[numbers.clamp(min=0), ids.clamp(min=0)]
        return torch.where(numbers >= 0, here, 0.0).sum(-1).exp()

    def gradient(self, tree: Tree, weights: Tensor) -> Tensor:
        """Sum over responses y and tokens t of chance(y) weights[y, t] times the token's score."""
        numbers, ids = tree.paths
        logp = logits_of(self.model, tree).log_softmax(-1)
        here = logp[numbers.clamp(min=0), ids.clamp(min=0)]
        whole = self.chances(tree).unsqueeze(1) * weights
        (torch.where(numbers >= 0, whole, 0.0) * here).sum().backward()
        return gradient_of(self.model)

    def head(self, wanted: Tensor, **settings) -> Critic:
        """A critic that gives these values after the prefixes of up to two tokens."""
        critic = critic_of(self.model.states, 8, **settings)
        rows = [torch.tensor([[*PROMPT, *ids]]) for ids in prefixes(WHOLE) if len(ids) <= CUT]
        with torch.no_grad():
            hidden = torch.cat(
                [
                    self.model.states(i, torch.ones_like(i), torch.tensor([i.shape[1] - 1]))
                    for i in rows
                ]
            )
            known = torch.cat([hidden, torch.ones(len(rows), 1, dtype=torch.float64)], 1)
            solved = torch.linalg.lstsq(known, wanted[: len(rows)].unsqueeze(1)).solution.squeeze(1)
            assert_close(known @ solved, wanted[: len(rows)], relative=1e-8)
            critic.head.weight.copy_(solved[:-1].unsqueeze(0))
            critic.head.bias.copy_(solved[-1:])
        return critic

    def trained(self, critic: Critic, lam: float) -> Tensor:
        """Mean of minus the gradient that training with `ppo` accumulates, cut after two tokens."""
        rows = [row_of(self.short, n, f"{n}", f"group {n}") for n in range(SHORT.leaves)]
        for row, ids in zip(rows, said(SHORT), strict=True):
            row["finish_reason"] = "stop" if ids[-1] == STOP else "length"
        critic.appraise(rows, *made_of(rows), 0)
        self.rows = rows
        entry = replace(get("ppo", lam=lam), aggregation=use(token_sum))
        batch, _ = made_of(rows)
        forward, weight = forward_of(self.model, batch, rows), self.chances(SHORT) * SHORT.leaves

        def weighted(which: Tensor) -> Forward:
            """The pass, whose gradient counts a response as often as it is drawn."""
            found = forward(which)
            found.logp.register_hook(lambda g: g * weight[which].unsqueeze(1))
            return found

        accumulate(entry, batch, weighted, micro_batches(batch, 3))
        return -gradient_of(self.model)


def said(tree: Tree) -> list[tuple[int, ...]]:
    return [tuple(i for i in ids if i >= 0) for ids in tree.paths[1].tolist()]


def made_of(rows):
    batch = to_batch(rows, group_size=1, current_version=0)
    return batch, Responses(rows, batch, temperature=1.0, device=torch.device("cpu"))


@pytest.fixture(scope="module")
def listed() -> Listed:
    return Listed()


def along(tree: Tree, values: Tensor) -> Tensor:
    """Values of prefixes before each token of each response, and 0 after the last."""
    numbers, _ = tree.paths
    found = torch.where(numbers >= 0, values[numbers.clamp(min=0)], 0.0)
    return torch.cat([found, torch.zeros(len(found), 1, dtype=found.dtype)], 1)


def objective(listed: Listed) -> Tensor:
    """The part of the gradient of the whole objective that the first two tokens have."""
    reward = listed.whole.rewards[0].unsqueeze(1).expand(-1, LONG)
    early = (torch.arange(LONG) < CUT).double()
    return listed.gradient(WHOLE, reward * early)


WRONG = torch.tensor([0.3, -0.8, 0.5, 0.9, -0.2, 0.7, -0.6], dtype=torch.float64)


def wrong_by(listed: Listed, scale: float) -> Tensor:
    error = torch.zeros(WHOLE.prefixes, dtype=torch.float64)
    error[: len(WRONG)] = scale * WRONG
    return error


def test_with_lambda_one_every_critic_is_unbiased(listed):
    own = listed.gradient(SHORT, listed.short.rewards[0].unsqueeze(1).expand(-1, CUT))
    for scale in (0.0, 1.0, -30.0):
        critic = listed.head(listed.exact + wrong_by(listed, scale))
        assert_close(listed.trained(critic, 1.0), own, relative=RELATIVE)


@pytest.mark.parametrize("lam", [0.0, 0.6, 0.95])
def test_lambda_below_one_brings_the_bias_that_the_errors_predict(listed, lam):
    """(1 - lam) sum over k of lam^k e[t+k+1] at each token, e the error of the critic."""
    exact = torch.zeros(WHOLE.prefixes, dtype=torch.float64)
    exact[: SHORT.prefixes] = listed.values(SHORT, listed.short.rewards[0])
    own = listed.gradient(SHORT, listed.short.rewards[0].unsqueeze(1).expand(-1, CUT))
    assert_close(listed.trained(listed.head(exact), lam), own, relative=RELATIVE)
    error = wrong_by(listed, 20.0)
    e = along(SHORT, error[: SHORT.prefixes])
    later = [(1 - lam) * sum(lam**k * e[:, t + k + 1] for k in range(CUT - t)) for t in range(CUT)]
    bias = listed.gradient(SHORT, torch.stack(later, 1))
    found = listed.trained(listed.head(exact + error), lam)
    assert_close(found - own, bias, relative=1e-5)
    assert_apart(found, own, at_least=1e-3)


def test_a_perfect_critic_completes_without_bias_and_a_wrong_one_with_its_error(listed):
    """An error e after the last token of a cut response biases by the mean of e times its score."""
    wanted = objective(listed)
    perfect = listed.head(listed.exact, complete=True)
    for lam in (1.0, 0.5):
        assert_close(listed.trained(perfect, lam), wanted, relative=RELATIVE)
        perfect = listed.head(listed.exact, complete=True)
    assert_close(
        torch.tensor([row["reward"] for row in listed.rows], dtype=torch.float64),
        listed.short_rewards(listed.exact),
        relative=1e-8,
    )
    assert_apart(listed.trained(listed.head(listed.exact), 1.0), wanted, at_least=1e-3)
    error = wrong_by(listed, 20.0)
    cut = torch.tensor([float(ids[-1] != STOP) for ids in said(SHORT)], dtype=torch.float64)
    after = listed.short_rewards(listed.exact + error) - listed.short_rewards(listed.exact)
    bias = listed.gradient(SHORT, (cut * after).unsqueeze(1).expand(-1, CUT))
    found = listed.trained(listed.head(listed.exact + error, complete=True), 1.0)
    assert_close(found - wanted, bias, relative=1e-5)
    assert_apart(found, wanted, at_least=1e-3)


# The fit -------------------------------------------------------------------------------------


def drawn(listed: Listed) -> list[dict]:
    return [row_of(listed.short, n % SHORT.leaves, f"{n}", f"{n}") for n in range(20)]


def fitted(listed: Listed, **settings) -> tuple[Critic, list[dict], dict[str, float]]:
    critic, rows = critic_of(listed.model.states, 8, **settings), drawn(listed)
    return critic, rows, critic.appraise(rows, *made_of(rows), 0)


def test_the_fit_is_that_of_all_tokens_whatever_the_micro_batches(listed):
    """The means of the returns after each prefix have the least loss, and no gradient."""
    few = [fitted(listed, passes=3, micro_batch=size)[0].head.weight for size in (1, 3, 20)]
    for one in few[:2]:
        assert_close(one, few[2], relative=RELATIVE)
    batch, _ = made_of(rows := drawn(listed))
    numbers = torch.cat([SHORT.paths[0][n % SHORT.leaves] for n in range(20)])
    reward = batch.rewards.flatten().repeat_interleave(CUT)[numbers.flatten() >= 0]
    numbers = numbers[numbers >= 0]
    means = torch.zeros(WHOLE.prefixes, dtype=torch.float64)
    for n in range(SHORT.prefixes):
        means[n] = reward[numbers == n].mean()
    rest = reward - means[numbers]
    found = listed.head(means).appraise(rows, *made_of(rows), 0)
    assert found["critic__loss"] == pytest.approx(float(rest.square().mean()) / 2)
    share = float(1 - rest.var() / reward.var())
    assert found["critic__explained_variance"] == pytest.approx(share)
    assert found["critic__gradient_norm"] < 1e-6 < fitted(listed)[2]["critic__gradient_norm"]


def test_minibatches_are_steps_of_their_own_and_moves_beyond_the_limit_earn_nothing(listed):
    once, twice = (fitted(listed, minibatches=n)[0].optimizer for n in (1, 2))
    steps = [float(next(iter(o.state.values()))["step"]) for o in (once, twice)]
    assert steps == [1.0, 2.0]
    values = torch.tensor([1.2, 0.8, -1.2], requires_grad=True)
    value_loss(values, torch.zeros(3), torch.tensor([2.0, 2.0, 2.0]), 1.0).sum().backward()
    assert values.grad.tolist() == [0.0, pytest.approx(-1.2), pytest.approx(-3.2)]


def test_what_pulls_the_trunk_is_the_gradient_of_the_value_loss(listed):
    """Scaled, over all tokens, the head held constant; and added to that of the surrogate."""
    critic, rows, _ = fitted(listed, trunk=70.0, passes=5)
    batch, responses = made_of(rows)
    entry, parts = replace(get("ppo"), aggregation=use(token_sum)), micro_batches(batch, 3)
    found = []
    for beside in (None, critic.pull(rows, batch)):
        accumulate(entry, batch, responses.through(listed.model, beside), parts)
        found.append(gradient_of(listed.model))
    packed = responses.packed(torch.arange(20))
    _, hidden = listed.model(*packed[:4])
    returns = torch.cat([torch.as_tensor(row["returns"]) for row in rows])
    (35 * (critic.of(hidden) - returns).square().mean()).backward()
    assert_close(found[1] - found[0], gradient_of(listed.model), relative=1e-5)
    assert critic.pull(rows, batch) and fitted(listed)[0].pull(rows, batch) is None


def test_values_that_are_not_finite_end_the_run_in_one_line(listed):
    critic = critic_of(listed.model.states, 8)
    critic.head.bias.data.fill_(float("nan"))
    rows = drawn(listed)
    with refused("step 3: a value of the critic is not finite"):
        critic.appraise(rows, *made_of(rows), 2)


# Runs ----------------------------------------------------------------------------------------


class Sevens:
    """Right is a response that begins with a 7."""

    name = "sevens"

    def questions(self, split, seed, start, count):
        places = range(start, start + count)
        return [Question(id=f"{n}", text=f"{n % 3}", answer="7") for n in places]

    def judge(self, pairs, cut):
        words = ["right" if text.startswith("7") else "wrong" for _, text in pairs]
        return [Verdict(word=word, stopped=None, seconds=0.0) for word in words]

    def alike(self, answers):
        return list(range(len(answers)))

    def close(self):
        pass


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make(tmp_path_factory.mktemp("model") / "tiny", width=16, layers=1)


@pytest.fixture
def sevens(monkeypatch):
    monkeypatch.setattr(run, "task_of", lambda name, settings: Sevens())


def of(folder, path, /, **sections) -> config.Config:
    base = {
        "model": {"path": str(folder), "device": "cpu"},
        "recipe": {"name": "ppo"},
        "sampling": {"max_tokens": 3},
        "train": {"steps": 3, "prompts": 8, "group_size": 1, "learning_rate": 0.02},
        "critic": {"kind": "head"},
        "run": {"folder": str(path), "card": False},
    }
    return config.build(sections, config.build(base))


KINDS = {
    "head": {"kind": "head", "passes": 10, "learning_rate": 0.02, "trunk": 0.1, "warmup": 2},
    "model": {"kind": "model", "passes": 2, "learning_rate": 0.005, "clip_value": 0.5},
}


@pytest.mark.parametrize("kind", KINDS)
def test_it_learns_with_a_critic_and_the_store_says_how(kind, folder, sevens, tmp_path):
    told = {"steps": 10, "prompts": 24, "learning_rate": 0.06}
    entry = {"name": "ppo_length_adaptive", "settings": {"alpha": 2.0}} if kind == "model" else {}
    records: list[dict] = []
    made = of(folder, tmp_path / "run", train=told, critic=KINDS[kind], recipe=entry)
    train(run.start(made), records.append)
    warmup = KINDS[kind].get("warmup", 0)
    assert [one["updates"] for one in records] == [max(n + 1 - warmup, 0) for n in range(10)]
    assert records[0]["reward/mean"] < 0.35 < 0.6 < records[-1]["reward/mean"]
    assert all(one["time/critic"] > 0 for one in records)
    store = tmp_path / "run" / "rollouts"
    rows = list(rollouts.read(store, tokenizer=load(folder).fingerprint, only=[6]))
    values, returns = (
        np.concatenate([row[name] for row in rows]) for name in ("values", "returns")
    )
    assert_close(returns, np.repeat([r["reward"] for r in rows], [len(r["returns"]) for r in rows]))
    share = 1 - np.var(returns - values) / np.var(returns)
    assert records[5]["critic/explained_variance"] == pytest.approx(share, abs=1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_a_run_that_stopped_goes_on_bit_for_bit(kind, folder, sevens, tmp_path):
    def going(path, until, *, resume=False, **others):
        def stop(record):
            if record["step"] == until:
                raise InterruptedError

        made = of(folder, path, critic=KINDS[kind], run={"save_every": 1}, **others)
        train(run.start(made, resume=resume), stop)

    going(tmp_path / "whole", 9)
    with pytest.raises(InterruptedError):
        going(tmp_path / "stopped", 2)
    going(tmp_path / "stopped", 9, resume=True)
    about = [
        json.loads((checkpoint.path_of(path / "checkpoints", 3) / "manifest.json").read_text())
        for path in (tmp_path / "whole", tmp_path / "stopped")
    ]
    for one in about:  # the suite's checks of shapes draw from `random`
        one["files"].pop("state.json")
    assert about[0] == about[1]
    assert {"critic", "critic_optimizer"} <= set(about[0]["groups"])
    steps = [one["critic/value"] for one in _metrics(tmp_path / "stopped")]
    assert steps == [one["critic/value"] for one in _metrics(tmp_path / "whole")]


def _metrics(path) -> list[dict]:
    return [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]


def test_every_setting_of_a_file_reaches_the_fit(folder, sevens, tmp_path):
    example = Path(__file__).parents[1] / "docs" / "examples" / "addition_critic.toml"
    written = tmp_path / "run.toml"
    text = example.read_text().replace("lam_value = 1.0", "lam_value = 0.7\nclip_value = 0.4")
    written.write_text(text.replace("gamma = 1.0, lam = 0.95", "gamma = 0.9, lam = 0.6"))
    base = config.read(written)
    changes = {
        "model": {"path": str(folder), "device": "cpu", "autocast": ""},
        "sampling": {"max_tokens": 2, "dtype": ""},
        "train": {"steps": 3, "prompts": 6, "micro_batch": 4},
        "evaluate": {"every": 0},
        "run": {"folder": str(tmp_path / "run"), "card": False},
    }
    records: list[dict] = []
    made = run.start(config.build(changes, base))
    assert made.learner.critic.fitting == Fitting(
        gamma=0.9, lam_value=0.7, passes=2, micro_batch=4, warmup=2, complete=True, clip_value=0.4
    )
    assert made.learner.estimator.settings["lam"] == 0.6
    made.learner.critic.head.bias.data.fill_(0.3)
    train(made, records.append)
    assert [one["updates"] for one in records] == [0, 0, 1]
    assert all(one["critic/completed"] > 0 for one in records)
    rows = list(
        rollouts.read(tmp_path / "run" / "rollouts", tokenizer=load(folder).fingerprint, only=[1])
    )
    cut = [row["reward"] for row in rows if row["finish_reason"] == "length"]
    assert cut == pytest.approx([0.9 * 0.3] * len(cut)), "no verdict, but what the critic expects"


def test_what_does_not_fit_is_one_line(folder, sevens, tmp_path):
    plain = {"kind": ""}
    for words, told in (
        ("needs a critic, and critic.kind is empty", {"critic": plain}),
        ("recipe 'rloo' needs no values", {"recipe": {"name": "rloo"}, "train": {"group_size": 2}}),
        ("critic.path is set; allowed with critic.kind model", {"critic": {"path": "x"}}),
        ("critic.trunk is set", {"critic": {"kind": "model", "trunk": 1.0}}),
        ("critic.warmup is 3; allowed: below train.steps, 3", {"critic": {"warmup": 3}}),
        (
            "critic.passes is set, and critic.kind is empty",
            {"critic": plain | {"passes": 2}, "recipe": {"name": "reinforce"}},
        ),
    ):
        with refused(words):
            recipe.resolve(of(folder, tmp_path, **told))
    other = make(tmp_path / "other", vocab=("a", "b", "7"))
    with refused("another tokenizer"):
        run.start(of(folder, tmp_path / "a", critic={"kind": "model", "path": str(other)}))
    shadow = {"name": "reinforce", "shadow": ["ppo"], "settings": {}}
    assert recipe.gamma(of(folder, tmp_path, recipe=shadow)) == 1.0
    assert recipe.gamma(of(folder, tmp_path, recipe={"settings": {"gamma": 0.9}})) == 0.9
    made = run.start(of(folder, tmp_path / "b"))
    with refused("the checkpoint has another critic, or none"):
        made.learner.critic.unpack({"critic": {}, "critic_optimizer": {}}, None)
