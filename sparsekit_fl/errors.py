"""Errors of a federated run: what failed, for whom, in which round, and how to go on."""

from __future__ import annotations

from sparsekit.errors import DataError, SparsekitError

__all__ = [
    "ClientError",
    "LostMemoryError",
    "MemoryStateError",
    "ResumeError",
    "RunInterrupted",
    "UpdateError",
    "WorkerDiedError",
]


class ClientError(SparsekitError, RuntimeError):
    """A client failed; names the method, the policy, the round and the client id, and carries the cause."""


class UpdateError(SparsekitError, ValueError):
    """An update that the server must not absorb."""


class LostMemoryError(DataError):
    """The memory of a client is gone, or damaged, where it should be."""


class MemoryStateError(SparsekitError, TypeError):
    """A policy put something into its memory that cannot be saved."""


class ResumeError(SparsekitError, ValueError):
    """A run cannot be resumed: nothing is there, or an option changed."""


class RunInterrupted(SparsekitError, RuntimeError):
    """The user stopped the run; says where the state is and how to go on."""


class WorkerDiedError(SparsekitError, RuntimeError):
    """A worker process was killed, or failed for a reason that is no client's."""
