"""Random JSON schemas, and a check that a model of random logits keeps them: `python tests/support/schemas.py 500 [seed]`."""
from __future__ import annotations
import json, random, sys, time
from dataclasses import replace
from pathlib import Path
from tempfile import mkdtemp
from typing import Any, Callable
import jsonschema
import numpy as np
import torch
from llminfer.core import CoreConfig, make_core
from llminfer.grammars import Grammars
from llminfer.loading import load_model, make_tiny, open_checkpoint
from llminfer.request import RequestError, SamplingParams
from llminfer.structured import rule_maker
from llminfer.tokenization import load_tokenizer

NAMES = ["id", "name", "äge", "a b", "x-y", 'q"', "tags", "kind"]
PATTERNS = ["^[a-c]{2,4}$", r"^\d+\.\d$", "^(on|off)$", "^[^x]{1,3}$", "ab"]
FORMATS = ["date", "date-time", "uuid", "ipv4", "email"]


def leaf(r: random.Random) -> dict[str, Any]:
    lo = r.randrange(-50, 50)
    kinds: list[Callable[[], dict[str, Any]]] = [
        lambda: {"type": "integer"}, lambda: {"type": "boolean"}, lambda: {"type": "null"}, lambda: {"type": "string"},
        lambda: {"type": "integer", "minimum": lo, "maximum": lo + r.randrange(200)}, lambda: {"type": "integer", "exclusiveMinimum": lo},
        lambda: {"type": "number", "minimum": lo + 0.5, "maximum": lo + 7.25}, lambda: {"type": "string", "minLength": r.randrange(3), "maxLength": r.randrange(3, 9)},
        lambda: {"type": "string", "pattern": r.choice(PATTERNS)}, lambda: {"type": "string", "format": r.choice(FORMATS)},
        lambda: {"enum": r.sample(["red", 'sch"warz', 1, 2.5, None, True, [1], {"k": "v"}, "ü"], r.randrange(1, 4))}, lambda: {"const": r.choice(["x", 7, {"a": [1, None]}])},
        lambda: {"type": "string", "enum": ["north", "south"], "description": "which way"}, lambda: {"type": ["integer", "null"], "minimum": lo},
        lambda: {"type": "integer", "multipleOf": r.choice([2, 5])}]
    return r.choice(kinds)()


def schema(r: random.Random, depth: int = 2) -> dict[str, Any]:
    "A schema that can be kept; `$defs` are added by `document`."
    if depth == 0 or r.random() < .25: return leaf(r)
    sub = lambda: schema(r, depth - 1)

    def obj(**more):
        props = {n: sub() for n in r.sample(NAMES, r.randrange(1, 4))}
        return {"type": "object", "properties": props | more, "required": sorted({n for n in props if r.random() < .7} | more.keys()), "additionalProperties": False}
    kinds: list[Callable[[], dict[str, Any]]] = [
        obj, obj, lambda: {"type": "array", "items": sub(), "minItems": r.randrange(3), "maxItems": r.randrange(3, 5)},
        lambda: {"type": "array", "prefixItems": [sub(), sub()], "items": False, "minItems": 2}, lambda: {"anyOf": [sub(), leaf(r)], "title": "one of two"},
        lambda: {"oneOf": [obj(kind={"const": c}) for c in ("a", "b")]}, lambda: {"$ref": "#/$defs/leaf"}, lambda: {"allOf": [{"type": "integer"}, {"minimum": r.randrange(9)}]},
        lambda: {"type": "object", "additionalProperties": leaf(r)}, lambda: {"type": "object", "properties": {"next": {"$ref": "#/$defs/chain"}}, "additionalProperties": False}]
    return r.choice(kinds)()


def document(r: random.Random) -> dict[str, Any]:
    return {**schema(r), "$defs": {"leaf": leaf(r), "chain": {"type": "object", "properties": {"v": {"type": "integer"}, "next": {"$ref": "#/$defs/chain"}}, "additionalProperties": False}}}


class Author:
    "A tiny model of random weights that writes under rules."
    def __init__(self, dtype: torch.dtype = torch.float32, **cfg: Any):
        ckpt = open_checkpoint(make_tiny(Path(mkdtemp()) / "author", "llama", 0))
        self.tok, self.model = load_tokenizer(ckpt.tokenizer), load_model(ckpt, dtype, "cpu")
        self.eos = self.model.config.eos_token_ids
        self.grammars = Grammars(self.tok, self.model.config.vocab_size, self.eos)
        self.cfg = replace(CoreConfig(n_blocks=400, block_size=8, max_num_seqs=16, max_model_len=256), **cfg)
        self.base = SamplingParams(max_tokens=120, eos_ids=self.eos, stop_ids=self.eos)

    def write(self, rules: list[dict[str, Any] | None], core: Any = None, **params: Any) -> list[tuple[list[int], str, str | None]]:
        "(ids, finish reason, error) for each rule; RequestError where it is refused."
        core, base = core or make_core(self.model, self.cfg), replace(self.base, **params)
        out: dict[int, Any] = {}
        for i, rule in enumerate(rules):
            p = replace(base, seed=1000 + i)
            core.add([i], np.array(self.tok.encode(f"Number {i}, as JSON:"), np.int32), [p], matchers=rule and [rule_maker(rule, self.grammars, p)()])
            out[i] = [[], None, None]
        while core.has_work:
            for d in core.step():
                out[d.seq_id][0] += d.tokens.tolist()
                if d.finish_reason: out[d.seq_id][1:] = d.finish_reason, d.error
        assert core.scheduler.pool.n_held == 0 and not core.scheduler.asked
        return [tuple(x) for x in out.values()]

    def text(self, ids: list[int]) -> str: return self.tok.byte_table(True).join(i for i in ids).decode("utf-8")


def check(text: str, doc: dict[str, Any]) -> None:
    jsonschema.validate(json.loads(text), doc, cls=jsonschema.Draft202012Validator, format_checker=jsonschema.FormatChecker())


def keep(n: int, seed: int, author: Author) -> dict[str, Any]:
    "Let the author write under n schemas; raises for a text that breaks its schema. Counts of ends, refusals and libraries."
    r, counts = random.Random(seed), {"stop": 0, "length": 0, "refused": 0, "xgrammar": 0, "llguidance": 0}
    for start in range(0, n, 16):
        docs: list[dict[str, Any]] = []
        while len(docs) < min(16, n - start):
            doc = document(r)
            try: counts[author.grammars.compile({"json": doc})[0]] += 1
            except RequestError as e: counts["refused"] += 1; print("refused:", e, json.dumps(doc), file=sys.stderr); continue
            docs.append(doc)
        for doc, (ids, reason, error) in zip(docs, author.write([{"json": d} for d in docs])):
            assert error is None, f"{error}: {json.dumps(doc)}"
            counts[reason] += 1
            if reason != "stop": continue
            try: check(text := author.text(ids), doc)
            except Exception as e: raise AssertionError(f"{text!r} under {json.dumps(doc)}: {e}") from e
    return counts


if __name__ == "__main__":
    t = time.perf_counter()
    n, seed = int(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 0
    print(json.dumps(keep(n, seed, Author()) | {"schemas": n, "seed": seed, "seconds": round(time.perf_counter() - t, 1)}))
