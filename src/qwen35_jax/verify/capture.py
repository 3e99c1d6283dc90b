"""Records what enters and leaves every node of the graph while the official implementation runs.

Values come from module hooks, and from wrapping the functions that the reference's modelling file calls by name
(convolution, delta rule, rotary embedding, attention). They are stored as NumPy arrays in this package's axis order,
so that a node of ours can be fed with them as they are:

    in every layer       layer_in, normed, mixed (the mixer's output), residual, post_normed,
                         mlp_gate, mlp_up, mlp_act, mlp_out, layer_out      [batch time dim]
    Gated DeltaNet       q_proj, k_proj, v_proj, z, b, a; window_q, window_k, window_v and their new_ values;
                         q_conv, k_conv, v_conv; state, new_state; core; core_normed
    gated attention      q_proj, gate, k_proj, v_proj; q_norm, k_norm; cos, sin; q_rope, k_rope; past_k, past_v;
                         core; gated
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
import transformers.models.qwen3_5.modeling_qwen3_5 as qwen_module
from einops import rearrange

from qwen35_jax.config import LayerKind
from qwen35_jax.verify.reference import ReferenceModel, text_model

LayerRecord = dict[str, np.ndarray]


@dataclasses.dataclass
class CallRecord:
    """One call of the reference: its inputs, every node's value, and the logits."""

    tokens: np.ndarray
    embed: np.ndarray
    layers: list[LayerRecord]
    kinds: list[LayerKind]
    final_norm_in: np.ndarray
    final_norm: np.ndarray
    logits: np.ndarray


def _array(tensor: torch.Tensor) -> np.ndarray:
    return tensor.detach().to("cpu").numpy().copy()


def _split_channels(layer: Any, channels: np.ndarray, prefix: str, suffix: str) -> LayerRecord:
    """Cut the last axis of `channels` into query, key and value heads: the order of `in_proj_qkv` and of the conv."""
    mixer = layer.linear_attn
    q, k, v = np.split(channels, [mixer.key_dim, 2 * mixer.key_dim], axis=-1)
    return {
        f"{prefix}q{suffix}": rearrange(q, "... (heads dim) -> ... heads dim", dim=mixer.head_k_dim),
        f"{prefix}k{suffix}": rearrange(k, "... (heads dim) -> ... heads dim", dim=mixer.head_k_dim),
        f"{prefix}v{suffix}": rearrange(v, "... (heads dim) -> ... heads dim", dim=mixer.head_v_dim),
    }


