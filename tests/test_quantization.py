"""Quantised products: bit-equal to the published formats, exact against their own expanded weights, refused where they cannot be held.

The golden hashes are of what bitsandbytes 0.50.2 made of `matrix()` on a CPU."""
import hashlib
import json
import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st
from safetensors.torch import save_file
from llminfer import quantization as Q
from llminfer.config import ConfigError, EngineConfig, QuantConfig, QuantMode
from llminfer.engine import InferenceEngine
from llminfer.formats import BLOCKS, LoadError, RawTensor, dequantize, read_safetensors
from llminfer.loading import load_model, make_tiny, open_checkpoint
from llminfer.model import Dense, Transformer
from llminfer.quant_formats import load_quantized, quant_info
from llminfer.quantization import BOOKS, Blocks, Fp8, Int4, Int8, QuantPlan, Table4, expanded, gguf_linear, products, quant_factory, quantise_blocks, quantise_scales
from llminfer.tokenization import load_tokenizer
from support.checkpoints import edit_json, refuse
from support.engines import engine_around

PLANS = {"nf4": QuantPlan("nf4"), "nf4-single": QuantPlan("nf4", double_quant=False), "fp4": QuantPlan("fp4"), "int8": QuantPlan("int8"), "int4": QuantPlan("int4"),
         "int4-32": QuantPlan("int4", group=32), "int4-zeros": QuantPlan("int4", symmetric=False), "fp8": QuantPlan("fp8"), "nf4-head": QuantPlan("nf4", head=True),
         "nf4-keep": QuantPlan("nf4", keep=("q_proj", "layers.1.down"))}


def sha(t): return hashlib.sha256((t + 0.0 if t.is_floating_point() else t).contiguous().numpy().tobytes()).hexdigest()[:16]


def matrix(rows=96, cols=1024):
    w = np.random.default_rng(0).standard_normal((rows, cols)).astype(np.float32)
    w[3], w[5, ::2], w[7, 64:128] = 0, 0.1, 1e-6
    return torch.from_numpy(w)


@pytest.mark.parametrize("kind, codes, values, nested", [("nf4", "620f78cdf7fa8e38", "54264f6d02422029", "8d9dd9a8dc0e496c"),
                                                          ("fp4", "22656a796cb533cb", "3945a25fba8442b7", "d10aa83d32605267")])
def test_bit_equal_to_bitsandbytes(kind, codes, values, nested):
    w = matrix()
    c, absmax = quantise_blocks(w, BOOKS[kind])
    pairs = c.view(-1, 2)
    assert sha(pairs[:, 0] << 4 | pairs[:, 1]) == codes and sha(absmax) == "4cde74ba25d1719a"
    assert sha(Table4.quantise(w, kind=kind, double_quant=False).expand()) == values
    assert sha(Q.dynamic_map()) == "e732639a65f497b4"
    s, factors, offsets = quantise_scales(absmax)
    assert sha(s) == "9faf4cba9320b07e" and sha(factors) == "c041ad95b041cce8" and float(offsets[0]) == 2.5835556983947754
    assert sha(Table4.quantise(w, kind=kind).expand()) == nested


def test_int8_is_bit_equal_to_bitsandbytes():
    p = Int8.quantise(matrix().half())
    assert sha(Q.turn_bytes(p.codes)) == "6b7da1d9d8ba31d2" and p.codes.dtype == torch.int8


def test_the_error_of_each_kind_is_the_one_stated():
    w = matrix()
    blocks = w.unflatten(-1, (-1, 64)).abs().amax(-1, keepdim=True)
    def worst(p, scale): return float(((p.expand() - w).unflatten(-1, (-1, 64)).abs() / scale.clamp(min=1e-4)).max())   # int4's scales are half precision: below 1e-5 they are coarse
    assert worst(Table4.quantise(w, double_quant=False), blocks) <= 0.1520      # half of NF4's widest gap
    assert worst(Table4.quantise(w, kind="fp4", double_quant=False), blocks) <= 1 / 6 + 1e-6
    assert worst(Int4.quantise(w), blocks) <= 1 / 15 * 1.01                     # half a step, and the end of the shorter side
    assert worst(Int4.quantise(w, symmetric=False), blocks) <= 2 / 15           # the zero is rounded too
    assert ((Int8.quantise(w).expand() - w).abs().amax(1) <= w.abs().amax(1) / 254 + 1e-9).all()
    small = w.abs() > w.abs().amax(1, keepdim=True) / 448 * 2**-6               # not among fp8's subnormals
    assert ((Fp8.quantise(w).expand() - w).abs()[small] <= w.abs()[small] / 16 * 1.0001).all()


