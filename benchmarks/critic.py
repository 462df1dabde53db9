"""A group's mean or a learned critic as baseline, at equal generation cost: variance and learning.

    .venv/bin/python benchmarks/critic.py               both parts, on models that are made here
    .venv/bin/python benchmarks/critic.py variance      exact, on a transformer that can be listed
    .venv/bin/python benchmarks/critic.py learning      one-digit sums, a model made here; 3 seeds
    .venv/bin/python benchmarks/critic.py learning --model models/SmolLM2-135M-Instruct
                                                        two-digit sums, after `make model`; on a
                                                        quiet machine with two cores, under 20 min
    ... --recipes rloo ppo --steps 3 --responses 8 --seeds 1          a part of it

N responses are N / G groups of G responses, or N prompts with a response each and a critic that
learns along.  Each part replaces its own rows of benchmarks/results/critic.json, those of learning
after every step, so that an interrupted run keeps what it has: `steps` says how far it came.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from exact import machine
from torch import Tensor

from windage.estimators.aggregation import token_sum
from windage.estimators.batch import Batch
from windage.estimators.catalogue import get
from windage.estimators.estimator import Estimator, coefficients
from windage.estimators.member import use
from windage.llm import config as configs
from windage.llm import run as runs
from windage.llm.critic import Critic, Fitting
from windage.llm.models import Policy, load
from windage.llm.passes import Responses
from windage.llm.ranks import ALONE
from windage.llm.rollouts import to_batch
from windage.llm.train import train
from windage.toy.problems import Tree

ROOT = Path(__file__).parents[1]
RESULT = ROOT / "benchmarks" / "results" / "critic.json"
sys.path.append(str(ROOT / "tests"))

# Variance ----------------------------------------------------------------------------------------

TREE = Tree(3, 2, 3)
PROMPTS = [(a, b) for a in range(3) for b in range(3)]
BATCH = 64


@dataclass(frozen=True, eq=False)
class Listed:
    """All responses to all prompts of a small transformer.

    Args:
        chances: of each response to each prompt, `[M L]`.
        rewards: `[M L]`.
        scores: gradient of each token's log-probability by all parameters, `[M L T D]`.
        mask: tokens of each response, `[L T]`.
    """

    chances: Tensor
    rewards: Tensor
    scores: Tensor
    mask: Tensor


def listed(model: Policy) -> Listed:
    """List a model; right is a response whose tokens add up to the prompt's, by thirds."""
    numbers, ids = TREE.paths
    mask, trained = numbers >= 0, list(model.parameters())
    chances, rewards, scores = [], [], []
    for prompt in PROMPTS:
        logits = []
        for ids_before in _prefixes():
            whole = torch.tensor([[*prompt, *ids_before]])
            logits.append(model.model(whole, use_cache=False).logits[0, -1])
        logp = torch.stack(logits).log_softmax(-1)
        table = torch.stack(
            [
                torch.cat(
                    [g.flatten() for g in torch.autograd.grad(one, trained, retain_graph=True)]
                )
                for one in logp.flatten()
            ]
        ).view(*logp.shape, -1)
        here = logp.detach()[numbers.clamp(min=0), ids.clamp(min=0)]
        chances.append(torch.where(mask, here, 0.0).sum(-1).exp())
        found = table[numbers.clamp(min=0), ids.clamp(min=0)]
        scores.append(torch.where(mask.unsqueeze(-1), found, 0.0))
        total = torch.where(mask, ids, 0).sum(-1)
        rewards.append(((total - sum(prompt)) % 3 == 0).double())
    return Listed(torch.stack(chances), torch.stack(rewards), torch.stack(scores), mask)


def _prefixes() -> list[list[int]]:
    from tiny_model import prefixes

    return prefixes(TREE)


@dataclass(frozen=True, eq=False)
class Spread:
    """Mean of the estimate of each prompt `[M D]`, and trace of its covariance `[M]`."""

    mean: Tensor
    within: Tensor

    def of(self, prompts: int, wanted: Tensor) -> dict[str, float]:
        """Squared bias and variance over independent prompts, as shares of the squared gradient."""
        whole = self.mean.mean(0)
        between = (self.mean - whole).square().sum(-1).mean()
        size = wanted.square().sum()
        return {
            "variance": float((self.within.mean() + between) / prompts / size),
            "variance_given_prompts": float(self.within.mean() / prompts / size),
            "squared_bias": float((whole - wanted).square().sum() / size),
        }


