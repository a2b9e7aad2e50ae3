"""The FP8 cast in both layouts against torch's, and what the tests of the other FP8 kernels share."""

import pytest
import torch

pytestmark = pytest.mark.fp8

DEVICE = "cuda"
LARGEST = {torch.float8_e4m3fn: 448.0, torch.float8_e5m2: 57344.0}
FORMATS = list(LARGEST)
SHAPES = [(128, 128), (256, 384), (16, 16), (48, 144), (80, 48), (272, 768), (16, 1600), (48, 2064)]
LARGE = [(2064, 4112), (4112, 4112)]  # a program handles two tiles, or four; the last one's lie partly outside
# as it is; so large that normal values saturate; small enough for subnormal numbers and zeros
SCALES = [1.0, 2.0**16, 2.0**-8, 2.0**-16]


@pytest.fixture(params=["cuda", "triton"], autouse=True)
def implementation(request, monkeypatch):
    """Every test is of both."""
    use(request.param, monkeypatch)


def use(implementation, monkeypatch):
    """Have kernels that there are in both run in "cuda" (C++) or "triton" from here on."""
    from gpt2_fp8.kernels import nvrtc

    if implementation == "triton":
        monkeypatch.setattr(nvrtc, "missing", lambda: "hidden by the test")
    elif reason := nvrtc.missing():
        pytest.skip(reason)


