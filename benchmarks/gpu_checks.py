"""Three small measurements on a GPU that the comparison with vLLM leaves out.

    PYTHONPATH=. python3 benchmarks/gpu_checks.py [--out FILE] [--commit HASH] [--only products start_up sampled]

- products: our one-row product against cuBLAS for every matrix of three shapes, weights cold, inside a CUDA graph
- sampled: decoding with temperature, top-k, top-p and penalties against greedy decoding, the same engine, alternating
- start_up: process start to the first token, with Triton's kernel cache filled and empty
"""
from __future__ import annotations
import argparse, json, os, shutil, statistics, subprocess, sys, tempfile, time
from datetime import UTC, datetime
from pathlib import Path
import torch
import triton
from gpu_shapes import SHAPES, write_model
from llminfer.assembly import build_core
from llminfer.config import EngineConfig
from llminfer.core import CoreConfig, generate
from llminfer.kernels import gemv
from llminfer.loading import load_model
from llminfer.model import Dense, ModelConfig
from llminfer.request import SamplingParams

START = """
import torch
from llminfer.assembly import build_core
from llminfer.config import EngineConfig
from llminfer.core import CoreConfig, generate
from llminfer.loading import load_model
from llminfer.request import SamplingParams
model = load_model({folder!r}, torch.bfloat16, "cuda")
core = build_core(EngineConfig(), model, CoreConfig(n_blocks=1000, max_num_seqs=8, max_model_len=512, window_steps=8, max_in_flight=2, follow=True))
generate(core, [list(range(5, 260))], SamplingParams(temperature=0, max_tokens=1))
"""


def us_in_graph(calls, replays: int = 20) -> float:
    "Microseconds of one of these calls, captured one after the other."
    for c in calls: c()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for c in calls: c()
    times = []
    for _ in range(replays):
        a, b = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        a.record(); graph.replay(); b.record()
        torch.cuda.synchronize()
        times.append(a.elapsed_time(b) * 1e3 / len(calls))
    return statistics.median(times)


def products(names) -> list[dict]:
    rows = []
    for name in names:
        c = ModelConfig.from_hf(SHAPES[name])
        D, E, H, G, F = c.hidden_size, c.head_dim, c.n_heads, c.n_kv_heads, c.intermediate_size
        for part, N, K in (("qkv", (H + 2 * G) * E, D), ("o", D, H * E), ("gate_up", 2 * F, D), ("down", D, F)):
            copies = max(4, int(4e8 / (2 * N * K)))              # more than the L2 holds
            lins = [Dense(torch.randn(N, K, device="cuda", dtype=torch.bfloat16)) for _ in range(copies)]
            x = torch.randn(1, K, device="cuda", dtype=torch.bfloat16)
            error = ((gemv(lins[0], x).float() - lins[0](x).float()).norm() / lins[0](x).float().norm()).item()
            own, cublas = (us_in_graph([lambda f=f, w=w: f(w, x) for w in lins]) for f in (gemv, lambda w, x: w(x)))
            rows.append({"model": name, "part": part, "N": N, "K": K, "own_us": own, "cublas_us": cublas, "bytes_floor_us": 2 * N * K / 4.3e6, "error": error})
            print(f"{name:11s} {part:8s} {N:6d} x {K:5d}: own {own:6.2f} us, cuBLAS {cublas:6.2f}, bytes {2 * N * K / 4.3e6:6.2f}, error {error:.1e}", flush=True)
    return rows


def sampled(folder: str) -> list[dict]:
    model, rows = load_model(folder, torch.bfloat16, "cuda"), []
    kinds = {"greedy": SamplingParams(temperature=0, max_tokens=128), "sampled": SamplingParams(temperature=0.8, top_k=50, top_p=0.9, seed=1, max_tokens=128),
             "penalties": SamplingParams(temperature=0.8, top_k=50, top_p=0.9, seed=1, max_tokens=128, repetition_penalty=1.1, presence_penalty=0.2, frequency_penalty=0.2)}
    for batch in (1, 8, 64, 256):
        cfg = CoreConfig(n_blocks=1 + 25 * batch, max_num_seqs=batch, max_model_len=400, max_num_batched_tokens=16384, window_steps=16, by_time=True, max_in_flight=2,
                         follow=True, prefix_cache=False)
        core = build_core(EngineConfig(), model, cfg)
        prompts, times = [[(i * 7 + j) % 30000 + 5 for j in range(256)] for i in range(batch)], {k: [] for k in kinds}
        for turn in range(5):
            for k, p in kinds.items():
                t = time.perf_counter()
                generate(core, prompts, p)
                if turn > 1: times[k].append(time.perf_counter() - t)
        tok_s = {k: batch * 128 / statistics.median(v) for k, v in times.items()}
        rows.append({"batch": batch, "tok_s": tok_s, "share_of_greedy": {k: tok_s[k] / tok_s["greedy"] for k in tok_s}})
        print("sampled", rows[-1], flush=True)
    return rows


def start_up(folder: str, name: str) -> dict:
    out, cache = {"model": name}, tempfile.mkdtemp()
    for state in ("empty kernel cache", "kernel cache present", "kernel cache present, again"):
        t = time.perf_counter()
        subprocess.run([sys.executable, "-c", START.format(folder=folder)], check=True, env=os.environ | {"TRITON_CACHE_DIR": cache})
        out[state] = round(time.perf_counter() - t, 2)
    shutil.rmtree(cache)
    print("start-up", out, flush=True)
    return out


def main() -> None:
    ap = argparse.ArgumentParser()
    ap.add_argument("--out", default="gpu_checks.json")
    ap.add_argument("--commit", default="")
    ap.add_argument("--only", nargs="+", default=["products", "start_up", "sampled"], choices=["products", "start_up", "sampled"])
    a = ap.parse_args()
    env = {"gpu": torch.cuda.get_device_name(), "torch": torch.__version__, "triton": triton.__version__, "commit": a.commit, "date": datetime.now(UTC).isoformat(timespec="seconds")}
    record = {"kind": "gpu_checks", "environment": env}
    folders = {n: str(write_model(n, Path(tempfile.mkdtemp()) / n, "cuda")) for n in ("esme-214m", "qwen3-0.6b")}
    for key, fn in (("products", lambda: products(("esme-214m", "qwen3-0.6b", "qwen3-8b"))), ("start_up", lambda: [start_up(f, n) for n, f in folders.items()]),
                    ("sampled", lambda: sampled(folders["esme-214m"]))):
        if key not in a.only: continue
        record[key] = fn()
        Path(a.out).write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__": main()
