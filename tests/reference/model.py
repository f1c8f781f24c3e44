"""The forward pass of Kimi K3 in float64 (specification 3), one function a rule.

Shapes: T tokens of one call; H hidden width; Hk, D heads and head width of KDA; Hm heads of MLA. Nothing here is tuned: it is
the rules in the order they are stated, so that it can be read beside them.
"""

import numpy as np

from tensors import MODEL, PREFIX

L2_EPS = 1e-6


def sigmoid(t):
    """σ(t) = 1 / (1 + e^-t), written so that no exponential overflows."""
    e = np.exp(-np.abs(t))
    return np.where(t >= 0, 1 / (1 + e), e / (1 + e))


def silu(t):
    """silu(t) = t σ(t)."""
    return t * sigmoid(t)


def softmax(scores):
    """Softmax over the last axis, maximum subtracted."""
    e = np.exp(scores - scores.max(axis=-1, keepdims=True))
    return e / e.sum(axis=-1, keepdims=True)


def rms_norm(x, weight, eps):
    """Specification 3.3: mean of squares, eps inside the root, the weight multiplies directly."""
    return weight * x / np.sqrt((x * x).mean(axis=-1, keepdims=True) + eps)


def l2_norm(u):
    """Specification 3.4 step 3: sum of squares (not mean), eps 1e-6 inside the root."""
    return u / np.sqrt((u * u).sum(axis=-1, keepdims=True) + L2_EPS)


def situ(gate, up, beta, linear_beta):
    """Specification 3.6: both branches capped by tanh and scaled back; the sigmoid sees the uncapped gate."""
    return beta * np.tanh(gate / beta) * sigmoid(gate) * linear_beta * np.tanh(up / linear_beta)


def attention_residual(sources, norm, proj, eps):
    """Specification 3.2, `AR`: softmax mixture of the raw sources, scored by their normalised selves.

    `sources` is a list of [T, H]; the learned projection plays the part of a query.
    """
    stacked = np.stack(sources)
    scores = rms_norm(stacked, norm * proj.reshape(-1), eps).sum(axis=-1)
    weights = softmax(scores.T).T
    return (weights[:, :, None] * stacked).sum(axis=0)


def causal_conv(inputs, history, weight):
    """Specification 3.4 step 2, without the SiLU: depthwise, last tap on the current input.

    `inputs` [T, P]; `history` [K-1, P] are the raw inputs before them, zero at the start; `weight` [P, 1, K]. Returns the
    outputs and the history after the call.
    """
    kernel = weight.shape[2]
    padded = np.concatenate([history, inputs])
    out = sum(weight[:, 0, j] * padded[j : j + len(inputs)] for j in range(kernel))
    return out, padded[len(inputs) :]


def log_decay(z, a_log, lower_bound):
    """Specification 3.4 step 5: g = λ σ(exp(A_log[head]) z), `z` [T, Hk, D] with dt_bias already added."""
    return lower_bound * sigmoid(np.exp(a_log)[:, None] * z)


def delta_rule(q, k, v, g, beta, state):
    """Specification 3.4 step 6: decay the key rows, read, correct, output. Updates `state` [Hk, D, D] in place.

    `q`, `k`, `v`, `g` [T, Hk, D], `beta` [T, Hk]. Returns o [T, Hk, D].
    """
    out = np.empty_like(v)
    for t in range(len(q)):
        state *= np.exp(g[t])[:, :, None]
        read = np.einsum("hij,hi->hj", state, k[t])
        state += k[t][:, :, None] * (beta[t][:, None] * (v[t] - read))[:, None, :]
        out[t] = np.einsum("hij,hi->hj", state, q[t])
    return out


def route(x, gate, bias, top_k, scaling):
    """Specification 3.6 steps 1 to 3: ids [T, k] in selection order, their weights, and the smallest selection gap.

    The bias takes part in the choice only; ties go to the lowest id. The gap is the distance in biased score between the
    last expert chosen and the first one not chosen: an engine in f32 may pick differently when it is tiny.
    """
    scores = sigmoid(x @ gate.T)
    biased = scores + bias
    order = np.argsort(-biased, axis=-1, kind="stable")
    ids = order[:, :top_k]
    chosen = np.take_along_axis(scores, ids, axis=-1)
    weights = chosen / (chosen.sum(axis=-1, keepdims=True) + 1e-20) * scaling
    gap = np.inf
    if top_k < len(bias):
        ranked = np.take_along_axis(biased, order[:, top_k - 1 : top_k + 1], axis=-1)
        gap = (ranked[:, 0] - ranked[:, 1]).min()
    return ids, weights, gap


