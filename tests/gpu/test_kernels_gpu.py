"""The Triton kernels on a GPU: attention and prefill against the torch reference for every head size and type, replays at other lengths,
the sampling tail against the torch sampler for whole vocabularies, the engine's texts.

    PYTHONPATH=.:tests python3 -m pytest -q -n 8 tests/gpu/test_kernels_gpu.py        (needs CUDA)
"""
import time
from dataclasses import replace
import numpy as np
import pytest
import torch
from llminfer.core import CoreConfig, generate, make_core
from llminfer.cuda_graphs import GraphRunner
from llminfer.draw import TailShape, finish_fused
from llminfer.kernels import FusedProgram
from llminfer.loading import load_model, make_tiny, open_checkpoint
from llminfer.parallel import OneShot
from llminfer.request import SamplingParams
from llminfer.runner import TorchProgram, finish_step
from llminfer.splitkv import AttendShape, Places, attend, attend_prompt, prompt_tile, prompt_tiles, rotate_write
from support.arrays import tiny_prompts
from support.draw_scenes import KINDS, Rows, clear
from support.gpu import forbid_waits
from support.kernel_scenes import Scene

torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
TOL = {torch.float32: 1e-4, torch.float16: 5e-3, torch.bfloat16: 4e-2}
MODELS = [(64, 12, 4, torch.bfloat16, 16), (128, 16, 8, torch.bfloat16, 16), (80, 4, 2, torch.float16, 16), (96, 6, 2, torch.bfloat16, 1), (256, 4, 1, torch.bfloat16, 16),
          (64, 12, 4, torch.float32, 3), (128, 32, 4, torch.float32, 16), (256, 8, 8, torch.float32, 16)]


def scenes(n, *args, **kw): return [Scene(*args, device="cuda", **kw) for _ in range(n)]


