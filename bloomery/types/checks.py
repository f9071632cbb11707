"""What can be refused before it is computed: pure functions over wire types, whose errors name the field as the caller knows it.

The door checks everything; behind it the engine trusts what it gets. Shapes: N tokens of a datum, K soft targets per token.
"""

import math
from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any, Final, Protocol

import numpy as np
from numpy.typing import NDArray

from bloomery.types.arrays import Array
from bloomery.types.custom_loss import LOGPROBS, CustomLoss, check_custom_loss
from bloomery.types.errors import InvalidInput, shown
from bloomery.types.generation import Generate, PromptTargets, SamplingParams
from bloomery.types.losses import COLDEST, CUSTOM, HOTTEST, LOSSES, TARGETS, LossForm, Option
from bloomery.types.operations import AdamParams, Datum, ForwardBackward
from bloomery.types.routing import RoutingShape, check_routing, check_routing_weights

MAX_SEED: Final = (1 << 63) - 1
MIN_SEED: Final = -MAX_SEED - 1
"""Of samples; a run begins at one from 0."""
MAX_SAMPLES: Final = 1024
MAX_PENALTY: Final = 2.0
"""Of presence and frequency, as OpenAI bounds it, to both sides."""
MIN_REPETITION_PENALTY: Final = 0.01
MAX_REPETITION_PENALTY: Final = 100.0
"""Beyond either, logits of float32 could overflow."""
MAX_BIAS: Final = 100.0
"""As OpenAI bounds it, to both sides."""
MAX_TARGETS: Final = 1 << 24
"""Targets of one operation, soft ones each counted: their log-probabilities and terms go through one message."""
MAX_CELLS: Final = 1 << 23
"""Log-probabilities of other tokens than those of the prompt and the samples, of one kind and in one answer."""
MAX_EXPERTS_TOLD: Final = 1 << 25
"""Numbers of experts in one answer, and of their weights: half of what a request that gives them back may hold."""
MAX_DATA: Final = 1 << 13
"""Of one operation: what is done for each of them, however short, is done in one turn of the engine. `client/config` tells the SDK."""
MAX_DRAFTED: Final = 1 << 22
"""Tokens of all drafts of one request, each of which is read as a token of a prompt is."""
MAX_SOFT_TARGETS: Final = 256
"""Of a position: the rows of a micro-batch are all as wide as its widest datum."""
MAX_LEARNING_RATE: Final = 100.0
"""AdamW moves a weight by about the learning rate: far more than this overflows float32 within a few steps, and nothing brings the weights back."""
MIN_EPS: Final = 1e-30
"""Below, float32 rounds it to 0, and a weight without gradient would become nan."""


class Bounds(Protocol):
    """What bounds token ids, lengths and routing: a model's size."""

    @property
    def context(self) -> int:
        """Tokens of the longest sequence."""
        ...

    @property
    def vocab_size(self) -> int:
        """One more than the largest token id."""
        ...

    @property
    def routing(self) -> RoutingShape | None:
        """Of a mixture of experts."""
        ...


def check_seed(seed: int) -> None:
    """A seed that every place it goes to can hold."""
    if not 0 <= seed <= MAX_SEED:
        raise InvalidInput(f"`seed` is {seed}: it must be between 0 and {MAX_SEED}", field="seed")


def check_adam(adam: AdamParams) -> None:
    """Numbers that cannot spoil a run by themselves."""
    _check_number("learning_rate", adam.learning_rate, most=MAX_LEARNING_RATE)
    for name in ("beta1", "beta2"):
        if not 0 <= (value := getattr(adam, name)) < 1:
            raise InvalidInput(f"`{name}` is {value}: it must be at least 0 and below 1", field=name)
    _check_number("eps", adam.eps, least=MIN_EPS)
    _check_number("grad_clip_norm", adam.grad_clip_norm)
    _check_number("weight_decay", adam.weight_decay)
    if adam.weight_decay * adam.learning_rate > 1:
        message = f"`weight_decay` times `learning_rate` is {adam.weight_decay * adam.learning_rate}: above 1 it turns every weight around, lower it"
        raise InvalidInput(message, field="weight_decay")


