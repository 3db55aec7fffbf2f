"""The seven kinds of choice that make up a method; one file per kind, each opening with its base class."""

# ruff: noqa: I001 - one line for each home

from __future__ import annotations

from typing import TYPE_CHECKING

from sparsekit.lazy import lazy_names

if TYPE_CHECKING:
    from sparsekit_fl.client.context import ClientContext as ClientContext
    from sparsekit_fl.client.packing import Mask as Mask
    from sparsekit_fl.client.messages import Request as Request, Update as Update
    from sparsekit_fl.client.optimizer import Adjust as Adjust
    from sparsekit_fl.policies.aggregate import AggregatePolicy as AggregatePolicy, Mean as Mean
    from sparsekit_fl.policies.aggregate import TouchedRowsMean as TouchedRowsMean
    from sparsekit_fl.policies.aggregate import Rule as Rule, mean as mean
    from sparsekit_fl.policies.context import ServerContext as ServerContext
    from sparsekit_fl.policies.learnable import LearnableSgd as LearnableSgd
    from sparsekit_fl.policies.local import Leaves as Leaves, LocalPolicy as LocalPolicy, LocalResult as LocalResult, Sgd as Sgd
    from sparsekit_fl.policies.local import load_leaves as load_leaves, pull_towards as pull_towards, sgd as sgd
    from sparsekit_fl.policies.mask import Dense as Dense, MaskPolicy as MaskPolicy, RoundView as RoundView
    from sparsekit_fl.policies.mask import ServerCriterion as ServerCriterion, UnitCriterion as UnitCriterion
    from sparsekit_fl.policies.personal import GlobalModel as GlobalModel, LocalModel as LocalModel
    from sparsekit_fl.policies.personal import PersonalModel as PersonalModel, PersonalPolicy as PersonalPolicy
    from sparsekit_fl.policies.mask import PruneWhenAccurate as PruneWhenAccurate, RememberedMask as RememberedMask
    from sparsekit_fl.policies.ratio import BanditRatio as BanditRatio, ByCapability as ByCapability, Constant as Constant
    from sparsekit_fl.policies.ratio import Full as Full, RatioPolicy as RatioPolicy
    from sparsekit_fl.policies.sampling import SamplingPolicy as SamplingPolicy, Uniform as Uniform
    from sparsekit_fl.policies.share import Everything as Everything, Nothing as Nothing, OwnClasses as OwnClasses
    from sparsekit_fl.policies.share import PrivateHead as PrivateHead, SharePolicy as SharePolicy
    from sparsekit_fl.policies.submodel import RecalibratedBatchNorm as RecalibratedBatchNorm, SubmodelSgd as SubmodelSgd
    from sparsekit_fl.policies.submodel import UnderOwnMask as UnderOwnMask

__all__, __getattr__ = lazy_names(__name__)
