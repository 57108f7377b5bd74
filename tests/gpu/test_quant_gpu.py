"""Quantised products on a GPU: every kind by its kernels against torch, the captured engine against a plain model with the expanded weights, fp8 by fp8.

    PYTHONPATH=.:tests python3 -m pytest -q -n 8 tests/gpu/test_quant_gpu.py        (needs CUDA; fp8: compute capability 8.9)
"""
import pytest
import torch
import torch.nn.functional as F
from llminfer import quant_kernels as K
from llminfer.config import EngineConfig, QuantConfig
from llminfer.engine import InferenceEngine
from llminfer.loading import make_tiny, open_checkpoint
from llminfer.quant_formats import load_quantized, quant_info
from llminfer.quantization import Fp8, QuantPlan, Table4, expanded, products
from support.quant_kinds import KINDS

torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
TOL = {torch.float32: 2e-3, torch.float16: 6e-3, torch.bfloat16: 2e-2}     # of the largest; fp32: the books of NF4 and FP4 are rounded to half precision


@torch.inference_mode()
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("N, cols", [(960, 576), (4096, 4096), (1024, 12288), (37, 1088)])
@pytest.mark.parametrize("dtype", TOL, ids=str)
def test_products(kind, N, cols, dtype):
    "One row, a few, tiles, a prompt; then norm, pair and residual inside, with and without dependent launch."
    torch.manual_seed(0)
    p = KINDS[kind](torch.randn(N, cols, device="cuda", dtype=dtype), torch.randn(N, device="cuda", dtype=dtype))
    w = p.expand()
    for T in (1, 2, 4, 5, 16, 33, 64, 65, 200):
        x = torch.randn(T, cols, device="cuda", dtype=dtype)
        got, want = K.fast_product(p, x), F.linear(x.float(), w, p.bias.float())
        assert got.dtype == dtype and (got.float() - want).abs().max() <= TOL[dtype] * want.abs().max(), T
    p.bias = None
    norm, N2 = torch.rand(cols, device="cuda", dtype=dtype), N // 2
    for B in (1, 2):
        x = torch.randn(B, cols, device="cuda")
        y = F.rms_norm(x, (cols,), norm.float(), 1e-5) @ w.T
        for pdl in (False, True):
            out = torch.ones(B, N, device="cuda")
            assert (K.quant_rows(p, x, out, add=True, pdl=pdl) - 1 - x @ w.T).abs().max() <= (4e-3 if kind.startswith("int4") else 2e-3) * (x @ w.T).abs().max()
            if N % 2 == 0:
                got, want = K.quant_rows(p, x, torch.empty(B, N2, device="cuda"), norm, pair=True, eps=1e-5, pdl=pdl), F.silu(y[:, :N2]) * y[:, N2:]
                assert (got - want).abs().max() <= (8e-3 if kind.startswith("int4") else 4e-3) * want.abs().max()


@torch.inference_mode()
@pytest.mark.parametrize("kind", ["nf4", "fp4", "fp8"])
def test_every_code_comes_back(kind):
    "The look-up in registers: all 256 bytes, at every place of a word."
    codes = torch.stack([torch.arange(256, device="cuda").to(torch.uint8).roll(i) for i in range(8)])
    if kind == "fp8":
        codes[(codes & 127) == 127] = 0                              # NaN
        p = Fp8(codes.view(torch.float8_e4m3fn), torch.ones(8, device="cuda"))
    else: p = Table4(kind, codes, torch.ones(8, 8, device="cuda"))
    assert torch.equal(K.expand_codes(p, torch.float16).float(), p.expand().half().float())


@pytest.mark.parametrize("mode", ["nf4", "fp4", "int8", "int4", "fp8"])
@pytest.mark.parametrize("captured", [True, False])
def test_the_engine_says_what_its_oracle_says(mode, captured, tmp_path):
    "fp32, captured windows, batch and prompt: tokens of the expanded model, or a near tie (int4 adds 32 products in half precision: here up to 2% of the largest logit)."
    folder = make_tiny(tmp_path, "qwen3", 0, hidden_size=256, intermediate_size=512, num_attention_heads=4, num_key_value_heads=2, head_dim=64)
    oracle = expanded(load_quantized(open_checkpoint(folder), mode, "float32", "cpu"))
    prompts = [[5, 300, 41], list(range(20, 90)), [7]]
    with InferenceEngine(EngineConfig(model_name=folder, backend="paged", quant=QuantConfig(mode), dtype="float32", device="cuda", max_model_len=256, compile_cudagraphs=captured)) as e:
        for p in prompts:
            out = e.run(prompt_token_ids=p, max_new_tokens=40, temperature=0.0, ignore_eos=True).token_ids
            logits = oracle.logits(p + out)[len(p) - 1:-1]
            gaps = logits.amax(-1) - logits.gather(1, torch.tensor(out)[:, None])[:, 0]
            assert (gaps <= (2e-2 if mode == "int4" else 4e-3) * logits.abs().max()).all(), (mode, gaps.max())
        info = e.info()
    assert info["quant_kernels"].startswith("triton (8 of 8") and info["quant_products"].startswith(f"{mode} x 8")


@torch.inference_mode()
def test_fp8_times_fp8():
    w, x = torch.randn(512, 1024, device="cuda", dtype=torch.bfloat16), torch.randn(64, 1024, device="cuda", dtype=torch.bfloat16)
    p = Fp8.quantise(w, torch.randn(512, device="cuda", dtype=torch.bfloat16), w8a8_rows=32)
    want = F.linear(x.float(), p.expand(), p.bias.float())
    assert ((p(x).float() - want).norm() / want.norm()) < 0.04 and torch.equal(p(x[:8]), p.in_pieces(x[:8]))


@torch.inference_mode()
@pytest.mark.parametrize("name", ["gguf", "nf4"])
def test_the_demo_model(name):
    "Real weights in half precision: the logits of a text stay within what half precision does to the expanded model."
    ckpt = open_checkpoint("demo")
    model = load_quantized(ckpt, QuantPlan(name), torch.float16, "cuda")
    assert quant_info(model)["quant_kernels"] == "triton (120 of 120 products)" and len(products(model)) == 121
    ids = list(range(300, 420))
    want, half = expanded(model).logits(ids), expanded(model, torch.float16).logits(ids)
    assert (model.logits(ids) - want).abs().max() <= 1.5 * (half - want).abs().max()
