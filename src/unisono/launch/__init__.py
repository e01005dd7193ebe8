"""Starting workers, watching them, and saying why they ended.

Begin with local.py (one host), elastic/ (workers that come and go) and outcome.py (how a job ended).
It may import `integrations` and what lies below it.
"""
