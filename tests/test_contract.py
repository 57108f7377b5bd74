"""The library contract: names where users import them, defaults, command lines; and which test shows each claim true and each old bug absent.

`WHERE` names tests of this suite by file and function: one that is renamed or gone makes this file fail."""
import ast, inspect, json, re
from dataclasses import MISSING, fields
from functools import cache
from importlib import import_module
from pathlib import Path
import pytest
from typer.testing import CliRunner
from llminfer.cli import app
from llminfer.loading import make_tiny
from support.engines import pool_of

WHERE = {
    # claims (section 7)
    "C1": "engine::the_prefix_example_hits_and_computes_only_the_tail backends::eager_reuses_kv_for_a_prefix",
    "C2": "backends::eager_reuses_kv_for_a_prefix engine::a_second_turn_hits_decoded_blocks",
    "C3": "engine::info_and_cache_stats_have_the_contracts_keys engine::the_prefix_example_hits_and_computes_only_the_tail",
    "C4": "contract::without_pages_a_sequence_has_one_block kv_cache::10000_random_actions_leave_nothing_held engine::10000_random_actions_leave_no_block_and_no_wrong_token",
    "C5": "serving::the_contracts_scheduler api::a_short_request_ends_before_a_long_one",
    "C6": "backends::the_readme_of_the_contract_runs serving::queue_of_four_and_one_slot",
    "C7": "engine::a_crowd_with_every_feature_gets_its_plain_answers_and_no_launch_reads_the_device api::parallel_requests_have_their_own_settings",
    "C8": "backends::old_queues_and_streamers contract::every_name_is_where_users_import_it",
    "C9": "streaming::any_ids_any_cutting_equal_the_one_shot_decode backends::streams_and_asyncio_on_every_backend",
    "C10": "api_stream::every_stream_is_framed_and_ordered api_clients::openai_chat_and_completions",
    "C11": "serving::streams_equal_the_engine_and_settings_are_each_requests_own serving::one_wake_up_a_step_for_all_streams",
    "C12": "bench::counts_times_and_verdicts backends::streams_and_asyncio_on_every_backend",
    "C13": "bench::counts_times_and_verdicts load_client::medians_are_within_5_percent_of_the_servers_own_book",
    "C14": "backends::counts_are_of_real_tokens bench::backends_in_turns_and_one_that_is_missing bench::one_wrong_token_and_no_speed_is_shown",
    "C15": "reproduce::pages_say_what_the_records_say reproduce::a_hand_in_a_record_is_found_with_and_without_a_new_seal",
    "C16": "structured::forced_words_appear_in_a_batch contract::the_controls_of_the_readme_act",
    "C17": "speculative::settings_of_drafts_act_for_the_engine_and_for_a_request speculative::100_requests_with_every_feature_say_what_they_say_without_guesses",
    "C18": "contract::every_flag_is_on_its_command cli::no_flag_is_inert",
    "C19": "adapters::what_is_active_is_what_acts adapters::200_switches_under_traffic",
    "C20": "parallel::two_ranks_write_what_one_writes parallel::what_cannot_be_split_is_refused_by_name backends::what_a_backend_lacks_is_refused_by_name",
    "C21": "backends::the_graph_switch_switches graphs::a_step_that_cannot_be_captured_stays_eager",
    "C22": "backends::the_graph_switch_switches",
    "C23": "backends::compiled_falls_back_aloud",
    "C24": "vllm_backend::vllm_gets_its_own_names quantization::the_error_of_each_kind_is_the_one_stated",
    "C25": "backends::what_a_backend_lacks_is_refused_by_name backends::stop_strings_end_the_work",
    "C26": "engine::n_samples_are_n_separate_runs_and_one_prefill backends::a_crowd_on_eager_is_the_crowd_on_paged",
    "C27": "api::messages_in_all_their_forms api::one_bos_and_no_forged_turns api_clients::openai_chat_and_completions",
    "C28": "cli::every_flag_runs_or_is_refused_by_name config_request::device_and_dtype_follow_what_the_machine_can_do",
    "C29": "serving::loops_come_and_go_and_engines_live_side_by_side backends::old_queues_and_streamers",
    "C30": "bench::bench_writes_everything bench::backends_in_turns_and_one_that_is_missing",
    # bugs (section 8)
    "B1": "api_stream::every_stream_is_framed_and_ordered",
    "B2": "backends::mixed_lengths_equal_generate_and_hold_no_prompt",
    "B3": "engine::a_crowd_with_every_feature_gets_its_plain_answers_and_no_launch_reads_the_device api::parallel_requests_have_their_own_settings",
    "B4": "backends::a_fault_in_the_model_reaches_every_waiter api_stream::a_failure_in_mid_stream_is_an_event_and_then_the_end",
    "B5": "serving::drain_lets_them_end_then_aborts serving::the_contracts_scheduler",
    "B6": "structured::forced_words_appear_in_a_batch structured::a_rule_that_fails_ends_its_row_alone",
    "B7": "serving::start_is_shared_and_may_be_stopped_or_fail",
    "B8": "serving::queue_of_four_and_one_slot serving::deadlines api_stream::clients_that_leave_free_their_blocks",
    "B9": "cli::stop_strings streaming::streamed_text_is_the_full_decode_cut_at_the_earliest_stop",
    "B10": "backends::stop_strings_end_the_work engine::a_stop_string_in_mid_window_ends_the_text_and_the_rest_never_happened",
    "B11": "backends::the_same_request_id_twice config_request::request_ids_do_not_meet",
    "B12": "backends::counts_are_of_real_tokens bench::early_ends_are_counted_as_they_are",
    "B13": "engine_threads::8_threads_with_10_requests_each_share_one_engine adapters::a_running_request_keeps_its_adapter",
    "B14": "vllm_backend::vllm_keeps_one_engine_for_every_caller",
    "B15": "vllm_backend::vllm_keeps_one_engine_for_every_caller",
    "B16": "backends::compiled_falls_back_aloud backends::streams_and_asyncio_on_every_backend",
    "B17": "backends::what_a_backend_lacks_is_refused_by_name backends::compiled_falls_back_aloud",
    "B18": "speculative::drafts_that_cannot_be_are_refused_by_name speculative::settings_of_drafts_act_for_the_engine_and_for_a_request",
    "B19": "backends::a_prompt_that_is_too_long_is_refused_whole api::prompts_around_the_context",
    "B20": "backends::eviction_orders_of_the_manager kv_cache::eviction_order",
    "B21": "backends::eviction_orders_of_the_manager",
    "B22": "api::two_apps_in_one_process",
    "B23": "metrics::times_add_up_and_labels_are_bounded metrics::a_scrape_says_what_happened",
    "B24": "api::usage_timings_cache_and_salt api_stream::every_stream_is_framed_and_ordered",
    "B25": "serving::the_loop_stays_quick_while_streams_run serving::one_wake_up_for_many_chunks_and_none_for_a_closed_loop",
    "B26": "backends::defaults_are_the_same_streamed_or_not api::defaults_come_from_the_model_then_the_operator",
    "B27": "cli::model_text_is_not_markup bench::empty_results_and_brackets",
    "B28": "bench::backends_in_turns_and_one_that_is_missing bench::a_child_that_dies_or_hangs_keeps_what_it_gave",
    "B29": "bench::prompts_are_new_in_each_round_and_the_same_for_each_backend bench::backends_in_turns_and_one_that_is_missing",
    "B30": "contract::bars_stand_over_their_batch_size",
    "B31": "backends::bad_words_in_both_spacings cases::bad_words_are_banned_in_both_spacings cli::any_list_of_texts_can_be_written",
    "B32": "config_request::a_token_is_never_printed api::keys contract::defaults_are_the_contracts",
    "B33": "contract::nothing_to_do_is_no_error engine::run_batch_reports_each_error_in_its_own_place",
    "B34": "backends::what_a_backend_lacks_is_refused_by_name config_request::any_junk_in_a_request_is_accepted_or_refused_by_name contract::nothing_to_do_is_no_error",
    "B35": "house::settings_ini_agrees_with_pyproject house::extras_and_package_data",
    "B36": "engine_threads::an_interrupt_cancels_what_it_interrupts",
    # acceptance (section 10)
    "A1": "backends::mixed_lengths_equal_generate_and_hold_no_prompt",
    "A2": "api::parallel_requests_have_their_own_settings",
    "A3": "api_clients::openai_chat_and_completions api_stream::the_first_chunk_comes_while_the_request_still_runs",
    "A4": "engine::the_prefix_example_hits_and_computes_only_the_tail",
    "A5": "api::a_short_request_ends_before_a_long_one scheduler::trace_tells_who_sat_where",
    "A6": "contract::without_pages_a_sequence_has_one_block engine::10000_random_actions_leave_no_block_and_no_wrong_token",
    "A7": "contract::the_controls_of_the_readme_act speculative::settings_of_drafts_act_for_the_engine_and_for_a_request adapters::what_is_active_is_what_acts backends::the_graph_switch_switches",
    "A8": "serving::drain_lets_them_end_then_aborts api_stream::clients_that_leave_free_their_blocks backends::a_fault_in_the_model_reaches_every_waiter",
    "A9": "serving::queue_of_four_and_one_slot api::full_queue_and_unknown_model metrics::a_scrape_says_what_happened",
    "A10": "bench::counts_times_and_verdicts bench::backends_in_turns_and_one_that_is_missing backends::compiled_falls_back_aloud",
    "A11": "api::two_apps_in_one_process cli::every_flag_runs_or_is_refused_by_name notebooks::notebook_runs",
    "A12": "readme::command readme::python_blocks_one_after_another backends::the_readme_of_the_contract_runs contract::command_lines_of_the_contract_run contract::the_benchmark_of_the_readme_runs",
}

