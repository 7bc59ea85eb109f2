"""docs/reading.md leads where it says: every name stands in its file, every section of the notebook in the index."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PAGE = (ROOT / "docs/reading.md").read_text()
PLACES = sorted(set(re.findall(r"`([\w/]+\.(?:py|cuh?))(?::([\w.]+))?`", PAGE)))
TESTS = sorted(set(re.findall(r"\btests/[\w/]+(?:\.py)?", PAGE)))


def anchor(heading: str) -> str:
    """As GitHub makes it of a heading."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


def test_the_page_names_many_places() -> None:
    assert len(PLACES) > 50


@pytest.mark.parametrize(("file", "name"), PLACES, ids=[":".join(place) for place in PLACES])
def test_a_name_stands_in_its_file(file: str, name: str) -> None:
    folder = "llm" if file.startswith("kernels/") else ""
    text = (ROOT / "tegrad" / folder / file).read_text()
    for part in filter(None, name.split(".")):
        found = re.search(rf"^ *(def {part}\(|class {part}\b)|^{part}\b.*=", text, re.MULTILINE)
        assert found, part
        text = text[found.start() :]


@pytest.mark.parametrize("path", TESTS)
def test_a_test_is_where_it_says(path: str) -> None:
    assert (ROOT / path).exists()


def test_every_section_of_the_notebook_is_in_the_index() -> None:
    headings = re.findall(r"^## (.*)$", (ROOT / "docs/notebook.md").read_text(), re.MULTILINE)
    listed = re.findall(r"\[([^]]*)\]\(notebook\.md#([^)]*)\)", PAGE)
    assert sorted(title for title, _ in listed) == sorted(headings)
    assert all(anchor(title) == link for title, link in listed)


def test_links_lead_to_pages() -> None:
    for link in re.findall(r"\]\(([\w-]+\.md)", PAGE):
        assert (ROOT / "docs" / link).exists(), link
