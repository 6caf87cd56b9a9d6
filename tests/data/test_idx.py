"""Files are written by hand here, byte by byte, and must come back as they were."""

from __future__ import annotations

import gzip
import struct

import numpy as np
import pytest

from fedbilevel.data import catalogue, locations
from fedbilevel.data.sets import idx
from fedbilevel.errors import DataError

CODES = {"u1": 8, "i1": 9, "i2": 11, "i4": 12, "f4": 13, "f8": 14}


def content(array: np.ndarray) -> bytes:
    header = struct.pack(f">BBBB{array.ndim}I", 0, 0, CODES[array.dtype.str[1:]], array.ndim, *array.shape)
    return header + array.astype(array.dtype.newbyteorder(">")).tobytes()


def write(folder, stem, pixels, labels, *, packed=False):
    for name, array in ((f"{stem}-images-idx3-ubyte", pixels), (f"{stem}-labels-idx1-ubyte", labels)):
        path, data = folder / f"{name}{'.gz' if packed else ''}", content(np.asarray(array, dtype=np.uint8))
        path.write_bytes(gzip.compress(data, mtime=0) if packed else data)


@pytest.mark.parametrize("kind", CODES)
@pytest.mark.parametrize("packed", [False, True])
def test_every_type_comes_back_as_it_was_written(tmp_path, kind, packed):
    array = (np.arange(-12, 12).reshape(2, 3, 4) * 5).astype(kind)
    path = tmp_path / "some-file"
    path.write_bytes(gzip.compress(content(array), mtime=0) if packed else content(array))
    found = idx.read(path)
    assert found.dtype == np.dtype(kind)
    np.testing.assert_array_equal(found, array)
    found[0] = 0  # the caller may write


GOOD = content(np.arange(6, dtype=np.uint8).reshape(2, 3))


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (b"", "starts with the bytes of an empty file"),
        (b"\x00\x00\x08", "starts with the bytes 00 00 08, expected 00 00"),
        (b"\x00\x01" + GOOD[2:], "starts with the bytes 00 01 08 02"),
        (b"\x00\x00\x0a" + GOOD[3:], "starts with the bytes 00 00 0a 02"),
        (b"\x00\x00\x08\x00" + GOOD[4:], "starts with the bytes 00 00 08 00"),
        (b"\x89PNG and more", "this is not an idx file"),
        (GOOD[:10], "ends within its header, after 10 of 12 bytes"),
        (GOOD[:-1], "has 5 bytes of values, expected 6 for the shape (2, 3)"),
        (GOOD + b"\x00", "has 7 bytes of values, expected 6 for the shape (2, 3)"),
        (gzip.compress(GOOD, mtime=0)[:-5], "is a damaged gzip file"),
        (gzip.compress(GOOD, mtime=0)[:12] + b"\xff" * 20, "is a damaged gzip file"),
    ],
)
def test_what_is_no_idx_file_is_refused_by_name(tmp_path, data, says):
    path = tmp_path / "broken-ubyte"
    path.write_bytes(data)
    with pytest.raises(DataError) as error:
        idx.read(path)
    assert says in str(error.value)
    assert "broken-ubyte" in str(error.value)


def test_a_missing_file_is_a_clear_error(tmp_path):
    with pytest.raises(DataError, match=r"nothing-here cannot be read \(No such file or directory\)"):
        idx.read(tmp_path / "nothing-here")


PIXELS = np.arange(4 * 2 * 3).reshape(4, 2, 3)


@pytest.mark.parametrize("packed", [False, True])
def test_mnist_names_are_found_and_images_stay_as_they_are(tmp_path, packed):
    write(tmp_path, "train", PIXELS, [3, 1, 4, 1], packed=packed)
    write(tmp_path, "t10k", PIXELS[:2] + 100, [5, 9], packed=packed)
    for kind, pixels, labels in (("train", PIXELS, [3, 1, 4, 1]), ("test", PIXELS[:2] + 100, [5, 9])):
        found, named = idx.images(tmp_path, kind)
        np.testing.assert_array_equal(found, pixels)
        assert named.tolist() == labels
        assert (found.dtype, named.dtype) == (np.uint8, np.int64)


