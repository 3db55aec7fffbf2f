"""The fingerprint of a run: which code and which data made it, so that nothing is taken for what it is not."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from typing import Any

from sparsekit_fl.errors import ResumeError
from sparsekit_fl.identity import code_version
from sparsekit_fl.problem.clients import Client
from sparsekit_fl.problem.digest import data_digest

_log = logging.getLogger(__name__)


def fingerprint_of(clients: Iterable[Client] | None) -> dict[str, Any]:
    """Return version and digest of the code, and the digest of the data, as plain JSON values.

    Args:
        clients: All clients; None leaves the data out, which takes no time.
    """
    return {**code_version(), "data": None if clients is None else data_digest(clients)}


def check_fingerprint(
    saved: Mapping[str, Any], now: Mapping[str, Any], *, where: str, accept_code: bool = False
) -> list[dict[str, Any]]:
    """Refuse a saved run of other data or of other code.

    Args:
        saved: The fingerprint that was saved.
        now: The fingerprint of what is to be run, from `fingerprint_of`.
        where: Names the run, for the message.
        accept_code: Take one of other code all the same, with a warning.

    Returns:
        The code of earlier rounds, for the result; empty where it is all the same.

    Raises:
        ResumeError: the data differ; or the code does, and `accept_code` is False.
    """
    if saved.get("data") and now.get("data") and saved["data"] != now["data"]:
        raise ResumeError(
            f"{where} was run on other data (digest {saved['data']}, now {now['data']}), and its numbers say nothing of these;"
            " choose another folder, or bring the data back"
        )
    earlier: list[dict[str, Any]] = [dict(one) for one in saved.get("earlier", ())]
    known = {name: saved[name] for name in ("sparsekit", "code")}
    if all(text == now[name] for name, text in known.items()):
        return earlier
    made = f"sparsekit {known['sparsekit']}, code {known['code']}"
    here = f"sparsekit {now['sparsekit']}, code {now['code']}"
    if not accept_code:
        raise ResumeError(
            f"{where} was made by {made}, and this is {here}; install that version, choose another folder, or take it all the"
            " same with accept_code=True (--accept-code)"
        )
    _log.warning("%s was made by %s, and this is %s; taken all the same", where, made, here)
    return [*earlier, known]
