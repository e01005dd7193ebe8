"""A report as one HTML file that needs nothing else: no network, no script."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.resources import files

from unisono.study.report.document import Document
from unisono.study.report.drawing import Drawing, inline

TEMPLATE = "report.html"


def page(document: Document, drawings: Mapping[str, Drawing]) -> str:
    """The report, light or dark as the reader's screen is. Whatever labels hold is text, never markup.

    Args:
        document: what it says.
        drawings: of its charts, by their names.
    """
    from jinja2 import Environment, StrictUndefined
    from markupsafe import Markup

    text = files(__package__).joinpath(TEMPLATE).read_text(encoding="utf-8")
    drawn = {name: Markup(inline(name, one)) for name, one in drawings.items()}  # noqa: S704 (matplotlib has escaped it)
    template = Environment(autoescape=True, undefined=StrictUndefined).from_string(text)
    return str(template.render(document=document, drawn=drawn))
