"""Settings and requests: ranges (cases B05, B08, B09, B10), values of any kind and size, what an error names, and secrets."""
import copy, dataclasses, math
import numpy as np
import pytest
from hypothesis import given, strategies as st
from llminfer.config import (CACHE_RULES, ENGINE_RULES, QUANT_RULES, Backend, CacheConfig, CacheEviction, ConfigError, EngineConfig, QuantConfig,
    QuantMode, resolve_device, resolve_dtype)
from llminfer.request import GenerationRequest, RequestError, SamplingParams, validate_request

class Hostile:
    "Compares with nothing and cannot be printed."
    def __repr__(self): raise RuntimeError("no")
    def __eq__(self, other): raise RuntimeError("no")
    __hash__ = None  # type: ignore[assignment]

JUNK = [math.nan, math.inf, -math.inf, "", "x\ud800", b"1", [], {}, object(), Hostile(), 2**63, -2**63 - 1, 10**400, 10**5000, 1 + 1j, True, False, None, 0, -1, 1.5]
FIELDS = [f.name for f in dataclasses.fields(GenerationRequest) if f.name not in ("arrival_time",)]

def refused(**kw) -> str | None:
    "The field that a request with these values is refused for."
    try: validate_request(GenerationRequest(**{"prompt": "hi", **kw}))
    except RequestError as e:
        assert e.param and e.param in str(e) and len(str(e)) < 300
        return e.param
    return None

@pytest.mark.parametrize("name", FIELDS)
def test_any_junk_in_a_request_is_accepted_or_refused_by_name(name):
    for v in JUNK: assert refused(**{name: v}) in (None, name, "min_tokens" if name == "max_new_tokens" else name)

@pytest.mark.parametrize("name", FIELDS)
def test_an_object_is_never_a_value(name): assert refused(**{name: object()}) == name

@pytest.mark.parametrize("name, good, bad", [
    ("temperature", [0, 0.0, 1e-8, 1e-5, 1, 2, np.float32(0.5)], [-0.1, 2.1, math.nan, math.inf, "inf", "1", True, None]),      # B10
    ("top_p", [1e-9, 0.5, 1], [0, 1.0001, -1, math.nan, None]),                                                                    # B10
    ("top_k", [-1, 0, 1, 9_999_999, np.int64(5)], [-2, 2**63, 1.0, math.nan, "5", False]),                                         # B09
    ("min_p", [0, 1], [-1e-9, 1.1]), ("repetition_penalty", [1e-3, 1, 100], [0, -1, 101]),
    ("presence_penalty", [-2, 0, 2], [-2.1, 2.1]), ("frequency_penalty", [-2, 0, 2], [-2.1, 2.1]),
    ("max_new_tokens", [None, 0, 1, 10**9, 2**31 - 1], [-1, 2**31, 2**63, 10**400, 1.0]),                                          # B05
    ("min_tokens", [0, 256], [-1, 257, 2**63]),                                                                                     # more than max_new_tokens
    ("n", [1, 128], [0, -1, 129]), ("seed", [None, 0, -2**63, 2**64 - 1], [2**64, -2**63 - 1, 0.5]),
    ("logprobs", [None, 0, 20], [-1, 21]), ("prompt_logprobs", [None, 0, 20], [-1, 21]), ("deadline_s", [None, 0, 1e9], [-1, math.inf]),
    ("logit_bias", [None, {}, {0: -100, 2**31 - 1: 100.0, np.int64(3): 1}], [{0: 101}, {0: math.nan}, {-1: 1}, {"abc": 1}, {"5": 1}, {2**31: 1}, {True: 1}, [1]]),  # B08
    ("stop_token_ids", [None, [], [0], (5,), np.array([1, 2])], [[-1], ["abc"], [1.0], [2**31], "12", 7, {1: 2}, [True]]),          # B08
    ("prompt_token_ids", [[1], (1, 2), np.array([1, 2], dtype=np.int32)], [[], [-1], ["a"], [1.5], np.array([1.5]), "12", 3]),     # B04
    ("stop_sequences", [None, [], ["a", ""], ("b",)], ["END", [1], [None], ["\udc00"], 5, b"x"]),
    ("bad_words", [None, ["a"]], ["a", [1]]), ("force_words", [None, ["a"]], ["a", [1]]),
    ("prompt", ["x", "a" * 10, "\U0001f600"], ["", None, 5, ["a"], "\ud83d", b"x"]),
    ("prefix_key", [None, "", "k"], [1, b"k"]), ("adapter", [None, "a"], [1]), ("request_id", ["a"], ["", None, 5]),
    ("structured_outputs", [None, {"regex": "a"}, {"json": {}, "any_whitespace": True}, {"choice": ["a"], "backend": "xgrammar"}, {"json_object": True}],
        [{}, {"json": {}, "regex": "a"}, {"jsn": {}}, {"regex": "a", "strict": 1}, {"regex": "a", "backend": "x"}, {"regex": "a", "any_whitespace": 1}, "json", ["json"], {"backend": "auto"}]),
    ("ignore_eos", [True, False], [0, "yes", None]), ("prefix_allowed_tokens_fn", [None, lambda i, ids: [1]], [5, "f"]),
])
def test_ranges_of_a_request(name, good, bad):
    for v in good: assert refused(**{name: v}) is None, v
    for v in bad: assert refused(**{name: v}) == name, v

