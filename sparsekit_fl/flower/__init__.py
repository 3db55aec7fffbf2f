"""Submodels for an existing Flower app: `train_submodel` on the client, `SubmodelStrategy` on the server.

`app` is the app that `sparsekit run --engine flower` and `sparsekit flower-app` use for all methods; `engine` is its engine.
"""

# ruff: noqa: I001 - one line for each module

from __future__ import annotations

from typing import TYPE_CHECKING

from sparsekit.lazy import lazy_names

if TYPE_CHECKING:
    from sparsekit_fl.flower.client import (
        Submodel as Submodel,
        load_submodel as load_submodel,
        train_submodel as train_submodel,
    )
    from sparsekit_fl.flower.strategy import BanditRatios as BanditRatios, SubmodelStrategy as SubmodelStrategy

_HOMES = {
    "sparsekit_fl.flower.client": "Submodel load_submodel train_submodel",
    "sparsekit_fl.flower.strategy": "BanditRatios SubmodelStrategy",
}
__all__, __getattr__ = lazy_names(__name__, _HOMES)
