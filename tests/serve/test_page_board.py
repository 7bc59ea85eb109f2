"""The chat page before the real server, with the model that the package carries on an emulated Orin."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from pathlib import Path

import openai
import pytest
from page_rig import chromium, done, loaded, needs_chromium, press, say, watched, written
from playwright.sync_api import Browser, BrowserContext, Page, expect
from program import serving
from rig import Direct, Fixed, served

from tegrad import models
from tegrad.serve import openai as api
from tegrad.serve import page

pytestmark = [pytest.mark.board, needs_chromium]

ASKED = "Who made the heaven and the earth?"
MOST = 32


@pytest.fixture(scope="module")
def url(small: Direct) -> Iterator[str]:
    made = Fixed([small])
    with served([*page.routes(), *api.API.routes(made)]) as found:
        yield found
    assert made.used == 0


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with chromium() as started:
        yield started


@pytest.fixture
def context(browser: Browser, url: str) -> Iterator[BrowserContext]:
    with watched(browser, url, ["status of 400"]) as made:
        yield made


@pytest.fixture
def tab(context: BrowserContext, url: str) -> Page:
    return choose(loaded(context, url), MOST)


def choose(tab: Page, most: int, temperature: str = "0") -> Page:
    """Have new conversations answered with the likeliest tokens, or with those that a temperature and seed 1 draw."""
    press(tab, "Settings")
    tab.get_by_label("Temperature").fill(temperature)
    tab.get_by_label("Seed").fill("1")
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
    written(tab)
    tab.reload()
    expect(tab.locator("article.assistant .body")).to_have_text([words(first), words(second)])


def test_stop_frees_the_model_and_keeps_what_came(context: BrowserContext, url: str, small: Direct) -> None:
    tab = choose(loaded(context, url), 500, temperature="2")
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
    assert request.usage.completion < 480


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


def test_every_setting_is_one_that_the_server_takes(tab: Page, small: Direct) -> None:
    values = {
        "Temperature": "0.5", "Top p": "0.9", "Top k": "20", "Min p": "0.05", "Presence penalty": "0.5",
        "Frequency penalty": "0.25", "Repeat penalty": "1.1", "Seed": "7", "Max tokens": "3",
    }  # fmt: skip
    press(tab, "Settings")
    assert tab.locator("#sampling label").all_inner_texts() == list(values)
    for label, value in values.items():
        tab.get_by_label(label).fill(value)
    tab.get_by_label("System prompt").fill("You are brief.")
    tab.get_by_label("Thinking").select_option("Off")
    press(tab, "Save")
    say(tab, ASKED)
    expect(done(tab).locator(".note")).to_contain_text("The answer reached its limit of tokens")
    assert small.answers[-1].usage.completion == 3


def test_settings_hold_as_soon_as_they_are_saved(tab: Page) -> None:
    """A message that is sent right afterwards is asked with them."""
    press(tab, "Settings")
    tab.get_by_label("Max tokens").fill("5")
    tab.get_by_label("For new conversations too").check()
    save = """() => {
        [...document.querySelectorAll("#settings button")].find((one) => one.textContent === "Save").click();
        return localStorage.getItem("tegrad.defaults");
    }"""
    assert json.loads(tab.evaluate(save))["sampling"]["max_tokens"] == 5


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


@pytest.mark.klog_errors("unbind")  # of a channel that is busy, as its process is killed
def test_the_program_asks_for_its_key_and_its_end_is_told(browser: Browser, tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("secret\n")
    faults = ["status of 401", "ERR_INCOMPLETE_CHUNKED_ENCODING", "ERR_CONNECTION"]
    with (
        serving(tmp_path / "log", str(models.SMALL), "--api-key-file", str(keys)) as server,
        watched(browser, server.url, faults) as context,
    ):
        tab = context.new_page()
        tab.goto(server.url)
        expect(tab.get_by_role("dialog")).to_contain_text("A key is missing or wrong")
        tab.get_by_role("textbox", name="API key").fill("secret")
        press(tab, "Use this key")
        expect(tab.get_by_label("Model").locator("option")).to_have_text(["small"])
        choose(tab, 500, temperature="2")  # drawn so widely, an answer does not end by itself before it is cut off
        say(tab, ASKED)
        expect(tab.locator("article.assistant .body")).not_to_be_empty()
        server.process.kill()
        expect(tab.get_by_role("alert")).to_contain_text(
            "The connection to the server broke off. See whether the server"
        )
        assert done(tab).locator(".body").inner_text()
        press(tab, "Try again")
        expect(tab.get_by_role("alert")).to_contain_text("The server did not answer. See whether the server still runs")
