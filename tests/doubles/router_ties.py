"""Where transformers' router can hardly tell two experts apart, and what it says when that goes the other
way.

In bfloat16 a router's logits are off by about a unit in the last place of the largest of them. Where the last
expert chosen and the first that is not are closer than that, either choice is a right answer of the model in
bfloat16, and the two answers differ by a whole expert.
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

_UNIT = 2.0**-8
"""One unit in the last of bfloat16's 8 significant bits, for numbers just below 1."""
Tie = tuple[int, int]
"""(layer, position)."""


def _routers(model: PreTrainedModel) -> list[nn.Module]:
    return [module for name, module in model.named_modules() if name.endswith("mlp.gate")]


def router_ties(model: PreTrainedModel, tokens: list[int]) -> list[Tie]:
    """Every choice in a pass over `tokens` that bfloat16 cannot settle."""
    logits: list[Tensor] = []
    with ExitStack() as hooks, torch.inference_mode():
        for router in _routers(model):
            handle = router.register_forward_hook(lambda _module, _args, out: logits.append(out[0]))
            hooks.callback(handle.remove)
        model(torch.tensor([tokens]))
    chosen = model.config.num_experts_per_tok
    ties: list[Tie] = []
    for layer, each in enumerate(logits):
        ranked = each.sort(-1, descending=True).values
        margins = ranked[:, chosen - 1] - ranked[:, chosen]
        ties += [
            (layer, position) for position in (margins < _UNIT * each.abs().max()).nonzero()[:, 0].tolist()
        ]
    return ties


@contextmanager
def decided_otherwise(model: PreTrainedModel, tie: Tie) -> Iterator[None]:
    """While this is open, the first expert that was not chosen stands in for the last that was."""
    layer, position = tie
    chosen = model.config.num_experts_per_tok
    shares_sum_to_one = getattr(model.config, "norm_topk_prob", True)

    def swap(_module: nn.Module, _args: object, out: tuple[Tensor, Tensor, Tensor]) -> tuple[Tensor, ...]:
        logits, shares, experts = out
        experts, shares = experts.clone(), shares.clone()
        experts[position, -1] = logits[position].topk(chosen + 1).indices[-1]
        probabilities = logits[position].float().softmax(-1)[experts[position]]
        total = probabilities.sum() if shares_sum_to_one else 1.0
        shares[position] = (probabilities / total).to(shares.dtype)
        return logits, shares, experts

    handle = _routers(model)[layer].register_forward_hook(swap)
    try:
        yield
    finally:
        handle.remove()
