"""The layer in run files and on the command line."""

import json

import pytest
from click.testing import CliRunner

from fedbilevel.cli.main import cli
from fedbilevel.errors import PlanError
from fedbilevel.runs.options import keywords
from fedbilevel.runs.runfile import read_run_file

START = 'num_iterations = 2\n[task]\nname = "quadratic"\n[algorithm]\nname = "fedbio"\n'
LAYER = '[aggregation]\nclip = 1.0\ncompress = "int8"\n[aggregation.sequences.u]\nclip = 5.0\n'


def run(*args):
    return CliRunner().invoke(cli, ["run", *args], catch_exceptions=False)


def config(folder):
    return json.loads((folder / "config.json").read_text())


def test_a_run_file_has_the_layer_as_a_table(tmp_path):
    (tmp_path / "run.toml").write_text(START + LAYER)
    assert run("--config", str(tmp_path / "run.toml"), "--out", str(tmp_path / "one")).exit_code == 0
    found = config(tmp_path / "one")["identity"]["aggregation"]
    assert (found["clip"], found["compress"], found["sequences"]) == (1.0, "int8", {"u": {"clip": 5.0}})


def test_the_record_of_a_run_repeats_it(tmp_path):
    (tmp_path / "run.toml").write_text(START + LAYER)
    run("--config", str(tmp_path / "run.toml"), "--out", str(tmp_path / "one"))
    again = run("--config", str(tmp_path / "one" / "run.toml"), "--out", str(tmp_path / "two"))
    assert again.exit_code == 0
    assert config(tmp_path / "one")["identity"] == config(tmp_path / "two")["identity"]
    same = [(tmp_path / name / "solution.safetensors").read_bytes() for name in ("one", "two")]
    assert same[0] == same[1]


def test_flags_set_and_replace_the_layer(tmp_path):
    (tmp_path / "run.toml").write_text(START + LAYER)
    flags = ["--aggregation-clip", "2", "--aggregation-sequences", "u.clip=3,y.compress=none", "--attack", "scaling"]
    assert run("--config", str(tmp_path / "run.toml"), *flags, "--out", str(tmp_path / "one")).exit_code == 0
    identity = config(tmp_path / "one")["identity"]
    assert identity["aggregation"]["clip"] == 2.0
    assert identity["aggregation"]["compress"] == "int8"
    assert identity["aggregation"]["sequences"] == {"u": {"clip": 3.0}, "y": {"compress": "none"}}
    assert identity["attack"]["kind"] == "scaling"


def test_a_run_without_the_layer_has_no_trace_of_it(tmp_path):
    run("quadratic", "--algorithm", "fedbio", "--num-iterations", "1", "--out", str(tmp_path / "one"))
    assert "aggregation" not in (tmp_path / "one" / "config.json").read_text()
    assert "aggregation" not in (tmp_path / "one" / "run.toml").read_text()


def test_a_resumed_run_keeps_the_layer(tmp_path):
    (tmp_path / "run.toml").write_text(START + LAYER)
    run("--config", str(tmp_path / "run.toml"), "--out", str(tmp_path / "one"))
    run("--config", str(tmp_path / "run.toml"), "--out", str(tmp_path / "two"), "--num-iterations", "4")
    done = CliRunner().invoke(cli, ["resume", str(tmp_path / "one"), "--num-iterations", "4"], catch_exceptions=False)
    assert done.exit_code == 0
    same = [(tmp_path / name / "solution.safetensors").read_bytes() for name in ("one", "two")]
    assert same[0] == same[1]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (START + LAYER + "[options.aggregation]\nclip = 2.0\n", "has aggregation and options.aggregation"),
        (START.replace("fedbio", "sgp") + "[options.attack]\n", "options.attack in .* is for algorithms with a server"),
    ],
)
def test_tables_that_cannot_be_used_are_refused(tmp_path, text, said):
    (tmp_path / "run.toml").write_text(text)
    with pytest.raises(PlanError, match=said):
        read_run_file(tmp_path / "run.toml")


def test_a_flag_without_a_setting_is_refused(tmp_path):
    bad = run("quadratic", "--algorithm", "fedbio", "--aggregation-sequences", "u=5", "--out", str(tmp_path / "one"))
    assert bad.exit_code != 0
    assert "'u=5' names no setting of a sequence" in bad.output


def test_options_hold_the_layer():
    found = keywords({"aggregation": {"clip": 1.0}, "attack": {"kind": "little", "share": 0.1}})
    assert found["aggregation"].clip == 1.0
    assert found["attack"].share == 0.1
