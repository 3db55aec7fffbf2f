"""Flower as the engine: the same runs through its Ray simulation, or on devices that it connects.

Nothing is imported here: a SuperNode starts a process for every message, which needs no simulation and no Ray.
"""

import os

__all__ = ["QUIET", "be_quiet"]

# Set by default, never over what the user set: no telemetry, usage reports or update checks. The report URL is a closed port
# of this machine: Ray posts a "disabled" report even where reports are switched off.
QUIET = {
    "FLWR_TELEMETRY_ENABLED": "0",
    "FLWR_DISABLE_UPDATE_CHECK": "1",
    "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_USAGE_STATS_REPORT_URL": "http://127.0.0.1:9/",
    "RAY_ENABLE_UV_RUN_RUNTIME_ENV": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    # Ray would start its actors at niceness 15, and beside other work they would hardly run.
    "RAY_worker_niceness": "0",
}


def be_quiet() -> None:
    """Put the defaults into this process's environment; processes that it starts inherit them."""
    for name, value in QUIET.items():
        os.environ.setdefault(name, value)


# Flower and Ray read their switches when they are imported, so this comes before everything that imports them.
be_quiet()
