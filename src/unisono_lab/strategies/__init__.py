"""Strategies whose workers ask servers, a central model or each other: as values, and as a worker's part in them."""
