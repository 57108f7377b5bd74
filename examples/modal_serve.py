"""llminfer on Modal: one GPU, nothing to pay while nobody asks, an OpenAI server at a public address.

    pip install modal && modal setup
    modal secret create llminfer LLMINFER_API_KEY=a-long-random-word
    MODEL=Qwen/Qwen3-0.6B modal deploy examples/modal_serve.py
    llminfer bench --url https://YOU--llminfer-serve.modal.run/v1       # or the bench page of the chat page, from anywhere

MODEL is a hub id, or a bundle: BUNDLE=./my_bundle copies a folder into the image instead. GPU (L4), ORIGINS (pages that may call, with
commas; * is any), IDLE (seconds after which the GPU goes back) and MAX (containers) are read when it is deployed.
"""
from __future__ import annotations
import os
from pathlib import Path
import modal

ROOT = Path(__file__).resolve().parents[1]
BUNDLE, ORIGINS = os.environ.get("BUNDLE", ""), os.environ.get("ORIGINS", "*")
MODEL = "/bundle" if BUNDLE else os.environ.get("MODEL", "Qwen/Qwen3-0.6B")
CACHE = "/cache"

image = (
    modal.Image.debian_slim(python_version="3.12")
    .apt_install("gcc", "libc6-dev")                                    # Triton compiles the launcher of each kernel
    .pip_install("torch>=2.11")
    .pip_install_from_pyproject(str(ROOT / "pyproject.toml"), optional_dependencies=["serve", "gpu", "structured"])
    .env({"HF_HOME": f"{CACHE}/huggingface", "LLMINFER_CACHE": f"{CACHE}/llminfer", "TRITON_CACHE_DIR": f"{CACHE}/triton",
          "MODEL": MODEL, "ORIGINS": ORIGINS})                          # this file is read again in the container
    .add_local_dir(ROOT / "llminfer", "/root/llminfer", ignore=["**/__pycache__"])
)
if BUNDLE: image = image.add_local_dir(BUNDLE, "/bundle")

app = modal.App("llminfer", image=image)
volume = modal.Volume.from_name("llminfer-cache", create_if_missing=True)   # weights and kernels, kept between cold starts


@app.function(
    gpu=os.environ.get("GPU", "L4"),
    volumes={CACHE: volume},
    secrets=[modal.Secret.from_name("llminfer")],                       # LLMINFER_API_KEY, or HF_TOKEN for gated models
    min_containers=0,                                                   # scales to zero
    max_containers=int(os.environ.get("MAX", "1")),
    scaledown_window=int(os.environ.get("IDLE", "120")),
    startup_timeout=20 * 60,                                            # the first start downloads the model
    timeout=60 * 60,                                                    # of one stream
)
@modal.concurrent(max_inputs=200)                                       # the engine batches: many requests, one container
@modal.asgi_app()
def serve():
    from llminfer import EngineConfig
    from llminfer.api import create_openai_app
    from llminfer.engine_process import make_handle
    from llminfer.serving import AsyncEngine, ServingLimits

    engine = AsyncEngine(make_handle(EngineConfig(os.environ["MODEL"])), ServingLimits(max_queued_requests=1024))
    # Modal calls the function in each new container and sends requests when the app has started: loaded, not loading
    return create_openai_app(engine, cors_origins=os.environ["ORIGINS"].split(","), wait_until_ready=True)
