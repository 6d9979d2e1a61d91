"""The architectures that the decoder covers, and what differs between them."""

from dataclasses import dataclass
from typing import Literal

from radixserve.errors import ModelLoadError


@dataclass(frozen=True, slots=True)
class Family:
    """One architecture.

    architecture: its name in config.json. name: its model_type there, and general.architecture in a GGUF file.
    bias: which projections have one: q, k and v alone, or those that config.json asks for, or none.
    sliding_window: whether config.json's window counts; "switched" needs use_sliding_window beside it.
    gguf_permutes_qk: GGUF files hold the rows of q and k in the order of the interleaved rotation.
    """

    architecture: str
    name: str
    bias: Literal["none", "qkv", "configured"] = "none"
    qk_norm: bool = False
    sliding_window: Literal["none", "always", "switched"] = "none"
    gguf_permutes_qk: bool = False


FAMILIES = {
    family.architecture: family
    for family in (
        Family("LlamaForCausalLM", "llama", bias="configured", gguf_permutes_qk=True),
        Family("MistralForCausalLM", "mistral", sliding_window="always", gguf_permutes_qk=True),
        Family("Qwen2ForCausalLM", "qwen2", bias="qkv", sliding_window="switched"),
        Family("Qwen3ForCausalLM", "qwen3", bias="configured", qk_norm=True, sliding_window="switched"),
    )
}


def find_family(name: str, *, source: str) -> Family:
    """Return the family that an architecture, a model_type or a GGUF architecture names.

    Raises ModelLoadError with the supported ones; source is the file to blame.
    """
    for family in FAMILIES.values():
        if name in (family.architecture, family.name):
            return family
    supported = ", ".join(f"{family.architecture} ({family.name})" for family in FAMILIES.values())
    raise ModelLoadError(f"{source}: architecture {name} is not supported; supported are {supported}")
