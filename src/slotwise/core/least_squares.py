"""Least squares with coefficients that are not negative, from the normal equations."""

from __future__ import annotations

from collections.abc import Sequence

Matrix = list[list[float]]


def non_negative(matrix: Matrix, target: Sequence[float], ridge: Sequence[float]) -> list[float]:
    """Returns the least-squares solution x >= 0 of `matrix` x = `target`.

    Drops the column with the most negative coefficient until none is negative.  This is nearly always the solution of
    non-negative least squares (Lawson and Hanson, 1974), in at most as many solves as there are columns.

    Args:
        matrix, target: the normal equations; `matrix` is symmetric and positive semi-definite.
        ridge: regularisation towards 0, by column, relative to its weight: decides between collinear columns.
    """
    kept = [at for at, row in enumerate(matrix) if row[at] > 0]
    solution = [0.0] * len(matrix)
    while kept:
        scale = [matrix[at][at] ** -0.5 for at in kept]  # columns of unit length: their magnitudes differ widely
        found = _solved([
            [matrix[i][j] * scale[row] * scale[column] + ridge[i] * (i == j) for column, j in enumerate(kept)]
            + [target[i] * scale[row]] for row, i in enumerate(kept)])
        least = min(range(len(kept)), key=found.__getitem__)
        if found[least] >= 0:
            for at, value, factor in zip(kept, found, scale, strict=True):
                solution[at] = value * factor
            break
        del kept[least]
    return solution


def _solved(system: Matrix) -> list[float]:
    """Gaussian elimination of a positive definite system, the right side as its last column; destroys `system`."""
    size = len(system)
    for pivot in range(size):
        for row in range(pivot + 1, size):
            factor = system[row][pivot] / system[pivot][pivot]
            for column in range(pivot, size + 1):
                system[row][column] -= factor * system[pivot][column]
    values = [0.0] * size
    for row in reversed(range(size)):
        known = sum(system[row][column] * values[column] for column in range(row + 1, size))
        values[row] = (system[row][size] - known) / system[row][row]
    return values
