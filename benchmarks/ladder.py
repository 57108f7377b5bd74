"""What each rung bought: one model, one decode step, from plain torch to captured windows of fused kernels.

    PYTHONPATH=. python3 benchmarks/ladder.py --models esme-214m,qwen3-0.6b --batches 1,8,64 --deadline 140 --out FILE
    PYTHONPATH=. python3 benchmarks/ladder.py --tiny --device cpu --out FILE          (proves the script: seconds, on any machine)
    PYTHONPATH=. python3 benchmarks/ladder.py --build --models esme-214m,qwen3-0.6b   (compiles FlashInfer's kernels for these shapes, side by side, and ends)

The same prompts on every rung; step = (a run of `new` tokens - a run of 1) / (new - 1), median of the runs; rungs whose steps are launched one operation at a time
take 17 new tokens and fewer runs. A rung whose parts are not there is skipped with its reason; a rung is measured alone in this process and its memory given back
before the next. The record is written after every rung; after `--deadline` seconds no new measurement begins.
"""
from __future__ import annotations
import argparse, gc, json, statistics, subprocess, sys, time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any
import torch
from gpu_child import FUSED, GRAPHS, Hf, Ours, build_core, path_of
from gpu_shapes import MODELS, Prompts, floor_us, write_model
from gpu_vs_vllm import ROOT, environment
from llminfer.loading import load_model, open_checkpoint

STEPPED = {"window_steps": 1, "max_in_flight": 1, "follow": False}
WINDOWS = {"window_steps": 8, "max_in_flight": 2, "follow": True}


def ours(parts: dict[str, str], settings: dict[str, Any]) -> Callable[..., Any]:
    "A rung of our own engine: which parts, which settings."
    def build(folder: Path, model: Any, sizes: dict[str, Any]) -> Any:
        arm = Ours()
        arm.core = build_core(model, parts, **sizes | settings)
        return arm
    return build


def generate(folder: Path, model: Any, sizes: dict[str, Any]) -> Any:
    arm = Hf()
    arm.load(str(folder), str(model.device), str(model.dtype).removeprefix("torch."), {})
    return arm


@dataclass
class Rung:
    "One way to run a step."
    name: str
    what: str
    build: Callable[..., Any]
    slow: bool = False    # launched one operation at a time


FLASHINFER = {"runner": "llminfer.flashinfer_adapter:FlashInferRunner", "program": "llminfer.flashinfer_adapter:FlashInferProgram"}
RUNGS = [
    Rung("transformers", "transformers `generate`, a static batch", generate, True),
    Rung("stepped", "packed weights and paged KV in torch, the host reads every token", ours({}, STEPPED), True),
    Rung("windows", "8 steps a launch, tokens come back through the ring", ours({}, WINDOWS), True),
    Rung("graphs", "the same torch operations, captured and replayed", ours({"runner": GRAPHS}, WINDOWS)),
    Rung("kernels", "fused elementwise parts and split-KV attention, launched eagerly", ours({"program": FUSED}, WINDOWS), True),
    Rung("flashinfer", "fused elementwise parts and FlashInfer's attention, captured, a plan from the host before each replay", ours(FLASHINFER, WINDOWS)),
    Rung("kernels in graphs", "fused elementwise parts and split-KV attention, captured", ours({"runner": GRAPHS, "program": FUSED}, WINDOWS)),
    Rung("layers in graphs", "norms and residuals inside own products too, captured", ours({"runner": GRAPHS, "program": "llminfer.layers:LayerProgram"}, WINDOWS)),
]


def seconds(arm: Any, prompts: list[list[int]], new: int, runs: int, warm: int) -> tuple[float, float]: # full run, first tokens
    "Medians after warm-up; a runner captures between runs what it missed."
    for n in (new, 1) * warm:
        arm.run(prompts, n)
        arm.idle()
    return tuple(statistics.median(arm.run(prompts, n)[0] for _ in range(runs)) for n in (new, 1))  # type: ignore[return-value]


def measure(rung: Rung, arm: Any, config: Any, batch: int, a: argparse.Namespace, prompts: Prompts) -> dict[str, Any]:
    "One row."
    if time.perf_counter() - a.t0 > a.deadline: return {"skipped": f"the run's {a.deadline:.0f} s were over"}
    new, runs, warm = (min(a.new, 17), min(a.runs, 2), 1) if rung.slow else (a.new, a.runs, 3)
    try: full, first = seconds(arm, prompts(batch, 1), new, runs, warm)
    except Exception as e: return {"skipped": f"{type(e).__name__}: {e}"[:300]}
    row = {"step_us": round((full - first) / (new - 1) * 1e6, 1), "first_ms": round(first * 1e3, 3), "new": new}
    if a.device == "cuda": row["share_of_floor"] = round(floor_us(config, batch, a.prompt + new / 2) / row["step_us"], 4)
    return row | {k: v for k, v in path_of(arm.core).items() if k in ("info", "graphs", "graphs_failed")} if hasattr(arm, "core") else row


