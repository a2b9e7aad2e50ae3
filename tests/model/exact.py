"""A decoder in float64, written out by formulas: what the layers are compared with.

It shares no code with them. Attention goes query by query over the positions before it. RoPE multiplies complex
numbers. Norms, activations and the loss are sums and exponentials of torch tensors, so that autograd gives gradients.
"""

import cmath
import math

import torch


def loss_and_gradients(config, weights, ids, vocab_size):
    """Return the mean loss and all gradients by name. ids: [sequences, tokens + 1]."""
    leaves = {name: weight.detach().double().clone().requires_grad_() for name, weight in weights.items()}
    out = logits(config, leaves, ids[:, :-1].long())[..., :vocab_size]
    targets = ids[:, 1:].long()
    chosen = out.gather(-1, targets[..., None])[..., 0]
    loss = (out.exp().sum(-1).log() - chosen).mean()
    gradients = torch.autograd.grad(loss, list(leaves.values()))
    return loss.item(), dict(zip(leaves, gradients, strict=True))


def logits(config, w, ids):
    """Return logits [sequences, tokens, padded vocabulary]."""
    x = w["tokens.weight"][ids]
    if config.positions == "learned":
        x = x + w["positions.weight"][: ids.shape[1]]
    for i in range(config.n_layer):
        block = {
            name.removeprefix(f"blocks.{i}."): weight for name, weight in w.items() if name.startswith(f"blocks.{i}.")
        }
        y = normed(config, x, block, "qkv.layer_norm")
        y = attention(config, linear(y, block, "qkv."), block)
        x = x + linear(y, block, "projection.")
        x = x + mlp(config, normed(config, x, block, "mlp.layer_norm"), block)
    x = normed(config, x, w, "head.layer_norm")
    return x @ (w["tokens.weight"] if config.tied_head else w["head.weight"]).T


def linear(x, w, prefix):
    y = torch.einsum("bti,oi->bto", x, w[f"{prefix}weight"])
    return y + w[f"{prefix}bias"] if f"{prefix}bias" in w else y


def normed(config, x, w, prefix):
    if config.norm == "rms_norm":
        return x / (x.square().mean(-1, keepdim=True) + config.norm_epsilon).sqrt() * w[f"{prefix}_weight"]
    centred = x - x.mean(-1, keepdim=True)
    scaled = centred / (centred.square().mean(-1, keepdim=True) + config.norm_epsilon).sqrt()
    return scaled * w[f"{prefix}_weight"] + w[f"{prefix}_bias"]


def mlp(config, x, w):
    h = linear(x, w, "mlp.fc1_")
    if config.mlp == "swiglu":
        width = config.mlp_width or 4 * config.n_embd
        gate, up = h[..., :width], h[..., width:]
        h = gate / (1 + (-gate).exp()) * up
    elif config.mlp == "relu_squared":
        h = torch.where(h > 0, h * h, 0.0)
    else:
        h = 0.5 * h * (1 + (math.sqrt(2 / math.pi) * (h + 0.044715 * h**3)).tanh())
    return linear(h, w, "mlp.fc2_")


def attention(config, qkv, w):
    """Attend query by query. Query head h reads key-value head h // (heads a key-value head)."""
    size = config.head_size or config.n_embd // config.n_head
    n_kv_head = config.n_kv_head or config.n_head
    batch, tokens, _ = qkv.shape
    heads = qkv.reshape(batch, tokens, -1, size)
    q, k, v = heads[:, :, : config.n_head], heads[:, :, config.n_head : -n_kv_head], heads[:, :, -n_kv_head:]
    if config.qk_norm:
        q, k = (
            x / (x.square().mean(-1, keepdim=True) + config.norm_epsilon).sqrt() * w[f"attention.{name}_norm"]
            for name, x in (("q", q), ("k", k))
        )
    if config.positions == "rope":
        q, k = turned(config, q), turned(config, k)
    results = []
    for t in range(tokens):
        of_heads = []
        for h in range(config.n_head):
            shared = h // (config.n_head // n_kv_head)
            scores = torch.einsum("bs,bts->bt", q[:, t, h], k[:, : t + 1, shared]) / math.sqrt(size)
            weights = scores.exp() / scores.exp().sum(-1, keepdim=True)
            of_heads.append(torch.einsum("bt,bts->bs", weights, v[:, : t + 1, shared]))
        results.append(torch.cat(of_heads, -1))
    return torch.stack(results, 1)


def turned(config, x):
    """Multiply channel i + j * channel (i + size / 2) by exp(j position frequency)."""
    half = x.shape[-1] // 2
    unit = [[cmath.exp(1j * t * frequency(config, i, 2 * half)) for i in range(half)] for t in range(x.shape[1])]
    z = torch.complex(x[..., :half], x[..., half:]) * torch.tensor(unit, dtype=torch.complex128)[:, None]
    return torch.cat((z.real, z.imag), -1)


def frequency(config, i, size):
    """Radians a token of pair i: Meta's rule by wavelengths, as its Llama 3.1 code states it."""
    plain = 1 / (config.rope_base or 10000.0) ** (2 * i / size)
    if config.rope_scaling is None:
        return plain
    if config.rope_original_positions is None:
        return plain / config.rope_scaling
    wavelength = 2 * math.pi / plain
    if wavelength < config.rope_original_positions / config.rope_high_freq_factor:
        return plain
    if wavelength > config.rope_original_positions / config.rope_low_freq_factor:
        return plain / config.rope_scaling
    low, high = config.rope_low_freq_factor, config.rope_high_freq_factor
    smooth = (config.rope_original_positions / wavelength - low) / (high - low)
    return (1 - smooth) * plain / config.rope_scaling + smooth * plain
