"""The program that ``unisono run --hosts`` runs on each host over ssh: it sends a hello, and follows the answer."""

from unisono.cli import by_order
from unisono.launch.elastic.address import HostHello


def main() -> None:
    """Send a hello to the launcher, and carry out its order."""
    print(HostHello.of_this_host().to_line(), flush=True)  # noqa: T201 (for the launcher)
    by_order.main()


if __name__ == "__main__":
    main()
