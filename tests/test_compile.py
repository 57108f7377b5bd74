"""Every kernel of a decode step, a prompt and the sampling tails compiles for an H200, on a machine that has none.

The interpreter says that a kernel is right; only the compiler says that it is a program."""
import itertools
import os
import subprocess
import sys
from pathlib import Path

SHAPES = {"esme": (32768, 768, 2048, 12, 4, 64), "wide": (151936, 1024, 3072, 16, 8, 128)}


def compile_all() -> None:
    "Run steps whose launches are only compiled; print how many kernels there were."
    from support.offline_triton import compiled
    import numpy as np
    import torch
    from llminfer import adapters, guess_kernels, kernels, layers
    from llminfer.attention import PagedAttention
    from llminfer.draw import draw_places
    from llminfer.interfaces import RowInit, variant_of
    from llminfer.kv_codes import POOLS
    from llminfer.model import Dense, ModelConfig, Transformer, tensor_shapes
    from llminfer.request import SamplingParams
    from llminfer.runner import DecodeState, Ring, WideRing
    from llminfer.sampling import SamplerState
    def dense(weight: torch.Tensor, bias: torch.Tensor | None = None, name: str = "") -> Dense: return Dense(weight, bias, name)
    kernels.fused_available = lambda model, device: (True, "")
    layers.pdl_works = lambda device: True
    tails = [SamplingParams(temperature=0), SamplingParams(temperature=.8), SamplingParams(temperature=.8, top_p=.9, min_p=.1),
             SamplingParams(temperature=.8, top_k=50, top_p=.9, presence_penalty=.3, repetition_penalty=1.1, min_tokens=3, eos_ids=(1,), stop_ids=(1,))]
    for name, (V, D, F, H, G, E) in SHAPES.items():
        c = ModelConfig("qwen3", V, D, F, 2, H, G, E, rope_theta=1e6, qk_norm=True, tie_embeddings=True, max_position_embeddings=4096)
        model = Transformer.from_tensors(c, {k: torch.empty(s, dtype=torch.bfloat16) for k, s in tensor_shapes(c).items()}, torch.bfloat16, "cpu",
                                         linear=dense)
        for B in (1, 2, 8, 64, 256):
            st, kv = DecodeState(B, 1024, 16, "cpu"), POOLS["auto"](2, 65, 16, G, E, torch.bfloat16, "cpu")
            sampler, ring, rows = SamplerState(B + 1, V, "cpu"), Ring(8, B, torch.device("cpu")), torch.arange(B)
            p = layers.LayerProgram(model, PagedAttention(kv, H, windows=c.windows))
            zeros, act = torch.zeros(B, dtype=torch.int64), torch.ones(B, dtype=torch.bool)
            p.feed(st, rows)
            for distinct in (True, False): p.decode(st, zeros, rows, zeros + 5, act, 0, distinct)
            for params in tails:
                sampler.init_rows([RowInit(r, 0, params, np.arange(3, dtype=np.int32), 3, 1000) for r in range(B)])
                p.finish(st, sampler, ring, torch.zeros(B, V, dtype=torch.bfloat16), rows, zeros + 6, act, variant_of(params))
        p.prefill(st, torch.zeros(200, dtype=torch.int64), torch.arange(2), torch.arange(200) % 100, [0, 0], [100, 100])
        for B, D, params in itertools.product((1, 8), (2, 8), tails):
            st, sampler, ring = DecodeState(B, 1024, 16, "cpu"), SamplerState(B + 1, V, "cpu"), WideRing(8, B, torch.device("cpu"), draft=8)
            sampler.init_rows([RowInit(r, 0, params, np.arange(3, dtype=np.int32), 3, 1000) for r in range(B)])
            book, rows, v = guess_kernels.KernelLookup(B, 8), torch.arange(B), variant_of(params)
            fed = guess_kernels.guess_rows(st, book, rows, 1024, D)
            p.decode(st, fed.ids.view(-1), fed.owner, fed.places.view(-1), fed.live.view(-1), 0)
            tokens = draw_places(st, sampler, ring, torch.zeros(B * (D + 1), V, dtype=torch.bfloat16), fed.ids, fed.owner, fed.total.view(-1), fed.live.view(-1), v)
            for who in (book, None): guess_kernels.judge_rows(st, sampler, ring, rows, fed, tokens, who)
        for kind, B in itertools.product(("fp8", "int8"), (1, 64, 256)):
            st, zeros, act = DecodeState(B, 1024, 16, "cpu"), torch.zeros(B, dtype=torch.int64), torch.ones(B, dtype=torch.bool)
            p = layers.LayerProgram(model, PagedAttention(POOLS[kind](2, 65, 16, G, E, torch.bfloat16, "cpu"), H, windows=c.windows))
            for distinct in (True, False): p.decode(st, zeros, torch.arange(B), zeros + 5, act, 0, distinct)
            p.prefill(st, torch.zeros(200, dtype=torch.int64), torch.zeros(1, dtype=torch.int64), torch.arange(200), [0], [200])
    for T, (n, width, K) in itertools.product((8, 64, 200), ((3, 6144, 4096), (1, 4096, 12288), (2, 24576, 4096))):      # parts of Qwen3-8B
        new, cuts = lambda *s: torch.empty(s, dtype=torch.bfloat16), [(0, width)] if n == 1 else [(0, width // 2), (width // 2, width)]
        for S, r in ((8, 16), (3, 5), (2, 64)):
            for add in (True, False): adapters.own_share(new(T, width), new(T, n, S * r), new(n, S, r, K), new(S, r, width), cuts, torch.ones(T, dtype=torch.int64), add)
    kernels.add_norm(torch.empty(8, 4096), new(8, 4096), new(4096), new(8, 4096), 1e-6, more=new(8, 4096))
    kernels.silu_mul(new(8, 24576), new(8, 24576))
    kinds = {n for n, _ in compiled}
    assert all("cubin" in k.asm for k in compiled.values())
    print(len(compiled), "kernels of", len(kinds), "kinds")


def test_kernels_compile_for_an_h200():
    "In a process of its own: Triton decides at import what it is."
    root = Path(__file__).resolve().parents[1]
    env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"} | {"PYTHONPATH": f"{root}:{root / 'tests'}"}
    r = subprocess.run([sys.executable, "-c", "import test_compile; test_compile.compile_all()"], capture_output=True, text=True, cwd=root, env=env)
    assert r.returncode == 0, r.stderr[-3000:]
    n, kinds = int(r.stdout.split()[-5]), int(r.stdout.split()[-2])
    print(r.stdout[-200:])
    assert n > 50 and kinds > 12, r.stdout
