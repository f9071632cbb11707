"""From hidden states to log-probabilities of tokens, in chunks of rows: the [R, V] logits of a batch never exist at once.

Shapes: R rows, D hidden, V vocabulary, K targets per row. Trainer and sampler use the same `logits` and the same reduction, so their numbers agree.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from bloomery.models.adapters import Factors, low_rank_add

_CHUNK_BYTES = 64 << 20


def logits(hidden_RD: Tensor, head_VD: Tensor, factors: Factors | None) -> Tensor:
    """Float32 logits [R, V]; R must be a multiple of `ROW_PAD` for batch-independent bits."""
    base_RV = F.linear(hidden_RD, head_VD)
    return (base_RV if factors is None else low_rank_add(base_RV, hidden_RD, factors)).float()


def token_logprobs(hidden_RD: Tensor, head_VD: Tensor, factors: Factors | None, targets_RK: Tensor) -> Tensor:
    """Log-probability [R, K] float32 of each target; gradients reach hidden, head and factors by recomputing each chunk."""
    a, b = factors if factors is not None else (None, None)
    result: Tensor = _TokenLogprobs.apply(hidden_RD, head_VD, a, b, targets_RK)  # type: ignore[no-untyped-call]
    return result


def _chunk_rows(vocab_size: int) -> int:
    return max(64, _CHUNK_BYTES // (4 * vocab_size) // 4 * 4)


class _TokenLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden_RD: Tensor, head_VD: Tensor, a: Tensor | None, b: Tensor | None, targets_RK: Tensor) -> Tensor:
        factors = Factors(a, b) if a is not None and b is not None else None
        out_RK = torch.empty(targets_RK.shape, dtype=torch.float32, device=hidden_RD.device)
        lse_R = torch.empty(hidden_RD.shape[0], dtype=torch.float32, device=hidden_RD.device)
        for start in range(0, hidden_RD.shape[0], _chunk_rows(head_VD.shape[0])):
            rows = slice(start, start + _chunk_rows(head_VD.shape[0]))
            logits_RV = logits(hidden_RD[rows], head_VD, factors)
            lse_R[rows] = torch.logsumexp(logits_RV, -1)
            out_RK[rows] = logits_RV.gather(1, targets_RK[rows]) - lse_R[rows, None]
        ctx.save_for_backward(hidden_RD, head_VD, a, b, targets_RK, lse_R)
        return out_RK

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        hidden_RD, head_VD, a, b, targets_RK, lse_R = ctx.saved_tensors
        factors = Factors(a, b) if a is not None else None
        grad_hidden = torch.empty_like(hidden_RD)
        grad_head = torch.zeros(head_VD.shape, dtype=torch.float32, device=head_VD.device) if ctx.needs_input_grad[1] else None
        grad_a = torch.zeros_like(a, dtype=torch.float32) if factors is not None else None
        grad_b = torch.zeros_like(b, dtype=torch.float32) if factors is not None else None
        for start in range(0, hidden_RD.shape[0], _chunk_rows(head_VD.shape[0])):
            rows = slice(start, start + _chunk_rows(head_VD.shape[0]))
            hidden, grad_RK = hidden_RD[rows], grads[0][rows]
            # d logp[t] / d logits = onehot(t) - softmax
            grad_RV = (logits(hidden, head_VD, factors) - lse_R[rows, None]).exp_().mul_(-grad_RK.sum(1, keepdim=True))
            grad_RV = grad_RV.scatter_add_(1, targets_RK[rows], grad_RK).to(hidden.dtype)
            grad_hidden[rows] = grad_RV @ head_VD
            if factors is not None:
                grad_low = grad_RV @ factors.b
                grad_hidden[rows] += grad_low @ factors.a
                grad_b += (grad_RV.t() @ F.linear(hidden, factors.a)).float()
                grad_a += (grad_low.t() @ hidden).float()
            if grad_head is not None:
                grad_head += (grad_RV.t() @ hidden).float()
        casts = (None if grad is None else grad.to(like.dtype) for grad, like in ((grad_head, head_VD), (grad_a, a), (grad_b, b)))
        return grad_hidden, *casts, None