class _Recorder:
    """Collects the values of one call. `layer` and `record` point at the decoder layer that is running."""

    def __init__(self, model: ReferenceModel) -> None:
        self.decoder = text_model(model)
        self.lm_head = model.lm_head
        self.layers: list[LayerRecord] = []
        self.outside: LayerRecord = {}
        self.layer: Any = None

    @property
    def record(self) -> LayerRecord:
        return self.layers[-1]

    # What a hook needs at each module.

    def store_output(self, name: str) -> Callable[..., None]:
        return lambda module, args, output: self.record.__setitem__(name, _array(output))

    def store_input(self, name: str) -> Callable[..., None]:
        return lambda module, args: self.record.__setitem__(name, _array(args[0]))

    def enter_layer(self, module: Any, args: tuple, kwargs: dict) -> None:
        self.layer = module
        self.layers.append({"layer_in": _array(args[0])})

    def window(self, mixer: Any, cache: Any, prefix: str, like: torch.Tensor) -> None:
        """Store the convolution's carried inputs: the reference keeps one column more than is ever used."""
        taps = mixer.conv_kernel_size - 1
        state = None if cache is None else cache.get_conv_state(mixer.layer_idx, state_idx=0)
        if state is None:
            state = like.new_zeros(like.shape[0], mixer.conv_dim, taps)
        columns = rearrange(_array(state[:, :, -taps:]), "batch channels taps -> batch taps channels")
        self.record.update(_split_channels(self.layer, columns, prefix, ""))

    def enter_delta_net(self, mixer: Any, args: tuple, kwargs: dict) -> None:
        self.window(mixer, kwargs.get("cache"), "window_", kwargs["hidden_states"])

    def leave_delta_net(self, mixer: Any, args: tuple, kwargs: dict, output: torch.Tensor) -> None:
        self.window(mixer, kwargs.get("cache"), "new_window_", kwargs["hidden_states"])
        self.record["mixed"] = _array(output)

    def in_proj_qkv(self, module: Any, args: tuple, output: torch.Tensor) -> None:
        self.record.update(_split_channels(self.layer, _array(output), "", "_proj"))

    def in_proj_z(self, module: Any, args: tuple, output: torch.Tensor) -> None:
        width = self.layer.linear_attn.head_v_dim
        self.record["z"] = rearrange(_array(output), "... (heads dim) -> ... heads dim", dim=width)

    def gated_norm(self, module: Any, args: tuple, output: torch.Tensor) -> None:
        # The reference flattens batch, time and heads into one axis before this norm.
        self.record["core_normed"] = _array(output).reshape(self.record["core"].shape)

    def enter_attention(self, attention: Any, args: tuple, kwargs: dict) -> None:
        cache, hidden = kwargs.get("cache"), kwargs["hidden_states"]
        layer = None if cache is None else cache.layers[attention.layer_idx]
        if layer is None or layer.keys is None or layer.keys.numel() == 0:
            heads = attention.k_proj.out_features // attention.head_dim
            empty = np.zeros((hidden.shape[0], 0, heads, attention.head_dim), _array(hidden[:0]).dtype)
            self.record.update(past_k=empty, past_v=empty)
        else:
            self.record["past_k"] = _array(layer.keys.transpose(1, 2))
            self.record["past_v"] = _array(layer.values.transpose(1, 2))

    def leave_attention(self, module: Any, args: tuple, output: tuple) -> None:
        self.record["mixed"] = _array(output[0])

    def query_and_gate(self, module: Any, args: tuple, output: torch.Tensor) -> None:
        head_dim = self.layer.self_attn.head_dim
        heads = rearrange(_array(output), "... (heads two dim) -> ... heads two dim", two=2, dim=head_dim)
        self.record["q_proj"], self.record["gate"] = heads[..., 0, :], heads[..., 1, :]

    def head_output(self, name: str) -> Callable[..., None]:
        def store(module: Any, args: tuple, output: torch.Tensor) -> None:
            dim = self.layer.self_attn.head_dim
            self.record[name] = rearrange(_array(output), "... (heads dim) -> ... heads dim", dim=dim)

        return store

    def gated(self, module: Any, args: tuple) -> None:
        self.record["gated"] = _array(args[0]).reshape(self.record["core"].shape)

    # What the modelling file calls by name.

    def conv(self, function: Callable) -> Callable:
        def wrapped(hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
            output = function(hidden_states, *args, **kwargs)
            time = self.record["z"].shape[1]  # with a cache the carried columns stand in front
            new = rearrange(_array(output[:, :, -time:]), "batch channels time -> batch time channels")
            self.record.update(_split_channels(self.layer, new, "", "_conv"))
            return output

        return wrapped

    def delta_rule(self, function: Callable) -> Callable:
        def wrapped(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, **kwargs: Any) -> tuple:
            before = kwargs.get("initial_state")
            if before is None:
                shape = (*value.shape[:1], value.shape[2], key.shape[3], value.shape[3])
                before = value.new_zeros(shape)
            self.record["state"] = _array(before)
            output, after = function(query, key, value, **kwargs)
            self.record["core"], self.record["new_state"] = _array(output), _array(after)
            return output, after

        return wrapped

    def rotary(self, function: Callable) -> Callable:
        def wrapped(q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> tuple:
            half = cos.shape[-1] // 2  # both halves of the reference's tables are equal
            self.record["cos"], self.record["sin"] = _array(cos[..., :half]), _array(sin[..., :half])
            rotated_q, rotated_k = function(q, k, cos, sin)
            self.record["q_rope"] = _array(rotated_q.transpose(1, 2))
            self.record["k_rope"] = _array(rotated_k.transpose(1, 2))
            return rotated_q, rotated_k

        return wrapped

    def attention(self, function: Callable) -> Callable:
        def wrapped(*args: Any, **kwargs: Any) -> tuple:
            output, weights = function(*args, **kwargs)
            self.record["core"] = _array(output)
            return output, weights

        return wrapped

    def install(self, undo: contextlib.ExitStack) -> None:
        """Put every hook and wrapper in place; `undo` takes them away again."""

        def hook(module: torch.nn.Module, function: Callable, **options: Any) -> None:
            undo.callback(module.register_forward_hook(function, **options).remove)

        def pre_hook(module: torch.nn.Module, function: Callable, **options: Any) -> None:
            undo.callback(module.register_forward_pre_hook(function, **options).remove)

        def outside(name: str) -> Callable[..., None]:
            return lambda module, args, output: self.outside.__setitem__(name, _array(output))

        def before_final_norm(module: Any, args: tuple) -> None:
            self.outside["final_norm_in"] = _array(args[0])

        hook(self.decoder.embed_tokens, outside("embed"))
        pre_hook(self.decoder.norm, before_final_norm)
        hook(self.decoder.norm, outside("final_norm"))
        hook(self.lm_head, outside("logits"))
        for layer in self.decoder.layers:
            pre_hook(layer, self.enter_layer, with_kwargs=True)
            hook(layer, self.store_output("layer_out"))
            hook(layer.input_layernorm, self.store_output("normed"))
            pre_hook(layer.post_attention_layernorm, self.store_input("residual"))
            hook(layer.post_attention_layernorm, self.store_output("post_normed"))
            hook(layer.mlp.gate_proj, self.store_output("mlp_gate"))
            hook(layer.mlp.up_proj, self.store_output("mlp_up"))
            pre_hook(layer.mlp.down_proj, self.store_input("mlp_act"))
            hook(layer.mlp, self.store_output("mlp_out"))
            if layer.block_type == "linear_attention":
                mixer = layer.linear_attn
                pre_hook(mixer, self.enter_delta_net, with_kwargs=True)
                hook(mixer, self.leave_delta_net, with_kwargs=True)
                hook(mixer.in_proj_qkv, self.in_proj_qkv)
                hook(mixer.in_proj_z, self.in_proj_z)
                hook(mixer.in_proj_b, self.store_output("b"))
                hook(mixer.in_proj_a, self.store_output("a"))
                hook(mixer.norm, self.gated_norm)
            else:
                attention = layer.self_attn
                pre_hook(attention, self.enter_attention, with_kwargs=True)
                hook(attention, self.leave_attention)
                hook(attention.q_proj, self.query_and_gate)
                hook(attention.k_proj, self.head_output("k_proj"))
                hook(attention.v_proj, self.head_output("v_proj"))
                hook(attention.q_norm, self.store_output("q_norm"))
                hook(attention.k_norm, self.store_output("k_norm"))
                pre_hook(attention.o_proj, self.gated)
        for name, wrap in (
            ("causal_conv1d_fn", self.conv),
            ("causal_conv1d_update", self.conv),
            ("torch_chunk_gated_delta_rule", self.delta_rule),
            ("torch_recurrent_gated_delta_rule", self.delta_rule),
            ("apply_rotary_pos_emb", self.rotary),
            ("eager_attention_forward", self.attention),
        ):
            function = getattr(qwen_module, name)
            undo.callback(setattr, qwen_module, name, function)
            setattr(qwen_module, name, wrap(function))


@contextlib.contextmanager
def _recording(model: ReferenceModel) -> Iterator[_Recorder]:
    recorder = _Recorder(model)
    with contextlib.ExitStack() as undo:
        recorder.install(undo)
        yield recorder


def record_call(model: ReferenceModel, tokens: np.ndarray, cache: Any) -> CallRecord:
    """Run the reference on `tokens` behind what `cache` holds, and record every node.

    Args:
        model: with eager attention (the recorded one).
        tokens: [batch, time] token ids.
        cache: from `new_cache`; it is advanced in place.

    Returns:
        The record, in the arithmetic of `model`.
    """
    with torch.no_grad(), _recording(model) as recorder:
        model(input_ids=torch.from_numpy(tokens), cache=cache, use_cache=True)
    return CallRecord(
        tokens=tokens,
        layers=recorder.layers,
        kinds=[layer.block_type for layer in recorder.decoder.layers],
        **recorder.outside,
    )
