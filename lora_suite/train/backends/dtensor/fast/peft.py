# SPDX-License-Identifier: Apache-2.0
"""transformers' model with PEFT's layers, on everything else that the fast path has.

What LoRA is compared with: the public way to add adapters, without what keeps it slow elsewhere. The layers
are transformers' own, with PEFT's adapters beside its linears, and compiled, captured, fed and updated as
`Decoder`'s are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, cast

import torch
from torch import nn

from lora_suite.train.backends.dtensor.adapters import plain_name
from lora_suite.train.backends.dtensor.fast.decoder import rotation_of
from lora_suite.train.backends.dtensor.fast.layered import LayeredModel
from lora_suite.train.fast.rotary import Rotation
from lora_suite.train.models.attention import Blocks

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class TransformersDecoder(LayeredModel):
    """`Decoder` of transformers' modules, under their names there: embedding, layers, last norm and head.

    model: frozen but for its adapters, and real. rotation: for the longest row that will come.
    """

    def __init__(self, model: PreTrainedModel, rotation: Rotation) -> None:
        super().__init__()
        self.model = model.get_submodule("model")
        self.lm_head = model.get_submodule("lm_head")
        self.layers = cast(nn.ModuleList, model.get_submodule("model.layers"))
        self.rotation = rotation

    @property
    def head(self) -> nn.Parameter:
        """The head's weight [vocabulary, hidden]; not an attribute, which would be a second name for it."""
        return self.lm_head.get_parameter("weight")

    def _through(
        self,
        input_ids: torch.Tensor,
        blocks: Blocks | None,
        layers: Iterable[Callable[..., torch.Tensor]],
    ) -> torch.Tensor:
        cos, sin = rotation_of(self.rotation, input_ids.shape[1], blocks)
        x = self.model.get_submodule("embed_tokens")(input_ids)
        for layer in layers:
            x = layer(x, position_embeddings=(cos[None], sin[None]), segments=blocks)
        states: torch.Tensor = self.model.get_submodule("norm")(x)
        return states

    def named_tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Every frozen weight by transformers' name."""
        for name, parameter in self.named_parameters():
            if not parameter.requires_grad:
                yield plain_name(name), parameter.detach()
