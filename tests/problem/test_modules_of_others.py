"""Modules as people have them: language models of other libraries, and batch norms of each client's own."""

from __future__ import annotations

from collections import OrderedDict
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, scaled_dot_product_attention

import fedbilevel as fb
from fedbilevel.oracle.population import Population

WORDS, WIDTH, LENGTH = 7, 4, 5


class Output(OrderedDict[str, Any]):
    """A result whose entries are attributes too, as Hugging Face's models return it."""

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(name) from None


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.enter, self.leave = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.dropout = nn.Dropout(0.1)

    def forward(self, hidden_states: Tensor, attention_mask: Tensor | None = None) -> tuple[Tensor, None]:
        q, k, v = self.enter(self.norm(hidden_states)).view(*hidden_states.shape[:2], 3, 2, -1).unbind(2)
        q, k, v = (one.transpose(1, 2) for one in (q, k, v))
        mixed = scaled_dot_product_attention(q, k, v, attn_mask=attention_mask, is_causal=attention_mask is None)
        return hidden_states + self.dropout(self.leave(mixed.transpose(1, 2).flatten(2))), None


class ForCausalLM(nn.Module):
    """The call convention of Hugging Face: keywords, a config, buffers, a tied head, an output with attributes."""

    def __init__(self) -> None:
        super().__init__()
        self.config = SimpleNamespace(use_return_dict=True, vocab_size=WORDS)
        self.wte, self.wpe = nn.Embedding(WORDS, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.h = nn.ModuleList([Block()])
        self.lm_head = nn.Linear(WIDTH, WORDS, bias=False)
        self.lm_head.weight = self.wte.weight
        self.register_buffer("position_ids", torch.arange(LENGTH)[None], persistent=False)

    def forward(
        self, input_ids: Tensor, attention_mask: Tensor | None = None, labels: Tensor | None = None, **kwargs: Any
    ) -> Any:
        hidden = self.wte(input_ids) + self.wpe(self.position_ids[:, : input_ids.shape[1]])
        for block in self.h:
            hidden = block(hidden, attention_mask=attention_mask)[0]
        logits, loss = self.lm_head(hidden), None
        if labels is not None:
            loss = cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
        return Output(loss=loss, logits=logits) if kwargs.get("return_dict", True) else (loss, logits)


def texts(num: int, seed: int) -> dict[str, Any]:
    draw = torch.Generator().manual_seed(seed)
    return {"ids": torch.randint(WORDS, (num, LENGTH), generator=draw), "source": torch.arange(num) % 2}


def clients() -> list[dict[str, Any]]:
    return [{"train": texts(3 + i, i), "val": texts(2 + i, 10 + i)} for i in range(3)]


def upper(x: Any, net: Any, batch: Any) -> Tensor:
    logits = net(input_ids=batch["ids"], use_cache=False).logits
    each = cross_entropy(logits[:, :-1].flatten(0, 1), batch["ids"][:, 1:].flatten(), reduction="none")
    return each.view(len(logits), -1).mean(1)


def lower(x: Any, net: Any, batch: Any) -> Tensor:
    decay = sum((leaf**2).sum() for leaf in net.parameters.values())
    return x["logit"].softmax(0)[batch["source"]] * upper(x, net, batch) + 0.1 * decay


def problem(net: nn.Module) -> fb.Problem:
    return fb.Problem.from_modules(y_module=net, x0={"logit": torch.zeros(2)}, upper=upper, lower=lower)


@pytest.mark.filterwarnings("ignore:the fused kernels of attention")
def test_a_language_model_of_another_library_has_the_derivatives_of_its_own_backward():
    torch.manual_seed(0)
    net = ForCausalLM().double().eval()
    made = problem(net)
    assert "lm_head.weight" not in made.y0  # tied: once
    population = Population(made, clients(), dtype=torch.float64)
    found = population.oracle.upper_grads(population.x0, population.y0, population.data.batch(torch.arange(3), "val"))[
        1
    ]
    for i, client in enumerate(clients()):
        net.zero_grad()
        net(input_ids=client["val"]["ids"], labels=client["val"]["ids"]).loss.backward()
        own = torch.cat([dict(net.named_parameters())[name].grad.flatten() for name in made.y0])
        torch.testing.assert_close(found[i], own, rtol=1e-10, atol=1e-12)


@pytest.mark.filterwarnings("ignore:the fused kernels of attention")
@pytest.mark.parametrize("algorithm", ["penalty", "fedbio"])
@pytest.mark.parametrize("module", ["whole, with dropout", "adapters"])
def test_a_language_model_of_another_library_runs_with_both_kinds_of_methods(algorithm, module):
    torch.manual_seed(0)
    net = ForCausalLM()
    if module == "adapters":
        net = fb.lora(net.eval(), 2, where=lambda name: name != "lm_head")
    run = fb.solve(problem(net), clients(), algorithm, num_iterations=3, batch_size=2, lr_lower=0.1, residuals=False)
    assert all(bool(torch.isfinite(leaf).all()) for leaf in (*run.x.values(), *run.y.values()))
    assert any(not torch.equal(leaf, problem(net).y0[name]) for name, leaf in run.y.items())
    missing, unexpected = net.load_state_dict(run.y, strict=False)
    assert not unexpected
    assert module == "adapters" or set(missing) <= {"lm_head.weight"}
    assert net(input_ids=clients()[0]["val"]["ids"]).logits.shape == (2, LENGTH, WORDS)


# ---- batch norms ---------------------------------------------------------------------------------------------------


def with_norms() -> nn.Module:
    """A network in eval mode, of which the scales and shifts of the batch norm are trained."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Tanh(), nn.Linear(4, 1)).double()
    net[1].running_mean.normal_()
    net[1].running_var.uniform_(0.5, 2)
    return net.eval()


def shifted() -> list[dict[str, Any]]:
    draw = torch.Generator().manual_seed(1)
    some = lambda n, i: {
        "a": (1 + i) * torch.randn(n, 3, generator=draw, dtype=torch.float64) + i,
        "b": torch.randn(n, generator=draw, dtype=torch.float64),
    }
    return [{"train": some(30, i), "val": some(20, i)} for i in range(3)]


def test_own_norms_of_every_client_are_a_local_lower_level_and_own_statistics_are_among_them():
    """FedBN: x is the network, y_i the norms of a client. Own statistics are own scales and shifts."""
    net = with_norms()
    for name, leaf in net.named_parameters():
        leaf.requires_grad_(name.startswith("1."))
    rest = {name: leaf.detach() for name, leaf in net.named_parameters() if not name.startswith("1.")}
    error = lambda x, y, batch: (y.with_parameters(x)(batch["a"])[:, 0] - batch["b"]) ** 2
    ridge = lambda x, y, batch: error(x, y, batch) + 0.1 * sum((leaf**2).sum() for leaf in y.parameters.values())
    made = fb.Problem.from_modules(
        x0=rest, y_module=net, upper=error, lower=ridge, scopes=fb.Scopes(lower="local"), name="FedBN"
    )
    assert set(made.y0) == {"1.weight", "1.bias"}
    before = {name: leaf.clone() for name, leaf in net.state_dict().items()}
    run = fb.solve(made, shifted(), "fedbio_local", num_iterations=5, lr_upper=0.05, lr_lower=0.1, dtype=torch.float64)
    assert run.ledger["floats_up"] == 5 * 3 * sum(leaf.numel() for leaf in rest.values())  # norms stay at the clients
    assert not torch.equal(run.y[0]["1.weight"], run.y[1]["1.weight"])
    assert all(torch.equal(leaf, before[name]) for name, leaf in net.state_dict().items())
    for client in shifted():  # the norm with statistics of the client's own samples
        a = client["train"]["a"]
        hidden = net[0](a)
        mean, var, norm = hidden.mean(0), hidden.var(0, unbiased=False), net[1]
        scale = norm.weight * ((norm.running_var + norm.eps) / (var + norm.eps)).sqrt()
        shift = norm.bias + norm.weight * (norm.running_mean - mean) / (var + norm.eps).sqrt()
        own = torch.func.functional_call(net, {"1.weight": scale, "1.bias": shift}, (a,))
        normed = nn.functional.batch_norm(hidden, mean, var, norm.weight, norm.bias, eps=norm.eps)
        torch.testing.assert_close(own, net[3](net[2](normed)))
