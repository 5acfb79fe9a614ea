"""Transformers of torch.nn, which are traced into their layers when there is an example.

What their forward asks of numbers is answered here, since a traced value has none:

    asked                                       answered
    ──────────────────────────────────────────────────────────────────────────────────────────────────────────
    is this mask the causal one?                no: torch may then compute with less speed, and the same numbers
    may the padding be left out, in nested      no; where plain PyTorch would leave it out, and fill the padded
      tensors, in evaluation?                     positions with zeros, the stage raises (`check_padding`)
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import fx, nn

from pippy.ir.run.functions import check_padding
from pippy.ir.trace.tracing_thread import method_patched_here, patched_here

TRACED_THROUGH = (nn.Transformer, nn.TransformerDecoder, nn.TransformerEncoder)


@contextmanager
def tracing_transformers(tracer: fx.Tracer) -> Iterator[None]:
    """A context in which ``tracer`` goes through them as the table above says."""
    encode = nn.TransformerEncoder.forward

    def forward(
        self: nn.TransformerEncoder,
        src: Any,
        mask: Any = None,
        src_key_padding_mask: Any = None,
        is_causal: bool | None = None,
    ) -> Any:
        if getattr(self, "use_nested_tensor", False) and mask is None and src_key_padding_mask is not None:
            first = self.layers[0]
            trained = any(parameter.requires_grad for parameter in first.parameters())
            tracer.create_proxy(
                "call_function", check_padding, (src, src_key_padding_mask, first.training, trained), {}
            )
        return encode(self, src, mask, src_key_padding_mask, is_causal)

    with ExitStack() as stack:
        stack.enter_context(method_patched_here(nn.TransformerEncoder, "forward", forward))
        stack.enter_context(patched_here(torch.backends.mha, "get_fastpath_enabled", lambda: False))
        stack.enter_context(patched_here(nn.modules.transformer, "_detect_is_causal_mask", _is_causal))
        # It asks for isinstance(mask, torch.Tensor), which in a file of torch a traced value is not.
        stack.enter_context(patched_here(nn.functional, "_none_or_dtype", lambda mask: getattr(mask, "dtype", None)))
        yield


def _is_causal(_: Any, is_causal: bool | None = None, size: Any = None) -> bool:
    return is_causal is True
