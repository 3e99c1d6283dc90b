"""The `qwen35` command: a thin layer over the package's public functions, one module a command."""
