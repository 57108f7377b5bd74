"""What the event log costs a token: tracing off, and on, the same requests; a tiny model and the demo model, or any model on any device.

    OMP_NUM_THREADS=1 python benchmarks/trace_cost.py [--models tiny demo] [--windows 1 8] [--device cuda] [--rounds 7] [--out FILE]
"""
from __future__ import annotations
import argparse, json, statistics, tempfile, time
from pathlib import Path
from typing import Any
import numpy as np
import torch
from llminfer.artifacts import environment
from llminfer.assembly import choose_parts
from llminfer.config import EngineConfig
from llminfer.core import CoreConfig, EngineCore, generate, make_core
from llminfer.loading import load_model, make_tiny, open_checkpoint
from llminfer.request import SamplingParams
from llminfer.tracing import Trace

def tokens_a_second(core: EngineCore, prompts: list[list[int]], n: int) -> float:
    "Tokens a second; on a CPU of the process's own seconds, since other programs may run beside it."
    clock = time.process_time if str(core.runner.kv.k[0].device) == "cpu" else time.perf_counter  # type: ignore[attr-defined]
    t = clock()
    got = generate(core, prompts, SamplingParams(temperature=0, max_tokens=n))
    return sum(map(len, got)) / (clock() - t)

def measure(model: Any, rows: int, n: int, rounds: int, window: int) -> dict[str, Any]:
    "Off and on take turns, round by round, on one core; the median of the rounds' ratios is what the log costs."
    rng = np.random.default_rng(0)
    prompts = [rng.integers(3, model.config.vocab_size - 1, 24).tolist() for _ in range(rows)]
    trace = Trace(capacity=50_000)
    parts = choose_parts(EngineConfig(device=model.device.type), model)
    limits = CoreConfig(n_blocks=256, max_num_seqs=rows, max_model_len=512, window_steps=window, max_in_flight=2 if window > 1 else 1, prefix_cache=False)
    core = make_core(model, limits, trace, runner=parts.runner, program=parts.program)
    for _ in range(1 if model.device.type == "cpu" else 4): tokens_a_second(core, prompts, n)      # steps are captured in the first turns
    off, on = list[float](), list[float]()
    for k in range(2 * rounds):
        trace.enabled = (k % 2 == 1) ^ (k // 2 % 2 == 1)       # off on, on off, ...
        trace.events.clear()
        (on if trace.enabled else off).append(tokens_a_second(core, prompts, n))
    ratio = statistics.median(b / a for a, b in zip(off, on))
    tok_s = {k: [round(x, 2) for x in v] for k, v in (("off", off), ("on", on))}
    return {"rows": rows, "window": window, "tok_s": tok_s, "cost_percent": round(100 * (1 - ratio), 2), "events_a_token": round(trace.n_emitted / (rounds * n * rows), 3)}

def main() -> None:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--models", nargs="+", default=["tiny", "demo"])
    p.add_argument("--windows", nargs="+", type=int, default=[1, 8])
    p.add_argument("--device", default="cpu")
    p.add_argument("--rows", type=int, default=8)
    p.add_argument("--tokens", type=int, default=128)
    p.add_argument("--rounds", type=int, default=7)
    p.add_argument("--out", default=str(Path(__file__).parent / "records/trace_cost.json"))
    a = p.parse_args()
    rows = []
    for name in a.models:
        with tempfile.TemporaryDirectory() as d:
            ckpt = open_checkpoint(str(make_tiny(Path(d) / "tiny", "llama", 0)) if name == "tiny" else name)
            model = load_model(ckpt, torch.float32 if a.device == "cpu" else torch.bfloat16, torch.device(a.device))
            for window in a.windows:
                rows.append({"model": name, **measure(model, a.rows, a.tokens, a.rounds, window)})
                print(f"{name}, window {window}: {rows[-1]['cost_percent']} percent", flush=True)
    record = {"kind": "trace_cost", "device": a.device, "new_tokens": a.tokens, "environment": environment(), "rows": rows}
    Path(a.out).write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")

if __name__ == "__main__": main()
