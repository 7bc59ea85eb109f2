"""The training script: its corpus, its tokens, its network against the reference, its steps, its file."""

import argparse
import json
import random
import re
import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import gguf
import numpy as np
import pytest
import train_small
from click.testing import Result
from small_model import build, conversations, corpus, export, vocabulary
from small_model.network import Network, Recipe, Sizes, Trainer, initial
from typer.testing import CliRunner

from tegrad import cli
from tegrad.llm.errors import ModelError
from tegrad.llm.gguf import Gguf
from tegrad.llm.quality import negative_log_likelihood
from tegrad.llm.quantize import dequantize, quantize
from tegrad.llm.reference import Reference
from tegrad.llm.template import Template
from tegrad.llm.tokenizer import Tokenizer

CLANG = pytest.param("CPU", marks=pytest.mark.clang, id="CPU")
SIZES = Sizes(vocab=64, context=16, dim=256, ffn=256, layers=1, heads=4, kv_heads=2)
TINY = replace(SIZES, dim=32, ffn=32, heads=2, kv_heads=1)
RECIPE = Recipe(rows=4, warmup_steps=2, peak_lr=5e-3, dropout=0.0, half=False)


@pytest.fixture(scope="module")
def chapters():
    """A little bible of made-up verses, 60 chapters of it."""
    rng = random.Random(0)
    names = ["light", "darkness", "Noah", "waters", "the LORD", "people", "Moses", "said unto", "came, and", "went up."]
    return [
        corpus.Chapter("Genesis", number, tuple(" ".join(rng.choices(names, k=12)) + "." for _ in range(30)))
        for number in range(1, 61)
    ]


@pytest.fixture(scope="module")
def built(chapters):
    return build.build(chapters, talks=40)


@pytest.fixture(scope="module")
def model(built, tmp_path_factory):
    """A model of random weights in the script's own format, its path, sizes and weights."""
    tokenizer, data = built
    path = tmp_path_factory.mktemp("model") / "small.gguf"
    sizes = Sizes(vocab=data.vocab, context=32, dim=256, ffn=512, layers=2, heads=4, kv_heads=2)
    weights = {name: weight * 4 for name, weight in initial(sizes, 3).items()}
    export.write(path, sizes, weights, tokenizer)
    return SimpleNamespace(path=path, sizes=sizes, weights=weights)


def pack_lzw(data: bytes, clear_after: int | None = None) -> bytes:
    """What compress(1) writes after its header: codes of 9 to 16 bits in groups of eight."""
    bits: list[int] = []
    table = {bytes([value]): value for value in range(256)}
    width, group, size = 9, 0, 257

    def put(code: int) -> None:
        bits.extend(code >> bit & 1 for bit in range(width))

    def finish_group() -> int:
        bits.extend([0] * (-(len(bits) - group) % (8 * width)))
        return len(bits)

    prefix = b""
    for at, value in enumerate(data):
        if prefix + bytes([value]) in table:
            prefix += bytes([value])
            continue
        put(table[prefix])
        if size < 1 << 16:
            table[prefix + bytes([value])] = size
            size += 1
        if size > 1 << width and width < 16:
            group, width = finish_group(), width + 1
        prefix = bytes([value])
        if clear_after is not None and at == clear_after:
            put(256)
            group, width, size = finish_group(), 9, 257
            table = {bytes([byte]): byte for byte in range(256)}
    put(table[prefix])
    bits.extend([0] * (-len(bits) % 8))
    return bytes(sum(bit << i for i, bit in enumerate(bits[at : at + 8])) for at in range(0, len(bits), 8))


@pytest.mark.parametrize("clear_after", [None, 700], ids=["growing", "cleared"])
def test_lzw_unpacks_what_compress_packs(clear_after):
    rng = random.Random(1)
    text = bytes(rng.choices(b"abcd \n", k=6000)) + b"a" * 300
    assert corpus.unpack_lzw(pack_lzw(text, clear_after)) == text


def test_lzw_refuses_a_code_that_cannot_be():
    with pytest.raises(corpus.CorpusError, match="damaged"):
        corpus.unpack_lzw(b"\xff" * 64)


def test_another_text_is_refused():
    with pytest.raises(corpus.CorpusError, match="EC02"):
        corpus.unpack_bible(b"\0" * 1000)


