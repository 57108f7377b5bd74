"""What each way of keeping the weights, or the keys and values, in fewer bits costs: bytes, tokens a second, logit error, perplexity, changed tokens.

    OMP_NUM_THREADS=2 python benchmarks/quant_table.py [--models demo tiny] [--kinds nf4 int4 ...] [--device cpu] [--out FILE]

The judge is the same model before quantisation. It writes 500 greedy tokens; a quantised model reads them and says what it would have
written at each place (`changed`), and how far its logits are (`p50`, `p999`, `max`). Perplexity is of `quant_text.txt`. Before that, the
quantised model must equal a plain one with its expanded weights (kv-: with its keys and values decoded), in logits and in the tokens of
the engine. On a CPU tok/s is shown, not
claimed: every product expands its weights again. On a GPU the kernels of notebook 17a run, and the judge computes in float32."""
import argparse
import json
import sys
import tempfile
import time
from datetime import UTC, datetime
from pathlib import Path
import torch
import torch.nn.functional as F
from llminfer.core import CoreConfig, generate, make_core
from llminfer.cuda_graphs import GraphRunner
from llminfer.kv_codes import POOLS, decode, encode
from llminfer.layers import LayerProgram
from llminfer.loading import load_model, make_tiny, open_checkpoint
from llminfer.model import Dense, causal_attention
from llminfer.quant_formats import load_quantized, quant_info
from llminfer.quantization import QuantPlan, dense_weight, expanded, products
from llminfer.request import SamplingParams
from llminfer.runner import TorchProgram, TorchRunner
from llminfer.tokenization import load_tokenizer

ROOT = Path(__file__).resolve().parents[1]
KINDS = {"none": None, "int8": QuantPlan("int8"), "fp8": QuantPlan("fp8"), "int4-32": QuantPlan("int4", group=32), "int4": QuantPlan("int4"),
         "int4-zeros": QuantPlan("int4", symmetric=False), "nf4-single": QuantPlan("nf4", double_quant=False), "nf4": QuantPlan("nf4"), "fp4": QuantPlan("fp4"), "gguf": QuantPlan("gguf")}
KV = {"kv-fp8": "fp8", "kv-int8": "int8"}
STARTS = ("The capital of France is", "Once upon a time there was a", "def fibonacci(n):\n", "Water boils at", "Dear Sir or Madam,", "The three laws of", "In 1969, two men",
          "To bake bread you need", "Question: what is 12 times 12?\nAnswer:", "The best way to learn")


def written(model, prompts, n):
    "Greedy ids by the model itself, all prompts together."
    core = make_core(model, CoreConfig(block_size=16, n_blocks=600, max_num_seqs=16, max_model_len=512, max_num_batched_tokens=512), program=TorchProgram)
    return generate(core, prompts, SamplingParams(max_tokens=n, temperature=0.0))


def logits_of(model, ids, kv="auto"): # [L, V]
    "The oracle's logits; kv: over keys and values that were coded and decoded."
    if kv == "auto": return model.logits(ids)
    inside, at = causal_attention(model.config.windows), torch.arange(len(ids), device=model.device)
    def attend(layer, q, *held): return inside(layer, q, *(decode(*encode(x, kv), x.dtype) for x in held))
    return model.head(model.forward(torch.as_tensor(ids, device=model.device), at, attend))


def speed(model, prompt, n, device, kv):
    "Tokens a second of one sequence, the prompt not counted."
    runner, program = (GraphRunner, LayerProgram) if device.type == "cuda" else (TorchRunner, TorchProgram)
    core = make_core(model, CoreConfig(block_size=16, n_blocks=64, max_num_seqs=1, max_model_len=512, max_num_batched_tokens=512, kv_dtype=kv), runner=runner, program=program)
    took: dict[int, float] = {}
    for k in (n + 1, 1) if device.type == "cpu" else (n + 1, 1) * 5:       # the first turns on a GPU capture their steps
        t = time.perf_counter()
        out = generate(core, [prompt], SamplingParams(max_tokens=k, temperature=0.0))
        took[k] = min(took.get(k, 1e9), time.perf_counter() - t)
        if k > 1: text = out[0]
    return n / (took[n + 1] - took[1]), text


@torch.inference_mode()
def perplexity(model, ids, kv): return float(torch.exp(F.cross_entropy(logits_of(model, ids, kv)[:-1].float(), torch.tensor(ids[1:], device=model.device))))


