"""Peak memory of a federated run with many clients of a large model.

    python benchmarks/memory.py                                   K = 1,000 clients of VGG11, 200 participations
    python benchmarks/memory.py --clients 10000 --rounds 50 --json

Every client has 20 random images; what counts here is what is kept per client and per round, not what is learned. The
figure is an upper bound: the largest resident set of the main process plus, for each worker, the largest of any worker,
although they share the pages of data and code.
"""

from __future__ import annotations

import argparse
import json
import resource
import time

import torch

import sparsekit_fl as fl
from sparsekit_fl.engines.embedded import Embedded
from sparsekit_fl.models.vgg import Vgg


def vgg11() -> Vgg:
    """Ten classes at 32×32."""
    return Vgg(11, classes=10)


def clients(count: int) -> list[fl.Client]:
    """Clients that share 2,000 random images."""
    generator = torch.Generator().manual_seed(0)
    images, labels = torch.rand(2000, 3, 32, 32, generator=generator), torch.randint(0, 10, (2000,), generator=generator)

    def split(start: int, size: int) -> fl.TensorData:
        return fl.TensorData((images,), labels, (torch.arange(size) + start) % 2000)

    return [
        fl.Client(id=k, data=fl.ClientData(split(7 * k, 20), split(7 * k + 20, 4), split(7 * k + 24, 4))) for k in range(count)
    ]


def main() -> None:
    """Run and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clients", type=int, default=1000, help="K (default 1000)")
    parser.add_argument("--rounds", type=int, default=20, help="server rounds (default 20)")
    parser.add_argument("--cohort", type=int, default=10, help="clients a round (default 10)")
    parser.add_argument("--workers", type=int, default=2, help="worker processes (default 2)")
    parser.add_argument("--method", default="fedlps", help="default fedlps")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    config = fl.RunConfig(
        rounds=options.rounds,
        cohort=options.cohort,
        training=fl.TrainingConfig(local_epochs=1, batch_size=20, lr=0.01),
        eval_every=options.rounds,
        capability="dynamic",
        capability_levels=(1.0, 0.5, 0.25, 0.125, 0.0625),
    )
    problem = fl.Problem(model=vgg11, example_inputs=(torch.zeros(1, 3, 32, 32),))
    began = time.perf_counter()
    method = fl.methods.registry[options.method]()
    result = fl.run(method, problem, clients(options.clients), config, engine=Embedded(workers=options.workers))
    own = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    child = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss
    workers = options.workers if options.workers > 1 else 0
    row = {
        "clients": options.clients,
        "participations": sum(len(record.cohort) for record in result.rounds),
        "main_gib": round(own / 2**20, 2),
        "worker_gib": round(child / 2**20, 2),
        "peak_gib": round((own + workers * child) / 2**20, 2),
        "seconds": round(time.perf_counter() - began, 1),
    }
    print(json.dumps(row) if options.json else "\n".join(f"{name:>15}  {value}" for name, value in row.items()))


if __name__ == "__main__":
    main()
