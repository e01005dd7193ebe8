"""Spans for OpenTelemetry: nothing without somebody who wants them, and no random number drawn."""

from __future__ import annotations

import random
import subprocess
import sys
from collections.abc import Mapping
from types import ModuleType

import pytest
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from unisono import telemetry
from unisono.errors import JobError

pytestmark = pytest.mark.unit


@pytest.fixture
def memory() -> InMemorySpanExporter:
    return InMemorySpanExporter()


@pytest.fixture
def provider(memory: InMemorySpanExporter) -> TracerProvider:
    """As a script may set it: its ids are drawn from Python's random numbers."""
    made = TracerProvider()
    made.add_span_processor(SimpleSpanProcessor(memory))
    return made


def attributes(found: Mapping[str, object] | None) -> dict[str, object]:
    return dict(found or {})


def test_a_span_has_its_attributes_and_its_children(memory: InMemorySpanExporter, provider: TracerProvider) -> None:
    with telemetry.span("regroup", {"step": 3}, provider) as outer:
        with telemetry.span("hand_over", {"behind": 1}, provider):
            pass
        outer.note({"generation": 2})
    inner, whole = memory.get_finished_spans()
    assert (inner.name, whole.name) == ("unisono.hand_over", "unisono.regroup")
    assert attributes(whole.attributes) == {"unisono.step": 3, "unisono.generation": 2}
    assert inner.parent is not None
    assert inner.parent.span_id == whole.context.span_id


def test_a_module_that_a_thread_has_begun_to_load_counts_as_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """The thread of a logger loads MLflow, and MLflow OpenTelemetry, while the script comes to a regroup."""
    monkeypatch.setitem(sys.modules, "opentelemetry.trace", ModuleType("opentelemetry.trace"))
    with telemetry.span("regroup", {}) as found:
        found.note({"generation": 2})
    telemetry.flush()


def test_what_goes_wrong_is_the_status_of_the_span(memory: InMemorySpanExporter, provider: TracerProvider) -> None:
    with pytest.raises(JobError), telemetry.span("regroup", {}, provider):
        raise JobError("no room")
    (found,) = memory.get_finished_spans()
    assert not found.status.is_ok
    assert found.status.description == "no room"
    assert attributes(found.attributes)["error.type"] == "JobError"


def test_the_random_numbers_of_the_script_stay_as_they_are(provider: TracerProvider) -> None:
    before = random.getstate()
    with telemetry.span("regroup", {}, provider):
        telemetry.begin("checkpoint", {}, provider).end()
    assert random.getstate() == before


def test_an_exporter_that_is_not_there_is_refused_with_those_that_are() -> None:
    with pytest.raises(JobError, match="OTEL_TRACES_EXPORTER=zipkin: the exporters here are .*console.*otlp"):
        telemetry.configure({"OTEL_TRACES_EXPORTER": "zipkin"})
    telemetry.configure({"OTEL_TRACES_EXPORTER": "none"})


OWN = """
import random, sys
sys.modules.update(dict.fromkeys(LACKING))
from unisono import telemetry
from unisono.errors import JobError
with telemetry.span("nothing", {}):
    pass
telemetry.flush()
assert "opentelemetry.trace" not in sys.modules
before = random.getstate()
try:
    telemetry.configure({"OTEL_TRACES_EXPORTER": "console"})
except JobError as error:
    print(error)
with telemetry.span("regroup", {"step": 1}):
    assert random.getstate() == before
telemetry.flush()
"""


def outcome(lacking: str) -> str:
    """What a process of its own prints, since a provider is set once in a process."""
    words = [sys.executable, "-c", OWN.replace("LACKING", lacking)]
    return subprocess.run(words, capture_output=True, text=True, check=True).stdout


def test_the_environment_says_where_spans_go() -> None:
    said = outcome("[]")
    assert '"name": "unisono.regroup"' in said
    assert '"service.name": "unisono"' in said


def test_without_the_package_it_is_said_how_to_get_it() -> None:
    assert "needs opentelemetry-sdk, which is not installed: pip install 'unisono[otel]'" in outcome(
        "['opentelemetry']"
    ).replace("\n", "")
