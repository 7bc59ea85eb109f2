"""The tokenizer gives llama.cpp's tokens for any text, and its stream never splits a character."""

import random
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from threading import Event, Thread
from time import process_time

import pytest
from tiny_llama import Vocabulary, rewritten
from tokenizers import Regex
from tokenizers.pre_tokenizers import Sequence as Cuts
from tokenizers.pre_tokenizers import Split
from vocabularies import CONTROL, CORPUS, OTHER_KINDS, USER, byte_level, of_kind, sentencepiece, write_vocabulary

from tegrad.llm.cuts import KINDS, SPLITS
from tegrad.llm.errors import GgufError
from tegrad.llm.gguf import Gguf
from tegrad.llm.template import Template
from tegrad.llm.tokenizer import BRIEF_CHARACTERS, ENDS, FILLS, Kind, Stream, Tokenizer

ALPHABET = [
    *"abcABCthe the   \n\n\r\t 0123456789.,!?'s'RE-_éüß漢字かな한글ЖжǅƻაႠ՞աՍ：。🙂🏳️‍🌈<>|$^~+=",
    *CONTROL,
    *USER,
    "</s>",
    "<unk>",
    " the",
    "     ",
    "'ll",
    "'S",
]


NEWER = {"glm5": "glm4", "mellum2": "smollm", "talkie": "gpt-4o"}
"""Names that llama.cpp has got since the package; it is given the older name of the same cut."""
NEW = {
    "minicpm5": "I|'ll| do| |123|456|7| | x|'s|  |12|  | a|\n\n|5| Ankara|'d|a| | (|1|/|2|)//\r\n| | --|  ",
    "ufakzeka": "I|'ll| do| |1|2|3|4|5|6|7| | x|'s| | |1|2|  | a|\n\n|5| Ankara|'da| | (|1|/|2|)//\r\n| | --|  ",
}
"""Cuts that it has got since, and how its present source cuts a text."""
TILDE = ("deepseek-v3", "afmoe")
"""Cuts for which the package's llama.cpp did not take ~ for a symbol yet, as its present source does."""


def spaced() -> Vocabulary:
    """Runs of spaces as Mistral has them, pieces over a space, pieces of equal scores, and hardly any bytes."""
    plain, rng = sentencepiece(), random.Random(7)
    runs = ["\u2581" * length for length in (2, 4, 8, 16, 3, 5, 7, 6, 12, 9, 15, 10, 11, 13, 14)]
    over = [
        "a\u2581",
        "a\u2581b",
        "ab",
        "abc",
        "bc",
        "ca",
        "aa",
        "aaa",
        "aaaa",
        "bb",
        "bbb",
        "cab",
        "abca",
        "the\u2581",
    ]
    more = [piece for piece in (*runs, *over) if piece not in plain.tokens]
    assert plain.scores is not None
    scores = [*plain.scores, *(-1.0 - at for at in range(len(runs)))]
    scores += [float(rng.randint(-3, 0)) for _ in range(len(plain.tokens) + len(more) - len(scores))]
    return replace(plain, tokens=[*plain.tokens, *more], kinds=[*plain.kinds, *[1] * len(more)], scores=scores)


def leftmost_best(vocabulary: Vocabulary, text: str) -> list[int]:
    """What SentencePiece says that it does, one join after the other over the whole text."""
    assert vocabulary.scores is not None
    number = {token: at for at, token in enumerate(vocabulary.tokens)}
    score = {token: vocabulary.scores[at] for token, at in number.items() if vocabulary.kinds[at] == Kind.NORMAL}
    parts = list("\u2581" + text.replace(" ", "\u2581"))
    while pairs := [(-score[a + b], at) for at, (a, b) in enumerate(pairwise(parts)) if a + b in score]:
        _, at = min(pairs)
        parts[at : at + 2] = [parts[at] + parts[at + 1]]
    tokens: list[int] = []
    for part in parts:
        tokens += [number[part]] if part in score else [number[f"<0x{byte:02X}>"] for byte in part.encode()]
    return tokens


def texts(seed: int, count: int) -> Iterator[str]:
    random_ = random.Random(seed)
    for _ in range(count):
        yield "".join(random_.choice(ALPHABET) for _ in range(random_.randint(0, 40)))


