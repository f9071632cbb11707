"""Which bits to expect: the numerics id of this process, and a probe that tells whether a row's result is independent of its batch here.

The pads (`ROW_PAD`, `KEY_PAD`) were found by measurement on other machines; the probe holds them against this machine's kernels, with this
model's shapes. It also chooses the `Form` in which the sampler computes: what is faster and gives the trainer's bits here.
"""

import hashlib
import platform
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from bloomery.models import native
from bloomery.models.adapters import RANK_PAD, Factors, add_updates, low_rank_add
from bloomery.models.attention import causal_mask
from bloomery.models.decoder import Decoder
from bloomery.models.head import capped, logsumexp
from bloomery.models.mlp import ACTIVATIONS, gate_up_rows
from bloomery.models.pads import KEY_PAD, ROW_PAD, pad_to
from bloomery.models.per_layer import per_layer_gate
from bloomery.models.pointwise import rms_norm
from bloomery.models.products import MATRICES, can_pack, library, linear, packed, product
from bloomery.models.recurrent import Recurrence

_ROW_COUNTS = (ROW_PAD, 8, 12, 36, 64, 132, 260, 708, 1028)
"""Decode has as many as 64 versions padded, prefill as a chunk of 512 with the pads of 64 prompts, training as a pass and more."""
_FEW_ROWS = tuple(range(1, ROW_PAD))
_HEAD_ROW_COUNTS = _ROW_COUNTS[:5]
"""Of a head with a large vocabulary: more would take longer than loading the model."""
_LARGE_HEAD = 1 << 24
_CHUNK_COUNTS = (1, 2, 5, 12)
"""Chunks of sequences with a state that are computed together."""
_SAMPLED_ROWS = 708
"""The most that a packed matrix is multiplied with."""
_FINER_KEY_PADS = (32, 64, 96, 128, 160, 192, 224, 256, 320, 384, 448)
_KEY_PAD_SLOTS, _KEY_PAD_SLOTS_IN_HALF = 16, 128
"""Slots with noise of their own: in half precision a sum in another order changes one number in thousands, the others round to the same value."""
_CHUNK_ROWS = (36, 200)
"""Rows of a chunk whose last block of queries is a small one, for either size of the kernel's blocks that a step may meet."""
_PLAIN_KEY_PAD = 32
_LENGTH = 700
_POSITIONS = (2, 76, 199, 332, 510, 511, 512, 699)
"""Of a sequence of that length that a decode step is tried at."""
_MEMBER = 20
"""Rows of each run in a pass of three."""


class Form(NamedTuple):
    """How the sampler lays out what it computes. The default has the trainer's bits wherever `probe` finds this machine bit-exact."""

    exact: bool = True
    """A row's bits do not depend on its company."""
    row_pad: int = ROW_PAD
    """Rows of each adapter, and of a step, come in multiples of this."""
    key_pads: tuple[int, ...] = (KEY_PAD,)
    """Numbers of keys that attention may look at behind the last multiple of `KEY_PAD`, ascending; the last is `KEY_PAD`."""
    packed: bool = False
    """Whether the weights of products are kept in their kernel's own order."""
    one_thread: bool = True
    """Whether one thread may compute a step: it gives the bits of all of them."""

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
    """Equal ids promise equal bits: CPU model and flags (or GPU), torch build, threads, pads, whose products and kernels, our own sources, dtype."""
    parts = (
        platform.machine(),
        _device_name(torch.device(device)),
        torch.__version__,
        torch.backends.cpu.get_cpu_capability(),
        f"threads={torch.get_num_threads()}",
        f"pads={ROW_PAD},{KEY_PAD},{RANK_PAD}",
        f"products={library(dtype, torch.device(device))}",
        f"kernels={native.identity()}",
        f"sources={_sources()}",
        str(dtype),
    )
    return hashlib.sha256("|".join(parts).encode()).hexdigest()[:16]


@cache
def _sources() -> str:
    """Of all Python that computes: with another loss, packing or optimizer the same operations may give other bits."""
    package = Path(__file__).parents[1]
    files = sorted(path for folder in ("models", "train", "infer") for path in (package / folder).rglob("*.py"))
    return hashlib.sha256(b"".join(path.read_bytes() for path in files)).hexdigest()[:16]