def check_generate(generate: Generate, size: Bounds) -> None:
    """A prompt of the model's tokens that leaves room, and numbers that mean something."""
    params, prompt = generate.params, generate.prompt
    if not MIN_SEED <= params.seed <= MAX_SEED:
        raise InvalidInput(f"`seed` is {params.seed}: it must be a number of 64 bits", field="seed")
    if len(prompt.shape) != 1 or prompt.shape[0] == 0 or prompt.dtype == "float32":
        raise InvalidInput(f"the prompt is {prompt.dtype}{list(prompt.shape)}: it needs at least one token id, integers [P]", field="prompt")
    _check_ids(prompt.numpy(), "the prompt", "prompt", size)
    _check_whole("max_tokens", params.max_tokens, least=0)
    if prompt.shape[0] > (most := size.context - (params.max_tokens > 0)):
        problem = f"a prompt of {prompt.shape[0]} tokens leaves no room in the model's context of {size.context}"
        raise InvalidInput(f"{problem}: shorten it to at most {most}", field="prompt")
    _check_distribution(params, size)
    _check_whole("num_samples", generate.num_samples, least=1, most=MAX_SAMPLES)
    if params.max_tokens == 0 and generate.num_samples != 1:
        raise InvalidInput("`max_tokens` 0 only scores the prompt: set `num_samples` to 1", field="num_samples")
    if generate.embed and ((params.max_tokens, generate.num_samples) != (1, 1) or generate.scores_prompt or generate.routing):
        raise InvalidInput("`embed` samples and scores nothing: set `max_tokens` and `num_samples` to 1, and ask for nothing else", field="embed")
    _check_begun(generate, size)
    _check_drafts(generate, size)
    _check_whole("top_logprobs", generate.top_logprobs, least=0, most=size.vocab_size)
    _check_whole("prompt_top_k", generate.prompt_top_k, least=0, most=size.vocab_size)
    _check_whole("prompt_draws", generate.prompt_draws, least=0)
    _check_whole("scored_from", generate.scored_from, least=1, most=prompt.shape[0])
    _check_scored_temperature(generate)
    if generate.targets is not None:
        _check_prompt_targets(generate.targets, prompt.shape[0], size)
    _check_widths(generate, size)


def _check_distribution(params: SamplingParams, size: Bounds) -> None:
    _check_number("temperature", params.temperature)
    if not 0 < params.top_p <= 1:
        raise InvalidInput(f"`top_p` is {params.top_p}: it must be above 0 and at most 1", field="top_p")
    _check_whole("top_k", params.top_k, least=0)
    _check_number("min_p", params.min_p, most=1)
    _check_number("presence_penalty", params.presence_penalty, least=-MAX_PENALTY, most=MAX_PENALTY)
    _check_number("frequency_penalty", params.frequency_penalty, least=-MAX_PENALTY, most=MAX_PENALTY)
    _check_number("repetition_penalty", params.repetition_penalty, least=MIN_REPETITION_PENALTY, most=MAX_REPETITION_PENALTY)
    _check_whole("min_tokens", params.min_tokens, least=0, most=params.max_tokens)
    if params.min_tokens and params.stop_tokens:
        _check_ids(np.array(params.stop_tokens), "`stop_token_ids`", "stop_token_ids", size)
    if params.logit_bias:
        tokens, biases = zip(*params.logit_bias, strict=True)
        _check_ids(np.array(tokens), "`logit_bias`", "logit_bias", size)
        if len(set(tokens)) < len(tokens):
            raise InvalidInput("`logit_bias` names a token twice: give each one bias", field="logit_bias")
        for bias in biases:
            _check_number("logit_bias", bias, least=-MAX_BIAS, most=MAX_BIAS)


def _check_scored_temperature(generate: Generate) -> None:
    temperature = generate.scored_temperature
    _check_number("scored_temperature", temperature, least=COLDEST, most=HOTTEST)
    if temperature != 1 and not generate.scores_prompt:
        raise InvalidInput(
            "`scored_temperature` is of the prompt's log-probabilities, of which nothing is asked: ask for them, or leave it out",
            field="scored_temperature",
        )


def _check_begun(generate: Generate, size: Bounds) -> None:
    if not any(generate.begun):
        return
    longest = max(map(len, generate.begun))
    if generate.scores_prompt or generate.routing or len(generate.begun) != generate.num_samples or longest >= generate.params.max_tokens:
        raise InvalidInput("`begun` is for each sample what it has of its tokens but the last, where nothing is asked of the prompt", field="begun")
    _check_ids(_joined(generate.begun), "`begun`", "begun", size)


