"""KV in 8 bits: every configuration says what whole-sequence attention over the decoded keys and values says; what cannot be had is refused by name."""
import numpy as np
import pytest
import torch
from llminfer import EngineConfig, InferenceEngine
from llminfer.config import CacheConfig, ConfigError
from llminfer.kv_codes import CODES, POOLS, decode, encode
from llminfer.model import causal_attention
from llminfer.speculative import HostLookup
from support.arrays import core_for, pairwise, run, tiny_prompts
from support.engines import clean, counters, tiny, tiny_engine  # noqa: F401 (a fixture)


def coded_oracle(model, ids, n: int, kind: str) -> list[int]:
    "Greedy continuation by recomputation, each key and value coded and decoded before it is read."
    inside = causal_attention(model.config.windows)
    def attend(layer, q, k, v): return inside(layer, q, *(decode(*encode(x, kind), x.dtype) for x in (k, v)))
    out = list(ids)
    for _ in range(n): out.append(int(model.head(model.forward(torch.tensor(out), torch.arange(len(out)), attend)[-1:]).argmax()))
    return out[len(ids):]


@pytest.mark.parametrize("kind", list(CODES))
def test_every_configuration_says_what_the_decoded_oracle_says(kind):
    model = tiny()[1]
    prompts = tiny_prompts(model.config.vocab_size, lengths=(1, 9, 16, 17, 33, 70, 16))
    want = [coded_oracle(model, p.tolist(), 10, kind) for p in prompts]
    for i, row in enumerate(pairwise()):
        guess = dict(speculate=HostLookup) if i % 2 else {}
        core = core_for(model, row, prompts, 10, rows=4, **guess, kv_dtype=kind, draft=4 if guess else 0)
        assert core.runner.kv.kind == kind and run(core, row, prompts, 10) == want, row


def test_a_pool_of_a_budget_holds_more_tokens_and_a_fork_copies_scales():
    texts = {}
    for kind in ("auto", "int8"):
        e = tiny_engine(kv_cache_dtype=kind, dtype="float64", cpu_kv_bytes=1 << 18, block=4)
        n = e.info()["num_blocks"]
        texts[kind] = n, [s.text for s in e.run("a b c d e f g h i", n=3, seed=2, max_new_tokens=12).outputs]
        assert e.info()["kv_cache_dtype"] == kind
    assert texts["int8"][0] > 3 * texts["auto"][0] and len(set(texts["int8"][1])) == 3      # 64 bits a number against 8 and a share of a scale
    alone = tiny_engine(kv_cache_dtype="int8", prefix_cache=False, block=128)
    assert [s.text for s in alone.run("a b c d e f g h i", n=3, seed=2, max_new_tokens=12).outputs] == texts["int8"][1]


@pytest.mark.parametrize("kind", list(CODES))
def test_codes_are_as_good_as_their_bits(kind):
    x = torch.from_numpy(np.random.default_rng(0).normal(size=(300, 3, 32)) * np.exp(np.random.default_rng(1).normal(size=(300, 3, 1)) * 1.5))
    codes, scale = encode(x, kind)
    err = (decode(codes, scale, x.dtype) - x).abs()
    step = x.abs().amax(-1, keepdim=True) / CODES[kind][1]
    assert (err <= (step * 0.63 if kind == "int8" else torch.maximum(x.abs() * 0.0665, step))).all()
    assert (decode(*encode(torch.zeros(2, 3, 8), kind), torch.float32) == 0).all()
    assert decode(*encode(torch.tensor([[[float("nan"), 1.0]], [[float("inf"), 1.0]]]), kind), torch.float32).isnan().all(-1).any()


@pytest.mark.parametrize("cfg, word", [({"kv_cache_dtype": "fp4"}, "one of auto, fp8, int8"), ({"kv_cache_dtype": "fp8", "backend": "eager"}, "eager backend"),
                                       ({"kv_cache_dtype": "int8", "attention_backend": "flashinfer"}, "flashinfer")])
def test_refusals(cfg, word):
    with pytest.raises(ConfigError, match=word): InferenceEngine(EngineConfig(model_name=str(tiny()[0]), cache=CacheConfig(num_blocks=8), max_model_len=64, **cfg)).load()


def test_bytes_of_a_block_are_what_a_pool_takes():
    for kind, cls in POOLS.items():
        kv = cls(3, 6, 4, 2, 8, torch.float16)
        per_block = cls.bytes_per_block(3, 4, 2, 8, torch.float16)
        assert kv.nbytes == 6 * per_block + 2 * per_block // 8, kind      # and two slots of a layer that are no block
