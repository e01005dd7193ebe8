"""Spans for OpenTelemetry, of rare and long operations.

OpenTelemetry is used only if the script has set a tracer provider, or ``OTEL_TRACES_EXPORTER`` names an exporter.
"""

from __future__ import annotations

import os
import platform
import random
import sys
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from importlib.metadata import entry_points
from typing import Any

from unisono.errors import JobError

FLUSH_MS = 5000
"""The milliseconds that the end of a run waits until spans are sent."""

Attributes = Mapping[str, bool | int | float | str]


class TelemetrySpan:
    """A span that is under way; without OpenTelemetry its methods do nothing."""

    def __init__(self, span: Any = None) -> None:
        self._span = span

    def note(self, attributes: Attributes) -> None:
        """Add attributes, by name without the prefix ``unisono.``."""
        if self._span is not None:
            self._span.set_attributes({f"unisono.{name}": value for name, value in attributes.items()})

    def fail(self, error: BaseException | str) -> None:
        """Mark the span as failed, with the error."""
        if self._span is not None:
            from opentelemetry.trace import StatusCode

            self._span.set_attribute("error.type", "error" if isinstance(error, str) else type(error).__name__)
            self._span.set_status(StatusCode.ERROR, str(error)[:1000])

    def current(self) -> AbstractContextManager[Any]:
        """A context in which spans that begin on this thread are children of this one."""
        if self._span is None:
            return nullcontext()
        from opentelemetry.trace import use_span

        own: AbstractContextManager[Any]
        own = use_span(self._span, record_exception=False, set_status_on_exception=False)
        return own

    def end(self) -> None:
        """End the span; from any thread."""
        if self._span is not None:
            self._span.end()


def begin(name: str, attributes: Attributes, provider: Any = None) -> TelemetrySpan:
    """Begin a span, on the thread of the script. A provider may draw ids from Python's generator, which is put back.

    Args:
        name: the name without the prefix ``unisono.``.
        attributes: the first attributes, by name without that prefix.
        provider: the tracer provider; by default the one that is set in this process.
    """
    trace = _loaded()
    if trace is None:
        return TelemetrySpan()
    state = random.getstate()
    try:
        tracer = (provider or trace.get_tracer_provider()).get_tracer("unisono")
        begun = TelemetrySpan(tracer.start_span(f"unisono.{name}"))
    finally:
        random.setstate(state)
    begun.note(attributes)
    return begun


@contextmanager
def span(name: str, attributes: Attributes, provider: Any = None) -> Iterator[TelemetrySpan]:
    """A span that lasts as long as the block. Spans that begin in the block are its children."""
    begun = begin(name, attributes, provider)
    try:
        with begun.current():
            yield begun
    except Exception as error:
        begun.fail(error)
        raise
    finally:
        begun.end()


def configure(environ: Mapping[str, str]) -> None:
    """Send spans to the exporter that ``OTEL_TRACES_EXPORTER`` names, unless the script has set a provider.

    Raises:
        JobError: a package is not installed, or there is no such exporter; says what to do.
    """
    name = environ.get("OTEL_TRACES_EXPORTER", "").strip()
    if name in ("", "none"):
        return
    try:
        from opentelemetry import trace
        from opentelemetry.sdk.trace import TracerProvider
    except ImportError:
        raise JobError(
            f"OTEL_TRACES_EXPORTER={name} needs opentelemetry-sdk, which is not installed: pip install 'unisono[otel]' "
            f"(in a clone of Unisono: pip install -c constraints.txt '.[otel]'), or unset the variable"
        ) from None
    if isinstance(trace.get_tracer_provider(), TracerProvider):
        return
    trace.set_tracer_provider(_provider(_exporter(name, environ), environ))


def flush() -> None:
    """Send the spans that wait, for some seconds at most."""
    trace = _loaded()
    if trace is not None and hasattr(provider := trace.get_tracer_provider(), "force_flush"):
        provider.force_flush(FLUSH_MS)


def _loaded() -> Any:
    """OpenTelemetry's module if it is loaded; None also while another thread (MLflow's, say) is loading it."""
    trace = sys.modules.get("opentelemetry.trace")
    return trace if hasattr(trace, "get_tracer_provider") else None


def _exporter(name: str, environ: Mapping[str, str]) -> Any:
    protocol = environ.get("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL") or environ.get("OTEL_EXPORTER_OTLP_PROTOCOL") or ""
    exporter = f"otlp_proto_{'grpc' if protocol == 'grpc' else 'http'}" if name == "otlp" else name
    installed = {entry.name: entry for entry in entry_points(group="opentelemetry_traces_exporter")}
    if exporter not in installed:
        raise JobError(
            f"OTEL_TRACES_EXPORTER={name}: the exporters here are {', '.join(sorted(installed)) or 'none'}. "
            f"Install the package of {exporter}, or choose another one"
        )
    return installed[exporter].load()()


class _Ids:
    """A generator of ids for a tracer provider that does not use the script's random numbers."""

    def generate_span_id(self) -> int:
        return int.from_bytes(os.urandom(8), "big") or 1

    def generate_trace_id(self) -> int:
        return int.from_bytes(os.urandom(16), "big") or 1

    def is_trace_id_random(self) -> bool:
        return True


def _provider(exporter: Any, environ: Mapping[str, str]) -> Any:
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    own = {} if environ.get("OTEL_SERVICE_NAME") else {"service.name": "unisono"}
    resource = Resource.create({**own, "host.name": platform.node(), "process.pid": os.getpid()})
    provider = TracerProvider(id_generator=_Ids(), resource=resource)
    provider.add_span_processor(BatchSpanProcessor(exporter))
    return provider
