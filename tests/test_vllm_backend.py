"""The vllm backend over a module with vLLM's names: what it is given, one engine for every caller. The real one: tests/gpu/test_vllm_gpu.py."""
import asyncio
from concurrent.futures import ThreadPoolExecutor
from llminfer.config import EngineConfig, QuantConfig
from llminfer.engine import InferenceEngine
from support.fake_vllm import fake_vllm
from test_backends import engine, folder


def test_vllm_gets_its_own_names():
    with fake_vllm() as vllm:
        e = InferenceEngine(EngineConfig(model_name=folder(), backend="vllm", max_model_len=128, max_num_seqs=64, max_num_batched_tokens=1024, compile_cudagraphs=False, seed=5, hf_revision="main", hf_token="secret",
            hf_cache_dir="/c", dtype="bfloat16", assistant_model_name="small", speculative_num_assistant_tokens=4, quant=QuantConfig(mode="nf4")))
        r = e.run(prompt_token_ids=[30, 31, 40], temperature=0.7, top_k=0, min_p=0.1, seed=7, n=2, logprobs=2, prompt_logprobs=1, logit_bias={5: 2.0}, bad_words=["the"], stop_token_ids=[44],
            min_tokens=1, repetition_penalty=1.1, presence_penalty=0.1, frequency_penalty=0.2, prefix_key="salt", priority=3, max_new_tokens=9)
        (made,) = vllm.made
        a = vars(made.args)
        assert (a["enforce_eager"], a["quantization"], a["speculative_config"], a["max_num_seqs"], a["download_dir"], a["seed"]) == (True, "bitsandbytes", {"model": "small", "num_speculative_tokens": 4}, 64, "/c", 5)
        prompt, p, priority = made.added[0]
        assert prompt == {"prompt_token_ids": [30, 31, 40], "cache_salt": "salt"} and priority == 3 and len(made.added) == 2
        assert (p.top_k, p.ignore_eos, p.detokenize, p.bad_words, p.logit_bias) == (-1, True, False, ["the"], {5: 2.0}) and 44 in p.stop_token_ids and p.seed != made.added[1][1].seed
        assert [o.token_ids for o in r.outputs] == [[41, 42, 43, 44]] * 2 and (r.finish_reason, r.outputs[0].stop_reason, r.cached_tokens) == ("stop", 44, 1)
        assert [round(x.logprob, 3) for x in r.logprobs] == [-0.5] * 4 and list(r.logprobs[0].top) == [41, 42] and r.prompt_logprobs[0] is None and r.prompt_logprobs[1].rank == 3
        assert e.run("x", max_new_tokens=0).finish_reason == "length"
        e.unload()


def test_vllm_keeps_one_engine_for_every_caller():
    "B14, B15: threads, a loop, another loop and a stream; then a fault, after which there is a new engine."
    with fake_vllm() as vllm:
        e = engine("vllm")
        with ThreadPoolExecutor(4) as pool: got = list(pool.map(lambda i: e.run(prompt_token_ids=[10 * i + 20], max_new_tokens=5).token_ids, range(8)))
        assert got == [[10 * i + 21 + j for j in range(5)] for i in range(8)]
        for _ in range(2): assert asyncio.run(e.arun(prompt_token_ids=[50], max_new_tokens=3)).token_ids == [51, 52, 53]
        tok = e.backend.tokenizer
        assert "".join(c.token for c in e.stream(prompt_token_ids=[70], max_new_tokens=50, stop_sequences=[tok.token_text(80)])) == tok.decode(list(range(71, 80)))
        assert len(vllm.made) == 1 and len(vllm.made[0].aborted) == 1 and not vllm.made[0].running
        assert e.run(prompt_token_ids=[70], max_new_tokens=10**6, deadline_s=0.0).finish_reason in ("abort", "length")
        vllm.made[0].fail = RuntimeError("the engine died")
        assert "the engine died" in e.run(prompt_token_ids=[50], max_new_tokens=3).error
        assert e.run(prompt_token_ids=[50], max_new_tokens=3).token_ids == [51, 52, 53] and len(vllm.made) == 2
        e.unload()
