"""The workers to leave out so that all others reach each other: the vertex cover of least weight."""

from collections.abc import Iterable, Mapping

Graph = dict[str, frozenset[str]]
"""Of each vertex, its neighbours."""

BUDGET = 1_000
"""Branches that the exact search looks at, in each connected part of the graph."""


def lightest_cover(
    pairs: Iterable[tuple[str, str]], weights: Mapping[str, int], budget: int = BUDGET
) -> frozenset[str]:
    """Vertices of which each pair has one, with the least sum of weights.

    Exact where the search ends within its budget, as it does for some tens of vertices and for networks that fall apart
    into groups of any size; else a cover from which no vertex can be taken away. The same for the same arguments.

    Args:
        pairs: edges, each a pair of two different vertices.
        weights: the weight of every vertex, above 0. If no two sets of vertices weigh the same, there is one answer.
        budget: branches that the exact search looks at, in each connected part of the graph.
    """
    graph = _graph(pairs)
    return frozenset[str]().union(*(_Search(part, weights, budget).best for part in _parts(graph)))


class _Search:
    """Branch and bound in one connected part: a vertex goes, or all of its neighbours do.

    Attributes:
        best: the lightest cover found.
    """

    def __init__(self, graph: Graph, weights: Mapping[str, int], budget: int) -> None:
        self._weights, self._left = weights, budget
        self.best = _greedy(graph, weights)
        self._least = self._weight(self.best)
        self._look(graph, frozenset())

    def _look(self, graph: Graph, gone: frozenset[str]) -> None:
        self._left -= 1
        if self._left < 0 or self._weight(gone) + self._bound(graph) >= self._least:
            return
        if not graph:
            self.best, self._least = gone, self._weight(gone)
            return
        vertex = max(graph, key=lambda name: (len(graph[name]), name))
        for goes in (graph[vertex], frozenset((vertex,))):
            self._look(_without(graph, goes), gone | goes)

    def _bound(self, graph: Graph) -> int:
        """Of pairs that share no vertex, one each has to go."""
        taken: set[str] = set()
        least = 0
        for vertex, neighbours in graph.items():
            partner = next((other for other in sorted(neighbours) if other not in taken), None)
            if vertex not in taken and partner is not None:
                taken |= {vertex, partner}
                least += min(self._weights[vertex], self._weights[partner])
        return least

    def _weight(self, gone: Iterable[str]) -> int:
        return sum(self._weights[vertex] for vertex in gone)


def _graph(pairs: Iterable[tuple[str, str]]) -> Graph:
    neighbours: dict[str, set[str]] = {}
    for one, other in pairs:
        assert one != other, "nobody is out of its own reach"
        neighbours.setdefault(one, set()).add(other)
        neighbours.setdefault(other, set()).add(one)
    return {vertex: frozenset(neighbours[vertex]) for vertex in sorted(neighbours)}


def _parts(graph: Graph) -> Iterable[Graph]:
    """The connected parts."""
    left = dict(graph)
    while left:
        found = edge = frozenset((next(iter(left)),))
        while edge:
            edge = frozenset[str]().union(*(graph[vertex] for vertex in edge)) - found
            found |= edge
        yield {vertex: left.pop(vertex) for vertex in graph if vertex in found}


def _without(graph: Graph, gone: frozenset[str]) -> Graph:
    kept = {vertex: neighbours - gone for vertex, neighbours in graph.items() if vertex not in gone}
    return {vertex: neighbours for vertex, neighbours in kept.items() if neighbours}


def _greedy(graph: Graph, weights: Mapping[str, int]) -> frozenset[str]:
    """A cover from which no vertex can be taken away: at each step goes who weighs least for each pair that it ends."""
    gone: list[str] = []
    left = graph
    while left:
        gone.append(min(left, key=lambda name: (weights[name] / len(left[name]), name)))
        left = _without(left, frozenset(gone[-1:]))
    for vertex in sorted(gone, key=lambda name: (-weights[name], name)):
        if graph[vertex] <= set(gone) - {vertex}:
            gone.remove(vertex)
    return frozenset(gone)
