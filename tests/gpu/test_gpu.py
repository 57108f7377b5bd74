"""The engine on a GPU: the same texts as in fp64, low precision explained, launches that never wait, seeds that give the same text as on a CPU.

    PYTHONPATH=.:tests python3 -m pytest -q tests/gpu        (needs CUDA; `make test` does not collect this folder)
"""
import json
import os
import time
from pathlib import Path
import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from llminfer import assembly
from llminfer.benchmark import judge_greedy, judge_low_precision, logit_difference, reference_errors
from llminfer.assembly import build_core
from llminfer.config import EngineConfig
from llminfer.core import CoreConfig, generate, make_core
from llminfer.cuda_graphs import CudaCapture, GraphRunner
from llminfer.kernels import FusedProgram
from llminfer.layers import LayerProgram
from llminfer.runner import DecodeState, Ring, TorchProgram, TorchRunner
from llminfer.splitkv import stamp
from llminfer.tracing import inject
from llminfer.loading import load_model, make_tiny, open_checkpoint
from llminfer.model import ForcedModel
from llminfer.request import SamplingParams
from llminfer.tokenization import load_tokenizer
from support.arrays import core_for, pairwise, run, tiny_prompts
from support.gpu import forbid_waits
from support.hf import hf_from_checkpoint
from support.prompts import PROMPTS

torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
EVERYTHING = [SamplingParams(temperature=0, max_tokens=20), SamplingParams(temperature=0.9, top_k=40, top_p=0.9, seed=3, max_tokens=20, stop_ids=(5, 7), eos_ids=(5,)),
    SamplingParams(temperature=1.0, min_p=0.02, seed=4, max_tokens=20, repetition_penalty=1.2, presence_penalty=0.5, frequency_penalty=0.2, logprobs=3),
    SamplingParams(temperature=0.7, top_p=0.8, seed=5, max_tokens=20, no_repeat_ngram_size=2, bad_words_ids=((9,), (3, 4)), logit_bias=((8, 2.0),), min_tokens=4),
    SamplingParams(temperature=0, max_tokens=20, prompt_logprobs=2, logprobs=0)]


def logits_of(model, device="cuda"):
    return lambda ids: model.logits(torch.tensor(list(ids), device=device))


@pytest.fixture(scope="module")
def demo():
    ckpt = open_checkpoint("demo")
    tok = load_tokenizer(ckpt.tokenizer)
    return ckpt, [tok.encode(p) for p in PROMPTS[::4][:24]], load_model(ckpt, torch.float64, "cuda")


@pytest.fixture(scope="module", params=["llama", "qwen3"])
def tiny(request, tmp_path_factory):
    return open_checkpoint(str(make_tiny(tmp_path_factory.mktemp(request.param), request.param, 3)))


PARTS = {"torch": {}, "torch in graphs": {"runner": GraphRunner}, "kernels": {"program": FusedProgram}, "kernels in graphs": {"runner": GraphRunner, "program": FusedProgram},
         "layers": {"program": LayerProgram}, "layers in graphs": {"runner": GraphRunner, "program": LayerProgram}}


@torch.inference_mode()
@pytest.mark.parametrize("parts", PARTS)
@pytest.mark.parametrize("row", [0, 2, 3, 5])
def test_fp32_writes_what_fp64_writes(demo, row, parts):
    ckpt, prompts, oracle = demo
    model, row = load_model(ckpt, torch.float32, "cuda"), pairwise()[row]
    out = run(core_for(model, row, prompts, 32, **PARTS[parts]), row, prompts, 32, check=False)
    tol = 4 * logit_difference(logits_of(oracle), logits_of(model), [p + o for p, o in zip(prompts[:4], out)])
    verdict = judge_greedy(logits_of(oracle), prompts, out, tol)
    print(verdict.status, verdict.n_tokens, f"tolerance {tol:.1e}", len(verdict.explained), "explained")
    assert verdict.status in ("exact", "explained") and tol < 1e-2, verdict


