"""What swaps were expected to gain, and what the units that came in are worth a round later.

    python benchmarks/choice_record.py scratch        CIFAR-10, three convolutions from scratch, ratio 1/4
    python benchmarks/choice_record.py trained        the same from a trained network, ratio 1/2
    python benchmarks/choice_record.py linear         planted units: linear, convolution, lstm or heads

The learned arm of `choice.py` (seed 0). A line for each round of swaps: how many units came in; the nats that were expected of
them, less their errors; the nats that those cost which left; and the nats that removing the newcomers would cost a round later.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from typing import Any

import torch
from choice import BATCH, EXPLORE, _pretrain, _train
from choice_cells import PLANTED, images, planted
from torch import Tensor

import sparsekit as sk
from sparsekit.training.loss_importance import Swapping


class _Recorded(Swapping):
    """Swaps as ever, and notes what came of them."""

    def __init__(self, settings: sk.LossImportance, host: Any) -> None:
        super().__init__(settings, host)
        self._came = torch.zeros(host.graph.units, dtype=torch.bool)
        self._line: list[float] = []

    def _swap(self, host: Any) -> None:
        cost, _ = self.evidence.removal()
        gain, _ = self.evidence.insertion(self.record.errors)
        before = self._units(host)
        if self._line:
            found = float(cost[self._came & before].sum())
            step, came, expected, left = self._line
            print(f"{step:6.0f} {came:6.0f} {1000 * expected:10.1f} {1000 * left:10.1f} {1000 * found:10.1f}", flush=True)
        super()._swap(host)
        after = self._units(host)
        self._came, gone = after & ~before, before & ~after
        came = int(self._came.sum())
        self._line = [self.pace.step, came, float(gain[self._came].sum()), float(cost[gone].sum())] if came else []

    def _units(self, host: Any) -> Tensor:
        return torch.cat([host.execution.mask[name] for name in host.graph.groups])


@dataclass(frozen=True, kw_only=True)
class _Recording(sk.LossImportance):
    def rule(self, host: Any) -> Swapping:
        return _Recorded(self, host)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["scratch", "trained", *PLANTED])
    what = parser.parse_args().what
    torch.set_num_threads(1)
    if what in PLANTED:
        cell, ratio, steps = planted(what, 0, "cpu"), 0.25, 1500
    else:
        cell = images("cifar10", 0, "cpu", train=20000, test=4000, pooled=2)
        epoch = 20000 // BATCH
        ratio, steps = (0.25, 7 * epoch) if what == "scratch" else (0.5, 3 * epoch)
        if what == "trained":
            _pretrain(cell, 3 * epoch, 0)
    start = sk.criteria.Random() if cell.good else sk.criteria.Magnitude()
    learning = _Recording(steps=int(steps / (1 + EXPLORE)), explore=EXPLORE)
    generator = torch.Generator().manual_seed(3000)
    torch.manual_seed(2000)
    example = (cell.train[0][:2],)
    masked = sk.LearnableMask(cell.model, example, ratio=ratio, learning=learning, generator=generator, start=start)
    print("  step   came   expected       left      found   (thousandths of a nat)")
    accuracy, _ = _train(masked, cell, steps, 0)
    print(f"accuracy {100 * accuracy:.1f} %")


if __name__ == "__main__":
    main()
