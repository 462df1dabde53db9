"""Shadow recipes: their figures against gradients by explicit logits, and what is refused."""

import math
from dataclasses import replace

import pytest
import torch
from checks import assert_apart, assert_close, refused

from windage.estimators.batch import Batch
from windage.estimators.catalogue import CATALOGUE, get
from windage.estimators.diagnostics import effective_log_ratio
from windage.estimators.errors import BadInput
from windage.estimators.estimator import Coefficients, coefficients, surrogate
from windage.estimators.metrics import measure
from windage.llm import shadow
from windage.llm.shadow import carried, shadows

V = 5
PLAIN = ("reinforce", "grpo", "cispo", "gspo", "topr", "token_is", "m2po", "icepop", "kimi")
HEADED = ("centered", "centered_tis", "centered_mask", "starting_point")


def world(
    seed: int = 0, groups: int = 4, head: int = 3
) -> tuple[Batch, torch.Tensor, torch.Tensor]:
    """A batch, the logits that it comes from, and its tokens."""
    g = torch.Generator().manual_seed(seed)
    shape = (groups, 3, 4)
    logits = torch.randn(*shape, V, generator=g, dtype=torch.float64, requires_grad=True)
    behavior = logits.detach() + 0.7 * torch.randn(*shape, V, generator=g, dtype=torch.float64)
    mask = torch.rand(*shape, generator=g) > 0.2
    p, q = logits.log_softmax(-1), behavior.log_softmax(-1)
    ids = torch.distributions.Categorical(logits=q).sample()
    ids = torch.where(torch.rand(*shape, generator=g) > 0.5, ids, 0)
    head_ids = q.topk(head).indices
    batch = Batch(
        rewards=torch.randint(0, 2, shape[:2], generator=g).double(),
        mask=mask,
        logp=p.gather(-1, ids.unsqueeze(-1)).squeeze(-1).detach(),
        behavior_logp=q.gather(-1, ids.unsqueeze(-1)).squeeze(-1),
        probability_square=p.exp().square().sum(-1).detach(),
        head_ids=head_ids,
        head_behavior_logp=q.gather(-1, head_ids),
        head_logp=p.gather(-1, head_ids).detach(),
        versions=torch.zeros(shape, dtype=torch.long),
        current_version=1,
    ).validate()
    return batch, logits, ids


def entry(name: str):
    return get(name, length=4) if "length" in get(name).settings else get(name)


def gradient(made: Coefficients, batch: Batch, logits: torch.Tensor, ids: torch.Tensor):
    """The update by the logits, from autograd."""
    p = logits.log_softmax(-1)
    loss = surrogate(made.own, p.gather(-1, ids.unsqueeze(-1)).squeeze(-1))
    if made.head is not None:
        loss = loss + surrogate(made.head, p.gather(-1, batch.head_ids))
    (found,) = torch.autograd.grad(-loss, logits)
    return found


def halves(update: torch.Tensor, ids: torch.Tensor, mask: torch.Tensor) -> float:
    """Agreement of alternate groups, coordinate by coordinate, in a loop."""
    b = torch.zeros(2, V, dtype=torch.float64)
    for p, g, t in torch.nonzero(mask).tolist():
        y = int(ids[p, g, t])
        b[p % 2, y] += update[p, g, t, y]
    signal = b[0] @ b[1]
    return float(signal / (b.square().sum() / 2 - signal))


@pytest.mark.parametrize("real", ["grpo", "starting_point", "rloo", "centered_tis"])
def test_figures_are_those_of_explicit_gradients(real):
    batch, logits, ids = world()
    asked = {name: entry(name) for name in (*PLAIN, *HEADED)}
    own = coefficients(entry(real), batch)
    found = shadows(asked, batch, own, ids=ids)
    d = gradient(own, batch, logits, ids)
    for name, estimator in asked.items():
        e = gradient(coefficients(estimator, batch), batch, logits, ids)
        assert_close(found[f"shadow/{name}/cosine"], (d * e).sum() / d.norm() / e.norm())
        assert_close(found[f"shadow/{name}/norm_ratio"], e.norm() / d.norm())
        assert_close(
            found[f"shadow/{name}/signal_to_noise"], halves(e, ids, batch.mask), relative=1e-8
        )
    assert_close(found["shadow/real/signal_to_noise"], halves(d, ids, batch.mask), relative=1e-8)


def test_without_the_head_part_the_cosine_is_another(monkeypatch):
    batch, logits, ids = world()
    own = coefficients(entry("starting_point"), batch)
    d = gradient(own, batch, logits, ids)
    e = gradient(coefficients(get("grpo"), batch), batch, logits, ids)
    wanted = (d * e).sum() / d.norm() / e.norm()
    whole = shadow.direction
    monkeypatch.setattr(
        shadow, "direction", lambda made, b, at: whole(replace(made, head=None), b, at)
    )
    found = shadows({"grpo": get("grpo")}, batch, own, ids=ids)
    assert_apart(found["shadow/grpo/cosine"], wanted, at_least=1e-3)


