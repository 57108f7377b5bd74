"""Every backend behind one protocol: the same answers where they must be the same, a refusal by name where they cannot.

Which test shows which claim and bug of the library contract: test_contract.py.
"""
import asyncio, json, logging, shutil, threading, time
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Any
import pytest
import torch
from llminfer.backends import BACKENDS, FEATURES, EagerBackend, GenerationError, UpstreamBackend, capability_table
from llminfer.bundles import make_bundle
from llminfer.benchmark import judge_greedy, logit_difference
from llminfer.compiled import Compiler
from llminfer.config import Backend, CacheConfig, ConfigError, EngineConfig, QuantMode
from llminfer.cuda_graphs import PlainCapture
from llminfer.eager import Net
from llminfer.formats import LoadError
from llminfer.engine import InferenceEngine
from llminfer.kv_cache import KVCacheManager
from llminfer.interfaces import CacheFullError
from llminfer.loading import load_model, make_tiny, open_checkpoint
from llminfer.batching import BatchQueue, SyncBatchQueue
from llminfer.request import ContextLengthError, GenerationRequest, RequestError
from llminfer.streaming import MultiStreamer, TokenStreamer
from llminfer.tokenization import load_tokenizer
from llminfer.tracing import inject
from llminfer.upstream import events
from support.fake_vllm import fake_vllm
from support.upstream import our_server, script_server
from test_engine import CROWD

TEXTS = ["Hi", "A prompt of middling length", "A much longer prompt, which decides how wide the batch is, and more of it"]
GREEDY: dict[str, Any] = dict(temperature=0.0, ignore_eos=True)


@pytest.fixture(autouse=True)
def compiler(request, monkeypatch):
    "Shapes, buckets and masks as compiled; traced only where a test says so, machine code in tests/gpu: on one CPU core it takes minutes."
    if "traced" not in request.fixturenames: monkeypatch.setattr(torch, "compile", lambda fn, **kw: fn)


@pytest.fixture
def traced(monkeypatch): monkeypatch.setattr(Compiler, "backend", "eager")


@cache
def folder(family: str = "llama") -> str: return str(make_tiny(Path(mkdtemp()) / family, family, 0))


def engine(backend: str, family: str = "llama", **kw: Any) -> InferenceEngine:
    settings: dict[str, Any] = dict(max_model_len=160, seed=0, cache=CacheConfig(num_blocks=120), backend=backend) | kw
    return InferenceEngine(EngineConfig(model_name=folder(family), **settings))


def three(n: int = 12, **kw: Any) -> list[GenerationRequest]: return [GenerationRequest(t, max_new_tokens=n, **GREEDY | kw) for t in TEXTS]


def hf(cfg):
    "A random model of transformers in fp64, on our tiny tokenizer."
    from transformers import AutoModelForCausalLM
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(cfg).eval().double()


def hf_configs():
    from transformers import BloomConfig, Gemma2Config, GPT2Config, MistralConfig, OPTConfig
    small = dict(vocab_size=512, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=256, bos_token_id=1, eos_token_id=2, pad_token_id=0)
    return {"gpt2": GPT2Config(vocab_size=512, n_embd=64, n_layer=2, n_head=4, n_positions=256, bos_token_id=1, eos_token_id=2), "bloom": BloomConfig(vocab_size=512, hidden_size=64, n_layer=2, n_head=4),
        "opt": OPTConfig(vocab_size=512, hidden_size=64, ffn_dim=128, num_hidden_layers=2, num_attention_heads=4, max_position_embeddings=256, word_embed_proj_dim=64, bos_token_id=1, eos_token_id=2, pad_token_id=1),
        "gemma2": Gemma2Config(**small, head_dim=16, sliding_window=8), "mistral": MistralConfig(**small, sliding_window=8)}


def by_generate(net, ids: list[int], n: int, **kw) -> list[int]:
    x = torch.tensor([ids])
    with torch.inference_mode(): out = net.generate(x, attention_mask=torch.ones_like(x), do_sample=False, max_new_tokens=n, eos_token_id=511, pad_token_id=0, **kw)
    return out[0, len(ids):].tolist()


# The same answers


@pytest.mark.parametrize("family", ["llama", "qwen2", "opt"])
def test_paged_eager_and_compiled_agree_in_fp32(family):
    "Rule 4.2 of the design, each token of each backend judged by the fp64 oracle."
    ckpt = open_checkpoint(folder(family))
    oracle, single = (load_model(ckpt, d, "cpu") for d in (torch.float64, torch.float32))
    logits = lambda m: lambda ids: m.logits(torch.tensor(list(ids)))
    for backend in ("paged", "eager", "compiled"):
        with engine(backend, family) as e: rs = e.run_requests(three(20))
        whole = [r.prompt_token_ids + r.token_ids for r in rs]
        v = judge_greedy(logits(oracle), [r.prompt_token_ids for r in rs], [r.token_ids for r in rs], 4 * logit_difference(logits(oracle), logits(single), whole))
        assert v.status in ("exact", "explained") and v.n_tokens == 60, (backend, v)


def test_the_demo_model_says_the_same_on_paged_eager_and_compiled():
    said = {}
    for backend in ("paged", "eager", "compiled"):
        with InferenceEngine(EngineConfig(model_name="demo", backend=backend, max_model_len=128, max_num_seqs=2)) as e:
            answer = e.chat([{"role": "user", "content": "What is the capital of France?"}], temperature=0.0, max_new_tokens=12)
            said[backend] = [answer.token_ids, *(r.token_ids for r in e.run_batch(["The three primary colours are", "One, two,"], temperature=0.0, max_new_tokens=8))]
            assert "Paris" in answer.generated_text and e.info()["format"] == "gguf"
    assert said["paged"] == said["eager"] == said["compiled"]


