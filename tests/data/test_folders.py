"""One client's folder: every format reads the values that were written.

Every fault gives one sentence that names the file.
"""

from __future__ import annotations

import pickle
import re
import zipfile

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from fedbilevel.data.folders import read_folder, write_folder
from fedbilevel.errors import DataError

RNG = np.random.default_rng(0)
FIELDS = {
    "image": RNG.standard_normal((5, 3)).astype(np.float32),
    "label": np.array([0, 2, 1, 2, 0]),
    "wrong": np.array([True, False, False, True, False]),
    "age": np.array([1.5, 0.1, 1e-3, -2.0, 7.25]),
}
HOLDINGS = {
    "train": FIELDS,
    "val": {"image": RNG.standard_normal((2, 3)).astype(np.float32), "label": np.array([1, 1])},
}


def same(one, other) -> None:
    assert {role: list(fields) for role, fields in one.items()} == {
        role: list(fields) for role, fields in other.items()
    }
    for role, fields in other.items():
        for name, value in fields.items():
            assert one[role][name].dtype == np.asarray(value).dtype
            assert np.array_equal(one[role][name], value)


def as_csv(fields) -> str:
    """Wide fields as numbered columns, in an order that is not theirs."""
    wide = {
        f"{name}.{k}": value[:, k]
        for name, value in fields.items()
        if value.ndim == 2
        for k in reversed(range(value.shape[1]))
    }
    columns = {**{name: value for name, value in fields.items() if value.ndim == 1}, **wide}
    return (
        "\n".join(
            [
                ",".join(columns),
                *(
                    ",".join(map(str, row))
                    for row in zip(*(column.tolist() for column in columns.values()), strict=True)
                ),
            ]
        )
        + "\n"
    )


def refused(folder, *words, **options) -> None:
    with pytest.raises(DataError) as caught:
        read_folder(folder, **options)
    text = str(caught.value)
    assert "\n" not in text
    assert str(folder) in text
    for word in words:
        assert re.search(word, text), (word, text)


@pytest.fixture
def site(tmp_path):
    write_folder(tmp_path / "site", HOLDINGS)
    return tmp_path / "site"


# ---- what is written is read ---------------------------------------------------------------------------------------


def test_a_folder_is_read_as_it_was_written(site):
    same(read_folder(site), HOLDINGS)
    same(read_folder(str(site), num_classes=3), HOLDINGS)


def test_tensors_and_fields_of_any_name_are_written(tmp_path):
    odd = {"file": torch.arange(4), "args": np.zeros((4, 2, 3)), "a.b": np.arange(4.0)}
    write_folder(tmp_path, {"train": odd, "val": odd})
    same(
        read_folder(tmp_path),
        {role: {name: np.asarray(value) for name, value in odd.items()} for role in ("train", "val")},
    )


def test_a_folder_written_twice_has_the_same_bytes(tmp_path):
    for name in "ab":
        write_folder(tmp_path / name, HOLDINGS)
    assert (tmp_path / "a/train.npz").read_bytes() == (tmp_path / "b/train.npz").read_bytes()


def test_data_that_are_there_are_never_overwritten(site, tmp_path):
    before = (site / "train.npz").read_bytes()
    with pytest.raises(DataError, match=r"holds train\.npz, val\.npz already"):
        write_folder(site, HOLDINGS)
    assert (site / "train.npz").read_bytes() == before
    (tmp_path / "taken").write_text("")
    with pytest.raises(DataError, match="taken cannot be made"):
        write_folder(tmp_path / "taken", HOLDINGS)


def test_what_could_not_be_read_again_is_not_written(tmp_path):
    with pytest.raises(DataError, match=r"val\.npz has Python objects in the field 'x'"):
        write_folder(tmp_path, {"train": FIELDS, "val": {"x": np.array([{}, {}])}})
    assert list(tmp_path.iterdir()) == []


def test_the_three_formats_say_the_same(site, tmp_path):
    plain = tmp_path / "plain"
    plain.mkdir()
    (plain / "train.csv").write_text(as_csv(FIELDS))
    save_file({name: torch.from_numpy(value) for name, value in HOLDINGS["val"].items()}, plain / "val.safetensors")
    found, expected = read_folder(plain, num_classes=3), read_folder(site, num_classes=3)
    assert {role: set(fields) for role, fields in found.items()} == {
        role: set(fields) for role, fields in expected.items()
    }
    for role, fields in expected.items():
        for name, value in fields.items():
            assert np.array_equal(found[role][name], value)
    assert {name: value.dtype.name for name, value in found["train"].items()} == {
        "image": "float64",
        "label": "int64",
        "wrong": "bool",
        "age": "float64",
    }
    assert {name: value.dtype.name for name, value in found["val"].items()} == {"image": "float32", "label": "int64"}


