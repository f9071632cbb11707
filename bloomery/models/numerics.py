"""Which bits to expect: the numerics id of this process, and a probe that tells whether a row's result is independent of its batch here.

The pads (`ROW_PAD`, `KEY_PAD`) were found by measurement on other machines; the probe holds them against this machine's kernels, with this
model's shapes. It also chooses the `Form` in which the sampler computes: what is faster and gives the trainer's bits here.
"""

import hashlib
import platform
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from bloomery.models.adapters import RANK_PAD, Factors, low_rank_add
from bloomery.models.attention import KEY_PAD, ROW_PAD, causal_mask, pad_to
from bloomery.models.decoder import Decoder
from bloomery.models.head import capped, logits
from bloomery.models.mlp import ACTIVATIONS
from bloomery.models.per_layer import per_layer_gate
from bloomery.models.pointwise import rms_norm
from bloomery.models.products import can_pack, library, linear, packed, product

_ROW_COUNTS = (8, 12, 36, 64, 132, 260, 1028)
_FINER_KEY_PADS = (32, 64, 96, 128, 160, 192, 224, 256, 320, 384, 448)
_KEY_PAD_SLOTS, _KEY_PAD_SLOTS_IN_HALF = 16, 128
"""Slots with noise of their own: in half precision a sum in another order changes one number in thousands, the others round to the same value."""
_CHUNK_ROWS = (36, 200)
"""Rows of a chunk whose last block of queries is a small one, for either size of the kernel's blocks that a step may meet."""
_PLAIN_KEY_PAD = 32
_MEMBER = 20
"""Rows of each run in a pass of three."""


class Form(NamedTuple):
    """How the sampler lays out what it computes. The default has the trainer's bits wherever `probe` finds this machine bit-exact."""

    exact: bool = True
    """Rows come in multiples of `ROW_PAD`, so that their bits do not depend on their company."""
    key_pads: tuple[int, ...] = (KEY_PAD,)
    """Numbers of keys that attention may look at behind the last multiple of `KEY_PAD`, ascending; the last is `KEY_PAD`."""
    packed: bool = False
    """Whether the weights of products are kept in oneDNN's order."""

    def keys(self, length: int) -> int:
        """The least number of keys to attend to that holds `length`."""
        whole, rest = length // KEY_PAD * KEY_PAD, length % KEY_PAD
        return whole + next(pad for pad in self.key_pads if pad >= rest) if rest else whole


class ProbeReport(NamedTuple):
    """`bit_exact`: trainer and sampler agree to the bit here; otherwise `failures` names the kernels that depend on their batch."""

    bit_exact: bool
    failures: tuple[str, ...]
    form: Form
    """The fastest one with the trainer's bits."""


def numerics_id(dtype: torch.dtype, device: torch.device | str = "cpu") -> str:
    """Equal ids promise equal bits: CPU model and flags (or GPU), torch build, threads, pads, library of the products, dtype."""
    parts = (
        platform.machine(),
        _device_name(torch.device(device)),
        torch.__version__,
        torch.backends.cpu.get_cpu_capability(),
        f"threads={torch.get_num_threads()}",
        f"pads={ROW_PAD},{KEY_PAD},{RANK_PAD}",
        f"products={library(dtype, torch.device(device))}",
        str(dtype),
    )
    return hashlib.sha256("|".join(parts).encode()).hexdigest()[:16]


def probe(decoder: Decoder) -> ProbeReport:
    """Compare each kind of kernel on few rows and on many, with this model's shapes; takes well under a second for small models."""
    with torch.no_grad():
        failures = (*_linear_failures(decoder), *_attention_failures(decoder), *_norm_failures(decoder))
        form = Form(key_pads=_key_pads(decoder), packed=_packs(decoder))
    return ProbeReport(not failures, failures, form)


def plain_form(decoder: Decoder) -> Form:
    """The fastest form, whose bits depend on the company."""
    pads = range(_PLAIN_KEY_PAD, KEY_PAD + 1, _PLAIN_KEY_PAD)
    return Form(exact=False, key_pads=tuple(pads), packed=can_pack(decoder.dtype, decoder.device))