@pytest.mark.parametrize("name", ["gpt2", "bloom", "opt", "gemma2", "mistral"])
def test_mixed_lengths_equal_generate_and_hold_no_prompt(name):
    "B2. Learned positions, alibi, sliding windows, capped logits: what transformers can, and rows of any length."
    net, tok = hf(hf_configs()[name]), load_tokenizer(folder())
    b = EagerBackend(EngineConfig(dtype="float64", max_model_len=128, cache=CacheConfig(num_blocks=60, page_size_tokens=4)))
    b.start(Net(net), tok)
    want = [by_generate(net, tok.encode(t), 14) for t in TEXTS]
    for rs in (b.generate(three(14)), b.generate(three(14)), [b.run(r) for r in three(14)]):      # the second and third time prefixes are cached
        assert [r.token_ids for r in rs] == want and [r.generated_text for r in rs] == [tok.decode(w) for w in want]
    assert all(r.cached_tokens for r in rs[1:])
    b.unload()


def test_controls_mean_what_they_mean_in_transformers():
    net, tok = hf(hf_configs()["gpt2"]), load_tokenizer(folder())
    b = EagerBackend(EngineConfig(dtype="float64", max_model_len=128))
    b.start(Net(net), tok)
    ids = tok.encode(TEXTS[2])
    plain = by_generate(net, ids, 10)
    for ours, theirs in ((dict(repetition_penalty=1.7), dict(repetition_penalty=1.7)), (dict(no_repeat_ngram_size=2), dict(no_repeat_ngram_size=2)),
                         (dict(logit_bias={plain[0]: -100.0, 77: 3.0}), dict(sequence_bias={(plain[0],): -100.0, (77,): 3.0}))):
        assert b.run(GenerationRequest(prompt_token_ids=ids, max_new_tokens=10, **GREEDY, **ours)).token_ids == by_generate(net, ids, 10, **theirs)
    r = b.run(GenerationRequest(prompt_token_ids=ids, max_new_tokens=6, logprobs=3, prompt_logprobs=2, **GREEDY))
    with torch.inference_mode(): full = net(torch.tensor([ids + r.token_ids])).logits[0].log_softmax(-1)
    assert all(abs(p.logprob - float(full[len(ids) - 1 + i, p.token_id])) < 1e-9 and p.rank == 1 and len(p.top) == 3 for i, p in enumerate(r.logprobs))
    assert r.prompt_logprobs[0] is None and all(abs(p.logprob - float(full[i - 1, ids[i]])) < 1e-9 for i, p in enumerate(r.prompt_logprobs) if i)
    b.unload()


@pytest.mark.parametrize("backend", ["eager", "compiled"])
def test_a_crowd_on_eager_is_the_crowd_on_paged(backend):
    "Every setting of a request, seeds included, together in one batch: the same tokens, text and reasons, and log probabilities within rounding."
    def facts(r): return r.error, r.stats.generated_tokens, [(o.text, o.token_ids, o.finish_reason, o.stop_reason) for o in r.outputs]
    ask = lambda: [GenerationRequest(**{"top_p": 0.9, "top_k": 50} | kw) for kw in CROWD]
    with engine("paged", dtype="float64") as e: want = e.run_requests(ask())
    with engine(backend, dtype="float64", max_num_seqs=5, cache=CacheConfig(num_blocks=60, page_size_tokens=4)) as e:
        for _ in range(2):
            for kw, r, w in zip(CROWD, e.run_requests(ask()), want):
                assert facts(r) == facts(w), kw
                for a, b in zip(r.logprobs or [], w.logprobs or []): assert a.rank == b.rank and abs(a.logprob - b.logprob) < 1e-4
                for a, b in zip(r.prompt_logprobs or [], w.prompt_logprobs or []): assert a is b is None or abs(a.logprob - b.logprob) < 1e-4
        assert e.cache_stats()["total_hits"] > 0 and e.cache_stats()["active_pages"] == 0


def test_eager_reuses_kv_for_a_prefix():
    e, hits, computed = engine("eager"), [], []
    for question in ("first question", "second question"):
        before = e.backend.trace.counters.get("prefill_tokens", 0) if e.backend.is_loaded else 0
        r = e.run(TEXTS[2] + question, prefix_key="system", max_new_tokens=4, **GREEDY)
        hits.append(r.stats.cache_hit), computed.append(e.backend.trace.counters["prefill_tokens"] - before)
    assert hits == [False, True] and computed[1] == r.stats.prompt_tokens - r.cached_tokens < computed[0]
    assert e.run(TEXTS[2] + question, prefix_key="another", max_new_tokens=1).cached_tokens == 0
    assert e.cache_stats().keys() >= {"prefix_hit_rate", "paged_reads", "active_pages"} and e.cache_stats()["total_hits"] == 1
    e.unload()


