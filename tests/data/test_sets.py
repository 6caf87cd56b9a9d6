"""Readers of Omniglot, letters, CIFAR-10, HAPT, Shakespeare, texts of Python, Adult and LIBSVM text.

Each reader reads a tiny file written here, and the published files where they exist.
"""

import gzip
import io
import sys
import types

import numpy as np
import pytest

from fedbilevel.data import catalogue
from fedbilevel.data.partition import by_id
from fedbilevel.data.sets import cifar10, libsvm, python_texts
from fedbilevel.data.sets.adult import ATTRIBUTES, NUMERIC, adult
from fedbilevel.data.sets.hapt import hapt, summaries
from fedbilevel.data.sets.images import train_and_test
from fedbilevel.data.sets.letters import letters
from fedbilevel.data.sets.omniglot import omniglot
from fedbilevel.data.sets.shakespeare import roles, samples, shakespeare, vocabulary
from fedbilevel.data.sets.w8a import w8a
from fedbilevel.errors import DataError


def published(name):
    try:
        catalogue.where(name)
    except DataError as missing:
        pytest.skip(str(missing))


def put(folder, name, content):
    place = folder / name
    place.parent.mkdir(exist_ok=True)
    if isinstance(content, dict):
        np.savez(place, **content)
    else:
        place.write_bytes(content)
    return place


@pytest.mark.parametrize(
    ("read", "name", "file"),
    [
        (omniglot, "omniglot", r"omniglot/omniglot_28x28\.npz"),
        (letters, "letters", r"femnist/az_letters_2990\.npz"),
        (lambda folder: cifar10.cifar10("train", folder), "cifar10", r"cifar10/cifar10_jpeg\.npz"),
        (hapt, "hapt", r"hapt/hapt_windows\.npz"),
        (shakespeare, "shakespeare", r"shakespeare/tinyshakespeare\.txt"),
        (w8a, "w8a", r"libsvm/w8a\.npz or libsvm/w8a or w8a"),
        (
            adult,
            "adult",
            r"adult/adult\.data\.gz with adult/adult\.test\.gz or adult/adult\.data with adult/adult\.test",
        ),
    ],
)
def test_a_missing_file_is_named_with_where_to_put_it(alone, read, name, file):
    for ask in (read, lambda folder: catalogue.where(name, folder)):
        with pytest.raises(
            DataError, match=f"there is no {file} in .*: put .* under {alone}, or under a folder named by data_dir"
        ):
            ask(alone)


@pytest.mark.parametrize("content", [b"", b"no archive", b"PK\x03\x04 cut short"], ids=["empty", "text", "cut"])
@pytest.mark.parametrize(
    "name",
    [
        "omniglot/omniglot_28x28.npz",
        "cifar10/cifar10_jpeg.npz",
        "hapt/hapt_windows.npz",
        "femnist/az_letters_2990.npz",
    ],
)
def test_a_broken_file_is_refused(alone, name, content):
    put(alone, name, content)
    read = {"o": omniglot, "c": lambda folder: cifar10.cifar10("test", folder), "h": hapt, "f": letters}[name[0]]
    with pytest.raises(DataError, match=r"\.npz cannot be read as .*: get the file anew"):
        read(alone)


def test_arrays_of_objects_are_not_executed(alone):
    put(alone, "hapt/hapt_windows.npz", {**tiny_hapt(), "label_names": np.array([{}, {}], dtype=object)})
    with pytest.raises(DataError, match=r"cannot be read as HAPT \(Object arrays cannot be loaded"):
        hapt(alone)


# ---- Omniglot --------------------------------------------------------------------------------------------------------


def tiny_omniglot():
    images = np.full((4, 28, 28), 255, np.uint8)
    images[np.arange(4), np.arange(4), 5] = 0
    return {
        "images": images,
        "label": np.array([0, 0, 1, 2], np.int16),
        "alphabet": np.array([0, 0, 0, 1], np.int8),
        "drawer": np.array([0, 1, 0, 19], np.int8),
        "background": np.array([True, True, True, False]),
        "label_names": np.array(["a/1", "a/2", "b/1"]),
        "alphabet_names": np.array(["a", "b"]),
    }