def probe(decoder: Decoder) -> ProbeReport:
    """Compare each kind of kernel on few rows and on many, with this model's shapes; takes well under a second for small models."""
    with torch.no_grad():
        failures: list[str] = []
        packs, alone, padless = can_pack(decoder.dtype, decoder.device), True, _may_have_no_pads(decoder)
        for matrix in _matrices(decoder):
            failures += _product_failures(matrix)
            packs = packs and _packs(matrix)
            padless = padless and _equal_for(matrix, _FEW_ROWS)
            with _one_thread():
                alone = alone and not list(_product_failures(matrix)) and (not packs or _packs(matrix))
        failures += [*_attention_failures(decoder), *_state_failures(decoder), *_pointwise_failures(decoder)]
        row_pad = 1 if padless and not any(_pointwise_failures(decoder, _FEW_ROWS)) else ROW_PAD
        form = Form(row_pad=row_pad, key_pads=_key_pads(decoder), packed=packs, one_thread=alone and _equal_alone(decoder))
    return ProbeReport(not failures, tuple(failures), form)


def plain_form(decoder: Decoder) -> Form:
    """The fastest form, whose bits depend on the company."""
    pads = range(_PLAIN_KEY_PAD, KEY_PAD + 1, _PLAIN_KEY_PAD)
    return Form(exact=False, row_pad=1, key_pads=tuple(pads), packed=can_pack(decoder.dtype, decoder.device))


def _may_have_no_pads(decoder: Decoder) -> bool:
    """Whether a row may have its bits alone: with native products, in models of attention and MLPs and nothing else."""
    return native.multiplies(decoder.embedding) and decoder.config.recurrent is None and decoder.config.experts is None


def compute_with(threads: int) -> None:
    """Have torch compute with so many from here on."""
    if torch.get_num_threads() != threads:
        torch.set_num_threads(threads)


@contextmanager
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    compute_with(1)
    try:
        yield
    finally:
        compute_with(threads)


def _equal_alone(decoder: Decoder) -> bool:
    """Whether attention, layers with a state and what is pointwise have the same bits from one thread as from all."""
    together = list(_mixed(decoder))
    with _one_thread():
        return all(torch.equal(mine, theirs) for mine, theirs in zip(_mixed(decoder), together, strict=True))