def test_counts_are_of_real_tokens():
    "B12, C14: what ends early counts what it made, whoever is in the batch."
    for backend in ("paged", "eager", "compiled"):
        with engine(backend) as e:
            alone = e.run(TEXTS[0], max_new_tokens=30, **GREEDY)
            stop = alone.token_ids[4]
            n = alone.token_ids.index(stop) + 1
            rs = e.run_requests([GenerationRequest(TEXTS[0], max_new_tokens=30, stop_token_ids=[stop], **GREEDY), GenerationRequest(TEXTS[2], max_new_tokens=40, **GREEDY)])
        assert (rs[0].stats.generated_tokens, rs[0].finish_reason, rs[1].stats.generated_tokens) == (n, "stop", 40)


# One protocol


@pytest.mark.parametrize("backend", ["paged", "eager", "compiled", "upstream"])
def test_streams_and_asyncio_on_every_backend(backend):
    with our_server(folder()) as url:
        e = engine(backend, upstream_url=url) if backend == "upstream" else engine(backend)
        want = e.run(TEXTS[1], max_new_tokens=12, **GREEDY)
        assert want.error is None and want.stats.generated_tokens == 12 and 0 < want.stats.time_to_first_token_ms <= want.stats.total_latency_ms
        chunks = list(e.stream(TEXTS[1], max_new_tokens=12, **GREEDY))
        assert "".join(c.token for c in chunks) == want.generated_text and chunks[-1].is_final and chunks[-1].stats.generated_tokens == 12
        async def main():
            async def one(): return "".join([c.token async for c in e.astream(TEXTS[1], max_new_tokens=12, **GREEDY)])
            texts = await asyncio.gather(one(), one(), e.arun(TEXTS[1], max_new_tokens=12, **GREEDY))
            async for _ in e.astream(TEXTS[1], max_new_tokens=100, **GREEDY): break                       # leaves
            with pytest.raises(RequestError, match="top_p"): await e.arun("x", top_p=0)
            rs = await e.run_requests_continuous_async([GenerationRequest(""), *three(4)])
            return [*texts[:2], texts[2].generated_text], [r.error is None for r in rs]
        assert asyncio.run(main()) == ([want.generated_text] * 3, [False, True, True, True])
        s = e.stream(TEXTS[1], max_new_tokens=120, **GREEDY)
        next(s)
        s.close()
        rs = e.run_batch_continuous(TEXTS, max_new_tokens=3, **GREEDY)
        assert [r.prompt for r in rs] == TEXTS and all(r.stats.generated_tokens == 3 for r in rs)
        assert e.info()["backend"] == backend and e.info()["backend_reason"] == "as asked" and e.info()["loaded"]
        e.unload()
        assert not e.info()["loaded"]


@pytest.mark.parametrize("backend", ["eager", "compiled"])
def test_two_calls_and_the_attention_setting(backend):
    "cases.md B31."
    e = engine(backend).load()
    net = e.backend.model.net
    before, plain = net.config._attn_implementation, net(torch.tensor([[5, 6, 7]])).logits
    for _ in range(2): assert [r.stats.generated_tokens for r in e.run_batch(TEXTS, max_new_tokens=5, **GREEDY)] == [5, 5, 5]
    with inject("model.forward", RuntimeError("a cable was pulled"), times=3): assert any("a cable was pulled" in (r.error or "") for r in e.run_batch([t + "!" for t in TEXTS], max_new_tokens=5, **GREEDY))
    with torch.inference_mode(): assert net.config._attn_implementation == before and torch.equal(net(torch.tensor([[5, 6, 7]])).logits, plain)
    assert [r.error for r in e.run_batch(TEXTS, max_new_tokens=5, **GREEDY)] == [None] * 3
    e.unload()


@pytest.mark.parametrize("point", ["runner.launch", "ticket.harvest", "core.plan", "model.forward"])
def test_a_fault_in_the_model_reaches_every_waiter(point, caplog):
    e = engine("eager", cache=CacheConfig(num_blocks=120, enable_prefix_cache=False)).load()
    want = [r.token_ids for r in e.run_requests(three())]
    with inject(point, ValueError("a cable was pulled")), ThreadPoolExecutor(3) as pool:
        rs = list(pool.map(lambda r: e.backend.run(r), three()))
    assert any("a cable was pulled" in (r.error or "") for r in rs)
    assert [r.token_ids for r in e.run_requests(three())] == want
    e.unload()


def test_stop_strings_end_the_work():
    for backend in ("paged", "eager", "compiled"):
        with engine(backend) as e:
            text = e.run(TEXTS[1], max_new_tokens=30, **GREEDY).generated_text
            stop = text[6:9]
            r = e.run(TEXTS[1], max_new_tokens=30, stop_sequences=["", stop], **GREEDY)
            assert r.generated_text == text[:text.index(stop)] and r.finish_reason == "stop" and r.stats.generated_tokens < 30
            assert "".join(c.token for c in e.stream(TEXTS[1], max_new_tokens=30, stop_sequences=[stop], **GREEDY)) == r.generated_text
            assert e.run(TEXTS[1], max_new_tokens=30, stop_sequences=[""], **GREEDY).generated_text == text


def test_bad_words_in_both_spacings():
    with engine("eager") as e:
        plain = e.run(TEXTS[2], max_new_tokens=20, **GREEDY)
        word = next(w for i in plain.token_ids if (w := e.backend.tokenizer.token_text(i)).strip())
        assert word not in e.run(TEXTS[2], max_new_tokens=20, bad_words=[word.strip()], **GREEDY).generated_text.split()


def test_the_same_request_id_twice():
    with engine("eager") as e:
        rs = e.run_requests([GenerationRequest(t, request_id="X", max_new_tokens=4, **GREEDY) for t in TEXTS])
        assert [r.prompt for r in rs] == TEXTS and len({tuple(r.token_ids) for r in rs}) > 1


