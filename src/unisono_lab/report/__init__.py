"""The report of a study: tables, charts, pages.

report.py writes a report: document.py has its words, charts.py its pictures.
It may import `study`, `simulation` and what lies below them.
"""
