"""What every Triton kernel says of its own configurations, so that each can be compiled without a GPU."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

# How Triton's signatures spell the dtypes that the kernels take.
TRITON_DTYPES = {torch.float16: "fp16", torch.bfloat16: "bf16", torch.float32: "fp32"}


@dataclass(slots=True, frozen=True)
class CompileCase:
    """One configuration of a kernel, as a launch on a GPU would specialise it.

    name: unique among all cases, such as "write_kv fp16 d64". fn: the @triton.jit function.
    signature: the type of each argument in the notation of triton.tools.compile: "*fp16:16" is a pointer and "i32:16"
    an integer that 16 divides; "i32" may be any; "constexpr" stands for those in constexprs.
    """

    name: str
    fn: Any
    signature: Mapping[str, str]
    constexprs: Mapping[str, Any]
    num_warps: int
    num_stages: int
