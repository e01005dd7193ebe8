"""The live page of a run, which shows its run folder and its coordinator's status in a browser.

page_server.py serves run_model.py (a run as the page shows it) to web/, which has no build step.
It may import the core, `faults` and `journal_events`.
"""