def by_group(known: Listed, size: int) -> Spread:
    """Leave-one-out groups of any size, as a statistic of pairs.

        (r_i - r_j) (S_i - S_j) / 2 averaged over pairs;  4 (G - 2) z1 + 2 z2 over G (G - 1)

    with z2 the variance of a pair's term and z1 that of its mean given one of the two.  The group
    mean is (G - 1) / G times it.
    """
    p, r, s = known.chances, known.rewards, known.scores.sum(2)
    mean_r, mean_s = (p * r).sum(1), torch.einsum("ml,mld->md", p, s)
    mean_rs = torch.einsum("ml,ml,mld->md", p, r, s)
    given = r.unsqueeze(2) * s - r.unsqueeze(2) * mean_s.unsqueeze(1)
    given = (given - mean_r[:, None, None] * s + mean_rs.unsqueeze(1)) / 2
    mean = torch.einsum("ml,mld->md", p, given)
    z1 = (p * given.square().sum(-1)).sum(1) - mean.square().sum(-1)
    gaps = (r.unsqueeze(2) - r.unsqueeze(1)).square()
    gram = torch.einsum("mid,mjd->mij", s, s)
    own = gram.diagonal(dim1=1, dim2=2)
    far = own.unsqueeze(2) + own.unsqueeze(1) - 2 * gram
    z2 = torch.einsum("mi,mj,mij->m", p, p, gaps * far) / 4 - mean.square().sum(-1)
    return Spread(mean, (4 * (size - 2) * z1 + 2 * z2) / (size * (size - 1)))


def by_tuples(known: Listed, size: int) -> Spread:
    """The same from the catalogue's coefficients of every group there is; for small groups."""
    leaves = known.chances.shape[1]
    every = torch.cartesian_prod(*[torch.arange(leaves)] * size)
    means, within = [], []
    for p, r, s in zip(known.chances, known.rewards, known.scores, strict=True):
        c = coefficients(get("rloo"), Batch(rewards=r[every], mask=known.mask[every])).own
        estimates = torch.einsum("ngt,ngtd->nd", c * len(every), s[every])
        chance = p[every].prod(1)
        means.append(chance @ estimates)
        within.append(chance @ estimates.square().sum(-1) - means[-1].square().sum())
    return Spread(torch.stack(means), torch.stack(within))


def with_values(known: Listed, values: Tensor, lam: float) -> Spread:
    """One response a prompt, advantages by GAE from values `[M prefixes]`, without a clip."""
    numbers, _ = TREE.paths
    entry: Estimator = replace(get("ppo", lam=lam), corrections=(), aggregation=use(token_sum))
    means, within = [], []
    for p, r, s, v in zip(known.chances, known.rewards, known.scores, values, strict=True):
        before = torch.where(known.mask, v[numbers.clamp(min=0)], 0.0).unsqueeze(1)
        batch = Batch(rewards=r.unsqueeze(1), mask=known.mask.unsqueeze(1), values=before)
        estimates = torch.einsum("lt,ltd->ld", coefficients(entry, batch).own[:, 0] * len(p), s)
        means.append(p @ estimates)
        within.append(p @ estimates.square().sum(-1) - means[-1].square().sum())
    return Spread(torch.stack(means), torch.stack(within))


def exact_values(known: Listed) -> Tensor:
    """Expected reward after each prefix of each prompt."""
    numbers, _ = TREE.paths
    through = torch.stack([(numbers == n).any(-1) for n in range(TREE.prefixes)]).double()
    return (known.chances * known.rewards) @ through.T / (known.chances @ through.T)


