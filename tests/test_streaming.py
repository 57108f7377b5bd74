"""Streamed text equals the one-shot decode cut at the earliest stop string: any text, any cutting of the ids, any stop strings."""
from __future__ import annotations
import time
import pytest
import tokenizers as tk
from hypothesis import example, given, settings, strategies as st
from tokenizers import decoders, models, normalizers, pre_tokenizers
from llminfer.streaming import IncrementalDetokenizer, StopAutomaton, StopMatcher, TextStream
from llminfer.tokenization import Tokenizer, TokenizerParts

HARD = "ď 🌶 👨‍👩‍👧 🇫🇷 한"


def byte_level() -> Tokenizer:
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = ["DEF", "HI", ",c!", "ab", "ba", "aba", "ðŁĮ", "Ġa", "ĠðŁ"]
    vocab = {w: i for i, w in enumerate([*letters, *words])}
    t = tk.Tokenizer(models.BPE(vocab=vocab, merges=[("a", "b"), ("b", "a"), ("ab", "a"), ("Ġ", "a")]))
    t.pre_tokenizer, t.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    t.add_special_tokens(["<|end|>", "<|pad|>"])
    return Tokenizer(TokenizerParts(t, {"eos_token": "<|end|>"}))


def byte_fallback(prepend: bool = True) -> Tokenizer:
    words = ["<unk>", "<|end|>", *(f"<0x{b:02X}>" for b in range(256)), "▁", *"abcxyz.", "▁a", "ab", "▁b"]
    merges = [("▁", "a"), ("a", "b"), ("▁", "b")]
    bpe = models.BPE(vocab={w: i for i, w in enumerate(words)}, merges=merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    t = tk.Tokenizer(bpe)
    t.normalizer = normalizers.Sequence([*[normalizers.Prepend("▁")] * prepend, normalizers.Replace(" ", "▁")])
    strip = [decoders.Strip(" ", 1, 0)] * prepend
    t.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), *strip])
    t.add_special_tokens(["<|end|>"])
    return Tokenizer(TokenizerParts(t, {"eos_token": "<|end|>"}))


def metaspace() -> Tokenizer:
    words = ["<unk>", "<|end|>", "▁", *"abcxyz.", "▁a", "ab", "▁b"]
    t = tk.Tokenizer(models.BPE(vocab={w: i for i, w in enumerate(words)}, merges=[("▁", "a"), ("a", "b"), ("▁", "b")], unk_token="<unk>"))
    t.pre_tokenizer, t.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    t.add_special_tokens(["<|end|>"])
    return Tokenizer(TokenizerParts(t))


KINDS = {"bytes": byte_level(), "fallback": byte_fallback(), "gemma": byte_fallback(False), "metaspace": metaspace()}
kinds = st.sampled_from(sorted(KINDS))


def cut(data: st.DataObject, ids: list[int]) -> list[list[int]]:
    at = sorted(data.draw(st.lists(st.integers(0, len(ids)), max_size=6)))
    return [ids[a:b] for a, b in zip([0, *at], [*at, len(ids)])]


def earliest(full: str, stops: list[str], after: int = 0) -> str | None:
    "The stop string that completes first past `after` characters (the longest of those that complete together)."
    ends = [(e, s) for e in range(after + 1, len(full) + 1) for s in stops if s and full[:e].endswith(s)]
    return min(ends, key=lambda x: (x[0], -len(x[1])))[1] if ends else None


def cut_at(full: str, stops: list[str], include: bool, after: int) -> tuple[str, str | None]:
    s = earliest(full, stops, after)
    if s is None: return full, None
    end = next(e for e in range(after + 1, len(full) + 1) if full[:e].endswith(s))
    return full[:end if include else end - len(s)], s


