"""What a launcher shows of its workers: their lines, with each one's name."""