def _check_drafts(generate: Generate, size: Bounds) -> None:
    if not generate.drafts:
        return
    if len(generate.drafts) != generate.num_samples:
        message = f"`drafts` are {len(generate.drafts)} for {generate.num_samples} samples: give one for each, an empty one where there is none"
        raise InvalidInput(message, field="drafts")
    longest, room = max(map(len, generate.drafts)), min(generate.params.max_tokens, size.context - generate.prompt.shape[0])
    if longest > room:
        raise InvalidInput(f"`drafts` holds one of {longest} tokens, but a sample has {room} at most: cut it", field="drafts")
    if longest and generate.embed:
        raise InvalidInput("`drafts` are for samples, and `embed` samples nothing: leave them out", field="drafts")
    if (drafted := sum(map(len, generate.drafts))) > MAX_DRAFTED:
        raise InvalidInput(
            f"`drafts` are {drafted} tokens in all, at most {MAX_DRAFTED} are read at a time: cut them, or ask in parts", field="drafts"
        )
    if longest:
        _check_ids(_joined(generate.drafts), "`drafts`", "drafts", size)


def _joined(samples: Sequence[Sequence[int]]) -> NDArray[np.int64]:
    return np.fromiter(chain.from_iterable(samples), np.int64, count=sum(map(len, samples)))


def _check_prompt_targets(targets: PromptTargets, length: int, size: Bounds) -> None:
    positions, ids = targets.positions.numpy(), targets.ids.numpy()
    if positions.ndim != 1 or positions.shape != ids.shape or not positions.size or "float32" in (targets.positions.dtype, targets.ids.dtype):
        raise InvalidInput("`targets` has no token to score: it needs at least one id, and a position for each", field="targets")
    if positions[0] < 1 or positions[-1] >= length or np.any(np.diff(positions) < 0):
        problem = f"`targets` has positions that do not rise from 1 to {length - 1}, the end of the prompt"
        raise InvalidInput(f"{problem}: sort them, and leave out those of no token behind the first", field="targets")
    _check_ids(ids, "`targets`", "targets", size)


def _check_widths(generate: Generate, size: Bounds) -> None:
    """What one answer holds stays within one message."""
    length = generate.prompt.shape[0]
    sampled = generate.num_samples * min(generate.params.max_tokens, size.context - length)
    asked = {
        "prompt_top_k": length * generate.prompt_top_k,
        "prompt_draws": length * generate.prompt_draws,
        "targets": 0 if generate.targets is None else generate.targets.ids.shape[0],
        "top_logprobs": sampled * generate.top_logprobs,
    }
    for field, cells in asked.items():
        _check_width(field, cells, MAX_CELLS)
    if (generate.routing or generate.routing_weights) and size.routing is None:
        field = "routing" if generate.routing else "routing_weights"
        raise InvalidInput(f"`{field}`: this model has no experts, leave it out", field=field)
    if generate.routing_weights and not generate.routing:
        raise InvalidInput("`routing_weights` belong to experts, which were not asked for: ask for the routing too", field="routing_weights")
    if generate.routing and size.routing is not None:
        numbers = (length + sampled) * len(size.routing.sparse_layers) * size.routing.top_k
        _check_width("routing", numbers * (2 if generate.routing_weights else 1), MAX_EXPERTS_TOLD)


def _check_width(field: str, numbers: int, most: int) -> None:
    if numbers > most:
        raise InvalidInput(f"`{field}` asks for {numbers} numbers, at most {most} are given at a time: ask for fewer", field=field)


def check_forward_backward(operation: ForwardBackward, size: Bounds) -> None:
    """A known loss with options of its own, and data that fit it and the model."""
    form = _form(operation)
    if form is not None:
        _check_options(operation.loss, form, operation.loss_config)
    if not operation.data:
        raise InvalidInput("data is empty: send at least one datum", field="data")
    if len(operation.data) > MAX_DATA:
        raise InvalidInput(f"`data` has {len(operation.data)} data, at most {MAX_DATA} are taken at a time: send it in parts", field="data")
    for index, datum in enumerate(operation.data):
        _check_tokens(datum, f"data[{index}].model_input", size)
        if form is not None:
            _check_inputs(datum, f"data[{index}].loss_fn_inputs", operation.loss, form, size)
        elif operation.custom is not None:
            _check_custom_inputs(datum, f"data[{index}].loss_fn_inputs", operation.custom, size)
        _check_routing(datum, f"data[{index}].loss_fn_inputs", size)
    if operation.return_routing and size.routing is None:
        raise InvalidInput("`return_routing`: this model has no experts, leave it out", field="loss_fn_config.return_routing")
    if operation.return_routing_weights and not operation.return_routing:
        message = "`return_routing_weights`: weights are told beside the experts that they belong to, ask for `return_routing` too"
        raise InvalidInput(message, field="loss_fn_config.return_routing_weights")
    if not operation.return_logprobs and operation.custom is not None:
        message = "`return_logprobs`: a custom loss is computed from all log-probabilities, so leaving them out saves nothing; leave out the option"
        raise InvalidInput(message, field="loss_fn_config.return_logprobs")
    if operation.return_routing and size.routing is not None:
        rows = sum(datum.tokens.shape[0] for datum in operation.data)
        numbers = rows * len(size.routing.sparse_layers) * size.routing.top_k * (2 if operation.return_routing_weights else 1)
        _check_width("loss_fn_config.return_routing", numbers, MAX_EXPERTS_TOLD)
    targets = sum(math.prod(datum.inputs[TARGETS].shape) for datum in operation.data)
    if targets > MAX_TARGETS:
        raise InvalidInput(f"`data` has {targets} targets, at most {MAX_TARGETS} are taken at a time: send it in parts", field="data")


