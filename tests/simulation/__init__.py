"""The membership on a clock that is a number: workers, hosts, connections and a coordinator in one process.

One seed makes one schedule: what is delayed, what is lost with its connection, who dies, and when.
"""
