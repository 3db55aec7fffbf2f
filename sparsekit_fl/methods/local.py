"""Local training: each client alone, with the schedule of the federated methods. The baseline to beat.

On clients that hold few classes it is a strong rival, so every table should show it.
"""

from __future__ import annotations

from typing import Literal

from sparsekit_fl.methods.method import Method
from sparsekit_fl.policies import GlobalModel, LocalModel, Nothing


def local(select: Literal["last", "best"] = "last") -> Method:
    """Nothing is shared; a client goes on from its own last state whenever it is sampled.

    Args:
        select: Which of a client's own models it deploys: the last, or the best on its own validation data.
    """
    personal = GlobalModel() if select == "last" else LocalModel(select=select)
    return Method(name="local", source="no federation", share=Nothing(), personal=personal)
