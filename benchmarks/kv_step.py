"""Microseconds of one captured decode step with keys and values in 8 bits beside 16, random weights; logits checked against fp32 over the decoded pages. Needs CUDA.

    PYTHONPATH=. python3 benchmarks/kv_step.py [--models esme-214m qwen3-8b] [--batches 1 64 256] [--contexts 320 1024 4096] [--out FILE]

`ratio`: how many times faster than our own step over 16-bit pages of the same model, batch and context. `error`: of the kernels, `error_of_codes`: of 8 bits."""
import argparse
import os
import torch
import kernel_table as T
from kernel_table import World, distance, full_step, time_step
from llminfer.layers import LayerProgram


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
    ap.add_argument("--out", default=os.path.join(os.environ.get("OUT", "."), "kv_step.json"))
    a, rows = ap.parse_args(), []
    for name in a.models:
        model, exact = T.build(name)
        for B in a.batches:
            for context in a.contexts:
                for row in measure(model, exact, B, context):
                    rows.append({"model": name} | row)
                    print({k: round(v, 4) if isinstance(v, float) else v for k, v in rows[-1].items()}, flush=True)
                torch.cuda.empty_cache()
    T.write_record(a.out, "kv_step", rows)


if __name__ == "__main__": main()