def test_bits_are_what_they_are_said_to_be():
    w = torch.randn(256, 4096)
    bits = {k: Q.quantise_linear(p, w, torch.zeros(256), "x").bits for k, p in PLANS.items()}
    assert bits["nf4"] == pytest.approx(4.129, abs=1e-3) and round(bits["nf4-single"], 2) == 4.5 and bits["int4"] == 4.25 and bits["int4-zeros"] == 4.375
    assert bits["int8"] == bits["fp8"] == 8 + 32 / 4096
    assert bits["nf4-single"] / 16 <= 0.29 and bits["fp8"] / 16 <= 0.52


@given(st.integers(1, 5), st.integers(1, 6), st.integers(0, 2**31))
def test_packing_is_undone(rows, groups, seed):
    q = torch.randint(0, 16, (rows, 32 * groups), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))
    packed = Q.pack_codes(q)
    assert torch.equal(Q.unpack_codes(packed), q) and packed.shape == (rows, 16 * groups)
    words = packed.view(torch.int32).long() & 0xffffffff
    assert all(int(words[0, i] >> 4 * j & 15) == int(q[0, 4 * j + i]) for i in range(4) for j in range(8))
    assert torch.equal(Q.turn_bytes(Q.turn_bytes(q)), q)


@pytest.mark.parametrize("name", PLANS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
def test_a_product_equals_its_expanded_weight_in_any_pieces(name, dtype, monkeypatch):
    monkeypatch.setattr(Q, "PIECE", 3000)
    w, bias, x = torch.randn(37, 192).to(dtype), torch.randn(37).to(dtype), torch.randn(5, 192).to(dtype)
    p = Q.quantise_linear(PLANS[name], w, bias, "x")
    assert torch.allclose(p(x), torch.nn.functional.linear(x, p.expand(dtype), bias), rtol=1e-2 if dtype == torch.bfloat16 else 1e-12, atol=1e-2 if dtype == torch.bfloat16 else 1e-12)
    assert torch.equal(p.rows(5, 9), p.expand()[5:9]) and p.nbytes > 0


def test_zeros_and_tiny_and_huge_weights_stay_finite():
    w = torch.zeros(4, 128)
    w[1], w[2], w[3, 0] = 1e-30, 6e4, 1e-3
    for p in PLANS.values():
        got = Q.quantise_linear(p, w, None, "x").expand()
        assert got.isfinite().all() and (got[0] == 0).all() and torch.allclose(got[2], w[2], rtol=0.08)


@pytest.mark.parametrize("name", PLANS)
@pytest.mark.parametrize("family", ["llama", "qwen3", "opt"])
def test_engine_tokens_equal_the_oracle(name, family, tmp_path):
    "Greedy, fp64: batches, chunks and pages over a quantised model, against the recomputed model with its expanded weights."
    ckpt = open_checkpoint(make_tiny(tmp_path, family, 3))
    tok, model = load_tokenizer(ckpt.tokenizer), load_quantized(ckpt, PLANS[name], "float64")
    oracle, prompts, n = expanded(model, torch.float64), [[5, 9, 300, 41], list(range(20, 60)), [7], [300, 301] * 9], 12
    assert (products(model)[-1].kind == "nf4") == (name == "nf4-head")
    with engine_around(model, tok, dtype="float64", max_num_batched_tokens=16, block=4) as e:
        got = [e.run(prompt_token_ids=p, max_new_tokens=n, temperature=0.0, ignore_eos=True).token_ids for p in prompts]
    for p, out in zip(prompts, got):
        logits = oracle.logits(p + out)[len(p) - 1:-1]
        assert logits.argmax(-1).tolist() == out, (name, family)


def test_head_and_embedding_stay_dense_unless_asked(tmp_path):
    "B27: a list of names adds to the rule about the head."
    for tied in (True, False):
        ckpt = open_checkpoint(make_tiny(tmp_path / str(tied), "qwen3", 0, tie_word_embeddings=tied))
        dense = load_model(ckpt, "float32", linear=Dense).logits([5, 6, 7])
        for keep in ((), ("q_proj",), ("lm_head",), ("o", "layers.0.down")):
            m = load_quantized(ckpt, QuantPlan("nf4", keep=keep), "float32")
            kinds = [p.kind for p in products(m)]
            assert kinds[-1] != "nf4" and m.embed.dtype == torch.float32
            assert (kinds[0] != "nf4") == ("q_proj" in keep) and (kinds[1] != "nf4") == ("o" in keep) and (kinds[3] != "nf4") == ("o" in keep) and kinds[2] == kinds[7] == "nf4"
            assert ((m.logits([5, 6, 7]) - dense).norm() / dense.norm()) < 0.6      # random weights, no trained slack
        assert load_quantized(ckpt, QuantPlan("nf4", head=True), "float32").lm_head.kind == "nf4"


def test_rows_that_do_not_fit_stay_dense(tmp_path):
    ckpt = open_checkpoint(make_tiny(tmp_path, "llama", 0, hidden_size=96, intermediate_size=160, num_attention_heads=6, num_key_value_heads=2))
    m = load_quantized(ckpt, "nf4", "float32")
    assert [p.kind == "nf4" for p in products(m)] == [False] * 9 and quant_info(m) == {}
    m = load_quantized(ckpt, QuantPlan("int4", group=32), "float32")
    assert quant_info(m)["quant_products"].startswith("int4 x 8, dense x 1")


@pytest.mark.parametrize("format", [f for f in BLOCKS if f.startswith("Q")])
def test_gguf_blocks_are_kept_and_say_the_same(format, tmp_path):
    rng, K = np.random.default_rng(1), 512
    def raw(rows, fmt, order=None):
        data = rng.integers(0, 256, (rows, K // BLOCKS[fmt][0], BLOCKS[fmt][1]), dtype=np.uint8)
        data[..., 1] &= 0x3b                                   # finite float16 scales wherever they are
        data[..., 3] &= 0x3b
        if fmt == "Q6_K": data[..., -1] &= 0x3b
        return RawTensor("x", fmt, (rows, K), tmp_path, 0, data.size, data.reshape(-1), order)
    one = [raw(8, format), raw(4, format, torch.tensor([2, 0, 3, 1]))]
    p = gguf_linear(one, None, "x", "cpu")
    want = torch.cat([dequantize(t.data, t.format) for t in one])
    assert torch.equal(p.expand(), want) and p.nbytes == sum(t.nbytes for t in one) and p.kind == f"gguf-{format}"
    assert isinstance(p, {"Q8_0": Int8, "Q4_0": Int4, "Q4_1": Int4}.get(format, Blocks))
    mixed = [*one, raw(4, "Q6_K")]
    p = gguf_linear(mixed, torch.ones(16), "x", "cpu")
    want = torch.cat([dequantize(t.data, t.format) for t in mixed])
    assert torch.equal(p.rows(7, 14), want[7:14]) and torch.allclose(p(torch.ones(2, K)), want.sum(1).expand(2, -1) + 1, rtol=1e-3, atol=1e-2 * float(want.abs().sum(1).max()))


def test_w8a8_rounds_activations_only_in_large_batches():
    w, x = torch.randn(32, 64), torch.randn(6, 64)
    p = Fp8.quantise(w, w8a8_rows=4)
    assert torch.allclose(p(x[:3]), x[:3] @ p.expand().T, atol=1e-5)
    q, s = Q.to_fp8(x)
    assert torch.allclose(p(x), (q.float() * s[:, None]) @ p.expand().T, atol=1e-4) and not torch.allclose(p(x), x @ p.expand().T, atol=1e-4)


def bnb_tensors(name, w, kind, nested):
    "What bitsandbytes stores for a matrix, from its description."
    codes, absmax = quantise_blocks(w, BOOKS[kind])
    pairs, state = codes.view(-1, 2), dict(quant_type=kind, blocksize=64, dtype="float32", shape=list(w.shape))
    out = {f"{name}": pairs[:, :1] << 4 | pairs[:, 1:], f"{name}.quant_map": torch.tensor(BOOKS[kind]), f"{name}.absmax": absmax.flatten()}
    if nested:
        s, factors, offsets = quantise_scales(absmax)
        state |= dict(nested_blocksize=256, nested_dtype="float32", nested_offset=float(offsets[0]))
        out |= {f"{name}.absmax": s.flatten(), f"{name}.nested_absmax": factors, f"{name}.nested_quant_map": Q.dynamic_map()}
    return out | {f"{name}.quant_state.bitsandbytes__{kind}": torch.tensor(list(json.dumps(state).encode()), dtype=torch.uint8)}, Table4.quantise(w, kind=kind, double_quant=nested).expand()


def int8_tensors(name, w):
    p = Int8.quantise(w)
    return {name: Q.turn_bytes(p.codes), f"{name.removesuffix('.weight')}.SCB": p.scale * 127, f"{name}_format": torch.tensor(0, dtype=torch.uint8)}, p.expand()


def words(codes):
    "uint8 [N, n] below 16 -> int32 [N, n / 8], first one low."
    w = (codes.long().unflatten(-1, (-1, 8)) << (4 * torch.arange(8))).sum(-1)
    return torch.where(w >= 2**31, w - 2**32, w).to(torch.int32)


def packed_tensors(name, w, zeros):
    "compressed-tensors, 4 bits in groups of 32; zero points packed along the rows."
    base, p = name.removesuffix(".weight"), Int4.quantise(w, group=32, symmetric=not zeros)
    out = {f"{name}_packed": words(Q.unpack_codes(p.codes)), f"{name}_scale": p.scale, f"{name}_shape": torch.tensor(w.shape)}
    if zeros: out[f"{base}.weight_zero_point"] = words(p.low.t().contiguous()).t().contiguous()
    return out, p.expand()


def fp8_tensors(name, w, whole):
    "compressed-tensors, e4m3, a scale a row or one for all."
    scale = (w.abs().amax() if whole else w.abs().amax(1, keepdim=True)) / 448
    codes = (w / scale).to(torch.float8_e4m3fn)
    return {name: codes, f"{name}_scale": scale.reshape(-1, 1) if not whole else scale.reshape(1), f"{name.removesuffix('weight')}input_scale": torch.ones(1)}, codes.float() * scale


CT4 = {"config_groups": {"group_0": {"targets": ["Linear"], "weights": {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32}}}, "format": "pack-quantized"}
CT8 = {"config_groups": {"group_0": {"targets": ["Linear"], "weights": {"num_bits": 8, "type": "float", "strategy": "channel"}}}, "format": "float-quantized"}
FILES = {"nf4": (lambda n, w: bnb_tensors(n, w, "nf4", True), "bitsandbytes", {"load_in_4bit": True}), "fp4": (lambda n, w: bnb_tensors(n, w, "fp4", False), "bitsandbytes", {"load_in_4bit": True}),
         "int8": (int8_tensors, "bitsandbytes", {"load_in_8bit": True}), "int4": (lambda n, w: packed_tensors(n, w, False), "compressed-tensors", CT4),
         "int4-zeros": (lambda n, w: packed_tensors(n, w, True), "compressed-tensors", CT4), "fp8": (lambda n, w: fp8_tensors(n, w, False), "compressed-tensors", CT8),
         "fp8-whole": (lambda n, w: fp8_tensors(n, w, True), "compressed-tensors", CT8)}


def quantised_folder(path, name, **sizes):
    "A tiny checkpoint whose projections are in codes, and the model with the values that they stand for."
    make, method, config = FILES[name]
    make_tiny(path, "qwen2", 1, **sizes)
    values, out = {n: t.tensor() for n, t in read_safetensors(path / "model.safetensors").items()}, {}
    for n, w in list(values.items()):
        if n.endswith("proj.weight"):
            stored, values[n] = make(n, w)
            out |= stored
        else: out[n] = w
    save_file({k: v.clone().contiguous() for k, v in out.items()}, path / "model.safetensors")
    edit_json(path / "config.json", quantization_config={"quant_method": method} | config)
    ckpt = open_checkpoint(path)
    return ckpt, Transformer.from_tensors(ckpt.config, values, torch.float64)


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("wide", [False, True])
def test_quantised_checkpoints_load_exactly(name, wide, tmp_path):
    "The stacked products keep codes, scales and biases; `wide`: nested blocks that end with a matrix."
    sizes = dict(hidden_size=512, intermediate_size=512, num_attention_heads=8, num_key_value_heads=4, num_hidden_layers=1) if wide else {}
    ckpt, oracle = quantised_folder(tmp_path, name, **sizes)
    model = load_quantized(ckpt, QuantConfig(), "float64")
    ids = [5, 300, 41, 17, 260]
    assert torch.allclose(model.logits(ids), oracle.logits(ids), rtol=1e-9, atol=1e-9)
    info, dense = quant_info(model), sum(p.shape[0] * p.shape[1] for p in products(model)[:-1]) * 2
    assert info["quant_products"].endswith("dense x 1") and sum(p.nbytes for p in products(model)[:-1]) < dense * (0.36 if "4" in name and name != "int8" else 0.56)
    if name == "nf4": assert all((p.factors is not None) == wide for p in products(model)[:1])


def test_what_cannot_be_held_is_refused(tmp_path):
    for i, (name, change, word) in enumerate([("nf4", dict(quantization_config=dict(quant_method="gptq")), "gptq"),
            ("int4", dict(quantization_config=dict(quant_method="compressed-tensors", config_groups={"g": {"weights": {"num_bits": 2, "strategy": "group"}}})), "2 bits"),
            ("fp8", dict(quantization_config=dict(quant_method="compressed-tensors", config_groups={"g": {"weights": {"num_bits": 8, "strategy": "block"}}})), "block")]):
        path = tmp_path / str(i)
        quantised_folder(path, name)
        edit_json(path / "config.json", **change)
        refuse(path, word, load=lambda p: load_quantized(p, "none"))
    ckpt, _ = quantised_folder(tmp_path / "twice", "nf4")
    with pytest.raises(ConfigError, match="quantised already"): load_quantized(ckpt, "int8")
    with pytest.raises(LoadError, match="load_quantized"): load_model(ckpt)
    with pytest.raises(ConfigError, match="GGUF"): load_quantized(open_checkpoint(make_tiny(tmp_path / "plain")), "gguf")
    with pytest.raises(ConfigError, match="none of"): QuantPlan("q5")
    with pytest.raises(ConfigError, match="group of 48"): QuantPlan("int4", group=48)
    with pytest.raises(ConfigError, match="cannot be made"): quant_factory(QuantPlan("gguf"), ckpt.config, torch.float32, "cpu")(torch.zeros(64, 64), None, "layers.0.o")


@pytest.mark.parametrize("mode", [m for m in QuantMode if m.value not in ("none", "gguf")])
def test_the_paged_backend_takes_every_mode_and_says_so(mode, tmp_path):
    folder = make_tiny(tmp_path, "llama", 0)
    want = expanded(load_quantized(open_checkpoint(folder), mode.value, "float64"), torch.float64)
    with InferenceEngine(EngineConfig(model_name=folder, backend="paged", quant=QuantConfig(mode), dtype="float64", device="cpu", max_model_len=64)) as e:
        out = e.run(prompt_token_ids=[5, 300, 41], max_new_tokens=8, temperature=0.0, ignore_eos=True).token_ids
        info = e.info()
    assert want.logits([5, 300, 41, *out])[2:-1].argmax(-1).tolist() == out
    assert info["quant_products"].startswith(f"{mode.value} x 8") and "torch" in info["quant_kernels"] and info["quantization"] == mode.value

def test_a_mode_that_holds_nothing_is_told(tmp_path):
    "Rows of 72 numbers are no whole groups: all stays dense, and info() says so."
    folder = make_tiny(tmp_path, "llama", 0, hidden_size=72, intermediate_size=72, num_attention_heads=2, num_key_value_heads=1, head_dim=36)
    with InferenceEngine(EngineConfig(model_name=folder, backend="paged", quant=QuantConfig("nf4"), device="cpu", max_model_len=64)) as e:
        assert e.info()["quantization"].startswith("nf4 (no matrix") and "quant_products" not in e.info()
