"""64 clients at once, who stream, stall, leave and ask for what cannot be: no error but a full queue, and no leak."""

from __future__ import annotations

import asyncio
import os
import random
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest
import tiny_llama
from processes import patience, until
from program import ENDLESS, SHAPE, Server, serving
from tiny_llama import TYPE

pytestmark = pytest.mark.board

CLIENTS = 64
SECONDS = 120.0
WORDS = [f"{left}{right}" for left in ("ab", "cde", "fa", "bed", "cab") for right in ("ab", "ce", "de", "face")]
"""Few, as tokenizers keep thousands of words that they have met."""
WANTED = {"plain 200", "stream 200", "leaves 200", "stalls 200", "grammar 200", "wrong"}
GROWTH_BYTES = 16 << 20
"""Of a process, from when all kinds of answers were given to the end."""


def memory(pid: int) -> int:
    """Bytes that a process has of its own."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("RssAnon:"))


def open_files(pid: int) -> int:
    return len(os.listdir(f"/proc/{pid}/fd"))


def warm(seen: Counter[str]) -> bool:
    """Whether all that a process makes once is made: kinds of answers, of several at once."""
    return seen.keys() >= WANTED and sum(count for kind, count in seen.items() if kind.endswith("200")) >= CLIENTS


async def client(number: int, url: str, over: asyncio.Event, seen: Counter[str]) -> None:
    """Requests of all kinds until it is over."""
    rng = random.Random(number)
    async with httpx.AsyncClient(base_url=url, timeout=patience(120)) as http:
        while not over.is_set():
            body = {"prompt": " ".join(rng.choices(WORDS, k=rng.randrange(1, 60))), "seed": number}
            body |= {"max_tokens": rng.randrange(1, 24), "temperature": rng.choice([0, 0.8])}
            kind = rng.choice(["plain", "plain", "stream", "leaves", "stalls", "wrong", "grammar"])
            if kind in ("plain", "grammar"):
                body |= {"grammar": "start: /[a-f]{2,9}/"} if kind == "grammar" else {}
                response = await http.post("/v1/completions", json=body)
                assert response.status_code in (200, 429), response.text
                seen[f"{kind} {response.status_code}"] += 1
                if response.status_code == 429:
                    assert int(response.headers["retry-after"]) >= 1
                    await asyncio.sleep(rng.random())
            elif kind == "wrong":
                response = await http.post("/v1/completions", json={**body, "max_tokens": "many", "model": 7})
                assert response.status_code == 400
                seen[kind] += 1
            else:
                body |= {"stream": True} | (ENDLESS if kind == "leaves" else {})
                async with http.stream("POST", "/v1/completions", json=body) as response:
                    assert response.status_code in (200, 429)
                    events = 0
                    async for line in response.aiter_lines():
                        assert '"error"' not in line or response.status_code == 429, line
                        events += line.startswith("data: ")
                        if kind == "leaves" and events > 3:
                            break
                        if kind == "stalls":
                            await asyncio.sleep(0.05)
                    seen[f"{kind} {response.status_code}"] += 1


def soak(server: Server, seconds: float) -> tuple[Counter[str], list[int]]:
    """What was answered to all clients, how often; nothing may have grown meanwhile, and by how many bytes it did."""

    async def all_of_them() -> tuple[list[int], list[int]]:
        over = asyncio.Event()
        async with asyncio.TaskGroup() as clients:
            for at in range(CLIENTS):
                clients.create_task(client(at, server.url, over, seen))
            await asyncio.sleep(seconds / 3)
            end = time.monotonic() + patience()
            while not warm(seen):
                assert time.monotonic() < end, f"no answers to {WANTED - seen.keys()}, or too few: {seen}"
                await asyncio.sleep(0.01)
            early = [memory(pid) for pid in pids]
            await asyncio.sleep(seconds * 2 / 3)
            over.set()
        return early, [memory(pid) for pid in pids]

    seen: Counter[str] = Counter()
    server.post(max_tokens=2)
    pids = [server.process.pid, server.engine()]
    files = [open_files(pid) for pid in pids]
    early, late = asyncio.run(all_of_them())
    until(lambda: server.counted("requests_processing") + server.counted("requests_deferred") == 0)
    until(lambda: all(open_files(pid) <= count + 2 for pid, count in zip(pids, files, strict=True)))
    grown = [after - before for before, after in zip(early, late, strict=True)]
    assert max(grown) < GROWTH_BYTES
    assert server.counted("device_reopened_total") == 0
    return seen, grown


@pytest.mark.parametrize("seconds", [8.0, pytest.param(SECONDS, marks=pytest.mark.long)])
def test_many_clients_see_no_error_and_leave_nothing(
    tmp_path: Path, seconds: float, record_property: Callable[[str, object], None]
) -> None:
    path = tiny_llama.write(tmp_path / "model.gguf", SHAPE, TYPE.Q8_0)
    with serving(tmp_path / "log", str(path), "--slots", "8", "--queue", "24", "--log", "off") as server:
        seen, grown = soak(server, seconds)
        assert seen.keys() >= WANTED
        record_property("answers", dict(sorted(seen.items())))
        record_property("grown_bytes", grown)
        assert "Traceback" not in server.log.read_text()
