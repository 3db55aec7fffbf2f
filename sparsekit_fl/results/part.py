"""Part: what `result.json` is made of, from which its schema follows; costs and failures as they stand in it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Annotated, Any, Self

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, PlainSerializer, PlainValidator

from sparsekit_fl.client.messages import WorkCost


class Part(BaseModel):
    """Immutable, made by the names of its fields, read from and written as plain JSON values.

    A field that has a default is left out of the file where it has that value.
    """

    model_config = ConfigDict(frozen=True, populate_by_name=True, arbitrary_types_allowed=True)

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        return self.model_dump(mode="json", by_alias=True, exclude_defaults=True)

    @classmethod
    def from_dict(cls, raw: Mapping[str, Any]) -> Self:
        """The inverse of `to_dict`; numbers that were not finite come back as NaN.

        Raises:
            ValueError: a key is missing or holds something else.
        """
        return cls.model_validate(raw)


def about(text: str, **more: Any) -> Any:
    """Describe a field in the schema; without a default it is in every file."""
    return Field(description=text, **more)


def plain(value: Any) -> Any:
    """JSON values only: numbers that are not finite become null, as JSON has none."""
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    return value


def _or_nan(value: Any) -> Any:
    return math.nan if value is None else value


Count = Annotated[int, Field(ge=0)]
_Seconds = Annotated[float, Field(ge=0)]
Number = Annotated[float, BeforeValidator(_or_nan), PlainSerializer(plain, return_type=float | None)]
"""Null in the file where it is not finite."""


class _Failure(Part):
    client: Count
    reason: str


def _pairs(value: Any) -> Any:
    return tuple((one["client"], one["reason"]) if isinstance(one, Mapping) else one for one in value)


def _failures(pairs: tuple[tuple[int, str], ...]) -> list[_Failure]:
    return [_Failure(client=client, reason=reason) for client, reason in pairs]


Failures = Annotated[tuple[tuple[int, str], ...], BeforeValidator(_pairs), PlainSerializer(_failures)]
"""Id and reason of each client."""


_SAME = (
    "flops", "flops_paper", "uplink_bytes", "downlink_bytes", "wall_seconds", "memory_bytes", "flops_deploying",
    "flops_scoring",
)  # fmt: skip


class Cost(Part):
    """A `WorkCost` as it stands in files."""

    flops: Count = about("what physically small models executed, flops_scoring among it; a multiply-add is 2")
    flops_paper: Count = about("training alone, by the row-mask convention of the paper's tables")
    uplink_bytes: Count
    downlink_bytes: Count
    simulated_seconds: _Seconds = about("with the passes of flops_scoring")
    wall_seconds: _Seconds
    memory_bytes: Count = about("memories of clients that travelled; absent where none did", default=0)
    flops_deploying: Count = about(
        "what clients run once to make the models that they deploy, in no total; of the run, absent where that is nothing",
        default=0,
    )
    flops_scoring: Count = about("passes by which a method decides while training; absent where none", default=0)
    # Both parts, since a difference with the total would round.
    flops_training: Count | None = about("flops without them; absent where none", default=None)
    simulated_seconds_scoring: _Seconds = about("of these passes; absent where none", default=0.0)
    simulated_seconds_training: _Seconds | None = about("without them; absent where none", default=None)

    @staticmethod
    def of(cost: WorkCost) -> Cost:
        """Return the cost of some work."""
        return Cost(
            **{name: getattr(cost, name) for name in _SAME},
            simulated_seconds=cost.simulated_seconds,
            flops_training=cost.flops_training if cost.flops_scoring else None,
            simulated_seconds_scoring=cost.scoring_seconds,
            simulated_seconds_training=cost.seconds if cost.scoring_seconds else None,
        )

    def work(self) -> WorkCost:
        """The inverse of `of`."""
        training = self.simulated_seconds_training
        return WorkCost(
            **{name: getattr(self, name) for name in _SAME},
            seconds=self.simulated_seconds if training is None else training,
            scoring_seconds=self.simulated_seconds_scoring,
        )


def _work(value: Any) -> WorkCost:
    return value if isinstance(value, WorkCost) else Cost.from_dict(value).work()


SavedCost = Annotated[WorkCost, PlainValidator(_work), PlainSerializer(Cost.of, return_type=Cost)]
