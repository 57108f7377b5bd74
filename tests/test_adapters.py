"""LoRA adapters: the file format, mixed batches against merged models in fp64, and loads and switches while requests run.

| case | here |
|---|---|
| B16 | `test_the_prefix_cache_tells_adapters_apart_by_content` |
| B29 | `test_what_is_active_is_what_acts`, `test_broken_adapters_change_nothing` |
| B30 | `test_a_running_request_keeps_its_adapter` |
| F15 | `test_broken_adapters_change_nothing` |
| F16 | `test_200_switches_under_traffic` |
"""
import json, shutil, threading, time
from functools import cache
from pathlib import Path
from typing import Any
from tempfile import mkdtemp
import pytest
import torch
from llminfer.adapter_books import Adapters
from llminfer.adapters import AdapterError, LoraLinear, Places, all_pairs, make_adapter, own_pairs, read_adapter
from llminfer.config import ConfigError
from llminfer.core import CoreConfig, EngineCore, generate, make_core
from llminfer.cuda_graphs import GraphRunner
from llminfer.formats import read_safetensors, write_safetensors
from llminfer.model import ForcedModel, Transformer
from llminfer.request import GenerationRequest, RequestError, SamplingParams
from llminfer.runner import NoSync, TorchRunner
from llminfer.tracing import inject
from support.checkpoints import edit_json, one_line
from support.engines import all_closed, counters, engine_around, paged, settle, tiny

FAMILIES = ("llama", "qwen2", "qwen3", "opt")
KINDS: dict[str, tuple[dict[str, Any], Any]] = {   # keys of adapter_config.json -> module's last name and layer -> (rank, scale), None: untouched; by hand, as PEFT reads them
    "all": (dict(targets="all-linear", r=4, alpha=6), lambda m, i: (4, 1.5)),
    "list": (dict(targets=["q_proj", "v_proj"], r=8, alpha=4, use_rslora=True), lambda m, i: (8, 4 / 8**0.5) if m in ("q_proj", "v_proj") else None),
    "regex": (dict(targets=r"model\..*(k_proj|out_proj|o_proj)", r=2, alpha=3, rank_pattern={"k_proj": 5}, alpha_pattern={r"layers\.1\.self_attn\.k_proj": 10}),
              lambda m, i: {"k_proj": (5, 2.0 if i == 1 else 0.6), "o_proj": (2, 1.5), "out_proj": (2, 1.5)}.get(m)),
    "layer": (dict(targets=["k_proj", "q_proj"], r=3, alpha=6, layers_to_transform=[1], layers_pattern="layers", exclude_modules=["k_proj"]),
              lambda m, i: (3, 2.0) if (m, i) == ("q_proj", 1) else None)}
NAMES = [None, *KINDS]


@pytest.fixture(autouse=True)
def closed():
    with all_closed(): yield


@cache
def adapters(family="llama"):
    config = tiny(family)[1].config
    return {n: make_adapter(Path(mkdtemp()) / n, config, i, **kw) for i, (n, (kw, _)) in enumerate(KINDS.items())}


@cache
def merged_model(family, name):
    "W + scale B A, from the raw files, in fp64."
    folder, model, _ = tiny(family)
    if name is None: return model
    w = {n: t.tensor(torch.float64) for n, t in read_safetensors(folder / "model.safetensors").items()}
    raw = {n: t.tensor(torch.float64) for n, t in read_safetensors(adapters(family)[name] / "adapter_model.safetensors").items()}
    n_pairs = 0
    for module in [n.removesuffix(".weight") for n in w if ".layers." in n and w[n].ndim == 2]:
        rule = KINDS[name][1](module.rsplit(".", 1)[-1], int(module.split(".layers.")[1].split(".")[0]))
        if rule is None: continue
        a, b = (raw[f"base_model.model.{module}.lora_{side}.weight"] for side in "AB")
        assert a.shape[0] == rule[0] == b.shape[1]
        w[f"{module}.weight"] += rule[1] * b @ a
        n_pairs += 1
    assert len(raw) == 2 * n_pairs > 0
    return Transformer.from_tensors(model.config, w, torch.float64)


@cache
def text_of(family, name, ids: tuple[int, ...], n: int) -> list[int]:
    out = list(ids)
    for _ in range(n): out.append(int(merged_model(family, name).logits(out)[-1].argmax()))
    return out[len(ids):]


