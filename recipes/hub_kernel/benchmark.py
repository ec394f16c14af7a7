"""Capped causal attention, forward: `kernels benchmark FOLDER`, or with the name of the repository."""

import torch
from kernels.benchmark import Benchmark


class CappedAttention(Benchmark):
    """A layer like Gemma 2's: heads of 256 columns, two queries' heads for each key's, a cap of 50."""

    seed = 0

    def setup(self):
        size = 4096 if self.device == "cuda" else 512
        dtype = torch.bfloat16 if self.device == "cuda" else torch.float32
        q, k, v = (torch.randn(1, heads, size, 256, device=self.device, dtype=dtype) for heads in (8, 4, 4))
        self.heads = q, k, v
        self.out = torch.empty_like(q.transpose(1, 2))

    def benchmark_causal(self):
        with torch.no_grad():
            out, _ = self.kernel.flash_attn_forward(torch.nn.Module(), *self.heads, None, softcap=50.0)
        self.out.copy_(out)

    def verify_causal(self):
        q, k, v = (x.float() for x in self.heads)
        k, v = (x.repeat_interleave(2, 1) for x in (k, v))
        logits = 50.0 * torch.tanh(q @ k.transpose(2, 3) * q.shape[-1] ** -0.5 / 50.0)
        hidden = torch.ones(logits.shape[2:], dtype=torch.bool, device=q.device).triu(1)
        weights = torch.softmax(logits.masked_fill(hidden, float("-inf")), -1)
        return (weights @ v).transpose(1, 2).to(self.out.dtype)
