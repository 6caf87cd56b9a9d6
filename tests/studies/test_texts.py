"""Mixtures of texts: losses against plain numpy, steps of the weights, and the choice by held-out text."""

from __future__ import annotations

import dataclasses
import json
import math

import numpy as np
import pytest
import torch
from click.testing import CliRunner

import fedbilevel as fb
from fedbilevel import plots
from fedbilevel.algorithms._adaptive import Moments
from fedbilevel.algorithms.fedadam import FedAdam
from fedbilevel.cli import main
from fedbilevel.data.tokens import Texts
from fedbilevel.errors import DataError, ExperimentError, SettingError, UnknownNameError
from fedbilevel.oracle.population import Population
from fedbilevel.studies import doremi, trials
from fedbilevel.studies.doge import budget, doge, rounds_of
from fedbilevel.studies.kinds import mixing_text
from fedbilevel.studies.mixed_texts import choose
from fedbilevel.studies.mixture import Mixture
from fedbilevel.studies.texts import TextMixing, TextStudy
from fedbilevel.tasks import gpt
from fedbilevel.tasks.mixing import corrupted
from support.stops import ctrl_c

TINY = {"width": 8, "layers": 1, "heads": 2, "context": 4, "batch_size": 4, "num_windows": 6}
SHORT = {**TINY, "num_warm": 3, "num_rounds": 3, "num_trial": 3, "num_train": 3}


def texts():
    """Two clients; only the second one holds source b."""
    draw = np.random.default_rng(0)
    some = lambda num: [draw.integers(0, 256, num).astype(np.uint8)]
    return Texts([{"a": some(40), "c": some(9)}, {"a": some(30), "b": some(21), "c": some(60)}],
                 [some(24), some(30)], [some(20), []])  # fmt: skip


def study(**given):
    return TextStudy(texts(), TextMixing(**{**TINY, **given}), 3)


def entropies(one: TextStudy, y, rows) -> np.ndarray:
    leaves = {name: leaf.double() for name, leaf in y.items()}
    return gpt.entropy(leaves, torch.as_tensor(rows[:]), one.settings.shape, gpt.plain_causal).numpy()


def test_losses_are_means_over_the_holders_of_a_source():
    one = study(kl=0.3)
    problem, clients = one.problem(), one.clients()
    population = Population(problem, clients, dtype=torch.float64, second=False)
    x = torch.tensor([0.4, -0.3, 0.9], dtype=torch.float64)
    weights = np.exp(x.numpy()) / np.exp(x.numpy()).sum()
    prior = np.array([70, 21, 69]) / 160
    losses = [entropies(one, problem.y0, client["train"]["text"]) for client in clients]
    by = lambda s: [own[c["train"]["source"] == s].mean() for own, c in zip(losses, clients, strict=True) if
                    s in c["train"]["source"]]  # fmt: skip
    figures = population.measure(x, population.y0)
    assert [len(by(s)) for s in range(3)] == [2, 1, 2]
    expected = sum(weights[s] * np.mean(by(s)) for s in range(3))
    assert figures["lower_loss"] == pytest.approx(expected, rel=1e-6)
    target = np.mean([entropies(one, problem.y0, client["val"]["text"]).mean() for client in clients])
    assert figures["upper_loss"] == pytest.approx(target + 0.3 * (weights * np.log(weights / prior)).sum(), rel=1e-6)


def test_windows_are_drawn_by_the_weights_and_a_missing_source_is_made_up_for():
    one, weights = study(num_windows=2000), {"a": 0.5, "b": 0.3, "c": 0.2}
    clients = one.drawn(weights, one.texts)
    total = np.zeros(3)
    for client, own in zip(clients, one.texts.sources, strict=True):
        rows = client["train"]["text"]
        names = [name for name in own for piece in own[name] for held in rows.tokens if held is piece]
        counts = np.array([(rows.array == i).sum() for i in range(len(rows.tokens))], dtype=float)
        for name, share in zip(names, counts / counts.sum(), strict=True):
            total["abc".index(name)] += share * client["train"]["factor"][0] / 2
    assert total == pytest.approx([0.5, 0.3, 0.2], abs=0.02)


