"""Data files are found in the documented order; the error for a missing file says where to put it."""

from pathlib import Path

import pytest

from fedbilevel.data import locations
from fedbilevel.errors import DataError, FedBilevelError


@pytest.fixture
def four(tmp_path, monkeypatch):
    """The four folders of the search, in order and empty; CHECKOUT is tmp_path/checkout."""
    checkout = tmp_path / "checkout"
    order = [tmp_path / "given", tmp_path / "named", tmp_path / "cache" / "fedbilevel", tmp_path / "shared" / "data"]
    for folder in (checkout, *order):
        folder.mkdir(parents=True)
    (checkout / "pyproject.toml").touch()
    monkeypatch.setattr(locations, "CHECKOUT", checkout)
    monkeypatch.setattr(locations, "SYSTEM", tmp_path / "system")  # does not exist yet
    monkeypatch.setenv("FEDBILEVEL_DATA", str(order[1]))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return order


def put(folder: Path, name: str) -> Path:
    place = folder / name
    place.parent.mkdir(parents=True, exist_ok=True)
    place.touch()
    return place


def test_a_file_is_taken_from_the_first_folder_that_has_it(four):
    for folder in reversed(four):  # from the last in the order to the first: each new one must win
        place = put(folder, "libsvm/a9a.npz")
        assert locations.find("libsvm/a9a.npz", data_dir=four[0]) == [place]
    assert locations.find("libsvm/a9a.npz") == [four[1] / "libsvm/a9a.npz"]
    assert locations.find("libsvm/a9a.npz", data_dir="") == [four[1] / "libsvm/a9a.npz"]


def test_several_files_come_back_in_the_order_asked_for_wherever_they_lie(four):
    b, a = put(four[3], "b"), put(four[1], "a")
    assert locations.find("b", "a", data_dir=str(four[0])) == [b, a]


def test_a_folder_of_that_name_is_no_file(four):
    (four[0] / "a").mkdir()
    with pytest.raises(DataError, match="there is no a in"):
        locations.find("a", data_dir=four[0])


def test_the_checkout_is_the_one_that_this_package_lies_in():
    assert (locations.CHECKOUT / "src" / "fedbilevel" / "data" / "locations.py").samefile(locations.__file__)


def test_shared_data_count_only_beside_a_checkout_and_only_if_they_exist(four):
    assert locations.folders(four[0]) == four
    (locations.CHECKOUT / "pyproject.toml").unlink()
    assert locations.folders(four[0]) == four[:3]
    (locations.CHECKOUT / "pyproject.toml").touch()
    four[3].rmdir()
    assert locations.folders(four[0]) == four[:3]


def test_data_packages_of_the_system_are_searched_last_if_there_are_any(four, tmp_path):
    packages = tmp_path / "system"
    packages.mkdir()
    assert locations.folders(four[0]) == [*four, packages]
    place = put(packages, "a")
    assert locations.find("a", data_dir=four[0]) == [place]
    nearer = put(four[3], "a")
    assert locations.find("a", data_dir=four[0]) == [nearer]


def test_without_variables_the_cache_is_in_the_home_folder(four, tmp_path, monkeypatch):
    monkeypatch.delenv("FEDBILEVEL_DATA")
    monkeypatch.setenv("XDG_CACHE_HOME", "")  # empty counts as unset
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert locations.folders() == [tmp_path / "home" / ".cache" / "fedbilevel", four[3]]
    assert locations.folders("~/here")[0] == tmp_path / "home" / "here"


def test_a_missing_file_is_one_sentence_with_the_file_every_folder_and_what_to_do(four):
    put(four[1], "there")
    with pytest.raises(FedBilevelError) as error:
        locations.find("one", "there", "two", data_dir=four[0])
    text = str(error.value)
    assert isinstance(error.value, DataError)
    assert text.startswith(
        f"there is no one, two in {four[0]}, {four[1]}, {four[2]}, {four[3]}: put them under {four[0]}, or "
    )
    assert text.count(". ") == 0
    assert "there," not in text


def test_a_folder_that_does_not_exist_is_marked_in_the_sentence(four):
    with pytest.raises(DataError) as error:
        locations.find("one", data_dir=four[0] / "typo")
    assert f"{four[0] / 'typo'} (no such folder), {four[1]}," in str(error.value)
    assert "put it under" in str(error.value)


def test_of_several_choices_the_nearest_whole_one_is_taken(four):
    packed = put(four[3], "a.npz")
    choices = (("a.npz",), ("a", "a.t"))
    assert locations.find_one_of(*choices, data_dir=four[0]) == [packed]
    first = put(four[0], "a")
    assert locations.find_one_of(*choices, data_dir=four[0]) == [packed]  # half a choice is none
    second = put(four[0], "a.t")
    assert locations.find_one_of(*choices, data_dir=four[0]) == [first, second]
    both = put(four[0], "a.npz")
    assert locations.find_one_of(*choices, data_dir=four[0]) == [both]
    with pytest.raises(DataError, match=r"there is no b\.npz or b with b\.t in .*: put them under"):
        locations.find_one_of(("b.npz",), ("b", "b.t"), data_dir=four[0])
    with pytest.raises(DataError, match=r"there is no b\.npz in .*: put it under"):
        locations.find_one_of(("b.npz",))
