"Structured output: texts keep their form, neighbours keep their tokens, and what cannot be kept is refused at the door."
from __future__ import annotations
import asyncio, itertools, json, random, time
from dataclasses import replace
import numpy as np
import pytest
import torch
from llminfer import grammars as grammars_module
from llminfer.core import make_core
from llminfer.cuda_graphs import GraphRunner
from llminfer.grammars import Grammars, TokenBytes, first_gap
from llminfer.interfaces import Variant
from llminfer.masks import MaskDesk, MaskError, all_ids, allowed_ids, clear_ids, make_mask, n_words, set_ids
from llminfer.request import GenerationRequest, RequestError, SamplingParams
from llminfer.runner import NoSync
from llminfer.sampling import SamplerState
from llminfer.structured import (ChoiceMatcher, ForceWords, GrammarMatcher, check_structured, make_matchers, response_format_outputs, rule_maker, tool_outputs, vllm_outputs)
from llminfer.engine_handle import ThreadHandle
from support.engines import all_closed, pieces, tiny_engine
from support.schemas import Author, check, keep
from support.serving import serving

PERSON = {"type": "object", "properties": {"name": {"type": "string", "maxLength": 9}, "age": {"type": "integer", "minimum": 0, "maximum": 150}}, "required": ["name", "age"], "additionalProperties": False}
COLORS = {"type": "array", "items": {"enum": ["red", "green", "blue"]}, "minItems": 1, "maxItems": 4}
RULES = [{"json": PERSON}, None, {"json": COLORS}, {"regex": "[a-f]{3}-[0-9]{2}"}, None, {"choice": ["yes", "yesterday", "no"]}, {"grammar": 'root ::= "(" root ")" | "x"'}, None]


@pytest.fixture(scope="module")
def author() -> Author: return Author(torch.float64)


def run(author, rules=RULES, runner=None, wrap=None, params=None, **cfg):
    "Texts of rules under a configuration; `params` may change each row's settings."
    kw = {} if runner is None else {"runner": runner}
    core = make_core(author.model, replace(author.cfg, **cfg), **kw)
    if wrap:
        launch = core.runner.launch
        core.runner.launch = lambda plan: wrap(launch, plan)
    return author.write(rules, core, **(params or {}))


def test_40_schemas_of_500_are_kept(author):
    "The 500 of issue 6: python tests/support/schemas.py 500"
    counts = keep(40, 7, author)
    assert counts["stop"] > 25 and counts["refused"] == 0 and min(counts["xgrammar"], counts["llguidance"]) > 10


SAMPLED = dict(temperature=0.9, top_p=0.9, max_tokens=60)
SETTINGS = [dict(window_steps=4, max_in_flight=2, follow=True), dict(window_steps=8, mask_workers=0), dict(window_steps=8, max_in_flight=2, reveal=1, follow=True),
            dict(max_num_seqs=2, prefill_chunk=3), dict(n_blocks=34, window_steps=4, max_in_flight=2), dict(prefix_cache=False, max_num_batched_tokens=9), dict(runner=GraphRunner, window_steps=4, max_in_flight=2)]


@pytest.mark.parametrize("params", [SAMPLED, dict(temperature=0, repetition_penalty=1.2, logprobs=2, max_tokens=40), dict(top_k=5, no_repeat_ngram_size=3, bad_words_ids=((300,),), max_tokens=40)], ids=["sampled", "greedy", "rules"])
def test_texts_do_not_depend_on_windows_chunks_preemption_or_company(author, params):
    want = run(author, params=params)
    for (ids, reason, error), rule in zip(want, RULES):
        assert error is None
        if rule and reason == "stop" and "json" in rule: check(author.text(ids), rule["json"])
    for cfg in SETTINGS: assert run(author, params=params, **cfg) == want, cfg
    alone = run(author, [r if r is None else None for r in RULES], params=params)
    for i, rule in enumerate(RULES):
        if rule is None: assert alone[i] == want[i], "a neighbour's tokens changed"
    for i in (0, 2, 6): assert run(author, [None] * i + [RULES[i]], params=params)[i] == want[i]


def test_a_launch_with_masks_reads_nothing(author):
    def wrap(launch, plan):
        with NoSync(): return launch(plan)
    assert run(author, params=SAMPLED, wrap=wrap, window_steps=4) == run(author, params=SAMPLED)


