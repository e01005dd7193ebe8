"""The samples of this worker's shards, read from a data set.

Begin with feeds.py (which feed a data set gets) and loading.py (what is loaded ahead).
It may import `plan` and what lies below it; it knows nothing of models.
"""
