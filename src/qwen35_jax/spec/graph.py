"""The nodes of the model's graph: operation, layers, formula, constants and tensors of each.

The names are those under which profiles, the recorder and `qwen35 verify` show the same values. In the
formulas `u` is a node's input, `W` its matrix, `w` its vector, `x` the residual stream, `E` the embedding
table; `rms(x)` is `x / sqrt(mean(x^2) + eps)` and `l2(x)` is `x / sqrt(sum(x^2) + l2_eps)`.
"""

from __future__ import annotations

from typing import Any

from qwen35_jax.config import ModelConfig, TextConfig
from qwen35_jax.spec import tensors
from qwen35_jax.spec.beside_text import mtp_nodes, vision_nodes
from qwen35_jax.spec.mixers import gated_attention_nodes, gated_delta_net_nodes
from qwen35_jax.spec.node import Node, choose
from qwen35_jax.spec.tensor_rules import default_spelling


def graph_nodes(config: ModelConfig) -> tuple[Node, ...]:
    """All nodes, in the order in which a token meets them; those of the two mixers one after the other."""
    text = config.text
    prefix = tensors.layer_prefix(config)
    nodes = [
        _embed(config),
        _layer_norm("input_norm", text, prefix, "input_layernorm."),
        *gated_delta_net_nodes(text, prefix),
        *gated_attention_nodes(text, prefix),
        _residual("attn_residual", text, "x + mixer(input_norm(x))"),
        _layer_norm("post_attn_norm", text, prefix, "post_attention_layernorm."),
        *(_mlp(text, prefix) if text.moe is None else _mixture_of_experts(text, prefix)),
        _residual("mlp_residual", text, "x + mlp(post_attn_norm(x))"),
        _final_norm(config),
        _lm_head(config),
    ]
    if text.mtp_num_hidden_layers:
        nodes += mtp_nodes(text)
    if config.vision is not None:
        nodes += vision_nodes(config.vision)
    return tuple(nodes)


def _all_layers(text: TextConfig) -> tuple[int, ...]:
    return tuple(range(text.num_hidden_layers))


def _embed(config: ModelConfig) -> Node:
    text = config.text
    return Node(
        name="embed",
        part="embedding",
        op="lookup",
        layers=(),
        maps=f"{text.vocab_size} ids -> {text.hidden_size}",
        formula="E[id]",
        constants={"vocab_size": text.vocab_size},
        tensors=_outside_layers(config, "{text}embed_tokens."),
    )


def _outside_layers(config: ModelConfig, beginning: str) -> tensors.Shapes:
    """The tensors outside the layers whose names begin so, in the spelling of `config`."""
    spelling = default_spelling(config)
    return choose(
        tensors.outside_layers(config), "", beginning.format(text=spelling.text, head=spelling.head)
    )


def _layer_norm(name: str, text: TextConfig, prefix: str, tensor: str) -> Node:
    return _norm(name, text, _all_layers(text), choose(tensors.layer_norms(text), prefix, tensor))


def _final_norm(config: ModelConfig) -> Node:
    return _norm("final_norm", config.text, (), _outside_layers(config, "{text}norm."))


def _norm(name: str, text: TextConfig, layers: tuple[int, ...], shapes: tensors.Shapes) -> Node:
    return Node(
        name=name,
        part="norms",
        op="rms norm",
        layers=layers,
        maps=f"{text.hidden_size} -> {text.hidden_size}",
        formula="rms(x) (1 + w)",
        constants={"eps": text.rms_norm_eps},
        tensors=shapes,
    )


def _residual(name: str, text: TextConfig, formula: str) -> Node:
    return Node(
        name=name,
        part="norms",
        op="add",
        layers=_all_layers(text),
        maps=f"{text.hidden_size} -> {text.hidden_size}",
        formula=formula,
        constants={},
        tensors={},
    )


def _mlp(text: TextConfig, prefix: str) -> list[Node]:
    shapes = tensors.feed_forward(text)
    embed, inner = text.hidden_size, shapes["mlp.gate_proj.weight"][0]

    def node(name: str, op: str, maps: str, formula: str, constants: dict[str, Any], *names: str) -> Node:
        chosen = choose(shapes, prefix, *(f"mlp.{name}" for name in names)) if names else {}
        return Node(f"mlp.{name}", "mlp", op, _all_layers(text), maps, formula, constants, chosen)

    return [
        node(
            "gate_up",
            "linear",
            f"{embed} -> {2 * inner}",
            "gate, up = W u",
            {"in_features": embed, "out_features": 2 * inner, "gate": inner, "up": inner},
            "gate_proj",
            "up_proj",
        ),
        node(
            "act",
            "gated activation",
            f"{2 * inner} -> {inner}",
            f"{text.hidden_act}(gate) up",
            {"activation": text.hidden_act},
        ),
        node(
            "down",
            "linear",
            f"{inner} -> {embed}",
            "W u",
            {"in_features": inner, "out_features": embed},
            "down_proj",
        ),
    ]


def _mixture_of_experts(text: TextConfig, prefix: str) -> list[Node]:
    moe = text.moe
    assert moe is not None
    shapes = tensors.feed_forward(text)
    embed, act = text.hidden_size, text.hidden_act

    def node(name: str, op: str, maps: str, formula: str, constants: dict[str, Any], *names: str) -> Node:
        chosen = choose(shapes, prefix, *(f"mlp.{name}" for name in names)) if names else {}
        return Node(f"moe.{name}", "mlp", op, _all_layers(text), maps, formula, constants, chosen)

    return [
        node(
            "router",
            "top-k softmax",
            f"{embed} -> {moe.num_experts_per_tok} of {moe.num_experts}",
            "p = softmax(W u); the largest p, divided by their sum",
            {"experts": moe.num_experts, "experts_per_token": moe.num_experts_per_tok},
            "gate.",
        ),
        node(
            "experts",
            "grouped linear",
            f"{embed} -> {2 * moe.moe_intermediate_size} -> {embed}",
            f"sum over chosen e of p_e W_down,e ({act}(gate_e) up_e); gate_e, up_e = W_e u",
            {"inner": moe.moe_intermediate_size, "activation": act},
            "experts.",
        ),
        node(
            "shared_expert",
            "linear",
            f"{embed} -> {2 * moe.shared_expert_intermediate_size} -> {embed}",
            f"sigmoid(W_gate u) W_down ({act}(gate) up)",
            {"inner": moe.shared_expert_intermediate_size, "activation": act},
            "shared_expert",
        ),
    ]


def _lm_head(config: ModelConfig) -> Node:
    text, tied = config.text, config.tie_word_embeddings
    return Node(
        name="lm_head",
        part="lm_head",
        op="linear",
        layers=(),
        maps=f"{text.hidden_size} -> {text.vocab_size}",
        formula="E u, the embedding table again" if tied else "W u",
        constants={"in_features": text.hidden_size, "out_features": text.vocab_size, "tied": tied},
        tensors=_outside_layers(config, "{head}lm_head."),
    )