def test_preemption_rebuilds_a_grammar_from_ids(author):
    core = make_core(author.model, replace(author.cfg, n_blocks=22, max_num_seqs=8, window_steps=4, max_in_flight=2))
    rules = [{"json": {"type": "string", "minLength": 60, "maxLength": 70}}] * 4
    got = author.write(rules, core)
    assert core.scheduler.trace.counters["preemptions"] > 0 and got == run(author, rules)
    for ids, reason, _ in got: check(author.text(ids), rules[0]["json"])


def test_a_matcher_follows_any_text(author):
    make = author.grammars.compile({"json": COLORS})[1]
    ids = author.tok.encode('["red", "blue"]', add_special_tokens=False)
    fresh = lambda n: make_mask(GrammarMatcher(make, author.eos, "schema"), np.array(ids[:n]), 0, 512)[0]
    m, r = GrammarMatcher(make, author.eos, "schema"), random.Random(0)
    for n in [r.randrange(len(ids) + 1) for _ in range(40)]: assert (make_mask(m, np.array(ids[:n]), 0, 512)[0] == fresh(n)).all()
    assert allowed_ids(fresh(len(ids))).tolist() == sorted(author.eos)                  # both ends, and nothing else
    assert not set(author.eos) & set(allowed_ids(fresh(len(ids) - 1)).tolist())         # no end inside


def test_control_tokens_and_padding_are_never_allowed(author):
    table = TokenBytes(author.tok, 520, author.eos)
    for make in Grammars.makers.values():
        state, words = make(table).compile("regex", r"(.|\n)*", False)(), np.zeros(n_words(520), np.int32)
        state.fill(words)
        got = {i for i in allowed_ids(words).tolist() if i < 520}
        assert not got & (author.tok.special_ids - set(author.eos)) and max(got) < 512 and set(author.eos) <= got and len(got) > 200


def test_samples_of_one_prompt_have_their_own_matchers(author):
    core, p = make_core(author.model, author.cfg), replace(author.base, seed=3)
    params = [replace(p, child=c) for c in range(20)]           # more than rows: some become requests of their own
    core.add(list(range(20)), np.array(author.tok.encode("People:")), params, matchers=[rule_maker({"json": PERSON}, author.grammars, p)() for _ in params])
    out = {i: [] for i in range(20)}
    while core.has_work:
        for d in core.step(): out[d.seq_id] += d.tokens.tolist()
    texts = [author.text(ids) for ids in out.values()]
    for t in texts: check(t, PERSON)
    assert len(set(texts)) > 10


def test_first_token_of_a_cached_prompt_has_a_mask(author):
    core = make_core(author.model, author.cfg)
    for _ in range(2): got = author.write([{"choice": ["no"]}] * 3, core)       # the second round is a one-token tail
    assert [author.text(ids) for ids, *_ in got] == ["no"] * 3 and core.scheduler.pool.stats()["hits"] > 0


@pytest.mark.parametrize("params", [dict(min_tokens=30), dict(bad_words_ids=tuple((i,) for i in range(400))), dict(logit_bias=tuple((i, -100.0) for i in range(300))), dict(no_repeat_ngram_size=1)])
def test_other_rules_yield_to_a_mask(author, params):
    for rule, want in (({"choice": ["yes"]}, {"yes"}), ({"regex": "a{4}b"}, {"aaaab"})):
        ids, reason, error = run(author, [rule], params=params)[0]
        assert error is None and reason == "stop" and author.text(ids) in want


class Slow:
    "A matcher of a careless user."
    def __init__(self, seconds): self.seconds = seconds
    def mask(self, ids, n_prompt, words):
        time.sleep(self.seconds)
        words[:] = -1


def test_a_slow_function_delays_nobody_else(author):
    core, prompt = make_core(author.model, author.cfg), np.array([5, 6, 7])
    params = replace(author.base, max_tokens=40, eos_ids=(), stop_ids=())
    for i in range(4): core.add([i], prompt, [replace(params, seed=i)], matchers=[Slow(0.5)] if i == 0 else None)
    out, ends = {i: 0 for i in range(4)}, {}
    while len(ends) < 3:
        for d in core.step():
            out[d.seq_id] += len(d.tokens)
            if d.finish_reason: ends[d.seq_id] = out[0]
    assert set(ends) == {1, 2, 3} and max(ends.values()) < 20     # 40 masks take 20 s; the neighbours were done long before
    core.abort(0)
    while core.has_work: core.step()
    assert not core.scheduler.asked and core.scheduler.pool.n_held == 0