def test_omniglot_has_ink_one_and_whole_numbers(alone):
    put(alone, "omniglot/omniglot_28x28.npz", tiny_omniglot())
    data = omniglot(alone)
    assert data.images.dtype == np.float32
    assert data.images.sum((1, 2)).tolist() == [1, 1, 1, 1]
    assert [data.images[i, i, 5] for i in range(4)] == [1, 1, 1, 1]
    assert (data.label.tolist(), data.alphabet.tolist(), data.drawer.tolist()) == (
        [0, 0, 1, 2],
        [0, 0, 0, 1],
        [0, 1, 0, 19],
    )
    assert {array.dtype for array in (data.label, data.alphabet, data.drawer)} == {np.dtype(np.int64)}
    assert data.background.tolist() == [True, True, True, False]
    assert (data.label_names, data.alphabet_names) == (["a/1", "a/2", "b/1"], ["a", "b"])


@pytest.mark.parametrize(
    ("arrays", "says"),
    [
        ({"drawer": np.zeros(3, np.int8)}, "arrays of different lengths"),
        ({"images": np.zeros((4, 28, 27), np.uint8)}, "shape (4, 28, 27)"),
        ({"images": np.zeros((4, 28, 28), np.float32)}, "type float32, expected (n, 28, 28) and uint8"),
        ({"label": np.array([0, 0, 1, 3])}, "numbers its labels from 0 to 3, expected 0 to 2"),
        ({"alphabet": np.array([0, 0, -1, 1])}, "numbers its alphabets from -1 to 1, expected 0 to 1"),
    ],
)
def test_other_arrays_are_not_omniglot(alone, arrays, says):
    put(alone, "omniglot/omniglot_28x28.npz", {**tiny_omniglot(), **arrays})
    with pytest.raises(DataError) as error:
        omniglot(alone)
    assert says in str(error.value)


def test_omniglot_as_published():
    published("omniglot")
    data = omniglot()
    assert data.images.shape == (32460, 28, 28)
    assert set(np.unique(data.images[::50])) == {0.0, 1.0}
    assert 0.02 < data.images[::50].mean() < 0.3  # a drawing is mostly paper
    assert np.bincount(data.label).tolist() == [20] * 1623
    assert len(set(data.label[data.background].tolist())) == 964
    assert data.background.sum() == 19280
    assert len(set(data.alphabet[data.background].tolist())) == 30
    pairs = set(zip(data.label.tolist(), data.drawer.tolist(), strict=True))
    assert len(pairs) == 32460  # every character once by every drawer
    assert data.label_names[int(data.label[-1])].startswith(data.alphabet_names[int(data.alphabet[-1])])


# ---- letters ---------------------------------------------------------------------------------------------------------


def tiny_letters():
    images = np.zeros((27, 28, 28), np.uint8)
    images[np.arange(27), np.arange(27), 5] = 255
    return {"images": images, "label": np.arange(27, dtype=np.uint8) % 26}


def test_letters_have_ink_one_and_whole_numbers(alone):
    put(alone, "femnist/az_letters_2990.npz", tiny_letters())
    data = letters(alone)
    assert (data.images.dtype, data.label.dtype) == (np.float32, np.int64)
    assert [data.images[i, i, 5] for i in range(27)] == [1] * 27
    assert data.images.sum() == 27
    assert data.label.tolist() == [*range(26), 0]


@pytest.mark.parametrize(
    ("arrays", "says"),
    [
        ({"label": np.arange(26)}, "arrays of different lengths"),
        ({"images": np.zeros((27, 28, 27), np.uint8)}, "shape (27, 28, 27)"),
        ({"images": np.zeros((27, 28, 28))}, "type float64, expected (n, 28, 28) and uint8"),
        ({"label": np.arange(27)}, "does not number its letters from 0 to 25"),
        ({"label": np.arange(27) % 25}, "does not number its letters from 0 to 25"),
    ],
)
def test_other_arrays_are_not_letters(alone, arrays, says):
    put(alone, "femnist/az_letters_2990.npz", {**tiny_letters(), **arrays})
    with pytest.raises(DataError) as error:
        letters(alone)
    assert says in str(error.value)


def test_letters_as_published():
    published("letters")
    data = letters()
    assert data.images.shape == (2990, 28, 28)
    assert np.bincount(data.label).tolist() == [115] * 26
    assert 0.05 < data.images.mean() < 0.5  # a letter is mostly paper
    mean = np.stack([data.images[data.label == c].mean(0) for c in range(26)])
    top, foot = mean[:, :14].sum((1, 2)), mean[:, 14:].sum((1, 2))
    assert foot[ord("L") - ord("A")] > 1.2 * top[ord("L") - ord("A")]
    assert top[ord("T") - ord("A")] > 1.2 * foot[ord("T") - ord("A")]


