"""Comparison with the official `transformers` implementation, node by node and end to end.

The reference runs in float64 from first to last operation (see `float64.py`), on the same weights and tokens as this
package. Every node of the graph is fed with the reference's own inputs, so that an error is charged to the node that
makes it and does not travel; the whole model is compared beside that, cache included.

PyTorch and `transformers` are needed here and nowhere else in the package: they come with the `reference` extra.
"""

from __future__ import annotations

import importlib.util

from qwen35_jax.errors import Qwen35Error


def require_reference() -> None:
    """Raise one clear line when PyTorch or `transformers` is not installed.

    Raises:
        Qwen35Error: naming the missing packages and the extra that brings them.
    """
    missing = [name for name in ("torch", "transformers") if importlib.util.find_spec(name) is None]
    if missing:
        raise Qwen35Error(
            f"verify compares with the official implementation and needs {' and '.join(missing)}, "
            "not installed here: pip install 'qwen35-jax[reference]'"
        )
