"""TrackRecord: what swaps were expected to gain and what came of them, which decides how sure the next ones must be."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

__all__ = ["TrackRecord"]

_STEP, _LOWEST, _HIGHEST = 2.0, 0.25, 2.0


class TrackRecord:
    """Holds expectations against what is found one round later.

    The gain of a dropped unit is the progress of one step, as it looks now. Where other units make that progress anyway, as in
    most layers of an image network, the unit that came in is worth nothing after a round. Where it sees what no other sees, it
    is worth more than was expected. So newcomers that are worth what was expected halve the errors that the next swaps are held
    to, down to a quarter; newcomers that are worth less than half of it double them, up to twice as many as at first.

    Args:
        size: Number of units.
        errors: Standard errors that the first swaps are held to.
    """

    def __init__(self, size: int, errors: float) -> None:
        self.errors = errors
        """Standard errors that the next swaps are held to."""
        self._first = errors
        self._expected = torch.zeros(size)

    def expect(self, units: Tensor, gains: Tensor) -> None:
        """Take note of what is expected of units that come in.

        Args:
            units: int64 (n,), places in the vector over all units.
            gains: float (n,), nats.
        """
        self._expected[units.cpu()] = gains.detach().float().cpu()

    def judge(self, cost: Tensor, error: Tensor) -> bool | None:
        """Compare what was expected of the last newcomers with what removing them would cost now.

        Args:
            cost: float (J,), nats that removing each kept unit costs; infinite where unknown.
            error: float (J,), their standard errors.

        Returns:
            Whether they brought it: False below half of it; None in between, and where nothing is known.
        """
        verdict = None
        known = (self._expected > 0) & cost.isfinite().cpu()
        if bool(known.any()):
            expected = float(self._expected[known].sum())
            found = float(cost.cpu()[known].sum())
            if found >= expected:
                verdict = True
                self.errors = max(_LOWEST * self._first, self.errors / _STEP)
            elif found + math.sqrt(float(error.cpu()[known].square().sum())) < 0.5 * expected:
                verdict = False
                self.errors = min(_HIGHEST * self._first, self.errors * _STEP)
        self._expected.zero_()
        return verdict

    def state(self) -> dict[str, Tensor]:
        """What outlives a program."""
        return {"errors": torch.tensor(self.errors, dtype=torch.float64), "expected": self._expected.clone()}

    def load(self, state: Mapping[str, Tensor]) -> None:
        """Go on from what `state` returned; from the beginning where it is empty."""
        if state:
            self.errors = float(state["errors"])
            self._expected.copy_(state["expected"])