def test_a_missing_package_is_named(monkeypatch, tmp_path):
    monkeypatch.setattr(corpus, "INSTALLED", tmp_path / "none")
    monkeypatch.setattr(shutil, "which", lambda name: None)
    with pytest.raises(corpus.CorpusError, match=corpus.PACKAGE):
        corpus.read_package()


def test_verses_become_chapters():
    text = "Holy Bible\nGe1:1 In the beginning.\nGe1:2 And.\nGe2:1 Thus.\n1Jn1:1 That.\n"
    found = corpus.chapters(text)
    assert [(c.book, c.number, c.verses) for c in found] == [
        ("Genesis", 1, ("In the beginning.", "And.")),
        ("Genesis", 2, ("Thus.",)),
        ("1 John", 1, ("That.",)),
    ]
    assert found[0].text == "Genesis 1\n\nIn the beginning.\nAnd.\n"
    with pytest.raises(corpus.CorpusError, match="out of order"):
        corpus.chapters("Holy Bible\nGe1:2 And.\n")


def test_nothing_held_out_is_trained_on(chapters, built):
    tokenizer, data = built
    _, held = corpus.split(chapters)
    assert len(held) == 3
    trained = tokenizer.decode(data.stream.tolist(), skip_special_tokens=False)
    assert chapters[0].verses[0] in trained
    assert not any(verse in trained for chapter in held for verse in chapter.verses)


def test_every_batch_is_text_after_a_begin_mark(built):
    tokenizer, data = built
    batch = data.batch(np.random.default_rng(0), 16)
    assert batch.shape == (16, build.CONTEXT + 1)
    assert (batch[:, 0] == data.bos).all()
    text = tokenizer.decode(data.stream.tolist(), skip_special_tokens=False)
    for row in batch.tolist():
        assert tokenizer.decode(row[1:], skip_special_tokens=False) in text


def test_batches_begin_where_a_line_or_a_document_does(built):
    tokenizer, data = built
    newline = tokenizer.token_to_id("Ċ")
    assert np.isin(data.stream[data.starts - 1], [newline, data.bos]).all()
    assert not (data.stream[data.starts] == newline).any()


def test_data_survives_its_file(built, tmp_path):
    _, data = built
    data.save(tmp_path / "data.npz")
    again = type(data).load(tmp_path / "data.npz")
    for field in ("stream", "starts"):
        np.testing.assert_array_equal(getattr(again, field), getattr(data, field))
    for field in ("inputs", "targets", "counted"):
        np.testing.assert_array_equal(getattr(again.held, field), getattr(data.held, field))
    assert (again.bos, again.vocab, again.held.text_bytes) == (data.bos, data.vocab, data.held.text_bytes)


@pytest.mark.parametrize(
    "text",
    [
        "And God said, Let there be light.\n\nThe LORD's  people:\n",
        "don't 1234 x--y \t\n \n z",
        "héé ☺ 日本",
        "<think>\n</think>",
    ],
    ids=["prose", "blanks", "unicode", "marks"],
)
def test_the_file_reads_text_as_the_training_did(built, model, text):
    tokenizer, _ = built
    read = Tokenizer.load(str(model.path))
    assert read.encode(text, bos=False) == tokenizer.encode(text).ids
    assert read.decode(read.encode(text)) == text


def test_marks_are_single_tokens_of_the_right_kind(built, model):
    read = Tokenizer.load(str(model.path))
    for mark in vocabulary.CONTROL + vocabulary.VISIBLE:
        (token,) = read.encode(mark, bos=False)
        assert read.decode([token]) == (mark if mark in vocabulary.VISIBLE else "")
    assert {read.tokens[token] for token in read.stops} == {vocabulary.EOS, vocabulary.TURN_END}


def test_conversations_read_the_same_through_the_files_template(chapters, model):
    with Gguf.open(model.path) as file:
        template = Template.of(file)
    assert template is not None
    kinds = set()
    for messages, tools in conversations.conversations(chapters, 40, seed=2):
        text = template.render(messages, tools=tools, reply=False)
        assert text == vocabulary.render(messages, tools)
        kinds |= {mark for mark in vocabulary.VISIBLE if mark in text}
        for call in re.findall(r"<tool_call>\n(.*)\n</tool_call>", text):
            assert json.loads(call)["name"] == "read_verse"
    assert kinds == set(vocabulary.VISIBLE)


