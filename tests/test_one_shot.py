"""Sums and gathers between ranks in one kernel: under Triton's interpreter, and compiled for Hopper without a GPU; both in processes of their own."""
import os
import pytest
from support.own_process import run_alone

MODE = os.environ.get("ONE_SHOT", "")

if not MODE:
    @pytest.mark.parametrize("mode", ["interpret", "compile"])
    def test_one_shot_in_a_process_of_its_own(mode): run_alone(__file__, mode == "interpret", ONE_SHOT=mode)
else:
    if MODE == "compile": from support import offline_triton
    import torch
    from llminfer.parallel import OneShot

    class Small(OneShot): most, block, looks = 64, 16, 2

    def ranks(size): return (lambda boxes: [Small(boxes, r) for r in range(size)])([torch.zeros(2 * size * Small.most, dtype=torch.int64) for _ in range(size)])

if MODE == "interpret":
    @pytest.mark.parametrize("size", [2, 3])
    @pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)     # the interpreter cuts bfloat16 instead of rounding it
    def test_each_rank_gets_the_sum_in_the_order_of_ranks(size, dtype):
        "One rank at a time: the others leave their words first and do not wait. Sizes change; the boxes take turns."
        made = ranks(size)
        for i, n in enumerate((1, 64, 17, 64, 5, 33)):
            last, xs = i % size, [torch.randn(n).to(dtype) for _ in range(size)]
            want = torch.stack([x.float() for x in xs])
            parts = [x if r % 2 == 0 else made[r].blank(x).copy_(x) for r, x in enumerate(xs)]
            for r in [*(r for r in range(size) if r != last), last]:
                made[r].stop[0] = r != last
                got = made[r].sum(parts[r])
            total = want[0].clone()
            for x in want[1:]: total += x
            assert torch.equal(got, total.to(dtype)) and not made[last].zeros.any()

    def test_a_gather_carries_any_words():
        made, xs = ranks(2), [torch.tensor([[-5, 1 << 40]]), torch.tensor([[7, -(1 << 50)]])]
        made[1].stop[0] = 1
        made[1].gather(xs[1])
        assert torch.equal(made[0].gather(xs[0]), torch.stack(xs))

    def test_who_is_told_to_stop_does_not_wait():
        made, x = ranks(2), torch.ones(3)
        made[0].stop[0] = 1
        made[0].sum(x)
        assert made[0].count[0] == 1

    def test_what_it_takes():
        one = ranks(2)[0]
        assert one.takes(torch.zeros(8, 8)) and not one.takes(torch.zeros(65)) and not one.takes(torch.zeros(8, 8).t()[:, :3]) and not one.takes(torch.zeros(3, dtype=torch.float64))
        assert one.carries(torch.zeros(3, dtype=torch.float64)) and not one.carries(torch.zeros(3, dtype=torch.bfloat16)) and not one.carries(torch.zeros(65))

if MODE == "compile":
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
    def test_it_compiles_for_hopper(dtype):
        "The words that are waited for are read from memory each time, 64 bits at once."
        offline_triton.compiled.clear()
        one = OneShot([torch.zeros(2 * 2 * OneShot.most, dtype=torch.int64) for _ in range(2)], 1, True)
        one.sum(torch.zeros(1, 4096, dtype=dtype))
        one.sum(one.blank(torch.zeros(1, 4096, dtype=dtype)))
        one.gather(torch.zeros(1, dtype=torch.int64))
        assert len(offline_triton.compiled) == 3
        for k in offline_triton.compiled.values(): assert "ld.volatile.global" in k.asm["ptx"] and "st.global" in k.asm["ptx"] and "griddepcontrol.wait" in k.asm["ptx"]
