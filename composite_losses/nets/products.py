"""Linear products of several parameter sets at once."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

Index = Tensor | None
# Least multiply-adds of one product, and least rows of a part, for which cutting products pays.
CUT_WORK = 2**24
CUT_ROWS = 256


def chosen(parameter: Tensor, index: Index) -> Tensor:
    """Returns one parameter block per row block: the parameter itself, or picked by set."""
    return parameter if index is None else parameter.index_select(0, index)


def products(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Returns the products ``[M, N, in]`` → ``[M, N, out]``, or any ``[..., in]`` if M is 1.

    Args:
        x: the activations.
        weight: ``[M, out, in]``.
        bias: ``[M, out]`` or None.
    """
    if weight.shape[0] == 1:
        if bias is None:
            return F.linear(x, weight.squeeze(0))
        if x.ndim == 2 and not x.is_cuda:
            # one view less, forward and backward; on CUDA only linear fuses the bias
            return torch.addmm(bias, x, weight.squeeze(0).t())
        return F.linear(x, weight.squeeze(0), bias.squeeze(0))
    # sizes may be symbols under compile and export, and must not decide there
    parts = 1 if torch.compiler.is_compiling() else even_parts(x, weight.shape[1])
    if parts > 1:
        x = x.unflatten(1, (parts, -1)).flatten(0, 1)
        weight = weight.repeat_interleave(parts, 0)
        bias = None if bias is None else bias.repeat_interleave(parts, 0)
    matrix = weight.transpose(1, 2)
    y = torch.bmm(x, matrix) if bias is None else torch.baddbmm(bias.unsqueeze(1), x, matrix)
    return y if parts == 1 else y.unflatten(0, (-1, parts)).flatten(1, 2)


def even_parts(x: Tensor, out_features: int) -> int:
    """Returns into how many parts to cut the rows of a batched product so that no thread idles.

    On the CPU a thread computes whole products where there are more of them than threads: 3 on 2
    threads take as long as 4; cut in two they are 6. The parts have weights of their own, copies,
    which pays where the products are large. Sizes decide, never values.

    Args:
        x: the activations ``[M, N, in]``.
        out_features: features of the products.
    """
    if x.numel() * out_features < CUT_WORK * x.shape[0] or x.device.type != "cpu":
        return 1
    threads, (blocks, rows) = torch.get_num_threads(), x.shape[:2]
    parts = threads // math.gcd(blocks, threads)
    pays = blocks > threads and rows % parts == 0 and rows >= CUT_ROWS * parts
    return parts if pays else 1
