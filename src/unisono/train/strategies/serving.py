"""Which workers serve, by the strategy."""

from unisono.sync.parameter_server import ParameterServer
from unisono.sync.strategy import Strategy
from unisono.train.group.workers import Workers


def serve(workers: Workers, strategy: Strategy) -> bool:
    """Have workers serve from the next step on, as a strategy wants it; or all compute. All workers do this alike.

    Args:
        workers: of this generation.
        strategy: that is in use.

    Returns:
        whether that can be: else there are too few workers, and all of them serve and compute.
    """
    central = strategy if isinstance(strategy, ParameterServer) and strategy.synchronous else None
    workers.servers = 0 if central is None else central.servers
    # Where no worker only serves, each finishes a share; where some do, there is no other way.
    workers.transport.go_direct(always=central is not None and not central.servers)
    return workers.servers < workers.world_size