def test_windows_depend_on_their_address_alone_and_lie_in_the_taught_half_of_the_target():
    one, again = study().clients(), study().clients()
    for ours, theirs in zip(one, again, strict=True):
        assert torch.equal(ours["train"]["text"][:], theirs["train"]["text"][:])
    assert [len(piece) for own in study().taught() for piece in own] == [12, 15]
    assert [len(piece) for own in study().held() for piece in own] == [12, 15]


def test_a_step_of_the_weights_is_bounded_and_has_no_scale():
    h, x = torch.tensor([0.3, -0.1, 0.05]), torch.tensor([0.2, 0.1, -0.3])
    method = Mixture(radius=0.1, inertia=0.9)
    ends = []
    for scale in (1.0, 1e4):
        z, m, squares = x, torch.zeros(3), 0.0
        for t, factor in enumerate((1.0, -0.5, 0.01), 1):
            before = z
            z, m, squares = method.step(z, scale * factor * h, m, squares, t)
            moved = z - before
            assert float((moved - moved.mean()).abs().max()) <= 2 * 0.1
        ends.append(z)
    assert torch.allclose(*ends, atol=1e-6)
    w = np.exp(x.numpy()) / np.exp(x.numpy()).sum()
    e = h.numpy() / w
    e = e - e.mean()
    m = 0.1 * e
    expected = x.numpy() - 0.1 * m / max(np.abs(m).max(), math.sqrt(np.abs(e).max() ** 2))
    assert method.step(x, h, torch.zeros(3), 0.0, 1)[0].numpy() == pytest.approx(expected - expected.mean(), abs=1e-6)
    assert torch.equal(method.step(x, 0 * h, torch.zeros(3), 0.0, 1)[0], x - x.mean())


def test_the_second_moment_is_that_of_all_directions():
    method = Mixture(adam_beta1=0.0, adam_beta2=0.5, adam_eps=1e-12)
    q, r, zero = torch.tensor([3.0]), torch.tensor([4.0]), torch.zeros(1)
    (y, d), moments = method.adam([zero, zero], [q, r], Moments((zero, zero), zero, zero), 1.0)
    assert float(moments.second) == pytest.approx(0.5 * 25)
    assert (float(y), float(d)) == pytest.approx((-3 / 5, -4 / 5))


def test_x_rests_while_the_points_move_apart():
    one = study(num_warm=2, num_rounds=4, num_train=1)
    problem = one.problem()
    for waiting, moves in ((2, False), (1, True)):
        method = Mixture(order=1, num_local_steps=1, lr_upper=1.0, lower_optimiser="adam", num_waiting=waiting)
        result = fb.solve(problem, one.clients(), method, num_iterations=2, batch_size=4, residuals=False)
        assert torch.allclose(result.x["logit"], problem.x0["logit"]) != moves


def test_a_private_x_is_refused():
    private = fb.Problem(
        upper=lambda x, y, batch: (y["w"] - batch["a"]) ** 2, lower=lambda x, y, batch: (y["w"] - x["p"]) ** 2,
        x0={"p": torch.zeros(1)}, y0={"w": torch.zeros(1)}, scopes=fb.Scopes("global", "private"),
    )  # fmt: skip
    client = {role: {"a": np.ones(2)} for role in ("train", "val")}
    with pytest.raises(fb.FedBilevelError, match="the server takes the steps of x"):
        fb.solve(private, [client], Mixture(), num_rounds=1)


@pytest.mark.slow
def test_corrupted_chains_lose_their_weight_and_held_out_text_chooses_the_learned_mixture():
    model = {**TINY, "width": 16, "batch_size": 8, "lr": 0.01, "num_windows": 256}
    one = TextStudy(
        mixing_text.texts("chains", 100), TextMixing(**model, num_warm=150, num_rounds=120, num_train=150), 100
    )
    found = choose(one)
    assert sum(found.weights[name] for name in mixing_text.BAD) < 0.1
    assert found.answer == "learned"
    assert found.test_losses["learned"] < found.test_losses["prior"]


