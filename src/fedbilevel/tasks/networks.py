"""Networks of the task `personalisation`: weights and rows of pixels to logits."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor
from torch.nn.functional import conv2d, gelu, linear, max_pool2d

# weights of one network, images (samples, pixels), side of an image -> logits (samples, classes)
Network = Callable[[Any, Tensor, int], Tensor]


def _linear(y: Any, image: Tensor, side: int) -> Tensor:
    return linear(image, y["out.weight"], y["out.bias"])


def _mlp(y: Any, image: Tensor, side: int) -> Tensor:
    return linear(gelu(linear(image, y["hidden.weight"], y["hidden.bias"])), y["out.weight"], y["out.bias"])


def _cnn(y: Any, image: Tensor, side: int) -> Tensor:
    image = image.reshape(-1, 1, side, side)
    for name in ("conv1", "conv2"):
        image = max_pool2d(gelu(conv2d(image, y[f"{name}.weight"], y[f"{name}.bias"])), 2)
    return _mlp(y, image.flatten(1), side)


NETWORKS: dict[str, Network] = {"linear": _linear, "mlp": _mlp, "cnn": _cnn}


def split_off(weights: Mapping[str, Tensor], *layers: str) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Return the weights of all other layers, and those of the given layers."""
    mine = {name: leaf for name, leaf in weights.items() if name.split(".")[0] in layers}
    return {name: leaf for name, leaf in weights.items() if name not in mine}, mine
