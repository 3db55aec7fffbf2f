"""The safetensors file of a compact model: tensors, and a description as JSON in its header."""

import contextlib
import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from sparsekit.errors import CompactFileError, SparsekitError
from sparsekit.graph import StateDict, UnitGraph
from sparsekit.version import __version__

_KEY, _FORMAT = "sparsekit", 3


def write_file(path: Path, entries: StateDict, spec: Mapping[str, Any]) -> None:
    """Write tensors, tied ones once, and JSON values, to which format and version are added; or leave an old file as it is."""
    description = {"format": _FORMAT, "sparsekit": __version__, **spec}
    header = {_KEY: json.dumps(description, separators=(",", ":"))}
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    temporary.touch()  # where this fails, the operating system says why: no such folder, no permission
    try:
        mode = temporary.stat().st_mode
        tensors = {name: entry.detach().cpu().contiguous() for name, entry in entries.items()}
        # The format allows no shared memory: what is a part of some is copied.
        apart = {name: t if t.nbytes == t.untyped_storage().nbytes() else t.clone() for name, t in tensors.items()}
        save_file(apart, temporary, metadata=header)
        # safetensors makes a file that its owner alone may read.
        temporary.chmod(mode)
        with temporary.open("rb+") as file:
            os.fsync(file.fileno())  # a power cut must not leave a name without its bytes
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def read_file(path: Path, *, tensors: bool = True) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return the tensors, if they are wanted, and the description that `write_file` wrote."""
    try:
        with safe_open(path, framework="pt") as file:
            header = file.metadata() or {}
            # Copies begin where torch lets tensors begin; otherwise the last bits of products would depend on their position
            # in the file.
            found = {name: file.get_tensor(name).clone() for name in file.keys()} if tensors else {}  # noqa: SIM118
    except SafetensorError as error:
        raise CompactFileError(
            f"{path} cannot be read: {error}; it is cut off, damaged or no safetensors file, so copy or save it again"
        ) from error
    if _KEY not in header:
        raise CompactFileError(f"{path} was not written by save_compact: its header has no {_KEY!r}; save the model with it")
    with damage(path):
        spec = json.loads(header[_KEY])
        if spec["format"] != _FORMAT:
            raise CompactFileError(
                f"{path} has format {spec['format']!r}, written by sparsekit {spec['sparsekit']}; this is {__version__}, which"
                f" reads format {_FORMAT}: install that version, or save again with this one"
            )
    return found, spec


@contextlib.contextmanager
def damage(path: str | os.PathLike[str]) -> Iterator[None]:
    """Report every error in reading a description as a damaged file."""
    try:
        yield
    except SparsekitError:
        raise
    except (LookupError, TypeError, AttributeError, ValueError) as error:
        raise CompactFileError(f"the description in {path} is damaged ({error!r}); save the model again") from error


def digest(graph: UnitGraph) -> str:
    """Return the SHA-256 of all that gives a mask its meaning: shapes, groups and their slices."""
    sha = hashlib.sha256(repr([(name, tuple(shape)) for name, shape in graph.shapes.items()]).encode())
    for group in graph.groups.values():
        sha.update(repr((group.name, group.size)).encode())
        for piece in group.slices:
            sha.update(repr((piece.name, piece.dim)).encode())
            sha.update(piece.index.cpu().contiguous().numpy().tobytes())
    return sha.hexdigest()
