"""Flax NNX modules: each is its parameters and a pure forward."""
