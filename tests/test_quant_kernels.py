"""The kernels of quantised products: under Triton's interpreter against torch, and compiled for Hopper without a GPU.

Triton decides when it is imported whether it interprets, so both run in processes of their own; the two tests seen from outside start them."""
import os
from dataclasses import replace
import pytest
from support.own_process import run_alone

MODE = os.environ.get("QUANT_KERNELS", "")

if not MODE:
    @pytest.mark.parametrize("mode", ["interpret", "compile"])
    def test_quant_kernels_in_a_process_of_their_own(mode): run_alone(__file__, mode == "interpret", QUANT_KERNELS=mode)
else:
    if MODE == "compile": from support import offline_triton
    import torch
    import torch.nn.functional as F
    from llminfer import quant_kernels as K
    from llminfer.layers import LayerProgram
    from llminfer.model import Transformer, random_tensors
    from llminfer.quantization import QuantPlan, quant_factory
    from llminfer.runner import TorchProgram
    from support.kernel_scenes import Scene
    from support.quant_kinds import KINDS

if MODE == "interpret":
    @pytest.mark.parametrize("kind", KINDS)
    @pytest.mark.parametrize("N, cols", [(24, 64), (10, 192), (6, 1088)])
    def test_products_equal_the_expanded_weight(kind, N, cols):
        "One row, a few, tiles, and a long prompt; with bias; remainders in every direction."
        torch.manual_seed(N)
        p = KINDS[kind](torch.randn(N, cols), torch.randn(N))
        for T in (1, 3, 5, 70) if cols < 1000 else (2,):
            x = torch.randn(T, cols)
            got, want = K.fast_product(p, x), p.in_pieces(x)
            assert (got - want).abs().max() <= 1e-5 * want.abs().max(), (kind, T)
        p.bias = p.bias.half()
        half = K.fast_product(p, x.half())
        assert half.dtype == torch.float16 and (half.float() - want).abs().max() <= 2e-2 * want.abs().max()
        assert K.fast_product(p, x.double()) is None

    @pytest.mark.parametrize("kind", KINDS)
    @pytest.mark.parametrize("shape", [None, K.QuantShape(2, 16, 1, 1), K.QuantShape(8, 8, 2, 2)], ids=str)
    def test_norm_pair_and_residual_inside_the_product(kind, shape):
        torch.manual_seed(1)
        x, norm, p = torch.randn(2, 192), torch.rand(192), KINDS[kind](torch.randn(20, 192) / 8)
        w = p.expand()
        y = (F.rms_norm(x, (192,), norm, 1e-5) @ w.T).chunk(2, -1)
        assert torch.allclose(K.quant_rows(p, x, torch.empty(2, 10), norm, pair=True, eps=1e-5, shape=shape), F.silu(y[0]) * y[1], atol=1e-4)
        assert torch.allclose(K.quant_rows(p, x, torch.ones(2, 20), add=True, shape=shape), 1 + x @ w.T, atol=1e-4)

    @pytest.mark.parametrize("kind", ["nf4", "int4-zeros", "fp8"])
    def test_the_fused_step_is_the_torch_step(kind, monkeypatch):
        "Six launches a layer around quantised products: hidden states and pages of two live rows."
        plan = QuantPlan(kind.partition("-")[0], symmetric=kind != "int4-zeros")
        outs = []
        monkeypatch.setattr(LayerProgram, "most_rows", 4)
        for program in (TorchProgram, LayerProgram):
            s = Scene(4, 64, 4, 2, 4, None, qk_norm=True, most=40)
            c = replace(s.c, intermediate_size=128)
            model = Transformer.from_tensors(c, random_tensors(c, 1), linear=quant_factory(plan, c, torch.float32, "cpu"))
            if program is LayerProgram:
                assert K.accelerate(model) == 4 * c.n_layers
                monkeypatch.setattr("llminfer.layers.tiles_step", None)
            p = program(model, s.att)
            p.shapes = {f"quant-{kind}": K.QuantShape(64, 16, 2, 4) for kind in ("qkv", "o", "gate_up", "down")}
            assert program is TorchProgram or p.own and not p.dense
            hidden = p.decode(s.st, torch.tensor([1, 2, 3, 4]), s.at.rows, s.at.positions, s.live, -(-41 // s.kv.block_size), True)
            outs.append((p.head(hidden).float()[s.live], torch.stack([t.nan_to_num(7.0) for t in (*s.kv.k, *s.kv.v)])))
        assert (outs[0][0] - outs[1][0]).abs().max() < 1e-4 and (outs[0][1] - outs[1][1]).abs().max() < 1e-4

if MODE == "compile":
    SHAPES = {"qkv": (6144, 4096), "o": (4096, 4096), "gate_up": (24576, 4096), "down": (4096, 12288)}   # Qwen3-8B

    def meta(kind, N, cols):
        "A product without values: only types and sizes matter to the compiler."
        p = KINDS[kind](torch.randn(8, cols))
        p.shape = (N, cols)
        return p

    @pytest.mark.parametrize("kind", ["nf4", "int4", "fp8", "int8"])
    def test_row_kernels_compile_for_hopper_without_shuffling(kind):
        "No layout conversion but those of the last sums: what made the first versions slow."
        for name, (N, cols) in SHAPES.items():
            offline_triton.compiled.clear()
            pair, norm = name == "gate_up", name in ("qkv", "gate_up")
            K.quant_rows(meta(kind, N, cols), torch.randn(1, cols), torch.empty(1, N), torch.rand(cols, dtype=torch.bfloat16) if norm else None, pair, not norm, 1e-5, True)
            (k,) = offline_triton.compiled.values()
            assert k.asm["ttgir"].count("convert_layout") <= 5 and k.asm["ptx"].count("bar.sync") <= 14, (name, k.asm["ttgir"].count("convert_layout"), k.asm["ptx"].count("bar.sync"))

    def test_products_keep_the_launches_that_were_measured():
        want = {"fp8": {"qkv": (4, 256, 2, 2), "o": (4, 256, 2, 2), "gate_up": (8, 512, 1, 4), "down": (4, 256, 2, 2)},
                "int4": {"qkv": (16, 512, 1, 4), "o": (16, 512, 1, 4), "gate_up": (16, 512, 1, 4), "down": (8, 512, 1, 4)}}
        for kind, shapes in want.items():
            for name, size in SHAPES.items(): assert K.quant_shape(meta(kind, *size), name == "gate_up") == K.QuantShape(*shapes[name]), (kind, name)

    @pytest.mark.parametrize("kind", KINDS)
    def test_tiles_and_expansion_compile_for_hopper(kind):
        p = meta(kind, 256, 4096)
        for T in (16, 64): K.quant_tiles(p, torch.randn(T, 4096).bfloat16())
        K.expand_codes(p, torch.bfloat16)
        assert {n for n, _ in offline_triton.compiled} >= {"quant_tile_kernel", "expand_kernel"}
