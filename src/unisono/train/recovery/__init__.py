"""Finding a state that is wrong, and the one to go back to.

Begin with recovery.py (a worker is lost), integrity.py (a state is wrong) and boundary.py (between two steps).
It may import `step` of `train`, and what lies below it.
"""
