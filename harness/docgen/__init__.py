"""The pages of docs/ that are made from code, so that they say what the code does."""