class Failing:
    def __init__(self, at, what): self.at, self.what = at, what
    def __repr__(self): return "the rule of a test"
    def mask(self, ids, n_prompt, words):
        if len(ids) - n_prompt < self.at: words[:] = -1
        elif self.what: raise self.what


@pytest.mark.parametrize("at", [0, 3])
@pytest.mark.parametrize("what,message", [(None, "the rule of a test allows no token after {at} tokens of output"), (KeyError("x"), "the rule of a test failed: KeyError: 'x'")])
def test_a_rule_that_fails_ends_its_row_alone(author, at, what, message):
    for workers, K in itertools.product((0, 2), (1, 4)):
        core = make_core(author.model, replace(author.cfg, mask_workers=workers, window_steps=K, max_in_flight=2))
        p = replace(author.base, temperature=0, eos_ids=(), stop_ids=(), max_tokens=8)
        for i in range(3): core.add([i], np.array([9, 8, 7 + i]), [p], matchers=[Failing(at, what)] if i == 1 else None)
        news = []
        while core.has_work: news += core.step()
        ends = {d.seq_id: (d.finish_reason, d.error) for d in news if d.finish_reason}
        assert ends == {0: ("length", None), 1: ("error", message.format(at=at)), 2: ("length", None)}
        assert sum(len(d.tokens) for d in news if d.seq_id == 1) == at and core.scheduler.pool.n_held == 0


def test_masks_of_rows_without_one_do_nothing_and_die_with_their_owner():
    state, V = SamplerState(4, 70), 70
    logits, h, v = torch.randn(3, V, generator=torch.Generator().manual_seed(0)), torch.zeros(4, 8, dtype=torch.int32), Variant(masks=True)
    rows, n = torch.arange(3), torch.full((3,), 4)
    best = logits.argmax(-1)
    assert torch.equal(state.sample(logits, rows, n, h, v).tokens, best)
    words = np.zeros((1, n_words(V)), np.int32)
    set_ids(words[0], [69])
    state.masks.put(np.array([1]), words)
    for _ in range(2): assert state.sample(logits, rows, n, h, v).tokens.tolist() == [best[0], 69, best[2]]
    assert state.masks.allowed(rows).sum(-1).tolist() == [V, 1, V]
    from llminfer.interfaces import RowInit
    state.init_rows([RowInit(1, 1, SamplingParams(temperature=0), np.array([1, 2], np.int32), 2, 8)])
    assert torch.equal(state.sample(logits, rows, n, h, v).tokens, best) and not state.masks.masked.any()


def test_the_device_path_of_masks_equals_the_cpus():
    "On a GPU all places are masked by one expression; here it runs on CPU tensors."
    state, V, r = SamplerState(6, 101), 101, np.random.default_rng(0)
    words = np.stack([w for _ in range(3) if set_ids(w := np.zeros(n_words(V), np.int32), r.choice(V, 9, replace=False)) is None])
    state.masks.put(np.array([0, 3, 4]), words)
    rows, x = torch.tensor([4, 1, 0, 3, 5]), torch.randn(5, V, generator=torch.Generator().manual_seed(1))
    x[2] = -torch.inf                                       # other rules left nothing
    before = torch.randn(5, V, generator=torch.Generator().manual_seed(2))
    for spare in (None, before):
        some, every = x.clone(), x.clone()
        state.masks.apply(some, rows, spare)
        with NoSync(): state.masks.apply_all(every, rows, spare)
        assert torch.equal(some, every) and some[2].isfinite().sum() == 9 and torch.equal(some[1], x[1])


def test_bits():
    r = np.random.default_rng(0)
    for V in (1, 31, 32, 33, 1000):
        ids = np.unique(r.integers(0, V, 20))
        words = np.zeros(n_words(V), np.int32)
        set_ids(words, ids)
        assert (allowed_ids(words) == ids).all() and (allowed_ids(all_ids(V)) == np.arange(V)).all()
        clear_ids(words, ids[:1].tolist())
        assert (allowed_ids(words) == ids[1:]).all()
    with pytest.raises(MaskError, match="no token"): make_mask(Failing(0, None), np.array([1]), 1, 64)
    assert MaskDesk(64).ask(Failing(0, None), np.array([1]), 1).exception() is not None


