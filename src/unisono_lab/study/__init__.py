"""A scaling study: what is measured, the runs that measure it, and what follows from the figures.

study_folder.py keeps measurements, measuring.py makes them, analysis.py says what follows.
It may import `recorded`, `page`, `strategies`, `second_order` and what lies below them.
"""