def prompt(i: int, n: int = 9) -> tuple[int, ...]: return tuple((37 * i + 11 * j + j * j) % 400 + 3 for j in range(n))
def ask(ids, name, most=10, **kw):
    return GenerationRequest(prompt_token_ids=list(ids), adapter=name, max_new_tokens=most, **{"temperature": 0.0, "ignore_eos": True, **kw})


def engine(family="llama", load=(), **cfg):
    _, model, tok = tiny(family)
    e = engine_around(model, tok, **cfg)
    for n in load: paged(e).load_adapter(str(adapters(family)[n]), n, activate=False)
    return e


@pytest.mark.parametrize("family", FAMILIES)
def test_a_mixed_batch_equals_merged_models(family):
    "Every family (packed products with and without gate, biases), every kind of adapter; chunks of prompts, windows, preemption; the adapters really differ."
    jobs = [(prompt(i, 5 + 3 * i), NAMES[i % 5]) for i in range(10)]
    want = [text_of(family, n, ids, 24) for ids, n in jobs]
    assert len({tuple(text_of(family, n, jobs[0][0], 24)) for n in NAMES}) == 5
    for cfg in (dict(), dict(max_num_batched_tokens=8, block=4, max_num_seqs=6), dict(window_steps=4, max_in_flight=2, block=4, blocks=30, max_num_seqs=8, max_model_len=60)):
        e = engine(family, KINDS, **cfg)
        out = e.run_requests([ask(ids, n, 24) for ids, n in jobs])
        assert [o.error for o in out] == [None] * 10 and [o.token_ids for o in out] == want, cfg
        assert ("blocks" in cfg) == (counters(e).get("preemptions", 0) > 0)
        settle(e)


def test_logits_of_a_mixed_prefill_are_the_merged_ones():
    "Prompt scores, a place at a time: far below any argmax."
    e = engine(load=KINDS)
    out = e.run_requests([ask(prompt(7, 30), n, 1, prompt_logprobs=2) for n in NAMES])
    for n, o in zip(NAMES, out):
        ids = torch.tensor(prompt(7, 30))
        want = merged_model("llama", n).logits(ids).log_softmax(-1)[:-1].gather(1, ids[1:, None])[:, 0]
        got = torch.tensor([lp.logprob for lp in o.prompt_logprobs[1:]])
        assert (got - want).abs().max() < 1e-4 and o.error is None


def test_samples_of_one_prompt_share_its_adapter():
    e = engine(load=KINDS)
    out = e.run_requests([ask(prompt(3), n, 8, n=3, temperature=0.9, seed=5) for n in NAMES])
    alone = [e.run_requests([ask(prompt(3), n, 8, temperature=0.9, seed=5)])[0].token_ids for n in NAMES]
    assert [o.outputs[0].token_ids for o in out] == alone and all(len({tuple(s.token_ids) for s in o.outputs}) == 3 for o in out)


@pytest.mark.parametrize("seed", range(6))
def test_both_products_are_the_loop(seed):
    "Gathering and multiplying by all, against a place at a time; a neighbour's infinite values reach nobody."
    g = torch.Generator().manual_seed(seed)
    T, S, r, K, cuts = 1 + seed * 3, 1 << seed % 3, 2 + seed, 12, [(0, 8), (8, 12), (12, 16)][:1 + seed % 3]
    a, b = torch.randn(len(cuts), S, r, K, generator=g, dtype=torch.float64), torch.randn(S, r, cuts[-1][1], generator=g, dtype=torch.float64)
    x, slots = torch.randn(T, K, generator=g, dtype=torch.float64), torch.randint(0, S + 1, (T,), generator=g)
    x[0], slots[0] = float("inf"), 0
    want = torch.zeros(T, cuts[-1][1], dtype=torch.float64)
    for t in range(1, T):
        for p, (i, j) in enumerate(cuts):
            if (s := int(slots[t])): want[t, i:j] = (x[t] @ a[p, s - 1].T) @ b[s - 1, :, i:j]
    places = Places()
    places.n_slots = S
    places.seat(slots)
    for f, at in ((own_pairs, places.slots), (all_pairs, places.others(places.slots))):
        y = torch.zeros_like(want)
        f(y, x, a, b, cuts, at)
        assert torch.allclose(y, want, atol=1e-12), f
    base = LoraLinear(lambda v: v @ torch.ones(K, cuts[-1][1], dtype=torch.float64), K, cuts, places)
    assert torch.equal(base(x[1:]), x[1:] @ torch.ones(K, cuts[-1][1], dtype=torch.float64))          # no adapter has touched it


