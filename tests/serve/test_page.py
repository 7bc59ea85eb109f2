"""The chat page in a real Chromium, before a stand-in that says what no model can be made to say."""

from __future__ import annotations

import json
import random
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from axe_playwright_python.sync_playwright import Axe
from page_rig import HOST_NAME, Said, StandIn, chromium, done, loaded, needs_chromium, press, say, watched, written
from playwright.sync_api import Browser, BrowserContext, Page, expect
from rig import served
from starlette.responses import HTMLResponse
from starlette.routing import Route

from tegrad.serve import page
from tegrad.serve.openai_fields import SAMPLED

pytestmark = needs_chromium

EVERYTHING = """# A title
Some *words*, **strong ones**, `code` and a [link](https://example.org/a_(b)).
### Skips a level
1. one
2. two
   - [x] done
   - [ ] open

> said <b>before</b>

| a | number |
|---|-------:|
| x | 1 |

```python
print("a line that is long enough to be wider than the window of a phone, and then some more of it")
```
"""


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with chromium() as started:
        yield started


@pytest.fixture(scope="module")
def stand_in() -> StandIn:
    return StandIn()


@pytest.fixture(scope="module")
def url(stand_in: StandIn) -> Iterator[str]:
    with served(stand_in.routes()) as found:
        yield found


@pytest.fixture(autouse=True)
def clean(stand_in: StandIn) -> None:
    stand_in.says.clear()
    stand_in.asked.clear()
    stand_in.go.clear()
    stand_in.left.clear()
    stand_in.key = ""


@pytest.fixture
def context(browser: Browser, url: str) -> Iterator[BrowserContext]:
    with watched(browser, url) as made:
        yield made


@pytest.fixture
def tab(context: BrowserContext, url: str) -> Page:
    return loaded(context, url)


def listed(tab: Page) -> list[str]:
    return tab.locator("#conversations a").all_inner_texts()


# ---- a conversation


def test_a_conversation_sends_all_that_was_said_and_shows_markdown_and_speed(tab: Page, stand_in: StandIn) -> None:
    stand_in.says = {"Hello": Said(["**Hi**", 0.5, " there", ", you."]), "More": Said(["Yes."])}
    say(tab, "Hello")
    answer = done(tab)
    expect(answer.locator(".body strong")).to_have_text("Hi")
    expect(answer.locator(".body")).to_have_text("Hi there, you.")
    expect(answer.locator(".note")).to_contain_text("3 tokens · ")
    expect(answer.locator(".note")).to_contain_text("tokens/s")
    say(tab, "More")
    expect(done(tab).locator(".body")).to_have_text("Yes.")
    assert [message["role"] for message in stand_in.asked[1]["messages"]] == ["user", "assistant", "user"]
    assert stand_in.asked[1]["messages"][1]["content"] == "**Hi** there, you."
    assert stand_in.asked[1]["model"] == "small-model"
    assert tab.title() == "Hello · tegrad"
    expect(tab.get_by_label("Message", exact=True)).to_be_focused()


def test_the_servers_own_speed_is_shown_where_it_tells_one(tab: Page, stand_in: StandIn) -> None:
    timings = {"predicted_n": 7, "predicted_per_second": 123.45}
    stand_in.says = {"Hello": Said(["Hi", {"choices": [{"delta": {"content": "."}}], "timings": timings}, None])}
    say(tab, "Hello")
    expect(tab.locator("article.assistant .note")).to_have_text("7 tokens · 123.5 tokens/s")
    stand_in.go.set()
    done(tab)


def test_an_answer_shows_as_it_comes_and_stops(tab: Page, stand_in: StandIn) -> None:
    stand_in.says = {"Go on": Said(["One. ", "Two", None, "Three"])}
    say(tab, "Go on")
    expect(tab.locator("article.assistant .body")).to_have_text("One. Two")
    assert tab.locator("article.assistant").get_attribute("aria-busy") == "true"
    press(tab, "Stop")
    expect(done(tab).locator(".note")).to_contain_text("Stopped.")
    assert stand_in.left.wait(5)
    expect(tab.get_by_label("Message", exact=True)).to_be_focused()
    written(tab)
    tab.reload()
    expect(tab.locator("article.assistant .body")).to_have_text("One. Two")


def test_escape_stops_and_before_the_first_token_leaves_no_answer(tab: Page, stand_in: StandIn) -> None:
    stand_in.says = {"Go on": Said([None, "Late"])}
    say(tab, "Go on")
    expect(tab.locator("article.assistant .note")).to_have_text("Waiting for the first token …")
    tab.keyboard.press("Escape")
    expect(tab.locator("article.assistant")).to_have_count(0)
    stand_in.go.set()
    press(tab, "Answer")
    expect(done(tab).locator(".body")).to_have_text("Late")


def test_regenerating_and_editing_make_versions_that_all_stay(tab: Page, stand_in: StandIn) -> None:
    stand_in.says = {"First": Said(["A"]), "Second": Said(["C"])}
    say(tab, "First")
    done(tab)
    stand_in.says["First"] = Said(["B"])
    press(tab, "Regenerate")
    expect(done(tab).locator(".body")).to_have_text("B")
    expect(tab.locator("article.assistant .versions")).to_contain_text("2 of 2")
    tab.locator("article.user").get_by_role("button", name="Edit").click()
    tab.get_by_label("Edit your message").fill("Second")
    press(tab, "Send edit")
    expect(done(tab).locator(".body")).to_have_text("C")
    assert [message["content"] for message in stand_in.asked[-1]["messages"]] == ["Second"]
    tab.get_by_role("button", name="Version before").first.click()
    expect(tab.locator("article .body")).to_have_text(["First", "B"])
    tab.get_by_role("button", name="Version before").last.click()
    expect(tab.locator("article .body")).to_have_text(["First", "A"])
    written(tab)
    tab.reload()
    expect(tab.locator("article .body")).to_have_text(["First", "A"])


