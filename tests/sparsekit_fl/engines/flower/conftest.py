"""The helpers of this folder are modules of their own, which processes of a deployment import too."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parent))
