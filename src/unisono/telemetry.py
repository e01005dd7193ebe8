"""Spans for OpenTelemetry, of what seldom happens and takes long. Nothing is loaded unless somebody wants them.

Somebody does where the script has set a tracer provider, or ``OTEL_TRACES_EXPORTER`` names an exporter.
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
"""How long the end of a run waits until spans are sent."""

Attributes = Mapping[str, bool | int | float | str]


class TelemetrySpan:
    """A span that is under way; or none, where nobody wants it."""

    def __init__(self, span: Any = None) -> None:
        self._span = span

    def note(self, attributes: Attributes) -> None:
        """Add what is known by now, by name without the prefix ``unisono.``."""
        if self._span is not None:
            self._span.set_attributes({f"unisono.{name}": value for name, value in attributes.items()})

    def fail(self, error: BaseException | str) -> None:
        """Say what went wrong."""
        if self._span is not None:
            from opentelemetry.trace import StatusCode

            self._span.set_attribute("error.type", "error" if isinstance(error, str) else type(error).__name__)
            self._span.set_status(StatusCode.ERROR, str(error)[:1000])

    def current(self) -> AbstractContextManager[Any]:
        """Spans that begin meanwhile on this thread are its children."""
        if self._span is None:
            return nullcontext()
        from opentelemetry.trace import use_span

        own: AbstractContextManager[Any]
        own = use_span(self._span, record_exception=False, set_status_on_exception=False)
        return own

    def end(self) -> None:
        """It is over. From any thread."""
        if self._span is not None:
            self._span.end()


def begin(name: str, attributes: Attributes, provider: Any = None) -> TelemetrySpan:
    """Begin a span. On the thread of the script, whose random numbers stay as they are: ids may be drawn of them.

    Args:
        name: the name without the prefix ``unisono.``.
        attributes: the known attributes, by name without that prefix.
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
    """A span for as long as the block lasts; those that begin in it are its children."""
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
    """Send spans where ``OTEL_TRACES_EXPORTER`` says, unless the script has seen to that.

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
    """Send what waits, as far as that takes no longer than some seconds."""
    trace = _loaded()
    if trace is not None and hasattr(provider := trace.get_tracer_provider(), "force_flush"):
        provider.force_flush(FLUSH_MS)


def _loaded() -> Any:
    """OpenTelemetry's module, if it is loaded. While a thread is at it (MLflow loads it, say), no provider is set."""
    trace = sys.modules.get("opentelemetry.trace")
    return trace if hasattr(trace, "get_tracer_provider") else None


def _exporter(name: str, environ: Mapping[str, str]) -> Any:
    protocol = environ.get("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL") or environ.get("OTEL_EXPORTER_OTLP_PROTOCOL") or ""
    wanted = f"otlp_proto_{'grpc' if protocol == 'grpc' else 'http'}" if name == "otlp" else name
    known = {entry.name: entry for entry in entry_points(group="opentelemetry_traces_exporter")}
    if wanted not in known:
        raise JobError(
            f"OTEL_TRACES_EXPORTER={name}: there is no such exporter here: {', '.join(sorted(known)) or 'none'}. "
            f"Install the package of {wanted}, or choose another one"
        )
    return known[wanted].load()()


class _Ids:
    """Ids that are not drawn from the random numbers of the script, for a tracer provider."""

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
