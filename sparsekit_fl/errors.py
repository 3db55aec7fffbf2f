"""Exceptions of federated runs. Their messages say which client and round are concerned, or how to continue."""

from sparsekit.errors import SparsekitError

__all__ = [
    "ClientError", "ResumeError", "RunInterrupted", "StorageError", "TooFewRepliesError", "UpdateError", "WorkerDiedError",
]  # fmt: skip


class ClientError(SparsekitError, RuntimeError):
    """A client failed. The message names the client, the round, the method and the hook that raised the exception."""

    exit_code = 1


class UpdateError(SparsekitError, ValueError):
    """The server refuses an update: it is malformed, has values that are not finite, or does not match its task."""


class TooFewRepliesError(ClientError, UpdateError):
    """Too few clients of a round sent a valid update: some failed, or their updates were refused."""


class StorageError(SparsekitError, OSError):
    """The state of a run could not be written, for example on a full disk; says how to continue."""

    exit_code = 1


class ResumeError(SparsekitError, ValueError):
    """A run cannot use its folder: nothing to resume, a changed option, a damaged file, or another run in it."""


class RunInterrupted(SparsekitError, RuntimeError):
    """The user stopped the run; says where the state is and how to continue."""

    exit_code = 130


class WorkerDiedError(SparsekitError, RuntimeError):
    """A worker process or Flower node was killed, often because memory ran out, or failed outside of a client's code."""

    exit_code = 1
