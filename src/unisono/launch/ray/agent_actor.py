"""The actor on a bundle: it runs the agent of one worker."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from unisono.launch.command_process import CommandProcess
from unisono.launch.elastic.host_order import HostOrder
from unisono.launch.ray.request import RayRequest
from unisono.membership.token import token_file

PROGRAM = "unisono.cli.by_order"
"""What an agent is started as. It hears all on its standard input, and its own guard removes its copy of the token: Ray
kills children of an actor with it, but not their children."""


@dataclass(frozen=True, slots=True)
class AgentAccess:
    """What an agent needs to take part. It travels as an object of Ray, never on a command line.

    Attributes:
        url: the coordinator's URL.
        token: the job's token.
        certificate: the coordinator's certificate, PEM; empty without TLS.
        run_dir: the job's run folder, on the coordinator's node.
    """

    url: str
    token: str
    certificate: str
    run_dir: str

    def __repr__(self) -> str:
        return f"AgentAccess({self.url})"

    @property
    def shared_folder(self) -> Path | None:
        """The run folder, if this node sees it: then the token of this very start lies in it."""
        path = Path(self.run_dir)
        with suppress(OSError, UnicodeDecodeError):
            if token_file(path).read_text(encoding="ascii").strip() == self.token:
                return path
        return None


class AgentActor:
    """Runs an agent to its end. Two calls may be under way at the same time: ``run``, and ``leave``.

    Args:
        request: the job.
    """

    def __init__(self, request: RayRequest) -> None:
        self._request = request
        self._process: CommandProcess | None = None
        self._leaves = False

    def run(self, access: AgentAccess, agent: str) -> int:
        """Join the job; the agent's exit code.

        Args:
            access: what it needs to take part.
            agent: its id.

        Raises:
            OSError: the working folder is not on this node.
        """
        order = HostOrder(
            url=access.url,
            is_seen_from_there=False,
            token=access.token,
            certificate=access.certificate,
            folder=working_folder(self._request),
            agent=agent,
            words=tuple(self._request.agent(access.shared_folder)),
        )
        self._process = CommandProcess((), self._request.variables, order.folder, module=PROGRAM, told=order.to_line())
        try:
            if self._leaves:
                self._process.leave()
            code = self._process.wait()
        finally:
            self._process.close()
        assert code is not None
        return code

    def leave(self) -> None:
        """Have its worker leave after the step that is under way."""
        self._leaves = True
        if self._process is not None:
            self._process.leave()


def working_folder(request: RayRequest) -> str:
    """The folder that Ray has unpacked for the job and made the actor's own; else the folder of the driver."""
    import ray

    unpacked = ray.get_runtime_context().runtime_env.get("working_dir")
    return str(Path.cwd()) if unpacked else request.folder
