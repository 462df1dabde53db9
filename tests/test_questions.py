"""Questions with shared parameters: draws, updates against autograd, leading axes."""

import numpy as np
import pytest
import torch

from windage.estimators.catalogue import get
from windage.toy import questions as module
from windage.toy.learning import marks, path
from windage.toy.questions import (
    Answers,
    draw_answers,
    judge,
    preference_update,
    probe,
    recorded_update,
    rewarded,
)


def generators(*seeds):
    return [np.random.default_rng(seed) for seed in seeds]


def study(*seeds, invalid=0.1):
    rngs = generators(*seeds)
    asked = probe(invalid, rngs, questions=6)
    return asked, draw_answers(asked, asked.start, 8, rngs)


def elsewhere(asked):
    rng = torch.Generator().manual_seed(3)
    return torch.randn(asked.start.shape, generator=rng, dtype=torch.float64)


def test_masses_are_as_defined():
    asked, answers = study(0, 1, invalid=0.1)
    p = asked.base.exp()
    torch.testing.assert_close(p.sum(-1), torch.ones(2, 6, dtype=torch.float64))
    torch.testing.assert_close(
        (p * asked.invalid).sum(-1), torch.full((2, 6), 0.1, dtype=torch.float64)
    )
    assert (asked.right.sum(-1) == 3).all() and not (asked.right & asked.invalid).any()
    assert set(answers.rewards.flatten().tolist()) == {1.0, -1.0}
    right = asked.right.gather(-1, answers.index)
    assert torch.equal(right, answers.rewards > 0)
    torch.testing.assert_close(answers.behavior_logp, asked.base.gather(-1, answers.index))


def test_a_run_is_a_function_of_its_configuration_and_seed():
    places = []
    for _ in range(2):
        asked, answers = study(5, 6)
        walk = path(asked.start, recorded_update(asked, answers, get("topr")), steps=15, rate=2.0)
        places.append(marks(walk, [15])[15])
    assert torch.equal(*places)
    other, drawn = study(5, 7)
    walk = path(other.start, recorded_update(other, drawn, get("topr")), steps=15, rate=2.0)
    assert not torch.equal(marks(walk, [15])[15], places[0])


def test_a_seed_does_not_depend_on_the_others():
    asked, answers = study(5, 6)
    alone, drawn = study(6)
    assert torch.equal(asked.base[1:], alone.base)
    assert torch.equal(answers.index[1:], drawn.index)


@pytest.mark.parametrize("name", ["naive", "topr", "tis_both_signs", "positives_only"])
def test_the_update_is_the_gradient_of_the_surrogate(name):
    asked, answers = study(0, 1)
    w = elsewhere(asked).requires_grad_()
    chosen = asked.logp(w).gather(-1, answers.index)
    ratio = (chosen - answers.behavior_logp).detach().exp()
    limits = dict(get(name).corrections[0].map.settings)
    weight = torch.where(
        answers.rewards > 0,
        ratio.clamp(limits["a_pos"], limits["b_pos"]),
        ratio.clamp(limits["a_neg"], limits["b_neg"]),
    )
    loss = (weight * answers.rewards * chosen).sum((-2, -1)) / answers.index[0].numel()
    (wanted,) = torch.autograd.grad(loss.sum(), w)
    torch.testing.assert_close(recorded_update(asked, answers, get(name))(w.detach(), 0), wanted)


def test_the_preference_update_is_the_gradient_of_its_loss():
    asked, answers = study(0, 1)
    w = elsewhere(asked).requires_grad_()
    ratio = asked.logp(w).gather(-1, answers.index) - answers.behavior_logp
    loss = w.new_zeros(())
    for s in range(2):
        terms = [
            torch.nn.functional.logsigmoid(0.3 * (ratio[s, q, i] - ratio[s, q, j]))
            for q in range(6)
            for i in range(8)
            for j in range(8)
            if answers.rewards[s, q, i] > 0 > answers.rewards[s, q, j]
        ]
        loss = loss + torch.stack(terms).mean()
    (wanted,) = torch.autograd.grad(loss, w)
    torch.testing.assert_close(preference_update(asked, answers, beta=0.3)(w.detach(), 0), wanted)


def test_no_pair_gives_no_update():
    asked, answers = study(0)
    alike = rewarded(answers, torch.ones_like(answers.rewards))
    assert (preference_update(asked, alike)(elsewhere(asked), 0) == 0).all()


def test_settings_in_front_share_the_data():
    asked, answers = study(0, 1)
    scale = torch.tensor([1.0, 0.5, -1.0], dtype=torch.float64)[:, None, None, None]
    together = rewarded(answers, answers.rewards * scale)
    w = torch.stack([elsewhere(asked), asked.start, -elsewhere(asked)])
    found = recorded_update(asked, together, get("topr"))(w, 0)
    for row in range(3):
        one = rewarded(answers, together.rewards[row])
        torch.testing.assert_close(found[row], recorded_update(asked, one, get("topr"))(w[row], 0))


def test_select_keeps_questions_apart():
    asked, _ = study(0)
    part = asked.select(slice(2, 4))
    w = elsewhere(asked)
    torch.testing.assert_close(part.logp(w), asked.logp(w)[:, 2:4])


def test_a_weight_that_carries_its_gradient_would_be_seen(monkeypatch):
    asked, answers = study(0)
    w = elsewhere(asked)
    before = recorded_update(asked, answers, get("topr"))(w, 0)
    real = module.coefficients

    def doubled(estimator, batch):
        found = real(estimator, batch)
        spurious = found.own * batch.logp
        return type(found)(
            own=found.own + spurious, head=None, terms=found.terms, weights=found.weights
        )

    monkeypatch.setattr(module, "coefficients", doubled)
    assert (recorded_update(asked, answers, get("topr"))(w, 0) - before).abs().max() > 1e-3


def test_the_judge_has_one_right_verdict_and_its_base_masses():
    asked = judge(generators(0, 1), items=10)
    assert (asked.right.sum(-1) == 1).all() and not asked.right[..., 2].any()
    torch.testing.assert_close(
        asked.logp(asked.start).exp(),
        torch.tensor([0.33, 0.33, 0.34]).double().expand(2, 10, 3),
    )
    assert asked.features.shape == (2, 10, 3, 33)


def test_answers_follow_the_policy_that_draws_them():
    asked, _ = study(0)
    w = elsewhere(asked)
    drawn = draw_answers(asked, w, 4_000, generators(9))
    assert isinstance(drawn, Answers)
    seen = torch.zeros_like(asked.base).scatter_add(
        -1, drawn.index, torch.ones(1).double().expand(drawn.index.shape)
    )
    # The largest of 360 deviations of frequencies with s.d. at most 0.0079 exceeds 0.04 with
    # probability below 1e-4.
    assert (seen / 4_000 - asked.logp(w).exp()).abs().max() < 0.04
