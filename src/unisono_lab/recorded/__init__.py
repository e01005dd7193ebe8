"""A recorded run: its events and steps, the timelines of its workers, and the replay of policies."""
