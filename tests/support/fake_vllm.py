"""A module with vLLM's names and no model: the next token is the last plus one. An argument that vLLM 0.26 does not have is a TypeError, as it is there."""
from __future__ import annotations
import sys
from contextlib import contextmanager
from importlib.machinery import ModuleSpec
from types import ModuleType, SimpleNamespace
from typing import Any, Iterator

# Fields of vllm.EngineArgs and vllm.SamplingParams (0.26), those that this project or its users may set.
ENGINE_ARGS = set("""model tokenizer tokenizer_mode skip_tokenizer_init trust_remote_code download_dir load_format dtype seed max_model_len revision tokenizer_revision hf_token
    tensor_parallel_size pipeline_parallel_size gpu_memory_utilization max_num_seqs max_num_batched_tokens enable_prefix_caching enforce_eager quantization kv_cache_dtype block_size
    speculative_config scheduling_policy disable_log_stats enable_lora max_loras max_lora_rank enable_chunked_prefill generation_config compilation_config""".split())
SAMPLING = set("""n presence_penalty frequency_penalty repetition_penalty temperature top_p top_k min_p seed stop stop_token_ids bad_words ignore_eos max_tokens min_tokens logprobs
    prompt_logprobs detokenize skip_special_tokens include_stop_str_in_output output_kind logit_bias allowed_token_ids structured_outputs extra_args""".split())
VOCAB = 512


def strict(names: set[str], **kw: Any) -> SimpleNamespace:
    for name in kw:
        if name not in names: raise TypeError(f"unexpected keyword argument {name!r}")
    return SimpleNamespace(**kw)


class LLMEngine:
    made: list[LLMEngine] = []

    def __init__(self, args: Any):
        self.args, self.running, self.added, self.aborted = args, dict[str, list[Any]](), list[Any](), list[str]()
        self.fail: Exception | None = None
        self.model_config = SimpleNamespace(get_vocab_size=lambda: VOCAB, max_model_len=getattr(args, "max_model_len", 256))
        LLMEngine.made.append(self)

    @classmethod
    def from_engine_args(cls, args: Any) -> LLMEngine: return cls(args)

    def add_request(self, request_id: str, prompt: Any, params: Any, priority: int = 0) -> None:
        assert isinstance(request_id, str) and request_id not in self.running and params.max_tokens > 0 and params.output_kind == "delta"
        self.added.append((prompt, params, priority))
        self.running[request_id] = [prompt["prompt_token_ids"][-1], 0, params, prompt["prompt_token_ids"]]

    def abort_request(self, request_ids: list[str]) -> None:
        self.aborted += request_ids
        for i in request_ids: self.running.pop(i, None)

    def step(self) -> list[Any]:
        if self.fail: raise self.fail
        out = []
        for i, r in list(self.running.items()):
            last, n, p, prompt = r
            token = (last + 1) % VOCAB
            first, r[0], r[1] = n == 0, token, n + 1
            end = "stop" if token in p.stop_token_ids and n + 1 > p.min_tokens else "length" if n + 1 == p.max_tokens else None
            if end: del self.running[i]
            lp = {token: SimpleNamespace(logprob=-0.5, rank=1), (token + 1) % VOCAB: SimpleNamespace(logprob=-1.5, rank=2)}
            scored = [None, *({t: SimpleNamespace(logprob=-1.0, rank=3)} for t in prompt[1:])] if first and getattr(p, "prompt_logprobs", None) is not None else None
            sample = SimpleNamespace(token_ids=[token], finish_reason=end, stop_reason=token if end == "stop" else None, logprobs=[lp] if getattr(p, "logprobs", None) is not None else None)
            out.append(SimpleNamespace(request_id=i, outputs=[sample], num_cached_tokens=len(prompt) // 2, prompt_logprobs=scored))
        return out


@contextmanager
def fake_vllm() -> Iterator[type[LLMEngine]]:
    "`import vllm` finds the stand-in."
    LLMEngine.made = []
    m: Any = ModuleType("vllm")
    m.__spec__, m.__version__, m.LLMEngine = ModuleSpec("vllm", None), "0.26.0", LLMEngine
    m.EngineArgs = lambda **kw: strict(ENGINE_ARGS, **kw)
    m.SamplingParams = lambda **kw: strict(SAMPLING, **kw)
    m.sampling_params = SimpleNamespace(RequestOutputKind=SimpleNamespace(DELTA="delta"))
    sys.modules["vllm"] = m
    try: yield LLMEngine
    finally: del sys.modules["vllm"]
