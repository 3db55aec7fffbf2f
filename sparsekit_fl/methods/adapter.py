"""policies_of(): runs a method of `base` by the seven policies that the engine still calls. It goes with them."""

from dataclasses import dataclass, replace

from torch import Tensor, nn

from sparsekit.graph import StateDict, UnitGraph
from sparsekit_fl.client.context import ClientContext
from sparsekit_fl.client.messages import Request, Update
from sparsekit_fl.client.packing import Mask
from sparsekit_fl.methods.base import Method
from sparsekit_fl.methods.method import Method as Policies
from sparsekit_fl.methods.task import Task
from sparsekit_fl.policies.aggregate import AggregatePolicy, Arrivals, Rule, mean
from sparsekit_fl.policies.context import ServerContext
from sparsekit_fl.policies.local import LocalPolicy, LocalResult
from sparsekit_fl.policies.mask import MaskPolicy
from sparsekit_fl.policies.personal import PersonalModel, PersonalPolicy
from sparsekit_fl.policies.ratio import RatioPolicy
from sparsekit_fl.policies.sampling import SamplingPolicy
from sparsekit_fl.policies.share import SharePolicy
from sparsekit_fl.policies.submodel import RecalibratedBatchNorm
from sparsekit_fl.problem.problem import Problem


def _server(ctx: ServerContext) -> ServerContext:
    return ctx.scoped("aggregate")


@dataclass(frozen=True)
class _Sampling(SamplingPolicy):
    of: Method

    def sample(self, ctx: ServerContext) -> list[int]:
        return self.of.sample(_server(ctx))

    def seconds(self, ctx: ServerContext) -> float | None:
        return self.of.seconds(_server(ctx))


@dataclass(frozen=True)
class _Ratio(RatioPolicy):
    of: Method
    tasks: dict[int, Task]

    def propose(self, ctx: ServerContext, client_id: int) -> float | None:
        self.tasks[client_id] = self.of.assign(_server(ctx), client_id)
        return self.tasks[client_id].ratio


@dataclass(frozen=True)
class _Mask(MaskPolicy):
    of: Method
    tasks: dict[int, Task]

    def check(self, problem: Problem, graph: UnitGraph) -> None:
        self.of.check(problem, graph)

    def propose(self, ctx: ServerContext, client_id: int, proposal: float | None) -> Mask | None:
        return self.tasks[client_id].mask


@dataclass(frozen=True)
class _Local(LocalPolicy):
    of: Method

    def prepare(self, problem: Problem) -> Problem:
        return self.of.prepare(problem)

    def train(self, ctx: ClientContext, start: StateDict, mask: Mask | None, ratio: float) -> LocalResult:
        result = self.of.train(ctx, Task(state=start, mask=mask, ratio=ratio, extra=ctx.extra))
        names = ("state", "mask", "log", "extra", "metrics", "work", "ratio", "module")
        found = _Uploading(**{name: getattr(result, name) for name in names})
        object.__setattr__(found, "upload", result.upload)
        return found


@dataclass(frozen=True, eq=False, kw_only=True)
class _Uploading(LocalResult):
    upload: Mask | None = None


@dataclass(frozen=True)
class _Share(SharePolicy):
    of: Method

    def is_shared(self, name: str, graph: UnitGraph) -> bool:
        return name not in self.of.private(graph)

    def upload_mask(self, ctx: ClientContext, result: LocalResult) -> Mask | None:
        assert isinstance(result, _Uploading)
        return result.mask if result.upload is None else result.upload


@dataclass(frozen=True)
class _Aggregate(AggregatePolicy):
    of: Method
    tasks: dict[int, Task]

    def broadcast(self, ctx: ServerContext, client_id: int) -> StateDict:
        return self.tasks.pop(client_id).extra

    def validate(self, ctx: ServerContext, update: Update, assignment: Request) -> None:
        ratio = 1.0 if assignment.ratio is None else assignment.ratio
        self.of.validate(_server(ctx), update, Task(mask=assignment.mask, ratio=ratio, extra=assignment.extra))

    def combine(self, ctx: ServerContext, state: StateDict, arrivals: Arrivals, rule: Rule = mean) -> dict[str, Tensor]:
        return dict(self.of.aggregate(_server(ctx), [update for update, _ in arrivals]))


@dataclass(frozen=True)
class _Personal(PersonalPolicy):
    of: Method

    def model(self, ctx: ClientContext, state: StateDict) -> PersonalModel:
        ctx = replace(ctx, memories={**ctx.memories, "personal": ctx.memories.get("local", {})})
        model = self.of.deploy(ctx, state)
        return PersonalModel(state=model.state, mask=model.mask, ratio=model.ratio)

    def calibrate(self, ctx: ClientContext, module: nn.Module) -> bool:
        return RecalibratedBatchNorm().calibrate(ctx, module) if self.of.recalibrates else False


def policies_of(method: Method | Policies) -> Policies:
    """Return a method as seven policies."""
    if isinstance(method, Policies):
        return method
    tasks: dict[int, Task] = {}
    return _Adapted(
        name=method.name,
        source=method.source or "-",
        note=method.note,
        capability=method.capability,
        sampling=_Sampling(method),
        ratio=_Ratio(method, tasks),
        mask=_Mask(method, tasks),
        local=_Local(method),
        share=_Share(method),
        aggregate=_Aggregate(method, tasks),
        personal=_Personal(method),
    )


@dataclass(frozen=True, kw_only=True)
class _Adapted(Policies):
    def describe(self) -> dict[str, str]:
        local = self.local
        assert isinstance(local, _Local)
        return local.of.describe()
