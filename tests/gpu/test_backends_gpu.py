"""Eager and compiled transformers on a GPU: the paged backend's tokens in fp32, a CUDA-graph switch that switches, milliseconds a step.

    PYTHONPATH=.:tests python3 -m pytest -q -s tests/gpu/test_backends_gpu.py
"""
import json, os, time
from pathlib import Path
import pytest
import torch
from llminfer.backends import make_backend
from llminfer.benchmark import judge_greedy, logit_difference
from llminfer.config import CacheConfig, EngineConfig
from llminfer.loading import load_model, make_tiny, open_checkpoint
from llminfer.request import GenerationRequest

torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
QWEN = dict(hidden_size=1024, intermediate_size=3072, num_hidden_layers=6, num_attention_heads=16, num_key_value_heads=8, head_dim=128, vocab_size=8192, max_position_embeddings=4096)
ARMS = {"paged": {}, "eager": {}, "compiled, no graphs": dict(compile_cudagraphs=False), "compiled": {}}


def backend(folder, arm, **kw):
    name = arm.split(",")[0]
    return make_backend(EngineConfig(model_name=str(folder), backend=name, **{"max_model_len": 1024, "max_num_seqs": 8, "compile_fallback_to_eager": False, "cache": CacheConfig(num_blocks=600)} | ARMS[arm] | kw))


def requests(n, new=32): return [GenerationRequest(f"Request number {i} " * (2 * i + 1), temperature=0.0, max_new_tokens=new, ignore_eos=True) for i in range(n)]


def skips(): return dict(torch._dynamo.utils.counters["inductor"])


def step_ms(b, rows=8):
    "Milliseconds a decode step, as the difference of two lengths."
    def seconds(new):
        t = time.perf_counter()
        assert (bad := [r.error for r in b.generate(requests(rows, new)) if r.error]) == [], bad[0]
        return time.perf_counter() - t
    seconds(8), seconds(136)
    return min((seconds(136) - seconds(8)) / 128 for _ in range(3)) * 1e3


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_fp32_tokens_agree_by_the_fp64_oracle(tmp_path, family):
    "Rule 4.2 of the design: the oracle's tokens, or gaps within four times the measured difference of logits."
    folder = make_tiny(tmp_path / "tiny", family, 0)
    ckpt = open_checkpoint(folder)
    oracle, low = (load_model(ckpt, d, "cuda") for d in (torch.float64, torch.float32))
    for arm in ARMS:
        b = backend(folder, arm, dtype="float32", max_model_len=256)
        rs = b.generate(requests(8))
        assert [r.error for r in rs] == [None] * 8, rs[0].error
        print(arm, b.info()["steps"], b.info()["kernels"])
        b.unload()
        whole = [r.prompt_token_ids + r.token_ids for r in rs]
        ids = lambda m: lambda s: m.logits(torch.tensor(list(s), device="cuda"))
        v = judge_greedy(ids(oracle), [r.prompt_token_ids for r in rs], [r.token_ids for r in rs], 4 * logit_difference(ids(oracle), ids(low), whole))
        print(v)
        assert v.status in ("exact", "explained"), v


def test_what_a_step_costs(tmp_path):
    folder, ms = make_tiny(tmp_path / "qwen", "qwen3", 0, dtype="bfloat16", **QWEN), {}
    for arm in ARMS:
        torch._dynamo.utils.counters.clear()
        b, t = backend(folder, arm, dtype="bfloat16"), time.perf_counter()
        assert [r.error for r in b.generate(requests(8, 4))] == [None] * 8
        first = time.perf_counter() - t
        ms[arm] = round(step_ms(b), 2)
        print(f"{arm}: {ms[arm]} ms a step of 8 rows, first answer after {first:.1f} s, {b.info()['steps']}, {skips()}", flush=True)
        b.unload()
        torch._dynamo.reset()
    if "OUT" in os.environ: Path(os.environ["OUT"], "backends.json").write_text(json.dumps(ms))
    assert ms["compiled"] < ms["compiled, no graphs"] < ms["eager"]
