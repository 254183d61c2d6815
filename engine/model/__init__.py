"""The transformer: seeded weights and exact arithmetic, without any idea of blocks or requests."""

from engine.model.transformer import Model, load_model

__all__ = ["Model", "load_model"]
