"A headless Chromium for the tests of pages."
import os
import shutil
from contextlib import contextmanager
from pathlib import Path
from typing import Iterator
from playwright.sync_api import BrowserContext, sync_playwright

ARGS = "--no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking --disable-component-update --disable-sync".split()
NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")


def executable() -> str | None:
    "$CHROMIUM, or a browser on the PATH; None: the one that `playwright install chromium` fetched, whose absence Playwright explains."
    return os.environ.get("CHROMIUM") or next((p for n in NAMES if (p := shutil.which(n))), None)


@contextmanager
def chromium(folder: Path, width: int = 1280, height: int = 800, **kw: object) -> Iterator[BrowserContext]:
    "A context of its own profile in `folder`."
    with sync_playwright() as p:
        context = p.chromium.launch_persistent_context(str(folder), executable_path=executable(), headless=True, args=ARGS,
            viewport={"width": width, "height": height}, **kw)  # type: ignore[arg-type]
        context.set_default_timeout(15000)
        yield context
        context.close()
