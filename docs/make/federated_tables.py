"""Tables of federated runs, from rows of results/federated.jsonl and results/adapters.jsonl."""

import math
import statistics
from collections.abc import Callable, Sequence
from functools import partial

from cells import Lines, Row, rows, table
from common import spread

FEDLPS = "docs/evidence/fedlps.md"
FILE = "federated.jsonl"
LEVELS = (1, 0.5, 0.25, 0.125, 0.0625)
NAMES = {
    "fedlps": "**`fedlps`**", "heterofl": "`heterofl`", "alone": "the same submodels alone",
    "fedavg": "`fedavg`, whole networks",
}  # fmt: skip
SETTINGS = ("shift", "dirichlet", "plain", "text", "scratch", "classes", "domain")


def mean_of(row: Row, way: str = "best", part: str = "members", level: float | None = None) -> float:
    """Mean accuracy in % of the devices that train, their worst tenth, those of a level, new or late ones."""
    members = len(row["z"]) - (20 if len(row["z"]) > 10 else 0)
    places = {"new": slice(members, members + 10), "late": slice(members + 10, None)}.get(part, slice(members))
    found = [a for a, z in list(zip(row[way], row["z"], strict=True))[places] if level in (None, z)]
    found = sorted(found)[: max(1, members // 10)] if part == "worst" else found
    return 100 * statistics.mean(found)


def of(setting: str, arm: str, **key: int) -> dict[int, Row]:
    """Seed → row."""
    return {row["seed"]: row for row in rows(FILE, setting=setting, arm=arm, **key)}


def over_seeds(setting: str, arm: str, value: Callable[[Row], float]) -> list[float]:
    return [value(row) for _, row in sorted(of(setting, arm).items())]


def less(setting: str, arm: str, ways: Sequence[str] = ("best", "best"), part: str = "members") -> list[float]:
    """Accuracy of fedlps less that of an arm, seed by seed, each deployed in its own way."""
    ours, theirs = of(setting, "fedlps"), of(setting, arm)
    return [
        mean_of(ours[seed], ways[0], part) - mean_of(theirs[seed], ways[1], part) for seed in sorted(ours) if seed in theirs
    ]


def signed(found: list[float]) -> str:
    error = f" ± {statistics.stdev(found) / len(found) ** 0.5:.1f}" if len(found) > 1 else ""
    return f"{statistics.mean(found):+.1f}{error}".replace("-", "−")


@table(FEDLPS, "accuracy in %, three seeds", *SETTINGS)
def accuracy() -> Lines:
    for arm, label in NAMES.items():
        yield [label, *(spread(over_seeds(setting, arm, mean_of)) for setting in SETTINGS)]


@table(FEDLPS, "`fedlps` less …, points", *SETTINGS)
def differences() -> Lines:
    for arm in ("heterofl", "alone", "fedavg"):
        yield [NAMES[arm], *(signed(less(setting, arm)) for setting in SETTINGS)]


@table(
    FEDLPS,
    "setting, method",
    "z = 1, ½, ¼, ⅛, ¹⁄₁₆",
    "worst tenth",
    "new devices",
    "late devices",
    "TFLOPs",
    "MB up",
    "MB down",
    "simulated s",
)
def by_capability() -> Lines:
    for setting in SETTINGS[:5]:
        for arm in NAMES:
            found = [statistics.mean(over_seeds(setting, arm, lambda row, z=z: mean_of(row, level=z))) for z in LEVELS]
            parts = [statistics.mean(over_seeds(setting, arm, lambda row, part=part: mean_of(row, "best", part)))
                     for part in ("worst", "new", "late")]  # fmt: skip
            cost = [
                statistics.mean(over_seeds(setting, arm, lambda row, key=key: row[key]))
                for key in ("TFLOPs", "MB up", "MB down", "seconds")
            ]
            sent = ["", ""] if arm == "alone" else [f"{one:.0f}" for one in cost[1:3]]
            levels = " / ".join(f"{level:.0f}" for level in found)
            yield [
                f"{setting}, {NAMES[arm]}",
                levels,
                *(f"{one:.0f}" for one in parts),
                f"{cost[0]:.3f}",
                *sent,
                f"{cost[3]:.2f}",
            ]


WAYS = {"newest": "the newest submodel", "tuned": "after one more local training", "best": "the best by 30 images"}


@table(FEDLPS, "deployed", "shift, `fedlps`", "shift, `heterofl`", "dirichlet, `fedlps`", "dirichlet, `heterofl`")
def ways() -> Lines:
    for way, label in WAYS.items():
        found = [(setting, arm) for setting in ("shift", "dirichlet") for arm in ("fedlps", "heterofl")]
        yield [label, *(spread(over_seeds(setting, arm, partial(mean_of, way=way))) for setting, arm in found)]


TRIED = {
    "fedlps": "`fedlps`", "not nested": "without narrower levels", "given order": "units as they are given",
    "own units": "units of a client's own data", "shrunk units": "these, shrunk towards those of all clients",
    "own head": "own heads", "shared head": "one head", "adaptive server": "FedAdam on the server",
    "personal rest": "all but the narrowest level kept by the client",
    "more epochs": "up to twice the epochs on fast devices", "rate by width": "half of the rate at full width",
    "dice": "a random ratio up to the capability", "p-ucbv": "a ratio chosen by P-UCBV up to the capability",
}  # fmt: skip


@table(FEDLPS, "validation accuracy in %, one seed", "shift: newest", "best", "dirichlet: newest", "best", "TFLOPs")
def tried() -> Lines:
    for arm, label in TRIED.items():
        pair = [of(setting, arm, seed=0)[0] for setting in ("shift", "dirichlet")]
        yield [
            label,
            *(f"{100 * row['validation'][way]:.1f}" for row in pair for way in ("newest", "best")),
            f"{pair[0]['TFLOPs']:.3f}",
        ]


WHOLE = {
    "fedlps": "`fedlps`", "fedlps, fewer rounds": "`fedlps`, 0.8 of the rounds",
    "heterofl": "`heterofl`", "fedrolex": "`fedrolex`", "fjord": "`fjord`", "fedp3": "`fedp3`",
    "strong alone": "whole networks on the strong devices alone, cut for the others", "alone": "the same submodels alone",
    "fedavg": "`fedavg`", "fedavg, half of the rounds": "`fedavg`, half of the rounds", "fedper": "`fedper`",
    "fedper, half of the rounds": "`fedper`, half of the rounds", "local": "`local`, whole networks",
}  # fmt: skip


@table(FEDLPS, "accuracy in %, one seed", "shift", "dirichlet", "new devices, shift", "TFLOPs")
def others() -> Lines:
    for arm, label in WHOLE.items():
        pair = [of(setting, arm, seed=0)[0] for setting in ("shift", "dirichlet")]
        yield [
            label,
            *(f"{mean_of(row):.1f}" for row in pair),
            f"{mean_of(pair[0], 'newest', 'new'):.1f}",
            f"{pair[0]['TFLOPs']:.3f}",
        ]


CASES = (
    ("all devices can run the whole network, all learn one task", "`fedavg`", "shift", "fedavg", "local"),
    ("the same, classes differ, a trained network", "`fedper`", "dirichlet", "fedper", "local"),
    ("the same, classes differ, from scratch", "`fedper`", "scratch", "fedper", "local"),
    ("some devices are too weak, all learn one task, a trained network", "`fedlps`", "shift", "fedlps", "alone"),
    ("the same, classes differ", "`fedlps`", "dirichlet", "fedlps", "alone"),
    ("the same, classes differ, from scratch", "`fedlps`", "scratch", "fedlps", "alone"),
    ("some devices are too weak, text from scratch", "`fedlps` or `heterofl`", "text", "fedlps", "alone"),
    ("ten clients of three classes, a hundred images each, some devices too weak", "`fedlps`", "classes", "fedlps", "alone"),
)  # fmt: skip


@table("docs/howto/should-i-federate.md", "you have", "use", "gain over training alone, points", "measured in")
def decision() -> Lines:
    for have, use, setting, arm, base in CASES:
        pair, base_pair = of(setting, arm), of(setting, base)
        gains = [mean_of(pair[seed]) - mean_of(base_pair[seed]) for seed in sorted(pair) if seed in base_pair]
        yield [have, use, signed(gains), f"{setting}, `{arm}`"]
    joined = [mean_of(row, "newest", "new") for _, row in sorted(of("shift", "fedlps").items())]
    before = [mean_of(row, "newest", "new") for _, row in sorted(of("shift", "local").items())]
    gains = [ours - its for ours, its in zip(joined, before, strict=True)]
    yield ["devices that join later (over the whole network as it comes)", "`fedlps`", signed(gains), "shift, new devices"]


ADAPTERS = "adapters.jsonl"
ADAPTED = {
    "rank 2": "rank 2 on all five, `fedavg`", "rank 8": "rank 8 on all five, `fedavg`: too much for two of them",
    "rank 16": "rank 16 on the one that can, `fedavg`", "hetlora": "2, 4, 8, 12 and 16, `hetlora`",
    "flexlora": "2, 4, 8, 12 and 16, `flexlora`", "alone": "2, 4, 8, 12 and 16, each alone",
}  # fmt: skip


@table("docs/tutorials/adapters.md", "ranks", "perplexity, deployed", "the global model", "MB sent", "rounds", "steps")
def adapters() -> Lines:
    def perplexities(found: list[Row], part: str) -> list[float]:
        return [math.exp(statistics.mean(row[part])) for row in found if row[part]]

    (whole,) = rows(ADAPTERS, arm="whole")
    before = f"{perplexities([whole], 'test')[0]:.2f}"
    yield ["no adapter", before, before, "0", "0", "0"]
    for arm, label in ADAPTED.items():
        (second,) = rows(ADAPTERS, arm=arm, seed=1)  # at the better one of the rates of seed 0
        found = rows(ADAPTERS, arm=arm, rate=second["rate"])
        scores = [spread(perplexities(found, part), 2) for part in ("test", "global")]
        yield [
            label,
            *scores,
            f"{statistics.mean(row['MB'] for row in found):.2f}",
            str(found[0]["rounds"]),
            str(found[0]["steps"]),
        ]
