"""One line about each command of the federated layer, so that `sparsekit --help` imports none of them."""

from __future__ import annotations

from collections.abc import Mapping

SUMMARIES: Mapping[str, str] = {
    "compare": "Run several methods over several seeds, and print mean ± deviation.",
    "describe": "Describe a method with all its options, or a data set, a criterion or anything else that has a name.",
    "export": "Export the global model of a run, or that of a client, for devices without Python.",
    "fedlps": "Run FedLPS: a submodel per client, its size and its units learned while it trains.",
    "flower-app": "Write a Flower app that runs any method on real devices: SuperLink and SuperNodes, with TLS.",
    "list": "List what options take, of one kind: our names and those of installed packages; or every option itself.",
    "predict": "Predict with the global model of a run, or with that of a client.",
    "report": "Draw the tables, figures and report.html of finished runs; nothing is trained.",
    "run": "Run any federated method; `sparsekit list methods` shows them, `sparsekit describe NAME` the options of one.",
    "sweep": "Tune options of a run and of its method: every trial is a run, scored on validation data.",
}
"""Command → the first line of its help, which a test compares."""
