"""What all tests share: one torch thread, the folder of real data, a cache that stays inside the repository."""

import gc
import logging
import os
import sys
from pathlib import Path

import hypothesis
import pytest
import torch
from second_device import load
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._device import _device_constructors

torch.set_num_threads(1)

# A test says what must hold, not how fast the machine is.
hypothesis.settings.register_profile("sparsekit", deadline=None)
hypothesis.settings.load_profile("sparsekit")


def pytest_addoption(parser):
    parser.addoption(
        "--device",
        default=os.environ.get("SPARSEKIT_TEST_DEVICE", "cpu"),
        help="Where the tests run: cpu, cuda, cuda:1, mps, …; `elsewhere` is another device that needs no GPU, only a C++"
        " compiler (tests/second_device). Also SPARSEKIT_TEST_DEVICE.",
    )


def pytest_configure(config):
    if config.getoption("--device") == "elsewhere":
        load()
    cache = getattr(config, "cache", None)
    if cache is not None:
        os.environ.setdefault("SPARSEKIT_CACHE", str(cache.mkdir("sparsekit")))


SAME_BITS = {
    "test_same_results_as_the_default_engine",
    "test_scores_depend_on_the_view_alone_and_leave_it_as_it_was",
    "test_a_cut_network_is_saved_expanded_and_traced_again",
}
"""Tests of contracts that are marked `same_bits` here: contracts lie in the package, whose users do not know the marker."""


def pytest_collection_modifyitems(config, items):
    """Skip what needs a GPU where there is none, and mark what contracts promise."""
    for item in items:
        if getattr(item, "originalname", None) in SAME_BITS:
            item.add_marker(pytest.mark.same_bits)
    if not torch.cuda.is_available():
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


def pytest_collection_finish(session):
    """Keep what was collected out of every later garbage collection: thousands of tests and the modules that they import.

    Without this a fifth of the whole run is spent on walking through them again and again.
    """
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def loggers_as_they_were():
    """A command or a benchmark sets up the loggers of its process; the next test in the process must not notice."""
    loggers = [logging.getLogger(name) for name in ("sparsekit", "sparsekit_fl")]
    before = [(logger.level, logger.propagate, list(logger.handlers)) for logger in loggers]
    yield
    for logger, (level, propagate, handlers) in zip(loggers, before, strict=True):
        logger.setLevel(level)
        logger.propagate = propagate
        logger.handlers[:] = handlers


@pytest.fixture(autouse=True)
def process_as_it_was():
    """How torch computes in this process is the user's choice: whatever a test called must have left it alone."""
    before = _arithmetic()
    yield
    assert _arithmetic() == before, "a test or what it called changed how torch computes in this process"


def _arithmetic():
    return {
        "denormal numbers": float(torch.tensor(1e-39, device="cpu") * 1.0) != 0.0,
        "threads": torch.get_num_threads(),
        "type": torch.get_default_dtype(),
        "gradients": torch.is_grad_enabled(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "precision": torch.get_float32_matmul_precision(),
    }


@pytest.fixture(autouse=True)
def tensors_of_tests_on_the_device(request):
    """Whatever a test makes lies on the device of the run; what the package makes lies where the package puts it."""
    name = str(request.config.getoption("--device"))
    if name == "cpu" or request.node.get_closest_marker("cpu") or "device" in request.fixturenames:
        yield
    else:
        with OnDevice(name):
            yield


@pytest.fixture(scope="session")
def device(pytestconfig):
    """Where models and tensors of a test are."""
    return str(pytestconfig.getoption("--device"))


@pytest.fixture(scope="session")
def data_dir():
    """The folder of real data sets; tests that need it are skipped where there is none."""
    given = os.environ.get("SPARSEKIT_DATA")
    folder = Path(given) if given else Path(__file__).resolve().parents[2] / "shared" / "data"
    if not folder.is_dir():
        pytest.skip(f"no real data: {folder} does not exist; set SPARSEKIT_DATA to a folder with mnist/, cifar10/, …")
    return folder


TESTS = str(Path(__file__).parent)
PACKAGES = tuple(str(Path(__file__).parent.parent / name) for name in ("sparsekit", "sparsekit_fl"))


def _of_a_test():
    """Whether a file of the tests, not of the package, makes the present tensor."""
    frame = sys._getframe(2)
    while frame is not None:
        name = frame.f_code.co_filename
        if name.startswith(PACKAGES):
            return False
        if name.startswith(TESTS) and not name.endswith("conftest.py"):
            return True
        frame = frame.f_back
    return False


class OnDevice(TorchFunctionMode):
    def __init__(self, device):
        super().__init__()
        self.device = torch.device(device)
        self._makers = _device_constructors()

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if func in self._makers and kwargs.get("device") is None and isinstance(result, Tensor) and _of_a_test():
            moved = result.detach().to(self.device)
            return moved.requires_grad_(result.requires_grad)
        return result
