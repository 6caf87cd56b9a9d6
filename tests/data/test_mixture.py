"""The generator's draws against values recomputed from the parameters that it reports.

The published defect is reproduced on request only.
"""

import math

import numpy as np
import pytest

from fedbilevel.data.sets.mixture import mixture

SIZES = {"train": 100, "val": 70, "test": 200}
erf = np.vectorize(math.erf)


def draw(seed: int = 0, num_clients: int = 4, sizes=SIZES, **options):
    return mixture(num_clients, sizes, np.random.default_rng(seed), **options)


def every(mixed):
    """(client, samples) of all roles."""
    return [(i, samples) for i, client in enumerate(mixed.clients) for samples in client.values()]


def test_sizes_types_and_ranges():
    mixed = draw()
    assert (mixed.theta.shape, mixed.bias.shape, mixed.proportions.shape) == ((3, 5), (3,), (4, 3))
    assert len(mixed.clients) == 4
    for client in mixed.clients:
        assert {role: len(samples.label) for role, samples in client.items()} == SIZES
        for samples in client.values():
            assert samples.x.shape == (len(samples.label), 5)
            assert (samples.x.dtype, samples.label.dtype) == (np.float32, np.int64)
            assert set(np.unique(samples.label)) <= {0, 1}


def test_everything_uniform_fills_its_box():
    mixed = draw(num_clients=1, sizes={"train": 20000}, num_components=4000, dim=4)
    for values in (mixed.theta.ravel(), mixed.bias, mixed.clients[0]["train"].x.ravel()):
        assert np.abs(values).max() <= 1
        quarters = np.histogram(values, bins=[-1, -0.5, 0, 0.5, 1])[0] / len(values)
        assert np.abs(quarters - 0.25).max() < 5 * math.sqrt(0.25 * 0.75 / len(values))


def test_without_noise_every_label_is_its_rule_at_its_input():
    mixed = draw(noise=0.0)
    for _, samples in every(mixed):
        score = np.array(
            [
                float(np.dot(x.astype(float), mixed.theta[k]) + mixed.bias[k])
                for x, k in zip(samples.x, samples.component, strict=True)
            ]
        )
        assert np.array_equal(samples.label == 1, 1 / (1 + np.exp(-score)) > 0.5)


def test_with_noise_label_frequencies_are_those_of_the_normal_distribution():
    """P(label 1 | x, k) = Phi((<x, theta_k> + bias_k) / noise), by chi-square over bins of it.

    The noise is that of the description.
    """
    mixed = draw(1, num_clients=6, sizes={"train": 20000})
    chance, labels = [], []
    for _, samples in every(mixed):
        score = (
            np.einsum("nd,nd->n", samples.x.astype(float), mixed.theta[samples.component])
            + mixed.bias[samples.component]
        )
        chance.append((1 + erf(score / 0.1 / math.sqrt(2))) / 2)
        labels.append(samples.label)
    chance, labels = np.concatenate(chance), np.concatenate(labels)
    bins = np.digitize(chance, [0.01, 0.2, 0.4, 0.6, 0.8, 0.99])
    squares = [
        (labels[bins == b].sum() - chance[bins == b].sum()) ** 2 / (chance[bins == b] * (1 - chance[bins == b])).sum()
        for b in range(1, 6)
    ]  # the outermost bins are almost certain
    assert min(np.bincount(bins)) > 300
    assert sum(squares) < 20.5  # 99.9 % of chi-square with 5 degrees of freedom
    assert labels.mean() == pytest.approx(chance.mean(), abs=5 * math.sqrt((chance * (1 - chance)).sum()) / len(labels))


def test_components_are_counted_as_drawn_and_follow_the_clients_own_proportions():
    mixed = draw(2, num_clients=5, sizes={"train": 5000, "val": 5000})
    assert np.ptp(mixed.proportions, axis=0).max() > 0.3
    for i, samples in every(mixed):
        assert samples.counts.sum() == 5000
        assert np.array_equal(np.bincount(samples.component, minlength=3), samples.counts)
        expected = 5000 * mixed.proportions[i]
        assert (np.abs(samples.counts - expected) <= 5 * np.sqrt(expected * (1 - mixed.proportions[i])) + 1).all()
    first = mixed.clients[0]
    assert not np.array_equal(first["train"].x, first["val"].x)


