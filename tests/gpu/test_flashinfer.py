"""FlashInfer's attention over our pages: B23 of cases.md (plans and replays in step), prefill and decode against `PagedAttention`, the engine's texts through the gate.

    PYTHONPATH=.:tests:/tmp/site python3 -m pytest -q -n 6 tests/gpu/test_flashinfer.py        (needs CUDA, flashinfer-python 0.6.14, nvcc and ninja)

Each module of FlashInfer's is compiled when a test first needs it, 17 to 45 s; tests in several processes compile side by side.
"""
import numpy as np
import pytest
import torch
from llminfer.assembly import build_core, choose_parts
from llminfer.attention import KVPool, PagedAttention
from llminfer.benchmark import judge_low_precision, reference_errors
from llminfer.config import ConfigError, EngineConfig
from llminfer.core import CoreConfig, generate
from llminfer.flashinfer_adapter import FlashInferRunner, Planner, Staging, load_wrappers
from llminfer.loading import load_model, make_tiny, open_checkpoint
from llminfer.request import SamplingParams
from llminfer.runner import DecodeState
from llminfer.tokenization import load_tokenizer
from support.gpu import forbid_waits
from support.hf import hf_from_checkpoint
from support.prompts import PROMPTS

TOL = {torch.float16: 2e-2, torch.bfloat16: 8e-2}


