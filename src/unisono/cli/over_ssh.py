"""What ``unisono run --hosts`` runs on each host, over ssh: it says hello, and does what the launcher answers."""

from unisono.cli import by_order
from unisono.launch.elastic.address import HostHello


def main() -> None:
    """Say hello, and obey."""
    print(HostHello.of_this_host().to_line(), flush=True)  # noqa: T201 (for the launcher)
    by_order.main()


if __name__ == "__main__":
    main()
