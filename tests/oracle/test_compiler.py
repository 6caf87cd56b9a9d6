"""torch.func works before torch's compiler is imported, and the real compiler takes over when it is."""

import subprocess
import sys

import pytest

pytestmark = pytest.mark.slow

CODE = """
import sys, torch
from fedbilevel.oracle.compiler import postpone
postpone()
square = lambda x: (x * x).sum()
point = torch.tensor([1.0, 2.0])
assert torch.func.grad(square)(point).tolist() == [2.0, 4.0]
assert "torch._dynamo" not in sys.modules
stand_in = torch._dynamo
{step}
assert torch._dynamo is sys.modules["torch._dynamo"]
assert stand_in.compiled_autograd is torch._dynamo.compiled_autograd
assert torch.func.grad(square)(point).tolist() == [2.0, 4.0]
postpone()
assert torch._dynamo is sys.modules["torch._dynamo"]
print("fine")
"""
STEPS = {
    "an import": "import torch._dynamo",
    "an attribute": "assert torch._dynamo.config.cache_size_limit > 0",
    "a compilation": "assert torch.compile(square, backend='eager')(point).item() == 5.0",
    "a trace": "from torch.fx.experimental.proxy_tensor import make_fx; make_fx(torch.func.grad(square))(point)",
}


def test_the_compiler_is_imported_on_first_use():
    running = {
        name: subprocess.Popen(
            [sys.executable, "-c", CODE.format(step=step)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        for name, step in STEPS.items()
    }
    said = {name: process.communicate() for name, process in running.items()}
    assert {name: out.strip() for name, (out, _) in said.items()} == dict.fromkeys(STEPS, "fine"), said