@torch.inference_mode()
def row(name, kind, ckpt, dtype, device, judge, prompts, texts, ids, n_speed):
    "One line of the table."
    t = time.perf_counter()
    plan, kv = KINDS.get(kind), KV.get(kind, "auto")
    model = load_model(ckpt, dtype, device) if plan is None else load_quantized(ckpt, plan, dtype, device)
    load_s = time.perf_counter() - t
    tok_s, out = speed(model, prompts[0], n_speed if model.nbytes > 20e6 else 64, device, kv)
    same = model if plan is None else expanded(model)
    want = logits_of(same, prompts[0] + out, kv)
    gap = float((logits_of(model, prompts[0] + out, kv) - want).abs().max())
    if dtype == torch.float32: assert want[len(prompts[0]) - 1:-1].argmax(-1).tolist() == out and gap < 2e-3 * float(want.abs().max()), f"{name} {kind}: not its own oracle, {gap}"
    errors, changed = [], 0
    for p, o in zip(prompts, texts):
        a, b = (x[len(p) - 1:-1].float() for x in (logits_of(same, p + o, kv), judge.logits(p + o)))
        errors.append((a - b).abs().flatten())
        changed += int((a.argmax(-1) != b.argmax(-1)).sum())
    e = torch.cat(errors)
    at = lambda q: round(float(e.kthvalue(max(1, int(q * len(e))))[0]), 4)
    mats = products(model)[:-1]
    weights = sum(dense_weight(p, torch.float32).numel() for p in mats)
    c = model.config
    kv_bits = 4 * POOLS[kv].bytes_per_block(1, 1, c.n_kv_heads, c.head_dim, dtype) / (c.n_kv_heads * c.head_dim)
    return {"model": name, "kind": kind, "bits": round(8 * sum(p.nbytes for p in mats) / weights, 3), "kv_bits": kv_bits, "matrices_mb": round(sum(p.nbytes for p in mats) / 1e6, 3),
            "model_mb": round(model.nbytes / 1e6, 3), "tok_s": round(tok_s, 2), "p50": at(0.5), "p999": at(0.999), "max": round(float(e.max()), 4), "perplexity": round(perplexity(same, ids, kv), 4),
            "changed": changed, "tokens": sum(map(len, texts)), "oracle_gap": gap, "load_s": round(load_s, 2), "kernels": quant_info(model).get("quant_kernels", "dense")}


def main():
    ap = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ap.add_argument("--models", nargs="+", default=["demo", "tiny"], help="demo, tiny, or what open_checkpoint takes")
    ap.add_argument("--kinds", nargs="+", default=[*KINDS, *KV], choices=[*KINDS, *KV])
    ap.add_argument("--device", default="cpu")
    ap.add_argument("--dtype", default="auto")
    ap.add_argument("--tokens", type=int, default=50, help="for each of ten prompts")
    ap.add_argument("--speed-tokens", type=int, default=0, help="0: 3 on a CPU, 128 on a GPU")
    ap.add_argument("--out", help="the record; default: printed only")
    a = ap.parse_args()
    device, rows = torch.device(a.device), []
    dtype = {"auto": torch.float32 if device.type == "cpu" else torch.bfloat16}.get(a.dtype) or getattr(torch, a.dtype)
    n_speed = a.speed_tokens or (3 if device.type == "cpu" else 128)
    for name in a.models:
        folder = tempfile.TemporaryDirectory()
        ckpt = open_checkpoint(make_tiny(Path(folder.name) / "m", "qwen3", 0) if name == "tiny" else name)
        tok, judge = load_tokenizer(ckpt.tokenizer), load_model(ckpt, torch.float32, device, linear=Dense)
        prompts, ids = [tok.encode(p) for p in STARTS], tok.encode((ROOT / "benchmarks/quant_text.txt").read_text(encoding="utf-8"))[:min(512, ckpt.config.max_position_embeddings)]
        with torch.inference_mode(): texts = written(judge, prompts, a.tokens)
        for kind in a.kinds:
            if kind == "gguf" and ckpt.format != "gguf":
                print(f"{name:6s} gguf        left out: its weights are not quantised in the file", flush=True)
                continue
            rows.append(row(name, kind, ckpt, dtype, device, judge, prompts, texts, ids, n_speed))
            r = rows[-1]
            print(f"{name:6s} {kind:11s} {r['bits']:6.2f} bits, KV {r['kv_bits']:5.2f} {r['model_mb']:8.2f} MB {r['tok_s']:8.1f} tok/s  error {r['p50']:.3f} {r['p999']:.3f} {r['max']:.3f}  "
                  f"perplexity {r['perplexity']:.3f}  changed {r['changed']} of {r['tokens']}", flush=True)
    gpu = torch.cuda.get_device_name(device) if device.type == "cuda" else None
    record = {"kind": "quant_table", "rows": rows, "environment": {"device": gpu or "cpu", "threads": torch.get_num_threads(), "dtype": str(dtype).removeprefix("torch."),
              "python": sys.version.split()[0], "torch": torch.__version__, "date": datetime.now(UTC).isoformat(timespec="seconds")}}
    if a.out: Path(a.out).write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__": main()