@pytest.mark.parametrize("across", [False, True], ids=["no piece over a space", "pieces over spaces"])
def test_of_equal_scores_the_leftmost_pair_is_joined(tmp_path: Path, across: bool) -> None:
    """Runs of spaces, whose halves are many, and letters of which pieces overlap; against the rule, and llama.cpp."""
    vocabulary = spaced()
    if not across:
        kinds = [
            Kind.UNUSED if "\u2581" in token.lstrip("\u2581") else kind
            for token, kind in zip(vocabulary.tokens, vocabulary.kinds, strict=True)
        ]
        vocabulary = replace(vocabulary, kinds=[int(kind) for kind in kinds])
    path, rng = write_vocabulary(tmp_path / "v.gguf", vocabulary), random.Random(3)
    tokenizer = Tokenizer.load(path)
    runs = [" " * length + end for length in range(1, 70) for end in ("", "the")]
    mixed = [
        "".join(rng.choice(["a", "b", "c", " ", "  ", "the", "é"]) for _ in range(rng.randint(1, 60)))
        for _ in range(150)
    ]
    for text in (*runs, *mixed):
        assert tokenizer.encode(text, bos=False) == leftmost_best(vocabulary, text), text
    if across:
        llama_cpp = pytest.importorskip("llama_cpp", reason="cyllama is not installed")
        with llama_cpp.peer(path) as peer:
            for text in (*runs, *mixed):
                assert tokenizer.encode(text, bos=False) == peer.vocab.tokenize(text, False, True), text


def test_a_letter_that_neither_is_a_piece_nor_has_bytes_is_unknown(tmp_path: Path) -> None:
    """Several in a row are one; in a text for control tokens the unknown one's own name is one as well."""
    sound = sentencepiece()
    tokens = [
        token if not token.startswith("<0x") or token == "<0xC3>" else f"gone{at}"
        for at, token in enumerate(sound.tokens)
    ]
    kinds = [Kind.UNUSED if token.startswith("gone") else kind for token, kind in zip(tokens, sound.kinds, strict=True)]
    path = write_vocabulary(tmp_path / "v.gguf", replace(sound, tokens=tokens, kinds=[int(kind) for kind in kinds]))
    tokenizer = Tokenizer.load(path)
    assert [tokenizer.tokens[token] for token in tokenizer.encode("a\u2603\u2602b", bos=False)][1:] == [
        "<unk>",
        "b",
    ]
    assert tokenizer.encode("<unk>", bos=False) == [0]
    assert tokenizer.encode("<unk>", bos=False, special=False) != [0]


def test_a_byte_that_no_token_stands_for_keeps_its_neighbours_apart(tmp_path: Path) -> None:
    sound = byte_level("gpt-2")
    space = sound.tokens.index("\u0120")
    tokens = ["gone" if token == "\u010b" else token for token in sound.tokens]  # the letter of the byte 0x0b
    vocabulary = replace(
        sound, tokens=[*tokens, "\u0120" * 2], kinds=[*sound.kinds, 1], merges=["\u0120 \u0120", *sound.merges]
    )
    path = write_vocabulary(tmp_path / "v.gguf", vocabulary)
    tokenizer = Tokenizer.load(path)
    for _ in range(2):  # for one text, then for any
        assert tokenizer.encode(" \x0b ", bos=False) == [space, space]
    assert tokenizer.encode("  ", bos=False) == [len(tokens)]
    llama_cpp = pytest.importorskip("llama_cpp", reason="cyllama is not installed")
    with llama_cpp.peer(path) as peer:
        assert peer.vocab.tokenize(" \x0b ", False, True) == [space, space]


@pytest.mark.parametrize("names", [("token_type",), ("bos_token_id",), ("eos_token_id", "bos_token_id")], ids=" ".join)
def test_what_a_sentencepiece_file_does_not_tell_is_as_llama_cpp_has_it(tmp_path: Path, names: tuple[str, ...]) -> None:
    """Its trainer numbers the begin and the end 1 and 2; tokens of bytes are known by their names."""
    llama_cpp = pytest.importorskip("llama_cpp", reason="cyllama is not installed")
    sound = write_vocabulary(tmp_path / "v.gguf", sentencepiece(), **{"tokenizer.chat_template": "{{ bos_token }}"})
    path = rewritten(sound, tmp_path / "less.gguf", **{f"tokenizer.ggml.{name}": None for name in names})
    with Gguf.open(path) as file, llama_cpp.peer(path) as peer:
        tokenizer, template = Tokenizer(file), Template.of(file)
        assert tokenizer.stops == {token for token in range(len(tokenizer)) if peer.vocab.is_eog(token)}
        assert template is not None
        assert template.render([]) == "<s>"
        template.close()
        for text in texts(6, 40):
            assert tokenizer.encode(text) == peer.vocab.tokenize(text, True, True), text


