"""Many clients in one folder, and Parquet: every format and layout gives the same data and run.

Every fault gives one sentence that names a file.
"""

from __future__ import annotations

import builtins
import re
import shutil

import numpy as np
import pytest
import torch
from safetensors.numpy import save_file

import fedbilevel as fb
from fedbilevel.data.folders import read_folder
from fedbilevel.errors import DataError

pa = pytest.importorskip("pyarrow", reason="pyarrow is not installed: pip install 'fedbilevel[parquet]'")
parquet = pytest.importorskip("pyarrow.parquet")

NAMES = ("site1", "site2", "site10")
RNG = np.random.default_rng(3)


def holdings(k: int) -> dict:
    """A client whose rule and whose number of samples are its own."""

    def samples(num: int) -> dict:
        image = RNG.standard_normal((num, 3))
        score = image @ np.array([1.0, -k, 0.5]) + 0.3 * k
        return {
            "image": image,
            "age": RNG.uniform(1, 9, num),
            "label": (score > 0).astype(np.int64),
            "wrong": RNG.random(num) < 0.3,
        }

    return {"train": samples(6 + 2 * k), "val": samples(5), "test": samples(4)}


CLIENTS = {name: holdings(k) for k, name in enumerate(NAMES)}


def numbered(fields) -> dict:
    """Wide fields as numbered columns, in an order that is not theirs."""
    wide = {
        f"{name}.{k}": value[:, k]
        for name, value in fields.items()
        if value.ndim == 2
        for k in reversed(range(value.shape[1]))
    }
    return {**{name: value for name, value in fields.items() if value.ndim == 1}, **wide}


def write_csv(place, fields) -> None:
    columns = numbered(fields)
    lines = (",".join(map(repr, row)) for row in zip(*(column.tolist() for column in columns.values()), strict=True))
    place.write_text("\n".join([",".join(columns), *lines]) + "\n")


def write_lists(place, fields) -> None:
    parquet.write_table(
        pa.table({name: value.tolist() if value.ndim > 1 else value for name, value in fields.items()}), place
    )


def write_fixed(place, fields) -> None:
    fixed = lambda value: pa.FixedSizeListArray.from_arrays(pa.array(value.reshape(-1)), value.shape[1])
    parquet.write_table(
        pa.table({name: fixed(value) if value.ndim > 1 else value for name, value in fields.items()}),
        place,
        row_group_size=2,
    )


WRITERS = {
    "npz": lambda place, fields: np.savez(place, **fields),
    "csv": write_csv,
    "safetensors": lambda place, fields: save_file(fields, place),
    "parquet": lambda place, fields: parquet.write_table(pa.table(numbered(fields)), place),
    "parquet, lists": write_lists,
    "parquet, fixed lists": write_fixed,
}


def write(folder, form, layout, clients=CLIENTS):
    for name, own in clients.items():
        for role, fields in own.items():
            parent, stem = (folder / name, role) if layout == "by client" else (folder / role, name)
            parent.mkdir(parents=True, exist_ok=True)
            WRITERS[form](parent / f"{stem}.{form.split(',')[0]}", fields)
    return folder


def same(found, expected) -> None:
    assert list(found) == list(expected)
    for name, own in expected.items():
        assert set(found[name]) == set(own)
        for role, fields in own.items():
            assert set(found[name][role]) == set(fields)
            for field, value in fields.items():
                assert found[name][role][field].dtype == value.dtype, (name, role, field)
                assert np.array_equal(found[name][role][field], value), (name, role, field)


def problem() -> fb.Problem:
    """Ridge regression with learnt weight decay; every field is in a loss, so a wrong one shows."""

    def error(y, batch):
        return (batch["image"] @ y["w"] + 0.1 * batch["age"] - batch["label"].to(y["w"].dtype)) ** 2 * (
            1 - 0.5 * batch["wrong"].to(y["w"].dtype)
        )

    return fb.Problem(
        upper=lambda x, y, batch: (batch["weight"] * error(y, batch)).sum(),
        lower=lambda x, y, batch: (batch["weight"] * error(y, batch)).sum() + 0.5 * x["log"].exp() @ y["w"] ** 2,
        x0={"log": torch.zeros(3)},
        y0={"w": torch.zeros(3)},
    )


def rows(clients) -> list:
    result = fb.solve(
        problem(), clients, "fedbio", residuals=False, num_iterations=3, seed=1, batch_size=2, dtype=torch.float64
    )
    return [{name: value for name, value in row.items() if name != "seconds"} for row in result.rows]


@pytest.fixture(scope="module")
def expected_rows():
    return rows(list(CLIENTS.values()))


