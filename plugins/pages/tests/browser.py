"""Chromium on a page: what it shows, what it complains of, and how it can be used."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from playwright.sync_api import Page

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
LACKING = [
    *(["Chromium is not installed: apt-get install chromium"] if CHROMIUM is None else []),
    *(f"{name} is not installed: make extras" for name in ("playwright", "vl_convert") if find_spec(name) is None),
]
"""What a browser's tests need and is not here."""
needs_chromium = pytest.mark.skipif(bool(LACKING), reason="; ".join(LACKING))
_QUIET = ["--no-sandbox", "--disable-gpu", "--disable-quic", "--disable-background-networking", "--disable-sync"]
PHONE, LAPTOP = (360, 740), (1280, 800)


@dataclass(frozen=True)
class Visit:
    """An open page. complaints: errors and warnings of its console. requests: addresses that it asked for."""

    page: Page
    complaints: list[str] = field(default_factory=list)
    requests: list[str] = field(default_factory=list)

    def open(self, address: str) -> None:
        """Open an address and wait until the charts are drawn."""
        self.page.goto(address)
        self.page.wait_for_selector("html[data-drawn]", timeout=60_000)

    def faults(self) -> list[str]:
        """Serious and critical faults of accessibility, as axe-core finds them, each with its first place."""
        from axe_playwright_python.sync_playwright import Axe

        violations = Axe().run(self.page).response["violations"]
        bad: list[dict[str, Any]] = [fault for fault in violations if fault["impact"] in ("serious", "critical")]
        return [f"{fault['id']}: {fault['nodes'][0]['html'][:200]}" for fault in bad]

    def overhang(self) -> int:
        """Pixels by which the page is wider than its window."""
        return int(self.page.evaluate("document.documentElement.scrollWidth - window.innerWidth"))


@contextmanager
def browsing(size: tuple[int, int] = LAPTOP) -> Iterator[Visit]:
    """A tab of the system's Chromium."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=CHROMIUM, args=_QUIET)
        page = browser.new_page(viewport={"width": size[0], "height": size[1]})
        visit = Visit(page)
        page.on(
            "console", lambda line: visit.complaints.append(line.text) if line.type in ("error", "warning") else None
        )
        page.on("pageerror", lambda error: visit.complaints.append(str(error)))
        page.on("request", lambda request: visit.requests.append(request.url))
        try:
            yield visit
        finally:
            browser.close()
