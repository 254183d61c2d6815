"""The report of an overhead study: its figures as data, and what turns them into summary.md, JSON and report.html."""
