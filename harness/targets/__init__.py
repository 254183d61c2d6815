"""Where scenarios run."""
