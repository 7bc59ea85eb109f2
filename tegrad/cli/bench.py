"""`tegrad bench`: take samples, keep them, and compute results/figures.json from them."""

from __future__ import annotations

import json
import os
import shlex
import sys
from collections.abc import Callable, Collection, Iterable
from dataclasses import asdict
from functools import wraps
from inspect import Parameter, signature
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.models import CommandInfo

from tegrad.cli import bench_model, options
from tegrad.hub.cache import located

if TYPE_CHECKING:
    from tegrad.bench.record import Record

MODEL_HELP = "A GGUF file or a pulled model's name."
_HELP = {"help_option_names": ["-h", "--help"]}
app = typer.Typer(no_args_is_help=True, context_settings=_HELP)
serve = typer.Typer(no_args_is_help=True, context_settings=_HELP)
app.add_typer(
    serve,
    name="serve",
    help="Measure `tegrad serve` under load: beside llama-server, beside its engine.",
    short_help="Measure `tegrad serve` under load, beside llama-server.",
    epilog="tegrad bench serve load 1b-q6k",
)

Root = Annotated[Path, typer.Option("--results", help="The results folder.")]
Json = Annotated[bool, typer.Option("--json", help="A JSON list on the last line.")]
Model = Annotated[Path, typer.Argument(metavar="MODEL", parser=located, help=MODEL_HELP)]
Form = Annotated[str, typer.Option("--dependency", help="A form of `tegrad bench dependencies`.")]
DEFAULT = Path("results")
Out = Annotated[
    Path | None, typer.Option(file_okay=False, help="A folder for samples and rows, instead of the results folder.")
]


def _known(kind: str, given: Iterable[str], known: Collection[str]) -> None:
    """A usage error for names that are none."""
    if unknown := sorted(set(given) - set(known)):
        raise typer.BadParameter(f"no {kind} {', '.join(unknown)}; known: {', '.join(known)}")


def _form(name: str) -> str:
    """The name of a form that a launch can wait for the one before in."""
    from tegrad.bench.dependencies import ALL_FORMS

    _known("dependency", [name], ALL_FORMS)
    return name


def _last(rows: object, asked: bool) -> None:
    """The last line: rows as JSON, where that was asked for."""
    if asked:
        typer.echo(json.dumps(rows))


def _name(command: CommandInfo) -> str:
    return command.name or str(getattr(command.callback, "__name__", ""))


@app.command(
    epilog="tegrad bench figures --no-measure",
    short_help="Measure again what needs no GPU, and recompute figures.json.",
)
def figures(
    results: Root = DEFAULT,
    check: Annotated[
        bool, typer.Option("--check", help="Only compare; exit code 1 if a row is not what its samples give.")
    ] = False,
    measure: Annotated[bool, typer.Option(help="Measure first; --no-measure only recomputes.")] = True,
    json_: Annotated[bool, typer.Option("--json", help="A JSON list of rows and their ages on the last line.")] = False,
) -> None:
    """Measure again what is quick and needs no GPU, and recompute every row of figures.json from its samples.

    In a checkout README's table is written from the rows, and each row says how many commits older it is than the code
    that it measures.
    """
    from tegrad.bench.figures import Results, as_json, readme_beside, with_table
    from tegrad.bench.measures import MEASURES

    folder, page = Results(results), readme_beside(results)
    folder.require()
    if check:
        stale = folder.stale()
        for id in stale:
            typer.echo(f"{id}: the row differs from its samples", err=True)
        if old := page.exists() and with_table(page.read_text(), folder.stored()) != page.read_text():
            typer.echo(f"{page}: the table differs from the rows; run `tegrad bench figures --no-measure`", err=True)
        raise typer.Exit(1 if stale or old else 0)
    for id in MEASURES if measure else ():
        if MEASURES[id].ready:
            typer.echo(f"measuring {id} ...", err=True)
            folder.add(MEASURES[id].take())
    rows = folder.recompute()
    if page.exists():
        page.write_text(with_table(page.read_text(), rows))
    ages = [folder.age(row) for row in rows]
    for row, age in zip(rows, ages, strict=True):
        mark = f"  {age.mark}" if age and age.mark else ""
        typer.echo(f"{row['id']:32} {row['ours']:>12g} {row['unit']:8} ratio {row['ratio']}  {row['machine']}{mark}")
    _last([as_json(row, age) for row, age in zip(rows, ages, strict=True)], json_)