# ---- CIFAR-10 --------------------------------------------------------------------------------------------------------

COLOURS = [(250, 10, 10), (10, 240, 10), (10, 10, 230)]


def jpeg(colour, side=32, half=None):
    """A plain image, or one whose lower half has another colour."""
    image = pytest.importorskip("PIL.Image")
    pixels = np.zeros((side, side, 3), np.uint8) + np.array(colour, np.uint8)
    if half is not None:
        pixels[side // 2 :] = half
    file = io.BytesIO()
    image.fromarray(pixels).save(file, "JPEG", quality=95)
    return file.getvalue()


def tiny_cifar(pieces=None):
    pieces = [jpeg(colour) for colour in COLOURS] if pieces is None else pieces
    joined = {
        "jpeg": np.frombuffer(b"".join(pieces), np.uint8),
        "offsets": np.cumsum([0, *map(len, pieces)]),
        "labels": np.arange(len(pieces), dtype=np.uint8),
    }
    other = [jpeg((0, 0, 0), half=(255, 255, 255))]
    test = {
        "jpeg": np.frombuffer(other[0], np.uint8),
        "offsets": np.array([0, len(other[0])]),
        "labels": np.array([2], np.uint8),
    }
    named = {
        f"{part}_{name}": value
        for part, arrays in (("train", joined), ("test", test))
        for name, value in arrays.items()
    }
    return {**named, "class_names": np.array(["x", "y", "z"])}


def test_cifar_images_are_decoded_with_channels_first(alone):
    put(alone, cifar10.FILE, tiny_cifar())
    data = cifar10.cifar10("train", alone)
    assert (data.images.shape, data.images.dtype) == ((3, 3, 32, 32), np.uint8)
    for image, colour in zip(data.images, COLOURS, strict=True):
        assert np.abs(image.astype(int) - np.array(colour)[:, None, None]).max() <= 4  # JPEG is lossy
    assert (data.label.tolist(), data.label.dtype, data.class_names) == ([0, 1, 2], np.int64, ["x", "y", "z"])
    some = cifar10.cifar10("train", alone, which=[2, 0])
    assert np.array_equal(some.images, data.images[[2, 0]])
    assert some.label.tolist() == [2, 0]
    for which, numbers in ((np.array([False, True, True]), [1, 2]), (slice(1), [0]), (np.array([], int), [])):
        assert cifar10.cifar10("train", alone, which=which).label.tolist() == numbers
    test = cifar10.cifar10("test", alone)
    assert test.images[0, :, :12].max() < 30  # the upper half is the dark one: rows come before columns
    assert test.images[0, :, 20:].min() > 225
    assert test.label.tolist() == [2]
    assert cifar10.cifar10("test", alone, which=[]).images.shape == (0, 3, 32, 32)


def test_cifar_without_pillow_says_what_to_install(alone, monkeypatch):
    monkeypatch.setattr(cifar10, "find_spec", lambda name: None)
    with pytest.raises(DataError, match=r"pip install 'fedbilevel\[images\]'"):
        cifar10.cifar10("train", alone)


@pytest.mark.parametrize(
    ("spoil", "which", "says"),
    [
        (
            lambda arrays: {"train_labels": arrays["train_labels"][:2]},
            None,
            "has 2 labels in its train part, but its offsets do not cut",
        ),
        (lambda arrays: {"train_jpeg": arrays["train_jpeg"][:-1]}, None, "do not cut"),
        (lambda arrays: {"train_offsets": arrays["train_offsets"][[0, 2, 1, 3]]}, None, "do not cut"),
        (
            lambda arrays: {},
            [0, 3],
            "which names images that the train part has not .*: name whole numbers from 0 to 2",
        ),
        (lambda arrays: {}, np.array([0.5]), "which names images that the train part has not"),
        (
            lambda arrays: tiny_cifar([jpeg(COLOURS[0]), jpeg(COLOURS[1], side=16)]),
            None,
            "image 1 of the train part in .* has 16 x 16 pixels",
        ),
        (lambda arrays: tiny_cifar([b"GIF89a nothing"]), None, "image 0 of the train part in .* is no JPEG"),
        (lambda arrays: tiny_cifar([jpeg(COLOURS[0])[:300]]), None, "image 0 of the train part in .* is no JPEG"),
    ],
    ids=["labels", "bytes", "order", "beyond", "halves", "size", "no image", "cut"],
)
def test_other_arrays_are_not_cifar(alone, spoil, which, says):
    arrays = tiny_cifar()
    put(alone, cifar10.FILE, {**arrays, **spoil(arrays)})
    with pytest.raises(DataError, match=says):
        cifar10.cifar10("train", alone, which=which)


def test_cifar_as_published():
    published("cifar10")
    pytest.importorskip("PIL")
    data = cifar10.cifar10("test", which=np.arange(0, 10000, 5))
    assert np.bincount(data.label).tolist() == [200] * 10
    assert data.class_names[0] == "airplane"
    means, stds = data.images.mean((0, 2, 3)) / 255, data.images.std((0, 2, 3)) / 255
    assert means == pytest.approx(
        [0.4914, 0.4822, 0.4465], abs=0.015
    )  # published means of the training part, red, green, blue
    assert stds == pytest.approx([0.2452, 0.2428, 0.2606], abs=0.01)  # of this lossy copy


# ---- HAPT ------------------------------------------------------------------------------------------------------------


def tiny_hapt():
    return {
        "x": np.arange(3 * 4 * 2, dtype=np.float16).reshape(3, 4, 2),
        "y": np.array([1, 0, 1], np.int8),
        "subject": np.array([7, 2, 7], np.int8),
        "channels": np.array(["acc", "gyro"]),
        "label_names": np.array(["walking", "lying"]),
    }


def test_hapt_has_windows_labels_and_subjects(alone):
    put(alone, "hapt/hapt_windows.npz", tiny_hapt())
    data = hapt(alone)
    assert data.x.dtype == np.float32
    assert data.x.tolist() == np.arange(24.0).reshape(3, 4, 2).tolist()
    assert (data.label.tolist(), data.subject.tolist()) == ([1, 0, 1], [7, 2, 7])
    assert (data.label.dtype, data.subject.dtype) == (np.int64, np.int64)
    assert (data.channels, data.label_names) == (["acc", "gyro"], ["walking", "lying"])


@pytest.mark.parametrize(
    ("arrays", "says"),
    [
        ({"subject": np.ones(2)}, "arrays of different lengths ({'x': 3, 'y': 3, 'subject': 2})"),
        ({"x": np.ones((3, 4))}, "windows of shape (3, 4), expected (n, time, 2)"),
        ({"channels": np.array(["one"])}, "expected (n, time, 1)"),
        ({"y": np.array([0, 2, 1])}, "numbers its activities from 0 to 2, expected 0 to 1"),
    ],
)
def test_other_arrays_are_not_hapt(alone, arrays, says):
    put(alone, "hapt/hapt_windows.npz", {**tiny_hapt(), **arrays})
    with pytest.raises(DataError) as error:
        hapt(alone)
    assert says in str(error.value)


def test_summaries_of_windows_are_five_numbers_per_channel():
    x = np.array([[[0.0, 5.0], [2.0, 5.0], [1.0, 5.0]]], np.float32)
    assert summaries(x).tolist() == [pytest.approx([1, 5, np.sqrt(2 / 3), 0, 0, 5, 2, 5, 1.5, 0])]


def test_no_person_of_hapt_is_in_both_parts(alone):
    rng = np.random.default_rng(0)
    subject = np.repeat(np.arange(1, 9), 5)
    x = (subject[:, None, None] + 0.01 * rng.standard_normal((40, 4, 2))).astype(np.float16)
    arrays = {"x": x, "y": np.arange(40) % 2, "subject": subject}
    put(alone, "hapt/hapt_windows.npz", {**tiny_hapt(), **arrays})
    train, test = train_and_test("hapt", rng, test_share=0.25, data_dir=alone)
    assert (len(train), len(test), train.image.shape[1]) == (30, 10, 10)
    assert np.abs(train.image.mean(0)).max() < 1e-5
    first = lambda part: set((part.image[:, 0] * 10).round().tolist())  # the mean tells people apart
    assert first(train).isdisjoint(first(test))


def test_hapt_as_published():
    published("hapt")
    data = hapt()
    assert data.x.shape == (10411, 128, 6)
    assert np.isfinite(data.x).all()
    assert set(data.label.tolist()) == set(range(6))
    sizes = {subject: len(own) for subject, own in by_id(data.subject).items()}
    assert (list(sizes), min(sizes.values()), max(sizes.values())) == (list(range(1, 31)), 284, 413)
    moves = {name: data.x[data.label == i].std(1).mean() for i, name in enumerate(data.label_names)}
    assert moves["sitting"] < 0.3 * moves["walking"]


# ---- Shakespeare -----------------------------------------------------------------------------------------------------

PLAY = "ROMEO:\nO, speak:\nagain.\n\nJULIET:\n\nROMEO:\nI will.\n\nNurse:\nAh:\n\nGhost:\n"


def test_speeches_are_gathered_by_role(alone):
    put(alone, "shakespeare/tinyshakespeare.txt", PLAY.encode())
    found = shakespeare(alone)
    assert found == {
        "ROMEO": "O, speak:\nagain.\nI will.\n",
        "Nurse": "Ah:\n",
    }  # a colon within a speech names nobody; who says nothing is left out
    assert list(found) == ["ROMEO", "Nurse"]
    put(alone, "shakespeare/tinyshakespeare.txt", PLAY.replace("\n", "\r\n").encode())
    assert shakespeare(alone) == found


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"Once upon\n", "line 1 is 'Once upon', expected the name of a role"),
        (b"A:\nx\n\ny\n", "line 4 is 'y'"),
        (b"A:\n\xff\n", "cannot be read as text"),
    ],
)
def test_text_that_is_no_play_is_refused(alone, content, says):
    place = put(alone, "shakespeare/tinyshakespeare.txt", content)
    with pytest.raises(DataError, match=says) as error:
        shakespeare(alone)
    assert str(error.value).startswith(str(place))