@torch.inference_mode()
@pytest.mark.parametrize("parts", PARTS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision_is_explained_by_transformers(demo, dtype, parts):
    ckpt, prompts, oracle = demo
    model, hf = load_model(ckpt, dtype, "cuda"), hf_from_checkpoint(ckpt, dtype, "cuda", own_reader=True)
    cfg = CoreConfig(n_blocks=400, max_num_seqs=24, max_model_len=256, window_steps=8, max_in_flight=2, follow=True, by_time=True)
    core = make_core(model, cfg, **PARTS[parts])
    for _ in range(2): out = generate(core, prompts, SamplingParams(temperature=0, max_tokens=32))   # the second time from graphs
    ref = reference_errors(logits_of(oracle), lambda ids: hf(torch.tensor([list(ids)], device="cuda")).logits[0], list(zip(prompts, out)))
    verdict = judge_low_precision(logits_of(oracle), ref, prompts, out, logits_of(model))
    print(ref, reference_errors(logits_of(oracle), logits_of(model), list(zip(prompts, out))))
    print(dtype, verdict.status, f"e {ref.e:.3f}, reference not best {ref.not_best:.3%}, ours {verdict.n_not_best / verdict.n_tokens:.3%}, worst gap {verdict.worst_gap:.3f}")
    assert verdict.status in ("exact", "explained"), verdict


@pytest.mark.parametrize("parts", PARTS)
def test_launches_never_wait_for_the_device(demo, parts):
    model = load_model(demo[0], torch.bfloat16, "cuda")
    cfg = CoreConfig(n_blocks=60, block_size=4, max_num_seqs=4, max_model_len=128, window_steps=4, prefill_chunk=9, max_in_flight=2)
    core, prompts = make_core(model, cfg, **PARTS[parts]), tiny_prompts(512)
    generate(core, prompts[:5], EVERYTHING)                       # tables that exist only when used are allocated here
    forbid_waits(core)
    generate(core, prompts[3:], EVERYTHING)
    core.scheduler.pool.check()
    assert core.scheduler.pool.n_held == 0


@pytest.mark.parametrize("K, flight", [(1, 1), (4, 2), (8, 2)])
def test_every_setting_gives_the_text_of_a_cpu(tiny, K, flight):
    "fp64 on both devices, eager and captured: greedy and sampled rows, penalties, bans, min_tokens, log probabilities."
    prompts, texts = tiny_prompts(512)[:5], []
    cfg = CoreConfig(n_blocks=60, block_size=4, max_num_seqs=4, max_model_len=128, window_steps=K, max_in_flight=flight)
    for device, runner in (("cpu", TorchRunner), ("cuda", TorchRunner), ("cuda", GraphRunner)):
        core = make_core(load_model(tiny, torch.float64, device), cfg, runner=runner)
        texts += [generate(core, prompts, EVERYTHING) for _ in range(3)]
    assert all(t == texts[0] for t in texts)
    assert sum(g.uses for g in core.runner.graphs.values()) > 40


@pytest.mark.parametrize("edge", [1, 2, 15, 16, 17, 24, 25, 32, 33, 36])
def test_graphs_around_bucket_edges(tiny, edge):
    "The largest batch is `edge`; as requests end, every smaller size is padded into some graph."
    cfg = CoreConfig(n_blocks=400, block_size=4, max_num_seqs=36, max_model_len=64, window_steps=4, max_in_flight=2, prefix_cache=False)
    model = load_model(tiny, torch.float64, "cuda")
    prompts = [np.random.default_rng(i).integers(0, 512, 3 + i % 9).tolist() for i in range(edge)]
    params = [SamplingParams(temperature=0, max_tokens=3 + (5 * i) % 23) for i in range(edge)]
    core = make_core(model, cfg, runner=GraphRunner)
    expected = generate(make_core(model, cfg), prompts, params)
    for _ in range(2): assert generate(core, prompts, params) == expected


@torch.inference_mode()
@pytest.mark.parametrize("graphs", [True, False], ids=["captured", "eager"])
def test_the_path_of_an_old_gpu(demo, graphs):
    "kernels='torch' in fp16, what a GPU below compute capability 8.0 gets: prompts in chunks, one of 900 tokens, windows, sampled company; tokens through the gate."
    ckpt, prompts, oracle = demo
    model, hf = load_model(ckpt, torch.float16, "cuda"), hf_from_checkpoint(ckpt, torch.float16, "cuda", own_reader=True)
    prompts = [(sum(prompts, []) * 4)[:900], *prompts[1:12]]
    limits = CoreConfig(n_blocks=400, max_num_seqs=12, max_model_len=1024, max_num_batched_tokens=512, window_steps=8, max_in_flight=2, follow=True, by_time=True)
    core = build_core(EngineConfig(kernels="torch", compile_cudagraphs=graphs), model, limits)
    assert type(core.runner) is (GraphRunner if graphs else TorchRunner) and type(core.runner.program) is TorchProgram
    for _ in range(2): generate(core, prompts + prompts[:2], [SamplingParams(temperature=0.9, top_p=0.9, seed=i, max_tokens=16) if i % 2 else SamplingParams(temperature=0, max_tokens=32) for i in range(14)])
    out = generate(core, prompts, SamplingParams(temperature=0, max_tokens=32))
    ref = reference_errors(logits_of(oracle), lambda ids: hf(torch.tensor([list(ids)], device="cuda")).logits[0], list(zip(prompts, out)))
    verdict = judge_low_precision(logits_of(oracle), ref, prompts, out, logits_of(model))
    print(verdict.status, f"worst gap {verdict.worst_gap:.3f} of {2 * ref.e:.3f}")
    assert verdict.status in ("exact", "explained"), verdict
    if graphs: assert core.runner.graphs and not core.runner.failed and sum(g.uses for g in core.runner.graphs.values()) > 20


def test_f21_real_failures_to_capture_and_to_compile(tiny, monkeypatch):
    "20 of 20: steps that read the device in a capture, and a kernel that does not compile; the engine goes on and writes the same texts."
    model, prompts = load_model(tiny, torch.float64, "cuda"), tiny_prompts(512)[:4]
    cfg, greedy = CoreConfig(n_blocks=60, block_size=4, max_num_seqs=4, max_model_len=128, window_steps=4), SamplingParams(temperature=0, max_tokens=20)
    want, failures = generate(make_core(model, cfg), prompts, greedy), 0
    for _ in range(20):
        core = make_core(model, cfg, runner=GraphRunner)
        capture = CudaCapture()
        core.runner.capture = lambda step, capture=capture: capture(lambda: (step(), torch.zeros(1, device="cuda").item()))
        assert generate(core, prompts, greedy) == want and not core.runner.graphs
        failures += len(core.runner.failed)
        if failures >= 18: break
    assert failures >= 18
    good = make_core(model, cfg, runner=GraphRunner)                      # what failed before spoils nothing
    for _ in range(2): assert generate(good, prompts, greedy) == want
    assert good.runner.graphs and not good.runner.failed
    small = load_model(tiny, torch.float32, "cuda")
    monkeypatch.setattr(assembly, "fused_available", lambda model, device: (True, "compute capability 9.0"))
    for _ in range(2):
        assembly.kernel_trial.cache_clear()
        with inject("kernels.compile", lambda device: broken_kernel[(1,)](torch.zeros(1, device=device)), times=1): parts = assembly.choose_parts(EngineConfig(), small)
        assert parts.program is TorchProgram and "Triton cannot compile here" in parts.reasons["kernels"]
    assembly.kernel_trial.cache_clear()
    assert assembly.kernel_trial(torch.device("cuda")) == ""


@triton.jit
def broken_kernel(x):
    tl.store(x, tl.dot(tl.zeros((3, 5), tl.float32), tl.zeros((7, 9), tl.float32)))


def test_the_device_notes_the_time_of_a_step():
    "In a captured launch, into the host's memory: later steps are later, and the spacing is that of the work between them."
    st, ring = DecodeState(4, 32, 4, "cuda"), Ring(8, 4, torch.device("cuda"), pinned=True)
    ring.times = torch.zeros(8, dtype=torch.int64, pin_memory=True)
    work = torch.randn(4096, 4096, device="cuda")

    def step():
        work.copy_(work @ work.mul(1e-4))
        stamp(st, ring)
        st.step.add_(1)
    replay = CudaCapture()(step)
    st.step.zero_()
    a, b = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    a.record()
    for _ in range(8): replay()
    b.record()
    b.synchronize()
    gaps = np.diff(ring.times.numpy()) / 1e6
    assert (gaps > 0).all() and 0.5 < gaps.sum() / (a.elapsed_time(b) * 7 / 8) < 1.5, (gaps, a.elapsed_time(b))


def test_dead_rows_write_nothing(tiny):
    "Case B21: a window with ended rows leaves every slot that is not theirs as it was, and NaN in the null block reaches nobody."
    model = load_model(tiny, torch.float32, "cuda")
    core = make_core(model, CoreConfig(n_blocks=40, block_size=4, max_num_seqs=4, max_model_len=64, window_steps=8, prefix_cache=False))
    prompts, params = tiny_prompts(512)[1:5], [SamplingParams(temperature=0, max_tokens=n) for n in (2, 30, 3, 17)]
    expected = generate(core, prompts, params)
    kv = core.runner.kv
    for layer in range(model.config.n_layers):
        for t in (kv.k[layer], kv.v[layer]):
            t[:] = 7.0
            t[0] = float("nan")
    held = set()
    reserve = core.scheduler.pool.reserve
    core.scheduler.pool.reserve = lambda s, n: (held.update(b.tolist()) if (b := reserve(s, n)) is not None else None, b)[1]
    assert generate(core, prompts, params) == expected
    others = [b for b in range(1, 40) if b not in held]
    assert others and all((t[others] == 7.0).all() and t[0].isnan().all() for layer in range(model.config.n_layers) for t in (kv.k[layer], kv.v[layer]))


def test_nan_row_ends_alone():
    core = make_core(ForcedModel({1: list(range(1, 30)), 50: list(range(50, 80))}, nan_at={50: 9}, device="cuda"), CoreConfig(max_num_seqs=4, max_model_len=32, window_steps=4))
    for i, first in enumerate((1, 50)): core.add([i], [first, first + 1], [SamplingParams(temperature=0, max_tokens=20)])
    out, ends = {0: [], 1: []}, {}
    while core.has_work:
        for d in core.step():
            out[d.seq_id] += d.tokens.tolist()
            if d.finish_reason: ends[d.seq_id] = d.finish_reason
    assert out[0] == list(range(3, 23)) and ends == {0: "length", 1: "error"} and out[1] == list(range(52, 59))


@torch.inference_mode()
def test_time_a_step_eagerly(demo):
    "No bound: the eager step is launch-bound, and the captured one of notebook 14 will be measured against this record."
    ckpt, prompts, _ = demo
    model, rows = load_model(ckpt, torch.bfloat16, "cuda"), []
    for batch in (1, 8, 64):
        core = make_core(model, CoreConfig(n_blocks=2000, max_num_seqs=batch, max_model_len=512, max_num_batched_tokens=8192, window_steps=8, max_in_flight=2, prefix_cache=False))
        ids = [np.random.default_rng(i).integers(3, 40000, 256).tolist() for i in range(batch)]
        times = {}
        for n in (1, 65, 1, 65):
            torch.cuda.synchronize()
            t = time.perf_counter()
            generate(core, ids, SamplingParams(temperature=0, max_tokens=n))
            times[n] = time.perf_counter() - t
        rows.append({"model": "demo", "batch": batch, "dtype": "bfloat16", "us_a_step": (times[65] - times[1]) / 64 * 1e6, "first_token_ms": times[1] * 1e3})
        print(rows[-1])
    if out := os.environ.get("OUT"):
        env = {"gpu": torch.cuda.get_device_name(), "torch": torch.__version__, "cuda": torch.version.cuda}
        Path(out, "gpu_eager.json").write_text(json.dumps({"kind": "gpu_eager", "environment": env, "rows": rows}, indent=1))
