"""What a connector must fulfil, as checks that say in words what is wrong. `harness/kit.py` makes tests of them."""
