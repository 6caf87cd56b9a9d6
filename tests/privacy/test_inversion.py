"""Inversion of gradients against samples that are known."""

import math

import pytest
import torch
from torch.nn.functional import cross_entropy

from fedbilevel.privacy.inversion import affine_input, invert, labels_found, labels_from, psnr

CLASSES, PIXELS = 5, 12


@pytest.fixture
def model():
    draw = torch.Generator().manual_seed(1)
    return [
        (0.3 * torch.randn(*shape, generator=draw, dtype=torch.float64)).requires_grad_()
        for shape in ((CLASSES, PIXELS), (CLASSES,))
    ]


def samples(num, seed=0):
    draw = torch.Generator().manual_seed(seed)
    return torch.rand(num, PIXELS, generator=draw, dtype=torch.float64), torch.arange(num) % CLASSES


def gradient_of(weights, biases):
    def gradient(images, labels):
        loss = cross_entropy(images @ weights.T + biases, labels)
        parts = torch.autograd.grad(loss, [weights, biases], create_graph=True)
        return [torch.cat([part.reshape(-1) for part in parts])]

    return gradient


def test_one_sample_is_the_ratio_of_two_gradients(model):
    images, labels = samples(1)
    [sent] = gradient_of(*model)(images, labels)
    weights, biases = sent[: CLASSES * PIXELS].view(CLASSES, PIXELS), sent[CLASSES * PIXELS :]
    torch.testing.assert_close(affine_input(weights, biases), images[0], rtol=0, atol=1e-12)
    torch.testing.assert_close(affine_input(7 * weights, 7 * biases), images[0], rtol=0, atol=1e-12)


def test_two_samples_are_not_that_ratio(model):
    images, labels = samples(2)
    [sent] = gradient_of(*model)(images, labels)
    found = affine_input(sent[: CLASSES * PIXELS].view(CLASSES, PIXELS), sent[CLASSES * PIXELS :])
    assert (found - images).abs().amax(1).min() > 0.01


@pytest.mark.parametrize("scale", [1.0, 0.5])
def test_labels_are_counted_from_biases_of_a_model_that_starts_at_zero(scale):
    truth = torch.tensor([0, 3, 3, 4, 4, 4, 1])
    sent = scale * (1 / CLASSES - truth.bincount(minlength=CLASSES).double() / len(truth))
    uniform = torch.full((CLASSES,), 1 / CLASSES, dtype=torch.float64)
    assert labels_from(sent, uniform, len(truth), scale=scale).tolist() == sorted(truth.tolist())
    assert labels_from(9 * sent, uniform, len(truth), scale=None).tolist() == sorted(truth.tolist())  # 2 is absent
    assert labels_from(-sent, uniform, len(truth), scale=scale).tolist() != sorted(truth.tolist())


@pytest.mark.parametrize("scaled", [False, True])
def test_matching_finds_fewer_samples_than_classes(model, scaled):
    images, labels = samples(3)
    gradient = gradient_of(*model)
    sent = [(0.1 if scaled else 1.0) * one.detach() for one in gradient(images, labels)]
    starts = [samples(3, seed)[0] for seed in (1, 2)]
    found = invert(gradient, sent, starts, labels, num_steps=400, scaled=scaled)
    assert found.residual < 1e-8
    assert psnr(found.images, images).min() > 40
    assert psnr(starts[0], images).max() < 20


def test_matching_keeps_its_start_where_the_gradient_is_not_finite(model):
    images, labels = samples(1)
    found = invert(lambda images, labels: [images[0] * math.nan], [images[0]], [images], labels)
    assert found.residual == math.inf
    assert torch.equal(found.images, images)


def test_decibels_are_those_of_the_best_pairs():
    truth = torch.tensor([[0.0, 0.0], [1.0, 1.0]])
    found = torch.tensor([[1.0, 1.0], [0.1, 0.1]])
    assert psnr(found, truth).tolist() == pytest.approx([20.0, 100.0], rel=1e-6)
    assert psnr(found[:1], truth).tolist() == [0.0, 100.0]


def test_labels_count_whatever_their_order():
    assert labels_found(torch.tensor([1, 1, 2, 5]), torch.tensor([2, 1, 0, 1])) == 0.75
