"""Test an installation without extras: import, help, the README's example and a run on digits.

Run by `make smoke`. It needs no pytest, because the packages of the tests would hide a missing
dependency.
"""

import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

README = Path(__file__).resolve().parents[1] / "README.md"
RUN = ["run", "data_cleaning", "--algorithm", "fedbio", "--num-iterations", "2"]


def fedbilevel(*arguments: str) -> str:
    return subprocess.run(
        [sys.executable, "-m", "fedbilevel", *arguments], capture_output=True, text=True, check=True
    ).stdout


def main() -> None:
    import fedbilevel as package

    [example] = re.findall(r"```python\n(.*?)```", README.read_text(encoding="utf-8"), re.DOTALL)
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        assert "Usage:" in fedbilevel("--help")
        exec(compile(example, str(README), "exec"), found := {})
        losses = [row["upper_loss"] for row in found["result"].rows]
        assert losses[-1] < losses[0], losses
        fedbilevel(*RUN)
        os.chdir(README.parent)
    print(f"fedbilevel {package.__version__} works on Python {sys.version.split()[0]}.")


if __name__ == "__main__":
    main()
