"""Errors of a federated run: they name the client, the round, and how to continue."""

from sparsekit.errors import SparsekitError

__all__ = [
    "ClientError", "ResumeError", "RunInterrupted", "StorageError", "TooFewRepliesError", "UpdateError", "WorkerDiedError",
]  # fmt: skip


class ClientError(SparsekitError, RuntimeError):
    """A client failed; names the method, the hook, the round and the client id, and carries the cause."""

    exit_code = 1


class UpdateError(SparsekitError, ValueError):
    """An update that the server must not aggregate."""


class TooFewRepliesError(ClientError, UpdateError):
    """Too few clients of a round sent a valid update: some failed, or their updates were refused."""


class StorageError(SparsekitError, OSError):
    """The state of a run could not be written, for example on a full disk; says how to continue."""

    exit_code = 1


class ResumeError(SparsekitError, ValueError):
    """A run cannot use a folder: nothing is there to resume, an option changed, or another run is there or writes to it."""


class RunInterrupted(SparsekitError, RuntimeError):
    """The user stopped the run; says where the state is and how to continue."""

    exit_code = 130


class WorkerDiedError(SparsekitError, RuntimeError):
    """A worker process was killed, or failed for a reason that is not a client's."""

    exit_code = 1