NAMES = {
    "config": "QuantMode Backend CacheEviction QuantConfig CacheConfig EngineConfig", "engine": "InferenceEngine", "request": "GenerationRequest TokenStats GenerationResult StreamChunk",
    "kv_cache": "KVCacheManager CacheEntry PastKV", "batching": "Batch BatchQueue SyncBatchQueue", "streaming": "TokenStreamer MultiStreamer",
    "benchmark": "RunMetrics BenchmarkResult Benchmarker BackendComparison save_plot_suite save_comparison_plot_suite save_comparison_json save_comparison_csv",
    "serving": "ContinuousBatchScheduler QueuedRequest chat_messages_to_prompt", "api": "create_openai_app CompletionRequest ChatMessage ChatCompletionRequest Metrics", "cli": "app",
    "backends": "BaseBackend EagerBackend CompiledBackend VLLMBackend"}

# class -> field -> default. What differs from the contract, for its users' good: no remote code, device and backend chosen by the machine, greedy of the model.
DEFAULTS = {
    "config.QuantConfig": {"double_quant": True, "compute_dtype": "bfloat16"},
    "config.CacheConfig": {"max_seqs": 64, "max_seq_len": 2048, "enable_prefix_cache": True, "page_size_tokens": 16, "gpu_memory_fraction": 0.15},
    "config.EngineConfig": {"max_new_tokens": 256, "temperature": 1.0, "top_p": 0.9, "top_k": 50, "repetition_penalty": 1.0, "speculative_num_assistant_tokens": None, "speculative_confidence_threshold": None,
        "max_batch_size": 8, "batch_timeout_ms": 20.0, "dtype": "auto", "tensor_parallel_size": 1, "pipeline_parallel_size": 1, "hf_revision": None, "hf_token": None, "hf_local_files_only": False,
        "hf_trust_remote_code": False, "hf_cache_dir": None, "assistant_model_name": None, "compile_mode": "reduce-overhead", "compile_dynamic": True, "compile_fullgraph": False, "compile_cudagraphs": True,
        "compile_fallback_to_eager": True},
    "request.GenerationRequest": {"max_new_tokens": 256, "temperature": 1.0, "top_p": 0.9, "top_k": 50, "repetition_penalty": 1.0, "no_repeat_ngram_size": 0, "stream": False, "bad_words": None, "force_words": None,
        "prefix_allowed_tokens_fn": None, "seed": None, "prefix_key": None},
    "request.TokenStats": {"prompt_tokens": 0, "generated_tokens": 0, "time_to_first_token_ms": 0.0, "total_latency_ms": 0.0, "throughput_tokens_per_sec": 0.0, "cache_hit": False}}

