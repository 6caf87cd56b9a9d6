"""Slow and silent clients: their draws, and runs against the same work and absences given by hand."""

from __future__ import annotations

import json

import pytest
import torch
from click.testing import CliRunner

import fedbilevel as fb
from fedbilevel.algorithms.fedavg import FedAvg
from fedbilevel.cli.main import cli
from fedbilevel.errors import FedBilevelError, SettingError
from fedbilevel.federation.algorithm import Cohort
from fedbilevel.problem.draws import Stream
from fedbilevel.runs.options import keywords
from fedbilevel.tasks.quadratic import Quadratic

BUILT = Quadratic(num_clients=7).build()


def run(algorithm="fedbio", num_iterations=6, **more):
    return fb.solve(*BUILT, algorithm, num_iterations=num_iterations, dtype=torch.float64, **more)


def steps(slow: float, work: float, num_clients: int, seed: int, num: int = 5) -> tuple[int, ...] | int:
    return fb.Stragglers(slow=slow, work=work).slowed(FedAvg(num_local_steps=num), num_clients, seed).num_local_steps


def test_slow_clients_are_a_share_drawn_by_the_seed_and_take_a_part_of_the_steps():
    found = [steps(0.3, 0.4, 10, seed) for seed in range(20)]
    assert all(sorted(one) == [2] * 3 + [5] * 7 for one in found)
    assert len(set(found)) > 10
    assert found[3] == steps(0.3, 0.4, 10, 3)
    assert sorted(steps(0.5, 0.01, 4, 0)) == [1, 1, 5, 5]  # at least one step
    assert steps(0.04, 0.4, 10, 0) == 5  # nobody: one number, as before


def test_a_run_with_slow_clients_is_the_run_with_their_numbers_of_steps():
    unequal = fb.Stragglers(slow=0.4, work=0.2)
    by_hand = unequal.slowed(FedAvg(num_local_steps=5), 7, 4).num_local_steps
    one = run("fedavg", num_local_steps=5, seed=4, stragglers=unequal)
    two = run("fedavg", num_local_steps=by_hand, seed=4)
    plain = run("fedavg", num_local_steps=5, seed=4)
    assert torch.equal(one.y["y"], two.y["y"])
    assert not torch.equal(one.y["y"], plain.y["y"])
    assert one.ledger["gy"] == two.ledger["gy"] == 6 * sum(by_hand)


@pytest.mark.parametrize("cohort", [Cohort(), Cohort(0.6)])
def test_a_run_with_dropout_is_the_run_whose_clients_are_absent_by_hand(cohort):
    """In some rounds clients of the cohort are spared, so the sets are those of the whole run."""
    unequal, seen = fb.Stragglers(dropout=0.4), {}
    original = fb.Stragglers.absent

    def watched(self, stream, ids, iteration):
        seen[iteration] = original(self, stream, ids, iteration)
        return seen[iteration]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fb.Stragglers, "absent", watched)
        one = run(seed=2, cohort=cohort, stragglers=unequal)
    two = run(seed=2, cohort=cohort, drops=lambda iteration, call: seen.get(iteration, ()))
    assert torch.equal(one.x["x"], two.x["x"])
    assert one.ledger == two.ledger
    assert not torch.equal(one.x["x"], run(seed=2, cohort=cohort).x["x"])


def test_clients_drop_out_at_the_given_rate_and_one_always_answers():
    stream, ids = Stream(0), torch.arange(40)
    gone = [fb.Stragglers(dropout=0.25).absent(stream, ids, t) for t in range(100)]
    assert sum(map(len, gone)) / 4000 == pytest.approx(0.25, abs=0.02)
    assert len({tuple(one) for one in gone}) == 100
    few = torch.tensor([5, 5, 9])  # a cohort drawn with replacement
    left = [{5, 9} - set(fb.Stragglers(dropout=0.99).absent(stream, few, t)) for t in range(200)]
    assert all(left)
    assert {frozenset(one) for one in left} >= {frozenset({5}), frozenset({9})}
    assert fb.Stragglers().absent(stream, ids, 1) == []