class World:
    "Rows with pages in random order; every slot holds random keys, the null block NaN."
    def __init__(self, H, G, E, dtype, rows=8, block=16, most=512, windows=(None,), seed=0):
        g, rng, width = torch.Generator("cuda").manual_seed(seed), np.random.default_rng(seed), -(-most // block)
        self.rng, self.g, self.most, self.rows, self.block = rng, g, most, rows, block
        self.kv = KVPool(len(windows), rows * width + 1, block, G, E, dtype, "cuda")
        self.kv.data.normal_(generator=g)
        self.kv.data[:, self.kv.zero_slot] = 0
        for pool in (*self.kv.k, *self.kv.v): pool[0] = torch.nan
        self.att = PagedAttention(self.kv, H, windows=windows)
        self.st = DecodeState(rows, most, block, "cuda")
        self.st.table[:rows] = torch.from_numpy(rng.permutation(rows * width).reshape(rows, width).astype(np.int32) + 1)
        self.planner = Planner(self.att, dtype, load_wrappers())

    def randn(self, *shape): return torch.randn(*shape, generator=self.g, device="cuda").to(self.kv.dtype)

    def stored(self, layer, rows, at):
        "k and v that lie at these positions."
        t = torch.from_numpy(np.asarray(at)).cuda()
        block = self.st.table[torch.from_numpy(np.asarray(rows)).cuda(), t // self.block].long()
        return self.kv.k[layer][block, t % self.block], self.kv.v[layer][block, t % self.block]

    def decode(self, layer, q, rows, keys):
        "The reference: `PagedAttention` writes what is there already."
        last = np.asarray(keys) - 1
        meta = self.att.decode_meta(self.st.table[torch.from_numpy(np.asarray(rows)).cuda()], torch.from_numpy(last).cuda(), torch.ones(len(last), dtype=torch.bool, device="cuda"))
        return self.att.decode(layer, q, *self.stored(layer, rows, last), meta)


@torch.inference_mode()
@pytest.mark.parametrize("H, G, E", [(12, 4, 64), (32, 8, 128)], ids=["ordinary cores", "matrix units"])
def test_b23_plans_and_replays_stay_in_step(H, G, E):
    "Captured at batch 8 on empty rows; replayed with lengths 1, 17, 300, 33 and 4 padding places, then 200 random replans back to back, with the device far behind."
    w = World(H, G, E, torch.float16)
    q, out = w.randn(8, H, E), w.randn(8, H, E)
    w.planner.plan_step(w.st, np.empty(0, np.int64), np.empty(0, np.int64), 8)
    for _ in range(2): w.planner.decode(0, q)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph): out.copy_(w.planner.decode(0, q))
    cases = [(np.arange(4), np.array([1, 17, 300, 33]))]
    for i in range(200):
        n = int(w.rng.integers(1, 9))
        cases.append((w.rng.permutation(8)[:n], w.rng.integers(1, w.most + 1, n)))
    for lap in (w.planner.wrappers.lap, 3):                   # 3: the host must wait for its own buffers, and does
        w.planner.wrappers.staging, got = Staging(lap, 1 << 20, torch.device("cuda")), []
        spin = torch.randn(8192, 8192, device="cuda")
        for _ in range(4): spin = spin @ spin.mul(1e-4)        # so that no replay runs while plans are written
        for rows, keys in cases:
            w.planner.plan_step(w.st, rows, keys, 8)
            graph.replay()
            got.append(out.clone())
        worst = max((g[:len(keys)].float() - w.decode(0, q[:len(keys)], rows, keys).float()).abs().max().item() for g, (rows, keys) in zip(got, cases))
        assert worst <= 2e-2 and not any(g[:len(keys)].isnan().any() for g, (_, keys) in zip(got, cases)), worst
        print(f"lap {lap}: worst difference {worst:.4f}, waits {w.planner.wrappers.staging.waits} of {len(cases)}, {w.planner.seconds / w.planner.plans * 1e6:.0f} us a plan")
    assert w.planner.wrappers.staging.waits > 0


@torch.inference_mode()
@pytest.mark.parametrize("H, G, E, dtype, windows", [(12, 4, 64, torch.bfloat16, (None, None)), (16, 8, 128, torch.float16, (40, 70))], ids=str)
def test_prefill_and_decode(H, G, E, dtype, windows):
    "Ragged chunks with and without a past, two layers, one plan for both or (windows) one each; then a decode step."
    w = World(H, G, E, dtype, windows=windows)
    starts, lengths, rows = [0, 33, 150, 0], [1, 300, 77, 129], np.array([5, 0, 3, 2])
    on_device = torch.from_numpy(rows).cuda()
    q = w.randn(sum(lengths), H, E)
    w.planner.plan_prompts(w.st, on_device, starts, lengths)
    meta = w.att.prefill_meta(w.st.table[on_device], starts, lengths)
    at, owner = np.concatenate([np.arange(s, s + n) for s, n in zip(starts, lengths)]), np.repeat(rows, lengths)
    for layer in range(2):
        got = w.planner.prompts(layer, q)
        want = w.att.prefill(layer, q, *w.stored(layer, owner, at), meta)
        assert (got.float() - want.float()).abs().max() <= TOL[dtype], layer
    keys = np.array(starts) + lengths
    w.planner.plan_step(w.st, rows, keys, 6)
    for layer in range(2):
        got = w.planner.decode(layer, q[:6])[:4]
        assert (got.float() - w.decode(layer, q[:4], rows, keys).float()).abs().max() <= TOL[dtype], layer


LIMITS = CoreConfig(n_blocks=600, max_num_seqs=24, max_model_len=1024, max_num_batched_tokens=2048, window_steps=8, max_in_flight=2, follow=True, by_time=True)


@torch.inference_mode()
@pytest.mark.parametrize("graphs", [True, False], ids=["captured", "eager"])
def test_the_engine_through_the_gate(graphs):
    "The demo model in bf16 by the setting, short prompts and one of 900 tokens, launches that never wait for the device; info says what ran and what it cost."
    ckpt = open_checkpoint("demo")
    tok = load_tokenizer(ckpt.tokenizer)
    prompts = [tok.encode(p) for p in PROMPTS[::4][:24]]
    prompts[5] = (sum(prompts, []) * 4)[:900]
    oracle, model, hf = load_model(ckpt, torch.float64, "cuda"), load_model(ckpt, torch.bfloat16, "cuda"), hf_from_checkpoint(ckpt, torch.bfloat16, "cuda", own_reader=True)
    cfg = EngineConfig(attention_backend="flashinfer", compile_cudagraphs=graphs)
    assert choose_parts(cfg, model).reasons["attention"].startswith("flashinfer (flashinfer 0.6")
    core = build_core(cfg, model, LIMITS)
    mixed = [SamplingParams(temperature=0, max_tokens=32) if i % 3 else SamplingParams(temperature=0.9, top_k=40, seed=i, max_tokens=20, presence_penalty=0.3, stop_ids=(198,)) for i in range(24)]
    for _ in range(2): generate(core, prompts, mixed)
    forbid_waits(core)
    out = generate(core, prompts, SamplingParams(temperature=0, max_tokens=32))
    low, exact = (lambda ids: hf(torch.tensor([list(ids)], device="cuda")).logits[0]), (lambda ids: oracle.logits(torch.tensor(list(ids), device="cuda")))
    ref = reference_errors(exact, low, list(zip(prompts, out)))
    verdict = judge_low_precision(exact, ref, prompts, out, lambda ids: model.logits(torch.tensor(list(ids), device="cuda")))
    print(core.runner.info(), verdict.status, f"worst gap {verdict.worst_gap:.3f} of {2 * ref.e:.3f}, not best {verdict.n_not_best / verdict.n_tokens:.3%} of {ref.not_best:.3%}")
    assert verdict.status in ("exact", "explained"), verdict
    assert isinstance(core.runner, FlashInferRunner) and bool(core.runner.graphs) == graphs and core.scheduler.pool.n_held == 0


@pytest.mark.parametrize("dtype, head_dim, words", [(torch.float32, 64, "not in torch.float32"), (torch.bfloat16, 80, "not for 80")])
def test_refusals(tmp_path, dtype, head_dim, words):
    model = load_model(open_checkpoint(str(make_tiny(tmp_path, "llama", 0, head_dim=head_dim))), dtype, "cuda")
    with pytest.raises(ConfigError, match=words): choose_parts(EngineConfig(attention_backend="flashinfer"), model)
    assert choose_parts(EngineConfig(), model).reasons["attention"] == "triton (no plan on the host)"


def test_the_wrappers_are_as_the_adapter_takes_them():
    "The attribute behind which 0.6.14 keeps its pinned buffer; another version that renames it fails here and not in a text."
    decode, prefill = load_wrappers()
    work, ints = torch.zeros(128 << 20, dtype=torch.uint8, device="cuda"), [torch.zeros(n, dtype=torch.int32, device="cuda") for n in (3, 8, 2)]
    for w in (decode(work, *ints, "NHD", False), prefill(work, "NHD", backend="fa2")):
        assert w._pin_memory_int_workspace_buffer.is_pinned() and w._int_workspace_buffer.is_cuda