@pytest.mark.slow
def test_nothing_is_cut_where_nothing_is_corrupted():
    model = {**TINY, "width": 16, "batch_size": 8, "lr": 0.01, "num_windows": 256}
    own = mixing_text.texts("chains", 100, junk=False)
    one = TextStudy(own, TextMixing(**model, num_warm=100, num_rounds=60, num_trial=30, num_train=150), 100)
    found = choose(one)
    assert min(found.weights[name] / found.prior[name] for name in found.prior) > 0.25
    assert found.test_losses["learned"] < found.test_losses["prior"] + 0.01


def test_the_answer_is_the_prior_unless_held_out_text_says_otherwise(monkeypatch):
    one = study(**SHORT)
    for gap, answer in ((-1.0, "learned"), (1.0, "prior"), (0.0, "prior")):
        losses = iter([np.arange(5.0) + gap, np.arange(5.0), np.ones(2), np.zeros(2)])
        monkeypatch.setattr(TextStudy, "losses", lambda self, y, tokens, losses=losses: next(losses))
        nothing = trials.Cut(one.prior(), dict.fromkeys("abc", trials.Gap(0.0, 1.0)), 0)
        monkeypatch.setattr("fedbilevel.studies.mixed_texts.cut", lambda *_, nothing=nothing: nothing)
        found = choose(one)
        assert found.answer == answer
        assert found.mixture == (found.weights if answer == "learned" else found.prior)
        assert found.search_rounds == 3 + 5 * 3
        assert found.difference == pytest.approx(gap)
        assert answer in found.sentence
        assert found.sentence in repr(found)


def test_doge_sees_as_many_tokens_and_returns_weights():
    one = study(num_rounds=4, num_trial=7)
    assert budget(one) == 4 * 5 + 3 * 7 + 5 * 7
    assert rounds_of(one) == budget(one) // 2
    weights = doge(one, one.problem().y0)
    assert sum(weights.values()) == pytest.approx(1)
    assert weights != one.prior()


def test_weights_of_doremi_grow_by_their_excess():
    """With the same excess in all rounds and little smoothing, they are those of exponentiated gradients."""
    prior, excess = torch.tensor([0.5, 0.3, 0.2]).double(), torch.tensor([0.0, 0.1, 0.4]).double()
    weights = prior
    for t in range(1, 6):
        weights = doremi.stepped(weights, excess, prior)
        grown = prior * torch.exp(doremi.ETA * t * excess)
        assert torch.allclose(weights, grown / grown.sum(), atol=2 * t * doremi.SMOOTHING)
        assert float(weights.sum()) == pytest.approx(1)
    kept = doremi.stepped(torch.tensor([1.0, 0.0, 0.0]).double(), excess, prior)
    assert torch.allclose(kept, (1 - doremi.SMOOTHING) * torch.eye(3)[0] + doremi.SMOOTHING * prior)


def test_doremi_prefers_text_that_the_reference_predicts():
    """The reference predicts token 1 after token 1 and nothing else, so noise has no excess."""
    draw = np.random.default_rng(0)
    ones, noise = [np.ones(200, np.uint8)], [draw.integers(0, 256, 200).astype(np.uint8)]
    one = TextStudy(
        Texts([{"noise": noise, "ones": ones}], [ones], [[]]),
        TextMixing(**TINY, lr=0.02, num_warm=30, num_rounds=6, num_trial=5),
        0,
    )
    target = doremi.reference(one)
    weights = doremi.doremi(one, target)
    assert float(one.losses(target, [ones]).mean()) < 1 < float(one.losses(target, [noise]).mean())
    assert weights["ones"] > 0.5 == one.prior()["ones"]
    assert sum(weights.values()) == pytest.approx(1, abs=1e-5)


