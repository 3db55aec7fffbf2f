"""All figures of all comparisons of a report, and of those that cannot be drawn the runs that they need."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from sparsekit_fl.paper.figures.against_cost import accuracy_against_flops, accuracy_against_time
from sparsekit_fl.paper.figures.against_levels import (
    accuracy_against_classes,
    accuracy_against_devices,
    time_against_devices,
)
from sparsekit_fl.paper.figures.against_ratios import accuracy_against_ratios, time_against_ratios
from sparsekit_fl.paper.figures.ratios_over_time import ratios_over_time
from sparsekit_fl.paper.figures.time_to_accuracy import time_to_accuracy
from sparsekit_fl.report.comparison import Comparison
from sparsekit_fl.report.plate import MissingPlate, Plate, Plates

__all__ = ["paper_plates"]

_CURVES = "sparsekit compare fedlps fedavg heterofl fedper --preset mnist --data-dir DIR --out FOLDER"
_DEVICES = "sparsekit compare fedlps fedavg fedper --preset cifar10 --heterogeneity low,median,high --data-dir DIR --out FOLDER"
_FIGURES: tuple[tuple[Callable[[Comparison], Plate | None], MissingPlate | None], ...] = (
    (accuracy_against_flops, MissingPlate(
        number="Figure 3", needs="fedlps and a rival, scored in several rounds", command=_CURVES)),
    (accuracy_against_time, MissingPlate(
        number="Figure 4", needs="fedlps and a rival, scored in several rounds", command=_CURVES)),
    (time_to_accuracy, MissingPlate(
        number="Figure 5", needs="fedlps and a rival, one of which reaches the target", command=f"{_CURVES} --target 0.9")),
    (accuracy_against_classes, MissingPlate(
        number="Figure 6", needs="fedlps and a rival at two or more numbers of classes that clients lack",
        command="sparsekit compare fedlps fedper --preset mnist --lack-classes 2,4,6,8 --data-dir DIR --out FOLDER")),
    (accuracy_against_devices, MissingPlate(
        number="Figure 7", needs="fedlps and a rival at two or more levels of heterogeneity", command=_DEVICES)),
    (time_against_devices, MissingPlate(
        number="Figure 8", needs="fedlps and a rival at two or more levels of heterogeneity", command=_DEVICES)),
    (accuracy_against_ratios, MissingPlate(
        number="Figure 9", needs="flst and another choice of units, each at two or more ratios",
        command="sparsekit compare 'flst ratio=0.2' 'flst ratio=0.8' 'fedlps-random ratio=0.2' 'fedlps-random ratio=0.8'"
                " --preset mnist --data-dir DIR --out FOLDER")),
    (time_against_ratios, None),  # drawn whenever the other half is, unless no unit is learned
    (ratios_over_time, MissingPlate(
        number="Ratios over time", needs="a method whose ratio is a bandit's", command=_CURVES)),
)  # fmt: skip


def paper_plates(comparisons: Sequence[Comparison]) -> Plates:
    """Make every figure that the results can be drawn as.

    Args:
        comparisons: One per protocol.

    Returns:
        Figures of each comparison; those that none can show are named with the runs that they need.
    """
    drawn: list[list[Plate]] = [[] for _ in comparisons]
    missing = []
    for make, otherwise in _FIGURES:
        plates = [make(comparison) for comparison in comparisons]
        for own, plate in zip(drawn, plates, strict=True):
            if plate is not None:
                own.append(plate)
        if otherwise is not None and not any(plates):
            missing.append(otherwise)
    return Plates(title="Figures of the paper", drawn=drawn, missing=_together(missing))


def _together(missing: Sequence[MissingPlate]) -> list[MissingPlate]:
    """Name figures that need the same runs once: `Figure 3` and `Figure 4` become `Figures 3 and 4`."""
    groups: dict[tuple[str, str], list[str]] = {}
    for one in missing:
        groups.setdefault((one.needs, one.command), []).append(one.number)
    return [
        MissingPlate(number=_numbers(numbers), needs=needs, command=command) for (needs, command), numbers in groups.items()
    ]


def _numbers(numbers: Sequence[str]) -> str:
    return numbers[0] if len(numbers) == 1 else f"Figures {' and '.join(one.rpartition(' ')[2] for one in numbers)}"
