"""The algorithm that "auto" stands for, in every place that takes the name of an algorithm."""

from __future__ import annotations

import pytest
import torch
from click.testing import CliRunner

import fedbilevel as fb
from fedbilevel.cli.main import cli
from fedbilevel.errors import PlanError, SettingError, UnknownNameError
from fedbilevel.federation.network import Network
from fedbilevel.runs.record import Record
from fedbilevel.runs.runfile import parts_of
from fedbilevel.tasks.quadratic import Quadratic

TASK = Quadratic(num_clients=3, num_samples=4)
SAID = "auto: self_tuned, because"


def test_solve_without_an_algorithm_is_self_tuned_and_says_so_once(capsys):
    chosen = fb.solve(*TASK.build(), num_rounds=5, dtype=torch.float64)
    assert capsys.readouterr().err.count(SAID) == 1
    named = fb.solve(*TASK.build(), "self_tuned", num_rounds=5, dtype=torch.float64)
    assert capsys.readouterr().err == ""
    assert (chosen.name, chosen.rows[-1]["upper_loss"]) == ("self_tuned", named.rows[-1]["upper_loss"])


def test_settings_beside_auto_go_to_the_chosen_algorithm():
    problem, clients = TASK.build()
    fixed = fb.solve(problem, clients, num_rounds=5, learn_x=False)
    assert all(torch.equal(fixed.x[name], problem.x0[name]) for name in fixed.x)


def test_a_setting_that_only_other_algorithms_have_is_refused_with_the_name_of_one():
    with pytest.raises(
        SettingError, match=r"self_tuned, which auto chose, has no setting 'lr_upper': .* 'fedbio', lr_"
    ):
        fb.solve(*TASK.build(), lr_upper=0.1)
    with pytest.raises(UnknownNameError, match="There is no option of solve"):
        fb.solve(*TASK.build(), nothing=0.1)
    with pytest.raises(UnknownNameError, match="setting of self_tuned named 'lr_upper'"):  # the user named it
        fb.solve(*TASK.build(), "self_tuned", lr_upper=0.1)


def test_a_network_chooses_hgp_with_measured_steps(capsys):
    found = fb.solve(*TASK.build(), network=Network(kind="ring"), num_iterations=2, dtype=torch.float64)
    assert found.name == "hgp"
    assert set(found.steps) == {"lr_upper", "lr_lower", "lr_system"}
    assert "auto: hgp, because" in capsys.readouterr().err


def test_a_run_of_auto_resumes_under_the_chosen_name(tmp_path):
    whole = fb.solve(*TASK.build(), num_iterations=6, dtype=torch.float64)
    fb.solve(*TASK.build(), num_iterations=3, dtype=torch.float64, record=tmp_path / "run")
    assert Record(tmp_path / "run").read_config()["identity"]["algorithm"] == "self_tuned"
    rest = fb.solve(*TASK.build(), num_iterations=6, dtype=torch.float64, record=tmp_path / "run", resume=True)
    assert all(torch.equal(rest.x[name], whole.x[name]) for name in whole.x)


def test_compare_shows_the_chosen_name(capsys):
    found = fb.compare(TASK, ["auto", "fedbio"], num_rounds=3, repetitions=1)
    assert [one.name for one in found.outcomes] == ["self_tuned", "fedbio"]
    assert SAID in capsys.readouterr().err


@pytest.mark.parametrize("table", ["", '[algorithm]\nname = "auto"\n'], ids=["left out", "named"])
def test_a_run_file_chooses_alike(tmp_path, table):
    file = tmp_path / "run.toml"
    file.write_text(f'num_iterations = 2\n[task]\nname = "quadratic"\nnum_clients = 3\n{table}')
    done = CliRunner().invoke(cli, ["run", "--config", str(file), "--out", str(tmp_path / "run")])
    assert done.exit_code == 0, done.output
    assert SAID in done.stderr
    assert Record(tmp_path / "run").read_config()["identity"]["algorithm"] == "self_tuned"


def test_a_network_flag_chooses_hgp(tmp_path):
    words = ["run", "quadratic", "--num-clients", "3", "--network", "ring", "--num-iterations", "1"]
    done = CliRunner().invoke(cli, [*words, "--out", str(tmp_path / "run")])
    assert done.exit_code == 0, done.output
    identity = Record(tmp_path / "run").read_config()["identity"]
    assert (identity["algorithm"], identity["settings"]["lr_upper"]) == ("hgp", "auto")


def test_a_plan_between_sites_needs_no_algorithm_and_a_plan_between_peers_does():
    content = {"name": "run", "task": {"name": "quadratic"}}
    assert parts_of(content, "sites")["algorithm"]["name"] == "self_tuned"
    with pytest.raises(PlanError, match="the plan has no algorithm"):
        parts_of(content, "peers")


def test_suggestions_for_all_algorithms_are_not_for_self_tuned():
    assert "num_local_steps" in Quadratic.suggestions("fedbio")
    assert Quadratic.suggestions("self_tuned") == {}
