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
# # The gated delta rule, from attention in five steps
#
# Three of every four layers of Qwen3.5 hold no attention. They keep a **matrix** of fixed size per head, and every
# token changes it a little. The rule by which it changes is called the *gated delta rule*. It looks odd at
# first sight, but every term in it repairs a fault of something simpler. We start from attention, which you
# know, and repair our way forward:
#
# 1. **softmax attention** remembers everything, and pays for it;
# 2. **linear attention** squeezes the memory into one matrix;
# 3. **decay** lets that matrix forget;
# 4. the **delta rule** lets it *correct* what it holds;
# 5. the **gated delta rule** does both, and runs in **chunks**, which makes it fast.
#
# All of it happens on a memory so small that we can look at it: who likes which colour.

# %%
import time

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np

from qwen35_jax.ops.gated_delta_rule import gated_delta_rule

np.set_printoptions(precision=2, suppress=True)

people = ["Ada", "Bo", "Cleo", "Dan"]
colours = ["red", "green", "blue", "gold"]

# %% [markdown]
# A model sees tokens as vectors. A **key** says what a piece of information is about, a **value** says what it
# is, and a **query** asks for it. Here each person is a key and each colour a value. We give every person an
# axis of their own, and every colour too, so that numbers can be read off by eye.

# %%
key = dict(zip(people, np.eye(4)))
value = dict(zip(colours, np.eye(4)))

story = [("Ada", "red"), ("Bo", "green"), ("Cleo", "blue"), ("Ada", "gold")]  # Ada changes her mind
keys = np.stack([key[person] for person, _ in story])  # [time, key_dim]
values = np.stack([value[colour] for _, colour in story])  # [time, value_dim]


def show(memories, titles, suptitle=""):
    """Draws memories side by side: a row per person, a column per colour."""
    figure, axes = plt.subplots(1, len(memories), figsize=(2.6 * len(memories), 2.9), squeeze=False)
    for axis, memory, title in zip(axes[0], memories, titles):
        axis.imshow(memory, cmap="RdBu", vmin=-1.5, vmax=1.5)
        axis.set_xticks(range(4), colours, fontsize=8)
        axis.set_yticks(range(4), people, fontsize=8)
        axis.set_title(title, fontsize=9)
        for row, column in np.ndindex(memory.shape):
            if abs(memory[row, column]) > 0.005:
                axis.text(column, row, f"{memory[row, column]:.2g}", ha="center", va="center", fontsize=8)
    figure.suptitle(suptitle)
    figure.tight_layout()
    plt.show()


# %% [markdown]
# ## Step 1: softmax attention keeps everything
#
# Attention stores every key and every value. To answer a query $q$ it compares it with all keys, turns the
# scores into weights that sum to one, and averages the values:
#
# $$ o = \sum_s \frac{e^{\,q \cdot k_s}}{\sum_{r} e^{\,q \cdot k_r}} \; v_s $$


# %%
def softmax_attention(query, keys, values, sharpness=8.0):
    scores = sharpness * keys @ query
    weights = np.exp(scores - scores.max())
    weights /= weights.sum()
    return weights @ values


print("      ", *(f"{colour:>6s}" for colour in colours))
for person in people[:3]:
    print(f"{person:6s}", *(f"{x:6.2f}" for x in softmax_attention(key[person], keys, values)))

# %% [markdown]
# Bo and Cleo are answered well. For Ada the memory holds two facts with the same key, so attention gives half
# of each; a real model adds positions to the keys so that it can prefer the later one.
#
# The price is the size of the memory. It grows with every token, and each new token is compared with all the
# earlier ones: $T$ tokens cost $T^2/2$ comparisons. For the 27B model, one layer of attention (4 key/value
# heads of 256 numbers) against one layer of the kind we are building (48 heads of 128 × 128):

# %%
for tokens in (1_000, 10_000, 100_000, 262_144):
    print(
        f"{tokens:>8,d} tokens   attention: {tokens * 2 * 4 * 256:>13,d} numbers"
        f"   gated delta rule: {48 * 128 * 128:,d} numbers"
    )

