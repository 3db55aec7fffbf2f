"""An engine of your own in one file: clients train in this process, and the time of each is noted. Seconds, offline.

Needs `pip install "sparsekit-torch[fl]"`. In a package of your own, the entry point

    [project.entry-points."sparsekit_fl.engines"]
    timed = "mypackage.timed:Timed"

makes it `--engine timed`. `sparsekit_fl.testing.EngineContract` tests it: same bits as every other engine.
"""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import sparsekit_fl as fl


class TimedPool:
    """Runs one client after the other, and notes the seconds that each took."""

    workers = 1

    def __init__(self, executor: fl.engines.ClientExecutor, seconds: dict[int, float]) -> None:
        self._executor = executor
        self._seconds = seconds

    def map(self, assignments: Sequence[fl.Assignment], memory_rounds: fl.engines.MemoryRounds) -> Iterator[fl.engines.Reply]:
        """Train: one reply for each assignment, in their order. A client that fails is a reply too."""
        for assignment in assignments:
            client_id, began = assignment.client_id, time.perf_counter()
            try:
                update, stored = self._executor.train(assignment, memory_rounds.get(client_id))
            except fl.errors.ClientError as error:
                yield fl.engines.Reply(client_id=client_id, error=error)
            else:
                yield fl.engines.Reply(client_id=client_id, update=update, stored=stored)
            self._seconds[client_id] = self._seconds.get(client_id, 0.0) + time.perf_counter() - began

    def evaluate(
        self,
        state: fl.engines.StateDict,
        ids: Sequence[int],
        memory_rounds: fl.engines.MemoryRounds,
        *,
        round: int,
        with_shared: bool,
        export: Path | None,
    ) -> Iterator[fl.Evaluation | fl.engines.Unscored]:
        """Score clients, in the order of `ids`. One that cannot be scored is named."""
        for client_id in ids:
            version = memory_rounds.get(client_id)
            try:
                yield self._executor.evaluate(state, client_id, version, round=round, with_shared=with_shared, export=export)
            except fl.errors.ClientError as error:
                yield fl.engines.Unscored(client_id, str(error))


class Timed:
    """Gives a `TimedPool` to the loop over rounds; `seconds` holds the time of each client afterwards."""

    def __init__(self) -> None:
        self.seconds: dict[int, float] = {}

    def run(
        self,
        rounds: Callable[[fl.ClientPool], fl.RunResult],
        *,
        spec: fl.engines.RunSpec,
        clients: Mapping[int, fl.Client],
        store: fl.engines.ClientStore,
    ) -> fl.RunResult:
        """Call the loop once, with a pool. One torch thread, so that results do not depend on the number of cores."""
        with fl.engines.one_thread():
            return rounds(TimedPool(fl.engines.ClientExecutor(spec, clients, store), self.seconds))


def main() -> None:
    """Run FedLPS on scikit-learn's digits, here and on the engine that comes along: the same model, to the bit."""
    preset = fl.preset_for(dataset="digits")
    problem, clients = fl.build_problem(preset, seed=0)
    config = fl.RunConfig(rounds=3, cohort=preset.cohort, training=preset.training, capability_levels=preset.capability_levels)
    timed = Timed()
    results = [fl.run(fl.methods.fedlps(), problem, clients, config, engine=engine) for engine in (timed, fl.Embedded())]
    slowest = max(timed.seconds, key=lambda client_id: timed.seconds[client_id])
    print(f"client {slowest} took longest: {timed.seconds[slowest]:.2f} s of {sum(timed.seconds.values()):.2f} s")
    print(f"the same bits: {results[0].final.state_sha256 == results[1].final.state_sha256}")


if __name__ == "__main__":
    main()