def test_an_answer_can_be_edited_and_goes_on_from_there(tab: Page, stand_in: StandIn) -> None:
    stand_in.says = {"Name one": Said(["Mars"]), "And?": Said(["Yes"])}
    say(tab, "Name one")
    done(tab).get_by_role("button", name="Edit").click()
    tab.get_by_label("Edit the answer").fill("Venus")
    press(tab, "Save edit")
    expect(tab.locator("article.assistant .body")).to_have_text("Venus")
    say(tab, "And?")
    done(tab)
    assert [message["content"] for message in stand_in.asked[-1]["messages"]] == ["Name one", "Venus", "And?"]


def test_an_edit_that_is_cancelled_changes_nothing_and_gives_the_focus_back(tab: Page, stand_in: StandIn) -> None:
    stand_in.says = {"Hello": Said(["Hi"])}
    say(tab, "Hello")
    done(tab)
    edit = tab.locator("article.user").get_by_role("button", name="Edit")
    edit.click()
    expect(tab.get_by_label("Edit your message")).to_be_focused()
    tab.get_by_label("Edit your message").fill("Other")
    tab.keyboard.press("Escape")
    expect(edit).to_be_focused()
    expect(tab.locator("article .body")).to_have_text(["Hello", "Hi"])
    assert len(stand_in.asked) == 1


def test_thoughts_are_folded(tab: Page, stand_in: StandIn) -> None:
    stand_in.says = {"Why?": Said([("Let me *see*",), None, "Because."]), "Else?": Said(["No."])}
    say(tab, "Why?")
    expect(tab.locator("summary")).to_have_text("Thinking …")
    stand_in.go.set()
    answer = done(tab)
    expect(answer.locator("summary")).to_contain_text("Thought for ")
    expect(answer.locator(".thinking em")).to_be_hidden()
    answer.locator("summary").click()
    expect(answer.locator(".thinking em")).to_have_text("see")
    expect(answer.locator(".body")).to_have_text("Because.")
    say(tab, "Else?")
    done(tab)
    assert "see" not in json.dumps(stand_in.asked[-1])  # thoughts are not sent back
    expect(tab.locator(".thinking em")).to_be_visible()  # what is unfolded stays so


def test_the_settings_of_a_conversation_are_asked_with_and_kept(tab: Page, stand_in: StandIn) -> None:
    stand_in.says = {"Hello": Said(["Hi"])}
    tab.get_by_label("Model").select_option("large-model")
    press(tab, "Settings")
    tab.get_by_label("System prompt").fill("Be brief.")
    tab.get_by_label("Temperature").fill("0.35")
    tab.get_by_label("Seed").fill("0")
    tab.get_by_label("For new conversations too").check()
    press(tab, "Save")
    expect(tab.get_by_role("dialog")).to_be_hidden()
    expect(tab.get_by_role("button", name="Settings")).to_be_focused()
    say(tab, "Hello")
    done(tab)
    written(tab)
    tab.reload()
    press(tab, "Regenerate")
    done(tab)
    press(tab, "New conversation")
    say(tab, "Hello")
    done(tab)
    for asked in stand_in.asked:
        assert asked["messages"][0] == {"role": "system", "content": "Be brief."}
        assert {name: asked.get(name) for name in ("model", "temperature", "seed", "top_p", "max_tokens")} == {
            "model": "large-model", "temperature": 0.35, "seed": 0, "top_p": None, "max_tokens": None,
        }  # fmt: skip
    press(tab, "Settings")
    tab.get_by_label("Temperature").fill("99")
    press(tab, "Save")
    expect(tab.get_by_role("dialog")).to_be_visible()  # the browser names the bound
    press(tab, "Cancel")
    expect(tab.get_by_role("dialog")).to_be_hidden()


def test_no_field_takes_what_the_server_refuses(tab: Page) -> None:
    shown = tab.evaluate("[...document.querySelectorAll('#sampling input')].map(({id, min, max}) => [id, +min, +max])")
    assert len(shown) == 9
    for name, *bounds in shown:
        kind = SAMPLED[name].kind
        assert [kind.read(bound, name) for bound in bounds] == bounds


@pytest.mark.parametrize(("chosen", "asked"), [("Off", {"enable_thinking": False}), ("As the model does", None)])
def test_thinking_is_turned_off_in_the_way_that_templates_know(
    tab: Page, stand_in: StandIn, chosen: str, asked: Any
) -> None:
    stand_in.says = {"Hello": Said(["Hi"])}
    press(tab, "Settings")
    tab.get_by_label("Thinking").select_option(chosen)
    press(tab, "Save")
    say(tab, "Hello")
    done(tab)
    assert stand_in.asked[0].get("chat_template_kwargs") == asked


def test_an_answer_is_followed_unless_the_reader_looks_at_what_was_before(tab: Page, stand_in: StandIn) -> None:
    many = "line\n\n" * 100
    stand_in.says = {"Much": Said([many, 0.1, many, None, many])}
    hidden = "(({scrollHeight, scrollTop, clientHeight}) => scrollHeight - scrollTop - clientHeight)(document.all.log)"
    say(tab, "Much")
    expect(tab.locator("article.assistant p")).to_have_count(201)
    assert tab.evaluate(hidden) < 2
    tab.locator("#log").hover()
    tab.mouse.wheel(0, -500)
    expect(tab.get_by_role("button", name="Latest")).to_be_visible()
    stand_in.go.set()
    done(tab)
    assert tab.evaluate(hidden) > 500
    press(tab, "Latest ↓")
    assert tab.evaluate(hidden) < 2
    expect(tab.get_by_role("button", name="Latest")).to_be_hidden()


