"""The records and displays of a run's steps.

metrics_line.py is a line of metrics.jsonl, result_file.py is result.json, progress.py the bar.
It may import `loop` of `train`, and what lies below it.
"""