# ---- through the engine and the server
def test_requests_with_rules_in_one_batch():
    with all_closed():
        e = tiny_engine(max_model_len=160)
        person = dict(structured_outputs={"json": PERSON}, max_new_tokens=120, seed=1)
        rs = [GenerationRequest("A:", n=2, logprobs=1, **person), GenerationRequest("B:", force_words=["cache"], max_new_tokens=12, seed=2),
              GenerationRequest("C:", structured_outputs={"json": {"type": "array", "uniqueItems": True}}), GenerationRequest("D:", prefix_allowed_tokens_fn=lambda i, ids: 1 / 0),
              GenerationRequest("E:", structured_outputs={"regex": "[a-z]{40}"}, stop_sequences=["e"], seed=5), GenerationRequest("F:", max_new_tokens=9, seed=6),
              GenerationRequest("G:", prefix_allowed_tokens_fn=lambda i, ids: pieces("x")[:1], max_new_tokens=5), GenerationRequest("H:", structured_outputs={"choice": ["yes", "no"]}, ignore_eos=True)]
        got = e.run_requests(rs)
        for o in got[0].outputs:
            check(o.text, PERSON)
            assert o.finish_reason == "stop" and o.logprobs is not None and len(o.logprobs) == len(o.token_ids)
        for i, word in ((2, "uniqueItems"), (3, "ZeroDivisionError"), (7, "ignore_eos")): assert word in str(got[i].error)
        assert "cache" in got[1].generated_text and got[4].outputs[0].stop_reason == "e" and got[4].generated_text.isalpha() and got[6].generated_text == "xxxxx"
        assert got[5].generated_text == e.run("F:", max_new_tokens=9, seed=6).generated_text             # beside all that, and alone
        check("".join(c.token for c in e.stream("A:", **person)), PERSON)


def test_the_server_refuses_at_the_door_and_serves_the_rest():
    async def main():
        async with serving(ThreadHandle(tiny_engine(max_model_len=160))) as a:
            for bad in ({"json": {"type": "array", "uniqueItems": True}}, {"regex": "["}):
                with pytest.raises(RequestError): await a.open(GenerationRequest("x", structured_outputs=bad))
            streams = [await a.open(GenerationRequest("x", structured_outputs={"json": PERSON}, max_new_tokens=120, seed=i)) for i in range(3)]
            for s in streams: check((await s.result()).generated_text, PERSON)
    with all_closed(): asyncio.run(main())


# ---- the door
UNSUPPORTED = [({"type": "array", "items": {"type": "integer"}, "uniqueItems": True}, "uniqueItems"), ({"not": {"type": "string"}}, "not"), ({"type": "array", "contains": {"type": "integer"}}, "contains"),
    ({"if": {"type": "string"}, "then": {"minLength": 3}}, "if"), ({"type": "object", "dependentRequired": {"a": ["b"]}}, "dependentRequired"), ({"oneOf": [{"type": "integer"}, {"type": "number"}]}, "oneOf"),
    ({"type": "object", "properties": {"x": {"type": "object", "unevaluatedProperties": False}}}, "unevaluatedProperties"), ({"type": "string", "format": "klingon"}, "format"), ({"$ref": "http://example.org/s"}, r"\$ref"),
    ({"type": "string", "pattern": r"\bx"}, "pattern"), ({"type": "strnig"}, "strnig"), ({"type": "object", "propertyNames": {"pattern": "^x"}}, "propertyNames")]


@pytest.mark.parametrize("schema,name", UNSUPPORTED, ids=[n for _, n in UNSUPPORTED])
def test_what_cannot_be_kept_is_refused_by_name(author, schema, name):
    for s in (schema, {"type": "object", "properties": {"deep": {"type": "array", "items": schema}}}):
        with pytest.raises(RequestError, match=name) as e: author.grammars.compile({"json": s})
        assert e.value.param == "structured_outputs" and e.value.code == "unsupported_schema" and "\n" not in str(e.value) and len(str(e.value)) < 900


