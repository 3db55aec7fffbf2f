"""The helpers of this folder are modules of their own, which processes of a deployment import too."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parent))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The longest run comes first: it waits most of the time, and with several workers the others fill its waits."""
    items.sort(key=lambda item: item.path.name != "test_faults_deployment.py")