@app.command(epilog="tegrad bench take first-run-tok-s")
def take(
    id: Annotated[str, typer.Argument(help="The figure, as in `tegrad bench list`.")],
    out: Annotated[
        Path | None, typer.Option(help="A file for the samples, or a folder for it, instead of the results.")
    ] = None,
    results: Root = DEFAULT,
) -> None:
    """Measure one figure on this machine."""
    from tegrad.bench.figures import Results
    from tegrad.bench.gpu import check_gpu
    from tegrad.bench.measures import MEASURES

    _known("figure", [id], MEASURES)
    if out is not None and out.is_dir():
        out /= f"{id}.json"
    elif out is not None and not out.parent.is_dir():
        raise typer.BadParameter(f"{out.parent} is no folder", param_hint="--out")
    if MEASURES[id].needs_gpu:
        check_gpu()
    record = MEASURES[id].take()
    if out is None:
        Results(results).add(record)
    else:
        record.dump(out)
    typer.echo(json.dumps({"id": record.id, "median": record.ours.median, "unit": record.unit}))


@app.command(epilog="tegrad bench add decode-1b-q6k-d0.json")
def add(
    samples: Annotated[list[Path], typer.Argument(help="Samples files taken on another machine.")],
    results: Root = DEFAULT,
) -> None:
    """Keep samples that were taken elsewhere, and recompute the rows."""
    from tegrad.bench.figures import Results
    from tegrad.bench.record import Record

    folder = Results(results)
    for path in samples:
        folder.add(Record.load(path))


@app.command(epilog="tegrad bench ptx --json")
def ptx(json_: Annotated[bool, typer.Option("--json", help="One JSON object on the last line.")] = False) -> None:
    """Measure the PTX engine: lane-instructions per second and core, launches and compile times."""
    from tegrad.bench.engine import report

    rows = report()
    for row in () if json_ else rows:
        typer.echo(f"{row.name:18} {row.median:>9.3g} {row.unit:8} {row.low:>9.3g} to {row.high:<9.3g} {row.what}")
    _last({row.name: row._asdict() for row in rows}, json_)


@app.command(epilog="tegrad bench dependencies chain chain-lean")
def dependencies(
    forms: Annotated[list[str] | None, typer.Argument(help="Forms to measure; all if left out.")] = None,
    json_: Json = False,
) -> None:
    """Measure what a launch dependency costs (a kernel waits for the one before), in each form that a recording has."""
    from tegrad.bench.dependencies import ALL_FORMS, show

    _known("form", forms or (), ALL_FORMS)
    _last(show(forms or ()), json_)


@app.command(
    epilog="tegrad bench decode decode-3b-q6k --plan one",
    short_help="Measure decoding and prompts, ours and llama.cpp's in turn.",
)
def decode(
    figures: Annotated[
        list[str] | None,
        typer.Argument(
            help="Figures; all that are compared with llama.cpp if left out. Of any model: decode-SHAPE-FORMAT, "
            "prefill-SHAPE-FORMAT, kept only with --out."
        ),
    ] = None,
    plan: Annotated[str, typer.Option(help="The kind of step; as `tegrad run` chooses if left out.")] = "",
    dependency: Annotated[str, typer.Option(help="How a launch waits for the one before (bench dependencies).")] = "",
    pick: Annotated[
        str,
        typer.Option(help="The instruction for prompts and batches: mma, or wgmma on Hopper; the quicker if left out."),
    ] = "",
    steps_per_submission: Annotated[int, typer.Option(min=1, help="Steps in one submission.")] = 1,
    alone: Annotated[
        bool, typer.Option("--alone", help="Ours only: to tune it, or where the peer is missing.")
    ] = False,
    json_: Json = False,
    out: Out = None,
    results: Root = DEFAULT,
) -> None:
    """Measure decoding and prompts, ours and llama.cpp's in turn, beside the targets; exit code 1 if a figure fails."""
    from tegrad.bench.figures import SIDE_BY_SIDE, TARGETS, target
    from tegrad.bench.gpu import check_gpu
    from tegrad.bench.models import ModelNameError, parse
    from tegrad.llm.start import choose_device

    for name in figures or ():
        try:
            parse(target(name).model)
        except KeyError:
            _known("figure", [name], TARGETS)
        except ModelNameError as error:
            raise typer.BadParameter(str(error)) from error
    check_gpu()
    choose_device()
    from tegrad.bench import decode as bench
    from tegrad.bench.record import RecordError

    try:
        ways = bench.Ways(plan, dependency, pick, alone, steps_per_submission)
    except RecordError as error:
        raise typer.BadParameter(str(error)) from error
    ids = figures or SIDE_BY_SIDE
    bench.prepare(ids)
    lines = []
    typer.echo(bench.HEAD)
    for line, record in bench.measured(ids, ways):
        lines.append(asdict(line))
        typer.echo(bench.text(line))
        if record is not None and (out is not None or record.id in TARGETS):
            _keep(record, out, results)
    _last(lines, json_)
    raise typer.Exit(any(line["error"] for line in lines))