def test_samples_are_contexts_with_what_follows():
    characters = vocabulary({"a": "cab", "b": "d a"})
    assert characters == " abcd"
    text = "abcdabcad"
    for length in (1, 3, 8):
        for step in (1, 2, 5):
            x, y = samples(text, characters, length, step)
            assert (x.dtype, y.dtype) == (np.int64, np.int64)
            spelled = [("".join(characters[i] for i in row), characters[j]) for row, j in zip(x, y, strict=True)]
            assert spelled == [(text[i : i + length], text[i + length]) for i in range(0, len(text) - length, step)]
            assert len(spelled) >= 1
    for short in ("", "ab", "abc"):
        x, y = samples(short, characters, 3)
        assert (x.shape, y.shape) == ((0, 3), (0,))
    with pytest.raises(DataError, match="the character 'z', which is not in the vocabulary"):
        samples("az", characters, 1)
    for length, step in ((0, 1), (1, 0)):
        with pytest.raises(DataError, match=f"length is {length} and step is {step}"):
            samples(text, characters, length, step)


def test_shakespeare_as_published():
    published("shakespeare")
    found = shakespeare()
    assert len(found) == 299
    assert sum(len(text) >= 1000 for text in found.values()) == 141
    (place,) = catalogue.where("shakespeare")
    whole = place.read_text()
    assert len(vocabulary(found)) == len(set(whole)) == 65
    headings = [
        line for before, line in zip(["", *whole.split("\n")], whole.split("\n"), strict=False) if line and not before
    ]
    assert all(heading.endswith(":") for heading in headings)
    spoken = sum(len(line) + 1 for line in whole.split("\n") if line) - sum(len(heading) + 1 for heading in headings)
    assert sum(map(len, found.values())) == spoken
    assert found["First Citizen"].startswith("Before we proceed any further, hear me speak.\nYou are all resolved")
    assert roles(whole) == found


