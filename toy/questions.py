"""Questions with a softmax over their answers and parameters that all of them share.

    logits[q, a] = base[q, a] + features[q, a] . w

Answers are one-token responses.  Learning from recorded answers is full-batch ascent on the
empirical objective; what is learned is read off the exact masses of right and invalid answers.
A leading axis S holds seeds, each drawn from its own numpy generator; parameters may carry further
axes in front of it (settings that share the data).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any, final

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from windage.estimators.batch import Batch
from windage.estimators.estimator import Estimator, coefficients
from windage.toy.exact.walk import pull_back
from windage.toy.learning import Update

RIGHT, WRONG, INVALID = 3, 27, 30
WIDTH = 32


@final
@dataclass(frozen=True, kw_only=True, eq=False)
class Questions:
    """A softmax policy over the answers of each question.

    Args:
        base: log-probabilities at w = 0.
        features: of each answer.
        right: answers that earn +1; all others earn -1.
        invalid: answers that have no valid form.
    """

    base: Float[Tensor, "S Q A"]
    features: Float[Tensor, "S Q A D"]
    right: Bool[Tensor, "S Q A"]
    invalid: Bool[Tensor, "S Q A"]

    def select(self, questions: Any) -> Questions:
        """The same policy on some of the questions."""
        return Questions(
            base=self.base[:, questions],
            features=self.features[:, questions].contiguous(),
            right=self.right[:, questions],
            invalid=self.invalid[:, questions],
        )

    @property
    def start(self) -> Float[Tensor, "S D"]:
        """Parameters of the base policy."""
        return self.features.new_zeros((self.features.shape[0], self.features.shape[-1]))

    def logp(self, w: Float[Tensor, "*batch S D"]) -> Float[Tensor, "*batch S Q A"]:
        """Log-probabilities of every answer."""
        columns = w.flatten(0, -3) if w.dim() > 2 else w.unsqueeze(0)
        along = self.features.flatten(1, 2) @ columns.permute(1, 2, 0)
        shape = (*w.shape[:-1], *self.base.shape[1:])
        return (self.base + along.permute(2, 0, 1).reshape(shape)).log_softmax(-1)

    def pull_back(self, scores: Float[Tensor, "*batch S Q A"]) -> Float[Tensor, "*batch S D"]:
        """A gradient by the logits of every answer, as one by w."""
        rows = scores.reshape(-1, len(self.base), self.features[0, ..., 0].numel())
        along = rows.transpose(0, 1) @ self.features.flatten(1, 2)
        return along.transpose(0, 1).reshape(*scores.shape[:-2], -1)

    def mass(
        self, w: Float[Tensor, "*batch S D"], answers: Bool[Tensor, "S Q A"]
    ) -> Float[Tensor, "*batch S"]:
        """Mean over questions of the probability of a set of answers."""
        return (self.logp(w).exp() * answers).sum(-1).mean(-1)


@final
@dataclass(frozen=True, kw_only=True, eq=False)
class Answers:
    """Answers drawn once from a policy, with the probability recorded when they were drawn.

    Args:
        index: which answer.
        behavior_logp: under the policy that drew it.
        rewards: of each, with leading axes where settings change them.
    """

    index: Int[Tensor, "S Q N"]
    behavior_logp: Float[Tensor, "S Q N"]
    rewards: Float[Tensor, "*batch S Q N"]


def recorded_update(questions: Questions, answers: Answers, estimator: Estimator) -> Update:
    """Update of an estimator on recorded answers: sum of coefficients times scores, by w.

    The whole record is one batch: a prompt a question, a one-token response an answer.
    """
    return _update(questions, answers, lambda batch: coefficients(estimator, batch).own[..., 0])


def preference_update(questions: Questions, answers: Answers, *, beta: float = 0.1) -> Update:
    """Update of direct preference optimization on recorded answers, for comparison.

        loss = -mean over pairs of log sigmoid(beta (x[right] - x[wrong])),   x = log pi - log mu

    over all pairs of a right and another answer of the same question.  It is a loss on pairs, not
    an estimator of the policy gradient.

    Args:
        beta: strength of the pull to the policy that drew the answers.

    References:
        Rafailov et al., 2023, arXiv:2305.18290.
    """

    def pairs(batch: Batch) -> Tensor:
        ratio = (batch.logp - batch.get("behavior_logp"))[..., 0]
        good = batch.rewards > 0
        paired = good.unsqueeze(-1) & ~good.unsqueeze(-2)
        margin = beta * (ratio.unsqueeze(-1) - ratio.unsqueeze(-2))
        pull = torch.where(paired, beta * torch.sigmoid(-margin), 0.0)
        pull = pull / paired.sum((-3, -2, -1), keepdim=True).clamp(min=1)
        return pull.sum(-1) - pull.sum(-2)

    return _update(questions, answers, pairs)


def _update(questions: Questions, answers: Answers, own: Any) -> Update:
    mask = torch.ones((*answers.rewards.shape, 1), dtype=torch.bool)
    behavior = answers.behavior_logp.unsqueeze(-1)

    def update(w: Tensor, step: int) -> Tensor:
        logp = questions.logp(w)
        index = answers.index.expand(*logp.shape[:-1], -1)
        batch = Batch(
            rewards=answers.rewards.expand(index.shape),
            mask=mask.expand(*index.shape, 1),
            logp=logp.gather(-1, index).unsqueeze(-1),
            behavior_logp=behavior.expand(*index.shape, 1),
        )
        visits = torch.zeros_like(logp).scatter_add(-1, index, own(batch))
        return questions.pull_back(pull_back(visits, logp.exp()))

    return update


def draw_answers(
    questions: Questions, w: Tensor, count: int, generators: Iterable[np.random.Generator]
) -> Answers:
    """Draw answers of every question from the policy at w, seed by seed, question by question."""
    logp = questions.logp(w)
    index = torch.stack(
        [
            torch.from_numpy(np.stack([rng.choice(len(q), count, p=q) for q in rows.exp().numpy()]))
            for rows, rng in zip(logp, generators, strict=True)
        ]
    )
    right = questions.right.gather(-1, index)
    return Answers(
        index=index,
        behavior_logp=logp.gather(-1, index),
        rewards=torch.where(right, 1.0, -1.0).to(logp.dtype),
    )


def rewarded(answers: Answers, rewards: Tensor) -> Answers:
    """The same answers with other rewards."""
    return replace(answers, rewards=rewards)


def _stacked(parts: list[tuple[np.ndarray, ...]]) -> list[Tensor]:
    return [torch.from_numpy(np.stack(column)) for column in zip(*parts, strict=True)]


def _probe(rng: np.random.Generator, invalid: float, questions: int) -> tuple[np.ndarray, ...]:
    """Base log-probabilities and features of one seed, drawn in a fixed order."""
    answers = RIGHT + WRONG + INVALID
    kind = np.repeat([0, 1, 2], [RIGHT, WRONG, INVALID])
    means = rng.standard_normal((3, WIDTH)) / np.sqrt(WIDTH)
    noise = rng.standard_normal((questions, answers, WIDTH)) / np.sqrt(WIDTH)
    logit = np.log(0.3 / 0.7) + rng.standard_normal(questions)
    weights = rng.exponential(size=(questions, answers))
    right = (1 - invalid) / (1 + np.exp(-logit))
    masses = np.stack([right, 1 - invalid - right, np.full(questions, invalid)], 1)
    totals = np.stack([weights[:, kind == k].sum(1) for k in range(3)], 1)
    return np.log(weights * (masses / totals)[:, kind]), 0.3 * means[kind] + noise


def probe(
    invalid: float, generators: Iterable[np.random.Generator], *, questions: int = 60
) -> Questions:
    """Questions with 3 right, 27 wrong and 30 invalid answers whose features cluster by kind.

    The mass of the right answers of a question is (1 - invalid) sigmoid(logit 0.3 + N(0, 1)).

    Args:
        invalid: mass of the invalid answers.
        generators: one a seed; drawn from: means, noise, difficulties, weights inside a kind.
        questions: the first half of them is meant for training.
    """
    base, features = _stacked([_probe(rng, invalid, questions) for rng in generators])
    kind = torch.repeat_interleave(torch.arange(3), torch.tensor([RIGHT, WRONG, INVALID]))
    return Questions(
        base=base,
        features=features,
        right=(kind == 0).expand(base.shape),
        invalid=(kind == 2).expand(base.shape),
    )


def judge(generators: Iterable[np.random.Generator], *, items: int = 400) -> Questions:
    """A judge with three answers (yes, no, invalid) and a linear head on 10 normal features.

    The right answer is the sign of a random projection; the base answers .33, .33 and .34.  The
    head has an offset for each answer.

    Args:
        generators: one a seed; drawn from: the projection, then the items.
        items: the first half of them is meant for training.
    """
    width = 10
    features, signs = [], []
    for rng in generators:
        projection = rng.standard_normal(width)
        drawn = rng.standard_normal((items, width))
        features.append(np.concatenate([drawn, np.ones((items, 1))], 1))
        signs.append(drawn @ projection > 0)
    x, yes = torch.from_numpy(np.stack(features)), torch.from_numpy(np.stack(signs))
    right = torch.stack([yes, ~yes, torch.zeros_like(yes)], -1)
    head = torch.einsum("ab,sqd->sqabd", torch.eye(3, dtype=x.dtype), x).flatten(-2)
    return Questions(
        base=torch.tensor([0.33, 0.33, 0.34], dtype=x.dtype).log().expand(right.shape),
        features=head,
        right=right,
        invalid=torch.tensor([False, False, True]).expand(right.shape),
    )
