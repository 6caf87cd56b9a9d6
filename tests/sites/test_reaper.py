"""Processes of a test's folder end with the test process, even if that is killed."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from support.sites.reaper import processes_of, reaped

pytestmark = pytest.mark.wait

SLEEP = "import sys; print('ready', flush=True); sys.stdin.read()"
KILLED = f"""
import subprocess, sys
from pathlib import Path
from support.sites.reaper import reaped
with reaped(Path(sys.argv[1])):
    words = [sys.executable, "-c", {SLEEP!r}, sys.argv[1]]
    child = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True)
    child.stdout.readline()
    print(child.pid, flush=True)
    sys.stdin.read()
"""


def test_a_process_in_a_session_of_its_own_ends_when_the_test_process_is_killed(tmp_path):
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    tests = {**os.environ, "PYTHONPATH": os.pathsep.join([str(Path(__file__).parents[1]), *sys.path])}
    killed = subprocess.Popen([sys.executable, "-c", KILLED, str(tmp_path)], env=tests, start_new_session=True, **pipes)
    child = psutil.Process(int(killed.stdout.readline()))
    [watching] = [one for one in psutil.Process(killed.pid).children() if one.pid != child.pid]
    os.kill(killed.pid, signal.SIGKILL)
    killed.communicate()
    psutil.wait_procs([child, watching], timeout=60)
    assert processes_of(tmp_path) == []


def test_a_process_that_is_left_ends_with_the_block_and_others_stay(tmp_path):
    begin = lambda name: subprocess.Popen(
        [sys.executable, "-c", SLEEP, str(tmp_path / name)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    with begin("other") as other:
        with reaped(tmp_path / "left"):
            left = begin("left")
            assert [left.stdout.readline(), other.stdout.readline()] == [b"ready\n"] * 2
        assert left.wait() == -signal.SIGKILL
        assert processes_of(tmp_path) == [other.pid]
        left.communicate()
        other.stdin.close()