def judged(monkeypatch, one, loss):
    """Replace trainings by a loss that is a function of the weights of the sources; record the trainings."""
    seen = []
    noise = np.array([-0.01, 0.01] * 8)

    def train_on(self, y, weights, num_rounds, step=1.0):
        seen.append((weights, num_rounds, step))
        return weights

    monkeypatch.setattr(TextStudy, "train_on", train_on)
    monkeypatch.setattr(TextStudy, "losses", lambda self, y, tokens: 1 + (loss(y) * (1 + noise) if y else 0 * noise))
    return seen


def test_sources_that_do_not_help_alone_are_cut(monkeypatch):
    one = study(num_trial=50, num_train=100)
    seen = judged(monkeypatch, one, lambda w: 0.3 * w["b"] - 0.1 * (w["a"] + w["c"]))
    found = trials.cut(one, None, {"a": 0.6, "b": 0.01, "c": 0.39})
    assert found.weights == pytest.approx({"a": 70 / 139, "b": 0, "c": 69 / 139})
    assert found.alone["b"].mean == pytest.approx(0.3)
    assert found.alone["a"] == pytest.approx((-0.1, 0.001 * math.sqrt(16 / 15) / 4))
    assert [(rounds, step) for _, rounds, step in seen] == [(10, trials.SHORT)] * 3
    assert found.rounds == 30


def test_a_training_on_a_source_alone_reads_it_once_in_short_steps():
    one = TextStudy(texts(), TextMixing(**{**TINY, "batch_size": 1}, num_trial=12), 3)  # 8 tokens per round
    sizes = one.texts.sizes()
    assert sizes == {"a": 70, "b": 21, "c": 69}
    assert [trials.num_rounds(one, name, 1) for name in "abc"] == [10, 10, 10]
    assert [trials.num_rounds(one, name, 4) for name in "abc"] == [12, 10, 12]
    y, weights = one.problem().y0, {"a": 1.0, "b": 0.0, "c": 0.0}
    short, whole = (one.train_on(y, weights, 1, step) for step in (trials.SHORT, 1.0))
    for name, leaf in y.items():  # a first step of Adam is as long as its step size
        torch.testing.assert_close(short[name] - leaf, 0.1 * (whole[name] - leaf), rtol=1e-3, atol=1e-6)


def test_a_source_that_harms_alone_is_cut_even_if_the_bilevel_run_kept_it(monkeypatch):
    one = study(num_trial=5, num_train=100)
    judged(monkeypatch, one, lambda w: 0.05 if w["b"] == 1 else -0.1)
    found = trials.cut(one, None, {"a": 0.4, "b": 0.4, "c": 0.2})
    assert found.weights == pytest.approx({"a": 70 / 139, "b": 0, "c": 69 / 139})


def test_bilevel_weights_are_tried_as_they_are_used_and_in_whole_steps(monkeypatch):
    one, learned = study(num_trial=5, num_train=1), {"a": 0.6, "b": 0.1, "c": 0.3}
    seen = judged(monkeypatch, one, lambda w: 0.0 if w["b"] == 1 else -0.1 - w["a"])
    found = trials.cut(one, None, learned)
    assert found.weights == pytest.approx(learned)
    assert seen[-2:] == [(pytest.approx(learned), 5, 1.0), (pytest.approx(one.prior()), 5, 1.0)]
    assert one.learning_rounds() + found.rounds <= budget(one)


def test_bilevel_weights_replace_the_priors_on_evidence_and_without_many_repetitions(monkeypatch):
    learned = {"a": 0.6, "b": 0.1, "c": 0.3}
    for num_train, slope, graded in ((1, -1.0, True), (1, 1.0, False), (100, -1.0, False)):
        one = study(num_trial=5, num_train=num_train)
        judged(monkeypatch, one, lambda w, slope=slope: -2.0 + slope * w["a"])
        found = trials.cut(one, None, learned)
        assert found.weights == pytest.approx(learned if graded else one.prior())


