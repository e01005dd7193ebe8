"""How long the messages of a plan take: latency, and bytes over bandwidth."""

from collections import Counter, defaultdict, deque
from collections.abc import Collection
from dataclasses import dataclass
from math import inf

from unisono.plan.topology import Plan, Transfer

Way = tuple[int, int]
"""From one worker to another."""


@dataclass(frozen=True, slots=True)
class Forecast:
    """What reducing one bucket comes to.

    Attributes:
        rounds: the number of rounds, one after the other.
        messages: the number of messages of all workers.
        most_bytes: the most bytes that any worker sends, or receives.
        seconds: the seconds until all workers have the sum.
    """

    rounds: int
    messages: int
    most_bytes: float
    seconds: float


def forecast(graph: Plan, size: float, latency_s: float, bytes_per_s: float) -> Forecast:
    """What becomes of a plan on a network where each worker has one connection, to a switch that is faster.

    A message takes the latency, and its bytes over the bandwidth that it gets (Hockney, Parallel Computing 20, 1994).
    Messages from one worker to another follow each other; those that share a worker's connection share its bandwidth
    evenly, each way by itself (max-min fairness; Bertsekas and Gallager, Data Networks, 6.5.2). Adding costs nothing.

    Args:
        graph: the plan of who sends what to whom.
        size: the bytes of the bucket, cut into equal pieces.
        latency_s: the seconds of a message without contents.
        bytes_per_s: the bandwidth of a worker's connection, each way.
    """
    piece = size / graph.pieces if graph.pieces else 0.0
    loads: Counter[tuple[str, int]] = Counter()
    for message in graph.messages:
        loads["sends", message.sender] += len(message.nodes)
        loads["receives", message.receiver] += len(message.nodes)
    return Forecast(
        rounds=len(graph.rounds),
        messages=sum(len(message.nodes) for message in graph.messages),
        most_bytes=piece * max(loads.values(), default=0),
        seconds=_seconds(graph, piece, latency_s, bytes_per_s),
    )


def _seconds(graph: Plan, piece: float, latency_s: float, bytes_per_s: float) -> float:
    workers = _Workers(graph)
    left: dict[Transfer, float] = defaultdict(lambda: 1.0)  # the share that has yet to be sent
    under_way: deque[tuple[float, Transfer]] = deque()  # sent, and there at that time
    now = 0.0
    while workers.ways or under_way:
        rates = _fair_rates(workers.ways, bytes_per_s)
        heads = {
            workers.ways[way][0]: rate / max(piece * len(workers.ways[way][0].nodes), 1e-9)
            for way, rate in rates.items()
        }
        sent_in = min((left[message] / rate for message, rate in heads.items()), default=inf)
        there_in = under_way[0][0] - now if under_way else inf
        step = min(sent_in, there_in)
        now += step
        for message, rate in heads.items():
            left[message] -= rate * step
            if left[message] < 1e-9:
                workers.sent(message)
                under_way.append((now + latency_s, message))
        while under_way and under_way[0][0] <= now + 1e-12:
            workers.receive(under_way.popleft()[1])
    return now


class _Workers:
    """How far all workers have come in their turns, and what waits on each way for its time to be sent."""

    def __init__(self, graph: Plan) -> None:
        self._turns = [deque(graph.turns(rank)) for rank in range(graph.split.workers)]
        self._here: set[Transfer | None] = {None}
        self.ways: dict[Way, deque[Transfer]] = {}
        for rank in range(graph.split.workers):
            self._take_turns(rank)

    def sent(self, message: Transfer) -> None:
        """The next one on this way comes to its time."""
        way = message.sender, message.receiver
        self.ways[way].popleft()
        if not self.ways[way]:
            del self.ways[way]

    def receive(self, message: Transfer) -> None:
        """It is there."""
        self._here.add(message)
        self._take_turns(message.receiver)

    def _take_turns(self, rank: int) -> None:
        turns = self._turns[rank]
        while turns and turns[0].received in self._here:
            for message in turns.popleft().sends:
                self.ways.setdefault((message.sender, message.receiver), deque()).append(message)


def _fair_rates(ways: Collection[Way], bytes_per_s: float) -> dict[Way, float]:
    """The tightest connection shares what it has among those that need it; then the next, with what is left."""
    rates: dict[Way, float] = {}
    free: dict[tuple[int, int], float] = defaultdict(lambda: bytes_per_s)  # by worker, and 0 to send or 1 to receive
    while len(rates) < len(ways):
        needs = Counter((rank, end) for way in ways if way not in rates for end, rank in enumerate(way))
        tightest = min(needs, key=lambda one: free[one] / needs[one])
        rate = free[tightest] / needs[tightest]
        for way in ways:
            if way not in rates and way[tightest[1]] == tightest[0]:
                rates[way] = rate
                for end, rank in enumerate(way):
                    free[rank, end] -= rate
    return rates
