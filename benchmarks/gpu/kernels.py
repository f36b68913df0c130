"""The time of a step by kind of kernel, from PyTorch's profiler."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable

from torch.profiler import ProfilerActivity, profile

# The kind is the first that matches the name of the kernel, or of an operation that launched it, innermost first.
KINDS = {
    "attention": r"flex_attention|flash|fmha|scaled_dot_product|_attention",
    "optimizer": r"adam|multi_tensor|foreach|Optimizer\.step|clip_grad",
    "matmul": r"gemm|cutlass|nvjet|cublas|xmma|aten::(add)?(b?mm|mv)\b|aten::linear$|aten::matmul$|mkldnn_linear",
    "head and softmax": r"Scores|softmax|logsumexp|linear_log_?prob",
    "copies": r"memcpy|memset|aten::(copy_|cat|clone|contiguous|index_select|fill_|zero_)$",
}
REST = "element-wise and the rest"


def kind_of(names: Iterable[str]) -> str:
    """The kind of a kernel, from its own name and the names of the operations around it, innermost first."""
    for name in names:
        for kind, pattern in KINDS.items():
            if re.search(pattern, name, re.IGNORECASE):
                return kind
    return REST


def kinds(step: Callable[[], None], on_card: bool) -> dict[str, float]:
    """The share of each kind in the time of one step's kernels (on a CPU: of its operations), largest first."""
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_card else [])]
    with profile(activities=activities) as profiler:
        step()
    spent: dict[str, float] = {}
    for event in profiler.events() or ():
        around, parent = [event.name], event.cpu_parent
        while parent is not None:
            around.append(parent.name)
            parent = parent.cpu_parent
        if on_card:
            for kernel in event.kernels:
                kind = kind_of([kernel.name, *around])
                spent[kind] = spent.get(kind, 0.0) + kernel.duration
        else:
            kind = kind_of(around)
            spent[kind] = spent.get(kind, 0.0) + event.self_cpu_time_total
    total = sum(spent.values())
    return {kind: spent[kind] / total for kind in sorted(spent, key=lambda kind: -spent[kind])} if total else {}
