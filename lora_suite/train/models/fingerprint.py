# SPDX-License-Identifier: Apache-2.0
"""A hash of weights, bit by bit, that is cheap enough to take in the middle of a training."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

import torch

WORDS_AT_ONCE = 2**24


def fingerprint(tensors: Iterable[tuple[str, torch.Tensor]]) -> str:
    """Hash named tensors: SHA-256 of their names, shapes, dtypes and one 64-bit checksum each.

    The checksums are computed where the tensors are, and one short copy brings them to the host. Any change
    of one word changes its tensor's checksum, and so does an exchange of two words. "" for no tensors.
    """
    named = list(tensors)
    if not named:
        return ""
    checksums = torch.stack([_checksum(tensor) for _, tensor in named]).tolist()
    digest = hashlib.sha256()
    for (name, tensor), checksum in zip(named, checksums, strict=True):
        digest.update(f"{name} {list(tensor.shape)} {tensor.dtype} {checksum}\n".encode())
    return digest.hexdigest()


def _checksum(tensor: torch.Tensor) -> torch.Tensor:
    """Sum of word · (2 · position + 1) over the tensor's 64-bit words, modulo 2^64 (an int64 scalar).

    An odd factor is invertible modulo 2^64, so that no single change is lost.
    """
    octets = tensor.detach().contiguous().view(-1).view(torch.uint8)
    missing = -octets.numel() % 8
    if missing or octets.storage_offset() % 8:
        octets = torch.nn.functional.pad(octets, (0, missing))
    words = octets.view(torch.int64)
    total = words.new_zeros(())
    for start in range(0, words.numel(), WORDS_AT_ONCE):
        part = words[start : start + WORDS_AT_ONCE]
        factors = torch.arange(start, start + part.numel(), device=words.device).mul_(2).add_(1)
        total += factors.mul_(part).sum()
    return total