# %% [markdown]
# ## Step 2: linear attention is a matrix
#
# Leave out the exponential and the division. What remains of attention is
#
# $$ o = \sum_s (q \cdot k_s)\, v_s = \Big(\sum_s k_s v_s^{\top}\Big)^{\!\top} q = S^{\top} q . $$
#
# The query has come out of the sum. All we need to keep is the matrix $S = \sum_s k_s v_s^\top$, and a new token
# is written by adding one product of a column and a row:
#
# $$ S_t = S_{t-1} + k_t v_t^{\top} $$
#
# The two ways of computing it agree, whatever the query:

# %%
query = np.array([0.3, -1.0, 0.5, 2.0])
memory = sum(np.outer(k, v) for k, v in zip(keys, values))
over_tokens = sum((query @ k) * v for k, v in zip(keys, values))
print("sum over tokens:", over_tokens)
print("matrix         :", memory.T @ query)
assert np.allclose(over_tokens, memory.T @ query)


# %% [markdown]
# Watch the matrix being written. Since each person has an axis, row "Ada" of $S$ *is* what the memory answers
# when it is asked about Ada.


# %%
def run(rule, keys, values, **settings):
    """The memory after every token."""
    memory, history = np.zeros((keys.shape[1], values.shape[1])), []
    for k, v in zip(keys, values):
        memory = rule(memory, k, v, **settings)
        history.append(memory)
    return history


def linear(memory, k, v):
    return memory + np.outer(k, v)


titles = [f"{person}: {colour}" for person, colour in story]
show(run(linear, keys, values), titles, "linear attention")

# %% [markdown]
# Two faults show up.
#
# **It cannot take anything back.** Ada likes gold now, but her row says red *and* gold, with the same weight,
# for ever.
#
# **Similar keys disturb each other.** With as many axes as facts there is no trouble. Real keys overlap:
# a head has 128 dimensions and sees thousands of tokens. Let Bo's key point partly along Ada's:

# %%
overlapping = keys[:3].copy()
overlapping[1] = 0.8 * key["Ada"] + 0.6 * key["Bo"]  # still of length 1
memory = run(linear, overlapping, values[:3])[-1]
print("asked about Ada :", memory.T @ overlapping[0], "  wanted", values[0])
print("asked about Bo  :", memory.T @ overlapping[1], "  wanted", values[1])

# %% [markdown]
# Each answer is polluted with 0.8 of the other. We shall come back to both faults.
#
# ## Step 3: decay, a memory that fades
#
# The simplest cure for a memory that fills up is to let it fade. Before each write, everything is multiplied
# by a factor $\alpha_t = e^{g_t}$ between 0 and 1, with $g_t \le 0$ the *log decay*:
#
# $$ S_t = e^{g_t} S_{t-1} + k_t v_t^{\top} $$
#
# In Qwen3.5 every head computes $g_t$ from the token, $g_t = -e^{A}\,\mathrm{softplus}(a_t + b)$ with learned
# $A$ and $b$: a head can hold on at one token and clear itself at the next. With a constant decay of 0.6:


# %%
def decaying(memory, k, v, log_decay):
    return np.exp(log_decay) * memory + np.outer(k, v)


show(run(decaying, keys, values, log_decay=np.log(0.6)), titles, "linear attention with decay 0.6")

# %% [markdown]
# Gold now outweighs red in Ada's row. But look at Bo and Cleo: they faded as well, although nothing new was
# said about them. Decay knows *when* to forget, not *what*. A head whose memory halves every $n$ tokens has
# $g = -\ln 2 / n$:

# %%
for half_life in (1, 10, 100, 1000):
    print(f"half-life {half_life:>5d} tokens: log decay {-np.log(2) / half_life:.5f} per token")

