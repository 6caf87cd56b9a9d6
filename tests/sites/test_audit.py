"""The audit log of a site: what is appended is found again, and what is changed afterwards is
named."""

import dataclasses
import hashlib
import json
import os
import shutil
import stat
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedbilevel.sites import audit, chain
from fedbilevel.sites.audit import AuditLog
from fedbilevel.sites.chain import BEGUN, HEAD, LEFT, OLD, Head, read_head
from fedbilevel.sites.verification import TORN, lines, verify

ARRAY = {"name": "y", "shape": [3], "dtype": "float64", "norm": 2.5}
SMALL = 400  # bytes of a file: two lines


def answer(iteration, *, run="cleaning", norm=2.5):
    arrays = [{**ARRAY, "norm": norm}]
    return {"run": run, "kind": "phase", "phase": "lower_steps", "iteration": iteration, "bytes": 100, "arrays": arrays}


def filled(folder, num_lines=8, size=SMALL):
    log = AuditLog(folder, size=size)
    for number in range(num_lines):
        log.append(answer(number))
    return log


def files(folder):
    return [path for path in sorted(folder.glob("left-*.jsonl"))] + [folder / LEFT]


def raw_lines(folder):
    """Every line as (file, number in it)."""
    return [(path, number) for path in files(folder) for number in range(path.read_bytes().count(b"\n"))]


def rewrite(path, change):
    """change: from the list of lines to another."""
    content = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join(change(content)))


@pytest.fixture(scope="module")
def example(tmp_path_factory):
    """A log of several files. Tests copy it."""
    folder = tmp_path_factory.mktemp("log")
    filled(folder)
    assert len(files(folder)) == 4
    return folder


@pytest.fixture
def log(example, tmp_path):
    shutil.copytree(example, tmp_path / "log")
    return tmp_path / "log"


def test_lines_come_back_in_order_with_number_and_time_over_all_files(log):
    found = list(lines(log))
    assert [line["n"] for line in found] == list(range(1, 9))
    assert [line["iteration"] for line in found] == list(range(8))
    assert all(isinstance(line["time"], float) for line in found)
    report = verify(log)
    assert (report.ok, report.problem, report.notes, report.num_lines) == (True, "", [], 8)
    assert (report.first, report.last, report.chain) == (found[0]["time"], found[-1]["time"], found[-1]["chain"])


def test_the_chain_is_the_hash_of_the_chain_before_and_of_the_line_without_it(log):
    before = "0" * 64
    for line in lines(log):
        body = {name: value for name, value in line.items() if name != "chain"}
        before = hashlib.sha256(before.encode() + json.dumps(body).encode()).hexdigest()
        assert line["chain"] == before


def test_a_full_file_is_renamed_and_the_next_names_it(log):
    names = [path.name for path in files(log)]
    assert names == ["left-0001.jsonl", "left-0002.jsonl", "left-0003.jsonl", LEFT]
    firsts = [json.loads(path.read_text().splitlines()[0]).get("before") for path in files(log)]
    assert firsts == [None, *names[:3]]
    assert all(path.stat().st_size >= SMALL for path in files(log)[:-1])


def test_the_log_and_its_head_are_readable_by_their_owner_only(log):
    assert {stat.S_IMODE((log / name).stat().st_mode) for name in (LEFT, HEAD, BEGUN)} == {0o600}


def test_rounds_count_answers_with_arrays_over_all_runs_and_survive_a_restart(tmp_path):
    log = AuditLog(tmp_path)
    assert log.rounds == 0
    for line in (answer(0), answer(0, run="other"), {"run": "other", "kind": "commit", "bytes": 7, "arrays": []}):
        log.append(line)
    assert AuditLog(tmp_path).rounds == 2
    assert read_head(tmp_path).bytes == 207


def test_rounds_need_no_reading_of_the_log(log, monkeypatch):
    for module in (audit, chain):
        monkeypatch.setattr(module, "parsed", lambda _: pytest.fail("a line was read"))
    assert AuditLog(log).rounds == 8
    AuditLog(log).append(answer(8))