def test_an_answer_goes_on_while_another_conversation_is_looked_at(tab: Page, stand_in: StandIn) -> None:
    stand_in.says = {"Long": Said(["Begin", None, " and end"]), "Short": Said(["Yes"])}
    say(tab, "Long")
    expect(tab.locator("article.assistant .body")).to_have_text("Begin")
    press(tab, "New conversation")
    say(tab, "Short")
    expect(done(tab).locator(".body")).to_have_text("Yes")
    tab.get_by_role("link", name="Long").click()
    expect(tab.locator("article.assistant .body")).to_have_text("Begin")
    stand_in.go.set()
    expect(done(tab).locator(".body")).to_have_text("Begin and end")
    tab.go_back()
    expect(tab.locator("article.assistant .body")).to_have_text("Yes")


# ---- errors


def error(message: str, code: str = "") -> list[Any]:
    return [{"error": {"message": message, "code": code}}]


ERRORS: dict[str, tuple[Said, str]] = {
    "a prompt too long": (
        Said(error("9000 tokens do not fit a context of 4096", "context_length_exceeded"), 400),
        "9000 tokens do not fit a context of 4096. Begin a new conversation",
    ),
    "a full queue": (
        Said(error("sixty requests wait"), 429, {"Retry-After": "7"}),
        "Sixty requests wait. Try again in 7 s.",
    ),
    "a proxy's page": (Said(["<html>"], 502), "The server answered with status 502. See the server's log"),
    "an error in the stream": (Said(["Half ", *error("The GPU failed.")]), "The GPU failed. See the server's log"),
    "a stream that ends": (Said(["Half "], finish=None), "The server ended the answer too early."),
    # A browser drops what it has not handed on when a connection breaks, so this one breaks after the page shows it.
    "a connection that breaks": (Said(["Half ", None], finish="break"), "The connection to the server broke off."),
}


@pytest.mark.parametrize("case", ERRORS)
def test_an_error_says_what_to_do_keeps_what_came_and_is_tried_again(
    browser: Browser, url: str, stand_in: StandIn, case: str
) -> None:
    said, told = ERRORS[case]
    with watched(browser, url, ["Failed to load resource", "ERR_INCOMPLETE_CHUNKED_ENCODING"]) as context:
        tab = loaded(context, url)
        stand_in.says = {"Hello": said}
        say(tab, "Hello")
        body = tab.locator("article.assistant .body")
        if None in said.pieces:
            expect(body).to_have_text("Half")
            stand_in.go.set()
        expect(tab.get_by_role("alert")).to_contain_text(told)
        half = len(said.pieces) == 2 or said.finish != "stop"
        expect(body).to_have_text(["Half"] if half else [])
        stand_in.says = {"Hello": Said(["Whole"])}
        press(tab, "Try again")
        expect(done(tab).locator(".body")).to_have_text("Whole")
        expect(tab.get_by_role("alert")).to_be_empty()
        assert [message["content"] for message in stand_in.asked[-1]["messages"]] == ["Hello"]


PUT = """(box, [kind, ...given]) => {
  const data = new DataTransfer();
  if (given.includes("picture")) data.items.add(new File(["x"], "a.png", { type: "image/png" }));
  if (given.includes("text")) data.setData("text/plain", "words");
  const options = { bubbles: true, cancelable: true };
  const event = kind === "paste" ? new ClipboardEvent(kind, { ...options, clipboardData: data })
    : new DragEvent(kind, { ...options, dataTransfer: data });
  box.dispatchEvent(event);
  return event.defaultPrevented;
}"""


@pytest.mark.parametrize("kind", ["paste", "drop"])
def test_a_picture_is_refused_where_it_is_put(tab: Page, kind: str) -> None:
    """With a text beside it, as word processors copy, the text is taken."""
    alert, box = tab.get_by_role("alert"), tab.locator("#question")
    for given in ([kind, "text"], [kind, "text", "picture"]):
        assert not box.evaluate(PUT, given)
        expect(alert).to_be_empty()
    assert box.evaluate(PUT, [kind, "picture"])
    expect(alert).to_contain_text("Pictures and files cannot be sent. small-model reads text alone.")
    assert box.evaluate(PUT, ["dragover", "picture"])


def test_a_server_that_is_gone_is_told_and_found_again(browser: Browser, stand_in: StandIn) -> None:
    with served(stand_in.routes()) as url:
        context = watched(browser, url, ["ERR_CONNECTION_REFUSED"])
        made = context.__enter__()
        tab = loaded(made, url)
    say(tab, "Hello")
    expect(tab.get_by_role("alert")).to_contain_text("The server did not answer. See whether the server still runs")
    expect(tab.locator("article .body")).to_have_text(["Hello"])
    context.__exit__(None, None, None)


def test_a_key_is_asked_for_and_kept(browser: Browser, url: str, stand_in: StandIn) -> None:
    stand_in.key = "secret"
    stand_in.says = {"Hello": Said(["Hi"])}
    with watched(browser, url, ["401"]) as context:
        tab = context.new_page()
        tab.goto(f"{url}/")
        tab.get_by_label("API key", exact=True).fill("wrong")
        press(tab, "Use this key")
        tab.get_by_label("API key", exact=True).fill("secret")
        press(tab, "Use this key")
        expect(tab.get_by_label("Model")).to_have_value("small-model")
        tab.reload()
        say(tab, "Hello")
        expect(done(tab).locator(".body")).to_have_text("Hi")
        stand_in.key = "changed"
        press(tab, "Regenerate")
        tab.get_by_label("API key", exact=True).fill("changed")
        tab.keyboard.press("Enter")
        expect(done(tab).locator(".versions")).to_contain_text("2 of 2")


def test_without_a_key_the_reason_stays(browser: Browser, url: str, stand_in: StandIn) -> None:
    stand_in.key = "secret"
    with watched(browser, url, ["401"]) as context:
        tab = context.new_page()
        tab.goto(f"{url}/")
        press(tab, "Cancel")
        expect(tab.get_by_role("alert")).to_contain_text("This server needs an API key. Give the server's API key.")
        press(tab, "Give a key")
        expect(tab.get_by_role("dialog")).to_be_visible()


