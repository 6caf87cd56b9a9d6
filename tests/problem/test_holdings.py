"""Containers of samples that users have: tables, data sets, loaders and rows."""

from typing import NamedTuple

import numpy as np
import pandas as pd
import pytest
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

import fedbilevel as fb
from fedbilevel.errors import ProblemError
from fedbilevel.problem.client_data import ClientData
from fedbilevel.problem.holdings import same_samples
from fedbilevel.problem.windows import Windows

A, LABEL = np.array([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]]), np.array([0, 1, 1])


class Row(NamedTuple):
    a: np.ndarray
    label: int


class Rows(Dataset):
    """A map-style data set; `make` turns an image and a label into a row."""

    def __init__(self, make) -> None:
        self.make = make

    def __len__(self) -> int:
        return len(A)

    def __getitem__(self, i: int):
        return self.make(A[i], int(LABEL[i]))


class Hub(Rows):
    """The part of a Hugging Face data set that is used: rows are dicts of plain values."""

    features = {"a": "Sequence", "label": "ClassLabel"}

    def __init__(self) -> None:
        super().__init__(lambda a, label: {"a": a.tolist(), "label": label})


class Stream(IterableDataset):
    def __iter__(self):
        return iter([{"a": A[0], "label": 0}])


ACCEPTED = {
    "dict": {"a": A, "label": LABEL},
    "dicts in a list": [{"a": a, "label": label} for a, label in zip(A, LABEL, strict=True)],
    "dicts of tensors": [{"a": torch.tensor(a), "label": torch.tensor(i)} for a, i in zip(A, LABEL, strict=True)],
    "named tuples in a list": [Row(a, label) for a, label in zip(A, LABEL, strict=True)],
    "a named tuple of arrays": Row(A, LABEL),
    "data set of dicts": Rows(lambda a, label: {"a": torch.tensor(a), "label": label}),
    "data set of named tuples": Rows(Row),
    "data set of a hub": Hub(),
}


@pytest.mark.parametrize("name", ACCEPTED)
def test_rows_with_names_become_fields(name):
    data = ClientData([{"train": ACCEPTED[name], "val": ACCEPTED["dict"]}], dtype=torch.float64)
    assert data.fields["train"].keys() == {"a", "label"}
    assert data.fields["train"]["a"].tolist() == A.tolist()
    assert data.fields["train"]["label"].tolist() == LABEL.tolist()
    assert data.fields["train"]["label"].dtype == torch.int64


def test_columns_of_a_table_become_fields():
    table = pd.DataFrame({"age": [30.0, 40.5], "label": [0, 1], "member": [True, False], 7: [1, 2]})
    data = ClientData([{"train": table, "val": table.iloc[::-1]}], dtype=torch.float64)
    assert {name: values.tolist() for name, values in data.fields["val"].items()} == {
        "age": [40.5, 30.0],
        "label": [1, 0],
        "member": [False, True],
        "7": [2, 1],
    }


class Column:
    """A column as polars gives it."""

    def __init__(self, values, dtype: str) -> None:
        self.values, self.dtype = np.array(values), dtype

    def to_numpy(self) -> np.ndarray:
        return self.values


class Frame:
    """A table as polars gives it."""

    def __init__(self, **columns: Column) -> None:
        self.columns, self._columns = list(columns), columns

    def __getitem__(self, name: str) -> Column:
        return self._columns[name]


Frame.__module__ = "polars.dataframe.frame"


def test_tables_of_polars_are_read_by_their_columns():
    age, work = Column([1.5, 2.5], "Float64"), Column(["a", "b"], "String")
    assert ClientData([{"train": Frame(age=age), "val": Frame(age=age)}]).fields["train"]["age"].tolist() == [1.5, 2.5]
    with pytest.raises(ProblemError, match=r"'work' of type String.*table\['work'\]\.cast\(pl\.Categorical\)\.to_phys"):
        ClientData([{"train": Frame(age=age, work=work), "val": Frame(age=age)}])