def test_a_summary_by_run_has_arrays_norms_refusals_and_callers(tmp_path):
    log = AuditLog(tmp_path)
    for iteration, norm in enumerate((1.0, 3.0, float("inf"))):
        log.append(answer(iteration, norm=norm))
    log.append({"run": "cleaning", "kind": "commit", "bytes": 10, "arrays": []})
    log.append({"run": "cleaning", "kind": "error", "text": "no", "bytes": 20, "arrays": []})
    log.append({"run": None, "kind": "error", "text": "no", "bytes": 5, "arrays": [], "caller": "west"})
    report = verify(tmp_path)
    summary = report.runs["cleaning"]
    assert (summary.answers, summary.rounds, summary.bytes, summary.refusals) == (4, 3, 330, 1)
    assert summary.arrays == {"y": {"count": 3, "largest_norm": 3.0}}
    assert (report.runs[""].refusals, report.callers) == (1, {"west": 1})
    assert json.loads(json.dumps(report.asdict()))["runs"]["cleaning"]["rounds"] == 3


def test_a_report_names_the_most_frequent_callers_and_counts_the_others(tmp_path):
    log = AuditLog(tmp_path)
    for number in range(30):
        log.append(
            {"run": None, "kind": "error", "bytes": 5, "arrays": [], "caller": f"c{number}", "times": number + 1}
        )
    report = verify(tmp_path)
    assert report.callers == {f"c{number}": number + 1 for number in range(29, 9, -1)}
    assert report.others == sum(range(1, 11))


# ---- changes -------------------------------------------------------------------------------------


@given(st.data())
def test_any_changed_byte_of_any_line_is_named(example, data):
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place) / "log"
        shutil.copytree(example, folder)
        path, number = data.draw(st.sampled_from(raw_lines(folder)))
        content = path.read_bytes().splitlines(keepends=True)
        line = bytearray(content[number])
        at = data.draw(st.integers(0, len(line) - 1))
        line[at] = data.draw(st.integers(0, 255).filter(lambda value: value != line[at]))
        path.write_bytes(b"".join([*content[:number], bytes(line), *content[number + 1 :]]))
        report = verify(folder)
        assert not report.ok
        at_end = path.name == LEFT and number == len(content) - 1
        named = [f"line {number + 1} of {path.name}", f"line {number + 2} of {path.name}", f"the end of {path.name}"]
        assert any(one in report.problem for one in named) or (at_end and "the end" in report.problem), report.problem


@pytest.mark.parametrize("number", range(8))
def test_a_removed_line_is_reported(log, number):
    path, place = raw_lines(log)[number]
    rewrite(path, lambda content: content[:place] + content[place + 1 :])
    report = verify(log)
    assert not report.ok
    assert "number" in report.problem or "the end is missing" in report.problem


@pytest.mark.parametrize("number", range(8))
def test_an_added_line_is_named(log, number):
    """A copy, a line of another log, and words."""
    path, place = raw_lines(log)[number]
    whole = path.read_bytes()
    own = json.loads(whole.splitlines()[place])
    next_one = json.dumps({**own, "n": own["n"] + 1}).encode()
    for added in (whole.splitlines()[place], next_one, b'{"run": "x"}', b"words"):
        path.write_bytes(whole)
        rewrite(path, lambda content, added=added: [*content[: place + 1], added + b"\n", *content[place + 1 :]])
        report = verify(log)
        assert not report.ok
        assert f"line {place + 2} of {path.name}" in report.problem or f"the end of {path.name}" in report.problem


def test_swapped_lines_are_named(log):
    path = files(log)[0]
    rewrite(path, lambda content: [content[1], content[0], *content[2:]])
    assert verify(log).problem.startswith("line 1 of left-0001.jsonl has number 2, expected 1")