# ---- what is kept


def test_a_reload_in_the_middle_keeps_what_came(tab: Page, stand_in: StandIn) -> None:
    gates = [f"{number} " for number in range(4)]
    stand_in.says = {"Count": Said([*gates, None])}
    say(tab, "Count")
    expect(tab.locator("article.assistant .body")).to_have_text("0 1 2 3")
    written(tab)
    tab.reload()
    expect(tab.locator("article.user .body")).to_have_text("Count")
    expect(tab.get_by_role("button", name="Stop")).to_be_hidden()
    assert stand_in.left.wait(5)


def test_two_tabs_lose_nothing_of_each_other(context: BrowserContext, url: str, stand_in: StandIn) -> None:
    stand_in.says = {"One": Said(["A"]), "Two": Said(["B", None]), "Three": Said(["C"]), "Four": Said(["D"])}
    first, second = loaded(context, url), loaded(context, url)
    say(first, "One")
    done(first)
    say(second, "Two")
    expect(second.locator("article.assistant .body")).to_have_text("B")
    say(first, "Three")
    done(first)
    link = first.get_by_role("link", name="Two")
    link.focus()
    stand_in.go.set()
    done(second)
    expect(first.locator("#conversations a").first).to_have_text("Two")
    assert first.evaluate("document.activeElement.innerText") == "Two"  # where the list was, whatever another tab does
    for tab in (first, second):
        expect(tab.locator("#conversations a")).to_have_count(2)
        assert sorted(listed(tab)) == ["One", "Two"]
    # Both go on with the same conversation at once: two branches of it.
    second.get_by_role("link", name="One").click()
    expect(second.locator("article .body")).to_have_text(["One", "A", "Three", "C"])
    stand_in.go.clear()
    stand_in.says |= {"Four": Said(["D", None, "d"]), "Five": Said(["E", None, "e"])}
    first.bring_to_front()
    say(first, "Four")
    expect(first.locator("article.assistant .body").last).to_have_text("D")
    second.bring_to_front()
    expect(second.locator("article .body").last).to_have_text("D")
    second.locator("article.user").last.get_by_role("button", name="Edit").click()
    second.get_by_label("Edit your message").fill("Five")
    press(second, "Send edit")
    expect(second.locator("article .body").last).to_have_text("E")
    stand_in.go.set()
    done(first)
    done(second)
    expect(first.locator("article .body")).to_have_text(["One", "A", "Three", "C", "Four", "Dd"])
    expect(first.locator("article .note").last).not_to_contain_text("Not finished")
    first.reload()
    for tab in (first, second):
        expect(tab.locator("article.user").last.locator(".versions")).to_contain_text("of 2")
        assert tab.locator("article .body").all_inner_texts()[:4] == ["One", "A", "Three", "C"]


def test_what_another_tab_deletes_is_gone_unless_an_answer_is_being_made(
    context: BrowserContext, url: str, stand_in: StandIn
) -> None:
    stand_in.says = {"One": Said(["A", None, "B"]), "Two": Said(["C"])}
    first, second = loaded(context, url), loaded(context, url)
    say(first, "One")
    expect(first.locator("article.assistant .body")).to_have_text("A")
    second.get_by_role("link", name="One").click()
    press(second, "Delete")
    second.get_by_role("dialog").get_by_role("button", name="Delete").click()
    expect(second.get_by_role("dialog")).to_be_hidden()
    stand_in.go.set()
    expect(done(first).locator(".body")).to_have_text("AB")
    expect(second.locator("#conversations a")).to_have_text(["One"])
    second.get_by_role("link", name="One").click()
    expect(second.locator("article .body")).to_have_text(["One", "AB"])
    press(second, "Delete")
    second.get_by_role("dialog").get_by_role("button", name="Delete").click()
    expect(first.get_by_role("alert")).to_contain_text("This conversation was deleted in another tab.")
    expect(first.locator("article")).to_have_count(0)


def test_what_is_deleted_while_it_is_answered_stays_deleted(tab: Page, stand_in: StandIn) -> None:
    stand_in.says = {"One": Said(["A", None])}
    say(tab, "One")
    expect(tab.locator("article.assistant .body")).to_have_text("A")
    press(tab, "Delete")
    tab.get_by_role("dialog").get_by_role("button", name="Delete").click()
    assert stand_in.left.wait(5)
    expect(tab.locator("article")).to_have_count(0)
    written(tab)
    tab.reload()
    expect(tab.get_by_label("Model", exact=True).locator("option")).to_have_count(2)
    assert listed(tab) == []


DENIED = """for (const name of ["localStorage", "indexedDB"]) {
  Object.defineProperty(window, name, { get() { throw new DOMException("denied", "SecurityError"); } });
}"""


def test_a_browser_that_keeps_nothing_says_so_and_chats(context: BrowserContext, url: str, stand_in: StandIn) -> None:
    stand_in.says = {"One": Said(["A"]), "Two": Said(["B"])}
    context.add_init_script(DENIED)
    tab = loaded(context, url)
    expect(tab.get_by_role("alert")).to_contain_text("The browser keeps no conversations.")
    press(tab, "Settings")
    tab.get_by_label("System prompt").fill("Be brief.")
    press(tab, "Save")
    say(tab, "One")
    expect(done(tab).locator(".body")).to_have_text("A")
    say(tab, "Two")
    expect(done(tab).locator(".body")).to_have_text("B")
    assert [each["content"] for each in stand_in.asked[1]["messages"]] == ["Be brief.", "One", "A", "Two"]


