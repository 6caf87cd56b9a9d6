"""What the operator of a site decides: requests, approvals, pauses, and the commands for them."""

import json
import os
import re
import stat
import threading

import pytest
from click.testing import CliRunner

from fedbilevel.cli.main import cli
from fedbilevel.errors import PlanError, PolicyError, SettingError, UnknownNameError
from fedbilevel.sites import operator, verification
from fedbilevel.sites.chain import LEFT
from support.sites.operator_kits import LEAVES, ONE, PLAN, TWO, ask, digest_of, log_answers, log_refusal


def type_(*words):
    return CliRunner().invoke(cli, ["federation", *map(str, words)])


def test_a_plan_waits_until_somebody_decides(folder):
    assert (operator.pending(folder), operator.decision(folder, ONE)) == ([], None)
    ask(folder)
    ask(folder, TWO, run="other")
    assert [one["run"] for one in operator.pending(folder)] == ["cleaning", "other"]
    wanted = {"digest": ONE, "who": "lead@north.example", "plan": PLAN, "leaves": LEAVES}
    assert operator.pending(folder)[0].items() >= wanted.items()
    operator.approve(folder, ONE, "ada")
    assert operator.decision(folder, ONE) == "approved"
    operator.refuse(folder, TWO[:8], "ada")
    assert (operator.decision(folder, TWO), operator.pending(folder)) == ("refused", [])
    entry = json.loads((folder / operator.APPROVALS).read_text())[ONE]
    assert entry.items() >= {"by": "ada", "how": "operator", "decision": "approved"}.items()


def test_a_request_that_comes_again_keeps_its_time_and_its_decision(folder):
    ask(folder)
    time = operator.pending(folder)[0]["time"]
    ask(folder, who="somebody else")
    assert [(one["time"], one["who"]) for one in operator.pending(folder)] == [(time, "lead@north.example")]
    operator.refuse(folder, ONE, "ada")
    ask(folder)
    assert operator.pending(folder) == []
    operator.approve(folder, ONE, "ada")
    assert operator.decision(folder, ONE) == "approved"


def test_an_approval_by_the_sites_settings_is_marked(folder):
    ask(folder)
    operator.approve(folder, ONE, "auto_approve", how="auto")
    assert json.loads((folder / operator.APPROVALS).read_text())[ONE]["how"] == "auto"


def test_leaving_a_run_ends_all_of_its_plans(folder):
    ask(folder)
    ask(folder, TWO, num_iterations=20)
    operator.approve(folder, ONE, "ada")
    assert [one["digest"] for one in operator.leave(folder, "cleaning", "ada")] == [ONE, TWO]
    assert [operator.decision(folder, one) for one in (ONE, TWO)] == ["left", "left"]


def test_a_pause_lasts_until_it_is_ended(folder):
    assert operator.is_paused(folder) is False
    operator.pause(folder)
    assert operator.is_paused(folder) is True
    operator.unpause(folder)
    assert operator.is_paused(folder) is False


def test_a_decision_is_seen_at_once_and_read_once(folder, monkeypatch):
    ask(folder)
    for what, wanted in ((operator.approve, "approved"), (operator.refuse, "refused"), (operator.approve, "approved")):
        what(folder, ONE, "ada")
        assert operator.decision(folder, ONE) == wanted
    monkeypatch.setattr(operator.json, "loads", lambda _: pytest.fail("a file was read again"))
    assert operator.decision(folder, ONE) == "approved"


def test_all_files_are_their_owners_only(folder):
    ask(folder)
    operator.approve(folder, ONE, "ada")
    operator.pause(folder)
    places = [folder / operator.APPROVALS, folder / operator.CONTROL, folder / operator.REQUESTS / f"{ONE}.json"]
    assert {stat.S_IMODE(place.stat().st_mode) for place in places} == {0o600}
    assert stat.S_IMODE((folder / operator.REQUESTS).stat().st_mode) == 0o700


def test_names_of_other_parties_are_kept_without_control_characters(folder):
    ask(folder, who="\x1b[2Jlead\n", run="clean\u202eing")
    [one] = operator.pending(folder)
    assert (one["who"], one["run"]) == ("\\x1b[2Jlead\\n", "clean\\u202eing")


