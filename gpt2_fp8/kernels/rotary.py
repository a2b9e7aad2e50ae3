"""What is done to queries and keys before attention: RMSNorm of each head (QK-norm), then RoPE. Each may be left out.

A head x has `size` channels. QK-norm is y = x / rms(x) * w with learned w [size]. RoPE (Su et al. 2021) turns channel i
of the head's first half with channel i of its second by an angle of its position. The arithmetic is float32, and the
result is rounded once.

The backward reads the raw queries and keys and computes 1 / rms again, so that no weight has to be divided by. It may
write where it reads the gradients: each program reads what it overwrites, and nothing else of it. For that a tile has
at least as many elements as a program has threads: otherwise several threads would read the same ones.

A program has some tokens and goes over their heads one after the other, so the angles' cosines and sines are read once.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

ELEMENTS, WARPS = 1024, 4  # of half a head in a tile: 8 for each thread, 16 bytes of bfloat16


class Turns(NamedTuple):
    """By how much RoPE turns the channel pairs of each position, [tokens, size / 2]."""

    angle: Tensor  # radians, float64
    cos: Tensor  # float32
    sin: Tensor

    @classmethod
    def of(cls, angle: Tensor) -> Turns:
        """Compute the cosines and sines of `reference.angles`, once for all blocks."""
        return cls(angle, angle.cos().float(), angle.sin().float())


Norms = tuple[Tensor, ...]  # the weights of QK-norm for queries and for keys, float32 [size]; none without it


@triton.jit
def _load(at, first, second, HALF: tl.constexpr):
    """Load both halves of a head, float32; 0 outside."""
    x1 = tl.load(at, mask=first, other=0.0).to(tl.float32)
    return x1, tl.load(at + HALF, mask=second, other=0.0).to(tl.float32)


@triton.jit
def _store(at, x1, x2, first, second, HALF: tl.constexpr):
    tl.store(at, x1.to(tl.bfloat16), mask=first)
    tl.store(at + HALF, x2.to(tl.bfloat16), mask=second)


@triton.jit
def _scale(x1, x2, epsilon, SIZE: tl.constexpr):
    """Compute 1 / rms of each row, [rows, 1]."""
    squares = tl.sum(x1 * x1, axis=1) + tl.sum(x2 * x2, axis=1)
    return tl.rsqrt(squares / SIZE + epsilon)[:, None]


@triton.jit
def _weights(weight, columns, SIZE: tl.constexpr, HALF: tl.constexpr):
    w1 = tl.load(weight + columns, mask=columns < HALF, other=0.0)
    return w1[None, :], tl.load(weight + HALF + columns, mask=columns < SIZE - HALF, other=0.0)[None, :]


@triton.jit
def _prepare(
    x, y, weight, cos, sin, columns, first, second, epsilon,
    HEADS: tl.constexpr, SIZE: tl.constexpr, HALF: tl.constexpr, NORM: tl.constexpr, ROPE: tl.constexpr,
):  # fmt: skip
    """Write all heads of queries, keys or values. x, y: where the first one begins, [rows, columns]."""
    if NORM:
        w1, w2 = _weights(weight, columns, SIZE, HALF)
    for head in range(HEADS):
        x1, x2 = _load(x + head * SIZE, first, second, HALF)
        if NORM:
            scale = _scale(x1, x2, epsilon, SIZE)
            x1, x2 = x1 * scale * w1, x2 * scale * w2
        if ROPE:
            x1, x2 = x1 * cos - x2 * sin, x2 * cos + x1 * sin
        _store(y + head * SIZE, x1, x2, first, second, HALF)


@triton.jit
def _differentiate(
    x, g, dx, sums, weight, cos, sin, columns, first, second, stride, epsilon,
    HEADS: tl.constexpr, SIZE: tl.constexpr, HALF: tl.constexpr, PADDED: tl.constexpr, ROWS: tl.constexpr,
    NORM: tl.constexpr, ROPE: tl.constexpr,
):  # fmt: skip
    """Write the gradients of all raw heads from those of the prepared ones, and the rows' sum of the weight's.

    `stride`: from one head to the next in g.
    """
    sum1 = tl.zeros([ROWS, PADDED], tl.float32)
    sum2 = tl.zeros([ROWS, PADDED], tl.float32)
    if NORM:
        w1, w2 = _weights(weight, columns, SIZE, HALF)
    for head in range(HEADS):
        g1, g2 = _load(g + head * stride, first, second, HALF)
        if ROPE:
            g1, g2 = g1 * cos + g2 * sin, g2 * cos - g1 * sin
        if NORM:
            x1, x2 = _load(x + head * SIZE, first, second, HALF)
            scale = _scale(x1, x2, epsilon, SIZE)
            x1, x2 = x1 * scale, x2 * scale
            sum1 += g1 * x1
            sum2 += g2 * x2
            g1, g2 = g1 * w1, g2 * w2
            mean = ((tl.sum(g1 * x1, axis=1) + tl.sum(g2 * x2, axis=1)) / SIZE)[:, None]
            g1, g2 = (g1 - x1 * mean) * scale, (g2 - x2 * mean) * scale
        _store(dx + head * SIZE, g1, g2, first, second, HALF)
    if NORM:
        tl.store(sums + columns, tl.sum(sum1, axis=0), mask=columns < HALF)
        tl.store(sums + HALF + columns, tl.sum(sum2, axis=0), mask=columns < SIZE - HALF)


@triton.jit
def _tile(
    cos, sin, M, T, SIZE: tl.constexpr, HALF: tl.constexpr, PADDED: tl.constexpr, ROWS: tl.constexpr,
    ROPE: tl.constexpr,
):  # fmt: skip
    """Return a program's rows and columns, where the halves of a head are, and the rows' cosines and sines."""
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    columns = tl.arange(0, PADDED)
    first = (rows < M)[:, None] & (columns < HALF)[None, :]
    second = (rows < M)[:, None] & (columns < SIZE - HALF)[None, :]
    if ROPE:
        at = (rows % T)[:, None] * HALF + columns[None, :]
        cos, sin = tl.load(cos + at, mask=first, other=0.0), tl.load(sin + at, mask=first, other=0.0)
    return rows, columns, first, second, cos, sin


@triton.jit
def _forward(
    packed, prepared, q_weight, k_weight, cos, sin, M, T, epsilon,
    QUERIES: tl.constexpr, KEYS: tl.constexpr, SIZE: tl.constexpr, HALF: tl.constexpr, PADDED: tl.constexpr,
    ROWS: tl.constexpr, NORM: tl.constexpr, ROPE: tl.constexpr, VALUES: tl.constexpr,
):  # fmt: skip
    rows, columns, first, second, cos, sin = _tile(cos, sin, M, T, SIZE, HALF, PADDED, ROWS, ROPE)
    row = rows.to(tl.int64)[:, None]
    x = packed + row * ((QUERIES + 2 * KEYS) * SIZE) + columns[None, :]
    y = prepared + row * ((QUERIES + KEYS + VALUES) * SIZE) + columns[None, :]
    _prepare(x, y, q_weight, cos, sin, columns, first, second, epsilon, QUERIES, SIZE, HALF, NORM, ROPE)
    x += QUERIES * SIZE
    y += QUERIES * SIZE
    _prepare(x, y, k_weight, cos, sin, columns, first, second, epsilon, KEYS, SIZE, HALF, NORM, ROPE)
    x += KEYS * SIZE
    y += KEYS * SIZE
    _prepare(x, y, k_weight, cos, sin, columns, first, second, epsilon, VALUES, SIZE, HALF, False, False)


@triton.jit
def _backward(
    packed, dq, dk, gradient, sums, q_weight, k_weight, cos, sin, M, T, epsilon,
    q_batch, q_token, q_head, k_batch, k_token, k_head,
    QUERIES: tl.constexpr, KEYS: tl.constexpr, SIZE: tl.constexpr, HALF: tl.constexpr, PADDED: tl.constexpr,
    ROWS: tl.constexpr, NORM: tl.constexpr, ROPE: tl.constexpr,
):  # fmt: skip
    rows, columns, first, second, cos, sin = _tile(cos, sin, M, T, SIZE, HALF, PADDED, ROWS, ROPE)
    batch, token = (rows // T).to(tl.int64)[:, None], (rows % T).to(tl.int64)[:, None]
    at = rows.to(tl.int64)[:, None] * ((QUERIES + 2 * KEYS) * SIZE) + columns[None, :]
    x, dx = packed + at, gradient + at
    sums += tl.program_id(0).to(tl.int64) * 2 * SIZE
    g = dq + batch * q_batch + token * q_token + columns[None, :]
    _differentiate(
        x, g, dx, sums, q_weight, cos, sin, columns, first, second, q_head, epsilon,
        QUERIES, SIZE, HALF, PADDED, ROWS, NORM, ROPE,
    )  # fmt: skip
    x += QUERIES * SIZE
    dx += QUERIES * SIZE
    g = dk + batch * k_batch + token * k_token + columns[None, :]
    _differentiate(
        x, g, dx, sums + SIZE, k_weight, cos, sin, columns, first, second, k_head, epsilon,
        KEYS, SIZE, HALF, PADDED, ROWS, NORM, ROPE,
    )  # fmt: skip


def _constants(queries: int, keys: int, size: int, turns: Turns | None, norms: Norms) -> dict[str, int | bool]:
    assert turns is None or (size % 2 == 0 and turns.cos.is_contiguous() and turns.sin.is_contiguous())
    half = (size + 1) // 2
    padded = triton.next_power_of_2(half)
    shape = {"QUERIES": queries, "KEYS": keys, "SIZE": size, "HALF": half, "PADDED": padded}
    return shape | {"ROWS": max(16, ELEMENTS // padded), "NORM": bool(norms), "ROPE": turns is not None}


def _vectors(packed: Tensor, turns: Turns | None, norms: Norms) -> tuple[Tensor, ...]:
    """Return the weights of queries and keys, cosines and sines; in the place of those that there are not, `packed`."""
    return *(norms or (packed, packed)), *((packed, packed) if turns is None else (turns.cos, turns.sin))


def prepare_heads(
    packed: Tensor, queries: int, keys: int, turns: Turns | None, norms: Norms, epsilon: float, values: bool = False
) -> tuple[Tensor, ...]:
    """Normalise and turn queries and keys: bfloat16 [batch, tokens, heads of each, size], side by side as in `packed`.

    packed: contiguous, bfloat16 [batch, tokens, (queries + 2 keys) size]: queries, keys and values, head after head.
    `queries`, `keys`: numbers of heads. `turns`: of so many tokens; None: there is no RoPE. `values`: a copy of these
    lies beside them, the third result.
    """
    assert packed.is_contiguous()
    batch, tokens, width = packed.shape
    size, m = width // (queries + 2 * keys), batch * tokens
    assert turns is None or turns.cos.shape == (tokens, size // 2), (turns.cos.shape, packed.shape)
    heads = [queries, keys, keys] if values else [queries, keys]
    prepared = torch.empty(batch, tokens, sum(heads), size, dtype=packed.dtype, device=packed.device)
    constants = _constants(queries, keys, size, turns, norms)
    _forward[(triton.cdiv(m, constants["ROWS"]),)](
        packed, prepared, *_vectors(packed, turns, norms), m, tokens, epsilon,
        **constants, VALUES=keys if values else 0, num_warps=WARPS,
    )  # fmt: skip
    return prepared.split(heads, 2)


def prepare_heads_backward(
    dq: Tensor, dk: Tensor, packed: Tensor, gradient: Tensor, turns: Turns | None, norms: Norms, epsilon: float
) -> Tensor:
    """Write the gradients of the raw queries and keys into `gradient`, contiguous and of `packed`'s shape and dtype.

    dq, dk: those of `prepare_heads`' results, of any strides, or these very parts of `gradient`. Returns partial sums
    of the weights' gradients, float32 [P, 2, size]; undefined without QK-norm.
    """
    assert packed.is_contiguous()
    assert gradient.is_contiguous()
    dq, dk = (x if x.stride(3) == 1 else x.contiguous() for x in (dq, dk))
    _, tokens, queries, size = dq.shape
    constants = _constants(queries, dk.shape[2], size, turns, norms)
    m = dq.shape[0] * tokens
    programs = triton.cdiv(m, constants["ROWS"])
    sums = torch.empty(programs, 2, size, dtype=torch.float32, device=packed.device)
    _backward[(programs,)](
        packed, dq, dk, gradient, sums, *_vectors(packed, turns, norms), m, tokens, epsilon,
        *dq.stride()[:3], *dk.stride()[:3], **constants, num_warps=WARPS,
    )  # fmt: skip
    return sums
