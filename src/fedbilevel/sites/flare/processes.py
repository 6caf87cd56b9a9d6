"""The server or site of a kit as a supervised child process, which is restarted when it ends."""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import psutil

from fedbilevel.errors import SettingError
from fedbilevel.sites.flare import certificates, kits, production

CONSOLE = "console.txt"  # output of the child: errors before its logs are open
PATIENCE = 5.0  # seconds for a process to end by itself
SHORT_LIFE = 10.0  # seconds; the pause before a restart doubles after a child that lived for less
LEAN = {  # one memory pool for FLARE's hundreds of threads, and no imports from the kit
    "MALLOC_ARENA_MAX": "2", "PYTHONSAFEPATH": "1",
}  # fmt: skip
BEAT = 4  # seconds between heartbeats, by which a site notices a restart of the server; FLARE's default is 10
_PARENT = ("server_train", "client_train")


def command_of(kit: Path) -> list[str]:
    """Return the command in the kit's own start script, with this Python interpreter."""
    script = kit / "startup" / "sub_start.sh"
    if not script.is_file():
        missing = "there is no startup/sub_start.sh in it, so make it again with provision"
        raise SettingError(f"{kit} is not the whole kit of a server or a site: {missing}.")
    found = re.search(r"exec python3 (-u -m nvflare\S+ .*)", script.read_text())
    if found is None:
        raise SettingError(f"{script} holds no command that this version knows: make the kits again with nvflare 2.9.")
    command = [sys.executable, *shlex.split(found[1].replace("$WORKSPACE", str(kit.resolve())))]
    return [*command, f"heart_beat_interval={BEAT}"] if any(word.startswith("uid=") for word in command) else command


def name_of(kit: Path) -> str:
    """Return the name by which the federation knows the kit's owner."""
    named = [part.removeprefix("uid=") for part in command_of(kit) if part.startswith("uid=")]
    return named[0] if named else "server"


def running(kit: Path) -> dict[int, str]:
    """Return the processes of this kit by process id: `parent`, or the id of the job that a process
    works for.

    A process belongs to the kit if the kit's path is a whole argument of its command, so that
    site-1 is not mistaken for site-10.
    """
    place, found = str(kit.resolve()), {}
    for process in psutil.process_iter():
        try:
            words = process.cmdline()
            is_flare = any("nvflare.private.fed.app" in word for word in words)
            if place in words and is_flare and process.status() != psutil.STATUS_ZOMBIE:
                found[process.pid] = _kind(words)
        except psutil.Error:  # it ended meanwhile, or belongs to another user
            continue
    return found


def _kind(words: list[str]) -> str:
    if any(word.endswith(_PARENT) for word in words):
        return "parent"
    return words[words.index("-n") + 1] if "-n" in words else "job"


def clear(kit: Path, patience: float = PATIENCE) -> list[int]:
    """End all processes of this kit and return their ids. Job processes outlive a killed parent and
    would interfere with those of the next parent."""
    processes = []
    for pid in running(kit):
        with contextlib.suppress(psutil.NoSuchProcess):
            processes.append(psutil.Process(pid))
            processes[-1].terminate()
    _, stubborn = psutil.wait_procs(processes, patience)
    for process in stubborn:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    psutil.wait_procs(stubborn, PATIENCE)
    return [process.pid for process in processes]


class Supervised:
    """The supervised process of a server or site: it restarts when it ends, and stops with all its
    job processes."""

    def __init__(
        self,
        kit: Path,
        *,
        environment: Mapping[str, str] | None = None,
        pause: float = 2.0,
        say: Callable[[str], None] = lambda _: None,
    ) -> None:
        self.kit, self.command, self.name = kit.resolve(), command_of(kit), name_of(kit)
        kits.check_whole(kit, "server" if self.name == kits.SERVER else "site")
        production.check_guarded(kit)
        certificates.check(kit)
        if re.search(r"[\s'\"\\#]", str(self.kit)):  # FLARE passes it to job processes in text that is split again
            reason = "FLARE cannot start jobs below a path with blanks or quotes"
            raise SettingError(f"the kit is in {str(self.kit)!r}, and {reason}: move it.")
        self._environment = {**LEAN, **os.environ, **(environment or {})}
        if "PYTHONPATH" in self._environment:  # relative paths would be lost, because the child runs in its kit
            self._environment["PYTHONPATH"] = os.pathsep.join(
                os.path.abspath(part) for part in self._environment["PYTHONPATH"].split(os.pathsep) if part
            )
        self._pause, self._say = pause, say
        self._child: subprocess.Popen[bytes] | None = None
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._watch, name=f"supervise {self.name}", daemon=True)
        self.num_starts = 0

    @property
    def pid(self) -> int | None:
        child = self._child
        return child.pid if child is not None and child.poll() is None else None

    def start(self) -> None:
        parents = [pid for pid, kind in running(self.kit).items() if kind == "parent"]
        if parents:
            raise SettingError(f"{self.kit} is running already, as process {parents[0]}: stop that one first.")
        if text := certificates.notice(certificates.read(certificates.own(self.kit))):
            self._say(text)
        self._launch()
        self._thread.start()

    def _launch(self) -> None:
        left = clear(self.kit)
        if left:
            self._say(f"{self.name}: ended {len(left)} processes left over from before.")
        production.settle(self.kit)
        (self.kit / "transfer").mkdir(exist_ok=True)
        with (self.kit / CONSOLE).open("wb") as console:
            # its own session, so that a Ctrl-C for the supervisor does not reach the child
            self._child = subprocess.Popen(
                self.command,
                cwd=self.kit,
                env=self._environment,
                stdin=subprocess.DEVNULL,
                stdout=console,
                stderr=console,
                start_new_session=True,
            )
        self.num_starts += 1

    def _watch(self) -> None:
        pause, born = self._pause, time.monotonic()
        while not self._stopping.wait(0.2):
            if self._child is None or self._child.poll() is None:
                continue
            pause = self._pause if time.monotonic() - born > SHORT_LIFE else min(2 * pause, 30.0)
            self._say(
                f"{self.name} ended with {self._child.returncode}, next start in {pause:.0f} s{self._last_words()}."
            )
            if self._stopping.wait(pause):
                return
            born = time.monotonic()
            self._launch()

    def _last_words(self) -> str:
        lines = (self.kit / CONSOLE).read_text(errors="replace").strip().splitlines()
        return f"; it said: {lines[-1].strip()[:200]}" if lines else ""

    def wait(self, seconds: float | None = None) -> bool:
        """Wait until the supervisor is stopped, or for this number of seconds, and return whether
        it is stopped."""
        return self._stopping.wait(seconds)

    def ask_to_stop(self) -> None:
        """Begin to stop without waiting, so that several processes can stop at the same time."""
        self._stopping.set()
        if self._child is not None and self._child.poll() is None:
            self._child.terminate()

    def stop(self) -> None:
        self._stopping.set()
        if self._thread.is_alive():
            self._thread.join()
        child = self._child
        if child is not None and child.poll() is None:
            child.terminate()
            try:
                child.wait(PATIENCE)
            except subprocess.TimeoutExpired:
                child.kill()
                child.wait()
        clear(self.kit, patience=1.0)