# ---- texts of Python -------------------------------------------------------------------------------------------------


def test_topics_are_running_text_without_rules_and_repetitions(monkeypatch):
    given = {
        "one": "A heading\n*********\n\n   Some   text\n   goes on.\n\nA heading\n*********\n",
        "two": "Some text\ngoes on.\n\nMore \u2014 of it.\n",
        "three": "A heading\n\n---\n",
    }
    monkeypatch.setitem(sys.modules, "pydoc_data.topics", types.SimpleNamespace(topics=given))
    assert python_texts.topics() == {"one": "A heading\nSome text goes on.\n", "two": "More ? of it.\n"}


def test_texts_of_python_are_there_in_the_same_characters():
    topics = python_texts.topics()
    code = [python_texts.module(name) for name in python_texts.MODULES]
    assert min(map(len, code)) > 5000
    assert sum(map(len, topics.values())) > 200_000
    assert set("".join([*topics.values(), *code])) <= set(python_texts.CHARACTERS)
    assert python_texts.module("argparse").count("def ") > 50
    paragraphs = "".join(topics.values()).splitlines()
    assert len(paragraphs) == len(set(paragraphs))


@pytest.mark.parametrize("name", ["no_such_module", "html.no_such_part", "sys", "email.no.such"])
def test_a_module_without_source_code_is_named(name):
    with pytest.raises(DataError, match=f"this Python has no source code of {name}: install the whole"):
        python_texts.module(name)


