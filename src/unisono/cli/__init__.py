"""The command line: parse and print. Every command is a call."""
