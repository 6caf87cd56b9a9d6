"""Messages: what was packed comes out again, and nothing else is accepted."""

import json

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fedbilevel.errors import WireError
from fedbilevel.sites import wire

DTYPES = [torch.float32, torch.float64, torch.int32, torch.int64]


@given(
    st.lists(st.tuples(st.sampled_from(DTYPES), st.lists(st.integers(0, 4), max_size=2)), max_size=4),
    st.dictionaries(
        st.text(max_size=5),
        st.one_of(st.none(), st.integers(-(2**60), 2**60), st.floats(allow_nan=False, allow_infinity=False), st.text()),
    ),
)
def test_a_packed_message_is_unpacked_unchanged(shapes, header):
    header.pop("arrays", None)
    arrays = [(torch.randn(shape, dtype=torch.float64) * 100).to(dtype) for dtype, shape in shapes]
    back, again = wire.unpack(wire.pack(header, arrays))
    assert back == header
    assert [array.dtype for array in again] == [array.dtype for array in arrays]
    assert all(one.shape == other.shape and torch.equal(one, other) for one, other in zip(again, arrays, strict=True))


def test_bytes_are_those_of_the_numbers_and_a_short_header():
    message = wire.pack({"kind": "phase"}, [torch.ones(160_000)])
    assert 640_000 < len(message) < 640_100
    assert message.endswith(torch.ones(160_000).numpy().astype("<f4").tobytes())


def test_an_unpacked_array_may_be_changed():
    _, [array] = wire.unpack(wire.pack({}, [torch.arange(3.0)]))
    array += 1
    assert array.tolist() == [1, 2, 3]


@given(st.binary(max_size=200))
def test_noise_is_refused(noise):
    for message in (noise, wire.MAGIC + noise, wire.MAGIC + (5).to_bytes(4, "little") + noise):
        try:
            header, arrays = wire.unpack(message)
        except WireError:
            continue
        assert wire.unpack(wire.pack(header, arrays))[0] == header  # it happened to be a message


@given(st.data())
def test_a_message_that_was_cut_or_changed_is_refused_or_still_a_message(data):
    message = wire.pack({"kind": "phase", "turn": [0, 0, 1]}, [torch.arange(5.0), torch.arange(4).view(2, 2)])
    place = data.draw(st.integers(0, len(message) - 1))
    changed = bytearray(message)
    changed[place] ^= data.draw(st.integers(1, 255))
    for broken in (message[:place], message + b"x", bytes(changed)):
        try:
            _, arrays = wire.unpack(broken)
        except WireError:
            continue
        assert broken == bytes(changed)
        assert sum(array.numel() * array.element_size() for array in arrays) == 20 + 32


def raw(header, content=b""):
    text = json.dumps(header).encode()
    return wire.MAGIC + len(text).to_bytes(4, "little") + text + content


@pytest.mark.parametrize(
    "message",
    [
        raw([]),
        raw({}),
        raw({"arrays": 3}),
        raw({"arrays": [["float32"]]}),
        raw({"arrays": [["object", [1]]]}, b"12345678"),
        raw({"arrays": [["float32", [-1]]]}),
        raw({"arrays": [["float32", [True]]]}, b"1234"),
        raw({"arrays": [["float32", [1.5]]]}, b"1234"),
        raw({"arrays": [["float32", [2**50]]]}, b"1234"),
        raw({"arrays": [["float32", [1, 1, 1]]]}, b"1234"),
        raw({"arrays": [["float32", [1]]]}, b"12345"),
        raw({"arrays": [["float32", [2**20, 2**20]]]}, b"1234"),
        wire.MAGIC + (2**32 - 1).to_bytes(4, "little") + b"{}",
        b"fedbilevel-0\n" + raw({"arrays": []})[len(wire.MAGIC) :],
        wire.MAGIC + b"\x02\x00\x00\x00{]",
    ],
)
def test_an_invalid_message_is_refused_in_one_sentence(message):
    with pytest.raises(WireError) as caught:
        wire.unpack(message)
    assert str(caught.value).endswith(".")
    assert "\n" not in str(caught.value)


def test_an_array_of_an_unknown_type_cannot_be_packed():
    with pytest.raises(WireError, match="bool"):
        wire.pack({}, [torch.ones(2, dtype=torch.bool)])
    with pytest.raises(ValueError, match="JSON"):
        wire.pack({"value": float("nan")})
