"""A server's configuration: options before the file, what means nothing told by name."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from tegrad.serve.config import Bounds, Config, ConfigError
from tegrad.serve.plan import Wanted

FILE = """
models = ["a.gguf", "owner/repo"]
port = 9000
context = 4096
keep-alive = 300
api-key-file = "{keys}"
memory = 6.5

[model.a]
slots = 2
cache = "q8_0"
"""


def test_options_go_before_the_file_and_a_models_table_before_both(tmp_path: Path) -> None:
    (tmp_path / "keys").write_text("# ours\nsecret\n\n other \n")
    (tmp_path / "serve.toml").write_text(FILE.format(keys=tmp_path / "keys"))
    found = Config.of({"port": 0, "slots": 16, "host": None}, tmp_path / "serve.toml")
    assert (found.models, found.host, found.port) == (["a.gguf", "owner/repo"], "127.0.0.1", 0)
    assert found.wanted == Wanted(context=4096, slots=16)
    assert found.own == {"a": Wanted(context=4096, slots=2, q8=True)}
    assert (found.keep_alive, found.memory) == (300, 13 << 29)
    assert found.keys == {"secret", "other"}
    assert found.local


def test_replicas_are_a_number_or_bounds() -> None:
    assert Config.of({}).replicas is None
    assert Config.of({"replicas": "2"}).replicas == Config.of({"replicas": 2}).replicas == Bounds(2, 2)
    found = Config.of({"replicas": "1..4", "ray": "auto"})
    assert (found.replicas, found.ray) == (Bounds(1, 4), "auto")


def test_without_anything_it_serves_this_machine_alone() -> None:
    assert Config.of({}) == Config()
    assert Config.of({"keep_alive": -1}).keep_alive == math.inf
    assert not Config.of({"host": "0.0.0.0"}).local


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("speed = 9", "there is no option speed: choose among context, slots"),
        ("port = 70000", "port = 70000: give a whole number from 0 to 65535"),
        ("port = true", "port = True: give a whole number"),
        ('port = "80"', "port = '80': give a whole number"),
        ("models = [1]", "give a list of texts"),
        ('cache = "f8"', "cache = 'f8': give f16 or q8_0"),
        ('log = "xml"', "log = 'xml': give text or json or off"),
        ("slots = 65", "slots = 65: give a whole number from 1 to 64"),
        ("replicas = 0", "replicas = 0: give"),
        ('replicas = "3..2"', "replicas = '3..2': give how many, such as 2, or how many at least and at most"),
        ('replicas = "many"', "replicas = 'many': give how many"),
        ('ray = "auto"', "a Ray cluster is for replicas: give --replicas N as well"),
        ("model = 1", "models are told of in tables"),
        ("[model]\na = 1", 'what is told of a model is a table, [model."a"]'),
        ("[model.a]\nport = 1", 'there is no option [model."a"] port: choose among context'),
        ("[model.a]\ncontext = 0", '[model."a"] context = 0: give a whole number from 1'),
        ('tls_cert = "a.pem"', "TLS needs a certificate and its key"),
        ('api_key_file = "/none"', "cannot read the keys in /none: No such file"),
        ("a =", "serve.toml is not TOML"),
    ],
)
def test_what_means_nothing_is_told_by_name(tmp_path: Path, text: str, said: str) -> None:
    (tmp_path / "serve.toml").write_text(text)
    with pytest.raises(ConfigError) as caught:
        Config.of({}, tmp_path / "serve.toml")
    assert said in str(caught.value)


def test_a_file_that_cannot_be_used_is_told(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"cannot read .*none.toml: No such file"):
        Config.of({}, tmp_path / "none.toml")
    (tmp_path / "keys").write_text("# none\n")
    with pytest.raises(ConfigError, match="has no key: write one in each line"):
        Config.of({"api_key_file": str(tmp_path / "keys")})
    (tmp_path / "keys").write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match="is no text in UTF-8"):
        Config.of({"api_key_file": str(tmp_path / "keys")})


def test_files_may_begin_with_the_mark_that_windows_puts_there(tmp_path: Path) -> None:
    (tmp_path / "keys").write_text("secret\n", "utf-8-sig")
    (tmp_path / "toml").write_text(f'api-key-file = "{tmp_path / "keys"}"\n', "utf-8-sig")
    assert Config.of({}, tmp_path / "toml").keys == {"secret"}


def test_every_option_of_the_command_is_one_of_the_file() -> None:
    """Under the same name."""
    import inspect

    from tegrad.cli.serve import serve
    from tegrad.serve.config import OPTIONS

    given: dict[str, Any] = dict(inspect.signature(serve).parameters)
    assert sorted({*given, "max_body"} - {"config", "gpu"}) == sorted(OPTIONS)
