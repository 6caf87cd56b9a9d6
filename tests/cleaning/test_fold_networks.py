"""Networks that have not seen the sample: architecture, folds, targets, copies, and the two passes."""

from __future__ import annotations

import dataclasses
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

import numpy as np
import pytest
import torch
from torch import nn

import fedbilevel as fb
from fedbilevel.algorithms.fedadam import FedAdam
from fedbilevel.cleaning import prepared
from fedbilevel.cleaning.augment import moved
from fedbilevel.cleaning.fold_networks import FoldNetworks, Network, Training, rows_of, train_folds, train_network
from fedbilevel.cleaning.residual import Residual
from fedbilevel.errors import UnknownNameError
from fedbilevel.studies.kinds import network_cleaning
from support.stops import ctrl_c

BRIEF = Training(num_folds=2, width=4, num_rounds=4, batch_size=8)


def stripes(rng, num):
    """Images of 8 x 8 with horizontal or vertical stripes at a random shift."""
    label = rng.integers(0, 2, num)
    wave = np.stack([np.roll(np.tile([1.0, 1.0, -1.0, -1.0], 2), s) for s in rng.integers(0, 4, num)])
    image = np.where((label == 0)[:, None, None], wave[:, None, :], wave[:, :, None])
    return {"image": image + 0.3 * rng.normal(size=(num, 8, 8)), "label": label}