@pytest.mark.parametrize("concentration", [0.4, 5.0])
def test_proportions_have_the_moments_of_the_dirichlet_distribution(concentration):
    """Each entry is Beta(a, 2a) for three components: mean 1/3, variance (2/9) / (3a + 1)."""
    shares = draw(num_clients=20000, sizes={}, concentration=concentration).proportions
    np.testing.assert_allclose(shares.sum(1), 1, rtol=0, atol=1e-12)
    np.testing.assert_allclose(shares.mean(0), 1 / 3, rtol=0, atol=0.015)
    np.testing.assert_allclose(shares.var(0), 2 / 9 / (3 * concentration + 1), rtol=0.05)


def test_the_defaults_are_the_setting_of_the_paper():
    told = draw(dim=5, num_components=3, concentration=0.4, noise=0.1, bug_compatible=False)
    for a, b in zip(every(draw()), every(told), strict=True):
        assert all(np.array_equal(left, right) for left, right in zip(a[1], b[1], strict=True))


def test_the_data_depend_on_the_generator_alone():
    one, same, other = (draw(seed).clients[1]["val"] for seed in (3, 3, 4))
    assert np.array_equal(one.x, same.x)
    assert np.array_equal(one.label, same.label)
    assert not np.array_equal(one.x, other.x)


# ---- the published defect --------------------------------------------------------------------------------------------


def test_the_defect_changes_labels_only():
    right, wrong = draw(5), draw(5, bug_compatible=True)
    for (_, a), (_, b) in zip(every(right), every(wrong), strict=True):
        assert np.array_equal(a.x, b.x)
        assert np.array_equal(a.counts, b.counts)
    assert np.array_equal(right.proportions, wrong.proportions)
    assert any(not np.array_equal(a.label, b.label) for (_, a), (_, b) in zip(every(right), every(wrong), strict=True))


def test_with_the_defect_labels_are_those_of_writing_from_the_start_for_every_rule():
    mixed = draw(6, noise=0.0, bug_compatible=True)
    overwritten = 0
    for _, samples in every(mixed):
        labels = [0] * len(samples.label)
        for k in range(3):
            for place in range(samples.counts[k]):  # no offset: that is the defect
                labels[place] = int(float(samples.x[place].astype(float) @ mixed.theta[k] + mixed.bias[k]) > 0)
        assert samples.label.tolist() == labels
        largest = samples.counts.max()
        assert not samples.label[largest:].any()
        assert (samples.component[largest:] == -1).all()
        assert (samples.component[:largest] >= 0).all()
        overwritten += int(np.sort(samples.counts)[-2])
    assert overwritten > 50  # more than one rule wrote


def test_with_the_defect_labels_after_the_largest_count_are_zero_in_spite_of_noise():
    tails = [
        samples.label[samples.counts.max() :]
        for seed in range(10)
        for _, samples in every(draw(seed, noise=5.0, bug_compatible=True))
    ]
    assert sum(map(len, tails)) > 1000
    assert not np.concatenate(tails).any()


def test_with_the_defect_the_mean_label_falls_by_the_share_of_samples_that_no_rule_reached():
    """By symmetry half of a rule's labels are 1, so the mean label is 1/2.

    With the defect the mean is half the share of samples that a rule reached.
    """
    seeds, means = range(150), {}
    for defect in (False, True):
        mixed = [draw(seed, num_clients=3, bug_compatible=defect) for seed in seeds]
        means[defect] = np.array([np.mean([samples.label.mean() for _, samples in every(one)]) for one in mixed])
    reached = np.mean(
        [
            samples.counts.max() / samples.counts.sum()
            for seed in seeds
            for _, samples in every(draw(seed, num_clients=3))
        ]
    )
    assert 0.6 < reached < 0.85
    assert means[False].mean() == pytest.approx(0.5, abs=0.05)
    assert means[True].mean() == pytest.approx(0.5 * reached, abs=0.05)
    assert means[True].mean() < means[False].mean() - 0.08
