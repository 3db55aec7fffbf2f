"""Methods: one file per paper. `registry` finds them, and those of the entry points, by name.

Each file's function is also one of this module. They are imported here and not when asked for: a submodule that is imported
later would take its function's name.
"""

import inspect

from sparsekit.registry import Registry
from sparsekit_fl.methods.cs import cs as cs
from sparsekit_fl.methods.depthfl import depthfl as depthfl
from sparsekit_fl.methods.ditto import ditto as ditto
from sparsekit_fl.methods.efd import efd as efd
from sparsekit_fl.methods.fedavg import fedavg as fedavg
from sparsekit_fl.methods.fedlps import fedlps as fedlps
from sparsekit_fl.methods.fedlps import fedlps_own as fedlps_own
from sparsekit_fl.methods.fedlps import fedlps_paper as fedlps_paper
from sparsekit_fl.methods.fedmp import fedmp as fedmp
from sparsekit_fl.methods.fedp3 import fedp3 as fedp3
from sparsekit_fl.methods.fedper import fedper as fedper
from sparsekit_fl.methods.fedprox import fedprox as fedprox
from sparsekit_fl.methods.fedrep import fedrep as fedrep
from sparsekit_fl.methods.fedrolex import fedrolex as fedrolex
from sparsekit_fl.methods.fedspa import fedspa as fedspa
from sparsekit_fl.methods.fjord import fjord as fjord
from sparsekit_fl.methods.hermes import hermes as hermes
from sparsekit_fl.methods.heterofl import heterofl as heterofl
from sparsekit_fl.methods.local import local as local
from sparsekit_fl.methods.lotteryfl import lotteryfl as lotteryfl
from sparsekit_fl.methods.oort import oort as oort
from sparsekit_fl.methods.per_fedavg import per_fedavg as per_fedavg
from sparsekit_fl.methods.prunefl import prunefl as prunefl
from sparsekit_fl.methods.refl import refl as refl
from sparsekit_fl.methods.scaffold import scaffold as scaffold
from sparsekit_fl.methods.settings import with_settings as with_settings

_MADE = {name: made for name, made in dict(globals()).items() if inspect.isfunction(made) and name != "with_settings"}
__all__ = [*_MADE, "registry", "with_settings"]

# The ablations lie with the rest of the paper, above the methods, so they stand here by name alone.
_ABLATIONS = (
    "fedlps_magnitude", "fedlps_ordered", "fedlps_random", "flst", "p_ucbv_dyn", "p_ucbv_fix", "rcr_dyn", "rcr_fix",
)  # fmt: skip

registry = Registry(
    "method",
    {name.replace("_", "-"): f"sparsekit_fl.paper.ablations:{name}" for name in _ABLATIONS}
    | {name.replace("_", "-"): f"{made.__module__}:{name}" for name, made in _MADE.items()},
    group="sparsekit_fl.methods",
)