@settings(max_examples=400, deadline=None)
@given(kinds, st.data())
def test_any_ids_any_cutting_equal_the_one_shot_decode(kind, data):
    "Random ids too: half characters, invalid bytes, special ids, ids past the vocabulary."
    tok = KINDS[kind]
    ids = data.draw(st.lists(st.integers(0, tok.vocab_size + 3), max_size=40))
    skip = data.draw(st.booleans())
    d = IncrementalDetokenizer(tok, skip_special_tokens=skip)
    assert "".join(map(d.push, cut(data, ids))) + d.finish() == tok.decode(ids, skip)


@settings(max_examples=300, deadline=None)
@given(kinds, st.text(max_size=20), st.text(max_size=20), st.data())
@example("bytes", HARD, HARD, None)
def test_valid_text_never_shows_a_replacement_character(kind, before, text, data):
    tok = KINDS[kind]
    before, text = ("".join(c for c in t if c in "abcxyz. ") if kind == "metaspace" else t.replace("\ufffd", "") for t in (before, text))
    ids, prompt = tok.encode(text), tok.encode(before)
    d = IncrementalDetokenizer(tok)
    pieces = [d.push(c) for c in (cut(data, ids) if data else [[i] for i in ids])]
    assert "".join(pieces) == tok.decode(ids) and "\ufffd" not in "".join(pieces) and d.finish() == ""
    d = IncrementalDetokenizer(tok, prompt)
    assert tok.decode(prompt) + d.push(ids) + d.finish() == tok.decode([*prompt, *ids])


@settings(max_examples=100, deadline=None)
@given(st.sampled_from(["bytes", "fallback", "gemma"]), st.text(max_size=12), st.integers(0, 60))
def test_a_cut_character_is_at_most_one_replacement_and_the_next_part_completes_it(kind, text, n):
    tok = KINDS[kind]
    text = "x" + text.replace("\ufffd", "")
    ids = tok.encode(text)
    n = min(n, len(ids))
    d, rest = IncrementalDetokenizer(tok), IncrementalDetokenizer(tok, ids[:n])
    head = d.push(ids[:n])
    assert "\ufffd" not in head and d.finish() in ("", "\ufffd")
    assert head + rest.push(ids[n:]) + rest.finish() == text


def stops_for(data: st.DataObject, text: str) -> list[str]:
    "Parts of the text, some with a wrong end, so that they overlap each other and nearly match; and now and then an empty one."
    ends = st.tuples(st.integers(0, len(text)), st.integers(0, 5), st.sampled_from(["", "", "", "b", "🌶"]))
    return [text[a:a + n] + end for a, n, end in data.draw(st.lists(ends, max_size=4))]


@settings(max_examples=600, deadline=None)
@given(kinds, st.booleans(), st.one_of(st.just(0), st.integers(1, 12)), st.data())
def test_streamed_text_is_the_full_decode_cut_at_the_earliest_stop(kind, include, min_tokens, data):
    tok = KINDS[kind]
    text = data.draw(st.text(st.sampled_from("ab " if kind == "metaspace" else "aabb c,🌶\n"), max_size=16))
    stops = stops_for(data, text)
    ids = tok.encode(text)
    full, d = tok.decode(ids), IncrementalDetokenizer(tok)
    after = len(d.push(ids[:max(0, min_tokens - 1)]))
    if min_tokens > len(ids): after = len(full) + 1
    want, by = cut_at(full, stops, include, after)
    s = TextStream(tok, (), stops, include, min_tokens=min_tokens)
    shown = ""
    for part in cut(data, ids):
        shown += s.push(part)
        assert want.startswith(shown), "text was shown that is not in the answer"
    shown += s.finish()
    assert (shown, s.text, s.stopped) == (want, want, by)
    assert s.push(ids) == "" == s.finish() and s.text == want
    if by is None: assert s.n_kept == len(ids)
    else:
        end = len(want) + (0 if include else len(by))
        sizes = [len(IncrementalDetokenizer(tok).push(ids[:k])) for k in range(len(ids) + 1)]
        assert s.n_kept == next(k for k, size in enumerate(sizes) if size >= end) >= min_tokens