METHODS = {
    "engine.InferenceEngine": "load unload warmup run run_batch run_requests run_requests_continuous_async run_requests_continuous run_batch_continuous stream cache_stats info load_adapter set_adapter unload_adapter list_adapters",
    "kv_cache.KVCacheManager": "has get update free hash_prefix lookup_prefix store_prefix hit_rate stats", "backends.BaseBackend": "load generate stream is_loaded unload",
    "config.EngineConfig": "hf_model_kwargs hf_tokenizer_kwargs", "config.QuantConfig": "to_bnb_kwargs", "batching.BatchQueue": "put get_batch qsize", "batching.SyncBatchQueue": "add flush flush_all",
    "streaming.MultiStreamer": "put stream", "serving.ContinuousBatchScheduler": "start stop submit queue_size", "request.GenerationResult": "full_text", "request.TokenStats": "tokens_per_second",
    "benchmark.BenchmarkResult": "print_summary plot plot_suite to_dict to_rows save_json save_csv batch_sizes throughput_curve latency_curve", "benchmark.BackendComparison": "run print_table plot plot_suite"}

SHARED = ("--model --backend --quant --revision --hf-token --local-files-only --trust-remote-code --cache-dir --paged-kv --page-size-tokens --tp-size --pp-size --compile-fullgraph --compile-cudagraphs "
    "--spec-num-assistant-tokens --spec-confidence-threshold").split()
