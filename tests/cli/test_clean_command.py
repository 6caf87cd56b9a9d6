"""The command `clean`: from folders of images to suspects, tables and a page."""

from __future__ import annotations

import csv
import io
import re
import shlex

import numpy as np
import pytest
from click.testing import CliRunner
from rich.console import Console

import fedbilevel as fb
from fedbilevel.algorithms.fedavg import FedAvg
from fedbilevel.cli import clean
from fedbilevel.cli.main import cli
from fedbilevel.data.folders import write_folder
from fedbilevel.detectors.label_em import LabelEM
from fedbilevel.errors import CheckpointError, ProblemError, SettingError
from fedbilevel.report.cleaning_tables import cleaning
from fedbilevel.tasks.data_cleaning import DataCleaning
from support.stops import ctrl_c

SMALL = ["--num-clients", "3", "--noise", "0.2", "--test-share", "0.5", "--num-clean", "20"]


def invoke(*words):
    return CliRunner().invoke(cli, ["clean", *map(str, words)], catch_exceptions=False)


def test_built_in_data_give_tables_files_and_a_page(tmp_path):
    found = invoke(*SMALL, "--out", tmp_path / "run", "--num-listed", 3, "--own-noise")
    assert found.exit_code == 0
    assert "wrong, estimated" in found.output
    assert "Most suspicious labels" in found.output
    assert "labels are flagged as wrong" in found.output
    assert "No clean sample shows 3, 4, 5, 6, 7, 8, 9" in found.output  # three clients with a class each
    rows = list(csv.DictReader((tmp_path / "run" / "suspects" / "client-1.csv").read_text().splitlines()))
    assert set(rows[0]) == {"file", "sample", "label", "suggested", "probability", "flagged"}
    assert "wrong, true" in found.output
    assert '"Most suspicious labels"' in (tmp_path / "run" / "report.html").read_text()
    again = invoke(*SMALL, "--out", tmp_path / "run", "--own-noise", "--resume")
    assert again.exit_code == 0


def test_folders_of_images_name_clients_classes_and_files(tmp_path):
    image = pytest.importorskip("PIL.Image")
    rng = np.random.default_rng(0)
    for client in ("ann", "bob"):
        for role, num in (("train", 30), ("val", 12)):
            for number in range(2 * num):
                kind = ("dark", "light")[number % 2]
                noted = "light" if role == "train" and number in (0, 2) else kind
                place = tmp_path / "data" / client / role / noted / f"{number}.png"
                place.parent.mkdir(parents=True, exist_ok=True)
                level = {"dark": 40, "light": 200}[kind] + rng.integers(-40, 40, (8, 8))
                image.fromarray(level.astype(np.uint8)).save(place)
    found = invoke(tmp_path / "data", "--out", tmp_path / "run", "--features", "given")
    assert found.exit_code == 0
    rows = list(csv.DictReader((tmp_path / "run" / "suspects" / "bob.csv").read_text().splitlines()))
    assert {row["file"] for row in rows[:2]} == {"train/light/0.png", "train/light/2.png"}
    assert [(row["label"], row["suggested"], row["flagged"]) for row in rows[:2]] == [("light", "dark", "1")] * 2
    assert rows[2]["flagged"] == "0"
    assert "dark labelled light" in found.output
    assert "wrong, true" not in found.output
    assert "truth" not in found.output
    page = (tmp_path / "run" / "report.html").read_text()
    assert '"client_names":["ann","bob"]' in page
    assert '"held by":"bob","file":"train/light/0.png"' in page
    assert "really wrong" not in page
    with pytest.raises(SettingError, match="--num-classes is 3, but folders of images say how many classes there are"):
        invoke(tmp_path / "data", "--num-classes", 3)


def test_no_flags_leave_no_table_of_suspects(tmp_path):
    rng = np.random.default_rng(0)
    for client in ("ann", "bob"):
        roles = {}
        for role in ("train", "val"):
            label = np.arange(30) % 2
            roles[role] = {"image": rng.normal(size=(30, 4)) + 9 * label[:, None], "label": label}
        write_folder(tmp_path / "data" / client, roles)
    found = invoke(tmp_path / "data", "--out", tmp_path / "run", "--flag", "rate")
    assert "0 of 60 labels are flagged" in found.output
    assert "Most suspicious labels" not in found.output


def test_files_of_labels_without_class_0_need_the_number_of_classes(tmp_path):
    rng = np.random.default_rng(0)
    for client in ("ann", "bob"):
        label = 1 + np.arange(60) % 2
        write_folder(
            tmp_path / "data" / client,
            {"train": {"image": rng.normal(size=(60, 4)) + 9 * label[:, None], "label": label}},
        )
    words = [tmp_path / "data", "--out", tmp_path / "run"]
    with pytest.raises(ProblemError, match=r"labels are from 1 to 2, .*\(num_classes\) if class 0 has no samples"):
        invoke(*words)
    found = invoke(*words, "--num-classes", 3)
    assert found.exit_code == 0
    assert "of 120 labels are flagged" in found.output
    assert invoke(*words, "--num-classes", 1).exit_code == 2