def _form(operation: ForwardBackward) -> LossForm | None:
    """Of a loss of ours; None for one that comes with the operation."""
    if operation.loss == CUSTOM and operation.custom is not None:
        check_custom_loss(operation.custom)
        if operation.loss_config:
            raise InvalidInput("a custom loss has no options: leave out `loss_config`", field="loss_fn_config")
        return None
    if operation.loss == CUSTOM:
        what = "name it by `loss_id` (`create_custom_loss` gives that), or have `forward_backward_custom` compute it on your side"
        raise InvalidInput(f"a custom loss must come with its definition: {what}", field="loss_fn_config.loss_id")
    if operation.custom is not None:
        raise InvalidInput(f"loss `{operation.loss}` takes no definition: leave out `custom`", field="custom")
    return _known(operation.loss)


_RETURNS: Final = "return_logprobs, return_routing and return_routing_weights"


def _known(loss: str) -> LossForm:
    if loss not in LOSSES:
        raise InvalidInput(f"unknown loss `{shown(loss)}`: use one of {', '.join(LOSSES)}", field="loss_fn")
    return LOSSES[loss]


def _check_options(loss: str, form: LossForm, config: Mapping[str, float | str]) -> None:
    for name, value in sorted(config.items()):
        called = shown(name)
        field = f"loss_fn_config.{called}"
        if name not in form.options:
            raise InvalidInput(f"`{field}`: loss `{loss}` has no option `{called}`; it has {', '.join(form.options)}, and {_RETURNS}", field=field)
        if isinstance(value, str):
            raise InvalidInput(f"`{field}` is the text `{shown(value)}`: it must be a number", field=field)
        option = form.options[name]
        if not option.least <= value <= option.most:
            raise InvalidInput(f"`{field}` is {value}: {_range(option)}", field=field)


def _check_tokens(datum: Datum, field: str, size: Bounds) -> None:
    tokens = datum.tokens
    if len(tokens.shape) != 1 or tokens.shape[0] == 0 or tokens.dtype == "float32":
        raise InvalidInput(f"`{field}` is {tokens.dtype}{list(tokens.shape)}: it needs at least one token id, integers [N]", field=field)
    if tokens.shape[0] > size.context:
        raise InvalidInput(f"`{field}` has {tokens.shape[0]} tokens, the model's context is {size.context}: shorten it", field=field)
    _check_ids(tokens.numpy(), f"`{field}`", field, size)


def _check_routing(datum: Datum, where: str, size: Bounds) -> None:
    routing, weights, tokens = datum.routing, datum.routing_weights, datum.tokens.shape[0]
    if routing is not None:
        check_routing(routing, tokens, size.routing, f"{where}.routing")
    if weights is not None:
        check_routing_weights(weights, routing, tokens, size.routing, f"{where}.routing_weights")


def _check_inputs(datum: Datum, where: str, loss: str, form: LossForm, size: Bounds) -> None:
    _check_names(datum, where, loss, form)
    targets = datum.inputs[TARGETS]
    _check_targets(targets, f"{where}.{TARGETS}", datum.tokens.shape[0], size, soft=form.soft_targets)
    for name, values in datum.inputs.items():
        if name != TARGETS:
            _check_floats(values, f"{where}.{name}", targets.shape)
    _check_per_token(datum, where, form)
    _check_masks(datum, where, form)


def _check_custom_inputs(datum: Datum, where: str, loss: CustomLoss, size: Bounds) -> None:
    """Each input at its declared rank. Those that the loss does not read may be there: one batch serves several losses, and they are dropped."""
    for given in loss.inputs:
        name = TARGETS if given.name == LOGPROBS else given.name
        if name not in datum.inputs:
            raise InvalidInput(f"`{where}` lacks `{shown(name)}`, which loss `{loss.name:.64}` takes", field=f"{where}.{shown(name)}")
        shape = datum.inputs[name].shape
        if len(shape) != given.rank and not (given.rank == 0 and shape == (1,)):
            called = f"{where}.{shown(name)}"
            message = f"`{called}` has rank {len(shape)}, but loss `{loss.name:.64}` declares `{shown(given.name)}` with rank {given.rank}"
            raise InvalidInput(message, field=called)
    _check_targets(datum.inputs[TARGETS], f"{where}.{TARGETS}", datum.tokens.shape[0], size, soft=True)


