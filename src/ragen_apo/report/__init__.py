"""The report: a run directory as a table, plots, a failure analysis, slides and a page."""

from ragen_apo.report.write import write_report

__all__ = ["write_report"]
