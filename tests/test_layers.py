"""The five-launch layers under Triton's interpreter, against the torch program.

Triton decides when it is imported whether it interprets, so the tests run in a process of their own; the one test seen from outside starts it."""
import os
from support.own_process import run_alone

if os.environ.get("TRITON_INTERPRET") != "1":
    def test_layers_under_the_interpreter(): run_alone(__file__)
else:
    import pytest
    import torch
    from llminfer.layers import LayerProgram, PartShape, RowShape, TileShape
    from llminfer.model import Dense, Transformer, random_tensors
    from llminfer.runner import TorchProgram
    from support.kernel_scenes import Scene

    class RowsOnly(LayerProgram): most_rows = 64

    class TilesOnly(LayerProgram):
        most_rows, shapes = 0, {"qkv": TileShape(16, 32, 32, 2, 4), "o": TileShape(16, 16, 64, 2, 4)}

    class Whole(LayerProgram): most_rows = 0

    class Pieces(LayerProgram):
        most_rows, shapes = 64, {"qkv": RowShape(4, 4, 32, 2), "down": RowShape(4, 4, 32, 1), "parts": PartShape(2, 16, 4)}

    @pytest.mark.parametrize("case", [0, 1, 2, 3, 4, 5, 7, 10, 11])
    def test_a_step_is_the_torch_programs(case, monkeypatch):
        "Hidden states, pages and dead rows; grouped heads, windows, head sizes, with and without QK norm."
        E, (H, G) = (64, 128, 80, 96, 256, 64, 64, 128, 80, 64, 64, 128)[case], ((4, 2), (3, 1), (2, 2), (6, 2))[case % 4]
        kinds = (RowsOnly, TilesOnly, Pieces, Whole)
        if case >= 10: monkeypatch.setattr("llminfer.layers.WHOLE", (1, 999))
        outs = []
        for program in (TorchProgram, kinds[case % 3 if case < 10 else 3]):
            s = Scene(case, E, H, G, (4, 16)[case % 2], (None, 3)[case % 2], qk_norm=case % 3 != 1, most=150 if case == 5 else 40)
            model = Transformer.from_tensors(s.c, random_tensors(s.c, case), linear=Dense)      # a packed product has no row kernel
            p = program(model, s.att)
            if program is not TorchProgram:
                assert p.own
                monkeypatch.setattr(f"llminfer.layers.{'rows' if program in (TilesOnly, Whole) else 'tiles'}_step", None)
            hidden = p.decode(s.st, torch.tensor([1, 2, 3, 4]), s.at.rows, s.at.positions, s.live, -(-(151 if case == 5 else 41) // s.kv.block_size), True)
            outs.append((p.head(hidden).float()[s.live], torch.stack([t.nan_to_num(7.0) for t in (*s.kv.k, *s.kv.v)])))
        assert not outs[1][0].isnan().any()
        assert (outs[0][0] - outs[1][0]).abs().max() < 1e-4
        assert (outs[0][1] - outs[1][1]).abs().max() < 1e-4

    @pytest.mark.parametrize("case", range(4))
    def test_places_of_one_row_go_over_tiles(case, monkeypatch):
        "Three positions of each row in one step, each of which reads the keys of those before it; dead places between them."
        E, (H, G), outs = (64, 128, 80, 64)[case], ((4, 2), (3, 1), (2, 2), (6, 2))[case], []
        monkeypatch.setattr("llminfer.layers.rows_step", None)
        for program in (TorchProgram, LayerProgram):
            s = Scene(case, E, H, G, (4, 16)[case % 2], (None, 3)[case % 2], qk_norm=case % 3 != 1, most=40)
            model = Transformer.from_tensors(s.c, random_tensors(s.c, case), linear=Dense)
            rows, positions = s.at.rows.repeat_interleave(3), (s.at.positions[:, None] + torch.tensor([-2, -1, 0])).view(-1)
            act = s.live.repeat_interleave(3) & (positions >= 0) & (torch.arange(12) % 5 != 2)
            p = program(model, s.att)
            if program is LayerProgram: monkeypatch.setattr("llminfer.kernels.FusedProgram.decode", None)
            hidden = p.decode(s.st, torch.arange(12), rows, torch.where(act, positions, 0), act, -(-41 // s.kv.block_size))
            outs.append((p.head(hidden).float()[act], torch.stack([t.nan_to_num(7.0) for t in (*s.kv.k, *s.kv.v)])))
        assert len(outs[1][0]) > 4 and not outs[1][0].isnan().any()
        for x, y in zip(*outs): assert (x - y).abs().max() < 1e-4
