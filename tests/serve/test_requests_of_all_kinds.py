"""Requests that schemathesis makes of the server's own document: no 500, no hang, nothing that the document denies."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from rig import Fixed, Scripted, about, served
from schemathesis import Case, GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import content_type_conformance, status_code_conformance
from starlette.routing import Mount

from tegrad import models
from tegrad.serve.app import application, document
from tegrad.serve.catalogue import Place
from tegrad.serve.config import Config

SECONDS = 10.0
"""That a request may take."""
FEW, MANY = 10, 700
"""Cases of an operation; all operations together have 10,000 of the many."""


class Server(Fixed):
    """What the application asks of a catalogue besides."""

    loads = False
    places: Sequence[Place] = ()


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    """In front of a model that says the same to all."""
    made = Server([Scripted(about("small", models.SMALL), 'so {"a": [1]} it was')])
    with served([Mount("/", application(made, Config()))]) as url:
        yield url
    assert made.used == 0


OPERATIONS = [found.ok() for found in schemathesis.openapi.from_dict(document()).get_all_operations()]
SOUND: dict[str, Any] = {"deadline": None, "suppress_health_check": list(HealthCheck), "derandomize": True}


def cases(operation: Any) -> st.SearchStrategy[Case]:
    """Of what the document allows and, where an operation takes anything, of what it does not."""
    kinds = [GenerationMode.POSITIVE, *([GenerationMode.NEGATIVE] if operation.method == "post" else [])]
    return st.one_of(operation.as_strategy(generation_mode=kind) for kind in kinds)


@pytest.mark.parametrize("count", [FEW, pytest.param(MANY, marks=pytest.mark.long)])
@pytest.mark.parametrize("operation", OPERATIONS, ids=lambda operation: operation.label)
def test_requests_of_the_document_are_answered_as_it_says(server: str, operation: Any, count: int) -> None:
    @settings(max_examples=count, **SOUND)
    @given(cases(operation))
    def hold(case: Case) -> None:
        response = case.call(base_url=server, timeout=SECONDS)
        case.validate_response(response, checks=[not_a_server_error, content_type_conformance, status_code_conformance])
        assert response.status_code < 400 or b"error" in response.content

    hold()


def test_there_are_enough_operations_for_ten_thousand() -> None:
    assert len(OPERATIONS) * MANY >= 10_000
