"""Every family against transformers, in the oracle and through the paged engine; everything a checkpoint may get wrong (cases B24, B25, B26)."""
from __future__ import annotations
import subprocess, sys, warnings
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any, cast
import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from llminfer import model as M
from llminfer.core import CoreConfig, generate, make_core
from llminfer.kernels import fused_available
from llminfer.model import EMBED, HEAD, Dense, ForcedModel, ModelConfig, ModelError, Packed, Transformer, Transposed, causal_attention, random_tensors
from llminfer.request import SamplingParams
from llminfer.runner import TorchRunner
from llminfer.splitkv import rope_tables
from llminfer.tracing import inject
from support.arrays import core_for, run
from support.hf import hf_config, hf_model

RATIOS = [(4, 2), (12, 12), (28, 4), (9, 3)]
LLAMA3 = dict(rope_type="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=64)
YARN = dict(rope_type="yarn", factor=8.0, original_max_position_embeddings=256)
WINDOWS = dict(use_sliding_window=True, sliding_window=8, max_window_layers=1)
# A line for each family, with what is its own switched on. Both the oracle and the engine are judged on it: add yours here.
FAMILY_CASES = [dict(arch="Llama", heads=(9, 3), tied=True, rope=LLAMA3), dict(arch="Llama", heads=(4, 2), extra=dict(attention_bias=True, mlp_bias=True)),
    dict(arch="Mistral", heads=(4, 2), extra=dict(sliding_window=6)), dict(arch="Qwen2", heads=(4, 2), tied=True, extra=WINDOWS), dict(arch="Qwen2", heads=(4, 1), rope=YARN),
    dict(arch="Qwen3", heads=(4, 2), tied=True, extra=WINDOWS), dict(arch="OPT", heads=(4, 4), tied=True), dict(arch="OPT", heads=(3, 3), extra=dict(enable_bias=False))]
CASES = FAMILY_CASES + [dict(arch=a, heads=h, tied=t) for a in ("Llama", "Qwen3") for h, t in zip(RATIOS, (True, False, True, False))] + [
    dict(arch="Llama", heads=(4, 2), rope=LLAMA3, length=700), dict(arch="Llama", heads=(4, 1), rope=dict(rope_type="linear", factor=4.0), length=300),
    dict(arch="Llama", heads=(4, 2), rope=YARN, length=1500), dict(arch="Qwen3", heads=(4, 2), rope=YARN | dict(beta_fast=8, beta_slow=2, truncate=False, attention_factor=1.3), length=700),
    dict(arch="Llama", heads=(4, 2), rope=YARN | dict(mscale=0.7, mscale_all_dim=1.1), length=300), dict(arch="Qwen2", heads=(4, 2), rope=YARN | dict(factor=None), length=300),
    dict(arch="Qwen3", heads=(4, 2), extra=dict(attention_bias=True)), dict(arch="Llama", heads=(4, 2), extra=dict(rope_theta=500000.0), length=1500),
    dict(arch="Mistral", heads=(4, 2), extra=dict(sliding_window=None)), dict(arch="Mistral", heads=(28, 4), extra=dict(sliding_window=100), length=1100), dict(arch="OPT", heads=(4, 4), length=512),
    dict(arch="Qwen3", heads=(4, 2), extra=dict(use_sliding_window=True, sliding_window=8, layer_types=["sliding_attention", "full_attention", "sliding_attention"]))]

def some_ids(n: int) -> torch.Tensor: return torch.randint(0, 97, (n,), generator=torch.Generator().manual_seed(n))

def max_diff(a: torch.Tensor, b: torch.Tensor) -> float: return (a.double() - b.double()).abs().max().item()

def name_of(case: dict) -> str:
    rope = [case["rope"]["rope_type"], *(k for k in case["rope"] if k not in YARN and k not in LLAMA3)] if "rope" in case else []
    return " ".join([case["arch"], "x".join(map(str, case["heads"])), *(["tied"] if case.get("tied") else []), *case.get("extra", {}), *rope, str(case.get("length", ""))]).strip()

@pytest.mark.parametrize("case", CASES, ids=name_of)
def test_logits_equal_transformers(case: dict) -> None:
    hc, n = hf_config(**case), case.get("length", 40)
    config = ModelConfig.from_hf(hc.to_dict())
    tensors, ids = random_tensors(config, seed=3), some_ids(n)
    hf = hf_model(hc, tensors)
    with torch.inference_mode(): theirs = hf(ids[None]).logits[0]
    assert theirs.std() > 0.3
    assert max_diff(Transformer.from_tensors(config, tensors).logits(ids), theirs) < 2e-5
    with torch.inference_mode(): theirs64 = hf.double()(ids[None, :200]).logits[0]
    ours64 = Transformer.from_tensors(config, tensors, torch.float64).logits(ids[:200])
    assert ours64.dtype == torch.float64 and max_diff(ours64, theirs64) < 2e-5   # transformers norms and rotates in fp32 even here

def test_old_and_new_config_keys_agree() -> None:
    new = hf_config("Llama", rope=LLAMA3, extra=dict(rope_theta=500000.0)).to_dict()
    old = {k: v for k, v in new.items() if k != "rope_parameters"} | dict(rope_theta=500000.0, rope_scaling=dict(LLAMA3))
    assert "rope_parameters" in new and ModelConfig.from_hf(new) == ModelConfig.from_hf(old)
    assert ModelConfig.from_hf(old).rope_scaling == LLAMA3 and ModelConfig.from_hf(old).rope_theta == 500000.0
    typed = old | dict(rope_scaling=dict(type="linear", factor=2))
    assert ModelConfig.from_hf(typed).rope_scaling == dict(rope_type="linear", factor=2.0)

def test_absent_keys_take_transformers_values() -> None:
    base: dict[str, Any] = dict(vocab_size=97, hidden_size=64, intermediate_size=48, num_hidden_layers=30, num_attention_heads=4)
    with pytest.raises(ModelError, match="4 query heads cannot share 32"): ModelConfig.from_hf(base | dict(architectures=["Qwen3ForCausalLM"]))   # as transformers: absent is 32, null is "as many"
    mi, opt = ModelConfig.from_hf(base | dict(model_type="mistral", num_attention_heads=8)), ModelConfig.from_hf(base | dict(model_type="opt", ffn_dim=48))
    assert (mi.n_kv_heads, mi.windows[0], mi.max_position_embeddings) == (8, 4096, 131072) and (opt.tie_embeddings, opt.eos_token_ids, opt.norm_eps, opt.n_kv_heads) == (True, (2,), 1e-5, 4)
    base |= dict(num_key_value_heads=None)
    ll, q = (ModelConfig.from_hf(base | dict(architectures=[a])) for a in ("LlamaForCausalLM", "Qwen3ForCausalLM"))
    assert (ll.n_kv_heads, ll.head_dim, ll.eos_token_ids, ll.bos_token_id, ll.max_position_embeddings, ll.tie_embeddings) == (4, 16, (2,), 1, 2048, False)
    assert (q.head_dim, q.eos_token_ids, q.bos_token_id, q.max_position_embeddings, q.qk_norm, set(q.windows)) == (128, (), None, 32768, True, {None})
    qw = ModelConfig.from_hf(base | dict(model_type="qwen3", use_sliding_window=True))
    assert qw.windows == (None,) * 28 + (4096,) * 2

@pytest.mark.parametrize("change, words", [
    (dict(architectures=["FalconForCausalLM"]), "'FalconForCausalLM' is not supported; supported: LlamaForCausalLM, MistralForCausalLM"),
    (dict(architectures=None, model_type="mamba"), "'mamba'"), (dict(architectures=None, model_type=["llama"]), "names no supported"),
    (dict(rope_scaling=dict(type="dynamic", factor=4)), "RoPE type 'dynamic' is not supported"), (dict(rope_scaling=dict(rope_type="longrope")), "RoPE type 'longrope' is not supported"),
    (dict(rope_scaling=dict(rope_type=["yarn"])), "RoPE type"), (dict(rope_scaling=dict(rope_type="yarn")), "RoPE type 'yarn' lacks 'factor'"),
    (dict(rope_scaling=YARN | dict(beta_slow=40)), "beta_slow must be below beta_fast"), (dict(rope_scaling=YARN | dict(truncate="no")), "truncate must be true or false"),
    (dict(rope_scaling=YARN | dict(attention_factor=0)), "attention_factor must be a number"), (dict(rope_scaling=YARN | dict(mscale="x")), "mscale must be a number"),
    (dict(rope_scaling=YARN | dict(factor=0.5)), "factor must be a number from 1"), (dict(rope_scaling=dict(type="linear", factor=float("nan"))), "got nan"),
    *((dict(rope_theta=v), f"rope_theta must be a number.* got {w}") for v, w in ((0, "0"), (-1e4, "-10000"), (float("nan"), "nan"), ("1e4", "'1e4'"), (True, "True"), (1e-9, "1e-09"))),
    (dict(rope_parameters=dict(rope_theta=0.0)), "rope_theta must be a number"), (dict(rope_scaling=dict(rope_type="llama3", factor=4)), "lacks 'low_freq_factor'"),
    (dict(rope_parameters=dict(full_attention=dict(rope_type="default"))), "flat table"), (dict(partial_rotary_factor=0.5), "partial_rotary_factor 0.5"),
    (dict(hidden_act="gelu"), "hidden_act 'gelu'"), (dict(num_key_value_heads=3), "4 query heads cannot share 3"), (dict(hidden_size=None), "lacks 'hidden_size'"),
    (dict(vocab_size="97"), "vocab_size must be an integer, got '97'"), (dict(num_attention_heads=0), "heads"), (dict(head_dim=7), "head_dim must be even"),
    (dict(layer_types=["sliding_attention"] * 3), "all layers are full_attention"), (dict(layer_types=7), "layer_types 7"), (dict(attention_bias=1), "attention_bias must be true or false")])
def test_configuration_refused_by_name(change: dict, words: str) -> None:
    with pytest.raises(ModelError, match=words): ModelConfig.from_hf(hf_config().to_dict() | dict(rope_parameters=None) | change)

@pytest.mark.parametrize("arch, change, words", [
    ("Mistral", dict(sliding_window=-4), "sliding_window"), ("Mistral", dict(layer_types=["full_attention"] * 3), "all layers are sliding_attention"), ("Mistral", dict(num_key_value_heads=3), "cannot share 3"),
    ("Qwen2", dict(layer_types=["linear_attention"] * 3), "layer type 'linear_attention'"), ("Qwen3", dict(layer_types=["full_attention"]), "3 layers but 1"), ("Qwen3", dict(head_dim=7), "head_dim must be even"),
    ("OPT", dict(do_layer_norm_before=False), "do_layer_norm_before false"), ("OPT", dict(word_embed_proj_dim=16), "word_embed_proj_dim 16"), ("OPT", dict(activation_function="gelu"), "activation_function 'gelu'"),
    ("OPT", dict(layer_norm_elementwise_affine=False), "layer_norm_elementwise_affine false"), ("OPT", dict(_remove_final_layer_norm=True), "_remove_final_layer_norm true"), ("OPT", dict(num_attention_heads=5), "not a multiple of 5")])
def test_options_of_a_family_refused_by_name(arch: str, change: dict, words: str) -> None:
    with pytest.raises(ModelError, match=words): ModelConfig.from_hf(hf_config(arch).to_dict() | change)

@pytest.mark.parametrize("H, G", [(4, 2), (12, 12), (28, 4), (32, 8), (48, 2), (9, 3)])
def test_b24_query_head_reads_its_kv_head(H: int, G: int) -> None:
    v = torch.arange(G).double().view(1, G, 1).expand(5, G, 8)
    out = causal_attention([None])(0, torch.randn(5, H, 8).double(), torch.randn(5, G, 8).double(), v)
    assert max_diff(out, (torch.arange(H) // (H // G)).double().view(1, H, 1).expand(5, H, 8)) < 1e-12

def test_b25_window_sees_exactly_its_tokens() -> None:
    z = torch.zeros(30, 1, 30)
    seen = causal_attention([8])(0, z, z, torch.eye(30)[:, None])[:, 0] > 0
    assert all(seen[i].nonzero()[:, 0].tolist() == list(range(max(0, i - 7), i + 1)) for i in range(30))

@pytest.fixture()
def tied() -> tuple[ModelConfig, dict[str, torch.Tensor]]:
    config = ModelConfig.from_hf(hf_config(tied=True).to_dict())
    return config, random_tensors(config)

def test_b26_tied_and_duplicated_heads(tied) -> None:
    config, tensors = tied
    untied, other, ids = ModelConfig.from_hf(hf_config().to_dict()), torch.randn(97, 32), some_ids(12)
    one = Transformer.from_tensors(config, tensors).logits(ids)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert torch.equal(one, Transformer.from_tensors(config, tensors | {HEAD: tensors[EMBED].clone()}).logits(ids))
        only_head = {(HEAD if n == EMBED else n): t for n, t in tensors.items()}
        assert torch.equal(one, Transformer.from_tensors(config, only_head).logits(ids))
    own = Transformer.from_tensors(untied, tensors | {HEAD: other}).logits(ids)
    assert max_diff(own, hf_model(hf_config(), tensors | {HEAD: other})(ids[None]).logits[0].detach()) < 2e-5 and max_diff(own, one) > 0.1
    with pytest.warns(UserWarning, match="lm_head.weight"): assert torch.equal(own, Transformer.from_tensors(config, tensors | {HEAD: other}).logits(ids))
    with pytest.raises(ModelError, match=r"lack 'lm_head.weight' \(the configuration says tie_word_embeddings is false\)"): Transformer.from_tensors(untied, tensors)

def test_tied_dense_head_is_held_once(tied) -> None:
    config, tensors = tied
    m = Transformer.from_tensors(config, tensors, torch.float64)
    assert m.nbytes == sum(t.numel() * 8 for t in tensors.values()) and isinstance(m.lm_head, Dense) and m.lm_head.weight is m.embed
    assert all(not t.is_meta for layer in m.layers for p in vars(layer).values() for t in [p if isinstance(p, torch.Tensor) else getattr(p, "weight", None)] if t is not None)

@pytest.mark.parametrize("fault, words", [
    (lambda t: t.pop("model.layers.2.mlp.down_proj.weight"), "lack 'model.layers.2.mlp.down_proj.weight'$"),
    (lambda t: [t.pop(n) for n in list(t) if ".1." in n], "lack 'model.layers.1.input_layernorm.weight' and 8 more"),
    (lambda t: t.update({"model.layers.3.mlp.up_proj.weight": torch.ones(1)}), "hold the unexpected 'model.layers.3.mlp.up_proj.weight'"),
    (lambda t: t.update({"model.layers.0.self_attn.k_proj.weight": torch.ones(32, 32)}), r"'model.layers.0.self_attn.k_proj.weight' has shape \(32, 32\), the configuration needs \(16, 32\)"),
    (lambda t: t.update({"model.norm.weight": torch.ones(32, device="meta")}), "'model.norm.weight' has no data"),
    (lambda t: t.update({"model.layers.0.self_attn.o_proj.weight": torch.ones(32, 32, dtype=torch.uint8)}), "'model.layers.0.self_attn.o_proj.weight' is torch.uint8")])
def test_faulty_tensors_are_named(tied, fault, words: str) -> None:
    config, tensors = tied
    fault(tensors)
    with pytest.raises(ModelError, match=words): Transformer.from_tensors(config, tensors)

class Lazy(Mapping[str, torch.Tensor]):
    def __init__(self, tensors: dict[str, torch.Tensor]):
        self.tensors = tensors
        self.reads: list[str] = []
    def __getitem__(self, name: str) -> torch.Tensor: self.reads.append(name); return self.tensors[name]
    def __contains__(self, name: object) -> bool: return name in self.tensors
    def __iter__(self) -> Iterator[str]: return iter(self.tensors)
    def __len__(self) -> int: return len(self.tensors)

def test_lazy_tensors_are_read_once_and_buffers_ignored(tied) -> None:
    config, tensors = tied
    lazy = Lazy(tensors | {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4)})
    Transformer.from_tensors(config, lazy)
    assert sorted(lazy.reads) == sorted(tensors)

def test_every_linear_gives_the_same_logits_and_gets_names(tied, monkeypatch) -> None:
    config, tensors = tied
    ids, names = some_ids(30), []
    def spy(weight, bias, name):
        names.append(name)
        return Dense(weight, bias)
    want = Transformer.from_tensors(config, tensors, linear=spy).logits(ids)
    assert names == [f"layers.{i}.{n}" for i in range(3) for n in ("qkv", "o", "gate_up", "down")] + ["lm_head"]
    for kind in (Transposed, Packed):
        m = Transformer.from_tensors(config, tensors, linear=kind)
        assert m.linear_kind == kind.kind and max_diff(m.logits(ids), want) < 1e-5 and max_diff(m.logits(ids[:1]), want[:1]) < 1e-5
    monkeypatch.setattr(M, "packed_works", lambda: False)
    assert Transformer.from_tensors(config, tensors).linear_kind == "gemm-transposed"
    assert Transformer.from_tensors(config, tensors, torch.bfloat16).linear_kind == "dense"

def test_a_missing_private_operation_is_noticed(monkeypatch) -> None:
    def gone(*args): raise AttributeError("no such operation")
    assert M.packed_works.__wrapped__() is True
    monkeypatch.setattr(Packed, "__call__", gone)
    assert M.packed_works.__wrapped__() is False
    monkeypatch.setattr(Packed, "__call__", lambda self, x: torch.zeros(x.shape[0], 48))
    assert M.packed_works.__wrapped__() is False

@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("arch", ["Llama", "Qwen2", "Qwen3", "OPT"])
def test_low_precision_errs_no_more_than_transformers(arch: str, dtype: torch.dtype) -> None:
    hc = hf_config(arch)
    config = ModelConfig.from_hf(hc.to_dict())
    tensors, ids = {n: t.to(dtype).float() for n, t in random_tensors(config).items()}, some_ids(1500)
    exact = Transformer.from_tensors(config, tensors).logits(ids)
    with torch.inference_mode(): theirs = hf_model(hc, tensors, dtype)(ids[None]).logits[0].float()
    ours = Transformer.from_tensors(config, tensors, dtype).logits(ids)
    assert ours.dtype == torch.float32
    assert (ours - exact).square().mean() <= 1.1 * (theirs - exact).square().mean()

class NoReads(TorchDispatchMode):
    "Raises where the device would be read by the host."
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        assert func.__name__.split(".")[0] not in {"_local_scalar_dense", "nonzero", "item", "equal", "is_nonzero"}, func
        return func(*args, **(kwargs or {}))

def test_forward_and_head_read_nothing(tied) -> None:
    config, tensors = tied
    pos = torch.arange(9)
    for m in (Transformer.from_tensors(config, tensors), Transformer.from_tensors(config, tensors, torch.float64),
              ForcedModel({5: [5, 6]}, vocab_size=97, nan_at={5: 3}, strict=True)):
        with NoReads(), torch.inference_mode(): m.head(m.forward(pos, pos, causal_attention(m.config.windows)))

def test_fault_point(tied) -> None:
    for m in (Transformer.from_tensors(*tied), ForcedModel()):
        with inject("model.forward", MemoryError("no room"), after=1), pytest.raises(MemoryError):
            m.logits([1]); m.logits([1])
        assert m.logits([1]).shape[0] == 1

class ListCache:
    "Keys and values of sequences in plain lists; feeds each new token with the past of its own sequence."
    def __init__(self, n: int):
        self.k: list[list[torch.Tensor]] = [[] for _ in range(n)]
        self.v: list[list[torch.Tensor]] = [[] for _ in range(n)]
        self.owners: list[int] = []
    def __call__(self, layer, q, k, v):
        out = []
        for t, s in enumerate(self.owners):
            self.k[s].append(k[t]); self.v[s].append(v[t])
            past = len(self.k[s])
            row = causal_attention([None])(0, q[t:t + 1].expand(past, -1, -1), torch.stack(self.k[s]), torch.stack(self.v[s]))
            out.append(row[-1])
        return torch.stack(out)

@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_forced_model_says_its_script_in_any_batch_and_chunks(dtype: torch.dtype) -> None:
    g = torch.Generator().manual_seed(0)
    scripts = {f: [f] + torch.randint(1, 90_000, (60,), generator=g).tolist() for f in (11, 80_001, 512)}
    m = ForcedModel(scripts, vocab_size=90_001, strict=True, dtype=dtype)
    cache, prompts = ListCache(3), [scripts[f][:n] for f, n in ((11, 5), (80_001, 1), (512, 30))]
    texts: list[list[int]] = [list(p) for p in prompts]
    said: list[list[int]] = [[] for _ in prompts]
    fed = [0, 0, 0]
    while min(map(len, said)) < 45:
        todo = [(s, i) for s in range(3) for i in range(fed[s], min(fed[s] + 7, len(texts[s])))]
        cache.owners = [s for s, _ in todo]
        ids, pos = torch.tensor([texts[s][i] for s, i in todo]), torch.tensor([i for _, i in todo])
        out = m.head(m.forward(ids, pos, cache))
        assert out.isfinite().all()
        for s in range(3):
            fed[s] = max(i for r, i in todo if r == s) + 1
            if fed[s] == len(texts[s]):
                said[s].append(int(out[max(j for j, (r, _) in enumerate(todo) if r == s)].argmax())); texts[s].append(said[s][-1])
    assert all(said[s][:45] == m.expected(prompts[s], 45) for s in range(3))

def test_forced_model_notices_wrong_kv() -> None:
    m = ForcedModel({7: [7] + list(range(20, 60))}, strict=True, nan_at={7: 31})
    ids, pos, full = torch.tensor([7] + list(range(20, 50))), torch.arange(31), causal_attention([None])
    run = lambda attend: m.head(m.forward(ids, pos, attend)).isnan().any(-1)
    assert run(full).tolist() == [False] * 30 + [True]                       # nan_at, and nothing else
    assert run(lambda i, q, k, v: full(i, q, k.roll(1, 0), v)).any()         # a key off by one slot
    assert run(lambda i, q, k, v: full(i, q, k.flip(1), v.flip(1)))[:-1].all() # heads exchanged
    other = torch.cat((ids[:9], ids[9:] + 1))
    stale = lambda i, q, k, v: full(i, q, k, M.written_values(other, pos, m.dtype))
    assert run(stale)[:-1].any()                                             # another sequence's values at the right positions
    dead = m.head(m.forward(ids, pos, lambda i, q, k, v: torch.zeros_like(q)))
    assert dead.isfinite().all() and (dead.argmax(-1) == 0).all()            # rows that are not live
    assert m.logits([9, 4]).isnan().any() and ForcedModel().logits([9, 4]).argmax(-1).tolist() == ForcedModel().expected([9], 2)
    with pytest.raises(ModelError, match="script id 300"): ForcedModel({1: [1, 300]})

def oracle_greedy(model: Transformer, prompt: Any, n: int) -> list[int]:
    ids = list(map(int, prompt))
    for _ in range(n): ids.append(int(model.logits(ids, last=1)[0].argmax()))
    return ids[len(ids) - n:]

ROWS = [dict(block=4, chunk=5, K=1, prefix_cache=True, preempt=False, mix="burst"), dict(block=3, chunk=7, K=4, prefix_cache=True, preempt=True, mix="staggered"),
        dict(block=16, chunk=None, K=8, prefix_cache=False, preempt=False, mix="sampled neighbours")]

@pytest.mark.parametrize("case", FAMILY_CASES, ids=name_of)
def test_every_family_through_the_paged_engine(case: dict) -> None:
    "Chunks, prefix cache, preemption, neighbours: in fp64 the oracle's tokens and transformers' too; positions and biases belong to each token, wherever its page is."
    hc = hf_config(**case)
    config = ModelConfig.from_hf(hc.to_dict())
    tensors = {n: t * 2 if t.ndim == 2 else t for n, t in random_tensors(config, seed=5).items()}   # wider margins
    model, rng = Transformer.from_tensors(config, tensors, torch.float64), np.random.default_rng(1)
    prompts = [rng.integers(0, 97, n).astype(np.int32) for n in (21, 6, 1, 33, 16)]
    prompts.append(np.concatenate((prompts[3][:24], prompts[1])))                                    # shares whole blocks with another
    want = [oracle_greedy(model, p, 14) for p in prompts]
    assert len({t for w in want for t in w}) > 10
    hf = hf_model(hc, tensors, torch.float64)
    with torch.inference_mode():
        for p, w in zip(prompts, want):
            theirs = hf(torch.tensor([[*map(int, p), *w[:-1]]])).logits[0, len(p) - 1:]
            assert theirs.argmax(-1).tolist() == w
    for row in ROWS: assert run(core_for(model, row, prompts, 14), row, prompts, 14) == want

def test_b25_window_through_pages() -> None:
    "Window 8: prompt 6, 8 new; then block 4 and a prompt of 21 in chunks of 5; keys outside the window are never read."
    config = ModelConfig.from_hf(hf_config("Mistral", extra=dict(sliding_window=8)).to_dict())
    model, greedy = Transformer.from_tensors(config, random_tensors(config, 9), torch.float64), SamplingParams(temperature=0, max_tokens=8)
    prompts = [some_ids(6).tolist(), some_ids(21).tolist()]
    want = [oracle_greedy(model, p, 8) for p in prompts]
    for chunk in (5, None):
        core = make_core(model, CoreConfig(block_size=4, n_blocks=40, max_num_seqs=2, max_model_len=32, prefill_chunk=chunk))
        assert generate(core, prompts, greedy) == want
    whole = Transformer.from_tensors(replace(config, windows=(None,) * 3, sliding_window=None), random_tensors(config, 9), torch.float64)
    assert [oracle_greedy(whole, p, 8) for p in prompts] != want        # the window matters to this text
    core = make_core(model, CoreConfig(block_size=4, n_blocks=40, max_num_seqs=1, max_model_len=40, prefix_cache=False))
    kv, ids, said = cast(TorchRunner, core.runner).kv, prompts[1], []
    core.add([0], np.asarray(ids, np.int32), [greedy])
    while core.has_work:
        for d in core.step(): said += d.tokens.tolist()
        if said and core.has_work:                                      # spoil what lies before the window of the next position
            table, p = core.scheduler.pool.table(0), len(ids) + len(said) - 1
            for i in range(max(0, p - 7)):
                for t in (*kv.k, *kv.v): t[table[i // 4], i % 4] = 1e30
    assert said == want[1]

def test_opt_ends_with_its_table() -> None:
    config = ModelConfig.from_hf(hf_config("OPT", extra=dict(max_position_embeddings=16)).to_dict())
    model = Transformer.from_tensors(config, random_tensors(config))
    assert model.logits(list(range(16))).isfinite().all() and model.rope is None and model.positions is not None and len(model.positions) == 18
    with pytest.raises(ModelError, match="17 tokens are more than the 16 learned positions"): model.logits(list(range(17)))
    out = generate(make_core(model, CoreConfig(block_size=4, n_blocks=20, max_num_seqs=2, max_model_len=16)), [[5, 6, 7]], SamplingParams(temperature=0, max_tokens=50))
    assert len(out[0]) == 13                                            # 16 positions, the last token included

def test_departures_keep_fused_kernels_away() -> None:
    opt, qwen2 = (ModelConfig.from_hf(hf_config(a, extra=dict(hidden_size=256)).to_dict()) for a in ("OPT", "Qwen2"))
    assert opt.departures == ("LayerNorm", "learned positions", "a relu feed-forward without a gate") and qwen2.departures == () and qwen2.attention_bias
    ok, why = fused_available(Transformer.from_tensors(opt, random_tensors(opt)), "cpu")
    assert not ok and "LayerNorm" in why and "learned positions" in why

def test_tables_of_the_kernels_carry_yarns_factor() -> None:
    rope = M.Rope(ModelConfig.from_hf(hf_config("Qwen2", rope=YARN).to_dict()), torch.float32, torch.device("cpu"))
    cos, sin = rope_tables(rope, 50)
    assert rope.factor > 1.2 and max_diff(cos.square() + sin.square(), torch.full_like(cos, rope.factor**2)) < 1e-5

def test_esme_is_qwen3_by_another_name() -> None:
    config = ModelConfig.from_hf(hf_config("Qwen3", tied=True).to_dict())
    esme, tensors = replace(config, family="esme"), random_tensors(config)
    assert M.tensor_shapes(esme) == M.tensor_shapes(config) and ModelConfig.from_hf(hf_config("Qwen3", tied=True).to_dict() | dict(architectures=None, model_type="esme")) == esme
    assert torch.equal(Transformer.from_tensors(esme, tensors).logits([1, 2, 3]), Transformer.from_tensors(config, tensors).logits([1, 2, 3]))

def test_last_rows_only_and_in_pieces(tied) -> None:
    config, tensors = tied
    model, ids = Transformer.from_tensors(config, tensors), some_ids(2500)
    full = model.logits(ids)
    assert full.shape == (2500, 97) and max_diff(model.logits(ids, last=3), full[-3:]) < 1e-5 and model.logits(ids[:2], last=9).shape == (2, 97)
    half = Transformer.from_tensors(config, tensors, torch.bfloat16)
    assert half.logits(ids).dtype == torch.float32 and half.logits(ids).shape == full.shape

MEMORY = """
import resource, torch
from llminfer.model import ModelConfig, Transformer, random_tensors
c = ModelConfig("mistral", 150_000, 16, 16, 2, 2, 2, 8, sliding_window=4096, windows=(4096, None), tie_embeddings=True, max_position_embeddings=8192)
m = Transformer.from_tensors(c, random_tensors(c), torch.float64)
m.logits(range(8))
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
assert m.logits(range(8192), last=1).shape == (1, 150_000)
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) // 1024)
"""

def test_the_end_of_a_long_text_needs_no_matrix_of_all_logits() -> None:
    "8,192 tokens of a vocabulary of 150,000: all logits would be 9,830 MB in fp64, one layer's scores 1,074 MB."
    r = subprocess.run([sys.executable, "-c", MEMORY], capture_output=True, text=True, timeout=300)
    assert r.returncode == 0, r.stderr
    assert int(r.stdout) < 400