def _check_names(datum: Datum, where: str, loss: str, form: LossForm) -> None:
    required = (TARGETS, *form.inputs)
    takes = f"loss `{loss}` takes {', '.join(required)}" + (f", and optionally {', '.join(form.optional)}" if form.optional else "")
    for name in required:
        if name not in datum.inputs:
            raise InvalidInput(f"`{where}` lacks `{name}`: {takes}", field=f"{where}.{name}")
    for name in sorted(datum.inputs):
        if name not in required and name not in form.optional:
            raise InvalidInput(f"`{where}` has `{shown(name)}`: {takes}", field=f"{where}.{shown(name)}")


def _check_targets(targets: Array, where: str, length: int, size: Bounds, *, soft: bool) -> None:
    expected = f"[{length}] or [{length}, K]" if soft else f"[{length}]"
    shape = targets.shape
    if targets.dtype == "float32" or len(shape) not in ((1, 2) if soft else (1,)) or shape[0] != length or 0 in shape:
        raise InvalidInput(f"`{where}` is {targets.dtype}{list(shape)}, expected integers {expected}", field=where)
    if len(shape) == 2 and shape[1] > MAX_SOFT_TARGETS:
        raise InvalidInput(f"`{where}` has {shape[1]} targets per position, at most {MAX_SOFT_TARGETS} are taken: keep the likeliest", field=where)
    _check_ids(targets.numpy(), f"`{where}`", where, size)


def _check_floats(values: Array, where: str, shape: tuple[int, ...]) -> None:
    if values.dtype != "float32" or values.shape != shape:
        raise InvalidInput(f"`{where}` is {values.dtype}{list(values.shape)}, expected float32{list(shape)}", field=where)
    if not (finite := np.isfinite(values.numpy())).all():
        place = np.argwhere(~finite)[0]
        problem = f"`{where}` holds a value that is not finite ({values.numpy()[tuple(place)]} at {place.tolist()})"
        raise InvalidInput(f"{problem}: send a number there, or leave the datum out", field=where)


def _check_per_token(datum: Datum, where: str, form: LossForm) -> None:
    """Options in tensors keep the bounds of the option, except where a token takes no part: there anything may stand as padding."""
    active = datum.inputs[form.factor].numpy() != 0
    for name, option in form.options.items():
        if option.per_token and name in datum.inputs:
            values = datum.inputs[name].numpy()
            if (wrong := values[active & ~((values >= option.least) & (values <= option.most))]).size:
                raise InvalidInput(f"`{where}.{name}` holds {wrong[0]}: {_range(option)}", field=f"{where}.{name}")


def _check_masks(datum: Datum, where: str, form: LossForm) -> None:
    for name in form.masks:
        if name in datum.inputs and datum.inputs[form.factor].numpy().any() and not datum.inputs[name].numpy().any():
            message = f"`{where}.{name}` marks no token, but `{form.factor}` is not 0 everywhere: mark the sampled tokens"
            raise InvalidInput(message, field=f"{where}.{name}")


def _check_ids(ids: NDArray[Any], what: str, field: str, size: Bounds) -> None:
    if ids.min() < 0 or ids.max() >= size.vocab_size:
        worst = ids.min() if ids.min() < 0 else ids.max()
        raise InvalidInput(f"{what} holds token id {worst}: ids are from 0 to {size.vocab_size - 1}", field=field)


def _check_number(name: str, value: float, *, least: float = 0.0, most: float = math.inf) -> None:
    if not (math.isfinite(value) and least <= value <= most):
        limit = f" and at most {most:g}" if most < math.inf else ""
        raise InvalidInput(f"`{name}` is {value}: it must be a finite number of at least {least:g}{limit}", field=name)


def _check_whole(name: str, value: int, *, least: int, most: int | None = None) -> None:
    if value < least or (most is not None and value > most):
        raise InvalidInput(f"`{name}` is {value}: it must be at least {least}" + (f" and at most {most}" if most is not None else ""), field=name)


def _range(option: Option) -> str:
    says = f"it must be from {option.least:g} to {option.most:g}"
    return says + (", an absolute ratio (1.2, not 0.2)" if option.per_token else "")
