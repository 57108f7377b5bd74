"""Microseconds of one captured decode step with quantised weights beside bf16, random weights; logits checked against fp32 with the expanded weights. Needs CUDA.

    PYTHONPATH=. python3 benchmarks/quant_step.py [--models qwen3-8b esme-214m] [--kinds nf4 int4 fp8] [--batches 1 8 64] [--sweep SECONDS] [--out FILE]

`ratio`: how many times faster than our own bf16 step of the same model, batch and context. `--sweep` first tries other launches of each product over all layers,
prints microseconds a layer, and measures the step with the best; after so many seconds it tries no more.
Where bitsandbytes is installed, its NF4 products of one layer are timed beside ours."""
import argparse
import os
import time
from concurrent.futures import ThreadPoolExecutor
from importlib import import_module
from importlib.util import find_spec
import torch
import torch.nn.functional as F
import kernel_table as T
from kernel_table import World, distance, full_step, time_step
from llminfer import quant_kernels as K
from llminfer.layers import LayerProgram
from llminfer.model import Layer, Transformer
from llminfer.quant_kernels import QuantShape, QuantTile, accelerate, fast_product, quant_rows, quant_shape, quant_tile, quant_tiles
from llminfer.quantization import QuantPlan, expanded, products, quantise_linear

KINDS = {"nf4": QuantPlan("nf4"), "nf4-single": QuantPlan("nf4", double_quant=False), "fp4": QuantPlan("fp4"), "int4": QuantPlan("int4"), "int4-zeros": QuantPlan("int4", symmetric=False),
         "int8": QuantPlan("int8"), "fp8": QuantPlan("fp8"), "w8a8": QuantPlan("fp8", w8a8_rows=32)}
PARTS = ("qkv", "o", "gate_up", "down")
ROWS = ((8, 512, 1, 4), (16, 512, 1, 4), (4, 512, 1, 4), (8, 256, 2, 2), (4, 256, 2, 2), (8, 512, 3, 4), (16, 256, 2, 2))
TILES = {8: ((64, 32, 4), (64, 64, 3), (64, 32, 3)), 64: ((128, 32, 2), (128, 32, 3), (64, 32, 2), (64, 32, 3), (64, 64, 2))}   # BN, BW, stages


def quantised(model, plan):
    "The same model with its matrices in codes."
    def one(i, part, p): return quantise_linear(plan, p.weight, p.bias, f"layers.{i}.{part}")
    layers = [Layer(**vars(x) | {part: one(i, part, getattr(x, part)) for part in ("qkv", "o", "gate_up", "down")}) for i, x in enumerate(model.layers)]
    m = Transformer(model.config, model.embed, layers, model.norm, model.lm_head)
    accelerate(m)
    return m


class Nothing:
    "A world that has no state."
    def reset(self): pass


