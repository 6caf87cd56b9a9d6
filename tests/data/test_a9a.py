"""a9a from the packed file and from LIBSVM's text: equal arrays and types, or one clear sentence."""

import io

import numpy as np
import pytest

from fedbilevel.data import locations
from fedbilevel.data.sets.a9a import CHOICES, a9a
from fedbilevel.errors import DataError

TRAIN = "-1 1:1 5:1 123:1\n+1 2:1 3:1\n+1 122:1\n"
TEST = "+1 4:1\n-1 1:1 122:1\n"


def dense(ones: list[list[int]]) -> np.ndarray:
    """Features counted from one, as LIBSVM does."""
    x = np.zeros((len(ones), 123), np.uint8)
    for row, columns in zip(x, ones, strict=True):
        row[np.array(columns) - 1] = 1
    return x


TRUTH = {
    "X_train": dense([[1, 5, 123], [2, 3], [122]]), "y_train": np.array([-1, 1, 1], np.int8),
    "X_test": dense([[4], [1, 122]]), "y_test": np.array([1, -1], np.int8),
}  # fmt: skip


def check(found) -> None:
    for x, name in ((found[0], "X_train"), (found[2], "X_test")):
        assert x.dtype == np.float32
        assert np.array_equal(x, TRUTH[name])
    for y, labels in ((found[1], [0, 1, 1]), (found[3], [1, 0])):
        assert y.dtype == np.int64
        assert y.tolist() == labels


@pytest.mark.parametrize("folder", ["libsvm", "."])
def test_the_text_files_are_read(alone, folder):
    (alone / folder).mkdir(exist_ok=True)
    (alone / folder / "a9a").write_text(TRAIN)
    (alone / folder / "a9a.t").write_text(TEST)
    check(a9a(alone))


def test_the_packed_file_is_read(alone):
    (alone / "libsvm").mkdir()
    np.savez_compressed(alone / "libsvm" / "a9a.npz", **TRUTH)
    check(a9a(str(alone)))


def test_a_missing_file_names_every_form_it_may_have(alone):
    with pytest.raises(
        DataError, match=r"there is no libsvm/a9a\.npz or libsvm/a9a with libsvm/a9a\.t or a9a with a9a\.t in"
    ):
        a9a(alone)


@pytest.mark.parametrize(
    ("arrays", "says"),
    [
        ({"X_test": TRUTH["X_test"][:, :122]}, "hold features of shape (2, 122)"),
        ({"y_test": np.array([1, 0])}, "labels [0, 1], expected 123 features and labels -1 and 1"),
        ({"y_train": np.array([1, 1])}, "hold features of shape (3, 123)"),
    ],
    ids=["columns", "labels", "lengths"],
)
def test_other_arrays_under_that_name_are_refused(alone, arrays, says):
    (alone / "libsvm").mkdir()
    np.savez(alone / "libsvm" / "a9a.npz", **{**TRUTH, **arrays})
    with pytest.raises(DataError) as error:
        a9a(alone)
    assert says in str(error.value)


def single_array() -> bytes:
    file = io.BytesIO()
    np.save(file, np.ones(3))
    return file.getvalue()


@pytest.mark.parametrize(
    "content", [b"", b"no archive", b"PK\x03\x04 cut short", single_array()], ids=["empty", "text", "cut", "one array"]
)
def test_a_broken_packed_file_is_refused(alone, content):
    (alone / "libsvm").mkdir()
    (alone / "libsvm" / "a9a.npz").write_bytes(content)
    with pytest.raises(DataError, match=r"a9a\.npz cannot be read as a9a"):
        a9a(alone)


def test_a_packed_file_without_a_part_is_refused(alone):
    (alone / "libsvm").mkdir()
    np.savez(alone / "libsvm" / "a9a.npz", **{name: value for name, value in TRUTH.items() if name != "X_test"})
    with pytest.raises(DataError, match="X_test"):
        a9a(alone)


@pytest.mark.parametrize("line", ["+1 0:1 122:1\n", "+1 124:1\n", "+1 two:1\n"], ids=["from zero", "too many", "words"])
def test_text_that_is_not_a9a_is_refused(alone, line):
    (alone / "a9a").write_text(line)
    (alone / "a9a.t").write_text(TEST)
    with pytest.raises(DataError, match="cannot be read as a9a"):
        a9a(alone)


def test_the_published_data_have_the_published_counts():
    try:
        locations.find_one_of(*CHOICES)
    except DataError as missing:
        pytest.skip(str(missing))
    train_x, train_y, test_x, test_y = a9a()
    assert (train_x.shape, test_x.shape) == ((32561, 123), (16281, 123))
    assert (train_y.sum(), test_y.sum()) == (7841, 3846)
    assert set(np.unique(train_x)) == {0.0, 1.0}
    assert train_x.sum(1).max() == 14  # one for each of the fourteen attributes of Adult
