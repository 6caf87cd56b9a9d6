"""A headless Chromium, controlled by its DevTools protocol over two pipes, without a driver or a
library.
"""

import base64
import itertools
import json
import os
import select
import shutil
import subprocess
import sys
import time
from pathlib import Path

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
FLAGS = [
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--disable-default-apps",
    "--disable-extensions",
    "--disable-dev-shm-usage",
    "--hide-scrollbars",
    "--remote-debugging-pipe",
]
# the browser reads commands from file 3 and writes answers to file 4
LAUNCH = (
    "import os, sys; r, w = map(int, sys.argv[1:3]); os.dup2(r, 10); os.dup2(w, 11); "
    "os.dup2(10, 3); os.dup2(11, 4); os.execv(sys.argv[3], sys.argv[3:])"
)
PATIENCE = 30.0


def find():
    """Return the path of a Chromium, or None."""
    return os.environ.get("FEDBILEVEL_CHROMIUM") or next(filter(None, map(shutil.which, NAMES)), None)


class Browser:
    def __init__(self, program, folder: Path):
        here_read, there_write = os.pipe()
        there_read, here_write = os.pipe()
        words = [
            sys.executable,
            "-c",
            LAUNCH,
            str(there_read),
            str(there_write),
            program,
            *FLAGS,
            f"--user-data-dir={folder}",
            "about:blank",
        ]
        silent = {name: subprocess.DEVNULL for name in ("stdin", "stdout", "stderr")}
        self.process = subprocess.Popen(words, pass_fds=(there_read, there_write), **silent)
        os.close(there_read)
        os.close(there_write)
        self.reading, self.writing, self.rest = here_read, here_write, b""
        self.numbers, self.answers, self.events = itertools.count(1), {}, {}

    def send(self, method, session=None, **values):
        """Return the answer to a command; events that arrive meanwhile are kept by session."""
        number = next(self.numbers)
        message = {"id": number, "method": method, "params": values, **({"sessionId": session} if session else {})}
        os.write(self.writing, json.dumps(message).encode() + b"\0")
        until = time.monotonic() + PATIENCE
        while number not in self.answers:
            self.listen(until - time.monotonic())
        answer = self.answers.pop(number)
        if "navigated or closed" in answer.get("error", {}).get("message", ""):
            raise Navigated(f"{method}: {answer['error']}")
        assert "error" not in answer, f"{method}: {answer['error']}"
        return answer["result"]

    def listen(self, seconds):
        ready, _, _ = select.select([self.reading], [], [], max(0.0, seconds))
        assert ready, f"the browser did not answer within {PATIENCE} s"
        some = os.read(self.reading, 1 << 20)
        assert some, "the browser has ended"
        *messages, self.rest = (self.rest + some).split(b"\0")
        for message in map(json.loads, messages):
            if "id" in message:
                self.answers[message["id"]] = message
            else:
                self.events.setdefault(message.get("sessionId"), []).append(message)

    def page(self, **options):
        return Page(self, **options)

    def close(self):
        try:
            self.send("Browser.close")
        finally:
            os.close(self.writing)
            os.close(self.reading)
            try:
                self.process.wait(10)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()


class Navigated(AssertionError):
    """The page left while an expression was evaluated in it."""


class Page:
    """A tab.

    `requests`: the addresses that it requested. `complaints`: console messages and errors.
    """

    def __init__(self, browser, *, width=1100, height=900, scheme="light"):
        self.browser = browser
        self.target = browser.send("Target.createTarget", url="about:blank")["targetId"]
        self.session = browser.send("Target.attachToTarget", targetId=self.target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.send(f"{domain}.enable")
        self.size(width, height)
        self.send("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])

    def send(self, method, **values):
        return self.browser.send(method, self.session, **values)

    def size(self, width, height):
        self.send(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 600
        )

    def open(self, address):
        self.browser.events.pop(self.session, None)
        self.send("Page.navigate", url=address)
        self.until("document.readyState === 'complete' && document.documentElement.dataset.drawn !== undefined")
        return self

    def run(self, script):
        """Return the value of an expression in the page."""
        answer = self.send("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def until(self, script, seconds=PATIENCE):
        end = time.monotonic() + seconds
        while not self.is_true(script):
            assert time.monotonic() < end, f"never true: {script}; {self.complaints}"
            time.sleep(0.05)

    def is_true(self, script):
        """Return whether an expression is true; it is not while the page leads on to another."""
        try:
            return bool(self.run(script))
        except Navigated:
            return False

    def until_here(self, condition, seconds=PATIENCE):
        """Wait for a condition outside of the page, such as a saved file."""
        end = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < end, f"never true; {self.complaints}"
            time.sleep(0.05)

    def happened(self, *methods):
        return [event["params"] for event in self.browser.events.get(self.session, []) if event["method"] in methods]

    @property
    def requests(self):
        addresses = [event["request"]["url"] for event in self.happened("Network.requestWillBeSent")]
        return [
            address for address in addresses if not address.startswith(("data:", "blob:"))
        ]  # those are in the page itself

    @property
    def complaints(self):
        return self.happened("Runtime.consoleAPICalled", "Runtime.exceptionThrown", "Log.entryAdded")

    def choose(self, name, value):
        """Set a select, a checkbox or a number as a user does."""
        self.run(
            f"(() => {{ const e = document.getElementById({json.dumps(name)}); const v = {json.dumps(value)};"
            " if (e.type === 'checkbox') { e.click(); return; } e.focus(); e.value = v;"
            " e.dispatchEvent(new Event('input', {bubbles: true}));"
            " e.dispatchEvent(new Event('change', {bubbles: true})); e.blur(); })()"
        )

    def press(self, selector):
        self.run(f"document.querySelector({json.dumps(selector)}).click()")

    def picture(self, *, whole=True):
        """Return a PNG of the whole page."""
        return base64.b64decode(self.send("Page.captureScreenshot", format="png", captureBeyondViewport=whole)["data"])

    def printed(self):
        """Return the page as PDF."""
        return base64.b64decode(
            self.send("Page.printToPDF", printBackground=True, paperWidth=8.27, paperHeight=11.69)["data"]
        )

    def close(self):
        self.browser.send("Target.closeTarget", targetId=self.target)
        self.browser.events.pop(self.session, None)