# %% [markdown]
# ## Step 4: the delta rule, a memory that corrects itself
#
# Before writing, *read*. The memory's present answer for key $k_t$ is $S^\top k_t$. Write only the difference
# between what it should say and what it says, scaled by a strength $\beta_t$ between 0 and 1:
#
# $$ S_t = S_{t-1} + \beta_t\, k_t \big(v_t - S_{t-1}^{\top} k_t\big)^{\top} $$
#
# For $\beta = 1$ and a key of length 1 the memory afterwards answers *exactly* $v_t$ for $k_t$, and nothing
# changes for keys at a right angle to it. Ada's mind can be changed:


# %%
def delta(memory, k, v, beta):
    surprise = v - memory.T @ k
    return memory + beta * np.outer(k, surprise)


show(run(delta, keys, values, beta=1.0), titles, "delta rule, beta = 1")
show(run(delta, keys, values, beta=0.5), titles, "delta rule, beta = 0.5: every write goes half the way")

# %% [markdown]
# The name comes from the 1960 rule of Widrow and Hoff, and it is something you have met elsewhere: **one step
# of gradient descent**. Take the squared error of the memory's answer,
# $L(S) = \tfrac12 \lVert S^\top k - v \rVert^2$; its gradient is $k\,(S^\top k - v)^\top$, and $\beta$ is the
# learning rate. The layer trains a small linear model on the text while it reads it. JAX agrees:

# %%
memory = np.random.default_rng(0).normal(size=(4, 4))
gradient = jax.grad(lambda S: 0.5 * jnp.sum((S.T @ keys[0] - values[0]) ** 2))(jnp.asarray(memory))
print(
    "largest difference:",
    np.abs(delta(memory, keys[0], values[0], beta=0.3) - (memory - 0.3 * np.asarray(gradient))).max(),
)

# %% [markdown]
# And like gradient descent, it separates similar keys if it sees them more than once. Here is the error of the
# two overlapping facts from step 2 as the story is told over and over:

# %%
errors = {"linear (averaged)": [], "delta rule": []}
corrected = np.zeros((4, 4))
summed = np.zeros((4, 4))
for told in range(1, 13):
    for k, v in zip(overlapping, values[:3]):
        corrected = delta(corrected, k, v, beta=1.0)
        summed = linear(summed, k, v)
    for name, memory in (("linear (averaged)", summed / told), ("delta rule", corrected)):
        errors[name].append(np.abs(overlapping @ memory - values[:3]).max())

plt.figure(figsize=(5.5, 2.8))
for name, error in errors.items():
    plt.semilogy(range(1, 13), error, marker="o", label=name)
plt.xlabel("times the story was told")
plt.ylabel("largest error of an answer")
plt.legend()
plt.show()

# %% [markdown]
# Why must keys have length 1? The write multiplies the memory's content along $k$ by $1 - \beta \lVert k
# \rVert^2$. With $\lVert k \rVert = 1$ that lies between 0 and 1: content is replaced, at most completely. A key of
# length 2 would make it $1 - 4\beta$, and repeating a token would blow the memory up. This is why the
# layer divides its queries and keys by their length. (The queries are also divided by the square root of their
# dimension, as in attention.)

# %%
for length in (1.0, 1.3, 1.5):
    memory = np.ones((4, 4))
    for _ in range(10):
        memory = delta(memory, length * key["Ada"], value["red"], beta=1.0)
    print(f"key of length {length}: largest entry after 10 repeats {np.abs(memory).max():.3g}")


# %% [markdown]
# ## Step 5: both together, and in chunks
#
# The **gated delta rule** (Yang, Kautz and Hatamizadeh, 2024, arXiv:2412.06464) fades first and corrects then:
#
# $$ S_t = e^{g_t} S_{t-1} + \beta_t\, k_t \big(v_t - e^{g_t} S_{t-1}^{\top} k_t\big)^{\top},
# \qquad o_t = S_t^{\top} q_t $$
#
# Decay clears what is no longer needed, the correction keeps the rest exact. A longer story, in which the
# subject changes in the middle (a strong decay at one token) and Ada changes her mind again:


# %%
def gated_delta(memory, k, v, log_decay, beta):
    return delta(np.exp(log_decay) * memory, k, v, beta)