def learned(model: Policy, known: Listed, updates: list[int]) -> Iterator[tuple[int, Tensor]]:
    """Values of a head on the model's trunk, after some batches that it learned from."""
    critic = Critic(
        model.states,
        8,
        own=None,
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=0.05, weight_decay=0.0),
        fitting=Fitting(gamma=1.0, passes=4, micro_batch=BATCH),
        ranks=ALONE,
        device=torch.device("cpu"),
        dtype=torch.float64,
    )
    generator = torch.Generator().manual_seed(0)
    for done in range(max(updates) + 1):
        if done in updates:
            yield done, _values(model, critic)
        prompts = torch.randint(len(PROMPTS), (BATCH,), generator=generator)
        leaves = torch.multinomial(known.chances[prompts], 1, generator=generator).squeeze(1)
        pairs = zip(prompts.tolist(), leaves.tolist(), strict=True)
        rows = [_row(known, m, n, number) for number, (m, n) in enumerate(pairs)]
        batch = to_batch(rows, group_size=1)
        responses = Responses(rows, batch, temperature=1.0, device=torch.device("cpu"))
        critic.appraise(rows, batch, responses, done)


@torch.no_grad()
def _values(model: Policy, critic: Critic) -> Tensor:
    found = []
    for prompt in PROMPTS:
        for before in _prefixes():
            ids = torch.tensor([[*prompt, *before]])
            hidden = model.states(ids, torch.ones_like(ids), torch.tensor([ids.shape[1] - 1]))
            found.append(critic.of(hidden))
    return torch.cat(found).view(len(PROMPTS), -1)


def _row(known: Listed, prompt: int, leaf: int, number: int) -> dict[str, Any]:
    ids = TREE.paths[1][leaf][known.mask[leaf]]
    reward = float(known.rewards[prompt, leaf])
    return {
        "group_id": f"{number}",
        "prompt_ids": list(PROMPTS[prompt]),
        "response_ids": ids.numpy(),
        "mask": [True] * len(ids),
        "behavior_logp": [0.0] * len(ids),
        "versions": [0] * len(ids),
        "reward": reward,
        "outcome": reward,
        "finish_reason": "stop",
        "elapsed": 0.0,
        "rejected": None,
    }


def explained(known: Listed, values: Tensor) -> float:
    """Variance of the reward over tokens that values explain, under the policy."""
    numbers, _ = TREE.paths
    weight = (known.chances.unsqueeze(2) * known.mask)[:, known.mask]
    weight = weight / weight.sum()
    v = values[:, numbers[known.mask]]
    r = known.rewards.unsqueeze(2).expand(-1, -1, TREE.horizon)[:, known.mask]

    def variance(x: Tensor) -> float:
        return float((weight * x.square()).sum() - (weight * x).sum().square())

    return 1 - variance(r - v) / variance(r)