@app.command(
    epilog="tegrad bench tinygrad launch matmul-f16-2048 --vs torch",
    short_help="Measure tinygrad's own work through NV and through a peer.",
)
def tinygrad(
    rows: Annotated[
        list[str] | None,
        typer.Argument(help="Rows, such as launch or matmul-f16-2048 (all are listed above); all if left out."),
    ] = None,
    vs: Annotated[
        str, typer.Option(help="The peer: cuda (tinygrad as published), torch (PyTorch, eagerly) or torch-graphs.")
    ] = "cuda",
    rounds: Annotated[int, typer.Option(min=1, help="How often each side does a row.")] = 5,
    record: Annotated[
        Path | None, typer.Option(help="Keep the rows here as JSON, with machine and versions, as they are done.")
    ] = None,
    json_: Json = False,
    out: Out = None,
    results: Root = DEFAULT,
) -> None:
    """Measure tinygrad's own work through NV and through a peer in turn; exit code 1 if a row fails.

    A line has both sides' microseconds a call; a ratio above 1 says that NV
    is faster. What both sides compute is compared: a difference is an error.
    Every peer needs a real GPU and libcuda.so, PyTorch also what
    `pip install torch` brings. tinygrad's own settings, such as NOOPT=1 or
    BEAM=2, hold for both sides. Samples become figures of the results folder
    if the peer is cuda, the GPU is a real one, each side does at least 5
    rounds, and neither NOOPT, BEAM nor JITBEAM is set.

    \b
    launch, stream, mlp                      TinyJit calls
    matmul-f16-SIZE, matmul-f32-SIZE         256, 512, 1024, 2048, 4096
    add-SIZE, mul-SIZE, exp-SIZE, relu-SIZE  1m, 10m elements
    copyin-SIZE, copyout-SIZE                1mb, 16mb, 64mb, 256mb
    copy-SIZE (within the GPU)               1mb, 16mb, 256mb
    alloc-SIZE (allocate and free)           1mb, 64mb
    gpt2-f32-124m, gpt2-f16-124m             a token
    """
    from tegrad.bench import versus
    from tegrad.bench.gpu import check_gpu
    from tegrad.bench.record import RecordError

    _known("peer", [vs], versus.PEERS)
    _known("row", rows or (), versus.ROWS)
    check_gpu()
    done: list[versus.Compared | RecordError] = []
    typer.echo(versus.HEAD)
    for row in versus.measured(rows or versus.ROWS, vs, rounds):
        done.append(row)
        if isinstance(row, RecordError):
            typer.echo(f"tegrad: {row}", err=True)
        else:
            typer.echo(versus.text(row))
        if record is not None:
            text = json.dumps(versus.document(done, vs, shlex.join(["tegrad", *sys.argv[1:]])), indent=1)
            record.write_text(text + "\n")
    found = {row.row: row for row in done if isinstance(row, versus.Compared)}
    if vs == "cuda" and rounds >= versus.ROUNDS and not versus.settings():
        for figure in versus.records(found, "tegrad bench tinygrad"):
            _keep(figure, out, results)
    _last([versus.as_json(row) for row in found.values()], json_)
    raise typer.Exit(len(found) < len(done))


@app.command(epilog="tegrad bench quality small-1b-q6k")
def quality(
    models: Annotated[
        list[str] | None, typer.Argument(help="Models, such as 1b-q6k or small-1b-q6k; all small ones if left out.")
    ] = None,
    engine: Annotated[list[str] | None, typer.Option(help="Engines; all if left out.")] = None,
    tokens: Annotated[int | None, typer.Option(min=8, help="Tokens to feed; 1920 if left out.")] = None,
    results: Root = DEFAULT,
) -> None:
    """Compare our logits, and llama.cpp's, with exact ones; exit code 1 if ours are further from them."""
    from tegrad.llm.start import choose_device, described

    choose_device()
    from tegrad.bench.quality import CASES, ENGINES, FILE, TOKENS, compare, merge
    from tegrad.llm.device import open_device

    _known("engine", engine or (), ENGINES)
    device = open_device()
    name, where = device.split()[0], described(device)
    behind = False
    head = f"{'model':22} {'engine':13} {'':9} {'max':>9} {'mean':>9} {'KL':>9} {'top-1':>6}\n"
    for model in models or CASES:
        left = list(engine or ENGINES)
        for row in compare(model, tuple(left), name, where, tokens or TOKENS):
            left.remove(row.engine)
            merge(results / FILE, [row])
            behind |= not row.within
            typer.echo(head, nl=False)
            head = ""
            for label, side in (("ours", row.ours), ("llama.cpp", row.llama_cpp)):
                figures = f"{side.max_error:9.2g} {side.mean_error:9.2g} {side.divergence:9.2g} {side.top1:6.1%}"
                typer.echo(f"{row.model:22} {row.engine:13} {label:9} {figures}")
        for refused in left:
            typer.echo(f"{model:22} {refused:13} refuses this model")
    raise typer.Exit(behind)


