"""The least of a linear function under linear limits, by the simplex method on a dense tableau.

For programs of some twenty rows, of which a plan solves hundreds: a general solver takes milliseconds for each, most of
them to check its options.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

EPSILON = 1e-9  # below this share of a row's largest number a number is rounding
BLAND_FROM = 200  # pivots after which the first column is taken instead of the steepest: no circle then


class LinearProgram:
    """x >= 0 with upper @ x <= limits and equal @ x == total."""

    def __init__(
        self, upper: Sequence[Sequence[float]], limits: Sequence[float], equal: Sequence[float], total: float
    ) -> None:
        rows, right = np.array([*upper, equal], float), np.array([*limits, total], float)
        scale = np.abs(rows).max(axis=1)
        scale[scale == 0] = 1.0
        rows, right = rows / scale[:, None], right / scale
        num_rows, self.num_variables = rows.shape
        slacks = np.eye(num_rows)[:, :-1]
        signs = np.where(right < 0, -1.0, 1.0)
        needy = np.flatnonzero((right < 0) | (np.arange(num_rows) == num_rows - 1))  # no slack of these can be right
        invented = np.eye(num_rows)[:, needy]
        self.table = np.hstack([signs[:, None] * np.hstack([rows, slacks]), invented, (signs * right)[:, None]])
        first = self.num_variables + num_rows - 1
        self.basis = np.arange(self.num_variables, first + 1)
        self.basis[needy] = first + np.arange(len(needy))
        cost = np.zeros(self.table.shape[1] - 1)
        cost[first:] = 1.0
        missing = self._descend(cost)
        self.is_feasible = missing <= EPSILON * max(1.0, float(np.abs(right).max()))
        for row in np.flatnonzero(self.basis >= first):  # what is invented and zero gives way to any real column
            real = np.flatnonzero(np.abs(self.table[row, :first]) > EPSILON)
            if len(real):
                self._pivot(int(row), int(real[0]))
        self.table = np.delete(self.table, np.s_[first:-1], axis=1)
        kept = self.basis < first
        self.table, self.basis = self.table[kept], self.basis[kept]

    def least(self, cost: Sequence[float]) -> tuple[float, np.ndarray]:
        """Return the least of cost @ x and an x that has it. The program must be feasible and bounded."""
        whole = np.zeros(self.table.shape[1] - 1)
        whole[: self.num_variables] = cost
        found = self._descend(whole)
        x = np.zeros(len(whole))
        x[self.basis] = self.table[:, -1]
        return found, x[: self.num_variables]

    def limit(self, row: Sequence[float], most: float) -> None:
        """Add row @ x <= most, which the x of the last least() must keep."""
        width = self.table.shape[1]
        new = np.zeros(width)
        new[: self.num_variables], new[-1] = row, most
        new -= new[self.basis] @ self.table
        table = np.insert(np.vstack([self.table, new]), width - 1, 0.0, axis=1)
        table[-1, -2] = 1.0
        self.table, self.basis = table, np.append(self.basis, width - 1)

    def _descend(self, cost: np.ndarray) -> float:
        """Pivot until nothing lowers the cost; return it."""
        reduced = cost - cost[self.basis] @ self.table[:, :-1]
        level = EPSILON * max(1.0, float(np.abs(cost).max()))
        for number in range(10 * BLAND_FROM):
            falling = np.flatnonzero(reduced < -level)
            if not len(falling):
                break
            column = falling[0] if number > BLAND_FROM else falling[np.argmin(reduced[falling])]
            steps, right = self.table[:, column], self.table[:, -1]
            able = np.flatnonzero(steps > EPSILON)
            if not len(able):
                break  # unbounded: limits of a step never are
            ratios = right[able] / steps[able]
            tied = able[ratios <= ratios.min() * (1 + EPSILON) + EPSILON**2]
            row = tied[np.argmin(self.basis[tied])]
            self._pivot(int(row), int(column))
            reduced = reduced - reduced[column] * self.table[row, :-1]
        return float(cost[self.basis] @ self.table[:, -1])

    def _pivot(self, row: int, column: int) -> None:
        table = self.table
        table[row] /= table[row, column]
        factors = table[:, column].copy()
        factors[row] = 0.0
        table -= np.outer(factors, table[row])
        np.maximum(table[:, -1], 0.0, out=table[:, -1])  # rounding
        self.basis[row] = column