# what is refused

CONFIGS = {   # change of adapter_config.json -> words of the error
    "dora": (dict(use_dora=True), "use_dora True is not supported: DoRA"), "saved": (dict(modules_to_save=["lm_head"]), "modules_to_save ['lm_head'] is not supported"),
    "bias": (dict(bias="lora_only"), "bias 'lora_only' is not supported"), "kind": (dict(peft_type="IA3"), "peft_type 'IA3' is not supported"),
    "task": (dict(task_type="SEQ_CLS"), "task_type 'SEQ_CLS'"), "head": (dict(target_modules=["q_proj", "lm_head"]), "target module 'lm_head' cannot be adapted"),
    "embed": (dict(target_modules=["embed_tokens"]), "there are: q_proj, k_proj, v_proj, o_proj, gate_proj, up_proj, down_proj"),
    "none": (dict(target_modules=r"nothing\.here"), "match nothing in this model"), "regex": (dict(target_modules="(q_proj"), "is not a regular expression"),
    "pissa": (dict(init_lora_weights="pissa_niter_16"), "init_lora_weights 'pissa_niter_16'"), "unknown": (dict(use_new_trick=True), "use_new_trick True is not supported: this setting is not known"),
    "rank": (dict(r=0), "r must be a positive integer, got 0"), "alpha": (dict(lora_alpha="big"), "lora_alpha must be a number"), "table": (dict(rank_pattern={"q_proj": -1}), "rank_pattern must map"),
    "layers": (dict(layers_to_transform=[0, 9]), "layers_to_transform names layer 9, the model has 2"), "more": (dict(target_modules=["q_proj"]), "holds the unexpected"),
    "fewer": (dict(target_modules=["q_proj", "v_proj", "o_proj"]), "lacks 'base_model.model.model.layers.0.self_attn.o_proj.lora_A.weight' and 3 more"),
    "wider": (dict(r=16), "has shape (8, 64), rank 16 in this model needs (16, 64)"), "repeat": (dict(layer_replication=[[0, 2]]), "it repeats layers"), "fan": (dict(fan_in_fan_out=True), "fan_in_fan_out True")}
NAME = "base_model.model.model.layers.0.self_attn.q_proj.lora_{}.weight"
FILES = {   # change of the tensors -> words of the error
    "pair": (lambda t: t.pop(NAME.format("B")), f"lacks '{NAME.format('B')}'"), "nan": (lambda t: t[NAME.format("A")].fill_(float("nan")), "not finite in float64"),
    "magnitude": (lambda t: t.update({NAME.format("magnitude_vector"): torch.ones(64)}), "DoRA is not supported"),
    "saved": (lambda t: t.update({"base_model.model.lm_head.modules_to_save.weight": torch.ones(4, 4)}), "modules_to_save are not supported"),
    "shape": (lambda t: t.update({NAME.format("A"): torch.ones(8, 65)}), "has shape (8, 65), rank 8 in this model needs (8, 64)")}


def spoilt(tmp_path, config=None, tensors=None, name="list"):
    folder = tmp_path / "spoilt"
    shutil.copytree(adapters()[name], folder)
    if config: edit_json(folder / "adapter_config.json", **config)
    if tensors:
        t = {n: r.tensor() for n, r in read_safetensors(folder / "adapter_model.safetensors").items()}
        tensors(t)
        write_safetensors(folder / "adapter_model.safetensors", t)
    return folder


@pytest.mark.parametrize("case", [*CONFIGS, *(f"file-{n}" for n in FILES)])
def test_what_is_not_plain_lora_is_refused_by_name(tmp_path, case):
    _, model, _ = tiny()
    folder, words = (spoilt(tmp_path, tensors=FILES[case[5:]][0]), FILES[case[5:]][1]) if case.startswith("file-") else (spoilt(tmp_path, CONFIGS[case][0]), CONFIGS[case][1])
    with pytest.raises(AdapterError) as e: read_adapter(folder, model.config, model.dtype)
    one_line(e.value, words, "spoilt")
    assert e.value.param == "adapter_path"