@app.command(epilog="tegrad bench perplexity model.gguf")
def perplexity(
    model: Model,
    tokens: Annotated[int | None, typer.Option(min=8, help="Tokens to feed; 16384 if left out.")] = None,
    threads: Annotated[int | None, typer.Option(min=1, help="llama.cpp's; all cores if left out.")] = None,
    out: Out = None,
    results: Root = DEFAULT,
) -> None:
    """Compare a model's perplexity on a fixed text, the shipped model's held-out one, with CPU llama.cpp's.

    The row goes into results/perplexity.json. Of a published model (tools/published.py) on a real GPU, with 16,384
    tokens or more, it becomes the figure ppl-smollm2 or ppl-gemma3, too.
    """
    from tegrad.cli.run import progress
    from tegrad.llm.start import choose_device, described, speaker

    choose_device()
    from tegrad.bench import perplexity as bench
    from tegrad.llm.device import open_device
    from tegrad.llm.gguf import Gguf
    from tegrad.nv.kernel import emulated

    texts, done = bench.windows(model, tokens or bench.TOKENS), []
    device = open_device()
    typer.echo(f"{'tokens':>7} {'ours':>10} {'llama.cpp':>10} {'ratio':>8}")
    with Gguf.open(model) as file:
        session, steps = speaker(file, max(map(len, texts)), progress=progress(model))
        for window in bench.compare(model, bench.scoring(session), texts, threads or os.cpu_count() or 1):
            done.append(window)
            found = bench.Perplexity.of(done, sum(map(len, texts[: len(done)])))
            typer.echo(f"{found.tokens:7} {found.ours:10.4f} {found.llama_cpp:10.4f} {found.ratio:8.5f}")
    name = bench.name_of(model)
    bench.merge((out or results) / bench.TABLE, name or model.name, described(device), steps, found)
    if name and not emulated() and found.tokens >= bench.TOKENS:
        _keep(bench.record(name, found, shlex.join(["tegrad", *sys.argv[1:]])), out, results)


@app.command(epilog="tegrad bench kernels --plan prefill")
def kernels(
    static: Annotated[bool, typer.Option("--static", help="What the compilers made of them; needs no GPU.")] = False,
    model: Annotated[str, typer.Option(help="SHAPE-FORMAT, as in tegrad.bench.models.")] = "1b-q6k",
    plan: Annotated[
        str,
        typer.Option(
            help="decode, persistent-near, persistent, persistent-far, draw, batch8, batch32, prefill, prefill-wgmma, "
            "prefill-short or load; not with --static."
        ),
    ] = "decode",
    out: Annotated[
        Path | None, typer.Option(help="Of --static: a file other than results/kernels-static.json.")
    ] = None,
) -> None:
    """What each kernel of a step costs, and how near to the memory's bandwidth it comes.

    With --static, of every plan: registers, spills, shared memory, occupancy, loads, bytes and instructions.
    """
    from tegrad.bench import kernels as table
    from tegrad.bench.plans import PLANS, plans_of
    from tegrad.hw.chips import CHIPS

    if not static:
        from tegrad.bench.steps import show_stages

        _known("plan", [plan], PLANS)
        show_stages(model, plan)
        return
    tables = {}
    for chip in table.CHIPS_SHOWN:
        tables[chip] = {plan: table.plan_table(CHIPS[chip], model, plan) for plan in plans_of(CHIPS[chip].arch)}
        for plan, rows in tables[chip].items():
            typer.echo(f"{chip}, {plan} of {model}\n{table.text(rows)}\n")
    path = out or DEFAULT / "kernels-static.json"
    path.write_text(json.dumps(table.document(model, tables), indent=1) + "\n")


@app.command(epilog="tegrad bench products 1b-q6k --sweep 3")
def products(
    models: Annotated[list[str], typer.Argument(help="SHAPE-FORMAT, as in tegrad.bench.models.")],
    sweep: Annotated[
        int, typer.Option(help="Try every configuration of each product and print this many of the best.")
    ] = 0,
    dependency: Form = "chain-lean",
    json_: Json = False,
) -> None:
    """Bytes, time and share of the bandwidth of a decode step's matrix products, in one or in all configurations."""
    from tegrad.bench.models import parse
    from tegrad.bench.products import show_products

    for model in models:
        parse(model)
    _last(show_products(models, sweep, _form(dependency)), json_)


