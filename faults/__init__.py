"""What can go wrong, one kind a file. A fault acts only through seams and levers."""
