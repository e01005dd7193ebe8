"""Write a market trace that is generated: no cloud has ever given it.

    python examples/simulation/generate_trace.py --seed 0 > examples/simulation/generated-trace.csv

Of each zone, moments at which hosts are taken away come as a Poisson process; in 58 % of them, as in the traces of Wu
et al. (SkyPilot), NSDI 2024, all hosts of the zone go at once. They are back after exponential times. The logarithm of
the price goes back and forth around its mean as an Ornstein-Uhlenbeck process. The same seed writes the same bytes.
"""

import argparse
import math
import random
import sys

HOUR_S = 3600
WHOLE_ZONE = 0.58

arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
arguments.add_argument("--seed", type=int, default=0)
arguments.add_argument("--days", type=int, default=7)
arguments.add_argument("--zones", type=int, default=2)
arguments.add_argument("--hosts", type=int, default=2, help="of each zone, when all are there")
arguments.add_argument("--price", type=float, default=1.0, help="of a host, an hour, on average")
arguments.add_argument("--between-losses-s", type=float, default=3 * HOUR_S, help="mean seconds, in a zone")
arguments.add_argument("--away-s", type=float, default=HOUR_S, help="mean seconds until hosts are back")


def available(chance: random.Random, hosts: int, between_losses_s: float, away_s: float, hours: int) -> list[int]:
    """How many hosts there are in each hour: the fewest that there were in it."""
    back = [0.0] * hosts
    found: list[int] = []
    loss = chance.expovariate(1 / between_losses_s)
    for hour in range(hours):
        fewest = sum(at <= hour * HOUR_S for at in back)
        while loss < (hour + 1) * HOUR_S:
            taken = range(hosts) if chance.random() < WHOLE_ZONE else [chance.randrange(hosts)]
            for host in taken:
                back[host] = max(back[host], loss + chance.expovariate(1 / away_s))
            fewest = min(fewest, sum(at <= loss for at in back))
            loss += chance.expovariate(1 / between_losses_s)
        found.append(fewest)
    return found


def prices(chance: random.Random, mean: float, hours: int) -> list[float]:
    """In each hour: the logarithm halves its distance from the mean in six hours, and varies by about a fifth."""
    keeps, off = 0.5 ** (1 / 6), 0.0
    found: list[float] = []
    for _ in range(hours):
        off = keeps * off + math.sqrt(1 - keeps**2) * chance.gauss(0.0, 0.2)
        found.append(mean * math.exp(off))
    return found


def main(given: argparse.Namespace) -> None:
    """Rows that are alike in hosts and price are one row."""
    out = ["start,end,available,price_per_hour,zone"]
    for zone in range(given.zones):
        chance = random.Random(f"{given.seed}/{zone}")  # noqa: S311 (no secret)
        hours = 24 * given.days
        hosts = available(chance, given.hosts, given.between_losses_s, given.away_s, hours)
        rows = [*zip(hosts, (f"{price:.2f}" for price in prices(chance, given.price, hours)), strict=True)]
        starts = [hour for hour in range(hours) if hour == 0 or rows[hour] != rows[hour - 1]]
        for start, end in zip(starts, [*starts[1:], hours], strict=True):
            out.append(f"{start * HOUR_S},{end * HOUR_S},{rows[start][0]},{rows[start][1]},generated-{zone}")
    sys.stdout.write("\n".join(out) + "\n")


if __name__ == "__main__":
    main(arguments.parse_args())