events = [
    ("Ada", "red", 0.0),
    ("Bo", "green", 0.0),
    ("Ada", "gold", 0.0),
    ("Dan", "blue", -3.0),
    ("Dan", "red", 0.0),
]
memory, history = np.zeros((4, 4)), []
for person, colour, log_decay in events:
    memory = gated_delta(memory, key[person], value[colour], log_decay, beta=1.0)
    history.append(memory)
titles = [f"{p}: {c}" + (f"\n(decay {np.exp(g):.2f})" if g else "") for p, c, g in events]
show(history, titles, "gated delta rule")

# %% [markdown]
# One fault is left, and it is the computer's, not the memory's. Token $t$ needs the memory after token $t - 1$:
# a long chain of tiny products, while accelerators like few and large ones. The cure is to cut the text into
# **chunks** and to find all corrections of a chunk at once.
#
# Let $G_t$ be the sum of log decays from the chunk's start to token $t$, and $S_0$ the memory before the chunk.
# Call what token $t$ really writes $u_t$, that is $u_t = \beta_t\,(v_t - \text{what the memory says about } k_t)$.
# At token $t$ the memory is made of $S_0$ and of the earlier writes of the same chunk, each faded by the decay
# since then:
#
# $$ u_t = \beta_t \Big( v_t - e^{G_t} S_0^{\top} k_t - \sum_{s<t} e^{G_t - G_s} (k_t \cdot k_s)\, u_s \Big) $$
#
# Unknown $u_t$ on the left, and only *earlier* unknowns on the right: a **triangular system of equations**
#
# $$ (I + A)\, U = \mathrm{diag}(\beta)\,\big(V - \mathrm{diag}(e^{G})\, K S_0\big), \qquad
# A_{ts} = \beta_t\, e^{G_t - G_s} (k_t \cdot k_s) \text{ for } s < t . $$
#
# Once $U$ is known, the outputs and the next memory are plain matrix products. In NumPy that is all there is:


# %%
def chunk_of_gated_delta_rule(q, k, v, log_decay, beta, memory):
    """All tokens of one chunk at once. Returns the outputs and the memory after the chunk."""
    total = np.cumsum(log_decay)  # G
    difference = total[:, None] - total[None, :]  # G_t - G_s
    # Masked before the exponential: above the diagonal it would be e to a positive number.
    faded = np.exp(np.where(np.tril(np.ones_like(difference)) > 0, difference, -np.inf))
    A = np.tril(beta[:, None] * faded * (k @ k.T), -1)
    right = beta[:, None] * (v - np.exp(total)[:, None] * (k @ memory))
    U = np.linalg.solve(np.eye(len(k)) + A, right)
    outputs = np.exp(total)[:, None] * (q @ memory) + (faded * (q @ k.T)) @ U
    memory = np.exp(total[-1]) * memory + (k * np.exp(total[-1] - total)[:, None]).T @ U
    return outputs, memory, A


rng = np.random.default_rng(1)
length, key_dim, value_dim, chunk = 64, 8, 6, 16


def unit(x):
    return x / np.linalg.norm(x, axis=-1, keepdims=True)


q, k = unit(rng.normal(size=(2, length, key_dim)))
v = rng.normal(size=(length, value_dim))
log_decay = -0.1 * rng.random(length)
beta = rng.random(length)

one_by_one, memory = [], np.zeros((key_dim, value_dim))
for t in range(length):
    memory = gated_delta(memory, k[t], v[t], log_decay[t], beta[t])
    one_by_one.append(memory.T @ q[t])

in_chunks, chunk_memory = [], np.zeros((key_dim, value_dim))
for start in range(0, length, chunk):
    piece = slice(start, start + chunk)
    outputs, chunk_memory, A = chunk_of_gated_delta_rule(
        q[piece], k[piece], v[piece], log_decay[piece], beta[piece], chunk_memory
    )
    in_chunks.append(outputs)

print("largest difference of the outputs:", np.abs(np.concatenate(in_chunks) - np.stack(one_by_one)).max())
print("largest difference of the memory :", np.abs(chunk_memory - memory).max())

