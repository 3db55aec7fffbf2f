"""The command line of the core."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sparsekit.lazy import lazy_names

if TYPE_CHECKING:
    from sparsekit.cli.trials import finish_study as finish_study
    from sparsekit.cli.trials import run_study as run_study

__all__, __getattr__ = lazy_names(__name__)