@pytest.mark.parametrize("layout", ["by client", "by role"])
@pytest.mark.parametrize("form", WRITERS)
def test_every_format_and_layout_gives_the_same_holdings_and_the_same_run(tmp_path, form, layout, expected_rows):
    found = fb.read_folders(write(tmp_path / "data", form, layout), num_classes=2)
    same(found, CLIENTS)
    if layout == "by role":  # equal arrays give equal runs: once for each format is enough
        assert rows(list(found.values())) == expected_rows


def test_one_folder_alone_may_hold_parquet_too(tmp_path):
    write(tmp_path, "parquet", "by client")
    same({"site10": read_folder(tmp_path / "site10")}, {"site10": CLIENTS["site10"]})


def test_formats_may_be_mixed_and_other_files_lie_there(tmp_path):
    write(tmp_path, "csv", "by client", {name: CLIENTS[name] for name in NAMES[:2]})
    write(tmp_path, "npz", "by client", {NAMES[2]: CLIENTS[NAMES[2]]})
    (tmp_path / "README.md").write_text("ours")
    (tmp_path / ".git").mkdir()
    (tmp_path / "__pycache__").mkdir()
    same(fb.read_folders(str(tmp_path)), CLIENTS)


def test_clients_are_sorted_by_the_numbers_in_their_names(tmp_path):
    names = ["a", "B2", "b10", "site 3", "site 21", "site 21 b"]
    for layout in ("by client", "by role"):
        folder = write(tmp_path / layout, "npz", layout, dict.fromkeys(reversed(names), CLIENTS["site1"]))
        assert list(fb.read_folders(folder)) == names


def test_whole_numbers_at_one_client_are_floating_point_where_another_has_fractions(tmp_path):
    own = {
        name: {role: {"dose": np.array(values)} for role in ("train", "val")}
        for name, values in {"ann": [1, 2], "bob": [1.5, 2.0], "eve": [3, 4]}.items()
    }
    found = fb.read_folders(write(tmp_path, "csv", "by client", own))
    assert [found[name]["train"]["dose"].dtype for name in found] == [np.float64] * 3
    assert [found[name]["val"]["dose"].tolist() for name in found] == [[1.0, 2.0], [1.5, 2.0], [3.0, 4.0]]
    np.savez(tmp_path / "ann" / "extra.npz", count=np.array([1, 2], np.int16), size=np.array([1, 2], np.float32))
    for name in ("bob", "eve"):
        np.savez(tmp_path / name / "extra.npz", count=np.array([1, 2]), size=np.array([1, 2], np.float32))
    found = fb.read_folders(tmp_path)
    assert {(own["extra"]["count"].dtype.name, own["extra"]["size"].dtype.name) for own in found.values()} == {
        ("int64", "float32")
    }


def test_a_client_without_test_samples_has_fields_like_the_others(tmp_path):
    write(tmp_path, "csv", "by role")
    lines = (tmp_path / "test" / "site1.csv").read_text().splitlines()
    (tmp_path / "test" / "site1.csv").write_text(lines[0] + "\n")
    parquet.write_table(
        pa.table(
            {"age": pa.array([], pa.float64()), "image": pa.array([], pa.list_(pa.float64())), "label": [], "wrong": []}
        ),
        tmp_path / "t.parquet",
    )
    for place in ("t.parquet", None):
        found = fb.read_folders(tmp_path)
        assert {name: value.shape for name, value in found["site1"]["test"].items()} == {
            "age": (0,),
            "image": (0, 3),
            "label": (0,),
            "wrong": (0,),
        }
        assert [value.dtype for value in found["site1"]["test"].values()] == [
            found["site2"]["test"][name].dtype for name in found["site1"]["test"]
        ]
        if place is not None:
            (tmp_path / "test" / "site1.csv").unlink()
            (tmp_path / place).rename(tmp_path / "test" / "site1.parquet")


