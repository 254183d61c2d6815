"""Runs scenarios on a target, keeps the history, judges it, writes the reports; the command line."""
