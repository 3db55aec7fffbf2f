"""Children: a death is seen at once and named, no zombie is left, and siblings hold no pipe open."""

import contextlib
import os
import signal
import sys
import time

import pytest
import torch

from sparsekit_fl import processes
from sparsekit_fl.processes import Child, Children, one_thread, start_method


def echo(connection):
    with contextlib.suppress(EOFError, ConnectionResetError):
        while True:
            connection.send((os.getpid(), torch.get_num_threads(), connection.recv()))


def stubborn(connection):
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    connection.send("ready")
    while True:
        time.sleep(60)


def die(connection, how):
    connection.recv()
    os.kill(os.getpid(), how) if how else os._exit(3)


def one_answer(children: Children):
    return next(iter(children.poll(30)))


@pytest.mark.parametrize("method", ["fork", pytest.param("spawn", marks=pytest.mark.slow)])
def test_a_child_has_one_torch_thread_and_answers(method):
    with Children(method, daemon=True) as children:
        child = children.start(echo, task="any")
        child.connection.send("hello")
        assert one_answer(children) == (child, (child.process.pid, 1, "hello"))


@pytest.mark.parametrize(
    ("how", "text"),
    [(0, "exit code 3"), (signal.SIGTERM, r"signal 15 (SIGTERM)"), (signal.SIGKILL, "signal 9 (SIGKILL); often the system")],
)
def test_the_death_of_a_child_is_seen_at_once_though_its_siblings_live_and_is_named(how, text):
    with Children("fork", daemon=True) as children:
        victim = children.start(die, how, task="to die")
        for _ in range(2):
            children.start(echo)
        victim.connection.send("now")
        child, message = one_answer(children)
        assert (child.task, message) == ("to die", None)
        assert child.ending().startswith(text)


def test_closing_leaves_no_process_and_no_zombie_even_of_a_child_that_ignores_its_signal(monkeypatch):
    monkeypatch.setitem(processes._GOODBYE, True, ((0.0, signal.SIGTERM), (0.3, signal.SIGKILL)))
    with Children("fork", daemon=True) as children:
        started: list[Child] = [children.start(echo), children.start(stubborn, task="none")]
        assert one_answer(children)[1] == "ready"
    for child in started:
        with pytest.raises(ProcessLookupError):
            os.kill(child.process.pid, 0)
    assert started[1].process.exitcode == -signal.SIGKILL
    assert len(children) == 0


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux forks")
def test_processes_fork_for_the_cpu_alone_and_not_once_torch_has_threads_of_autograd(monkeypatch):
    assert [start_method(device) for device in (None, "cpu", "cuda:0")] == ["fork", "fork", "spawn"]
    monkeypatch.setattr(processes, "_autograd_threads", lambda: True)
    assert start_method("cpu") == "spawn"


TINY = 1e-39  # below the normal numbers of float32


def step_of_denormals(connection=None):
    """A step of SGD on weights that have nearly decayed: what comes out, and whether the gradient held numbers that small."""
    layer = torch.nn.Linear(4, 4, bias=False)
    torch.nn.init.constant_(layer.weight, TINY)
    (layer(torch.ones(2, 4)).sum() * TINY).backward()
    found = float(layer.weight.grad.max()), float((layer.weight.detach() * 1.0).max())
    if connection is None:
        return found
    return connection.send(found)


def test_a_step_while_training_takes_denormal_numbers_for_zero_and_one_before_and_after_does_not():
    assert all(value > 0 for value in step_of_denormals())
    with one_thread():
        assert step_of_denormals() == (0.0, 0.0)
        with one_thread():
            pass
        assert step_of_denormals() == (0.0, 0.0)
    assert all(value > 0 for value in step_of_denormals())


def test_workers_take_denormal_numbers_for_zero():
    with Children("fork", daemon=True) as children:
        children.start(step_of_denormals, task="step")
        assert one_answer(children)[1] == (0.0, 0.0)
