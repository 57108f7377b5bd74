"""Microseconds of one captured decode step with keys and values in 8 bits beside 16, random weights; logits checked against fp32 over the decoded pages. Needs CUDA.

    PYTHONPATH=. python3 benchmarks/kv_step.py [--models esme-214m qwen3-8b] [--batches 1 64 256] [--contexts 320 1024 4096] [--out FILE]
    PYTHONPATH=. python3 benchmarks/kv_step.py --sweep --batches 256 64 --contexts 1024 4096      # other launches of attention, at most --seconds

`ratio`: how many times faster than our own step over 16-bit pages of the same model, batch and context. `error`: of the kernels, `error_of_codes`: of 8 bits.
`launch`: what differs from `attend_shape`; `apart`: its logits from those of `attend_shape`'s launch."""
import argparse
import os
import time
from contextlib import contextmanager
from dataclasses import replace
import torch
import kernel_table as T
from kernel_table import World, distance, full_step, time_step
from llminfer import splitkv
from llminfer.layers import LayerProgram

WIDE = [dict(M=16), dict(S=2), dict(S=2, stages=4), dict(stages=7), dict(N=64), dict(N=64, stages=3), dict(N=64, warps=2, stages=5, regs=128),
        dict(N=64, warps=2, stages=4, regs=128), dict(heads=False)]      # 1,000 programs or more; M=16: queries are the rows of the products
NARROW = [dict(M=8), dict(M=8, N=64, warps=2, S=2), dict(M=8, N=32, warps=1, S=4), dict(M=8, N=32, warps=1, S=8), dict(M=8, N=32, warps=1, S=4, heads=True),
          dict(M=8, N=64, warps=2, S=4), dict(M=8, N=64, warps=1, S=4), dict(stages=7), dict(heads=True)]


@contextmanager
def launch(**change):
    "Attention launched in another way."
    table = splitkv.attend_shape
    splitkv.attend_shape = lambda *a, **kw: replace(table(*a, **kw), **change)
    try: yield
    finally: splitkv.attend_shape = table


def sweep(model, exact, B, context, until):
    "All launches over fp8 pages and the best of them over int8 pages; the first of a kind is the table's, checked against fp32 if coded."
    w, tried = World(model, B, context), WIDE if B * model.config.n_kv_heads > 528 else NARROW
    us = {}
    for kind, changes in (("auto", [{}, dict(heads=True)]), ("fp8", [{}, *tried]), ("int8", None)):
        if changes is None: changes = [{}, *sorted((c for c in tried if str(c) in us), key=lambda c: us[str(c)])[:2]]
        world = w if kind == "auto" else World(model, B, context, w, kind)
        p, us, first = LayerProgram(model, world.attention), {}, None
        for change in changes:
            if time.monotonic() > until and us: break
            row = {"kv": kind, "batch": B, "context": context, "launch": change}
            try:
                with launch(**change): got, row["us"] = world.logits(p, distinct=True), time_step(full_step(p, world, distinct=True), world, 5)
            except Exception as e:      # a launch that the device has no room for
                yield row | {"failed": repr(e)[:300]}
                continue
            if first is None:
                first = got
                if kind == "auto": base = row["us"]
                else:
                    ref = World(exact, B, context, world, kind)
                    row["error"] = distance(got, ref.logits(T.TorchProgram(exact, ref.attention)))
                    del ref
            us[str(change)] = row["us"]
            yield row | {"apart": distance(got, first), "ratio": base / row["us"]}
        if us: print(f"BEST {kind} B{B} context {context}: {min(us, key=us.get)} {min(us.values()):.0f} us, {base / min(us.values()):.2f} of 16 bits", flush=True)


def measure(model, exact, B, context):
    "A row for each kind of pages."
    w = World(model, B, context)
    plain = LayerProgram(model, w.attention)
    us, logits = time_step(full_step(plain, w, distinct=True), w, 8), w.logits(plain, distinct=True)
    for kind in ("fp8", "int8"):
        coded = World(model, B, context, w, kind)
        p, ref = LayerProgram(model, coded.attention), World(exact, B, context, coded, kind)
        got = coded.logits(p, distinct=True)
        row = {"kv": kind, "batch": B, "context": context, "error": distance(got, ref.logits(T.TorchProgram(exact, ref.attention))),
               "error_of_codes": distance(got, logits), "us_16_bits": us, "us": time_step(full_step(p, coded, distinct=True), coded, 8),
               "bytes": coded.kv.nbytes / w.kv.nbytes}
        del ref
        yield row | {"ratio": us / row["us"]}


@torch.inference_mode()
def main():
    ap = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ap.add_argument("--models", nargs="+", default=["esme-214m"], choices=list(T.SHAPES))
    ap.add_argument("--batches", nargs="+", type=int, default=[1, 64, 256])
    ap.add_argument("--contexts", nargs="+", type=int, default=[320, 1024])
    ap.add_argument("--sweep", action="store_true")
    ap.add_argument("--seconds", type=float, default=100)
    ap.add_argument("--out", default=os.path.join(os.environ.get("OUT", "."), "kv_step.json"))
    a, rows = ap.parse_args(), []
    until = time.monotonic() + a.seconds
    for name in a.models:
        model, exact = T.build(name)
        for B in a.batches:
            for context in a.contexts:
                for row in sweep(model, exact, B, context, until) if a.sweep else measure(model, exact, B, context):
                    rows.append({"model": name} | row)
                    print({k: round(v, 4) if isinstance(v, float) else v for k, v in rows[-1].items()}, flush=True)
                torch.cuda.empty_cache()
    T.write_record(a.out, "kv_step", rows)


if __name__ == "__main__": main()
