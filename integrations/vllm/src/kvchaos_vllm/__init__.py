"""KV checksums for vLLM's prefill/decode disaggregation, added from outside: a connector that checks what it loads.

Importing this package imports neither vLLM nor torch.
"""

__version__ = "0.1.0"
