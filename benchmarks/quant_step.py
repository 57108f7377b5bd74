"""Microseconds of one captured decode step with quantised weights beside bf16, random weights; logits checked against fp32 with the expanded weights. Needs CUDA.

    PYTHONPATH=. python3 benchmarks/quant_step.py [--models qwen3-8b esme-214m] [--kinds nf4 int4 fp8] [--batches 1 8 64] [--tune] [--out FILE]

`ratio`: how many times faster than our own bf16 step of the same model, batch and context. `--tune` tries other launches of each product on the whole step.
Where bitsandbytes is installed, its NF4 products of one layer are timed beside ours."""
import argparse
import os
from importlib import import_module
from importlib.util import find_spec
import torch
import kernel_table as T
from kernel_table import World, distance, full_step, time_step
from llminfer.layers import LayerProgram
from llminfer.model import Layer, Transformer
from llminfer.quant_kernels import QuantShape, accelerate, fast_product, quant_shape
from llminfer.quantization import QuantPlan, expanded, products, quantise_linear

KINDS = {"nf4": QuantPlan("nf4"), "nf4-single": QuantPlan("nf4", double_quant=False), "fp4": QuantPlan("fp4"), "int4": QuantPlan("int4"), "int4-zeros": QuantPlan("int4", symmetric=False),
         "int8": QuantPlan("int8"), "fp8": QuantPlan("fp8"), "w8a8": QuantPlan("fp8", w8a8_rows=32)}
TRIED = ((1, 512, 1, 4), (2, 512, 1, 4), (4, 512, 1, 4), (8, 512, 1, 4), (2, 512, 3, 4), (2, 1024, 1, 8), (4, 1024, 1, 8), (4, 256, 2, 2), (2, 256, 4, 2), (1, 256, 4, 2))


def quantised(model, plan):
    "The same model with its matrices in codes."
    def one(i, part, p): return quantise_linear(plan, p.weight, p.bias, f"layers.{i}.{part}")
    layers = [Layer(**vars(x) | {part: one(i, part, getattr(x, part)) for part in ("qkv", "o", "gate_up", "down")}) for i, x in enumerate(model.layers)]
    m = Transformer(model.config, model.embed, layers, model.norm, model.lm_head)
    accelerate(m)
    return m


def tune(program, w, step, best):
    "Other launches, one product after the other."
    chosen = {}
    for part in ("gate_up", "down", "qkv", "o"):
        for c in TRIED:
            program.shapes = chosen | {f"quant-{part}": QuantShape(*c)}
            try: us = time_step(step, w, 6)
            except Exception as e:
                print("   failed", part, c, str(e)[:80], flush=True)
                continue
            print(f"   {part} {c} {us:.1f}", flush=True)
            if us < best * 0.995: chosen, best = chosen | {f"quant-{part}": QuantShape(*c)}, us
    program.shapes = chosen
    return best, {k: list(vars(v).values()) for k, v in chosen.items()}


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
    ap.add_argument("--tune", action="store_true")
    ap.add_argument("--out", default=os.path.join(os.environ.get("OUT", "."), "quant_step.json"))
    a, rows = ap.parse_args(), []
    for name in a.models:
        model = T.build(name)[0]
        dense_bytes = sum(p.nbytes for p in products(model)[:-1])
        base = {}
        for B in a.batches:
            w = World(model, B, a.context)
            base[B] = time_step(full_step(LayerProgram(model, w.attention), w, distinct=True), w, 8)
            print(f"{name} bf16 B{B} {base[B]:.1f} us", flush=True)
        for kind in a.kinds:
            q = quantised(model, KINDS[kind])
            exact = expanded(q)
            print({part: list(vars(quant_shape(getattr(q.layers[0], part), part == "gate_up")).values()) for part in ("qkv", "o", "gate_up", "down")}, flush=True)
            for B in a.batches:
                w = World(q, B, a.context)
                ref, p = World(exact, B, a.context, w), LayerProgram(q, w.attention)
                step = full_step(p, w, distinct=True)
                row = {"model": name, "kind": kind, "batch": B, "error": distance(w.logits(p, distinct=True), ref.logits(T.TorchProgram(exact, ref.attention))), "us_bf16": base[B],
                       "us": time_step(step, w, 8), "matrices": sum(x.nbytes for x in products(q)[:-1]) / dense_bytes, "model_bytes": q.nbytes / model.nbytes}
                row["ratio"] = base[B] / row["us"]
                if kind == "nf4" and find_spec("bitsandbytes"): row |= by_bitsandbytes(q, B, w)
                rows.append(row)
                print({k: round(v, 4) if isinstance(v, float) else v for k, v in row.items()}, flush=True)
                if a.tune and B == 1:
                    row["us_tuned"], row["shapes"] = tune(p, w, step, row["us"])
                    print("  tuned", round(row["us_tuned"], 1), row["shapes"], flush=True)
            del q, exact
            torch.cuda.empty_cache()
        del model
    T.write_record(a.out, "quant_step", rows, context=a.context)


if __name__ == "__main__": main()
