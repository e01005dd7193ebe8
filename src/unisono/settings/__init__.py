"""The table of settings: a row for each, from which arguments, options, variables and the guide's tables follow."""
