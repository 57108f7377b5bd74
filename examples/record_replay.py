"""Record the run that the site's first page replays: the engine with the demo chat model and a pool that is a little too small.

    python examples/record_replay.py [--model demo] [--out examples/replay.jsonl]
"""
from __future__ import annotations
import argparse
from pathlib import Path
from llminfer.controls import Play, lessons, model_of, outcome, play

def main() -> None:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--model", default="demo", help="script, tiny or demo")
    p.add_argument("--out", default=str(Path(__file__).with_name("replay.jsonl")))
    a = p.parse_args()
    load = Play(n_blocks=13, rows=6, requests=14, rate=0.6, prompt=50, shared=32, tokens=64, chunk=32, seed=4)
    trace = play(load, model_of(a.model))
    trace.save(a.out)
    print(*lessons(outcome(trace), load), f"wrote {a.out}", sep="\n")

if __name__ == "__main__": main()
