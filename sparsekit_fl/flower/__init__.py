"""Submodels for a Flower app that exists already: `train_submodel` on the client, `SubmodelStrategy` on the server."""

from sparsekit_fl.flower.client import Submodel, load_submodel, train_submodel
from sparsekit_fl.flower.strategy import BanditRatios, SubmodelStrategy

__all__ = ["BanditRatios", "Submodel", "SubmodelStrategy", "load_submodel", "train_submodel"]