class Probe:
    """Collects named intermediate values of one call, per layer; the default one keeps nothing."""

    def __init__(self, keep=False):
        self.layers = {} if keep else None
        self.layer = None

    def __call__(self, **values):
        if self.layers is not None:
            self.layers.setdefault(self.layer, {}).update({k: np.array(v) for k, v in values.items()})


class Model:
    """The text model over some `Weights`. `mla_norm_eps` is that of the two low-rank norms: 1e-6 officially (3.5)."""

    def __init__(self, weights, mla_norm_eps=1e-6, layers=None):
        self.w = weights
        self.c = weights.config
        self.mla_norm_eps = mla_norm_eps
        self.num_layers = self.c.num_hidden_layers if layers is None else min(layers, self.c.num_hidden_layers)
        self.probe = Probe()

    def new_state(self):
        """Specification 3.8: what is carried between calls, one entry a layer, filled by the first call."""
        return [None] * self.num_layers

    def walk(self, ids, state, on_layer=None):
        """Push token `ids` through all layers, on from `state`; returns the stream and the snapshots.

        Layers are walked once, all tokens through each. `on_layer(layer, h)` sees the stream after each layer; what it returns,
        unless None, replaces it.
        """
        h, snapshots = self.w.rows(MODEL + "embed_tokens.weight", ids), []
        for layer in range(self.num_layers):
            self.probe.layer = layer
            h = self.layer(layer, h, snapshots, state)
            replaced = on_layer(layer, h) if on_layer else None
            h = h if replaced is None else replaced
        return h, snapshots

    def step(self, ids, state, on_layer=None, last_only=False):
        """As `walk`; returns the logits of every token, or of the last only."""
        h, snapshots = self.walk(ids, state, on_layer)
        if last_only:
            h, snapshots = h[-1:], [s[-1:] for s in snapshots]
        return self.head(h, snapshots)

    def head(self, h, snapshots):
        """Specification 3.7: attention residual, norm, output projection."""
        vector, eps = self.w.vector, self.c.rms_norm_eps
        norm, proj = vector(MODEL + "output_attn_res_norm.weight"), vector(MODEL + "output_attn_res_proj.weight")
        x = attention_residual(snapshots + [h], norm, proj, eps)
        return self.w.linear(PREFIX + "lm_head.weight", rms_norm(x, vector(MODEL + "norm.weight"), eps))

    def layer(self, layer, h, snapshots, state):
        """Specification 3.2, the layer skeleton; appends to `snapshots` at a boundary and updates `state[layer]`."""
        p, vector, eps = f"{MODEL}layers.{layer}.", self.w.vector, self.c.rms_norm_eps

        def mix(which, sources):
            return attention_residual(sources, vector(f"{p}{which}_res_norm.weight"), vector(f"{p}{which}_res_proj.weight"), eps)

        pre = h
        x = mix("self_attention", snapshots + [pre]) if snapshots else pre
        boundary = layer % self.c.attn_res_block_size == 0
        if boundary:
            snapshots.append(pre)
        mixer_in = rms_norm(x, vector(p + "input_layernorm.weight"), eps)
        mixer = self.mla if self.c.is_mla(layer) else self.kda
        a, state[layer] = mixer(p + "self_attn.", mixer_in, state[layer])
        pre = a if boundary else pre + a
        mid = mix("mlp", snapshots + [pre])
        channel_in = rms_norm(mid, vector(p + "post_attention_layernorm.weight"), eps)
        if self.c.is_dense(layer):
            f = self.gated_mlp(p + "mlp.", channel_in)
        else:
            f = self.moe(p + "block_sparse_moe.", channel_in)
        self.probe(ar_in=x, mixer_in=mixer_in, mixer_out=a, ar_mid=mid, mlp_in=channel_in, mlp_out=f)
        return pre + f

    def kda(self, p, x, state):
        """Specification 3.4: Kimi Delta Attention. State: S [Hk, D, D] and the three convolution histories."""
        c, vector, linear = self.c, self.w.vector, self.w.linear
        heads = (len(x), c.kda_num_heads, c.kda_head_dim)
        if state is None:
            empty = np.zeros((c.short_conv_kernel_size - 1, c.kda_projection_size))
            state = {"S": np.zeros((heads[1], heads[2], heads[2])), "q": empty, "k": empty, "v": empty}
        s, mixed = state["S"].copy(), {}
        histories = {}
        for name in "qkv":
            raw = linear(f"{p}{name}_proj.weight", x)
            out, histories[name] = causal_conv(raw, state[name], vector(f"{p}{name}_conv1d.weight"))
            mixed[name] = silu(out).reshape(heads)
        q = l2_norm(mixed["q"]) * c.kda_head_dim**-0.5
        k, v = l2_norm(mixed["k"]), mixed["v"]
        beta = sigmoid(linear(p + "b_proj.weight", x))
        z = linear(p + "f_b_proj.weight", linear(p + "f_a_proj.weight", x)) + vector(p + "dt_bias")
        g = log_decay(z.reshape(heads), vector(p + "A_log")[: heads[1]], c.gate_lower_bound)
        o = delta_rule(q, k, v, g, beta, s)
        gate = sigmoid(linear(p + "g_proj.weight", x))
        y = rms_norm(o, vector(p + "o_norm.weight"), c.rms_norm_eps).reshape(len(x), -1) * gate
        self.probe(q=q, k=k, v=v, g=g, beta=beta, o=o, S=s)
        return linear(p + "o_proj.weight", y), dict(histories, S=s)

    def mla(self, p, x, state):
        """Specification 3.5: multi-head latent attention, expanded form. State: keys, values and the shared slice so far."""
        c, vector, linear = self.c, self.w.vector, self.w.linear
        heads, nope, rank = c.num_attention_heads, c.qk_nope_head_dim, c.kv_lora_rank
        q_a = rms_norm(linear(p + "q_a_proj.weight", x), vector(p + "q_a_layernorm.weight"), self.mla_norm_eps)
        q = linear(p + "q_b_proj.weight", q_a).reshape(len(x), heads, -1)
        compressed = linear(p + "kv_a_proj_with_mqa.weight", x)
        latent = rms_norm(compressed[:, :rank], vector(p + "kv_a_layernorm.weight"), self.mla_norm_eps)
        rope = compressed[:, rank:]
        kv = linear(p + "kv_b_proj.weight", latent).reshape(len(x), heads, -1)
        past = 0
        if state is not None:
            past = len(state["rope"])
            kv, rope = np.concatenate([state["kv"], kv]), np.concatenate([state["rope"], rope])
        k, v = kv[:, :, :nope], kv[:, :, nope:]
        scores = np.einsum("thd,shd->hts", q[:, :, :nope], k) + np.einsum("thd,sd->hts", q[:, :, nope:], rope)
        scores *= (nope + c.qk_rope_head_dim) ** -0.5
        future = np.arange(len(rope))[None, :] > past + np.arange(len(x))[:, None]
        o = np.einsum("hts,shd->thd", softmax(np.where(future, -np.inf, scores)), v).reshape(len(x), -1)
        gate = sigmoid(linear(p + "g_proj.weight", x))
        self.probe(latent=latent, rope=rope[past:])
        return linear(p + "o_proj.weight", o * gate), {"kv": kv, "rope": rope}

    def gated_mlp(self, p, x):
        """Specification 3.6: the dense MLP, and the fused shared experts."""
        gate, up = self.w.linear(p + "gate_proj.weight", x), self.w.linear(p + "up_proj.weight", x)
        return self.w.linear(p + "down_proj.weight", situ(gate, up, self.c.situ_beta, self.c.situ_linear_beta))

    def expert(self, p, x):
        """Specification 3.6 step 5: one routed expert in the latent width; w1 is gate, w3 up, w2 down."""
        gate, up = x @ self.w.mxfp4(p + "w1").T, x @ self.w.mxfp4(p + "w3").T
        return situ(gate, up, self.c.situ_beta, self.c.situ_linear_beta) @ self.w.mxfp4(p + "w2").T

    def moe(self, p, x):
        """Specification 3.6: the mixture of experts. Each distinct expert is read once, outputs are summed in selection order."""
        c, vector, linear = self.c, self.w.vector, self.w.linear
        gate, bias = vector(p + "gate.weight"), vector(p + "gate.e_score_correction_bias")
        ids, weights, gap = route(x, gate, bias, c.num_experts_per_token, c.routed_scaling_factor)
        z = linear(p + "routed_expert_down_proj.weight", x)
        outputs = np.empty(ids.shape + (z.shape[1],))
        for e in np.unique(ids):
            tokens, slots = np.nonzero(ids == e)
            outputs[tokens, slots] = self.expert(f"{p}experts.{e}.", z[tokens])
        aggregate = (weights[:, :, None] * outputs).sum(axis=1)
        aggregate = rms_norm(aggregate, vector(p + "routed_expert_norm.weight"), c.rms_norm_eps)
        self.probe(experts=ids, expert_weights=weights, router_gap=gap)
        return linear(p + "routed_expert_up_proj.weight", aggregate) + self.gated_mlp(p + "shared_experts.", x)


def margin(logits):
    """Distance between the two largest logits of one row."""
    top = np.partition(logits, -2)[-2:]
    return top[1] - top[0]
