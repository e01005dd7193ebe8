"""The report of a study: tables, charts, pages."""
