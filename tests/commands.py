"""`sparsekit` as a process of its own, ended by a signal."""

import os
import subprocess
import sys
import time

# A shell that starts something in the background may have told it to ignore Ctrl-C, and children inherit that.
_MAIN = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler);from sparsekit.cli.main import main; main()"


def ended(arguments, number, when, *, group=False):
    """Send a command, or its group, a signal once `when()` is true; its exit code, standard output and standard error."""
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    process = subprocess.Popen([sys.executable, "-c", _MAIN, *arguments], **pipes, start_new_session=group)
    deadline = time.monotonic() + 120
    while not when():
        assert time.monotonic() < deadline
        assert process.poll() is None, process.communicate()[1]
        time.sleep(0.02)
    (os.killpg if group else os.kill)(process.pid, number)
    out, err = process.communicate(timeout=90)
    return process.returncode, out, err