@pytest.mark.parametrize("packed", [False, True])
def test_emnist_names_are_found_by_split_and_images_are_turned_upright(tmp_path, packed):
    for offset, split in ((0, "byclass"), (50, "letters")):
        write(tmp_path, f"emnist-{split}-train", PIXELS + offset, [3, 1, 4, 1], packed=packed)
        write(tmp_path, f"emnist-{split}-test", PIXELS[:1] + offset + 9, [2], packed=packed)
        train, test = (idx.images(tmp_path, kind, split)[0] for kind in ("train", "test"))
        assert train.shape == (4, 3, 2)
        for i, image in enumerate(train):
            np.testing.assert_array_equal(image, PIXELS[i].T + offset)
        np.testing.assert_array_equal(test[0], PIXELS[0].T + offset + 9)
    with pytest.raises(
        DataError, match="does not hold emnist-balanced-train-images-idx3-ubyte or train-images-idx3-ubyte"
    ):
        idx.images(tmp_path, "train", "balanced")


def test_files_that_do_not_belong_together_are_refused(tmp_path):
    write(tmp_path, "train", PIXELS, [3, 1, 4])
    with pytest.raises(DataError, match=r"has 4 images, but .*train-labels-idx1-ubyte has 3 labels"):
        idx.images(tmp_path, "train")
    write(tmp_path, "t10k", [1, 2], [3, 1])
    with pytest.raises(DataError, match=r"t10k-images-idx3-ubyte has 1 dimensions, expected 3"):
        idx.images(tmp_path, "test")
    (tmp_path / "train-labels-idx1-ubyte").unlink()
    with pytest.raises(DataError, match="holds only one of train-images-idx3-ubyte and train-labels-idx1-ubyte"):
        idx.images(tmp_path, "train")


def test_a_set_is_searched_in_the_given_folder_and_otherwise_in_that_of_the_environment(tmp_path, monkeypatch):
    named, around = tmp_path / "named", tmp_path / "around"
    for folder, stem in (
        (named / "MNIST/raw", "train"),
        (around / "mnist", "train"),
        (around / "fashion", "train"),
        (around / "emnist", "emnist-letters-train"),
    ):
        folder.mkdir(parents=True)
        write(folder, stem, PIXELS, [1, 2, 3, 4])
    monkeypatch.setenv("FEDBILEVEL_DATA", str(around))
    assert [idx.folder_of(name) for name in ("mnist", "fashion", "emnist")] == [
        around / "mnist",
        around / "fashion",
        around / "emnist",
    ]
    assert idx.folder_of("mnist", named) == named / "MNIST/raw"
    assert idx.folder_of("fashion", around / "fashion") == around / "fashion"
    for name, place in (("emnist", named), ("emnist", around / "mnist"), ("mnist", around / "emnist")):
        with pytest.raises(
            DataError,
            match=f"no files of {name} were found under {place}: put its idx files into a folder named {name} there",
        ):
            idx.folder_of(name, place)


def test_fashion_is_found_in_the_folder_of_the_debian_package_which_the_error_names(alone, monkeypatch):
    with pytest.raises(DataError, match="install Debian's package dataset-fashion-mnist, or name the folder"):
        catalogue.where("fashion")
    with pytest.raises(DataError) as error:
        catalogue.where("mnist")
    assert "Debian" not in str(error.value)
    packages = alone / "datasets"
    place = packages / "fashion-mnist"
    place.mkdir(parents=True)
    write(place, "train", PIXELS, [1, 2, 3, 4])
    monkeypatch.setattr(locations, "SYSTEM", packages)
    assert catalogue.where("fashion") == [place]
    with pytest.raises(DataError, match=f"under {alone / 'other'}: "):  # a folder that was named is the only one
        catalogue.where("fashion", alone / "other")


def test_a_folder_with_both_sets_gives_the_requested_one(tmp_path):
    write(tmp_path, "train", PIXELS, [0, 1, 2, 3])
    write(tmp_path, "emnist-byclass-train", PIXELS, [61, 60, 59, 58])
    assert idx.images(tmp_path, "train", emnist=False)[1].tolist() == [0, 1, 2, 3]
    assert idx.images(tmp_path, "train", emnist=True)[1].tolist() == [61, 60, 59, 58]
    with pytest.raises(DataError, match=r"does not hold emnist-letters-train-images-idx3-ubyte, .* another split"):
        idx.images(tmp_path, "train", "letters", emnist=True)