def test_a_prompt_that_is_too_long_is_refused_whole():
    for backend in ("eager", "compiled"):
        with engine(backend, max_model_len=32) as e:
            with pytest.raises(ContextLengthError, match="the context holds 32"): e.run("many words " * 50)
            assert e.run(TEXTS[0], max_new_tokens=None, **GREEDY).stats.generated_tokens == 32 - len(e.backend.tokenizer.encode(TEXTS[0]))


def test_defaults_are_the_same_streamed_or_not():
    with engine("eager", temperature=0.8, top_k=7, repetition_penalty=1.3) as e:
        a, b = e.run(TEXTS[1], seed=3, max_new_tokens=12), list(e.stream(TEXTS[1], seed=3, max_new_tokens=12))
        assert a.token_ids == [i for c in b for i in c.token_ids]


# Refusals


VALUES = {"force_words": ["x"], "prefix_allowed_tokens_fn": lambda i, ids: [5], "adapter": "mine", "speculative_num_assistant_tokens": 3, "speculative_confidence_threshold": 0.5,
    "logprobs": 0, "prompt_logprobs": 0, "no_repeat_ngram_size": 2}
SETTINGS = {"assistant_model_name": "demo", "tensor_parallel_size": 2, "pipeline_parallel_size": 2, "speculative_num_assistant_tokens": 3, "speculative_confidence_threshold": 0.5, "speculative_method": "lookup"}


@pytest.mark.parametrize("backend", ["paged", "eager", "compiled", "vllm", "upstream"])
def test_what_a_backend_lacks_is_refused_by_name(backend):
    kind, table = BACKENDS[Backend(backend)], capability_table()
    assert set(table) == set(FEATURES) and set(kind.lacks) <= set(FEATURES)
    with script_server() as (url, _), fake_vllm():
        kw = {"upstream_url": url} if backend == "upstream" else {}
        e = engine(backend, **kw).load()
        assert e.info()["not_available"] == kind.lacks and e.backend.capabilities()["stop_sequences"] == "yes"
        for name, why in kind.lacks.items():
            assert table[name][backend] == why != "yes"
            if name in VALUES:
                with pytest.raises(RequestError, match=f"^{name} is not available on the {backend} backend: ") as err: e.run("x", **{name: VALUES[name]})
                assert err.value.param == name and "\n" not in str(err.value)
            if name in SETTINGS:
                with pytest.raises(ConfigError, match=f"^{name} .* is not available on the {backend} backend: "): engine(backend, **kw, **{name: SETTINGS[name]}).load()
            if name in {m.value for m in QuantMode}:
                cfg = EngineConfig(model_name=folder(), backend=backend, **kw)
                cfg.quant.mode = name
                with pytest.raises(ConfigError, match=f"^quant mode '{name}' is not available on the {backend} backend: "): InferenceEngine(cfg).load()
        for name in VALUES.keys() - kind.lacks.keys():
            if name in ("logprobs", "prompt_logprobs", "no_repeat_ngram_size"): assert e.run("x", max_new_tokens=2, **{name: VALUES[name]}).error is None
        e.unload()


def test_what_is_missing_or_cannot_run_is_named(monkeypatch, tmp_path):
    import importlib.util
    from transformers import MambaConfig
    with pytest.raises(ConfigError, match="needs vLLM: pip install 'llminfer\\[vllm\\]'"): engine("vllm").load()
    cfg = EngineConfig(model_name=folder(), backend="eager")
    cfg.quant.mode = "nf4"
    with pytest.raises(ConfigError, match="needs bitsandbytes: pip install 'llminfer\\[quant\\]'"): InferenceEngine(cfg).load()
    with pytest.raises(ConfigError, match="mamba keeps LinearAttentionLayer instead of keys and values; use the vllm or upstream"): Net(hf(MambaConfig(vocab_size=512, hidden_size=64, num_hidden_layers=2)))
    with pytest.raises(ConfigError, match="transformers cannot load '/nowhere/model'"): InferenceEngine(EngineConfig(model_name="/nowhere/model", backend="eager", hf_local_files_only=True)).load()
    found = importlib.util.find_spec
    monkeypatch.setattr("llminfer.eager.find_spec", lambda name: None if name == "transformers" else found(name))
    with pytest.raises(ConfigError, match="needs transformers: pip install"): engine("eager").load()
    for backend in ("eager", "compiled", "vllm"):
        with pytest.raises(NotImplementedError, match=f"{backend} has no adapters"): engine(backend).backend.load_adapter("x")


def test_auto_takes_eager_where_the_family_is_not_known(tmp_path, caplog):
    hf(hf_configs()["gpt2"]).float().save_pretrained(tmp_path / "gpt2")
    (tmp_path / "gpt2" / "tokenizer.json").write_bytes(Path(folder(), "tokenizer.json").read_bytes())
    e = InferenceEngine(EngineConfig(model_name=str(tmp_path / "gpt2"), max_model_len=64))
    assert e.backend.name == "paged"                            # nothing is opened yet
    with caplog.at_level(logging.WARNING, "llminfer"): r = e.run("Hi", max_new_tokens=5, **GREEDY)
    assert r.error is None and len(r.token_ids) == 5 and len(caplog.records) == 1 and "GPT2LMHeadModel" in caplog.text
    assert e.info()["backend"] == "eager" and e.info()["backend_reason"].startswith("auto: ") and "not supported" in e.info()["backend_reason"]
    e.unload()
    with InferenceEngine(EngineConfig(model_name=folder())) as e: assert e.info()["backend_reason"] == "auto: our own engine knows the family"
    with pytest.raises(Exception, match="GPT2LMHeadModel"): InferenceEngine(EngineConfig(model_name=str(tmp_path / "gpt2"), backend="paged")).load()


