"""Membership: this worker's rank, the coordinator, and the forming of generations.

state/ decides, coordinator.py and server.py serve, client.py asks, and messages.py is what travels.
It may import `plan` and what lies below it; no torch in the coordinator.
"""
