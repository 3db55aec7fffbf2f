"""Find the convolutions whose backward pass oneDNN gets wrong: each shape in a process of its own, under a heap checker.

    python benchmarks/onednn_sweep.py --isa AVX2 --out avx2.jsonl         sweep one instruction set; run again to resume
    python benchmarks/onednn_sweep.py --python /other/bin/python --out …  sweep the torch of another environment
    python benchmarks/onednn_sweep.py --table *.jsonl                     count the verdicts of finished sweeps
    python benchmarks/onednn_sweep.py --guarded --isa AVX2 --out …        the same shapes through sparsekit's guard

A case is one Conv2d: channels in and out, kernel, stride, groups, batch, layout, side of the image. It is trained three
times on the same batch on one thread. The output and both gradients are then compared with those of a float64 copy with
oneDNN switched off. Cases run under glibc's checking allocator, where it is installed, so that a write past the end of a
block is seen when the block is freed and not a minute later. A verdict is 'fine', 'wrong' (a relative error above 1e-4),
'crashed' (a signal, with what glibc said), or 'hung' (killed after five seconds of processor time).

One server process per instruction set imports torch and forks a child per case, so a case takes some 20 ms.
"""

from __future__ import annotations

import argparse
import collections
import ctypes
import itertools
import json
import os
import resource
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

ISAS = ("SSE41", "AVX", "AVX2", "AVX512_CORE", "DEFAULT")
CHECKER = {"LD_PRELOAD": "libc_malloc_debug.so.0", "GLIBC_TUNABLES": "glibc.malloc.check=3"}
TOLERANCE = 1e-4
LIMIT_CPU_SECONDS = 5
LIMIT_SECONDS = 60.0
SMALL = (1, 2, 3, 4, 5, 6, 7, 8, 9, 12, 15, 16, 17, 24)


@dataclass(frozen=True, kw_only=True)
class Case:
    """One convolution and its input.

    Args:
        inputs: Channels of the input.
        outputs: Channels of the output.
        kernel: Height and width of the kernel; the padding is half of it.
        stride: Of both axes.
        groups: Conv groups.
        batch: Number of images.
        layout: 'nchw' or 'nhwc'.
        side: Height and width of the images.
    """

    inputs: int
    outputs: int
    kernel: int
    stride: int
    groups: int
    batch: int
    layout: str
    side: int = 32

    @property
    def key(self) -> str:
        """A name that is unique within a sweep."""
        return "-".join(str(value) for value in asdict(self).values())


def cases(wide: bool = False) -> Iterator[Case]:
    """The grid: widths 1 to 33 with as many outputs, pairs of small widths, depthwise, and odd sides for strided ones.

    Args:
        wide: Yield widths of 4 to 264 and other sides with kernel 1 and stride 2 instead.
    """
    if wide:
        for layout, batch, side in itertools.product(("nhwc", "nchw"), (1, 20), (2, 4, 6, 8, 14, 16, 28, 32, 56)):
            for width in (4, 6, 7, 8, 9, 11, 12, 15, 16, 17, 31, 33, 40, 63, 64, 65, 100, 127, 136, 200, 264):
                for outputs in sorted({width, 8, 33}):
                    yield Case(
                        inputs=width, outputs=outputs, kernel=1, stride=2, groups=1, batch=batch, layout=layout, side=side
                    )
        return
    pairs = sorted({(n, n) for n in range(1, 34)} | set(itertools.product(SMALL, SMALL)))
    for layout, kernel, stride, batch in itertools.product(("nhwc", "nchw"), (1, 3, 5), (2, 1), (2, 20, 1)):
        shared = {"kernel": kernel, "stride": stride, "batch": batch, "layout": layout, "side": 32 if kernel == 1 else 16}
        for inputs, outputs in pairs:
            yield Case(inputs=inputs, outputs=outputs, groups=1, **shared)
        for width in range(2, 34):
            yield Case(inputs=width, outputs=width, groups=width, **shared)
        if stride == 2:
            for width in range(1, 34):
                yield Case(inputs=width, outputs=width, groups=1, **shared | {"side": 15})


