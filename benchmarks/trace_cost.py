"""What the event log costs a token: tracing off, and on, the same requests; a tiny model with 8 rows, or any model on any device.

    python benchmarks/trace_cost.py [--model demo] [--device cuda] [--window 8] [--rounds 7]
"""
from __future__ import annotations
import argparse, json, statistics, tempfile, time
from pathlib import Path
from typing import Any
import numpy as np
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
    core = make_core(model, CoreConfig(n_blocks=256, max_num_seqs=rows, max_model_len=512, window_steps=window, max_in_flight=2 if window > 1 else 1, prefix_cache=False), trace)
    tokens_a_second(core, prompts, n)
    off, on = list[float](), list[float]()
    for k in range(2 * rounds):
        trace.enabled = (k % 2 == 1) ^ (k // 2 % 2 == 1)       # off on, on off, ...
        trace.events.clear()
        (on if trace.enabled else off).append(tokens_a_second(core, prompts, n))
    ratio = statistics.median(b / a for a, b in zip(off, on))
    return {"rows": rows, "window": window, "rounds": rounds, "off_tok_s": round(statistics.median(off), 1), "on_tok_s": round(statistics.median(on), 1),
        "cost_percent": round(100 * (1 - ratio), 2), "events_a_step": round(trace.n_emitted / max(1, rounds * n), 2)}

def main() -> None:
    p = argparse.ArgumentParser(description=__doc__)
    p.add_argument("--model", default="tiny"); p.add_argument("--device", default="cpu"); p.add_argument("--rows", type=int, default=8); p.add_argument("--tokens", type=int, default=128)
    p.add_argument("--rounds", type=int, default=7); p.add_argument("--window", type=int, default=1)
    a = p.parse_args()
    with tempfile.TemporaryDirectory() as d:
        name = str(make_tiny(Path(d) / "tiny", "llama", 0)) if a.model == "tiny" else a.model
        import torch
        model = load_model(open_checkpoint(name), torch.float32 if a.device == "cpu" else torch.bfloat16, torch.device(a.device))
        print(json.dumps({"model": a.model, "device": a.device, **measure(model, a.rows, a.tokens, a.rounds, a.window)}))

if __name__ == "__main__": main()