def test_numbered_columns_are_floating_point_even_where_they_are_whole(site):
    (site / "test.csv").write_text(
        "\ufefflabel, x.1 ,x.0,flag,big\n1,2,3,TRUE,12345678901234567890\n\n0,-5,6,false,1\n", encoding="utf-8"
    )
    found = read_folder(site)["test"]
    assert found["x"].tolist() == [[3.0, 2.0], [6.0, -5.0]]
    assert (found["x"].dtype, found["label"].dtype, found["flag"].dtype, found["big"].dtype) == (
        np.float64,
        np.int64,
        np.bool_,
        np.float64,
    )
    assert found["flag"].tolist() == [True, False]
    assert found["label"].tolist() == [1, 0]


def test_more_than_ten_columns_are_in_the_order_of_their_numbers(site):
    (site / "test.csv").write_text(",".join(f"x.{k}" for k in range(12)) + "\n" + ",".join(map(str, range(12))) + "\n")
    assert read_folder(site)["test"]["x"].tolist() == [list(map(float, range(12)))]


def test_labels_become_whole_numbers_where_they_are_classes(site):
    for name, label in {
        "a": np.array([1.0, 2.0]),
        "b": np.array([1, 2], np.uint8),
        "c": np.array([True, False]),
        "d": np.array([1, 2], ">i4"),
    }.items():
        np.savez(site / f"{name}.npz", label=label)
    found = read_folder(site, num_classes=3)
    assert all(found[name]["label"].dtype == np.int64 for name in "abcd")
    assert [found[name]["label"].tolist() for name in "abcd"] == [[1, 2], [1, 2], [1, 0], [1, 2]]
    assert read_folder(site)["a"]["label"].dtype == np.float64


def test_narrow_and_wide_and_foreign_numbers_are_made_usable(site):
    save_file({"x": torch.tensor([1.5, 2.0], dtype=torch.bfloat16)}, site / "a.safetensors")
    np.savez(site / "b.npz", x=np.array([1.5, 2.0], ">f4"), y=np.array([1.5, 2.0], np.longdouble))
    found = read_folder(site)
    assert (found["a"]["x"].dtype, found["b"]["x"].dtype, found["b"]["y"].dtype) == (np.float32, np.float32, np.float64)
    assert found["b"]["x"].dtype.isnative
    assert all(found[role][name].tolist() == [1.5, 2.0] for role, name in (("a", "x"), ("b", "x"), ("b", "y")))


def test_other_files_and_an_empty_role_that_only_measures_do_no_harm(site):
    (site / "README.md").write_text("ours")
    (site / ".hidden.csv").write_text("x\n1\n")
    (site / "old.npz").mkdir()
    np.savez(site / "test.npz", image=np.zeros((0, 3)), label=np.zeros(0))
    assert list(read_folder(site, num_classes=2 + 1)) == ["test", "train", "val"]


# ---- faults --------------------------------------------------------------------------------------------------------


def test_a_folder_that_is_not_there_or_lacks_a_role(tmp_path, site):
    refused(tmp_path / "none", "is no folder: name the folder that holds this client's train.npz")
    (site / "train.npz").rename(site / "training.npz")
    refused(
        site,
        r"holds training\.npz, val\.npz, but nothing for the role 'train': add train\.npz, \.csv, "
        r"\.parquet or \.safetensors",
    )
    empty = tmp_path / "empty"
    empty.mkdir()
    refused(empty, "holds no file of data, but nothing for the role 'train'")
    (empty / "train" / "cat").mkdir(parents=True)
    (empty / "train" / "cat" / "1.png").touch()
    refused(empty, r"holds images such as train/cat/1\.png, expected files of arrays.*fedbilevel clean .*empty")


def test_two_files_for_one_role(site):
    (site / "train.csv").write_text("x\n1\n")
    refused(site, r"holds train\.csv and train\.npz, both for the role 'train': keep one")


