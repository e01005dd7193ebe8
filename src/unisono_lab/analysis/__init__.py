"""The analysis of a scaling study's figures."""