@given(st.floats(allow_nan=True, allow_infinity=True) | st.integers(-2**70, 2**70))
def test_temperature_is_accepted_exactly_in_its_range(t): assert (refused(temperature=t) is None) == (0 <= t <= 2)

def test_checking_changes_nothing_and_gives_plain_numbers():
    r = GenerationRequest("hi", stop_sequences=["a"], logit_bias={1: 2.0}, prompt_token_ids=None)
    before = copy.deepcopy(r)
    assert validate_request(r) == r == before
    odd = validate_request(GenerationRequest("hi", n=np.int8(100), temperature=np.float32(0.5), deadline_s=np.float16(3), seed=np.uint64(2**64 - 1)))
    assert [type(v) for v in (odd.n, odd.temperature, odd.deadline_s, odd.seed)] == [int, float, float, int] and odd.seed == 2**64 - 1
    assert type(EngineConfig(max_num_seqs=np.int8(100)).validate().max_num_seqs) is int

def test_greedy_is_every_temperature_below_1e_4():
    assert [SamplingParams(temperature=t).greedy for t in (0, 1e-8, 1e-5, 9.9e-5, 1e-4, 1)] == [True] * 4 + [False] * 2

def test_request_ids_do_not_meet(): assert len({GenerationRequest("a").request_id for _ in range(1000)}) == 1000

PARTS = [(EngineConfig, ENGINE_RULES, EngineConfig, ""), (CacheConfig, CACHE_RULES, lambda **kw: EngineConfig(cache=CacheConfig(**kw)), "cache."),
    (QuantConfig, QUANT_RULES, lambda **kw: EngineConfig(quant=QuantConfig(**kw)), "quant.")]

@pytest.mark.parametrize("cls, rules, make, prefix", PARTS, ids=["engine", "cache", "quant"])
def test_every_setting_has_a_rule_and_survives_junk(cls, rules, make, prefix):
    assert set(rules) == {f.name for f in dataclasses.fields(cls)}
    for name in rules:
        for v in JUNK:
            try: make(**{name: v}).validate()
            except ConfigError as e: assert str(e).startswith(f"{prefix}{name} must be ") and len(str(e)) < 300
        with pytest.raises(ConfigError, match=rf"^{prefix}{name} must be .+; got "): make(**{name: object()}).validate()

@pytest.mark.parametrize("good", [{}, dict(backend="paged"), dict(backend=Backend.VLLM), dict(device="cuda:1"), dict(dtype="bfloat16"), dict(top_k=-1), dict(temperature=0),
    dict(max_model_len=2, max_num_seqs=1, max_num_batched_tokens=1, window_steps=8, max_in_flight=2, num_threads=1, seed=2**64 - 1), dict(quant=QuantConfig(QuantMode.NF4)),
    dict(cache=CacheConfig(page_size_tokens=1, num_blocks=2, eviction=CacheEviction.FIFO, enable_paged_kv=False)), dict(max_num_seqs=np.int64(4), temperature=np.float32(1))])
def test_good_settings_pass(good):
    cfg = EngineConfig(**good)
    assert cfg.validate() is cfg

