"""The helpers of this folder are modules of their own, which processes of a deployment import too."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parent))
