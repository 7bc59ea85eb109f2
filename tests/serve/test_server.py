"""`tegrad serve` as a program: what it says, what it serves, and what is left when something ends."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.client import HTTPConnection
from pathlib import Path

import httpx
import pytest
import tiny_llama
from processes import patience, running, until
from program import ENDLESS, PROGRAM, SHAPE, Server, refused, serving
from starlette.responses import PlainTextResponse
from starlette.types import Receive, Scope, Send
from tiny_llama import TYPE, Shape

from tegrad.serve.config import Config
from tegrad.serve.server import Server as ServerOfOurs

pytestmark = pytest.mark.board


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("models")
    return {name: tiny_llama.write(folder / f"{name}.gguf", SHAPE, TYPE.Q8_0, seed=at) for at, name in enumerate("ab")}


@pytest.fixture(scope="module")
def server(paths: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    log = tmp_path_factory.mktemp("log") / "log"
    with serving(log, *map(str, paths.values()), "--slots", "2", "--context", "4096", "--log", "json") as made:
        yield made


def test_a_connection_that_was_idle_for_longer_than_clients_keep_theirs_is_answered() -> None:
    """A client closes its own after 5 s; were the server as quick, a request could meet a connection that ends."""

    async def hello(scope: Scope, receive: Receive, send: Send) -> None:
        await PlainTextResponse("hello")(scope, receive, send)

    made = ServerOfOurs(hello, Config(port=0))
    with socket.create_server(("127.0.0.1", 0)) as listening:
        thread = threading.Thread(target=made.run, args=([listening],))
        thread.start()
        connection = HTTPConnection(*listening.getsockname(), timeout=patience(60))
        try:
            for idle in (5.5, 0.0):
                connection.request("GET", "/")
                assert connection.getresponse().read() == b"hello"
                assert connection.sock is not None
                time.sleep(idle)
        finally:
            connection.close()
            made.should_exit = True
            thread.join()


class Background(threading.Thread):
    """A stream that is read meanwhile."""

    def __init__(self, server: Server, **fields: object) -> None:
        super().__init__()
        self.events: list[str] = []
        self.error: Exception | None = None
        self._server, self._fields = server, fields
        before = server.counted("tokens_predicted_total")
        self.start()
        until(lambda: server.counted("tokens_predicted_total") > before)

    def run(self) -> None:
        try:
            self.events = self._server.stream(**self._fields)
        except Exception as error:
            self.error = error


def closed(server: Server) -> bool:
    """Whether it listens no more: it has seen that it is to end."""
    try:
        socket.create_connection(("127.0.0.1", httpx.URL(server.url).port or 0), patience(60)).close()
    except ConnectionRefusedError:
        return True
    return False


def test_models_are_loaded_by_name_when_they_are_asked_for(server: Server) -> None:
    first = server.post(max_tokens=4, temperature=0).json()
    assert server.post(model="a", max_tokens=4, temperature=0).json()["choices"] == first["choices"]
    assert httpx.get(f"{server.url}/ready").json() == {"status": "ok", "models": ["a"]}
    other = server.post(model="b", max_tokens=4, temperature=0).json()
    assert other["choices"][0]["text"] != first["choices"][0]["text"]
    assert httpx.get(f"{server.url}/ready").json()["models"] == ["a", "b"]
    missing = server.post(model="c")
    assert missing.status_code == 404
    assert "choose one of a, b" in missing.json()["error"]["message"]


def test_what_tells_how_it_is_needs_no_model(server: Server) -> None:
    assert httpx.get(f"{server.url}/health").json() == {"status": "ok"}
    document = httpx.get(f"{server.url}/openapi.json").json()
    assert {"/v1/chat/completions", "/metrics", "/health"} <= document["paths"].keys()
    assert server.counted("slots") >= 2
    before = server.counted("first_token_seconds_count")
    server.post(max_tokens=1)
    assert server.counted("first_token_seconds_count") == before + 1
    for method, path, status in (("GET", "/v1/none", 404), ("DELETE", "/v1/models", 405), ("GET", "/v1/models/", 404)):
        response = httpx.request(method, f"{server.url}{path}")
        assert (response.status_code, "message" in response.json()["error"]) == (status, True), path


def test_what_is_wrong_is_told_in_the_words_of_the_api(server: Server) -> None:
    """Also where no API was reached."""
    for path, names in (("v1/none", ["error"]), ("api/none", ["error"]), ("v1/messages/batches", ["type", "error"])):
        answer = httpx.post(f"{server.url}/{path}", json={})
        assert (answer.status_code, list(answer.json())) == (404, names)
        assert isinstance(answer.json()["error"], str if path.startswith("api") else dict)


def test_each_request_has_its_line_in_the_log(server: Server) -> None:
    response = server.post(max_tokens=1)
    asked = response.headers["x-request-id"]
    until(lambda: asked in server.log.read_text())  # it is written behind the answer
    rows = [json.loads(line) for line in server.log.read_text().splitlines() if line.startswith("{")]
    (row,) = (row for row in rows if row.get("request") == asked)
    assert (row["method"], row["path"], row["status"], row["client"]) == ("POST", "/v1/completions", 200, "127.0.0.1")


def test_a_client_that_goes_away_gives_its_slot_back(server: Server) -> None:
    before = server.counted("requests_processing")
    body = {"model": "a", "prompt": "abc", "stream": True, **ENDLESS}
    with httpx.stream("POST", f"{server.url}/v1/completions", json=body, timeout=patience(60)) as response:
        lines = response.iter_lines()  # kept, as its end would close the connection
        next(lines)
        assert server.counted("requests_processing") == before + 1
    until(lambda: server.counted("requests_processing") == before)


def test_ollamas_clients_have_models_loaded_and_unloaded(server: Server) -> None:
    def post(path: str, **fields: object) -> httpx.Response:
        return httpx.post(f"{server.url}/api/{path}", json={"model": "b:latest", **fields}, timeout=patience(60))

    def loaded() -> dict[str, int]:
        rows = httpx.get(f"{server.url}/api/ps").json()["models"]
        return {row["name"]: row["context_length"] for row in rows}

    answer = post("generate", prompt="abc", raw=True, stream=False, options={"num_predict": 4}).json()
    assert (answer["model"], answer["eval_count"] <= 4) == ("b", True)
    assert loaded()["b:latest"] == 4096
    assert post("generate", keep_alive=0).json()["done_reason"] == "unload"
    until(lambda: "b:latest" not in loaded())
    assert post("generate", keep_alive=0).json()["done_reason"] == "unload"
    assert "b:latest" not in loaded()
    assert post("show").json()["model_info"]["llama.context_length"] == 4096
    assert post("none").json()["error"].startswith("there is no /api/none here")


@pytest.mark.klog_errors("unbind")  # of a channel that is busy, as its process is killed
@pytest.mark.parametrize("word", ["tegrad.serve.engine", pytest.param("tegrad.orin", marks=pytest.mark.long)])
def test_without_engine_or_board_a_stream_ends_with_an_error_and_the_next_request_is_served(
    paths: dict[str, Path], tmp_path: Path, word: str
) -> None:
    with serving(tmp_path / "log", str(paths["a"]), "--context", "4096") as server:
        alone = server.post(max_tokens=4, temperature=0).json()["choices"]
        stream = Background(server)
        for pid in running(server.mark, word):
            os.kill(pid, signal.SIGKILL)
        stream.join(60)
        assert "error" in json.loads(stream.events[-1]), stream.events[-1]
        assert server.post(max_tokens=4, temperature=0).json()["choices"] == alone
        assert server.process.poll() is None


def test_a_signal_lets_finish_what_runs_and_takes_no_more(paths: dict[str, Path], tmp_path: Path) -> None:
    with serving(tmp_path / "log", str(paths["a"])) as server:
        stream = Background(server, max_tokens=60)
        server.process.send_signal(signal.SIGTERM)
        until(lambda: closed(server))
        stream.join(patience(60))
        assert stream.events[-1] == "[DONE]"
        assert json.loads(stream.events[-2])["choices"][0]["finish_reason"] == "length"
        assert server.process.wait(patience(60)) == 0
        until(lambda: not running(server.mark))


@pytest.mark.klog_errors("unbind")  # of a channel that is busy, as its process is killed
def test_what_does_not_finish_in_time_is_ended(paths: dict[str, Path], tmp_path: Path) -> None:
    with serving(tmp_path / "log", str(paths["a"]), "--grace", "1") as server:
        stream = Background(server)
        begun = time.monotonic()
        server.process.send_signal(signal.SIGINT)
        assert server.process.wait(30) == 0
        assert time.monotonic() - begun < 15
        stream.join(30)
        assert "[DONE]" not in stream.events


@pytest.mark.klog_errors("unbind")  # of a channel that is busy, as its process is killed
@pytest.mark.parametrize(
    "ends",
    [(signal.SIGTERM, signal.SIGTERM), pytest.param((signal.SIGINT,) * 2, marks=pytest.mark.long), (signal.SIGKILL,)],
)
def test_a_second_signal_or_kill_9_ends_all_at_once_and_leaves_nothing(
    paths: dict[str, Path], tmp_path: Path, ends: tuple[signal.Signals, ...]
) -> None:
    with serving(tmp_path / "log", str(paths["a"])) as server:
        stream = Background(server)
        for number in ends:
            server.process.send_signal(number)
            until(lambda: closed(server))  # two signals that nobody sees between them are one
        assert server.process.wait(patience(60)) == (-9 if ends == (signal.SIGKILL,) else 128 + ends[0])
        until(lambda: not running(server.mark))
        stream.join(patience(60))


@contextmanager
def reserved() -> Iterator[int]:
    """A port that nobody gets but the server, which reuses addresses: a socket has it that does not listen."""
    with socket.socket() as kept:
        kept.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        kept.bind(("127.0.0.1", 0))
        yield kept.getsockname()[1]


@pytest.mark.klog_errors("unbind")  # of a channel that is busy, as its process is killed while it loads
def test_it_is_alive_and_not_ready_while_the_first_model_loads(paths: dict[str, Path], tmp_path: Path) -> None:
    with (
        reserved() as port,
        serving(tmp_path / "log", str(paths["a"]), "--port", str(port), ready=False) as server,
    ):
        url, seen = f"http://127.0.0.1:{port}", []
        deadline = time.monotonic() + patience(60)
        while (not seen or seen[-1] != (200, 200)) and time.monotonic() < deadline:
            try:
                seen.append(
                    tuple(httpx.get(f"{url}/{path}", timeout=patience(60)).status_code for path in ("health", "ready"))
                )
            except httpx.ConnectError:
                assert not seen
            time.sleep(0.01)
        assert seen[0] == (200, 503)
        assert seen[-1] == (200, 200)
        assert server.process.stdout is not None
        assert server.process.stdout.readline() == f"serving at {url}\n"


def test_https_keys_and_other_hosts(paths: dict[str, Path], tmp_path: Path) -> None:
    if shutil.which("openssl") is None:
        pytest.skip("openssl makes the certificate")
    cert, key, keys = (tmp_path / name for name in ("cert", "key", "keys"))
    command = f"openssl req -x509 -newkey rsa:2048 -nodes -keyout {key} -out {cert} -days 2 -subj /CN=localhost"
    subprocess.run(command.split(), check=True, capture_output=True)
    keys.write_text("secret\n")
    config = tmp_path / "serve.toml"
    config.write_text(
        f'tls-cert = "{cert}"\ntls-key = "{key}"\napi-key-file = "{keys}"\ncors = ["https://a.example"]\n'
    )
    with serving(tmp_path / "log", "--config", str(config)) as server:
        assert server.url.startswith("https://127.0.0.1:")
        with httpx.Client(base_url=server.url, verify=False) as client:
            assert client.get("/health").status_code == 200
            refused = client.get("/v1/models")
            assert (refused.status_code, refused.json()["error"]["code"]) == (401, "invalid_api_key")
            known = {"authorization": "Bearer secret"}
            assert client.get("/v1/models", headers=known).json()["data"][0]["id"] == "small"
            found = client.get("/v1/models", headers={**known, "origin": "https://a.example"})
            assert found.headers["access-control-allow-origin"] == "https://a.example"
            assert client.get("/v1/models", headers={**known, "origin": "https://b.example"}).status_code == 403
        assert running(server.mark, "tegrad.serve.engine") == []  # nobody has asked for a model


def test_what_keeps_it_from_starting_is_one_sentence(paths: dict[str, Path], tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        code, said = refused("--port", port)
        assert (code, said) == (
            2,
            f"tegrad: cannot serve at 127.0.0.1:{port}: Address already in use; choose another --port",
        )
    (tmp_path / "no.pem").write_text("no certificate")
    floats = tiny_llama.write(tmp_path / "floats.gguf", Shape(), TYPE.F32)
    pem = str(tmp_path / "no.pem")
    for arguments, end, words in (
        (("--host", "no such host"), 2, "is no address to serve at"),
        (("--tls-cert", pem, "--tls-key", pem), 2, "cannot use"),
        (("nobody/nothing:Q4_K_M",), 2, "no model of that name is here"),
        ((str(floats), "--port", "0"), 2, "convert the model to F16"),
        ((str(paths["a"]), "--port", "0", "--memory", "0.001"), 1, "ask for a shorter context"),
    ):
        code, said = refused(*arguments)
        assert said.startswith("tegrad: "), said
        assert words in said
        assert code == end
    code, said = refused(str(paths["a"]), "--port", "0", program=f"import os; os.environ['DEV'] = 'CPU'; {PROGRAM}")
    assert (code, "not on DEV=CPU: unset it" in said) == (2, True)
    missing = f"sys.modules['uvicorn'] = None; {PROGRAM}"
    code, said = refused(program=missing)
    assert (code, "serving needs uvicorn: pip install" in said) == (2, True)
