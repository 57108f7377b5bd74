"""Microseconds of one captured decode step, per part and per layer, with the logits checked first. Needs CUDA.

    PYTHONPATH=. python3 benchmarks/kernel_table.py [--models esme-214m qwen3-0.6b] [--batches 1 8 64 256] [--parts] [--out FILE]
    PYTHONPATH=. python3 benchmarks/kernel_table.py --tails [--sweep] [--out FILE]      # what follows the head: greedy, sampled, sampled by torch

Random bf16 weights, greedy, every row at the same context; one CUDA graph a step, token feedback and positions on the device.
A part's time is what the step loses when the part is left out, so overlap is included. `error` is |logits - fp32 reference| / |reference|
for one step of the whole model, `torch_error` the same of the torch program in bf16. No prefill, no scheduler, no detokenising.

A tail's logits are bf16, all rows alive: `flat` as a model of random weights makes them (standard deviation 1), `peaked` with a few likely words (4).
`same_tokens` is the share of rows in which the fused and the torch tail draw the same word from the same logits. --sweep times other cuts of the vocabulary."""
import argparse, json, os, statistics, sys
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
import numpy as np
import torch
import triton
from llminfer import kernels as K
from llminfer.attention import PagedAttention
from llminfer.kv_codes import POOLS
from llminfer.draw import TailShape, finish_fused, tail_shape
from llminfer.interfaces import RowInit, variant_of
from llminfer.kernels import FusedProgram, feed_rows
from llminfer.model import ModelConfig, Transformer, tensor_shapes
from llminfer.request import SamplingParams
from llminfer.runner import DecodeState, Ring, TorchProgram, finish_step
from llminfer.sampling import SamplerState
from llminfer.splitkv import attend_shape

SHAPES = {"esme-214m": (32768, 768, 2048, 30, 12, 4, 64), "smollm2-135m": (49152, 576, 1536, 30, 9, 3, 64),
          "qwen3-0.6b": (151936, 1024, 3072, 28, 16, 8, 128), "qwen3-8b": (151936, 4096, 12288, 36, 32, 8, 128)}
GREEDY = variant_of(SamplingParams(temperature=0))


def build(name, dtype=torch.bfloat16):
    "A random model on the GPU, matrices scaled by their width, and the same numbers in fp32."
    V, D, F, L, H, G, E = SHAPES[name]
    c = ModelConfig("qwen3", V, D, F, L, H, G, E, rope_theta=1e6, qk_norm=True, tie_embeddings=True, max_position_embeddings=4096)
    g = torch.Generator("cuda").manual_seed(0)
    normal = lambda s: torch.randn(s, generator=g, device="cuda")
    make = lambda s: normal(s) * s[1] ** -0.5 if len(s) == 2 else 1 + 0.1 * normal(s)
    tensors = {n: make(s).to(dtype) for n, s in tensor_shapes(c).items()}
    return [Transformer.from_tensors(c, tensors, t, "cuda") for t in (dtype, torch.float32)]


