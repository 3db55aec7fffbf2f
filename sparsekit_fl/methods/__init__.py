"""Methods: one class per paper. `registry` finds them, and methods of plug-ins, by name; `make_method` makes one from text.

Each class is also an attribute of this module, by its name with underscores: `fl.methods.fedprox(mu=0.1)`. They are imported
eagerly, because a submodule that is imported later, such as `fedlps`, would replace the class of the same name.
"""

# ruff: noqa: F401, I001 - each class goes into the table

from collections.abc import Mapping
from typing import Any

from sparsekit.errors import InvalidValueError
from sparsekit.registry import Registry
from sparsekit_fl.methods.adapters import FlexLoRA as flexlora, HetLoRA as hetlora
from sparsekit_fl.methods.base import Method
from sparsekit_fl.methods.depthfl import DepthFL as depthfl
from sparsekit_fl.methods.fedlps import FedLPS as fedlps
from sparsekit_fl.methods.fedlps_paper import FedLPSMagnitude as fedlps_magnitude, FedLPSOrdered as fedlps_ordered
from sparsekit_fl.methods.fedlps_paper import FedLPSPaper as fedlps_paper, FedLPSRandom as fedlps_random, FLST as flst
from sparsekit_fl.methods.fedlps_paper import PUCBVDyn as p_ucbv_dyn, PUCBVFix as p_ucbv_fix
from sparsekit_fl.methods.fedlps_paper import RCRDyn as rcr_dyn, RCRFix as rcr_fix
from sparsekit_fl.methods.personal_masks import FedSpa as fedspa, Hermes as hermes, LotteryFL as lotteryfl
from sparsekit_fl.methods.sampling import REFL as refl, Oort as oort
from sparsekit_fl.methods.submodels import EFD as efd, FedMP as fedmp, FedRolex as fedrolex
from sparsekit_fl.methods.submodels import FjORD as fjord, HeteroFL as heterofl
from sparsekit_fl.methods.weight_masks import CS as cs, PruneFL as prunefl
from sparsekit_fl.methods.whole_models import Ditto as ditto, FedAvg as fedavg, FedP3 as fedp3, FedPer as fedper
from sparsekit_fl.methods.whole_models import FedProx as fedprox, FedRep as fedrep, Local as local, PerFedAvg as per_fedavg
from sparsekit_fl.config import read_keywords, read_settings

_MADE = {
    name: made
    for name, made in dict(globals()).items()
    if made is not Method and isinstance(made, type) and issubclass(made, Method)
}
__all__ = [*_MADE, "registry"]

registry = Registry(
    "method",
    {name.replace("_", "-"): f"{made.__module__}:{made.__name__}" for name, made in sorted(_MADE.items())},
    group="sparsekit_fl.methods",
)


def make_method(text: str, *, settings: Mapping[str, Any] | None = None) -> Method:
    """Make a method from its name in the registry, or from `package.module:Class`; options may follow: `fedprox mu=0.1`.

    `settings` are further options, name → value. Text is converted as the annotation of the field says.
    """
    name, *own = text.split() or [text]
    kind = registry.find(name)
    if not (isinstance(kind, type) and issubclass(kind, Method)):
        called = getattr(kind, "__name__", type(kind).__name__)
        raise InvalidValueError(f"{name!r} must be a subclass of sparsekit_fl.Method, got {called}")
    advice = f"; `sparsekit describe {name}` shows its options, `sparsekit list options` those of a run"
    given = {**read_settings(own), **(settings or {})}
    return kind(**read_keywords(kind, given, name=f"method {name!r}", advice=advice))