def test_two_simultaneous_decisions_are_both_kept(folder):
    ask(folder)
    ask(folder, TWO)

    def often(digest):
        for _ in range(20):
            operator.approve(folder, digest, "ada")
            operator.refuse(folder, digest, "ada")

    threads = [threading.Thread(target=often, args=[digest]) for digest in (ONE, TWO)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [operator.decision(folder, digest) for digest in (ONE, TWO)] == ["refused", "refused"]


# ---- what is refused -----------------------------------------------------------------------------


def test_a_digest_is_found_by_its_beginning_if_only_one_fits(folder):
    twin = ONE[:10] + TWO[10:]
    with pytest.raises(SettingError, match="no plan was submitted"):
        operator.approve(folder, ONE, "ada")
    ask(folder)
    with pytest.raises(SettingError, match="at least its first 8 characters"):
        operator.approve(folder, ONE[:7], "ada")
    with pytest.raises(UnknownNameError, match=f"Did you mean '{ONE[:12]}'"):
        operator.approve(folder, ONE[:11] + "x", "ada")
    ask(folder, twin)
    with pytest.raises(SettingError, match="2 plans have a digest that begins with"):
        operator.refuse(folder, ONE[:10], "ada")
    operator.approve(folder, ONE[:11].upper(), "ada")
    assert [operator.decision(folder, one) for one in (ONE, twin)] == ["approved", None]


def test_only_a_submitted_run_can_be_left(folder):
    with pytest.raises(SettingError, match="no run was submitted"):
        operator.leave(folder, "cleaning", "ada")
    ask(folder)
    with pytest.raises(UnknownNameError, match="Did you mean 'cleaning'"):
        operator.leave(folder, "cleanin", "ada")


@pytest.mark.parametrize("digest", ["../../approvals", "", ONE[:63], ONE.upper()])
def test_an_invalid_digest_makes_no_file(folder, digest):
    with pytest.raises(PlanError, match="expected 64 hexadecimal digits"):
        ask(folder, digest)
    with pytest.raises(PlanError, match="expected 64 hexadecimal digits"):
        operator.decision(folder, digest)
    assert list(folder.iterdir()) == []


def test_plans_that_wait_do_not_fill_the_disk(folder, monkeypatch):
    monkeypatch.setattr(operator, "MOST", 2)
    ask(folder)
    ask(folder, TWO)
    with pytest.raises(PolicyError, match="2 plans wait for approval"):
        ask(folder, digest_of("three"))
    ask(folder)
    operator.refuse(folder, ONE, "ada")
    ask(folder, digest_of("three"))


@pytest.mark.parametrize("content", ["{", "[]", '"approved"', "\xff"])
def test_a_damaged_file_is_never_a_permission(folder, content):
    ask(folder)
    operator.approve(folder, ONE, "ada")
    for name in (operator.APPROVALS, operator.CONTROL):
        (folder / name).write_bytes(content.encode("latin-1"))
    with pytest.raises(PlanError, match=r"approvals\.json cannot be read"):
        operator.decision(folder, ONE)
    with pytest.raises(PlanError, match=r"control\.json cannot be read"):
        operator.is_paused(folder)


@pytest.mark.parametrize("entry", ['{"paused": 0}', '{"paused": null}', '{"paused": "no"}'])
def test_any_other_value_of_paused_counts_as_a_pause(folder, entry):
    (folder / operator.CONTROL).write_text(entry)
    assert operator.is_paused(folder) is True


# ---- commands ------------------------------------------------------------------------------------


def logged(folder):
    log_answers(folder)
    log_refusal(folder, caller="we\x1bst")


def test_audit_says_that_the_log_is_whole_and_what_left(kit, folder):
    logged(folder)
    done = type_("audit", "--kit", kit)
    assert done.exit_code == 0
    assert done.output.startswith("The log is whole: 4 lines, from ")
    for part in ("cleaning", "1.50", "y: 3, 3.5", "we\\x1bst was refused 1 time:", "Last chain value: "):
        assert part in done.output
    assert "\x1b" not in done.output


def test_audit_of_a_changed_log_names_the_line_and_exits_with_1(kit, folder):
    logged(folder)
    place = folder / LEFT
    place.write_bytes(place.read_bytes().replace(b'"norm": 2.5', b'"norm": 0.5'))
    done = type_("audit", "--kit", kit)
    assert done.exit_code == 1
    assert "The log is broken: line 2 of left.jsonl does not continue the chain" in done.output


def test_audit_looks_for_a_chain_value_that_was_noted(kit, folder):
    logged(folder)
    noted = re.search(r"Last chain value: (\w{64})\n", type_("audit", "--kit", kit).output)[1]
    kept = {path: path.read_bytes() for path in folder.glob("left*")}
    log_refusal(folder)
    for value in (noted, noted[:16]):
        assert type_("audit", "--kit", kit, "--contains", value).exit_code == 0
    later = json.loads(type_("audit", "--kit", kit, "--json").output)["chain"]
    for path, content in kept.items():
        path.write_bytes(content)
    assert type_("audit", "--kit", kit).exit_code == 0
    done = type_("audit", "--kit", kit, "--contains", later)
    assert done.exit_code == 1
    assert f"The log is broken: no line has the chain value {later}: lines were removed, or an older" in done.output


@pytest.mark.parametrize("value", ["abcdef", "x" * 64, "0" * 15, "0" * 65])
def test_audit_refuses_an_invalid_chain_value(kit, value):
    done = type_("audit", "--kit", kit, "--contains", value)
    assert isinstance(done.exception, SettingError)
    assert f"--contains is '{value}', expected the last chain value of an earlier audit" in str(done.exception)


def test_audit_counts_lines_from_before_the_chain_and_callers_beyond_the_first(kit, folder, monkeypatch):
    (folder / LEFT).write_text('{"run": "old", "arrays": []}\n')
    monkeypatch.setattr(verification, "CALLERS", 1)
    for caller in ("west", "west", "east", "south"):
        log_refusal(folder, caller=caller)
    said = type_("audit", "--kit", kit).output
    assert "The log is whole: 5 lines, 1 of them from before there was a chain, from " in said
    assert "west was refused 2 times" in said
    assert "Others were refused 2 times." in said
    assert "east" not in said


def test_audit_as_json_has_all_of_the_report(kit, folder):
    logged(folder)
    os.truncate(folder / LEFT, (folder / LEFT).stat().st_size - 10)
    done = type_("audit", "--kit", kit, "--json")
    assert done.exit_code == 1
    report = json.loads(done.output)
    assert (report["ok"], report["num_lines"], report["runs"]["cleaning"]["rounds"]) == (False, 3, 3)
    assert report["notes"] == []
    assert "left.head counts 4 lines, the log has 3" in report["problem"]


def test_a_kit_that_is_not_a_sites_kit_is_refused(tmp_path):
    done = type_("audit", "--kit", tmp_path)
    assert isinstance(done.exception, SettingError)
    assert "is not the kit of a site" in str(done.exception)


def test_requests_are_listed_with_the_command_that_approves_them(kit, folder):
    assert type_("requests", "--kit", kit).output == "Nothing waits for approval.\n"
    ask(folder, who="le\x1bad")
    said = type_("requests", "--kit", kit).output
    assert said.startswith(f"{ONE[:12]}  cleaning, sent by le\\x1bad, since ")
    assert said.endswith(f": fedbilevel federation approve {ONE[:12]} --kit {kit}\n")


def test_approve_shows_the_whole_plan_before_it_decides(kit, folder):
    ask(folder, options={"seed": 1, "no\x1bte": "[red]x[/red]"})
    done = type_("approve", ONE[:8], "--kit", kit, "--yes")
    assert done.exit_code == 0
    said = done.output
    for part in ("cleaning", "lead@north.example", ONE, "data_cleaning", "num_classes = 10", "fbo_aggitd",
                 "lr_upper = 0.1", "seed = 1", "10 outer iterations, measured every 5", "north, south",
                 "lower_steps: 3250 numbers", "partial_grad: 459 numbers",
                 "7 rounds in each outer iteration, 70 in all", "3709 numbers in each outer iteration, 0.1 MB in all",
                 "x of the solution",
                 "no\\x1bte = [red]x[/red]", "cleaning is approved."):  # fmt: skip
        assert part in said
    assert "\x1b" not in said
    assert operator.decision(folder, ONE) == "approved"


def test_approve_asks_a_person_and_obeys_a_no(kit, folder, monkeypatch):
    ask(folder)
    done = type_("approve", ONE, "--kit", kit)
    assert "add --yes" in str(done.exception)
    monkeypatch.setattr("fedbilevel.cli.operator._is_terminal", lambda: True)
    for typed, wanted in (("\n", None), ("n\n", None), ("y\n", "approved")):
        CliRunner().invoke(cli, ["federation", "approve", ONE, "--kit", str(kit)], input=typed)
        assert operator.decision(folder, ONE) == wanted
    again = type_("approve", ONE, "--kit", kit, "--yes").output
    assert "So far it is approved, by " in again


def test_refuse_leave_pause_and_unpause_say_what_they_did(kit, folder):
    ask(folder)
    assert type_("refuse", ONE[:8], "--kit", kit).output == "cleaning is refused.\n"
    assert operator.decision(folder, ONE) == "refused"
    said = type_("leave", "cleaning", "--kit", kit).output
    assert said.endswith(f"To take part again: fedbilevel federation approve {ONE[:12]} --kit {kit}\n")
    assert operator.decision(folder, ONE) == "left"
    assert type_("pause", "--kit", kit).output.startswith("This site is paused.")
    assert operator.is_paused(folder)
    assert type_("unpause", "--kit", kit).output == "This site answers again.\n"
    assert not operator.is_paused(folder)


def test_a_decision_names_its_user_even_if_the_user_has_no_name(kit, folder, monkeypatch):
    def nameless():
        raise KeyError("no such user")

    ask(folder)
    monkeypatch.setattr("getpass.getuser", nameless)
    type_("refuse", ONE, "--kit", kit)
    assert operator.requests(folder)[0]["by"] == f"user {os.getuid()}"


def test_a_file_among_the_requests_that_is_not_a_request_is_named(folder):
    ask(folder)
    whole = json.loads((folder / operator.REQUESTS / f"{ONE}.json").read_text())
    for content in ({}, {**whole, "digest": TWO, "time": "x"}):
        (folder / operator.REQUESTS / f"{TWO}.json").write_text(json.dumps(content))
        with pytest.raises(PlanError, match="is not the request of a site's job"):
            operator.pending(folder)
