"""Engines and the P/D proxy as HTTP servers, OpenAI-compatible."""