@pytest.mark.parametrize(
    ("arrays", "words"),
    [
        ({"x": np.array([{}, 1], object)}, r"train\.npz has the field 'x' as Python objects, which are never loaded"),
        ({"x": np.array(["a", "b"])}, r"train\.npz has text in the field 'x', expected numbers"),
        ({"x": np.array([1j, 2])}, r"train\.npz has the type complex128 in the field 'x'"),
        ({"x": np.array([1, 2], "datetime64[s]")}, r"the type datetime64\[s\] in the field 'x'"),
        ({"x": np.zeros((2, 3)), "label": np.zeros(3)}, r"fields of different lengths \({'x': 2, 'label': 3}\)"),
        ({"x": np.array(3.0)}, "a single number as the field 'x'"),
        ({"weight": np.zeros(3)}, "a field named 'weight', which the library fills in itself: rename it"),
        ({"x": np.zeros((0, 3))}, r"train\.npz holds no sample"),
        ({}, r"train\.npz holds no field"),
        (
            {"x": np.array([[0, 1], [np.nan, np.inf], [0, -np.inf]])},
            "NaN or infinity in the field 'x' of 2 samples, of which the first is number 1 from 0",
        ),
    ],
    ids=["objects", "text", "complex", "dates", "lengths", "scalar", "reserved", "empty", "nothing", "nan"],
)
def test_arrays_that_are_no_samples(site, arrays, words):
    np.savez(site / "train.npz", **arrays)
    refused(site, words)


@pytest.mark.parametrize("label", [[0, 3], [0, -1], [0, 1.5]])
def test_labels_that_are_no_classes(site, label):
    np.savez(site / "val.npz", image=np.zeros((2, 3)), label=np.array(label))
    refused(
        site, rf"val\.npz has the label {label[1]}, expected whole numbers from 0 to 2 for 3 classes", num_classes=3
    )
    read_folder(site)  # without classes a label may be any number


def test_files_with_invalid_content_are_refused(site):
    for content in (b"", b"hello", pickle.dumps({"x": 1}), (site / "train.npz").read_bytes()[:-40]):
        (site / "train.npz").write_bytes(content)
        refused(site, r"train\.npz cannot be read as arrays of numpy \(.+\): write it anew")
    with (site / "train.npz").open("wb") as file:
        np.save(file, np.zeros(3))
    refused(site, r"train\.npz holds a single array without a name")
    with zipfile.ZipFile(site / "train.npz", "w") as archive:
        archive.writestr("note.txt", "hello")
    refused(site, r"train\.npz has 'note\.txt' in it, which is no array")
    (site / "train.npz").unlink()
    (site / "train.safetensors").write_bytes(b"hello")
    refused(site, r"train\.safetensors cannot be read as safetensors \(.+\): write it anew")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("x,y\n1,2\n3,old\n", r"train\.csv has 'old' in line 3 of the column 'y', expected a number"),
        ("x,y\n1,2\n3,\n", "has '' in line 3 of the column 'y'"),
        ("x\n1_0\n2.5\n", "has '1_0' in line 2 of the column 'x'"),
        ("a.1,a.0\n1,2\n\n3,no\n", r"has 'no' in line 4 of the column 'a\.0'"),
        ("x;y\n1;2\n", "has '1;2' in line 2 of the column 'x;y'"),
        ("x,y\n1,2\n3\n", "has 1 values in line 3, expected 2 as in the header: separate them by commas"),
        ("x,x\n1,2\n", "two columns named 'x' in its header"),
        ("a.0,a.0\n1,2\n", r"two columns named 'a\.0' in its header"),
        ("x,\n1,2\n", "a column without a name in its header"),
        ("a.0,a.2\n1,2\n", r"the columns a\.0, a\.2, expected a\.0, a\.1 and so on without a gap"),
        ("a.0,a\n1,2\n", r"the columns a\.0 and a, expected a\.0, a\.1 and so on"),
        ("x\n1\nnan\n", "NaN or infinity in the field 'x' of 1 samples, of which the first is number 1 from 0"),
        ("x\n", r"train\.csv holds no sample"),
        ("", r"train\.csv holds no field"),
        ('x\n"1\n', r"train\.csv cannot be read as text with commas"),
    ],
)
def test_text_that_is_no_table_of_numbers(site, text, words):
    (site / "train.npz").unlink()
    (site / "train.csv").write_text(text)
    refused(site, words)


def test_text_that_is_not_utf8(site):
    (site / "train.npz").unlink()
    (site / "train.csv").write_bytes("größe\n1\n".encode("latin-1"))
    refused(site, r"train\.csv cannot be read as text with commas \(.+\): write it anew as UTF-8")
