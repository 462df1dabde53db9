"""Numbers that are not finite, planted in a training run: what the guard must make of them."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import torch
from training_harness import configuration

from windage.llm import checkpoint, draw, journal, passes, run
from windage.llm.train import train

PLACES = ("reward", "behavior_logp", "logp", "gradient_norm")
BAD = (math.nan, math.inf, -math.inf)


class Planted:
    """Puts numbers that are not finite into a run, one place a step.

    Args:
        places: of each step; empty: none.
        values: of each step.
        patch: has `setattr`.
    """

    def __init__(self, places, values, patch) -> None:
        self.places, self.values, self.patch, self.step = places, values, patch, 0
        self.rewarded, self.passed = draw.reward, passes.Responses.through

    @property
    def here(self):
        return self.places[self.step] if self.step < len(self.places) else ""

    def into(self, ready) -> None:
        """Everywhere it may have to go; the second response of a step is at fault."""
        rewards, sampled = [0], ready.desk.sampler.sample

        def reward(verdict, scale):
            rewards[0] += 1
            bad = self.here == "reward" and rewards[0] % 6 == 2
            return self.values[self.step] if bad else self.rewarded(verdict, scale)

        def sample(requests, sampling, between=None):
            groups = sampled(requests, sampling, between)
            if self.here == "behavior_logp":
                logp = groups[0][1].behavior_logp.clone()
                logp[0] = self.values[self.step]
                groups[0][1] = replace(groups[0][1], behavior_logp=logp)
            return groups

        def through(responses, policy, *others):
            forward, spoil = self.passed(responses, policy, *others), self.here == "logp"

            def passed(numbers):
                found = forward(numbers)
                if spoil and 1 in numbers.tolist():
                    value = self.values[self.step]
                    spoiled = torch.zeros_like(found.logp)
                    spoiled[numbers.tolist().index(1), 0] = value
                    return replace(found, logp=found.logp + spoiled)
                return found

            return passed

        def hook(gradient):
            spoil = self.here == "gradient_norm"
            return torch.full_like(gradient, self.values[self.step]) if spoil else gradient

        self.patch.setattr(draw, "reward", reward)
        self.patch.setattr(ready.desk.sampler, "sample", sample)
        self.patch.setattr(passes.Responses, "through", through)
        next(p for p in ready.learner.trained).register_hook(hook)


def settings(steps: int, policy: str, limit: int = 1000) -> dict:
    return {
        "recipe": {"name": "reinforce", "settings": {}},
        "reference": {"refresh": "never"},
        "evaluate": {"every": 0},
        "run": {"save_every": 0},
        "train": {
            "passes": 1,
            "minibatches": 1,
            "steps": steps,
            "on_nonfinite": policy,
            "nonfinite_in_a_row": limit,
            "schedule": "constant",
            "warmup": 0,
        },
    }


def assert_guarded(model, policy, places, patch):
    """Weights stay bit for bit where an update is skipped; all is counted and written out."""
    values = [BAD[n % 3] for n in range(len(places))]
    config = configuration("synchronous", model, **settings(len(places), policy))
    ready = run.start(config)
    plant = Planted(places, values, patch)
    plant.into(ready)
    weights = dict(ready.loaded.policy.named_parameters())
    before = {name: one.detach().clone() for name, one in weights.items()}
    moved = []

    def tell(record):
        for one in weights.values():
            assert torch.isfinite(one).all()
        moved.append(any(not torch.equal(before[name], one) for name, one in weights.items()))
        before.update({name: one.detach().clone() for name, one in weights.items()})
        plant.step += 1

    train(ready, tell)
    aside = {"set aside": {"", "reward", "behavior_logp", "logp"}, "skip": {""}}[policy]
    assert moved == [place in aside for place in places]
    count = ready.learner.count
    assert count.skipped == moved.count(False)
    assert count.set_aside == sum(m and place != "" for m, place in zip(moved, places, strict=True))
    assert ready.learner.updates == moved.count(True)
    kept = journal.read(Path("run/nonfinite.jsonl"))
    for step, (place, value) in enumerate(zip(places, values, strict=True), 1):
        mine = [one for one in kept if one["step"] == step]
        if place in ("", "gradient_norm"):
            assert len(mine) == (6 if place else 0)
        else:
            (one,) = mine
            assert (one["what"], one["value"]) == (place, str(value))
            assert one["sample_id"].endswith(":1")
    last = checkpoint.load(checkpoint.latest(Path("run/checkpoints")))
    assert last.state["guard"] == vars(count)