def test_tokenizer_and_chat_template_of_another_model(tmp_path):
    (tmp_path / "t.jinja").write_text("{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}")
    for backend in ("paged", "eager"):
        with engine(backend, tokenizer=folder("opt"), chat_template=str(tmp_path / "t.jinja")) as e:
            assert e.backend.tokenizer.render_chat([{"role": "user", "content": "Hi"}]) == "<user>Hi"
            assert e.chat([{"role": "user", "content": "Hi"}], max_new_tokens=2, **GREEDY).error is None
            assert [c.index for c in e.chat_stream([{"role": "user", "content": "Hi"}], max_new_tokens=2, **GREEDY)][-1] == 0


# What is in a model's files means the same on paged, eager and compiled


def changed(path: Path, name: str = "", edit: Any = None, family: str = "llama") -> str:
    "A copy of the tiny model with one of its JSON files edited."
    shutil.copytree(folder(family), path)
    if name: (path / name).write_text(json.dumps(edit(json.loads((path / name).read_text()))))
    return str(path)


def said(backend: str, **kw: Any) -> Any:
    "Ids of a prompt, ids of a chat and the EOS ids; or what was raised."
    try:
        with InferenceEngine(EngineConfig(backend=Backend(backend), max_model_len=128, dtype="float64", cache=CacheConfig(num_blocks=60), **kw)) as e:
            r, c = e.run(TEXTS[1], max_new_tokens=24, temperature=0.0), e.chat([{"role": "user", "content": "Hi"}], max_new_tokens=8, temperature=0.0)
            b: Any = e.backend
            return r.token_ids, r.finish_reason, c.prompt_token_ids, c.token_ids, b.config.eos_token_ids, b.model_id
    except ValueError as e: return type(e).__name__, str(e)


def test_a_tensor_that_is_missing_or_misshapen_is_refused_and_nothing_printed(tmp_path, capfd):
    from safetensors.torch import load_file, save_file
    whole, name = load_file(Path(folder()) / "model.safetensors"), "model.layers.1.mlp.up_proj.weight"
    for n, tensors, said_ in ((0, {k: v for k, v in whole.items() if k != name}, f"tensor {name} is missing"), (1, whole | {name: whole[name][:-1].clone()}, f"tensor {name} has shape")):
        path = changed(tmp_path / str(n), "config.json", lambda d: d)
        save_file(tensors, Path(path) / "model.safetensors", metadata={"format": "pt"})
        for backend in ("paged", "eager", "compiled", "auto"):
            with pytest.raises(LoadError, match=said_) as e: InferenceEngine(EngineConfig(model_name=path, backend=backend)).load()
            assert "\n" not in str(e.value)
    hf(hf_configs()["gpt2"]).float().save_pretrained(tmp_path / "gpt2")                  # a family of eager's alone
    tensors = load_file(tmp_path / "gpt2" / "model.safetensors")
    save_file({k: v for k, v in tensors.items() if "h.1.mlp.c_fc.weight" not in k}, tmp_path / "gpt2" / "model.safetensors", metadata={"format": "pt"})
    capfd.readouterr()
    with pytest.raises(LoadError, match="tensor transformer.h.1.mlp.c_fc.weight is missing"): InferenceEngine(EngineConfig(model_name=str(tmp_path / "gpt2"))).load()
    assert capfd.readouterr() == ("", "")


def test_ends_templates_and_tokenizers_are_read_alike(tmp_path):
    plain = said("paged", model_name=folder())
    def named(*names): return lambda d: d | {"chat_template": [{"name": n, "template": n.upper() + d["chat_template"]} for n in names]}
    ends = changed(tmp_path / "ends", "config.json", lambda d: d | {"eos_token_id": plain[0][5]})
    Path(ends, "generation_config.json").write_text(json.dumps({"eos_token_id": [3]}))
    make_bundle(tmp_path / "bundle")
    cases = [dict(model_name=ends), dict(model_name=changed(tmp_path / "one", "tokenizer_config.json", named("tool_use"))), dict(model_name=changed(tmp_path / "two", "tokenizer_config.json", named("default", "rag")), chat_template="rag"),
        dict(model_name=folder(), chat_template="rag"), dict(model_name=folder(), tokenizer=folder("opt") + "/tokenizer.json"), dict(model_name=folder(), tokenizer=str(tmp_path / "bundle")), dict(model_name=folder(), tokenizer="/nowhere"),
        dict(model_name=str(tmp_path / "bundle")), dict(model_name=str(tmp_path / "bundle"), chat_template="exported")]
    got = [said("paged", **c) for c in cases]
    assert got[0][1] == "stop" and set(got[0][4]) >= {plain[0][5], 3} and got[1][2] != plain[2] != got[2][2] and got[3][0] == got[6][0] == "LoadError" and got[7][5] == "esme-tiny-chat"
    assert [said("eager", **c) for c in cases] == got and [said("compiled", **c) for c in cases[-2:]] == got[-2:]


# Compiled


