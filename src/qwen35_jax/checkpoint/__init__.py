"""Checkpoints: Hugging Face layout read and written, Orbax folders, and downloads from the hub."""

from qwen35_jax.checkpoint.export import export_hf
from qwen35_jax.checkpoint.hf import KeptTensors, load_hf
from qwen35_jax.checkpoint.source import LoadedModel, load

__all__ = ["KeptTensors", "LoadedModel", "export_hf", "load", "load_hf"]
