"""What LoRA adapters cost: decode throughput of a batch whose rows have none, one, or several adapters.

    python benchmarks/adapters.py [--shape qwen3-8b] [--batch 64] [--adapters 1 8] [--rank 16] [--tokens 64] [--out FILE]

Random weights of a shape (bytes and launches are what counts), all linear layers adapted, rows spread over the adapters, every kind of
batch in turn, medians of `--runs`. Goal of issue 8 on an H200: 8 adapters of rank 16 in a batch of 64 keep 85% of the base's
throughput. Also: seconds of a load (read, check, copy) and of an unload, and that base-only windows stay on the base program while adapters are loaded.
"""
import argparse, json, platform, statistics, tempfile, time
from pathlib import Path
import numpy as np
import torch
from llminfer.adapter_books import Adapters
from llminfer.adapters import make_adapter
from llminfer.assembly import build_core
from llminfer.config import CacheConfig, EngineConfig
from llminfer.core import CoreConfig
from llminfer.families import ModelConfig
from llminfer.model import Dense, Layer, Transformer
from llminfer.request import SamplingParams

SHAPES = {"qwen3-8b": ModelConfig("qwen3", 151936, 4096, 12288, 36, 32, 8, 128, qk_norm=True, max_position_embeddings=4096),
          "esme": ModelConfig("qwen3", 32768, 1024, 3072, 12, 16, 8, 64, qk_norm=True, tie_embeddings=True, max_position_embeddings=4096),
          "small": ModelConfig("llama", 8192, 576, 1536, 8, 9, 3, 64, tie_embeddings=True, max_position_embeddings=2048)}


def random_model(c: ModelConfig, dtype: torch.dtype, device: str) -> Transformer:
    "Weights made where they stay: no copy of them in the host's memory."
    def w(*shape: int) -> torch.Tensor: return torch.randn(shape, dtype=dtype, device=device) * shape[-1]**-0.5
    ones, heads = torch.ones(c.hidden_size, dtype=dtype, device=device), c.n_heads + 2 * c.n_kv_heads
    norm = torch.ones(c.n_heads + c.n_kv_heads, c.head_dim, dtype=dtype, device=device) if c.qk_norm else None
    D, E, F = c.hidden_size, c.head_dim, c.intermediate_size
    layers = [Layer(ones, Dense(w(heads * E, D)), norm, Dense(w(D, c.n_heads * E)), ones, Dense(w(2 * F, D)), Dense(w(D, F))) for _ in range(c.n_layers)]
    embed = w(c.vocab_size, D)
    return Transformer(c, embed, layers, ones, Dense(embed if c.tie_embeddings else w(c.vocab_size, D)))


def tokens_per_second(core, books, names, batch: int, n: int, prompt: int) -> float:
    "Decode steps of a full batch, prefill not counted."
    rng, base = np.random.default_rng(0), core.next_id
    for i in range(batch):
        lease = books.lease(names[i % len(names)])
        ids = rng.integers(3, core.runner.model.config.vocab_size, prompt, dtype=np.int32)
        core.add([base + i], ids, [SamplingParams(temperature=0, max_tokens=n)], lora=lease.slot, key=rng.bytes(8))
        lease.release()                                   # nothing is unloaded meanwhile
    core.next_id += batch
    done, start, first = 0, 0.0, set()
    while core.has_work:
        for d in core.step():
            if start: done += len(d.tokens)
            first.add(d.seq_id)
        if not start and len(first) == batch: start = time.perf_counter()
    return done / (time.perf_counter() - start)


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    cuda = torch.cuda.is_available()
    p.add_argument("--shape", choices=SHAPES, default="qwen3-8b" if cuda else "small")
    p.add_argument("--batch", type=int, default=64 if cuda else 8)
    p.add_argument("--adapters", type=int, nargs="+", default=[1, 8])
    p.add_argument("--rank", type=int, default=16)
    p.add_argument("--tokens", type=int, default=128 if cuda else 24)
    p.add_argument("--prompt", type=int, default=64)
    p.add_argument("--runs", type=int, default=5)
    p.add_argument("--out", type=Path)
    a = p.parse_args()
    device, dtype = ("cuda", torch.bfloat16) if cuda else ("cpu", torch.float32)
    model = random_model(SHAPES[a.shape], dtype, device)
    length = a.prompt + a.tokens + 16
    limits = CoreConfig(n_blocks=a.batch * -(-length // 16) + 8, max_num_seqs=a.batch, max_num_batched_tokens=max(512, a.batch * a.prompt), max_model_len=length,
        window_steps=16 if cuda else 1, max_in_flight=2 if cuda else 1, follow=cuda)
    core = build_core(EngineConfig(device=device, cache=CacheConfig(enable_prefix_cache=False)), model, limits)
    books = Adapters(model)
    books.attach(core)
    kinds, seconds = {"base": [None]}, []
    with tempfile.TemporaryDirectory() as tmp:
        for i in range(max(a.adapters)):
            folder = make_adapter(Path(tmp) / "adapter", model.config, i, r=a.rank, strength=0.1, dtype=torch.float16)
            t = time.perf_counter()
            books.load(folder, f"a{i}", activate=False)
            seconds.append(time.perf_counter() - t)
    kinds |= {f"{n} adapters": [f"a{i}" for i in range(n)] for n in a.adapters} | {"half base": [None, "a0"]}
    for names in kinds.values(): tokens_per_second(core, books, names, a.batch, a.tokens, a.prompt)      # captures
    speed = {k: [] for k in kinds}
    for _ in range(a.runs):
        for k, names in kinds.items(): speed[k].append(tokens_per_second(core, books, names, a.batch, a.tokens, a.prompt))
    base = statistics.median(speed["base"])
    where = {"device": torch.cuda.get_device_name() if cuda else platform.processor() or "cpu", "torch": torch.__version__, "date": time.strftime("%Y-%m-%d"), "threads": torch.get_num_threads()}
    out = {"kind": "adapters", "environment": where, "shape": a.shape, "batch": a.batch, "rank": a.rank, "dtype": str(dtype)[6:],
        "adapter_mb": round(books.names["a0"].nbytes / 1e6, 2), "slots_mb": round(books.stacks.nbytes / 1e6, 2), "load_s": round(statistics.median(seconds), 4),
        "tokens_per_s": {k: round(statistics.median(v), 1) for k, v in speed.items()}, "share_of_base": {k: round(statistics.median(v) / base, 3) for k, v in speed.items()},
        "eager_steps": core.trace.counters.get("eager_steps", 0)}
    print(json.dumps(out, indent=1))
    if a.out: a.out.write_text(json.dumps(out, indent=1) + "\n")


if __name__ == "__main__": main()