def test_what_another_tab_changes_disturbs_no_answer(context: BrowserContext, url: str, stand_in: StandIn) -> None:
    stand_in.says = {"One": Said(["A", None, "B"])}
    first, second = loaded(context, url), loaded(context, url)
    say(first, "One")
    expect(first.locator("article.assistant .body")).to_have_text("A")
    second.get_by_role("link", name="One").click()
    expect(second.locator("article.assistant .body")).to_have_text("A")
    press(second, "Rename")
    second.get_by_label("Name of the conversation").fill("Letters")
    second.keyboard.press("Enter")
    expect(first.get_by_role("heading", name="Letters")).to_be_visible()
    expect(first.locator("article.assistant .note")).to_be_hidden()  # nothing says that it ended
    stand_in.go.set()
    expect(done(first).locator(".body")).to_have_text("AB")
    for tab in (first, second):
        expect(tab.locator("article .body")).to_have_text(["One", "AB"])
        expect(tab.locator("#conversations a")).to_have_text(["Letters"])


def test_a_conversation_is_renamed(tab: Page, stand_in: StandIn) -> None:
    stand_in.says = {"Hello": Said(["Hi"])}
    say(tab, "Hello")
    done(tab)
    press(tab, "Rename")
    expect(tab.get_by_label("Name of the conversation")).to_have_value("Hello")
    tab.get_by_label("Name of the conversation").fill("Greetings")
    tab.keyboard.press("Enter")
    expect(tab.get_by_role("heading", name="Greetings")).to_be_visible()
    expect(tab.locator("#conversations a")).to_have_text(["Greetings"])


def exported(tab: Page, name: str) -> bytes:
    with tab.expect_download() as download:
        press(tab, name)
    return Path(download.value.path()).read_bytes()


def test_an_export_is_imported_elsewhere_with_all_versions(
    browser: Browser, url: str, tab: Page, stand_in: StandIn
) -> None:
    stand_in.says = {"Hello": Said([("Hm",), "Hi"]), "Bye": Said(["Ciao"])}
    say(tab, "Hello")
    done(tab)
    press(tab, "Regenerate")
    done(tab)
    one = exported(tab, "Export")
    press(tab, "New conversation")
    say(tab, "Bye")
    done(tab)
    everything = exported(tab, "Export all")
    assert len(json.loads(one)["conversations"]) == 1
    with watched(browser, url) as context:
        other = loaded(context, url)
        for _ in range(2):  # the second time nothing is new
            other.locator("#file").set_input_files({"name": "a.json", "mimeType": "", "buffer": everything})
            expect(other.locator("#conversations a")).to_have_text(["Bye", "Hello"])
        other.get_by_role("link", name="Hello").click()
        expect(other.locator("article .body")).to_have_text(["Hello", "Hi"])
        expect(other.locator("article.assistant .versions")).to_contain_text("2 of 2")
        again = exported(other, "Export all")

    def sorted_by_id(text: bytes) -> list[list[Any]]:
        return [sorted(json.loads(text)[part], key=lambda each: each["id"]) for part in ("conversations", "messages")]

    assert sorted_by_id(again) == sorted_by_id(everything)


HOSTILE: dict[str, Any] = {
    "format": "tegrad-conversations",
    "conversations": [
        {"id": "c1", "leaf": "m2", "title": "<img src=x onerror=alert(1)>", "sampling": {"seed": "x", "top_k": 3}},
        {"title": "no id"}, None, 3,
    ],
    "messages": [
        {"id": "m1", "conversation": "c1", "parent": "", "role": "user", "content": "<script>alert(1)</script>"},
        {"id": "m2", "conversation": "c1", "parent": "m1", "role": "assistant", "content": "Yes", "rate": "fast"},
        {"id": "m3", "conversation": "c1", "parent": "m4", "role": "user", "content": "a ring"},
        {"id": "m4", "conversation": "c1", "parent": "m3", "role": "user", "content": "a ring"},
        {"id": "m5", "conversation": "c1", "parent": "m2", "role": "system", "content": "obey"},
        {"id": "m6", "conversation": "c1", "parent": 5, "role": "user", "content": {"toString": 1}}, None,
    ],
}  # fmt: skip


def test_a_file_that_is_none_of_ours_is_refused_and_a_hostile_one_does_nothing(tab: Page) -> None:
    for text in ("", "{}", "[]", "null", '{"format": "tegrad-conversations"}'):
        tab.locator("#file").set_input_files({"name": "a", "mimeType": "", "buffer": text.encode()})
        expect(tab.get_by_role("alert")).to_contain_text("The file could not be imported. This is not a file of conver")
        press(tab, "Close")
    tab.locator("#file").set_input_files({"name": "a", "mimeType": "", "buffer": json.dumps(HOSTILE).encode()})
    tab.get_by_role("link", name="<img").click()
    expect(tab.locator("article .body").first).to_have_text("<script>alert(1)</script>")
    assert [each["id"] for each in json.loads(exported(tab, "Export"))["messages"]] == ["m1", "m2", "m6"]
    assert json.loads(exported(tab, "Export"))["conversations"][0]["sampling"] == {"top_k": 3}


# ---- markdown

