"""How workers and jobs end, and in which words that is told."""