FLAGS = {"run": "--assistant-model --max-tokens --temp --top-p --top-k --repetition-penalty --no-repeat-ngram-size --stop --seed --bad-words --force-words --adapter --adapter-name",
    "stream": "--assistant-model --max-tokens --temp --top-p --no-repeat-ngram-size --stop --seed --adapter --adapter-name",
    "bench": "--max-tokens --batch-sizes --runs --continuous --plot --plot-suite-dir --json-out --csv-out --artifacts-dir --device --dtype --prompt-type --warmup --request-rate --goodput",
    "compare": "--batch-sizes --runs --continuous --backends --plot --plot-suite-dir --json-out --csv-out --artifacts-dir --device --dtype --prompt-type --warmup",
    "serve": "--assistant-model --host --port --model-alias --max-batch-size --batch-timeout-ms --max-queue-size --log-level", "info": ""}


def part(path: str):
    module, _, name = path.partition(".")
    return getattr(import_module(f"llminfer.{module}"), name)


@cache
def functions_of(file: str) -> set[str]:
    tree = ast.parse((Path(__file__).parent / f"test_{file}.py").read_text(encoding="utf-8"))
    return {n.name for n in tree.body if isinstance(n, (ast.FunctionDef, ast.AsyncFunctionDef))}


@pytest.fixture(scope="session")
def tiny(tmp_path_factory): return str(make_tiny(tmp_path_factory.mktemp("contract") / "tiny", seed=5))


def ok(*args) -> str:
    r = CliRunner().invoke(app, [str(a) for a in args], prog_name="llminfer")
    assert r.exit_code == 0, (args, r.output)
    return r.stdout


def test_every_claim_bug_and_acceptance_has_its_tests():
    assert list(WHERE) == [f"C{i}" for i in range(1, 31)] + [f"B{i}" for i in range(1, 37)] + [f"A{i}" for i in range(1, 13)]
    gone = [(k, t) for k, ts in WHERE.items() for t in ts.split() if f"test_{t.split('::')[1]}" not in functions_of(t.split("::")[0])]
    assert not gone, gone