def caller(part, layers, B, c):
    "A call of one product of all layers at launch c."
    ps = [getattr(layer, part) for layer in layers]
    (N, cols), new = ps[0].shape, lambda n, t: torch.randn(B, n, dtype=t, device="cuda")
    if B > K.FEW:
        x = new(cols, torch.bfloat16)
        return lambda: [quant_tiles(p, x, c) for p in ps]
    x, pair, normed = new(cols, torch.float32), part == "gate_up", part in ("qkv", "gate_up")
    out, norm = new(N // 2 if pair else N, torch.float32), layers[0].attn_norm if normed else None
    return lambda: [quant_rows(p, x, out, norm, pair, not normed, 1e-5, True, c) for p in ps]


def tried(part, p, B):
    "Launches worth a try, ours first."
    if B <= K.FEW: return list(dict.fromkeys([quant_shape(p, part == "gate_up"), *(QuantShape(*c) for c in ROWS)]))
    own, out = quant_tile(p, B), []
    for BN, BW, stages in TILES.get(B, TILES[64]):
        tiles = -(-p.shape[0] // BN)
        for splits in {max(1, min(8, n // tiles)) for n in (200, 400)}: out.append(QuantTile(BN, BW, splits, stages, BN // 16))
    return list(dict.fromkeys([own, *out]))


def sweep(q, B, until):
    "The best launch of each product for B rows, by time over all layers."
    best, calls = {}, [(part, c, caller(part, q.layers, B, c)) for part in PARTS for c in tried(part, getattr(q.layers[0], part), B)[:1 if time.time() > until else None]]
    def warm(part, c):
        try: caller(part, q.layers[:1], B, c)()
        except Exception as e: print("   failed", part, c, str(e)[:80], flush=True)
    with ThreadPoolExecutor(14) as pool: list(pool.map(lambda v: warm(*v[:2]), calls))
    torch.cuda.synchronize()
    for part, c, call in calls:
        if time.time() > until and part in best: continue
        try: us = time_step(call, Nothing(), 5, 3) / len(q.layers)
        except Exception as e:
            print("   failed", part, c, str(e)[:80], flush=True)
            continue
        print(f"   B{B} {part} {tuple(vars(c).values())} {us:.2f}", flush=True)
        if part not in best or us < best[part][0] * 0.99: best[part] = us, c
    print("  best", {part: (round(us, 2), *vars(c).values()) for part, (us, c) in best.items()}, flush=True)
    return {part: c for part, (_, c) in best.items()}


def by_bitsandbytes(model, B, w):
    "Microseconds of one layer's products, NF4 with double quantisation: bitsandbytes and ours."
    bnb, layer, x = import_module("bitsandbytes"), model.layers[0], {}
    parts = [getattr(layer, part) for part in ("qkv", "o", "gate_up", "down")]
    for p in parts: x[p.shape[1]] = torch.randn(B, p.shape[1], dtype=model.dtype, device="cuda")
    theirs = [bnb.functional.quantize_4bit(p.expand(model.dtype), quant_type="nf4", compress_statistics=True) for p in parts]
    def run_theirs():
        for p, (q, s) in zip(parts, theirs): bnb.matmul_4bit(x[p.shape[1]], q.t(), quant_state=s)
    def run_ours():
        for p in parts: fast_product(p, x[p.shape[1]])
    return {"us_layer_bitsandbytes": time_step(run_theirs, w, 6), "us_layer_ours": time_step(run_ours, w, 6)}


@torch.inference_mode()
def main():
    ap = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ap.add_argument("--models", nargs="+", default=["qwen3-8b", "esme-214m"], choices=list(T.SHAPES))
    ap.add_argument("--kinds", nargs="+", default=["nf4", "int4", "fp8", "int8"], choices=list(KINDS))
    ap.add_argument("--batches", nargs="+", type=int, default=[1, 8, 64])
    ap.add_argument("--context", type=int, default=320)
    ap.add_argument("--sweep", type=float, default=0)
    ap.add_argument("--out", default=os.path.join(os.environ.get("OUT", "."), "quant_step.json"))
    a, rows = ap.parse_args(), []
    until = time.time() + a.sweep
    for name in a.models:
        model = T.build(name)[0]
        dense_bytes = sum(p.nbytes for p in products(model)[:-1])
        base = {}
        for B in a.batches:
            w = World(model, B, a.context)
            base[B] = time_step(full_step(LayerProgram(model, w.attention), w, distinct=True), w, 8)
            x = {part: torch.randn(B, getattr(model.layers[0], part).weight.shape[1], dtype=model.dtype, device="cuda") for part in PARTS}
            alone = {part: time_step(lambda part=part, layers=model.layers: [F.linear(x[part], getattr(layer, part).weight) for layer in layers], w, 5, 3) / len(model.layers) for part in PARTS}
            print(f"{name} bf16 B{B} {base[B]:.1f} us; cuBLAS alone, a layer:", {part: round(us, 1) for part, us in alone.items()}, flush=True)
        for kind in a.kinds:
            q = quantised(model, KINDS[kind])
            exact = expanded(q)
            for B in a.batches:
                best = sweep(q, B, until) if a.sweep else {}
                by_size = {getattr(q.layers[0], part).shape: c for part, c in best.items()}
                K.quant_tile = (lambda p, *_: by_size[p.shape]) if best and B > K.FEW else quant_tile
                w = World(q, B, a.context)
                ref, p = World(exact, B, a.context, w), LayerProgram(q, w.attention)
                if B <= K.FEW: p.shapes = {f"quant-{part}": c for part, c in best.items()}
                step = full_step(p, w, distinct=True)
                row = {"model": name, "kind": kind, "batch": B, "error": distance(w.logits(p, distinct=True), ref.logits(T.TorchProgram(exact, ref.attention))), "us_bf16": base[B],
                       "us": time_step(step, w, 8), "matrices": sum(x.nbytes for x in products(q)[:-1]) / dense_bytes, "model_bytes": q.nbytes / model.nbytes}
                row["ratio"] = base[B] / row["us"]
                if best: row["shapes"] = {part: list(vars(c).values()) for part, c in best.items()}
                if kind == "nf4" and find_spec("bitsandbytes"): row |= by_bitsandbytes(q, B, w)
                rows.append(row)
                print({k: round(v, 4) if isinstance(v, float) else v for k, v in row.items()}, flush=True)
                T.write_record(a.out, "quant_step", rows, context=a.context)
            del q, exact
            torch.cuda.empty_cache()
        del model


if __name__ == "__main__": main()