@given(st.integers(1, 1000))
def test_a_cut_off_end_is_reported(example, num_bytes):
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place) / "log"
        shutil.copytree(example, folder)
        path = folder / LEFT
        os.truncate(path, max(0, path.stat().st_size - num_bytes))
        report = verify(folder)
        assert not report.ok
        assert "the end is missing" in report.problem
        AuditLog(folder).append(answer(99))  # what is appended later hides nothing
        complete = num_bytes == 1  # without its line break the line is whole, and the next append puts it back
        assert verify(folder).ok == complete


@pytest.mark.parametrize("name", ["left-0001.jsonl", "left-0002.jsonl", "left-0003.jsonl"])
def test_a_missing_full_file_is_named(log, name):
    (log / name).unlink()
    assert verify(log).problem.startswith(f"{name} is missing")


def test_a_missing_active_file_is_reported(log):
    (log / LEFT).unlink()
    assert "left.head counts 8 lines, the log has 6" in verify(log).problem
    assert AuditLog(log).rounds == 8


def test_full_files_with_swapped_names_are_reported(log):
    one, two, _, _ = files(log)
    one.rename(log / "aside")
    two.rename(one)
    (log / "aside").rename(two)
    assert verify(log).problem.startswith("line 1 of left-0001.jsonl has number")


@pytest.mark.parametrize("name", [field.name for field in dataclasses.fields(Head)])
def test_a_changed_head_is_reported(log, name):
    content = json.loads((log / HEAD).read_text())
    content[name] = "1" * 64 if name == "chain" else content[name] + 1
    (log / HEAD).write_text(json.dumps(content))
    assert not verify(log).ok


def test_a_missing_or_damaged_head_is_reported_even_after_more_lines(log):
    (log / HEAD).write_text("{")
    assert "left.head is missing or damaged" in verify(log).problem
    (log / HEAD).unlink()
    assert "left.head is missing or damaged" in verify(log).problem
    assert AuditLog(log).rounds == 8
    AuditLog(log).append(answer(8))
    report = verify(log)
    assert report.problem.startswith("line 3 of left.jsonl was written after left.head was lost")
    assert AuditLog(log).rounds == 9


def test_a_head_that_was_set_back_is_reported_even_after_more_lines(tmp_path):
    log = filled(tmp_path, 3, size=10**6)
    kept = (tmp_path / HEAD).read_bytes()
    log.append(answer(3))
    log.append(answer(4))
    (tmp_path / HEAD).write_bytes(kept)
    assert "left.head does not fit the log" in verify(tmp_path).problem
    log.append(answer(5))
    assert "was written after left.head was lost or set back" in verify(tmp_path).problem
    assert log.rounds == 6


def test_lines_appended_by_a_version_without_a_chain_are_named(log):
    with open(log / LEFT, "a") as file:
        file.write(json.dumps(answer(9)) + "\n")
    assert verify(log).problem.startswith("line 3 of left.jsonl is not as this log writes lines")
    AuditLog(log).append(answer(10))
    assert verify(log).problem.startswith("line 3 of left.jsonl is not as this log writes lines")


def strip(folder, name=LEFT, num_lines=2):
    """Leave the first lines as if there never was a chain."""
    kept = list(lines(folder))[:num_lines]
    for path in (*files(folder), folder / HEAD):
        path.unlink()
    bare = [{key: value for key, value in line.items() if key not in ("n", "chain", "before")} for line in kept]
    (folder / name).write_text("".join(json.dumps(line) + "\n" for line in bare))


def test_a_log_stripped_of_its_chain_is_reported_even_after_more_lines_and_its_rounds_count(log):
    strip(log)
    report = verify(log)
    assert (report.num_lines, report.num_unchained) == (2, 0)
    assert report.problem.startswith("line 1 of left.jsonl is not as this log writes lines")
    assert AuditLog(log).rounds == 2
    for number in range(3):
        AuditLog(log).append(answer(number))
        assert verify(log).problem.startswith("line 1 of left.jsonl is not as this log writes lines")
    assert (AuditLog(log).rounds, len(list(lines(log)))) == (5, 5)