@app.command(epilog="tegrad bench attention 1b --depths 4096")
def attention(
    models: Annotated[list[str], typer.Argument(help="Shapes, as in tegrad.bench.models: 1b, 3b, 8b, qwen3-0.6b, ...")],
    depths: Annotated[list[int] | None, typer.Option(help="Positions before the token's; 0, 4096, 16384.")] = None,
    cache: Annotated[str, typer.Option(help="f16 or q8_0.")] = "f16",
    sequences: Annotated[int, typer.Option(help="Sequences that are decoded together.")] = 1,
    sweep: Annotated[int, typer.Option(help="Try every cut and print this many of the best at each depth.")] = 0,
    dependency: Form = "chain-lean",
    json_: Json = False,
) -> None:
    """Bytes, time and share of the bandwidth of a decode step's attention, by depth."""
    from tegrad.bench.models import SHAPES
    from tegrad.bench.products import DEPTHS, show_attention
    from tegrad.llm.attention import CACHES

    _known("shape", models, SHAPES)
    _known("cache", [cache], CACHES)
    _last(show_attention(models, depths or DEPTHS, cache, sequences, sweep, _form(dependency)), json_)


@app.command()
def prefill(
    models: Annotated[list[str] | None, typer.Argument(help="SHAPE-FORMAT, as in tegrad.bench.models.")] = None,
    file: Annotated[
        Path | None,
        typer.Option(parser=located, metavar="MODEL", help=f"{MODEL_HELP[:-1]}, for whole prompts and batches."),
    ] = None,
    tokens: Annotated[list[int] | None, typer.Option(help="Tokens of a chunk or batch; 8, 32, 128, 512.")] = None,
    depths: Annotated[
        list[int] | None, typer.Option("--attention", help="Attention after this many positions, too.")
    ] = None,
    sweep: Annotated[int, typer.Option(help="Try every tile of each product and print this many of the best.")] = 0,
    pick: Annotated[str, typer.Option(help="The instruction for many tokens: mma, or wgmma on Hopper.")] = "mma",
    dependency: Form = "chain-lean",
    overlap: Annotated[bool, typer.Option("--overlap", help="Launches wait by themselves.")] = False,
    json_: Json = False,
) -> None:
    """What prompts and batches cost: each product on tensor cores, attention, and with --file all of it.

    \b
    tegrad bench prefill 1b-q6k
    tegrad bench prefill 1b-q6k --tokens 512 --sweep 5
    tegrad bench prefill 1b-q6k --attention 0 --attention 4096
    tegrad bench prefill --file model.gguf
    """
    from tegrad.bench.models import parse
    from tegrad.bench.prefill import TOKENS, Asked, show
    from tegrad.llm.gemm import PICKS

    if not models and file is None:
        raise typer.BadParameter("name a model, such as 1b-q6k, or a --file")
    for model in models or ():
        parse(model)
    _known("pick", [pick], PICKS)
    given = (models or (), tokens or TOKENS, depths or (), sweep)
    _last(show(Asked(*given, pick=pick, dependency=_form(dependency), overlap=overlap, file=file)), json_)


@app.command()
def loading(
    model: Model,
    readers: Annotated[list[int] | None, typer.Option(min=1, help="Threads that read.")] = None,
    mib: Annotated[list[int] | None, typer.Option(min=1, help="MiB that a thread reads at a time.")] = None,
    json_: Json = False,
) -> None:
    """How long it takes until a model's weights lie packed on the device: three loads for each pair of settings.

    \b
    tegrad bench loading model.gguf
    tegrad bench loading model.gguf --readers 2 --readers 8 --mib 4 --mib 32 --json
    """
    from tegrad.bench.model import show_loading

    _last(show_loading(model, readers or (), mib or ()), json_)


@app.command(epilog="tegrad bench sampling 128256")
def sampling(
    vocabularies: Annotated[
        list[int] | None, typer.Argument(help="Sizes in tokens; 128256 and 151936 if left out.")
    ] = None,
    sequences: Annotated[int, typer.Option(help="Sequences that are sampled together.")] = 1,
    dependency: Form = "chain-lean",
    json_: Json = False,
) -> None:
    """What it costs to sample a token on the device, for each kind of settings."""
    from tegrad.bench.products import VOCABULARIES, show_sampling

    _last(show_sampling(vocabularies or VOCABULARIES, sequences, _form(dependency)), json_)


