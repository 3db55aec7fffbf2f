"""What scoring cost in results of version 0.1, which did not count it: recounted from who trained at which ratio.

`python benchmarks/scoring.py examples/paper/compare-mnist` prints, for each run of FedLPS and its parts, FLOPs of training and
of the passes by which it decides: each trained submodel on validation and training data, where the best is kept, and the model
of round 0 once for each client on its training data. Where a file has `flops_scoring`, the two must be equal to the digit.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

from sparsekit.allocation.choose import select
from sparsekit.criteria import Ordered, View
from sparsekit.measure.model import cost_model
from sparsekit.tracing.trace import trace_units
from sparsekit_fl.models import models
from sparsekit_fl.models.base import InputShape
from sparsekit_fl.results.read import read_result

INPUTS = {"mnist": ((1, 28, 28), 10), "cifar10": ((3, 32, 32), 10)}


class Recount:
    """FLOPs of one example through the uniform submodel of each ratio.

    Args:
        model: Name of the model.
        dataset: Name of the data set.
    """

    def __init__(self, model: str, dataset: str) -> None:
        shape, classes = INPUTS[dataset]
        spec = models[model]
        network = spec.build(classes=classes, channels=shape[0], size=shape[1:])
        inputs = InputShape("image", shape).zeros()
        self._graph = trace_units(network, *inputs)
        self._costs = cost_model(network, *inputs, graph=self._graph)
        self.forward = lru_cache(maxsize=None)(self._forward)

    def _forward(self, ratio: float) -> int:
        return self._costs.forward_flops(select(Ordered(), self._graph, ratio, View()))

    def of(self, result: Mapping[str, Any], *, train: int, val: int) -> tuple[int, int]:
        """Return FLOPs of training and of scoring.

        Args:
            result: As in `result.json`.
            train: Training examples of each client.
            val: Its validation examples.
        """
        policies = {kind: str(text) for kind, text in result["policies"].items()}
        first = policies["local"].startswith(("LearnableSgd", "PatternSgd")) or "passes=" in policies["local"]
        keeps = any(f"select='{rule}'" in policies["personal"] for rule in ("best", "loss"))
        epochs = result["config"]["training"]["local_epochs"]
        seen: set[str] = set()
        training = scoring = 0
        for record in result["rounds"]:
            for client, ratio in record["ratios"].items():
                training += 3 * epochs * train * self.forward(ratio)
                scoring += (train + val) * self.forward(ratio) * keeps
                scoring += train * self.forward(1.0) * (first and client not in seen)
                seen.add(client)
        return training, scoring


def main() -> None:
    """Print a line of JSON for each run whose training is recounted to the digit; others are not uniform submodels."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folders", nargs="+", type=Path)
    parser.add_argument("--train", type=int, default=180, help="training examples of each client; 180 in the image presets")
    parser.add_argument("--val", type=int, default=20, help="validation examples of each client; 20 in the image presets")
    given = parser.parse_args()
    counts: dict[tuple[str, str], Recount] = {}
    paths = [path for folder in given.folders for path in ([folder] if folder.is_file() else sorted(folder.rglob("*.json")))]
    for path in paths:
        result = read_result(path)
        about = result["config"]["experiment"]
        key = about["model"], about["dataset"]
        count = counts.setdefault(key, Recount(*key)) if about["dataset"] in INPUTS else None
        if count is None or result["policies"]["local"].startswith(("Sgd", "SubmodelSgd")):
            continue
        training, scoring = count.of(result, train=given.train, val=given.val)
        if training != result["cost"]["flops_compact_training"] or not scoring:
            continue
        own = result["cost"].get("flops_scoring")
        assert own in (None, scoring), f"{path}: recounted {scoring}, the file has {own}"
        line = {"method": result["method"], "seed": result["seed"], "rounds": len(result["rounds"]), "training": training}
        print(json.dumps({**line, "scoring": scoring, "share": round(scoring / training, 4), "in_the_file": own is not None}))


if __name__ == "__main__":
    main()