def test_compiled_falls_back_aloud(caplog):
    with engine("eager") as e: want = [r.token_ids for r in e.run_requests(three())]
    with inject("compile", AssertionError("thread-local state"), times=1), engine("compiled") as e:
        assert [r.token_ids for r in e.run_requests(three())] == want                                    # in a batch
        assert "".join(c.token for c in e.stream(TEXTS[0], max_new_tokens=12, **GREEDY)) == e.run(TEXTS[0], max_new_tokens=12, **GREEDY).generated_text
        assert "torch.compile failed: AssertionError: thread-local state" in e.info()["steps"] and e.info()["counters"]["compile_fallbacks"] == 1
    assert [r.getMessage() for r in caplog.records if "torch.compile failed" in r.getMessage()] != [] and len(caplog.records) == 1
    with inject("compile", AssertionError("thread-local state"), times=99), engine("compiled", compile_fallback_to_eager=False) as e:
        assert all("thread-local state" in r.error for r in e.run_requests(three()))
        with pytest.raises(GenerationError, match="thread-local"): list(e.stream(TEXTS[0], **GREEDY))


def test_the_graph_switch_switches(monkeypatch, traced):
    "On a GPU a step is captured once a shape; here a stand-in captures nothing and replays by running again."
    with engine("compiled", compile_cudagraphs=False) as e:
        want = [r.token_ids for r in e.run_requests(three())]
        assert "no CUDA graphs" in e.info()["steps"] and e.backend.compiler.replay is None
    monkeypatch.setattr("llminfer.compiled.CudaCapture", PlainCapture)
    made = Compiler.__init__
    monkeypatch.setattr(Compiler, "__init__", lambda self, fn, cfg, device, count: made(self, fn, cfg, torch.device("cuda"), count))
    with engine("compiled") as e:
        assert [r.token_ids for r in e.run_requests(three())] == want
        n = len(e.backend.compiler.replay.graphs)
        assert e.run_requests(three())[0].error is None and len(e.backend.compiler.replay.graphs) == n and f"{n} CUDA graphs" in e.info()["steps"]
        assert n <= 2 * 4                                        # rows 2, 4 and widths 1, 2, 4, 8 blocks


# Upstream


def test_upstream_is_the_engine_behind_a_server():
    with our_server(folder()) as url, engine("paged") as local, engine("upstream", upstream_url=url) as e:
        kws = [dict(GREEDY), dict(temperature=1.0, seed=3, top_k=20, repetition_penalty=1.2), dict(GREEDY, stop_sequences=["e", "a"]), dict(temperature=0.9, seed=4, n=2, min_p=0.05)]
        for kw in kws:
            a, b = (x.run(TEXTS[2], max_new_tokens=16, **kw) for x in (local, e))
            assert b.error is None and [o.text for o in a.outputs] == [o.text for o in b.outputs] and [o.finish_reason for o in a.outputs] == [o.finish_reason for o in b.outputs], kw
            assert (a.stats.prompt_tokens, a.stats.generated_tokens) == (b.stats.prompt_tokens, b.stats.generated_tokens)
        assert e.run(TEXTS[2], max_new_tokens=1, **GREEDY).cached_tokens > 0
        talk = [{"role": "user", "content": "Hi there"}]
        assert e.chat(talk, max_new_tokens=8, **GREEDY).generated_text == local.chat(talk, max_new_tokens=8, **GREEDY).generated_text
        assert "".join(c.token for c in e.chat_stream(talk, max_new_tokens=8, **GREEDY)) == local.chat(talk, max_new_tokens=8, **GREEDY).generated_text
        rs = e.run_requests([GenerationRequest("x " * 999, max_new_tokens=2), *three(5)])
        assert "status 400" in rs[0].error and [r.generated_text for r in rs[1:]] == [r.generated_text for r in local.run_requests(three(5))]


def test_upstream_when_the_server_misbehaves():
    with script_server() as (url, s):
        e = engine("upstream", upstream_url=url, upstream_api_key="k")
        assert e.run("say abc", max_new_tokens=9).generated_text == "abc" and s.keys[-1] == "Bearer k" and s.bodies[-1]["model"] == "some-model"
        for what, said in (("status", "status 429: slow down"), ("error", "the GPU is gone"), ("cut", "before its end"), ("junk", "is no JSON"), ("html", "status 502: ")):
            r = e.run(f"{what} abc", max_new_tokens=9)
            assert said in r.error and url.split("//")[1] in r.error and r.finish_reason == "error", what
            with pytest.raises(GenerationError, match=said): list(e.stream(f"{what} abc", max_new_tokens=9))
        t = time.monotonic()
        with ThreadPoolExecutor(1) as pool:
            stream = e.stream("slow abcdefgh", max_new_tokens=9)
            first = next(stream)
            pool.submit(stream.close)
            assert first.token == "a" and list(stream) == [] and time.monotonic() - t < 5
        assert e.run("slow abcdefgh", max_new_tokens=9, deadline_s=0.2).finish_reason == "abort"
        assert s.wait_gone(2)                                    # the server saw both readers leave
        rs = e.run_batch([f"pause {i}" for i in "abcdefgh"], max_new_tokens=9)
        assert [r.generated_text for r in rs] == list("abcdefgh") and s.most >= 4
        r = e.run("say abc", max_new_tokens=9)
        assert (r.stats.prompt_tokens, r.stats.generated_tokens, r.cached_tokens, r.stats.cache_hit) == (7, 42, 3, True)
        with pytest.raises(RequestError, match="max_new_tokens is None"): e.run("x", max_new_tokens=None)
        with pytest.raises(RequestError, match="messages must be a list"): e.chat("hello")
        for bad, word in ((dict(upstream_url="ftp://x"), "must be an http"), (dict(upstream_url="http://127.0.0.1:9"), "no server answers at http://127.0.0.1:9/v1"), (dict(), "needs upstream_url")):
            with pytest.raises(ConfigError, match=word): engine("upstream", **bad).load()
        s.models = ["one", "two"]
        with pytest.raises(ConfigError, match="choose one of: one, two"): engine("upstream", upstream_url=url).load()
        assert InferenceEngine(EngineConfig(model_name="two", backend="upstream", upstream_url=url)).load().info()["upstream_model"] == "two"


