"""The vllm backend with the real vLLM beside paged, eager and compiled: tokens judged by the oracle, one engine for many calls, and for calls that others cut off.

    VLLM_USE_FLASHINFER_SAMPLER=0 PYTHONPATH=.:tests:/tmp/site python3 -m pytest -q -s tests/gpu/test_vllm_gpu.py        (needs CUDA and vLLM 0.26.0)
"""
import json, os, time
from pathlib import Path
import pytest
import torch
from llminfer.backends import make_backend
from llminfer.benchmark import judge_low_precision, reference_errors
from llminfer.config import CacheConfig, EngineConfig
from llminfer.loading import load_model, make_tiny, open_checkpoint
from llminfer.request import GenerationRequest

torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
SHAPE = dict(hidden_size=1024, intermediate_size=3072, num_hidden_layers=6, num_attention_heads=16, num_key_value_heads=8, head_dim=128, max_position_embeddings=4096)      # 512 ids, as many as the tokenizer has


def requests(n, **kw): return [GenerationRequest(f"Request number {i} " * (2 * i + 1), **{"temperature": 0.0, "max_new_tokens": 32, "ignore_eos": True} | kw) for i in range(n)]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_every_backend_is_explained_by_the_oracle(tmp_path, dtype):
    "Rule 4.3 of the design; every backend answers twice, vLLM also a sampled request with a seed, scores, and a stop token."
    folder, said = make_tiny(tmp_path / "qwen", "qwen3", 0, dtype="bfloat16", **SHAPE), {}
    ckpt = open_checkpoint(folder)
    oracle, low = load_model(ckpt, torch.float64, "cuda"), load_model(ckpt, getattr(torch, dtype), "cuda")
    for arm in ("paged", "eager", "compiled", "vllm"):
        cfg = EngineConfig(model_name=str(folder), backend=arm, dtype=dtype, max_model_len=1024, max_num_seqs=8, gpu_memory_utilization=0.3, compile_fallback_to_eager=False, seed=0, cache=CacheConfig(num_blocks=600))
        b, t = make_backend(cfg), time.perf_counter()
        first = b.generate(requests(8))
        took = time.perf_counter() - t
        rs = b.generate(requests(8))
        assert [r.error for r in first + rs] == [None] * 16, (first + rs)[0].error
        said[arm] = rs
        print(arm, f"first answers after {took:.1f} s", b.info(), flush=True)
        if arm == "vllm":
            sampled = [b.generate(requests(2, temperature=0.9, seed=5, top_k=40, logprobs=2))[1] for _ in range(2)]
            assert sampled[0].error is None and sampled[0].token_ids == sampled[1].token_ids and len(sampled[0].outputs[0].logprobs) == 32
            if dtype == "bfloat16": b.unload(); continue        # what follows compares token by token
            stop = rs[3].token_ids[7]
            short = b.generate(requests(4, stop_token_ids=[stop]))[3]
            assert short.finish_reason == "stop" and len(short.token_ids) <= 8
            assert "force_words" in str(b.generate(requests(1, force_words=["no"]))[0].error)
            stream = list(b.stream(requests(1)[0]))
            assert len(stream) > 3 and b.generate(requests(8))[0].error is None
        b.unload()
        torch._dynamo.reset()
    pairs = [(r.prompt_token_ids, r.token_ids) for r in said["paged"]]
    ids = lambda m: lambda s: m.logits(torch.tensor(list(s), device="cuda"))
    with torch.inference_mode():
        ref = reference_errors(ids(oracle), ids(low), pairs)
        verdicts = {arm: judge_low_precision(ids(oracle), ref, [r.prompt_token_ids for r in rs], [r.token_ids for r in rs]) for arm, rs in said.items()}
    alike = {arm: sum(a.token_ids == b.token_ids for a, b in zip(said["paged"], rs)) for arm, rs in said.items()}
    print(dtype, {k: v.status for k, v in verdicts.items()}, "answers like paged's:", alike)
    if "OUT" in os.environ: Path(os.environ["OUT"], f"vllm_backend_{dtype}.json").write_text(json.dumps({k: v.to_dict() for k, v in verdicts.items()}, default=str))
    for arm, v in verdicts.items(): assert v.status in ("exact", "explained"), (arm, v)