@torch.inference_mode()
@pytest.mark.parametrize("E, H, G, dtype, block", MODELS, ids=str)
def test_decode_attention(E, H, G, dtype, block):
    "The table's own launches for a small and a large batch and one with many splits; windows, dead rows, NaN wherever nobody lives."
    for rows, shape in ((2, None), (70, None), (3, AttendShape(H // G, max(16, H // G), 32, 4, 32, 4, 2))):
        a, b, c = scenes(3, rows, E, H, G, block, 100, dtype, 400, rows, qk_norm=rows != 3)
        for layer in range(2):
            q, k, v = b.torch_heads(b.qkv, b.at.positions)
            want = b.att.decode(layer, q, k, v, b.att.decode_meta(b.st.table[:rows], b.at.positions, b.live)).reshape(rows, -1)
            got = attend(a.att, layer, rotate_write(a.att, layer, a.qkv, a.weight, 1e-6, a.at), a.weight, 1e-6, a.at, a.count, shape=shape)
            once = attend(c.att, layer, c.qkv, c.weight, 1e-6, c.at, c.count, fresh=True, shape=shape)
            for out in (got, once):
                assert not out.isnan().any() and (out[~a.live] == 0).all()
                assert (out.float() - want.float()).abs().max() < TOL[dtype], (rows, layer)
            slots = b.st.table[b.at.rows, b.at.positions // block].long() * block + b.at.positions % block
            for x in (a, c):
                for pool, ref in ((x.kv.k, b.kv.k), (x.kv.v, b.kv.v)):
                    mine, theirs = (t[layer].reshape(-1, G * E)[slots].nan_to_num(9.0).float() for t in (pool, ref))
                    assert (mine - theirs).abs().max() < TOL[dtype]
                    others = torch.ones(len(pool[layer].reshape(-1, G * E)), dtype=torch.bool, device="cuda").index_fill(0, slots[b.live], False)
                    assert torch.equal(pool[layer].reshape(-1, G * E)[others].nan_to_num(9.0), ref[layer].reshape(-1, G * E)[others].nan_to_num(9.0))
        assert a.count.abs().max() == 0


def same_codes(x, ref, layer):
    "Rows whose new token has the reference's codes: most; the codes of the others are neighbours, since a key may round to the other side."
    slots, same = ref.st.table[ref.at.rows, ref.at.positions // 16].long() * 16 + ref.at.positions % 16, ~ref.live
    steps = []
    for mine, theirs in zip(x.kv.pages(layer)[:2], ref.kv.pages(layer)[:2]):
        places = [t.view(torch.int8).flatten(0, 1)[slots].int() for t in (mine, theirs)]
        if mine.dtype != torch.int8: places = [torch.where(p < 0, -128 - p, p) for p in places]      # fp8 is a sign and a magnitude
        steps.append((places[0] - places[1]).abs().flatten(1))
    steps = torch.cat(steps, 1)[ref.live]
    assert steps.max() <= 1 and (steps > 0).float().mean() < 0.01
    same[ref.live] = (steps == 0).all(1)
    assert same.float().mean() > 0.5
    return same


@torch.inference_mode()
@pytest.mark.parametrize("kind", ["fp8", "int8"])
@pytest.mark.parametrize("E, H, G, dtype", [(64, 12, 4, torch.bfloat16), (128, 16, 8, torch.bfloat16), (96, 6, 2, torch.float16), (128, 8, 2, torch.float32)], ids=str)
def test_coded_pages(E, H, G, dtype, kind):
    "Decode and a prompt over 8-bit pages against the reference that decodes them; where a code fell to the other side of a step, that much."
    columns = AttendShape(H // G, 8, 32, 1, 64, 1, 5, heads=True)      # what the table takes for a large batch
    for rows, shape in ((2, None), (70, None), *[(70, replace(columns, S=s)) for s in (1, 2) if dtype != torch.float32]):
        a, b, c = scenes(3, rows, E, H, G, 16, 100, dtype, 400, rows, kv_dtype=kind)
        for layer in range(2):
            q, k, v = b.torch_heads(b.qkv, b.at.positions)
            want = b.att.decode(layer, q, k, v, b.att.decode_meta(b.st.table[:rows], b.at.positions, b.live)).reshape(rows, -1)
            got = attend(a.att, layer, rotate_write(a.att, layer, a.qkv, a.weight, 1e-6, a.at), a.weight, 1e-6, a.at, a.count, shape=shape)
            once = attend(c.att, layer, c.qkv, c.weight, 1e-6, c.at, c.count, fresh=True, shape=shape)
            for x, out in ((a, got), (c, once)):
                off, same = (out.float() - want.float()).abs(), same_codes(x, b, layer)
                assert not out.isnan().any() and off[same].max() < 5e-2 and off.max() < 0.3 and off.flatten().quantile(0.97) < TOL[dtype]
        n, at = min(int(a.lens[0]), 300), torch.arange(rows, device="cuda")
        if a.live[0] and n > 40:                                                  # a prompt's second chunk over the same pages
            tiles = torch.from_numpy(prompt_tiles([n - 40], [40], prompt_tile(E, dtype.itemsize))).cuda()
            q = a.randn(40, H, E)
            held = [torch.empty(40, G * E, dtype=dtype, device="cuda") for _ in range(2)]
            slots = (a.st.table[0, torch.arange(n - 40, n, device="cuda") // 16] * 16 + torch.arange(n - 40, n, device="cuda") % 16).long()
            for x, first in zip(held, (0, a.kv.n_slots)): a.kv.read(0, slots + first, x)
            want = b.att.prefill(0, q, *(x.view(40, G, E) for x in held), b.att.prefill_meta(b.st.table[:1], [n - 40], [40])).reshape(40, -1)
            assert (attend_prompt(a.att, 0, q, tiles, at[:1], a.st).float() - want.float()).abs().max() < 5e-2


@torch.inference_mode()
@pytest.mark.parametrize("E, H, G, dtype, block", MODELS, ids=str)
def test_prefill_attention(E, H, G, dtype, block):
    rng = np.random.default_rng(0)
    starts, lengths = [0, 33, 150, 0], [1, 300, 77, 129]
    width, T = -(-400 // block), sum(lengths)
    a, b = scenes(2, 1, E, H, G, block, 100, dtype, 400, 4)
    table = torch.from_numpy(rng.permutation(4 * width).reshape(4, width).astype(np.int32) + 1).cuda()
    for s in (a, b):
        s.st.table[:4, :width] = table
        s.kv.data.copy_(torch.randn(s.kv.data.shape, generator=torch.Generator().manual_seed(0)).to(dtype))
        s.kv.data[:, s.kv.zero_slot] = 0
    pos = torch.cat([torch.arange(s, s + n) for s, n in zip(starts, lengths)]).cuda()
    owner, rows = torch.from_numpy(np.repeat(np.arange(4), lengths)).cuda(), torch.arange(4, device="cuda")
    qkv, at = a.randn(T, (H + 2 * G) * E), Places(a.st, owner, pos, torch.ones(T, dtype=torch.bool, device="cuda"), a.at.cos, a.at.sin)
    tiles = torch.from_numpy(prompt_tiles(starts, lengths, prompt_tile(E, dtype.itemsize))).cuda()
    for layer in range(2):
        q, k, v = b.torch_heads(qkv, pos)
        want = b.att.prefill(layer, q, k, v, b.att.prefill_meta(table, starts, lengths)).reshape(T, -1)
        got = attend_prompt(a.att, layer, rotate_write(a.att, layer, qkv, a.weight, 1e-6, at), tiles, rows, a.st)
        assert (got.float() - want.float()).abs().max() < TOL[dtype]


@torch.inference_mode()
def test_a_captured_launch_is_right_at_other_lengths():
    "B23: captured with short rows; 200 replays with random lengths, rows and dead places."
    s = Scene(0, 64, 12, 4, 16, dtype=torch.float16, most=600, rows=8, device="cuda")
    s.st.table[:8] = torch.randperm(8 * s.st.table.shape[1], device="cuda").view(8, -1).int() + 1
    s.kv.data.normal_()
    s.kv.data[:, s.kv.zero_slot] = 0
    s.at.positions.fill_(1)
    step = lambda: attend(s.att, 0, rotate_write(s.att, 0, s.qkv, s.weight, 1e-6, s.at), s.weight, 1e-6, s.at, s.count)
    step(); torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph): out = step()
    worst, g = 0.0, torch.Generator("cuda").manual_seed(0)
    for i in range(200):
        s.at.positions.copy_(torch.randint(0, (3, 50, 600)[i % 3], (8,), generator=g, device="cuda"))
        s.at.rows.copy_(torch.randperm(8, generator=g, device="cuda"))
        s.at.act.copy_(torch.rand(8, generator=g, device="cuda") < 0.7)
        s.qkv.normal_()
        graph.replay()
        q, k, v = s.torch_heads(s.qkv, s.at.positions)
        want = s.att.decode(0, q, k, v, s.att.decode_meta(s.st.table[s.at.rows], s.at.positions, s.at.act)).reshape(8, -1)
        worst = max(worst, (out.float() - want.float()).abs().max().item())
    print("worst", worst)
    assert worst < 2e-2 and s.count.abs().max() == 0


def logits_of(R, V, seed, scale, dtype): return (torch.randn(R, V, generator=torch.Generator("cuda").manual_seed(seed), device="cuda") * scale).to(dtype)


@torch.inference_mode()
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("V", [300, 32768, 49152, 151936])
@pytest.mark.parametrize("kind", KINDS)
def test_a_sampled_step_is_the_torch_step(kind, V, dtype):
    "24 rows, flat and peaked logits: every field that a step changes, log probabilities too, wherever no rounding decides; few rows are such."
    unsure = 0
    for seed, scale in enumerate((1.0, 4.0)):
        a, b = (Rows(KINDS[kind] * 6, V, seed, "cuda", pinned=pinned) for pinned in (False, True))
        x, (rows, n, act) = logits_of(24, V, seed, scale, dtype), a.args()
        rows, n, act = (torch.cat((t, e)) for t, e in zip((rows, n, act), (torch.tensor([24], device="cuda"), n[:1], ~act[:1])))   # a padding place
        x = torch.cat((x, torch.full_like(x[:1], float("nan"))))
        sure = clear(a, x[:24], rows[:24], n[:24]).cuda()
        before, raw = b.st.ints[:, 24].clone(), x.clone()
        finish_step(a.st, a.sampler, a.ring, x, rows, n, act, a.variant)
        torch.cuda.set_sync_debug_mode("error")
        try: finish_fused(b.st, b.sampler, b.ring, x, rows, n, act, b.variant)
        finally: torch.cuda.set_sync_debug_mode("default")
        torch.cuda.synchronize()
        assert torch.equal(x.nan_to_num(), raw.nan_to_num()) and torch.equal(b.st.ints[:, 24], before)
        assert torch.equal(a.st.token[:24][sure], b.st.token[:24][sure]), (seed, a.st.token, b.st.token)
        if sure.all():
            for p, q in zip(a.fields(), b.fields()):
                if p.shape[:2] == (5, 25): p, q = p[:, :24].cpu(), q[:, :24].cpu()     # the ring; the padding row's word is nobody's
                assert torch.allclose(p.double(), q.double(), atol=1e-4)
        unsure += int((~sure).sum())
    assert unsure <= 4


@torch.inference_mode()
def test_any_cut_of_the_vocabulary_draws_the_same():
    for kind in ("top-k top-p", "top-p", "mixed", "rules"):
        tokens = []
        for shape in (None, TailShape(1024, 32), TailShape(2048, 64), TailShape(8192, 64)):
            w = Rows(KINDS[kind] * 16, 49152, 0, "cuda")
            finish_fused(w.st, w.sampler, w.ring, logits_of(64, 49152, 1, 2.0, torch.bfloat16), *w.args(), w.variant, shape)
            tokens.append(w.st.token[:64].clone())
        assert all(torch.equal(t, tokens[0]) for t in tokens), kind


@torch.inference_mode()
def test_large_top_k_and_a_tiny_nucleus():
    "top_k up to the vocabulary, with and without top-p; a flat nucleus that refuses many winners; all logits equal."
    V = 151936
    params = [SamplingParams(temperature=1.3, seed=s, top_k=k, top_p=p) for s, (k, p) in enumerate([(1000, 1), (1000, 0.5), (5000, 0.9), (100000, 1), (150000, 0.3), (0, 0.001), (0, 1e-5), (V - 1, 1)])]
    for seed, scale in enumerate((0.3, 3.0, 0.0)):
        a, b = (Rows(params, V, seed, "cuda") for _ in range(2))
        x, (rows, n, act) = logits_of(8, V, seed, scale, torch.float32), a.args()
        sure = clear(a, x, rows, n).cuda()
        finish_step(a.st, a.sampler, a.ring, x, rows, n, act, a.variant)
        finish_fused(b.st, b.sampler, b.ring, x, rows, n, act, b.variant)
        assert torch.equal(a.st.token[:8][sure], b.st.token[:8][sure]) and sure.sum() >= 6, (seed, sure, a.st.token, b.st.token)


@torch.inference_mode()
def test_a_captured_tail_is_right_with_other_rows():
    "One graph; 60 replays with new logits, places, dead rows and positions, against the torch tail step by step."
    params, V = KINDS["mixed"] * 2 + KINDS["rules"] * 2, 32768
    a, b = (Rows(params, V, 0, "cuda", max_len=200) for _ in range(2))
    x, rows, n, act = logits_of(8, V, 0, 1.0, torch.bfloat16), torch.full((8,), 16, device="cuda"), torch.ones(8, dtype=torch.int64, device="cuda"), torch.zeros(8, dtype=torch.bool, device="cuda")
    step = lambda: finish_fused(b.st, b.sampler, b.ring, x, rows, n, act, b.variant)
    step(); torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph): step()
    torch.cuda.synchronize()
    b.st.step.fill_(int(a.st.step))
    for i in range(60):
        g = torch.Generator("cuda").manual_seed(i)
        x.copy_(logits_of(8, V, i, 1.0 + i % 4, torch.bfloat16))
        rows.copy_(torch.randperm(16, generator=g, device="cuda")[:8])
        act.copy_(a.st.live(rows) & (torch.rand(8, generator=g, device="cuda") < 0.8))
        n.copy_(a.st.len[rows] + 1)
        sure = (clear(a, x, rows, n).cuda() | ~act).all()
        finish_step(a.st, a.sampler, a.ring, x, rows, n, act, a.variant)
        graph.replay()
        torch.cuda.synchronize()
        if sure: assert all(torch.equal(p, q) for p, q in zip(a.fields()[:3], b.fields()[:3])) and torch.equal(a.sampler.counts.data, b.sampler.counts.data), i
        else:
            for p, q in zip((a.st.ints, a.st.history, a.sampler.counts.data), (b.st.ints, b.st.history, b.sampler.counts.data)): q.copy_(p)


EVERYTHING = [SamplingParams(temperature=0, max_tokens=20), SamplingParams(temperature=0.9, top_k=40, top_p=0.9, seed=3, max_tokens=20, stop_ids=(5, 7), eos_ids=(5,)),
    SamplingParams(temperature=1.0, min_p=0.02, seed=4, max_tokens=20, repetition_penalty=1.2, presence_penalty=0.5, logprobs=3),
    SamplingParams(temperature=0.7, top_p=0.8, seed=5, max_tokens=20, no_repeat_ngram_size=2, logit_bias=((8, 2.0),), min_tokens=4),
    SamplingParams(temperature=0, max_tokens=20, prompt_logprobs=2, logprobs=0)]


@pytest.mark.parametrize("family", ["llama", "qwen3"])
@pytest.mark.parametrize("runner", ["eager", "graphs"])
def test_engine_texts(tmp_path, family, runner):
    "fp32: the texts of the torch program, words read from the host's own memory, without a wait in a launch."
    model = load_model(open_checkpoint(str(make_tiny(tmp_path, family, 3, head_dim=64))), torch.float32, "cuda")
    prompts, greedy = tiny_prompts(512)[:5], [SamplingParams(temperature=0, max_tokens=24, eos_ids=(5,))] * 5
    cfg = CoreConfig(n_blocks=60, block_size=4, max_num_seqs=4, max_model_len=128, window_steps=4, prefill_chunk=20, max_in_flight=2)
    kw = dict(runner=GraphRunner) if runner == "graphs" else {}
    torch_core, core = make_core(model, cfg, program=TorchProgram), make_core(model, cfg, program=FusedProgram, **kw)
    assert core.runner.ring.words.is_pinned()
    for params in (greedy, EVERYTHING, greedy, EVERYTHING):
        assert generate(core, prompts, params) == generate(torch_core, prompts, params)
    if runner == "eager": forbid_waits(core)
    assert generate(core, prompts, greedy) == generate(torch_core, prompts, greedy)
    assert core.scheduler.pool.n_held == 0
    if runner == "graphs": assert core.runner.graphs and not core.runner.failed
    info = core.runner.program.info()
    sampled = [SamplingParams(temperature=0.9, top_k=40, top_p=0.9, seed=s, max_tokens=20, presence_penalty=0.3, eos_ids=(5,)) for s in range(5)]
    assert info["torch_tail_steps"] > 0 and generate(core, prompts, sampled) == generate(torch_core, prompts, sampled) and core.runner.program.info() == info


@torch.inference_mode()
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_ranks_that_are_streams_of_one_gpu_sum_and_gather(dtype):
    "200 sums of changing sizes, some parts in the blank; 200 more replayed from a graph of each rank; a gather; a rank that never comes."
    boxes = [torch.zeros(4 * OneShot.most, dtype=torch.int64, device="cuda") for _ in range(2)]
    ranks, streams = [OneShot(boxes, r, True) for r in range(2)], [torch.cuda.Stream() for _ in range(2)]
    def both(do):
        torch.cuda.synchronize()
        out = []
        for r, s in zip(ranks, streams):
            with torch.cuda.stream(s): out.append(do(r))
        torch.cuda.synchronize()
        return out
    sizes, ids = (1, 4096, 40000, 513, 65536), torch.tensor([1 << 40, -7], device="cuda")
    for stop in (1, 0):                    # nobody waits while kernels are loaded, which waits for all streams
        for r in ranks: r.stop[0] = stop
        for x in (torch.ones(n, device="cuda", dtype=dtype) for n in sizes): both(lambda r: (r.sum(x.clone()), r.sum(r.blank(x).copy_(x)), r.gather(ids + r.rank)))
    for i in range(200):
        n = sizes[i % 5]
        xs = [torch.randn(n, device="cuda").to(dtype) for _ in range(2)]
        want = (xs[0].float() + xs[1].float()).to(dtype)
        got = both(lambda r: r.sum(r.blank(xs[1]).copy_(xs[1]) if r.rank and i % 3 else xs[r.rank].clone()))
        assert torch.equal(got[0], want) and torch.equal(got[1], want) and not ranks[1].zeros.any(), i
    x, graphs = torch.ones(1, 4096, device="cuda", dtype=dtype), [torch.cuda.CUDAGraph() for _ in range(2)]
    outs = []
    for r, g in zip(ranks, graphs):
        with torch.cuda.graph(g):
            y = x
            for _ in range(100): y = r.sum(r.blank(y).copy_(y) if r.rank else y.clone()) * 0.5
        outs.append(y)
    t = time.perf_counter()
    for _ in range(2): both(lambda r: graphs[r.rank].replay())
    print(f"{(time.perf_counter() - t) / 200 * 1e6:.1f} us for a sum, a copy and a product, two ranks on one GPU")
    assert all(torch.equal(o, x) for o in outs)
    assert all(torch.equal(g, torch.stack((ids, ids + 1))) for g in both(lambda r: r.gather(ids + r.rank)))
    ranks[0].stop[0] = 1
    ranks[0].sum(x.clone())
    torch.cuda.synchronize()