@pytest.mark.parametrize("rule", [{"json": False}, {"json": "{"}, {"json": {"type": "object", "properties": {"a": []}}}, {"json": {"anyOf": 3}}, {"json": {"type": "object", "required": 5, "properties": {}}},
    {"json": {"type": {}}}, {"json": {"enum": []}}, {"json": json.loads('{"items":' * 70 + "{}" + "}" * 70)}, {"regex": "["}, {"regex": "(?=a)b"}, {"grammar": "root ::= nothing"}, {"grammar": "start: nothing"},
    {"structural_tag": {"format": {"type": "no"}}}, {"structural_tag": "x"}, {"json": {"$ref": "#/$defs/none"}}, {"json": {"properties": 3}}, {"json": {"oneOf": [3, 4]}}], ids=lambda r: str(r)[:40])
def test_broken_rules_are_request_errors(author, rule):
    with pytest.raises(RequestError): author.grammars.compile(check_structured(rule))


@pytest.mark.parametrize("bad", [None, {}, [], {"json": {}, "regex": "a"}, {"regex": 5}, {"choice": []}, {"choice": [""]}, {"choice": ["a", 3]}, {"json_object": False}, {"regex": "a", "x": 1}, {"regex": "a", "backend": "outlines"},
    {"regex": "a", "any_whitespace": 1}, {"json": {"x": float}}, {"regex": "a" * 300_000}, {"grammar": None}], ids=lambda b: str(b)[:30])
def test_requests_with_broken_fields_are_refused(bad):
    with pytest.raises(RequestError, match="my_field") as e: check_structured(bad, "my_field")
    assert e.value.param == "my_field"


def test_a_missing_package_is_named(author, monkeypatch):
    monkeypatch.setattr(grammars_module, "find_spec", lambda name: None)
    g = Grammars(author.tok, 512, author.eos)
    for rule in ({"json": PERSON}, {"regex": "a"}):
        with pytest.raises(RequestError, match=r"is not installed: pip install 'llminfer\[structured\]'") as e: g.compile(rule)
        assert e.value.code == "missing_package"
    m = rule_maker({"choice": ["a"]}, g, author.base)()      # needs none
    assert allowed_ids(make_mask(m, np.array([1]), 1, 512)[0]).size


def test_one_library_does_for_the_other(author, monkeypatch):
    for only in ("xgrammar", "llguidance"):
        monkeypatch.setattr(grammars_module, "find_spec", lambda name: name == only or None)
        assert Grammars(author.tok, 512, author.eos).compile({"json": COLORS})[0] == only
    with pytest.raises(RequestError, match="xgrammar does not keep 'maxLength'"): author.grammars.compile({"json": {"type": "string", "maxLength": 3}, "backend": "xgrammar"})


def test_rules_of_a_request(author):
    p, n = author.base, 3
    ask = lambda **kw: make_matchers(GenerationRequest("x", **kw), [p, replace(p, child=1)], author.grammars, n)
    assert ask() is None and ask(force_words=[]) is None and ask(force_words=[" "]) is None
    two = ask(structured_outputs={"regex": "[a-z]+"}, prefix_allowed_tokens_fn=lambda i, ids: [[author.tok.token_id("a"), author.tok.token_id("b")], [author.tok.token_id("b")]][i])
    assert len(two) == 2 and two[0] is not two[1]
    first, second = (set(allowed_ids(make_mask(m, np.array([1, 2, 3]), n, 512)[0]).tolist()) for m in two)
    assert second < first and {author.tok.token_text(i) for i in first} == {"a", "b"}
    with pytest.raises(RequestError, match="ignore_eos"): make_matchers(GenerationRequest("x", structured_outputs={"regex": "a"}), [replace(p, eos_ids=())], author.grammars, n)
    with pytest.raises(RequestError, match="force_words need 4 tokens|force_words need"): make_matchers(GenerationRequest("x", force_words=["abracadabra"]), [replace(p, max_tokens=2)], author.grammars, n)
    for fn, message in ((lambda i, ids: [512], "returned 512, which is not a token id"), (lambda i, ids: "ab", "list of token ids"), (lambda i, ids: [], "allows no token"), (lambda i, ids: 1 / 0, "ZeroDivisionError")):
        with pytest.raises(MaskError, match=message): make_mask(ask(prefix_allowed_tokens_fn=fn)[0], np.array([1, 2, 3]), n, 512)


