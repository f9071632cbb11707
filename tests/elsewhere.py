"""A device that is not there: tensors that say where they are, refuse what a GPU's refuse, and are computed by the processor.

It holds code to what no machine without a GPU would notice: tensors of two devices in one operation, and memory that the processor cannot read.
"""

from typing import Any, Final

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._pytree import tree_iter, tree_map
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

NAME: Final = "elsewhere"
_INDEXED: Final = frozenset({"aten::index", "aten::index_put", "aten::index_put_", "aten::_index_put_impl_"})
"""Operations on tensors of a device whose index may be the processor's, as a GPU's may."""
_LIBRARY: Final = torch.library.Library("aten", "IMPL")


class Elsewhere(Tensor):
    """A tensor of that device."""

    _here: Tensor

    @staticmethod
    def __new__(cls, here: Tensor) -> "Elsewhere":
        kind = {"dtype": here.dtype, "layout": here.layout, "device": torch.device(NAME, 0), "requires_grad": False}
        # One that is made in inference mode cannot be told that it is a view.
        with torch.inference_mode(mode=False):
            made: Elsewhere = Tensor._make_wrapper_subclass(cls, here.size(), here.stride(), here.storage_offset(), **kind)  # type: ignore[attr-defined]
        made._here = here
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _computed(func, args, kwargs or {})

    def tolist(self) -> Any:
        return self._here.tolist()

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        return f"Elsewhere({self._here!r})"


def pretend() -> None:
    """From now on this process has the device, before its first backward: that counts the devices that there will ever be."""
    _setup_privateuseone_for_python_backend(NAME)
    _LIBRARY.impl("empty.memory_format", lambda *args, **kwargs: Elsewhere(torch.empty(*args, **_on_processor(kwargs))), "PrivateUse1")
    _LIBRARY.impl("empty_strided", lambda *args, **kwargs: Elsewhere(torch.empty_strided(*args, **_on_processor(kwargs))), "PrivateUse1")
    _LIBRARY.impl("_copy_from", _copied, "PrivateUse1")
    attend = F.scaled_dot_product_attention

    def attended(q: Tensor, k: Tensor, v: Tensor, *, is_causal: bool = False, attn_mask: Tensor | None = None, **kind: Any) -> Tensor:
        # The original asks for a kernel of the device before anybody sees it.
        if not isinstance(q, Elsewhere):
            return attend(q, k, v, is_causal=is_causal, attn_mask=attn_mask, **kind)
        # In float64: how the processor orders sums of fewer rows must not be seen, for a device's own kernel has one order.
        wide = [each if each is None or each.dtype == torch.bool else each.double() for each in (q, k, v, attn_mask)]
        found: Tensor = torch._scaled_dot_product_attention_math(*wide, 0.0, is_causal, **kind)[0]
        return found.to(q.dtype)

    F.scaled_dot_product_attention = attended


def _copied(source: Tensor, target: Tensor, non_blocking: bool = False) -> Tensor:
    _here(target).copy_(_here(source))
    return target


def _computed(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    name = func._schema.name
    tensors = [each for each in tree_iter((args, kwargs)) if isinstance(each, Tensor)]
    there = [each for each in tensors if isinstance(each, Elsewhere)]
    goes = torch.device(kwargs["device"]).type == NAME if kwargs.get("device") is not None else isinstance(args[0], Elsewhere)
    if name not in ("aten::copy_", "aten::_to_copy") and not (name in _INDEXED and goes):
        if any(not isinstance(each, Elsewhere) and each.dim() for each in tensors):
            raise RuntimeError(f"{name} got tensors of two devices")
        goes |= kwargs.get("device") is None
    known = {id(each._here): each for each in there}
    found = func(*tree_map(_here, args), **tree_map(_here, _on_processor(kwargs)))
    return tree_map(lambda each: known[id(each)] if id(each) in known else _there(each), found) if goes else found


def _on_processor(kwargs: dict[str, Any]) -> dict[str, Any]:
    return kwargs if kwargs.get("device") is None else {**kwargs, "device": torch.device("cpu")}


def _here(each: Any) -> Any:
    return each._here if isinstance(each, Elsewhere) else each


def _there(each: Any) -> Any:
    return Elsewhere(each) if isinstance(each, Tensor) and not isinstance(each, Elsewhere) else each
