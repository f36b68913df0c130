"""Attention of one new token per completion to the keys of its prompt and to its own keys; each key is read once.

Padded batched products (engines/attention.py) read every prompt and completion up to the length of the longest, and
write and read scores in float32. Here, a program keeps the queries of all completions of a prompt that share a key
head, and streams a part of the prompt's keys. Another program does the same with a completion's own keys. The parts are
joined by their maxima and sums (split-KV; Flash-Decoding, Dao et al. 2023), in float32 and in a fixed order. A step
reads

    2 (sum of prompts' lengths + sum of completions' lengths) K d numbers,

that is, every key and value once, up to the actual lengths. Sizes are those of the padded tensors, and lengths are
read from tensors, so one captured CUDA graph serves all lengths up to these sizes.

A kernel before that gives queries and keys their norms and rotations, and writes keys and values to the cache.

Shapes: R completions, G prompts of up to M completions, K heads of keys, each for r heads of queries, of size d. A
holder of keys is a prompt or a completion.
"""

# Type checkers do not know how Triton launches kernels: arguments differ from the kernels' parameters.
# pyright: reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false, reportReturnType=false

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton import knobs

LOG2E = tl.constexpr(1.4426950408889634)
FEWEST_QUERIES, MOST_QUERIES = 16, 64  # per program; tensor cores multiply at least 16 rows
COLUMNS = 64  # keys read at a time
PROGRAMS = 264  # twice the multiprocessors of an H100: keys are split to reach this number
NOTHING = tl.constexpr(-1e30)  # the maximum over no scores


