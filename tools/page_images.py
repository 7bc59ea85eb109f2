"""The chat page's pictures in docs/images: a running server's page in Chromium, light, dark and on a phone.

    python tools/page_images.py http://127.0.0.1:8080 docs/images "Write a haiku in Python."

What is answered is what the server's first model said, at a temperature of 0.
"""

from __future__ import annotations

import argparse
import shutil
from pathlib import Path
from typing import Any, Final

from playwright.sync_api import Browser, Page, sync_playwright

LOOKS: Final[dict[str, dict[str, Any]]] = {
    "page-light": {"color_scheme": "light", "viewport": {"width": 1100, "height": 720}},
    "page-dark": {"color_scheme": "dark", "viewport": {"width": 1100, "height": 720}},
    "page-phone": {"color_scheme": "light", "viewport": {"width": 360, "height": 720}, "has_touch": True},
}
"""Files and how the browser is."""
PATIENCE_MS: Final = 600_000


def main() -> None:
    """Ask once, then take the same conversation in every look."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("url", help="where `tegrad serve` runs")
    parser.add_argument("folder", type=Path, help="where the pictures go")
    parser.add_argument("questions", nargs="+", help="what is asked, one after the other")
    parser.add_argument("--tokens", type=int, default=200, help="the most of an answer")
    given = parser.parse_args()
    chromium = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        conversation = asked(browser, given.url, given.questions, given.tokens)
        for name, look in LOOKS.items():
            page = browser.new_context(**look).new_page()
            page.goto(given.url)
            page.locator("#file").set_input_files(conversation)
            page.locator("#conversations a").first.dispatch_event("click")
            page.locator("article.assistant").nth(len(given.questions) - 1).wait_for()
            page.screenshot(path=given.folder / f"{name}.png")
        browser.close()


def asked(browser: Browser, url: str, questions: list[str], tokens: int) -> Path:
    """The file of a conversation."""
    page = browser.new_page()
    page.goto(url)
    settings(page, {"Temperature": "0", "Max tokens": str(tokens)})
    for question in questions:
        page.get_by_label("Message", exact=True).fill(question)
        page.keyboard.press("Enter")
        page.get_by_role("button", name="Send", exact=True).wait_for(timeout=PATIENCE_MS)
    with page.expect_download() as download:
        page.get_by_role("button", name="Export", exact=True).click()
    return Path(download.value.path())


def settings(page: Page, values: dict[str, str]) -> None:
    """Fill in the dialog."""
    page.get_by_role("button", name="Settings").click()
    for label, value in values.items():
        page.get_by_label(label).fill(value)
    page.get_by_role("button", name="Save").click()


if __name__ == "__main__":
    main()
