"""Other frameworks' own tests, which they ship, with Unisono put in: see `make test-peers`."""
