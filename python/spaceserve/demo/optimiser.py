"""AdamW over one flat buffer: float32 masters and moving average, working weights in the dtype that is served."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class FlatAdamW:
    """Owns the parameters of `module`, whose data and gradients become views of flat buffers.

    The forward and backward passes run in `dtype` throughout, as the server does, so that what is evaluated is what
    was trained; sums are kept in float32. A handful of kernels per step, whatever the number of parameters.
    """

    def __init__(
        self,
        module: nn.Module,
        dtype: torch.dtype,
        betas: tuple[float, float] = (0.9, 0.98),
        weight_decay: float = 0.02,
        ema_decay: float = 0.999,
        max_norm: float = 1.0,
    ) -> None:
        self.parameters = dict(module.named_parameters())
        self.betas, self.ema_decay, self.max_norm = betas, ema_decay, max_norm
        self.master = torch.cat([p.detach().float().flatten() for p in self.parameters.values()])
        self.ema = self.master.clone()
        self.work = self.master.to(dtype, copy=True)
        self.grad = torch.zeros_like(self.work)
        self.mean = torch.zeros_like(self.master)
        self.square = torch.zeros_like(self.master)
        self.decay = torch.zeros_like(self.master)
        self.trained = torch.ones_like(self.master)
        self.slices: dict[str, slice] = {}
        self.num_steps = 0
        offset = 0
        for name, parameter in self.parameters.items():
            part = slice(offset, offset + parameter.numel())
            self.slices[name] = part
            offset = part.stop
            parameter.data = self.work[part].view(parameter.shape)
            parameter.grad = self.grad[part].view(parameter.shape)
            if parameter.ndim > 1:
                self.decay[part] = weight_decay

    def restart(self, prefixes: tuple[str, ...]) -> None:
        """Forget the moments, and train from now on only the parameters whose names start with a prefix."""
        self.num_steps = 0
        self.mean.zero_()
        self.square.zero_()
        for name, part in self.slices.items():
            self.trained[part] = float(name.startswith(prefixes))

    def load(self, master: Tensor) -> None:
        """Replace the weights by a flat float32 vector in the order of `named_parameters`; if it is shorter, the first
        of them."""
        for weights in (self.master, self.ema, self.work):
            weights[: len(master)].copy_(master)

    @torch.no_grad()
    def step(self, learning_rate: float) -> Tensor:
        """Apply the gradients and zero them; return their norm before clipping, without waiting for it."""
        self.num_steps += 1
        beta1, beta2 = self.betas
        grad = self.grad.float()
        norm = grad.norm()
        # A step with a broken gradient is left out: zero moves nothing but the moments' decay.
        scale = torch.where(norm.isfinite(), (self.max_norm / (norm + 1e-6)).clamp(max=1.0), norm.new_zeros(()))
        grad = grad.nan_to_num_(0.0, 0.0, 0.0).mul_(scale)
        self.mean.lerp_(grad, 1 - beta1)
        self.square.mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
        correction1 = 1 - beta1**self.num_steps
        correction2 = 1 - beta2**self.num_steps
        update = (self.mean / correction1) / ((self.square / correction2).sqrt_() + 1e-8)
        update.addcmul_(self.decay, self.master).mul_(self.trained)
        self.master.add_(update, alpha=-learning_rate)
        self.work.copy_(self.master)
        self.grad.zero_()
        # A young average would hold on to the first weights.
        self.ema.lerp_(self.master, 1 - min(self.ema_decay, (1 + self.num_steps) / (10 + self.num_steps)))
        return norm

    def averaged(self, prefix: str) -> dict[str, Tensor]:
        """Return the averaged float32 weights whose names start with `prefix`, which is cut off."""
        return {
            name[len(prefix) :]: self.ema[part].view(self.parameters[name].shape)
            for name, part in self.slices.items()
            if name.startswith(prefix)
        }
