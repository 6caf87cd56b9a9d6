"""Clients from folders of images and of files, for cleaning."""

from __future__ import annotations

import warnings

import numpy as np
import pytest

from fedbilevel.data.folders import write_folder
from fedbilevel.data.image_folders import read_clients
from fedbilevel.errors import DataError

Image = pytest.importorskip("PIL.Image")


def write(folder, images):
    """Write images {"role/class/name": pixels}."""
    for name, pixels in images.items():
        place = folder / f"{name}.png"
        place.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(np.asarray(pixels, np.uint8)).save(place)


def grey(value, side=6):
    return np.full((side, side), value)


def test_images_are_read_by_role_and_class_with_their_names(tmp_path):
    write(tmp_path / "ann", {"train/dog/1": grey(51), "train/cat/2": grey(255), "val/dog/3": grey(0)})
    write(tmp_path / "bob", {"train/emu/1": grey(102)})
    found = read_clients([tmp_path])
    assert found.names == ["ann", "bob"]
    assert found.class_names == ["cat", "dog", "emu"]
    assert found.files == [["train/cat/2.png", "train/dog/1.png"], ["train/emu/1.png"]]
    train = found.clients[0]["train"]
    assert train["image"].shape == (2, 6, 6)
    assert train["image"][:, 0, 0] == pytest.approx([1.0, 0.2])
    assert train["label"].tolist() == [0, 1]
    assert found.clients[0]["val"]["label"].tolist() == [1]
    assert "val" not in found.clients[1]
    assert found.clients[1]["train"]["label"].tolist() == [2]
    assert read_clients([tmp_path / "bob", tmp_path / "ann"]).names == ["bob", "ann"]


def test_coloured_images_have_their_channels_first_and_sizes_can_be_made_equal(tmp_path):
    red = np.zeros((6, 8, 3))
    red[..., 0] = 255
    write(tmp_path / "ann", {"train/a/1": red, "train/b/2": grey(255)})
    with pytest.raises(DataError, match=r"6 x 6 pixels and .* 8 x 6, expected one size"):
        read_clients([tmp_path / "ann"])
    found = read_clients([tmp_path / "ann"], size=7)
    image = found.clients[0]["train"]["image"]
    assert image.shape == (2, 3, 7, 7)
    assert image[0].mean((1, 2)) == pytest.approx([1, 0, 0])
    assert image[1].mean((1, 2)) == pytest.approx([1, 1, 1])


def test_files_of_arrays_need_train_only(tmp_path):
    samples = {"image": np.ones((2, 3)), "label": np.array([0, 1])}
    write_folder(tmp_path / "ann", {"train": samples})
    write_folder(tmp_path / "bob", {"train": samples, "val": samples})
    found = read_clients([tmp_path])
    assert found.names == ["ann", "bob"]
    assert found.files is found.class_names is None
    assert [sorted(client) for client in found.clients] == [["train"], ["train", "val"]]


def test_refusals(tmp_path):
    with pytest.raises(DataError, match="is no folder"):
        read_clients([tmp_path / "none"])
    with pytest.raises(DataError, match="holds no client"):
        read_clients([tmp_path])
    write(tmp_path / "a" / "ann", {"train/a/1": grey(1)})
    with pytest.raises(DataError, match="1 images and there are 1 classes"):
        read_clients([tmp_path / "a" / "ann"])
    write(tmp_path / "a" / "ann", {"train/b/1": grey(1)})
    write(tmp_path / "b" / "ann", {"train/a/1": grey(1)})
    with pytest.raises(DataError, match="two folders of clients are named 'ann'"):
        read_clients([tmp_path / "a", tmp_path / "b"])
    write_folder(tmp_path / "bob", {"train": {"image": np.ones((2, 3)), "label": np.array([0, 1])}})
    with pytest.raises(DataError, match="use one form for all clients"):
        read_clients([tmp_path / "a", tmp_path / "bob"])
    (tmp_path / "a" / "ann" / "train" / "b" / "2.png").write_text("text")
    with pytest.raises(DataError, match="is no image that can be read"):
        read_clients([tmp_path / "a"])


def test_without_pillow_the_extra_is_named(tmp_path, monkeypatch):
    write(tmp_path / "ann", {"train/a/1": grey(1), "train/b/1": grey(2)})
    monkeypatch.setattr("fedbilevel.data.image_folders.find_spec", lambda name: None)
    with pytest.raises(DataError, match=r"fedbilevel\[images\]"):
        read_clients([tmp_path])


def test_a_client_without_a_file_of_training_samples_is_refused(tmp_path):
    from fedbilevel.data.folders import read_roles

    write_folder(tmp_path, {"val": {"image": np.ones((2, 3)), "label": np.array([0, 1])}})
    with pytest.raises(DataError, match="nothing for the role 'train'"):
        read_roles(tmp_path)


@pytest.mark.parametrize("held", ["val.npz", "val/a/1.png", "a/1.png"])
def test_a_client_without_training_samples_beside_others_is_refused(tmp_path, held):
    samples = {"image": np.ones((2, 3)), "label": np.array([0, 1])}
    write_folder(tmp_path / "ann", {"train": samples})
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "figures.csv").write_text("a")
    write(tmp_path / ".thumbnails", {"1": grey(1)})
    assert read_clients([tmp_path]).names == ["ann"]
    if held == "val.npz":
        write_folder(tmp_path / "bob", {"val": samples})
    else:
        write(tmp_path / "bob", {held.removesuffix(".png"): grey(1)})
    with pytest.raises(DataError, match=r"bob holds (val|a/1).* and no training samples.*move .*bob out of"):
        read_clients([tmp_path])


def test_a_class_of_one_client_with_nearly_the_name_of_another_class_is_told(tmp_path):
    write(tmp_path / "ann", {"train/digit3/1": grey(1), "train/digit8/1": grey(2), "train/cat/1": grey(2)})
    write(tmp_path / "bob", {"train/digt3/1": grey(1), "train/digit8/1": grey(2), "train/digit9/1": grey(1)})
    write(tmp_path / "eve", {"train/digit3/1": grey(1), "train/digit8/1": grey(2), "train/Digit8/1": grey(1)})
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        read_clients([tmp_path])
    assert [str(one.message) for one in told] == [
        "the class 'digt3' occurs at the client 'bob' alone: did you mean 'digit3', which other clients have?",
        "the class 'Digit8' occurs at the client 'eve' alone: did you mean 'digit8', which other clients have?",
    ]