def test_the_bilevel_run_decides_about_a_source_that_neither_helps_nor_harms(monkeypatch):
    one = study(num_trial=5, num_train=100)
    for learned, kept in ((0.1, True), (0.01, False)):
        judged(monkeypatch, one, lambda w: -0.1 * (w["a"] + w["c"]))
        found = trials.cut(one, None, {"a": 0.6, "b": learned, "c": 0.4 - learned})
        assert (found.weights["b"] > 0) == kept


def test_all_sources_are_kept_if_none_helps(monkeypatch):
    one = study()
    judged(monkeypatch, one, lambda w: 0.1)
    assert trials.cut(one, None, {"a": 0.9, "b": 0.05, "c": 0.05}).weights == one.prior()


def test_a_client_without_the_only_source_does_not_count():
    one = study(num_windows=10)
    first, second = one.drawn({"a": 0.0, "b": 1.0, "c": 0.0}, one.texts)
    assert set(first["train"]["factor"]) == {0.0}
    assert set(second["train"]["factor"]) == {2.0}
    y = one.train_on(one.problem().y0, {"a": 0.0, "b": 1.0, "c": 0.0}, 2)
    assert all(bool(torch.isfinite(leaf).all()) for leaf in y.values())


def run(**row):
    return mixing_text.run(
        {"data": "chains", "model": SHORT, **row}, repetition=1, folder=None, device="cpu", say=lambda _: None
    )


