"""Training loops: samplers, optimizers, epochs and passes do what they say, seed by seed."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from windage.estimators.batch import Batch
from windage.estimators.catalogue import get
from windage.estimators.errors import BadInput
from windage.estimators.estimator import Coefficients, coefficients
from windage.toy.ascent import Ascent, Reference, Sampler
from windage.toy.network import Network
from windage.toy.sums import Demonstrator, Sums, generators, whole
from windage.toy.training import Record, Source, fit, gradient, offline, online, rounded

TASK = Sums()
NETWORK = Network(task=TASK, hidden=16)
SGD = Ascent(optimizer="sgd", rate=0.1)


def start(seeds: int = 2) -> Tensor:
    return NETWORK.initial(generators(range(seeds))).double()


def reward(prompts: Tensor, tokens: Tensor) -> Tensor:
    """A start with a small digit is right."""
    return (tokens[..., 0] < 3).double()


def recorded(parameters: Tensor, groups: int, group_size: int, seed: int = 5) -> Record:
    among = generators(range(seed, seed + len(parameters)))
    prompts = TASK.prompts(whole(among, TASK.number, groups))
    return Source(NETWORK, parameters, Sampler(), among).draw(prompts, group_size, reward)


@pytest.mark.parametrize("optimizer", ["sgd", "adam", "adafactor"])
def test_runs_are_reproducible_and_seeds_do_not_mix(optimizer: str) -> None:
    ascent = Ascent(optimizer=optimizer, rate=0.01)

    def run(seeds: list[int]) -> Tensor:
        parameters = NETWORK.initial(generators(seeds)).double()
        among = generators(seeds)
        record = Source(NETWORK, parameters, Sampler(), among).draw(
            TASK.prompts(whole(among, TASK.number, 6)), 2, reward
        )
        walk = offline(NETWORK, parameters, record, get("rloo"), ascent, among, epochs=2, batch=3)
        return list(walk)[-1].parameters

    assert torch.equal(run([0, 1]), run([0, 1]))
    torch.testing.assert_close(run([0, 1, 2])[1:2], run([1]), rtol=1e-9, atol=1e-12)
    assert not torch.equal(run([0])[0], run([1])[0])


def test_an_offline_step_is_plain_ascent_on_the_records_gradient() -> None:
    parameters = start()
    record = recorded(parameters, 4, 3)
    ascent = Ascent(optimizer="sgd", rate=0.5, limit=float("inf"))
    walk = list(
        offline(
            NETWORK, parameters, record, get("rloo"), ascent, generators([0, 1]), epochs=1, batch=4
        )
    )
    found = gradient(NETWORK, parameters, record, get("rloo"))
    torch.testing.assert_close(walk[1].parameters, parameters + 0.5 * found)
    torch.testing.assert_close(walk[1].norm, found.norm(dim=-1))


def test_an_epoch_uses_each_group_once() -> None:
    parameters = start(1)
    record = recorded(parameters, 10, 2)
    seen: list[Tensor] = []

    def rule(batch: Batch) -> Coefficients:
        seen.append(batch.get("behavior_logp").sum(-1).flatten())
        return coefficients(get("rloo"), batch)

    list(offline(NETWORK, parameters, record, rule, SGD, generators([0]), epochs=1, batch=5))
    whole_record = record.behavior_logp.sum(-1).flatten()
    torch.testing.assert_close(torch.cat(seen).sort()[0], whole_record.sort()[0])
    assert not torch.equal(torch.cat(seen), whole_record)


def test_a_minibatch_larger_than_the_record_is_refused() -> None:
    parameters = start(1)
    walk = offline(
        NETWORK, parameters, recorded(parameters, 2, 2), get("rloo"), SGD, generators([0]),
        epochs=1, batch=3,
    )  # fmt: skip
    with pytest.raises(BadInput, match="batch is 3; allowed: at most the record's 2 groups"):
        next(walk)


@pytest.mark.parametrize(
    ("sampler", "ages"),
    [
        (Sampler(), [0, 0, 0, 0, 0, 0]),
        (Sampler(lag=2), [0, 1, 2, 2, 2, 2]),
        (Sampler(every=3), [0, 1, 2, 0, 1, 2]),
        (Sampler(every=2, lag=1), [0, 1, 1, 2, 1, 2]),
        (Sampler(frozen=True), [0, 1, 2, 3, 4, 5]),
    ],
)
def test_the_sampler_is_as_old_as_it_says(sampler: Sampler, ages: list[int]) -> None:
    source = Source(NETWORK, start(1), sampler, generators([0]))
    found = []
    for step in range(6):
        if step:
            source.versions.learn(torch.full_like(start(1), float(step)))
        weights = source.weights()
        version = 0 if torch.equal(weights, start(1)) else int(weights[0, 0])
        found.append(step - version)
    assert found == ages


def test_mixed_versions_draw_one_part_of_the_batch_each() -> None:
    source = Source(NETWORK, start(1), Sampler(mixed=3, lag=2), generators([0]))
    for step in range(1, 6):
        source.versions.learn(torch.full_like(start(1), float(step)))
    assert [float(source.weights(v)[0, 0]) for v in range(3)] == [5.0, 3.0, 1.0]
    prompts = torch.zeros((1, 6, 4), dtype=torch.long)
    assert len(source.draw(prompts, 2, reward)) == 6


def test_rounding_keeps_few_values_a_column_and_leaves_biases_alone() -> None:
    parameters = start(1)
    found = rounded(NETWORK, parameters, 3)
    views, before = NETWORK.unpack(found), NETWORK.unpack(parameters)
    for name in ("A", "U", "W", "O"):
        column = views[name][0].flatten(0, -2)[:, 0]
        assert 2 < len(column.unique()) <= 7
        unit = before[name][0].flatten(0, -2)[:, 0].abs().max() / 3
        assert (
            float((column - before[name][0].flatten(0, -2)[:, 0]).abs().max()) <= unit / 2 + 1e-12
        )
    assert torch.equal(views["b"], before["b"])


def test_a_noisy_sampler_has_one_direction_for_the_whole_run() -> None:
    parameters = start(1)
    source = Source(NETWORK, parameters, Sampler(sigma=0.2), generators([0]))
    first = source.weights() - parameters
    source.versions.learn(parameters + 1)
    torch.testing.assert_close(source.weights() - (parameters + 1), first)
    ratio = (
        NETWORK.unpack(first)["W"].square().mean() / NETWORK.unpack(parameters)["W"].square().mean()
    )
    assert 0.02 < float(ratio) < 0.06


def test_passes_reuse_one_batch_and_decoupled_anchors_are_those_of_its_start() -> None:
    parameters = start(1)
    prompts = TASK.prompts(torch.arange(8)).unsqueeze(0)
    seen: list[Batch] = []

    def rule(batch: Batch) -> Coefficients:
        seen.append(batch)
        return coefficients(get("rloo"), batch)

    list(
        online(
            NETWORK, parameters, prompts, rule, SGD, Sampler(), reward, generators([0]),
            steps=2, batch=4, group_size=2, passes=3,
        )
    )  # fmt: skip
    assert len(seen) == 6
    assert torch.equal(seen[0].rewards, seen[2].rewards)
    assert torch.equal(seen[0].get("behavior_logp"), seen[2].get("behavior_logp"))
    assert not torch.equal(seen[0].get("behavior_logp"), seen[3].get("behavior_logp"))
    fresh = torch.where(seen[0].mask, seen[0].get("logp"), 0.0)
    torch.testing.assert_close(fresh, seen[0].get("behavior_logp"))


def test_a_reference_is_refreshed_when_it_is_due() -> None:
    parameters = start(1)
    prompts = TASK.prompts(torch.arange(8)).unsqueeze(0)

    def gaps(reference: Reference) -> list[float]:
        seen: list[float] = []

        def rule(batch: Batch) -> Coefficients:
            gap = torch.where(batch.mask, batch.get("logp") - batch.get("reference_logp"), 0.0)
            seen.append(float(gap.abs().sum()))
            return coefficients(get("rloo"), batch)

        list(
            online(
                NETWORK, parameters, prompts, rule, SGD, Sampler(), reward, generators([0]),
                steps=5, batch=4, group_size=2, reference=reference,
            )
        )  # fmt: skip
        return seen

    assert all(gap == 0 for gap in gaps(Reference(every=1)))
    assert [gap == 0 for gap in gaps(Reference(every=2))] == [True, False, True, False, True]
    never, ema = gaps(Reference()), gaps(Reference(every=1, share=0.5))
    assert never[0] == 0 and 0 < ema[4] < never[4]


def test_a_fit_comes_near_its_demonstrator() -> None:
    among = generators([0])
    demonstrator = Demonstrator(easy=0.0, hard=0.0, malformed=0.5)

    def draw(number: int) -> tuple[Tensor, Tensor]:
        prompts = TASK.prompts(whole(among, TASK.number, number))
        return prompts, demonstrator.write(TASK, prompts, among)

    base = fit(NETWORK, among, draw, steps=150)
    prompts, _ = draw(500)
    tokens, _ = NETWORK.sample(base, prompts, among)
    assert 0.3 < float(TASK.grade(prompts, tokens).valid.double().mean()) < 0.7


def test_bad_settings_are_named() -> None:
    with pytest.raises(BadInput, match="bits is 1"):
        Sampler(bits=1)
    with pytest.raises(BadInput, match="lag is -1; allowed: 0 or more"):
        Sampler(lag=-1)
    with pytest.raises(BadInput, match="unknown optimizer 'adma'"):
        Ascent(optimizer="adma")
