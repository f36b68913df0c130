"""AdamW in CPU memory: masters, moments and gradients are moved off the GPU, which keeps only the weights.

In bfloat16 the GPU then has 2 bytes per trained parameter instead of 18 (weight 2, master 4, moments 8, gradient 4).
Each pack's gradients are transferred during backward and summed on the CPU in float32; the step is torch's fused AdamW
there; rounded weights are copied back. The idea is ZeRO-Offload's (arXiv 2101.06840).
"""

from concurrent.futures import Future, ThreadPoolExecutor

import torch
from torch import Tensor, nn

from posttrain.optim.adamw import AdamW


class AdamWCPUOffload(AdamW):
    """AdamW whose masters, moments and gradients are in CPU memory, wherever the model computes.

    Same updates as `AdamW` and the same saved state, so that a run can be resumed with either.
    """

    def __init__(self, model: nn.Module, compute_dtype: torch.dtype, *, device: torch.device, **settings):
        """`device` is where the model will compute; pass the model in CPU memory, so that float32 weights never fill
        it."""
        self._device = device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._buffers: dict[str, Tensor] = {}
        self._sums: dict[str, Tensor] = {}
        # A thread of its own adds the gradients, so that backward's thread can keep launching work on the GPU.
        self._adder = ThreadPoolExecutor(1, "gradients") if self._stream is not None else None
        self._adding: dict[str, Future[None]] = {}
        super().__init__(model, compute_dtype, **settings)
        model.to(device)

    def _adopt(self, name: str, parameter: Tensor, compute_dtype: torch.dtype) -> Tensor:
        def in_cpu_memory(dtype: torch.dtype, pin_memory: bool = False) -> Tensor:
            return torch.empty_like(parameter, dtype=dtype, device="cpu", pin_memory=pin_memory, requires_grad=False)

        # Transfers are in the model's dtype, which halves the traffic of bfloat16, and page-locked, so that the GPU
        # does not wait. One buffer serves both directions: gradients arrive before a step, weights leave after it.
        self._buffers[name] = in_cpu_memory(compute_dtype, pin_memory=self._stream is not None)
        self._sums[name] = in_cpu_memory(torch.float32)
        master = in_cpu_memory(torch.float32).copy_(parameter.detach())
        parameter.data = parameter.data.to(self._device, compute_dtype)
        parameter.register_post_accumulate_grad_hook(lambda p: self._fetch(name, p))
        return master

    def _fetch(self, name: str, parameter: Tensor) -> None:
        """Start the transfer of a parameter's new gradient; waits for the previous pack's, which is usually done."""
        self._take(name)
        grad = parameter.grad
        assert grad is not None
        arrived = None
        if self._stream is None:
            self._buffers[name].copy_(grad)
        else:
            self._stream.wait_stream(torch.cuda.current_stream(self._device))
            with torch.cuda.stream(self._stream):
                self._buffers[name].copy_(grad, non_blocking=True)
                arrived = self._stream.record_event(torch.cuda.Event(blocking=True))  # waiting for it uses no CPU
            grad.record_stream(self._stream)  # its memory is not reused before it has been read
        parameter.grad = None
        if self._adder is None:
            self._add(name, arrived)
        else:
            self._adding[name] = self._adder.submit(self._add, name, arrived)

    @torch.no_grad()
    def _add(self, name: str, arrived: torch.Event | None) -> None:
        """Add the transferred gradient to its master's."""
        if arrived is not None:
            arrived.synchronize()
        master = self.masters[name]
        if master.grad is None:
            master.grad = self._sums[name].copy_(self._buffers[name])
        else:
            master.grad += self._buffers[name]

    def _take(self, name: str) -> None:
        """Wait until a pending gradient is added, if there is one."""
        if adding := self._adding.pop(name, None):
            adding.result()

    def _collect(self) -> None:
        for name in self.masters:
            self._take(name)

    def _publish(self, name: str) -> None:
        # Rounded on the CPU. The buffer is next written by a gradient, in a stream that waits for this copy, or here
        # after one has arrived.
        self._buffers[name].copy_(self.masters[name])
        self.parameters[name].copy_(self._buffers[name], non_blocking=True)

    def forget(self) -> None:
        self._collect()
        super().forget()