def variance() -> list[dict[str, Any]]:
    """Rows of the exact comparison, all at BATCH responses."""
    from tiny_model import tiny

    model = tiny(TREE.vocab, 2 + TREE.horizon, seed=1)
    known = listed(model)
    score = known.scores.sum(2)
    wanted = torch.einsum("ml,ml,mld->md", known.chances, known.rewards, score).mean(0)
    rows: list[dict[str, Any]] = []
    for size in (2, 4, 8, 16):
        told = by_group(known, size).of(BATCH // size, wanted)
        rows.append({"baseline": f"group of {size}", "lam": None, "explained": None} | told)
    exact = exact_values(known)
    zero = torch.zeros_like(exact)
    level = (known.chances * known.rewards).sum(1).mean()
    critics = {
        "none": zero,
        "one number": zero + level,
        "critic, exact at the prompt alone": exact[:, :1].expand_as(exact),
        "critic, exact": exact,
    }
    critics |= {
        f"critic, a head after {done} batches": values
        for done, values in learned(model, known, [1, 10, 100])
    }
    for name, values in critics.items():
        for lam in (1.0, 0.95, 0.0):
            told = with_values(known, values, lam).of(BATCH, wanted)
            rows.append(
                {"baseline": name, "lam": lam, "explained": explained(known, values)} | told
            )
    return [row | {"responses": BATCH} for row in rows]


# Learning ----------------------------------------------------------------------------------------

RECIPES: dict[str, dict[str, dict[str, Any]]] = {
    "rloo": {"recipe": {"name": "rloo"}, "train": {"group_size": 8}},
    "ppo": {
        "recipe": {"name": "ppo", "settings": {"lam": 1.0}},
        "train": {"group_size": 1},
        "critic": {"kind": "head", "passes": 2, "warmup": 2},
    },
    "ppo, lam 0.95": {
        "recipe": {"name": "ppo"},
        "train": {"group_size": 1},
        "critic": {"kind": "head", "passes": 2, "warmup": 2},
    },
    "ppo, a model as critic": {
        "recipe": {"name": "ppo", "settings": {"lam": 1.0}},
        "train": {"group_size": 1},
        "critic": {"kind": "model", "passes": 2, "minibatches": 2, "warmup": 2},
    },
    "reinforce": {"recipe": {"name": "reinforce"}, "train": {"group_size": 1}},
}
SMALL: dict[str, dict[str, Any]] = {
    "task": {"settings": {"digits": 1, "operators": "+"}},
    "sampling": {"max_tokens": 4, "batch": 64},
    "train": {"steps": 30, "learning_rate": 6e-4, "micro_batch": 64, "max_grad_norm": 0.0},
}
LARGE: dict[str, dict[str, Any]] = {
    "model": {"autocast": "bfloat16"},
    "task": {"settings": {"digits": 2, "operators": "+"}},
    "sampling": {"max_tokens": 16, "dtype": "bfloat16", "batch": 64},
    "train": {"steps": 12, "learning_rate": 1e-5, "micro_batch": 32, "max_grad_norm": 0.0},
}
EXPLAINED = "critic/explained_variance"
# Batches of sums that the small model is shown.
SHOWN = 500


def made(folder: Path) -> Path:
    """A small model that was shown sums: the larger the first number, the more often right ones.

    Of ten answers to a sum that begins with a, one and a are right; the others are off by one.
    """
    from tiny_language_model import make

    from windage.llm.models import encode
    from windage.llm.tasks.index import get as task_of

    loaded = load(make(folder, width=64, spread=0.05), device="cpu")
    questions = task_of("arithmetic", SMALL["task"]["settings"]).questions("train", 0, 0, 90)
    rows, asked = [], []
    for question in questions:
        right = int(next(c for c in question.text if c.isdigit())) + 1
        for place in range(10):
            off = 0 if place < right else 1 - 2 * (place % 2)
            text = str(max(int(question.answer) + off, 0))
            answer = loaded.tokenizer(text, add_special_tokens=False)["input_ids"]
            prompt = encode(loaded, question.text)
            rows.append(torch.tensor([*prompt, *answer, loaded.stop_ids[0]]))
            asked.append(len(prompt))
    ids = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
    here = torch.arange(ids.shape[1])
    ends, starts = torch.tensor([len(r) for r in rows]), torch.tensor(asked)
    places = (here >= starts.unsqueeze(1)) & (here < ends.unsqueeze(1))
    attention = (here < ends.unsqueeze(1)).long()
    optimizer = torch.optim.AdamW(loaded.policy.parameters(), lr=4e-3)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.05, SHOWN)
    for _ in range(SHOWN):
        some = torch.randint(len(rows), (128,))
        logits = loaded.policy.model(input_ids=ids[some], attention_mask=attention[some]).logits
        loss = torch.nn.functional.cross_entropy(
            logits[:, :-1][places[some][:, 1:]], ids[some][places[some]]
        )
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
    loaded.policy.model.save_pretrained(folder)
    return folder