@pytest.mark.parametrize("n", [15, 24])
def test_forced_words_appear_in_a_batch(author, n):
    core, prompt = make_core(author.model, replace(author.cfg, window_steps=4)), np.array(author.tok.encode("Tell me:"))
    words, out = [["cache"], ["page table", "block"], [], ["é"], ["over", "ver"]], {}
    for i, w in enumerate(words):
        p = replace(author.base, seed=i, max_tokens=n)
        core.add([i], prompt, [p], matchers=make_matchers(GenerationRequest("x", force_words=w), [p], author.grammars, len(prompt)))
        out[i] = []
    while core.has_work:
        for d in core.step():
            assert d.error is None
            out[d.seq_id] += d.tokens.tolist()
    for i, w in enumerate(words): assert all(x in author.tok.decode(out[i]) for x in w) and len(out[i]) <= n


def test_a_forced_word_that_is_there_already_ends_nothing(author):
    tok = author.tok
    m, prompt = ForceWords(["cache"], tok, 512, author.eos, room=30), tok.encode("x")
    ends = lambda text: set(author.eos) <= set(allowed_ids(make_mask(m, np.array(prompt + tok.encode(text, add_special_tokens=False)), len(prompt), 512)[0]).tolist())
    assert not ends("") and not ends("a cach") and ends("a cache") and ends("caches are")


def test_choices_with_common_beginnings(author):
    m = ChoiceMatcher(["a", "ab", "über"], author.tok, 512, author.eos)
    texts = set()
    for s in range(30):
        (ids, reason, _), = author.write([{"choice": ["a", "ab", "über"]}], temperature=1.5, child=s)
        assert reason == "stop"
        texts.add(author.text(ids))
    assert texts == {"a", "ab"} | texts & {"über"} and repr(m) == "the choice of 3 texts"
    ids = author.tok.encode("über", add_special_tokens=False)
    for n in range(len(ids)): assert ids[n] in allowed_ids(make_mask(m, np.array(ids[:n]), 0, 512)[0])


def test_json_object_and_white_space(author):
    for rule, most in (({"json_object": True}, 1), ({"json": PERSON, "any_whitespace": True}, 2)):
        for ids, reason, error in author.write([rule] * 8):
            text = author.text(ids)
            assert error is None and (reason == "length" or isinstance(json.loads(text), dict))
            outside = "".join(part for i, part in enumerate(text.replace('\\"', "").split('"')) if i % 2 == 0)
            assert (" " * (most + 1)) not in outside and "\n\n\n" not in outside


def test_what_apis_send():
    schema = {"type": "object"}
    assert response_format_outputs(None) is response_format_outputs({"type": "text"}) is None
    assert response_format_outputs({"type": "json_object"}) == {"json_object": True}
    for v in ({"type": "json_schema", "json_schema": {"name": "x", "schema": schema, "strict": True}}, {"type": "json_schema", "name": "x", "schema": schema}): assert response_format_outputs(v) == {"json": schema}
    for v in ("text", {}, {"type": "yaml"}, {"type": "json_schema"}, {"type": "json_schema", "json_schema": {"schema": "{}"}}, {"type": "json_schema", "json_schema": 3}):
        with pytest.raises(RequestError, match="text.format"): response_format_outputs(v, "text.format")
    assert vllm_outputs() is None and vllm_outputs({"regex": "a", "json": None}) == vllm_outputs(guided_regex="a") == {"regex": "a"}
    assert vllm_outputs(guided_choice=["a"], guided_json=None) == {"choice": ["a"]}
    for kw in (dict(guided_regex="a", guided_choice=["a"]), dict(structured_outputs={"regex": "a"}, guided_json={}), dict(structured_outputs={})):
        with pytest.raises(RequestError): vllm_outputs(**kw)


def tool(name, strict=False, **props):
    return {"type": "function", "function": {"name": name, "strict": strict, "parameters": {"type": "object", "properties": props, "required": list(props), "additionalProperties": False}}}


TOOLS = [tool("weather", True, city={"enum": ["Paris", "Rome"]}, days={"type": "integer", "minimum": 1, "maximum": 9}), tool("stop")]
MARKS = dict(begin="<tool_call>\n", end="\n</tool_call>")


