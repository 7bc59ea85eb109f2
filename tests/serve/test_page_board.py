"""The chat page before the real server, with the model that the package carries on an emulated Orin."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import openai
import pytest
from page_rig import chromium, done, loaded, needs_chromium, press, say, watched
from playwright.sync_api import BrowserContext, Page, expect
from rig import Direct, Fixed, served

from tegrad.serve import openai as api
from tegrad.serve import page

pytestmark = [pytest.mark.board, needs_chromium]

ASKED = "Who made the heaven and the earth?"
MOST = 12


@pytest.fixture(scope="module")
def url(small: Direct) -> Iterator[str]:
    models = Fixed([small])
    with served([*page.routes(models), *api.routes(models)]) as found:
        yield found
    assert models.used == 0


@pytest.fixture
def context(url: str) -> Iterator[BrowserContext]:
    with chromium() as browser, watched(browser, url, ["status of 400"]) as made:
        yield made


@pytest.fixture
def tab(context: BrowserContext, url: str) -> Page:
    return choose(loaded(context, url), MOST)


def choose(tab: Page, most: int) -> Page:
    """Have new conversations answered with the likeliest tokens."""
    press(tab, "Settings")
    tab.get_by_label("Temperature").fill("0")
    tab.get_by_label("Max tokens").fill(str(most))
    tab.get_by_label("For new conversations too").check()
    press(tab, "Save")
    return tab


def answered(client: openai.OpenAI, *said: str) -> tuple[str, int]:
    """What the model answers to a conversation, and in how many tokens."""
    roles = itertools.cycle(["user", "assistant"])
    messages = [{"role": role, "content": text} for role, text in zip(roles, said, strict=False)]
    found = client.chat.completions.create(model="small", messages=messages, temperature=0, max_tokens=MOST)  # type: ignore[call-overload]
    return found.choices[0].message.content, found.usage.completion_tokens


def words(text: str) -> str:
    """A text as a browser shows a paragraph of it."""
    return " ".join(text.split())


def test_a_conversation_is_what_the_official_client_gets(tab: Page, client: openai.OpenAI) -> None:
    first, count = answered(client, ASKED)
    second, _ = answered(client, ASKED, first, "And the light?")
    assert words(first)
    say(tab, ASKED)
    answer = done(tab)
    expect(answer.locator(".who")).to_have_text("small")
    expect(answer.locator(".body")).to_have_text(words(first))
    expect(answer.locator(".note")).to_contain_text(f"{count} tokens · ")
    expect(answer.locator(".note")).to_contain_text(" tokens/s · first after ")
    say(tab, "And the light?")
    expect(done(tab).locator(".body")).to_have_text(words(second))
    tab.reload()
    expect(tab.locator("article.assistant .body")).to_have_text([words(first), words(second)])


def test_stop_frees_the_model_and_keeps_what_came(context: BrowserContext, url: str, small: Direct) -> None:
    tab = choose(loaded(context, url), 400)
    say(tab, ASKED)
    expect(tab.locator("article.assistant .body")).not_to_be_empty()
    press(tab, "Stop")
    answer = done(tab)
    expect(answer.locator(".note")).to_contain_text("Stopped.")
    expect(answer.locator(".body")).not_to_be_empty()
    request = small.answers[-1]
    while request.finish_reason is None:
        tab.wait_for_timeout(10)
    assert request.finish_reason == "cancelled"
    assert request.usage.completion < 400


def test_a_message_too_long_says_so_and_an_edit_helps(tab: Page, client: openai.OpenAI) -> None:
    say(tab, "word " * 600)
    alert = tab.get_by_role("alert")
    expect(alert).to_contain_text("context")
    expect(alert).to_contain_text("Begin a new conversation, or edit an early message to be shorter.")
    press(tab, "Edit")
    tab.get_by_label("Edit your message").fill(ASKED)
    press(tab, "Send edit")
    expect(done(tab).locator(".body")).to_have_text(words(answered(client, ASKED)[0]))
    expect(alert).to_be_empty()


def test_two_tabs_are_answered_at_once_each_as_if_alone(
    tab: Page, context: BrowserContext, url: str, client: openai.OpenAI
) -> None:
    other = loaded(context, url)
    said = {tab: ASKED, other: "Who was the first king of Israel?"}
    for each, text in said.items():
        say(each, text)
    for each, text in said.items():
        expect(done(each).locator(".body")).to_have_text(words(answered(client, text)[0]))
    expect(tab.locator("#conversations a")).to_have_count(2)