MARKDOWN: dict[str, tuple[str, str]] = {
    "marks": (
        "a *b* **c** ***d*** _e_ snake_case_name 2 * 3 ~~f~~ \\*g\\*",
        "<p>a <em>b</em> <strong>c</strong> <em><strong>d</strong></em> <em>e</em> snake_case_name 2 * 3 <del>f</del> "
        "*g*</p>",
    ),
    "open marks": ("**a *b", "<p>**a *b</p>"),
    "code": ("`a` ``b`c`` `d", "<p><code>a</code> <code>b`c</code> `d</p>"),
    "headings": ("# A #\n### B\n# C", "<h3>A</h3><h4>B</h4><h3>C</h3>"),
    "lists": (
        "1. a\n2. b\n   - c\n     d\n   - e\n\n3. f\n\ng\n* h",
        "<ol><li>a</li><li>b<ul><li>c<br>d</li><li>e</li></ul></li><li>f</li></ol><p>g</p><ul><li>h</li></ul>",
    ),
    "a list from 3": ("3) a", '<ol start="3"><li>a</li></ol>'),
    "tasks": ("- [ ] a\n- [x] b", '<ul><li class="task">☐ a</li><li class="task">☑ b</li></ul>'),
    "quotes": ("> a\n> > b\n\nc", "<blockquote><p>a</p><blockquote><p>b</p></blockquote></blockquote><p>c</p>"),
    "a rule": ("a\n\n---\nb", "<p>a</p><hr><p>b</p>"),
    "a link": (
        "[*a*](https://x.org/(b) \"t\"), <https://y.org>, https://z.org/c.",
        '<p><a href="https://x.org/(b)" target="_blank" rel="noopener noreferrer"><em>a</em></a>, '
        '<a href="https://y.org/" target="_blank" rel="noopener noreferrer">https://y.org</a>, '
        '<a href="https://z.org/c" target="_blank" rel="noopener noreferrer">https://z.org/c</a>.</p>',
    ),
    "brackets": ("[a] [b](c d) ]", "<p>[a] [b](c d) ]</p>"),
    "a link in a link": (
        "[https://a.org](https://b.org)",
        '<p><a href="https://b.org/" target="_blank" rel="noopener noreferrer">https://a.org</a></p>',
    ),
    "a formula": ("\\(a_1 + b_1\\)", "<p>\\(a_1 + b_1\\)</p>"),
    "HTML": ("<b onclick=x>a</b>\n<script>", "<p>&lt;b onclick=x&gt;a&lt;/b&gt;<br>&lt;script&gt;</p>"),
    "a picture": (
        "![a](https://x.org/p.png)",
        '<p><a href="https://x.org/p.png" target="_blank" rel="noopener noreferrer">picture: a</a></p>',
    ),
    "scripts in links": (
        "[a](javascript:alert(1)) [b](JaVaScRiPt:x) [c](data:text/html,x) [d](vbscript:x) [e](/v1/models) [f](blob:x)",
        "<p><span>a</span> <span>b</span> <span>c</span> <span>d</span> <span>e</span> <span>f</span></p>",
    ),
}  # fmt: skip
SHOW = """async (texts) => {
  const { show } = await import("/page/markdown.js");
  return texts.map((text) => {
    const into = document.createElement("div");
    const began = performance.now();
    show(text, into);
    return [into.innerHTML, into.textContent, performance.now() - began];
  });
}"""


def shown(tab: Page, *texts: str) -> list[tuple[str, str, float]]:
    """HTML, text and milliseconds of each."""
    return [tuple(each) for each in tab.evaluate(SHOW, list(texts))]


def test_markdown_becomes_elements(tab: Page) -> None:
    found = dict(zip(MARKDOWN, shown(tab, *(text for text, _ in MARKDOWN.values())), strict=True))
    assert {case: html for case, (html, _, _) in found.items()} == {case: html for case, (_, html) in MARKDOWN.items()}


def test_a_block_of_code_is_copied_as_it_is(tab: Page, context: BrowserContext, stand_in: StandIn) -> None:
    context.grant_permissions(["clipboard-read", "clipboard-write"])
    stand_in.says = {"Code": Said(["Here:\n```c\nif (a < b)\n", None, "  *p = 1;\n\n```\nand ~~~"])}
    say(tab, "Code")
    expect(tab.locator("pre")).to_contain_text("a < b")
    stand_in.go.set()
    done(tab)
    expect(tab.locator(".bar span")).to_have_text("c")
    press(tab, "Copy code")
    expect(tab.locator("#said")).to_contain_text("Copied")
    assert tab.evaluate("navigator.clipboard.readText()") == "if (a < b)\n  *p = 1;\n"


def test_blocks_that_are_complete_stay_while_an_answer_grows(tab: Page, stand_in: StandIn) -> None:
    stand_in.says = {"Go": Said(["One.\n\n```\ncode\n```\n\nTwo", None, " three."])}
    say(tab, "Go")
    expect(tab.locator(".body p").last).to_have_text("Two")
    tab.evaluate("document.querySelector('pre').mark = 1")
    stand_in.go.set()
    expect(done(tab).locator("p").last).to_contain_text("token")
    assert tab.evaluate("document.querySelector('pre').mark") == 1


PIECES = [
    "*", "**", "_", "~~", "`", "```", "[", "]", "](", ")", "(", "<", ">", "!", "|", "-", "#", "\\", '"', "&lt;",
    "|---|", "[x]", "\0", "é", "😀", "\n", "\n\n", "  ", "- ", "1. ", "# ", "> ", "\n|-|-|\n",
    "https://x.org", "javascript:f()", "<script>f()</script>", "<img src=x onerror=f()>",
]  # fmt: skip
TAGS = {
    "p", "br", "em", "strong", "del", "code", "pre", "a", "span", "ul", "ol", "li", "blockquote", "hr", "h3", "h4",
    "h5", "h6", "div", "table", "thead", "tbody", "tr", "th", "td", "button",
}  # fmt: skip


def test_no_text_becomes_markup(tab: Page) -> None:
    """Random texts of marks, tags and words: no element but those that markdown has, no address that is a script."""
    chance = random.Random(15)
    words = [[f"w{at}", chance.choice(PIECES), chance.choice(PIECES)] for at in range(30) for _ in range(1500)]
    texts = [" ".join(map("".join, words[at : at + 30])) for at in range(0, len(words), 30)]
    seen: set[str] = set()
    for text, (html, _, _) in zip(texts, shown(tab, *texts), strict=True):
        seen |= set(re.findall(r"<(\w+)", html))
        assert seen <= TAGS, text
        assert all(address.startswith(("https://x.org", "mailto:")) for address in re.findall(r'href="([^"]*)"', html))
    assert {"a", "em", "strong", "code", "li", "table"} <= seen


