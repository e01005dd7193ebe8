"""Finding a state that is wrong, and the one to go back to.

Begin with recovery.py (somebody is lost) and integrity.py (a state is wrong).
It may import `step` of `train`, and what lies below it.
"""