def test_every_name_is_where_users_import_it():
    import llminfer
    for module, names in NAMES.items():
        for n in names.split(): exec(f"from llminfer.{module} import {n}", {})
    for n in ("InferenceEngine", "EngineConfig", "QuantConfig", "CacheConfig", "Benchmarker", "BenchmarkResult", "GenerationRequest", "GenerationResult", "ContinuousBatchScheduler"): assert n in llminfer.__all__
    for module in ("kv_cache", "streaming"):
        with pytest.raises(ImportError, match="Nothing"): exec(f"from llminfer.{module} import Nothing", {})
    from llminfer import kv_cache, kv_manager, streamers, streaming
    assert kv_cache.KVCacheManager is kv_manager.KVCacheManager and streaming.TokenStreamer is streamers.TokenStreamer
    for path, methods in METHODS.items():
        for m in methods.split(): assert hasattr(part(path), m), (path, m)


def test_defaults_are_the_contracts():
    for path, wanted in DEFAULTS.items():
        have = {f.name: f.default if f.default is not MISSING else f.default_factory() if f.default_factory is not MISSING else MISSING for f in fields(part(path))}
        assert {k: have[k] for k in wanted} == wanted, path
    from llminfer.benchmark import Benchmarker
    run = inspect.signature(Benchmarker.run).parameters
    assert {k: run[k].default for k in ("batch_sizes", "num_runs", "warmup_runs", "prompt_type", "max_new_tokens", "use_continuous_batching")} == {
        "batch_sizes": (1, 2, 4, 8), "num_runs": 10, "warmup_runs": 3, "prompt_type": "medium", "max_new_tokens": 128, "use_continuous_batching": False}


@pytest.mark.parametrize("command", FLAGS)
def test_every_flag_is_on_its_command(command):
    text = ok(command, "--help")
    for f in (*SHARED, *FLAGS[command].split()):
        if (command, f) != ("compare", "--backend"): assert re.search(re.escape(f) + r"(?![\w-])", text), f     # compare has --backends


def test_command_lines_of_the_contract_run(tiny, tmp_path):
    "Each command as its users wrote it, every flag of `bench` and `compare` in one line (test_cli has `run`, `stream` and `info` flag by flag, test_cli_serve has `serve`)."
    model = ("--model", tiny, "--local-files-only", "--no-trust-remote-code", "--page-size-tokens", 16, "--tp-size", 1, "--pp-size", 1)
    assert "tok/s=" in ok("run", "Explain KV cache", *model, "--quant", "nf4", "--max-tokens", 4, "--temp", 0.2, "--top-p", 0.9, "--top-k", 50, "--repetition-penalty", 1.1, "--no-repeat-ngram-size", 3,
        "--stop", "END,STOP", "--seed", 42, "--bad-words", "foo,bar", "--force-words", "ok")
    assert "latency=" in ok("stream", "Tell me a story", *model, "--max-tokens", 4, "--temp", 0.2, "--seed", 1)
    assert "Engine Info" in ok("info", *model)
    small = ("--batch-sizes", "1,2", "--runs", 1, "--warmup", 0, "--prompt-type", "short", "--device", "cpu", "--dtype", "float32", "--threads", 1, "--max-model-len", 64, "--max-tokens", 3)
    files = lambda kind: ("--plot", tmp_path / f"{kind}.png", "--plot-suite-dir", tmp_path / kind, "--json-out", tmp_path / f"{kind}.json", "--csv-out", tmp_path / f"{kind}.csv", "--artifacts-dir", tmp_path / f"{kind}_a")
    out = ok("bench", *model, *small, "--continuous", "--request-rate", 500, "--goodput", "ttft:60000", "tpot:60000", *files("bench"))
    assert "[paged / none]" in out and json.loads((tmp_path / "bench.json").read_text())["result"]["settings"]["limits"] == {"ttft": 6e4, "tpot": 6e4}
    assert "paged Tok/s" in ok("compare", *model, *small, "--backends", "paged", "--continuous", *files("compare"))
    for kind, name in (("bench", "benchmark"), ("compare", "comparison")):
        assert {p.name for p in (tmp_path / f"{kind}_a").iterdir()} == {f"{name}.json", f"{name}.csv", f"{name}.environment.json"}
        assert {f"{name}_{k}.png" for k in ("dashboard", "throughput", "latency", "ttft")} <= {p.name for p in (tmp_path / kind).iterdir()}


