"""A model split over ranks writes what it writes on one; when a rank goes, all go, and say why. Gloo on this CPU stands in for NCCL."""
import gc
import os
import shutil
import signal
import subprocess
import sys
import time
import weakref
from pathlib import Path
import numpy as np
import pytest
import torch
from llminfer import ranks as ranks_module
from llminfer.adapters import make_adapter
from llminfer.backends import make_backend
from llminfer.benchmark import judge_greedy, logit_difference
from llminfer.config import CacheConfig, ConfigError, EngineConfig, QuantConfig
from llminfer.loading import load_model, make_tiny, open_checkpoint
from llminfer.model import Dense
from llminfer.parallel import LocalComm, load_shard, on_ranks
from llminfer.quantization import dense_weight
from llminfer.ranks import rank_device, state_digest
from llminfer.request import GenerationRequest
from llminfer.tracing import inject
from support.own_process import run_alone

ROOT = Path(__file__).resolve().parents[1]
ESME = dict(hidden_size=96, intermediate_size=160, num_hidden_layers=3, num_attention_heads=12, num_key_value_heads=4, head_dim=16, tie_word_embeddings=True, vocab_size=511)
LONG = "the and of to in is that was for it with as his on be at by had not are but from have an they which "
ALL = dict(max_new_tokens=24, ignore_eos=True)
GREEDY = ALL | dict(temperature=0.0)
MIXED = [dict(prompt=LONG + "one", **GREEDY | dict(max_new_tokens=60)), dict(prompt=LONG + "two", **GREEDY, logprobs=3, prompt_logprobs=2), dict(prompt="hello", n=2, seed=7, **ALL, temperature=0.9, top_p=0.9, top_k=0),
    dict(prompt="state of the world", seed=3, **ALL, temperature=1.1, top_k=40, min_p=0.02, logprobs=2), dict(prompt="of the", **GREEDY, repetition_penalty=1.3, presence_penalty=0.4, frequency_penalty=0.3),
    dict(prompt="some", seed=4, **ALL, temperature=0.8, top_p=0.8, top_k=0, no_repeat_ngram_size=2, bad_words=[" the"], logit_bias={40: 2.0}), dict(prompt=LONG * 2, seed=5, **ALL, temperature=1.0, top_k=0),
    dict(prompt="the the the the the the", **GREEDY, speculative_num_assistant_tokens=4, logit_bias={60: 22.0, 61: 20.0, 62: 21.0}), dict(prompt="may", temperature=0.0, max_new_tokens=24, structured_outputs={"regex": "[a-f]{3,30}"}),
    dict(prompt="what", adapter="a", **GREEDY), dict(prompt="what", adapter="a", seed=9, **ALL, temperature=0.7, top_k=20), dict(prompt="when", temperature=0.0, max_new_tokens=20, stop_sequences=["e", "t"])]


def engine(folder, tp=2, **kw):
    cache = CacheConfig(num_blocks=kw.pop("blocks", None), page_size_tokens=kw.pop("block", 16))
    e = make_backend(EngineConfig(model_name=str(folder), backend="paged", device="cpu", tensor_parallel_size=tp, seed=0, num_threads=1, cache=cache, **{"max_model_len": 128} | kw).validate())
    e.load()
    return e


def facts(r):
    assert r.error is None, r.error
    def scores(lps): return lps and [lp and (lp.token_id, lp.rank, list(lp.top)) for lp in lps]
    return [(o.token_ids, o.text, o.finish_reason, scores(o.logprobs)) for o in r.outputs], scores(r.prompt_logprobs)


def told(core, ranks):
    "The state of every rank, as a number: rank 0's, and the others'."
    ranks.send("digest")
    return [state_digest(core), *(d for d, in ranks.collect("digest", 30))]


def alive(pid):
    try: return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError: return False


def gone(pids, seconds=10.0):
    end = time.monotonic() + seconds
    while any(map(alive, pids)) and time.monotonic() < end: time.sleep(0.02)
    return not any(map(alive, pids))


