"""The command line: parse and print. Every command is a call.

app.py lists the commands; run_command.py is `unisono run`.
It may import everything.
"""
