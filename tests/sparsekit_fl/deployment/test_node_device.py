"""A SuperNode trains on a device of its own, which its `--node-config` names."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("flwr", reason="flwr is not installed; pip install 'sparsekit-torch[flower]'")

from sparsekit.errors import InvalidValueError
from sparsekit_fl.deployment import apps
from sparsekit_fl.deployment.plan import Plan


def _context(**node_config: str) -> Any:
    return SimpleNamespace(run_config=Plan().to_run_config(), node_config={"clients": "0-1", **node_config})


def test_the_device_of_a_node_is_its_own_and_the_cpu_where_none_is_named() -> None:
    assert apps._make(_context())[0].config.device == "cpu"
    assert apps._make(_context(device="meta"))[0].config.device == "meta"
    with pytest.raises(InvalidValueError, match="device must be cpu, cuda, cuda:N or mps, or several by commas, got 'gpu1'"):
        apps._make(_context(device="gpu1"))
