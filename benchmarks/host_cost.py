"""What scheduler and core cost the host for each token: 256 rows, windows of 8 steps, a forced-token model.

    OMP_NUM_THREADS=1 python benchmarks/host_cost.py [--rows 256] [--tokens 256] [--runs 7] [--out benchmarks/records/host_cost.json]

Everything outside of `Runner.launch` is counted: admission, plans, harvests, commits, deltas. In a run that decodes only,
steady state is what remains when admission is left out; both are reported. Prediction, written before the first run: 1.5 us a token.
"""
import argparse, json, platform, statistics, time
from datetime import UTC, datetime
from pathlib import Path
import numpy as np
import torch
from llminfer.artifacts import cpu_name
from llminfer.core import CoreConfig, make_core
from llminfer.model import ForcedModel
from llminfer.request import SamplingParams

ROOT = Path(__file__).resolve().parents[1]


def measure(rows, n_new, K, prompt=64):
    "Seconds on the host outside of launches, for all tokens and for windows without a prefill; and the tokens of each."
    core = make_core(ForcedModel({}), CoreConfig(max_num_seqs=rows, n_blocks=1 + rows * -(-(prompt + n_new) // 16), max_model_len=prompt + n_new + 1,
                                                 max_num_batched_tokens=8192, window_steps=K, max_in_flight=1))
    launch, inside = core.runner.launch, [0.0]

    def timed(plan):
        t = time.perf_counter()
        ticket = launch(plan)
        inside[0] += time.perf_counter() - t
        return ticket
    core.runner.launch = timed
    params = SamplingParams(temperature=0, max_tokens=n_new)
    t = time.perf_counter()
    for i in range(rows): core.add([i], np.full(prompt, i % 200 + 1, np.int32), [params])
    total, n, steady, n_steady = time.perf_counter() - t, 0, 0.0, 0
    while core.has_work:
        before, inside[0], t = core.trace.counters.get("prefill_tokens", 0), 0.0, time.perf_counter()
        got = sum(len(d.tokens) for d in core.step())
        host = time.perf_counter() - t - inside[0]
        total, n = total + host, n + got
        if core.trace.counters.get("prefill_tokens", 0) == before: steady, n_steady = steady + host, n_steady + got
    assert n == rows * n_new
    return total, n, steady, n_steady


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--rows", type=int, default=256)
    ap.add_argument("--tokens", type=int, default=256)
    ap.add_argument("--K", type=int, default=8)
    ap.add_argument("--runs", type=int, default=7)
    ap.add_argument("--out", default=str(ROOT / "benchmarks/records/host_cost.json"))
    a = ap.parse_args()
    measure(a.rows, 32, a.K)
    runs = [measure(a.rows, a.tokens, a.K) for _ in range(a.runs)]
    all_us, steady_us = [t / n * 1e6 for t, n, _, _ in runs], [s / m * 1e6 for _, _, s, m in runs]
    record = {"kind": "host_cost", "rows": a.rows, "K": a.K, "new_tokens": a.tokens, "us_per_token": {"median": statistics.median(all_us), "all": all_us},
              "us_per_token_steady": {"median": statistics.median(steady_us), "all": steady_us}, "goal_us": 3.0, "predicted_us": 1.5,
              "environment": {"cpu": cpu_name(), "threads": torch.get_num_threads(), "python": platform.python_version(), "torch": torch.__version__,
                              "date": datetime.now(UTC).isoformat(timespec="seconds")}}
    print(f"host us a token: {record['us_per_token']['median']:.2f} with admission, {record['us_per_token_steady']['median']:.2f} in steady decode")
    Path(a.out).write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__": main()