def striped(num_clients=3, num=60):
    rng = np.random.default_rng(0)
    clients = [{"train": stripes(rng, num), "val": stripes(rng, 20)} for _ in range(num_clients)]
    for client in clients:
        client["train"]["label"][: num // 5] = 1 - client["train"]["label"][: num // 5]
    return clients


class Block(nn.Module):
    def __init__(self, into, out, halve=False):
        super().__init__()
        self.conv, self.norm = nn.Conv2d(into, out, 3, padding=1, bias=False), nn.GroupNorm(max(1, out // 16), out)
        self.halve = halve

    def forward(self, images):
        found = self.conv(images)
        return self.norm(nn.functional.max_pool2d(found, 2) if self.halve else found).relu()


@pytest.mark.parametrize(("side", "channels", "width"), [(8, 1, 4), (32, 3, 16)])
def test_the_scores_are_those_of_torch_modules(side, channels, width):
    shape = Residual(side, channels, width, 5)
    rng = torch.Generator().manual_seed(3)
    y = {name: leaf + 0.1 * torch.randn(leaf.shape, generator=rng) for name, leaf in shape.initial(0).items()}
    blocks = {}
    for name, (out, into) in shape.layers().items():
        blocks[name] = Block(into, out, halve=name.startswith("stage"))
        weights = {"conv.weight": y[f"{name}.weight"], "norm.weight": y[f"{name}.scale"]}
        blocks[name].load_state_dict(weights | {"norm.bias": y[f"{name}.shift"]})
    images = 5 + 2 * torch.randn(3, channels, side, side, generator=rng)
    found = blocks["first"](nn.LayerNorm((channels, side, side), 1e-6, False)(images))
    found = blocks["stage1"](found)
    found = found + blocks["add1b"](blocks["add1a"](found))
    found = blocks["stage3"](blocks["stage2"](found))
    found = found + blocks["add3b"](blocks["add3a"](found))
    wanted = 0.125 * (found.amax((2, 3)) @ y["head.weight"].T + y["head.bias"])
    assert wanted.std() > 0
    assert torch.allclose(shape.scores(y, images.flatten(1)), wanted, rtol=1e-3, atol=1e-5)


def test_a_sample_has_no_influence_on_its_own_probabilities():
    clients = [client["train"] for client in striped()]
    changed = [{**own, "label": own["label"].copy()} for own in clients]
    changed[1]["label"][[5, 7]] = 1 - changed[1]["label"][[5, 7]]  # fold 1 of 2
    first, again = (train_folds(some, 2, BRIEF, seed=0) for some in (clients, changed))
    before, after = (folds.unseen(clients[1]["image"]) for folds in (first, again))
    assert np.allclose(before[1::2], after[1::2], rtol=0, atol=1e-5)  # derivatives may be evaluated in two ways
    assert np.abs(before[0::2] - after[0::2]).max() > 1e-4
    assert first.cost["rounds"] == 8


def test_rows_of_training_samples_are_out_of_fold_and_others_are_means():
    class Constant(Network):
        def probabilities(self, images):
            return np.tile(self.y, (len(images), 1))

    shape = Residual(8, 1, 4, 2)
    folds = FoldNetworks([[Constant(shape, np.array(p), {}) for p in ([0.25, 0.75], [1.0, 0.0])]])
    images = np.zeros((5, 64))
    assert folds.unseen(images)[:, 0].tolist() == [0.25, 1.0, 0.25, 1.0, 0.25]
    assert folds.probabilities(images)[0].tolist() == [0.625, 0.375]
    both = folds + FoldNetworks([[Constant(shape, np.array([0.75, 0.25]), {})] * 3])
    assert both.unseen(images)[:, 0].tolist() == [0.5, 0.875, 0.5, 0.875, 0.5]
    last = Constant(shape, np.array([0.0, 1.0]), {})
    assert both.together(last, -1).probabilities(images)[0, 0] == pytest.approx(2.25 / 4)
    assert both.together(last, 0).probabilities(images)[0, 0] == pytest.approx(1.25 / 3)
    assert np.allclose(rows_of(np.array([[1.0, 0.0]])), [[1, 0, 0, np.log(1e-4)]])


def test_folds_leave_flagged_samples_out():
    clients = [client["train"] for client in striped()]
    flags = [np.zeros(len(own["label"]), bool) for own in clients]
    flags[1][:10] = flags[2][:] = True
    changed = [{**own, "label": own["label"].copy()} for own in clients]
    changed[1]["label"][:10] = 1 - changed[1]["label"][:10]
    first, again = (train_folds(some, 2, BRIEF, flags=flags, seed=0) for some in (clients, changed))
    image = clients[1]["image"]
    assert np.allclose(first.unseen(image), again.unseen(image), rtol=0, atol=1e-5)
    assert not np.allclose(first.unseen(image), train_folds(clients, 2, BRIEF, seed=0).unseen(image), rtol=0, atol=1e-5)


def test_targets_replace_the_labels():
    clients = [client["train"] for client in striped()]
    hard = [np.eye(2)[own["label"]] for own in clients]
    given = train_network(clients, 2, BRIEF, seed=0)
    same = train_network(clients, 2, BRIEF, targets=hard, seed=0)
    other = train_network(clients, 2, BRIEF, targets=[1 - one for one in hard], seed=0)
    assert all(torch.allclose(given.y[name], same.y[name], rtol=0, atol=1e-5) for name in given.y)
    image = clients[0]["image"]
    assert np.allclose(given.probabilities(image), other.probabilities(image)[:, ::-1], atol=1e-5)


def test_images_are_shifted_and_mirrored_by_their_own_draws():
    images = torch.arange(3 * 2 * 64.0).view(3, 2, 8, 8)
    rng = np.random.default_rng(0)
    draw = torch.tensor(rng.random((3, 3)))
    found = moved(images, draw, shift=0.25, mirror=True)
    for image, own, one in zip(images.numpy(), draw.numpy(), found.numpy(), strict=True):
        down, right = (int(np.floor(value * 5)) - 2 for value in own[:2])
        wide = np.pad(image, ((0, 0), (2, 2), (2, 2)), mode="reflect")
        wanted = wide[:, 2 + down : 10 + down, 2 + right : 10 + right]
        assert np.array_equal(one, wanted[:, :, ::-1] if own[2] < 0.5 else wanted)
    assert len({bool(value < 0.5) for value in draw[:, 2]}) == 2
    still = moved(images, draw, shift=0.0, mirror=False)
    assert torch.equal(still, images)


def test_images_of_a_training_change_from_step_to_step():
    clients = [client["train"] for client in striped()]
    plain = train_network(clients, 2, BRIEF, seed=0)
    other = train_network(clients, 2, dataclasses.replace(BRIEF, shift=0.125), seed=0)
    again = train_network(clients, 2, dataclasses.replace(BRIEF, shift=0.125), seed=0)
    assert max(float((plain.y[name] - other.y[name]).abs().max()) for name in plain.y) > 1e-3
    assert all(torch.allclose(other.y[name], again.y[name], rtol=0, atol=1e-5) for name in other.y)
    mirrored = train_network(clients, 2, dataclasses.replace(BRIEF, mirror=True), seed=0)
    image = np.asarray(clients[0]["image"])
    assert np.allclose(mirrored.probabilities(image), mirrored.probabilities(image[:, :, ::-1]), atol=1e-6)
    assert not np.allclose(plain.probabilities(image), plain.probabilities(image[:, :, ::-1]), atol=1e-6)


def test_two_passes_find_labels_and_count_what_they_cost():
    clients = striped(num=100)
    training = {"num_folds": 2, "width": 8, "num_rounds": 40, "batch_size": 16}
    found = fb.clean_labels(clients, features="refined", training=training, detector="confident")
    flags, wrong = np.concatenate(found.flags), np.tile(np.arange(100) < 20, 3)
    assert flags[wrong].mean() > 0.75  # 0.88 to 0.98, by the way in which derivatives are evaluated
    assert flags[~wrong].mean() < 0.1
    assert found.found["network"]["rounds"] > 4 * 40  # four networks, and confident learning between them
    fresh = stripes(np.random.default_rng(5), 200)
    assert (found.predict(fresh["image"]) == fresh["label"]).mean() > 0.85
    once = fb.clean_labels(clients, features="out_of_fold", training=training)
    assert once.found["network"]["rounds"] == 80


def test_the_second_networks_learn_without_the_flags_of_confident_learning(tmp_path, monkeypatch):
    """In `clean_labels` and in the study; without a setting, the study trains them on posteriors."""
    seen = []
    for owner in (prepared, network_cleaning):

        def spied(*given, usual=owner.train_folds, **more):
            seen.append(more)
            return usual(*given, **more)

        monkeypatch.setattr(owner, "train_folds", spied)
    clients, training = striped(num=60), {"num_folds": 2, "width": 4, "num_rounds": 15, "batch_size": 16}
    fb.clean_labels(clients, features="refined", training=training)
    first = fb.clean_labels(clients, features="out_of_fold", training=training, detector="confident")
    assert seen[1].get("targets") is None
    assert 0 < np.concatenate(first.flags).sum() < 180
    assert all(map(np.array_equal, seen[1]["flags"], first.flags))

    row = {"task": {"name": "data_cleaning", "num_clients": 3, "noise": 0.2, "num_clean": 20}, "training": training}
    for again, name in (("unflagged", "flags"), ("posteriors", "targets")):
        network_cleaning._shared.clear()
        seen.clear()
        given = {**row, "method": "refined", "again": again}
        network_cleaning.run(given, repetition=0, folder=tmp_path / again, device="cpu", say=lambda text: None)
        assert [{*one} - {"parts", "seed", "device"} for one in seen] == [set(), {name}]


def test_an_unknown_setting_of_the_training_is_refused():
    with pytest.raises(UnknownNameError, match="widht"):
        fb.clean_labels(striped(), features="out_of_fold", training={"widht": 3})


def test_the_study_compares_networks_on_the_same_probabilities(tmp_path):
    task = {"name": "data_cleaning", "num_clients": 3, "noise": 0.2, "num_clean": 20, "test_share": 0.5}
    row = {"task": task, "training": {"num_folds": 2, "width": 4, "num_rounds": 15, "batch_size": 16}}
    go = lambda method, **more: network_cleaning.run(
        {**row, "method": method, **more}, repetition=0, folder=tmp_path / "job", device="cpu", say=lambda text: None
    ).figures  # fmt: skip
    plain, right, refined = (go(method) for method in ("as_given", "only_right", "refined"))
    assert plain["cleaned"] == plain["plain"] == right["plain"] == refined["plain"]
    assert (plain["f1"], plain["t"], right["f1"], right["flags"]) == (0, 0, 1, pytest.approx(0.2, abs=0.01))
    assert plain["rounds"] == right["rounds"] == 15
    assert refined["rounds"] > 5 * 15
    assert 0 < refined["average_precision"] <= 1
    assert refined["test_accuracy"] == refined["cleaned" if refined["accepted"] else "plain"]
    distilled = go("refined", last="distilled")  # the same flags, other targets of the last network
    assert {name: distilled[name] for name in ("f1", "flags", "rounds")} == {
        name: refined[name] for name in ("f1", "flags", "rounds")
    }
    assert distilled["cleaned"] != refined["cleaned"]
    chosen, corrected = (go("refined", last=last) for last in ("chosen", "corrected"))
    assert chosen["cleaned"] in (refined["cleaned"], corrected["cleaned"])
    assert chosen["rounds"] == refined["rounds"] + 15  # one more candidate
    other = go("refined", flag_by="label_em", transition="own", final={"num_rounds": 20})
    assert other["flags"] != refined["flags"]
    assert go("as_given", final={"num_rounds": 20})["rounds"] == 20


def test_every_row_of_the_study_may_answer_together_with_its_networks_of_folds(tmp_path):
    task = {"name": "data_cleaning", "num_clients": 3, "noise": 0.3, "num_clean": 20, "test_share": 0.5}
    row = {"task": task, "training": {"num_folds": 2, "width": 4, "num_rounds": 15, "batch_size": 16}}
    go = lambda method, **more: network_cleaning.run(
        {**row, "method": method, **more}, repetition=0, folder=tmp_path / "job", device="cpu", say=lambda text: None
    ).figures  # fmt: skip
    names = ("as_given", "cleanlab", "cleanlab_again", "refined")
    alone, together = ({name: go(name, answer=answer) for name in names} for answer in ("last", "together"))
    for name in names:
        assert together[name]["alone"] == alone[name]["cleaned"] == alone[name]["alone"]
        assert together[name]["f1"] == alone[name]["f1"]
    assert together["as_given"]["cleaned"] == together["as_given"]["plain"] == together["cleanlab"]["plain"]
    assert together["as_given"]["rounds"] == together["cleanlab"]["rounds"] == 3 * 15
    assert together["cleanlab_again"]["rounds"] == 5 * 15
    work = network_cleaning.Work(row, 0, tmp_path / "networks", "cpu", print)
    folds, last = work.folds("given"), work.plain()
    mean = np.mean([one.probabilities(work.clean()["image"]) for one in (last, *folds.passes[0])], axis=0)
    assert np.allclose(folds.together(last, 0).probabilities(work.clean()["image"]), mean)


def test_rows_of_another_process_find_the_networks_that_are_trained(tmp_path, monkeypatch):
    task = {"name": "data_cleaning", "num_clients": 3, "noise": 0.3, "num_clean": 20, "test_share": 0.5}
    row = {"task": task, "training": {"num_folds": 2, "width": 4, "num_rounds": 6, "batch_size": 16}}
    rounds, usual = [], FedAdam.round
    monkeypatch.setattr(FedAdam, "round", lambda *given: rounds.append(1) or usual(*given))
    go = lambda method, job: network_cleaning.run(
        {**row, "method": method}, repetition=0, folder=tmp_path / job, device="cpu", say=lambda text: None
    ).figures  # fmt: skip
    network_cleaning._shared.clear()
    first = go("refined", "one")
    assert len(rounds) == 6 * 6  # two passes of two folds, and last networks of the method and of the given labels
    network_cleaning._shared.clear()  # as in another process
    assert go("refined", "two") == first
    assert len(rounds) == 6 * 6
    network_cleaning._shared.clear()
    go("cleanlab_again", "three")
    assert len(rounds) == 6 * 6 + 3 * 6  # its second pass and its last network


def test_networks_of_other_targets_are_not_taken_for_these(tmp_path):
    """As after a change of a detector between two tries of one row: the name is the same, the posteriors are not."""
    task = {"name": "data_cleaning", "num_clients": 3, "noise": 0.3, "num_clean": 20, "test_share": 0.5}
    row = {"task": task, "training": {"num_folds": 2, "width": 4, "num_rounds": 3, "batch_size": 16}}

    def folds(sharpness):
        network_cleaning._shared.clear()  # as in another process
        work = network_cleaning.Work(row, 0, tmp_path / "networks", "cpu", lambda text: None)
        targets = [np.full((len(own["label"]), 10), 0.1) * sharpness for own in work.train]
        return [one.y["head.weight"] for one in work.folds("refined shared", targets=targets).passes[0]]

    first, other, again = folds(1.0), folds(2.0), folds(1.0)
    assert all(map(torch.equal, first, again))
    assert not any(map(torch.equal, first, other))
    assert len([*(tmp_path / "networks").glob("*/parts/*")]) == 2 * 2 + 1  # two networks of each, and a lock


def row_of_another_process(method, folder):
    torch.set_num_threads(1)
    task = {"name": "data_cleaning", "num_clients": 3, "noise": 0.3, "num_clean": 20, "test_share": 0.5}
    row = {"task": task, "training": {"num_folds": 2, "width": 4, "num_rounds": 60, "batch_size": 16}}
    return network_cleaning.run(
        {**row, "method": method}, repetition=0, folder=folder, device="cpu", say=lambda text: None
    ).figures  # fmt: skip


def test_rows_of_two_processes_at_the_same_time_train_every_network_once(tmp_path):
    methods = ("cleanlab", "as_given")
    with ProcessPoolExecutor(2, mp_context=get_context("spawn")) as pool:
        running = [pool.submit(row_of_another_process, method, tmp_path / method) for method in methods]
        together = [one.result() for one in running]
    assert together == [row_of_another_process(method, tmp_path / "alone" / method) for method in methods]


def test_ctrl_c_in_the_training_of_a_fold_leaves_no_networks(monkeypatch):
    ctrl_c(monkeypatch, FedAdam)
    with pytest.raises(KeyboardInterrupt):
        fb.clean_labels(striped(), features="out_of_fold", training=BRIEF.asdict())