@pytest.mark.parametrize("family, dtype, K, sizes", [("llama", "float64", 4, {}), ("qwen3", "float32", 1, ESME)])
def test_two_ranks_write_what_one_writes(tmp_path, family, dtype, K, sizes):
    folder = make_tiny(tmp_path / "m", family, 1, **sizes)
    ckpt = open_checkpoint(folder)
    adapter = make_adapter(tmp_path / "a", ckpt.config, 2, r=4, strength=2.0)
    requests = [GenerationRequest(**{"request_id": str(i)} | kw) for i, kw in enumerate(MIXED)]
    out = {}
    for tp in (1, 2):
        e = engine(folder, tp, dtype=dtype, window_steps=K, blocks=30, block=4, max_model_len=112, max_num_seqs=6, max_num_batched_tokens=24)
        e.load_adapter(str(adapter), "a", activate=False)
        e.generate([GenerationRequest(LONG, max_new_tokens=1)])      # for the prefix cache
        out[tp] = e.generate(requests)
        assert sum(r.stats.n_preemptions for r in out[tp]) > 0 and out[tp][0].stats.cached_tokens > 0 and out[tp][7].stats.accepted_tokens > 0
        core = e.loop.core
        core.scheduler.pool.check()
        if tp == 2:
            assert e.info()["tensor_parallel"] == "2 ranks, gloo"
            assert len(set(told(core, e.ranks))) == 1      # no token was sent: every rank has drawn the same
            pids = e.info()["rank_pids"]
        e.unload()
    assert gone(pids)
    assert out[1][9].outputs[0].token_ids != engine_free(ckpt, "what")       # the adapter changes the text
    if dtype == "float64": assert [*map(facts, out[2])] == [*map(facts, out[1])]
    else:
        plain = [i for i in (0, 1) if facts(out[2][i]) != facts(out[1][i])]
        assert [facts(r) for i, r in enumerate(out[2]) if i not in plain] == [facts(r) for i, r in enumerate(out[1]) if i not in plain]
        exact, model = load_model(ckpt, torch.float64), load_model(ckpt, torch.float32)
        prompts, texts = [r.prompt_token_ids for r in out[2]], [r.token_ids for r in out[2]]
        tol = 4 * logit_difference(exact.logits, model.logits, [p + t for p, t in zip(prompts, texts)])
        assert judge_greedy(exact.logits, [prompts[i] for i in (0, 1)], [texts[i] for i in (0, 1)], tol).status in ("exact", "explained") and tol < 1e-2
    for a, b in zip(out[1], out[2]):
        for x, y in zip(a.logprobs or [], b.logprobs or []): assert x.logprob == pytest.approx(y.logprob, abs=1e-9 if dtype == "float64" else 1e-3)


def engine_free(ckpt, prompt):
    "Greedy text of the model without adapters, by the oracle."
    from llminfer.tokenization import load_tokenizer
    ids = load_tokenizer(ckpt.tokenizer).encode(prompt)
    model, n = load_model(ckpt, torch.float64), len(ids)
    for _ in range(24): ids.append(int(model.logits(ids)[-1].argmax()))
    return ids[n:]


def test_three_ranks_speak_as_the_demo_model():
    "9 heads, 3 KV heads: no even split, and real weights out of a GGUF."
    e = engine("demo", 3, max_model_len=64, max_num_seqs=2, dtype="float32")
    request = e.with_chat(GenerationRequest("", temperature=0.0, max_new_tokens=8), [{"role": "user", "content": "What is the capital of France?"}])
    r, info = e.generate([request])[0], e.info()
    assert "Paris" in r.generated_text and info["tensor_parallel"].startswith("3 ranks") and len(set(told(e.loop.core, e.ranks))) == 1
    e.unload()
    model = load_model("demo", torch.float32)
    ids = r.prompt_token_ids + r.token_ids
    gaps = [float(row.max() - row[i]) for row, i in zip(model.logits(ids[:-1], len(r.token_ids)), r.token_ids)]
    assert max(gaps) < 1e-3, gaps