@pytest.mark.parametrize("bad, message", [
    (dict(backend="page"), "backend must be one of auto, paged, eager, compiled, vllm, upstream; got 'page'"), (dict(device="gpu"), "device must be auto, cpu, cuda or cuda:N; got 'gpu'"),
    (dict(device="cuda:"), "device must be"), (dict(device="cuda:-1"), "device must be"), (dict(device="cpu\n"), "device must be"),
    (dict(dtype="int8"), "dtype must be one of auto, float32, float16, bfloat16, float64; got 'int8'"), (dict(gpu_memory_utilization=0), "gpu_memory_utilization must be a number above 0"),
    (dict(max_in_flight=3), "max_in_flight must be an integer from 1 to 2"), (dict(cache={"page_size_tokens": 3}), "cache must be a CacheConfig"), (dict(model_name="  "), "model_name must be"),
    (dict(cache=CacheConfig(num_blocks=1)), "cache.num_blocks must be an integer from 2"), (dict(quant=QuantConfig("int3")), "quant.mode must be one of none, int8, nf4, fp4, int4, fp8, gguf; got 'int3'")])  # type: ignore[arg-type]
def test_bad_settings_say_what_to_do(bad, message):
    with pytest.raises(ConfigError) as e: EngineConfig(**bad).validate()
    assert message in str(e.value)

def test_texts_become_members_also_when_assigned_later(tmp_path):
    cfg = EngineConfig(model_name=tmp_path, quant=QuantConfig("int8"), cache=CacheConfig(eviction="none"))  # type: ignore[arg-type]
    assert (cfg.model_name, cfg.quant.mode, cfg.cache.eviction) == (str(tmp_path), QuantMode.INT8, CacheEviction.NONE)
    cfg.backend, cfg.quant.mode, cfg.cache.eviction = "eager", "fp4", "fifo"
    cfg.validate()
    assert (cfg.backend, cfg.quant.mode, cfg.cache.eviction) == (Backend.EAGER, QuantMode.FP4, CacheEviction.FIFO) and isinstance(cfg.quant.mode, QuantMode)

def test_a_token_is_never_printed():
    cfg = EngineConfig(hf_token="hf_secret")
    assert not any("hf_secret" in s for s in (repr(cfg), str(cfg), f"{cfg}", repr([cfg])))
    with pytest.raises(ConfigError) as e: EngineConfig(hf_token=["hf_secret"]).validate()  # type: ignore[arg-type]
    assert "hf_secret" not in str(e.value) and "hf_token" in str(e.value)

def test_hub_arguments_are_those_that_are_set():
    assert EngineConfig().hf_model_kwargs() == {"trust_remote_code": False, "local_files_only": False}
    cfg = EngineConfig(hf_revision="main", hf_token="t", hf_cache_dir="/c", hf_local_files_only=True)
    assert cfg.hf_tokenizer_kwargs() == cfg.hf_model_kwargs() == {"trust_remote_code": False, "local_files_only": True, "revision": "main", "token": "t", "cache_dir": "/c"}
    assert cfg.hf_tokenizer_kwargs() is not cfg.hf_model_kwargs()

def test_device_and_dtype_follow_what_the_machine_can_do(monkeypatch):
    import torch
    def gpus(n, capability):
        monkeypatch.setattr(torch.cuda, "is_available", lambda: n > 0)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: n)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda dev=None: capability)
    gpus(0, None)
    assert (resolve_device("auto"), resolve_device("cpu"), resolve_dtype("auto", "auto"), resolve_dtype("auto", "cpu")) == ("cpu", "cpu", torch.float32, torch.float32)
    with pytest.raises(ConfigError, match="'cuda', but torch .* sees no GPU: use 'cpu' or 'auto'"): resolve_device("cuda")
    for capability, dtype in (((9, 0), torch.bfloat16), ((8, 0), torch.bfloat16), ((7, 5), torch.float16)):
        gpus(2, capability)
        assert (resolve_device("auto"), resolve_device("cuda:1"), resolve_dtype("auto", "cuda:1"), resolve_dtype("auto", "cpu")) == ("cuda", "cuda:1", dtype, torch.float32)
    with pytest.raises(ConfigError, match="'cuda:2', but the number of GPUs is 2: use 'cuda:0' to 'cuda:1'"): resolve_device("cuda:2")
    assert resolve_dtype(torch.float64) is torch.float64 and resolve_dtype("float16", "cpu") is torch.float16
    for bad in ("int8", "half", 16, None):
        with pytest.raises(ConfigError, match="dtype must be one of auto, float32, float16, bfloat16, float64"): resolve_dtype(bad)
    for bad in ("gpu", "cuda:x", "", None, 0):
        with pytest.raises(ConfigError, match="device must be auto, cpu, cuda or cuda:N"): resolve_device(bad)
