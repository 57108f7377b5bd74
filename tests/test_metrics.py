"""What a scrape shows: names, labels, sums, and nothing that grows without end."""
import asyncio, re
import pytest
from prometheus_client.parser import text_string_to_metric_families
from llminfer.backends import GenerationError
from llminfer.config import ConfigError
from llminfer.metrics import COUNTERS, HISTOGRAMS, Buckets, ServerMetrics, one_two_five
from llminfer.request import GenerationRequest, TokenStats
from llminfer.serving import QueueFullError
from llminfer.streams import RequestRecord
from support.serving import EXIT, RAISE, read, request, scripted, serving, until


def samples(m: ServerMetrics) -> dict:
    "(name, other labels) -> value; every line must be one that Prometheus can read."
    body, kind = m.render()
    assert kind.startswith("text/plain")
    out = {}
    for f in text_string_to_metric_families(body.decode()):
        for s in f.samples:
            labels = dict(s.labels)
            assert (labels.pop("model_name"), labels.pop("engine")) == ("de\"mo\n", "0")
            assert (key := (s.name, *sorted(labels.values()))) not in out
            out[key] = s.value
    return out


def test_buckets():
    b = Buckets((1, 2, 5))
    for v in (0, 1, 1.5, 5, 6): b.add(v)
    b.add(2, 3)
    assert b.rows() == [("1.0", 2), ("2.0", 6), ("5.0", 7), ("+Inf", 8)] and b.sum == 19.5
    assert one_two_five(1000) == [1, 2, 5, 10, 20, 50, 100, 200, 500, 1000] and one_two_five(200)[-1] == 200
    for bounds in (b for _, b in HISTOGRAMS.values()): assert list(bounds) == sorted(set(bounds))


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_scrape_says_what_happened():
    async def main():
        async with serving(scripted(0.002), max_queued_requests=1, backoff_s=0.05, deadline_s=5) as a:
            m = ServerMetrics("de\"mo\n", "both").attach(a)
            empty = samples(m)
            assert empty["llminfer_engine_state", "ready"] == 1 and empty["llminfer_request_success_total", "stop"] == 0
            await read(a, request(1, 10))
            await a.generate(request(2, 6, stream=False, n=2))
            with pytest.raises(GenerationError): await a.generate(request(RAISE, 3))
            async with await a.open(request(3, 500)) as s: await anext(s)
            await until(lambda: s.done)
            open_ = [await a.open(request(i, 300)) for i in range(4, 9)]
            with pytest.raises(QueueFullError): await a.open(request(9, 5))
            await until(lambda: a.stats()["running"] == 4)
            busy = samples(m)
            for p in ("llminfer_", "vllm:"):
                assert busy[p + "num_requests_running",] == 4 and busy[p + "num_requests_waiting",] == 1 and 0 < busy[p + "kv_cache_usage_perc",] < 1
            for s in open_: s.cancel()
            await until(lambda: not a.running)
            before = samples(m)["llminfer_prefix_cache_queries_total",]
            with pytest.raises(GenerationError): await a.generate(request(EXIT, 3))
            await until(lambda: a.state == "loading")
            assert samples(m)["llminfer_engine_state", "loading"] == 1
            await until(lambda: a.state == "ready")
            await read(a, request(1, 10))
            return before, samples(m), m
    before, got, m = asyncio.run(main())
    for p in ("llminfer_", "vllm:"):
        for name in COUNTERS: assert any(k[0] == f"{p}{name}_total" for k in got), name
        for name in HISTOGRAMS: assert got[f"{p}{name}_bucket", "+Inf"] == got[f"{p}{name}_count",], name
        success = {k[1]: v for k, v in got.items() if k[0] == p + "request_success_total"}
        assert success == {"length": 4, "abort": 6, "error": 2, "stop": 0}
        assert got[p + "admission_rejections_total", "requests"] == 1
        assert got[p + "request_generation_tokens_sum",] <= got[p + "generation_tokens_total",] and got[p + "request_params_n_count",] == 11
        assert 14 <= got[p + "inter_token_latency_seconds_count",] < 1000 and got[p + "e2e_request_latency_seconds_count",] == 9
        assert got[p + "prefix_cache_queries_total",] > before > 0          # the engine is a new one, the counter goes on
        assert got[p + "cache_config_info", "16", "512"] == 1
    assert got["llminfer_engine_restarts_total",] == 1 and got["llminfer_disconnects_total",] == 6
    assert m.render(openmetrics=True)[1].startswith("application/openmetrics-text") and m.render(True)[0].endswith(b"# EOF\n")


def test_times_add_up_and_labels_are_bounded():
    m = ServerMetrics("de\"mo\n")
    s = TokenStats(prompt_tokens=7, generated_tokens=5, time_to_first_token_ms=300, total_latency_ms=700, queue_ms=100, cached_tokens=4)
    m.observe_request(RequestRecord(GenerationRequest("x", max_new_tokens=9), s, ["stop"], None, [0.3, 0.1, 0.3], [1, 1, 3]))
    m.observe_request(RequestRecord(GenerationRequest("x", max_new_tokens=None), TokenStats(), ["a reason that nobody knows"], "it broke"))
    for i in range(50):
        m.http_begin(f"/v1/{i}")
        m.http_end(f"/v1/{i}", False, 0.1, True)
    m.http_begin("completions")
    m.reject("api_key")
    got = samples(m)
    want = {"time_to_first_token": 0.3, "request_queue_time": 0.1, "request_prefill_time": 0.2, "request_decode_time": 0.4, "request_inference_time": 0.6,
            "e2e_request_latency": 0.7, "request_time_per_output_token": 0.1, "inter_token_latency": 0.4}
    for k, v in want.items(): assert abs(got[f"llminfer_{k}_seconds_sum",] - v) < 1e-9 and got[f"llminfer_{k}_seconds_count",] == (4 if k.startswith("inter_") else 1)
    assert got["llminfer_request_success_total", "other"] == 1 and got["llminfer_prompt_tokens_cached_total",] == 4
    assert got["llminfer_requests_total", "0", "other"] == 50 == got["llminfer_errors_total", "other"] and got["llminfer_inflight_requests", "other"] == 0
    assert got["llminfer_inflight_requests", "completions"] == 1 and got["llminfer_admission_rejections_total", "api_key"] == 1
    assert not any(k[0].startswith("vllm") for k in got) and got["llminfer_engine_state", "dead"] == 1
    assert all(re.fullmatch(r"[a-z0-9_]+", k[0]) for k in got)
    only = ServerMetrics("de\"mo\n", "vllm")
    assert ("vllm:num_requests_running",) in samples(only) and ("llminfer_num_requests_running",) not in samples(only)
    with pytest.raises(ConfigError, match="metrics names must be llminfer, vllm or both, got 'all'"): ServerMetrics("m", "all")
