"""What the processor under us can do, as torch sees it."""

from __future__ import annotations

import torch

CAPABILITY = torch.backends.cpu.get_cpu_capability()
AVX2, AVX512 = CAPABILITY == "AVX2", CAPABILITY == "AVX512"
LANES = 16 if AVX512 else 8  # float32 of a vector, whole registers where there are any of that width
PAIR = 2 * LANES  # columns that products read together
