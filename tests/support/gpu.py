"What tests on a GPU share."
import torch


def forbid_waits(core) -> None:
    "From now on a launch of this core that waits for the device is an error."
    launch = core.runner.launch

    def watched(plan):
        torch.cuda.set_sync_debug_mode("error")
        try: return launch(plan)
        finally: torch.cuda.set_sync_debug_mode("default")
    core.runner.launch = watched
