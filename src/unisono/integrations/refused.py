"""What people are told of what cannot be kept of a guest: one table, with what to do instead."""

from pathlib import Path

from unisono.data.refused import Refusals

refused = Refusals(Path(__file__).with_name("refusals.toml"))
