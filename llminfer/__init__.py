"""A book that you can import: an LLM inference engine, built notebook by notebook."""
import os
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .artifacts import BenchmarkResult
    from .benchmark import Benchmarker
    from .config import CacheConfig, EngineConfig, QuantConfig
    from .engine import InferenceEngine
    from .request import GenerationRequest, GenerationResult
    from .serving import ContinuousBatchScheduler

__version__ = "0.1.0"

# OpenMP threads wait for each other for 50 us, not 3 ms, before they sleep: notebook 20c. Read when torch is loaded.
if "OMP_WAIT_POLICY" not in os.environ: os.environ.setdefault("GOMP_SPINCOUNT", "5000")

# Where each public name lives. A module is imported when one of its names is first used, so `import llminfer` loads no torch.
_HOMES = {
    "InferenceEngine": "engine",
    "EngineConfig": "config", "QuantConfig": "config", "CacheConfig": "config",
    "GenerationRequest": "request", "GenerationResult": "request",
    "Benchmarker": "benchmark", "BenchmarkResult": "artifacts", "ContinuousBatchScheduler": "serving",
}

__all__ = ["BenchmarkResult", "Benchmarker", "CacheConfig", "ContinuousBatchScheduler", "EngineConfig", "GenerationRequest",
           "GenerationResult", "InferenceEngine", "QuantConfig"]

def __getattr__(name: str) -> Any:
    if name not in _HOMES: raise AttributeError(f"module 'llminfer' has no attribute {name!r}")
    globals()[name] = value = getattr(import_module(f".{_HOMES[name]}", __name__), name)
    return value

def __dir__() -> list[str]: return sorted(set(globals()) | set(__all__))
