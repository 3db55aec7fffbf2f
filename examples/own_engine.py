"""An engine of your own in one file: clients train in this process, and the time of each is recorded. Seconds, offline.

Needs `pip install -c constraints.txt ".[fl]"`. In a package of your own, the entry point

    [project.entry-points."sparsekit_fl.engines"]
    timed = "mypackage.timed:Timed"

makes it `--engine timed`.
"""

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import sparsekit_fl as fl


class Timed:
    """Runs one client after the other; `seconds` holds the time of each client afterwards."""

    workers = 1

    def __init__(self) -> None:
        self.seconds: dict[int, float] = {}

    def clients(self, spec: fl.engines.RunSpec, clients: Mapping[int, fl.Client]) -> Mapping[int, fl.Client]:
        """Return the available clients, which are always all clients."""
        return clients

    @contextmanager
    def open(
        self, spec: fl.engines.RunSpec, clients: Mapping[int, fl.Client], memories: fl.engines.Memories
    ) -> Iterator[fl.engines.RunClients]:
        """Provide the function that runs clients, with one torch thread, so that results do not depend on the cores."""

        def run_clients(requests: Sequence[fl.Request]) -> Iterator[fl.Reply]:
            """Train or score clients; yield one reply per request, in order. If a client fails, its reply has the error."""
            for request in requests:
                id, began = request.client_id, time.perf_counter()
                yield fl.engines.answer(spec, clients[id], request, memories)
                self.seconds[id] = self.seconds.get(id, 0.0) + time.perf_counter() - began

        with fl.engines.one_thread():
            yield run_clients


def main() -> None:
    """Run FedLPS on scikit-learn's digits with this engine and the built-in one; the models are bit-identical."""
    preset = fl.preset_for(dataset="digits")
    problem, clients = fl.build_problem(preset, seed=0)
    config = fl.RunConfig(rounds=3, cohort=preset.cohort, training=preset.training)
    timed = Timed()
    results = [fl.run(fl.methods.fedlps(), problem, clients, config, engine=engine) for engine in (timed, fl.Processes())]
    slowest = max(timed.seconds, key=lambda client_id: timed.seconds[client_id])
    print(f"client {slowest} took longest: {timed.seconds[slowest]:.2f} s of {sum(timed.seconds.values()):.2f} s")
    print(f"the same bits: {results[0].final.state_sha256 == results[1].final.state_sha256}")


if __name__ == "__main__":
    main()
