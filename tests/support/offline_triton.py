"""Triton without a GPU: every launch is compiled for compute capability 9.0, down to machine code, and not run.

Import it before anything that imports Triton, in a process of its own, without TRITON_INTERPRET."""
from typing import Any
import torch
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction


class NoGPU:
    "Answers what the compiler asks of a driver."
    def get_current_target(self) -> GPUTarget: return GPUTarget("cuda", 90, 32)
    def get_current_device(self) -> int: return 0
    def get_current_stream(self, device: Any = None) -> int: return 0
    def get_active_torch_device(self) -> torch.device: return torch.device("cpu")
    def get_device_properties(self, device: int = 0) -> dict[str, int]:
        return dict(multiprocessor_count=132, max_shared_mem=232448, warpSize=32, max_num_regs=65536)
    @property
    def utils(self) -> "NoGPU": return self
    def __getattr__(self, name: str) -> Any: return lambda *a, **k: None


compiled: dict[tuple[str, str], Any] = {}    # (kernel, hash) -> what Triton made: .asm has every stage, .metadata warps and shared memory


def compile_only(self: JITFunction, grid: Any) -> Any:
    "In place of `kernel[grid]`."
    def launch(*args: Any, **kw: Any) -> Any:
        k = self.run(*args, grid=grid, warmup=True, **kw)
        compiled[self.__name__, k.hash] = k
        return k
    return launch


driver.set_active(NoGPU())
JITFunction.__getitem__ = compile_only  # type: ignore[method-assign]
