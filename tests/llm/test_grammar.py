"""Masks keep an answer to its grammar, over vocabularies of both kinds; grammars that are not sound, or that would take
too long, are refused in words."""

import json
import random
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from vocabularies import byte_level, sentencepiece, write_vocabulary

from tegrad.llm import grammar
from tegrad.llm.grammar import KEPT, MOST_CHARACTERS, Grammar, GrammarError, Masks
from tegrad.llm.tokenizer import Kind, Tokenizer
from tegrad.models import SMALL

PLACE = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 20}, "level": {"type": "integer"}, "on": {"enum": [True]}},
    "required": ["city", "level", "on"],
    "additionalProperties": False,
}
CHAIN = "start: a0\n" + "\n".join(f'a{at}: "y" a{at + 1}' for at in range(4000)) + '\na4000: "x"'
"""Ends llguidance in a segmentation fault, in a thread with 8 MiB of stack."""
CROSSED = "start: A\nA: " + " & ".join(f"/[ab]*a[ab]{{{at}}}b[ab]*/" for at in range(200))
"""Takes it more than a minute."""


@pytest.fixture(scope="module", params=["shipped", "byte-level", "sentencepiece"])
def tokenizer(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    if request.param == "shipped":
        return Tokenizer.load(SMALL)
    words = byte_level("qwen2") if request.param == "byte-level" else sentencepiece()
    return Tokenizer.load(write_vocabulary(tmp_path_factory.mktemp(request.param) / "v.gguf", words))


@pytest.fixture(scope="module")
def masks(tokenizer: Tokenizer) -> Masks:
    return Masks(tokenizer)


def test_tokens_that_are_too_long_for_llguidance_are_never_allowed(tmp_path: Path) -> None:
    """As text, or as control tokens; it would end in a panic, and the request never."""
    words = byte_level("qwen2")
    longest = {
        len(words.tokens): Kind.NORMAL,
        len(words.tokens) + 1: Kind.USER_DEFINED,
        len(words.tokens) + 2: Kind.CONTROL,
    }
    for token, kind in longest.items():
        words.tokens.append("a" * (2000 + token))
        words.kinds.append(int(kind))
    masks = Masks(Tokenizer.load(write_vocabulary(tmp_path / "v.gguf", words)))
    said = allowed(masks.mask(Grammar("regex", "a{4000}"))([]))
    assert said
    assert not said & longest.keys()


def allowed(mask: bytes | memoryview | None) -> set[int]:
    assert mask is not None
    return set(np.flatnonzero(np.unpackbits(np.frombuffer(mask, np.uint8), bitorder="little")).tolist())


def answer(tokenizer: Tokenizer, masks: Masks, wanted: Grammar, seed: int, most: int = 400) -> str | None:
    """What a model says that knows nothing; None where it did not come to an end."""
    draw, mask, tokens = random.Random(seed), masks.mask(wanted), list[int]()
    for _ in range(most):
        token = draw.choice(sorted(allowed(mask(tokens))))
        if token in tokenizer.stops:
            return tokenizer.decode(tokens)
        tokens.append(token)
    return None


def accepts(tokenizer: Tokenizer, masks: Masks, wanted: Grammar, text: str) -> bool:
    """Whether a grammar takes a text, whole, and may end after it and nowhere before."""
    mask, tokens = masks.mask(wanted), list[int]()
    for token in grammar._Vocabulary(tokenizer, ())(text):
        may = allowed(mask(tokens))
        assert not may & tokenizer.stops
        if token not in may:
            return False
        tokens.append(token)
    return tokenizer.stops <= allowed(mask(tokens))


def test_random_answers_are_json_of_the_schema(tokenizer: Tokenizer, masks: Masks) -> None:
    wanted = Grammar("schema", json.dumps(PLACE))
    said = [answer(tokenizer, masks, wanted, seed) for seed in range(20)]
    whole = [json.loads(text) for text in said if text is not None]
    assert len(whole) >= 15  # numbers and spaces may go on
    for value in whole:
        assert set(value) == {"city", "level", "on"}
        assert isinstance(value["level"], int)
        assert len(value["city"]) <= 20


OPEN_OBJECT = {"properties": {"a": {"enum": [1]}}, "required": ["a"]}
EMPTY: dict[str, Any] = {}


@pytest.mark.parametrize(
    ("schema", "text", "others"),
    [
        (OPEN_OBJECT, '{"a": 1}', False),
        ({**OPEN_OBJECT, "additionalProperties": True}, '{"a": 1}', True),
        ({"items": OPEN_OBJECT}, '[{"a": 1}]', False),
        ({"$ref": "#/$defs/one", "$defs": {"one": OPEN_OBJECT}}, '{"a": 1}', False),
        ({"allOf": [OPEN_OBJECT, {"properties": {"b": EMPTY}, "required": ["b"]}]}, '{"a": 1, "b": 2}', True),
        ({**OPEN_OBJECT, "anyOf": [{"properties": {"b": EMPTY}}]}, '{"a": 1, "b": 2}', True),
        ({"const": {"properties": {"a": 1}}}, '{"properties": {"a": 1}}', False),
        ({"properties": {"properties": OPEN_OBJECT}}, '{"properties": {"a": 1}}', False),
        ({"type": "object"}, "{}", True),
    ],
    ids=str,
)
def test_an_object_has_its_schemas_properties_unless_it_says_more(
    schema: dict[str, Any], text: str, others: bool
) -> None:
    tokenizer = Tokenizer.load(SMALL)
    masks, wanted = Masks(tokenizer), Grammar("schema", json.dumps({"type": ["object", "array"], **schema}))
    more = text.replace("}", ', "other": 0}', 1) if text != "{}" else '{"other": 0}'
    assert accepts(tokenizer, masks, wanted, text)
    assert accepts(tokenizer, masks, wanted, more) == others


def test_a_schema_that_is_nested_too_deeply_is_refused() -> None:
    deep = '{"items": ' * 5000 + "{}" + "}" * 5000
    with pytest.raises(GrammarError, match=r"nested too deeply|not sound or not supported"):
        Masks(Tokenizer.load(SMALL)).check(Grammar("schema", deep))


def test_a_texts_tokens_are_exactly_its_own(tokenizer: Tokenizer) -> None:
    """Some vocabularies begin a text with a space, which a grammar's own texts do not have."""
    words = grammar._Vocabulary(tokenizer, ())
    for text in ("{", '{"a": ', "the", " the", "\n\n", "1é漢"):
        assert tokenizer.decode(words(text)) == text


@pytest.mark.parametrize(
    ("wanted", "text"),
    [
        (Grammar("json"), '{"a": [1, 2.5e3, true, "x"]}'),
        (Grammar("schema", '{"enum": ["left", "right"]}'), '"left"'),
        (Grammar("regex", "[ab]+c"), "abac"),
        (Grammar("lark", 'start: "the" " "? A\nA: /[0-9]{3}/'), "the 123"),
    ],
)
def test_a_text_of_each_kind_is_taken_and_ends_where_it_may(
    tokenizer: Tokenizer, masks: Masks, wanted: Grammar, text: str
) -> None:
    assert accepts(tokenizer, masks, wanted, text)
    with pytest.raises(AssertionError):  # it may end before these
        accepts(tokenizer, masks, wanted, f"{text} more")


def test_control_tokens_are_no_text(tokenizer: Tokenizer, masks: Masks) -> None:
    control = {token for token, kind in enumerate(tokenizer.kinds) if kind in (Kind.CONTROL, Kind.UNKNOWN)}
    assert control
    assert not allowed(masks.mask(Grammar("regex", "(?s:.)+x"))([])) & control
    named = min(control - tokenizer.stops, default=None)
    if named is not None:
        assert allowed(masks.mask(Grammar("lark", f'start: <[{named}]> "x"'))([])) == {named}


def test_a_mask_goes_on_from_where_it_was_and_refuses_what_it_forbade(masks: Masks) -> None:
    mask = masks.mask(Grammar("regex", "[ab]{3}"))
    a, one = masks._tokenizer.tokens.index("a"), masks._tokenizer.tokens.index("1")
    first = mask([])
    assert mask([]) == first
    assert mask([a, a]) == mask([a, a])
    with pytest.raises(GrammarError, match="left its grammar"):
        mask([a, a, one])


def test_a_mask_is_as_long_as_the_models_logits(tokenizer: Tokenizer) -> None:
    vocab = len(tokenizer) - 40
    mask = Masks(tokenizer, vocab).mask(Grammar("json"))([])
    assert mask is not None
    assert len(mask) == -(-vocab // 32) * 4


@pytest.mark.parametrize(
    ("wanted", "said"),
    [
        (Grammar("schema", "{"), "is no JSON"),
        (Grammar("schema", "[]"), "object or boolean"),
        (Grammar("schema", "false"), "Unsatisfiable"),
        (Grammar("schema", '{"type": "nonsense"}'), "nonsense"),
        (Grammar("schema", '{"not": {}}'), "not"),
        (Grammar("schema", '{"type": "string", "pattern": "(("}'), "unclosed group"),
        (Grammar("schema", '{"$ref": "http://example.com/x"}'), "example.com"),
        (Grammar("schema", '{"x-guidance": 3}'), "x-guidance"),
        (Grammar("schema", '{"x-guidance": {"nothing": 1}}'), "nothing"),
        (Grammar("schema", '{"enum": ["\\ud800"]}'), "hex escape"),
        (Grammar("lark", 'start: "\ud800"'), "halves of characters"),
        (Grammar("regex", "\udfff"), "halves of characters"),
        (Grammar("lark", "start: nowhere"), "nowhere"),
        (Grammar("lark", 'start: <|nowhere|> "x"'), "nowhere"),
        (Grammar("regex", "(?=a)b"), "look"),
        (Grammar("regex", "a" * (MOST_CHARACTERS + 1)), "characters"),
        (Grammar("regex", "(((a{100}){100}){100}){100}"), "too many"),
        (Grammar("lark", CHAIN), "stack"),
    ],
)
def test_what_is_not_sound_or_not_supported_is_told(wanted: Grammar, said: str) -> None:
    begun = time.monotonic()
    with pytest.raises(GrammarError, match=said) as caught:
        Masks(Tokenizer.load(SMALL)).check(wanted)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 500
    assert time.monotonic() - begun < 60


@pytest.mark.long
def test_a_grammar_that_takes_too_long_is_refused() -> None:
    with pytest.raises(GrammarError, match="2 s"):
        Masks(Tokenizer.load(SMALL)).check(Grammar("lark", CROSSED))


def test_masks_that_take_long_end_the_answer_and_not_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    masks = Masks(Tokenizer.load(SMALL))
    a = masks._tokenizer.tokens.index("a")
    mask = masks.mask(Grammar("regex", "(a{100}){100}"))
    mask([])
    monkeypatch.setattr(grammar, "ALLOWANCE_S", 0.0)
    monkeypatch.setattr(grammar, "MASK_S", 0.0)
    with pytest.raises(GrammarError, match="ms for each token"):
        mask([a])


def test_no_mask_builds_what_encodes_texts() -> None:
    """It takes 0.2 s of a large vocabulary, for which all answers would wait."""
    tokenizer = Tokenizer.load(SMALL)
    Masks(tokenizer).mask(Grammar("json"))
    assert "_raw" in vars(tokenizer)


def test_an_answer_may_be_given_token_by_token() -> None:
    tokenizer = Tokenizer.load(SMALL)
    masks, stop = Masks(tokenizer), min(tokenizer.stops)
    mask = masks.mask(Grammar("tokens", f"7 {stop} 31"))
    assert [allowed(mask([7, stop, 31][:count])) for count in range(3)] == [{7}, {stop}, {31}]
    assert mask([7, stop, 31]) is None
    with pytest.raises(GrammarError, match="token 2048"):
        masks.check(Grammar("tokens", "7 2048"))


def test_a_vocabulary_is_built_once_and_before_the_first_grammar_if_warmed(monkeypatch: pytest.MonkeyPatch) -> None:
    made, build = [], grammar._Vocabulary

    def counted(*given: Any) -> Any:
        made.append(threading.current_thread())
        time.sleep(0.05)  # the other one comes meanwhile
        return build(*given)

    monkeypatch.setattr(grammar, "_Vocabulary", counted)
    masks = Masks(Tokenizer.load(SMALL))
    threads = [threading.Thread(target=masks.warm) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    masks.check(Grammar("json"))
    assert len(made) == 1
    assert made[0] in threads


def test_only_so_many_grammars_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    masks = Masks(Tokenizer.load(SMALL))
    monkeypatch.setattr(grammar.trial, "fault", lambda *_: "")
    for count in range(KEPT + 3):
        masks.check(Grammar("regex", f"a{{{count + 1}}}"))
    assert len(masks._made) == KEPT


def test_a_vocabulary_without_an_end_is_refused() -> None:
    tokenizer = Tokenizer.load(SMALL)
    tokenizer.stops = frozenset()
    with pytest.raises(GrammarError, match="ends a text"):
        Masks(tokenizer).check(Grammar("json"))


def test_the_extra_is_named_where_it_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "llguidance", None)
    with pytest.raises(GrammarError, match=r"pip install .*\[grammar\]"):
        Masks(Tokenizer.load(SMALL)).check(Grammar("json"))


def test_batches_masks_are_given_a_sequence(tokenizer: Tokenizer, masks: Masks) -> None:
    given: Sequence[int] = (tokenizer.tokens.index("a"),)
    mask = masks.mask(Grammar("regex", "a+"))
    assert mask(()) is not None
    assert tokenizer.stops <= allowed(mask(given))


def test_the_time_that_starting_takes_does_not_count_as_a_grammars() -> None:
    """A machine on which Python and llguidance take seconds to start refused every grammar."""
    code = (
        "import time\nfrom tegrad.llm import trial\ntrial.CPU_LIMIT_S = 1\n"
        "while time.process_time() < 1.2: pass\ntrial.main()"
    )
    asked = json.dumps(['start: "a"', 300, {"299": "</s>"}])
    done = subprocess.run([sys.executable, "-c", code], input=asked, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout.strip()) == (0, '""')