def test_a_log_stripped_of_its_chain_and_renamed_as_old_is_reported_even_after_more_lines(log):
    strip(log, OLD)
    assert verify(log).problem == "no line has a chain, but left.begun says that lines had one: they were removed."
    AuditLog(log).append(answer(9))
    assert verify(log).problem.startswith("line 1 of left.jsonl was written after left.head was lost")
    assert AuditLog(log).rounds == 3


def test_a_log_with_only_its_marker_left_is_reported_even_after_more_lines(log):
    for path in (*files(log), log / HEAD):
        path.unlink()
    assert verify(log).problem == "no line has a chain, but left.begun says that lines had one: they were removed."
    for number in range(2):
        AuditLog(log).append(answer(number))
        assert verify(log).problem.startswith("line 1 of left.jsonl was written after left.head was lost")


def test_a_missing_marker_is_rewritten_with_the_next_line(log):
    (log / BEGUN).unlink()
    assert verify(log).ok
    AuditLog(log).append(answer(8))
    assert ((log / BEGUN).exists(), verify(log).ok) == (True, True)


def test_a_chain_value_noted_earlier_is_found_until_its_line_is_gone(log, tmp_path):
    shutil.copytree(log, tmp_path / "copy")
    AuditLog(log).append(answer(8))
    noted = verify(log).chain
    AuditLog(log).append(answer(9))
    for value in (noted, noted[:16], verify(tmp_path / "copy").chain):
        assert verify(log, contains=value).ok
    for other in (tmp_path / "copy", tmp_path):  # an older copy, and nothing at all
        report = verify(other, contains=noted)
        why = "lines were removed, or an older log was put in this place."
        assert (report.ok, report.problem) == (False, f"no line has the chain value {noted}: {why}")
        assert verify(other).ok


def test_a_chain_value_in_a_line_from_before_the_chain_does_not_count(tmp_path):
    noted = "ab" * 32
    (tmp_path / LEFT).write_text(json.dumps(answer(0)) + "\n" + json.dumps({**answer(1), "chain": noted}) + "\n")
    assert not verify(tmp_path, contains=noted).ok
    AuditLog(tmp_path).append(answer(2))
    assert (verify(tmp_path).ok, verify(tmp_path, contains=noted).ok) == (True, False)


@pytest.mark.parametrize("part", [{"norm": 10**400}, {"norm": "x"}, {}])
def test_values_of_wrong_types_in_a_line_are_ignored(log, part):
    AuditLog(log).append({**answer(8), "bytes": 10**400, "times": 10**400, "arrays": [part, 3], "time": 10**400})
    report = verify(log)
    assert (report.ok, report.num_lines, report.runs["cleaning"].bytes) == (True, 9, 800)


# ---- crashes, which are no changes ---------------------------------------------------------------


def test_a_crash_between_line_and_head_is_no_tampering(tmp_path):
    for num_lines in (1, 3):
        folder = tmp_path / str(num_lines)
        folder.mkdir()
        log = filled(folder, num_lines - 1, size=10**6)
        kept = (folder / HEAD).read_bytes() if num_lines > 1 else None
        log.append(answer(9))
        (folder / HEAD).write_bytes(kept) if kept else (folder / HEAD).unlink()
        assert verify(folder).ok
        assert log.rounds == num_lines
        log.append(answer(10))
        report = verify(folder)
        assert (report.ok, report.num_lines, log.rounds) == (True, num_lines + 1, num_lines + 1)


def test_a_crash_between_line_and_head_is_reported_in_a_note(tmp_path):
    log = filled(tmp_path, 2)
    kept = (tmp_path / HEAD).read_bytes()
    log.append(answer(3))
    (tmp_path / HEAD).write_bytes(kept)
    [note] = verify(tmp_path).notes
    assert note == "the last line was written when the site was cut off: its answer may not have left."