def test_a_python_without_its_manual_says_so(monkeypatch):
    monkeypatch.setitem(sys.modules, "pydoc_data.topics", None)
    with pytest.raises(DataError, match=r"no topics of its manual \(.*\): install the whole standard library"):
        python_texts.topics()


# ---- Adult -----------------------------------------------------------------------------------------------------------

PEOPLE = """\
39, State-gov, 100, Bachelors, 13, Never-married, Sales, Husband, White, Male, 2174, 0, 40, United-States, <=50K
50, ?, 300, Bachelors, 13, Divorced, Sales, Wife, Black, Female, 0, 0, 13, ?, >50K
28, Private, 200, HS-grad, 9, Divorced, ?, Wife, White, Female, 0, 0, 40, Cuba, <=50K

"""
TESTED = """|1x3 Cross validator
25, Private, 100, 11th, 7, Divorced, ?, Husband, White, Male, 1, 0, 40, United-States, <=50K.
38, State-gov, 400, HS-grad, 9, Divorced, Sales, Wife, Black, Male, 0, 5, 50, Cuba, >50K.

"""


def cells(text):
    lines = [line for line in text.splitlines() if line and line[0] != "|"]
    return [dict(zip((*ATTRIBUTES, "label"), line.split(", "), strict=True)) for line in lines]


@pytest.mark.parametrize("packed", [True, False])
def test_adult_is_standardised_and_coded_by_the_training_part(alone, packed):
    for name, text in (("adult/adult.data", PEOPLE), ("adult/adult.test", TESTED)):
        put(alone, name + ".gz" * packed, gzip.compress(text.encode()) if packed else text.encode())
    data = adult(alone)
    assert (data.train_y.tolist(), data.test_y.tolist()) == ([0, 1, 0], [0, 1])
    assert (data.train_x.dtype, data.train_y.dtype) == (np.float32, np.int64)
    train, test = cells(PEOPLE), cells(TESTED)
    values = {name: sorted({person[name] for person in train}) for name in ATTRIBUTES if name not in NUMERIC}
    expected_names = [
        column
        for name in ATTRIBUTES
        for column in ([name] if name in NUMERIC else [f"{name}={value}" for value in values[name]])
    ]
    assert data.names == expected_names
    assert "workclass=?" in data.names
    assert "education=11th" not in data.names  # only the test part knows it
    for people, x in ((train, data.train_x), (test, data.test_x)):
        assert x.shape == (len(people), len(data.names))
        for person, row in zip(people, x, strict=True):
            for column, found in zip(data.names, row, strict=True):
                name, equals, value = column.partition("=")
                if equals:
                    assert found == (person[name] == value)
                else:
                    known = np.array([float(one[name]) for one in train])
                    assert found == pytest.approx(
                        (float(person[name]) - known.mean()) / (known.std() or 1.0), rel=1e-5, abs=1e-6
                    )
    assert data.train_x[:, data.names.index("capital-loss")].tolist() == [0, 0, 0]


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (PEOPLE.replace("Sales, Wife", "Wife").encode(), "line 2 of .* has 13 facts and the label '>50K', expected 14"),
        (PEOPLE.replace(">50K", "rich").encode(), "the label 'rich', expected 14 and one of"),
        (PEOPLE.replace("50, ?", "?, ?").encode(), r"line 2 of .* has '\?' as age, expected a number"),
        (PEOPLE.replace("2174", "inf").encode(), "line 1 of .* has 'inf' as capital-gain"),
        (b"\n|\n", "is empty"),
        (b"\x1f\x8bcut", "cannot be read"),
        (gzip.compress(PEOPLE.encode())[:-12], "cannot be read"),
        (b"\xff\xfe", "cannot be read"),
    ],
    ids=["facts", "label", "unknown number", "infinite", "empty", "no gzip", "cut gzip", "no text"],
)
def test_other_text_is_not_adult(alone, content, says):
    put(alone, "adult/adult.data", content)
    put(alone, "adult/adult.test", TESTED.encode())
    with pytest.raises(DataError, match=says):
        adult(alone)


