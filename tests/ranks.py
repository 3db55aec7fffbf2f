"""Work that two processes of one gloo group do together."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist


def _on_a_rank(rank: int, work: Callable[[int, str], Any], folder: str) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    torch.save(work(rank, folder), f"{folder}/{rank}.pt")
    dist.barrier()
    # Threads of gloo that wake while the interpreter is torn down end the process by SIGABRT now and then.
    os._exit(0)


def found_by_two_ranks(work: Callable[[int, str], Any], folder: Path) -> list[Any]:
    """Call `work(rank, folder)` in two new processes, with one thread each, and return what each returned."""
    torch.multiprocessing.spawn(_on_a_rank, (work, str(folder)), nprocs=2)
    return [torch.load(folder / f"{rank}.pt") for rank in (0, 1)]