@triton.jit
def _part(
    query, key, value, row_HM, count_H, at_R, out_SHKQd, highest_SHKQ, total_SHKQ,
    holders, heads, members, each, size, span, window, scale, softcap,
    query_row, query_head, query_each,
    key_holder, key_head, key_column, key_number, value_holder, value_head, value_column, value_number,
    WINDOWED: tl.constexpr, CAPPED: tl.constexpr, PRECISION: tl.constexpr, WIDE: tl.constexpr,
    QUERIES: tl.constexpr, COLUMNS: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    """Attention of a holder's queries to `span` of its keys: sum of p v, largest score, sum of p (p: powers of 2).

    Query i of the holder belongs to head i % r of the row row_HM[i // r]. Its position is the row's entry in at_R,
    counted in the holder's columns. With a window, it sees only keys less than `window` columns before it.
    """
    holder, head = tl.program_id(0) // heads, tl.program_id(0) % heads
    index = tl.program_id(1) * QUERIES + tl.arange(0, QUERIES)
    split = tl.program_id(2)
    real = index < members * each
    number = tl.arange(0, SIZE)
    here = real[:, None] & (number < size)[None, :]
    row = tl.load(row_HM + holder * members + index // each, mask=real, other=0)
    offset = row * query_row + head * query_head + (index % each) * query_each
    q = tl.load(query + offset[:, None] + number[None, :], mask=here, other=0.0)
    at = tl.load(at_R + row, mask=real, other=0)
    first, last = split * span, tl.minimum((split + 1) * span, tl.load(count_H + holder).to(tl.int32))
    if WINDOWED:
        nearest = tl.min(tl.where(real, at, 1 << 30)).to(tl.int32) - window + 1
        first = tl.maximum(first, nearest // COLUMNS * COLUMNS)
    keys = key + holder.to(tl.int64) * key_holder + head * key_head
    values = value + holder.to(tl.int64) * value_holder + head * value_head
    highest = tl.full((QUERIES,), NOTHING, tl.float32)
    total = tl.zeros((QUERIES,), tl.float32)
    out = tl.zeros((QUERIES, SIZE), tl.float32)
    for start in range(first, last, COLUMNS):
        column = start + tl.arange(0, COLUMNS)
        within = (column < last)[:, None] & (number < size)[None, :]
        k = tl.load(keys + column[:, None] * key_column + number[None, :] * key_number, mask=within, other=0.0)
        v = tl.load(values + column[:, None] * value_column + number[None, :] * value_number, mask=within, other=0.0)
        if WIDE:
            q, k, v = q.to(tl.float32), k.to(tl.float32), v.to(tl.float32)
        scores = tl.dot(q, tl.trans(k), input_precision=PRECISION) * scale
        if CAPPED:
            scores = softcap * (2 / (1 + tl.exp2(scores * (-2.0 * LOG2E) / softcap)) - 1)
        scores = scores * LOG2E
        seen = (column < last)[None, :] & real[:, None]
        if WINDOWED:
            seen = seen & (at[:, None] - column[None, :] < window)
        scores = tl.where(seen, scores, NOTHING)
        before = highest
        highest = tl.maximum(before, tl.max(scores, 1))
        p = tl.where(seen, tl.exp2(scores - highest[:, None]), 0.0)
        shrink = tl.exp2(before - highest)
        total = total * shrink + tl.sum(p, 1)
        out = tl.dot(p.to(v.dtype), v, out * shrink[:, None], input_precision=PRECISION)
    target = ((split * holders + holder) * heads + head) * members * each + index
    tl.store(highest_SHKQ + target, highest, mask=real)
    tl.store(total_SHKQ + target, total, mask=real)
    tl.store(out_SHKQd + target.to(tl.int64)[:, None] * size + number[None, :], out, mask=here)


@triton.jit
def _joined(
    group_R, member_R, prompt_out, prompt_highest, prompt_total, own_out, own_highest, own_total, result,
    rows, groups, members, heads, each, size, prompt_splits, own_splits, EACH: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    """Join the parts into a row's attention to all of its keys, for the queries of one key head."""
    row, head = tl.program_id(0) // heads, tl.program_id(0) % heads
    query, number = tl.arange(0, EACH), tl.arange(0, SIZE)
    real = query < each
    here = real[:, None] & (number < size)[None, :]
    group, member = tl.load(group_R + row), tl.load(member_R + row)
    highest = tl.full((EACH,), NOTHING, tl.float32)
    total = tl.zeros((EACH,), tl.float32)
    out = tl.zeros((EACH, SIZE), tl.float32)
    for split in range(prompt_splits + own_splits):
        if split < prompt_splits:
            index = (((split * groups + group) * heads + head) * members + member).to(tl.int64) * each + query
            m = tl.load(prompt_highest + index, mask=real, other=NOTHING)
            z = tl.load(prompt_total + index, mask=real, other=0.0)
            o = tl.load(prompt_out + index[:, None] * size + number[None, :], mask=here, other=0.0)
        else:
            index = (((split - prompt_splits) * rows + row) * heads + head).to(tl.int64) * each + query
            m = tl.load(own_highest + index, mask=real, other=NOTHING)
            z = tl.load(own_total + index, mask=real, other=0.0)
            o = tl.load(own_out + index[:, None] * size + number[None, :], mask=here, other=0.0)
        before = highest
        highest = tl.maximum(before, m)
        old, new = tl.exp2(before - highest), tl.exp2(m - highest)
        total = total * old + z * new
        out = out * old[:, None] + o * new[:, None]
    index = (row * heads + head) * each + query
    share = tl.where(real, total, 1.0)
    tl.store(
        result + index.to(tl.int64)[:, None] * size + number[None, :],
        (out / share[:, None]).to(result.dtype.element_ty),
        mask=here,
    )


@triton.jit
def _turned(first, second, weight, c, s, column, half, eps, NORMED: tl.constexpr):
    """Return both halves of rows after norm, which is rounded to the weight's dtype, and rotation, float32."""
    if NORMED:
        squares = tl.sum(first * first, 1) + tl.sum(second * second, 1)
        inverse = (1 / tl.sqrt(squares / (2 * half) + eps))[:, None]
        w_first = tl.load(weight + column, mask=column < half, other=0.0).to(tl.float32)
        w_second = tl.load(weight + half + column, mask=column < half, other=0.0).to(tl.float32)
        first = (first * inverse * w_first).to(weight.dtype.element_ty).to(tl.float32)
        second = (second * inverse * w_second).to(weight.dtype.element_ty).to(tl.float32)
    return first * c - second * s, second * c + first * s


@triton.jit
def _entered(
    query, key, value, cos, sin, query_weight, key_weight, column_R, turned, own_key, own_value,
    heads, each, half, eps, query_row, key_row, value_row,
    to_key_row, to_key_head, to_key_column, to_key_number,
    to_value_row, to_value_head, to_value_column, to_value_number,
    NORMED: tl.constexpr, EACH: tl.constexpr, HALF: tl.constexpr,
):  # fmt: skip
    """Turn one row's queries of one key head, and its key; write its key and value to the row's column."""
    row, head = (tl.program_id(0) // heads).to(tl.int64), tl.program_id(0) % heads
    column, which = tl.arange(0, HALF)[None, :], tl.arange(0, EACH)[:, None]
    one = column < half
    c = tl.load(cos + row * 2 * half + column, mask=one, other=0.0).to(tl.float32)
    s = tl.load(sin + row * 2 * half + column, mask=one, other=0.0).to(tl.float32)
    here = (which < each) & one
    source = query + row * query_row + (head * each + which) * 2 * half + column
    first = tl.load(source, mask=here, other=0.0).to(tl.float32)
    second = tl.load(source + half, mask=here, other=0.0).to(tl.float32)
    first, second = _turned(first, second, query_weight, c, s, column, half, eps, NORMED)
    target = turned + ((row * heads + head) * each + which) * 2 * half + column
    tl.store(target, first.to(turned.dtype.element_ty), mask=here)
    tl.store(target + half, second.to(turned.dtype.element_ty), mask=here)
    source = key + row * key_row + head * 2 * half + column
    first = tl.load(source, mask=one, other=0.0).to(tl.float32)
    second = tl.load(source + half, mask=one, other=0.0).to(tl.float32)
    first, second = _turned(first, second, key_weight, c, s, column, half, eps, NORMED)
    at = tl.load(column_R + row)
    target = own_key + row * to_key_row + head * to_key_head + at * to_key_column + column * to_key_number
    tl.store(target, first.to(own_key.dtype.element_ty), mask=one)
    tl.store(target + half * to_key_number, second.to(own_key.dtype.element_ty), mask=one)
    source = value + row * value_row + head * 2 * half + column
    target = own_value + row * to_value_row + head * to_value_head + at * to_value_column + column * to_value_number
    tl.store(target, tl.load(source, mask=one).to(own_value.dtype.element_ty), mask=one)
    tl.store(target + half * to_value_number, tl.load(source + half, mask=one).to(own_value.dtype.element_ty), mask=one)


def enter(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cos: Tensor,
    sin: Tensor,
    norms: tuple[Tensor, Tensor, float] | None,
    own_key: Tensor,
    own_value: Tensor,
    column_R: Tensor,
) -> Tensor:
    """Write the new keys and values (R, K, d) of rows to the columns `column_R` of the cache (R, K, L, d), and return
    the queries (R, H, d) as (R, K, r, d): queries and keys after norm and rotation by the angles (R, d).

    `norms`: the weights (d) of the RMS norms of queries and keys, and their epsilon. A row's heads are contiguous.
    """
    rows, heads, size = key.shape
    query, key, value = (x if x.stride()[1:] == (size, 1) else x.contiguous() for x in (query, key, value))
    query_weight, key_weight, eps = norms or (query, key, 0.0)
    each = query.shape[1] // heads
    turned = torch.empty(rows, heads, each, size, dtype=own_key.dtype, device=query.device)
    _entered[rows * heads,](
        query, key, value, cos.contiguous(), sin.contiguous(), query_weight, key_weight, column_R, turned,
        own_key, own_value, heads, each, size // 2, eps, query.stride(0), key.stride(0), value.stride(0),
        *own_key.stride(), *own_value.stride(),
        NORMED=norms is not None, EACH=triton.next_power_of_2(each), HALF=triton.next_power_of_2(size // 2),
        num_warps=1,
    )  # fmt: skip
    return turned


def decode_attention(
    query_RKrd: Tensor,
    prompt_key: Tensor,
    prompt_value: Tensor,
    own_key: Tensor,
    own_value: Tensor,
    group_R: Tensor,
    member_R: Tensor,
    row_GM: Tensor,
    length_G: Tensor,
    row_R1: Tensor,
    column_R: Tensor,
    age_R: Tensor,
    position_R: Tensor,
    scale: float,
    softcap: float | None,
    window: int | None,
) -> Tensor:
    """Keys and values (G, K, P, d) and (R, K, L, d), with any strides -> (R, K, r, d).

    The key of each row's new token is already written: it is the last of the row's `age_R` own keys, in the column
    `column_R` = age_R - 1, at `position_R` of its sequence. `length_G`: the prompts' lengths. `group_R`, `member_R` and
    `row_GM` map rows to completions of prompts; an entry of `row_GM` without a completion may name any row. `row_R1`:
    the rows' numbers.
    """
    rows, _, each, size = query_RKrd.shape
    prompt = _attend(query_RKrd, prompt_key, prompt_value, row_GM, length_G, position_R, scale, softcap, window)
    own = _attend(query_RKrd, own_key, own_value, row_R1, age_R, column_R, scale, softcap, window)
    result = torch.empty(query_RKrd.shape, dtype=query_RKrd.dtype, device=query_RKrd.device)
    heads, (groups, members) = prompt_key.shape[1], row_GM.shape
    _joined[rows * heads,](
        group_R, member_R, *prompt, *own, result,
        rows, groups, members, heads, each, size, len(prompt[0]), len(own[0]),
        EACH=triton.next_power_of_2(each), SIZE=triton.next_power_of_2(size),
    )  # fmt: skip
    return result


def _attend(query, key, value, row_HM, count_H, at_R, scale, softcap, window) -> tuple[Tensor, Tensor, Tensor]:
    """Return, per split, sums of p v (S, H, K, M r, d), largest scores and sums of p (S, H, K, M r), float32."""
    (holders, members), (_, heads, columns, size), each = row_HM.shape, key.shape, query.shape[2]
    query = query if query.stride(-1) == 1 else query.contiguous()
    queries = min(MOST_QUERIES, max(FEWEST_QUERIES, triton.next_power_of_2(members * each)))
    programs, most = holders * heads * triton.cdiv(members * each, queries), triton.cdiv(columns, 2 * COLUMNS)
    splits = max(1, min(most, triton.cdiv(PROGRAMS, programs)))
    span = triton.cdiv(triton.cdiv(columns, splits), COLUMNS) * COLUMNS
    shape = splits, holders, heads, members * each
    out = torch.empty(*shape, size, dtype=torch.float32, device=query.device)
    highest, total = torch.empty(2, *shape, dtype=torch.float32, device=query.device).unbind()
    _part[holders * heads, triton.cdiv(members * each, queries), splits](
        query, key, value, row_HM.contiguous(), count_H.contiguous(), at_R.contiguous(), out, highest, total,
        holders, heads, members, each, size, span, window or 0, scale, softcap or 0.0,
        *query.stride()[:3], *key.stride(), *value.stride(),
        WINDOWED=window is not None,
        CAPPED=softcap is not None,
        PRECISION="ieee" if query.dtype == torch.float32 else "tf32",  # no effect on 16-bit products
        WIDE=knobs.runtime.interpret,  # Triton's interpreter cannot multiply bfloat16
        QUERIES=queries,
        COLUMNS=COLUMNS if size <= 128 else COLUMNS // 2,  # for consumer GPUs, with 99 KB of shared memory
        SIZE=max(16, triton.next_power_of_2(size)),
        num_stages=2,  # three stages would take 100 KB for heads of 256
    )  # fmt: skip
    return out, highest, total
