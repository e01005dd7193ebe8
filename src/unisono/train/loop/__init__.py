"""The loop over a data set: which steps it has, what they load, and evaluation.

Begin with course.py (which step comes next) and loop_data.py (its batches).
It may import `recovery` of `train`, and what lies below it.
"""
