from __future__ import annotations

import subprocess
import sys

SCRIPT = """
import sys
from slotwise.compute.kernels.lazy_imports import UNUSED, spare_torch
spare_torch()
import torch
shapes, export, distributions, quantization = parts = [sys.modules[name] for name in UNUSED]
used = ("meta_cholesky", "ExportedProgram", "Normal", "QuantStub")
assert not [name for name, part in zip(used, parts, strict=True) if name in vars(part)], "loaded with torch"
assert torch.equal(torch.ones(2, 2) @ torch.ones(2, 2), torch.full((2, 2), 2.0))
from slotwise.compose.engine_builder import build_engine
assert not [name for name, part in zip(used, parts, strict=True) if name in vars(part)], "loaded with the engine"
assert callable(shapes.activate_meta) and "activate_meta" in vars(shapes)
assert torch.linalg.cholesky_ex(torch.empty(3, 3, device="meta"))[0].shape == (3, 3)
from torch.distributions.normal import Normal
from torch.quantization import QuantStub
import torch.export.dynamic_shapes
assert Normal is torch.distributions.Normal is distributions.Normal and QuantStub is torch.quantization.QuantStub
assert torch.export.dynamic_shapes.Dim is torch.export.Dim is export.Dim
class Doubled(torch.nn.Module):
    def forward(self, given):
        return given * 2
exported = torch.export.export(Doubled(), (torch.ones(2),))
assert torch.equal(exported.module()(torch.ones(2)), torch.full((2,), 2.0))
"""


def test_parts_of_torch_wait_until_they_are_asked_for():
    run = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
