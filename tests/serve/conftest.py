"""The device, and a server of OpenAI's API in front of the model that the package carries."""

import gc
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import openai
import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "llm"))
from processes import patience
from rig import Direct, Fixed, about, served

from tegrad import models

BOARD = "agx-orin-64gb"
PATIENCE_MS = "200000"
"""A prompt is seconds of kernels on a board, and more where other work shares the cores."""


@pytest.fixture(scope="package", autouse=True)
def _patient() -> Iterator[None]:
    """httpx waits as long by default as boards do: its own 5 s may pass on a busy machine before an answer begins."""
    default = httpx.get.__kwdefaults__["timeout"]  # which all of its functions and clients share
    seconds = patience(int(PATIENCE_MS) / 1000)
    with pytest.MonkeyPatch.context() as patch:
        for wait in ("connect", "read", "write", "pool"):
            patch.setattr(default, wait, seconds)
        assert httpx.Client().timeout.read == seconds
        yield


@pytest.fixture(scope="module")
def device() -> Iterator[str]:
    """An emulated Orin."""
    with pytest.MonkeyPatch.context() as patch:
        if "TEGRAD_BOARD" not in os.environ:
            patch.setenv("TEGRAD_BOARD", BOARD)
            patch.setenv("HCQDEV_WAIT_TIMEOUT_MS", os.environ.get("HCQDEV_WAIT_TIMEOUT_MS", PATIENCE_MS))
        import tegrad.nv
        from tegrad.nv import device

        tegrad.nv.install()
        from tinygrad import Device
        from tinygrad.helpers import Context

        with Context(DEV="NV"):
            yield str(Device.DEFAULT)
        gc.collect()  # buffers go before their device
        if (opened := device._opened.get("NV")) is not None:
            opened.close()


@pytest.fixture(scope="module")
def small(device: str) -> Iterator[Direct]:
    """The model that the package carries, for eight at once."""
    from tegrad.llm.service import Service

    with Service(models.SMALL, device, slots=8, positions=512, same=True) as service:
        made = Direct(about("small", models.SMALL), service)
        yield made
        assert made.template is not None
        made.template.close()


@pytest.fixture(scope="module")
def url(small: Direct) -> Iterator[str]:
    """A server with that model."""
    from tegrad.serve import openai as api
    from tegrad.serve import responses

    made = Fixed([small])
    with served([*api.API.routes(made), *responses.API.routes(made)]) as found:
        yield found
    assert made.used == 0


@pytest.fixture(scope="module")
def client(url: str) -> Iterator[openai.OpenAI]:
    """The official client, which tries once."""
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=patience()) as made:
        yield made
