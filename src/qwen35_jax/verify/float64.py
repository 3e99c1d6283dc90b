"""Makes the `transformers` implementation of Qwen3.5 compute in float64.

Loading that implementation with `dtype=torch.float64` is not enough: it casts to float32 in its norms, delta rule,
softmax, rotary tables and loss, whatever the dtype of the model. Within `float64_arithmetic()` these casts go to
float64 instead: the name `torch` inside the modules concerned is replaced by a stand-in whose `float32` is `float64`,
and `Tensor.float()` becomes `Tensor.double()`. No code of the reference is copied or rewritten.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
import transformers.loss.loss_utils as loss_module
import transformers.modeling_rope_utils as rope_module
import transformers.models.qwen3_5.modeling_qwen3_5 as qwen_module
import transformers.vision_utils as vision_module

_MODULES_WITH_FLOAT32_CASTS = (qwen_module, rope_module, vision_module, loss_module)


class _DoublePrecisionTorch:
    """Stands for the `torch` module: every name is the real one, except that float32 means float64."""

    float32 = torch.float64
    float = torch.float64

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


@contextlib.contextmanager
def float64_arithmetic() -> Iterator[None]:
    """Within this context the reference's hard-coded float32 casts are casts to float64.

    It has to surround both the construction of a model (its rotary tables are computed there) and every call of it.
    Not for use from several threads: it replaces module attributes while it is open.
    """
    stand_in = _DoublePrecisionTorch()
    with contextlib.ExitStack() as undo:
        for module in _MODULES_WITH_FLOAT32_CASTS:
            undo.callback(setattr, module, "torch", torch)
            setattr(module, "torch", stand_in)  # noqa: B010, no type knows of this attribute
        undo.callback(setattr, torch.Tensor, "float", torch.Tensor.float)
        torch.Tensor.float = lambda self, *args, **kwargs: self.double(*args, **kwargs)
        yield


def recompute_rotary_frequencies(model: torch.nn.Module) -> None:
    """Set the inverse frequencies of every text rotary embedding from its config, unrounded.

    Constructing or loading a model may have passed them through float32. To be called within `float64_arithmetic()`.
    """
    for module in model.modules():
        if isinstance(module, qwen_module.Qwen3_5TextRotaryEmbedding):
            if module.rope_type == "default":
                frequencies, scaling = module.compute_default_rope_parameters(module.config)
            else:
                frequencies, scaling = rope_module.ROPE_INIT_FUNCTIONS[str(module.rope_type)](module.config)
            module.inv_freq.data = frequencies
            module.original_inv_freq.data = frequencies.clone()
            module.attention_scaling = scaling


@contextlib.contextmanager
def one_thread() -> Iterator[None]:
    """Within this context PyTorch uses one thread: on narrow models its threads cost more than they save."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
