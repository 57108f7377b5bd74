"""Write README.md from nbs/index.ipynb, whose table of floors is brought up to date first; `--check` only says if both are current."""
from __future__ import annotations
import json, re, sys
from typing import Any
from house import ROOT, directives, notebooks, settings, source, subtitle

MARK = "<!-- floors: written by tools/readme.py -->"
PLAN = {  # floors of the plan, for those that no notebook has built yet
    "04_model": "A decoder-only transformer, and the full-recompute oracle",
    "05_loading": "Hugging Face safetensors, GGUF, the demo model",
    "06_tokenization": "Tokenizer and chat template",
    "07_streaming": "Text as it is made, stop strings",
    "08_kv_cache": "Block pool, block tables, prefix cache: integers only",
    "09_attention": "Attention over pages",
    "10_sampling": "Sampling per row, random numbers by counter",
    "11_batching": "The scheduler: continuous batching, chunked prefill, preemption",
    "12_runner": "State on the device, windows of steps, the ring",
    "13_core": "The loop that ties 08 to 12 together",
    "14_cuda_graphs": "Any step program captured",
    "15_kernels": "Triton and FlashInfer",
    "16_speculative": "Drafts, verified without loss",
    "17_quantization": "Fewer bytes a weight",
    "18_adapters": "LoRA, many in one batch",
    "19_structured": "JSON schema, regex, grammar",
    "20_parallel": "Tensor parallel over several GPUs",
    "21_backends": "One protocol for ours and others' engines",
    "22_engine": "`InferenceEngine`: the façade",
    "23_dashboard": "Live widgets, replay",
    "24_serving": "The engine behind asyncio",
    "25_api": "OpenAI-compatible server",
    "26_benchmark": "Benchmarks and the evidence gate",
    "27_scaling": "Replicas",
    "28_cli": "The `llminfer` command",
}

def floor_table() -> str:
    "The reading order: what is built, from the notebooks themselves, and what is planned."
    built = {p.stem: f"| [{p.stem}]({p.name}) | {subtitle(p)} | |" for p in notebooks() if p.stem[:2].isdigit()}
    rows = {**{k: f"| {k} | {v} | planned |" for k, v in PLAN.items()}, **built}
    return "\n".join([MARK, "", "| notebook = module | idea | |", "|---|---|---|", *(rows[k] for k in sorted(rows))])

def outputs(cell: dict[str, Any]) -> str:
    "A code cell's stored text outputs."
    return "".join("".join(o.get("text") or o.get("data", {}).get("text/plain", [])) for o in cell["outputs"]).rstrip()

def readme(index: list[dict[str, Any]]) -> str:
    "Markdown of the index: prose as it is but for links to notebooks, code fenced (unless `echo: false`), outputs indented."
    nbs = settings()["nbs_path"]
    parts = ["<!-- Built from nbs/index.ipynb by tools/readme.py: edit the notebook, then `make readme`. -->"]
    for c in index:
        if c["cell_type"] == "markdown": parts.append(re.sub(r"\]\((\w+\.ipynb)\)", rf"]({nbs}/\1)", source(c).strip()))
        elif "hide" not in directives(c):
            code = "\n".join(line for line in source(c).splitlines() if not line.startswith("#|")).strip()
            out = outputs(c)
            if "#| echo: false" in source(c): parts.append(f"```\n{out}\n```")
            else: parts += [f"```python\n{code}\n```", *(["\n".join("    " + line for line in out.splitlines())] if out else [])]
    return "\n\n".join(parts) + "\n"

def build() -> dict[str, str]:
    "What nbs/index.ipynb and README.md ought to hold, by path."
    nb = json.loads((ROOT / "nbs/index.ipynb").read_text(encoding="utf-8"))
    for c in nb["cells"]:
        if source(c).startswith(MARK): c["source"] = floor_table().splitlines(keepends=True)
    return {"nbs/index.ipynb": json.dumps(nb, indent=1, ensure_ascii=False) + "\n", "README.md": readme(nb["cells"])}

def stale() -> list[str]:
    "Files that are not what `build` makes."
    return [p for p, text in build().items() if not (ROOT / p).exists() or (ROOT / p).read_text(encoding="utf-8") != text]

if __name__ == "__main__":
    old = stale()
    if "--check" in sys.argv: sys.exit(f"not current, run make readme: {', '.join(old)}" if old else 0)
    for path, text in build().items(): (ROOT / path).write_text(text, encoding="utf-8")
    print("written:", ", ".join(old) or "nothing, all current")