@pytest.mark.parametrize("family, size, quant, sizes", [("llama", 4, "none", {}), ("llama", 2, "int8", {}), ("qwen2", 2, "nf4", dict(hidden_size=128)), ("llama", 2, "int4", dict(hidden_size=128)),
    ("llama", 2, "fp8", {}), ("qwen3", 3, "none", dict(ESME, num_attention_heads=6, num_key_value_heads=3, intermediate_size=192)), ("mistral", 4, "none", dict(sliding_window=8, vocab_size=509)), ("opt", 2, "none", {})])
def test_a_split_model_has_the_logits_of_its_parts_put_together(tmp_path, family, size, quant, sizes):
    "Also for KV heads that several ranks share, a vocabulary that no number divides, and matrices that are quantised after the cut."
    ckpt = open_checkpoint(make_tiny(tmp_path / "m", family, 0, **sizes))
    kind = torch.float64 if quant == "none" else torch.float32
    parts = [load_shard(ckpt, QuantConfig(quant), kind, rank=r, size=size) for r in range(size)]
    for m, c in zip(parts, LocalComm.ranks(size)): m.comm = c
    whole, dim = load_model(ckpt, kind, linear=Dense), {"qkv": 0, "gate_up": 0, "o": 1, "down": 1}
    for i, layer in enumerate(whole.layers if quant != "none" else ()):
        for name, axis in dim.items():
            each = [dense_weight(getattr(m.layers[i], name), kind) for m in parts]
            if axis: w = torch.cat(each, 1)
            else:
                c = parts[0].config
                cuts = [c.n_heads * c.head_dim, *[c.n_kv_heads * c.head_dim] * 2] if name == "qkv" else [c.intermediate_size] * 2
                w = torch.cat([torch.cat(p) for p in zip(*(x.split(cuts) for x in each))])
            assert w.shape == getattr(layer, name).weight.shape and not torch.equal(w, getattr(layer, name).weight)
            getattr(layer, name).weight = w
    ids = np.random.default_rng(0).integers(0, ckpt.config.vocab_size, 40).tolist()
    want, got = whole.logits(ids), on_ranks(parts, lambda m: m.logits(ids))
    assert all(torch.equal(g, got[0]) for g in got)
    torch.testing.assert_close(got[0], want, atol=1e-9 if quant == "none" else 2e-3, rtol=1e-9 if quant == "none" else 1e-3)
    assert sum(m.nbytes for m in parts) < (1.6 if size == 4 or family == "opt" else 1.2) * whole.nbytes and parts[0].comm.n_reduced == 1 + 2 * whole.config.n_layers
    x = torch.randn(5, ckpt.config.vocab_size, generator=torch.Generator().manual_seed(1)).to(kind)
    x[0, 7] = x[0, 300] = 9.0                                  # a tie goes to the smaller id
    x[1, 400] = float("nan")
    best = on_ranks(parts, lambda m: m.best(x[:, slice(*m.shard.vocab)].contiguous()))
    assert all(b[1].tolist()[2:] == x.argmax(1).tolist()[2:] and b[1][0] == 7 and b[0].isfinite().tolist() == [True, False, True, True, True] for b in best)


if os.environ.get("TRITON_INTERPRET") == "1":
    def test_fused_ranks(tmp_path):
        folder = make_tiny(tmp_path / "m", "qwen3", 0, num_hidden_layers=1, head_dim=64, vocab_size=300)
        jobs = [GenerationRequest(p, max_new_tokens=3, ignore_eos=True, **kw) for p, kw in (("hello", dict(temperature=0.0)), ("of", dict(temperature=0.0)), ("to", dict(temperature=0.9, top_k=20, seed=1, presence_penalty=0.5)))]
        texts = []
        for kernels, tp in (("torch", 1), ("triton", 2)):
            e = engine(folder, tp, dtype="float32", kernels=kernels, max_model_len=32, max_num_seqs=4)
            texts.append([r.token_ids for r in [*e.generate(jobs[:2]), *e.generate(jobs)]])
            if tp == 2: assert "up to 2 rows five launches" in e.info()["kernels"] and e.info()["counters"]["tiles_off"] == 1 and len(set(told(e.loop.core, e.ranks))) == 1
            e.unload()
        assert texts[0] == texts[1]