def test_codes_of_a_category_are_the_conversion_that_the_error_names():
    table = pd.DataFrame({"work": ["private", "state", "private"], "label": [0, 1, 1]})
    with pytest.raises(
        ProblemError, match=r"'train' of client 1 has the column 'work' .*astype\(\"category\"\)"
    ) as told:
        ClientData([{"train": ACCEPTED["dict"], "val": ACCEPTED["dict"]}, {"train": table, "val": table}])
    conversion = str(told.value).split("e.g. with ")[1].removesuffix(".")
    table["work"] = eval(conversion, {"table": table})  # noqa: S307 - the sentence of this test's own error
    assert ClientData([{"train": table, "val": table}]).fields["train"]["work"].tolist() == [0, 1, 0]


REFUSED = {
    "a loader": (
        DataLoader(Rows(Row)),
        r"is a DataLoader, but the library draws its own minibatches .*loader\.dataset",
    ),
    "a tuple": ((A, LABEL), r"is a tuple of 2 arrays without names: give a dict of arrays, e\.g\. \{'a': data\[0\]"),
    "rows of tuples": ([(a, 1) for a in A], r"rows of type tuple, whose values have no names: give dicts, e\.g\. \[\{"),
    "a data set of tuples": (TensorDataset(torch.tensor(A), torch.tensor(LABEL)), r"rows of type tuple, whose values"),
    "a stream": (Stream(), r"is of type Stream, expected a dict"),
    "an array": (A, r"is of type ndarray, expected a dict \{field: array\}, a table, or a list or data set of rows"),
    "rows with other names": ([{"a": 1}, {"b": 1}], r"has the names \['b'\] in row 1 and \['a'\] in row 0"),
    "ragged rows": ([{"a": [1.0]}, {"a": [1.0, 2.0]}], r"under 'a' has rows that cannot be stacked \(ValueError"),
    "ragged tensors": ([{"a": torch.zeros(i)} for i in (1, 2)], r"under 'a' has rows that cannot be stacked \(Runtime"),
    "missing values": (
        pd.DataFrame({"n": pd.array([1, None], dtype="Int64")}),
        "'n' of type Int64, expected numbers|train/n that is not finite",
    ),
    "no rows": ([], "client 0 has no 'train' samples"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_samples_without_names_are_refused_with_the_conversion(name):
    given, sentence = REFUSED[name]
    with pytest.raises(ProblemError, match=sentence):
        ClientData([{"train": given, "val": ACCEPTED["dict"]}])


def test_a_table_per_client_runs_like_the_dict_of_its_columns():
    draw = np.random.default_rng(0)
    tables = [pd.DataFrame(draw.standard_normal((12, 2)), columns=["a", "b"]) for _ in range(3)]
    loss = lambda y, batch: (batch["a"] * y["w"] - batch["b"]) ** 2
    problem = fb.Problem(
        upper=lambda x, y, batch: loss(y, batch),
        lower=lambda x, y, batch: loss(y, batch) + x["s"].exp() * y["w"] ** 2,
        x0={"s": torch.tensor(0.0)},
        y0={"w": torch.tensor(0.5)},
    )
    given = [{"train": table[:8], "val": table[8:]} for table in tables]
    plain = [{role: {name: part[name].to_numpy() for name in "ab"} for role, part in one.items()} for one in given]
    runs = [fb.solve(problem, clients, "fedbio", num_iterations=3) for clients in (given, plain)]
    assert runs[0].rows[-1]["upper_loss"] == runs[1].rows[-1]["upper_loss"]


def test_roles_are_the_same_if_their_fields_are():
    rows = np.arange(6.0).reshape(3, 2)
    given = {"a": rows, "label": torch.tensor([0, 1, 2])}
    assert same_samples(given, {"a": torch.tensor(rows, requires_grad=True), "label": np.arange(3)})
    assert not same_samples(given, {"a": rows})
    assert not same_samples(given, {**given, "label": torch.tensor([0, 2, 1])})
    assert not same_samples(given, {**given, "a": rows[:2]})
    short = {"a": torch.tensor(rows, dtype=torch.bfloat16), "label": np.arange(3)}  # a type that numpy has not
    assert same_samples(short, {"a": short["a"].clone(), "label": np.arange(3)})
    assert same_samples(short, given)
    assert not same_samples(short, {**short, "a": short["a"] + 1})
    windows = [Windows([np.arange(9)], [0, 0], [0, 3], 4) for _ in range(2)]
    assert same_samples({"text": windows[0]}, {"text": windows[0]})
    assert not same_samples({"text": windows[0]}, {"text": windows[1]})  # files are not read to compare them