def run_case(case: Case, guarded: bool) -> dict[str, float]:
    """Train one convolution three times and return the relative errors of its output and gradients."""
    import torch  # only the server and its children may pay for it
    from torch import Tensor, nn

    def build() -> nn.Conv2d:
        return nn.Conv2d(case.inputs, case.outputs, case.kernel, case.stride, case.kernel // 2, groups=case.groups)

    torch.manual_seed(0)
    layout = torch.channels_last if case.layout == "nhwc" else torch.contiguous_format
    layer, shape = build(), (case.batch, case.inputs, case.side, case.side)
    exact = build().double()
    exact.load_state_dict(layer.state_dict())
    if guarded:
        from sparsekit.surgery.safe_convolution import guard_convolutions

        guard_convolutions(layer, wide=True)
    images = torch.randn(shape).to(memory_format=layout).requires_grad_()
    given = torch.randn_like(layer(images).detach()).to(memory_format=layout)
    weight = layer.weight
    for _ in range(3):
        found = torch.autograd.grad(layer(images), (images, weight), given)
    output = layer(images).detach()

    torch.backends.mkldnn.enabled = False
    twin = images.detach().double().contiguous().requires_grad_()
    right = exact(twin)
    wanted = torch.autograd.grad(right, (twin, exact.weight), given.double().contiguous())
    torch.backends.mkldnn.enabled = True

    def error(a: Tensor, b: Tensor) -> float:
        worst = float((a.double() - b).abs().max() / b.abs().max().clamp_min(1e-12))
        return worst if worst == worst else float("inf")

    with torch.no_grad():
        return {"output": error(output, right), "input": error(found[0], wanted[0]), "weight": error(found[1], wanted[1])}


def serve(guarded: bool) -> None:
    """Read cases from stdin as JSON lines, fork a child for each and print one verdict per case."""
    import torch

    torch.set_num_threads(1)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    # What a first pass loads is shared by all children; a backward pass on a CPU starts no threads that a fork would lose.
    run_case(Case(inputs=8, outputs=8, kernel=3, stride=1, groups=1, batch=2, layout="nchw"), guarded)
    for line in sys.stdin:
        case = Case(**json.loads(line))
        mine, its = os.pipe()
        child = os.fork()
        if child == 0:
            os.close(mine)
            _child(case, its, guarded)
        os.close(its)
        said, status = _wait(child, mine)
        print(json.dumps(asdict(case) | _verdict(said, status)), flush=True)


def _child(case: Case, out: int, guarded: bool) -> None:
    os.dup2(out, 1)
    os.dup2(out, 2)
    resource.setrlimit(resource.RLIMIT_CPU, (LIMIT_CPU_SECONDS, LIMIT_CPU_SECONDS))
    libc = ctypes.CDLL(None)
    libc.setvbuf(ctypes.c_void_p.in_dll(libc, "stdout"), None, 2, 0)  # oneDNN's lines survive an abort
    errors = run_case(case, guarded)
    os.write(out, f"\nERRORS {json.dumps(errors)}\n".encode())
    os._exit(0)


def _wait(child: int, pipe: int) -> tuple[str, int | None]:
    """Collect what a child prints until it ends, or kill it: its text, and its wait status or None."""
    said, end = b"", time.monotonic() + LIMIT_SECONDS
    while (left := end - time.monotonic()) > 0:
        if select.select([pipe], [], [], left)[0]:
            piece = os.read(pipe, 65536)
            said += piece
            if not piece:
                break
    late = time.monotonic() >= end
    if late:
        os.kill(child, signal.SIGKILL)
    os.close(pipe)
    _, status = os.waitpid(child, 0)
    return said.decode(errors="replace"), None if late else status


def _verdict(said: str, status: int | None) -> dict[str, object]:
    lines = said.splitlines()
    kernels = {}
    for line in lines:
        parts = line.split(",")
        if line.startswith("onednn_verbose") and ",exec," in line and "convolution" in parts:
            place = parts.index("convolution")
            kernels[parts[place + 2]] = parts[place + 1]
    message = next((line for line in lines if "free()" in line or "malloc" in line or "corrupt" in line), "")
    report: dict[str, object] = {"kernels": kernels}
    if status is None or (os.WIFSIGNALED(status) and os.WTERMSIG(status) in (signal.SIGXCPU, signal.SIGKILL)):
        return {"verdict": "hung", "message": message} | report
    if os.WIFSIGNALED(status):
        return {"verdict": "crashed", "message": message or signal.Signals(os.WTERMSIG(status)).name} | report
    text = next((line for line in lines if line.startswith("ERRORS ")), None)
    if text is None:
        return {"verdict": "failed", "message": lines[-1] if lines else ""} | report
    errors: dict[str, float] = json.loads(text.removeprefix("ERRORS "))
    verdict = "fine" if max(errors.values()) <= TOLERANCE else "wrong"
    return {"verdict": verdict, "errors": {name: float(f"{value:.2g}") for name, value in errors.items()}} | report


def sweep(isa: str, python: str, out: Path, guarded: bool, wide: bool) -> None:
    """Run every case that `out` does not hold yet and append its verdict."""
    done = {
        Case(**{name: found[name] for name in Case.__dataclass_fields__}).key
        for found in map(json.loads, out.read_text().splitlines() if out.exists() else ())
    }
    left = [case for case in cases(wide) if case.key not in done]
    print(f"{isa}: {len(left)} cases left, {len(done)} done", file=sys.stderr)
    environment = os.environ | {"ONEDNN_MAX_CPU_ISA": isa, "ONEDNN_VERBOSE": "1", "OMP_NUM_THREADS": "1"} | CHECKER
    command = [python, __file__, "--serve"] + ["--guarded"] * guarded
    with (
        out.open("a") as file,
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment) as server,
    ):
        assert server.stdin is not None
        assert server.stdout is not None
        for case in left:
            print(json.dumps(asdict(case)), file=server.stdin, flush=True)
            while not (line := server.stdout.readline()).startswith("{"):  # oneDNN's own lines, printed at its start
                if not line:
                    raise SystemExit(f"the server ended at {case}")
            file.write(json.dumps(json.loads(line) | {"isa": isa}) + "\n")
            file.flush()


