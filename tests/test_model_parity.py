"""The model against transformers, and everything a checkpoint may get wrong (cases B24, B25, B26)."""
from __future__ import annotations
import warnings
from collections.abc import Iterator, Mapping
from typing import Any
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM
from llminfer import model as M
from llminfer.model import EMBED, HEAD, Dense, ForcedModel, ModelConfig, ModelError, Packed, Transformer, Transposed, causal_attention, random_tensors
from llminfer.tracing import inject

RATIOS = [(4, 2), (12, 12), (28, 4), (9, 3)]
LLAMA3 = dict(rope_type="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=64)
CASES = [dict(arch=a, heads=h, tied=t) for a in ("Llama", "Qwen3") for h, t in zip(RATIOS, (True, False, True, False))] + [
    dict(arch="Llama", heads=(4, 2), rope=LLAMA3, length=700), dict(arch="Llama", heads=(4, 1), rope=dict(rope_type="linear", factor=4.0), length=300),
    dict(arch="Llama", heads=(4, 2), extra=dict(attention_bias=True, mlp_bias=True)), dict(arch="Qwen3", heads=(4, 2), extra=dict(attention_bias=True)),
    dict(arch="Llama", heads=(4, 2), extra=dict(rope_theta=500000.0), length=1500),
    dict(arch="Qwen3", heads=(4, 2), tied=True, extra=dict(use_sliding_window=True, sliding_window=8, max_window_layers=1), length=40),
    dict(arch="Qwen3", heads=(4, 2), extra=dict(use_sliding_window=True, sliding_window=8, layer_types=["sliding_attention", "full_attention", "sliding_attention"]))]

def hf_config(arch: str = "Llama", heads: tuple[int, int] = (4, 2), tied: bool = False, rope: dict | None = None, extra: dict | None = None, length: int = 40):
    kw: dict[str, Any] = dict(vocab_size=97, hidden_size=heads[0] * 8, intermediate_size=48, num_hidden_layers=3, num_attention_heads=heads[0], num_key_value_heads=heads[1],
        head_dim=8 if arch == "Llama" else 16, max_position_embeddings=2048, tie_word_embeddings=tied, architectures=[f"{arch}ForCausalLM"])
    if rope: kw["rope_scaling"] = dict(rope)
    return (LlamaConfig if arch == "Llama" else Qwen3Config)(**{**kw, **(extra or {})})

def hf_model(c, tensors: Mapping[str, torch.Tensor], dtype: torch.dtype = torch.float32):
    hf = (LlamaForCausalLM if c.model_type == "llama" else Qwen3ForCausalLM)(c).eval()
    missing, unexpected = hf.load_state_dict(dict(tensors), strict=False)
    assert not unexpected and set(missing) <= {HEAD}
    hf.tie_weights()
    return hf.to(dtype)

def some_ids(n: int) -> torch.Tensor: return torch.randint(0, 97, (n,), generator=torch.Generator().manual_seed(n))

def max_diff(a: torch.Tensor, b: torch.Tensor) -> float: return (a.double() - b.double()).abs().max().item()

def name_of(case: dict) -> str:
    return "-".join([case["arch"], "x".join(map(str, case["heads"])), *(["tied"] if case.get("tied") else []), *case.get("extra", {}), case.get("rope", {}).get("rope_type", "")])

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
    new = hf_config(rope=LLAMA3, extra=dict(rope_theta=500000.0)).to_dict()
    old = {k: v for k, v in new.items() if k != "rope_parameters"} | dict(rope_theta=500000.0, rope_scaling=dict(LLAMA3))
    assert "rope_parameters" in new and ModelConfig.from_hf(new) == ModelConfig.from_hf(old)
    assert ModelConfig.from_hf(old).rope_scaling == LLAMA3 and ModelConfig.from_hf(old).rope_theta == 500000.0
    typed = old | dict(rope_scaling=dict(type="linear", factor=2))
    assert ModelConfig.from_hf(typed).rope_scaling == dict(rope_type="linear", factor=2.0)

def test_absent_keys_take_transformers_values() -> None:
    base = dict(vocab_size=97, hidden_size=64, intermediate_size=48, num_hidden_layers=30, num_attention_heads=4)
    ll, q = (ModelConfig.from_hf(base | dict(architectures=[a])) for a in ("LlamaForCausalLM", "Qwen3ForCausalLM"))
    assert (ll.n_kv_heads, ll.head_dim, ll.eos_token_ids, ll.bos_token_id, ll.max_position_embeddings, ll.tie_embeddings) == (4, 16, (2,), 1, 2048, False)
    assert (q.head_dim, q.eos_token_ids, q.bos_token_id, q.max_position_embeddings, q.qk_norm, set(q.windows)) == (128, (), None, 32768, True, {None})
    qw = ModelConfig.from_hf(base | dict(model_type="qwen3", use_sliding_window=True))
    assert qw.windows == (None,) * 28 + (4096,) * 2

@pytest.mark.parametrize("change, words", [
    (dict(architectures=["OPTForCausalLM"]), "'OPTForCausalLM' is not supported; supported: LlamaForCausalLM"),
    (dict(architectures=None, model_type="mamba"), "'mamba'"), (dict(rope_scaling=dict(rope_type="yarn", factor=4)), "RoPE type 'yarn'"),
    (dict(rope_scaling=dict(type="dynamic", factor=4)), "RoPE type 'dynamic'"), (dict(rope_scaling=dict(rope_type="llama3", factor=4)), "lacks 'low_freq_factor'"),
    (dict(rope_parameters=dict(full_attention=dict(rope_type="default"))), "flat table"), (dict(partial_rotary_factor=0.5), "partial_rotary_factor 0.5"),
    (dict(hidden_act="gelu"), "hidden_act 'gelu'"), (dict(num_key_value_heads=3), "4 query heads cannot share 3"), (dict(hidden_size=None), "lacks 'hidden_size'"),
    (dict(vocab_size="97"), "vocab_size must be a int, got '97'"), (dict(num_attention_heads=0), "heads"), (dict(head_dim=7), "head_dim must be even"),
    (dict(layer_types=["linear_attention"] * 3), "layer type 'linear_attention'"), (dict(layer_types=["full_attention"]), "3 layers but 1")])
def test_configuration_refused_by_name(change: dict, words: str) -> None:
    with pytest.raises(ModelError, match=words.replace("(", r"\(")): ModelConfig.from_hf(hf_config().to_dict() | dict(rope_parameters=None) | change)

@pytest.mark.parametrize("H, G", [(4, 2), (12, 12), (28, 4), (32, 8), (48, 2), (9, 3)])
def test_query_head_reads_its_kv_head(H: int, G: int) -> None:
    v = torch.arange(G).double().view(1, G, 1).expand(5, G, 8)
    out = causal_attention([None])(0, torch.randn(5, H, 8).double(), torch.randn(5, G, 8).double(), v)
    assert max_diff(out, (torch.arange(H) // (H // G)).double().view(1, H, 1).expand(5, H, 8)) < 1e-12

def test_window_sees_exactly_its_tokens() -> None:
    z = torch.zeros(30, 1, 30)
    seen = causal_attention([8])(0, z, z, torch.eye(30)[:, None])[:, 0] > 0
    assert all(seen[i].nonzero()[:, 0].tolist() == list(range(max(0, i - 7), i + 1)) for i in range(30))

@pytest.fixture()
def tied() -> tuple[ModelConfig, dict[str, torch.Tensor]]:
    config = ModelConfig.from_hf(hf_config(tied=True).to_dict())
    return config, random_tensors(config)

def test_tied_and_duplicated_heads(tied) -> None:
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
@pytest.mark.parametrize("arch", ["Llama", "Qwen3"])
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
