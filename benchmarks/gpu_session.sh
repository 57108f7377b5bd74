#!/bin/bash
# One call on a GPU machine: tests/gpu, FlashInfer, tails, sampled share, ladder. The demo model's parts are in /tmp/parts; $OUT takes the records.
export PYTHONPATH=.:tests:benchmarks:/tmp/fi-site PYTHONUNBUFFERED=1 FLASHINFER_WORKSPACE_BASE=/tmp/fi
mkdir -p ~/.cache/llminfer/demo && cat /tmp/parts/demo.part.0* > ~/.cache/llminfer/demo/SmolLM2-135M-Instruct.Q4_1.gguf
python3 -m pip install -q --no-index --no-deps --no-compile --target /tmp/fi-site /tmp/parts/*.whl
say() { echo "== $(date +%T) $1"; }
say build; python3 benchmarks/ladder.py --build --models esme-214m > $OUT/build.log 2>&1 &
say tests; timeout 300 python3 -m pytest -v -n 10 -p no:cacheprovider --deselect tests/gpu/test_flashinfer.py tests/gpu 2>&1 | tee $OUT/tests_gpu.log | grep -E "FAILED|ERROR|passed|failed|^E " | tail -60
wait; say flashinfer; timeout 120 python3 -m pytest -v -n 6 -p no:cacheprovider tests/gpu/test_flashinfer.py 2>&1 | tee $OUT/flashinfer.log | grep -E "FAILED|ERROR|passed|failed|^E " | tail -30
say sampled; timeout 60 python3 benchmarks/gpu_checks.py --only sampled --out $OUT/gpu_checks.json 2>&1 | tail -8
say tails; timeout 50 python3 benchmarks/kernel_table.py --tails --out $OUT/tails_h200.json 2>&1 | tail -30
say layers; timeout 30 python3 benchmarks/layer_table.py --models esme-214m --batches 8 16 1 --seconds 25 --out $OUT/layers_h200.json 2>&1 | tail -5
say ladder; timeout 75 python3 benchmarks/ladder.py --models esme-214m --batches 1,8,64 --deadline 60 --out $OUT/ladder.json 2>&1 | tail -30
say end
