"""Characters of few-shot tasks: alphabets, their owners, and episodes drawn from them.

An alphabet belongs to one client, to validation or to testing. A character turned by 90, 180 or
270 degrees is another character.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from fedbilevel.data.sets.digits import digits
from fedbilevel.data.sets.letters import NAMES, letters
from fedbilevel.data.sets.omniglot import omniglot
from fedbilevel.errors import ProblemError

_TURNS = 4
_SYMMETRIC = "HINOSXZ"  # half a turn of these shows the same letter again


class Alphabets(NamedTuple):
    """Images by character, and characters by alphabet.

    Character 4 c + k is character c of the data, turned by 90 degrees k times.
    """

    name: str
    images: np.ndarray  # (n, side, side)
    places: list[np.ndarray]  # by character of the data
    members: list[np.ndarray]  # by alphabet
    parts: tuple[int, int, int]  # alphabets for clients, validation and testing

    def look(self, character: int, places: np.ndarray) -> np.ndarray:
        """Return rotated images of a character as rows of pixels."""
        turned: np.ndarray = np.rot90(self.images[places], character % _TURNS, axes=(1, 2))
        return turned.reshape(len(places), -1)

    def deal(
        self, num_clients: int | None, per_client: int, rng: np.random.Generator
    ) -> tuple[list[np.ndarray], np.ndarray, np.ndarray]:
        """Return the characters of every client, of the validation part and of the test part."""
        num_train, num_validation, num_test = self.parts
        if len(self.members) != num_train + num_validation + num_test:
            raise ProblemError(
                f"{self.name} has {len(self.members)} alphabets, expected {num_train} + {num_validation} + {num_test} "
                "for clients, validation and testing: get the file anew."
            )
        num_clients = num_clients or max(1, num_train // per_client)
        num_used = num_clients * per_client
        if num_used > num_train:
            raise ProblemError(
                f"{num_clients} clients with {per_client} alphabets each need {num_used} alphabets, of which "
                f"{self.name} has {num_train} for clients: use fewer clients or fewer alphabets per client."
            )
        order = rng.permutation(len(self.members))
        parts = [*order[:num_used].reshape(num_clients, -1), *np.split(order[num_train:], [num_validation])]
        *own, validation, test = [np.concatenate([self.members[a] for a in part]) for part in parts]
        return own, validation, test

    def deal_characters(
        self, num_clients: int | None, per_client: int, rng: np.random.Generator
    ) -> tuple[list[np.ndarray], np.ndarray, np.ndarray]:
        """Deal like `deal`, but hold out characters instead of alphabets.

        Of the characters of the data, 26 % are for testing (423 of Omniglot's 1623, as is usual) and
        6 % for validation. A client has the other characters of its alphabets, in all turns.
        """
        num = len(self.places)
        num_clients = num_clients or max(1, self.parts[0] // per_client)
        if num_clients > len(self.members):
            raise ProblemError(
                f"{num_clients} clients need an alphabet each, {self.name} has {len(self.members)}: use fewer clients."
            )
        num_test, num_validation = round(num * 423 / 1623), round(num * 100 / 1623)
        order = rng.permutation(num)
        role = np.zeros(num, np.int64)
        role[order[:num_test]], role[order[num_test : num_test + num_validation]] = 2, 1
        every = [members[role[members // _TURNS] == part] for part in range(3) for members in self.members]
        mine, validation, test = (every[i * len(self.members) : (i + 1) * len(self.members)] for i in range(3))
        shares = np.array_split(rng.permutation(len(self.members)), num_clients)
        own = [np.concatenate([mine[a] for a in share]) for share in shares]
        return own, np.concatenate(validation), np.concatenate(test)

    def check_enough(self, owners: dict[str, np.ndarray], num_ways: int, num_shots: int, num_queries: int) -> None:
        """Raise unless every owner has enough characters, and every character has enough images."""
        for owner, members in owners.items():
            if len(members) < num_ways:
                raise ProblemError(
                    f"a task has {num_ways} characters, {owner} has only {len(members)}, turned ones counted: "
                    "use fewer ways or more alphabets per client."
                )
        fewest = min(len(places) for places in self.places)
        if fewest < num_shots + num_queries:
            raise ProblemError(
                f"a task needs {num_shots} + {num_queries} images of a character, {self.name} has only {fewest} of "
                "one: use fewer shots or queries."
            )

    def episodes(
        self, members: np.ndarray, num: int, num_ways: int, num_images: int, rng: np.random.Generator
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return the images and the characters of random episodes.

        The images have the shape (episodes, images of a character, ways, pixels), the characters
        have the shape (episodes, ways).
        """
        characters = np.stack([rng.choice(members, num_ways, replace=False) for _ in range(num)])
        looks = [
            [self.look(c, rng.choice(self.places[c // _TURNS], num_images, replace=False)) for c in episode]
            for episode in characters.tolist()
        ]
        return np.array(looks).swapaxes(1, 2), characters


class Dealt(NamedTuple):
    """Characters of every client, and those held out for the roles held_out and test.

    each: images of a character in an episode; the support comes first.
    """

    alphabets: Alphabets
    own: list[np.ndarray]
    held: dict[str, np.ndarray]
    each: int

    def held_episodes(
        self, num: int, num_ways: int, rng: np.random.Generator
    ) -> dict[str, tuple[np.ndarray, np.ndarray]]:
        """Return images and characters of `num` episodes in every held-out role."""
        return {
            role: self.alphabets.episodes(members, num, num_ways, self.each, rng) for role, members in self.held.items()
        }


def dealt(
    data: str,
    data_dir: str | None,
    rng: np.random.Generator,
    *,
    num_clients: int | None,
    per_client: int = 3,
    by_character: bool = False,
    num_ways: int,
    num_shots: int,
    num_queries: int,
    training_ways: int | None = None,
) -> Dealt:
    """Read digits, letters or Omniglot, and deal characters to clients, validation and testing.

    training_ways: characters of an episode at a client, if they differ from num_ways.
    """
    if data == "digits":
        alphabets = digit_alphabets(rng)
    else:
        alphabets = letter_alphabets(data_dir) if data == "letters" else omniglot_alphabets(data_dir)
    deal = alphabets.deal_characters if by_character else alphabets.deal
    own, validation, test = deal(num_clients, per_client, rng)
    mine = {f"client {i}": members for i, members in enumerate(own)}
    alphabets.check_enough({**mine, "validation": validation, "testing": test}, num_ways, num_shots, num_queries)
    alphabets.check_enough(mine, training_ways or num_ways, num_shots, num_queries)
    return Dealt(alphabets, own, {"held_out": validation, "test": test}, num_shots + num_queries)


def digit_alphabets(rng: np.random.Generator) -> Alphabets:
    """Return 20 random pairs of rotated digits.

    The pairs are random, because some digits, such as 0, look the same when they are rotated.
    """
    pixels, labels = digits()
    pairs = rng.permutation(_TURNS * 10).reshape(-1, 2)
    places = [np.flatnonzero(labels == d) for d in range(10)]
    return Alphabets("digits", pixels.reshape(-1, 8, 8), places, list(pairs), (12, 3, 5))


def letter_alphabets(data_dir: str | None) -> Alphabets:
    """Return one alphabet per capital, with its turns, so that no held-out letter was trained on, but for look-alikes.

    A turned N is nearly a Z, and a turned M nearly a W.
    """
    found = letters(data_dir)
    places = [np.flatnonzero(found.label == c) for c in range(len(NAMES))]
    members = [_TURNS * c + np.arange(2 if name in _SYMMETRIC else _TURNS) for c, name in enumerate(NAMES)]
    return Alphabets("letters", found.images, places, members, (15, 5, 6))


def omniglot_alphabets(data_dir: str | None) -> Alphabets:
    found = omniglot(data_dir)
    places = [np.flatnonzero(found.label == c) for c in range(len(found.label_names))]
    home = np.zeros(len(places), np.int64)
    home[found.label] = found.alphabet
    members = [
        (_TURNS * np.flatnonzero(home == a)[:, None] + np.arange(_TURNS)).ravel()
        for a in range(len(found.alphabet_names))
    ]
    return Alphabets("omniglot", found.images, places, members, (33, 5, 12))