def test_upstream_addresses_and_keys_are_checked_when_it_is_made():
    for url in ("http://127.0.0.1:abc", "http://127.0.0.1:99999", "http://[::1", "http://a b/", "http://ex\nample/", f"http://{'a' * 300}.org", f"http://{'a.' * 130}b", "http://", "http://h/v1?x=1", "http://h/\u00e9"):
        with pytest.raises(ConfigError, match="^upstream_url .* cannot be used: ") as e: engine("upstream", upstream_url=url)
        assert "\n" not in str(e.value) and len(str(e.value)) < 300
    for kw in (dict(upstream_url="http://me:secret@h/v1"), dict(upstream_url="me:secret@[::1"), dict(upstream_url="h", upstream_api_key="secret\nX-Admin: 1"), dict(upstream_url="h", upstream_api_key="secret\u4e2d")):
        with pytest.raises(ConfigError) as e: engine("upstream", **kw)
        assert "secret" not in str(e.value)
    b = UpstreamBackend(EngineConfig(upstream_url=" [::1]:80/api/ ", upstream_api_key="\tsecret\n"))
    assert (b.url, b.headers["Authorization"], b.tokenizer) == ("http://[::1]:80/api", "Bearer secret", None)


@pytest.mark.parametrize("event, said_", [("[1]", "an event that is no object: '[1]'"), ('"x"', "an event that is no object"), ('{"choices": "abc"}', "choices = 'abc', which is not a list of objects"), ('{"choices": [1]}', "choices = [1]"),
    ('{"choices": [{"index": "0", "text": "a"}]}', "index = '0', which is not a count"), ('{"choices": [{"text": 5}]}', "text = 5, which is not a text"), ('{"choices": [{"delta": {"content": ["a"]}}]}', "content = ['a']"),
    ('{"choices": [{"delta": "a"}]}', "delta = 'a', which is not an object"), ('{"choices": [{"token_ids": "abc"}]}', "token_ids = 'abc', which is not a list of integers"), ('{"choices": [{"finish_reason": 5}]}', "finish_reason = 5"),
    ('{"usage": [1]}', "usage = [1], which is not an object"), ('{"usage": {"completion_tokens": "x"}}', "completion_tokens = 'x', which is not a count"), ('{"usage": {"prompt_tokens_details": 3}}', "prompt_tokens_details = 3")])
def test_upstream_names_what_was_odd_in_an_event(event, said_, monkeypatch):
    with script_server() as (url, _):
        monkeypatch.setattr("llminfer.upstream.events", lambda lines: events(iter([b'data: {"choices": [{"text": "a"}]}\n', b"\n", f"data: {event}\n".encode(), b"\n"])))
        e = engine("upstream", upstream_url=url)
        r = e.run("say abc", max_new_tokens=9)
        assert f"the server sent {said_}" in r.error and (r.generated_text, r.finish_reason) == ("a", "error")
        with pytest.raises(GenerationError, match="the server sent "): list(e.stream("say abc", max_new_tokens=9))


# The contract's classes and its README


def test_old_queues_and_streamers():
    from transformers import AutoModelForCausalLM
    async def main():
        q = BatchQueue(EngineConfig(max_batch_size=3, batch_timeout_ms=50))
        late = asyncio.get_running_loop().call_later(0.01, lambda: asyncio.ensure_future(q.put(GenerationRequest("late"))))
        await q.put(GenerationRequest("early"))
        b = await q.get_batch()
        late.cancel()
        return b.prompts, len(b), q.qsize()
    assert asyncio.run(main()) == (["early", "late"], 2, 0)
    q = SyncBatchQueue(2, timeout_ms=1e5)
    for x in "abc": q.add(GenerationRequest(x))
    assert q.flush().prompts == ["a", "b"] and q.flush() is None and [b.prompts for b in q.flush_all()] == [["c"]]
    net, tok = AutoModelForCausalLM.from_pretrained(folder()), load_tokenizer(folder())
    ids = torch.tensor([tok.encode(TEXTS[1])])
    s = TokenStreamer(tok, GenerationRequest(TEXTS[1]))
    t = threading.Thread(target=lambda: net.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=9, min_new_tokens=9, pad_token_id=0, streamer=s.hf_streamer))
    t.start()
    chunks = list(s)
    t.join()
    with engine("eager") as e: assert "".join(c.token for c in chunks) == e.run(TEXTS[1], max_new_tokens=9, min_tokens=9, temperature=0.0).generated_text
    assert chunks[-1].is_final and chunks[-1].stats.generated_tokens == 9 and all(c.token_id >= 0 for c in chunks[:-1] if c.token_ids)
    m = MultiStreamer(["a"], timeout_s=0.01)
    with pytest.raises(TimeoutError, match="nothing came for 'a'"): list(m.stream("a"))
    with pytest.raises(KeyError, match="no request 'b'"): m.put("b", "x")