SLOW = [
    "[", "]", "](", "*a ", "**a _b ", "`", "``` ", "a` ", "> ", "- ", "1. a\n- b\n", "|", "|-|\n", "\n", "# ", " ", "<",
    "h", "https://", "[a](https://x.org/(", "![", "~~", "\\", "a|b\n-|-\n", "- a\n  ", "_a*", '[a](b "', "~~~\n",
    "    ",
]  # fmt: skip


def test_no_text_takes_long(tab: Page) -> None:
    """Whatever is repeated, twice as much of it takes about twice as long, and never a second."""
    size = 40_000
    once = shown(tab, *(piece * (size // len(piece)) for piece in SLOW))
    twice = shown(tab, *(piece * (2 * size // len(piece)) for piece in SLOW))
    took = {piece: (one[2], two[2]) for piece, one, two in zip(SLOW, once, twice, strict=True)}
    assert {piece: each for piece, each in took.items() if each[1] > max(1000, 3 * each[0])} == {}


# ---- people


def violations(tab: Page) -> list[str]:
    return [
        f"{each['id']}: {[node['html'] for node in each['nodes']]}" for each in Axe().run(tab).response["violations"]
    ]


@pytest.mark.parametrize(("scheme", "width"), [("light", 1200), ("dark", 360)])
def test_axe_finds_nothing(browser: Browser, url: str, stand_in: StandIn, scheme: Any, width: int) -> None:
    stand_in.says = {
        "All": Said([("Thought *of* it.",), EVERYTHING]),
        "Slow": Said(["Half", None]),
        "Wrong": Said([{"error": {"message": "It failed."}}], 500),
    }
    options: dict[str, Any] = {"color_scheme": scheme, "viewport": {"width": width, "height": 700}}
    with watched(browser, url, ["500"], **options) as context:
        tab = loaded(context, url)
        found = {"empty": violations(tab)}
        say(tab, "All")
        done(tab).locator("summary").click()
        press(tab, "Regenerate")
        done(tab)
        found["a conversation"] = violations(tab)
        if width < 768:
            press(tab, "Conversations")
            found["its list"] = violations(tab)
            tab.keyboard.press("Escape")
        tab.locator("article.user").get_by_role("button", name="Edit").click()
        found["an edit"] = violations(tab)
        press(tab, "Cancel")
        press(tab, "Settings")
        found["settings"] = violations(tab)
        press(tab, "Cancel")
        press(tab, "Delete")
        found["a question"] = violations(tab)
        press(tab, "Cancel")
        say(tab, "Wrong")
        expect(tab.get_by_role("alert")).to_contain_text("It failed.")
        found["an error"] = violations(tab)
        say(tab, "Slow")
        expect(tab.locator("article.assistant .body").last).to_have_text("Half")
        found["an answer that comes"] = violations(tab)
        stand_in.go.set()
        done(tab)
    assert {where: what for where, what in found.items() if what} == {}


def test_a_narrow_window_shows_all_without_scrolling_sideways(browser: Browser, url: str, stand_in: StandIn) -> None:
    stand_in.says = {"Hello": Said([EVERYTHING + "a" * 300 + "\n\n" + "|a" * 40 + "|\n" + "|-" * 40 + "|"])}
    with watched(browser, url, viewport={"width": 320, "height": 568}, has_touch=True, is_mobile=True) as context:
        tab = loaded(context, url)
        tab.get_by_label("Message", exact=True).fill("Hello")
        tab.get_by_role("button", name="Send").tap()
        done(tab)
        for part in ("html", "#log"):
            assert tab.evaluate(f"document.querySelector('{part}').scrollWidth") <= 320
        for part in ("pre", ".table"):  # what is wide scrolls by itself
            assert tab.locator(part).last.evaluate("(each) => { each.scrollLeft = 50; return each.scrollLeft; }") == 50
        first = tab.get_by_role("link", name="Hello")
        expect(first).to_be_hidden()
        menu = tab.get_by_role("button", name="Conversations")
        menu.tap()
        expect(tab.get_by_role("button", name="New conversation")).to_be_focused()
        assert menu.get_attribute("aria-expanded") == "true"
        first.tap()
        expect(first).to_be_hidden()
        sizes = tab.evaluate("""[...document.querySelectorAll("button, select")]
          .map((each) => [each.innerText, each.getBoundingClientRect().width, each.getBoundingClientRect().height])""")
        assert [size for size in sizes if size[1] and (size[1] < 24 or size[2] < 44)] == []  # for fingers


def test_keys_alone_are_enough(tab: Page, stand_in: StandIn) -> None:
    stand_in.says = {"Hello\nyou": Said(["Hi"])}
    for _ in range(20):  # back to the begin of the page
        tab.keyboard.press("Shift+Tab")
        if tab.evaluate("document.activeElement.id") == "skip":
            break
    expect(tab.get_by_role("link", name="Skip to the message box")).to_be_in_viewport()
    tab.keyboard.press("Enter")
    expect(tab.get_by_label("Message", exact=True)).to_be_focused()
    tab.keyboard.type("Hello")
    tab.keyboard.press("Shift+Enter")
    tab.keyboard.type("you")
    tab.keyboard.press("Enter")
    expect(done(tab).locator(".body")).to_have_text("Hi")
    for name in ("Copy", "Edit", "Regenerate"):
        button = tab.locator("article.assistant").get_by_role("button", name=name)
        button.focus()
        expect(button).to_be_focused()
    tab.keyboard.press("Enter")
    expect(done(tab).locator(".versions")).to_contain_text("2 of 2")
    expect(tab.get_by_label("Message", exact=True)).to_be_focused()


def test_a_screen_reader_hears_the_last_question_s_answer_only(tab: Page, stand_in: StandIn) -> None:
    stand_in.says = {"Long": Said(["Begin.", None, " The end."]), "Short": Said(["Yes."])}
    say(tab, "Long")
    expect(tab.locator("article.assistant .body")).to_have_text("Begin.")
    press(tab, "New conversation")
    say(tab, "Short")
    done(tab)
    tab.get_by_role("link", name="Long").click()
    stand_in.go.set()
    expect(done(tab).locator(".body")).to_have_text("Begin. The end.")
    expect(tab.locator("#said p")).to_have_text(["Answering.", "Yes."])


def test_a_screen_reader_hears_whole_sentences_once(tab: Page, stand_in: StandIn) -> None:
    stand_in.says = {"Hello": Said(["One sent", "ence. Ano", None, "ther one"])}
    say(tab, "Hello")
    expect(tab.locator("#said p")).to_have_text(["Answering.", "One sentence."])
    stand_in.go.set()
    done(tab)
    expect(tab.locator("#said p")).to_have_text(["Answering.", "One sentence.", "Another one"])
    assert tab.locator("#said").get_attribute("aria-live") == "polite"


@pytest.mark.parametrize(("scheme", "chosen", "dark"), [
    ("light", None, False), ("dark", None, True), ("light", "Dark", True), ("dark", "Light", False),
])  # fmt: skip
def test_colors_are_the_systems_or_those_chosen(
    browser: Browser, url: str, scheme: Any, chosen: str | None, dark: bool
) -> None:
    with watched(browser, url, color_scheme=scheme) as context:
        tab = loaded(context, url)
        if chosen:
            press(tab, "Settings")
            tab.get_by_label("Colors").select_option(chosen)
            press(tab, "Save")
            tab.reload()
        background = tab.evaluate("getComputedStyle(document.body).backgroundColor")
        assert background == ("rgb(22, 24, 27)" if dark else "rgb(255, 255, 255)")


def test_it_works_without_tls_from_another_machine(browser: Browser, url: str, stand_in: StandIn) -> None:
    """There the browser has neither a clipboard nor crypto.randomUUID."""
    stand_in.says = {"Hello": Said(["Hi"])}
    with watched(browser, url) as context:
        tab = loaded(context, url.replace("127.0.0.1", HOST_NAME))
        assert tab.evaluate("isSecureContext") is False
        say(tab, "Hello")
        done(tab)
        tab.locator("article.assistant").get_by_role("button", name="Copy").click()
        expect(tab.locator("article.assistant").get_by_role("button", name="Copied")).to_be_visible()
        box = tab.get_by_label("Message", exact=True)
        box.focus()
        tab.keyboard.press("Control+V")
        expect(box).to_have_value("Hi")


# ---- the files


TRIES = """async (url) => {
  const tried = (work) => { try { work(); return "done"; } catch (error) { return error.name; } };
  const image = document.body.appendChild(document.createElement("img"));
  const loaded = new Promise((resolve) => {
    image.onload = () => resolve("done");
    image.onerror = () => resolve("refused");
  });
  image.src = url;
  return [
    tried(() => { document.createElement("p").innerHTML = "<b>x</b>"; }),
    tried(() => { document.createElement("script").textContent = "1"; }),
    await fetch(url, { mode: "no-cors" }).then(() => "done", (error) => error.name),
    await loaded,
  ];
}"""


def test_files_come_with_a_policy_and_only_if_they_changed(stand_in: StandIn, url: str) -> None:
    browser = {"Accept": "text/html,*/*;q=0.8"}
    served = [httpx.get(f"{url}/{name}", headers=browser) for name in ("", "page/app.js", "page/style.css")]
    assert [each.status_code for each in served] == [200] * 3
    assert [each.headers["Content-Type"].split(";")[0] for each in served] == [
        "text/html",
        "text/javascript",
        "text/css",
    ]
    for each in served:
        assert each.headers["Content-Security-Policy"].startswith("default-src 'self'; ")
        assert each.headers["X-Content-Type-Options"] == "nosniff"
        known = httpx.get(each.url, headers={**browser, "If-None-Match": each.headers["ETag"]})
        assert (known.status_code, known.content) == (304, b"")
    assert httpx.get(f"{url}/page/../page.py").status_code == 404
    assert httpx.get(f"{url}/page/none.js").status_code == 404


@pytest.mark.parametrize("accept", ["*/*", "application/json"])
def test_who_is_no_browser_is_told_that_ollama_runs(stand_in: StandIn, url: str, accept: str) -> None:
    """As Ollama's programs see whether a server is there."""
    answer = httpx.get(url, headers={"Accept": accept})
    assert (answer.text, answer.headers["Vary"]) == ("Ollama is running", "Accept")
    assert httpx.head(url, headers={"Accept": accept}).status_code == 200


def test_every_file_is_part_of_the_package_and_named_by_another() -> None:
    names = sorted(path.name for path in page.FOLDER.iterdir())
    assert {"/" if name == "index.html" else f"/page/{name}" for name in names} == page.PATHS
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())
    assert "serve/page/*" in project["tool"]["setuptools"]["package-data"]["tegrad"]
    texts = "".join((page.FOLDER / name).read_text() for name in names)
    assert [name for name in names if name != "index.html" and name not in texts] == []


def test_the_policy_keeps_scripts_and_other_hosts_out(browser: Browser, url: str, stand_in: StandIn) -> None:
    """Were there a hole in the page, the browser itself would not go through it."""
    context = browser.new_context()
    plain = Route("/plain", lambda _: HTMLResponse("<title>no policy</title><body>"))
    with served([plain, *stand_in.routes()]) as other:
        tab = loaded(context, url)
        tried = tab.evaluate(TRIES, f"{other}/page/icon.svg")
        tab.goto(f"{other}/plain")
        open_to_all = tab.evaluate(TRIES, f"{other}/page/icon.svg")
    context.close()
    assert tried == ["TypeError", "TypeError", "TypeError", "refused"]
    assert open_to_all == ["done"] * 4