def test_what_parquet_may_hold(tmp_path):
    table = {
        "small": pa.array([1, 2, 3], pa.int8()),
        "big": pa.array([1, 2, 2**64 - 1], pa.uint64()),
        "half": pa.array(np.array([1.5, 2.0, 3.0], np.float32)),
        "flag": pa.array([True, False, True]),
        "counts": pa.array([[1, 2], [3, 4], [5, 6]], pa.list_(pa.int32())),
        "picture": pa.array([[[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]]] * 3, pa.large_list(pa.list_(pa.float32()))),
        "z.1": pa.array([1, 2, 3]),
        "z.0": pa.array([4, 5, 6]),
        "v.0": pa.array(np.array([1.5, 2.0, 3.0], np.float32)),
        "__index_level_0__": pa.array([7, 8, 9]),
    }
    for role in ("train", "val"):
        parquet.write_table(pa.table(table), tmp_path / f"{role}.parquet")
    found = read_folder(tmp_path)["train"]
    looks = {name: (value.dtype.name, value.shape) for name, value in found.items()}
    assert looks == {
        "small": ("int64", (3,)),
        "big": ("float64", (3,)),
        "half": ("float32", (3,)),
        "flag": ("bool", (3,)),
        "counts": ("int64", (3, 2)),
        "picture": ("float32", (3, 2, 3)),
        "z": ("float64", (3, 2)),
        "v": ("float32", (3, 1)),
    }
    assert found["z"].tolist() == [[4, 1], [5, 2], [6, 3]]
    assert found["picture"][2].tolist() == [[1, 2, 3], [4, 5, 6]]
    assert found["counts"].tolist() == [[1, 2], [3, 4], [5, 6]]
    assert all(value.flags.writeable for value in found.values())


def test_a_place_named_like_a_partition_adds_no_field(tmp_path):
    write(tmp_path / "year=2026", "parquet", "by client")
    same(fb.read_folders(tmp_path / "year=2026"), CLIENTS)


# ---- faults --------------------------------------------------------------------------------------------------------


def refused(ask, folder, words: str) -> None:
    with pytest.raises(DataError) as caught:
        ask(folder)
    text = str(caught.value)
    assert "\n" not in text
    assert str(folder) in text
    assert re.search(words, text), text


@pytest.mark.parametrize(
    ("columns", "words"),
    [
        (
            {"x": ["a", "b"]},
            r"train\.parquet has the type (large_)?string in the column 'x', expected numbers: convert them",
        ),
        ({"x": pa.array([1, 2], pa.date32())}, r"has the type date32\[day\] in the column 'x'"),
        ({"x": [{"a": 1}, {"a": 2}]}, r"has the type struct<a: int64> in the column 'x'"),
        ({"x": [None, None]}, "has 2 empty values in the column 'x', of which the first is number 0"),
        (
            {"x": [1, None, 3, None]},
            "has 2 empty values in the column 'x', of which the first is number 1 from 0: fill them",
        ),
        ({"x": [[1, 2], None]}, "has 1 empty values in the column 'x', of which the first is number 1"),
        ({"x": [[1, None]]}, "has 1 empty values in the column 'x'"),
        (
            {"x": [[1, 2], [1, 2], [3]]},
            "has 2 numbers in sample 0 of the column 'x' and 1 in sample 2, expected as many in each",
        ),
        ({"x": [1.0, float("nan")]}, "NaN or infinity in the field 'x' of 1 samples, of which the first is number 1"),
        ({"x.0": [1.0], "x.2": [1.0]}, r"the columns x\.0, x\.2, expected x\.0, x\.1 and so on without a gap"),
        ({"x.0": [[1.0]]}, r"has lists in the column 'x\.0', expected one number each"),
        ({"weight": [1.0]}, "a field named 'weight', which the library fills in itself"),
        ({"x": pa.array([], pa.float64())}, "holds no sample"),
        ({}, "holds no field"),
    ],
)
def test_tables_that_are_no_samples(tmp_path, columns, words):
    write(tmp_path, "npz", "by client", {"site": CLIENTS["site1"]})
    (tmp_path / "site" / "train.npz").unlink()
    parquet.write_table(pa.table(columns), tmp_path / "site" / "train.parquet")
    refused(read_folder, tmp_path / "site", words)
    refused(fb.read_folders, tmp_path, words)


def test_a_file_that_is_no_parquet(tmp_path):
    write(tmp_path, "npz", "by client", {"site": CLIENTS["site1"]})
    (tmp_path / "site" / "test.npz").rename(tmp_path / "site" / "test.parquet")
    refused(fb.read_folders, tmp_path, r"test\.parquet cannot be read as Parquet \(.+\): write it anew")


def test_without_pyarrow_the_sentence_says_what_to_install(tmp_path, monkeypatch):
    write(tmp_path, "parquet", "by client", {"site": CLIENTS["site1"]})
    real = builtins.__import__

    def missing(name, *rest, **more):
        if name.split(".")[0] == "pyarrow":
            raise ImportError(name)
        return real(name, *rest, **more)

    monkeypatch.setattr(builtins, "__import__", missing)
    refused(
        fb.read_folders,
        tmp_path,
        r"\.parquet is read by pyarrow, which is not installed: pip install "
        r"'fedbilevel\[parquet\]', or write the file as CSV",
    )