def test_the_template_opens_a_reply_and_can_ask_for_thought(model):
    with Gguf.open(model.path) as file:
        template = Template.of(file)
    assert template is not None
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Speak."}]
    start = vocabulary.BOS + "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nSpeak.<|im_end|>\n"
    assert template.render(messages) == start + "<|im_start|>assistant\n"
    assert template.render(messages, enable_thinking=True) == start + "<|im_start|>assistant\n<think>\n"


def test_the_file_holds_both_quantizations_and_no_row_that_k_quants_cannot(model):
    with Gguf.open(model.path) as file:
        matrices = [info for info in file.tensors.values() if len(info.shape) == 2]
        assert {info.type.name for info in matrices} == {"Q6_K", "Q8_0"}
        assert all(info.columns % 256 == 0 for info in matrices)
        assert all(info.type.name == "F32" for info in file.tensors.values() if len(info.shape) == 1)


def test_a_model_too_large_is_not_written(built, tmp_path):
    tokenizer, data = built
    sizes = Sizes(vocab=data.vocab, layers=16, ffn=768)
    with pytest.raises(ValueError, match="smaller"):
        export.write(tmp_path / "large.gguf", sizes, initial(sizes, 0), tokenizer)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("device", [CLANG])
def test_the_network_is_the_reference(device, model):
    """The graph that is trained and the file that is shipped compute the same: cuts, rope, groups, norms."""
    stored = {}
    for name, weight in model.weights.items():
        parts = export.tensors(model.sizes, {name: weight})
        kinds = {part: export.kind_of(part, value) for part, value in parts.items()}
        rounded = [
            value if kind == gguf.GGMLQuantizationType.F32 else dequantize(quantize(value, kind), kind)
            for value, kind in zip(parts.values(), kinds.values(), strict=True)
        ]
        stored[name] = np.concatenate(rounded)
    tokens = np.random.default_rng(5).integers(0, model.sizes.vocab, (3, 33)).astype(np.int32)
    trainer = Trainer(Network(model.sizes, replace(RECIPE, rows=2), stored, device))
    ours = trainer.held_out(tokens[:, :-1], tokens[:, 1:])
    reference = Reference(model.path)
    for row, losses in zip(tokens, ours, strict=True):
        theirs = negative_log_likelihood(reference.logits(row[:-1]), row[1:])
        np.testing.assert_allclose(losses, theirs, rtol=2e-4, atol=2e-4)


@pytest.fixture(scope="module", params=[CLANG])
def trainer(request):
    """One recorded step serves every test of training: recording it is what takes time."""
    return Trainer(Network(TINY, replace(RECIPE, dropout=0.2, half=True), initial(TINY, 0), request.param))


def restart(trainer: Trainer, gain: float = 1.0) -> None:
    """Weights and moments as at the beginning."""
    for name, weight in initial(TINY, 0).items():
        trainer.network.weights[name].assign(trainer.network.tensor(weight * gain)).realize()
    for moment in (*trainer.first, *trainer.second):
        moment.assign(trainer.network.tensor(np.zeros(moment.shape, np.float32))).realize()
    trainer.steps = 0


COUNTING = np.arange(17, dtype=np.int32)[None] + np.arange(4, dtype=np.int32)[:, None]


def test_training_learns(trainer):
    restart(trainer)
    losses = [float(trainer.step(COUNTING, 1e-2).numpy()[0]) for _ in range(40)]
    assert losses[0] == pytest.approx(np.log(TINY.vocab), abs=0.5)
    assert losses[-1] < 0.5 * losses[0]
    measured = trainer.held_out(COUNTING[:, :-1], COUNTING[:, 1:])
    assert measured.mean() < losses[-1]  # without dropout


def test_a_broken_gradient_counts_as_none(trainer):
    restart(trainer)
    scale = trainer.network.weights["output_norm"]
    scale.assign(trainer.network.tensor(np.full(TINY.dim, np.inf, np.float32))).realize()
    assert np.isnan(trainer.step(COUNTING, 1e-2).numpy()).all()
    trained = trainer.network.read()
    assert all(np.isfinite(weight).all() for name, weight in trained.items() if name != "output_norm")