@pytest.mark.parametrize("num_bytes", [1, 2, 40, 200])
@pytest.mark.parametrize("before", [0, 2])
def test_a_torn_line_is_repaired_and_noted(tmp_path, num_bytes, before):
    """num_bytes that are missing: 1 is the line break alone, then the line is whole."""
    log = filled(tmp_path, before, size=10**6)
    kept, size = ((tmp_path / HEAD).read_bytes(), (tmp_path / LEFT).stat().st_size) if before else (None, 0)
    log.append(answer(before))
    os.truncate(tmp_path / LEFT, (tmp_path / LEFT).stat().st_size - num_bytes)
    assert (tmp_path / LEFT).stat().st_size > size
    if kept:
        (tmp_path / HEAD).write_bytes(kept)
    else:
        for name in (HEAD, BEGUN):  # which are written after the line
            (tmp_path / name).unlink()
    report = verify(tmp_path)
    assert (report.ok, report.num_lines) == (True, before)
    assert report.notes == [f"the end of left.jsonl is torn: {TORN}"]
    log.append(answer(before))
    report = verify(tmp_path)
    whole = num_bytes == 1
    assert (report.ok, report.num_lines, log.rounds) == (True, before + 1 + whole, before + 1 + whole)
    note = f"line {before + 2} of left.jsonl comes after a torn part: {TORN}"
    assert report.notes == ([] if whole else [note])


def test_a_torn_part_that_is_changed_or_removed_later_is_reported(tmp_path):
    log = filled(tmp_path, 2)
    with open(tmp_path / LEFT, "a") as file:
        file.write('{"n": 3, "ti')
    log.append(answer(2))
    assert verify(tmp_path).ok
    whole = (tmp_path / LEFT).read_bytes()
    (tmp_path / LEFT).write_bytes(whole.replace(b'{"n": 3, "ti\n', b'{"n": 3, "to\n'))
    assert verify(tmp_path).problem.startswith("line 3 of left.jsonl is no line of this log")
    (tmp_path / LEFT).write_bytes(whole.replace(b'{"n": 3, "ti\n', b""))
    assert verify(tmp_path).problem.startswith("line 3 of left.jsonl names a torn part before it")


def test_a_line_torn_twice_is_repaired(tmp_path):
    log = filled(tmp_path, 1)
    with open(tmp_path / LEFT, "a") as file:
        file.write('{"n": 2, "ti\n{"n": 2')
    log.append(answer(1))
    assert verify(tmp_path).ok


def test_a_crash_after_a_rotation_is_no_tampering(tmp_path):
    log = filled(tmp_path, 2, size=200)
    assert [path.name for path in files(tmp_path)] == ["left-0001.jsonl", LEFT]
    (tmp_path / LEFT).rename(tmp_path / "left-0002.jsonl")
    assert verify(tmp_path).ok
    log.append(answer(2))
    assert (verify(tmp_path).ok, log.rounds) == (True, 3)
    assert json.loads((tmp_path / LEFT).read_text())["before"] == "left-0002.jsonl"


def test_a_line_torn_at_the_start_of_a_file_is_repaired(tmp_path):
    log = filled(tmp_path, 2, size=200)
    (tmp_path / LEFT).rename(tmp_path / "left-0002.jsonl")
    (tmp_path / LEFT).write_text('{"n": 3')
    assert verify(tmp_path).ok
    log.append(answer(2))
    report = verify(tmp_path)
    assert (report.ok, log.rounds, len(report.notes)) == (True, 3, 1)


def test_a_full_disk_raises_and_the_log_continues_when_there_is_room(tmp_path):
    log = filled(tmp_path, 2, size=10**6)
    kept = (tmp_path / LEFT).rename(tmp_path / "aside")
    (tmp_path / LEFT).symlink_to("/dev/full")
    with pytest.raises(OSError, match="No space left"):
        log.append(answer(2))
    kept.rename(tmp_path / LEFT)
    log.append(answer(2))
    assert (verify(tmp_path).ok, log.rounds) == (True, 3)