def test_refusals(tmp_path):
    with pytest.raises(SettingError, match="leave one of both out"):
        invoke(tmp_path, "--noise", "0.2")
    with pytest.raises(SettingError, match="--num-classes is 3, but built-in data say how many classes there are"):
        invoke("--num-classes", 3)
    with pytest.raises(SettingError, match="add --out FOLDER"):
        invoke("--resume")


def test_the_list_shows_detectors():
    shown = CliRunner().invoke(cli, ["list"]).output
    assert "Detectors of wrong labels" in shown
    assert all(name in shown for name in ("label_em", "confident", "own_loss", "as_given"))
    assert "_scored" not in shown


@pytest.mark.parametrize("named", [True, False])
def test_ctrl_c_names_the_command_that_resumes(tmp_path, monkeypatch, named):
    monkeypatch.chdir(tmp_path)
    out = ["--out", "my runs/c"] if named else []
    with monkeypatch.context() as patch:
        ctrl_c(patch, LabelEM)
        stopped = invoke(*SMALL, *out)
    assert stopped.exit_code == 130
    assert "flagged" not in stopped.output
    [command] = re.findall(r"Stopped\. To resume: (.*)", stopped.output)
    words = shlex.split(command)
    folder = words[words.index("--out") + 1]
    assert words == ["fedbilevel", "clean", *SMALL, "--out", folder, "--resume"]
    with pytest.raises(CheckpointError) as told:
        CliRunner().invoke(cli, ["resume", folder], catch_exceptions=False)
    assert command in str(told.value)
    resumed = CliRunner().invoke(cli, words[1:], catch_exceptions=False)
    assert resumed.exit_code == 0
    assert "labels are flagged as wrong" in resumed.output


def test_ctrl_c_before_the_first_checkpoint_promises_nothing(tmp_path, monkeypatch):
    def stop(*given, **more):
        raise KeyboardInterrupt

    monkeypatch.setattr(clean, "clean_labels", stop)
    stopped = invoke(*SMALL, "--out", tmp_path / "run")
    assert stopped.exit_code == 130
    assert "Stopped before anything was saved." in stopped.output


def test_a_cleaning_from_python_is_resumed_there(tmp_path):
    clients = DataCleaning(num_clients=3, noise=0.2, test_share=0.5, num_clean=20).build().clients
    fb.clean_labels(clients, record=tmp_path, callbacks=[lambda progress: True])
    with pytest.raises(CheckpointError, match=r"which was started from Python: use clean_labels"):
        CliRunner().invoke(cli, ["resume", str(tmp_path)], catch_exceptions=False)


@pytest.mark.parametrize("wide", [False, True])
def test_the_terminal_shows_how_classes_are_mislabelled(tmp_path, wide):
    clients = DataCleaning(num_clients=3, noise=0.2, test_share=0.5, num_clean=20).build().clients
    names = [f"a class with the name {i}" for i in range(10)] if wide else None
    found = fb.clean_labels(clients, class_names=names)
    console = Console(width=200, file=io.StringIO())
    console.print(cleaning(found, 0)[1])
    lines = [line.split() for line in console.file.getvalue().splitlines() if line.strip()]
    if not wide:
        wanted = [f"{100 * value:.0f}" for value in found.transition[4]]
        assert ["4", *wanted] in lines
        return
    off = found.transition - np.diag(np.diag(found.transition))
    true, given = divmod(int(off.argmax()), 10)
    top = f"a class with the name {true} a class with the name {given} {off.max():.1%}"
    assert " ".join(lines[3]) == top
    assert len(lines) == 3 + 12


def test_a_stop_while_a_network_is_trained_can_be_resumed(tmp_path, monkeypatch):
    words = [*SMALL, "--features", "trained", "--out", tmp_path / "run", "--num-listed", 0]
    with monkeypatch.context() as patch:
        ctrl_c(patch, FedAvg)
        stopped = invoke(*words)
    assert stopped.exit_code == 130
    assert "network: begins" in stopped.output
    assert "label_em" not in stopped.output.split("Stopped. To resume: ")[0]
    told = re.escape(f"repeat the command of the cleaning, with --out {tmp_path / 'run'} --resume.")
    with pytest.raises(CheckpointError, match=told):
        CliRunner().invoke(cli, ["resume", str(tmp_path / "run")], catch_exceptions=False)
    resumed = invoke(*words, "--resume")
    assert resumed.exit_code == 0
    assert "network: outer iteration 100/100" in resumed.output
    assert "label_em: outer iteration" in resumed.output
    assert "labels are flagged as wrong" in resumed.output
