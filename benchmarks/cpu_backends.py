"""Backends on a CPU: paged with and without its drafts, eager, compiled, and llama.cpp twice, on the demo model; a process each, in turns, the
same ids, tokens judged.

    python -m venv .venv-llamacpp && .venv-llamacpp/bin/pip install llama-cpp-python    # once; compiles llama.cpp
    OMP_NUM_THREADS=2 python benchmarks/cpu_backends.py [--runs 5] [--lock FILE] [--out benchmarks/records/cpu_backends.json]

Ours compute in float32 on dequantised weights (538 MB). `llama.cpp f32` computes on the same weights written out in float32, which compares
engines; `llama.cpp q4_1` reads the file as it is, four bits a weight and activations in eight (98 MB), which is how its users run it: a smaller
problem, so it may well be faster, and its tokens are held against the tolerance of bfloat16. `paged` drafts by prompt lookup, as it does when
nobody says otherwise, and greedy text after random words repeats itself; `paged without drafts` is the engine's plain step. `--lock` is held
while runs are timed, not while models load; `others_cpu` says which part of the machine other processes used meanwhile.
"""
from __future__ import annotations
import argparse, contextlib, fcntl, os, sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Iterator
import psutil
from llminfer.artifacts import header, paired_median, print_comparison, to_text, write_file
from llminfer.benchmark import Arm, BenchSettings, ChildArm, ChildProcess, Session, backend_configs, judge_rows, make_requests
from llminfer.config import ConfigError, EngineConfig
from llminfer.load_client import Timed
from llminfer.loading import open_checkpoint
from llminfer.request import SamplingParams
from llminfer.tokenization import load_tokenizer

ROOT = Path(__file__).resolve().parents[1]
PYTHON = ROOT / ".venv-llamacpp/bin/python"


class LlamaCpp(ChildProcess):
    "An arm of the comparison that is not ours."
    def __init__(self, cfg: EngineConfig, rows: int, float32: bool):
        if not PYTHON.exists(): raise ConfigError(f"{PYTHON} does not exist: the first line of this script's help makes it")
        super().__init__(cfg, f"llama.cpp {'f32' if float32 else 'q4_1'}", argv=[str(PYTHON), str(ROOT / "benchmarks/llamacpp_child.py")])
        self.rows, self.float32, ckpt = rows, float32, open_checkpoint(cfg.model_name)
        self.path, limits = str(ckpt.path), SimpleNamespace(max_model_len=cfg.max_model_len)
        self.source: Any = SimpleNamespace(tokenizer=load_tokenizer(ckpt.tokenizer), limits=limits)

    def load(self) -> dict[str, Any]:
        d = self.call("load", path=self.path, rows=self.rows, max_len=self.cfg.max_model_len, threads=self.cfg.num_threads, float32=self.float32)
        return {"llama_cpp_python": d["version"], "system": d["system"], "weights": "float32" if self.float32 else "q4_1", "dtype": "float32" if self.float32 else "bfloat16"}

    def run(self, s: BenchSettings, batch: int, round: int) -> dict[str, Any]:
        requests = make_requests(self.source, s, batch, round)
        ids = [[int(i) for i in r.prompt_token_ids or ()] for r in requests]
        d = self.call("run", prompts=ids, new=s.max_new_tokens)
        times = [Timed(due=x["sent"], sent=x["sent"], stamps=x["stamps"], counts=[1] * len(x["stamps"]), end=x["stamps"][-1], prompt_tokens=len(p), output_tokens=len(x["token_ids"]),
            finish_reason="length", prompt_ids=p, token_ids=x["token_ids"]) for x, p in zip(d["requests"], ids)]
        return {"requests": times, "seconds": d["seconds"], "params": [SamplingParams(temperature=0.0)] * batch, "gpu_memory_mb": 0.0, "rss_mb": d["rss_mb"]}


