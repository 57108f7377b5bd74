"""Microseconds of one captured decode step with five launches a layer, beside the eight of `FusedProgram`; logits checked first. Needs CUDA.

    PYTHONPATH=. python3 benchmarks/layer_table.py [--models esme-214m ...] [--batches 1 8 64] [--tune 1 8] [--parts] [--context 320] [--pool 100000] [--out FILE]

`--tune` tries other launches of each product, one kind after the other, on the whole step, and keeps the best."""
import argparse
import itertools
import os
import time
import torch
import kernel_table as T
from llminfer import layers as L
from kernel_table import World, distance, full_step, time_step
from llminfer.kernels import FusedProgram
from llminfer.layers import LayerProgram, PartShape, RowShape, TileShape, tile_shape

ROWS = {"qkv": [(8, 4, 256), (4, 4, 256), (16, 16, 256), (8, 8, 512)], "o": [(8, 8, 256), (2, 2, 256), (4, 8, 512), (8, 4, 256)],
        "gate_up": [(8, 8, 256), (16, 8, 256), (8, 16, 512), (4, 8, 512)], "down": [(2, 2, 256), (4, 8, 512), (8, 8, 256), (2, 4, 512), (4, 4, 512)],
        "parts": [(8, 64, 8), (4, 64, 16), (4, 128, 16), (16, 32, 8), (8, 32, 8)]}
WIDE = {"qkv": [(8, 8, 1024), (4, 4, 1024)], "o": [(4, 4, 1024), (8, 8, 1024)], "gate_up": [(2, 4, 1024), (8, 16, 1024), (4, 4, 1024)], "down": [(4, 4, 1024), (2, 4, 1024), (8, 8, 1024)],
        "parts": [(8, 64, 16), (4, 64, 8), (4, 32, 8)]}
TILES = {"qkv": [(16, 128, 4, 4), (16, 256, 3, 4), (32, 128, 4, 4), (16, 64, 6, 4), (16, 128, 5, 2)], "o": [(16, 128, 4, 4), (16, 256, 3, 4), (32, 128, 4, 4), (16, 64, 6, 4), (16, 128, 5, 2)],
         "gate_up": [(16, 128, 4, 4), (32, 128, 3, 4), (32, 64, 4, 4), (16, 256, 3, 4), (16, 64, 6, 4)], "down": [(16, 256, 3, 4), (16, 128, 4, 4), (16, 512, 2, 4), (32, 128, 4, 4), (16, 64, 6, 4)]}


def kinds(c):
    "Columns of each product."
    return {"qkv": c.hidden_size, "o": c.n_heads * c.head_dim, "gate_up": c.hidden_size, "down": c.intermediate_size} | {"parts": 0}


