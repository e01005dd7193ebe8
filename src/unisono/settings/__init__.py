"""The table of settings: a row for each, from which arguments, options, variables and the guide's tables follow.

table.py has a row for each setting, reading.py reads values from arguments and variables.
It may import `word_sums` and what lies below it.
"""