class Busy:
    "Part of the machine that processes outside of this one and its children use during a block."
    def __enter__(self) -> Busy:
        self.before = self.seconds()
        return self

    def __exit__(self, *exc: object) -> None:
        total, own = (b - a for a, b in zip(self.before, self.seconds()))
        self.share = max(total - own, 0.0) / max(self.whole(), 1e-9)

    def whole(self) -> float: return (sum(psutil.cpu_times()[:8]) - self.all)
    def seconds(self) -> tuple[float, float]:
        c = psutil.cpu_times()
        if not hasattr(self, "all"): self.all = sum(c[:8])
        mine = [psutil.Process(), *psutil.Process().children(recursive=True)]
        return c.user + c.nice + c.system + c.irq + c.softirq + c.steal, sum(sum(p.cpu_times()[:2]) for p in mine)


@contextlib.contextmanager
def alone(path: str | None) -> Iterator[None]:
    "Hold a lock file exclusively, if there is one."
    if path is None:
        yield
        return
    with open(path, "a") as f:
        fcntl.flock(f, fcntl.LOCK_EX)
        yield


def measure(x: Session, lock: str | None) -> dict[int, float]: # what others used, by batch size
    "As `llminfer compare`, with the warm-ups outside of the lock."
    used: dict[int, float] = {}
    for batch in x.s.batch_sizes:
        for i in range(x.s.warmup_runs):
            for arm in x.alive[:]: x.step(arm, batch, 10_000 + i, False)
        with alone(lock), Busy() as busy:
            for i in range(x.s.num_runs):
                for arm in x.alive[::-1 if i % 2 else 1]: x.step(arm, batch, i, True)
        used[batch] = round(busy.share, 3)
        print(f"batch {batch}: others used {busy.share:.0%} of the CPU", file=sys.stderr)
    return used


def main() -> int:
    ap = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ap.add_argument("--runs", type=int, default=5)
    ap.add_argument("--new", type=int, default=48, help="tokens of each answer")
    ap.add_argument("--threads", type=int, default=2)
    ap.add_argument("--backends", default="paged,paged without drafts,eager,compiled,llama.cpp f32,llama.cpp q4_1")
    ap.add_argument("--lock", help="a file to lock while runs are timed")
    ap.add_argument("--out", type=Path, default=ROOT / "benchmarks/records/cpu_backends.json")
    a = ap.parse_args()
    s = BenchSettings([1, 8], a.runs, 1, "medium", a.new, judged=3)
    same = dict(model_name="demo", device="cpu", dtype="float32", num_threads=a.threads, max_model_len=128 + a.new + 16, max_num_seqs=8)
    names = [n.strip() for n in a.backends.split(",")]
    arms: list[Arm] = []
    for n in names:
        if n.startswith("llama.cpp"): arms.append(LlamaCpp(EngineConfig(**same), 8, n.endswith("f32")))  # type: ignore[arg-type]
        else:
            kind, _, plain = n.partition(" ")
            arms += [ChildArm(c, n) for c in backend_configs([kind], same | ({"speculative_num_assistant_tokens": 0} if plain else {}), {})]
    x = Session(arms, s, lambda done, total, what: print(f"{done} of {total}: {what}", file=sys.stderr))
    try:
        x.load()
        used = measure(x, a.lock)
    finally:
        for arm in arms: arm.close()
    judge_rows(x)
    results = [x.results[id(arm)] for arm in arms]
    first = results[0]
    ratios = {r.backend_name: {str(b): paired_median(r.metrics_by_batch[b].wall_ms, first.metrics_by_batch[b].wall_ms) for b in r.batch_sizes} for r in results[1:]}
    rows = [r.to_dict() for r in results]
    for m in (m for r in rows for m in r["metrics"].values()): m["itls_ms"] = []       # thousands of numbers that nothing reads; the quantiles stay
    note = "q4_1 computes on 4-bit weights with 8-bit activations: its tokens are judged with the tolerance of bfloat16. The machine is shared; others_cpu is what others used of it. " \
        "The single gaps between tokens (itls_ms) are left out: nothing reads them, and their quantiles are here."
    record = header() | {"kind": "benchmark", "environment": first.environment, "note": note, "others_cpu": used, "nice": os.nice(0), "times_of_first": ratios, "results": rows}
    write_file(a.out, to_text(record))
    print_comparison(results)
    return 1 if any(r.reason for r in results) else 0


if __name__ == "__main__": sys.exit(main())
