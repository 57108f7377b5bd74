#!/bin/bash
# Stages of a session on a machine with one GPU or two; each prints a short account and leaves records and logs in $OUT. gpu_pack.md says what each needs in /tmp/parts.
#
#   benchmarks/gpu_session.sh kernels     tests/gpu without the demo model, 8-bit KV, quantised products and the launches that suit them
#   benchmarks/gpu_session.sh demo        tests that want the demo model or bitsandbytes, speculation, a trained head, tracing; quantisation, adapters
#   benchmarks/gpu_session.sh steps       FlashInfer (its wheels), sampled against greedy, tails, layers, the ladder
#   benchmarks/gpu_session.sh ranks       two GPUs: tests of two ranks, two ranks against one GPU, two replicas against one
#   benchmarks/gpu_session.sh vllm        the vllm backend, `llminfer serve` against `vllm serve`
#   benchmarks/gpu_session.sh compare     in process against vLLM, four models: two a GPU where there are two
OUT=${OUT:-/tmp/out}; mkdir -p "$OUT"
export PYTHONPATH=.:tests:benchmarks:/tmp/extra PYTHONUNBUFFERED=1 FLASHINFER_WORKSPACE_BASE=/tmp/fi OMP_NUM_THREADS=2
DEMO="fp32_writes or low_precision or launches_never_wait_for_the_device or old_gpu or step_eagerly or demo_model"
step() { # step GPUS SECONDS NAME COMMAND...: its output in $OUT/NAME.log, what matters of it here
    local gpus=$1 seconds=$2 name=$3 t=$SECONDS; shift 3
    CUDA_VISIBLE_DEVICES=$gpus timeout "$seconds" "$@" > "$OUT/$name.log" 2>&1
    { echo "== $name: exit $? after $((SECONDS - t)) s"; grep -aE "FAILED|ERROR|passed|failed|^E  " "$OUT/$name.log" | cut -c1-220 | tail -40 || true; } > "/tmp/said.$name"
    grep -qaE "passed|failed" "$OUT/$name.log" || tail -n 16 "$OUT/$name.log" | cut -c1-420 >> "/tmp/said.$name"
    cat "/tmp/said.$name"
}
tests() { local gpus=$1 seconds=$2 name=$3; shift 3; step "$gpus" "$seconds" "$name" python3 -m pytest -q -p no:cacheprovider --durations=5 "$@"; }
demo_model() { mkdir -p ~/.cache/llminfer/demo && cat /tmp/parts/demo.part.0* > ~/.cache/llminfer/demo/SmolLM2-135M-Instruct.Q4_1.gguf; }

both() { # the second list of steps on the second GPU at the same time, or behind the first where there is one GPU
    if [ "$(nvidia-smi -L | wc -l)" -gt 1 ]; then "$1" 0 & "$2" 1 & wait; else "$1" 0; "$2" 0; fi
}

