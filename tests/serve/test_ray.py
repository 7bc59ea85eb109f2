"""`tegrad serve --replicas`: Ray Serve makes two replicas, each with a board of its own, and others for those that die.

Needs the extra `replicas` (`make test-long` installs it).
"""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import httpx
import pytest
import tiny_llama
from processes import marked, running, until
from program import SHAPE, Server, refused, serving
from tiny_llama import TYPE

from tegrad import models

ray = pytest.importorskip("ray", reason="the extra `replicas` is not installed: make test-long installs it")
pytestmark = [pytest.mark.board, pytest.mark.long]

ACTOR = "ray::ServeReplica"
MINUTES_S = 300.0
"""For what takes seconds on a machine with nothing else to do."""
OPTIONS = ("--slots", "4", "--context", "512", "--same-answer")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """The model that the package carries, twice. Nothing may be left of it, nor of Ray."""
    with serving(tmp_path_factory.mktemp("log") / "log", str(models.SMALL), "--replicas", "2", *OPTIONS) as made:
        yield made
        made.process.kill()
        until(lambda: not running(made.mark), MINUTES_S)  # Ray's agents look seldom whether they are still wanted


def there(server: Server) -> list[str]:
    rows = httpx.get(f"{server.url}/ready", timeout=60).json()["replicas"]
    names: list[str] = rows["small"]["there"]
    return names


async def asked(server: Server, at: int, **fields: Any) -> list[str]:
    """The texts of an answer."""
    body = {"prompt": f"The story of {at} begins with", "seed": at, "temperature": 0.8 * (at % 2), "max_tokens": 24}
    async with httpx.AsyncClient(timeout=MINUTES_S) as http:
        response = await http.post(f"{server.url}/v1/completions", json={**body, **fields})
        assert response.status_code == 200, response.text
        return [choice["text"] for choice in response.json()["choices"]]


@pytest.mark.klog_errors("unbind")  # of a channel that is busy, as its process is killed
@pytest.mark.parametrize("word", [ACTOR, "tegrad.serve.engine"])
def test_no_request_is_lost_when_a_replica_is_killed_under_load(server: Server, word: str) -> None:
    """All answers are those given alone; it is told that one is missing, and another one comes in its place."""

    async def all_of_them() -> None:
        until(lambda: len(there(server)) == 2, MINUTES_S)
        alone = [await asked(server, at) for at in range(6)]
        retried, tokens = server.counted("requests_retried_total"), server.counted("tokens_predicted_total")
        tasks = [asyncio.create_task(asked(server, at)) for at in range(6)]
        async with asyncio.timeout(MINUTES_S):
            while await asyncio.to_thread(server.counted, "tokens_predicted_total") < tokens + 6:
                await asyncio.sleep(0.01)
        os.kill(running(server.mark, word)[0], signal.SIGKILL)
        assert await asyncio.gather(*tasks) == alone
        assert server.counted("requests_retried_total") > retried

    asyncio.run(all_of_them())
    assert "is gone, 1 left" in server.log.read_text()
    until(lambda: len(there(server)) == 2, MINUTES_S)
    assert server.counted("replicas") == 2
    text = httpx.get(f"{server.url}/metrics", timeout=60).text
    for name in there(server):
        assert f'tegrad:requests_processing{{model="small",replica="{name}"}} 0.0' in text


def test_prompts_with_one_beginning_go_to_one_replica(server: Server) -> None:
    until(lambda: len(there(server)) == 2, MINUTES_S)
    words = " ".join(["Once upon a time there was a king who had a garden"] * 8)
    asyncio.run(asked(server, 0, prompt=words))
    before = server.counted("cached_tokens_total")
    asyncio.run(asked(server, 0, prompt=f"{words} and"))
    assert server.counted("cached_tokens_total") >= before + 64


def test_ctrl_c_finishes_what_runs_and_leaves_nothing_of_ray(server: Server) -> None:
    """The terminal sends it to all processes of the group."""

    async def all_of_them() -> None:
        tokens = server.counted("tokens_predicted_total")
        task = asyncio.create_task(asked(server, 1))
        async with asyncio.timeout(MINUTES_S):
            while await asyncio.to_thread(server.counted, "tokens_predicted_total") == tokens:
                await asyncio.sleep(0.01)
        os.killpg(os.getpgid(server.process.pid), signal.SIGINT)
        assert len(await task) == 1

    asyncio.run(all_of_them())
    assert server.process.wait(120) == 0
    until(lambda: not running(server.mark), 60)
    assert "Traceback" not in server.log.read_text()


def test_a_cluster_that_is_there_is_used_and_left_as_it_was(tmp_path: Path) -> None:
    """Also by a server that is killed: its replicas find nobody there, and have Ray remove them."""
    path = tiny_llama.write(tmp_path / "small.gguf", SHAPE, TYPE.Q8_0)
    program = Path(sys.executable).with_name("ray")
    with pytest.MonkeyPatch.context() as patch, marked() as mark, TemporaryDirectory(prefix="ray-") as short:
        for name, value in {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "0" * 32, "RAY_worker_niceness": "0"}.items():
            patch.setenv(name, value)
        command = "start --head --num-cpus 2 --num-gpus 2 --port 6399 --include-dashboard=false --disable-usage-stats"
        subprocess.run([program, *command.split(), f"--temp-dir={short}"], check=True, capture_output=True)
        try:
            arguments = (str(path), "--replicas", "1..2", "--ray", "auto", *OPTIONS)
            patch.setenv("RAY_ADDRESS", "127.0.0.1:6399")
            with serving(tmp_path / "log", *arguments) as server:
                assert asyncio.run(asked(server, 0, max_tokens=4))
                until(lambda: len(there(server)) == 2, MINUTES_S)
                server.process.send_signal(signal.SIGTERM)
                assert server.process.wait(120) == 0
                until(lambda: not running(mark, "ray::Serve"), 60)
            with serving(tmp_path / "log", *arguments) as server:
                assert asyncio.run(asked(server, 0, max_tokens=4))
                server.process.kill()
                until(lambda: not running(mark, ACTOR) and not running(mark, "tegrad.serve.engine"), MINUTES_S)
            said: list[str] = []

            def both_are_free() -> bool:
                code, words = refused(*arguments[:2], "3", *arguments[3:])
                said.append(words)
                assert code == 1, words
                return "3 replicas of small need a GPU each, and 2 are free" in words

            until(both_are_free, 60)  # Ray counts a GPU as free some time after the replica's process is gone
            assert all("3 replicas of small need a GPU each, and " in words for words in said), said
        finally:
            for pid in running(mark):
                os.kill(pid, signal.SIGKILL)
            until(lambda: not running(mark))


def test_what_keeps_replicas_from_starting_is_one_sentence(tmp_path: Path) -> None:
    for arguments, words in (
        (("--replicas", "2..1"), "give how many, such as 2"),
        (("--ray", "auto"), "give --replicas N as well"),
        (("--replicas", "1", "--ray", "127.0.0.1:1"), "cannot use Ray at 127.0.0.1:1"),
    ):
        _, said = refused(*arguments, "--port", "0")
        assert said.startswith("tegrad: "), said
        assert words in said
