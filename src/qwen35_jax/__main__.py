"""`python -m qwen35_jax`, the same as the `qwen35` command."""

import sys

from qwen35_jax.cli.main import main

sys.exit(main())
