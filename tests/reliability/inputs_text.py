"""Edge texts through a model whose answer is a script: I6 (Unicode) and I7 (stop strings). Streamed and whole answers over HTTP, and an oracle in ten lines."""
from __future__ import annotations
import random
from typing import Any, Iterator
from reliability.table import Counted, family
from support.api import Server, serving
from support.engines import all_closed, forced_engine, forced_prompt

PER_ENGINE = 60      # scripts of one forced model
PIECES = ["a", "b", " ", "\n", "\t", "é", "ß", "日本", "한국어", "ا", "שלום", "🌶", "🤗", "👩‍👩‍👧", "👍🏽", "🇪🇺", "1️⃣", "\u200d", "\u200f", "\u202e", "\u2028", "\u2029", "\x85", "\ufeff", "\x00", "\x1b[31m",
    "Z" + "\u0300\u0323\u035c" * 12, "e\u0301", "\ue000", "\U0010fffd", "\U000f0000", "ﷺ", "𝔘", "\ufdd0", "<|im_end|>", "</s>", "<script>", "\\u0041", "&amp;", "{{ x }}", "data: [DONE]\n\n", '"}'] 


def texts(rng: random.Random, n: int) -> Iterator[str]:
    "n strings that have hurt somebody."
    for k in range(n):
        if k < len(PIECES): yield PIECES[k]
        elif k % 7 == 0: yield "".join(chr(rng.choice((rng.randrange(32, 0xd800), rng.randrange(0xe000, 0x110000)))) for _ in range(rng.randrange(1, 10)))
        else: yield "".join(rng.choice(PIECES) for _ in range(rng.randrange(2, 7)))


def blocks(items: list[Any]) -> Iterator[tuple[list[Any], list[str]]]:
    for i in range(0, len(items), PER_ENGINE): yield (part := items[i:i + PER_ENGINE]), [x if isinstance(x, str) else x[0] for x in part]


def said(s: Server, k: int, **body: Any) -> tuple[str, str, list[str]]:
    "Text and finish reason of script k, which the stream confirms; and the stream's pieces."
    body = {"prompt": forced_prompt(k), "max_tokens": 300, "temperature": 0, **body}
    whole = s.complete(**body)["choices"][0]
    events = [e["choices"][0] for e in s.events("/v1/completions", **body)]
    shown, reasons = [e["text"] for e in events], [e["finish_reason"] for e in events if e["finish_reason"]]
    assert "".join(shown) == whole["text"] and reasons == [whole["finish_reason"]], (whole, shown, reasons)
    return whole["text"], whole["finish_reason"], shown


@family("I6", "Unicode texts", goal=300, sample=50)
def unicode_texts(seed: int, count: int, c: Counted) -> None:
    huge = count > 100      # a few long ones need no forced model
    items = list(texts(random.Random(seed), count - 10 * huge))
    with all_closed():
        for _, answers in blocks(items):
            with serving(forced_engine(answers, max_model_len=400, max_num_seqs=4)) as s:
                for k, text in enumerate(answers):
                    with c.case(ascii(text)):
                        got, reason, shown = said(s, k)
                        assert got == text and reason == "stop", (got, reason)
                        assert not any("\ufffd" in x for x in shown) or "\ufffd" in text, shown
                        back = s.post("/detokenize", tokens=s.post("/tokenize", prompt=text, add_special_tokens=False).json()["tokens"]).json()["prompt"]
                        assert back == text, (back, text)
                s.settle()
        if not huge: return
        with serving(forced_engine(["ok"], max_model_len=400)) as s:
            for ch in ("a", " ", "é", "🌶", "\u2028"):
                text = ch * (2**20 // len(ch.encode()))                    # 1 MiB
                with c.case(f"1 MiB of {ascii(ch)} as a prompt"):
                    r = s.http.post("/v1/completions", json={"prompt": text, "max_tokens": 1}, timeout=5)
                    assert (r.status_code, r.json()["error"]["code"]) == (400, "context_length_exceeded"), r.text[:200]
                with c.case(f"1 MiB of {ascii(ch)} there and back"):
                    ids = s.http.post("/tokenize", json={"prompt": text, "add_special_tokens": False}, timeout=5).json()["tokens"]
                    assert s.http.post("/detokenize", json={"tokens": ids}, timeout=5).json()["prompt"] == text


# I7: stop strings

def cut(text: str, stops: list[str]) -> tuple[str, bool]:
    "The text before the stop string that completes first, of those that complete together the longest."
    for end in range(1, len(text) + 1):
        if found := [x for x in stops if x and text[:end].endswith(x)]: return text[:end - max(map(len, found))], True
    return text, False


def stops_of(rng: random.Random, text: str) -> list[str]:
    "Stop strings of every kind the table names."
    part = lambda: text[(i := rng.randrange(len(text))):i + rng.randrange(1, 6)]
    match rng.randrange(9):
        case 0: return [""]
        case 1: return [part()[:1]]
        case 2: return [part(), part() + part(), part()]                     # overlapping
        case 3: return [rng.choice("xyzqé🌶") * 4096]
        case 4: return [f"stop {i}" for i in range(99)] + [part()]
        case 5: return [text]
        case 6: return [text + "!", part() + "\ufffd"]                        # never there, but almost
        case 7: return ["<|im_end|>", "</s>", "<s>", part()]
        case _: return [(rng.choice(["🌶", "👩‍👩‍👧", "e\u0301"]))[:1], part()]    # a beginning of an emoji


@family("I7", "Stop strings", goal=200, sample=35)
def stop_strings(seed: int, count: int, c: Counted) -> None:
    rng = random.Random(seed)
    items = [(t, stops_of(rng, t)) for t in texts(rng, count - 5 * (count >= 20))]
    with all_closed():
        for part, answers in blocks(items):
            with serving(forced_engine(answers, max_model_len=400, max_num_seqs=4, window_steps=rng.choice((1, 4)))) as s:
                for k, (text, stops) in enumerate(part):
                    with c.case(ascii((text, stops))[:300]):
                        got, reason, _ = said(s, k, stop=stops)
                        assert (got, reason) == (cut(text, stops)[0], "stop"), (got, reason, cut(text, stops))
                s.settle()
        if count < 20: return
        with serving(forced_engine(["ok"], max_model_len=400)) as s:
            for stop in (["x" * 65537], ["ab"] * 40_000, [5], [None], {"a": 1}):
                with c.case(f"refused: {ascii(stop)[:40]}"):
                    r = s.http.post("/v1/completions", json={"prompt": forced_prompt(0), "max_tokens": 1, "stop": stop}, timeout=5)
                    assert (r.status_code, str(r.json()["error"]["param"])[:4]) == (400, "stop"), r.text[:200]