@settings(max_examples=300, deadline=None)
@given(st.lists(st.text("ab", min_size=1, max_size=5), min_size=1, max_size=5), st.lists(st.text("abc", max_size=5), max_size=6))
def test_exactly_the_longest_possible_beginning_of_a_stop_is_held(stops, parts):
    m, seen = StopMatcher(stops), ""
    for p in parts:
        m.push(p)
        seen += p
        if m.stopped: break
        assert m.held == max((seen[n:] for n in range(len(seen) + 1) if any(s.startswith(seen[n:]) for s in stops)), key=len)


@pytest.mark.parametrize("parts, stop, deltas, stopped, kept", [   # B02
    (["A", "B", "C", "DEF", "G", "HI", "J"], "DEFGHIJ", ["A", "B", "C", "", "", "", "", ""], "DEFGHIJ", 7),
    (["a", "b", ",c!"], "b,c", ["a", "", "", ""], "b,c", 3),
    (["A", "DEF", "G"], "DEFGHIJ", ["A", "", "", "DEFG"], None, 3),
    (["a", "b"], "", ["a", "b", ""], None, 2),
])
def test_stop_strings_over_and_inside_tokens(parts, stop, deltas, stopped, kept):
    tok = KINDS["bytes"]
    ids = [tok.token_id(p) for p in parts]
    s = TextStream(tok, stop=[stop])
    assert [*(s.push([i]) for i in ids), s.finish()] == deltas and (s.stopped, s.n_kept) == (stopped, kept)
    whole = TextStream(tok, stop=[stop])
    assert whole.push(ids) + whole.finish() == "".join(deltas) and (whole.stopped, whole.n_kept) == (stopped, kept)


def test_a_stop_spelled_like_a_control_token_is_found_by_its_id():
    tok = KINDS["bytes"]
    end, ids = tok.token_id("<|end|>"), tok.encode("a 🌶")
    for skip in (True, False):
        s = TextStream(tok, stop=["<|end|>"], skip_special_tokens=skip)
        assert s.push([*ids, end, *ids]) + s.finish() == "a 🌶" and (s.stopped, s.n_kept) == ("<|end|>", len(ids) + 1)
    late = TextStream(tok, stop=["<|end|>"], min_tokens=len(ids) + 2)
    assert late.push([*ids, end, *ids, end]) == "a 🌶a 🌶"
    typed = TextStream(tok, stop=["<|end|>"])
    assert typed.push(tok.encode("x<|end|>y")) == "x"
    cut_off = TextStream(tok, stop=["<|end|>"], include_stop=True)
    assert cut_off.push([*ids[:-1], end]) == "a \ufffd<|end|>"


def test_large_and_many_stop_strings_stay_cheap():
    "4 KiB, overlapping, one hundred: the cost of a character does not depend on them."
    tok = KINDS["bytes"]
    stops = ["ab" * 2048, *("a" * n + "b" for n in range(3, 102)), "x" * 4096 + "y"]
    ids = tok.encode("ab" * 2047 + "x" * 5000)
    t = time.perf_counter()
    s = TextStream(tok, stop=stops)
    assert s.push(ids) + s.finish() == "ab" * 2047 + "x" * 5000 and s.stopped is None
    assert time.perf_counter() - t < 2
    assert len(StopAutomaton(["ab", "abc", ""]).goto) == 4


@pytest.mark.parametrize("stop, bound_us", [((), 20), (("\n\n", "</answer>", "zz"), 20)])
def test_a_push_costs_microseconds(stop, bound_us):
    tok = KINDS["bytes"]
    ids = tok.encode("the quick brown fox 🌶 jumps, " * 100)
    def once() -> float:
        s, t = TextStream(tok, stop=stop), time.perf_counter()
        for i in ids: s.push((i,))
        return (time.perf_counter() - t) * 1e6 / len(ids)
    assert min(once() for _ in range(5)) < bound_us
