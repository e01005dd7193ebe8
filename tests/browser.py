"""A browser of one person, with the page of a run."""

from typing import Any

PATIENCE_MS = 60_000


class Viewer:
    """One person's browser, with the page of a run, and all that it complains of."""

    def __init__(self, browser: Any, link: str, **context: Any) -> None:
        self._context = browser.new_context(**context)
        self._context.set_default_timeout(PATIENCE_MS)
        self.page = self._context.new_page()
        self.complaints: list[str] = []
        self.page.on("console", lambda one: self.complaints.append(one.text))
        self.page.on("pageerror", lambda one: self.complaints.append(str(one)))
        self.page.goto(link)

    def text(self, selector: str) -> str:
        return str(self.page.inner_text(selector))

    def until(self, script: str, argument: Any = None) -> Any:
        """What a script in the page comes to, once it is something."""
        return self.page.wait_for_function(script, arg=argument, polling=20).json_value()

    def press(self, selector: str) -> None:
        self.page.click(selector)

    def close(self) -> None:
        self._context.close()
