"""The GPUs that kernels are compiled for, and how many programs of a kernel one of their multiprocessors runs at once.

Sizes are those of "Technical specifications per compute capability" in the CUDA C++ Programming Guide.
"""

from __future__ import annotations

from typing import NamedTuple

KIB = 1 << 10
REGISTERS_TOGETHER = 256  # a warp's registers are allocated in steps of so many
SHARED_OF_SYSTEM = 1 * KIB  # of shared memory, for each program
WARP = 32  # threads


class Architecture(NamedTuple):
    """The sizes of a compute capability's multiprocessors."""

    capability: int
    devices: str
    shared_of_program: int  # bytes
    shared: int  # bytes of a multiprocessor
    threads: int
    programs: int
    registers: int = 65536


ARCHITECTURES = {
    each.capability: each for each in (
        Architecture(80, "A100", 163 * KIB, 164 * KIB, 2048, 32),
        Architecture(89, "L40S, RTX 4090", 99 * KIB, 100 * KIB, 1536, 24),
        Architecture(90, "H100, H200", 227 * KIB, 228 * KIB, 2048, 32),
        Architecture(100, "B200", 227 * KIB, 228 * KIB, 2048, 32),
    )
}


def programs_at_once(architecture: Architecture, warps: int, registers: int, shared: int) -> int:
    """Programs of `warps` warps, `registers` registers a thread and `shared` bytes that one multiprocessor runs.

    0 where it cannot run a single one.
    """
    if shared > architecture.shared_of_program:
        return 0
    of_warp = -(-registers * WARP // REGISTERS_TOGETHER) * REGISTERS_TOGETHER
    return min(
        architecture.programs,
        architecture.threads // (warps * WARP),
        architecture.registers // (of_warp * warps),
        architecture.shared // (shared + SHARED_OF_SYSTEM),
    )
