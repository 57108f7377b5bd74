"""The Triton kernels on a GPU: attention and prefill against the torch reference for every head size and type, replays at other lengths, the engine's texts.

    PYTHONPATH=.:tests python3 -m pytest -q -n 8 tests/gpu/test_kernels_gpu.py        (needs CUDA)
"""
import numpy as np
import pytest
import torch
from llminfer.core import CoreConfig, generate, make_core
from llminfer.cuda_graphs import GraphRunner
from llminfer.kernels import FusedProgram
from llminfer.loading import load_model, make_tiny, open_checkpoint
from llminfer.request import SamplingParams
from llminfer.runner import TorchProgram
from llminfer.splitkv import AttendShape, Places, attend, attend_prompt, prompt_tile, prompt_tiles, rotate_write
from support.arrays import tiny_prompts
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
    launch = core.runner.launch

    def watched(plan):
        torch.cuda.set_sync_debug_mode("error")
        try: return launch(plan)
        finally: torch.cuda.set_sync_debug_mode("default")
    if runner == "eager": core.runner.launch = watched
    assert generate(core, prompts, greedy) == generate(torch_core, prompts, greedy)
    assert core.scheduler.pool.n_held == 0
    if runner == "graphs": assert core.runner.graphs and not core.runner.failed