else:
    def test_own_kernels_under_the_interpreter(): run_alone(f"{__file__}::test_fused_ranks")


# The end


@pytest.fixture(scope="module")
def folder(tmp_path_factory): return make_tiny(tmp_path_factory.mktemp("m"), "llama", 0, hidden_size=96, num_attention_heads=6, num_key_value_heads=6, intermediate_size=192)


def test_when_a_rank_is_gone_all_are_and_the_next_request_starts_anew(folder, caplog, monkeypatch):
    "Killed while the engine works; a launch that fails on one rank only; ended while the engine sleeps."
    def say(): return e.generate([GenerationRequest("hello", max_new_tokens=4, temperature=0.0, ignore_eos=True)])[0]
    def wait_for_death():
        end = time.monotonic() + 10
        while e.is_loaded and time.monotonic() < end: time.sleep(0.02)
        return gone(pids) and not e.is_loaded                  # as any dead engine: a server says 503
    monkeypatch.setattr(ranks_module, "AGREE_S", 0.5)
    e = engine(folder, 3, max_model_len=512)
    pids, stream = e.info()["rank_pids"], e.stream(GenerationRequest("hello", max_new_tokens=480, temperature=0.0, ignore_eos=True))
    next(stream)
    os.kill(pids[1], signal.SIGKILL)
    with pytest.raises(Exception, match=rf"^tensor-parallel rank 2 \(process {pids[1]}\) was killed by SIGKILL; all ranks end$"): list(stream)
    assert wait_for_death() and f"rank 2 (process {pids[1]}) was killed by SIGKILL" in caplog.text
    want = say().token_ids                                     # loads again
    assert len(want) == 4 and not set(e.info()["rank_pids"]) & set(pids)
    with inject("ticket.harvest", RuntimeError("late")): assert "late" in say().error   # no rank waits for another: a new core, the same ranks
    assert say().token_ids == want and e.trace.counters["engine_errors"] == 1
    pids = e.info()["rank_pids"]
    with inject("runner.launch", RuntimeError("boom")): assert "failed on tensor-parallel ranks [0] only (RuntimeError: boom)" in say().error
    assert wait_for_death() and say().token_ids == want
    pids = e.info()["rank_pids"]
    os.kill(pids[0], signal.SIGTERM)
    assert wait_for_death() and "rank 1" in caplog.messages[-1] and "SIGTERM" in caplog.messages[-1]
    e.unload()

def test_adapters_survive_their_ranks_and_groups_do_not(folder, tmp_path, monkeypatch):
    "Loaded again and chosen as before, also behind a server's back; a rank that dies at the meeting ends the load; what is over is freed."
    def say(**kw): return e.generate([GenerationRequest("hello", max_new_tokens=6, temperature=0.0, ignore_eos=True, **kw)])[0]
    def kill(e): os.kill(e.ranks.members[0].proc.pid, signal.SIGKILL)
    def kill_and_wait(e):
        kill(e)
        end = time.monotonic() + 10
        while e.is_loaded and time.monotonic() < end: time.sleep(0.02)
    e = engine(folder)
    for i, n in enumerate("ab"): e.load_adapter(str(make_adapter(tmp_path / n, e.model.full_config, i, r=4, strength=2.0)), n)
    base, want = say(adapter="__base__").token_ids, say().token_ids
    assert want == say(adapter="b").token_ids != base != say(adapter="a").token_ids
    shutil.rmtree(tmp_path / "a")
    kill_and_wait(e)
    assert say().token_ids == want and e.list_adapters() == ["b"] and say(adapter="__base__").token_ids == base
    assert "there is no adapter 'a'" in say(adapter="a").error
    meet, made = ranks_module.meet, []
    kill_and_wait(e)
    monkeypatch.setattr(ranks_module, "meet", lambda *a: (made.append(Path(e.ranks.folder)), kill(e), meet(*a))[2])
    with pytest.raises(Exception, match="rank 1 .* was killed by SIGKILL"): e.load()
    assert made and not made[0].exists()
    monkeypatch.setattr(ranks_module, "meet", meet)
    assert say().token_ids == want and e.list_adapters() == ["b"]         # a load that failed has not forgotten them
    e.unload()
    ref = weakref.ref((e.load(), e.ranks.comm)[1])
    for _ in range(2): (e.unload(), e.load())
    e.unload()
    gc.collect()
    assert ref() is None