kernel_tests() {
    tests "$1" 250 tests_gpu -n 14 tests/gpu --deselect tests/gpu/test_flashinfer.py --deselect tests/gpu/test_parallel_gpu.py --deselect tests/gpu/test_vllm_gpu.py --deselect tests/gpu/test_backends_gpu.py -k "not ($DEMO)"
}
codes() {
    step "$1" 110 kv_step python3 benchmarks/kv_step.py --batches 256 --contexts 320 1024 2048 4096
    step "$1" 180 quant_step python3 benchmarks/quant_step.py --models qwen3-8b --kinds nf4 int4 fp8 --batches 1 8 64 --sweep 100
}
kernels() { both kernel_tests codes; }
small() {
    tests "$1" 130 tests_demo -n 8 tests/gpu/test_gpu.py tests/gpu/test_quant_gpu.py tests/gpu/test_cases_gpu.py tests/gpu/test_backends_gpu.py -k "$DEMO or cases_gpu or backends_gpu"
    step "$1" 90 speculation python3 benchmarks/speculation.py --sets 4 --rounds 5 --tokens 128 --out "$OUT/speculation_h200.json"
    step "$1" 90 train_head python3 examples/train_draft_head.py --out /tmp/head --texts 2000 --tokens 192 --minutes 1.2
    step "$1" 90 drafts python3 benchmarks/speculation.py --sets 3 --rounds 3 --tokens 128 --head /tmp/head --out "$OUT/speculation_drafts_h200.json"
    step "$1" 50 trace_cost python3 benchmarks/trace_cost.py --device cuda --models demo --windows 16 --out "$OUT/trace_cost_h200.json"
}
large() {
    step "$1" 80 adapters_8b python3 benchmarks/adapters.py --shape qwen3-8b --runs 3 --out "$OUT/adapters_h200.json"
    step "$1" 50 adapters_esme python3 benchmarks/adapters.py --shape esme --runs 3 --out "$OUT/adapters_esme_h200.json"
    step "$1" 110 quant_more python3 benchmarks/quant_step.py --models qwen3-8b --kinds nf4 int4 int8 w8a8 --batches 1 64 --out "$OUT/quant_more.json"
    step "$1" 90 quant_table python3 benchmarks/quant_table.py --models demo --device cuda --out "$OUT/quant_table_h200.json"
}
demo() { demo_model; both small large; }
steps() {
    step 0 120 build python3 benchmarks/ladder.py --build --models esme-214m
    tests 0 120 flashinfer -n 6 tests/gpu/test_flashinfer.py
    step 0 60 sampled python3 benchmarks/gpu_checks.py --only sampled --out "$OUT/gpu_checks.json"
    step 0 50 tails python3 benchmarks/kernel_table.py --tails --out "$OUT/tails_h200.json"
    step 0 60 whole python3 benchmarks/layer_table.py --models qwen3-0.6b esme-214m --batches 4 8 --context 320 2048 --pool 100000 --seconds 50 --out "$OUT/whole_h200.json"
    step 0 30 layers python3 benchmarks/layer_table.py --models esme-214m --batches 8 16 1 --seconds 25 --out "$OUT/layers_h200.json"
    step 0 75 ladder python3 benchmarks/ladder.py --models esme-214m --batches 1,8,64 --deadline 60 --out "$OUT/ladder.json"
}
ranks() {
    nvidia-smi topo -m > "$OUT/topology.txt"
    tests 0,1 300 tests_ranks -n 2 -o faulthandler_timeout=100 tests/gpu/test_parallel_gpu.py
    grep -qE "failed|error" "$OUT/tests_ranks.log" || step 0,1 360 tensor_parallel python3 benchmarks/tensor_parallel.py --judged 8 --pairs 5 --out "$OUT/tensor_parallel.json"
}
serve() { step "$1" 340 serve python3 benchmarks/serve_vs_vllm.py --vllm-site /tmp/site --ours-site /tmp/extra --logs "$OUT" --out "$OUT/serve_vs_vllm.json"; }
backend() { PYTHONPATH=.:tests:/tmp/site VLLM_USE_FLASHINFER_SAMPLER=0 HF_HUB_OFFLINE=1 tests "$1" 200 tests_vllm -s -k "${VLLM_TESTS:-32 or 16}" tests/gpu/test_vllm_gpu.py; }
unpack() {
    mkdir -p /tmp/site; cat /tmp/parts/vllm.part.* | python3 -c "import sys, tarfile; tarfile.open(fileobj=sys.stdin.buffer, mode='r|xz').extractall('/tmp/site')"
    python3 -m compileall -q -j 16 /tmp/site > /dev/null 2>&1
}
vllm() { unpack; both serve backend; }
against() { # against GPU NAME MODELS HF_MODELS
    step "$1" 450 "$2" python3 benchmarks/gpu_vs_vllm.py --models "$3" --arms ours,vllm,hf --hf-models "$4" --hf-pairs 1 --together --no-restart --deadline 390 --commit "$COMMIT" \
        --vllm-site /tmp/site --folder "/tmp/models-$2" --logs "$OUT" --out "$OUT/$2.json"
}
against_small() { against "$1" against_small esme-214m,qwen3-0.6b esme-214m,qwen3-0.6b; }
against_large() { against "$1" against_large qwen3-8b,demo none; }
compare() {
    unpack; demo_model; both against_large against_small
    python3 benchmarks/gpu_vs_vllm.py --join "$OUT/against_small.json,$OUT/against_large.json" --out "$OUT/gpu_vs_vllm.json"
}

mkdir -p /tmp/extra
for w in /tmp/parts/*.whl; do [ -e "$w" ] && python3 -m pip install -q --no-index --no-deps --no-compile --no-cache-dir --upgrade --target /tmp/extra "$w"; done
[ -e /tmp/parts/bnb.tar.xz ] && tar xJf /tmp/parts/bnb.tar.xz -C /tmp/extra       # bitsandbytes with its CUDA 13.0 kernels only
for stage in "$@"; do "$stage"; done
