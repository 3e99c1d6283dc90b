# ---
# jupyter:
#   jupytext:
#     text_representation:
#       extension: .py
#       format_name: percent
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # First steps
#
# This notebook loads a model of the Qwen3.5 family, lets it write, and then looks inside: at the probabilities
# behind a word, at what the model remembers of a text, and at its parameters. It takes under a minute on a laptop.
#
# `nano` is a small model that comes with the package. It knows the capitals of the world and a few tricks, and it
# is built exactly like its big siblings, so everything below holds for them too. To look at another
# one, change this line to a folder in Hugging Face layout or a hub id such as `"Qwen/Qwen3.5-0.8B"`:

# %%
MODEL = "nano"
PROMPT = "The capital of France"

# %%
import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np

from qwen35_jax.cache import AttentionCache, init_cache
from qwen35_jax.checkpoint import load
from qwen35_jax.inference import GenerationSettings, Tokenizer, generate
from qwen35_jax.model import decode_step, forward, prefill

model = load(MODEL, dtype="float32", parameter_dtype="float32")
tokenizer = Tokenizer.from_folder(model.folder)
config = model.config.text

# %% [markdown]
# Three things came back. `model.config` is what `config.json` says. `model.graphdef` is the program: which layers
# there are and how they are connected. `model.parameters` are the numbers, a nested dictionary of arrays. The
# functions of this package are pure: they take program and parameters as arguments and change neither, so
# `jax.jit`, `jax.grad` and a mesh of devices apply to them as to any other function.
#
# ## Let it write
#
# `generate` takes a list of prompts. With `on_token` the text can be shown as it comes:

# %%
result = generate(
    model,
    [PROMPT],
    GenerationSettings(max_new_tokens=24),
    tokenizer=tokenizer,
    on_token=lambda event: print(event.text, end="", flush=True),
)
answer = result.generations[0]
print(f"\n\nended by {answer.finish_reason} after {len(answer.tokens)} tokens")
print(
    f"{result.timing.decode_tokens_per_second:.0f} tokens/s, after {result.timing.compile_seconds:.1f} s of compiling"
)

# %% [markdown]
# By default the most likely token is taken each time. With a temperature the model throws dice instead, weighted
# by its probabilities; a seed makes them fall the same way again.

# %%
for seed in range(4):
    settings = GenerationSettings(max_new_tokens=24, temperature=1.2, seed=seed)
    (row,) = generate(model, [PROMPT], settings, tokenizer=tokenizer).generations
    print(f"seed {seed}: {row.text!r}")

# %% [markdown]
# (Several prompts in the list run at once as a batch, each with settings of its own if you like, and no row changes
# another one's answer.)

# %% [markdown]
# ## Logits: what the model thinks of the next token
#
# A model reads token ids, not text:

# %%
tokens = tokenizer.encode(PROMPT)
print(tokens)
print([tokenizer.decode([token]) for token in tokens])

# %% [markdown]
# For every position it returns a score for each token of the vocabulary, the *logits*. Their softmax is the
# probability that this token comes next. We run prompt and answer at once; a position sees only what stands
# before it, so the scores after the prompt are those that the first word of the answer was chosen by.

# %%
run = jax.jit(forward, static_argnums=0)
text = jnp.array([tokens + list(answer.tokens)])
logits = run(model.graphdef, model.parameters, text)
print(f"logits {logits.shape}: batch, time, vocabulary")

probabilities = np.asarray(jax.nn.softmax(logits[0, len(tokens) - 1]))
best = np.argsort(-probabilities)[:8]
plt.figure(figsize=(6, 2.6))
plt.bar(range(8), probabilities[best])
plt.xticks(range(8), [repr(tokenizer.decode([int(token)])) for token in best], rotation=30)
plt.ylabel("probability")
plt.title(f"after {PROMPT!r}")
plt.show()

# %% [markdown]
# The same numbers tell how surprised the model is by each token of the text, in bits. Their mean is the loss that
# training lowers:

# %%
following = np.asarray(text[0, 1:])
surprise = -np.asarray(jax.nn.log_softmax(logits[0, :-1]))[np.arange(len(following)), following] / np.log(2)
for token, bits in zip(following, surprise):
    print(f"{tokenizer.decode([int(token)], skip_special_tokens=False)!r:16s} {bits:6.2f}")

# %% [markdown]
# ## The cache: what the model remembers
#
# Running the whole text again for each new token would be a waste. The model therefore keeps a memory. Most of its
# layers are *Gated DeltaNet* layers, whose memory is a matrix per head, of fixed size; every fourth one is an
# attention layer, which keeps a key and a value for every token. Here is one of each kind:

