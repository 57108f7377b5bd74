"""Two ranks on two GPUs write what one GPU writes, sums captured in graphs; a rank that is killed ends the other although it waits in a kernel.

    PYTHONPATH=.:tests python3 -m pytest -q tests/gpu/test_parallel_gpu.py        (needs two CUDA devices; nvidia-h200-x2)
"""
import os
import signal
import time
import pytest
import torch
from llminfer.benchmark import judge_greedy, logit_difference
from llminfer.config import CacheConfig, EngineConfig
from llminfer.loading import load_model, make_tiny, open_checkpoint
from llminfer.parallel import one_shot_possible
from llminfer.ranks import RankedEngine, state_digest
from llminfer.request import GenerationRequest

torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
SIZES = dict(num_hidden_layers=3, hidden_size=256, num_attention_heads=8, num_key_value_heads=4, head_dim=64, intermediate_size=512, vocab_size=2047)
LONG = "the and of to in is that was for it with as his on be at by had not are but from have an they which "
ASKS = [dict(prompt=LONG + w, temperature=0.0) for w in ("one", "two", "some")] + [dict(prompt="hello", n=2, seed=7, temperature=0.9, top_p=0.9, top_k=0), dict(prompt="state", seed=3, temperature=1.1, top_k=40, min_p=0.02, logprobs=2),
    dict(prompt="of the", temperature=0.0, repetition_penalty=1.3, presence_penalty=0.4), dict(prompt="may", temperature=0.0, logprobs=3, prompt_logprobs=2)]
FEW = ASKS[:4]      # with kernels of our own every setting is compiled for both engines, a minute and more for all


@pytest.fixture(scope="module")
def folder(tmp_path_factory): return make_tiny(tmp_path_factory.mktemp("m"), "qwen3", 3, **SIZES)


def engine(folder, tp, dtype, **kw):
    e = RankedEngine(EngineConfig(model_name=str(folder), device="cuda", dtype=dtype, tensor_parallel_size=tp, max_model_len=256, max_num_seqs=8, seed=0, cache=CacheConfig(num_blocks=200), **kw).validate())
    e.load()
    return e


def told(e):
    e.ranks.send("digest")
    return {state_digest(e.loop.core), *(d for d, in e.ranks.collect("digest", 60))}


@pytest.mark.parametrize("kernels, dtype, graphs", [("torch", "float64", True), ("auto", "float32", True), ("auto", "float32", False), ("auto", "bfloat16", True)])
def test_two_gpus_write_what_one_writes(folder, kernels, dtype, graphs):
    "fp64 and fp32 by the oracle's rule; bf16: both ranks draw the same, and greedy tokens are within rounding of the oracle's best."
    requests = [GenerationRequest(max_new_tokens=24, ignore_eos=True, request_id=str(i), **kw) for i, kw in enumerate(ASKS if kernels == "torch" else FEW)]
    out = {}
    for tp in (1, 2) if dtype == "float64" else (2,):
        e = engine(folder, tp, dtype, kernels=kernels, compile_cudagraphs=graphs)
        for _ in range(3): out[tp] = e.generate(requests)      # twice eager, then what was captured meanwhile
        assert not [r.error for r in out[tp] if r.error]
        if tp == 2:
            print(e.info()["tensor_parallel"], e.info()["kernels"])
            assert e.info()["tensor_parallel"].startswith("2 ranks, nccl") and len(told(e)) == 1
            assert not graphs or (e.loop.core.runner.graphs and not e.loop.core.runner.failed)
        e.unload()
    ckpt = open_checkpoint(folder)
    oracle, plain = load_model(ckpt, torch.float64, "cuda"), [0, 1, 2]
    texts = {tp: [[o.token_ids for o in r.outputs] for r in out[tp]] for tp in out}
    if dtype == "float64": assert texts[1] == texts[2]
    else:
        model = load_model(ckpt, getattr(torch, dtype), "cuda")
        prompts, answers = [out[2][i].prompt_token_ids for i in plain], [texts[2][i][0] for i in plain]
        tol = 4 * logit_difference(oracle.logits, model.logits, [p + a for p, a in zip(prompts, answers)])
        verdict = judge_greedy(oracle.logits, prompts, answers, tol)
        print(verdict)
        assert verdict.status in (("exact", "explained") if dtype == "float32" else ("exact", "explained", "review"))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_one_shot_sums_like_nccl(folder, dtype):
    "If the machine lets GPUs read each other's memory, small sums take one kernel; switched off, the text is the same."
    texts = []
    for most in (None, 0):
        e = engine(folder, 2, dtype)
        shot = e.ranks.comm.one_shot
        print("one shot:", shot and shot.most)
        assert (shot is not None) == one_shot_possible(e.ranks.comm), e.info()["tensor_parallel"]
        assert shot is None or "one shot up to 256 KiB" in e.info()["tensor_parallel"]
        if most == 0:
            e.unload()
            os.environ["LLMINFER_ONE_SHOT"] = "0"
            try: e = engine(folder, 2, dtype)
            finally: del os.environ["LLMINFER_ONE_SHOT"]
            assert e.ranks.comm.one_shot is None
        texts.append([r.token_ids for r in e.generate([GenerationRequest(max_new_tokens=24, ignore_eos=True, **kw) for kw in ASKS[:3]])])
        e.unload()
    assert texts[0] == texts[1]                                # two numbers have one sum, in whatever order


def test_a_killed_rank_ends_a_step_that_waits_for_it(folder):
    e = engine(folder, 2, "bfloat16")
    stream, pid = e.stream(GenerationRequest("hello", max_new_tokens=240, temperature=0.0, ignore_eos=True)), e.info()["rank_pids"][0]
    next(stream)
    t = time.monotonic()
    os.kill(pid, signal.SIGKILL)
    with pytest.raises(Exception, match="tensor-parallel rank 1 .* was killed by SIGKILL"): list(stream)
    assert time.monotonic() - t < 10 and not e.is_loaded
    e.load()                                                   # rank 0's process is the old one, the other rank's is new
    assert (e.ranks.comm.one_shot is not None) == one_shot_possible(e.ranks.comm), e.info()["tensor_parallel"]
    assert len(e.generate([GenerationRequest("hello", max_new_tokens=24, temperature=0.0, ignore_eos=True)])[0].token_ids) == 24
    e.unload()
