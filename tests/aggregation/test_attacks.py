"""Attacks: what attackers send, and what a robust mean makes of it."""

import pytest
import torch

import fedbilevel as fb
from fedbilevel.aggregation.attacks import Attack, room
from fedbilevel.algorithms.adasimfbo import AdaSimFBO
from fedbilevel.algorithms.fedbio import FedBiO
from fedbilevel.engines.simulation import Simulation
from fedbilevel.errors import SettingError
from fedbilevel.tasks.quadratic import Quadratic

BUILT = Quadratic(num_clients=10, heterogeneity=0.2).build()
ALIKE = Quadratic(num_clients=10, heterogeneity=0.03).build()
EXACT = {"dtype": torch.float64, "strategy": "loop"}


def first_round(attack, algorithm=None, **more):
    """The state before and after one round, the rows of all clients, and the engine."""
    algorithm = algorithm or FedBiO()
    fed = Simulation(algorithm, *BUILT, **EXACT, attack=attack, **more)
    start = algorithm.init(fed)
    fed.begin(1)
    rows = fed.host.run_phase(
        "local_steps", {"x": start.x, "y": start.y, "u": start.u}, fed.host.data.positions, 1, 1, pays=False
    )
    return start, algorithm.round(fed, start), rows, fed


def expected(kind, strength, away, bad):
    honest = away[~bad]
    if kind == "scaling":
        return strength * away[bad]
    if kind == "sign_flip":
        return -strength * away[bad]
    if kind == "inner_product":
        return (-strength * honest.mean(0)).expand(int(bad.sum()), -1)
    return (honest.mean(0) - strength * honest.var(0, correction=0).sqrt()).expand(int(bad.sum()), -1)


@pytest.mark.parametrize("kind", ["scaling", "sign_flip", "little", "inner_product"])
def test_the_mean_holds_what_attackers_send(kind):
    start, new, rows, fed = first_round(Attack(kind=kind, share=0.3, strength=3.0))
    bad = torch.tensor([number in fed.attackers for number in range(10)])
    assert int(bad.sum()) == 3
    for name in ("x", "y", "u"):
        base = getattr(start, name)
        away = rows[name] - base
        away[bad] = expected(kind, 3.0, away.clone(), bad)
        assert float((getattr(new, name) - base - away.mean(0)).abs().max()) < 1e-13


def test_linear_phases_are_attacked_client_by_client():
    """Engines may take one derivative for all clients, but then nobody has a row to change."""
    algorithm = AdaSimFBO(num_local_steps=1)
    ends = []
    for attack in (None, Attack(kind="sign_flip", share=0.3)):
        fed = Simulation(algorithm, *BUILT, **EXACT, attack=attack)
        start = algorithm.init(fed)
        fed.begin(1)
        ends.append(algorithm.round(fed, start).m_y)
    assert float(ends[0] @ ends[1]) < 0


def test_the_room_of_little_is_enough_is_that_of_its_paper():
    """n = 50 with 12 corrupted workers: s = 14, and the least integer for Phi(z) < 24/38."""
    assert room(50, 12) == pytest.approx(0.3360, abs=1e-3)
    assert room(10, 2) == 0.0


def test_attackers_depend_on_the_seed_alone():
    attack = Attack(kind="scaling", share=0.25)
    assert attack.attackers(20, 3) == attack.attackers(20, 3)
    assert attack.attackers(20, 3) != attack.attackers(20, 4)
    assert len(attack.attackers(20, 3)) == 5
    assert Attack(share=0.5).attackers(20, 3) == []


def test_no_attack_is_no_change():
    runs = [fb.solve(*BUILT, "fedbio", num_rounds=3, attack=one) for one in (None, fb.Attack())]
    assert torch.equal(runs[0].x["x"], runs[1].x["x"])


def test_flipped_labels_are_those_of_attackers_in_two_roles():
    label = {"label": torch.tensor([0, 1, 2, 3])}
    clients = [{"train": dict(label), "val": dict(label), "test": dict(label)} for _ in range(10)]
    attack = Attack(kind="label_flip", share=0.2)
    bad = attack.attackers(10, 7)
    for number, client in enumerate(attack.poisoned(clients, range(10), 7)):
        for role in ("train", "val", "test"):
            wrong = number in bad and role != "test"
            assert client[role]["label"].tolist() == ([3, 2, 1, 0] if wrong else [0, 1, 2, 3])


def test_flipping_labels_needs_labels():
    with pytest.raises(SettingError, match=r"attack\.kind is 'label_flip', and the clients have no field 'label'"):
        fb.solve(*BUILT, "fedbio", num_rounds=1, attack=fb.Attack(kind="label_flip"))


RULES = ["trimmed:0.3", "median", "multikrum:2", "centred:0.1", "geometric"]


@pytest.fixture(scope="module")
def clean():
    return loss(None, None)


def loss(robust, attack):
    """The upper loss at the end, infinite if the run failed, on a quadratic whose clients differ a little."""
    layer = None if robust is None else fb.Aggregation(robust=robust)
    options = {"num_rounds": 150, "dtype": torch.float64, "residuals": False, "recover": False, "seed": 1}
    end = fb.solve(*ALIKE, "fedbio", **options, aggregation=layer, attack=attack)
    return float("inf") if end.stopped == "failed" else end.final["upper_loss"]


@pytest.mark.filterwarnings("ignore::fedbilevel.errors.RecoveryWarning")
def test_sign_flippers_ruin_a_plain_mean(clean):
    assert not loss(None, fb.Attack(kind="sign_flip", share=0.2)) < 10 * clean


@pytest.mark.parametrize("rule", RULES)
def test_a_robust_mean_ends_near_the_clean_run_despite_sign_flippers(rule, clean):
    assert loss(rule, fb.Attack(kind="sign_flip", share=0.2)) == pytest.approx(clean, rel=0.1)


def test_mixing_gives_the_trajectory_of_the_run_without_the_attackers():
    """The attackers are far from all others, so no honest client has them among its nearest rows."""
    attack, layer = fb.Attack(kind="sign_flip", share=0.2, strength=50.0), fb.Aggregation(robust="median", outside=0.2)
    options = {"num_rounds": 30, "dtype": torch.float64, "residuals": False, "recover": False}
    bad = attack.attackers(10, 0)
    robust = fb.solve(*BUILT, "fedbio", **options, aggregation=layer, attack=attack)
    honest = fb.solve(*BUILT, "fedbio", **options, drops=lambda iteration, call: bad)
    everyone = fb.solve(*BUILT, "fedbio", **options)
    assert float((robust.x["x"] - honest.x["x"]).abs().max()) < 1e-12
    assert float((everyone.x["x"] - honest.x["x"]).abs().max()) > 1e-3