@pytest.mark.parametrize("paged", [True, False])
def test_eviction_orders_of_the_manager(paged):
    kv = lambda n, seed: tuple((torch.full((1, 2, n, 4), seed + i), torch.full((1, 2, n, 4), -seed - i)) for i in range(2))
    for order, left in (("lru", "ac"), ("fifo", "bc"), ("none", "ab")):
        m = KVCacheManager(CacheConfig(max_seqs=2, eviction=order, enable_paged_kv=paged, page_size_tokens=4, max_seq_len=16))
        m.update("a", kv(9, 1.0), 7), m.update("b", kv(3, 2.0), 3), m.get("a")
        try: m.update("c", kv(5, 3.0), 5)
        except CacheFullError: assert order == "none"
        assert "".join(x for x in "abc" if m.has(x)) == left
    e = m.get("a")
    assert (e.seq_len, e.paged, len(e.pages)) == (7, paged, 2 * paged) and all(torch.equal(x, y[..., :7, :]) for p, q in zip(e.past_kv, kv(9, 1.0)) for x, y in zip(p, q))
    with pytest.raises(ValueError, match="seq_len is 10"): m.update("x", kv(9, 1.0), 10)          # B21, whatever the form
    def churn(i):
        for j in range(60):
            m.update(f"{i}-{j % 3}", kv(1 + j % 9, float(i)), 1 + j % 9) if order != "none" else None
            if (got := m.get(f"{i}-{j % 3}")) is not None: assert float(got.past_kv[0][0].min()) == i
            m.store_prefix("shared", kv(4, 9.0), 4), m.lookup_prefix("shared"), m.free(f"{i}-{j % 2}"), m.stats()
    m, order = KVCacheManager(CacheConfig(max_seqs=4, page_size_tokens=4, max_seq_len=16, enable_paged_kv=paged)), "lru"
    with ThreadPoolExecutor(4) as pool: list(pool.map(churn, range(4)))
    for name in list(m.seqs): m.free(name)
    assert m.stats()["active_pages"] == 0 and m.stats()["prefix_entries"] == 1 and m.hit_rate == 1.0
    if paged: assert m.pages.pool.n_held == m.stats()["prefix_pages"] == 1


@pytest.mark.parametrize("backend", ["paged", "eager", "compiled"])
def test_the_readme_of_the_contract_runs(backend):
    "Every call that contract-library.md marks [R] (force_words, quantisation, drafts and adapters have their own tests where they exist)."
    from llminfer import CacheConfig, EngineConfig, GenerationRequest, InferenceEngine, QuantConfig
    from llminfer.config import Backend, QuantMode
    cfg = EngineConfig(model_name=folder(), backend=Backend(backend), quant=QuantConfig(mode=QuantMode.NONE, double_quant=True), cache=CacheConfig(enable_paged_kv=True, page_size_tokens=16), hf_revision=None,
        hf_token=None, hf_local_files_only=True, hf_trust_remote_code=False, hf_cache_dir=None, max_batch_size=8, batch_timeout_ms=20.0, compile_cudagraphs=True, compile_fallback_to_eager=True, max_model_len=160)
    with InferenceEngine(cfg) as engine:
        result = engine.run("Explain KV cache in one sentence.", max_new_tokens=16, temperature=0.2, top_p=0.9, top_k=50, repetition_penalty=1.1, no_repeat_ngram_size=3, stop_sequences=["\n\n"], bad_words=["foo", "bar"], seed=42)
        assert result.error is None and result.stats.total_latency_ms > 0 and result.stats.throughput_tokens_per_sec > 0 and result.full_text == result.prompt + result.generated_text
        assert engine.run("Explain KV cache in one sentence.", max_new_tokens=16, temperature=0.2, top_p=0.9, top_k=50, repetition_penalty=1.1, no_repeat_ngram_size=3, stop_sequences=["\n\n"], bad_words=["foo", "bar"], seed=42).generated_text == result.generated_text
        assert [r.error for r in engine.run_batch(["What is BERT?", "What is GPT?"], max_new_tokens=8)] == [None, None]
        assert len(engine.run_batch_continuous(["a", "b", "c"], max_new_tokens=4)) == 3
        for chunk in engine.stream("Tell me a story", max_new_tokens=8):
            if chunk.is_final: assert chunk.token == "" and chunk.stats.generated_tokens <= 8
        SYSTEM = "You are a helpful assistant. " * 3
        r1, r2 = (engine.run(SYSTEM + q, prefix_key="sys", max_new_tokens=4) for q in ("First?", "Second?"))
        assert (r1.stats.cache_hit, r2.stats.cache_hit) == (False, True) and engine.cache_stats()["total_hits"] >= 1
        assert KVCacheManager.hash_prefix(SYSTEM) == KVCacheManager.hash_prefix(SYSTEM) and len(KVCacheManager.hash_prefix("x")) == 16
        assert engine.list_adapters() == []
        engine.warmup()
        rs = engine.run_requests_continuous([GenerationRequest(prompt="a", max_new_tokens=3, ignore_eos=True), GenerationRequest(prompt="b", max_new_tokens=20, ignore_eos=True)])
        assert [r.stats.generated_tokens for r in rs] == [3, 20]
    assert engine.info()["loaded"] is False
