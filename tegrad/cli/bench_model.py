"""`tegrad bench model`, `compare` and `report`: a model in llama-bench's columns, two results side by side, a page."""

from __future__ import annotations

import dataclasses
import json
import os
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from tegrad.hub.cache import located

DEFAULT = Path("results")
LLAMA = "llama.cpp"


def _numbers(text: str) -> list[int]:
    """Whole numbers between commas, as llama-bench takes them."""
    try:
        found = [int(word) for word in text.split(",")]
    except ValueError as error:
        raise typer.BadParameter(f"{text!r} is no list of numbers, such as 512 or 128,512") from error
    if min(found) < 0:
        raise typer.BadParameter(f"{min(found)} is below 0")
    return found


def model(
    files: Annotated[
        list[Path], typer.Argument(metavar="MODEL...", parser=located, help="GGUF files or pulled models.")
    ],
    prompts: Annotated[
        str, typer.Option("-p", "--n-prompt", metavar="N[,N]", help="Tokens of prompts; 0 for none.")
    ] = "512",
    generated: Annotated[
        str, typer.Option("-n", "--n-gen", metavar="N[,N]", help="Tokens to decode; 0 for none.")
    ] = "128",
    depths: Annotated[str, typer.Option("-d", "--n-depth", metavar="N[,N]", help="Tokens in the cache before.")] = "0",
    sequences: Annotated[
        str, typer.Option("--sequences", metavar="N[,N]", help="Sequences that decode together.")
    ] = "1",
    repetitions: Annotated[
        int, typer.Option("-r", "--repetitions", min=1, help="Of each test, but for the first.")
    ] = 5,
    form: Annotated[
        Literal["md", "csv", "json", "jsonl"], typer.Option("-o", "--output", help="The rows' form.")
    ] = "md",
    cache: Annotated[Literal["f16", "q8_0"], typer.Option(help="Keys and values.")] = "f16",
    vs: Annotated[
        str, typer.Option("--vs", metavar=LLAMA, help="Also run llama-bench (on the PATH, or in TEGRAD_LLAMA).")
    ] = "",
) -> None:
    """Measure a model: loading, prompts (pp), decoding (tg), at depths, in batches; rows with llama-bench's columns.

    A row comes as soon as it is measured. On an emulated board the times are
    the emulation's. `tegrad bench compare` and `tegrad bench report` read
    -o json and -o jsonl.
    """
    from tegrad.bench.gpu import check_gpu
    from tegrad.llm.start import choose_device

    if vs not in ("", LLAMA):
        raise typer.BadParameter(f"the only peer is {LLAMA}", param_hint="--vs")
    lists = [_numbers(text) for text in (prompts, generated, depths, sequences)]
    if 0 in lists[3]:
        raise typer.BadParameter("at least one sequence decodes", param_hint="--sequences")
    check_gpu()
    choose_device()
    from tegrad.bench import columns, peers
    from tegrad.bench import model as bench

    wanted = bench.cases(*lists)
    for name in {"llama-batched-bench" if case.sequences > 1 else "llama-bench" for case in wanted} if vs else ():
        peers.program(name)

    def rows() -> Iterator[Mapping[str, Any]]:
        command = ["tegrad", *sys.argv[1:]]
        for path in files:
            yield from bench.measured(path, wanted, repetitions, command, q8=cache == "q8_0")
            if vs:
                yield from bench.peer(path, wanted, repetitions, q8=cache == "q8_0")

    for piece in columns.FORMS[form](rows()):
        typer.echo(piece, nl=False)


def compare(
    before: Annotated[
        Path, typer.Argument(metavar="A", help="The older: a JSON file of rows or samples, or a folder.")
    ],
    after: Annotated[Path, typer.Argument(metavar="B", help="The newer one.")],
    json_: Annotated[bool, typer.Option("--json", help="A JSON list instead of the table.")] = False,
) -> None:
    """Say what changed between two results by more than noise; exit code 1 if something became worse.

    Both are rows of `tegrad bench model -o json` (or of llama-bench), samples
    files, or folders of those. A change is one that samples hardly show by
    chance (Mann and Whitney's test, 5%) and of at least 1%; where a side has
    fewer than four samples, of at least 5%.
    """
    from tegrad.bench import columns as bench

    changes = bench.compare(bench.read(before), bench.read(after))
    if json_:
        typer.echo(json.dumps([dataclasses.asdict(row) for row in changes]))
    else:
        typer.echo(bench.HEAD)
        for row in changes:
            typer.echo(bench.text(row))
    raise typer.Exit(any(row.verdict == "worse" for row in changes))


def tuning(
    questions: Annotated[
        list[str] | None, typer.Argument(help="Questions; all that can be asked here if left out.")
    ] = None,
    json_: Annotated[bool, typer.Option("--json", help="A JSON list instead of the table.")] = False,
    list_: Annotated[bool, typer.Option("--list", help="The questions, and which command answers each.")] = False,
) -> None:
    """Ask this GPU open questions of how it is best driven; exit code 1 if what it computed was wrong.

    Most need a Jetson's drivers. On an emulated board answers are right or
    wrong, and times are the emulation's.
    """
    from tegrad.bench.gpu import check_gpu
    from tegrad.llm.start import choose_device

    if not list_:
        check_gpu()
        choose_device()
    from tegrad.bench import tuning as bench

    if unknown := sorted(set(questions or ()) - set(bench.QUESTIONS)):
        raise typer.BadParameter(f"no question {unknown[0]}; known: {', '.join(bench.QUESTIONS)}")
    if list_:
        for name, one in bench.QUESTIONS.items():
            typer.echo(f"{name:12} {one.asks:60} {one.command or 'tegrad bench tuning ' + name}")
        return
    rows = []
    for row in bench.answers(questions or bench.QUESTIONS):
        rows.append(row)
        if not json_:
            typer.echo(bench.text(row))
    if json_:
        typer.echo(json.dumps([dataclasses.asdict(row) for row in rows]))
    raise typer.Exit(not all(row.right for row in rows))


def report(
    rows: Annotated[
        list[Path] | None,
        typer.Argument(
            help="Rows of `bench model -o json` or `bench tinygrad --record`; the results folder if left out."
        ),
    ] = None,
    out: Annotated[Path, typer.Option("-o", "--out", help="The page.")] = Path("report.html"),
    results: Annotated[Path, typer.Option("--results", help="The results folder.")] = DEFAULT,
) -> None:
    """Write results as one HTML page with plots, which opens without a network (needs the extra `bench`)."""
    from tegrad.bench import report as bench

    page = bench.of_rows(rows) if rows else bench.of_results(results)
    out.write_text(page.html())
    typer.echo(f"{out}: {len(page.rows)} rows, {len(page.plots)} plots ({os.path.getsize(out) >> 10} KiB)")