class World:
    "B rows at one context over scattered pages; `pool`: tokens of the pool, if more than these need."
    def __init__(self, model, B, context, source=None, kv_dtype="auto", pool=0):
        c, block = model.config, 16
        width = -(-(context + 256) // block)
        self.st = DecodeState(B, width * block, block, "cuda")
        blocks = max(B * width, pool // block)
        self.kv = POOLS[kv_dtype](c.n_layers, blocks + 1, block, c.n_kv_heads, c.head_dim, model.dtype, "cuda")
        self.sampler, self.ring = SamplerState(B + 1, c.vocab_size, "cuda"), Ring(64, B, torch.device("cuda"), pinned=True)
        self.attention, self.B, self.context = PagedAttention(self.kv, c.n_heads, windows=c.windows), B, context
        self.nb = -(-(context + 64) // block)     # for the torch program
        params, ids = SamplingParams(temperature=0, eos_ids=(c.vocab_size - 1, c.vocab_size - 2)), np.arange(3, dtype=np.int32)
        self.sampler.init_rows([RowInit(r, 0, params, ids, 3, 10 ** 6) for r in range(B)])
        g = torch.Generator("cuda").manual_seed(1)
        self.rows, self.tokens = torch.arange(B, device="cuda"), torch.randint(0, c.vocab_size - 2, (B,), generator=g, device="cuda")
        self.st.table[:B] = torch.randperm(blocks, generator=g, device="cuda")[:B * width].view(B, width).int() + 1
        slots, G, E = torch.arange(2 * self.kv.n_slots, device="cuda"), c.n_kv_heads, c.head_dim
        for layer in range(c.n_layers):     # through the pool's own door: it may hold codes
            x = torch.empty(len(slots), G * E, dtype=(source or self).kv.dtype, device="cuda")
            if source is None: x.normal_(generator=g)
            else: source.kv.read(layer, slots, x)
            self.kv.write(layer, slots, *x.view(2, -1, G, E).to(model.dtype))
        self.reset()

    def reset(self):
        st, B = self.st, self.B
        st.token[:B], st.len[:B], st.limit[:B], st.quota[:B], st.status[:B] = self.tokens, self.context, 10 ** 6, 10 ** 6, 1

    def logits(self, program, **kw):
        self.reset()
        ids, pos, _, act = feed_rows(self.st, self.rows)
        return program.head(program.decode(self.st, ids, self.rows, pos, act, self.nb, **kw)).float()


def time_step(step, world, groups=16, replays=8):
    "Median microseconds of a replay of `step`, captured."
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(2): step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph): step()
    out = []
    for i in range(groups + 2):
        world.reset()
        a, b = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        a.record()
        for _ in range(replays): graph.replay()
        b.record()
        b.synchronize()
        if i > 1: out.append(a.elapsed_time(b) / replays * 1e3)
    return statistics.median(out)


def full_step(program, w, **kw):
    def step():
        ids, pos, n, act = feed_rows(w.st, w.rows)
        logits = program.head(program.decode(w.st, ids, w.rows, pos, act, w.nb, **kw))
        program.finish(w.st, w.sampler, w.ring, logits, w.rows, n, act, GREEDY)
    return step


class Without:
    "Leaves one part of the step out; what reads its result gets a buffer of the same shape."
    def __init__(self, part, model, w):
        c, B, new = model.config, w.B, lambda *s: torch.zeros(*s, dtype=model.dtype, device="cuda")
        E, HE = c.head_dim, c.n_heads * c.head_dim
        widths = {"qkv": HE + 2 * c.n_kv_heads * E, "o": c.hidden_size, "gate_up": 2 * c.intermediate_size, "down": c.hidden_size}
        self.swaps = []
        if part in widths:
            out = new(B, widths[part])
            self.swaps = [(layer, part, lambda h, out=out: out) for layer in model.layers]
        elif part == "attend": self.swaps = [(K, "attend", lambda *a, out=new(B, HE), **k: out)]
        elif part == "rotate": self.swaps = [(K, "rotate_write", lambda *a, out=new(B, c.n_heads, E), **k: out)]
        elif part == "silu": self.swaps = [(K, "silu_mul", lambda *a, out=new(B, c.intermediate_size), **k: out)]
        elif part == "norm":      # the first stays: the others leave its result as it is
            real = K.add_norm
            self.swaps = [(K, "add_norm", lambda x, y, wt, h, eps, ids=None, more=None: h if ids is None else real(x, y, wt, h, eps, ids))]

    def __enter__(self):
        self.old = [(o, n, getattr(o, n)) for o, n, _ in self.swaps]
        for o, n, f in self.swaps: setattr(o, n, f)

    def __exit__(self, *exc):
        for o, n, f in self.old: setattr(o, n, f)


def parts_of(program, model, w, row):
    "Microseconds a layer of each part, and of what follows the layers."
    L, step, each = model.config.n_layers, full_step(program, w, distinct=True), {}
    for part in ("norm", "qkv", "attend", "o", "gate_up", "silu", "down"):
        with Without(part, model, w): each[part] = (row["us_step"] - time_step(step, w, 6)) / L
    with Without("rotate", model, w): each["rotate"] = (row["us_step_own_write"] - time_step(full_step(program, w), w, 6)) / L
    h = torch.randn(w.B, model.config.hidden_size, dtype=model.dtype, device="cuda")
    logits, n, act = program.head(h), torch.full_like(w.rows, w.context), torch.ones_like(w.rows, dtype=torch.bool)
    head = time_step(lambda: program.head(h), w, 6)
    finish = time_step(lambda: program.finish(w.st, w.sampler, w.ring, logits, w.rows, n, act, GREEDY), w, 6)
    return {"us_finish_alone": finish, "us_head_alone": head, "us_layer": (row["us_step"] - finish - head) / L, "us_layer_by_part": each,
            "us_step_torch": time_step(full_step(TorchLayers(model, w.attention), w), w, 4, 4)}


def distance(x, want): return ((x - want).norm() / want.norm()).item()


@torch.inference_mode()
def measure(name, model, exact, B, context, parts):
    "One row of the table."
    c, w = model.config, World(model, B, context)
    program, ref = FusedProgram(model, w.attention), World(exact, B, context, w)
    want = ref.logits(TorchProgram(exact, ref.attention))
    row = {"model": name, "batch": B, "context": context, "error": distance(w.logits(program, distinct=True), want),
           "error_own_write": distance(w.logits(program), want), "torch_error": distance(w.logits(TorchProgram(model, w.attention)), want),
           "us_step": time_step(full_step(program, w, distinct=True), w), "us_step_own_write": time_step(full_step(program, w), w)}
    shape = attend_shape(B, c.n_heads, c.n_kv_heads, c.head_dim, w.st.max_model_len)
    row |= {"tok_s": B / row["us_step"] * 1e6, "shape": vars(shape)} | (parts_of(program, model, w, row) if parts else {})
    short = lambda v: round(v, 4) if isinstance(v, float) else {a: short(b) for a, b in v.items()} if isinstance(v, dict) else v
    print(short(row), flush=True)
    return row


class TorchLayers(FusedProgram):
    "The torch program's layers with this program's tail, which can write words to the host."
    def decode(self, st, ids, rows, positions, act, nb=0, **kw): return TorchProgram.decode(self, st, ids, rows, positions, act, nb)


P = SamplingParams
TAILS = {"greedy": P(temperature=0), "temperature": P(temperature=0.8, seed=1), "top-p": P(temperature=0.8, seed=1, top_p=0.9), "top-k": P(temperature=0.8, seed=1, top_k=50, top_p=0.9),
         "penalties": P(temperature=0.8, seed=1, top_k=50, top_p=0.9, repetition_penalty=1.1, presence_penalty=0.2, frequency_penalty=0.2),
         "all rules": P(temperature=0.8, seed=1, top_p=0.9, min_p=0.02, repetition_penalty=1.1, logit_bias=((5, 1.0), (7, -1.0)), min_tokens=500)}
SWEPT = ("greedy", "temperature", "top-p", "penalties")
CUTS = [TailShape(1024, 16), TailShape(2048, 16), TailShape(2048, 32), TailShape(4096, 32), TailShape(4096, 64), TailShape(8192, 64)]


class TailWorld:
    "B rows with logits [B, V], in the middle of their texts."
    def __init__(self, B, V, params, scale, pinned):
        rng, n = np.random.default_rng(0), 400
        self.st, self.sampler, self.ring = DecodeState(B, 1024, 16, "cuda"), SamplerState(B + 1, V, "cuda"), Ring(64, B, torch.device("cuda"), pinned=pinned)
        ids, own = rng.integers(0, V, (B, n)).astype(np.int32), [replace(params, seed=r, eos_ids=(V - 1, V - 2)) for r in range(B)]
        self.sampler.init_rows([RowInit(r, 0, own[r], ids[r], n // 2, 1024) for r in range(B)])
        self.st.history[:B, :n] = torch.from_numpy(ids).cuda()
        self.B, self.n, self.variant, self.rows = B, n, variant_of(own[0]), torch.arange(B, device="cuda")
        self.n_total, self.act = torch.full_like(self.rows, n), torch.ones_like(self.rows, dtype=torch.bool)
        self.logits = (torch.randn(B, V, generator=torch.Generator("cuda").manual_seed(0), device="cuda") * scale).bfloat16()
        self.reset()

    def reset(self):
        st, B = self.st, self.B
        st.token[:B], st.len[:B], st.limit[:B], st.quota[:B], st.status[:B] = 7, self.n - 1, 1024, 10 ** 6, 1

    def step(self, finish, *shape): return lambda: finish(self.st, self.sampler, self.ring, self.logits, self.rows, self.n_total, self.act, self.variant, *shape)


@torch.inference_mode()
def tail_row(V, B, kind, name, scale, sweep):
    "Microseconds of one tail, fused and by torch."
    row, tokens = {"V": V, "batch": B, "tail": kind, "logits": name}, []
    for key, finish in (("us_fused", finish_fused), ("us_torch", finish_step)):
        w = TailWorld(B, V, TAILS[kind], scale, pinned=finish is finish_fused)
        w.step(finish)()
        tokens.append(w.st.token[:B].clone())
        row[key] = round(time_step(w.step(finish), w, groups=5, replays=10), 2)
        if sweep and finish is finish_fused:
            row["us_by_cut"] = {f"{c.chunk}/{c.group}": round(time_step(w.step(finish, c), w, groups=5, replays=10), 2) for c in CUTS if -(-V // c.chunk) * (c.chunk // c.group) <= 16384}
    row["same_tokens"] = (tokens[0] == tokens[1]).float().mean().item()
    print(json.dumps(row), flush=True)
    return row


def tails(batches, sweep):
    "All tails; `over_greedy` is what a fused one costs more than the greedy tail of its batch."
    rows = []
    for V in (32768, 151936):
        print(V, "words, cut as", tail_shape(V), file=sys.stderr, flush=True)
        for B in batches:
            for kind in TAILS:
                for name, scale in (("flat", 1.0), ("peaked", 4.0)):
                    if kind == "greedy" and name == "peaked": continue
                    rows.append(tail_row(V, B, kind, name, scale, sweep and kind in SWEPT and name == "flat"))
            greedy = next(r["us_fused"] for r in rows if (r["V"], r["batch"], r["tail"]) == (V, B, "greedy"))
            for r in rows:
                if (r["V"], r["batch"]) == (V, B): r["over_greedy"] = round(r["us_fused"] - greedy, 2)
    for r in rows: print("{V:7d} {batch:4d} {tail:12s} {logits:7s} fused {us_fused:8.2f} us, torch {us_torch:9.2f}, over greedy {over_greedy:7.2f}, same tokens {same_tokens:.3f}".format(**r))
    return rows


def write_record(out, kind, rows, **more):
    "Write a table and the machine that it was measured on."
    env = {"gpu": torch.cuda.get_device_name(), "torch": torch.__version__, "cuda": torch.version.cuda, "triton": triton.__version__}
    Path(out).write_text(json.dumps({"kind": kind, "date": datetime.now(UTC).date().isoformat(), "environment": env} | more | {"rows": rows}, indent=1) + "\n")


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--models", nargs="+", default=["esme-214m", "qwen3-0.6b"], choices=list(SHAPES))
    ap.add_argument("--batches", nargs="+", type=int, default=[1, 8, 64, 256])
    ap.add_argument("--context", type=int, default=320)
    ap.add_argument("--parts", action="store_true")
    ap.add_argument("--tails", action="store_true", help="only what follows the head")
    ap.add_argument("--sweep", action="store_true", help="with --tails: other cuts of the vocabulary too")
    ap.add_argument("--out")
    a = ap.parse_args()
    out, rows = a.out or os.path.join(os.environ.get("OUT", "."), "tails_h200.json" if a.tails else "kernels_h200.json"), []
    if a.tails: rows = tails(a.batches, a.sweep)
    for name in [] if a.tails else a.models:
        models = build(name)
        rows += [measure(name, *models, B, a.context, a.parts) for B in a.batches]
    write_record(out, "tails" if a.tails else "kernels", rows)


if __name__ == "__main__": main()