# %%
print(config.num_hidden_layers, "layers:", ", ".join(config.layer_types[:4]), "...")
cache = init_cache(config, batch=1, capacity=64, dtype=jnp.float32)
examples = [config.layer_types.index(kind) for kind in ("linear_attention", "full_attention")]
for position in examples:
    layer = cache.groups[0][position]
    print(f"\nlayer {position}: {type(layer).__name__}")
    for name, array in vars(layer).items():
        print(f"  {name:9s} {array.shape} {array.dtype}")

# %% [markdown]
# (`repeats, batch, heads, key dimension, value dimension` for the `state`; `repeats, batch, capacity, heads,
# dimension` for keys and values. The windows hold the last few inputs of a short convolution. The first axis is
# there because the pattern of layers repeats: on an accelerator the repeats are stacked and run by one loop; on a
# CPU each layer stands alone, and the axis has length 1.)
#
# `prefill` reads a prompt into the cache and returns the logits after it. `decode_step` reads one token more. That
# is all that generation needs; here it is by hand:

# %%
logits, cache = prefill(model.graphdef, model.parameters, jnp.array([tokens]), cache)
written = []
for _ in range(len(answer.tokens)):
    token = jnp.argmax(logits, axis=-1)
    written.append(int(token[0]))
    logits, cache = decode_step(model.graphdef, model.parameters, token, cache)

print(repr(tokenizer.decode(written)))
print("tokens consumed by each row:", cache.lengths)
assert tuple(written) == answer.tokens

# %% [markdown]
# This is what the memory of the first layer looks like after that text, one picture per head. Each row belongs to
# a direction of the keys, each column to one of the values. The second notebook explains how it is written.

# %%
state = np.asarray(cache.groups[0][0].state[0, 0])  # first layer, first row of the batch
shown = min(4, len(state))
figure, axes = plt.subplots(1, shown, figsize=(2.6 * shown, 2.8), squeeze=False)
limit = np.abs(state).max()
for head, axis in enumerate(axes[0]):
    axis.imshow(state[head], cmap="RdBu", vmin=-limit, vmax=limit, aspect="auto")
    axis.set_title(f"head {head}", fontsize=9)
    axis.set_xlabel("value")
axes[0, 0].set_ylabel("key")
figure.tight_layout()
plt.show()

# %% [markdown]
# How does the memory grow with the length of the text? `jax.eval_shape` makes caches without allocating
# anything, so we can ask for lengths that would not fit into this computer:


# %%
def cache_numbers(capacity):
    """How many numbers the DeltaNet layers and the attention layers keep for one row."""
    shapes = jax.eval_shape(lambda: init_cache(config, batch=1, capacity=capacity, dtype=jnp.float32))
    counts = {True: 0, False: 0}
    for layer in (layer for group in shapes.groups for layer in group):
        counts[isinstance(layer, AttentionCache)] += sum(array.size for array in jax.tree.leaves(layer))
    return counts[False], counts[True]


print(f"{'tokens':>9s} {'DeltaNet':>12s} {'attention':>14s}")
for capacity in (64, 1_024, 16_384, 262_144):
    delta_net, attention = cache_numbers(capacity)
    print(f"{capacity:>9,d} {delta_net:>12,d} {attention:>14,d}")

# %% [markdown]
# ## The parameters
#
# Names and shapes follow the Hugging Face checkpoint, but every projection is kept apart per part and per head, so
# that it can be cut across devices along any axis. Again one layer of each kind, the `repeats` axis first:

# %%
for path, array in jax.tree_util.tree_leaves_with_path(model.parameters):
    names = [part.key for part in path]
    if "layers" not in names or (names[2] == 0 and names[4] in examples):
        print(f"{'.'.join(map(str, names)):54s} {array.shape!s:20s} {array.dtype}")

total = sum(array.size for array in jax.tree.leaves(model.parameters))
print(f"\n{total:,d} parameters in all")

# %% [markdown]
# Since parameters are plain arrays, an experiment is a line or two. What does the model say without its first
# DeltaNet layer? Output weights of zero silence it:

# %%
changed = jax.tree.map(lambda array: array, model.parameters)  # a copy of the dictionaries, not of the arrays
first = changed["decoder"]["groups"][0]["layers"][0]["mixer"]
first["out_weight"] = first["out_weight"].at[0].set(0.0)

silenced = jax.nn.softmax(run(model.graphdef, changed, text)[0, len(tokens) - 1])
print("most likely before:", repr(tokenizer.decode([int(best[0])])), f"{probabilities[best[0]]:.3f}")
after = int(jnp.argmax(silenced))
print("most likely now   :", repr(tokenizer.decode([after])), f"{float(silenced[after]):.3f}")

# %% [markdown]
# ## Where to go next
#
# - `02_gated_delta_rule` explains the layer behind the state matrices, from attention, in five steps.
# - `qwen35 spec nano` prints every node of the graph with its formula and shapes, `qwen35 generate --help` the options
#   that you saw here.
# - Load another checkpoint by changing `MODEL` at the top; nothing else has to change.