def learning(
    model: Path,
    told: dict[str, Any],
    names: list[str],
    *,
    steps: int,
    responses: int,
    seeds: int,
    rate: float,
    tell: Callable[[dict[str, Any]], None],
) -> None:
    """Train with every recipe.

    Args:
        responses: of a step.
        rate: learning rate of a critic with a trunk of its own.
        tell: is given a recipe's row after every step, of what was learned until there.
    """
    for name in names:
        found: list[list[dict[str, Any]]] = []
        for seed in range(seeds):
            base = configs.build(RECIPES[name], configs.build(told))
            last = steps or base.train.steps
            found.append([])

            def keep_step(
                record: dict[str, Any], name: str = name, found: Any = found, last: int = last
            ) -> None:
                found[-1].append(record)
                about = {"model": model.name, "recipe": name, "steps": len(found[-1])}
                about["responses"] = responses * last  # of a run that reaches its end
                tell(about | learned_so_far(found))

            with tempfile.TemporaryDirectory() as folder:
                changes: dict[str, Any] = {
                    "model": {"path": str(model), "device": "cpu"},
                    "train": {"steps": last, "prompts": responses // base.train.group_size},
                    "critic": {"learning_rate": rate if base.critic.kind == "model" else 0.0},
                    "run": {"folder": f"{folder}/run", "seed": seed, "card": False},
                }
                train(runs.start(configs.build(changes, base)), keep_step)
            rewards = [record["reward/mean"] for record in found[-1]]
            print(f"{name} seed {seed}: {rewards[0]:.3f} -> {rewards[-1]:.3f}", file=sys.stderr)


def learned_so_far(found: list[list[dict[str, Any]]]) -> dict[str, Any]:
    """Mean reward over the last quarter of the steps, and over all, by seed.

    Args:
        found: records of each seed's run, the last of which may go on.
    """
    rewards = [[record["reward/mean"] for record in records] for records in found]
    late = [_mean(one[-max(len(one) // 4, 1) :]) for one in rewards]
    told = [[r[EXPLAINED] for r in records if EXPLAINED in r] for records in found]
    return {
        "first": rewards[-1][0],
        "last_quarter": late,
        "all_steps": [_mean(one) for one in rewards],
        "last_quarter_mean": _mean(late),
        "half_width": _half_width(late),
        "explained_variance": [_mean(one[-5:]) if one else None for one in told],
        "seconds_a_run": _mean([math.fsum(r["time/step"] for r in records) for records in found]),
    }


def _mean(values: list[float]) -> float:
    return math.fsum(values) / len(values)


def _half_width(values: list[float]) -> float | None:
    """Of a 95 % interval for the mean over seeds; None of one seed."""
    if len(values) < 2:
        return None
    from scipy.stats import t

    spread = math.sqrt(math.fsum((v - _mean(values)) ** 2 for v in values) / (len(values) - 1))
    return float(t.ppf(0.975, len(values) - 1)) * spread / math.sqrt(len(values))


# Results -----------------------------------------------------------------------------------------


def keep(result: Path, part: str, rows: list[dict[str, Any]], *keys: str) -> None:
    """Replace rows of a part by those of the same keys; the file is whole at any time."""
    known = json.loads(result.read_text()) if result.exists() else {}
    new = {tuple(row[key] for key in keys) for row in rows}
    old = [row for row in known.get(part, []) if tuple(row[key] for key in keys) not in new]
    known |= {"machine": machine(), part: [*old, *(_rounded(row) for row in rows)]}
    beside = result.with_suffix(".new")
    beside.write_text(json.dumps(known, indent=1) + "\n")
    beside.replace(result)


def _rounded(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _rounded(one) for key, one in value.items()}
    if isinstance(value, list):
        return [_rounded(one) for one in value]
    return float(f"{value:.5g}") if isinstance(value, float) else value


def main() -> None:
    """Measure what the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("part", nargs="?", choices=["variance", "learning"], help="default: both")
    parser.add_argument("--model", type=Path)
    parser.add_argument("--recipes", nargs="+", choices=list(RECIPES), default=list(RECIPES))
    parser.add_argument("--steps", type=int, default=0)
    parser.add_argument("--responses", type=int, default=BATCH, help="of a step")
    parser.add_argument("--seeds", type=int, default=0)
    parser.add_argument("--out", type=Path, default=RESULT, metavar="FILE", help="kept there")
    asked = parser.parse_args()
    torch.set_num_threads(1 if asked.model is None else torch.get_num_threads())
    if asked.part != "learning":
        keep(asked.out, "variance", variance(), "baseline", "lam")
    if asked.part == "variance":
        return
    with tempfile.TemporaryDirectory() as folder:
        torch.manual_seed(0)
        told = SMALL if asked.model is None else LARGE
        model = made(Path(folder) / "small") if asked.model is None else asked.model
        seeds = asked.seeds or (3 if asked.model is None else 1)
        rate = 5e-4 if asked.model is None else 1e-5
        learning(
            model,
            told,
            asked.recipes,
            steps=asked.steps,
            responses=asked.responses,
            seeds=seeds,
            rate=rate,
            tell=lambda row: keep(asked.out, "learning", [row], "model", "recipe", "responses"),
        )


if __name__ == "__main__":
    main()