def test_adult_as_published():
    published("adult")
    data = adult()
    assert (data.train_x.shape, data.test_x.shape) == ((32561, 108), (16281, 108))
    assert (data.train_y.sum(), data.test_y.sum()) == (7841, 3846)
    numeric = [data.names.index(name) for name in NUMERIC]
    coded = np.setdiff1d(np.arange(108), numeric)
    assert data.train_x[:, numeric].mean(0) == pytest.approx(np.zeros(6), abs=1e-4)
    assert data.train_x[:, numeric].std(0) == pytest.approx(np.ones(6), abs=1e-3)
    assert (
        set(data.train_x[:, coded].sum(1)) == set(data.test_x[:, coded].sum(1)) == {8.0}
    )  # one for each of the eight attributes
    unknown = [i for i, name in enumerate(data.names) if name.endswith("=?")]
    assert (data.train_x[:, unknown].sum(1) > 0).sum() == 2399  # lines of the file with a "?"


# ---- LIBSVM text -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("pack", [False, True])
def test_libsvm_text_becomes_dense(tmp_path, pack):
    text = b"+1 2:0.5 5:-3\n-1\n2.5 1:1e2  # a remark\n"
    place = put(tmp_path, "data/some.gz" if pack else "data/some", gzip.compress(text) if pack else text)
    x, y = libsvm.read(place, 6)
    assert (x.dtype, y.dtype) == (np.float32, np.float64)
    assert x.tolist() == [[0, 0.5, 0, 0, -3, 0], [0] * 6, [100, 0, 0, 0, 0, 0]]
    assert y.tolist() == [1, -1, 2.5]


def test_features_may_count_from_zero(tmp_path):
    place = put(tmp_path, "data/zero", b"1 0:7 2:8\n")
    assert libsvm.read(str(place), 3, zero_based=True)[0].tolist() == [[7, 0, 8]]
    with pytest.raises(DataError, match="cannot be read as LIBSVM text with 3 features"):
        libsvm.read(place, 3)


@pytest.mark.parametrize("text", [b"1 7:1\n", b"1 two:1\n", b"1,2,3\n"], ids=["too many", "words", "commas"])
def test_other_text_is_not_libsvm(tmp_path, text):
    with pytest.raises(DataError, match=r"some cannot be read as LIBSVM text with 6 features .*: get the file anew"):
        libsvm.read(put(tmp_path, "data/some", text), 6)


def test_libsvm_text_without_scikit_learn_is_refused_with_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    with pytest.raises(DataError, match=r"some is LIBSVM text, .* not installed: pip install 'fedbilevel\[libsvm\]'"):
        libsvm.read(put(tmp_path, "data/some", b"1 1:1\n"), 6)


def test_a_missing_libsvm_file_is_refused(tmp_path):
    with pytest.raises(DataError, match="none cannot be read as LIBSVM text"):
        libsvm.read(tmp_path / "none", 6)


# ---- w8a -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("packed", [True, False])
def test_w8a_has_features_and_labels(alone, packed):
    x = np.zeros((3, 300), np.uint8)
    x[[0, 1, 2, 2], [0, 4, 4, 299]] = 1
    if packed:
        put(alone, "libsvm/w8a.npz", {"X_train": x, "y_train": np.array([-1, 1, -1], np.int8)})
    else:
        put(alone, "libsvm/w8a", b"-1 1:1\n+1 5:1\n-1 5:1 300:1\n")
    features, labels = w8a(alone)
    assert (features.dtype, labels.dtype) == (np.float32, np.int64)
    assert np.array_equal(features, x)
    assert labels.tolist() == [0, 1, 0]


def test_other_arrays_are_not_w8a(alone):
    put(alone, "libsvm/w8a.npz", {"X_train": np.zeros((2, 123)), "y_train": np.ones(2)})
    with pytest.raises(DataError, match=r"features of shape \(2, 123\) .* expected 300 features"):
        w8a(alone)


def test_w8a_as_published():
    published("w8a")
    features, labels = w8a()
    assert features.shape == (49749, 300)
    assert int(labels.sum()) == 1479