def climb(rung: Rung, name: str, folder: Path, model: Any, a: argparse.Namespace, prompts: Prompts) -> list[dict[str, Any]]:
    "All batch sizes of one rung."
    sizes = dict(n_blocks=max(a.batches) * -(-(a.prompt + a.new) // 16) + 64, max_num_seqs=max(a.batches), max_model_len=a.prompt + a.new + 16,
                 max_num_batched_tokens=a.budget, prefix_cache=False)
    try: arm = rung.build(folder, model, sizes)
    except (LookupError, ValueError) as e: return [{"model": name, "rung": rung.name, "skipped": str(e)}]
    rows = []
    for batch in a.batches:
        rows.append({"model": name, "rung": rung.name, "batch": batch} | measure(rung, arm, model.config, batch, a, prompts))
        print(rows[-1], flush=True)
    return rows


def gains(rows: list[dict[str, Any]]) -> None:
    "How many times faster a step is than on the rung below, and than on the lowest."
    seen: dict[tuple[str, int], list[float]] = {}
    for r in rows:
        if "step_us" not in r: continue
        below = seen.setdefault((r["model"], r["batch"]), [])
        if below: r |= {"times_below": round(below[-1] / r["step_us"], 2), "times_first": round(below[0] / r["step_us"], 2)}
        below.append(r["step_us"])


BUILD = """
import sys, torch
sys.path.insert(0, 'benchmarks')
from gpu_shapes import SHAPES
from llminfer.attention import KVPool, PagedAttention
from llminfer.flashinfer_adapter import Planner, load_wrappers
from llminfer.model import ModelConfig
from llminfer.runner import DecodeState
import numpy as np
c = ModelConfig.from_hf(SHAPES[sys.argv[1]])
p, st = Planner(PagedAttention(KVPool(1, 4, 16, c.n_kv_heads, c.head_dim, torch.bfloat16, 'cuda'), c.n_heads), torch.bfloat16, load_wrappers()), DecodeState(2, 32, 16, 'cuda')
if sys.argv[2] == 'step': p.plan_step(st, np.empty(0, np.int64), np.empty(0, np.int64), 1)
else: p.plan_prompts(st, st.put(np.zeros(1, np.int64)), [0], [1])
"""


def build(models: list[str]) -> None:
    "Compile FlashInfer's kernels for these shapes in processes of their own."
    jobs = {(m, part): subprocess.Popen([sys.executable, "-c", BUILD, m, part], cwd=ROOT) for m in models for part in ("step", "prompts")}
    t = time.perf_counter()
    for job, p in jobs.items(): print("built" if not p.wait() else "NOT built", *job, f"{time.perf_counter() - t:.0f} s", flush=True)


def arguments(argv: list[str] | None) -> argparse.Namespace:
    ap = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    items = lambda s: s.split(",")
    ap.add_argument("--models", type=items, default=["esme-214m"], help=", ".join(MODELS))
    ap.add_argument("--batches", type=lambda s: [int(x) for x in s.split(",")], default=[1, 8, 64, 256])
    ap.add_argument("--rungs", type=items, default=[r.name for r in RUNGS])
    ap.add_argument("--prompt", type=int, default=256)
    ap.add_argument("--new", type=int, default=65)
    ap.add_argument("--runs", type=int, default=3)
    ap.add_argument("--budget", type=int, default=16384)
    ap.add_argument("--device", default="cuda")
    ap.add_argument("--tiny", action="store_true", help="a model of three layers, a few tokens: is the script whole?")
    ap.add_argument("--build", action="store_true", help="compile FlashInfer's kernels for the models and end")
    ap.add_argument("--deadline", type=float, default=1e9, help="seconds after which no new measurement begins")
    ap.add_argument("--folder", default="/tmp/llminfer-models")
    ap.add_argument("--commit", default="")
    ap.add_argument("--out", default=str(ROOT / "benchmarks/records/ladder.json"))
    a = ap.parse_args(argv)
    a.t0 = time.perf_counter()
    if a.tiny: a.models, a.batches, a.prompt, a.new, a.runs = ["tiny"], [1, 2], 12, 5, 1
    if bad := [m for m in a.models if m not in MODELS]: ap.error(f"unknown model {bad[0]}; known: {', '.join(MODELS)}")
    if bad := set(a.rungs) - {r.name for r in RUNGS}: ap.error(f"unknown rung {min(bad)}; known: {', '.join(r.name for r in RUNGS)}")
    return a


def main(argv: list[str] | None = None) -> None:
    a = arguments(argv)
    if a.build: return build(a.models)
    dtype = "float32" if a.device == "cpu" else "bfloat16"
    record: dict[str, Any] = {"kind": "ladder", "environment": environment(a), "prompt": a.prompt, "rungs": {}, "rows": []}
    for name in a.models:
        folder = write_model(name, Path(a.folder) / f"{name}-{dtype}", a.device, dtype)
        model = load_model(open_checkpoint(folder), getattr(torch, dtype), a.device)
        prompts = Prompts(name, model.config.vocab_size, a.prompt)
        for rung in [r for r in RUNGS if r.name in a.rungs]:
            t = time.perf_counter()
            record["rows"] += climb(rung, name, folder, model, a, prompts)
            record["rungs"].setdefault(rung.name, {"what": rung.what, "seconds": {}})["seconds"][name] = round(time.perf_counter() - t, 1)
            gains(record["rows"])
            Path(a.out).write_text(json.dumps(record, indent=1) + "\n")
            gc.collect()
            if a.device == "cuda": torch.cuda.empty_cache()
    table(record["rows"], a.batches)


def table(rows: list[dict[str, Any]], batches: list[int]) -> None:
    "Microseconds a step, a line a rung."
    cells = {(r["model"], r["rung"], r.get("batch")): r for r in rows}
    print(f"{'model':>11} {'rung':18s}" + "".join(f"{'batch ' + str(b):>12}" for b in batches))
    for m, rung in dict.fromkeys((m, rung) for m, rung, _ in cells):
        steps = [cells.get((m, rung, b), {}).get("step_us") for b in batches]
        print(f"{m:>11} {rung:18s}" + "".join(f"{s:12.0f}" if s else f"{'-':>12}" for s in steps))


if __name__ == "__main__": main()
