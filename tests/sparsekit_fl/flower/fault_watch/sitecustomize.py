"""Python imports this at its start: every process of a deployment under test writes down whom it contacts outside."""

import ipaddress
import os
import sys
from pathlib import Path
from typing import Any


def _outside(host: Any) -> bool:
    if host in (None, "", b"", "localhost", b"localhost"):
        return False
    text = host.decode() if isinstance(host, bytes) else str(host)
    try:
        found = ipaddress.ip_address(text.partition("%")[0])
    except ValueError:
        return True
    # Listening on all addresses, or asking for them, contacts nobody.
    return not (found.is_loopback or found.is_unspecified)


def _watch(event: str, arguments: tuple[Any, ...]) -> None:
    if event == "socket.getaddrinfo":
        host = arguments[0]
    elif event in ("socket.connect", "socket.sendto") and isinstance(arguments[1], tuple):
        host = arguments[1][0]
    else:
        return
    folder = os.environ.get("SPARSEKIT_FAULTS")
    if folder and _outside(host):
        with (Path(folder) / f"outside-{os.getpid()}").open("a") as file:
            file.write(f"{event} {host!r}: {sys.argv[:1]}\n")


sys.addaudithook(_watch)
