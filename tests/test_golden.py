"""What the engine says against golden continuations (tools/golden.py): the demo model always, models of the hub with `pytest -m slow`.

A token that is not the golden one passes only if rounding explains it (rule 4.2 of the design); the first such token ends the comparison with the file, not that with the oracle."""
import json
from functools import cache
import pytest
import torch
import golden
from house import ROOT
from llminfer.benchmark import judge_greedy, logit_difference
from llminfer.config import Backend, EngineConfig
from llminfer.engine import InferenceEngine
from llminfer.formats import LoadError
from llminfer.loading import load_model, open_checkpoint
from llminfer.request import GenerationRequest
from llminfer.tokenization import load_tokenizer

HUB = [("Qwen/Qwen2.5-Coder-3B-Instruct", "488639f1ff808d1d3d0ba301aef8c11461451ec5"), ("facebook/opt-125m", None), ("Qwen/Qwen2.5-1.5B-Instruct", None), ("HuggingFaceTB/SmolLM2-135M-Instruct", None)]
FIXTURE = ROOT / "tests/fixtures/demo.json"


@cache
def demo(): return json.loads(FIXTURE.read_text(encoding="utf-8"))


def says(model, backend, g, revision=None):
    "The engine's ids for every case, in one batch."
    cfg = EngineConfig(model_name=model, hf_revision=revision, backend=backend, device="cpu", dtype="float32", max_num_seqs=4, max_model_len=512)
    with InferenceEngine(cfg) as e:
        rs = e.run_requests([GenerationRequest(prompt_token_ids=c["prompt_ids"], max_new_tokens=golden.MAX_NEW, temperature=0.0) for c in g["cases"]])
    assert [r.error for r in rs] == [None] * len(rs)
    return [list(r.token_ids) for r in rs]


def held_against(g, said, model, revision=None):
    "Equal, or every differing case explained by the oracle within the tolerance that rounding has on these very ids."
    differ = [(c["prompt_ids"], s) for c, s in zip(g["cases"], said) if s != c["continuation_ids"]]
    if not differ: return "equal"
    ckpt = open_checkpoint(model, revision=revision)
    fine, plain = (load_model(ckpt, d, "cpu") for d in (torch.float64, torch.float32))
    logits = lambda m: lambda ids: m.logits(torch.tensor(list(ids)))
    v = judge_greedy(logits(fine), *map(list, zip(*differ)), 4 * logit_difference(logits(fine), logits(plain), [[*p, *s] for p, s in differ]))
    assert v.status in ("exact", "explained") and v.worst_gap > 0, v
    return v.status


def check_format(g):
    assert list(g) == ["format_version", "model", "environment", "decoding", "prompt_builder", "cases"] and g["format_version"] == 1 and len(g["cases"]) == 3
    assert g["decoding"] | {"eos_token_ids": 0} == {"do_sample": False, "temperature": 0.0, "max_new_tokens": 40, "eos_token_ids": 0, "hf_method": "full_recompute_greedy"} and g["environment"]["dtype"] == "float32"
    for c in g["cases"]:
        assert list(c) == ["case_id", "db_id", "question", "prompt_ids", "continuation_ids", "continuation_text"] and 0 < len(c["continuation_ids"]) <= 40
        assert len(c["continuation_ids"]) == 40 or c["continuation_ids"][-1] in g["decoding"]["eos_token_ids"]


def test_the_demos_fixture_is_what_transformers_says_now():
    "One teacher-forced forward a case: if every token is the best one after those before it, the file is what the generator would write."
    g = demo()
    check_format(g)
    ckpt = open_checkpoint("demo")
    tok, net = load_tokenizer(ckpt.tokenizer), golden.reference(ckpt)
    assert {c["db_id"]: c["prompt_ids"] for c in g["cases"]} == golden.prompts(tok) and [tok.decode(c["continuation_ids"]) for c in g["cases"]] == [c["continuation_text"] for c in g["cases"]]
    logits = lambda ids: net(torch.tensor([list(ids)])).logits[0]
    with torch.inference_mode(): v = judge_greedy(logits, [c["prompt_ids"] for c in g["cases"]], [c["continuation_ids"] for c in g["cases"]], 1e-3)
    assert v.status in ("exact", "explained"), v


@pytest.mark.parametrize("backend", [Backend.PAGED, Backend.EAGER])
def test_the_engine_says_what_the_demos_fixture_says(backend):
    g = demo()
    assert held_against(g, says("demo", backend, g), "demo") in ("equal", "exact", "explained")


def test_a_wrong_token_is_found():
    g = demo()
    said = [list(c["continuation_ids"]) for c in g["cases"]]
    said[1][7] += 1
    with pytest.raises(AssertionError): held_against(g, said, "demo")


@pytest.mark.slow
@pytest.mark.parametrize("model, revision", HUB, ids=[m for m, _ in HUB])
def test_models_of_the_hub(model, revision):
    "The same with other models: the golden file is made here, the engine is held against it, our tokenizer against transformers'."
    try: ckpt = open_checkpoint(model, revision=revision)
    except LoadError as e:
        if "hub cannot be reached" in str(e) or "offline" in str(e): pytest.skip(f"no hub: {e}")
        raise
    g = golden.make_golden(model, revision)
    check_format(g)
    from transformers import AutoTokenizer
    theirs, tok = AutoTokenizer.from_pretrained(model, revision=revision), load_tokenizer(ckpt.tokenizer)
    for c in g["cases"]:
        text = golden.prompt_of(c["db_id"])
        ids = theirs.apply_chat_template([{"role": "user", "content": text}], add_generation_prompt=True, return_dict=False) if tok.chat_template else theirs(text)["input_ids"]
        assert list(ids) == c["prompt_ids"]
    for backend in (Backend.PAGED, Backend.EAGER): held_against(g, says(model, backend, g, revision), model, revision)