def normal(*shape, seed=0, dtype=torch.bfloat16):
    """Standard normal values [shape] on the device."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator).to(DEVICE, dtype)


def large_normal(*shape, seed=0):
    """Standard normal bfloat16 values of a tensor of more elements than int32 counts, made on the device."""
    generator = torch.Generator(DEVICE).manual_seed(seed)
    out = torch.empty(*shape, device=DEVICE, dtype=torch.bfloat16)
    for part in out.view(-1).split(2**26):
        part.copy_(torch.randn(len(part), device=DEVICE, generator=generator))
    return out


def need(gibibytes):
    """Skip where less GPU memory is free."""
    torch.cuda.empty_cache()
    if torch.cuda.mem_get_info()[0] < gibibytes * 2**30:
        pytest.skip(f"needs {gibibytes} GiB of free GPU memory")


def assert_slices_are_alone(whole, alone, parts, transposed=()):
    """The tensors of a large call have the bytes of calls on `parts` of its rows, each of which counts its elements in
    int32, and which other tests hold to float64. `alone(part)`: a call's tensors; those whose places in the list are
    `transposed` have the rows as columns."""
    for part in parts:
        for i, (large, small) in enumerate(zip(whole, alone(part), strict=True)):
            large = large.view(torch.uint8) if large.element_size() == 1 else large
            here = large[:, part] if i in transposed else large[part]
            assert torch.equal(bits(here), bits(small)), (i, part)


def slot_of(dtype, scale=1.0, amax=0.0):
    from gpt2_fp8.kernels.slot import Slot

    return Slot(*(torch.tensor([value], device=DEVICE) for value in (scale, 1 / scale, amax)), dtype)


def to_fp8(exact, scale, dtype):
    """`exact` (float64) times `scale`, saturated and cast by torch."""
    return (exact * scale).clamp(-LARGEST[dtype], LARGEST[dtype]).to(dtype)


def ordinal(q):
    """The place of each FP8 number among all of its format, int: neighbours differ by 1, and -0 is 0."""
    bits = q.view(torch.uint8).int()
    return torch.where(bits >= 128, 128 - bits, bits)


def assert_transposed(q, qt):
    assert q.is_contiguous()
    assert qt.is_contiguous()
    assert torch.equal(qt.view(torch.uint8), q.view(torch.uint8).t())


def assert_fp8(q, exact, scale, noise):
    """q is the cast of `exact` (float64) times `scale`, where float32 arithmetic is off by at most `noise` (same shape
    or a number, before the scale). All but 0.1 % must be what torch's cast gives; `noise` has to explain the others."""
    want = to_fp8(exact, scale, q.dtype)
    assert torch.equal(q.float().isnan(), want.float().isnan())
    got = ordinal(q)
    low, high = (ordinal(to_fp8(exact + sign * noise, scale, q.dtype)) for sign in (-1, 1))
    number = ~exact.isnan()
    assert torch.all((low <= got)[number])
    assert torch.all((got <= high)[number])
    assert (got != ordinal(want))[number].sum().item() <= max(2, exact.numel() // 1000)


def column_sums(partial):
    """The kernel's column sums of `partial` [P, N], float64."""
    from gpt2_fp8.kernels.cast import reduce_columns

    out = torch.full(partial.shape[1:], float("nan"), device=DEVICE)
    reduce_columns(partial, out, add=False)
    return out.double()


def bits(tensor):
    """The bytes of a tensor, so that NaN equals NaN and -0 differs from 0."""
    return tensor.contiguous().view(-1).view(torch.uint8)


def assert_repeats(call, dtype):
    """`call(slot)` gives the same bytes twice, and records the same amax."""
    first, second = slot_of(dtype), slot_of(dtype)
    for one, other in zip(call(first), call(second), strict=True):
        assert torch.equal(bits(one), bits(other))
    assert torch.equal(first.amax, second.amax)


@pytest.mark.parametrize("implementation", ["cuda"], indirect=True)
@pytest.mark.parametrize("shape", [(16, 16), (144, 1600), (16, 2064), (4112, 16), (20, 16), (16, 24)])
def test_which_implementation(shape, monkeypatch):
    from gpt2_fp8.kernels import cast, cast_lines

    calls, given = [], cast_lines.cast
    monkeypatch.setattr(cast_lines, "cast", lambda *arguments: calls.append(1) or given(*arguments))
    q, qt, _ = cast.cast_transpose(normal(*shape), slot_of(torch.float8_e4m3fn))
    assert len(calls) == (shape[0] % 16 == shape[1] % 16 == 0)
    assert torch.equal(bits(q), bits(to_fp8(normal(*shape).double(), 1.0, q.dtype)))
    assert_transposed(q, qt)


@pytest.mark.parametrize("implementation", ["cuda"], indirect=True)
@pytest.mark.parametrize("given", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("dtype", FORMATS)
@pytest.mark.parametrize("scale", [2.0**4, 37.3])
@pytest.mark.parametrize("shape", [(16, 16), (48, 144), (112, 1584), (144, 1600), (272, 2064), (4112, 48)])
def test_both_give_the_same(shape, scale, dtype, given, monkeypatch):
    """Byte for byte, with infinity and NaN, where the last block has few rows or columns."""
    from gpt2_fp8.kernels.cast import cast_transpose

    x, infinity = normal(*shape, dtype=given), float("inf")
    for special in ({}, {(3, 5): float("nan"), (-1, -1): float("nan")}, {(0, 0): -infinity, (-2, -3): infinity}):
        for place, value in special.items():
            x[place] = value
        slot, other = slot_of(dtype, scale), slot_of(dtype, scale)
        q, qt, sums = cast_transpose(x, slot, sums=True)
        with monkeypatch.context() as patch:
            use("triton", patch)
            other_q, other_qt, other_sums = cast_transpose(x, other, sums=True)
        assert torch.equal(bits(q), bits(other_q))
        assert torch.equal(bits(qt), bits(other_qt))
        assert slot.amax.item() == other.amax.item() > 0
        close = {"rtol": 1e-6, "atol": 4e-4, "equal_nan": True}
        torch.testing.assert_close(column_sums(sums), column_sums(other_sums), **close)


@pytest.mark.parametrize("given", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("dtype", FORMATS)
@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("shape", SHAPES)
def test_cast_is_torchs(shape, scale, dtype, given):
    from gpt2_fp8.kernels.cast import cast_transpose

    x = normal(*shape, dtype=given)
    slot = slot_of(dtype, scale)
    q, qt, partial = cast_transpose(x, slot)
    # multiplying by a power of two rounds nothing
    assert torch.equal(bits(q), bits(to_fp8(x.double(), scale, dtype)))
    assert_transposed(q, qt)
    assert slot.amax.item() == x.abs().max().item()
    assert slot.scale.item() == scale
    assert partial.numel() == 0


@pytest.mark.parametrize("shape", LARGE)
def test_several_tiles_a_program(shape):
    from gpt2_fp8.kernels.cast import cast_transpose

    x = normal(*shape)
    slot = slot_of(torch.float8_e4m3fn, 2.0**4)
    q, qt, partial = cast_transpose(x, slot, sums=True)
    assert torch.equal(bits(q), bits(to_fp8(x.double(), 2.0**4, q.dtype)))
    assert_transposed(q, qt)
    assert slot.amax.item() == x.abs().max().item()
    torch.testing.assert_close(column_sums(partial), x.double().sum(0), rtol=1e-6, atol=2e-4)


@pytest.mark.parametrize("dtype", FORMATS)
def test_a_scale_that_rounds(dtype):
    from gpt2_fp8.kernels.cast import cast_transpose

    x = normal(272, 768)
    slot = slot_of(dtype, 37.3)
    q, qt, _ = cast_transpose(x, slot)
    assert_fp8(q, x.double(), slot.scale.double(), 2.0**-23 * x.double().abs())
    assert_transposed(q, qt)


@pytest.mark.parametrize("given", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("dtype", FORMATS)
@pytest.mark.parametrize("scale", SCALES)
def test_extreme_values(scale, dtype, given):
    from gpt2_fp8.kernels.cast import cast_transpose

    x = torch.zeros(48, 144, device=DEVICE, dtype=given)
    largest = torch.finfo(given).max
    extremes = torch.tensor([0.0, -0.0, largest, -largest, float("inf"), -float("inf")], device=DEVICE, dtype=given)
    x[17, :6] = extremes
    x[-1, -6:] = extremes
    q, qt, _ = cast_transpose(x, slot_of(dtype, scale))
    assert torch.equal(bits(q), bits(to_fp8(x.double(), scale, dtype)))
    assert torch.all(q[17, 4:6].float().abs() == LARGEST[dtype])
    assert_transposed(q, qt)


@pytest.mark.parametrize("dtype", FORMATS)
def test_nan_stays_nan_alone(dtype):
    from gpt2_fp8.kernels.cast import cast_transpose

    x = normal(80, 144)
    x[79, 143] = x[3, 5] = float("nan")
    q, qt, _ = cast_transpose(x, slot_of(dtype))
    assert torch.equal(q.float().isnan(), x.isnan())
    assert torch.equal(qt.float().isnan(), x.isnan().t())


def test_rounds_half_to_even():
    from gpt2_fp8.kernels.cast import cast_transpose

    x = torch.zeros(16, 16, device=DEVICE)
    x[0, :4] = torch.tensor([17.0, 19.0, -17.0, 2.0**-10])  # E4M3: between 16 and 18, 18 and 20, 0 and 2^-9
    q, _, _ = cast_transpose(x, slot_of(torch.float8_e4m3fn))
    assert q[0, :4].tolist() == [16.0, 20.0, -16.0, 0.0]


@pytest.mark.parametrize("place", [(0, 0), (271, 0), (0, 767), (271, 767), (128, 127)])
def test_amax_is_found_anywhere(place):
    from gpt2_fp8.kernels.cast import cast_transpose

    x = normal(272, 768)
    x[place] = -100.0
    slot = slot_of(torch.float8_e4m3fn, 2.0**10)
    cast_transpose(x, slot)
    assert slot.amax.item() == 100.0


def test_amax_is_raised_and_not_replaced():
    from gpt2_fp8.kernels.cast import cast_transpose

    x = normal(80, 144)
    slot = slot_of(torch.float8_e4m3fn, amax=1000.0)
    cast_transpose(x, slot)
    assert slot.amax.item() == 1000.0
    cast_transpose(x * 2**12, slot)
    assert slot.amax.item() == (x * 2**12).abs().max().item()


def test_zeros_record_nothing():
    from gpt2_fp8.kernels.cast import cast_transpose

    slot = slot_of(torch.float8_e5m2)
    q, qt, _ = cast_transpose(torch.zeros(48, 48, device=DEVICE, dtype=torch.bfloat16), slot)
    assert slot.amax.item() == 0.0
    assert torch.count_nonzero(q.float()) == torch.count_nonzero(qt.float()) == 0


@pytest.mark.parametrize("shape", SHAPES)
def test_column_sums_are_those_before_the_cast(shape):
    from gpt2_fp8.kernels.cast import cast_transpose

    x = normal(*shape)
    _, _, partial = cast_transpose(x, slot_of(torch.float8_e4m3fn, 2.0**16), sums=True)
    torch.testing.assert_close(column_sums(partial), x.double().sum(0), rtol=1e-6, atol=1e-5)


def test_writes_into_what_it_is_given():
    from gpt2_fp8.kernels.cast import cast_transpose, empty_pair

    x = normal(80, 144)
    fresh = cast_transpose(x, slot_of(torch.float8_e5m2))
    pair = empty_pair(80, 144, torch.float8_e5m2, x.device)
    q, qt, _ = cast_transpose(x, slot_of(torch.float8_e5m2), out=pair)
    assert q is pair[0]
    assert qt is pair[1]
    assert torch.equal(bits(q), bits(fresh[0]))
    assert torch.equal(bits(qt), bits(fresh[1]))


@pytest.mark.parametrize("dtype", FORMATS)
def test_repeats(dtype):
    from gpt2_fp8.kernels.cast import cast_transpose

    x = normal(272, 768)
    assert_repeats(lambda slot: cast_transpose(x, slot, sums=True), dtype)


@pytest.mark.parametrize("add", [False, True])
@pytest.mark.parametrize(("parts", "n"), [(1, 16), (5, 48), (128, 768), (300, 1600), (257, 2064)])
def test_reduce_columns(parts, n, add):
    from gpt2_fp8.kernels.cast import reduce_columns

    partial = normal(parts, n, dtype=torch.float32)
    out = normal(n, seed=1, dtype=torch.float32)
    want = partial.double().sum(0) + (out.double() if add else 0)
    reduce_columns(partial, out, add)
    torch.testing.assert_close(out.double(), want, rtol=1e-6, atol=3e-5)


@pytest.mark.parametrize("which", [0, 1, 2])
def test_reduce_columns_whose_rows_lie_apart(which):
    from gpt2_fp8.kernels.cast import reduce_columns

    partial = normal(131, 3, 144, dtype=torch.float32)
    out = torch.full((144,), float("nan"), device=DEVICE)
    reduce_columns(partial[:, which], out, add=False)
    torch.testing.assert_close(out.double(), partial[:, which].double().sum(0), rtol=1e-6, atol=3e-5)
    again = torch.empty_like(out)
    reduce_columns(partial[:, which], again, add=False)
    assert torch.equal(out, again)


def test_more_elements_than_int32_counts():
    from gpt2_fp8.kernels.cast import cast_transpose

    if torch.cuda.mem_get_info()[0] < 16 * 2**30:
        pytest.skip("needs 16 GiB of free GPU memory")
    m, n = 65552, 32784
    assert m * n > 2**31
    x = torch.zeros(m, n, device=DEVICE, dtype=torch.bfloat16)
    x[-16:] = 2.0
    x[:, -16:] = 4.0
    q, qt, _ = cast_transpose(x, slot_of(torch.float8_e4m3fn))
    assert torch.all(q[-16:].float() == x[-16:])
    assert torch.all(q[:, -16:].float() == 4.0)
    assert torch.all(qt[-16:].float() == 4.0)
    assert torch.all(qt[:, -16:].float() == x[-16:].t())
    assert torch.all(q[:16, :-16].float() == 0)


def test_a_launch_for_another_gpu_is_an_error_and_leaves_the_current_one():
    from gpt2_fp8.kernels.cast import cast_transpose
    from gpt2_fp8.kernels.slot import Slot

    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    x = torch.ones(128, 128, dtype=torch.bfloat16, device="cuda:1")
    slot = Slot(*(torch.ones(1, device="cuda:1") for _ in range(3)), torch.float8_e4m3fn)
    with torch.cuda.device(1):
        cast_transpose(x, slot)  # it is compiled now
    with pytest.raises((RuntimeError, ValueError)):
        cast_transpose(x, slot)
    assert torch.cuda.current_device() == 0