def candidates(kind, B, K, rows, E):
    if rows and kind == "parts": return [PartShape(*c) for c in (ROWS if E <= 64 else WIDE)[kind]]
    if rows: return [RowShape(r, w, k, min(-(-K // k), 8)) for r, w, k in (ROWS if K <= 3072 else WIDE)[kind] if -(-K // k) <= 12]
    if kind == "parts": return []
    BM = tile_shape(kind, B, K).BM
    return [TileShape(BM, n, k, s, w) for n, k, s, w in TILES[kind] if k <= K]


class Without:
    "Leaves one part of a layer out: its launches do nothing and its result stays what it was."
    def __init__(self, part): self.part = part

    def __enter__(self):
        self.old = {n: getattr(L, n) for n in ("row_product", "tile_product", "attend", "attend_parts")}
        if self.part == "attend":
            out = {}
            L.attend = lambda att, i, q, *a, **k: out.setdefault(0, q.new_zeros(q.shape[0], att.n_heads * att.kv.head_dim))
            L.attend_parts = lambda *a, **k: None
            return
        last = {}
        def tile(call, kind, *a, **k):
            if kind != self.part or k.get("norm") is not None and kind not in last:      # the first sums of squares are needed
                last[kind] = self.old["tile_product"](call, kind, *a, **k)
            return last[kind]
        L.row_product = lambda call, kind, x, linear, out, *a, **k: out if kind == self.part else self.old["row_product"](call, kind, x, linear, out, *a, **k)
        L.tile_product = tile

    def __exit__(self, *exc):
        for n, f in self.old.items(): setattr(L, n, f)


def parts_of(layers, step, w, us):
    "Microseconds a layer that the step loses without each part."
    n, each = layers.model.config.n_layers, {}
    for part in ("qkv", "attend", "o", "gate_up", "down"):
        with Without(part): each[part] = (us - time_step(step, w, 6)) / n
    return each


def tune(program, w, step, best, deadline):
    "Coordinate descent over the kinds."
    chosen, c = {}, program.model.config
    for kind, K in kinds(c).items():
        for shape in candidates(kind, w.B, K, w.B <= program.most_rows, c.head_dim):
            if time.time() > deadline: return chosen, best
            program.shapes = chosen | {kind: shape}
            try: us = time_step(step, w, 6)
            except Exception as e:
                print("   failed", kind, shape, str(e)[:80], flush=True)
                continue
            if us < best * 0.995: chosen, best = chosen | {kind: shape}, us
            print(f"   {kind} {list(vars(shape).values())} {us:.1f}", flush=True)
        program.shapes = chosen
    return chosen, best


@torch.inference_mode()
def measure(name, model, exact, B, context, pool, tuned, parts, deadline):
    w = World(model, B, context, pool=pool)
    fused, layers = FusedProgram(model, w.attention), LayerProgram(model, w.attention)
    layers.most_tiles = 256
    ref = World(exact, B, context, w, pool=pool)
    want = ref.logits(T.TorchProgram(exact, ref.attention))
    row = {"model": name, "batch": B, "context": context, "pool": pool, "error_fused": distance(w.logits(fused, distinct=True), want),
           "us_fused": time_step(full_step(fused, w, distinct=True), w, 8)}
    t = time.time()
    row["error"] = distance(w.logits(layers, distinct=True), want)
    row["compile_s"] = time.time() - t
    step = full_step(layers, w, distinct=True)
    row["us"] = time_step(step, w, 8)
    if B > layers.most_rows and L.WHOLE[0] <= B * model.config.n_heads <= L.WHOLE[1]:      # attention in splits instead
        kept, L.WHOLE = L.WHOLE, (1, 0)
        row["us_split"] = time_step(full_step(layers, w, distinct=True), w, 8)
        L.WHOLE = kept
    layers.pdl = False
    row["us_no_pdl"] = time_step(step, w, 8)
    layers.pdl = True
    same = w.logits(layers, distinct=True)
    row["repeats_equal"] = all(torch.equal(same, w.logits(layers, distinct=True)) for _ in range(20))
    if parts: row["us_layer_by_part"] = {k: round(v, 2) for k, v in parts_of(layers, step, w, row["us"]).items()}
    print({k: round(v, 4) if isinstance(v, float) else v for k, v in row.items()}, flush=True)
    if tuned:
        chosen, row["us_tuned"] = tune(layers, w, step, row["us"], deadline)
        row["shapes"] = {k: list(vars(v).values()) for k, v in chosen.items()}
        row["error_tuned"] = distance(w.logits(layers, distinct=True), want)
        print("  tuned", round(row["us_tuned"], 1), row["shapes"], round(row["error_tuned"], 4), flush=True)
    return row


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--models", nargs="+", default=["esme-214m", "qwen3-0.6b"], choices=list(T.SHAPES))
    ap.add_argument("--batches", nargs="+", type=int, default=[1, 8, 64, 256])
    ap.add_argument("--context", type=int, nargs="+", default=[320])
    ap.add_argument("--pool", type=int, default=0, help="tokens that the pool has room for, if more than the rows need")
    ap.add_argument("--tune", nargs="*", type=int, default=[], help="batches")
    ap.add_argument("--parts", action="store_true", help="what the step loses without each part")
    ap.add_argument("--seconds", type=int, default=200)
    ap.add_argument("--out", default=os.path.join(os.environ.get("OUT", "."), "layers_h200.json"))
    a = ap.parse_args()
    rows, deadline = [], time.time() + a.seconds
    for name in a.models:
        models = T.build(name)
        for B, context in itertools.product(a.batches, a.context):
            if time.time() > deadline: break
            try: rows.append(measure(name, *models, B, context, a.pool, B in a.tune, a.parts, deadline))
            except Exception as e: print("FAILED", name, B, type(e).__name__, str(e)[:2000], flush=True)
        del models
    T.write_record(a.out, "layers", rows)


if __name__ == "__main__": main()