@pytest.mark.parametrize("kind", ["sentencepiece", "llama-bpe"])  # without a begin token, llama.cpp ends at gemma4's
@pytest.mark.parametrize("missing", ["bos", "eos", "eot", "unknown"])
def test_a_number_that_is_no_tokens_is_as_if_it_was_not_there(tmp_path: Path, kind: str, missing: str) -> None:
    """Converters wrote what config.json had, whatever the vocabulary. llama.cpp says so, and takes the usual one."""
    llama_cpp = pytest.importorskip("llama_cpp", reason="cyllama is not installed")
    vocabulary = replace(of_kind(kind), add_bos=kind == "sentencepiece")
    values = {"tokenizer.chat_template": "{{ bos_token }}|{{ eos_token }}"}
    path = write_vocabulary(tmp_path / "v.gguf", vocabulary, **values)
    path = rewritten(path, tmp_path / "wrong.gguf", **{f"tokenizer.ggml.{missing}_token_id": 0xFFFFFFFF})
    with Gguf.open(path) as file, llama_cpp.peer(path) as peer:
        tokenizer, template = Tokenizer(file), Template.of(file)
        theirs = {token for token in range(len(tokenizer)) if peer.vocab.is_eog(token)}
        usual = {11} if (kind, missing) == ("llama-bpe", "eos") else set()  # where a byte-level one has a comma
        assert tokenizer.stops == theirs - usual
        assert template is not None
        told = {"bos": tokenizer.bos, "eos": tokenizer.eos}
        assert template.render([]) == "|".join("" if one is None else tokenizer.tokens[one] for one in told.values())
        template.close()
        for text in texts(6, 20):
            assert tokenizer.encode(text) == peer.vocab.tokenize(text, True, True), text


@pytest.mark.parametrize("name", [None, ""])
def test_a_cut_without_a_name_is_the_usual_one(tmp_path: Path, name: str | None) -> None:
    llama_cpp = pytest.importorskip("llama_cpp", reason="cyllama is not installed")
    sound = write_vocabulary(tmp_path / "v.gguf", byte_level("default"))
    path = rewritten(sound, tmp_path / "unnamed.gguf", **{"tokenizer.ggml.pre": name})
    tokenizer = Tokenizer.load(path)
    with llama_cpp.peer(path) as peer:
        for text in texts(6, 40):
            assert tokenizer.encode(text, bos=False) == peer.vocab.tokenize(text, False, True), text


@pytest.mark.parametrize("form", ["none", "whole numbers", "more than tokens", "more types than tokens"])
def test_scores_and_types_are_read_in_every_form_that_llama_cpp_reads(tmp_path: Path, form: str) -> None:
    llama_cpp = pytest.importorskip("llama_cpp", reason="cyllama is not installed")
    sound = sentencepiece()
    assert sound.scores is not None
    scores: dict[str, list[float] | None] = {
        "none": None,
        "whole numbers": [int(score) for score in sound.scores],
        "more than tokens": [*sound.scores, 0.0],
    }
    kinds = [*sound.kinds, 1] if form == "more types than tokens" else sound.kinds
    vocabulary = replace(sound, scores=scores.get(form, sound.scores), kinds=kinds)
    path = write_vocabulary(tmp_path / "v.gguf", vocabulary)
    tokenizer = Tokenizer.load(path)
    with llama_cpp.peer(path) as peer:
        for text in texts(6, 40):
            assert tokenizer.encode(text) == peer.vocab.tokenize(text, True, True), text