@app.command(epilog="tegrad bench grammar 1b-q6k")
def grammar(
    model: Annotated[str, typer.Argument(help="A random model's name.")] = "1b-q6k", json_: Json = False
) -> None:
    """What it costs to keep an answer to a JSON schema: tokens per second of both, and a mask's time."""
    from tegrad.bench.grammar import show

    _last(show(model), json_)


@app.command(epilog="tegrad bench step model.gguf --depth 4096")
def step(
    model: Model,
    depth: Annotated[int, typer.Option(help="Positions before the token's.")] = 0,
    dependency: Annotated[
        str, typer.Option(help="How a launch waits for the one before; as in `bench dependencies`.")
    ] = "chain",
    overlap: Annotated[bool, typer.Option("--overlap", help="Launches wait by themselves.")] = False,
    q8: Annotated[bool, typer.Option("--q8", help="A q8_0 cache.")] = False,
    json_: Annotated[bool, typer.Option("--json", help="A JSON object on the last line.")] = False,
) -> None:
    """Measure a decode step of the many-kernel plan on the GPU, and what each kind of launch adds to it.

    `python -m tegrad.bench.models` writes models of random weights.
    """
    from tegrad.bench.steps import show_step

    _last(show_step(model, depth, _form(dependency), overlap=overlap, q8=q8), json_)


@app.command(epilog="tegrad bench persistent 1b-q6k --sweep")
def persistent(
    model: Annotated[str, typer.Argument(help="SHAPE-FORMAT, as in tegrad.bench.models.")] = "1b-q6k",
    depth: Annotated[int, typer.Option(help="Positions before the token's.")] = 0,
    dependency: Form = "chain",
    set_: Annotated[list[str] | None, typer.Option("--set", help="NAME=VALUE of the tuning.")] = None,
    sweep: Annotated[bool, typer.Option("--sweep", help="Try every value of every axis.")] = False,
    compile_: Annotated[str, typer.Option("--compile", help="Only compile, for a chip, without a GPU.")] = "",
    json_: Annotated[bool, typer.Option("--json", help="A JSON object on the last line.")] = False,
) -> None:
    """Measure the decode step in one launch: its time, its stages, and the best tuning."""
    from tegrad.bench.steps import show_persistent
    from tegrad.hw.chips import CHIPS

    _known("chip", [compile_] if compile_ else (), CHIPS)
    row = show_persistent(model, depth, _form(dependency), set_ or (), sweeping=sweep, chip=compile_)
    _last(row, json_ and row is not None)


@app.command(epilog="tegrad bench estimate --model 1b-q6k")
def estimate(
    model: Annotated[str, typer.Option(help="SHAPE-FORMAT, as in tegrad.bench.models.")] = "1b-q6k",
) -> None:
    """Estimate decode on chips that are not at hand, and compare the rule with what an H200 took."""
    from tegrad.bench.limits import ASSUMPTIONS, CHECKS, checked, estimates
    from tegrad.hw.chips import CHIPS

    typer.echo("measured on an H200 (us), and what the rule says:")
    for check in CHECKS:
        low, high = check.measured_us
        typer.echo(f"  {check.what:50} {low:>6g} to {high:<6g} {checked(check):7.1f}")
    typer.echo(f"estimates, not measurements, of {model}:")
    for name in ASSUMPTIONS:
        for made in estimates(CHIPS[name], model):
            slow, fast = made.tokens_per_second
            typer.echo(
                f"  {name:14} {made.assumption.memory:8} {made.launches} launches, {made.bytes_us:.0f} us of bytes "
                f"({made.again_bytes / 1e6:.0f} MB of them again), {made.issue_us:.0f} us of instructions: "
                f"{slow:.1f} to {fast:.1f} tok/s\n    assuming: {made.assumption.source}"
            )


@app.command(epilog="tegrad bench loop 1b-q6k --plan many --plan one")
def loop(
    models: Annotated[list[str] | None, typer.Argument(help="SHAPE-FORMAT, as in tegrad.bench.models.")] = None,
    file: Annotated[list[Path] | None, typer.Option(parser=located, metavar="MODEL", help=MODEL_HELP)] = None,
    depth: Annotated[list[int] | None, typer.Option(help="Positions before the first token's; 0.")] = None,
    plan: Annotated[list[str] | None, typer.Option(help="A step as many launches, or as one: many, one.")] = None,
    dependency: Annotated[list[str] | None, typer.Option(help="Forms of `tegrad bench dependencies`.")] = None,
    overlapped: Annotated[list[str] | None, typer.Option(help="Forms where launches wait by themselves.")] = None,
    tokens: Annotated[int, typer.Option(min=1, help="Tokens of a stream.")] = 128,
    repetitions: Annotated[int, typer.Option(min=1, help="Streams whose median counts.")] = 9,
    json_: Json = False,
) -> None:
    """Measure the decode loop: tokens per second, the host's time for a token, the gap between two steps."""
    from tegrad.bench.models import provide
    from tegrad.bench.steps import OVERLAPPED, PLANNERS, show_loop
    from tegrad.nv.replay import DEFAULT as USUAL
    from tegrad.nv.replay import DEPENDENCIES

    forms = dependency or [next(name for name, form in DEPENDENCIES.items() if form is USUAL)]
    for name in (*forms, *(overlapped or ())):
        _form(name)
    _known("plan", plan or (), [name for name in PLANNERS if name != OVERLAPPED])
    paths = [*(provide(name) for name in models or ()), *(file or ())]
    rows = show_loop(paths, depth or [0], plan or ["many"], forms, overlapped or (), tokens, repetitions)
    _last(rows, json_)