def test_folders_that_hold_no_clients(tmp_path):
    refused(
        fb.read_folders,
        tmp_path / "none",
        "is no folder, expected a folder per client with train.csv and val.csv in it, or the folders train and val",
    )
    refused(fb.read_folders, tmp_path, "holds no folder, expected a folder per client")
    np.savez(tmp_path / "train.npz", x=np.zeros(2))
    refused(fb.read_folders, tmp_path, r"holds train\.npz, but no folder, expected a folder per client")
    for role in ("train", "val"):
        (tmp_path / "empty" / role).mkdir(parents=True)
    refused(fb.read_folders, tmp_path / "empty", "holds no file of data in train and val, expected")


@pytest.mark.parametrize("place", ["ann/train/cat/1.png", "train/cat/1.png", "ann/cat/1.JPG"])
def test_folders_of_images_have_a_command_and_a_reader_of_their_own(tmp_path, place):
    (tmp_path / place).parent.mkdir(parents=True)
    (tmp_path / place).touch()
    refused(
        fb.read_folders, tmp_path, rf"holds images such as {place}, expected files.*fedbilevel clean .*read_clients\(\["
    )


def test_a_client_or_a_role_that_is_missing(tmp_path):
    for layout in ("by client", "by role"):
        folder = write(tmp_path / layout, "csv", layout)
        (folder / ("site2/test.csv" if layout == "by client" else "test/site2.csv")).unlink()
        there = r"site1/test\.csv" if layout == "by client" else r"test/site1\.csv"
        refused(
            fb.read_folders,
            folder,
            f"holds {there}, but nothing for 'test' of 'site2': all clients need the same roles",
        )
    (tmp_path / "by client" / "site10" / "val.csv").unlink()
    refused(
        fb.read_folders,
        tmp_path / "by client",
        r"site10 holds test\.csv, train\.csv, but nothing for the role 'val': add val\.npz, \.csv, \.parquet or",
    )
    shutil.rmtree(tmp_path / "by role" / "val")
    refused(
        fb.read_folders,
        tmp_path / "by role",
        "holds test, train, but nothing for the role 'val': add a folder val with a file per client",
    )
    only = {"site1": CLIENTS["site1"], "site2": {role: CLIENTS["site2"][role] for role in ("train", "val")}}
    refused(
        fb.read_folders,
        write(tmp_path / "first", "csv", "by client", dict(reversed(only.items()))),
        r"site1/test\.csv, but nothing for 'test' of 'site2'",
    )


def test_two_files_for_one_client(tmp_path):
    write(tmp_path, "csv", "by role")
    np.savez(tmp_path / "train" / "site1.npz", x=np.zeros(2))
    refused(fb.read_folders, tmp_path, r"train holds site1\.csv and site1\.npz, both for the client 'site1': keep one")


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        (
            {"a": np.zeros(2)},
            r"site2/val\.npz lacks the field 'b' that \S+site1/val\.npz has: all clients need the same fields",
        ),
        (
            {"a": np.zeros(2), "b": np.zeros(2), "c": np.zeros(2)},
            r"site1/val\.npz lacks the field 'c' that \S+site2/val\.npz has",
        ),
        (
            {"a": np.zeros((2, 4)), "b": np.zeros(2)},
            r"site2/val\.npz has the field 'a' as float64 of shape \(4,\) and \S+site1/val\.npz as "
            r"single numbers \(float64\)",
        ),
        (
            {"a": np.zeros(2), "b": np.zeros(2, bool)},
            r"site2/val\.npz has the field 'b' as single numbers \(bool\) and \S+site1/val\.npz as "
            r"single numbers \(float64\)",
        ),
    ],
)
def test_clients_whose_fields_differ(tmp_path, fields, words):
    own = {"a": np.zeros(2), "b": np.zeros(2)}
    write(tmp_path, "npz", "by client", {"site1": {"train": own, "val": own}, "site2": {"train": own, "val": fields}})
    refused(fb.read_folders, tmp_path, words)


def test_a_label_beyond_the_classes_names_its_file(tmp_path):
    write(tmp_path, "parquet", "by role")
    with pytest.raises(DataError, match=r"site\d+\.parquet has the label 1, expected whole numbers from 0 to 0"):
        fb.read_folders(tmp_path, num_classes=1)


def test_a_folder_of_another_type_is_refused_and_a_huge_column_number_is_part_of_the_name(tmp_path):
    with pytest.raises(DataError, match="the folder of the clients is 3, expected its name"):
        fb.read_folders(3)
    for role in ("train", "val"):
        (tmp_path / "one").mkdir(exist_ok=True)
        (tmp_path / "one" / f"{role}.csv").write_text("x." + "1" * 5000 + "\n2.5\n")
    assert list(fb.read_folders(tmp_path)["one"]["train"]) == ["x." + "1" * 5000]
