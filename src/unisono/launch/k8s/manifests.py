"""Manifests as text, and their files."""

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from unisono.errors import JobError

MARK = "# written by unisono k8s"

PLAIN = re.compile(r"[A-Za-z][A-Za-z/.-]+")
"""Text that stays text for every reader of YAML. The Go of Kubernetes takes 1e-3 for a number, which others do not."""

Manifest = dict[str, Any]

TEMPLATE = Path(__file__).with_suffix(".yaml")


def filled(kind: str, values: Mapping[str, Any]) -> Manifest:
    """A manifest of the template.

    Args:
        kind: the kind of its object.
        values: what the template names, by name; None for what is left out, with its key.

    Raises:
        JobError: there is no PyYAML.
    """
    yaml = _yaml()

    class TemplateLoader(yaml.SafeLoader):  # type: ignore[misc,name-defined]  # whether it is there is found out above
        """Has values where the template names them."""

    TemplateLoader.add_constructor("!of", lambda _, node: values[node.value])
    found: Manifest = _kept(yaml.load(TEMPLATE.read_text("utf-8"), TemplateLoader)[kind])
    return found


def _yaml() -> Any:
    if find_spec("yaml") is None:
        raise JobError("manifests are written with PyYAML: pip install '.[k8s]' in a clone of Unisono")
    return import_module("yaml")


def _kept(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _kept(each) for key, each in value.items() if each is not None}
    return list(_laid_out(value)) if isinstance(value, list) else value


def _laid_out(values: list[Any]) -> Iterator[Any]:
    for each in values:
        if isinstance(each, list):
            yield from _laid_out(each)
        elif each is not None:
            yield _kept(each)


def text_of(manifests: Sequence[Any], words: str) -> str:
    """Manifests as one file of YAML.

    Args:
        manifests: the manifests.
        words: a comment for the first line: the command that wrote them.

    Raises:
        JobError: there is no PyYAML, or a text has characters that YAML cannot hold.
    """
    yaml = _yaml()

    class ManifestDumper(yaml.SafeDumper):  # type: ignore[misc,name-defined]  # whether it is there is found out above
        """Quotes all text that anybody could take for something else."""

        def ignore_aliases(self, data: Any) -> bool:
            return True

        def text(self, data: str) -> Any:
            style = "|" if "\n" in data else None if PLAIN.fullmatch(data) else '"'
            return self.represent_scalar("tag:yaml.org,2002:str", data, style=style)

    ManifestDumper.add_representer(str, ManifestDumper.text)
    for manifest in manifests:
        _require_text(manifest)
    body = yaml.dump_all(manifests, Dumper=ManifestDumper, sort_keys=False, width=10**6, allow_unicode=True)
    comment = "".join(letter if letter.isprintable() else "?" for letter in words)
    return f"{MARK}: {comment}\n{body}"


def _require_text(value: Any) -> None:
    if isinstance(value, dict):
        value = [*value, *value.values()]
    if isinstance(value, list):
        for each in value:
            _require_text(each)
    elif isinstance(value, str):
        try:
            value.encode()
        except UnicodeEncodeError:
            raise JobError(f"{value!a} is no text that a manifest can hold: it is not UTF-8") from None
        if "\0" in value:
            raise JobError(f"{value!a} is no text that a manifest can hold")


def write(text: str, path: Path, *, secret: bool = False) -> None:
    """Write manifests into a file: a new one, or one that was written so before.

    Args:
        text: the manifests.
        path: the path of the file.
        secret: whether only this user may read it, and it must be new.

    Raises:
        JobError: the file is another's, holds keys already, or cannot be written.
    """
    try:
        if secret:
            _write_new(text, path)
        elif path.exists() and not path.read_bytes().startswith(MARK.encode()):
            raise JobError(f"{path} is there already, and unisono k8s did not write it: name another file")
        else:
            path.write_text(text, encoding="utf-8")
    except FileExistsError:
        raise JobError(f"{path} is there already: keys are written into a new file only") from None
    except OSError as error:
        raise JobError(f"{path} cannot be written: {error.strerror}") from error


def _write_new(text: str, path: Path) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    with os.fdopen(descriptor, "w", encoding="utf-8") as file:
        file.write(text)
