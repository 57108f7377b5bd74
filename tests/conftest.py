"""Set-up shared by all tests: one thread, no network, the same hypothesis examples every time."""
import os

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
ASKED = os.environ.setdefault("HF_HUB_OFFLINE", "not asked")
if ASKED == "not asked": os.environ["HF_HUB_OFFLINE"] = "1"

from hypothesis import HealthCheck, settings

settings.register_profile("house", derandomize=True, deadline=None, database=None, print_blob=True, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("house")


def pytest_configure(config):
    "`pytest -m slow` may use the network, unless it was told not to; interpreted kernels must stay inside their tensors."
    if os.environ.get("TRITON_INTERPRET") == "1":
        from support.bounds import install
        install()
    if config.option.markexpr == "slow" and ASKED == "not asked": os.environ["HF_HUB_OFFLINE"] = "0"