@pytest.mark.parametrize("kind", ["sentencepiece", "llama-bpe", "qwen2", "gemma4"])
@pytest.mark.parametrize("add_bos", [True, False, None])
def test_a_conversation_begins_with_the_begin_token_once_where_the_model_wants_it(
    tmp_path: Path, kind: str, add_bos: bool | None
) -> None:
    """TinyLlama's and Zephyr's templates write none, Llama's do; llama.cpp takes what is written off, and adds it."""
    llama_cpp = pytest.importorskip("llama_cpp", reason="cyllama is not installed")
    vocabulary = of_kind(kind)
    path = write_vocabulary(tmp_path / "v.gguf", replace(vocabulary, add_bos=add_bos))
    tokenizer, begin = Tokenizer.load(path), vocabulary.tokens[vocabulary.bos]
    with llama_cpp.peer(path) as peer:
        wants = peer.vocab.tokenize("a", True, True)[0] == vocabulary.bos
        for text in ("<|im_end|>the text\n", "the", ""):
            theirs = peer.vocab.tokenize(text, True, True)
            assert tokenizer.encode_chat(text) == theirs
            assert tokenizer.encode_chat(begin + text) == (theirs if wants else [vocabulary.bos, *theirs])


@pytest.mark.parametrize("name", ["Phi-3 mini", "my-phi3", "Llama"])
def test_tokens_of_phi_3_take_the_spaces_after_them_along(tmp_path: Path, name: str) -> None:
    plain = sentencepiece()
    assert plain.scores is not None
    vocabulary = replace(
        plain, tokens=[*plain.tokens, "<|endoftext|>"], kinds=[*plain.kinds, 3], scores=[*plain.scores, 0.0]
    )
    path = write_vocabulary(tmp_path / "v.gguf", vocabulary, **{"general.name": name})
    tokenizer = Tokenizer.load(path)
    assert (tokenizer.encode("<think> \n", bos=False) == tokenizer.encode("<think>", bos=False)) == (name != "Llama")
    llama_cpp = pytest.importorskip("llama_cpp", reason="cyllama is not installed")
    marks = ("<think>", "<|im_start|>", "</s>", "<s>", "<unk>", "<|endoftext|>")
    with llama_cpp.peer(path) as peer:
        for mark in marks:
            for text in (f"a {mark} the", f"{mark}\n\n{mark}\t ", f"{mark}\u00a0 \r\nb{mark}", f" {mark}", mark):
                for special in (True, False):
                    ours = tokenizer.encode(text, bos=False, special=special)
                    assert ours == peer.vocab.tokenize(text, False, special), text


def test_long_texts_and_pieces_take_no_time_that_grows_with_their_square(tmp_path: Path) -> None:
    """Runs of a letter are the worst where neighbours join, pieces of 2,000 letters where all halves are sought."""
    long = sentencepiece()
    assert long.scores is not None
    pieces = [("ab" * 1000)[:length] for length in range(2, 2000)]
    vocabulary = replace(
        long, tokens=[*long.tokens, *pieces], kinds=[*long.kinds, *[1] * len(pieces)],
        scores=[*long.scores, *(-float(at) for at in range(len(pieces)))],
    )  # fmt: skip
    tokenizer = Tokenizer.load(write_vocabulary(tmp_path / "v.gguf", vocabulary))
    text = "ab" * 1000 + "e" * 30_000
    assert tokenizer.decode(tokenizer.encode(text, bos=False)) == " " + text


@pytest.mark.parametrize("kind", ["tiny_aya", "afmoe"])
def test_a_long_text_without_digits_is_cut_in_a_time_that_grows_with_it(tmp_path: Path, kind: str) -> None:
    """These cuts look for digits from each letter on: 64 kB took 20 s, and now less than one."""
    tokenizer = Tokenizer.load(write_vocabulary(tmp_path / "v.gguf", byte_level(kind)))
    text, start = "the cat " * 8000, process_time()
    assert tokenizer.decode(tokenizer.encode(text, bos=False)) == text
    assert process_time() - start < 5


END_NAMES = sorted(ENDS.union(*FILLS.values()))


