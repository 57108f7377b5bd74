"""What each rung bought: one model, one decode step, from plain torch to captured windows of fused kernels.

    PYTHONPATH=. python3 benchmarks/ladder.py --model esme-214m --batches 1,8,64,256 --out FILE

The same prompts on every rung; step = (a run of `new` tokens - a run of 1) / (new - 1), median of the runs. A rung whose parts are not there is skipped with
its reason; a rung is measured alone in this process and its memory given back before the next. The record is written after every rung.
"""
from __future__ import annotations
import argparse, gc, json, statistics, time
from collections.abc import Callable
from pathlib import Path
from typing import Any
import torch
from gpu_child import FUSED, GRAPHS, Hf, Ours, build_core
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


RUNGS: list[tuple[str, str, Callable[..., Any]]] = [
    ("transformers", "transformers `generate`, a static batch", generate),
    ("stepped", "packed weights and paged KV in torch, the host reads every token", ours({}, STEPPED)),
    ("windows", "8 steps a launch, tokens come back through the ring", ours({}, WINDOWS)),
    ("graphs", "the same torch operations, captured and replayed", ours({"runner": GRAPHS}, WINDOWS)),
    ("kernels", "fused elementwise parts and split-KV attention, launched eagerly", ours({"program": FUSED}, WINDOWS)),
    ("kernels in graphs", "both", ours({"runner": GRAPHS, "program": FUSED}, WINDOWS)),
]


def seconds(arm: Any, prompts: list[list[int]], new: int, runs: int) -> tuple[float, float]: # full run, first tokens
    "Medians after warm-up; a runner captures between runs what it missed."
    for n in (new, 1, new, 1, new):
        arm.run(prompts, n)
        arm.idle()
    return tuple(statistics.median(arm.run(prompts, n)[0] for _ in range(runs)) for n in (new, 1))  # type: ignore[return-value]


def climb(rung: str, build: Callable[..., Any], folder: Path, model: Any, a: argparse.Namespace, prompts: Prompts) -> list[dict[str, Any]]:
    "All batch sizes of one rung."
    rows = []
    sizes = dict(n_blocks=max(a.batches) * -(-(a.prompt + a.new) // 16) + 64, max_num_seqs=max(a.batches), max_model_len=a.prompt + a.new + 16,
                 max_num_batched_tokens=a.budget, prefix_cache=False)
    try: arm = build(folder, model, sizes)
    except (LookupError, ValueError) as e: return [{"rung": rung, "skipped": str(e)}]
    for batch in a.batches:
        try:
            full, first = seconds(arm, prompts(batch, 1), a.new, a.runs)
            row = {"rung": rung, "batch": batch, "step_us": round((full - first) / (a.new - 1) * 1e6, 1), "first_ms": round(first * 1e3, 3),
                   "tok_s": round(batch * a.new / full, 1)}
            if a.device == "cuda": row["share_of_floor"] = round(floor_us(model.config, batch, a.prompt + a.new / 2) / row["step_us"], 4)
        except Exception as e: row = {"rung": rung, "batch": batch, "skipped": f"{type(e).__name__}: {e}"[:300]}
        rows.append(row)
        print(row, flush=True)
    return rows


def gains(rows: list[dict[str, Any]]) -> None:
    "How many times faster a step is than on the rung below, and than on the lowest."
    seen: dict[int, list[float]] = {}
    for r in rows:
        if "step_us" not in r: continue
        below = seen.setdefault(r["batch"], [])
        if below: r |= {"times_below": round(below[-1] / r["step_us"], 2), "times_first": round(below[0] / r["step_us"], 2)}
        below.append(r["step_us"])


def main(argv: list[str] | None = None) -> None:
    ap = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ap.add_argument("--model", default="esme-214m", choices=MODELS)
    ap.add_argument("--batches", type=lambda s: [int(x) for x in s.split(",")], default=[1, 8, 64, 256])
    ap.add_argument("--rungs", type=lambda s: s.split(","), default=[r[0] for r in RUNGS])
    ap.add_argument("--prompt", type=int, default=256)
    ap.add_argument("--new", type=int, default=65)
    ap.add_argument("--runs", type=int, default=3)
    ap.add_argument("--budget", type=int, default=16384)
    ap.add_argument("--device", default="cuda")
    ap.add_argument("--folder", default="/tmp/llminfer-models")
    ap.add_argument("--commit", default="")
    ap.add_argument("--out", default=str(ROOT / "benchmarks/records/ladder.json"))
    a = ap.parse_args(argv)
    dtype = "float32" if a.device == "cpu" else "bfloat16"
    folder = write_model(a.model, Path(a.folder) / f"{a.model}-{dtype}", a.device, dtype)
    model = load_model(open_checkpoint(folder), getattr(torch, dtype), a.device)
    prompts = Prompts(a.model, model.config.vocab_size, a.prompt)
    record: dict[str, Any] = {"kind": "ladder", "model": a.model, "environment": environment(a), "rungs": {}, "rows": []}
    for name, what, build in RUNGS:
        if name not in a.rungs: continue
        t = time.perf_counter()
        record["rows"] += climb(name, build, folder, model, a, prompts)
        record["rungs"][name] = {"what": what, "seconds": round(time.perf_counter() - t, 1)}
        gains(record["rows"])
        Path(a.out).write_text(json.dumps(record, indent=1) + "\n")
        gc.collect()
        if a.device == "cuda": torch.cuda.empty_cache()


if __name__ == "__main__": main()