@pytest.mark.parametrize("marks", [MARKS, dict(begin="<|im_start|>", end="")], ids=["text", "control token"])
def test_forced_tool_calls_are_calls(author, marks):
    for choice, parallel in (("required", False), ("required", True), ("weather", True)):
        rule = tool_outputs(TOOLS, choice, parallel=parallel, **marks)
        for ids, reason, error in author.write([rule] * 6, max_tokens=130):
            text = author.tok.byte_table(False).join(i for i in ids if i not in author.eos).decode()
            assert error is None and text.startswith(marks["begin"]), text
            if reason == "length": continue
            calls = [json.loads(c.removesuffix(marks["end"])) for c in text.split(marks["begin"])[1:]]
            assert len(calls) >= 1 and (parallel and choice == "required" or len(calls) == 1)
            for c in calls: assert c["name"] in ("weather", "stop")[:1 if choice == "weather" else 2] and (c["name"] == "stop" or 1 <= c["arguments"]["days"] <= 9)


def test_free_text_with_strict_tools(author):
    rule = tool_outputs(TOOLS, "auto", **MARKS)
    make = author.grammars.compile(rule)[1]
    follow = lambda text: [make_mask(GrammarMatcher(make, author.eos, "tag"), np.array(author.tok.encode(text, add_special_tokens=False)), 0, 512)]
    follow('No tool is needed. <b>1</b>'); follow('<tool_call>\n{"name": "weather", "arguments": {"city": "Rome", "days": 3}}\n</tool_call>')
    for bad in ('<tool_call>\n{"name": "wether"', '<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"'):
        with pytest.raises(MaskError, match="does not allow token"): follow(bad)
    marks = dict(begin="<|im_start|>call: ", end="")
    make = author.grammars.compile(tool_outputs(TOOLS, "auto", **marks))[1]
    ids = [*author.tok.encode("Well. ", add_special_tokens=False), 1, *author.tok.encode('call: {"name": "stop", "arguments": {}}', add_special_tokens=False)]
    for n in range(len(ids)): assert ids[n] in allowed_ids(make_mask(GrammarMatcher(make, author.eos, "tag"), np.array(ids[:n]), 0, 512)[0])
    assert tool_outputs([tool("a")], "auto", **MARKS) is None
    with pytest.raises(RequestError, match="'none_such'"): tool_outputs(TOOLS, "none_such", **MARKS)


def test_a_strict_tool_is_refused_and_a_loose_one_loosened(author):
    odd = dict(x={"type": "string", "maxLength": 4}, y={"type": "array", "items": {"$ref": "#/nowhere"}, "uniqueItems": True}, z={"allOf": [{"type": "integer"}, {"minimum": 3}]})
    with pytest.raises(RequestError, match="maxLength") as e: tool_outputs([tool("t", True, **odd)], "required", **MARKS)
    assert e.value.param == "tools[0].function.parameters"
    rule = tool_outputs([tool("t", **odd)], "required", **MARKS)
    inner = rule["structural_tag"]["format"]["tags"][0]["content"]["json_schema"]
    assert first_gap(inner, inner) is None and inner["properties"]["x"] == {"type": "string"} and inner["required"] == ["x", "y", "z"]
    assert all(error is None for *_, error in author.write([rule] * 2, max_tokens=40))


def test_first_gap_knows_pydantics_habits():
    ok = [{"anyOf": [{"type": "string"}, {"type": "null"}], "default": None, "title": "A"}, {"$ref": "#/$defs/a", "description": "x", "$defs": {"a": {"type": "integer"}}}, {"const": "a", "type": "string"},
          {"allOf": [{"$ref": "#/$defs/a"}], "$defs": {"a": {}}}, {"type": "object", "additionalProperties": {"type": "integer"}}, {}, {"x-internal": 1, "type": "integer"}, {"type": "string", "enum": ["a"]},
          {"oneOf": [{"$ref": "#/$defs/a"}, {"$ref": "#/$defs/b"}], "discriminator": {"propertyName": "k"}, "$defs": {n: {"type": "object", "properties": {"k": {"const": n}}, "required": ["k"]} for n in "ab"}}]
    for s in ok: assert first_gap(s, s) is None, s
    for s, gap in (({"minLength": 3}, "minLength"), ({"type": "string", "enum": ["a", 1]}, "enum"), ({"$ref": "#/$defs/a", "minimum": 1, "$defs": {"a": {}}}, "minimum"), ({"type": "object", "required": ["a"]}, "required"),
                   ({"items": [{}]}, "type"), ({"anyOf": [{"type": "integer"}], "type": "integer"}, "type"), ({"type": "array", "minItems": 2}, "minItems"), ({"$defs": {"a": {"pattern": "x", "type": "string"}}}, "pattern")):
        assert first_gap(s, s) == gap, s