@pytest.mark.parametrize("kind", [Kind.NORMAL, Kind.CONTROL, Kind.USER_DEFINED, Kind.UNUSED])
def test_tokens_end_a_text_by_their_names_whatever_their_type(tmp_path: Path, kind: Kind) -> None:
    """Those that llama.cpp takes for ends, and only those; they are never shown and not read from plain text."""
    sound = byte_level("llama-bpe")
    others = ["<|start_header_id|>", "<|fim_prefix|>", "<MID>", "<|eot|>", "[/INST]", "<|tool_calls|>"]
    first = len(sound.tokens)
    for index, group in enumerate([[name] for name in END_NAMES] + [others, ["<|end|>", "<|return|>", "<|call|>"],
                                                                ["<|end|>", "<|calls|>", "<|flush|>"]]):  # fmt: skip
        vocabulary = replace(sound, tokens=[*sound.tokens, *group], kinds=[*sound.kinds, *[int(kind)] * len(group)])
        path = write_vocabulary(tmp_path / f"{index}.gguf", vocabulary)
        tokenizer = Tokenizer.load(path)
        found = {tokenizer.tokens[token] for token in tokenizer.stops if token >= first}
        assert found == (set(group) & set(END_NAMES)) - ({"<|end|>"} if len(group) == 3 else set()), group
        for token in range(first, first + len(group)):
            if tokenizer.tokens[token] in found:
                assert tokenizer.decode([token]) == ""
                assert tokenizer.encode(tokenizer.tokens[token], bos=False) == [token]
                assert tokenizer.encode(tokenizer.tokens[token], bos=False, special=False) != [token]


def test_tokens_that_end_a_text_are_llama_cpps(tmp_path: Path) -> None:
    llama_cpp = pytest.importorskip("llama_cpp", reason="cyllama is not installed")
    sound = byte_level("llama-bpe")
    newer = "[e~["  # than the package
    names = [name for name in END_NAMES if name not in ("<|endoftext|>", "<|im_end|>", newer)]
    names += ["<|start_header_id|>", "<|fim_prefix|>", "<MID>", "<|eot|>"]
    for index, name in enumerate(names):
        vocabulary = replace(sound, tokens=[*sound.tokens, name], kinds=[*sound.kinds, int(Kind.NORMAL)])
        path = write_vocabulary(tmp_path / f"{index}.gguf", vocabulary)
        with llama_cpp.peer(path) as peer:
            tokenizer = Tokenizer.load(path)
            theirs = {token for token in range(len(tokenizer)) if peer.vocab.is_eog(token)}
            assert tokenizer.stops == theirs, name
            last = len(tokenizer) - 1
            assert (tokenizer.kinds[last] == Kind.CONTROL) == bool(peer.vocab.is_control(last)), name


def test_ends_that_a_file_lists_end_a_text(tmp_path: Path) -> None:
    """Ollama's converter writes those of generation_config.json, whose names may be any."""
    sound = byte_level("llama-bpe")
    usual = Tokenizer.load(write_vocabulary(tmp_path / "v.gguf", sound)).stops
    for listed, more in (([5, 6, 2**31 - 1, -1], {5, 6}), (["<|im_end|>"], set())):
        path = write_vocabulary(tmp_path / "listed.gguf", sound, **{"tokenizer.ggml.eos_token_ids": listed})  # type: ignore[arg-type]
        assert Tokenizer.load(path).stops == usual | more


def test_a_value_of_the_file_names_the_fill_tokens_that_end_a_text(tmp_path: Path) -> None:
    sound = byte_level("llama-bpe")
    tokens = [*sound.tokens, "<PAD>", "<|file_sep|>", "filler"]
    path = write_vocabulary(tmp_path / "v.gguf", replace(sound, tokens=tokens, kinds=[*sound.kinds, 3, 3, 3]))
    target = rewritten(path, tmp_path / "named.gguf", **{"tokenizer.ggml.fim_pad_token_id": len(tokens) - 1})
    found = [{tokens[token] for token in Tokenizer.load(file).stops} for file in (path, target)]
    common = {"<|im_end|>", "<|endoftext|>", "<|file_sep|>"}
    assert found == [common | {"<PAD>"}, common | {"filler"}]


@pytest.mark.parametrize("kind", [Kind.CONTROL, Kind.USER_DEFINED])
def test_glms_answers_end_where_another_turn_begins(tmp_path: Path, kind: Kind) -> None:
    """Their converters name the user's as the end of a turn, or none; without an observation the name says nothing."""
    sound = byte_level("llama-bpe")
    for names, more in (
        (["<|user|>", "<|observation|>"], {"<|user|>", "<|observation|>"}),
        (["<|user|>", "<|tool|>"], {}),
    ):
        tokens = [*sound.tokens, *names]
        path = write_vocabulary(tmp_path / "v.gguf", replace(sound, tokens=tokens, kinds=[*sound.kinds, kind, kind]))
        tokenizer = Tokenizer.load(path)
        assert {tokens[token] for token in tokenizer.stops} == {"<|im_end|>", "<|endoftext|>", *more}
        assert tokenizer.kinds[-2:] == [Kind.CONTROL if more else kind] * 2


