"""A second device, `elsewhere`, for machines without a GPU: host memory that torch takes for another device's."""

import types
from contextlib import nullcontext
from functools import cache
from pathlib import Path
from typing import Any

import torch


@cache
def load() -> None:
    """Compile the extension, once for each version of torch, and register the device; needs a C++ compiler."""
    from torch.utils import cpp_extension

    cpp_extension.load(
        name="sparsekit_second_device",
        sources=[str(Path(__file__).parent / "second.cpp")],
        extra_cflags=["-O1", "-g0", "-w"],
        is_python_module=False,
    )
    torch.utils.rename_privateuse1_backend("elsewhere")
    torch._register_device_module("elsewhere", _module())
    torch.utils.generate_methods_for_privateuse1_backend(for_packed_sequence=False, for_storage=True)


def _module() -> types.ModuleType:
    module: Any = types.ModuleType("torch.elsewhere")
    module.is_available = lambda: True
    module.device_count = lambda: 1
    module.current_device = lambda: 0
    module.set_device = lambda _: None
    module.device = lambda _: nullcontext()
    module.synchronize = lambda *_: None
    module._is_in_bad_fork = lambda: False
    module.manual_seed_all = lambda _: None
    module.get_rng_state = lambda *_: torch.get_rng_state()
    module.set_rng_state = lambda *_: None
    module.get_amp_supported_dtype = lambda: [torch.bfloat16, torch.float16]
    return module
