"""Whatever goes in comes out, of the same type and to the bit; whatever cannot is refused by name."""

import json
import math
import random
from collections import Counter, OrderedDict

import numpy
import pytest
import torch

from gpt2_fp8.checkpoint.tree import DTYPES, flatten, unflatten


def round_trip(value):
    skeleton, tensors = flatten(value)
    return unflatten(json.loads(json.dumps(skeleton, allow_nan=False)), tensors.__getitem__)


def assert_same(a, b, path="value"):
    assert type(a) is type(b), path
    if isinstance(a, dict):
        assert list(a) == list(b), path
        assert [type(key) for key in a] == [type(key) for key in b], path
        for key in a:
            assert_same(a[key], b[key], f"{path}.{key}")
    elif isinstance(a, (list, tuple)):
        assert len(a) == len(b), path
        for index, (x, y) in enumerate(zip(a, b, strict=True)):
            assert_same(x, y, f"{path}.{index}")
    elif isinstance(a, torch.Tensor):
        assert (a.dtype, a.shape) == (b.dtype, b.shape), path
        assert torch.equal(a.contiguous().view(-1).view(torch.uint8), b.contiguous().view(-1).view(torch.uint8)), path
    elif isinstance(a, float):
        assert math.isnan(a) and math.isnan(b) if math.isnan(a) else a.hex() == b.hex(), path
    else:
        assert a == b, path


SCALARS = [None, True, False, 0, 1, -1, 2**31, -(2**63), 2**63, 10**5000, -(3**999), 0.0, -0.0, 0.1, 5e-324, 1.7e308]
SCALARS += [math.nan, math.inf, -math.inf, "", "é\n\x00\ud800", "$tensor", "nan"]


@pytest.mark.parametrize("dtype", sorted(DTYPES, key=str), ids=str)
def test_tensors(dtype):
    for shape in [(), (0,), (3, 0, 2), (5, 7)]:
        raw = torch.randint(0, 2 if dtype == torch.bool else 256, (*shape, dtype.itemsize), dtype=torch.uint8)
        tensor = raw.view(dtype).reshape(shape)
        assert_same(round_trip({"t": tensor, "again": [tensor]}), {"t": tensor, "again": [tensor]})


def random_value(source, depth):
    if depth == 0 or source.random() < 0.3:
        tensor = torch.randn(source.randrange(3), source.randrange(4))
        return source.choice([*SCALARS, source.getrandbits(200), source.gauss(0, 1e6), tensor])
    size = source.randrange(4)
    children = [random_value(source, depth - 1) for _ in range(size)]
    keys = [
        source.choice([source.randrange(-5, 5), str(source.randrange(5)), "$tuple", "$", "a", "a.b"])
        for _ in range(size)
    ]
    pairs = list(zip(keys, children, strict=True))
    return source.choice([children, tuple(children), dict(pairs), OrderedDict(pairs)])


def test_random_trees():
    for seed in range(400):
        value = random_value(random.Random(seed), 5)
        assert_same(round_trip(value), value, f"seed {seed}")


def test_a_tensor_met_twice_is_kept_once_and_comes_back_as_one():
    weight = torch.nn.Parameter(torch.randn(4, 3))
    skeleton, tensors = flatten({"wte": weight, "head": weight.data, "other": torch.randn(4, 3)})
    assert sorted(tensors) == ["other", "wte"]
    value = unflatten(skeleton, tensors.__getitem__)
    assert value["wte"] is value["head"]
    assert type(value["wte"]) is torch.Tensor


def test_views_are_kept_apart_and_dense():
    base = torch.arange(24.0).reshape(4, 6)
    value = {"rows": base[1:3], "columns": base[:, ::2], "turned": base.t(), "all": base, "flat": base.view(-1)}
    _, tensors = flatten(value)
    assert len({tensor.untyped_storage().data_ptr() for tensor in tensors.values()}) == 5
    assert all(tensor.is_contiguous() for tensor in tensors.values())
    assert_same(round_trip(value), value)


def test_conjugates_are_resolved():
    value = torch.randn(3, dtype=torch.complex64)
    assert_same(round_trip([value, value.conj()]), [value, value.conj().resolve_conj()])


REFUSED = [
    ({"a": {"b": [0, {1, 2}]}}, r"a\.b\.1 is a builtins\.set"),
    ({"a": numpy.float32(1)}, r"a is a numpy\.float32"),
    ({"a": torch.Size([1])}, r"a is a torch\.Size"),
    ({"a": Counter()}, r"a is a collections\.Counter"),
    ({"a": {(1, 2): 3}}, r"a has a key of type tuple"),
    ({"a": {True: 3}}, r"a has a key of type bool"),
    ({"a": torch.zeros(1, dtype=torch.complex128)}, r"a is a tensor of torch\.complex128"),
    ({"a": torch.zeros(1, device="meta")}, r"a is a tensor of .* on meta"),
    ({"a": torch.zeros(2).to_sparse()}, r"a is a tensor of .*sparse"),
    (lambda: 0, r"the value is a builtins\.function"),
]


@pytest.mark.parametrize(("value", "message"), REFUSED, ids=[message for _, message in REFUSED])
def test_what_cannot_be_kept_is_refused_with_its_path(value, message):
    with pytest.raises(TypeError, match=message):
        flatten(value)


def test_a_tag_of_another_version_is_an_error():
    with pytest.raises(ValueError, match="exec"):
        unflatten({"a": [{"$exec": 1}]}, dict)
