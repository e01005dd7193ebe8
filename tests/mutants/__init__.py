"""Mistakes that the tests of the membership and the hand-over must find, and what makes them one after the other."""
