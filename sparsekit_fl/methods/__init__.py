"""Methods: one file per paper. `registry` finds them, and those of the entry points, by name.

Each file's function is also one of this module. They are imported here and not when asked for: a submodule that is imported
later would take its function's name.
"""

from __future__ import annotations

from sparsekit.registry import Registry
from sparsekit_fl.methods.cs import cs
from sparsekit_fl.methods.depthfl import depthfl
from sparsekit_fl.methods.ditto import ditto
from sparsekit_fl.methods.efd import efd
from sparsekit_fl.methods.fedavg import fedavg
from sparsekit_fl.methods.fedlps import fedlps, fedlps_own, fedlps_paper
from sparsekit_fl.methods.fedmp import fedmp
from sparsekit_fl.methods.fedp3 import fedp3
from sparsekit_fl.methods.fedper import fedper
from sparsekit_fl.methods.fedprox import fedprox
from sparsekit_fl.methods.fedrep import fedrep
from sparsekit_fl.methods.fedrolex import fedrolex
from sparsekit_fl.methods.fedspa import fedspa
from sparsekit_fl.methods.fjord import fjord
from sparsekit_fl.methods.hermes import hermes
from sparsekit_fl.methods.heterofl import heterofl
from sparsekit_fl.methods.local import local
from sparsekit_fl.methods.lotteryfl import lotteryfl
from sparsekit_fl.methods.oort import oort
from sparsekit_fl.methods.per_fedavg import per_fedavg
from sparsekit_fl.methods.prunefl import prunefl
from sparsekit_fl.methods.refl import refl
from sparsekit_fl.methods.scaffold import scaffold
from sparsekit_fl.methods.settings import with_settings

__all__ = [
    "cs",
    "depthfl",
    "ditto",
    "efd",
    "fedavg",
    "fedlps",
    "fedlps_own",
    "fedlps_paper",
    "fedmp",
    "fedp3",
    "fedper",
    "fedprox",
    "fedrep",
    "fedrolex",
    "fedspa",
    "fjord",
    "hermes",
    "heterofl",
    "local",
    "lotteryfl",
    "oort",
    "per_fedavg",
    "prunefl",
    "refl",
    "registry",
    "scaffold",
    "with_settings",
]

# The ablations lie with the rest of the paper, above the methods, so they stand here by name alone.
_ABLATIONS = (
    "fedlps_magnitude", "fedlps_ordered", "fedlps_random", "flst", "p_ucbv_dyn", "p_ucbv_fix", "rcr_dyn", "rcr_fix",
)  # fmt: skip

registry = Registry(
    "method",
    {name.replace("_", "-"): f"sparsekit_fl.paper.ablations:{name}" for name in _ABLATIONS}
    | {
        name.replace("_", "-"): f"{globals()[name].__module__}:{name}"
        for name in __all__
        if name not in ("registry", "with_settings")
    },
    group="sparsekit_fl.methods",
)