PARENT = """
import sys
sys.path[:0] = sys.argv[1:2]
from llminfer import EngineConfig, InferenceEngine
e = InferenceEngine(EngineConfig(model_name=sys.argv[2], device="cpu", tensor_parallel_size=2)).load()      # no `if __name__ == "__main__"` around it
print(*e.info()["rank_pids"], flush=True)
while True: e.run("hello", max_new_tokens=100, ignore_eos=True)
"""


def test_no_orphan(tmp_path, folder):
    "Rank 0 is killed in mid-sum. One that leaves without a word is in `notebook 20i`."
    (tmp_path / "parent.py").write_text(PARENT)
    p = subprocess.Popen([sys.executable, str(tmp_path / "parent.py"), str(ROOT), str(folder)], stdout=subprocess.PIPE, text=True)
    pids = [int(i) for i in p.stdout.readline().split()]
    assert len(pids) == 1 and alive(pids[0]) and os.getpgid(pids[0]) != os.getpgid(p.pid)    # Ctrl-C does not reach it
    before = set(tmp_dirs())
    p.kill()
    p.wait(20)
    assert gone(pids) and len(before - set(tmp_dirs())) == 1
    p.stdout.close()


def test_what_cannot_be_split_is_refused_by_name(tmp_path, folder, monkeypatch):
    def refused(match, path=folder, **kw):
        before = set(tmp_dirs())
        with pytest.raises(ConfigError, match=match) as err: engine(path, **kw)
        assert "\n" not in str(err.value) and set(tmp_dirs()) == before
    started = []
    monkeypatch.setattr(ranks_module.Ranks, "start", lambda self, cfg: started.append(1))      # refused by rank 0, which looks first
    refused("tensor_parallel_size 4 does not divide 6 query heads and 6 KV heads: this model can have 1, 2, 3, 6; --backend vllm", tp=4)
    odd = make_tiny(tmp_path / "odd", "llama", 0, num_attention_heads=12, num_key_value_heads=4, hidden_size=96, intermediate_size=126)
    refused("does not divide 4 KV heads", odd, tp=6)
    refused("does not divide 126 feed-forward columns: this model can have 1, 2; ", odd, tp=4)
    refused("pipeline_parallel_size 2 is not available on the paged backend: .*--backend vllm", pipeline_parallel_size=2, tp=1)
    refused("weights kept in GGUF's blocks .* cannot be cut", "demo", quant=QuantConfig("gguf"), tp=3, max_model_len=64)
    with pytest.raises(ConfigError, match="a model in memory cannot be split; give its name"):
        ranks_module.RankedEngine(EngineConfig(tensor_parallel_size=2, device="cpu")).start(load_model(folder), None)
    monkeypatch.setattr(ranks_module, "resolve_device", lambda d: "cuda:1" if d == "cuda:1" else "cuda")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert [rank_device("cuda", r, 2) for r in (0, 1)] == ["cuda:0", "cuda:1"]
    with pytest.raises(ConfigError, match="tensor_parallel_size 2 from cuda:1 on needs 3 GPUs, and there are 2: use at most 1"): rank_device("cuda:1", 0, 2)


def tmp_dirs(): return [p.name for p in Path(os.environ.get("TMPDIR", "/tmp")).glob("llminfer-ranks-*")]
