"""The report: a run directory as a table, plots, a failure analysis, slides and a page."""