def test_rows_of_the_experiment_have_their_weights():
    found = {method: run(method=method).figures for method in mixing_text.METHODS}
    assert found["clean"]["bad_weight"] == 0
    assert found["uniform"]["bad_weight"] == 0.5
    assert found["proportional"]["bad_weight"] == pytest.approx(0.432 / 0.891, abs=0.01)
    assert "bad_weight" not in found["target"]
    assert found["learned"]["chosen"] in (0.0, 1.0)
    assert {one["tokens"] for one in found.values()} == {3 * 4 * 4 * 4.0}
    assert len({one["test_loss"] for method, one in found.items() if method != "learned"}) == 7
    searched = {method: one["search_tokens"] for method, one in found.items()}
    assert searched["clean"] == searched["target"] == 0
    assert searched["uncut"] == (3 + 5 * 3) * 4 * 4 * 4
    assert searched["doge"] == (3 + (5 * 3 + 8 * 3 + 10 * 3) // 2 * 2) * 4 * 4 * 4  # pairs of batches
    with pytest.raises(UnknownNameError, match="method"):
        run(method="best")
    with pytest.raises(UnknownNameError, match="data"):
        run(data="novels")
    with pytest.raises(ExperimentError, match="options has 'batch_size', expected precision and strategy alone"):
        run(options={"precision": "full", "batch_size": 4})
    with pytest.raises(ExperimentError, match="needs 'data'"):
        mixing_text.run({}, repetition=0, folder=None, device="cpu", say=lambda _: None)


def test_words_turn_around_and_letters_change():
    draw = np.random.default_rng(0)
    assert corrupted("to be\nor", "words backwards", "", draw) == "ot ro\neb"
    assert corrupted("Abc, xyz", "other letters", "", draw) == "Nop, klm"


def write(folder):
    for name, own in (("a", b"abcd" * 40), ("b", b"dcba" * 30), ("target", b"abcd" * 20), ("test", b"abcd" * 10)):
        (folder / f"{name}.txt").write_bytes(own)


def texts_and_model(found, folder):
    """The model has a loss and draws text, and the picture has the learned and the first weights."""
    text = b"abcdabcdabcdab"  # windows of five tokens; the last four are not read
    rows = np.frombuffer(text, np.uint8)[:10].reshape(2, 5).astype(np.int64)
    leaves = {name: leaf.double() for name, leaf in found.y.items()}
    losses = gpt.entropy(leaves, torch.as_tensor(rows), gpt.Shape(8, 1, 2, 4), gpt.plain_causal)
    assert found.loss(text) == found.loss(text.decode()) == found.loss(np.frombuffer(text, np.uint8))
    assert found.loss(text) == pytest.approx(float(losses.mean()), rel=1e-5)
    certain = {**found.y, "head": torch.zeros_like(found.y["head"])}
    certain["norm.weight"], certain["norm.bias"] = 0 * found.y["norm.weight"], torch.ones(8)
    certain["head"][ord("b")] = 100.0
    assert dataclasses.replace(found, y=certain).generate("a", 6) == "abbbbbb"  # longer than the context
    drawn = found.generate("ab", 20)
    assert drawn.startswith("ab")
    assert drawn == found.generate("ab", 20) != found.generate("ab", 20, seed=1)
    for wrong in (np.array([[1, 2]]), np.array([0.5]), np.array([256])):
        with pytest.raises(SettingError, match="expected a str, bytes, or one row of tokens from 0 to 255"):
            found.loss(wrong)
    with pytest.raises(SettingError, match=r"^start is '' and the model knows 256 tokens, expected some text"):
        found.generate("")
    with pytest.raises(DataError, match="a text has no window of 5 tokens"):
        found.loss("abc")
    if plots.available():
        [axes] = found.plot(folder.parent / "weights.png").axes
        assert [bar.get_width() for bar in axes.patches] == [row["weight"] for row in found.table()]
        marks = axes.collections[0].get_offsets()[:, 0]
        assert list(marks) == pytest.approx([row["prior"] for row in found.table()])


def test_one_call_and_one_command_give_the_same_weights(tmp_path):
    write(tmp_path)
    found = fb.mix_sources(tmp_path, num_clients=2, **SHORT)
    assert isinstance(found, fb.MixedTexts)
    assert [row["tokens"] for row in sorted(found.table(), key=lambda row: row["source"])] == [160, 120]
    assert "Weights of 2 sources of text" in found._repr_html_()
    texts_and_model(found, tmp_path)
    words = [f"--{name.replace('_', '-')}={value}" for name, value in SHORT.items()]
    done = CliRunner().invoke(main.cli, ["mix", str(tmp_path), "--num-clients=2", *words, f"--out={tmp_path / 'out'}"])
    assert done.exit_code == 0, done.output
    said = json.loads((tmp_path / "out" / "mixture.json").read_text())
    assert {row["source"]: row["weight"] for row in said["sources"]} == dict(found.weights)
    assert said["answer"] == found.answer
    assert set(said["test_losses"]) == {"learned", "prior"}


def test_wrong_input_is_refused(tmp_path):
    write(tmp_path)
    with pytest.raises(SettingError, match=r"target is given too: put the target into target\.txt"):
        fb.mix_sources(tmp_path, {"input": [], "label": []})
    for name in ("l2", "fairness", "num_folds"):
        with pytest.raises(SettingError, match=f"is a folder, and {name} is a setting for tables: leave it out"):
            fb.mix_sources(tmp_path, **{name: 3})
    with pytest.raises(SettingError, match="has tables and no target"):
        fb.mix_sources([{}, {}])
    with pytest.raises(SettingError, match="heads is 3, expected a divisor of width"):
        TextMixing(heads=3)
    with pytest.raises(DataError, match="a text has no window of 65 tokens"):
        fb.mix_sources(tmp_path, context=64)
    one = study()
    with pytest.raises(DataError, match="a text has no window of 5 tokens"):
        one.losses(one.problem().y0, [[np.zeros(3, np.uint8)]])


@pytest.mark.parametrize("kind", [FedAdam, Mixture])
def test_ctrl_c_in_any_training_leaves_no_mixture(tmp_path, monkeypatch, kind):
    write(tmp_path)
    words = [f"--{name.replace('_', '-')}={value}" for name, value in SHORT.items()]
    with monkeypatch.context() as patch:
        ctrl_c(patch, kind)
        with pytest.raises(KeyboardInterrupt):
            fb.mix_sources(tmp_path, num_clients=2, **SHORT)
    ctrl_c(monkeypatch, kind)
    done = CliRunner().invoke(main.cli, ["mix", str(tmp_path), "--num-clients=2", *words, f"--out={tmp_path / 'out'}"])
    assert done.exit_code == 130
    assert "Stopped before anything was saved." in done.output
    assert not (tmp_path / "out").exists()
