"""The system under test: a small but real prefill/decode inference engine with KV checksums."""
