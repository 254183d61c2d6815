"""The protocol of docs/spec.md: what is summed, how it travels, and what is concluded from it."""
