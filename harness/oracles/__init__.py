"""What knows the truth. No oracle looks at a checksum that the engine computed."""
