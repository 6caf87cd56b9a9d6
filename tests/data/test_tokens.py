"""Folders of text: what each client gets, and what is refused."""

from __future__ import annotations

import numpy as np
import pytest

from fedbilevel.data.tokens import cut, read_texts
from fedbilevel.errors import DataError


def written(folder, **texts):
    for name, text in texts.items():
        place = folder / name.replace("__", "/").replace("_u16", ".u16")
        place = place if place.suffix else place.with_suffix(".txt")
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_bytes(text if isinstance(text, bytes) else text.encode())
    return folder


def joined(tokens):
    return b"|".join(one.tobytes() for one in tokens)


def test_files_and_folders_are_sources_and_are_divided_among_clients(tmp_path):
    folder = written(tmp_path, news="abcdef", forum__b="ijkl", forum__a="gh", target="mnop", test="qr", empty="")
    texts = read_texts(folder, num_clients=2)
    assert texts.names == ["empty", "forum", "news"]
    assert [{name: joined(own) for name, own in held.items()} for held in texts.sources] == [
        {"empty": b"", "forum": b"g|ij", "news": b"abc"},
        {"empty": b"", "forum": b"h|kl", "news": b"def"},
    ]
    assert [joined(own) for own in texts.target] == [b"mn", b"op"]
    assert [joined(own) for own in texts.test] == [b"q", b"r"]
    assert texts.sizes() == {"empty": 0, "forum": 6, "news": 6}
    assert texts.num_tokens == 256


def test_clients_may_have_folders_of_their_own_and_lack_a_source(tmp_path):
    folder = written(tmp_path, ann__news="abc", ann__target="d", ben__news="ef", ben__forum="g", ben__target="h")
    texts = read_texts(folder)
    assert [sorted(held) for held in texts.sources] == [["news"], ["forum", "news"]]
    assert joined(texts.target[1]) == b"h"


def test_wide_tokens_are_read_as_numbers(tmp_path):
    wide = np.array([1, 999, 3], dtype="<u2").tobytes()
    texts = read_texts(written(tmp_path, a_u16=wide, b="xy", target="z"), num_clients=1)
    assert texts.sources[0]["a"][0].tolist() == [1, 999, 3]
    assert texts.num_tokens == 1000


def test_a_text_is_cut_by_its_share():
    first, second = cut([np.arange(8), np.arange(3)], 0.25)
    assert ([len(one) for one in first], [len(one) for one in second]) == ([6, 2], [2, 1])


@pytest.mark.parametrize(
    ("texts", "match"),
    [
        ({"a": "x", "b": "y"}, "holds no target.txt"),
        ({"ann__a": "x", "ann__target": "y", "ben__a": "z"}, "ben holds no target.txt"),
        ({"a": "x", "target": "y"}, "holds 1 sources, expected at least two"),
        ({"a_u16": b"xyz", "b": "x", "target": "y"}, "a.u16 has 3 bytes, expected two for every token"),
        ({"a": "x", "a_u16": b"xy", "target": "y"}, "rename one of these sources"),
    ],
)
def test_folders_that_are_not_texts_are_refused(tmp_path, texts, match):
    with pytest.raises(DataError, match=match):
        read_texts(written(tmp_path, **texts))


def test_a_missing_folder_and_a_wrong_number_are_refused(tmp_path):
    with pytest.raises(DataError, match="is no folder"):
        read_texts(tmp_path / "none")
    with pytest.raises(DataError, match="num_clients is 0"):
        read_texts(tmp_path, num_clients=0)
