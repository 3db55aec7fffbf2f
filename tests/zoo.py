"""The small architectures that the tests share, by name, with example inputs and the groups that must be found."""

from __future__ import annotations

import zoo_attention  # noqa: F401 (fills the zoo)
import zoo_constructs  # noqa: F401
import zoo_layers  # noqa: F401
import zoo_wiring  # noqa: F401
from zoo_base import ZOO, Architecture, Lambda, build

__all__ = ["ZOO", "Architecture", "Lambda", "build"]
