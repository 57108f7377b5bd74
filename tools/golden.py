"""Golden continuations of a model: greedy, each token the best one of a forward over the whole sequence, by transformers in float32.

    python tools/golden.py [MODEL [--revision COMMIT]] [--out tests/fixtures/demo.json]

`generate` with its cache is not the reference on purpose: it may round differently at one step and then tells another story.
What the engine says is held against these files by tests/test_golden.py.
"""
from __future__ import annotations
import argparse, json, sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
FORMAT_VERSION = 1
MAX_NEW = 40
SCHEMAS = {
    "library": "CREATE TABLE book (id INTEGER, title TEXT, author TEXT, year INTEGER); "
        "CREATE TABLE loan (book_id INTEGER, reader TEXT, due DATE);",
    "school": "CREATE TABLE pupil (id INTEGER, name TEXT, class TEXT); "
        "CREATE TABLE mark (pupil_id INTEGER, subject TEXT, points INTEGER);",
    "harbour": "CREATE TABLE ship (id INTEGER, name TEXT, flag TEXT, tons INTEGER); "
        "CREATE TABLE berth (ship_id INTEGER, pier INTEGER, since DATE);"}
QUESTIONS = {"library": "Which books were written before 1950?", "school": "What is the average number of points in each subject?",
    "harbour": "How many ships lie at pier 3?"}


def prompt_of(db_id: str) -> str: return f"Tables:\n{SCHEMAS[db_id]}\n\nWrite one SQL query that answers: {QUESTIONS[db_id]}"


def prompts(tok: Any) -> dict[str, list[int]]:
    "Ids of each case: as a chat if the model has a template, else as plain text."
    chat = lambda text: tok.encode_chat([{"role": "user", "content": text}])
    return {db: [int(i) for i in (chat(prompt_of(db)) if tok.chat_template else tok.encode(prompt_of(db)))] for db in SCHEMAS}


def reference(ckpt: Any, revision: str | None = None) -> Any:
    "transformers' model in float32; a GGUF file is read and dequantised by the `gguf` package, not by us."
    import torch
    if ckpt.format == "gguf":
        sys.path.insert(0, str(ROOT / "tests"))
        from support.hf import hf_from_checkpoint
        return hf_from_checkpoint(ckpt)
    from transformers import AutoModelForCausalLM
    return AutoModelForCausalLM.from_pretrained(ckpt.name, revision=revision, dtype=torch.float32).eval()


def continuation(net: Any, ids: list[int], ends: Any, n: int = MAX_NEW) -> list[int]:
    "Greedy by whole forwards: `generate` guesses, one forward over all of it says which token is the best at each place."
    import torch
    out = list[int]()
    while len(out) < n and not (out and out[-1] in ends):
        x = torch.tensor([[*ids, *out]])
        with torch.inference_mode():
            guess = net.generate(x, attention_mask=torch.ones_like(x), do_sample=False, max_new_tokens=n - len(out),
                eos_token_id=list(ends) or None, pad_token_id=0)[0]
            best = net(guess[None], use_cache=False).logits[0, x.shape[1] - 1:].argmax(-1).tolist()
        for told, right in zip([*guess[x.shape[1]:].tolist(), -1], best):      # what follows a wrong guess is not used
            out.append(right)
            if told != right or right in ends or len(out) == n: break
    return out


def make_golden(model: str, revision: str | None = None) -> dict[str, Any]:
    "The whole fixture."
    import torch, transformers
    from llminfer.loading import open_checkpoint
    from llminfer.tokenization import load_tokenizer
    ckpt = open_checkpoint(model, revision=revision)
    tok, net = load_tokenizer(ckpt.tokenizer), reference(ckpt, revision)
    ends = sorted(int(i) for i in tok.eos_token_ids)
    cases = []
    for db, ids in prompts(tok).items():
        new = continuation(net, ids, ends)
        cases.append({"case_id": f"{db}-1", "db_id": db, "question": QUESTIONS[db], "prompt_ids": ids,
            "continuation_ids": new, "continuation_text": tok.decode(new)})
        print(f"{db}: {cases[-1]['continuation_text']!r}", file=sys.stderr)
    return {"format_version": FORMAT_VERSION, "model": {"id": model, "revision": revision},
        "environment": {"transformers": transformers.__version__, "torch": torch.__version__, "dtype": "float32"},
        "decoding": {"do_sample": False, "temperature": 0.0, "max_new_tokens": MAX_NEW, "eos_token_ids": ends,
            "hf_method": "full_recompute_greedy"},
        "prompt_builder": {"file": "tools/golden.py", "function": "prompts", "chat_template": bool(tok.chat_template)}, "cases": cases}


def main() -> int:
    ap = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ap.add_argument("model", nargs="?", default="demo")
    ap.add_argument("--revision")
    ap.add_argument("--out", type=Path)
    a = ap.parse_args()
    out = a.out or ROOT / "tests/fixtures" / f"{Path(a.model).name}.json"
    golden = make_golden(a.model, a.revision)
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(golden, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    print(out)
    return 0


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    sys.exit(main())
