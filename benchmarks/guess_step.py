"""Microseconds of a captured step with guesses, beside the plain step: kernels or torch around the forward pass, tiles or eight launches in it. Needs CUDA.

    PYTHONPATH=. python3 benchmarks/guess_step.py [--models smollm2-135m ...] [--batches 1 2] [--guesses 2 4 8] [--plain 4 8 16] [--out FILE]

Random weights, greedy, context 320; every row looks up a text of one word, so all its guesses are tried. A step begins by putting the rows back, in all arms alike.
`late`: the same with tiles that wait for their turn before they do anything (`LayerProgram.early` = 0). --plain: batches whose plain step is timed with and without,
and whose logits are compared with fp32 first."""
import argparse
import os
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
import torch
import kernel_table as T
from kernel_table import GREEDY, World, distance, full_step, time_step
from llminfer.guess_kernels import KernelLookup
from llminfer.kernels import FusedProgram
from llminfer.layers import LayerProgram
from llminfer.runner import WideRing
from llminfer.speculative import DeviceLookup


class Late(LayerProgram): early = 0


def again(w, step):
    "A step that finds the rows as they were."
    w.reset()
    old = w.st.ints.clone()
    def run():
        w.st.ints.copy_(old)
        step()
    return run


def guesses(w, program, who, D):
    r = SimpleNamespace(state=w.st, sampler=w.sampler, ring=WideRing(64, w.B, torch.device("cuda"), draft=D), program=program)
    book = who(w.B, D, "cuda", least=0.0)
    book.asked.zero_()
    book.most.fill_(D)
    return again(w, partial(book.step, r, w.rows, 0, replace(GREEDY, draft=D)))


@torch.inference_mode()
def measure(name, model, B, Ds):
    w = World(model, B, 320)
    layers, late, fused = (kind(model, w.attention) for kind in (LayerProgram, Late, FusedProgram))
    for p in (layers, late, fused): p.prepare(w.st)
    plain = time_step(again(w, full_step(layers, w, distinct=True)), w)
    rows = []
    for D in Ds:
        arms = {"torch, eight launches": (fused, DeviceLookup), "kernels, eight launches": (fused, KernelLookup), "torch, tiles": (layers, DeviceLookup), "kernels, late": (late, KernelLookup),
                "kernels, tiles": (layers, KernelLookup)}
        us = {arm: time_step(guesses(w, p, who, D), w) for arm, (p, who) in arms.items()}
        rows.append({"model": name, "batch": B, "guesses": D, "us_plain": plain, "us": us, "ratio": {arm: x / plain for arm, x in us.items()}})
        print(name, B, "rows", D, "guesses: plain", round(plain, 1), {arm: f"{x:.1f} ({x / plain:.2f})" for arm, x in us.items()}, flush=True)
    return rows


@torch.inference_mode()
def measure_plain(name, model, exact, B):
    w = World(model, B, 320)
    ref = World(exact, B, 320, w)
    want, row = ref.logits(T.TorchProgram(exact, ref.attention)), {"model": name, "batch": B}
    for how, kind in (("late", Late), ("early", LayerProgram)):
        p = kind(model, w.attention)
        row["error_" + how] = distance(w.logits(p, distinct=True), want)
        same = w.logits(p, distinct=True)
        row["repeats_equal_" + how] = all(torch.equal(same, w.logits(p, distinct=True)) for _ in range(20))
        row["us_" + how] = time_step(full_step(p, w, distinct=True), w)
    print({k: round(v, 4) if isinstance(v, float) else v for k, v in row.items()}, flush=True)
    return row


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--models", nargs="+", default=["smollm2-135m", "esme-214m"], choices=list(T.SHAPES))
    ap.add_argument("--batches", nargs="+", type=int, default=[1, 2])
    ap.add_argument("--guesses", nargs="+", type=int, default=[2, 4, 8])
    ap.add_argument("--plain", nargs="*", type=int, default=[4, 8, 16])
    ap.add_argument("--out", default=os.path.join(os.environ.get("OUT", "."), "guess_step_h200.json"))
    a = ap.parse_args()
    rows, plain = [], []
    for name in a.models:
        model, exact = T.build(name)
        for B in a.plain: plain.append(measure_plain(name, model, exact, B))
        for B in a.batches: rows += measure(name, model, B, a.guesses)
        T.write_record(a.out, "guess_step", rows, plain=plain)
        del model, exact


if __name__ == "__main__": main()
