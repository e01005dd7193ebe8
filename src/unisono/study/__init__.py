"""Studies of recorded runs: scaling, the largest batch, and replays of policies."""