@app.command(epilog="tegrad bench mlp --no-graph")
def mlp(
    dependencies: Annotated[
        list[str] | None,
        typer.Option(
            "--dependency", help="How a launch waits for the one before; all that `record` takes if left out."
        ),
    ] = None,
    graph: Annotated[bool, typer.Option(help="Also in CUDA graphs, which need a real GPU and libcuda.so.")] = True,
) -> None:
    """Measure a call of a small recorded network, through TinyJit, and in two CUDA graphs."""
    from tegrad.bench.mlp import show
    from tegrad.nv.replay import DEPENDENCIES

    _known("dependency", dependencies or (), DEPENDENCIES)
    show(dependencies or list(DEPENDENCIES), graph)


@app.command()
def host(batches: Annotated[int, typer.Option(min=1, help="Batches of 200 calls.")] = 40) -> None:
    """Measure the CPU's own time for a launch, a TinyJit call and a synchronize: the GPU does not take part.

    It opens NV, so without a GPU it needs an emulated board.

    \b
    TEGRAD_BOARD=agx-orin-64gb tegrad bench host
    """
    from tegrad.bench.mlp import show_host

    show_host(batches)


Slots = Annotated[int, typer.Option(min=1, max=64, help="Our server's.")]


@serve.command(short_help="Measure our server and llama-server in turn, the same requests.")
def load(
    models: Annotated[list[str], typer.Argument(help="SHAPE-FORMAT, as in tegrad.bench.models.")],
    clients: Annotated[list[int] | None, typer.Option(min=1, help="How many send requests; 1, 32, 8 and 64.")] = None,
    rounds: Annotated[int, typer.Option(min=1, help="Rounds of requests with so many clients.")] = 2,
    requests: Annotated[int, typer.Option(min=1, help="Of each client in a round.")] = 3,
    slots: Slots = 64,
    alone: Annotated[bool, typer.Option("--alone", help="Without llama-server.")] = False,
    engine: Annotated[bool, typer.Option("--engine", help="Through the engine alone, too.")] = False,
    out: Out = None,
) -> None:
    """Measure clients of our server and of llama-server in turn, the same requests; kept after each round.

    \b
    tegrad bench serve load 1b-q6k --out FOLDER
    tegrad bench serve load 8b-q4km --clients 32 --engine --out FOLDER
    """
    from tegrad.bench import serve as bench

    for path in _served(models):
        given = bench.Load(path.stem, path, clients or bench.CLIENTS, rounds, requests, slots)
        done: list[bench.Row] = []
        typer.echo(bench.HEAD)
        for row in bench.compared(given, alone=alone, engine=engine):
            typer.echo(bench.text(row))
            done.append(row)
            bench.keep(out or DEFAULT, [row])
            for record in bench.records(done):
                _keep(record, out)
        for count in given.clients:
            if found := bench.overhead(done, given.model, count):
                values = ", ".join(f"{value:.1f}%" for value in found)
                typer.echo(f"{given.model}, {count} clients: the server takes {values} longer than its engine alone")


@serve.command(
    epilog="tegrad bench serve replicas 1b-q6k --out FOLDER",
    short_help="Measure two replicas, each on a GPU of its own, against one.",
)
def replicas(
    model: Annotated[str, typer.Argument(help="SHAPE-FORMAT, as in tegrad.bench.models.")] = "1b-q6k",
    clients: Annotated[int, typer.Option(min=1, help="How many send requests; more than two GPUs' slots.")] = 128,
    rounds: Annotated[int, typer.Option(min=1, help="Rounds of one GPU and of two.")] = 2,
    requests: Annotated[int, typer.Option(min=1, help="Of each client in a round.")] = 3,
    slots: Slots = 64,
    out: Out = None,
) -> None:
    """Measure two replicas, each on a GPU of its own, against a server with one GPU; the same requests."""
    from tegrad.bench import serve as bench

    (path,) = _served([model])
    given, done = bench.Load(path.stem, path, (clients,), rounds, requests, slots), []
    typer.echo(bench.HEAD)
    for row in bench.scaled(given):
        typer.echo(bench.text(row))
        done.append(row)
        bench.keep(out or DEFAULT, [row])
    typer.echo(
        f"{given.model}, {clients} clients, two GPUs to one: {', '.join(f'{x:.2f}' for x in bench.scaling(done))}"
    )
    if (record := bench.scaling_record(given, done)) is not None:
        _keep(record, out)


