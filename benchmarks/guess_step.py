"""Microseconds of a captured step with guesses, beside the plain step: kernels or torch around the forward pass, tiles or eight launches in it. Needs CUDA.

    PYTHONPATH=. python3 benchmarks/guess_step.py [--models smollm2-135m ...] [--batches 1 2] [--guesses 2 4 8] [--out FILE]

Random weights, greedy, context 320; every row looks up a text of one word, so all its guesses are tried. A step begins by putting the rows back, in all arms alike."""
import argparse
import os
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
import torch
import kernel_table as T
from kernel_table import GREEDY, World, full_step, time_step
from llminfer.guess_kernels import KernelLookup
from llminfer.kernels import FusedProgram
from llminfer.layers import LayerProgram
from llminfer.runner import WideRing
from llminfer.speculative import DeviceLookup


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
    layers, fused = (kind(model, w.attention) for kind in (LayerProgram, FusedProgram))
    for p in (layers, fused): p.prepare(w.st)
    plain = time_step(again(w, full_step(layers, w, distinct=True)), w)
    rows = []
    for D in Ds:
        arms = {"torch, eight launches": (fused, DeviceLookup), "kernels, eight launches": (fused, KernelLookup), "torch, tiles": (layers, DeviceLookup),
                "kernels, tiles": (layers, KernelLookup)}
        us = {arm: time_step(guesses(w, p, who, D), w) for arm, (p, who) in arms.items()}
        rows.append({"model": name, "batch": B, "guesses": D, "us_plain": plain, "us": us, "ratio": {arm: x / plain for arm, x in us.items()}})
        print(name, B, "rows", D, "guesses: plain", round(plain, 1), {arm: f"{x:.1f} ({x / plain:.2f})" for arm, x in us.items()}, flush=True)
    return rows


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--models", nargs="+", default=["smollm2-135m", "esme-214m"], choices=list(T.SHAPES))
    ap.add_argument("--batches", nargs="+", type=int, default=[1, 2])
    ap.add_argument("--guesses", nargs="+", type=int, default=[2, 4, 8])
    ap.add_argument("--out", default=os.path.join(os.environ.get("OUT", "."), "guess_step_h200.json"))
    a = ap.parse_args()
    rows = []
    for name in a.models:
        model = T.build(name)[0]
        for B in a.batches: rows += measure(name, model, B, a.guesses)
        T.write_record(a.out, "guess_step", rows)
        del model


if __name__ == "__main__": main()