def _key_pads(decoder: Decoder) -> tuple[int, ...]:
    """Kernels sum over keys in blocks whose sizes depend on their number: pads whose blocks begin as those of `KEY_PAD` do give the same bits."""
    config = decoder.config
    attended = []
    for kv_heads, head_dim in sorted({config.heads(layer)[:2] for layer in range(config.num_layers)}):
        shape = (min(2, kv_heads), pad_to(config.num_heads // kv_heads, ROW_PAD))
        slots = _KEY_PAD_SLOTS if decoder.dtype == torch.float32 else _KEY_PAD_SLOTS_IN_HALF
        attended += [_Attended(decoder.embedding, slots, *shape, head_dim)]
        attended += [_Attended(decoder.embedding, 1, shape[0], rows, head_dim) for rows in _CHUNK_ROWS]
    return (*(pad for pad in _FINER_KEY_PADS if all(each.holds(pad) for each in attended)), KEY_PAD)


class _Attended:
    """Queries of a decode step, one slot each, or of a chunk of a prompt; the bits of each with a number of keys behind which it sees nothing."""

    def __init__(self, like: Tensor, slots: int, heads: int, rows: int, head_dim: int) -> None:
        self._q = _noise(slots, heads, rows, head_dim, like=like)
        self._k, self._v = (_noise(slots, heads, 2 * KEY_PAD, head_dim, like=like, seed=seed) for seed in (1, 2))

    def holds(self, pad: int) -> bool:
        """Whether this number of keys, and one behind a whole `KEY_PAD`, give the bits of many."""
        lasts = [start + last for start in (0, KEY_PAD) for last in (pad // 2, pad - 1)]
        return all(torch.equal(self._attend(last, last // KEY_PAD * KEY_PAD + pad), self._attend(last, 2 * KEY_PAD)) for last in lasts)

    def _attend(self, last: int, keys: int) -> Tensor:
        mask_1L = causal_mask(torch.tensor([last], device=self._q.device), keys, None, self._q.dtype)
        mask_RL = mask_1L.expand(self._q.shape[2], -1)
        return F.scaled_dot_product_attention(self._q, self._k[:, :, :keys], self._v[:, :, :keys], attn_mask=mask_RL)


def _packs(decoder: Decoder) -> bool:
    """Whether packed weights give the bits of the others."""
    if not can_pack(decoder.dtype, decoder.device):
        return False
    for weight in _each_shape(decoder):
        order, rows_RI = packed(weight), _noise(max(_ROW_COUNTS[:4]), weight.shape[1], like=weight)
        if any(not torch.equal(product(rows_RI[:count], order), product(rows_RI[:count], weight)) for count in (ROW_PAD, *_ROW_COUNTS[:4])):
            return False
    return True


def _each_shape(decoder: Decoder) -> list[Tensor]:
    """One of the matrices of each shape."""
    return list({tuple(weight.shape): weight for weight in decoder.parameters() if weight.dim() == 2}.values())


def _linear_failures(decoder: Decoder) -> Iterator[str]:
    seen: set[tuple[int, ...]] = set()
    weights = [(name, weight) for name, weight in decoder.named_parameters() if weight.dim() == 2]
    for name, weight in weights:
        if tuple(weight.shape) in seen:
            continue
        seen.add(tuple(weight.shape))
        # The embedding probes the head, where the width of the logits makes many rows dear.
        counts = _ROW_COUNTS if weight.shape[0] * weight.shape[1] < 1 << 24 else _ROW_COUNTS[:4]
        rows_RI = _noise(max(counts), weight.shape[1], like=weight)
        factors = Factors(_noise(RANK_PAD, weight.shape[1], like=weight), _noise(weight.shape[0], RANK_PAD, like=weight))
        few = _projected(rows_RI[:ROW_PAD], weight, factors)
        if any(not torch.equal(_projected(rows_RI[:count], weight, factors)[:ROW_PAD], few) for count in counts):
            yield f"the product with `{name}` {list(weight.shape)} depends on the number of rows"
        if not torch.equal(
            _updated_in_a_batch(rows_RI, weight, factors), low_rank_add(linear(rows_RI[:_MEMBER], weight), rows_RI[:_MEMBER], factors)
        ):
            yield f"an adapter's update of `{name}` {list(weight.shape)} depends on those computed beside it"


def _projected(rows_RI: Tensor, weight: Tensor, factors: Factors) -> Tensor:
    plain = linear(rows_RI, weight)
    return torch.cat([plain, low_rank_add(plain, rows_RI, factors), torch.logsumexp(logits(rows_RI, weight, None), -1, keepdim=True)], -1)


def _updated_in_a_batch(rows_RI: Tensor, weight: Tensor, factors: Factors) -> Tensor:
    """The first of three members, with rows of their own and the same factors, as a pass of several runs computes them."""
    rows_MNI = rows_RI[: 3 * _MEMBER].unflatten(0, (3, -1))
    a_MrI, b_MOr = torch.stack([factors.a] * 3), torch.stack([factors.b] * 3)
    base_MNO = linear(rows_MNI.flatten(0, 1), weight).unflatten(0, (3, -1))
    return torch.baddbmm(base_MNO, torch.bmm(rows_MNI, a_MrI.transpose(1, 2)), b_MOr.transpose(1, 2))[0]


def _attention_failures(decoder: Decoder) -> Iterator[str]:
    config = decoder.config
    length, group = min(700, config.context), config.num_heads // config.num_kv_heads
    keys = KEY_PAD * 2
    q_1HLE = _noise(config.num_heads, length, config.head_dim, like=decoder.embedding)[None]
    k_1KSE = F.pad(_noise(config.num_kv_heads, length, config.head_dim, like=decoder.embedding), (0, 0, 0, keys - length))[None]
    v_1KSE = k_1KSE.flip(-1).contiguous()
    whole = _attend(q_1HLE, k_1KSE, v_1KSE, torch.arange(length))
    for position in (2, 76, 199, 332, 510, 511, 512, length - 1):
        if position >= length:
            continue
        near = KEY_PAD if position < KEY_PAD else keys
        # A decode step: the query heads of a group stand in the rows of their key head.
        q_1KGE = F.pad(q_1HLE[:, :, position].unflatten(1, (config.num_kv_heads, group)), (0, 0, 0, -group % ROW_PAD))
        mask = causal_mask(torch.tensor([position]), near, None, q_1HLE.dtype)
        step = F.scaled_dot_product_attention(q_1KGE, k_1KSE[:, :, :near], v_1KSE[:, :, :near], attn_mask=mask.expand(q_1KGE.shape[2], -1))
        if not torch.equal(step[:, :, :group].flatten(1, 2), whole[:, :, position]):
            yield f"attention at position {position} differs between a whole pass and a decode step"


def _attend(q_1HLE: Tensor, k_1KSE: Tensor, v_1KSE: Tensor, positions_L: Tensor) -> Tensor:
    mask = causal_mask(positions_L, k_1KSE.shape[2], None, q_1HLE.dtype)
    return F.scaled_dot_product_attention(q_1HLE, k_1KSE, v_1KSE, attn_mask=mask, enable_gqa=True)


def _norm_failures(decoder: Decoder) -> Iterator[str]:
    config = decoder.config
    width = config.hidden_size
    rows = _noise(max(_ROW_COUNTS), width, like=decoder.norm)
    whole, few = rms_norm(rows, decoder.norm, 1e-6), rms_norm(rows[:ROW_PAD], decoder.norm, 1e-6)
    if not torch.equal(whole[:ROW_PAD], few):
        yield "the norm depends on the number of rows"
    if _depends_on_rows(ACTIVATIONS[config.activation], 2 * config.intermediate_size, decoder):
        yield "the activation depends on the number of rows"
    if config.per_layer is not None and _depends_on_rows(per_layer_gate, config.per_layer.width, decoder):
        yield f"the gate of per-layer inputs, {config.per_layer.width} wide, depends on the number of rows"
    if config.logit_softcap is not None and _depends_on_rows(lambda rows: capped(rows.float(), 1.0), config.vocab_size, decoder):
        yield f"the cap of {config.vocab_size} logits depends on the number of rows"


def _depends_on_rows(function: Callable[[Tensor], Tensor], width: int, decoder: Decoder) -> bool:
    """Kernels compute the last few numbers of a tensor in another way than those before."""
    counts = _ROW_COUNTS if width < 1 << 16 else _ROW_COUNTS[:2]
    rows = _noise(max(counts), width, like=decoder.norm)
    few = function(rows[:ROW_PAD].clone())
    return any(not torch.equal(function(rows[:count].clone())[:ROW_PAD], few) for count in counts)


def _noise(*shape: int, like: Tensor, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(like.device, like.dtype)


def _device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return _cpu_name()


def _cpu_name() -> str:
    info = Path("/proc/cpuinfo")
    if not info.exists():
        return platform.processor()
    lines = info.read_text().splitlines()
    return "|".join(next((line for line in lines if line.startswith(key)), key) for key in ("model name", "flags"))
