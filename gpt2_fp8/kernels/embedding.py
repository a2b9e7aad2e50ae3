"""Token embeddings, plus learned positions if any, as bfloat16; the gradients of both tables from a bfloat16 gradient.

The gradient of the token table adds rows with the same id. Atomic additions would add them in a different order each
time. Here the ids are sorted, so that the positions of one id form a run of neighbours, and every sum has a fixed
order.

One program adds the rows of one chunk of sorted positions. A run inside the chunk is then complete. A run that crosses
a chunk's border leaves a partial sum in each chunk, and a second kernel adds those. So many programs share the longest
run: the most common token is 5 % of a text. Table rows without an id are not touched. The host does not read the
ids, so all of this can be recorded in a CUDA graph.

M = batch * T rows, d columns, a multiple of 16.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

ROWS, COLUMNS, WARPS = 8, 256, 8  # `embed`: a tile
CHUNK, CHUNK_COLUMNS, CHUNK_WARPS = 32, 256, 2  # sorted positions and columns that one program adds: 4 columns a thread
SPAN, JOIN_ROWS, JOIN_COLUMNS, JOIN_WARPS = 128, 16, 128, 4  # chunks examined at once, partial sums added at once
BATCH_ROWS, BATCH_COLUMNS, BATCH_WARPS = 4, 128, 2  # `positions_gradient`: a tile
STAGES = 4  # loads of the next tiles run while one is added


@triton.jit
def _embed(ids, tokens, positions, out, M, T, N, LEARNED: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = (rows < M)[:, None] & (columns < N)[None, :]
    token = tl.load(ids + rows, mask=rows < M, other=0).to(tl.int64)
    x = tl.load(tokens + token[:, None] * N + columns[None, :], mask=inside)
    if LEARNED:
        x += tl.load(positions + (rows % T).to(tl.int64)[:, None] * N + columns[None, :], mask=inside)
    tl.store(out + rows.to(tl.int64)[:, None] * N + columns[None, :], x.to(tl.bfloat16), mask=inside)


@triton.jit
def _token(ids, places, M):
    """Load the ids at some positions of the sorted `ids` [M], int32; -1 outside of them."""
    inside = (places >= 0) & (places < M)
    return tl.where(inside, tl.load(ids + places, mask=inside, other=0).to(tl.int32), -1)


@triton.jit
def _load(dx, order, out, columns, place, token, following, before, M, N):
    """Load the row of dx at a sorted position, and the old value of `out` to which its sum is added.

    The old value is that of the id's row if a run inside the chunk ends here. Elsewhere it is 0, and `out` is not
    written.
    """
    row = tl.load(order + place, mask=place < M, other=0)
    x = tl.load(dx + row * N + columns, mask=(columns < N) & (place < M), other=0.0).to(tl.float32)
    ends = (columns < N) & (token != following) & (token != before)
    return x, tl.load(out + token.to(tl.int64) * N + columns, mask=ends, other=0.0)


@triton.jit
def _add(out, columns, x, old, total, head, previous, token, following, before, N):
    """Add x to `total`, the sum of the current run, and to `head`, the sum of the run that began before the chunk."""
    total = tl.where(token == previous, total, 0.0) + x
    ends = (columns < N) & (token != following) & (token != before)
    tl.store(out + token.to(tl.int64) * N + columns, old + total, mask=ends)
    return total, tl.where(token == before, total, head)


@triton.jit
def _sum_chunk(dx, ids, order, out, partial, M, N, CHUNK: tl.constexpr, COLUMNS: tl.constexpr):
    """Add the runs inside a chunk to `out`.

    `partial` [chunks, 2, N] gets two sums: of the run that began before the chunk, and of the one that continues after
    it.
    """
    start = tl.program_id(0) * CHUNK
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    before = _token(ids, start - 1, M)
    previous = before
    token0 = _token(ids, start, M)
    begun = token0 == before
    total = tl.zeros([COLUMNS], tl.float32)
    head = tl.zeros([COLUMNS], tl.float32)
    for place in range(start, start + CHUNK, 4):  # all loads of four rows are issued before the first is added
        token1, token2 = _token(ids, place + 1, M), _token(ids, place + 2, M)
        token3, token4 = _token(ids, place + 3, M), _token(ids, place + 4, M)
        x0, old0 = _load(dx, order, out, columns, place, token0, token1, before, M, N)
        x1, old1 = _load(dx, order, out, columns, place + 1, token1, token2, before, M, N)
        x2, old2 = _load(dx, order, out, columns, place + 2, token2, token3, before, M, N)
        x3, old3 = _load(dx, order, out, columns, place + 3, token3, token4, before, M, N)
        total, head = _add(out, columns, x0, old0, total, head, previous, token0, token1, before, N)
        total, head = _add(out, columns, x1, old1, total, head, token0, token1, token2, before, N)
        total, head = _add(out, columns, x2, old2, total, head, token1, token2, token3, before, N)
        total, head = _add(out, columns, x3, old3, total, head, token2, token3, token4, before, N)
        previous, token0 = token3, token4
    partial += tl.program_id(0).to(tl.int64) * 2 * N + columns
    tl.store(partial, head, mask=(columns < N) & begun)
    goes_on = (previous == token0) & (previous != before) & (start + CHUNK < M)
    tl.store(partial + N, total, mask=(columns < N) & goes_on)


@triton.jit
def _reach(ids, token, chunk, M, CHUNK: tl.constexpr, SPAN: tl.constexpr):
    """Count how many of SPAN chunks from `chunk` on begin with `token`, the id at the position before them."""
    places = (chunk + tl.arange(0, SPAN)) * CHUNK
    return tl.sum((_token(ids, places, M) == token).to(tl.int32), axis=0)


@triton.jit
def _join(
    partial, ids, out, M, N,
    CHUNK: tl.constexpr, SPAN: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Add to `out` the run that begins in a chunk and continues after it, if there is one.

    It adds the run's sum in this chunk and the heads of the chunks it reaches.
    """
    chunk = tl.program_id(0)
    token = _token(ids, (chunk + 1) * CHUNK - 1, M)
    if (token != _token(ids, (chunk + 1) * CHUNK, M)) | (token == _token(ids, chunk * CHUNK - 1, M)):
        return
    count = _reach(ids, token, chunk + 1, M, CHUNK, SPAN)
    looked_at = SPAN
    while count == looked_at:
        count += _reach(ids, token, chunk + 1 + looked_at, M, CHUNK, SPAN)
        looked_at += SPAN
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = columns < N
    partial += chunk.to(tl.int64) * 2 * N
    total = tl.zeros([ROWS, COLUMNS], tl.float32)
    for start in range(0, count, ROWS):
        rows = start + tl.arange(0, ROWS)
        heads = partial + (rows + 1).to(tl.int64)[:, None] * 2 * N + columns[None, :]
        total += tl.load(heads, mask=(rows < count)[:, None] & inside[None, :], other=0.0)
    result = tl.load(partial + N + columns, mask=inside, other=0.0) + tl.sum(total, axis=0)
    out += token.to(tl.int64) * N + columns
    tl.store(out, tl.load(out, mask=inside, other=0.0) + result, mask=inside)


