#!/usr/bin/env bash
# Packs what the GPU comparison needs for a machine without network (CPython 3.12, torch 2.11+cu130, Linux x86-64) into parts of at most 55 MB.
#
#   benchmarks/pack_gpu.sh OUT_DIR         # OUT_DIR/vllm/vllm.part.00 ..., OUT_DIR/demo/demo.part.00 ..., OUT_DIR/flashinfer/*.whl, OUT_DIR/serve/*.whl, OUT_DIR/bnb/bnb.tar.xz
#
# About three minutes on two cores, 1.5 GB of scratch. gpu_pack.md says how to carry the parts and unpack them there.
# Left out of vLLM: kernels that a dense bf16 model on Hopper never calls (FlashAttention 2, MoE, MLA, qutlass), tokenizer files of Mistral, translations.
set -euo pipefail
out=$(realpath -m "${1:?usage: pack_gpu.sh OUT_DIR}")
here=$(cd "$(dirname "$0")" && pwd)
work=$(mktemp -d); trap 'rm -rf "$work"' EXIT
mkdir -p "$out/vllm" "$out/demo" "$out/flashinfer" "$out/serve" "$out/bnb"
platforms=(); for n in $(seq 39 -1 5); do platforms+=(--platform "manylinux_2_${n}_x86_64"); done
platforms+=(--platform manylinux2014_x86_64 --platform manylinux2010_x86_64 --platform manylinux1_x86_64)
python3 -m venv "$work/pip"
fetch() { # FOLDER WHAT...
    PIP_CONSTRAINT= "$work/pip/bin/pip" download -q --no-deps --only-binary=:all: --python-version 3.12 --implementation cp --abi cp312 --abi abi3 --abi none "${platforms[@]}" -d "$@"
}
fetch "$work/wheels" -r "$here/vllm-requirements.txt"
# FlashInfer without its ready-made kernels (gigabytes): nvcc and ninja, both on the machine, build the few that are used
fetch "$out/flashinfer" flashinfer-python==0.6.14 apache-tvm-ffi==0.1.9
# what `llminfer serve` wants, and bitsandbytes with its CUDA 13.0 kernels only
fetch "$out/serve" fastapi==0.136.3 starlette==1.10.0 uvicorn==0.54.0 pydantic==2.14.4 pydantic-core==2.50.5 annotated-types==0.8.0 typing-inspection==0.4.5 httptools==0.9.0
fetch "$work/bnb" bitsandbytes==0.50.2
mkdir "$work/bnb-site" && unzip -q "$work"/bnb/*.whl -d "$work/bnb-site"
find "$work/bnb-site" -name '*.so' ! -name '*cuda130*' -delete
tar cJ -C "$work/bnb-site" . > "$out/bnb/bnb.tar.xz"
mkdir "$work/site"
for wheel in "$work"/wheels/*.whl; do     # unzip answers 11 where a pattern to leave out matches nothing
    unzip -q -o "$wheel" -d "$work/site" -x 'vllm/_moe_C*' 'vllm/_flashmla*' 'vllm/_qutlass*' 'vllm/vllm-rs*' 'vllm/vllm_flash_attn/_vllm_fa2*' \
        'vllm/third_party/deep_gemm/*cpython-31[0134]*' 'mistral_common/data/*' 'pycountry/locales/*' 2>/dev/null || [ $? -eq 11 ]
done
find "$work/site" -name '*.so*' -size +4M ! -path '*/vllm/*' -exec strip --strip-debug {} + 2>/dev/null || true
rm -f "$out"/vllm/vllm.part.* "$out"/demo/demo.part.*
tar c --sort=name -C "$work/site" . | xz -T0 -6 --block-size=24MiB | split -b 55000000 -d - "$out/vllm/vllm.part."
PYTHONPATH="$here/.." python3 - "$out/demo" <<'PY'
import sys
from pathlib import Path
from llminfer.loading import pull
data, out = Path(pull("demo")).read_bytes(), Path(sys.argv[1])
for i in range(0, len(data), 55_000_000): (out / f"demo.part.{i // 55_000_000:02d}").write_bytes(data[i:i + 55_000_000])
PY
ls -l "$out"/*/*
