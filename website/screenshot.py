"""The picture of the README: python -m website.screenshot runs the demo and photographs its report in Chromium."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from website.pictures import FOLDER

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
SIZE = (1100, 985)  # the sentences and two rows of suspects


def main() -> None:
    program = os.environ.get("FEDBILEVEL_CHROMIUM") or next(filter(None, map(shutil.which, NAMES)), None)
    if program is None:
        raise SystemExit(f"no browser was found, expected one of {', '.join(NAMES)}: install Chromium.")
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run([sys.executable, "-m", "fedbilevel", "demo", "--out", f"{folder}/demo"], check=True)
        flags = [
            "--headless",
            "--no-sandbox",
            "--disable-gpu",
            "--hide-scrollbars",
            f"--user-data-dir={folder}/browser",
        ]
        shot = [f"--window-size={SIZE[0]},{SIZE[1]}", f"--screenshot={FOLDER / 'report.png'}"]
        page = (Path(folder) / "demo" / "report.html").as_uri()
        subprocess.run([program, *flags, *shot, page], check=True, stderr=subprocess.DEVNULL, timeout=120)


if __name__ == "__main__":
    main()