def test_neutral_keys_of_peft_are_no_obstacle(tmp_path):
    "Every key that PEFT 0.21 writes for plain LoRA."
    more = dict(auto_mapping=None, base_model_name_or_path="org/model", revision=None, exclude_modules=None, lora_dropout=0.1, fan_in_fan_out=False, modules_to_save=None, init_lora_weights=False,
        layers_to_transform=None, layers_pattern=None, megatron_config=None, megatron_core="megatron.core", trainable_token_indices=None, loftq_config={}, eva_config=None, corda_config=None,
        lora_ga_config=None, use_dora=False, velora_config=None, alora_invocation_tokens=None, use_qalora=False, qalora_group_size=16, monteclora_config=None, layer_replication=None, lora_bias=False,
        target_parameters=None, use_bdlora=None, arrow_config=None, kasa_config=None, ensure_weight_tying=False, peft_version="0.21.2")
    _, model, _ = tiny()
    a, b = (read_adapter(f, model.config, model.dtype) for f in (spoilt(tmp_path, more), adapters()["list"]))
    assert a.digest == b.digest and a.base == "org/model" and a.pairs.keys() == b.pairs.keys()


@pytest.mark.parametrize("fault", ["missing", "rank", "base", "truncated"])
def test_broken_adapters_change_nothing(tmp_path, fault):
    "F15, B29: 10 of each kind are refused in a line, beside a running request, and the logits of everybody stay as they were, bit for bit."
    e = engine(load=["all"])
    score = lambda: [[t.logprob for t in e.run_requests([ask(prompt(1), n, 6, logprobs=3)])[0].logprobs] for n in (None, "all")]
    before = score()
    long = e.stream(prompt_token_ids=list(prompt(2)), adapter="all", max_new_tokens=100, temperature=0.0, ignore_eos=True)
    for i in range(10):
        folder = tmp_path / f"{fault}{i}"
        shutil.copytree(adapters("qwen3" if fault == "base" and i % 2 else "llama")[list(KINDS)[i % 3]], folder)
        config, weights = folder / "adapter_config.json", folder / "adapter_model.safetensors"
        if fault == "missing": (shutil.rmtree(folder) if i == 9 else (config, weights)[i % 2].unlink())
        elif fault == "rank": edit_json(config, r=json.loads(config.read_text())["r"] + 1 + i, rank_pattern={})
        elif fault == "base":
            make_adapter(folder, tiny("opt")[1].config, i) if i % 3 == 0 else edit_json(config, layers_to_transform=[2 + i], target_modules=["q_proj"])
        else: weights.write_bytes(weights.read_bytes()[:(weights.stat().st_size * (i + 1)) // 12])
        with pytest.raises(AdapterError) as err: e.load_adapter(str(folder), f"bad{i}")
        one_line(err.value, str(folder))
    assert "".join(c.token for c in long) and e.list_adapters() == ["all"] and score() == before
    assert paged(e).adapters.info()["slots"] == 1 and list(paged(e).adapters.taken) == [1]


def test_a_failed_copy_leaves_the_old_stacks(monkeypatch):
    "No memory for a larger stack: the error names the adapter, and everybody goes on."
    e = engine(load=["list"])
    want = e.run_requests([ask(prompt(1), "list")])[0].token_ids
    def full(*a): raise torch.cuda.OutOfMemoryError("no")
    monkeypatch.setattr(LoraLinear, "room", full)
    with pytest.raises(AdapterError, match="no memory for .* more bytes"): e.load_adapter(str(adapters()["all"]), "all")
    assert e.list_adapters() == ["list"] and e.run_requests([ask(prompt(1), "list")])[0].token_ids == want
    assert engine_threads_alive(e)


def engine_threads_alive(e): return paged(e).loop.alive


# the life of adapters

def test_what_is_active_is_what_acts():
    "B29: the reported active adapter is the one in the text, after every call; names and unknown names."
    e = engine()
    say = lambda **kw: e.run("", prompt_token_ids=list(prompt(4)), max_new_tokens=8, temperature=0.0, ignore_eos=True, **kw).token_ids
    def check(name):
        assert paged(e).adapters.active == name and say() == text_of("llama", name, prompt(4), 8)
    check(None)
    e.load_adapter(str(adapters()["all"]), "all"); check("all")
    e.load_adapter(str(adapters()["list"]), "list"); check("list")
    e.set_adapter("all"); check("all")
    assert say(adapter="list") == text_of("llama", "list", prompt(4), 8) and say(adapter="__base__") == text_of("llama", None, prompt(4), 8)
    e.unload_adapter("list"); check("all")
    with pytest.raises(AdapterError, match="there is no adapter 'list'; loaded: all") as err: say(adapter="list")
    assert (err.value.param, err.value.code) == ("adapter", "adapter_not_found")
    with pytest.raises(AdapterError, match="there is no adapter 'x'"): e.set_adapter("x")
    with pytest.raises(AdapterError, match="an adapter named 'all' is loaded"): e.load_adapter(str(adapters()["list"]), "all")
    for bad in ("", "__base__", 3):
        with pytest.raises(AdapterError, match="an adapter's name must be a text"): e.load_adapter(str(adapters()["list"]), bad)
    check("all")
    e.unload_adapter(); check(None)
    with pytest.raises(AdapterError, match="no adapter is active"): e.unload_adapter()
    assert e.list_adapters() == [] and paged(e).adapters.info()["bytes"] == 0 and paged(e).adapters.stacks.n_slots == 0


def test_the_prefix_cache_tells_adapters_apart_by_content():
    "B16: base, A, B, base with one prompt; a name that comes back with other content; the same content under another name may share."
    e, ids = engine(block=4), prompt(9, 64)
    say = lambda name, hit: [(r := e.run_requests([ask(ids, name, 6)])[0]).token_ids, r.stats.cached_tokens] == [want[name], hit]
    want = {"A": text_of("llama", "all", ids, 6), "B": text_of("llama", "list", ids, 6), None: text_of("llama", None, ids, 6)}
    load = lambda kind, name: paged(e).load_adapter(str(adapters()[kind]), name, activate=False)
    load("all", "A"); load("list", "B")
    assert say(None, 0) and say("A", 0) and say("B", 0) and say(None, 60) and say("A", 60)
    e.unload_adapter("A"); e.unload_adapter("B")
    load("list", "A"); load("all", "B")                                          # the names change hands
    want["A"], want["B"] = want["B"], want["A"]
    assert say("A", 60) and say("B", 60)                                        # by content, so both still hit
    e.unload_adapter("A"); load("regex", "A")
    want["A"] = text_of("llama", "regex", ids, 6)
    assert say("A", 0) and say("A", 60) and say(None, 60)
    r = e.run_requests([ask(ids, "A", 6, prefix_key="salt")])[0]
    assert r.stats.cached_tokens == 0 and r.token_ids == want["A"]


def test_a_running_request_keeps_its_adapter():
    "B30: set another, load a broken one, replace it, unload it, all while it runs: the text is that of an undisturbed run; unload waits; the next one gets a 404."
    e = engine(load=["all", "list"])
    with inject("core.plan", lambda: time.sleep(0.003), times=10**9):
        s = e.stream(prompt_token_ids=list(prompt(2)), adapter="all", max_new_tokens=64, temperature=0.0, ignore_eos=True)
        got = [i for _ in range(8) for i in next(s).token_ids]
        e.set_adapter("list")
        with pytest.raises(AdapterError): e.load_adapter("/nowhere", "C")
        paged(e).load_adapter(str(adapters()["regex"]), "all", activate=False, replace=True)
        assert e.run_requests([ask(prompt(5), "all")])[0].token_ids == text_of("llama", "regex", prompt(5), 10)
        t = e.stream(prompt_token_ids=list(prompt(3)), adapter="list", max_new_tokens=40, temperature=0.0, ignore_eos=True)
        next(t)
        waiter = threading.Thread(target=e.unload_adapter, args=("list",))
        waiter.start()
        end = time.monotonic() + 5
        while "list" in e.list_adapters() and time.monotonic() < end: time.sleep(0.001)
        assert waiter.is_alive() and paged(e).adapters.active is None
        with pytest.raises(RequestError, match="there is no adapter 'list'"): e.run("x", adapter="list")
        rest = [i for c in t for i in c.token_ids]
        waiter.join(10)
        assert not waiter.is_alive() and rest == text_of("llama", "list", prompt(3), 40)[1:]
        got += [i for c in s for i in c.token_ids]
    assert got == text_of("llama", "all", prompt(2), 64)
    assert e.list_adapters() == ["all"] and len(paged(e).adapters.taken) == 1
    settle(e)


def test_200_switches_under_traffic():
    "F16: three threads ask 300 requests of three adapters and the base, while another loads, replaces and unloads 200 times: no wrong token."
    e = engine(load=["all", "list", "regex"], max_num_seqs=8, block=4)
    books, kinds, wrong, done = paged(e).adapters, ["all", "list", "regex"], [], threading.Event()
    jobs = [(prompt(i % 12, 6), [None, *kinds][i % 4]) for i in range(300)]
    def ask_all(mine):
        for ids, name in mine:
            r = e.run_requests([ask(ids, name, 5, n=1 + (ids[0] % 2))])[0]
            if r.error is not None or any(o.token_ids != text_of("llama", name, ids, 5) for o in r.outputs): wrong.append((name, r.error))
    for ids, name in jobs[:48]: text_of("llama", name, ids, 5)
    def switch():
        n = 0
        while n < 200:
            name = f"temp{n % 3}"
            paged(e).load_adapter(str(adapters()[list(KINDS)[n % 4]]), name, activate=False)
            paged(e).load_adapter(str(adapters()[kinds[n % 3]]), kinds[n % 3], activate=False, replace=True)
            e.unload_adapter(name)
            n += 3
        done.set()
    threads = [threading.Thread(target=ask_all, args=(jobs[i::3],)) for i in range(3)] + [threading.Thread(target=switch)]
    for t in threads: t.start()
    for t in threads: t.join(120)
    assert not any(t.is_alive() for t in threads) and done.is_set() and not wrong, wrong[:3]
    assert e.list_adapters() == kinds and len(books.taken) == 3 and not any(x.users for x in books.taken.values())
    settle(e)


def test_an_adapter_outlives_a_fault_but_not_its_model():
    "A core that is built anew gets its twin; what failed gave its adapter back; unload and load again: none is loaded."
    e = engine(load=["all"])
    with inject("core.plan", RuntimeError("boom")):
        r = e.run_requests([ask(prompt(1), "all")])[0]
    assert "boom" in r.error and paged(e).adapters.taken[1].users == 0
    assert e.run_requests([ask(prompt(1), "all")])[0].token_ids == text_of("llama", "all", prompt(1), 10)
    handle = paged(e).submit(ask(prompt(1), "all", 100))
    handle.cancel()
    assert handle.finished.wait(10) and paged(e).adapters.taken[1].users == 0
    with pytest.raises(RequestError): paged(e).submit(ask(prompt(1), "all", logit_bias={10**6: 1.0}))
    assert paged(e).adapters.taken[1].users == 0
    e.unload()
    assert e.list_adapters() == []


def test_slots_are_bounded_and_reused():
    model = tiny()[1]
    books, a = Adapters(model, most=3), adapters()
    for n in ("all", "list", "regex"): books.load(a[n], n)
    with pytest.raises(AdapterError, match="all 3 adapter slots are taken: unload one first"): books.load(a["layer"], "layer")
    lease, again = books.lease("list"), books.lease("list")
    with pytest.raises(TimeoutError, match="'list' gets no new requests and is freed when 2 running ones have ended"): books.unload("list", 0)
    with pytest.raises(AdapterError, match="all 3 adapter slots"): books.load(a["layer"], "layer")
    for _ in range(2): lease.release()                                     # a second time does nothing
    assert len(books.taken) == 3
    again.release()
    assert books.load(a["layer"], "layer").slot == 2 and books.stacks.n_slots == 4
    forced = Adapters(ForcedModel())
    with pytest.raises(AdapterError, match="a ForcedModel has no linear layers to adapt"): forced.load(a["all"])
    assert forced.lease(None).slot == 0 and "ForcedModel" in forced._repr_html_() and "slot 2: layer" in books._repr_html_()


# what runs in a window

class Watched(TorchRunner):
    "Counts windows of the two kinds; every launch is free of reads."
    def launch(self, plan):
        if not hasattr(self, "kinds"): self.kinds = []
        self.kinds.append((plan.variant.lora, bool(plan.prefill)))
        with NoSync(): return super().launch(plan)


@pytest.mark.parametrize("runner", [Watched, GraphRunner])
def test_windows_without_adapters_never_meet_one(runner):
    "Base-only windows run the base program; mixed ones read nothing from the device; steps are captured under keys of their own and dropped when stacks move."
    model, a = tiny()[1], adapters()
    books = Adapters(model)
    cfg = CoreConfig(n_blocks=64, block_size=4, max_num_seqs=4, max_model_len=64, window_steps=4, max_in_flight=2, max_num_batched_tokens=8)
    core: EngineCore = books.attach(make_core(model, cfg, runner=runner))
    seen = []
    base, twin = core.runner.program, core.runner.program.twin
    for p, label in ((base, "base"), (twin, "lora")):
        for f in ("decode", "prefill"): setattr(p, f, (lambda real, label: lambda *args, **kw: (seen.append(label), real(*args, **kw))[1])(getattr(p, f), label))
    greedy = SamplingParams(temperature=0, max_tokens=10)
    def go(names):
        seen.clear()
        for i, n in enumerate(names): core.add([core.next_id + i], list(prompt(i, 13)), [greedy], lora=books.lease(n).slot, key=books.lease(n).key(None))
        first, out = core.next_id, {}
        core.next_id += len(names)
        while core.has_work:
            for d in core.step(): out.setdefault(d.seq_id, []).extend(d.tokens.tolist())
        assert [out[first + i] for i in range(len(names))] == [text_of("llama", n, prompt(i, 13), 10) for i, n in enumerate(names)]
        return set(seen)
    assert go([None, None]) == {"base"}
    books.load(a["list"], "list", activate=False)
    assert go([None]) == {"base"} and go(["list", "list", None]) >= {"lora"}
    assert go([None, None]) == {"base"}
    if runner is GraphRunner:
        assert sum(k.variant.lora for k in core.runner.graphs) > 0
        books.load(a["all"], "all", activate=False)                                        # another width and more products: old steps read stacks that are gone
        assert not any(k.variant.lora for k in core.runner.graphs) and any(not k.variant.lora for k in core.runner.graphs)
    else: books.load(a["all"], "all", activate=False)
    assert go(["all", None, "list", "all"]) >= {"lora"}
    assert generate(core, [prompt(0, 13)], greedy) == [text_of("llama", None, prompt(0, 13), 10)]


@pytest.mark.parametrize("path, words", [("", "it is empty"), ("~nosuch/x", "home directory"), ("a/" * 2500, "too long"), (None, "no path")])
def test_what_is_no_path(path, words):
    with pytest.raises(AdapterError, match=words): engine().load_adapter(path)

def test_layers_patterns_with_groups(tmp_path):
    "A group of the pattern's own is not the layer's number."
    c = tiny()[1].config
    for pattern in ("(la)yers", "model|layers"):
        read = read_adapter(make_adapter(tmp_path / "a", c, targets=["q_proj"], layers_to_transform=[0], layers_pattern=pattern), c, torch.float32)
        assert list(read.pairs) == ["model.layers.0.self_attn.q_proj"]


# the server

@pytest.fixture
def lora_dir(tmp_path):
    for n in KINDS: shutil.copytree(adapters()[n], tmp_path / "loras" / n)
    shutil.copytree(adapters()["all"], tmp_path / "outside")
    (tmp_path / "loras" / "link").symlink_to(tmp_path / "outside")
    (tmp_path / "loras" / "broken").mkdir()
    return tmp_path / "loras"


def test_clients_choose_load_and_unload(lora_dir):
    "A name as `model`; the two endpoints and the folder they cannot leave; what is listed; errors by name."
    from fastapi.testclient import TestClient
    from llminfer.api import create_openai_app
    e = engine()
    with TestClient(create_openai_app(e, served_model_name="base", lora_modules={"first": str(adapters()["list"])}, lora_dir=lora_dir)) as c:
        def say(name, ids=prompt(4)): return c.post("/v1/completions", json=dict(model=name, prompt=list(ids), max_tokens=6, temperature=0, ignore_eos=True, return_token_ids=True))
        def text(name): return [t["choices"][0]["text"] for t in [say(name).json()]][0]
        def post(path, **kw): return c.post(f"/v1/{path}_lora_adapter", json=kw)
        base = text("base")
        assert text("first") != base
        assert post("load", lora_name="second", lora_path="all").status_code == 200 and text("second") not in (base, text("first"))
        cards = {m["id"]: m for m in c.get("/v1/models").json()["data"]}
        assert list(cards) == ["base", "first", "second"] and cards["second"]["parent"] == "base" and cards["second"]["root"].endswith("/loras/all") and cards["base"]["parent"] is None
        assert c.get("/v1/models/second").json()["id"] == "second"
        for kw, status, param, words in ((dict(lora_name="x", lora_path="../outside"), 400, "lora_path", "does not lie in"), (dict(lora_name="x", lora_path=str(lora_dir.parent / "outside")), 400, "lora_path", "does not lie in"),
                (dict(lora_name="x", lora_path="link"), 400, "lora_path", "does not lie in"), (dict(lora_name="x", lora_path="broken"), 400, "lora_path", "missing"),
                (dict(lora_name="second", lora_path="list"), 400, "lora_name", "is loaded"), (dict(lora_name="base", lora_path="list"), 400, "lora_name", "names the model itself"),
                (dict(lora_name="x"), 400, "lora_path", ""), (dict(lora_name="x", lora_path="a/" * 2500), 400, "lora_path", "too long")):
            r = post("load", **kw)
            assert (r.status_code, r.json()["error"]["param"]) == (status, param) and words in r.json()["error"]["message"], r.text
        assert post("load", lora_name="second", lora_path="list", load_inplace=True).status_code == 200 and text("second") == text("first")
        assert post("unload", lora_name="second").status_code == 200
        assert say("second").status_code == 404 and say("second").json()["error"]["code"] == "model_not_found"
        r = post("unload", lora_name="second")
        assert r.status_code == 404 and r.json()["error"]["code"] == "adapter_not_found" and text("base") == base
    for modules, words in (({"a": str(lora_dir / "broken")}, "'a': .*missing"), ({"base": str(lora_dir / "all")}, "'base' is the name of the model itself")):
        with pytest.raises(ConfigError, match=words), TestClient(create_openai_app(engine(), served_model_name="base", lora_modules=modules)): pass
    with TestClient(create_openai_app(e)) as c:
        assert c.post("/v1/load_lora_adapter", json=dict(lora_name="x", lora_path="all")).status_code == 404


def test_an_engine_process_has_adapters_and_gets_them_again(lora_dir):
    "Load, ask, unload through the pipe; errors come back as they are; a crashed process is followed by one with the same adapters."
    from llminfer.config import EngineConfig
    from llminfer.engine_process import ProcessHandle
    folder = tiny()[0]
    h = ProcessHandle(EngineConfig(model_name=str(folder), device="cpu", dtype="float64", max_model_len=64, seed=0))
    def say(name):
        done, got = threading.Event(), []
        def tell(c):
            got.extend(c.token_ids)
            if c.is_final: done.set()
        h.submit(h.prepare(ask(prompt(4), name, 6, stream=True)), tell)
        assert done.wait(60)
        return got
    h.start()
    try:
        h.adapt("load", "a", str(lora_dir / "all"))
        assert say("a") == text_of("llama", "all", prompt(4), 6) and say(None) == text_of("llama", None, prompt(4), 6) and list(h.adapters()) == ["a"]
        with pytest.raises(AdapterError, match="an adapter named 'a' is loaded"): h.adapt("load", "a", str(lora_dir / "all"))
        with pytest.raises(AdapterError, match="missing"): h.adapt("load", "b", str(lora_dir / "broken"))
        with pytest.raises(AdapterError, match="there is no adapter 'b'"): h.prepare(ask(prompt(4), "b"))
        h.child.proc.kill()
        end = time.monotonic() + 20
        while h.alive and time.monotonic() < end: time.sleep(0.01)
        h.start()
        assert say("a") == text_of("llama", "all", prompt(4), 6)
        h.adapt("unload", "a")
        assert h.adapters() == {}
    finally: h.close()


def test_the_command_line_takes_an_adapter():
    from typer.testing import CliRunner
    from llminfer.cli import app
    args = ["run", "hello", "--model", str(tiny()[0]), "--dtype", "float64", "--temp", "0", "--max-tokens", "8", "--no-chat", "--json", "--device", "cpu"]
    texts = []
    for more in ([], ["--adapter", str(adapters()["all"])], ["--adapter", str(adapters()["list"]), "--adapter-name", "x"]):
        r = CliRunner().invoke(app, args + more)
        assert r.exit_code == 0, r.output
        texts.append(r.stdout)
    assert len({json.dumps(json.loads(t).get("generated_text", t)) for t in texts}) == 3
    r = CliRunner().invoke(app, [*args, "--adapter", "/nowhere/at/all"])
    assert r.exit_code == 2 and "/nowhere/at/all" in r.output and "Traceback" not in r.output
