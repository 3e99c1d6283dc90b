"""Answers that keep to a grammar: JSON of a schema, or calls of declared tools, walked by `llguidance` on the host."""