@triton.jit
def _sum_batch(
    dx, out, batch, T, P, N,
    ADD: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    at = rows.to(tl.int64)[:, None] * N + columns[None, :]
    taking_part = (rows < T)[:, None] & (columns < N)[None, :]
    total = tl.zeros([ROWS, COLUMNS], tl.float32)
    dx += at
    for _ in tl.range(0, batch, num_stages=STAGES):
        total += tl.load(dx, mask=taking_part, other=0.0).to(tl.float32)
        dx += T * N
    if ADD:
        total += tl.load(out + at, mask=taking_part, other=0.0)
        tl.store(out + at, total, mask=taking_part)
    else:
        tl.store(out + at, total, mask=(rows < P)[:, None] & (columns < N)[None, :])


def embed(ids: Tensor, tokens: Tensor, positions: Tensor | None) -> Tensor:
    """Compute tokens[ids] + positions[:T], bfloat16 [batch, T, d], rounded once; `positions=None`: without these.

    ids: integers [batch, T], all in [0, V); tokens [V, d] and positions [P, d], T <= P, float32.
    """
    (batch, length), n, learned = ids.shape, tokens.shape[1], positions is not None
    positions = tokens if positions is None else positions
    assert all(t.is_contiguous() for t in (ids, tokens, positions))
    assert not learned or length <= positions.shape[0], (length, positions.shape)
    assert positions.shape[1] == n, (tokens.shape, positions.shape)
    m = batch * length
    out = torch.empty(batch, length, n, dtype=torch.bfloat16, device=tokens.device)
    grid = triton.cdiv(m, ROWS), triton.cdiv(n, COLUMNS)
    _embed[grid](ids, tokens, positions, out, m, length, n, learned, ROWS=ROWS, COLUMNS=COLUMNS, num_warps=WARPS)
    return out


def _sort_ids(ids: Tensor, vocabulary: int) -> tuple[Tensor, Tensor]:
    """Group equal ids [M] side by side, and return them with their old positions, in stable order.

    The order between different ids does not matter. A radix sort's time grows with the width of its keys, so ids that
    fit into 16 bits are sorted as int16.
    """
    if vocabulary > 2**16:
        return torch.sort(ids.view(-1).to(torch.int32), stable=True)
    together, order = torch.sort(ids.view(-1).to(torch.int16), stable=True)
    return together.view(torch.uint16), order


def embedding_gradient(dx: Tensor, ids: Tensor, tokens_gradient: Tensor) -> None:
    """Add the rows of dx to the rows of `tokens_gradient` that their ids name, in place. The same bits every time.

    dx: bfloat16 [batch, T, d]; ids: integers [batch, T], all in [0, V); tokens_gradient: float32 [V, d].
    """
    assert all(t.is_contiguous() for t in (dx, ids, tokens_gradient))
    assert dx.shape == (*ids.shape, tokens_gradient.shape[1]), (dx.shape, ids.shape, tokens_gradient.shape)
    (vocabulary, n), m = tokens_gradient.shape, ids.numel()
    together, order = _sort_ids(ids, vocabulary)
    chunks = triton.cdiv(m, CHUNK)
    partial = torch.empty(chunks, 2, n, dtype=torch.float32, device=dx.device)
    _sum_chunk[(chunks, triton.cdiv(n, CHUNK_COLUMNS))](
        dx, together, order, tokens_gradient, partial, m, n,
        CHUNK=CHUNK, COLUMNS=CHUNK_COLUMNS, num_warps=CHUNK_WARPS,
    )  # fmt: skip
    if chunks > 1:
        _join[(chunks - 1, triton.cdiv(n, JOIN_COLUMNS))](
            partial, together, tokens_gradient, m, n,
            CHUNK=CHUNK, SPAN=SPAN, ROWS=JOIN_ROWS, COLUMNS=JOIN_COLUMNS, num_warps=JOIN_WARPS,
        )  # fmt: skip


def positions_gradient(dx: Tensor, out: Tensor, add: bool) -> None:
    """Sum dx [batch, T, d] bfloat16 over the batch into `out` [P, d] float32, T <= P; rows from T on get 0.

    If `add`, the sum is added to what `out` holds. The same bits every time.
    """
    assert all(t.is_contiguous() for t in (dx, out))
    batch, length, n = dx.shape
    assert length <= out.shape[0], (dx.shape, out.shape)
    assert out.shape[1] == n, (dx.shape, out.shape)
    grid = triton.cdiv(length if add else out.shape[0], BATCH_ROWS), triton.cdiv(n, BATCH_COLUMNS)
    _sum_batch[grid](
        dx, out, batch, length, out.shape[0], n,
        ADD=add, ROWS=BATCH_ROWS, COLUMNS=BATCH_COLUMNS, STAGES=STAGES, num_warps=BATCH_WARPS,
    )  # fmt: skip


def fused_embed(ids: Tensor, tokens: Tensor, positions: Tensor | None) -> Tensor:
    """Compute `embed`, with gradients.

    The token gradient is added row by row to what a tied head's backward has left in `tokens.grad`. No dense gradient
    is made.
    """
    return _Embedding.apply(ids.contiguous(), tokens, positions)


class _Embedding(torch.autograd.Function):
    """The fused embedding. Its backward writes the parameters' `.grad` itself.

    A tied head's backward, which runs first, writes `tokens.grad` itself too; this one runs last and adds to it. Both
    take the table as an argument, so its hooks are called once, after both.
    """

    @staticmethod
    def forward(ctx: Any, ids: Tensor, tokens: Tensor, positions: Tensor | None) -> Tensor:
        ctx.parameters = tokens, positions
        ctx.save_for_backward(ids)
        return embed(ids, tokens, positions)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *upstream: Tensor) -> tuple[None, None, None]:
        (ids,), (tokens, positions), dx = ctx.saved_tensors, ctx.parameters, upstream[0].contiguous()
        if tokens.grad is None:
            tokens.grad = torch.zeros_like(tokens)
        embedding_gradient(dx, ids, tokens.grad)
        if positions is None:
            return None, None, None
        add = positions.grad is not None
        if positions.grad is None:
            positions.grad = torch.empty_like(positions)
        positions_gradient(dx, positions.grad, add)
        return None, None, None
