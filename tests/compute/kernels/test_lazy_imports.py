from __future__ import annotations

import subprocess
import sys

SCRIPT = """
import sys
from slotwise.compute.kernels.lazy_imports import UNUSED, spare_torch
spare_torch()
import torch
module = sys.modules[UNUSED]
assert "meta_cholesky" not in vars(module), "loaded with torch"
assert torch.equal(torch.ones(2, 2) @ torch.ones(2, 2), torch.full((2, 2), 2.0))
assert callable(module.activate_meta) and "activate_meta" in vars(module)
assert torch.linalg.cholesky_ex(torch.empty(3, 3, device="meta"))[0].shape == (3, 3)
"""


def test_a_part_of_torch_waits_until_it_is_asked_for():
    run = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