def test_a_run_with_stragglers_resumes_bit_for_bit_and_not_with_others(tmp_path):
    unequal = fb.Stragglers(slow=0.4, work=0.2, dropout=0.3)
    whole = run(stragglers=unequal, strategy="loop")
    run(num_iterations=3, stragglers=unequal, strategy="loop", record=tmp_path / "r")
    resumed = run(stragglers=unequal, strategy="loop", record=tmp_path / "r", resume=True)
    assert torch.equal(whole.x["x"], resumed.x["x"])
    run(num_iterations=3, stragglers=unequal, record=tmp_path / "s")
    with pytest.raises(FedBilevelError, match="stragglers"):
        run(stragglers=unequal._replace(dropout=0.1), record=tmp_path / "s", resume=True)


def test_the_command_line_and_run_files_have_the_same_options(tmp_path):
    given = keywords({"slow": 0.4, "slow_work": 0.5, "dropout": 0.2})
    assert given["stragglers"] == fb.Stragglers(0.4, 0.5, 0.2)
    assert "stragglers" not in keywords({})
    words = (
        "run quadratic --algorithm fedavg --num-local-steps 5 --slow 0.4 --slow-work 0.5 --dropout 0.2 --no-baseline"
    )
    invoke = lambda *words: CliRunner().invoke(cli, [*map(str, words)])
    whole = invoke(*words.split(), "--num-iterations", 5, "--out", tmp_path / "whole")
    assert whole.exit_code == 0, whole.output
    assert invoke(*words.split(), "--num-iterations", 3, "--out", tmp_path / "r").exit_code == 0
    again = invoke("resume", tmp_path / "r", "--num-iterations", 5)
    assert again.exit_code == 0, again.output
    ends = [json.loads((tmp_path / name / "metrics.jsonl").read_text().splitlines()[-1]) for name in ("whole", "r")]
    assert ends[0]["lower_loss"] == ends[1]["lower_loss"]
    config = json.loads((tmp_path / "r" / "config.json").read_text())
    assert config["options"]["dropout"] == 0.2
    assert sorted(config["identity"]["settings"]["num_local_steps"]) == [2, 2, 5, 5, 5]


@pytest.mark.parametrize(
    ("more", "sentence"),
    [
        ({"stragglers": fb.Stragglers(slow=1.5)}, r"^stragglers.slow is 1.5, expected a share from 0 to 1\.$"),
        ({"stragglers": fb.Stragglers(dropout=1)}, r"^stragglers.dropout is 1, expected a share from 0 to 0.99\.$"),
        ({"stragglers": fb.Stragglers(work=0)}, r"^stragglers.work is 0, expected a share above 0 and at most 1\.$"),
        ({"stragglers": 0.3}, r"^stragglers is 0.3, expected a Stragglers"),
        (
            {"algorithm": "adafbio", "stragglers": fb.Stragglers(slow=0.5)},
            r"^adafbio has no numbers of local steps by client, which slow clients need: leave stragglers.slow out",
        ),
        (
            {"num_local_steps": (5,) * 7, "stragglers": fb.Stragglers(slow=0.5)},
            r"^num_local_steps is \(5, 5, 5, 5, 5, 5, 5\), one number per client, and stragglers.slow is 0.5: give one",
        ),
        (
            {"algorithm": "fedavg", "num_local_epochs": 2, "stragglers": fb.Stragglers(slow=0.5)},
            r"^num_local_epochs is 2, and slow clients take a part of num_local_steps: give num_local_steps instead\.$",
        ),
        (
            {"algorithm": "clustered_fl", "stragglers": fb.Stragglers(dropout=0.5)},
            r"^clustered_fl needs every client in every round, but stragglers.dropout is 0.5: leave it out\.$",
        ),
        ({"algorithm": "hgp", "stragglers": fb.Stragglers(dropout=0.5)}, r"^hgp runs between peers without a server "),
    ],
)
def test_stragglers_that_make_no_sense_are_refused(more, sentence):
    with pytest.raises(SettingError, match=sentence):
        run(**more)
