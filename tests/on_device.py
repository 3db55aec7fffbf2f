"""OnDevice: a mode that puts tensors and modules of tests on a device, and leaves the package's own alone.

Numbers are drawn on the CPU, so that a test has the same ones on every device. What the package makes is left alone: a tensor
that it should have made on the device of a model, and made on the CPU, must fail.
"""

import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._device import _device_constructors

__all__ = ["OnDevice"]

TESTS = str(Path(__file__).parent)
PACKAGES = tuple(str(Path(__file__).parent.parent / name) for name in ("sparsekit", "sparsekit_fl"))


def _of_a_test() -> bool:
    """Whether a file of the tests, not of the package, makes the present tensor."""
    frame = sys._getframe(2)
    while frame is not None:
        name = frame.f_code.co_filename
        if name.startswith(PACKAGES):
            return False
        if name.startswith(TESTS) and not name.endswith(("on_device.py", "conftest.py")):
            return True
        frame = frame.f_back  # type: ignore[assignment]
    return False


class OnDevice(TorchFunctionMode):
    def __init__(self, device: str) -> None:
        super().__init__()
        self.device = torch.device(device)
        self._makers = _device_constructors()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if func in self._makers and kwargs.get("device") is None and isinstance(result, Tensor) and _of_a_test():
            moved = result.detach().to(self.device)
            return moved.requires_grad_(result.requires_grad)
        return result