def table(paths: list[Path]) -> str:
    """Count the verdicts by instruction set, kernel size, stride, groups and layout, as Markdown."""
    counts: dict[tuple[str, ...], collections.Counter[str]] = collections.defaultdict(collections.Counter)
    bad: dict[tuple[str, ...], set[int]] = collections.defaultdict(set)
    used: dict[tuple[str, ...], set[str]] = collections.defaultdict(set)
    for path in paths:
        for found in map(json.loads, path.read_text().splitlines()):
            groups = "channels" if found["groups"] > 1 else "1"
            row = (found["isa"], str(found["kernel"]), str(found["stride"]), groups, found["layout"])
            counts[row][found["verdict"]] += 1
            if found["verdict"] != "fine":
                bad[row].add(found["inputs"])
                used[row] |= set(found["kernels"].values())
    lines = ["| instruction set | kernel | stride | groups | layout | cases | wrong | crashed | hung | input channels |"]
    lines.append("|---" * 10 + "|")
    for row, verdicts in sorted(counts.items()):
        numbers = [sum(verdicts.values()), verdicts["wrong"], verdicts["crashed"] + verdicts["failed"], verdicts["hung"]]
        widths = ", ".join(map(str, sorted(bad[row])))
        lines.append("| " + " | ".join([*row, *map(str, numbers), widths]) + " |")
    return "\n".join(lines)


def main() -> None:
    """Sweep, serve or count, as the options say."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--isa", choices=ISAS, default="DEFAULT", help="the most that oneDNN may use")
    parser.add_argument("--python", default=sys.executable, help="interpreter whose torch is swept")
    parser.add_argument("--out", type=Path, help="JSON lines; cases that are in it are not run again")
    parser.add_argument("--guarded", action="store_true", help="run the layers through sparsekit's guard")
    parser.add_argument("--wide", action="store_true", help="kernel 1 and stride 2 only, with many widths and sides")
    parser.add_argument("--table", type=Path, nargs="+", help="finished sweeps to count")
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        serve(options.guarded)
    elif options.table:
        print(table(options.table))
    elif options.out is None:
        parser.error("--out is needed for a sweep")
    else:
        sweep(options.isa, options.python, options.out, options.guarded, options.wide)


if __name__ == "__main__":
    main()