@serve.command(
    epilog="tegrad bench serve same --requests 100",
    short_help="Count the answers that are others under load than alone.",
)
def same(
    model: Annotated[str, typer.Argument(help="SHAPE-FORMAT, as in tegrad.bench.models.")] = "1b-q6k",
    requests: Annotated[int, typer.Option(min=1, help="Each is answered alone and under load.")] = 1000,
    clients: Annotated[int, typer.Option(min=1, help="How many send requests.")] = 64,
    slots: Slots = 64,
    out: Out = None,
) -> None:
    """Count the answers that are others under load than alone, of a server with --same-answer; exit code 1 if any."""
    from tegrad.bench import serve as bench

    (path,) = _served([model])
    given, made, differed = bench.Load(path.stem, path, (clients,), slots=slots, tokens=bench.SAME_TOKENS), 0, 0
    for made, differed in bench.alike(given, requests):
        typer.echo(f"{made} requests, {differed} differ")
    if (record := bench.same_record(given, made, differed)) is not None:
        _keep(record, out)
    raise typer.Exit(differed > 0)


def _served(models: Iterable[str]) -> list[Path]:
    """Models' files, once there is something to measure."""
    from tegrad.bench.gpu import check_gpu
    from tegrad.bench.models import parse, provide

    for name in models:
        parse(name)
    check_gpu()
    return [provide(name) for name in models]


def _keep(record: Record, out: Path | None, results: Path = DEFAULT) -> None:
    """Keep a figure's samples in a folder, or in the results, where a board's do not belong."""
    from tegrad.bench.figures import Results
    from tegrad.nv.kernel import emulated

    if out is not None:
        record.dump(out / f"{record.id}.json")
    elif not emulated():
        Results(results).add(record)


@app.command("list", epilog="tegrad bench list", short_help="List the figures, and whether each needs a GPU.")
def list_() -> None:
    """List the figures that can be measured, and whether each needs a GPU."""
    from tegrad.bench.measures import MEASURES

    for measure in MEASURES.values():
        typer.echo(f"{measure.id:32} {'GPU' if measure.needs_gpu else 'any':4} {measure.what}")


app.command(
    epilog="tegrad bench model model.gguf -p 512 -n 128 -d 0,4096 --vs llama.cpp",
    short_help="Measure a model, in rows with llama-bench's columns.",
)(bench_model.model)
app.command(
    epilog="tegrad bench compare before.json after.json",
    short_help="Say what changed between two results by more than noise.",
)(bench_model.compare)
app.command(epilog="tegrad bench tuning cpu-memory flush")(bench_model.tuning)
app.command(epilog="tegrad bench report -o report.html", short_help="Write results as one HTML page with plots.")(
    bench_model.report
)


def _with_gpu(command: Callable[..., None]) -> Callable[..., None]:
    """The command with `--gpu`, which is settled before it runs."""

    @wraps(command)
    def run(*given: Any, gpu: int | None, **named: Any) -> None:
        command(*given, **named)

    known = signature(command, eval_str=True)
    added = Parameter("gpu", Parameter.KEYWORD_ONLY, annotation=options.Gpu, default=None)
    run.__signature__ = known.replace(parameters=[*known.parameters.values(), added])  # type: ignore[attr-defined]
    return run


SHOWN = ("model", "compare", "report", "figures", "take", "add", "list", "decode", "tinygrad", "serve")
"""What `tegrad bench --help` explains; the others measure a part each."""
NO_GPU = ("figures", "add", "list", "ptx", "estimate", "replicas", "compare", "report")
"""What opens none, or several."""
for one in (*app.registered_commands, *serve.registered_commands):
    if _name(one) not in NO_GPU and one.callback is not None:
        one.callback = _with_gpu(one.callback)
parts = [one for one in app.registered_commands if _name(one) not in SHOWN]
for one in parts:
    one.hidden = True
EPILOG = (
    "\b\ntegrad bench take first-run-tok-s\n\n"
    + f"Of parts: {', '.join(sorted(map(_name, parts)))}; see --help of each."
)