@pytest.mark.parametrize("kind", NEW)
def test_a_text_is_cut_as_llama_cpps_present_source_does(kind: str) -> None:
    cuts = Cuts([Split(Regex(pattern), "isolated") for pattern in SPLITS[kind].patterns])
    assert [piece for piece, _ in cuts.pre_tokenize_str(NEW[kind].replace("|", ""))] == NEW[kind].split("|")


@pytest.mark.parametrize("kind", [*(kind for kind in KINDS if kind not in NEW), *OTHER_KINDS])
def test_tokens_are_llama_cpps(tmp_path: Path, kind: str) -> None:
    llama_cpp = pytest.importorskip("llama_cpp", reason="cyllama is not installed")
    path = write_vocabulary(tmp_path / "vocabulary.gguf", of_kind(kind))
    tokenizer = Tokenizer.load(path)
    with llama_cpp.peer(path) as peer:
        for text in texts(1, 200):
            text = text.replace("~", "^") if kind in TILDE else text
            for special in (True, False):
                ours = tokenizer.encode(text, bos=False, special=special)
                assert ours == peer.vocab.tokenize(text, False, special), text


@pytest.mark.parametrize("kind", [*KINDS, "gemma4"])
def test_a_first_short_text_has_the_tokens_of_any(tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_vocabulary(tmp_path / "vocabulary.gguf", of_kind(kind))
    with Gguf.open(path) as file:
        later = Tokenizer(file)
        later.encode("")
        for text in (*texts(3, 60), CORPUS[:BRIEF_CHARACTERS]):
            for special in (True, False):
                first = Tokenizer(file)
                with monkeypatch.context() as patch:
                    patch.setattr(Tokenizer, "_special", None)
                    patch.setattr(Tokenizer, "_raw", None)
                    tokens = first.encode(text, special=special)
                assert tokens == later.encode(text, special=special), text


ODD_MERGES = {
    "alike": ["{2}", "{1}", "{0}"],
    "of no tokens": ["t h", "th zz", "z z", "qq q", "{0}"],
    "to no token, and on to one": ["w or", "wor d", "Ġ q", "Ġq é", "à ©"],
    "without a space": ["the", "", " ", " th", "t  h", "t h e"],
}


@pytest.mark.parametrize("kind", ["llama-bpe", "gpt-2", "gemma4"])
@pytest.mark.parametrize("odd", ODD_MERGES)
def test_merges_that_make_no_sense_are_tolerated_as_by_llama_cpp(tmp_path: Path, odd: str, kind: str) -> None:
    """Also in a first short text, of whose parts alone a vocabulary is made."""
    llama_cpp = pytest.importorskip("llama_cpp", reason="cyllama is not installed")
    sound = of_kind(kind)
    merges = [one.format(*sound.merges) for one in ODD_MERGES[odd]] + sound.merges + sound.merges[::-1]
    path = write_vocabulary(tmp_path / "v.gguf", replace(sound, merges=merges))
    later = Tokenizer.load(path)
    later.encode("")
    words = ["thzz", "zz", "the zz the", "qqq qqqq", "word wor words", " qé qéq", "ThTHthe", "aé©"]
    with llama_cpp.peer(path) as peer, Gguf.open(path) as file:
        for at, text in enumerate([*words, *texts(5, 100)]):
            theirs = peer.vocab.tokenize(text, False, True)
            assert later.encode(text, bos=False) == theirs, text
            if at < 30:
                assert Tokenizer(file).encode(text, bos=False) == theirs, text


@pytest.mark.parametrize("text", ["", "<0x4>", "<0xGG>", "<0x041>", "byte"])
def test_a_byte_token_that_names_no_byte_is_refused_before_any_text(tmp_path: Path, text: str) -> None:
    sound = sentencepiece()
    wrong = replace(sound, tokens=[text if token == "<0x41>" else token for token in sound.tokens])
    with pytest.raises(GgufError, match=f"token 68 stands for a byte and is '{text}'"):
        Tokenizer.load(write_vocabulary(tmp_path / "v.gguf", wrong))
    small = replace(sound, tokens=[token.replace("<0xAB>", "<0xab>") for token in sound.tokens])
    assert Tokenizer.load(write_vocabulary(tmp_path / "v.gguf", small)).piece(3 + 0xAB) == b"\xab"


@pytest.mark.parametrize("kind", [*(kind for kind in SPLITS if kind not in NEW), *OTHER_KINDS])
def test_a_text_begins_as_llama_cpps_where_the_file_does_not_say(tmp_path: Path, kind: str) -> None:
    llama_cpp = pytest.importorskip("llama_cpp", reason="cyllama is not installed")
    vocabulary = of_kind(kind)
    path = write_vocabulary(tmp_path / "vocabulary.gguf", replace(vocabulary, add_bos=None))
    theirs = path
    if kind in NEWER:
        older = replace(vocabulary, add_bos=None, pre=NEWER[kind])
        theirs = write_vocabulary(tmp_path / "older.gguf", older)
    tokenizer = Tokenizer.load(path)
    with llama_cpp.peer(theirs) as peer:
        for text in ("the text", *texts(2, 12)):  # also that llama.cpp cuts by this name as by the others of its kind
            assert tokenizer.encode(text) == peer.vocab.tokenize(text, True, True), text


def test_the_manual_names_every_cut_and_counts_them() -> None:
    manual = (Path(__file__).parents[2] / "docs" / "llm.md").read_text()
    table = manual.split("| cut | other names |\n|---|---|\n")[1].split("\n\n")[0]
    names = [name for name in table.replace("|", ",").replace("\n", ",").replace(" ", "").split(",") if name]
    assert sorted(names) == sorted(SPLITS)
    assert f"cut by {len(SPLITS)} names" in manual


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return Tokenizer.load(write_vocabulary(tmp_path_factory.mktemp("vocabulary") / "v.gguf", byte_level("llama-bpe")))


def test_other_threads_go_on_while_tokens_are_made_of_a_long_text(tokenizer: Tokenizer) -> None:
    """Such as a server's loop, which answers other requests."""
    ticks, over = 0, Event()

    def tick() -> None:
        nonlocal ticks
        while not over.wait(0.001):
            ticks += 1

    thread = Thread(target=tick)
    text = "the sun and the moon " * 20_000
    tokenizer.encode(text[:10])
    tokenizer.encode(text[:1000])
    thread.start()
    before = ticks
    tokenizer.encode(text)
    ticked = ticks - before
    over.set()
    thread.join()
    assert ticked > 9  # a thread that holds the interpreter lets others go on some three times, at both ends


def test_a_stream_gives_whole_characters_that_add_up_to_the_text(tokenizer: Tokenizer) -> None:
    for text in texts(2, 200):
        stream = Stream(tokenizer, special=True)
        pieces = [stream.push(token) for token in tokenizer.encode(text, bos=False)]
        assert "\ufffd" not in "".join(pieces)
        assert "".join(pieces) + stream.finish() == text


def test_half_a_character_at_the_end_becomes_one_replacement(tokenizer: Tokenizer) -> None:
    tokens = tokenizer.encode("a🙂", bos=False)
    stream = Stream(tokenizer)
    assert "".join(stream.push(token) for token in tokens[:-1]) == "a"
    assert stream.finish() == "\ufffd"


def test_control_tokens_are_shown_only_on_demand(tokenizer: Tokenizer) -> None:
    tokens = tokenizer.encode("<|im_start|>hi<think>", bos=False)
    assert len(tokens) < len("<|im_start|>hi<think>")
    assert tokenizer.decode(tokens) == "hi<think>"
    assert tokenizer.decode(tokens, special=True) == "<|im_start|>hi<think>"


def test_beginning_and_stops_come_from_the_file(tokenizer: Tokenizer) -> None:
    assert tokenizer.encode("hi")[0] == tokenizer.bos
    assert tokenizer.encode("hi", bos=False)[0] != tokenizer.bos
    assert {tokenizer.tokens[token] for token in tokenizer.stops} == {"<|im_end|>", "<|endoftext|>"}