def test_the_benchmark_of_the_readme_runs(tiny, tmp_path, monkeypatch):
    from llminfer import Benchmarker, EngineConfig, InferenceEngine
    from llminfer.benchmark import BackendComparison
    monkeypatch.chdir(tmp_path)
    with InferenceEngine(EngineConfig(model_name=tiny, max_model_len=64, num_threads=1)) as engine:
        result = Benchmarker(engine).run(batch_sizes=[1, 2], num_runs=1, warmup_runs=0, prompt_type="short", max_new_tokens=4)
    result.print_summary(), result.plot("benchmark.png")
    assert set(result.plot_suite("plots")) >= {"dashboard", "throughput", "latency", "ttft"} and result.throughput_curve[0] == [1, 2] and len(result.latency_curve[1]) == 2
    c = BackendComparison(model_name=tiny, backends=["paged"], max_model_len=64, num_threads=1)
    results = c.run(batch_sizes=[1], num_runs=1, max_new_tokens=3, prompt_type="short", warmup_runs=0)
    c.print_table(results), c.plot(results, "comparison.png")
    assert [m.token_check["status"] for m in (*result.metrics_by_batch.values(), *results[0].metrics_by_batch.values())] == ["exact"] * 3
    assert {p.name for p in tmp_path.iterdir()} >= {"benchmark.png", "comparison.png", "plots"}


def test_the_controls_of_the_readme_act(tiny):
    from llminfer import EngineConfig, InferenceEngine
    with InferenceEngine(EngineConfig(model_name=tiny, max_model_len=96, num_threads=1)) as e:
        rs = e.run_batch(["Once upon a time", "The sea"], max_new_tokens=24, temperature=0.0, force_words=["token"], ignore_eos=True)
        assert all("token" in r.generated_text for r in rs)
        free = e.run("abc", max_new_tokens=12, temperature=0.0, ignore_eos=True)
        word = re.findall(r"[a-z]+", free.generated_text)[0]
        assert word not in e.run("abc", max_new_tokens=12, temperature=0.0, ignore_eos=True, bad_words=[word]).generated_text
        ids = e.run("abc", max_new_tokens=4, temperature=0.0, ignore_eos=True, prefix_allowed_tokens_fn=lambda batch_id, ids: [65, 66]).token_ids
        assert set(ids) <= {65, 66}


def test_without_pages_a_sequence_has_one_block(tiny):
    from llminfer import CacheConfig, EngineConfig, InferenceEngine
    texts = []
    for paged in (True, False):
        with InferenceEngine(EngineConfig(model_name=tiny, max_model_len=96, cache=CacheConfig(enable_paged_kv=paged, page_size_tokens=8), num_threads=1)) as e:
            texts.append(e.run("a text of some length " * 2, max_new_tokens=9, temperature=0.0, ignore_eos=True).token_ids)
            stats = e.cache_stats()
            assert stats["paged_kv_enabled"] == paged and pool_of(e).block_size == (8 if paged else 96)
    assert texts[0] == texts[1]


def test_nothing_to_do_is_no_error(tiny):
    from llminfer import EngineConfig, InferenceEngine
    with InferenceEngine(EngineConfig(model_name=tiny, max_model_len=64, num_threads=1)) as e:
        assert e.run_requests([]) == e.run_batch([]) == e.run_batch_continuous([]) == []
        assert [c.is_final for c in e.stream("x", stream=True, max_new_tokens=1)][-1]
        with pytest.raises(TypeError, match="max_new_token"): e.run("x", max_new_token=3)


def test_bars_stand_over_their_batch_size():
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from llminfer.plots import Chart, Line, draw_axes
    fig = Figure()
    FigureCanvasAgg(fig)
    ax = fig.add_subplot()
    draw_axes(ax, Chart("Peak GPU memory", "batch size", "MB", [Line("a", [1, 8], [10.0, 30.0], kind="bar"), Line("b", [1, 8], [20.0, 40.0], kind="bar")]))
    assert [t.get_text() for t in ax.get_xticklabels()] == ["1", "8"]
    assert [round(p.get_x() + p.get_width() / 2) for p in ax.patches] == [0, 1, 0, 1] and [p.get_height() for p in ax.patches] == [10, 30, 20, 40]
