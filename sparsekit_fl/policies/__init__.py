"""The seven kinds of choice that make up a method; one file per kind, each opening with its base class."""

from sparsekit_fl.client.context import ClientContext
from sparsekit_fl.client.kept import Mask
from sparsekit_fl.client.messages import Assignment, Update
from sparsekit_fl.client.optimizer import Adjust
from sparsekit_fl.policies.aggregate import AggregatePolicy, Mean, TouchedRowsMean
from sparsekit_fl.policies.combine import Rule, mean
from sparsekit_fl.policies.context import ServerContext
from sparsekit_fl.policies.learnable import LearnableSgd
from sparsekit_fl.policies.local import Leaves, LocalPolicy, LocalResult, Sgd, load_leaves, pull_towards, sgd
from sparsekit_fl.policies.mask import Dense, MaskPolicy, RoundView, ServerCriterion, UnitCriterion
from sparsekit_fl.policies.personal import GlobalModel, LocalModel, PersonalModel, PersonalPolicy
from sparsekit_fl.policies.pruning import PruneWhenAccurate, RememberedMask, UnderOwnMask
from sparsekit_fl.policies.ratio import BanditRatio, ByCapability, Constant, Full, RatioPolicy
from sparsekit_fl.policies.sampling import BySize, Fixed, Poisson, PowerOfChoice, SamplingPolicy, Uniform
from sparsekit_fl.policies.share import Everything, Nothing, OwnClasses, PrivateHead, SharePolicy
from sparsekit_fl.policies.submodel import RecalibratedBatchNorm, SubmodelSgd

__all__ = [
    "Adjust",
    "AggregatePolicy",
    "Assignment",
    "BanditRatio",
    "ByCapability",
    "BySize",
    "ClientContext",
    "Constant",
    "Dense",
    "Everything",
    "Fixed",
    "Full",
    "GlobalModel",
    "LearnableSgd",
    "Leaves",
    "LocalModel",
    "LocalPolicy",
    "LocalResult",
    "Mask",
    "MaskPolicy",
    "Mean",
    "Nothing",
    "OwnClasses",
    "PersonalModel",
    "PersonalPolicy",
    "Poisson",
    "PowerOfChoice",
    "PrivateHead",
    "PruneWhenAccurate",
    "RatioPolicy",
    "RecalibratedBatchNorm",
    "RememberedMask",
    "RoundView",
    "Rule",
    "SamplingPolicy",
    "ServerContext",
    "ServerCriterion",
    "Sgd",
    "SharePolicy",
    "SubmodelSgd",
    "TouchedRowsMean",
    "UnderOwnMask",
    "Uniform",
    "UnitCriterion",
    "Update",
    "load_leaves",
    "mean",
    "pull_towards",
    "sgd",
]