@pytest.mark.parametrize("name", [n for n, e in CATALOGUE.items() if "components" not in e.needs])
def test_every_entry_can_be_a_shadow(name):
    """Where the run has what it needs: a critic's values, or another policy's log-probabilities."""
    batch, _, ids = world()
    g = torch.Generator().manual_seed(1)
    others = {
        field: torch.where(batch.mask, batch.logp + 0.1 * torch.randn(4, 3, 4, generator=g), 0.0)
        for field in ("proximal_logp", "reference_logp", "values")
    }
    truncated, elapsed = torch.zeros(4, 3, dtype=torch.bool), torch.ones(4, 3).double()
    batch = replace(batch, **others, truncated=truncated, elapsed=elapsed).validate()
    fields = (*others, "versions", "current_version", "truncated", "elapsed")
    fields += ("head_ids", "head_behavior_logp", "head_logp")
    asked = carried({name: entry(name)}, fields=fields, length=4)
    real = coefficients(get("reinforce"), batch)
    found = shadows(asked, batch, real, ids=ids)
    assert found[f"shadow/{name}/weight"] >= 0 and all(map(math.isfinite, found.values()))


def test_its_own_shadow_is_itself():
    batch, _, ids = world()
    own = coefficients(get("cispo"), batch)
    found = shadows({"cispo": get("cispo"), "half": get("cispo")}, batch, own, ids=ids)
    assert_close(found["shadow/cispo/cosine"], 1.0)
    assert_close(found["shadow/cispo/norm_ratio"], 1.0)
    assert found["shadow/cispo/signal_to_noise"] == found["shadow/real/signal_to_noise"]
    assert {k.replace("/half/", "/cispo/"): v for k, v in found.items()}.items() <= found.items()


def test_clipped_mass_is_that_of_the_metrics():
    batch, _, _ = world()
    batch = replace(batch, head_ids=None, head_logp=None, head_behavior_logp=None)
    own = coefficients(get("rloo"), batch)
    asked = {name: get(name) for name in ("grpo", "cispo", "topr", "gspo", "rloo")}
    found = shadows(asked, batch, own)
    assert not [k for k in found if k.endswith("signal_to_noise")]
    for name, estimator in asked.items():
        made = coefficients(estimator, batch)
        effective = effective_log_ratio(estimator, batch, made.terms.advantages)
        said = measure(batch, coefficients=made, effective=effective)
        both = said["clip/mass_positive"] + said["clip/mass_negative"]
        assert_close(found[f"shadow/{name}/clipped_mass"], both)
        assert_close(found[f"shadow/{name}/weight"], said["weight/mean"])
    assert found["shadow/rloo/clipped_mass"] == 0 < found["shadow/grpo/clipped_mass"]


def test_a_ratio_that_overflows_is_counted_and_nothing_else_is_said():
    batch, _, ids = world()
    far = torch.where(batch.mask, batch.behavior_logp - 1e4, 0.0)
    batch = replace(batch, behavior_logp=far)
    own = coefficients(get("reinforce"), batch)
    asked = {name: get(name) for name in ("trajectory_is", "topr")}
    found = shadows(asked, batch, own, ids=ids)
    assert {k for k in found if "trajectory_is" in k} == {"shadow/trajectory_is/overflow"}
    assert "shadow/topr/cosine" in found and all(math.isfinite(v) for v in found.values())


def test_no_update_has_no_direction():
    batch, _, ids = world()
    batch = replace(batch, rewards=torch.ones_like(batch.rewards))
    asked = {name: get(name) for name in ("grpo", "reinforce")}
    found = shadows(asked, batch, coefficients(get("rloo"), batch), ids=ids)
    assert not [k for k in found if k.endswith(("cosine", "norm_ratio"))]
    assert found["shadow/grpo/weight"] > 0


@pytest.mark.parametrize(
    ("name", "need"),
    [
        ("starting_point", "head"),
        ("ppo", "values"),
        ("decoupled_ppo", "proximal_logp"),
        ("grpo_k3", "reference_logp"),
        ("gdpo", "components"),
    ],
)
def test_what_a_run_cannot_carry_is_refused_when_it_is_configured(name, need):
    with refused(f"'{name}'", need, "allowed", error=BadInput):
        carried({name: get(name)}, fields=("versions", "current_version"), length=4)


def test_open_settings_are_filled_or_refused():
    found = carried({"dr_grpo": get("dr_grpo")}, fields=(), length=64)
    assert found["dr_grpo"].settings["length"] == 64
    assert (
        carried({"g": get("dr_grpo", length=8)}, fields=(), length=64)["g"].settings["length"] == 8
    )
    with refused("dr_grpo", "length", error=BadInput):
        carried({"dr_grpo": get("dr_grpo")}, fields=())


def test_every_figure_is_documented():
    batch, _, ids = world()
    own = coefficients(get("grpo"), batch)
    found = shadows({"cispo": get("cispo"), "gspo": get("gspo")}, batch, own, ids=ids)
    names = {row[0] for row in shadow.FIGURES}
    assert {k.rsplit("/", 1)[1] for k in found} | {"overflow"} == names
    assert len(names) == len(shadow.FIGURES)