def _mixed(decoder: Decoder) -> Iterator[Tensor]:
    config = decoder.config
    for kv_heads, head_dim in _head_shapes(decoder):
        if _is_native(decoder, head_dim):
            yield from _attended_natively(decoder, kv_heads, head_dim)
            continue
        step = (kv_heads, pad_to(config.num_heads // kv_heads, ROW_PAD))
        for slots, heads, rows in ((1, *step), (16, *step), (1, config.num_heads, max(_CHUNK_ROWS))):
            yield _Attended(decoder.embedding, slots, heads, rows, head_dim).attend(last=KEY_PAD + 3, keys=2 * KEY_PAD)
    if (mixer := _recurrence(decoder)) is not None:
        rows_NLX, state_N = _chunks(mixer, decoder)
        for count in (1, len(state_N)):
            yield from mixer.inter_chunk(mixer.intra_chunk(rows_NLX[:count]), state_N[:count], count)
    for part in _pointwise(decoder):
        rows_RX = _noise(max(part.counts), part.width, like=decoder.norm)
        yield from (part.function(rows_RX[:count].clone()) for count in part.counts)


def _key_pads(decoder: Decoder) -> tuple[int, ...]:
    """Kernels sum over keys in blocks whose sizes depend on their number: pads whose blocks begin as those of `KEY_PAD` do give the same bits."""
    config = decoder.config
    attended = []
    for kv_heads, head_dim in _head_shapes(decoder):
        if _is_native(decoder, head_dim):
            continue
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
        return all(torch.equal(self.attend(last, last // KEY_PAD * KEY_PAD + pad), self.attend(last, 2 * KEY_PAD)) for last in lasts)

    def attend(self, last: int, keys: int) -> Tensor:
        """To so many keys, of which those up to `last` are seen."""
        mask_1L = causal_mask(torch.tensor([last], device=self._q.device), keys, None, self._q.dtype)
        mask_RL = mask_1L.expand(self._q.shape[2], -1)
        return F.scaled_dot_product_attention(self._q, self._k[:, :, :keys], self._v[:, :, :keys], attn_mask=mask_RL)


class _Matrix(NamedTuple):
    """A matrix of products, and what many rows give with it and with an adapter on it."""

    name: str
    weight: Tensor
    factors: Factors
    rows_RI: Tensor
    counts: tuple[int, ...]
    update: "_Update"
    answers: "_Answers"


_Update = Callable[[Tensor, Tensor, Factors], Tensor]
"""How factors are added to a product of rows: of experts otherwise than elsewhere."""


class _Answers(NamedTuple):
    base_RO: Tensor
    adapted_RO: Tensor
    logsumexp_R: Tensor

    def equal(self, others: "_Answers") -> bool:
        """Whether the first rows of the others have these bits."""
        return all(torch.equal(mine, theirs[: len(mine)]) for mine, theirs in zip(self, others, strict=True))


def _matrices(decoder: Decoder) -> Iterator[_Matrix]:
    """One of each shape and dtype of a product, those of experts included; the head comes last."""
    weights: dict[str, Tensor] = {name: weight for name, weight in decoder.named_parameters() if name.rpartition(".")[2] in MATRICES}
    by_form = {(weight.shape[-2:], _product_dtype(decoder, name)): (name, weight) for name, weight in reversed(weights.items())}
    head = decoder.head_weight
    by_form.pop((head.shape, head.dtype), None)
    by_form[head.shape, head.dtype] = "head", head
    for (_, dtype), (name, stored) in by_form.items():
        weight = (stored if stored.dim() == 2 else stored[0]).to(dtype)
        counts = _HEAD_ROW_COUNTS if name == "head" and head.numel() >= _LARGE_HEAD else _ROW_COUNTS
        factors = Factors(_noise(RANK_PAD, weight.shape[1], like=weight), _noise(weight.shape[0], RANK_PAD, like=weight))
        rows_RI = _noise(max(counts), weight.shape[1], like=weight)
        update = _updated if stored.dim() == 2 else low_rank_add
        yield _Matrix(name, weight, factors, rows_RI, counts, update, _projected(rows_RI, weight, factors, update))


def _product_dtype(decoder: Decoder, name: str) -> torch.dtype:
    """Routers that score every expert by itself do so in float32, whatever the dtype of the model."""
    experts = decoder.config.experts
    return torch.float32 if experts is not None and experts.scoring == "sigmoid" and name.endswith(".router") else decoder.dtype


def _product_failures(matrix: _Matrix) -> Iterator[str]:
    name, weight, factors, rows_RI, counts, *_ = matrix
    if not _equal_for(matrix, counts[:-1]):
        yield f"the product with `{name}` {list(weight.shape)} depends on the number of rows"
    alone = _updated(linear(rows_RI[:_MEMBER], weight), rows_RI[:_MEMBER], factors)
    if not torch.equal(_updated_in_a_batch(rows_RI, weight, factors, members=3), alone):
        yield f"an adapter's update of `{name}` {list(weight.shape)} depends on those computed beside it"


def _equal_for(matrix: _Matrix, counts: Sequence[int]) -> bool:
    """Whether so many rows have the bits that they have among all."""
    parts = (_projected(matrix.rows_RI[:count], matrix.weight, matrix.factors, matrix.update) for count in counts)
    return all(part.equal(matrix.answers) for part in parts)


def _packs(matrix: _Matrix) -> bool:
    """Whether it gives the same bits when it is packed."""
    order = packed(matrix.weight)
    counts = [count for count in matrix.counts if count <= _SAMPLED_ROWS]
    if not all(torch.equal(product(matrix.rows_RI[:count], order), matrix.answers.base_RO[:count]) for count in counts):
        return False
    with _one_thread():
        return torch.equal(product(matrix.rows_RI[: counts[0]], order), matrix.answers.base_RO[: counts[0]])


def _projected(rows_RI: Tensor, weight: Tensor, factors: Factors, update: _Update) -> _Answers:
    base_RO = linear(rows_RI, weight)
    return _Answers(base_RO, update(base_RO, rows_RI, factors), logsumexp(base_RO.float()))


def _updated(base_RO: Tensor, rows_RI: Tensor, factors: Factors) -> Tensor:
    out_RO = base_RO.clone()
    add_updates(out_RO, rows_RI, [factors])
    return out_RO


def _updated_in_a_batch(rows_RI: Tensor, weight: Tensor, factors: Factors, members: int) -> Tensor:
    """The first of some members, with rows of their own and the same factors, as a pass of several runs computes them."""
    rows_RI = rows_RI[: members * _MEMBER]
    out_RO = linear(rows_RI, weight)
    add_updates(out_RO, rows_RI, [factors] * members)
    return out_RO[:_MEMBER]


def _head_shapes(decoder: Decoder) -> list[tuple[int, int]]:
    """Key heads, and dimensions of a head, of the layers that attend."""
    config = decoder.config
    return sorted({config.heads(layer)[:2] for layer in range(config.num_layers) if config.mixer(layer) == "attention"})


def _attention_failures(decoder: Decoder) -> Iterator[str]:
    for kv_heads, head_dim in _head_shapes(decoder):
        differing = _differing_natively if _is_native(decoder, head_dim) else _differing_positions
        for position in differing(decoder, kv_heads, head_dim):
            yield f"attention of {kv_heads} key heads of {head_dim} at position {position} differs between a whole pass and a decode step"


def _is_native(decoder: Decoder, head_dim: int) -> bool:
    return native.attends_heads(head_dim, decoder.dtype, decoder.device)


def _attended_natively(decoder: Decoder, kv_heads: int, head_dim: int) -> list[Tensor]:
    """What every position gathers: of a whole pass, of a prompt in chunks of uneven sizes, and of some decode steps one after the other."""
    config, length = decoder.config, min(_LENGTH, decoder.config.context)
    q_RHE = _noise(length, config.num_heads, head_dim, like=decoder.embedding)
    k_RKE, v_RKE = (_noise(length, kv_heads, head_dim, like=decoder.embedding, seed=seed) for seed in (1, 2))
    chunks = [0, *(stop for stop in (1, 36, 300) if stop < length), length]
    whole, prompt = [(0, 0, 0, length)], [(start, 0, start, stop - start) for start, stop in pairwise(chunks)]
    steps = [(position, 0, position, 1) for position in _POSITIONS if position < length]
    return [native.attend(q_RHE, k_RKE, v_RKE, native.Spans.of(spans))[0] for spans in (whole, prompt, steps)]


def _differing_natively(decoder: Decoder, kv_heads: int, head_dim: int) -> Iterator[int]:
    whole_RHE, prompt_RHE, steps_RHE = _attended_natively(decoder, kv_heads, head_dim)
    if not torch.equal(prompt_RHE, whole_RHE):
        yield int((prompt_RHE != whole_RHE).flatten(1).any(1).nonzero()[0])
    for position in _POSITIONS:
        if position < len(whole_RHE) and not torch.equal(steps_RHE[position], whole_RHE[position]):
            yield position


def _differing_positions(decoder: Decoder, kv_heads: int, head_dim: int) -> Iterator[int]:
    config = decoder.config
    length, group = min(_LENGTH, config.context), config.num_heads // kv_heads
    keys = KEY_PAD * 2
    q_1HLE = _noise(config.num_heads, length, head_dim, like=decoder.embedding)[None]
    k_1KSE = F.pad(_noise(kv_heads, length, head_dim, like=decoder.embedding), (0, 0, 0, keys - length))[None]
    v_1KSE = k_1KSE.flip(-1).contiguous()
    whole = _attend(q_1HLE, k_1KSE, v_1KSE, torch.arange(length))
    for position in _POSITIONS:
        if position >= length:
            continue
        near = KEY_PAD if position < KEY_PAD else keys
        # A decode step: the query heads of a group stand in the rows of their key head.
        q_1KGE = F.pad(q_1HLE[:, :, position].unflatten(1, (kv_heads, group)), (0, 0, 0, -group % ROW_PAD))
        mask = causal_mask(torch.tensor([position]), near, None, q_1HLE.dtype)
        step = F.scaled_dot_product_attention(q_1KGE, k_1KSE[:, :, :near], v_1KSE[:, :, :near], attn_mask=mask.expand(q_1KGE.shape[2], -1))
        if not torch.equal(step[:, :, :group].flatten(1, 2), whole[:, :, position]):
            yield position


def _attend(q_1HLE: Tensor, k_1KSE: Tensor, v_1KSE: Tensor, positions_L: Tensor) -> Tensor:
    mask = causal_mask(positions_L, k_1KSE.shape[2], None, q_1HLE.dtype)
    return F.scaled_dot_product_attention(q_1HLE, k_1KSE, v_1KSE, attn_mask=mask, enable_gqa=True)


def _recurrence(decoder: Decoder) -> Recurrence | None:
    return next((module for module in decoder.modules() if isinstance(module, Recurrence)), None)


def _chunks(mixer: Recurrence, decoder: Decoder) -> tuple[Tensor, Tensor]:
    """Rows of many chunks with those before them, and states."""
    config, most = mixer.config, max(_CHUNK_COUNTS)
    rows_NLX = _noise(most, config.conv_width - 1 + config.chunk_rows, config.row_width, like=decoder.norm)
    return rows_NLX, _noise(most, *config.state_shape, like=decoder.norm, seed=1).float()


def _state_failures(decoder: Decoder) -> Iterator[str]:
    """Of layers with a state: a chunk has its bits beside any others, and its rows theirs before any others."""
    if (mixer := _recurrence(decoder)) is None:
        return
    config, (rows_NLX, state_N) = mixer.config, _chunks(mixer, decoder)
    whole = mixer.inter_chunk(mixer.intra_chunk(rows_NLX), state_N, len(state_N))
    for count in _CHUNK_COUNTS:
        few = mixer.inter_chunk(mixer.intra_chunk(rows_NLX[:count]), state_N[:count], count)
        if not all(torch.equal(mine, theirs[:count]) for mine, theirs in zip(few, whole, strict=True)):
            yield f"{count} chunks of {config.chunk_rows} rows differ from those among {len(state_N)}"
    for known in (1, config.chunk_rows // 3, config.chunk_rows - 1):
        unfinished_NLX = rows_NLX.clone()
        unfinished_NLX[:, config.conv_width - 1 + known :] = 0
        begun_NTI = mixer.inter_chunk(mixer.intra_chunk(unfinished_NLX), state_N, 0).read_NTI
        if not torch.equal(begun_NTI[:, :known], whole.read_NTI[:, :known]):
            yield f"the first {known} rows of a chunk depend on those behind them"


class _Part(NamedTuple):
    """Something that is computed number by number, or row by row, of rows of a width."""

    name: str
    function: Callable[[Tensor], Tensor]
    width: int

    @property
    def counts(self) -> tuple[int, ...]:
        """Of rows."""
        return _ROW_COUNTS if self.width < 1 << 16 else _ROW_COUNTS[:2]


def _pointwise(decoder: Decoder) -> Iterator[_Part]:
    config = decoder.config
    yield _Part("the norm", lambda rows: rms_norm(rows, decoder.norm, 1e-6), config.hidden_size)
    for inner in _inner_sizes(decoder):
        yield _Part(f"the activation of {inner} inner values", ACTIVATIONS[config.activation], gate_up_rows(inner, config.activation))
    if (mixer := _recurrence(decoder)) is not None:
        inner, gated = mixer.config.inner, mixer.gated
        width = inner + mixer.config.projection_width
        yield _Part(f"the gate of a mixer, {inner} wide,", lambda rows: gated(rows[:, :inner].float(), rows[:, inner:]), width)
    if config.per_layer is not None:
        yield _Part(f"the gate of per-layer inputs, {config.per_layer.width} wide,", per_layer_gate, config.per_layer.width)
    if config.attention_gate:
        width = config.num_heads * config.head_dim
        yield _Part(f"the gate of attention, {width} wide,", torch.sigmoid, width)
    if config.logit_softcap is not None:
        yield _Part(f"the cap of {config.vocab_size} logits", lambda rows: capped(rows.float(), 1.0), config.vocab_size)


def _pointwise_failures(decoder: Decoder, counts: Sequence[int] = ()) -> Iterator[str]:
    """Kernels compute the last few numbers of a tensor, and of what a thread has of it, in another way than those before. `counts`: of rows."""
    for part in _pointwise(decoder):
        rows = _noise(max(part.counts), part.width, like=decoder.norm)
        whole = part.function(rows.clone())
        if not all(torch.equal(part.function(rows[:count].clone()), whole[:count]) for count in counts or part.counts):
            yield f"{part.name} depends on the number of rows"


def _inner_sizes(decoder: Decoder) -> list[int]:
    """Inner values of all MLPs and experts."""
    config, experts = decoder.config, decoder.config.experts
    sizes = {config.inner(layer) for layer in range(config.num_layers) if config.has_mlp(layer)}
    if experts is not None:
        sizes |= {experts.intermediate_size, experts.shared_size}
    return sorted(sizes - {0})


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
