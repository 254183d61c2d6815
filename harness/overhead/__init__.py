"""What KV checksums cost a user: load generation, the design of the study, its statistics and its report."""
