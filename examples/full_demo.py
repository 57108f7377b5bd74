"""Everything once: a text, a stream, a batch, a shared prefix; with flags also 4-bit weights, a benchmark with plots, backends compared.

    python examples/full_demo.py [--model demo] [--nf4] [--benchmark] [--compare eager,paged] [--outdir DIR]
"""
from __future__ import annotations
import argparse, sys
from pathlib import Path
from llminfer import EngineConfig, InferenceEngine, QuantConfig
from llminfer.benchmark import BackendComparison, Benchmarker

RULES = "You are a careful assistant who answers in one short sentence and says so when the answer is not known. " * 2


def title(text: str) -> None: print(f"\n== {text} ==")


def generate(engine: InferenceEngine, n: int) -> None:
    title("one text")
    r = engine.run("The capital of France is", max_new_tokens=n, temperature=0)
    s = r.stats
    print(r.generated_text.strip())
    print(f"latency={s.total_latency_ms:.0f}ms  tokens={s.generated_tokens}  tok/s={s.throughput_tokens_per_sec:.1f}")
    title("a stream")
    for chunk in engine.stream("Once upon a time", max_new_tokens=n, seed=1): print(chunk.token, end="", flush=True)
    title("a batch of four, each with settings of its own if you like")
    prompts = ["1, 2, 3,", "Monday, Tuesday,", "red, green,", "Paris, Rome,"]
    for p, x in zip(prompts, engine.run_batch(prompts, max_new_tokens=n, temperature=0)):
        print(f"{p} {x.generated_text.strip()[:60]!r} ({x.finish_reason})")
    title("two prompts that begin alike")
    for q in ("What is bread?", "What is snow?"):
        s = engine.run(RULES + q, prefix_key="demo", max_new_tokens=2, temperature=0).stats
        print(f"cache_hit={s.cache_hit}: {s.cached_tokens} of {s.prompt_tokens} prompt tokens from the cache")


def quantised(a: argparse.Namespace) -> None:
    title("4-bit weights (NF4)")
    cfg = EngineConfig(a.model, backend="eager", quant=QuantConfig("nf4"), device=a.device)  # type: ignore[arg-type]
    with InferenceEngine(cfg) as engine:
        print(engine.run("The capital of France is", max_new_tokens=a.max_new_tokens, temperature=0).generated_text)


def main() -> int:
    ap = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ap.add_argument("--model", default="demo")
    ap.add_argument("--device", default="auto")
    ap.add_argument("--max-new-tokens", type=int, default=24)
    ap.add_argument("--nf4", action="store_true", help="also load the model in 4 bits (needs bitsandbytes)")
    ap.add_argument("--benchmark", action="store_true", help="also measure, and write plots")
    ap.add_argument("--compare", metavar="BACKENDS", help="also compare backends, such as paged,eager,compiled")
    ap.add_argument("--batch-sizes", default="1,2,4")
    ap.add_argument("--runs", type=int, default=3)
    ap.add_argument("--outdir", type=Path, default=Path("demo_out"))
    a = ap.parse_args()
    sizes = [int(x) for x in a.batch_sizes.split(",")]
    with InferenceEngine(EngineConfig(a.model, device=a.device)) as engine:
        generate(engine, a.max_new_tokens)
        if a.benchmark:
            title("measured")
            result = Benchmarker(engine).run(sizes, num_runs=a.runs, warmup_runs=1, prompt_type="short", max_new_tokens=a.max_new_tokens)
            result.print_summary()
            print(*result.plot_suite(str(a.outdir)).values(), sep="\n")
    if a.nf4: quantised(a)
    if a.compare:
        title("compared")
        c = BackendComparison(a.model, a.compare.split(","), device=a.device)
        results = c.run(sizes, num_runs=a.runs, max_new_tokens=a.max_new_tokens, prompt_type="short")
        c.print_table(results)
        print(c.plot(results, str(a.outdir / "comparison.png")))
    return 0


if __name__ == "__main__": sys.exit(main())