# %% [markdown]
# Sixteen tokens at a time, and the same numbers to the last digits. The matrix $A$ tells which tokens of a
# chunk get in each other's way: entry $(t, s)$ is how much of what token $s$ wrote token $t$ has to take back.

# %%
plt.figure(figsize=(3.4, 3))
plt.imshow(A, cmap="RdBu", vmin=-0.6, vmax=0.6)
plt.colorbar(label="A")
plt.xlabel("s, the earlier token")
plt.ylabel("t, the later token")
plt.show()

# %% [markdown]
# ## The same in this library
#
# `gated_delta_rule` is what the model calls. It takes a batch, many heads, documents packed into one row, and a
# memory to start from. `method="recurrent"` is the definition, token by token; `method="chunked"` is what you
# just wrote, with a careful inverse instead of `np.linalg.solve`; the answers are the same.


# %%
def library(method):
    """Our 64 tokens as a batch of one with a single head."""
    arguments = (x[None, :, None] for x in (q, k, v, log_decay, beta))
    outputs, state = gated_delta_rule(*map(jnp.float32, arguments), method=method, chunk_size=16)
    return np.asarray(outputs[0, :, 0]), np.asarray(state[0, 0])


for method in ("recurrent", "chunked", "associative"):
    outputs, state = library(method)
    print(
        f"{method:12s} outputs differ by {np.abs(outputs - np.stack(one_by_one)).max():.1e},"
        f" memory by {np.abs(state - memory).max():.1e}"
    )

# %% [markdown]
# What the chunks are worth is best seen at the size of a real layer. Here with 8 heads of 64 and 1,024 tokens,
# forward and backward, as in training:

# %%
shape = (1, 1024, 8)
big_q, big_k, big_v = (jnp.float32(unit(rng.normal(size=(*shape, 64)))) for _ in range(3))
big_decay, big_beta = jnp.float32(-0.05 * rng.random(shape)), jnp.float32(rng.random(shape))

for method in ("recurrent", "chunked"):

    @jax.jit
    def loss_and_gradient(v, method=method):
        def loss(v):
            return jnp.sum(gated_delta_rule(big_q, big_k, v, big_decay, big_beta, method=method)[0] ** 2)

        return jax.value_and_grad(loss)(v)

    jax.block_until_ready(loss_and_gradient(big_v))  # compile
    begin = time.perf_counter()
    jax.block_until_ready(loss_and_gradient(big_v))
    print(f"{method:10s} {time.perf_counter() - begin:.3f} s")

# %% [markdown]
# ## What to keep in mind
#
# | step | rule for the memory | what it repaired | what it lacked |
# |---|---|---|---|
# | softmax attention | keep all keys and values | | memory and work grow with the text |
# | linear attention | $S + k v^\top$ | fixed size | nothing can be taken back |
# | decay | $e^{g} S + k v^\top$ | room for new things | forgets good and bad alike |
# | delta rule | $S + \beta k (v - S^\top k)^\top$ | corrects one fact, spares the rest | cannot clear itself at once |
# | gated delta rule | $e^{g} S + \beta k (v - e^{g} S^\top k)^\top$ | both; chunks make it fast | a fixed size is still a fixed size |
#
# The last entry is why every fourth layer of Qwen3.5 is attention after all: it can look up any word of the
# text exactly, which a matrix of fixed size cannot. The three layers between do the rest at a price that does not
# grow.
#
# ## Try it yourself
#
# 1. Give Dan the key `0.8 * key["Ada"] + 0.6 * key["Dan"]` and tell the story of step 5. Who else's row changes
#    when Dan's colour changes, and by how much?
# 2. How many facts fit? Draw `n` random unit keys in 16 dimensions with random values, write each once with
#    `delta` and `beta=1`, and plot the error of the answers for `n` from 1 to 64. Compare with `linear`.
# 3. In `chunk_of_gated_delta_rule`, take the exponential of all differences first and multiply by the mask
#    afterwards; then set `log_decay` to -60 per token. What goes wrong, and why not above?
