"""Faults for vLLM's KV transfer, and the process that kvchaos' target `vllm` runs an engine in.

Never install this where real requests are served. Nothing happens by itself: a fault acts only after it was armed, and
that needs a token in the environment (`kvchaos_vllm_faults.token`). Importing this package imports neither vLLM nor
torch.
"""

__version__ = "0.1.0"
