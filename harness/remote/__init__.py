"""Seams across processes: an engine asks the harness at each seam, and the harness reads and writes its memory."""