def test_dropout_changes_with_every_step_and_leaves_measurements_alone(trainer):
    restart(trainer, gain=5)
    trained = {round(float(trainer.step(COUNTING, 0.0).numpy()[0]), 5) for _ in range(5)}
    assert len(trained) == 5
    measured = [trainer.held_out(COUNTING[:, :-1], COUNTING[:, 1:]) for _ in range(2)]
    np.testing.assert_array_equal(measured[0], measured[1])


def test_the_learning_rate_warms_up_and_comes_down():
    recipe = Recipe(warmup_steps=10, peak_lr=1e-3, final_lr=1e-5)
    rates = [train_small.learning_rate(recipe, step, step / 100) for step in range(101)]
    assert rates[0] < 1.1e-4
    assert rates.index(max(rates)) in (9, 10, 11)
    assert rates[100] == pytest.approx(1e-5)


def test_weights_survive_their_file(tmp_path):
    weights = initial(SIZES, 1)
    train_small.save(tmp_path / "weights.npz", SIZES, weights)
    sizes, again = train_small.load(tmp_path / "weights.npz")
    assert sizes == SIZES
    assert again.keys() == weights.keys()
    for name, weight in weights.items():
        np.testing.assert_allclose(again[name], weight, rtol=1e-3, atol=1e-7)
    assert [path.name for path in tmp_path.iterdir()] == ["weights.npz"]


def test_settings_are_checked_by_name():
    parse = train_small._settings(Recipe)
    assert parse("dropout=0.1,half=false") == {"dropout": 0.1, "half": False}
    with pytest.raises(argparse.ArgumentTypeError, match="dropuot"):
        parse("dropuot=0.1")


def test_export_puts_the_model_beside_what_it_is_measured_with(built, tmp_path):
    tokenizer, data = built
    sizes = replace(SIZES, vocab=data.vocab)
    prepared, out, target = (tmp_path / name for name in ("data", "out", "models"))
    for folder in (prepared, out):
        folder.mkdir()
    tokenizer.save(str(prepared / train_small.TOKENIZER))
    (prepared / train_small.HELD_OUT).write_text("Genesis 1\n")
    (prepared / train_small.WORDS).write_text("Genesis\n")
    train_small.save(out / train_small.WEIGHTS, sizes, initial(sizes, 0))
    (out / train_small.CURVE).write_text("{}")
    train_small.export(argparse.Namespace(data=prepared, out=out, to=target))
    names = {Path(path).name for path in target.iterdir()}
    assert names == {"small.gguf", "small.held-out.txt", "small.words.txt", "train-small.json"}
    assert np.isfinite(Reference(target / "small.gguf").logits([0, 1, 2])).all()


def _eval(*arguments: str) -> Result:
    return CliRunner().invoke(cli.build(["eval"]), ["eval", *arguments])


@pytest.fixture
def measured(tmp_path):
    """A held-out text of two documents and its words, as options of `tegrad eval`."""
    (tmp_path / "text").write_text("And God said.\n\fLet there be light.\n")
    (tmp_path / "words").write_text("And\nGod\nsaid\n")
    return ["--text", str(tmp_path / "text"), "--words", str(tmp_path / "words")]


def test_eval_prints_both_figures(model, measured):
    done = _eval(str(model.path), *measured, "--tokens", "30", "--seed", "1", "--json")
    assert done.exit_code == 0, done.output
    figures = json.loads(done.stdout)
    reference, tokenizer = Reference(model.path), Tokenizer.load(str(model.path))
    nats = 0.0
    for text in ("And God said.\n", "Let there be light.\n"):
        tokens = [tokenizer.bos, *tokenizer.encode(text, bos=False), tokenizer.eos]
        nats += negative_log_likelihood(reference.logits(tokens[:-1]), tokens[1:]).sum()
    assert figures["held_out_bytes"] == 34
    assert figures["bits_per_byte"] == pytest.approx(nats / np.log(2) / 34, abs=1e-3)
    assert figures["sampled_tokens"] == 30
    shown = _eval(str(model.path), *measured, "--tokens", "30", "--seed", "1", "--show").stdout
    assert f"{figures['bits_per_byte']:.3f} bits a byte" in shown
    assert f"{figures['known_words_percent']:.1f}%" in shown


def test_eval_names_a_text_that_is_missing(model, measured):
    done = _eval(str(model.path), "--text", "/nowhere/text", *measured[2:])
    assert isinstance(done.exception, ModelError)
    assert "/nowhere/text" in str(done.exception)