def test_a_line_that_fits_in_part_only_is_an_error(tmp_path, monkeypatch):
    log, write = filled(tmp_path, 1), os.write
    with monkeypatch.context() as patch:
        patch.setattr(os, "write", lambda file, content: write(file, content[:30]))
        with pytest.raises(OSError, match="No space left"):
            log.append(answer(1))
    assert log.rounds == 1
    log.append(answer(1))
    assert (verify(tmp_path).ok, log.rounds) == (True, 2)


def test_a_head_that_cannot_be_written_is_an_error_and_the_log_is_never_two_lines_ahead(tmp_path):
    log = filled(tmp_path, 1, size=10**6)
    (tmp_path / f"{HEAD}.part").mkdir()
    for _ in range(3):
        with pytest.raises(OSError, match=r"left\.head"):
            log.append(answer(1))
    assert len(list(lines(tmp_path))) == 2
    (tmp_path / f"{HEAD}.part").rmdir()
    log.append(answer(2))
    assert (verify(tmp_path).ok, log.rounds) == (True, 3)


# ---- logs of before there was a chain ------------------------------------------------------------


def old(folder, num_lines=3):
    text = "".join(json.dumps({"time": 17.5, **answer(number)}) + "\n" for number in range(num_lines))
    (folder / LEFT).write_text(text + '{"time": 17')
    return AuditLog(folder)


UNCHAINED = f"{OLD} (3 lines) is from before there was a chain: changes made before that do not show."


def test_an_old_log_is_set_aside_and_its_rounds_count(tmp_path):
    log = old(tmp_path)
    assert (log.rounds, verify(tmp_path).num_lines) == (3, 3)
    log.append(answer(3))
    assert [path.name for path in files(tmp_path)] == [OLD, LEFT]
    report = verify(tmp_path)
    assert (report.ok, report.num_lines, log.rounds, report.runs["cleaning"].rounds) == (True, 4, 4, 4)
    assert (report.num_unchained, report.notes) == (3, [UNCHAINED])
    assert [line["iteration"] for line in lines(tmp_path)] == [0, 1, 2, 3]


def test_a_crash_while_an_old_log_is_set_aside_loses_nothing(tmp_path):
    log = old(tmp_path)
    (tmp_path / LEFT).rename(tmp_path / OLD)
    assert log.rounds == 3
    log.append(answer(3))
    assert (verify(tmp_path).ok, log.rounds) == (True, 4)


def test_an_old_log_that_is_changed_or_removed_after_the_chain_began_is_reported(tmp_path):
    log = old(tmp_path)
    log.append(answer(3))
    whole = (tmp_path / OLD).read_bytes()
    (tmp_path / OLD).write_bytes(whole.replace(b"2.5", b"2.6", 1))
    assert "left-0000.jsonl as the file before it, which is missing or was changed" in verify(tmp_path).problem
    (tmp_path / OLD).unlink()
    assert "left-0000.jsonl as the file before it, which is missing or was changed" in verify(tmp_path).problem


# ---- several writers -----------------------------------------------------------------------------

WRITER = """
import sys
from pathlib import Path
from fedbilevel.sites.audit import AuditLog
log = AuditLog(Path(sys.argv[1]), size=2000)
for number in range(40):
    log.append({"run": sys.argv[2], "kind": "phase", "bytes": 1, "arrays": [{"name": "y", "norm": 1.0}]})
"""


def test_several_processes_append_to_one_chain(tmp_path):
    words = [sys.executable, "-c", WRITER, str(tmp_path)]
    environment = {**os.environ, "PYTHONPATH": str(Path(audit.__file__).parents[2])}
    writers = [subprocess.Popen([*words, name], env=environment) for name in ("one", "two")]
    assert [writer.wait() for writer in writers] == [0, 0]
    report = verify(tmp_path)
    assert (report.ok, report.num_lines, AuditLog(tmp_path).rounds) == (True, 80, 80)
    assert {name: run.answers for name, run in report.runs.items()} == {"one": 40, "two": 40}


def test_an_empty_folder_is_an_empty_log(tmp_path):
    report = verify(tmp_path)
    assert (report.ok, report.num_lines, report.first, list(lines(tmp_path))) == (True, 0, None, [])
