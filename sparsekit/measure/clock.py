"""How long a call takes, a model in eval mode meanwhile, and times of layers that were measured before, kept on disk."""

import contextlib
import hashlib
import json
import logging
import os
import platform
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import platformdirs
import torch
from torch import nn

from sparsekit.tracing.inputs import find_tensors

_logger = logging.getLogger(__name__)


def device_of(model: nn.Module, *inputs: Any) -> torch.device:
    """Where a model or, without parameters, its inputs are."""
    return next((tensor.device for tensor in [*model.parameters(), *find_tensors(inputs)]), torch.device("cpu"))


def stopwatch(device: torch.device) -> Callable[[Callable[[], object]], float]:
    """A function that makes a call and returns the seconds until the device has finished."""
    synchronize = torch.get_device_module(device).synchronize

    def timed(call: Callable[[], object]) -> float:
        synchronize()
        start = time.perf_counter()
        call()
        synchronize()
        return time.perf_counter() - start

    return timed


@contextlib.contextmanager
def evaluated(*models: nn.Module) -> Iterator[None]:
    """Eval mode meanwhile; each module goes back to its own."""
    modes = [(module, module.training) for model in models for module in model.modules()]
    try:
        for model in models:
            model.eval()
        yield
    finally:
        for module, mode in modes:
            module.training = mode


def cache_folder() -> Path:
    """Where measurements are kept: `SPARSEKIT_CACHE`, else the cache folder of the platform."""
    own = os.environ.get("SPARSEKIT_CACHE")
    return Path(own).expanduser() if own else platformdirs.user_cache_path("sparsekit", appauthor=False)


def device_name(device: torch.device) -> str:
    """What times depend on beside the layer: the processor, its threads and the version of torch."""
    if device.type == "cuda":
        return f"{torch.cuda.get_device_name(device)}, torch {torch.__version__}"
    processor = platform.processor() or platform.machine()
    with contextlib.suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        processor = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), processor)
    return f"{device.type}, {processor}, {torch.get_num_threads()} threads, torch {torch.__version__}"


class LatencyCache(dict[str, float]):
    """What was timed → seconds, for one device. A folder that cannot be read or written costs the memory alone."""

    def __init__(self, device: torch.device, folder: Path | None = None) -> None:
        """Open the cache of a device.

        Args:
            device: Where layers run.
            folder: None takes `cache_folder()`.
        """
        super().__init__()
        self.name = device_name(device)
        digest = hashlib.sha256(self.name.encode()).hexdigest()[:16]
        self.path = (folder if folder is not None else cache_folder()) / "latency" / f"{digest}.json"
        try:
            found = json.loads(self.path.read_text(encoding="utf-8"))
            self.update((str(key), float(value)) for key, value in found["seconds"].items())
        except FileNotFoundError:
            pass
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            _logger.warning("measured latencies in %s cannot be read (%s); layers are measured again", self.path, error)
        self._read = dict(self)

    def save(self) -> None:
        """Write what is new, at once or not at all; an unwritable folder is only logged."""
        if self == self._read:
            return
        temporary = self.path.with_name(f".{self.path.name}.{os.getpid()}")
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            temporary.write_text(json.dumps({"device": self.name, "seconds": self}), encoding="utf-8")
            temporary.replace(self.path)
        except OSError as error:
            _logger.warning("measured latencies cannot be kept: %s; set SPARSEKIT_CACHE to a folder that can be written", error)
        self._read = dict(self)
