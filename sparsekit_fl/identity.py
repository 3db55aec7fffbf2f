"""code_version(): which code this is, so that a result, a checkpoint and a device can say by which they were made."""

from __future__ import annotations

import hashlib
from functools import cache
from pathlib import Path

import sparsekit
from sparsekit.version import __version__

_LETTERS = 12


@cache
def code_digest() -> str:
    """Return the SHA-256 of the source of both packages, 12 hexadecimal digits; the same for every way of ending a line."""
    sha = hashlib.sha256()
    core = Path(sparsekit.__file__).parent
    for package in (core, Path(__file__).parent):
        for path in sorted(package.rglob("*.py")):
            sha.update(f"{package.name}/{path.relative_to(package).as_posix()}".encode())
            sha.update(path.read_bytes().replace(b"\r\n", b"\n"))
    return sha.hexdigest()[:_LETTERS]


def code_version() -> dict[str, str]:
    """Return version and digest of the code, as plain JSON values."""
    return {"sparsekit": __version__, "code": code_digest()}
